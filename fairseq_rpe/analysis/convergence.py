"""Proves for each head whether Σ_n b_n with b_n = exp(bias(n)) converges, with its limit B and receptive field.

Source: Qin, Zhong, Deng 2024, "Exploring Transformer Extrapolation" (arXiv 2307.10156), Theorems 0.3 and 0.4: where the
series converges, a window whose size does not depend on the position holds all but a fraction ε of every row's
attention. Distances n = i - j >= 0 are in tokens, log-biases are natural logarithms, and B starts at n = 0.

>>> head = verdict("alibi", heads=8)[0]
>>> head.decision, head.digits(), str(head.trf(0.01))
('converges', '2.54149408254', '10')
"""

import contextlib
import functools
import itertools
import math
from dataclasses import dataclass
from fractions import Fraction
from typing import Any

import mpmath
import numpy as np
import sympy
import torch
from torch import Tensor

from fairseq_rpe.analysis.asymptotics import LOG_STARTS, ORDERS, AsymptoticArithmetic, NotYetValid, Undecided
from fairseq_rpe.analysis.certified_sums import MAX_WINDOW_TERMS, FiniteSum, GeometricSum, WindowSum, certified_sum
from fairseq_rpe.analysis.convergence_test import (
    CONVERGES,
    DEPENDS,
    DIVERGES,
    UNDECIDED,
    decide_convergence,
    format_number,
)
from fairseq_rpe.analysis.empirical_receptive_field import check_epsilons
from fairseq_rpe.analysis.formula import N, parse
from fairseq_rpe.analysis.intervals_float import float_ranges
from fairseq_rpe.analysis.intervals_mp import Undefined, bounds, enclose, iv, sign
from fairseq_rpe.analysis.theoretical_receptive_field import ReceptiveField, Sum, receptive_field
from fairseq_rpe.core.errors import UserError
from fairseq_rpe.core.log_bias import LogBias
from fairseq_rpe.encodings import Encoding, build

LENGTH = 512  # training length for encodings that need one; no verdict depends on it
_DIGITS = 12
# the proof that a formula has values: n below this are checked one by one, …
_SINGLE_POINTS = 64
_DOUBLE_EXPONENT = 100  # … then ranges of doubles up to this log2 n, …
_MAX_OPEN_RANGES = 1 << 14  # … of which at most so many are open at a time, …
_MAX_INTERVALS = 4000  # … and at most so many intervals with more digits beyond them


@dataclass(frozen=True)
class HeadVerdict:
    """The proven verdict on one head.

    Attributes:
        decision: ``converges``, ``diverges``, ``undecided`` or ``depends on content``.
        reason: the test that decided, with its parameters, in one line.
        total: B and its tails, or None if no bound on them is known.
    """

    decision: str
    reason: str
    total: Sum | None = None

    @property
    def limit(self) -> tuple[Any, Any] | None:
        """Two mpmath numbers that bound B, or None if there is no B or no bound on it."""
        return None if self.total is None else bounds(self.total.total)

    def digits(self) -> str:
        """Return B with 12 digits, or with fewer and its uncertainty; "" if there is no B."""
        if self.limit is None:
            return ""
        if isinstance(self.total, FiniteSum) and self.total.c == 0:
            return str(self.total.keys)
        low, high = self.limit
        fixed = {"strip_zeros": False, "min_fixed": -5, "max_fixed": _DIGITS + 1}
        if (text := mpmath.nstr(low, _DIGITS, **fixed)) == mpmath.nstr(high, _DIGITS, **fixed):
            return text
        with mpmath.workprec(120):
            middle, half = (low + high) / 2, (high - low) / 2
            if not mpmath.isfinite(half):
                return f">= {mpmath.nstr(low, 6)}"
            digits = min(_DIGITS, int(mpmath.log10(middle / half)) + 2)
            if digits < 4:
                return f"{mpmath.nstr(low, 3)} to {mpmath.nstr(high, 3)}"
        return f"{mpmath.nstr(middle, digits)} ± {mpmath.nstr(half, 2)}"

    def trf(self, epsilon: float | Fraction) -> ReceptiveField | None:
        """Return the receptive field inf{ j : Σ_{t<j} b_t > B(1-ε) } (Eq. 22), or None if there is no bound on B.

        Args:
            epsilon: ε in (0, 1); a float is read as the decimal that it prints as, so 0.1 is exactly 1/10.
        """
        exact = epsilon if isinstance(epsilon, Fraction) else Fraction(repr(epsilon))
        check_epsilons([exact], "ε =")
        return None if self.total is None else receptive_field(self.total, exact)


