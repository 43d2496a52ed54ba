"""Transformer-XL's relative attention: a sinusoid of the distance, projected, and two learned vectors."""

from dataclasses import dataclass
from typing import Self

import torch
from torch import Tensor, nn

from fairseq_rpe.core.bias import Bias, DenseBias, Positions, QueryTableBias, SumBias, TokenBias
from fairseq_rpe.core.spec import option
from fairseq_rpe.encodings.base import Encoding, is_far, reach_of, register


@register("transformer_xl")
class TransformerXL(Encoding):
    """score = [(q_i + u)·k_j + (q_i + v)·W_R·R_(i-j)]/sqrt(D).

    R_d is sin(d·10000^(-2c/C)) for c = 0 … C/2 - 1 and then the cosines; W_R (C to C) is one per layer; u and v (H, D)
    are shared by all layers, as in public code. R is defined at any distance; ``clamp`` caps d, as evaluation there
    does at 400. The recurrence over segments is no part of the encoding and is not here.
    """

    @dataclass(frozen=True)
    class Config:
        clamp: int = option(0, "largest d that R is told, tokens; 0: none", minimum=0, maximum=1 << 20)

    formula = "((q_i + u)·k_j + (q_i + v)·W_R·R_(i-j))/√D"
    paper = "Dai et al. 2019 (arXiv 1901.02860), section 3.3"
    sharing_modes = ("layer", "model")
    position_type = "whole"
    bounded_reason = "the bias is (q + v)·W_R·R/√D + u·k/√D with sines R, bounded for bounded q and k"

    def setup(self) -> None:
        head = self.width // self.heads
        self.u, self.v = (nn.Parameter(torch.randn(self.heads, head) * 0.02) for _ in range(2))
        self.project = nn.Linear(self.width, self.width, bias=False)
        nn.init.normal_(self.project.weight, std=0.02)

    def tie(self, first: Self) -> None:
        self.u, self.v = first.u, first.v

    def vectors(self, d: Tensor) -> Tensor:
        """Distances (R,) -> W_R·R_d of each head, (H, R, D), in their dtype."""
        c = torch.arange((self.width + 1) // 2, device=d.device, dtype=d.dtype)
        angles = d[:, None] * 10000.0 ** (-2 * c / self.width)
        waves = torch.cat([angles.sin(), angles[:, : self.width // 2].cos()], dim=1)
        return torch.matmul(waves, self.project.weight.to(d.dtype).T).unflatten(1, (self.heads, -1)).transpose(0, 1)

    def content_bias(self, q: Tensor, k: Tensor, pos: Positions, notes: Tensor | None) -> Bias:
        step, scale = pos.step or 1.0, q.shape[-1] ** -0.5
        of_key = torch.matmul(k, (self.u * scale).to(k.dtype)[:, :, None])[..., 0]
        levels = TokenBias(of_key.new_zeros(1).expand(q.shape[:3]), of_key)
        query, reach = (q + self.v.to(q.dtype)[:, None]) * scale, reach_of(pos, step)
        if is_far(pos, min(reach, int(self.config.clamp / step) + 2) if self.config.clamp else reach):
            return SumBias((self._by_pair(query, pos), levels))
        d = torch.arange(reach, device=q.device, dtype=q.dtype) * step
        if self.config.clamp:
            d = d[: int(self.config.clamp / step) + 2].clamp_max(self.config.clamp)
        return SumBias((QueryTableBias(query, self.vectors(d), step=step), levels))

    def _by_pair(self, query: Tensor, pos: Positions) -> DenseBias:
        """The same of tokens so far apart that there are more distances than pairs: query (B, H, n, D)."""
        d = (pos.q[:, :, None] - pos.k[:, None]).clamp_min(0).to(query.dtype)  # (B or 1, n, m)
        if self.config.clamp:
            d = d.clamp_max(self.config.clamp)
        # (H, B or 1, n, m, D) · (B, H, n, D) -> (B, H, n, m)
        vectors = self.vectors(d.flatten()).unflatten(1, d.shape).expand(-1, len(query), -1, -1, -1)
        return DenseBias(torch.einsum("hbnmd,bhnd->bhnm", vectors, query))
