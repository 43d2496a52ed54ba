"""A ScaledDistanceBias f(x), x = distance_values[i - j]·query_scale[i], by the linear pieces of f, block by block.

In one block of queries, nearly every distance has all its pairs in one piece of f. So a block looks up one line per
distance, and single pairs only where a piece of f ends.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from fairseq_rpe.attention.double_backward import causal_bias
from fairseq_rpe.attention.plan import AttentionPlan
from fairseq_rpe.attention.relative_shift import along_diagonals, diagonal_sums
from fairseq_rpe.attention.toeplitz_blocks import ToeplitzBlocks
from fairseq_rpe.core.bias import Bias, DenseBias, PiecewiseLinear, ScaledDistanceBias

MIN_GAP = 16  # two bands with fewer indices between them are joined


def visible_pieces(bias: ScaledDistanceBias, plan: AttentionPlan) -> PiecewiseLinear:
    """Return the pieces of f on [0, top], where top is the largest x of a pair that ``plan`` lets attend, at least 1.

    At positions that count from 0, FIRE's x is in [0, 1]. A fixed top of 1 serves all such texts, and the interval is
    not empty even if every query sees only its own token, at x = 0.
    """
    return bias.pieces_in_range(plan.positions, plan.padding, plan.last_query)


def last_row_bias(bias: ScaledDistanceBias, pieces: PiecewiseLinear, top: float) -> Bias:
    """Return the last token's bias from the pieces of [0, top], or ``bias`` itself if some x exceeds ``top``."""
    x = bias.distance_values.flip(0) * bias.query_scale[:, -1:]  # (B or 1, m), by key
    # distance_values never decrease, so key 0 has the largest x
    if float(x[:, 0].max()) > top:
        return bias
    piece = torch.bucketize(x, pieces.breakpoints, right=True)
    lines = _gather_pieces(pieces.value, piece)
    lines.addcmul_(_gather_pieces(pieces.slope, piece), x - pieces.midpoints[piece])  # (H, B or 1, m)
    return DenseBias(lines.transpose(0, 1)[:, :, None])


def dense_scaled_distance_bias(
    m: int,
    like: Tensor,
    value: Tensor,
    slope: Tensor,
    distance_values: Tensor,
    query_scale: Tensor,
    breakpoints: Tensor,
    midpoints: Tensor,
) -> Tensor:
    """Compute the bias of the last n of m tokens by differentiable operations, -inf in the future; float32 or better.

    Args:
        m: number of keys.
        like: a tensor with the dtype of the queries.
        value: (H, K), as in ``PiecewiseLinear``.
        slope: (H, K), likewise.
        distance_values: (m,), as in ``ScaledDistanceBias``.
        query_scale: (B or 1, n), likewise.
        breakpoints: (K - 1,), as in ``PiecewiseLinear``.
        midpoints: (K,), likewise.

    Returns:
        (B or 1, H, n, m).
    """
    wide = torch.promote_types(like.dtype, torch.float32)
    value, slope, distance_values, query_scale, breakpoints, midpoints = (
        x.to(wide) for x in (value, slope, distance_values, query_scale, breakpoints, midpoints)
    )
    n, key = query_scale.shape[1], torch.arange(m, device=like.device)
    distance = (key[m - n :, None] - key).clamp_min(0)  # (n, m)
    x = distance_values[distance] * query_scale[:, :, None]  # (B or 1, n, m)
    piece = torch.bucketize(x.detach(), breakpoints, right=True)
    bias = value[:, piece] + slope[:, piece] * (x - midpoints[piece])  # (H, B or 1, n, m)
    return bias.transpose(0, 1) + causal_bias(n, m, like)


class _Gradients(NamedTuple):
    """Sums of the gradients of the four tensors that have one, in the layouts of :class:`ScaledDistanceBlocks`."""

    value: Tensor
    slope: Tensor
    distance_values: Tensor
    query_scale: Tensor


