"""Heat maps: a row for each method, where lines would be too many, and depth × length maps of needle tasks."""

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

from fairseq_rpe.figures.style import (
    NAME,
    PALETTE,
    TICK,
    figure_width,
    hide_unused,
    panel_columns,
    panel_width,
    panels,
    set_title,
)

MAX_LINES = 12  # methods in a figure with lines; more lines cannot be distinguished
ROW_HEIGHT = 0.19  # inches
_MAX_CELLS = 48  # columns of a panel
_NUMBER_WIDTH = 0.32  # of a number in a cell, in inches
_LETTER_WIDTH = 0.075  # mean width of a letter of a tick label, in inches
_BRIGHT = 0.6  # share of the colour scale above which a cell is so bright that its number is black
_MISSING = "0.85"  # colour of cells without a value
_MAX_COLUMNS = 3  # panels of needle maps side by side
_MAX_LENGTH_TICKS = 24
_MAX_NUMBERED_LENGTHS = 8  # columns up to which the cells of a needle map have numbers
_MAX_DEPTH_TICKS = 11  # rows up to which they have numbers, and number of tick labels
Rows = Mapping[str, Mapping[float, float]]  # method -> x -> value
Grid = Mapping[tuple[int, float], float]  # (length in tokens, depth) -> value


def exceeds_line_limit(methods: Sequence[str] | Mapping[str, Any]) -> bool:
    """Return whether there are more methods than a figure with lines can show."""
    return len(methods) > MAX_LINES


def map_panels(rows: int, columns: int, methods: int) -> tuple[Figure, list[Axes]]:
    """Return a figure with ``rows`` × ``columns`` panels for :func:`draw_map`, each high enough for all methods."""
    size = figure_width(columns), 1.0 + rows * (0.65 + ROW_HEIGHT * methods)
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
    """Draw the values of each method as a row of coloured cells; missing values are grey.

    Args:
        axes: panel that is drawn into.
        rows: method -> x -> value; the x may differ between methods.
        norm: normalisation of the colours.
        title: title of the panel.
        numbers: numbers to write into the cells if they fit; ``None`` for none.
        continuous: interpolate between the x of a method, so that methods with different x can be compared.
        after: x after which a dashed line is drawn, such as the training length.

    Returns:
        The colour scale, for :func:`add_colour_bar`.
    """
    xs = _select_columns(rows)
    values = np.array([_values(values_at, xs, continuous) for values_at in rows.values()])  # (methods, len(xs))
    scale = _colour_scale(norm)
    axes.imshow(values, norm=norm, cmap=scale.cmap, interpolation="nearest", aspect="auto")
    has_all_labels = _label_columns(axes, xs, max(map(len, rows)))
    axes.set_yticks(range(len(rows)), list(rows))
    axes.tick_params(length=2)
    if numbers is not None and has_all_labels:
        for row, values_at in enumerate(numbers.values()):
            for column, x in enumerate(xs):
                if x in values_at and np.isfinite(values[row, column]):
                    _write_number(axes, row, column, format_short(values_at[x]), float(norm(values[row, column])))
    if after is not None and xs[0] <= after < xs[-1]:
        _mark_after(axes, max(k for k, x in enumerate(xs) if x <= after))
    set_title(axes, title)
    return scale


def _select_columns(rows: Rows) -> list[float]:
    """Return all x of the rows, or at most 48 of them that are evenly spread by their order."""
    xs = sorted({x for values_at in rows.values() for x in values_at})
    if len(xs) <= _MAX_CELLS:
        return xs
    return [xs[k] for k in sorted({round(v) for v in np.linspace(0, len(xs) - 1, _MAX_CELLS)})]


def _colour_scale(norm: Normalize) -> ScalarMappable:
    return ScalarMappable(norm, colormaps["viridis"].with_extremes(bad=_MISSING))


