"""Pruned attention with Triton's forward kernel; ``prune`` has the bound of the error.

The kernel runs twice: over the nearest keys, whose log-sum-exp the bound needs, and over all that are kept.
"""

from __future__ import annotations

import math

import torch
import triton
from torch import Tensor

from ..prune import BLOCK, left_out, norms, tail_bounds
from .arguments import arguments, arranged
from .tuning import FORWARD, launch


@torch.no_grad()
def pruned(q: Tensor, k: Tensor, v: Tensor, table: Tensor, eps: float) -> Tensor:
    """softmax(q·kᵀ/sqrt(D) + table[h, i-j]) v for j <= i, without keys of at most ``eps`` of each query's weights.

    The same as :func:`~fairseq_rpe.attention.prune.pruned`. q, k, v: (B, H, n, D); table: (H, n); gives (B, H, n, D).
    """
    q, k, v = arranged(q, k, v)
    batch, heads, n, _ = q.shape
    blocks = triton.cdiv(n, BLOCK)
    out, lse = torch.empty_like(q), torch.empty(q.shape[:3], dtype=torch.float32, device=q.device)
    first = (torch.arange(blocks, dtype=torch.int32, device=q.device) - 1).clamp_min(0) * BLOCK
    first = first.expand(batch, heads, blocks).contiguous()
    shared = arguments(q, k, v, None, table) | {"first": first, "out": out, "lse": lse}
    launch(FORWARD, n, "BLOCK_M", shared)
    offset, norm, radius = norms(q, k)
    low, tail = offset - lse * math.log(2), tail_bounds(table.float())
    for block in range(2, blocks):
        rows, before = slice(block * BLOCK, (block + 1) * BLOCK), slice(block - 1)
        first[:, :, block] = left_out(low[:, :, rows], norm[:, :, rows], radius[:, :, before], tail, block, eps)
    launch(FORWARD, n, "BLOCK_M", shared)
    return out
