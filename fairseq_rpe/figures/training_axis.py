"""The figure of the ratio of perplexities along the training."""

from collections.abc import Mapping, Sequence

from matplotlib.figure import Figure
from matplotlib.ticker import EngFormatter, LogLocator, NullLocator

from fairseq_rpe.figures.style import (
    LineEnd,
    assign_looks,
    figure_width,
    label_line_ends,
    panels,
    set_decade_axis,
    set_title,
)

_LOG_RATIO = 2.0  # largest / smallest ratio from which on the axis is logarithmic


def draw_training_axis(curves: Mapping[str, Sequence[Mapping[int, float]]], longest: int, trained_at: int) -> Figure:
    """Draw the ratio of perplexities against the tokens trained: a line for each method, and pale lines for its seeds.

    Args:
        curves: method -> for each seed, the ratio by tokens trained.
        longest: length of the evaluation, in tokens.
        trained_at: training length in tokens.
    """
    figure, (axes,) = panels(1, 1, (figure_width(), max(3.0, 0.9 + 0.17 * len(curves))))
    looks, ends = assign_looks(list(curves)), []
    axes.axhline(1, color="0.5", linewidth=1, zorder=0)
    for name, seeds in curves.items():
        look = looks[name]
        if len(seeds) > 1:
            for curve in seeds:
                axes.plot(list(curve), list(curve.values()), color=look.colour, alpha=0.3, linewidth=0.8)
        shared = sorted(set.intersection(*(set(curve) for curve in seeds)))
        means = [sum(curve[tokens] for curve in seeds) / len(seeds) for tokens in shared]
        axes.plot(shared, means, **look.plot_options(), label=name)
        if shared:
            ends.append(LineEnd(name, shared[-1], means[-1], look.colour))
    values = [value for seeds in curves.values() for curve in seeds for value in curve.values()]
    axes.set_xscale("log")
    axes.xaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    axes.xaxis.set_major_formatter(EngFormatter(sep=""))
    axes.xaxis.set_minor_locator(NullLocator())
    is_logarithmic = max(values) > _LOG_RATIO * min(values)
    if is_logarithmic:
        set_decade_axis(axes, narrow=True)
    axes.set_xlabel("tokens trained")
    axes.set_ylabel(f"perplexity at {longest} / at {trained_at}{', logarithmic' if is_logarithmic else ''}")
    if (count := max(map(len, curves.values()))) > 1:
        set_title(axes, f"mean of up to {count} seeds; pale: each seed")
    label_line_ends(figure, {axes: ends})
    return figure
