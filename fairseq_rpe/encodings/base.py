"""Base class of all encodings, and families of encodings that need only one method. ``interface`` has the hooks."""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any, ClassVar, NamedTuple, Self

import torch
from torch import Tensor

from fairseq_rpe.core.arguments import check_count
from fairseq_rpe.core.attention_options import configure_encoding
from fairseq_rpe.core.bias import Bias, PairBias, PointwiseBias, ToeplitzBias
from fairseq_rpe.core.errors import UserError, explain_memory_errors
from fairseq_rpe.core.log_bias import LogBias
from fairseq_rpe.core.positions import Positions
from fairseq_rpe.core.registry import Registry
from fairseq_rpe.core.tensors import check_embedding_input
from fairseq_rpe.core.window_bias import hide_far_keys
from fairseq_rpe.encodings.optional_attention import OptionalAttention

_WIDE = (torch.float32, torch.float64)
# families of encodings, with what their encodings do
FAMILIES = {
    "bias of the distance": "adds a function of the distance to each attention score",
    "bias of both positions": "adds a function of the positions of query and key",
    "bias that depends on the content": "adds to scores, or changes scores by, what queries, keys or tokens decide",
    "rotation of queries and keys (RoPE)": "rotates pairs of elements by an angle of the position or of the tokens",
    "RoPE on longer texts, without training": "remaps relative positions to those seen in training",
    "segments": "encodes positions within and between segments of the text",
    "vectors at the input": "adds a vector, or multiplies by a phase, before or in the layers",
    "no positions": "causal attention without an encoding",
}
_SMALL_TABLE = 1 << 16  # distances; the time to compute a table of this size is negligible


