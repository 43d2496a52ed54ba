"""Attention within a window of w keys on a CPU: blocks of queries against the keys that they see, O(n·w) time.

All blocks of R queries see R + w - 1 keys, with the same bias, so many blocks are computed in one call of torch's
kernel: as its batch. The blocks are views of the queries, keys and values, so nothing is copied, and memory is O(n).

The kernel has no gradient of the bias. Where a learned table needs one, the backward pass computes the weights of each
block by matrix products, and the gradient of the bias of a block is a sum over all blocks.
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
from fairseq_rpe.attention.plan import AttentionPlan, dense_from_table, is_evenly_spaced
from fairseq_rpe.core.bias import ToeplitzBias

MIN_ROWS, MAX_ROWS = 64, 512  # queries of a block, a quarter of the window within these limits
GROUP_ELEMENTS = 1 << 21  # elements of the gradients of keys that the blocks of one call have
SCORE_ELEMENTS = 1 << 19  # scores of a call whose weights are computed, so that they stay in the cache


def is_plain_call(q: Tensor, k: Tensor, plan: AttentionPlan, dropout: float) -> bool:
    """Return whether n tokens attend to themselves on a CPU, without dropout, padding, documents or changed softmax.

    Args:
        q: (B, H, n, D).
        k: (B, H, m, D).
        plan: plan of the call.
        dropout: probability of dropping an attention weight.
    """
    if plan.padding is not None or plan.last_query is not None or plan.is_content_dependent or plan.changes_softmax:
        return False
    return q.shape[2] == k.shape[2] and dropout == 0 and q.device.type == "cpu"


def has_window_blocks(q: Tensor, k: Tensor, plan: AttentionPlan, dropout: float) -> bool:
    """Return whether :func:`window_attention` serves a call.

    It serves the calls of :func:`is_plain_call`, which has the same arguments, with n > w tokens and a table by
    distance as bias.
    """
    if plan.window is None or plan.window >= q.shape[2] or not is_plain_call(q, k, plan, dropout):
        return False
    return isinstance(plan.bias, ToeplitzBias) and is_evenly_spaced(plan.bias, plan.positions)


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
    assert plan.window is not None and isinstance(plan.bias, ToeplitzBias)
    table = plan.bias.columns(plan.window)  # (H, w), of the distances 0 … w - 1
    out: Tensor = WindowAttention.apply(*(contiguous_rows(x) for x in (q, k, v)), table, plan)
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


def _calls(shape: torch.Size, rows: int, before: int, size: int) -> Iterator[_Call]:
    """Yield the calls for q (B, H, n, D), of at most ``size`` blocks each.

    A block of R queries sees ``before`` keys, a multiple of R, before its first query.
    """
    complete, near = shape[2] // rows, before // rows
    for block in range(min(near, complete)):  # blocks that see all keys before them
        yield _Call(block * rows, rows, 1, (block + 1) * rows)
    for block in range(near, complete, size):
        yield _Call(block * rows, rows, min(size, complete - block), rows + before)
    if (rest := shape[2] % rows) > 0:
        start = complete * rows
        yield _Call(start, rest, 1, rest + min(before, start))


class _BlockMask(NamedTuple):
    """The bias of a block of R queries and K keys.

    Attributes:
        bias: (1, H or 1, R, K), -inf at future keys and outside the window.
        before: K - R, number of keys before the first query.
    """

    bias: Tensor
    before: int

    @property
    def rows(self) -> int:
        """Number of queries R."""
        return self.bias.shape[2]

    def calls(self, shape: torch.Size, elements: int, per_key: int) -> Iterator[_Call]:
        """Yield the calls for q (B, H, n, D) whose blocks have together ``elements`` / ``per_key`` keys of a head."""
        return _calls(shape, self.rows, self.before, max(1, elements // (shape[1] * self.bias.shape[3] * per_key)))

    def visible(self, call: _Call) -> tuple[slice, slice]:
        """Return the queries and keys of the mask that a call has; a call at an end of the text has fewer of them."""
        stop = self.before + call.rows
        return slice(call.rows), slice(stop - call.keys, stop)

    def of(self, call: _Call) -> Tensor:
        """Return the bias of a call."""
        rows, keys = self.visible(call)
        return self.bias[:, :, rows, keys]


class WindowAttention(torch.autograd.Function):
    """Attention within a window, by torch's CPU kernel. Second derivatives are computed in O(n²) memory."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, table: Tensor, plan: AttentionPlan) -> Tensor:
        """Compute the output and save what the backward pass needs."""
        mask = _window_mask(plan, table, q.dtype)
        out = torch.empty_like(q)
        lse = q.new_empty(q.shape[:3], dtype=mask.bias.dtype)
        for call in mask.calls(q.shape, GROUP_ELEMENTS, q.shape[3]):
            parts = (call.views(x, call.rows) for x in (out, lse, q)), (call.views(x, call.keys) for x in (k, v))
            for part_out, part_lse, *qkv in zip(*parts[0], *parts[1], strict=True):
                result, result_lse = flash_attention(*qkv, attn_mask=mask.of(call))
                part_out.copy_(result)
                part_lse.copy_(result_lse)
        ctx.save_for_backward(q, k, v, table, out, lse)
        ctx.plan = plan
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        """Return the gradients of the inputs, differentiable if a graph of the backward pass is recorded."""
        q, k, v, table, out, lse = ctx.saved_tensors
        n, needs = q.shape[2], ctx.needs_input_grad[:4]

        def formula(q: Tensor, k: Tensor, v: Tensor, table: Tensor) -> Tensor:
            all_distances = F.pad(table, (0, n - table.shape[1]), value=float("-inf"))  # (H, n)
            return dense_attention(q, k, v, dense_from_table(all_distances)[None])

        def compute() -> tuple[Tensor | None, ...]:
            mask = _window_mask(ctx.plan, table, q.dtype)
            inputs = contiguous_rows(grad), q, k, v, out, lse, mask
            return _gradients_with_table(*inputs, table) if needs[3] else (*_gradients(*inputs), None)

        return *differentiable_gradients(compute, formula, grad, (q, k, v, table), needs), None


