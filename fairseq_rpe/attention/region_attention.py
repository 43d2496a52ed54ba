"""Attention whose pairs are turned by regions, in blocks of query rows: O(n) memory, and only keys that can be seen.

Each region of a block is one call of torch's kernel over the keys that the block can see in it. It gives the mean of
the values and the log-sum-exp of the scores; means are merged by the latter, which is one softmax over all regions.
"""

from functools import partial

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from fairseq_rpe.attention.dropout import draw_seed, keep_block
from fairseq_rpe.attention.key_ranges import ROWS, Nearby
from fairseq_rpe.attention.plan import Plan
from fairseq_rpe.attention.toeplitz_attention import by_rows, flash

Turned = list[tuple[Nearby, Tensor, Tensor]]  # a region, all queries and its keys as they are turned in it


def regional(q: Tensor, k: Tensor, v: Tensor, plan: Plan, dropout: float = 0.0) -> Tensor:
    """The same as :func:`~fairseq_rpe.attention.reference.reference` of a plan with regions.

    q (B, H, n, D), k, v (B, H, m, D), not turned -> (B, H, n, D). torch's kernel serves a CPU where there are neither
    gradients nor dropout; elsewhere scores of a block of queries are in memory, and made again in the backward pass.
    """
    assert plan.rotate is not None
    turned: Turned = []
    for near in plan.nearby:
        queries = by_rows(plan.rotate(q, near.region.q, plan.positions))
        turned.append(
            (near, queries, by_rows(plan.rotate(k[:, :, near.keys], near.region.k, plan.positions, key=True)))
        )
    if not turned:  # no pair is in any region
        return torch.zeros_like(q)
    grads = torch.is_grad_enabled() and any(x.requires_grad for x in (v, *(x for of in turned for x in of[1:])))
    if q.device.type == "cpu" and dropout == 0 and not grads:
        blocks = [_fused(turned, by_rows(v), plan, number) for number in range(-(-q.shape[2] // ROWS))]
    else:
        seed = draw_seed() if dropout > 0 else 0
        attend = partial(_plain, turned, v, plan, dropout, seed)
        if grads:
            attend = partial(checkpoint, attend, use_reentrant=False, preserve_rng_state=False)
        blocks = [attend(number) for number in range(-(-q.shape[2] // ROWS))]
    return torch.cat(blocks, dim=2)


def _fused(turned: Turned, v: Tensor, plan: Plan, number: int) -> Tensor:
    """One block of queries; a query that sees no key gives 0."""
    queries = _queries(plan, number)
    wide = torch.promote_types(v.dtype, torch.float32)
    out = v.new_zeros(*v.shape[:2], queries.stop - queries.start, v.shape[3], dtype=wide)
    lse = out.new_full(out.shape[:3], float("-inf"))
    for near, q, k in turned:
        keys = near.blocks[number]
        seen = _seen(plan, near, queries, keys)
        some = seen.any(-1)
        if not some.any():
            continue
        bias = None if seen.all() else out.new_zeros(seen.shape).masked_fill_(~seen, float("-inf"))
        part = q[:, :, queries], k[:, :, _within(near, keys)], v[:, :, keys]
        more, more_lse = flash(*part, 0.0, False, attn_mask=bias)
        # what the kernel says of a row that sees none of these keys has no meaning
        more, more_lse = more.to(wide).masked_fill(~some[..., None], 0.0), more_lse.masked_fill(~some, float("-inf"))
        share = (more_lse - lse).sigmoid().masked_fill(~some, 0.0)
        out, lse = torch.lerp(out, more, share[..., None]), torch.logaddexp(lse, more_lse)
    return out.to(v.dtype)


def _plain(turned: Turned, v: Tensor, plan: Plan, dropout: float, seed: int, number: int) -> Tensor:
    """The same by differentiable operations, with its scores in memory."""
    queries, (n, m) = _queries(plan, number), (plan.positions.q.shape[1], v.shape[2])
    wide = torch.promote_types(v.dtype, torch.float32)
    scores, values = [], []
    for near, q, k in turned:
        keys = near.blocks[number]
        found = torch.matmul(q[:, :, queries].to(wide), k[:, :, _within(near, keys)].to(wide).mT) * q.shape[3] ** -0.5
        scores.append(found.masked_fill(~_seen(plan, near, queries, keys), float("-inf")))
        values.append(keys)
    together = torch.cat(scores, dim=-1)
    empty = (together == float("-inf")).all(-1, keepdim=True)
    weights = together.masked_fill(empty, 0.0).softmax(-1).masked_fill(empty, 0.0)
    if dropout > 0:
        keep = keep_block(seed, queries.start, queries.stop, (*v.shape[:2], n, m), dropout, v.device)
        weights = weights * torch.cat([keep[..., keys] for keys in values], dim=-1)
    return torch.matmul(weights, torch.cat([v[:, :, keys] for keys in values], dim=2).to(wide)).to(v.dtype)


def _queries(plan: Plan, number: int) -> slice:
    return slice(number * ROWS, min((number + 1) * ROWS, plan.positions.q.shape[1]))


def _within(near: Nearby, keys: slice) -> slice:
    """The same keys, counted from the first that the region has."""
    return slice(keys.start - near.keys.start, keys.stop - near.keys.start)


def _seen(plan: Plan, near: Nearby, queries: slice, keys: slice) -> Tensor:
    """(B or 1, 1, R, K) bool: pairs of this region that are visible."""
    pos = plan.positions
    i, j = pos.q[:, None, queries, None], pos.k[:, None, None, keys]
    before = pos.k.shape[1] - pos.q.shape[1]
    rows = torch.arange(before + queries.start, before + queries.stop, device=i.device)[:, None]
    seen = near.region.covers(i, j) & (torch.arange(keys.start, keys.stop, device=i.device) <= rows)
    if plan.last_query is not None:
        seen = seen & (rows <= plan.last_query[:, None, None, keys])
    return seen if plan.padding is None else seen & ~plan.padding[:, None, None, keys]
