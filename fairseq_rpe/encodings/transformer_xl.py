"""Transformer-XL's relative attention: projected sinusoids of the distance, and two learned vectors."""

from dataclasses import dataclass
from typing import Self

import torch
from torch import Tensor, nn

from fairseq_rpe.core.bias import Bias, DenseBias, QueryTableBias, SumBias, TokenBias
from fairseq_rpe.core.positions import Positions
from fairseq_rpe.core.spec import option
from fairseq_rpe.encodings.base import Encoding, count_distances, is_sparse, register


@register("transformer_xl", colour="black", marker="D")
class TransformerXL(Encoding):
    """Relative attention of Transformer-XL (Dai et al. 2019, arXiv 1901.02860, Section 3.3).

    score = [(q_i + u)·k_j + (q_i + v)·W_R·R_(i-j)]/sqrt(D).

    R_d (C,) is sin(d·10000^(-2c/C)) for c = 0 … C/2 - 1, followed by the cosines; W_R (C, C) is one per layer; u and v
    (H, D) are shared by all layers, as in public code. R is defined at any distance; ``max_distance`` clips d, as
    public code does at 400 in evaluation. The segment-level recurrence is not part of the encoding.
    """

    @dataclass(frozen=True)
    class Config:
        """Options of ``transformer_xl``."""

        max_distance: int = option(
            0, "largest d, in tokens; larger distances are clipped; 0: no limit", minimum=0, maximum=1 << 20
        )

    formula = "((q_i + u)·k_j + (q_i + v)·W_R·R_(i-j))/√D,  R_d: sinusoids of d,  u, v and W_R learned"
    paper = "Dai et al. 2019 (arXiv 1901.02860), section 3.3"
    family = "bias that depends on the content"
    sharing_modes = ("layer", "model")
    position_type = "whole"
    bounded_reason = "the bias is (q + v)·W_R·R/√D + u·k/√D with sines R, bounded for bounded q and k"

    def setup(self) -> None:
        """Create the parameters."""
        head = self.width // self.heads
        self.u, self.v = (nn.Parameter(torch.randn(self.heads, head) * 0.02) for _ in range(2))
        self.project = nn.Linear(self.width, self.width, bias=False)
        nn.init.normal_(self.project.weight, std=0.02)

    def tie(self, first: Self) -> None:
        """Share u and v with the first layer."""
        self.u, self.v = first.u, first.v

    def vectors(self, d: Tensor) -> Tensor:
        """Return W_R·R_d (H, R, D) of distances d (R,), in their dtype."""
        c = torch.arange((self.width + 1) // 2, device=d.device, dtype=d.dtype)
        angles = d[:, None] * 10000.0 ** (-2 * c / self.width)
        sinusoids = torch.cat([angles.sin(), angles[:, : self.width // 2].cos()], dim=1)
        return torch.matmul(sinusoids, self.project.weight.to(d.dtype).T).unflatten(1, (self.heads, -1)).transpose(0, 1)

    def content_bias(self, q: Tensor, k: Tensor, pos: Positions, features: Tensor | None) -> Bias:
        """Return both position terms of queries (B, H, n, D) and keys (B, H, m, D)."""
        step, scale = pos.step or 1.0, q.shape[-1] ** -0.5
        key_bias = torch.matmul(k, (self.u * scale).to(k.dtype)[:, :, None])[..., 0]  # u·k/sqrt(D), (B, H, m)
        token_bias = TokenBias(key_bias.new_zeros(1).expand(q.shape[:3]), key_bias)
        query = (q + self.v.to(q.dtype)[:, None]) * scale  # (B, H, n, D)
        distances = count_distances(pos, step)
        if self.config.max_distance:  # one more than the largest distance, where all later ones are clipped
            distances = min(distances, int(self.config.max_distance / step) + 2)
        if is_sparse(pos, distances):
            return SumBias((self._dense_bias(query, pos), token_bias))
        d = torch.arange(distances, device=q.device, dtype=q.dtype) * step
        if self.config.max_distance:
            d = d.clamp_max(self.config.max_distance)
        return SumBias((QueryTableBias(query, self.vectors(d), step=step), token_bias))

    def _dense_bias(self, query: Tensor, pos: Positions) -> DenseBias:
        """Return (q + v)·W_R·R_d of each pair, for positions with fewer pairs than distances: query (B, H, n, D)."""
        d = (pos.q[:, :, None] - pos.k[:, None]).clamp_min(0).to(query.dtype)  # (B or 1, n, m)
        if self.config.max_distance:
            d = d.clamp_max(self.config.max_distance)
        # (H, B or 1, n, m, D) · (B, H, n, D) -> (B, H, n, m)
        vectors = self.vectors(d.flatten()).unflatten(1, d.shape).expand(-1, len(query), -1, -1, -1)
        return DenseBias(torch.einsum("hbnmd,bhnd->bhnm", vectors, query))
