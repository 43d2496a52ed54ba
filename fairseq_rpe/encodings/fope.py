"""FoPE: rotations whose sines and cosines are fixed random mixtures of those of several frequencies."""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from fairseq_rpe.core.errors import UserError
from fairseq_rpe.core.positions import Positions
from fairseq_rpe.core.spec import option
from fairseq_rpe.encodings.base import CosSin, Rotary, register
from fairseq_rpe.encodings.rope_scalings import count_rotating_pairs


@register("fope", colour="sky blue", marker="v")
class Fope(Rotary):
    """Fourier position embedding (Hua et al. 2024, arXiv 2412.17739).

    The frequencies are those of RoPE that rotate at least once within the training length L, θ_s >= 2π/L. Each of the
    first P' pairs (s, s + D/2) of a head has S_p = Σ_f sin(p·θ_f)·A_hfs in place of a sine of position p and
    C_p = Σ_f cos(p·θ_f)·B_hfs in place of a cosine. The other pairs have no position. P' is the number of frequencies
    or D/4, whichever is less, as in the authors' code.

    A and B (H, frequencies, P') are the identity, or for more frequencies than P' every ⌈frequencies/P'⌉-th row of
    it, plus Xavier-normal noise of gain ``gain``: 0.3, 0.4 and 0.6 for the paper's 60M, 180M and 1.2B models. torch
    computes the fan of such a tensor from all three sizes, so its standard deviation depends on H. A and B are not
    trained; the seed draws them, and checkpoints store them.

    In the paper, pairs without a position are unchanged. The authors' code gives them sine 1 and cosine 1 on both
    sides, which doubles their part of q·k (``padding=code``). With A other than the identity, a score is not a function
    of i - j alone and rotations change norms, so a constant added to all positions changes results.
    """

    @dataclass(frozen=True)
    class Config:
        """Options of ``fope``."""

        base: float = option(10000.0, "b in θ_s = b^(-2s/d)", above=1)
        original_length: int = option(0, "L, tokens of the training; 0: the training length", minimum=0)
        gain: float = option(0.3, "size of the noise in A and B", minimum=0)
        padding: str = option(
            "identity",
            "pairs without a position: unchanged, or with sine 1 and cosine 1 as in the authors' code",
            choices=("identity", "code"),
        )

    sine_matrix: Tensor
    cosine_matrix: Tensor

    formula = "(R_i q)·(R_j k),  R_p has Σ_f sin(p·θ_f)·A_fs and Σ_f cos(p·θ_f)·B_fs of pair s,  θ_f >= 2π/L"
    paper = "Hua et al. 2024 (arXiv 2412.17739)"
    sharing_modes = ("layer", "model")
    fixed_rotation = True
    bounded_reason = "mixtures of sines are bounded, so queries and keys of bounded norm have bounded scores"

    @classmethod
    def rotation_options(cls, config: Any) -> Mapping[str, str]:
        """Return the quantity of the rotation that each option sets, by the name of the option."""
        return {**super().rotation_options(config), "original_length": "original_length"}

    @classmethod
    def rotation_scaling(cls, config: Any) -> str:
        """Return "fope": no other encoding has this rotation."""
        return "fope"

    def setup(self) -> None:
        """Check the options and draw the matrices."""
        super().setup()
        original_length = self.config.original_length or self.length or 0
        if not original_length:
            raise UserError("'fope' needs the training length: give original_length=N")
        frequencies = count_rotating_pairs("auto", self.rotated, self.config.base, original_length)
        if not frequencies:
            raise UserError(
                f"'fope': no pair rotates once within the training length of {original_length} tokens: train on at "
                "least 7 tokens"
            )
        pairs = min(frequencies, self.rotated // 4)
        if not pairs:
            raise UserError(
                f"'fope' rotates half of the pairs of a head, so a head needs at least 4 elements, not {self.rotated} "
                f"(width {self.width}, {self.heads} heads): choose another width or number of heads"
            )
        self.register_buffer("sine_matrix", self._draw_matrix(frequencies, pairs))
        self.register_buffer("cosine_matrix", self._draw_matrix(frequencies, pairs))

    def _draw_matrix(self, frequencies: int, pairs: int) -> Tensor:
        """Return A or B (H, frequencies, P')."""
        matrix = torch.empty(self.heads, frequencies, pairs)
        nn.init.xavier_normal_(matrix, gain=self.config.gain)
        step = math.ceil(frequencies / pairs)
        columns = torch.arange(math.ceil(frequencies / step))
        matrix[:, columns * step, columns] += 1.0
        return matrix

    def angles(self, at: Tensor, pos: Positions) -> Tensor:
        """Return RoPE's angles (B or 1, n, D/2), in radians, of the positions ``at`` (B or 1, n); 0 if θ < 2π/L."""
        s = torch.arange(self.rotated // 2, device=at.device, dtype=torch.float64)
        theta = self.config.base ** (-2 * s / self.rotated)
        theta[self.sine_matrix.shape[1] :] = 0.0
        return at[..., None] * theta.to(at.dtype)

    def rotate(self, x: Tensor, at: Tensor, pos: Positions, key: bool = False) -> Tensor:
        """Rotate x (B, H, n, D) with the matrices of each head; same shape."""
        if x.shape[1] != self.heads:
            raise UserError(
                f"'fope' has a rotation for each of {self.heads} heads, and there are {x.shape[1]} key heads: use as "
                "many key heads as query heads"
            )
        return super().rotate(x, at, pos, key)

    def _cos_sin_of_angles(self, angles: Tensor, at: Tensor, pos: Positions, key: bool) -> CosSin:
        """Return the mixed cosines and sines (B or 1, H, n, D) of angles (B or 1, n, D/2)."""
        _, frequencies, pairs = self.sine_matrix.shape
        padding = self.rotated // 2 - pairs  # pairs without a position
        angles = angles[:, None, :, :frequencies]  # (B or 1, 1, n, frequencies)
        cos = torch.matmul(angles.cos(), self.cosine_matrix.to(angles.dtype))  # (B or 1, H, n, P')
        sin = torch.matmul(angles.sin(), self.sine_matrix.to(angles.dtype))
        cos = F.pad(cos, (0, padding), value=1.0)  # (B or 1, H, n, D/2)
        sin = F.pad(sin, (0, padding), value=0.0 if self.config.padding == "identity" else 1.0)
        return torch.cat([cos, cos], dim=-1), torch.cat([-sin, sin], dim=-1), None
