"""Figures of receptive fields, theoretical and empirical, against ε (arXiv 2307.10156, Eq. 22 and appendix)."""

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

from fairseq_rpe.analysis.bias_snapshots import spread_heads
from fairseq_rpe.analysis.empirical_receptive_field import log_spaced_distances, quantised_curve
from fairseq_rpe.figures.heat_maps import (
    Rows,
    add_colour_bar,
    colour_norm,
    draw_map,
    exceeds_line_limit,
    map_panels,
    sort_best_first,
)
from fairseq_rpe.figures.style import (
    COLUMN,
    NAME,
    PAGE,
    TICK,
    LineEnd,
    add_legend,
    add_legend_of,
    assign_looks,
    figure_width,
    label_line_ends,
    panel_columns,
    panels,
    set_figure_title,
    set_length_axis,
    set_title,
)

_MIN_DELTA = 1e-6  # relative to the largest δ; smaller ones are not drawn
_BIAS: dict[str, Any] = {"linestyle": "-", "linewidth": 3.0, "alpha": 0.35}  # a pale band below the measured line
Curve = tuple[list[float], Tensor]
Curves = Mapping[str, Sequence[tuple[Tensor, Tensor]]]  # encoding -> ε and TRF of each of its heads


def draw_theoretical(curves: Curves, keys: int | None = None, title: str = "Theoretical receptive field") -> Figure:
    """Draw theoretical receptive fields against ε, which decreases to the right, as in the paper.

    Args:
        curves: encoding -> (ε, TRF in keys) of each head; the first head is thick. More than twelve encodings are drawn
            as rows of a heat map of their first heads.
        keys: m of the quantised curves TRF / m; both axes are then linear, otherwise logarithmic.
        title: title of the figure.
    """
    if exceeds_line_limit(curves):
        return _theoretical_map(curves, keys, title)
    figure, (axes,) = panels(1, 1, (figure_width(), 3.6))
    looks = assign_looks(list(curves))
    ends = []
    for name, heads in curves.items():
        look = {"color": looks[name].colour, "linestyle": looks[name].dashes}
        for i, (x, y) in enumerate(heads):
            weight = {"label": "_", "linewidth": 0.9, "alpha": 0.6} if i else {"label": name, "linewidth": 1.9}
            axes.plot(x, y, **look, **weight, drawstyle="steps-mid" if keys else "default")
        # empty if there is no head, or no field at any ε
        points = [(float(e), float(n)) for curve in heads[:1] for e, n in zip(*curve, strict=True)]
        if points:
            label = name if len(heads) == 1 else f"{name}, head 1"
            ends.append(LineEnd(label, *min(points), looks[name].colour))
    thin = ", thin: other heads" if any(len(heads) > 1 for heads in curves.values()) else ""
    axes.set_xlabel("ε, part of the weight that is left out")
    if keys:
        axes.set(xlim=(1, 0), ylabel="TRF / m")
        set_title(axes, f"Quantised TRF, first {keys} distances{thin}")
        # a legend, because all lines end in the same point at ε = 0
        add_legend_of(figure, axes)
    else:
        axes.set(xscale="log", yscale="log", ylabel="TRF (keys)")
        # ε decreases to the right, as in the paper
        axes.invert_xaxis()
        set_title(axes, title + thin)
        label_line_ends(figure, {axes: ends})
    return figure


def _theoretical_map(curves: Curves, keys: int | None, title: str) -> Figure:
    """Draw encodings × ε as a heat map, the widest field last."""
    several = any(len(heads) > 1 for heads in curves.values())
    rows = sort_best_first({name: _points(*heads[0]) if heads else {} for name, heads in curves.items()})
    ordered = {name: dict(sorted(points.items(), reverse=True)) for name, points in rows.items()}
    figure, (axes,) = map_panels(1, 1, len(ordered))
    about = f"Quantised TRF, first {keys} distances" if keys else title
    norm = Normalize(0, 1) if keys else colour_norm(ordered)
    scale = draw_map(axes, ordered, norm, about + ", head 1" * several, numbers=ordered, continuous=bool(keys))
    axes.invert_xaxis()
    axes.set_xlabel("ε, part of the weight that is left out")
    add_colour_bar(figure, [axes], scale, "TRF / m" if keys else "TRF (keys)")
    return figure


def _points(x: Tensor | Sequence[float], y: Tensor | Sequence[float]) -> dict[float, float]:
    return {float(a): float(b) for a, b in zip(x, y, strict=True)}


