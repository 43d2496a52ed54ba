"""Attention through torch's scaled_dot_product_attention, in blocks of query rows.

Beyond ``DENSE_TOKENS`` tokens a Toeplitz bias never becomes an n×n matrix: ``toeplitz_attention`` has it as views of
one vector of length 2n. Blocks of a few hundred rows against the keys that they can see also skip the future.
"""

from dataclasses import replace
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from fairseq_rpe.attention.block_weights import block_weights
from fairseq_rpe.attention.content_bias import WINDOW_ROWS, attend_in_blocks
from fairseq_rpe.attention.double_backward import contiguous_rows, fused_attention
from fairseq_rpe.attention.dropout import ROWS, draw_seed, keep_block
from fairseq_rpe.attention.key_heads import attend_by_key_head
from fairseq_rpe.attention.plan import AttentionPlan, is_evenly_spaced
from fairseq_rpe.attention.prune import check_pruning, pruned_attention
from fairseq_rpe.attention.reference import weighted_sum
from fairseq_rpe.attention.region_attention import attend_by_region
from fairseq_rpe.attention.relative_shift import materialize_fast, sum_relative_values_fast
from fairseq_rpe.attention.scaled_distance_bias import ScaledDistanceBlocks, visible_pieces
from fairseq_rpe.attention.scaled_window_attention import has_scaled_window, scaled_window_attention
from fairseq_rpe.attention.toeplitz_attention import DENSE_TOKENS, BlockAttention
from fairseq_rpe.attention.toeplitz_blocks import ToeplitzBlocks
from fairseq_rpe.attention.value_width import attend_with_padded_values, has_narrow_values
from fairseq_rpe.attention.window_attention import has_window_blocks, window_attention
from fairseq_rpe.core.bias import Bias, ScaledDistanceBias, ToeplitzBias
from fairseq_rpe.core.errors import UserError
from fairseq_rpe.core.positions import Positions

MIN_CURVE_TOKENS = 256  # a ScaledDistanceBias of fewer tokens is computed pair by pair, as finding pieces takes longer
# query-key pairs of a block whose bias is a function of positions: on a CPU, and elsewhere; on a CPU they fit its cache
PAIR_ELEMENTS, DEVICE_PAIR_ELEMENTS = 1 << 17, 1 << 20


def sdpa(q: Tensor, k: Tensor, v: Tensor, plan: AttentionPlan, dropout: float = 0.0) -> Tensor:
    """Compute what :func:`~fairseq_rpe.attention.reference.reference` does, in O(n) memory for biases of the distance.

    Whatever depends on the tokens is computed in blocks of queries, and again in the backward pass.

    Args:
        q: (B, H, n, D), rotated unless ``plan.rotation_regions`` is set; the queries are the last n of the m tokens.
        k: (B, G, m, D), rotated as q is. G divides H, and query head h reads key head h // (H / G).
        v: (B, G, m, D); it may be narrower than q and k, and so is then the output.
        plan: positions, bias, padding, pruning and hooks for the n queries and m keys.
        dropout: probability of dropping an attention weight.

    Returns:
        (B, H, n, D) in q's dtype.

    Raises:
        UserError: the plan asks for pruning without a Toeplitz bias, in training or not on a CPU. Padded rows and
            single queries are computed exactly instead.
    """
    if has_narrow_values(q, v) and not _has_single_query(q, plan, dropout):
        return attend_with_padded_values(sdpa, q, k, v, plan, dropout)
    if q.shape[1] != k.shape[1] and not _has_single_query(q, plan, dropout):
        return attend_by_key_head(sdpa, q, k, v, plan, dropout)
    if plan.rotation_regions is not None and not plan.prune:
        return attend_by_region(q, k, v, plan, dropout)
    n, m = q.shape[2], k.shape[2]
    if plan.product is not None:
        plan = replace(plan, product=plan.product.prepare_blocks())
        if not plan.transforms_scores:  # the product has the queries and keys, so theirs need no gradient here
            q, k = q.detach(), k.detach()
    if plan.last_query is not None and _splits_documents(q, plan, dropout):
        return _attend_by_document(q, k, v, plan)
    if not plan.prune and has_window_blocks(q, k, plan, dropout):
        return window_attention(q, k, v, plan)
    if not plan.prune and has_scaled_window(q, k, plan, dropout):
        return scaled_window_attention(q, k, v, plan)
    block_bias = _block_bias(plan, n, m)
    if plan.prune:
        _check_pruning_on_cpu(q, k, v, plan, dropout)
    if block_bias is None:
        attend = _attend_single_query if _has_single_query(q, plan, dropout) else _attend_in_blocks
        return attend(q, k, v, plan, dropout)
    q, k, v = contiguous_rows(q), contiguous_rows(k), contiguous_rows(v)
    if plan.prune:
        (table,) = block_bias.tensors
        return pruned_attention(q, k, v, table, plan.prune)
    return _attend_with_block_bias(q, k, v, plan, dropout, block_bias)


