"""Copies of a call of attention that may be carried out without a trace: small ones to compare, whole ones to time.

Nothing in them is part of the caller's graph: tables, numbers and pieces are leaves of their own, so that no gradient
reaches a parameter and nothing that a backward pass needs is freed.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from fairseq_rpe.attention.plan import Plan
from fairseq_rpe.attention.prune import BLOCK
from fairseq_rpe.core.bias import (
    Bias,
    DenseBias,
    PiecewiseLinear,
    PointwiseBias,
    Positions,
    ScaledDistanceBias,
    ToeplitzBias,
)
from fairseq_rpe.core.score_mod import pieces_between

SIZE = 267  # queries: odd, several blocks of every kernel, and more than sdpa needs to work with a curve's pieces
PRUNED_SIZE = 4 * BLOCK + 3  # with keys that are far enough to be left out
PAIRS = 1 << 20  # of a head's queries and keys
ROWS = 2
HIDDEN = 5  # keys of the first row of a padded sample

# the tolerance of outputs and gradients, of the largest value or 1
TOLERANCE = {torch.float64: 1e-10, torch.float32: 1e-4, torch.float16: 5e-3, torch.bfloat16: 2e-2}
Attend = Callable[..., Tensor]


@dataclass(frozen=True)
class Call:
    """Arguments of a backend, the leaves whose gradients are wanted (none: forward only), and the output's gradient."""

    q: Tensor
    k: Tensor
    v: Tensor
    plan: Plan
    dropout: float
    leaves: tuple[Tensor, ...]
    grad: Tensor

    def carried_out(self, attend: Attend) -> list[Tensor]:
        """The output (B, H, n, D), then the gradients of the leaves."""
        # a plan keeps what layers share, and with it a graph that is gone after one backward pass
        out = attend(self.q, self.k, self.v, replace(self.plan), self.dropout)
        if not self.leaves:
            return [out]
        found = torch.autograd.grad(out, self.leaves, self.grad.to(out.dtype), allow_unused=True)
        return [out, *(torch.zeros_like(x) if g is None else g for g, x in zip(found, self.leaves, strict=True))]

    def wide(self) -> "Call":
        """The same in float64 and, if it was pruned, exact."""
        q, k, v = (x.detach().double().requires_grad_(x.requires_grad) for x in (self.q, self.k, self.v))
        own = iter((q, k, v))
        leaves = tuple(next(own) if any(x is y for y in (self.q, self.k, self.v)) else x for x in self.leaves)
        return replace(self, q=q, k=k, v=v, plan=replace(self.plan, prune=0.0), leaves=leaves)


def whole(q: Tensor, k: Tensor, v: Tensor, plan: Plan, dropout: float) -> Call:
    """The call itself, on copies. Functions of positions stay; the gradients of what they read are not asked for."""
    form, leaves = _form(plan.form)
    return _call(_leaf(q), _leaf(k), _leaf(v), replace(plan, form=form, backend=None), dropout, leaves)


