"""Which index each token has."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Positions:
    """Positions of queries and keys.

    Attributes:
        q: (B or 1, n) query positions; float32, float64 or int64, never half precision.
        k: (B or 1, m) key positions; the queries are the last n of the m tokens.
        step: every difference ``q_i - k_j`` is a multiple of it; None where spacing is arbitrary.
        contiguous: neighbouring tokens differ by exactly ``step``, so a difference depends on the
            two *indices* alone (true for plain, offset and interpolated positions, and for rows that
            differ only in a left-padding offset). Tokens that are padding do not count.
    """

    q: Tensor
    k: Tensor
    step: float | None = 1.0
    contiguous: bool = True

    @staticmethod
    def arange(
        n: int, m: int | None = None, *, device: torch.device | str | None = None, dtype: torch.dtype = torch.float32
    ) -> Positions:
        """The plain positions: m keys at 0 … m-1, n queries at the last n of them."""
        m = n if m is None else m
        k = torch.arange(m, device=device, dtype=dtype)[None]
        return Positions(k[:, m - n :], k)
