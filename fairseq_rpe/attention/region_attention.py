"""Attention whose pairs are rotated by regions, in blocks of query rows: O(n) memory, and only visible keys.

Each region of a block is one call of torch's kernel over the keys that the block can see in it. The call returns the
weighted mean of the values and the log-sum-exp of the scores. Merging means by log-sum-exps is one softmax over all
regions.
"""

from functools import partial

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from fairseq_rpe.attention.double_backward import contiguous_rows, flash_attention
from fairseq_rpe.attention.dropout import draw_seed, keep_block
from fairseq_rpe.attention.plan import QUERY_BLOCK, AttentionPlan, KeyRange

RotatedRegions = list[tuple[KeyRange, Tensor, Tensor]]  # a region, all queries and its keys, rotated for the region


def attend_by_region(q: Tensor, k: Tensor, v: Tensor, plan: AttentionPlan, dropout: float = 0.0) -> Tensor:
    """Compute what :func:`~fairseq_rpe.attention.reference.reference` does for a plan with rotation regions.

    torch's kernel serves a CPU without gradients and dropout. Otherwise the scores of a block of queries are stored,
    and computed again in the backward pass.

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
    rotated: RotatedRegions = []
    for key_range in plan.key_ranges:
        region, keys = key_range.region, k[:, :, key_range.keys]
        region_q = contiguous_rows(plan.rotate(q, region.q, plan.positions))  # (B, H, n, D)
        region_k = contiguous_rows(plan.rotate(keys, region.k, plan.positions, key=True))  # (B, H, K, D)
        rotated.append((key_range, region_q, region_k))
    if not rotated:  # no pair is in any region
        return torch.zeros_like(q)
    tensors = (v, *(x for _, region_q, region_k in rotated for x in (region_q, region_k)))
    # torch's kernel returns the log-sum-exp that merges regions, but no gradient of it
    needs_grad = torch.is_grad_enabled() and any(x.requires_grad for x in tensors)
    block_count = -(-q.shape[2] // QUERY_BLOCK)
    if q.device.type == "cpu" and dropout == 0 and not needs_grad:
        blocks = [_fused_block(rotated, contiguous_rows(v), plan, number) for number in range(block_count)]
    else:
        seed = draw_seed() if dropout > 0 else 0
        attend = partial(_eager_block, rotated, v, plan, dropout, seed)
        if needs_grad:
            attend = partial(checkpoint, attend, use_reentrant=False, preserve_rng_state=False)
        blocks = [attend(number) for number in range(block_count)]
    return torch.cat(blocks, dim=2)


def _fused_block(rotated: RotatedRegions, v: Tensor, plan: AttentionPlan, number: int) -> Tensor:
    """Return one block (B, H, R, D) by torch's kernel; 0 for a query that sees no key."""
    queries = _block_queries(plan, number)
    wide = torch.promote_types(v.dtype, torch.float32)
    out = v.new_zeros(*v.shape[:2], queries.stop - queries.start, v.shape[3], dtype=wide)
    lse = out.new_full(out.shape[:3], float("-inf"))  # (B, H, R)
    for key_range, q, k in rotated:
        keys = key_range.blocks[number]
        seen = _visibility(plan, key_range, queries, keys)  # (B or 1, 1, R, K)
        sees_any = seen.any(-1)  # (B or 1, 1, R)
        if not sees_any.any():
            continue
        mask = None if seen.all() else out.new_zeros(seen.shape).masked_fill_(~seen, float("-inf"))
        region_keys = k[:, :, _within_range(key_range, keys)]
        region_out, region_lse = flash_attention(
            q[:, :, queries], region_keys, v[:, :, keys], 0.0, False, attn_mask=mask
        )
        # the kernel's output for a row that sees none of these keys is meaningless
        region_out = region_out.to(wide).masked_fill(~sees_any[..., None], 0.0)
        region_lse = region_lse.masked_fill(~sees_any, float("-inf"))
        # means weighted by exp(lse): sigmoid(a - b) = eᵃ / (eᵃ + eᵇ)
        share = (region_lse - lse).sigmoid().masked_fill(~sees_any, 0.0)
        out, lse = torch.lerp(out, region_out, share[..., None]), torch.logaddexp(lse, region_lse)
    return out.to(v.dtype)


def _eager_block(
    rotated: RotatedRegions, v: Tensor, plan: AttentionPlan, dropout: float, seed: int, number: int
) -> Tensor:
    """Return one block (B, H, R, D) by differentiable operations, with its scores in memory."""
    queries, (n, m) = _block_queries(plan, number), (plan.positions.q.shape[1], v.shape[2])
    wide = torch.promote_types(v.dtype, torch.float32)
    region_scores, region_keys = [], []
    for key_range, q, k in rotated:
        keys = key_range.blocks[number]
        products = torch.matmul(q[:, :, queries].to(wide), k[:, :, _within_range(key_range, keys)].to(wide).mT)
        scores = products * q.shape[3] ** -0.5  # (B, H, R, K)
        region_scores.append(scores.masked_fill(~_visibility(plan, key_range, queries, keys), float("-inf")))
        region_keys.append(keys)
    # one softmax over the keys of all regions side by side; a key may be in several regions, but a pair is in one
    all_scores = torch.cat(region_scores, dim=-1)
    empty = (all_scores == float("-inf")).all(-1, keepdim=True)
    weights = all_scores.masked_fill(empty, 0.0).softmax(-1).masked_fill(empty, 0.0)
    if dropout > 0:
        keep = keep_block(seed, queries.start, queries.stop, (*v.shape[:2], n, m), dropout, v.device)
        weights = weights * torch.cat([keep[..., keys] for keys in region_keys], dim=-1)
    return torch.matmul(weights, torch.cat([v[:, :, keys] for keys in region_keys], dim=2).to(wide)).to(v.dtype)


def _block_queries(plan: AttentionPlan, number: int) -> slice:
    """Return the queries of block ``number``."""
    return slice(number * QUERY_BLOCK, min((number + 1) * QUERY_BLOCK, plan.positions.q.shape[1]))


def _within_range(key_range: KeyRange, keys: slice) -> slice:
    """Return the same keys, counted from the first key of the range."""
    return slice(keys.start - key_range.keys.start, keys.stop - key_range.keys.start)


def _visibility(plan: AttentionPlan, key_range: KeyRange, queries: slice, keys: slice) -> Tensor:
    """Return (B or 1, 1, R, K) bool, True at pairs of this region whose query sees the key."""
    pos = plan.positions
    i, j = pos.q[:, None, queries, None], pos.k[:, None, None, keys]
    before = pos.k.shape[1] - pos.q.shape[1]
    # index of each query among the m tokens
    rows = torch.arange(before + queries.start, before + queries.stop, device=i.device)[:, None]
    seen = key_range.region.covers(i, j) & (torch.arange(keys.start, keys.stop, device=i.device) <= rows)
    if plan.last_query is not None:
        seen = seen & (rows <= plan.last_query[:, None, None, keys])
    return seen if plan.padding is None else seen & ~plan.padding[:, None, None, keys]
