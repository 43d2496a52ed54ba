"""Dot plot of the perplexities of many methods: a row for each, coloured by the family of its encoding."""

import math
from collections.abc import Iterable, Mapping, Sequence
from statistics import median
from typing import NamedTuple

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import LogLocator, MaxNLocator

from fairseq_rpe.core.errors import UserError
from fairseq_rpe.core.layer_pattern import is_pattern, parse_pattern
from fairseq_rpe.core.looks import COLOURS, RegisteredLook
from fairseq_rpe.core.spec import parse
from fairseq_rpe.encodings import registry
from fairseq_rpe.figures.heat_maps import MAX_LINES, ROW_HEIGHT, format_short
from fairseq_rpe.figures.style import (
    TICK,
    add_legend,
    figure_width,
    panel_width,
    panels,
    set_decade_axis,
    set_title,
    shorten_patterns,
)

SEVERAL_FAMILIES = "several families in one model"
OTHER_FAMILY = "other encodings"
FAMILY_LOOKS = {
    "bias of the distance": RegisteredLook("blue", "o"),
    "bias of both positions": RegisteredLook("sky blue", "s"),
    "bias that depends on the content": RegisteredLook("green", "D"),
    "rotation of queries and keys (RoPE)": RegisteredLook("vermilion", "^"),
    "RoPE on longer texts, without training": RegisteredLook("vermilion", "<"),
    "segments": RegisteredLook("pink", "P"),
    "vectors at the input": RegisteredLook("orange", "v"),
    "no positions": RegisteredLook("black", "o"),
    SEVERAL_FAMILIES: RegisteredLook("black", "s"),
    OTHER_FAMILY: RegisteredLook("black", "D"),
}
_BEYOND_RATIO = 2.0  # value / median of all values, from which on a value is beyond the axis
_MOST_BEYOND = 0.25  # share of rows beyond a linear axis, above which the axis is logarithmic and has no limit
_NARROW_RATIO = 50.0  # largest / smallest value up to which a logarithmic axis has numbers between powers of ten
_WIDE_PANEL = 2.4  # inches, with the names of the methods
_LONGEST_CAPTION = 40  # characters that fit above a panel in one line
_MARKER_SIZE = 4.5  # points
_SMALL_MARKER_SIZE = 2.0  # of lengths between the training length and the longest one, and of seeds
_NUMBER_PADDING = 6.0  # points from the panel to the column of numbers


class DotRow(NamedTuple):
    """A method of the dot plot.

    Attributes:
        label: name of the method.
        family: key of ``FAMILY_LOOKS``.
        perplexities: mean perplexity over seeds by length.
        ratios: ratio of each seed's perplexity at the longest length to that at the training length; may be empty.
        interval: bounds of the mean ratio, None if unknown.
    """

    label: str
    family: str
    perplexities: Mapping[int, float]
    ratios: Sequence[float] = ()
    interval: tuple[float, float] | None = None

    @property
    def ratio(self) -> float | None:
        """Mean ratio over the seeds, None if unknown."""
        return sum(self.ratios) / len(self.ratios) if self.ratios else None


def encoding_family(spec: str) -> str:
    """Return the family of an encoding or of a pattern of layers.

    >>> encoding_family("3*rope:local=512|xpos"), encoding_family("rope|nope")
    ('rotation of queries and keys (RoPE)', 'several families in one model')
    """
    try:
        specs = [spec]
        if is_pattern(spec):
            pattern = parse_pattern(spec)
            specs = [layer_spec for layer_spec in (*pattern.period, pattern.start, pattern.end) if layer_spec]
        families = {registry.get(parse(layer_spec)[0]).family for layer_spec in specs}
    except UserError:  # an encoding of another program, or one of a Python file that is not loaded
        return OTHER_FAMILY
    family = families.pop() if len(families) == 1 else SEVERAL_FAMILIES
    return family if family in FAMILY_LOOKS else OTHER_FAMILY


def select_extremes(ratios: Mapping[str, float], families: Mapping[str, str]) -> list[str]:
    """Return the methods with the lowest and the highest ratio of each family, up to ``MAX_LINES``.

    If there are more, methods with the highest ratio are left out, those of the smallest families first.

    Args:
        ratios: ratio of perplexities by method.
        families: family by method.

    Returns:
        Names of methods, by ascending ratio.
    """
    members: dict[str, list[str]] = {}
    for name in sorted(ratios, key=ratios.__getitem__):
        members.setdefault(families[name], []).append(name)
    by_size = sorted(members.values(), key=len, reverse=True)
    lowest, highest = [names[0] for names in by_size], [names[-1] for names in by_size]
    chosen = list(dict.fromkeys([*lowest, *highest]))[:MAX_LINES]
    return sorted(chosen, key=ratios.__getitem__)


