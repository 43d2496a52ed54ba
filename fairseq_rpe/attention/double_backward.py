"""Second derivatives of operations with an opaque backward pass: kernels, and sums taken in place.

Autograd would treat the gradients that such a backward pass returns as constants. With ``create_graph=True`` the
backward pass is therefore an operation of its own, :func:`differentiable_gradients`, whose derivative is that of a
formula in plain torch. :func:`fused_attention` is torch's CPU kernel with second derivatives.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from fairseq_rpe.core.errors import UserError
from fairseq_rpe.core.tensors import runs_eagerly

Gradients = tuple[Tensor | None, ...]
flash_attention = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
flash_attention_backward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward


def differentiable_gradients(
    compute: Callable[[], Gradients],
    formula: Callable[..., Tensor],
    grad: Tensor,
    tensors: tuple[Tensor, ...],
    needs: tuple[bool, ...],
    parameters: tuple[Tensor, ...] = (),
) -> Gradients:
    """Return the gradients of a custom backward pass, differentiable where a graph of that pass is recorded.

    Only a second derivative evaluates ``formula`` and allocates its intermediate results.

    Args:
        compute: computes the gradients of ``tensors`` and then of ``parameters``, None where none is needed.
        formula: the operation as a differentiable function of ``tensors``; it draws no random numbers.
        grad: gradient of the operation's output.
        tensors: inputs of the operation.
        needs: whether a gradient of each of ``tensors`` and then of each of ``parameters`` is needed.
        parameters: leaves that ``formula`` uses without receiving them.

    Returns:
        What ``compute`` returns.

    Raises:
        UserError: in the backward pass of the result, where its graph is recorded too: third derivatives.
    """
    if not torch.is_grad_enabled():  # create_graph=True records the graph of the backward pass
        return compute()
    gradients: Gradients = _Gradients.apply(compute, formula, needs, len(tensors), grad, *tensors, *parameters)
    return gradients


class _Gradients(torch.autograd.Function):
    """Gradients as a function of the output's gradient, the inputs and the parameters."""

    @staticmethod
    def forward(
        ctx: Any,
        compute: Callable[[], Gradients],
        formula: Callable[..., Tensor],
        needs: tuple[bool, ...],
        count: int,
        grad: Tensor,
        *inputs: Tensor,
    ) -> Gradients:
        ctx.save_for_backward(grad, *inputs[:count])
        # saved tensors may come back as copies, and the formula uses the parameters themselves
        ctx.parameters, ctx.formula, ctx.needs = inputs[count:], formula, needs
        return compute()

    @staticmethod
    def backward(ctx: Any, *incoming: Tensor | None) -> tuple[Any, ...]:
        if torch.is_grad_enabled():
            raise UserError(
                "third derivatives are available from plain torch operations only: attend with backend='reference'"
            )
        # the vector-Jacobian product of the gradients: the formula's first gradients are computed on a graph of
        # detached copies, and differentiated along the incoming cotangents
        grad, *tensors = (x.detach() for x in ctx.saved_tensors)
        inputs = [*tensors, *ctx.parameters]
        grad.requires_grad_()
        for x, need in zip(tensors, ctx.needs, strict=False):
            x.requires_grad_(need)
        with torch.enable_grad(), torch.autocast(grad.device.type, enabled=False):
            out = ctx.formula(*tensors)
            leaves = [x for x, need in zip(inputs, ctx.needs, strict=True) if need]
            first = torch.autograd.grad(out, leaves, grad, create_graph=True, allow_unused=True)
        cotangents = [x for x, need in zip(incoming, ctx.needs, strict=True) if need]
        # gradients that do not depend on the inputs have no second derivative
        pairs = [
            (x, y)
            for x, y in zip(first, cotangents, strict=True)
            if x is not None and y is not None and x.requires_grad
        ]
        second: list[Tensor | None] = [None] * (1 + len(leaves))
        if pairs:
            outputs, seeds = zip(*pairs, strict=True)
            second = list(torch.autograd.grad(outputs, [grad, *leaves], seeds, allow_unused=True))
        grad_grad, *input_grads = second
        remaining = iter(input_grads)
        # compute, formula, needs and count have no gradient
        return None, None, None, None, grad_grad, *(next(remaining) if need else None for need in ctx.needs)