def _check_pruning_on_cpu(q: Tensor, k: Tensor, v: Tensor, plan: AttentionPlan, dropout: float) -> None:
    """Raise UserError unless the call can be pruned on a CPU."""
    check_pruning(q, k, v, plan, dropout)
    if q.device.type != "cpu":
        raise UserError(
            f"backend 'sdpa' prunes on the CPU, not on '{q.device.type}': evaluate there, with 'triton' or unpruned"
        )


class _BlockBias(NamedTuple):
    """How to compute a bias block by block.

    Attributes:
        blocks: class that computes the blocks.
        tensors: tensors that the class computes them from; none without a bias.
    """

    blocks: type[ToeplitzBlocks]
    tensors: tuple[Tensor, ...]


def _attend_with_block_bias(
    q: Tensor, k: Tensor, v: Tensor, plan: AttentionPlan, dropout: float, block_bias: _BlockBias
) -> Tensor:
    """Attend without a bias or with a bias of the distance, in O(n) memory; short texts may use a dense bias."""
    n = q.shape[2]
    is_short, records_graph = n <= DENSE_TOKENS and q.device.type == "cpu", torch.is_grad_enabled()
    # float32 with gradients: the kernel's backward pass of short texts takes up to three times as long in bfloat16
    wide = torch.promote_types(q.dtype, torch.float32)
    dtype = wide if is_short and records_graph else q.dtype
    if plan.bias is None and dropout == 0:
        return fused_attention(q.to(dtype), k.to(dtype), v.to(dtype), causal=True).to(q.dtype)
    needs_bias_grad = records_graph and any(x.requires_grad for x in block_bias.tensors)
    if dropout == 0 and is_short and block_bias.blocks is ToeplitzBlocks and not needs_bias_grad:
        mask = plan.dense_bias.to(wide)  # all layers share the plan's matrix, which has no gradient
        return fused_attention(q.to(dtype), k.to(dtype), v.to(dtype), mask).to(q.dtype)
    seed = draw_seed() if dropout > 0 else 0
    out: Tensor = BlockAttention.apply(q, k, v, dropout, seed, block_bias.blocks, *block_bias.tensors)
    return out


def _block_bias(plan: AttentionPlan, n: int, m: int) -> _BlockBias | None:
    """Return how to compute the bias in O(n) memory; None if that is not possible, or not faster.

    It is possible for plain causal attention of several tokens to themselves, if the bias is one of distances.
    """
    bias = plan.bias
    if plan.padding is not None or plan.last_query is not None or n != m or n == 1 or plan.is_content_dependent:
        return None
    if plan.changes_softmax or (plan.window is not None and plan.window < n and not plan.prune):
        return None
    if bias is None:
        return _BlockBias(ToeplitzBlocks, ())
    if isinstance(bias, ToeplitzBias) and is_evenly_spaced(bias, plan.positions):
        return _BlockBias(ToeplitzBlocks, (bias.columns(n),))
    if isinstance(bias, ScaledDistanceBias) and len(bias.query_scale) == 1 and n >= MIN_CURVE_TOKENS:
        pieces = visible_pieces(bias, plan)
        lines = pieces.value, pieces.slope, bias.distance_values, bias.query_scale[0]
        return _BlockBias(ScaledDistanceBlocks, (*lines, pieces.breakpoints, pieces.midpoints))
    return None


