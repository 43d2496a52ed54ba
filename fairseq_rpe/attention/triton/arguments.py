"""What is handed to the kernels: tensors in the memory layouts that they expect, strides, sizes and constants."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from ..blocks import LOG2E
from .tiles import CURVE, DISTANCE, NONE, POSITIONS, TABLE_MARGIN

PARTS_OF_CURVE = 6


def arranged(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """The same numbers with rows of D neighbours, and v in the memory layout of k."""
    q, k = _dense(q), _dense(k)
    return q, k, laid_out(v, k)


def _dense(x: Tensor) -> Tensor:
    """x itself if memory like it has its strides and rows of D neighbours, otherwise a copy."""
    like = torch.empty_like(x, device="meta")
    return x if x.stride(-1) == 1 and like.stride() == x.stride() else x.contiguous()


def laid_out(x: Tensor, like: Tensor) -> Tensor:
    """x in the memory layout of ``like``, which has its shape."""
    return x if x.stride() == like.stride() else torch.empty_like(like).copy_(x)


def arguments(q: Tensor, k: Tensor, v: Tensor, padding: Tensor | None, *tensors: Tensor) -> dict[str, Any]:
    """The kernels' common arguments by name. In place of a tensor that is not there goes q, which is then not read.

    padding, tensors: as in :class:`~fairseq_rpe.attention.triton.autograd.TritonAttention`.
    """
    width, bias, table, at_q, at_k = q.shape[3], NONE.value, None, None, None
    if len(tensors) == PARTS_OF_CURVE:
        value, slope, far, near, ends, middle = tensors
        steps = (value.shape[1] - 1).bit_length()
        bias, table = CURVE.value + steps, _pieces(ends, middle, value, slope, 1 << steps)
        at_q, at_k = near.float().contiguous(), F.pad(far.float(), (0, TABLE_MARGIN))[None]
    elif tensors:
        bias = DISTANCE.value if len(tensors) == 1 else POSITIONS.value
        table, at_q, at_k = (*tensors, None, None)[:3]
        margin = TABLE_MARGIN if at_q is None else 0
        table = F.pad(table.float() * LOG2E, (0, margin)).contiguous()
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
        "scale": width**-0.5 * LOG2E,
        "WIDTH": width,
        "BLOCK_D": 1 << (width - 1).bit_length(),
        "BIAS": bias,
        "PADDED": padding is not None,
    }


def _pieces(ends: Tensor, middle: Tensor, value: Tensor, slope: Tensor, count: int) -> Tensor:
    """(H, 4 count): end, middle, and value and slope in base 2, of each piece and of more that no x is in."""
    columns = [F.pad(ends, (0, count - len(ends)), value=math.inf), F.pad(middle, (0, count - len(middle)))]
    lines = [F.pad(x.float() * LOG2E, (0, count - x.shape[1])) for x in (value, slope)]
    return torch.stack([*(x.float().expand_as(lines[0]) for x in columns), *lines], dim=2).flatten(1)


def _batch_stride(at: Tensor | None) -> int:
    """Elements from a sequence's positions to the next one's; 0 where all share them."""
    return 0 if at is None or at.shape[0] == 1 else at.shape[1]
