"""How an expression grows: expansions in n, ln n, ln ln n, … with proven remainders from some n on.

An :class:`Expansion` of f says: for every n >= e^T,

    f(n) = Σ_i θ_i(n)·m_i(n) + error,   θ_i(n) in [low_i, high_i],   |error| <= C·m(n)

with monomials m = n^a0 · (ln n)^a1 · (ln ln n)^a2 · …, exact coefficients (intervals where something oscillates) and a
number C. Signs are decided exactly; what cannot be decided raises :class:`Unknown`, what needs a larger T raises
:class:`Later`. The method is the classical calculus of logarithmico-exponential functions (Hardy, Orders of Infinity)
with every o(·) replaced by an inequality.
"""

from __future__ import annotations

import functools
from typing import Any

import mpmath
import sympy

from .enclosures import Intervals, is_whole, iv, number, sign
from .expansions import (
    DEPTH,
    ONE,
    Coefficient,
    Expansion,
    Later,
    Monomial,
    Unknown,
    compare,
    exactly,
    least,
    level,
    product,
    sure_sign,
    times,
)
from .formula import N

_FAR = sympy.Integer(24)  # exp of what falls faster than ln n is at most n^-24
_MOST = 24  # terms
_LARGE = 10**4  # exponents and constants beyond these many digits are left alone


