"""Plain positions, and shifts of whole rows: by a constant, or at random as in SHAPE and random padding."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from fairseq_rpe.core.spec import option
from fairseq_rpe.positions.base import (
    MAX_EXACT_POSITION,
    Transform,
    TransformedPositions,
    check_row_length,
    draw_below,
    register,
)

if TYPE_CHECKING:
    import torch
    from torch import Tensor
else:
    from fairseq_rpe.core import lazy_torch as torch


@register("identity")
class Identity(Transform):
    """The plain positions 0, 1, 2, …, unchanged."""

    formula = "p_j = j"
    length_invariant = True

    def transform(self, index: Tensor, lengths: Tensor, generator: torch.Generator | None) -> TransformedPositions:
        """Return the positions (B or 1, m) of the tokens."""
        return TransformedPositions(index, step=1.0, contiguous=True)


@register("offset", colour="grey", marker=">")
class Offset(Transform):
    """A constant offset for all positions, as in the evaluation of SHAPE (Kiyono et al. 2021, arXiv 2109.05644)."""

    @dataclass(frozen=True)
    class Config:
        """Options of ``offset``."""

        tokens: int = option(0, "constant that is added to every position", minimum=0, maximum=MAX_EXACT_POSITION)

    formula = "p_j = j + tokens"
    length_invariant = True
    paper = "Kiyono et al. 2021 (arXiv 2109.05644), evaluation in their code"

    @classmethod
    def length_within(cls, config: Any, train_length: int | None, positions: int) -> int:
        """Return the length in tokens of the longest row whose positions are all below ``positions``."""
        return max(positions - int(config.tokens), 0)

    def transform(self, index: Tensor, lengths: Tensor, generator: torch.Generator | None) -> TransformedPositions:
        """Return the positions (B or 1, m) of the tokens."""
        return TransformedPositions(index + self.config.tokens, step=1.0, contiguous=True)


@register("shape", colour="grey", marker="D")
class Shape(Transform):
    """SHAPE (Kiyono et al. 2021, arXiv 2109.05644): a random offset per row, for shift invariance.

    The paper draws from {0 … K}, K = ``max_position``; the authors' code **excludes K**, and so does this. Their code
    also limits offsets to its table of embeddings, which is not needed here, and evaluates at positions K, K+1 …:
    ``eval_offset=K`` makes ``offset:tokens=K`` the default transform of evaluation.
    """

    @dataclass(frozen=True)
    class Config:
        """Options of ``shape``."""

        max_position: int = option(500, "K: offsets are drawn from 0 … K-1", minimum=1, maximum=MAX_EXACT_POSITION)
        eval_offset: str = option(
            "0", "first position in evaluation: 0, or K as in the authors' code", choices=("0", "K")
        )

    formula = "p_j = j + k,  k ~ U{0 … K-1} per row"
    paper = "Kiyono et al. 2021 (arXiv 2109.05644)"
    random = True

    @classmethod
    def length_within(cls, config: Any, train_length: int | None, positions: int) -> int:
        """Return the length in tokens of the longest row whose positions are all below ``positions``."""
        return max(positions - int(config.max_position) + 1, 0)

    def setup(self) -> None:
        """Derive settings from the options."""
        if self.config.eval_offset == "K":
            self.evaluation = f"offset:tokens={self.config.max_position}"

    def transform(self, index: Tensor, lengths: Tensor, generator: torch.Generator | None) -> TransformedPositions:
        """Return the positions (B or 1, m) of the tokens."""
        shifts = draw_below(torch.full_like(lengths, self.config.max_position), generator)  # (B,)
        return TransformedPositions(index + shifts.to(index)[:, None], step=1.0, contiguous=True)


@register("random_padding", colour="grey", marker="<")
class RandomPadding(Transform):
    """Random padding (Tao et al. 2023, arXiv 2305.04859): a random offset up to the number of unused positions.

    Short rows are trained at late positions, too. The authors move a random fraction of the padding of
    question-answering inputs to the front, behind the question; in a decoder that ignores padding this equals a shift.
    """

    @dataclass(frozen=True)
    class Config:
        """Options of ``random_padding``."""

        max_position: int = option(
            2048,
            "P: number of positions, at least the length of the longest row",
            minimum=1,
            maximum=MAX_EXACT_POSITION,
        )

    formula = "p_j = j + u,  u ~ U{0 … P - length} per row"
    paper = "Tao, Feng, Zhao 2023 (arXiv 2305.04859)"
    random = True

    @classmethod
    def position_limit(cls, config: Any, train_length: int | None) -> int | None:
        """Return the length in tokens of the longest row that has positions."""
        return int(config.max_position)

    def transform(self, index: Tensor, lengths: Tensor, generator: torch.Generator | None) -> TransformedPositions:
        """Return the positions (B or 1, m) of the tokens."""
        check_row_length(lengths, self.config.max_position, "random_padding", "max_position")
        shifts = draw_below(self.config.max_position - lengths + 1, generator)  # (B,)
        return TransformedPositions(index + shifts.to(index)[:, None], step=1.0, contiguous=True)
