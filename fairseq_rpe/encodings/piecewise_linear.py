"""Exact linear pieces of a ReLU network of one real input.

Such a network is linear between its kinks, the inputs at which the preactivation of a unit is 0. They are computed
layer by layer: between the kinks of the previous layers a preactivation is linear and has at most one zero.
"""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor
from torch.nn import functional as F

from fairseq_rpe.core.bias import PiecewiseLinear

# activation -> its derivative; 0.01 is the negative slope of F.leaky_relu
_SLOPES = {F.relu: lambda z: (z > 0).to(z.dtype), F.leaky_relu: lambda z: torch.where(z > 0, torch.ones_like(z), 0.01)}
_MIN_GAP = 1e-7  # relative to the interval: closer kinks are merged, as float32 cannot distinguish them
# a layer: weight (out, in), bias (out,) and activation
Stage = tuple[Tensor, Tensor, Callable[[Tensor], Tensor] | None]


def is_piecewise_linear(stages: Sequence[Stage]) -> bool:
    """Return whether all activations are ReLU, leaky ReLU or None, so that :func:`linear_pieces` is exact."""
    return all(activation is None or activation in _SLOPES for _, _, activation in stages)


def linear_pieces(stages: Sequence[Stage], top: float, dtype: torch.dtype) -> PiecewiseLinear:
    """Return the linear pieces of f(x) = stage_n(… stage_1(x)) on [0, top], differentiable in the weights.

    Args:
        stages: the layers, with activation ReLU, leaky ReLU or None; the first has in = 1, the last has out = H.
        top: upper end of the interval.
        dtype: dtype of the pieces.

    Returns:
        The pieces of f.
    """
    ends = _kinks(stages, torch.tensor([0.0, top], dtype=torch.float64, device=stages[0][0].device))
    middle = ((ends[:-1] + ends[1:]) / 2).to(dtype)
    value, slope = _network(stages, middle)
    return PiecewiseLinear(ends[1:-1].to(dtype), middle, value.T, slope.T)


def _network(stages: Sequence[Stage], x: Tensor) -> tuple[Tensor, Tensor]:
    """Return value and slope, each (K, H), of the network at x (K,), in the dtype of x."""
    value, slope = x[:, None], torch.ones_like(x)[:, None]
    for weight, bias, activation in stages:
        value, slope = F.linear(value, weight.to(x.dtype), bias.to(x.dtype)), F.linear(slope, weight.to(x.dtype))
        if activation is not None:
            value, slope = activation(value), slope * _SLOPES[activation](value)
    return value, slope


@torch.no_grad()
def _kinks(stages: Sequence[Stage], ends: Tensor) -> Tensor:
    """Return ``ends`` and the kinks of the network between them, sorted, in float64."""
    min_gap = _MIN_GAP * ends[-1]
    for depth, (weight, bias, activation) in enumerate(stages):
        if activation is None:
            continue
        z, _ = _network([*stages[:depth], (weight, bias, None)], ends)  # preactivations (K, units)
        left, right = z[:-1], z[1:]  # (K - 1, units), at both ends of each interval
        crosses = (left < 0) != (right < 0)
        zeros = ends[:-1, None] + ends.diff()[:, None] * left / (left - right)  # of the line through both ends
        ends = torch.cat([ends, zeros[crosses]]).sort().values
        ends = torch.cat([ends[:-1][ends.diff() > min_gap], ends[-1:]])
    return ends
