"""Intervals that surely hold the values of an expression: at a number, over a range, over a complex box.

``walk`` goes through an expression and leaves the arithmetic to :class:`Balls` (mpmath, many digits, real or complex)
or :class:`Floats` (numpy, double precision, many ranges at a time). What may be undefined raises :class:`Undefined` or
is flagged; 0·∞ and ∞ - ∞ count as undefined, ln 0 = -∞ does not.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator
from fractions import Fraction
from typing import Any

import mpmath
import numpy as np
import sympy
from mpmath.ctx_iv import MPIntervalContext

from .formula import N

PRECISION = 120  # bits
iv: Any = MPIntervalContext()  # our own: the precision of mpmath.iv belongs to everybody
iv.prec = PRECISION
_HUGE = 1e9  # exponents beyond this are not computed: exp of it already has 400 million digits
_ULPS = 8  # numpy's functions are good to 4


class Undefined(ArithmeticError):
    """The expression may have no value here."""


def is_whole(e: sympy.Expr) -> bool:
    """True where the expression is surely a whole number at every whole n >= 0."""
    if e is N or e.is_Integer:
        return True
    if e.is_Add or e.is_Mul:
        return all(is_whole(a) for a in e.args)
    return bool(e.is_Pow and e.exp.is_Integer and e.exp >= 0 and is_whole(e.base))


def walk(e: sympy.Expr, x: Any, field: Any) -> Any:
    """The value of ``e`` at n = x in ``field``."""
    if e is N:
        return x
    if e.is_Rational:
        return field.rational(e.p, e.q)
    if e.is_Float:
        return field.rational(*mpmath.libmp.to_rational(e._mpf_))
    if e is sympy.pi or e is sympy.E:
        return field.constant(e)
    if e.is_Add or e.is_Mul or isinstance(e, sympy.Min | sympy.Max):
        step = (
            field.add if e.is_Add else field.mul if e.is_Mul else field.min if isinstance(e, sympy.Min) else field.max
        )
        return functools.reduce(step, (walk(a, x, field) for a in e.args))
    if e.is_Pow or isinstance(e, sympy.exp):
        base, power = (sympy.E, e.args[0]) if isinstance(e, sympy.exp) else e.args
        if base is sympy.E:
            return field.exp(walk(power, x, field))
        if power.is_Integer:
            return field.power(walk(base, x, field), int(power))
        return _power(base, power, x, field)
    for kind in (sympy.log, sympy.sin, sympy.cos, sympy.tanh, sympy.atan, sympy.Abs):
        if isinstance(e, kind):
            return getattr(field, kind.__name__.lower())(walk(e.args[0], x, field))
    raise Undefined(f"'{e}' is not of n, constants, + - * / ** and the functions of a formula")


def _power(base: sympy.Expr, power: sympy.Expr, x: Any, field: Any) -> Any:
    """base ** power of any power: exp(power · ln base), 0 ** positive = 0, and (-b) ** whole = ± b ** whole."""
    if base.is_Rational and base < 0 and is_whole(power):
        return field.mul(walk(sympy.cos(sympy.pi * power, evaluate=False), x, field), _power(-base, power, x, field))
    value, exponent = walk(base, x, field), walk(power, x, field)
    return field.exp(field.mul(exponent, field.log(field.base(value, exponent))))


class Balls:
    """mpmath's intervals: ``iv.mpf`` for real numbers, ``iv.mpc`` for complex boxes."""

    @staticmethod
    def rational(p: int, q: int) -> Any:
        return iv.mpf(p) / q if q != 1 else iv.mpf(p)

    @staticmethod
    def constant(e: sympy.Expr) -> Any:
        return +iv.pi if e is sympy.pi else iv.exp(1)

    @staticmethod
    def _sure(value: Any) -> Any:
        for part in (value.real, value.imag) if isinstance(value, iv.mpc) else (value,):
            if any(mpmath.isnan(end) for end in ends(part)):
                raise Undefined("not a number")
        return value

    @classmethod
    def add(cls, a: Any, b: Any) -> Any:
        if not isinstance(a, iv.mpc) and not isinstance(b, iv.mpc):
            if (a.a == -iv.inf and b.b == iv.inf) or (b.a == -iv.inf and a.b == iv.inf):
                raise Undefined("∞ - ∞")
        return cls._sure(a + b)

    @classmethod
    def mul(cls, a: Any, b: Any) -> Any:
        for p, q in ((a, b), (b, a)):
            if not isinstance(p, iv.mpc) and (p.a == -iv.inf or p.b == iv.inf) and 0 in _real(q):
                raise Undefined("0 · ∞")
        return cls._sure(a * b)

    @classmethod
    def power(cls, a: Any, k: int) -> Any:
        if k < 0:
            if _meets_zero(a):
                raise Undefined("division by 0")
            return cls._sure(1 / cls.power(a, -k))
        if k > 64:
            if isinstance(a, iv.mpc) or (a.a <= 0 <= a.b and a.a != a.b):
                return cls.exp(cls.mul(iv.mpf(k), cls.log(a)))
            if a.a == a.b == 0:
                return a
            size = cls.exp(k * iv.log(abs(a)))
            return -size if a.b < 0 and k % 2 else size
        return cls._sure(a**k)

    @classmethod
    def exp(cls, a: Any) -> Any:
        real = _real(a)
        if real.b > _HUGE or real.a < -_HUGE:
            if isinstance(a, iv.mpc):
                if real.b > _HUGE:
                    raise Undefined("out of range")
                size = iv.exp(max(real.b, iv.mpf(-_HUGE))) * iv.mpf([-1, 1])
                return iv.mpc(size, size)
            low = iv.mpf(0) if real.a < -_HUGE else iv.exp(min(real.a, iv.mpf(_HUGE)))
            high = iv.inf if real.b > _HUGE else iv.exp(max(real.b, iv.mpf(-_HUGE)))
            return iv.mpf([low.a, high.b if high is not iv.inf else iv.inf])
        return iv.exp(a)

    @classmethod
    def log(cls, a: Any) -> Any:
        if isinstance(a, iv.mpc):
            if a.real.a <= 0 and 0 in a.imag:
                raise Undefined("the logarithm's cut")
        elif a.a < 0:
            raise Undefined("logarithm of a negative number")
        return iv.log(a)

    @staticmethod
    def base(a: Any, exponent: Any) -> Any:
        """a, where it may be raised to ``exponent``: not to a power of 0 or below at 0."""
        if not isinstance(a, iv.mpc) and a.a <= 0 <= a.b and not (a.a == 0 and _real(exponent).a > 0):
            raise Undefined("power of a number that may be 0 or below")
        return a

    @staticmethod
    def sin(a: Any) -> Any:
        return iv.sin(a) if _bounded(a) else iv.mpf([-1, 1])

    @staticmethod
    def cos(a: Any) -> Any:
        return iv.cos(a) if _bounded(a) else iv.mpf([-1, 1])

    @classmethod
    def tanh(cls, a: Any) -> Any:
        side = 1 if _real(a).a >= 0 else -1  # so that e^(-2|a|) is small
        return side * (2 * cls.power(1 + cls.exp(-2 * side * a), -1) - 1)

    @classmethod
    def atan(cls, a: Any) -> Any:
        if not isinstance(a, iv.mpc) and (a.a == -iv.inf or a.b == iv.inf):
            return iv.mpf([-1, 1]) * iv.pi / 2
        turned = iv.mpc(0, 1) * a
        value = (cls.log(1 + turned) - cls.log(1 - turned)) / iv.mpc(0, 2)
        return value if isinstance(a, iv.mpc) else value.real

    @staticmethod
    def abs(a: Any) -> Any:
        if not isinstance(a, iv.mpc):
            return abs(a)
        if a.real.a > 0 or a.real.b < 0:
            return a if a.real.a > 0 else -a
        raise Undefined("|·| bends here")

    @classmethod
    def min(cls, a: Any, b: Any) -> Any:
        return -cls.max(-a, -b)

    @staticmethod
    def max(a: Any, b: Any) -> Any:
        if not isinstance(a, iv.mpc) and not isinstance(b, iv.mpc):
            return iv.mpf([max(a.a, b.a), max(a.b, b.b)])
        if _real(a).a > _real(b).b:
            return a
        if _real(b).a > _real(a).b:
            return b
        raise Undefined("min or max bends here")


