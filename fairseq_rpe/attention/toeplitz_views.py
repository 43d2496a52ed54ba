"""Views of blocks whose rows are reversed: entry (r, j) is of the distance that r + j alone decides.

A block has R rows, the queries stop - 1, stop - 2, …, and the columns of the keys 0 … stop - 1 = M - 1. Entries with
r + j >= M are in the future.
"""

from torch import Tensor


def distances(vector: Tensor, n: int, start: int, stop: int) -> Tensor:
    """(…, 2n) vector, entry x for distance n-1-x -> (…, R, stop) view of a block with reversed rows."""
    shape, strides = (*vector.shape[:-1], stop - start, stop), (*vector.stride()[:-1], 1, 1)
    return vector.as_strided(shape, strides, vector.storage_offset() + n - stop)


def along_diagonals(x: Tensor, first: int = 0, last: int | None = None) -> Tensor:
    """Block (…, R, M) without gaps in memory -> (…, R, last - first) view: (r, y) is (r, j) with r + j = first + y.

    A row stride of M - 1 instead of M shifts row r by r. Where j would be negative stands (r - 1, M + j), which is in
    the future, as (r - 1) + (M + j) = M - 1 + first + y. But at first + y = 0 it is not, and only row 0 is of use.
    """
    cols = x.shape[-1]
    shape = (*x.shape[:-1], (cols if last is None else last) - first)
    return x.as_strided(shape, (*x.stride()[:-2], cols - 1, 1), x.storage_offset() + first)


def diagonal_sums(x: Tensor) -> Tensor:
    """Block (…, R, M) without gaps, zero in the future -> (…, M): entry y sums all (r, j) with r + j = y."""
    sums = along_diagonals(x).sum(-2)
    sums[..., 0] = x[..., 0, 0]
    return sums
