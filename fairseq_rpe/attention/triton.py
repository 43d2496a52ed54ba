"""Attention with Triton kernels for biases of the distance and curves, learned ones included, in O(n) memory.

A backward pass keeps the log-sum-exp and recomputes the weights. The gradient of a table comes out as (H, R), that of a
curve as those of its pieces, far and near, so ordinary autograd carries them on to whatever made them.
"""

from __future__ import annotations

import functools
import importlib.util
import math
import os
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import FunctionCtx, once_differentiable
from torch.nn import functional as F

from ..core import Curve, Positions, Toeplitz, UserError
from .curve import pieces_of
from .plan import Plan
from .prune import check_pruning

WIDTHS = range(32, 257, 8)  # head widths: below it tensor cores run empty, above it a block leaves no room on the chip
DTYPES = (torch.float16, torch.bfloat16, torch.float32)
LOG2_E = math.log2(math.e)
PARTS_OF_CURVE = 6


def triton(q: Tensor, k: Tensor, v: Tensor, plan: Plan, dropout: float = 0.0) -> Tensor:
    """The same as :func:`~fairseq_rpe.attention.reference.reference` for Toeplitz forms and for no bias.

    q: (B, H, n, D), k, v: (B, H, m, D) of one dtype, D a multiple of 8 from 32 to 256; gives (B, H, n, D) of it.
    Products, softmax and sums are float32. Gradients of gradients are not available. What queries that are
    padding themselves give has no meaning, as their positions have none. Pruning is the sdpa backend's: padded rows,
    irregular positions and incremental decoding are exact all the same.

    Raises:
        UserError: what :func:`refusal` names, or what :func:`~fairseq_rpe.attention.prune.check_pruning` refuses.
    """
    reason = refusal(q, k, v, plan, dropout)
    if reason is not None:
        raise UserError(reason)
    if plan.prune:
        check_pruning(q, k, v, plan, dropout)
        if plan.padding is None and q.shape[2] == k.shape[2] and _uniform(plan):
            from .triton_prune import pruned

            return pruned(q, k, v, _by_distance(plan.form, k.shape[2]), plan.prune)
    return TritonAttention.apply(q, k, v, plan.padding, *_bias(plan, k.shape[2]))


def _bias(plan: Plan, m: int) -> tuple[Tensor, ...]:
    """The tensors that :class:`TritonAttention` makes the bias of."""
    form = plan.form
    if form is None:
        return ()
    if isinstance(form, Curve):
        pieces = pieces_of(form, plan)
        return pieces.value, pieces.slope, form.far, form.near, pieces.ends, pieces.middle
    if _uniform(plan):
        return (_by_distance(form, m),)
    return form.table, *_columns(form, plan.positions)


def refusal(q: Tensor, k: Tensor, v: Tensor, plan: Plan, dropout: float = 0.0) -> str | None:
    """Why this backend cannot compute this, and what can; None if it can."""
    width, form = q.shape[-1], plan.form
    if importlib.util.find_spec("triton") is None:
        return "backend 'triton' needs the package triton: pip install triton, or use 'sdpa'"
    if not q.is_cuda and not interpreted():
        return "backend 'triton' needs a GPU: use 'sdpa' (or, to test kernels, set TRITON_INTERPRET=1 from the start)"
    if q.is_cuda and not _supported(q.device):
        return "backend 'triton' needs an NVIDIA GPU of compute capability 8.0 or later: use 'flex' or 'sdpa'"
    if plan.remap is not None:
        return "this encoding changes the scores, which backend 'triton' never has: use 'reference'"
    if form is not None and not isinstance(form, (Toeplitz, Curve)):
        return (
            "backend 'triton' takes a bias that is a table or a curve of straight pieces, which this is not: use 'sdpa'"
        )
    if dropout > 0:
        return f"backend 'triton' has no attention dropout, and {dropout:g} is asked for: set it to 0 or use 'sdpa'"
    if q.dtype not in DTYPES or k.dtype != q.dtype or v.dtype != q.dtype:
        given = ", ".join(str(x.dtype).removeprefix("torch.") for x in (q, k, v))
        return f"backend 'triton' takes q, k, v of one type, float16, bfloat16 or float32, not {given}: use 'sdpa'"
    if width not in WIDTHS:
        return f"backend 'triton' takes head widths from 32 to 256 in steps of 8, not {width}: use 'sdpa'"
    learned = isinstance(form, Toeplitz) and form.table.requires_grad and torch.is_grad_enabled()
    if learned and not _uniform(plan) and torch.are_deterministic_algorithms_enabled():
        return "backend 'triton' has no deterministic gradient of a learned table at irregular positions: use 'sdpa'"
    return None


@functools.cache
def _supported(device: torch.device) -> bool:
    return torch.version.hip is None and torch.cuda.get_device_capability(device) >= (8, 0)


def interpreted() -> bool:
    """Whether kernels run in Triton's interpreter, on the CPU."""
    return os.environ.get("TRITON_INTERPRET") == "1"


def _uniform(plan: Plan) -> bool:
    """Whether the column of a query and a key follows from their indices alone."""
    return plan.positions.contiguous and plan.positions.step == plan.form.step


def _by_distance(form: Toeplitz, m: int) -> Tensor:
    """(H, m) table of distances 0 … m-1 steps; beyond the table's end its last column."""
    table = form.table[:, form.origin : form.origin + m]
    return torch.cat([table, form.table[:, -1:].expand(-1, m - table.shape[1])], dim=1)