def _splits_documents(q: Tensor, plan: AttentionPlan, dropout: float) -> bool:
    """Return whether documents that share rows are computed one by one, in O(n) memory and without the others' keys.

    On a CPU this is faster for long rows; for short ones, the additional calls take longer. With dropout all documents
    of a row share one mask, so they are computed together.
    """
    bias, n = plan.bias, q.shape[2]
    if n != plan.positions.k.shape[1]:  # slices of documents are the same for queries and keys
        return False
    if q.device.type != "cpu" or dropout > 0 or plan.is_content_dependent or plan.prune or plan.padding is not None:
        return False
    if isinstance(bias, ScaledDistanceBias):
        return n >= MIN_CURVE_TOKENS
    is_even = isinstance(bias, ToeplitzBias) and is_evenly_spaced(bias, plan.positions)
    return n > DENSE_TOKENS and (bias is None or is_even)


def _attend_by_document(q: Tensor, k: Tensor, v: Tensor, plan: AttentionPlan) -> Tensor:
    """Return the output (B, H, n, D), each document of each row computed separately."""
    bias = plan.bias
    if isinstance(bias, ScaledDistanceBias):
        pieces = visible_pieces(bias, plan)  # once, for all documents
        plan = replace(plan, bias=replace(bias, make_pieces=lambda top: pieces))
    outputs = []
    is_shared = len(plan.document_slices) == 1  # all rows have the same documents
    for row, documents in enumerate(plan.document_slices):
        row_q, row_k, row_v = (x if is_shared else x[row : row + 1] for x in (q, k, v))  # (B or 1, H, n, D)
        parts = [_attend_to_document(row_q, row_k, row_v, plan, row, tokens) for tokens in documents]
        outputs.append(torch.cat(parts, dim=2))
    return torch.cat(outputs)


def _attend_to_document(q: Tensor, k: Tensor, v: Tensor, plan: AttentionPlan, row: int, tokens: slice) -> Tensor:
    """Return the output of one document, from q, k and v (B or 1, H, n, D) of the rows that have it."""
    pos, bias = plan.positions, plan.bias
    row_slice = slice(row, row + 1)
    document_bias: Bias | None = bias
    if isinstance(bias, ScaledDistanceBias):
        length = tokens.stop - tokens.start
        scale = bias.query_scale[row_slice] if len(bias.query_scale) > 1 else bias.query_scale  # (1, n)
        document_bias = replace(bias, distance_values=bias.distance_values[:length], query_scale=scale[:, tokens])
    x = pos.k[row_slice if len(pos.k) > 1 else slice(1), tokens]
    document_plan = replace(plan, positions=Positions(x, x, pos.step), bias=document_bias, last_query=None)
    return sdpa(q[:, :, tokens], k[:, :, tokens], v[:, :, tokens], document_plan)


def _has_single_query(q: Tensor, plan: AttentionPlan, dropout: float) -> bool:
    """Return whether :func:`_attend_single_query` serves a call: its bias is one row, and nothing needs the weights."""
    needs_weights = dropout > 0 or plan.changes_softmax
    needs_weights = needs_weights or plan.transforms_scores or plan.relative_values is not None
    needs_weights = needs_weights or plan.product is not None
    return q.shape[2] == 1 and not needs_weights and plan.last_query is None and plan.rotation_regions is None


def _attend_single_query(q: Tensor, k: Tensor, v: Tensor, plan: AttentionPlan, dropout: float) -> Tensor:
    """Attend with one query, the last token, as in decoding: its bias is one row, which layers share.

    The query heads (B, H, 1, D) that share a key head are computed as its queries, (B, G, r, D).
    """
    wide = torch.promote_types(q.dtype, torch.float32)
    # CUDA requires the bias in q's dtype, and half precision would round it too coarsely
    if q.is_cuda and q.dtype != wide and plan.last_query_bias is not None:
        return attend_by_key_head(_attend_in_blocks, q, k, v, plan, dropout)
    mask = None if plan.last_query_bias is None else plan.last_query_bias.to(wide)
    if q.shape[1] == k.shape[1]:
        out = fused_attention(contiguous_rows(q), contiguous_rows(k), contiguous_rows(v), mask)
    else:
        by_key_head = k.shape[1], -1  # sizes of the axes of the key heads and of the query heads of each
        if mask is not None and mask.shape[1] > 1:
            mask = mask[:, :, 0].unflatten(1, by_key_head)  # (B or 1, G, r, m)
        queries = contiguous_rows(q[:, :, 0].unflatten(1, by_key_head))
        out = fused_attention(queries, contiguous_rows(k), contiguous_rows(v), mask).flatten(1, 2)[:, :, None]
    return out if plan.fully_padded_rows is None else out.masked_fill(plan.fully_padded_rows, 0.0)


