"""Figures of a sweep: perplexity and exact match over length, loss over training and over the position."""

import math
from collections.abc import Collection, Mapping, Sequence
from itertools import pairwise
from types import MappingProxyType
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.colors import Normalize
from matplotlib.figure import Figure

from fairseq_rpe.figures.dot_plot import DotRow, draw_perplexity_dots, encoding_family
from fairseq_rpe.figures.heat_maps import (
    add_colour_bar,
    colour_norm,
    draw_map,
    exceeds_line_limit,
    map_panels,
    sort_best_first,
)
from fairseq_rpe.figures.style import (
    COLUMN,
    PAGE,
    TICK,
    LineEnd,
    Look,
    add_legend,
    assign_looks,
    figure_width,
    hide_unused,
    label_line_ends,
    mark_training,
    panel_columns,
    panels,
    set_decade_axis,
    set_length_axis,
    set_title,
)

Band = Mapping[int, Sequence[float]]  # length -> a value for each seed
_MAX_ERROR_BARS = 24  # points of a curve up to which each has an error bar
_LOG_RATIO = 4.0  # largest / smallest perplexity from which on the axis is logarithmic
_DECADE_RATIO = 20.0  # largest / smallest perplexity up to which a logarithmic axis has more numbers
_ENLARGE_RATIO = 2.0  # height of all curves / height of the lower ones, from which on these have their own panel


def draw_perplexity(
    curves: Mapping[str, Band],
    ratios: Mapping[str, Band],
    trained_at: int,
    text: str = "",
    families: Mapping[str, str] = MappingProxyType({}),
    intervals: Mapping[str, tuple[float, float]] = MappingProxyType({}),
) -> Figure:
    """Draw perplexity per token against evaluation length.

    If a curve rises so far that the others become indistinguishable, a second panel shows the ratios up to the largest
    of the others, with a ▲ where a curve leaves it. More than twelve methods are drawn as a dot plot
    (:func:`~fairseq_rpe.figures.dot_plot.draw_perplexity_dots`).

    Args:
        curves: label -> length -> a value for each seed.
        ratios: the same, divided by the perplexity of each run at ``trained_at`` tokens.
        trained_at: training length in tokens.
        text: name of the evaluated text.
        families: family of the encoding by label, for the dot plot; missing labels are read as specs.
        intervals: bounds of the mean ratio at the longest length by label, for the dot plot.
    """
    if exceeds_line_limit(curves):
        return _perplexity_dots(curves, ratios, trained_at, text, families, intervals)
    with_ratios = {label: points for label, points in ratios.items() if points}
    top = None  # of the enlarged panel, which needs the ratios of all curves
    if len(with_ratios) == len(curves):
        top = _top_of_lower_curves({label: seed_means(points) for label, points in with_ratios.items()})
    drawn = [curves] if top is None else [curves, with_ratios]
    height = max(2.4, 0.5 + 0.19 * len(curves))
    figure, all_axes = panels(len(drawn), 1, (figure_width(), 0.5 + height * len(drawn)), sharex=True)
    looks = assign_looks(list(curves))
    for axes, panel_curves in zip(all_axes, drawn, strict=True):
        for label, points in panel_curves.items():
            draw_band(axes, points, label, looks[label])
        mark_training(axes, trained_at, named=axes is all_axes[0])
    lengths = sorted({n for points in curves.values() for n in points})
    set_length_axis(all_axes[-1], lengths)
    all_axes[-1].set_xlabel("evaluation length (tokens)")
    all_axes[0].set_ylabel(f"perplexity per token{', ' * bool(text)}{text}")
    means = [value for points in curves.values() for value in seed_means(points).values()]
    if max(means) > _LOG_RATIO * min(means):
        set_decade_axis(all_axes[0], narrow=max(means) < _DECADE_RATIO * min(means))
        all_axes[0].set_ylabel(f"{all_axes[0].get_ylabel()}, logarithmic")
    set_title(all_axes[0], seeds_caption(curves.values()))
    if top is not None:
        _enlarge(all_axes[1], with_ratios, looks, top)
        all_axes[1].set_ylabel(f"perplexity / that at {trained_at}")
        set_title(all_axes[1], "enlarged: curves that rise further leave at ▲")
    label_line_ends(
        figure, {axes: _ends(panel_curves, looks) for axes, panel_curves in zip(all_axes, drawn, strict=True)}
    )
    return figure


