"""Attention within a window of w keys on a CPU: blocks of queries against the keys that they see, O(n·w) time.

All blocks of R queries see R + w - 1 keys, with the same bias, so many blocks are computed in one call of torch's
kernel: as its batch. The blocks are views of the queries, keys and values, so nothing is copied, and memory is O(n).
"""

from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from fairseq_rpe.attention.double_backward import (
    contiguous_rows,
    dense_attention,
    differentiable_gradients,
    flash_attention,
    flash_attention_backward,
)
from fairseq_rpe.attention.plan import AttentionPlan, is_evenly_spaced
from fairseq_rpe.core.bias import ToeplitzBias

MIN_ROWS, MAX_ROWS = 64, 512  # queries of a block, a quarter of the window within these limits
GROUP_ELEMENTS = 1 << 21  # elements of the gradients of keys that the blocks of one call have


def has_window_blocks(q: Tensor, k: Tensor, plan: AttentionPlan, dropout: float) -> bool:
    """Return whether :func:`window_attention` serves a call.

    It serves causal attention of n > w tokens to themselves on a CPU, without dropout, padding or separate documents,
    whose bias is a table by distance that needs no gradient.

    Args:
        q: (B, H, n, D).
        k: (B, H, m, D).
        plan: plan of the call.
        dropout: probability of dropping an attention weight.
    """
    n, bias = q.shape[2], plan.bias
    if plan.window is None or plan.window >= n or n != k.shape[2] or dropout > 0 or q.device.type != "cpu":
        return False
    if plan.padding is not None or plan.last_query is not None or plan.is_content_dependent or plan.changes_softmax:
        return False
    if not isinstance(bias, ToeplitzBias) or not is_evenly_spaced(bias, plan.positions):
        return False
    return not (torch.is_grad_enabled() and plan.bias_may_need_grad)


def window_attention(q: Tensor, k: Tensor, v: Tensor, plan: AttentionPlan) -> Tensor:
    """Compute attention of n tokens to the nearest w = ``plan.window`` of them, see :func:`has_window_blocks`.

    Args:
        q: (B, H, n, D), rotated.
        k: (B, H, n, D), rotated.
        v: (B, H, n, D).
        plan: plan of the call.

    Returns:
        (B, H, n, D) in q's dtype.
    """
    out: Tensor = WindowAttention.apply(contiguous_rows(q), contiguous_rows(k), contiguous_rows(v), plan)
    return out


class _Call(NamedTuple):
    """Blocks of queries, one after another, that one call computes.

    Attributes:
        start: first query of the first block.
        rows: queries of a block.
        blocks: number of blocks.
        keys: keys that a block sees; the last of them is its last query.
    """

    start: int
    rows: int
    blocks: int
    keys: int

    def views(self, x: Tensor, count: int) -> list[Tensor]:
        """Return the last ``count`` tokens up to the last query of each block, as views of x (B, H, n, …).

        The views are (B, H, count, …) of one block, or for each row of the batch (blocks, H, count, …).
        """
        first = self.start + self.rows - count
        stop = self.start + self.blocks * self.rows
        if self.blocks == 1:
            return [x[:, :, first:stop]]
        # (H, blocks, …, count) -> (blocks, H, count, …)
        return [row[:, first:stop].unfold(1, count, self.rows).transpose(0, 1).movedim(-1, 2) for row in x]

    def add(self, total: Tensor, index: int, grads: Tensor) -> None:
        """Add the gradients of the keys of each block to those of all keys, in place.

        Args:
            total: (B, H, n, D).
            index: index of the result of :meth:`views` that has these gradients.
            grads: (B, H, keys, D) of one block, or (blocks, H, keys, D).
        """
        first = self.start + self.rows - self.keys
        if self.blocks == 1:
            total[:, :, first : first + self.keys] += grads
            return
        # blocks overlap, but the keys at one offset, R at a time, are others in each block
        for offset in range(0, self.keys, self.rows):
            at = slice(first + offset, first + offset + self.blocks * self.rows)
            by_block = total[index, :, at].unflatten(1, (self.blocks, self.rows))  # (H, blocks, R, D)
            by_block += grads[:, :, offset : offset + self.rows].transpose(0, 1)


