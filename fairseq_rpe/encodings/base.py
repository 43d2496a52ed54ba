"""What an encoding is, and the families that authors fill with one method. Its doors are in ``doors``."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any, ClassVar, Self

import torch
from torch import Tensor

from fairseq_rpe.core.arguments import check_count
from fairseq_rpe.core.bias import Bias, PairBias, PointwiseBias, Positions, ToeplitzBias, block
from fairseq_rpe.core.errors import UserError, enough_memory
from fairseq_rpe.core.log_bias import LogBias
from fairseq_rpe.core.registry import Registry
from fairseq_rpe.core.tensors import check_embedded
from fairseq_rpe.encodings.interface import EncodingInterface

_WIDE = (torch.float32, torch.float64)
_SMALL_TABLE = 1 << 16  # distances; a table of so many takes no time


class Encoding(EncodingInterface):
    """Base class of all encodings.

    Args:
        config: an instance of ``Config``, a frozen dataclass of the options.
        heads: number of attention heads H.
        width: model width C; a head is C/H wide.
        length: training length in tokens, where known; only encodings with a table of it read this.
        symbols: what each id of the dictionary stands for, where known; only ``setup`` sees them.

    Class attributes: ``formula`` and ``paper`` (one line each, shown by ``fairseq-rpe list``) and ``sharing_modes``,
    the ways to share parameters over layers that make sense, the default first. ``max_queries_per_call`` is a function
    of (positions, dtype): how many queries ``rotate`` can serve in one call; None where any number is fine.
    ``position_type``: "any", "whole" where fractions have no meaning, or "none" where positions are not read at all.
    ``length_dependent``: the encoding changes with the length of the whole row, so trailing padding must not count.
    ``fixed_rotation``: what ``rotate`` makes of a key follows from the key and its own position alone, not from the
    other tokens, so that a cache may keep it turned. False, as here, is always right: keys are turned on every read.
    ``is_distance_bias``: the bias is a table of the distance, which more tokens only make longer: decoding may keep it.
    ``needs_token_ids``: the encoding needs the ids of the tokens, ``Positions.tokens``.
    ``bounded_reason``: why scores without additive bias, or with one that depends on the tokens, are bounded.
    ``dependence``: what can be said of a bias that depends on the tokens and has no bound.
    ``changes_base``: another base than the model was trained with is a method of this encoding, not a mistake.

    Parameters stay in float32 under ``.half()`` and ``.bfloat16()``: 8 bits cannot hold positions or slopes.
    """

    @dataclass(frozen=True)
    class Config: ...

    formula: ClassVar[str] = ""
    paper: ClassVar[str] = ""
    sharing_modes: ClassVar[tuple[str, ...]] = ("model", "layer")
    max_queries_per_call: Callable[[Positions, torch.dtype], int] | None = None
    length_dependent: bool = False
    needs_token_ids: bool = False
    fixed_rotation: bool = False
    position_type: ClassVar[str] = "any"
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
        self.symbols = None  # a copy of the model is not to copy the dictionary

    def setup(self) -> None:
        """Create parameters here; ``config``, ``heads``, ``width`` and ``length`` are set."""

    @classmethod
    def rotation_options(cls, config: Any) -> Mapping[str, str]:
        """Name the options that describe the rotation which a model's weights were trained with.

        A spec that leaves one of them open takes the model's value where the encoding replaces another one in a trained
        model. An encoding without such options brings a rotation of its own, or none.

        Args:
            config: an instance of ``Config``.

        Returns:
            Names of options, each with the quantity that it states: ``base``, ``rotary_fraction``, ``interleaved``,
            ``resonance``, ``logn``, ``original_length`` or ``scaling``.
        """
        return {}

    @classmethod
    def rotation_scaling(cls, config: Any) -> str:
        """Name what scales the frequencies of the rotation with these options; empty where nothing does."""
        return ""

    @property
    def is_distance_bias(self) -> bool:
        return False

    @property
    def is_pure_rotation(self) -> bool:
        others = self.adds_bias, self.changes_values, self.needs_token_ids, self.is_content_dependent
        return self.rotates and not any(others)

    @property
    @torch.no_grad()
    def adds_bias(self) -> bool:
        return self.position_bias(Positions.arange(2)) is not None

    @torch.no_grad()
    def bias_profile(self, n: int) -> Tensor:
        """(H, n) float64 log-bias of the last of n queries over distances 0 … n-1.

        Raises UserError: it is no function of the distance alone, or n is no number of tokens.
        """
        check_count("n", n)
        if self.is_content_dependent or self.needs_token_ids:
            raise UserError(f"{type(self).__name__} depends on what the tokens are: there is no bias of the distance")
        first = next(self.parameters(), None)
        with enough_memory(f"a profile of {n} distances"):
            pos = Positions.arange(1, n, dtype=torch.float64, device=None if first is None else first.device)
            form = self.position_bias(pos)
            if form is None:
                return pos.k.new_zeros(self.heads, n)
            return block(form, pos)[0, :, 0].flip(-1)

    def log_bias_formulas(self) -> list[str] | list[LogBias] | None:
        """ln b_n = bias(n) of each head as a formula in n, H of them; None where no formula is known.

        It is what ``fairseq-rpe verdict`` decides Σ exp(bias) by. A plain string is the exact log-bias.
        """
        if not self.bounded_reason or type(self).position_bias is not Encoding.position_bias:
            return None
        if self.is_content_dependent:
            return [LogBias("0", self.bounded_reason, at_least=True)] * self.heads
        return [LogBias("0", f"no additive bias: {self.bounded_reason}")] * self.heads

    def logged_scalars(self) -> dict[str, Tensor]:
        """Learned quantities worth watching: name -> (H,) per head or () per encoding, in natural units."""
        return {}

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Self:
        def keep_precision(t: Tensor) -> Tensor:
            moved = fn(t)
            narrow = moved.is_floating_point() and moved.dtype not in _WIDE
            return t.to(moved.device) if narrow and t.dtype in _WIDE else moved

        return super()._apply(keep_precision, recurse)

    def extra_repr(self) -> str:
        return f"heads={self.heads}, width={self.width}, {self.config}"


registry: Registry[type[Encoding]] = Registry(
    "encoding", "fairseq_rpe.encodings", "; an encoding of your own needs --rpe-module FILE"
)
register = registry.register


def reach_of(pos: Positions, step: float) -> int:
    """Number of distances, 0 and multiples of ``step``, up to the longest one at these positions."""
    return pos.k.shape[1] if pos.contiguous else int(torch.round((pos.q.max() - pos.k.min()) / step)) + 1


def is_far(pos: Positions, reach: int) -> bool:
    """Whether a table of ``reach`` distances has more entries than there are pairs of tokens, and is not small."""
    return reach > max(_SMALL_TABLE, pos.q.numel() * pos.k.shape[1])


class DistanceBias(Encoding):
    """An additive bias that depends on the distance alone. Fill ``bias``.

    Or fill ``head_bias`` and, where it needs them, ``numbers``: the same bias written for one head, which a kernel on a
    GPU can then work out for every pair where positions are not evenly spaced and no table will do.
    """

    def bias(self, d: Tensor) -> Tensor:
        """(R,) distances >= 0 in tokens, float -> (H, R) log-bias, in ``d``'s dtype and differentiable."""
        return self.head_bias(d, *(x[:, None] for x in self.head_parameters(d))).expand(self.heads, -1)

    def head_bias(self, d: Tensor, *numbers: Any, **none: Any) -> Tensor:
        """The log-bias at d of the head that has these ``numbers``: arithmetic of scalars that broadcasts."""
        raise NotImplementedError

    def head_parameters(self, like: Tensor) -> tuple[Tensor, ...]:
        """(H,) tensors in the dtype and on the device of ``like``."""
        return ()

    @property
    def is_distance_bias(self) -> bool:
        return type(self).position_bias is DistanceBias.position_bias and not self.length_dependent

    def position_bias(self, pos: Positions) -> Bias:
        if pos.step is None or is_far(pos, reach := reach_of(pos, pos.step)):
            if type(self).bias is DistanceBias.bias:
                return PointwiseBias(self._pairwise, scalar=self._of_positions, numbers=self.head_parameters(pos.k))
            return PairBias(self._pairwise)
        return ToeplitzBias(
            self.bias(torch.arange(reach, device=pos.k.device, dtype=pos.k.dtype) * pos.step), 0, pos.step
        )

    def _pairwise(self, i: Tensor, j: Tensor) -> Tensor:
        d = (i[:, :, None] - j[:, None, :]).clamp_min(0)
        return self.bias(d.flatten()).unflatten(1, d.shape).transpose(0, 1)

    def _of_positions(self, i: Tensor, j: Tensor, *numbers: Tensor) -> Tensor:
        return self.head_bias((i - j).clamp_min(0), *numbers)


