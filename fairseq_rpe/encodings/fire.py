"""FIRE: a learned function of the distance relative to the query's position (Li et al. 2024)."""

import functools
from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise
from typing import cast

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from fairseq_rpe.core.bias import PairBias, ScaledDistanceBias
from fairseq_rpe.core.log_bias import LogBias
from fairseq_rpe.core.positions import Positions
from fairseq_rpe.core.spec import option
from fairseq_rpe.encodings.base import PairwiseBias, register
from fairseq_rpe.encodings.piecewise_linear import Stage, is_piecewise_linear, linear_pieces

_ACTIVATIONS: dict[str, Callable[[Tensor], Tensor] | None] = {
    "none": None,
    "relu": F.relu,
    "gelu": F.gelu,
    "leaky_relu": F.leaky_relu,
}


@register("fire", colour="black", marker=">")
class Fire(PairwiseBias):
    """FIRE (Li et al. 2024, arXiv 2310.04418, Eq. 4): b(i, j) = f(ψ(i-j) / ψ(max(L, i))), ψ(x) = ln(c·x + 1).

    f is an MLP from R to R^H, so b is bounded and Σ exp(bias) diverges. c and L are learned. Positions count from 0;
    1e-6 is added to the denominator, and c and L enter by absolute value, as in the published listing. There is one
    module per layer by default; ``--rpe-share model`` is the paper's FIRE-S.
    """

    @dataclass(frozen=True)
    class Config:
        """Options of ``fire``."""

        hidden_layers: int = option(
            2, "hidden layers of f: 2 as in the text, 1 as in its listing, 0 linear", choices=(0, 1, 2)
        )
        hidden: int = option(32, "width of the hidden layers", minimum=1, maximum=65_536)
        activation: str = option("relu", "activation between the layers of f", choices=("relu", "gelu", "leaky_relu"))
        output_activation: str = option("none", "activation of f's output (Table 7)", choices=tuple(_ACTIVATIONS))
        log: bool = option(True, "psi(x) = ln(c·x + 1); false: psi(x) = x (Eq. 21)")
        threshold: str = option(
            "learned", "L in max(L, i): learned, fixed, or none (Eq. 21, 22)", choices=("learned", "fixed", "none")
        )
        init_c: float = option(0.1, "initial c", above=0)
        init_L: float = option(512.0, "initial L in tokens", above=0)
        exact: bool = option(
            False, "evaluate f for every pair, as published and for GELU; false: by the linear pieces of f"
        )

    formula = "f(psi(i-j) / psi(max(L, i))),  psi(x) = ln(c·x + 1),  f: MLP, c and the threshold L learned"
    paper = "Li et al. 2024 (arXiv 2310.04418), Eq. 4"
    dape_base = True
    sharing_modes = ("layer", "model")

    def setup(self) -> None:
        """Create the parameters."""
        cfg = self.config
        widths = [1, *[cfg.hidden] * cfg.hidden_layers, self.heads]
        self.mlp = nn.ModuleList(nn.Linear(a, b) for a, b in pairwise(widths))
        self.c = nn.Parameter(torch.tensor(cfg.init_c)) if cfg.log else None
        self.L_multiplier = nn.Parameter(torch.tensor(1.0)) if cfg.threshold == "learned" else None

    def psi(self, x: Tensor) -> Tensor:
        """Return ln(|c·x| + 1), or x itself with ``log=false``; same shape."""
        return x if self.c is None else torch.log1p((self.c.to(x.dtype) * x).abs())

    def threshold(self, i: Tensor) -> Tensor:
        """Return the denominator psi(max(L, i)) + 1e-6 of query positions i; same shape."""
        top = i
        if self.config.threshold != "none":
            scale = 1.0 if self.L_multiplier is None else self.L_multiplier.to(i.dtype)
            top = torch.maximum(i, torch.as_tensor(scale * self.config.init_L, dtype=i.dtype, device=i.device).abs())
        return self.psi(top) + 1e-6

    def ratio(self, i: Tensor, j: Tensor) -> Tensor:
        """Return the MLP's input in [0, 1] for positions i (B, n), j (B, m): (B, n, m), 0 where j > i."""
        d = (i[:, :, None] - j[:, None, :]).clamp_min(0)
        return self.psi(d) / self.threshold(i)[:, :, None]

    def bias(self, i: Tensor, j: Tensor) -> Tensor:
        """Return f of the ratio of every pair of positions i (B or 1, n), j (B or 1, m): (B or 1, H, n, m)."""
        ratio = self.ratio(i, j)
        x = ratio.reshape(1, -1)  # (1, B·n·m): pairs last, the layout of attention, so no transposed copy is needed
        for weight, bias, activation in self.stages():
            x = torch.addmm(bias.to(x.dtype)[:, None], weight.to(x.dtype), x)
            x = x if activation is None else activation(x)
        return x.unflatten(1, ratio.shape).transpose(0, 1)  # (H, B·n·m) -> (B, H, n, m)

    def stages(self) -> list[Stage]:
        """Return weight, bias and activation of each layer of f."""
        names = [self.config.activation] * (len(self.mlp) - 1) + [self.config.output_activation]
        layers = (cast(nn.Linear, layer) for layer in self.mlp)
        return [(layer.weight, layer.bias, _ACTIVATIONS[a]) for layer, a in zip(layers, names, strict=True)]

    def position_bias(self, pos: Positions) -> PairBias:
        """Return the bias by linear pieces of f, or by evaluation for every pair."""
        stages = self.stages()
        # a smooth network is not piecewise linear, and approximating it by short pieces gives wrong derivatives
        if self.config.exact or not pos.contiguous or not is_piecewise_linear(stages):
            return PairBias(self.bias)
        assert pos.step is not None  # contiguous positions have a step
        d = torch.arange(pos.k.shape[1], device=pos.k.device, dtype=pos.k.dtype) * pos.step
        pieces = functools.partial(linear_pieces, stages, dtype=pos.k.dtype)
        return ScaledDistanceBias(
            self.bias, distance_values=self.psi(d), query_scale=1 / self.threshold(pos.q), make_pieces=pieces
        )

    def logged_scalars(self) -> dict[str, Tensor]:
        """Return c and L."""
        length = None if self.L_multiplier is None else self.L_multiplier * self.config.init_L
        return {name: value.abs() for name, value in (("c", self.c), ("L", length)) if value is not None}

    def log_bias_formulas(self) -> list[LogBias]:
        """Return a lower bound of the log-bias of each head."""
        note = (
            "an MLP of a ratio in [0, 1] is bounded, so Σ_j exp b(i,j) = Θ(i) grows with the query's position i, on "
            "which the bias depends as well (not Toeplitz)"
        )
        return [LogBias("0", note, at_least=True)] * self.heads
