"""DeBERTa's disentangled attention: content reads positions and positions read content."""

import math
from dataclasses import dataclass
from typing import Self

import torch
from torch import Tensor, nn

from fairseq_rpe.core.bias import Bias, KeyTableBias, Positions, QueryTableBias, SumBias
from fairseq_rpe.core.errors import UserError
from fairseq_rpe.core.spec import option
from fairseq_rpe.encodings.base import Encoding, register


@register("deberta")
class Deberta(Encoding):
    """score = [q_i·k_j + q_i·K_δ(i,j) + k_j·Q_δ(i,j)]/sqrt(3D), K = P·W_K, Q = P·W_Q.

    P (2k, C) is shared by all layers, W_K and W_Q are one per layer; δ(i, j) = min(i - j + k, 2k - 1) for the past.
    The paper's third term has δ(j, i), the public code δ(i, j), which ``p2c`` chooses. With ``buckets`` B > 0, k is
    B, and distances beyond B/2 share rows logarithmically up to ``max_distance``, as in v2 and v3.
    All far distances share a row: any length can be read, and nothing decays. What DeBERTa adds before its output
    layer is for masked language models and is not here.
    """

    @dataclass(frozen=True)
    class Config:
        max_distance: int = option(512, "k without buckets: tokens", minimum=2, maximum=1 << 20)
        buckets: int = option(0, "rows for the past, logarithmic from half of them on; 0: one per distance", minimum=0)
        c2p: bool = option(True, "whether queries read positions")
        p2c: str = option("code", "how keys read positions: δ(i, j), δ(j, i) or not", choices=("code", "paper", "none"))

    formula = "(q_i·k_j + q_i·K_δ(i,j) + k_j·Q_δ(i,j))/√(3D)"
    paper = "He et al. 2021 (arXiv 2006.03654), Eq. 2-4"
    sharing_modes = ("layer", "model")
    position_type = "whole"
    fixed_rotation = True
    bounded_reason = (
        "the bias is a product of q or k with a learned vector, bounded where they are, and one number far away"
    )

    def setup(self) -> None:
        cfg = self.config
        if cfg.buckets and not 4 <= cfg.buckets < cfg.max_distance:
            raise UserError(f"'deberta': buckets={cfg.buckets} must be 4 to below max_distance={cfg.max_distance}")
        if not cfg.c2p and cfg.p2c == "none":
            raise UserError("'deberta' without c2p and p2c has no positions: use 'nope'")
        self.span = cfg.buckets or cfg.max_distance
        self.terms = cfg.c2p + (cfg.p2c != "none")
        self.table = nn.Parameter(torch.randn(2 * self.span, self.width) * 0.02)
        self.to_key = nn.Linear(self.width, self.width, bias=False) if cfg.c2p else None
        self.to_query = nn.Linear(self.width, self.width) if cfg.p2c != "none" else None
        for project in (self.to_key, self.to_query):
            if project is not None:
                nn.init.normal_(project.weight, std=0.02)
        if self.to_query is not None:
            nn.init.zeros_(self.to_query.bias)

    def tie(self, first: Self) -> None:
        self.table = first.table

    def rotate(self, x: Tensor, at: Tensor, pos: Positions, key: bool = False) -> Tensor:
        """Queries over sqrt(1 + terms), since q·k shares the scale of the other terms."""
        return x if key else x * (1 + self.terms) ** -0.5

    def rows(self, device: torch.device, sign: int = 1) -> Tensor:
        """The row of P for each distance until one is the last for good; ``sign`` -1: of δ(j, i)."""
        d = torch.arange(self.config.max_distance + 1, device=device)
        if self.config.buckets:
            middle = self.config.buckets // 2
            steps = (d / middle).clamp_min(1).double().log() / math.log((self.config.max_distance - 1) / middle)
            d = torch.where(d <= middle, d, (steps * (middle - 1)).ceil().long() + middle)
        return (sign * d + self.span).clamp(0, 2 * self.span - 1)

    def vectors(self, project: nn.Linear, sign: int, dtype: torch.dtype) -> Tensor:
        """(H, R, D) of each distance."""
        found = project(self.table).to(dtype).unflatten(1, (self.heads, -1)).transpose(0, 1)
        return found[:, self.rows(found.device, sign)]

    def content_bias(self, q: Tensor, k: Tensor, pos: Positions, notes: Tensor | None) -> Bias:
        width = q.shape[-1]
        terms: list[Bias] = []
        if self.to_key is not None:
            terms.append(QueryTableBias(q * width**-0.5, self.vectors(self.to_key, 1, q.dtype)))
        if self.to_query is not None:
            sign = 1 if self.config.p2c == "code" else -1
            key = k * ((1 + self.terms) * width) ** -0.5
            terms.append(KeyTableBias(key, self.vectors(self.to_query, sign, k.dtype)))
        return terms[0] if len(terms) == 1 else SumBias(tuple(terms))
