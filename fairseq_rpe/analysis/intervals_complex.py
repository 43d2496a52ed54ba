"""Enclosures of exp f for an analytic f: values in complex boxes, integrals and derivatives, with flint's balls.

A function that flint evaluates on a whole box without :class:`.intervals_mp.Undefined` is analytic there: logarithms
refuse boxes that meet their branch cut, and |·|, min and max those on which they have a kink.
"""

import contextlib
import functools
import operator
from typing import Any

import mpmath
import sympy
from flint import acb, acb_series, arb, ctx, fmpq

from fairseq_rpe.analysis.intervals_mp import PRECISION, NumberArithmetic, Undefined, iv

_MAX_EVALUATIONS = 200  # of an integrand; a few dozen usually suffice
with_flint_precision = ctx.workprec(PRECISION)  # decorator: sets flint's precision during a call and restores it


class ComplexArithmetic(NumberArithmetic):
    """Arithmetic with flint's complex boxes ``acb`` and with Taylor series ``acb_series`` of them."""

    add, mul = operator.add, operator.mul
    exp, sin, cos = map(operator.methodcaller, ("exp", "sin", "cos"))

    def rational(self, p: int, q: int) -> Any:
        """Return the box of the rational p/q."""
        return acb(fmpq(p, q))

    def constant(self, e: sympy.Expr) -> Any:
        """Return the box of π or e."""
        return acb.pi() if e is sympy.pi else acb(1).exp()

    def power(self, a: Any, k: int) -> Any:
        """Return the box of a to the whole power k."""
        return a**k if k >= 0 else 1 / a**-k

    def base(self, a: Any, _exponent: Any) -> Any:
        """Return ``a``; :meth:`log` refuses what has no logarithm."""
        return a

    def log(self, a: Any) -> Any:
        """Return the box of ln a."""
        first = _constant_term(a)
        if not first.real > 0 and first.imag.contains(0):
            raise Undefined("the box meets the branch cut of the logarithm")
        return a.log()

    def tanh(self, a: Any) -> Any:
        """Return the box of tanh a."""
        side = 1 if _constant_term(a).real.mid() >= 0 else -1  # tanh a = ±(2/(1 + e^(-2|a|)) - 1) does not overflow
        return side * (2 / (1 + (-2 * side * a).exp()) - 1)

    def atan(self, a: Any) -> Any:
        """Return the box of the arc tangent."""
        ia = acb(0, 1) * a
        return (self.log(1 + ia) - self.log(1 - ia)) / acb(0, 2)

    def abs(self, a: Any) -> Any:
        """Return the box of |a|."""
        return a if _positive(a) else -a

    def max(self, a: Any, b: Any) -> Any:
        """Return the box of the larger one."""
        return a if _positive(a - b) else b

    def min(self, a: Any, b: Any) -> Any:
        """Return the box of the smaller one."""
        return -self.max(-a, -b)


def _constant_term(a: Any) -> acb:
    return a[0] if isinstance(a, acb_series) else a


def _positive(a: Any) -> bool:
    """Return whether the real part is positive in all of the box; raise :class:`Undefined` if it may be 0."""
    real = _constant_term(a).real
    if real > 0 or real < 0:
        return bool(real > 0)
    raise Undefined("|·|, min or max may have a kink in the box")


class AnalyticWeight:
    """The weight b = exp f of an analytic f; callers set flint's precision with :data:`with_flint_precision`."""

    def __init__(self, f: sympy.Expr) -> None:
        self._log = functools.partial(ComplexArithmetic().walk, f)

    def __call__(self, x: int) -> arb:
        """Return the ball of b(x)."""
        return self._log(acb(x)).exp().real

    def max_size(self, low: int, high: int, height: int) -> arb | None:
        """Return a bound on |b| in the box [low, high] ± height·i; None if b may not be analytic there."""
        with contextlib.suppress(Undefined):
            log = self._log(acb(arb(low).union(high), arb(0, height)))
            size = log.real.exp().upper()  # |exp f| = exp Re f
            return size if log.is_finite() and size.is_finite() else None
        return None

    def integral(self, low: int, high: int, error: arb) -> arb:
        """Return ∫ b over [low, high], with a radius of about ``error`` if 200 evaluations suffice."""

        def value(z: acb, _analytic: bool) -> acb:
            with contextlib.suppress(Undefined):
                return self._log(z).exp()
            return acb(arb.nan())

        return acb.integral(value, low, high, abs_tol=error, eval_limit=_MAX_EVALUATIONS).real

    def taylor(self, x: int, order: int) -> list[arb]:
        """Return the Taylor coefficients b^(k)(x)/k! for k < order."""
        before, ctx.cap = ctx.cap, order
        try:
            series = self._log(acb_series([x, 1], prec=order)).exp()
        finally:
            ctx.cap = before
        return [series[k].real for k in range(order)]


@with_flint_precision
def ball(x: Any) -> arb:
    """Return the smallest ball that contains a real interval."""
    low, high = (arb(mpmath.mp.make_mpf(end)) for end in x._mpi_)
    return low.union(high)


@with_flint_precision
def interval(x: arb) -> Any:
    """Return a ball as a real interval, rounded outwards."""
    if not x.is_finite():
        return iv.mpf([-iv.inf, iv.inf])
    return iv.make_mpf(tuple(mpmath.libmp.from_man_exp(*map(int, end.man_exp())) for end in (x.lower(), x.upper())))