class Scale:
    """Arithmetic of expansions that hold for n >= e^start.

    Args:
        start: T.
        order: powers of a small quantity that are kept.
    """

    def __init__(self, start: int, order: int) -> None:
        self.order = order
        self.logs = [iv.mpf(start)]  # the iterated logarithms of e^start: ln n, ln ln n, …
        while len(self.logs) < DEPTH and self.logs[-1].a > 0:
            self.logs.append(iv.log(self.logs[-1]))

    def size(self, m: Monomial) -> Any:
        """The interval of a monomial at n = e^start."""
        total = iv.mpf(0)
        for k, power in enumerate(m):
            if power != 0:
                if k >= len(self.logs) or (k and self.logs[k - 1].a <= 0):
                    raise Later
                total += number(power) * self.logs[k]
        return Intervals.exp(total)

    def slope(self, m: Monomial, k: int) -> Any:
        """The largest size, from here on, of d ln m / d ln L_k less its own a_k; L_k is the k-fold logarithm."""
        total, scale = iv.mpf(0), iv.mpf(1)
        for j in range(k + 1, DEPTH):
            if any(m[i] != 0 for i in range(j, DEPTH)):
                if j - 1 >= len(self.logs) or self.logs[j - 1].a <= 0:
                    raise Later
                scale = scale / self.logs[j - 1]
                total += abs(number(m[j])) * scale
        return total.b

    def falls(self, m: Monomial) -> bool:
        """True where the monomial only falls, False where it only rises (or is 1), from here on."""
        k = next((k for k in range(DEPTH) if m[k] != 0), None)
        if k is None:
            return False
        if abs(number(m[k])).a < self.slope(m, k):
            raise Later
        return sure_sign(m[k]) < 0

    def ratio(self, a: Monomial, b: Monomial) -> Any:
        """The largest a/b from here on; a is not the larger one."""
        quotient = times(a, b, -sympy.S.One)
        if all(p == 0 for p in quotient):
            return iv.mpf(1)
        if not self.falls(quotient):
            raise Unknown("not the smaller one")
        return self.size(quotient)

    def weight(self, c: Coefficient) -> Any:
        """The largest size of a coefficient."""
        if sympy.oo in c or -sympy.oo in c:
            raise Unknown("no upper bound")
        return iv.mpf(max(abs(number(c[0])).b, abs(number(c[1])).b))

    def tidy(self, terms: dict[Monomial, Coefficient], errors: list[tuple[Monomial, Any]]) -> Expansion:
        """Drop zeros, put what is below the largest error into it, and keep the number of terms small."""
        kept = Expansion(
            {m: c for m, c in terms.items() if c != (0, 0) and (c[0] != c[1] or sign(c[0]) != 0)}
        ).ordered()
        if len(kept) > _MOST:
            errors = [*errors, *((m, self.weight(c)) for m, c in kept[_MOST:])]
            kept = kept[:_MOST]
        if not errors:
            return Expansion(dict(kept))
        top = errors[0][0]
        for m, _ in errors[1:]:
            top = m if compare(m, top) > 0 else top
        total = sum((c * self.ratio(m, top) for m, c in errors), iv.mpf(0))
        large = {}
        for m, c in kept:
            if compare(m, top) > 0 or sympy.oo in c or -sympy.oo in c:
                large[m] = c
            else:
                total += self.weight(c) * self.ratio(m, top)
        return Expansion(large, (top, iv.mpf(total.b)))

    def bound(self, e: Expansion) -> tuple[Monomial, Any]:
        """A monomial and a number with |e| <= number · monomial."""
        items = [(m, self.weight(c)) for m, c in e.terms.items()] + ([e.error] if e.error else [])
        if not items:
            return ONE, iv.mpf(0)
        top = items[0][0]
        for m, _ in items[1:]:
            top = m if compare(m, top) > 0 else top
        return top, sum((c * self.ratio(m, top) for m, c in items), iv.mpf(0))

    def constant(self, c: sympy.Expr) -> Expansion:
        return self.tidy({ONE: exactly(c)}, [])

    def between(self, low: sympy.Expr, high: sympy.Expr, m: Monomial = ONE) -> Expansion:
        return Expansion({m: (low, high)})

    def add(self, a: Expansion, b: Expansion) -> Expansion:
        terms = dict(a.terms)
        for m, (low, high) in b.terms.items():
            old = terms.get(m, exactly(sympy.S.Zero))
            terms[m] = (old[0] + low, old[1] + high)
            if sympy.nan in terms[m]:
                raise Unknown("∞ - ∞")
        return self.tidy(terms, [e.error for e in (a, b) if e.error])

    def mul(self, a: Expansion, b: Expansion) -> Expansion:
        terms: dict[Monomial, Coefficient] = {}
        for m, c in a.terms.items():
            for k, d in b.terms.items():
                key = times(m, k)
                low, high = product(c, d)
                old = terms.get(key, exactly(sympy.S.Zero))
                terms[key] = (old[0] + low, old[1] + high)
                if sympy.nan in terms[key]:
                    raise Unknown("∞ - ∞")
        errors = []
        for p, q in ((a, b), (b, a)):
            if q.error:
                top, c = self.bound(p)
                errors.append((times(top, q.error[0]), c * q.error[1]))
        return self.tidy(terms, errors)

    def scaled(self, e: Expansion, c: Coefficient, m: Monomial = ONE) -> Expansion:
        return self.mul(e, Expansion({m: c}))

    def split(self, e: Expansion) -> tuple[Monomial, Coefficient, Expansion]:
        """e = c·m·(1 + u): the leading monomial, its coefficient, which has a sign, and u with |u| <= 1/2."""
        if not e.terms:
            raise Unknown("nothing is known to be the leading term")
        (m, c), *rest = e.ordered()
        if e.error and compare(e.error[0], m) >= 0:
            raise Unknown("the error is as large as the leading term")
        if sure_sign(c[0]) * sure_sign(c[1]) <= 0:
            raise Unknown("the leading term changes its sign")
        inverse = (self._over(c[1]), self._over(c[0]))
        u = self.scaled(Expansion(dict(rest), e.error), inverse, times(ONE, m, -sympy.S.One))
        self._small(u)
        return m, c, u

    @staticmethod
    def _over(c: sympy.Expr) -> sympy.Expr:
        return sympy.S.Zero if c in (sympy.oo, -sympy.oo) else 1 / c

    def _small(self, u: Expansion) -> Any:
        top, c = self.bound(u)
        size = c if top == ONE else c * (self.size(top) if self.falls(top) else _grows())
        if size.b > 0.5:
            if compare(top, ONE) < 0:
                raise Later
            raise Unknown("a small quantity is not small")
        return iv.mpf(size.b)

    def taylor(self, u: Expansion, coefficients: list[sympy.Expr], rest: Any) -> Expansion:
        """Σ_k coefficients[k]·u^k with |error| <= rest·|u|^len(coefficients)."""
        total, power = self.constant(coefficients[0]), self.constant(sympy.S.One)
        for c in coefficients[1:]:
            power = self.mul(power, u)
            total = self.add(total, self.scaled(power, exactly(c)))
        top, size = self.bound(u)
        k = len(coefficients)
        if not u.terms and not u.error:
            return total
        return self.tidy(total.terms, [*([total.error] if total.error else []), (_repeat(top, k), rest * size**k)])

    def log(self, e: Expansion) -> Expansion:
        m, c, u = self.split(e)
        if sure_sign(c[0]) < 0:
            raise Unknown("logarithm of a negative number")
        if c[1] == sympy.oo:
            raise Unknown("no upper bound")
        terms = {level(k + 1): exactly(p) for k, p in enumerate(m) if p != 0}
        terms[ONE] = (sympy.log(c[0]), sympy.log(c[1]))
        series = [sympy.S.Zero, *(sympy.Rational((-1) ** (k + 1), k) for k in range(1, self.order + 1))]
        rest = iv.mpf(2) / (self.order + 1)
        return self.add(self.tidy(terms, []), self.taylor(u, series, rest))

    def power(self, e: Expansion, p: sympy.Expr) -> Expansion:
        """e to a constant power."""
        whole = p.is_Integer and 0 <= p <= 8
        if whole and (len(e.terms) != 1 or e.error):
            return functools.reduce(self.mul, [e] * int(p), self.constant(sympy.S.One))
        if whole:
            ((m, c),) = e.terms.items()
            powers = [c[0] ** p, c[1] ** p]
            low = sympy.S.Zero if p % 2 == 0 and sure_sign(c[0]) * sure_sign(c[1]) <= 0 else least(powers)
            return Expansion({times(ONE, m, p): (low, least(powers, largest=True))})
        m, c, u = self.split(e)
        flip = sympy.S.One
        if sure_sign(c[0]) < 0:
            if not p.is_Integer:
                raise Unknown("power of a negative number")
            c, flip = (-c[1], -c[0]), (-sympy.S.One) ** (p % 2)
        if abs(number(p)).b > _LARGE:
            raise Unknown("too large an exponent")
        ends = [self._raise(c[0], p), self._raise(c[1], p)]
        coefficient = product((least(ends), least(ends, largest=True)), exactly(flip))
        series, k = [sympy.S.One], self.order
        for i in range(k + 1):
            series.append(series[-1] * (p - i) / (i + 1))
        last = abs(number(series.pop()))
        rest = last * iv.mpf(2) ** abs(number(p - k - 1))
        return self.scaled(self.taylor(u, series, rest), coefficient, times(ONE, m, p))

    @staticmethod
    def _raise(c: sympy.Expr, p: sympy.Expr) -> sympy.Expr:
        return c if c.is_finite or sure_sign(p) > 0 else sympy.S.Zero if c == sympy.oo else c**p

    def exp(self, e: Expansion) -> Expansion:
        growing = [(m, c) for m, c in e.ordered() if compare(m, ONE) > 0]
        small = Expansion({m: c for m, c in e.terms.items() if compare(m, ONE) < 0}, e.error)
        fast = growing and self._faster(growing, e)
        if fast:
            return fast
        if e.error and compare(e.error[0], ONE) > 0:
            raise Unknown("exp of an error that grows")
        shift = ONE
        for m, c in growing:
            k = next((k for k in range(1, DEPTH) if m == level(k)), None)
            if k is None or c[0] != c[1]:
                raise Unknown("exp of a slow growth that is no logarithm")
            shift = times(shift, level(k - 1), c[0])
        low, high = e.terms.get(ONE, exactly(sympy.S.Zero))
        if e.error and compare(e.error[0], ONE) == 0:
            most = upper(e.error[1])
            return Expansion({shift: (sympy.exp(-most), sympy.exp(most))})  # the constant is inside the error
        self._small(small)
        series = [1 / sympy.factorial(k) for k in range(self.order + 1)]
        return self.scaled(self.taylor(small, series, iv.mpf(2)), self._exps(low, high), shift)

    @staticmethod
    def _exps(low: sympy.Expr, high: sympy.Expr) -> Coefficient:
        return sympy.exp(low), sympy.exp(high)

    def _faster(self, growing: list[tuple[Monomial, Coefficient]], e: Expansion) -> Expansion | None:
        """exp of something whose leading term outgrows ln n: below n^-24 or above n^24. None: it does not."""
        m, c = growing[0]
        k = next((k for k in range(1, DEPTH) if compare(m, level(k)) > 0), None)
        if k is None or k > 3:
            return None
        if k > 1 and any(compare(m, level(j)) == 0 for j in range(1, k)):
            return None
        if sure_sign(c[0]) * sure_sign(c[1]) <= 0 or (e.error and compare(e.error[0], m) >= 0):
            raise Unknown("exp of something whose sign changes")
        up = sure_sign(c[0]) > 0
        others = Expansion({p: d for p, d in e.terms.items() if p != m}, e.error)
        rest = self.add(others, Expansion({level(k): (-_FAR, _FAR)}))
        top, size = self.bound(rest)
        if (size * self.ratio(top, m)).b > min(abs(number(end)).a for end in c if end.is_finite):
            raise Later
        if up:
            return self.between(sympy.S.One, sympy.oo, times(ONE, level(k - 1), _FAR))
        return self.tidy({}, [(times(ONE, level(k - 1), -_FAR), iv.mpf(1))])

    def wave(self, e: Expansion, kind: type) -> Expansion:
        """sin or cos: Taylor's series around a constant that e tends to, otherwise anything from -1 to 1."""
        low, high = e.terms.get(ONE, exactly(sympy.S.Zero))
        small = Expansion({m: c for m, c in e.terms.items() if m != ONE}, e.error)
        grows = any(compare(m, ONE) > 0 for m in small.terms) or (e.error and compare(e.error[0], ONE) >= 0)
        if grows or low != high:
            return self.between(-sympy.S.One, sympy.S.One)
        cycle = [kind(low + k * sympy.pi / 2) for k in range(4)]
        series = [cycle[k % 4] / sympy.factorial(k) for k in range(self.order + 1)]
        return self.taylor(small, series, 1 / iv.mpf(int(sympy.factorial(self.order + 1))))

    def atan(self, e: Expansion) -> Expansion:
        top, _ = self.bound(e)
        if compare(top, ONE) > 0:
            _, c, _ = self.split(e)
            inverse = self.power(e, -sympy.S.One)
            return self.add(
                self.constant(sure_sign(c[0]) * sympy.pi / 2), self.scaled(self.atan(inverse), exactly(-sympy.S.One))
            )
        low, high = e.terms.get(ONE, exactly(sympy.S.Zero))
        small = Expansion({m: c for m, c in e.terms.items() if m != ONE}, e.error)
        top, size = self.bound(small)  # atan has slope 1 at most
        return self.tidy({ONE: (sympy.atan(low), sympy.atan(high))}, [(top, size)] if size.b > 0 else [])

    def larger(self, a: Expansion, b: Expansion) -> Expansion:
        """max(a, b)."""
        difference = self.add(a, self.scaled(b, exactly(-sympy.S.One)))
        if not difference.terms and not difference.error:
            return a
        _, c, _ = self.split(difference)
        return a if sure_sign(c[0]) > 0 else b

    def size_of(self, e: Expansion) -> Expansion:
        """|e|."""
        try:
            return self.larger(e, self.scaled(e, exactly(-sympy.S.One)))
        except Unknown:
            m, c = self.bound(e)
            return self.between(sympy.S.Zero, upper(c), m)

    def __call__(self, e: sympy.Expr) -> Expansion:
        """The expansion of an expression in n."""
        if e is N:
            return Expansion({level(0): exactly(sympy.S.One)})
        if not e.has(N):
            return self.constant(_value(e))
        if e.is_Add:
            return functools.reduce(self.add, (self(a) for a in e.args))
        if e.is_Mul:
            return functools.reduce(self.mul, (self(a) for a in e.args))
        if isinstance(e, sympy.Min | sympy.Max):
            flip = exactly(sympy.S.One if isinstance(e, sympy.Max) else -sympy.S.One)
            parts = [self.scaled(self(a), flip) for a in e.args]
            return self.scaled(functools.reduce(self.larger, parts), flip)
        if e.is_Pow or isinstance(e, sympy.exp):
            return self._pow(*((sympy.E, e.args[0]) if isinstance(e, sympy.exp) else e.args))
        inner = self(e.args[0])
        if isinstance(e, sympy.log):
            return self.log(inner)
        if isinstance(e, sympy.sin | sympy.cos):
            return self.wave(inner, type(e))
        if isinstance(e, sympy.tanh):
            double = self.exp(self.scaled(inner, exactly(sympy.Integer(2))))
            over = self.power(self.add(double, self.constant(sympy.S.One)), -sympy.S.One)
            return self.add(self.constant(sympy.S.One), self.scaled(over, exactly(-sympy.Integer(2))))
        if isinstance(e, sympy.atan):
            return self.atan(inner)
        if isinstance(e, sympy.Abs):
            return self.size_of(inner)
        raise Unknown(f"{type(e).__name__} is not known here")

    def _pow(self, base: sympy.Expr, power: sympy.Expr) -> Expansion:
        if base is sympy.E:
            return self.exp(self(power))
        if not power.has(N):
            return self.power(self(base), _value(power))
        if not base.has(N) and sure_sign(_value(base)) < 0:
            if not is_whole(power):
                raise Unknown("power of a negative number")
            size = self._pow(-_value(base), power)
            return self.mul(size, self.between(-sympy.S.One, sympy.S.One))
        return self.exp(self.mul(self(power), self.log(self(base))))


def upper(value: Any) -> sympy.Rational:
    """The upper end of an interval, exactly."""
    return sympy.Rational(*mpmath.libmp.to_rational(value._mpi_[1]))


def _grows() -> Any:
    raise Unknown("a small quantity is not small")


def _repeat(m: Monomial, k: int) -> Monomial:
    return times(ONE, m, sympy.Integer(k))


def _value(e: sympy.Expr) -> sympy.Expr:
    """A constant, computed exactly where that is cheap; huge powers are refused rather than written out."""
    if e.is_Atom:
        return e
    size = abs(number(e))
    if not size.b < iv.mpf(10) ** _LARGE:
        raise Unknown("a constant is too large")
    return e.func(*(_value(a) for a in e.args))
