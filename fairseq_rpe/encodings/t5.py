"""T5's bucketed relative bias."""

import math
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from fairseq_rpe.core.errors import UserError
from fairseq_rpe.core.log_bias import LogBias, exact
from fairseq_rpe.core.spec import option
from fairseq_rpe.encodings.base import DistanceBias, register


def bucket(d: Tensor, buckets: int, max_distance: int) -> Tensor:
    """Causal bucket of each distance, int64: d below buckets/2, then logarithmic up to max_distance.

    Raffel et al.'s scheme: E = buckets/2; ``min(buckets-1, E + trunc(ln(d/E) / ln(max/E) · (buckets-E)))``.
    """
    exact = buckets // 2
    scaled = torch.log(d.clamp_min(exact) / exact) / math.log(max_distance / exact) * (buckets - exact)
    far = (exact + scaled.to(torch.int64)).clamp_max(buckets - 1)
    return torch.where(d < exact, d.to(torch.int64), far)


MAX_DISTANCE = 128  # T5's own


@register("t5_bias")
class T5Bias(DistanceBias):
    """A learned number per bucket and head; constant from the last bucket on, so it diverges.

    Added after 1/sqrt(D) like every bias here (T5 itself leaves that factor out); one table for all layers, as in T5.
    ``variant=clipped`` has a bucket for each of the distances 0 … buckets-1 and no logarithmic ones: the bias of d is
    table[min(d, buckets-1)], the simpler form that FIRE (arXiv 2310.04418, Section 2.2) gives for T5's bias.
    """

    @dataclass(frozen=True)
    class Config:
        buckets: int = option(
            32, "number of buckets; the first half holds one distance each", minimum=2, maximum=65_536
        )
        max_distance: int | None = option(
            None, "variant=log: distances from here on share the last bucket; none: 128", minimum=2, maximum=2**24
        )
        init_std: float = option(0.02, "standard deviation of the initial table (our choice)", minimum=0)
        variant: str = option(
            "log", "log: logarithmic buckets; clipped: one distance in each but the last", choices=("log", "clipped")
        )

    formula = "table[bucket(d), h]"
    paper = "Raffel et al. 2020 (arXiv 1910.10683)"
    position_type = "whole"

    def setup(self) -> None:
        half, given = self.config.buckets // 2, self.config.max_distance
        self.clipped = self.config.variant == "clipped"
        if self.clipped and given is not None:
            raise UserError(
                f"'t5_bias:variant=clipped' ends at distance buckets-1 = {self.config.buckets - 1}: leave out "
                f"max_distance={given}, or choose another number of buckets"
            )
        self.max_distance = MAX_DISTANCE if given is None else given
        if not self.clipped and self.max_distance <= half:
            raise UserError(
                f"option 'max_distance' of 't5_bias' must be more than buckets/2 = {half}, not {self.max_distance}"
            )
        self.table = nn.Parameter(torch.randn(self.config.buckets, self.heads) * self.config.init_std)

    def bias(self, d: Tensor) -> Tensor:
        return self.table.to(d.dtype)[self.rows(d)].T  # (R, H) -> (H, R)

    def rows(self, d: Tensor) -> Tensor:
        """The row of the table, int64 of any shape, for each distance d in tokens, float of the same shape."""
        if self.clipped:
            return d.clamp_max(self.config.buckets - 1).to(torch.int64)
        return bucket(d, self.config.buckets, self.max_distance)

    def logged_scalars(self) -> dict[str, Tensor]:
        return {"t5_mean": self.table.mean(0), "t5_last": self.table[-1]}

    def log_bias_formulas(self) -> list[LogBias]:
        last = self.config.buckets - 1 if self.clipped else self.max_distance
        note = f"every distance of {last} and more shares the last bucket, a constant"
        return [LogBias(exact(value), note, at_least=True) for value in self.table[-1].tolist()]
