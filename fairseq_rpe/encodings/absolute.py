"""Absolute position encodings, and no encoding at all."""

import math
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from fairseq_rpe.core.errors import UserError
from fairseq_rpe.core.spec import option
from fairseq_rpe.encodings.base import Absolute, Encoding, register
from fairseq_rpe.encodings.position_table import PositionTable


@register("nope", colour="black", marker="o")
class NoPE(Encoding):
    """No positional encoding: only the causal mask gives information about order.

    Haviv et al. 2022 (arXiv 2203.16634) and Kazemnejad et al. 2023 (arXiv 2305.19466).
    """

    formula = "0"
    paper = "Haviv et al. 2022 (arXiv 2203.16634); Kazemnejad et al. 2023 (arXiv 2305.19466)"
    family = "no positions"
    dape_base = True
    sharing_modes = ("model",)
    position_type = "none"
    bounded_reason = "every distance weighs the same"


@register("sinusoidal", colour="blue", marker="o")
class Sinusoidal(Absolute):
    """Fixed sinusoids (C,) added at the input (Vaswani et al. 2017, arXiv 1706.03762, Section 3.5).

    ``style=vaswani`` follows the paper: PE(p, 2s) = sin(p·10000^(-2s/C)), PE(p, 2s+1) = cos(same), p from 0.
    ``style=fairseq``, the default, follows fairseq: exponents s/(C/2 - 1), all sines before all cosines, p from 2.
    """

    @dataclass(frozen=True)
    class Config:
        """Options of ``sinusoidal``."""

        style: str = option(
            "fairseq",
            "fairseq: [sin|cos], last frequency 1e-4, from index 2; vaswani: as printed",
            choices=("fairseq", "vaswani"),
        )

    formula = "x + PE(i),  PE(p)_2s = sin(p·10000^(-2s/C)), PE(p)_2s+1 = cos(same)"
    paper = "Vaswani et al. 2017 (arXiv 1706.03762)"

    def setup(self) -> None:
        """Check that the model is wide enough."""
        if self.width < 4:
            raise UserError(f"'sinusoidal' needs a model width of at least 4, not {self.width}")

    def vectors(self, at: Tensor) -> Tensor:
        """Return the vectors (B or 1, n, C) of positions ``at`` (B or 1, n)."""
        half, odd = divmod(self.width, 2)
        s = torch.arange(half + odd, device=at.device, dtype=at.dtype)
        if self.config.style == "fairseq":
            # fairseq's index of the first token is padding_idx + 1 = 2
            angles = (at + 2)[..., None] * torch.exp(s[:half] * -(math.log(10000) / (half - 1)))  # (B or 1, n, C/2)
            return F.pad(torch.cat([angles.sin(), angles.cos()], dim=-1), (0, odd))
        angles = at[..., None] * 10000.0 ** (-2 * s / self.width)  # (B or 1, n, ceil(C/2))
        return torch.stack([angles.sin(), angles.cos()], dim=-1).flatten(-2)[..., : self.width]


@register("learned", colour="blue", marker="^")
class Learned(PositionTable, Absolute):
    """A learned vector per position, table (N, C), added at the input (Gehring et al. 2017, arXiv 1705.03122).

    Positions beyond the table are refused, so it cannot extrapolate.
    """

    @dataclass(frozen=True)
    class Config:
        """Options of ``learned``."""

        max_positions: int = option(0, "rows of the table; 0: the training length", minimum=0, maximum=1 << 24)

    formula = "x + table[i]"
    paper = "Gehring et al. 2017 (arXiv 1705.03122)"
    position_type = "whole"
    name = "learned"

    def setup(self) -> None:
        """Check the options and create the parameters."""
        self.table = nn.Parameter(torch.randn(self.count_rows(), self.width) * self.width**-0.5)

    def vectors(self, at: Tensor) -> Tensor:
        """Return the vectors (B or 1, n, C) of positions ``at`` (B or 1, n)."""
        self.check_rows(int(at.max()), len(self.table))
        return F.embedding(at.to(torch.int64), self.table)
