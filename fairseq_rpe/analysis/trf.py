"""The theoretical receptive field of a convergent series, from its sum and its tails as intervals."""

import math
from collections.abc import Callable
from dataclasses import dataclass
from fractions import Fraction
from typing import Any

import mpmath
import sympy

from .enclosures import ends, intervals, iv, number, sign
from .sums import Finite, Geometric, Rough, Smooth, rational

Sum = Smooth | Rough | Geometric | Finite
_COARSE = 12  # bits that are looked for where B is known to few digits only
_WHOLE = 100  # bits of j up to which it is looked for as a whole number
_PRINTED = 31  # digits
_SHOWN = 10**9  # brackets of larger numbers are shown in scientific notation
_FARTHEST = iv.mpf(10) ** 40  # ln j beyond which it is not looked for


@dataclass(frozen=True)
class Trf:
    """TRF(ε) = inf{ j : Σ_{t<j} b_t > B(1-ε) }, exact where both ends agree.

    Attributes:
        low, high: whole numbers that it surely lies between, ends included; both None: see ``log10``.
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
        low, high = self.log10 or (math.log10(self.low), math.log10(self.high))
        return float(low), float(high)

    def __str__(self) -> str:
        if self.low is not None:
            if self.low == self.high or self.low < _SHOWN:
                return " to ".join(map(_whole_number, dict.fromkeys((self.low, self.high))))
            low, high = mpmath.log10(self.low), mpmath.log10(self.high)
        else:
            low, high = self.log10
        if not mpmath.isfinite(high):
            return f"> {power_of_ten(low, 3)}"
        for digits in (4, 3, 2, 1):
            if power_of_ten(low, digits) == power_of_ten(high, digits):
                return f"≈ {power_of_ten(low, digits)}"
        return f"{power_of_ten(low, 2)} to {power_of_ten(high, 2)}"


def _whole_number(j: int) -> str:
    return str(j) if j < 10**_PRINTED else power_of_ten(mpmath.log10(j), 5)


def power_of_ten(log10: Any, digits: int) -> str:
    """10^log10 in scientific notation, as a power where even its exponent is large.

    >>> power_of_ten(3010.3, 3), power_of_ten(10**12, 3)
    ('2e3010', '10^(1.0e+12)')
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
    low, high = (mpmath.libmp.to_int(end, "f") + 1 for end in bound._mpi_)
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

    wide = guess + (guess >> _COARSE)
    coarse = low < guess < wide < high and at(guess) == at(wide) == 0
    short, least = _between(lambda j: at(j) >= 0, low, high, guess, coarse)
    if at(least) > 0:
        return Trf(short + 1, least)
    return Trf(short + 1, _between(lambda j: at(j) > 0, least, high, least + 1, coarse)[1])


def _between(holds: Callable[[int], bool], low: int, high: int, guess: int, coarse: bool) -> tuple[int, int]:
    """The last j that fails and the first that holds, of what fails at ``low`` and holds at ``high``.

    In growing steps from ``guess``, then halving; with ``coarse`` only until the two agree to a few digits.
    """
    at, step = min(max(guess, low + 1), high), 1 + (guess >> _COARSE if coarse else 0)
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
    while high - low > 1 + (low >> _COARSE if coarse else 0):
        at = (low + high) // 2
        low, high = (low, at) if holds(at) else (at, high)
    return low, high


def _far(total: Smooth | Rough, side: Callable[[Any], int]) -> Trf:
    """Beyond the end of the blocks, in T = ln j."""
    low = iv.log(iv.mpf(total.end)).a
    high = low
    while side(total.far(high)) <= 0:
        low = high if side(total.far(high)) < 0 else low
        high = 2 * high
        if high > _FARTHEST:
            return Trf(log10=(ends(low / iv.log(10))[0], mpmath.inf))
    if high.a < _WHOLE * math.log(2):
        top = mpmath.libmp.to_int(intervals.exp(high)._mpi_[1], "c")
        return _whole(total.tail, side, total.end - 1, top, total.end)
    least, most = _halved(total.far, side, low, high, -1), _halved(total.far, side, low, high, 1)
    return Trf(log10=(ends(least / iv.log(10))[0], ends(most / iv.log(10))[1]))


def _halved(far: Callable[[Any], Any], side: Callable[[Any], int], low: Any, high: Any, sure: int) -> Any:
    """The last T that is surely too short (``sure`` -1) or the first that is surely long enough (1)."""
    for _ in range(100):
        middle = iv.mpf(((low + high) / 2).mid)
        if not low < middle < high:
            break
        found = side(far(middle))
        if found > 0 or (found == 0 and sure < 0):
            high = middle
        else:
            low = middle
    return low if sure < 0 else high
