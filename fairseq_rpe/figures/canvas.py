"""Blank panels with a pale grid, and the legends beside and below them; no style of the process is touched."""

from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure  # rather than pyplot: no backend is chosen and nothing is left open

_PLAIN: dict[str, Any] = {"frameon": False, "fontsize": "small"}


def panels(
    rows: int, columns: int, size: tuple[float, float], *, grid: bool = True, **shared: Any
) -> tuple[Figure, list[Axes]]:
    """A figure of ``size`` in inches and its panels, row by row."""
    figure = Figure(figsize=size, layout="constrained")
    made = list(figure.subplots(rows, columns, squeeze=False, **shared).flat)
    if grid:
        for axes in made:
            axes.grid(alpha=0.25)
    return figure, made


def legend_within(axes: Axes, **how: Any) -> None:
    axes.legend(**_PLAIN, **how)


def legend_beside(axes: Axes, **how: Any) -> None:
    legend_within(axes, loc="upper left", bbox_to_anchor=(1.01, 1.0), **how)


def legend_of_all(figure: Figure, loc: str = "outside right upper", **how: Any) -> None:
    """One legend for all panels, beside them."""
    figure.legend(loc=loc, **_PLAIN, **how)


def legend_below(figure: Figure, axes: Axes) -> None:
    """One legend for all panels, with the lines of ``axes``."""
    figure.legend(*axes.get_legend_handles_labels(), loc="outside lower center", ncols=3, handlelength=2.6, **_PLAIN)
