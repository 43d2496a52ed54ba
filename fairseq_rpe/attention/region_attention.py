"""Attention of encodings that rotate (query, key) pairs differently in different regions, in blocks of query rows.

A *region* is a set of (query, key) pairs, such as "at most w tokens apart", with the positions for which it rotates
queries and keys (``core/rotation_regions.py``). A visible pair is in at most one region, and a softmax runs over the
keys of all regions of a query.

Blocks of 256 queries are computed one after the other, each with the keys that it can see in each region. So memory is
O(n) instead of O(n²), and keys out of sight cost nothing. There are two implementations of a block:

- :func:`_fused_block`, on a CPU without gradients and dropout, calls torch's attention kernel once for each region. The
  kernel returns the weighted mean of the values, and the log-sum-exp of the scores. Averaging the means of regions,
  weighted by the exponentials of their log-sum-exps, gives the softmax over all regions.
- :func:`_eager_block`, in all other cases, computes the scores of all regions and one softmax.
"""

from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from fairseq_rpe.attention.double_backward import contiguous_rows, flash_attention
from fairseq_rpe.attention.dropout import draw_seed, keep_block
from fairseq_rpe.attention.plan import QUERY_BLOCK, AttentionPlan, KeyRange


@dataclass(frozen=True)
class _RotatedRegion:
    """Queries and keys rotated for one region.

    Attributes:
        key_range: the region, and its keys as slices of all m keys.
        q: (B, H, n, D) all queries.
        k: (B, H, K, D) the keys ``key_range.keys``.
    """

    key_range: KeyRange
    q: Tensor
    k: Tensor


