"""Kerple: conditionally positive definite kernels of the distance, learned per head."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from ..core import LogWeight, exact, option
from .base import DistanceBias, register
from .constraints import between, between_inverse, positive, positive_inverse

_PAPER = "Chi, Fan, Ramadge, Rudnicky 2022 (arXiv 2205.09921)"
FLOOR = 0.01  # the authors clamp both parameters to at least this


@dataclass(frozen=True)
class KerpleLogConfig:
    """Initial values of the learned parameters."""

    p: float | None = option(None, "initial exponent of every head; none: U(0, 2) per head", above=FLOOR)
    a: float | None = option(None, "initial scale of every head; none: U(0, 1) per head", above=FLOOR)


@dataclass(frozen=True)
class KerplePowerConfig:
    """Initial values of the learned parameters."""

    p: float | None = option(
        None, "initial exponent; none: U(0, 2) per head; 2 is the edge and does not train", above=FLOOR, maximum=2
    )
    a: float | None = option(None, "initial scale of every head; none: U(0, 1) per head", above=FLOOR)


class _Kerple(DistanceBias):
    """Both variants: two positive numbers a head, kept in range by reparametrisation.

    The authors clamp in place at 0.01 instead; the functions are the same, the gradients near the edge are not.
    A given initial value enters as a constant offset, so that it is exact rather than rounded to float32.
    """

    paper = _PAPER

    def setup(self) -> None:
        self.raw_p, self._p_offset = self._start(self.config.p, 2.0, self._p_inverse)
        self.raw_a, self._a_offset = self._start(self.config.a, 1.0, self._a_inverse)

    def _start(
        self, given: float | None, top: float, inverse: Callable[[Tensor], Tensor]
    ) -> tuple[nn.Parameter, float]:
        if given is None:
            return nn.Parameter(inverse(torch.rand(self.heads) * top)), 0.0
        return nn.Parameter(torch.zeros(self.heads)), float(inverse(torch.tensor(given, dtype=torch.float64)))

    @staticmethod
    def _a_inverse(a: Tensor) -> Tensor:
        return positive_inverse(a, FLOOR)

    _p_inverse = _a_inverse

    def p(self, dtype: torch.dtype = torch.float32) -> Tensor:
        """(H,) exponents."""
        return positive(self.raw_p.to(dtype) + self._p_offset, FLOOR)

    def a(self, dtype: torch.dtype = torch.float32) -> Tensor:
        """(H,) scales."""
        return positive(self.raw_a.to(dtype) + self._a_offset, FLOOR)

    def numbers(self, like: Tensor) -> tuple[Tensor, ...]:
        return self.p(like.dtype), self.a(like.dtype)

    def scalars(self) -> dict[str, Tensor]:
        return {"p": self.p(), "a": self.a()}

    def _exact(self) -> list[tuple[str, str]]:
        """(p, a) of each head: the float32 numbers of training, or the decimals given while untrained."""
        columns = [
            [exact(v) if given is None or r else exact(given, decimal=True) for v, r in zip(values, raw, strict=True)]
            for given, values, raw in (
                (self.config.p, self.p().tolist(), self.raw_p.tolist()),
                (self.config.a, self.a().tolist(), self.raw_a.tolist()),
            )
        ]
        return list(zip(*columns, strict=True))


@register("kerple_log")
class KerpleLog(_Kerple):
    """Logarithmic kernel; converges iff p > 1 (the source on convergence prints r < 1, a slip)."""

    Config = KerpleLogConfig
    formula = "-p_h·ln(1 + a_h·d),  p, a > 0 learned"

    def of_head(self, d: Tensor, p: Tensor, a: Tensor) -> Tensor:
        return -p * torch.log1p(a * d)

    def series(self) -> list[LogWeight]:
        return [LogWeight(f"-{p}*log(1 + {a}*n)", "kerple_log converges iff p > 1") for p, a in self._exact()]


@register("kerple_power")
class KerplePower(_Kerple):
    """Power kernel; converges for every a, p > 0."""

    Config = KerplePowerConfig
    formula = "-a_h·d^p_h,  a > 0, 0 < p <= 2 learned"

    @staticmethod
    def _p_inverse(p: Tensor) -> Tensor:
        return between_inverse(p, FLOOR, 2.0)

    def p(self, dtype: torch.dtype = torch.float32) -> Tensor:
        return between(self.raw_p.to(dtype) + self._p_offset, FLOOR, 2.0)

    def of_head(self, d: Tensor, p: Tensor, a: Tensor) -> Tensor:
        return -a * d.pow(p)

    def series(self) -> list[LogWeight]:
        return [LogWeight(f"-{a}*n**{p}", "kerple_power converges for every a, p > 0") for p, a in self._exact()]
