"""Enclosures of B = Σ exp f(n) and of its tails: exact terms, Euler-Maclaurin with an error bound, and a tail bound.

For an analytic f the tail from j on is, with b = exp f,

    Σ_{n=j}^{X-1} b(n) = ∫_j^X b dx + (b(j) - b(X))/2 - Σ_{k<=16} B_2k/(2k)! (b^(2k-1)(j) - b^(2k-1)(X)) + R

plus the sum over n >= X, which :func:`tail_bound` encloses from the asymptotic expansion of f. Flint encloses the
integral and the derivatives. It has no sum of a series with a bound on the remainder, so R is bounded by Cauchy's
inequality for derivatives, which needs only the largest |b| in a complex box. Where f is not analytic or oscillates too
fast, a million terms are added up and :func:`tail_bound` encloses the others.
"""

import bisect
import contextlib
import functools
import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import mpmath
import numpy as np
import sympy
from flint import arb

from fairseq_rpe.analysis.asymptotics import (
    ONE,
    ORDERS,
    AsymptoticArithmetic,
    Envelope,
    Expansion,
    Monomial,
    NotYetValid,
    Undecided,
    collect_terms,
    compare,
    exact,
    iterated_log,
    monomial_product,
    require_sign,
)
from fairseq_rpe.analysis.intervals_complex import AnalyticWeight, ball, interval, with_flint_precision
from fairseq_rpe.analysis.intervals_float import float_ranges
from fairseq_rpe.analysis.intervals_mp import (
    PRECISION,
    Undefined,
    bounds,
    enclose,
    enclose_constant,
    intervals,
    iv,
    precision,
)

_ORDER, _RADIUS = 32, 24  # derivatives of Euler-Maclaurin; radius of the circles of Cauchy's inequality
_BLOCK_TOLERANCE, _TAIL_TOLERANCE = 1e-22, 1e-23  # error of a block and of the tail bound, relative to B
# error of an integral relative to that of its block: a small error costs little time, and receptive fields need it
_INTEGRAL_TOLERANCE = 2.0**-40
_MAX_BLOCKS = 260
_EXACT_TERMS = (64, 256, 1024, 4096)  # numbers of terms added up one by one before the blocks, tried in turn
_MAX_DOUBLINGS = 2200  # of the end X of the blocks
_FIRST_DOUBLINGS = 12  # doublings that are all followed by a tail bound; then every fourth one is
_MANY_DOUBLINGS = 96  # doublings after which any tail bound above 0 is accepted
_NEWTON_STEPS = 40
DIRECT_TERMS = 1 << 20  # terms of a direct sum
MAX_WINDOW_TERMS = 1 << 14  # terms of a window, whose intervals have many digits and take time


class TooManyBlocks(ArithmeticError):
    """Euler-Maclaurin needs more than 260 blocks, or there is no tail bound at their end."""


class _FarTail(NamedTuple):
    """The tail beyond all blocks.

    Attributes:
        end: its first n.
        bound: function of ln n that encloses the tail from n >= ``end`` on.
        sum: interval of the whole tail.
    """

    end: int
    bound: Any
    sum: Any


class Block(NamedTuple):
    """One block of the Euler-Maclaurin sum.

    Attributes:
        low: first n of the block.
        high: last n of the block, which is the first of the next one.
        area: enclosure of the integral from ``low`` to ``high``.
        remainder: bound on the absolute value of the remainder R.
    """

    low: int
    high: int
    area: arb
    remainder: arb