def _label_columns(axes: Axes, xs: Sequence[float], letters: int) -> bool:
    """Label as many columns as there is space for.

    Args:
        axes: panel of the map.
        xs: x of each column.
        letters: length of the longest name of a row.

    Returns:
        Whether every column has a label, so that the cells have space for numbers too.
    """
    # the names of the rows take their width from all panels side by side
    names = _LETTER_WIDTH * letters / axes.get_subplotspec().get_gridspec().ncols
    cell = max(0.1, panel_width(axes) - names - 0.4) / len(xs)  # inches
    labels = [f"{x:g}" if x == int(x) else f"{x:.2g}" for x in xs]
    every = max(1, math.ceil(max(_NUMBER_WIDTH, _LETTER_WIDTH * max(map(len, labels))) / cell))
    # counted from the last x, which always has a label
    ticks = range((len(xs) - 1) % every, len(xs), every)
    axes.set_xticks(ticks, [labels[k] for k in ticks])
    return every == 1


def _write_number(axes: Axes, row: int, column: int, text: str, brightness: float) -> None:
    """Write a number into a cell, whose colour is at ``brightness`` (0 to 1) of the colour scale."""
    ink = "black" if brightness > _BRIGHT else "white"
    axes.text(column, row, text, color=ink, fontsize=TICK - 1, ha="center", va="center")


def _mark_after(axes: Axes, column: int) -> None:
    """Draw a dashed line after a column."""
    axes.axvline(column + 0.5, color=PALETTE[1], linestyle=(0, (4, 2)), linewidth=1.6, label="_training")


def add_colour_bar(figure: Figure, all_axes: Sequence[Axes], scale: ScalarMappable, label: str, **options: Any) -> None:
    """Add a colour bar below the panels; to their right, it would take width from the names of the methods."""
    bar = figure.colorbar(scale, ax=list(all_axes), pad=0.02, aspect=40, location="bottom", **options)
    bar.set_label(label, fontsize=NAME)
    bar.ax.tick_params(labelsize=TICK)
    if isinstance(scale.norm, LogNorm):
        bar.set_ticks(LogLocator(subs=(1, 2, 5)), format=StrMethodFormatter("{x:g}"))
        bar.ax.xaxis.set_minor_locator(NullLocator())
    elif isinstance(bar.formatter, ScalarFormatter):
        bar.formatter.set_useOffset(False)


def colour_norm(rows: Rows, most: float | None = None) -> Normalize:
    """Return a norm over all values up to ``most``; logarithmic if the largest is more than four times the smallest."""
    seen = np.array([value for values_at in rows.values() for value in values_at.values()], dtype=float)
    seen = seen[np.isfinite(seen)]
    least, largest = (float(seen.min()), float(seen.max())) if len(seen) else (0.0, 1.0)
    largest = largest if most is None else min(largest, most)
    if largest <= least:
        return Normalize(least, least + 1.0)
    return LogNorm(least, largest) if 0 < 4 * least < largest else Normalize(least, largest)


def sort_best_first(rows: Rows, highest: bool = False) -> Rows:
    """Sort methods by their mean over the x that all of them have, or over their own x if there are none."""
    common = set.intersection(*(set(values_at) for values_at in rows.values())) if rows else set()

    def mean(values_at: Mapping[float, float]) -> float:
        values = [value for x, value in values_at.items() if x in common or not common]
        return sum(values) / len(values) if values else (-np.inf if highest else np.inf)

    order = sorted(rows, key=lambda name: mean(rows[name]), reverse=highest)
    return {name: rows[name] for name in order}


def format_short(value: float) -> str:
    """Format a number with three digits, in at most five characters if possible: 47.5, 1234, 9.1e4."""
    if not math.isfinite(value):
        return str(value)
    if abs(value) >= 9999.5:
        mantissa, exponent = f"{value:.1e}".split("e")
        return f"{mantissa}e{int(exponent)}"
    if abs(value) < 0.0995:
        return f"{value:.2g}"
    return f"{value:.{2 if abs(value) < 9.995 else 1 if abs(value) < 99.95 else 0}f}"


