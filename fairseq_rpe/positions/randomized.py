"""Randomized positional encodings."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from ..core import option
from .base import EXACT, Moved, Transform, check_longest, clamped, register
from .draws import subset


@dataclass(frozen=True)
class RandomizedConfig:
    """Where positions are drawn from."""

    max: int = option(2048, "positions are drawn from 0 … max-1; must hold the longest row", minimum=1, maximum=EXACT)
    per: str = option("batch", "one draw for all rows of a forward pass, or one for each row", choices=("batch", "row"))


@register("randomized")
class Randomized(Transform):
    """A random subset of 0 … max-1, sorted, instead of consecutive positions.

    The authors' code draws once for a forward pass and shares the draw by the batch, and it draws at evaluation too:
    give this transform in both slots for that; given for training alone, evaluation has the plain positions. With
    ``per=batch`` a row shorter than the longest takes the first positions of the shared draw (in the authors' code all
    rows of a batch are equally long); ``per=row`` gives each row a subset of its own length.

    Differs from that code for biases of the distance: there the T-1 distances are drawn and all queries share them;
    here positions are drawn, whatever the encoding, and distances are their differences.
    """

    Config = RandomizedConfig
    formula = "p = sort(subset of {0 … max-1} without replacement)"
    paper = "Ruoss et al. 2023 (arXiv 2305.16843)"
    random = True

    def move(self, index: Tensor, lengths: Tensor, generator: torch.Generator | None) -> Moved:
        check_longest(lengths, self.config.max, "randomized", "max")
        sizes = lengths.clamp_min(1).tolist()
        longest = max(sizes)
        if self.config.per == "batch":
            table = subset(longest, self.config.max, generator).to(index)
            return Moved(table[index.clamp(0, longest - 1).long()], 1.0, False)
        table = torch.zeros(len(sizes), longest, dtype=torch.int64)
        for row, size in zip(table, sizes, strict=True):
            row[:size] = subset(size, self.config.max, generator)
        return Moved(table.to(index).gather(1, clamped(index, lengths).long()), 1.0, False)
