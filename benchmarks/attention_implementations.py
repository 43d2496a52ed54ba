"""The types of bias and the implementations of attention that ``attention_biases.py`` compares.

Each implementation is a function that takes :class:`Inputs` and returns a step: a function that computes the output
once. The function makes everything that is needed once for a length, such as a fixed dense bias or a mask. The step
computes everything that depends on a learned parameter. The function raises UserError with the reason if the
implementation is not available.
"""

from __future__ import annotations

import functools
import importlib
import math
import os
import shutil
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from fairseq_rpe import encodings, positions
from fairseq_rpe.attention import BACKENDS, AttentionPlan, reference
from fairseq_rpe.core import Positions, UserError
from fairseq_rpe.encodings.alibi import alibi_slopes
from fairseq_rpe.encodings.t5 import relative_position_bucket

HEADS, WIDTH = 8, 64
CHECK_LENGTH = 320  # tokens; more than one block, and the last one not full
TOLERANCE = {torch.float32: 1e-4, torch.bfloat16: 5e-2, torch.float16: 1e-2}  # of the largest value
BLOCK = 128  # queries, and keys, of a block of FlexAttention's mask
NO_BIAS = "none"
BASELINE = "torch, causal"  # the only implementation without a bias
# their first call at a length compiles, or measures block sizes
COMPILED = ("FlexAttention", "flex", "triton")
Step = Callable[[], Tensor]


@dataclass(frozen=True)
class BiasSpec:
    """An encoding and a position transform, which together determine the type of bias."""

    encoding: str
    positions: str = "identity"

    @property
    def label(self) -> str:
        return self.encoding if self.positions == "identity" else f"{self.encoding} at warped positions"


BIASES = {
    NO_BIAS: BiasSpec("nope"),
    "fixed Toeplitz": BiasSpec("alibi"),
    "learned Toeplitz": BiasSpec("kerple_log"),
    "learned buckets": BiasSpec("t5_bias"),
    "Curve": BiasSpec("fire"),
    "Pair": BiasSpec("kerple_log", "warp:head=0,tail=1"),
}


@dataclass(frozen=True)
class Case:
    """One implementation at one length.

    Attributes:
        bias: key of :data:`BIASES`.
        implementation: key of :data:`IMPLEMENTATIONS`, or an attention backend of this project.
        length: number of tokens.
        backward: whether a step includes the backward pass.
        device: "cpu" or "cuda".
        dtype: dtype of q, k and v.
    """

    bias: str
    implementation: str
    length: int
    backward: bool
    device: str
    dtype: torch.dtype


class Inputs:
    """q, k, v and the gradient of the output, (1, H, n, D), with the encoding and the positions of a type of bias.

    The numbers are the same for every implementation. ``parameters`` are those that get gradients in training.
    """

    def __init__(self, case: Case, length: int | None = None) -> None:
        torch.manual_seed(0)
        n, spec = length or case.length, BIASES[case.bias]
        self.n, self.backward, self.device, self.dtype = n, case.backward, case.device, case.dtype
        self.encoding = encodings.build(spec.encoding, HEADS, HEADS * WIDTH, length=n).to(case.device)
        self.parameters = [p for p in self.encoding.parameters() if p.requires_grad]
        shape = (1, HEADS, n, WIDTH)
        self.q, self.k, self.v, self.grad = (torch.randn(shape).to(case.device, case.dtype) for _ in range(4))
        if case.backward:
            for x in (self.q, self.k, self.v):
                x.requires_grad_()
        index = torch.arange(n, dtype=torch.float32, device=case.device)[None]
        transformed = positions.build(spec.positions)(index, torch.tensor([n]), torch.Generator())
        self.pos = Positions(transformed.k, transformed.k, transformed.step, transformed.contiguous)

    def plan(self) -> AttentionPlan:
        return AttentionPlan(self.pos, self.encoding.position_bias(self.pos))

    def dense_bias(self) -> Tensor:
        """Return the dense bias (1, H, n, n) in q's dtype."""
        return self.encoding.position_bias(self.pos).materialize(self.pos).to(self.dtype)

    def run(self, step: Step) -> list[Tensor]:
        """Return the output, and in training the gradients of q, k, v and the parameters."""
        with torch.set_grad_enabled(self.backward):
            out = step()
            if not self.backward:
                return [out]
            inputs = [self.q, self.k, self.v, *self.parameters]
            grads = torch.autograd.grad(out, inputs, self.grad, allow_unused=True, materialize_grads=True)
            return [out.detach(), *grads]


