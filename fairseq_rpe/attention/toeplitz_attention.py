"""Causal attention whose bias is computed in blocks of query rows, in O(n) memory, forward and backward.

The rows of a block are reversed. Entry (r, j) of a block then belongs to a distance that depends on r + j alone. So a
bias of the distance is a strided view (row stride 1, column stride 1) of one vector, and its gradient is a column sum
of a skewed view of the block (see ``relative_shift``). Up to ``DENSE_TOKENS`` tokens on a CPU the bias is one dense
matrix per head instead.
"""

import math
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from fairseq_rpe.attention.double_backward import (
    causal_bias,
    contiguous_rows,
    dense_attention,
    differentiable_gradients,
    flash_attention,
    flash_attention_backward,
)
from fairseq_rpe.attention.dropout import ROWS, keep_block
from fairseq_rpe.attention.plan import dense_from_table
from fairseq_rpe.attention.relative_shift import diagonal_sums, distance_view

LOG2E = math.log2(math.e)  # exp(x) = exp2(x · LOG2E), and exp2 takes a CPU a quarter of the time of exp
FORWARD_ROWS, BACKWARD_ROWS = 256, 128  # multiples of dropout.ROWS, so that blocks draw whole blocks of the mask
FAR_ROWS = 1024  # rows that share one call for the keys before them: torch's kernel uses larger tiles from 768 rows on
MAX_HEADS = 8  # heads at a time, one for each thread, where that is more than GROUP_ELEMENTS scores
GROUP_ELEMENTS = 1 << 19  # scores per group on a CPU, so that they stay in its cache
DEVICE_GROUP_ELEMENTS = 1 << 25  # scores per group elsewhere, where small operations cost as much as large ones
DENSE_TOKENS = 128  # longest text with a dense bias: a matrix is at most twice a head's keys of width 64
DENSE_GROUP_ELEMENTS = (
    1 << 18
)  # scores per group of the dense path: with their gradients they stay in two cores' caches
assert FORWARD_ROWS % ROWS == BACKWARD_ROWS % ROWS == 0

KernelCall = tuple[slice, slice]  # query rows and keys of one call of torch's kernel


