"""Draws receptive fields, theoretical and empirical, against ε (arXiv 2307.10156, Eq. 22 and appendix)."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import NullLocator, StrMethodFormatter
from torch import Tensor

from ..analysis.bias_map import some_heads
from ..analysis.receptive_field import quantised, thinned
from .style import legend_beside, legend_of_all, looks, panels

_BIAS: dict[str, Any] = {"linestyle": "--", "linewidth": 1}
Curve = tuple[list[float], Tensor]
Curves = Mapping[str, Sequence[tuple[Tensor, Tensor]]]  # encoding -> ε and TRF of each of its heads


def theoretical(curves: Curves, keys: int | None = None, title: str = "Theoretical receptive field") -> Figure:
    """TRF in keys against ε, both logarithmic; with ``keys`` m the quantised curves, TRF / m against ε, both linear.

    Of several heads the first is thick, the others are thin.
    """
    figure, (axes,) = panels(1, 1, (7.6, 4.2))
    shown = looks(list(curves))
    for name, heads in curves.items():
        label = name if len(heads) == 1 else f"{name}, {len(heads)} heads (thick: the first)"
        how = {"color": shown[name].colour, "linestyle": shown[name].dashes}
        for i, (x, y) in enumerate(heads):
            own = {"label": "_", "linewidth": 0.9, "alpha": 0.6} if i else {"label": label, "linewidth": 1.9}
            axes.plot(x, y, **how, **own, drawstyle="steps-mid" if keys else "default")
    axes.set_xlabel("ε, part of the weight that is left out")
    if keys:
        axes.set(title=f"Quantised TRF, first {keys} distances", ylabel="TRF / m")
    else:
        axes.set(xscale="log", yscale="log", title=title, ylabel="TRF (keys)")
    legend_beside(axes, handlelength=2.6)
    return figure


@dataclass(frozen=True)
class Mass:
    """What was measured of a model that was trained at ``train_length`` tokens.

    ``mass``: (layers, heads, length) mean attention by distance; ``bias_mass``: that of its bias alone, if it has one.
    """

    label: str
    train_length: int
    mass: Tensor
    bias_mass: Tensor | None


def empirical(found: Sequence[Mass], epsilons: Sequence[float]) -> Figure:
    """1 - mass of the nearest keys against their number: read at height ε it is n_emp(ε) of the mean curve."""
    length = found[0].mass.shape[-1]
    shown = thinned(length - 1)
    keys = [d + 1 for d in shown]

    def left_out(mass: Tensor) -> Curve:
        return keys, (1 - mass.mean(0).cumsum(-1))[:, shown].clamp_min(0)

    figure, made = _per_head(found, left_out)
    trained = sorted({one.train_length for one in found})
    thin: dict[str, Any] = {"color": "0.7", "linewidth": 0.8, "linestyle": ":", "zorder": 0}
    for axes in made:
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


def empirical_quantised(found: Sequence[Mass]) -> Figure:
    """The figure of the paper: n / length against ε from 1 down to 0."""

    def steps(mass: Tensor) -> Curve:
        epsilons, part = quantised(mass.mean(0))
        return epsilons.tolist(), part

    figure, made = _per_head(found, steps)
    for axes in made:
        axes.set(xlim=(1, 0), ylim=(0, 1))
    figure.supxlabel("ε, the part of the attention left out", fontsize="medium")
    figure.supylabel(f"nearest keys needed / {found[0].mass.shape[-1]} tokens", fontsize="medium")
    return figure


def _per_head(found: Sequence[Mass], curve: Callable[[Tensor], Curve]) -> tuple[Figure, list[Axes]]:
    """A panel for each of a few heads; ``curve`` gives x and (heads, len(x)) from (layers, heads, length) masses."""
    chosen = some_heads(min(one.mass.shape[1] for one in found))
    rows = 1 if len(chosen) < 4 else 2
    figure, made = panels(rows, -(-len(chosen) // rows), (7.2, 1.2 + 2.5 * rows), sharex=True, sharey=True)
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
            for axes, head in zip(made, chosen, strict=True):
                axes.plot(x, y[head], **style)
    for axes, head in zip(made, chosen, strict=True):
        axes.set_title(f"head {head + 1}", fontsize="medium")
    if any(one.bias_mass is not None for one in found):
        handles.append(Line2D([], [], **_BIAS, color="0.3", label="bias alone"))
    legend_of_all(figure, handles=handles, loc="outside upper center", ncols=5)
    return figure, made