def draw_perplexity_dots(rows: Iterable[DotRow], trained_at: int, text: str = "", seeds: str = "") -> Figure:
    """Draw ratios of perplexities, and perplexities per token, with a row for each method.

    The left panel has the ratio of the perplexity at the longest length to that at the training length. Rows are
    sorted by it, and methods without a ratio are last. The right panel has the perplexity at each length. Without
    ratios, the right panel alone is drawn, sorted by the mean perplexity over the lengths of each method.

    Args:
        rows: the methods.
        trained_at: training length in tokens.
        text: name of the evaluated text.
        seeds: caption on seeds, "" for one seed.
    """
    rows = list(rows)
    lengths = sorted({n for row in rows for n in row.perplexities})
    has_ratios = lengths[-1] > trained_at and any(row.ratios for row in rows)
    rows = sorted(rows, key=_ratio_order if has_ratios else _perplexity_order)
    height = 1.4 + ROW_HEIGHT * len(rows)
    if has_ratios:
        figure, all_axes = panels(1, 2, (figure_width(2), height), grid=False, sharey=True)
        _draw_ratios(all_axes[0], rows, (trained_at, lengths[-1]), seeds)
    else:
        figure, all_axes = panels(1, 1, (figure_width(), height), grid=False)
    _draw_perplexities(all_axes[-1], rows, trained_at, lengths, text)
    shown = shorten_patterns([row.label for row in rows])
    all_axes[0].set_yticks(range(len(rows)), [shown[row.label] for row in rows])
    for axes in all_axes:
        axes.set_ylim(len(rows) - 0.5, -0.5)
        axes.tick_params(axis="y", length=0)
        axes.grid(axis="x", alpha=0.25)
        for k in range(1, len(rows), 2):
            axes.axhspan(k - 0.5, k + 0.5, color="0.95", zorder=0, linewidth=0)
    _add_legend(figure, rows)
    return figure


def _ratio_order(row: DotRow) -> tuple[bool, float]:
    ratio = row.ratio
    return (True, _mean_perplexity(row)) if ratio is None else (False, ratio)


def _perplexity_order(row: DotRow) -> float:
    return _mean_perplexity(row)


def _mean_perplexity(row: DotRow) -> float:
    return sum(row.perplexities.values()) / len(row.perplexities)


def _draw_ratios(axes: Axes, rows: Sequence[DotRow], lengths: tuple[int, int], seeds: str) -> None:
    """Draw the mean ratio with its interval, and the ratios of several seeds as small points.

    Args:
        axes: panel.
        rows: the methods in their order.
        lengths: training length and longest length, in tokens.
        seeds: caption on seeds, "" for one seed.
    """
    shown = [ratio for row in rows if (ratio := row.ratio) is not None]
    bars = [end for row in rows for end in (*row.ratios, *(row.interval or ()))]
    limit = _set_limits(axes, [[ratio] for ratio in shown], bars)
    axes.axvline(1, color="0.5", linewidth=1, zorder=1, label="_equal")
    for y, row in enumerate(rows):
        look, ratio = FAMILY_LOOKS[row.family], row.ratio
        colour = COLOURS[look.colour]
        if ratio is None:
            _write_number(axes, y, "–")
            continue
        _write_number(axes, y, f"{ratio:.3f}" if ratio < 10 else format_short(ratio))
        if ratio > limit:
            _mark_beyond(axes, y, colour)
            continue
        if len(row.ratios) > 1:
            point = {"marker": "o", "linestyle": "none", "markersize": _SMALL_MARKER_SIZE, "alpha": 0.6}
            axes.plot(row.ratios, [y] * len(row.ratios), color=colour, **point, label="_seeds")
        if row.interval is not None:
            axes.plot(row.interval, [y, y], color=colour, linewidth=1.4, solid_capstyle="butt", label="_interval")
        axes.plot(ratio, y, color=colour, marker=look.marker, markersize=_MARKER_SIZE, label=row.label)
    trained_at, longest = lengths
    axes.set_xlabel(f"perplexity at {longest} / at {trained_at} tokens")
    _write_number(axes, -1, "ratio")
    about = "bars: 95 % interval" if any(row.interval for row in rows) else ""
    set_title(axes, "\n".join(filter(None, (about, seeds))))


