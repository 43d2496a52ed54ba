"""Randomized positional encodings: positions are a sorted random subset of a larger range."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from fairseq_rpe.core.errors import UserError
from fairseq_rpe.core.spec import option
from fairseq_rpe.positions.base import (
    MAX_EXACT_POSITION,
    Transform,
    TransformedPositions,
    check_row_length,
    clamp_to_row,
    draw_subset,
    register,
)

if TYPE_CHECKING:
    import torch
    from torch import Tensor
else:
    from fairseq_rpe.core import lazy_torch as torch


@register("randomized", colour="grey", marker="s")
class Randomized(Transform):
    """A sorted random subset of 0 … max_position-1 (Ruoss et al. 2023, arXiv 2305.16843).

    The authors' code draws once per forward pass for the whole batch, and also at evaluation. To reproduce that, use
    this transform for training and for evaluation; used for training only, evaluation has the plain positions. With
    ``per=batch`` a shorter row takes the first positions of the batch's draw (in the authors' code all rows of a batch
    have the same length); ``per=row`` draws a subset for each row. Both concern training: in evaluation every row has
    its own draw, which depends on its tokens and not on the batch.

    For biases of the distance, that code draws T-1 distances, which all queries share; here positions are drawn for
    every encoding, and distances are their differences.
    """

    @dataclass(frozen=True)
    class Config:
        """Options of ``randomized``."""

        max_position: int | None = option(
            None,
            "positions are drawn from 0 … max_position-1; none: 2048; at least the length of the longest row",
            minimum=1,
            maximum=MAX_EXACT_POSITION,
        )
        times: int | None = option(
            None, "instead of max_position: number of training lengths", minimum=1, maximum=MAX_EXACT_POSITION
        )
        per: str = option("batch", "in training: one draw per batch or per row", choices=("batch", "row"))

    formula = "p = sort(subset of {0 … max_position-1} without replacement)"
    paper = "Ruoss et al. 2023 (arXiv 2305.16843)"
    random = True

    @classmethod
    def position_limit(cls, config: Any, train_length: int | None) -> int | None:
        """Return the length in tokens of the longest row that has positions."""
        if config.times is None:
            return int(config.max_position or 2048)
        return None if train_length is None else int(config.times * train_length)

    def setup(self) -> None:
        """Check the options and derive settings from them."""
        self.limit_option: tuple[str, int | None] = ("max_position", None)
        if self.config.times is None:
            return
        if self.config.max_position is not None:
            raise UserError("'randomized' takes max_position=NUMBER or times=NUMBER, not both: leave one out")
        if self.train_length is None:
            raise UserError("'randomized:times=NUMBER' needs a training length, unknown here: give max_position=NUMBER")
        self.limit_option = ("times", self.train_length)
        if self.config.times * self.train_length > MAX_EXACT_POSITION:
            raise UserError(
                f"'randomized:times={self.config.times}' is more than {MAX_EXACT_POSITION} positions: lower times"
            )

    def transform(self, index: Tensor, lengths: Tensor, generator: torch.Generator | None) -> TransformedPositions:
        """Return the positions (B or 1, m) of the tokens."""
        limit = self.max_length
        assert limit is not None  # setup refuses options that set no limit
        check_row_length(lengths, limit, "randomized", *self.limit_option)
        sizes = lengths.clamp_min(1).tolist()
        longest = max(sizes)
        if self.config.per == "batch":
            table = draw_subset(longest, limit, generator).to(index)
            return TransformedPositions(table[index.clamp(0, longest - 1).long()], 1.0, False)
        table = torch.zeros(len(sizes), longest, dtype=torch.int64)
        for row, size in zip(table, sizes, strict=True):
            row[:size] = draw_subset(size, limit, generator)
        return TransformedPositions(table.to(index).gather(1, clamp_to_row(index, lengths).long()), 1.0, False)
