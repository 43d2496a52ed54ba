"""Triton kernel of a curve's gradient: of value and slope in each piece, and of ``near``. Its far: ``table_gradient``.

bias[h, i, j] = value[h, p] + slope[h, p]·(x - middle[p]) with x = far[i-j]·near[i] in piece p. So dS goes to value[p],
dS·(x - middle[p]) to slope[p] and dS·slope[p]·far[i-j] to near[i]. One program walks along the keys of a block of
queries. A tile meets few pieces, neighbours of each other, and sums dS for each of them, into places of the program's
own: no two programs add to one number, so sums are taken in a fixed order.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..blocks import LOG2E
from .table_gradient import distance_sums, squares
from .tiles import CURVE, LENGTHS, on_curve, query_gradients, query_rows
from .tuning import run


@triton.jit(do_not_specialize=LENGTHS[:3])
def curve_sums(
    q, k, v, grad, lse, delta, of_pieces, of_near, table, at_q, at_k, padding,
    q_b, q_h, q_n, k_b, k_h, k_n, at_q_b, n, m, columns, scale,
    WIDTH: tl.constexpr, BLOCK_D: tl.constexpr, BIAS: tl.constexpr, PADDED: tl.constexpr, SIZE: tl.constexpr,
):  # fmt: skip
    """One block of queries of a head; of_pieces (B, H, blocks, K, 2) begins as 0, of_near (B, H, n) is in base 2."""
    start = tl.program_id(0) * SIZE
    head, batch = tl.program_id(1).to(tl.int64), tl.program_id(2).to(tl.int64)
    i = start + tl.arange(0, SIZE)
    at = i + (m - n)
    near = tl.load(at_q + batch * at_q_b + i, mask=i < n, other=0)
    offset, per_head = batch * q_b + head * q_h, batch * tl.num_programs(1) + head
    q_block, grad_block, lse_block, delta_block = query_rows(
        q + offset, grad + offset, lse + per_head * n, delta + per_head * n, i, q_n, n, WIDTH, BLOCK_D
    )
    keys, values = k + batch * k_b + head * k_h, v + batch * k_b + head * k_h
    table_row, padding_row = table + head * columns, padding + batch * m
    mine = of_pieces + (per_head * tl.num_programs(0) + tl.program_id(0)) * (columns // 2)
    total = tl.zeros([SIZE], dtype=tl.float32)
    for first in range(0, tl.minimum(start + SIZE + m - n, m), SIZE):
        j = first + tl.arange(0, SIZE)
        ds, _ = query_gradients(
            q_block, grad_block, lse_block, delta_block, at, near, j, keys, values, k_n, table_row, at_k, padding_row,
            m, columns, scale, WIDTH, BLOCK_D, BIAS, PADDED, True,
        )  # fmt: skip
        visible = j[None, :] <= at[:, None]
        piece, place, slope, _ = on_curve(
            at[:, None], j[None, :], near[:, None], at_k, table_row, visible, BIAS - CURVE, True
        )  # fmt: skip
        far = tl.load(at_k + (at[:, None] - j[None, :]), mask=visible, other=0.0)
        total += tl.sum(ds * slope * far, 1)
        nearest = tl.min(tl.where(ds != 0, piece, columns))
        for p in range(nearest, tl.max(tl.where(ds != 0, piece, 0)) + 4, 4):
            here = tl.where(piece == p, ds, 0.0)
            # of one thread, one after the other: a load and a store would need a barrier
            tl.atomic_add(mine + p // 2, tl.sum(here), sem="relaxed")
            tl.atomic_add(mine + p // 2 + 1, tl.sum(here * place), sem="relaxed")
    tl.store(of_near + per_head * n + i, total, mask=i < n)


def curve_gradients(
    shared: dict[str, Any], needed: Sequence[bool], value: Tensor, slope: Tensor, far: Tensor, near: Tensor
) -> list[Tensor | None]:
    """Gradients of value (H, K), slope (H, K), far (m,) and near (B or 1, n); None for those that are not needed.

    shared: the kernels' arguments, with grad, lse and delta.
    """
    found: list[Tensor | None] = [None] * 4
    if needed[0] or needed[1] or needed[3]:
        q = shared["q"]
        size, options = squares(shared)
        blocks = triton.cdiv(shared["n"], size)
        of_pieces = q.new_zeros(*q.shape[:2], blocks, shared["columns"] // 4, 2, dtype=torch.float32)
        of_near = q.new_empty(q.shape[:3], dtype=torch.float32)
        run(curve_sums, lambda meta: blocks, shared, of_pieces=of_pieces, of_near=of_near, **options)
        found[:2] = of_pieces.sum((0, 2))[:, : value.shape[1]].unbind(2)
        found[3] = of_near.sum(1).sum_to_size(near.shape) / LOG2E
    if needed[2]:
        found[2] = distance_sums(shared).sum(0) / LOG2E
    given = zip(found, (value, slope, far, near), needed, strict=True)
    return [x.to(like.dtype) if wanted else None for x, like, wanted in given]