@dataclass(frozen=True)
class _BlockPieces:
    """The pieces of a block with R rows and M keys, for all heads.

    "By index" is by r + j, see :class:`ScaledDistanceBlocks`. Indices >= M are the future, which has a piece of its own
    with the value -inf.

    Attributes:
        distance_values: (M,) by index.
        query_scale: (R,) of the rows; entry 0 is the last query.
        piece: (M,) piece of the last query's pair, by index.
        midpoints: (M + R,) midpoint of that piece, by index.
        values: (H, M + R) value of that piece, by index.
        slopes: (H, M + R) slope of that piece, by index.
        offset: (R, M) x of each pair minus the midpoint at its index.
        bands: (first, end) of each range of indices whose pairs are in several pieces; index 0 is in none.
        band_pairs: pieces of the pairs in bands; None without bands.
    """

    distance_values: Tensor
    query_scale: Tensor
    piece: Tensor
    midpoints: Tensor
    values: Tensor
    slopes: Tensor
    offset: Tensor
    bands: list[tuple[int, int]]
    band_pairs: "_BandPairs | None"

    def band_views(self, x: Tensor) -> list[Tensor]:
        """Return a view (…, R, w) of x (…, R, M) for each band of w indices: entry (r, y) has index first + y."""
        return [along_diagonals(x, *band) for band in self.bands]


class _BandPairs(NamedTuple):
    """The pairs of all bands side by side, W indices in all; entry (r, y) is the pair of row r with index indices[y].

    Attributes:
        indices: (W,) the indices r + j of the bands.
        piece: (R, W) piece of each pair.
        offset: (R, W) x of each pair minus the midpoint of its piece.
    """

    indices: Tensor
    piece: Tensor
    offset: Tensor


