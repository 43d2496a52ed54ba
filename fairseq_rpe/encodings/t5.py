"""T5's bucketed relative bias."""

import math
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from ..core import LogWeight, UserError, exact, option
from .base import DistanceBias, register


def bucket(d: Tensor, buckets: int, max_distance: int) -> Tensor:
    """Causal bucket of each distance, int64: d below buckets/2, then logarithmic up to max_distance.

    Raffel et al.'s scheme: E = buckets/2; ``min(buckets-1, E + trunc(ln(d/E) / ln(max/E) · (buckets-E)))``.
    """
    exact = buckets // 2
    scaled = torch.log(d.clamp_min(exact) / exact) / math.log(max_distance / exact) * (buckets - exact)
    far = (exact + scaled.to(torch.int64)).clamp_max(buckets - 1)
    return torch.where(d < exact, d.to(torch.int64), far)


@register("t5_bias")
class T5Bias(DistanceBias):
    """A learned number per bucket and head; constant beyond max_distance, so it diverges.

    Added after 1/sqrt(D) like every bias here (T5 itself leaves that factor out); one table for all layers, as in T5.
    """

    @dataclass(frozen=True)
    class Config:
        buckets: int = option(
            32, "number of buckets; the first half holds one distance each", minimum=2, maximum=65_536
        )
        max_distance: int = option(128, "distances from here on share the last bucket", minimum=2, maximum=2**24)
        init_std: float = option(0.02, "standard deviation of the initial table (our choice)", minimum=0)

    formula = "table[bucket(d), h]"
    paper = "Raffel et al. 2020 (arXiv 1910.10683)"
    positions = "whole"

    def setup(self) -> None:
        half, far = self.config.buckets // 2, self.config.max_distance
        if far <= half:
            raise UserError(f"option 'max_distance' of 't5_bias' must be more than buckets/2 = {half}, not {far}")
        self.table = nn.Parameter(torch.randn(self.config.buckets, self.heads) * self.config.init_std)

    def bias(self, d: Tensor) -> Tensor:
        return self.table.to(d.dtype)[bucket(d, self.config.buckets, self.config.max_distance)].T

    def scalars(self) -> dict[str, Tensor]:
        return {"t5_mean": self.table.mean(0), "t5_last": self.table[-1]}

    def series(self) -> list[LogWeight]:
        note = f"every distance of {self.config.max_distance} and more shares the last bucket, a constant"
        return [LogWeight(exact(value), note, at_least=True) for value in self.table[-1].tolist()]