def _attend_in_blocks(q: Tensor, k: Tensor, v: Tensor, plan: AttentionPlan, dropout: float) -> Tensor:
    """Attend with any bias, padding and number of queries; the backward pass recomputes each block's bias."""
    n, m = q.shape[2], k.shape[2]
    seed = draw_seed() if dropout > 0 else 0
    has_window = plan.window is not None and plan.window < m
    has_tensors = plan.bias is None or plan.bias.tree_flatten() is not None
    if (plan.is_content_dependent or has_window) and has_tensors and plan.null_logit is None:
        return attend_in_blocks(q, k, v, plan, dropout, seed, _attend_block)
    pairs = PAIR_ELEMENTS if q.device.type == "cpu" else DEVICE_PAIR_ELEMENTS
    rows = max(ROWS, WINDOW_ROWS if has_window else pairs // m // ROWS * ROWS)

    def attend(start: int, state: Tensor | None) -> tuple[Tensor, Tensor | None]:
        stop = min(start + rows, n)
        keys = plan.visible_keys(start, stop)
        keep = None
        if dropout > 0:
            keep = keep_block(seed, start, stop, (*q.shape[:3], m), dropout, q.device)[..., keys.start :]
        stored: list[Tensor] = []
        block_plan = replace(plan.select(slice(start, stop), keys), key_state=state, store_key_state=stored.append)
        out = _attend_block(q[:, :, start:stop], k[:, :, keys], v[:, :, keys], block_plan, keep)
        return out, stored[0] if stored else None

    if n > rows and torch.is_grad_enabled():
        attend = partial(checkpoint, attend, use_reentrant=False, preserve_rng_state=False)
    outputs, state = [], plan.key_state
    for start in range(0, n, rows):
        out, state = attend(start, state)
        outputs.append(out)
    if plan.store_key_state is not None and state is not None:
        plan.store_key_state(state)
    return torch.cat(outputs, dim=2) if len(outputs) > 1 else outputs[0]


def _attend_block(q: Tensor, k: Tensor, v: Tensor, plan: AttentionPlan, keep: Tensor | None) -> Tensor:
    """Attend with the queries of a block (B, H, R, D) and all keys that they may see (B, H, K, D)."""
    wide = torch.promote_types(q.dtype, torch.float32)
    needs_weights = keep is not None or plan.transforms_scores or plan.relative_values is not None
    needs_weights = needs_weights or plan.changes_softmax or plan.product is not None
    # torch's kernel has no backward pass for a bias with a gradient
    needs_weights = needs_weights or (plan.is_content_dependent and (q.dtype == wide or torch.is_grad_enabled()))
    # CUDA requires the bias in q's dtype, and half precision would round it too coarsely
    if needs_weights or (q.is_cuda and q.dtype != wide):
        return weighted_sum(block_weights(q, k, plan), v, keep, plan, sum_relative_values_fast)
    mask = plan.visibility(q.shape[2], k.shape[2], q.device)  # (B or 1, 1, R, K)
    # queries without a visible key attend to all keys, as a softmax of -inf is NaN; their output is set to 0 last
    empty = ~mask.any(dim=-1, keepdim=True)  # (B or 1, 1, R, 1)
    bias = torch.zeros_like(mask) if plan.bias is None else materialize_fast(plan.bias, plan.positions)
    bias = bias.to(wide).masked_fill(~(mask | empty), float("-inf"))  # (B or 1, H or 1, R, K)
    return fused_attention(q, k, v, bias).masked_fill(empty, 0.0)
