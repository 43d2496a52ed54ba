"""The Triton kernels as functions of tensors: differentiable, and pruned.

A backward pass uses the saved log-sum-exp and recomputes the weights. It returns the gradient (H, R) of a table, or
those of a ScaledDistanceBias's pieces, distance_values and query_scale. Ordinary autograd continues from there.
"""

import math
from typing import Any, NamedTuple

import torch
import triton
from torch import Tensor
from torch.nn import functional as F

from fairseq_rpe.attention.double_backward import causal_bias, dense_attention, differentiable_gradients
from fairseq_rpe.attention.plan import AttentionPlan, is_evenly_spaced, table_by_distance
from fairseq_rpe.attention.prune import BLOCK, block_bias_bounds, first_kept_key, score_bound_terms, subtract_max
from fairseq_rpe.attention.scaled_distance_bias import dense_scaled_distance_bias, visible_pieces
from fairseq_rpe.attention.toeplitz_attention import LOG2E
from fairseq_rpe.attention.triton.bias_gradient import bias_gradients
from fairseq_rpe.attention.triton.tiles import CURVE, DISTANCE, MOST_APART, NONE, POSITIONS, TABLE_MARGIN
from fairseq_rpe.attention.triton.tuning import FORWARD, KEY_GRADIENT, QUERY_GRADIENT, launch
from fairseq_rpe.core.bias import ScaledDistanceBias, ToeplitzBias
from fairseq_rpe.core.score_mod import column_offsets

# BIAS of the kernels by the number of a bias's tensors, which TritonAttention lists; to CURVE the steps of the binary
# search are added
_BIAS_BY_COUNT = {0: NONE.value, 1: DISTANCE.value, 3: POSITIONS.value, 6: CURVE.value}


def attend(q: Tensor, k: Tensor, v: Tensor, plan: AttentionPlan) -> Tensor:
    """Compute attention (B, H, n, D) without pruning.

    Args:
        q: (B, H, n, D).
        k: (B, H, m, D).
        v: (B, H, m, D).
        plan: plan without pruning that ``triton.refusal_reason`` does not refuse.
    """
    bias = plan.bias
    tensors: tuple[Tensor, ...] = ()
    if isinstance(bias, ScaledDistanceBias):
        pieces = visible_pieces(bias, plan)
        lines = pieces.value, pieces.slope, bias.distance_values, bias.query_scale
        tensors = *lines, pieces.breakpoints, pieces.midpoints
    elif isinstance(bias, ToeplitzBias) and is_evenly_spaced(bias, plan.positions):
        tensors = (table_by_distance(bias, k.shape[2]),)
    elif isinstance(bias, ToeplitzBias):
        tensors = bias.table, *column_offsets(bias, plan.positions)
    # copies are made outside of the function, so that second derivatives reach the originals
    out: Tensor = TritonAttention.apply(*_arrange_memory(q, k, v), plan.visible_until, *tensors)
    return out


@torch.no_grad()
def attend_pruned(q: Tensor, k: Tensor, v: Tensor, table: Tensor, eps: float) -> Tensor:
    """Compute what :func:`~fairseq_rpe.attention.prune.pruned_attention` does; the error bound is proved there.

    The kernel runs twice: over the nearest keys, whose log-sum-exp the bound needs, and over all retained keys.

    Args:
        q: (B, H, n, D).
        k: (B, H, n, D).
        v: (B, H, n, D).
        table: (H, n) of the distances 0 … n-1.
        eps: largest share of a query's weights that may be skipped.

    Returns:
        (B, H, n, D).
    """
    q, k, v = _arrange_memory(q, k, v)
    table = subtract_max(table)
    batch, heads, n, _ = q.shape
    blocks = triton.cdiv(n, BLOCK)
    out, lse = torch.empty_like(q), torch.empty(q.shape[:3], dtype=torch.float32, device=q.device)
    # first key of each block of queries in the first run: that of the block before
    first = (torch.arange(blocks, dtype=torch.int32, device=q.device) - 1).clamp_min(0) * BLOCK
    first = first.expand(batch, heads, blocks).contiguous()
    shared = arguments(q, k, v, None, table) | {"first": first, "out": out, "low": None, "lse": lse}
    launch(FORWARD, n, "BLOCK_M", shared)
    offset, norm, radius = score_bound_terms(q, k)
    low, tail = offset - lse * math.log(2), block_bias_bounds(table.float())
    for block in range(2, blocks):
        rows, before = slice(block * BLOCK, (block + 1) * BLOCK), slice(block - 1)
        first[:, :, block] = first_kept_key(low[:, :, rows], norm[:, :, rows], radius[:, :, before], tail, block, eps)
    launch(FORWARD, n, "BLOCK_M", shared)
    return out


