"""Attention through torch's scaled_dot_product_attention, in blocks of query rows.

Beyond ``SHORT`` tokens a Toeplitz bias never becomes an n×n matrix: ``blocks`` has it as views of one vector of length
2n. Blocks of a few hundred rows against only the keys they can see give causal skipping as well.
"""

from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from fairseq_rpe.attention.content_bias import in_rows
from fairseq_rpe.attention.dense_cpu import SHORT
from fairseq_rpe.attention.dropout import ROWS, draw_seed, keep_block
from fairseq_rpe.attention.plan import Plan, by_distance, evenly_spaced
from fairseq_rpe.attention.prune import check_pruning, pruned
from fairseq_rpe.attention.reference import weighted, weights
from fairseq_rpe.attention.region_attention import regional
from fairseq_rpe.attention.relative_shift import quick_block, quick_read
from fairseq_rpe.attention.scaled_distance_bias import ScaledDistanceBlocks, pieces_of
from fairseq_rpe.attention.toeplitz_attention import BlockAttention, ToeplitzBlocks, by_rows, fused
from fairseq_rpe.core.bias import Bias, Positions, ScaledDistanceBias, ToeplitzBias, leaves
from fairseq_rpe.core.errors import UserError

CURVE_FROM = 256  # tokens; finding the pieces of a curve takes longer than a few pairs
# query-key pairs in a block whose bias is made by a function: few enough for a CPU's cache, more elsewhere
PAIR_ELEMENTS, DEVICE_PAIR_ELEMENTS = 1 << 17, 1 << 20


def sdpa(q: Tensor, k: Tensor, v: Tensor, plan: Plan, dropout: float = 0.0) -> Tensor:
    """The same as :func:`~fairseq_rpe.attention.reference.reference`, with O(n) memory for Toeplitz and Curve forms.

    What depends on the tokens, changed scores included, is made for blocks of queries, and again in the backward pass.

    Raises:
        UserError: the plan asks for pruning where there is no Toeplitz bias, in training or away from the CPU. Padded
            rows and single queries are exact all the same.
    """
    if plan.regions is not None and not plan.prune:
        return regional(q, k, v, plan, dropout)
    n, m = q.shape[2], k.shape[2]
    if plan.last_query is not None and _alone(q, plan, dropout):
        return _by_documents(q, k, v, plan)
    made = _structured(plan, n, m)
    if made is not None:
        q, k, v = by_rows(q), by_rows(k), by_rows(v)
    if plan.prune:
        check_pruning(q, k, v, plan, dropout)
        if q.device.type != "cpu":
            raise UserError(
                f"backend 'sdpa' prunes on the CPU, not on '{q.device.type}': evaluate there, with 'triton' or unpruned"
            )
        if made is not None:
            return pruned(q, k, v, made[1], plan.prune)
    if made is None:
        one = n == 1 and dropout == 0 and plan.transform_scores is None and plan.reading is None
        return (_one if one else _by_blocks)(q, k, v, plan, dropout)
    short, gradients = n <= SHORT and q.device.type == "cpu", torch.is_grad_enabled()
    # with gradients in float32: the kernel's backward pass of short texts takes up to three times as long in bfloat16
    wide = torch.promote_types(q.dtype, torch.float32)
    kept = wide if short and gradients else q.dtype
    if plan.form is None and dropout == 0:
        return fused(q.to(kept), k.to(kept), v.to(kept), causal=True).to(q.dtype)
    if dropout == 0 and short and made[0] is ToeplitzBlocks and not (gradients and made[1].requires_grad):
        mask = plan.matrix.to(wide)
        return fused(q.to(kept), k.to(kept), v.to(kept), mask).to(q.dtype)
    return BlockAttention.apply(q, k, v, dropout, draw_seed() if dropout > 0 else 0, *made)


def _structured(plan: Plan, n: int, m: int) -> tuple[Any, ...] | None:
    """The class of the bias and its tensors for a bias that is less than n² numbers, if this is one."""
    form = plan.form
    if plan.padding is not None or plan.last_query is not None or n != m or n == 1 or plan.is_content_dependent:
        return None
    if form is None:
        return (ToeplitzBlocks,)
    if isinstance(form, ToeplitzBias) and evenly_spaced(form, plan.positions):
        return ToeplitzBlocks, by_distance(form, n)
    if isinstance(form, ScaledDistanceBias) and len(form.near) == 1 and n >= CURVE_FROM:
        pieces = pieces_of(form, plan)
        return ScaledDistanceBlocks, pieces.value, pieces.slope, form.far, form.near[0], pieces.ends, pieces.middle
    return None


