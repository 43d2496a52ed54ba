"""Data-adaptive positional encoding: a small network of all heads' scores and biases adjusts the bias."""

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from fairseq_rpe.core.bias import Positions, block
from fairseq_rpe.core.errors import UserError
from fairseq_rpe.core.spec import option
from fairseq_rpe.encodings.base import Encoding, register, registry

PAIRS = 1 << 12  # whose hidden units are in memory at a time, without gradients on a CPU
BASES = ("kerple_log", "alibi", "fire", "rope", "nope")
# options of ``rope`` as they are named here, where ``base`` is the encoding
ROTATION = {"rope_base": "base", "rotary_fraction": "rotary_fraction", "interleaved": "interleaved"}


@register("dape")
class Dape(Encoding):
    """score = s + b + f([s; b]), s = q·k/sqrt(D) and b the bias of ``base``, for each pair over the heads.

    f is Linear(2H to w), LeakyReLU(0.01), Linear(w to H), one per layer; of ``rope`` and ``nope``, which have no b, it
    reads s alone. Beyond the training length it does what its base does, but f of a leaky ReLU grows with b and may
    cancel or add to it. The survey's equation has no b beside f, the public code has. First called CAPE.
    """

    @dataclass(frozen=True)
    class Config:
        base: str = option("kerple_log", "the encoding that is adjusted", choices=BASES)
        width: int = option(32, "w, hidden units", minimum=1, maximum=1 << 12)
        rope_base: float = option(10000.0, "base=rope: b in θ_s = b^(-2s/d)", above=1)
        rotary_fraction: float = option(
            1.0, "base=rope: part of a head that turns, from its first element", above=0, maximum=1
        )
        interleaved: bool = option(False, "base=rope: turn pairs (2s, 2s+1) instead of (s, s + d/2)")

    formula = "s + b + f([s; b]),  s = q·k/√D,  b of its base"
    paper = "Zheng et al. 2024 (arXiv 2405.14722)"
    sharing_modes = ("layer", "model")
    dependence = (
        "a network of all heads' scores adds to the bias of its base, with no bound: nothing follows for all texts"
    )

    @classmethod
    def rotation_options(cls, config: Any) -> Mapping[str, str]:
        return ROTATION if config.base == "rope" else {}

    def setup(self) -> None:
        cfg = self.config
        cls = registry.get(cfg.base)
        rotates = cfg.base == "rope"
        for f in fields(cfg):
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
        return self.base.rotates

    def rotate(self, x: Tensor, at: Tensor, pos: Positions, key: bool = False) -> Tensor:
        return self.base.rotate(x, at, pos, key)

    def transform_scores(self, scores: Tensor, q: Tensor, pos: Positions) -> Tensor:
        hidden = torch.isneginf(scores)
        found = scores = scores.masked_fill(hidden, 0.0)
        form = self.base.position_bias(pos)
        if form is not None:
            bias = block(form, pos).to(scores.dtype).expand_as(scores)
            scores, found = scores + bias, torch.cat([scores, bias], dim=1)
        first, last = ((x.weight.to(scores.dtype), x.bias.to(scores.dtype)[:, None]) for x in (self.mix, self.out))
        found = found.flatten(2)
        if torch.is_grad_enabled() or found.device.type != "cpu":
            found = torch.matmul(last[0], F.leaky_relu(torch.matmul(first[0], found) + first[1])) + last[1]
        else:
            found = _in_cache(found, first, last)
        return (scores + found.view_as(scores)).masked_fill(hidden, float("-inf"))


def _in_cache(x: Tensor, first: tuple[Tensor, Tensor], last: tuple[Tensor, Tensor]) -> Tensor:
    """The network of x (B, C, pairs), for so few pairs at a time that hidden units stay in a processor's cache."""
    out = x.new_empty(len(x), len(last[0]), x.shape[2])
    for start in range(0, x.shape[2], PAIRS):
        pairs = slice(start, start + PAIRS)
        for row, result in zip(x[:, :, pairs], out[:, :, pairs], strict=True):
            units = F.leaky_relu_(torch.addmm(first[1], first[0], row))
            result.copy_(torch.addmm(last[1], last[0], units))
    return out
