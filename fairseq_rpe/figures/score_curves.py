"""Scores of answers to questions: over the context length, and set by set."""

from collections.abc import Mapping, Sequence

from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.transforms import offset_copy

from .ends import End, name_ends
from .style import COLUMN, PAGE, TICK, legend_of_all, lengths_along, looks, mark_training, panels, titled
from .sweep_curves import Band, draw_band, means_of, seeds_said

MEAN = "mean"
_WIDE = 14  # sets across from which their names stand upright


def over_length(curves: Mapping[str, Mapping[str, Band]], tuned_at: int, metrics: Mapping[str, str]) -> Figure:
    """Scores against the context length, a panel per set: for each method, by tokens, a value in per cent per seed.

    ``tuned_at``: tokens of the fine-tuning, where a line is drawn; ``metrics``: by set, what its score is. Source of
    the kind of figure: "Functional Interpolation for Relative Positions" (arXiv 2310.04418), Fig. 3 left.
    """
    columns = min(2, len(curves))
    lines = -(-len(curves) // columns)
    shown = looks(list(dict.fromkeys(method for of_set in curves.values() for method in of_set)))
    height = max(2.6, 0.6 + 0.19 * len(shown))
    figure, made = panels(lines, columns, (COLUMN if columns == 1 else PAGE, 0.4 + height * lines))
    ends = {}
    for (label, of_set), axes in zip(curves.items(), made, strict=False):
        for method, points in of_set.items():
            draw_band(axes, points, method, shown[method])
        mark_training(axes, tuned_at, f"fine-tuned at {tuned_at}")
        lengths_along(axes, sorted({n for points in of_set.values() for n in points}))
        axes.set(xlabel="context length (tokens)", ylabel=f"{metrics[label]} (%)", ylim=(0, None))
        titled(axes, "\n".join(filter(None, (label, seeds_said(of_set.values())))))
        last = {method: means_of(points) for method, points in of_set.items() if points}
        ends[axes] = [End(m, max(own), own[max(own)], shown[m].colour) for m, own in last.items()]
    for axes in made[len(curves) :]:
        axes.set_visible(False)
    name_ends(figure, ends)
    return figure


def by_set(values: Mapping[str, Mapping[str, Sequence[float]]], title: str = "") -> Figure:
    """Scores in per cent, set by set, and their mean: for each set or ``mean`` a value per seed of each method.

    Source of the kind of figure: "Functional Interpolation for Relative Positions" (arXiv 2310.04418), Fig. 3 right.
    """
    names = list(values)
    shown = looks(list(dict.fromkeys(method for of_set in values.values() for method in of_set)))
    figure, (axes,) = panels(1, 1, (PAGE if len(names) > 3 else COLUMN, 3.4))
    step = min(7.0, 26.0 / max(1, len(shown)))
    for number, (method, look) in enumerate(shown.items()):
        aside = offset_copy(axes.transData, figure, x=step * (number - (len(shown) - 1) / 2), units="points")
        for place, name in enumerate(names):
            if seeds := values[name].get(method):
                axes.plot([place] * 2, [min(seeds), max(seeds)], color=look.colour, linewidth=1.2, transform=aside)
                mark = {**look.drawn(), "linestyle": "none", "markersize": 5}
                axes.plot(place, sum(seeds) / len(seeds), **mark, transform=aside)
    upright = {"rotation": 90} if len(names) > _WIDE else {"rotation": 30, "ha": "right", "rotation_mode": "anchor"}
    axes.set_xticks(range(len(names)), names, fontsize=TICK, **(upright if len(names) > 3 else {}))
    for edge in range(len(names) - 1):
        axes.axvline(edge + 0.5, color="0.9", linewidth=0.8, zorder=0)
    if MEAN in names:
        axes.axvspan(names.index(MEAN) - 0.5, names.index(MEAN) + 0.5, color="0.94", zorder=-1)
    axes.grid(visible=False, axis="x")
    axes.set(ylabel="score (%)", xlim=(-0.5, len(names) - 0.5))
    titled(axes, title)
    handles = [
        Line2D([], [], **{**look.drawn(), "linestyle": "none", "markersize": 5}, label=method)
        for method, look in shown.items()
    ]
    legend_of_all(figure, handles=handles, ncols=4)
    return figure
