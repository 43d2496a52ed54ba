"""CLEX: RoPE whose frequencies follow a learned ordinary differential equation in the length."""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from fairseq_rpe.core.errors import UserError
from fairseq_rpe.core.positions import Positions
from fairseq_rpe.core.spec import option
from fairseq_rpe.encodings.base import Rotary, register
from fairseq_rpe.encodings.ode import SolutionCache, overflow_error, require_solver, solve
from fairseq_rpe.encodings.rope import current_length

MAX_INV_FREQ = 1e22  # radians per token: float32 holds its product with any whole position that float64 can count


@register("clex", colour="sky blue", marker="s")
class Clex(Rotary):
    """RoPE with frequencies θ(t) for rows of t training lengths (Chen et al. 2023, arXiv 2310.16450).

    T is the row's length (its largest position + 1), L the original length, d the rotated width, P = d/2 the number of
    pairs, s = 0 … P - 1 a pair. t = ceil(T/L), clipped to [1, t_max]. ln θ starts at that of RoPE for t = 1 and follows
    a differential equation. With z = ln θ (P,) and z(1)_s = -(2s/d)·ln b,

        dz/dt = W_down·act(W_up·(z + ln θ_ntk(t))) - 4s/((d-2)·(2t-1)),   θ_ntk(t)_s = (b·(2t-1)^(d/(d-2)))^(-2s/d).

    W_up (λd, P) and W_down (P, λd) have no bias and are shared by all heads and layers. W_down starts at zero, where
    the solution is NTK-aware scaling by 2t-1: θ(t)_s = b^(-2s/d)·(2t-1)^(-2s/(d-2)). In θ_ntk the authors' code has
    b = 10000 for any base of the model; here b is the base. Their optional scaling of queries by the logarithm of the
    length is left out.

    The equation is solved in float64 by fourth-order Runge-Kutta steps (torchdiffeq, the 3/8 rule), which are
    differentiable. Without gradients the solution is cached until the weights change. **Only rows of more than L tokens
    train the network**: ``--positions-train stretch:times=N`` gives each batch the positions of rows of t·L tokens, t
    drawn from 1 … N; values of t above t_max train θ(t_max). Beyond t_max·L tokens θ(t_max) is used.

    Raises:
        UserError: torchdiffeq is not installed, L is not known, or θ(t) overflows.
    """

    @dataclass(frozen=True)
    class Config:
        """Options of ``clex``."""

        max_factor: int = option(16, "t_max: longer rows, in training lengths, use θ(t_max)", minimum=1, maximum=4096)
        original_length: int = option(0, "L, tokens of the original training; 0: the training length", minimum=0)
        expansion: int = option(1, "λ: hidden units per element of the rotated width", minimum=1, maximum=64)
        activation: str = option("silu", "act, of the hidden units", choices=("silu", "tanh"))
        steps: int = option(10, "solver steps from one whole t to the next", minimum=1, maximum=1000)
        base: float = option(10000.0, "b in θ_s = b^(-2s/d)", above=1)
        rotary_fraction: float = option(
            1.0, "fraction of a head that is rotated, from its first element", above=0, maximum=1
        )
        interleaved: bool = option(False, "rotate pairs (2s, 2s+1) instead of (s, s + d/2)")

    formula = "(R_i q)·(R_j k),  R_p rotates pair s by p·θ_s(t),  d ln θ/dt = MLP(ln θ, t) + that of NTK"
    paper = "Chen et al. 2023 (arXiv 2310.16450)"
    length_dependent = True

    @classmethod
    def rotation_options(cls, config: Any) -> Mapping[str, str]:
        """Return the quantity of the rotation that each option sets, by the name of the option."""
        return {**super().rotation_options(config), "original_length": "original_length"}

    @classmethod
    def rotation_scaling(cls, config: Any) -> str:
        """Return "clex": the frequencies are scaled with any options."""
        return "clex"

    def setup(self) -> None:
        """Check the options and create the parameters."""
        cfg = self.config
        super().setup()
        self.original_length = cfg.original_length or self.length or 0
        if not self.original_length:
            raise UserError("'clex' needs the original length: give original_length=N")
        require_solver("clex")
        self.up = nn.Linear(self.rotated // 2, cfg.expansion * self.rotated, bias=False)
        self.down = nn.Linear(cfg.expansion * self.rotated, self.rotated // 2, bias=False)
        nn.init.zeros_(self.down.weight)
        self._solution, self._is_bounded = SolutionCache(), False

    def solve(self, top: int) -> Tensor:
        """Return θ(1) … θ(top) as (top, P) float64, differentiable in the weights."""
        d, log_base = self.rotated, math.log(self.config.base)
        up, down = self.up.weight.double(), self.down.weight.double()
        two_s = 2 * torch.arange(d // 2, device=up.device, dtype=torch.float64)
        act = F.silu if self.config.activation == "silu" else torch.tanh

        def derivative(t: Tensor, z: Tensor) -> Tensor:
            factor, exponent = 2 * t - 1, two_s / max(d - 2, 1)  # NTK-aware scaling divides θ_s by factor^exponent_s
            log_ntk = -two_s / d * log_base - exponent * factor.log()  # ln θ_ntk(t), (P,)
            return down @ act(up @ (z + log_ntk)) - 2 * exponent / factor

        start = -two_s / d * log_base
        if top == 1:
            return start.exp()[None]
        steps = self.config.steps
        times = torch.linspace(1, top, (top - 1) * steps + 1, device=up.device, dtype=torch.float64)
        return solve(derivative, start, times, steps).exp()

    def inv_freq(self, length: Tensor) -> Tensor:
        """Return the frequencies θ(t) of rows of given lengths.

        Args:
            length: (B, 1) float64, in tokens.

        Returns:
            (B, P) float64, in radians per token.

        Raises:
            UserError: θ is not finite at these lengths, or so large that angles are not.
        """
        t = (length / self.original_length).ceil().clamp(1, self.config.max_factor).long()[:, 0]
        if torch.is_grad_enabled():
            # at least 2: if all rows are short, the weights still get a gradient, which is 0 and not NaN
            return _require_bounded(self.solve(max(2, int(t.max()))))[t - 1]
        weights = [self.up.weight, self.down.weight]
        solution = self._solution.get(weights)
        if solution is None:
            solution = self._solution.put(weights, self.solve(self.config.max_factor))
            self._is_bounded = _is_bounded(solution)
        # the check waits for the device, so it runs in each call only if some θ(t) overflows
        return solution[t - 1] if self._is_bounded else _require_bounded(solution[t - 1])

    def angles(self, at: Tensor, pos: Positions) -> Tensor:
        """Return the angles (B or 1, n, P), in radians, of the positions ``at`` (B or 1, n)."""
        return at[..., None] * self.inv_freq(current_length(pos))[:, None].to(at.dtype)

    def rotate(self, x: Tensor, at: Tensor, pos: Positions, key: bool = False) -> Tensor:
        """Rotate x (B, H, n, D) with gradients of the angles; same shape."""
        at = at if at.is_floating_point() else at.to(torch.float32)
        return self._rotate_pairs(x, *self._cos_sin_of_angles(self.angles(at, pos), at, pos, key))

    def rotation(self, pos: Positions) -> Callable[..., Tensor]:
        """Solve the equation for these positions and return the function that rotates queries and keys."""
        # The equation is solved once per forward pass: a layer that is recomputed for its gradients must not solve it
        # again, and the graph is freed together with this closure.
        theta = self.inv_freq(current_length(pos))[:, None].to(pos.k.dtype)  # (B or 1, 1, P)
        angles = pos.k[..., None] * theta  # (B or 1, m, P)
        keys = self._cos_sin_of_angles(angles, pos.k, pos, True)
        queries = self._cos_sin_of_angles(angles[:, -pos.q.shape[1] :], pos.q, pos, False)
        queries_at, keys_at = pos.q, pos.k

        def rotate(x: Tensor, at: Tensor, pos: Positions, key: bool = False) -> Tensor:
            if at is (keys_at if key else queries_at):
                return self._rotate_pairs(x, *(keys if key else queries))
            # some of the tokens, for example those in a window
            return self._rotate_pairs(x, *self._cos_sin_of_angles(at[..., None] * theta, at, pos, key))

        return rotate


def _is_bounded(theta: Tensor) -> bool:
    return bool((theta.detach() <= MAX_INV_FREQ).all())  # False for NaN


def _require_bounded(theta: Tensor) -> Tensor:
    if not _is_bounded(theta):
        raise overflow_error("clex")
    return theta