def tail_bound(f: sympy.Expr, start: Any, decided: int) -> Callable[[Any], Any] | None:
    """Return a function that encloses the tail Σ_{n >= m} exp f(n).

    The sum is between the integral from m on and the integral plus b_m, as the envelopes of f fall. The integral is
    known in closed form for f = -a·n^s - p·ln n - q·ln ln n + c (incomplete gamma functions). Otherwise substitute the
    k-fold logarithm L: the integrand becomes e^V with V = f + ln n + ln ln n + …, and where -κ <= dV/dL <= -κ' the
    integral lies between e^V/κ and e^V/κ'.

    Args:
        f: log-bias as an expression in n, whose series converges.
        start: T >= 3; the bound is wanted for n >= e^T.
        decided: k of the k-fold logarithm that decided the convergence (:class:`.convergence_test.Decision`).

    Returns:
        The function T -> interval of the tail from m = e^T on, valid for every T >= start; None if there is no bound.
    """
    for order in ORDERS:
        with contextlib.suppress(NotYetValid, Undecided, Undefined):
            arithmetic = AsymptoticArithmetic(start, order)
            e = arithmetic(f)
            return _closed_form_tail(e, arithmetic) or _slope_tail(e, arithmetic, decided)
    return None


def _closed_form_tail(e: Expansion, arithmetic: AsymptoticArithmetic) -> Callable[[Any], Any] | None:
    """Return the tail of f = -a·n^s - p·ln n - q·ln ln n - r·ln ln ln n + c + falling terms, None for another f."""
    main = {m: c for m, c in e.terms.items() if compare(m, ONE) > 0}
    minor = [(m, arithmetic.max_coefficient(c)) for m, c in e.terms.items() if compare(m, ONE) < 0]
    minor += [e.error] if e.error else []
    if any(c[0] != c[1] for c in main.values()) or any(not arithmetic.falls(m) for m, _ in minor):
        return None
    power = [m for m in main if m[0] != 0]
    p, q, r = (-main.get(iterated_log(k), (sympy.S.Zero,))[0] for k in (1, 2, 3))
    # with a power n^s there may be ln n only, and without one ln n, ln ln n and ln ln ln n
    allowed = {*power, iterated_log(1)} if power else {iterated_log(1), iterated_log(2), iterated_log(3)}
    if set(main) - allowed or len(power) > 1 or (power and power[0][1:] != ONE[1:]):
        return None
    if r != 0 and (p != 1 or q != 1):  # no closed form
        return None
    low, high = e.terms.get(ONE, (sympy.S.Zero,) * 2)
    a, s = (-main[power[0]][0], power[0][0]) if power else (sympy.S.Zero, sympy.S.One)
    rates = [enclose_constant(v) for v in (a, s, p, q, r)]

    def tail(t: Any) -> Any:
        at_t = AsymptoticArithmetic(t, arithmetic.order)
        # minor terms fall, so their size at e^t bounds them from there on
        slack = sum((c * at_t.size(m) for m, c in minor), iv.mpf(0)).b
        model = _exp([(m, c[0]) for m, c in main.items()], at_t)
        area = _integral(rates, t, a == 0 and p == 1, a == 0 and p == 1 and q == 1)
        wide = enclose_constant(low) - slack, enclose_constant(high) + slack
        # integral test of a falling function: area <= sum <= area + first term
        return iv.mpf([(intervals.exp(wide[0]) * area).a, (intervals.exp(wide[1]) * (area + model)).b])

    if power:
        return None if require_sign(p) < 0 else tail
    # with a rising factor, the integral test needs a proof that f falls: dV/dL_1 < 1 for V = f + ln n
    return None if any(require_sign(v) < 0 for v in (p, q, r)) and _rate(e, arithmetic, 1, 1)[0] <= -1 else tail


def _exp(terms: Envelope, arithmetic: AsymptoticArithmetic) -> Any:
    """Return the interval of exp Σ c·m at n = e^start of the arithmetic."""
    return intervals.exp(sum((enclose_constant(c) * arithmetic.size(m) for m, c in terms), iv.mpf(0)))


