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
from fairseq_rpe.attention.key_heads import repeat_key_heads
from fairseq_rpe.attention.plan import AttentionPlan, is_evenly_spaced
from fairseq_rpe.attention.prune import BLOCK, block_bias_bounds, first_kept_key, score_bound_terms, subtract_max
from fairseq_rpe.attention.scaled_distance_bias import dense_scaled_distance_bias, visible_pieces
from fairseq_rpe.attention.toeplitz_attention import LOG2E
from fairseq_rpe.attention.triton.bias_gradient import bias_gradients
from fairseq_rpe.attention.triton.content_gradient import (
    content_arguments,
    content_flags,
    content_gradients,
    content_names,
    dense_content_bias,
)
from fairseq_rpe.attention.triton.content_terms import content_tensors, separate_terms
from fairseq_rpe.attention.triton.tiles import CURVE, DISTANCE, MOST_APART, NONE, POSITIONS, TABLE_MARGIN
from fairseq_rpe.attention.triton.tuning import FORWARD, KEY_GRADIENT, QUERY_GRADIENT, launch
from fairseq_rpe.core.bias import ScaledDistanceBias, ToeplitzBias
from fairseq_rpe.core.score_mod import column_offsets

# BIAS of the kernels by the number of tensors of a bias of positions, which TritonAttention lists; to CURVE the steps
# of the binary search are added
_BIAS_BY_COUNT = {0: NONE.value, 1: DISTANCE.value, 3: POSITIONS.value, 6: CURVE.value}


def attend(q: Tensor, k: Tensor, v: Tensor, plan: AttentionPlan) -> Tensor:
    """Compute attention (B, H, n, D) without pruning.

    Args:
        q: (B, H, n, D).
        k: (B, G, m, D).
        v: (B, G, m, D).
        plan: plan without pruning that ``triton.refusal_reason`` does not refuse.
    """
    terms, m = separate_terms(plan.bias), k.shape[2]
    assert terms is not None  # checked
    bias, content = terms.position, content_tensors(terms, plan, len(q), m)
    tensors: tuple[Tensor, ...] = ()
    if isinstance(bias, ScaledDistanceBias):
        pieces = visible_pieces(bias, plan)
        lines = pieces.value, pieces.slope, bias.distance_values, bias.query_scale
        tensors = *lines, pieces.breakpoints, pieces.midpoints
    elif isinstance(bias, ToeplitzBias) and is_evenly_spaced(bias, plan.positions):
        tensors = (bias.columns(m),)
    elif isinstance(bias, ToeplitzBias):
        tensors = bias.table, *column_offsets(bias, plan.positions)
    until = plan.visible_until
    options = Options(
        until=None if until is None else until.expand(len(q), -1).contiguous(),
        window=None if plan.window is None or plan.window >= m else plan.window,
        softcap=plan.softcap,
        content=content_flags(content),
    )
    # copies are made outside of the function, so that second derivatives reach the originals
    out: Tensor = TritonAttention.apply(
        *_arrange_memory(q, k, v), plan.null_logit, options, *content.values(), *tensors
    )
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
    shared = arguments(q, k, v, None, Options(), table) | {"first": first, "out": out, "low": None, "lse": lse}
    launch(FORWARD, n, "BLOCK_M", shared)
    offset, norm, radius = score_bound_terms(q, k)
    low, tail = offset - lse * math.log(2), block_bias_bounds(table.float())
    for block in range(2, blocks):
        rows, before = slice(block * BLOCK, (block + 1) * BLOCK), slice(block - 1)
        first[:, :, block] = first_kept_key(low[:, :, rows], norm[:, :, rows], radius[:, :, before], tail, block, eps)
    launch(FORWARD, n, "BLOCK_M", shared)
    return out


class Options(NamedTuple):
    """What has no gradient.

    Attributes:
        until: (B, m) int32, the last query that sees each key, -1 at padding, or None if the row's last query sees all.
        window: no query sees a key that is this number of tokens or more before it; None: unknown. The bias hides them.
        softcap: c of c·tanh(s/c), which replaces the content logits s; 0: none.
        content: CONTENT of the kernels, which terms of the bias depend on the tokens.
    """

    until: Tensor | None = None
    window: int | None = None
    softcap: float = 0.0
    content: int = 0


