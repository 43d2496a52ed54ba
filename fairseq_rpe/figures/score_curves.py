"""Scores of answers to questions: over the context length, and set by set."""

import textwrap
from collections.abc import Mapping, Sequence
from itertools import pairwise

from matplotlib.colors import Normalize
from matplotlib.figure import Figure
from matplotlib.lines import Line2D

from fairseq_rpe.figures.line_labels import End, name_ends
from fairseq_rpe.figures.method_maps import best_first, colour_bar, draw_map, map_panels, too_many
from fairseq_rpe.figures.style import (
    TICK,
    across,
    legend_of_all,
    lengths_along,
    looks,
    mark_training,
    panels,
    titled,
    width,
)
from fairseq_rpe.figures.sweep_curves import Band, draw_band, means_of, seeds_said

MEAN = "mean"
_WIDE = 14  # sets across from which their names stand upright
_LONG = 9999  # from which a length takes so much room that the next one has to be far away


Curves = Mapping[tuple[str, str], Mapping[str, Band]]  # by (set, metric), method and place along x; a value per seed


def over_length(curves: Curves, tuned_at: int, back: Curves) -> Figure:
    """Scores in per cent against the context length in tokens, a panel for each (set, metric).

    ``tuned_at``: tokens of the fine-tuning, where a line is drawn. ``back``: on the longest context, against the words
    between the answer and the document's end, in panels of their own. Source of the kind of figure: "Functional
    Interpolation for Relative Positions" (arXiv 2310.04418), Fig. 3 left. More than twelve methods have a row each of
    a heat map instead.
    """
    wanted = [*((key, own, False) for key, own in curves.items()), *((key, own, True) for key, own in back.items())]
    columns = across(len(wanted), 2)
    lines = -(-len(wanted) // columns)
    methods = list(dict.fromkeys(method for of_set in curves.values() for method in of_set))
    shown = looks(methods)
    longest = max(n for of_set in curves.values() for points in of_set.values() for n in points)
    if too_many(methods):
        return _length_maps(wanted, methods, tuned_at, longest, lines, columns)
    height = max(2.6, 0.6 + 0.19 * len(shown))
    figure, made = panels(lines, columns, (width(columns), 0.4 + height * lines))
    ends, joint = {}, "; " if columns == 1 else "\n"
    for ((label, metric), of_set, in_words), axes in zip(wanted, made, strict=False):
        for method, points in of_set.items():
            draw_band(axes, points, method, shown[method])
        if in_words:
            about = "words from the answer to the document's end", f"of {longest} tokens"
        else:
            about = "context length (tokens)", f"dashed: fine-tuned at {tuned_at}"
            mark_training(axes, tuned_at, named=False)
            lengths = sorted({n for points in of_set.values() for n in points})
            lengths_along(axes, lengths)
            if any(2 * one > other and other > _LONG for one, other in pairwise(lengths)):
                axes.tick_params(axis="x", labelrotation=45 if columns == 1 else 90)
        axes.set(xlabel=joint.join(about), ylabel=f"{metric} (%)", ylim=(0, None))
        titled(axes, "\n".join(filter(None, (label, seeds_said(of_set.values())))))
        last = {method: means_of(points) for method, points in of_set.items() if points}
        ends[axes] = [End(m, max(own), own[max(own)], shown[m].colour) for m, own in last.items()]
    for axes in made[len(wanted) :]:
        axes.set_visible(False)
    name_ends(figure, ends)
    return figure


def _length_maps(
    wanted: Sequence[tuple[tuple[str, str], Mapping[str, Band], bool]],
    methods: Sequence[str],
    tuned_at: int,
    longest: int,
    lines: int,
    columns: int,
) -> Figure:
    """A heat map for each panel of :func:`over_length`, all with the same rows."""
    figure, made = map_panels(lines, columns, len(methods))
    values = [{method: means_of(of_set.get(method, {})) for method in methods} for _, of_set, _ in wanted]
    seen = [value for rows in values for own in rows.values() for value in own.values()]
    norm = Normalize(min(seen), max(seen))
    scale = None
    for ((label, metric), of_set, in_words), rows, axes in zip(wanted, values, made, strict=False):
        said = label, f"{metric} (%)", seeds_said(of_set.values()).partition(";")[0]
        title = "\n".join(filter(None, said))
        scale = draw_map(axes, rows, norm, title, numbers=rows, after=None if in_words else tuned_at)
        about = f"words from the answer to\nthe end of {longest} tokens"
        axes.set_xlabel(about if in_words else f"context length (tokens)\ndashed: fine-tuned at {tuned_at}")
    for axes in made[len(wanted) :]:
        axes.set_visible(False)
    if scale is not None:
        colour_bar(figure, made, scale, "score (%)")
    return figure


def by_set(values: Mapping[str, Mapping[str, Sequence[float]]], title: str = "") -> Figure:
    """Scores in per cent, set by set, and their mean: for each set or ``mean`` a value per seed of each method.

    Source of the kind of figure: "Functional Interpolation for Relative Positions" (arXiv 2310.04418), Fig. 3 right.
    More than twelve methods have a row each of a heat map instead.
    """
    names, methods = list(values), list(dict.fromkeys(method for of_set in values.values() for method in of_set))
    if too_many(methods):
        return _set_map(values, names, methods, title)
    shown = looks(methods)
    figure, (axes,) = panels(1, 1, (width(1 + (len(names) > 3)), 3.4))
    for number, method in enumerate(methods):
        aside, look = 0.8 * ((number + 0.5) / len(methods) - 0.5), shown[method]
        for place, name in enumerate(names):
            if seeds := values[name].get(method):
                axes.plot([place + aside] * 2, [min(seeds), max(seeds)], color=look.colour, linewidth=1.2)
                mark = {**look.drawn(), "linestyle": "none", "markersize": 5}
                axes.plot(place + aside, sum(seeds) / len(seeds), **mark)
    upright = {"rotation": 90} if len(names) > _WIDE else {"rotation": 30, "ha": "right", "rotation_mode": "anchor"}
    axes.set_xticks(range(len(names)), names, fontsize=TICK, **(upright if len(names) > 3 else {}))
    for edge in range(len(names) - 1):
        axes.axvline(edge + 0.5, color="0.9", linewidth=0.8, zorder=0)
    if MEAN in names:
        axes.axvspan(names.index(MEAN) - 0.5, names.index(MEAN) + 0.5, color="0.94", zorder=-1)
    axes.grid(visible=False, axis="x")
    axes.set(ylabel="score (%)", xlim=(-0.5, len(names) - 0.5))
    seeds_of = seeds_said([dict(enumerate(own for own in of_set.values() if own)) for of_set in values.values()])
    titled(axes, "\n".join(filter(None, (textwrap.fill(title, 90 if len(names) > 3 else 60), seeds_of))))
    handles = [
        Line2D([], [], **{**shown[method].drawn(), "linestyle": "none", "markersize": 5}, label=method)
        for method in methods
    ]
    legend_of_all(figure, handles=handles, ncols=4)
    return figure


def _set_map(
    values: Mapping[str, Mapping[str, Sequence[float]]], names: Sequence[str], methods: Sequence[str], title: str
) -> Figure:
    """Methods × sets, coloured by the score, those with the highest mean first."""
    rows = {
        method: {
            float(place): sum(seeds) / len(seeds)
            for place, name in enumerate(names)
            if (seeds := values[name].get(method))
        }
        for method in methods
    }
    ranked = best_first(rows, highest=True)
    figure, (axes,) = map_panels(1, 1, len(methods))
    scale = draw_map(axes, ranked, Normalize(0, 100), title, numbers=ranked)
    axes.set_xticks(range(len(names)), names, rotation=90)
    colour_bar(figure, [axes], scale, "score (%)")
    return figure
