"""The limit B = Σ exp f(n) and its tails as intervals: exact terms, Euler-Maclaurin with its error, and the far end.

For an analytic f the tail from j on is, with b = exp f,

    Σ_{n=j}^{X-1} b(n) = ∫_j^X b dx + (b(j) - b(X))/2 - Σ_{k<=16} B_2k/(2k)! (b^(2k-1)(j) - b^(2k-1)(X)) + R

plus what :func:`.remainders.beyond` proves about n >= X. Flint encloses the integral and the derivatives; it has no sum
of a series with a bound on what is left out, so R has Cauchy's bound, which needs only the largest size of b in a
complex box. Where f is not analytic, or oscillates too fast, a million terms are added up and the rest stays open.
"""

import bisect
import contextlib
import functools
import itertools
import math
from typing import Any, NamedTuple

import mpmath
import numpy as np
import sympy
from flint import arb

from fairseq_rpe.analysis.intervals_complex import Weight, ball, interval, precisely
from fairseq_rpe.analysis.intervals_float import ranges
from fairseq_rpe.analysis.intervals_mp import PRECISION, Undefined, enclose, ends, intervals, iv, number, precision
from fairseq_rpe.analysis.tail_bounds import beyond

_ORDER, _RADIUS = 32, 24
_TOLERANCE, _LEFT = 1e-22, 1e-23  # of a block's error, and of what is left, in parts of B
_BLOCKS, _FIRST = 260, (64, 256, 1024, 4096)
_FARTHEST = 2200  # doublings
_FINER = 2.0**-40  # integrals cost little more, and receptive fields need the digits
_STEPS = 40  # of Newton
ROUGH = 1 << 20


class TooLong(ArithmeticError):
    """Euler-Maclaurin applies, but takes more blocks than are worth their time, or nothing is known far out."""


class Block(NamedTuple):
    """∫ over [low, high] with its error, and how far R may be off."""

    low: int
    high: int
    area: arb
    rest: arb


class _Tails:
    """Tails of a series of which ``far`` says what is left from ln j on, and ``below`` the sum from j to ``end``."""

    def tail(self, j: int) -> Any:
        """Σ_{n >= j} b(n)."""
        return self.far(iv.log(iv.mpf(j))) if j >= self.end else self.below(j) + self.far_sum


