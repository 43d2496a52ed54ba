"""CAPE: positions augmented by random shifts and scaling in training."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

from fairseq_rpe.core.spec import option
from fairseq_rpe.positions.base import Transform, TransformedPositions, clamp_to_row, register

if TYPE_CHECKING:
    import torch
    from torch import Tensor
else:
    from fairseq_rpe.core import lazy_torch as torch


@register("cape", colour="grey", marker="v")
class Cape(Transform):
    """Random shift, jitter and scaling of positions in training (Likhomanenko et al. 2021, arXiv 2106.03143).

    Evaluation has no augmentation. This is not the "CAPE" of Zheng et al. 2024, which is DAPE. The paper uses
    sinusoids (``sinusoidal:style=vaswani``); any encoding can read the positions, which may be negative and fractional.
    Defaults are the text recipe of a public re-implementation, except ``local``: it has 1.0, with which neighbours may
    swap; 0.5 keeps the order. Its optional subtraction of the mean position is left out.
    """

    @dataclass(frozen=True)
    class Config:
        """Options of ``cape``."""

        shift: float = option(5.0, "global shift, in positions, drawn for each row from [-shift, shift)", minimum=0)
        local: float = option(
            0.5, "local shift, drawn for each token from [-local, local); above 0.5 neighbours may swap", minimum=0
        )
        scale: float = option(1.03, "global scaling, drawn for each row between 1/scale and scale", minimum=1)

    fractional = True
    formula = "p_j = (j + Δ + ε_j)·e^λ,  Δ, ε ~ U(±shift), U(±local),  λ ~ U(±ln scale)"
    paper = "Likhomanenko et al. 2021 (arXiv 2106.03143)"
    random = True

    def transform(self, index: Tensor, lengths: Tensor, generator: torch.Generator | None) -> TransformedPositions:
        """Return the positions (B or 1, m) of the tokens."""
        rows, longest = len(lengths), max(1, int(lengths.max()))
        at = clamp_to_row(index, lengths)
        shift = _uniform((rows, 1), self.config.shift, generator).to(at)
        scale = _uniform((rows, 1), math.log(self.config.scale), generator).exp().to(at)
        # drawn by index, not by column, so that padding has no effect
        jitter = _uniform((rows, longest), self.config.local, generator).to(at).gather(1, at.long())
        rigid = self.config.local == 0 and self.config.scale == 1
        return TransformedPositions((at + shift + jitter) * scale, step=1.0 if rigid else None, contiguous=rigid)


def _uniform(shape: tuple[int, int], bound: float, generator: torch.Generator | None) -> Tensor:
    """Draw from U(-bound, bound)."""
    return (torch.rand(shape, generator=generator) * 2 - 1) * bound
