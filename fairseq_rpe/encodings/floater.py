"""FLOATER: positions as the flow of a learned differential equation."""

from dataclasses import dataclass
from typing import Self

import torch
from torch import Tensor, nn

from fairseq_rpe.core.bias import Positions
from fairseq_rpe.core.errors import UserError
from fairseq_rpe.core.spec import option
from fairseq_rpe.encodings.base import Encoding, register
from fairseq_rpe.encodings.ode import Solution, need_solver, overflow, solve

QUERY, KEY, VALUE = range(3)
MOST_STEPS = 1 << 24  # of the solver: float32 cannot tell later times apart


@dataclass(frozen=True)
class Flowed(Positions):
    """Positions with the vectors (T, 3, C) of 0 … T-1, for queries, keys and values."""

    path: Tensor | None = None


class Flow(nn.Module):
    """The dynamics h(τ, p), p (3, C): Linear(C+1 -> C), ReLU, Linear(C+1 -> C), time τ as one more input of both."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.inner, self.outer = nn.Linear(width + 1, width), nn.Linear(width + 1, width)
        for layer in (self.inner, self.outer):
            nn.init.xavier_normal_(layer.weight)
            nn.init.zeros_(layer.bias)

    def forward(self, time: Tensor, p: Tensor) -> Tensor:
        when = time.expand(*p.shape[:-1], 1).to(p.dtype)
        hidden = torch.relu(self.inner(torch.cat([p, when], dim=-1)))
        return self.outer(torch.cat([hidden, when], dim=-1))


@register("floater")
class Floater(Encoding):
    """Vectors that flow from position to position, added to every layer's queries, keys and values.

    dp/dt = h(t, p) from a learned p(0), and p_i = p(i·Δt). After the projections and before 1/sqrt(D) come q_i + p_i^q,
    k_i + p_i^k and v_i + p_i^v, each (C,) and cut into heads. h is a network of two layers for all three. The solver is
    torchdiffeq's RK4, ``steps`` steps to a token. In training the path is solved anew in every forward pass and its
    gradient reaches h and p(0). Without gradients it is kept until the weights change, and longer rows go on from its
    end. As in the authors' code h is one for all layers and p(0) another in each; shared by the model, p(0) is one as
    well, and the path is solved once.

    Unlike in their code no sinusoid is added at the input, and no path is kept over updates.

    Raises UserError: torchdiffeq is not installed, the path overflows, or ``adjoint`` and second derivatives.
    """

    @dataclass(frozen=True)
    class Config:
        dt: float = option(0.01, "Δt, time from a token to the next", above=0)
        steps: int = option(5, "steps of the solver from a token to the next", minimum=1, maximum=1000)
        adjoint: bool = option(False, "gradients by the adjoint equation: memory for the path alone, less exact")

    formula = "q_i + p_i^q, k_j + p_j^k, v_j + p_j^v,  p_i = p(i·Δt),  dp/dt = h(t, p) learned"
    paper = "Liu et al. 2020 (arXiv 2003.09229)"
    sharing_modes = ("layer", "model")
    position_type = "whole"
    fixed_rotation = True

    def setup(self) -> None:
        need_solver("floater")
        self.flow: nn.Module = Flow(self.width)
        self.start = nn.Parameter(nn.init.xavier_uniform_(torch.empty(3, self.width)))
        self._solution = Solution()

    def tie(self, first: Self) -> None:
        self.flow = first.flow

    def path(self, count: int, known: Tensor | None = None) -> Tensor:
        """p (T, 3, C) of the positions 0 … T-1, T = ``count`` or more; ``known``: the first of them."""
        known = self.start[None] if known is None else known
        if count <= len(known):
            return known
        steps, first = self.config.steps, len(known) - 1
        if (count - 1) * steps > MOST_STEPS:
            raise UserError(
                f"'floater' takes {steps} steps to each position, and position {count - 1} is too far for that: use "
                f"positions up to {MOST_STEPS // steps}"
            )
        times = torch.arange(first * steps, (count - 1) * steps + 1, dtype=torch.float64, device=known.device)
        times = (times * (self.config.dt / steps)).to(known.dtype)
        return torch.cat([known, solve(self.flow, known[-1], times, steps, adjoint=self.config.adjoint)[1:]])

    def prepare_positions(self, pos: Positions) -> Positions:
        count = int(torch.maximum(pos.q.max(), pos.k.max())) + 1
        if torch.is_grad_enabled():
            path = self.path(count)
        else:
            weights = [self.start, *self.flow.parameters()]
            known = self._solution.of(weights)
            if known is None:
                known = self._solution.keep(weights, self.path(count))
            elif len(known) < count:  # twice as far: a text that grows by a token asks again for each
                known = self._solution.keep(weights, self.path(max(count, 2 * len(known)), known))
            path = known
        if not bool(torch.isfinite(path[count - 1]).all()):  # from there on it is not finite anywhere
            raise overflow("floater")
        return Flowed(pos.q, pos.k, pos.step, pos.contiguous, pos.tokens, path)

    def rotate(self, x: Tensor, at: Tensor, pos: Positions, key: bool = False) -> Tensor:
        return self._added(x, at, pos, KEY if key else QUERY)

    def value(self, v: Tensor, pos: Positions) -> Tensor:
        return self._added(v, pos.k, pos, VALUE)

    def _added(self, x: Tensor, at: Tensor, pos: Positions, which: int) -> Tensor:
        if not isinstance(pos, Flowed):
            pos = self.prepare_positions(pos)
        assert isinstance(pos, Flowed) and pos.path is not None
        p = pos.path[:, which][at.long().clamp_min(0)]
        return x + p.unflatten(-1, (x.shape[1], -1)).transpose(1, 2).to(x.dtype)
