"""Which index each token has, and what an encoding hands on: bias forms to attention, log-weights to the analysis.

Conventions: i query position, j key position, ``d = i - j >= 0`` is the past. A bias is in nats and is
added to ``q·k / sqrt(D)``. Values for the future (d < 0) are finite but without meaning: the backend masks them.
"""

import functools
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from fairseq_rpe.core.arguments import check_count, check_number, described
from fairseq_rpe.core.errors import UserError

_ALL = slice(None)
_PRODUCTS = 1 << 22  # of query, key and vector, element by element, in memory at a time


@dataclass(frozen=True)
class Positions:
    """Positions of queries and keys.

    Attributes:
        q: (B or 1, n) query positions; float32 or float64; integers become float32.
        k: (B or 1, m) key positions; the queries are the last n of the m tokens.
        step: every difference ``q_i - k_j`` is a multiple of it; None where spacing is arbitrary.
        contiguous: neighbouring tokens differ by exactly ``step``, so a difference depends on the
            two *indices* alone (true for plain, offset and interpolated positions, and for rows that
            differ only in a left-padding offset). Tokens that are padding do not count, nor pairs of tokens of
            different documents in one row, each of which counts its tokens from 0.
        tokens: (B, m) ids of the m tokens, int64, negative at padding, for encodings that read them; None: not known.

    Raises:
        UserError: q or k is no dense real tensor (B or 1, tokens) or is in half precision, step is not above 0, or
            tokens are not int64 (B, m).
    """

    q: Tensor
    k: Tensor
    step: float | None = 1.0
    contiguous: bool = True
    tokens: Tensor | None = None

    def __post_init__(self) -> None:
        for name in ("q", "k"):
            positions = getattr(self, name)
            if not isinstance(positions, Tensor):
                raise UserError(f"positions must be torch tensors, and {name} is {described(positions)}")
            if positions.layout != torch.strided or positions.is_nested or positions.is_quantized:
                raise UserError(f"positions must be dense tensors, and {name} is not: convert it")
            if positions.dim() != 2 or positions.is_complex():
                raise UserError(
                    f"positions are real tensors (batch or 1, tokens), and {name} is {positions.dtype} of shape "
                    f"{tuple(positions.shape)}"
                )
            if not positions.is_floating_point():
                object.__setattr__(self, name, positions.float())
            elif positions.dtype not in (torch.float32, torch.float64):
                raise UserError(f"positions in {positions.dtype} are rounded: give them in float32 or float64")
        if self.step is not None and not (type(self.step) is float and 0 < self.step < math.inf):
            check_number("step of positions", self.step, above=0)
        tokens, m = self.tokens, self.k.shape[1]
        if tokens is not None and not isinstance(tokens, Tensor):
            raise UserError(f"tokens are a torch.int64 tensor of ids (batch, {m}), not {described(tokens)}")
        if tokens is not None and (tokens.dim() != 2 or tokens.shape[1] != m or tokens.dtype != torch.int64):
            raise UserError(f"tokens are int64 ids (batch, {m}), not {tokens.dtype} of shape {tuple(tokens.shape)}")

    @staticmethod
    def arange(
        n: int, m: int | None = None, *, device: torch.device | str | None = None, dtype: torch.dtype = torch.float32
    ) -> "Positions":
        """The plain positions: m keys at 0 … m-1, n queries at the last n of them.

        Raises:
            UserError: n or m is no number of tokens, or m is less than n.
        """
        m = n if m is None else m
        if not torch.compiler.is_compiling():  # where sizes may be symbols
            check_count("n", n, 0)
            check_count("m", m, 0)
            if m < n:
                raise UserError(f"positions of {n} queries and {m} keys: the queries are the last of the keys")
        k = torch.arange(m, device=device, dtype=dtype)[None]
        return Positions(k[:, m - n :], k)


@dataclass(frozen=True)
class ToeplitzBias:
    """``bias[h, i, j] = table[h, (q_i - k_j) / step + origin]``, clamped to the table's ends. O(R) memory.

    Attributes:
        table: (H, R) float; carries the gradient to whatever made it.
        origin: column that holds distance 0.
        step: distance between neighbouring columns.
    """

    table: Tensor
    origin: int = 0
    step: float = 1.0


