"""Randomized positional encodings."""

from dataclasses import dataclass

import torch
from torch import Tensor

from fairseq_rpe.core.errors import UserError
from fairseq_rpe.core.spec import option
from fairseq_rpe.positions.base import EXACT, Transform, TransformedPositions, check_longest, clamped, register, subset


@register("randomized")
class Randomized(Transform):
    """A random subset of 0 … max-1, sorted, instead of consecutive positions.

    The authors' code draws once for a forward pass and shares the draw by the batch, and it draws at evaluation too:
    give this transform in both slots for that; given for training alone, evaluation has the plain positions. With
    ``per=batch`` a row shorter than the longest takes the first positions of the shared draw (in the authors' code all
    rows of a batch are equally long); ``per=row`` gives each row a subset of its own length. Both are about training:
    in evaluation every row has a draw of its own, which follows from its tokens, whatever batch it is in.

    Differs from that code for biases of the distance: there the T-1 distances are drawn and all queries share them;
    here positions are drawn, whatever the encoding, and distances are their differences.
    """

    @dataclass(frozen=True)
    class Config:
        max: int | None = option(
            None,
            "positions are drawn from 0 … max-1, 2048 if not given; must hold the longest row",
            minimum=1,
            maximum=EXACT,
        )
        times: int | None = option(None, "in place of max: a number of training lengths", minimum=1, maximum=EXACT)
        per: str = option(
            "batch", "in training: one draw for all rows of a pass, or one for each row", choices=("batch", "row")
        )

    formula = "p = sort(subset of {0 … max-1} without replacement)"
    paper = "Ruoss et al. 2023 (arXiv 2305.16843)"
    random = True

    def setup(self) -> None:
        self.max = self.longest = self.config.max or 2048
        self.counted: tuple[str, int | None] = ("max", None)
        if self.config.times is None:
            return
        if self.config.max is not None:
            raise UserError("'randomized' takes max=NUMBER or times=NUMBER, not both: leave one out")
        if self.train_length is None:
            raise UserError("'randomized:times=NUMBER' needs a training length, unknown here: give max=NUMBER")
        self.max = self.longest = self.config.times * self.train_length
        self.counted = ("times", self.train_length)
        if self.max > EXACT:
            raise UserError(f"'randomized:times={self.config.times}' is more than {EXACT} positions: lower times")

    def transform(self, index: Tensor, lengths: Tensor, generator: torch.Generator | None) -> TransformedPositions:
        check_longest(lengths, self.max, "randomized", *self.counted)
        sizes = lengths.clamp_min(1).tolist()
        longest = max(sizes)
        if self.config.per == "batch":
            table = subset(longest, self.max, generator).to(index)
            return TransformedPositions(table[index.clamp(0, longest - 1).long()], 1.0, False)
        table = torch.zeros(len(sizes), longest, dtype=torch.int64)
        for row, size in zip(table, sizes, strict=True):
            row[:size] = subset(size, self.max, generator)
        return TransformedPositions(table.to(index).gather(1, clamped(index, lengths).long()), 1.0, False)