class ToeplitzBlocks:
    """The bias ``bias[h, i, j] = table[h, i - j]`` block by block, and the gradient of the table.

    Subclasses compute other biases from other tensors.

    Args:
        n: number of queries and keys.
        like: the queries (B, H, n, D), for device, dtype and H.
        table: (H, n) of the distances 0 … n-1, or None for no bias.

    Attributes:
        is_computed: a block is computed into a buffer rather than a view, so callers take a few heads at a time.
        may_mask_past: entries of the past may be -inf, so that a query may see none of some keys.
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
        """Whether a query may see none of some past keys."""
        return self.table is not None and bool(torch.isneginf(self.table).any())

    @staticmethod
    def dense_formula(n: int, like: Tensor, *tensors: Tensor) -> Tensor:
        """Return the bias (n, n) or (H, n, n) by differentiable operations on ``tensors``; -inf in the future."""
        return dense_from_table(tensors[0]) if tensors else causal_bias(n, n, like)

    def block(self, start: int, stop: int, heads: slice) -> Tensor:
        """Return the bias of queries start … stop-1 and keys 0 … stop-1 for some heads.

        Returns:
            (h, R, stop) with R = stop - start: row r is query stop-1-r, column j is key j, -inf in the future. The
            memory is valid until the next call.
        """
        return distance_view(self.vector[heads], self.n, start, stop)

    def full_bias(self) -> Tensor:
        """Return the bias (H, n, n) of all queries and keys, queries in their order."""
        return self.block(0, self.n, slice(None)).flip(1)

    def accumulate_gradient(self, grads: Tensor, start: int, stop: int, heads: slice) -> None:
        """Add the gradient of the block that :meth:`block` returned last.

        Args:
            grads: (B, h, R, stop), zero in the future; may be overwritten.
            start: first query of the block.
            stop: end of the block's queries.
            heads: the block's heads.
        """
        # column y of the diagonal sums is distance stop-1-y, which is entry n-stop+y of the vector
        self.grad_sum[heads, self.n - stop : self.n] += diagonal_sums(grads).sum(0)

    def gradients(self) -> tuple[Tensor | None, ...]:
        """Return the gradients of the tensors of the bias, after every block has been accumulated."""
        return (None if self.table is None else self.grad_sum[:, : self.n].flip(1).to(self.table.dtype),)


def _chunks(stop: int, size: int, start: int = 0) -> Iterator[slice]:
    for first in range(start, stop, size):
        yield slice(first, min(first + size, stop))


class BlockAttention(torch.autograd.Function):
    """softmax(q·kᵀ/sqrt(D) + bias) v for j <= i.

    The backward pass recomputes the weights from the saved log-sum-exp, in float32 or better. Second derivatives are
    those of the dense formula, in O(n²) memory.
    """

    @staticmethod
    def forward(
        ctx: Any,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        dropout: float,
        seed: int,
        bias_class: type[ToeplitzBlocks],
        *tensors: Tensor,
    ) -> Tensor:
        """Compute the output.

        Args:
            ctx: of autograd.
            q: (B, H, n, D), as :func:`contiguous_rows` returns it.
            k: (B, H, n, D), likewise.
            v: (B, H, n, D), likewise.
            dropout: probability of dropping a weight.
            seed: of the dropout mask, see ``dropout.keep_block``.
            bias_class: class that computes the bias.
            tensors: what ``bias_class`` computes it from.

        Returns:
            (B, H, n, D) in q's dtype.
        """
        bias = bias_class(q.shape[2], q, *tensors)
        out = torch.empty_like(q)
        lse = q.new_empty(q.shape[:3], dtype=torch.promote_types(q.dtype, torch.float32))  # (B, H, n)
        if _is_short(q) and dropout == 0:
            out, lse = flash_attention(q, k, v, 0.0, False, attn_mask=bias.full_bias()[None])
        elif q.device.type == "cpu" and dropout == 0:
            for group in _kernel_groups(q, bias):
                _fused_forward((q, k, v, out, lse), bias, *group)
        else:
            _eager_forward(q, k, v, bias, out, lse, dropout, seed)
        ctx.save_for_backward(q, k, v, out, lse, *tensors)
        ctx.dropout, ctx.seed, ctx.bias_class = dropout, seed, bias_class
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
        """Return the gradients of the inputs, differentiable if a graph of the backward pass is recorded."""
        saved = ctx.saved_tensors  # may be unpacked only once, under activation checkpointing
        q, k, v, _, _, *tensors = saved
        bias_class, dropout, seed, n = ctx.bias_class, ctx.dropout, ctx.seed, q.shape[2]
        needs = *ctx.needs_input_grad[:3], *ctx.needs_input_grad[6:]

        def formula(q: Tensor, k: Tensor, v: Tensor, *tensors: Tensor) -> Tensor:
            keep = _keep_mask(seed, 0, n, q, dropout)
            return dense_attention(q, k, v, bias_class.dense_formula(n, q, *tensors), keep)

        dq, dk, dv, *bias_grads = differentiable_gradients(
            lambda: BlockAttention.gradients(ctx, grad, saved), formula, grad, (q, k, v, *tensors), needs
        )
        return dq, dk, dv, None, None, None, *bias_grads

    @staticmethod
    def gradients(ctx: Any, grad: Tensor, inputs: tuple[Tensor, ...]) -> tuple[Tensor | None, ...]:
        """Return the gradients of q, k, v and the tensors of the bias.

        Args:
            ctx: of the forward pass.
            grad: (B, H, n, D), gradient of the output.
            inputs: the saved tensors of the forward pass.
        """
        q, k, v, out, lse, *tensors = inputs
        bias: ToeplitzBlocks = ctx.bias_class(q.shape[2], q, *tensors)
        needs_bias_grad = any(ctx.needs_input_grad[6:])
        saved = contiguous_rows(grad), q, k, v, out, lse
        if _is_short(q) and (needs_bias_grad or ctx.dropout > 0):
            keep = _keep_mask(ctx.seed, 0, q.shape[2], q, ctx.dropout)
            dq, dk, dv, dbias = _dense_backward(saved, bias.full_bias(), keep, needs_bias_grad)
            if dbias is not None:
                # (H, n, n) -> (1, H, n, n) with reversed rows: the one block that has all rows
                bias.accumulate_gradient(dbias.flip(1)[None], 0, q.shape[2], slice(None))
        elif q.device.type == "cpu" and ctx.dropout == 0 and not needs_bias_grad:
            dq, dk, dv = _fused_backward(saved, bias)
        else:
            dq, dk, dv = _eager_backward(saved, bias, ctx.dropout, ctx.seed, needs_bias_grad)
        bias_grads = bias.gradients() if needs_bias_grad else [None] * len(tensors)
        return dq.to(q.dtype), dk.to(k.dtype), dv.to(v.dtype), *bias_grads


def _kernel_groups(q: Tensor, bias: ToeplitzBlocks) -> Iterator[tuple[slice, slice, list[KernelCall]]]:
    """Yield groups of (rows, heads, kernel calls); if keys before ``rows`` have a call of their own, it comes first."""
    batch, heads, n, _ = q.shape
    # heads that keep all threads busy; more of them would only make the results of a call larger
    busy_heads = -(-2 * torch.get_num_threads() // batch)
    splits_keys = n > FAR_ROWS and not bias.is_computed and not bias.may_mask_past
    for rows in _chunks(n, FORWARD_ROWS if bias.is_computed else FAR_ROWS):
        first_key = rows.start if splits_keys else 0
        calls = [(block, slice(first_key, block.stop)) for block in _chunks(rows.stop, FORWARD_ROWS, rows.start)]
        if first_key:
            calls.insert(0, (rows, slice(0, first_key)))
        group_heads = heads
        if bias.is_computed:
            group_heads = _heads_per_group(rows, q.device)
        elif n > FAR_ROWS:
            group_heads = busy_heads
        for head_slice in _chunks(heads, group_heads):
            yield rows, head_slice, calls


def _fused_forward(
    saved: tuple[Tensor, ...], bias: ToeplitzBlocks, rows: slice, head_slice: slice, calls: list[KernelCall]
) -> None:
    """Write output and log-sum-exp of one of :func:`_kernel_groups`; a function, so that its temporaries are freed."""
    q, k, v, out, lse = saved
    reversed_q = q[:, head_slice, rows].flip(2)  # (B, h, R, D), the last query first
    for block_rows, keys in calls:
        in_block = slice(rows.stop - block_rows.stop, rows.stop - block_rows.start)  # the same rows, reversed
        mask = bias.block(block_rows.start, block_rows.stop, head_slice)[None][..., keys]  # (1, h, R', K)
        block_out, block_lse = flash_attention(
            reversed_q[:, :, in_block], k[:, head_slice, keys], v[:, head_slice, keys], 0.0, False, attn_mask=mask
        )  # (B, h, R', D), (B, h, R')
        if keys.stop < block_rows.stop:  # the keys before all rows: merged with those of each block below
            far_out, far_lse = block_out.to(lse.dtype), block_lse
            continue
        if keys.start:
            # softmax over both sets of keys: means weighted by exp(lse), and sigmoid(a - b) = eᵃ / (eᵃ + eᵇ)
            rows_far_lse = far_lse[:, :, in_block]
            far_weight = (rows_far_lse - block_lse).sigmoid_()[..., None]
            block_out = block_out.to(lse.dtype).lerp_(far_out[:, :, in_block], far_weight)
            block_lse = torch.logaddexp(block_lse, rows_far_lse)
        out[:, head_slice, block_rows] = block_out.flip(2)
        lse[:, head_slice, block_rows] = block_lse.flip(2)


def _fused_backward(saved: tuple[Tensor, ...], bias: ToeplitzBlocks) -> tuple[Tensor, Tensor, Tensor]:
    """Return dq, dk and dv of a bias without a gradient: torch's kernel is faster and never stores the scores."""
    grad, q, k, v, out, lse = saved
    dk, dv = (torch.zeros_like(x, dtype=lse.dtype) for x in (k, v))
    dq = torch.empty_like(q)
    for rows, head_slice, calls in _kernel_groups(q, bias):
        # (B, h, R, D) or (B, h, R), the last query first
        grads, queries, outs, lses = (x[:, head_slice, rows].flip(2) for x in (grad, q, out, lse))
        group_dq = torch.zeros_like(queries, dtype=lse.dtype)
        for block_rows, keys in calls:
            in_block = slice(rows.stop - block_rows.stop, rows.stop - block_rows.start)
            idx = (slice(None), head_slice, keys)
            block_grad, block_q, block_out, block_lse = (x[:, :, in_block] for x in (grads, queries, outs, lses))
            mask = bias.block(block_rows.start, block_rows.stop, head_slice)[None][..., keys]  # (1, h, R', K)
            # out and lse are those of all keys, so the parts of a split row add up
            block_dq, block_dk, block_dv = flash_attention_backward(
                block_grad, block_q, k[idx], v[idx], block_out, block_lse, 0.0, False, attn_mask=mask
            )
            group_dq[:, :, in_block] += block_dq
            dk[idx] += block_dk
            dv[idx] += block_dv
        dq[:, head_slice, rows] = group_dq.flip(2)
    return dq, dk, dv


