"""Figures of question-answering scores: over the context length, and for each set."""

import math
import textwrap
from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Any, NamedTuple

from matplotlib.axes import Axes
from matplotlib.colors import Normalize
from matplotlib.figure import Figure
from matplotlib.lines import Line2D

from fairseq_rpe.figures.heat_maps import add_colour_bar, draw_map, exceeds_line_limit, map_panels, sort_best_first
from fairseq_rpe.figures.style import (
    TICK,
    LineEnd,
    add_legend,
    assign_looks,
    figure_width,
    hide_unused,
    label_line_ends,
    mark_training,
    panel_columns,
    panels,
    set_length_axis,
    set_title,
)
from fairseq_rpe.figures.sweep_curves import Band, draw_band, seed_means, seeds_caption

MEAN = "mean"
_MAX_SLANTED_NAMES = 14  # sets up to which their names are slanted rather than vertical
_LONG_LENGTH = 9999  # longer labels of lengths are rotated if the lengths are close to each other
Curves = Mapping[tuple[str, str], Mapping[str, Band]]  # (set, metric) -> method -> x -> a value for each seed


class _Panel(NamedTuple):
    """A panel of scores.

    Attributes:
        label: name of the set.
        metric: name of the metric.
        curves: method -> x -> a value for each seed.
        in_words: whether x is the number of words after the answer; otherwise it is the context length in tokens.
    """

    label: str
    metric: str
    curves: Mapping[str, Band]
    in_words: bool

    def title(self) -> str:
        """Return the label and the caption of the seeds."""
        return "\n".join(filter(None, (self.label, seeds_caption(self.curves.values()))))


def draw_scores_over_length(curves: Curves, tuned_at: int, back: Curves) -> Figure:
    """Draw scores in per cent against the context length in tokens, a panel for each (set, metric).

    Source of the kind of figure: "Functional Interpolation for Relative Positions" (arXiv 2310.04418), Fig. 3 left.

    Args:
        curves: scores by context length; more than twelve methods are drawn as rows of heat maps.
        tuned_at: context length of the fine-tuning in tokens, marked by a line.
        back: scores at the longest context by the number of words from the answer to the end of the document, in
            further panels.
    """
    shown = [_Panel(*key, values, in_words=False) for key, values in curves.items()]
    shown += [_Panel(*key, values, in_words=True) for key, values in back.items()]
    columns = panel_columns(len(shown), 2)
    lines = math.ceil(len(shown) / columns)
    methods = list(dict.fromkeys(method for set_curves in curves.values() for method in set_curves))
    looks = assign_looks(methods)
    longest = max(n for set_curves in curves.values() for points in set_curves.values() for n in points)
    if exceeds_line_limit(methods):
        return _length_maps(shown, methods, tuned_at, longest, lines, columns)
    height = max(2.6, 0.6 + 0.19 * len(looks))
    figure, all_axes = panels(lines, columns, (figure_width(columns), 0.4 + height * lines))
    ends = {}
    for panel, axes in zip(shown, all_axes, strict=False):
        for method, points in panel.curves.items():
            draw_band(axes, points, method, looks[method])
        _set_score_axes(axes, panel, tuned_at, longest, is_narrow=columns > 1)
        last = {method: seed_means(points) for method, points in panel.curves.items() if points}
        ends[axes] = [LineEnd(m, max(means), means[max(means)], looks[m].colour) for m, means in last.items()]
    hide_unused(all_axes, len(shown))
    label_line_ends(figure, ends)
    return figure


def _set_score_axes(axes: Axes, panel: _Panel, tuned_at: int, longest: int, is_narrow: bool) -> None:
    """Set title, labels and ticks of a panel; in a narrow panel they take less width."""
    if panel.in_words:
        x_label = "words from the answer to the document's end", f"of {longest} tokens"
    else:
        x_label = "context length (tokens)", f"dashed: fine-tuned at {tuned_at}"
        mark_training(axes, tuned_at, named=False)
        lengths = sorted({n for points in panel.curves.values() for n in points})
        set_length_axis(axes, lengths)
        if any(2 * a > b > _LONG_LENGTH for a, b in pairwise(lengths)):
            axes.tick_params(axis="x", labelrotation=90 if is_narrow else 45)
    axes.set(xlabel=("\n" if is_narrow else "; ").join(x_label), ylabel=f"{panel.metric} (%)")
    if all(score >= 0 for points in panel.curves.values() for seeds in points.values() for score in seeds):
        axes.set_ylim(bottom=0)
    set_title(axes, panel.title())


