"""Biases as ``score_mod`` functions of torch's FlexAttention, which map (score, batch, head, query, key) to a score."""

from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn import functional as F

from fairseq_rpe.core.bias import (
    Bias,
    ContentBias,
    DenseBias,
    DistanceTable,
    PairBias,
    PairGateBias,
    PointwiseBias,
    QueryKeyTableBias,
    QueryTableBias,
    ScaledDistanceBias,
    SumBias,
    ToeplitzBias,
    TokenBias,
)
from fairseq_rpe.core.errors import UserError
from fairseq_rpe.core.positions import Positions

ScoreMod = Callable[..., Tensor]
# A piecewise linear bias finds the piece of x by a table: [0, last breakpoint] is divided into cells of equal width,
# and the table holds the number of breakpoints before each cell. Those within the cell of x are compared one by one.
LOOKUP_CELLS = 1 << 14
# The number of comparisons is rounded up to a multiple, so that training, which moves breakpoints, seldom recompiles.
COMPARISON_STEP = 4
MAX_PRODUCTS = 2  # most elements of the vectors of queries and keys whose product is computed for each pair


def column_offsets(table: DistanceTable, pos: Positions) -> tuple[Tensor, Tensor]:
    """Return a and b such that a_i - b_j is the column of ``table`` for query i and key j, before clamping.

    Args:
        table: A bias with a table by distance.
        pos: Positions of the n queries and m keys.

    Returns:
        int32 a (B or 1, n) and b (B or 1, m).
    """
    first = pos.k[:, :1]  # subtracted, because a common offset need not be a multiple of the step
    a, b = (torch.round((x - first) / table.step).int().contiguous() for x in (pos.q, pos.k))
    return a + table.origin, b


def score_mod(
    bias: Bias | None, pos: Positions, batch: int, padding: Tensor | None = None, last_query: Tensor | None = None
) -> ScoreMod | None:
    """Return the function that adds ``bias`` to a score.

    Everything that varies is a captured tensor, because captured numbers would be compiled in. Captured tensors are
    copies: torch 2.13 silently gives captured views no gradient, and recompiles for other strides. Kernels also call
    these functions for future pairs and past a ragged end, and mask the result; indices stay in bounds there too.

    Args:
        bias: The bias, or None.
        pos: Positions of the n queries and m keys.
        batch: Number of rows B.
        padding: (B, m) bool, True at padding keys.
        last_query: (B, m) index of the last query that sees each key.

    Returns:
        A function of (score, batch, head, query, key), all scalars; None without a bias.

    Raises:
        UserError: The bias is not a function of one score.
    """
    if bias is None:
        return None
    if isinstance(bias, DenseBias):
        return _dense_score_mod(bias)
    if isinstance(bias, PairGateBias):
        return _dense_score_mod(DenseBias(bias.materialize(pos)))
    if isinstance(bias, ContentBias):
        return _content_score_mod(bias, pos, batch, padding, last_query)
    if isinstance(bias, ScaledDistanceBias):
        return _scaled_distance_score_mod(bias, pos, batch, padding, last_query)
    if isinstance(bias, ToeplitzBias):
        column, table = _column_lookup(bias, pos, batch), _copy(bias.table)
        return lambda score, b, h, i, j: score + table[h, column(b, i, j)]
    return _pair_score_mod(bias, pos, batch)


def _dense_score_mod(bias: DenseBias) -> ScoreMod:
    dense = _copy(bias.bias) if bias.bias.requires_grad else bias.bias
    row = torch.full((), len(dense) > 1, dtype=torch.int32, device=dense.device)  # 0: all rows share one bias
    return lambda score, b, h, i, j: score + dense[b * row, h, i, j]


def _pair_score_mod(bias: PairBias, pos: Positions, batch: int) -> ScoreMod:
    """Return the function for a bias of both positions, which is evaluated for each pair."""
    q, k = (_copy(x.expand(batch, -1)) for x in (pos.q, pos.k))
    if isinstance(bias, PointwiseBias):
        scalar_fn, parameters = bias.scalar_fn, [_copy(x) for x in bias.parameters]
        return lambda score, b, h, i, j: score + scalar_fn(q[b, i], k[b, j], *[x[h] for x in parameters])
    fn, aux = bias.fn, bias.aux
    # fn maps (1, 1) positions to (1, H, 1, 1)
    return lambda score, b, h, i, j: score + fn(q[b, i][None, None], k[b, j][None, None], *aux)[0, :, 0, 0][h]


