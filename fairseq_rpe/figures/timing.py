"""Draws times: of attention over length, and what a sliding window costs for what it gains in perplexity."""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from matplotlib.figure import Figure
from matplotlib.lines import Line2D

from fairseq_rpe.analysis.speed import LIMIT, Timing
from fairseq_rpe.figures.method_maps import colour_bar, draw_map, map_panels, scale_of, too_many
from fairseq_rpe.figures.style import (
    COLUMN,
    DASHES,
    MARKERS,
    NAME,
    PAGE,
    TICK,
    across,
    decades,
    headed,
    legend_of_all,
    lengths_along,
    looks,
    mark_training,
    panels,
    titled,
    width,
)

WAYS: tuple[dict[str, Any], ...] = tuple(
    {"linestyle": dashes, "marker": marker, "markersize": 3.5, "linewidth": 1.3}
    for dashes, marker in zip(DASHES * 2, MARKERS, strict=True)
)
_ACROSS = 5  # panels side by side
_MEAN = (0, (8, 2))  # long dashes, as no encoding has them
Points = Sequence[tuple[int, float]]


def of_attention(timings: Sequence[Timing], about: str) -> Figure:
    """A panel for each encoding, a line for each backend, a row for each step; ``about`` is the title."""
    rows: dict[str, dict[tuple[str, str], dict[str, list[tuple[int, float]]]]] = {}
    encodings = list(dict.fromkeys(t.encoding for t in timings if t.encoding != LIMIT))
    for t in timings:
        if t.encoding != LIMIT:
            ways = rows.setdefault(t.step, {}).setdefault((t.encoding, t.encoding), {})
            ways.setdefault(t.backend, []).append((t.length, t.ratio))
    return beside_each_other(
        {step: panel for step, panel in rows.items()},
        {encoding: look.colour for encoding, look in looks(encodings).items()},
        about,
    )


