"""Position Interpolation: longer rows are scaled into the range of training positions."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

from fairseq_rpe.core.errors import UserError
from fairseq_rpe.core.spec import option
from fairseq_rpe.positions.base import Transform, TransformedPositions, register

if TYPE_CHECKING:
    import torch
    from torch import Tensor
else:
    from fairseq_rpe.core import lazy_torch as torch


@register("interpolate", colour="violet", marker="s")
class Interpolate(Transform):
    """Position Interpolation (Chen et al. 2023, arXiv 2306.15595): positions are multiplied by a ratio <= 1.

    With ``ratio=auto`` each row has the ratio min(1, L / length); rows of at most L tokens are unchanged, bit for bit.
    In incremental decoding the ratio follows the current length. Index warping also evaluates with this transform;
    ``ratio=1/8`` sets one ratio for a whole test, whatever the length of its last row.
    """

    @dataclass(frozen=True)
    class Config:
        """Options of ``interpolate``."""

        ratio: float | Literal["auto"] = option(
            "auto", "training length / length, e.g. 1/4; auto: from the length of each row, at most 1"
        )
        train: int | None = option(None, "training length L for auto; none: the model's", minimum=1)

        def __post_init__(self) -> None:
            if self.ratio == "auto":
                return
            if not 0 < self.ratio <= 1:
                raise UserError(
                    f"option 'ratio' of 'interpolate' must be more than 0 and at most 1, not {self.ratio:g}: "
                    "it is training length / length, 1/4 for four times the length"
                )
            if self.train is not None:
                raise UserError("'interpolate' takes ratio=NUMBER or train=LENGTH, not both: leave one out")

    fractional = True
    formula = "p_j = j·min(1, L/L')"
    paper = "Chen et al. 2023 (arXiv 2306.15595)"

    def setup(self) -> None:
        """Set L for ``ratio=auto``; with another ratio, positions do not depend on the row's length."""
        self.length: int | None = None  # L of ratio=auto
        if self.config.ratio != "auto":
            self.length_invariant = True
            return
        self.length = self.config.train or self.train_length
        if self.length is None:
            raise UserError(
                "'interpolate' needs a training length, unknown here: give train=LENGTH or a ratio such as ratio=1/4"
            )

    @classmethod
    def spec_for_length(cls, config: Any, train_length: int, length: int) -> str | None:
        """Return a spec with the ratio of the longest row, or None if the options set a ratio or L."""
        if config.ratio != "auto" or config.train is not None:
            return None
        return f"interpolate:ratio={train_length / length!r}" if length > train_length else "identity"

    def transform(self, index: Tensor, lengths: Tensor, generator: torch.Generator | None) -> TransformedPositions:
        """Return the positions (B or 1, m) of the tokens."""
        if self.length is not None:
            ratios = (self.length / lengths.clamp_min(1).double()).clamp_max(1.0)
        else:
            ratios = torch.tensor([self.config.ratio], dtype=torch.float64)
        low, high = ratios.min().item(), ratios.max().item()
        if low != high:
            return TransformedPositions(index * ratios.to(index)[:, None], step=None, contiguous=False)
        return TransformedPositions(index if low == 1 else index * low, step=low, contiguous=True)
