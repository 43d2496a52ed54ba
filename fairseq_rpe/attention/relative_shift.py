"""Views that shift each row of a matrix by its index: from columns by distance to columns by key, and back.

The product of r queries with a table has one column for each distance; a bias has one column for each of W keys. Let
column x = W - 1 - d of the product be that of distance d. In row i it belongs r - 1 - i columns further left. One
column of padding and another shape of the same memory shift all rows at once (skewing, Huang et al. 2018, arXiv
1809.04281). This needs evenly spaced positions; otherwise each pair is looked up.
"""

import functools
from typing import Any

import torch
from torch import Tensor

from fairseq_rpe.attention.plan import AttentionPlan
from fairseq_rpe.attention.reference import sum_relative_values
from fairseq_rpe.core.bias import Bias, KeyTableBias, QueryTableBias, RelativeValues, SumBias, TokenBias
from fairseq_rpe.core.positions import Positions


def materialize_fast(bias: Bias, pos: Positions) -> Tensor:
    """Return the bias (B or 1, H, n, m) of all queries and keys; its entries in the future are arbitrary."""
    if isinstance(bias, SumBias):
        return functools.reduce(torch.add, (materialize_fast(term, pos) for term in bias.terms))
    if isinstance(bias, QueryTableBias) and _is_even(bias, pos):
        return _query_table_bias(bias, pos.k.shape[1])
    if isinstance(bias, KeyTableBias) and _is_even(bias, pos):
        return _key_table_bias(bias, pos.q.shape[1])
    return bias.materialize(pos)


def bias_terms(bias: Bias, pos: Positions, dtype: torch.dtype) -> list[Tensor]:
    """Return terms whose sum is the bias of all queries and keys; its entries in the future are arbitrary.

    Args:
        bias: bias of n queries and m keys.
        pos: their positions.
        dtype: dtype of the terms.

    Returns:
        Tensors (B or 1, H or 1, n, w or 1). One of w columns belongs to the last w keys, and is 0 for the others.
    """
    if isinstance(bias, SumBias):
        return [x for term in bias.terms for x in bias_terms(term, pos, dtype)]
    if isinstance(bias, TokenBias):
        difference: Tensor = _TokenSums.apply(bias.query, bias.key, dtype)
        return [difference]
    if isinstance(bias, QueryTableBias) and _is_even(bias, pos):
        return [x.to(dtype) for x in _query_table_terms(bias, pos.k.shape[1])]
    return [materialize_fast(bias, pos).to(dtype)]


def sum_relative_values_fast(weights: Tensor, values: RelativeValues, plan: AttentionPlan) -> Tensor:
    """Return what :func:`~fairseq_rpe.attention.reference.sum_relative_values` returns, by shifts where possible.

    Args:
        weights: (B, H, n, m), 0 in the future.
        values: table of R relative value vectors (H or 1, R, D).
        plan: positions of the n queries and m keys.

    Returns:
        (B, H, n, D).
    """
    if not _is_even(values, plan.positions):
        return sum_relative_values(weights, values, plan)
    vectors, keys = values.vectors[:, values.origin :].to(weights.dtype), weights.shape[3]  # (H or 1, R, D)
    near = min(vectors.shape[1] - 1, keys)  # number of distances before the table's last column
    by_distance = inverse_relative_shift(weights)  # (B, H, n, m): column y is distance m - 1 - y
    out = torch.matmul(by_distance[..., keys - near :], vectors[:, :near].flip(1))  # (B, H, n, D)
    # all larger distances share the last column
    return out + by_distance[..., : keys - near].sum(-1, keepdim=True) * vectors[:, None, -1]


def relative_shift(x: Tensor) -> Tensor:
    """Shift row i of r by r - 1 - i columns to the left: (B, H, r, 1 + W) -> (B, H, r, W).

    The first column is padding. Entry (i, j) of the result is x[i, 1 + r - 1 - i + j].
    """
    batch, heads, rows, cols = x.shape
    return x.reshape(batch, heads, cols, rows)[:, :, 1:].reshape(batch, heads, rows, cols - 1)


def inverse_relative_shift(x: Tensor) -> Tensor:
    """Undo :func:`relative_shift` for x (B, H, r, W) that is 0 in the future.

    Entry (i, y) of the result (B, H, r, W) is x[i, y - (r - 1 - i)], of distance W - 1 - y.
    """
    batch, heads, rows, cols = x.shape
    padding = x.new_zeros(1, 1, 1).expand(batch, heads, rows)
    flat = torch.cat([padding, x.reshape(batch, heads, -1)], dim=2)  # (B, H, r + r·W)
    return flat.view(batch, heads, rows, cols + 1)[..., 1:]


