"""Monomials n^a0 · (ln n)^a1 · (ln ln n)^a2 · … with exact exponents, sums of them with an error, and their arithmetic.

An :class:`Expansion` of f says: for every n >= e^T,

    f(n) = Σ_i θ_i(n)·m_i(n) + error,   θ_i(n) in [low_i, high_i],   |error| <= C·m(n)

with exact coefficients (intervals where something oscillates) and a number C. Signs are decided exactly; what cannot be
decided raises :class:`Unknown`, what needs a larger T raises :class:`Later`.
"""

import functools
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import sympy

from fairseq_rpe.analysis.intervals_mp import intervals, iv, number, sign

Monomial = tuple[sympy.Expr, ...]
Coefficient = tuple[sympy.Expr, sympy.Expr]
Term = tuple[Monomial, Coefficient]
DEPTH = 5  # n, ln n, ln ln n, ln ln ln n, ln ln ln ln n
ONE: Monomial = (sympy.S.Zero,) * DEPTH
_MOST = 24  # terms


class Unknown(ArithmeticError):
    """The expansion does not exist here, or a sign cannot be told."""


class Later(ArithmeticError):
    """Not from this n on; perhaps from a larger one."""


@dataclass(frozen=True)
class Expansion:
    """Terms by monomial, and the monomial and constant of the error (None: exact)."""

    terms: dict[Monomial, Coefficient]
    error: tuple[Monomial, Any] | None = None

    def ordered(self) -> list[Term]:
        """The largest term first."""
        return sorted(self.terms.items(), key=_by_size, reverse=True)

    def apart(self) -> tuple[Coefficient, "Expansion"]:
        """The constant and what is left."""
        rest = Expansion({m: c for m, c in self.terms.items() if m != ONE}, self.error)
        return self.terms.get(ONE, exactly(0)), rest


def level(k: int) -> Monomial:
    """The monomial of the k-fold logarithm: 0 is n itself."""
    if k >= DEPTH:
        raise Unknown("more than four nested logarithms")
    return tuple(sympy.Integer(i == k) for i in range(DEPTH))


def sure_sign(c: sympy.Expr) -> int:
    found = sign(c)
    if found is None:
        raise Unknown(f"the sign of {c} cannot be told")
    return found


def compare(a: Monomial, b: Monomial) -> int:
    """-1, 0, 1: which of two monomials is the larger one in the end."""
    return next((s for p, q in zip(a, b, strict=True) if p != q and (s := sure_sign(p - q))), 0)


def _by_size(item: tuple[Monomial, Any]) -> Any:
    return functools.cmp_to_key(compare)(item[0])


def times(a: Monomial, b: Monomial, power: sympy.Expr = sympy.S.One) -> Monomial:
    """a · b^power."""
    return tuple(p + q * power for p, q in zip(a, b, strict=True))


def hull(values: list[sympy.Expr]) -> Coefficient:
    """The least and the largest."""
    order = functools.cmp_to_key(lambda a, b: 0 if a == b else sure_sign(a - b))
    return min(values, key=order), max(values, key=order)


def product(a: Coefficient, b: Coefficient) -> Coefficient:
    if a[0] == a[1] and b[0] == b[1]:
        return (a[0] * b[0],) * 2
    # 0 · oo is 0 here: the other factor is finite at every n
    return hull([sympy.S.Zero if p == 0 or q == 0 else p * q for p in a for q in b])


def summed(items: Iterable[Term]) -> dict[Monomial, Coefficient]:
    """Coefficients of the same monomial added up."""
    terms: dict[Monomial, Coefficient] = {}
    for m, c in items:
        old = terms.get(m, exactly(0))
        terms[m] = old[0] + c[0], old[1] + c[1]
        if sympy.nan in terms[m]:
            raise Unknown("∞ - ∞")
    return terms


def exactly(c: Any) -> Coefficient:
    return (sympy.sympify(c),) * 2


class Arithmetic:
    """Sums and products of expansions for n >= e^start; ``order``: powers of a small quantity that are kept."""

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
                if k >= len(self.logs):
                    raise Later
                total += number(power) * self.logs[k]
        return intervals.exp(total)

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
        kept = Expansion({m: c for m, c in terms.items() if c[0] != c[1] or sign(c[0]) != 0}).ordered()
        errors = [*errors, *((m, self.weight(c)) for m, c in kept[_MOST:])]
        kept = kept[:_MOST]
        if not errors:
            return Expansion(dict(kept))
        top = max(errors, key=_by_size)[0]
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
        return self.tidy({}, items).error or (ONE, iv.mpf(0))

    def constant(self, c: sympy.Expr) -> Expansion:
        return self.tidy({ONE: exactly(c)}, [])

    def add(self, a: Expansion, b: Expansion) -> Expansion:
        return self.tidy(summed([*a.terms.items(), *b.terms.items()]), [e.error for e in (a, b) if e.error])

    def mul(self, a: Expansion, b: Expansion) -> Expansion:
        terms = summed((times(m, k), product(c, d)) for m, c in a.terms.items() for k, d in b.terms.items())
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
        inverse = tuple(sympy.S.Zero if end.is_infinite else 1 / end for end in (c[1], c[0]))
        u = self.scaled(Expansion(dict(rest), e.error), inverse, times(ONE, m, -sympy.S.One))
        self.small(u)
        return m, c, u

    def small(self, u: Expansion) -> None:
        """Refuse what is not surely |u| <= 1/2 from here on."""
        top, c = self.bound(u)
        if top != ONE and not self.falls(top):
            raise Unknown("a small quantity is not small")
        size = c if top == ONE else c * self.size(top)
        if size.b > 0.5:
            raise Unknown("a small quantity is not small") if top == ONE else Later

    def taylor(self, u: Expansion, coefficients: list[sympy.Expr], rest: Any) -> Expansion:
        """Σ_k coefficients[k]·u^k with |error| <= rest·|u|^len(coefficients)."""
        total, power = self.constant(coefficients[0]), self.constant(sympy.S.One)
        for c in coefficients[1:]:
            power = self.mul(power, u)
            total = self.add(total, self.scaled(power, exactly(c)))
        if not u.terms and not u.error:
            return total
        (top, size), k = self.bound(u), len(coefficients)
        return self.add(total, Expansion({}, (times(ONE, top, sympy.Integer(k)), rest * size**k)))