def dense_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    bias: Tensor | None,
    keep: Tensor | None = None,
    *,
    softcap: float = 0.0,
    null_logit: Tensor | None = None,
) -> Tensor:
    """Compute softmax(q·kᵀ/sqrt(D) + bias) v by plain torch operations, in O(n·m) memory.

    Args:
        q: (B, H, n, D).
        k: (B, H, m, D).
        v: (B, H, m, D).
        bias: broadcasts to (B, H, n, m), or None; -inf where a query does not see a key. Each query sees some key.
        keep: (B, H, n, m) scaled dropout mask, or None.
        softcap: c of c·tanh(s/c), which replaces q·kᵀ/sqrt(D); 0: none.
        null_logit: (H,) logits of a key with value 0 that every query sees, or None.

    Returns:
        (B, H, n, D) in v's dtype, computed in float32 or better.
    """
    wide = torch.promote_types(q.dtype, torch.float32)
    scores = torch.matmul(q.to(wide), k.to(wide).mT) * q.shape[3] ** -0.5  # (B, H, n, m)
    if softcap:
        scores = softcap * (scores / softcap).tanh()
    scores = scores if bias is None else scores + bias
    if null_logit is None:
        weights = scores.softmax(-1)
    else:
        null = null_logit.to(wide)[:, None, None].expand(*scores.shape[:3], 1)  # (B, H, n, 1)
        weights = torch.cat([scores, null], -1).softmax(-1)[..., :-1]
    weights = weights if keep is None else weights * keep
    return torch.matmul(weights, v.to(wide)).to(v.dtype)


def causal_bias(n: int, m: int, like: Tensor) -> Tensor:
    """Return the causal mask (n, m) of the last n of m tokens: 0, and -inf in the future, in float32 or better."""
    wide = torch.promote_types(like.dtype, torch.float32)
    return torch.full((n, m), float("-inf"), dtype=wide, device=like.device).triu(m - n + 1)


def contiguous_rows(x: Tensor) -> Tensor:
    """Return x with a last dimension of stride 1; torch's CPU kernel silently misreads other strides."""
    return x if x.stride(-1) == 1 else x.contiguous()


def fused_attention(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None = None, causal: bool = False) -> Tensor:
    """Compute attention by torch's kernel, with second derivatives on a CPU.

    On other devices, in compiled code and in function transforms (``torch.func``) it is torch's own operation, which
    raises an error at a second derivative where its kernel has none.

    Args:
        q: (B, H, n, D).
        k: (B, H, m, D).
        v: (B, H, m, D). If its width is another one, a CPU needs O(n·m) memory.
        mask: (B or 1, H or 1, n, m) added to the scores, or None.
        causal: whether key j is hidden from query i for j > i; n = m, without a mask.

    Returns:
        (B, H, n, D) in q's dtype, as wide as v.
    """
    if q.shape[3] != v.shape[3] and q.device.type == "cpu":
        return dense_attention(q, k, v, causal_bias(q.shape[2], k.shape[2], q) if causal else mask)
    inputs = (q, k, v) if mask is None else (q, k, v, mask)
    needs_graph = torch.is_grad_enabled() and any(x.requires_grad for x in inputs)
    uses_torch = not needs_graph or q.device.type != "cpu" or (mask is not None and mask.requires_grad)
    if uses_torch or not runs_eagerly():
        return F.scaled_dot_product_attention(q, k, v, attn_mask=mask, is_causal=causal)
    out: Tensor = FlashAttention.apply(contiguous_rows(q), contiguous_rows(k), contiguous_rows(v), mask, causal)
    return out


class FlashAttention(torch.autograd.Function):
    """torch's CPU kernel with the second derivatives that it lacks; the mask has no gradient."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, causal: bool) -> Tensor:
        """Compute the output and save what the backward pass needs."""
        out, lse = flash_attention(q, k, v, is_causal=causal, attn_mask=mask)
        ctx.save_for_backward(q, k, v, out, lse, mask)
        ctx.causal = causal
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        """Return the gradients of the inputs, differentiable if a graph of the backward pass is recorded."""
        q, k, v, out, lse, mask = ctx.saved_tensors
        causal = ctx.causal

        def compute() -> tuple[Tensor | None, ...]:
            return tuple(
                flash_attention_backward(
                    contiguous_rows(grad), q, k, v, out, lse, dropout_p=0.0, is_causal=causal, attn_mask=mask
                )
            )

        def formula(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            bias = causal_bias(q.shape[2], k.shape[2], q) if causal else mask
            return dense_attention(q, k, v, bias)

        needs = ctx.needs_input_grad[:3]
        return *differentiable_gradients(compute, formula, grad, (q, k, v), needs), None, None