def distance_view(vector: Tensor, n: int, start: int, stop: int) -> Tensor:
    """View a vector over distances as a block of a Toeplitz matrix with reversed rows.

    Row r of the block is query stop-1-r and column j is key j, so entry (r, j) has the distance stop-1-r-j.

    Args:
        vector: (…, 2n), entry x for distance n-1-x.
        n: number of queries and keys of the whole matrix.
        start: first query of the block.
        stop: end of the block's queries, and of its keys.

    Returns:
        (…, R, stop) with R = stop - start; entries with r + j >= stop are in the future.
    """
    # entry (r, j) is at x = n - stop + r + j: both strides are 1
    shape, strides = (*vector.shape[:-1], stop - start, stop), (*vector.stride()[:-1], 1, 1)
    return vector.as_strided(shape, strides, vector.storage_offset() + n - stop)


def along_diagonals(x: Tensor, first: int = 0, last: int | None = None) -> Tensor:
    """View a block with reversed rows by distance: column y of the result has the pairs (r, j) with r + j = first + y.

    A row stride of M - 1 instead of M shifts row r by r. Where j would be negative, the view reads (r - 1, M + j),
    which is in the future, as (r - 1) + (M + j) = M - 1 + first + y. The exception is first + y = 0, where only row 0
    is meaningful.

    Args:
        x: (…, R, M) without gaps in memory.
        first: first r + j to view.
        last: end of the r + j to view, or None for M.

    Returns:
        (…, R, last - first) view; entry (r, y) is (r, j) with r + j = first + y.
    """
    cols = x.shape[-1]
    shape = (*x.shape[:-1], (cols if last is None else last) - first)
    return x.as_strided(shape, (*x.stride()[:-2], cols - 1, 1), x.storage_offset() + first)


def diagonal_sums(x: Tensor) -> Tensor:
    """Sum a block with reversed rows by distance: (…, R, M) -> (…, M), entry y the sum of all (r, j) with r + j = y.

    The block has no gaps in memory and is 0 in the future.
    """
    sums = along_diagonals(x).sum(-2)
    sums[..., 0] = x[..., 0, 0]  # only row 0 of column 0 is meaningful
    return sums


def _is_even(table: QueryTableBias | KeyTableBias | RelativeValues, pos: Positions) -> bool:
    return pos.contiguous and pos.step == table.step


def _query_table_terms(bias: QueryTableBias, keys: int) -> list[Tensor]:
    """Return terms whose sum is the bias of n queries and m = ``keys`` keys at evenly spaced positions.

    They are (B, H, n, m), or (B, H, n, 1) and (B, H, n, w). In the second case, all queries see all but the last w keys
    at the distance of the table's last column or beyond, and these keys share a product.
    """
    rows = bias.query.shape[2]
    vectors = bias.vectors[:, bias.origin : bias.origin + keys].to(bias.query.dtype)  # (H or 1, R', E)
    near = vectors.shape[1] - 1 + rows - 1  # number of keys nearer than the last column to some query
    terms = []
    if 1 < near < keys:  # a term of one column is added to all keys
        last = vectors[:, -1:]
        terms.append(torch.matmul(bias.query, last.mT))  # (B, H, n, 1)
        vectors, keys = vectors - last, near
    # from far to near; the last vector repeats for larger distances, and one row more is the padding of the shift
    table = torch.cat([vectors[:, -1:].expand(-1, 1 + keys - vectors.shape[1], -1), vectors.flip(1)], dim=1)
    shifted: Tensor = _ShiftedProducts.apply(bias.query, table)
    return [*terms, shifted]


class _ShiftedProducts(torch.autograd.Function):
    """Computes the products of query (B, H, n, E) and table (H or 1, 1 + W, E), shifted: (B, H, n, W).

    The result is a view of the products by distance, so that the shift copies nothing.
    """

    @staticmethod
    def forward(ctx: Any, query: Tensor, table: Tensor) -> Tensor:
        ctx.save_for_backward(query, table)
        by_distance = torch.matmul(query, table.mT)  # (B, H, n, 1 + W)
        rows, cols = by_distance.shape[2:]
        # rows that are one column shorter in the same memory
        return by_distance.flatten(2)[..., rows:].unflatten(2, (rows, cols - 1))

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        query, table = ctx.saved_tensors
        rows, cols = grad.shape[2:]
        padding = grad.new_zeros(1, 1, 1).expand(*grad.shape[:2], rows)
        by_distance = torch.cat([padding, grad.flatten(2)], dim=2).unflatten(2, (rows, 1 + cols))
        query_grad, table_grad = ctx.needs_input_grad
        return (
            torch.matmul(by_distance, table) if query_grad else None,
            torch.matmul(by_distance.mT, query).sum_to_size(table.shape) if table_grad else None,
        )


