"""A small network of one number as straight pieces, which a network of ReLUs is.

Such a network is linear between its kinks, the points where some unit's input is 0. They are found layer by layer:
between the kinks of the layers before, a unit's input is a straight line and crosses 0 at most once.
"""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor
from torch.nn import functional as F

from fairseq_rpe.core.bias import PiecewiseLinear

_SLOPES = {F.relu: lambda z: (z > 0).to(z.dtype), F.leaky_relu: lambda z: torch.where(z > 0, torch.ones_like(z), 0.01)}
_APART = 1e-7  # of the interval: closer kinks are one, since float32 cannot tell them apart
Stage = tuple[Tensor, Tensor, Callable[[Tensor], Tensor] | None]


def is_piecewise_linear(stages: Sequence[Stage]) -> bool:
    """Whether :func:`straight_pieces` serves a network: all its activations are ReLU, leaky ReLU or None."""
    return all(activation is None or activation in _SLOPES for _, _, activation in stages)


def straight_pieces(stages: Sequence[Stage], top: float, dtype: torch.dtype) -> PiecewiseLinear:
    """The pieces of f(x) = stage_n(… stage_1(x)) on [0, top], differentiable in its weights.

    Args:
        stages: weight (out, in), bias (out,) and activation (ReLU, leaky ReLU or None) of each layer; the first has
            in = 1, the last gives the H values.
        top: end of the interval.
        dtype: of the pieces.
    """
    ends = _kinks(stages, torch.tensor([0.0, top], dtype=torch.float64, device=stages[0][0].device))
    middle = ((ends[:-1] + ends[1:]) / 2).to(dtype)
    value, slope = _network(stages, middle)
    return PiecewiseLinear(ends[1:-1].to(dtype), middle, value.T, slope.T)


def _network(stages: Sequence[Stage], x: Tensor) -> tuple[Tensor, Tensor]:
    """x (K,) -> value and slope, each (K, H) in x's dtype."""
    value, slope = x[:, None], torch.ones_like(x)[:, None]
    for weight, bias, activation in stages:
        value, slope = F.linear(value, weight.to(x.dtype), bias.to(x.dtype)), F.linear(slope, weight.to(x.dtype))
        if activation is not None:
            value, slope = activation(value), slope * _SLOPES[activation](value)
    return value, slope


@torch.no_grad()
def _kinks(stages: Sequence[Stage], ends: Tensor) -> Tensor:
    """Sorted float64 points: ``ends``, and between them the kinks of the network."""
    apart = _APART * ends[-1]
    for depth, (weight, bias, activation) in enumerate(stages):
        if activation is None:
            continue
        z = _network([*stages[:depth], (weight, bias, None)], ends)[0]
        left, right = z[:-1], z[1:]
        crossed = (left < 0) != (right < 0)
        at = ends[:-1, None] + ends.diff()[:, None] * left / (left - right)
        ends = torch.cat([ends, at[crossed]]).sort().values
        ends = torch.cat([ends[:-1][ends.diff() > apart], ends[-1:]])
    return ends
