"""Draws the figures on index warping from numbers: nothing is computed here, and no style of the process is touched.

Source of the quantities: "Improving Length Generalization via Position Index Warping", Eq. 3, 4, 6 to 9. Every function
returns a matplotlib ``Figure``; :func:`save` writes it.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import Tensor

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_MARKED = 24  # fewer points than this are shown one by one


@dataclass(frozen=True)
class Line:
    """One curve: x and y (m,), what the legend calls it ("" leaves it out), and how it looks."""

    x: Tensor
    y: Tensor
    label: str
    colour: str
    style: str = "-"
    width: float = 1.6
    alpha: float = 1.0


def attention(lines: Sequence[Line]) -> Figure:
    """exp(raw attention) against distance in tokens, with the level e^-1 that RoPE cannot fall below."""
    figure, (axes,) = _panels(1, 1, (7.6, 4.2))
    axes.axhline(math.exp(-1), color="0.35", linestyle=(0, (1, 1.5)), linewidth=1.2)
    right = max(line.x.max().item() for line in lines)
    axes.text(
        right / 1.2,
        math.exp(-1) - 0.03,
        "$e^{-1}$, RoPE's lower bound",
        fontsize="small",
        color="0.25",
        horizontalalignment="right",
        verticalalignment="top",
    )
    for line in lines:
        _plot(axes, line)
    axes.set_xscale("log")
    axes.margins(x=0)
    axes.set_ylim(-0.06, 2.8)
    axes.set_title("Raw attention over distance")
    axes.set_xlabel("distance (tokens)")
    axes.set_ylabel("exp(raw attention)")
    _legend_beside(axes)
    return figure


def interpolation(whole: Sequence[Line], tail: Sequence[Line], train_length: int, unit: str) -> Figure:
    """Size of the sensitivity (Eq. 6) over all positions, and sensitivity at the last tokens; ``unit`` names its scale.

    The labelled lines of ``whole`` set the range that is shown.
    """
    from matplotlib.ticker import NullFormatter

    figure, (left, right) = _panels(1, 2, (9.6, 4.2))
    for axes, lines in ((left, whole), (right, tail)):
        for line in lines:
            _plot(axes, line)
    left.set_xscale("log")
    left.set_yscale("log")
    seen = torch.cat([line.y for line in whole if line.label])
    left.set_ylim(seen[seen > 0].min().item() / 5, seen.max().item() * 3)
    left.xaxis.set_minor_formatter(NullFormatter())
    averaged = any(not line.label for line in whole)
    left.set_title("All positions (thick: mean over one wave)" if averaged else "All positions")
    left.set_xlabel(f"position p (0 to {train_length} training tokens)")
    left.set_ylabel(f"|sensitivity| of {unit}, per token")
    _plain_scale(right)
    right.set_title("The last tokens")
    right.set_ylabel(f"sensitivity of {unit}, per token")
    _counted_from_the_end(right)
    _legend_below(figure, right)
    return figure


def tails(panels: Mapping[str, Sequence[Line]], unit: str) -> Figure:
    """Sensitivity in training against that in tests, aligned at the last token: a panel for each skew, one scale."""
    figure, rows = _panels(len(panels), 1, (7.6, 2.3 * len(panels) + 0.7), sharex=True, sharey=True)
    for axes, (title, lines) in zip(rows, panels.items(), strict=True):
        for line in lines:
            _plot(axes, line)
        axes.set_title(title)
        _plain_scale(axes)
    _counted_from_the_end(rows[-1])
    figure.supylabel(f"sensitivity of {unit}, per token", fontsize="medium")
    _legend_below(figure, rows[0])
    return figure


def warps(lines: Sequence[Line], train_length: int) -> Figure:
    """Position p_j (Eq. 7, 8) against index j, both in tokens."""
    figure, (axes,) = _panels(1, 1, (6.2, 4.4))
    for line in lines:
        _plot(axes, line)
    axes.set_title(f"Warped positions, training length {train_length}")
    axes.set_xlabel("index j (tokens)")
    axes.set_ylabel("position $p_j$ (tokens)")
    axes.set_xlim(0, train_length)
    axes.set_ylim(0, train_length * 1.02)
    axes.set_box_aspect(1)
    _legend_beside(axes)
    return figure


def differences(panels: Mapping[str, Sequence[tuple[Line, Line]]], unit: str) -> Figure:
    """Total difference (Eq. 9) against test length / training length: lines computed, with them published points."""
    figure, columns = _panels(1, len(panels), (4.6 * len(panels), 4.2))
    for axes, (title, pairs) in zip(columns, panels.items(), strict=True):
        for line, published in pairs:
            _plot(axes, line)
            axes.plot(
                published.x,
                published.y,
                linestyle="none",
                marker="o",
                markersize=7,
                markerfacecolor="white",
                markeredgecolor=published.colour,
                markeredgewidth=1.6,
                label=published.label,
            )
        axes.set_title(title)
        axes.set_xlabel("test length / training length")
        axes.set_ylim(bottom=0)
    columns[0].set_ylabel(f"total difference of {unit}")
    _legend_below(figure, columns[0])
    return figure


def save(figure: Figure, path: Path) -> None:
    """Write in the format of the path's ending; the same numbers give the same bytes."""
    figure.savefig(path, dpi=160, metadata={"CreationDate": None} if path.suffix == ".pdf" else None)


def _panels(rows: int, columns: int, size: tuple[float, float], **shared: bool) -> tuple[Figure, list[Axes]]:
    # Figure itself rather than pyplot: no backend is chosen and nothing is left open.
    from matplotlib.figure import Figure

    figure = Figure(figsize=size, layout="constrained")
    panels = list(figure.subplots(rows, columns, squeeze=False, **shared).flat)
    for axes in panels:
        axes.grid(alpha=0.25)
    return figure, panels


def _plot(axes: Axes, line: Line) -> None:
    axes.plot(
        line.x,
        line.y,
        color=line.colour,
        linestyle=line.style,
        linewidth=line.width,
        alpha=line.alpha,
        marker="." if len(line.x) < _MARKED else None,
        label=line.label or "_",
    )


def _plain_scale(axes: Axes) -> None:
    axes.ticklabel_format(axis="y", style="sci", scilimits=(-2, 3), useMathText=True)


def _counted_from_the_end(axes: Axes) -> None:
    low, high = axes.dataLim.intervalx
    axes.set_xlim(high + 0.01 * (high - low), low - 0.01 * (high - low))
    axes.set_xlabel("tokens before the last one")


def _legend_beside(axes: Axes) -> None:
    axes.legend(loc="upper left", bbox_to_anchor=(1.01, 1.0), frameon=False, fontsize="small", handlelength=2.6)


def _legend_below(figure: Figure, axes: Axes) -> None:
    handles, labels = axes.get_legend_handles_labels()
    figure.legend(
        handles, labels, loc="outside lower center", ncols=3, frameon=False, fontsize="small", handlelength=2.6
    )
