"""Contextual position encoding (CoPE): positions are sums of gates that depend on the tokens."""

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from fairseq_rpe.core.positions import Positions
from fairseq_rpe.core.spec import option
from fairseq_rpe.encodings.base import Encoding, register


@register("cope", colour="black", marker="v")
class Cope(Encoding):
    """CoPE (Golovneva et al. 2024, arXiv 2405.18719).

    score = (q_i·k_j + q_i·e[p_ij])/sqrt(D), p_ij = min(P - 1, Σ_(m=j…i) σ(q_i·k_m/sqrt(D))).

    The table e (D, P) is shared by the heads of a layer, starts at 0, and is interpolated linearly between whole
    positions. All keys with p_ij >= P - 1 share position P - 1, at any length, so the bias does not decay. The paper's
    listing scales q·k only (``scale_on=content``); public code scales both terms, which is the default. All scores of
    a query are needed, so they are computed for blocks of queries, and again in the backward pass.
    """

    @dataclass(frozen=True)
    class Config:
        """Options of ``cope``."""

        max_positions: int = option(64, "P, number of positions that a query distinguishes", minimum=2, maximum=1 << 20)
        scale_on: str = option("both", "what 1/√D scales: q·k and q·e, or q·k", choices=("both", "content"))

    formula = "(q_i·k_j + q_i·e[p_ij])/√D,  p_ij = Σ_(m=j…i) σ(q_i·k_m/√D)"
    paper = "Golovneva et al. 2024 (arXiv 2405.18719)"
    family = "bias that depends on the content"
    sharing_modes = ("layer", "model")
    position_type = "none"
    bounded_reason = "the bias is q·e/√D with a learned e, bounded for bounded q, and one number beyond P - 1 gates"

    def setup(self) -> None:
        """Create the parameters."""
        self.vectors = nn.Parameter(torch.zeros(self.width // self.heads, self.config.max_positions))

    def transform_scores(self, scores: Tensor, q: Tensor, pos: Positions) -> Tensor:
        """Add the interpolated q·e[p_ij] to scores (B, H, n, m) of queries q (B, H, n, D)."""
        gates = scores.sigmoid()  # (B, H, n, m); 0 for hidden keys, whose scores are -inf
        # a sum from the right: p_ij counts the gates of keys j … i
        at = gates.flip(-1).cumsum(-1).flip(-1).clamp_max(self.config.max_positions - 1)
        low = at.detach().floor()
        logits = torch.matmul(q, self.vectors.to(q.dtype))  # (B, H, n, P)
        if self.config.scale_on == "both":
            logits = logits * q.shape[-1] ** -0.5
        first, second = (logits.gather(-1, x.long()) for x in (low, at.detach().ceil()))  # (B, H, n, m) each
        return scores + torch.lerp(first, second, at - low)
