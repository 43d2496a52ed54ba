"""Types of attention bias: terms that an encoding adds to the scores.

Conventions: i is the query position, j the key position, and ``d = i - j >= 0`` is the past. A bias is in nats and is
added to ``q·k / sqrt(D)``. Values for the future (d < 0) are finite but meaningless: backends mask them. c(i, j) is the
column of a table by distance; :class:`DistanceTable` defines it.
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
from fairseq_rpe.core.tensor_fields import TensorFields, select_heads

_ALL = slice(None)
_MAX_PRODUCTS = 1 << 22  # elementwise products of query, key and vector that are in memory at a time


class BiasTerm(TensorFields):
    """Base class of the bias types."""

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


@dataclass(frozen=True, kw_only=True)
class DistanceTable:
    """Base class of types with a table by distance, whose R columns are evenly spaced distances.

    Query i and key j have column c(i, j) = (q_i - k_j) / step + origin, rounded and clamped to the ends of the table.

    Attributes:
        origin: Column of distance 0.
        step: Distance between neighbouring columns.
    """

    _table_field: ClassVar[str] = "vectors"
    origin: int = 0
    step: float = 1.0

    @property
    def num_columns(self) -> int:
        """Number of columns R of the table."""
        table: Tensor = getattr(self, self._table_field)  # (H, R) or (H or 1, R, E)
        return table.shape[1]


@dataclass(frozen=True)
class ToeplitzBias(DistanceTable, BiasTerm):
    """A number per head and distance: ``bias[h, i, j] = table[h, c(i, j)]``. O(R) memory.

    Attributes:
        table: (H, R) float, with the gradient to the encoding's parameters.
    """

    _tensor_kinds: ClassVar = {"table": "table"}
    _table_field: ClassVar[str] = "table"
    table: Tensor

    def columns(self, n: int) -> Tensor:
        """Return the columns (H, n) of distances 0 … n-1 steps; beyond the table they repeat its last column."""
        table = self.table[:, self.origin : self.origin + n]
        missing = n - table.shape[1]
        return torch.cat([table, self.table[:, -1:].expand(-1, missing)], dim=1) if missing else table

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

    def select_heads(self, heads: slice) -> "Bias":
        """Return the function of some heads, which computes all of them."""
        return replace(self, fn=self._fn_of_heads(heads))

    def _fn_of_heads(self, heads: slice) -> Callable[..., Tensor]:
        """Return ``fn`` restricted to some heads."""
        fn = self.fn
        return lambda i, j, *aux: select_heads(fn(i, j, *aux), heads, 1)


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

    def select_heads(self, heads: slice) -> "Bias":
        """Return the function with the parameters of some heads."""
        parameters = tuple(x[heads] for x in self.parameters)
        return replace(self, fn=self._fn_of_heads(heads), parameters=parameters)


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

    def select(self, queries: slice, keys: slice) -> Self:
        """Slice the values by distance and the scales of the queries."""
        values = self.distance_values[: keys.stop - (keys.start or 0)]
        return replace(self, distance_values=values, query_scale=self.query_scale[:, queries])

    def select_heads(self, heads: slice) -> "Bias":
        """Return the function, and its pieces, of some heads."""
        make_pieces = self.make_pieces

        def make_pieces_of_heads(largest: float) -> PiecewiseLinear:
            pieces = make_pieces(largest)
            return replace(
                pieces, value=select_heads(pieces.value, heads, 0), slope=select_heads(pieces.slope, heads, 0)
            )

        return replace(self, fn=self._fn_of_heads(heads), make_pieces=make_pieces_of_heads)

    def pieces_in_range(
        self, pos: Positions, padding: Tensor | None = None, last_query: Tensor | None = None
    ) -> PiecewiseLinear:
        """Return the pieces of f on [0, x], where x is the largest argument of f for a visible pair, at least 1.

        Args:
            pos: Positions of the n queries and m keys.
            padding: (B, m) bool, True at keys that no query sees.
            last_query: (B, m) index of the last query that sees each key.

        Returns:
            The pieces of f.
        """
        with torch.no_grad():
            n, m = pos.q.shape[1], pos.k.shape[1]
            distance = _largest_visible_distance(n, m, padding, last_query, self.distance_values.device)
            x = self.distance_values[distance.clamp_min(0)] * self.query_scale  # (B or 1, n)
            largest = max(1.0, float(x.masked_fill(distance < 0, 0.0).max()))
        return self.make_pieces(largest)


def _largest_visible_distance(
    n: int, m: int, padding: Tensor | None, last_query: Tensor | None, device: torch.device
) -> Tensor:
    """Return the index distance (B or 1, n) from each query to the first key it sees; negative if it sees none.

    The arguments are those of :meth:`ScaledDistanceBias.pieces_in_range`, for n queries and m keys.
    """
    distance = torch.arange(m - n, m, device=device)[None]  # (1, n), to key 0
    if padding is not None:
        # argmin returns the first False, which is the first real key
        first_key = padding.long().argmin(dim=1, keepdim=True).masked_fill(padding.all(1, keepdim=True), m)
        distance = distance - first_key
    if last_query is not None:  # a document begins after the last query that sees the previous token
        index = torch.arange(m, device=device)
        begins = F.pad(last_query[:, :-1] < index[1:], (1, 0), value=True)  # (B, m)
        since_begin = index - torch.where(begins, index, 0).cummax(1).values  # (B, m)
        distance = torch.minimum(distance, since_begin[:, m - n :])
    return distance


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

    def select_heads(self, heads: slice) -> "Bias":
        """Slice the dense bias."""
        return replace(self, bias=select_heads(self.bias, heads, 1))

    def select(self, queries: slice, keys: slice) -> Self:
        """Slice the dense bias."""
        return replace(self, bias=self.bias[:, :, queries, keys])


@dataclass(frozen=True)
class QueryTableBias(DistanceTable, BiasTerm):
    """Products of queries with a table of vectors by distance: bias[b, h, i, j] = query[b, h, i] · vectors[h, c(i, j)].

    O(n·E + R·E) memory.

    Attributes:
        query: (B, H, n, E), already scaled, with the gradient to q.
        vectors: (H or 1, R, E).
    """

    _tensor_kinds: ClassVar = {"query": "rows", "vectors": "table"}
    query: Tensor
    vectors: Tensor

    def materialize(self, pos: Positions, queries: slice = _ALL, keys: slice = _ALL) -> Tensor:
        """Multiply the queries by all vectors and gather the products by distance."""
        return _gather_dot(
            self.query[:, :, queries], self.vectors, table_index(self, pos.q[:, queries], pos.k[:, keys])
        )


@dataclass(frozen=True)
class KeyTableBias(DistanceTable, BiasTerm):
    """Products of keys with a table of vectors by distance: bias[b, h, i, j] = key[b, h, j] · vectors[h, c(i, j)].

    O(m·E + R·E) memory.

    Attributes:
        key: (B, H, m, E), already scaled, with the gradient to k.
        vectors: (H or 1, R, E).
    """

    _tensor_kinds: ClassVar = {"key": "keys", "vectors": "table"}
    key: Tensor
    vectors: Tensor

    def materialize(self, pos: Positions, queries: slice = _ALL, keys: slice = _ALL) -> Tensor:
        """Multiply the keys by all vectors and gather the products by distance."""
        index = table_index(self, pos.q[:, queries], pos.k[:, keys])
        return _gather_dot(self.key[:, :, keys], self.vectors, index.mT).mT


@dataclass(frozen=True)
class QueryKeyTableBias(DistanceTable, BiasTerm):
    """Products of query, key and a table of vectors by distance.

    bias[b, h, i, j] = Σ_e query[b, h, i, e] · key[b, h, j, e] · vectors[h, c(i, j), e].

    O(n·E + R·E) memory. Pairs nearer than the last column of the table take O(E) time each; all others are one matrix
    product. A table of scalars, (H or 1, R, 1), multiplies the products of queries and keys, which are one matrix
    product for all pairs.

    Attributes:
        query: (B, H, n, E), already scaled, with the gradient to q.
        key: (B, H, m, E).
        vectors: (H or 1, R, E or 1).
    """

    _tensor_kinds: ClassVar = {"query": "rows", "key": "keys", "vectors": "table"}
    query: Tensor
    key: Tensor
    vectors: Tensor

    def materialize(self, pos: Positions, queries: slice = _ALL, keys: slice = _ALL) -> Tensor:
        """Multiply the queries, keys and vectors of the block."""
        index = table_index(self, pos.q[:, queries], pos.k[:, keys])
        return _triple_products(self.query[:, :, queries], self.key[:, :, keys], self.vectors, index)


@dataclass(frozen=True)
class TokenBias(BiasTerm):
    """A number per token: bias[b, h, i, j] = query[b, h, i] + key[b, h, j]. O(n) memory.

    Attributes:
        query: (B, H, n). Softmax does not depend on it, but where ``key`` is large, an opposite ``query`` keeps the sum
            small and so precise.
        key: (B, H, m). If both are float64, the sum is rounded only once, to the dtype of the scores.
    """

    _tensor_kinds: ClassVar = {"query": "rows", "key": "keys"}
    query: Tensor
    key: Tensor

    def materialize(self, pos: Positions, queries: slice = _ALL, keys: slice = _ALL) -> Tensor:
        """Add the numbers of the queries and of the keys."""
        return self.query[:, :, queries, None] + self.key[:, :, None, keys]


@dataclass(frozen=True)
class PairGateBias(BiasTerm):
    """Sums of the logarithms of gates of pairs: bias[b, h, i, j] = Σ_(l=j…i-1) ln σ(query[b, h, i] · key[b, h, l]).

    O(n·E) memory.

    Attributes:
        query: (B, H, n, E), already scaled.
        key: (B, H, m, E).
        repeated: (B, H, m) bool, True at keys whose gate counts for this key alone, such as padding.
    """

    _tensor_kinds: ClassVar = {"query": "rows", "key": "keys", "repeated": "keys"}
    query: Tensor
    key: Tensor
    repeated: Tensor

    def materialize(self, pos: Positions, queries: slice = _ALL, keys: slice = _ALL) -> Tensor:
        """Sum the logarithms of the gates of all keys before each query of the block."""
        n, m = self.query.shape[2], self.key.shape[2]
        index = torch.arange(m, device=self.key.device)
        is_before = index < index[m - n :][queries, None]  # (queries, m)
        logits = torch.matmul(self.query[:, :, queries], self.key.mT)  # (B, H, queries, m)
        log_gate = F.logsigmoid(logits).where(is_before, 0.0)
        repeated = self.repeated[:, :, None]  # (B, H, 1, m)
        # from the right, so that the sums of near keys are exact; the gate of key j itself counts in any case
        sums = log_gate.masked_fill(repeated, 0.0).flip(-1).cumsum(-1).flip(-1)
        return (sums + log_gate.masked_fill(~repeated, 0.0))[..., keys]


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

    def select_heads(self, heads: slice) -> "Bias":
        """Select the heads of every term."""
        return replace(self, terms=tuple(term.select_heads(heads) for term in self.terms))

    def select(self, queries: slice, keys: slice) -> Self:
        """Slice every term."""
        return replace(self, terms=tuple(term.select(queries, keys) for term in self.terms))

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
class RelativeValues(DistanceTable):
    """Relative value vectors (Shaw et al. 2018): output[b, h, i] += Σ_j weight[b, h, i, j] · vectors[h, c(i, j)].

    Attributes:
        vectors: (H or 1, R, D).
    """

    vectors: Tensor


Bias = (
    ToeplitzBias
    | PairBias
    | TokenBias
    | QueryTableBias
    | KeyTableBias
    | QueryKeyTableBias
    | PairGateBias
    | SumBias
    | DenseBias
)
"""Any type of bias, ordered from the most structured type to the least."""

ContentBias = TokenBias | QueryTableBias | KeyTableBias | QueryKeyTableBias | PairGateBias | SumBias
"""Types of bias that may depend on the contents of the tokens."""


def add_biases(first: Bias | None, second: Bias | None) -> Bias | None:
    """Return the sum of two biases, where None is no bias."""
    if first is None or second is None:
        return second if first is None else first
    return SumBias((first, second))


def table_index(table: DistanceTable, i: Tensor, j: Tensor) -> Tensor:
    """Return the column c(i, j) of each pair of a query and a key.

    Args:
        table: A bias with a table by distance, or relative values.
        i: (B or 1, n) query positions.
        j: (B or 1, m) key positions.

    Returns:
        int64 (B or 1, n, m).
    """
    index = torch.round((i[:, :, None] - j[:, None, :]) / table.step).long() + table.origin
    return index.clamp_(0, table.num_columns - 1)


def _gather_dot(x: Tensor, vectors: Tensor, index: Tensor) -> Tensor:
    """Return the products (B, H, n, m) of x (B, H, n, E) with the vectors (H or 1, R, E) at index (B or 1, n, m)."""
    products = torch.matmul(x, vectors.to(x.dtype).mT)  # (B, H, n, R)
    return products.gather(3, index[:, None].expand(*products.shape[:2], -1, -1))


def _triple_products(query: Tensor, key: Tensor, vectors: Tensor, index: Tensor) -> Tensor:
    """Return Σ_e query[…, i, e] · key[…, j, e] · vectors[…, index(i, j), e] for all pairs.

    Args:
        query: (B, H, n, E).
        key: (B, H, m, E).
        vectors: (H or 1, R, E), or (H or 1, R, 1) if all elements have one factor.
        index: int64 (B or 1, n, m), the column of each pair.

    Returns:
        (B, H, n, m).
    """
    vectors = vectors.to(query.dtype)
    if vectors.shape[2] == 1:
        # (B, H, n, m) · (B or 1, H or 1, n, m)
        return torch.matmul(query, key.mT) * vectors[:, index, 0].transpose(0, 1)
    # all pairs as if they were in the last column, then corrections of those that are in nearer columns
    last_column = vectors.shape[1] - 1
    products = torch.matmul(query * vectors[:, -1:], key.mT)  # (B, H, n, m)
    near_keys = (index < last_column).any(dim=0).any(dim=0).nonzero().flatten()  # keys of at least one nearer pair
    if not len(near_keys):
        return products
    first, stop = int(near_keys[0]), int(near_keys[-1]) + 1
    # differences from the last column: pairs in it get a correction of 0
    differences = vectors - vectors[:, -1:]  # (H or 1, R, E)
    corrections = _triple_products_by_block(query, key[:, :, first:stop], differences, index[:, :, first:stop])
    return products + F.pad(corrections, (first, key.shape[2] - stop))


def _triple_products_by_block(query: Tensor, key: Tensor, vectors: Tensor, index: Tensor) -> Tensor:
    """Return the triple products (B, H, n, m) of all pairs, computed elementwise for blocks of queries."""
    products_per_query = query.shape[0] * query.shape[1] * query.shape[3] * key.shape[2]  # B·H·E·m
    block_size = max(1, _MAX_PRODUCTS // products_per_query)
    blocks = []
    for start in range(0, query.shape[2], block_size):
        rows = slice(start, start + block_size)
        arguments = query[:, :, rows], key, vectors, index[:, rows]
        # the products of one block fill the memory budget, so the backward pass recomputes them
        blocks.append(checkpoint(_elementwise_products, *arguments, use_reentrant=False, preserve_rng_state=False))
    return torch.cat(blocks, dim=2)


def _elementwise_products(query: Tensor, key: Tensor, vectors: Tensor, index: Tensor) -> Tensor:
    """Return the triple products (B, H, n, m) of all pairs, from all n·m·E products of three factors."""
    # vectors[:, index]: (H or 1, B or 1, n, m, E) -> (B or 1, H or 1, n, m, E)
    factors = vectors[:, index].transpose(0, 1)
    # (B, H, n, m, E) · (B, H, m, E), summed over E -> (B, H, n, m)
    return torch.einsum("bhnme,bhme->bhnm", query[:, :, :, None] * factors, key)