class ScaledDistanceBlocks(ToeplitzBlocks):
    """The bias ``value[h, p] + slope[h, p]·(x - midpoints[p])`` of the piece p of f that holds x, block by block.

    Here x = distance_values[i - j]·query_scale[i]. As in the base class, a block has its rows reversed: row r is query
    stop-1-r. The pair of row r and key j has the *index* r + j and the distance i - j = stop - 1 - (r + j). A block of
    the queries 0, 1, 2 and the keys 0, 1, 2 (stop = 3):

    ==================  =======  ========  ========
    index → distance    key 0    key 1     key 2
    ==================  =======  ========  ========
    row 0 (query 2)     0 → 2    1 → 1     2 → 0
    row 1 (query 1)     1 → 1    2 → 0     3 future
    row 2 (query 0)     2 → 0    3 future  4 future
    ==================  =======  ========  ========

    All pairs of an index have the same distance, and their x differ only by the scale of their query. So most indices
    have all their pairs in one piece. Its number, value and slope are looked up once per index and read along
    diagonals. A *band* is a range of indices whose pairs are in several pieces; these pairs are looked up one by one.

    Args:
        n: number of queries and keys.
        like: the queries (B, H, n, D), for device and dtype.
        value: (H, K), as in ``PiecewiseLinear``; has a gradient.
        slope: (H, K), likewise.
        distance_values: (n,), as in ``ScaledDistanceBias``; has a gradient.
        query_scale: (n,), likewise.
        breakpoints: (K - 1,), as in ``PiecewiseLinear``; no gradient.
        midpoints: (K,), likewise.
    """

    # as in the base class: a block is computed into a buffer, and f is finite, so only the future is -inf
    is_computed, may_mask_past = True, False

    def __init__(
        self,
        n: int,
        like: Tensor,
        value: Tensor,
        slope: Tensor,
        distance_values: Tensor,
        query_scale: Tensor,
        breakpoints: Tensor,
        midpoints: Tensor,
    ) -> None:
        self.n = n
        self.dtypes = [x.dtype for x in (value, slope, distance_values, query_scale)]  # of the gradients
        wide = torch.promote_types(like.dtype, torch.float32)
        value, slope, distance_values, self.query_scale, self.breakpoints, midpoints = (
            x.detach().to(wide) for x in (value, slope, distance_values, query_scale, breakpoints, midpoints)
        )
        # one more piece, of value -inf and slope 0, for the future
        self.value = torch.cat([value, value.new_full((len(value), 1), float("-inf"))], dim=1)  # (H, K + 1)
        self.slope = torch.cat([slope, slope.new_zeros(len(slope), 1)], dim=1)  # (H, K + 1)
        self.midpoints = torch.cat([midpoints, midpoints.new_zeros(1)])  # (K + 1,)
        self.future_piece = len(midpoints)
        # reversed: entry y is distance n-1-y, so the last M entries are by index in a block of M keys
        self.distance_values = distance_values.flip(0)
        # `block` is called for one group of heads after another: the first call locates the pieces for all of them
        self.current_rows: tuple[int, int] | None = None
        self.current: _BlockPieces
        self.bias_buffer = self.scratch = distance_values.new_empty(0)
        self.grad_sums = _Gradients(
            *(torch.zeros_like(x) for x in (self.value, self.slope, self.distance_values, self.query_scale))
        )

    @staticmethod
    def dense_formula(n: int, like: Tensor, *tensors: Tensor) -> Tensor:
        """Return the bias (H, n, n) by differentiable operations on the class's tensors; -inf in the future."""
        value, slope, distance_values, query_scale, breakpoints, midpoints = tensors
        return dense_scaled_distance_bias(
            n, like, value, slope, distance_values, query_scale[None], breakpoints, midpoints
        )[0]

    def _locate(self, start: int, stop: int) -> _BlockPieces:
        """Find the piece of every index of a block with R rows and M keys, and of the pairs of its bands."""
        rows = stop - start
        distance_values = self.distance_values[self.n - stop :]  # (M,)
        query_scale = self.query_scale[start:stop].flip(0)  # (R,)
        # the last query's piece; the other queries have the same one, except in bands
        piece = torch.bucketize(distance_values * query_scale[0], self.breakpoints, right=True)  # (M,)
        # the view below reads up to index M + R - 1; from M on that is the future
        padded_piece = F.pad(piece, (0, rows), value=self.future_piece)  # (M + R,)
        midpoints = self.midpoints.index_select(0, padded_piece)
        values, slopes = (x.index_select(1, padded_piece) for x in (self.value, self.slope))  # (H, M + R)
        padded_values = F.pad(distance_values, (0, rows))  # (M + R,)
        distance_view, midpoint_view = (_diagonal_view(x[None], rows)[0] for x in (padded_values, midpoints))
        # `out`, because the result of two views with strides (1, 1) need not be contiguous
        offset = torch.mul(distance_view, query_scale[:, None], out=distance_values.new_empty(rows, stop))  # (R, M)
        offset.sub_(midpoint_view)
        bands = _join_runs(self._find_mixed(distance_values, query_scale))
        band_pairs = self._locate_bands(bands, distance_values, query_scale) if bands else None
        return _BlockPieces(distance_values, query_scale, piece, midpoints, values, slopes, offset, bands, band_pairs)

    def _find_mixed(self, distance_values: Tensor, query_scale: Tensor) -> Tensor:
        """Return (M,) bool: whether the pairs of an index may be in several pieces.

        x grows with the scale, so the pairs are in one piece if those of the least and the largest scale are.
        """
        least, largest = (
            torch.bucketize(distance_values * scale, self.breakpoints, right=True) for scale in query_scale.aminmax()
        )
        is_mixed = least != largest
        # Index 0 has one pair: row 0 and key 0, the last query's. It must not begin a band: in a view of a band from
        # index 0 on, row r > 0 has the memory of row r - 1's own token, and writing there would destroy its bias.
        is_mixed[0] = False
        return is_mixed

    def _locate_bands(self, bands: list[tuple[int, int]], distance_values: Tensor, query_scale: Tensor) -> _BandPairs:
        """Find piece and offset of the pairs of all bands."""
        indices = torch.cat([torch.arange(*band, device=distance_values.device) for band in bands])  # (W,)
        x = distance_values[indices] * query_scale[:, None]  # (R, W)
        piece = torch.bucketize(x, self.breakpoints, right=True)
        # Row r has no pair with an index below r. The band's view has an entry there all the same: by the strides it is
        # an entry of row r - 1 in the future (see along_diagonals), which has to stay -inf.
        first_index, _ = bands[0]
        if first_index < len(x) - 1:  # the last row begins after the first band does
            rows = torch.arange(len(x), device=x.device)
            piece.masked_fill_(rows[:, None] > indices, self.future_piece)
        return _BandPairs(indices, piece, x - _gather_pieces(self.midpoints[None], piece)[0])

    def block(self, start: int, stop: int, heads: slice) -> Tensor:
        """Return the bias (h, R, stop) of a block, as in the base class, in a buffer that the next call overwrites."""
        if self.current_rows != (start, stop):
            self.current_rows, self.current = (start, stop), self._locate(start, stop)
        pieces = self.current
        values, slopes = (_diagonal_view(x[heads], stop - start) for x in (pieces.values, pieces.slopes))  # (h, R, M)
        self.bias_buffer, bias = _reuse_buffer(self.bias_buffer, values.shape)
        torch.addcmul(values, slopes, pieces.offset, out=bias)
        if pieces.band_pairs is not None:
            _, piece, offset = pieces.band_pairs
            lines = _gather_pieces(self.value[heads], piece)
            lines.addcmul_(_gather_pieces(self.slope[heads], piece), offset)  # (h, R, W)
            widths = [end - first for first, end in pieces.bands]
            for band, line in zip(pieces.band_views(bias), lines.split(widths, dim=2), strict=True):
                band.copy_(line)
        return bias

    def accumulate_gradient(self, grads: Tensor, start: int, stop: int, heads: slice) -> None:
        """Add the gradient (B, h, R, stop) of the last block, as in the base class; ``grads`` may be overwritten.

        With dS the gradient of the bias value + slope·(distance_value·scale - midpoint), the gradient of

        - value is Σ dS,
        - slope is Σ dS·(distance_value·scale - midpoint),
        - distance_values is Σ dS·slope·scale,
        - query_scale is Σ dS·slope·distance_value.
        """
        assert self.current_rows == (start, stop)  # the pieces of `current` are those of this block
        ds = grads.sum(0) if len(grads) > 1 else grads[0]  # (h, R, M)
        # Bands come first: they set their entries of ds to 0, so that the sums along diagonals leave these pairs out.
        scale_grad = self._accumulate_bands(ds, stop, heads)  # (R,)
        self._accumulate_diagonals(ds, stop, heads)
        # ds is not needed afterwards, so the product overwrites it
        pieces, rows = self.current, stop - start
        slope_times_distance = pieces.slopes[heads] * F.pad(pieces.distance_values, (0, rows))  # (h, M + R)
        scale_grad += ds.mul_(_diagonal_view(slope_times_distance, rows)).sum((0, 2))
        self.grad_sums.query_scale[start:stop] += scale_grad.flip(0)

    def _accumulate_diagonals(self, ds: Tensor, stop: int, heads: slice) -> None:
        """Add the gradients of value, slope and distance_values from ds (h, R, M), which is 0 in bands.

        All pairs of an index are in the piece of the last query. Their scales are written as that of the last query
        plus a difference: Σ dS·scale = scale[0]·Σ dS + Σ dS·(scale - scale[0]). Below FIRE's threshold L all scales are
        equal, and the second sum needs no pass over the block.
        """
        pieces, sums = self.current, self.grad_sums
        distance_values, scale = pieces.distance_values, pieces.query_scale
        total = diagonal_sums(ds)  # (h, M): Σ dS
        moment = torch.zeros_like(total)  # (h, M): Σ dS·(scale - scale[0])
        difference = scale - scale[0]  # (R,)
        if bool((scale != scale[0]).any()):
            self.scratch, weighted = _reuse_buffer(self.scratch, ds.shape)
            moment = diagonal_sums(torch.mul(ds, difference[:, None], out=weighted))
        piece, slopes = pieces.piece.expand_as(total), pieces.slopes[heads, :stop]  # (h, M)
        offset_0 = scale[0] * distance_values - pieces.midpoints[:stop]  # (M,): x - midpoint of the last query
        sums.value[heads].scatter_add_(1, piece, total)
        sums.slope[heads].scatter_add_(1, piece, moment * distance_values + total * offset_0)
        sums.distance_values[self.n - stop :] += (slopes * (moment + scale[0] * total)).sum(0)

    def _accumulate_bands(self, ds: Tensor, stop: int, heads: slice) -> Tensor:
        """Add the gradient of the pairs in bands, pair by pair, and set their entries of ds (h, R, M) to 0.

        Returns:
            The bands' part of the gradient of query_scale (R,), in the order of the rows; it is not added yet.
        """
        pieces, sums = self.current, self.grad_sums
        if pieces.band_pairs is None:
            return torch.zeros_like(pieces.query_scale)
        indices, piece, offset = pieces.band_pairs
        # entries of the views that are no pair are in the future, where ds is 0
        bands = pieces.band_views(ds)
        band_ds = torch.cat(bands, dim=2)  # (h, R, W), a copy
        for band in bands:
            band.zero_()
        _add_by_piece(sums.value[heads], piece, band_ds)
        _add_by_piece(sums.slope[heads], piece, band_ds * offset)
        dx = band_ds.mul_(_gather_pieces(self.slope[heads], piece)).sum(0)  # (R, W)
        sums.distance_values[self.n - stop :].index_add_(0, indices, pieces.query_scale @ dx)
        return dx @ pieces.distance_values[indices]

    def gradients(self) -> tuple[Tensor | None, ...]:
        """Return the gradients of value, slope, distance_values and query_scale, and None for the other two."""
        sums = self.grad_sums
        # without the piece of the future, and distances in their order
        grads = sums.value[:, :-1], sums.slope[:, :-1], sums.distance_values.flip(0), sums.query_scale
        return *(x.to(dtype) for x, dtype in zip(grads, self.dtypes, strict=True)), None, None


