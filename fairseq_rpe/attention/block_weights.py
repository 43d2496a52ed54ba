"""Attention weights of a block of queries, for biases and transforms of scores that depend on the content.

:func:`block_weights` returns what ``reference.attention_weights`` does. It writes fewer matrices: sums, masks and the
softmax are computed in place, and the backward pass of each step is written by hand from operations that autograd can
differentiate again.
"""

from typing import Any, NamedTuple, Self

import torch
from torch import Tensor
from torch.nn import functional as F

from fairseq_rpe.attention.plan import AttentionPlan
from fairseq_rpe.attention.reference import attention_weights, transform_scores
from fairseq_rpe.attention.relative_shift import bias_terms, materialize_fast
from fairseq_rpe.core.tensors import runs_eagerly

NORMAL_FACTOR = 1e8  # weights up to this multiple of the smallest normal number become 0; in float32, up to 1.2e-30


class HiddenPairs(NamedTuple):
    """The pairs of a query and a key that it does not see.

    Attributes:
        first: every query of the block sees all keys before this one.
        mask: (B or 1, 1, n, m - first) bool, True at hidden pairs of the other keys.
    """

    first: int
    mask: Tensor

    @classmethod
    def of(cls, plan: AttentionPlan, n: int, m: int, device: torch.device) -> Self:
        """Return the hidden pairs of the last n of m tokens as queries."""
        if plan.padding is not None or plan.last_query is not None:
            return cls(0, ~plan.visibility(n, m, device))
        # query 0 sees the keys 0 … m - n, and each other query one key more
        return cls(m - n + 1, torch.ones(1, 1, n, n - 1, dtype=torch.bool, device=device).triu_())

    def fill_(self, x: Tensor, value: float) -> Tensor:
        """Set the hidden pairs of x (B, H, n, m) in place."""
        x[..., self.first :].masked_fill_(self.mask, value)
        return x

    def with_zeros(self, x: Tensor) -> Tensor:
        """Return x (B, H, n, m) with zeros at hidden pairs."""
        return torch.cat([x[..., : self.first], x[..., self.first :].masked_fill(self.mask, 0.0)], dim=-1)


def block_weights(q: Tensor, k: Tensor, plan: AttentionPlan) -> Tensor:
    """Compute what :func:`~fairseq_rpe.attention.reference.attention_weights` does.

    Args:
        q: (B, H, n, D), rotated.
        k: (B, H, m, D), rotated.
        plan: plan of the n queries and m keys.

    Returns:
        (B, H, n, m) in float32 or better; 0 where a query does not see a key.
    """
    has_other_scores = plan.rotation_regions is not None or plan.changes_softmax
    has_other_scores = has_other_scores or (plan.product is not None and plan.transforms_scores)
    if not q.shape[2] or has_other_scores or not runs_eagerly():
        return attention_weights(q, k, plan, materialize_fast)
    wide = torch.promote_types(q.dtype, torch.float32)
    q, k = q.to(wide), k.to(wide)
    hidden = HiddenPairs.of(plan, q.shape[2], k.shape[2], q.device)
    terms = [] if plan.bias is None else bias_terms(plan.bias, plan.positions, wide)
    if plan.product is None:
        scores: Tensor = _Scores.apply(q, k, hidden if plan.transforms_scores else None, *terms)
    else:
        scores = plan.product.products().to(wide) * q.shape[3] ** -0.5
        for term in terms:
            missing = 0 if term.shape[3] == 1 else k.shape[2] - term.shape[3]
            scores = scores + (F.pad(term, (missing, 0)) if missing else term)
    if plan.transforms_scores:
        scores = transform_scores(scores, q, plan)
    weights: Tensor = _Weights.apply(scores, hidden, plan.returns_log_weights, not plan.transforms_scores)
    return weights


class _Scores(torch.autograd.Function):
    """Computes q·kᵀ / sqrt(D) plus the terms of a bias; -inf at ``hidden`` pairs, if these are given.

    A term (B or 1, H or 1, n or 1, w or 1) is added to the last w keys.
    """

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, hidden: HiddenPairs | None, *terms: Tensor) -> Tensor:
        scores = torch.matmul(q * q.shape[3] ** -0.5, k.mT)  # (B, H, n, m)
        for term in terms:
            _last_keys(scores, term).add_(term)
        ctx.save_for_backward(q, k)
        ctx.hidden, ctx.shapes = hidden, [x.shape for x in terms]
        return scores if hidden is None else hidden.fill_(scores, float("-inf"))

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        q, k = ctx.saved_tensors
        needs_q, needs_k, _, *needs_terms = ctx.needs_input_grad
        scale = q.shape[3] ** -0.5
        if ctx.hidden is not None:  # the gradient of a transform may be arbitrary there
            grad = ctx.hidden.with_zeros(grad)
        q_grad = torch.matmul(grad, k) * scale if needs_q else None
        k_grad = torch.matmul(grad.mT, q * scale) if needs_k else None
        pairs = zip(ctx.shapes, needs_terms, strict=True)
        return q_grad, k_grad, None, *(_sum_to(grad, shape) if need else None for shape, need in pairs)


class _Weights(torch.autograd.Function):
    """Computes the softmax of scores (B, H, n, m), or their exponential, with 0 at hidden pairs.

    The scores are overwritten if ``in_place``.
    """

    @staticmethod
    def forward(ctx: Any, scores: Tensor, hidden: HiddenPairs, is_log: bool, in_place: bool) -> Tensor:
        if in_place:
            ctx.mark_dirty(scores)
        else:
            scores = scores.clone(memory_format=torch.contiguous_format)
        hidden.fill_(scores, float("-inf"))
        weights = scores.exp_() if is_log else _softmax_(scores)
        if weights.device.type == "cpu":  # products of subnormal numbers are slow
            least = torch.finfo(weights.dtype).tiny * NORMAL_FACTOR
            torch.threshold_(weights, least, 0.0)
        ctx.save_for_backward(weights)
        ctx.is_log = is_log
        return weights

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        (weights,) = ctx.saved_tensors
        # both are 0 where the weight is 0
        scores_grad = grad * weights if ctx.is_log else torch._softmax_backward_data(grad, weights, -1, weights.dtype)
        return scores_grad, None, None, None


def _softmax_(scores: Tensor) -> Tensor:
    """Replace scores (B, H, n, m) by their softmax; a row of -inf, whose softmax is NaN, becomes 0."""
    empty = scores.amax(dim=-1, keepdim=True) == float("-inf")  # (B, H, n, 1)
    has_empty = empty.device.type != "cpu" or bool(empty.any())  # a comparison would make a GPU wait
    if has_empty:
        scores.masked_fill_(empty, 0.0)
    torch.softmax(scores, dim=-1, out=scores)
    return scores.masked_fill_(empty, 0.0) if has_empty else scores


def _last_keys(scores: Tensor, term: Tensor) -> Tensor:
    """Return the columns of scores (B, H, n, m) to which a term is added."""
    width = term.shape[3]
    return scores if width == 1 else scores[..., scores.shape[3] - width :]


def _sum_to(grad: Tensor, shape: torch.Size) -> Tensor:
    """Return the gradient of a term of this shape from that of the scores (B, H, n, m)."""
    grad = grad if shape[3] == 1 else grad[..., grad.shape[3] - shape[3] :]
    return grad.sum_to_size(shape)
