"""A bias of the distance, block by block of query rows, in O(n) memory.

Each block has its query rows reversed, so that the distance of entry (row r, key j) depends on r + j alone. The block
is then a strided view (row stride 1, column stride 1) of one vector, and the gradient of the vector is a column sum of
a skewed view of the block (see ``relative_shift``).
"""

import torch
from torch import Tensor

from fairseq_rpe.attention.double_backward import causal_bias
from fairseq_rpe.attention.plan import dense_from_table
from fairseq_rpe.attention.relative_shift import diagonal_sums, distance_view


class ToeplitzBlocks:
    """Computes the bias ``bias[h, i, j] = table[h, i - j]`` block by block, and the gradient of the table.

    Subclasses compute other biases from other tensors.

    Args:
        n: number of queries and keys.
        like: the queries (B, H, n, D), for device, dtype and H.
        table: (H, n) of the distances 0 … n-1, or None for no bias.

    Attributes:
        is_computed: whether a block is computed into a buffer; otherwise it is a view. Callers take only a few heads of
            a computed block at a time, so that it stays in the cache.
    """

    is_computed = False

    def __init__(self, n: int, like: Tensor, table: Tensor | None = None) -> None:
        self.n, self.table = n, table
        wide = torch.promote_types(like.dtype, torch.float32)
        # (H, 2n): entry x holds the bias of distance n-1-x, and -inf where that distance is in the future
        self.vector = like.new_full((like.shape[1], 2 * n), float("-inf"), dtype=wide)
        self.vector[:, :n] = 0.0 if table is None else table.detach().flip(1)
        self.grad_sum = torch.zeros_like(self.vector)

    @property
    def may_mask_past(self) -> bool:
        """Whether the bias may be -inf for past keys, so that all scores of a query and a range of keys may be -inf."""
        return self.table is not None and bool(torch.isneginf(self.table).any())

    @staticmethod
    def dense_formula(n: int, like: Tensor, *tensors: Tensor) -> Tensor:
        """Return the bias (n, n) or (H, n, n) by differentiable operations on ``tensors``; -inf in the future."""
        return dense_from_table(tensors[0]) if tensors else causal_bias(n, n, like)

    def block(self, start: int, stop: int, heads: slice) -> Tensor:
        """Return the bias of a block of queries and all keys up to the last of them.

        Args:
            start: first query of the block.
            stop: end of the block's queries, and of its keys.
            heads: heads to compute.

        Returns:
            (h, R, M) with R = stop - start and M = stop: row r is query stop-1-r, column j is key j, -inf in the
            future. The memory is valid until the next call.
        """
        return distance_view(self.vector[heads], self.n, start, stop)

    def full_bias(self) -> Tensor:
        """Return the bias (H, n, n) of all queries and keys, queries in their order."""
        return self.block(0, self.n, slice(None)).flip(1)

    def accumulate_gradient(self, grads: Tensor, start: int, stop: int, heads: slice) -> None:
        """Add the gradient of the block that :meth:`block` returned last.

        Args:
            grads: (b, h, R, M), zero in the future; may be overwritten.
            start: ``start`` of that block.
            stop: ``stop`` of that block.
            heads: ``heads`` of that block.
        """
        # column y of the diagonal sums is distance stop-1-y, which is entry n-stop+y of the vector
        self.grad_sum[heads, self.n - stop : self.n] += diagonal_sums(grads).sum(0)

    def gradients(self) -> tuple[Tensor | None, ...]:
        """Return the gradients of the tensors of the bias, after every block has been accumulated."""
        return (None if self.table is None else self.grad_sum[:, : self.n].flip(1).to(self.table.dtype),)
