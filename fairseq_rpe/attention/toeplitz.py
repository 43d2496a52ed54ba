"""Causal attention with a Toeplitz bias: forward and backward in blocks of rows, O(n) memory, gradient of the table."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor
from torch.autograd.function import FunctionCtx, once_differentiable

from .dropout import ROWS, keep_block

FORWARD_ROWS, BACKWARD_ROWS = 256, 256  # multiples of dropout.ROWS, so that blocks draw whole mask blocks
_flash = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
_flash_backward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward
assert FORWARD_ROWS % ROWS == BACKWARD_ROWS % ROWS == 0


def _vector(table: Tensor | None, heads: int, n: int, like: Tensor) -> Tensor:
    """(H, 2n): entry x holds the bias of distance n-1-x, and -inf where that is the future."""
    u = like.new_full((heads, 2 * n), float("-inf"), dtype=torch.promote_types(like.dtype, torch.float32))
    u[:, :n] = 0.0 if table is None else table.detach().flip(1)
    return u


def _bias(u: Tensor, n: int, start: int, stop: int) -> Tensor:
    """(1, H, stop-start, stop) view: row r is query stop-1-r, column j is key j, distance stop-1-r-j."""
    return u.as_strided((1, u.shape[0], stop - start, stop), (0, u.stride(0), 1, 1), n - stop)


def _blocks(n: int, rows: int) -> Iterator[tuple[int, int]]:
    for start in range(0, n, rows):
        yield start, min(start + rows, n)


def _diagonal_sums(ds: Tensor) -> Tensor:
    """(H, R, M) with reversed rows -> (H, R + M - 1): entry x sums all (r, j) with r + j = x.

    Padding each row by R and reading the buffer in rows one shorter shifts row r by r, so columns line up.
    """
    heads, rows, cols = ds.shape
    wide = ds.new_zeros(heads, rows, cols + rows)
    wide[:, :, :cols] = ds
    return wide.flatten(1)[:, : rows * (cols + rows - 1)].view(heads, rows, cols + rows - 1).sum(1)


class ToeplitzAttention(torch.autograd.Function):
    """softmax(q·kᵀ/sqrt(D) + table[h, i-j]) v for j <= i.

    q, k, v: (B, H, n, D); table: (H, n) or None for no bias; dropout and its seed as in ``dropout.keep_block``.
    The backward pass recomputes the weights from the saved log-sum-exp. Gradients of gradients are not available.
    """

    @staticmethod
    def forward(
        ctx: FunctionCtx, q: Tensor, k: Tensor, v: Tensor, table: Tensor | None, dropout: float, seed: int
    ) -> Tensor:
        n = q.shape[2]
        u = _vector(table, q.shape[1], n, q)
        out = torch.empty_like(q)
        lse = q.new_empty(q.shape[:3], dtype=u.dtype)
        fused = q.device.type == "cpu" and dropout == 0
        for start, stop in _blocks(n, FORWARD_ROWS):
            bias, qb, kb, vb = _bias(u, n, start, stop), q[:, :, start:stop].flip(2), k[:, :, :stop], v[:, :, :stop]
            if fused:
                block, block_lse = _flash(qb, kb, vb, 0.0, False, attn_mask=bias)
            else:
                scores = _scores(qb, kb, bias)
                block_lse = scores.logsumexp(-1)
                weights = scores.sub_(block_lse[..., None]).exp_()
                if dropout > 0:
                    weights *= _keep(seed, start, stop, q, dropout)
                block = torch.matmul(weights, vb.to(weights.dtype))
            out[:, :, start:stop] = block.flip(2)
            lse[:, :, start:stop] = block_lse.flip(2)
        ctx.save_for_backward(q, k, v, table, out, lse)
        ctx.dropout, ctx.seed = dropout, seed
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: FunctionCtx, grad: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, table, out, lse = ctx.saved_tensors
        n = q.shape[2]
        u = _vector(table, q.shape[1], n, q)
        learned = ctx.needs_input_grad[3]
        fused = q.device.type == "cpu" and ctx.dropout == 0 and not learned
        dq, dk, dv = torch.empty_like(q), torch.zeros_like(k, dtype=u.dtype), torch.zeros_like(v, dtype=u.dtype)
        du = torch.zeros_like(u) if learned else None
        for start, stop in _blocks(n, BACKWARD_ROWS):
            bias, qb, kb, vb = _bias(u, n, start, stop), q[:, :, start:stop].flip(2), k[:, :, :stop], v[:, :, :stop]
            gb, ob, lb = (x[:, :, start:stop].flip(2) for x in (grad, out, lse))
            if fused:
                dqb, dkb, dvb = _flash_backward(gb, qb, kb, vb, ob, lb, 0.0, False, attn_mask=bias)
            else:
                keep = _keep(ctx.seed, start, stop, q, ctx.dropout) if ctx.dropout > 0 else None
                dqb, dkb, dvb, ds = _block_backward(gb, qb, kb, vb, ob, lb, bias, keep)
                if learned:
                    du[:, n - stop : n - stop + ds.shape[1] + stop - 1] += _diagonal_sums(ds)
            dq[:, :, start:stop] = dqb.flip(2)
            dk[:, :, :stop] += dkb
            dv[:, :, :stop] += dvb
        dtable = du[:, :n].flip(1).to(table.dtype) if learned else None
        return dq, dk.to(k.dtype), dv.to(v.dtype), dtable, None, None


def _scores(q: Tensor, k: Tensor, bias: Tensor) -> Tensor:
    scores = torch.matmul(q.to(bias.dtype), k.to(bias.dtype).transpose(-1, -2))
    return scores.mul_(q.shape[-1] ** -0.5).add_(bias)


def _keep(seed: int, start: int, stop: int, q: Tensor, dropout: float) -> Tensor:
    """The dropout mask of a block with its rows reversed."""
    batch, heads, n, _ = q.shape
    return keep_block(seed, start, stop, (batch, heads, n, n), dropout, q.device).flip(2)


def _block_backward(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, bias: Tensor, keep: Tensor | None
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """dq, dk, dv of one block and its dS summed over the batch, (H, R, M), all in the bias's dtype."""
    weights = _scores(q, k, bias).sub_(lse[..., None]).exp_()
    q, k, v, grad, out = (x.to(bias.dtype) for x in (q, k, v, grad, out))
    dweights = torch.matmul(grad, v.transpose(-1, -2))
    dropped = weights if keep is None else weights * keep
    if keep is not None:
        dweights *= keep
    dv = torch.matmul(dropped.transpose(-1, -2), grad)
    ds = dweights.sub_((grad * out).sum(-1, keepdim=True)).mul_(weights)
    scale = q.shape[-1] ** -0.5
    return torch.matmul(ds, k).mul_(scale), torch.matmul(ds.transpose(-1, -2), q).mul_(scale), dv, ds.sum(0)