def _values(values_at: Mapping[float, float], xs: Sequence[float], continuous: bool) -> list[float]:
    """Return the values of a method at ``xs``, NaN for missing ones; ``continuous`` interpolates between its own x."""
    if not continuous or not values_at:
        return [values_at.get(x, np.nan) for x in xs]
    own_xs = sorted(values_at)
    return list(np.interp(xs, own_xs, [values_at[x] for x in own_xs], left=np.nan, right=np.nan))


def draw_needle_maps(grids: Mapping[str, Mapping[str, Grid]], trained: Mapping[str, int]) -> Figure:
    """Draw exact match in per cent by length (across) and depth (down), a panel for each task and method.

    Args:
        grids: task -> method -> (length in tokens, depth) -> exact match; missing cells are grey.
        trained: task -> longest training length in tokens, after which a dashed line is drawn.

    Returns:
        The figure.
    """
    cells = [(task, method, grid) for task, methods in grids.items() for method, grid in methods.items()]
    # four maps as 2 × 2
    columns = panel_columns(len(cells), 2 if len(cells) == 4 else _MAX_COLUMNS, narrowest=1.6)
    lines = math.ceil(len(cells) / columns)
    most_depths = max(len({depth for _, depth in grid}) for *_, grid in cells)
    size = (figure_width(columns), 0.7 + lines * (0.55 + 0.15 * max(most_depths, 6)))
    figure, all_axes = panels(lines, columns, size, grid=False)
    scale = _colour_scale(Normalize(0, 100))
    for axes, (task, method, grid) in zip(all_axes, cells, strict=False):
        # all maps of a task have the same lengths and depths
        lengths, depths = (sorted({key[axis] for _, g in grids[task].items() for key in g}) for axis in (0, 1))
        _draw_needle_map(axes, grid, lengths, depths, scale, width=figure_width(columns) / columns)
        if beyond := [k for k, n in enumerate(lengths) if n > trained[task]]:
            _mark_after(axes, beyond[0] - 1)
        set_title(axes, method if len(grids) == 1 else f"{task}\n{method}")
    hide_unused(all_axes, len(cells))
    bar = figure.colorbar(scale, ax=all_axes, shrink=0.9, pad=0.02)
    bar.set_label("exact match (%)", fontsize=NAME)
    bar.ax.tick_params(labelsize=TICK)
    figure.supxlabel("length (tokens); dashed: the training length", fontsize=NAME)
    figure.supylabel("depth of the needle", fontsize=NAME)
    return figure


def _draw_needle_map(
    axes: Axes, grid: Grid, lengths: Sequence[int], depths: Sequence[float], scale: ScalarMappable, width: float
) -> None:
    """Draw one map with its ticks and, if they fit, its numbers; ``width``: inches of the panel with its labels."""
    values = np.array([[grid.get((n, depth), np.nan) for n in lengths] for depth in depths])
    axes.imshow(values, norm=scale.norm, cmap=scale.cmap, interpolation="nearest", aspect="auto")
    ticks = range(0, len(lengths), math.ceil(len(lengths) / _MAX_LENGTH_TICKS))
    tick_width = (width - 0.7) / len(ticks)  # inches
    rotation = 90 if tick_width < 0.09 * len(str(lengths[-1])) else 0
    fontsize = TICK if len(lengths) < 5 else TICK - 1
    axes.set_xticks(ticks, [str(lengths[k]) for k in ticks], fontsize=fontsize, rotation=rotation)
    every = math.ceil(len(depths) / _MAX_DEPTH_TICKS)
    axes.set_yticks(range(0, len(depths), every), [f"{depth:g}" for depth in depths[::every]])
    if len(lengths) > _MAX_NUMBERED_LENGTHS or len(depths) > _MAX_DEPTH_TICKS:
        return
    for (row, column), value in np.ndenumerate(values):
        if not np.isnan(value):
            _write_number(axes, row, column, f"{value:.0f}", value / 100)