class Encoding(OptionalAttention):
    """Base class of all encodings.

    Args:
        config: an instance of ``Config``, a frozen dataclass of the options.
        heads: number of attention heads H.
        width: model width C; a head is C/H wide.
        length: training length in tokens, or None if unknown; only encodings that depend on it use it.
        symbols: symbol of each id of the dictionary, or None if unknown; available in ``setup`` only.

    Attributes:
        formula: mathematical formula of the encoding in one line, shown by ``fairseq-rpe list``.
        paper: authors, year and arXiv number of the paper in one line, shown by ``fairseq-rpe list``.
        family: key of :data:`FAMILIES`, by which the table of encodings is ordered; base classes set it.
        figure_options: options of the spec with which figures of all encodings draw it, such as ``window=64``.
        dape_base: whether ``dape`` and ``selective`` can adjust the scores of this encoding, at the default options.
        sharing_modes: possible ways to share parameters, the default first: "model", one set for all layers, or
            "layer", one set for each layer.
        max_queries_per_call: function of (positions, dtype) that returns how many queries ``rotate`` can process in
            one call; None if the number is not limited.
        position_type: "any"; "whole" if fractional positions have no meaning; "none" if positions are not used.
        length_dependent: whether the encoding depends on the length of the whole row; padding at the end is then
            excluded from the length.
        fixed_rotation: whether a rotated key depends only on the key and its own position, not on other tokens; a KV
            cache may then store rotated keys. False, the default, is always correct: keys are rotated on every read.
        needs_token_ids: whether the encoding uses the ids of the tokens, ``Positions.tokens``.
        bounded_reason: reason why scores are bounded, for encodings without an additive bias or with a
            content-dependent bias; "" if no reason is known.
        dependence: one sentence on the size of a content-dependent bias that has no bound.
        changes_base: whether a RoPE base other than the trained model's is intended, as a method of context extension;
            for other encodings it is a mistake and refused.

    Parameters stay in float32 under ``.half()`` and ``.bfloat16()``, whose mantissas cannot represent positions or
    slopes.
    """

    @dataclass(frozen=True)
    class Config:
        """No options; subclasses declare theirs with ``option``."""

    formula: ClassVar[str] = ""
    paper: ClassVar[str] = ""
    family: ClassVar[str] = ""
    figure_options: ClassVar[str] = ""
    dape_base: ClassVar[bool] = False
    sharing_modes: ClassVar[tuple[str, ...]] = ("model", "layer")
    max_queries_per_call: Callable[[Positions, torch.dtype], int] | None = None
    length_dependent: bool = False
    needs_token_ids: bool = False
    fixed_rotation: bool = False
    position_type: str = "any"
    bounded_reason: ClassVar[str] = ""
    dependence: str = ""
    changes_base: ClassVar[bool] = False

    def __init__(
        self, config: Any, heads: int, width: int, length: int | None = None, symbols: Sequence[str] | None = None
    ) -> None:
        super().__init__()
        self.config, self.heads, self.width, self.length = config, heads, width, length
        self.symbols = symbols
        self.setup()
        self.symbols = None  # released, so that a copy of the model does not copy the dictionary
        self.apply_attention_options()

    def setup(self) -> None:
        """Create the parameters. ``config``, ``heads``, ``width`` and ``length`` are set before this is called."""

    @classmethod
    def rotation_options(cls, config: Any) -> Mapping[str, str]:
        """Return the options that describe the rotation with which a model's weights were trained.

        If the encoding replaces that of a trained model, an option that the spec does not set takes the model's value.
        An encoding without such options has a fixed rotation, or does not rotate.

        Args:
            config: an instance of ``Config``.

        Returns:
            Name of each option and the quantity that it sets: ``base``, ``rotary_fraction``, ``interleaved``,
            ``resonance``, ``logn``, ``frequencies``, ``keep``, ``original_length`` or ``scaling``.
        """
        return {}

    @classmethod
    def rotation_scaling(cls, config: Any) -> str:
        """Return the name of the scaling of the rotation's frequencies, or "" if they are not scaled."""
        return ""

    @classmethod
    def allowed_sharing(cls, config: Any) -> tuple[str, ...]:
        """Return ``sharing_modes`` of an encoding with these options, before one is built.

        Args:
            config: an instance of ``Config``.
        """
        return cls.sharing_modes

    @classmethod
    def position_limit(cls, config: Any, length: int | None) -> int | None:
        """Return the length in tokens of the longest row that the encoding can process, or None for no limit.

        Args:
            config: an instance of ``Config``.
            length: training length in tokens, or None if unknown.
        """
        return None

    @property
    def is_distance_bias(self) -> bool:
        """Whether the bias is a table over distances that more tokens only extend, so that decoding may cache it."""
        return False

    @property
    def is_pure_rotation(self) -> bool:
        """Whether rotating queries and keys is all that the encoding does."""
        others = self.adds_bias, self.changes_values, self.needs_token_ids, self.is_content_dependent
        return self.rotates and not any(others)

    @property
    @torch.no_grad()
    def adds_bias(self) -> bool:
        """Whether the encoding adds a bias that depends on positions."""
        return self.position_bias(Positions.arange(2)) is not None

    @torch.no_grad()
    def bias_profile(self, n: int) -> Tensor:
        """Return the log-bias of the last of n queries as a function of the distance.

        Args:
            n: number of tokens, at positions 0 … n-1.

        Returns:
            (H, n) float64, in nats, for distances 0 … n-1.

        Raises:
            UserError: the bias depends on the tokens, or ``n`` is not a positive integer.
        """
        check_count("n", n)
        if self.is_content_dependent or self.needs_token_ids:
            raise UserError(
                f"{type(self).__name__} depends on the tokens: bias_profile needs a bias of the distance alone"
            )
        first = next(self.parameters(), None)
        with explain_memory_errors(f"a profile of {n} distances"):
            pos = Positions.arange(1, n, dtype=torch.float64, device=None if first is None else first.device)
            bias = self.attention_bias(pos)
            if bias is None:
                return pos.k.new_zeros(self.heads, n)
            return bias.materialize(pos)[0, :, 0].flip(-1)

    def log_bias_formulas(self) -> list[str] | list[LogBias] | None:
        """Return ln b_n, the log-bias at distance n, as a formula in n for each head.

        ``fairseq-rpe verdict`` decides from it whether Σ exp(bias) converges.

        Returns:
            H formulas, or None if no formula is known. A plain string is the exact log-bias.
        """
        if not self.bounded_reason or type(self).position_bias is not Encoding.position_bias:
            return None
        if self.is_content_dependent:
            return [LogBias("0", self.bounded_reason, at_least=True)] * self.heads
        return [LogBias("0", f"no additive bias: {self.bounded_reason}")] * self.heads

    def logged_scalars(self) -> dict[str, Tensor]:
        """Return learned quantities to log, by name: (H,) per head or () per encoding, in natural units."""
        return {}

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Self:
        def keep_precision(t: Tensor) -> Tensor:
            """Move t as ``fn`` does, without its change to half precision."""
            converted = fn(t)
            is_narrow = converted.is_floating_point() and converted.dtype not in _WIDE
            return t.to(converted.device) if is_narrow and t.dtype in _WIDE else converted

        return super()._apply(keep_precision, recurse)

    def extra_repr(self) -> str:
        """Return what ``print`` shows of the encoding."""
        return f"heads={self.heads}, width={self.width}, {self.config}"