class Smooth(_Tails):
    """B and every tail of an analytic convergent series, whose ``first`` terms are added up one by one.

    :class:`Undefined`: f is not analytic from there on; :class:`TooLong`: it oscillates too fast, or has no known end.
    """

    @precisely
    def __init__(self, f: sympy.Expr, level: int, first: int) -> None:
        self.weight, self.first = Weight(f), first
        terms = (ball(intervals.exp(enclose(f, n))) for n in range(first))
        self.partial = list(itertools.accumulate(terms, initial=arb(0)))
        self.blocks: list[Block] = []
        self._extend(f, level)
        last = self.blocks[::-1]  # areas and rests are of every block and all that follow
        sides = ((b.area for b in last), (b.rest for b in last))
        self.areas, self.rests = (list(itertools.accumulate(side, initial=arb(0)))[::-1] for side in sides)
        self.total = interval(self.partial[-1] + self._tail(first)) + self.far_sum

    def below(self, j: int) -> Any:
        return interval(self._tail(j))

    @precisely
    def _tail(self, j: int) -> arb:
        if j < self.first:
            return self.partial[-1] - self.partial[j] + self._tail(self.first)
        i = bisect.bisect_right(self.blocks, j, key=lambda b: b.low) - 1
        block = self.blocks[i]
        area = self.areas[i]
        if j > block.low:
            area = self.areas[i + 1] + self.weight.integral(j, block.high, block.area.rad())
        total = area + self.weight(j) / 2
        for k, value in list(enumerate(self.weight.taylor(j, _ORDER)))[1::2]:
            total -= arb.bernoulli(k + 1) / (k + 1) * value
        return total + arb(0, 1) * (self.rests[i] + self.edge)

    @precisely
    def near(self, target: Any) -> int:
        """About the j whose tail is ``target``."""
        far, want = ball(self.far_sum).mid(), ball(target).mid()
        i = bisect.bisect_left(self.areas, True, key=lambda area: not (area + far).mid() > want)
        if not 0 < i <= len(self.blocks):
            return self.end if i else self.first // 2
        block = self.blocks[i - 1]
        low = block.low
        for _ in range(_STEPS):  # Newton's, of the logarithm: exact where the weights fall geometrically
            tail = self._tail(low).mid() + far
            step = int((tail / self.weight(low) * (tail / want).log()).mid().floor().unique_fmpz()) if tail > 0 else 0
            low = max(block.low, min(low + step, block.high))
            if abs(step) <= 1 or low == block.high:
                break
        return low

    def _extend(self, f: sympy.Expr, level: int) -> None:
        """Blocks from ``first`` on, up to where what is left is known well enough; sets end, far and far_sum."""
        x, sofar, found = self.first, self.partial[-1], None
        for doubling in range(_FARTHEST):
            try:
                self.blocks += (blocks := self._blocks(x, 2 * x, sofar))
            except TooLong:
                break
            sofar = sum((block.area for block in blocks), sofar)
            x *= 2
            if doubling < 12 or doubling % 4 == 0:
                far = beyond(f, iv.log(iv.mpf(x)).a, level)
                left = far(iv.log(iv.mpf(x))) if far else None
                if left is not None and left.b < iv.inf and (found is None or left.delta < found[2].delta):
                    found = x, far, left
                    if left.delta < _LEFT * interval(sofar):
                        break
                if found and doubling > 96 and found[2].a > 0:
                    break
        if not found:
            raise TooLong
        self.end, self.far, self.far_sum = found
        # bounds b(X)/2 and the derivatives at X, by Cauchy in this box, which lies in that of the last block
        self.edge = self.weight.most(self.end - _RADIUS, self.end + _RADIUS, _RADIUS)
        self.blocks = [b for b in self.blocks if b.high <= self.end]

    def _blocks(self, low: int, high: int, sofar: arb) -> list[Block]:
        done, todo = [], [(low, high)]
        while todo:
            if len(self.blocks) + len(done) + len(todo) > _BLOCKS:
                raise TooLong
            a, b = todo.pop()
            if block := self._block(a, b, sofar):
                done.append(block)
            elif b - a < 4:
                raise Undefined("not analytic here")
            else:
                todo += [((a + b) // 2, b), (a, (a + b) // 2)]
        return done

    def _block(self, low: int, high: int, sofar: arb) -> Block | None:
        most = self.weight.most(low - _RADIUS, high + _RADIUS, _RADIUS)
        if most is None:
            return None
        rest = 4 * arb(math.factorial(_ORDER)) / (2 * arb.pi() * _RADIUS) ** _ORDER * (high - low) * most
        allowed = _TOLERANCE * sofar.lower()
        if not rest < allowed:
            return None
        area = self.weight.integral(low, high, allowed * _FINER)
        return Block(low, high, area, rest) if rest + area.rad() < allowed else None


class Rough(_Tails):
    """B and tails of any convergent series from its first terms: as exact as what is known about the rest.

    :class:`TooLong`: nothing is known about the rest, or the terms leave the range of doubles.
    """

    def __init__(self, f: sympy.Expr, level: int) -> None:
        self.end = ROUGH
        n = np.arange(ROUGH, dtype=np.float64)
        low, high = map(np.array, ranges(f, n, n))
        for k in np.flatnonzero(np.isnan(low) | np.isnan(high)):
            bottom, top = map(float, ends(enclose(f, int(k))))
            low[k], high[k] = np.nextafter(bottom, -np.inf), np.nextafter(top, np.inf)
        far = beyond(f, iv.log(iv.mpf(ROUGH)).a, level)
        if far is None or not high.max() < 690:
            raise TooLong
        eps = float(np.finfo(np.longdouble).eps) * ROUGH + 1e-17
        self.far, self.far_sum = far, far(iv.log(iv.mpf(ROUGH)))
        if not self.far_sum.b < iv.inf:
            raise TooLong
        self.low, self.high = (
            np.concatenate([[0], np.cumsum(np.exp(side.astype(np.longdouble))) * (1 + sign * eps)])
            for side, sign in ((low, -1), (high, 1))
        )
        self.total = self.tail(0)

    def below(self, j: int) -> Any:
        low, high = float(self.low[-1]), float(self.high[-1])
        if j:
            low, high = low - float(self.high[j]), high - float(self.low[j])
        slack = 1e-15 * abs(high)
        return iv.mpf([max(low - slack, 0.0), high + slack])

    def near(self, target: Any) -> int:
        """Where to look first for the j whose tail is ``target``: tails are at hand here, so anywhere."""
        return self.end // 2


class Geometric:
    """b_n = exp(c - k·n), in closed form: B = e^c/(1 - e^-k)."""

    def __init__(self, c: sympy.Expr, k: sympy.Expr) -> None:
        self.k = k
        with self.digits():
            self.total = intervals.exp(number(c)) / (1 - intervals.exp(-number(k)))

    def digits(self) -> contextlib.AbstractContextManager[None]:
        """As many more bits as 1 - e^-k loses."""
        return precision(PRECISION + 3 * max(0, -int(mpmath.mag(ends(number(self.k))[0]))))


class Finite:
    """b_n = e^c for n < keys and 0 beyond: B = e^c·keys."""

    def __init__(self, c: sympy.Expr, keys: int) -> None:
        self.c, self.keys = c, keys
        self.total = intervals.exp(number(c)) * keys


@functools.lru_cache(maxsize=256)
def summed(f: sympy.Expr, level: int) -> Smooth | Rough | None:
    """The sum of a convergent series; None where no bound on it is known."""
    if beyond(f, iv.mpf(_FARTHEST) * iv.log(2), level) is None:
        return None
    for first in _FIRST:
        try:
            return Smooth(f, level, first)
        except Undefined:
            continue
        except TooLong:
            break
    with contextlib.suppress(TooLong, Undefined):
        return Rough(f, level)
    return None
