"""FIRE: a learned function of the distance relative to the query's position."""

import functools
from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise
from typing import cast

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from fairseq_rpe.core.bias import PairBias, Positions, ScaledDistanceBias
from fairseq_rpe.core.log_bias import LogBias
from fairseq_rpe.core.spec import option
from fairseq_rpe.encodings.base import PairwiseBias, register
from fairseq_rpe.encodings.piecewise_linear import Stage, is_piecewise_linear, straight_pieces

_ACTIVATIONS: dict[str, Callable[[Tensor], Tensor] | None] = {
    "none": None,
    "relu": F.relu,
    "gelu": F.gelu,
    "leaky_relu": F.leaky_relu,
}


@register("fire")
class Fire(PairwiseBias):
    """b(i,j) = f(psi(i-j) / psi(max(L, i))), f an MLP from R to R^H; bounded, so it diverges.

    Positions count from 0; 1e-6 is added to the denominator and c and L enter by absolute value, as in the
    published listing. One module per layer by default; ``--rpe-share model`` is the paper's FIRE-S.
    """

    @dataclass(frozen=True)
    class Config:
        hidden_layers: int = option(
            2, "hidden layers of f: 2 as in the text, 1 as in its listing, 0 linear", choices=(0, 1, 2)
        )
        hidden: int = option(32, "width of the hidden layers", minimum=1, maximum=65_536)
        activation: str = option("relu", "between the layers", choices=("relu", "gelu", "leaky_relu"))
        output_activation: str = option("none", "on the output (Table 7)", choices=tuple(_ACTIVATIONS))
        log: bool = option(True, "psi(x) = ln(c·x + 1); false: psi(x) = x (Eq. 21)")
        threshold: str = option(
            "learned", "L in max(L, i): learned, fixed, or none (Eq. 21, 22)", choices=("learned", "fixed", "none")
        )
        init_c: float = option(0.1, "initial c", above=0)
        init_L: float = option(512.0, "initial L in tokens", above=0)
        exact: bool = option(False, "run f for every pair, as published and for GELU; false: by f's straight pieces")

    formula = "f(psi(i-j) / psi(max(L, i))),  psi(x) = ln(c·x + 1),  f: MLP, c and L learned"
    paper = "Li et al. 2024 (arXiv 2310.04418), Eq. 4"
    sharing_modes = ("layer", "model")

    def setup(self) -> None:
        cfg = self.config
        widths = [1, *[cfg.hidden] * cfg.hidden_layers, self.heads]
        self.mlp = nn.ModuleList(nn.Linear(a, b) for a, b in pairwise(widths))
        self.c = nn.Parameter(torch.tensor(cfg.init_c)) if cfg.log else None
        self.L_multiplier = nn.Parameter(torch.tensor(1.0)) if cfg.threshold == "learned" else None

    def psi(self, x: Tensor) -> Tensor:
        """ln(|c·x| + 1), or x itself without the logarithm."""
        return x if self.c is None else torch.log1p((self.c.to(x.dtype) * x).abs())

    def threshold(self, i: Tensor) -> Tensor:
        """The denominator psi(max(L, i)) + 1e-6 of query positions i."""
        top = i
        if self.config.threshold != "none":
            scale = 1.0 if self.L_multiplier is None else self.L_multiplier.to(i.dtype)
            top = torch.maximum(i, torch.as_tensor(scale * self.config.init_L, dtype=i.dtype, device=i.device).abs())
        return self.psi(top) + 1e-6

    def ratio(self, i: Tensor, j: Tensor) -> Tensor:
        """The MLP's input in [0, 1]: i (B, n), j (B, m) -> (B, n, m); 0 where j > i."""
        d = (i[:, :, None] - j[:, None, :]).clamp_min(0)
        return self.psi(d) / self.threshold(i)[:, :, None]

    def bias(self, i: Tensor, j: Tensor) -> Tensor:
        ratio = self.ratio(i, j)
        x = ratio.reshape(1, -1)  # pairs last, as attention reads them: nothing has to be turned over
        for weight, bias, activation in self.stages():
            x = torch.addmm(bias.to(x.dtype)[:, None], weight.to(x.dtype), x)
            x = x if activation is None else activation(x)
        return x.unflatten(1, ratio.shape).transpose(0, 1)

    def stages(self) -> list[Stage]:
        """Weight, bias and activation of each layer of f."""
        names = [self.config.activation] * (len(self.mlp) - 1) + [self.config.output_activation]
        layers = (cast(nn.Linear, layer) for layer in self.mlp)
        return [(layer.weight, layer.bias, _ACTIVATIONS[a]) for layer, a in zip(layers, names, strict=True)]

    def position_bias(self, pos: Positions) -> PairBias:
        stages = self.stages()
        # a smooth network has no straight pieces, and pieces that are close have wrong derivatives
        if self.config.exact or not pos.contiguous or not is_piecewise_linear(stages):
            return PairBias(self.bias)
        d = torch.arange(pos.k.shape[1], device=pos.k.device, dtype=pos.k.dtype) * pos.step
        pieces = functools.partial(straight_pieces, stages, dtype=pos.k.dtype)
        return ScaledDistanceBias(self.bias, far=self.psi(d), near=1 / self.threshold(pos.q), pieces=pieces)

    def logged_scalars(self) -> dict[str, Tensor]:
        length = None if self.L_multiplier is None else self.L_multiplier * self.config.init_L
        return {name: value.abs() for name, value in (("c", self.c), ("L", length)) if value is not None}

    def log_bias_formulas(self) -> list[LogBias]:
        note = (
            "an MLP of a ratio in [0, 1] is bounded, so Σ_j exp b(i,j) = Θ(i) grows with the query's position i, on "
            "which the bias depends as well (not Toeplitz)"
        )
        return [LogBias("0", note, at_least=True)] * self.heads