@dataclass(frozen=True)
class PairBias:
    """``bias = fn(i, j, *aux)`` for i (B or 1, n) and j (B or 1, m), giving (B or 1, H, n, m).

    ``fn`` is pointwise in the positions, so a backend may call it block by block. ``aux`` are tensors that it
    needs beside the positions.
    """

    fn: Callable[..., Tensor]
    aux: tuple[Tensor, ...] = ()


@dataclass(frozen=True)
class PointwiseBias(PairBias):
    """A Pair that is arithmetic of both positions and a few numbers of the head, which a kernel can work out per pair.

    ``bias[h, i, j] = scalar(i, j, *(x[h] for x in numbers))``. ``fn`` is the plain way to the same bias.

    Attributes:
        scalar: of scalars, or of tensors that broadcast.
        numbers: (H,) each; they carry the gradient to whatever made them.
    """

    scalar: Callable[..., Tensor] = field(kw_only=True)
    numbers: tuple[Tensor, ...] = field(kw_only=True)


@dataclass(frozen=True)
class PiecewiseLinear:
    """A function of one number per head, linear between ``ends``: f_h(x) = value[h, p] + slope[h, p]·(x - middle[p]).

    Attributes:
        ends: (K - 1,) sorted; piece p is where p of them are <= x.
        middle: (K,) a point inside each piece.
        value: (H, K) of f in ``middle``; carries the gradient to whatever made f.
        slope: (H, K) of f in each piece; likewise.
    """

    ends: Tensor
    middle: Tensor
    value: Tensor
    slope: Tensor


@dataclass(frozen=True)
class ScaledDistanceBias(PairBias):
    """A Pair of contiguous positions that is a function of one number: bias[h, i, j] = f_h(far[i - j] · near[i]).

    ``fn`` is the plain way to the same bias. What knows no curves takes this for the Pair that it is.

    Attributes:
        far: (m,) of the distances 0 … m-1 between *indices*, at least 0 and never falling.
        near: (B or 1, n) of the queries, above 0.
        pieces: called with the largest x, gives f on [0, x].
    """

    far: Tensor = field(kw_only=True)
    near: Tensor = field(kw_only=True)
    pieces: Callable[[float], PiecewiseLinear] = field(kw_only=True)


@dataclass(frozen=True)
class DenseBias:
    """The bias itself, (B or 1, H, n, m). Always possible, O(n²)."""

    bias: Tensor


@dataclass(frozen=True)
class QueryTableBias:
    """A bias that the query reads from a table: bias[b, h, i, j] = query[b, h, i] · vectors[h, c(i, j)].

    c(i, j) = (q_i - k_j) / step + origin, clamped to the table's ends. O(n·E + R·E) memory.

    Attributes:
        query: (B, H, n, E), scaled already; carries the gradient to q.
        vectors: (H or 1, R, E).
        origin: column that holds distance 0.
        step: distance between neighbouring columns.
    """

    query: Tensor
    vectors: Tensor
    origin: int = 0
    step: float = 1.0


@dataclass(frozen=True)
class KeyTableBias:
    """The same, read by the key: bias[b, h, i, j] = key[b, h, j] · vectors[h, c(i, j)].

    Attributes: as in :class:`QueryTableBias`, but key (B, H, m, E) in place of query.
    """

    key: Tensor
    vectors: Tensor
    origin: int = 0
    step: float = 1.0


@dataclass(frozen=True)
class QueryKeyTableBias:
    """A bias of query, key and distance: bias[b, h, i, j] = Σ_e query[b, h, i, e] · key[b, h, j, e] · vectors[h, c, e].

    c = c(i, j) as in :class:`QueryTableBias`. O(n·E + R·E) memory; pairs nearer than the table's last column take O(E)
    time each, all others one product of matrices. A table of numbers, (H or 1, R, 1), multiplies the products of queries and
    keys: one product of matrices for all pairs.

    Attributes:
        query: (B, H, n, E), scaled already; carries the gradient to q.
        key: (B, H, m, E).
        vectors: (H or 1, R, E or 1).
        origin: column that holds distance 0.
        step: distance between neighbouring columns.
    """

    query: Tensor
    key: Tensor
    vectors: Tensor
    origin: int = 0
    step: float = 1.0


