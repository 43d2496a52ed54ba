"""A Toeplitz form's table by index; its bias for attention in blocks, views of one vector; the table's gradient."""

import torch
from torch import Tensor

from ..core import Positions, Toeplitz
from .blocks import diagonal_sums, distances


def by_distance(form: Toeplitz, n: int) -> Tensor:
    """(H, n) table of distances 0 … n-1 steps; beyond the table's end its last column."""
    table = form.table[:, form.origin : form.origin + n]
    missing = n - table.shape[1]
    return torch.cat([table, form.table[:, -1:].expand(-1, missing)], dim=1) if missing else table


def evenly_spaced(form: Toeplitz, pos: Positions) -> bool:
    """Whether the column of a query and a key follows from their indices alone, as :func:`by_distance` has it."""
    return pos.contiguous and pos.step == form.step


def columns(form: Toeplitz, pos: Positions) -> tuple[Tensor, Tensor]:
    """int32 a (B or 1, n) and b (B or 1, m) with a_i - b_j the column of the table, before clamping."""
    first = pos.k[:, :1]  # a common offset need not be a multiple of the step
    a, b = (torch.round((x - first) / form.step).int().contiguous() for x in (pos.q, pos.k))
    return a + form.origin, b


class ToeplitzBias:
    """bias[h, i, j] = table[h, i-j]: see :class:`~fairseq_rpe.attention.blocks.BlockBias`.

    table: (H, n) of the distances 0 … n-1, or none for no bias.
    """

    made = False

    def __init__(self, n: int, like: Tensor, table: Tensor | None = None) -> None:
        self.n, self.table = n, table
        wide = torch.promote_types(like.dtype, torch.float32)
        # entry x holds the bias of distance n-1-x, and -inf where that is the future
        self.vector = like.new_full((like.shape[1], 2 * n), float("-inf"), dtype=wide)
        self.vector[:, :n] = 0.0 if table is None else table.detach().flip(1)
        self.sums = torch.zeros_like(self.vector)

    @property
    def holes(self) -> bool:
        return self.table is not None and bool(torch.isneginf(self.table).any())

    def block(self, start: int, stop: int, heads: slice) -> Tensor:
        return distances(self.vector[heads], self.n, start, stop)

    def collect(self, grads: Tensor, start: int, stop: int, heads: slice) -> None:
        first = self.n - stop
        self.sums[heads, first : first + grads.shape[-1] - 1] += diagonal_sums(grads).sum(0)

    def gradients(self) -> tuple[Tensor]:
        return (self.sums[:, : self.n].flip(1).to(self.table.dtype),)
