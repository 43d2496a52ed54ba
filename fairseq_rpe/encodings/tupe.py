"""TUPE: separate queries and keys for positions and for tokens (Ke et al. 2021)."""

import math
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from fairseq_rpe.core.bias import PairBias
from fairseq_rpe.core.log_bias import LogBias
from fairseq_rpe.core.positions import Positions
from fairseq_rpe.core.spec import option
from fairseq_rpe.encodings.base import PairwiseBias, register
from fairseq_rpe.encodings.position_table import PositionTable
from fairseq_rpe.encodings.t5 import relative_position_bucket


@register("tupe", colour="black", marker="s")
class Tupe(PositionTable, PairwiseBias):
    """TUPE (Ke et al. 2021, arXiv 2006.15595): untied position-to-position term; with ``relative=true`` TUPE-R.

    score = (x_i W_Q)·(x_j W_K)/sqrt(2D) + (p_i U_Q)·(p_j U_K)/sqrt(2D), with ``relative=true`` plus T5's learned value
    of the distance's bucket, which is not scaled. p is a table (L, C), and U = (U_Q, U_K) one linear map (C -> 2C, with
    bias); D is the width of a head. Queries are multiplied by the additional 1/sqrt(2). As in the authors' code, a
    LayerNorm precedes U, which the paper's formula lacks (``norm=false``), and one module serves all layers. Parameters
    start at N(0, 0.02). The paper's reset of [CLS] is left out: a causal language model has no such token. Positions
    beyond the table are refused.
    """

    @dataclass(frozen=True)
    class Config:
        """Options of ``tupe``."""

        relative: bool = option(False, "add T5's bias of the distance, by 32 causal buckets up to 128 (TUPE-R)")
        norm: bool = option(True, "LayerNorm of position vectors, as in the authors' code")
        max_positions: int = option(0, "rows of the table; 0: the training length", minimum=0, maximum=1 << 24)

    formula = "(p_i U_Q)·(p_j U_K) / sqrt(2D) [+ table[bucket(d), h]],  and q·k / sqrt(2D)"
    paper = "Ke, He, Liu 2021 (arXiv 2006.15595)"
    sharing_modes = ("model",)
    position_type = "whole"
    fixed_rotation = True
    buckets, max_distance = 32, 128
    name = "tupe"

    def setup(self) -> None:
        """Check the options and create the parameters."""
        self.table = nn.Parameter(torch.randn(self.count_rows(), self.width) * 0.02)
        self.norm = nn.LayerNorm(self.width) if self.config.norm else None
        self.project = nn.Linear(self.width, 2 * self.width)
        nn.init.normal_(self.project.weight, std=0.02)
        nn.init.zeros_(self.project.bias)
        self.relative = nn.Parameter(torch.randn(self.buckets, self.heads) * 0.02) if self.config.relative else None

    def rotate(self, x: Tensor, at: Tensor, pos: Positions, key: bool = False) -> Tensor:
        """Scale queries by 1/sqrt(2); keys are unchanged."""
        return x if key else x * 0.5**0.5

    def vectors(self, rows: int, dtype: torch.dtype) -> Tensor:
        """Return the vectors p (rows, C) of the first positions, after the LayerNorm."""
        p = self.table[:rows].to(dtype)
        if self.norm is None:
            return p
        return F.layer_norm(p, (self.width,), self.norm.weight.to(dtype), self.norm.bias.to(dtype), self.norm.eps)

    def position_bias(self, pos: Positions) -> PairBias:
        """Return the bias of pairs as inner products of vectors of query positions and of key positions."""
        first, last, last_key = (int(x) for x in (pos.q.min().clamp_min(0), pos.q.max(), pos.k.max()))
        largest = max(last, last_key)
        self.check_rows(largest, len(self.table))
        q, k = self._project(self.vectors(largest + 1, pos.k.dtype), first, last)
        relative = () if self.relative is None else (self.relative.to(pos.k.dtype),)
        return PairBias(partial(self._pair_bias, first), (q, k, *relative))

    def _project(self, p: Tensor, first: int, last: int) -> tuple[Tensor, Tensor]:
        """Project the vectors of positions for queries and keys.

        For few queries, as in decoding, U_K is applied to the queries instead, so that no key has to be projected:
        q·(W p + b) = (Wᵀ q)·p + q·b.

        Args:
            p: (T, C) vectors of positions 0 … T-1.
            first: smallest position of a query.
            last: largest position of a query.

        Returns:
            Vectors (R, H, E) of positions ``first`` … ``last`` for queries, and (T, H, E) of all positions for keys,
            with E = D; or for few queries (T, 1, E) for keys, which all heads share, with E = C + 1.
        """
        heads = self.heads
        (w_q, w_k), (b_q, b_k) = (x.to(p.dtype).chunk(2) for x in (self.project.weight, self.project.bias))
        q = F.linear(p[first : last + 1], w_q, b_q).unflatten(1, (heads, -1))  # (R, H, D)
        q = q / math.sqrt(2 * self.width // heads)
        if len(q) * heads >= self.width:
            return q, F.linear(p, w_k, b_k).unflatten(1, (heads, -1))
        constant = (q * b_k.view(heads, -1)).sum(-1, keepdim=True)  # q·b, (R, H, 1)
        folded = torch.einsum("ihd,hdc->ihc", q, w_k.unflatten(0, (heads, -1)))  # (R, H, C)
        return torch.cat([folded, constant], dim=-1), F.pad(p, (0, 1), value=1.0)[:, None]

    def _pair_bias(self, first: int, i: Tensor, j: Tensor, q: Tensor, k: Tensor, *relative: Tensor) -> Tensor:
        """Return the bias of pairs of positions.

        Args:
            first: position of the first vector of ``q``.
            i: (B or 1, n) positions of queries.
            j: (B or 1, m) positions of keys.
            q: (R, H, E) vectors for queries.
            k: (T, H or 1, E) vectors for keys.
            relative: (buckets, H) T5's table, with ``relative=true``.

        Returns:
            (B or 1, H, n, m).
        """
        queries, keys = q[(i.long() - first).clamp_min(0)], k[j.long().clamp_min(0)]  # (B or 1, n or m, H or 1, E)
        bias = torch.matmul(queries.transpose(1, 2), keys.permute(0, 2, 3, 1))  # (B or 1, H, n, m)
        if relative:
            d = (i[:, :, None] - j[:, None, :]).clamp_min(0)  # (B or 1, n, m)
            bias = bias + relative[0][relative_position_bucket(d, self.buckets, self.max_distance)].permute(0, 3, 1, 2)
        return bias

    def bias(self, i: Tensor, j: Tensor) -> Tensor:
        """Return the log-bias of every pair of positions i (B or 1, n), j (B or 1, m): (B or 1, H, n, m)."""
        bias = self.position_bias(Positions(i, j, contiguous=False))
        return bias.fn(i, j, *bias.aux)

    def logged_scalars(self) -> dict[str, Tensor]:
        """Return the last bucket's value of each head."""
        return {} if self.relative is None else {"tupe_last": self.relative[-1]}

    def log_bias_formulas(self) -> list[LogBias]:
        """Return a lower bound of the log-bias of each head."""
        note = "a learned bias of each pair of positions is bounded, and the table is finite"
        return [LogBias("0", note, at_least=True)] * self.heads
