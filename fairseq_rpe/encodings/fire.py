"""FIRE: a learned function of the distance relative to the query's position."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from ..core import LogWeight, option
from .base import PairBias, register

_ACTIVATIONS = {"relu": F.relu, "gelu": F.gelu, "leaky_relu": F.leaky_relu, "none": lambda x: x}


@dataclass(frozen=True)
class FireConfig:
    """Options of FIRE; each ablation of the paper is one of them."""

    hidden_layers: int = option(
        2, "hidden layers of f: 2 as in the text, 1 as in its listing, 0 linear", choices=(0, 1, 2)
    )
    hidden: int = option(32, "width of the hidden layers", minimum=1)
    activation: str = option("relu", "between the layers", choices=("relu", "gelu", "leaky_relu"))
    output_activation: str = option("none", "on the output (Table 7)", choices=("none", "relu", "gelu", "leaky_relu"))
    log: bool = option(True, "psi(x) = ln(c·x + 1); false: psi(x) = x (Eq. 21)")
    threshold: str = option(
        "learned", "L in max(L, i): learned, fixed, or none (Eq. 21, 22)", choices=("learned", "fixed", "none")
    )
    init_c: float = option(0.1, "initial c", above=0)
    init_L: float = option(512.0, "initial L in tokens", above=0)


@register("fire")
class Fire(PairBias):
    """b(i,j) = f(psi(i-j) / psi(max(L, i))), f an MLP from R to R^H; bounded, so it diverges.

    Positions count from 0; 1e-6 is added to the denominator and c and L enter by absolute value, as in the
    published listing. One module per layer by default; ``--rpe-share model`` is the paper's FIRE-S.
    """

    Config = FireConfig
    formula = "f(psi(i-j) / psi(max(L, i))),  psi(x) = ln(c·x + 1),  f: MLP, c and L learned"
    paper = "Li et al. 2024 (arXiv 2310.04418), Eq. 4"
    shares = ("layer", "model")

    def setup(self) -> None:
        cfg = self.config
        widths = [1, *[cfg.hidden] * cfg.hidden_layers, self.heads]
        self.mlp = nn.ModuleList(nn.Linear(a, b) for a, b in pairwise(widths))
        self.c = nn.Parameter(torch.tensor(cfg.init_c)) if cfg.log else None
        self.L_multiplier = nn.Parameter(torch.tensor(1.0)) if cfg.threshold == "learned" else None

    def psi(self, x: Tensor) -> Tensor:
        """ln(|c·x| + 1), or x itself without the logarithm."""
        return x if self.c is None else torch.log1p((self.c.to(x.dtype) * x).abs())

    def ratio(self, i: Tensor, j: Tensor) -> Tensor:
        """The MLP's input in [0, 1]: i (B, n), j (B, m) -> (B, n, m); 0 where j > i."""
        top = i
        if self.config.threshold != "none":
            scale = 1.0 if self.L_multiplier is None else self.L_multiplier.to(i.dtype)
            top = torch.maximum(i, torch.as_tensor(scale * self.config.init_L, dtype=i.dtype, device=i.device).abs())
        d = (i[:, :, None] - j[:, None, :]).clamp_min(0)
        return self.psi(d) / (self.psi(top)[:, :, None] + 1e-6)

    def bias(self, i: Tensor, j: Tensor) -> Tensor:
        x = self.ratio(i, j)[..., None]
        for layer in self.mlp[:-1]:
            x = _ACTIVATIONS[self.config.activation](self._linear(layer, x))
        x = _ACTIVATIONS[self.config.output_activation](self._linear(self.mlp[-1], x))
        return x.permute(0, 3, 1, 2)

    @staticmethod
    def _linear(layer: nn.Linear, x: Tensor) -> Tensor:
        return F.linear(x, layer.weight.to(x.dtype), layer.bias.to(x.dtype))

    def scalars(self) -> dict[str, Tensor]:
        found = {}
        if self.c is not None:
            found["c"] = self.c.abs()
        if self.L_multiplier is not None:
            found["L"] = (self.L_multiplier * self.config.init_L).abs()
        return found

    def series(self) -> list[LogWeight]:
        note = (
            "an MLP of a ratio in [0, 1] is bounded, so Σ_j exp b(i,j) = Θ(i) grows with the query's position i, on "
            "which the bias depends as well (not Toeplitz)"
        )
        return [LogWeight("0", note, at_least=True)] * self.heads
