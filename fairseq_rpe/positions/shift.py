"""Whole rows that stay or move: by a constant, or by a random offset as in SHAPE and random padding."""

from dataclasses import dataclass

import torch
from torch import Tensor

from fairseq_rpe.core.spec import option
from fairseq_rpe.positions.base import EXACT, Transform, TransformedPositions, below, check_longest, register


@register("identity")
class Identity(Transform):
    """The plain positions 0, 1, 2 …"""

    formula = "p_j = j"
    length_invariant = True

    def transform(self, index: Tensor, lengths: Tensor, generator: torch.Generator | None) -> TransformedPositions:
        return TransformedPositions(index, 1.0, True)


@register("offset")
class Offset(Transform):
    """All positions later by a constant: SHAPE's authors evaluate so."""

    @dataclass(frozen=True)
    class Config:
        by: int = option(0, "positions to add to every token", minimum=0, maximum=EXACT)

    formula = "p_j = j + by"
    length_invariant = True
    paper = "Kiyono et al. 2021 (arXiv 2109.05644), evaluation in their code"

    def transform(self, index: Tensor, lengths: Tensor, generator: torch.Generator | None) -> TransformedPositions:
        return TransformedPositions(index + self.config.by, 1.0, True)


@register("shape")
class Shape(Transform):
    """One random offset for each row, so that absolute encodings learn to be shift-invariant.

    The paper draws from {0 … K}; the authors' code **excludes K**, and so does this. Their code also keeps offsets
    inside its table of embeddings, which is not needed here, and evaluates at positions K, K+1 …: ``eval_offset=K``
    makes ``offset:by=K`` the transform of evaluation where none is named.
    """

    @dataclass(frozen=True)
    class Config:
        max: int = option(500, "K: offsets are drawn from 0 … K-1", minimum=1, maximum=EXACT)
        eval_offset: str = option("0", "first position in evaluation: 0, or K as in their code", choices=("0", "K"))

    formula = "p_j = j + k,  k ~ U{0 … K-1} per row"
    paper = "Kiyono et al. 2021 (arXiv 2109.05644)"
    random = True

    def setup(self) -> None:
        if self.config.eval_offset == "K":
            self.evaluation = f"offset:by={self.config.max}"

    def transform(self, index: Tensor, lengths: Tensor, generator: torch.Generator | None) -> TransformedPositions:
        return TransformedPositions(
            index + below(torch.full_like(lengths, self.config.max), generator).to(index)[:, None], 1.0, True
        )


@register("random_padding")
class RandomPadding(Transform):
    """SHAPE whose range is what a row leaves free: short rows reach late positions too.

    The authors move a random part of the padding of question-answering inputs to the front, behind the question; in a
    decoder that ignores padding this is the same as shifting the row.
    """

    @dataclass(frozen=True)
    class Config:
        max: int = option(2048, "P: number of positions; must hold the longest row", minimum=1, maximum=EXACT)

    formula = "p_j = j + u,  u ~ U{0 … P - length} per row"
    paper = "Tao, Feng, Zhao 2023 (arXiv 2305.04859)"
    random = True

    def setup(self) -> None:
        self.longest = self.config.max

    def transform(self, index: Tensor, lengths: Tensor, generator: torch.Generator | None) -> TransformedPositions:
        check_longest(lengths, self.config.max, "random_padding", "max")
        return TransformedPositions(
            index + below(self.config.max - lengths + 1, generator).to(index)[:, None], 1.0, True
        )
