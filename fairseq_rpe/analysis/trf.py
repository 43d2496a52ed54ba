"""The theoretical receptive field of a convergent series, from its sum and its tails as intervals."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import Any

import mpmath
import sympy

from .enclosures import Balls, iv, number, sign
from .sums import Finite, Geometric, Rough, Smooth, rational

Sum = Smooth | Rough | Geometric | Finite
_WHOLE = 100  # bits of j up to which it is looked for as a whole number
_FARTHEST = iv.mpf(10) ** 40  # ln j beyond which it is not looked for


@dataclass(frozen=True)
class Trf:
    """TRF(ε) = inf{ j : Σ_{t<j} b_t > B(1-ε) }, exact where both ends agree.

    Attributes:
        low, high: whole numbers that it surely lies between, ends included; None: see ``log10``.
        log10: where it has more than 30 digits, an interval of its common logarithm; an open end is inf.
    """

    low: int | None = None
    high: int | None = None
    log10: tuple[Any, Any] | None = None

    @property
    def exact(self) -> int | None:
        return self.low if self.low == self.high else None

    @property
    def logarithms(self) -> tuple[float, float]:
        """Common logarithms of both ends, for a plot."""
        ends = self.log10 or (math.log10(self.low), math.log10(self.high) if self.high is not None else math.inf)
        return float(ends[0]), float(ends[1])

    def __str__(self) -> str:
        if self.low is not None:
            if self.high is None:
                return f">= {self.low}"
            return str(self.low) if self.low == self.high else f"{self.low} to {self.high}"
        low, high = self.log10
        if not mpmath.isfinite(high):
            return f"> {power_of_ten(low, 3)}"
        for digits in (4, 3, 2, 1):
            if power_of_ten(low, digits) == power_of_ten(high, digits):
                return f"≈ {power_of_ten(low, digits)}"
        return f"{power_of_ten(low, 2)} to {power_of_ten(high, 2)}"


def power_of_ten(log10: Any, digits: int) -> str:
    """10^log10 in scientific notation, as a power where even its exponent is large.

    >>> power_of_ten(3010.3, 3), power_of_ten(10**12, 3)
    ('2e3010', '10^(1e+12)')
    """
    log10 = mpmath.mpf(log10)
    if log10 > 10**6:
        return f"10^({mpmath.nstr(log10, digits)})"
    exponent = int(mpmath.floor(log10))
    mantissa = mpmath.nstr(mpmath.mpf(10) ** (log10 - exponent), digits).removesuffix(".0")
    return f"{mantissa}e{exponent}"


def trf(total: Sum, epsilon: Fraction) -> Trf:
    """The receptive field at ``epsilon``: the smallest j whose tail from j on is below εB, strictly."""
    if isinstance(total, Finite):
        j = math.floor(total.keys * (1 - epsilon)) + 1
        return Trf(j, j)
    if isinstance(total, Geometric):
        return _geometric(total, epsilon)
    target = total.total * rational(epsilon)

    def side(value: Any) -> int:
        """1 where a tail is surely below εB, -1 where it is not, 0 where that cannot be told."""
        return 1 if value.b < target.a else -1 if value.a >= target.b else 0

    if side(total.tail(total.end)) > 0:
        return _whole(total.tail, side, 0, total.end, total.near(target))
    return _far(total, side)


def _geometric(total: Geometric, epsilon: Fraction) -> Trf:
    """Eq. 46: the tail is e^(-kj)·B, so j > ln(1/ε)/k."""
    with total.digits():
        bound = iv.log(1 / rational(epsilon)) / number(total.k)
    low, high = (int(mpmath.floor(mpmath.mpf(end))) + 1 for end in (bound.a, bound.b))
    if low < high:  # ln(1/ε)/k is a whole number, or too close to one for intervals
        above = sign(sympy.log(1 / sympy.Rational(epsilon.numerator, epsilon.denominator)) - low * total.k)
        if above is not None:
            low = high = low + (above >= 0)
    return Trf(low, high)


def _whole(tail: Callable[[int], Any], side: Callable[[Any], int], low: int, high: int, guess: int) -> Trf:
    """Between ``low``, which is too short, and ``high``, which is long enough."""
    seen: dict[int, int] = {}

    def at(j: int) -> int:
        if j not in seen:
            seen[j] = side(tail(j))
        return seen[j]

    least = _first(lambda j: at(j) >= 0, low, high, guess)
    return Trf(least, least if at(least) > 0 else _first(lambda j: at(j) > 0, least, high, least + 1))


def _first(holds: Callable[[int], bool], low: int, high: int, guess: int) -> int:
    """The first j at which what fails at ``low`` and holds at ``high`` does: in growing steps from ``guess``, then halving."""
    at, step = min(max(guess, low + 1), high), 1
    up = at < high and not holds(at)
    low, high = (at, high) if up else (low, at)
    while high - low > 1:
        at = low + step if up else high - step
        if not low < at < high:
            break
        found = holds(at)
        low, high = (low, at) if found else (at, high)
        if found == up:
            break
        step *= 8
    while high - low > 1:
        at = (low + high) // 2
        low, high = (low, at) if holds(at) else (at, high)
    return high


def _far(total: Smooth | Rough, side: Callable[[Any], int]) -> Trf:
    """Beyond the end of the blocks, in T = ln j."""
    low = iv.log(iv.mpf(total.end)).a
    high = low
    while side(total.far(high)) <= 0:
        low = high if side(total.far(high)) < 0 else low
        high = 2 * high
        if high > _FARTHEST:
            return Trf(log10=(mpmath.mpf((low / iv.log(10)).a), mpmath.inf))
    if high.a < _WHOLE * math.log(2):
        top = int(mpmath.ceil(mpmath.mpf(Balls.exp(high).b)))
        return _whole(total.tail, side, total.end - 1, top, total.end)
    least, most = _halved(total.far, side, low, high, -1), _halved(total.far, side, low, high, 1)
    return Trf(log10=(mpmath.mpf((least / iv.log(10)).a), mpmath.mpf((most / iv.log(10)).b)))


def _halved(far: Callable[[Any], Any], side: Callable[[Any], int], low: Any, high: Any, sure: int) -> Any:
    """The last T that is surely too short (``sure`` -1) or the first that is surely long enough (1)."""
    for _ in range(160):
        middle = iv.mpf(((low + high) / 2).mid)
        if not low < middle < high:
            break
        found = side(far(middle))
        if found > 0 or (found == 0 and sure < 0):
            high = middle
        else:
            low = middle
    return low if sure < 0 else high


def quantised(weights: Sequence[float], points: int = 50) -> list[tuple[float, float]]:
    """The appendix's curve of arXiv 2307.10156: (ε, TRF / m) for ``points`` values of ε from 1 down to 0.

    Its sum runs over the m given weights instead of all distances, and compares with >= where Eq. 22 has >: an index is
    the first j whose partial sum of j terms is at least total·(1-ε). One index is recorded per j; what is left is m.
    """
    m, total = len(weights), math.fsum(weights)
    levels = [1 - i / (points - 1) for i in range(points)]
    found, sofar = [], 0.0
    for j, weight in enumerate(weights):
        while len(found) < points - 1 and sofar >= total * (1 - levels[len(found)]):
            found.append(j)
        sofar += weight
    found += [m] * (points - len(found))
    return [(level, j / m) for level, j in zip(levels, found, strict=True)]
