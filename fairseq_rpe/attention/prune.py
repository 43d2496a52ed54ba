"""Causal attention with a Toeplitz bias that skips far keys which cannot matter, with a proved bound of the error.

The bound serves every backend that prunes; :func:`pruned_attention` is the implementation for a CPU.

Let p_j be the exact weights of a query and δ their sum over the keys that are skipped. The exact output is
o = (1 - δ)·a + δ·b with a, b the weighted means of the values retained and skipped, and the pruned output is a. So
o - a = δ·(b - a), and both means are between the least and the largest value of each component:

    |o - a| <= δ·(max_j v_j - min_j v_j) <= 2·δ·max_j |v_j|     in every component.

δ stays at ``eps`` or below without reading the skipped keys, key block by key block. For a query i, any vector m
(the mean key here) and a block J of keys, with t the table and D the head's width,

    q_i·k_j/√D + t[i-j] <= q_i·m/√D + |q_i|·max_J |k_j - m|/√D + max t      (Cauchy-Schwarz),

the last maximum over all distances between the two blocks, whether the table is monotone or not. With L_i the
log-sum-exp of the nearest keys, computed exactly, block J has at most |J|·exp(bound - L_i) of the weights, since their
denominator is at least exp(L_i). From the far end on, blocks are skipped as long as the sum of these shares stays at
or below ``eps``. ``SLACK`` covers the rounding of float32 on both sides: of products of q and k, and of the sum of one
with a bias, which is the coarser the larger the bias.

Names in the code: ``offset`` is q_i·m/√D, ``norm`` |q_i|/√D, ``radius`` max_J |k_j - m|, ``lse`` L_i, ``low``
q_i·m/√D - L_i, and ``tail`` ln|J| + max t.
"""

import math

import torch
from torch import Tensor
from torch.nn import functional as F

from fairseq_rpe.attention.double_backward import flash_attention
from fairseq_rpe.attention.plan import AttentionPlan
from fairseq_rpe.attention.toeplitz_blocks import ToeplitzBlocks
from fairseq_rpe.core.bias import ToeplitzBias
from fairseq_rpe.core.errors import UserError

BLOCK = 256  # queries, and keys, of a block
# Allowances for rounding: in nats, relative to the largest score that the norms allow, and to each entry of the bias.
# They are round numbers above what float32 can lose, 2**-24 = 6e-8 per operation: a sum of D products loses at most D
# times this of |q|·|k|, which 1e-5 exceeds up to D = 167.
SLACK, SLACK_OF_SCORE, SLACK_OF_BIAS = 1e-3, 1e-5, 1e-6


def check_eps(eps: float) -> None:
    """Check the largest share of a query's attention that may be skipped.

    Raises:
        UserError: ``eps`` is not between 0 and 1.
    """
    if not 0 < eps < 1:
        raise UserError(f"pruning leaves out at most EPS of each query's attention: 0 < EPS < 1, not {eps:g}")


def check_pruning(q: Tensor, k: Tensor, v: Tensor, plan: AttentionPlan, dropout: float) -> None:
    """Check that a call can be pruned; backends check the device.

    Args:
        q: (B, H, n, D).
        k: (B, H, m, D).
        v: (B, H, m, D).
        plan: plan whose ``prune``, ``bias`` and ``last_query`` are checked.
        dropout: probability of dropping an attention weight.

    Raises:
        UserError: several documents or blocks share a row, the plan has no bias of the distance, it has a softcap or a
            null logit, or this is training.
    """
    check_eps(plan.prune)
    if plan.last_query is not None:
        raise UserError("attention of separate documents or blocks in one row is not pruned: evaluate without pruning")
    if plan.changes_softmax:
        raise UserError("the bound of pruning does not cover softcap and null_logit: evaluate without pruning")
    if not isinstance(plan.bias, ToeplitzBias):
        raise UserError("pruning needs a bias of the distance at evenly spaced positions: evaluate without it")
    if dropout > 0 or (torch.is_grad_enabled() and any(x.requires_grad for x in (q, k, v, plan.bias.table))):
        raise UserError("pruning is for evaluation: train without it")


