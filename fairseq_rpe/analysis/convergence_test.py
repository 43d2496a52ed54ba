"""Does Σ exp f(n) converge? Decided from the expansion of f."""

import contextlib
import math
from dataclasses import dataclass

import mpmath
import sympy

from fairseq_rpe.analysis.asymptotics import Scale, upper
from fairseq_rpe.analysis.expansions import ONE, Expansion, Later, Monomial, Unknown, compare, exactly, level, sure_sign
from fairseq_rpe.analysis.intervals_mp import Undefined, ends, number

CONVERGES, DIVERGES, UNDECIDED = "converges", "diverges", "undecided"
DEPENDS = "depends on content"
STARTS = (64, 1024, 1 << 20)  # ln n from which on inequalities are tried
ORDERS = (1, 4)
Thin = list[tuple[Monomial, sympy.Expr]]
# on which side of convergence an envelope is, the level and the term that say so
Rank = tuple[str | None, int, Monomial | None, sympy.Expr]
_TESTS = {1: ("p-series test", "p"), 2: ("Bertrand's test", "q"), 3: ("De Morgan's test", "r")}


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
    found = Decision(UNDECIDED, "its growth cannot be compared with ln n, ln ln n, …")
    for order in ORDERS:
        for start in STARTS:
            with contextlib.suppress(Later):
                try:
                    found = _judge(Scale(start, order)(f))
                except (Unknown, Undefined) as error:
                    found = Decision(UNDECIDED, f"its growth cannot be told: {error}") if str(error) else found
                break
        if found.verdict != UNDECIDED:
            break
    return found


def thin(e: Expansion, side: int) -> Thin:
    """The upper (1) or lower (0) envelope of an expansion, the largest term first."""
    items = {m: exactly(c[side]) for m, c in e.terms.items()}
    if e.error:
        m, most = e.error[0], upper(e.error[1])
        items[m] = exactly(items.get(m, (0, 0))[0] + (most if side else -most))
    return [(m, c) for m, (c, _) in Expansion(items).ordered()]


def _rank(envelope: Thin) -> Rank:
    k = 1
    for m, c in envelope:
        if sure_sign(c) == 0:
            continue
        order = compare(m, level(k))
        side = 1 if order < 0 else sure_sign(c) if order > 0 else sure_sign(c + 1)
        if side:
            return CONVERGES if side < 0 else DIVERGES, k, m, c
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
        m, c = _lead(below)
        grows = compare(m, ONE) > 0 and sure_sign(c) > 0
        return Decision(DIVERGES, _why_diverges(low, below, exact), low[1], grows)
    if up[0] is None or low[0] is None:
        return Decision(UNDECIDED, f"f = {_sum(_logs(4))} + …: beyond four nested logarithms")
    between = f"{_sum([_lead(below)])} and {_sum([_lead(above)])}"
    return Decision(UNDECIDED, f"f lies between {between} (leading terms): comparison decides neither")


def _why_converges(rank: Rank, exact: bool, steep: bool) -> str:
    _, k, m, c = rank
    if steep:
        return f"comparison with n^-2: f < {_sum([(m, c)])} from some n on"
    sign, rest = ("=" if exact else "<="), "" if exact else ", the oscillating part is bounded"
    if m == level(k):
        name, letter = _TESTS[min(k, 3)]
        return f"{name}: f {sign} {_sum([*_logs(k - 1), (m, c)])} + …, {letter} = {show(-c)} > 1{rest}"
    if k == 1:
        return f"comparison with n^-2: f {sign} {_sum([(m, c)])} + … falls faster than any multiple of ln n{rest}"
    return f"Bertrand's test: f {sign} {_sum([*_logs(k - 1), (m, c)])} + …, which beats {_log(k)}{rest}"


def _why_diverges(rank: Rank, envelope: Thin, exact: bool) -> str:
    _, k, m, c = rank
    sign, rest = ("=" if exact else ">="), "" if exact else ", the oscillating part is bounded"
    lead = _lead(envelope)
    if compare(lead[0], ONE) > 0 and sure_sign(lead[1]) > 0:
        return f"term test: f {sign} {_sum([lead])} + … grows without bound"
    if compare(lead[0], ONE) <= 0:
        value = lead[1] if lead[0] == ONE else sympy.S.Zero
        limit = f"f -> {show(value)}" if exact else f"f >= {show(value)} - …"
        return f"term test: {limit}, so b_n does not go to 0{rest}"
    shown, value = _logs(k - 1), sympy.S.Zero
    if m is not None and compare(m, level(k)) >= 0:
        shown, value = [*shown, (m, c)], -c
    tail = f" + o({_log(k)})" if value == 0 else " + …"
    if k == 1 and m != level(1):
        return f"p-series test: f {sign} {_sum([lead])} + … falls slower than ln n{rest}"
    if m is not None and compare(m, level(k)) > 0:
        return f"Bertrand's test: f {sign} {_sum(shown)} + …, above -ln n - {_log(k)}{rest}"
    if k == 2 and value == 0:
        return f"harmonic series (p = 1): f {sign} {_sum(shown)}{tail}{rest}"
    name, letter = _TESTS[min(k - (value == 0), 3)]
    test = "1" if value == 0 else f"{show(value)} < 1"
    return f"{name}: f {sign} {_sum(shown)}{tail}, {letter} = {test}{rest}"


def _lead(envelope: Thin) -> tuple[Monomial, sympy.Expr]:
    return next(((m, c) for m, c in envelope if c != 0), (ONE, sympy.S.Zero))


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
    text = ""
    for m, c in items:
        size = show(abs(c))
        factors = [f"({size})" if " " in size else size, *(_powered(k, e) for k, e in enumerate(m) if e != 0)]
        shown = "·".join(factors[1:] if size == "1" and len(factors) > 1 else factors)
        text += f" {'-' if sure_sign(c) < 0 else '+'} {shown}"
    return "-" + text[3:] if text.startswith(" -") else text.removeprefix(" + ")


def _powered(k: int, e: sympy.Expr) -> str:
    return _log(k) if e == 1 else f"({_log(k)})^{show(e)}" if k else f"n^{show(e)}"
