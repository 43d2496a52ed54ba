"""Draws receptive fields, theoretical and empirical, against ε (arXiv 2307.10156, Eq. 22 and appendix)."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from matplotlib.axes import Axes
from matplotlib.colors import LogNorm, Normalize
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import NullLocator, StrMethodFormatter
from torch import Tensor

from fairseq_rpe.analysis.bias_map import some_heads
from fairseq_rpe.analysis.empirical_receptive_field import quantised, thinned
from fairseq_rpe.figures.line_labels import End, name_ends
from fairseq_rpe.figures.method_maps import Rows, best_first, colour_bar, draw_map, map_panels, scale_of, too_many
from fairseq_rpe.figures.style import (
    COLUMN,
    NAME,
    PAGE,
    TICK,
    across,
    headed,
    legend_below,
    legend_of_all,
    lengths_along,
    looks,
    panels,
    titled,
    width,
)

_LEAST = 1e-6  # of the largest δ; smaller ones are not drawn
_BIAS: dict[str, Any] = {"linestyle": "-", "linewidth": 3.0, "alpha": 0.35}  # a pale band under the measured line
Curve = tuple[list[float], Tensor]
Curves = Mapping[str, Sequence[tuple[Tensor, Tensor]]]  # encoding -> ε and TRF of each of its heads


def theoretical(curves: Curves, keys: int | None = None, title: str = "Theoretical receptive field") -> Figure:
    """TRF in keys against ε, both logarithmic; with ``keys`` m the quantised curves, TRF / m against ε, both linear.

    ε falls to the right, as in the paper. Of several heads the first is thick, the others are thin. More than twelve
    encodings have a row each of a heat map instead, of their first heads.
    """
    if too_many(curves):
        return _theoretical_map(curves, keys, title)
    figure, (axes,) = panels(1, 1, (width(), 3.6))
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


def _theoretical_map(curves: Curves, keys: int | None, title: str) -> Figure:
    """Encodings × ε, the widest field last."""
    several = any(len(heads) > 1 for heads in curves.values())
    rows = best_first({name: _points(*heads[0]) if heads else {} for name, heads in curves.items()})
    ordered = {name: dict(sorted(own.items(), reverse=True)) for name, own in rows.items()}
    figure, (axes,) = map_panels(1, 1, len(ordered))
    about = f"Quantised TRF, first {keys} distances" if keys else title
    norm = Normalize(0, 1) if keys else scale_of(ordered)
    scale = draw_map(axes, ordered, norm, about + ", head 1" * several, numbers=ordered, continuous=bool(keys))
    axes.invert_xaxis()
    axes.set_xlabel("ε, part of the weight that is left out")
    colour_bar(figure, [axes], scale, "TRF / m" if keys else "TRF (keys)")
    return figure


def _points(x: Tensor | Sequence[float], y: Tensor | Sequence[float]) -> dict[float, float]:
    return {float(a): float(b) for a, b in zip(x, y, strict=True)}


@dataclass(frozen=True)
class Mass:
    """What was measured of a model that was trained at ``train_length`` tokens.

    ``mass``: (layers, heads, length) mean attention by distance; ``bias_mass``: that of its bias alone, if it has one;
    ``series``: (layers, heads, length) exp(bias) by distance, of which the sum over distances is 1, if it has one.
    """

    label: str
    train_length: int
    mass: Tensor
    bias_mass: Tensor | None
    series: Tensor | None = field(default=None, kw_only=True)

    def quantised_erf(self) -> tuple[Tensor, Tensor]:
        """ε (50,) and n / length (50,) of the attention, averaged over layers and heads."""
        return quantised(self.mass.mean((0, 1)))

    def quantised_trf(self) -> tuple[Tensor, Tensor] | None:
        """The same of exp(bias), whose series then ends after ``length`` distances; ``None`` without a bias."""
        return None if self.series is None else quantised(self.series.mean((0, 1)))


def empirical(found: Sequence[Mass], epsilons: Sequence[float]) -> Figure:
    """1 - mass of the nearest keys against their number: read at height ε it is n_emp(ε) of the mean curve.

    More than twelve models have a row each of heat maps instead.
    """
    length = found[0].mass.shape[-1]
    shown = thinned(length - 1)
    keys = [d + 1 for d in shown]

    def left_out(mass: Tensor) -> Curve:
        return keys, (1 - mass.mean(0).cumsum(-1))[:, shown].clamp_min(0)

    if too_many([one.label for one in found]):
        spaced = [n - 1 for n in sorted({round((length - 1) ** (k / 40)) for k in range(41)})]

        def at_keys(mass: Tensor) -> Curve:
            return [d + 1 for d in spaced], (1 - mass.mean(0).cumsum(-1))[:, spaced].clamp_min(min(epsilons) / 3)

        scale = LogNorm(min(epsilons) / 3, 1)
        return _head_maps(found, at_keys, scale, "nearest keys j (tokens)", "attention beyond the nearest j keys")
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
    headed(figure, f"blocks of {length} tokens; trained at {' or '.join(map(str, trained))} (dotted)")
    _below(made, "nearest keys j (tokens)")
    figure.supylabel("attention beyond the nearest j keys", fontsize=NAME)
    return figure


def empirical_quantised(found: Sequence[Mass]) -> Figure:
    """The figure of the paper: n / length against ε from 1 down to 0."""

    def steps(mass: Tensor) -> Curve:
        epsilons, part = quantised(mass.mean(0))
        return epsilons.tolist(), part

    beside = f"nearest keys needed / {found[0].mass.shape[-1]} tokens"
    if too_many([one.label for one in found]):
        return _head_maps(found, steps, Normalize(0, 1), "ε, the part of the attention left out", beside, flip=True)
    figure, made = _per_head(found, steps)
    for axes in made:
        axes.set(xlim=(1, 0), ylim=(0, 1))
    _below(made, "ε, the part of the attention left out")
    figure.supylabel(beside, fontsize=NAME)
    return figure


def paired(found: Sequence[Mass]) -> Figure:
    """The paper's Figures 5 and 6: a panel of the empirical field and one of the theoretical, a curve for each method.

    Both are quantised, n / length against ε from 1 down to 0, of the mean over layers and heads. A method without an
    additive bias has no theoretical field; without any such method there is one panel.
    """
    length = found[0].mass.shape[-1]
    measured = {one.label: one.quantised_erf() for one in found}
    theory = {one.label: curve for one in found if (curve := one.quantised_trf()) is not None}
    drawn = {"empirical (ERF)": measured, "theoretical (TRF)": theory} if theory else {"empirical (ERF)": measured}
    columns = across(len(drawn), 2)
    lines = -(-len(drawn) // columns)
    below, beside = "ε, the part left out", f"nearest keys / {length} tokens"
    if too_many(measured):
        figure, made = map_panels(lines, columns, len(measured))
        order = best_first({label: _points(*curve) for label, curve in measured.items()})
        for axes, (title, curves) in zip(made, drawn.items(), strict=False):
            rows = {label: _points(*curves[label]) if label in curves else {} for label in order}
            scale = draw_map(axes, rows, Normalize(0, 1), title, continuous=True)
            axes.invert_xaxis()
            axes.set_xlabel(below)
        colour_bar(figure, made, scale, beside)
        return figure
    figure, made = panels(lines, columns, (width(columns), 0.8 + 2.6 * lines), sharex=True, sharey=True)
    shown = looks(list(measured))
    for axes, (title, curves) in zip(made, drawn.items(), strict=False):
        for label, (epsilons, part) in curves.items():
            axes.plot(epsilons, part, **shown[label].drawn(), linewidth=1.4, markevery=7, label=label)
        axes.set(xlim=(1, 0), ylim=(0, 1))
        titled(axes, title)
    _below(made, below)
    figure.supylabel(beside, fontsize=NAME)
    legend_below(figure, made[0], 4)
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


# what the letters of the figure stand for
_DELTA = (
    "δ(i, j) = ‖o_i − o_i^j‖: how far the output o_i of query i moves if it sees its j nearest keys alone; "
    "bound: 2·l·(part of its attention on all other keys), l the norm of the longest value"
)


def truncated(found: Sequence[Lost]) -> Figure:
    """δ against j, a panel for each of a few layers: lines measured, pale bands the bound.

    More than twelve models have a row each of heat maps instead, of what was measured.
    """
    chosen = some_heads(min(len(one.delta) for one in found))
    columns = across(len(chosen), 2)
    rows = -(-len(chosen) // columns)
    heading = f"blocks of {found[0].length} tokens; {_DELTA}"
    if too_many([one.label for one in found]):
        maps = [{one.label: _points(one.keys, one.delta[layer].clamp_min(0)) for one in found} for layer in chosen]
        top = max(float(one.delta.max()) for one in found)
        figure, made = map_panels(rows, columns, len(found))
        for axes, layer, own in zip(made, chosen, maps, strict=False):
            scale = draw_map(axes, own, LogNorm(1e-3 * top, top) if top > 0 else Normalize(0, 1), f"layer {layer}")
            axes.set_xlabel("nearest keys j (tokens)")
        for axes in made[len(chosen) :]:
            axes.set_visible(False)
        headed(figure, heading, TICK)
        colour_bar(figure, made, scale, "δ(i, j), largest of any head and query", extend="min")
        return figure
    figure, made = panels(rows, columns, (PAGE if columns == 2 else COLUMN, 1.2 + 2.3 * rows), sharex=True, sharey=True)
    shown = looks([one.label for one in found])
    handles = [Line2D([], [], **shown[one.label].drawn(), label=one.label) for one in found]
    for axes, layer in zip(made, chosen, strict=False):
        for one in found:
            look = shown[one.label].drawn()
            axes.plot(one.keys, one.bound[layer], **{**_BIAS, "color": look["color"]})
            axes.plot(one.keys, one.delta[layer], **look, markevery=2, linewidth=1.2)
        titled(axes, f"layer {layer}")
    seen = torch.cat([one.delta[one.delta > _LEAST * one.delta.max()] for one in found])
    if len(seen):  # one token has no key to leave out: all differences are 0, which has no logarithm
        made[0].set(yscale="log", ylim=(seen.min().item() / 2, 2 * max(one.bound.max().item() for one in found)))
    lengths_along(made[0], [n for n in found[0].keys if n.bit_count() == 1], 5)
    for axes in made[len(chosen) :]:
        axes.set_visible(False)
    _below(made[: len(chosen)], "nearest keys j (tokens)")
    figure.supylabel("δ(i, j), largest of any head and query", fontsize=NAME)
    headed(figure, heading, TICK)
    legend_of_all(figure, handles=[*handles, Line2D([], [], **_BIAS, color="0.3", label="bound")], ncols=4)
    return figure


def _below(made: Sequence[Axes], name: str) -> None:
    for axes in made:
        if axes.get_subplotspec().is_last_row():
            axes.set_xlabel(name)


def _per_head(found: Sequence[Mass], curve: Callable[[Tensor], Curve]) -> tuple[Figure, list[Axes]]:
    """A panel for each of a few heads; ``curve`` gives x and (heads, len(x)) from (layers, heads, length) masses."""
    chosen = some_heads(min(one.mass.shape[1] for one in found))
    columns = across(len(chosen), 2 if len(chosen) > 3 else 3, 1.6)
    rows = -(-len(chosen) // columns)
    size = (PAGE if rows == 1 else 6.0, 1.2 + 2.2 * rows)
    figure, made = panels(rows, columns, size, sharex=True, sharey=True)
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
            for axes, head in zip(made, chosen, strict=False):
                axes.plot(x, y[head], **style)
    for axes, head in zip(made, chosen, strict=False):
        titled(axes, f"head {head + 1}")
    for axes in made[len(chosen) :]:
        axes.set_visible(False)
    if any(one.bias_mass is not None for one in found):
        handles.append(Line2D([], [], **_BIAS, color="0.3", label="bias alone"))
    legend_of_all(figure, handles=handles, ncols=4)
    return figure, made


def _head_maps(
    found: Sequence[Mass],
    curve: Callable[[Tensor], Curve],
    norm: Normalize,
    below: str,
    beside: str,
    flip: bool = False,
) -> Figure:
    """Models × x of ``curve``, a panel for each of a few heads; ``flip``: x falls to the right."""
    chosen = some_heads(min(one.mass.shape[1] for one in found))
    columns = across(len(chosen), 2, 3.3)
    rows = -(-len(chosen) // columns)
    figure, made = map_panels(rows, columns, len(found))
    curves = {one.label: curve(one.mass) for one in found}
    for axes, head in zip(made, chosen, strict=False):
        own: Rows = {label: _points(x, y[head]) for label, (x, y) in curves.items()}
        scale = draw_map(axes, own, norm, f"head {head + 1}", continuous=True)
        axes.set_xlabel(below)
        if flip:
            axes.invert_xaxis()
    for axes in made[len(chosen) :]:
        axes.set_visible(False)
    colour_bar(figure, made, scale, beside)
    return figure