def _eager_forward(
    q: Tensor, k: Tensor, v: Tensor, bias: ToeplitzBlocks, out: Tensor, lse: Tensor, dropout: float, seed: int
) -> None:
    """Write output and log-sum-exp by plain operations, block by block."""
    n, heads = q.shape[2], q.shape[1]
    for rows in _chunks(n, FORWARD_ROWS):
        keep = _reverse_rows(_keep_mask(seed, rows.start, rows.stop, q, dropout))
        for head_slice in _chunks(heads, _heads_per_group(rows, q.device) if bias.is_computed else heads):
            mask = bias.block(rows.start, rows.stop, head_slice)[None]  # (1, h, R, stop)
            block_q = q[:, head_slice, rows].flip(2)  # (B, h, R, D), the last query first
            block_k, block_v = k[:, head_slice, : rows.stop], v[:, head_slice, : rows.stop]  # (B, h, stop, D)
            # (B, h, R, stop), changed in place from here on
            scores = torch.matmul(block_q.to(mask.dtype), block_k.to(mask.dtype).mT)
            scores.mul_(q.shape[3] ** -0.5).add_(mask)
            top = scores.amax(-1, keepdim=True)  # (B, h, R, 1)
            weights = scores.sub_(top).mul_(LOG2E).exp2_()
            total = weights.sum(-1, keepdim=True)  # (B, h, R, 1), before dropout, as in softmax
            if keep is not None:
                weights.mul_(keep[:, head_slice])
            out[:, head_slice, rows] = torch.matmul(weights, block_v.to(weights.dtype)).div_(total).flip(2)
            lse[:, head_slice, rows] = (top + total.log())[..., 0].flip(2)


