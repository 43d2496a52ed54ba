"""Proven asymptotic expansions of an expression in n, and the arithmetic that computes them.

An :class:`Expansion` of f states that for every n >= e^T

    f(n) = Σ_i θ_i(n)·m_i(n) + error,   θ_i(n) in [low_i, high_i],   |error| <= C·m(n)

with monomials m = n^a0 · (ln n)^a1 · (ln ln n)^a2 · … with exact exponents, exact coefficients (intervals where f
oscillates) and a number C. :class:`AsymptoticArithmetic` is the calculus of logarithmico-exponential functions
(Hardy, Orders of Infinity) with every o(·) replaced by an inequality. ``sympy.limit`` cannot replace it: of 71 formulas
it decided 63 and raised an error on the 8 that oscillate or contain min or max; nor does it say from which n on its
answer holds.

Signs are decided exactly. A sign that cannot be decided raises :class:`Undecided`; a bound that needs a larger T raises
:class:`NotYetValid`.
"""

import functools
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import mpmath
import sympy

from fairseq_rpe.analysis.formula import N
from fairseq_rpe.analysis.intervals_mp import NumberArithmetic, enclose_constant, intervals, is_whole, iv, sign

Monomial = tuple[sympy.Expr, ...]
Coefficient = tuple[sympy.Expr, sympy.Expr]
Term = tuple[Monomial, Coefficient]
Envelope = list[tuple[Monomial, sympy.Expr]]  # terms with exact coefficients, the largest first
DEPTH = 5  # n, ln n, ln ln n, ln ln ln n, ln ln ln ln n
ONE: Monomial = (sympy.S.Zero,) * DEPTH
LOG_STARTS = (64, 1024, 1 << 20)  # values of T = ln n from which on expansions are tried
ORDERS = (1, 4)  # powers of a small quantity that expansions keep
_MAX_TERMS = 24  # of an expansion; smaller ones go into its error
_FAST_POWER = sympy.Integer(24)  # exp of what falls faster than every multiple of ln n is at most n^-24
_MAX_DIGITS = 10**4  # of constants and exponents that are computed


class Undecided(ArithmeticError):
    """The expansion does not exist, or a sign cannot be decided."""


class NotYetValid(ArithmeticError):
    """An inequality does not hold from this n on, but may hold from a larger one."""


@dataclass(frozen=True)
class Expansion:
    """A sum of monomials with an error bound.

    Attributes:
        terms: coefficient (low, high) of each monomial.
        error: monomial m and number C of the bound C·m on the error; None if the expansion is exact.
    """

    terms: dict[Monomial, Coefficient]
    error: tuple[Monomial, Any] | None = None

    def ordered(self) -> list[Term]:
        """Return the terms, the largest first."""
        return sorted(self.terms.items(), key=_by_size, reverse=True)

    def split_constant(self) -> tuple[Coefficient, "Expansion"]:
        """Return the constant term and the expansion without it."""
        others = Expansion({m: c for m, c in self.terms.items() if m != ONE}, self.error)
        return self.terms.get(ONE, exact(0)), others

    def envelope(self, side: int) -> Envelope:
        """Return a function that bounds this one from above (``side`` 1) or from below (0), the largest term first.

        It takes the end of each coefficient on that side and adds or subtracts the error bound, so all its
        coefficients are exact.
        """
        items = {m: exact(c[side]) for m, c in self.terms.items()}
        if self.error:
            m, largest = self.error[0], upper_bound(self.error[1])
            items[m] = exact(items.get(m, (0, 0))[0] + (largest if side else -largest))
        return [(m, c) for m, (c, _) in Expansion(items).ordered()]


def iterated_log(k: int) -> Monomial:
    """Return the monomial of the k-fold iterated logarithm; k = 0 is n itself."""
    if k >= DEPTH:
        raise Undecided("more than four nested logarithms")
    return tuple(sympy.Integer(i == k) for i in range(DEPTH))