class TritonAttention(torch.autograd.Function):
    """Computes softmax(q·kᵀ/sqrt(D) + bias) v for j <= i.

    Inputs are q (B, H, n, D), k and v (B, H, m, D) as :func:`_arrange_memory` returns them; ``until`` (B, m) int32, the
    last query that sees each key, -1 at padding, or None if the row's last query sees all keys; and the tensors of the
    bias, one of these combinations:

    - no tensor: no bias;
    - table (H, R) by distance in tokens;
    - table (H, R), at_q (B or 1, n) and at_k (B or 1, m): the column of a pair is at_q[i] - at_k[j];
    - value, slope, far, near, breakpoints and midpoints of a ScaledDistanceBias.

    Second derivatives are those of the dense formula, in O(n²) memory.
    """

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, until: Tensor | None, *tensors: Tensor) -> Tensor:
        """Compute the output and save what the backward pass needs."""
        out = torch.empty_like(q)
        lse = torch.empty(q.shape[:3], dtype=torch.float32, device=q.device)
        # the rounding error of a half-precision output, for the backward pass: with a rounded O, the error of
        # delta = Σ dO·O exceeds the sum of dS of a query with one large weight
        low = torch.empty_like(q) if q.dtype != torch.float32 and any(ctx.needs_input_grad) else None
        launch(FORWARD, q.shape[2], "BLOCK_M", arguments(q, k, v, until, *tensors), out=out, low=low, lse=lse)
        ctx.save_for_backward(q, k, v, until, out, low, lse, *tensors)
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        """Return the gradients of the inputs, differentiable if a graph of the backward pass is recorded."""
        saved = ctx.saved_tensors  # may be unpacked only once, under activation checkpointing
        q, k, v, until, _, _, _, *tensors = saved

        def formula(q: Tensor, k: Tensor, v: Tensor, *tensors: Tensor) -> Tensor:
            bias, empty = _dense(q, k, until, *tensors)
            return dense_attention(q, k, v, bias).masked_fill(empty, 0.0)

        needs = *ctx.needs_input_grad[:3], *ctx.needs_input_grad[4:]
        dq, dk, dv, *others = differentiable_gradients(
            lambda: TritonAttention.gradients(ctx, grad, saved), formula, grad, (q, k, v, *tensors), needs
        )
        return dq, dk, dv, None, *others

    @staticmethod
    def gradients(ctx: Any, grad: Tensor, saved: tuple[Any, ...]) -> tuple[Tensor | None, ...]:
        """Return the gradients of q, k, v and the tensors of the bias.

        Args:
            ctx: autograd's context, as the forward pass left it.
            grad: (B, H, n, D), gradient of the output.
            saved: q, k, v, until, the output, its rounding error or None, the log-sum-exp, and the bias's tensors.
        """
        q, k, v, until, out, low, lse, *tensors = saved
        shared = arguments(q, k, v, until, *tensors)
        shared |= {"grad": _match_layout(grad, q), "lse": lse, "delta": torch.empty_like(lse)}
        dq, dk, dv = (torch.empty_like(x) for x in (q, k, v))
        factor = q.shape[-1] ** -0.5
        # the first kernel writes delta, which the others read
        launch(QUERY_GRADIENT, q.shape[2], "BLOCK_M", shared, out=out, low=low, dq=dq, factor=factor)
        launch(KEY_GRADIENT, k.shape[2], "BLOCK_N", shared, dk=dk, dv=dv, factor=factor)
        return dq, dk, dv, *bias_gradients(shared, ctx.needs_input_grad[4:], tensors)


def _dense(q: Tensor, k: Tensor, until: Tensor | None, *tensors: Tensor) -> tuple[Tensor, Tensor]:
    """Return the dense bias, -inf at hidden keys, and (B or 1, 1, n, 1) bool, True at queries that see no key."""
    n, m = q.shape[2], k.shape[2]
    hidden = causal_bias(n, m, q)[None, None]  # (1, 1, n, m)
    if until is not None:
        query = torch.arange(m - n, m, device=q.device)[:, None]  # (n, 1), among the m tokens
        hidden = hidden.masked_fill(query > until[:, None, None], float("-inf"))  # (B, 1, n, m)
    empty = torch.isneginf(hidden).all(-1, keepdim=True)
    hidden = hidden.masked_fill(empty, 0.0)
    kind = _BIAS_BY_COUNT[len(tensors)]
    if kind == CURVE.value:
        bias = dense_scaled_distance_bias(m, q, *tensors).nan_to_num(neginf=0.0)
    elif kind == NONE.value:
        bias = torch.zeros_like(hidden)
    else:
        index = torch.arange(m, device=q.device)[None]
        table, at_q, at_k = tensors if kind == POSITIONS.value else (tensors[0], index[:, m - n :], index)
        column = (at_q[:, :, None] - at_k[:, None]).long().clamp(0, table.shape[1] - 1)  # (B or 1, n, m)
        bias = table[:, column].transpose(0, 1)  # (B or 1, H, n, m)
    return bias + hidden, empty


