"""Times of attention over length, as ratios to attention without a bias."""

from __future__ import annotations

from collections.abc import Sequence

from matplotlib.figure import Figure

from ..analysis.speed import LIMIT, Timing
from .style import looks

_DASHES = ("-", "--", ":", "-.")


def draw(timings: Sequence[Timing], about: str) -> Figure:
    """One panel per step, both axes logarithmic; ``about`` is its title."""
    steps = list(dict.fromkeys(t.step for t in timings))
    figure = Figure(figsize=(4.6 * len(steps) + 2.2, 4.2), layout="constrained")
    styles = looks(list(dict.fromkeys(t.encoding for t in timings if t.encoding != LIMIT)))
    backends = list(dict.fromkeys(t.backend for t in timings))
    for axes, step in zip(figure.subplots(1, len(steps), squeeze=False)[0], steps, strict=True):
        axes.axhline(1.0, color="0.6", linewidth=1)
        for key in dict.fromkeys((t.encoding, t.backend) for t in timings if t.encoding != LIMIT):
            line = [(t.length, t.ratio) for t in timings if (t.encoding, t.backend, t.step) == (*key, step)]
            if line:
                colour, marker, _ = styles[key[0]]
                look = {"color": colour, "marker": marker, "linestyle": _DASHES[backends.index(key[1]) % len(_DASHES)]}
                axes.plot(*zip(*line, strict=True), label=f"{key[0]}, {key[1]}", markersize=4, **look)
        axes.set(xscale="log", yscale="log", xlabel="tokens", title=step)
        axes.set_ylabel("time over attention without a bias")
        axes.set_xticks(lengths := sorted({t.length for t in timings}), list(map(str, lengths)))
        axes.minorticks_off()
        axes.grid(alpha=0.25)
    lines = {line.get_label(): line for axes in figure.axes for line in axes.get_lines() if line.get_marker() != "None"}
    figure.legend(lines.values(), lines, loc="outside right upper", frameon=False, handlelength=4)
    figure.suptitle(about, fontsize=7)
    return figure
