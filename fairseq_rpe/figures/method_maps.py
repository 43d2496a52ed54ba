"""Draws heat maps with a row for each method: in place of lines, of which twelve are as many as an eye tells apart."""

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from matplotlib import colormaps
from matplotlib.axes import Axes
from matplotlib.cm import ScalarMappable
from matplotlib.colors import LogNorm, Normalize
from matplotlib.figure import Figure
from matplotlib.ticker import LogLocator, NullLocator, ScalarFormatter, StrMethodFormatter

from fairseq_rpe.figures.style import NAME, PALETTE, TICK, panel_width, panels, titled, width

MOST_LINES = 12  # methods in a figure with lines
ROW = 0.19  # inches of a row
_CELLS = 48  # columns of a panel
_NUMBER = 0.32  # inches that a number takes
Rows = Mapping[str, Mapping[float, float]]  # method -> place along x -> value


def too_many(methods: Sequence[str] | Mapping[str, Any]) -> bool:
    """Whether these methods are more than a figure with lines can show."""
    return len(methods) > MOST_LINES


def map_panels(rows: int, columns: int, methods: int) -> tuple[Figure, list[Axes]]:
    """A figure with ``rows`` × ``columns`` panels for :func:`draw_map`, each with room for the names of ``methods``."""
    size = width(columns), 1.0 + rows * (0.65 + ROW * methods)
    return panels(rows, columns, size, grid=False, sharey=True)


def draw_map(
    axes: Axes,
    rows: Rows,
    norm: Normalize,
    title: str = "",
    *,
    numbers: Rows | None = None,
    continuous: bool = False,
    after: float | None = None,
) -> ScalarMappable:
    """Colour the values of each method, a row each; a value that is not known is grey.

    Args:
        axes: the panel.
        rows: method -> place along x -> value; places may differ between methods.
        norm: from values to colours.
        title: of the panel.
        numbers: what is written into the cells where there is room; ``None`` leaves them without numbers.
        continuous: values between two places of a method are interpolated, so that methods with other places fit.
        after: the place after which a dashed line is drawn, such as the training length.

    Returns:
        What :func:`colour_bar` takes.
    """
    places = sorted({x for own in rows.values() for x in own})
    if len(places) > _CELLS:
        places = [places[k] for k in sorted({round(v) for v in np.linspace(0, len(places) - 1, _CELLS)})]
    values = np.array([_values(own, places, continuous) for own in rows.values()])
    scale = ScalarMappable(norm, colormaps["viridis"].with_extremes(bad="0.85"))
    axes.imshow(values, norm=norm, cmap=scale.cmap, interpolation="nearest", aspect="auto")
    # inches of a cell: names take the room of their letters, a number that of four
    letters = max(map(len, rows)) / axes.get_subplotspec().get_gridspec().ncols
    cell = max(0.1, panel_width(axes) - 0.075 * letters - 0.4) / len(places)
    written = [f"{x:g}" if x == int(x) else f"{x:.2g}" for x in places]
    every = max(1, math.ceil(max(_NUMBER, 0.075 * max(map(len, written))) / cell))
    # counted from the last place, which always has its number
    ticks = range((len(places) - 1) % every, len(places), every)
    axes.set_xticks(ticks, [written[k] for k in ticks])
    axes.set_yticks(range(len(rows)), list(rows))
    axes.tick_params(length=2)
    if numbers is not None and every == 1:
        for row, own in enumerate(numbers.values()):
            for column, place in enumerate(places):
                if place in own and np.isfinite(values[row, column]):
                    # black on the brighter half of the colours
                    ink = "black" if float(norm(values[row, column])) > 0.6 else "white"
                    look: dict[str, Any] = {"fontsize": TICK - 1, "ha": "center", "va": "center"}
                    axes.text(column, row, short(own[place]), color=ink, **look)
    if after is not None and places[0] <= after < places[-1]:
        last = max(k for k, place in enumerate(places) if place <= after)
        axes.axvline(last + 0.5, color=PALETTE[1], linestyle=(0, (4, 2)), linewidth=1.6, label="_training")
    titled(axes, title)
    return scale


def colour_bar(figure: Figure, made: Sequence[Axes], scale: ScalarMappable, label: str, **how: Any) -> None:
    """A colour bar below the panels ``made``: the names of the methods need the width."""
    bar = figure.colorbar(scale, ax=list(made), pad=0.02, aspect=40, location="bottom", **how)
    bar.set_label(label, fontsize=NAME)
    bar.ax.tick_params(labelsize=TICK)
    if isinstance(scale.norm, LogNorm):
        bar.set_ticks(LogLocator(subs=(1, 2, 5)), format=StrMethodFormatter("{x:g}"))
        bar.ax.xaxis.set_minor_locator(NullLocator())
    elif isinstance(bar.formatter, ScalarFormatter):
        bar.formatter.set_useOffset(False)


def scale_of(rows: Rows, most: float | None = None) -> Normalize:
    """A scale over all values up to ``most``, logarithmic where the largest is more than four times the least."""
    seen = np.array([value for own in rows.values() for value in own.values()], dtype=float)
    seen = seen[np.isfinite(seen)]
    least, largest = (float(seen.min()), float(seen.max())) if len(seen) else (0.0, 1.0)
    largest = largest if most is None else min(largest, most)
    if largest <= least:
        return Normalize(least, least + 1.0)
    return LogNorm(least, largest) if 0 < 4 * least < largest else Normalize(least, largest)


def best_first(rows: Rows, highest: bool = False) -> Rows:
    """The methods by their mean over the places that all have (over their own, where there are none)."""
    common = set.intersection(*(set(own) for own in rows.values())) if rows else set()

    def mean(own: Mapping[float, float]) -> float:
        values = [value for place, value in own.items() if place in common or not common]
        return sum(values) / len(values) if values else (-np.inf if highest else np.inf)

    order = sorted(rows, key=lambda name: mean(rows[name]), reverse=highest)
    return {name: rows[name] for name in order}


def short(value: float) -> str:
    """A number with three digits, in at most five characters where that is possible: 47.5, 1234, 9.1e4."""
    if abs(value) >= 9999.5:
        mantissa, exponent = f"{value:.1e}".split("e")
        return f"{mantissa}e{int(exponent)}"
    if abs(value) < 0.0995:
        return f"{value:.2g}"
    return f"{value:.{2 if abs(value) < 9.995 else 1 if abs(value) < 99.95 else 0}f}"


def _values(own: Mapping[float, float], places: Sequence[float], continuous: bool) -> list[float]:
    if not continuous or not own:
        return [own.get(place, np.nan) for place in places]
    known = sorted(own)
    return list(np.interp(places, known, [own[x] for x in known], left=np.nan, right=np.nan))
