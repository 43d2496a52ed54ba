"""Attention in blocks of queries, for biases that depend on the content and for windows: O(block·n) memory.

Plain torch operations compute each block once in the forward pass, and again with gradients in the backward pass. The
gradients of a block are added in place to those of the whole tensors. Autograd would create a tensor of zeros of full
size for each block's slice of the keys, which takes longer than the attention.

Where queries update a state of the keys, each block starts with the state after the block before it. The forward pass
stores the state at the border of each two blocks, and the backward pass goes through the blocks in reverse order.
"""

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from fairseq_rpe.attention.double_backward import differentiable_gradients
from fairseq_rpe.attention.dropout import ROWS, keep_block
from fairseq_rpe.attention.plan import AttentionPlan
from fairseq_rpe.core.tensor_fields import TensorFields

Attend = Callable[[Tensor, Tensor, Tensor, AttentionPlan, Tensor | None], Tensor]
ELEMENTS = 1 << 20  # scores of a block on a CPU, whose cache holds a few such matrices
DEVICE_ELEMENTS = 1 << 26  # scores of a block elsewhere, where small operations are expensive
MIN_ROWS = 16  # least number of queries of a block
WINDOW_ROWS = 128  # queries of a block with a window, which sees the window and as many keys besides
MAX_ROWS = 256  # largest number of queries of a block with fewer than all heads


def attend_in_blocks(
    q: Tensor, k: Tensor, v: Tensor, plan: AttentionPlan, dropout: float, seed: int, attend: Attend
) -> Tensor:
    """Compute attention block by block of queries, and of heads where the block size allows it.

    Args:
        q: (B, H, n, D), rotated; the queries are the last n of the m tokens.
        k: (B, H, m, D), rotated.
        v: (B, H, m, D).
        plan: positions, bias and hooks for all n queries and m keys; its null logit has no gradient.
        dropout: probability of dropping an attention weight.
        seed: seed of the dropout mask, see ``dropout.keep_block``.
        attend: function of (q, k, v, plan, keep) that computes a block: some queries and the keys that they may see.

    Returns:
        (B, H, n, D).
    """
    batch, heads, n, _ = q.shape
    rows, block_heads = _block_size(q, k, plan.transforms_scores, dropout > 0)
    if plan.window is not None and plan.window < n:
        rows, block_heads = WINDOW_ROWS, heads
    if plan.store_key_state is not None and torch.is_grad_enabled():
        rows = n  # later calls may need the gradient of the state, which the backward pass of blocks does not take
    if rows >= n and block_heads >= heads:  # one block, whose graph may stay in memory
        shape = batch, heads, n, k.shape[2]
        return attend(q, k, v, plan, keep_block(seed, 0, n, shape, dropout, q.device) if dropout > 0 else None)
    # each tensor with its kind, see _Blocks; the order is that in which _Blocks.__call__ takes them
    bias_leaves = _leaves(plan.bias)
    value_leaves = [] if plan.relative_values is None else [(plan.relative_values.vectors, "table")]
    parameters = ((x, "") for x in plan.transform_parameters)
    product_leaves = _leaves(plan.product)
    tensors = [(q, "rows"), (k, "keys"), (v, "keys"), *bias_leaves, *product_leaves, *value_leaves, *parameters]
    kinds = tuple(kind for _, kind in tensors)
    blocks = _Blocks(plan, kinds, (rows, block_heads), (batch, heads, n, k.shape[2]), dropout, seed, attend)
    out: Tensor = BlockwiseAttention.apply(blocks, *(x for x, _ in tensors))
    return out


