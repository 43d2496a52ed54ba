"""PaTH attention: a product of Householder-like matrices of the tokens between a key and a query."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from itertools import pairwise
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from fairseq_rpe.core.bias import TokenBias
from fairseq_rpe.core.errors import UserError
from fairseq_rpe.core.positions import Positions
from fairseq_rpe.core.score_product import ScoreProduct
from fairseq_rpe.core.spec import option
from fairseq_rpe.core.tensors import wide_linear
from fairseq_rpe.encodings.base import register
from fairseq_rpe.encodings.forgetting_transformer import repeated_positions
from fairseq_rpe.encodings.gated_product import GatedProduct, init_linear
from fairseq_rpe.encodings.text_convolution import convolve_texts, random_taps

CHUNK = 64  # tokens whose matrices are multiplied at once


@register("path", colour="vermilion", marker="o")
class PathAttention(GatedProduct):
    """PaTH attention (Yang et al. 2025, arXiv 2505.16381): score = q_i·H_i H_(i-1) … H_(j+1) k_j / sqrt(D).

    H_t = I - β_t w_t w_tᵀ is the matrix of token t, with β_t = 2σ(b·x_t + c) between 0 and 2 and a unit vector w_t of D
    elements per head, both from the layer's input x_t (C,): w_t = normalise(SiLU(Σ_τ a_τ ⊙ u_(t-τ))) and
    u_t = W_2 W_1 x_t. W_1 has ``rank`` rows, and the causal convolution a covers the last ``conv`` tokens of the text.
    The matrix of a key's token does not act on the key itself, so a query's score for its own key is q·k.

    With ``gate=forget`` the bias of the Forgetting Transformer is added, Σ_(l=j+1…i) ln σ(g·x_l + g_0) per head
    (PaTH-FoX). The code of the paper divides this bias by sqrt(D) as well: ``scaled_gate=true``.

    Each query head has its own w and β, also where several query heads share a key head. A KV cache stores the keys as
    later tokens have transformed them, so that a new token takes O(m·D) operations per head.
    """

    @dataclass(frozen=True)
    class Config:
        """Options of ``path``."""

        gate: str = option("none", "forget: add the bias of forget gates", choices=("none", "forget"))
        rank: int = option(32, "rows of W_1; 0: one matrix instead of W_2 W_1", minimum=0, maximum=1 << 16)
        conv: int = option(3, "tokens of the convolution; 0: none, and no SiLU", minimum=0, maximum=64)
        scaled_gate: bool = option(False, "gate=forget: divide the bias by sqrt(D), as the code of the paper does")

    formula = "q_i·H_i … H_(j+1) k_j/√D,  H_t = I - β_t w_t w_tᵀ,  w_t = SiLU(conv(W_2 W_1 x))_t / norm,  β_t of x_t"
    paper = "Yang et al. 2025 (arXiv 2505.16381)"
    bounded_reason = "no matrix H lengthens a vector, so |score| ≤ |q|·|k|/√D, bounded for bounded q and k"
    transforms_keys = True

    def setup(self) -> None:
        """Check the options and create the parameters."""
        cfg = self.config
        if cfg.scaled_gate and cfg.gate == "none":
            raise UserError("'path:gate=none' has no gate to scale: leave scaled_gate out or add gate=forget")
        self.strength = nn.Linear(self.width, self.heads)  # logit of β / 2
        self.down = nn.Linear(self.width, cfg.rank, bias=False) if cfg.rank else None  # W_1
        self.up = nn.Linear(cfg.rank or self.width, self.width, bias=False)  # W_2
        self.conv: nn.Parameter | None = None  # a, for each element of all heads
        if cfg.conv:
            self.conv = nn.Parameter(random_taps(self.width, cfg.conv))
        self.create_gate()
        for module in self.modules():
            if isinstance(module, nn.Linear):
                init_linear(module)

    def token_features(self, x: Tensor) -> Tensor:
        """Return u, the logit of β/2 and that of the gate of a layer's input x (B, n, C).

        Returns:
            (B, H, n, D + 1), or (B, H, n, D + 2) with a gate.
        """
        logits = [wide_linear(layer, x) for layer in (self.strength, self.gate) if layer is not None]  # (B, n, H) each
        vectors = x if self.down is None else wide_linear(self.down, x)  # (B, n, C or rank)
        vectors = wide_linear(self.up, vectors).unflatten(2, (self.heads, -1))  # (B, n, H, D)
        return torch.cat([vectors, *(logit[..., None] for logit in logits)], dim=-1).transpose(1, 2)

    def content_bias(self, q: Tensor, k: Tensor, pos: Positions, features: Tensor | None) -> TokenBias | None:
        """Return the bias of the forget gates, or None without them."""
        bias = super().content_bias(q, k, pos, features)
        if bias is None or not self.config.scaled_gate:
            return bias
        scale = q.shape[3] ** -0.5
        return replace(bias, query=bias.query * scale, key=bias.key * scale)

    def score_product(
        self,
        q: Tensor,
        k: Tensor,
        pos: Positions,
        features: Tensor | None,
        padding: Tensor | None,
        key_state: Tensor | None,
    ) -> ScoreProduct:
        """Return the product with the matrices of the tokens after the keys of ``key_state``."""
        assert features is not None
        width, first = q.shape[3], 0 if key_state is None else key_state.shape[2]
        begins = repeated_positions(pos)  # (B or 1, m), first tokens of texts, and padding before them
        u, strength, *_ = features.to(q.dtype).split([width, 1, features.shape[3] - width - 1], dim=3)
        directions: Callable[..., Tensor] = self._directions
        if torch.is_grad_enabled():  # the backward pass computes the convolution again
            directions = partial(checkpoint, directions, use_reentrant=False, preserve_rng_state=False)
        w = directions(u, begins, padding)  # (B, H, m, D)
        beta = 2 * strength[..., 0].sigmoid()  # (B, H, m)
        is_identity = begins if padding is None else begins | padding
        beta = beta.masked_fill(is_identity[:, None], 0.0)
        if key_state is not None:
            k = torch.cat([key_state.to(k.dtype), k[:, :, first:]], dim=2)
        return PathProduct(q, k, w, beta, first)

    def _directions(self, u: Tensor, begins: Tensor, padding: Tensor | None) -> Tensor:
        """Return the unit vectors w (B, H, m, D) of u (B, H, m, D).

        Args:
            u: vectors of all tokens.
            begins: (B or 1, m) bool, the first token of each text, before which the convolution reads zeros.
            padding: (B, m) bool, tokens that the convolution skips, or None.
        """
        if self.conv is not None:
            u = F.silu(convolve_texts(u, self.conv.unflatten(0, (self.heads, -1)), begins, padding))
        return F.normalize(u, dim=-1)


@dataclass(frozen=True)
class PathProduct(ScoreProduct):
    """Products q_i·H_i … H_(j+1) k_j with H_t = I - β_t w_t w_tᵀ, computed token by token.

    Attributes:
        query: (B, H, n, D), the last n tokens.
        key: (B, H, m, D); the first ``first`` keys are transformed by all tokens up to token ``first`` - 1.
        w: (B, H, m, D) unit vectors; those of the first ``first`` tokens are not used.
        beta: (B, H, m), likewise.
        first: index of the first token whose matrix acts.
    """

    _tensor_kinds: ClassVar = {"query": "rows", "key": "keys", "w": "keys", "beta": "keys"}
    query: Tensor
    key: Tensor
    w: Tensor
    beta: Tensor
    first: int = 0

    def products(self) -> Tensor:
        """Return the products (B, H, n, m): each token transforms the keys before it, then its query reads them."""
        n, m = self.query.shape[2], self.key.shape[2]
        keys, rows = self.key[:, :, : self.first], []  # (B, H, i, D), the transformed keys before token i
        for i in range(self.first, m):
            w = self.w[:, :, i]  # (B, H, D)
            along = torch.einsum("bhjd,bhd->bhj", keys, w) * self.beta[:, :, i, None]
            keys = torch.cat([keys - along[..., None] * w[:, :, None], self.key[:, :, i : i + 1]], dim=2)
            if i >= m - n:
                row = torch.einsum("bhjd,bhd->bhj", keys, self.query[:, :, i - m + n])
                rows.append(F.pad(row, (0, m - 1 - i)))
        return torch.stack(rows, dim=2)

    def prepare_blocks(self) -> "PathChunks":
        """Return the product by chunks of tokens, whose matrices are multiplied at once.

        With W (c, D) the vectors of a chunk and T = (I + strict_lower(diag(β) W Wᵀ))⁻¹, the product of the chunk's
        matrices is X = I - Wᵀ T diag(β) W. Queries are multiplied by the matrices from the start of their chunk on, and
        keys by those up to the end of theirs.
        """
        m = self.key.shape[2]
        size = min(CHUNK, max(1, m - self.first))
        results = _ChunkTensors.apply(self.first, size, self.query, self.key, self.w, self.beta)
        query, inner, key, operator = results
        return PathChunks(query, inner, key, operator, self.first, size)

    def key_state(self) -> Tensor:
        """Return the keys (B, H, m, D), transformed by all tokens after each of them."""
        return self.prepare_blocks().key_state()


class _ChunkTensors(torch.autograd.Function):
    """Computes :func:`_chunk_tensors` head by head, and again in the backward pass.

    Results are written into tensors of all heads. Tensors of single heads between the temporary ones would leave gaps
    in memory that nothing fits in.
    """

    @staticmethod
    def forward(ctx: Any, first: int, size: int, *inputs: Tensor) -> tuple[Tensor, ...]:
        """Compute the tensors of all heads, from ``query``, ``key``, ``w`` and ``beta``."""
        query, key = inputs[:2]
        (batch, heads, m, width), n = key.shape, query.shape[2]
        chunks = -(-(m - first) // size)
        shapes = (n, width), (n, size), (m, width), (chunks, width, width)
        outputs = tuple(key.new_empty(batch, heads, *shape) for shape in shapes)
        for head in range(heads):
            results = _chunk_tensors(*(x[:, head : head + 1] for x in inputs), first=first, size=size)
            for output, result in zip(outputs, results, strict=True):
                output[:, head : head + 1] = result
        ctx.save_for_backward(*inputs)
        ctx.first, ctx.size = first, size
        return outputs

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        """Return the gradients of the inputs, differentiable if a graph of the backward pass is recorded."""
        inputs: tuple[Tensor, ...] = tuple(ctx.saved_tensors)
        if torch.is_grad_enabled():
            outputs = _chunk_tensors(*inputs, first=ctx.first, size=ctx.size)
            needed = [x for x, need in zip(inputs, ctx.needs_input_grad[2:], strict=True) if need]
            results = iter(torch.autograd.grad(outputs, needed, grads, create_graph=True))
            return None, None, *(next(results) if need else None for need in ctx.needs_input_grad[2:])
        input_grads = tuple(torch.empty_like(x) for x in inputs)
        for head in range(inputs[0].shape[1]):
            heads = slice(head, head + 1)
            leaves = [x[:, heads].detach().requires_grad_() for x in inputs]
            with torch.enable_grad():
                outputs = _chunk_tensors(*leaves, first=ctx.first, size=ctx.size)
            head_grads = torch.autograd.grad(outputs, leaves, [x[:, heads] for x in grads])
            for total, grad in zip(input_grads, head_grads, strict=True):
                total[:, heads] = grad
        return None, None, *input_grads


def _chunk_tensors(
    query: Tensor, key: Tensor, w: Tensor, beta: Tensor, *, first: int, size: int
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return ``query``, ``inner``, ``key`` and ``operator`` of :class:`PathChunks`.

    Args:
        query: (B, H, n, D).
        key: (B, H, m, D).
        w: (B, H, m, D).
        beta: (B, H, m).
        first: number of keys before the chunks.
        size: c, tokens of a chunk.
    """
    n, m, width = query.shape[2], key.shape[2], query.shape[3]
    start = m - first - n  # tokens of the chunks before the first query, for which q has zeros
    q = F.pad(query, (0, 0, start, 0))
    q, k, w = (_split(x, size) for x in (q, key[:, :, first:], w[:, :, first:]))  # (B, H, N, c, D) each
    beta = _split(beta[:, :, first:, None], size)  # (B, H, N, c, 1)
    scaled = beta * w
    system = torch.eye(size, dtype=w.dtype, device=w.device) + (scaled @ w.mT).tril(-1)
    right = torch.cat([scaled, (scaled @ k.mT).tril(-1)], dim=-1)  # (B, H, N, c, D + c)
    solved = torch.linalg.solve_triangular(system, right, upper=False, unitriangular=True)
    t_scaled, t_keys = solved[..., :width], solved[..., width:]  # T diag(β) W, T strict_lower(diag(β) W Kᵀ)
    along = (q @ w.mT).tril()  # (B, H, N, c, c)
    inner = (q @ k.mT).tril() - along @ t_keys
    q, inner = (x.flatten(2, 3)[:, :, start : start + n] for x in (q - along @ t_scaled, inner))
    k = (k - t_keys.mT @ w).flatten(2, 3)[:, :, : m - first]
    operator = torch.eye(width, dtype=w.dtype, device=w.device) - w.mT @ t_scaled
    return q, inner, torch.cat([key[:, :, :first], k], dim=2), operator


