"""Triton kernels of a bias's gradient: sums of dS over all pairs that use a parameter, dS being a score's gradient.

With uniform positions a column of a table is a distance, so its gradient is a sum along a diagonal, as is that of
``distance_values``. All square tiles at the same block distance t from the diagonal have the same diagonals at the same
entries: one program adds up these tiles entry by entry and sums along diagonals once, at the end. This recomputes two
products of the backward pass, and needs no atomics and no n² buffer; the order of the sums is fixed.

The other gradients come from programs that each iterate over the keys of a block of queries.
"""

from collections.abc import Sequence
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.nn import functional as F

from fairseq_rpe.attention.toeplitz_attention import LOG2E
from fairseq_rpe.attention.triton import tuning
from fairseq_rpe.attention.triton.tiles import (
    CURVE,
    DISTANCE,
    ENTRIES,
    INTERPRETED,
    LENGTHS,
    MIDPOINT,
    POSITIONS,
    content_of_head,
    curve_bias,
    load_query_rows,
    query_indices,
    score_gradients,
)
from fairseq_rpe.attention.triton.tuning import run


@triton.jit(do_not_specialize=LENGTHS[:5])
def diagonal_sums(
    q, k, v, grad, lse, delta, sums, table, at_q, at_k, until,
    q_b, q_h, q_n, k_b, k_h, k_n, at_q_b, n, m, columns, scale, cap,
    query_terms, key_terms, query_table, key_table, query_columns, key_columns,
    WIDTH: tl.constexpr, BLOCK_D: tl.constexpr, BIAS: tl.constexpr, CONTENT: tl.constexpr, PADDED: tl.constexpr,
    CAPPED: tl.constexpr, GROUP: tl.constexpr, SIZE: tl.constexpr,
):  # fmt: skip
    """Sum dS by distance, or for a scaled-distance bias the gradient of far in base 2.

    A program adds up all tiles of one head and sequence at one block distance t, the difference of their block indices.
    sums (B, H, T, 2·SIZE): entry x is distance (t - 1)·SIZE + x.
    """
    t = tl.program_id(0)
    gap = t * SIZE
    head, batch = tl.program_id(1).to(tl.int64), tl.program_id(2).to(tl.int64)
    rows = tl.arange(0, SIZE)
    queries, grads = q + batch * q_b + head * q_h, grad + batch * q_b + head * q_h
    key_offset = batch * k_b + head // GROUP * k_h
    keys, values = k + key_offset, v + key_offset
    per_head = batch * tl.num_programs(1) + head
    per_row = per_head * n
    table_row = table + head * columns
    head_args = (table_row, at_k, until + batch * m, columns, scale, cap)
    content = content_of_head(
        query_terms, key_terms, query_table, key_table, per_head, n, m, query_columns, key_columns
    )  # fmt: skip
    tile = tl.zeros([SIZE, SIZE], dtype=tl.float32)
    for first in range(tl.maximum(gap - (m - n), 0) // SIZE * SIZE, n, SIZE):
        at, at_q_block = query_indices(first, rows, at_q + batch * at_q_b, n, m, BIAS)
        start = first + (m - n) - gap
        block = load_query_rows(queries, grads, lse + per_row, delta + per_row, first, rows, q_n, n, WIDTH, BLOCK_D)
        ds, _, _ = score_gradients(
            block, gap, at, at_q_block, start, rows, keys, values, k_n, m, head_args, content,
            WIDTH, BLOCK_D, BIAS, CONTENT, PADDED, True, CAPPED,
        )  # fmt: skip
        if BIAS >= CURVE:
            i, j = at[:, None], (start + rows)[None, :]
            visible = (j <= i) & (j >= 0)
            _, _, _, _, slope = curve_bias(
                gap, i, j, at_q_block[:, None], at_k, m, table_row, columns, visible, BIAS - CURVE, True, True
            )  # fmt: skip
            ds *= slope * at_q_block[:, None]
        tile += ds
    diagonal = rows[:, None] - rows[None, :] + SIZE
    at_sum = sums + (per_head * tl.num_programs(0) + t) * (2 * SIZE)
    for x in range(0, 2 * SIZE):
        tl.store(at_sum + x, tl.sum(tl.where(diagonal == x, tile, 0.0)))


@triton.jit(do_not_specialize=LENGTHS[:5])
def walked_sums(
    q, k, v, grad, lse, delta, sums, near_grad, table, at_q, at_k, until,
    q_b, q_h, q_n, k_b, k_h, k_n, at_q_b, at_k_b, n, m, columns, scale, cap,
    query_terms, key_terms, query_table, key_table, query_columns, key_columns,
    WIDTH: tl.constexpr, BLOCK_D: tl.constexpr, BIAS: tl.constexpr, CONTENT: tl.constexpr, PADDED: tl.constexpr,
    CAPPED: tl.constexpr, GROUP: tl.constexpr, SIZE: tl.constexpr,
):  # fmt: skip
    """Sum dS over one block of queries of a head, by column of a table, or by piece of a scaled-distance bias.

    Table at arbitrary positions: sums (H, columns), in no fixed order of the atomics; near_grad is not used.

    Scaled distance: bias[h, i, j] = value[h, p] + slope[h, p]·(x - midpoint[p]), x = far[i-j]·near[i] in piece p. So dS
    goes to value[p] and dS·(x - midpoint[p]) to slope[p], into sums (B, H, blocks, K, 2), and dS·slope[p]·far[i-j] to
    near[i], into near_grad (B, H, n) in base 2. A tile has pairs in few adjacent pieces, and sums dS for each of them,
    into memory of its own program: no two programs add to one element, so the order of the sums is fixed.
    """
    start = tl.program_id(0) * SIZE
    head, batch = tl.program_id(1).to(tl.int64), tl.program_id(2).to(tl.int64)
    rows = tl.arange(0, SIZE)
    at, at_q_block = query_indices(start, rows, at_q + batch * at_q_b, n, m, BIAS)
    offset, per_head = batch * q_b + head * q_h, batch * tl.num_programs(1) + head
    per_row = per_head * n
    block = load_query_rows(
        q + offset, grad + offset, lse + per_row, delta + per_row, start, rows, q_n, n, WIDTH, BLOCK_D
    )
    key_offset = batch * k_b + head // GROUP * k_h
    keys, values = k + key_offset, v + key_offset
    table_row, at_k_row = table + head * columns, at_k + batch * at_k_b
    head_args = (table_row, at_k_row, until + batch * m, columns, scale, cap)
    content = content_of_head(
        query_terms, key_terms, query_table, key_table, per_head, n, m, query_columns, key_columns
    )  # fmt: skip
    program_sums = sums + (per_head * tl.num_programs(0) + tl.program_id(0)) * (columns // 2)
    total = tl.zeros([SIZE], dtype=tl.float32)  # gradient of near
    for first in range(0, tl.minimum(start + SIZE + m - n, m), SIZE):
        gap = start + m - n - first
        ds, _, _ = score_gradients(
            block, gap, at, at_q_block, first, rows, keys, values, k_n, m, head_args, content,
            WIDTH, BLOCK_D, BIAS, CONTENT, PADDED, True, CAPPED,
        )  # fmt: skip
        i, j = at[:, None], (first + rows)[None, :]
        visible = j <= i
        if BIAS == POSITIONS:
            column = at_q_block[:, None] - tl.load(at_k_row + j, mask=j < m, other=0)
            column = tl.minimum(tl.maximum(column, 0), columns - 1)
            tl.atomic_add(sums + head * columns + column, ds, mask=(i < m) & visible)
        else:
            far, x, first_piece, last_piece, slope = curve_bias(
                gap, i, j, at_q_block[:, None], at_k_row, m, table_row, columns, visible, BIAS - CURVE, True, True
            )  # fmt: skip
            total += tl.sum(ds * slope * far, 1)
            for p in range(first_piece, last_piece + ENTRIES, ENTRIES):
                begin = tl.load(table_row + p - ENTRIES, mask=p > 0, other=float("-inf"))
                # NaN is in every piece, so that it propagates
                piece_ds = tl.where((x < begin) | (x >= tl.load(table_row + p)), 0.0, ds)
                # two sums for each piece, of which the table has ENTRIES numbers: so p / 2 is the index of the first
                # one thread does all atomics of an element, in order: a load and a store would need a barrier
                tl.atomic_add(program_sums + p // 2, tl.sum(piece_ds), sem="relaxed")
                offset_in_piece = x - tl.load(table_row + p + MIDPOINT)
                tl.atomic_add(program_sums + p // 2 + 1, tl.sum(piece_ds * offset_in_piece), sem="relaxed")
    if BIAS >= CURVE:
        tl.store(near_grad + per_row + start + rows, total, mask=start + rows < n)


def bias_gradients(shared: dict[str, Any], needed: Sequence[bool], tensors: list[Tensor]) -> list[Tensor | None]:
    """Return the gradients of the tensors of the bias; None for those that are not needed.

    Args:
        shared: the kernels' common arguments by name, including grad, lse and delta.
        needed: whether the gradient of each tensor is needed.
        tensors: tensors of the bias, in one of the combinations that ``TritonAttention`` lists.
    """
    if not any(needed):
        return [None] * len(tensors)
    if shared["BIAS"] == DISTANCE.value:
        grads: list[Tensor | None] = [_distance_sums(shared)]
    elif shared["BIAS"] == POSITIONS.value:
        table, _, _ = tensors
        grads = [_column_sums(shared, table), None, None]
    else:
        grads = _curve_gradients(shared, needed, tensors)
    triples = zip(grads, tensors, needed, strict=True)
    return [x.to(like.dtype) if need and x is not None else None for x, like, need in triples]


def _column_sums(shared: dict[str, Any], table: Tensor) -> Tensor:
    """Return (H, R) float32 sums of dS by column of a table at arbitrary positions."""
    q = shared["q"]
    sums = q.new_zeros(table.shape, dtype=torch.float32)
    size, options = square_tiles(walked_sums, shared)
    blocks = triton.cdiv(shared["n"], size)
    run(walked_sums, lambda meta: blocks, shared, q.shape[1], sums=sums, near_grad=None, **options)
    return sums


def _curve_gradients(shared: dict[str, Any], needed: Sequence[bool], tensors: list[Tensor]) -> list[Tensor | None]:
    """Return float32 gradients of the six tensors of a ScaledDistanceBias."""
    value, _, _, near, _, _ = tensors
    needs_value, needs_slope, needs_far, needs_near, _, _ = needed
    value_grad = slope_grad = far_grad = near_grad = None
    if needs_value or needs_slope or needs_near:
        q = shared["q"]
        size, options = square_tiles(walked_sums, shared)
        blocks, pieces = triton.cdiv(shared["n"], size), shared["columns"] // ENTRIES.value
        piece_grads = q.new_zeros(*q.shape[:2], blocks, pieces, 2, dtype=torch.float32)
        near_grads = q.new_empty(q.shape[:3], dtype=torch.float32)
        run(walked_sums, lambda meta: blocks, shared, q.shape[1], sums=piece_grads, near_grad=near_grads, **options)
        # (H, K, 2) without the table's padding -> (H, K) each
        value_grad, slope_grad = piece_grads.sum((0, 2))[:, : value.shape[1]].unbind(2)
        near_grad = near_grads.sum(1).sum_to_size(near.shape) / LOG2E
    if needs_far:
        far_grad = _distance_sums(shared).sum(0) / LOG2E
    return [value_grad, slope_grad, far_grad, near_grad, None, None]


def _distance_sums(shared: dict[str, Any]) -> Tensor:
    """Return (H, m) float32 sums of dS by distance."""
    q, m, window = shared["q"], shared["m"], shared["window"]
    batch, heads, _, _ = q.shape
    size, options = square_tiles(diagonal_sums, shared)
    distances = m if window is None else window  # those beyond the window have no gradient
    blocks = triton.cdiv(distances, size) + 1
    sums = q.new_empty(batch, heads, blocks, 2 * size, dtype=torch.float32)
    run(diagonal_sums, lambda meta: blocks, shared, heads, sums=sums, **options)
    # neighbouring block distances share half of their distances, and the first begins ``size`` before distance 0
    block_sums = sums.sum(0)  # (H, T, 2·SIZE)
    by_distance = block_sums.new_zeros(heads, blocks + 1, size)
    by_distance[:, :-1] += block_sums[..., :size]
    by_distance[:, 1:] += block_sums[..., size:]
    sums_by_distance = by_distance.flatten(1)[:, size : size + distances]
    return F.pad(sums_by_distance, (0, m - distances))


def square_tiles(kernel: Any, shared: dict[str, Any]) -> tuple[int, dict[str, Any]]:
    """Return the side of square tiles of a kernel, and its launch options."""
    element_bytes = shared["q"].element_size()
    size, warps, stages = squares(kernel.__name__, shared["BLOCK_D"] * element_bytes, element_bytes == 4)
    size = tuning.INTERPRETER_SIZES["BLOCK_N"] if INTERPRETED else size
    return size, {"SIZE": size, "num_warps": warps, "num_stages": stages}


def squares(kernel: str, row: int, float32: bool) -> tuple[int, int, int]:
    """Return side, warps and stages for tiles with rows of ``row`` bytes that fit into registers (``tuning.SIZES``)."""
    if not float32 and row <= (256 if kernel == "walked_sums" else 128):
        return 64, 8, 2
    if row <= 256:
        return 32, 4, 2
    return (16, 4, 1) if float32 else (32, 8, 1)