def _block_size(q: Tensor, k: Tensor, mixes_heads: bool, draws_mask: bool) -> tuple[int, int]:
    """Return the number of rows and of heads of a block.

    Args:
        q: (B, H, n, D).
        k: (B, H, m, D).
        mixes_heads: whether a transform of scores may mix heads, so that a block needs all of them.
        draws_mask: whether a dropout mask is drawn: for all heads, and for a multiple of ROWS rows.
    """
    batch, heads, n, _ = q.shape
    most = ELEMENTS if q.device.type == "cpu" else DEVICE_ELEMENTS
    head_rows = most // (batch * k.shape[2])  # rows that fit in a block of one head
    rows = head_rows // heads if mixes_heads else max(head_rows // heads, min(head_rows, MAX_ROWS))
    rows = max(ROWS, rows // ROWS * ROWS) if draws_mask else max(MIN_ROWS, rows)
    block_heads = heads if mixes_heads or draws_mask else max(1, min(heads, head_rows // min(rows, n)))
    return rows, block_heads


def _leaves(fields: TensorFields | None) -> list[tuple[Tensor, str]]:
    """Return the tensors of a bias or product with their kinds (see :class:`_Blocks`); it has no function."""
    leaves = [] if fields is None else fields.tree_flatten()
    assert leaves is not None
    return leaves


class _Blocks:
    """Computes each block. Tensors that need gradients are arguments of a call; everything else is stored here.

    Args:
        plan: positions, bias and hooks for all n queries and m keys; each block gets a slice of the plan.
        kinds: kind of each tensor, which determines how a block slices the tensor: "rows" for (B, H, n, …), "keys" for
            (B, H, m, …), "heads" for (B, H, …), "table" for (H or 1, …), or "" for a parameter, which is not sliced.
        size: number of rows and number of heads of a block.
        shape: B, H, n, m.
        dropout: probability of dropping an attention weight.
        seed: seed of the dropout mask, see ``dropout.keep_block``.
        attend: function of (q, k, v, plan, keep) that computes a block.
    """

    def __init__(
        self,
        plan: AttentionPlan,
        kinds: tuple[str, ...],
        size: tuple[int, int],
        shape: tuple[int, int, int, int],
        dropout: float,
        seed: int,
        attend: Attend,
    ) -> None:
        # empty tensors replace the leaves, since these may keep a graph alive
        placeholders = iter([x.new_empty(0) for fields in (plan.bias, plan.product) for x, _ in _leaves(fields)])
        bias = None if plan.bias is None else plan.bias.tree_unflatten(placeholders)
        product = None if plan.product is None else plan.product.tree_unflatten(placeholders)
        values = plan.relative_values
        values = None if values is None else replace(values, vectors=values.vectors.new_empty(0))
        self.plan = replace(plan, bias=bias, product=product, relative_values=values)
        self.kinds, self.size, self.shape = kinds, size, shape
        self.dropout, self.seed, self.attend = dropout, seed, attend

    def __iter__(self) -> Iterator[tuple[slice, slice]]:
        """Yield the rows and the heads of each block."""
        (block_rows, block_heads), (_, heads, n, _) = self.size, self.shape
        for start in range(0, n, block_rows):
            for head in range(0, heads, block_heads):
                yield slice(start, min(start + block_rows, n)), slice(head, min(head + block_heads, heads))

    def state_memory(self, q: Tensor, needs_grad: bool) -> Tensor | None:
        """Return memory (blocks, B, 1, m, E) for the states before the blocks, or None if nothing is stored.

        In one piece, as small tensors between those of the blocks, which grow, would leave gaps that no block fits in.
        """
        width, (batch, _, _, m) = self.plan.key_state_width, self.shape
        if not width or not needs_grad:
            return None
        dtype = torch.promote_types(q.dtype, torch.float32)
        return q.new_empty(len(list(self)), batch, 1, m, width, dtype=dtype)

    def slices(self, tensors: tuple[Tensor, ...], rows: slice, heads: slice) -> list[Tensor]:
        """Return the slice of each tensor that a block reads."""
        token_slices = {"rows": rows, "keys": self.plan.visible_keys(rows.start, rows.stop)}
        sliced = []
        for x, kind in zip(tensors, self.kinds, strict=True):
            if kind in token_slices:
                x = x[:, heads, token_slices[kind]]
            elif kind == "heads":
                x = x[:, heads]
            elif kind == "table" and len(x) > 1:  # a table of length 1 is shared by all heads
                x = x[heads]
            sliced.append(x)
        return sliced

    def __call__(
        self, tensors: list[Tensor], rows: slice, heads: slice, state: Tensor | None
    ) -> tuple[Tensor, Tensor | None]:
        """Compute a block (B, h, R, D), and the state of the keys after it, or None, from the slices of its tensors.

        ``state`` (B, 1, K, E) is that after the queries before the block, or None.
        """
        q, k, v, *others = tensors
        remaining = iter(others)
        bias = None if self.plan.bias is None else self.plan.bias.tree_unflatten(remaining)
        product = None if self.plan.product is None else self.plan.product.tree_unflatten(remaining)
        values = self.plan.relative_values
        values = None if values is None else replace(values, vectors=next(remaining))
        keys = self.plan.visible_keys(rows.start, rows.stop)
        plan = replace(self.plan, bias=None, product=None).select(rows, keys)
        stored: list[Tensor] = []
        plan = replace(plan, bias=bias, product=product, relative_values=values)
        plan = replace(plan, key_state=state, store_key_state=stored.append)
        keep = None
        if self.dropout > 0:
            keep = keep_block(self.seed, rows.start, rows.stop, self.shape, self.dropout, q.device)
            keep = keep[:, heads, :, keys.start :]
        out = self.attend(q, k, v, plan, keep)
        return out, stored[0] if stored else None


class BlockwiseAttention(torch.autograd.Function):
    """Computes attention of all blocks. Second derivatives are computed in one block, in O(n²) memory."""

    @staticmethod
    def forward(ctx: Any, blocks: _Blocks, *tensors: Tensor) -> Tensor:
        """Compute the output and save what the backward pass needs."""
        out = torch.empty_like(tensors[0])
        state, states = blocks.plan.key_state, []  # before each block; all None without a state of keys
        memory = blocks.state_memory(tensors[0], any(ctx.needs_input_grad))
        for index, (rows, heads) in enumerate(blocks):
            if state is not None and memory is not None:
                state = memory[index, :, :, : state.shape[2]].copy_(state)
            states.append(state)
            out[:, heads, rows], state = blocks(blocks.slices(tensors, rows, heads), rows, heads, state)
        if blocks.plan.store_key_state is not None and state is not None:
            blocks.plan.store_key_state(state)
        # parameters are not saved: saved tensors may come back as copies, and ``transform_scores`` uses the originals
        ctx.save_for_backward(*tensors[: len(tensors) - len(blocks.plan.transform_parameters)])
        ctx.blocks, ctx.states = blocks, states
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
        """Return the gradients of the inputs, differentiable if a graph of the backward pass is recorded."""
        blocks: _Blocks = ctx.blocks
        needs = ctx.needs_input_grad[1:]
        parameters = blocks.plan.transform_parameters
        _, heads, n, _ = blocks.shape

        def formula(*tensors: Tensor) -> Tensor:
            return blocks([*tensors, *parameters], slice(0, n), slice(0, heads), blocks.plan.key_state)[0]

        saved = tuple(ctx.saved_tensors)  # may be unpacked only once, under activation checkpointing

        def compute() -> tuple[Tensor | None, ...]:
            return BlockwiseAttention.gradients(ctx, grad, saved)

        return None, *differentiable_gradients(compute, formula, grad, saved, needs, parameters)

    @staticmethod
    def gradients(ctx: Any, grad: Tensor, saved: tuple[Tensor, ...]) -> tuple[Tensor | None, ...]:
        """Return the gradients of the saved tensors and of the parameters, computed block by block.

        Args:
            ctx: autograd's context, as the forward pass left it.
            grad: (B, H, n, D), gradient of the output.
            saved: tensors that the forward pass saved: q, k, v, the bias's tensors and the relative value vectors.
        """
        blocks: _Blocks = ctx.blocks
        needs = ctx.needs_input_grad[1:]
        parameters = blocks.plan.transform_parameters
        tensors = *saved, *parameters
        grad_sums = [
            torch.zeros_like(x, dtype=torch.promote_types(x.dtype, torch.float32)) if need else x
            for x, need in zip(tensors, needs, strict=True)
        ]
        state_grad: Tensor | None = None  # of the state after a block
        for (rows, heads), state in reversed(list(zip(blocks, ctx.states, strict=True))):
            sliced = blocks.slices(tensors, rows, heads)[: len(saved)]
            inputs = [x.detach().requires_grad_(need) for x, need in zip(sliced, needs, strict=False)]
            inputs += parameters
            state = None if state is None else state.detach().requires_grad_()
            with torch.enable_grad(), torch.autocast(grad.device.type, enabled=False):
                out, next_state = blocks(inputs, rows, heads, state)
            outputs, output_grads = [out], [grad[:, heads, rows]]
            if next_state is not None and state_grad is not None:
                outputs, output_grads = [out, next_state], [*output_grads, state_grad]
            differentiated = [x for x, need in zip(inputs, needs, strict=True) if need]
            differentiated += [] if state is None else [state]
            grads = iter(torch.autograd.grad(outputs, differentiated, output_grads, allow_unused=True))
            for grad_sum, need in zip(blocks.slices(tuple(grad_sums), rows, heads), needs, strict=True):
                if need and (block_grad := next(grads)) is not None:
                    grad_sum += block_grad
            state_grad = next(grads, None)
        triples = zip(grad_sums, tensors, needs, strict=True)
        return tuple(grad_sum.to(x.dtype) if need else None for grad_sum, x, need in triples)
