"""The figures of a sweep: perplexity or exact answers over length, loss over training and over the position."""

from collections.abc import Collection, Mapping, Sequence
from itertools import pairwise
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.colors import Normalize
from matplotlib.figure import Figure

from fairseq_rpe.figures.line_labels import End, name_ends
from fairseq_rpe.figures.method_maps import best_first, colour_bar, draw_map, map_panels, scale_of, too_many
from fairseq_rpe.figures.style import (
    COLUMN,
    PAGE,
    TICK,
    Look,
    across,
    decades,
    legend_of_all,
    lengths_along,
    looks,
    mark_training,
    panels,
    titled,
    width,
)

Band = Mapping[int, Sequence[float]]
_FEW = 24  # points that still have room for an error bar each
_WIDE = 4.0  # the largest perplexity over the least from which the axis is logarithmic
_DECADE = 20.0  # and up to which it has more numbers
_SQUASHED = 2.0  # the height of all curves over that of the lower ones from which these are shown by themselves
_RISEN = 2.0  # times the least perplexity of a length: larger ones have its colour


def perplexity(curves: Mapping[str, Band], ratios: Mapping[str, Band], trained_at: int, text: str = "") -> Figure:
    """Perplexity per token (of ``text``) against evaluation length: for each label, by length, a value for each seed.

    ``ratios``: the same over each run's perplexity at ``trained_at`` tokens. Where a curve rises so far that the others
    are squashed, a second panel shows the ratios up to the largest of the others, with a ▲ where a curve leaves it.
    More than twelve labels have a row each of a heat map instead.
    """
    if too_many(curves):
        return _perplexity_map(curves, trained_at, text)
    known = {label: points for label, points in ratios.items() if points}
    top = _top({label: means_of(points) for label, points in known.items()}) if len(known) == len(curves) else None
    height = max(2.4, 0.5 + 0.19 * len(curves))
    figure, made = panels(1 if top is None else 2, 1, (width(), 0.5 + height * (1 if top is None else 2)), sharex=True)
    shown = looks(list(curves))
    drawn = [curves] if top is None else [curves, known]
    for axes, of in zip(made, drawn, strict=True):
        for label, points in of.items():
            draw_band(axes, points, label, shown[label])
        mark_training(axes, trained_at, named=axes is made[0])
    lengths = sorted({n for points in curves.values() for n in points})
    lengths_along(made[-1], lengths)
    made[-1].set_xlabel("evaluation length (tokens)")
    made[0].set_ylabel(f"perplexity per token{', ' * bool(text)}{text}")
    means = [value for points in curves.values() for value in means_of(points).values()]
    if max(means) > _WIDE * min(means):
        decades(made[0], narrow=max(means) < _DECADE * min(means))
        made[0].set_ylabel(f"{made[0].get_ylabel()}, logarithmic")
    titled(made[0], seeds_said(curves.values()))
    if top is not None:
        _enlarge(made[1], known, shown, top)
        made[1].set_ylabel(f"perplexity / that at {trained_at}")
        titled(made[1], "enlarged: curves that rise further leave at ▲")
    name_ends(figure, {axes: _ends(of, shown) for axes, of in zip(made, drawn, strict=True)})
    return figure


def _perplexity_map(curves: Mapping[str, Band], trained_at: int, text: str) -> Figure:
    """Mean perplexities as numbers, coloured by their ratio to the least of their length; the least mean first."""
    means = best_first({label: means_of(points) for label, points in curves.items()})
    least: dict[float, float] = {}
    for own in means.values():
        for n, value in own.items():
            least[n] = min(value, least.get(n, value))
    ratios = {label: {n: value / least[n] for n, value in own.items()} for label, own in means.items()}
    figure, (axes,) = map_panels(1, 1, len(means))
    about = f"perplexity per token{', ' * bool(text)}{text}", seeds_said(curves.values()).partition(";")[0]
    scale = draw_map(
        axes, ratios, scale_of(ratios, _RISEN), "\n".join(filter(None, about)), numbers=means, after=trained_at
    )
    axes.set_xlabel(f"evaluation length (tokens)\ndashed: trained at {trained_at}")
    colour_bar(figure, [axes], scale, "perplexity / least of the length", extend="max")
    return figure


