"""Attention whose bias depends on the tokens, for blocks of queries: O(block·n) memory, forward and backward.

Each block is computed by plain torch operations, once in the forward pass and again, with gradients, in the backward
pass. Its gradients are added to those of the whole in place: what autograd itself would do with slices of keys, a
tensor of zeros for each block, takes longer than the attention.
"""

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from ..core.forms import leaves, rebuilt
from .dropout import ROWS, keep_block
from .plan import Plan

Attend = Callable[[Tensor, Tensor, Tensor, Plan, Tensor | None], Tensor]
# scores of a block, of all heads: their matrices stay in a CPU's cache; elsewhere small pieces of work are the dearer
ELEMENTS, DEVICE_ELEMENTS, FEWEST = 1 << 20, 1 << 26, 16


def in_rows(q: Tensor, k: Tensor, v: Tensor, plan: Plan, dropout: float, seed: int, attend: Attend) -> Tensor:
    """q (B, H, n, D), k, v (B, H, m, D) -> (B, H, n, D), by ``attend`` of some queries and the keys up to the last."""
    batch, heads, n, _ = q.shape
    most = ELEMENTS if q.device.type == "cpu" else DEVICE_ELEMENTS
    rows = max(FEWEST, most // (batch * heads * k.shape[2]))
    rows = max(ROWS, rows // ROWS * ROWS) if dropout > 0 else rows
    found = leaves(plan.form)
    assert found is not None
    reading = [] if plan.reading is None else [(plan.reading.vectors, "")]
    tensors = [(q, "rows"), (k, "keys"), (v, "keys"), *found, *reading, *((x, "") for x in plan.learned)]
    kinds = tuple(kind for _, kind in tensors)
    blocks = _Blocks(plan, kinds, rows, n, k.shape[2], dropout, seed, attend)
    return Rows.apply(blocks, *(x for x, _ in tensors))


class _Blocks:
    """How to compute each block: everything but the tensors that gradients are wanted of."""

    def __init__(
        self, plan: Plan, kinds: tuple[str, ...], rows: int, n: int, m: int, dropout: float, seed: int, attend: Attend
    ) -> None:
        known = leaves(plan.form)
        assert known is not None
        # without its tensors, which may hold a graph
        form = rebuilt(plan.form, iter([x.new_empty(0) for x, _ in known]))
        reading = None if plan.reading is None else replace(plan.reading, vectors=plan.reading.vectors.new_empty(0))
        self.plan = replace(plan, form=form, reading=reading)
        self.kinds, self.size, self.n, self.m = kinds, rows, n, m
        self.dropout, self.seed, self.attend = dropout, seed, attend

    def __iter__(self) -> Iterator[tuple[int, int]]:
        for start in range(0, self.n, self.size):
            yield start, min(start + self.size, self.n)

    def slices(self, tensors: tuple[Tensor, ...], start: int, stop: int) -> list[Tensor]:
        """What a block sees of tensors (B, H, n or m, …)."""
        cut = {"rows": slice(start, stop), "keys": slice(self.m - self.n + stop), "": slice(None)}
        return [x[:, :, cut[kind]] if kind else x for x, kind in zip(tensors, self.kinds, strict=True)]

    def __call__(self, parts: list[Tensor], start: int, stop: int) -> Tensor:
        q, k, v, *others = parts
        left = iter(others)
        form = rebuilt(self.plan.form, left)
        reading = None if self.plan.reading is None else replace(self.plan.reading, vectors=next(left))
        plan = replace(replace(self.plan, form=None).part(start, stop), form=form, reading=reading)
        shape, p = (*q.shape[:2], self.n, self.m), self.dropout
        keep = keep_block(self.seed, start, stop, shape, p, q.device) if p > 0 else None
        return self.attend(q, k, v, plan, keep)


class Rows(torch.autograd.Function):
    """All blocks of queries. Gradients of gradients are not available."""

    @staticmethod
    def forward(ctx: Any, blocks: _Blocks, *tensors: Tensor) -> Tensor:
        out = torch.empty_like(tensors[0])
        for start, stop in blocks:
            out[:, :, start:stop] = blocks(blocks.slices(tensors, start, stop), start, stop)
        # not the parameters: what comes back from there may be copies, and ``remap`` has the parameters themselves
        ctx.save_for_backward(*tensors[: len(tensors) - len(blocks.plan.learned)])
        ctx.blocks = blocks
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
        blocks, wanted = ctx.blocks, ctx.needs_input_grad[1:]
        tensors = (*ctx.saved_tensors, *blocks.plan.learned)  # saved ones may be asked for once
        own = len(tensors) - len(blocks.plan.learned)
        sums = [
            torch.zeros_like(x, dtype=torch.promote_types(x.dtype, torch.float32)) if need else x
            for x, need in zip(tensors, wanted, strict=True)
        ]
        for start, stop in blocks:
            cut = blocks.slices(tensors, start, stop)
            parts = [x.detach().requires_grad_(need) for x, need in zip(cut[:own], wanted, strict=False)]
            parts += blocks.plan.learned
            with torch.enable_grad(), torch.autocast(grad.device.type, enabled=False):
                out = blocks(parts, start, stop)
            asked = [x for x, need in zip(parts, wanted, strict=True) if need]
            found = iter(torch.autograd.grad(out, asked, grad[:, :, start:stop], allow_unused=True))
            for total, need in zip(blocks.slices(tuple(sums), start, stop), wanted, strict=True):
                if need and (one := next(found)) is not None:
                    total += one
        each = zip(sums, tensors, wanted, strict=True)
        return None, *(total.to(x.dtype) if need else None for total, x, need in each)
