"""Draws empirical receptive fields: one panel per head, one curve per model (mean over its layers)."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import NullLocator, StrMethodFormatter
from torch import Tensor

from ..analysis.bias_map import some_heads
from ..analysis.receptive_field import quantised, thinned
from . import canvas
from .style import looks

_BIAS: dict[str, Any] = {"linestyle": "--", "linewidth": 1}
Curve = tuple[list[float], Tensor]


@dataclass(frozen=True)
class Mass:
    """What was measured of a model that was trained at ``train_length`` tokens.

    ``mass``: (layers, heads, length) mean attention by distance; ``bias_mass``: that of its bias alone, if it has one.
    """

    label: str
    train_length: int
    mass: Tensor
    bias_mass: Tensor | None


def curves(found: Sequence[Mass], epsilons: Sequence[float]) -> Figure:
    """1 - mass of the nearest keys against their number: read at height ε it is n_emp(ε) of the mean curve."""
    length = found[0].mass.shape[-1]
    shown = thinned(length - 1)
    keys = [d + 1 for d in shown]

    def left_out(mass: Tensor) -> Curve:
        return keys, (1 - mass.mean(0).cumsum(-1))[:, shown].clamp_min(0)

    figure, panels = _panels(found, left_out)
    trained = sorted({one.train_length for one in found})
    thin: dict[str, Any] = {"color": "0.7", "linewidth": 0.8, "linestyle": ":", "zorder": 0}
    for axes in panels:
        for epsilon in epsilons:
            axes.axhline(epsilon, **thin)
        for n in trained:
            axes.axvline(n, **thin)
        axes.set_xscale("log", base=4)
        axes.xaxis.set_major_formatter(StrMethodFormatter("{x:.0f}"))
        axes.xaxis.set_minor_locator(NullLocator())
        axes.set(yscale="log", xlim=(1, length), ylim=(min(epsilons) / 3, 1))
    lines = ", ".join(f"{n} tokens (training)" for n in trained)
    figure.supxlabel(f"nearest keys j (tokens, blocks of {length}); dotted: {lines}, each ε", fontsize="medium")
    figure.supylabel("attention beyond the nearest j keys", fontsize="medium")
    return figure


def quantised_curves(found: Sequence[Mass]) -> Figure:
    """The figure of the paper: n / length against ε from 1 down to 0."""

    def steps(mass: Tensor) -> Curve:
        epsilons, part = quantised(mass.mean(0))
        return epsilons.tolist(), part

    figure, panels = _panels(found, steps)
    for axes in panels:
        axes.set(xlim=(1, 0), ylim=(0, 1))
    figure.supxlabel("ε, the part of the attention left out", fontsize="medium")
    figure.supylabel(f"nearest keys needed / {found[0].mass.shape[-1]} tokens", fontsize="medium")
    return figure


def _panels(found: Sequence[Mass], curve: Callable[[Tensor], Curve]) -> tuple[Figure, list[Axes]]:
    """A panel for each of a few heads; ``curve`` gives x and (heads, len(x)) from (layers, heads, length) masses."""
    chosen = some_heads(min(one.mass.shape[1] for one in found))
    rows = 1 if len(chosen) < 4 else 2
    figure, panels = canvas.panels(rows, -(-len(chosen) // rows), (7.2, 1.2 + 2.5 * rows), sharex=True, sharey=True)
    shown = looks([one.label for one in found])
    handles = []
    for one in found:
        colour, marker, _ = shown[one.label]
        solid = {"color": colour, "marker": marker, "markersize": 3.5}
        handles.append(Line2D([], [], **solid, label=one.label))
        drawn = [(one.mass, {**solid, "markevery": 0.12, "linewidth": 1.4})]
        if one.bias_mass is not None:
            drawn.append((one.bias_mass, {**_BIAS, "color": colour}))
        for mass, style in drawn:
            x, y = curve(mass)
            for axes, head in zip(panels, chosen, strict=True):
                axes.plot(x, y[head], **style)
    for axes, head in zip(panels, chosen, strict=True):
        axes.set_title(f"head {head + 1}", fontsize="medium")
    if any(one.bias_mass is not None for one in found):
        handles.append(Line2D([], [], **_BIAS, color="0.3", label="bias alone"))
    canvas.legend_of_all(figure, handles=handles, loc="outside upper center", ncols=5)
    return figure, panels