def mean_perplexity(values: Mapping[str, Sequence[float]], lengths: Sequence[int]) -> Figure:
    """Perplexity per token, its mean over ``lengths`` in tokens: for each label a value for each seed, the least first.

    Source of the kind of figure: "Exploring Transformer Extrapolation" (arXiv 2307.10156), Fig. 1.
    """
    means = {label: sum(seeds) / len(seeds) for label, seeds in values.items()}
    order = sorted(means, key=means.__getitem__)
    figure, (axes,) = panels(1, 1, (width(), 0.9 + 0.22 * len(order)))
    shown = looks(list(values))
    for place, label in enumerate(order):
        axes.plot(means[label], place, **shown[label].drawn() | {"markersize": 5.5}, label=label)
        axes.plot([min(values[label]), max(values[label])], [place, place], color=shown[label].colour, linewidth=1.2)
        beside = {"xytext": (7, 0), "textcoords": "offset points", "verticalalignment": "center", "fontsize": TICK}
        axes.annotate(f"{means[label]:.2f}", (max(values[label]), place), **beside)
    axes.set_yticks(range(len(order)), order)
    axes.set(ylim=(len(order) - 0.5, -0.5), xlabel="perplexity per token, mean over lengths")
    if max(means.values()) > _WIDE * min(means.values()):
        decades(axes, "x")
    axes.margins(x=0.2 * max(1.0, COLUMN / width()))  # room for the number beside the last point
    seeds = seeds_said([{0: seeds} for seeds in values.values()])
    titled(axes, "\n".join(filter(None, (f"{len(lengths)} lengths, {lengths[0]} to {lengths[-1]} tokens", seeds))))
    return figure


