"""Causal attention in blocks of query rows whose bias is made block by block: O(n) memory, forward and backward.

A block's rows are reversed. Entry (r, j) of its distances then depends on r + j alone, so a function of the distance is
a strided view (row stride 1, column stride 1) of one vector, and sums along diagonals are column sums of a skewed view.
"""

import math
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from fairseq_rpe.attention import dense_cpu, double_backward
from fairseq_rpe.attention.dense_cpu import LOG2E, merged
from fairseq_rpe.attention.dropout import ROWS, keep_block
from fairseq_rpe.attention.plan import matrix
from fairseq_rpe.attention.toeplitz_views import diagonal_sums, distances

FORWARD_ROWS, BACKWARD_ROWS = 256, 128  # multiples of dropout.ROWS, so that blocks draw whole mask blocks
FAR_ROWS = 1024  # and the keys before them are one call: torch's kernel multiplies larger tiles from 768 rows on
MOST_HEADS = 8  # at a time, one for each thread, where that is more than GROUP_ELEMENTS scores
GROUP_ELEMENTS = 1 << 19  # scores that are worked on at a time, so that they stay in a CPU's cache
DEVICE_GROUP_ELEMENTS = 1 << 25  # the same elsewhere, where a small piece of work costs as much as a large one
flash = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
_flash_backward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward
assert FORWARD_ROWS % ROWS == BACKWARD_ROWS % ROWS == 0


def by_rows(x: Tensor) -> Tensor:
    """The same numbers, those of a row neighbours in memory: torch's kernel reads others without a word."""
    return x if x.stride(-1) == 1 else x.contiguous()


class ToeplitzBlocks:
    """bias[h, i, j] = table[h, i-j], block by block, and the gradient of the table; biases of other tensors derive.

    Made by (n, q, *tensors), here a table (H, n) of the distances 0 … n-1 or none for no bias. ``made``: a block is
    computed, not a view, so a few heads at a time. ``holes``: pairs of the past may be -inf, so that a query may see
    none of some keys.
    """

    made = False

    def __init__(self, n: int, like: Tensor, table: Tensor | None = None) -> None:
        self.n, self.table = n, table
        wide = torch.promote_types(like.dtype, torch.float32)
        # entry x holds the bias of distance n-1-x, and -inf where that is the future
        self.vector = like.new_full((like.shape[1], 2 * n), float("-inf"), dtype=wide)
        self.vector[:, :n] = 0.0 if table is None else table.detach().flip(1)
        self.sums = torch.zeros_like(self.vector)

    @property
    def holes(self) -> bool:
        return self.table is not None and bool(torch.isneginf(self.table).any())

    @staticmethod
    def dense(n: int, like: Tensor, *tensors: Tensor) -> Tensor:
        """(n, n) or (H, n, n) of the same tensors by differentiable operations, -inf in the future."""
        return matrix(tensors[0]) if tensors else double_backward.future(n, n, like)

    def block(self, start: int, stop: int, heads: slice) -> Tensor:
        """(h, R, stop): row r is query stop-1-r, column j is key j; -inf in the future; until the next."""
        return distances(self.vector[heads], self.n, start, stop)

    def whole(self) -> Tensor:
        """(H, n, n) of all queries and keys, the queries in their order."""
        return self.block(0, self.n, slice(None)).flip(1)

    def collect(self, grads: Tensor, start: int, stop: int, heads: slice) -> None:
        """Take the gradient of the block last made: (B, h, R, stop), zero in the future; may write to it."""
        self.sums[heads, self.n - stop : self.n] += diagonal_sums(grads).sum(0)

    def gradients(self) -> tuple[Tensor | None, ...]:
        """Of the tensors that the bias was made of, once all blocks are collected."""
        return (None if self.table is None else self.sums[:, : self.n].flip(1).to(self.table.dtype),)


def _parts(stop: int, part: int, start: int = 0) -> Iterator[slice]:
    for first in range(start, stop, part):
        yield slice(first, min(first + part, stop))


