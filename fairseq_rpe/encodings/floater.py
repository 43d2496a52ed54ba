"""FLOATER: position vectors that follow a learned differential equation."""

from dataclasses import dataclass
from typing import Self

import torch
from torch import Tensor, nn

from fairseq_rpe.core.errors import UserError
from fairseq_rpe.core.positions import Positions
from fairseq_rpe.core.spec import option
from fairseq_rpe.encodings.base import Encoding, register
from fairseq_rpe.encodings.ode import SolutionCache, overflow_error, require_solver, solve

QUERY, KEY, VALUE = range(3)
MAX_STEPS = 1 << 24  # of the solver: float32 cannot distinguish later times


@dataclass(frozen=True)
class PathPositions(Positions):
    """Positions together with their vectors.

    Attributes:
        path: (T, 3, C) vectors of positions 0 … T-1 for queries, keys and values.
    """

    path: Tensor | None = None


class Dynamics(nn.Module):
    """Derivative h(τ, p) of p (3, C): Linear(C+1 -> C), ReLU, Linear(C+1 -> C), with the time τ as an input of both."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.inner, self.outer = nn.Linear(width + 1, width), nn.Linear(width + 1, width)
        for layer in (self.inner, self.outer):
            nn.init.xavier_normal_(layer.weight)
            nn.init.zeros_(layer.bias)

    def forward(self, time: Tensor, p: Tensor) -> Tensor:
        """Return dp/dτ (..., C) at the time () for p (..., C)."""
        times = time.expand(*p.shape[:-1], 1).to(p.dtype)  # (..., 1)
        hidden = torch.relu(self.inner(torch.cat([p, times], dim=-1)))
        return self.outer(torch.cat([hidden, times], dim=-1))


@register("floater", colour="blue", marker="D")
class Floater(Encoding):
    """FLOATER (Liu et al. 2020, arXiv 2003.09229): vectors added to every layer's queries, keys and values.

    p_i = p(i·Δt) solves dp/dt = h(t, p) from a learned p(0) (3, C). After the projections and before 1/sqrt(D) are
    added q_i + p_i^q, k_i + p_i^k and v_i + p_i^v, each (C,) and split into heads. One two-layer network h serves all
    three. The solver is torchdiffeq's RK4 with ``steps`` steps per token. In training the path is solved in every
    forward pass and differentiated with respect to h and p(0). Without gradients it is cached until the weights change,
    and extended for longer rows. As in the authors' code all layers share h and each layer has its own p(0); if the
    model shares the encoding, there is one p(0) and the path is solved once.

    Differences from their code: no sinusoid is added at the input, and no path is reused over several updates.

    Raises:
        UserError: torchdiffeq is not installed, the path overflows, or second derivatives are requested with
            ``adjoint``.
    """

    @dataclass(frozen=True)
    class Config:
        """Options of ``floater``."""

        dt: float = option(0.01, "Δt, time from a token to the next", above=0)
        steps: int = option(5, "solver steps from a token to the next", minimum=1, maximum=1000)
        adjoint: bool = option(False, "gradients by the adjoint equation: less memory, less exact")

    formula = "q_i + p_i^q, k_j + p_j^k, v_j + p_j^v,  p_i = p(i·Δt),  dp/dt = h(t, p) learned"
    paper = "Liu et al. 2020 (arXiv 2003.09229)"
    family = "vectors at the input"
    sharing_modes = ("layer", "model")
    position_type = "whole"
    fixed_rotation = True

    def setup(self) -> None:
        """Create the parameters."""
        require_solver("floater")
        self.flow: nn.Module = Dynamics(self.width)
        self.start = nn.Parameter(nn.init.xavier_uniform_(torch.empty(3, self.width)))
        self._solution = SolutionCache()

    def tie(self, first: Self) -> None:
        """Share the network h with the first layer."""
        self.flow = first.flow

    def path(self, count: int, prefix: Tensor | None = None) -> Tensor:
        """Return the vectors of the first positions.

        Args:
            count: number of positions that are needed.
            prefix: (T', 3, C) vectors of the first positions, if already computed.

        Returns:
            (T, 3, C), T = max(count, T').
        """
        prefix = self.start[None] if prefix is None else prefix
        if count <= len(prefix):
            return prefix
        steps, first = self.config.steps, len(prefix) - 1
        if (count - 1) * steps > MAX_STEPS:
            raise UserError(
                f"'floater' takes {steps} solver steps per position, too many for position {count - 1}: use "
                f"positions up to {MAX_STEPS // steps}"
            )
        times = torch.arange(first * steps, (count - 1) * steps + 1, dtype=torch.float64, device=prefix.device)
        times = (times * (self.config.dt / steps)).to(prefix.dtype)
        return torch.cat([prefix, solve(self.flow, prefix[-1], times, steps, adjoint=self.config.adjoint)[1:]])

    def prepare_positions(self, pos: Positions) -> Positions:
        """Return the positions with the vectors p, solved or from the cache."""
        count = int(torch.maximum(pos.q.max(), pos.k.max())) + 1
        if torch.is_grad_enabled():
            path = self.path(count)
        else:
            weights = [self.start, *self.flow.parameters()]
            cached = self._solution.get(weights)
            if cached is None:
                cached = self._solution.put(weights, self.path(count))
            elif len(cached) < count:  # at least double it: in decoding the text grows by one token per call
                cached = self._solution.put(weights, self.path(max(count, 2 * len(cached)), cached))
            path = cached
        if not bool(torch.isfinite(path[count - 1]).all()):  # a value that is not finite stays so
            raise overflow_error("floater")
        return PathPositions(pos.q, pos.k, pos.step, pos.contiguous, pos.tokens, path)

    def rotate(self, x: Tensor, at: Tensor, pos: Positions, key: bool = False) -> Tensor:
        """Add the vectors of queries or keys to x (B, H, n, D); same shape."""
        return self._add_path(x, at, pos, KEY if key else QUERY)

    def value(self, v: Tensor, pos: Positions) -> Tensor:
        """Add the vectors of positions to the values v (B, H, m, D)."""
        return self._add_path(v, pos.k, pos, VALUE)

    def _add_path(self, x: Tensor, at: Tensor, pos: Positions, which: int) -> Tensor:
        if not isinstance(pos, PathPositions):
            pos = self.prepare_positions(pos)
        assert isinstance(pos, PathPositions) and pos.path is not None
        p = pos.path[:, which][at.long().clamp_min(0)]  # (B or 1, n, C)
        if x.shape[1] != self.heads:
            raise UserError(
                f"floater adds vectors of {self.heads} heads to {x.shape[1]} key heads: give it as many key heads as "
                "query heads"
            )
        p = p.unflatten(-1, (x.shape[1], -1)).transpose(1, 2)  # (B or 1, H, n, D), in float32 or better
        return (x + p).to(x.dtype)  # rounded once, since p may be much larger than x
