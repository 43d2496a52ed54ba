"""Attention whose queries and keys are wider than its values, by kernels that need equal widths."""

from collections.abc import Callable

from torch import Tensor
from torch.nn import functional as F

from fairseq_rpe.attention.plan import AttentionPlan


def has_narrow_values(q: Tensor, v: Tensor) -> bool:
    """Return whether values (B, G, m, D) are narrower than queries (B, H, n, E)."""
    return v.shape[3] < q.shape[3]


def attend_with_padded_values(
    attend: Callable[..., Tensor], q: Tensor, k: Tensor, v: Tensor, plan: AttentionPlan, dropout: float
) -> Tensor:
    """Attend with values that have zeros behind their elements, and return the output without those.

    Args:
        attend: function of (q, k, v, plan, dropout) with equal widths of q, k and v.
        q: (B, H, n, E).
        k: (B, G, m, E).
        v: (B, G, m, D), D < E.
        plan: plan of the call.
        dropout: probability of dropping an attention weight.

    Returns:
        (B, H, n, D).
    """
    padded = F.pad(v, (0, q.shape[3] - v.shape[3]))  # (B, G, m, E)
    return attend(q, k, padded, plan, dropout)[..., : v.shape[3]]