def _reuse_buffer(buffer: Tensor, shape: Sequence[int]) -> tuple[Tensor, Tensor]:
    """Return ``buffer``, or a larger one, and its first elements as a view of ``shape``.

    Allocating memory for each block would take more time than the arithmetic in it.
    """
    size = math.prod(shape)
    buffer = buffer if buffer.numel() >= size else buffer.new_empty(size)
    return buffer, buffer[:size].view(*shape)


def _diagonal_view(vectors: Tensor, rows: int) -> Tensor:
    """View vectors by index (h, M + R) as blocks (h, R, M): entry (r, j) is entry r + j of the vector."""
    heads, width = vectors.shape
    return vectors.as_strided((heads, rows, width - rows), (vectors.stride(0), 1, 1), vectors.storage_offset())


def _gather_pieces(tables: Tensor, piece: Tensor) -> Tensor:
    """Look up tables (h, K) at pieces (R, M): (h, R, M).

    ``tables[:, piece]`` and ``index_select`` return the same; on a CPU ``gather`` takes less time.
    """
    rows = len(piece)
    return torch.gather(tables[:, None].expand(-1, rows, -1), 2, piece.expand(len(tables), -1, -1))


def _add_by_piece(sums: Tensor, piece: Tensor, x: Tensor) -> None:
    """Add x (h, R, W) to the sums (h, K) of its pieces (R, W).

    ``scatter_add_`` adds one number after another, and so long a float32 sum loses digits. So each row gets its own
    sums first, and ``sum`` adds those of the rows.
    """
    row_sums = x.new_zeros(*x.shape[:2], sums.shape[1]).scatter_add_(2, piece.expand_as(x), x)  # (h, R, K)
    sums += row_sums.sum(1)


def _join_runs(is_mixed: Tensor) -> list[tuple[int, int]]:
    """Return (first, end) of each run of True in (M,), with runs closer than MIN_GAP joined."""
    runs: list[tuple[int, int]] = []
    # the padded differences are 1 where a run begins and -1 where it ends
    for first, end in F.pad(is_mixed.int(), (1, 1)).diff().nonzero().view(-1, 2).tolist():
        if runs and first - runs[-1][1] < MIN_GAP:
            first, _ = runs.pop()
        runs.append((first, end))
    return runs
