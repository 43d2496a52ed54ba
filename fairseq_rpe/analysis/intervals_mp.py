"""Intervals that surely hold the values of an expression, at a number or over a range.

A :class:`Field` goes through an expression with an arithmetic of its own: :class:`Intervals` (mpmath, many digits),
:class:`.ranges.Floats` (numpy, doubles, many ranges at a time), :class:`.analytic.Boxes` (flint, complex) or
:class:`.asymptotics.Scale` (expansions).
What may be undefined raises :class:`Undefined` or is flagged; 0·∞ and ∞ - ∞ count as undefined, ln 0 = -∞ does not.

Flint's balls do not serve here: none is [0, x], [2^100, 2^1000000] or [-∞, x] (their radius has 30 bits), so roots and
logarithms of such ranges are lost.
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
iv: Any = MPIntervalContext()  # our own: the precision of mpmath.iv belongs to everybody
iv.prec = PRECISION
_HUGE = 1e9  # exponents beyond this are not computed: exp of it already has 400 million digits


class Undefined(ArithmeticError):
    """The expression may have no value here."""


def is_whole(e: sympy.Expr) -> bool:
    """True where the expression is surely a whole number at every whole n >= 0."""
    if e is N or e.is_Integer:
        return True
    if e.is_Add or e.is_Mul:
        return all(is_whole(a) for a in e.args)
    return bool(e.is_Pow and e.exp.is_Integer and e.exp >= 0 and is_whole(e.base))


class Field:
    """An arithmetic of numbers of some kind: ``rational``, ``constant``, ``add``, … and the functions of a formula."""

    def walk(self, e: sympy.Expr, x: Any) -> Any:
        """The value of ``e`` at n = x."""
        if e is N:
            return x
        if e.is_Rational:
            return self.rational(e.p, e.q)
        if e is sympy.pi or e is sympy.E:
            return self.constant(e)
        if e.is_Add or e.is_Mul or isinstance(e, sympy.Min | sympy.Max):
            step = getattr(self, e.func.__name__.lower())
            return functools.reduce(step, (self.walk(a, x) for a in e.args))
        if isinstance(e, sympy.exp):  # Pow(E, …) counts as one
            return self.exp(self.walk(e.exp, x))
        if e.is_Pow:
            return self.pow(e.base, e.exp, x)
        if isinstance(e, sympy.log | sympy.sin | sympy.cos | sympy.tanh | sympy.atan | sympy.Abs):
            return getattr(self, e.func.__name__.lower())(self.walk(e.args[0], x))
        raise Undefined(f"'{e}' is not of n, constants, + - * / ** and the functions of a formula")

    def pow(self, base: sympy.Expr, power: sympy.Expr, x: Any) -> Any:
        """base ** power: exp(power · ln base), 0 ** positive = 0, and (-b) ** whole = ± b ** whole."""
        if power.is_Integer:
            return self.power(self.walk(base, x), int(power))
        if base.is_Rational and base < 0 and is_whole(power):
            return self.mul(self.walk(sympy.cos(sympy.pi * power, evaluate=False), x), self.pow(-base, power, x))
        value, exponent = self.walk(base, x), self.walk(power, x)
        return self.exp(self.mul(exponent, self.log(self.base(value, exponent))))


def _wave(function: Callable[[Any], Any]) -> Any:
    """The field's method for sin or cos: anything from -1 to 1 where the interval is wide or far out."""
    bounded = iv.mpf([-1, 1])
    return lambda self, a: function(a) if a.delta < 8 and abs(a).b < mpmath.mpf(2) ** PRECISION else bounded


def _both(function: Callable[[Any, Any], Any]) -> Any:
    return lambda self, a, b: iv.mpf([function(a.a, b.a), function(a.b, b.b)])


def _sure(value: Any) -> Any:
    if any(map(mpmath.isnan, ends(value))):
        raise Undefined("not a number")
    return value


