"""The types of bias and the implementations of attention that ``attention_forms.py`` compares.

A way is a function of :class:`Inputs` that gives a step, which computes the output once. What a way needs once for a
length (a fixed dense bias, a mask) is made before; what follows a learned parameter is made in the step. A way that
cannot be had raises UserError with the reason.
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
CHECK = 320  # tokens; more than one block, and the last one not full
TOLERANCE = {torch.float32: 1e-4, torch.bfloat16: 5e-2, torch.float16: 1e-2}  # of the largest value
Step = Callable[[], Tensor]


@dataclass(frozen=True)
class Subject:
    """An encoding and positions, which together determine the type of bias."""

    encoding: str
    positions: str = "identity"

    @property
    def label(self) -> str:
        return self.encoding if self.positions == "identity" else f"{self.encoding} at warped positions"


FORMS = {
    "none": Subject("nope"),
    "fixed Toeplitz": Subject("alibi"),
    "learned Toeplitz": Subject("kerple_log"),
    "learned buckets": Subject("t5_bias"),
    "Curve": Subject("fire"),
    "Pair": Subject("kerple_log", "warp:head=0,tail=1"),
}


@dataclass(frozen=True)
class Case:
    """One implementation at one length; ``way`` is a name in WAYS or an attention backend of this project."""

    form: str
    way: str
    length: int
    backward: bool
    device: str
    dtype: torch.dtype


class Inputs:
    """q, k, v and the gradient of the output, (1, H, n, D), with the encoding and the positions of a form.

    The numbers are the same for every way; ``parameters`` are those that a training step gives gradients to.
    """

    def __init__(self, case: Case, length: int | None = None) -> None:
        torch.manual_seed(0)
        n, subject = length or case.length, FORMS[case.form]
        self.n, self.backward, self.device, self.dtype = n, case.backward, case.device, case.dtype
        self.encoding = encodings.build(subject.encoding, HEADS, HEADS * WIDTH, length=n).to(case.device)
        self.parameters = [p for p in self.encoding.parameters() if p.requires_grad]
        shape = (1, HEADS, n, WIDTH)
        self.q, self.k, self.v, self.grad = (torch.randn(shape).to(case.device, case.dtype) for _ in range(4))
        if case.backward:
            for x in (self.q, self.k, self.v):
                x.requires_grad_()
        index = torch.arange(n, dtype=torch.float32, device=case.device)[None]
        moved = positions.build(subject.positions)(index, torch.tensor([n]), torch.Generator())
        self.pos = Positions(moved.k, moved.k, moved.step, moved.contiguous)

    def plan(self) -> AttentionPlan:
        return AttentionPlan(self.pos, self.encoding.position_bias(self.pos))

    def dense(self) -> Tensor:
        """Return the dense bias (1, H, n, n) in q's dtype."""
        return self.encoding.position_bias(self.pos).materialize(self.pos).to(self.dtype)

    def run(self, step: Step) -> list[Tensor]:
        """Return the output, and in training the gradients of q, k, v and the parameters."""
        with torch.set_grad_enabled(self.backward):
            out = step()
            if not self.backward:
                return [out]
            inputs = [self.q, self.k, self.v, *self.parameters]
            found = torch.autograd.grad(out, inputs, self.grad, allow_unused=True, materialize_grads=True)
            return [out.detach(), *found]


def torch_causal(x: Inputs) -> Step:
    return lambda: F.scaled_dot_product_attention(x.q, x.k, x.v, is_causal=True)


def dense_bias(x: Inputs) -> Step:
    """Use torch with a dense n×n bias as in research code; the bias is reused if nothing is learned."""
    future = torch.ones(x.n, x.n, dtype=torch.bool, device=x.device).triu_(1)
    kept = None if x.parameters else x.dense().masked_fill_(future, float("-inf"))

    def step() -> Tensor:
        bias = x.dense().masked_fill_(future, float("-inf")) if kept is None else kept
        return F.scaled_dot_product_attention(x.q, x.k, x.v, attn_mask=bias)

    return step


