"""Causal attention whose bias is computed in blocks of query rows, in O(n) memory, forward and backward.

The bias of a block comes from ``toeplitz_blocks``, whose blocks have their query rows reversed. On a CPU, texts of at
most ``DENSE_TOKENS`` tokens have one dense bias matrix per head instead.

The comments use these sizes: B rows of the batch, H heads, n queries and keys, D elements of a head; b rows of the
batch and h heads of a group, R queries of a block, M keys up to the block's last query.
"""

import math
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fairseq_rpe.attention.double_backward import (
    contiguous_rows,
    dense_attention,
    differentiable_gradients,
    flash_attention,
    flash_attention_backward,
)
from fairseq_rpe.attention.dropout import ROWS, keep_block
from fairseq_rpe.attention.toeplitz_blocks import ToeplitzBlocks

LOG2E = math.log2(math.e)  # exp(x) = exp2(x · LOG2E); on a CPU exp2 takes a quarter of the time of exp
FORWARD_ROWS, BACKWARD_ROWS = 256, 128  # multiples of dropout.ROWS, so that blocks draw whole blocks of the mask
FAR_ROWS = 1024  # rows that share one call for the keys before them: torch's kernel uses larger tiles from 768 rows on
GROUP_ELEMENTS = 1 << 19  # scores of a group on a CPU, so that they stay in its cache
DEVICE_GROUP_ELEMENTS = 1 << 25  # scores of a group elsewhere, where small operations cost as much as large ones
MAX_HEADS = 8  # a group has one head for each thread, up to this number, even if that exceeds GROUP_ELEMENTS
DENSE_TOKENS = 128  # longest text with a dense bias: a matrix is at most twice a head's keys of width 64
# scores of a group of the dense path: with their gradients they stay in two cores' caches
DENSE_GROUP_ELEMENTS = 1 << 18
assert FORWARD_ROWS % ROWS == BACKWARD_ROWS % ROWS == 0


class _ForwardTensors(NamedTuple):
    """Inputs and results of the forward pass: (B, H, n, D), and the log-sum-exp of the scores (B, H, n)."""

    q: Tensor
    k: Tensor
    v: Tensor
    out: Tensor
    lse: Tensor


class _KernelCall(NamedTuple):
    """Query rows and keys of one call of torch's kernel."""

    rows: slice
    keys: slice

    @property
    def is_far(self) -> bool:
        """Whether the keys are those before all rows of the group."""
        return self.keys.stop < self.rows.stop


class _KernelGroup(NamedTuple):
    """Query rows and heads that are computed together, by several calls of torch's kernel."""

    rows: slice
    heads: slice
    calls: list[_KernelCall]

    def reversed_rows(self, call: _KernelCall) -> slice:
        """Return the rows of a call as indices into the group's rows in reversed order."""
        return slice(self.rows.stop - call.rows.stop, self.rows.stop - call.rows.start)


class _BackwardRows(NamedTuple):
    """What the backward pass needs of a block of queries, the last query first.

    Attributes:
        grad: (B, H, R, D), gradient of the output.
        q: (B, H, R, D), times 1/sqrt(D).
        lse: (B, H, R), log-sum-exp of the scores.
        minus_delta: (B, H, R, 1), -Σ_d dO·O.
        keep: (B, H, R, M) scaled dropout mask, or None.
        dq: (B, H, R, D), into which the gradient of the queries is written, less the factor 1/sqrt(D).
    """

    grad: Tensor
    q: Tensor
    lse: Tensor
    minus_delta: Tensor
    keep: Tensor | None
    dq: Tensor


def _chunks(stop: int, size: int, start: int = 0) -> Iterator[slice]:
    """Yield the slices of ``size`` indices, the last one of fewer, from ``start`` to ``stop``."""
    for first in range(start, stop, size):
        yield slice(first, min(first + size, stop))


