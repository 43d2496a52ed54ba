"""Types of attention bias: terms that an encoding adds to the scores.

Conventions: i is the query position, j the key position, and ``d = i - j >= 0`` is the past. A bias is in nats and is
added to ``q·k / sqrt(D)``. Values for the future (d < 0) are finite but meaningless: backends mask them.
"""

import functools
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from typing import ClassVar, Self

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from fairseq_rpe.core.positions import Positions

_ALL = slice(None)
_MAX_PRODUCTS = 1 << 22  # elementwise products of query, key and vector in memory at a time


class BiasTerm:
    """Base class of the bias types."""

    # (name, kind) of each field with a tensor, with the kinds of `tree_flatten`; None: a function or a dense bias
    _tensors: ClassVar[tuple[tuple[str, str], ...] | None] = None

    def materialize(self, pos: Positions, queries: slice = _ALL, keys: slice = _ALL) -> Tensor:
        """Return the dense bias of a block of queries and keys.

        Args:
            pos: Positions of all n queries and m keys.
            queries: Queries of the block, by index; default: all.
            keys: Keys of the block, by index; default: all.

        Returns:
            (B or 1, H, queries, keys).
        """
        raise NotImplementedError

    def slice_queries(self, queries: slice, num_keys: int) -> Self:
        """Return the bias of some queries and the first ``num_keys`` keys.

        Args:
            queries: The queries, by index.
            num_keys: Number of keys; the queries see no later ones.

        Returns:
            A bias of the same type; tables by distance stay whole.
        """
        sliced = {"rows": queries, "keys": slice(num_keys)}
        tensors = {
            name: getattr(self, name)[:, :, sliced[kind]] for name, kind in self._tensors or () if kind in sliced
        }
        return replace(self, **tensors) if tensors else self  # type: ignore[type-var]

    def tree_flatten(self) -> list[tuple[Tensor, str]] | None:
        """Return the tensors of the bias, each with its kind, or None for functions and dense biases.

        The kinds are "rows" for one entry per query, (B, H, n, …), "keys" for one per key, (B, H, m, …), and "table"
        for neither, (H or 1, …).
        """
        return None if self._tensors is None else [(getattr(self, name), kind) for name, kind in self._tensors]

    def tree_unflatten(self, tensors: Iterator[Tensor]) -> Self:
        """Return the same bias with other tensors, in the order of :meth:`tree_flatten`."""
        replaced = {name: next(tensors) for name, _ in self._tensors or ()}
        return replace(self, **replaced) if replaced else self  # type: ignore[type-var]


@dataclass(frozen=True)
class ToeplitzBias(BiasTerm):
    """``bias[h, i, j] = table[h, (q_i - k_j) / step + origin]``, clamped to the ends of the table. O(R) memory.

    Attributes:
        table: (H, R) float, with the gradient to the encoding's parameters.
        origin: Column of distance 0.
        step: Distance between neighbouring columns.
    """

    _tensors: ClassVar = (("table", "table"),)
    table: Tensor
    origin: int = 0
    step: float = 1.0

    @property
    def num_columns(self) -> int:
        """Number of columns R of the table."""
        return self.table.shape[1]

    def materialize(self, pos: Positions, queries: slice = _ALL, keys: slice = _ALL) -> Tensor:
        """Gather the table at the index distance of each pair."""
        # (H, B or 1, queries, keys) -> (B or 1, H, queries, keys)
        return self.table[:, table_index(self, pos.q[:, queries], pos.k[:, keys])].transpose(0, 1)


@dataclass(frozen=True)
class PairBias(BiasTerm):
    """A function of both positions: ``bias = fn(i, j, *aux)``.

    Attributes:
        fn: Maps i (B or 1, n), j (B or 1, m) and ``aux`` to (B or 1, H, n, m). It is pointwise in the positions, so a
            backend may call it block by block.
        aux: Tensors that ``fn`` needs besides the positions.
    """

    fn: Callable[..., Tensor]
    aux: tuple[Tensor, ...] = ()

    def materialize(self, pos: Positions, queries: slice = _ALL, keys: slice = _ALL) -> Tensor:
        """Call the function with the positions of the block."""
        return self.fn(pos.q[:, queries], pos.k[:, keys], *self.aux)


@dataclass(frozen=True)
class PointwiseBias(PairBias):
    """A :class:`PairBias` that a kernel can compute per pair.

    ``bias[h, i, j] = scalar_fn(i, j, *(x[h] for x in parameters))``.

    ``fn`` computes the same bias with tensors.

    Attributes:
        scalar_fn: Arithmetic of scalars, or of tensors that broadcast.
        parameters: Tensors (H,), with the gradient to the encoding's parameters.
    """

    scalar_fn: Callable[..., Tensor] = field(kw_only=True)
    parameters: tuple[Tensor, ...] = field(kw_only=True)


