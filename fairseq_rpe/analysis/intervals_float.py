"""Enclosures of an expression over many ranges of n at a time, as double-precision intervals rounded outwards."""

import functools
from collections.abc import Callable
from fractions import Fraction
from typing import Any

import numpy as np
import sympy

from fairseq_rpe.analysis.intervals_mp import NumberArithmetic, Undefined

_ULPS = 8  # by which results of numpy's functions are widened; their error is at most 4


def float_ranges(e: sympy.Expr, low: Any, high: Any) -> tuple[Any, Any]:
    """Return the ranges (low, high) of ``e`` over each range low <= n <= high of n; NaN where it may be undefined.

    Args:
        e: expression in n, with numbers and functions of :func:`fairseq_rpe.analysis.formula.parse`.
        low: lower ends, float64, any shape.
        high: upper ends, the same shape.
    """
    with np.errstate(all="ignore"):
        a, b = FloatArithmetic().walk(e, (low, high))
    return np.broadcast_to(a, low.shape), np.broadcast_to(b, low.shape)


def _wide(low: Any, high: Any, ulps: int, bad: Any = False) -> Any:
    """Return the range rounded outwards by ``ulps``; both ends are NaN where either is, or where ``bad``."""
    bad = np.isnan(low) | np.isnan(high) | bad
    slack = ulps * np.finfo(float).eps
    low = np.nextafter(np.where(np.isinf(low), low, low - slack * abs(low)), -np.inf)
    low = np.where(np.isposinf(low), np.finfo(float).max, low)  # a lower end that overflowed
    high = np.nextafter(np.where(np.isinf(high), high, high + slack * abs(high)), np.inf)
    return np.where(bad, np.nan, low), np.where(bad, np.nan, high)


def _increasing(function: Callable[[Any], Any], low: float = -np.inf, high: float = np.inf) -> Any:
    """Return the method for an increasing function with values between ``low`` and ``high``."""

    def method(self: Any, a: Any) -> Any:
        bottom, top = _wide(function(a[0]), function(a[1]), _ULPS)
        return np.maximum(bottom, low), np.minimum(top, high)

    return method


def _monotone(function: Callable[[Any, Any], Any]) -> Any:
    return lambda self, a, b: (function(a[0], b[0]), function(a[1], b[1]))


class FloatArithmetic(NumberArithmetic):
    """Arithmetic with pairs of arrays (low, high), rounded outwards; (NaN, NaN) where a value may be undefined."""

    def rational(self, p: int, q: int) -> Any:
        """Return the ranges of the rational p/q."""
        try:
            near = np.float64(p / q)
        except OverflowError:
            raise Undefined(f"{p}/{q} is out of range") from None
        return (near, near) if Fraction(float(near)) == Fraction(p, q) else _wide(near, near, 1)

    def constant(self, e: sympy.Expr) -> Any:
        """Return the ranges of π or e."""
        return _wide(np.float64(float(e)), np.float64(float(e)), 1)

    def add(self, a: Any, b: Any) -> Any:
        """Return the ranges of a + b."""
        return _wide(a[0] + b[0], a[1] + b[1], 1, np.isnan(a[0] + b[1]) | np.isnan(a[1] + b[0]))

    def mul(self, a: Any, b: Any) -> Any:
        """Return the ranges of a · b."""
        corners = [p * q for p in a for q in b]
        for p, q in ((a, b), (b, a)):  # 0 · ∞ may occur inside the ranges, not only at a corner
            is_undefined = (np.isinf(p[0]) | np.isinf(p[1])) & (q[0] <= 0) & (q[1] >= 0)
            corners.append(np.where(is_undefined, np.nan, corners[0]))
        return _wide(functools.reduce(np.minimum, corners), functools.reduce(np.maximum, corners), 1)

    def power(self, a: Any, k: int) -> Any:
        """Return the ranges of a to the whole power k."""
        low, high = a
        if k < 0:
            low, high = self.power(a, -k)
            gap = (low <= 0) & (high >= 0)
            return _wide(1 / high, 1 / low, 1, gap)
        if k == 0:
            return low**k, high**k
        bounds = _wide(np.minimum(low**k, high**k), np.maximum(low**k, high**k), _ULPS)
        if k % 2:
            return bounds
        return np.where((low <= 0) & (high >= 0), 0.0, np.maximum(bounds[0], 0)), bounds[1]

    exp, log = _increasing(np.exp, low=0), _increasing(np.log)
    tanh, atan = _increasing(np.tanh, low=-1, high=1), _increasing(np.arctan)
    min, max = _monotone(np.minimum), _monotone(np.maximum)

    def base(self, a: Any, exponent: Any) -> Any:
        """Return ``a``, NaN unless it is positive, or non-negative with a positive exponent."""
        bad = (a[0] < 0) | ((a[0] == 0) & ~(exponent[0] > 0))
        return np.where(bad, np.nan, a[0]), np.where(bad, np.nan, a[1])

    def sin(self, a: Any) -> Any:
        """Return the ranges of the sine."""
        return self.cos(a, np.sin, np.pi / 2)

    def cos(self, a: Any, function: Callable[[Any], Any] = np.cos, top_at: float = 0.0) -> Any:
        """Return the ranges of cos, or of another wave with a maximum at ``top_at``.

        Over a range, the extremes are those at its ends, unless it contains a maximum or a minimum of the wave.
        """
        from_top = a[0] - top_at, a[1] - top_at
        low, high = function(a[0]), function(a[1])
        near = 1e-9 + 1e-15 * np.maximum(np.abs(a[0]), np.abs(a[1]))  # covers rounding of the two quotients and of π
        last, before = np.floor((from_top[1] + near) / np.pi), np.floor((from_top[0] - near) / np.pi)
        passed = last - before  # number of multiples of π in the range: even ones are maxima, odd ones minima
        is_last_even = np.mod(last, 2) == 0
        has_top, has_bottom = ((passed >= 2) | ((passed >= 1) & x) for x in (is_last_even, ~is_last_even))
        slack = 1e-15 * _ULPS + np.where(near > 1e-8, near, 0.0)
        top = np.where(has_top, 1.0, np.minimum(np.maximum(low, high) + slack, 1))
        bottom = np.where(has_bottom, -1.0, np.maximum(np.minimum(low, high) - slack, -1))
        # the phase of a large or infinite argument is lost: any value from -1 to 1 is possible
        is_lost = ~(np.isfinite(a[0]) & np.isfinite(a[1]) & (near < 1e-3))
        nan = np.isnan(a[0]) | np.isnan(a[1])
        bottom, top = np.where(is_lost, -1.0, bottom), np.where(is_lost, 1.0, top)
        return np.where(nan, np.nan, bottom), np.where(nan, np.nan, top)

    def abs(self, a: Any) -> Any:
        """Return the ranges of |a|."""
        inside = (a[0] <= 0) & (a[1] >= 0)
        return np.where(inside, 0.0, np.minimum(abs(a[0]), abs(a[1]))), np.maximum(abs(a[0]), abs(a[1]))
