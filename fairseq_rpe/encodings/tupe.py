"""TUPE: queries and keys of positions beside those of tokens."""

import math
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from fairseq_rpe.core.bias import PairBias, Positions
from fairseq_rpe.core.errors import UserError
from fairseq_rpe.core.log_bias import LogBias
from fairseq_rpe.core.spec import option
from fairseq_rpe.encodings.base import PairwiseBias, register
from fairseq_rpe.encodings.t5 import bucket


@register("tupe")
class Tupe(PairwiseBias):
    """Positions have queries and keys of their own, apart from the tokens'; refuses positions beyond its table.

    The score is (x_i W_Q)·(x_j W_K)/sqrt(2D) + (p_i U_Q)·(p_j U_K)/sqrt(2D), with ``relative=true`` plus T5's learned
    number of the distance's bucket, which is not scaled. p is a table (L, C) and U one linear map (C -> 2C, with bias)
    for all heads; D is a head's width. The content's further factor 1/sqrt(2) goes to the queries. As in the authors'
    code a LayerNorm comes before U, which the formula lacks (``norm=false``), and one module serves all layers. It
    starts at N(0, 0.02). The paper's reset of [CLS] is left out: a causal language model has no such token.
    """

    @dataclass(frozen=True)
    class Config:
        relative: bool = option(False, "add T5's bias of the distance, by 32 causal buckets up to 128 (TUPE-R)")
        norm: bool = option(True, "LayerNorm of the positions' vectors, as in the authors' code")
        max_positions: int = option(0, "rows of the table; 0: the training length", minimum=0, maximum=1 << 24)

    formula = "(p_i U_Q)·(p_j U_K) / sqrt(2D) [+ table[bucket(d), h]],  and q·k / sqrt(2D)"
    paper = "Ke, He, Liu 2021 (arXiv 2006.15595)"
    sharing_modes = ("model",)
    position_type = "whole"
    fixed_rotation = True
    buckets, max_distance = 32, 128

    def setup(self) -> None:
        rows = self.config.max_positions or self.length
        if not rows:
            raise UserError("'tupe' needs a table size: give max_positions=N or a training length")
        if self.length and rows < self.length:
            raise UserError(
                f"'tupe:max_positions={rows}' is shorter than the training length {self.length}: raise it or use 0"
            )
        self.table = nn.Parameter(torch.randn(rows, self.width) * 0.02)
        self.norm = nn.LayerNorm(self.width) if self.config.norm else None
        self.project = nn.Linear(self.width, 2 * self.width)
        nn.init.normal_(self.project.weight, std=0.02)
        nn.init.zeros_(self.project.bias)
        self.relative = nn.Parameter(torch.randn(self.buckets, self.heads) * 0.02) if self.config.relative else None

    def rotate(self, x: Tensor, at: Tensor, pos: Positions, key: bool = False) -> Tensor:
        return x if key else x * 0.5**0.5

    def vectors(self, rows: int, dtype: torch.dtype) -> Tensor:
        """p (rows, C) of the first positions, after the norm."""
        p = self.table[:rows].to(dtype)
        if self.norm is None:
            return p
        return F.layer_norm(p, (self.width,), self.norm.weight.to(dtype), self.norm.bias.to(dtype), self.norm.eps)

    def position_bias(self, pos: Positions) -> PairBias:
        """Vectors of queries (R, H, E) and keys (R', H or 1, E) of which a pair's bias is the inner product.

        Where queries are few, as in decoding, U_K goes to their side: then no key has to be projected.
        """
        first, last, most = (int(x) for x in (pos.q.min().clamp_min(0), pos.q.max(), pos.k.max()))
        if max(last, most) >= len(self.table):
            raise UserError(
                f"position {max(last, most)} is beyond the {len(self.table)} positions that 'tupe' was trained with: "
                f"evaluate at {len(self.table)} tokens or fewer, or train with an encoding that extrapolates"
            )
        dtype, heads = pos.k.dtype, self.heads
        p = self.vectors(max(last, most) + 1, dtype)
        (w_q, w_k), (b_q, b_k) = (x.to(dtype).chunk(2) for x in (self.project.weight, self.project.bias))
        q = F.linear(p[first : last + 1], w_q, b_q).unflatten(1, (heads, -1)) / math.sqrt(2 * self.width // heads)
        if len(q) * heads < self.width:
            constant = (q * b_k.view(heads, -1)).sum(-1, keepdim=True)
            q = torch.cat([torch.einsum("ihd,hdc->ihc", q, w_k.unflatten(0, (heads, -1))), constant], dim=-1)
            k = F.pad(p, (0, 1), value=1.0)[:, None]
        else:
            k = F.linear(p, w_k, b_k).unflatten(1, (heads, -1))
        near = () if self.relative is None else (self.relative.to(dtype),)
        return PairBias(partial(self._between, first), (q, k, *near))

    def _between(self, first: int, i: Tensor, j: Tensor, q: Tensor, k: Tensor, *near: Tensor) -> Tensor:
        queries, keys = q[(i.long() - first).clamp_min(0)], k[j.long().clamp_min(0)]
        found = torch.matmul(queries.transpose(1, 2), keys.permute(0, 2, 3, 1))
        if near:
            d = (i[:, :, None] - j[:, None, :]).clamp_min(0)
            found = found + near[0][bucket(d, self.buckets, self.max_distance)].permute(0, 3, 1, 2)
        return found

    def bias(self, i: Tensor, j: Tensor) -> Tensor:
        form = self.position_bias(Positions(i, j, contiguous=False))
        return form.fn(i, j, *form.aux)

    def logged_scalars(self) -> dict[str, Tensor]:
        return {} if self.relative is None else {"tupe_last": self.relative[-1]}

    def log_bias_formulas(self) -> list[LogBias]:
        note = "a learned number for each pair of positions is bounded, and there is none beyond its table"
        return [LogBias("0", note, at_least=True)] * self.heads
