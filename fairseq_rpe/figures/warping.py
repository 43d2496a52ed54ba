"""Draws the figures on index warping.

Source of the quantities: "Improving Length Generalization via Position Index Warping", Eq. 3, 4, 6 to 9.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import torch
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import NullFormatter
from torch import Tensor

from ..analysis import index_warping
from ..analysis.index_warping import TIMES, Attention, Differences, Falling, Setting, Tail
from .canvas import Line, gridded, legend_below, legend_beside, plot
from .style import PALETTE

_MARKED = 24  # fewer points than this are shown one by one
_SKEWS = {"none": ("identity", PALETTE[6]), "sqrt": ("tail, sqrt", PALETTE[0]), "beta": ("tail, beta", PALETTE[1])}
_TESTS = {1: PALETTE[6], 2: PALETTE[2], 4: PALETTE[3]}


def attention(setting: Setting, found: Attention) -> Figure:
    """exp(raw attention) against distance in tokens, with the level e^-1 that RoPE cannot fall below."""
    figure, (axes,) = gridded(1, 1, (7.6, 4.2))
    axes.axhline(math.exp(-1), color="0.35", linestyle=(0, (1, 1.5)), linewidth=1.2)
    axes.text(
        found.distances.max().item() / 1.2,
        math.exp(-1) - 0.03,
        "$e^{-1}$, RoPE's lower bound",
        fontsize="small",
        color="0.25",
        horizontalalignment="right",
        verticalalignment="top",
    )
    looks = {64: (PALETTE[5], 0.8), 128: (PALETTE[0], 0.8), None: (PALETTE[6], 1.6)}
    for width, y in found.rope.items():
        colour, thick = looks.get(width, ("0.75", 0.8))
        name = "RoPE, wide head" if width is None else f"RoPE, head width {width}"
        _plot(axes, Line(found.distances, y, name, colour, width=thick))
    styles = ((PALETTE[1], "--"), (PALETTE[4], "-."), (PALETTE[2], (0, (5, 1))), (PALETTE[3], ":"))
    for (head, y), (colour, style) in zip(found.alibi.items(), styles, strict=True):
        _plot(axes, Line(found.distances, y, f"ALiBi, head {head} of 8", colour, style))
    axes.set_xscale("log")
    axes.margins(x=0)
    axes.set_ylim(-0.06, 2.8)
    axes.set_title("Raw attention over distance")
    axes.set_xlabel("distance (tokens)")
    axes.set_ylabel("exp(raw attention)")
    legend_beside(axes, handlelength=2.6)
    return figure


def falling(setting: Setting, found: Sequence[Falling]) -> Figure:
    """Size of the sensitivity (Eq. 6) over all positions, and sensitivity at the last tokens."""
    figure, (left, right) = gridded(1, 2, (9.6, 4.2))
    averaged = [(one.times, one.single) for one in found if one.single]
    for times, curve in averaged:
        _plot(left, Line(*curve, "", _TESTS[times], width=0.5, alpha=0.35))
    for one in found:
        _plot(left, Line(*one.size, _test(setting, one.times), _TESTS[one.times]))
        _plot(right, _from_the_end(one.tail, _test(setting, one.times), _TESTS[one.times]))
    left.set_xscale("log")
    left.set_yscale("log")
    seen = torch.cat([one.size[1] for one in found])
    left.set_ylim(seen[seen > 0].min().item() / 5, seen.max().item() * 3)
    left.xaxis.set_minor_formatter(NullFormatter())
    left.set_title("All positions (thick: mean over one wave)" if averaged else "All positions")
    left.set_xlabel(f"position p (0 to {setting.train_length} training tokens)")
    left.set_ylabel(f"|sensitivity| of {setting.unit}, per token")
    _plain_scale(right)
    right.set_title("The last tokens")
    right.set_ylabel(f"sensitivity of {setting.unit}, per token")
    _counted_from_the_end(right)
    legend_below(figure, right)
    return figure


def tails(setting: Setting, found: Sequence[Tail]) -> Figure:
    """Sensitivity in training against that in tests, aligned at the last token: a panel for each skew, one scale."""
    figure, rows = gridded(len(found), 1, (7.6, 2.3 * len(found) + 0.7), sharex=True, sharey=True)
    for axes, one in zip(rows, found, strict=True):
        for times, y in one.at.items():
            thick = 1.6 if times == 1 else 1.2
            _plot(axes, _from_the_end(y, _test(setting, times), _TESTS[times], thick))
        sums = ", ".join(f"{value:.3g} at {t}×" for value, t in zip(one.sums, TIMES, strict=True))
        axes.set_title(f"{_SKEWS[one.skew][0]}: total difference (c = {one.reach}) {sums}")
        _plain_scale(axes)
    _counted_from_the_end(rows[-1])
    figure.supylabel(f"sensitivity of {setting.unit}, per token", fontsize="medium")
    legend_below(figure, rows[0])
    return figure


def warps(setting: Setting, found: Mapping[str, Tensor]) -> Figure:
    """Position p_j (Eq. 7, 8) against index j, both in tokens."""
    length = setting.train_length
    figure, (axes,) = gridded(1, 1, (6.2, 4.4))
    j = torch.arange(length + 1, dtype=torch.float64)
    for skew, p in found.items():
        _plot(axes, Line(j, p, *_SKEWS[skew]))
    for part, colour, style in ((2, 2, "--"), (4, 3, "-."), (6, 4, (0, (5, 1))), (8, 5, ":")):
        _plot(axes, Line(j, j / part, f"head, α = 1/{part}", PALETTE[colour], style))
    axes.set_title(f"Warped positions, training length {length}")
    axes.set_xlabel("index j (tokens)")
    axes.set_ylabel("position $p_j$ (tokens)")
    axes.set_xlim(0, length)
    axes.set_ylim(0, length * 1.02)
    axes.set_box_aspect(1)
    legend_beside(axes, handlelength=2.6)
    return figure


def differences(setting: Setting, found: Sequence[Differences]) -> Figure:
    """Total difference (Eq. 9) against test length / training length: lines computed, with them published points."""
    figure, columns = gridded(1, len(found), (4.6 * len(found), 4.2))
    for axes, one in zip(columns, found, strict=True):
        for skew, sums in one.sums.items():
            name, colour = _SKEWS[skew]
            _plot(axes, Line(one.times, sums, name, colour))
            axes.plot(
                TIMES,
                one.published[skew],
                linestyle="none",
                marker="o",
                markersize=7,
                markerfacecolor="white",
                markeredgecolor=colour,
                markeredgewidth=1.6,
                label=f"{name}, published",
            )
        axes.set_title(f"training length {one.train_length}, c = {one.reach}")
        axes.set_xlabel("test length / training length")
        axes.set_ylim(bottom=0)
    columns[0].set_ylabel(f"total difference of {setting.unit}")
    legend_below(figure, columns[0])
    return figure


# file -> what is computed of a setting, and how it is drawn
FIGURES = {
    "fig1": (index_warping.attention, attention),
    "fig2": (index_warping.falling, falling),
    "fig4": (index_warping.tails, tails),
    "figA": (index_warping.warps, warps),
    "figB": (index_warping.differences, differences),
}


def _test(setting: Setting, times: int) -> str:
    tokens = f"{times * setting.train_length} tokens"
    return f"training, {tokens}" if times == 1 else f"interpolated, {times}× ({tokens})"


def _from_the_end(y: Tensor, label: str, colour: str, width: float = 1.6) -> Line:
    return Line(torch.arange(len(y) - 1, -1, -1), y, label, colour, width=width)


def _plot(axes: Axes, line: Line) -> None:
    plot(axes, line, marker="." if len(line.x) < _MARKED else None)


def _plain_scale(axes: Axes) -> None:
    axes.ticklabel_format(axis="y", style="sci", scilimits=(-2, 3), useMathText=True)


def _counted_from_the_end(axes: Axes) -> None:
    low, high = axes.dataLim.intervalx
    axes.set_xlim(high + 0.01 * (high - low), low - 0.01 * (high - low))
    axes.set_xlabel("tokens before the last one")