def _perplexity_dots(
    curves: Mapping[str, Band],
    ratios: Mapping[str, Band],
    trained_at: int,
    text: str,
    families: Mapping[str, str],
    intervals: Mapping[str, tuple[float, float]],
) -> Figure:
    longest = max(n for points in curves.values() for n in points)
    rows = [
        DotRow(
            label,
            families.get(label) or encoding_family(label),
            seed_means(points),
            ratios.get(label, {}).get(longest, ()),
            intervals.get(label),
        )
        for label, points in curves.items()
    ]
    seeds = seeds_caption(curves.values()).partition(";")[0]
    return draw_perplexity_dots(rows, trained_at, text, seeds and f"{seeds}; small points: each seed")


def draw_mean_perplexity(values: Mapping[str, Sequence[float]], lengths: Sequence[int]) -> Figure:
    """Draw the mean perplexity per token over lengths, the smallest first.

    Source of the kind of figure: "Exploring Transformer Extrapolation" (arXiv 2307.10156), Fig. 1.

    Args:
        values: label -> a value for each seed.
        lengths: evaluation lengths in tokens.
    """
    means = {label: sum(seeds) / len(seeds) for label, seeds in values.items()}
    order = sorted(means, key=means.__getitem__)
    figure, (axes,) = panels(1, 1, (figure_width(), 0.9 + 0.22 * len(order)))
    looks = assign_looks(list(values))
    for y, label in enumerate(order):
        axes.plot(means[label], y, **looks[label].plot_options() | {"markersize": 5.5}, label=label)
        axes.plot([min(values[label]), max(values[label])], [y, y], color=looks[label].colour, linewidth=1.2)
        placement = {"xytext": (7, 0), "textcoords": "offset points", "verticalalignment": "center", "fontsize": TICK}
        axes.annotate(f"{means[label]:.2f}", (max(values[label]), y), **placement)
    axes.set_yticks(range(len(order)), order)
    axes.set(ylim=(len(order) - 0.5, -0.5), xlabel="perplexity per token, mean over lengths")
    if max(means.values()) > _LOG_RATIO * min(means.values()):
        set_decade_axis(axes, "x")
    axes.margins(x=0.2 * max(1.0, COLUMN / figure_width()))  # space for the number next to the last point
    seeds = seeds_caption([{0: seeds} for seeds in values.values()])
    set_title(axes, "\n".join(filter(None, (f"{len(lengths)} lengths, {lengths[0]} to {lengths[-1]} tokens", seeds))))
    return figure


