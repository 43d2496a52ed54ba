"""The Music Transformer's relative attention: a learned vector per head and distance, read by the query."""

from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from fairseq_rpe.core.bias import Bias, Positions, QueryTableBias
from fairseq_rpe.core.errors import UserError
from fairseq_rpe.core.spec import option
from fairseq_rpe.encodings.base import Encoding, register


@register("music")
class Music(Encoding):
    """score = (q_i·k_j + q_i·e_(i-j))/sqrt(D), e (H, M, D).

    Beyond its M distances public code reads zeros, which is no bias (``beyond=zero``); ``beyond=clip`` reads the last
    vector there.
    """

    @dataclass(frozen=True)
    class Config:
        max_distance: int = option(0, "M, distances with a vector; 0: the training length", minimum=0, maximum=1 << 20)
        beyond: str = option("zero", "what is read from distance M on", choices=("zero", "clip"))

    formula = "(q_i·k_j + q_i·e_(i-j))/√D"
    paper = "Huang et al. 2018 (arXiv 1809.04281), Eq. 3"
    sharing_modes = ("layer", "model")
    position_type = "whole"
    bounded_reason = "the bias is q·e/√D with a learned e, bounded for bounded q, and one number from distance M on"

    def setup(self) -> None:
        rows = self.config.max_distance or self.length
        if not rows:
            raise UserError("'music' needs a number of distances: give max_distance=N or a training length")
        head = self.width // self.heads
        self.vectors = nn.Parameter(torch.randn(self.heads, rows, head) * head**-0.5)

    def content_bias(self, q: Tensor, k: Tensor, pos: Positions, notes: Tensor | None) -> Bias:
        vectors = F.pad(self.vectors, (0, 0, 0, 1)) if self.config.beyond == "zero" else self.vectors
        return QueryTableBias(q * q.shape[-1] ** -0.5, vectors)
