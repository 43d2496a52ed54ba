"""Rotary position embedding (RoPE) and scalings of its frequencies for longer inputs."""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any, Literal

import torch
from torch import Tensor

from fairseq_rpe.core.errors import UserError
from fairseq_rpe.core.log_bias import LogBias
from fairseq_rpe.core.positions import Positions
from fairseq_rpe.core.spec import option
from fairseq_rpe.encodings.base import Rotary, register

# options that have an effect with every scaling
_ALWAYS = ("base", "scaling", "resonance", "logn", "rotary_fraction", "interleaved")


@dataclass(frozen=True)
class Scaling:
    """A change of the frequencies θ for longer inputs.

    Attributes:
        scale: function of θ (..., P), κ (..., 1) and the encoding, which returns the changed frequencies (..., P).
        options: options that have an effect, besides those of every scaling; any other one is refused.
        dynamic: whether κ follows from the current length; the option ``factor`` is then α, and may be left out.
        beta_fast: value of ``beta_fast=auto``.
        has_temperature: whether queries and keys are multiplied by YaRN's temperature.
    """

    scale: Callable[[Tensor, Tensor, "Rope"], Tensor]
    options: tuple[str, ...] = ()
    dynamic: bool = False
    beta_fast: float = 32.0
    has_temperature: bool = False


def _keep(theta: Tensor, kappa: Tensor, rope: "Rope") -> Tensor:
    return theta


def _scale_linearly(theta: Tensor, kappa: Tensor, rope: "Rope") -> Tensor:
    return theta / kappa


def _scale_base(theta: Tensor, kappa: Tensor, rope: "Rope") -> Tensor:
    """Return the frequencies of the base base·κ^(d/(d-2))."""
    return theta * kappa ** (-2 * _pair_indices(theta) / max(rope.rotated - 2, 1))


def _scale_by_parts(theta: Tensor, kappa: Tensor, rope: "Rope") -> Tensor:
    """Return θ/κ for low frequencies, θ for high ones, and a blend between them by the option ``ramp``."""
    share = _share_of_rotations(theta, rope) if rope.config.ramp == "paper" else _share_of_index(theta, rope)
    return torch.lerp(theta / kappa, theta, share)


def _scale_as_llama3(theta: Tensor, kappa: Tensor, rope: "Rope") -> Tensor:
    """Return the frequencies of ``ntk_by_parts`` with the ramp of the paper."""
    return torch.lerp(theta / kappa, theta, _share_of_rotations(theta, rope))


def _truncate(theta: Tensor, kappa: Tensor, rope: "Rope") -> Tensor:
    """Return θ from b on, ρ from a to b, and 0 below a."""
    cfg = rope.config
    high, low, value = cfg.truncate_high, cfg.truncate_low, cfg.truncate_value
    b = 2 * math.pi / (kappa * rope.original_length) if high is None else torch.full_like(kappa, high)
    a = b / 8 if low is None else torch.full_like(b, low)
    rho = b / 16 if value is None else torch.full_like(b, value)
    return torch.where(theta >= b, theta, torch.where(theta < a, 0.0, rho))


def _share_of_rotations(theta: Tensor, rope: "Rope") -> Tensor:
    """Return γ (..., P), the weight of the unscaled θ, linear in the number of rotations within L."""
    fast, slow = rope.beta_fast, rope.config.beta_slow
    return ((rope.original_length * theta / (2 * math.pi) - slow) / (fast - slow)).clamp(0, 1)


def _share_of_index(theta: Tensor, rope: "Rope") -> Tensor:
    """Return γ (P,), the weight of the unscaled θ, linear in the pair's index."""
    low, high = rope.ramp_bounds()
    return 1 - ((_pair_indices(theta) - low) / (high - low)).clamp(0, 1)


def _pair_indices(theta: Tensor) -> Tensor:
    """Return the index s = 0 … P - 1 of each pair, (P,)."""
    return torch.arange(theta.shape[-1], device=theta.device, dtype=theta.dtype)


_LENGTHS = ("factor", "original_length")
_BETAS = ("beta_fast", "beta_slow")
SCALINGS = {
    "none": Scaling(_keep),
    "linear": Scaling(_scale_linearly, ("factor",)),
    "ntk": Scaling(_scale_base, ("factor",)),
    "dynamic_ntk": Scaling(_scale_base, _LENGTHS, dynamic=True),
    "ntk_by_parts": Scaling(_scale_by_parts, (*_LENGTHS, *_BETAS, "ramp")),
    "llama3": Scaling(_scale_as_llama3, (*_LENGTHS, *_BETAS), beta_fast=4.0),
    "yarn": Scaling(
        _scale_by_parts, (*_LENGTHS, *_BETAS, "ramp", "temperature", "temperature_on"), has_temperature=True
    ),
    "truncated": Scaling(_truncate, (*_LENGTHS, "truncate_high", "truncate_low", "truncate_value")),
}