def of_models(timings: Sequence[Timing], about: str) -> Figure:
    """Milliseconds of whole models, a bar for each encoding with a line from the least to the most, a panel a length.

    With several backends these stand beside the encoding's name; ``about`` is the title.
    """
    lengths = list(dict.fromkeys(t.length for t in timings))
    several = len({t.backend for t in timings}) > 1
    names = {(t.encoding, t.backend): f"{t.encoding}, {t.backend}" if several else t.encoding for t in timings}
    shown = looks(list(dict.fromkeys(t.encoding for t in timings)))
    columns = across(len(lengths), 3, 2.1)
    rows = -(-len(lengths) // columns)
    figure, made = panels(rows, columns, (width(columns), 1.0 + rows * (0.5 + 0.27 * len(names))), sharey=True)
    for axes, length in zip(made, lengths, strict=False):
        for timing in (t for t in timings if t.length == length):
            at = list(names).index((timing.encoding, timing.backend))
            axes.barh(at, timing.milliseconds, color=shown[timing.encoding].colour, height=0.7, alpha=0.55)
            axes.plot([timing.least, timing.most], [at, at], color="0.15", linewidth=1.2)
        titled(axes, f"{length} tokens")
        axes.set(xlabel="milliseconds", xlim=(0, None))
        axes.grid(visible=False, axis="y")
        axes.set_axisbelow(True)
    made[0].set_yticks(range(len(names)), list(names.values()))
    made[0].invert_yaxis()
    for axes in made[len(lengths) :]:
        axes.set_visible(False)
    headed(figure, about, TICK)
    return figure


def beside_each_other(
    rows: Mapping[str, Mapping[tuple[str, str], Mapping[str, Points]]], colours: Mapping[str, str], about: str
) -> Figure:
    """Multiples of attention without a bias over length, both axes logarithmic and alike in all panels: a row a name.

    ``rows``: name -> (title, key of ``colours``) -> way -> (length in tokens, multiple). A way has its line and marker
    in every panel, what is timed its colour. ``about`` is the title.
    """
    titles = list(dict.fromkeys(title for panel in rows.values() for title in panel)) or [("nothing was timed", "")]
    ways = list(dict.fromkeys(way for panel in rows.values() for of in panel.values() for way in of))
    how = {way: WAYS[number % len(WAYS)] for number, way in enumerate(ways)}
    lengths = sorted({n for panel in rows.values() for of in panel.values() for own in of.values() for n, _ in own})
    columns = across(len(titles), _ACROSS, 1.3)
    deep = -(-len(titles) // columns)
    wide = max(COLUMN, min(PAGE, 1.0 + 1.4 * columns))
    size = wide, 1.0 + 1.6 * deep * len(rows)
    figure, made = panels(deep * len(rows), columns, size, sharex=True, sharey=True)
    for number, (name, panel) in enumerate(rows.items()):
        own = made[number * deep * columns :][: deep * columns]
        for axes, title in zip(own, titles, strict=False):
            axes.axhline(1.0, color="0.5", linewidth=1, zorder=0)
            for way, points in panel.get(title, {}).items():
                axes.plot(*zip(*points, strict=True), color=colours[title[1]], **how[way])
            if not number or deep > 1:
                titled(axes, title[0])
        for axes in own[len(titles) :]:
            axes.set_visible(False)
        for axes in own[::columns]:
            axes.set_ylabel(name)
    decades(made[0])
    lengths_along(made[0], lengths, 3)
    for axes in made[-columns:]:
        axes.set_xlabel("tokens")
    handles = [Line2D([], [], color="0.3", **how[way], label=way) for way in ways]
    legend_of_all(figure, handles=handles, ncols=4)
    figure.supylabel("multiple of attention without a bias", fontsize=NAME)
    headed(figure, about, TICK)
    return figure


class Timed(NamedTuple):
    """A way, ``mode``, to evaluate at a window in tokens: ``ppl`` per token, ``relative`` time."""

    encoding: str
    mode: str
    window: int
    ppl: float
    relative: float


class WindowMean(NamedTuple):
    """Mean perplexity per token without overlap of one ``encoding``, over windows of ``first`` to ``last`` tokens."""

    encoding: str
    ppl: float
    first: int
    last: int


def of_windows(
    rows: Sequence[Timed], stride: int, published: float, trained: Sequence[int] = (), means: Sequence[WindowMean] = ()
) -> Figure:
    """Perplexity of all modes and time of those after the first, which is what times are relative to.

    More than twelve lines are a row each of heat maps instead. Source of the kind of figure: "Exploring Transformer
    Extrapolation" (arXiv 2307.10156), Fig. 1.

    Args:
        rows: what was measured.
        stride: in tokens, of the modes after the first.
        published: a relative time to draw a line at.
        trained: lengths in tokens to mark.
        means: perplexities to draw a horizontal line at, such as ALiBi's.
    """
    shown = looks(list(dict.fromkeys(row.encoding for row in rows)))
    modes = dict(zip(dict.fromkeys(row.mode for row in rows), DASHES, strict=False))
    if too_many(list(dict.fromkeys((row.encoding, row.mode) for row in rows))):
        return _window_maps(rows, next(iter(modes)), stride)
    windows = sorted({row.window for row in rows})
    columns = across(2, 2)
    figure, (left, right) = panels(2 // columns, columns, (PAGE, 3.4 if columns == 2 else 5.6))
    for axes, column, drawn in ((left, "ppl", list(modes)), (right, "relative", list(modes)[1:])):
        for length in trained:
            mark_training(axes, length, named=axes is left)
        for label, look in shown.items():
            for mode in drawn:
                points = sorted((r.window, getattr(r, column)) for r in rows if (r.encoding, r.mode) == (label, mode))
                axes.plot(*zip(*points, strict=True), **look.drawn() | {"linestyle": modes[mode]})
        lengths_along(axes, windows)
        axes.set_xlabel("window (tokens)")
    for mean in means:
        left.axhline(mean.ppl, color=shown[mean.encoding].colour, linewidth=1, linestyle=_MEAN, label="_mean")
    left.set_ylabel("perplexity per token")
    titled(left, "perplexity")
    decades(right)
    titled(right, "time")
    right.set_ylabel("time / non-overlapping time")
    right.axhline(1, color="0.5", linewidth=1, zorder=0)
    right.axhline(published, color="0.5", linewidth=1, linestyle=DASHES[2])
    place: dict[str, Any] = {"xycoords": ("axes fraction", "data"), "xytext": (0, -3), "textcoords": "offset points"}
    below: dict[str, Any] = {"horizontalalignment": "right", "verticalalignment": "top", "fontsize": TICK}
    right.annotate(f"published: {published}", (0.98, published), **place, **below, color="0.35")
    handles = [Line2D([], [], **look.drawn() | {"linestyle": ""}, label=label) for label, look in shown.items()]
    for number, (mode, dashes) in enumerate(modes.items()):
        name = f"{mode}, stride {stride}" if number else mode
        handles.append(Line2D([], [], color="0.3", linestyle=dashes, label=name))
    for mean in means:
        windows = f"{mean.first} to {mean.last}" if mean.first < mean.last else str(mean.first)
        name = f"{mean.encoding}, {next(iter(modes))}: mean of windows {windows}"
        handles.append(Line2D([], [], color=shown[mean.encoding].colour, linewidth=1, linestyle=_MEAN, label=name))
    legend_of_all(figure, handles=handles, ncols=4)
    return figure


def _window_maps(rows: Sequence[Timed], first: str, stride: int) -> Figure:
    """Perplexity of each encoding and mode by window, and the time of those modes that slide."""
    ppl: dict[str, dict[float, float]] = {}
    time: dict[str, dict[float, float]] = {}
    for row in rows:
        name = f"{row.encoding}, {row.mode}"
        ppl.setdefault(name, {})[row.window] = row.ppl
        time.setdefault(name, {})[row.window] = 1.0 if row.mode == first else row.relative
    columns = across(2, 2, 3.3)
    figure, (left, right) = map_panels(2 // columns, columns, len(ppl))
    for axes, values, title, about in (
        (left, ppl, "perplexity", "per token"),
        (right, time, f"time, stride {stride}", f"time / {first} time"),
    ):
        colour_bar(figure, [axes], draw_map(axes, values, scale_of(values), title, numbers=values), about)
        axes.set_xlabel("window (tokens)")
    return figure