class BlockAttention(torch.autograd.Function):
    """softmax(q·kᵀ/sqrt(D) + bias) v for j <= i.

    q, k, v: (B, H, n, D), :func:`by_rows`; ``make`` and its tensors give the bias; dropout and its seed as in
    ``dropout.keep_block``. The backward pass makes the weights again from the saved log-sum-exp, in float32 or better.
    Second derivatives are those of the dense formula, in O(n²) memory.
    """

    @staticmethod
    def forward(
        ctx: Any,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        dropout: float,
        seed: int,
        make: type[ToeplitzBlocks],
        *tensors: Tensor,
    ) -> Tensor:
        bias = make(q.shape[2], q, *tensors)
        out = torch.empty_like(q)
        lse = q.new_empty(q.shape[:3], dtype=torch.promote_types(q.dtype, torch.float32))
        if _is_short(q) and dropout == 0:
            out, lse = flash(q, k, v, 0.0, False, attn_mask=bias.whole()[None])
        elif q.device.type == "cpu" and dropout == 0:
            for group in _groups(q, bias):
                _fused_forward((q, k, v, out, lse), bias, *group)
        else:
            _own_forward(q, k, v, bias, out, lse, dropout, seed)
        ctx.save_for_backward(q, k, v, out, lse, *tensors)
        ctx.dropout, ctx.seed, ctx.make = dropout, seed, make
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
        saved = ctx.saved_tensors  # may be unpacked only once, under activation checkpointing
        q, k, v, _, _, *tensors = saved
        make, dropout, seed, n = ctx.make, ctx.dropout, ctx.seed, q.shape[2]
        needs = *ctx.needs_input_grad[:3], *ctx.needs_input_grad[6:]

        def formula(q: Tensor, k: Tensor, v: Tensor, *tensors: Tensor) -> Tensor:
            keep = _keep(seed, 0, n, q, dropout)
            return double_backward.attention(q, k, v, make.dense(n, q, *tensors), keep)

        dq, dk, dv, *others = double_backward.differentiable(
            lambda: BlockAttention.gradients(ctx, grad, saved), formula, grad, (q, k, v, *tensors), needs
        )
        return dq, dk, dv, None, None, None, *others

    @staticmethod
    def gradients(ctx: Any, grad: Tensor, inputs: tuple[Tensor, ...]) -> tuple[Tensor | None, ...]:
        """Of q, k, v and the tensors of the bias; ``inputs``: what the forward pass has saved."""
        q, k, v, out, lse, *tensors = inputs
        bias = ctx.make(q.shape[2], q, *tensors)
        learned = any(ctx.needs_input_grad[6:])
        saved = by_rows(grad), q, k, v, out, lse
        if _is_short(q) and (learned or ctx.dropout > 0):
            keep = _keep(ctx.seed, 0, q.shape[2], q, ctx.dropout)
            dq, dk, dv, found = dense_cpu.backward(saved, bias.whole(), keep, learned)
            if found is not None:
                bias.collect(found.flip(1)[None], 0, q.shape[2], slice(None))
        elif q.device.type == "cpu" and ctx.dropout == 0 and not learned:
            dq, dk, dv = _fused_backward(saved, bias)
        else:
            dq, dk, dv = _own_backward(saved, bias, ctx.dropout, ctx.seed, learned)
        of_bias = bias.gradients() if learned else [None] * len(tensors)
        return dq.to(q.dtype), dk.to(k.dtype), dv.to(v.dtype), *of_bias


def fused(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None = None, causal: bool = False) -> Tensor:
    """Attention by torch's kernel, on a CPU with second derivatives too.

    On other devices, in compiled code and in function transforms (``torch.func``) it is torch's own operation, which
    raises an error of its own at a second derivative where its kernel has none.

    Args:
        q: (B, H, n, D).
        k: (B, H, m, D).
        v: (B, H, m, D).
        mask: (B or 1, H or 1, n, m) added to the scores, or None.
        causal: whether key j is hidden from query i for j > i; n = m, without a mask.

    Returns:
        (B, H, n, D) in q's dtype.
    """
    inputs = (q, k, v) if mask is None else (q, k, v, mask)
    needs_graph = torch.is_grad_enabled() and any(x.requires_grad for x in inputs)
    plain = not needs_graph or q.device.type != "cpu" or (mask is not None and mask.requires_grad)
    if plain or torch.compiler.is_compiling() or torch._C._are_functorch_transforms_active():
        return F.scaled_dot_product_attention(q, k, v, attn_mask=mask, is_causal=causal)
    out: Tensor = FlashAttention.apply(by_rows(q), by_rows(k), by_rows(v), mask, causal)
    return out