def _draw_perplexities(axes: Axes, rows: Sequence[DotRow], trained_at: int, lengths: Sequence[int], text: str) -> None:
    """Draw the perplexities of each method on a line: hollow at the training length, filled at the longest length."""
    limit = _set_limits(axes, [list(row.perplexities.values()) for row in rows])
    for y, row in enumerate(rows):
        look = FAMILY_LOOKS[row.family]
        colour = COLOURS[look.colour]
        inside = {n: value for n, value in row.perplexities.items() if value <= limit}
        is_beyond = len(inside) < len(row.perplexities)
        if inside:
            end = axes.get_xlim()[1] if is_beyond else max(inside.values())
            axes.plot([min(inside.values()), end], [y, y], color=colour, linewidth=1, alpha=0.5, label="_range")
        for n, value in inside.items():
            point = {"color": colour, "marker": look.marker, "markersize": _MARKER_SIZE, "linestyle": "none"}
            if n not in (trained_at, lengths[-1]):
                point |= {"marker": "o", "markersize": _SMALL_MARKER_SIZE}
            elif n == trained_at:
                point |= {"markerfacecolor": "white"}
            axes.plot(value, y, **point, label=f"_{n}")
        if is_beyond:
            _mark_beyond(axes, y, colour)
        last = row.perplexities.get(lengths[-1])
        _write_number(axes, y, "–" if last is None else format_short(last))
    axes.set_xlabel(f"perplexity per token{', ' * bool(text)}{text}")
    set_title(axes, _points_caption(trained_at, lengths))
    _write_number(axes, -1, f"at {lengths[-1]}")


def _set_limits(axes: Axes, values: Sequence[Sequence[float]], bars: Sequence[float] = ()) -> float:
    """Set the limits of the x axis and return the largest value that is drawn as a point.

    Args:
        axes: panel.
        values: values of each row.
        bars: ends of the error bars of all rows.
    """
    finite = [value for row in values for value in row if math.isfinite(value)]
    if not finite:
        return 0.0
    limit = _BEYOND_RATIO * median(finite)
    beyond = sum(max(row) > limit for row in values)
    if beyond > _MOST_BEYOND * len(values):
        low, high = min(finite), max(finite)
        set_decade_axis(axes, "x")
        is_wide = panel_width(axes) > _WIDE_PANEL
        subs = (1, 2, 5) if is_wide else (1, 3)
        axes.xaxis.set_major_locator(LogLocator(subs=subs if high < _NARROW_RATIO * low else (1,)))
        margin = (high / low) ** 0.05
        axes.set_xlim(low / margin, high * margin)
        return high
    inside = [value for value in finite if value <= limit]
    shown = [*inside, *(end for end in bars if end <= limit)]
    low, high = min(shown), max(shown)
    margin = 0.05 * ((high - low) or 1.0)
    axes.set_xlim(low - margin, high + margin)
    ticks = 5 if panel_width(axes) > _WIDE_PANEL else 2
    axes.xaxis.set_major_locator(MaxNLocator(ticks, steps=[1, 2, 5, 10]))
    return max(inside)


def _mark_beyond(axes: Axes, y: int, colour: str) -> None:
    """Draw an arrow at the right edge of a row."""
    mark = {"marker": ">", "markersize": _MARKER_SIZE + 0.5, "linestyle": "none", "clip_on": False, "zorder": 3}
    axes.plot(1.0, y, color=colour, transform=axes.get_yaxis_transform(), **mark, label="_beyond")


def _write_number(axes: Axes, y: int, text: str) -> None:
    """Write a number to the right of a row; row -1 is the heading of the numbers."""
    axes.annotate(
        text,
        (1.0, y),
        xycoords=axes.get_yaxis_transform(),
        xytext=(_NUMBER_PADDING, 0),
        textcoords="offset points",
        verticalalignment="center",
        fontsize=TICK - 1,
        annotation_clip=False,
    )


def _points_caption(trained_at: int, lengths: Sequence[int]) -> str:
    """Return which points are those of which length."""
    between = [n for n in lengths[:-1] if n != trained_at]
    parts = [f"hollow: {trained_at} tokens"] if trained_at in lengths else []
    if between:
        parts.append(f"small: {between[0]}" if len(between) == 1 else f"small: {between[0]} to {between[-1]}")
    if lengths[-1] != trained_at:
        parts.append(f"filled: {lengths[-1]}")
    caption = ", ".join(parts)
    return caption if len(caption) <= _LONGEST_CAPTION else ",\n".join((parts[0], ", ".join(parts[1:])))


def _add_legend(figure: Figure, rows: Sequence[DotRow]) -> None:
    """Add a legend of the families, and of the arrows if there are any."""
    present = {row.family for row in rows}
    handles = []
    for family, look in FAMILY_LOOKS.items():
        if family in present:
            point = {"color": COLOURS[look.colour], "marker": look.marker, "markersize": _MARKER_SIZE}
            handles.append(Line2D([], [], linestyle="none", **point, label=family))
    if any(line.get_label() == "_beyond" for axes in figure.axes for line in axes.lines):
        arrow = {"color": "0.3", "marker": ">", "markersize": _MARKER_SIZE + 0.5}
        handles.append(Line2D([], [], linestyle="none", **arrow, label="beyond the axis"))
    add_legend(figure, handles=handles, ncols=3, handlelength=1.2)