def _gradients(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, mask: _BlockMask
) -> tuple[Tensor, ...]:
    """Return the gradients of q, k and v, by torch's kernel."""
    dq, dk, dv = torch.empty_like(q), torch.zeros_like(k, dtype=lse.dtype), torch.zeros_like(v, dtype=lse.dtype)
    for call in mask.calls(q.shape, GROUP_ELEMENTS, q.shape[3]):
        queries = (call.views(x, call.rows) for x in (dq, grad, q))
        keys = (call.views(x, call.keys) for x in (k, v))
        results = (call.views(x, call.rows) for x in (out, lse))
        for index, (part_dq, *inputs, part_lse) in enumerate(zip(*queries, *keys, *results, strict=True)):
            query_grad, key_grad, value_grad = flash_attention_backward(
                *inputs, part_lse.contiguous(), dropout_p=0.0, is_causal=False, attn_mask=mask.of(call)
            )
            part_dq.copy_(query_grad)
            call.add(dk, index, key_grad)
            call.add(dv, index, value_grad)
    return dq, dk.to(k.dtype), dv.to(v.dtype)


def _gradients_with_table(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, mask: _BlockMask, table: Tensor
) -> tuple[Tensor, ...]:
    """Return the gradients of q, k, v and the table (H, w), by matrix products, in float32 or better."""
    dq, dk, dv = torch.empty_like(q), torch.zeros_like(k, dtype=lse.dtype), torch.zeros_like(v, dtype=lse.dtype)
    mask_grad = torch.zeros(q.shape[1], *mask.bias.shape[2:], dtype=lse.dtype)  # (H, R, K)
    for call in mask.calls(q.shape, SCORE_ELEMENTS, mask.rows):
        rows, keys = mask.visible(call)
        queries = (call.views(x, call.rows) for x in (dq, grad, q))
        key_views = (call.views(x, call.keys) for x in (k, v))
        saved = (call.views(x, call.rows) for x in (out, lse))
        for index, (part_dq, *inputs) in enumerate(zip(*queries, *key_views, *saved, strict=True)):
            d_out, part_q, part_k, part_v, part_out, part_lse = inputs
            query_grad, key_grad, value_grad, ds = block_gradients(
                d_out, part_q, part_k, part_v, part_out, part_lse, mask.of(call)
            )
            part_dq.copy_(query_grad)
            call.add(dk, index, key_grad)
            call.add(dv, index, value_grad)
            mask_grad[:, rows, keys] += ds.sum(0)
    return dq, dk.to(k.dtype), dv.to(v.dtype), _table_gradient(mask_grad, mask.before, table.shape[1]).to(table.dtype)


