"""TISA: translation-invariant self-attention."""

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from fairseq_rpe.core.log_bias import LogBias, exact
from fairseq_rpe.core.spec import option
from fairseq_rpe.encodings.base import DistanceBias, register


@register("tisa")
class Tisa(DistanceBias):
    """A sum of R Gaussian bumps of the distance, learned per head and layer; it fades to 0, so it diverges.

    Each bump has an amplitude a, a sharpness b and an offset c, each (R, H). The paper's signed offset j - i is -d for
    what is behind, so a bump with c < 0 peaks at d = -c and one with c > 0 in the future, of which a causal model sees
    the tail alone. The absolute value of b and the start are those of the authors' code: a and b ~ N(0.1, 0.01), c ~
    N(0, 5), by mean and standard deviation.
    """

    @dataclass(frozen=True)
    class Config:
        kernels: int = option(5, "R, bumps of each head", minimum=1, maximum=256)

    formula = "Σ_r a_rh·exp(-abs(b_rh)·(c_rh + d)²),  a, b, c learned"
    paper = "Wennberg, Henter 2021 (arXiv 2106.01950)"
    sharing_modes = ("layer", "model")

    def setup(self) -> None:
        shape = self.config.kernels, self.heads
        self.amplitudes = nn.Parameter(0.1 + 0.01 * torch.randn(shape))
        self.sharpness = nn.Parameter(0.1 + 0.01 * torch.randn(shape))
        self.offsets = nn.Parameter(5 * torch.randn(shape))

    def head_parameters(self, like: Tensor) -> tuple[Tensor, ...]:
        return tuple(row for x in (self.amplitudes, self.sharpness, self.offsets) for row in x.to(like.dtype))

    def head_bias(self, d: Tensor, *numbers: Tensor) -> Tensor:
        count = self.config.kernels
        total = torch.zeros_like(d)
        for a, b, c in zip(numbers[:count], numbers[count : 2 * count], numbers[2 * count :], strict=True):
            total = total + a * torch.exp(-abs(b) * (c + d) * (c + d))
        return total

    def logged_scalars(self) -> dict[str, Tensor]:
        here = self.bias(torch.zeros(1, device=self.offsets.device))[:, 0]
        return {"tisa_here": here, "tisa_amplitude": self.amplitudes.sum(0)}

    def log_bias_formulas(self) -> list[LogBias]:
        note = "far bumps fade to 0, so the bias is bounded below"
        falls = (-self.amplitudes.clamp_max(0)).T.tolist()
        return [LogBias("-(" + " + ".join(map(exact, row)) + ")", note, at_least=True) for row in falls]