def _eager_backward(
    saved: tuple[Tensor, ...], bias: ToeplitzBlocks, dropout: float, seed: int, needs_bias_grad: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """Return dq, dk and dv; with ``needs_bias_grad`` the bias accumulates dS, a few heads at a time.

    With weights P, output O and dP = dO·Vᵀ: dS = P·(dP - delta), delta = Σ_j P·dP = Σ_d dO·O.
    """
    grad, q, k, v, out, lse = saved
    is_rounded = out.dtype != lse.dtype
    batch, heads, n, width = q.shape
    scale = width**-0.5
    dq = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    dk, dv = (torch.zeros(x.shape, dtype=lse.dtype, device=x.device) for x in (k, v))
    scratch = _Scratch(lse, batch, heads, width)
    for rows in _chunks(n, BACKWARD_ROWS):
        start, stop = rows.start, rows.stop
        keep = _reverse_rows(_keep_mask(seed, start, stop, q, dropout))
        # (B, H, R, D) and lse (B, H, R), the last query first
        rows_grad, rows_q, rows_out, rows_lse = (x[:, :, rows].flip(2).to(lse.dtype) for x in (grad, q, out, lse))
        minus_delta, rows_q = (rows_grad * rows_out).sum(-1, keepdim=True).neg_(), rows_q.mul_(scale)
        rows_dq = rows_q.new_empty(rows_q.shape)  # contiguous whatever the layout of q: _merge_heads writes into a view
        heads_per_group = _heads_per_group(rows, q.device)
        for head_slice in _chunks(heads, heads_per_group):
            mask = bias.block(start, stop, head_slice)  # (h, R, stop)
            for batch_slice in _chunks(batch, max(1, heads_per_group // heads)):
                idx, key_idx = (batch_slice, head_slice), (batch_slice, head_slice, slice(stop))
                # (b·h, R or stop, D)
                g, qs, ks, vs = (
                    _merge_heads(x.to(lse.dtype)) for x in (rows_grad[idx], rows_q[idx], k[key_idx], v[key_idx])
                )
                p, ds, key_grad = scratch.views(rows_lse[idx].shape, stop)  # (b, h, R, stop) twice, (b, h, stop, D)
                # P = exp(scores + bias - lse), in base 2
                torch.sub(mask, rows_lse[idx][..., None], out=p)
                _merge_heads(p).baddbmm_(qs, ks.mT, beta=LOG2E, alpha=LOG2E).exp2_()
                if keep is None and not is_rounded:
                    _merge_heads(ds.copy_(minus_delta[idx])).baddbmm_(g, vs.mT)
                else:
                    torch.bmm(g, vs.mT, out=_merge_heads(ds))
                    if keep is not None:
                        ds.mul_(keep[idx])
                    # a rounded output makes dO·O inexact, which the n² terms of a bias gradient would add up:
                    # compute delta from P and dP instead
                    ds.add_(-torch.linalg.vecdot(p, ds)[..., None] if is_rounded else minus_delta[idx])
                ds.mul_(p)
                if keep is not None:
                    p.mul_(keep[idx])
                for grad_sum, by_pair, x in ((dv, p, g), (dk, ds, qs)):
                    torch.bmm(_merge_heads(by_pair).mT, x, out=_merge_heads(key_grad))
                    grad_sum[key_idx] += key_grad
                torch.bmm(_merge_heads(ds), ks, out=_merge_heads(rows_dq[idx]))
                if needs_bias_grad:
                    bias.accumulate_gradient(ds, start, stop, head_slice)
        dq[:, :, rows] = rows_dq.mul_(scale).flip(2)
    return dq, dk, dv


def _heads_per_group(rows: slice, device: torch.device) -> int:
    """Return how many heads' scores of a block are computed at a time."""
    most = GROUP_ELEMENTS if device.type == "cpu" else DEVICE_GROUP_ELEMENTS
    return max(min(torch.get_num_threads(), MAX_HEADS), most // ((rows.stop - rows.start) * rows.stop))


class _Scratch:
    """Memory for the scores of a group, reused by all groups: allocating it anew costs more than the arithmetic.

    Its views have no gaps: a batched product into a tensor with gaps runs head by head, each on all threads.
    """

    def __init__(self, like: Tensor, batch: int, heads: int, width: int) -> None:
        score_sizes, product_sizes = [], []
        for rows in _chunks(like.shape[2], BACKWARD_ROWS):
            heads_per_group = _heads_per_group(rows, like.device)
            group = min(heads_per_group, heads) * min(batch, max(1, heads_per_group // heads))
            score_sizes.append(group * (rows.stop - rows.start) * rows.stop)
            product_sizes.append(group * rows.stop * width)
        self.width = width
        self.buffers = [like.new_empty(max(sizes)) for sizes in (score_sizes, score_sizes, product_sizes)]

    def views(self, shape: Sequence[int], keys: int) -> tuple[Tensor, ...]:
        """Return views for rows (b, h, R) and M keys: twice (b, h, R, M), and (b, h, M, D)."""
        batch, heads, rows = shape
        shapes = (batch, heads, rows, keys), (batch, heads, rows, keys), (batch, heads, keys, self.width)
        return tuple(x[: math.prod(shape)].view(shape) for x, shape in zip(self.buffers, shapes, strict=True))


def _keep_mask(seed: int, start: int, stop: int, q: Tensor, dropout: float) -> Tensor | None:
    """Return the scaled dropout mask (B, H, R, stop) of a block, or None without dropout."""
    batch, heads, n, _ = q.shape
    return keep_block(seed, start, stop, (batch, heads, n, n), dropout, q.device) if dropout > 0 else None


def _reverse_rows(keep: Tensor | None) -> Tensor | None:
    return None if keep is None else keep.flip(2)


def _is_short(q: Tensor) -> bool:
    return q.device.type == "cpu" and q.shape[2] <= DENSE_TOKENS


def _merge_heads(x: Tensor) -> Tensor:
    """(b, h, …) -> (b·h, …); a view wherever it is written to, since a group is one row of the batch or all heads."""
    return x.flatten(0, 1)


def _dense_backward(
    saved: tuple[Tensor, ...], bias: Tensor, keep: Tensor | None, needs_bias_grad: bool
) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    """Return dq, dk, dv and the gradient (H, n, n) of the bias or None, for short texts, in float32 or better.

    Skipping the future would save less there than reversing rows costs. As :func:`_eager_backward`, of dense matrices.

    Args:
        saved: the output's gradient, q, k, v and the output, (B, H, n, D), and the log-sum-exp (B, H, n).
        bias: (H, n, n), -inf in the future.
        keep: the scaled dropout mask (B, H, n, n), or None.
        needs_bias_grad: whether to compute the gradient of the bias.
    """
    grad, q, k, v, out, lse = saved
    is_rounded, scale = out.dtype != lse.dtype, q.shape[3] ** -0.5
    bias, lse, scratch = bias * LOG2E, lse * LOG2E, [_dense_scratch(q, lse) for _ in range(2)]
    dq, dk, dv = (torch.empty(x.shape, dtype=lse.dtype, device=x.device) for x in (q, k, v))
    dbias = torch.zeros_like(bias) if needs_bias_grad else None
    for idx in _dense_groups(q):
        g, qs, ks, vs, o = (_merge_heads(x[idx].to(lse.dtype)) for x in (grad, q, k, v, out))  # (b·h, n, D)
        qs, minus_delta = qs * scale, (g * o).sum(-1, keepdim=True).neg_()
        p, ds = (x[: len(qs)] for x in scratch)  # (b·h, n, n)
        group_shape = lse[idx].shape[:2]  # b, h
        # P = exp2(scores + bias - lse), all in base 2
        torch.sub(bias[idx[1]], lse[idx][..., None], out=p.unflatten(0, group_shape))
        p.baddbmm_(qs, ks.mT, alpha=LOG2E).exp2_()
        if keep is None and not is_rounded:
            ds.copy_(minus_delta).baddbmm_(g, vs.mT)
        else:
            torch.bmm(g, vs.mT, out=ds)
            if keep is not None:
                ds.mul_(_merge_heads(keep[idx]))
            # delta from P and dP where the output was rounded, as in _eager_backward
            ds.add_(-torch.linalg.vecdot(p, ds)[..., None] if is_rounded else minus_delta)
        ds.mul_(p)
        if keep is not None:
            p.mul_(_merge_heads(keep[idx]))
        torch.bmm(p.mT, g, out=_merge_heads(dv[idx]))
        torch.bmm(ds.mT, qs, out=_merge_heads(dk[idx]))
        torch.bmm(ds, ks, out=_merge_heads(dq[idx]))
        if dbias is not None:
            dbias[idx[1]] += ds.unflatten(0, group_shape).sum(0)
    return dq.mul_(scale), dk, dv, dbias


def _dense_groups(q: Tensor) -> Iterator[tuple[slice, slice]]:
    """Yield slices of the batch and of the heads: some rows with all heads, or one row with some heads."""
    batch, heads, n, _ = q.shape
    heads_per_group = max(1, DENSE_GROUP_ELEMENTS // n**2)
    rows_per_group = max(1, heads_per_group // heads)
    for row in range(0, batch, rows_per_group):
        for head in range(0, heads, heads_per_group):
            yield slice(row, row + rows_per_group), slice(head, head + heads_per_group)


def _dense_scratch(q: Tensor, lse: Tensor) -> Tensor:
    """Return memory (G, n, n) for the scores of the largest of :func:`_dense_groups`."""
    batch, heads, n, _ = q.shape
    heads_per_group = max(1, DENSE_GROUP_ELEMENTS // n**2)
    return lse.new_empty(min(heads_per_group, heads) * min(batch, max(1, heads_per_group // heads)), n, n)
