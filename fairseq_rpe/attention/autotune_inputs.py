"""Copies of an attention call that can run without side effects: small samples to compare, full copies to time.

Nothing in them is part of the caller's graph. Tables, parameters and pieces are separate leaves, so that no gradient
reaches a model's parameter and nothing that its backward pass needs is freed.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import Tensor
from torch.nn import functional as F

from fairseq_rpe.attention.plan import AttentionPlan
from fairseq_rpe.attention.prune import BLOCK
from fairseq_rpe.core.bias import (
    Bias,
    ContentBias,
    DenseBias,
    PairBias,
    PiecewiseLinear,
    PointwiseBias,
    ScaledDistanceBias,
    ToeplitzBias,
)
from fairseq_rpe.core.positions import Positions

SIZE = 267  # queries: odd, several blocks of every kernel, and enough for sdpa to compute a curve in pieces
PRUNED_SIZE = 4 * BLOCK + 3  # queries of a pruned sample: some keys are far enough to be skipped
PAIRS = 1 << 20  # largest number of queries times keys of a sample with fewer queries than keys
ROWS = 2  # rows of a sample's batch
HIDDEN_KEYS = 5  # keys that padding hides in the first row of a padded sample
MAX_WINDOW = 100  # largest window of a sample, which hides keys from most of its queries

# tolerance of outputs and gradients, relative to the largest value or 1
TOLERANCE = {torch.float64: 1e-10, torch.float32: 1e-4, torch.float16: 5e-3, torch.bfloat16: 2e-2}
Attend = Callable[..., Tensor]


@dataclass(frozen=True)
class RecordedCall:
    """Arguments of a backend, and how to compute gradients.

    Attributes:
        q: (B, H, n, D).
        k: (B, G, m, D).
        v: (B, G, m, D).
        plan: plan that the backend is called with.
        dropout: probability of dropping an attention weight.
        leaves: tensors whose gradients are needed; none: forward only.
        grad: (B, H, n, D), gradient of the output, as wide as v.
    """

    q: Tensor
    k: Tensor
    v: Tensor
    plan: AttentionPlan
    dropout: float
    leaves: tuple[Tensor, ...]
    grad: Tensor

    def run(self, attend: Attend) -> list[Tensor]:
        """Return the output (B, H, n, D), then the gradients of the leaves."""
        # a fresh plan: its cached properties would keep a graph that one backward pass frees
        out = attend(self.q, self.k, self.v, replace(self.plan), self.dropout)
        if not self.leaves:
            return [out]
        grads = torch.autograd.grad(out, self.leaves, self.grad.to(out.dtype), allow_unused=True)
        return [out, *(torch.zeros_like(x) if g is None else g for g, x in zip(grads, self.leaves, strict=True))]

    def in_float64(self) -> "RecordedCall":
        """Return the same call in float64 and without pruning."""
        q, k, v = (x.detach().double().requires_grad_(x.requires_grad) for x in (self.q, self.k, self.v))
        inputs = iter((q, k, v))
        leaves = tuple(next(inputs) if any(x is y for y in (self.q, self.k, self.v)) else x for x in self.leaves)
        return replace(self, q=q, k=k, v=v, plan=replace(self.plan, prune=0.0), leaves=leaves)


def copy_call(q: Tensor, k: Tensor, v: Tensor, plan: AttentionPlan, dropout: float) -> RecordedCall:
    """Return the call itself on copies. Functions of positions stay, without gradients of what they use."""
    bias, leaves = _copy_bias(plan.bias)
    copy = replace(plan, bias=bias, null_logit=_copy_null_logit(plan), backend=None)
    return _record_call(_copy_leaf(q), _copy_leaf(k), _copy_leaf(v), copy, dropout, leaves)


def sample_call(q: Tensor, k: Tensor, v: Tensor, plan: AttentionPlan, dropout: float) -> RecordedCall:
    """Return a small call with the same signature: random q, k and v of two rows with few queries, and the call's bias.

    Its padding is on the left of one row and on the right of the other. A ScaledDistanceBias is its pieces alone, a
    PointwiseBias its scalar function, so that every backend has gradients of the same leaves.
    """
    n, m = q.shape[2], k.shape[2]
    size = min(n, PRUNED_SIZE if plan.prune else SIZE, max(1, PAIRS // m) if n < m else n)
    size -= size > 1 and size % 2 == 0  # an odd number of queries, so that no block of a kernel divides it
    keys = m - n + size
    generator = torch.Generator(device=q.device).manual_seed(0)

    def draw(like: Tensor, tokens: int) -> Tensor:
        shape = (ROWS, tokens, like.shape[1], like.shape[3])
        x = torch.randn(shape, generator=generator, device=like.device, dtype=torch.float32).to(like.dtype)
        x = x.transpose(1, 2)  # (B, H, tokens, D) with the strides of a projection that was split into heads
        return (x.contiguous() if like.is_contiguous() else x).requires_grad_(_needs_grad(like))

    inputs = draw(q, size), draw(k, keys), draw(v, keys)
    padding = None if plan.padding is None else plan.padding[:ROWS]
    sample = replace(plan, padding=padding, last_query=None).slice_queries(0, size)
    sample = replace(
        sample,
        positions=_sample_positions(sample.positions),
        padding=None if plan.padding is None else _sample_padding(size, keys, q.device),
        last_query=None if plan.last_query is None else _sample_last_query(keys, q.device),
        backend=None,
    )
    if isinstance(plan.bias, ScaledDistanceBias) and isinstance(sample.bias, ScaledDistanceBias):
        query_scale = _scale_from_first_token(plan.bias.query_scale, plan.padding, size)
        sample = replace(sample, bias=replace(sample.bias, query_scale=query_scale))
    bias, leaves = _sample_bias(_narrow_window(sample))
    sample = replace(_narrow_window(sample), bias=bias, null_logit=_copy_null_logit(plan))
    return _record_call(*inputs, sample, dropout, leaves)


def _narrow_window(plan: AttentionPlan) -> AttentionPlan:
    """Return a plan whose window is at most ``MAX_WINDOW`` keys; only the window of a table changes."""
    bias = plan.bias
    if plan.window is None or plan.window <= MAX_WINDOW or not isinstance(bias, ToeplitzBias):
        return plan
    table = F.pad(bias.columns(MAX_WINDOW), (0, 1), value=float("-inf"))
    return replace(plan, bias=ToeplitzBias(table, step=bias.step), window=MAX_WINDOW)


def _copy_null_logit(plan: AttentionPlan) -> Tensor | None:
    return None if plan.null_logit is None else _copy_leaf(plan.null_logit)


def _sample_positions(pos: Positions) -> Positions:
    """Return the positions of the first rows; evenly spaced ones start at 0, without the call's padding."""
    # a tensor of one row serves all rows
    pos = replace(pos, q=pos.q[:ROWS], k=pos.k[:ROWS])
    if not pos.contiguous or pos.step is None:
        return pos
    queries, keys = pos.q.shape[1], pos.k.shape[1]
    k = torch.arange(keys, device=pos.k.device, dtype=pos.k.dtype)[None] * pos.step
    return Positions(k[:, keys - queries :], k, pos.step)


