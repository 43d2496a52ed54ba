"""The figures of ``erf``: one panel per head, one curve per checkpoint (mean over its layers)."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from fairseq_rpe.figures.style import looks

if TYPE_CHECKING:
    from matplotlib.figure import Figure
    from torch import Tensor

    from fairseq_rpe.cli.erf import Measured

    Curve = tuple[list[float], Tensor]

_PANELS = 4  # heads that are drawn, from the first to the last


def curves(found: list[Measured], epsilons: list[float]) -> Figure:
    """1 - mass of the nearest keys against their number: read at height ε it is n_emp(ε) of the mean curve."""
    from matplotlib.ticker import NullLocator, StrMethodFormatter

    from fairseq_rpe.cli.erf import thinned

    length = found[0].field.length
    shown = thinned(length - 1)
    keys = [d + 1 for d in shown]

    def left_out(mass: Tensor) -> Tensor:
        return (1 - mass.mean(0).cumsum(-1))[:, shown].clamp_min(0)

    figure, panels = _panels(found, lambda mass: (keys, left_out(mass)))
    trained = sorted({one.subject.train_length for one in found})
    for axes in panels:
        for epsilon in epsilons:
            axes.axhline(epsilon, color="0.7", linewidth=0.8, linestyle=":", zorder=0)
        for n in trained:
            axes.axvline(n, color="0.7", linewidth=0.8, linestyle=":", zorder=0)
        axes.set_xscale("log", base=4)
        axes.xaxis.set_major_formatter(StrMethodFormatter("{x:.0f}"))
        axes.xaxis.set_minor_locator(NullLocator())
        axes.set_yscale("log")
        axes.set_xlim(1, length)
        axes.set_ylim(min(epsilons) / 3, 1)
    lines = ", ".join(f"{n} tokens (training)" for n in trained)
    figure.supxlabel(f"nearest keys j (tokens, blocks of {length}); dotted: {lines}, each ε", fontsize="medium")
    figure.supylabel("attention beyond the nearest j keys", fontsize="medium")
    return figure


def quantised_curves(found: list[Measured]) -> Figure:
    """The figure of the paper: n / length against ε from 1 down to 0."""
    from fairseq_rpe.analysis.erf import quantised

    def steps(mass: Tensor) -> tuple[list[float], Tensor]:
        epsilons, part = quantised(mass.mean(0))
        return epsilons.tolist(), part

    figure, panels = _panels(found, steps)
    for axes in panels:
        axes.set_xlim(1, 0)
        axes.set_ylim(0, 1)
    figure.supxlabel("ε, the part of the attention left out", fontsize="medium")
    figure.supylabel(f"nearest keys needed / {found[0].field.length} tokens", fontsize="medium")
    return figure


def _panels(found: list[Measured], curve: Callable[[Tensor], Curve]) -> tuple[Figure, list[Any]]:
    """A panel for each of a few heads; ``curve`` gives x and (heads, len(x)) from (layers, heads, length) masses."""
    from matplotlib.figure import Figure
    from matplotlib.lines import Line2D

    from fairseq_rpe.cli.erf import masses

    heads = min(one.mass.shape[1] for one in found)
    count = min(heads, _PANELS)
    chosen = [round(i * (heads - 1) / max(1, count - 1)) for i in range(count)]
    rows = 1 if count < _PANELS else 2
    figure = Figure(figsize=(7.2, 1.2 + 2.5 * rows), layout="constrained")
    panels = list(figure.subplots(rows, -(-count // rows), sharex=True, sharey=True, squeeze=False).flat)[:count]
    shown = looks([one.subject.label for one in found])
    for one in found:
        colour, marker, _ = shown[one.subject.label]
        x, y = curve(one.mass)
        for axes, head in zip(panels, chosen, strict=True):
            axes.plot(x, y[head], color=colour, marker=marker, markersize=3.5, markevery=0.12, linewidth=1.4)
        if one.bias is not None:
            x, y = curve(masses(one.bias))
            for axes, head in zip(panels, chosen, strict=True):
                axes.plot(x, y[head], color=colour, linestyle="--", linewidth=1)
    for axes, head in zip(panels, chosen, strict=True):
        axes.set_title(f"head {head + 1}", fontsize="medium")
        axes.grid(alpha=0.25)
    handles = []
    for one in found:
        colour, marker, _ = shown[one.subject.label]
        handles.append(Line2D([], [], color=colour, marker=marker, markersize=3.5, label=one.subject.label))
    if any(one.bias is not None for one in found):
        handles.append(Line2D([], [], color="0.3", linestyle="--", linewidth=1, label="bias alone"))
    figure.legend(handles=handles, loc="outside upper center", ncols=5, frameon=False, fontsize="small")
    return figure, panels
