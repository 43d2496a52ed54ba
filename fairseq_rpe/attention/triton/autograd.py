"""The Triton kernels as one differentiable function.

A backward pass keeps the log-sum-exp and recomputes the weights. The gradient of a table comes out as (H, R), that of a
curve as those of its pieces, far and near, so ordinary autograd carries them on to whatever made them.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.autograd.function import FunctionCtx, once_differentiable

from ...core import Curve
from ..curve import pieces_of
from ..plan import Plan
from ..toeplitz import by_distance, columns, evenly_spaced
from .arguments import PARTS_OF_CURVE, arguments, arranged, laid_out
from .curve_gradient import curve_gradients
from .table_gradient import table_gradient
from .tuning import FORWARD, KEY_GRADIENT, QUERY_GRADIENT, launch


def attend(q: Tensor, k: Tensor, v: Tensor, plan: Plan) -> Tensor:
    """Attention without pruning: (B, H, n, D)."""
    form, tensors = plan.form, ()
    if isinstance(form, Curve):
        pieces = pieces_of(form, plan)
        tensors = pieces.value, pieces.slope, form.far, form.near, pieces.ends, pieces.middle
    elif form is not None and evenly_spaced(form, plan.positions):
        tensors = (by_distance(form, k.shape[2]),)
    elif form is not None:
        tensors = form.table, *columns(form, plan.positions)
    return TritonAttention.apply(q, k, v, plan.padding, *tensors)


class TritonAttention(torch.autograd.Function):
    """softmax(q·kᵀ/sqrt(D) + bias) v for j <= i.

    padding: (B, m) bool or None. tensors: none for no bias; table (H, R) by distance in tokens; table, at_q (B or 1, n)
    and at_k (B or 1, m) for the column at_q[i] - at_k[j]; or value, slope, far, near, ends and middle of a Curve.
    """

    @staticmethod
    def forward(ctx: FunctionCtx, q: Tensor, k: Tensor, v: Tensor, padding: Tensor | None, *tensors: Tensor) -> Tensor:
        q, k, v = arranged(q, k, v)
        out = torch.empty_like(q)
        lse = torch.empty(q.shape[:3], dtype=torch.float32, device=q.device)
        launch(FORWARD, q.shape[2], "BLOCK_M", arguments(q, k, v, padding, *tensors), out=out, lse=lse)
        ctx.save_for_backward(q, k, v, padding, out, lse, *tensors)
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: FunctionCtx, grad: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, padding, out, lse, *tensors = ctx.saved_tensors
        shared = arguments(q, k, v, padding, *tensors)
        shared |= {"grad": laid_out(grad, q), "lse": lse, "delta": torch.empty_like(lse)}
        dq, dk, dv = (torch.empty_like(x) for x in (q, k, v))
        factor = q.shape[-1] ** -0.5
        # this one writes delta, which the others read
        launch(QUERY_GRADIENT, q.shape[2], "BLOCK_M", shared, out=out, dq=dq, factor=factor)
        launch(KEY_GRADIENT, k.shape[2], "BLOCK_N", shared, dk=dk, dv=dv, factor=factor)
        needed = ctx.needs_input_grad[4:]
        found: list[Tensor | None] = [None] * len(tensors)
        if len(tensors) == PARTS_OF_CURVE:
            found[:4] = curve_gradients(shared, needed[:4], *tensors[:4])
        elif any(needed):
            found[0] = table_gradient(shared, tensors[0]).to(tensors[0].dtype)
        return dq, dk, dv, None, *found