@torch.no_grad()
def pruned_attention(q: Tensor, k: Tensor, v: Tensor, table: Tensor, eps: float) -> Tensor:
    """Compute softmax(q·kᵀ/sqrt(D) + table[h, i-j]) v for j <= i, skipping at most ``eps`` of each query's weights.

    Args:
        q: (B, H, n, D) on a CPU.
        k: (B, H, n, D).
        v: (B, H, n, D).
        table: (H, n) of the distances 0 … n-1; may contain -inf.
        eps: largest share of a query's weights that may be skipped.

    Returns:
        (B, H, n, D). Every component differs from the exact one by at most eps·(max v - min v), and by rounding.
    """
    n = q.shape[2]
    bias = ToeplitzBlocks(n, q, subtract_max(table))
    offset, norm, radius = score_bound_terms(q, k)
    tail, may_mask_past = block_bias_bounds(bias.vector[:, :n].flip(1)), bias.may_mask_past
    out = torch.empty_like(q)
    for start in range(0, n, BLOCK):
        stop, near = min(start + BLOCK, n), max(0, start - BLOCK)  # keys near … stop-1 are always read
        rows, mask = slice(start, stop), bias.block(start, stop, slice(None))[None]  # (1, H, R, stop)
        block_q = q[:, :, rows].flip(2)  # (B, H, R, D), the last query first: only so is the mask a view of a vector
        block_out, lse = _partial_attention(
            block_q, k[:, :, near:stop], v[:, :, near:stop], mask[..., near:], may_mask_past
        )  # (B, H, R, D), (B, H, R)
        if near:
            low = offset[:, :, rows] - lse.flip(2)
            first = first_kept_key(low, norm[:, :, rows], radius[:, :, : near // BLOCK], tail, start // BLOCK, eps)
            # the retained far keys differ between heads, so each head has a separate call
            for sample, head in (first < near).nonzero().tolist():
                query_idx = slice(sample, sample + 1), slice(head, head + 1)  # slices, so that block_out gives a view
                far = slice(int(first[sample, head]), near)
                key_idx = (*query_idx, far)
                far_out, far_lse = _partial_attention(
                    block_q[query_idx], k[key_idx], v[key_idx], mask[:, head : head + 1, :, far], may_mask_past
                )
                _merge_far_keys(block_out[query_idx], lse[query_idx], far_out, far_lse)
        out[:, :, rows] = block_out.flip(2)
    return out


def _merge_far_keys(near_out: Tensor, near_lse: Tensor, far_out: Tensor, far_lse: Tensor) -> None:
    """Overwrite ``near_out`` (1, 1, R, D), a view, with the output over near and far keys: means weighted by exp(lse).

    A query that sees no key has -inf as both log-sum-exps and an output of 0.
    """
    far_share = (far_lse - near_lse).sigmoid().masked_fill(far_lse == float("-inf"), 0.0)  # (1, 1, R)
    near_out.copy_(torch.lerp(near_out, far_out, far_share[..., None]))


def _partial_attention(q: Tensor, k: Tensor, v: Tensor, bias: Tensor, may_mask_past: bool) -> tuple[Tensor, Tensor]:
    """Return output (B, H, R, D) and log-sum-exp (B, H, R) over some keys.

    For a query that sees none of these keys the log-sum-exp is -inf; torch's kernel returns 0 there. There is none
    unless ``may_mask_past``: the bias may be -inf for keys before the query.
    """
    out, lse = flash_attention(q, k, v, attn_mask=bias)
    if may_mask_past:
        lse = lse.masked_fill((bias == float("-inf")).all(-1), float("-inf"))
    return out.to(lse.dtype), lse


def score_bound_terms(q: Tensor, k: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return the terms of the bound of q_i·k_j/√D over a block of keys, with m the mean key.

    Args:
        q: (B, H, n, D).
        k: (B, H, n, D).

    Returns:
        (B, H, n) q_i·m/√D with slack for rounding, (B, H, n) |q_i|/√D, and (B, H, ⌈n / BLOCK⌉) max |k_j - m| by block.
    """
    q, k = q.to(torch.promote_types(q.dtype, torch.float32)), k.to(torch.promote_types(k.dtype, torch.float32))
    mean = k.mean(2, keepdim=True)
    scale = q.shape[3] ** -0.5
    norm = q.norm(dim=3) * scale
    slack = SLACK + SLACK_OF_SCORE * norm * k.norm(dim=3).amax(2, keepdim=True)
    radius = F.pad((k - mean).norm(dim=3), (0, -k.shape[2] % BLOCK)).unflatten(2, (-1, BLOCK)).amax(3)  # (B, H, N)
    # vecdot, because a matrix product might be in TF32
    return torch.linalg.vecdot(q, mean) * scale + slack, norm, radius


def subtract_max(table: Tensor) -> Tensor:
    """Return a table (H, n) less its largest element by head: softmax ignores it, and sums with scores keep digits."""
    top = table.amax(1, keepdim=True)
    return table - top.masked_fill(top == float("-inf"), 0.0)


def block_bias_bounds(table: Tensor) -> Tensor:
    """Return ln BLOCK + the largest bias between two blocks 0, 1, … apart, with slack for rounding.

    Args:
        table: (H, n) of the distances 0 … n-1.

    Returns:
        (H, N) with N = ⌈n / BLOCK⌉.
    """
    blocks = math.ceil(table.shape[1] / BLOCK)
    padded = F.pad(
        table + SLACK_OF_BIAS * table.abs().nan_to_num(posinf=0.0),
        (BLOCK - 1, (blocks + 1) * BLOCK - table.shape[1]),
        value=float("-inf"),
    )
    # blocks t apart have the distances (t - 1)·BLOCK + 1 … (t + 1)·BLOCK - 1
    return F.max_pool1d(padded, 2 * BLOCK - 1, BLOCK)[:, :blocks] + math.log(BLOCK)


def first_kept_key(low: Tensor, norm: Tensor, radius: Tensor, tail: Tensor, block: int, eps: float) -> Tensor:
    """Return (B, H) index of the first key that block ``block`` of queries reads, a multiple of BLOCK.

    Args:
        low: (B, H, R) q_i·m/√D with the slack, less the log-sum-exp of the nearest keys.
        norm: (B, H, R) |q_i|/√D.
        radius: (B, H, J) of the J blocks of keys before the nearest.
        tail: upper bounds of the bias by distance in blocks, as :func:`block_bias_bounds` returns them.
        block: number of the block of queries.
        eps: largest share of a query's weights that may be skipped.
    """
    worst = (norm[..., None] * radius[:, :, None] + low[..., None]).amax(2)  # (B, H, J), over the block's queries
    # key block 0, the farthest, is ``block`` blocks away; key block J - 1, the nearest here, block - J + 1 blocks
    count = radius.shape[2]
    log_share = worst + tail[:, block - count + 1 : block + 1].flip(1)  # (B, H, J), the farthest first
    # Sums of shares grow, so the blocks at or below eps are the first ones: their number is the first block kept.
    # A query that sees no near key (log-sum-exp -inf) makes a share inf or nan, which is never below eps: it is kept.
    return (log_share.logcumsumexp(2) <= math.log(eps)).sum(2) * BLOCK
