"""Relative position representations: a learned vector per clipped distance (Shaw et al. 2018)."""

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from fairseq_rpe.core.bias import Bias, QueryTableBias, RelativeValues
from fairseq_rpe.core.positions import Positions
from fairseq_rpe.core.spec import option
from fairseq_rpe.encodings.base import Encoding, register


@register("shaw", colour="green", marker="<")
class Shaw(Encoding):
    """Vectors of clipped distances added to keys, and to values with ``values`` (Shaw et al. 2018, arXiv 1803.02155).

    score = q_i·(k_j + a_c)/sqrt(D) (Eq. 4), output_i = Σ_j p_ij·(v_j + b_c) (Eq. 3), c = min(i - j, K). a and b are
    (K + 1, D) and shared by the heads of a layer; the paper's K rows of the future have no use in a causal model. All
    distances >= K share a row, so any length can be read and the bias does not decay.
    """

    @dataclass(frozen=True)
    class Config:
        """Options of ``shaw``."""

        max_distance: int = option(16, "K, in tokens: largest distance with its own vector", minimum=1, maximum=1 << 20)
        values: bool = option(
            False, "vectors for values as well, as in the paper; slower, because attention weights are needed"
        )

    formula = "q_i·(k_j + a_min(i-j, K))/√D;  with values  Σ_j p_ij·(v_j + b_min(i-j, K))"
    paper = "Shaw et al. 2018 (arXiv 1803.02155), Eq. 3-5"
    family = "bias that depends on the content"
    sharing_modes = ("layer", "model")
    position_type = "whole"
    bounded_reason = "the bias is q·a/√D with a learned a, bounded for bounded q, and constant in d from K on"

    def setup(self) -> None:
        """Create the parameters."""
        shape = self.config.max_distance + 1, self.width // self.heads
        self.keys = nn.Parameter(nn.init.xavier_uniform_(torch.empty(shape)))
        self.values = nn.Parameter(nn.init.xavier_uniform_(torch.empty(shape))) if self.config.values else None

    def content_bias(self, q: Tensor, k: Tensor, pos: Positions, features: Tensor | None) -> Bias:
        """Return q·a/sqrt(D) of queries (B, H, n, D)."""
        return QueryTableBias(q * q.shape[-1] ** -0.5, self.keys[None])

    def relative_values(self, pos: Positions) -> RelativeValues | None:
        """Return the vectors b (1, K + 1, D), or None."""
        return None if self.values is None else RelativeValues(self.values[None])
