"""The curves and Table 2 of "Improving Length Generalization via Position Index Warping", computed again for RoPE."""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fairseq_rpe.analysis.sensitivity import alibi_raw, interpolated, rope_raw, sensitivity, total_differences, warped
from fairseq_rpe.positions import SKEWS as WARPS

# (training length, c) -> skew -> what the paper prints for tests of 2 and of 4 times that length
TABLE_2 = {
    (20, 10): {"none": (0.099, 0.069), "sqrt": (0.016, 0.063), "beta": (0.054, 0.012)},
    (500, 200): {"none": (0.061, 0.066), "sqrt": (0.028, 0.031), "beta": (0.031, 0.013)},
}
TIMES = (2, 4)
SKEWS = ("none", "sqrt", "beta")
_CHUNK = 1 << 22  # cosines at a time
_TAIL = 48  # tokens in the close-up of the last ones
_SHOWN = 256  # tokens of a tail: more waves than these would be a blot
_POINTS = 4096
Curve = tuple[Tensor, Tensor]  # x and y
# tokens of the texts of figures 2 and A
_SHORT, _LONG = 500, 1000
_PLAIN, _SQUEEZED = 100, (200, 500)


@dataclass(frozen=True)
class Setting:
    """What is computed: ``width`` of RoPE's heads, even, None is the limit of a wide head; ``base`` of RoPE's angles.

    ``train_length`` is in tokens; the table and the differences have the paper's 20 and 500. ``exponential``:
    differences are of exp(raw attention), as in the paper's figures, or of raw attention.
    """

    train_length: int = 512
    width: int | None = None
    base: float = 10_000.0
    exponential: bool = True

    @property
    def unit(self) -> str:
        return "exp(raw attention)" if self.exponential else "raw attention"

    @property
    def reach(self) -> int:
        """c of Eq. 9: the paper's at its lengths, otherwise two fifths of the text, as its 200 of 500."""
        return dict(TABLE_2.keys()).get(self.train_length, max(1, round(0.4 * self.train_length)))

    def __str__(self) -> str:
        head = f"heads {self.width} wide" if self.width else "the limit of a wide head"
        return f"RoPE, base {self.base:g}, {head}, differences of {self.unit}"

    def raw(self, n: Tensor) -> Tensor:
        """Raw attention of RoPE (Eq. 3), in parts: it takes width / 2 numbers for each distance."""
        parts = n.flatten().split(_CHUNK // (self.width or 256))
        return torch.cat([rope_raw(part, self.width, self.base) for part in parts]).view_as(n)

    def sensitivity(self, positions: Tensor) -> Tensor:
        return sensitivity(positions, self.raw, self.exponential)

    def differences(self, skew: str, train_length: int, tests: Sequence[int], reach: int) -> Tensor:
        return total_differences(skew, train_length, tests, reach, self.raw, self.exponential)


class Differences(NamedTuple):
    """Total difference (Eq. 9) over test length / training length, and the paper's at ``TIMES``, by skew."""

    train_length: int
    reach: int
    times: Tensor
    sums: Mapping[str, Tensor]
    published: Mapping[str, tuple[float, ...]]

    def beside(self) -> dict[str, list[float]]:
        """Computed and published in turn, where ``times`` are ``TIMES``."""
        pairs = {skew: zip(self.sums[skew].tolist(), printed, strict=True) for skew, printed in self.published.items()}
        return {skew: [value for pair in found for value in pair] for skew, found in pairs.items()}


def table(setting: Setting) -> list[Differences]:
    """Table 2."""
    return _differences(setting, lambda length: [times * length for times in TIMES])


def differences(setting: Setting) -> list[Differences]:
    """One for each training length of the paper, at many test lengths."""
    # fine enough for the waves of sqrt below twice the length, which come into step and fall out of it again
    return _differences(setting, lambda length: range(3 * length // 2, 8 * length + 1, max(1, length // 100)))


def _differences(setting: Setting, tests: Callable[[int], Sequence[int]]) -> list[Differences]:
    found = []
    for (length, reach), published in TABLE_2.items():
        sums = {skew: setting.differences(skew, length, tests(length), reach) for skew in SKEWS}
        found.append(Differences(length, reach, torch.tensor(tests(length)) / length, sums, published))
    return found


def cells(found: Sequence[Differences], setting: Setting) -> list[list[Any]]:
    """The table with its head, and how it was computed in every row."""
    sums = [f"{what}_{times}x" for times in TIMES for what in ("computed", "published")]
    how = [setting.width or "limit", setting.base, setting.exponential]
    head = ["train_length", "reach", "skew", *sums, "width", "base", "exponential"]
    rows = ((one.train_length, one.reach, *row) for one in found for row in one.beside().items())
    return [head, *([length, reach, skew, *values, *how] for length, reach, skew, values in rows)]


def trend(at: Mapping[str, Sequence[float]]) -> tuple[bool, bool]:
    """Of skew -> sums at ``TIMES``: do both skews lower the sum at both, and is beta the lowest at 4 times?"""
    lower = all(at[skew][i] < at["none"][i] for skew in ("sqrt", "beta") for i in range(len(TIMES)))
    return lower, at["beta"][-1] == min(sums[-1] for sums in at.values())


class Attention(NamedTuple):
    """exp(raw attention) over distances in tokens: of RoPE by head width (None: a wide head), of ALiBi by head."""

    distances: Tensor
    rope: Mapping[int | None, Tensor]
    alibi: Mapping[int, Tensor]


def attention(setting: Setting) -> Attention:
    n = torch.logspace(0, 5, 1500, dtype=torch.float64).round().unique()
    widths = sorted({64, 128, None, setting.width}, key=lambda width: width or math.inf)
    rope = {width: Setting(width=width, base=setting.base).raw(n).exp() for width in widths}
    return Attention(n, rope, {head: alibi_raw(n, head).exp() for head in (1, 3, 5, 8)})


class Length(NamedTuple):
    """exp(raw attention) of a text's last token over the distance in ``tokens`` 0 … length: a panel of Figure 2.

    ``alibi``: by head; ``squeezed``: of RoPE with the positions of the shorter text, by interpolation, where it is
    longer.
    """

    tokens: Tensor
    rope: Tensor
    alibi: Mapping[int, Tensor]
    squeezed: Tensor | None


def two_lengths(setting: Setting) -> list[Length]:
    """Figure 2: 500 tokens and 1000."""
    found = []
    for length in (_SHORT, _LONG):
        n = torch.arange(length + 1, dtype=torch.float64)
        squeezed = setting.raw(n * (_SHORT / length)).exp() if length > _SHORT else None
        alibi = {head: alibi_raw(n, head).exp() for head in (1, 4, 8)}
        found.append(Length(n, setting.raw(n).exp(), alibi, squeezed))
    return found


def squeezed(setting: Setting) -> Mapping[int, Curve]:
    """Figure A: exp(raw attention) of RoPE over the distance in tokens, 100 as they are, 200 and 500 interpolated."""
    found = {}
    for length in (_PLAIN, *_SQUEEZED):
        n = torch.arange(length + 1, dtype=torch.float64)
        found[length] = n, setting.raw(n * (_PLAIN / length)).exp()
    return found


def skew(name: str) -> Curve:
    """f of tail warping (Eq. 8) on [0, 1], as in Figures 4 (``beta``) and B (``sqrt``)."""
    x = torch.linspace(0, 1, 501, dtype=torch.float64)
    return x, WARPS[name](x)


class Falling(NamedTuple):
    """Sensitivity (Eq. 6) of a text of ``times`` the training length, interpolated; ``tail``: its last tokens.

    ``size`` is its absolute value over positions, or that averaged over one wave where there are enough of them; then
    ``single`` is that of each position.
    """

    times: int
    size: Curve
    single: Curve | None
    tail: Tensor


def falling(setting: Setting) -> list[Falling]:
    """In training (times 1) and in tests."""
    found = []
    for times in (1, *TIMES):
        p = interpolated(setting.train_length, times * setting.train_length)
        sen, window = setting.sensitivity(p), wave(times)
        each = mean = p[1:], sen.abs()
        if averaged := len(sen) >= 2 * len(window):
            mean = (values.unfold(0, len(window), 1) @ window for values in each)
        found.append(Falling(times, _thinned(*mean), _thinned(*each) if averaged else None, sen[-_TAIL:]))
    return found


class Tail(NamedTuple):
    """Sensitivity at the last tokens of a text: ``at`` 1 in training, warped by ``skew``, at ``TIMES`` in tests."""

    skew: str
    sums: list[float]
    at: Mapping[int, Tensor]


def tails(setting: Setting) -> list[Tail]:
    """One for each skew, with the total differences at ``TIMES``."""
    length, reach = setting.train_length, setting.reach
    shown = min(reach, _SHOWN) + 2
    tests = {t: setting.sensitivity(interpolated(length, t * length)[-shown:]) for t in TIMES}
    found = []
    for skew in SKEWS:
        sums = setting.differences(skew, length, [t * length for t in TIMES], reach).tolist()
        found.append(Tail(skew, sums, {1: setting.sensitivity(warped(skew, length)[-shown:]), **tests}))
    return found


def warps(setting: Setting) -> Mapping[str, Tensor]:
    """Positions p_j (Eq. 7, 8) of the indices j = 0 … L by skew."""
    return {skew: warped(skew, setting.train_length) for skew in SKEWS}


def wave(times: int) -> Tensor:
    """Weights of a mean over the 2π positions in which the fastest pair of a head turns once, 1/times apart.

    That is no whole number of tokens, so the two at the ends count in part.
    """
    turn = 2 * math.pi * times
    whole = 2 * int((turn - 1) // 2) + 1
    weights = torch.ones(whole + 2, dtype=torch.float64)
    weights[[0, -1]] = (turn - whole) / 2
    return weights / turn


def _thinned(x: Tensor, y: Tensor) -> Curve:
    """What a logarithmic axis can show of a long curve."""
    if len(x) <= _POINTS:
        return x, y
    kept = torch.logspace(0, math.log10(len(x)), _POINTS, dtype=torch.float64).round().long().unique() - 1
    return x[kept], y[kept]