class TritonAttention(torch.autograd.Function):
    """Computes softmax(q·kᵀ/sqrt(D) + bias) v for j <= i.

    Inputs are q (B, H, n, D), k and v (B, G, m, D) as :func:`_arrange_memory` returns them; the logits (H,) of a key
    with value 0, or None; :class:`Options`; the tensors that ``content_gradient.content_names`` lists; and the tensors
    of the bias of positions, one of these combinations:

    - no tensor: no bias;
    - table (H, R) by distance in tokens;
    - table (H, R), at_q (B or 1, n) and at_k (B or 1, m): the column of a pair is at_q[i] - at_k[j];
    - value, slope, far, near, breakpoints and midpoints of a ScaledDistanceBias.

    Second derivatives are those of the dense formula, in O(n²) memory.
    """

    @staticmethod
    def forward(
        ctx: Any, q: Tensor, k: Tensor, v: Tensor, null_logit: Tensor | None, options: Options, *tensors: Tensor
    ) -> Tensor:
        """Compute the output and save what the backward pass needs."""
        out = torch.empty_like(q)
        lse = torch.empty(q.shape[:3], dtype=torch.float32, device=q.device)
        # the rounding error of a half-precision output, for the backward pass: with a rounded O, the error of
        # delta = Σ dO·O exceeds the sum of dS of a query with one large weight
        low = torch.empty_like(q) if q.dtype != torch.float32 and any(ctx.needs_input_grad) else None
        shared = arguments(q, k, v, null_logit, options, *tensors)
        launch(FORWARD, q.shape[2], "BLOCK_M", shared, out=out, low=low, lse=lse)
        ctx.save_for_backward(q, k, v, null_logit, options.until, out, low, lse, *tensors)
        ctx.options = options._replace(until=None)
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        """Return the gradients of the inputs, differentiable if a graph of the backward pass is recorded."""
        saved = ctx.saved_tensors  # may be unpacked only once, under activation checkpointing
        q, k, v, null_logit, until, _, _, _, *tensors = saved
        inputs = (q, k, v, *(() if null_logit is None else (null_logit,)), *tensors)
        options = ctx.options._replace(until=until)

        def formula(q: Tensor, k: Tensor, v: Tensor, *others: Tensor) -> Tensor:
            null_logit, tensors = (None, others) if len(others) == len(bias_needs) else (others[0], others[1:])
            return _dense_attention(q, k, v, null_logit, options, *tensors)

        *qkv_needs, null_needs, _ = ctx.needs_input_grad[:5]
        bias_needs = ctx.needs_input_grad[5:]
        needs = *qkv_needs, *(() if null_logit is None else (null_needs,)), *bias_needs
        dq, dk, dv, *others = differentiable_gradients(
            lambda: TritonAttention.gradients(ctx, grad, saved), formula, grad, inputs, needs
        )
        null_grad = None if null_logit is None else others.pop(0)
        return dq, dk, dv, null_grad, None, *others

    @staticmethod
    def gradients(ctx: Any, grad: Tensor, saved: tuple[Any, ...]) -> tuple[Tensor | None, ...]:
        """Return the gradients of q, k, v, of the null logits if there are any, and of the tensors of the bias.

        Args:
            ctx: autograd's context, as the forward pass left it.
            grad: (B, H, n, D), gradient of the output.
            saved: q, k, v, null logits, until, the output, its rounding error or None, the log-sum-exp, and the bias's
                tensors.
        """
        q, k, v, null_logit, until, out, low, lse, *tensors = saved
        shared = arguments(q, k, v, null_logit, ctx.options._replace(until=until), *tensors)
        delta = torch.empty_like(lse)
        shared |= {"grad": _match_layout(grad, q), "lse": lse, "delta": delta}
        dq, dk, dv = (torch.empty_like(x) for x in (q, k, v))
        factor = q.shape[-1] ** -0.5
        # the first kernel writes delta, which the others read
        launch(QUERY_GRADIENT, q.shape[2], "BLOCK_M", shared, out=out, low=low, dq=dq, factor=factor)
        bias_needs = ctx.needs_input_grad[5:]
        count = len(content_names(ctx.options.content))
        key_sums = None
        if any(bias_needs[:count]):
            key_sums = torch.empty(*q.shape[:2], k.shape[2], dtype=torch.float32, device=q.device)
        launch(KEY_GRADIENT, k.shape[2], "BLOCK_N", shared, dk=dk, dv=dv, key_sums=key_sums, factor=factor)
        null_grads: tuple[Tensor, ...] = ()
        query_sums = torch.zeros_like(delta)  # of dS over the keys
        if null_logit is not None:
            # dS = P (dP - delta) of a key with value 0, whose dP is 0; with it, the dS of a query sum to 0
            query_sums = torch.exp2(shared["null"][:, None] - lse) * delta  # (B, H, n)
            null_grads = (-query_sums.sum((0, 2)).to(null_logit.dtype),)
        content_grads = content_gradients(shared, bias_needs[:count], tensors[:count], query_sums, key_sums)
        position_grads = bias_gradients(shared, bias_needs[count:], tensors[count:])
        return dq, dk, dv, *null_grads, *content_grads, *position_grads