@dataclass(frozen=True)
class PiecewiseLinear:
    """A piecewise linear function per head: f_h(x) = value[h, p] + slope[h, p]·(x - midpoints[p]) in piece p.

    Attributes:
        breakpoints: (K - 1,) sorted; x is in piece p if p of them are <= x.
        midpoints: (K,) a point inside each piece.
        value: (H, K) f at ``midpoints``, with the gradient to the parameters of f.
        slope: (H, K) slope of f in each piece, likewise.
    """

    breakpoints: Tensor
    midpoints: Tensor
    value: Tensor
    slope: Tensor


@dataclass(frozen=True)
class ScaledDistanceBias(PairBias):
    """A :class:`PairBias` of contiguous positions, as in FIRE.

    bias[h, i, j] = f_h(distance_values[i - j] · query_scale[i]).

    ``fn`` computes the same bias; backends without support for this type use it.

    Attributes:
        distance_values: (m,) values at the *index* distances 0 … m-1, non-negative and non-decreasing.
        query_scale: (B or 1, n), positive.
        make_pieces: Maps the largest x to f on [0, x] as a :class:`PiecewiseLinear`.
    """

    distance_values: Tensor = field(kw_only=True)
    query_scale: Tensor = field(kw_only=True)
    make_pieces: Callable[[float], PiecewiseLinear] = field(kw_only=True)

    def slice_queries(self, queries: slice, num_keys: int) -> Self:
        """Slice the values by distance and the scales of the queries."""
        return replace(self, distance_values=self.distance_values[:num_keys], query_scale=self.query_scale[:, queries])

    def pieces_in_range(
        self, pos: Positions, padding: Tensor | None = None, last_query: Tensor | None = None
    ) -> PiecewiseLinear:
        """Return the pieces of f from 0 to the largest x of a visible pair, at least to 1.

        Args:
            pos: Positions of the n queries and m keys.
            padding: (B, m) bool, True at keys that no query sees.
            last_query: (B, m) index of the last query that sees each key.

        Returns:
            f on the visible range.
        """
        n, m = pos.q.shape[1], pos.k.shape[1]
        with torch.no_grad():
            # (1, n) or (B, n): largest distance that each query sees
            distance = torch.arange(m - n, m, device=self.distance_values.device)[None]
            if padding is not None:
                first = padding.long().argmin(dim=1, keepdim=True).masked_fill(padding.all(1, keepdim=True), m)
                distance = distance - first
            if last_query is not None:  # a document begins after the last query that sees the previous token
                index = torch.arange(m, device=distance.device)
                begins = F.pad(last_query[:, :-1] < index[1:], (1, 0), value=True)  # (B, m)
                since_begin = index - torch.where(begins, index, 0).cummax(1).values  # (B, m)
                distance = torch.minimum(distance, since_begin[:, m - n :])
            x = self.distance_values[distance.clamp_min(0)] * self.query_scale  # (B or 1, n)
            largest = max(1.0, float(x.masked_fill(distance < 0, 0.0).max()))
        return self.make_pieces(largest)


@dataclass(frozen=True)
class DenseBias(BiasTerm):
    """The bias itself. Every bias has this form, at O(n²) memory.

    Attributes:
        bias: (B or 1, H, n, m).
    """

    bias: Tensor

    def materialize(self, pos: Positions, queries: slice = _ALL, keys: slice = _ALL) -> Tensor:
        """Slice the dense bias."""
        return self.bias[:, :, queries, keys]

    def slice_queries(self, queries: slice, num_keys: int) -> Self:
        """Slice the dense bias."""
        return replace(self, bias=self.bias[:, :, queries, :num_keys])


@dataclass(frozen=True)
class QueryTableBias(BiasTerm):
    """Products of queries with a table of vectors by distance: bias[b, h, i, j] = query[b, h, i] · vectors[h, c(i, j)].

    c(i, j) = (q_i - k_j) / step + origin, clamped to the ends of the table. O(n·E + R·E) memory.

    Attributes:
        query: (B, H, n, E), already scaled, with the gradient to q.
        vectors: (H or 1, R, E).
        origin: Column of distance 0.
        step: Distance between neighbouring columns.
    """

    _tensors: ClassVar = (("query", "rows"), ("vectors", "table"))
    query: Tensor
    vectors: Tensor
    origin: int = 0
    step: float = 1.0

    @property
    def num_columns(self) -> int:
        """Number of columns R of the table."""
        return self.vectors.shape[1]

    def materialize(self, pos: Positions, queries: slice = _ALL, keys: slice = _ALL) -> Tensor:
        """Multiply the queries by all vectors and gather the products by distance."""
        return _gather_dot(
            self.query[:, :, queries], self.vectors, table_index(self, pos.q[:, queries], pos.k[:, keys])
        )


