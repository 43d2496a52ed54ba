"""Figures of timings: attention and models over length, and the cost and gain of sliding-window evaluation."""

import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from matplotlib.figure import Figure
from matplotlib.lines import Line2D

from fairseq_rpe.analysis.speed import BASELINE, Timing
from fairseq_rpe.core.looks import MARKERS
from fairseq_rpe.figures.heat_maps import add_colour_bar, colour_norm, draw_map, exceeds_line_limit, map_panels
from fairseq_rpe.figures.style import (
    COLUMN,
    DASHES,
    NAME,
    PAGE,
    TICK,
    Look,
    add_legend,
    assign_looks,
    figure_width,
    hide_unused,
    mark_training,
    panel_columns,
    panels,
    set_decade_axis,
    set_figure_title,
    set_length_axis,
    set_title,
)

BACKEND_STYLES: tuple[dict[str, Any], ...] = tuple(
    {"linestyle": dashes, "marker": marker, "markersize": 3.5, "linewidth": 1.3}
    for dashes, marker in zip(DASHES * 2, MARKERS, strict=True)
)
_MAX_COLUMNS = 5  # panels side by side
_MEAN = (0, (8, 2))  # long dashes, which no encoding has
Points = Sequence[tuple[int, float]]  # (length in tokens, multiple)
PanelKey = tuple[str, str]  # title of a panel, and the key of its colour
Rows = dict[str, dict[PanelKey, dict[str, list[tuple[int, float]]]]]  # row -> panel -> backend -> points


def draw_attention_timing(timings: Sequence[Timing], about: str) -> Figure:
    """Draw times of attention: a panel for each encoding, a line for each backend, a row for each step.

    Args:
        timings: timings of forward and training steps of attention.
        about: machine and setting, the title of the figure.
    """
    rows: Rows = {}
    encodings = list(dict.fromkeys(t.encoding for t in timings if t.encoding != BASELINE))
    for t in timings:
        if t.encoding != BASELINE:
            lines = rows.setdefault(t.step, {}).setdefault((t.encoding, t.encoding), {})
            lines.setdefault(t.backend, []).append((t.length, t.ratio))
    return draw_side_by_side(rows, {spec: look.colour for spec, look in assign_looks(encodings).items()}, about)


def draw_model_timing(timings: Sequence[Timing], about: str) -> Figure:
    """Draw milliseconds of whole models: a bar for each encoding, with its range as a line, in a panel for each length.

    Args:
        timings: timings of models; with several backends, labels have their names too.
        about: machine and setting, the title of the figure.
    """
    lengths = list(dict.fromkeys(t.length for t in timings))
    several = len({t.backend for t in timings}) > 1
    names = {(t.encoding, t.backend): f"{t.encoding}, {t.backend}" if several else t.encoding for t in timings}
    looks = assign_looks(list(dict.fromkeys(t.encoding for t in timings)))
    columns = panel_columns(len(lengths), 3, narrowest=2.1)
    rows = math.ceil(len(lengths) / columns)
    figure, all_axes = panels(
        rows, columns, (figure_width(columns), 1.0 + rows * (0.5 + 0.27 * len(names))), sharey=True
    )
    for axes, length in zip(all_axes, lengths, strict=False):
        for timing in (t for t in timings if t.length == length):
            y = list(names).index((timing.encoding, timing.backend))
            axes.barh(y, timing.milliseconds, color=looks[timing.encoding].colour, height=0.7, alpha=0.55)
            axes.plot([timing.least, timing.most], [y, y], color="0.15", linewidth=1.2)
        set_title(axes, f"{length} tokens")
        axes.set(xlabel="milliseconds", xlim=(0, None))
        axes.grid(visible=False, axis="y")
        axes.set_axisbelow(True)
    all_axes[0].set_yticks(range(len(names)), list(names.values()))
    all_axes[0].invert_yaxis()
    hide_unused(all_axes, len(lengths))
    set_figure_title(figure, about, TICK)
    return figure


