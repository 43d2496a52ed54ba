"""Interval arithmetic: what is computed for a range of n holds the value at every n of it; bounds of remainders."""

from __future__ import annotations

import contextlib
import math

import mpmath
import numpy as np
import pytest
import scipy.integrate
import sympy
from flint import acb
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from fairseq_rpe.analysis.certified_sums import _integral
from fairseq_rpe.analysis.formula import N, parse
from fairseq_rpe.analysis.intervals_complex import ComplexArithmetic, ball, interval, with_flint_precision
from fairseq_rpe.analysis.intervals_float import float_ranges
from fairseq_rpe.analysis.intervals_mp import (
    Undefined,
    bounds,
    enclose,
    enclose_constant,
    is_whole,
    iv,
    precision,
    sign,
)

LEAVES = st.sampled_from(["n", "1", "2", "0.3", "7", "pi", "e", "n"])
ONE = ("-({})", "exp({})", "log({})", "sin({})", "cos({})", "tanh({})", "atan({})", "abs({})", "sqrt({})")
POWERS = ("({})**2", "({})**3", "({})**(-1)", "({})**(-2)", "({})**0.7", "2**({})", "(-1)**(2*n+1)*({})", "({})**66")
TWO = ("({}) + ({})", "({}) - ({})", "({}) * ({})", "({}) / ({})", "min({}, {})", "max({}, {})")


def _larger(parts: st.SearchStrategy[str]) -> st.SearchStrategy[str]:
    one = st.builds(lambda form, a: form.format(a), st.sampled_from(ONE + POWERS), parts)
    return one | st.builds(lambda form, a, b: form.format(a, b), st.sampled_from(TWO), parts, parts)


FORMULAS = st.recursive(LEAVES, _larger, max_leaves=5)
PLACES = st.lists(st.integers(0, 40), min_size=2, max_size=4).map(sorted)
MEANINGS = {"Add": sum, "Mul": math.prod, "Min": min, "Max": max}


def exact(e: sympy.Expr, n: int) -> mpmath.mpf:
    """The value of an expression, part by part in mpmath."""
    if not e.args:
        return mpmath.mpf(n) if e is N else mpmath.mpmathify(e)
    name, values = e.func.__name__, [exact(part, n) for part in e.args]
    if name in MEANINGS:
        return MEANINGS[name](values)
    return getattr(mpmath, {"Pow": "power", "Abs": "fabs"}.get(name, name))(*values)


def value(e: sympy.Expr, n: int) -> mpmath.mpf | None:
    """Its real value with many digits, where it has one of a size that floats hold."""
    with mpmath.workdps(60):
        try:
            found = exact(e, n)
        except (ZeroDivisionError, ValueError, OverflowError, TypeError):
            return None
        real = isinstance(found, mpmath.mpf) and mpmath.isfinite(found)
        return found if real and (not found or 1e-250 < abs(found) < 1e250) else None


@settings(max_examples=150, deadline=None, derandomize=True)
@given(FORMULAS, PLACES)
def test_every_enclosure_holds_the_values(formula, places):
    try:
        e = parse(formula)
    except ValueError:  # one that no model may have, or that is too large
        assume(False)
    values = {n: found for n in places if (found := value(e, n)) is not None}
    assume(values)
    low, high = (np.array([float(n) for n in of]) for of in (places[:1] + places, places[-1:] + places))
    bottom, top = float_ranges(e, low, high)
    for k, n in enumerate(places, start=1):
        if n in values:
            check_holds(values[n], (bottom[0], top[0]), (e, places))
            check_holds(values[n], (bottom[k], top[k]), (e, n))
            for x in (n, [places[0], places[-1]]):
                with contextlib.suppress(Undefined):
                    check_holds(values[n], bounds(enclose(e, x)), (e, x))
            with contextlib.suppress(Undefined):
                check_holds(values[n], box(e, n), (e, n))


def check_holds(expected: mpmath.mpf, found: tuple, what: object) -> None:
    with mpmath.workdps(60):
        low, high = map(mpmath.mpf, found)
        slack = mpmath.mpf(10) ** -50 * abs(expected)  # of the value that is compared with
        assert mpmath.isnan(low) or low - slack <= expected <= high + slack, what


