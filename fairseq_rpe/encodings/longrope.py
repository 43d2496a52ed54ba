"""LongRoPE: rotary whose every pair has a factor of its own, found by a search."""

import itertools
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from fairseq_rpe.core.bias import Positions
from fairseq_rpe.core.errors import UserError
from fairseq_rpe.core.spec import option
from fairseq_rpe.encodings.base import Rotary, register
from fairseq_rpe.encodings.rope import Rope, length_of

SEEDS = {"pi": "linear", "ntk": "ntk", "yarn": "yarn"}  # a method that has a formula: what rope calls its scaling


@register("longrope")
class LongRope(Rotary):
    """Rotary whose pair s turns by p·θ_s/λ_s, from position n̂ on; factors λ_s >= 1, the same for all heads and layers.

    d is the rotated width, L the original length, κ = target length / L, T the row's length (its largest position + 1).
    Factors never shrink from one pair to the next: lower frequencies are stretched more. ``fairseq-rpe
    longrope-search`` looks for them. The first n̂ positions, the start tokens, keep their own angle p·θ_s; between one
    of them and a later token the turn is no function of the distance.

    Queries and keys are multiplied by m = sqrt(1 + ln κ/ln L), or 0.1·ln κ + 1, as public code does: the turned part of
    the head, whatever T is. Also as there, a row of at most L tokens keeps its angles (``short=plain``); which it is
    follows from the present T, so that while a text grows past L every cached key is turned anew, though deeper layers
    still see states that were made when it was shorter. Beyond κ·L tokens angles grow with the same factors.
    """

    @dataclass(frozen=True)
    class Config:
        factors: str = option(
            "1", "λ: one for all pairs, or one for each, e.g. 1+1.5+3+4; or those that pi, ntk or yarn have for κ"
        )
        factor: float = option(1.0, "κ = target / original length: of m, and of pi, ntk and yarn", minimum=1)
        start_tokens: int = option(0, "n̂: positions below it keep their own angle", minimum=0)
        attention: str = option(
            "sqrt",
            "m, by which q and k are multiplied: sqrt(1 + ln κ/ln L), yarn 0.1·ln κ + 1, or none",
            choices=("sqrt", "yarn", "none"),
        )
        short: str = option(
            "plain",
            "rows of at most L tokens: rotary as it was, or scaled like longer ones",
            choices=("plain", "scaled"),
        )
        original_length: int = option(0, "L, tokens of the original training; 0: the training length", minimum=0)
        base: float = option(10000.0, "b in θ_s = b^(-2s/d)", above=1)
        rotary_fraction: float = option(1.0, "part of a head that turns, from its first element", above=0, maximum=1)
        interleaved: bool = option(False, "turn pairs (2s, 2s+1) instead of (s, s + d/2)")

        def __post_init__(self) -> None:
            if self.factors not in SEEDS:
                object.__setattr__(self, "factors", "+".join(map(_shown, _numbers(self.factors))))

    formula = "(R_i q)·(R_j k),  R_p turns pair s by p·θ_s/λ_s where p >= n̂, else by p·θ_s"
    paper = "Ding et al. 2024 (arXiv 2402.13753)"

    @classmethod
    def rotation_options(cls, config: Any) -> Mapping[str, str]:
        return {**super().rotation_options(config), "original_length": "original_length"}

    @classmethod
    def rotation_scaling(cls, config: Any) -> str:
        return "longrope" if config.factors != "1" or config.factor != 1 else ""

    def setup(self) -> None:
        cfg = self.config
        self.interleaved, self.rotary_fraction = cfg.interleaved, cfg.rotary_fraction
        super().setup()
        self.original = cfg.original_length or self.length or 0
        if cfg.factors in SEEDS:
            if cfg.factor == 1:
                raise UserError(f"'longrope:factors={cfg.factors}' needs factor=NUMBER, target / original length")
            if cfg.factors == "yarn":
                self._need_length()
            self.factors = seed_factors(cfg.factors, cfg.factor, self)
        else:
            numbers, pairs = _numbers(cfg.factors), self.rotated // 2
            if len(numbers) not in (1, pairs):
                raise UserError(
                    f"'longrope:factors' has {len(numbers)} numbers where {pairs} pairs turn: give {pairs}, or one"
                )
            self.factors = numbers if len(numbers) == pairs else numbers * pairs
        changes = self.factors[-1] != 1
        unread = {
            "factor": cfg.factor != 1 and cfg.factors not in SEEDS and cfg.attention == "none",
            "start_tokens": cfg.start_tokens and not changes,
            "short": cfg.short != "plain" and not changes,
            "attention": cfg.attention != type(cfg)().attention and cfg.factor == 1,
        }
        if wrong := [name for name, is_so in unread.items() if is_so]:
            raise UserError(f"'longrope' with these options does not read {wrong[0]}: leave it out")
        if (changes and cfg.short == "plain") or (cfg.factor > 1 and cfg.attention == "sqrt"):
            self._need_length()
        self.length_dependent = changes and cfg.short == "plain"
        self.fixed_rotation = not self.length_dependent

    def _need_length(self) -> None:
        if self.original < 2:
            raise UserError("'longrope' needs the original length, at least 2 tokens: give original_length=N")

    def angles(self, at: Tensor, pos: Positions) -> Tensor:
        s = torch.arange(self.rotated // 2, device=at.device, dtype=torch.float64)
        theta = self.config.base ** (-2 * s / self.rotated)
        own, slower = (at[..., None] * x.to(at.dtype) for x in (theta, theta / s.new_tensor(self.factors)))
        if self.config.start_tokens:
            slower = torch.where(at[..., None] < self.config.start_tokens, own, slower)
        return torch.where(length_of(pos)[:, None] > self.original, slower, own) if self.length_dependent else slower

    def amplitude(self, at: Tensor, pos: Positions, key: bool) -> Tensor | None:
        m = attention_factor(self.config.attention, self.config.factor, self.original)
        return None if m == 1 else at.new_full((1, 1, 1), m)


def seed_factors(name: str, factor: float, like: Rotary) -> tuple[float, ...]:
    """λ of ``pi``, ``ntk`` or ``yarn`` for κ = ``factor``: what each divides the frequencies of an encoding by.

    ``like`` has base, widths and original length: a LongRope, or a Rope without scaling.
    """
    base, fraction = like.config.base, like.config.rotary_fraction
    given = {"base": base, "rotary_fraction": fraction}
    one = torch.ones(1, dtype=torch.float64)
    if name == "yarn":
        given["original_length"] = like.config.original_length or like.length or 0
    scaled = Rope(Rope.Config(scaling=SEEDS[name], factor=factor, **given), like.heads, like.width, like.length)
    plain = Rope(Rope.Config(base=base, rotary_fraction=fraction), like.heads, like.width)
    found = plain.frequencies(one) / scaled.frequencies(one)
    return tuple(max(1.0, x) for x in torch.cummax(found, 0).values.tolist())  # but for rounding they are that already


def attention_factor(kind: str, factor: float, original: int) -> float:
    """m of κ = ``factor`` and L = ``original``; 1 up to κ = 1."""
    if kind == "none" or factor <= 1:
        return 1.0
    return math.sqrt(1 + math.log(factor) / math.log(original)) if kind == "sqrt" else 0.1 * math.log(factor) + 1


def _shown(x: float) -> str:
    return f"{x:.12f}".rstrip("0").rstrip(".")  # never with an exponent, whose plus sign would part it in two


def _numbers(text: str) -> tuple[float, ...]:
    """Factors as a spec has them. Raises UserError: they are none, below 1, or one is less than the one before."""
    try:
        found = tuple(map(float, text.split("+")))
    except ValueError:
        found = ()
    if not found or not all(math.isfinite(x) for x in found):
        names = ", ".join(SEEDS)
        raise UserError(
            f"option 'factors' of 'longrope' wants numbers as in 1+1.5+3+4, or one of {names}, not '{text}'"
        )
    if min(found) < 1:
        raise UserError(f"option 'factors' of 'longrope' must be at least 1, not {min(found):g}")
    for before, after in itertools.pairwise(found):
        if after < before:
            raise UserError(f"option 'factors' of 'longrope' must never shrink: {before:g} is followed by {after:g}")
    return found
