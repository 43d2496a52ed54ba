"""KERPLE: conditionally positive definite kernels of the distance, learned per head (Chi et al. 2022)."""

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import ClassVar, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from fairseq_rpe.core.log_bias import LogBias, exact_fraction
from fairseq_rpe.core.spec import option
from fairseq_rpe.encodings.base import DistanceBias, register


def positive(raw: Tensor, floor: float = 0.0) -> Tensor:
    """Return ``floor + softplus(raw)``, which maps the real line to values above ``floor``."""
    return floor + F.softplus(raw)


def positive_inverse(value: Tensor, floor: float = 0.0) -> Tensor:
    """Return the ``raw`` that :func:`positive` maps to ``value``; values at or below the floor map just above it."""
    x = (value.double() - floor).clamp_min(1e-6)
    return (x + torch.log(-torch.expm1(-x))).to(value.dtype)


def scaled_sigmoid(raw: Tensor, low: float, high: float) -> Tensor:
    """Return ``low + (high - low) · sigmoid(raw)``."""
    return low + (high - low) * torch.sigmoid(raw)


def scaled_sigmoid_inverse(value: Tensor, low: float, high: float) -> Tensor:
    """Return the ``raw`` that :func:`scaled_sigmoid` maps to ``value``; at ``high`` the gradient vanishes."""
    x = ((value.double() - low) / (high - low)).clamp(1e-6, 1.0)
    return torch.logit(x).clamp_max(-math.log(1e-17)).to(value.dtype)


FLOOR = 0.01  # the authors clamp both parameters to at least this


class _Range(NamedTuple):
    """Range of a parameter, as a bijection from the real line.

    Attributes:
        from_raw: maps raw parameters into the range.
        to_raw: the inverse.
    """

    from_raw: Callable[[Tensor], Tensor]
    to_raw: Callable[[Tensor], Tensor]


_POSITIVE = _Range(partial(positive, floor=FLOOR), partial(positive_inverse, floor=FLOOR))
_UP_TO_2 = _Range(partial(scaled_sigmoid, low=FLOOR, high=2.0), partial(scaled_sigmoid_inverse, low=FLOOR, high=2.0))


class _Kerple(DistanceBias):
    """Kernels with two positive parameters p and a per head, kept in range by reparametrisation.

    The authors instead clamp the parameters in place at 0.01: the functions are equal, but the gradients near the limit
    are not. If an option sets the initial value, it is a constant offset of the raw parameter, which starts at 0; so
    the value is exact and not rounded to float32. With ``learn_p=false`` the exponents are not trained. This tests what
    theory predicts for a fixed p: kerple_log with p = 1 diverges and must not extrapolate.
    """

    @dataclass(frozen=True)
    class Config:
        """Options of the KERPLE kernels."""

        p: float | None = option(None, "initial exponent of every head; none: U(0, 2) per head", above=FLOOR)
        a: float | None = option(None, "initial scale of every head; none: U(0, 1) per head", above=FLOOR)
        learn_p: bool = option(True, "false: p keeps its initial value, as for the verdict on a fixed p")

    paper = "Chi, Fan, Ramadge, Rudnicky 2022 (arXiv 2205.09921)"
    range_of_p: ClassVar[_Range] = _POSITIVE
    term: ClassVar[str]  # the log-bias at distance n as a formula of p and a
    verdict: ClassVar[str]

    def setup(self) -> None:
        """Derive settings from the options."""
        self.raw_p, self._p_offset = self._init_parameter(self.config.p, 2.0, self.range_of_p)
        self.raw_p.requires_grad_(self.config.learn_p)
        self.raw_a, self._a_offset = self._init_parameter(self.config.a, 1.0, _POSITIVE)

    def _init_parameter(self, value: float | None, high: float, value_range: _Range) -> tuple[Tensor, float]:
        """Return the raw parameter (H,) and its constant offset; without a value it is drawn from U(0, high)."""
        if value is None:
            return nn.Parameter(value_range.to_raw(torch.rand(self.heads) * high)), 0.0
        offset = value_range.to_raw(torch.tensor(value, dtype=torch.float64, device="cpu"))
        return nn.Parameter(torch.zeros(self.heads)), float(offset)

    def p(self, dtype: torch.dtype = torch.float32) -> Tensor:
        """Return the exponents (H,)."""
        return self.range_of_p.from_raw(self.raw_p.to(dtype) + self._p_offset)

    def a(self, dtype: torch.dtype = torch.float32) -> Tensor:
        """Return the scales (H,)."""
        return _POSITIVE.from_raw(self.raw_a.to(dtype) + self._a_offset)

    def head_parameters(self, like: Tensor) -> tuple[Tensor, ...]:
        """Return the parameters of ``head_bias``, each (H,)."""
        return self.p(like.dtype), self.a(like.dtype)

    def logged_scalars(self) -> dict[str, Tensor]:
        """Return the learned quantities to log."""
        return {"p": self.p(), "a": self.a()}

    def log_bias_formulas(self) -> list[LogBias]:
        """Return the log-bias of each head as a formula in n."""
        p = _exact_fractions(self.config.p, self.p(), self.raw_p)
        a = _exact_fractions(self.config.a, self.a(), self.raw_a)
        return [LogBias(self.term.format(p=p_h, a=a_h), self.verdict) for p_h, a_h in zip(p, a, strict=True)]


def _exact_fractions(initial: float | None, values: Tensor, raw: Tensor) -> list[str]:
    """Return each head's value as a fraction: the trained float32, or the initial decimal while untrained."""
    fractions = []
    for value, raw_value in zip(values.tolist(), raw.tolist(), strict=True):
        if initial is None or raw_value != 0:  # trained
            fractions.append(exact_fraction(value))
        else:
            fractions.append(exact_fraction(initial, decimal=True))
    return fractions


@register("kerple_log", colour="orange", marker="v")
class KerpleLog(_Kerple):
    """Logarithmic kernel (Chi et al. 2022, arXiv 2205.09921): -p·ln(1 + a·d).

    Σ exp(bias) converges iff p > 1; the paper on convergence prints r < 1, a misprint.
    """

    formula = "-p_h·ln(1 + a_h·d),  p, a > 0 learned"
    dape_base = True
    term = "-{p}*log(1 + {a}*n)"
    verdict = "kerple_log converges iff p > 1"

    def head_bias(self, d: Tensor, p: Tensor, a: Tensor) -> Tensor:
        """Return -p·ln(1 + a·d)."""
        return -p * torch.log1p(a * d)


@register("kerple_power", colour="orange", marker="<")
class KerplePower(_Kerple):
    """Power kernel (Chi et al. 2022, arXiv 2205.09921): -a·d^p; Σ exp(bias) converges for every a, p > 0."""

    @dataclass(frozen=True)
    class Config(_Kerple.Config):
        """Options of ``kerple_power``."""

        p: float | None = option(
            None, "initial exponent; none: U(0, 2) per head; 2 is the limit and does not train", above=FLOOR, maximum=2
        )

    formula = "-a_h·d^p_h,  a > 0, 0 < p <= 2 learned"
    term = "-{a}*n**{p}"
    verdict = "kerple_power converges for every a, p > 0"
    range_of_p: ClassVar[_Range] = _UP_TO_2

    def head_bias(self, d: Tensor, p: Tensor, a: Tensor) -> Tensor:
        """Return -a·d^p."""
        # the inner where: the second derivative of 0^p with respect to p is NaN, which a mask alone does not remove
        return -a * torch.where(d > 0, torch.where(d > 0, d, 1.0).pow(p), 0.0)
