"""Attention through torch's FlexAttention: bias and mask as functions of (batch, head, query, key).

On CUDA it is compiled, once for all lengths, into one kernel that reads tables or works a bias out for each pair, and
skips hidden blocks; gradients of learned tables and numbers are those of captured tensors. On the CPU the same
functions run unfused, with O(n²) memory: a check of the functions rather than a fast path.
"""

import functools

import torch
from torch import Tensor
from torch.fx.experimental import _config as shapes
from torch.nn.attention.flex_attention import BlockMask, flex_attention

from fairseq_rpe.attention.plan import Plan
from fairseq_rpe.core.bias import (
    Bias,
    ContentBias,
    KeyTableBias,
    PairBias,
    PointwiseBias,
    QueryKeyTableBias,
    QueryTableBias,
    ScaledDistanceBias,
    SumBias,
    ToeplitzBias,
)
from fairseq_rpe.core.errors import UserError
from fairseq_rpe.core.score_mod import Function
from fairseq_rpe.core.score_mod import score_mod as bias_score_mod

BLOCK = 128  # of a block mask
WIDTHS = range(16, 257)
WIDEST = 1024  # columns of a table that is kept for each token
KEPT_MASKS = 32
NO_BACKWARD = "FlexAttention has no backward pass on the CPU: use 'sdpa' for training"
COMPILATIONS = 64  # forms, dtypes, head widths, with or without gradients; lengths are dynamic


def flex(q: Tensor, k: Tensor, v: Tensor, plan: Plan, dropout: float = 0.0) -> Tensor:
    """The same as :func:`~fairseq_rpe.attention.reference.reference`.

    q: (B, H, n, D), k, v: (B, H, m, D); gives (B, H, n, D) in q's dtype. Gradients on CUDA only.

    Raises:
        UserError: what :func:`refusal` names.
    """
    if reason := refusal(q, k, v, plan, dropout):
        raise UserError(reason)
    given = q.dtype
    if not q.is_cuda:  # unfused, it would round the scores to half precision
        q, k, v = (x.to(torch.promote_types(x.dtype, torch.float32)) for x in (q, k, v))
    # past the limit, fullgraph makes torch raise an error where it would fall back to O(n²) memory in silence; "duck
    # shapes" would compile sizes that happen to be equal (a batch of 2, 2 blocks) as one, and anew where they differ
    settings = torch._dynamo.config.patch(recompile_limit=COMPILATIONS)
    with settings, shapes.patch(use_duck_shape=False):  # type: ignore[attr-defined]  # torch gives it one late
        out = _compiled(q.device.type)(q, k, v, score_mod=score_mod(plan, q.shape[0]), block_mask=_mask(plan, q, k))
    return out.to(given)


def refusal(q: Tensor, k: Tensor, v: Tensor, plan: Plan, dropout: float = 0.0) -> str | None:
    """Why this backend cannot compute this, and what can; None if it can."""
    if reason := never(plan):
        return reason
    if plan.prune:
        return "backend 'flex' does not prune: use 'triton', 'sdpa' on the CPU or no pruning"
    if dropout > 0:
        return f"backend 'flex' has no attention dropout, and {dropout:g} was asked for: set it to 0 or use 'sdpa'"
    if not q.is_cuda:
        if torch.is_grad_enabled() and (_learned(plan.form) or any(x.requires_grad for x in (q, k, v))):
            return NO_BACKWARD
        return None
    if reason := not_compiled(plan):
        return reason
    if q.dtype not in (torch.float16, torch.bfloat16, torch.float32):
        return f"backend 'flex' takes float16, bfloat16 or float32 on a GPU, not {q.dtype}: use 'sdpa'"
    if q.shape[-1] not in WIDTHS:
        return f"backend 'flex' takes head widths from 16 to 256 on a GPU, not {q.shape[-1]}: use 'sdpa'"
    return None


def never(plan: Plan) -> str | None:
    """What of an encoding this backend serves nowhere."""
    if plan.transform_scores is not None or plan.reading is not None:
        return "this encoding needs all scores of a query, which backend 'flex' never holds: use 'sdpa'"
    if _has_products(plan.form):
        return "backend 'flex' has no products of queries, keys and vectors of their distance: use 'sdpa'"
    if _widest(plan.form) > WIDEST:
        return (
            f"backend 'flex' keeps what a token reads from a table of at most {WIDEST:,} distances, and this one has "
            f"{_widest(plan.form):,}: use 'sdpa', which needs no more memory for more of them"
        )
    if plan.regions is not None:
        return "backend 'flex' turns all pairs alike, which this encoding does not: use 'sdpa'"
    return None


