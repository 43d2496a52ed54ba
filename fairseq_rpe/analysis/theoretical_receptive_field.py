"""The theoretical receptive field of a convergent series, from its sum and its tails as intervals."""

import functools
import math
from collections.abc import Callable
from dataclasses import dataclass
from fractions import Fraction
from typing import Any

import mpmath
import sympy

from fairseq_rpe.analysis.certified_sums import Finite, Geometric, Rough, Smooth
from fairseq_rpe.analysis.intervals_mp import ends, intervals, iv, number, sign

Sum = Smooth | Rough | Geometric | Finite
Side = Callable[[Any], int]  # of j or ln j: 1 where it is surely long enough, -1 too short, 0 where that is open
_COARSE = 12  # bits that are looked for where B is known to few digits only
_WHOLE = 100  # bits of j up to which it is looked for as a whole number
_PRINTED = 31  # digits
_SHOWN = 10**9  # brackets of larger numbers are shown in scientific notation
_FARTHEST = iv.mpf(10) ** 40  # ln j beyond which it is not looked for


@dataclass(frozen=True)
class Trf:
    """TRF(ε) = inf{ j : Σ_{t<j} b_t > B(1-ε) }, surely a whole number from ``low`` to ``high``.

    Where it has more than 30 digits these are None, and ``log10`` is an interval of its common logarithm; an open end
    is inf.
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
        if self.low is not None and (self.low == self.high or self.low < _SHOWN):
            shown = (str(j) if j < 10**_PRINTED else power_of_ten(mpmath.log10(j), 5) for j in (self.low, self.high))
            return " to ".join(dict.fromkeys(shown))
        low, high = self.log10 or (mpmath.log10(self.low), mpmath.log10(self.high))
        if not mpmath.isfinite(high):
            return f"> {power_of_ten(low, 3)}"
        for digits in (4, 3, 2, 1):
            if (shown := power_of_ten(low, digits)) == power_of_ten(high, digits):
                return f"≈ {shown}"
        return f"{power_of_ten(low, 2)} to {power_of_ten(high, 2)}"


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


@functools.lru_cache(maxsize=4096)
def trf(total: Sum, epsilon: Fraction) -> Trf:
    """The receptive field at ``epsilon``: the smallest j whose tail from j on is below εB, strictly."""
    if isinstance(total, Finite):
        j = math.floor(total.keys * (1 - epsilon)) + 1
        return Trf(j, j)
    if isinstance(total, Geometric):
        return _geometric(total, epsilon)
    target = total.total * number(sympy.Rational(epsilon))

    def side(tail: Any) -> int:
        return 1 if tail.b < target.a else -1 if tail.a >= target.b else 0

    whole = functools.cache(lambda j: side(total.tail(j)))
    if whole(total.end) > 0:
        return _whole(whole, 0, total.end, total.near(target))
    return _far(whole, lambda t: side(total.far(t)), total.end)


def _geometric(total: Geometric, epsilon: Fraction) -> Trf:
    """Eq. 46: the tail is e^(-kj)·B, so j > ln(1/ε)/k."""
    with total.digits():
        bound = iv.log(1 / number(sympy.Rational(epsilon))) / number(total.k)
    low, high = (mpmath.libmp.to_int(end, "f") + 1 for end in bound._mpi_)
    if low < high:  # ln(1/ε)/k is a whole number, or too close to one for intervals
        above = sign(sympy.log(1 / sympy.Rational(epsilon)) - low * total.k)
        if above is not None:
            low = high = low + (above >= 0)
    return Trf(low, high)


def _whole(at: Side, low: int, high: int, guess: int) -> Trf:
    """Between ``low``, which is too short, and ``high``, which is long enough."""
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


def _far(whole: Side, far: Side, end: int) -> Trf:
    """Beyond the ``end`` of the blocks, in T = ln j."""
    low = high = iv.log(iv.mpf(end)).a
    while (found := far(high)) <= 0:
        low = high if found < 0 else low
        high = 2 * high
        if high > _FARTHEST:
            return Trf(log10=(ends(low / iv.log(10))[0], mpmath.inf))
    if high.a < _WHOLE * math.log(2):
        return _whole(whole, end - 1, mpmath.libmp.to_int(intervals.exp(high)._mpi_[1], "c"), end)
    least, most = _halved(lambda t: far(t) >= 0, low, high)[0], _halved(lambda t: far(t) > 0, low, high)[1]
    return Trf(log10=(ends(least / iv.log(10))[0], ends(most / iv.log(10))[1]))


def _halved(holds: Callable[[Any], bool], low: Any, high: Any) -> tuple[Any, Any]:
    """About the last T that fails and the first that holds."""
    for _ in range(100):
        middle = iv.mpf(((low + high) / 2).mid)
        if not low < middle < high:
            break
        low, high = (low, middle) if holds(middle) else (middle, high)
    return low, high
