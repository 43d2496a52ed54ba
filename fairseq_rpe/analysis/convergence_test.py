"""Decides whether Σ exp f(n) converges, from the asymptotic expansion of f."""

import contextlib
import math
from dataclasses import dataclass
from typing import NamedTuple

import mpmath
import sympy

from fairseq_rpe.analysis.asymptotics import (
    LOG_STARTS,
    ONE,
    ORDERS,
    AsymptoticArithmetic,
    Envelope,
    Expansion,
    Monomial,
    NotYetValid,
    Undecided,
    compare,
    iterated_log,
    require_sign,
)
from fairseq_rpe.analysis.intervals_mp import Undefined, bounds, enclose_constant

CONVERGES, DIVERGES, UNDECIDED = "converges", "diverges", "undecided"
DEPENDS = "depends on content"
_TESTS = {1: ("p-series test", "p"), 2: ("Bertrand's test", "q"), 3: ("De Morgan's test", "r")}  # name, parameter
_MAX_LOGS = 4  # tests that are tried


class Rank(NamedTuple):
    """Verdict on an envelope.

    Attributes:
        verdict: ``converges``, ``diverges`` or None.
        level: k of the test that decided (k-fold logarithm).
        monomial: the term that decided, None if the envelope ends before.
        coefficient: its coefficient.
    """

    verdict: str | None
    level: int
    monomial: Monomial | None
    coefficient: sympy.Expr


@dataclass(frozen=True)
class Decision:
    """A verdict on Σ exp f(n).

    Attributes:
        verdict: ``converges``, ``diverges`` or ``undecided``.
        reason: the test that decided, with its parameters, in one line.
        level: k of the k-fold logarithm that decided; 1 is ln n.
        grows: whether f tends to +∞.
    """

    verdict: str
    reason: str
    level: int = 1
    grows: bool = False


def decide_convergence(f: sympy.Expr) -> Decision:
    """Decide whether Σ exp f(n) converges, by the logarithmic scale of tests (p-series, Bertrand, De Morgan).

    f is compared with -ln n, -ln n - ln ln n, … in turn. At the first difference, a coefficient below -1 proves
    convergence and one above -1 proves divergence. Where f oscillates, it lies between two such functions (comparison
    test), and the upper one must converge or the lower one diverge.

    Args:
        f: log-bias as an expression in n.

    Returns:
        The verdict; undecided if no expansion of f is proven.
    """
    decision = Decision(UNDECIDED, "its growth cannot be compared with ln n, ln ln n, …")
    for order in ORDERS:
        for start in LOG_STARTS:
            with contextlib.suppress(NotYetValid):
                try:
                    decision = _compare_envelopes(AsymptoticArithmetic(start, order)(f))
                except (Undecided, Undefined) as error:
                    reason = f"its growth cannot be determined: {error}"
                    decision = Decision(UNDECIDED, reason) if str(error) else decision
                break
        if decision.verdict != UNDECIDED:
            break
    return decision


def _rank(envelope: Envelope) -> Rank:
    """Return the verdict on an envelope by the first term that differs from -L_1 - L_2 - …, L_k the k-fold log."""
    k = 1
    for m, c in envelope:
        if require_sign(c) == 0:
            continue
        order = compare(m, iterated_log(k))
        # a larger term decides by its sign, the term in L_k by its coefficient c < -1 or c > -1; without a term in L_k
        # the coefficient is 0 > -1; c = -1 is a tie, which the next logarithm breaks
        side = 1 if order < 0 else require_sign(c) if order > 0 else require_sign(c + 1)
        if side:
            return Rank(CONVERGES if side < 0 else DIVERGES, k, m, c)
        k += 1
        if k > _MAX_LOGS:
            return Rank(None, k, m, c)
    return Rank(DIVERGES, k, None, sympy.S.Zero)


def _compare_envelopes(e: Expansion) -> Decision:
    """Decide by the functions above and below f: the upper one converges or the lower one diverges."""
    above, below = e.envelope(1), e.envelope(0)
    upper, lower = _rank(above), _rank(below)
    # "=" in the reason only where no growing term and no constant is an interval
    exact = all(low == high for m, (low, high) in e.terms.items() if compare(m, ONE) >= 0)
    if upper.verdict == CONVERGES:
        _, lower_coefficient = below[0]
        return Decision(CONVERGES, _why_converges(upper, exact, lower_coefficient.is_infinite), upper.level)
    if lower.verdict == DIVERGES:
        m, c = _leading_term(below)
        grows = compare(m, ONE) > 0 and require_sign(c) > 0
        return Decision(DIVERGES, _why_diverges(lower, below, exact), lower.level, grows)
    if upper.verdict is None or lower.verdict is None:
        return Decision(UNDECIDED, f"f = {_format_sum(_log_terms(_MAX_LOGS))} + …: beyond four nested logarithms")
    between = f"{_format_sum([_leading_term(below)])} and {_format_sum([_leading_term(above)])}"
    return Decision(UNDECIDED, f"f lies between {between} (leading terms): comparison decides neither")