@with_flint_precision
def _integral(rates: Sequence[Any], t: Any, harmonic: bool, twice: bool) -> Any:
    """Return ∫ exp(-a·x^s)·x^-p·(ln x)^-q·(ln ln x)^-r dx from e^t on, in closed form.

    ``harmonic``: a = 0 and p = 1; ``twice``: q = 1 as well. Γ(·, ·) is the upper incomplete gamma function.
    """
    a, s, p, q, r, t = (ball(v) for v in (*rates, t))
    if twice:
        value = t.log() ** (1 - r) / (r - 1)
    elif harmonic:
        value = t ** (1 - q) / (q - 1)
    elif a == 0 and q == 0:
        value = ((1 - p) * t).exp() / (p - 1)
    elif a == 0:
        value = (p - 1) ** (q - 1) * ((p - 1) * t).gamma_upper(1 - q)  # with x = e^u
    else:
        z = (1 - p) / s
        value = (a * (s * t).exp()).gamma_upper(z) / (s * a**z)  # with u = a·x^s
    return interval(value)


def _derivative(envelope: Envelope, k: int) -> Iterator[tuple[Monomial, sympy.Expr]]:
    """Yield the terms of d/dL_k of a sum of monomials, L_k the k-fold logarithm.

    By the chain rule, d ln L_j / dL_k = dL_{j+1} / dL_k is L_{j+1}·…·L_{k-1} for j < k and 1 / (L_k·…·L_j) otherwise.
    """
    for m, c in envelope:
        for j, e in enumerate(m):
            if e != 0:
                factor = ONE
                for i in range(min(j + 1, k), max(j + 1, k)):
                    factor = monomial_product(factor, iterated_log(i), sympy.S.One if j + 1 < k else -sympy.S.One)
                yield monomial_product(m, factor), c * e


def _rate(e: Expansion, arithmetic: AsymptoticArithmetic, side: int, k: int) -> tuple[Any, Any]:
    """Return κ' and κ with -κ <= dV/dL_k <= -κ' for n >= e^start, V = envelope + L_1 + … + L_k; κ may be ∞."""
    slope = _derivative([*e.envelope(side), *((iterated_log(j), sympy.S.One) for j in range(1, k + 1))], k)
    terms = arithmetic.tidy(collect_terms((m, exact(c)) for m, c in slope), []).ordered()
    if not terms:
        return iv.mpf(0), iv.mpf(0)
    (m, (c, _)), *lower = terms
    if compare(m, ONE) < 0:
        return iv.mpf(0), iv.inf
    others = sum((arithmetic.max_coefficient(d) * arithmetic.ratio(p, m) for p, d in lower), iv.mpf(0)).b
    if require_sign(c) > 0:
        return -iv.inf, iv.mpf(0)
    # leading term minus the bound on all others; a rising leading term is smallest at e^start
    size = abs(enclose_constant(c))
    rising = m != ONE and not arithmetic.falls(m)
    least = (size.a - others) * (arithmetic.size(m).a if rising else 1)
    return iv.mpf(least.a), iv.inf if rising else iv.mpf((size + others).b)


def _slope_tail(e: Expansion, arithmetic: AsymptoticArithmetic, k: int) -> Callable[[Any], Any] | None:
    """Return the tail between e^V/κ and e^V/κ' plus the first term, from the slopes of both envelopes in L_k."""
    least, _ = _rate(e, arithmetic, 1, k)
    if not least.a > 0:
        return None
    bounded = not any(c[0].is_infinite for c in e.terms.values())
    flat, most = _rate(e, arithmetic, 0, k) if bounded else (iv.mpf(0), iv.inf)
    extra = [(iterated_log(j), sympy.S.One) for j in range(1, k + 1)]

    def tail(t: Any) -> Any:
        def value(terms: Envelope) -> Any:
            return _exp(terms, AsymptoticArithmetic(t, arithmetic.order))

        high = value([*e.envelope(1), *extra]) / least + value(e.envelope(1))
        if most == iv.inf or not flat.a > 0:
            return iv.mpf([0, high.b])
        return iv.mpf([(value([*e.envelope(0), *extra]) / most).a, high.b])

    return tail


