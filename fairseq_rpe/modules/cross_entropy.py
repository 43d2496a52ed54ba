"""Cross-entropy of a linear layer, computed from tiles of the logits, so that (tokens, V) is never stored.

The loss of a target y with features x and output weights W (V, C) is log Σ_v exp(W_v·x) - W_y·x in nats, in float32.
The sum over v is an online softmax over tiles of the vocabulary, with a running sum and a running maximum. Training in
float32 uses torch's ``linear_cross_entropy`` where it exists (from 2.13 on). Other dtypes use the implementation here,
because torch's does not accumulate the gradient of bfloat16 weights in float32.
"""

from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn import functional as F

from fairseq_rpe.attention.double_backward import differentiable_gradients
from fairseq_rpe.attention.toeplitz_attention import LOG2E

CHUNK = 256  # tokens of a chunk of logits (CHUNK, V) in training
CHUNK_ELEMENTS = 1 << 21  # logits of a chunk where CHUNK tokens have fewer
# tokens (per thread on a CPU) and vocabulary entries of a tile: the size of a core's cache, and 128 MiB on a GPU
TILES = {"cpu": (128, 1024), "cuda": (2048, 16384)}


def _cap(logits: Tensor, softcap: float) -> tuple[Tensor, Tensor | None]:
    """Return the capped logits and their derivatives with respect to the logits; without a softcap, those and None."""
    if not softcap:
        return logits, None
    ratio = torch.tanh(logits / softcap)
    return softcap * ratio, 1 - ratio.square()


def _tile_losses(x: Tensor, weight: Tensor, target: Tensor, columns: int, softcap: float) -> Tensor:
    """Return the losses (n,) of n tokens in nats, from an online softmax over tiles of ``columns`` symbols."""
    top = torch.full((len(x), 1), -torch.inf, device=x.device)
    total, target_logit = torch.zeros_like(top), torch.zeros_like(top)
    for start in range(0, len(weight), columns):
        logits = F.linear(x, weight[start : start + columns]).float()  # (n, columns)
        logits, _ = _cap(logits, softcap)
        index = target[:, None] - start
        inside = (index >= 0) & (index < logits.shape[1])
        target_logit = torch.where(inside, logits.gather(1, index.clamp(0, logits.shape[1] - 1)), target_logit)
        # sums of earlier tiles are relative to their maximum `top`, so they are rescaled to the new maximum
        highest = torch.maximum(top, logits.amax(-1, keepdim=True))
        logits.sub_(highest)
        # exp2 is faster; the rounding of log2(e) does not matter in bfloat16 but adds 5e-8 bits in float32
        powers = logits.exp_() if x.dtype == torch.float32 else logits.mul_(LOG2E).exp2_()
        total = total * (top - highest).exp() + powers.sum(-1, keepdim=True)
        top = highest  # (n, 1) maximum of the logits of all tiles so far
    return (top - target_logit + total.log())[:, 0]


@torch.no_grad()
def target_losses(x: Tensor, weight: Tensor, target: Tensor, softcap: float = 0.0) -> Tensor:
    """Return ``F.cross_entropy(x @ weight.T, target, reduction="none")`` in float32 without storing all logits.

    Args:
        x: (N, C) features.
        weight: (V, C) output weights.
        target: (N,) int64.
        softcap: c of c·tanh(s/c), applied to the logits s; 0: none.

    Returns:
        (N,) losses in nats.
    """
    rows, columns = TILES.get(x.device.type, TILES["cpu"])
    if x.device.type == "cpu":
        rows *= torch.get_num_threads()
    batches = zip(x.split(rows), target.split(rows), strict=True)
    return torch.cat([_tile_losses(xb, weight, tb, columns, softcap) for xb, tb in batches])


