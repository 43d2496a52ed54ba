"""Cross-entropy of a linear layer without the (tokens, vocabulary) logits in memory."""

from __future__ import annotations

import math

import torch
from torch import Tensor
from torch.nn import functional as F

CHUNK = 256  # tokens whose logits are in memory at a time
LOG2E = math.log2(math.e)  # powers of two take a CPU a quarter of the time of powers of e


def linear_cross_entropy(x: Tensor, weight: Tensor, target: Tensor, ignore_index: int, reduce: bool = True) -> Tensor:
    """``F.cross_entropy(x @ weight.T, target)`` in float32, CHUNK tokens at a time.

    Args:
        x: (N, C) features. weight: (V, C). target: (N,) int64.
        ignore_index: targets that count nothing.
        reduce: the sum over tokens; otherwise one loss per token, (N,).

    torch's own ``linear_cross_entropy`` where it exists (2.13 on), otherwise an equivalent; both make the gradients
    during the forward pass, so a second backward through the result is not possible.
    """
    kind = x.device.type
    dtype = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else x.dtype
    if not reduce or not torch.is_grad_enabled():
        low = weight.to(dtype)
        losses = [
            F.cross_entropy(F.linear(xb, low).float(), tb, ignore_index=ignore_index, reduction="none")
            for xb, tb in zip(x.to(dtype).split(CHUNK), target.split(CHUNK), strict=True)
        ]
        return torch.cat(losses).sum() if reduce else torch.cat(losses)
    if dtype == torch.float32 and hasattr(F, "linear_cross_entropy"):
        choice = torch.nn.LinearCrossEntropyOptions(chunking_method=None, batch_chunk_size=CHUNK)
        return F.linear_cross_entropy(x, weight, target, reduction="sum", ignore_index=ignore_index, options=choice)
    return _ChunkedCrossEntropy.apply(x, weight, target, ignore_index, dtype)


class _ChunkedCrossEntropy(torch.autograd.Function):
    """Products in ``dtype``; the gradient of the weight is summed in float32 and is not rounded on the way to it."""

    @staticmethod
    def forward(ctx, x: Tensor, weight: Tensor, target: Tensor, ignore_index: int, dtype: torch.dtype) -> Tensor:
        dx = torch.empty_like(x)
        dweight = torch.zeros_like(weight, dtype=torch.float32)
        loss = x.new_zeros((), dtype=torch.float32)
        low_x, low_weight = x.to(dtype), weight.to(dtype)
        for start in range(0, x.shape[0], CHUNK):
            part = slice(start, start + CHUNK)
            keep = target[part] != ignore_index
            label = target[part].masked_fill(~keep, 0)[:, None]
            logits = F.linear(low_x[part], low_weight).float()
            logits.sub_(logits.amax(-1, keepdim=True))
            score = logits.gather(1, label)
            dlogits = logits.mul_(LOG2E).exp2_()
            total = dlogits.sum(-1, keepdim=True)
            loss += ((total.log() - score)[:, 0] * keep).sum()
            dlogits.div_(total)
            dlogits.scatter_add_(1, label, -torch.ones_like(label, dtype=dlogits.dtype))
            dlogits = dlogits.mul_(keep[:, None]).to(dtype)
            dx[part] = dlogits @ low_weight
            dweight += dlogits.T @ low_x[part]
        ctx.save_for_backward(dx, dweight.to(weight.dtype))
        return loss

    @staticmethod
    def backward(ctx, grad: Tensor) -> tuple[Tensor | None, ...]:
        dx, dweight = ctx.saved_tensors
        return dx.mul_(grad), dweight.mul_(grad), None, None, None
