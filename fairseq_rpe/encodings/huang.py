"""Relative position embeddings that interact with queries and keys: the methods of Huang et al. (2020)."""

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from fairseq_rpe.core.bias import Bias, KeyTableBias, Positions, QueryKeyTableBias, QueryTableBias, SumBias
from fairseq_rpe.core.errors import UserError
from fairseq_rpe.core.spec import option
from fairseq_rpe.encodings.base import Encoding, register


@register("huang")
class Huang(Encoding):
    """The score q_i·k_j/sqrt(D) changed by a learned row a_c of the clipped distance c = min(i - j, K).

    - Method 1 multiplies the score by a number: a_c (q_i·k_j)/sqrt(D). The paper's method 2 has other numbers for the
      future, so that it is method 1 in a causal model.
    - Method 3 multiplies query, key and a vector element by element: Σ_e q_ie k_je a_ce / sqrt(D).
    - Method 4 adds what the query and the key each read: (q_i·k_j + q_i·a_c + k_j·a_c)/sqrt(D). transformers calls it
      ``relative_key_query``.

    The table (K + 1, 1 or D) is shared by the heads of a layer. Its initial values are not stated: here the factors of
    methods 1 and 3 start at 1, which is no position information, and the vectors of method 4 as Shaw's do. All
    distances from K on share a row, so that any length can be read, and nothing decays. Method 3 takes O(D) time for
    each pair nearer than K beside the product of queries and keys, so that a small K makes it faster.
    """

    @dataclass(frozen=True)
    class Config:
        method: int = option(4, "the paper's method", choices=(1, 3, 4))
        max_distance: int = option(
            0, "K, tokens: the last distance with a row of its own; 0: the training length", minimum=0, maximum=1 << 20
        )

    formula = "1: a_c·(q_i·k_j)/√D;  3: Σ_e q_ie·k_je·a_ce/√D;  4: (q_i·k_j + q_i·a_c + k_j·a_c)/√D;  c = min(i-j, K)"
    paper = "Huang et al. 2020 (arXiv 2009.13658), Section 4"
    sharing_modes = ("layer", "model")
    position_type = "whole"
    bounded_reason = (
        "the bias is a product of q and k with learned numbers, bounded where they are, and the same from K on"
    )

    def setup(self) -> None:
        clip = self.config.max_distance or self.length
        if not clip:
            raise UserError("'huang' needs a number of distances: give max_distance=N or a training length")
        width = self.width // self.heads
        if self.config.method == 4:
            self.table = nn.Parameter(nn.init.xavier_uniform_(torch.empty(clip + 1, width)))
        else:
            self.table = nn.Parameter(torch.ones(clip + 1, 1 if self.config.method == 1 else width))

    def content_bias(self, q: Tensor, k: Tensor, pos: Positions, notes: Tensor | None) -> Bias:
        width = q.shape[-1]
        scaled, table = q * width**-0.5, self.table.to(q.dtype)[None]  # (B, H, n, D), (1, K + 1, 1 or D)
        if self.config.method == 4:
            return SumBias((QueryTableBias(scaled, table), KeyTableBias(k * width**-0.5, table)))
        # attention itself adds q·k/sqrt(D), which the bias takes away again
        return QueryKeyTableBias(scaled, k, table - 1)
