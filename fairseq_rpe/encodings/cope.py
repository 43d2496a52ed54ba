"""Contextual position encoding: a gate says which tokens count, and positions are sums of gates."""

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from fairseq_rpe.core.bias import Positions
from fairseq_rpe.core.spec import option
from fairseq_rpe.encodings.base import Encoding, register


@register("cope")
class Cope(Encoding):
    """score = (q_i·k_j + q_i·e[p_ij])/sqrt(D), p_ij = Σ_(m=j…i) σ(q_i·k_m/sqrt(D)), at most P - 1.

    e (D, P), shared by the heads of a layer, starts at 0; between whole positions it is interpolated. A query counts up
    to P - 1 tokens by its gates; all that is further is at position P - 1, at any length, and nothing decays. The
    paper's listing scales q·k alone (``scaled=content``), the public code both. All scores of a query are needed: they
    are made for blocks of queries, and again in the backward pass.
    """

    @dataclass(frozen=True)
    class Config:
        max_positions: int = option(64, "P, the positions that a query tells apart", minimum=2, maximum=1 << 20)
        scaled: str = option("both", "what 1/√D scales: q·k and q·e, or q·k", choices=("both", "content"))

    formula = "(q_i·k_j + q_i·e[p_ij])/√D,  p_ij = Σ_(m=j…i) σ(q_i·k_m/√D)"
    paper = "Golovneva et al. 2024 (arXiv 2405.18719)"
    sharing_modes = ("layer", "model")
    position_type = "none"
    bounded_reason = "the bias is q·e/√D with a learned e, bounded for bounded q, and one number beyond P - 1 gates"

    def setup(self) -> None:
        self.vectors = nn.Parameter(torch.zeros(self.width // self.heads, self.config.max_positions))

    def transform_scores(self, scores: Tensor, q: Tensor, pos: Positions) -> Tensor:
        gates = scores.sigmoid()
        at = gates.flip(-1).cumsum(-1).flip(-1).clamp_max(self.config.max_positions - 1)
        low = at.detach().floor()
        read = torch.matmul(q, self.vectors.to(q.dtype))
        if self.config.scaled == "both":
            read = read * q.shape[-1] ** -0.5
        first, second = (read.gather(-1, x.long()) for x in (low, at.detach().ceil()))
        return scores + torch.lerp(first, second, at - low)
