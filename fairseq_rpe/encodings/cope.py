"""Contextual position encoding (CoPE): positions are sums of gates that depend on the tokens."""

from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from fairseq_rpe.core.positions import Positions
from fairseq_rpe.core.spec import option
from fairseq_rpe.core.tensors import runs_eagerly
from fairseq_rpe.encodings.base import Encoding, register

GATES_PER_POSITION = 3  # number of keys that are first assumed to add up to a position; gates start near one half


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
        logits = torch.matmul(q, self.vectors.to(q.dtype))  # (B, H, n, P)
        if self.config.scale_on == "both":
            logits = logits * q.shape[-1] ** -0.5
        if scores.device.type != "cpu" or not runs_eagerly():
            return scores + self._interpolate(logits, self._positions(scores))
        near, at = self._near_positions(scores)
        if near == scores.shape[3]:
            return scores + self._interpolate(logits, at)
        far_scores, near_scores = scores[..., :-near], scores[..., -near:]
        return torch.cat([far_scores + logits[..., -1:], near_scores + self._interpolate(logits, at)], dim=-1)

    def _positions(self, scores: Tensor) -> Tensor:
        """Return p_ij (B, H, n, m) of scores of all keys from the first of them to the query."""
        gates = scores.sigmoid()  # (B, H, n, m); 0 for hidden keys, whose scores are -inf
        # a sum from the right: p_ij counts the gates of keys j … i
        return gates.flip(-1).cumsum(-1).flip(-1).clamp_max(self.config.max_positions - 1)

    def _near_positions(self, scores: Tensor) -> tuple[int, Tensor]:
        """Return a number w of keys, and p_ij (B, H, n, w) of the last w keys; that of all others is P - 1."""
        last, (n, m) = self.config.max_positions - 1, scores.shape[2:]
        near = n + GATES_PER_POSITION * last
        while near < m:
            at = self._positions(scores[..., -near:])
            if bool((at[..., 0] >= last).all()):
                return near, at
            near *= 2
        return m, self._positions(scores)

    def _interpolate(self, logits: Tensor, at: Tensor) -> Tensor:
        """Return logits (B, H, n, P) at positions (B, H, n, w), interpolated linearly."""
        low = at.detach().floor()
        index = low.long()
        slopes = F.pad(logits.diff(dim=-1), (0, 1))  # (B, H, n, P)
        return torch.addcmul(logits.gather(-1, index), at - low, slopes.gather(-1, index))
