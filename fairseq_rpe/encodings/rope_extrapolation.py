"""Reading longer than trained, without training: rotary whose pairs are turned as if they were nearer than they are.

Each takes a model that was trained with ``rope``, of the same base, rotary_fraction and interleaved. i is a query's
position, j a key's, d = i - j >= 0, L the length in tokens that the model was trained on, and ρ(i, j) the distance that
a pair is scored at: q_i and k_j are turned for positions that differ by ρ. Scores stay q·k / sqrt(D) under one softmax.
Of models with ALiBi, which some of these papers treat too, they know nothing: rope only.
"""

from collections.abc import Callable
from dataclasses import dataclass, fields
from typing import Any, ClassVar

import torch
from torch import Tensor

from fairseq_rpe.core.bias import Positions
from fairseq_rpe.core.errors import UserError
from fairseq_rpe.core.rotation_regions import RotationRegion
from fairseq_rpe.core.spec import option, show
from fairseq_rpe.encodings.base import Rotary, register, registry
from fairseq_rpe.encodings.rope import Rope, sharpened

Turned = tuple[Tensor, Tensor, Tensor | None]


class Longer(Rotary):
    """Base of those that turn pairs by regions. Fill ``regions``; ``setup`` says what the options that are 0 stand for.

    Cached keys are kept as they came and turned on every read. Positions are whole and count real tokens.
    """

    @dataclass(frozen=True)
    class Config:
        base: float = option(10000.0, "b in θ_s = b^(-2s/d), as the model was trained", above=1)
        rotary_fraction: float = option(1.0, "part of a head that turns, as trained", above=0, maximum=1)
        interleaved: bool = option(False, "turn pairs (2s, 2s+1) instead of (s, s + d/2), as trained")
        original_length: int = option(0, "L, tokens of the training; 0: the training length", minimum=0)

    position_type = "whole"
    name: ClassVar[str] = ""

    def __init__(self, *given: Any, **named: Any) -> None:
        super().__init__(*given, **named)
        if self.config.original_length and not self.reads_original:
            raise UserError(f"'{self.name}' with these options does not read original_length: leave it out")

    def setup(self) -> None:
        self.reads_original = False
        cfg = self.config
        self.interleaved, self.rotary_fraction = cfg.interleaved, cfg.rotary_fraction
        super().setup()
        self.original = cfg.original_length or self.length or 0
        self._turns: dict[int, tuple[Tensor, Turned]] = {}
        self._pos: Positions | None = None

    def of_length(self, key: str, of: Callable[[int], int] = int) -> int:
        """The option ``key`` or, where that is 0, what ``of`` makes of L, at least 1."""
        given = int(getattr(self.config, key))
        self.reads_original |= not given
        if not given and not self.original:
            raise UserError(f"'{self.name}' takes {key} from the original length: give {key}=N or original_length=N")
        return given or max(1, of(self.original))

    def rotation_regions(self, pos: Positions) -> tuple[RotationRegion, ...]:
        raise NotImplementedError

    def angles(self, at: Tensor, pos: Positions) -> Tensor:
        s = torch.arange(self.rotated // 2, device=at.device, dtype=torch.float64)
        return at[..., None] * (self.config.base ** (-2 * s / self.rotated)).to(at.dtype)

    def _turn(self, at: Tensor, pos: Positions, key: bool) -> Turned:
        """As Rotary's, which keeps one for queries and one for keys; here there is one for each region."""
        if self._pos is not pos:
            self._turns, self._pos = {}, pos
        if id(at) not in self._turns:
            self._turns[id(at)] = at, super()._turn(at, pos, key)
            self._kept, self._angles = {}, None
        return self._turns[id(at)][1]


class Scaled(Longer):
    """With the temperature of Su 2023: queries times max(1, ln(i + 1) / ln L)."""

    @dataclass(frozen=True)
    class Config(Longer.Config):
        logn: bool = option(False, "scale queries by max(1, ln(i + 1) / ln L), as Su's code does")

    def setup(self) -> None:
        super().setup()
        self.reads_original |= self.config.logn
        if self.config.logn and self.original < 2:
            raise UserError(f"'{self.name}' takes logn from the original length: give original_length=N, at least 2")

    def rotate(self, x: Tensor, at: Tensor, pos: Positions, key: bool = False) -> Tensor:
        turned = super().rotate(x, at, pos, key)
        if key or not self.config.logn:
            return turned
        factor = sharpened(pos.q.double(), self.original)
        wide = torch.promote_types(x.dtype, torch.float32)
        return (turned.to(wide) * factor[:, None, :, None].to(wide)).to(x.dtype)


def near(pos: Positions, window: int) -> RotationRegion:
    """Pairs of d < ``window``, at their own positions."""
    return RotationRegion(pos.q, pos.k, lambda i, j: i - j < window, lambda first, last: (first - window, last))


def far(q: Tensor, k: Tensor, window: int) -> RotationRegion:
    """Pairs of d >= ``window``, turned for ``q`` and ``k``."""
    return RotationRegion(q, k, lambda i, j: i - j >= window, lambda first, last: (first * 0, last - window))


def at(position: float, like: Tensor) -> Tensor:
    """(1, 1): a position that all tokens share."""
    return like.new_full((1, 1), position)


@register("self_extend")
class SelfExtend(Scaled):
    """Self-Extend: near keys at their distance, far ones in groups of G that share a position.

    ρ = d where d < w, else ⌊i/G⌋ - ⌊j/G⌋ + w - w/G. It is usable up to (L - w)·G + w tokens. G divides w: otherwise
    the distances would jump at w, and public code takes w/G as a fraction in one place and rounds it in another.
    Public code has w = 1024 for L = 4096, which is the default here, rounded to groups.
    """

    @dataclass(frozen=True)
    class Config(Scaled.Config):
        group: int = option(8, "G, far tokens that share a position", minimum=1)
        window: int = option(0, "w, keys at their own distance, a multiple of G; 0: about L/4", minimum=0)

    formula = "RoPE at ρ = d where d < w, else floor(i/G) - floor(j/G) + w - w/G"
    paper = "Jin et al. 2024 (arXiv 2401.01325)"
    name = "self_extend"

    def setup(self) -> None:
        super().setup()
        group = self.config.group
        self.window = self.of_length("window", lambda length: max(1, length // 4 // group) * group)
        if self.original and group > self.original:
            raise UserError(f"'self_extend': group={group} is more than the {self.original} tokens of the training")
        if self.window % group:
            raise UserError(f"'self_extend': group={group} does not divide window={self.window}: change one of them")

    def rotation_regions(self, pos: Positions) -> tuple[RotationRegion, ...]:
        group, window = self.config.group, self.window
        q, k = (torch.div(x, group, rounding_mode="floor") for x in (pos.q, pos.k))
        return near(pos, window), far(q + (window - window // group), k, window)


@register("rerope")
class ReRope(Scaled):
    """ReRoPE: distances are cut at w, ρ = min(d, w); there is no longest input.

    Far queries are all turned for w and far keys not at all. Public code has w = 512 for L = 4096, which is the default
    here, and the factor of ``logn``, which is not: a model was mostly trained without it.
    """

    @dataclass(frozen=True)
    class Config(Scaled.Config):
        window: int = option(0, "w, the largest distance; 0: L/8", minimum=0)

    formula = "RoPE at ρ = min(d, w)"
    paper = "Su 2023 (kexue.fm/archives/9708)"
    name = "rerope"

    def setup(self) -> None:
        super().setup()
        self.window = self.of_length("window", lambda length: length // 8)

    def rotation_regions(self, pos: Positions) -> tuple[RotationRegion, ...]:
        return near(pos, self.window), far(at(self.window, pos.q), at(0, pos.k), self.window)


@register("leaky_rerope")
class LeakyReRope(ReRope):
    """Leaky ReRoPE: beyond w a step counts as 1/k of one, ρ = w + (d - w)/k.

    The largest ρ reaches L at w + k·(L - w) tokens. Defaults as in ``rerope``, and k = 16 as in public code.
    """

    @dataclass(frozen=True)
    class Config(ReRope.Config):
        leak: float = option(16.0, "k, tokens beyond w that count as one", minimum=1)

    formula = "RoPE at ρ = d where d < w, else w + (d - w)/k"
    name = "leaky_rerope"

    def rotation_regions(self, pos: Positions) -> tuple[RotationRegion, ...]:
        window, leak = self.window, self.config.leak
        return near(pos, window), far((pos.q + window * (leak - 1)) / leak, pos.k / leak, window)


@register("dual_chunk")
class DualChunk(Longer):
    """Dual chunk attention: keys at j mod S; a query at one of three positions, by how many chunks lie between.

    ρ = p - j mod S with p = i mod S in a query's own chunk of S tokens, p = min(i mod S + S, cap) for keys of the chunk
    before, and p = cap for all older ones. ρ = d for the cap + 1 - S keys nearest to a query at the least, and an older
    chunk may look nearer than a newer one. The paper's cap is c - 1 for models trained on c = L tokens. Its code has
    S = 11/16·L and cap = 12/16·L.
    """

    @dataclass(frozen=True)
    class Config(Longer.Config):
        chunk: int = option(0, "S, tokens of a chunk; 0: 3/4 of L", minimum=0)
        cap: int = option(0, "largest position of a query, at least S; 0: L - 1", minimum=0)

    formula = "RoPE at ρ = p - j mod S, p = i mod S, min(i mod S + S, cap) or cap by chunks between"
    paper = "An et al. 2024 (arXiv 2402.17463)"
    name = "dual_chunk"

    def setup(self) -> None:
        super().setup()
        self.chunk = self.of_length("chunk", lambda length: 3 * length // 4)
        self.cap = self.of_length("cap", lambda length: length - 1)
        if self.cap < self.chunk:
            raise UserError(f"'dual_chunk': cap={self.cap} is less than chunk={self.chunk}: raise cap or lower chunk")

    def rotation_regions(self, pos: Positions) -> tuple[RotationRegion, ...]:
        size, cap = self.chunk, self.cap

        def number(x: Tensor) -> Tensor:
            return torch.div(x, size, rounding_mode="floor")

        def of(q: Tensor, back: int) -> RotationRegion:
            return RotationRegion(
                q,
                k,
                lambda i, j: number(i) - number(j) == back,
                lambda first, last: ((number(first) - back) * size, (number(last) - back + 1) * size - 1),
            )

        inside, k = (torch.remainder(x, size) for x in (pos.q, pos.k))
        older = RotationRegion(
            at(cap, pos.q),
            k,
            lambda i, j: number(i) - number(j) >= 2,
            lambda first, last: (first * 0, (number(last) - 1) * size - 1),
        )
        return of(inside, 0), of((inside + size).clamp_max(cap), 1), older


SHARED = ("base", "rotary_fraction", "interleaved")


def reads_longer(spec: str) -> bool:
    """Whether ``spec`` is of :class:`Longer`."""
    return issubclass(registry.resolve(spec)[0], Longer)


def check_trained(spec: str, trained: str) -> None:
    """Refuse to read with ``spec`` a model that was trained with another rotation, whose numbers would mean nothing.

    Raises UserError: ``trained``, a spec too, is neither rope nor one of :class:`Longer`, or has another base,
    rotary_fraction or interleaved, or changes its frequencies in any other way.
    """
    config, (own, _, was) = registry.resolve(spec)[2], registry.resolve(trained)
    if own is not Rope and not issubclass(own, Longer):
        raise UserError(
            f"'{spec}' reads models that were trained with rope, and this one was with '{trained}': leave it out"
        )
    for key in SHARED:
        given, there = getattr(config, key), getattr(was, key)
        if given != there:
            raise UserError(
                f"'{spec}' has {key}={show(given)}, the model was trained with '{trained}': give {key}={show(there)}"
            )
    rest = [f.name for f in fields(was) if f.name not in (*SHARED, "original_length")]
    if own is Rope and any(getattr(was, key) != getattr(Rope.Config(), key) for key in rest):
        raise UserError(f"'{spec}' knows plain rope, and the model was trained with '{trained}': evaluate it as it is")
