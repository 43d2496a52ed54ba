"""Monomials n^a0 · (ln n)^a1 · (ln ln n)^a2 · … with exact exponents, sums of them with an error, and their order."""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any

import sympy

from .enclosures import sign

Monomial = tuple[sympy.Expr, ...]
Coefficient = tuple[sympy.Expr, sympy.Expr]
DEPTH = 5  # n, ln n, ln ln n, ln ln ln n, ln ln ln ln n
ONE: Monomial = (sympy.S.Zero,) * DEPTH


class Unknown(ArithmeticError):
    """The expansion does not exist here, or a sign cannot be told."""


class Later(ArithmeticError):
    """Not from this n on; perhaps from a larger one."""


@dataclass(frozen=True)
class Expansion:
    """Terms by monomial, and the monomial and constant of the error (None: exact)."""

    terms: dict[Monomial, Coefficient]
    error: tuple[Monomial, Any] | None = None

    def ordered(self) -> list[tuple[Monomial, Coefficient]]:
        """The terms, the largest first."""
        return sorted(self.terms.items(), key=functools.cmp_to_key(lambda a, b: -compare(a[0], b[0])))


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


def times(a: Monomial, b: Monomial, power: sympy.Expr = sympy.S.One) -> Monomial:
    """a · b^power."""
    return tuple(p + q * power for p, q in zip(a, b, strict=True))


def least(values: list[sympy.Expr], largest: bool = False) -> sympy.Expr:
    best = values[0]
    for v in values[1:]:
        if v != best and (sure_sign(v - best) > 0) == largest:
            best = v
    return best


def product(a: Coefficient, b: Coefficient) -> Coefficient:
    if a[0] == a[1] and b[0] == b[1]:
        return (a[0] * b[0],) * 2
    # 0 · oo is 0 here: the other factor is finite at every n
    corners = [sympy.S.Zero if p == 0 or q == 0 else p * q for p in a for q in b]
    return least(corners), least(corners, largest=True)


def exactly(c: sympy.Expr) -> Coefficient:
    return c, c
