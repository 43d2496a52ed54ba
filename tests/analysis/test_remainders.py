"""The closed forms of integrals that bound what is left of a sum, against numerical integration."""

from __future__ import annotations

import math

import pytest
import scipy.integrate

from fairseq_rpe.analysis.enclosures import iv
from fairseq_rpe.analysis.remainders import _integral


@pytest.mark.parametrize(
    ("rates", "harmonic", "twice"),
    [
        ((0, 1, 1, 1, 2.5), True, True),
        ((0, 1, 1, 3, 0), True, False),
        ((0, 1, 2.5, 0, 0), False, False),
        ((0, 1, 2, 1.5, 0), False, False),
        ((0, 1, 3, -2, 0), False, False),
        ((0.25, 0.5, 0, 0, 0), False, False),
        ((0.5, 1, -2, 0, 0), False, False),
    ],
)
def test_the_integral_of_each_kind(rates, harmonic, twice):
    """Of exp(-a·x^s)·x^-p·(ln x)^-q·(ln ln x)^-r; over u = ln x, or w = ln ln x where the rest is constant in it."""
    a, s, p, q, r = rates
    begin = 1.5
    if twice:
        expected = scipy.integrate.quad(lambda w: w**-r, math.log(begin), math.inf)[0]
    elif harmonic:
        expected = scipy.integrate.quad(lambda u: u**-q, begin, math.inf)[0]
    else:  # the last factor is dx / du; beyond u = 30 nothing is left
        expected = scipy.integrate.quad(
            lambda u: math.exp(-a * math.exp(s * u)) * math.exp(-p * u) * u**-q * math.exp(u), begin, 30
        )[0]
    found = _integral([iv.mpf(value) for value in rates], iv.mpf(begin), harmonic, twice)
    assert float(found.a.a) == pytest.approx(expected, rel=1e-6)
    assert float(found.b.b) == pytest.approx(expected, rel=1e-6)
