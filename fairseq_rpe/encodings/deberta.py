"""DeBERTa's disentangled attention: content-to-position and position-to-content terms."""

import math
from dataclasses import dataclass
from typing import Self

import torch
from torch import Tensor, nn

from fairseq_rpe.core.bias import Bias, KeyTableBias, QueryTableBias, SumBias
from fairseq_rpe.core.errors import UserError
from fairseq_rpe.core.positions import Positions
from fairseq_rpe.core.spec import option
from fairseq_rpe.encodings.base import Encoding, register


@register("deberta", colour="pink", marker=">")
class Deberta(Encoding):
    """Disentangled attention (He et al. 2021, arXiv 2006.03654, Eq. 2-4).

    score = [q_i·k_j + q_i·K_δ(i,j) + k_j·Q_δ(i,j)]/sqrt(3D), K = P·W_K, Q = P·W_Q, δ(i, j) = min(i - j + k, 2k - 1) for
    i >= j. P (2k, C) is shared by all layers; W_K and W_Q (C, C) are one per layer.

    The third term has δ(j, i) in the paper and δ(i, j) in the public code, the default; ``p2c`` selects. With
    ``buckets`` B > 0, k is B and distances beyond B/2 share rows logarithmically up to ``max_distance``, as in v2 and
    v3. All larger distances share a row, so any length can be read and the bias does not decay. The absolute positions
    that DeBERTa adds before its output layer serve masked language models and are left out.
    """

    @dataclass(frozen=True)
    class Config:
        """Options of ``deberta``."""

        max_distance: int = option(512, "k if buckets is 0; larger distances share a row", minimum=2, maximum=1 << 20)
        buckets: int = option(0, "rows for the past, logarithmic from half of them on; 0: one per distance", minimum=0)
        c2p: bool = option(True, "content-to-position term q·K")
        p2c: str = option(
            "code", "position-to-content term k·Q: with δ(i, j), δ(j, i) or none", choices=("code", "paper", "none")
        )

    formula = (
        "(q_i·k_j + q_i·K_δ(i,j) + k_j·Q_δ(i,j))/√(3D),  δ(i, j) = min(i - j + k, 2k - 1),  K, Q: projected table rows"
    )
    paper = "He et al. 2021 (arXiv 2006.03654), Eq. 2-4"
    family = "bias that depends on the content"
    sharing_modes = ("layer", "model")
    position_type = "whole"
    fixed_rotation = True
    bounded_reason = (
        "the bias is a product of q or k with a learned vector, bounded where they are, and one number far away"
    )

    def setup(self) -> None:
        """Check the options and create the parameters."""
        cfg = self.config
        if cfg.buckets and not 4 <= cfg.buckets < cfg.max_distance:
            raise UserError(f"'deberta': buckets={cfg.buckets} must be 4 to below max_distance={cfg.max_distance}")
        if not cfg.c2p and cfg.p2c == "none":
            raise UserError("'deberta' without c2p and p2c has no positions: use 'nope'")
        self.span = cfg.buckets or cfg.max_distance  # k
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
        """Share the table P with the first layer."""
        self.table = first.table

    def rotate(self, x: Tensor, at: Tensor, pos: Positions, key: bool = False) -> Tensor:
        """Divide queries by sqrt(1 + terms), so that q·k has the scale of the other terms; keys are unchanged."""
        return x if key else x * (1 + self.terms) ** -0.5

    def rows(self, device: torch.device, sign: int = 1) -> Tensor:
        """Return the row (R,) of P for distances 0, 1, … up to the last distinct row; ``sign=-1`` for δ(j, i)."""
        max_distance = self.config.max_distance
        d = torch.arange(max_distance + 1, device=device)
        if self.config.buckets:
            exact = self.config.buckets // 2  # distances up to here have a bucket each
            # from 0 at `exact` to 1 at max_distance - 1, linear in ln d
            log_share = (d / exact).clamp_min(1).double().log() / math.log((max_distance - 1) / exact)
            d = torch.where(d <= exact, d, (log_share * (exact - 1)).ceil().long() + exact)
        return (sign * d + self.span).clamp(0, 2 * self.span - 1)

    def vectors(self, project: nn.Linear, sign: int, dtype: torch.dtype) -> Tensor:
        """Return the projected vectors (H, R, D) of R distances."""
        vectors = project(self.table).to(dtype).unflatten(1, (self.heads, -1)).transpose(0, 1)  # (H, 2k, D)
        return vectors[:, self.rows(vectors.device, sign)]

    def content_bias(self, q: Tensor, k: Tensor, pos: Positions, features: Tensor | None) -> Bias:
        """Return the two position terms of queries (B, H, n, D) and keys (B, H, m, D)."""
        width = q.shape[-1]
        terms: list[Bias] = []
        if self.to_key is not None:
            terms.append(QueryTableBias(q * width**-0.5, self.vectors(self.to_key, 1, q.dtype)))
        if self.to_query is not None:
            sign = 1 if self.config.p2c == "code" else -1
            key = k * ((1 + self.terms) * width) ** -0.5
            terms.append(KeyTableBias(key, self.vectors(self.to_query, sign, k.dtype)))
        return terms[0] if len(terms) == 1 else SumBias(tuple(terms))
