"""Data-adaptive positional encoding (DAPE): an MLP over the scores and biases of all heads adjusts the bias."""

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from fairseq_rpe.core.errors import UserError
from fairseq_rpe.core.positions import Positions
from fairseq_rpe.core.spec import option
from fairseq_rpe.encodings.base import Encoding, Rotary, register, registry

PAIRS = 1 << 12  # pairs whose hidden units are in memory at a time, without gradients on a CPU
# option of this encoding, in which ``base`` is an encoding -> option of the base, if that rotates
ROTATION = {"rope_base": "base", "rotary_fraction": "rotary_fraction", "interleaved": "interleaved"}


def base_names() -> list[str]:
    """Return the names of the encodings that ``dape`` can adjust."""
    return [name for name in registry.names() if registry.get(name).dape_base]


def _is_rotary(base: str) -> bool:
    return issubclass(registry.get(base), Rotary)


@register("dape", colour="orange", marker="o")
class Dape(Encoding):
    """DAPE (Zheng et al. 2024, arXiv 2405.14722): score = s + b + f([s; b]) for each pair.

    s (H,) are the scores q·k/sqrt(D) of all heads and b (H,) the biases of the encoding ``base``. f is Linear(2H -> w),
    LeakyReLU(0.01), Linear(w -> H), one per layer; for ``rope`` and ``nope``, which have no b, it reads s only. Beyond
    the training length the encoding behaves as its base, but f grows with b and may cancel or amplify it. The survey's
    equation has no b outside f; the public code has it, and so has this. DAPE was first called CAPE.
    """

    @dataclass(frozen=True)
    class Config:
        """Options of ``dape``."""

        base: str = option("kerple_log", "the encoding that is adjusted", choices=base_names)
        width: int = option(32, "w, hidden units", minimum=1, maximum=1 << 12)
        rope_base: float = option(10000.0, "base=rope: b in θ_s = b^(-2s/d)", above=1)
        rotary_fraction: float = option(
            1.0, "base=rope: fraction of a head that is rotated, from its first element", above=0, maximum=1
        )
        interleaved: bool = option(False, "base=rope: rotate pairs (2s, 2s+1) instead of (s, s + d/2)")

    formula = "s + b + f([s; b]),  s = q·k/√D,  b of its base"
    paper = "Zheng et al. 2024 (arXiv 2405.14722)"
    family = "bias that depends on the content"
    sharing_modes = ("layer", "model")
    dependence = (
        "a network of all heads' scores adds to the bias of its base, with no bound: nothing follows for all texts"
    )

    @classmethod
    def rotation_options(cls, config: Any) -> Mapping[str, str]:
        """Return the quantity of the rotation that each option sets, by the name of the option."""
        return ROTATION if _is_rotary(config.base) else {}

    def setup(self) -> None:
        """Check the options and create the parameters."""
        cfg = self.config
        cls = registry.get(cfg.base)
        rotates = _is_rotary(cfg.base)
        for f in fields(self.Config):
            if f.name in ROTATION and not rotates and getattr(cfg, f.name) != f.default:
                raise UserError(f"'dape:base={cfg.base}' does not read {f.name}: leave it out, or give base=rope")
        rotation = {key: getattr(cfg, name) for name, key in ROTATION.items()} if rotates else {}
        self.base = cls(cls.Config(**rotation), self.heads, self.width, self.length)
        self.fixed_rotation, self.length_dependent = self.base.fixed_rotation, self.base.length_dependent
        self.biased = self.base.adds_bias
        self.mix = nn.Linear(self.heads * (1 + self.biased), self.config.width)
        self.out = nn.Linear(self.config.width, self.heads)

    @property
    def rotates(self) -> bool:
        """Whether ``base`` rotates queries and keys."""
        return self.base.rotates

    def rotate(self, x: Tensor, at: Tensor, pos: Positions, key: bool = False) -> Tensor:
        """Rotate queries, or keys with ``key``, x (B, H, n, D); same shape."""
        return self.base.rotate(x, at, pos, key)

    def transform_scores(self, scores: Tensor, q: Tensor, pos: Positions) -> Tensor:
        """Add the bias of ``base`` and the MLP's output to scores (B, H, n, m)."""
        hidden = torch.isneginf(scores)
        inputs = scores = scores.masked_fill(hidden, 0.0)
        base_bias = self.base.position_bias(pos)
        if base_bias is not None:
            bias = base_bias.materialize(pos).to(scores.dtype).expand_as(scores)
            scores, inputs = scores + bias, torch.cat([scores, bias], dim=1)  # (B, H, n, m), (B, 2H, n, m)
        change = self._apply_mlp(inputs.flatten(2))  # (B, H, n·m)
        return (scores + change.view_as(scores)).masked_fill(hidden, float("-inf"))

    def _apply_mlp(self, x: Tensor) -> Tensor:
        """Return f (B, H, pairs) of the scores and biases x (B, H or 2H, pairs)."""
        first, last = (
            _Layer(layer.weight.to(x.dtype), layer.bias.to(x.dtype)[:, None]) for layer in (self.mix, self.out)
        )
        if torch.is_grad_enabled() or x.device.type != "cpu":
            units = F.leaky_relu(torch.matmul(first.weight, x) + first.bias)  # (B, w, pairs)
            return torch.matmul(last.weight, units) + last.bias
        return _apply_blockwise(x, first, last)


class _Layer(NamedTuple):
    """A linear layer: weight (out, in) and bias (out, 1)."""

    weight: Tensor
    bias: Tensor


def _apply_blockwise(x: Tensor, first: _Layer, last: _Layer) -> Tensor:
    """Apply the MLP to x (B, H or 2H, pairs), in blocks whose hidden units fit into the CPU's cache: (B, H, pairs)."""
    out = x.new_empty(len(x), len(last.weight), x.shape[2])
    for start in range(0, x.shape[2], PAIRS):
        pairs = slice(start, start + PAIRS)
        for row, result in zip(x[:, :, pairs], out[:, :, pairs], strict=True):
            units = F.leaky_relu_(torch.addmm(first.bias, first.weight, row))  # (w, block)
            result.copy_(torch.addmm(last.bias, last.weight, units))
    return out