class Intervals(Field):
    """mpmath's real intervals ``iv.mpf``."""

    sin, cos, abs = _wave(iv.sin), _wave(iv.cos), abs
    min, max = _both(min), _both(max)

    def rational(self, p: int, q: int) -> Any:
        return iv.mpf(p) / q if q != 1 else iv.mpf(p)

    def constant(self, e: sympy.Expr) -> Any:
        return +iv.pi if e is sympy.pi else iv.exp(1)

    def add(self, a: Any, b: Any) -> Any:
        if (a.a == -iv.inf and b.b == iv.inf) or (b.a == -iv.inf and a.b == iv.inf):
            raise Undefined("∞ - ∞")
        return _sure(a + b)

    def mul(self, a: Any, b: Any) -> Any:
        for p, q in ((a, b), (b, a)):
            if (p.a == -iv.inf or p.b == iv.inf) and 0 in q:
                raise Undefined("0 · ∞")
        return _sure(a * b)

    def power(self, a: Any, k: int) -> Any:
        if k < 0:
            if 0 in a:
                raise Undefined("division by 0")
            return _sure(1 / self.power(a, -k))
        if k > 64 and not a.a == a.b == 0:
            if 0 in a:
                return self.exp(self.mul(iv.mpf(k), self.log(a)))
            size = self.exp(k * iv.log(abs(a)))
            return -size if a.b < 0 and k % 2 else size
        return _sure(a**k)

    def exp(self, a: Any) -> Any:
        if a.b <= _HUGE and a.a >= -_HUGE:
            return iv.exp(a)
        low = 0 if a.a < -_HUGE else iv.exp(min(a.a, iv.mpf(_HUGE))).a
        return iv.mpf([low, iv.inf if a.b > _HUGE else iv.exp(max(a.b, iv.mpf(-_HUGE))).b])

    def log(self, a: Any) -> Any:
        if a.a < 0:
            raise Undefined("logarithm of a negative number")
        return iv.log(a)

    def base(self, a: Any, exponent: Any) -> Any:
        """a, where it may be raised to ``exponent``: not to a power of 0 or below at 0."""
        if a.a <= 0 <= a.b and not (a.a == 0 and exponent.a > 0):
            raise Undefined("power of a number that may be 0 or below")
        return a

    def tanh(self, a: Any) -> Any:
        side = 1 if a.a >= 0 else -1  # so that e^(-2|a|) is small
        return side * (2 * self.power(1 + self.exp(-2 * side * a), -1) - 1)

    def atan(self, a: Any) -> Any:
        if a.a == -iv.inf or a.b == iv.inf:
            return iv.mpf([-1, 1]) * iv.pi / 2
        turned = iv.mpc(0, 1) * a
        return ((iv.log(1 + turned) - iv.log(1 - turned)) / iv.mpc(0, 2)).real


intervals = Intervals()


def ends(value: Any) -> tuple[Any, Any]:
    """Both ends of a real interval as mpmath numbers, exactly; ``mpmath.mpf(value.a)`` would round them."""
    low, high = value._mpi_
    return mpmath.mp.make_mpf(low), mpmath.mp.make_mpf(high)


def enclose(e: sympy.Expr, x: Any) -> Any:
    """An interval of ``e`` at the number or interval x, with :data:`PRECISION` bits."""
    return intervals.walk(e, iv.mpf(x))


def number(e: sympy.Expr) -> Any:
    """The interval of a constant."""
    return enclose(e, 0)


@contextlib.contextmanager
def precision(bits: int) -> Iterator[None]:
    """Intervals of so many bits for a while."""
    before, iv.prec = iv.prec, bits
    try:
        yield
    finally:
        iv.prec = before


@functools.lru_cache(maxsize=4096)
def sign(c: sympy.Expr) -> int | None:
    """-1, 0 or 1, exact; None where the sign of a constant cannot be told."""
    if c.is_Rational or c in (sympy.oo, -sympy.oo):
        return int(sympy.sign(c))
    with contextlib.suppress(Undefined):
        for bits in (PRECISION, 8 * PRECISION):
            with precision(bits):
                value = number(c)
            if value.a > 0 or value.b < 0:
                return 1 if value.a > 0 else -1
        return 0 if sympy.simplify(c) == 0 else None
    return None