def _sample_padding(queries: int, keys: int, device: torch.device) -> Tensor:
    """Return padding (ROWS, keys): on the left of the first row, and from the middle of the second row's queries on."""
    padding = torch.zeros(ROWS, keys, dtype=torch.bool, device=device)
    padding[0, : min(HIDDEN_KEYS, keys - 1)] = True
    padding[1, keys - queries + (queries + 1) // 2 + 1 :] = True
    return padding


def _sample_last_query(keys: int, device: torch.device) -> Tensor:
    """Return ``last_query`` (ROWS, keys) of two documents in the first row and one in the second; n = m."""
    last_query = torch.full((ROWS, keys), keys - 1, device=device)
    last_query[0, : keys // 2] = keys // 2 - 1
    return last_query


def deviation(actual: list[Tensor], expected: list[Tensor], tolerance: float, plan: AttentionPlan, v: Tensor) -> float:
    """Return the largest error as a multiple of the allowed one: at most 1 is good, NaN if a value is NaN.

    Outputs of padded queries are ignored.

    Args:
        actual: output and gradients of a candidate.
        expected: output and gradients of the reference, in the same order.
        tolerance: allowed error, as a share of the largest expected value or of 1, whichever is larger.
        plan: plan of the call; if it is pruned, the output may deviate by the bound of the pruning in addition.
        v: (B, H, m, D) values, for that bound.
    """
    worst = 0.0
    for index, (a, b) in enumerate(zip(actual, expected, strict=True)):
        if a.shape != b.shape:
            return float("nan")
        a, b = a.detach().double(), b.detach().double()
        if index == 0 and plan.padding is not None:
            hidden = plan.padding[:, None, -a.shape[2] :, None]
            a, b = a.masked_fill(hidden, 0.0), b.masked_fill(hidden, 0.0)
        allowed = tolerance * max(1.0, float(b.abs().max()))
        if index == 0 and plan.prune:
            allowed += plan.prune * float(v.detach().double().amax() - v.detach().double().amin())
        error = float((a - b).abs().max()) / allowed
        if not error <= worst:  # true for NaN, too
            worst = error
        if math.isnan(worst):
            break
    return worst


def _record_call(
    q: Tensor, k: Tensor, v: Tensor, plan: AttentionPlan, dropout: float, leaves: tuple[Tensor, ...]
) -> RecordedCall:
    """Return the call with a random gradient of its output, 0 at padded queries; ``leaves`` are those of its bias."""
    generator = torch.Generator(device=q.device).manual_seed(1)
    grad = torch.randn((*q.shape[:3], v.shape[3]), generator=generator, device=q.device).to(q.dtype)
    if plan.padding is not None:
        grad.masked_fill_(plan.padding[:, None, -q.shape[2] :, None], 0.0)
    if plan.null_logit is not None:
        leaves = (plan.null_logit, *leaves)
    return RecordedCall(q, k, v, plan, dropout, tuple(x for x in (q, k, v, *leaves) if x.requires_grad), grad)


def _needs_grad(x: Tensor) -> bool:
    return x.requires_grad and torch.is_grad_enabled()


def _copy_leaf(x: Tensor) -> Tensor:
    return x.detach().clone().requires_grad_(_needs_grad(x))


def _scale_from_first_token(query_scale: Tensor, padding: Tensor | None, size: int) -> Tensor:
    """Return (1, size): the scale of the queries from a row's first token after padding on, the last one repeated."""
    n = query_scale.shape[1]
    row, first = 0, 0
    if padding is not None:
        lengths = padding[:, -n:].long().argmin(1)  # (B,), of the padding on the left
        row = int(lengths.argmin()) if len(query_scale) > 1 else 0
        first = int(lengths[row])
    index = torch.arange(first, first + size, device=query_scale.device).clamp_max(n - 1)
    return query_scale[row : row + 1, index]


def _copy_bias(bias: Bias | None) -> tuple[Bias | None, tuple[Tensor, ...]]:
    """Return a copy of a bias and its leaves; that of a content bias has tensors alone."""
    if isinstance(bias, ToeplitzBias):
        table = _copy_leaf(bias.table)
        return replace(bias, table=table), (table,)
    if isinstance(bias, DenseBias):
        dense = _copy_leaf(bias.bias)
        return DenseBias(dense), (dense,)
    if isinstance(bias, PairBias):
        aux = tuple(map(_copy_leaf, bias.aux))
        if isinstance(bias, PointwiseBias):
            parameters = tuple(map(_copy_leaf, bias.parameters))
            return replace(bias, parameters=parameters, aux=aux), parameters
        if isinstance(bias, ScaledDistanceBias):
            far, near = _copy_leaf(bias.distance_values), _copy_leaf(bias.query_scale)
            return replace(bias, distance_values=far, query_scale=near, aux=aux), (far, near)
        return replace(bias, aux=aux), aux
    if isinstance(bias, ContentBias):
        fields = bias.tree_flatten()
        assert fields is not None  # otherwise ``AttentionPlan.requires_sdpa``
        leaves = tuple(_copy_leaf(x) for x, _ in fields)
        return bias.tree_unflatten(iter(leaves)), leaves
    assert bias is None
    return None, ()


def _sample_bias(plan: AttentionPlan) -> tuple[Bias | None, tuple[Tensor, ...]]:
    """Return the bias of a sample and its leaves: pieces alone, or a scalar function alone, where there are such."""
    bias = plan.bias
    if isinstance(bias, DenseBias):
        return _copy_bias(DenseBias(bias.bias[:ROWS]))
    if isinstance(bias, ContentBias):
        fields = bias.tree_flatten()
        assert fields is not None
        rows = (x if kind == "table" else x[:ROWS] for x, kind in fields)
        return _copy_bias(bias.tree_unflatten(rows))
    if isinstance(bias, PointwiseBias):
        return _sample_pointwise_bias(bias)
    if isinstance(bias, ScaledDistanceBias):
        return _sample_scaled_distance_bias(bias, plan)
    return _copy_bias(bias)


def _sample_pointwise_bias(bias: PointwiseBias) -> tuple[Bias, tuple[Tensor, ...]]:
    """Return the bias as its scalar function, with copies of the parameters, and these copies."""
    parameters = tuple(map(_copy_leaf, bias.parameters))

    def evaluate(i: Tensor, j: Tensor) -> Tensor:
        # (B or 1, 1, n, 1), (B or 1, 1, 1, m), (H, 1, 1) -> (B or 1, H, n, m)
        return bias.scalar_fn(i[:, None, :, None], j[:, None, None, :], *(x[:, None, None] for x in parameters))

    return PointwiseBias(evaluate, scalar_fn=bias.scalar_fn, parameters=parameters), parameters


def _sample_scaled_distance_bias(bias: ScaledDistanceBias, plan: AttentionPlan) -> tuple[Bias, tuple[Tensor, ...]]:
    """Return the bias as its pieces, with copies of the tensors that have gradients, and these copies."""
    visible = bias.pieces_in_range(plan.positions, plan.padding, plan.last_query)
    tensors = bias.distance_values, bias.query_scale, visible.value, visible.slope
    far, near, value, slope = leaves = tuple(map(_copy_leaf, tensors))
    breakpoints, midpoints = visible.breakpoints.detach(), visible.midpoints.detach()
    first, step = plan.positions.q[:, :1], plan.positions.step
    assert step is not None

    def evaluate(i: Tensor, j: Tensor) -> Tensor:
        # (B or 1, n, m) in steps, which index far
        distance = ((i[:, :, None] - j[:, None, :]) / step).round().long().clamp_min(0)
        x = far[distance] * near[:, ((i - first) / step).round().long()[0], None]  # (B or 1, n, m)
        piece = torch.bucketize(x.detach(), breakpoints, right=True)
        return (value[:, piece] + slope[:, piece] * (x - midpoints[piece])).transpose(0, 1)

    pieces = PiecewiseLinear(breakpoints, midpoints, value, slope)
    sample = ScaledDistanceBias(evaluate, distance_values=far, query_scale=near, make_pieces=lambda top: pieces)
    return sample, leaves