def _arrange_memory(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return q, k and v with dense rows and the strides of ``empty_like``, and v in the layout of k.

    Tensors whose rows are too far apart for the addresses inside a tile are copied, too.
    """
    strides = [torch.empty_like(x, device="meta").stride() for x in (q, k)]
    q, k = (
        x if x.stride(-1) == 1 and x.stride() == s and s[2] <= MOST_APART else x.contiguous()
        for x, s in zip((q, k), strides, strict=True)
    )
    return q, k, _match_layout(v, k)


def _match_layout(x: Tensor, like: Tensor) -> Tensor:
    """Return x in the memory layout of ``like``, which has its shape."""
    return x if x.stride() == like.stride() else torch.empty_like(like).copy_(x)


def arguments(q: Tensor, k: Tensor, v: Tensor, until: Tensor | None, *tensors: Tensor) -> dict[str, Any]:
    """Return the kernels' common arguments by name.

    A kernel needs a pointer for each tensor, so q replaces a missing tensor, and the kernel does not read it.

    Args:
        q: (B, H, n, D), as :func:`_arrange_memory` returns it.
        k: (B, H, m, D), likewise.
        v: (B, H, m, D), likewise.
        until: (B, m) int32 last query that sees each key, -1 at padding, or None.
        tensors: tensors of the bias, in one of the combinations that :class:`TritonAttention` lists.
    """
    width = q.shape[3]
    bias, table, at_q, at_k = _bias_arguments(tensors)
    until = None if until is None else until.contiguous()
    tensor_args = {"q": q, "k": k, "v": v, "table": table, "at_q": at_q, "at_k": at_k, "until": until}
    args: dict[str, Any] = {name: q if x is None else x for name, x in tensor_args.items()}
    args |= zip(("q_b", "q_h", "q_n", "k_b", "k_h", "k_n"), (*q.stride()[:3], *k.stride()[:3]), strict=True)
    # elements from a sequence's positions to the next one's; 0 where all share them
    strides = (0 if x is None or len(x) == 1 else x.shape[1] for x in (at_q, at_k))
    args |= zip(("at_q_b", "at_k_b"), strides, strict=True)
    args |= {"n": q.shape[2], "m": k.shape[2], "columns": 1 if table is None else table.shape[1], "first": None}
    args |= {"scale": width**-0.5 * LOG2E, "WIDTH": width, "BLOCK_D": 1 << (width - 1).bit_length()}
    return args | {"BIAS": bias, "PADDED": until is not None}


class _BiasArguments(NamedTuple):
    """The arguments of the kernels that describe a bias, see ``tiles``."""

    bias: int
    table: Tensor | None = None
    at_q: Tensor | None = None
    at_k: Tensor | None = None


def _bias_arguments(tensors: tuple[Tensor, ...]) -> _BiasArguments:
    """Convert the tensors of a bias to base 2 and to the layout that the kernels read."""
    bias = _BIAS_BY_COUNT[len(tensors)]
    if bias == CURVE.value:
        value, slope, far, near, breakpoints, midpoints = tensors
        steps = (value.shape[1] - 1).bit_length()  # of a binary search among the pieces
        table = _pack_pieces(breakpoints, midpoints, value, slope, 1 << steps)
        at_q, at_k = near.float().contiguous(), F.pad(far.float(), (0, TABLE_MARGIN))[None]
        return _BiasArguments(bias + steps, table, at_q, at_k)
    if bias == DISTANCE.value:
        (table,) = tensors
        return _BiasArguments(bias, F.pad(table.float() * LOG2E, (0, TABLE_MARGIN)).contiguous())
    if bias == POSITIONS.value:
        table, at_q, at_k = tensors
        return _BiasArguments(bias, (table.float() * LOG2E).contiguous(), at_q, at_k)
    return _BiasArguments(bias)


def _pack_pieces(breakpoints: Tensor, midpoints: Tensor, value: Tensor, slope: Tensor, count: int) -> Tensor:
    """Return (H, 4·count): end, midpoint, and value and slope in base 2, of each piece, padded to ``count`` pieces.

    The last piece and the padding end at infinity, so no x is in the padding.
    """
    ends = F.pad(breakpoints, (0, count - len(breakpoints)), value=math.inf)
    columns = [ends, F.pad(midpoints, (0, count - len(midpoints)))]
    lines = [F.pad(x.float() * LOG2E, (0, count - x.shape[1])) for x in (value, slope)]
    return torch.stack([*(x.float().expand_as(lines[0]) for x in columns), *lines], dim=2).flatten(1)
