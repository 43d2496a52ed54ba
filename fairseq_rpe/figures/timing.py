"""Draws times: of attention over length, and what a sliding window costs for what it gains in perplexity."""

from collections.abc import Sequence
from typing import Any, NamedTuple

from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import NullFormatter, NullLocator, StrMethodFormatter

from ..analysis.speed import LIMIT, Timing
from .style import legend_of_all, looks, panels

_DASHES = ("-", "--", ":", "-.")


def of_attention(timings: Sequence[Timing], about: str) -> Figure:
    """One panel per step, both axes logarithmic; ``about`` is its title."""
    steps = list(dict.fromkeys(t.step for t in timings))
    figure, made = panels(1, len(steps), (4.6 * len(steps) + 2.2, 4.2))
    drawn = list(dict.fromkeys((t.encoding, t.backend) for t in timings if t.encoding != LIMIT))
    styles = looks(list(dict.fromkeys(encoding for encoding, _ in drawn)))
    backends = list(dict.fromkeys(t.backend for t in timings))
    lengths = sorted({t.length for t in timings})
    for axes, step in zip(made, steps, strict=True):
        axes.axhline(1.0, color="0.6", linewidth=1)
        for encoding, backend in drawn:
            own = [t for t in timings if (t.encoding, t.backend, t.step) == (encoding, backend, step)]
            if own:
                look = {**styles[encoding].drawn(), "linestyle": _DASHES[backends.index(backend) % len(_DASHES)]}
                axes.plot([t.length for t in own], [t.ratio for t in own], label=f"{encoding}, {backend}", **look)
        axes.set(xscale="log", yscale="log", xlabel="tokens", title=step)
        axes.set_ylabel("time over attention without a bias")
        axes.set_xticks(lengths, list(map(str, lengths)))
        axes.minorticks_off()
    lines = {line.get_label(): line for axes in made for line in axes.get_lines() if line.get_marker() != "None"}
    figure.legend(lines.values(), lines, loc="outside right upper", frameon=False, handlelength=4)
    figure.suptitle(about, fontsize=7)
    return figure


class Timed(NamedTuple):
    """A way, ``mode``, to evaluate at a window in tokens: ``ppl`` per token, ``relative`` time."""

    encoding: str
    mode: str
    window: int
    ppl: float
    relative: float


def of_windows(rows: Sequence[Timed], stride: int, published: float) -> Figure:
    """Perplexity of all modes and time of those after the first, which is what times are relative to.

    ``stride``: in tokens, of the modes after the first; ``published``: a relative time to draw a line at.
    """
    shown = looks(list(dict.fromkeys(row.encoding for row in rows)))
    modes = dict(zip(dict.fromkeys(row.mode for row in rows), _DASHES, strict=False))
    windows = list(dict.fromkeys(row.window for row in rows))
    figure, (left, right) = panels(1, 2, (9.2, 4.0))
    for axes, column, drawn in ((left, "ppl", list(modes)), (right, "relative", list(modes)[1:])):
        for label, look in shown.items():
            for mode in drawn:
                points = sorted((r.window, getattr(r, column)) for r in rows if (r.encoding, r.mode) == (label, mode))
                axes.plot(*zip(*points, strict=True), **look.drawn() | {"linestyle": modes[mode]})
        axes.set_xscale("log", base=2)
        axes.set_xticks(windows, [str(w) for w in windows])
        axes.xaxis.set_minor_locator(NullLocator())
        axes.set_xlabel("window (tokens)")
    left.set_ylabel("perplexity per token")
    right.set(yscale="log", ylabel="time / non-overlapping time")
    right.yaxis.set_major_formatter(StrMethodFormatter("{x:g}"))
    right.yaxis.set_minor_formatter(NullFormatter())
    right.axhline(1, color="0.5", linewidth=1)
    right.axhline(published, color="0.5", linewidth=1, linestyle=(0, (1, 2)))
    place: dict[str, Any] = {"xycoords": ("axes fraction", "data"), "xytext": (0, 3), "textcoords": "offset points"}
    right.annotate(f"published mean: {published}", (0.02, published), **place, fontsize="small", color="0.35")
    right.set_ylim(top=1.6 * max(right.get_ylim()[1], published))
    handles = [Line2D([], [], **look.drawn() | {"linestyle": "-"}, label=label) for label, look in shown.items()]
    for number, (mode, dashes) in enumerate(modes.items()):
        name = f"{mode}, stride {stride}" if number else mode
        handles.append(Line2D([], [], color="0.3", linestyle=dashes, label=name))
    legend_of_all(figure, "outside lower center", handles=handles, ncols=4)
    return figure
