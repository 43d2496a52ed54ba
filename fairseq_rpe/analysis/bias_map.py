"""An additive bias as numbers to look at: of queries and keys, for some of its heads."""

from collections.abc import Sequence

import torch
from torch import Tensor

from fairseq_rpe.core.bias import Positions, block
from fairseq_rpe.encodings import Encoding

_CELLS = 256  # queries and keys shown at most: a panel has no more pixels than that
_HEADS = 4


def some_heads(heads: int) -> list[int]:
    """Indices of up to four heads, evenly spread from the first to the last."""
    return list(range(heads)) if heads <= _HEADS else [round(k * (heads - 1) / (_HEADS - 1)) for k in range(_HEADS)]


@torch.no_grad()
def bias_map(encoding: Encoding, length: int, heads: Sequence[int]) -> tuple[Tensor, int]:
    """The exact bias of ``heads`` at plain positions: (len(heads), n, n) float64, and the tokens between neighbours.

    Every token up to 256, beyond that every second, third, …; row i is the query, column j the key. The encoding has
    a bias.
    """
    first = next(encoding.parameters(), None)
    pos = Positions.arange(length, dtype=torch.float64, device=None if first is None else first.device)
    step = -(-length // _CELLS)
    shown = slice(0, None, step)
    return block(encoding.position_bias(pos), pos, shown, shown)[0, list(heads)].cpu(), step
