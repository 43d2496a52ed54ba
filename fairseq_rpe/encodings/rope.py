"""Rotary position embedding (RoPE) and scalings of its frequencies for longer inputs."""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any, Literal

import torch
from torch import Tensor, nn

from fairseq_rpe.core.errors import UserError
from fairseq_rpe.core.log_bias import LogBias
from fairseq_rpe.core.positions import Positions
from fairseq_rpe.core.spec import option
from fairseq_rpe.encodings.base import CosSin, Rotary, register
from fairseq_rpe.encodings.query_scale import logn_factor
from fairseq_rpe.encodings.rope_scalings import SCALINGS, Scaling, count_rotating_pairs, yarn_attention_factor

# options that have an effect with every scaling
_ALWAYS = ("base", "scaling", "frequencies", "resonance", "logn", "rotary_fraction", "interleaved")
# option -> the option that replaces it
_REPLACED_BY = {"truncate": "ramp=paper", "mscale": "temperature=…", "mscale_all_dim": "temperature=…"}


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
      for partial rotary as well. With ``mscale`` and ``mscale_all_dim`` the factor is the quotient of
      0.1·mscale·ln κ + 1 and 0.1·mscale_all_dim·ln κ + 1, as in DeepSeek-V2 (arXiv 2405.04434).
    - llama3: ntk_by_parts with the paper's γ and betas of 4 and 1, transformers' ``high_freq_factor`` and
      ``low_freq_factor``. Llama 3.1 has κ = 8 and L = 8192. Grattafiori et al. 2024 (arXiv 2407.21783).
    - proportional: only the fastest pairs rotate (``keep``), the slowest have θ = 0: p-RoPE, Barbero et al. 2024
      (arXiv 2410.06205). ``keep=auto`` keeps the pairs that rotate at least once within L: HoPE, Chen et al. 2024
      (arXiv 2410.21216). θ_s is that of the whole rotated width, unlike with ``rotary_fraction``.
    - truncated: θ if θ >= b, ρ if a <= θ < b, 0 below; by default b = 2π/(κ·L), a = b/8 and ρ = b/16 (the paper
      does not state the values and the edges; these are its code's). It needs fine-tuning. Pal et al. 2023
      (arXiv 2308.10882).

    More options combine with scalings:

    - keep: as with ``proportional``, after any scaling but ``none`` and ``truncated``.
    - frequencies=learned: θ_s·exp(α_s), after any scaling, with learned α_s that start at 0. All layers share them,
      or each layer has its own with ``--rpe-share layer``. Zhang et al. 2025 (arXiv 2512.07805).
    - resonance: wavelengths 2π/θ are rounded to whole tokens, after any scaling. Wang et al. 2024 (arXiv 2403.00071).
    - logn: query i (the whole head) times ln(i+1)/ln L; ``clipped``: at least 1. It keeps the entropy of attention
      stable as the number of keys grows (Su 2021; Chiang & Cholak 2022, arXiv 2202.12172).
      ``base=500000,logn=clipped`` is entropy-aware ABF, Zhang et al. 2024 (arXiv 2401.07004), whose text leaves out the
      first two layers. Here all layers are scaled, as in its code, because they share the encoding. The option
      ``query_scale=logn`` of every encoding has the factor of ``clipped``, with n for i+1, the number of keys that a
      window leaves. The options differ in the last digits: this factor multiplies cos and sin, that one the query.

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
        truncate: bool = option(
            True, "ntk_by_parts, yarn with ramp=code: round the ends of the ramp outwards to whole pairs"
        )
        temperature: float | Literal["auto"] = option(
            "auto", "yarn: factor sqrt(1/t) of queries and of keys; auto: 0.1·ln κ + 1", above=0
        )
        temperature_on: str = option(
            "head",
            "yarn: what the temperature scales: the whole head, or the rotated part as in public code",
            choices=("head", "rotated"),
        )
        mscale: float | None = option(
            None, "yarn: factor of ln κ in the temperature, divided by that of mscale_all_dim; none: 1", above=0
        )
        mscale_all_dim: float | None = option(
            None, "yarn: factor of ln κ in the divisor of the temperature; none: no divisor", above=0
        )
        keep: float | Literal["auto"] | None = option(
            None,
            "fraction of the pairs that rotate, the fastest ones; auto: those that rotate once within L; none: all",
            above=0,
            maximum=1,
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
        frequencies: str = option(
            "fixed",
            "fixed, or learned: θ times a learned factor for each pair, 1 at the start",
            choices=("fixed", "learned"),
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
        keys = ["resonance", "logn", "scaling", "frequencies"]
        keys += [key for key in ("original_length", "keep") if key in effective_options(config)]
        return {**super().rotation_options(config), **{key: key for key in keys}}

    @classmethod
    def rotation_scaling(cls, config: Any) -> str:
        """Return the option ``scaling``, or "" for its value none."""
        return "" if config.scaling == "none" else str(config.scaling)

    @classmethod
    def allowed_sharing(cls, config: Any) -> tuple[str, ...]:
        """Return ("model", "layer") for learned frequencies; without parameters, all layers share the encoding."""
        return ("model", "layer") if config.frequencies == "learned" else super().allowed_sharing(config)

    def setup(self) -> None:
        """Set the original length, the betas and the parameters, and what may be cached; check the options.

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
        self._check_mscale()
        self._set_betas()
        self._set_rotating_pairs()
        self._check_truncation()
        self.length_dependent = cfg.factor == "auto" or self.scaling.dynamic
        # a derived class may make the rotation depend on the length
        self.fixed_rotation = type(self) is Rope and not self.length_dependent
        if cfg.frequencies == "learned":
            self._create_learned_factors()

    @property
    def is_learned(self) -> bool:
        """Whether the frequencies are learned."""
        return bool(self.config.frequencies == "learned")

    @property
    def scaling(self) -> Scaling:
        """The change of the frequencies that the option ``scaling`` names."""
        return SCALINGS[self.config.scaling]

    def _refuse_ineffective_options(self, effective: Sequence[str]) -> None:
        """Refuse options that were set but have no effect in combination with the others."""
        cfg = self.config
        for f in fields(type(self).Config):
            if f.name not in effective and getattr(cfg, f.name) != f.default:
                # if the scaling has the option, another option is the reason that it has no effect
                reason = f",{_REPLACED_BY.get(f.name, 'truncate_high=…')}" if f.name in self.scaling.options else ""
                remedy = "name scaling=proportional" if (f.name, cfg.scaling) == ("keep", "none") else "leave it out"
                raise UserError(f"'rope:scaling={cfg.scaling}{reason}' does not read {f.name}: {remedy}")

    def _check_scaling(self, effective: Sequence[str]) -> None:
        """Check that the scaling has the factor and the original length that it needs."""
        cfg = self.config
        if cfg.factor is None and "factor" in effective and self.scaling.needs_factor:
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

    def _check_mscale(self) -> None:
        """Check that ``mscale`` and ``mscale_all_dim`` are given together; transformers ignores one alone."""
        cfg = self.config
        if (cfg.mscale is None) != (cfg.mscale_all_dim is None):
            raise UserError("'rope': mscale and mscale_all_dim have an effect only together: give both or none")

    def _set_rotating_pairs(self) -> None:
        """Set ``rotating_pairs``, the number of pairs that the option ``keep`` lets rotate."""
        cfg, pairs = self.config, self.rotated // 2
        self.rotating_pairs = pairs
        if cfg.keep is None:
            if cfg.scaling == "proportional":
                raise UserError("'rope:scaling=proportional' needs keep=NUMBER or keep=auto")
            return
        for name, default in (("resonance", False), ("rotary_fraction", 1.0)):
            if getattr(cfg, name) != default:
                raise UserError(f"'rope': keep cannot be combined with {name}: leave one of them out")
        self.rotating_pairs = count_rotating_pairs(cfg.keep, self.rotated, cfg.base, self.original_length)
        if not self.rotating_pairs and cfg.keep == "auto":
            raise UserError(
                f"'rope:keep=auto': no pair rotates once within the original length of {self.original_length} tokens: "
                "train on at least 7 tokens, or give keep=NUMBER"
            )
        if not self.rotating_pairs:
            raise UserError(
                f"'rope': keep={cfg.keep:g} keeps none of {pairs} pairs: give at least 1/{pairs}, or use nope"
            )

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
        theta = self._scaled_frequencies(length)
        if self.is_learned:
            return theta * self.log_frequency_factor.to(theta.dtype).exp()
        return 2 * math.pi / self._wavelengths(theta) if self.config.resonance else theta

    def _scaled_frequencies(self, length: Tensor) -> Tensor:
        """Return θ (..., P) after the options ``scaling`` and ``keep``; the argument is that of ``inv_freq``."""
        s = torch.arange(self.rotated // 2, device=length.device, dtype=length.dtype)
        kappa = self.factor(length)
        theta = (self.config.base ** (-2 * s / self.rotated)).expand(*kappa.shape[:-1], -1)
        theta = self.scaling.scale(theta, kappa, self)
        return theta.masked_fill(s >= self.rotating_pairs, 0.0) if self.rotating_pairs < len(s) else theta

    def ramp_bounds(self) -> tuple[float, float]:
        """Return the indices of the pairs between which γ falls from 1 to 0 with ``ramp=code``.

        Pair s makes L·θ_s/2π rotations within L tokens, so r rotations are at s = d·ln(L/(2π·r)) / (2·ln base).
        """
        d, base = self.rotated, self.config.base
        fast, slow = (
            d * math.log(self.original_length / (2 * math.pi * rotations)) / (2 * math.log(base))
            for rotations in (self.beta_fast, self.config.beta_slow)
        )
        if self.config.truncate:
            fast, slow = math.floor(fast), math.ceil(slow)
        low, high = (min(max(end, 0), d - 1) for end in (fast, slow))
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

    def rotate(self, x: Tensor, at: Tensor, pos: Positions, key: bool = False) -> Tensor:
        """Rotate x (B, H, n, D), with gradients of learned frequencies; same shape."""
        if not self.is_learned:
            return super().rotate(x, at, pos, key)
        return self._rotate_pairs(x, *self._learned_cos_sin(at, pos, key))

    def rotation(self, pos: Positions) -> Callable[..., Tensor] | None:
        """Return the function that rotates queries and keys of one forward pass, with cos and sin computed once."""
        if not self.is_learned:
            return super().rotation(pos)
        # Here and not in the first layer: a layer that is recomputed for its gradients computes the same as before, and
        # the graph is freed together with this closure.
        queries, keys = self._learned_cos_sin(pos.q, pos, False), self._learned_cos_sin(pos.k, pos, True)
        queries_at, keys_at = pos.q, pos.k

        def rotate(x: Tensor, at: Tensor, pos: Positions, key: bool = False) -> Tensor:
            if at is (keys_at if key else queries_at):
                return self._rotate_pairs(x, *(keys if key else queries))
            return self.rotate(x, at, pos, key)  # new keys of a cache, or a part of the tokens

        return rotate

    def logged_scalars(self) -> dict[str, Tensor]:
        """Return the wavelengths 2π/θ in tokens of pairs with learned frequencies, at the original length."""
        if not self.is_learned:
            return {}
        with torch.no_grad():
            theta = self.inv_freq(self._original_length_tensor(self.log_frequency_factor.device))  # (P,)
        return {f"wavelength_pair{s}": 2 * math.pi / theta[s] for s in self._learned_pairs}

    def _create_learned_factors(self) -> None:
        """Create the parameter α (P,), which multiplies θ by exp(α), and list the pairs that rotate."""
        if self.config.resonance:
            raise UserError("'rope': resonance rounds wavelengths, which frequencies=learned changes: leave one out")
        self.log_frequency_factor = nn.Parameter(torch.zeros(self.rotated // 2))
        theta = self._scaled_frequencies(self._original_length_tensor("cpu"))  # also if parameters are on "meta"
        self._learned_pairs = tuple(theta.nonzero().flatten().tolist())

    def _original_length_tensor(self, device: torch.device | str) -> Tensor:
        """Return the original length (1,), or 1 if it is unknown, as ``inv_freq`` takes it."""
        return torch.full((1,), self.original_length or 1, dtype=torch.float64, device=device)

    def _learned_cos_sin(self, at: Tensor, pos: Positions, key: bool) -> CosSin:
        """Return cos and sin for positions ``at`` with their gradients; nothing is cached, as parameters change."""
        float_at = at if at.is_floating_point() else at.to(torch.float32)
        return self._cos_sin_of_angles(self.angles(float_at, pos), float_at, pos, key)

    def log_bias_formulas(self) -> list[str] | list[LogBias] | None:
        """Return the formulas of RoPE, or None with ``logn``."""
        return super().log_bias_formulas() if self.config.logn == "none" else None  # scores grow with ln i

    def _temperature(self, at: Tensor, pos: Positions) -> Tensor | None:
        """Return YaRN's factor of queries and of keys, (B or 1, 1, 1), or None."""
        if not self.scaling.has_temperature:
            return None
        cfg, kappa = self.config, self.factor(current_length(pos))[:, None]
        if cfg.temperature != "auto":
            return torch.full_like(kappa, cfg.temperature).to(at.dtype)
        factor = yarn_attention_factor(kappa, cfg.mscale or 1.0)
        if cfg.mscale_all_dim is not None:
            factor = factor / yarn_attention_factor(kappa, cfg.mscale_all_dim)
        return factor.to(at.dtype)


def effective_options(config: Rope.Config) -> tuple[str, ...]:
    """Return the names of options that have an effect in combination with the others of ``config``."""
    options, replaced = SCALINGS[config.scaling].options, set[str]()
    if "truncate_high" in options and config.truncate_high is not None:  # replaces 2π/(κ·L)
        replaced |= {"factor", "original_length"}
    if config.ramp == "paper":
        replaced |= {"truncate"}
    if config.temperature != "auto":
        replaced |= {"mscale", "mscale_all_dim"}
    needs_length = config.factor == "auto" or config.logn != "none" or config.keep == "auto"
    options = tuple(key for key in options if key not in replaced)
    return (*_ALWAYS, *options, *(("original_length",) if needs_length else ()))


def current_length(pos: Positions) -> Tensor:
    """Return the current lengths (B or 1, 1) float64, on the device of the positions: no synchronisation."""
    return pos.k.amax(dim=1, keepdim=True).to(torch.float64) + 1
