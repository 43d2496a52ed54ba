"""Cross-entropy of a linear layer from tiles of its logits, so that (tokens, vocabulary) never lies in memory.

The loss of a target y with features x and output weights W (V, C) is log Σ_v exp(W_v·x) - W_y·x in nats, in float32.
The sum over v is taken along from tile to tile of the vocabulary with its maximum. Training in float32 is torch's own
``linear_cross_entropy`` where that exists (2.13 on); it does not sum a bfloat16 weight's gradient in float32.
"""

from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn import functional as F

from fairseq_rpe.attention.double_backward import differentiable
from fairseq_rpe.attention.toeplitz_attention import LOG2E

CHUNK = 256  # tokens whose logits are in memory at a time in training, all types each
# Tokens (on a CPU for each thread) and types of a tile: what a core's cache holds, and 128 MiB on a GPU.
TILES = {"cpu": (128, 1024), "cuda": (2048, 16384)}


def _rows(x: Tensor, weight: Tensor, target: Tensor, columns: int) -> tuple[Tensor, Tensor, Tensor]:
    """Losses (n, 1) of a few tokens; exp(logit - maximum) in the last tile, and its sum (n, 1) over all tiles."""
    top = torch.full((len(x), 1), -torch.inf, device=x.device)
    total, own = torch.zeros_like(top), torch.zeros_like(top)
    for start in range(0, len(weight), columns):
        logits = F.linear(x, weight[start : start + columns]).float()
        place = target[:, None] - start
        inside = (place >= 0) & (place < logits.shape[1])
        own = torch.where(inside, logits.gather(1, place.clamp(0, logits.shape[1] - 1)), own)
        highest = torch.maximum(top, logits.amax(-1, keepdim=True))
        logits.sub_(highest)
        # the rounding of log2(e) would be in every sum: nothing to bfloat16, 5e-8 bits in float32
        powers = logits.exp_() if x.dtype == torch.float32 else logits.mul_(LOG2E).exp2_()
        total = total * (top - highest).exp() + powers.sum(-1, keepdim=True)
        top = highest
    return top - own + total.log(), powers, total


@torch.no_grad()
def target_losses(x: Tensor, weight: Tensor, target: Tensor) -> Tensor:
    """``F.cross_entropy(x @ weight.T, target, reduction="none")`` in float32, (N,), without the (N, V) logits."""
    rows, columns = TILES.get(x.device.type, TILES["cpu"])
    if x.device.type == "cpu":
        rows *= torch.get_num_threads()
    parts = zip(x.split(rows), target.split(rows), strict=True)
    return torch.cat([_rows(xb, weight, tb, columns)[0][:, 0] for xb, tb in parts])


def linear_cross_entropy(x: Tensor, weight: Tensor, target: Tensor, ignore_index: int, reduce: bool = True) -> Tensor:
    """``F.cross_entropy(x @ weight.T, target)`` in float32; products in autocast's dtype where it is on.

    x (N, C) features, weight (V, C), target (N,) int64, of which those of ``ignore_index`` count nothing. The sum over
    tokens; without ``reduce`` one loss per token, (N,), with all logits if there must be gradients. The gradients of
    the sum are made during the forward pass, so a second backward through it is not possible. Second derivatives
    (``create_graph=True``) are those of all logits.
    """
    kind = x.device.type
    dtype = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else x.dtype
    if not torch.is_grad_enabled():
        losses = target_losses(x.to(dtype), weight.to(dtype), target).masked_fill(target == ignore_index, 0)
        return losses.sum() if reduce else losses
    if not reduce:
        logits = F.linear(x.to(dtype), weight.to(dtype)).float()
        return F.cross_entropy(logits, target, ignore_index=ignore_index, reduction="none")
    if dtype == torch.float32 and hasattr(F, "linear_cross_entropy"):
        choice = torch.nn.LinearCrossEntropyOptions(chunking_method=None, batch_chunk_size=CHUNK)
        loss = F.linear_cross_entropy(x, weight, target, reduction="sum", ignore_index=ignore_index, options=choice)
        return _TwiceDifferentiable.apply(loss, x, weight, target, ignore_index)
    return _Sum.apply(x, weight, target, ignore_index, dtype)


class _Sum(torch.autograd.Function):
    """Products in ``dtype``; the gradient of the weight is summed in float32 and is not rounded on the way to it."""

    @staticmethod
    def forward(ctx, x: Tensor, weight: Tensor, target: Tensor, ignore_index: int, dtype: torch.dtype) -> Tensor:
        dx = torch.empty_like(x)
        dweight = torch.zeros_like(weight, dtype=torch.float32)
        loss = x.new_zeros((), dtype=torch.float32)
        low_x, low_weight = x.to(dtype), weight.to(dtype)
        for start in range(0, x.shape[0], CHUNK):
            part = slice(start, start + CHUNK)
            keep = (target[part] != ignore_index)[:, None]
            losses, powers, total = _rows(low_x[part], low_weight, target[part], len(weight))
            loss += (losses * keep).sum()
            label = target[part, None].where(keep, 0)
            dlogits = powers.div_(total)
            dlogits.scatter_add_(1, label, -torch.ones_like(total))
            dlogits = dlogits.mul_(keep).to(dtype)
            dx[part] = dlogits @ low_weight
            if dtype == dweight.dtype:
                dweight.addmm_(dlogits.T, low_x[part])  # spares a second (V, C)
            else:
                dweight += dlogits.T @ low_x[part]
        ctx.save_for_backward(dx, dweight.to(weight.dtype), x, weight, target)
        ctx.settings = ignore_index, dtype
        return loss

    @staticmethod
    def backward(ctx, grad: Tensor) -> tuple[Tensor | None, ...]:
        dx, dweight, x, weight, target = ctx.saved_tensors
        formula = _formula(target, *ctx.settings)
        needs = ctx.needs_input_grad[:2]
        found = differentiable(lambda: (dx.mul_(grad), dweight.mul_(grad)), formula, grad, (x, weight), needs)
        return *found, None, None, None


class _TwiceDifferentiable(torch.autograd.Function):
    """torch's own sum, whose gradients autograd takes for constants, with second derivatives."""

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
        formula, needs = _formula(target, ctx.ignore_index, torch.float32), ctx.needs_input_grad[1:3]

        def compute() -> tuple[Tensor | None, ...]:
            leaves = [a.detach().requires_grad_(need) for a, need in zip((x, weight), needs, strict=True)]
            with torch.enable_grad():
                loss = formula(*leaves)
            found = iter(torch.autograd.grad(loss, [a for a in leaves if a.requires_grad], grad))
            return tuple(next(found) if need else None for need in needs)

        return None, *differentiable(compute, formula, grad, (x, weight), needs), None, None


def _formula(target: Tensor, ignore_index: int, dtype: torch.dtype) -> Callable[[Tensor, Tensor], Tensor]:
    """The sum as a function of features and output weights, from all logits."""

    def loss(x: Tensor, weight: Tensor) -> Tensor:
        logits = F.linear(x.to(dtype), weight.to(dtype)).float()
        return F.cross_entropy(logits, target, ignore_index=ignore_index, reduction="sum")

    return loss
