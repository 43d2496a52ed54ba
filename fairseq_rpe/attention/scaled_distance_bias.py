"""The bias of a Curve form for attention in blocks: a line per distance, and pairs one by one where pieces end."""

import math
from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn import functional as F

from fairseq_rpe.attention import double_backward
from fairseq_rpe.attention.plan import Plan
from fairseq_rpe.attention.toeplitz_attention import ToeplitzBlocks
from fairseq_rpe.attention.toeplitz_views import along_diagonals, diagonal_sums
from fairseq_rpe.core.bias import Bias, DenseBias, PiecewiseLinear, ScaledDistanceBias
from fairseq_rpe.core.score_mod import pieces_between

GAP = 16  # distances; bands that are closer than this are one


def pieces_of(form: ScaledDistanceBias, plan: Plan) -> PiecewiseLinear:
    """The pieces of ``form`` from 0 to the largest x of a pair that ``plan`` lets see each other, at least to 1."""
    return pieces_between(form, plan.positions, plan.padding, plan.last_query)


def last_row(form: ScaledDistanceBias, pieces: PiecewiseLinear, top: float) -> Bias:
    """The bias of the last of m tokens as a row, by pieces of [0, top]; ``form`` itself if x goes beyond."""
    x = form.far.flip(0) * form.near[:, -1:]
    if float(x[:, 0].max()) > top:
        return form
    piece = torch.bucketize(x, pieces.ends, right=True)
    lines = _of(pieces.value, piece).addcmul_(_of(pieces.slope, piece), x - pieces.middle[piece])
    return DenseBias(lines.transpose(0, 1)[:, :, None])


def dense_bias(m: int, like: Tensor, *tensors: Tensor) -> Tensor:
    """The bias of the last n of m tokens by differentiable operations, -inf in the future; float32 or better.

    Args:
        m: number of keys.
        like: a tensor with the dtype of the queries.
        tensors: as of :class:`CurveBias`, but near (B or 1, n).

    Returns:
        (B or 1, H, n, m).
    """
    wide = torch.promote_types(like.dtype, torch.float32)
    value, slope, far, near, ends, middle = (x.to(wide) for x in tensors)
    n, key = near.shape[1], torch.arange(m, device=like.device)
    x = far[(key[m - n :, None] - key).clamp_min(0)] * near[:, :, None]  # (B or 1, n, m)
    piece = torch.bucketize(x.detach(), ends, right=True)
    bias = value[:, piece] + slope[:, piece] * (x - middle[piece])  # (H, B or 1, n, m)
    return bias.transpose(0, 1) + double_backward.future(n, m, like)


