"""Times of attention over length, as ratios to attention without a bias."""

from collections.abc import Sequence

from matplotlib.figure import Figure

from ..analysis.speed import LIMIT, Timing
from .canvas import panels
from .style import looks

_DASHES = ("-", "--", ":", "-.")


def draw(timings: Sequence[Timing], about: str) -> Figure:
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