registry: Registry[type[Encoding]] = Registry(
    "encoding",
    "fairseq_rpe.encodings",
    "; to use your own encoding, pass --rpe-module FILE",
    configure_encoding,
    has_patterns=True,
)
register = registry.register


def count_distances(pos: Positions, step: float) -> int:
    """Return the number of distances 0, step, 2·step, … up to the largest distance between these positions."""
    return pos.k.shape[1] if pos.contiguous else int(torch.round((pos.q.max() - pos.k.min()) / step)) + 1


def is_sparse(pos: Positions, distances: int) -> bool:
    """Whether a table of ``distances`` entries is large and has more entries than there are pairs of tokens."""
    return distances > max(_SMALL_TABLE, pos.q.numel() * pos.k.shape[1])


class DistanceBias(Encoding):
    """Base class of additive biases that depend on the distance alone. Implement ``bias``.

    Alternatively implement ``head_bias``, the same bias for one head, and, if it has parameters, ``head_parameters``.
    Positions that are not evenly spaced allow no table of distances; a GPU kernel then evaluates ``head_bias`` for
    every pair.
    """

    family = "bias of the distance"

    def bias(self, d: Tensor) -> Tensor:
        """Return the log-bias of each head at the given distances.

        Args:
            d: (R,) float distances >= 0, in tokens.

        Returns:
            (H, R) in nats, in the dtype of ``d``, differentiable.
        """
        return self.head_bias(d, *(x[:, None] for x in self.head_parameters(d))).expand(self.heads, -1)

    def head_bias(self, d: Tensor, *parameters: Any, **unused: Any) -> Tensor:
        """Return the log-bias at distances ``d`` of a head with these parameters, elementwise."""
        raise NotImplementedError

    def head_parameters(self, like: Tensor) -> tuple[Tensor, ...]:
        """Return the parameters of ``head_bias``, each (H,), in the dtype and on the device of ``like``."""
        return ()

    @property
    def is_distance_bias(self) -> bool:
        """Whether the bias is a table over distances, which decoding may cache."""
        return type(self).position_bias is DistanceBias.position_bias and not self.length_dependent

    def position_bias(self, pos: Positions) -> Bias:
        """Return the bias as a table of distances, or for every pair if a table is impossible or too large."""
        if pos.step is None or is_sparse(pos, distances := count_distances(pos, pos.step)):
            if type(self).bias is DistanceBias.bias:
                return PointwiseBias(self._pairwise, scalar_fn=self._pointwise, parameters=self.head_parameters(pos.k))
            return PairBias(self._pairwise)
        d = torch.arange(distances, device=pos.k.device, dtype=pos.k.dtype) * pos.step  # (R,)
        return ToeplitzBias(self.bias(d), step=pos.step)

    def attention_bias(self, pos: Positions) -> Bias | None:
        """Return the bias, with -inf outside the window; its table is computed for the distances in the window only."""
        window, m = self.attention_options.local, pos.k.shape[1]
        if not window or not self.is_distance_bias or not pos.contiguous or pos.step is None:
            return super().attention_bias(pos)
        columns = min(m, math.ceil(window / pos.step))
        near = Positions(pos.q[:, -1:], pos.k[:, m - columns :], pos.step)
        return hide_far_keys(self.position_bias(near), pos, self.heads, window)

    def _pairwise(self, i: Tensor, j: Tensor) -> Tensor:
        """Return the bias (B or 1, H, n, m) of all pairs of positions i (B or 1, n) and j (B or 1, m)."""
        d = (i[:, :, None] - j[:, None, :]).clamp_min(0)  # (B or 1, n, m)
        return self.bias(d.flatten()).unflatten(1, d.shape).transpose(0, 1)  # (H, B·n·m) -> (B or 1, H, n, m)

    def _pointwise(self, i: Tensor, j: Tensor, *parameters: Tensor) -> Tensor:
        """Return the bias of one pair of positions, elementwise, for a head with these parameters."""
        return self.head_bias((i - j).clamp_min(0), *parameters)


class PairwiseBias(Encoding):
    """Base class of additive biases that depend on both positions. Implement ``bias``."""

    family = "bias of both positions"

    def bias(self, i: Tensor, j: Tensor) -> Tensor:
        """Return the log-bias of every pair of positions.

        Args:
            i: (B or 1, n) positions of queries.
            j: (B or 1, m) positions of keys.

        Returns:
            (B or 1, H, n, m) in nats, finite also where j > i.
        """
        raise NotImplementedError

    def position_bias(self, pos: Positions) -> Bias:
        """Return a bias that is evaluated for every pair."""
        return PairBias(self.bias)


