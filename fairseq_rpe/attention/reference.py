"""Plain dense attention: the specification that every other backend is tested against."""

from collections.abc import Callable

import torch
from torch import Tensor

from fairseq_rpe.attention.dropout import draw_seed, keep_block
from fairseq_rpe.attention.plan import AttentionPlan
from fairseq_rpe.core.bias import Bias, RelativeValues, table_index
from fairseq_rpe.core.errors import UserError
from fairseq_rpe.core.positions import Positions


def reference(q: Tensor, k: Tensor, v: Tensor, plan: AttentionPlan, dropout: float = 0.0) -> Tensor:
    """Compute softmax(q·kᵀ / sqrt(D) + bias) v, causal, in float32 or better with an n×m matrix.

    Args:
        q: (B, H, n, D); the queries are the last n of the m tokens.
        k: (B, H, m, D).
        v: (B, H, m, D).
        plan: positions, bias, padding, and the encoding's ``transform_scores`` and ``relative_values``.
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
    return weighted_sum(attention_weights(q, k, plan), v, keep, plan)


def weighted_sum(
    weights: Tensor,
    v: Tensor,
    keep: Tensor | None,
    plan: AttentionPlan,
    sum_values: Callable[..., Tensor] | None = None,
) -> Tensor:
    """Sum the values, and the plan's relative values, by attention weights.

    Args:
        weights: (B, H, n, m).
        v: (B, H, m, D).
        keep: (B, H, n, m) scaled dropout mask, or None.
        plan: of the call.
        sum_values: equivalent of :func:`sum_relative_values`, which is the default.

    Returns:
        (B, H, n, D) in v's dtype.
    """
    weights = weights if keep is None else weights * keep
    out = torch.matmul(weights, v.to(weights.dtype))
    if plan.relative_values is not None:
        out = out + (sum_values or sum_relative_values)(weights, plan.relative_values, plan)
    return out.to(v.dtype)


def sum_relative_values(weights: Tensor, values: RelativeValues, plan: AttentionPlan) -> Tensor:
    """Return Σ_j weights[b, h, i, j] · vectors[h, c(i, j)], adding up the weights of each column c first.

    Args:
        weights: (B, H, n, m).
        values: the relative value vectors (H or 1, R, D).
        plan: with the positions.

    Returns:
        (B, H, n, D).
    """
    column = table_index(values, plan.positions.q, plan.positions.k)[:, None].expand(weights.shape)
    by_column = weights.new_zeros(*weights.shape[:3], values.vectors.shape[1]).scatter_add(3, column, weights)
    return torch.matmul(by_column, values.vectors.to(weights.dtype))  # (B, H, n, R) · (H or 1, R, D)


def _materialize(bias: Bias, pos: Positions) -> Tensor:
    return bias.materialize(pos)


def attention_scores(
    q: Tensor, k: Tensor, plan: AttentionPlan, materialize: Callable[[Bias, Positions], Tensor] = _materialize
) -> Tensor:
    """Return q·kᵀ / sqrt(D) + bias (B, H, n, m) in float32 or better; -inf where a query does not see a key.

    Args:
        q: (B, H, n, D).
        k: (B, H, m, D).
        plan: of the call.
        materialize: function of (bias, positions) that returns the bias (B or 1, H, n, m).
    """
    n, m, width = q.shape[2], k.shape[2], q.shape[3]
    wide = torch.promote_types(q.dtype, torch.float32)
    if plan.rotation_regions is None:
        scores = torch.matmul(q.to(wide), k.to(wide).transpose(-1, -2)) * width**-0.5
    else:
        scores = scores_by_region(q.to(wide), k.to(wide), plan)
    if plan.bias is not None:
        scores = scores + materialize(plan.bias, plan.positions).to(wide)
    hidden = ~plan.visibility(n, m, q.device)  # (B or 1, 1, n, m)
    if plan.transform_scores is not None:
        scores = plan.transform_scores(scores.masked_fill(hidden, float("-inf")), q.to(wide), plan.positions)
    return scores.masked_fill(hidden, float("-inf"))


def scores_by_region(q: Tensor, k: Tensor, plan: AttentionPlan) -> Tensor:
    """Return q·kᵀ / sqrt(D) (B, H, n, m), each pair rotated as in its region; -inf where a pair is in no region."""
    pos, scores = plan.positions, q.new_full((*q.shape[:3], k.shape[2]), float("-inf"))
    assert plan.rotate is not None and plan.rotation_regions is not None
    for region in plan.rotation_regions:
        region_q, region_k = plan.rotate(q, region.q, pos), plan.rotate(k, region.k, pos, key=True)
        inside = region.covers(pos.q[:, None, :, None], pos.k[:, None, None, :])  # (B or 1, 1, n, m)
        scores = torch.where(inside, torch.matmul(region_q, region_k.mT) * q.shape[3] ** -0.5, scores)
    return scores


def attention_weights(
    q: Tensor, k: Tensor, plan: AttentionPlan, materialize: Callable[[Bias, Positions], Tensor] = _materialize
) -> Tensor:
    """Return the softmax of :func:`attention_scores`; 0 where a query sees no key at all."""
    scores = attention_scores(q, k, plan, materialize)
    empty = (scores == float("-inf")).all(dim=-1, keepdim=True)  # (B, H, n, 1)
    return scores.masked_fill(empty, 0.0).softmax(dim=-1).masked_fill(empty, 0.0)
