"""Blocks of a ScaledDistanceBias: one line per distance, and single pairs where a piece of the function ends."""

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

MIN_GAP = 16  # distances between two bands; closer bands are joined


def visible_pieces(bias: ScaledDistanceBias, plan: AttentionPlan) -> PiecewiseLinear:
    """Return the pieces of ``bias`` from 0 to the largest x of a visible pair of ``plan``, and at least to 1."""
    return bias.pieces_in_range(plan.positions, plan.padding, plan.last_query)


def last_row_bias(bias: ScaledDistanceBias, pieces: PiecewiseLinear, top: float) -> Bias:
    """Return the last token's bias from the pieces of [0, top], or ``bias`` itself if some x exceeds ``top``."""
    x = bias.distance_values.flip(0) * bias.query_scale[:, -1:]  # (B or 1, m)
    if float(x[:, 0].max()) > top:
        return bias
    piece = torch.bucketize(x, pieces.breakpoints, right=True)
    lines = _gather_pieces(pieces.value, piece)
    lines.addcmul_(_gather_pieces(pieces.slope, piece), x - pieces.midpoints[piece])  # (H, B or 1, m)
    return DenseBias(lines.transpose(0, 1)[:, :, None])


def dense_scaled_distance_bias(m: int, like: Tensor, *tensors: Tensor) -> Tensor:
    """Compute the bias of the last n of m tokens by differentiable operations, -inf in the future; float32 or better.

    Args:
        m: number of keys.
        like: a tensor with the dtype of the queries.
        tensors: as of :class:`ScaledDistanceBlocks`, but ``query_scale`` (B or 1, n).

    Returns:
        (B or 1, H, n, m).
    """
    wide = torch.promote_types(like.dtype, torch.float32)
    value, slope, far, near, breakpoints, midpoints = (x.to(wide) for x in tensors)
    n, key = near.shape[1], torch.arange(m, device=like.device)
    x = far[(key[m - n :, None] - key).clamp_min(0)] * near[:, :, None]  # (B or 1, n, m)
    piece = torch.bucketize(x.detach(), breakpoints, right=True)
    bias = value[:, piece] + slope[:, piece] * (x - midpoints[piece])  # (H, B or 1, n, m)
    return bias.transpose(0, 1) + causal_bias(n, m, like)


@dataclass(frozen=True)
class _BlockPieces:
    """The pieces of the pairs of a block with R rows, reversed, and M keys; entry (r, j) has the distance of r + j.

    Entries r + j >= M are in the future, for which there is an additional piece with value -inf.

    Attributes:
        far: (M,) distance_values by r + j.
        near: (R,) query_scale of each row.
        piece: (M,) piece of each distance for the last query of the block.
        midpoints: (M + R,) midpoint of that piece.
        values: (H, M + R) value of that piece.
        slopes: (H, M + R) slope of that piece.
        offset: (R, M) x - midpoint of each pair.
        bands: (first, end) of each range of distances in which the pairs are in several pieces.
        band_pairs: pieces of the pairs in bands; None without bands.
    """

    far: Tensor
    near: Tensor
    piece: Tensor
    midpoints: Tensor
    values: Tensor
    slopes: Tensor
    offset: Tensor
    bands: list[tuple[int, int]]
    band_pairs: "_BandPairs | None"

    def band_views(self, x: Tensor) -> list[Tensor]:
        """Return views (…, R, w) of the bands in x (…, R, M)."""
        return [along_diagonals(x, *band) for band in self.bands]


class _BandPairs(NamedTuple):
    """The pairs of all bands side by side, W distances in all, as :func:`along_diagonals` views them.

    Attributes:
        columns: (W,) r + j.
        piece: (R, W) piece of each pair.
        offset: (R, W) x - midpoint of that piece.
    """

    columns: Tensor
    piece: Tensor
    offset: Tensor


