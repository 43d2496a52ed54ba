"""T5's relative bias: a learned value per bucket of distances and head (Raffel et al. 2020)."""

import math
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from fairseq_rpe.core.errors import UserError
from fairseq_rpe.core.log_bias import LogBias, exact_fraction
from fairseq_rpe.core.spec import option
from fairseq_rpe.encodings.base import DistanceBias, register


def relative_position_bucket(d: Tensor, buckets: int, max_distance: int) -> Tensor:
    """Return the causal bucket of each distance: d below buckets/2, then logarithmic up to ``max_distance``.

    The scheme of Raffel et al. with E = buckets/2; ``min(buckets-1, E + trunc(ln(d/E) / ln(max/E) · (buckets-E)))``.
    """
    exact = buckets // 2
    scaled = torch.log(d.clamp_min(exact) / exact) / math.log(max_distance / exact) * (buckets - exact)
    far = (exact + scaled.to(torch.int64)).clamp_max(buckets - 1)
    return torch.where(d < exact, d.to(torch.int64), far)


MAX_DISTANCE = 128  # as in T5


@register("t5_bias", colour="black", marker="P")
class T5Bias(DistanceBias):
    """T5's bias table[bucket(d), h] (Raffel et al. 2020, arXiv 1910.10683, Section 2.1), table (buckets, H).

    It is constant from the last bucket on, so Σ exp(bias) diverges. As every bias here it is added after scaling by
    1/sqrt(D), which T5 leaves out. One table serves all layers, as in T5. ``variant=clipped`` has one bucket for each
    distance 0 … buckets-1: the bias is table[min(d, buckets-1)], the simplified form in which FIRE (arXiv 2310.04418,
    Section 2.2) states T5's bias.
    """

    @dataclass(frozen=True)
    class Config:
        """Options of ``t5_bias``."""

        buckets: int = option(32, "number of buckets; the first half has one distance each", minimum=2, maximum=65_536)
        max_distance: int | None = option(
            None, "variant=log: distances from here on share the last bucket; none: 128", minimum=2, maximum=2**24
        )
        init_std: float = option(0.02, "standard deviation of the initial table (not from the paper)", minimum=0)
        variant: str = option(
            "log", "log: logarithmic buckets; clipped: one distance in each but the last", choices=("log", "clipped")
        )

    formula = "table[bucket(d), h]"
    paper = "Raffel et al. 2020 (arXiv 1910.10683)"
    position_type = "whole"

    def setup(self) -> None:
        """Check the options and create the parameters."""
        half, max_distance = self.config.buckets // 2, self.config.max_distance
        self.clipped = self.config.variant == "clipped"
        if self.clipped and max_distance is not None:
            raise UserError(
                f"'t5_bias:variant=clipped' ends at distance buckets-1 = {self.config.buckets - 1}: leave out "
                f"max_distance={max_distance}, or choose another number of buckets"
            )
        self.max_distance = MAX_DISTANCE if max_distance is None else max_distance
        if not self.clipped and self.max_distance <= half:
            raise UserError(
                f"option 'max_distance' of 't5_bias' must be more than buckets/2 = {half}, not {self.max_distance}"
            )
        self.table = nn.Parameter(torch.randn(self.config.buckets, self.heads) * self.config.init_std)

    def bias(self, d: Tensor) -> Tensor:
        """Return the log-bias (H, R) of distances d (R,)."""
        return self.table.to(d.dtype)[self.buckets(d)].T  # (R, H) -> (H, R)

    def buckets(self, d: Tensor) -> Tensor:
        """Return the bucket, a row of the table, int64, of each distance d in tokens, float of any shape."""
        if self.clipped:
            return d.clamp_max(self.config.buckets - 1).to(torch.int64)
        return relative_position_bucket(d, self.config.buckets, self.max_distance)

    def logged_scalars(self) -> dict[str, Tensor]:
        """Return the mean and the last value of the table for each head."""
        return {"t5_mean": self.table.mean(0), "t5_last": self.table[-1]}

    def log_bias_formulas(self) -> list[LogBias]:
        """Return the constant log-bias of the last bucket of each head."""
        last = self.config.buckets - 1 if self.clipped else self.max_distance
        note = f"every distance of {last} and more shares the last bucket, a constant"
        return [LogBias(exact_fraction(value), note, at_least=True) for value in self.table[-1].tolist()]
