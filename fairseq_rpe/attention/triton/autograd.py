"""The Triton kernels as functions of tensors: differentiable, and pruned.

A backward pass keeps the log-sum-exp and recomputes the weights. The gradient of a table comes out as (H, R), that of a
curve as those of its pieces, far and near, so ordinary autograd carries them on to whatever made them.
"""

import math
from typing import Any

import torch
import triton
from torch import Tensor
from torch.nn import functional as F

from fairseq_rpe.attention.double_backward import attention, differentiable, future
from fairseq_rpe.attention.plan import Plan, by_distance, evenly_spaced
from fairseq_rpe.attention.prune import BLOCK, left_out, level, norms, tail_bounds
from fairseq_rpe.attention.scaled_distance_bias import dense_bias, pieces_of
from fairseq_rpe.attention.toeplitz_attention import LOG2E
from fairseq_rpe.attention.triton.bias_gradient import bias_gradients
from fairseq_rpe.attention.triton.tiles import CURVE, DISTANCE, MOST_APART, NONE, POSITIONS, TABLE_MARGIN
from fairseq_rpe.attention.triton.tuning import FORWARD, KEY_GRADIENT, QUERY_GRADIENT, launch
from fairseq_rpe.core.bias import ScaledDistanceBias
from fairseq_rpe.core.score_mod import columns


def attend(q: Tensor, k: Tensor, v: Tensor, plan: Plan) -> Tensor:
    """Attention without pruning: (B, H, n, D)."""
    form = plan.form
    tensors: tuple[Tensor, ...] = ()
    if isinstance(form, ScaledDistanceBias):
        pieces = pieces_of(form, plan)
        tensors = pieces.value, pieces.slope, form.far, form.near, pieces.ends, pieces.middle
    elif form is not None and evenly_spaced(form, plan.positions):
        tensors = (by_distance(form, k.shape[2]),)
    elif form is not None:
        tensors = form.table, *columns(form, plan.positions)
    # outside of the function, so that second derivatives reach the tensors that were copied
    return TritonAttention.apply(*_arranged(q, k, v), plan.seen_until, *tensors)


@torch.no_grad()
def pruned(q: Tensor, k: Tensor, v: Tensor, table: Tensor, eps: float) -> Tensor:
    """The same as :func:`~fairseq_rpe.attention.prune.pruned`, where the bound of the error is proved.

    The kernel runs twice: over the nearest keys, whose log-sum-exp the bound needs, and over all that are kept.
    """
    q, k, v = _arranged(q, k, v)
    table = level(table)
    batch, heads, n, _ = q.shape
    blocks = triton.cdiv(n, BLOCK)
    out, lse = torch.empty_like(q), torch.empty(q.shape[:3], dtype=torch.float32, device=q.device)
    first = (torch.arange(blocks, dtype=torch.int32, device=q.device) - 1).clamp_min(0) * BLOCK
    first = first.expand(batch, heads, blocks).contiguous()
    shared = arguments(q, k, v, None, table) | {"first": first, "out": out, "low": None, "lse": lse}
    launch(FORWARD, n, "BLOCK_M", shared)
    offset, norm, radius = norms(q, k)
    low, tail = offset - lse * math.log(2), tail_bounds(table.float())
    for block in range(2, blocks):
        rows, before = slice(block * BLOCK, (block + 1) * BLOCK), slice(block - 1)
        first[:, :, block] = left_out(low[:, :, rows], norm[:, :, rows], radius[:, :, before], tail, block, eps)
    launch(FORWARD, n, "BLOCK_M", shared)
    return out


class TritonAttention(torch.autograd.Function):
    """softmax(q·kᵀ/sqrt(D) + bias) v for j <= i.

    q, k, v: as :func:`_arranged` returns them. until: (B, m) int32, the last query that sees each key, -1 at
    padding; None: the row's last sees all of them. tensors: none for no bias; table (H, R) by distance in tokens;
    table, at_q (B or 1, n) and at_k (B or 1, m) for the column at_q[i] - at_k[j]; or value, slope, far, near, ends and
    middle of a Curve.
    Second derivatives are those of the dense formula, in O(n²) memory.
    """

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, until: Tensor | None, *tensors: Tensor) -> Tensor:
        out = torch.empty_like(q)
        lse = torch.empty(q.shape[:3], dtype=torch.float32, device=q.device)
        # in half precision: delta = Σ dO·O of an output as rounded is off by more than what a peaked row sums to
        low = torch.empty_like(q) if q.dtype != torch.float32 and any(ctx.needs_input_grad) else None
        launch(FORWARD, q.shape[2], "BLOCK_M", arguments(q, k, v, until, *tensors), out=out, low=low, lse=lse)
        ctx.save_for_backward(q, k, v, until, out, low, lse, *tensors)
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        saved = ctx.saved_tensors  # may be unpacked only once, under activation checkpointing
        q, k, v, until, _, _, _, *tensors = saved

        def formula(q: Tensor, k: Tensor, v: Tensor, *tensors: Tensor) -> Tensor:
            bias, empty = _dense(q, k, until, *tensors)
            return attention(q, k, v, bias).masked_fill(empty, 0.0)

        needs = *ctx.needs_input_grad[:3], *ctx.needs_input_grad[4:]
        dq, dk, dv, *others = differentiable(
            lambda: TritonAttention.gradients(ctx, grad, saved), formula, grad, (q, k, v, *tensors), needs
        )
        return dq, dk, dv, None, *others

    @staticmethod
    def gradients(ctx: Any, grad: Tensor, saved: tuple[Any, ...]) -> tuple[Tensor | None, ...]:
        """Of q, k, v and ``tensors``; ``saved``: by the forward pass."""
        q, k, v, until, out, low, lse, *tensors = saved
        shared = arguments(q, k, v, until, *tensors)
        shared |= {"grad": _laid_out(grad, q), "lse": lse, "delta": torch.empty_like(lse)}
        dq, dk, dv = (torch.empty_like(x) for x in (q, k, v))
        factor = q.shape[-1] ** -0.5
        # this one writes delta, which the others read
        launch(QUERY_GRADIENT, q.shape[2], "BLOCK_M", shared, out=out, low=low, dq=dq, factor=factor)
        launch(KEY_GRADIENT, k.shape[2], "BLOCK_N", shared, dk=dk, dv=dv, factor=factor)
        return dq, dk, dv, *bias_gradients(shared, ctx.needs_input_grad[4:], tensors)