def _far_tail(f: sympy.Expr, end: int, level: int) -> _FarTail | None:
    """Return the tail from n = ``end`` on, or None if no finite bound on it is known."""
    start = iv.log(iv.mpf(end))
    bound = tail_bound(f, start.a, level)
    tail = bound(start) if bound else None
    return None if tail is None or not tail.b < iv.inf else _FarTail(end, bound, tail)


class _Tails:
    """Tails of a series.

    Subclasses define ``below`` and set ``end``, ``far`` (function of ln j that encloses the tail from j >= ``end`` on)
    and ``far_sum`` (the tail from ``end`` on).
    """

    def tail(self, j: int) -> Any:
        """Return the interval of Σ_{n >= j} b(n)."""
        return self.far(iv.log(iv.mpf(j))) if j >= self.end else self.below(j) + self.far_sum


class EulerMaclaurinSum(_Tails):
    """B and every tail of a convergent series with an analytic f, by the Euler-Maclaurin formula.

    Args:
        f: log-bias as an expression in n.
        level: k of the k-fold logarithm that decided the convergence.
        first: number of terms that are added up one by one; f has to be analytic from there on.

    Attributes:
        total: interval that contains B.
        end: end X of the blocks; later tails come from :func:`tail_bound`.

    Raises:
        Undefined: f is not analytic from ``first`` on.
        TooManyBlocks: f oscillates too fast or has no tail bound.
    """

    @with_flint_precision
    def __init__(self, f: sympy.Expr, level: int, first: int) -> None:
        self.weight, self.first = AnalyticWeight(f), first
        terms = (ball(intervals.exp(enclose(f, n))) for n in range(first))
        self.partial = list(itertools.accumulate(terms, initial=arb(0)))
        self.blocks: list[Block] = []
        self._extend(f, level)
        # areas[i] and remainders[i] are the sums over block i and all later ones
        reverse = self.blocks[::-1]
        columns = ((b.area for b in reverse), (b.remainder for b in reverse))
        self.areas, self.remainders = (list(itertools.accumulate(c, initial=arb(0)))[::-1] for c in columns)
        self.total = interval(self.partial[-1] + self._tail(first)) + self.far_sum

    def below(self, j: int) -> Any:
        """Return the interval of the sum from j to the end of the blocks."""
        return interval(self._tail(j))

    @with_flint_precision
    def _tail(self, j: int) -> arb:
        if j < self.first:
            return self.partial[-1] - self.partial[j] + self._tail(self.first)
        i = bisect.bisect_right(self.blocks, j, key=lambda b: b.low) - 1
        block = self.blocks[i]
        area = self.areas[i]
        if j > block.low:
            area = self.areas[i + 1] + self.weight.integral(j, block.high, block.area.rad())
        total = area + self.weight(j) / 2
        # B_2m/(2m)!·b^(2m-1)(j) with k = 2m - 1: the Taylor coefficient b^(k)/k! times B_(k+1)/(k+1)
        for k, value in list(enumerate(self.weight.taylor(j, _ORDER)))[1::2]:
            total -= arb.bernoulli(k + 1) / (k + 1) * value
        # a ball around 0 with the radius of all that is bounded only: R of the blocks, and the boundary terms at X
        return total + arb(0, 1) * (self.remainders[i] + self.edge)

    @with_flint_precision
    def initial_index(self, target: Any) -> int:
        """Return an approximate j whose tail is ``target``, where a search starts."""
        far, goal = ball(self.far_sum).mid(), ball(target).mid()
        i = bisect.bisect_left(self.areas, True, key=lambda area: not (area + far).mid() > goal)
        if not 0 < i <= len(self.blocks):
            return self.end if i else self.first // 2
        block = self.blocks[i - 1]
        low = block.low
        # Newton's method on the logarithm of the tail: one step is exact where the weights fall geometrically
        for _ in range(_NEWTON_STEPS):
            tail = self._tail(low).mid() + far
            step = 0
            if tail > 0:
                distance = tail / self.weight(low) * (tail / goal).log()
                step = int(distance.mid().floor().unique_fmpz())
            low = max(block.low, min(low + step, block.high))
            if abs(step) <= 1 or low == block.high:
                break
        return low

    def _extend(self, f: sympy.Expr, level: int) -> None:
        """Append blocks from ``first`` on, until the tail bound is accurate enough; set end, far, far_sum and edge."""
        x, partial_sum = self.first, self.partial[-1]
        best: _FarTail | None = None
        for doubling in range(_MAX_DOUBLINGS):
            try:
                self.blocks += (blocks := self._blocks(x, 2 * x, partial_sum))
            except TooManyBlocks:
                break
            partial_sum = sum((block.area for block in blocks), partial_sum)
            x *= 2
            # a tail bound takes long, so far out only every fourth doubling has one
            if doubling < _FIRST_DOUBLINGS or doubling % 4 == 0:
                tail = _far_tail(f, x, level)
                if tail and (best is None or tail.sum.delta < best.sum.delta):
                    best = tail
                    if best.sum.delta < _TAIL_TOLERANCE * interval(partial_sum):
                        break
                # the tail decays slowly, and further doublings hardly narrow its bound
                if best and doubling > _MANY_DOUBLINGS and best.sum.a > 0:
                    break
        if not best:
            raise TooManyBlocks
        self.end, self.far, self.far_sum = best
        # bounds b(X)/2 and the derivatives at X by Cauchy's inequality; the box lies in that of the last block
        self.edge = self.weight.max_size(self.end - _RADIUS, self.end + _RADIUS, _RADIUS)
        self.blocks = [b for b in self.blocks if b.high <= self.end]

    def _blocks(self, low: int, high: int, partial_sum: arb) -> list[Block]:
        """Return blocks that cover [low, high], halved until each one's remainder is small enough."""
        done, todo = [], [(low, high)]
        while todo:
            if len(self.blocks) + len(done) + len(todo) > _MAX_BLOCKS:
                raise TooManyBlocks
            a, b = todo.pop()
            if block := self._block(a, b, partial_sum):
                done.append(block)
            elif b - a < 4:
                raise Undefined("not analytic here")
            else:
                todo += [((a + b) // 2, b), (a, (a + b) // 2)]
        return done

    def _block(self, low: int, high: int, partial_sum: arb) -> Block | None:
        """Return the block, or None if b is not analytic around it or the bounds are too wide."""
        most = self.weight.max_size(low - _RADIUS, high + _RADIUS, _RADIUS)
        if most is None:
            return None
        # |R| <= 2·ζ(p)/(2π)^p · ∫ |b^(p)| dx with p = 32 and ζ(p) < 2; |b^(p)| <= p!·max|b| / radius^p (Cauchy)
        remainder = 4 * arb(math.factorial(_ORDER)) / (2 * arb.pi() * _RADIUS) ** _ORDER * (high - low) * most
        allowed = _BLOCK_TOLERANCE * partial_sum.lower()
        if not remainder < allowed:
            return None
        area = self.weight.integral(low, high, allowed * _INTEGRAL_TOLERANCE)
        return Block(low, high, area, remainder) if remainder + area.rad() < allowed else None


class DirectSum(_Tails):
    """B and every tail of any convergent series, from its first 2^20 terms and the bound on the others.

    Args:
        f: log-bias as an expression in n.
        level: k of the k-fold logarithm that decided the convergence.

    Raises:
        TooManyBlocks: there is no tail bound, or the terms leave the range of doubles.
    """

    def __init__(self, f: sympy.Expr, level: int) -> None:
        self.end = DIRECT_TERMS
        n = np.arange(DIRECT_TERMS, dtype=np.float64)
        low, high = map(np.array, float_ranges(f, n, n))  # (DIRECT_TERMS,) each
        # doubles cannot enclose f at some n: take intervals with more digits there
        for k in np.flatnonzero(np.isnan(low) | np.isnan(high)):
            bottom, top = map(float, bounds(enclose(f, int(k))))
            low[k], high[k] = np.nextafter(bottom, -np.inf), np.nextafter(top, np.inf)
        far = tail_bound(f, iv.log(iv.mpf(DIRECT_TERMS)).a, level)
        if far is None or not high.max() < 690:
            raise TooManyBlocks
        # a sum of m rounded terms is off by at most m·eps of itself, as all terms are positive; exp adds its own ulp
        eps = float(np.finfo(np.longdouble).eps) * DIRECT_TERMS + 1e-17
        self.far, self.far_sum = far, far(iv.log(iv.mpf(DIRECT_TERMS)))
        if not self.far_sum.b < iv.inf:
            raise TooManyBlocks
        self.low, self.high = (
            np.concatenate([[0], np.cumsum(np.exp(side.astype(np.longdouble))) * (1 + sign * eps)])
            for side, sign in ((low, -1), (high, 1))
        )
        self.total = self.tail(0)

    def below(self, j: int) -> Any:
        """Return the interval of the sum from j to the last of the 2^20 terms."""
        low, high = float(self.low[-1]), float(self.high[-1])
        if j:
            low, high = low - float(self.high[j]), high - float(self.low[j])
        slack = 1e-15 * abs(high)
        return iv.mpf([max(low - slack, 0.0), high + slack])

    def initial_index(self, target: Any) -> int:
        """Return the j where a search for the tail ``target`` starts: tails are tabulated, so any j serves."""
        return self.end // 2


class GeometricSum:
    """The geometric series b_n = exp(c - k·n), with B = e^c/(1 - e^-k) in closed form."""

    def __init__(self, c: sympy.Expr, k: sympy.Expr) -> None:
        self.k = k
        with self.digits():
            self.total = intervals.exp(enclose_constant(c)) / (1 - intervals.exp(-enclose_constant(k)))

    def digits(self) -> contextlib.AbstractContextManager[None]:
        """Return a context with as many more bits as the cancellation in 1 - e^-k loses."""
        return precision(PRECISION + 3 * max(0, -int(mpmath.mag(bounds(enclose_constant(self.k))[0]))))


class FiniteSum:
    """The finite series b_n = e^c for n < keys and 0 beyond, with B = e^c·keys."""

    def __init__(self, c: sympy.Expr, keys: int) -> None:
        self.c, self.keys = c, keys
        self.total = intervals.exp(enclose_constant(c)) * keys


class WindowSum:
    """The first ``keys`` terms of a series, with B and every tail as intervals.

    Args:
        f: log-bias as an expression in n.
        keys: number of terms, at most :data:`MAX_WINDOW_TERMS`.
    """

    def __init__(self, f: sympy.Expr, keys: int) -> None:
        self.end = keys
        tails = [iv.mpf(0)]
        for n in reversed(range(keys)):
            tails.append(tails[-1] + intervals.exp(enclose(f, n)))
        self._tails = tails[::-1]
        self.total = self._tails[0]

    def tail(self, j: int) -> Any:
        """Return the interval of the sum of the terms from j on."""
        return self._tails[j]

    def far(self, log_n: Any) -> Any:
        """Return the tail beyond the last term, 0."""
        return iv.mpf(0)

    def initial_index(self, target: Any) -> int:
        """Return the j where a search for the tail ``target`` starts: tails are tabulated, so any j serves."""
        return self.end // 2


@functools.lru_cache(maxsize=256)
def certified_sum(f: sympy.Expr, level: int) -> EulerMaclaurinSum | DirectSum | None:
    """Return the enclosed sum of a convergent series, or None if no bound on its tails exists.

    Args:
        f: log-bias as an expression in n.
        level: k of the k-fold logarithm that decided the convergence.
    """
    if tail_bound(f, iv.mpf(_MAX_DOUBLINGS) * iv.log(2), level) is None:
        return None
    for first in _EXACT_TERMS:
        try:
            return EulerMaclaurinSum(f, level, first)
        except Undefined:
            continue
        except TooManyBlocks:
            break
    with contextlib.suppress(TooManyBlocks, Undefined):
        return DirectSum(f, level)
    return None