def require_sign(c: sympy.Expr) -> int:
    """Return the sign -1, 0 or 1 of a constant; raise :class:`Undecided` if it cannot be decided."""
    result = sign(c)
    if result is None:
        raise Undecided(f"the sign of {c} cannot be decided")
    return result


def compare(a: Monomial, b: Monomial) -> int:
    """Return -1, 0 or 1: whether a/b tends to 0, is 1 or tends to ∞, by the first exponent that differs."""
    return next((s for p, q in zip(a, b, strict=True) if p != q and (s := require_sign(p - q))), 0)


def _by_size(item: tuple[Monomial, Any]) -> Any:
    return functools.cmp_to_key(compare)(item[0])


def monomial_product(a: Monomial, b: Monomial, power: sympy.Expr = sympy.S.One) -> Monomial:
    """Return the monomial a · b^power."""
    return tuple(p + q * power for p, q in zip(a, b, strict=True))


def hull(values: list[sympy.Expr]) -> Coefficient:
    """Return the smallest and the largest of ``values``."""
    order = functools.cmp_to_key(lambda a, b: 0 if a == b else require_sign(a - b))
    return min(values, key=order), max(values, key=order)


def coefficient_product(a: Coefficient, b: Coefficient) -> Coefficient:
    """Return the interval of all products of a number in ``a`` and a number in ``b``."""
    if a[0] == a[1] and b[0] == b[1]:
        return (a[0] * b[0],) * 2
    # 0 · oo is 0 here: the other factor is finite at every n
    return hull([sympy.S.Zero if p == 0 or q == 0 else p * q for p in a for q in b])


def collect_terms(items: Iterable[Term]) -> dict[Monomial, Coefficient]:
    """Add up the coefficients of equal monomials."""
    terms: dict[Monomial, Coefficient] = {}
    for m, c in items:
        old = terms.get(m, exact(0))
        terms[m] = old[0] + c[0], old[1] + c[1]
        if sympy.nan in terms[m]:
            raise Undecided("∞ - ∞")
    return terms


def exact(c: Any) -> Coefficient:
    """Return the coefficient whose lower and upper end are both ``c``."""
    return (sympy.sympify(c),) * 2