def torch_causal(x: Inputs) -> Step:
    return lambda: F.scaled_dot_product_attention(x.q, x.k, x.v, is_causal=True)


def torch_dense_bias(x: Inputs) -> Step:
    """Use torch with a dense n×n bias, as research code does; a bias without parameters is computed once."""
    future = torch.ones(x.n, x.n, dtype=torch.bool, device=x.device).triu_(1)
    fixed_bias = None if x.parameters else x.dense_bias().masked_fill_(future, float("-inf"))

    def step() -> Tensor:
        bias = x.dense_bias().masked_fill_(future, float("-inf")) if fixed_bias is None else fixed_bias
        return F.scaled_dot_product_attention(x.q, x.k, x.v, attn_mask=bias)

    return step


def flex_attention(x: Inputs) -> Step:
    """Use torch's compiled FlexAttention with the bias in its score_mod, or gathered from a dense bias."""
    if x.device == "cpu" and x.backward:
        raise UserError("FlexAttention has no backward pass on the CPU")
    if x.device == "cpu" and not shutil.which(os.environ.get("CXX", "g++")):
        raise UserError("FlexAttention compiles C++ on the CPU, and there is no g++: install one or set CXX")
    mask = _causal_block_mask(x.n, x.device)

    def step() -> Tensor:
        # every bias at every length, with and without gradients; beyond it fullgraph raises instead of running unfused
        with torch._dynamo.config.patch(recompile_limit=256):
            try:
                return _compiled_flex_attention()(x.q, x.k, x.v, score_mod=_score_mod(x), block_mask=mask)
            except torch._dynamo.exc.TorchDynamoException as error:
                raise UserError(f"it does not compile here: {str(error).splitlines()[0]}") from error

    return step