@dataclass(frozen=True)
class AttentionMass:
    """Attention of a model by distance.

    Attributes:
        label: name of the model in the legend.
        train_length: training length in tokens.
        mass: (layers, heads, length) mean attention by distance.
        bias_mass: the same of its bias alone; None without a bias.
        series: (layers, heads, length) exp(bias) by distance, normalised to the sum 1; None without a bias.
    """

    label: str
    train_length: int
    mass: Tensor
    bias_mass: Tensor | None
    series: Tensor | None = field(default=None, kw_only=True)

    def quantised_erf(self) -> tuple[Tensor, Tensor]:
        """Return ε (50,) and n / length (50,) of the attention, averaged over layers and heads."""
        return quantised_curve(self.mass.mean((0, 1)))

    def quantised_trf(self) -> tuple[Tensor, Tensor] | None:
        """Return the same of exp(bias), whose series ends after ``length`` distances; ``None`` without a bias."""
        return None if self.series is None else quantised_curve(self.series.mean((0, 1)))


def draw_empirical(models: Sequence[AttentionMass], epsilons: Sequence[float]) -> Figure:
    """Draw 1 - mass of the nearest keys against their number; at the height ε it is n_emp(ε) of the mean attention.

    Args:
        models: measured models; more than twelve are drawn as rows of heat maps.
        epsilons: values of ε, drawn as horizontal lines.
    """
    length = models[0].mass.shape[-1]
    if exceeds_line_limit([model.label for model in models]):
        return _empirical_maps(models, least=min(epsilons) / 3)
    distances = log_spaced_distances(length - 1)
    figure, all_axes = _per_head(models, lambda mass: _mass_beyond(mass, distances, 0.0))
    trained = sorted({model.train_length for model in models})
    thin: dict[str, Any] = {"color": "0.7", "linewidth": 0.8, "linestyle": ":", "zorder": 0}
    placement: dict[str, Any] = {"xytext": (3, 0), "textcoords": "offset points", "verticalalignment": "center"}
    for axes in all_axes:
        for epsilon in epsilons:
            axes.axhline(epsilon, **thin)
            if axes.get_subplotspec().is_last_col():
                axes.annotate(f"ε = {epsilon:g}", (length, epsilon), **placement, fontsize=TICK - 1, color="0.35")
        for n in trained:
            axes.axvline(n, **thin)
        axes.set_xscale("log", base=4)
        axes.xaxis.set_major_formatter(StrMethodFormatter("{x:.0f}"))
        axes.xaxis.set_minor_locator(NullLocator())
        axes.set(yscale="log", xlim=(1, length), ylim=(min(epsilons) / 3, 1))
    set_figure_title(figure, f"blocks of {length} tokens; trained at {' or '.join(map(str, trained))} (dotted)")
    _label_last_row(all_axes, "nearest keys j (tokens)")
    figure.supylabel("attention beyond the nearest j keys", fontsize=NAME)
    return figure


def _mass_beyond(mass: Tensor, distances: Sequence[int], least: float) -> Curve:
    """Return numbers j of nearest keys and the mean attention on all others, at least ``least``.

    Args:
        mass: (layers, heads, length) attention by distance.
        distances: j - 1 of each number of keys.
        least: smaller values are replaced by this.
    """
    beyond = 1 - mass.mean(0).cumsum(-1)  # (heads, length): entry d is the mass beyond the d + 1 nearest keys
    return [d + 1 for d in distances], beyond[:, distances].clamp_min(least)


def _empirical_maps(models: Sequence[AttentionMass], least: float) -> Figure:
    """Draw :func:`draw_empirical` as heat maps, whose colours begin at ``least``."""
    length = models[0].mass.shape[-1]
    # a heat map has fewer distances than a curve: about 40 log-spaced ones
    distances = [n - 1 for n in sorted({round((length - 1) ** (k / 40)) for k in range(41)})]
    y_label = "attention beyond the nearest j keys"
    return _head_maps(
        models, lambda mass: _mass_beyond(mass, distances, least), LogNorm(least, 1), "nearest keys j (tokens)", y_label
    )


def draw_empirical_quantised(models: Sequence[AttentionMass]) -> Figure:
    """Draw the quantised field n / length against ε from 1 down to 0, as the paper's figure, a panel for each head."""

    def steps(mass: Tensor) -> Curve:
        epsilons, values = quantised_curve(mass.mean(0))
        return epsilons.tolist(), values

    y_label = f"nearest keys needed / {models[0].mass.shape[-1]} tokens"
    if exceeds_line_limit([model.label for model in models]):
        return _head_maps(models, steps, Normalize(0, 1), "ε, the part of the attention left out", y_label, flip=True)
    figure, all_axes = _per_head(models, steps)
    for axes in all_axes:
        axes.set(xlim=(1, 0), ylim=(0, 1))
    _label_last_row(all_axes, "ε, the part of the attention left out")
    figure.supylabel(y_label, fontsize=NAME)
    return figure