class ExpansionArithmetic:
    """Sums, products and Taylor series of expansions that hold for every n >= e^start.

    Args:
        start: T = ln n from which on every inequality holds.
        order: powers of a small quantity that Taylor series keep.
    """

    def __init__(self, start: int, order: int) -> None:
        self.order = order
        self.logs = [iv.mpf(start)]  # the iterated logarithms of e^start: ln n, ln ln n, …
        while len(self.logs) < DEPTH and self.logs[-1].a > 0:
            self.logs.append(iv.log(self.logs[-1]))

    def size(self, m: Monomial) -> Any:
        """Return the interval of a monomial at n = e^start."""
        total = iv.mpf(0)
        for k, power in enumerate(m):
            if power != 0:
                if k >= len(self.logs):
                    raise NotYetValid
                total += enclose_constant(power) * self.logs[k]
        return intervals.exp(total)

    def slope(self, m: Monomial, k: int) -> Any:
        """Return a bound on |d ln m / d ln L_k - a_k| for n >= e^start, L_k the k-fold logarithm and a_k its exponent.

        d ln L_j / d ln L_k = 1 / (L_{k+1}·…·L_j) falls with n for j > k, so its value at e^start is the largest.
        """
        total, scale = iv.mpf(0), iv.mpf(1)
        for j in range(k + 1, DEPTH):
            if any(m[i] != 0 for i in range(j, DEPTH)):
                if j - 1 >= len(self.logs) or self.logs[j - 1].a <= 0:
                    raise NotYetValid
                scale = scale / self.logs[j - 1]
                total += abs(enclose_constant(m[j])) * scale
        return total.b

    def falls(self, m: Monomial) -> bool:
        """Return True if the monomial decreases for all n >= e^start, False if it increases or is 1.

        d ln m / d ln L_k differs from the first non-zero exponent a_k by at most :meth:`slope`, so it has the sign of
        a_k if |a_k| is at least as large.
        """
        k = next((k for k in range(DEPTH) if m[k] != 0), None)
        if k is None:
            return False
        if abs(enclose_constant(m[k])).a < self.slope(m, k):
            raise NotYetValid
        return require_sign(m[k]) < 0

    def ratio(self, a: Monomial, b: Monomial) -> Any:
        """Return the largest a/b for n >= e^start; raise :class:`Undecided` unless a/b falls or is 1."""
        quotient = monomial_product(a, b, -sympy.S.One)
        if all(p == 0 for p in quotient):
            return iv.mpf(1)
        if not self.falls(quotient):
            raise Undecided("not the smaller one")
        return self.size(quotient)

    def max_coefficient(self, c: Coefficient) -> Any:
        """Return an upper bound on the absolute value of a coefficient."""
        if sympy.oo in c or -sympy.oo in c:
            raise Undecided("no upper bound")
        return iv.mpf(max(abs(enclose_constant(c[0])).b, abs(enclose_constant(c[1])).b))

    def tidy(self, terms: dict[Monomial, Coefficient], errors: list[tuple[Monomial, Any]]) -> Expansion:
        """Return the expansion of ``terms`` and ``errors`` with one error and at most 24 terms.

        Zeros are dropped. Terms that are not larger than the largest error are added to it.
        """
        ordered = Expansion({m: c for m, c in terms.items() if c[0] != c[1] or sign(c[0]) != 0}).ordered()
        errors = [*errors, *((m, self.max_coefficient(c)) for m, c in ordered[_MAX_TERMS:])]
        ordered = ordered[:_MAX_TERMS]
        if not errors:
            return Expansion(dict(ordered))
        top = max(errors, key=_by_size)[0]
        total = sum((c * self.ratio(m, top) for m, c in errors), iv.mpf(0))
        large = {}
        for m, c in ordered:
            if compare(m, top) > 0 or sympy.oo in c or -sympy.oo in c:
                large[m] = c
            else:
                total += self.max_coefficient(c) * self.ratio(m, top)
        return Expansion(large, (top, iv.mpf(total.b)))

    def bound(self, e: Expansion) -> tuple[Monomial, Any]:
        """Return a monomial m and a number C with |e| <= C·m."""
        items = [(m, self.max_coefficient(c)) for m, c in e.terms.items()] + ([e.error] if e.error else [])
        return self.tidy({}, items).error or (ONE, iv.mpf(0))

    def constant(self, c: sympy.Expr) -> Expansion:
        """Return the expansion of a constant."""
        return self.tidy({ONE: exact(c)}, [])

    def add(self, a: Expansion, b: Expansion) -> Expansion:
        """Return the expansion of a + b."""
        return self.tidy(collect_terms([*a.terms.items(), *b.terms.items()]), [e.error for e in (a, b) if e.error])

    def mul(self, a: Expansion, b: Expansion) -> Expansion:
        """Return the expansion of a · b; the error of each factor is multiplied by a bound on the other."""
        terms = collect_terms(
            (monomial_product(m, k), coefficient_product(c, d)) for m, c in a.terms.items() for k, d in b.terms.items()
        )
        errors = []
        for p, q in ((a, b), (b, a)):
            if q.error:
                top, c = self.bound(p)
                errors.append((monomial_product(top, q.error[0]), c * q.error[1]))
        return self.tidy(terms, errors)

    def scale(self, e: Expansion, c: Coefficient, m: Monomial = ONE) -> Expansion:
        """Return the expansion of e · c·m."""
        return self.mul(e, Expansion({m: c}))

    def factor_leading(self, e: Expansion) -> tuple[Monomial, Coefficient, Expansion]:
        """Return (m, c, u) of e = c·m·(1 + u): leading monomial, its coefficient, which has a sign, and |u| <= 1/2."""
        if not e.terms:
            raise Undecided("no term is known to be the leading one")
        (m, c), *others = e.ordered()
        if e.error and compare(e.error[0], m) >= 0:
            raise Undecided("the error is as large as the leading term")
        if require_sign(c[0]) * require_sign(c[1]) <= 0:
            raise Undecided("the leading term changes its sign")
        inverse = tuple(sympy.S.Zero if end.is_infinite else 1 / end for end in (c[1], c[0]))
        u = self.scale(Expansion(dict(others), e.error), inverse, monomial_product(ONE, m, -sympy.S.One))
        self.require_small(u)
        return m, c, u

    def require_small(self, u: Expansion) -> None:
        """Raise :class:`Undecided` or :class:`NotYetValid` unless |u| <= 1/2 is proven for n >= e^start."""
        top, c = self.bound(u)
        if top != ONE and not self.falls(top):
            raise Undecided("a small quantity is not small")
        size = c if top == ONE else c * self.size(top)
        if size.b > 0.5:
            raise Undecided("a small quantity is not small") if top == ONE else NotYetValid

    def taylor(self, u: Expansion, coefficients: list[sympy.Expr], remainder: Any) -> Expansion:
        """Return Σ_k coefficients[k]·u^k with the Lagrange bound |error| <= remainder·|u|^len(coefficients)."""
        total, power = self.constant(coefficients[0]), self.constant(sympy.S.One)
        for c in coefficients[1:]:
            power = self.mul(power, u)
            total = self.add(total, self.scale(power, exact(c)))
        if not u.terms and not u.error:
            return total
        (top, size), k = self.bound(u), len(coefficients)
        return self.add(total, Expansion({}, (monomial_product(ONE, top, sympy.Integer(k)), remainder * size**k)))


