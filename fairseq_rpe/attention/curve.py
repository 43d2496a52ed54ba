"""The bias of a Curve form for attention in blocks: one number per pair for all heads, then a line per head."""

import torch
from torch import Tensor

from ..core import Curve, Pieces
from ..core.scores import pieces_between
from .blocks import ToeplitzBias, diagonal_sums, distances
from .plan import Plan


def pieces_of(form: Curve, plan: Plan) -> Pieces:
    """The pieces of ``form`` from 0 to the largest x of a pair that ``plan`` lets see each other, at least to 1."""
    return pieces_between(form, plan.positions, plan.padding)


class CurveBias(ToeplitzBias):
    """bias[h, i, j] = value[h, p] + slope[h, p]·(x - middle[p]), x = far[i-j]·near[i] in piece p.

    tensors: value, slope, far (n,), near (n,), ends and middle, as in ``core.Curve`` and ``core.Pieces``; gradients
    reach the first four. The piece that a pair is in is found once for all heads.
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
        self.far = torch.cat([far.flip(0), far.new_zeros(n)])
        self.at: tuple[int, int] | None = None
        self.room = far.new_empty(0)
        self.parts = [torch.zeros_like(x) for x in (self.value, self.slope, self.far, self.near)]
        self.dx: Tensor | None = None

    def _locate(self, start: int, stop: int) -> None:
        """Piece and place in it of every pair of a block."""
        self._flush()
        self.at = start, stop
        x = self.far.new_empty(stop - start, stop)
        torch.mul(distances(self.far, self.n, start, stop), self.near[start:stop].flip(0)[:, None], out=x)
        piece = torch.bucketize(x, self.ends, right=True)
        rows = torch.arange(stop - start, device=x.device)
        piece[:, start:].masked_fill_(rows[:, None] + rows >= stop - start, len(self.middle) - 1)
        self.piece = piece
        self.place = x.sub_(self._of(self.middle, torch.empty_like(x)))

    def _of(self, table: Tensor, out: Tensor) -> Tensor:
        """table[piece] of every pair; on a CPU gather takes less time than index_select."""
        return torch.gather(table.expand(len(self.piece), -1), 1, self.piece, out=out)

    def block(self, start: int, stop: int, heads: slice) -> Tensor:
        if self.at != (start, stop):
            self._locate(start, stop)
        size = self.piece.numel()
        values, slopes = self.value[heads], self.slope[heads]
        if self.room.numel() < (len(values) + 1) * size:
            self.room = self.room.new_empty((len(values) + 1) * size)
        *bias, line = self.room[: (len(values) + 1) * size].view(-1, stop - start, stop)
        for out, value, slope in zip(bias, values, slopes, strict=True):
            self._of(value, out).addcmul_(self._of(slope, line), self.place)
        return self.room[: len(values) * size].view(-1, stop - start, stop)

    def collect(self, grads: Tensor, start: int, stop: int, heads: slice) -> None:
        if self.dx is None:
            self.dx = grads.new_zeros(grads.shape[2:])
        ds, piece, place = grads.sum(0)[..., :stop], self.piece, self.place
        line_at = torch.empty_like(place)
        for d, value, slope, line in zip(
            ds, self.parts[0][heads], self.parts[1][heads], self.slope[heads], strict=True
        ):
            # row by row first: one long sum of float32 numbers would lose digits
            value += d.new_zeros(len(d), len(value)).scatter_add_(1, piece, d).sum(0)
            slope += d.new_zeros(len(d), len(value)).scatter_add_(1, piece, d * place).sum(0)
            self.dx[:, :stop].addcmul_(self._of(line, line_at), d)

    def _flush(self) -> None:
        """What the block behind gives to far and near."""
        if self.dx is None or self.at is None:
            return
        (start, stop), (_, _, far, near) = self.at, self.parts
        seen = distances(self.far, self.n, start, stop)
        near[start:stop] += (self.dx[:, :stop] * seen).sum(1).flip(0)
        first = self.n - stop
        far[first : first + self.dx.shape[1] - 1] += diagonal_sums(self.dx.mul_(self.near[start:stop].flip(0)[:, None]))
        self.dx = None

    def gradients(self) -> tuple[Tensor | None, ...]:
        self._flush()
        value, slope, far, near = self.parts
        found = value[:, :-1], slope[:, :-1], far[: self.n].flip(0), near
        return *(x.to(dtype) for x, dtype in zip(found, self.dtypes, strict=True)), None, None
