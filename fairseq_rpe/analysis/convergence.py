"""Does Σ_n b_n, b_n = exp(bias(n)), converge? The verdict for each head, its limit B and its receptive field.

Source: Qin, Zhong, Deng 2024, "Exploring Transformer Extrapolation" (arXiv 2307.10156), Theorems 0.3 and 0.4: where the
series converges, a window that does not depend on the position holds all but a part ε of every row's attention.
Distances n = i - j >= 0 are in tokens, log-biases are natural logarithms, and B counts from n = 0.

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

from fairseq_rpe.analysis.asymptotics import Scale
from fairseq_rpe.analysis.certified_sums import Finite, Geometric, summed
from fairseq_rpe.analysis.convergence_test import CONVERGES, DEPENDS, DIVERGES, ORDERS, STARTS, UNDECIDED, decide, show
from fairseq_rpe.analysis.empirical_receptive_field import check_epsilons
from fairseq_rpe.analysis.expansions import Later, Unknown
from fairseq_rpe.analysis.formula import N, parse
from fairseq_rpe.analysis.intervals_float import ranges
from fairseq_rpe.analysis.intervals_mp import Undefined, enclose, ends, iv, sign
from fairseq_rpe.analysis.theoretical_receptive_field import Sum, Trf, trf
from fairseq_rpe.core.errors import UserError
from fairseq_rpe.core.log_bias import LogBias
from fairseq_rpe.encodings import Encoding, build

LENGTH = 512  # training length handed to encodings that want one; no verdict depends on it
_DIGITS = 12
_ONE_BY_ONE, _DOUBLES = 64, 100  # numbers; exponent of 2 up to which ranges of doubles serve
_OPEN, _TRIES = 1 << 14, 4000  # ranges that may still be open at a time; intervals beyond the doubles


@dataclass(frozen=True)
class HeadVerdict:
    """What is proved about one head: ``converges``, ``diverges`` or ``undecided``.

    ``reason``: the test that decided and the parameters that it looked at, in one line; ``total``: B and its tails
    where a bound on them is known.
    """

    decision: str
    reason: str
    total: Sum | None = None

    @property
    def limit(self) -> tuple[Any, Any] | None:
        """Two mpmath numbers that B lies between; None where there is no B or no bound on it."""
        return None if self.total is None else ends(self.total.total)

    def digits(self) -> str:
        """B with 12 digits, or fewer and the half-width of its bracket; "" where there is none."""
        if self.limit is None:
            return ""
        if isinstance(self.total, Finite) and self.total.c == 0:
            return str(self.total.keys)
        low, high = self.limit
        fixed = {"strip_zeros": False, "min_fixed": -5, "max_fixed": _DIGITS + 1}
        if (text := mpmath.nstr(low, _DIGITS, **fixed)) == mpmath.nstr(high, _DIGITS, **fixed):
            return text
        with mpmath.workprec(120):
            middle, half = (low + high) / 2, (high - low) / 2
            if not mpmath.isfinite(half):
                return f">= {mpmath.nstr(low, 6)}"
            shown = min(_DIGITS, int(mpmath.log10(middle / half)) + 2)
            if shown < 4:
                return f"{mpmath.nstr(low, 3)} to {mpmath.nstr(high, 3)}"
        return f"{mpmath.nstr(middle, shown)} ± {mpmath.nstr(half, 2)}"

    def trf(self, epsilon: float | Fraction) -> Trf | None:
        """inf{ j : Σ_{t<j} b_t > B(1-ε) } (Eq. 22); None where B does not exist or no bound on it is known.

        A float stands for the decimal that it is written as: 0.1 is 1/10.
        """
        exact = epsilon if isinstance(epsilon, Fraction) else Fraction(repr(epsilon))
        check_epsilons([exact], "ε =")
        return None if self.total is None else trf(self.total, exact)


def verdict(encoding: Encoding | str, heads: int = 8, head_width: int = 64) -> list[HeadVerdict]:
    """The verdict of each head of an encoding with its present parameters, or of a fresh one that a spec names."""
    if isinstance(encoding, str):
        encoding = build(encoding, heads, heads * head_width, LENGTH)
    for name, parameter in encoding.named_parameters():
        if not bool(parameter.isfinite().all()):
            raise UserError(f"parameter '{name}' of the encoding is not finite: no verdict on a broken checkpoint")
    weights = encoding.log_bias_formulas()
    if weights is None and encoding.dependence:
        return [HeadVerdict(DEPENDS, encoding.dependence)] * encoding.heads
    if weights is None:
        reason = "no formula of the bias is known, and numbers at finitely many distances prove nothing"
        return [HeadVerdict(UNDECIDED, reason)] * encoding.heads
    return [_judge(w if isinstance(w, LogBias) else LogBias(w)) for w in weights]


def verdict_of_formula(text: str) -> HeadVerdict:
    """The verdict of a formula for the log-bias; refuses what grows, or has no real value at some distance n >= 0."""
    _checked(text)
    return _judge(LogBias(text))


def weights_of_formula(text: str, keys: int) -> Tensor:
    """b_0 … b_(keys-1) of a formula, in double precision; refuses what :func:`verdict_of_formula` refuses."""
    n = np.arange(keys, dtype=np.float64)
    low, high = ranges(_checked(text), n, n)
    return torch.from_numpy(np.exp((low + high) / 2))


def _checked(text: str) -> sympy.Expr:
    shown = " ".join(text.split())
    f = parse(text)
    if decide(f).grows:
        raise UserError(f"the formula '{shown}' grows without bound: a log-bias is a penalty; is a minus sign missing?")
    _check_domain(f, shown)
    return f


@functools.lru_cache(maxsize=1024)
def _judge(weight: LogBias) -> HeadVerdict:
    f = parse(weight.formula, longest=None)
    note = f"; {weight.note}" if weight.note else ""
    if weight.keys is not None and not f.has(N):
        reason = f"finite sum: {weight.keys} terms, b_n = 0 from n = {weight.keys} on"
        return HeadVerdict(CONVERGES, reason + note, Finite(f, weight.keys))
    found = decide(f)
    if weight.at_least:
        if found.verdict != DIVERGES or f.has(N):
            return HeadVerdict(UNDECIDED, f"only a lower bound of the bias is known{note}")
        return HeadVerdict(DIVERGES, f"term test: b_n does not go to 0{note}")
    if found.verdict != CONVERGES:
        return HeadVerdict(found.verdict, found.reason + note)
    if rate := _rate(f):
        c, k = rate
        start = f"e^{show(c)}·" if sign(c) != 0 else ""
        reason = f"geometric series: b_n = {start}e^(-k·n), k = {show(k)} > 0, B = {start}1/(1 - e^-k)"
        return HeadVerdict(CONVERGES, reason + note, Geometric(c, k))
    return HeadVerdict(CONVERGES, found.reason + note, summed(f, found.level))


def _rate(f: sympy.Expr) -> tuple[sympy.Expr, sympy.Expr] | None:
    """(c, k) of f = c - k·n; None where f has another shape."""
    if any(p.has(N) for p in f.atoms(sympy.Pow)) or not f.is_polynomial(N):
        return None  # no power is written out: it may be a large one
    parts = sympy.Poly(f, N).all_coeffs()
    return (parts[1], -parts[0]) if len(parts) == 2 else None


def _check_domain(e: sympy.Expr, text: str) -> None:
    """Refuse a formula that is complex, undefined or +∞ at some n, or of which that cannot be ruled out; b_n = 0 at -∞.

    The numbers up to 63 are tried one by one, ranges of larger ones are halved until intervals prove that the
    formula has values there. Far out its expansion is the proof, which exists only where the formula has values.
    """
    for n in range(_ONE_BY_ONE):
        _check_at(e, n, text)
    _check_ranges(e, [(1 << k, 2 << k) for k in range(_ONE_BY_ONE.bit_length() - 1, _DOUBLES)], text)
    todo, tries = [(_DOUBLES, _proved_from(e))], 0
    while todo:
        a, b = todo.pop()
        tries += 1
        if a < b and not _defined(e, iv.mpf([iv.mpf(2) ** a, iv.mpf(2) ** b])):
            if b - a == 1 or tries > _TRIES:
                raise UserError(f"the formula '{text}' cannot be shown to have a real value at every n from 2^{a} on")
            todo += [((a + b) // 2, b), (a, (a + b) // 2)]


def _proved_from(e: sympy.Expr) -> int:
    """The exponent of 2 from which an expansion holds, or could at best."""
    for start, order in itertools.product(STARTS, ORDERS):
        with contextlib.suppress(Later, Unknown, Undefined):
            Scale(start, order)(e)
            break
    return math.ceil(start / math.log(2))


def _defined(e: sympy.Expr, x: Any) -> bool:
    with contextlib.suppress(Undefined):
        return bool(enclose(e, x).a < iv.inf)
    return False


def _check_at(e: sympy.Expr, n: int, text: str) -> None:
    try:
        value = enclose(e, n)
    except Undefined:
        raise UserError(f"the formula '{text}' has no real value at n = {n}, or none that can be shown") from None
    if value.b == iv.inf:
        raise UserError(f"the formula '{text}' is infinite at n = {n}: a log-bias must stay below ∞")


def _check_ranges(e: sympy.Expr, todo: list[tuple[int, int]], text: str) -> None:
    while todo:
        low, high = np.array(todo, dtype=np.float64).T
        if len(todo) > _OPEN:
            for n, _ in todo[:: _OPEN >> 8]:
                _check_at(e, n, text)
            start = todo[0][0]
            raise UserError(f"the formula '{text}' cannot be shown to have a real value at every n from {start} on")
        _, top = ranges(e, _outwards(low, -np.inf), _outwards(high, np.inf))
        bad = [todo[i] for i in np.flatnonzero(~(top < np.inf))]
        for n in (n for a, b in bad if b - a <= 1 for n in (a, b)):
            _check_at(e, n, text)
        todo = [half for a, b in bad if b - a > 1 for half in ((a, (a + b) // 2), ((a + b) // 2, b))]


def _outwards(near: Any, side: float) -> Any:
    """Beyond 2^53 a whole number may fall between two doubles."""
    return np.where(near < 2.0**53, near, np.nextafter(near, side))
