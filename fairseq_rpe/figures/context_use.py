"""Figure of the use of context: loss by the distance of a token's last occurrence."""

import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from fairseq_rpe.figures.heat_maps import add_colour_bar, colour_norm, draw_map, exceeds_line_limit, map_panels
from fairseq_rpe.figures.style import (
    ERROR_BAR,
    TICK,
    Look,
    add_legend_of,
    assign_looks,
    figure_width,
    hide_unused,
    panel_columns,
    panels,
    set_figure_title,
    set_length_axis,
    set_title,
)

_DISTANCE = "last occurrence, tokens back"


class LossAtDistance(NamedTuple):
    """Mean loss of the tokens of one bucket.

    Attributes:
        distance: smallest distance of the bucket in tokens; None: tokens without an earlier occurrence.
        loss: mean loss in bits.
        error: standard error of the mean.
    """

    distance: int | None
    loss: float
    error: float


def draw_context_use(curves: Mapping[str, Mapping[str, Sequence[LossAtDistance]]]) -> Figure:
    """Draw loss against the distance of the last occurrence, with the tokens without one at the right end.

    Args:
        curves: title of a panel -> label -> points; more than twelve labels are drawn as rows of heat maps.
    """
    labels = list(dict.fromkeys(label for panel in curves.values() for label in panel))
    columns = panel_columns(len(curves), 3)
    lines = math.ceil(len(curves) / columns)
    points = [point for panel in curves.values() for line in panel.values() for point in line]
    distances = sorted({point.distance for point in points if point.distance is not None})
    new_at = 4 * distances[-1] if distances else 1
    if exceeds_line_limit(labels):
        return _context_use_maps(curves, lines, columns)
    figure, all_axes = panels(lines, columns, (figure_width(columns), 0.8 + 2.6 * lines), sharex=True, sharey=True)
    looks = assign_looks(labels)
    for (title, panel), axes in zip(curves.items(), all_axes, strict=False):
        for label, line in panel.items():
            _draw_line(axes, line, new_at, label, looks[label])
        set_title(axes, title)
    ticks = distances + [new_at] * any(point.distance is None for point in points)
    set_length_axis(all_axes[0], ticks)
    if ticks[-1] == new_at:
        texts = [text.get_text() for text in all_axes[0].get_xticklabels()]
        all_axes[0].set_xticks(ticks, [*texts[:-1], "new"])
    for number, axes in enumerate(all_axes[: len(curves)]):
        if number + columns >= len(curves):
            axes.tick_params(labelbottom=True)
            axes.set_xlabel(_DISTANCE)
        if not number % columns:
            axes.set_ylabel("loss (bits per token)")
    hide_unused(all_axes, len(curves))
    if any(point.error for point in points):
        set_figure_title(figure, f"bars: ±{ERROR_BAR} standard errors", TICK)
    most = max(curves.values(), key=len)
    add_legend_of(figure, all_axes[list(curves.values()).index(most)])
    return figure


def _draw_line(axes: Axes, line: Sequence[LossAtDistance], new_at: int, label: str, look: Look) -> None:
    """Draw the points with a distance as a line, and that of new tokens apart, with error bars."""
    repeated = [point for point in line if point.distance is not None]
    new = [point for point in line if point.distance is None]
    options: dict[str, Any] = {**look.plot_options(), "elinewidth": 1, "capsize": 2.5, "linewidth": 1.3}
    for points, name in ((repeated, label), (new, "_new")):
        x = [point.distance or new_at for point in points]
        errors = [ERROR_BAR * point.error for point in points]
        axes.errorbar(x, [point.loss for point in points], errors, **options, label=name)


def _context_use_maps(curves: Mapping[str, Mapping[str, Sequence[LossAtDistance]]], lines: int, columns: int) -> Figure:
    """Draw a heat map per panel, without the tokens that have no last occurrence."""
    figure, all_axes = map_panels(lines, columns, max(map(len, curves.values())))
    for (title, panel), axes in zip(curves.items(), all_axes, strict=False):
        rows: dict[str, dict[float, float]] = {
            label: {point.distance: point.loss for point in line if point.distance is not None}
            for label, line in panel.items()
        }
        scale = draw_map(axes, rows, colour_norm(rows), title, numbers=rows)
        axes.set_xlabel(_DISTANCE)
        add_colour_bar(figure, [axes], scale, "loss (bits per token)")
    hide_unused(all_axes, len(curves))
    return figure