def attend_by_region(q: Tensor, k: Tensor, v: Tensor, plan: AttentionPlan, dropout: float = 0.0) -> Tensor:
    """Compute attention for a plan with rotation regions, as :func:`~fairseq_rpe.attention.reference.reference` does.

    Where gradients are needed, the scores of a block are freed after its forward pass, and the backward pass computes
    them again (activation checkpointing).

    Args:
        q: (B, H, n, D), not rotated.
        k: (B, H, m, D), not rotated.
        v: (B, H, m, D).
        plan: plan with ``rotate`` and ``rotation_regions``, for n queries and m keys.
        dropout: probability of dropping an attention weight.

    Returns:
        (B, H, n, D) in q's dtype.
    """
    assert plan.rotate is not None
    rotated = []
    for key_range in plan.key_ranges:
        region, keys = key_range.region, k[:, :, key_range.keys]
        # torch's kernel silently misreads tensors whose last dimension has another stride than 1
        region_q = contiguous_rows(plan.rotate(q, region.q, plan.positions))
        region_k = contiguous_rows(plan.rotate(keys, region.k, plan.positions, key=True))
        rotated.append(_RotatedRegion(key_range, region_q, region_k))
    if not rotated:  # no pair is in any region
        return torch.zeros_like(q)
    tensors = (v, *(x for region in rotated for x in (region.q, region.k)))
    needs_grad = torch.is_grad_enabled() and any(x.requires_grad for x in tensors)
    block_count = -(-q.shape[2] // QUERY_BLOCK)  # rounded up
    # the kernel has no gradient of the log-sum-exp, and no dropout
    if q.device.type == "cpu" and dropout == 0 and not needs_grad:
        v = contiguous_rows(v)
        blocks = [_fused_block(rotated, v, plan, number) for number in range(block_count)]
    else:
        seed = draw_seed() if dropout > 0 else 0
        attend = partial(_eager_block, rotated, v, plan, dropout, seed)
        if needs_grad:
            # The state of torch's random numbers need not be restored for the second computation: ``seed`` alone
            # decides the dropout mask.
            attend = partial(checkpoint, attend, use_reentrant=False, preserve_rng_state=False)
        blocks = [attend(number) for number in range(block_count)]
    return torch.cat(blocks, dim=2)


def _fused_block(rotated: list[_RotatedRegion], v: Tensor, plan: AttentionPlan, number: int) -> Tensor:
    """Return block ``number`` of the output, (B, H, R, D), by torch's kernel; 0 for a query that sees no key.

    ``out`` and ``lse`` are the output and the log-sum-exp over the regions so far: 0 and -inf for a query that has seen
    no key yet.
    """
    queries = _block_queries(plan, number)
    wide = torch.promote_types(v.dtype, torch.float32)
    out = v.new_zeros(*v.shape[:2], queries.stop - queries.start, v.shape[3], dtype=wide)  # (B, H, R, D)
    lse = out.new_full(out.shape[:3], float("-inf"))  # (B, H, R)
    for region in rotated:
        keys = region.key_range.blocks[number]  # indices among all m keys
        seen = _visibility(plan, region.key_range, queries, keys)  # (B or 1, 1, R, K)
        sees_any = seen.any(-1)  # (B or 1, 1, R)
        if not sees_any.any():
            continue
        mask = None if seen.all() else out.new_zeros(seen.shape).masked_fill_(~seen, float("-inf"))
        block_q, block_k = region.q[:, :, queries], region.k[:, :, _within_range(region.key_range, keys)]
        region_out, region_lse = flash_attention(block_q, block_k, v[:, :, keys], attn_mask=mask)
        # the kernel's output for a query that sees none of these keys is meaningless, and may be NaN
        region_out = region_out.to(wide).masked_fill(~sees_any[..., None], 0.0)  # (B, H, R, D)
        region_lse = region_lse.masked_fill(~sees_any, float("-inf"))  # (B, H, R)
        # The region's share of the softmax is exp(region_lse) / (exp(lse) + exp(region_lse)), which is this sigmoid.
        # lerp(a, b, share) is (1 - share)·a + share·b. Where both log-sum-exps are -inf, their difference is NaN; such
        # a query sees no key of the region, so the fill replaces the NaN.
        share = (region_lse - lse).sigmoid().masked_fill(~sees_any, 0.0)
        out = torch.lerp(out, region_out, share[..., None])
        lse = torch.logaddexp(lse, region_lse)
    return out.to(v.dtype)


def _eager_block(
    rotated: list[_RotatedRegion], v: Tensor, plan: AttentionPlan, dropout: float, seed: int, number: int
) -> Tensor:
    """Return block ``number`` of the output, (B, H, R, D), by differentiable operations; 0 for a query without keys.

    The keys of all regions stand side by side, K in all. A key may be there several times, once for each region, but
    its pair with a query is visible in at most one of them.
    """
    queries, (n, m) = _block_queries(plan, number), (plan.positions.q.shape[1], v.shape[2])
    wide = torch.promote_types(v.dtype, torch.float32)
    region_scores, region_keys = [], []
    for region in rotated:
        keys = region.key_range.blocks[number]  # indices among all m keys
        block_q, block_k = region.q[:, :, queries], region.k[:, :, _within_range(region.key_range, keys)]
        scores = torch.matmul(block_q.to(wide), block_k.to(wide).mT) * block_q.shape[3] ** -0.5
        seen = _visibility(plan, region.key_range, queries, keys)
        region_scores.append(scores.masked_fill(~seen, float("-inf")))
        region_keys.append(keys)
    all_scores = torch.cat(region_scores, dim=-1)  # (B, H, R, K)
    # a softmax of -inf alone is NaN, also in its gradient: such rows get scores and then weights of 0
    empty = (all_scores == float("-inf")).all(-1, keepdim=True)  # (B, H, R, 1)
    weights = all_scores.masked_fill(empty, 0.0).softmax(-1).masked_fill(empty, 0.0)
    if dropout > 0:
        # The mask of the block over all keys, as every backend draws it: column j is key j. The keys of the regions are
        # selected from it in the order of the scores.
        keep = keep_block(seed, queries.start, queries.stop, (*v.shape[:2], n, m), dropout, v.device)
        weights = weights * torch.cat([keep[..., keys] for keys in region_keys], dim=-1)
    values = torch.cat([v[:, :, keys] for keys in region_keys], dim=2)  # (B, H, K, D)
    return torch.matmul(weights, values.to(wide)).to(v.dtype)


def _block_queries(plan: AttentionPlan, number: int) -> slice:
    """Return the queries of block ``number``."""
    return slice(number * QUERY_BLOCK, min((number + 1) * QUERY_BLOCK, plan.positions.q.shape[1]))


def _within_range(key_range: KeyRange, keys: slice) -> slice:
    """Convert a slice of all m keys to a slice of the keys ``key_range.keys``."""
    return slice(keys.start - key_range.keys.start, keys.stop - key_range.keys.start)


def _visibility(plan: AttentionPlan, key_range: KeyRange, queries: slice, keys: slice) -> Tensor:
    """Return (B or 1, 1, R, K) bool, True at pairs of this region whose query sees the key.

    Positions, in tokens, decide whether a pair is in the region. Indices among the m tokens decide whether the query
    sees the key: an encoding may see warped or repeated positions, but causality counts tokens.

    Args:
        plan: plan of the call.
        key_range: range of keys of the region.
        queries: slice of the n queries.
        keys: slice of the m keys.
    """
    pos = plan.positions
    device, first_query = pos.q.device, pos.k.shape[1] - pos.q.shape[1]  # the queries are the last n of the m tokens
    in_region = key_range.region.covers(pos.q[:, None, queries, None], pos.k[:, None, None, keys])
    query_index = torch.arange(first_query + queries.start, first_query + queries.stop, device=device)[:, None]
    key_index = torch.arange(keys.start, keys.stop, device=device)
    seen = in_region & (key_index <= query_index)
    if plan.last_query is not None:
        seen = seen & (query_index <= plan.last_query[:, None, None, keys])
    return seen if plan.padding is None else seen & ~plan.padding[:, None, None, keys]
