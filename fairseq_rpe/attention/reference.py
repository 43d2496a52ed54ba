"""Plain dense attention: the specification that every other backend is tested against."""

from collections.abc import Callable

import torch
from torch import Tensor

from fairseq_rpe.attention.dropout import draw_seed, keep_block
from fairseq_rpe.attention.plan import Plan
from fairseq_rpe.core.bias import RelativeValues, block, column_of
from fairseq_rpe.core.errors import UserError


def reference(q: Tensor, k: Tensor, v: Tensor, plan: Plan, dropout: float = 0.0) -> Tensor:
    """softmax(q·kᵀ / sqrt(D) + bias) v, causal, computed in float32 or better with an n×m matrix.

    Args:
        q: (B, H, n, D); the queries are the last n of the m tokens.
        k: (B, H, m, D).
        v: (B, H, m, D).
        plan: positions, bias form, padding, and the encoding's ``transform_scores`` and ``reading``.
        dropout: probability of dropping an attention weight; 0 outside training.

    Returns:
        (B, H, n, D) in q's dtype. A query that sees no key (a padded row) gives 0.

    Raises:
        UserError: the plan asks for pruning.
    """
    if plan.prune:
        raise UserError("the reference backend is exact and does not prune: use 'sdpa', 'triton' or no pruning")
    shape = *q.shape[:3], k.shape[2]
    keep = keep_block(draw_seed(), 0, q.shape[2], shape, dropout, q.device) if dropout > 0 else None
    return weighted(weights(q, k, plan), v, keep, plan)


def weighted(
    found: Tensor, v: Tensor, keep: Tensor | None, plan: Plan, read: Callable[..., Tensor] | None = None
) -> Tensor:
    """Sums of v by the weights ``found``, in v's dtype, with a scaled mask of those kept by dropout."""
    found = found if keep is None else found * keep
    out = torch.matmul(found, v.to(found.dtype))
    if plan.reading is not None:
        out = out + (read or read_columns)(found, plan.reading, plan)
    return out.to(v.dtype)


def read_columns(found: Tensor, reading: RelativeValues, plan: Plan) -> Tensor:
    """Sums of the vectors of ``reading`` by the weights (B, H, n, m): weights of a column are added up first."""
    at = column_of(reading, plan.positions.q, plan.positions.k)[:, None].expand(found.shape)
    by_column = found.new_zeros(*found.shape[:3], reading.vectors.shape[1]).scatter_add(3, at, found)
    return torch.matmul(by_column, reading.vectors.to(found.dtype))


def scores(q: Tensor, k: Tensor, plan: Plan, make: Callable[..., Tensor] = block) -> Tensor:
    """q·kᵀ / sqrt(D) + bias, (B, H, n, m) in float32 or better; -inf where a query does not see a key."""
    n, m, width = q.shape[2], k.shape[2], q.shape[3]
    wide = torch.promote_types(q.dtype, torch.float32)
    if plan.regions is None:
        found = torch.matmul(q.to(wide), k.to(wide).transpose(-1, -2)) * width**-0.5
    else:
        found = by_region(q.to(wide), k.to(wide), plan)
    if plan.form is not None:
        found = found + make(plan.form, plan.positions).to(wide)
    hidden = ~plan.visible(n, m, q.device)
    if plan.transform_scores is not None:
        found = plan.transform_scores(found.masked_fill(hidden, float("-inf")), q.to(wide), plan.positions)
    return found.masked_fill(hidden, float("-inf"))


def by_region(q: Tensor, k: Tensor, plan: Plan) -> Tensor:
    """q·kᵀ / sqrt(D), each pair turned as its region has it, and -inf where a pair is in none: (B, H, n, m)."""
    pos, found = plan.positions, q.new_full((*q.shape[:3], k.shape[2]), float("-inf"))
    assert plan.rotate is not None and plan.regions is not None
    for region in plan.regions:
        turned = plan.rotate(q, region.q, pos), plan.rotate(k, region.k, pos, key=True)
        inside = region.covers(pos.q[:, None, :, None], pos.k[:, None, None, :])
        found = torch.where(inside, torch.matmul(turned[0], turned[1].mT) * q.shape[3] ** -0.5, found)
    return found


def weights(q: Tensor, k: Tensor, plan: Plan, make: Callable[..., Tensor] = block) -> Tensor:
    """The softmax of :func:`scores`; 0 where a query sees no key at all."""
    found = scores(q, k, plan, make)
    empty = (found == float("-inf")).all(dim=-1, keepdim=True)
    return found.masked_fill(empty, 0.0).softmax(dim=-1).masked_fill(empty, 0.0)
