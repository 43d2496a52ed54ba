"""Type1, Type2, 1/n and 1/(n ln n): biases whose exponentials are well-known series (Qin et al. 2024).

Each has two variants, which are different functions. ``variant=heads``, the default, follows the authors' code: the
distance is scaled by the head's ALiBi slope k_h. ``variant=paper`` is the paper's series b_n, n from 1 (from 3 for
1/(n ln n), since ln ln n needs n > e), the same for every head.
"""

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from fairseq_rpe.core.log_bias import exact_fraction
from fairseq_rpe.core.spec import option
from fairseq_rpe.encodings.alibi import alibi_slopes, slopes
from fairseq_rpe.encodings.base import DistanceBias, register


class _SeriesBias(DistanceBias):
    @dataclass(frozen=True)
    class Config:
        """Options of the series biases."""

        variant: str = option(
            "heads",
            "heads: the authors' code, slope k_h per head; paper: the series as printed",
            choices=("heads", "paper"),
        )

    paper = "Qin, Zhong, Deng 2024, Exploring Transformer Extrapolation (arXiv 2307.10156)"
    formulas: ClassVar[tuple[str, str]]  # for variant=heads, of x = k_h·d; for variant=paper, of n = d

    def head_parameters(self, like: Tensor) -> tuple[Tensor, ...]:
        """Return the parameters of ``head_bias``, each (H,)."""
        return (slopes(self.heads, like.dtype, like.device),) if self.config.variant == "heads" else ()

    def log_bias_formulas(self) -> list[str]:
        """Return the log-bias of each head as a formula in n."""
        if self.config.variant == "heads":
            return [self.formulas[0].replace("x", f"({exact_fraction(k)}*n)") for k in alibi_slopes(self.heads)]
        return [self.formulas[1]] * self.heads


@register("type1", colour="green", marker="^")
class Type1(_SeriesBias):
    """Quadratic series 1/n²; Σ exp(bias) converges (``variant=paper``: to π²/6)."""

    formula = "heads: -ln(1 + (k_h·d)²);  paper: -2·ln(1+d)"
    formulas = ("-log(1 + x**2)", "-2*log(1 + n)")

    def head_bias(self, d: Tensor, k: Tensor | None = None) -> Tensor:
        """Return -ln(1 + (k·d)²), or -2·ln(1 + d) without k."""
        return -2 * torch.log1p(d) if k is None else -torch.log1p((k * d).square())


@register("type2", colour="green", marker="D")
class Type2(_SeriesBias):
    """Series exp(-ln² n); Σ exp(bias) converges faster than any power of n."""

    formula = "heads: -ln²(3 + k_h·d);  paper: -ln²(1+d)"
    formulas = ("-log(3 + x)**2", "-log(1 + n)**2")

    def head_bias(self, d: Tensor, k: Tensor | None = None) -> Tensor:
        """Return -ln²(3 + k·d), or -ln²(1 + d) without k."""
        return -(torch.log1p(d) if k is None else torch.log(3 + k * d)).square()


@register("inv_n", colour="pink", marker="D")
class InverseN(_SeriesBias):
    """Harmonic series 1/n; Σ exp(bias) diverges. Equal to kerple_log with p = 1, a = k_h."""

    formula = "heads: -ln(1 + k_h·d);  paper: -ln(1+d)"
    formulas = ("-log(1 + x)", "-log(1 + n)")

    def head_bias(self, d: Tensor, k: Tensor | None = None) -> Tensor:
        """Return -ln(1 + k·d), or -ln(1 + d) without k."""
        return -torch.log1p(d if k is None else k * d)


@register("inv_nlnn", colour="pink", marker="v")
class InverseNLogN(_SeriesBias):
    """Series 1/(n ln n); Σ exp(bias) diverges like ln ln n."""

    formula = "heads: -ln(x) - ln(ln(x)), x = 3 + k_h·d;  paper: the same with k_h = 1"
    formulas = ("-log(3 + x) - log(log(3 + x))", "-log(3 + n) - log(log(3 + n))")

    def head_bias(self, d: Tensor, k: Tensor | None = None) -> Tensor:
        """Return -ln(x) - ln(ln(x)), x = 3 + k·d, k = 1 if None."""
        log = torch.log(3 + (d if k is None else k * d))
        return -(log + torch.log(log))