def verdict(encoding: Encoding | str, heads: int = 8, head_width: int = 64) -> list[HeadVerdict]:
    """Return the verdict of each head.

    Args:
        encoding: an encoding, of which the current parameters count, or the spec of a new one.
        heads: number of heads of a new encoding.
        head_width: width D of each head of a new encoding.

    Returns:
        One verdict for each head.

    Raises:
        UserError: a parameter of the encoding is not finite.
    """
    if isinstance(encoding, str):
        encoding = build(encoding, heads, heads * head_width, LENGTH)
    for name, parameter in encoding.named_parameters():
        if not bool(parameter.isfinite().all()):
            raise UserError(f"parameter '{name}' of the encoding is not finite: no verdict on a broken checkpoint")
    weights, options = encoding.visible_log_bias_formulas(), encoding.attention_options
    if weights is None and options.hides_keys:
        return [HeadVerdict(CONVERGES, _finite_sum_reason(options.local or options.block))] * encoding.heads
    if weights is None and encoding.dependence:
        return [HeadVerdict(DEPENDS, encoding.dependence)] * encoding.heads
    if weights is None:
        reason = "no formula of the bias is known, and numbers at finitely many distances prove nothing"
        return [HeadVerdict(UNDECIDED, reason)] * encoding.heads
    return [_head_verdict(w if isinstance(w, LogBias) else LogBias(w)) for w in weights]


def formula_verdict(text: str) -> HeadVerdict:
    """Return the verdict on a formula for the log-bias.

    Raises:
        UserError: the formula does not parse, grows without bound, or has no real value at some distance n >= 0.
    """
    _parse_and_check(text)
    return _head_verdict(LogBias(text))


def formula_weights(text: str, keys: int) -> Tensor:
    """Return b_0 … b_(keys-1) of a formula, divided by the largest of them.

    Args:
        text: formula of the log-bias.
        keys: number of distances.

    Returns:
        (keys,) float64.

    Raises:
        UserError: as :func:`formula_verdict`.
    """
    n = np.arange(keys, dtype=np.float64)
    low, high = float_ranges(_parse_and_check(text), n, n)
    return scaled_weights(torch.from_numpy((low + high) / 2))


def scaled_weights(log_bias: Tensor) -> Tensor:
    """Return exp(bias) (…, m) in float64, divided by its largest value of a row; a row of -inf becomes 0."""
    log_bias = log_bias.double()
    largest = log_bias.amax(-1, keepdim=True)
    return (log_bias - largest.where(largest.isfinite(), torch.zeros_like(largest))).exp()


def _parse_and_check(text: str) -> sympy.Expr:
    """Return the expression of a formula that is bounded above and real at every n >= 0."""
    shown = " ".join(text.split())
    f = parse(text)
    if decide_convergence(f).grows:
        raise UserError(f"the formula '{shown}' grows without bound: a log-bias is a penalty; is a minus sign missing?")
    _check_domain(f, shown)
    return f


@functools.lru_cache(maxsize=1024)
def _head_verdict(weight: LogBias) -> HeadVerdict:
    f = parse(weight.formula, longest=None)
    note = f"; {weight.note}" if weight.note else ""
    if weight.keys is not None:
        return HeadVerdict(CONVERGES, _finite_sum_reason(weight.keys) + note, _finite_sum(f, weight))
    decision = decide_convergence(f)
    if weight.at_least:
        # by the comparison test, a lower bound of the bias proves divergence only
        if decision.verdict != DIVERGES:
            return HeadVerdict(UNDECIDED, f"only a lower bound of the bias is known{note}")
        reason = (
            f"comparison test with a lower bound: {decision.reason}" if f.has(N) else "term test: b_n does not go to 0"
        )
        return HeadVerdict(DIVERGES, reason + note)
    if decision.verdict != CONVERGES:
        return HeadVerdict(decision.verdict, decision.reason + note)
    if rate := _rate(f):
        c, k = rate
        start = f"e^{format_number(c)}·" if sign(c) != 0 else ""
        reason = f"geometric series: b_n = {start}e^(-k·n), k = {format_number(k)} > 0, B = {start}1/(1 - e^-k)"
        return HeadVerdict(CONVERGES, reason + note, GeometricSum(c, k))
    return HeadVerdict(CONVERGES, decision.reason + note, certified_sum(f, decision.level))


def _finite_sum_reason(keys: int) -> str:
    """Return why a series converges whose terms are 0 from the index ``keys`` on."""
    return f"finite sum: {keys} terms, b_n = 0 from n = {keys} on"


