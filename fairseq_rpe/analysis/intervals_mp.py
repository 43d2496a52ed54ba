"""Real intervals with many digits that enclose the values of an expression, at a number or over a range.

A :class:`NumberArithmetic` evaluates an expression with numbers of some kind: :class:`IntervalArithmetic` (mpmath, many
digits), :class:`.intervals_float.FloatArithmetic` (numpy, doubles, many ranges at a time),
:class:`.intervals_complex.ComplexArithmetic` (flint, complex boxes) or :class:`.asymptotics.AsymptoticArithmetic`
(expansions). Values that may be undefined raise :class:`Undefined` or are NaN. 0·∞ and ∞ - ∞ count as undefined,
ln 0 = -∞ does not.

Flint's balls cannot replace these intervals: none is [0, x], [2^100, 2^1000000] or [-∞, x] (their radius has 30 bits),
so roots and logarithms of such ranges are lost.
"""

import contextlib
import functools
from collections.abc import Callable, Iterator
from typing import Any

import mpmath
import sympy
from mpmath.ctx_iv import MPIntervalContext

from fairseq_rpe.analysis.formula import N

PRECISION = 120  # bits
iv: Any = MPIntervalContext()  # a context of this module: setting the precision of mpmath.iv would affect all its users
iv.prec = PRECISION
_MAX_EXPONENT = 1e9  # exp of larger ones is not computed: exp of this has 400 million digits


class Undefined(ArithmeticError):
    """The expression may have no value here."""


def is_whole(e: sympy.Expr) -> bool:
    """Return True if the expression is provably a whole number at every whole n >= 0."""
    if e is N or e.is_Integer:
        return True
    if e.is_Add or e.is_Mul:
        return all(is_whole(a) for a in e.args)
    return bool(e.is_Pow and e.exp.is_Integer and e.exp >= 0 and is_whole(e.base))


class NumberArithmetic:
    """Evaluates expressions with numbers of some kind.

    Subclasses define ``rational``, ``constant``, ``add``, ``mul``, ``power``, ``base`` and the functions of a formula.
    If every operation encloses its exact result for all operands in the given intervals, so does the whole evaluation
    (inclusion isotonicity).
    """

    def walk(self, e: sympy.Expr, x: Any) -> Any:
        """Return the value of ``e`` at n = x; raise :class:`Undefined` if there may be none."""
        if e is N:
            return x
        if e.is_Rational:
            return self.rational(e.p, e.q)
        if e is sympy.pi or e is sympy.E:
            return self.constant(e)
        if e.is_Add or e.is_Mul or isinstance(e, sympy.Min | sympy.Max):
            step = getattr(self, e.func.__name__.lower())
            return functools.reduce(step, (self.walk(a, x) for a in e.args))
        if isinstance(e, sympy.exp):  # sympy counts Pow(E, …) as exp
            return self.exp(self.walk(e.exp, x))
        if e.is_Pow:
            return self.pow(e.base, e.exp, x)
        if isinstance(e, sympy.log | sympy.sin | sympy.cos | sympy.tanh | sympy.atan | sympy.Abs):
            return getattr(self, e.func.__name__.lower())(self.walk(e.args[0], x))
        raise Undefined(f"'{e}' has more than n, constants, + - * / ** and the functions of a formula")

    def pow(self, base: sympy.Expr, power: sympy.Expr, x: Any) -> Any:
        """Return base ** power: exp(power · ln base), with 0 ** positive = 0 and (-b) ** whole = ± b ** whole."""
        if power.is_Integer:
            return self.power(self.walk(base, x), int(power))
        if base.is_Rational and base < 0 and is_whole(power):
            return self.mul(self.walk(sympy.cos(sympy.pi * power, evaluate=False), x), self.pow(-base, power, x))
        value, exponent = self.walk(base, x), self.walk(power, x)
        return self.exp(self.mul(exponent, self.log(self.base(value, exponent))))


def _wave(function: Callable[[Any], Any]) -> Any:
    """Return the method for sin or cos; wide intervals, and those whose phase is lost, give [-1, 1]."""
    bounded = iv.mpf([-1, 1])
    return lambda self, a: function(a) if a.delta < 8 and abs(a).b < mpmath.mpf(2) ** PRECISION else bounded


def _monotone(function: Callable[[Any, Any], Any]) -> Any:
    return lambda self, a, b: iv.mpf([function(a.a, b.a), function(a.b, b.b)])


def _require_number(value: Any) -> Any:
    """Return ``value``; raise :class:`Undefined` if an end is NaN."""
    if any(map(mpmath.isnan, bounds(value))):
        raise Undefined("not a number")
    return value