class Absolute(Encoding):
    """Base class of encodings that add a vector per position once, at the input. Implement ``vectors``."""

    family = "vectors at the input"
    sharing_modes = ("model",)
    bounded_reason = "positions enter at the input, and scores of bounded vectors are bounded"

    def vectors(self, at: Tensor) -> Tensor:
        """Return the vectors (B or 1, n, C) of positions ``at`` (B or 1, n), in float32 or float64."""
        raise NotImplementedError

    def embed(self, x: Tensor, pos: Positions) -> Tensor:
        """Add the vectors of positions to x (B, n, C); same shape."""
        check_embedding_input(x, pos, self.width)
        return x + self.vectors(pos.q).to(x.dtype)


# cos and sin (B or 1, 1 or H, n, 2P) of a rotation, and the scale (B or 1, 1, n or 1, 1) of elements that pass through
CosSin = tuple[Tensor, Tensor, Tensor | None]


class _CachedCosSin(NamedTuple):
    """Result of ``Rotary._cos_sin`` for the objects ``at`` and ``pos``; equal ones do not count."""

    at: Tensor
    pos: Positions
    cos_sin: CosSin


class _CachedAngles(NamedTuple):
    """Result of ``Rotary.angles`` for the objects ``at`` and ``pos``; equal ones do not count."""

    at: Tensor
    pos: Positions
    angles: Tensor


