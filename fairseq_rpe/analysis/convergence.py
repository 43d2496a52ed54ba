"""Does Σ_n b_n, b_n = exp(bias(n)), converge? The verdict for each head, its limit B and its receptive field.

Source: Qin, Zhong, Deng 2024, "Exploring Transformer Extrapolation" (arXiv 2307.10156), Theorems 0.3 and 0.4: where the
series converges, a window that does not depend on the position holds all but a part ε of every row's attention.
Distances n = i - j >= 0 are in tokens, log-biases are natural logarithms, and B counts from n = 0.

>>> head = verdict("alibi", heads=8)[0]
>>> head.decision, head.digits(), str(head.trf(0.01))
('converges', '2.54149408254', '10')
"""

import functools
from dataclasses import dataclass
from fractions import Fraction
from typing import Any

import mpmath
import numpy as np
import sympy
import torch
from torch import Tensor

from ..core import LogWeight, UserError
from ..encodings import Encoding, build
from .domain import check
from .enclosures import ends, sign
from .formula import N, parse
from .ranges import ranges
from .receptive_field import check_epsilons
from .summation import CONVERGES, DIVERGES, UNDECIDED, decide, show
from .sums import Finite, Geometric, summed
from .trf import Sum, Trf, trf

LENGTH = 512  # training length handed to encodings that want one; no verdict depends on it
_DIGITS = 12


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
    weights = encoding.series()
    if weights is None:
        reason = "no formula of the bias is known, and numbers at finitely many distances prove nothing"
        return [HeadVerdict(UNDECIDED, reason)] * encoding.heads
    return [_judge(w if isinstance(w, LogWeight) else LogWeight(w)) for w in weights]


def verdict_of_formula(text: str) -> HeadVerdict:
    """The verdict of a formula for the log-bias; refuses what grows, or has no real value at some distance n >= 0."""
    _checked(text)
    return _judge(LogWeight(text))


def weights_of_formula(text: str, keys: int) -> Tensor:
    """b_0 … b_(keys-1) of a formula, in double precision; refuses what :func:`verdict_of_formula` refuses."""
    n = np.arange(keys, dtype=np.float64)
    low, high = ranges(_checked(text), n, n)
    return torch.from_numpy(np.exp((low + high) / 2))


def _checked(text: str) -> sympy.Expr:
    shown = " ".join(text.split())
    f = parse(text)
    if decide(f).grows:
        raise UserError(f"the formula '{shown}' grows without bound: a log-bias is a penalty, is its minus missing?")
    check(f, shown)
    return f


@functools.lru_cache(maxsize=1024)
def _judge(weight: LogWeight) -> HeadVerdict:
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
