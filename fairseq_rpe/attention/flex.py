"""Attention through torch's FlexAttention: bias and mask as functions of (batch, head, query, key).

On CUDA it is compiled, once for all lengths, into one kernel that reads tables or computes a bias for each pair, and
skips hidden blocks, also those outside a window. Gradients of learned tables and parameters are those of captured
tensors. On the CPU the same functions run unfused, in O(n²) memory: a check of the functions rather than a fast path.
"""

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.fx.experimental import _config as shapes
from torch.nn.attention.flex_attention import AuxRequest, BlockMask, flex_attention

from fairseq_rpe.attention.plan import AttentionPlan
from fairseq_rpe.attention.value_width import attend_with_padded_values, has_narrow_values
from fairseq_rpe.core.bias import (
    Bias,
    KeyTableBias,
    PairBias,
    PointwiseBias,
    QueryKeyTableBias,
    QueryTableBias,
    ScaledDistanceBias,
    SumBias,
)
from fairseq_rpe.core.errors import UserError
from fairseq_rpe.core.score_mod import ScoreMod, has_long_products
from fairseq_rpe.core.score_mod import score_mod as bias_score_mod

BLOCK = 128  # queries, and keys, of a block of the mask
HEAD_WIDTHS = range(16, 257)  # head widths that the compiled kernel supports
MAX_COLUMNS = 1024  # largest table of a content bias: the products of a token with all columns are stored
CACHED_MASKS = 32  # number of causal block masks, of different lengths, that are cached
NO_BACKWARD = "FlexAttention has no backward pass on the CPU: use 'sdpa' for training"
COMPILATIONS = 64  # limit, for bias types, dtypes and head widths, with or without gradients; lengths are dynamic


def flex(q: Tensor, k: Tensor, v: Tensor, plan: AttentionPlan, dropout: float = 0.0) -> Tensor:
    """Compute what :func:`~fairseq_rpe.attention.reference.reference` does, with gradients on CUDA only.

    Args:
        q: (B, H, n, D); the queries are the last n of the m tokens.
        k: (B, G, m, D). G divides H, and query head h reads key head h // (H / G).
        v: (B, G, m, D); it may be narrower than q and k, and so is then the output.
        plan: positions, bias, visibility, softcap and null logit of the n queries and m keys.
        dropout: must be 0.

    Returns:
        (B, H, n, D) in q's dtype.

    Raises:
        UserError: the call is not supported, see :func:`refusal_reason`.
    """
    if reason := refusal_reason(q, k, v, plan, dropout):
        raise UserError(reason)
    if has_narrow_values(q, v):
        return attend_with_padded_values(flex, q, k, v, plan, dropout)
    dtype = q.dtype
    if not q.is_cuda:  # unfused, FlexAttention would round the scores to half precision
        q, k, v = (x.to(torch.promote_types(x.dtype, torch.float32)) for x in (q, k, v))
        if not torch.is_grad_enabled():  # torch refuses inputs with requires_grad even where no graph is recorded
            q, k, v = q.detach(), k.detach(), v.detach()
    # beyond the limit, fullgraph makes torch raise an error instead of silently falling back to O(n²) memory; "duck
    # shapes" would compile sizes that happen to be equal (a batch of 2, 2 blocks) as one, and again where they differ
    settings = torch._dynamo.config.patch(recompile_limit=COMPILATIONS)
    call: dict[str, Any] = {"score_mod": score_mod(plan, q.shape[0]), "block_mask": _mask(plan, q, k)}
    if q.shape[1] != k.shape[1]:
        call["enable_gqa"] = True
    if plan.null_logit is not None:
        call["return_aux"] = AuxRequest(lse=True)
    with settings, shapes.patch(use_duck_shape=False):  # type: ignore[attr-defined]  # added at run time by torch
        out = _compile_for(q.device.type)(q, k, v, **call)
    if plan.null_logit is not None:
        out, aux = out
        out = _scale_by_share(out, aux.lse, plan.null_logit)
    return out.to(dtype)


def _scale_by_share(out: Tensor, lse: Tensor, null_logit: Tensor) -> Tensor:
    """Return the output of a softmax that has a further key with value 0.

    Args:
        out: (B, H, n, D), output without that key.
        lse: (B, H, n), log-sum-exp of the other keys.
        null_logit: (H,), logits of that key.
    """
    # the other keys have exp(lse) / (exp(lse) + exp(null_logit)) of the weights
    share = (lse - null_logit[:, None].to(lse.dtype)).sigmoid()
    return out * share[..., None].to(out.dtype)


