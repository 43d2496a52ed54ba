"""Does Σ exp f(n) converge? Decided from the expansion of f, and what the series still holds far out."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import mpmath
import sympy

from .asymptotics import Scale, upper
from .enclosures import PRECISION, Balls, Undefined, ends, iv, number
from .expansions import ONE, Expansion, Later, Monomial, Unknown, compare, level, sure_sign, times

CONVERGES, DIVERGES, UNDECIDED = "converges", "diverges", "undecided"
STARTS = (64, 1024, 1 << 20)  # ln n from which on inequalities are tried
ORDERS = (1, 4)
Thin = list[tuple[Monomial, sympy.Expr]]


@dataclass(frozen=True)
class Decision:
    """A verdict with the test that gave it; ``level``: of the logarithm that decided, 1 is ln n."""

    verdict: str
    reason: str
    level: int = 1
    grows: bool = False  # f -> +oo


def decide(f: sympy.Expr) -> Decision:
    """The verdict on Σ exp f(n), by the logarithmic scale of tests (p-series, Bertrand, De Morgan).

    f is compared with -ln n, -ln n - ln ln n, … in turn; at the first difference, a coefficient below -1 converges and
    one above diverges. Where a part oscillates, f is held between two such functions and both must agree.
    """
    reason = "its growth cannot be compared with ln n, ln ln n, …"
    for order in ORDERS:
        for start in STARTS:
            try:
                found = _judge(Scale(start, order)(f))
            except Later:
                continue
            except (Unknown, Undefined) as error:
                if str(error):
                    reason = f"its growth cannot be told: {error}"
                break
            if found.verdict != UNDECIDED:
                return found
            reason = found.reason
            break
    return Decision(UNDECIDED, reason)


def thin(e: Expansion, side: int) -> Thin:
    """The upper (1) or lower (0) envelope of an expansion, the largest term first."""
    items = {m: c[side] for m, c in e.terms.items()}
    if e.error:
        most = upper(e.error[1])
        items[e.error[0]] = items.get(e.error[0], sympy.S.Zero) + (most if side else -most)
    return [(m, c) for m, (c, _) in Expansion({m: (c, c) for m, c in items.items()}).ordered()]


def _rank(envelope: Thin) -> tuple[str | None, int, Monomial | None, sympy.Expr]:
    """On which side of convergence an envelope is, the level and the term that say so."""
    k = 1
    for m, c in envelope:
        if sure_sign(c) == 0:
            continue
        if compare(m, level(k)) < 0:
            return DIVERGES, k, m, c
        if compare(m, level(k)) > 0:
            return (CONVERGES if sure_sign(c) < 0 else DIVERGES), k, m, c
        side = sure_sign(c + 1)
        if side:
            return (CONVERGES if side < 0 else DIVERGES), k, m, c
        k += 1
        if k > 4:
            return None, k, m, c
    return DIVERGES, k, None, sympy.S.Zero


def _judge(e: Expansion) -> Decision:
    above, below = thin(e, 1), thin(e, 0)
    up, low = _rank(above), _rank(below)
    exact = all(c[0] == c[1] for m, c in e.terms.items() if compare(m, ONE) >= 0)
    if up[0] == CONVERGES:
        return Decision(CONVERGES, _why_converges(up, exact, below[0][1].is_infinite), up[1])
    if low[0] == DIVERGES:
        lead = next(((m, c) for m, c in below if c != 0), None)
        grows = lead is not None and compare(lead[0], ONE) > 0 and sure_sign(lead[1]) > 0
        return Decision(DIVERGES, _why_diverges(low, below, exact), low[1], grows)
    if up[0] is None or low[0] is None:
        return Decision(UNDECIDED, f"f = {_sum(_logs(4))} + …: beyond four nested logarithms")
    return Decision(
        UNDECIDED,
        f"f lies between {_sum(_lead(below))} and {_sum(_lead(above))} (leading terms): comparison decides neither",
    )


def _why_converges(rank: tuple[str | None, int, Monomial | None, sympy.Expr], exact: bool, steep: bool) -> str:
    _, k, m, c = rank
    if steep:
        return f"comparison with n^-2: f < {_sum([(m, c)])} from some n on"
    sign, rest = ("=" if exact else "<="), "" if exact else ", the oscillating part is bounded"
    if m == level(k):
        name, letter = (
            ("p-series test", "p") if k == 1 else ("Bertrand's test", "q") if k == 2 else ("De Morgan's test", "r")
        )
        return f"{name}: f {sign} {_sum([*_logs(k - 1), (m, c)])} + …, {letter} = {show(-c)} > 1{rest}"
    if k == 1:
        return f"comparison with n^-2: f {sign} {_sum([(m, c)])} + … falls faster than any multiple of ln n{rest}"
    return f"Bertrand's test: f {sign} {_sum([*_logs(k - 1), (m, c)])} + …, which beats {_log(k)}{rest}"


def _why_diverges(rank: tuple[str | None, int, Monomial | None, sympy.Expr], envelope: Thin, exact: bool) -> str:
    _, k, m, c = rank
    sign, rest = ("=" if exact else ">="), "" if exact else ", the oscillating part is bounded"
    lead = next(((p, d) for p, d in envelope if d != 0), (ONE, sympy.S.Zero))
    if compare(lead[0], ONE) <= 0 or sure_sign(lead[1]) > 0:
        if compare(lead[0], ONE) > 0:
            return f"term test: f {sign} {_sum([lead])} + … grows without bound"
        value = lead[1] if lead[0] == ONE else sympy.S.Zero
        limit = f"f -> {show(value)}" if exact else f"f >= {show(value)} - …"
        return f"term test: {limit}, so b_n does not go to 0{rest}"
    if m == level(k) or (m is not None and compare(m, level(k)) > 0):
        shown, value = [*_logs(k - 1), (m, c)], -c
    else:
        shown, value = _logs(k - 1), sympy.S.Zero
    tail = f" + o({_log(k)})" if value == 0 else " + …"
    if k == 1:
        if m == level(1):
            return f"p-series test: f {sign} {_sum(shown)} + …, p = {show(value)} < 1{rest}"
        return f"p-series test: f {sign} {_sum([lead])} + … falls slower than ln n{rest}"
    if m is not None and compare(m, level(k)) > 0:
        return f"Bertrand's test: f {sign} {_sum(shown)} + …, above -ln n - {_log(k)}{rest}"
    name = "harmonic series (p = 1)" if k == 2 and value == 0 else "Bertrand's test" if k == 2 else "De Morgan's test"
    letter = "q" if k == 2 else "r"
    test = "" if k == 2 and value == 0 else f", {letter} = {show(value)} < 1"
    if k >= 3 and value == 0:
        name, test = "Bertrand's test" if k == 3 else "De Morgan's test", f", {'q' if k == 3 else 'r'} = 1"
    return f"{name}: f {sign} {_sum(shown)}{tail}{test}{rest}"


def _lead(envelope: Thin) -> Thin:
    return next(([(m, c)] for m, c in envelope if c != 0), [(ONE, sympy.S.Zero)])


def _logs(count: int) -> Thin:
    return [(level(k), -sympy.S.One) for k in range(1, count + 1)]


def _log(k: int) -> str:
    return "ln " * k + "n"


def show(c: sympy.Expr) -> str:
    """A number with six digits, or with as many as tell it from 1."""
    value = number(c)
    middle = float(ends(value)[0]) if c.is_finite else float(c)
    if math.isinf(middle) and c.is_finite:
        return mpmath.nstr(ends(value)[0], 6)
    for digits in (6, 12, 17):
        text = f"{middle:.{digits}g}"
        if text not in ("1", "-1") or c in (1, -1):
            return text
    apart = abs(c) - 1
    size = mpmath.nstr(ends(number(abs(apart)))[0], 3)
    return f"{'-' if middle < 0 else ''}1 {'+' if sure_sign(apart) > 0 else '-'} {size}"


def _sum(items: Thin) -> str:
    parts = []
    for m, c in items:
        powers = [(_log(k), e) for k, e in enumerate(m) if e != 0]
        shown = "·".join(_powered(name, e) for name, e in powers)
        size = show(abs(c))
        size = f"({size})" if " " in size else size
        text = shown if size == "1" and shown else f"{size}·{shown}" if shown else size
        parts.append(("-" if sure_sign(c) < 0 else "+") + " " + text)
    text = " ".join(parts)
    return "-" + text[2:] if text.startswith("-") else text.removeprefix("+ ")


def _powered(name: str, e: sympy.Expr) -> str:
    if e == 1:
        return name
    return f"{name if name == 'n' else f'({name})'}^{show(e)}"


def beyond(f: sympy.Expr, start: Any, decided: int) -> Callable[[Any], Any] | None:
    """Σ_{n >= m} exp f(n) as an interval, for every m = e^T with T >= start; None where no bound is known from there.

    Args:
        f: a convergent log-weight.
        start: T, at least 3.
        decided: the level that decided its convergence.

    The sum is within b_m of the integral, because the envelopes of f fall. The integral is known in closed form for
    f = -a·n^s - p·ln n - q·ln ln n + c (incomplete gamma functions); otherwise it is e^V/κ with V = f + ln n + …,
    whose slope in the last logarithm is between -κ and -κ'.
    """
    for order in ORDERS:
        try:
            scale = Scale(start, order)
            e = scale(f)
            return _closed(e, scale) or _slopes(e, scale, decided)
        except (Later, Unknown, Undefined):
            continue
    return None


def _closed(e: Expansion, scale: Scale) -> Callable[[Any], Any] | None:
    main = {m: c for m, c in e.terms.items() if compare(m, ONE) > 0}
    minor = [(m, scale.weight(c)) for m, c in e.terms.items() if compare(m, ONE) < 0]
    if e.error:
        minor.append(e.error)
    if any(c[0] != c[1] for c in main.values()) or any(not scale.falls(m) for m, _ in minor):
        return None
    power = [m for m in main if m[0] != 0]
    p, q, r = (-main.get(level(k), (sympy.S.Zero,))[0] for k in (1, 2, 3))
    known = {*power, level(1)} if power else {level(1), level(2), level(3)}
    if set(main) - known or len(power) > 1 or (power and power[0][1:] != ONE[1:]):
        return None
    if r != 0 and (p != 1 or q != 1):
        return None
    low, high = e.terms.get(ONE, (sympy.S.Zero,) * 2)
    a, s = (-main[power[0]][0], power[0][0]) if power else (sympy.S.Zero, sympy.S.One)
    rates = [number(v) for v in (a, s, p, q, r)]

    def tail(t: Any) -> Any:
        here = Scale(t, scale.order)
        slack = sum((c * here.size(m) for m, c in minor), iv.mpf(0)).b
        model = Balls.exp(sum((number(c[0]) * here.size(m) for m, c in main.items()), iv.mpf(0)))
        area = _integral(*rates, t, a == 0 and p == 1, a == 0 and p == 1 and q == 1)
        wide = number(low) - slack, number(high) + slack
        return iv.mpf([(Balls.exp(wide[0]) * area).a, (Balls.exp(wide[1]) * (area + model)).b])

    falls = [(p, level(0)), (q, level(1)), (r, level(2))]
    if not power and any(sure_sign(v) < 0 for v, _ in falls) and _rate(e, scale, 1, 1)[0] <= -1:
        return None
    if power and sure_sign(p) < 0:
        return None
    return tail


def _integral(a: Any, s: Any, p: Any, q: Any, r: Any, t: Any, harmonic: bool, twice: bool) -> Any:
    """∫ of exp(-a·x^s)·x^-p·(ln x)^-q·(ln ln x)^-r from e^t on; mpmath's special functions with digits to spare."""
    with mpmath.workprec(PRECISION + 60):
        a, s, p, q, r, t = (mpmath.mpf(v.mid) for v in (a, s, p, q, r, t))
        swing = 1 + (1 + abs(p) + abs(q) + abs(r)) * t
        if twice:
            value = mpmath.log(t) ** (1 - r) / (r - 1)
            swing += 1 / abs(r - 1)
        elif harmonic:
            value = t ** (1 - q) / (q - 1)
            swing += 1 / abs(q - 1)
        elif a == 0:
            value = (
                mpmath.exp((1 - p) * t) / (p - 1)
                if q == 0
                else (p - 1) ** (q - 1) * mpmath.gammainc(1 - q, (p - 1) * t)
            )
            swing += (1 + abs(q)) / abs(p - 1)
        else:
            z, x = (1 - p) / s, a * mpmath.exp(s * t)
            value = mpmath.gammainc(z, x) / (s * a**z)
            swing += x * (1 + s * t) + (1 + abs(z)) * (1 + abs(mpmath.log(a)) + 1 / s)
        value = mpmath.re(value)
    # the rates are rounded to PRECISION bits; swing bounds how strongly the value follows them
    return iv.mpf(value) * Balls.exp(iv.mpf([-1, 1]) * iv.mpf(swing) * iv.mpf(2) ** -100)


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
    total: dict[Monomial, sympy.Expr] = {}
    for m, c in _derivative([*thin(e, side), *((level(j), sympy.S.One) for j in range(1, k + 1))], k):
        total[m] = total.get(m, sympy.S.Zero) + c
    found = scale.tidy({m: (c, c) for m, c in total.items()}, [])
    if not found.terms:
        return iv.mpf(0), iv.mpf(0)
    (m, (c, _)), *rest = found.ordered()
    if compare(m, ONE) < 0:
        return iv.mpf(0), iv.inf
    others = sum((scale.weight(d) * scale.ratio(p, m) for p, d in rest), iv.mpf(0)).b
    if sure_sign(c) > 0:
        return -iv.inf, iv.mpf(0)
    size = abs(number(c))
    rising = m != ONE and not scale.falls(m)
    return iv.mpf(((size.a - others) * (scale.size(m).a if rising else 1)).a), iv.inf if rising else iv.mpf(
        (size + others).b
    )


def _slopes(e: Expansion, scale: Scale, k: int) -> Callable[[Any], Any] | None:
    least, _ = _rate(e, scale, 1, k)
    if not least.a > 0:
        return None
    bounded = not any(c[0].is_infinite for c in e.terms.values())
    flat, most = _rate(e, scale, 0, k) if bounded else (iv.mpf(0), iv.inf)
    extra = [(level(j), sympy.S.One) for j in range(1, k + 1)]

    def tail(t: Any) -> Any:
        here = Scale(t, scale.order)

        def value(terms: Thin) -> Any:
            return sum((number(c) * here.size(m) for m, c in terms), iv.mpf(0))

        high = Balls.exp(value([*thin(e, 1), *extra])) / least + Balls.exp(value(thin(e, 1)))
        if most == iv.inf or not flat.a > 0:
            return iv.mpf([0, high.b])
        return iv.mpf([(Balls.exp(value([*thin(e, 0), *extra])) / most).a, high.b])

    return tail
