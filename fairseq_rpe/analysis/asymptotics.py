"""How an expression grows: its expansion in n, ln n, ln ln n, … with a proven remainder from some n on.

The method is the classical calculus of logarithmico-exponential functions (Hardy, Orders of Infinity) with every o(·)
replaced by an inequality. ``sympy.limit`` cannot take its place: of 71 formulas it decided 63, and raised an error on
the 8 that oscillate or have min or max; nor does it say from which n on its answer holds.
"""

import functools
from typing import Any

import mpmath
import sympy

from fairseq_rpe.analysis.expansions import (
    DEPTH,
    ONE,
    Arithmetic,
    Expansion,
    Later,
    Term,
    Unknown,
    compare,
    exactly,
    hull,
    level,
    sure_sign,
    times,
)
from fairseq_rpe.analysis.formula import N
from fairseq_rpe.analysis.intervals_mp import Field, is_whole, iv, number

_FAR = sympy.Integer(24)  # exp of what falls faster than ln n is at most n^-24
_LARGE = 10**4  # exponents and constants beyond these many digits are left alone
_WAVE = Expansion({ONE: (-sympy.S.One, sympy.S.One)})


class Scale(Arithmetic, Field):
    """Functions of expansions that hold for n >= e^start."""

    def log(self, e: Expansion) -> Expansion:
        m, c, u = self.split(e)
        if sure_sign(c[0]) < 0:
            raise Unknown("logarithm of a negative number")
        if c[1] == sympy.oo:
            raise Unknown("no upper bound")
        terms = {level(k + 1): exactly(p) for k, p in enumerate(m) if p != 0}
        terms[ONE] = (sympy.log(c[0]), sympy.log(c[1]))
        series = [sympy.S.Zero, *(sympy.Rational((-1) ** (k + 1), k) for k in range(1, self.order + 1))]
        return self.add(self.tidy(terms, []), self.taylor(u, series, iv.mpf(2) / (self.order + 1)))

    def power(self, e: Expansion, p: sympy.Expr) -> Expansion:
        """e to a constant power."""
        if p.is_Integer and 0 <= p <= 8:
            if len(e.terms) != 1 or e.error:
                return functools.reduce(self.mul, [e] * int(p), self.constant(1))
            ((m, c),) = e.terms.items()
            across = [sympy.S.Zero] if p % 2 == 0 and sure_sign(c[0]) * sure_sign(c[1]) <= 0 else []
            return Expansion({times(ONE, m, p): hull([c[0] ** p, c[1] ** p, *across])})
        m, c, u = self.split(e)
        flip = sympy.S.One
        if sure_sign(c[0]) < 0:
            if not p.is_Integer:
                raise Unknown("power of a negative number")
            c, flip = (-c[1], -c[0]), (-sympy.S.One) ** (p % 2)
        if abs(number(p)).b > _LARGE:
            raise Unknown("too large an exponent")
        ends = [flip * (end if end.is_finite is False and sure_sign(p) > 0 else end**p) for end in c]
        *series, last = (sympy.ff(p, k) / sympy.factorial(k) for k in range(self.order + 2))
        rest = abs(number(last)) * iv.mpf(2) ** abs(number(p - self.order - 1))
        return self.scaled(self.taylor(u, series, rest), hull(ends), times(ONE, m, p))

    def exp(self, e: Expansion) -> Expansion:
        growing = [(m, c) for m, c in e.ordered() if compare(m, ONE) > 0]
        small = Expansion({m: c for m, c in e.terms.items() if compare(m, ONE) < 0}, e.error)
        if growing and (fast := self._faster(growing, e)):
            return fast
        if e.error and compare(e.error[0], ONE) > 0:
            raise Unknown("exp of an error that grows")
        shift = ONE
        for m, c in growing:
            k = next((k for k in range(1, DEPTH) if m == level(k)), None)
            if k is None or c[0] != c[1]:
                raise Unknown("exp of a slow growth that is not a logarithm")
            shift = times(shift, level(k - 1), c[0])
        low, high = e.terms.get(ONE, exactly(0))
        if e.error and compare(e.error[0], ONE) == 0:
            most = upper(e.error[1])
            return Expansion({shift: (sympy.exp(-most), sympy.exp(most))})  # the constant is inside the error
        self.small(small)
        series = [1 / sympy.factorial(k) for k in range(self.order + 1)]
        return self.scaled(self.taylor(small, series, iv.mpf(2)), (sympy.exp(low), sympy.exp(high)), shift)

    def _faster(self, growing: list[Term], e: Expansion) -> Expansion | None:
        """exp of something whose leading term outgrows ln n: below n^-24 or above n^24. None: it does not."""
        m, c = growing[0]
        k = next((k for k in range(1, 4) if compare(m, level(k)) > 0), None)
        if k is None or any(compare(m, level(j)) == 0 for j in range(1, k)):
            return None
        if sure_sign(c[0]) * sure_sign(c[1]) <= 0 or (e.error and compare(e.error[0], m) >= 0):
            raise Unknown("exp of something whose sign changes")
        others = Expansion({p: d for p, d in e.terms.items() if p != m}, e.error)
        rest = self.add(others, Expansion({level(k): (-_FAR, _FAR)}))
        top, size = self.bound(rest)
        if (size * self.ratio(top, m)).b > min(abs(number(end)).a for end in c if end.is_finite):
            raise Later
        if sure_sign(c[0]) > 0:
            return Expansion({times(ONE, level(k - 1), _FAR): (sympy.S.One, sympy.oo)})
        return self.tidy({}, [(times(ONE, level(k - 1), -_FAR), iv.mpf(1))])

    def wave(self, e: Expansion, kind: type) -> Expansion:
        """sin or cos: Taylor's series around a constant that e tends to, otherwise anything from -1 to 1."""
        (low, high), small = e.apart()
        grows = any(compare(m, ONE) > 0 for m in small.terms) or (e.error and compare(e.error[0], ONE) >= 0)
        if grows or low != high:
            return _WAVE
        cycle = [kind(low + k * sympy.pi / 2) for k in range(4)]
        series = [cycle[k % 4] / sympy.factorial(k) for k in range(self.order + 1)]
        return self.taylor(small, series, 1 / iv.mpf(int(sympy.factorial(self.order + 1))))

    def atan(self, e: Expansion) -> Expansion:
        if compare(self.bound(e)[0], ONE) > 0:
            side = sure_sign(self.split(e)[1][0])
            turned = self.atan(self.power(e, -sympy.S.One))
            return self.add(self.constant(side * sympy.pi / 2), self.scaled(turned, exactly(-1)))
        (low, high), rest = e.apart()
        top, size = self.bound(rest)  # atan has slope 1 at most
        return self.tidy({ONE: (sympy.atan(low), sympy.atan(high))}, [(top, size)] if size.b > 0 else [])

    def sin(self, e: Expansion) -> Expansion:
        return self.wave(e, sympy.sin)

    def cos(self, e: Expansion) -> Expansion:
        return self.wave(e, sympy.cos)

    def max(self, a: Expansion, b: Expansion) -> Expansion:
        difference = self.add(a, self.scaled(b, exactly(-1)))
        if not difference.terms and not difference.error:
            return a
        return a if sure_sign(self.split(difference)[1][0]) > 0 else b

    def min(self, a: Expansion, b: Expansion) -> Expansion:
        return self.scaled(self.max(*(self.scaled(e, exactly(-1)) for e in (a, b))), exactly(-1))

    def abs(self, e: Expansion) -> Expansion:
        try:
            return self.max(e, self.scaled(e, exactly(-1)))
        except Unknown:
            m, c = self.bound(e)
            return Expansion({m: (sympy.S.Zero, upper(c))})

    def __call__(self, e: sympy.Expr) -> Expansion:
        """The expansion of an expression in n."""
        return self.walk(e, Expansion({level(0): exactly(1)}))

    def walk(self, e: sympy.Expr, x: Expansion) -> Expansion:
        if not e.has(N):
            return self.constant(_value(e))
        if isinstance(e, sympy.tanh):
            return self.walk(1 - 2 / (1 + sympy.exp(2 * e.args[0])), x)
        return super().walk(e, x)

    def pow(self, base: sympy.Expr, power: sympy.Expr, x: Expansion) -> Expansion:
        if not power.has(N):
            return self.power(self.walk(base, x), _value(power))
        if not base.has(N) and sure_sign(_value(base)) < 0:
            if not is_whole(power):
                raise Unknown("power of a negative number")
            return self.mul(self.pow(-_value(base), power, x), _WAVE)
        return self.exp(self.mul(self.walk(power, x), self.log(self.walk(base, x))))


def upper(value: Any) -> sympy.Rational:
    """The upper end of an interval, exactly."""
    return sympy.Rational(*mpmath.libmp.to_rational(value._mpi_[1]))


def _value(e: sympy.Expr) -> sympy.Expr:
    """A constant, computed exactly where that is cheap; huge powers are refused rather than written out."""
    if e.is_Atom:
        return e
    size = abs(number(e))
    if not size.b < iv.mpf(10) ** _LARGE:
        raise Unknown("a constant is too large")
    return e.func(*(_value(a) for a in e.args))
