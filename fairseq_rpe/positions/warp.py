"""Position index warping: positions of some training rows are compressed (head) or skewed (tail)."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from fairseq_rpe.core.errors import UserError
from fairseq_rpe.core.spec import format_value, option, parse_number
from fairseq_rpe.positions.base import Transform, TransformedPositions, clamp_to_row, register

if TYPE_CHECKING:
    import torch
    from torch import Tensor
else:
    from fairseq_rpe.core import lazy_torch as torch


def beta_cdf(x: Tensor) -> Tensor:
    """Return the CDF of Beta(2, 5) at x in [0, 1], ``1 - (1-x)^6 - 6x(1-x)^5``.

    The paper requires a concave f; this one is convex up to its mode 0.2 and concave beyond.
    """
    return 1 - (1 - x) ** 5 * (1 + 5 * x)


def square_root(x: Tensor) -> Tensor:
    """Return the square root of x, elementwise."""
    return x.sqrt()


SKEWS: dict[str, Callable[[Tensor], Tensor]] = {"beta": beta_cdf, "sqrt": square_root}


def _parse_alphas(alpha: str) -> list[float]:
    """Parse a number, or the numbers of ``choice(a;b;c)``."""
    choice = re.fullmatch(r"choice\((.*)\)", alpha.strip(), re.DOTALL)
    values = []
    for text in choice[1].split(";") if choice else [alpha]:
        try:
            values.append(parse_number(text))
        except (ValueError, ZeroDivisionError):
            raise UserError(
                f"option 'alpha' of 'warp' wants a number such as 0.25 or 1/6 or choice(0.4;0.5), not '{text.strip()}'"
            ) from None
    return values


@register("warp", colour="brown", marker="v")
class Warp(Transform):
    """Head warping (Eq. 7), tail warping (Eq. 8) or neither, drawn for each row of training; evaluate with PI.

    The paper does not state whether l is the padded or the real length, nor whether encodings other than RoPE are
    warped. Here l is the row's real length (``length=train``: the training length, which a row may not exceed), and
    every encoding sees the same positions. Its algorithmic tasks use ``alpha=choice(0.4;0.5;0.6;0.7;0.8),skew=sqrt``.
    With sqrt the second token is √l positions after the first; beta saturates, so in float32 the last tokens of a row
    may share a position, but the order never reverses.
    """

    @dataclass(frozen=True)
    class Config:
        """Options of ``warp``."""

        head: float = option(0.15, "share of rows that are head-warped", minimum=0, maximum=1)
        tail: float = option(0.15, "share of rows that are tail-warped", minimum=0, maximum=1)
        alpha: str = option("1/6", "head ratio α, between 0 and 1; choice(0.4;0.5;0.6;0.7;0.8) draws one per row")
        skew: str = option("beta", "tail function", choices=tuple(SKEWS))
        length: str = option(
            "row", "l of the tail: the row's own length, or the training length", choices=("row", "train")
        )

        def __post_init__(self) -> None:
            if self.head + self.tail > 1 + 1e-9:
                raise UserError(
                    f"head={self.head:g} and tail={self.tail:g} of 'warp' add up to more than 1: "
                    "they are shares of rows"
                )
            values = _parse_alphas(self.alpha)
            for value in values:
                if not 0 < value < 1:
                    raise UserError(
                        f"option 'alpha' of 'warp' must lie between 0 and 1, both excluded, not {value:g}: "
                        "1/r suits a test length of r times the training length"
                    )
            canonical = ";".join(map(format_value, values))
            object.__setattr__(self, "alpha", f"choice({canonical})" if len(values) > 1 else canonical)

    fractional = True
    formula = "p_j = α·j (head), l·f(j/l) (tail) or j,  f = CDF of Beta(2,5) or sqrt"
    paper = "Improving Length Generalization via Position Index Warping, Eq. 7, 8"
    random = True

    @classmethod
    def position_limit(cls, config: Any, train_length: int | None) -> int | None:
        """Return the training length with ``length=train``, else None."""
        return train_length if config.length == "train" else None

    def setup(self) -> None:
        """Set the values of alpha, and the length of all rows with ``length=train``."""
        self.alphas = torch.tensor(_parse_alphas(self.config.alpha), dtype=torch.float64)
        self.tail_length: int | None = None  # l of all rows with length=train
        if self.config.length == "train":
            if self.train_length is None:
                raise UserError("'warp:length=train' needs a training length that is unknown here: use length=row")
            self.tail_length = self.train_length

    def transform(self, index: Tensor, lengths: Tensor, generator: torch.Generator | None) -> TransformedPositions:
        """Return the positions (B or 1, m) of the tokens."""
        if self.tail_length is not None and int(lengths.max()) > self.tail_length:
            raise UserError(
                f"'warp:length=train': a row of {int(lengths.max())} tokens is longer than the training length "
                f"{self.tail_length}: use length=row"
            )
        rows = len(lengths)
        # decides the warping of each row: head below ``head``, tail from 1 - ``tail`` on, none between them
        draw = torch.rand(rows, dtype=torch.float64, generator=generator)
        alpha = self.alphas[torch.randint(len(self.alphas), (rows,), generator=generator)]
        tail = draw >= 1 - self.config.tail  # (B,)
        scale = torch.where(draw < self.config.head, alpha, 1.0).masked_fill(tail, 1.0)  # (B,)
        # all rows are scaled alike, often by 1: positions stay evenly spaced, which attention computes fastest
        if not tail.any() and (scale == scale[0]).all():
            step = scale[0].item()
            return TransformedPositions(index if step == 1 else index * step, step=step, contiguous=True)
        at = clamp_to_row(index, lengths)
        positions = at * scale.to(at)[:, None]
        if tail.any():
            tail_rows = tail.nonzero()[:, 0].to(at.device)
            positions[tail_rows] = self._warp_tail(at[tail_rows], lengths.to(at.device)[tail_rows])
        return TransformedPositions(positions, step=None, contiguous=False)

    def _warp_tail(self, at: Tensor, lengths: Tensor) -> Tensor:
        """Return the tail-warped positions l·f(j/l) of indices ``at`` (B', m) in rows of ``lengths`` (B',) tokens."""
        if self.tail_length is not None:
            lengths = torch.full_like(lengths, self.tail_length)
        # float64: near 0 the CDF is a small difference of numbers near 1
        ends = lengths.clamp_min(1).double()[:, None]  # l, (B', 1)
        return (ends * SKEWS[self.config.skew](at.double() / ends)).to(at.dtype)