def draw_empirical_and_theoretical(models: Sequence[AttentionMass]) -> Figure:
    """Draw the paper's Figures 5 and 6: a panel of empirical fields and one of theoretical ones, a curve per method.

    Both are quantised, n / length against ε from 1 down to 0, averaged over layers and heads. A method without an
    additive bias has no theoretical field; if no method has one, there is one panel.

    Args:
        models: measured models; more than twelve are drawn as rows of heat maps.
    """
    length = models[0].mass.shape[-1]
    measured = {model.label: model.quantised_erf() for model in models}
    theory = {model.label: curve for model in models if (curve := model.quantised_trf()) is not None}
    drawn = {"empirical (ERF)": measured, "theoretical (TRF)": theory} if theory else {"empirical (ERF)": measured}
    columns = panel_columns(len(drawn), 2)
    lines = -(-len(drawn) // columns)
    x_label, y_label = "ε, the part left out", f"nearest keys / {length} tokens"
    if exceeds_line_limit(measured):
        figure, all_axes = map_panels(lines, columns, len(measured))
        order = sort_best_first({label: _points(*curve) for label, curve in measured.items()})
        for axes, (title, curves) in zip(all_axes, drawn.items(), strict=False):
            rows = {label: _points(*curves[label]) if label in curves else {} for label in order}
            scale = draw_map(axes, rows, Normalize(0, 1), title, continuous=True)
            axes.invert_xaxis()
            axes.set_xlabel(x_label)
        add_colour_bar(figure, all_axes, scale, y_label)
        return figure
    figure, all_axes = panels(lines, columns, (figure_width(columns), 0.8 + 2.6 * lines), sharex=True, sharey=True)
    looks = assign_looks(list(measured))
    for axes, (title, curves) in zip(all_axes, drawn.items(), strict=False):
        for label, (epsilons, values) in curves.items():
            axes.plot(epsilons, values, **looks[label].plot_options(), linewidth=1.4, markevery=7, label=label)
        axes.set(xlim=(1, 0), ylim=(0, 1))
        set_title(axes, title)
    _label_last_row(all_axes, x_label)
    figure.supylabel(y_label, fontsize=NAME)
    add_legend_of(figure, all_axes[0], 4)
    return figure


@dataclass(frozen=True)
class TruncationErrors:
    """Output error δ(i, j) of truncated attention of a model, and its bound.

    Attributes:
        label: name of the model in the legend.
        train_length: training length in tokens.
        length: length of the evaluated blocks in tokens.
        keys: J numbers j of nearest keys.
        delta: (layers, J) largest δ of any head and query.
        bound: (layers, J) largest bound of any head and query.
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


def _truncation_maps(
    models: Sequence[TruncationErrors], layers: Sequence[int], rows: int, columns: int, heading: str
) -> Figure:
    """Draw δ of many models as heat maps, a panel for each layer."""
    top = max(float(model.delta.max()) for model in models)
    norm = LogNorm(1e-3 * top, top) if top > 0 else Normalize(0, 1)
    figure, all_axes = map_panels(rows, columns, len(models))
    for axes, layer in zip(all_axes, layers, strict=False):
        points = {model.label: _points(model.keys, model.delta[layer].clamp_min(0)) for model in models}
        scale = draw_map(axes, points, norm, f"layer {layer}")
        axes.set_xlabel("nearest keys j (tokens)")
    for axes in all_axes[len(layers) :]:
        axes.set_visible(False)
    set_figure_title(figure, heading, TICK)
    add_colour_bar(figure, all_axes, scale, "δ(i, j), largest of any head and query", extend="min")
    return figure


def draw_truncation_errors(models: Sequence[TruncationErrors]) -> Figure:
    """Draw δ against j, a panel for each of up to four layers: measured lines, and the bounds as pale bands.

    Args:
        models: measured models; more than twelve are drawn as rows of heat maps of δ.
    """
    chosen = spread_heads(min(len(model.delta) for model in models))
    columns = panel_columns(len(chosen), 2)
    rows = -(-len(chosen) // columns)
    heading = f"blocks of {models[0].length} tokens; {_DELTA}"
    if exceeds_line_limit([model.label for model in models]):
        return _truncation_maps(models, chosen, rows, columns, heading)
    size = (PAGE if columns == 2 else COLUMN, 1.2 + 2.3 * rows)
    figure, all_axes = panels(rows, columns, size, sharex=True, sharey=True)
    looks = assign_looks([model.label for model in models])
    handles = [Line2D([], [], **looks[model.label].plot_options(), label=model.label) for model in models]
    for axes, layer in zip(all_axes, chosen, strict=False):
        for model in models:
            look = looks[model.label].plot_options()
            axes.plot(model.keys, model.bound[layer], **{**_BIAS, "color": look["color"]})
            axes.plot(model.keys, model.delta[layer], **look, markevery=2, linewidth=1.2)
        set_title(axes, f"layer {layer}")
    seen = torch.cat([model.delta[model.delta > _MIN_DELTA * model.delta.max()] for model in models])
    if len(seen):  # with one token no key can be left out: every δ is 0, which has no logarithm
        all_axes[0].set(yscale="log", ylim=(seen.min().item() / 2, 2 * max(m.bound.max().item() for m in models)))
    set_length_axis(all_axes[0], [n for n in models[0].keys if n.bit_count() == 1], 5)
    for axes in all_axes[len(chosen) :]:
        axes.set_visible(False)
    _label_last_row(all_axes[: len(chosen)], "nearest keys j (tokens)")
    figure.supylabel("δ(i, j), largest of any head and query", fontsize=NAME)
    set_figure_title(figure, heading, TICK)
    add_legend(figure, handles=[*handles, Line2D([], [], **_BIAS, color="0.3", label="bound")], ncols=4)
    return figure


def _label_last_row(all_axes: Sequence[Axes], name: str) -> None:
    """Label the x axis of the lowest panels."""
    for axes in all_axes:
        if axes.get_subplotspec().is_last_row():
            axes.set_xlabel(name)


def _per_head(models: Sequence[AttentionMass], curve: Callable[[Tensor], Curve]) -> tuple[Figure, list[Axes]]:
    """Draw a panel for each of up to four heads; ``curve`` maps (layers, heads, length) to x and (heads, len(x))."""
    chosen = spread_heads(min(model.mass.shape[1] for model in models))
    columns = panel_columns(len(chosen), 2 if len(chosen) > 3 else 3, 1.6)
    rows = -(-len(chosen) // columns)
    size = (PAGE if rows == 1 else 6.0, 1.2 + 2.2 * rows)
    figure, all_axes = panels(rows, columns, size, sharex=True, sharey=True)
    looks = assign_looks([model.label for model in models])
    handles = []
    for model in models:
        look = looks[model.label].plot_options()
        handles.append(Line2D([], [], **look, label=model.label))
        drawn = [(model.mass, {**look, "markevery": 0.12, "linewidth": 1.2})]
        if model.bias_mass is not None:
            drawn.insert(0, (model.bias_mass, {**_BIAS, "color": look["color"]}))
        for mass, style in drawn:
            x, y = curve(mass)
            for axes, head in zip(all_axes, chosen, strict=False):
                axes.plot(x, y[head], **style)
    for axes, head in zip(all_axes, chosen, strict=False):
        set_title(axes, f"head {head + 1}")
    for axes in all_axes[len(chosen) :]:
        axes.set_visible(False)
    if any(model.bias_mass is not None for model in models):
        handles.append(Line2D([], [], **_BIAS, color="0.3", label="bias alone"))
    add_legend(figure, handles=handles, ncols=4)
    return figure, all_axes


def _head_maps(
    models: Sequence[AttentionMass],
    curve: Callable[[Tensor], Curve],
    norm: Normalize,
    x_label: str,
    y_label: str,
    flip: bool = False,
) -> Figure:
    """Draw models × x of ``curve``, a panel for each of up to four heads; with ``flip``, x decreases to the right."""
    chosen = spread_heads(min(model.mass.shape[1] for model in models))
    columns = panel_columns(len(chosen), 2, 3.3)
    rows = -(-len(chosen) // columns)
    figure, all_axes = map_panels(rows, columns, len(models))
    curves = {model.label: curve(model.mass) for model in models}
    for axes, head in zip(all_axes, chosen, strict=False):
        points: Rows = {label: _points(x, y[head]) for label, (x, y) in curves.items()}
        scale = draw_map(axes, points, norm, f"head {head + 1}", continuous=True)
        axes.set_xlabel(x_label)
        if flip:
            axes.invert_xaxis()
    for axes in all_axes[len(chosen) :]:
        axes.set_visible(False)
    add_colour_bar(figure, all_axes, scale, y_label)
    return figure
