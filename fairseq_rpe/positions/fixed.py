"""Positions settled beforehand, for rows that grow to a known length."""

import torch
from torch import Tensor

from ..core import UserError
from .base import Moved, Transform


class Fixed(Transform):
    """Looks positions up in a table; not registered, made by :func:`freeze`."""

    def __init__(self, moved: Moved, fractional: bool) -> None:
        self.moved, self.fractional = moved, fractional
        super().__init__(self.Config())

    def move(self, index: Tensor, lengths: Tensor, generator: torch.Generator | None) -> Moved:
        table = self.moved.k[0].to(index)
        if int(lengths.max()) > len(table):
            raise UserError(f"a row of {int(lengths.max())} tokens is longer than the {len(table)} frozen positions")
        at = index.clamp(0, len(table) - 1).long()
        return Moved(table[at], self.moved.step, self.moved.contiguous)


def freeze(transform: Transform, length: int, generator: torch.Generator | None = None) -> Transform:
    """The positions that ``transform`` gives one row of ``length`` tokens, from its first token on.

    While a row is decoded token by token, interpolation without a ratio would change with every token and random
    positions would be drawn anew; frozen, the cached tokens stay where they are and decoding equals the full forward
    pass over the finished row.

    Args:
        length: of the finished row in tokens; longer rows are refused.
    """
    index = torch.arange(length, dtype=torch.float64)[None]
    return Fixed(transform(index, torch.tensor([length]), generator), transform.fractional)
