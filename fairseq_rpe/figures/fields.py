"""Draws receptive fields, theoretical and empirical, against ε (arXiv 2307.10156, Eq. 22 and appendix)."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import NullLocator, StrMethodFormatter
from torch import Tensor

from ..analysis.bias_map import some_heads
from ..analysis.receptive_field import quantised, thinned
from .ends import End, name_ends
from .style import COLUMN, NAME, PAGE, TICK, legend_below, legend_of_all, lengths_along, looks, panels, titled

_LEAST = 1e-6  # of the largest δ; smaller ones are not drawn
_BIAS: dict[str, Any] = {"linestyle": "-", "linewidth": 3.0, "alpha": 0.35}  # a pale band under the measured line
Curve = tuple[list[float], Tensor]
Curves = Mapping[str, Sequence[tuple[Tensor, Tensor]]]  # encoding -> ε and TRF of each of its heads


def theoretical(curves: Curves, keys: int | None = None, title: str = "Theoretical receptive field") -> Figure:
    """TRF in keys against ε, both logarithmic; with ``keys`` m the quantised curves, TRF / m against ε, both linear.

    ε falls to the right, as in the paper. Of several heads the first is thick, the others are thin.
    """
    figure, (axes,) = panels(1, 1, (COLUMN, 3.6))
    shown = looks(list(curves))
    ends = []
    for name, heads in curves.items():
        how = {"color": shown[name].colour, "linestyle": shown[name].dashes}
        for i, (x, y) in enumerate(heads):
            own = {"label": "_", "linewidth": 0.9, "alpha": 0.6} if i else {"label": name, "linewidth": 1.9}
            axes.plot(x, y, **how, **own, drawstyle="steps-mid" if keys else "default")
        # there may be no head, or a field for none of the ε
        points = [(float(e), float(n)) for of in heads[:1] for e, n in zip(*of, strict=True)]
        if points:
            label = name if len(heads) == 1 else f"{name}, head 1"
            ends.append(End(label, *min(points), shown[name].colour))
    thin = ", thin: other heads" if any(len(heads) > 1 for heads in curves.values()) else ""
    axes.set_xlabel("ε, part of the weight that is left out")
    if keys:
        axes.set(xlim=(1, 0), ylabel="TRF / m")
        titled(axes, f"Quantised TRF, first {keys} distances{thin}")
        # at ε = 0 all lines meet
        legend_below(figure, axes)
    else:
        axes.set(xscale="log", yscale="log", ylabel="TRF (keys)")
        # the field grows to the right, as in the paper
        axes.invert_xaxis()
        titled(axes, title + thin)
        name_ends(figure, {axes: ends})
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
    beside: dict[str, Any] = {"xytext": (3, 0), "textcoords": "offset points", "verticalalignment": "center"}
    for axes in made:
        if axes.get_subplotspec().is_last_col():
            for epsilon in epsilons:
                axes.annotate(f"ε = {epsilon:g}", (length, epsilon), **beside, fontsize=TICK - 1, color="0.35")
    figure.suptitle(f"blocks of {length} tokens; trained at {' or '.join(map(str, trained))} (dotted)", fontsize=NAME)
    _below(made, "nearest keys j (tokens)")
    figure.supylabel("attention beyond the nearest j keys", fontsize=NAME)
    return figure


def empirical_quantised(found: Sequence[Mass]) -> Figure:
    """The figure of the paper: n / length against ε from 1 down to 0."""

    def steps(mass: Tensor) -> Curve:
        epsilons, part = quantised(mass.mean(0))
        return epsilons.tolist(), part

    figure, made = _per_head(found, steps)
    for axes in made:
        axes.set(xlim=(1, 0), ylim=(0, 1))
    _below(made, "ε, the part of the attention left out")
    figure.supylabel(f"nearest keys needed / {found[0].mass.shape[-1]} tokens", fontsize=NAME)
    return figure


@dataclass(frozen=True)
class Lost:
    """δ(i, j) of a model that was trained at ``train_length`` tokens, in blocks of ``length``, and its bound.

    ``keys``: J numbers j of nearest keys; ``delta`` and ``bound``: (layers, J), the largest of any head and row.
    """

    label: str
    train_length: int
    length: int
    keys: Sequence[int]
    delta: Tensor
    bound: Tensor


def truncated(found: Sequence[Lost]) -> Figure:
    """δ against j, a panel for each of a few layers: lines measured, pale bands the bound."""
    chosen = some_heads(min(len(one.delta) for one in found))
    columns = min(2, len(chosen))
    rows = -(-len(chosen) // columns)
    figure, made = panels(rows, columns, (PAGE if columns == 2 else COLUMN, 1.2 + 2.3 * rows), sharex=True, sharey=True)
    shown = looks([one.label for one in found])
    handles = [Line2D([], [], **shown[one.label].drawn(), label=one.label) for one in found]
    for axes, layer in zip(made, chosen, strict=False):
        for one in found:
            look = shown[one.label].drawn()
            axes.plot(one.keys, one.bound[layer], **{**_BIAS, "color": look["color"]})
            axes.plot(one.keys, one.delta[layer], **look, markevery=2, linewidth=1.2)
        titled(axes, f"layer {layer}")
        axes.set(yscale="log")
    seen = torch.cat([one.delta[one.delta > _LEAST * one.delta.max()] for one in found])
    made[0].set_ylim(seen.min().item() / 2, 2 * max(one.bound.max().item() for one in found))
    lengths_along(made[0], [n for n in found[0].keys if n.bit_count() == 1], 5)
    for axes in made[len(chosen) :]:
        axes.set_visible(False)
    _below(made[: len(chosen)], "nearest keys j (tokens)")
    figure.supylabel("δ(i, j), largest of any head and query", fontsize=NAME)
    figure.suptitle(f"output lost with the nearest j keys alone, blocks of {found[0].length} tokens", fontsize=NAME)
    legend_of_all(figure, handles=[*handles, Line2D([], [], **_BIAS, color="0.3", label="bound")], ncols=4)
    return figure


def _below(made: Sequence[Axes], name: str) -> None:
    for axes in made:
        if axes.get_subplotspec().is_last_row():
            axes.set_xlabel(name)


def _per_head(found: Sequence[Mass], curve: Callable[[Tensor], Curve]) -> tuple[Figure, list[Axes]]:
    """A panel for each of a few heads; ``curve`` gives x and (heads, len(x)) from (layers, heads, length) masses."""
    chosen = some_heads(min(one.mass.shape[1] for one in found))
    rows = 1 if len(chosen) < 4 else 2
    size = (PAGE if rows == 1 else 6.0, 1.2 + 2.2 * rows)
    figure, made = panels(rows, -(-len(chosen) // rows), size, sharex=True, sharey=True)
    shown = looks([one.label for one in found])
    handles = []
    for one in found:
        look = shown[one.label].drawn()
        handles.append(Line2D([], [], **look, label=one.label))
        drawn = [(one.mass, {**look, "markevery": 0.12, "linewidth": 1.2})]
        if one.bias_mass is not None:
            drawn.insert(0, (one.bias_mass, {**_BIAS, "color": look["color"]}))
        for mass, style in drawn:
            x, y = curve(mass)
            for axes, head in zip(made, chosen, strict=True):
                axes.plot(x, y[head], **style)
    for axes, head in zip(made, chosen, strict=True):
        titled(axes, f"head {head + 1}")
    if any(one.bias_mass is not None for one in found):
        handles.append(Line2D([], [], **_BIAS, color="0.3", label="bias alone"))
    legend_of_all(figure, handles=handles, ncols=4)
    return figure, made