class FlashAttention(torch.autograd.Function):
    """torch's kernel for CPUs with the second derivatives that it lacks; the mask has no gradient."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, causal: bool) -> Tensor:
        out, lse = flash(q, k, v, 0.0, causal, attn_mask=mask)
        ctx.save_for_backward(q, k, v, out, lse, mask)
        ctx.causal = causal
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, out, lse, mask = ctx.saved_tensors
        causal = ctx.causal

        def compute() -> tuple[Tensor | None, ...]:
            return tuple(_flash_backward(by_rows(grad), q, k, v, out, lse, 0.0, causal, attn_mask=mask))

        def formula(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            bias = double_backward.future(q.shape[2], k.shape[2], q) if causal else mask
            return double_backward.attention(q, k, v, bias)

        needs = ctx.needs_input_grad[:3]
        return *double_backward.differentiable(compute, formula, grad, (q, k, v), needs), None, None


def _fused_forward(
    saved: tuple[Tensor, ...], bias: ToeplitzBlocks, rows: slice, some: slice, calls: list[tuple[slice, slice]]
) -> None:
    """Output and log-sum-exp of one of :func:`_groups`; in a function, so that all that it makes is gone after it."""
    q, k, v, out, lse = saved
    qb = q[:, some, rows].flip(2)
    for near, keys in calls:
        part = slice(rows.stop - near.stop, rows.stop - near.start)
        added = bias.block(near.start, near.stop, some)[None][..., keys]
        block, block_lse = flash(qb[:, :, part], k[:, some, keys], v[:, some, keys], 0.0, False, attn_mask=added)
        if keys.stop < near.stop:
            far, far_lse = block.to(lse.dtype), block_lse
            continue
        if keys.start:
            lower = far_lse[:, :, part]
            block = block.to(lse.dtype).lerp_(far[:, :, part], (lower - block_lse).sigmoid_()[..., None])
            block_lse = torch.logaddexp(block_lse, lower)
        out[:, some, near] = block.flip(2)
        lse[:, some, near] = block_lse.flip(2)


def _fused_backward(saved: tuple[Tensor, ...], bias: ToeplitzBlocks) -> tuple[Tensor, Tensor, Tensor]:
    """dq, dk and dv where the bias needs no gradient: torch's kernel is faster and never has the scores."""
    grad, q, k, v, out, lse = saved
    dk, dv = (torch.zeros_like(x, dtype=lse.dtype) for x in (k, v))
    dq = torch.empty_like(q)
    for rows, some, calls in _groups(q, bias):
        grads, queries, outs, sums = (x[:, some, rows].flip(2) for x in (grad, q, out, lse))
        dqb = torch.zeros_like(queries, dtype=lse.dtype)
        for near, keys in calls:
            part, seen = slice(rows.stop - near.stop, rows.stop - near.start), (slice(None), some, keys)
            g, qs, ob, lb = (x[:, :, part] for x in (grads, queries, outs, sums))
            added = bias.block(near.start, near.stop, some)[None][..., keys]
            dqs, dks, dvs = _flash_backward(g, qs, k[seen], v[seen], ob, lb, 0.0, False, attn_mask=added)
            dqb[:, :, part] += dqs
            dk[seen] += dks
            dv[seen] += dvs
        dq[:, some, rows] = dqb.flip(2)
    return dq, dk, dv


