"""Products of queries and keys that replace q·k in attention scores."""

from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from fairseq_rpe.core.tensor_fields import TensorFields


class ScoreProduct(TensorFields):
    """Base class of products of n queries, the last n of m tokens, and m keys, as an encoding's hook returns them."""

    def products(self) -> Tensor:
        """Return the product of each query and key, not divided by sqrt(D).

        Returns:
            (B, H, n, m) in the dtype of the queries; any finite number where the key is after the query.
        """
        raise NotImplementedError

    def prepare_blocks(self) -> "ScoreProduct":
        """Return an equal product that is fast for blocks of queries, with what the blocks share computed once."""
        return self

    def key_state(self) -> Tensor | None:
        """Return the keys (B, H, m, D) as the m tokens have transformed them, or None if tokens transform no keys."""
        return None


@dataclass(frozen=True)
class VectorProduct(ScoreProduct):
    """The plain product of other queries and keys than those of the layer, which every attention backend computes.

    Attributes:
        query: (B, H, n, D) queries.
        key: (B, H, m, D) keys.
    """

    _tensor_kinds: ClassVar = {"query": "rows", "key": "keys"}
    query: Tensor
    key: Tensor

    def products(self) -> Tensor:
        """Return the products (B, H, n, m)."""
        return self.query @ self.key.mT
