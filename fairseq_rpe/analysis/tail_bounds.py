"""What Σ exp f(n) still holds far out, from the expansion of f."""

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import sympy

from fairseq_rpe.analysis.asymptotics import Scale
from fairseq_rpe.analysis.convergence_test import ORDERS, Thin, thin
from fairseq_rpe.analysis.expansions import (
    ONE,
    Expansion,
    Later,
    Monomial,
    Unknown,
    compare,
    exactly,
    level,
    summed,
    sure_sign,
    times,
)
from fairseq_rpe.analysis.intervals_complex import ball, interval, precisely
from fairseq_rpe.analysis.intervals_mp import Undefined, intervals, iv, number


def beyond(f: sympy.Expr, start: Any, decided: int) -> Callable[[Any], Any] | None:
    """Σ_{n >= m} exp f(n) as an interval, for every m = e^T with T >= start; None where no bound is known from there.

    ``f`` converges, as the level ``decided`` says; ``start`` is at least 3.

    The sum is within b_m of the integral, because the envelopes of f fall. The integral is known in closed form for
    f = -a·n^s - p·ln n - q·ln ln n + c (incomplete gamma functions); otherwise it is e^V/κ with V = f + ln n + …,
    whose slope in the last logarithm is between -κ and -κ'.
    """
    for order in ORDERS:
        with contextlib.suppress(Later, Unknown, Undefined):
            scale = Scale(start, order)
            e = scale(f)
            return _closed(e, scale) or _slopes(e, scale, decided)
    return None


def _closed(e: Expansion, scale: Scale) -> Callable[[Any], Any] | None:
    main = {m: c for m, c in e.terms.items() if compare(m, ONE) > 0}
    minor = [(m, scale.weight(c)) for m, c in e.terms.items() if compare(m, ONE) < 0] + ([e.error] if e.error else [])
    if any(c[0] != c[1] for c in main.values()) or any(not scale.falls(m) for m, _ in minor):
        return None
    power = [m for m in main if m[0] != 0]
    p, q, r = (-main.get(level(k), (sympy.S.Zero,))[0] for k in (1, 2, 3))
    known = {*power, level(1)} if power else {level(1), level(2), level(3)}
    if set(main) - known or len(power) > 1 or (power and power[0][1:] != ONE[1:]) or (r != 0 and (p != 1 or q != 1)):
        return None
    low, high = e.terms.get(ONE, (sympy.S.Zero,) * 2)
    a, s = (-main[power[0]][0], power[0][0]) if power else (sympy.S.Zero, sympy.S.One)
    rates = [number(v) for v in (a, s, p, q, r)]

    def tail(t: Any) -> Any:
        here = Scale(t, scale.order)
        slack = sum((c * here.size(m) for m, c in minor), iv.mpf(0)).b
        model = _exp([(m, c[0]) for m, c in main.items()], here)
        area = _integral(rates, t, a == 0 and p == 1, a == 0 and p == 1 and q == 1)
        wide = number(low) - slack, number(high) + slack
        return iv.mpf([(intervals.exp(wide[0]) * area).a, (intervals.exp(wide[1]) * (area + model)).b])

    if power:
        return None if sure_sign(p) < 0 else tail
    return None if any(sure_sign(v) < 0 for v in (p, q, r)) and _rate(e, scale, 1, 1)[0] <= -1 else tail


def _exp(terms: Thin, here: Scale) -> Any:
    return intervals.exp(sum((number(c) * here.size(m) for m, c in terms), iv.mpf(0)))


@precisely
def _integral(rates: Sequence[Any], t: Any, harmonic: bool, twice: bool) -> Any:
    """∫ of exp(-a·x^s)·x^-p·(ln x)^-q·(ln ln x)^-r from e^t on, in closed form."""
    a, s, p, q, r, t = (ball(v) for v in (*rates, t))
    if twice:
        value = t.log() ** (1 - r) / (r - 1)
    elif harmonic:
        value = t ** (1 - q) / (q - 1)
    elif a == 0 and q == 0:
        value = ((1 - p) * t).exp() / (p - 1)
    elif a == 0:
        value = (p - 1) ** (q - 1) * ((p - 1) * t).gamma_upper(1 - q)
    else:
        z = (1 - p) / s
        value = (a * (s * t).exp()).gamma_upper(z) / (s * a**z)
    return interval(value)


def _derivative(envelope: Thin, k: int) -> Iterator[tuple[Monomial, sympy.Expr]]:
    """d/dL_k of a sum of monomials, L_k the k-fold logarithm."""
    for m, c in envelope:
        for j, e in enumerate(m):
            if e != 0:
                factor = ONE
                for i in range(min(j + 1, k), max(j + 1, k)):
                    factor = times(factor, level(i), sympy.S.One if j + 1 < k else -sympy.S.One)
                yield times(m, factor), c * e


def _rate(e: Expansion, scale: Scale, side: int, k: int) -> tuple[Any, Any]:
    """Numbers κ' and κ with -κ <= dV/dL_k <= -κ' from here on, V = envelope + L_1 + … + L_k; κ may be ∞."""
    slope = _derivative([*thin(e, side), *((level(j), sympy.S.One) for j in range(1, k + 1))], k)
    found = scale.tidy(summed((m, exactly(c)) for m, c in slope), []).ordered()
    if not found:
        return iv.mpf(0), iv.mpf(0)
    (m, (c, _)), *rest = found
    if compare(m, ONE) < 0:
        return iv.mpf(0), iv.inf
    others = sum((scale.weight(d) * scale.ratio(p, m) for p, d in rest), iv.mpf(0)).b
    if sure_sign(c) > 0:
        return -iv.inf, iv.mpf(0)
    size = abs(number(c))
    rising = m != ONE and not scale.falls(m)
    least = (size.a - others) * (scale.size(m).a if rising else 1)
    return iv.mpf(least.a), iv.inf if rising else iv.mpf((size + others).b)


def _slopes(e: Expansion, scale: Scale, k: int) -> Callable[[Any], Any] | None:
    least, _ = _rate(e, scale, 1, k)
    if not least.a > 0:
        return None
    bounded = not any(c[0].is_infinite for c in e.terms.values())
    flat, most = _rate(e, scale, 0, k) if bounded else (iv.mpf(0), iv.inf)
    extra = [(level(j), sympy.S.One) for j in range(1, k + 1)]

    def tail(t: Any) -> Any:
        def value(terms: Thin) -> Any:
            return _exp(terms, Scale(t, scale.order))

        high = value([*thin(e, 1), *extra]) / least + value(thin(e, 1))
        if most == iv.inf or not flat.a > 0:
            return iv.mpf([0, high.b])
        return iv.mpf([(value([*thin(e, 0), *extra]) / most).a, high.b])

    return tail
