"""Rotary position embedding and what stretches it beyond the training length."""

import math
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any, Literal

import torch
from torch import Tensor

from fairseq_rpe.core.bias import Positions
from fairseq_rpe.core.errors import UserError
from fairseq_rpe.core.log_bias import LogBias
from fairseq_rpe.core.spec import option
from fairseq_rpe.encodings.base import Rotary, register

# the options that each scaling reads; any other one that is set would have no effect and is refused
_RAMP = ("factor", "original_length", "beta_fast", "beta_slow", "ramp")
READS = {
    "none": (),
    "linear": ("factor",),
    "ntk": ("factor",),
    "dynamic_ntk": ("factor", "original_length"),
    "ntk_by_parts": _RAMP,
    "llama3": tuple(key for key in _RAMP if key != "ramp"),
    "yarn": (*_RAMP, "temperature", "scaled"),
    "truncated": ("factor", "original_length", "truncate_high", "truncate_low", "truncate_value"),
}
_ALWAYS = ("base", "scaling", "resonance", "logn", "rotary_fraction", "interleaved")


@register("rope")
class Rope(Rotary):
    """Rotary: q and k turn by i·θ_s, so that scores depend on i - j; Σ exp(score) diverges.

    T is the current length (the row's largest position + 1), L the original one, d the rotated width, κ the factor.

    - linear: θ/κ. Position interpolation, Chen et al. 2023 (arXiv 2306.15595).
    - ntk: θ_s·κ^(-2s/(d-2)), that is base·κ^(d/(d-2)). bloc97 2023.
    - dynamic_ntk: ntk with κ = max(1, α·T/L - (α-1)), as in public code; α = 1 is emozilla 2023. A function of T
      alone: it shrinks back, where code that only ever enlarges its base depends on the order of calls.
    - ntk_by_parts: (1-γ)·θ/κ + γ·θ. The paper's γ is linear in the turns within L, its code's in the pair's index
      between the two betas, rounded outwards. The default is the code. Peng et al. 2023 (arXiv 2309.00071).
    - yarn: ntk_by_parts, and q and k times 0.1·ln κ + 1. Public code scales the turned part alone (``scaled=turned``);
      by default the whole head is scaled, which is the paper's temperature for partial rotary as well.
    - llama3: ntk_by_parts with the paper's γ and betas of 4 and 1, transformers' ``high_freq_factor`` and
      ``low_freq_factor``. Llama 3.1 has κ = 8 and L = 8192. Grattafiori et al. 2024 (arXiv 2407.21783).
    - truncated: θ where θ >= b, ρ where a <= θ < b, 0 below; by default b = 2π/(κ·L), a = b/8 and ρ = b/16 (the paper
      leaves the values and the edges open; these are its code's). It needs fine-tuning. Pal et al. 2023
      (arXiv 2308.10882).
    - resonance: wavelengths 2π/θ rounded, each angle taken from within one period. Wang et al. 2024 (2403.00071).
    - logn: query i times ln(i+1)/ln L, the whole head; clipped: at least 1. It keeps the entropy of attention as keys
      become more (Su 2021; Chiang & Cholak 2022, arXiv 2202.12172). ``base=500000,logn=clipped`` is entropy-aware ABF,
      Zhang et al. 2024 (arXiv 2401.07004), whose text leaves out the first two layers. All layers are scaled here, as
      in its code: they share the encoding.

    What reads T (dynamic_ntk, factor=auto) turns every cached key anew; deeper layers still see states that were made
    when the input was shorter, as in any decoder with a cache.
    """

    @dataclass(frozen=True)
    class Config:
        base: float = option(10000.0, "b in θ_s = b^(-2s/d); a larger one alone stretches the wavelengths", above=1)
        scaling: str = option("none", "how the frequencies change for longer inputs", choices=tuple(READS))
        factor: float | Literal["auto"] | None = option(
            None,
            "κ = target / original length; auto: evaluation / original length, at least 1; "
            "dynamic_ntk: alpha, none is 1",
            above=0,
        )
        original_length: int = option(0, "L, tokens of the original training; 0: the training length", minimum=0)
        beta_fast: float | Literal["auto"] = option(
            "auto",
            "ntk_by_parts, llama3, yarn: pairs of more turns within L keep their θ; auto: 32, and 4 for llama3",
            above=0,
        )
        beta_slow: float = option(
            1.0, "ntk_by_parts, llama3, yarn: pairs of fewer turns within L are divided by κ", above=0
        )
        ramp: str = option(
            "code",
            "between the betas: linear in the pair's index (code) or its turns (paper)",
            choices=("code", "paper"),
        )
        temperature: float | Literal["auto"] = option(
            "auto", "yarn: factor sqrt(1/t) of queries and of keys; auto: 0.1·ln κ + 1", above=0
        )
        scaled: str = option(
            "head",
            "yarn: what the temperature scales: the whole head, or the turned part as in public code",
            choices=("head", "turned"),
        )
        truncate_high: float | None = option(
            None, "truncated: b, pairs of this θ and above keep it; none: 2π/(κ·L)", above=0
        )
        truncate_low: float | None = option(None, "truncated: a, pairs of θ below it do not turn; none: b/8", minimum=0)
        truncate_value: float | None = option(
            None, "truncated: ρ, the θ of pairs between a and b; none: b/16", minimum=0
        )
        resonance: bool = option(False, "round every wavelength to whole tokens, after any other change")
        logn: str = option(
            "none",
            "query i times ln(i+1)/ln L, by which longer rows stay as sharp; clipped: never less than 1",
            choices=("none", "clipped", "plain"),
        )
        rotary_fraction: float = option(1.0, "part of a head that turns, from its first element", above=0, maximum=1)
        interleaved: bool = option(False, "turn pairs (2s, 2s+1) instead of (s, s + d/2)")

    formula = "(R_i q)·(R_j k),  R_p turns pair s by p·θ_s,  θ_s = base^(-2s/d)"
    paper = "Su et al. 2021 (arXiv 2104.09864)"
    changes_base = True

    @classmethod
    def rotation_options(cls, config: Any) -> Mapping[str, str]:
        length = ("original_length",) if "original_length" in options_read(config) else ()
        return {**super().rotation_options(config), **{key: key for key in ("resonance", "logn", "scaling", *length)}}

    @classmethod
    def rotation_scaling(cls, config: Any) -> str:
        return "" if config.scaling == "none" else str(config.scaling)

    def setup(self) -> None:
        cfg = self.config
        self.interleaved, self.rotary_fraction = cfg.interleaved, cfg.rotary_fraction
        self.whole = cfg.scaled == "head"
        super().setup()
        self.original = cfg.original_length or self.length or 0
        reads = options_read(cfg)
        for f in fields(cfg):
            if f.name not in reads and getattr(cfg, f.name) != f.default:
                instead = ",truncate_high=…" if f.name in READS[cfg.scaling] else ""  # what takes its place
                raise UserError(f"'rope:scaling={cfg.scaling}{instead}' does not read {f.name}: leave it out")
        if cfg.factor is None and "factor" in reads and cfg.scaling != "dynamic_ntk":
            raise UserError(f"'rope:scaling={cfg.scaling}' needs factor=NUMBER or factor=auto")
        if cfg.factor == "auto" and cfg.scaling == "dynamic_ntk":
            raise UserError("'rope:scaling=dynamic_ntk' follows the length by itself: its factor, alpha, is a number")
        if "original_length" in reads and not self.original:
            raise UserError("'rope' needs the original length for this scaling: give original_length=N")
        if cfg.logn != "none" and self.original == 1:
            raise UserError("'rope' divides by ln L for logn, which is 0 for L = 1: give another original_length=N")
        if cfg.logn != "none" and not self.whole:
            raise UserError("'rope:logn' scales whole queries: leave scaled=turned out")
        automatic = 4.0 if cfg.scaling == "llama3" else 32.0
        self.beta_fast = automatic if cfg.beta_fast == "auto" else cfg.beta_fast
        if self.beta_fast <= cfg.beta_slow:
            raise UserError(f"'rope': beta_fast={self.beta_fast:g} must be more than beta_slow={cfg.beta_slow:g}")
        if cfg.scaling == "truncated" and cfg.truncate_low is not None:
            factor = cfg.factor if isinstance(cfg.factor, float) else 1.0  # auto: at least 1
            high = cfg.truncate_high or 2 * math.pi / (factor * self.original)
            if cfg.truncate_low > high:
                raise UserError(
                    f"'rope': truncate_low={cfg.truncate_low:g} is above {high:.4g}, which is truncate_high: lower it"
                )
        self.length_dependent = cfg.factor == "auto" or cfg.scaling == "dynamic_ntk"
        # of a class derived from this one nothing is known
        self.fixed_rotation = type(self) is Rope and not self.length_dependent

    def factor(self, length: Tensor) -> Tensor:
        """κ at the current lengths, in their shape."""
        cfg = self.config
        if cfg.scaling == "dynamic_ntk":
            return ((length / self.original - 1) * (1.0 if cfg.factor is None else cfg.factor) + 1).clamp_min(1)
        if cfg.factor == "auto":
            return (length / self.original).clamp_min(1)
        return torch.full_like(length, 1.0 if cfg.factor is None else cfg.factor)

    def frequencies(self, length: Tensor) -> Tensor:
        """Current lengths (..., 1), float64 -> θ (..., P) in radians per token."""
        d, scaling = self.rotated, self.config.scaling
        s = torch.arange(d // 2, device=length.device, dtype=length.dtype)
        kappa = self.factor(length)
        theta = (self.config.base ** (-2 * s / d)).expand(*kappa.shape[:-1], -1)
        if scaling == "linear":
            theta = theta / kappa
        elif scaling in ("ntk", "dynamic_ntk"):
            theta = theta * kappa ** (-2 * s / max(d - 2, 1))
        elif scaling in ("ntk_by_parts", "llama3", "yarn"):
            theta = torch.lerp(theta / kappa, theta, self._kept_part(theta, s))
        elif scaling == "truncated":
            high, low, value = self.config.truncate_high, self.config.truncate_low, self.config.truncate_value
            b = 2 * math.pi / (kappa * self.original) if high is None else torch.full_like(kappa, high)
            a = b / 8 if low is None else torch.full_like(b, low)
            rho = b / 16 if value is None else torch.full_like(b, value)
            theta = torch.where(theta >= b, theta, torch.where(theta < a, 0.0, rho))
        return 2 * math.pi / self._wavelengths(theta) if self.config.resonance else theta

    def _kept_part(self, theta: Tensor, s: Tensor) -> Tensor:
        """γ: the share of its own frequency that each pair keeps."""
        fast, slow = self.beta_fast, self.config.beta_slow
        if self.config.ramp == "paper" or self.config.scaling == "llama3":
            return ((self.original * theta / (2 * math.pi) - slow) / (fast - slow)).clamp(0, 1)
        low, high = self.ramp_ends()
        return 1 - ((s - low) / (high - low)).clamp(0, 1)

    def ramp_ends(self) -> tuple[int, float]:
        """The pairs between which the code's ramp falls from 1 to 0."""
        d, base = self.rotated, self.config.base
        fast, slow = (
            d * math.log(self.original / (2 * math.pi * turns)) / (2 * math.log(base))
            for turns in (self.beta_fast, self.config.beta_slow)
        )
        low, high = (min(max(end, 0), d - 1) for end in (math.floor(fast), math.ceil(slow)))
        return low, high if high != low else high + 0.001

    @staticmethod
    def _wavelengths(theta: Tensor) -> Tensor:
        return torch.round(2 * math.pi / theta).clamp_min(1)

    def angles(self, at: Tensor, pos: Positions) -> Tensor:
        theta = self.frequencies(length_of(pos))[:, None]
        if self.config.resonance:
            return torch.remainder(at[..., None], self._wavelengths(theta).to(at.dtype)) * theta.to(at.dtype)
        return at[..., None] * theta.to(at.dtype)

    def amplitude(self, at: Tensor, pos: Positions, key: bool) -> Tensor | None:
        own = self._temperature(at, pos)
        if key or self.config.logn == "none":
            return own
        sharper = sharpened(at, self.original, self.config.logn == "clipped")[..., None]
        return sharper if own is None else own * sharper

    def log_bias_formulas(self) -> list[str] | list[LogBias] | None:
        return super().log_bias_formulas() if self.config.logn == "none" else None  # scores grow with ln i

    def _temperature(self, at: Tensor, pos: Positions) -> Tensor | None:
        """YaRN's factor of queries and of keys, (B or 1, 1, 1)."""
        if self.config.scaling != "yarn":
            return None
        kappa = self.factor(length_of(pos))[:, None]
        if self.config.temperature == "auto":
            return (0.1 * kappa.clamp_min(1).log() + 1).to(at.dtype)
        return torch.full_like(kappa, self.config.temperature).to(at.dtype)


def options_read(config: Rope.Config) -> tuple[str, ...]:
    """Names of the options that have an effect beside the others of ``config``."""
    reads = READS[config.scaling]
    if config.scaling == "truncated" and config.truncate_high is not None:  # it stands for 2π/(κ·L)
        reads = tuple(key for key in reads if key not in ("factor", "original_length"))
    length_dependent = config.factor == "auto" or config.logn != "none"
    return (*_ALWAYS, *reads, *(("original_length",) if length_dependent else ()))


def length_of(pos: Positions) -> Tensor:
    """(B or 1, 1) float64 lengths so far: on the device, so that nothing waits for it."""
    return pos.k.amax(dim=1, keepdim=True).to(torch.float64) + 1


def sharpened(at: Tensor, original: int, clipped: bool = True) -> Tensor:
    """ln(i + 1) / ln L of positions i, in their shape; ``clipped``: at least 1."""
    found = (at.clamp_min(0) + 1).log() / math.log(original)
    return found.clamp_min(1) if clipped else found