def _groups(q: Tensor, bias: ToeplitzBlocks) -> Iterator[tuple[slice, slice, list[tuple[slice, slice]]]]:
    """Rows and heads with their calls of torch's kernel, each some of the rows and keys: the keys before all first."""
    batch, heads, n, _ = q.shape
    enough = -(-2 * torch.get_num_threads() // batch)  # heads for all threads; what more of them return takes memory
    apart = n > FAR_ROWS and not bias.made and not bias.holes
    for rows in _parts(n, FORWARD_ROWS if bias.made else FAR_ROWS):
        first = rows.start if apart else 0
        calls = [(near, slice(first, near.stop)) for near in _parts(rows.stop, FORWARD_ROWS, rows.start)]
        if first:
            calls.insert(0, (rows, slice(0, first)))
        for some in _parts(heads, _fit(rows, q.device) if bias.made else enough if n > FAR_ROWS else heads):
            yield rows, some, calls


def _own_forward(
    q: Tensor, k: Tensor, v: Tensor, bias: ToeplitzBlocks, out: Tensor, lse: Tensor, dropout: float, seed: int
) -> None:
    n, heads = q.shape[2], q.shape[1]
    for rows in _parts(n, FORWARD_ROWS):
        keep = _reversed(_keep(seed, rows.start, rows.stop, q, dropout))
        for some in _parts(heads, _fit(rows, q.device) if bias.made else heads):
            added = bias.block(rows.start, rows.stop, some)[None]
            qb, kb, vb = q[:, some, rows].flip(2), k[:, some, : rows.stop], v[:, some, : rows.stop]
            scores = torch.matmul(qb.to(added.dtype), kb.to(added.dtype).mT).mul_(q.shape[3] ** -0.5).add_(added)
            top = scores.amax(-1, keepdim=True)
            weights = scores.sub_(top).mul_(LOG2E).exp2_()
            total = weights.sum(-1, keepdim=True)
            if keep is not None:
                weights.mul_(keep[:, some])
            out[:, some, rows] = torch.matmul(weights, vb.to(weights.dtype)).div_(total).flip(2)
            lse[:, some, rows] = (top + total.log())[..., 0].flip(2)


def _own_backward(
    saved: tuple[Tensor, ...], bias: ToeplitzBlocks, dropout: float, seed: int, learned: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """dq, dk and dv; with ``learned`` the bias collects the gradient of the scores, of a few heads at a time."""
    grad, q, k, v, out, lse = saved
    rounded = out.dtype != lse.dtype
    batch, heads, n, width = q.shape
    scale = width**-0.5
    dq = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    dk, dv = (torch.zeros(x.shape, dtype=lse.dtype, device=x.device) for x in (k, v))
    buffers = _Buffers(lse, batch, heads, width)
    for rows in _parts(n, BACKWARD_ROWS):
        start, stop = rows.start, rows.stop
        keep = _reversed(_keep(seed, start, stop, q, dropout))
        gb, qb, ob, lb = (x[:, :, rows].flip(2).to(lse.dtype) for x in (grad, q, out, lse))
        minus_delta, qb = (gb * ob).sum(-1, keepdim=True).neg_(), qb.mul_(scale)
        dqb = qb.new_empty(qb.shape)  # contiguous whatever the layout of q: see merged
        fit = _fit(rows, q.device)
        for some in _parts(heads, fit):
            added = bias.block(start, stop, some)
            for few in _parts(batch, max(1, fit // heads)):
                at, seen = (few, some), (few, some, slice(stop))
                g, qs, ks, vs = (merged(x.to(lse.dtype)) for x in (gb[at], qb[at], k[seen], v[seen]))
                p, ds, room = buffers.of(lb[at].shape, stop)
                torch.sub(added, lb[at][..., None], out=p)
                merged(p).baddbmm_(qs, ks.mT, beta=LOG2E, alpha=LOG2E).exp2_()
                if keep is None and not rounded:
                    merged(ds.copy_(minus_delta[at])).baddbmm_(g, vs.mT)
                else:
                    torch.bmm(g, vs.mT, out=merged(ds))
                    if keep is not None:
                        ds.mul_(keep[at])
                    # the same sum where the output was rounded, which sums of n² terms dS would show
                    ds.add_(-torch.linalg.vecdot(p, ds)[..., None] if rounded else minus_delta[at])
                ds.mul_(p)
                if keep is not None:
                    p.mul_(keep[at])
                for total, by_pair, x in ((dv, p, g), (dk, ds, qs)):
                    torch.bmm(merged(by_pair).mT, x, out=merged(room))
                    total[seen] += room
                torch.bmm(merged(ds), ks, out=merged(dqb[at]))
                if learned:
                    bias.collect(ds, start, stop, some)
        dq[:, :, rows] = dqb.mul_(scale).flip(2)
    return dq, dk, dv


def _fit(rows: slice, device: torch.device) -> int:
    """Heads whose scores of a block are worked on at a time."""
    most = GROUP_ELEMENTS if device.type == "cpu" else DEVICE_GROUP_ELEMENTS
    return max(min(torch.get_num_threads(), MOST_HEADS), most // ((rows.stop - rows.start) * rows.stop))


class _Buffers:
    """Room for the scores of a group, kept from one to the next: fresh memory costs more than what is done with it.

    Without gaps, since a product into anything else is done head by head, each by all threads.
    """

    def __init__(self, like: Tensor, batch: int, heads: int, width: int) -> None:
        sizes, products = [], []
        for rows in _parts(like.shape[2], BACKWARD_ROWS):
            fit = _fit(rows, like.device)
            group = min(fit, heads) * min(batch, max(1, fit // heads))
            sizes.append(group * (rows.stop - rows.start) * rows.stop)
            products.append(group * rows.stop * width)
        self.width = width
        self.room = [like.new_empty(max(x)) for x in (sizes, sizes, products)]

    def of(self, shape: Sequence[int], cols: int) -> tuple[Tensor, ...]:
        """Of shape (B, h, R), twice (B, h, R, M), and (B, h, M, D)."""
        batch, heads, rows = shape
        shapes = (batch, heads, rows, cols), (batch, heads, rows, cols), (batch, heads, cols, self.width)
        return tuple(x[: math.prod(shape)].view(shape) for x, shape in zip(self.room, shapes, strict=True))


def _keep(seed: int, start: int, stop: int, q: Tensor, dropout: float) -> Tensor | None:
    """The dropout mask of a block, if there is dropout."""
    batch, heads, n, _ = q.shape
    return keep_block(seed, start, stop, (batch, heads, n, n), dropout, q.device) if dropout > 0 else None


def _reversed(keep: Tensor | None) -> Tensor | None:
    return None if keep is None else keep.flip(2)


def _is_short(q: Tensor) -> bool:
    return q.device.type == "cpu" and q.shape[2] <= dense_cpu.SHORT
