"""PoSE: positional skip-wise training."""

from dataclasses import dataclass

import torch
from torch import Tensor

from fairseq_rpe.core.spec import option
from fairseq_rpe.positions.base import (
    EXACT,
    Transform,
    TransformedPositions,
    below,
    check_longest,
    clamped,
    register,
    subset,
)


@register("pose")
class Pose(Transform):
    """Cuts each row of w tokens into chunks and skips positions between them, up to ``target``.

    Two chunks follow the authors' code: the first has r ~ U{1 … ⌊(w+1)/2⌋} tokens and stays, the second is shifted by
    u ~ U{0 … target-w}. Their code has no more than two; more are our extension: cuts at a random subset of places, and
    shifts that never shrink, u_i ~ U{u_(i-1) … target-w}. **The text stays contiguous**: the authors also take the
    second chunk's text from a random later place of the document, which a position transform cannot do.
    """

    @dataclass(frozen=True)
    class Config:
        target: int = option(4096, "length to train for; must hold the longest row", minimum=1, maximum=EXACT)
        chunks: int = option(2, "consecutive pieces of a row, each shifted further", minimum=2, maximum=EXACT)

    formula = "p_j = j + u_c(j),  0 = u_1 <= u_2 … <= target - w"
    paper = "Zhu et al. 2023 (arXiv 2309.10400)"
    random = True

    def setup(self) -> None:
        self.longest = self.config.target

    def transform(self, index: Tensor, lengths: Tensor, generator: torch.Generator | None) -> TransformedPositions:
        check_longest(lengths, self.config.target, "pose", "target")
        sizes = lengths.cpu().clamp_min(1)
        at = clamped(index, lengths)
        moved, shift = at, torch.zeros_like(sizes)
        for start in self._starts(sizes, generator):
            skip = below(self.config.target - sizes - shift + 1, generator)
            moved = moved + skip.to(at)[:, None] * (at >= start.to(at)[:, None])
            shift = shift + skip
        return TransformedPositions(moved, 1.0, False)

    def _starts(self, sizes: Tensor, generator: torch.Generator | None) -> list[Tensor]:
        """(B,) first token of the second chunk, of the third …; the row's length where a chunk is empty."""
        if self.config.chunks == 2:
            return [1 + below((sizes + 1) // 2, generator)]
        starts = sizes[:, None].repeat(1, self.config.chunks - 1)
        for row, size in zip(starts, sizes.tolist(), strict=True):
            cuts = min(self.config.chunks, size) - 1
            row[:cuts] = 1 + subset(cuts, size - 1, generator)
        return list(starts.T)