def not_compiled(plan: Plan) -> str | None:
    """What of an encoding is served on the CPU alone."""
    if isinstance(plan.form, PairBias) and not isinstance(plan.form, (ScaledDistanceBias, PointwiseBias)):
        return "backend 'flex' compiles tables and arithmetic of a head, not this function of two positions: use 'sdpa'"
    return None


def _learned(form: Bias | None) -> bool:
    """Whether the bias may need a gradient; what a function reads is not known."""
    if isinstance(form, PairBias):
        return not isinstance(form, PointwiseBias) or any(x.requires_grad for x in form.numbers)
    if isinstance(form, ContentBias):
        return True
    return form is not None and (form.table if isinstance(form, ToeplitzBias) else form.bias).requires_grad


def _has_products(form: Bias | None) -> bool:
    """Whether the bias is a product of query, key and a vector of their distance."""
    if isinstance(form, SumBias):
        return any(map(_has_products, form.forms))
    return isinstance(form, QueryKeyTableBias)


def _widest(form: Bias | None) -> int:
    """Columns of the largest table that tokens read from."""
    if isinstance(form, SumBias):
        return max(map(_widest, form.forms))
    return form.vectors.shape[1] if isinstance(form, QueryTableBias | KeyTableBias) else 0


@functools.cache
def _compiled(device: str) -> Function:
    backend = "inductor" if device == "cuda" else "eager"
    return torch.compile(flex_attention, dynamic=True, fullgraph=True, backend=backend)


def _mask(plan: Plan, q: Tensor, k: Tensor) -> BlockMask:
    n, m = q.shape[2], k.shape[2]
    last = plan.seen_until
    if last is None:
        return _causal_mask(n, m, q.device)
    shift = torch.full((), m - n, device=q.device)
    first = None if plan.last_query is None else _first_blocks(plan.last_query, n)
    return _block_mask(
        n, m, q.device, lambda b, h, i, j: (j <= i + shift) & (i + shift <= last[b, j]), whole=False, first=first
    )


def _first_blocks(last: Tensor, n: int) -> Tensor:
    """(B, blocks) int32: of each block of queries, the first block of keys that any of them sees; ``last`` (B, m)."""
    m = last.shape[1]
    begin = torch.arange(m - n, m, BLOCK, device=last.device)
    # documents follow one another, so the last query of a key never falls
    return torch.searchsorted(last.contiguous(), begin.expand(len(last), -1).contiguous(), out_int32=True) // BLOCK


@functools.lru_cache(maxsize=KEPT_MASKS)
def _causal_mask(n: int, m: int, device: torch.device) -> BlockMask:
    shift = torch.full((), m - n, device=device)
    return _block_mask(n, m, device, lambda b, h, i, j: j <= i + shift, whole=True)


def _block_mask(
    n: int, m: int, device: torch.device, visible: Function, whole: bool, first: Tensor | None = None
) -> BlockMask:
    """Blocks that the last n of m tokens see, in closed form: torch would look at all n·m pairs.

    With ``whole``, blocks below the diagonal need no look at ``visible``. ``first``: of :func:`_first_blocks`, in place
    of the row's first block.
    """
    begin = torch.arange(0, n, BLOCK, dtype=torch.int32, device=device)
    seen = (torch.clamp(begin + BLOCK, max=n) - 1 + m - n) // BLOCK + 1  # blocks of keys, up to the block's last query
    full = (begin + m - n + 1) // BLOCK if whole else torch.zeros_like(begin)
    full = torch.where(begin + BLOCK <= n, full, 0)  # ragged blocks are looked at
    blocks = torch.arange(-(-m // BLOCK), dtype=torch.int32, device=device)
    if first is not None:
        return BlockMask.from_kv_blocks(
            (seen - first)[:, None],
            ((first[:, :, None] + blocks) % len(blocks))[:, None],
            BLOCK_SIZE=BLOCK,
            mask_mod=visible,
            seq_lengths=(n, m),
        )
    return BlockMask.from_kv_blocks(
        (seen - full)[None, None],
        ((full[:, None] + blocks) % len(blocks))[None, None],
        full[None, None],
        blocks.expand(len(begin), -1)[None, None],
        BLOCK_SIZE=BLOCK,
        mask_mod=visible,
        seq_lengths=(n, m),
    )


def score_mod(plan: Plan, batch: int) -> Function | None:
    """What adds the bias of ``plan`` to a score, for ``batch`` rows; None where there is no bias."""
    return bias_score_mod(plan.form, plan.positions, batch, plan.padding, plan.last_query)