class BlockAttention(torch.autograd.Function):
    """Computes softmax(q·kᵀ/sqrt(D) + bias) v, where query i sees the keys j <= i.

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
            ctx: autograd's context.
            q: (B, H, n, D), as :func:`contiguous_rows` returns it.
            k: (B, H, n, D), likewise.
            v: (B, H, n, D), likewise.
            dropout: probability of dropping a weight.
            seed: seed of the dropout mask, see ``dropout.keep_block``.
            bias_class: class that computes the bias; :class:`ToeplitzBlocks` or a subclass.
            tensors: tensors that ``bias_class`` is created from, in the order of its arguments.

        Returns:
            (B, H, n, D) in q's dtype.
        """
        bias = bias_class(q.shape[2], q, *tensors)
        out = torch.empty_like(q)
        lse = q.new_empty(q.shape[:3], dtype=torch.promote_types(q.dtype, torch.float32))  # (B, H, n)
        if _is_short(q) and dropout == 0:  # one call with a dense bias
            out, lse = flash_attention(q, k, v, attn_mask=bias.full_bias()[None])
        elif q.device.type == "cpu" and dropout == 0:
            for group in _kernel_groups(q, bias):
                _fused_forward(_ForwardTensors(q, k, v, out, lse), bias, group)
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
        # of q, k, v and the tensors of the bias; inputs 3 to 5 are dropout, seed and the bias class
        needs = *ctx.needs_input_grad[:3], *ctx.needs_input_grad[6:]

        def formula(q: Tensor, k: Tensor, v: Tensor, *tensors: Tensor) -> Tensor:
            keep = _keep_mask(seed, 0, n, q, dropout)
            return dense_attention(q, k, v, bias_class.dense_formula(n, q, *tensors), keep)

        dq, dk, dv, *bias_grads = differentiable_gradients(
            lambda: BlockAttention.gradients(ctx, grad, saved), formula, grad, (q, k, v, *tensors), needs
        )
        return dq, dk, dv, None, None, None, *bias_grads

    @staticmethod
    def gradients(ctx: Any, grad: Tensor, saved: tuple[Tensor, ...]) -> tuple[Tensor | None, ...]:
        """Return the gradients of q, k, v and the tensors of the bias.

        Args:
            ctx: autograd's context, as the forward pass left it.
            grad: (B, H, n, D), gradient of the output.
            saved: q, k, v, the output, the log-sum-exp and the tensors of the bias, as the forward pass saved them.

        Returns:
            The gradients of q, k and v, and those of the tensors of the bias, None where none is needed.
        """
        q, k, v, out, lse, *tensors = saved
        bias: ToeplitzBlocks = ctx.bias_class(q.shape[2], q, *tensors)
        needs_bias_grad = any(ctx.needs_input_grad[6:])
        grad, forward = contiguous_rows(grad), _ForwardTensors(q, k, v, out, lse)
        if _is_short(q) and (needs_bias_grad or ctx.dropout > 0):
            keep = _keep_mask(ctx.seed, 0, q.shape[2], q, ctx.dropout)
            dq, dk, dv, dbias = _dense_backward(grad, forward, bias.full_bias(), keep, needs_bias_grad)
            if dbias is not None:
                # (H, n, n) -> (1, H, n, n) with reversed rows, the block of all rows
                bias.accumulate_gradient(dbias.flip(1)[None], 0, q.shape[2], slice(None))
        elif q.device.type == "cpu" and ctx.dropout == 0 and not needs_bias_grad:
            dq, dk, dv = _fused_backward(grad, forward, bias)
        else:
            dq, dk, dv = _EagerBackward(grad, forward, bias, ctx.dropout, ctx.seed, needs_bias_grad).compute()
        bias_grads = bias.gradients() if needs_bias_grad else [None] * len(tensors)
        return dq.to(q.dtype), dk.to(k.dtype), dv.to(v.dtype), *bias_grads


