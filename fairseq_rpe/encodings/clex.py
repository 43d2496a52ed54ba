"""CLEX: rotary whose frequencies follow a learned differential equation in the length."""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from fairseq_rpe.core.bias import Positions
from fairseq_rpe.core.errors import UserError
from fairseq_rpe.core.spec import option
from fairseq_rpe.encodings.base import Rotary, register
from fairseq_rpe.encodings.ode import Solution, need_solver, overflow, solve
from fairseq_rpe.encodings.rope import length_of

LARGEST = 1e22  # radians per token: float32 holds its product with any whole position that float64 can count


@register("clex")
class Clex(Rotary):
    """Rotary of θ(t) for rows of t training lengths; ln θ moves from rotary's own at t = 1 as a small network says.

    T is the row's length (its largest position + 1), L the original one, d the rotated width, P = d/2 pairs, s one of
    them. t = ceil(T/L), at least 1 and at most t_max. With z = ln θ (P,) and z(1)_s = -(2s/d)·ln b,

        dz/dt = W_down·act(W_up·(z + ln θ_ntk(t))) - 4s/((d-2)·(2t-1)),   θ_ntk(t)_s = (b·(2t-1)^(d/(d-2)))^(-2s/d).

    W_up (λd, P) and W_down (P, λd) have no bias and all heads and layers share them. W_down begins at zero, where the
    solution is NTK-aware scaling by 2t-1: θ(t)_s = b^(-2s/d)·(2t-1)^(-2s/(d-2)). The authors' code has 10000 for b in
    θ_ntk, whatever the model's base is; here it is the base. Theirs also scales queries by the logarithm of the length,
    by an option; that is left out.

    It is solved in float64 by Runge-Kutta steps of fourth order (torchdiffeq, the 3/8 rule), through which gradients
    flow. Without gradients the solution is kept until the weights change. **In training only rows of more than L tokens
    teach it anything**: ``--positions-train stretch:times=N`` gives each batch the positions of rows of t·L tokens, t
    drawn from 1 … N; what is drawn above t_max teaches θ(t_max). Beyond t_max·L angles go on growing with θ(t_max).

    Raises UserError: torchdiffeq is not installed, L is not known, or θ(t) overflows.
    """

    @dataclass(frozen=True)
    class Config:
        max_factor: int = option(16, "t_max: rows of more training lengths have the last θ", minimum=1, maximum=4096)
        original_length: int = option(0, "L, tokens of the original training; 0: the training length", minimum=0)
        expansion: int = option(1, "λ: hidden units per element of the rotated width", minimum=1, maximum=64)
        activation: str = option("silu", "act, of the hidden units", choices=("silu", "tanh"))
        steps: int = option(10, "of the solver, from one whole t to the next", minimum=1, maximum=1000)
        base: float = option(10000.0, "b in θ_s = b^(-2s/d)", above=1)
        rotary_fraction: float = option(1.0, "part of a head that turns, from its first element", above=0, maximum=1)
        interleaved: bool = option(False, "turn pairs (2s, 2s+1) instead of (s, s + d/2)")

    formula = "(R_i q)·(R_j k),  R_p turns pair s by p·θ_s(t),  d ln θ/dt = network(ln θ, t) + NTK's own"
    paper = "Chen et al. 2023 (arXiv 2310.16450)"
    length_dependent = True

    @classmethod
    def rotation_options(cls, config: Any) -> Mapping[str, str]:
        return {**super().rotation_options(config), "original_length": "original_length"}

    @classmethod
    def rotation_scaling(cls, config: Any) -> str:
        return "clex"

    def setup(self) -> None:
        cfg = self.config
        self.interleaved, self.rotary_fraction = cfg.interleaved, cfg.rotary_fraction
        super().setup()
        self.original = cfg.original_length or self.length or 0
        if not self.original:
            raise UserError("'clex' needs the original length: give original_length=N")
        need_solver("clex")
        self.up = nn.Linear(self.rotated // 2, cfg.expansion * self.rotated, bias=False)
        self.down = nn.Linear(cfg.expansion * self.rotated, self.rotated // 2, bias=False)
        nn.init.zeros_(self.down.weight)
        self._solution, self._bounded = Solution(), False

    def solve(self, top: int) -> Tensor:
        """θ(1) … θ(top) as (top, P) float64, with the gradient of the weights where there is any."""
        d, log_base = self.rotated, math.log(self.config.base)
        up, down = self.up.weight.double(), self.down.weight.double()
        twice = 2 * torch.arange(d // 2, device=up.device, dtype=torch.float64)
        act = F.silu if self.config.activation == "silu" else torch.tanh

        def speed(t: Tensor, z: Tensor) -> Tensor:
            alpha, ntk = 2 * t - 1, twice / max(d - 2, 1)
            prior = -twice / d * log_base - ntk * alpha.log()
            return down @ act(up @ (z + prior)) - 2 * ntk / alpha

        start = -twice / d * log_base
        if top == 1:
            return start.exp()[None]
        steps = self.config.steps
        times = torch.linspace(1, top, (top - 1) * steps + 1, device=up.device, dtype=torch.float64)
        return solve(speed, start, times, steps).exp()

    def frequencies(self, length: Tensor) -> Tensor:
        """Lengths (B, 1), float64 -> θ (B, P) in radians per token, float64.

        Raises:
            UserError: θ is not finite at these lengths, or so large that angles would not be.
        """
        t = (length / self.original).ceil().clamp(1, self.config.max_factor).long()[:, 0]
        if torch.is_grad_enabled():
            # never less than 2: where all rows are short, weights still have a gradient, which is 0 (not NaN)
            return _checked(self.solve(max(2, int(t.max()))))[t - 1]
        weights = [self.up.weight, self.down.weight]
        known = self._solution.of(weights)
        if known is None:
            known = self._solution.keep(weights, self.solve(self.config.max_factor))
            self._bounded = _is_bounded(known)
        # only where some θ(t) overflows does each call have to wait for the device
        return known[t - 1] if self._bounded else _checked(known[t - 1])

    def angles(self, at: Tensor, pos: Positions) -> Tensor:
        return at[..., None] * self.frequencies(length_of(pos))[:, None].to(at.dtype)

    def rotate(self, x: Tensor, at: Tensor, pos: Positions, key: bool = False) -> Tensor:
        at = at if at.is_floating_point() else at.to(torch.float32)
        return self._turned(x, *self._made(self.angles(at, pos), at, pos, key))

    def rotation(self, pos: Positions) -> Callable[..., Tensor]:
        # Solved here, once: a layer that is computed again for its gradients must not solve again, and the graph goes
        # with whatever holds this function.
        angles = self.angles(pos.k, pos)
        keys = self._made(angles, pos.k, pos, True)
        queries = self._made(angles[:, -pos.q.shape[1] :], pos.q, pos, False)
        return lambda x, at, pos, key=False: self._turned(x, *(keys if key else queries))


def _is_bounded(theta: Tensor) -> bool:
    return bool((theta.detach() <= LARGEST).all())  # False for NaN


def _checked(theta: Tensor) -> Tensor:
    if not _is_bounded(theta):
        raise overflow("clex")
    return theta
