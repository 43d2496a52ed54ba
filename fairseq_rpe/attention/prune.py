"""Causal attention with a Toeplitz bias that skips far keys which cannot matter, with a proved bound of the error.

The bound serves every backend that prunes; ``pruned`` is the one for a CPU.

Write p_j for the exact weights of a query and δ for the part of them on the keys that are left out. The exact output is
o = (1 - δ)·a + δ·b with a, b the weighted means of the values kept and left out, and the pruned output is a. So
o - a = δ·(b - a), and both means lie between the least and the largest value of each component:

    |o - a| <= δ·(max_j v_j - min_j v_j) <= 2·δ·max_j |v_j|     in every component.

δ is kept at ``eps`` or below without looking at the keys left out, key block by key block. For a query i, any vector m
(the mean key here) and a block J of keys, with t the table and D the head's width,

    q_i·k_j/√D + t[i-j] <= q_i·m/√D + |q_i|·max_J |k_j - m|/√D + max t      (Cauchy-Schwarz),

the last maximum over all distances between the two blocks, whether the table is monotone or not. With L_i the
log-sum-exp of the nearest keys, computed exactly, block J holds at most |J|·exp(bound - L_i) of the weights, since what
they are divided by is at least exp(L_i). From the far end on, blocks are left out as long as the sum of these stays at
or below ``eps``. ``SLACK`` covers the rounding of float32 on both sides: of products of q and k, and of the sum of one
with a bias, which is the coarser the larger the bias.
"""

import math

import torch
from torch import Tensor
from torch.nn import functional as F

from fairseq_rpe.attention.plan import Plan
from fairseq_rpe.attention.toeplitz_attention import ToeplitzBlocks, flash
from fairseq_rpe.core.bias import ToeplitzBias
from fairseq_rpe.core.errors import UserError

BLOCK = 256  # queries, and keys, that are decided about together
# nats; a part of the largest score that the norms allow; and of the largest bias
SLACK, SLACK_OF_SCORE, SLACK_OF_BIAS = 1e-3, 1e-5, 1e-6


def check_eps(eps: float) -> None:
    """Refuse, with a UserError, what is not a part of a query's weights."""
    if not 0 < eps < 1:
        raise UserError(f"pruning leaves out at most EPS of each query's attention: 0 < EPS < 1, not {eps:g}")


def check_pruning(q: Tensor, k: Tensor, v: Tensor, plan: Plan, dropout: float) -> None:
    """Raise a UserError that says what stands against pruning this attention; on which devices, a backend knows."""
    check_eps(plan.prune)
    if plan.last_query is not None:
        raise UserError("attention of separate documents in one row is not pruned: evaluate without pruning")
    if not isinstance(plan.form, ToeplitzBias):
        raise UserError("pruning needs a bias of the distance at evenly spaced positions: evaluate without it")
    if dropout > 0 or (torch.is_grad_enabled() and any(x.requires_grad for x in (q, k, v, plan.form.table))):
        raise UserError("pruning is for evaluation: train without it")