@dataclass(frozen=True)
class TokenBias:
    """One number per token: bias[b, h, i, j] = query[b, h, i] + key[b, h, j]. O(n) memory.

    Attributes:
        query: (B, H, n); softmax does not see it, but it keeps the sum small where both are large.
        key: (B, H, m). In float64 their sum is rounded once.
    """

    query: Tensor
    key: Tensor


@dataclass(frozen=True)
class SumBias:
    """Several biases, added."""

    forms: tuple["Bias", ...]


@dataclass(frozen=True)
class RelativeValues:
    """What a query reads beside the values: output[b, h, i] += Σ_j weight[b, h, i, j] · vectors[h, c(i, j)].

    Attributes: vectors (H or 1, R, D); origin and step as in :class:`QueryTableBias`.
    """

    vectors: Tensor
    origin: int = 0
    step: float = 1.0


# the most structured first
Bias = ToeplitzBias | PairBias | TokenBias | QueryTableBias | KeyTableBias | QueryKeyTableBias | SumBias | DenseBias
ContentBias = TokenBias | QueryTableBias | KeyTableBias | QueryKeyTableBias | SumBias  # of what the tokens are


def column_of(
    table: ToeplitzBias | QueryTableBias | KeyTableBias | QueryKeyTableBias | RelativeValues, i: Tensor, j: Tensor
) -> Tensor:
    """int64 (B or 1, n, m): the column of ``table`` for queries at i (B or 1, n) and keys at j (B or 1, m)."""
    last = (table.table if isinstance(table, ToeplitzBias) else table.vectors).shape[1] - 1
    found = torch.round((i[:, :, None] - j[:, None, :]) / table.step).long() + table.origin
    return found.clamp_(0, last)


def block(form: Bias, pos: Positions, rows: slice = _ALL, cols: slice = _ALL) -> Tensor:
    """The bias of some queries against some keys, of all if none are named: (B or 1, H, rows, cols)."""
    if isinstance(form, DenseBias):
        return form.bias[:, :, rows, cols]
    if isinstance(form, TokenBias):
        return form.query[:, :, rows, None] + form.key[:, :, None, cols]
    if isinstance(form, SumBias):
        return functools.reduce(torch.add, (block(one, pos, rows, cols) for one in form.forms))
    i, j = pos.q[:, rows], pos.k[:, cols]
    if isinstance(form, PairBias):
        return form.fn(i, j, *form.aux)
    at = column_of(form, i, j)
    if isinstance(form, ToeplitzBias):
        return form.table[:, at].transpose(0, 1)
    if isinstance(form, QueryTableBias):
        return looked_up(form.query[:, :, rows], form.vectors, at)
    if isinstance(form, QueryKeyTableBias):
        return products_with_columns(form.query[:, :, rows], form.key[:, :, cols], form.vectors, at)
    return looked_up(form.key[:, :, cols], form.vectors, at.mT).mT


def looked_up(own: Tensor, vectors: Tensor, at: Tensor) -> Tensor:
    """own (B, H, n, E) · vectors (H or 1, R, E) of the columns at (B or 1, n, m): (B, H, n, m)."""
    found = torch.matmul(own, vectors.to(own.dtype).mT)
    return found.gather(3, at[:, None].expand(*found.shape[:2], -1, -1))