def _dense_attention(
    q: Tensor, k: Tensor, v: Tensor, null_logit: Tensor | None, options: Options, *tensors: Tensor
) -> Tensor:
    """Compute the output by differentiable operations, in O(n·m) memory."""
    k, v = (repeat_key_heads(x, q.shape[1]) for x in (k, v))
    bias, empty = _dense_bias(q, k, options, *tensors)
    out = dense_attention(q, k, v, bias, softcap=options.softcap, null_logit=null_logit)
    return out.masked_fill(empty, 0.0)


def _dense_bias(q: Tensor, k: Tensor, options: Options, *tensors: Tensor) -> tuple[Tensor, Tensor]:
    """Return the dense bias, -inf at hidden keys, and (B or 1, 1, n, 1) bool, True at queries that see no key."""
    n, m, until = q.shape[2], k.shape[2], options.until
    count = len(content_names(options.content))
    content, tensors = tensors[:count], tensors[count:]
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
    if content:
        bias = bias + dense_content_bias(n, m, options.content, content)
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


def arguments(
    q: Tensor, k: Tensor, v: Tensor, null_logit: Tensor | None, options: Options, *tensors: Tensor
) -> dict[str, Any]:
    """Return the kernels' common arguments by name.

    A kernel needs a pointer for each tensor, so q replaces a missing tensor, and the kernel does not read it.

    Args:
        q: (B, H, n, D), as :func:`_arrange_memory` returns it.
        k: (B, G, m, D), likewise.
        v: (B, G, m, D), likewise.
        null_logit: (H,) logits of a key with value 0, or None.
        options: visibility, softcap and which terms of the bias depend on the tokens.
        tensors: tensors of the bias, in one of the combinations that :class:`TritonAttention` lists.
    """
    width, until, count = q.shape[3], options.until, len(content_names(options.content))
    bias, table, at_q, at_k = _bias_arguments(tensors[count:])
    tensor_args = {"q": q, "k": k, "v": v, "table": table, "at_q": at_q, "at_k": at_k, "until": until}
    args: dict[str, Any] = {name: q if x is None else x for name, x in tensor_args.items()}
    args |= zip(("q_b", "q_h", "q_n", "k_b", "k_h", "k_n"), (*q.stride()[:3], *k.stride()[:3]), strict=True)
    # elements from a sequence's positions to the next one's; 0 where all share them
    strides = (0 if x is None or len(x) == 1 else x.shape[1] for x in (at_q, at_k))
    args |= zip(("at_q_b", "at_k_b"), strides, strict=True)
    args |= {"n": q.shape[2], "m": k.shape[2], "columns": 1 if table is None else table.shape[1], "first": None}
    args |= {"null": None if null_logit is None else (null_logit.float() * LOG2E).contiguous()}
    args |= {"window": options.window, "cap": options.softcap * LOG2E, "scale": width**-0.5 * LOG2E}
    args |= {"WIDTH": width, "BLOCK_D": 1 << (width - 1).bit_length(), "GROUP": q.shape[1] // k.shape[1]}
    args |= content_arguments(q, options.content, tensors[:count])
    return args | {"BIAS": bias, "PADDED": until is not None, "CAPPED": options.softcap > 0}


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
