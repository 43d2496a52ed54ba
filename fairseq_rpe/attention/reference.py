"""Plain dense attention: the specification that every other backend is tested against.

Queries and keys arrive rotated for their positions. The exception is a plan with rotation regions: queries and keys
then arrive unrotated, and :func:`scores_by_region` rotates them for each region.
"""

from collections.abc import Callable

import torch
from torch import Tensor

from fairseq_rpe.attention.dropout import draw_seed, keep_block
from fairseq_rpe.attention.key_heads import repeat_key_heads
from fairseq_rpe.attention.plan import AttentionPlan
from fairseq_rpe.core.bias import Bias, RelativeValues, table_index
from fairseq_rpe.core.errors import UserError
from fairseq_rpe.core.positions import Positions


def reference(q: Tensor, k: Tensor, v: Tensor, plan: AttentionPlan, dropout: float = 0.0) -> Tensor:
    """Compute softmax(q·kᵀ / sqrt(D) + bias) v, causal, in float32 or better with an n×m matrix.

    A plan may also replace the content logits s = q·kᵀ / sqrt(D) by c·tanh(s/c) (``softcap``), and add a key with value
    0 and a logit of its own (``null_logit``) to the softmax.

    Args:
        q: (B, H, n, D), rotated unless ``plan.rotation_regions`` is set; the queries are the last n of the m tokens.
        k: (B, G, m, D), rotated as q is. G divides H, and query head h reads key head h // (H / G).
        v: (B, G, m, D); it may be narrower than q and k, and so is then the output.
        plan: positions, bias, padding, softcap and null logit of the n queries and m keys, and the encoding's
            hooks that transform scores or add ``relative_values``.
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


# The sdpa backend calls the functions below for blocks of queries. It passes ``materialize`` and ``sum_values`` of its
# own, which compute the same by shifts instead of gathers, and leaves the definition of attention to this file.


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
        v: (B, G, m, D).
        keep: (B, H, n, m) dropout mask, 0 or 1/(1-p) for each weight, or None.
        plan: positions of the n queries and m keys, and the relative values, if any.
        sum_values: faster equivalent of :func:`sum_relative_values`, with the same arguments; None: that function.

    Returns:
        (B, H, n, D) in v's dtype.
    """
    weights = weights if keep is None else weights * keep
    out = torch.matmul(weights, repeat_key_heads(v, weights.shape[1]).to(weights.dtype))
    if plan.relative_values is not None:
        out = out + (sum_values or sum_relative_values)(weights, plan.relative_values, plan)
    return out.to(v.dtype)


def sum_relative_values(weights: Tensor, values: RelativeValues, plan: AttentionPlan) -> Tensor:
    """Return Σ_j weights[b, h, i, j] · vectors[h, c(i, j)]: the relative value vectors, summed by attention weights.

    c(i, j) is the column of the table for the distance from key j to query i, see ``core.bias.table_index``. There are
    only R columns, so the weights of each column are added up first; no (n, m, D) tensor is stored.

    Args:
        weights: (B, H, n, m).
        values: table of R relative value vectors (H or 1, R, D).
        plan: positions of the n queries and m keys.

    Returns:
        (B, H, n, D).
    """
    column = table_index(values, plan.positions.q, plan.positions.k)[:, None].expand(weights.shape)  # (B, H, n, m)
    zeros = weights.new_zeros(*weights.shape[:3], values.num_columns)
    column_weights = zeros.scatter_add(3, column, weights)  # (B, H, n, R)
    return torch.matmul(column_weights, values.vectors.to(weights.dtype))  # (B, H, n, R) · (H or 1, R, D)


def _materialize(bias: Bias, pos: Positions) -> Tensor:
    """Return the dense bias (B or 1, H or 1, n, m)."""
    return bias.materialize(pos)


