"""Figures of index warping.

Source of the quantities: "Improving Length Generalization via Position Index Warping", Eq. 3, 4, 6 to 9.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import NullFormatter
from torch import Tensor

from fairseq_rpe.analysis import index_warping
from fairseq_rpe.analysis.index_warping import (
    TIMES,
    AttentionCurves,
    Curve,
    LengthCurves,
    SensitivityCurves,
    TailCurves,
    TotalDifferences,
    WarpSetting,
)
from fairseq_rpe.figures.style import (
    DASHES,
    NAME,
    PAGE,
    PALETTE,
    TICK,
    add_legend_of,
    assign_looks,
    figure_width,
    panel_columns,
    panels,
    set_title,
)

_MAX_MARKERS = 24  # points of a curve up to which each has a marker
_SKEW_LABELS = {"none": "identity", "sqrt": "tail, sqrt", "beta": "tail, beta"}
_SKEW_COLOURS = {"none": PALETTE[6], "sqrt": PALETTE[0], "beta": PALETTE[1]}
_TEST_COLOURS = {1: PALETTE[6], 2: PALETTE[2], 4: PALETTE[3]}  # by test length / training length


def draw_length_curves(setting: WarpSetting, data: Sequence[LengthCurves]) -> Figure:
    """Draw the paper's Figure 2: exp(raw attention) against distance in texts of 500 and of 1000 tokens.

    Distances that do not occur in training on the shorter texts are in a grey zone.
    """
    columns = panel_columns(len(data), len(data))
    lines = math.ceil(len(data) / columns)
    figure, row = panels(lines, columns, (PAGE, 3.6 if lines == 1 else 2.7 * lines), sharey=True)
    trained = len(data[0].tokens) - 1
    looks = assign_looks(["rope", "alibi"])
    for axes, curves in zip(row, data, strict=True):
        _lower_bound(axes, curves.tokens, named=axes is row[0])
        _plot(axes, curves.tokens, curves.rope, "RoPE", looks["rope"].colour)
        for (head, y), style in zip(curves.alibi.items(), DASHES, strict=False):
            _plot(axes, curves.tokens, y, f"ALiBi, head {head} of 8", looks["alibi"].colour, linestyle=style)
        length = len(curves.tokens) - 1
        if length > trained:
            axes.axvspan(trained, length, color="0.9", zorder=0, label=f"beyond {trained} tokens: not seen in training")
        if curves.interpolated is not None:
            name = f"RoPE, {length} tokens interpolated to {trained}"
            _plot(axes, curves.tokens, curves.interpolated, name, PALETTE[2], linestyle=DASHES[1])
        axes.margins(x=0)
        axes.set(ylim=(-0.06, 2.8), xlabel="distance (tokens)")
        set_title(axes, f"{length} tokens")
    for axes in row[::columns]:
        axes.set_ylabel("exp(raw attention)")
    add_legend_of(figure, row[-1], 3)
    return figure


def draw_interpolated_curves(setting: WarpSetting, data: Mapping[int, Curve]) -> Figure:
    """Draw the paper's Figure A: 100 tokens against 200 and 500 interpolated to 100, two lines in each panel."""
    shortest = min(data)
    longer = {length: curve for length, curve in data.items() if length > shortest}
    columns = panel_columns(len(longer), len(longer))
    lines = math.ceil(len(longer) / columns)
    figure, all_axes = panels(lines, columns, (PAGE, 3.4 if lines == 1 else 2.5 * lines), sharey=True)
    for axes, (length, curve) in zip(all_axes, longer.items(), strict=True):
        _plot(axes, *data[shortest], f"{shortest} tokens", PALETTE[6])
        _plot(axes, *curve, f"interpolated to {shortest} tokens", PALETTE[2], linestyle=DASHES[1])
        axes.margins(x=0)
        axes.set_xlabel("distance (tokens)")
        set_title(axes, f"{length} tokens, RoPE under position interpolation")
    for axes in all_axes[::columns]:
        axes.set_ylabel("exp(raw attention)")
    add_legend_of(figure, all_axes[0], 2)
    return figure


def make_skew_drawer(name: str, title: str, inflection: float | None = None) -> Callable[[WarpSetting, Curve], Figure]:
    """Return a function that draws the paper's Figure 4 or B: f of tail warping and the identity.

    Args:
        name: name of the skew, a key of ``fairseq_rpe.positions.SKEWS``.
        title: label of its line.
        inflection: where f turns from convex to concave, if it does.
    """

    def draw(setting: WarpSetting, data: Curve) -> Figure:
        figure, (axes,) = panels(1, 1, (figure_width(), min(5.0, figure_width() + 0.2)))
        x, y = data
        _plot(axes, x, x, "no warp", _SKEW_COLOURS["none"], linestyle=DASHES[1])
        _plot(axes, x, y, title, _SKEW_COLOURS[name], linewidth=2.0)
        if inflection is not None:
            index = int((x - inflection).abs().argmin())
            mark = {"color": _SKEW_COLOURS[name], "marker": "o", "markersize": 6, "linestyle": "none"}
            label = f"convex up to {inflection:g}, concave from there"
            axes.plot(x[index : index + 1], y[index : index + 1], **mark, label=label)
        axes.set(xlim=(0, 1), ylim=(0, 1.02), xlabel="index over length, $j/l$", ylabel="$f(j/l)$")
        axes.set_box_aspect(1)
        set_title(axes, "The skew of tail warping")
        add_legend_of(figure, axes, 1)
        return figure

    return draw