@dataclass(frozen=True)
class KeyTableBias(BiasTerm):
    """Products of keys with a table of vectors by distance: bias[b, h, i, j] = key[b, h, j] · vectors[h, c(i, j)].

    c(i, j) as in :class:`QueryTableBias`. O(m·E + R·E) memory.

    Attributes:
        key: (B, H, m, E), already scaled, with the gradient to k.
        vectors: (H or 1, R, E).
        origin: Column of distance 0.
        step: Distance between neighbouring columns.
    """

    _tensors: ClassVar = (("key", "keys"), ("vectors", "table"))
    key: Tensor
    vectors: Tensor
    origin: int = 0
    step: float = 1.0

    @property
    def num_columns(self) -> int:
        """Number of columns R of the table."""
        return self.vectors.shape[1]

    def materialize(self, pos: Positions, queries: slice = _ALL, keys: slice = _ALL) -> Tensor:
        """Multiply the keys by all vectors and gather the products by distance."""
        index = table_index(self, pos.q[:, queries], pos.k[:, keys])
        return _gather_dot(self.key[:, :, keys], self.vectors, index.mT).mT


@dataclass(frozen=True)
class QueryKeyTableBias(BiasTerm):
    """Products of query, key and a table of vectors by distance.

    bias[b, h, i, j] = Σ_e query[b, h, i, e] · key[b, h, j, e] · vectors[h, c, e], where c = c(i, j) as in
    :class:`QueryTableBias`. O(n·E + R·E) memory. Pairs nearer than the last column of the table take O(E) time each;
    all others are one matrix product. A table of scalars, (H or 1, R, 1), multiplies the products of queries and keys,
    which are one matrix product for all pairs.

    Attributes:
        query: (B, H, n, E), already scaled, with the gradient to q.
        key: (B, H, m, E).
        vectors: (H or 1, R, E or 1).
        origin: Column of distance 0.
        step: Distance between neighbouring columns.
    """

    _tensors: ClassVar = (("query", "rows"), ("key", "keys"), ("vectors", "table"))
    query: Tensor
    key: Tensor
    vectors: Tensor
    origin: int = 0
    step: float = 1.0

    @property
    def num_columns(self) -> int:
        """Number of columns R of the table."""
        return self.vectors.shape[1]

    def materialize(self, pos: Positions, queries: slice = _ALL, keys: slice = _ALL) -> Tensor:
        """Multiply the queries, keys and vectors of the block."""
        index = table_index(self, pos.q[:, queries], pos.k[:, keys])
        return _triple_products(self.query[:, :, queries], self.key[:, :, keys], self.vectors, index)


@dataclass(frozen=True)
class TokenBias(BiasTerm):
    """A number per token: bias[b, h, i, j] = query[b, h, i] + key[b, h, j]. O(n) memory.

    Attributes:
        query: (B, H, n); softmax ignores it, but it keeps the sum small where both are large.
        key: (B, H, m). In float64 the sum is rounded once.
    """

    _tensors: ClassVar = (("query", "rows"), ("key", "keys"))
    query: Tensor
    key: Tensor

    def materialize(self, pos: Positions, queries: slice = _ALL, keys: slice = _ALL) -> Tensor:
        """Add the numbers of the queries and of the keys."""
        return self.query[:, :, queries, None] + self.key[:, :, None, keys]


@dataclass(frozen=True)
class SumBias(BiasTerm):
    """The sum of several biases.

    Attributes:
        terms: The summands.
    """

    terms: tuple["Bias", ...]

    def materialize(self, pos: Positions, queries: slice = _ALL, keys: slice = _ALL) -> Tensor:
        """Add the dense terms."""
        return functools.reduce(torch.add, (term.materialize(pos, queries, keys) for term in self.terms))

    def slice_queries(self, queries: slice, num_keys: int) -> Self:
        """Slice every term."""
        return replace(self, terms=tuple(term.slice_queries(queries, num_keys) for term in self.terms))

    def tree_flatten(self) -> list[tuple[Tensor, str]] | None:
        """Return the tensors of all terms, or None if a term has none."""
        tensors: list[tuple[Tensor, str]] = []
        for term in self.terms:
            term_tensors = term.tree_flatten()
            if term_tensors is None:
                return None
            tensors += term_tensors
        return tensors

    def tree_unflatten(self, tensors: Iterator[Tensor]) -> Self:
        """Return the terms with other tensors."""
        return replace(self, terms=tuple(term.tree_unflatten(tensors) for term in self.terms))