class ScaledDistanceBlocks(ToeplitzBlocks):
    """bias[h, i, j] = value[h, p] + slope[h, p]·(x - middle[p]), x = far[i-j]·near[i] in piece p.

    tensors: value, slope, far (n,), near (n,), ends and middle, as in ``core.Curve`` and ``core.Pieces``; gradients
    reach the first four. A block has many pairs of each distance, whose x differ little: nearly all distances lie in
    one piece for all of the block's queries, so that piece, value and slope are looked up once a distance and read
    along diagonals. Where a piece ends, a few distances of the block are looked up pair by pair.
    """

    made, holes = True, False

    def __init__(self, n: int, like: Tensor, *tensors: Tensor) -> None:
        self.n, self.dtypes = n, [x.dtype for x in tensors[:4]]
        wide = torch.promote_types(like.dtype, torch.float32)
        value, slope, far, self.near, self.ends, middle = (x.detach().to(wide) for x in tensors)
        # one piece more, for the future
        self.value = torch.cat([value, value.new_full((len(value), 1), float("-inf"))], dim=1)
        self.slope = torch.cat([slope, slope.new_zeros(len(slope), 1)], dim=1)
        self.middle = torch.cat([middle, middle.new_zeros(1)])
        self.far = far.flip(0)
        self.at: tuple[int, int] | None = None
        self.room = self.scratch = far.new_empty(0)
        self.parts = [torch.zeros_like(x) for x in (self.value, self.slope, self.far, self.near)]

    @staticmethod
    def dense(n: int, like: Tensor, *tensors: Tensor) -> Tensor:
        value, slope, far, near, ends, middle = tensors
        return dense_bias(n, like, value, slope, far, near[None], ends, middle)[0]

    def _locate(self, start: int, stop: int) -> None:
        """Piece and place in it of every distance of a block, and of the pairs of its bands."""
        self.at, rows = (start, stop), stop - start
        far, near = self.far[self.n - stop :], self.near[start:stop].flip(0)
        # r + j is stop - 1 at the most, beyond that is the future; of distance stop - 1 only query 0 has a pair
        self.piece = torch.bucketize(far * near[0], self.ends, right=True)
        ends = (torch.bucketize(far * x, self.ends, right=True) for x in near.aminmax())
        mixed = torch.ne(*ends)
        mixed[0] = False
        self.pieces = F.pad(self.piece, (0, rows), value=len(self.middle) - 1)
        self.row_far, self.row_near = far, near
        self.middles = self.middle.index_select(0, self.pieces)
        lines = F.pad(far, (0, rows)), self.middles
        far_of, middle_of = (x.as_strided((rows, stop), (1, 1)) for x in lines)
        self.place = torch.mul(far_of, near[:, None], out=far.new_empty(rows, stop)).sub_(middle_of)
        self.values, self.slopes = (x.index_select(1, self.pieces) for x in (self.value, self.slope))
        self.bands = _runs(mixed)
        if self.bands:
            self._locate_bands()

    def _locate_bands(self) -> None:
        """Piece and place of (R, W) pairs, the bands side by side, as :func:`along_diagonals` has each of them."""
        at = torch.cat([torch.arange(*ends, device=self.far.device) for ends in self.bands])
        x = self.row_far[at] * self.row_near[:, None]
        piece = torch.bucketize(x, self.ends, right=True)
        if self.bands[0][0] < len(x) - 1:
            rows = torch.arange(len(x), device=x.device)
            piece.masked_fill_(rows[:, None] > at, len(self.middle) - 1)
        self.band = at, piece, x - _of(self.middle[None], piece)[0]

    def _in_bands(self, x: Tensor) -> list[Tensor]:
        """Views (…, R, w) of the bands in x (…, R, M)."""
        return [along_diagonals(x, *ends) for ends in self.bands]

    def block(self, start: int, stop: int, heads: slice) -> Tensor:
        if self.at != (start, stop):
            self._locate(start, stop)
        values, slopes = (_along(x[heads], stop - start) for x in (self.values, self.slopes))
        self.room, bias = _fitting(self.room, values.shape)
        torch.addcmul(values, slopes, self.place, out=bias)
        if self.bands:
            _, piece, place = self.band
            lines = _of(self.value[heads], piece).addcmul_(_of(self.slope[heads], piece), place)
            widths = [last - first for first, last in self.bands]
            for band, line in zip(self._in_bands(bias), lines.split(widths, dim=2), strict=True):
                band.copy_(line)
        return bias

    def collect(self, grads: Tensor, start: int, stop: int, heads: slice) -> None:
        ds, (value, slope, all_far, all_near) = grads.sum(0) if len(grads) > 1 else grads[0], self.parts
        far, near, to_far = self.row_far, self.row_near, all_far[self.n - stop :]
        to_near = torch.zeros_like(near)
        if self.bands:
            at, piece, place = self.band
            bands = self._in_bands(ds)
            d = torch.cat(bands, dim=2)
            for band in bands:
                band.zero_()
            _add_by_piece(value[heads], piece, d)
            _add_by_piece(slope[heads], piece, d * place)
            dx = d.mul_(_of(self.slope[heads], piece)).sum(0)
            to_near += dx @ far[at]
            to_far.index_add_(0, at, near @ dx)
        # all other pairs of a distance are in one piece; x less that of the last query, which is in that piece too
        total = diagonal_sums(ds)
        moment = torch.zeros_like(total)
        if bool((near != near[0]).any()):
            self.scratch, weighted = _fitting(self.scratch, ds.shape)
            moment = diagonal_sums(torch.mul(ds, (near - near[0])[:, None], out=weighted))
        pieces, lines = self.piece.expand_as(total), self.slopes[heads, :stop]
        value[heads].scatter_add_(1, pieces, total)
        slope[heads].scatter_add_(1, pieces, moment * far + total * (near[0] * far - self.middles[:stop]))
        to_far += (lines * (moment + near[0] * total)).sum(0)
        to_near += ds.mul_(_along(self.slopes[heads] * F.pad(far, (0, len(near))), len(near))).sum((0, 2))
        all_near[start:stop] += to_near.flip(0)

    def gradients(self) -> tuple[Tensor | None, ...]:
        value, slope, far, near = self.parts
        found = value[:, :-1], slope[:, :-1], far.flip(0), near
        return *(x.to(dtype) for x, dtype in zip(found, self.dtypes, strict=True)), None, None


def _fitting(room: Tensor, shape: Sequence[int]) -> tuple[Tensor, Tensor]:
    """``room``, or a larger one, and a part of it of this shape: fresh memory costs more than what is done with it."""
    size = math.prod(shape)
    room = room if room.numel() >= size else room.new_empty(size)
    return room, room[:size].view(*shape)


def _along(vectors: Tensor, rows: int) -> Tensor:
    """(h, M + R) -> (h, R, M) view: entry y of a vector at all (r, j) with r + j = y."""
    heads, width = vectors.shape
    return vectors.as_strided((heads, rows, width - rows), (vectors.stride(0), 1, 1), vectors.storage_offset())


def _of(tables: Tensor, piece: Tensor) -> Tensor:
    """(h, K), (R, M) -> (h, R, M); on a CPU gather takes less time than index_select."""
    rows = len(piece)
    return torch.gather(tables[:, None].expand(-1, rows, -1), 2, piece.expand(len(tables), -1, -1))


def _add_by_piece(sums: Tensor, piece: Tensor, x: Tensor) -> None:
    """Row by row first: one long sum of float32 numbers would lose digits."""
    sums += x.new_zeros(*x.shape[:2], sums.shape[1]).scatter_add_(2, piece.expand_as(x), x).sum(1)


def _runs(mixed: Tensor) -> list[tuple[int, int]]:
    """First and last (exclusive) place of each run of True, runs that are close together as one."""
    found: list[tuple[int, int]] = []
    for first, last in F.pad(mixed.int(), (1, 1)).diff().nonzero().view(-1, 2).tolist():
        if found and first - found[-1][1] < GAP:
            first = found.pop()[0]
        found.append((first, last))
    return found
