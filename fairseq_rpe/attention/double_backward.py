"""Second derivatives of operations whose backward pass autograd cannot see into: kernels, and sums taken in place.

Autograd would take what such a backward pass returns for constants. With ``create_graph=True`` the backward pass is
therefore an operation of its own, :func:`differentiable`, whose derivative is that of a formula in plain torch.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from fairseq_rpe.core.errors import UserError

Gradients = tuple[Tensor | None, ...]


def differentiable(
    compute: Callable[[], Gradients],
    formula: Callable[..., Tensor],
    grad: Tensor,
    tensors: tuple[Tensor, ...],
    needs: tuple[bool, ...],
    parameters: tuple[Tensor, ...] = (),
) -> Gradients:
    """The gradients that a custom backward pass returns, differentiable where a graph of that pass is recorded.

    Only a second derivative evaluates ``formula``, so memory for its intermediate results is taken there alone.

    Args:
        compute: computes the gradients of ``tensors`` and then of ``parameters``, None where none is needed.
        formula: the operation as a differentiable function of ``tensors``; it draws no random numbers.
        grad: gradient of the operation's output.
        tensors: inputs of the operation.
        needs: whether a gradient of each of ``tensors`` and then of each of ``parameters`` is needed.
        parameters: leaves that ``formula`` uses without receiving them.

    Returns:
        What ``compute`` returns.

    Raises:
        UserError: in the backward pass of the result, where its graph is recorded too: third derivatives.
    """
    if not torch.is_grad_enabled():  # create_graph=True records the graph of the backward pass
        return compute()
    gradients: Gradients = _Gradients.apply(compute, formula, needs, len(tensors), grad, *tensors, *parameters)
    return gradients


class _Gradients(torch.autograd.Function):
    """Gradients as a function of the output's gradient, the inputs and the parameters."""

    @staticmethod
    def forward(
        ctx: Any,
        compute: Callable[[], Gradients],
        formula: Callable[..., Tensor],
        needs: tuple[bool, ...],
        count: int,
        grad: Tensor,
        *inputs: Tensor,
    ) -> Gradients:
        ctx.save_for_backward(grad, *inputs[:count])
        # saved tensors may come back as copies, and the formula uses the parameters themselves
        ctx.parameters, ctx.formula, ctx.needs = inputs[count:], formula, needs
        return compute()

    @staticmethod
    def backward(ctx: Any, *incoming: Tensor | None) -> tuple[Any, ...]:
        if torch.is_grad_enabled():
            raise UserError(
                "third derivatives are available from plain torch operations only: attend with backend='reference'"
            )
        grad, *tensors = (x.detach() for x in ctx.saved_tensors)
        inputs = [*tensors, *ctx.parameters]
        grad.requires_grad_()
        for x, need in zip(tensors, ctx.needs, strict=False):
            x.requires_grad_(need)
        with torch.enable_grad(), torch.autocast(grad.device.type, enabled=False):
            out = ctx.formula(*tensors)
            leaves = [x for x, need in zip(inputs, ctx.needs, strict=True) if need]
            first = torch.autograd.grad(out, leaves, grad, create_graph=True, allow_unused=True)
        cotangents = [x for x, need in zip(incoming, ctx.needs, strict=True) if need]
        pairs = [
            (x, y)
            for x, y in zip(first, cotangents, strict=True)
            if x is not None and y is not None and x.requires_grad
        ]
        second: list[Tensor | None] = [None] * (1 + len(leaves))
        if pairs:
            outputs, seeds = zip(*pairs, strict=True)
            second = list(torch.autograd.grad(outputs, [grad, *leaves], seeds, allow_unused=True))
        of_inputs = iter(second[1:])
        return None, None, None, None, second[0], *(next(of_inputs) if need else None for need in ctx.needs)


def attention(q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None, keep: Tensor | None = None) -> Tensor:
    """softmax(q·kᵀ/sqrt(D) + bias) v as plain torch operations; O(n·m) memory.

    Args:
        q: (B, H, n, D).
        k: (B, H, m, D).
        v: (B, H, m, D).
        bias: broadcasts to (B, H, n, m), or None; -inf where a query does not see a key. Each query sees some key.
        keep: (B, H, n, m) scaled dropout mask, or None.

    Returns:
        (B, H, n, D) in v's dtype, computed in float32 or better.
    """
    wide = torch.promote_types(q.dtype, torch.float32)
    scores = torch.matmul(q.to(wide), k.to(wide).mT) * q.shape[3] ** -0.5  # (B, H, n, m)
    weights = (scores if bias is None else scores + bias).softmax(-1)
    weights = weights if keep is None else weights * keep
    return torch.matmul(weights, v.to(wide)).to(v.dtype)


def future(n: int, m: int, like: Tensor) -> Tensor:
    """(n, m) of 0 and, where key j is behind query i of the last n of m tokens, -inf; float32 or better."""
    wide = torch.promote_types(like.dtype, torch.float32)
    return torch.full((n, m), float("-inf"), dtype=wide, device=like.device).triu(m - n + 1)