@register("rope", colour="sky blue", marker="<")
class Rope(Rotary):
    """RoPE (Su et al. 2021, arXiv 2104.09864): q and k are rotated by i·θ_s, so that scores depend on i - j.

    θ_s = base^(-2s/d) is ``inv_freq`` (P,) of pair s = 0 … P - 1, d = 2P the rotated width, T the current length (the
    row's largest position + 1), L the original length, κ the factor, γ a weight from 0 to 1. The sum of exp(score)
    over all distances diverges. The option ``scaling`` names one of these changes of θ:

    - linear: θ/κ, position interpolation, Chen et al. 2023 (arXiv 2306.15595).
    - ntk: θ_s·κ^(-2s/(d-2)), that is base·κ^(d/(d-2)), NTK-aware scaling, bloc97 2023.
    - dynamic_ntk: ntk with κ = max(1, α·T/L - (α-1)), as in public code; α = 1 is emozilla 2023. It is a
      function of T alone; code that only ever enlarges its base depends on the order of calls.
    - ntk_by_parts: (1-γ)·θ/κ + γ·θ. In the paper γ is linear in the number of rotations within L, in its code in
      the pair's index between the two betas, rounded outwards. The default follows the code. Peng et al. 2023
      (arXiv 2309.00071).
    - yarn: ntk_by_parts, and q and k times 0.1·ln κ + 1. Public code scales only the rotated part of a head
      (``temperature_on=rotated``); by default the whole head is scaled, which is the paper's temperature
      for partial rotary as well.
    - llama3: ntk_by_parts with the paper's γ and betas of 4 and 1, transformers' ``high_freq_factor`` and
      ``low_freq_factor``. Llama 3.1 has κ = 8 and L = 8192. Grattafiori et al. 2024 (arXiv 2407.21783).
    - truncated: θ if θ >= b, ρ if a <= θ < b, 0 below; by default b = 2π/(κ·L), a = b/8 and ρ = b/16 (the paper
      does not state the values and the edges; these are its code's). It needs fine-tuning. Pal et al. 2023
      (arXiv 2308.10882).

    Two more options combine with any scaling:

    - resonance: wavelengths 2π/θ are rounded to whole tokens, after any scaling. Wang et al. 2024 (arXiv 2403.00071).
    - logn: query i (the whole head) times ln(i+1)/ln L; ``clipped``: at least 1. It keeps the entropy of attention
      stable as the number of keys grows (Su 2021; Chiang & Cholak 2022, arXiv 2202.12172).
      ``base=500000,logn=clipped`` is entropy-aware ABF, Zhang et al. 2024 (arXiv 2401.07004), whose text leaves out the
      first two layers. Here all layers are scaled, as in its code, because they share the encoding.

    If θ depends on T (dynamic_ntk, factor=auto), cached keys are rotated again in every step; deeper layers still see
    states that were computed when the input was shorter, as in any decoder with a KV cache.
    """

    @dataclass(frozen=True)
    class Config:
        """Options of ``rope``."""

        base: float = option(10000.0, "b in θ_s = b^(-2s/d); a larger one alone stretches the wavelengths", above=1)
        scaling: str = option("none", "how the frequencies change for longer inputs", choices=tuple(SCALINGS))
        factor: float | Literal["auto"] | None = option(
            None,
            "κ = target / original length; auto: evaluation / original length, at least 1; "
            "dynamic_ntk: alpha, none is 1",
            above=0,
        )
        original_length: int = option(0, "L, tokens of the original training; 0: the training length", minimum=0)
        beta_fast: float | Literal["auto"] = option(
            "auto",
            "ntk_by_parts, llama3, yarn: pairs with more rotations within L keep their θ; auto: 32, and 4 for llama3",
            above=0,
        )
        beta_slow: float = option(
            1.0, "ntk_by_parts, llama3, yarn: θ of pairs with fewer rotations within L is divided by κ", above=0
        )
        ramp: str = option(
            "code",
            "between the betas: linear in the pair's index (code) or in its rotations within L (paper)",
            choices=("code", "paper"),
        )
        temperature: float | Literal["auto"] = option(
            "auto", "yarn: factor sqrt(1/t) of queries and of keys; auto: 0.1·ln κ + 1", above=0
        )
        temperature_on: str = option(
            "head",
            "yarn: what the temperature scales: the whole head, or the rotated part as in public code",
            choices=("head", "rotated"),
        )
        truncate_high: float | None = option(
            None, "truncated: b, pairs of this θ and above keep it; none: 2π/(κ·L)", above=0
        )
        truncate_low: float | None = option(
            None, "truncated: a, pairs of θ below it are not rotated; none: b/8", minimum=0
        )
        truncate_value: float | None = option(
            None, "truncated: ρ, the θ of pairs between a and b; none: b/16", minimum=0
        )
        resonance: bool = option(False, "round every wavelength to whole tokens, after any other change")
        logn: str = option(
            "none",
            "query i times ln(i+1)/ln L, which keeps the entropy of attention stable; clipped: at least 1",
            choices=("none", "clipped", "plain"),
        )
        rotary_fraction: float = option(
            1.0, "fraction of a head that is rotated, from its first element", above=0, maximum=1
        )
        interleaved: bool = option(False, "rotate pairs (2s, 2s+1) instead of (s, s + d/2)")

    formula = "(R_i q)·(R_j k),  R_p rotates pair s by p·θ_s,  θ_s = base^(-2s/d)"
    paper = "Su et al. 2021 (arXiv 2104.09864)"
    changes_base = True
    dape_base = True

    @classmethod
    def rotation_options(cls, config: Any) -> Mapping[str, str]:
        """Return the quantity of the rotation that each option sets, by the name of the option."""
        length = ("original_length",) if "original_length" in effective_options(config) else ()
        return {**super().rotation_options(config), **{key: key for key in ("resonance", "logn", "scaling", *length)}}

    @classmethod
    def rotation_scaling(cls, config: Any) -> str:
        """Return the option ``scaling``, or "" for its value none."""
        return "" if config.scaling == "none" else str(config.scaling)

    def setup(self) -> None:
        """Set the original length and the betas, and whether the rotation changes with the length; check the options.

        ``original_length`` is set first: the checks and the betas need it.
        """
        cfg = self.config
        self.scale_whole_head = cfg.temperature_on == "head"
        super().setup()
        self.original_length = cfg.original_length or self.length or 0
        effective = effective_options(cfg)
        self._refuse_ineffective_options(effective)
        self._check_scaling(effective)
        self._check_logn()
        self._set_betas()
        self._check_truncation()
        self.length_dependent = cfg.factor == "auto" or self.scaling.dynamic
        # a derived class may make the rotation depend on the length
        self.fixed_rotation = type(self) is Rope and not self.length_dependent

    @property
    def scaling(self) -> Scaling:
        """The change of the frequencies that the option ``scaling`` names."""
        return SCALINGS[self.config.scaling]

    def _refuse_ineffective_options(self, effective: Sequence[str]) -> None:
        """Refuse options that were set but have no effect in combination with the others."""
        cfg = self.config
        for f in fields(cfg):
            if f.name not in effective and getattr(cfg, f.name) != f.default:
                # truncate_high is named where it may be the reason that the option has no effect
                instead = ",truncate_high=…" if f.name in self.scaling.options else ""
                raise UserError(f"'rope:scaling={cfg.scaling}{instead}' does not read {f.name}: leave it out")

    def _check_scaling(self, effective: Sequence[str]) -> None:
        """Check that the scaling has the factor and the original length that it needs."""
        cfg = self.config
        if cfg.factor is None and "factor" in effective and not self.scaling.dynamic:
            raise UserError(f"'rope:scaling={cfg.scaling}' needs factor=NUMBER or factor=auto")
        if cfg.factor == "auto" and self.scaling.dynamic:
            raise UserError(f"'rope:scaling={cfg.scaling}' adapts to the length: its factor, alpha, must be a number")
        if "original_length" in effective and not self.original_length:
            raise UserError("'rope' needs the original length for this scaling: give original_length=N")

    def _check_logn(self) -> None:
        """Check that ``logn`` can scale queries."""
        cfg = self.config
        if cfg.logn != "none" and self.original_length == 1:
            raise UserError("'rope' divides by ln L for logn, which is 0 for L = 1: give another original_length=N")
        if cfg.logn != "none" and not self.scale_whole_head:
            raise UserError("'rope:logn' scales whole queries: leave temperature_on=rotated out")

    def _set_betas(self) -> None:
        """Set ``beta_fast``, which has a default for each scaling, and check it against ``beta_slow``."""
        cfg = self.config
        self.beta_fast = self.scaling.beta_fast if cfg.beta_fast == "auto" else cfg.beta_fast
        if self.beta_fast <= cfg.beta_slow:
            raise UserError(f"'rope': beta_fast={self.beta_fast:g} must be more than beta_slow={cfg.beta_slow:g}")

    def _check_truncation(self) -> None:
        """Check that the edges of ``truncated`` are in order; with factor=auto, at the largest upper edge, of κ = 1."""
        cfg = self.config
        if cfg.truncate_low is not None:
            factor = cfg.factor if isinstance(cfg.factor, float) else 1.0
            high = cfg.truncate_high or 2 * math.pi / (factor * self.original_length)
            if cfg.truncate_low > high:
                raise UserError(
                    f"'rope': truncate_low={cfg.truncate_low:g} is above {high:.4g}, which is truncate_high: lower it"
                )

    def factor(self, length: Tensor) -> Tensor:
        """Return the factor κ at the current lengths in tokens, in their shape."""
        cfg = self.config
        if self.scaling.dynamic:
            return ((length / self.original_length - 1) * (1.0 if cfg.factor is None else cfg.factor) + 1).clamp_min(1)
        if cfg.factor == "auto":
            return (length / self.original_length).clamp_min(1)
        return torch.full_like(length, 1.0 if cfg.factor is None else cfg.factor)

    def inv_freq(self, length: Tensor) -> Tensor:
        """Return the frequencies θ after scaling.

        Args:
            length: (..., 1) float64 current lengths, in tokens.

        Returns:
            (..., P) float64, in radians per token.
        """
        s = torch.arange(self.rotated // 2, device=length.device, dtype=length.dtype)
        kappa = self.factor(length)
        theta = (self.config.base ** (-2 * s / self.rotated)).expand(*kappa.shape[:-1], -1)
        theta = self.scaling.scale(theta, kappa, self)
        return 2 * math.pi / self._wavelengths(theta) if self.config.resonance else theta

    def ramp_bounds(self) -> tuple[int, float]:
        """Return the indices of the pairs between which γ falls from 1 to 0 with ``ramp=code``.

        Pair s makes L·θ_s/2π rotations within L tokens, so r rotations are at s = d·ln(L/(2π·r)) / (2·ln base).
        """
        d, base = self.rotated, self.config.base
        fast, slow = (
            d * math.log(self.original_length / (2 * math.pi * rotations)) / (2 * math.log(base))
            for rotations in (self.beta_fast, self.config.beta_slow)
        )
        low, high = (min(max(end, 0), d - 1) for end in (math.floor(fast), math.ceil(slow)))
        return low, high if high != low else high + 0.001  # γ divides by the difference

    @staticmethod
    def _wavelengths(theta: Tensor) -> Tensor:
        """Return the wavelengths 2π/θ in tokens, rounded to whole ones."""
        return torch.round(2 * math.pi / theta).clamp_min(1)

    def angles(self, at: Tensor, pos: Positions) -> Tensor:
        """Return the angles (B or 1, n, P), in radians, of the positions ``at`` (B or 1, n)."""
        theta = self.inv_freq(current_length(pos))[:, None]
        if self.config.resonance:
            # whole wavelengths: the angle is taken within one period, exact for any position
            return torch.remainder(at[..., None], self._wavelengths(theta).to(at.dtype)) * theta.to(at.dtype)
        return at[..., None] * theta.to(at.dtype)

    def amplitude(self, at: Tensor, pos: Positions, key: bool) -> Tensor | None:
        """Return the factors of ``yarn`` and ``logn`` (B or 1, n or 1, 1), or None."""
        temperature = self._temperature(at, pos)
        if key or self.config.logn == "none":
            return temperature
        entropy = logn_factor(at, self.original_length, self.config.logn == "clipped")[..., None]
        return entropy if temperature is None else temperature * entropy

    def log_bias_formulas(self) -> list[str] | list[LogBias] | None:
        """Return the formulas of RoPE, or None with ``logn``."""
        return super().log_bias_formulas() if self.config.logn == "none" else None  # scores grow with ln i

    def _temperature(self, at: Tensor, pos: Positions) -> Tensor | None:
        """Return YaRN's factor of queries and of keys, (B or 1, 1, 1), or None."""
        if not self.scaling.has_temperature:
            return None
        kappa = self.factor(current_length(pos))[:, None]
        if self.config.temperature == "auto":
            return (0.1 * kappa.clamp_min(1).log() + 1).to(at.dtype)
        return torch.full_like(kappa, self.config.temperature).to(at.dtype)


def effective_options(config: Rope.Config) -> tuple[str, ...]:
    """Return the names of options that have an effect in combination with the others of ``config``."""
    options = SCALINGS[config.scaling].options
    if "truncate_high" in options and config.truncate_high is not None:  # replaces 2π/(κ·L)
        options = tuple(key for key in options if key not in _LENGTHS)
    length_dependent = config.factor == "auto" or config.logn != "none"
    return (*_ALWAYS, *options, *(("original_length",) if length_dependent else ()))


def current_length(pos: Positions) -> Tensor:
    """Return the current lengths (B or 1, 1) float64, on the device of the positions: no synchronisation."""
    return pos.k.amax(dim=1, keepdim=True).to(torch.float64) + 1


def logn_factor(at: Tensor, original_length: int, clipped: bool = True) -> Tensor:
    """Return ln(i + 1) / ln L of positions i, in their shape; with ``clipped`` at least 1."""
    factor = (at.clamp_min(0) + 1).log() / math.log(original_length)
    return factor.clamp_min(1) if clipped else factor
