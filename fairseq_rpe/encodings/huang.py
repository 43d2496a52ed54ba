"""Relative position embeddings that interact with queries and keys (Huang et al. 2020)."""

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from fairseq_rpe.core.attention_options import AttentionOptions
from fairseq_rpe.core.bias import Bias, KeyTableBias, QueryKeyTableBias, QueryTableBias, SumBias
from fairseq_rpe.core.errors import UserError
from fairseq_rpe.core.positions import Positions
from fairseq_rpe.core.spec import option
from fairseq_rpe.encodings.base import Encoding, register


@register("huang", colour="pink", marker="P")
class Huang(Encoding):
    """Methods 1, 3 and 4 of Huang et al. 2020 (arXiv 2009.13658, Section 4), for distances c = min(i - j, K).

    - Method 1 multiplies the score by a scalar: a_c (q_i·k_j)/sqrt(D). The paper's method 2 has separate scalars for
      the future, so it equals method 1 in a causal model.
    - Method 3 multiplies query, key and a vector elementwise: Σ_e q_ie k_je a_ce / sqrt(D).
    - Method 4 adds products of both with a vector: (q_i·k_j + q_i·a_c + k_j·a_c)/sqrt(D). transformers calls it
      ``relative_key_query``.

    The table (K + 1, 1 or D) is shared by the heads of a layer. The paper does not state its initial values: here the
    factors of methods 1 and 3 start at 1, which is no position information, and the vectors of method 4 start as
    Shaw's. All distances >= K share a row, so any length can be read and the bias does not decay. Method 3 takes O(D)
    time for each pair of distance < K in addition to q·k, so a small K makes it faster.
    """

    @dataclass(frozen=True)
    class Config:
        """Options of ``huang``."""

        method: int = option(4, "the paper's method", choices=(1, 3, 4))
        max_distance: int = option(
            0, "K, in tokens: largest distance with its own row; 0: the training length", minimum=0, maximum=1 << 20
        )

    formula = "1: a_c·(q_i·k_j)/√D;  3: Σ_e q_ie·k_je·a_ce/√D;  4: (q_i·k_j + q_i·a_c + k_j·a_c)/√D;  c = min(i-j, K)"
    paper = "Huang et al. 2020 (arXiv 2009.13658), Section 4"
    family = "bias that depends on the content"
    sharing_modes = ("layer", "model")
    position_type = "whole"
    bounded_reason = (
        "the bias is a product of q and k with learned values, bounded if they are, and constant in d from K on"
    )

    def setup(self) -> None:
        """Check the options and create the parameters."""
        max_distance = self.config.max_distance or self.length
        if not max_distance:
            raise UserError("'huang' needs a number of distances: set max_distance=N or a training length")
        width = self.width // self.heads
        if self.config.method == 4:
            self.table = nn.Parameter(nn.init.xavier_uniform_(torch.empty(max_distance + 1, width)))
        else:
            self.table = nn.Parameter(torch.ones(max_distance + 1, 1 if self.config.method == 1 else width))

    def _check_attention_options(self, options: AttentionOptions) -> None:
        super()._check_attention_options(options)
        if options.softcap and self.config.method != 4:
            raise UserError(
                f"'huang:method={self.config.method}' multiplies q·k, which softcap would cap before: leave it out"
            )

    def content_bias(self, q: Tensor, k: Tensor, pos: Positions, features: Tensor | None) -> Bias:
        """Return what the method adds to q·k/sqrt(D) of queries (B, H, n, D) and keys (B, H, m, D)."""
        width = q.shape[-1]
        scaled, table = q * width**-0.5, self.table.to(q.dtype)[None]  # (B, H, n, D), (1, K + 1, 1 or D)
        if self.config.method == 4:
            return SumBias((QueryTableBias(scaled, table), KeyTableBias(k * width**-0.5, table)))
        # attention adds q·k/sqrt(D) itself, so the bias subtracts it
        return QueryKeyTableBias(scaled, k, table - 1)
