"""A small network of one number as straight pieces: exact for ReLUs, which are nothing else, and close for the rest.

A network of ReLUs is linear between its kinks, the points where some unit's input is 0. They are found layer by layer:
between the kinks of the layers before, a unit's input is a straight line and crosses 0 at most once.
"""

import math
from collections.abc import Callable, Sequence

import torch
from torch import Tensor
from torch.nn import functional as F

from ..core import Pieces, UserError

CLOSE = 1e-4  # largest error of a smooth network's pieces, as a part of the range of its values
FIRST, MOST = 4096, 1 << 16  # pieces of a smooth network
SLOPES = {
    F.relu: lambda z: (z > 0).to(z.dtype),
    F.leaky_relu: lambda z: torch.where(z > 0, torch.ones_like(z), 0.01),
    F.gelu: lambda z: (1 + torch.erf(z / math.sqrt(2))) / 2 + z * torch.exp(-z * z / 2) / math.sqrt(2 * math.pi),
}
_BENT = (F.relu, F.leaky_relu)
_APART = 1e-7  # of the interval: closer kinks are one, since float32 cannot tell them apart
Stage = tuple[Tensor, Tensor, Callable[[Tensor], Tensor] | None]


def straight_pieces(stages: Sequence[Stage], top: float, dtype: torch.dtype) -> Pieces:
    """The pieces of f(x) = stage_n(… stage_1(x)) on [0, top], differentiable in its weights.

    ``stages``: weight (out, in), bias (out,) and activation (of ``SLOPES``, or None) of each layer; the first has in =
    1, the last gives the H values. ReLU and leaky ReLU give exact pieces. With anything else [0, top] is cut evenly
    too, as finely as it takes for an error of at most ``CLOSE`` of the values' range; the slope, and so the gradient of
    x, is then right in the middle of a piece and off by half its bend at the ends.

    Raises UserError: a smooth network that bends too sharply for ``MOST`` pieces.
    """
    smooth = any(a not in (None, *_BENT) for _, _, a in stages)
    count = FIRST if smooth else 1
    while count <= MOST:
        even = torch.linspace(0, top, count + 1, dtype=torch.float64, device=stages[0][0].device)
        ends = _kinks(stages, even)
        middle = ((ends[:-1] + ends[1:]) / 2).to(dtype)
        value, slope = _network(stages, middle)
        pieces = Pieces(ends[1:-1].to(dtype), middle, value.T, slope.T)
        if not smooth or _close(stages, ends, pieces):
            return pieces
        count *= 4
    raise UserError(f"FIRE's network bends too sharply for {MOST} straight pieces: use fire:exact=true")


def _network(stages: Sequence[Stage], x: Tensor) -> tuple[Tensor, Tensor]:
    """x (K,) -> value and slope, each (K, H) in x's dtype."""
    value, slope = x[:, None], torch.ones_like(x)[:, None]
    for weight, bias, activation in stages:
        value, slope = F.linear(value, weight.to(x.dtype), bias.to(x.dtype)), F.linear(slope, weight.to(x.dtype))
        if activation is not None:
            value, slope = activation(value), slope * SLOPES[activation](value)
    return value, slope


@torch.no_grad()
def _kinks(stages: Sequence[Stage], ends: Tensor) -> Tensor:
    """Sorted float64 points: ``ends``, and between them the kinks of a network that is else linear there."""
    apart = _APART * ends[-1]
    for depth, (weight, bias, activation) in enumerate(stages):
        if activation not in _BENT:
            continue
        z = _network([*stages[:depth], (weight, bias, None)], ends)[0]
        left, right = z[:-1], z[1:]
        crossed = (left < 0) != (right < 0)
        at = ends[:-1, None] + ends.diff()[:, None] * left / (left - right)
        ends = torch.cat([ends, at[crossed]]).sort().values
        ends = torch.cat([ends[:-1][ends.diff() > apart], ends[-1:]])
    return ends


@torch.no_grad()
def _close(stages: Sequence[Stage], ends: Tensor, pieces: Pieces) -> bool:
    """Whether the error is small enough at the ends of the pieces, where a tangent is furthest off."""
    exact = _network(stages, ends)[0].T
    middle, value, slope = (x.double() for x in (pieces.middle, pieces.value, pieces.slope))
    left, right = (value + slope * (x - middle) for x in (ends[:-1], ends[1:]))
    off = torch.maximum((left - exact[:, :-1]).abs(), (right - exact[:, 1:]).abs()).amax(1)
    rounding = torch.finfo(pieces.middle.dtype).eps * 10 * (1 + exact.abs().max())
    return bool((off <= CLOSE * (exact.amax(1) - exact.amin(1)) + rounding).all())
