"""Positions that stay, or move by a constant."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from ..core import option
from .base import EXACT, Moved, Transform, register


@register("identity")
class Identity(Transform):
    """The plain positions 0, 1, 2 …"""

    formula = "p_j = j"

    def move(self, index: Tensor, lengths: Tensor, generator: torch.Generator | None) -> Moved:
        return Moved(index, 1.0, True)


@dataclass(frozen=True)
class OffsetConfig:
    """How far."""

    by: int = option(0, "positions to add to every token", minimum=0, maximum=EXACT)


@register("offset")
class Offset(Transform):
    """All positions later by a constant: SHAPE's authors evaluate so."""

    Config = OffsetConfig
    formula = "p_j = j + by"
    paper = "Kiyono et al. 2021 (arXiv 2109.05644), evaluation in their code"

    def move(self, index: Tensor, lengths: Tensor, generator: torch.Generator | None) -> Moved:
        return Moved(index + self.config.by, 1.0, True)