def _length_maps(
    shown: Sequence[_Panel], methods: Sequence[str], tuned_at: int, longest: int, lines: int, columns: int
) -> Figure:
    """Draw a heat map for each panel of :func:`draw_scores_over_length`, all with the same rows."""
    figure, all_axes = map_panels(lines, columns, len(methods))
    values = [{method: seed_means(panel.curves.get(method, {})) for method in methods} for panel in shown]
    seen = [score for rows in values for scores in rows.values() for score in scores.values()]
    norm = Normalize(min(seen), max(seen))
    scale = None
    for panel, rows, axes in zip(shown, values, all_axes, strict=False):
        seeds, _, _ = seeds_caption(panel.curves.values()).partition(";")
        title = "\n".join(filter(None, (panel.label, f"{panel.metric} (%)", seeds)))
        scale = draw_map(axes, rows, norm, title, numbers=rows, after=None if panel.in_words else tuned_at)
        words = f"words from the answer to\nthe end of {longest} tokens"
        axes.set_xlabel(words if panel.in_words else f"context length (tokens)\ndashed: fine-tuned at {tuned_at}")
    hide_unused(all_axes, len(shown))
    if scale is not None:
        add_colour_bar(figure, all_axes, scale, "score (%)")
    return figure


def draw_scores_by_set(values: Mapping[str, Mapping[str, Sequence[float]]], title: str = "") -> Figure:
    """Draw scores in per cent for each set, and their mean.

    Source of the kind of figure: "Functional Interpolation for Relative Positions" (arXiv 2310.04418), Fig. 3 right.

    Args:
        values: set or ``mean`` -> method -> a value for each seed; more than twelve methods are drawn as rows of a
            heat map.
        title: title of the figure.
    """
    names = list(values)
    methods = list(dict.fromkeys(method for scores in values.values() for method in scores))
    if exceeds_line_limit(methods):
        return _set_map(values, names, methods, title)
    looks = assign_looks(methods)
    is_wide = len(names) > 3
    figure, (axes,) = panels(1, 1, (figure_width(2 if is_wide else 1), 3.4))
    points: dict[str, dict[str, Any]] = {
        method: {**looks[method].plot_options(), "linestyle": "none", "markersize": 5} for method in methods
    }
    for number, method in enumerate(methods):
        offset = 0.8 * ((number + 0.5) / len(methods) - 0.5)  # methods are side by side in the column of a set
        for x, name in enumerate(names):
            if seeds := values[name].get(method):
                axes.plot([x + offset] * 2, [min(seeds), max(seeds)], color=looks[method].colour, linewidth=1.2)
                axes.plot(x + offset, sum(seeds) / len(seeds), **points[method])
    _set_set_axis(axes, names)
    axes.set_ylabel("score (%)")
    caption = seeds_caption([dict(enumerate(filter(None, scores.values()))) for scores in values.values()])
    set_title(axes, "\n".join(filter(None, (textwrap.fill(title, 90 if is_wide else 60), caption))))
    add_legend(figure, handles=[Line2D([], [], **points[method], label=method) for method in methods], ncols=4)
    return figure


def _set_set_axis(axes: Axes, names: Sequence[str]) -> None:
    """Give each set a column with its name below; the column of the mean is grey."""
    rotated: dict[str, Any] = {}
    if len(names) > _MAX_SLANTED_NAMES:
        rotated = {"rotation": 90}
    elif len(names) > 3:
        rotated = {"rotation": 30, "ha": "right", "rotation_mode": "anchor"}
    axes.set_xticks(range(len(names)), names, fontsize=TICK, **rotated)
    for edge in range(len(names) - 1):
        axes.axvline(edge + 0.5, color="0.9", linewidth=0.8, zorder=0)
    if MEAN in names:
        axes.axvspan(names.index(MEAN) - 0.5, names.index(MEAN) + 0.5, color="0.94", zorder=-1)
    axes.grid(visible=False, axis="x")
    axes.set_xlim(-0.5, len(names) - 0.5)


def _set_map(
    values: Mapping[str, Mapping[str, Sequence[float]]], names: Sequence[str], methods: Sequence[str], title: str
) -> Figure:
    """Draw a heat map of methods × sets, the method with the highest mean first."""
    rows = {
        method: {
            float(x): sum(seeds) / len(seeds) for x, name in enumerate(names) if (seeds := values[name].get(method))
        }
        for method in methods
    }
    ranked = sort_best_first(rows, highest=True)
    figure, (axes,) = map_panels(1, 1, len(methods))
    scale = draw_map(axes, ranked, Normalize(0, 100), title, numbers=ranked)
    axes.set_xticks(range(len(names)), names, rotation=90)
    add_colour_bar(figure, [axes], scale, "score (%)")
    return figure