_UNIT_WAVE = Expansion({ONE: (-sympy.S.One, sympy.S.One)})  # any oscillation between -1 and 1


class AsymptoticArithmetic(ExpansionArithmetic, NumberArithmetic):
    """The functions of a formula applied to expansions that hold for n >= e^start.

    Calling an instance with an expression in n returns its :class:`Expansion`.
    """

    def log(self, e: Expansion) -> Expansion:
        """Return ln e = ln c + ln m + ln(1 + u), the last by its Taylor series."""
        m, c, u = self.factor_leading(e)
        if require_sign(c[0]) < 0:
            raise Undecided("logarithm of a negative number")
        if c[1] == sympy.oo:
            raise Undecided("no upper bound")
        terms = {iterated_log(k + 1): exact(p) for k, p in enumerate(m) if p != 0}
        terms[ONE] = (sympy.log(c[0]), sympy.log(c[1]))
        series = [sympy.S.Zero, *(sympy.Rational((-1) ** (k + 1), k) for k in range(1, self.order + 1))]
        # the omitted terms Σ_{j>k} |u|^j / j are below a geometric series: 2·|u|^(k+1) / (k+1) for |u| <= 1/2
        return self.add(self.tidy(terms, []), self.taylor(u, series, iv.mpf(2) / (self.order + 1)))

    def power(self, e: Expansion, p: sympy.Expr) -> Expansion:
        """Return e to the constant power p: c^p·m^p·(1 + u)^p, the last by the binomial series."""
        if p.is_Integer and 0 <= p <= 8:
            if len(e.terms) != 1 or e.error:
                return functools.reduce(self.mul, [e] * int(p), self.constant(1))
            ((m, c),) = e.terms.items()
            # an even power of an interval that contains 0 has its minimum there, not at an end
            zero = [sympy.S.Zero] if p % 2 == 0 and require_sign(c[0]) * require_sign(c[1]) <= 0 else []
            return Expansion({monomial_product(ONE, m, p): hull([c[0] ** p, c[1] ** p, *zero])})
        m, c, u = self.factor_leading(e)
        flip = sympy.S.One
        if require_sign(c[0]) < 0:
            if not p.is_Integer:
                raise Undecided("power of a negative number")
            c, flip = (-c[1], -c[0]), (-sympy.S.One) ** (p % 2)
        if abs(enclose_constant(p)).b > _MAX_DIGITS:
            raise Undecided("an exponent is too large")
        # sympy leaves oo**p unevaluated for some p
        bounds = [flip * (end if end.is_finite is False and require_sign(p) > 0 else end**p) for end in c]
        # Lagrange remainder: binomial(p, k+1)·(1 + ξ)^(p-k-1), where 1/2 <= 1 + ξ <= 3/2 < 2
        *series, last = (sympy.ff(p, k) / sympy.factorial(k) for k in range(self.order + 2))
        remainder = abs(enclose_constant(last)) * iv.mpf(2) ** abs(enclose_constant(p - self.order - 1))
        return self.scale(self.taylor(u, series, remainder), hull(bounds), monomial_product(ONE, m, p))

    def exp(self, e: Expansion) -> Expansion:
        """Return exp e: terms that are multiples of iterated logarithms become powers, small ones a Taylor series."""
        growing = [(m, c) for m, c in e.ordered() if compare(m, ONE) > 0]
        small = Expansion({m: c for m, c in e.terms.items() if compare(m, ONE) < 0}, e.error)
        if growing and (fast := self._fast_exp(growing, e)):
            return fast
        if e.error and compare(e.error[0], ONE) > 0:
            raise Undecided("exp of an error that grows")
        shift = ONE
        for m, c in growing:
            k = next((k for k in range(1, DEPTH) if m == iterated_log(k)), None)
            if k is None or c[0] != c[1]:
                raise Undecided("exp of a slow growth that is not a logarithm")
            shift = monomial_product(shift, iterated_log(k - 1), c[0])
        low, high = e.terms.get(ONE, exact(0))
        if e.error and compare(e.error[0], ONE) == 0:
            # a bounded error swallows the constant term, so exp e is the shift times an interval
            largest = upper_bound(e.error[1])
            return Expansion({shift: (sympy.exp(-largest), sympy.exp(largest))})
        self.require_small(small)
        series = [1 / sympy.factorial(k) for k in range(self.order + 1)]
        # Lagrange remainder of exp: e^(1/2) / (k+1)! < 2
        return self.scale(self.taylor(small, series, iv.mpf(2)), (sympy.exp(low), sympy.exp(high)), shift)

    def _fast_exp(self, growing: list[Term], e: Expansion) -> Expansion | None:
        """Return exp e as below n^-24 or above n^24 if |e| outgrows ln n (or ln ln n, …), otherwise None."""
        m, c = growing[0]
        k = next((k for k in range(1, 4) if compare(m, iterated_log(k)) > 0), None)
        if k is None or any(compare(m, iterated_log(j)) == 0 for j in range(1, k)):
            return None
        if require_sign(c[0]) * require_sign(c[1]) <= 0 or (e.error and compare(e.error[0], m) >= 0):
            raise Undecided("exp of something whose sign changes")
        others = Expansion({p: d for p, d in e.terms.items() if p != m}, e.error)
        smaller = self.add(others, Expansion({iterated_log(k): (-_FAST_POWER, _FAST_POWER)}))
        top, size = self.bound(smaller)
        # |e| >= 24·ln n as soon as the leading term exceeds 24·ln n plus all other terms
        if (size * self.ratio(top, m)).b > min(abs(enclose_constant(end)).a for end in c if end.is_finite):
            raise NotYetValid
        if require_sign(c[0]) > 0:
            return Expansion({monomial_product(ONE, iterated_log(k - 1), _FAST_POWER): (sympy.S.One, sympy.oo)})
        return self.tidy({}, [(monomial_product(ONE, iterated_log(k - 1), -_FAST_POWER), iv.mpf(1))])

    def wave(self, e: Expansion, kind: type) -> Expansion:
        """Return sin e or cos e: its Taylor series around a constant limit of e, or else the interval [-1, 1]."""
        (low, high), small = e.split_constant()
        grows = any(compare(m, ONE) > 0 for m in small.terms) or (e.error and compare(e.error[0], ONE) >= 0)
        if grows or low != high:
            return _UNIT_WAVE
        cycle = [kind(low + k * sympy.pi / 2) for k in range(4)]
        series = [cycle[k % 4] / sympy.factorial(k) for k in range(self.order + 1)]
        return self.taylor(small, series, 1 / iv.mpf(int(sympy.factorial(self.order + 1))))

    def atan(self, e: Expansion) -> Expansion:
        """Return the expansion of the arc tangent; that of a growing e is ±π/2 minus that of 1/e."""
        if compare(self.bound(e)[0], ONE) > 0:
            side = require_sign(self.factor_leading(e)[1][0])
            inverse = self.atan(self.power(e, -sympy.S.One))
            return self.add(self.constant(side * sympy.pi / 2), self.scale(inverse, exact(-1)))
        (low, high), small = e.split_constant()
        top, size = self.bound(small)  # mean value theorem: |atan'| <= 1
        return self.tidy({ONE: (sympy.atan(low), sympy.atan(high))}, [(top, size)] if size.b > 0 else [])

    def sin(self, e: Expansion) -> Expansion:
        """Return the expansion of sin e."""
        return self.wave(e, sympy.sin)

    def cos(self, e: Expansion) -> Expansion:
        """Return the expansion of cos e."""
        return self.wave(e, sympy.cos)

    def max(self, a: Expansion, b: Expansion) -> Expansion:
        """Return the expansion of the larger one, by the sign of the leading term of a - b."""
        difference = self.add(a, self.scale(b, exact(-1)))
        if not difference.terms and not difference.error:
            return a
        return a if require_sign(self.factor_leading(difference)[1][0]) > 0 else b

    def min(self, a: Expansion, b: Expansion) -> Expansion:
        """Return the expansion of the smaller one."""
        return self.scale(self.max(*(self.scale(e, exact(-1)) for e in (a, b))), exact(-1))

    def abs(self, e: Expansion) -> Expansion:
        """Return the expansion of |e|; an interval from 0 where the sign of e changes."""
        try:
            return self.max(e, self.scale(e, exact(-1)))
        except Undecided:
            m, c = self.bound(e)
            return Expansion({m: (sympy.S.Zero, upper_bound(c))})

    def __call__(self, e: sympy.Expr) -> Expansion:
        """Return the expansion of an expression in n."""
        return self.walk(e, Expansion({iterated_log(0): exact(1)}))

    def walk(self, e: sympy.Expr, x: Expansion) -> Expansion:
        """Return the expansion of ``e`` with the expansion ``x`` in place of n."""
        if not e.has(N):
            return self.constant(_value(e))
        if isinstance(e, sympy.tanh):
            return self.walk(1 - 2 / (1 + sympy.exp(2 * e.args[0])), x)
        return super().walk(e, x)

    def pow(self, base: sympy.Expr, power: sympy.Expr, x: Expansion) -> Expansion:
        """Return base ** power: exp(power · ln base), or (-b) ** whole, which oscillates between ± b ** whole."""
        if not power.has(N):
            return self.power(self.walk(base, x), _value(power))
        if not base.has(N) and require_sign(_value(base)) < 0:
            if not is_whole(power):
                raise Undecided("power of a negative number")
            return self.mul(self.pow(-_value(base), power, x), _UNIT_WAVE)
        return self.exp(self.mul(self.walk(power, x), self.log(self.walk(base, x))))


def upper_bound(value: Any) -> sympy.Rational:
    """Return the upper end of an interval as an exact rational."""
    return sympy.Rational(*mpmath.libmp.to_rational(value._mpi_[1]))


def _value(e: sympy.Expr) -> sympy.Expr:
    """Return a constant evaluated exactly; raise :class:`Undecided` for powers with more than 10^4 digits."""
    if e.is_Atom:
        return e
    size = abs(enclose_constant(e))
    if not size.b < iv.mpf(10) ** _MAX_DIGITS:
        raise Undecided("a constant is too large")
    return e.func(*(_value(a) for a in e.args))
