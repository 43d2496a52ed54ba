"""CLEX's positions in training: those of a longer row, thinned out."""

from dataclasses import dataclass

import torch
from torch import Tensor

from fairseq_rpe.core.errors import UserError
from fairseq_rpe.core.spec import option
from fairseq_rpe.positions.base import EXACT, Transform, TransformedPositions, below, clamped, register, subset


@register("stretch")
class Stretch(Transform):
    """A random subset of the positions of a row t times as long, with its first and its last, t drawn for each batch.

    The encoding ``clex`` is trained so: the last position says how long the row pretends to be. All rows of a batch
    have the same t, and rows of the same length the same subset.
    """

    @dataclass(frozen=True)
    class Config:
        times: int = option(16, "N: t is drawn from 1 … N", minimum=1, maximum=4096)

    formula = "p = sort({0, t·l - 1} and a random subset of 1 … t·l - 2),  t ~ U{1 … N}"
    paper = "Chen et al. 2023 (arXiv 2310.16450), position extrapolation"
    random = True

    def transform(self, index: Tensor, lengths: Tensor, generator: torch.Generator | None) -> TransformedPositions:
        sizes = lengths.clamp_min(1).tolist()
        longest = max(sizes)
        if self.config.times * longest > EXACT:
            raise UserError(
                f"'stretch:times={self.config.times}' of a row of {longest} tokens is more than {EXACT} positions: "
                "lower times"
            )
        t = 1 + int(below(torch.tensor(self.config.times), generator))
        drawn = {size: _thinned(size, t * size, generator) for size in sorted(set(sizes))}
        table = torch.zeros(len(sizes), longest, dtype=torch.int64)
        for row, size in zip(table, sizes, strict=True):
            row[:size] = drawn[size]
        return TransformedPositions(table.to(index).gather(1, clamped(index, lengths).long()), 1.0, t == 1)


def _thinned(size: int, limit: int, generator: torch.Generator | None) -> Tensor:
    """``size`` of the positions 0 … limit-1 in ascending order, with both ends; of a single one, the last."""
    if size == 1:
        return torch.tensor([limit - 1])
    between = 1 + subset(size - 2, limit - 2, generator) if size > 2 else torch.empty(0, dtype=torch.int64)
    return torch.cat([torch.tensor([0]), between, torch.tensor([limit - 1])])