def block_gradients(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, bias: Tensor
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Compute the gradients of attention of R queries to K keys, with that of the bias, by matrix products.

    With weights P, output O and dP = dO·Vᵀ, the gradient of the scores and of the bias is dS = P·(dP - Σ_j P·dP).

    Args:
        grad: (b, H, R, D), gradient dO of the output.
        q: (b, H, R, D).
        k: (b, H, K, D).
        v: (b, H, K, D).
        out: (b, H, R, D), the output.
        lse: (b, H, R), log-sum-exp of the scores, in float32 or better.
        bias: (1, H or 1, R, K).

    Returns:
        Gradients of q, k and v, and dS (b, H, R, K), in the dtype of ``lse``.
    """
    is_rounded, scale = out.dtype != lse.dtype, q.shape[3] ** -0.5
    d_out, queries, keys, values, out = (x.to(lse.dtype).contiguous() for x in (grad, q, k, v, out))
    queries = queries * scale
    weights = torch.matmul(queries, keys.mT).add_(bias).sub_(lse[..., None]).exp_()  # (b, H, R, K)
    ds = torch.matmul(d_out, values.mT)  # (b, H, R, K), dP for now
    # Σ_j P·dP = Σ_d dO·O, which is not exact if the output is rounded
    delta = torch.linalg.vecdot(weights, ds) if is_rounded else torch.linalg.vecdot(d_out, out)
    ds.sub_(delta[..., None]).mul_(weights)
    dq = torch.matmul(ds, keys).mul_(scale)
    return dq, torch.matmul(ds.mT, queries), torch.matmul(weights.mT, d_out), ds


def _table_gradient(mask_grad: Tensor, before: int, window: int) -> Tensor:
    """Return the gradient (H, w) of the table from that of the bias of a block, (H, R, K)."""
    keys = mask_grad.shape[2]
    # as in _window_mask, the bias has the entries 0, 1, …, K, 0, 1, … of one vector, row after row
    flat = mask_grad.flatten(1)
    vector = F.pad(flat, (0, -flat.shape[1] % (keys + 1))).unflatten(1, (-1, keys + 1)).sum(1)  # (H, K + 1)
    return vector[:, before + 1 - window : before + 1].flip(1)


def _window_mask(plan: AttentionPlan, table: Tensor, dtype: torch.dtype) -> _BlockMask:
    """Return the bias of a block from a table (H, w); layers with the same plan share it, in float32 or better."""
    window, dtype = table.shape[1], torch.promote_types(dtype, torch.float32)
    rows = min(max(MIN_ROWS, window // 4 // MIN_ROWS * MIN_ROWS), MAX_ROWS)
    before = -(-(window - 1) // rows) * rows  # rounded up, so that blocks of keys begin where blocks of queries do
    cached: dict[torch.dtype, Tensor] = plan.__dict__.setdefault("_window_masks", {})
    if dtype not in cached:
        table = table.detach().to(dtype)
        table = table[:1] if bool((table == table[:1]).all()) else table  # all heads may have the same bias
        # query r sees key r + before - d at distance d: the table reversed, shifted by one key for each query
        padded = F.pad(table.flip(1), (before + 1 - window, rows), value=float("-inf"))  # (H or 1, K + 1)
        keys = rows + before
        repeated = padded[:, None].expand(-1, rows, -1).reshape(len(table), -1)[:, : rows * keys]
        cached[dtype] = repeated.unflatten(1, (rows, keys))[None]
    return _BlockMask(cached[dtype], before)