def _causal_block_mask(n: int, device: str) -> Any:
    """Return create_block_mask(causal), which would evaluate all n² pairs: half a minute at 32,768 tokens."""
    from torch.nn.attention.flex_attention import BlockMask

    count = -(-n // BLOCK)
    block = torch.arange(count, dtype=torch.int32, device=device)
    # key blocks that all queries of a query block see; an incomplete last block has none
    full = torch.where((block + 1) * BLOCK <= n, block, 0)
    # from_kv_blocks reads the first indices of each row: of (1 + block - full) partly visible blocks, of full blocks
    partial_indices = (full[:, None] + block) % count
    full_indices = block.expand(count, -1)
    return BlockMask.from_kv_blocks(
        *((block + 1 - full)[None, None], partial_indices[None, None], full[None, None], full_indices[None, None]),
        BLOCK_SIZE=BLOCK,
        mask_mod=_causal,
        seq_lengths=(n, n),
    )


def _causal(b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
    return i >= j


@functools.cache
def _compiled_flex_attention() -> Callable[..., Tensor]:
    from torch.nn.attention.flex_attention import flex_attention

    # compiled for each length: with dynamic ones torch 2.13 writes C++ that does not compile (cur_qSplitSize5)
    return torch.compile(flex_attention, dynamic=False, fullgraph=True)


def _score_mod(x: Inputs) -> Callable[..., Tensor]:
    """Return a score_mod as users write it: arithmetic, a table lookup, or for FIRE a gathered n×n bias."""
    encoding: Any = x.encoding
    name = type(encoding).__name__
    if name == "Alibi":
        slopes = torch.tensor(alibi_slopes(HEADS), device=x.device)
        return lambda score, b, h, i, j: score - slopes[h] * (i - j)
    if name == "KerpleLog":
        p, a, position = encoding.p(), encoding.a(), x.pos.k[0]
        if x.pos.contiguous:
            return lambda score, b, h, i, j: score - p[h] * torch.log1p(a[h] * (i - j).abs())
        return lambda score, b, h, i, j: score - p[h] * torch.log1p(a[h] * (position[i] - position[j]).abs())
    if name == "T5Bias":
        config, table = encoding.config, encoding.table
        buckets = relative_position_bucket(x.pos.k[0], config.buckets, config.max_distance)
        return lambda score, b, h, i, j: score + table[buckets[(i - j).clamp_min(0)], h]
    bias = x.dense_bias()[0]  # (H, n, n)
    return lambda score, b, h, i, j: score + bias[h, i, j]


def x_transformers(x: Inputs) -> Step:
    """Use Attend(flash=True) of x-transformers with its own dense ALiBi or T5 bias; it caches ALiBi's."""
    try:
        attend = importlib.import_module("x_transformers.attend").Attend(causal=True, flash=True)
        package = importlib.import_module("x_transformers.x_transformers")
    except ImportError as error:
        raise UserError("x-transformers is not installed: pip install x-transformers") from error
    n, encoding = x.n, x.encoding
    if not x.parameters:
        alibi = package.AlibiPositionalBias(HEADS).to(x.device)
        alibi(n, n)
        return lambda: attend(x.q, x.k, x.v, attn_bias=alibi(n, n).to(x.dtype))[0]
    config = encoding.config
    t5 = package.RelativePositionBias(1.0, True, config.buckets, config.max_distance, HEADS).to(x.device)
    t5.relative_attention_bias.weight = encoding.table
    return lambda: attend(x.q, x.k, x.v, attn_bias=t5(n, n).to(x.dtype))[0]


def flash_attention(x: Inputs) -> Step:
    """Use ALiBi of flash-attn."""
    if x.device == "cpu" or x.dtype == torch.float32:
        raise UserError("flash-attn runs on a GPU in fp16 or bf16: --device cuda --dtype bf16")
    try:
        flash_attn_func = importlib.import_module("flash_attn").flash_attn_func
    except ImportError as error:
        raise UserError("flash-attn is not installed: pip install flash-attn") from error
    slopes = torch.tensor(alibi_slopes(HEADS), device=x.device)

    def step() -> Tensor:
        q, k, v = (t.transpose(1, 2) for t in (x.q, x.k, x.v))  # (1, n, H, D), flash-attn's layout
        return flash_attn_func(q, k, v, causal=True, alibi_slopes=slopes).transpose(1, 2)

    return step


@dataclass(frozen=True)
class Implementation:
    """A public implementation of attention: its function, and the types of bias that it supports."""

    make_step: Callable[[Inputs], Step]
    biases: tuple[str, ...]


_ALL_BIASES = tuple(bias for bias in BIASES if bias != NO_BIAS)
IMPLEMENTATIONS = {
    BASELINE: Implementation(torch_causal, (NO_BIAS,)),
    "dense bias": Implementation(torch_dense_bias, _ALL_BIASES),
    "FlexAttention": Implementation(flex_attention, _ALL_BIASES),
    "x-transformers": Implementation(x_transformers, ("fixed Toeplitz", "learned buckets")),
    "flash-attn": Implementation(flash_attention, ("fixed Toeplitz",)),
}


def list_pairs(backends: Iterable[str]) -> list[tuple[str, str]]:
    """Return all (bias, implementation) pairs, the baseline first."""
    pairs = [(NO_BIAS, BASELINE)]
    for bias in BIASES:
        # without a bias the sdpa backend calls the baseline itself
        pairs += [(bias, backend) for backend in backends if (bias, backend) != (NO_BIAS, "sdpa")]
        pairs += [(bias, name) for name, x in IMPLEMENTATIONS.items() if bias in x.biases and name != BASELINE]
    return pairs


def make_step(case: Case, x: Inputs) -> Step:
    """Return the step of a case's implementation."""
    if case.implementation in IMPLEMENTATIONS:
        return IMPLEMENTATIONS[case.implementation].make_step(x)
    return lambda: BACKENDS[case.implementation](x.q, x.k, x.v, x.plan())


def deviation(case: Case) -> float:
    """Return the largest relative error of output and gradients against the reference at CHECK_LENGTH tokens.

    Errors of parameters are relative to the largest gradient of all parameters, as the gradient of a constant in the
    bias is 0.
    """
    x = Inputs(case, CHECK_LENGTH)
    expected = x.run(lambda: reference(x.q, x.k, x.v, x.plan()))
    actual = x.run(make_step(case, x))
    scales = [float(t.abs().max()) for t in expected]
    if case.backward:
        tensors, parameters = scales[:4], scales[4:]  # output and gradients of q, k and v; gradients of parameters
        scales = [*tensors, *[max(parameters, default=0.0)] * len(parameters)]
    errors = [float((a - b).abs().max()) / scale for a, b, scale in zip(actual, expected, scales, strict=True)]
    return max(errors) if all(map(math.isfinite, errors)) else math.inf
