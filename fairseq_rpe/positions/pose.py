"""PoSE: positional skip-wise training, which simulates long inputs by skipping positions."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from fairseq_rpe.core.spec import option
from fairseq_rpe.positions.base import (
    MAX_EXACT_POSITION,
    Transform,
    TransformedPositions,
    check_row_length,
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


@register("pose", colour="grey", marker="^")
class Pose(Transform):
    """PoSE (Zhu et al. 2023, arXiv 2309.10400): skips positions between chunks of a row, up to ``target``.

    Two chunks follow the authors' code: of a row of w tokens the first r ~ U{1 … ⌊(w+1)/2⌋} keep their positions, and
    the others are shifted by u ~ U{0 … target-w}. More than two chunks are an extension of this package: cuts are a
    random subset of indices, and shifts do not decrease, u_i ~ U{u_(i-1) … target-w}.
    **The text stays contiguous**: the authors also take the second chunk's text from a random later part of the
    document, which a position transform cannot do.
    """

    @dataclass(frozen=True)
    class Config:
        """Options of ``pose``."""

        target: int = option(
            4096, "length to train for; must hold the longest row", minimum=1, maximum=MAX_EXACT_POSITION
        )
        chunks: int = option(
            2, "consecutive pieces of a row, each shifted further", minimum=2, maximum=MAX_EXACT_POSITION
        )

    formula = "p_j = j + u_c(j),  0 = u_1 <= u_2 … <= target - w"
    paper = "Zhu et al. 2023 (arXiv 2309.10400)"
    random = True

    @classmethod
    def position_limit(cls, config: Any, train_length: int | None) -> int | None:
        """Return the length in tokens of the longest row that has positions."""
        return int(config.target)

    def transform(self, index: Tensor, lengths: Tensor, generator: torch.Generator | None) -> TransformedPositions:
        """Return the positions (B or 1, m) of the tokens."""
        check_row_length(lengths, self.config.target, "pose", "target")
        sizes = lengths.cpu().clamp_min(1)
        at = clamp_to_row(index, lengths)
        positions, shift = at, torch.zeros_like(sizes)
        for start in self._starts(sizes, generator):
            skip = draw_below(self.config.target - sizes - shift + 1, generator)
            positions = positions + skip.to(at)[:, None] * (at >= start.to(at)[:, None])
            shift = shift + skip
        return TransformedPositions(positions, step=1.0, contiguous=False)

    def _starts(self, sizes: Tensor, generator: torch.Generator | None) -> list[Tensor]:
        """Return the index (B,) of the first token of chunks 2, 3 …, or the row's length if a chunk is empty."""
        if self.config.chunks == 2:
            return [1 + draw_below((sizes + 1) // 2, generator)]
        starts = sizes[:, None].repeat(1, self.config.chunks - 1)
        for row, size in zip(starts, sizes.tolist(), strict=True):
            cuts = min(self.config.chunks, size) - 1
            row[:cuts] = 1 + draw_subset(cuts, size - 1, generator)
        return list(starts.T)