def refusal_reason(q: Tensor, k: Tensor, v: Tensor, plan: AttentionPlan, dropout: float = 0.0) -> str | None:
    """Return why this backend cannot compute a call, and which can; None if it can."""
    if reason := unsupported_reason(plan):
        return reason
    if plan.prune:
        return "backend 'flex' does not prune: use 'triton', 'sdpa' on the CPU or no pruning"
    if dropout > 0:
        return f"backend 'flex' has no attention dropout, and {dropout:g} was asked for: set it to 0 or use 'sdpa'"
    if not q.is_cuda:
        if torch.is_grad_enabled() and (plan.bias_may_need_grad or any(x.requires_grad for x in (q, k, v))):
            return NO_BACKWARD
        return None
    if reason := cpu_only_reason(plan):
        return reason
    if q.dtype not in (torch.float16, torch.bfloat16, torch.float32):
        return f"backend 'flex' takes float16, bfloat16 or float32 on a GPU, not {q.dtype}: use 'sdpa'"
    if q.shape[-1] not in HEAD_WIDTHS:
        return f"backend 'flex' takes head widths from 16 to 256 on a GPU, not {q.shape[-1]}: use 'sdpa'"
    return None


def unsupported_reason(plan: AttentionPlan) -> str | None:
    """Return why this backend supports an encoding on no device; None if it supports it on some."""
    if plan.transforms_scores or plan.relative_values is not None:
        return "this encoding needs all scores of a query, which backend 'flex' never holds: use 'sdpa'"
    if _has_products(plan.bias):
        return "backend 'flex' has no products of queries, keys and vectors of their distance: use 'sdpa'"
    columns = _max_columns(plan.bias)
    if columns > MAX_COLUMNS:
        return (
            f"backend 'flex' stores what a token reads from a table of at most {MAX_COLUMNS:,} distances, and this one "
            f"has {columns:,}: use 'sdpa', which needs no more memory for more of them"
        )
    if plan.rotation_regions is not None:
        return "backend 'flex' rotates all pairs alike, which this encoding does not: use 'sdpa'"
    return None


def cpu_only_reason(plan: AttentionPlan) -> str | None:
    """Return why this backend supports an encoding on the CPU alone; None if it supports it on a GPU, too."""
    if isinstance(plan.bias, PairBias) and not isinstance(plan.bias, (ScaledDistanceBias, PointwiseBias)):
        return "backend 'flex' compiles tables and arithmetic of a head, not this function of two positions: use 'sdpa'"
    return None


def _has_products(bias: Bias | None) -> bool:
    """Return whether the bias is a product of query, key and a vector of their distance, of many elements."""
    if isinstance(bias, SumBias):
        return any(map(_has_products, bias.terms))
    return isinstance(bias, QueryKeyTableBias) and has_long_products(bias)


def _max_columns(bias: Bias | None) -> int:
    """Return the number of columns of the largest table that tokens read from."""
    if isinstance(bias, SumBias):
        return max(map(_max_columns, bias.terms))
    return bias.num_columns if isinstance(bias, QueryTableBias | KeyTableBias) else 0


@functools.cache
def _compile_for(device: str) -> Callable[..., Any]:
    """Return FlexAttention for a type of device; "eager" runs it unfused, since a CPU needs no kernel here."""
    backend = "inductor" if device == "cuda" else "eager"
    return torch.compile(flex_attention, dynamic=True, fullgraph=True, backend=backend)


def _mask(plan: AttentionPlan, q: Tensor, k: Tensor) -> BlockMask:
    """Return the block mask of causality, padding, documents and windows."""
    n, m = q.shape[2], k.shape[2]
    last = plan.visible_until
    if last is None:
        return _causal_mask(n, m, q.device, plan.window)
    last = last.expand(len(q), -1).contiguous()  # (B, m): the mask's function gets the index of the row
    # query i is token i + shift; a tensor, since a changed Python number would compile the kernel again
    shift = torch.full((), m - n, device=q.device)
    first = None if plan.last_query is None else _first_blocks(plan.last_query, n)
    if plan.window is not None:
        first_in_window = _first_blocks_of_window(n, m, q.device, plan.window)[None]
        first = first_in_window if first is None else torch.maximum(first, first_in_window)
    return _block_mask(
        n,
        m,
        q.device,
        lambda b, h, i, j: (j <= i + shift) & (i + shift <= last[b, j]),
        skip_mask_below=False,
        first=first,
    )


