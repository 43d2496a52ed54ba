"""What attention has to know beside q, k and v."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from ..core import Form, Positions


@dataclass(frozen=True)
class Plan:
    """One layer's attention, as opaque cargo from the decoder to the attention module.

    Attributes:
        positions: of the n queries and m keys.
        form: additive bias or None.
        padding: (B, m) bool, True at keys that nobody may see; None where causality already hides them.
        remap: function of (scores, positions), or None.
        rotate: function of (x, at, positions) for queries and keys, or None.
        backend: the function that computes attention.
    """

    positions: Positions
    form: Form | None = None
    padding: Tensor | None = None
    remap: Callable[[Tensor, Positions], Tensor] | None = None
    rotate: Callable[[Tensor, Tensor, Positions], Tensor] | None = None
    backend: Callable[..., Tensor] | None = None

    def visible(self, n: int, m: int, device: torch.device) -> Tensor:
        """(B or 1, 1, n, m) bool: key j is at or before query i (by index) and is not padding."""
        query = torch.arange(m - n, m, device=device)[:, None]
        seen = (torch.arange(m, device=device)[None, :] <= query)[None, None]
        return seen if self.padding is None else seen & ~self.padding[:, None, None, :]