def flex_attention(x: Inputs) -> Step:
    """Use torch's compiled FlexAttention with the bias in its score_mod, or gathered from a dense bias."""
    from torch.nn.attention.flex_attention import BlockMask

    if x.device == "cpu" and x.backward:
        raise UserError("FlexAttention has no backward pass on the CPU")
    if x.device == "cpu" and not shutil.which(os.environ.get("CXX", "g++")):
        raise UserError("FlexAttention compiles C++ on the CPU, and there is no g++: install one or set CXX")
    # The same as create_block_mask(causal), which looks at all n² pairs: half a minute at 32,768 tokens.
    size = -(-x.n // 128)
    row = torch.arange(size, dtype=torch.int32, device=x.device)
    whole = torch.where((row + 1) * 128 <= x.n, row, 0)
    order = (whole[:, None] + row) % size
    mask = BlockMask.from_kv_blocks(
        *((row + 1 - whole)[None, None], order[None, None], whole[None, None], row.expand(size, -1)[None, None]),
        BLOCK_SIZE=128,
        mask_mod=_causal,
        seq_lengths=(x.n, x.n),
    )

    def step() -> Tensor:
        # every bias at every length, with and without gradients; beyond it fullgraph raises instead of running unfused
        with torch._dynamo.config.patch(recompile_limit=256):
            try:
                return _compiled()(x.q, x.k, x.v, score_mod=_score_mod(x), block_mask=mask)
            except torch._dynamo.exc.TorchDynamoException as error:
                raise UserError(f"it does not compile here: {str(error).splitlines()[0]}") from error

    return step


def _causal(b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
    return i >= j


@functools.cache
def _compiled() -> Callable[..., Tensor]:
    from torch.nn.attention.flex_attention import flex_attention

    # compiled for each length: with dynamic ones torch 2.13 writes C++ that does not compile (cur_qSplitSize5)
    return torch.compile(flex_attention, dynamic=False, fullgraph=True)


def _score_mod(x: Inputs) -> Callable[..., Tensor]:
    """Return a score_mod as users write it: arithmetic, a table lookup, or for FIRE a gathered n×n bias."""
    e: Any = x.encoding
    name = type(e).__name__
    if name == "Alibi":
        slopes = torch.tensor(alibi_slopes(HEADS), device=x.device)
        return lambda score, b, h, i, j: score - slopes[h] * (i - j)
    if name == "KerpleLog":
        p, a, at = e.p(), e.a(), x.pos.k[0]
        if x.pos.contiguous:
            return lambda score, b, h, i, j: score - p[h] * torch.log1p(a[h] * (i - j).abs())
        return lambda score, b, h, i, j: score - p[h] * torch.log1p(a[h] * (at[i] - at[j]).abs())
    if name == "T5Bias":
        buckets, table = relative_position_bucket(x.pos.k[0], e.config.buckets, e.config.max_distance), e.table
        return lambda score, b, h, i, j: score + table[buckets[(i - j).clamp_min(0)], h]
    bias = x.dense()[0]
    return lambda score, b, h, i, j: score + bias[h, i, j]


def x_transformers(x: Inputs) -> Step:
    """Use Attend(flash=True) of x-transformers with its own dense ALiBi or T5 bias; it caches ALiBi's."""
    try:
        attend = importlib.import_module("x_transformers.attend").Attend(causal=True, flash=True)
        theirs = importlib.import_module("x_transformers.x_transformers")
    except ImportError as error:
        raise UserError("x-transformers is not installed: pip install x-transformers") from error
    n, e = x.n, x.encoding
    if not x.parameters:
        alibi = theirs.AlibiPositionalBias(HEADS).to(x.device)
        alibi(n, n)
        return lambda: attend(x.q, x.k, x.v, attn_bias=alibi(n, n).to(x.dtype))[0]
    t5 = theirs.RelativePositionBias(1.0, True, e.config.buckets, e.config.max_distance, HEADS).to(x.device)
    t5.relative_attention_bias.weight = e.table
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
        q, k, v = (t.transpose(1, 2) for t in (x.q, x.k, x.v))
        return flash_attn_func(q, k, v, causal=True, alibi_slopes=slopes).transpose(1, 2)

    return step


LIMIT = "torch, causal"
BIASES = tuple(form for form in FORMS if form != "none")
# The first call at a length compiles or looks for block sizes.
COMPILED = ("FlexAttention", "flex", "triton")
# name -> the function and the forms that it knows
WAYS: dict[str, tuple[Callable[[Inputs], Step], tuple[str, ...]]] = {
    LIMIT: (torch_causal, ("none",)),
    "dense bias": (dense_bias, BIASES),
    "FlexAttention": (flex_attention, BIASES),
    "x-transformers": (x_transformers, ("fixed Toeplitz", "learned buckets")),
    "flash-attn": (flash_attention, ("fixed Toeplitz",)),
}


def pairs(backends: Iterable[str]) -> list[tuple[str, str]]:
    """Return all (bias, implementation) pairs, attention without a bias first."""
    found = [("none", LIMIT)]
    for form in FORMS:
        # without a bias the sdpa backend is the limit itself
        found += [(form, backend) for backend in backends if (form, backend) != ("none", "sdpa")]
        found += [(form, way) for way, (_, forms) in WAYS.items() if form in forms and way != LIMIT]
    return found


def prepare(case: Case, x: Inputs) -> Step:
    """Return the step of an implementation."""
    if case.way in WAYS:
        return WAYS[case.way][0](x)
    return lambda: BACKENDS[case.way](x.q, x.k, x.v, x.plan())


def deviation(case: Case) -> float:
    """Return the largest relative error of output and gradients against the reference at CHECK tokens.

    The parameters are compared with the largest gradient of them all: that of a constant in the bias is 0.
    """
    x = Inputs(case, CHECK)
    want = x.run(lambda: reference(x.q, x.k, x.v, x.plan()))
    got = x.run(prepare(case, x))
    largest = [float(t.abs().max()) for t in want]
    largest[4:] = [max(largest[4:], default=0.0)] * len(x.parameters) * case.backward
    found = [float((a - b).abs().max()) / top for a, b, top in zip(got, want, largest, strict=True)]
    return max(found) if all(map(math.isfinite, found)) else math.inf