def _columns(form: Toeplitz, pos: Positions) -> tuple[Tensor, Tensor]:
    """int32 a (B or 1, n) and b (B or 1, m) with a_i - b_j the column of the table, before clamping."""
    first = pos.k[:, :1]  # a common offset need not be a multiple of the step
    a, b = (torch.round((x - first) / form.step).int().contiguous() for x in (pos.q, pos.k))
    return a + form.origin, b


class TritonAttention(torch.autograd.Function):
    """softmax(q·kᵀ/sqrt(D) + bias) v for j <= i.

    padding: (B, m) bool or None. tensors: none for no bias; table (H, R) by distance in tokens; table, at_q (B or 1, n)
    and at_k (B or 1, m) for the column at_q[i] - at_k[j]; or value, slope, far, near, ends and middle of a Curve.
    """

    @staticmethod
    def forward(ctx: FunctionCtx, q: Tensor, k: Tensor, v: Tensor, padding: Tensor | None, *tensors: Tensor) -> Tensor:
        from .triton_launch import FORWARD, launch

        q, k = _dense(q), _dense(k)
        v = _laid_out(v, k)
        out = torch.empty_like(q)
        lse = torch.empty(q.shape[:3], dtype=torch.float32, device=q.device)
        launch(FORWARD, q.shape[2], "BLOCK_M", _shared(q, k, v, padding, *tensors), out=out, lse=lse)
        ctx.save_for_backward(q, k, v, padding, out, lse, *tensors)
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: FunctionCtx, grad: Tensor) -> tuple[Tensor | None, ...]:
        from .triton_curve import curve_gradients
        from .triton_launch import KEY_GRADIENT, QUERY_GRADIENT, launch
        from .triton_table import table_gradient

        q, k, v, padding, out, lse, *tensors = ctx.saved_tensors
        shared = _shared(q, k, v, padding, *tensors)
        shared |= {"grad": _laid_out(grad, q), "lse": lse, "delta": torch.empty_like(lse)}
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


def _dense(x: Tensor) -> Tensor:
    """x itself if memory like it has its strides and rows of D neighbours, otherwise a copy."""
    like = torch.empty_like(x, device="meta")
    return x if x.stride(-1) == 1 and like.stride() == x.stride() else x.contiguous()


def _laid_out(x: Tensor, like: Tensor) -> Tensor:
    """x in the memory layout of ``like``, which has its shape."""
    return x if x.stride() == like.stride() else torch.empty_like(like).copy_(x)


def _shared(q: Tensor, k: Tensor, v: Tensor, padding: Tensor | None, *tensors: Tensor) -> dict[str, Any]:
    """The kernels' common arguments by name. In place of a tensor that is not there goes q, which is then not read."""
    from . import triton_tiles as tiles

    width, bias, table, at_q, at_k = q.shape[3], tiles.NONE.value, None, None, None
    if len(tensors) == PARTS_OF_CURVE:
        value, slope, far, near, ends, middle = tensors
        steps = (value.shape[1] - 1).bit_length()
        bias, table = tiles.CURVE.value + steps, _pieces(ends, middle, value, slope, 1 << steps)
        at_q, at_k = near.float().contiguous(), F.pad(far.float(), (0, tiles.TABLE_MARGIN))[None]
    elif tensors:
        bias = tiles.DISTANCE.value if len(tensors) == 1 else tiles.POSITIONS.value
        table, at_q, at_k = (*tensors, None, None)[:3]
        margin = tiles.TABLE_MARGIN if at_q is None else 0
        table = F.pad(table.float() * LOG2_E, (0, margin)).contiguous()
    if padding is not None:
        padding = padding.contiguous().view(torch.uint8)
    found = {"q": q, "k": k, "v": v, "table": table, "at_q": at_q, "at_k": at_k, "padding": padding}
    return {
        **{name: q if x is None else x for name, x in found.items()},
        **dict(zip(("q_b", "q_h", "q_n"), q.stride(), strict=False)),
        **dict(zip(("k_b", "k_h", "k_n"), k.stride(), strict=False)),
        "at_q_b": _batch_stride(at_q),
        "at_k_b": _batch_stride(at_k),
        "first": None,
        "n": q.shape[2],
        "m": k.shape[2],
        "columns": 1 if table is None else table.shape[1],
        "scale": width**-0.5 * LOG2_E,
        "WIDTH": width,
        "BLOCK_D": 1 << (width - 1).bit_length(),
        "BIAS": bias,
        "PADDED": padding is not None,
    }


def _pieces(ends: Tensor, middle: Tensor, value: Tensor, slope: Tensor, count: int) -> Tensor:
    """(H, 4 count): end, middle, and value and slope in base 2, of each piece and of more that no x is in."""
    columns = [F.pad(ends, (0, count - len(ends)), value=math.inf), F.pad(middle, (0, count - len(middle)))]
    lines = [F.pad(x.float() * LOG2_E, (0, count - x.shape[1])) for x in (value, slope)]
    return torch.stack([*(x.float().expand_as(lines[0]) for x in columns), *lines], dim=2).flatten(1)


def _batch_stride(at: Tensor | None) -> int:
    """Elements from a sequence's positions to the next one's; 0 where all share them."""
    return 0 if at is None or at.shape[0] == 1 else at.shape[1]