def _first_blocks(last: Tensor, n: int) -> Tensor:
    """Return (B, blocks) int32, the first block of keys that each block of queries sees.

    Args:
        last: (B, m), index of the last query that may see each key.
        n: number of queries, the last n of the m tokens.
    """
    m = last.shape[1]
    begin = torch.arange(m - n, m, BLOCK, device=last.device)
    # documents follow one another, so the last query of a key never decreases: a binary search finds the first key
    return torch.searchsorted(last.contiguous(), begin.expand(len(last), -1).contiguous(), out_int32=True) // BLOCK


def _first_blocks_of_window(n: int, m: int, device: torch.device, window: int) -> Tensor:
    """Return (blocks,) int32, the first block of keys that each block of the last n of m tokens sees in its window."""
    begin = torch.arange(m - n, m, BLOCK, dtype=torch.int32, device=device)
    return (begin - (window - 1)).clamp_min(0) // BLOCK


@functools.lru_cache(maxsize=CACHED_MASKS)
def _causal_mask(n: int, m: int, device: torch.device, window: int | None = None) -> BlockMask:
    """Return the causal block mask of the last n of m tokens, without the blocks outside their window."""
    shift = torch.full((), m - n, device=device)
    first = None if window is None else _first_blocks_of_window(n, m, device, window)[None]
    return _block_mask(n, m, device, lambda b, h, i, j: j <= i + shift, skip_mask_below=True, first=first)


def _block_mask(
    n: int,
    m: int,
    device: torch.device,
    visible: Callable[..., Tensor],
    skip_mask_below: bool,
    first: Tensor | None = None,
) -> BlockMask:
    """Return the block mask of the last n of m tokens, in closed form: torch would evaluate all n·m pairs.

    Args:
        n: number of queries.
        m: number of keys.
        device: device of the mask's tensors.
        visible: function of (batch, head, query, key) indices.
        skip_mask_below: whether ``visible`` is true in all blocks below the diagonal, and so is not evaluated there.
        first: (B or 1, blocks) first block of keys that is read, for each block of queries; None: the row's first.
    """
    begin = torch.arange(0, n, BLOCK, dtype=torch.int32, device=device)  # first query of each block
    seen = (torch.clamp(begin + BLOCK, max=n) - 1 + m - n) // BLOCK + 1  # blocks of keys, up to the block's last query
    # blocks of keys that all queries of the block see entirely
    full = (begin + m - n + 1) // BLOCK if skip_mask_below else torch.zeros_like(begin)
    full = torch.where(begin + BLOCK <= n, full, 0)  # an incomplete last block is evaluated
    first = torch.zeros_like(begin)[None] if first is None else first
    full = torch.maximum(full, first)  # (B or 1, blocks), end of the blocks that are not evaluated
    blocks = torch.arange(-(-m // BLOCK), dtype=torch.int32, device=device)
    # from_kv_blocks takes, for each block of queries, how many blocks of keys to read and their indices, these first;
    # the modulo rotates the list of all blocks so that it begins with them
    return BlockMask.from_kv_blocks(
        (seen - full)[:, None],
        ((full[:, :, None] + blocks) % len(blocks))[:, None],
        (full - first)[:, None],
        ((first[:, :, None] + blocks) % len(blocks))[:, None],
        BLOCK_SIZE=BLOCK,
        mask_mod=visible,
        seq_lengths=(n, m),
    )


def score_mod(plan: AttentionPlan, batch: int) -> ScoreMod | None:
    """Return the function that changes a score as ``plan`` says, for ``batch`` rows; None if it stays as it is.

    The function applies the softcap and adds the bias.
    """
    add_bias = bias_score_mod(plan.bias, plan.positions, batch, plan.padding, plan.last_query)
    if not plan.softcap:
        return add_bias
    cap = torch.full((), plan.softcap, device=plan.positions.k.device)  # a tensor, as ``shift`` of a mask

    def cap_and_add_bias(score: Tensor, b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
        score = cap * (score / cap).tanh()
        return score if add_bias is None else add_bias(score, b, h, i, j)

    return cap_and_add_bias
