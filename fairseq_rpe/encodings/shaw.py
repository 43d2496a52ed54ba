"""Relative position representations: a learned vector per clipped distance, read by the query."""

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from fairseq_rpe.core.bias import Bias, Positions, QueryTableBias, RelativeValues
from fairseq_rpe.core.spec import option
from fairseq_rpe.encodings.base import Encoding, register


@register("shaw")
class Shaw(Encoding):
    """Keys and, with ``values``, values with a vector of their clipped distance added.

    score = q_i·(k_j + a_c)/sqrt(D), output_i = Σ_j weight_ij·(v_j + b_c), c = min(i - j, K). a and b are (K + 1, D),
    shared by the heads of a layer: of the 2K + 1 rows of the paper those of the future have no use in a causal model.
    All distances from K on share a row, so that any length can be read, and nothing decays.
    """

    @dataclass(frozen=True)
    class Config:
        clip: int = option(16, "K, tokens: the largest distance with a vector of its own", minimum=1, maximum=1 << 20)
        values: bool = option(False, "vectors for values as well, as in the paper; slower, since weights are needed")

    formula = "q_i·(k_j + a_min(i-j, K))/√D;  with values  Σ_j p_ij·(v_j + b_min(i-j, K))"
    paper = "Shaw et al. 2018 (arXiv 1803.02155), Eq. 3-5"
    sharing_modes = ("layer", "model")
    position_type = "whole"
    bounded_reason = "the bias is q·a/√D with a learned a, bounded for bounded q, and one number from distance K on"

    def setup(self) -> None:
        shape = self.config.clip + 1, self.width // self.heads
        self.keys = nn.Parameter(nn.init.xavier_uniform_(torch.empty(shape)))
        self.values = nn.Parameter(nn.init.xavier_uniform_(torch.empty(shape))) if self.config.values else None

    def content_bias(self, q: Tensor, k: Tensor, pos: Positions, notes: Tensor | None) -> Bias:
        return QueryTableBias(q * q.shape[-1] ** -0.5, self.keys[None])

    def relative_values(self, pos: Positions) -> RelativeValues | None:
        return None if self.values is None else RelativeValues(self.values[None])