class PairwiseBias(Encoding):
    """An additive bias that depends on both positions. Fill ``bias``."""

    def bias(self, i: Tensor, j: Tensor) -> Tensor:
        """i (B or 1, n), j (B or 1, m) -> (B or 1, H, n, m), finite for j > i too."""
        raise NotImplementedError

    def position_bias(self, pos: Positions) -> Bias:
        return PairBias(self.bias)


class Absolute(Encoding):
    """A vector per position, added once at the input. Fill ``vectors``."""

    sharing_modes = ("model",)
    bounded_reason = "positions enter at the input, and scores of bounded vectors are bounded"

    def vectors(self, at: Tensor) -> Tensor:
        """Positions (B or 1, n) -> (B or 1, n, C), in float32 or better."""
        raise NotImplementedError

    def embed(self, x: Tensor, pos: Positions) -> Tensor:
        check_embedded(x, pos, self.width)
        return x + self.vectors(pos.q).to(x.dtype)


class Rotary(Encoding):
    """Pairs of each query and key turned by an angle of their position. Fill ``angles``.

    A pair is (s, s + P) of the first 2P of a head's D elements, or with ``interleaved`` (2s, 2s + 1); the rest passes
    through. Angles, cosines and products are float32 or better whatever the dtype of x; only the result is cast.

    Options named ``base``, ``rotary_fraction`` and ``interleaved`` are taken from a trained model where a spec leaves
    them open; see ``rotation_options``.
    """

    sharing_modes = ("model",)
    bounded_reason = "rotated queries and keys of bounded norm have bounded scores"
    interleaved: bool = False
    rotary_fraction: float = 1.0
    whole: bool = False

    @classmethod
    def rotation_options(cls, config: Any) -> Mapping[str, str]:
        known = {f.name for f in fields(config)}
        return {key: key for key in ("base", "rotary_fraction", "interleaved") if key in known}

    def setup(self) -> None:
        self._kept: dict[bool, tuple[Tensor, Positions, tuple[Tensor, Tensor, Tensor | None]]] = {}
        self._angles: tuple[Tensor, Positions, Tensor] | None = None
        head = self.width // self.heads
        self.rotated = int(head * self.rotary_fraction)
        if self.rotated < 2 or self.rotated % 2:
            raise UserError(
                f"a rotary encoding turns pairs: the rotated width must be even and at least 2, not {self.rotated} "
                f"(width {self.width}, {self.heads} heads): choose another width, number of heads or rotary_fraction"
            )

    def angles(self, at: Tensor, pos: Positions) -> Tensor:
        """Positions (B or 1, n), float -> (B or 1, n, P) radians in the same dtype."""
        raise NotImplementedError

    def amplitude(self, at: Tensor, pos: Positions, key: bool) -> Tensor | None:
        """Factors (B or 1, n or 1, P or 1) of the turned pairs, with ``whole`` (..., 1) of the whole head; None: 1."""
        return None

    def rotate(self, x: Tensor, at: Tensor, pos: Positions, key: bool = False) -> Tensor:
        return self._turned(x, *self._turn(at, pos, key))

    def _turned(self, x: Tensor, cos: Tensor, sin: Tensor, whole: Tensor | None) -> Tensor:
        turned = cos.shape[-1]
        if not self.interleaved and turned == x.shape[-1] and x.dtype == cos.dtype:  # the same in fewer operations
            return (x * cos + x.roll(turned // 2, -1) * sin).to(x.dtype)
        cos, sin = cos[..., : turned // 2], sin[..., turned // 2 :]
        if self.interleaved and turned == x.shape[-1] and x.dtype == cos.dtype and x.device.type == "cpu":
            even = x.stride(-1) == 1 and not any(stride % 2 for stride in (*x.stride()[:-1], x.storage_offset()))
            pairs = torch.view_as_complex(
                (x if even else x.clone(memory_format=torch.contiguous_format)).unflatten(-1, (-1, 2))
            )
            return torch.view_as_real(pairs * torch.complex(cos, sin)).flatten(-2)
        rest = x[..., turned:] if whole is None else x[..., turned:] * whole
        if self.interleaved:
            a, b = x[..., 0:turned:2], x[..., 1:turned:2]
            out = torch.stack([a * cos - b * sin, b * cos + a * sin], dim=-1).flatten(-2)
            return torch.cat([out, rest], dim=-1).to(x.dtype)
        a, b = x[..., :turned].chunk(2, dim=-1)
        return torch.cat([a * cos - b * sin, b * cos + a * sin, rest], dim=-1).to(x.dtype)

    @torch.no_grad()
    def _turn(self, at: Tensor, pos: Positions, key: bool) -> tuple[Tensor, Tensor, Tensor | None]:
        """Cosines of both of a pair and sines of -, + the angle, (B or 1, 1, n, 2P), and the factor of the rest.

        All layers of a forward pass share them.
        """
        kept = self._kept.get(key)
        if kept is None or kept[0] is not at or kept[1] is not pos:
            where = at if at.is_floating_point() else at.to(torch.float32)
            if self._angles is None or self._angles[0] is not at or self._angles[1] is not pos:
                self._angles = at, pos, self.angles(where, pos)
            kept = self._kept[key] = (at, pos, self._made(self._angles[2], where, pos, key))
        return kept[2]

    def _made(self, angles: Tensor, at: Tensor, pos: Positions, key: bool) -> tuple[Tensor, Tensor, Tensor | None]:
        """The same of these angles, with their gradient."""
        cos, sin, whole = angles.cos(), angles.sin(), None
        amplitude = self.amplitude(at, pos, key)
        if amplitude is not None:
            cos, sin = cos * amplitude, sin * amplitude
            whole = amplitude[:, None] if self.whole else None
        return torch.cat([cos, cos], dim=-1)[:, None], torch.cat([-sin, sin], dim=-1)[:, None], whole
