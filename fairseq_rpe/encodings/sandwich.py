"""Sandwich: inner product of sinusoidal position vectors as a bias (Chi et al. 2023)."""

from dataclasses import dataclass

import torch
from torch import Tensor

from fairseq_rpe.core.errors import UserError
from fairseq_rpe.core.log_bias import LogBias, exact_fraction
from fairseq_rpe.core.spec import option
from fairseq_rpe.encodings.base import DistanceBias, register


@register("sandwich", colour="blue", marker="s")
class Sandwich(DistanceBias):
    """Sandwich (Chi et al. 2023, arXiv 2212.10356): (H / 8h)·Σ_s cos(d·10000^(-s/N)) for head h = 1 … H.

    It is the inner product of two sinusoidal vectors of N = dim/2 frequencies. ``variant=paper`` has s = 0 … N-1, as
    the paper's listing; ``variant=evo``, the code of Qin et al. 2024 (arXiv 2307.10156), has s = 1 … N and subtracts
    the constant N + 1e-4, to which softmax is invariant. At finite N the cosines keep oscillating, so the bias is
    bounded below and Σ exp(bias) diverges; it resembles a power law only up to about 15 700 tokens.
    """

    @dataclass(frozen=True)
    class Config:
        """Options of ``sandwich``."""

        variant: str = option(
            "paper", "paper: Chi et al.'s listing; evo: the code of Qin et al.", choices=("paper", "evo")
        )
        dim: int = option(
            0, "even width of the sinusoids; 0: 128 (paper) or twice the head width (evo)", minimum=0, maximum=65_536
        )

    formula = "(H / 8h)·Σ_(s=0…N-1) cos(d·10000^(-s/N)), N = dim/2  [evo: s = 1…N, and - N - 1e-4 inside]"
    paper = "Chi, Fan, Rudnicky, Ramadge 2023 (arXiv 2212.10356)"

    def setup(self) -> None:
        """Set the number of cosines that are summed."""
        width = self.config.dim or (128 if self.config.variant == "paper" else 2 * self.width // self.heads)
        if width % 2:
            raise UserError(f"option 'dim' of 'sandwich' must be even, not {width}")
        self.terms = width // 2

    def head_parameters(self, like: Tensor) -> tuple[Tensor, ...]:
        """Return the factors H / 8h (H,)."""
        return (self.heads / (8 * torch.arange(1, self.heads + 1, device=like.device, dtype=like.dtype)),)

    def head_bias(self, d: Tensor, scale: Tensor) -> Tensor:
        """Return the scaled sum of cosines."""
        first = 0 if self.config.variant == "paper" else 1
        # float64: in float32 the angle of a distance near 10,000 has an error of 1e-3
        d64 = d.double()
        total = torch.zeros_like(d64)
        for s in range(first, first + self.terms):
            total = total + torch.cos(d64 * 10000.0 ** (-s / self.terms))
        if self.config.variant == "evo":
            total = total - self.terms - 1e-4
        return total.to(d.dtype) * scale

    def log_bias_formulas(self) -> list[LogBias]:
        """Return a lower bound of the log-bias of each head."""
        shift = 0 if self.config.variant == "paper" else self.terms + 1e-4
        note = (
            f"{self.terms} cosines are at least -{self.terms}, so the bias is bounded below (the bound in the paper's "
            "Raabe test ends at 15 708 tokens, and that test wants > 1 where it prints < 1)"
        )
        return [
            LogBias(f"-{exact_fraction((self.terms + shift) * self.heads / (8 * h))}", note, at_least=True)
            for h in range(1, self.heads + 1)
        ]