class _TokenSums(torch.autograd.Function):
    """Computes query[…, i] + key[…, j] (B, H, n, m) from query (B, H, n) and key (B, H, m) in another dtype.

    From float64 to float32, it adds the numbers relative to an anchor, each as a float32 and a float32 that holds the
    first one's rounding error. The sum is as precise as one in float64, without a matrix in float64.
    """

    @staticmethod
    def forward(ctx: Any, query: Tensor, key: Tensor, dtype: torch.dtype) -> Tensor:
        ctx.dtypes = query.dtype, key.dtype
        if dtype == torch.float64 or query.dtype != torch.float64 or not query.shape[2]:
            return (query[..., None] + key[:, :, None]).to(dtype)
        anchor = query[..., :1]
        rows, columns = query - anchor, key + anchor
        high_rows, high_columns = rows.to(dtype), columns.to(dtype)
        sums = high_rows[..., None] + high_columns[:, :, None]  # (B, H, n, m)
        sums += (rows - high_rows).to(dtype)[..., None]
        sums += (columns - high_columns).to(dtype)[:, :, None]
        return sums

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        (query_dtype, key_dtype), (needs_query, needs_key, _) = ctx.dtypes, ctx.needs_input_grad
        # in float64, as each entry adds to a row and to a column, and the gradients of gates are differences of these
        grad = grad.to(query_dtype)
        # a product with ones is faster than a sum
        query_grad = torch.matmul(grad, grad.new_ones(grad.shape[3])) if needs_query else None
        key_grad = torch.matmul(grad.new_ones(grad.shape[2]), grad).to(key_dtype) if needs_key else None
        return query_grad, key_grad, None


def _query_table_bias(bias: QueryTableBias, keys: int) -> Tensor:
    """Return the bias (B, H, n, m) of n queries and m = ``keys`` keys at evenly spaced positions."""
    vectors = bias.vectors[:, bias.origin : bias.origin + keys].to(bias.query.dtype)  # (H or 1, R', E)
    by_distance = torch.matmul(bias.query, vectors.mT)  # (B, H, n, R')
    # repeat the last column for larger distances; one column more is the padding of the shift
    padding = by_distance[..., -1:].expand(-1, -1, -1, 1 + keys - by_distance.shape[3])
    return relative_shift(torch.cat([padding, by_distance.flip(3)], dim=3))


def _key_table_bias(bias: KeyTableBias, rows: int) -> Tensor:
    """Return the bias (B, H, n, m) of n = ``rows`` queries and m keys at evenly spaced positions.

    Keys that every query sees at the last column's distance or beyond need no table; the others are the near keys.
    """
    key, vectors = bias.key, bias.vectors[:, bias.origin :].to(bias.key.dtype)
    batch, heads, keys, _ = key.shape
    last = vectors.shape[1] - 1
    near = min(keys, last + rows)  # number of near keys
    # (B, H, n, m - near)
    far_bias = torch.matmul(key[:, :, : keys - near], vectors[:, -1, :, None]).mT.expand(-1, -1, rows, -1)
    by_distance = torch.matmul(key[:, :, keys - near :], vectors[:, :near].mT)  # (B, H, near, R')
    beyond = by_distance[..., -1:].expand(-1, -1, -1, near - by_distance.shape[3])
    # row j of the table is near key j, column x is distance x - n. Query i is at distance near - n + i - j from it, so
    # key j needs n columns from x = near - j on: the distances of queries 0 … n-1
    future = by_distance.new_zeros(1, 1, 1, 1).expand(batch, heads, near, rows)
    table = torch.cat([future, by_distance, beyond], dim=3)  # (B, H, near, rows + near)
    # rows that are one column shorter in the same memory: row j begins at x = near - j
    shifted = table.flatten(2)[..., near:].view(batch, heads, near, near + rows - 1)
    return torch.cat([far_bias, shifted[..., :rows].mT], dim=3)  # (B, H, rows, keys)
