"""Position index warping: some training rows get a squeezed head or a skewed tail."""

import re
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from fairseq_rpe.core.errors import UserError
from fairseq_rpe.core.spec import number, option, show
from fairseq_rpe.positions.base import Transform, TransformedPositions, clamped, register


def beta_cdf(x: Tensor) -> Tensor:
    """CDF of Beta(2, 5) on [0, 1]: ``1 - (1-x)^6 - 6x(1-x)^5``.

    The paper asks for a concave f; this one is convex up to its mode 0.2 and concave after it.
    """
    return 1 - (1 - x) ** 5 * (1 + 5 * x)


SKEWS: dict[str, Callable[[Tensor], Tensor]] = {"beta": beta_cdf, "sqrt": torch.sqrt}


def _numbers(alpha: str) -> list[float]:
    """One number, or those of ``choice(a;b;c)``."""
    several = re.fullmatch(r"choice\((.*)\)", alpha.strip(), re.DOTALL)
    values = []
    for text in several[1].split(";") if several else [alpha]:
        try:
            values.append(number(text))
        except (ValueError, ZeroDivisionError):
            raise UserError(
                f"option 'alpha' of 'warp' wants a number such as 0.25 or 1/6 or choice(0.4;0.5), not '{text.strip()}'"
            ) from None
    return values


@register("warp")
class Warp(Transform):
    """Head warping (Eq. 7), tail warping (Eq. 8) or neither, drawn for each row; meant for training, PI at evaluation.

    The paper does not say whether l is the padded or the real length, nor whether encodings other than rotary ones
    take part. Here l is the row's real length (``length=train``: the training length, which a row may not exceed) and
    every encoding sees the same positions. Its algorithmic tasks use ``alpha=choice(0.4;0.5;0.6;0.7;0.8),skew=sqrt``.
    sqrt jumps by √l from the first token to the second; beta saturates, so that in float32 the last tokens of a row
    may share a position: order never reverses.
    """

    @dataclass(frozen=True)
    class Config:
        head: float = option(0.15, "share of rows that are head-warped", minimum=0, maximum=1)
        tail: float = option(0.15, "share of rows that are tail-warped", minimum=0, maximum=1)
        alpha: str = option("1/6", "head ratio, between 0 and 1; choice(0.4;0.5;0.6;0.7;0.8) draws one for each row")
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
            values = _numbers(self.alpha)
            for value in values:
                if not 0 < value < 1:
                    raise UserError(
                        f"option 'alpha' of 'warp' must lie between 0 and 1, both excluded, not {value:g}: "
                        "1/r suits a test length of r times the training length"
                    )
            spelt = ";".join(map(show, values))
            object.__setattr__(self, "alpha", f"choice({spelt})" if len(values) > 1 else spelt)

    fractional = True
    formula = "p_j = α·j (head), l·f(j/l) (tail) or j,  f = CDF of Beta(2,5) or sqrt"
    paper = "Improving Length Generalization via Position Index Warping, Eq. 7, 8"
    random = True

    def setup(self) -> None:
        self.alphas = torch.tensor(_numbers(self.config.alpha), dtype=torch.float64)
        self.whole: int | None = None  # tokens of every row, where they are not its own
        if self.config.length == "train":
            if self.train_length is None:
                raise UserError("'warp:length=train' needs a training length that is unknown here: use length=row")
            self.whole = self.longest = self.train_length

    def transform(self, index: Tensor, lengths: Tensor, generator: torch.Generator | None) -> TransformedPositions:
        if self.whole is not None and int(lengths.max()) > self.whole:
            raise UserError(
                f"'warp:length=train': a row of {int(lengths.max())} tokens is longer than the training length "
                f"{self.whole}: use length=row"
            )
        rows = len(lengths)
        u = torch.rand(rows, dtype=torch.float64, generator=generator)
        alpha = self.alphas[torch.randint(len(self.alphas), (rows,), generator=generator)]
        tail = u >= 1 - self.config.tail
        scale = torch.where(u < self.config.head, alpha, 1.0).masked_fill(tail, 1.0)
        if not tail.any() and (scale == scale[0]).all():
            step = scale[0].item()
            return TransformedPositions(index if step == 1 else index * step, step, True)
        at = clamped(index, lengths)
        moved = at * scale.to(at)[:, None]
        if tail.any():
            chosen = tail.nonzero()[:, 0].to(at.device)
            if self.whole is not None:
                lengths = torch.full_like(lengths, self.whole)
            # in double: near 0 the CDF is a small difference of numbers near 1
            ends = lengths.to(at.device)[chosen].clamp_min(1).double()[:, None]
            moved[chosen] = (ends * SKEWS[self.config.skew](at[chosen].double() / ends)).to(at.dtype)
        return TransformedPositions(moved, None, False)
