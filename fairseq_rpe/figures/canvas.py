"""Blank panels and the lines on them, with which the figures here begin; no style of the process is touched."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure  # rather than pyplot: no backend is chosen and nothing is left open
from torch import Tensor

from .style import looks

_BESIDE: dict[str, Any] = {"loc": "upper left", "bbox_to_anchor": (1.01, 1.0), "frameon": False, "fontsize": "small"}
_BELOW: dict[str, Any] = {"loc": "outside lower center", "ncols": 3, "frameon": False, "fontsize": "small"}


@dataclass(frozen=True)
class Line:
    """One curve: x and y (m,), what the legend calls it ("" leaves it out), and how it looks."""

    x: Tensor
    y: Tensor
    label: str
    colour: str
    style: Any = "-"
    width: float = 1.6
    alpha: float = 1.0


def panels(rows: int, columns: int, size: tuple[float, float], **shared: Any) -> tuple[Figure, list[Axes]]:
    """A figure of ``size`` in inches and its panels, row by row."""
    figure = Figure(figsize=size, layout="constrained")
    return figure, list(figure.subplots(rows, columns, squeeze=False, **shared).flat)


def gridded(rows: int, columns: int, size: tuple[float, float], **shared: Any) -> tuple[Figure, list[Axes]]:
    """:func:`panels` with a pale grid."""
    figure, made = panels(rows, columns, size, **shared)
    for axes in made:
        axes.grid(alpha=0.25)
    return figure, made


def plot(axes: Axes, line: Line, **how: Any) -> None:
    axes.plot(
        line.x,
        line.y,
        color=line.colour,
        linestyle=line.style,
        linewidth=line.width,
        alpha=line.alpha,
        label=line.label or "_",
        **how,
    )


def legend_beside(axes: Axes, **how: Any) -> None:
    axes.legend(**_BESIDE, **how)


def legend_below(figure: Figure, axes: Axes) -> None:
    """One legend for all panels, with the lines of ``axes``."""
    figure.legend(*axes.get_legend_handles_labels(), **_BELOW, handlelength=2.6)


def heads_of(curves: Mapping[str, Sequence[tuple[Tensor, Tensor]]]) -> list[Line]:
    """Lines for the heads, (x, y) each, of several encodings in the look of each: the first thick, the others thin."""
    shown = looks(list(curves))
    lines = []
    for name, heads in curves.items():
        label = name if len(heads) == 1 else f"{name}, {len(heads)} heads (thick: the first)"
        for i, (x, y) in enumerate(heads):
            called, width, alpha = ("", 0.9, 0.6) if i else (label, 1.9, 1.0)
            lines.append(Line(x, y, called, shown[name].colour, shown[name].dashes, width, alpha))
    return lines
