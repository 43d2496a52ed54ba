"""Draws the figures on index warping.

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
from fairseq_rpe.analysis.index_warping import TIMES, Attention, Curve, Differences, Falling, Length, Setting, Tail
from fairseq_rpe.figures.style import (
    DASHES,
    NAME,
    PAGE,
    PALETTE,
    TICK,
    across,
    legend_below,
    looks,
    panels,
    titled,
    width,
)

_MARKED = 24  # fewer points than this are shown one by one
_SKEWS = {"none": ("identity", PALETTE[6]), "sqrt": ("tail, sqrt", PALETTE[0]), "beta": ("tail, beta", PALETTE[1])}
_TESTS = {1: PALETTE[6], 2: PALETTE[2], 4: PALETTE[3]}


def two_lengths(setting: Setting, found: Sequence[Length]) -> Figure:
    """The paper's Figure 2: exp(raw attention) against distance in texts of 500 tokens and of 1000.

    Distances that a model trained on the shorter texts has never seen are in a grey zone.
    """
    columns = across(len(found), len(found))
    lines = -(-len(found) // columns)
    figure, row = panels(lines, columns, (PAGE, 3.6 if lines == 1 else 2.7 * lines), sharey=True)
    trained = len(found[0].tokens) - 1
    own = looks(["rope", "alibi"])
    for axes, one in zip(row, found, strict=True):
        _lower_bound(axes, one.tokens, named=axes is row[0])
        _plot(axes, one.tokens, one.rope, "RoPE", own["rope"].colour)
        for (head, y), style in zip(one.alibi.items(), DASHES, strict=False):
            _plot(axes, one.tokens, y, f"ALiBi, head {head} of 8", own["alibi"].colour, linestyle=style)
        length = len(one.tokens) - 1
        if length > trained:
            axes.axvspan(trained, length, color="0.9", zorder=0, label=f"beyond {trained} tokens: not seen in training")
        if one.squeezed is not None:
            name = f"RoPE, {length} tokens interpolated to {trained}"
            _plot(axes, one.tokens, one.squeezed, name, PALETTE[2], linestyle=DASHES[1])
        axes.margins(x=0)
        axes.set(ylim=(-0.06, 2.8), xlabel="distance (tokens)")
        titled(axes, f"{length} tokens")
    for axes in row[::columns]:
        axes.set_ylabel("exp(raw attention)")
    legend_below(figure, row[-1], 3)
    return figure


def squeezed(setting: Setting, found: Mapping[int, Curve]) -> Figure:
    """The paper's Figure A: 100 tokens against position interpolation of 200 and of 500; two lines in each panel."""
    shortest = min(found)
    longer = {length: curve for length, curve in found.items() if length > shortest}
    columns = across(len(longer), len(longer))
    lines = -(-len(longer) // columns)
    figure, made = panels(lines, columns, (PAGE, 3.4 if lines == 1 else 2.5 * lines), sharey=True)
    for axes, (length, curve) in zip(made, longer.items(), strict=True):
        _plot(axes, *found[shortest], f"{shortest} tokens", PALETTE[6])
        _plot(axes, *curve, f"interpolated to {shortest} tokens", PALETTE[2], linestyle=DASHES[1])
        axes.margins(x=0)
        axes.set_xlabel("distance (tokens)")
        titled(axes, f"{length} tokens, RoPE under position interpolation")
    for axes in made[::columns]:
        axes.set_ylabel("exp(raw attention)")
    legend_below(figure, made[0], 2)
    return figure


def skew(name: str, title: str, turn: float | None = None) -> Callable[[Setting, Curve], Figure]:
    """The paper's Figures 4 and B: f of tail warping beside the identity; ``turn``: where it stops being convex."""

    def draw(setting: Setting, found: Curve) -> Figure:
        figure, (axes,) = panels(1, 1, (width(), min(5.0, width() + 0.2)))
        x, y = found
        _plot(axes, x, x, "no warp", _SKEWS["none"][1], linestyle=DASHES[1])
        _plot(axes, x, y, title, _SKEWS[name][1], linewidth=2.0)
        if turn is not None:
            at = int((x - turn).abs().argmin())
            look = {"color": _SKEWS[name][1], "marker": "o", "markersize": 6, "linestyle": "none"}
            axes.plot(x[at : at + 1], y[at : at + 1], **look, label=f"convex up to {turn:g}, concave from there")
        axes.set(xlim=(0, 1), ylim=(0, 1.02), xlabel="index over length, $j/l$", ylabel="$f(j/l)$")
        axes.set_box_aspect(1)
        titled(axes, "The skew of tail warping")
        legend_below(figure, axes, 1)
        return figure

    return draw


def attention(setting: Setting, found: Attention) -> Figure:
    """The paper's Figure 1: exp(raw attention) against distance, with the level e^-1 that RoPE cannot fall below."""
    figure, (axes,) = panels(1, 1, (width(), 4.0))
    _lower_bound(axes, found.distances)
    own = looks(["rope", "alibi"])
    for (head_width, y), thick in zip(found.rope.items(), (0.5, 0.9, 2.2), strict=False):
        name = "RoPE, wide head" if head_width is None else f"RoPE, head width {head_width}"
        _plot(axes, found.distances, y, name, own["rope"].colour, linewidth=thick)
    for (head, y), style in zip(found.alibi.items(), DASHES, strict=True):
        _plot(axes, found.distances, y, f"ALiBi, head {head} of 8", own["alibi"].colour, linestyle=style)
    axes.margins(x=0)
    axes.set(xscale="log", ylim=(-0.06, 2.8), xlabel="distance (tokens)", ylabel="exp(raw attention)")
    titled(axes, "Raw attention over distance")
    legend_below(figure, axes, 2)
    return figure


def falling(setting: Setting, found: Sequence[Falling]) -> Figure:
    """Size of the sensitivity (Eq. 6) over all positions, and sensitivity at the last tokens."""
    columns = across(2, 2)
    figure, (left, right) = panels(2 // columns, columns, (PAGE, 3.4 if columns == 2 else 5.4))
    averaged = [(one.times, one.single) for one in found if one.single]
    for times, curve in averaged:
        _plot(left, *curve, "_", _TESTS[times], linewidth=0.5, alpha=0.35)
    for one in found:
        _plot(left, *one.size, _test(setting, one.times), _TESTS[one.times])
        _plot_from_the_end(right, setting, one.times, one.tail)
    seen = torch.cat([one.size[1] for one in found])
    left.set(xscale="log", yscale="log", ylim=(seen[seen > 0].min().item() / 5, seen.max().item() * 3))
    left.xaxis.set_minor_formatter(NullFormatter())
    titled(left, "All positions (thick: mean over one wave)" if averaged else "All positions")
    left.set_xlabel("position p (tokens)")
    left.set_ylabel(f"|sensitivity| per token\nof {setting.unit}")
    titled(right, "The last tokens, linear")
    right.set(ylabel=f"sensitivity per token\nof {setting.unit}")
    _counted_from_the_end(right)
    legend_below(figure, right)
    return figure


def tails(setting: Setting, found: Sequence[Tail]) -> Figure:
    """Sensitivity in training against that in tests, aligned at the last token: a panel for each skew, one scale."""
    figure, rows = panels(len(found), 1, (PAGE, 1.9 * len(found) + 0.7), sharex=True, sharey=True)
    for axes, one in zip(rows, found, strict=True):
        for times, y in one.at.items():
            _plot_from_the_end(axes, setting, times, y, linewidth=1.6 if times == 1 else 1.2)
        sums = ", ".join(f"{value:.3g} at {t}×" for value, t in zip(one.sums, TIMES, strict=True))
        titled(axes, f"{_SKEWS[one.skew][0]}: total difference (c = {setting.reach}) {sums}")
    _counted_from_the_end(rows[-1])
    figure.supylabel(f"sensitivity of {setting.unit}, per token", fontsize=NAME)
    legend_below(figure, rows[0])
    return figure


def warps(setting: Setting, found: Mapping[str, Tensor]) -> Figure:
    """Position p_j (Eq. 7, 8) against index j, both in tokens."""
    length = setting.train_length
    figure, (axes,) = panels(1, 1, (width(), min(5.2, width() + 0.4)))
    j = torch.arange(length + 1, dtype=torch.float64)
    for skew, p in found.items():
        _plot(axes, j, p, *_SKEWS[skew])
    for part, colour, style in zip((2, 4, 6, 8), PALETTE[2:], (*DASHES[1:], DASHES[1]), strict=False):
        _plot(axes, j, j / part, f"head, α = 1/{part}", colour, linestyle=style)
    titled(axes, f"Warped positions, training length {length}")
    axes.set(xlim=(0, length), ylim=(0, length * 1.02), xlabel="index j (tokens)", ylabel="position $p_j$ (tokens)")
    axes.set_box_aspect(1)
    legend_below(figure, axes)
    return figure


def differences(setting: Setting, found: Sequence[Differences]) -> Figure:
    """Total difference (Eq. 9) against test length / training length: lines computed, with them published points."""
    columns = across(len(found), len(found))
    lines = -(-len(found) // columns)
    figure, made = panels(lines, columns, (PAGE, 3.6 if lines == 1 else 2.7 * lines), sharey=True)
    for axes, one in zip(made, found, strict=True):
        for skew, sums in one.sums.items():
            name, colour = _SKEWS[skew]
            _plot(axes, one.times, sums, name, colour)
            dots = {"marker": "o", "markersize": 7, "markerfacecolor": "white", "markeredgewidth": 1.6}
            look = {**dots, "linestyle": "none", "markeredgecolor": colour}
            axes.plot(TIMES, one.published[skew], **look, label=f"{name}, published")
        titled(axes, f"training length {one.train_length}, c = {one.reach}")
        axes.set_xlabel("test length / training length")
        axes.set_ylim(bottom=0)
    for axes in made[::columns]:
        axes.set_ylabel(f"total difference\nof {setting.unit}")
    legend_below(figure, made[0])
    return figure


def _of_skew(name: str) -> Callable[[Setting], Curve]:
    return lambda setting: index_warping.skew(name)


# file -> what is computed of a setting, and how it is drawn; first the paper's figures, by their numbers
FIGURES: dict[str, tuple[Callable[[Setting], Any], Callable[[Setting, Any], Figure]]] = {
    "figure-1-attention-over-distance": (index_warping.attention, attention),
    "figure-2-raw-attention": (index_warping.two_lengths, two_lengths),
    "figure-4-beta-cdf": (_of_skew("beta"), skew("beta", "CDF of Beta(2, 5)", 0.2)),
    "figure-A-interpolation": (index_warping.squeezed, squeezed),
    "figure-B-square-root": (_of_skew("sqrt"), skew("sqrt", "square root")),
    "sensitivity-over-position": (index_warping.falling, falling),
    "sensitivity-at-the-end": (index_warping.tails, tails),
    "warped-positions": (index_warping.warps, warps),
    "total-difference": (index_warping.differences, differences),
}


def _lower_bound(axes: Axes, distances: Tensor, named: bool = True) -> None:
    axes.axhline(math.exp(-1), color="0.35", linestyle=(0, (1, 1.5)), linewidth=1.2)
    place = (distances.max().item() / 1.2, math.exp(-1) - 0.03)
    look = {"fontsize": TICK, "color": "0.25", "horizontalalignment": "right", "verticalalignment": "top"}
    if named:
        axes.text(*place, "$e^{-1}$, RoPE's lower bound", **look)


def _test(setting: Setting, times: int) -> str:
    tokens = f"{times * setting.train_length} tokens"
    return f"training, {tokens}" if times == 1 else f"interpolated, {times}× ({tokens})"


def _plot(axes: Axes, x: Tensor, y: Tensor, label: str, colour: str, **look: Any) -> None:
    marker = "." if len(x) < _MARKED else None
    axes.plot(x, y, label=label, color=colour, marker=marker, **{"linewidth": 1.6, **look})


def _plot_from_the_end(axes: Axes, setting: Setting, times: int, y: Tensor, **look: Any) -> None:
    _plot(axes, torch.arange(len(y) - 1, -1, -1), y, _test(setting, times), _TESTS[times], **look)
    axes.ticklabel_format(axis="y", style="sci", scilimits=(-2, 3), useMathText=True)


def _counted_from_the_end(axes: Axes) -> None:
    low, high = axes.dataLim.intervalx
    axes.set_xlim(high + 0.01 * (high - low), low - 0.01 * (high - low))
    axes.set_xlabel("tokens before the last one")
