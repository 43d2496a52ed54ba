"""Sensitivity of attention to positions, and the curves and Table 2 of index warping, computed for RoPE.

Source: "Improving Length Generalization via Position Index Warping", Eq. 3, 4, 6 to 9. Queries and keys are equal, of
unit norm and with the same norm in each pair of dimensions. Everything is float64; positions and distances may be
fractional.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from flint import arb
from torch import Tensor

from fairseq_rpe.core.errors import UserError
from fairseq_rpe.core.spec import did_you_mean
from fairseq_rpe.encodings.alibi import alibi_slopes
from fairseq_rpe.positions import SKEWS as SKEW_FUNCTIONS

RawAttention = Callable[[Tensor], Tensor]  # distance -> raw attention
Skew = str | Callable[[Tensor], Tensor]  # name of a skew, or f on [0, 1]
# (training length, c) -> skew -> the paper's values at test lengths of 2 and 4 times the training length
TABLE_2 = {
    (20, 10): {"none": (0.099, 0.069), "sqrt": (0.016, 0.063), "beta": (0.054, 0.012)},
    (500, 200): {"none": (0.061, 0.066), "sqrt": (0.028, 0.031), "beta": (0.031, 0.013)},
}
TIMES = (2, 4)  # test length / training length in Table 2
SKEWS = ("none", "sqrt", "beta")
_CHUNK = 1 << 22  # cosines that are computed at a time
_LAST_TOKENS = 48  # tokens in the close-up of the end of a text
_MAX_TAIL = 256  # tokens of a tail in a figure: more waves would overlap
_MAX_POINTS = 4096  # points of a curve
Curve = tuple[Tensor, Tensor]  # x and y
_SHORT, _LONG = 500, 1000  # tokens of the texts of Figure 2
_PLAIN, _INTERPOLATED = 100, (200, 500)  # tokens of the texts of Figure A


def rope_raw(distance: Tensor, width: int | None = None, base: float = 10_000.0) -> Tensor:
    """Return the raw attention of RoPE (Eq. 3): the mean of cos(n·θ_s), θ_s = base^(-2s/width), over a head's pairs.

    Args:
        distance: n >= 0, any shape.
        width: head width, which the paper does not state; None is the limit of a wide head,
            (Ci(n) - Ci(n/base)) / ln(base).
        base: base of the frequencies.

    Returns:
        float64, the shape of ``distance``.

    Raises:
        UserError: ``width`` is not a positive even number.

    >>> round(rope_raw(torch.tensor(10.0), width=64).item(), 6)
    0.657863
    """
    n = distance.double()
    if width is None:
        inside = n.clamp_min(torch.finfo(n.dtype).tiny * base)
        return torch.where(n > 0, (cosine_integral(inside) - cosine_integral(inside / base)) / math.log(base), 1.0)
    if width < 2 or width % 2:
        raise UserError(f"a rotary head is an even number of dimensions wide, not {width}")
    theta = base ** (-torch.arange(0, width, 2, dtype=n.dtype, device=n.device) / width)
    return (n[..., None] * theta).cos().mean(-1)  # (…, width / 2) -> (…)


def alibi_raw(distance: Tensor, head: int = 1, heads: int = 8) -> Tensor:
    """Return the raw attention of ALiBi (Eq. 4), 1 - k_h·n, with k_h = 2^-h for eight heads.

    Args:
        distance: n >= 0, any shape.
        head: number of the head; head 1 is the steepest.
        heads: number of heads of the model.

    Raises:
        UserError: ``head`` is not in 1 … ``heads``.
    """
    if not 1 <= head <= heads:
        raise UserError(f"head {head} does not exist: heads count from 1 to {heads}")
    return 1 - alibi_slopes(heads)[head - 1] * distance.double()


def sensitivity(positions: Tensor, raw: RawAttention = rope_raw, exponential: bool = False) -> Tensor:
    """Return the attention sensitivity (Eq. 6): the decrease of attention from each position to the next.

    Args:
        positions: (…, m) positions p_i.
        raw: raw attention by distance.
        exponential: compare exp(raw), as the paper's figures show, instead of raw as in its equation.

    Returns:
        (…, m - 1) float64; entry i-1 is raw(p_(i-1)) - raw(p_i) for i >= 1. The paper leaves p_(-1), and so the entry
        of i = 0, undefined.
    """
    value = raw(positions.double())
    return -torch.diff(value.exp() if exponential else value)


def total_difference(
    skew: Skew,
    train_length: int,
    test_length: int,
    tail_length: int,
    raw: RawAttention = rope_raw,
    exponential: bool = False,
) -> float:
    """Return the total difference at one test length; the other arguments are those of :func:`total_differences`."""
    return total_differences(skew, train_length, [test_length], tail_length, raw, exponential).item()


def total_differences(
    skew: Skew,
    train_length: int,
    tests: Sequence[int],
    tail_length: int,
    raw: RawAttention = rope_raw,
    exponential: bool = False,
) -> Tensor:
    """Return the total differences (Eq. 9) Σ_(i=0…c) |sen_train(L_train - i) - sen_test(L_test - i)|.

    Training positions are L·f(j/L); test positions are interpolated, j·L_train/L_test. The smaller the difference, the
    better training prepares the tail of a longer text.

    Args:
        skew: f, as in :func:`warp_positions`.
        train_length: L_train in tokens.
        tests: test lengths L_test >= L_train in tokens.
        tail_length: c < L_train; the paper takes 10 at L_train = 20 and 200 at 500.
        raw: as in :func:`sensitivity`.
        exponential: as in :func:`sensitivity`.

    Returns:
        (len(tests),) float64.

    Raises:
        UserError: a length is out of range.
    """
    shortest = min(tests)
    if not 1 <= train_length <= shortest:
        raise UserError(f"a test length of {shortest} is shorter than the training length {train_length}: swap them")
    if not 0 <= tail_length < train_length:
        raise UserError(
            f"a tail of {tail_length} tokens exceeds the training length {train_length}: choose 0 to {train_length - 1}"
        )
    trained = warp_positions(skew, train_length)[-tail_length - 2 :]
    tested = torch.stack([interpolate_positions(train_length, n)[-tail_length - 2 :] for n in tests])
    return (sensitivity(trained, raw, exponential) - sensitivity(tested, raw, exponential)).abs().sum(-1)


def warp_positions(skew: Skew, length: int) -> Tensor:
    """Return the tail-warped positions (Eq. 8) L·f(j/L) of the indices j = 0 … L.

    Args:
        skew: f on [0, 1]: a name of ``fairseq_rpe.positions.SKEWS``, ``none``, or a function.
        length: L in tokens.

    Returns:
        (L + 1,) float64, in tokens.

    Raises:
        UserError: no skew has this name.
    """
    functions = {"none": lambda x: x, **SKEW_FUNCTIONS}
    if not callable(skew) and skew not in functions:
        raise UserError(
            f"unknown skew '{skew}'{did_you_mean(skew, functions)}; known: {', '.join(functions)}, or a function"
        )
    return length * (skew if callable(skew) else functions[skew])(
        torch.arange(length + 1, dtype=torch.float64) / length
    )


def interpolate_positions(train_length: int, test_length: int) -> Tensor:
    """Return the interpolated positions j·L_train/L_test of the indices j = 0 … L_test, (L_test + 1,), in tokens."""
    return torch.arange(test_length + 1, dtype=torch.float64) * (train_length / test_length)


def cosine_integral(x: Tensor) -> Tensor:
    """Return the cosine integral Ci(x) for x > 0 in double precision, computed by flint."""
    values = [float(arb(v).ci()) for v in x.flatten().tolist()]
    return torch.tensor(values, dtype=torch.float64, device=x.device).reshape(x.shape)


@dataclass(frozen=True)
class WarpSetting:
    """Settings of all curves.

    Attributes:
        train_length: training length in tokens; Table 2 and the total differences use the paper's 20 and 500.
        width: head width of RoPE, even; None is the limit of a wide head.
        base: base of RoPE's frequencies.
        exponential: whether differences are of exp(raw attention), as in the paper's figures, or of raw attention.
    """

    train_length: int = 512
    width: int | None = None
    base: float = 10_000.0
    exponential: bool = True

    @property
    def unit(self) -> str:
        """The quantity whose differences are computed."""
        return "exp(raw attention)" if self.exponential else "raw attention"

    @property
    def tail_length(self) -> int:
        """The c of Eq. 9: the paper's at its lengths, otherwise two fifths of the text, like its 200 of 500."""
        # the keys of TABLE_2 are pairs of training length and c
        return dict(TABLE_2.keys()).get(self.train_length, max(1, round(0.4 * self.train_length)))

    def __str__(self) -> str:
        head = f"heads {self.width} wide" if self.width else "the limit of a wide head"
        return f"RoPE, base {self.base:g}, {head}, differences of {self.unit}"

    def raw(self, n: Tensor) -> Tensor:
        """Return the raw attention of RoPE (Eq. 3), in chunks: each distance needs width / 2 cosines."""
        chunks = n.flatten().split(_CHUNK // (self.width or 256))
        return torch.cat([rope_raw(chunk, self.width, self.base) for chunk in chunks]).view_as(n)

    def sensitivity(self, positions: Tensor) -> Tensor:
        """Return :func:`sensitivity` with these settings."""
        return sensitivity(positions, self.raw, self.exponential)

    def total_differences(self, skew: str, train_length: int, tests: Sequence[int], tail_length: int) -> Tensor:
        """Return :func:`total_differences` with these settings."""
        return total_differences(skew, train_length, tests, tail_length, self.raw, self.exponential)


class TotalDifferences(NamedTuple):
    """Total differences (Eq. 9) of one training length.

    Attributes:
        train_length: training length in tokens.
        tail_length: c of Eq. 9.
        times: (T,) test length / training length.
        sums: skew -> (T,) total differences.
        published: skew -> the paper's values at ``TIMES``.
    """

    train_length: int
    tail_length: int
    times: Tensor
    sums: Mapping[str, Tensor]
    published: Mapping[str, tuple[float, ...]]

    def interleave_published(self) -> dict[str, list[float]]:
        """Return computed and published values alternately, where ``times`` are ``TIMES``."""
        pairs = {skew: zip(self.sums[skew].tolist(), printed, strict=True) for skew, printed in self.published.items()}
        return {skew: [value for pair in values for value in pair] for skew, values in pairs.items()}


def table_2(setting: WarpSetting) -> list[TotalDifferences]:
    """Compute Table 2."""
    return _differences(setting, lambda length: [times * length for times in TIMES])


def total_difference_curves(setting: WarpSetting) -> list[TotalDifferences]:
    """Compute the total differences at many test lengths, for each training length of the paper."""
    # fine enough to resolve how the waves of sqrt below twice the length move in and out of phase
    return _differences(setting, lambda length: range(3 * length // 2, 8 * length + 1, max(1, length // 100)))


def _differences(setting: WarpSetting, tests: Callable[[int], Sequence[int]]) -> list[TotalDifferences]:
    """Return the total differences of each training length of Table 2 at the test lengths ``tests(length)``."""
    results = []
    for (length, tail_length), published in TABLE_2.items():
        sums = {skew: setting.total_differences(skew, length, tests(length), tail_length) for skew in SKEWS}
        results.append(TotalDifferences(length, tail_length, torch.tensor(tests(length)) / length, sums, published))
    return results


def table_cells(results: Sequence[TotalDifferences], setting: WarpSetting) -> list[list[Any]]:
    """Return Table 2 with its header for a CSV file; every row has the settings too."""
    sums = [f"{kind}_{times}x" for times in TIMES for kind in ("computed", "published")]
    settings = [setting.width or "limit", setting.base, setting.exponential]
    head = ["train_length", "reach", "skew", *sums, "width", "base", "exponential"]
    rows = ((r.train_length, r.tail_length, *row) for r in results for row in r.interleave_published().items())
    return [head, *([length, tail_length, skew, *values, *settings] for length, tail_length, skew, values in rows)]


def published_trend(sums: Mapping[str, Sequence[float]]) -> tuple[bool, bool]:
    """Return whether both skews lower the sum at both ``TIMES``, and whether beta has the lowest sum at 4 times."""
    lower = all(sums[skew][i] < sums["none"][i] for skew in ("sqrt", "beta") for i in range(len(TIMES)))
    return lower, sums["beta"][-1] == min(values[-1] for values in sums.values())


class AttentionCurves(NamedTuple):
    """The attention exp(raw attention) over distances (Figure 1).

    Attributes:
        distances: (n,) in tokens.
        rope: head width (None is the limit of a wide head) -> (n,).
        alibi: head -> (n,).
    """

    distances: Tensor
    rope: Mapping[int | None, Tensor]
    alibi: Mapping[int, Tensor]


def attention_curves(setting: WarpSetting) -> AttentionCurves:
    """Compute Figure 1."""
    n = torch.logspace(0, 5, 1500, dtype=torch.float64).round().unique()
    widths = sorted({64, 128, None, setting.width}, key=lambda width: width or math.inf)
    rope = {width: WarpSetting(width=width, base=setting.base).raw(n).exp() for width in widths}
    return AttentionCurves(n, rope, {head: alibi_raw(n, head).exp() for head in (1, 3, 5, 8)})


class LengthCurves(NamedTuple):
    """The attention exp(raw attention) of the last token of a text: a panel of Figure 2.

    Attributes:
        tokens: (length + 1,) distances 0 … length.
        rope: (length + 1,).
        alibi: head -> (length + 1,).
        interpolated: RoPE with the positions interpolated to those of the shorter text; None for the shorter text.
    """

    tokens: Tensor
    rope: Tensor
    alibi: Mapping[int, Tensor]
    interpolated: Tensor | None


def length_curves(setting: WarpSetting) -> list[LengthCurves]:
    """Compute Figure 2: 500 tokens and 1000."""
    results = []
    for length in (_SHORT, _LONG):
        n = torch.arange(length + 1, dtype=torch.float64)
        interpolated = setting.raw(n * (_SHORT / length)).exp() if length > _SHORT else None
        alibi = {head: alibi_raw(n, head).exp() for head in (1, 4, 8)}
        results.append(LengthCurves(n, setting.raw(n).exp(), alibi, interpolated))
    return results


def interpolated_curves(setting: WarpSetting) -> Mapping[int, Curve]:
    """Compute Figure A: exp(raw attention) of RoPE for 100 tokens, and for 200 and 500 interpolated to 100."""
    results = {}
    for length in (_PLAIN, *_INTERPOLATED):
        n = torch.arange(length + 1, dtype=torch.float64)
        results[length] = n, setting.raw(n * (_PLAIN / length)).exp()
    return results


def skew_curve(name: str) -> Curve:
    """Return the skew f of tail warping (Eq. 8) on [0, 1], as in Figures 4 (``beta``) and B (``sqrt``)."""
    x = torch.linspace(0, 1, 501, dtype=torch.float64)
    return x, SKEW_FUNCTIONS[name](x)


class SensitivityCurves(NamedTuple):
    """Sensitivity (Eq. 6) of an interpolated text.

    Attributes:
        times: length of the text / training length.
        size: positions and absolute sensitivity, averaged over one wave if the text is long enough.
        single: the same without averaging, or None if ``size`` is not averaged.
        tail: sensitivity at the last tokens.
    """

    times: int
    size: Curve
    single: Curve | None
    tail: Tensor


def sensitivity_curves(setting: WarpSetting) -> list[SensitivityCurves]:
    """Compute the sensitivity in training (times 1) and in tests."""
    results = []
    for times in (1, *TIMES):
        p = interpolate_positions(setting.train_length, times * setting.train_length)
        sen, window = setting.sensitivity(p), wave_weights(times)
        size, single = _log_subsample(p[1:], sen.abs()), None
        if len(sen) >= 2 * len(window):  # long enough to average over one wave
            mean_position, mean_size = (values.unfold(0, len(window), 1) @ window for values in (p[1:], sen.abs()))
            size, single = _log_subsample(mean_position, mean_size), size
        results.append(SensitivityCurves(times, size, single, sen[-_LAST_TOKENS:]))
    return results


class TailCurves(NamedTuple):
    """Sensitivity at the last tokens of a text.

    Attributes:
        skew: skew of the training positions.
        sums: total differences at ``TIMES``.
        by_times: length of the text / training length -> sensitivity; 1 is training with warped positions.
    """

    skew: str
    sums: list[float]
    by_times: Mapping[int, Tensor]


def tail_curves(setting: WarpSetting) -> list[TailCurves]:
    """Compute the sensitivity at the last tokens for each skew, with the total differences at ``TIMES``."""
    length, tail_length = setting.train_length, setting.tail_length
    shown = min(tail_length, _MAX_TAIL) + 2
    tests = {t: setting.sensitivity(interpolate_positions(length, t * length)[-shown:]) for t in TIMES}
    results = []
    for skew in SKEWS:
        sums = setting.total_differences(skew, length, [t * length for t in TIMES], tail_length).tolist()
        results.append(TailCurves(skew, sums, {1: setting.sensitivity(warp_positions(skew, length)[-shown:]), **tests}))
    return results


def warped_curves(setting: WarpSetting) -> Mapping[str, Tensor]:
    """Compute the positions p_j (Eq. 7, 8) of the indices j = 0 … L, by skew."""
    return {skew: warp_positions(skew, setting.train_length) for skew in SKEWS}


def wave_weights(times: int) -> Tensor:
    """Return the weights of a mean over one period of the fastest pair of a head: 2π positions, 1/times apart.

    The period is not a whole number of tokens, so the first and the last weight are smaller.
    """
    period = 2 * math.pi * times  # tokens
    whole = 2 * int((period - 1) // 2) + 1
    weights = torch.ones(whole + 2, dtype=torch.float64)
    weights[[0, -1]] = (period - whole) / 2
    return weights / period


def _log_subsample(x: Tensor, y: Tensor) -> Curve:
    """Return at most 4096 log-spaced points of a curve."""
    if len(x) <= _MAX_POINTS:
        return x, y
    indices = torch.logspace(0, math.log10(len(x)), _MAX_POINTS, dtype=torch.float64).round().long().unique() - 1
    return x[indices], y[indices]