def products_with_columns(query: Tensor, key: Tensor, vectors: Tensor, columns: Tensor) -> Tensor:
    """Σ_e query[…, i, e] · key[…, j, e] · vectors[…, c(i, j), e] of all pairs.

    Args:
        query: (B, H, n, E).
        key: (B, H, m, E).
        vectors: (H or 1, R, E), or (H or 1, R, 1) where all elements have one factor.
        columns: int64 (B or 1, n, m), the column c of each pair.

    Returns:
        (B, H, n, m).
    """
    vectors = vectors.to(query.dtype)
    if vectors.shape[2] == 1 < query.shape[3]:
        # (B, H, n, m) · (B or 1, H or 1, n, m)
        return torch.matmul(query, key.mT) * vectors[:, columns, 0].transpose(0, 1)
    last = vectors.shape[1] - 1
    far = torch.matmul(query * vectors[:, -1:], key.mT)  # (B, H, n, m), right for all pairs of the last column
    near = (columns < last).any(dim=0)  # (n, m)
    keys = near.any(dim=0).nonzero().flatten()
    if not len(keys):
        return far
    first, stop = int(keys[0]), int(keys[-1]) + 1
    # the difference to the last column, so that pairs beyond the table add nothing: (H or 1, R, E)
    differences = vectors - vectors[:, -1:]
    size = max(1, _PRODUCTS // (query.shape[0] * query.shape[1] * query.shape[3] * (stop - first)))

    def rows_of(queries: Tensor, keys: Tensor, table: Tensor, columns: Tensor) -> Tensor:
        # table[:, columns]: (H or 1, B or 1, n', m', E) -> (B or 1, H or 1, n', m', E)
        factors = table[:, columns].transpose(0, 1)
        # (B, H, n', m', E) · (B, H, 1, m', E), summed over E -> (B, H, n', m')
        return torch.einsum("bhnme,bhme->bhnm", queries[:, :, :, None] * factors, keys)

    found = []
    for start in range(0, query.shape[2], size):
        rows = slice(start, start + size)
        arguments = query[:, :, rows], key[:, :, first:stop], differences, columns[:, rows, first:stop]
        # the products of a few rows fill the memory that all of them may take: the backward pass makes them again
        found.append(checkpoint(rows_of, *arguments, use_reentrant=False, preserve_rng_state=False))
    return far + F.pad(torch.cat(found, dim=2), (first, key.shape[2] - stop))


def part(form: Bias | None, rows: slice, keys: int) -> Bias | None:
    """The bias of some queries and the first ``keys`` keys alone."""
    if isinstance(form, SumBias):
        return SumBias(tuple(one for each in form.forms if (one := part(each, rows, keys)) is not None))
    if isinstance(form, DenseBias):
        return DenseBias(form.bias[:, :, rows, :keys])
    if isinstance(form, ScaledDistanceBias):
        return replace(form, far=form.far[:keys], near=form.near[:, rows])
    if isinstance(form, TokenBias):
        return TokenBias(form.query[:, :, rows], form.key[:, :, :keys])
    if isinstance(form, QueryTableBias):
        return replace(form, query=form.query[:, :, rows])
    if isinstance(form, KeyTableBias):
        return replace(form, key=form.key[:, :, :keys])
    if isinstance(form, QueryKeyTableBias):
        return replace(form, query=form.query[:, :, rows], key=form.key[:, :, :keys])
    return form


def leaves(form: Bias | None) -> list[tuple[Tensor, str]] | None:
    """A form's tensors, each with its kind: (B, H, "rows" or "keys", …) or a "table" (H, …); None of a function."""
    if isinstance(form, SumBias):
        found = [leaves(one) for one in form.forms]
        return None if None in found else [x for one in found for x in one or ()]
    if isinstance(form, PairBias):
        return None
    if isinstance(form, QueryTableBias):
        return [(form.query, "rows"), (form.vectors, "table")]
    if isinstance(form, KeyTableBias):
        return [(form.key, "keys"), (form.vectors, "table")]
    if isinstance(form, QueryKeyTableBias):
        return [(form.query, "rows"), (form.key, "keys"), (form.vectors, "table")]
    if isinstance(form, TokenBias):
        return [(form.query, "rows"), (form.key, "keys")]
    return [] if form is None else [(form.table, "table")] if isinstance(form, ToeplitzBias) else None


def rebuilt(form: Bias | None, tensors: Iterator[Tensor]) -> Bias | None:
    """The same form of other tensors, in the order of :func:`leaves`."""
    if isinstance(form, SumBias):
        return SumBias(tuple(one for each in form.forms if (one := rebuilt(each, tensors)) is not None))
    if isinstance(form, QueryTableBias):
        return replace(form, query=next(tensors), vectors=next(tensors))
    if isinstance(form, KeyTableBias):
        return replace(form, key=next(tensors), vectors=next(tensors))
    if isinstance(form, QueryKeyTableBias):
        return replace(form, query=next(tensors), key=next(tensors), vectors=next(tensors))
    if isinstance(form, TokenBias):
        return TokenBias(next(tensors), next(tensors))
    return replace(form, table=next(tensors)) if isinstance(form, ToeplitzBias) else form


def added(first: Bias | None, second: Bias | None) -> Bias | None:
    """Both biases together."""
    if first is None or second is None:
        return second if first is None else first
    return SumBias((first, second))