@dataclass(frozen=True)
class RelativeValues:
    """Relative value vectors (Shaw et al. 2018): output[b, h, i] += Σ_j weight[b, h, i, j] · vectors[h, c(i, j)].

    Attributes:
        vectors: (H or 1, R, D).
        origin: Column of distance 0, as in :class:`QueryTableBias`.
        step: Distance between neighbouring columns.
    """

    vectors: Tensor
    origin: int = 0
    step: float = 1.0

    @property
    def num_columns(self) -> int:
        """Number of columns R of the table."""
        return self.vectors.shape[1]


Bias = ToeplitzBias | PairBias | TokenBias | QueryTableBias | KeyTableBias | QueryKeyTableBias | SumBias | DenseBias
"""Any type of bias, ordered from the most structured type to the least."""

ContentBias = TokenBias | QueryTableBias | KeyTableBias | QueryKeyTableBias | SumBias
"""Types of bias that may depend on the contents of the tokens."""


def add_biases(first: Bias | None, second: Bias | None) -> Bias | None:
    """Return the sum of two biases, where None is no bias."""
    if first is None or second is None:
        return second if first is None else first
    return SumBias((first, second))


def table_index(
    table: ToeplitzBias | QueryTableBias | KeyTableBias | QueryKeyTableBias | RelativeValues, i: Tensor, j: Tensor
) -> Tensor:
    """Return the column of ``table`` of each pair of a query and a key.

    Args:
        table: A table by distance.
        i: (B or 1, n) query positions.
        j: (B or 1, m) key positions.

    Returns:
        int64 (B or 1, n, m).
    """
    index = torch.round((i[:, :, None] - j[:, None, :]) / table.step).long() + table.origin
    return index.clamp_(0, table.num_columns - 1)


def _gather_dot(x: Tensor, vectors: Tensor, index: Tensor) -> Tensor:
    """Dot products of x (B, H, n, E) with the vectors (H or 1, R, E) at index (B or 1, n, m): (B, H, n, m)."""
    products = torch.matmul(x, vectors.to(x.dtype).mT)  # (B, H, n, R)
    return products.gather(3, index[:, None].expand(*products.shape[:2], -1, -1))


def _triple_products(query: Tensor, key: Tensor, vectors: Tensor, index: Tensor) -> Tensor:
    """Σ_e query[…, i, e] · key[…, j, e] · vectors[…, index(i, j), e] of all pairs.

    Args:
        query: (B, H, n, E).
        key: (B, H, m, E).
        vectors: (H or 1, R, E), or (H or 1, R, 1) if all elements have one factor.
        index: int64 (B or 1, n, m), the column of each pair.

    Returns:
        (B, H, n, m).
    """
    vectors = vectors.to(query.dtype)
    if vectors.shape[2] == 1 < query.shape[3]:
        # (B, H, n, m) · (B or 1, H or 1, n, m)
        return torch.matmul(query, key.mT) * vectors[:, index, 0].transpose(0, 1)
    last = vectors.shape[1] - 1
    # All pairs as if they were in the last column, then corrections of those that are in nearer ones.
    far = torch.matmul(query * vectors[:, -1:], key.mT)  # (B, H, n, m)
    near = (index < last).any(dim=0)  # (n, m)
    near_keys = near.any(dim=0).nonzero().flatten()
    if not len(near_keys):
        return far
    first, stop = int(near_keys[0]), int(near_keys[-1]) + 1
    # the difference from the last column, so that pairs beyond the table add nothing: (H or 1, R, E)
    differences = vectors - vectors[:, -1:]
    block_size = max(1, _MAX_PRODUCTS // (query.shape[0] * query.shape[1] * query.shape[3] * (stop - first)))

    def block_products(queries: Tensor, keys: Tensor, table: Tensor, index: Tensor) -> Tensor:
        # table[:, index]: (H or 1, B or 1, n', m', E) -> (B or 1, H or 1, n', m', E)
        factors = table[:, index].transpose(0, 1)
        # (B, H, n', m', E) · (B, H, 1, m', E), summed over E -> (B, H, n', m')
        return torch.einsum("bhnme,bhme->bhnm", queries[:, :, :, None] * factors, keys)

    blocks = []
    for start in range(0, query.shape[2], block_size):
        rows = slice(start, start + block_size)
        arguments = query[:, :, rows], key[:, :, first:stop], differences, index[:, rows, first:stop]
        # the products of one block fill the memory budget, so the backward pass recomputes them
        blocks.append(checkpoint(block_products, *arguments, use_reentrant=False, preserve_rng_state=False))
    return far + F.pad(torch.cat(blocks, dim=2), (first, key.shape[2] - stop))
