"""The window of the option ``local`` as a bias: -inf at keys that are too far away."""

import functools
import math
from dataclasses import dataclass, field, replace
from typing import Self

import torch
from torch import Tensor
from torch.nn import functional as F

from fairseq_rpe.core.bias import Bias, PairBias, PointwiseBias, ScaledDistanceBias, ToeplitzBias, add_biases
from fairseq_rpe.core.positions import Positions


@dataclass(frozen=True)
class WindowedScaledDistanceBias(PairBias):
    """A :class:`ScaledDistanceBias` with -inf outside a window.

    Attributes:
        scaled: The bias without the window.
        window: Smallest distance that is hidden, by index.
    """

    scaled: ScaledDistanceBias = field(kw_only=True)
    window: int = field(kw_only=True)

    def select(self, queries: slice, keys: slice) -> Self:
        """Slice the bias without the window; the window stays the same."""
        return replace(self, scaled=self.scaled.select(queries, keys))

    def select_heads(self, heads: slice) -> Bias:
        """Return the bias of some heads."""
        scaled = self.scaled.select_heads(heads)
        assert isinstance(scaled, ScaledDistanceBias)
        return replace(self, fn=self._fn_of_heads(heads), scaled=scaled)


def hide_far_keys(bias: Bias | None, pos: Positions, heads: int, window: int) -> Bias | None:
    """Return a bias with -inf at distances of ``window`` tokens or more.

    Args:
        bias: Bias of the pairs of ``pos``, or None for none.
        pos: Positions of the queries and keys.
        heads: Number of heads H.
        window: Smallest distance that is hidden, in tokens.

    Returns:
        A bias of the same type where that is possible: a table by distance keeps O(window) columns.
    """
    if isinstance(bias, ScaledDistanceBias) and pos.step is not None:  # its positions are contiguous
        if (columns := math.ceil(window / pos.step)) >= pos.k.shape[1]:
            return bias
        return WindowedScaledDistanceBias(_hide_far_pairs(bias, window).fn, bias.aux, scaled=bias, window=columns)
    if isinstance(bias, PairBias):
        return _hide_far_pairs(bias, window)
    if pos.step is None or (isinstance(bias, ToeplitzBias) and bias.step != pos.step):
        return add_biases(bias, PairBias(functools.partial(_window_values, window)))
    columns = math.ceil(window / pos.step)  # distances 0, step, … below the window
    if pos.contiguous and columns >= pos.k.shape[1]:
        return bias  # no two tokens are so far apart
    if bias is None or isinstance(bias, ToeplitzBias):
        table = pos.k.new_zeros(heads, columns) if bias is None else bias.columns(columns)
        return ToeplitzBias(F.pad(table, (0, 1), value=float("-inf")), step=pos.step)
    return add_biases(bias, hide_far_keys(None, pos, heads, window))


def _window_values(window: int, i: Tensor, j: Tensor) -> Tensor:
    """Return 0 (B or 1, 1, n, m) where key j is nearer to query i than ``window``, else -inf."""
    d = (i[:, :, None] - j[:, None, :])[:, None]
    return torch.zeros_like(d).masked_fill(d >= window, float("-inf"))


def _hide_far_pairs(bias: PairBias, window: int) -> PairBias:
    """Return a function of both positions with -inf at distances of ``window`` or more."""

    def fn(i: Tensor, j: Tensor, *aux: Tensor) -> Tensor:
        return bias.fn(i, j, *aux) + _window_values(window, i, j)

    if isinstance(bias, PointwiseBias):
        scalar_fn = bias.scalar_fn

        def windowed(i: Tensor, j: Tensor, *parameters: Tensor) -> Tensor:
            return torch.where(i - j < window, scalar_fn(i, j, *parameters), float("-inf"))

        return PointwiseBias(fn, bias.aux, scalar_fn=windowed, parameters=bias.parameters)
    return PairBias(fn, bias.aux)
