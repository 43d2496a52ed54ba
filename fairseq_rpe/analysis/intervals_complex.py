"""An analytic expression in complex boxes, its integral and its derivatives, enclosed by flint's balls."""

import contextlib
import functools
import operator
from typing import Any

import mpmath
import sympy
from flint import acb, acb_series, arb, ctx, fmpq

from fairseq_rpe.analysis.intervals_mp import PRECISION, Field, Undefined, iv

_EVALUATIONS = 200  # of the integrand; a few dozens are the rule
precisely = ctx.workprec(PRECISION)  # decorates what computes with balls; flint's own precision stays as it was


class Boxes(Field):
    """flint's complex boxes ``acb``, and Taylor series ``acb_series`` of them."""

    add, mul = operator.add, operator.mul
    exp, sin, cos = map(operator.methodcaller, ("exp", "sin", "cos"))

    def rational(self, p: int, q: int) -> Any:
        return acb(fmpq(p, q))

    def constant(self, e: sympy.Expr) -> Any:
        return acb.pi() if e is sympy.pi else acb(1).exp()

    def power(self, a: Any, k: int) -> Any:
        return a**k if k >= 0 else 1 / a**-k

    def base(self, a: Any, _exponent: Any) -> Any:
        return a

    def log(self, a: Any) -> Any:
        first = _first(a)
        if not first.real > 0 and first.imag.contains(0):
            raise Undefined("the logarithm's cut")
        return a.log()

    def tanh(self, a: Any) -> Any:
        side = 1 if _first(a).real.mid() >= 0 else -1  # so that e^(-2|a|) is small
        return side * (2 / (1 + (-2 * side * a).exp()) - 1)

    def atan(self, a: Any) -> Any:
        turned = acb(0, 1) * a
        return (self.log(1 + turned) - self.log(1 - turned)) / acb(0, 2)

    def abs(self, a: Any) -> Any:
        return a if _positive(a) else -a

    def max(self, a: Any, b: Any) -> Any:
        return a if _positive(a - b) else b

    def min(self, a: Any, b: Any) -> Any:
        return -self.max(-a, -b)


def _first(a: Any) -> acb:
    return a[0] if isinstance(a, acb_series) else a


def _positive(a: Any) -> bool:
    """Whether the real part is, in all of the box."""
    real = _first(a).real
    if real > 0 or real < 0:
        return bool(real > 0)
    raise Undefined("|·|, min or max bends here")


class Weight:
    """b = exp f of an analytic f; every method wants flint's precision set, see :data:`precisely`."""

    def __init__(self, f: sympy.Expr) -> None:
        self._log = functools.partial(Boxes().walk, f)

    def __call__(self, x: int) -> arb:
        return self._log(acb(x)).exp().real

    def most(self, low: int, high: int, height: int) -> arb | None:
        """A bound on |b| in the box [low, high] ± height·i; None where b may not be analytic there."""
        with contextlib.suppress(Undefined):
            found = self._log(acb(arb(low).union(high), arb(0, height)))
            size = found.real.exp().upper()
            return size if found.is_finite() and size.is_finite() else None
        return None

    def integral(self, low: int, high: int, error: arb) -> arb:
        """∫ b over [low, high], to about ``error`` where that can be had."""

        def value(z: acb, _analytic: bool) -> acb:
            with contextlib.suppress(Undefined):
                return self._log(z).exp()
            return acb(arb.nan())

        return acb.integral(value, low, high, abs_tol=error, eval_limit=_EVALUATIONS).real

    def taylor(self, x: int, order: int) -> list[arb]:
        """b^(k)(x)/k! for k < order."""
        before, ctx.cap = ctx.cap, order
        try:
            found = self._log(acb_series([x, 1], prec=order)).exp()
        finally:
            ctx.cap = before
        return [found[k].real for k in range(order)]


@precisely
def ball(x: Any) -> arb:
    """A real interval as the ball around it."""
    low, high = (arb(mpmath.mp.make_mpf(end)) for end in x._mpi_)
    return low.union(high)


@precisely
def interval(x: arb) -> Any:
    """A ball as the real interval that it is, rounded outwards."""
    if not x.is_finite():
        return iv.mpf([-iv.inf, iv.inf])
    return iv.make_mpf(tuple(mpmath.libmp.from_man_exp(*map(int, end.man_exp())) for end in (x.lower(), x.upper())))
