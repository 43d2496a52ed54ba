"""Attention with fewer key heads than query heads: query head h reads key and value head h // r, r = H / G."""

from collections.abc import Callable

import torch
from torch import Tensor

from fairseq_rpe.attention.plan import AttentionPlan


def repeat_key_heads(x: Tensor, heads: int) -> Tensor:
    """Return keys or values (B, G, m, D) once for each query head, (B, H, m, D); x itself if G = H."""
    return x if x.shape[1] == heads else x.repeat_interleave(heads // x.shape[1], dim=1)


def attend_by_key_head(
    attend: Callable[..., Tensor], q: Tensor, k: Tensor, v: Tensor, plan: AttentionPlan, dropout: float
) -> Tensor:
    """Attend in r calls, each with one of the r query heads of every key head, so that no key is copied.

    Where the heads of a call depend on each other, keys and values are repeated instead: a dropout mask is drawn for
    all heads at once, and hooks read the queries and keys of all heads.

    Args:
        attend: function of (q, k, v, plan, dropout) with as many heads of q, k and v.
        q: (B, H, n, D).
        k: (B, G, m, D).
        v: (B, G, m, D).
        plan: plan of the call, of H heads.
        dropout: probability of dropping an attention weight.

    Returns:
        (B, H, n, D).
    """
    groups = q.shape[1] // k.shape[1]
    if groups == 1 or dropout > 0 or plan.is_content_dependent:
        k, v = (repeat_key_heads(x, q.shape[1]) for x in (k, v))
        return attend(q, k, v, plan, dropout)
    outputs = [
        attend(q[:, first::groups], k, v, group_plan, dropout)  # (B, G, n, D)
        for first, group_plan in enumerate(plan.split_by_key_head(groups))
    ]
    return torch.stack(outputs, dim=2).flatten(1, 2)  # (B, G, r, n, D) -> (B, H, n, D)
