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

from fairseq_rpe.attention.double_backward import differentiable
from fairseq_rpe.attention.dropout import ROWS, keep_block
from fairseq_rpe.attention.plan import Plan
from fairseq_rpe.core.bias import leaves, rebuilt

Attend = Callable[[Tensor, Tensor, Tensor, Plan, Tensor | None], Tensor]
# scores of a block: a few such matrices fit a CPU's cache; elsewhere small pieces of work are the dearer
ELEMENTS, DEVICE_ELEMENTS, FEWEST = 1 << 20, 1 << 26, 16
TALLEST = 256  # queries of a block with fewer than all heads


def in_rows(q: Tensor, k: Tensor, v: Tensor, plan: Plan, dropout: float, seed: int, attend: Attend) -> Tensor:
    """q (B, H, n, D), k, v (B, H, m, D) -> (B, H, n, D), by ``attend`` of some queries and the keys up to the last."""
    batch, heads, n, _ = q.shape
    most = ELEMENTS if q.device.type == "cpu" else DEVICE_ELEMENTS
    each = most // (batch * k.shape[2])  # rows of one head
    rows = (
        each // heads if plan.transform_scores is not None else max(each // heads, min(each, TALLEST))
    )  # which may mix heads
    rows = max(ROWS, rows // ROWS * ROWS) if dropout > 0 else max(FEWEST, rows)
    # drawing dropout for all heads is drawing it once
    some = heads if plan.transform_scores is not None or dropout > 0 else max(1, min(heads, each // min(rows, n)))
    if rows >= n and some >= heads:  # one block, which may be kept
        shape = batch, heads, n, k.shape[2]
        return attend(q, k, v, plan, keep_block(seed, 0, n, shape, dropout, q.device) if dropout > 0 else None)
    found = leaves(plan.form)
    assert found is not None
    reading = [] if plan.reading is None else [(plan.reading.vectors, "table")]
    tensors = [(q, "rows"), (k, "keys"), (v, "keys"), *found, *reading, *((x, "") for x in plan.learned)]
    kinds = tuple(kind for _, kind in tensors)
    blocks = _Blocks(plan, kinds, (rows, some), (batch, heads, n, k.shape[2]), dropout, seed, attend)
    return Rows.apply(blocks, *(x for x, _ in tensors))


class _Blocks:
    """How to compute each block: everything but the tensors that gradients are wanted of."""

    def __init__(
        self,
        plan: Plan,
        kinds: tuple[str, ...],
        size: tuple[int, int],
        shape: tuple[int, int, int, int],
        dropout: float,
        seed: int,
        attend: Attend,
    ) -> None:
        known = leaves(plan.form)
        assert known is not None
        # without its tensors, which may hold a graph
        form = rebuilt(plan.form, iter([x.new_empty(0) for x, _ in known]))
        reading = None if plan.reading is None else replace(plan.reading, vectors=plan.reading.vectors.new_empty(0))
        self.plan = replace(plan, form=form, reading=reading)
        self.kinds, self.size, self.shape = kinds, size, shape
        self.dropout, self.seed, self.attend = dropout, seed, attend

    def __iter__(self) -> Iterator[tuple[slice, slice]]:
        """Rows and heads."""
        (rows, some), (_, heads, n, _) = self.size, self.shape
        for start in range(0, n, rows):
            for head in range(0, heads, some):
                yield slice(start, min(start + rows, n)), slice(head, min(head + some, heads))

    def slices(self, tensors: tuple[Tensor, ...], rows: slice, heads: slice) -> list[Tensor]:
        """What a block sees of tensors."""
        _, _, n, m = self.shape
        cut = {"rows": rows, "keys": slice(m - n + rows.stop)}
        found = []
        for x, kind in zip(tensors, self.kinds, strict=True):
            if kind in cut:
                x = x[:, heads, cut[kind]]
            elif kind == "table" and len(x) > 1:  # of one, all heads share it
                x = x[heads]
            found.append(x)
        return found

    def __call__(self, parts: list[Tensor], rows: slice, heads: slice) -> Tensor:
        q, k, v, *others = parts
        left = iter(others)
        form = rebuilt(self.plan.form, left)
        reading = None if self.plan.reading is None else replace(self.plan.reading, vectors=next(left))
        plan = replace(replace(self.plan, form=None).part(rows.start, rows.stop), form=form, reading=reading)
        keep = None
        if self.dropout > 0:
            keep = keep_block(self.seed, rows.start, rows.stop, self.shape, self.dropout, q.device)[:, heads]
        return self.attend(q, k, v, plan, keep)


class Rows(torch.autograd.Function):
    """All blocks of queries. Second derivatives are computed in one block, in O(n²) memory."""

    @staticmethod
    def forward(ctx: Any, blocks: _Blocks, *tensors: Tensor) -> Tensor:
        out = torch.empty_like(tensors[0])
        for rows, heads in blocks:
            out[:, heads, rows] = blocks(blocks.slices(tensors, rows, heads), rows, heads)
        # not the parameters: what comes back from there may be copies, and ``transform_scores`` has the
        # parameters themselves
        ctx.save_for_backward(*tensors[: len(tensors) - len(blocks.plan.learned)])
        ctx.blocks = blocks
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
        blocks, needs = ctx.blocks, ctx.needs_input_grad[1:]
        _, heads, n, _ = blocks.shape

        def formula(*tensors: Tensor) -> Tensor:
            out: Tensor = blocks([*tensors, *blocks.plan.learned], slice(0, n), slice(0, heads))
            return out

        saved = tuple(ctx.saved_tensors)  # may be unpacked only once, under activation checkpointing
        learned = blocks.plan.learned
        return None, *differentiable(lambda: Rows.gradients(ctx, grad, saved), formula, grad, saved, needs, learned)

    @staticmethod
    def gradients(ctx: Any, grad: Tensor, saved: tuple[Tensor, ...]) -> tuple[Tensor | None, ...]:
        """Of all tensors, those that the forward pass has ``saved``, and of the parameters, block by block."""
        blocks, wanted = ctx.blocks, ctx.needs_input_grad[1:]
        tensors = *saved, *blocks.plan.learned
        own = len(tensors) - len(blocks.plan.learned)
        sums = [
            torch.zeros_like(x, dtype=torch.promote_types(x.dtype, torch.float32)) if need else x
            for x, need in zip(tensors, wanted, strict=True)
        ]
        for rows, heads in blocks:
            cut = blocks.slices(tensors, rows, heads)
            parts = [x.detach().requires_grad_(need) for x, need in zip(cut[:own], wanted, strict=False)]
            parts += blocks.plan.learned
            with torch.enable_grad(), torch.autocast(grad.device.type, enabled=False):
                out = blocks(parts, rows, heads)
            asked = [x for x, need in zip(parts, wanted, strict=True) if need]
            found = iter(torch.autograd.grad(out, asked, grad[:, heads, rows], allow_unused=True))
            for total, need in zip(blocks.slices(tuple(sums), rows, heads), wanted, strict=True):
                if need and (one := next(found)) is not None:
                    total += one
        each = zip(sums, tensors, wanted, strict=True)
        return tuple(total.to(x.dtype) if need else None for total, x, need in each)
