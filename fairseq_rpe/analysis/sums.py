"""The limit B = Σ exp f(n) and its tails as intervals: exact terms, Euler-Maclaurin with its error, and the far end.

For an analytic f the tail from j on is, with b = exp f,

    Σ_{n=j}^{X-1} b(n) = ∫_j^X b dx + (b(j) - b(X))/2 - Σ_{k<=16} B_2k/(2k)! (b^(2k-1)(j) - b^(2k-1)(X)) + R

plus what :func:`.summation.beyond` proves about n >= X. The integral is Gauss-Legendre's with the error bound for
functions analytic in an ellipse (Trefethen, Approximation Theory and Practice, Thm. 19.3), R and the derivatives have
Cauchy's bounds; each needs only the largest size of b in a complex box, which interval arithmetic gives. Where f is not
analytic, or oscillates too fast, a million terms are added up and the rest stays an interval.
"""

from __future__ import annotations

import bisect
import contextlib
import functools
import math
from dataclasses import dataclass
from fractions import Fraction
from typing import Any

import mpmath
import numpy as np
import sympy

from .enclosures import PRECISION, Balls, Undefined, enclose, ends, iv, number, precision, ranges
from .summation import beyond

NODES, _RHO = 28, 2.6  # of Gauss-Legendre; sum of the half axes of its ellipse
_ORDER, _RADIUS, _CIRCLE, _POINTS = 32, 24, 10, 64
_FLOATS = np.polynomial.legendre.leggauss(NODES)
_TOLERANCE = iv.mpf(10) ** -22
_BLOCKS, _FIRST = 260, (64, 256, 1024, 4096)
_FARTHEST = 2200  # doublings
ROUGH = 1 << 20


class NotSmooth(ArithmeticError):
    """Euler-Maclaurin does not apply from here on."""


class TooLong(ArithmeticError):
    """It does, but takes more blocks than are worth their time."""


@dataclass(frozen=True)
class Block:
    """∫ over [low, high] with its error, the largest |b| around it, and how far R may be off."""

    low: int
    high: int
    area: Any
    most: Any
    rest: Any


@functools.cache
def gauss() -> tuple[list[Any], list[Any]]:
    """Nodes and weights of Gauss-Legendre on [-1, 1], to twice the precision that is used."""
    with mpmath.workprec(2 * PRECISION):
        nodes, weights = [], []
        for start in np.polynomial.legendre.leggauss(NODES)[0]:
            x = mpmath.mpf(float(start))
            for _ in range(6):
                p, before = mpmath.legendre(NODES, x), mpmath.legendre(NODES - 1, x)
                slope = NODES * (before - x * p) / (1 - x * x)
                x -= p / slope
            before = mpmath.legendre(NODES - 1, x)
            nodes.append(x)
            weights.append(2 * (1 - x * x) / (NODES * before) ** 2)
    return [iv.mpf(x) for x in nodes], [iv.mpf(w) for w in weights]