def _why_converges(rank: Rank, exact: bool, steep: bool) -> str:
    """Return the reason of a convergence.

    Args:
        rank: verdict on the upper envelope.
        exact: whether f equals its expansion up to falling terms, so that the reason has "=".
        steep: whether only an upper bound of f is known, as for -e^n, which has no lower envelope with finite terms.
    """
    _, k, m, c = rank
    if steep:
        return f"comparison with n^-2: f < {_format_sum([(m, c)])} from some n on"
    sign, suffix = ("=" if exact else "<="), "" if exact else ", the oscillating part is bounded"
    bound = f"f {sign} {_format_sum([*_log_terms(k - 1), (m, c)])} + …"
    if m == iterated_log(k):
        name, letter = _TESTS[min(k, 3)]
        return f"{name}: {bound}, {letter} = {format_number(-c)} > 1{suffix}"
    if k == 1:
        return f"comparison with n^-2: {bound} falls faster than any multiple of ln n{suffix}"
    return f"Bertrand's test: {bound}, which beats {_format_log(k)}{suffix}"


def _why_diverges(rank: Rank, envelope: Envelope, exact: bool) -> str:
    """Return the reason of a divergence: term test, p-series, harmonic series, Bertrand's or De Morgan's test.

    Args:
        rank: verdict on the lower envelope.
        envelope: the lower envelope.
        exact: as in :func:`_why_converges`.
    """
    _, k, m, c = rank
    sign, suffix = ("=" if exact else ">="), "" if exact else ", the oscillating part is bounded"
    lead = lead_monomial, lead_coefficient = _leading_term(envelope)
    if compare(lead_monomial, ONE) > 0 and require_sign(lead_coefficient) > 0:
        return f"term test: f {sign} {_format_sum([lead])} + … grows without bound"
    if compare(lead_monomial, ONE) <= 0:
        value = lead_coefficient if lead_monomial == ONE else sympy.S.Zero
        limit = f"f -> {format_number(value)}" if exact else f"f >= {format_number(value)} - …"
        return f"term test: {limit}, so b_n does not go to 0{suffix}"
    # value: minus the coefficient of the term that decided, 0 if there is no such term
    shown, value = _log_terms(k - 1), sympy.S.Zero
    if m is not None and compare(m, iterated_log(k)) >= 0:
        shown, value = [*shown, (m, c)], -c
    tail = f" + o({_format_log(k)})" if value == 0 else " + …"
    if k == 1 and m != iterated_log(1):
        return f"p-series test: f {sign} {_format_sum([lead])} + … falls slower than ln n{suffix}"
    if m is not None and compare(m, iterated_log(k)) > 0:
        return f"Bertrand's test: f {sign} {_format_sum(shown)} + …, above -ln n - {_format_log(k)}{suffix}"
    if k == 2 and value == 0:
        return f"harmonic series (p = 1): f {sign} {_format_sum(shown)}{tail}{suffix}"
    name, letter = _TESTS[min(k - (value == 0), 3)]
    test = "1" if value == 0 else f"{format_number(value)} < 1"
    return f"{name}: f {sign} {_format_sum(shown)}{tail}, {letter} = {test}{suffix}"


def _leading_term(envelope: Envelope) -> tuple[Monomial, sympy.Expr]:
    """Return the largest term (monomial, coefficient) that is not zero."""
    return next(((m, c) for m, c in envelope if c != 0), (ONE, sympy.S.Zero))


def _log_terms(count: int) -> Envelope:
    """Return the terms -ln n - ln ln n - …, ``count`` of them."""
    return [(iterated_log(k), -sympy.S.One) for k in range(1, count + 1)]


def _format_log(k: int) -> str:
    """Return the k-fold logarithm of n as text."""
    return "ln " * k + "n"


def format_number(c: sympy.Expr) -> str:
    """Return a constant as text with six digits, or with as many as distinguish it from 1 and -1."""
    value = enclose_constant(c)
    middle = float(bounds(value)[0]) if c.is_finite else float(c)
    if math.isinf(middle) and c.is_finite:
        return mpmath.nstr(bounds(value)[0], 6)
    for digits in (6, 12, 17):
        text = f"{middle:.{digits}g}"
        if text not in ("1", "-1") or c in (1, -1):
            return text
    difference = abs(c) - 1
    size = mpmath.nstr(bounds(enclose_constant(abs(difference)))[0], 3)
    return f"{'-' if middle < 0 else ''}1 {'+' if require_sign(difference) > 0 else '-'} {size}"


def _format_sum(items: Envelope) -> str:
    """Return a sum of terms as text, as in ``-ln n - 2·ln ln n``."""
    text = ""
    for m, c in items:
        size = format_number(abs(c))
        factors = [f"({size})" if " " in size else size, *(_format_power(k, e) for k, e in enumerate(m) if e != 0)]
        shown = "·".join(factors[1:] if size == "1" and len(factors) > 1 else factors)
        text += f" {'-' if require_sign(c) < 0 else '+'} {shown}"
    return "-" + text[3:] if text.startswith(" -") else text.removeprefix(" + ")


def _format_power(k: int, e: sympy.Expr) -> str:
    return _format_log(k) if e == 1 else f"({_format_log(k)})^{format_number(e)}" if k else f"n^{format_number(e)}"