def _real(a: Any) -> Any:
    return a.real if isinstance(a, iv.mpc) else a


def _bounded(a: Any) -> bool:
    if isinstance(a, iv.mpc):
        if a.imag.b > _HUGE or a.imag.a < -_HUGE:
            raise Undefined("out of range")
        return True
    return a.b - a.a < 8 and abs(a).b < mpmath.mpf(2) ** PRECISION


def _meets_zero(a: Any) -> bool:
    return 0 in _real(a) and (not isinstance(a, iv.mpc) or 0 in a.imag)


class Floats:
    """Ranges as pairs of numpy arrays (low, high), rounded outwards; (nan, nan) where the value may be undefined."""

    @staticmethod
    def rational(p: int, q: int) -> Any:
        try:
            near = np.float64(p / q)
        except OverflowError:
            raise Undefined(f"{p}/{q} is out of range") from None
        return (near, near) if Fraction(float(near)) == Fraction(p, q) else _wide(near, near, 1)

    @staticmethod
    def constant(e: sympy.Expr) -> Any:
        return _wide(np.float64(float(e)), np.float64(float(e)), 1)

    @staticmethod
    def add(a: Any, b: Any) -> Any:
        return _wide(a[0] + b[0], a[1] + b[1], 1, np.isnan(a[0] + b[1]) | np.isnan(a[1] + b[0]))

    @staticmethod
    def mul(a: Any, b: Any) -> Any:
        corners = [p * q for p in a for q in b]
        for p, q in ((a, b), (b, a)):  # 0 · ∞ inside, not only at a corner
            corners.append(np.where((np.isinf(p[0]) | np.isinf(p[1])) & (q[0] <= 0) & (q[1] >= 0), np.nan, corners[0]))
        return _wide(functools.reduce(np.minimum, corners), functools.reduce(np.maximum, corners), 1)

    @classmethod
    def power(cls, a: Any, k: int) -> Any:
        low, high = a
        if k < 0:
            low, high = cls.power(a, -k)
            gap = (low <= 0) & (high >= 0)
            return _wide(1 / high, 1 / low, 1, gap)
        ends = _wide(np.minimum(low**k, high**k), np.maximum(low**k, high**k), _ULPS)
        if k % 2 or k == 0:
            return (low**k, high**k) if k == 0 else _wide(low**k, high**k, _ULPS)
        return np.where((low <= 0) & (high >= 0), 0.0, np.maximum(ends[0], 0)), ends[1]

    @staticmethod
    def exp(a: Any) -> Any:
        low, high = _wide(np.exp(a[0]), np.exp(a[1]), _ULPS)
        return np.maximum(low, 0), high

    @staticmethod
    def log(a: Any) -> Any:
        return _wide(np.log(a[0]), np.log(a[1]), _ULPS)

    @staticmethod
    def base(a: Any, exponent: Any) -> Any:
        bad = (a[0] < 0) | ((a[0] == 0) & ~(exponent[0] > 0))
        return np.where(bad, np.nan, a[0]), np.where(bad, np.nan, a[1])

    @classmethod
    def sin(cls, a: Any) -> Any:
        shifted = a[0] - np.pi / 2, a[1] - np.pi / 2
        return cls._wave(np.sin, a, shifted)

    @classmethod
    def cos(cls, a: Any) -> Any:
        return cls._wave(np.cos, a, a)

    @staticmethod
    def _wave(function: Callable[[Any], Any], a: Any, from_top: Any) -> Any:
        """``from_top``: the same range counted from a maximum, which is where cos has one."""
        low, high = function(a[0]), function(a[1])
        near = 1e-9 + 1e-15 * np.maximum(np.abs(a[0]), np.abs(a[1]))  # the slack of the two tests and of π
        turns = [np.floor((end + sign * near) / np.pi) for end, sign in ((from_top[1], 1), (from_top[0], -1))]
        passed = turns[0] - turns[1]  # multiples of π in the range: maxima where even, minima where odd
        even, two = np.mod(turns[0], 2) == 0, passed >= 2
        slack = 1e-15 * _ULPS + np.where(near > 1e-8, near, 0.0)
        top = np.where(two | ((passed >= 1) & even), 1.0, np.minimum(np.maximum(low, high) + slack, 1))
        bottom = np.where(two | ((passed >= 1) & ~even), -1.0, np.maximum(np.minimum(low, high) - slack, -1))
        wild = ~(np.isfinite(a[0]) & np.isfinite(a[1]) & (near < 1e-3))
        nan = np.isnan(a[0]) | np.isnan(a[1])
        return np.where(nan, np.nan, np.where(wild, -1.0, bottom)), np.where(nan, np.nan, np.where(wild, 1.0, top))

    @staticmethod
    def tanh(a: Any) -> Any:
        low, high = _wide(np.tanh(a[0]), np.tanh(a[1]), _ULPS)
        return np.maximum(low, -1), np.minimum(high, 1)

    @staticmethod
    def atan(a: Any) -> Any:
        return _wide(np.arctan(a[0]), np.arctan(a[1]), _ULPS)

    @staticmethod
    def abs(a: Any) -> Any:
        inside = (a[0] <= 0) & (a[1] >= 0)
        return np.where(inside, 0.0, np.minimum(abs(a[0]), abs(a[1]))), np.maximum(abs(a[0]), abs(a[1]))

    @staticmethod
    def min(a: Any, b: Any) -> Any:
        return np.minimum(a[0], b[0]), np.minimum(a[1], b[1])

    @staticmethod
    def max(a: Any, b: Any) -> Any:
        return np.maximum(a[0], b[0]), np.maximum(a[1], b[1])


