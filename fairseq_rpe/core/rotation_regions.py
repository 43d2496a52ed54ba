"""Regions of (query, key) pairs that are scored at rotary positions of their own."""

from collections.abc import Callable
from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True)
class RotationRegion:
    """Pairs with score (R_p q_i)·(R_r k_j) / sqrt(D): the query rotated for p = ``q[i]``, the key for r = ``k[j]``.

    An encoding has several regions. Every visible pair is in at most one of them; pairs in none are hidden.

    Attributes:
        q: (B or 1, n or 1) position for which each query is rotated.
        k: (B or 1, m or 1) position for which each key is rotated.
        covers: Function of the true positions of queries and keys, which broadcast; returns bool, True for pairs in the
            region.
        key_range: Function of the smallest and the largest true position of a block of queries; returns the smallest
            and the largest true position of keys that share this region with at least one of these queries. A range
            that is too wide costs time; a range that is too narrow is wrong.
    """

    q: Tensor
    k: Tensor
    covers: Callable[[Tensor, Tensor], Tensor]
    key_range: Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]

    def select(self, queries: slice, keys: slice) -> "RotationRegion":
        """Return the region restricted to a slice of the queries and a slice of the keys."""
        q, k = _select_columns(self.q, queries), _select_columns(self.k, keys)
        return RotationRegion(q, k, self.covers, self.key_range)


def _select_columns(positions: Tensor, columns: slice) -> Tensor:
    """Return columns of (B or 1, n), or the only column of (B or 1, 1)."""
    return positions if positions.shape[1] == 1 else positions[:, columns]
