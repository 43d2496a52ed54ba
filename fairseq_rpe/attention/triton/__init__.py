"""Attention with Triton kernels for biases of the distance and curves, learned ones included, in O(n) memory.

Importing this needs torch alone; the package triton is loaded at the first call.
"""

import functools
import importlib.util
import os

import torch
from torch import Tensor

from fairseq_rpe.attention.plan import Plan, by_distance, evenly_spaced
from fairseq_rpe.attention.prune import check_pruning
from fairseq_rpe.core.bias import ScaledDistanceBias, ToeplitzBias
from fairseq_rpe.core.errors import UserError

WIDTHS = range(32, 257, 8)  # head widths: below it tensor cores run empty, above it a block leaves no room on the chip


def triton(q: Tensor, k: Tensor, v: Tensor, plan: Plan, dropout: float = 0.0) -> Tensor:
    """The same as :func:`~fairseq_rpe.attention.reference.reference` for Toeplitz and Curve forms and for no bias.

    q: (B, H, n, D), k, v: (B, H, m, D) of one dtype, D a multiple of 8 from 32 to 256; gives (B, H, n, D) of it.
    Products, softmax and sums are float32. What queries that are padding themselves give has no meaning, as their
    positions have none. Pruning is the sdpa backend's: padded rows, irregular positions and incremental decoding are
    exact all the same.

    Raises:
        UserError: what :func:`refusal` names, or what :func:`~fairseq_rpe.attention.prune.check_pruning` refuses.
    """
    if reason := refusal(q, k, v, plan, dropout):
        raise UserError(reason)
    from fairseq_rpe.attention.triton.autograd import (
        attend,
        pruned,
    )  # which need the package triton, which not everybody has

    if plan.prune:
        check_pruning(q, k, v, plan, dropout)
        if plan.padding is None and q.shape[2] == k.shape[2] and evenly_spaced(plan.form, plan.positions):
            return pruned(q, k, v, by_distance(plan.form, k.shape[2]), plan.prune)
    return attend(q, k, v, plan)


def refusal(q: Tensor, k: Tensor, v: Tensor, plan: Plan, dropout: float = 0.0) -> str | None:
    """Why this backend cannot compute this, and what can; None if it can."""
    width, form = q.shape[-1], plan.form
    if reason := unavailable(on_gpu=q.is_cuda):
        return reason
    if q.is_cuda and not _supported(q.device):
        return "backend 'triton' needs an NVIDIA GPU of compute capability 8.0 or later: use 'flex' or 'sdpa'"
    if reason := never(plan):
        return reason
    if dropout > 0:
        return f"backend 'triton' has no attention dropout, and {dropout:g} was asked for: set it to 0 or use 'sdpa'"
    if q.dtype not in (torch.float16, torch.bfloat16, torch.float32) or k.dtype != q.dtype or v.dtype != q.dtype:
        given = ", ".join(str(x.dtype).removeprefix("torch.") for x in (q, k, v))
        return f"backend 'triton' takes q, k, v of one type, float16, bfloat16 or float32, not {given}: use 'sdpa'"
    if width not in WIDTHS:
        return f"backend 'triton' takes head widths from 32 to 256 in steps of 8, not {width}: use 'sdpa'"
    learned = isinstance(form, ToeplitzBias) and form.table.requires_grad and torch.is_grad_enabled()
    if learned and not evenly_spaced(form, plan.positions) and torch.are_deterministic_algorithms_enabled():
        return "backend 'triton' has no deterministic gradient of a learned table at irregular positions: use 'sdpa'"
    return None


def unavailable(on_gpu: bool) -> str | None:
    """Why no kernel of this backend runs on a GPU, or on the CPU; None if it does."""
    if importlib.util.find_spec("triton") is None:
        return "backend 'triton' needs the package triton: pip install triton, or use 'sdpa'"
    if not on_gpu and os.environ.get("TRITON_INTERPRET") != "1":
        return "backend 'triton' needs a GPU: use 'sdpa' (or, to test kernels, set TRITON_INTERPRET=1 from the start)"
    return None


def never(plan: Plan) -> str | None:
    """What of an encoding this backend serves nowhere."""
    if plan.transform_scores is not None or plan.reading is not None:
        return "this encoding needs all scores of a query, which backend 'triton' never holds: use 'sdpa'"
    if plan.regions is not None:
        return "backend 'triton' turns all pairs alike, which this encoding does not: use 'sdpa'"
    if plan.form is not None and not isinstance(plan.form, (ToeplitzBias, ScaledDistanceBias)):
        return "backend 'triton' takes as bias a table or a curve of straight pieces, which this is not: use 'sdpa'"
    return None


@functools.cache
def _supported(device: torch.device) -> bool:
    return torch.version.hip is None and torch.cuda.get_device_capability(device) >= (8, 0)
