"""A network of two layers over the scores and biases of all heads, for each pair of a query and a key, on a CPU.

Each layer is linear, or a convolution over neighbouring keys. The hidden units of a few rows, which fit into the CPU's
cache, are in memory at a time; the backward pass computes them again.
"""

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

PAIRS = 1 << 13  # pairs whose hidden units are in memory at a time
SLOPE = 0.01  # of the leaky ReLU at negative numbers


class AddedNetwork(torch.autograd.Function):
    """Computes s + b + f([s; b]) with f two layers with a leaky ReLU between them.

    Inputs and hidden units are 0 at hidden pairs, if these are given. The arguments of ``apply`` are:

        scores: s (B, H, n, m), finite.
        bias: b (B, H, n, m), or None.
        hidden: (B, 1, n, m) bool, True where inputs and hidden units are 0, or None.
        first_weight: (w, H or 2H, k).
        first_bias: (w,).
        last_weight: (H, w, k).
        last_bias: (H,).
    """

    @staticmethod
    def forward(ctx: Any, scores: Tensor, bias: Tensor | None, hidden: Tensor | None, *layers: Tensor) -> Tensor:
        """Compute the output (B, H, n, m)."""
        ctx.save_for_backward(scores, bias, hidden, *layers)
        first_weight, first_bias, last_weight, last_bias = layers
        out = torch.empty_like(scores, memory_format=torch.contiguous_format)
        chunks = _Chunks(scores, bias, hidden, first_weight.shape[2] // 2)
        for batch, rows in chunks:
            x, visible = chunks.inputs(batch, rows)
            units = _hidden_units(x, visible, first_weight, first_bias)
            change = chunks.unpad(_correlate(last_weight, units, last_bias))  # (H, r, m)
            torch.add(scores[batch, :, rows], change, out=out[batch, :, rows])
        return out if bias is None else out.add_(bias)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        """Return the gradients of the arguments, differentiable if a graph of the backward pass is recorded."""
        scores, bias, hidden, *layers = ctx.saved_tensors
        if torch.is_grad_enabled():
            inputs = [x for x, need in zip((scores, bias, hidden, *layers), ctx.needs_input_grad, strict=True) if need]
            out = _add_network(scores, bias, hidden, *layers)
            grads = iter(torch.autograd.grad(out, inputs, grad, create_graph=True))
            return tuple(next(grads) if need else None for need in ctx.needs_input_grad)
        first_weight, first_bias, last_weight, _ = layers
        layer_grads = [torch.zeros_like(x) for x in layers]
        heads, padding = scores.shape[1], first_weight.shape[2] // 2
        scores_grad = grad.clone(memory_format=torch.contiguous_format)
        bias_grad = None if bias is None else scores_grad.clone()
        chunks = _Chunks(scores, bias, hidden, padding)
        for batch, rows in chunks:
            x, visible = chunks.inputs(batch, rows)
            units = _hidden_units(x, visible, first_weight, first_bias)  # (w, L + 2p)
            out_grad = chunks.pad(grad[batch, :, rows])  # (H, L + 2p)
            units_grad = _correlate(last_weight.transpose(0, 1).flip(2), out_grad)  # (w, L)
            end = units.shape[1] - padding
            # a leaky ReLU has the sign of its input
            units_grad = torch.ops.aten.leaky_relu_backward(units_grad, units[:, padding:end], SLOPE, True)
            if visible is not None:
                units_grad.masked_fill_(~visible, 0.0)
            middle = out_grad[:, padding:end]
            contributions = _weight_grad(units_grad, x), units_grad.sum(1), _weight_grad(middle, units), middle.sum(1)
            for total, contribution in zip(layer_grads, contributions, strict=True):
                total += contribution
            x_grad = _correlate(first_weight.transpose(0, 1).flip(2), F.pad(units_grad, (padding, padding)))
            if visible is not None:
                x_grad.masked_fill_(~visible, 0.0)
            x_grad = chunks.unpad(x_grad)  # (H or 2H, r, m)
            scores_grad[batch, :, rows] += x_grad[:heads]
            if bias_grad is not None:
                bias_grad[batch, :, rows] += x_grad[heads:]
        return scores_grad, bias_grad, None, *layer_grads


class _Chunks:
    """Chunks of the rows of a text, whose inputs are matrices with one column for each pair.

    With a convolution of 2p + 1 keys, p columns of padding are on both sides of a row, and p more on both sides of the
    matrix: r rows have L = r·(m + 2p) columns without the latter.

    Args:
        scores: (B, H, n, m).
        bias: (B, H, n, m), or None.
        hidden: (B, 1, n, m) bool, or None.
        padding: p.
    """

    def __init__(self, scores: Tensor, bias: Tensor | None, hidden: Tensor | None, padding: int) -> None:
        self.scores, self.bias, self.hidden, self.padding = scores, bias, hidden, padding

    def __iter__(self) -> Iterator[tuple[int, slice]]:
        """Yield the index of a text and its rows in a chunk."""
        batch, _, n, m = self.scores.shape
        size = max(1, PAIRS // max(1, m))
        for index in range(batch):
            for start in range(0, n, size):
                yield index, slice(start, min(start + size, n))

    def inputs(self, batch: int, rows: slice) -> tuple[Tensor, Tensor | None]:
        """Return the inputs (H or 2H, L + 2p), and where they are visible, (1, L) bool or None."""
        parts = [x[batch, :, rows] for x in (self.scores, self.bias) if x is not None]
        x = torch.cat(parts)  # (H or 2H, r, m)
        if self.hidden is None:
            return self.pad(x), None
        hidden = self.hidden[batch, :, rows]  # (1, r, m)
        x.masked_fill_(hidden, 0.0)
        visible = self.pad(~hidden)
        return self.pad(x), visible[:, self.padding : visible.shape[1] - self.padding]

    def pad(self, x: Tensor) -> Tensor:
        """Return x (C, r, m) as a matrix (C, L + 2p), with zeros as padding."""
        p = self.padding
        return F.pad(F.pad(x, (p, p)).flatten(1), (p, p)) if p else x.flatten(1)

    def unpad(self, x: Tensor) -> Tensor:
        """Return a matrix (C, L) as (C, r, m)."""
        m, p = self.scores.shape[3], self.padding
        return x.unflatten(1, (-1, m + 2 * p))[..., p : p + m]


def _hidden_units(x: Tensor, visible: Tensor | None, weight: Tensor, bias: Tensor) -> Tensor:
    """Return the hidden units (w, L + 2p) of inputs (H or 2H, L + 2p)."""
    units = F.leaky_relu_(_correlate(weight, x, bias), SLOPE)
    if visible is None:
        return units
    padding = weight.shape[2] // 2
    return F.pad(units.masked_fill_(~visible, 0.0), (padding, padding))


def _correlate(weight: Tensor, x: Tensor, bias: Tensor | None = None) -> Tensor:
    """Return Σ_t weight[…, t] · x[:, l + t] for each column l: (out, in, k), (in, L + k - 1) -> (out, L)."""
    size = x.shape[1] - weight.shape[2] + 1
    first = x[:, :size]
    out = weight[..., 0] @ first if bias is None else torch.addmm(bias[:, None], weight[..., 0], first)
    for t in range(1, weight.shape[2]):
        out.addmm_(weight[..., t], x[:, t : t + size])
    return out


def _weight_grad(grad: Tensor, x: Tensor) -> Tensor:
    """Return the gradient (out, in, k) of a layer's weight from that of its output (out, L) and its input."""
    size = grad.shape[1]
    return torch.stack([grad @ x[:, t : t + size].T for t in range(x.shape[1] - size + 1)], dim=2)


def _add_network(
    scores: Tensor,
    bias: Tensor | None,
    hidden: Tensor | None,
    first_weight: Tensor,
    first_bias: Tensor,
    last_weight: Tensor,
    last_bias: Tensor,
) -> Tensor:
    """Compute what :class:`AddedNetwork` does by operations of autograd."""
    total, x = (scores, scores) if bias is None else (scores + bias, torch.cat([scores, bias], dim=1))
    padding = 0, first_weight.shape[2] // 2
    x = x if hidden is None else x.masked_fill(hidden, 0.0)
    units = F.leaky_relu(F.conv2d(x, first_weight[:, :, None], first_bias, padding=padding), SLOPE)
    units = units if hidden is None else units.masked_fill(hidden, 0.0)
    return total + F.conv2d(units, last_weight[:, :, None], last_bias, padding=padding)