def _content_score_mod(
    bias: ContentBias, pos: Positions, batch: int, padding: Tensor | None, last_query: Tensor | None
) -> ScoreMod:
    """Return the function for a content bias; products with all vectors of a table are computed beforehand."""
    if isinstance(bias, SumBias):
        terms = (score_mod(term, pos, batch, padding, last_query) for term in bias.terms)
        term_mods = [mod for mod in terms if mod is not None]

        def sum_score_mods(score: Tensor, b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
            for mod in term_mods:
                score = mod(score, b, h, i, j)
            return score

        return sum_score_mods
    if isinstance(bias, TokenBias):
        mean = bias.key.detach().mean(2, keepdim=True)  # centred, because float32 is more precise for small numbers
        query, key = ((x.expand(batch, -1, -1)).float() for x in (bias.query + mean, bias.key - mean))
        return lambda score, b, h, i, j: score + (query[b, h, i] + key[b, h, j])
    assert not isinstance(bias, PairGateBias)  # score_mod has its dense form
    column = _column_lookup(bias, pos, batch)
    if isinstance(bias, QueryKeyTableBias):
        return _product_score_mod(bias, column, batch)
    factor = bias.query if isinstance(bias, QueryTableBias) else bias.key
    products = torch.matmul(factor, bias.vectors.to(factor.dtype).mT)  # (B or 1, H, n or m, R)
    table = _copy(products.expand(batch, -1, -1, -1))
    if isinstance(bias, QueryTableBias):
        return lambda score, b, h, i, j: score + table[b, h, i, column(b, i, j)]
    return lambda score, b, h, i, j: score + table[b, h, j, column(b, i, j)]


def has_long_products(bias: QueryKeyTableBias) -> bool:
    """Return whether a pair needs more than a few multiplications, which no ``score_mod`` should do for each pair."""
    return bias.vectors.shape[2] > 1 or bias.query.shape[3] > MAX_PRODUCTS


def _product_score_mod(bias: QueryKeyTableBias, column: Callable[..., Tensor], batch: int) -> ScoreMod:
    """Return the function for a bias of a few products per pair; ``column`` is that of ``_column_lookup``.

    Raises:
        UserError: the bias has too many products.
    """
    if has_long_products(bias):
        raise UserError(
            "a bias that multiplies queries, keys and vectors of their distance is no function of one score: use "
            "attention backend 'sdpa'"
        )
    # (B, H, n) and (B, H, m) for each element
    queries, keys = (
        [_copy(x) for x in factor.expand(batch, -1, -1, -1).unbind(3)] for factor in (bias.query, bias.key)
    )
    factors = list(zip(queries, keys, strict=True))
    table = _copy(bias.vectors[..., 0].expand(bias.query.shape[1], -1))  # (H, R)

    def add_products(score: Tensor, b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
        total = sum(query[b, h, i] * key[b, h, j] for query, key in factors)
        return score + total * table[h, column(b, i, j)]

    return add_products


def _column_lookup(table: DistanceTable, pos: Positions, batch: int) -> Callable[[Tensor, Tensor, Tensor], Tensor]:
    """Return the function of (batch, query, key) that gives the column of a pair, clamped to the ends of the table."""
    q, k = (_copy(x.expand(batch, -1)) for x in column_offsets(table, pos))
    last = q.new_full((), table.num_columns - 1)
    return lambda b, i, j: torch.minimum((q[b, i] - k[b, j]).clamp_min(0), last)


def _copy(x: Tensor) -> Tensor:
    """Return a contiguous copy, which a ``score_mod`` can capture; :func:`score_mod` has the reasons."""
    return x.clone(memory_format=torch.contiguous_format)


def _scaled_distance_score_mod(
    bias: ScaledDistanceBias, pos: Positions, batch: int, padding: Tensor | None, last_query: Tensor | None
) -> ScoreMod:
    """Return the function for a bias f_h(x), with x = distance_values[i - j] · query_scale[i].

    The piece of x is the number of breakpoints <= x. A table gives those before the cell of x, and the few within the
    cell are compared. A binary search would load less often only for clustered breakpoints, and the code that inductor
    makes of a chain of look-ups grows exponentially with its length.
    """
    pieces = bias.pieces_in_range(pos, padding, last_query)
    midpoints, value, slope = _copy(pieces.midpoints), _copy(pieces.value), _copy(pieces.slope)
    breakpoints = pieces.breakpoints
    cells_per_unit = (LOOKUP_CELLS - 1) / breakpoints[-1] if len(breakpoints) else breakpoints.new_ones(())
    cells = (breakpoints * cells_per_unit).int().clamp(0, LOOKUP_CELLS - 1)  # of each breakpoint
    counts = torch.bincount(cells, minlength=LOOKUP_CELLS)  # breakpoints in each cell
    before = (counts.cumsum(0) - counts).int()  # (LOOKUP_CELLS,) breakpoints in earlier cells
    # the breakpoints of the fullest cell, rounded up
    comparisons = max(1, -(-int(counts.max()) // COMPARISON_STEP)) * COMPARISON_STEP
    # padding, because the comparisons of the last cell go past the end; NaN is never <= x
    breakpoints = F.pad(breakpoints, (0, comparisons), value=float("nan"))
    distance_values, query_scale = _copy(bias.distance_values), _copy(bias.query_scale.expand(batch, -1))
    # index of the first query among the keys: query i is key i + shift
    shift = torch.full((), pos.k.shape[1] - pos.q.shape[1], device=distance_values.device)

    def add_scaled_distance_bias(score: Tensor, b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
        x = distance_values[(i + shift - j).clamp_min(0)] * query_scale[b, i]
        piece = first = before[(x * cells_per_unit).clamp_max(LOOKUP_CELLS - 1).int().clamp_min(0)]
        for offset in range(comparisons):
            piece = piece + (breakpoints[first + offset] <= x).int()
        return score + value[h, piece] + slope[h, piece] * (x - midpoints[piece])

    return add_scaled_distance_bias