class ScaledDistanceBlocks(ToeplitzBlocks):
    """The bias ``value[h, p] + slope[h, p]·(x - midpoint[p])``, x = far[i-j]·near[i] in piece p, block by block.

    A block has many pairs of each distance, whose x differ little. Nearly all distances are in one piece for all
    queries of the block, so piece, value and slope are looked up once per distance and read along diagonals. Where a
    piece ends, the pairs of a band of distances are looked up one by one.

    Args:
        n: number of queries and keys.
        like: the queries (B, H, n, D), for device and dtype.
        tensors: value (H, K), slope (H, K), far (n,) (``distance_values``), near (n,) (``query_scale``), breakpoints
            (K - 1,) and midpoints (K,), as in ``ScaledDistanceBias`` and ``PiecewiseLinear``. Gradients reach the first
            four.
    """

    is_computed, may_mask_past = True, False

    def __init__(self, n: int, like: Tensor, *tensors: Tensor) -> None:
        self.n, self.dtypes = n, [x.dtype for x in tensors[:4]]
        wide = torch.promote_types(like.dtype, torch.float32)
        value, slope, far, self.near, self.breakpoints, midpoints = (x.detach().to(wide) for x in tensors)
        # one more piece, of value -inf, for the future
        self.value = torch.cat([value, value.new_full((len(value), 1), float("-inf"))], dim=1)  # (H, K + 1)
        self.slope = torch.cat([slope, slope.new_zeros(len(slope), 1)], dim=1)
        self.midpoints = torch.cat([midpoints, midpoints.new_zeros(1)])
        self.far = far.flip(0)  # entry y is distance n-1-y, as in the blocks
        # heads of a block are computed one group after another, with the pieces of the first group
        self.current_rows: tuple[int, int] | None = None
        self.current: _BlockPieces
        self.bias_buffer = self.scratch = far.new_empty(0)
        self.grad_sums = [torch.zeros_like(x) for x in (self.value, self.slope, self.far, self.near)]

    @staticmethod
    def dense_formula(n: int, like: Tensor, *tensors: Tensor) -> Tensor:
        """Return the bias (H, n, n) by differentiable operations on the class's tensors; -inf in the future."""
        value, slope, far, near, breakpoints, midpoints = tensors
        return dense_scaled_distance_bias(n, like, value, slope, far, near[None], breakpoints, midpoints)[0]

    def _locate(self, start: int, stop: int) -> _BlockPieces:
        """Find the piece of every distance of a block with R rows and M keys, and of the pairs of its bands."""
        rows = stop - start
        far, near = self.far[self.n - stop :], self.near[start:stop].flip(0)  # (M,), (R,)
        piece = torch.bucketize(far * near[0], self.breakpoints, right=True)  # (M,), of the last query's x
        least, most = (torch.bucketize(far * x, self.breakpoints, right=True) for x in near.aminmax())
        is_mixed = least != most  # (M,): the block's queries are in several pieces
        is_mixed[0] = False  # only query 0 has a pair of distance stop - 1
        # r + j is at most stop - 1; beyond that is the future
        padded_piece = F.pad(piece, (0, rows), value=len(self.midpoints) - 1)  # (M + R,)
        midpoints = self.midpoints.index_select(0, padded_piece)
        values, slopes = (x.index_select(1, padded_piece) for x in (self.value, self.slope))  # (H, M + R)
        far_view, midpoint_view = (x.as_strided((rows, stop), (1, 1)) for x in (F.pad(far, (0, rows)), midpoints))
        offset = torch.mul(far_view, near[:, None], out=far.new_empty(rows, stop)).sub_(midpoint_view)  # (R, M)
        bands = _join_runs(is_mixed)
        band_pairs = self._locate_bands(bands, far, near) if bands else None
        return _BlockPieces(far, near, piece, midpoints, values, slopes, offset, bands, band_pairs)

    def _locate_bands(self, bands: list[tuple[int, int]], far: Tensor, near: Tensor) -> _BandPairs:
        """Find piece and offset of the pairs of all bands."""
        columns = torch.cat([torch.arange(*band, device=far.device) for band in bands])  # (W,)
        x = far[columns] * near[:, None]  # (R, W)
        piece = torch.bucketize(x, self.breakpoints, right=True)
        first_column, _ = bands[0]
        if first_column < len(x) - 1:
            # entries left of the block's first column are other rows' future
            rows = torch.arange(len(x), device=x.device)
            piece.masked_fill_(rows[:, None] > columns, len(self.midpoints) - 1)
        return _BandPairs(columns, piece, x - _gather_pieces(self.midpoints[None], piece)[0])

    def block(self, start: int, stop: int, heads: slice) -> Tensor:
        """Return the bias (h, R, stop) of a block, as in the base class."""
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
        """Add the gradient (B, h, R, stop) of the last block, as in the base class.

        The bias is value + slope·(far·near - midpoint). So dS goes to value, dS·offset to slope, dS·slope·near to far
        and dS·slope·far to near.
        """
        ds = grads.sum(0) if len(grads) > 1 else grads[0]  # (h, R, M)
        near_grad = self._accumulate_bands(ds, stop, heads)  # (R,)
        pieces, (value, slope, all_far, all_near) = self.current, self.grad_sums
        far, near = pieces.far, pieces.near
        # outside of bands, all pairs of a distance are in the piece of the last query; near is its near plus a rest
        total = diagonal_sums(ds)  # (h, M): Σ dS
        moment = torch.zeros_like(total)  # (h, M): Σ dS·(near - near[0])
        if bool((near != near[0]).any()):
            self.scratch, weighted = _reuse_buffer(self.scratch, ds.shape)
            moment = diagonal_sums(torch.mul(ds, (near - near[0])[:, None], out=weighted))
        piece, slopes = pieces.piece.expand_as(total), pieces.slopes[heads, :stop]  # (h, M)
        value[heads].scatter_add_(1, piece, total)
        slope[heads].scatter_add_(1, piece, moment * far + total * (near[0] * far - pieces.midpoints[:stop]))
        all_far[self.n - stop :] += (slopes * (moment + near[0] * total)).sum(0)
        slope_far = pieces.slopes[heads] * F.pad(far, (0, len(near)))  # (h, M + R)
        near_grad += ds.mul_(_diagonal_view(slope_far, len(near))).sum((0, 2))
        all_near[start:stop] += near_grad.flip(0)

    def _accumulate_bands(self, ds: Tensor, stop: int, heads: slice) -> Tensor:
        """Add the gradient of the pairs in bands, pair by pair, and set these entries of ds (h, R, M) to 0.

        Returns:
            The part of near's gradient (R,) that is not added yet.
        """
        pieces, (value, slope, all_far, _) = self.current, self.grad_sums
        if pieces.band_pairs is None:
            return torch.zeros_like(pieces.near)
        columns, piece, offset = pieces.band_pairs
        bands = pieces.band_views(ds)
        band_ds = torch.cat(bands, dim=2)  # (h, R, W)
        for band in bands:
            band.zero_()
        _add_by_piece(value[heads], piece, band_ds)
        _add_by_piece(slope[heads], piece, band_ds * offset)
        dx = band_ds.mul_(_gather_pieces(self.slope[heads], piece)).sum(0)  # (R, W)
        all_far[self.n - stop :].index_add_(0, columns, pieces.near @ dx)
        return dx @ pieces.far[columns]

    def gradients(self) -> tuple[Tensor | None, ...]:
        """Return the gradients of value, slope, far and near; None for breakpoints and midpoints."""
        value, slope, far, near = self.grad_sums
        grads = value[:, :-1], slope[:, :-1], far.flip(0), near
        return *(x.to(dtype) for x, dtype in zip(grads, self.dtypes, strict=True)), None, None


