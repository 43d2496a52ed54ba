"""xPos: RoPE with an exponential decay per pair (Sun et al. 2023)."""

import math
from dataclasses import dataclass, fields
from typing import Any

import torch
from torch import Tensor

from fairseq_rpe.core.errors import UserError
from fairseq_rpe.core.log_bias import LogBias
from fairseq_rpe.core.positions import Positions
from fairseq_rpe.core.spec import option
from fairseq_rpe.encodings.base import Rotary, register


@register("xpos", colour="sky blue", marker=">")
class XPos(Rotary):
    """XPos (Sun et al. 2023, arXiv 2212.10554): RoPE whose pair s decays by ζ_s^((i-j)/S).

    A query is scaled by ζ_s^((i-c)/S) and a key by ζ_s^((c-j)/S). The centre c cancels; the official code takes the
    middle of the input, here it is the middle of the *queries*, so that a decoded token has factor 1 and every key it
    sees at most 1. If the factors of all queries would exceed the dtype's range, attention processes queries in blocks
    (``max_queries_per_call``). Pairs are interleaved, as in the official code. Scores tend to 0, so Σ exp(score)
    diverges. A survey prints one scalar γ in place of ζ_s; this follows the paper. Its blockwise causal attention at
    evaluation is not part of the encoding.
    """

    @dataclass(frozen=True)
    class Config:
        """Options of ``xpos``."""

        base: float = option(10000.0, "b in θ_s = b^(-2s/d)", above=1)
        scale_base: float = option(512.0, "S, tokens over which pair s decays by ζ_s", above=0)
        gamma: float = option(0.4, "γ in ζ_s = (2s + γd) / ((1 + γ)d); a larger one decays less", above=0, maximum=1e6)
        decay: float | None = option(
            None,
            "γ of the survey's Eq. 15: all pairs decay by γ per token of distance; none: the paper's ζ_s",
            above=0,
            maximum=1,
        )
        rotary_fraction: float = option(
            1.0, "fraction of a head that is rotated, from its first element", above=0, maximum=1
        )
        interleaved: bool = option(True, "rotate pairs (2s, 2s+1) instead of (s, s + d/2)")

    formula = "Σ_s ζ_s^((i-j)/S)·(R_i q)_s·(R_j k)_s,  ζ_s = (2s + γd) / ((1 + γ)d)"
    paper = "Sun et al. 2023 (arXiv 2212.10554)"
    bounded_reason = "scores decay to 0, so their exponentials tend to 1"

    @classmethod
    def rotation_scaling(cls, config: Any) -> str:
        """Return "xpos": a model that was trained with the decay needs it, as it would need a scaling."""
        return "xpos"

    def setup(self) -> None:
        """Check that no option is set that has no effect with ``decay``."""
        cfg = self.config
        super().setup()
        for f in fields(self.Config):
            if cfg.decay is not None and f.name in ("scale_base", "gamma") and getattr(cfg, f.name) != f.default:
                raise UserError(f"'xpos:decay={cfg.decay:g}' does not read {f.name}: leave it out")
        if cfg.decay == 1:
            raise UserError("'xpos:decay=1' does not decay, which is 'rope': use that, or a decay below 1")

    def log_bias_formulas(self) -> list[str] | list[LogBias] | None:
        """Return the formulas of scores that decay, or those of RoPE if a part of the head is not rotated."""
        if self.rotary_fraction == 1:
            return super().log_bias_formulas()
        # scores of elements that pass through do not decay
        return [LogBias("0", f"no additive bias: {Rotary.bounded_reason}")] * self.heads

    def _pairs(self, at: Tensor) -> Tensor:
        return torch.arange(self.rotated // 2, device=at.device, dtype=torch.float64)

    def zeta(self, at: Tensor) -> Tensor:
        """Return ζ (P,), the decay of each pair over S tokens, in float64 on the device of ``at``."""
        d, gamma = self.rotated, self.config.gamma
        return (2 * self._pairs(at) + gamma * d) / ((1 + gamma) * d)

    def log_decay(self, at: Tensor) -> Tensor:
        """Return the log-decay (P,) of each pair per token of distance, in float64 on the device of ``at``."""
        if self.config.decay is not None:
            return torch.full_like(self._pairs(at), math.log(self.config.decay))
        return self.zeta(at).log() / self.config.scale_base

    def angles(self, at: Tensor, pos: Positions) -> Tensor:
        """Return the angles (B or 1, n, P), in radians, of the positions ``at`` (B or 1, n)."""
        return at[..., None] * (self.config.base ** (-2 * self._pairs(at) / self.rotated)).to(at.dtype)

    def amplitude(self, at: Tensor, pos: Positions, key: bool) -> Tensor:
        """Return the decay factors (B or 1, n, P) relative to the middle of the queries."""
        centre = (pos.q.amin(dim=1, keepdim=True) + pos.q.amax(dim=1, keepdim=True)) / 2
        tokens = (centre - at) if key else (at - centre)
        return torch.exp(tokens[..., None] * self.log_decay(at).to(at.dtype))

    def max_queries_per_call(self, pos: Positions, dtype: torch.dtype) -> int:
        """Return how many neighbouring queries keep the factors of q and k well within the range of ``dtype``."""
        # log2 of the largest ratio of factors in one call: the range of the dtype less a margin for q·k itself
        max_bits = 8 if dtype == torch.float16 else 64
        cfg = self.config
        # bits per token by which pair 0 decays, the fastest
        bits_per_token = (
            math.log2((1 + cfg.gamma) / cfg.gamma) / cfg.scale_base if cfg.decay is None else -math.log2(cfg.decay)
        )
        max_span = max_bits / bits_per_token  # tokens
        if pos.contiguous and pos.step is not None:
            return max(1, int(max_span / pos.step))
        n = pos.q.shape[1]
        if n == 1 or float((pos.q.amax(1) - pos.q.amin(1)).max()) <= max_span:
            return n
        return max(1, int(max_span / float(pos.q.diff(dim=1).max())))
