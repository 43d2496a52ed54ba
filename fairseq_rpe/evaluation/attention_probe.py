"""A probe in the attention of a trained model: its weights by distance, and how many of the nearest keys hold them.

What is measured is n_emp of :mod:`fairseq_rpe.analysis.empirical_receptive_field`, for each layer and head.
"""

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from fairseq_rpe.analysis.empirical_receptive_field import check_epsilons, n_emp
from fairseq_rpe.attention import Plan
from fairseq_rpe.attention.reference import weights
from fairseq_rpe.core.bias import Positions
from fairseq_rpe.core.errors import UserError

ROWS = 128  # queries whose attention is in memory at a time


class LayerField:
    """What one layer's attention sums up to, row by row, at E values of ε in (0, 1); memory is O(H·length·E)."""

    def __init__(self, length: int, epsilons: Sequence[float]) -> None:
        check_epsilons(epsilons)
        self.length, self.epsilons, self.rows = length, epsilons, 0
        self._mass = self._counts = torch.empty(0)

    def add(self, found: Tensor) -> None:
        """Count weights (B, H, n, m): each row sums to 1, the queries are the last n of m tokens, m <= length."""
        batch, heads, n, m = found.shape
        if not self.rows:
            self._mass = found.new_zeros(heads, self.length, dtype=torch.float64)
            self._counts = found.new_zeros(len(self.epsilons), heads, self.length + 1, dtype=torch.int64)
        self.rows += batch * n
        # Column c of near lies m-1-c keys into the past of the last query: the future of row r fills its first n-1-r.
        near = found.flip(-1).double()
        future = torch.arange(n - 1, -1, -1, device=found.device)
        # A stride of one row and one column puts a diagonal, the entries (r, d + r), into column d.
        wide = F.pad(near.sum(0).flip(1), (0, n))
        self._mass[:, :m] += wide.as_strided((heads, n, m), (n * (m + n), m + n + 1, 1)).sum(1)
        keys = (n_emp(near, self.epsilons) - future).transpose(1, 2).flatten(2)  # (E, H, B·n)
        self._counts.scatter_add_(2, keys, torch.ones_like(keys))

    @property
    def mass(self) -> Tensor:
        """(H, length) float64: mean weight by distance, rows reversed before they are averaged; sums to 1."""
        return self._seen(self._mass) / self.rows

    @property
    def mean(self) -> Tensor:
        """(E, H) float64: mean of n_emp over rows, in keys."""
        counts = self._seen(self._counts)
        return (counts * torch.arange(self.length + 1, device=counts.device)).sum(-1).double() / self.rows

    @property
    def median(self) -> Tensor:
        """(E, H) float64: median of n_emp over rows, in keys; of two middle ones the mean."""
        below = self._seen(self._counts).cumsum(-1)
        low, high = ((below <= place).sum(-1) for place in ((self.rows - 1) // 2, self.rows // 2))
        return (low + high).double() / 2

    def _seen(self, sums: Tensor) -> Tensor:
        if not self.rows:
            raise UserError("no attention was measured: pass at least one block through the model")
        return sums


class Field:
    """While it is open, measures the last ``rows`` queries of each block that passes through a decoder.

    It is an attention backend that returns what the decoder's own returns, so results do not change. Layers are told
    apart by order: a call whose first query is the first token begins the next layer.

    ``decoder``: of a ``transformer_rpe_lm`` in evaluation mode; ``length``: tokens of every block; ``epsilons`` in
    (0, 1).
    """

    def __init__(self, decoder: Any, length: int, rows: int, epsilons: Sequence[float]) -> None:
        if not 1 <= rows <= length:
            raise UserError(f"{rows} rows cannot be measured in blocks of {length} tokens: choose 1 to {length}")
        self.decoder, self.inner, self.length, self.rows = decoder, decoder.attend, length, rows
        self.layers = [LayerField(length, epsilons) for _ in decoder.layers]
        self._layer = -1

    def __enter__(self) -> "Field":
        self.decoder.attend = self
        return self

    def __exit__(self, *_: object) -> None:
        self.decoder.attend = self.inner

    def __call__(self, q: Tensor, k: Tensor, v: Tensor, plan: Plan, dropout: float = 0.0) -> Tensor:
        """Attention as every backend computes it: q (B, H, n, D), k, v (B, H, m, D) -> (B, H, n, D)."""
        self.measure(q, k, v, plan)
        return self.inner(q, k, v, plan, dropout)

    def measure(self, q: Tensor, k: Tensor, v: Tensor, plan: Plan) -> None:
        if plan.padding is not None:
            raise UserError("the receptive field is measured in full blocks: leave out rows with padding")
        before = k.shape[2] - q.shape[2]
        if before == 0:
            self._layer = (self._layer + 1) % len(self.layers)
        if k.shape[2] > self.length:
            raise UserError(f"a block of {k.shape[2]} tokens does not fit a measurement at {self.length}")
        for start in range(max(0, self.length - self.rows - before), q.shape[2], ROWS):
            stop = min(start + ROWS, q.shape[2])
            seen = before + stop
            self.look(self._layer, q[:, :, start:stop], k[:, :, :seen], v[:, :, :seen], plan.part(start, stop))

    def look(self, layer: int, q: Tensor, k: Tensor, v: Tensor, plan: Plan) -> None:
        """Take in a few rows of a layer and all keys that they see."""
        self.layers[layer].add(weights(q, k, plan))


@torch.no_grad()
def bias_alone(decoder: Any, length: int, rows: int, epsilons: Sequence[float]) -> list[LayerField] | None:
    """What each layer of :class:`Field` would measure if q·k were 0 everywhere: its bias alone, in the same rows.

    A row that sees m keys then has n(ε) = inf{ j : Σ_(t<j) b_t > (1 - ε)·Σ_(t<m) b_t }, b = exp(bias): the theoretical
    receptive field of Eq. 22 with its series ended at m. None without an additive bias, or where scores or positions
    are changed.
    """
    encodings = [decoder.encoding_of(layer) for layer in range(len(decoder.layers))]
    if decoder.moves.active(False) is not None or any(e.is_content_dependent or e.needs_token_ids for e in encodings):
        return None
    first = next(decoder.parameters())
    wide = torch.promote_types(first.dtype, torch.float32)
    positions = Positions.arange(length, device=first.device, dtype=wide)
    found = Field(decoder, length, rows, epsilons)
    for encoding in encodings:
        if (form := encoding.position_bias(positions)) is None:
            return None
        nothing = torch.zeros(1, encoding.heads, length, 1, device=positions.k.device)
        found.measure(nothing, nothing, nothing, Plan(positions, form))
    return found.layers
