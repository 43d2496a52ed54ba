"""CLEX's training positions: a random subset of the positions of a longer row."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from fairseq_rpe.core.errors import UserError
from fairseq_rpe.core.spec import option
from fairseq_rpe.positions.base import (
    MAX_EXACT_POSITION,
    Transform,
    TransformedPositions,
    clamp_to_row,
    draw_below,
    draw_subset,
    register,
)

if TYPE_CHECKING:
    import torch
    from torch import Tensor
else:
    from fairseq_rpe.core import lazy_torch as torch


@register("stretch")
class Stretch(Transform):
    """A random subset of the positions of a row t times as long, including the first and the last.

    The encoding ``clex`` is trained with it (Chen et al. 2023, arXiv 2310.16450, position extrapolation): the last
    position tells it the length of the longer row. t is drawn for each batch; rows of the same length have the same
    subset.
    """

    @dataclass(frozen=True)
    class Config:
        """Options of ``stretch``."""

        times: int = option(16, "N: t is drawn from 1 … N", minimum=1, maximum=4096)

    formula = "p = sort({0, t·l - 1} and a random subset of 1 … t·l - 2),  t ~ U{1 … N}"
    paper = "Chen et al. 2023 (arXiv 2310.16450), position extrapolation"
    random = True

    def transform(self, index: Tensor, lengths: Tensor, generator: torch.Generator | None) -> TransformedPositions:
        """Return the positions (B or 1, m) of the tokens."""
        sizes = lengths.clamp_min(1).tolist()
        longest = max(sizes)
        if self.config.times * longest > MAX_EXACT_POSITION:
            raise UserError(
                f"'stretch:times={self.config.times}' of a row of {longest} tokens is more than {MAX_EXACT_POSITION} "
                "positions: lower times"
            )
        t = 1 + int(draw_below(torch.tensor(self.config.times), generator))
        drawn = {size: _draw_positions(size, t * size, generator) for size in sorted(set(sizes))}
        table = torch.zeros(len(sizes), longest, dtype=torch.int64)
        for row, size in zip(table, sizes, strict=True):
            row[:size] = drawn[size]
        positions = table.to(index).gather(1, clamp_to_row(index, lengths).long())
        return TransformedPositions(positions, step=1.0, contiguous=t == 1)


def _draw_positions(size: int, limit: int, generator: torch.Generator | None) -> Tensor:
    """Draw ``size`` positions of 0 … limit-1, ascending, with both ends; the last position if size is 1."""
    if size == 1:
        return torch.tensor([limit - 1])
    between = 1 + draw_subset(size - 2, limit - 2, generator) if size > 2 else torch.empty(0, dtype=torch.int64)
    return torch.cat([torch.tensor([0]), between, torch.tensor([limit - 1])])
