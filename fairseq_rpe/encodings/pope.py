"""PoPE: queries and keys as complex numbers whose magnitudes are contents and whose angles are positions."""

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from fairseq_rpe.core.positions import Positions
from fairseq_rpe.core.spec import option
from fairseq_rpe.encodings.base import CosSin, Rotary, register


@register("pope", colour="sky blue", marker="^")
class Pope(Rotary):
    """Polar coordinate position embedding (Gopalakrishnan et al. 2025, arXiv 2509.10534).

    Element c of a query or key x is a magnitude softplus(x_c) at the angle p·θ_c of its position p. There is one
    frequency for each of the D elements, θ_c = base^(-c/D), where RoPE has one for each pair. With d = i - j and a
    learned phase δ_hc of each head and element, the score is

        Σ_c softplus(q_ic)·softplus(k_jc)·cos(d·θ_c - δ_hc) / sqrt(D).

    ``rotate`` returns real and imaginary parts, so rotated queries and keys are 2D wide; values stay D wide. Attention
    divides q·k by sqrt(2D), therefore rotated queries have a factor sqrt(2). Softplus, angles and phases are computed
    in float32 or better, and only the result is cast.

    The public code (x-transformers, PoPE-pytorch) adds δ to the angles of keys. Here -δ is added to the angles of
    queries, which gives the same score. Therefore the encoding also serves models with fewer key heads than query
    heads, and a rotated key depends on nothing but the key and its position: a KV cache stores rotated keys, 2D wide,
    where tokens keep their positions.

    The public code clamps δ to [-2π, 0]. With δ = 0, the default there and here, a step above 0 would leave a clamped
    phase without a gradient. Here δ is free: δ and δ + 2π are the same phase. One δ for all layers is the default, as
    in x-transformers; ``--rpe-share layer`` gives each layer its own.
    """

    @dataclass(frozen=True)
    class Config:
        """Options of ``pope``."""

        base: float = option(10000.0, "b in θ_c = b^(-c/D)", above=1)
        init: str = option("zero", "initial phases δ: 0, or drawn uniformly from [-2π, 0]", choices=("zero", "uniform"))

    formula = "Σ_c s(q_c)·s(k_c)·cos((i - j)·θ_c - δ_hc),  s(x) = ln(1 + e^x),  θ_c = b^(-c/D),  δ learned"
    paper = "Gopalakrishnan et al. 2025 (arXiv 2509.10534)"
    sharing_modes = ("model", "layer")
    fixed_rotation = True
    rotated_width_factor = 2
    bounded_reason = "queries and keys of bounded norm have bounded magnitudes, and so bounded scores"

    @classmethod
    def rotation_scaling(cls, config: Any) -> str:
        """Return "pope": no other encoding has this rotation."""
        return "pope"

    def setup(self) -> None:
        """Create the phases δ (H, D)."""
        self.rotary_fraction = 2.0  # each element of a head becomes a pair
        super().setup()
        self.phase = nn.Parameter(torch.zeros(self.heads, self.width // self.heads))
        if self.config.init == "uniform":
            nn.init.uniform_(self.phase, -2 * math.pi, 0.0)

    def angles(self, at: Tensor, pos: Positions) -> Tensor:
        """Return the angles p·θ_c (B or 1, n, D), in radians, of the positions ``at`` (B or 1, n)."""
        width = self.rotated // 2
        c = torch.arange(width, device=at.device, dtype=torch.float64)
        return at[..., None] * (self.config.base ** (-c / width)).to(at.dtype)

    def _cos_sin_of_angles(self, angles: Tensor, at: Tensor, pos: Positions, key: bool) -> CosSin:
        """Return the cosines and sines (B or 1, 1, n, D) of angles (B or 1, n, D)."""
        return angles.cos()[:, None], angles.sin()[:, None], None

    def rotate(self, x: Tensor, at: Tensor, pos: Positions, key: bool = False) -> Tensor:
        """Return real and imaginary parts of queries or keys.

        Args:
            x: (B, H, n, D) queries, or with ``key`` (B, G, n, D) keys of any number G of key heads.
            at: (B or 1, n) their positions.
            pos: positions of all tokens.
            key: whether ``x`` are keys.

        Returns:
            (B, H or G, n, 2D) in x's dtype.
        """
        cos, sin, _ = self._cos_sin(at, pos, key)
        magnitude = F.softplus(x.to(torch.promote_types(x.dtype, cos.dtype)))
        real, imaginary = magnitude * cos, magnitude * sin  # (B, H or G, n, D)
        if not key:
            # the angle of the query less δ, by the addition theorem: cosines of (H, n, D) angles are not computed
            phase = self.phase[:, None].to(magnitude.dtype)  # (H, 1, D)
            phase_cos, phase_sin = math.sqrt(2) * phase.cos(), math.sqrt(2) * phase.sin()
            real, imaginary = (real * phase_cos + imaginary * phase_sin, imaginary * phase_cos - real * phase_sin)
        return torch.cat([real, imaginary], dim=-1).to(x.dtype)

    def logged_scalars(self) -> dict[str, Tensor]:
        """Return the mean distance (H,) of the phases from 0, as angles from 0 to π."""
        phase = self.phase.detach()
        distance = (torch.remainder(phase + math.pi, 2 * math.pi) - math.pi).abs()
        return {"phase_distance": distance.mean(1)}