@with_flint_precision
def box(e: sympy.Expr, n: int) -> tuple:
    return bounds(interval(ComplexArithmetic().walk(e, acb(n)).real))


def test_single_numbers_have_narrow_enclosures():
    for formula in ("exp(-n) + pi", "log(n)**3", "tanh(n/9)", "atan(-n)", "sin(n)*cos(n)", "n**0.3", "abs(2-n)", "e*n"):
        e = parse(formula)
        low, high = bounds(enclose(e, 5))
        assert high - low < 1e-30 * abs(high), formula
        a, b = float_ranges(e, np.array([5.0]), np.array([5.0]))
        assert b - a < 1e-12 * abs(b), formula
        assert with_flint_precision(lambda e=e: ComplexArithmetic().walk(e, acb(5)).real.rad())() < 1e-30, formula


def test_a_ball_holds_its_interval_and_an_interval_its_ball():
    for low, high in (("0.1", "0.2"), ("-3", "1e30"), ("2", "2")):
        x = iv.mpf([low, high])
        (a, b), (c, d) = bounds(x), bounds(interval(ball(x)))
        assert c <= a and b <= d and d - c <= (b - a) * (1 + mpmath.mpf(2) ** -25)


@pytest.mark.parametrize(
    ("formula", "expected"),
    [("2 - 2", 0), ("pi - 3", 1), ("3 - pi", -1), ("sqrt(2)*sqrt(8) - 4", 0), ("exp(pi) - pi - 20", -1)],
)
def test_signs_are_exact(formula, expected):
    assert sign(parse(formula)) == expected


@pytest.mark.parametrize("formula", ["log(n - 5)", "1/(n - 5)", "(n - 5)**0.5", "(n - 5)**(-3)"])
def test_what_may_be_undefined_is_flagged(formula):
    low, high = float_ranges(parse(formula), np.array([4.0, 6.0]), np.array([6.0, 7.0]))
    assert np.isnan([low[0], high[0]]).all() and np.isfinite([low[1], high[1]]).all()
    with pytest.raises(Undefined):
        enclose(parse(formula), [4, 6])
    with pytest.raises(Undefined):
        enclose(parse("n - n"), [0, iv.inf])


def test_precision_and_whole_numbers():
    with precision(500):
        low, high = bounds(enclose_constant(sympy.pi))
        assert high - low < mpmath.mpf(2) ** -490
    assert is_whole(2 * N**2 - 3) and not is_whole(N / 2) and not is_whole(sympy.pi * N)


@pytest.mark.parametrize(
    ("rates", "kind"),
    [
        ((0, 1, 1, 1, 2.5), "twice harmonic"),
        ((0, 1, 1, 3, 0), "harmonic"),
        ((0, 1, 2.5, 0, 0), ""),
        ((0, 1, 2, 1.5, 0), ""),
        ((0, 1, 3, -2, 0), ""),
        ((0.25, 0.5, 0, 0, 0), ""),
        ((0.5, 1, -2, 0, 0), ""),
    ],
)
def test_the_integral_of_each_kind_of_remainder(rates, kind):
    """Of exp(-a·x^s)·x^-p·(ln x)^-q·(ln ln x)^-r; over u = ln x, or w = ln ln x where the rest is constant in it."""
    a, s, p, q, r = rates
    over, begin, end = {
        "twice harmonic": (lambda w: w**-r, math.log(1.5), math.inf),
        "harmonic": (lambda u: u**-q, 1.5, math.inf),
        # the last factor is dx / du; beyond u = 30 nothing is left
        "": (lambda u: math.exp(-a * math.exp(s * u)) * math.exp(-p * u) * u**-q * math.exp(u), 1.5, 30),
    }[kind]
    expected = scipy.integrate.quad(over, begin, end)[0]
    found = _integral([iv.mpf(value) for value in rates], iv.mpf(1.5), "harmonic" in kind, "twice" in kind)
    assert [float(found.a.a), float(found.b.b)] == pytest.approx([expected] * 2, rel=1e-6)