def count_chunk_rows(tokens: int, vocabulary: int) -> int:
    """Return the number of tokens whose logits the loss computes at once, except in float32 without a softcap.

    Args:
        tokens: tokens of the batch.
        vocabulary: V.
    """
    return min(max(1, tokens), max(CHUNK, CHUNK_ELEMENTS // vocabulary))


def linear_cross_entropy(
    x: Tensor, weight: Tensor, target: Tensor, ignore_index: int, reduce: bool = True, softcap: float = 0.0
) -> Tensor:
    """Return ``F.cross_entropy(x @ weight.T, target)`` in float32, with matrix products in autocast's dtype.

    Gradients of the sum are computed in the forward pass, so a second backward pass through it is not possible. Second
    derivatives (``create_graph=True``) are computed from all logits.

    Args:
        x: (N, C) features.
        weight: (V, C) output weights.
        target: (N,) int64.
        ignore_index: targets with this value have no loss.
        reduce: sum over tokens; otherwise (N,) losses, which need all logits if gradients are enabled.
        softcap: c of c·tanh(s/c), applied to the logits s; 0: none.

    Returns:
        The loss in nats.
    """
    device = x.device.type
    dtype = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else x.dtype
    if not torch.is_grad_enabled():
        losses = target_losses(x.to(dtype), weight.to(dtype), target, softcap).masked_fill(target == ignore_index, 0)
        return losses.sum() if reduce else losses
    if not reduce:
        logits = _logits(x.to(dtype), weight.to(dtype), softcap)
        return F.cross_entropy(logits, target, ignore_index=ignore_index, reduction="none")
    if dtype == torch.float32 and not softcap and hasattr(F, "linear_cross_entropy"):
        chunking = torch.nn.LinearCrossEntropyOptions(chunking_method=None, batch_chunk_size=CHUNK)
        loss = F.linear_cross_entropy(x, weight, target, reduction="sum", ignore_index=ignore_index, options=chunking)
        return _TwiceDifferentiable.apply(loss, x, weight, target, ignore_index)
    return _LossSum.apply(x, weight, target, ignore_index, dtype, softcap)


def _logits(x: Tensor, weight: Tensor, softcap: float) -> Tensor:
    """Return the logits (N, V) in float32, with the softcap if there is one."""
    logits = F.linear(x, weight).float()
    return softcap * torch.tanh(logits / softcap) if softcap else logits


class _LossSum(torch.autograd.Function):
    """Sum of losses with matrix products in ``dtype``; the weight's gradient is accumulated in float32."""

    @staticmethod
    def forward(
        ctx, x: Tensor, weight: Tensor, target: Tensor, ignore_index: int, dtype: torch.dtype, softcap: float
    ) -> Tensor:
        dx = torch.empty_like(x)
        dweight = torch.zeros_like(weight, dtype=torch.float32)
        loss = x.new_zeros((), dtype=torch.float32)
        low_x, low_weight = x.to(dtype), weight.to(dtype)
        rows = count_chunk_rows(len(x), len(weight))
        # all chunks use the same memory: new memory takes longer to write
        logits_of_chunk, probability_of_chunk = x.new_empty((2, rows, len(weight)), dtype=torch.float32)
        for start in range(0, x.shape[0], rows):
            chunk = slice(start, start + rows)
            keep = (target[chunk] != ignore_index)[:, None]  # (rows, 1)
            label = target[chunk, None].where(keep, 0)
            low_logits = F.linear(low_x[chunk], low_weight)  # (rows, V), fewer rows in the last chunk
            count = len(low_logits)
            logits, slopes = _cap(logits_of_chunk[:count].copy_(low_logits), softcap)
            probability = torch.softmax(logits, -1, out=probability_of_chunk[:count])
            # ln Σ exp(logit) from the largest probability, which is at least 1/V
            log_sum = logits.amax(-1, keepdim=True) - probability.amax(-1, keepdim=True).log()
            loss += ((log_sum - logits.gather(1, label)) * keep).sum()
            # gradient of the loss with respect to the logits: softmax(logits), less 1 at the target
            probability.scatter_add_(1, label, -torch.ones_like(log_sum))
            if slopes is not None:
                probability.mul_(slopes)
            dlogits = low_logits.copy_(probability)
            # tokens without a loss are left out of both products, which is faster than out of (rows, V)
            dx[chunk] = (dlogits @ low_weight) * keep
            kept_x = low_x[chunk] * keep
            if dtype == dweight.dtype:
                dweight.addmm_(dlogits.T, kept_x)  # without a second (V, C) tensor
            else:
                dweight += (dlogits.T @ kept_x).float()  # adding a bfloat16 tensor is slower
        ctx.save_for_backward(dx, dweight.to(weight.dtype), x, weight, target)
        ctx.settings = ignore_index, dtype, softcap
        return loss

    @staticmethod
    def backward(ctx, grad: Tensor) -> tuple[Tensor | None, ...]:
        dx, dweight, x, weight, target = ctx.saved_tensors
        formula = _formula(target, *ctx.settings)
        needs = ctx.needs_input_grad[:2]

        def first_gradients() -> tuple[Tensor, Tensor]:
            return dx.mul_(grad), dweight.mul_(grad)

        return *differentiable_gradients(first_gradients, formula, grad, (x, weight), needs), *[None] * 4


class _TwiceDifferentiable(torch.autograd.Function):
    """Adds second derivatives to torch's own sum, whose gradients are constants for autograd."""

    @staticmethod
    def forward(ctx, loss: Tensor, x: Tensor, weight: Tensor, target: Tensor, ignore_index: int) -> Tensor:
        ctx.save_for_backward(x, weight, target)
        ctx.ignore_index = ignore_index
        return loss.clone()

    @staticmethod
    def backward(ctx, grad: Tensor) -> tuple[Tensor | None, ...]:
        if not torch.is_grad_enabled():
            return grad, None, None, None, None
        x, weight, target = ctx.saved_tensors
        formula, needs = _formula(target, ctx.ignore_index, torch.float32, 0.0), ctx.needs_input_grad[1:3]

        def first_gradients() -> tuple[Tensor | None, ...]:
            leaves = [a.detach().requires_grad_(need) for a, need in zip((x, weight), needs, strict=True)]
            with torch.enable_grad():
                loss = formula(*leaves)
            grads = iter(torch.autograd.grad(loss, [a for a in leaves if a.requires_grad], grad))
            return tuple(next(grads) if need else None for need in needs)

        return None, *differentiable_gradients(first_gradients, formula, grad, (x, weight), needs), None, None


def _formula(
    target: Tensor, ignore_index: int, dtype: torch.dtype, softcap: float
) -> Callable[[Tensor, Tensor], Tensor]:
    """Return the sum of losses as a function of features and output weights, computed from all logits."""

    def loss(x: Tensor, weight: Tensor) -> Tensor:
        logits = _logits(x.to(dtype), weight.to(dtype), softcap)
        return F.cross_entropy(logits, target, ignore_index=ignore_index, reduction="sum")

    return loss
