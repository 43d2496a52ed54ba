"""Sandwich."""

from dataclasses import dataclass

import torch
from torch import Tensor

from fairseq_rpe.core.errors import UserError
from fairseq_rpe.core.log_bias import LogBias, exact
from fairseq_rpe.core.spec import option
from fairseq_rpe.encodings.base import DistanceBias, register


@register("sandwich")
class Sandwich(DistanceBias):
    """Inner product of two sinusoidal vectors of D = dim/2 frequencies, divided by 8h/H.

    paper: frequencies 10000^(-s/D), s = 0 … D-1. evo: s = 1 … D and a constant D + 1e-4 subtracted, which softmax
    does not see. At finite width the cosines keep oscillating, so the bias is bounded below and Σ exp(bias) diverges;
    it only looks like a power law up to about 15 700 tokens.
    """

    @dataclass(frozen=True)
    class Config:
        form: str = option(
            "paper", "paper: Chi et al.'s listing; evo: the code of Qin et al.", choices=("paper", "evo")
        )
        dim: int = option(
            0, "even width of the sinusoids; 0: 128 (paper) or twice the head width (evo)", minimum=0, maximum=65_536
        )

    formula = "(H / 8h)·Σ_s cos(d·10000^(-s/D))  [evo: - D - 1e-4 inside]"
    paper = "Chi, Fan, Rudnicky, Ramadge 2023 (arXiv 2212.10356)"

    def setup(self) -> None:
        width = self.config.dim or (128 if self.config.form == "paper" else 2 * self.width // self.heads)
        if width % 2:
            raise UserError(f"option 'dim' of 'sandwich' must be even, not {width}")
        self.terms = width // 2

    def head_parameters(self, like: Tensor) -> tuple[Tensor, ...]:
        return (self.heads / (8 * torch.arange(1, self.heads + 1, device=like.device, dtype=like.dtype)),)

    def head_bias(self, d: Tensor, scale: Tensor) -> Tensor:
        first = 0 if self.config.form == "paper" else 1
        # in float32 the angle of a distance near 10,000 is off by 1e-3
        wide = d.double()
        total = torch.zeros_like(wide)
        for s in range(first, first + self.terms):
            total = total + torch.cos(wide * 10000.0 ** (-s / self.terms))
        if self.config.form == "evo":
            total = total - self.terms - 1e-4
        return total.to(d.dtype) * scale

    def log_bias_formulas(self) -> list[LogBias]:
        shift = 0 if self.config.form == "paper" else self.terms + 1e-4
        note = (
            f"{self.terms} cosines are at least -{self.terms}, so the bias is bounded below (the bound in the paper's "
            "Raabe test ends at 15 708 tokens, and that test wants > 1 where it prints < 1)"
        )
        return [
            LogBias(f"-{exact((self.terms + shift) * self.heads / (8 * h))}", note, at_least=True)
            for h in range(1, self.heads + 1)
        ]
