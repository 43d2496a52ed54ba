"""Theoretical receptive field of a convergent series (arXiv 2307.10156, Eq. 22), proven with intervals of its tails."""

import functools
import math
from collections.abc import Callable
from dataclasses import dataclass
from fractions import Fraction
from typing import Any

import mpmath
import sympy

from fairseq_rpe.analysis.certified_sums import DirectSum, EulerMaclaurinSum, FiniteSum, GeometricSum, WindowSum
from fairseq_rpe.analysis.intervals_mp import bounds, enclose_constant, intervals, iv, sign

Sum = EulerMaclaurinSum | DirectSum | GeometricSum | FiniteSum | WindowSum
Side = Callable[[Any], int]  # j or ln j -> 1 if that window is proven long enough, -1 if proven too short, else 0
_COARSE_BITS = 12  # searched bits where B is known to a few digits only
_MAX_INTEGER_BITS = 100  # of j up to which a whole number is searched
_MAX_PRINTED_DIGITS = 31
_MAX_PLAIN = 10**9  # brackets of larger numbers are printed in scientific notation
_MAX_LOG = iv.mpf(10) ** 40  # ln j at which the search ends


@dataclass(frozen=True)
class ReceptiveField:
    """TRF(ε) = inf{ j : Σ_{t<j} b_t > B(1-ε) }, in keys (Eq. 22).

    Attributes:
        low: proven lower bound, a whole number; None if the field has more than 30 digits.
        high: proven upper bound, likewise.
        log10: where these are None, an interval of the common logarithm; an unknown upper end is inf.
    """

    low: int | None = None
    high: int | None = None
    log10: tuple[Any, Any] | None = None

    @property
    def exact(self) -> int | None:
        """The field itself, or None if its bounds differ."""
        return self.low if self.low == self.high else None

    @property
    def logarithms(self) -> tuple[float, float]:
        """Common logarithms of both bounds, for a plot."""
        low, high = self.log10 or (math.log10(self.low), math.log10(self.high))
        return float(low), float(high)

    def __str__(self) -> str:
        if self.low is not None and (self.low == self.high or self.low < _MAX_PLAIN):
            shown = (
                str(j) if j < 10**_MAX_PRINTED_DIGITS else power_of_ten(mpmath.log10(j), 5)
                for j in (self.low, self.high)
            )
            return " to ".join(dict.fromkeys(shown))
        low, high = self.log10 or (mpmath.log10(self.low), mpmath.log10(self.high))
        if not mpmath.isfinite(high):
            return f"> {power_of_ten(low, 3)}"
        for digits in (4, 3, 2, 1):
            if (shown := power_of_ten(low, digits)) == power_of_ten(high, digits):
                return f"≈ {shown}"
        return f"{power_of_ten(low, 2)} to {power_of_ten(high, 2)}"


def power_of_ten(log10: Any, digits: int) -> str:
    """Return 10^log10 in scientific notation, as a power of 10 if its exponent is large too.

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
def receptive_field(total: Sum, epsilon: Fraction) -> ReceptiveField:
    """Return the receptive field: the smallest j whose tail from j on is strictly below εB.

    Args:
        total: certified sum with B and the enclosures of its tails.
        epsilon: ε in (0, 1).
    """
    if isinstance(total, FiniteSum):
        j = math.floor(total.keys * (1 - epsilon)) + 1
        return ReceptiveField(j, j)
    if isinstance(total, GeometricSum):
        return _geometric(total, epsilon)
    target = total.total * enclose_constant(sympy.Rational(epsilon))

    def side(tail: Any) -> int:
        return 1 if tail.b < target.a else -1 if tail.a >= target.b else 0

    side_of_index = functools.cache(lambda j: side(total.tail(j)))
    if side_of_index(total.end) > 0:
        return _search_index(side_of_index, 0, total.end, total.initial_index(target))
    return _search_logarithm(side_of_index, lambda t: side(total.far(t)), total.end)


def _geometric(total: GeometricSum, epsilon: Fraction) -> ReceptiveField:
    """Return the field of a geometric series (Eq. 46): the tail is e^(-kj)·B, so j > ln(1/ε)/k."""
    with total.digits():
        quotient = iv.log(1 / enclose_constant(sympy.Rational(epsilon))) / enclose_constant(total.k)
    low, high = (mpmath.libmp.to_int(end, "f") + 1 for end in quotient._mpi_)
    if low < high:  # ln(1/ε)/k is a whole number, or too close to one for intervals
        above = sign(sympy.log(1 / sympy.Rational(epsilon)) - low * total.k)
        if above is not None:
            low = high = low + (above >= 0)
    return ReceptiveField(low, high)


def _search_index(side_of: Side, low: int, high: int, guess: int) -> ReceptiveField:
    """Return the field between ``low``, which is too short, and ``high``, which is long enough."""
    wide = guess + (guess >> _COARSE_BITS)
    coarse = low < guess < wide < high and side_of(guess) == side_of(wide) == 0
    short, least = _bisect(lambda j: side_of(j) >= 0, low, high, guess, coarse)
    if side_of(least) > 0:
        return ReceptiveField(short + 1, least)
    return ReceptiveField(short + 1, _bisect(lambda j: side_of(j) > 0, least, high, least + 1, coarse)[1])


def _bisect(holds: Callable[[int], bool], low: int, high: int, guess: int, coarse: bool) -> tuple[int, int]:
    """Return the last j at which a monotone predicate fails and the first at which it holds.

    It fails at ``low`` and holds at ``high``. The search takes growing steps from ``guess`` and then halves the range;
    with ``coarse`` it stops as soon as both agree to 12 bits.
    """
    j, step = min(max(guess, low + 1), high), 1 + (guess >> _COARSE_BITS if coarse else 0)
    up = j < high and not holds(j)
    low, high = (j, high) if up else (low, j)
    while high - low > 1:
        j = low + step if up else high - step
        if not low < j < high:
            break
        result = holds(j)
        low, high = (low, j) if result else (j, high)
        if result == up:
            break
        step *= 8
    while high - low > 1 + (low >> _COARSE_BITS if coarse else 0):
        j = (low + high) // 2
        low, high = (low, j) if holds(j) else (j, high)
    return low, high


def _search_logarithm(side_of_index: Side, far: Side, end: int) -> ReceptiveField:
    """Return the field beyond the ``end`` of the blocks, found in terms of T = ln j."""
    low = high = iv.log(iv.mpf(end)).a
    while (side := far(high)) <= 0:
        low = high if side < 0 else low
        high = 2 * high
        if high > _MAX_LOG:
            return ReceptiveField(log10=(bounds(low / iv.log(10))[0], mpmath.inf))
    if high.a < _MAX_INTEGER_BITS * math.log(2):
        return _search_index(side_of_index, end - 1, mpmath.libmp.to_int(intervals.exp(high)._mpi_[1], "c"), end)
    # from the last T that is proven too short to the first T that is proven long enough
    least, most = _halve(lambda t: far(t) >= 0, low, high)[0], _halve(lambda t: far(t) > 0, low, high)[1]
    return ReceptiveField(log10=(bounds(least / iv.log(10))[0], bounds(most / iv.log(10))[1]))


def _halve(holds: Callable[[Any], bool], low: Any, high: Any) -> tuple[Any, Any]:
    """Return about the last T at which a monotone predicate fails and the first at which it holds."""
    for _ in range(100):
        middle = iv.mpf(((low + high) / 2).mid)
        if not low < middle < high:
            break
        low, high = (low, middle) if holds(middle) else (middle, high)
    return low, high
