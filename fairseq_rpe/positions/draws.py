"""Random whole numbers from a given generator, on the CPU."""

from __future__ import annotations

import torch
from torch import Tensor


def below(limits: Tensor, generator: torch.Generator) -> Tensor:
    """One uniform draw from 0 … limit-1 for each of ``limits`` (int64, >= 1), same shape."""
    limits = limits.cpu()
    u = torch.rand(limits.shape, dtype=torch.float64, generator=generator)
    return (u * limits).long().minimum(limits - 1)


def subset(size: int, limit: int, generator: torch.Generator) -> Tensor:
    """``size`` distinct numbers of 0 … limit-1 in ascending order, every subset equally likely. O(size) memory.

    A sparse subset grows by draws with replacement, of which repetitions are dropped; nothing in that distinguishes one
    number from another, so that no subset is favoured.
    """
    if 2 * size >= limit:
        return torch.randperm(limit, generator=generator)[:size].sort().values
    chosen = torch.empty(0, dtype=torch.int64)
    while len(chosen) < size:
        fresh = torch.randint(limit, (size - len(chosen),), generator=generator)
        chosen = torch.cat([chosen, fresh]).unique()
    return chosen