def draw_attention_curves(setting: WarpSetting, data: AttentionCurves) -> Figure:
    """Draw the paper's Figure 1: exp(raw attention) against distance, with e^-1, which RoPE cannot fall below."""
    figure, (axes,) = panels(1, 1, (figure_width(), 4.0))
    _lower_bound(axes, data.distances)
    looks = assign_looks(["rope", "alibi"])
    for number, (head_width, y) in enumerate(data.rope.items()):
        thick = 2.2 if head_width is None else 0.5 + 0.4 * number
        name = "RoPE, wide head" if head_width is None else f"RoPE, head width {head_width}"
        _plot(axes, data.distances, y, name, looks["rope"].colour, linewidth=thick)
    for (head, y), style in zip(data.alibi.items(), DASHES, strict=True):
        _plot(axes, data.distances, y, f"ALiBi, head {head} of 8", looks["alibi"].colour, linestyle=style)
    axes.margins(x=0)
    axes.set(xscale="log", ylim=(-0.06, 2.8), xlabel="distance (tokens)", ylabel="exp(raw attention)")
    set_title(axes, "Raw attention over distance")
    add_legend_of(figure, axes, 2)
    return figure


def draw_sensitivity_curves(setting: WarpSetting, data: Sequence[SensitivityCurves]) -> Figure:
    """Draw the absolute sensitivity (Eq. 6) at all positions, and the sensitivity at the last tokens."""
    columns = panel_columns(2, 2)
    figure, (left, right) = panels(2 // columns, columns, (PAGE, 3.4 if columns == 2 else 5.4))
    averaged = [(curves.times, curves.single) for curves in data if curves.single]
    for times, curve in averaged:
        _plot(left, *curve, "_", _TEST_COLOURS[times], linewidth=0.5, alpha=0.35)
    for curves in data:
        _plot(left, *curves.size, _test_label(setting, curves.times), _TEST_COLOURS[curves.times])
        _plot_from_the_end(right, setting, curves.times, curves.tail)
    seen = torch.cat([curves.size[1] for curves in data])
    left.set(xscale="log", yscale="log", ylim=(seen[seen > 0].min().item() / 5, seen.max().item() * 3))
    left.xaxis.set_minor_formatter(NullFormatter())
    set_title(left, "All positions (thick: mean over one wave)" if averaged else "All positions")
    left.set_xlabel("position p (tokens)")
    left.set_ylabel(f"|sensitivity| per token\nof {setting.unit}")
    set_title(right, "The last tokens, linear")
    right.set(ylabel=f"sensitivity per token\nof {setting.unit}")
    _counted_from_the_end(right)
    add_legend_of(figure, right)
    return figure


def draw_tail_curves(setting: WarpSetting, data: Sequence[TailCurves]) -> Figure:
    """Draw sensitivity in training and in tests, aligned at the last token: a panel for each skew, on one scale."""
    figure, rows = panels(len(data), 1, (PAGE, 1.9 * len(data) + 0.7), sharex=True, sharey=True)
    for axes, curves in zip(rows, data, strict=True):
        for times, y in curves.by_times.items():
            _plot_from_the_end(axes, setting, times, y, linewidth=1.6 if times == 1 else 1.2)
        sums = ", ".join(f"{value:.3g} at {t}×" for value, t in zip(curves.sums, TIMES, strict=True))
        set_title(axes, f"{_SKEW_LABELS[curves.skew]}: total difference (c = {setting.tail_length}) {sums}")
    _counted_from_the_end(rows[-1])
    figure.supylabel(f"sensitivity of {setting.unit}, per token", fontsize=NAME)
    add_legend_of(figure, rows[0])
    return figure


def draw_warped_positions(setting: WarpSetting, data: Mapping[str, Tensor]) -> Figure:
    """Draw position p_j (Eq. 7, 8) against index j, both in tokens."""
    length = setting.train_length
    figure, (axes,) = panels(1, 1, (figure_width(), min(5.2, figure_width() + 0.4)))
    j = torch.arange(length + 1, dtype=torch.float64)
    for skew, p in data.items():
        _plot(axes, j, p, _SKEW_LABELS[skew], _SKEW_COLOURS[skew])
    for factor, colour, style in zip((2, 4, 6, 8), PALETTE[2:], (*DASHES[1:], DASHES[1]), strict=False):
        _plot(axes, j, j / factor, f"head, α = 1/{factor}", colour, linestyle=style)
    set_title(axes, f"Warped positions, training length {length}")
    axes.set(xlim=(0, length), ylim=(0, length * 1.02), xlabel="index j (tokens)", ylabel="position $p_j$ (tokens)")
    axes.set_box_aspect(1)
    add_legend_of(figure, axes)
    return figure


def draw_total_differences(setting: WarpSetting, data: Sequence[TotalDifferences]) -> Figure:
    """Draw total differences (Eq. 9) against test length / training length: computed lines and published points."""
    columns = panel_columns(len(data), len(data))
    lines = math.ceil(len(data) / columns)
    figure, all_axes = panels(lines, columns, (PAGE, 3.6 if lines == 1 else 2.7 * lines), sharey=True)
    for axes, curves in zip(all_axes, data, strict=True):
        for skew, sums in curves.sums.items():
            name, colour = _SKEW_LABELS[skew], _SKEW_COLOURS[skew]
            _plot(axes, curves.times, sums, name, colour)
            dots = {"marker": "o", "markersize": 7, "markerfacecolor": "white", "markeredgewidth": 1.6}
            look = {**dots, "linestyle": "none", "markeredgecolor": colour}
            axes.plot(TIMES, curves.published[skew], **look, label=f"{name}, published")
        set_title(axes, f"training length {curves.train_length}, c = {curves.tail_length}")
        axes.set_xlabel("test length / training length")
        axes.set_ylim(bottom=0)
    for axes in all_axes[::columns]:
        axes.set_ylabel(f"total difference\nof {setting.unit}")
    add_legend_of(figure, all_axes[0])
    return figure


def _compute_skew(name: str) -> Callable[[WarpSetting], Curve]:
    return lambda setting: index_warping.skew_curve(name)


# file name -> functions that compute and draw a figure; the paper's figures, by their numbers, come first
FIGURES: dict[str, tuple[Callable[[WarpSetting], Any], Callable[[WarpSetting, Any], Figure]]] = {
    "figure-1-attention-over-distance": (index_warping.attention_curves, draw_attention_curves),
    "figure-2-raw-attention": (index_warping.length_curves, draw_length_curves),
    "figure-4-beta-cdf": (_compute_skew("beta"), make_skew_drawer("beta", "CDF of Beta(2, 5)", 0.2)),
    "figure-A-interpolation": (index_warping.interpolated_curves, draw_interpolated_curves),
    "figure-B-square-root": (_compute_skew("sqrt"), make_skew_drawer("sqrt", "square root")),
    "sensitivity-over-position": (index_warping.sensitivity_curves, draw_sensitivity_curves),
    "sensitivity-at-the-end": (index_warping.tail_curves, draw_tail_curves),
    "warped-positions": (index_warping.warped_curves, draw_warped_positions),
    "total-difference": (index_warping.total_difference_curves, draw_total_differences),
}


def _lower_bound(axes: Axes, distances: Tensor, named: bool = True) -> None:
    """Draw e^-1 as a line, below which exp(raw attention) of RoPE cannot fall."""
    axes.axhline(math.exp(-1), color="0.35", linestyle=(0, (1, 1.5)), linewidth=1.2)
    position = (distances.max().item() / 1.2, math.exp(-1) - 0.03)
    look = {"fontsize": TICK, "color": "0.25", "horizontalalignment": "right", "verticalalignment": "top"}
    if named:
        axes.text(*position, "$e^{-1}$, RoPE's lower bound", **look)


def _test_label(setting: WarpSetting, times: int) -> str:
    """Return the legend entry of a test at ``times`` the training length."""
    tokens = f"{times * setting.train_length} tokens"
    return f"training, {tokens}" if times == 1 else f"interpolated, {times}× ({tokens})"


def _plot(axes: Axes, x: Tensor, y: Tensor, label: str, colour: str, **look: Any) -> None:
    marker = "." if len(x) < _MAX_MARKERS else None
    axes.plot(x, y, label=label, color=colour, marker=marker, **{"linewidth": 1.6, **look})


def _plot_from_the_end(axes: Axes, setting: WarpSetting, times: int, y: Tensor, **look: Any) -> None:
    """Draw values of the last tokens against the number of tokens after each."""
    _plot(axes, torch.arange(len(y) - 1, -1, -1), y, _test_label(setting, times), _TEST_COLOURS[times], **look)
    axes.ticklabel_format(axis="y", style="sci", scilimits=(-2, 3), useMathText=True)


def _counted_from_the_end(axes: Axes) -> None:
    """Reverse the x axis, so that the last token is at the right."""
    low, high = axes.dataLim.intervalx
    axes.set_xlim(high + 0.01 * (high - low), low - 0.01 * (high - low))
    axes.set_xlabel("tokens before the last one")