def _kernel_groups(q: Tensor, bias: ToeplitzBlocks) -> Iterator[_KernelGroup]:
    """Yield the groups of query rows and heads, with the calls of torch's kernel that compute them.

    Each call has a block of rows and the keys up to the last of them. In a long text, all rows of a group share one
    more call for the keys before them, which comes first; the calls of the blocks then have the other keys alone.
    """
    batch, heads, n, _ = q.shape
    # two (row, head) pairs for each thread keep all threads busy; more would only make the results of a call larger
    busy_heads = -(-2 * torch.get_num_threads() // batch)
    # A computed bias is not split, since smaller blocks of it stay in the cache. The results of two calls cannot be
    # merged if all scores of one call may be -inf.
    splits_keys = n > FAR_ROWS and not bias.is_computed and not bias.may_mask_past
    for rows in _chunks(n, FORWARD_ROWS if bias.is_computed else FAR_ROWS):
        first_key = rows.start if splits_keys else 0
        blocks = _chunks(rows.stop, FORWARD_ROWS, rows.start)
        calls = [_KernelCall(block, slice(first_key, block.stop)) for block in blocks]
        if first_key:
            calls.insert(0, _KernelCall(rows, slice(0, first_key)))
        group_heads = heads
        if bias.is_computed:
            group_heads = _heads_per_group(rows, q.device)
        elif n > FAR_ROWS:
            group_heads = busy_heads
        for head_slice in _chunks(heads, group_heads):
            yield _KernelGroup(rows, head_slice, calls)


def _fused_forward(tensors: _ForwardTensors, bias: ToeplitzBlocks, group: _KernelGroup) -> None:
    """Write output and log-sum-exp of a group by torch's kernel; a function, so that its temporaries are freed."""
    q, k, v, out, lse = tensors
    reversed_q = q[:, group.heads, group.rows].flip(2)  # (B, h, R, D), the last query first
    for call in group.calls:
        in_group, keys = group.reversed_rows(call), call.keys
        mask = bias.block(call.rows.start, call.rows.stop, group.heads)[None][..., keys]  # (1, h, R', K)
        block_out, block_lse = flash_attention(
            reversed_q[:, :, in_group], k[:, group.heads, keys], v[:, group.heads, keys], attn_mask=mask
        )  # (B, h, R', D), (B, h, R')
        if call.is_far:  # the group's first call; its results are merged with those of each block below
            far_out, far_lse = block_out.to(lse.dtype), block_lse
            continue
        if keys.start:
            block_out, block_lse = _merge_softmax(
                block_out.to(lse.dtype), block_lse, far_out[:, :, in_group], far_lse[:, :, in_group]
            )
        out[:, group.heads, call.rows] = block_out.flip(2)
        lse[:, group.heads, call.rows] = block_lse.flip(2)


def _merge_softmax(near_out: Tensor, near_lse: Tensor, far_out: Tensor, far_lse: Tensor) -> tuple[Tensor, Tensor]:
    """Return output and log-sum-exp over both of two sets of keys, overwriting ``near_out``.

    The output is the mean of both outputs weighted by exp(lse), and sigmoid(a - b) = eᵃ / (eᵃ + eᵇ).
    """
    far_weight = (far_lse - near_lse).sigmoid_()[..., None]  # (B, h, R', 1)
    return near_out.lerp_(far_out, far_weight), torch.logaddexp(near_lse, far_lse)


def _fused_backward(grad: Tensor, tensors: _ForwardTensors, bias: ToeplitzBlocks) -> tuple[Tensor, Tensor, Tensor]:
    """Return dq, dk and dv by torch's kernel, which never stores the scores, but has no gradient of the bias."""
    q, k, v, out, lse = tensors
    dk, dv = (torch.zeros_like(x, dtype=lse.dtype) for x in (k, v))
    dq = torch.empty_like(q)
    for group in _kernel_groups(q, bias):
        # (B, h, R, D) or (B, h, R), the last query first
        grads, queries, outs, lses = (x[:, group.heads, group.rows].flip(2) for x in (grad, q, out, lse))
        group_dq = torch.zeros_like(queries, dtype=lse.dtype)
        for call in group.calls:
            in_group, keys = group.reversed_rows(call), (slice(None), group.heads, call.keys)
            block_grad, block_q, block_out, block_lse = (x[:, :, in_group] for x in (grads, queries, outs, lses))
            mask = bias.block(call.rows.start, call.rows.stop, group.heads)[None][..., call.keys]  # (1, h, R', K)
            # out and lse are those of all keys, so the gradients of a row's far and near keys add up
            no_dropout, is_causal = 0.0, False
            block_dq, block_dk, block_dv = flash_attention_backward(
                block_grad, block_q, k[keys], v[keys], block_out, block_lse, no_dropout, is_causal, attn_mask=mask
            )
            group_dq[:, :, in_group] += block_dq
            dk[keys] += block_dk
            dv[keys] += block_dv
        dq[:, group.heads, group.rows] = group_dq.flip(2)
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


class _EagerBackward:
    """The backward pass by plain operations, block by block of queries and group by group of heads.

    With weights P, output O and dP = dO·Vᵀ: dS = P·(dP - delta), delta = Σ_j P·dP = Σ_d dO·O. The gradients are
    dV = Pᵀ·dO, dK = dSᵀ·Q/sqrt(D) and dQ = dS·K/sqrt(D), and dS is the gradient of the bias.

    Args:
        grad: (B, H, n, D), gradient of the output.
        tensors: inputs and results of the forward pass.
        bias: computes the bias, and accumulates its gradient.
        dropout: probability of dropping a weight.
        seed: seed of the dropout mask.
        needs_bias_grad: whether the gradient of the bias is computed.
    """

    def __init__(
        self,
        grad: Tensor,
        tensors: _ForwardTensors,
        bias: ToeplitzBlocks,
        dropout: float,
        seed: int,
        needs_bias_grad: bool,
    ) -> None:
        self.grad, self.tensors, self.bias = grad, tensors, bias
        self.dropout, self.seed, self.needs_bias_grad = dropout, seed, needs_bias_grad
        q, k, v, out, lse = tensors
        batch, heads, _, width = q.shape
        self.scale, self.is_rounded = width**-0.5, out.dtype != lse.dtype
        self.dq = torch.empty(q.shape, dtype=q.dtype, device=q.device)
        self.dk, self.dv = (torch.zeros(x.shape, dtype=lse.dtype, device=x.device) for x in (k, v))
        self.scratch = _Scratch(lse, batch, heads, width)

    def compute(self) -> tuple[Tensor, Tensor, Tensor]:
        """Return dq in q's dtype, and dk and dv in float32 or better."""
        for rows in _chunks(self.grad.shape[2], BACKWARD_ROWS):
            self._add_block(rows)
        return self.dq, self.dk, self.dv

    def _add_block(self, rows: slice) -> None:
        """Write dq of a block of queries, and add what the block contributes to dk, dv and the bias."""
        q, _, _, out, lse = self.tensors
        batch, heads = q.shape[:2]
        keep = _reverse_rows(_keep_mask(self.seed, rows.start, rows.stop, q, self.dropout))  # (B, H, R, M)
        # (B, H, R, D) and lse (B, H, R), the last query first
        block_grad, block_q, block_out, block_lse = (
            x[:, :, rows].flip(2).to(lse.dtype) for x in (self.grad, q, out, lse)
        )
        minus_delta, block_q = (block_grad * block_out).sum(-1, keepdim=True).neg_(), block_q.mul_(self.scale)
        # contiguous whatever the layout of q, since _merge_heads(dq) is written to and must be a view
        dq = block_q.new_empty(block_q.shape)
        block = _BackwardRows(block_grad, block_q, block_lse, minus_delta, keep, dq)
        heads_per_group = _heads_per_group(rows, q.device)
        for head_slice in _chunks(heads, heads_per_group):
            mask = self.bias.block(rows.start, rows.stop, head_slice)  # (h, R, M)
            for batch_slice in _chunks(batch, max(1, heads_per_group // heads)):
                ds = self._add_group(block, mask, (batch_slice, head_slice))
                if self.needs_bias_grad:
                    self.bias.accumulate_gradient(ds, rows.start, rows.stop, head_slice)
        self.dq[:, :, rows] = dq.mul_(self.scale).flip(2)

    def _add_group(self, block: _BackwardRows, mask: Tensor, group: tuple[slice, slice]) -> Tensor:
        """Write dq of a group, and add what the group contributes to dk and dv.

        Args:
            block: the block's queries.
            mask: (h, R, M), bias of the group's heads, -inf in the future.
            group: slices of the batch and of the heads.

        Returns:
            dS (b, h, R, M), valid until the next group.
        """
        keys = mask.shape[2]
        key_idx = (*group, slice(keys))
        _, k, v, _, lse = self.tensors
        grads, queries = (_merge_heads(x[group].to(lse.dtype)) for x in (block.grad, block.q))  # (b·h, R, D)
        key_rows, values = (_merge_heads(x[key_idx].to(lse.dtype)) for x in (k, v))  # (b·h, M, D)
        # (b, h, R, M) twice, (b, h, M, D)
        weights, ds, key_grad = self.scratch.views(block.lse[group].shape, keys)
        # P = exp(scores + bias - lse), in base 2
        torch.sub(mask, block.lse[group][..., None], out=weights)
        p = _merge_heads(weights)  # (b·h, R, M)
        p.baddbmm_(queries, key_rows.mT, beta=LOG2E, alpha=LOG2E).exp2_()
        keep = None if block.keep is None else _merge_heads(block.keep[group])
        flat_ds = _merge_heads(ds)
        _write_score_gradients(flat_ds, p, grads, values, _merge_heads(block.minus_delta[group]), keep, self.is_rounded)
        # dV += Pᵀ·dO and dK += dSᵀ·Q; the queries have the factor 1/sqrt(D)
        for grad_sum, pair_weights, x in ((self.dv, p, grads), (self.dk, flat_ds, queries)):
            torch.bmm(pair_weights.mT, x, out=_merge_heads(key_grad))
            grad_sum[key_idx] += key_grad
        torch.bmm(flat_ds, key_rows, out=_merge_heads(block.dq[group]))
        return ds


def _write_score_gradients(
    ds: Tensor, p: Tensor, grads: Tensor, values: Tensor, minus_delta: Tensor, keep: Tensor | None, is_rounded: bool
) -> None:
    """Write dS = P·(dP - delta) into ``ds``, and apply the dropout mask to P.

    Args:
        ds: (b·h, R, M), overwritten.
        p: (b·h, R, M), the weights P before dropout; overwritten by those after it.
        grads: (b·h, R, D), gradient of the output.
        values: (b·h, M, D).
        minus_delta: (b·h, R, 1), -Σ_d dO·O.
        keep: (b·h, R, M) scaled dropout mask, or None.
        is_rounded: whether the output was rounded to a narrower dtype. This makes Σ_d dO·O inexact, and the n² terms of
            a bias gradient would add the error up. Then delta is computed from P and dP instead.
    """
    if keep is None and not is_rounded:
        ds.copy_(minus_delta).baddbmm_(grads, values.mT)
    else:
        torch.bmm(grads, values.mT, out=ds)
        if keep is not None:
            ds.mul_(keep)
        ds.add_(-torch.linalg.vecdot(p, ds)[..., None] if is_rounded else minus_delta)
    ds.mul_(p)
    if keep is not None:
        p.mul_(keep)


def _heads_per_group(rows: slice, device: torch.device) -> int:
    """Return the number of heads (of all rows of the batch) whose scores of a block are computed at a time."""
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
    """Reverse the queries of a mask (B, H, R, M)."""
    return None if keep is None else keep.flip(2)


def _is_short(q: Tensor) -> bool:
    """Return whether a dense bias is used: for a short text on a CPU."""
    return q.device.type == "cpu" and q.shape[2] <= DENSE_TOKENS


def _merge_heads(x: Tensor) -> Tensor:
    """Reshape (b, h, …) to (b·h, …). For a group it is a view: a group has one row of the batch or all heads."""
    return x.flatten(0, 1)


def _dense_backward(
    grad: Tensor, tensors: _ForwardTensors, bias: Tensor, keep: Tensor | None, needs_bias_grad: bool
) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    """Compute what :class:`_EagerBackward` does from dense matrices, for short texts.

    These matrices include the future: to skip it would save less in a short text than reversing the rows costs.

    Args:
        grad: (B, H, n, D), gradient of the output.
        tensors: inputs and results of the forward pass.
        bias: (H, n, n), -inf in the future.
        keep: the scaled dropout mask (B, H, n, n), or None.
        needs_bias_grad: whether to compute the gradient of the bias.

    Returns:
        dq, dk and dv (B, H, n, D), and the gradient (H, n, n) of the bias or None, in float32 or better.
    """
    q, k, v, out, lse = tensors
    is_rounded, scale = out.dtype != lse.dtype, q.shape[3] ** -0.5
    # memory of P and dS, used by all groups
    bias, lse, scratch = bias * LOG2E, lse * LOG2E, [_dense_scratch(q, lse) for _ in range(2)]
    dq, dk, dv = (torch.empty(x.shape, dtype=lse.dtype, device=x.device) for x in (q, k, v))
    dbias = torch.zeros_like(bias) if needs_bias_grad else None
    for group in _dense_groups(q):
        # (b·h, n, D)
        grads, queries, keys, values, outs = (_merge_heads(x[group].to(lse.dtype)) for x in (grad, q, k, v, out))
        queries, minus_delta = queries * scale, (grads * outs).sum(-1, keepdim=True).neg_()
        p, ds = (x[: len(queries)] for x in scratch)  # (b·h, n, n)
        _, head_slice = group
        group_shape = lse[group].shape[:2]  # b, h
        # P = exp2(scores + bias - lse), all in base 2
        torch.sub(bias[head_slice], lse[group][..., None], out=p.unflatten(0, group_shape))
        p.baddbmm_(queries, keys.mT, alpha=LOG2E).exp2_()
        group_keep = None if keep is None else _merge_heads(keep[group])
        _write_score_gradients(ds, p, grads, values, minus_delta, group_keep, is_rounded)
        torch.bmm(p.mT, grads, out=_merge_heads(dv[group]))
        torch.bmm(ds.mT, queries, out=_merge_heads(dk[group]))
        torch.bmm(ds, keys, out=_merge_heads(dq[group]))
        if dbias is not None:
            dbias[head_slice] += ds.unflatten(0, group_shape).sum(0)
    return dq.mul_(scale), dk, dv, dbias


def _dense_groups(q: Tensor) -> Iterator[tuple[slice, slice]]:
    """Yield groups as slices of the batch and of the heads: several rows with all heads, or one row with few heads."""
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
