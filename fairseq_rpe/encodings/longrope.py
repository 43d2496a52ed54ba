"""LongRoPE: RoPE with a separate scaling factor for each pair, found by a search (Ding et al. 2024)."""

import itertools
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from fairseq_rpe.core.errors import UserError
from fairseq_rpe.core.positions import Positions
from fairseq_rpe.core.spec import option
from fairseq_rpe.encodings.base import Rotary, register
from fairseq_rpe.encodings.rope import Rope, current_length

# name of a method with closed-form factors -> scaling of ``rope``
SEED_SCALINGS = {"pi": "linear", "ntk": "ntk", "yarn": "yarn"}


@register("longrope")
class LongRope(Rotary):
    """LongRoPE (Ding et al. 2024, arXiv 2402.13753): pair s is rotated by p·θ_s/λ_s from position n̂ on.

    The factors λ_s >= 1 are the same for all heads and layers and do not decrease with s: lower frequencies are
    stretched more. ``fairseq-rpe longrope-search`` searches for them. d is the rotated width, L the original length,
    κ = target length / L, T the row's length (its largest position + 1). The first n̂ positions, the start tokens, keep
    their angle p·θ_s; the rotation between one of them and a later token does not depend on the distance alone.

    As in public code, the rotated part of queries and keys is multiplied by m = sqrt(1 + ln κ/ln L), or by
    0.1·ln κ + 1, for any T, and a row of at most L tokens keeps its angles (``short=plain``). The current T decides, so
    when a text grows past L, all cached keys are rotated again; deeper layers still see states that were computed when
    the text was shorter. Beyond κ·L tokens the same factors apply.
    """

    @dataclass(frozen=True)
    class Config:
        """Options of ``longrope``."""

        factors: str = option(
            "1", "λ: one value, or one per pair, e.g. 1+1.5+3+4; or pi, ntk or yarn, whose factors follow from κ"
        )
        factor: float = option(1.0, "κ = target / original length, for m and for pi, ntk and yarn", minimum=1)
        start_tokens: int = option(0, "n̂: positions below it keep their angle", minimum=0)
        attention: str = option(
            "sqrt",
            "factor m of q and k: sqrt: sqrt(1 + ln κ/ln L); yarn: 0.1·ln κ + 1; none: 1",
            choices=("sqrt", "yarn", "none"),
        )
        short: str = option(
            "plain", "rows of at most L tokens: original angles, or scaled as longer rows", choices=("plain", "scaled")
        )
        original_length: int = option(0, "L, tokens of the original training; 0: the training length", minimum=0)
        base: float = option(10000.0, "b in θ_s = b^(-2s/d)", above=1)
        rotary_fraction: float = option(
            1.0, "fraction of a head that is rotated, from its first element", above=0, maximum=1
        )
        interleaved: bool = option(False, "rotate pairs (2s, 2s+1) instead of (s, s + d/2)")

        def __post_init__(self) -> None:
            if self.factors not in SEED_SCALINGS:
                object.__setattr__(self, "factors", "+".join(map(_format_factor, _parse_factors(self.factors))))

    formula = "(R_i q)·(R_j k),  R_p rotates pair s by p·θ_s/λ_s where p >= n̂, else by p·θ_s"
    paper = "Ding et al. 2024 (arXiv 2402.13753)"

    @classmethod
    def rotation_options(cls, config: Any) -> Mapping[str, str]:
        """Return the options that describe the rotation, with the quantities that they set."""
        return {**super().rotation_options(config), "original_length": "original_length"}

    @classmethod
    def rotation_scaling(cls, config: Any) -> str:
        """Return the name of the scaling of the frequencies."""
        return "longrope" if config.factors != "1" or config.factor != 1 else ""

    def setup(self) -> None:
        """Check the options and derive settings from them."""
        cfg = self.config
        # Rotary.setup computes the rotated width from rotary_fraction, so it is set before
        self.interleaved, self.rotary_fraction = cfg.interleaved, cfg.rotary_fraction
        super().setup()
        self.original_length = cfg.original_length or self.length or 0
        self.factors = self._resolve_factors()
        changes_angles = self.factors[-1] != 1  # factors do not decrease, so the last is the largest
        self._refuse_ineffective_options(changes_angles)
        if (changes_angles and cfg.short == "plain") or (cfg.factor > 1 and cfg.attention == "sqrt"):
            self._require_length()
        self.length_dependent = changes_angles and cfg.short == "plain"
        self.fixed_rotation = not self.length_dependent

    def _resolve_factors(self) -> tuple[float, ...]:
        """Return one factor λ per rotated pair, from the option ``factors``."""
        cfg = self.config
        if cfg.factors in SEED_SCALINGS:
            if cfg.factor == 1:
                raise UserError(f"'longrope:factors={cfg.factors}' needs factor=NUMBER, target / original length")
            if cfg.factors == "yarn":
                self._require_length()
            return seed_factors(cfg.factors, cfg.factor, self)
        numbers, pairs = _parse_factors(cfg.factors), self.rotated // 2
        if len(numbers) not in (1, pairs):
            raise UserError(
                f"'longrope:factors' has {len(numbers)} numbers for {pairs} rotated pairs: give {pairs}, or one"
            )
        return numbers if len(numbers) == pairs else numbers * pairs

    def _refuse_ineffective_options(self, changes_angles: bool) -> None:
        """Refuse an option that was set but has no effect in combination with the others."""
        cfg = self.config
        has_no_effect = {
            "factor": cfg.factor != 1 and cfg.factors not in SEED_SCALINGS and cfg.attention == "none",
            "start_tokens": cfg.start_tokens and not changes_angles,
            "short": cfg.short != "plain" and not changes_angles,
            "attention": cfg.attention != type(cfg)().attention and cfg.factor == 1,
        }
        if unused := [name for name, value in has_no_effect.items() if value]:
            raise UserError(f"'longrope' with these options does not read {unused[0]}: leave it out")

    def _require_length(self) -> None:
        """Check that L is known and that ln L, by which m divides, is not 0."""
        if self.original_length < 2:
            raise UserError("'longrope' needs the original length, at least 2 tokens: give original_length=N")

    def angles(self, at: Tensor, pos: Positions) -> Tensor:
        """Return the angles (B or 1, n, P), in radians."""
        s = torch.arange(self.rotated // 2, device=at.device, dtype=torch.float64)
        theta = self.config.base ** (-2 * s / self.rotated)
        # (B or 1, n, P) each
        original, scaled = (at[..., None] * x.to(at.dtype) for x in (theta, theta / s.new_tensor(self.factors)))
        if self.config.start_tokens:
            scaled = torch.where(at[..., None] < self.config.start_tokens, original, scaled)
        if not self.length_dependent:
            return scaled
        return torch.where(current_length(pos)[:, None] > self.original_length, scaled, original)

    def amplitude(self, at: Tensor, pos: Positions, key: bool) -> Tensor | None:
        """Return the factors of rotated pairs (B or 1, n or 1, P or 1), or None."""
        m = attention_factor(self.config.attention, self.config.factor, self.original_length)
        return None if m == 1 else at.new_full((1, 1, 1), m)


def seed_factors(name: str, factor: float, like: Rotary) -> tuple[float, ...]:
    """Return the factors λ by which ``pi``, ``ntk`` or ``yarn`` divides the frequencies of RoPE.

    Args:
        name: one of ``SEED_SCALINGS``.
        factor: κ, target length / original length.
        like: a LongRope, or a Rope without scaling, with base, widths and original length.

    Returns:
        One factor per pair, each >= 1, in ascending order.
    """
    base, fraction = like.config.base, like.config.rotary_fraction
    options = {"base": base, "rotary_fraction": fraction}
    length = torch.ones(1, dtype=torch.float64)  # scalings with a constant factor do not depend on it
    if name == "yarn":
        options["original_length"] = like.config.original_length or like.length or 0
    scaled = Rope(
        Rope.Config(scaling=SEED_SCALINGS[name], factor=factor, **options), like.heads, like.width, like.length
    )
    plain = Rope(Rope.Config(base=base, rotary_fraction=fraction), like.heads, like.width)
    factors = plain.inv_freq(length) / scaled.inv_freq(length)
    return tuple(max(1.0, x) for x in torch.cummax(factors, 0).values.tolist())  # corrects rounding only


def attention_factor(kind: str, factor: float, original_length: int) -> float:
    """Return m for κ = ``factor`` and L = ``original_length``; 1 if κ <= 1. ``kind`` is sqrt, yarn or none."""
    if kind == "none" or factor <= 1:
        return 1.0
    return math.sqrt(1 + math.log(factor) / math.log(original_length)) if kind == "sqrt" else 0.1 * math.log(factor) + 1


def _format_factor(x: float) -> str:
    return f"{x:.12f}".rstrip("0").rstrip(".")  # without an exponent, whose plus sign would separate two factors


def _parse_factors(text: str) -> tuple[float, ...]:
    """Parse the factors of a spec; refuse what is not a number, is below 1 or decreases."""
    try:
        factors = tuple(map(float, text.split("+")))
    except ValueError:
        factors = ()
    if not factors or not all(math.isfinite(x) for x in factors):
        names = ", ".join(SEED_SCALINGS)
        raise UserError(
            f"option 'factors' of 'longrope' wants numbers as in 1+1.5+3+4, or one of {names}, not '{text}'"
        )
    if min(factors) < 1:
        raise UserError(f"option 'factors' of 'longrope' must be at least 1, not {min(factors):g}")
    for before, after in itertools.pairwise(factors):
        if after < before:
            raise UserError(f"option 'factors' of 'longrope' must not decrease: {before:g} is followed by {after:g}")
    return factors