def exact_match(
    curves: Mapping[str, Mapping[str, Band]], trained: Mapping[str, int], units: Mapping[str, str] | None = None
) -> Figure:
    """Exact answers in per cent against items, a panel per task: for each label, by items, a value for each seed.

    ``trained``: the most items in training, of each task; up to there the panel is shaded. ``units``: by task, what is
    counted in place of items.
    """
    columns = across(len(curves), 2)
    lines = -(-len(curves) // columns)
    names = list(dict.fromkeys(label for of_task in curves.values() for label in of_task))
    if too_many(names):
        return _exact_match_maps(curves, names, trained, units or {}, lines, columns)
    figure, made = panels(lines, columns, (width(columns), 0.6 + 2.5 * lines), sharey=True)
    shown = looks(names)
    for (task, of_task), axes in zip(curves.items(), made, strict=False):
        fewest = min(n for points in of_task.values() for n in points)
        axes.axvspan(min(2, fewest), trained[task], color="0.9", label="training range")
        for label, points in of_task.items():
            # markers of lines that lie on each other stand beside each other
            every = max(1, len(points) // 10)
            draw_band(axes, points, label, shown[label], markevery=(every * names.index(label) // len(names), every))
        axes.set(xlabel=(units or {}).get(task, "items"), ylim=(-3, 103))
        axes.xaxis.get_major_locator().set_params(integer=True)
        titled(axes, "\n".join(filter(None, (task, seeds_said(of_task.values())))))
    for axes in made[::columns]:
        axes.set_ylabel("exact match (%)")
    for axes in made[len(curves) :]:
        axes.set_visible(False)
    handles = {name: handle for axes in made for handle, name in zip(*axes.get_legend_handles_labels(), strict=True)}
    order = [name for name in (*names, "training range") if name in handles]
    legend_of_all(figure, handles=[handles[name] for name in order], labels=order, ncols=2 if columns == 1 else 4)
    return figure


def _exact_match_maps(
    curves: Mapping[str, Mapping[str, Band]],
    names: Sequence[str],
    trained: Mapping[str, int],
    units: Mapping[str, str],
    lines: int,
    columns: int,
) -> Figure:
    """A heat map per task, all with the same rows; a dashed line after the most items in training."""
    figure, made = map_panels(lines, columns, len(names))
    scale = None
    for (task, of_task), axes in zip(curves.items(), made, strict=False):
        rows = {name: means_of(of_task.get(name, {})) for name in names}
        about = task, seeds_said(of_task.values()).partition(";")[0]
        scale = draw_map(
            axes, rows, Normalize(0, 100), "\n".join(filter(None, about)), numbers=rows, after=trained[task]
        )
        axes.set_xlabel(f"{units.get(task, 'items')}\ndashed: the most in training")
    for axes in made[len(curves) :]:
        axes.set_visible(False)
    if scale is not None:
        colour_bar(figure, made, scale, "exact match (%)")
    return figure


def training(curves: Sequence[tuple[str, Mapping[int, float]]]) -> Figure:
    """Training loss over updates, a line for each (label, loss by update); the second half once more, enlarged.

    More than twelve labels have a row each of a heat map instead, the mean over their runs.
    """
    if too_many(dict(curves)):
        return _training_map(curves)
    columns, height = across(2, 2), max(3.0, 0.9 + 0.17 * len(curves))
    figure, (whole, late) = panels(2 // columns, columns, (PAGE, height * 2 / columns))
    shown = looks(list(dict.fromkeys(label for label, _ in curves)))
    last = max(update for _, loss in curves for update in loss)
    ends: dict[str, End] = {}
    for label, loss in curves:
        how = {**shown[label].drawn(), "linewidth": 1.2, "markevery": max(1, len(loss) // 10)}
        half = {update: value for update, value in loss.items() if 2 * update >= last}
        for axes, points in ((whole, loss), (late, half)):
            axes.plot(list(points), list(points.values()), **how, label=None if label in ends else label)
        if half:
            ends.setdefault(label, _end(label, half, shown[label]))
    whole.set(xlabel="updates", ylabel="training loss (bits per token)")
    late.set(xlabel="updates")
    titled(whole, "whole training")
    titled(late, "second half, enlarged")
    name_ends(figure, {late: list(ends.values())})
    return figure


def _training_map(curves: Sequence[tuple[str, Mapping[int, float]]]) -> Figure:
    runs: dict[str, list[Mapping[int, float]]] = {}
    for label, loss in curves:
        runs.setdefault(label, []).append(loss)
    shared = {label: set.intersection(*map(set, own)) for label, own in runs.items()}
    rows = {
        label: {update: sum(loss[update] for loss in own) / len(own) for update in sorted(shared[label])}
        for label, own in runs.items()
    }
    last = max(update for own in rows.values() for update in own)
    late = [value for own in rows.values() for update, value in own.items() if 2 * update >= last]
    order = best_first({label: dict(list(own.items())[-1:]) for label, own in rows.items()})
    figure, (axes,) = map_panels(1, 1, len(rows))
    ordered = {label: rows[label] for label in order}
    scale = draw_map(axes, ordered, Normalize(min(late), max(late)), "training loss", continuous=True)
    axes.set_xlabel("updates")
    colour_bar(figure, [axes], scale, "bits per token, to the largest of the second half", extend="max")
    return figure


def positions(curves: Mapping[str, Mapping[int, float]]) -> Figure:
    """Loss over the position in a block, a line for each label: its loss by the last position of each bucket.

    More than twelve labels have a row each of a heat map instead.
    """
    counted = {label: {upto + 1: value for upto, value in loss.items()} for label, loss in curves.items()}
    if too_many(counted):
        figure, (axes,) = map_panels(1, 1, len(counted))
        scale = draw_map(axes, best_first(counted), scale_of(counted), numbers=best_first(counted))
        axes.set_xlabel("position in the block (tokens)")
        colour_bar(figure, [axes], scale, "loss (bits per token)")
        return figure
    figure, (axes,) = panels(1, 1, (width(), max(3.0, 0.9 + 0.17 * len(curves))))
    shown = looks(list(curves))
    for label, points in counted.items():
        axes.plot(list(points), list(points.values()), **shown[label].drawn(), label=label)
    lengths_along(axes, sorted({n for points in counted.values() for n in points}))
    axes.set(xlabel="position in the block (tokens)", ylabel="loss (bits per token)")
    name_ends(figure, {axes: [_end(label, points, shown[label]) for label, points in counted.items()]})
    return figure


def means_of(points: Band) -> dict[int, float]:
    """The mean over seeds, by length."""
    return {n: sum(values) / len(values) for n, values in points.items()}


def seeds_said(bands: Collection[Band]) -> str:
    """What error bars say, where there are any."""
    counts = sorted({len(values) for points in bands for values in points.values()})
    if not counts or counts[-1] == 1:
        return ""
    many = " or ".join(map(str, counts)) if len(counts) < 3 else f"{counts[0]} to {counts[-1]}"
    least_to_largest = "shaded" if max(map(len, bands)) > _FEW else "bars"
    return f"mean of {many} seeds; {least_to_largest}: least to largest"


def _top(means: Mapping[str, Mapping[int, float]]) -> float | None:
    """The largest value of the lower curves, at least half of all, where they would take less than half the height.

    The lower ones are those below the widest gap, as a multiple of their height; ``None`` if there is no such gap.
    """
    least = min((value for points in means.values() for value in points.values()), default=0.0)
    highest = sorted(max(points.values()) for points in means.values())
    pairs = [pair for k, pair in enumerate(pairwise(highest), 1) if 2 * k >= len(highest)]
    gaps = [((above - least) / (below - least) if below > least else 0.0, below) for below, above in pairs]
    widest, below = max(gaps, default=(0.0, 0.0))
    return below if widest > _SQUASHED else None


def _enlarge(axes: Axes, ratios: Mapping[str, Band], shown: Mapping[str, Look], top: float) -> None:
    """Limit the panel to ``top`` and mark where curves leave it."""
    axes.axhline(1, color="0.5", linewidth=1, zorder=0)
    values = [v for points in ratios.values() for seeds in points.values() for v in seeds]
    pad = 0.06 * (top - min(values))
    high = top + pad
    axes.set_ylim(min(values) - pad, high)
    for label, points in ratios.items():
        means = means_of(points)
        x, y = np.log2(list(means)), np.array(list(means.values()))
        leaves = np.flatnonzero((y[:-1] > high) != (y[1:] > high))
        for k in leaves:
            at = x[k] + (x[k + 1] - x[k]) * (high - y[k]) / (y[k + 1] - y[k])
            mark = {"marker": "^", "markersize": 6, "color": shown[label].colour, "linestyle": "none"}
            axes.plot(2**at, 1.0, **mark, transform=axes.get_xaxis_transform(), clip_on=False, label="_leaves")


def _end(label: str, points: Mapping[int, float], look: Look) -> End:
    x = max(points)
    return End(label, x, points[x], look.colour)


def _ends(curves: Mapping[str, Band], shown: Mapping[str, Look]) -> list[End]:
    return [_end(label, means_of(points), shown[label]) for label, points in curves.items()]


def draw_band(axes: Axes, points: Band, label: str, look: Look, **how: Any) -> None:
    """The mean over seeds; from the least of them to the largest an error bar, or a shade where points are many."""
    x, means = list(points), list(means_of(points).values())
    if len(x) > _FEW:  # markers that touch each other would hide the line
        how = {"markevery": max(1, len(x) // _FEW), **how}
    axes.plot(x, means, **look.drawn(), **how, label=label)
    if all(len(values) == 1 for values in points.values()):
        return
    low, high = [min(values) for values in points.values()], [max(values) for values in points.values()]
    if len(x) > _FEW:
        axes.fill_between(x, low, high, color=look.colour, alpha=0.2, linewidth=0)
    else:
        reach = np.array([np.subtract(means, low), np.subtract(high, means)])
        axes.errorbar(x, means, reach, fmt="none", ecolor=look.colour, elinewidth=1, capsize=2.5, label="_seeds")