def _calls(shape: torch.Size, rows: int, before: int) -> Iterator[_Call]:
    """Yield the calls for q (B, H, n, D): blocks of R queries that see ``before`` keys, a multiple of R, before it."""
    _, heads, n, width = shape
    complete, near = n // rows, before // rows
    for block in range(min(near, complete)):  # blocks that see all keys before them
        yield _Call(block * rows, rows, 1, (block + 1) * rows)
    size = max(1, GROUP_ELEMENTS // (heads * (rows + before) * width))
    for block in range(near, complete, size):
        yield _Call(block * rows, rows, min(size, complete - block), rows + before)
    if (rest := n % rows) > 0:
        start = complete * rows
        yield _Call(start, rest, 1, rest + min(before, start))


class WindowAttention(torch.autograd.Function):
    """Attention within a window, by torch's CPU kernel. Second derivatives are computed in O(n²) memory."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, plan: AttentionPlan) -> Tensor:
        """Compute the output and save what the backward pass needs."""
        mask, rows, before = _window_mask(plan, q)
        out = torch.empty_like(q)
        lse = q.new_empty(q.shape[:3], dtype=mask.dtype)
        for call in _calls(q.shape, rows, before):
            call_mask = mask[:, :, : call.rows, before + call.rows - call.keys : before + call.rows]
            parts = (call.views(x, call.rows) for x in (out, lse, q)), (call.views(x, call.keys) for x in (k, v))
            for part_out, part_lse, *qkv in zip(*parts[0], *parts[1], strict=True):
                result, result_lse = flash_attention(*qkv, attn_mask=call_mask)
                part_out.copy_(result)
                part_lse.copy_(result_lse)
        ctx.save_for_backward(q, k, v, out, lse)
        ctx.plan = plan
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        """Return the gradients of the inputs, differentiable if a graph of the backward pass is recorded."""
        q, k, v, out, lse = ctx.saved_tensors
        plan: AttentionPlan = ctx.plan

        def formula(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            return dense_attention(q, k, v, plan.dense_bias)

        def compute() -> tuple[Tensor, ...]:
            return _gradients(contiguous_rows(grad), q, k, v, out, lse, plan)

        return *differentiable_gradients(compute, formula, grad, (q, k, v), ctx.needs_input_grad[:3]), None


def _gradients(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, plan: AttentionPlan
) -> tuple[Tensor, ...]:
    """Return the gradients of q, k and v."""
    mask, rows, before = _window_mask(plan, q)
    dq, dk, dv = torch.empty_like(q), torch.zeros_like(k, dtype=mask.dtype), torch.zeros_like(v, dtype=mask.dtype)
    for call in _calls(q.shape, rows, before):
        call_mask = mask[:, :, : call.rows, before + call.rows - call.keys : before + call.rows]
        queries = (call.views(x, call.rows) for x in (dq, grad, q))
        keys = (call.views(x, call.keys) for x in (k, v))
        results = (call.views(x, call.rows) for x in (out, lse))
        for index, (part_dq, *inputs, part_lse) in enumerate(zip(*queries, *keys, *results, strict=True)):
            query_grad, key_grad, value_grad = flash_attention_backward(
                *inputs, part_lse.contiguous(), dropout_p=0.0, is_causal=False, attn_mask=call_mask
            )
            part_dq.copy_(query_grad)
            call.add(dk, index, key_grad)
            call.add(dv, index, value_grad)
    return dq, dk.to(k.dtype), dv.to(v.dtype)


def _window_mask(plan: AttentionPlan, q: Tensor) -> tuple[Tensor, int, int]:
    """Return the bias (1, H or 1, R, K) of a block, R, and the number K - R of keys before it. Layers share the bias.

    It is -inf at future keys and outside the window.
    """
    assert plan.window is not None and isinstance(plan.bias, ToeplitzBias)
    window, dtype = plan.window, torch.promote_types(q.dtype, torch.float32)
    rows = min(max(MIN_ROWS, window // 4 // MIN_ROWS * MIN_ROWS), MAX_ROWS)
    before = -(-(window - 1) // rows) * rows  # rounded up, so that blocks of keys begin where blocks of queries do
    cached: dict[torch.dtype, Tensor] = plan.__dict__.setdefault("_window_masks", {})
    if dtype not in cached:
        table = plan.bias.columns(window).detach().to(dtype)  # (H, w), of distances 0 … w - 1
        table = table[:1] if bool((table == table[:1]).all()) else table  # all heads may have the same bias
        # query r sees key r + before - d at distance d: the table reversed, shifted by one key for each query
        padded = F.pad(table.flip(1), (before + 1 - window, rows), value=float("-inf"))  # (H, K + 1)
        keys = rows + before
        repeated = padded[:, None].expand(-1, rows, -1).reshape(len(table), -1)[:, : rows * keys]
        cached[dtype] = repeated.unflatten(1, (rows, keys))[None]
    return cached[dtype], rows, before
