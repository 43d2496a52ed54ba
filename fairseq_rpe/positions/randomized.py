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
    this transform for training and for evaluation; used for training only, evaluation has the plain positions.

    In training, ``per`` decides about rows. With ``per=batch`` all rows of a batch share one draw, and a shorter row
    takes its first positions. In the authors' code all rows of a batch have the same length. With ``per=row`` each row
    has its own draw. In evaluation every row has its own draw, which depends on its tokens and not on the batch: there
    :class:`~fairseq_rpe.positions.position_transforms.PositionTransforms` calls this transform for one row at a time,
    with a generator that is seeded by the row's tokens.

    For biases of the distance and a text of T tokens, the authors' code draws T-1 distances, which all queries share:
    pairs of the same plain distance keep a common distance. Here positions are drawn for every encoding, and distances
    are their differences, so such pairs have different distances, and results differ from those of that code.
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
        """Choose the option that limits positions, ``max_position`` or ``times``, and check that it is usable.

        The limit itself is :attr:`max_length`, the result of :meth:`position_limit`.
        """
        # the option that a message on a longer row names, and positions per unit of it; None: it counts positions
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
        """Return the positions (B or 1, m) of the tokens.

        Args:
            index: (B or 1, m) plain positions of the tokens; values at padding are arbitrary.
            lengths: (B,) number of real tokens of each row.
            generator: generator of the draws, on the CPU.
        """
        limit = self.max_length
        assert limit is not None  # setup refuses options that set no limit
        check_row_length(lengths, limit, "randomized", *self.limit_option)
        sizes = lengths.clamp_min(1).tolist()  # a row of padding alone gets a position, too
        longest = max(sizes)
        # drawn positions are whole numbers, multiples of a step of 1, but neighbours are not one step apart
        if self.config.per == "batch":
            drawn = draw_subset(longest, limit, generator).to(index)  # (longest,)
            return TransformedPositions(drawn[index.clamp(0, longest - 1).long()], step=1.0, contiguous=False)
        table = torch.zeros(len(sizes), longest, dtype=torch.int64)  # 0 after the end of a shorter row
        for row, size in zip(table, sizes, strict=True):
            row[:size] = draw_subset(size, limit, generator)
        positions = table.to(index).gather(1, clamp_to_row(index, lengths).long())  # (B, m)
        return TransformedPositions(positions, step=1.0, contiguous=False)