def _wide(low: Any, high: Any, ulps: int, bad: Any = False) -> Any:
    """The range rounded outwards by ``ulps``; nan in both ends where either is, or where ``bad``."""
    bad = np.isnan(low) | np.isnan(high) | bad
    slack = ulps * np.finfo(float).eps
    low = np.nextafter(np.where(np.isinf(low), low, low - slack * abs(low)), -np.inf)
    low = np.where(np.isposinf(low), np.finfo(float).max, low)  # it left the range of doubles
    high = np.nextafter(np.where(np.isinf(high), high, high + slack * abs(high)), np.inf)
    return np.where(bad, np.nan, low), np.where(bad, np.nan, high)


def ends(value: Any) -> tuple[Any, Any]:
    """Both ends of a real interval as mpmath numbers, exactly; ``mpmath.mpf(value.a)`` would round them."""
    low, high = value._mpi_
    return mpmath.mp.make_mpf(low), mpmath.mp.make_mpf(high)


def enclose(e: sympy.Expr, x: Any) -> Any:
    """An interval of ``e`` at the number, real interval or complex box x, with :data:`PRECISION` bits.

    Raises:
        Undefined: it may have no value, or in a complex box not be analytic.
    """
    return walk(e, x if isinstance(x, iv.mpf | iv.mpc) else iv.mpf(x), Balls)


def ranges(e: sympy.Expr, low: Any, high: Any) -> tuple[Any, Any]:
    """Ranges of ``e`` over many ranges low <= n <= high of n; nan where it may be undefined."""
    with np.errstate(all="ignore"):
        a, b = walk(e, (low, high), Floats)
    return np.broadcast_to(a, low.shape), np.broadcast_to(b, low.shape)


def number(e: sympy.Expr) -> Any:
    """The interval of a constant."""
    return enclose(e, iv.mpf(0))


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
    for bits in (PRECISION, 8 * PRECISION):
        try:
            with precision(bits):
                value = number(c)
        except Undefined:
            return None
        if value.a > 0 or value.b < 0:
            return 1 if value.a > 0 else -1
    return 0 if sympy.simplify(c) == 0 else None
