"""Training-free context extension for RoPE: relative positions are remapped to distances seen in training.

These encodings replace the ``rope`` of a trained model, with the same base, rotary_fraction and interleaved. In the
formulas i is a query's position, j a key's, d = i - j >= 0, L the training length in tokens, and ρ(i, j) the relative
position of a pair: q_i and k_j are rotated at positions that differ by ρ. Scores are q·k / sqrt(D) under one softmax.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass, fields
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor

from fairseq_rpe.core.errors import UserError
from fairseq_rpe.core.layer_pattern import parse_pattern
from fairseq_rpe.core.positions import Positions
from fairseq_rpe.core.rotation_regions import RotationRegion
from fairseq_rpe.core.spec import format_value, option
from fairseq_rpe.encodings.base import CosSin, Rotary, register, registry
from fairseq_rpe.encodings.query_scale import logn_factor
from fairseq_rpe.encodings.rope import Rope

_MAX_STRING_WINDOW = 512  # tokens, the largest W that the paper of STRING recommends


class RegionRope(Rotary):
    """Base class of RoPE with other rotary positions in each region of pairs. Implement ``rotation_regions``.

    A KV cache holds keys before the rotation, and they are rotated on every read. Positions are whole and count real
    tokens.

    Attributes:
        name: registered name, for messages.
        needs_original_length: whether an option is 0 and its value is derived from L, or queries are scaled by ln L.
        original_length: L, or 0 if unknown.
    """

    @dataclass(frozen=True)
    class Config:
        """Options of all encodings that rotate by regions."""

        base: float = option(10000.0, "b in θ_s = b^(-2s/d), as the model was trained", above=1)
        rotary_fraction: float = option(1.0, "fraction of a head that is rotated, as trained", above=0, maximum=1)
        interleaved: bool = option(False, "rotate pairs (2s, 2s+1) instead of (s, s + d/2), as trained")
        original_length: int = option(0, "L, tokens of the training; 0: the training length", minimum=0)

    family = "RoPE on longer texts, without training"
    position_type = "whole"
    name: ClassVar[str] = ""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        if self.config.original_length and not self.needs_original_length:
            raise UserError(f"'{self.name}' with these options does not read original_length: leave it out")

    def setup(self) -> None:
        """Set the original length L and the cache of rotations."""
        super().setup()
        self.needs_original_length = False  # until `resolve_length` finds an option that is 0
        self.original_length = self.config.original_length or self.length or 0
        # cos and sin of all regions of the positions `_cached_pos`, by id of the tensor `at`; the tensor is stored as
        # well, so that no other tensor gets its id
        self._region_cache: dict[int, tuple[Tensor, CosSin]] = {}
        self._cached_pos: Positions | None = None

    def resolve_length(self, key: str, from_original: Callable[[int], int] = int) -> int:
        """Return the length in tokens that an option sets, or that follows from L if the option is 0.

        Args:
            key: name of the option.
            from_original: function of L that gives the length; a result below 1 becomes 1.

        Raises:
            UserError: the option is 0 and L is unknown.
        """
        value = int(getattr(self.config, key))
        self.needs_original_length |= not value
        if not value and not self.original_length:
            raise UserError(f"'{self.name}' takes {key} from the original length: give {key}=N or original_length=N")
        return value or max(1, from_original(self.original_length))

    def rotation_regions(self, pos: Positions) -> tuple[RotationRegion, ...]:
        """Return the regions of pairs, each with its rotary positions; subclasses implement this."""
        raise NotImplementedError

    def angles(self, at: Tensor, pos: Positions) -> Tensor:
        """Return the angles (B or 1, n, P), in radians, of the positions ``at`` (B or 1, n)."""
        s = torch.arange(self.rotated // 2, device=at.device, dtype=torch.float64)
        return at[..., None] * (self.config.base ** (-2 * s / self.rotated)).to(at.dtype)

    def _cos_sin(self, at: Tensor, pos: Positions, key: bool) -> CosSin:
        """Return what ``Rotary._cos_sin`` returns, cached for each region.

        ``Rotary`` caches one result for queries and one for keys, and regions have several of both.
        """
        if self._cached_pos is not pos:
            self._region_cache, self._cached_pos = {}, pos
        if id(at) not in self._region_cache:
            self._region_cache[id(at)] = at, super()._cos_sin(at, pos, key)
            self._cos_sin_cache, self._angle_cache = {}, None  # frees what the cache of regions does not need
        _, cos_sin = self._region_cache[id(at)]
        return cos_sin


class LogNRegionRope(RegionRope):
    """Base class with an option that scales queries by max(1, ln(i + 1) / ln L) (Su 2023)."""

    @dataclass(frozen=True)
    class Config(RegionRope.Config):
        """Options of encodings with the scaling by ln i."""

        logn: bool = option(False, "scale queries by max(1, ln(i + 1) / ln L), as Su's code does")

    def setup(self) -> None:
        """Check that the original length is known if ``logn`` is set."""
        super().setup()
        self.needs_original_length |= self.config.logn
        if self.config.logn and self.original_length < 2:
            raise UserError(f"'{self.name}' takes logn from the original length: give original_length=N, at least 2")

    def rotate(self, x: Tensor, at: Tensor, pos: Positions, key: bool = False) -> Tensor:
        """Rotate x (B, H, n, D), and scale queries with ``logn``; same shape."""
        rotated = super().rotate(x, at, pos, key)
        if key or not self.config.logn:
            return rotated
        factor = logn_factor(pos.q.double(), self.original_length)  # (B or 1, n), of the true positions
        wide = torch.promote_types(x.dtype, torch.float32)
        return (rotated.to(wide) * factor[:, None, :, None].to(wide)).to(x.dtype)


def near_region(pos: Positions, window: int) -> RotationRegion:
    """Return the region of pairs with d < ``window``, rotated at their own positions."""
    return RotationRegion(
        pos.q, pos.k, covers=lambda i, j: i - j < window, key_range=lambda first, last: (first - window, last)
    )


def far_region(q: Tensor, k: Tensor, window: int) -> RotationRegion:
    """Return the region of pairs with d >= ``window``, rotated at positions ``q`` and ``k``."""
    return RotationRegion(
        q, k, covers=lambda i, j: i - j >= window, key_range=lambda first, last: (first * 0, last - window)
    )


def shared_position(position: float, like: Tensor) -> Tensor:
    """Return a position (1, 1) that all tokens share, with the dtype and device of ``like``."""
    return like.new_full((1, 1), position)


@register("self_extend", colour="black", marker="^")
class SelfExtend(LogNRegionRope):
    """Self-Extend (Jin et al. 2024, arXiv 2401.01325): far keys are grouped, G tokens sharing a position.

    ρ = d if d < w, else ⌊i/G⌋ - ⌊j/G⌋ + w - w/G. The largest ρ reaches L at (L - w)·G + w tokens. G must divide w:
    otherwise ρ would jump at w, and public code takes w/G as a fraction in one place and rounds it in another. Public
    code has w = 1024 for L = 4096, which is the default ratio here, rounded to groups.
    """

    @dataclass(frozen=True)
    class Config(LogNRegionRope.Config):
        """Options of ``self_extend``."""

        group: int = option(8, "G, far tokens that share a position", minimum=1)
        window: int = option(0, "w, nearest keys that are not grouped, a multiple of G; 0: about L/4", minimum=0)

    formula = "RoPE at ρ = d where d < w, else floor(i/G) - floor(j/G) + w - w/G"
    paper = "Jin et al. 2024 (arXiv 2401.01325)"
    name = "self_extend"

    def setup(self) -> None:
        """Set the window in tokens, a multiple of ``group``."""
        super().setup()
        group = self.config.group
        self.window = self.resolve_length("window", lambda length: max(1, length // 4 // group) * group)
        if self.original_length and group > self.original_length:
            raise UserError(
                f"'self_extend': group={group} is more than the {self.original_length} tokens of the training"
            )
        if self.window % group:
            raise UserError(f"'self_extend': group={group} does not divide window={self.window}: change one of them")

    def rotation_regions(self, pos: Positions) -> tuple[RotationRegion, ...]:
        """Return the regions of pairs, each with its rotary positions."""
        group, window = self.config.group, self.window
        q, k = (_floor_div(x, group) for x in (pos.q, pos.k))
        return near_region(pos, window), far_region(q + (window - window // group), k, window)


@register("rerope", colour="pink", marker="<")
class ReRope(LogNRegionRope):
    """ReRoPE (Su 2023): distances are clipped at w, ρ = min(d, w), so the length of the input is not limited.

    For d >= w queries are rotated at position w and keys at 0. Public code has w = 512 for L = 4096, which is the
    default ratio here. It also scales queries as ``logn=true`` does; that is off by default, because most models were
    trained without it.
    """

    @dataclass(frozen=True)
    class Config(LogNRegionRope.Config):
        """Options of ``rerope``."""

        window: int = option(0, "w, the largest distance; 0: L/8", minimum=0)

    formula = "RoPE at ρ = min(d, w)"
    paper = "Su 2023 (kexue.fm/archives/9708)"
    name = "rerope"

    def setup(self) -> None:
        """Set the window in tokens."""
        super().setup()
        self.window = self.resolve_length("window", lambda length: length // 8)

    def rotation_regions(self, pos: Positions) -> tuple[RotationRegion, ...]:
        """Return the regions of pairs, each with its rotary positions."""
        return near_region(pos, self.window), far_region(
            shared_position(self.window, pos.q), shared_position(0, pos.k), self.window
        )


@register("leaky_rerope", colour="orange", marker="P")
class LeakyReRope(ReRope):
    """Leaky ReRoPE (Su 2023): beyond w, k tokens count as one, ρ = w + (d - w)/k.

    The largest ρ reaches L at w + k·(L - w) tokens. Defaults are those of ``rerope``, and k = 16 as in public code.
    """

    @dataclass(frozen=True)
    class Config(ReRope.Config):
        """Options of ``leaky_rerope``."""

        k: float = option(16.0, "k, tokens beyond w that count as one", minimum=1)

    formula = "RoPE at ρ = d where d < w, else w + (d - w)/k"
    name = "leaky_rerope"

    def rotation_regions(self, pos: Positions) -> tuple[RotationRegion, ...]:
        """Return the regions of pairs, each with its rotary positions."""
        window, k = self.window, self.config.k
        return near_region(pos, window), far_region((pos.q + window * (k - 1)) / k, pos.k / k, window)


@register("dual_chunk", colour="green", marker="v")
class DualChunk(RegionRope):
    """Dual chunk attention (An et al. 2024, arXiv 2402.17463): keys are rotated at j mod S, S the chunk size.

    ρ = p - j mod S with p = i mod S for keys in the query's chunk of S tokens, p = min(i mod S + S, M) for keys of the
    previous chunk, and p = M for older chunks, M = ``max_position``. ρ = d holds for at least the M + 1 - S keys
    nearest to a query; an older chunk may have smaller ρ than a newer one. The paper has M = L - 1, the default. Its
    code has S = 11/16·L and M = 12/16·L.
    """

    @dataclass(frozen=True)
    class Config(RegionRope.Config):
        """Options of ``dual_chunk``."""

        chunk: int = option(0, "S, tokens per chunk; 0: 3/4 of L", minimum=0)
        max_position: int = option(0, "M, largest position of a query, at least S; 0: L - 1", minimum=0)

    formula = "RoPE at ρ = p - j mod S, p = i mod S, min(i mod S + S, M) or M by chunks between"
    paper = "An et al. 2024 (arXiv 2402.17463)"
    name = "dual_chunk"

    def setup(self) -> None:
        """Set the length of a chunk and the largest rotary position, in tokens."""
        super().setup()
        self.chunk = self.resolve_length("chunk", lambda length: 3 * length // 4)
        self.max_position = self.resolve_length("max_position", lambda length: length - 1)
        if self.max_position < self.chunk:
            raise UserError(
                f"'dual_chunk': max_position={self.max_position} is less than chunk={self.chunk}: raise max_position "
                "or lower chunk"
            )

    def rotation_regions(self, pos: Positions) -> tuple[RotationRegion, ...]:
        """Return the regions of pairs, each with its rotary positions."""
        size, max_position = self.chunk, self.max_position
        q, k = (torch.remainder(x, size) for x in (pos.q, pos.k))  # positions within their chunks
        return (
            _chunk_region(q, k, size, back=0),
            _chunk_region((q + size).clamp_max(max_position), k, size, back=1),
            _older_chunks_region(shared_position(max_position, pos.q), k, size),
        )


@register("string", colour="vermilion", marker="P")
class String(RegionRope):
    """STRING (An et al. 2024, arXiv 2410.18745): far keys are moved nearer, so that large distances are not used.

    ρ = d if d < S, else d - S + W. Models are trained on few pairs at distances near L; the largest ρ in a text of n
    tokens is n - 1 - S + W. The method is meant for texts of up to L tokens; in texts of up to L + S - W tokens all ρ
    are below L. The paper recommends S between L/4 and 2L/5, and W of 128, 256 or 512 for L = 131072.

    The authors' code multiplies rotated queries and keys by 0.1·ln 2 + 1 (``temperature=code``), which is not in the
    formula. It also counts the key at d = S twice in a forward pass of a whole text; here each key counts once.
    """

    @dataclass(frozen=True)
    class Config(RegionRope.Config):
        """Options of ``string``."""

        shift: int = option(0, "S, distance from which keys are moved nearer, below L; 0: L/3", minimum=0)
        window: int = option(0, "W, the ρ of distance S, at most S; 0: L/32, at most 512", minimum=0)
        temperature: float | Literal["code"] = option(
            1.0, "factor of the rotated part of queries and keys; code: 0.1·ln 2 + 1, as in the authors' code", above=0
        )

    formula = "RoPE at ρ = d where d < S, else d - S + W"
    paper = "An et al. 2024 (arXiv 2410.18745)"
    name = "string"

    def setup(self) -> None:
        """Compute the shift S and the window W of the formula, in tokens."""
        super().setup()
        self.shift = self.resolve_length("shift", lambda length: length // 3)
        self.window = self.resolve_length("window", lambda length: min(length // 32, _MAX_STRING_WINDOW))
        if self.window > self.shift:
            raise UserError(
                f"'string': window={self.window} is more than shift={self.shift}: lower window or raise shift"
            )
        if self.original_length and self.shift >= self.original_length:
            raise UserError(
                f"'string': shift={self.shift} must be below the {self.original_length} tokens of the training"
            )

    def amplitude(self, at: Tensor, pos: Positions, key: bool) -> Tensor | None:
        """Return the temperature of rotated pairs as (1, 1, 1), or None for 1."""
        temperature = self.config.temperature
        factor = 0.1 * math.log(2) + 1 if temperature == "code" else temperature
        return None if factor == 1 else at.new_full((1, 1, 1), factor)

    def rotation_regions(self, pos: Positions) -> tuple[RotationRegion, ...]:
        """Return the regions of pairs, each with its rotary positions."""
        return near_region(pos, self.shift), far_region(pos.q - (self.shift - self.window), pos.k, self.shift)


def _floor_div(x: Tensor, divisor: int) -> Tensor:
    return torch.div(x, divisor, rounding_mode="floor")


def _chunk_region(q: Tensor, k: Tensor, size: int, back: int) -> RotationRegion:
    """Return the region of keys in the chunk that is ``back`` chunks of ``size`` tokens before the query's."""
    return RotationRegion(
        q,
        k,
        covers=lambda i, j: _floor_div(i, size) - _floor_div(j, size) == back,
        key_range=lambda first, last: (
            (_floor_div(first, size) - back) * size,
            (_floor_div(last, size) - back + 1) * size - 1,
        ),
    )


