"""Dataclasses whose tensors attention slices: by query, by key and by head."""

from collections.abc import Iterator
from dataclasses import replace
from typing import Any, ClassVar, Self

from torch import Tensor


class TensorFields:
    """Base class of frozen dataclasses that describe their tensors, so that blocks of a call get slices of them.

    The kinds of tensors are "rows" for one entry per query, (B, H, n, …), "keys" for one per key, (B, H, m, …), "heads"
    for entries that all queries and keys share, (B, H, …), and "table" for those that all texts share, (H or 1, …).
    """

    # name of each field with a tensor -> its kind; None: a function or a dense bias
    _tensor_kinds: ClassVar[dict[str, str] | None] = None

    def select(self, queries: slice, keys: slice) -> Self:
        """Return the fields of some queries and keys.

        Args:
            queries: The queries, by index.
            keys: The keys, by index; the last of them is the last query.

        Returns:
            An object of the same type; tensors that are neither per query nor per key stay whole.
        """
        slice_of_kind = {"rows": queries, "keys": keys}
        sliced = {
            name: getattr(self, name)[:, :, slice_of_kind[kind]]
            for name, kind in (self._tensor_kinds or {}).items()
            if kind in slice_of_kind
        }
        return replace(self, **sliced) if sliced else self  # type: ignore[type-var]

    def select_heads(self, heads: slice) -> Any:
        """Return the fields of some heads; a tensor with one entry for all heads stays as it is."""
        tensors = self.tree_flatten()
        if tensors is None:
            raise NotImplementedError
        axes = {"rows": 1, "keys": 1, "heads": 1, "table": 0}
        return self.tree_unflatten(iter([select_heads(x, heads, axes[kind]) for x, kind in tensors]))

    def tree_flatten(self) -> list[tuple[Tensor, str]] | None:
        """Return the tensors, each with its kind, or None for functions and dense biases."""
        if self._tensor_kinds is None:
            return None
        return [(getattr(self, name), kind) for name, kind in self._tensor_kinds.items()]

    def tree_unflatten(self, tensors: Iterator[Tensor]) -> Self:
        """Return the same object with other tensors, in the order of :meth:`tree_flatten`."""
        replaced = {name: next(tensors) for name in self._tensor_kinds or ()}
        return replace(self, **replaced) if replaced else self  # type: ignore[type-var]


def select_heads(x: Tensor, heads: slice, axis: int) -> Tensor:
    """Return some heads of a tensor; one that has a single entry for all heads stays as it is."""
    return x if x.shape[axis] == 1 else x[(slice(None),) * axis + (heads,)]