class IntervalArithmetic(NumberArithmetic):
    """Arithmetic with mpmath's real intervals ``iv.mpf``, whose ends are rounded outwards."""

    sin, cos, abs = _wave(iv.sin), _wave(iv.cos), abs
    min, max = _monotone(min), _monotone(max)

    def rational(self, p: int, q: int) -> Any:
        """Return the interval of the rational p/q."""
        return iv.mpf(p) / q if q != 1 else iv.mpf(p)

    def constant(self, e: sympy.Expr) -> Any:
        """Return the interval of π or e."""
        return +iv.pi if e is sympy.pi else iv.exp(1)

    def add(self, a: Any, b: Any) -> Any:
        """Return the interval of a + b."""
        if (a.a == -iv.inf and b.b == iv.inf) or (b.a == -iv.inf and a.b == iv.inf):
            raise Undefined("∞ - ∞")
        return _require_number(a + b)

    def mul(self, a: Any, b: Any) -> Any:
        """Return the interval of a · b."""
        for p, q in ((a, b), (b, a)):
            if (p.a == -iv.inf or p.b == iv.inf) and 0 in q:
                raise Undefined("0 · ∞")
        return _require_number(a * b)

    def power(self, a: Any, k: int) -> Any:
        """Return the interval of a to the whole power k."""
        if k < 0:
            if 0 in a:
                raise Undefined("division by 0")
            return _require_number(1 / self.power(a, -k))
        if k > 64 and not a.a == a.b == 0:
            if 0 in a:
                return self.exp(self.mul(iv.mpf(k), self.log(a)))
            size = self.exp(k * iv.log(abs(a)))
            return -size if a.b < 0 and k % 2 else size
        return _require_number(a**k)

    def exp(self, a: Any) -> Any:
        """Return the interval of e to the a."""
        if a.b <= _MAX_EXPONENT and a.a >= -_MAX_EXPONENT:
            return iv.exp(a)
        low = 0 if a.a < -_MAX_EXPONENT else iv.exp(min(a.a, iv.mpf(_MAX_EXPONENT))).a
        return iv.mpf([low, iv.inf if a.b > _MAX_EXPONENT else iv.exp(max(a.b, iv.mpf(-_MAX_EXPONENT))).b])

    def log(self, a: Any) -> Any:
        """Return the interval of ln a."""
        if a.a < 0:
            raise Undefined("logarithm of a negative number")
        return iv.log(a)

    def base(self, a: Any, exponent: Any) -> Any:
        """Return ``a``; raise :class:`Undefined` unless it is positive, or non-negative with a positive exponent."""
        if a.a <= 0 <= a.b and not (a.a == 0 and exponent.a > 0):
            raise Undefined("power of a number that may be 0 or below")
        return a

    def tanh(self, a: Any) -> Any:
        """Return the interval of tanh a."""
        side = 1 if a.a >= 0 else -1  # tanh a = ±(2/(1 + e^(-2|a|)) - 1), so that nothing overflows
        return side * (2 * self.power(1 + self.exp(-2 * side * a), -1) - 1)

    def atan(self, a: Any) -> Any:
        """Return the interval of the arc tangent."""
        if a.a == -iv.inf or a.b == iv.inf:
            return iv.mpf([-1, 1]) * iv.pi / 2
        ia = iv.mpc(0, 1) * a
        return ((iv.log(1 + ia) - iv.log(1 - ia)) / iv.mpc(0, 2)).real


intervals = IntervalArithmetic()


def bounds(value: Any) -> tuple[Any, Any]:
    """Return both ends of a real interval as exact mpmath numbers; ``mpmath.mpf(value.a)`` would round them."""
    low, high = value._mpi_
    return mpmath.mp.make_mpf(low), mpmath.mp.make_mpf(high)


def enclose(e: sympy.Expr, x: Any) -> Any:
    """Return an interval of ``e`` at the number or interval n = x, with :data:`PRECISION` bits."""
    return intervals.walk(e, iv.mpf(x))


def enclose_constant(e: sympy.Expr) -> Any:
    """Return the interval of a constant expression."""
    return enclose(e, 0)


@contextlib.contextmanager
def precision(bits: int) -> Iterator[None]:
    """Set the precision of all intervals to ``bits`` inside a ``with`` block."""
    before, iv.prec = iv.prec, bits
    try:
        yield
    finally:
        iv.prec = before


@functools.lru_cache(maxsize=4096)
def sign(c: sympy.Expr) -> int | None:
    """Return the exact sign -1, 0 or 1 of a constant, or None if neither intervals nor sympy decide it."""
    if c.is_Rational or c in (sympy.oo, -sympy.oo):
        return int(sympy.sign(c))
    with contextlib.suppress(Undefined):
        for bits in (PRECISION, 8 * PRECISION):
            with precision(bits):
                value = enclose_constant(c)
            if value.a > 0 or value.b < 0:
                return 1 if value.a > 0 else -1
        return 0 if sympy.simplify(c) == 0 else None
    return None
