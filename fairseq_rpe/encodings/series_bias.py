"""Type1, Type2, 1/n and 1/(n ln n): biases whose exponentials are well-known series.

Each has two forms that are different functions. ``form=heads`` (default) is the authors' code: the distance is
scaled by the head's ALiBi slope k_h. ``form=paper`` is the paper's series b_n with n counted from 1 (from 3
for 1/(n ln n), whose ln ln n needs n > e), the same for every head.
"""

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from fairseq_rpe.core.log_bias import exact
from fairseq_rpe.core.spec import option
from fairseq_rpe.encodings.alibi import alibi_slopes, slopes
from fairseq_rpe.encodings.base import DistanceBias, register


class _Series(DistanceBias):
    @dataclass(frozen=True)
    class Config:
        form: str = option(
            "heads",
            "heads: the authors' code, slope k_h per head; paper: the series as printed",
            choices=("heads", "paper"),
        )

    paper = "Qin, Zhong, Deng 2024, Exploring Transformer Extrapolation (arXiv 2307.10156)"
    formulas: ClassVar[tuple[str, str]]  # of x = k_h·d, and of n = d; ``head_bias`` has no k for the latter

    def head_parameters(self, like: Tensor) -> tuple[Tensor, ...]:
        return (slopes(self.heads, like.dtype, like.device),) if self.config.form == "heads" else ()

    def log_bias_formulas(self) -> list[str]:
        if self.config.form == "heads":
            return [self.formulas[0].replace("x", f"({exact(k)}*n)") for k in alibi_slopes(self.heads)]
        return [self.formulas[1]] * self.heads


@register("type1")
class Type1(_Series):
    """Quadratic series 1/n²; converges (paper form: B = π²/6)."""

    formula = "heads: -ln(1 + (k_h·d)²);  paper: -2·ln(1+d)"
    formulas = ("-log(1 + x**2)", "-2*log(1 + n)")

    def head_bias(self, d: Tensor, k: Tensor | None = None) -> Tensor:
        return -2 * torch.log1p(d) if k is None else -torch.log1p((k * d).square())


@register("type2")
class Type2(_Series):
    """Series exp(-ln² n); converges faster than any power of n."""

    formula = "heads: -ln²(3 + k_h·d);  paper: -ln²(1+d)"
    formulas = ("-log(3 + x)**2", "-log(1 + n)**2")

    def head_bias(self, d: Tensor, k: Tensor | None = None) -> Tensor:
        return -(torch.log1p(d) if k is None else torch.log(3 + k * d)).square()


@register("inv_n")
class InverseN(_Series):
    """Harmonic series 1/n; diverges. Equal to kerple_log with p = 1, a = k_h."""

    formula = "heads: -ln(1 + k_h·d);  paper: -ln(1+d)"
    formulas = ("-log(1 + x)", "-log(1 + n)")

    def head_bias(self, d: Tensor, k: Tensor | None = None) -> Tensor:
        return -torch.log1p(d if k is None else k * d)


@register("inv_nlnn")
class InverseNLogN(_Series):
    """Series 1/(n ln n); diverges like ln ln n."""

    formula = "heads: -ln(x) - ln(ln(x)), x = 3 + k_h·d;  paper: the same with k_h = 1"
    formulas = ("-log(3 + x) - log(log(3 + x))", "-log(3 + n) - log(log(3 + n))")

    def head_bias(self, d: Tensor, k: Tensor | None = None) -> Tensor:
        log = torch.log(3 + (d if k is None else k * d))
        return -(log + torch.log(log))