def _finite_sum(f: sympy.Expr, weight: LogBias) -> FiniteSum | WindowSum | None:
    """Return the sum of the terms that a query sees; None if f is only a bound, or if there are too many terms."""
    assert weight.keys is not None
    if weight.at_least:
        return None
    if not f.has(N):
        return FiniteSum(f, weight.keys)
    return WindowSum(f, weight.keys) if weight.keys <= MAX_WINDOW_TERMS else None


def _rate(f: sympy.Expr) -> tuple[sympy.Expr, sympy.Expr] | None:
    """Return (c, k) of f = c - k·n, or None for another f."""
    if any(p.has(N) for p in f.atoms(sympy.Pow)) or not f.is_polynomial(N):
        return None  # expanding a large power would take too long
    coefficients = sympy.Poly(f, N).all_coeffs()
    return (coefficients[1], -coefficients[0]) if len(coefficients) == 2 else None


def _check_domain(e: sympy.Expr, text: str) -> None:
    """Raise UserError unless the formula is proven to be real and below +∞ at every n >= 0; -∞, b_n = 0, is allowed.

    Numbers n below 64 are checked one by one. Ranges of larger ones are halved until intervals prove that the formula
    has values there. Beyond them the asymptotic expansion is the proof, as it exists only where the formula has values.
    """
    for n in range(_SINGLE_POINTS):
        _check_at(e, n, text)
    _check_ranges(e, [(1 << k, 2 << k) for k in range(_SINGLE_POINTS.bit_length() - 1, _DOUBLE_EXPONENT)], text)
    todo, tries = [(_DOUBLE_EXPONENT, _proved_from(e))], 0  # ranges of log2 n
    while todo:
        a, b = todo.pop()
        tries += 1
        if a < b and not _is_defined(e, iv.mpf([iv.mpf(2) ** a, iv.mpf(2) ** b])):
            if b - a == 1 or tries > _MAX_INTERVALS:
                raise UserError(f"the formula '{text}' cannot be shown to have a real value at every n from 2^{a} on")
            todo += [((a + b) // 2, b), (a, (a + b) // 2)]


def _proved_from(e: sympy.Expr) -> int:
    """Return log2 of the n from which an expansion holds, or of the last n tried if none does."""
    for start, order in itertools.product(LOG_STARTS, ORDERS):
        with contextlib.suppress(NotYetValid, Undecided, Undefined):
            AsymptoticArithmetic(start, order)(e)
            break
    return math.ceil(start / math.log(2))


def _is_defined(e: sympy.Expr, x: Any) -> bool:
    """Return whether e is proven to be real and below +∞ in the whole interval x."""
    with contextlib.suppress(Undefined):
        return bool(enclose(e, x).a < iv.inf)
    return False


def _check_at(e: sympy.Expr, n: int, text: str) -> None:
    """Raise UserError unless e is proven to be real and below +∞ at n."""
    try:
        value = enclose(e, n)
    except Undefined:
        raise UserError(f"the formula '{text}' has no real value at n = {n}, or none that can be shown") from None
    if value.b == iv.inf:
        raise UserError(f"the formula '{text}' is infinite at n = {n}: a log-bias must stay below ∞")


def _check_ranges(e: sympy.Expr, todo: list[tuple[int, int]], text: str) -> None:
    """Check that e is below ∞ at every n of the ranges low <= n <= high, which are halved where it is not proven."""
    while todo:
        low, high = np.array(todo, dtype=np.float64).T
        if len(todo) > _MAX_OPEN_RANGES:
            # a sample of some 256 ranges may show the n at which e has no value
            for n, _ in todo[:: _MAX_OPEN_RANGES >> 8]:
                _check_at(e, n, text)
            start, _ = todo[0]
            raise UserError(f"the formula '{text}' cannot be shown to have a real value at every n from {start} on")
        _, top = float_ranges(e, _round_outwards(low, -np.inf), _round_outwards(high, np.inf))
        bad = [todo[i] for i in np.flatnonzero(~(top < np.inf))]
        for n in (n for a, b in bad if b - a <= 1 for n in (a, b)):
            _check_at(e, n, text)
        todo = [half for a, b in bad if b - a > 1 for half in ((a, (a + b) // 2), ((a + b) // 2, b))]


def _round_outwards(near: Any, side: float) -> Any:
    """Round outwards beyond 2^53, where a whole number may lie between two doubles."""
    return np.where(near < 2.0**53, near, np.nextafter(near, side))