def _reuse_buffer(buffer: Tensor, shape: Sequence[int]) -> tuple[Tensor, Tensor]:
    """Return ``buffer``, or a larger one, and a view of it: allocating memory costs more than the arithmetic in it."""
    size = math.prod(shape)
    buffer = buffer if buffer.numel() >= size else buffer.new_empty(size)
    return buffer, buffer[:size].view(*shape)


def _diagonal_view(vectors: Tensor, rows: int) -> Tensor:
    """View vectors (h, M + R) as (h, R, M): entry (r, j) is entry r + j of the vector."""
    heads, width = vectors.shape
    return vectors.as_strided((heads, rows, width - rows), (vectors.stride(0), 1, 1), vectors.storage_offset())


def _gather_pieces(tables: Tensor, piece: Tensor) -> Tensor:
    """Look up (h, K) tables at pieces (R, M): (h, R, M). On a CPU gather takes less time than index_select."""
    rows = len(piece)
    return torch.gather(tables[:, None].expand(-1, rows, -1), 2, piece.expand(len(tables), -1, -1))


def _add_by_piece(sums: Tensor, piece: Tensor, x: Tensor) -> None:
    """Add x (h, R, W) to the sums (h, K) of its pieces, row by row, because one long float32 sum loses digits."""
    sums += x.new_zeros(*x.shape[:2], sums.shape[1]).scatter_add_(2, piece.expand_as(x), x).sum(1)


def _join_runs(is_mixed: Tensor) -> list[tuple[int, int]]:
    """Return (first, end) of each run of True, with runs closer than MIN_GAP joined."""
    runs: list[tuple[int, int]] = []
    # the padded differences are 1 where a run begins and -1 where it ends
    for first, end in F.pad(is_mixed.int(), (1, 1)).diff().nonzero().view(-1, 2).tolist():
        if runs and first - runs[-1][1] < MIN_GAP:
            first, _ = runs.pop()
        runs.append((first, end))
    return runs
