"""The figures of a sweep: perplexity or exact answers over length, loss over training and over the position."""

from collections.abc import Mapping, Sequence
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import NullLocator

from .style import Look, legend_beside, legend_of_all, legend_within, looks, panels

Band = Mapping[int, Sequence[float]]


def perplexity(curves: Mapping[str, Band], trained_at: int) -> Figure:
    """Perplexity per token against evaluation length: for each label, by length, a value for each seed."""
    many = len(curves) >= 7
    figure, (axes,) = panels(1, 1, (7.8 if many else 6.4, 4.2))
    shown = looks(list(curves))
    for label, points in curves.items():
        _band(axes, points, label, shown[label])
    axes.axvline(trained_at, color="0.5", linestyle="--", linewidth=1, label=f"training length ({trained_at})")
    lengths = sorted({n for points in curves.values() for n in points})
    axes.set_xscale("log", base=2)
    axes.set_xticks(lengths, [str(n) for n in lengths])
    axes.xaxis.set_minor_locator(NullLocator())
    axes.set(xlabel="evaluation length (tokens)", ylabel="perplexity per token")
    # many lines leave no room for their names among them
    (legend_beside if many else legend_within)(axes)
    return figure


def exact_match(curves: Mapping[str, Mapping[str, Band]], trained: Mapping[str, int]) -> Figure:
    """Exact answers in per cent against items, a panel per task: for each label, by items, a value for each seed.

    ``trained``: the most items in training, of each task; up to there the panel is shaded.
    """
    columns = min(2, len(curves))
    lines = -(-len(curves) // columns)
    figure, made = panels(lines, columns, (6.4 * columns, 3.8 * lines), sharey=True)
    shown = looks(list(dict.fromkeys(label for of_task in curves.values() for label in of_task)))
    for (task, of_task), axes in zip(curves.items(), made, strict=False):
        axes.axvspan(2, trained[task], color="0.9", label=f"training range (2 … {trained[task]})")
        for label, points in of_task.items():
            _band(axes, points, label, shown[label], markevery=max(1, len(points) // 20))
        axes.set(title=task, xlabel="items", ylim=(-3, 103))
    for axes in made[::columns]:
        axes.set_ylabel("exact match (%)")
    for axes in made[len(curves) :]:
        axes.set_visible(False)
    legend_within(made[0])
    return figure


def training(curves: Sequence[tuple[str, Mapping[int, float]]]) -> Figure:
    """Training loss over updates, a line for each (label, loss by update); the second half once more, enlarged."""
    figure, (whole, late) = panels(1, 2, (9.4, 4.2))
    shown = looks(list(dict.fromkeys(label for label, _ in curves)))
    last = max(update for _, loss in curves for update in loss)
    named: set[str] = set()
    for label, loss in curves:
        how = {**shown[label].drawn(), "linewidth": 1.2, "markevery": max(1, len(loss) // 10)}
        whole.plot(list(loss), list(loss.values()), **how, label=None if label in named else label)
        half = {update: value for update, value in loss.items() if 2 * update >= last}
        late.plot(list(half), list(half.values()), **how)
        named.add(label)
    whole.set(title="whole training", xlabel="updates", ylabel="training loss (bits per token)")
    late.set(title="second half", xlabel="updates")
    legend_of_all(figure)
    return figure


def positions(curves: Mapping[str, Mapping[int, float]]) -> Figure:
    """Loss over the position in a block, a line for each label: its loss by the last position of each bucket."""
    figure, (axes,) = panels(1, 1, (7.8, 4.2))
    shown = looks(list(curves))
    for label, loss in curves.items():
        axes.plot([upto + 1 for upto in loss], list(loss.values()), **shown[label].drawn(), label=label)
    axes.set_xscale("log", base=2)
    axes.set(xlabel="position in the block (tokens)", ylabel="loss (bits per token)")
    legend_of_all(figure)
    return figure


def _band(axes: Axes, points: Band, label: str, look: Look, **how: Any) -> None:
    """The mean over seeds; shaded, from the least of them to the largest."""
    means = [sum(values) / len(values) for values in points.values()]
    axes.plot(list(points), means, **look.drawn(), **how, label=label)
    if any(len(values) > 1 for values in points.values()):
        low, high = [min(values) for values in points.values()], [max(values) for values in points.values()]
        axes.fill_between(list(points), low, high, color=look.colour, alpha=0.2, linewidth=0)