class Rotary(Encoding):
    """Base class of rotary encodings, which rotate pairs of elements of q and k. Implement ``angles``.

    The first 2P of a head's D elements form P pairs (s, s + P), or (2s, 2s + 1) with ``interleaved``; the remaining
    D - 2P elements pass through. Angles, cos, sin and products are computed in float32 or float64 for any dtype of x;
    only the result is cast.

    Options named ``rotary_fraction`` and ``interleaved`` set the attributes of these names. If the encoding replaces
    that of a trained model, these options and ``base`` default to the values of the model; see ``rotation_options``.

    Attributes:
        interleaved: rotate pairs (2s, 2s + 1) instead of (s, s + P).
        rotary_fraction: fraction of a head's elements that is rotated, from its first element.
        scale_whole_head: ``amplitude`` also scales the elements that pass through.
        rotated: 2P, set by ``setup``.
    """

    family = "rotation of queries and keys (RoPE)"
    sharing_modes: ClassVar[tuple[str, ...]] = ("model",)
    bounded_reason = "rotated queries and keys of bounded norm have bounded scores"
    interleaved: bool = False
    rotary_fraction: float = 1.0
    scale_whole_head: bool = False

    @classmethod
    def rotation_options(cls, config: Any) -> Mapping[str, str]:
        """Return the options ``base``, ``rotary_fraction`` and ``interleaved`` that the encoding has."""
        names = {f.name for f in fields(config)}
        return {key: key for key in ("base", "rotary_fraction", "interleaved") if key in names}

    def setup(self) -> None:
        """Take attributes from the options of the same names, and compute the rotated width.

        Raises:
            UserError: the rotated width is not an even number of at least 2 elements.
        """
        # a subclass may also set these attributes itself before it calls this
        for name in ("interleaved", "rotary_fraction"):
            if hasattr(self.config, name) and name not in vars(self):
                setattr(self, name, getattr(self.config, name))
        self._cos_sin_cache: dict[bool, _CachedCosSin] = {}  # by ``key``: one of queries and one of keys
        self._angle_cache: _CachedAngles | None = None
        head = self.width // self.heads
        self.rotated = int(head * self.rotary_fraction)
        if self.rotated < 2 or self.rotated % 2:
            raise UserError(
                f"a rotary encoding rotates pairs: the rotated width must be even and at least 2, not {self.rotated} "
                f"(width {self.width}, {self.heads} heads): choose another width, number of heads or rotary_fraction"
            )

    def angles(self, at: Tensor, pos: Positions) -> Tensor:
        """Return the angles (B or 1, n, P), in radians, of float positions ``at`` (B or 1, n), in their dtype."""
        raise NotImplementedError

    def amplitude(self, at: Tensor, pos: Positions, key: bool) -> Tensor | None:
        """Return factors (B or 1, n or 1, P or 1) of the rotated pairs, or None for 1.

        With ``scale_whole_head`` the factors are (..., 1) and scale all elements of the head.
        """
        return None

    def rotate(self, x: Tensor, at: Tensor, pos: Positions, key: bool = False) -> Tensor:
        """Rotate x (B, H, n, D), which are keys with ``key`` and else queries, for positions ``at``; same shape."""
        return self._rotate_pairs(x, *self._cos_sin(at, pos, key))

    def _rotate_pairs(self, x: Tensor, cos: Tensor, sin: Tensor, scale: Tensor | None) -> Tensor:
        """Rotate x (B, H, n, D); cos and sin as ``_cos_sin`` returns them, ``scale`` of elements that pass through."""
        rotated = cos.shape[-1]  # 2P
        is_plain = rotated == x.shape[-1] and x.dtype == cos.dtype  # the whole head, without a cast
        if is_plain and not self.interleaved:
            # fewer operations: sin has the signs (-, +), so rolling by half a head aligns the pair's other element
            return x * cos + x.roll(rotated // 2, -1) * sin
        cos, sin = cos[..., : rotated // 2], sin[..., rotated // 2 :]  # (B or 1, 1, n, P), both without signs
        if is_plain and self.interleaved and x.device.type == "cpu":
            return _rotate_complex(x, cos, sin)
        passed = x[..., rotated:] if scale is None else x[..., rotated:] * scale  # (B, H, n, D - 2P)
        if self.interleaved:
            a, b = x[..., 0:rotated:2], x[..., 1:rotated:2]  # (B, H, n, P) each
            out = torch.stack([a * cos - b * sin, b * cos + a * sin], dim=-1).flatten(-2)  # (B, H, n, 2P)
            return torch.cat([out, passed], dim=-1).to(x.dtype)
        a, b = x[..., :rotated].chunk(2, dim=-1)  # (B, H, n, P) each
        return torch.cat([a * cos - b * sin, b * cos + a * sin, passed], dim=-1).to(x.dtype)

    def _cos_sin(self, at: Tensor, pos: Positions, key: bool) -> CosSin:
        """Return cos (repeated for both elements of a pair), sin with signs (-, +), and the scale of other elements.

        All layers of a forward pass share the result, which is cached for the objects ``at`` and ``pos``.

        Args:
            at: (B or 1, n) positions for which queries or keys are rotated.
            pos: positions of all tokens.
            key: whether keys are rotated.
        """
        cached = self._cos_sin_cache.get(key)
        if cached is None or cached.at is not at or cached.pos is not pos:
            cached = self._cos_sin_cache[key] = _CachedCosSin(at, pos, self._compute_cos_sin(at, pos, key))
        return cached.cos_sin

    @torch.no_grad()
    def _compute_cos_sin(self, at: Tensor, pos: Positions, key: bool) -> CosSin:
        """Compute the result of ``_cos_sin``, which has its arguments."""
        float_at = at if at.is_floating_point() else at.to(torch.float32)
        # queries and keys at the same positions share the angles, but not the amplitude
        angles = self._angle_cache
        if angles is None or angles.at is not at or angles.pos is not pos:
            angles = self._angle_cache = _CachedAngles(at, pos, self.angles(float_at, pos))
        return self._cos_sin_of_angles(angles.angles, float_at, pos, key)

    def _cos_sin_of_angles(self, angles: Tensor, at: Tensor, pos: Positions, key: bool) -> CosSin:
        """Return the result of ``_cos_sin`` for angles (B or 1, n, P), uncached and with the angles' gradient."""
        cos, sin, scale = angles.cos(), angles.sin(), None
        amplitude = self.amplitude(at, pos, key)
        if amplitude is not None:
            cos, sin = cos * amplitude, sin * amplitude
            scale = amplitude[:, None] if self.scale_whole_head else None
        return torch.cat([cos, cos], dim=-1)[:, None], torch.cat([-sin, sin], dim=-1)[:, None], scale


def _rotate_complex(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate pairs (2s, 2s + 1) of x (B, H, n, 2P) as complex numbers, which is fastest on a CPU; same shape."""
    # view_as_complex needs even strides and an even offset
    is_even = x.stride(-1) == 1 and not any(stride % 2 for stride in (*x.stride()[:-1], x.storage_offset()))
    x = x if is_even else x.clone(memory_format=torch.contiguous_format)
    pairs = torch.view_as_complex(x.unflatten(-1, (-1, 2)))  # (B, H, n, P) complex
    return torch.view_as_real(pairs * torch.complex(cos, sin)).flatten(-2)
