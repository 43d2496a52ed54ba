"""xPos: rotary with an exponential decay per pair."""

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from ..core import Positions, option
from .base import Rotary, register


@register("xpos")
class XPos(Rotary):
    """Rotary whose pair s is scaled by ζ_s^((i-j)/S), split over query and key; diverges (scores tend to 0).

    A query gets ζ_s^((i-c)/S) and a key ζ_s^((c-j)/S). The centre c cancels; the official code takes the middle of
    the input, here it is the middle of the *queries*, so that a decoded token has factor 1 and every key it sees at
    most 1. Where queries are so many that the factors would leave the dtype's range, attention takes them in parts
    (``query_limit``). Pairs are interleaved, as in the official code. A survey prints one scalar γ in place of ζ_s;
    this follows the paper. Its blockwise causal attention at evaluation is not part of the encoding.
    """

    @dataclass(frozen=True)
    class Config:
        base: float = option(10000.0, "b in θ_s = b^(-2s/d)", above=1)
        scale_base: float = option(512.0, "S: tokens over which pair s decays by ζ_s", above=0)
        gamma: float = option(0.4, "γ in ζ_s = (2s + γd) / ((1 + γ)d); larger decays less", above=0)

    formula = "Σ_s ζ_s^((i-j)/S)·(R_i q)_s·(R_j k)_s,  ζ_s = (2s + γd) / ((1 + γ)d)"
    paper = "Sun et al. 2023 (arXiv 2212.10554)"
    bounded = "scores decay to 0, so their exponentials tend to 1"
    interleaved = True

    def _pairs(self, at: Tensor) -> Tensor:
        return torch.arange(self.rotated // 2, device=at.device, dtype=torch.float64)

    def zeta(self, at: Tensor) -> Tensor:
        """(P,) float64 decay of each pair over S tokens, on the device of ``at``."""
        d, gamma = self.rotated, self.config.gamma
        return (2 * self._pairs(at) + gamma * d) / ((1 + gamma) * d)

    def angles(self, at: Tensor, pos: Positions) -> Tensor:
        return at[..., None] * (self.config.base ** (-2 * self._pairs(at) / self.rotated)).to(at.dtype)

    def amplitude(self, at: Tensor, pos: Positions, key: bool) -> Tensor:
        centre = (pos.q.amin(dim=1, keepdim=True) + pos.q.amax(dim=1, keepdim=True)) / 2
        exponent = ((centre - at) if key else (at - centre)) / self.config.scale_base
        return torch.exp(exponent[..., None] * self.zeta(at).log().to(at.dtype))

    def query_limit(self, pos: Positions, dtype: torch.dtype) -> int:
        """How many neighbouring queries keep both factors well within the range of ``dtype``."""
        # log2 of the ratio of largest to smallest factor in one call: what the dtype holds, less room for q·k itself
        room = 8 if dtype == torch.float16 else 64
        reach = self.config.scale_base * room / math.log2((1 + self.config.gamma) / self.config.gamma)
        if pos.contiguous and pos.step is not None:
            return max(1, int(reach / pos.step))
        n = pos.q.shape[1]
        if n == 1 or float((pos.q.amax(1) - pos.q.amin(1)).max()) <= reach:
            return n
        return max(1, int(reach / float(pos.q.diff(dim=1).max())))