def draw_exact_match(
    curves: Mapping[str, Mapping[str, Band]],
    trained: Mapping[str, tuple[int, int]],
    units: Mapping[str, str] | None = None,
    measure: str = "exact match",
) -> Figure:
    """Draw accuracy in per cent against the number of items, a panel per task.

    Args:
        curves: task -> label -> items -> a value for each seed; more than twelve labels are drawn as rows of heat maps.
        trained: task -> smallest and largest number of items in training, between which the panel is shaded.
        units: task -> what is counted instead of items.
        measure: name of the accuracy.
    """
    columns = panel_columns(len(curves), 2)
    lines = math.ceil(len(curves) / columns)
    names = list(dict.fromkeys(label for task_curves in curves.values() for label in task_curves))
    if exceeds_line_limit(names):
        return _exact_match_maps(curves, names, trained, units or {}, measure)
    figure, all_axes = panels(lines, columns, (figure_width(columns), 0.6 + 2.5 * lines), sharey=True)
    looks = assign_looks(names)
    for (task, task_curves), axes in zip(curves.items(), all_axes, strict=False):
        axes.axvspan(*trained[task], color="0.9", label="training range")
        for label, points in task_curves.items():
            # markers of coinciding lines are shifted from each other
            every = max(1, len(points) // 10)
            draw_band(axes, points, label, looks[label], markevery=(every * names.index(label) // len(names), every))
        axes.set(xlabel=(units or {}).get(task, "items"), ylim=(-3, 103))
        axes.xaxis.get_major_locator().set_params(integer=True)
        set_title(axes, "\n".join(filter(None, (task, seeds_caption(task_curves.values())))))
    for axes in all_axes[::columns]:
        axes.set_ylabel(f"{measure} (%)")
    hide_unused(all_axes, len(curves))
    handles = {
        name: handle for axes in all_axes for handle, name in zip(*axes.get_legend_handles_labels(), strict=True)
    }
    order = [name for name in (*names, "training range") if name in handles]
    add_legend(figure, handles=[handles[name] for name in order], labels=order, ncols=2 if columns == 1 else 4)
    return figure


def _exact_match_maps(
    curves: Mapping[str, Mapping[str, Band]],
    names: Sequence[str],
    trained: Mapping[str, tuple[int, int]],
    units: Mapping[str, str],
    measure: str,
) -> Figure:
    """Draw a heat map per task, all with the same rows; a dashed line after the largest number of items in training."""
    columns = panel_columns(len(curves), 2)
    lines = math.ceil(len(curves) / columns)
    figure, all_axes = map_panels(lines, columns, len(names))
    scale = None
    for (task, task_curves), axes in zip(curves.items(), all_axes, strict=False):
        rows = {name: seed_means(task_curves.get(name, {})) for name in names}
        about = task, seeds_caption(task_curves.values()).partition(";")[0]
        scale = draw_map(
            axes, rows, Normalize(0, 100), "\n".join(filter(None, about)), numbers=rows, after=trained[task][1]
        )
        axes.set_xlabel(f"{units.get(task, 'items')}\ndashed: the most in training")
    hide_unused(all_axes, len(curves))
    if scale is not None:
        add_colour_bar(figure, all_axes, scale, f"{measure} (%)")
    return figure


def draw_training_loss(curves: Sequence[tuple[str, Mapping[int, float]]]) -> Figure:
    """Draw training loss over updates, with the second half enlarged in a panel of its own.

    Args:
        curves: (label, update -> loss) of each run; more than twelve labels are drawn as rows of a heat map, each the
            mean over its runs.
    """
    if exceeds_line_limit(dict(curves)):
        return _training_map(curves)
    columns, height = panel_columns(2, 2), max(3.0, 0.9 + 0.17 * len(curves))
    figure, (whole_axes, late_axes) = panels(2 // columns, columns, (PAGE, height * 2 / columns))
    looks = assign_looks(list(dict.fromkeys(label for label, _ in curves)))
    last = max(update for _, loss in curves for update in loss)
    ends: dict[str, LineEnd] = {}
    for label, loss in curves:
        options = {**looks[label].plot_options(), "linewidth": 1.2, "markevery": max(1, len(loss) // 10)}
        half = {update: value for update, value in loss.items() if 2 * update >= last}
        for axes, points in ((whole_axes, loss), (late_axes, half)):
            axes.plot(list(points), list(points.values()), **options, label=None if label in ends else label)
        if half:
            ends.setdefault(label, _end(label, half, looks[label]))
    whole_axes.set(xlabel="updates", ylabel="training loss (bits per token)")
    late_axes.set(xlabel="updates")
    set_title(whole_axes, "whole training")
    set_title(late_axes, "second half, enlarged")
    label_line_ends(figure, {late_axes: list(ends.values())})
    return figure


def _training_map(curves: Sequence[tuple[str, Mapping[int, float]]]) -> Figure:
    runs: dict[str, list[Mapping[int, float]]] = {}
    for label, loss in curves:
        runs.setdefault(label, []).append(loss)
    shared = {label: set.intersection(*map(set, values)) for label, values in runs.items()}
    rows = {
        label: {update: sum(loss[update] for loss in values) / len(values) for update in sorted(shared[label])}
        for label, values in runs.items()
    }
    last = max(update for values in rows.values() for update in values)
    late = [value for values in rows.values() for update, value in values.items() if 2 * update >= last]
    order = sort_best_first({label: dict(list(values.items())[-1:]) for label, values in rows.items()})
    figure, (axes,) = map_panels(1, 1, len(rows))
    ordered = {label: rows[label] for label in order}
    scale = draw_map(axes, ordered, Normalize(min(late), max(late)), "training loss", continuous=True)
    axes.set_xlabel("updates")
    add_colour_bar(figure, [axes], scale, "bits per token, to the largest of the second half", extend="max")
    return figure


def draw_loss_by_position(curves: Mapping[str, Mapping[int, float]]) -> Figure:
    """Draw loss over the position in a block.

    Args:
        curves: label -> last position of each bucket -> loss; more than twelve labels are drawn as rows of a heat map.
    """
    counted = {label: {upto + 1: value for upto, value in loss.items()} for label, loss in curves.items()}
    if exceeds_line_limit(counted):
        figure, (axes,) = map_panels(1, 1, len(counted))
        scale = draw_map(axes, sort_best_first(counted), colour_norm(counted), numbers=sort_best_first(counted))
        axes.set_xlabel("position in the block (tokens)")
        add_colour_bar(figure, [axes], scale, "loss (bits per token)")
        return figure
    figure, (axes,) = panels(1, 1, (figure_width(), max(3.0, 0.9 + 0.17 * len(curves))))
    looks = assign_looks(list(curves))
    for label, points in counted.items():
        axes.plot(list(points), list(points.values()), **looks[label].plot_options(), label=label)
    set_length_axis(axes, sorted({n for points in counted.values() for n in points}))
    axes.set(xlabel="position in the block (tokens)", ylabel="loss (bits per token)")
    label_line_ends(figure, {axes: [_end(label, points, looks[label]) for label, points in counted.items()]})
    return figure


def seed_means(points: Band) -> dict[int, float]:
    """Return the mean over seeds, by length."""
    return {n: sum(values) / len(values) for n, values in points.items()}


def seeds_caption(bands: Collection[Band]) -> str:
    """Return the caption of error bars, "" if there are none."""
    counts = sorted({len(values) for points in bands for values in points.values()})
    if not counts or counts[-1] == 1:
        return ""
    many = " or ".join(map(str, counts)) if len(counts) < 3 else f"{counts[0]} to {counts[-1]}"
    least_to_largest = "shaded" if max(map(len, bands)) > _MAX_ERROR_BARS else "bars"
    return f"mean of {many} seeds; {least_to_largest}: least to largest"


def _top_of_lower_curves(means: Mapping[str, Mapping[int, float]]) -> float | None:
    """Return the largest value of the lower curves if they would take less than half of the height, otherwise None.

    A gap between neighbouring curves, sorted by their largest value, divides them into lower and higher ones. The gap
    is chosen with the largest ratio of the height above it to the height below it; at least half of the curves are
    lower.
    """
    least = min((value for points in means.values() for value in points.values()), default=0.0)
    highest = sorted(max(points.values()) for points in means.values())
    # (largest value below a gap, and above it), with at least half of the curves below
    pairs = [pair for k, pair in enumerate(pairwise(highest), 1) if 2 * k >= len(highest)]
    gaps = [((above - least) / (below - least) if below > least else 0.0, below) for below, above in pairs]
    ratio, below = max(gaps, default=(0.0, 0.0))
    return below if ratio > _ENLARGE_RATIO else None


def _enlarge(axes: Axes, ratios: Mapping[str, Band], looks: Mapping[str, Look], top: float) -> None:
    """Limit the panel to ``top``, and mark where curves leave it."""
    axes.axhline(1, color="0.5", linewidth=1, zorder=0)
    values = [v for points in ratios.values() for seeds in points.values() for v in seeds]
    pad = 0.06 * (top - min(values))
    high = top + pad
    axes.set_ylim(min(values) - pad, high)
    for label, points in ratios.items():
        means = seed_means(points)
        x, y = np.log2(list(means)), np.array(list(means.values()))
        leaves = np.flatnonzero((y[:-1] > high) != (y[1:] > high))
        for k in leaves:
            crossing = x[k] + (x[k + 1] - x[k]) * (high - y[k]) / (y[k + 1] - y[k])  # log2 of the length
            mark = {"marker": "^", "markersize": 6, "color": looks[label].colour, "linestyle": "none"}
            axes.plot(2**crossing, 1.0, **mark, transform=axes.get_xaxis_transform(), clip_on=False, label="_leaves")


def _end(label: str, points: Mapping[int, float], look: Look) -> LineEnd:
    x = max(points)
    return LineEnd(label, x, points[x], look.colour)


def _ends(curves: Mapping[str, Band], looks: Mapping[str, Look]) -> list[LineEnd]:
    return [_end(label, seed_means(points), looks[label]) for label, points in curves.items()]


def draw_band(axes: Axes, points: Band, label: str, look: Look, **options: Any) -> None:
    """Draw the mean over seeds with error bars from the smallest to the largest, or with a band if points are many."""
    x, means = list(points), list(seed_means(points).values())
    if len(x) > _MAX_ERROR_BARS:  # markers that touch each other would hide the line
        options = {"markevery": max(1, len(x) // _MAX_ERROR_BARS), **options}
    axes.plot(x, means, **look.plot_options(), **options, label=label)
    if all(len(values) == 1 for values in points.values()):
        return
    low, high = [min(values) for values in points.values()], [max(values) for values in points.values()]
    if len(x) > _MAX_ERROR_BARS:
        axes.fill_between(x, low, high, color=look.colour, alpha=0.2, linewidth=0)
    else:
        errors = np.array([np.subtract(means, low), np.subtract(high, means)])
        axes.errorbar(x, means, errors, fmt="none", ecolor=look.colour, elinewidth=1, capsize=2.5, label="_seeds")