class Smooth:
    """B and every tail of an analytic series.

    Args:
        f: the log-weight; convergent.
        level: what decided that.
        first: number of terms that are added up one by one.

    Raises:
        NotSmooth: f is not analytic from ``first`` on.
        TooLong: it oscillates too fast, or nothing is known about its far end.
    """

    def __init__(self, f: sympy.Expr, level: int, first: int) -> None:
        self.f, self.first = f, first
        self.partial = [iv.mpf(0)]
        for n in range(first):
            self.partial.append(self.partial[-1] + self.weight(n))
        self.blocks: list[Block] = []
        self._extend(level)
        self.starts = [b.low for b in self.blocks]
        self.areas, self.rests = [self.far_sum], [iv.mpf(0)]
        for b in reversed(self.blocks):
            self.areas.append(self.areas[-1] + b.area)
            self.rests.append(self.rests[-1] + b.rest)
        self.areas.reverse()
        self.rests.reverse()
        self._tails: dict[int, Any] = {}
        self.total = self.partial[-1] + self.tail(first)

    def weight(self, x: Any) -> Any:
        """b(x)."""
        return Balls.exp(enclose(self.f, x))

    def tail(self, j: int) -> Any:
        """Σ_{n >= j} b(n), for j <= end."""
        if j < self.first:
            return self.partial[-1] - self.partial[j] + self.tail(self.first)
        if j not in self._tails:
            if j >= self.end:
                self._tails[j] = self.far(iv.log(iv.mpf(j)))
            elif j - 1 in self._tails:  # a neighbour costs one term
                self._tails[j] = self._tails[j - 1] - self.weight(j - 1)
            elif j + 1 in self._tails:
                self._tails[j] = self._tails[j + 1] + self.weight(j)
            else:
                self._tails[j] = self._euler(j)
        return self._tails[j]

    def near(self, target: Any) -> int:
        """About the j whose tail is ``target``: a guess in double precision."""
        with mpmath.workprec(PRECISION):
            want = mpmath.mpf(target.mid)
        i = bisect.bisect_left(self.areas, -want, key=lambda area: -mpmath.mpf(area.mid))
        if i == 0:
            return self.first // 2
        if i > len(self.blocks):
            return self.end
        block, missing = self.blocks[i - 1], float(1 - mpmath.mpf(self.areas[i].mid) / want)
        low, high, scale = block.low, block.high, float(mpmath.log(want))
        while high - low > 1:
            middle = (low + high) // 2
            half = (block.high - middle) / 2
            x = middle + half * (1 + _FLOATS[0])
            logs, _ = ranges(self.f, x, x)
            enough = half * float(np.sum(_FLOATS[1] * np.exp(logs - scale))) > missing
            low, high = (middle, high) if enough else (low, middle)
        for _ in range(2 if high > 1 << 30 else 0):  # Newton: doubles cannot tell such numbers apart
            with mpmath.workprec(PRECISION):
                step = (mpmath.mpf(self.tail(high).mid) - want) / mpmath.mpf(self.weight(high).mid)
                high = min(max(high + int(step), block.low), block.high)
        return high

    def _extend(self, level: int) -> None:
        """Blocks from ``first`` on, up to where what is left is known well enough; sets end, far and far_sum."""
        x, sofar, found = self.first, self.partial[-1], None
        for doubling in range(_FARTHEST):
            try:
                blocks = self._blocks(x, 2 * x, sofar)
            except TooLong:
                break
            self.blocks += blocks
            sofar += sum((block.area for block in blocks), iv.mpf(0))
            x *= 2
            if doubling < 12 or doubling % 4 == 0:
                far = beyond(self.f, iv.log(iv.mpf(x)).a, level)
                left = far(iv.log(iv.mpf(x))) if far else None
                if left is not None and left.b < iv.inf and (found is None or left.delta < found[2].delta):
                    found = x, far, left
                    if left.delta < _TOLERANCE * sofar:
                        break
                if found and doubling > 96 and found[2].a > 0:
                    break
        if not found:
            raise TooLong
        self.end, self.far, self.far_sum = found
        reach = iv.mpf([self.end - _RADIUS, self.end + _RADIUS])
        # bounds b(X)/2 and the derivatives at X, by Cauchy in this box, which lies in that of the last block
        self.edge = abs(self.weight(iv.mpc(reach, iv.mpf([-_RADIUS, _RADIUS])))).b
        self.blocks = [b for b in self.blocks if b.high <= self.end]

    def _blocks(self, low: int, high: int, sofar: Any) -> list[Block]:
        done, todo = [], [(low, high)]
        while todo:
            if len(self.blocks) + len(done) + len(todo) > _BLOCKS:
                raise TooLong
            a, b = todo.pop()
            block = self._block(a, b)
            if block is None or (block.rest + block.area.delta) > _TOLERANCE * max(sofar.a, block.area.a):
                if b - a < 4:
                    raise NotSmooth
                todo += [((a + b) // 2, b), (a, (a + b) // 2)]
            else:
                done.append(block)
        return done

    def _block(self, low: int, high: int) -> Block | None:
        half, middle = iv.mpf(high - low) / 2, iv.mpf(low + high) / 2
        along, across = half * (_RHO + 1 / _RHO) / 2, half * (_RHO - 1 / _RHO) / 2
        left, right = min((middle - along).a, iv.mpf(low - _RADIUS)), max((middle + along).b, iv.mpf(high + _RADIUS))
        height = max(across.b, iv.mpf(_RADIUS))
        try:
            most = abs(self.weight(iv.mpc(iv.mpf([left.a, right.b]), iv.mpf([-height.b, height.b])))).b
            area = self._area(low, high, most)
        except Undefined:
            return None
        rest = 4 * iv.mpf(math.factorial(_ORDER)) / (2 * iv.pi * _RADIUS) ** _ORDER * (high - low) * most
        return Block(low, high, area, iv.mpf(most), iv.mpf(rest.b))

    def _area(self, low: int, high: int, most: Any) -> Any:
        half, middle = iv.mpf(high - low) / 2, iv.mpf(low + high) / 2
        total = sum((w * self.weight(middle + half * x) for x, w in zip(*gauss(), strict=True)), iv.mpf(0))
        error = half * most * 64 / 15 * iv.mpf(_RHO) ** (2 - 2 * NODES) / (_RHO**2 - 1)
        return half * total + iv.mpf([-1, 1]) * error

    def _euler(self, j: int) -> Any:
        i = bisect.bisect_right(self.starts, j) - 1
        block = self.blocks[i]
        area = self.areas[i + 1] + self._area(j, block.high, block.most) if j > block.low else self.areas[i]
        circle = [self.weight(z) for z in self._circle(j)]
        powers = _roots()
        ratio = (iv.mpf(_CIRCLE) / _RADIUS) ** _POINTS
        total = area + self.weight(j) / 2
        for k in range(1, _ORDER, 2):  # the derivative of order k, over k!
            turned = sum((2 * (b * powers[-k * i % _POINTS]).real for i, b in enumerate(circle[1:-1], 1)), iv.mpf(0))
            value = (turned + circle[0].real - circle[-1].real) / _POINTS / iv.mpf(_CIRCLE) ** k
            value += iv.mpf([-1, 1]) * block.most * ratio / (1 - ratio) / iv.mpf(_RADIUS) ** k
            p, q = _bernoulli(k + 1)
            total -= iv.mpf(p) / q / (k + 1) * value
        return total + iv.mpf([-1, 1]) * (self.rests[i] + self.edge)

    @staticmethod
    def _circle(j: int) -> list[Any]:
        return [j + _CIRCLE * w for w in _roots()[: _POINTS // 2 + 1]]


@functools.cache
def _roots() -> list[Any]:
    angles = (2 * iv.pi * k / _POINTS for k in range(_POINTS))
    return [iv.mpc(iv.cos(a), iv.sin(a)) for a in angles]


@functools.cache
def _bernoulli(k: int) -> tuple[int, int]:
    value = sympy.bernoulli(k)
    return int(value.p), int(value.q)


class Rough:
    """B and tails of any convergent series from its first terms: as exact as what is known about the rest.

    Raises:
        TooLong: nothing is known about the rest, or the terms leave the range of doubles.
    """

    def __init__(self, f: sympy.Expr, level: int) -> None:
        self.f, self.end = f, ROUGH
        n = np.arange(ROUGH, dtype=np.float64)
        low, high = ranges(f, n, n)
        for k in np.flatnonzero(np.isnan(low) | np.isnan(high)):
            value = enclose(f, int(k))
            low, high = low.copy(), high.copy()
            low[k], high[k] = (np.nextafter(float(e), w) for e, w in zip(ends(value), (-np.inf, np.inf), strict=True))
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
        self.total = self._between(0, ROUGH) + self.far_sum

    def _between(self, start: int, stop: int) -> Any:
        """Σ over start <= n < stop."""
        low, high = (float(side[stop]) for side in (self.low, self.high))
        if start:
            low, high = low - float(self.high[start]), high - float(self.low[start])
        slack = 1e-15 * abs(high)
        return iv.mpf([max(low - slack, 0.0), high + slack])

    def near(self, target: Any) -> int:
        """Where to look first for the j whose tail is ``target``: tails are at hand here, so anywhere."""
        return self.end // 2

    def tail(self, j: int) -> Any:
        """Σ_{n >= j} b(n)."""
        if j >= self.end:
            return self.far(iv.log(iv.mpf(j)))
        return self._between(j, ROUGH) + self.far_sum


class Geometric:
    """b_n = exp(c - k·n), in closed form: B = e^c/(1 - e^-k)."""

    def __init__(self, c: sympy.Expr, k: sympy.Expr) -> None:
        self.c, self.k = c, k
        with self.digits():
            self.total = Balls.exp(number(c)) / (1 - Balls.exp(-number(k)))

    def digits(self) -> contextlib.AbstractContextManager[None]:
        """As many more bits as 1 - e^-k loses."""
        return precision(PRECISION + 3 * max(0, -int(mpmath.mag(ends(number(self.k))[0]))))


class Finite:
    """b_n = e^c for n < keys and 0 beyond: B = e^c·keys."""

    def __init__(self, c: sympy.Expr, keys: int) -> None:
        self.c, self.keys = c, keys
        self.total = Balls.exp(number(c)) * keys


def summed(f: sympy.Expr, level: int) -> Smooth | Rough | None:
    """The sum of a convergent series; None where no bound on it is known."""
    if beyond(f, iv.mpf(_FARTHEST) * iv.log(2), level) is None:
        return None
    for first in _FIRST:
        try:
            return Smooth(f, level, first)
        except (NotSmooth, Undefined):
            continue
        except TooLong:
            break
    try:
        return Rough(f, level)
    except (TooLong, Undefined):
        return None


def rational(epsilon: Fraction) -> Any:
    """The interval of an exact fraction."""
    return iv.mpf(epsilon.numerator) / epsilon.denominator