def draw_side_by_side(
    rows: Mapping[str, Mapping[PanelKey, Mapping[str, Points]]], colours: Mapping[str, str], about: str
) -> Figure:
    """Draw multiples of the time of attention without a bias over length, with the same logarithmic axes in all panels.

    Args:
        rows: name of a row -> (title of a panel, key of ``colours``) -> backend -> (length in tokens, multiple). Each
            backend has the same line and marker in all panels.
        colours: key -> colour.
        about: machine and setting, the title of the figure.
    """
    keys = list(dict.fromkeys(key for panel in rows.values() for key in panel)) or [("nothing was timed", "")]
    backends = list(dict.fromkeys(name for panel in rows.values() for lines in panel.values() for name in lines))
    styles = {name: BACKEND_STYLES[number % len(BACKEND_STYLES)] for number, name in enumerate(backends)}
    curves = [points for panel in rows.values() for lines in panel.values() for points in lines.values()]
    lengths = sorted({n for points in curves for n, _ in points})
    columns = panel_columns(len(keys), _MAX_COLUMNS, narrowest=1.3)
    lines_per_row = math.ceil(len(keys) / columns)
    rows = rows or {"": {}}  # an empty row for the message that nothing was timed
    width = max(COLUMN, min(PAGE, 1.0 + 1.4 * columns))
    size = width, 1.0 + 1.6 * lines_per_row * len(rows)
    figure, all_axes = panels(lines_per_row * len(rows), columns, size, sharex=True, sharey=True)
    for number, (name, panel) in enumerate(rows.items()):
        row_axes = all_axes[number * lines_per_row * columns :][: lines_per_row * columns]
        for axes, key in zip(row_axes, keys, strict=False):
            title, colour_key = key
            axes.axhline(1.0, color="0.5", linewidth=1, zorder=0)
            for backend, points in panel.get(key, {}).items():
                axes.plot(*zip(*points, strict=True), color=colours[colour_key], **styles[backend])
            if not number or lines_per_row > 1:  # other rows have the titles of the first row above them
                set_title(axes, title)
        hide_unused(row_axes, len(keys))
        for axes in row_axes[::columns]:
            axes.set_ylabel(name)
    set_decade_axis(all_axes[0])
    set_length_axis(all_axes[0], lengths, 3)
    for axes in all_axes[-columns:]:
        axes.set_xlabel("tokens")
    handles = [Line2D([], [], color="0.3", **styles[name], label=name) for name in backends]
    add_legend(figure, handles=handles, ncols=4)
    figure.supylabel("multiple of attention without a bias", fontsize=NAME)
    set_figure_title(figure, about, TICK)
    return figure


class WindowTiming(NamedTuple):
    """One evaluation of a model with windows.

    Attributes:
        encoding: label of the encoding.
        mode: how the windows overlap.
        window: window in tokens.
        ppl: perplexity per token.
        relative: time relative to windows that do not overlap.
    """

    encoding: str
    mode: str
    window: int
    ppl: float
    relative: float


class WindowMean(NamedTuple):
    """Mean perplexity over windows of several lengths, which do not overlap.

    Attributes:
        encoding: label of the encoding.
        ppl: mean perplexity per token.
        first: shortest window in tokens.
        last: longest window in tokens.
    """

    encoding: str
    ppl: float
    first: int
    last: int