def attention_scores(
    q: Tensor, k: Tensor, plan: AttentionPlan, materialize: Callable[[Bias, Positions], Tensor] = _materialize
) -> Tensor:
    """Return q·kᵀ / sqrt(D) + bias (B, H, n, m) in float32 or better; -inf where a query does not see a key.

    Another product of the plan may replace q·k. The softcap applies to q·kᵀ / sqrt(D), before the bias is added.

    Args:
        q: (B, H, n, D), rotated unless ``plan.rotation_regions`` is set.
        k: (B, G, m, D), rotated as q is.
        plan: positions, bias, visibility, the product that replaces q·k, and the transform of scores with its key
            state, of the n queries and m keys.
        materialize: function of (bias, positions) that returns the dense bias (B or 1, H or 1, n, m), such as a faster
            equivalent of ``bias.materialize``, the default.
    """
    n, m, width = q.shape[2], k.shape[2], q.shape[3]  # of rotated queries, also if values are narrower
    wide, k = torch.promote_types(q.dtype, torch.float32), repeat_key_heads(k, q.shape[1])
    if plan.product is not None:
        scores = plan.product.products().to(wide) * width**-0.5
    elif plan.rotation_regions is None:
        scores = torch.matmul(q.to(wide), k.to(wide).transpose(-1, -2)) * width**-0.5
    else:
        scores = scores_by_region(q.to(wide), k.to(wide), plan)
    if plan.softcap:
        scores = plan.softcap * (scores / plan.softcap).tanh()
    if plan.bias is not None:
        scores = scores + materialize(plan.bias, plan.positions).to(wide)
    hidden = ~plan.visibility(n, m, q.device)  # (B or 1, 1, n, m)
    if plan.transforms_scores:
        # the transform must see hidden keys as -inf, since it may sum over keys; its own output for them is arbitrary,
        # so they are hidden again below
        scores = transform_scores(scores.masked_fill(hidden, float("-inf")), q.to(wide), plan)
    return scores.masked_fill(hidden, float("-inf"))


def transform_scores(scores: Tensor, q: Tensor, plan: AttentionPlan) -> Tensor:
    """Return the scores that the plan's hook computes from scores, and store the state of the keys.

    Args:
        scores: (B, H, n, m), -inf where a query does not see a key.
        q: (B, H, n, D), rotated, in the dtype of the scores.
        plan: plan of the n queries and m keys.

    Returns:
        (B, H, n, m), arbitrary where a query does not see a key.

    Raises:
        UserError: queries came before these, and the plan lacks the state that they left.
    """
    if plan.transform_scores_with_state is None:
        assert plan.transform_scores is not None
        return plan.transform_scores(scores, q, plan.positions)
    before = scores.shape[3] - scores.shape[2]
    if before != (0 if plan.key_state is None else plan.key_state.shape[2]):
        raise UserError(
            f"this encoding keeps a state of the {before} earlier keys, which this call does not give: attend with all "
            "queries at once, or decode with RelativeAttention and its cache"
        )
    state = scores.new_zeros(len(scores), 1, scores.shape[3], plan.key_state_width)
    if plan.key_state is not None:
        state = torch.cat([plan.key_state.to(scores.dtype), state[:, :, plan.key_state.shape[2] :]], dim=2)
    scores, state = plan.transform_scores_with_state(scores, q, plan.positions, state)
    if plan.store_key_state is not None:
        plan.store_key_state(state)
    return scores


def scores_by_region(q: Tensor, k: Tensor, plan: AttentionPlan) -> Tensor:
    """Return the scores q·kᵀ / sqrt(D), each pair rotated for its region.

    A rotation region is a set of (query, key) pairs with positions for which the queries and keys of these pairs are
    rotated. A pair that causality allows is in at most one region.

    Args:
        q: (B, H, n, D), not rotated.
        k: (B, H, m, D), not rotated.
        plan: positions of the n queries and m keys, ``rotate`` and the regions.

    Returns:
        (B, H, n, m), -inf where a pair is in no region.
    """
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
    """Return the softmax (B, H, n, m) of :func:`attention_scores` of these arguments; 0 where a query sees no key.

    With a null logit the weights of a query add up to less than 1. Scores that are logarithms of weights are only
    exponentiated.
    """
    scores = attention_scores(q, k, plan, materialize)
    if plan.returns_log_weights:
        return scores.exp()
    if plan.null_logit is not None:
        null = plan.null_logit.to(scores.dtype)[:, None, None].expand(*scores.shape[:3], 1)  # (B, H, n, 1)
        return torch.cat([scores, null], dim=-1).softmax(dim=-1)[..., :-1]
    # the softmax of a row of -inf is NaN, so such a row is replaced by zeros before it and set to 0 after it
    empty = (scores == float("-inf")).all(dim=-1, keepdim=True)  # (B, H, n, 1)
    return scores.masked_fill(empty, 0.0).softmax(dim=-1).masked_fill(empty, 0.0)
