"""Kerple: conditionally positive definite kernels of the distance, learned per head."""

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import ClassVar

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from fairseq_rpe.core.log_bias import LogBias, exact
from fairseq_rpe.core.spec import option
from fairseq_rpe.encodings.base import DistanceBias, register


def positive(raw: Tensor, floor: float = 0.0) -> Tensor:
    """``floor + softplus(raw)``: any real number to one above ``floor``."""
    return floor + F.softplus(raw)


def positive_inverse(value: Tensor, floor: float = 0.0) -> Tensor:
    """The ``raw`` that :func:`positive` maps to ``value``; values at or below the floor go just above it."""
    x = (value.double() - floor).clamp_min(1e-6)
    return (x + torch.log(-torch.expm1(-x))).to(value.dtype)


def between(raw: Tensor, low: float, high: float) -> Tensor:
    """``low + (high - low) · sigmoid(raw)``."""
    return low + (high - low) * torch.sigmoid(raw)


def between_inverse(value: Tensor, low: float, high: float) -> Tensor:
    """The ``raw`` that :func:`between` maps to ``value``; ``high`` itself saturates and does not train."""
    x = ((value.double() - low) / (high - low)).clamp(1e-6, 1.0)
    return torch.logit(x).clamp_max(-math.log(1e-17)).to(value.dtype)


FLOOR = 0.01  # the authors clamp both parameters to at least this
# a range: a function into it, and its inverse
_POSITIVE = partial(positive, floor=FLOOR), partial(positive_inverse, floor=FLOOR)
_UP_TO_2 = partial(between, low=FLOOR, high=2.0), partial(between_inverse, low=FLOOR, high=2.0)


class _Kerple(DistanceBias):
    """Two positive numbers a head, kept in range by reparametrisation.

    The authors clamp in place at 0.01 instead; the functions are the same, the gradients near the edge are not.
    A given initial value enters as a constant offset, so that it is exact rather than rounded to float32. With
    ``learn_p=false`` the exponents are not trained, so that what theory says of a fixed p can be tested: kerple_log
    with p = 1 diverges and must not extrapolate.
    """

    @dataclass(frozen=True)
    class Config:
        p: float | None = option(None, "initial exponent of every head; none: U(0, 2) per head", above=FLOOR)
        a: float | None = option(None, "initial scale of every head; none: U(0, 1) per head", above=FLOOR)
        learn_p: bool = option(True, "false: p stays as it starts, as for the verdict on a fixed p")

    paper = "Chi, Fan, Ramadge, Rudnicky 2022 (arXiv 2205.09921)"
    range_of_p = _POSITIVE
    term: ClassVar[str]  # the log-bias at n, of p and a
    verdict: ClassVar[str]

    def setup(self) -> None:
        self.raw_p, self._p_offset = self._start(self.config.p, 2.0, self.range_of_p[1])
        self.raw_p.requires_grad_(self.config.learn_p)
        self.raw_a, self._a_offset = self._start(self.config.a, 1.0, _POSITIVE[1])

    def _start(self, given: float | None, top: float, inverse: Callable[[Tensor], Tensor]) -> tuple[Tensor, float]:
        if given is None:
            return nn.Parameter(inverse(torch.rand(self.heads) * top)), 0.0
        return nn.Parameter(torch.zeros(self.heads)), float(inverse(torch.tensor(given, dtype=torch.float64)))

    def p(self, dtype: torch.dtype = torch.float32) -> Tensor:
        """(H,) exponents."""
        return self.range_of_p[0](self.raw_p.to(dtype) + self._p_offset)

    def a(self, dtype: torch.dtype = torch.float32) -> Tensor:
        """(H,) scales."""
        return _POSITIVE[0](self.raw_a.to(dtype) + self._a_offset)

    def head_parameters(self, like: Tensor) -> tuple[Tensor, ...]:
        return self.p(like.dtype), self.a(like.dtype)

    def logged_scalars(self) -> dict[str, Tensor]:
        return {"p": self.p(), "a": self.a()}

    def log_bias_formulas(self) -> list[LogBias]:
        p, a = _exact(self.config.p, self.p(), self.raw_p), _exact(self.config.a, self.a(), self.raw_a)
        return [LogBias(self.term.format(p=p_h, a=a_h), self.verdict) for p_h, a_h in zip(p, a, strict=True)]


def _exact(given: float | None, values: Tensor, raw: Tensor) -> list[str]:
    """Of each head: the float32 number of training, or the decimal given while untrained."""
    heads = zip(values.tolist(), raw.tolist(), strict=True)
    return [exact(v) if given is None or r else exact(given, decimal=True) for v, r in heads]


@register("kerple_log")
class KerpleLog(_Kerple):
    """Logarithmic kernel; converges iff p > 1 (the source on convergence prints r < 1, a slip)."""

    formula = "-p_h·ln(1 + a_h·d),  p, a > 0 learned"
    term = "-{p}*log(1 + {a}*n)"
    verdict = "kerple_log converges iff p > 1"

    def head_bias(self, d: Tensor, p: Tensor, a: Tensor) -> Tensor:
        return -p * torch.log1p(a * d)


@register("kerple_power")
class KerplePower(_Kerple):
    """Power kernel; converges for every a, p > 0."""

    @dataclass(frozen=True)
    class Config(_Kerple.Config):
        p: float | None = option(
            None, "initial exponent; none: U(0, 2) per head; 2 is the edge and does not train", above=FLOOR, maximum=2
        )

    formula = "-a_h·d^p_h,  a > 0, 0 < p <= 2 learned"
    term = "-{a}*n**{p}"
    verdict = "kerple_power converges for every a, p > 0"
    range_of_p = _UP_TO_2

    def head_bias(self, d: Tensor, p: Tensor, a: Tensor) -> Tensor:
        # the second derivative of 0^p with respect to p would be NaN
        return -a * torch.where(d > 0, torch.where(d > 0, d, 1.0).pow(p), 0.0)
