"""The bias of a Toeplitz form for attention in blocks: views of one vector, and the gradient of the table."""

from __future__ import annotations

import torch
from torch import Tensor

from .blocks import diagonal_sums, distances


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
        self.sums: Tensor | None = None

    @property
    def holes(self) -> bool:
        return self.table is not None and bool(torch.isneginf(self.table).any())

    def block(self, start: int, stop: int, heads: slice) -> Tensor:
        return distances(self.vector[heads], self.n, start, stop)

    def collect(self, grads: Tensor, start: int, stop: int, heads: slice) -> None:
        if self.sums is None:
            self.sums = torch.zeros_like(self.vector)
        first = self.n - stop
        self.sums[heads, first : first + grads.shape[-1] - 1] += diagonal_sums(grads).sum(0)

    def gradients(self) -> tuple[Tensor]:
        return (self.sums[:, : self.n].flip(1).to(self.table.dtype),)