def draw_window_timing(
    rows: Sequence[WindowTiming],
    stride: int,
    published: float,
    trained: Sequence[int] = (),
    means: Sequence[WindowMean] = (),
) -> Figure:
    """Draw the perplexity of all modes, and the time of those after the first, relative to the first.

    More than twelve lines are drawn as rows of heat maps. Source of the kind of figure: "Exploring Transformer
    Extrapolation" (arXiv 2307.10156), Fig. 1.

    Args:
        rows: perplexity and relative time of each encoding, mode and window.
        stride: stride in tokens of the modes after the first.
        published: published relative time, drawn as a line.
        trained: training lengths in tokens, which are marked.
        means: mean perplexities drawn as horizontal lines, such as ALiBi's.
    """
    looks = assign_looks(list(dict.fromkeys(row.encoding for row in rows)))
    modes = dict(zip(dict.fromkeys(row.mode for row in rows), DASHES, strict=False))
    if exceeds_line_limit(list(dict.fromkeys((row.encoding, row.mode) for row in rows))):
        return _window_maps(rows, next(iter(modes)), stride)
    windows = sorted({row.window for row in rows})
    columns = panel_columns(2, 2)
    figure, (left, right) = panels(2 // columns, columns, (PAGE, 3.4 if columns == 2 else 5.6))
    # the time of the first mode is the unit of the right panel
    for axes, column, drawn in ((left, "ppl", list(modes)), (right, "relative", list(modes)[1:])):
        for length in trained:
            mark_training(axes, length, named=axes is left)
        for label, look in looks.items():
            for mode in drawn:
                points = sorted((r.window, getattr(r, column)) for r in rows if (r.encoding, r.mode) == (label, mode))
                axes.plot(*zip(*points, strict=True), **look.plot_options() | {"linestyle": modes[mode]})
        set_length_axis(axes, windows)
        axes.set_xlabel("window (tokens)")
    for mean in means:
        left.axhline(mean.ppl, color=looks[mean.encoding].colour, linewidth=1, linestyle=_MEAN, label="_mean")
    left.set_ylabel("perplexity per token")
    set_title(left, "perplexity")
    set_decade_axis(right)
    set_title(right, "time")
    right.set_ylabel("time / non-overlapping time")
    right.axhline(1, color="0.5", linewidth=1, zorder=0)
    right.axhline(published, color="0.5", linewidth=1, linestyle=DASHES[2])
    placement: dict[str, Any] = {
        "xycoords": ("axes fraction", "data"),
        "xytext": (0, -3),
        "textcoords": "offset points",
    }
    alignment: dict[str, Any] = {"horizontalalignment": "right", "verticalalignment": "top", "fontsize": TICK}
    right.annotate(f"published: {published}", (0.98, published), **placement, **alignment, color="0.35")
    add_legend(figure, handles=_window_handles(looks, modes, stride, means), ncols=4)
    return figure


def _window_handles(
    looks: Mapping[str, Look], modes: Mapping[str, Any], stride: int, means: Sequence[WindowMean]
) -> list[Line2D]:
    """Return the entries of the legend: markers of encodings, line styles of modes, and mean perplexities."""
    handles = [Line2D([], [], **look.plot_options() | {"linestyle": ""}, label=label) for label, look in looks.items()]
    for number, (mode, dashes) in enumerate(modes.items()):
        name = f"{mode}, stride {stride}" if number else mode
        handles.append(Line2D([], [], color="0.3", linestyle=dashes, label=name))
    for mean in means:
        windows = f"{mean.first} to {mean.last}" if mean.first < mean.last else str(mean.first)
        name = f"{mean.encoding}, {next(iter(modes))}: mean of windows {windows}"
        handles.append(Line2D([], [], color=looks[mean.encoding].colour, linewidth=1, linestyle=_MEAN, label=name))
    return handles


def _window_maps(rows: Sequence[WindowTiming], first: str, stride: int) -> Figure:
    """Draw heat maps of the perplexity and of the relative time of each encoding and mode by window."""
    ppl: dict[str, dict[float, float]] = {}
    time: dict[str, dict[float, float]] = {}
    for row in rows:
        name = f"{row.encoding}, {row.mode}"
        ppl.setdefault(name, {})[row.window] = row.ppl
        time.setdefault(name, {})[row.window] = 1.0 if row.mode == first else row.relative
    columns = panel_columns(2, 2, 3.3)
    figure, (left, right) = map_panels(2 // columns, columns, len(ppl))
    for axes, values, title, about in (
        (left, ppl, "perplexity", "per token"),
        (right, time, f"time, stride {stride}", f"time / {first} time"),
    ):
        add_colour_bar(figure, [axes], draw_map(axes, values, colour_norm(values), title, numbers=values), about)
        axes.set_xlabel("window (tokens)")
    return figure