def _alone(q: Tensor, plan: Plan, dropout: float) -> bool:
    """Whether documents that share rows are computed one by one, each in O(n) memory and without the others' keys.

    On a CPU, for rows that are long enough to make up for the calls; with dropout all documents of a row share a mask.
    """
    form, n = plan.form, q.shape[2]
    if q.device.type != "cpu" or dropout > 0 or plan.is_content_dependent or plan.prune or plan.padding is not None:
        return False
    if isinstance(form, ScaledDistanceBias):
        return n >= CURVE_FROM
    return n > SHORT and (form is None or (isinstance(form, ToeplitzBias) and evenly_spaced(form, plan.positions)))


def _by_documents(q: Tensor, k: Tensor, v: Tensor, plan: Plan) -> Tensor:
    """Each document of each row by itself: (B, H, n, D)."""
    pos, form = plan.positions, plan.form
    pieces = pieces_of(form, plan) if isinstance(form, ScaledDistanceBias) else None
    rows = []
    for row, documents in enumerate(plan.documents):
        one, shared = slice(row, row + 1), slice(row, row + 1) if len(pos.k) > 1 else slice(1)
        parts = []
        for tokens in documents:
            own: Bias | None = form
            if isinstance(form, ScaledDistanceBias):
                length = tokens.stop - tokens.start
                near = form.near[row : row + 1] if len(form.near) > 1 else form.near
                own = replace(form, far=form.far[:length], near=near[:, tokens], pieces=lambda top: pieces)
            at = pos.k[shared, tokens]
            alone = replace(plan, positions=Positions(at, at, pos.step), form=own, last_query=None)
            parts.append(sdpa(q[one, :, tokens], k[one, :, tokens], v[one, :, tokens], alone))
        rows.append(torch.cat(parts, dim=2))
    return torch.cat(rows)


def _one(q: Tensor, k: Tensor, v: Tensor, plan: Plan, dropout: float) -> Tensor:
    """One query, the last token, as in decoding: its bias is one row, which layers share."""
    wide = torch.promote_types(q.dtype, torch.float32)
    if q.is_cuda and q.dtype != wide and plan.row is not None:
        return _by_blocks(q, k, v, plan, dropout)
    mask = None if plan.row is None else plan.row.to(wide)
    out = fused(by_rows(q), by_rows(k), by_rows(v), mask)
    return out if plan.empty is None else out.masked_fill(plan.empty, 0.0)


def _by_blocks(q: Tensor, k: Tensor, v: Tensor, plan: Plan, dropout: float) -> Tensor:
    """Any form, padding or number of queries; recomputes each block's bias in the backward pass."""
    n, m = q.shape[2], k.shape[2]
    seed = draw_seed() if dropout > 0 else 0
    if plan.is_content_dependent and leaves(plan.form) is not None:
        return in_rows(q, k, v, plan, dropout, seed, _some_rows)
    pairs = PAIR_ELEMENTS if q.device.type == "cpu" else DEVICE_PAIR_ELEMENTS
    rows = max(ROWS, pairs // m // ROWS * ROWS)

    def attend(start: int) -> Tensor:
        stop = min(start + rows, n)
        keep = keep_block(seed, start, stop, (*q.shape[:3], m), dropout, q.device) if dropout > 0 else None
        seen = slice(m - n + stop)
        return _some_rows(q[:, :, start:stop], k[:, :, seen], v[:, :, seen], plan.part(start, stop), keep)

    if n <= rows:
        return attend(0)
    if torch.is_grad_enabled():
        attend = partial(checkpoint, attend, use_reentrant=False, preserve_rng_state=False)
    return torch.cat([attend(start) for start in range(0, n, rows)], dim=2)


def _some_rows(q: Tensor, k: Tensor, v: Tensor, plan: Plan, keep: Tensor | None) -> Tensor:
    """Some queries and all keys that they may see."""
    wide = torch.promote_types(q.dtype, torch.float32)
    # CUDA wants the bias in q's dtype, and half precision cannot hold it
    if (
        keep is not None
        or plan.transform_scores is not None
        or plan.reading is not None
        or (q.is_cuda and q.dtype != wide)
    ):
        return weighted(weights(q, k, plan, quick_block), v, keep, plan, quick_read)
    mask = plan.visible(q.shape[2], k.shape[2], q.device)
    empty = ~mask.any(dim=-1, keepdim=True)
    bias = torch.zeros_like(mask) if plan.form is None else quick_block(plan.form, plan.positions)
    bias = bias.to(wide).masked_fill(~(mask | empty), float("-inf"))
    return fused(q, k, v, bias).masked_fill(empty, 0.0)
