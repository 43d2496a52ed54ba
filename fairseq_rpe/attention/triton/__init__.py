"""Attention with Triton kernels for biases of positions and biases that depend on the tokens, with their gradients.

Importing this module needs torch alone; the first call imports the package triton.
"""

import functools
import importlib.util
import os

import torch
from torch import Tensor

from fairseq_rpe.attention.content_bias import attend_in_blocks
from fairseq_rpe.attention.key_heads import attend_by_key_head, repeat_key_heads
from fairseq_rpe.attention.plan import AttentionPlan, is_evenly_spaced
from fairseq_rpe.attention.prune import check_pruning
from fairseq_rpe.attention.triton.content_terms import MAX_KEY_COLUMNS, has_even_tables, needs_blocks, separate_terms
from fairseq_rpe.attention.value_width import attend_with_padded_values, has_narrow_values
from fairseq_rpe.core.bias import ScaledDistanceBias, ToeplitzBias
from fairseq_rpe.core.errors import UserError
from fairseq_rpe.core.window_bias import WindowedScaledDistanceBias

HEAD_WIDTHS = range(32, 257, 8)  # narrower heads leave tensor cores idle, wider ones do not fit into shared memory


def triton(q: Tensor, k: Tensor, v: Tensor, plan: AttentionPlan, dropout: float = 0.0) -> Tensor:
    """Compute what :func:`~fairseq_rpe.attention.reference.reference` does, for the types of bias that kernels have.

    These are tables by distance, scaled distances (FIRE), numbers per token (TokenBias), products of queries or keys
    with vectors of their distance (QueryTableBias, KeyTableBias), and sums of all of these but scaled distances. Memory
    is O(n), or O(n·R) for a table of R vectors: the products of each token with all vectors are stored. If those of the
    queries are too many, attention is computed in blocks of queries, and again in the backward pass.

    Products, softmax and sums are float32. The output of queries that are padding is meaningless, as are their
    positions. Pruning uses the bound of the sdpa backend; padded rows, irregular positions and incremental decoding
    are computed exactly.

    Args:
        q: (B, H, n, D), D a multiple of 8 from 32 to 256; the queries are the last n of the m tokens.
        k: (B, G, m, D), in q's dtype. G divides H, and query head h reads key head h // (H / G).
        v: (B, G, m, D), in q's dtype; it may be narrower than q and k, and so is then the output.
        plan: positions, bias, visibility, softcap, null logit and pruning of the n queries and m keys.
        dropout: must be 0.

    Returns:
        (B, H, n, D) in q's dtype.

    Raises:
        UserError: the call is not supported, see :func:`refusal_reason`, or cannot be pruned, see
            :func:`~fairseq_rpe.attention.prune.check_pruning`.
    """
    if reason := refusal_reason(q, k, v, plan, dropout):
        raise UserError(reason)
    if has_narrow_values(q, v):
        return attend_with_padded_values(triton, q, k, v, plan, dropout)
    # not at the top of the file: autograd imports the package triton, which is optional
    from fairseq_rpe.attention.triton.autograd import attend

    if plan.prune:
        check_pruning(q, k, v, plan, dropout)
        assert isinstance(plan.bias, ToeplitzBias)  # checked
        if plan.padding is None and q.shape[2] == k.shape[2] and is_evenly_spaced(plan.bias, plan.positions):
            return attend_by_key_head(_attend_pruned, q, k, v, plan, dropout)
    terms = separate_terms(plan.bias)
    assert terms is not None  # checked
    if needs_blocks(terms, len(q), q.shape[2], k.shape[2]):
        k, v = (repeat_key_heads(x, q.shape[1]) for x in (k, v))
        return attend_in_blocks(q, k, v, plan, 0.0, 0, lambda q, k, v, block, keep: attend(q, k, v, block))
    return attend(q, k, v, plan)


def _attend_pruned(q: Tensor, k: Tensor, v: Tensor, plan: AttentionPlan, dropout: float) -> Tensor:
    """Attend with pruning, with as many heads of q, k and v."""
    from fairseq_rpe.attention.triton.autograd import attend_pruned

    assert isinstance(plan.bias, ToeplitzBias)
    return attend_pruned(q, k, v, plan.bias.columns(k.shape[2]), plan.prune)


