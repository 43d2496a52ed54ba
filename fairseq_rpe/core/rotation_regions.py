"""Pairs of a query and a key that are scored at positions of their own."""

from collections.abc import Callable
from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True)
class RotationRegion:
    """Pairs whose score is (R_p q_i)·(R_r k_j) / sqrt(D): the query turned for p = ``q[i]``, the key for r = ``k[j]``.

    An encoding names several. Every pair that a query may see is in at most one of them; pairs in none are hidden.

    Attributes:
        q: (B or 1, n or 1) position at which each query is turned.
        k: (B or 1, m or 1) position at which each key is turned.
        covers: of the true positions of queries and keys, which broadcast: bool, whether a pair is in this region.
        keys: of the least and the largest true position of some queries, the same of the keys that may be with one of
            them in this region. Too wide costs time, too narrow is wrong.
    """

    q: Tensor
    k: Tensor
    covers: Callable[[Tensor, Tensor], Tensor]
    keys: Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]

    def part(self, queries: slice, keys: slice) -> "RotationRegion":
        """The same for some of the queries and keys."""
        return RotationRegion(some(self.q, queries), some(self.k, keys), self.covers, self.keys)


def some(at: Tensor, of: slice) -> Tensor:
    """Columns of (B or 1, n), or the only one that there is."""
    return at if at.shape[1] == 1 else at[:, of]