def _split(x: Tensor, size: int) -> Tensor:
    """Split x (B, H, t, E) into chunks (B, H, N, size, E), with zeros after the last token."""
    return F.pad(x, (0, 0, 0, -x.shape[2] % size)).unflatten(2, (-1, size))


@dataclass(frozen=True)
class PathChunks(ScoreProduct):
    """The products of :class:`PathProduct` from the matrices of chunks of c tokens.

    The first ``first`` keys are a chunk of their own, whose keys are transformed up to its end, and chunks of c tokens
    follow. The score of a query in chunk a and a key in an earlier chunk b is q·X_(a-1) … X_(b+1) k.

    Attributes:
        query: (B, H, n, D), multiplied by the matrices from the start of their chunk on.
        inner: (B, H, n, c), products of each query with the keys of its own chunk.
        key: (B, H, m, D), transformed up to the end of their chunk.
        operator: (B, H, N, D, D), X of each chunk.
        first: number of keys before the chunks.
        size: c.
    """

    _tensor_kinds: ClassVar = {"query": "rows", "inner": "rows", "key": "keys", "operator": "heads"}
    query: Tensor
    inner: Tensor
    key: Tensor
    operator: Tensor
    first: int
    size: int

    def products(self) -> Tensor:
        """Return the products (B, H, n, m), chunk by chunk of keys from the last one back."""
        n, m = self.query.shape[2], self.key.shape[2]
        begin = m - n  # index of the first query's token
        lefts = [*range(self.first, m, self.size)]  # first key of each chunk
        # unbind and split, whose gradients are joined once; a slice for each chunk would add a whole tensor of zeros
        operators = self.operator.unbind(2)[: len(lefts)]  # (B, H, D, D) each
        *keys, last = self.key.split([self.first] + [self.size] * (len(lefts) - 1) + [m - lefts[-1]], dim=2)
        # the first query of each chunk; a chunk before the queries has none
        bounds = [min(max(0, left - begin), n) for left in lefts] + [n]
        sizes = [stop - start for start, stop in pairwise(bounds)]
        queries, inner = self.query.split(sizes, dim=2), self.inner.split(sizes, dim=2)
        pieces: list[Tensor] = []
        active = self.query[:, :, n:]  # queries after the chunk, (B, H, n - stop, D)
        for chunk, chunk_keys in reversed([*enumerate([*keys[1:], last])]):
            piece = active @ chunk_keys.mT
            active = active @ operators[chunk]
            if sizes[chunk]:
                piece = torch.cat([inner[chunk][..., : chunk_keys.shape[2]], piece], dim=2)
                active = torch.cat([queries[chunk], active], dim=2)
            pieces.append(F.pad(piece, (0, 0, bounds[chunk], 0)))
        if self.first:
            pieces.append(active @ keys[0].mT)
        return torch.cat(pieces[::-1], dim=3)

    def key_state(self) -> Tensor:
        """Return the keys (B, H, m, D), transformed by all tokens after each of them."""
        later = torch.eye(self.key.shape[3], dtype=self.key.dtype, device=self.key.device)  # X of all later chunks
        states = []
        for chunk in reversed(range(self.operator.shape[2])):
            left = self.first + chunk * self.size
            states.append(self.key[:, :, left : left + self.size] @ later.mT)
            later = later @ self.operator[:, :, chunk]
        states.append(self.key[:, :, : self.first] @ later.mT)
        return torch.cat(states[::-1], dim=2)