def refusal_reason(q: Tensor, k: Tensor, v: Tensor, plan: AttentionPlan, dropout: float = 0.0) -> str | None:
    """Return why this backend cannot compute a call, and which can; None if it can."""
    width, bias = q.shape[-1], plan.bias
    if reason := unavailable_reason(on_gpu=q.is_cuda):
        return reason
    if q.is_cuda and not _is_supported(q.device):
        return "backend 'triton' needs an NVIDIA GPU of compute capability 8.0 or later: use 'flex' or 'sdpa'"
    if reason := unsupported_reason(plan):
        return reason
    if dropout > 0:
        return f"backend 'triton' has no attention dropout, and {dropout:g} was asked for: set it to 0 or use 'sdpa'"
    if q.dtype not in (torch.float16, torch.bfloat16, torch.float32) or k.dtype != q.dtype or v.dtype != q.dtype:
        dtypes = ", ".join(str(x.dtype).removeprefix("torch.") for x in (q, k, v))
        return f"backend 'triton' takes q, k, v of one type, float16, bfloat16 or float32, not {dtypes}: use 'sdpa'"
    if width not in HEAD_WIDTHS:
        return f"backend 'triton' takes head widths from 32 to 256 in steps of 8, not {width}: use 'sdpa'"
    if isinstance(bias, ToeplitzBias) and not is_evenly_spaced(bias, plan.positions):
        needs_grad = bias.table.requires_grad and torch.is_grad_enabled()
        if needs_grad and torch.are_deterministic_algorithms_enabled():
            return (
                "backend 'triton' has no deterministic gradient of a learned table at irregular positions: use 'sdpa'"
            )
    terms = separate_terms(bias)
    if terms is not None and terms.tables and not has_even_tables(terms, plan.positions):
        return "backend 'triton' takes vectors of distances at evenly spaced positions only: use 'sdpa'"
    if terms is not None and plan.null_logit is not None and needs_blocks(terms, len(q), q.shape[2], k.shape[2]):
        return (
            "backend 'triton' computes so many products of queries and vectors in blocks, without a null logit: use "
            "'sdpa', or a smaller batch"
        )
    return None


def unavailable_reason(on_gpu: bool) -> str | None:
    """Return why kernels of this backend do not run on a GPU, or on the CPU; None if they do."""
    if importlib.util.find_spec("triton") is None:
        return "backend 'triton' needs the package triton: pip install triton, or use 'sdpa'"
    if not on_gpu and os.environ.get("TRITON_INTERPRET") != "1":
        return "backend 'triton' needs a GPU: use 'sdpa' (or, to test kernels, set TRITON_INTERPRET=1 from the start)"
    return None


def unsupported_reason(plan: AttentionPlan) -> str | None:
    """Return why this backend supports an encoding on no device; None if it supports it."""
    if plan.transforms_scores or plan.relative_values is not None:
        return "this encoding needs all scores of a query, which backend 'triton' never holds: use 'sdpa'"
    if plan.rotation_regions is not None:
        return "backend 'triton' rotates all pairs alike, which this encoding does not: use 'sdpa'"
    if isinstance(plan.bias, WindowedScaledDistanceBias):
        return "backend 'triton' has no window for a curve of straight pieces, such as fire's: use 'sdpa', or no window"
    terms = separate_terms(plan.bias)
    if terms is None:
        return (
            "backend 'triton' adds numbers of tokens and products of queries or keys with vectors of distances, one of "
            "each, and this bias has other terms: use 'sdpa'"
        )
    if terms.position is not None and not isinstance(terms.position, (ToeplitzBias, ScaledDistanceBias)):
        return "backend 'triton' takes as bias a table or a curve of straight pieces, which this is not: use 'sdpa'"
    if terms.by_key is not None and terms.by_key.num_columns > MAX_KEY_COLUMNS:
        return (
            f"backend 'triton' stores what a key reads from a table of at most {MAX_KEY_COLUMNS:,} distances, and this "
            f"one has {terms.by_key.num_columns:,}: use 'sdpa'"
        )
    return None


@functools.cache
def _is_supported(device: torch.device) -> bool:
    return torch.version.hip is None and torch.cuda.get_device_capability(device) >= (8, 0)
