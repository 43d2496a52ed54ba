"""Attention within a window of w keys on a CPU whose bias is a ScaledDistanceBias: O(n·w) time, O(n) memory.

A block of queries and the keys that they see is a text of its own, whose bias ``scaled_distance_bias`` computes from
the linear pieces of f.
"""

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from fairseq_rpe.attention.double_backward import (
    contiguous_rows,
    dense_attention,
    differentiable_gradients,
    flash_attention,
)
from fairseq_rpe.attention.plan import AttentionPlan
from fairseq_rpe.attention.scaled_distance_bias import ScaledDistanceBlocks, dense_scaled_distance_bias, visible_pieces
from fairseq_rpe.attention.window_attention import block_gradients, is_plain_call
from fairseq_rpe.core.window_bias import WindowedScaledDistanceBias

ROWS = 128  # queries of a block


def has_scaled_window(q: Tensor, k: Tensor, plan: AttentionPlan, dropout: float) -> bool:
    """Return whether :func:`scaled_window_attention` serves a call.

    It serves the calls of :func:`.window_attention.is_plain_call`, which has the same arguments, with a
    ``WindowedScaledDistanceBias`` whose positions are the same in all rows.
    """
    bias = plan.bias
    if not isinstance(bias, WindowedScaledDistanceBias) or len(bias.scaled.query_scale) > 1:
        return False
    return is_plain_call(q, k, plan, dropout)


def scaled_window_attention(q: Tensor, k: Tensor, v: Tensor, plan: AttentionPlan) -> Tensor:
    """Compute attention of n tokens to the nearest w of them, see :func:`has_scaled_window`.

    Args:
        q: (B, H, n, D), rotated.
        k: (B, H, n, D), rotated.
        v: (B, H, n, D).
        plan: plan of the call.

    Returns:
        (B, H, n, D) in q's dtype.
    """
    assert isinstance(plan.bias, WindowedScaledDistanceBias)
    scaled = plan.bias.scaled
    pieces = visible_pieces(scaled, plan)
    tensors = pieces.value, pieces.slope, scaled.distance_values, scaled.query_scale[0]
    qkv = (contiguous_rows(x) for x in (q, k, v))
    out: Tensor = ScaledWindowAttention.apply(*qkv, plan.bias.window, *tensors, pieces.breakpoints, pieces.midpoints)
    return out


class _Blocks:
    """The blocks of a text, with their bias and its gradient.

    Args:
        q: queries (B, H, n, D), for sizes, dtype and device.
        window: w.
        tensors: the tensors of ``ScaledDistanceBlocks`` for the whole text.
    """

    def __init__(self, q: Tensor, window: int, tensors: tuple[Tensor, ...]) -> None:
        self.q, self.window, self.tensors = q, window, tensors
        self.grads = [torch.zeros_like(x) for x in tensors[:4]]

    def __iter__(self) -> Iterator[tuple[slice, slice]]:
        """Yield the queries and the keys of each block."""
        n = self.q.shape[2]
        for start in range(0, n, ROWS):
            stop = min(start + ROWS, n)
            yield slice(start, stop), slice(max(0, start - self.window + 1), stop)

    def bias(self, rows: slice, keys: slice) -> Tensor:
        """Return the bias (1, H, R, K) of a block, the last query first."""
        value, slope, distance_values, query_scale, *others = self.tensors
        count, size = rows.stop - rows.start, keys.stop - keys.start
        self.current = ScaledDistanceBlocks(
            size, self.q, value, slope, distance_values[:size], query_scale[keys], *others
        )
        bias = self.current.block(size - count, size, slice(None))  # (H, R, K)
        if size > self.window:
            # query r from the last one sees key j of the block at the distance K - 1 - r - j
            far = torch.ones(count, size - self.window, dtype=torch.bool)  # the other keys are in every window
            bias[:, :, : size - self.window].masked_fill_(far.flip(1).triu().flip(1), float("-inf"))
        return bias[None]

    def add_gradient(self, rows: slice, keys: slice, ds: Tensor) -> None:
        """Add the gradient of the last bias that :meth:`bias` returned, from ds (B, H, R, K), which is overwritten."""
        size = keys.stop - keys.start
        self.current.accumulate_gradient(ds, size - (rows.stop - rows.start), size, slice(None))
        value, slope, distance_values, query_scale, *_ = self.current.gradients()
        totals = self.grads[0], self.grads[1], self.grads[2][:size], self.grads[3][keys]
        for total, grad in zip(totals, (value, slope, distance_values, query_scale), strict=True):
            assert grad is not None
            total += grad


class ScaledWindowAttention(torch.autograd.Function):
    """Attention within a window by torch's CPU kernel; its backward pass computes the weights of each block again.

    Second derivatives are computed in O(n²) memory.
    """

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, window: int, *tensors: Tensor) -> Tensor:
        """Compute the output and save what the backward pass needs."""
        blocks = _Blocks(q, window, tensors)
        out, lse = torch.empty_like(q), q.new_empty(q.shape[:3], dtype=torch.promote_types(q.dtype, torch.float32))
        for rows, keys in blocks:
            block_out, block_lse = flash_attention(
                q[:, :, rows].flip(2), k[:, :, keys], v[:, :, keys], attn_mask=blocks.bias(rows, keys)
            )
            out[:, :, rows], lse[:, :, rows] = block_out.flip(2), block_lse.flip(2)
        ctx.save_for_backward(q, k, v, out, lse, *tensors)
        ctx.window = window
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        """Return the gradients of the inputs, differentiable if a graph of the backward pass is recorded."""
        q, k, v, out, lse, *tensors = ctx.saved_tensors
        window, n = ctx.window, q.shape[2]
        needs = *ctx.needs_input_grad[:3], *ctx.needs_input_grad[4:]

        def formula(q: Tensor, k: Tensor, v: Tensor, *tensors: Tensor) -> Tensor:
            value, slope, distance_values, query_scale, *others = tensors
            bias = dense_scaled_distance_bias(n, q, value, slope, distance_values, query_scale[None], *others)
            is_far = torch.ones(n, n, dtype=torch.bool).tril(-window)
            return dense_attention(q, k, v, bias.masked_fill(is_far, float("-inf")))

        def compute() -> tuple[Tensor | None, ...]:
            blocks = _Blocks(q, window, tuple(tensors))
            dq, dk, dv = torch.empty_like(q), torch.zeros_like(k, dtype=lse.dtype), torch.zeros_like(v, dtype=lse.dtype)
            for rows, keys in blocks:
                d_out, queries, block_out, block_lse = (x[:, :, rows].flip(2) for x in (grad, q, out, lse))
                block_dq, block_dk, block_dv, ds = block_gradients(
                    d_out, queries, k[:, :, keys], v[:, :, keys], block_out, block_lse, blocks.bias(rows, keys)
                )
                dq[:, :, rows] = block_dq.flip(2)
                dk[:, :, keys] += block_dk
                dv[:, :, keys] += block_dv
                if any(needs[3:]):
                    blocks.add_gradient(rows, keys, ds)
            bias_grads = [total if need else None for total, need in zip(blocks.grads, needs[3:], strict=False)]
            return dq, dk.to(k.dtype), dv.to(v.dtype), *bias_grads, None, None

        dq, dk, dv, *others = differentiable_gradients(compute, formula, grad, (q, k, v, *tensors), needs)
        return dq, dk, dv, None, *others
