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

# Values of the option ``factors`` that name a formula, and the scaling of ``rope`` that has the same formula.
# ``fairseq-rpe longrope-search`` starts from their factors, hence "seed".
SEED_SCALINGS = {"pi": "linear", "ntk": "ntk", "yarn": "yarn"}


@register("longrope", colour="sky blue", marker="o")
class LongRope(Rotary):
    """LongRoPE (Ding et al. 2024, arXiv 2402.13753): RoPE with the frequency of each pair divided by a factor.

    Symbols, and the options that set them:

    - d is the rotated width of a head, s the index of a pair, p a position in tokens.
    - θ_s = base^(-2s/d) is the frequency of pair s in RoPE.
    - λ_s >= 1 is the factor of pair s (``factors``). All heads and layers have the same factors. They do not decrease
      with s, so lower frequencies are stretched more. ``fairseq-rpe longrope-search`` searches for them.
    - n̂ is the number of start tokens (``start_tokens``).
    - L is the original length (``original_length``), κ = target length / L (``factor``).
    - T is the length of a row, its largest position + 1.

    Angles: pair s is rotated by p·θ_s/λ_s. The start tokens, at positions below n̂, keep the angle p·θ_s of RoPE. The
    rotation between a start token and a later token therefore does not depend on their distance alone. Beyond κ·L
    tokens the same factors apply.

    Short rows: with ``short=plain`` all tokens of a row keep the angle of RoPE as long as T <= L, as in the code of the
    paper. A text that is generated may grow past L; all cached keys are then rotated again, with the new angles. The
    states of deeper layers are not computed again: they were computed from the angles of the shorter text.

    Amplitude: the rotated part of queries and keys is multiplied by m, at any T. By default m = sqrt(1 + ln κ/ln L), as
    in transformers (``rope_type="longrope"``); with ``attention=yarn`` it is YaRN's 0.1·ln κ + 1.
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
            # Equal numbers get one text, so that 1.50+2 and 1.5+2.0 are the same spec: runs and tables compare specs.
            # The class is frozen, hence object.__setattr__.
            if self.factors not in SEED_SCALINGS:
                object.__setattr__(self, "factors", "+".join(map(_format_factor, _parse_factors(self.factors))))

    formula = "(R_i q)·(R_j k),  R_p rotates pair s by p·θ_s/λ_s where p >= n̂, else by p·θ_s"
    paper = "Ding et al. 2024 (arXiv 2402.13753)"

    @classmethod
    def rotation_options(cls, config: Any) -> Mapping[str, str]:
        """Return the quantity of the rotation that each option sets, by the name of the option."""
        return {**super().rotation_options(config), "original_length": "original_length"}

    @classmethod
    def rotation_scaling(cls, config: Any) -> str:
        """Return "longrope", or "" if both options have their default, with which this encoding is plain RoPE."""
        return "longrope" if config.factors != "1" or config.factor != 1 else ""

    def setup(self) -> None:
        """Set the factors λ, the original length L and whether angles depend on the row's length; check the options.

        The order matters: ``_resolve_factors`` reads ``rotated``, which the base class sets, and ``original_length``.
        """
        cfg = self.config
        super().setup()
        self.original_length = cfg.original_length or self.length or 0  # 0: unknown
        self.pair_factors = self._resolve_factors()  # λ_s of each pair s
        changes_angles = self.pair_factors[-1] != 1  # factors do not decrease, so the last is the largest
        self._refuse_ineffective_options(changes_angles)
        # Whether rows of at most L tokens have other angles than longer ones; only then may a key's rotation change.
        self.length_dependent = changes_angles and cfg.short == "plain"
        self.fixed_rotation = not self.length_dependent
        m_divides_by_log_length = cfg.factor > 1 and cfg.attention == "sqrt"
        if self.length_dependent or m_divides_by_log_length:
            self._require_length()

    def _resolve_factors(self) -> tuple[float, ...]:
        """Return one factor λ per rotated pair, from the option ``factors``."""
        cfg = self.config
        if cfg.factors in SEED_SCALINGS:
            if cfg.factor == 1:
                raise UserError(f"'longrope:factors={cfg.factors}' needs factor=NUMBER, target / original length")
            if cfg.factors == "yarn":  # its formula counts the rotations within L
                self._require_length()
            return seed_factors(cfg.factors, cfg.factor, self)
        numbers, pairs = _parse_factors(cfg.factors), self.rotated // 2
        if len(numbers) not in (1, pairs):
            raise UserError(
                f"'longrope:factors' has {len(numbers)} numbers for {pairs} rotated pairs: give {pairs}, or one"
            )
        return numbers if len(numbers) == pairs else numbers * pairs

    def _refuse_ineffective_options(self, changes_angles: bool) -> None:
        """Refuse an option that was set but has no effect in combination with the others.

        Args:
            changes_angles: whether some λ is not 1.
        """
        cfg = self.config
        default = type(cfg)()
        has_no_effect = {
            # κ sets m and the factors of a formula, as in factors=pi,factor=4; factors=2,attention=none needs neither
            "factor": cfg.factor != default.factor and cfg.factors not in SEED_SCALINGS and cfg.attention == "none",
            # if every λ is 1, start tokens and short rows have the same angles as all others
            "start_tokens": cfg.start_tokens != default.start_tokens and not changes_angles,
            "short": cfg.short != default.short and not changes_angles,
            # m is 1 for κ = 1 with any formula, as in factors=2,attention=yarn
            "attention": cfg.attention != default.attention and cfg.factor == 1,
        }
        if unused := [name for name, value in has_no_effect.items() if value]:
            raise UserError(f"'longrope' with these options does not read {unused[0]}: leave it out")

    def _require_length(self) -> None:
        """Check that L is known, and that it is not 1: the formula of m divides by ln L, which would be 0."""
        if self.original_length < 2:
            raise UserError("'longrope' needs the original length, at least 2 tokens: give original_length=N")

    def angles(self, at: Tensor, pos: Positions) -> Tensor:
        """Return the angles (B or 1, n, P), in radians, of the positions ``at`` (B or 1, n)."""
        s = torch.arange(self.rotated // 2, device=at.device, dtype=torch.float64)
        theta = self.config.base ** (-2 * s / self.rotated)
        # (B or 1, n, P) each
        original, scaled = (at[..., None] * x.to(at.dtype) for x in (theta, theta / s.new_tensor(self.pair_factors)))
        if self.config.start_tokens:
            scaled = torch.where(at[..., None] < self.config.start_tokens, original, scaled)
        if not self.length_dependent:
            return scaled
        return torch.where(current_length(pos)[:, None] > self.original_length, scaled, original)

    def amplitude(self, at: Tensor, pos: Positions, key: bool) -> Tensor | None:
        """Return m, by which rotated pairs are multiplied, as (1, 1, 1); None if it is 1.

        m is the same for queries and keys at all positions ``at``, so only the dtype and the device of ``at`` are read.
        """
        m = attention_factor(self.config.attention, self.config.factor, self.original_length)
        return None if m == 1 else at.new_full((1, 1, 1), m)


def seed_factors(name: str, scale: float, like: Rotary) -> tuple[float, ...]:
    """Return the factors λ by which ``pi``, ``ntk`` or ``yarn`` divides the frequencies of RoPE.

    ``rope`` implements these scalings, so λ is the ratio of its frequencies without and with the scaling.

    Args:
        name: one of ``SEED_SCALINGS``.
        scale: κ, target length / original length.
        like: a LongRope, or a Rope without scaling, with base, widths and original length.

    Returns:
        One factor per pair, each >= 1, in ascending order.
    """
    rotation = {"base": like.config.base, "rotary_fraction": like.config.rotary_fraction}
    scaling: dict[str, Any] = {"scaling": SEED_SCALINGS[name], "factor": scale}
    if name == "yarn":
        scaling["original_length"] = like.config.original_length or like.length or 0
    scaled = Rope(Rope.Config(**scaling, **rotation), like.heads, like.width, like.length)
    plain = Rope(Rope.Config(**rotation), like.heads, like.width)
    # inv_freq wants the current length, but only scalings with factor=auto and dynamic_ntk read its value
    any_length = torch.ones(1, dtype=torch.float64, device="cpu")
    factors = plain.inv_freq(any_length) / scaled.inv_freq(any_length)  # (P,)
    # Mathematically the factors do not decrease and are at least 1. The division rounds, so that a factor may be below
    # 1, or below the factor before it, by the last digit.
    return tuple(max(1.0, x) for x in torch.cummax(factors, 0).values.tolist())


def attention_factor(kind: str, scale: float, original_length: int) -> float:
    """Return m, the factor of rotated queries and keys.

    Args:
        kind: option ``attention``: sqrt, yarn or none.
        scale: κ, target length / original length.
        original_length: L in tokens, at least 2 for sqrt.

    Returns:
        m; 1 if κ <= 1.
    """
    if kind == "none" or scale <= 1:
        return 1.0
    return math.sqrt(1 + math.log(scale) / math.log(original_length)) if kind == "sqrt" else 0.1 * math.log(scale) + 1


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