@torch.no_grad()
def pruned(q: Tensor, k: Tensor, v: Tensor, table: Tensor, eps: float) -> Tensor:
    """softmax(q·kᵀ/sqrt(D) + table[h, i-j]) v for j <= i, without keys of at most ``eps`` of each query's weights.

    Args:
        q, k, v: (B, H, n, D) on a CPU.
        table: (H, n) of the distances 0 … n-1; may hold -inf.
        eps: largest part of a query's weights that may be left out.

    Returns:
        (B, H, n, D): within eps·(max v - min v) of the exact output in every component, but for rounding.
    """
    n = q.shape[2]
    bias = ToeplitzBlocks(n, q, level(table))
    offset, norm, radius = norms(q, k)
    tail, holes = tail_bounds(bias.vector[:, :n].flip(1)), bias.holes
    out = torch.empty_like(q)
    for start in range(0, n, BLOCK):
        stop, near = min(start + BLOCK, n), max(0, start - BLOCK)
        rows, added = slice(start, stop), bias.block(start, stop, slice(None))[None]
        qb = q[:, :, rows].flip(2)
        found, lse = _partial(qb, k[:, :, near:stop], v[:, :, near:stop], added[..., near:], holes)
        if near:
            low = offset[:, :, rows] - lse.flip(2)
            first = left_out(low, norm[:, :, rows], radius[:, :, : near // BLOCK], tail, start // BLOCK, eps)
            for b, h in (first < near).nonzero().tolist():
                one, far = (slice(b, b + 1), slice(h, h + 1)), slice(int(first[b, h]), near)
                seen = (*one, far)
                more, more_lse = _partial(qb[one], k[seen], v[seen], added[:, one[1], :, far], holes)
                # a query that sees no key, near or far, has -inf twice and an output of 0
                share = (more_lse - lse[one]).sigmoid().masked_fill(more_lse == float("-inf"), 0.0)
                found[one] = torch.lerp(found[one], more, share[..., None])
        out[:, :, rows] = found.flip(2)
    return out


def _partial(q: Tensor, k: Tensor, v: Tensor, bias: Tensor, holes: bool) -> tuple[Tensor, Tensor]:
    """Output over some keys and log-sum-exp (B, H, R); torch's kernel says 0 where a row sees none."""
    out, lse = flash(q, k, v, 0.0, False, attn_mask=bias)
    if holes:
        lse = lse.masked_fill((bias == float("-inf")).all(-1), float("-inf"))
    return out.to(lse.dtype), lse


def norms(q: Tensor, k: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """q_i·m/√D with the slack for rounding and |q_i|/√D, each (B, H, n); max |k_j - m| by block, (B, H, n / BLOCK)."""
    q, k = q.to(torch.promote_types(q.dtype, torch.float32)), k.to(torch.promote_types(k.dtype, torch.float32))
    mean = k.mean(2, keepdim=True)
    scale = q.shape[3] ** -0.5
    norm = q.norm(dim=3) * scale
    slack = SLACK + SLACK_OF_SCORE * norm * k.norm(dim=3).amax(2, keepdim=True)
    radius = F.pad((k - mean).norm(dim=3), (0, -k.shape[2] % BLOCK)).unflatten(2, (-1, BLOCK)).amax(3)
    return torch.linalg.vecdot(q, mean) * scale + slack, norm, radius  # a product of matrices might be in TF32


def level(table: Tensor) -> Tensor:
    """(H, n) less its largest element by head, which softmax does not see: sums with scores then keep their digits."""
    top = table.amax(1, keepdim=True)
    return table - top.masked_fill(top == float("-inf"), 0.0)


def tail_bounds(table: Tensor) -> Tensor:
    """(H, n) -> (H, N): ln BLOCK + the largest bias between two blocks 0, 1, … apart, with slack for rounding."""
    blocks = math.ceil(table.shape[1] / BLOCK)
    padded = F.pad(
        table + SLACK_OF_BIAS * table.abs().nan_to_num(posinf=0.0),
        (BLOCK - 1, (blocks + 1) * BLOCK - table.shape[1]),
        value=float("-inf"),
    )
    return F.max_pool1d(padded, 2 * BLOCK - 1, BLOCK)[:, :blocks] + math.log(BLOCK)


def left_out(low: Tensor, norm: Tensor, radius: Tensor, tail: Tensor, block: int, eps: float) -> Tensor:
    """(B, H) index of the first key to keep for block ``block`` of queries, a multiple of BLOCK.

    Args:
        low: (B, H, R) q_i·m/√D with the slack, less the log-sum-exp of the nearest keys.
        norm: (B, H, R) |q_i|/√D.
        radius: (B, H, J) of the J blocks of keys before the nearest.
        tail: of ``tail_bounds``.
    """
    worst = (norm[..., None] * radius[:, :, None] + low[..., None]).amax(2)
    count = radius.shape[2]
    mass = worst + tail[:, block - count + 1 : block + 1].flip(1)
    return (mass.logcumsumexp(2) <= math.log(eps)).sum(2) * BLOCK