def _dense(q: Tensor, k: Tensor, until: Tensor | None, *tensors: Tensor) -> tuple[Tensor, Tensor]:
    """The bias of :class:`TritonAttention`'s tensors, -inf at hidden keys, and (B or 1, 1, n, 1) rows that see none."""
    n, m = q.shape[2], k.shape[2]
    hidden = future(n, m, q)[None, None]  # (1, 1, n, m)
    if until is not None:
        query = torch.arange(m - n, m, device=q.device)[:, None]  # (n, 1), among the m tokens
        hidden = hidden.masked_fill(query > until[:, None, None], float("-inf"))  # (B, 1, n, m)
    empty = torch.isneginf(hidden).all(-1, keepdim=True)
    hidden = hidden.masked_fill(empty, 0.0)
    if len(tensors) == 6:
        bias = dense_bias(m, q, *tensors).nan_to_num(neginf=0.0)
    elif tensors:
        index = torch.arange(m, device=q.device)[None]
        table, at_q, at_k = tensors if len(tensors) == 3 else (tensors[0], index[:, m - n :], index)
        column = (at_q[:, :, None] - at_k[:, None]).long().clamp(0, table.shape[1] - 1)  # (B or 1, n, m)
        bias = table[:, column].transpose(0, 1)
    else:
        bias = torch.zeros_like(hidden)
    return bias + hidden, empty


def _arranged(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """The same numbers with rows of D neighbours and the strides of memory like them, and v in the layout of k.

    Rows further apart than addresses inside a tile reach come closer together, too.
    """
    strides = [torch.empty_like(x, device="meta").stride() for x in (q, k)]
    q, k = (
        x if x.stride(-1) == 1 and x.stride() == s and s[2] <= MOST_APART else x.contiguous()
        for x, s in zip((q, k), strides, strict=True)
    )
    return q, k, _laid_out(v, k)


def _laid_out(x: Tensor, like: Tensor) -> Tensor:
    """x in the memory layout of ``like``, which has its shape."""
    return x if x.stride() == like.stride() else torch.empty_like(like).copy_(x)


def arguments(q: Tensor, k: Tensor, v: Tensor, until: Tensor | None, *tensors: Tensor) -> dict[str, Any]:
    """The kernels' common arguments by name, of :class:`TritonAttention`'s.

    In place of a tensor that is not there goes q, which is then not read.
    """
    width, bias = q.shape[3], NONE.value
    table: Tensor | None = None
    at_q: Tensor | None = None
    at_k: Tensor | None = None
    if len(tensors) == 6:
        value, slope, far, near, ends, middle = tensors
        steps = (value.shape[1] - 1).bit_length()
        bias, table = CURVE.value + steps, _pieces(ends, middle, value, slope, 1 << steps)
        at_q, at_k = near.float().contiguous(), F.pad(far.float(), (0, TABLE_MARGIN))[None]
    elif tensors:
        bias = DISTANCE.value if len(tensors) == 1 else POSITIONS.value
        if bias == POSITIONS.value:
            _, at_q, at_k = tensors
        margin = TABLE_MARGIN if at_q is None else 0
        table = F.pad(tensors[0].float() * LOG2E, (0, margin)).contiguous()
    until = None if until is None else until.contiguous()
    given = {"q": q, "k": k, "v": v, "table": table, "at_q": at_q, "at_k": at_k, "until": until}
    found: dict[str, Any] = {name: q if x is None else x for name, x in given.items()}
    found |= zip(("q_b", "q_h", "q_n", "k_b", "k_h", "k_n"), (*q.stride()[:3], *k.stride()[:3]), strict=True)
    # elements from a sequence's positions to the next one's; 0 where all share them
    strides = (0 if x is None or len(x) == 1 else x.shape[1] for x in (at_q, at_k))
    found |= zip(("at_q_b", "at_k_b"), strides, strict=True)
    found |= {"n": q.shape[2], "m": k.shape[2], "columns": 1 if table is None else table.shape[1], "first": None}
    found |= {"scale": width**-0.5 * LOG2E, "WIDTH": width, "BLOCK_D": 1 << (width - 1).bit_length()}
    return found | {"BIAS": bias, "PADDED": until is not None}


def _pieces(ends: Tensor, middle: Tensor, value: Tensor, slope: Tensor, count: int) -> Tensor:
    """(H, 4 count): end, middle, and value and slope in base 2, of each piece and of more that no x is in."""
    columns = [F.pad(ends, (0, count - len(ends)), value=math.inf), F.pad(middle, (0, count - len(middle)))]
    lines = [F.pad(x.float() * LOG2E, (0, count - x.shape[1])) for x in (value, slope)]
    return torch.stack([*(x.float().expand_as(lines[0]) for x in columns), *lines], dim=2).flatten(1)
