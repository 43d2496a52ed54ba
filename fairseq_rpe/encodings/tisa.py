"""TISA: a bias that is a sum of Gaussian kernels of the distance (Wennberg and Henter 2021)."""

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from fairseq_rpe.core.log_bias import LogBias, exact_fraction
from fairseq_rpe.core.spec import option
from fairseq_rpe.encodings.base import DistanceBias, register


@register("tisa", colour="orange", marker=">")
class Tisa(DistanceBias):
    """Translation-invariant self-attention (Wennberg and Henter 2021, arXiv 2106.01950).

    The bias is Σ_r a_r·exp(-|b_r|·(c_r + d)²). Each of the R kernels of a head has an amplitude a, a sharpness b and
    an offset c, each (R, H), learned per layer. The bias tends to 0 with d, so Σ exp(bias) diverges. The paper's
    signed offset j - i is -d for past keys. A kernel with c < 0 therefore peaks at d = -c. A kernel with c > 0 peaks in
    the future, and a causal model sees only its tail. The absolute value of b and the initial values follow the
    authors' code: a and b ~ N(0.1, 0.01) and c ~ N(0, 5), by mean and standard deviation.
    """

    @dataclass(frozen=True)
    class Config:
        """Options of ``tisa``."""

        kernels: int = option(5, "R, Gaussian kernels of each head", minimum=1, maximum=256)

    formula = "Σ_r a_rh·exp(-abs(b_rh)·(c_rh + d)²),  a, b, c learned"
    paper = "Wennberg, Henter 2021 (arXiv 2106.01950)"
    sharing_modes = ("layer", "model")

    def setup(self) -> None:
        """Create the parameters."""
        shape = self.config.kernels, self.heads
        self.amplitudes = nn.Parameter(0.1 + 0.01 * torch.randn(shape))
        self.sharpness = nn.Parameter(0.1 + 0.01 * torch.randn(shape))
        self.offsets = nn.Parameter(5 * torch.randn(shape))

    def head_parameters(self, like: Tensor) -> tuple[Tensor, ...]:
        """Return amplitudes, sharpness and offsets, R parameters (H,) of each."""
        return tuple(row for x in (self.amplitudes, self.sharpness, self.offsets) for row in x.to(like.dtype))

    def head_bias(self, d: Tensor, *parameters: Tensor) -> Tensor:
        """Return the sum of the kernels of a head at distances d."""
        count = self.config.kernels
        total = torch.zeros_like(d)
        for a, b, c in zip(parameters[:count], parameters[count : 2 * count], parameters[2 * count :], strict=True):
            total = total + a * torch.exp(-abs(b) * (c + d) * (c + d))
        return total

    def logged_scalars(self) -> dict[str, Tensor]:
        """Return the bias at distance 0 and the sum of amplitudes for each head."""
        at_zero = self.bias(torch.zeros(1, device=self.offsets.device))[:, 0]
        return {"tisa_here": at_zero, "tisa_amplitude": self.amplitudes.sum(0)}

    def log_bias_formulas(self) -> list[LogBias]:
        """Return a lower bound of the log-bias of each head."""
        note = "the kernels tend to 0 with distance, so the bias is bounded below"
        lower_bounds = (-self.amplitudes.clamp_max(0)).T.tolist()
        return [LogBias("-(" + " + ".join(map(exact_fraction, row)) + ")", note, at_least=True) for row in lower_bounds]