def small(q: Tensor, k: Tensor, v: Tensor, plan: Plan, dropout: float) -> Call:
    """One of the same kind: the form's own numbers, few queries of two rows, random q, k and v.

    Its padding is on the left of one row and on the right of the other. A curve is its pieces alone, a pointwise bias
    its scalar function: so gradients of the same leaves can be asked of every backend.
    """
    n, m = q.shape[2], k.shape[2]
    size = min(n, PRUNED_SIZE if plan.prune else SIZE, max(1, PAIRS // m) if n < m else n)
    size -= size > 1 and size % 2 == 0
    seen = m - n + size
    generator = torch.Generator(device=q.device).manual_seed(0)

    def drawn(like: Tensor, tokens: int) -> Tensor:
        shape = (ROWS, tokens, like.shape[1], like.shape[3])
        made = torch.randn(shape, generator=generator, device=like.device, dtype=torch.float32).to(like.dtype)
        made = made.transpose(1, 2)  # the memory of a projection that was split into heads
        return (made.contiguous() if like.is_contiguous() else made).requires_grad_(_wanted(like))

    made = drawn(q, size), drawn(k, seen), drawn(v, seen)
    part = replace(plan, padding=_rows(plan.padding), last_query=None).part(0, size)
    pos = replace(part.positions, q=_rows(part.positions.q), k=_rows(part.positions.k))
    if pos.contiguous and pos.step is not None:  # without the padding that there was
        at = torch.arange(seen, device=pos.k.device, dtype=pos.k.dtype)[None] * pos.step
        pos = Positions(at[:, seen - size :], at, pos.step)
    padding = None
    if plan.padding is not None:
        padding = torch.zeros(ROWS, seen, dtype=torch.bool, device=q.device)
        padding[0, : min(HIDDEN, seen - 1)] = True
        padding[1, seen - size + (size + 1) // 2 + 1 :] = True
    last_query = None
    if plan.last_query is not None:  # n = m: two documents in the first row, one in the second
        last_query = torch.full((ROWS, seen), seen - 1, device=q.device)
        last_query[0, : seen // 2] = seen // 2 - 1
    part = replace(part, positions=pos, padding=padding, last_query=last_query, backend=None)
    if isinstance(plan.form, ScaledDistanceBias) and isinstance(part.form, ScaledDistanceBias):
        part = replace(part, form=replace(part.form, near=_from_first(plan.form.near, plan.padding, size)))
    form, leaves = _small_form(part)
    return _call(*made, replace(part, form=form), dropout, leaves)


def deviation(found: list[Tensor], expected: list[Tensor], tolerance: float, plan: Plan, v: Tensor) -> float:
    """The largest error as a multiple of what is allowed: at most 1 is good, NaN where a value is none.

    What padded queries give has no meaning and is not looked at. ``plan`` may be pruned: then outputs may be off by the
    bound that it gives.
    """
    worst = 0.0
    for index, (a, b) in enumerate(zip(found, expected, strict=True)):
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
        if not error <= worst:  # NaN too
            worst = error
        if worst != worst:
            break
    return worst


def _call(q: Tensor, k: Tensor, v: Tensor, plan: Plan, dropout: float, leaves: tuple[Tensor, ...]) -> Call:
    generator = torch.Generator(device=q.device).manual_seed(1)
    grad = torch.randn(q.shape, generator=generator, device=q.device).to(q.dtype)
    if plan.padding is not None:
        grad.masked_fill_(plan.padding[:, None, -q.shape[2] :, None], 0.0)
    return Call(q, k, v, plan, dropout, tuple(x for x in (q, k, v, *leaves) if x.requires_grad), grad)


def _wanted(x: Tensor) -> bool:
    return x.requires_grad and torch.is_grad_enabled()


def _leaf(x: Tensor) -> Tensor:
    return x.detach().clone().requires_grad_(_wanted(x))


def _rows(x: Tensor | None) -> Tensor | None:
    """The first rows of what there is for each row, or the one for all of them."""
    return None if x is None else x[:ROWS]


def _from_first(near: Tensor, padding: Tensor | None, size: int) -> Tensor:
    """(1, size) of the queries of a row from its first token that is none of the padding on, the last one repeated."""
    n = near.shape[1]
    row, first = 0, 0
    if padding is not None:
        lengths = padding[:, -n:].long().argmin(1)
        row = int(lengths.argmin()) if len(near) > 1 else 0
        first = int(lengths[row])
    at = torch.arange(first, first + size, device=near.device).clamp_max(n - 1)
    return near[row : row + 1, at]


def _form(form: Bias | None) -> tuple[Bias | None, tuple[Tensor, ...]]:
    """A copy of a form and the leaves that it was given."""
    if form is None:
        return None, ()
    if isinstance(form, ToeplitzBias):
        table = _leaf(form.table)
        return replace(form, table=table), (table,)
    if isinstance(form, DenseBias):
        bias = _leaf(form.bias)
        return DenseBias(bias), (bias,)
    aux = tuple(map(_leaf, form.aux))
    if isinstance(form, PointwiseBias):
        numbers = tuple(map(_leaf, form.numbers))
        return replace(form, numbers=numbers, aux=aux), numbers
    if isinstance(form, ScaledDistanceBias):
        far, near = _leaf(form.far), _leaf(form.near)
        return replace(form, far=far, near=near, aux=aux), (far, near)
    return replace(form, aux=aux), aux


def _small_form(plan: Plan) -> tuple[Bias | None, tuple[Tensor, ...]]:
    """The same for a small sample. A curve is its pieces alone, a pointwise bias its scalar function."""
    form = plan.form
    if isinstance(form, DenseBias):
        return _form(DenseBias(form.bias[:ROWS]))
    if isinstance(form, PointwiseBias):
        return _small_pointwise(form)
    if isinstance(form, ScaledDistanceBias):
        return _small_curve(form, plan)
    return _form(form)


def _small_pointwise(form: PointwiseBias) -> tuple[Bias, tuple[Tensor, ...]]:
    numbers = tuple(map(_leaf, form.numbers))

    def bias(i: Tensor, j: Tensor) -> Tensor:
        return form.scalar(i[:, None, :, None], j[:, None, None, :], *(x[:, None, None] for x in numbers))

    return PointwiseBias(bias, scalar=form.scalar, numbers=numbers), numbers


def _small_curve(form: ScaledDistanceBias, plan: Plan) -> tuple[Bias, tuple[Tensor, ...]]:
    found = pieces_between(form, plan.positions, plan.padding, plan.last_query)
    far, near, value, slope = (_leaf(x) for x in (form.far, form.near, found.value, found.slope))
    ends, middle = found.ends.detach(), found.middle.detach()
    first, step = plan.positions.q[:, :1], plan.positions.step
    assert step is not None

    def bias(i: Tensor, j: Tensor) -> Tensor:
        distance = ((i[:, :, None] - j[:, None, :]) / step).round().long().clamp_min(0)
        x = far[distance] * near[:, ((i - first) / step).round().long()[0], None]
        piece = torch.bucketize(x.detach(), ends, right=True)
        return (value[:, piece] + slope[:, piece] * (x - middle[piece])).transpose(0, 1)

    pieces = PiecewiseLinear(ends, middle, value, slope)
    return ScaledDistanceBias(bias, far=far, near=near, pieces=lambda top: pieces), (far, near, value, slope)