def _older_chunks_region(q: Tensor, k: Tensor, size: int) -> RotationRegion:
    """Return the region of keys at least two chunks of ``size`` tokens before the query's."""
    return RotationRegion(
        q,
        k,
        covers=lambda i, j: _floor_div(i, size) - _floor_div(j, size) >= 2,
        key_range=lambda first, last: (first * 0, (_floor_div(last, size) - 1) * size - 1),
    )


ROTATION_OPTIONS = ("base", "rotary_fraction", "interleaved")


def is_region_rope(spec: str) -> bool:
    """Return whether ``spec``, or a part of a pattern of layers, names a subclass of :class:`RegionRope`."""
    return any(_is_region_rope(layer_spec) for layer_spec in parse_pattern(spec).specs)


def _is_region_rope(spec: str) -> bool:
    return issubclass(registry.resolve(spec)[0], RegionRope)


def check_trained_rotation(spec: str, trained: str) -> None:
    """Refuse a spec for a model that was trained with another rotation; its results would be meaningless.

    Args:
        spec: spec of the encoding to evaluate with, or a pattern of layers; only a :class:`RegionRope` is checked.
        trained: spec of the encoding that the model was trained with, or a pattern of layers.

    Raises:
        UserError: a layer was trained neither with rope nor with a :class:`RegionRope`, has another base,
            rotary_fraction or interleaved, or scales its frequencies.
    """
    for layer_spec, trained_spec in parse_pattern(spec).pairs(parse_pattern(trained)):
        if _is_region_rope(layer_spec):
            _check_trained_rotation(layer_spec, trained_spec)


def _check_trained_rotation(spec: str, trained: str) -> None:
    """Run :func:`check_trained_rotation` for the :class:`RegionRope` of one layer."""
    config, (trained_cls, _, trained_config) = registry.resolve(spec)[2], registry.resolve(trained)
    if trained_cls is not Rope and not issubclass(trained_cls, RegionRope):
        raise UserError(
            f"'{spec}' reads models that were trained with rope, and this one was with '{trained}': leave it out"
        )
    for key in ROTATION_OPTIONS:
        value, trained_value = getattr(config, key), getattr(trained_config, key)
        if value != trained_value:
            raise UserError(
                f"'{spec}' has {key}={format_value(value)}, the model was trained with '{trained}': give "
                f"{key}={format_value(trained_value)}"
            )
    others = [f.name for f in fields(trained_cls.Config) if f.name not in (*ROTATION_OPTIONS, "original_length")]
    if trained_cls is Rope and any(getattr(trained_config, key) != getattr(Rope.Config(), key) for key in others):
        raise UserError(f"'{spec}' needs plain rope, and the model was trained with '{trained}': evaluate it unchanged")
