"""What encodings that follow a learned differential equation share: the solver, and solutions that are kept."""

import importlib.util
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from fairseq_rpe.core.errors import UserError


def need_solver(name: str) -> None:
    """Raises UserError: the package torchdiffeq is missing."""
    if importlib.util.find_spec("torchdiffeq") is None:
        raise UserError(f"'{name}' needs torchdiffeq, which is not installed: pip install 'fairseq_rpe[ode]'")


def solve(
    speed: Callable[[Tensor, Tensor], Tensor], start: Tensor, times: Tensor, steps: int, *, adjoint: bool = False
) -> Tensor:
    """y (T, ...) at every ``steps``-th of ``times``, from the first, where it is ``start``; dy/dt = speed(t, y).

    A Runge-Kutta step of fourth order (the 3/8 rule) goes from each time to the next.

    Raises:
        UserError: in the backward pass with ``adjoint``, where a second derivative is to follow.
    """
    from torchdiffeq import odeint, odeint_adjoint

    solution: Tensor = (odeint_adjoint if adjoint else odeint)(speed, start, times, method="rk4")[::steps]
    return _OnceDifferentiable.apply(solution) if adjoint else solution


class _OnceDifferentiable(torch.autograd.Function):
    """The identity, which raises an error where a graph of its backward pass is recorded."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        if torch.is_grad_enabled():
            raise UserError("the adjoint equation gives no second derivatives: leave adjoint=true out")
        return grad


class Solution:
    """A solution that is kept without gradients for as long as the weights that it was made of stay as they are.

    Weights are compared by value: a change through ``.data``, which no counter of torch's sees, counts.
    """

    def __init__(self) -> None:
        self._weights: list[Tensor] = []
        self._value: Tensor | None = None

    def of(self, weights: Sequence[Tensor]) -> Tensor | None:
        if len(weights) != len(self._weights) or not all(map(_same, weights, self._weights)):
            self._value = None
        return self._value

    def keep(self, weights: Sequence[Tensor], value: Tensor) -> Tensor:
        self._weights, self._value = [w.detach().clone() for w in weights], value
        return value


def _same(a: Tensor, b: Tensor) -> bool:
    return a.device == b.device and a.dtype == b.dtype and torch.equal(a, b)


def overflow(name: str) -> UserError:
    """The error for a solution that is not finite where it is needed."""
    return UserError(
        f"'{name}': the solution of its differential equation overflows with these weights: train with a lower "
        "learning rate, or load other weights"
    )
