"""Solver of learned differential equations, and a cache of solutions, for ``clex`` and ``floater``."""

import importlib.util
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from fairseq_rpe.core.errors import UserError


def require_solver(name: str) -> None:
    """Refuse the encoding ``name`` if torchdiffeq is not installed.

    Raises:
        UserError: torchdiffeq is not installed.
    """
    if importlib.util.find_spec("torchdiffeq") is None:
        raise UserError(f"'{name}' needs torchdiffeq, which is not installed: pip install 'fairseq_rpe[ode]'")


def solve(
    derivative: Callable[[Tensor, Tensor], Tensor], start: Tensor, times: Tensor, steps: int, *, adjoint: bool = False
) -> Tensor:
    """Solve dy/dt = derivative(t, y) with a fourth-order Runge-Kutta step (3/8 rule) from each time to the next.

    Args:
        derivative: function of the time () and y (...), returns (...).
        start: y (...) at the first time.
        times: (N,) increasing times.
        steps: return y at every ``steps``-th time.
        adjoint: compute gradients by the adjoint equation, which needs less memory and is less exact.

    Returns:
        y (T, ...) at times 0, steps, 2·steps, …

    Raises:
        UserError: in the backward pass with ``adjoint``, if second derivatives are requested.
    """
    from torchdiffeq import odeint, odeint_adjoint

    solution: Tensor = (odeint_adjoint if adjoint else odeint)(derivative, start, times, method="rk4")[::steps]
    return _OnceDifferentiable.apply(solution) if adjoint else solution


class _OnceDifferentiable(torch.autograd.Function):
    """Identity that raises an error if its backward pass is recorded for second derivatives."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        if torch.is_grad_enabled():
            raise UserError("the adjoint equation gives no second derivatives: leave out adjoint=true")
        return grad


class SolutionCache:
    """Cache of one solution without gradients, valid while the weights it was computed from do not change.

    Weights are compared by value, because torch's version counters miss changes through ``.data``.
    """

    def __init__(self) -> None:
        self._weights: list[Tensor] = []
        self._value: Tensor | None = None

    def get(self, weights: Sequence[Tensor]) -> Tensor | None:
        """Return the cached solution, or None if the weights changed."""
        if len(weights) != len(self._weights) or not all(map(_same, weights, self._weights)):
            self._value = None
        return self._value

    def put(self, weights: Sequence[Tensor], value: Tensor) -> Tensor:
        """Cache and return the solution ``value`` for these weights."""
        self._weights, self._value = [w.detach().clone() for w in weights], value
        return value


def _same(a: Tensor, b: Tensor) -> bool:
    return a.device == b.device and a.dtype == b.dtype and torch.equal(a, b)


def overflow_error(name: str) -> UserError:
    """Return the error for a solution of the encoding ``name`` that is not finite."""
    return UserError(
        f"'{name}': the solution of its differential equation overflows with these weights: train with a lower "
        "learning rate, or load other weights"
    )
