"""Relative attention of the Music Transformer: a learned vector per head and distance, multiplied with the query."""

from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from fairseq_rpe.core.bias import Bias, QueryTableBias
from fairseq_rpe.core.errors import UserError
from fairseq_rpe.core.positions import Positions
from fairseq_rpe.core.spec import option
from fairseq_rpe.encodings.base import Encoding, register


@register("music", colour="green", marker=">")
class Music(Encoding):
    """Music Transformer (Huang et al. 2018, arXiv 1809.04281, Eq. 3): score = (q_i·k_j + q_i·e_(i-j))/sqrt(D).

    The table e is (H, M, D). For distances >= M public code reads zeros, so there is no bias (``out_of_range=zero``);
    ``out_of_range=clip`` reads the last vector instead.
    """

    @dataclass(frozen=True)
    class Config:
        """Options of ``music``."""

        max_distance: int = option(0, "M, distances with a vector; 0: the training length", minimum=0, maximum=1 << 20)
        out_of_range: str = option("zero", "vector of distances >= M: zeros, or the last one", choices=("zero", "clip"))

    formula = "(q_i·k_j + q_i·e_(i-j))/√D"
    paper = "Huang et al. 2018 (arXiv 1809.04281), Eq. 3"
    family = "bias that depends on the content"
    sharing_modes = ("layer", "model")
    position_type = "whole"
    bounded_reason = "the bias is q·e/√D with a learned e, bounded for bounded q, and constant in d from M on"

    def setup(self) -> None:
        """Check the options and create the parameters."""
        rows = self.config.max_distance or self.length
        if not rows:
            raise UserError("'music' needs a number of distances: set max_distance=N or a training length")
        head = self.width // self.heads
        self.vectors = nn.Parameter(torch.randn(self.heads, rows, head) * head**-0.5)

    def content_bias(self, q: Tensor, k: Tensor, pos: Positions, features: Tensor | None) -> Bias:
        """Return q·e/sqrt(D) of queries (B, H, n, D)."""
        vectors = F.pad(self.vectors, (0, 0, 0, 1)) if self.config.out_of_range == "zero" else self.vectors
        return QueryTableBias(q * q.shape[-1] ** -0.5, vectors)
