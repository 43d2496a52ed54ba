"""Figures of receptive fields, theoretical and empirical, against ε (arXiv 2307.10156, Eq. 22 and appendix).

A receptive field is the number of nearest keys that have all but the part ε of a query's weight. The empirical field
(ERF) is that of measured attention; the theoretical field (TRF) is that of the bias alone, of the weights exp(bias). A
*quantised* field is divided by the number m of distances that are considered, at 50 values of ε from 1 down to 0; see
:func:`~fairseq_rpe.analysis.empirical_receptive_field.quantised_curve`.
"""

import math
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

from fairseq_rpe.analysis.bias_snapshots import spread_indices
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
    hide_unused,
    label_line_ends,
    panel_columns,
    panels,
    set_figure_title,
    set_length_axis,
    set_title,
)

_MIN_DELTA = 1e-6  # relative to the largest δ; smaller ones do not extend the y axis
_LEAST_DELTA_COLOUR = 1e-3  # δ of the darkest colour of a heat map, relative to the largest δ
_NARROWEST_LINES = 1.6  # least width in inches of a panel with the lines of a head
_NARROWEST_MAP = 3.3  # least width in inches of a panel with a heat map, whose rows have long names
_MARK_EVERY_POINTS = 7  # points from one marker to the next on the 50 points of a quantised curve
_MARK_EVERY_DIAGONAL = 0.12  # the same on lines with more points, as a part of the panel's diagonal
_MAP_STEPS = 40  # log-spaced distances of a heat map; a curve has up to 257
_PALE_BAND: dict[str, Any] = {"linestyle": "-", "linewidth": 3.0, "alpha": 0.35}  # drawn below a measured line
_EPSILON = "ε, the part left out"
_EPSILON_OF_WEIGHT = "ε, part of the weight that is left out"
_EPSILON_OF_ATTENTION = "ε, the part of the attention left out"
_NEAREST_KEYS = "nearest keys j (tokens)"
_MASS_BEYOND = "attention beyond the nearest j keys"
_LARGEST_DELTA = "δ(i, j), largest of any head and query"
# what the letters of the figure of truncation errors stand for
_DELTA = (
    "δ(i, j) = ‖o_i − o_i^j‖: how far the output o_i of query i moves if it sees its j nearest keys alone; "
    "bound: 2·l·(part of its attention on all other keys), l the norm of the longest value"
)
TheoreticalFields = Mapping[str, Sequence[tuple[Tensor, Tensor]]]  # encoding -> ε and TRF of each of its heads
HeadLines = tuple[list[float], Tensor]  # x, and the y (heads, len(x)) of a line for each head


def draw_theoretical(
    fields: TheoreticalFields, keys: int | None = None, title: str = "Theoretical receptive field"
) -> Figure:
    """Draw theoretical receptive fields against ε, which decreases to the right, as in the paper.

    Args:
        fields: encoding -> (ε, TRF) of each head; the first head is thick. More than twelve encodings are drawn as rows
            of a heat map of their first heads.
        keys: None for a TRF in keys, on logarithmic axes. For quantised fields, m: the TRF is a part of the first m
            distances, on linear axes.
        title: title of the figure; quantised fields have one of their own.
    """
    if exceeds_line_limit(fields):
        return _theoretical_map(fields, keys, title)
    figure, (axes,) = panels(1, 1, (figure_width(), 3.6))
    ends = _plot_theoretical(axes, fields, "steps-mid" if keys else "default")
    thin = ", thin: other heads" if any(len(heads) > 1 for heads in fields.values()) else ""
    axes.set_xlabel(_EPSILON_OF_WEIGHT)
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


def _plot_theoretical(axes: Axes, fields: TheoreticalFields, drawstyle: str) -> list[LineEnd]:
    """Plot a line for each head, and return the end at the least ε of each encoding's first head."""
    looks = assign_looks(list(fields))
    ends = []
    for name, heads in fields.items():
        look = {"color": looks[name].colour, "linestyle": looks[name].dashes}
        for i, (epsilons, field_sizes) in enumerate(heads):
            weight = {"label": "_", "linewidth": 0.9, "alpha": 0.6} if i else {"label": name, "linewidth": 1.9}
            axes.plot(epsilons, field_sizes, **look, **weight, drawstyle=drawstyle)
        # empty if there is no head, or no field at any ε
        points = [(float(e), float(n)) for first in heads[:1] for e, n in zip(*first, strict=True)]
        if points:
            label = name if len(heads) == 1 else f"{name}, head 1"
            ends.append(LineEnd(label, *min(points), looks[name].colour))
    return ends


def _theoretical_map(fields: TheoreticalFields, keys: int | None, title: str) -> Figure:
    """Draw the first heads as a heat map, encodings × ε; the arguments are those of :func:`draw_theoretical`."""
    several = any(len(heads) > 1 for heads in fields.values())
    # sorted by the mean field: the narrowest first, the widest last
    rows = sort_best_first({name: _points(*heads[0]) if heads else {} for name, heads in fields.items()})
    ordered = {name: dict(sorted(points.items(), reverse=True)) for name, points in rows.items()}
    figure, (axes,) = map_panels(1, 1, len(ordered))
    about = f"Quantised TRF, first {keys} distances" if keys else title
    norm = Normalize(0, 1) if keys else colour_norm(ordered)
    scale = draw_map(axes, ordered, norm, about + ", head 1" * several, numbers=ordered, continuous=bool(keys))
    axes.invert_xaxis()
    axes.set_xlabel(_EPSILON_OF_WEIGHT)
    add_colour_bar(figure, [axes], scale, "TRF / m" if keys else "TRF (keys)")
    return figure


def _points(x: Tensor | Sequence[float], y: Tensor | Sequence[float]) -> dict[float, float]:
    """Return y by x, a row of a heat map; of several points with the same x the last one stays."""
    return {float(a): float(b) for a, b in zip(x, y, strict=True)}


@dataclass(frozen=True)
class AttentionMass:
    """Attention of a model by distance.

    Attributes:
        label: name of the model in the legend.
        train_length: training length in tokens.
        mass: (layers, heads, length) attention by distance, averaged over the measured queries.
        bias_mass: the same of its bias alone, with q·k = 0; None without a bias. Each query's weights have the sum 1
            over the keys that it sees.
        series: (layers, heads, length) exp(bias) by distance, divided by its sum over all distances below ``length``;
            None without a bias. It does not depend on queries, as the paper's TRF does not.
    """

    label: str
    train_length: int
    mass: Tensor
    bias_mass: Tensor | None
    series: Tensor | None = field(default=None, kw_only=True)

    def quantised_erf(self) -> tuple[Tensor, Tensor]:
        """Return the quantised ERF: ε (50,) and n / length (50,) of the mean attention of all layers and heads."""
        return quantised_curve(self.mass.mean((0, 1)))

    def quantised_trf(self) -> tuple[Tensor, Tensor] | None:
        """Return the quantised TRF: ε (50,) and n / length (50,) of the mean ``series``; None without a bias."""
        return None if self.series is None else quantised_curve(self.series.mean((0, 1)))


def draw_empirical(models: Sequence[AttentionMass], epsilons: Sequence[float]) -> Figure:
    """Draw the attention beyond the j nearest keys against j, a panel for each of up to four heads.

    A line falls to the height ε at n_emp(ε), the empirical receptive field, of the head's attention averaged over
    layers and queries.

    Args:
        models: measured models; more than twelve are drawn as rows of heat maps.
        epsilons: values of ε, drawn as horizontal lines.
    """
    length = models[0].mass.shape[-1]
    floor = min(epsilons) / 3  # end of the logarithmic axis, some way below the lowest line
    if exceeds_line_limit([model.label for model in models]):
        return _empirical_maps(models, floor)
    distances = log_spaced_distances(length - 1)
    figure, all_axes = _per_head(models, lambda mass: _mass_beyond(mass, distances, floor=0.0))
    trained = sorted({model.train_length for model in models})
    for axes in all_axes:
        _mark_references(axes, epsilons, trained, length)
        axes.set_xscale("log", base=4)
        axes.xaxis.set_major_formatter(StrMethodFormatter("{x:.0f}"))
        axes.xaxis.set_minor_locator(NullLocator())
        axes.set(yscale="log", xlim=(1, length), ylim=(floor, 1))
    set_figure_title(figure, f"blocks of {length} tokens; trained at {' or '.join(map(str, trained))} (dotted)")
    _label_last_row(all_axes, _NEAREST_KEYS)
    figure.supylabel(_MASS_BEYOND, fontsize=NAME)
    return figure


def _mark_references(axes: Axes, epsilons: Sequence[float], trained: Sequence[int], right: float) -> None:
    """Draw dotted lines at each ε and training length; panels of the last column name ε at x = ``right``."""
    thin: dict[str, Any] = {"color": "0.7", "linewidth": 0.8, "linestyle": ":", "zorder": 0}
    placement: dict[str, Any] = {"xytext": (3, 0), "textcoords": "offset points", "verticalalignment": "center"}
    for epsilon in epsilons:
        axes.axhline(epsilon, **thin)
        if axes.get_subplotspec().is_last_col():
            axes.annotate(f"ε = {epsilon:g}", (right, epsilon), **placement, fontsize=TICK - 1, color="0.35")
    for n in trained:
        axes.axvline(n, **thin)


def _mass_beyond(mass: Tensor, distances: Sequence[int], floor: float) -> HeadLines:
    """Return numbers j of nearest keys, and for each head the attention on all other keys, averaged over layers.

    Args:
        mass: (layers, heads, length) attention by distance.
        distances: distance of the j-th nearest key, which is j - 1, for each j.
        floor: smaller values are replaced by this one.
    """
    beyond = 1 - mass.mean(0).cumsum(-1)  # (heads, length): entry d is the mass beyond the d + 1 nearest keys
    return [d + 1 for d in distances], beyond[:, distances].clamp_min(floor)


def _empirical_maps(models: Sequence[AttentionMass], floor: float) -> Figure:
    """Draw :func:`draw_empirical` as heat maps, whose colours begin at ``floor``."""
    last = models[0].mass.shape[-1] - 1
    distances = [n - 1 for n in sorted({round(last ** (k / _MAP_STEPS)) for k in range(_MAP_STEPS + 1)})]
    return _head_maps(
        models, lambda mass: _mass_beyond(mass, distances, floor), LogNorm(floor, 1), _NEAREST_KEYS, _MASS_BEYOND
    )


def draw_empirical_quantised(models: Sequence[AttentionMass]) -> Figure:
    """Draw the quantised ERF, n / length against ε from 1 down to 0, as the paper's figure, a panel for each head."""

    def quantised_heads(mass: Tensor) -> HeadLines:
        epsilons, values = quantised_curve(mass.mean(0))
        return epsilons.tolist(), values

    y_label = f"nearest keys needed / {models[0].mass.shape[-1]} tokens"
    if exceeds_line_limit([model.label for model in models]):
        return _head_maps(models, quantised_heads, Normalize(0, 1), _EPSILON_OF_ATTENTION, y_label, flip=True)
    figure, all_axes = _per_head(models, quantised_heads)
    for axes in all_axes:
        axes.set(xlim=(1, 0), ylim=(0, 1))
    _label_last_row(all_axes, _EPSILON_OF_ATTENTION)
    figure.supylabel(y_label, fontsize=NAME)
    return figure


def draw_empirical_and_theoretical(models: Sequence[AttentionMass]) -> Figure:
    """Draw the paper's Figures 5 and 6: a panel of empirical fields and one of theoretical ones, a curve per method.

    Both are quantised, n / length against ε from 1 down to 0, averaged over layers and heads. A method without an
    additive bias has no theoretical field; if no method has one, there is one panel.

    Args:
        models: measured models; more than twelve are drawn as rows of heat maps.
    """
    y_label = f"nearest keys / {models[0].mass.shape[-1]} tokens"
    measured = {model.label: model.quantised_erf() for model in models}
    theory = {model.label: curve for model in models if (curve := model.quantised_trf()) is not None}
    # title of each panel -> method -> ε (50,) and n / length (50,)
    drawn = {"empirical (ERF)": measured, "theoretical (TRF)": theory} if theory else {"empirical (ERF)": measured}
    if exceeds_line_limit(measured):
        return _quantised_maps(drawn, measured, y_label)
    columns = panel_columns(len(drawn), 2)
    lines = math.ceil(len(drawn) / columns)
    figure, all_axes = panels(lines, columns, (figure_width(columns), 0.8 + 2.6 * lines), sharex=True, sharey=True)
    looks = assign_looks(list(measured))
    for axes, (title, curves) in zip(all_axes, drawn.items(), strict=False):
        for label, (epsilons, values) in curves.items():
            look = looks[label].plot_options()
            axes.plot(epsilons, values, **look, linewidth=1.4, markevery=_MARK_EVERY_POINTS, label=label)
        axes.set(xlim=(1, 0), ylim=(0, 1))
        set_title(axes, title)
    _label_last_row(all_axes, _EPSILON)
    figure.supylabel(y_label, fontsize=NAME)
    add_legend_of(figure, all_axes[0], 4)
    return figure


def _quantised_maps(
    drawn: Mapping[str, Mapping[str, tuple[Tensor, Tensor]]],
    measured: Mapping[str, tuple[Tensor, Tensor]],
    y_label: str,
) -> Figure:
    """Draw :func:`draw_empirical_and_theoretical` as heat maps, the rows of all panels in the order of the ERF."""
    columns = panel_columns(len(drawn), 2)
    figure, all_axes = map_panels(math.ceil(len(drawn) / columns), columns, len(measured))
    order = sort_best_first({label: _points(*curve) for label, curve in measured.items()})
    for axes, (title, curves) in zip(all_axes, drawn.items(), strict=False):
        rows = {label: _points(*curves[label]) if label in curves else {} for label in order}
        scale = draw_map(axes, rows, Normalize(0, 1), title, continuous=True)
        axes.invert_xaxis()
        axes.set_xlabel(_EPSILON)
    add_colour_bar(figure, all_axes, scale, y_label)
    return figure


@dataclass(frozen=True)
class TruncationErrors:
    """Output error δ(i, j) of truncated attention of a model, and its bound.

    Attributes:
        label: name of the model in the legend.
        train_length: training length in tokens.
        length: length of the evaluated blocks in tokens.
        keys: J numbers j of nearest keys that a query is truncated to.
        delta: (layers, J) largest δ of any head and query.
        bound: (layers, J) largest bound of any head and query.
    """

    label: str
    train_length: int
    length: int
    keys: Sequence[int]
    delta: Tensor
    bound: Tensor


def draw_truncation_errors(models: Sequence[TruncationErrors]) -> Figure:
    """Draw δ against j, a panel for each of up to four layers: measured lines, and the bounds as pale bands.

    Args:
        models: measured models; more than twelve are drawn as rows of heat maps of δ.
    """
    layers = spread_indices(min(len(model.delta) for model in models))
    columns = panel_columns(len(layers), 2)
    rows = math.ceil(len(layers) / columns)
    heading = f"blocks of {models[0].length} tokens; {_DELTA}"
    if exceeds_line_limit([model.label for model in models]):
        return _truncation_maps(models, layers, (rows, columns), heading)
    size = (PAGE if columns == 2 else COLUMN, 1.2 + 2.3 * rows)
    figure, all_axes = panels(rows, columns, size, sharex=True, sharey=True)
    looks = assign_looks([model.label for model in models])
    handles = [Line2D([], [], **looks[model.label].plot_options(), label=model.label) for model in models]
    for axes, layer in zip(all_axes, layers, strict=False):
        for model in models:
            look = looks[model.label].plot_options()
            axes.plot(model.keys, model.bound[layer], **{**_PALE_BAND, "color": look["color"]})
            axes.plot(model.keys, model.delta[layer], **look, markevery=2, linewidth=1.2)
        set_title(axes, f"layer {layer}")
    _set_delta_axis(all_axes[0], models)
    powers_of_two = [n for n in models[0].keys if n.bit_count() == 1]
    set_length_axis(all_axes[0], powers_of_two, 5)
    hide_unused(all_axes, len(layers))
    _label_last_row(all_axes[: len(layers)], _NEAREST_KEYS)
    figure.supylabel(_LARGEST_DELTA, fontsize=NAME)
    set_figure_title(figure, heading, TICK)
    add_legend(figure, handles=[*handles, Line2D([], [], **_PALE_BAND, color="0.3", label="bound")], ncols=4)
    return figure


def _set_delta_axis(axes: Axes, models: Sequence[TruncationErrors]) -> None:
    """Make the y axis, which all panels share, logarithmic: from half the least δ to twice the largest bound.

    A δ that is 0 up to rounding does not count. With one token no key can be left out, so every δ is 0; then the axis
    stays linear.
    """
    seen = torch.cat([model.delta[model.delta > _MIN_DELTA * model.delta.max()] for model in models])
    if len(seen):
        largest_bound = max(model.bound.max().item() for model in models)
        axes.set(yscale="log", ylim=(seen.min().item() / 2, 2 * largest_bound))


def _truncation_maps(
    models: Sequence[TruncationErrors], layers: Sequence[int], grid: tuple[int, int], heading: str
) -> Figure:
    """Draw δ of many models as heat maps, a panel for each layer in a grid of (rows, columns)."""
    top = max(float(model.delta.max()) for model in models)
    norm = LogNorm(_LEAST_DELTA_COLOUR * top, top) if top > 0 else Normalize(0, 1)
    figure, all_axes = map_panels(*grid, len(models))
    for axes, layer in zip(all_axes, layers, strict=False):
        points = {model.label: _points(model.keys, model.delta[layer].clamp_min(0)) for model in models}
        scale = draw_map(axes, points, norm, f"layer {layer}")
        axes.set_xlabel(_NEAREST_KEYS)
    hide_unused(all_axes, len(layers))
    set_figure_title(figure, heading, TICK)
    add_colour_bar(figure, all_axes, scale, _LARGEST_DELTA, extend="min")
    return figure


def _label_last_row(all_axes: Sequence[Axes], name: str) -> None:
    """Label the x axis of the lowest panels."""
    for axes in all_axes:
        if axes.get_subplotspec().is_last_row():
            axes.set_xlabel(name)


def _per_head(models: Sequence[AttentionMass], lines: Callable[[Tensor], HeadLines]) -> tuple[Figure, list[Axes]]:
    """Draw a panel for each of up to four heads; the lines of the bias alone are pale bands.

    Args:
        models: measured models.
        lines: maps attention (layers, heads, length) by distance to a line for each head.
    """
    chosen = spread_indices(min(model.mass.shape[1] for model in models))
    # four heads as 2 × 2, fewer side by side
    columns = panel_columns(len(chosen), 2 if len(chosen) > 3 else 3, narrowest=_NARROWEST_LINES)
    rows = math.ceil(len(chosen) / columns)
    size = (PAGE if rows == 1 else 6.0, 1.2 + 2.2 * rows)
    figure, all_axes = panels(rows, columns, size, sharex=True, sharey=True)
    looks = assign_looks([model.label for model in models])
    handles = []
    for model in models:
        look = looks[model.label].plot_options()
        handles.append(Line2D([], [], **look, label=model.label))
        drawn = [(model.mass, {**look, "markevery": _MARK_EVERY_DIAGONAL, "linewidth": 1.2})]
        if model.bias_mass is not None:
            drawn.insert(0, (model.bias_mass, {**_PALE_BAND, "color": look["color"]}))
        for mass, style in drawn:
            x, y = lines(mass)
            for axes, head in zip(all_axes, chosen, strict=False):
                axes.plot(x, y[head], **style)
    for axes, head in zip(all_axes, chosen, strict=False):
        set_title(axes, f"head {head + 1}")
    hide_unused(all_axes, len(chosen))
    if any(model.bias_mass is not None for model in models):
        handles.append(Line2D([], [], **_PALE_BAND, color="0.3", label="bias alone"))
    add_legend(figure, handles=handles, ncols=4)
    return figure, all_axes


def _head_maps(
    models: Sequence[AttentionMass],
    lines: Callable[[Tensor], HeadLines],
    norm: Normalize,
    x_label: str,
    y_label: str,
    flip: bool = False,
) -> Figure:
    """Draw models × x as heat maps, a panel for each of up to four heads; the bias alone is not drawn.

    Args:
        models: measured models.
        lines: maps attention (layers, heads, length) by distance to x and the values of each head.
        norm: normalisation of the colours.
        x_label: label of the x axis.
        y_label: label of the colour bar.
        flip: let x decrease to the right.
    """
    chosen = spread_indices(min(model.mass.shape[1] for model in models))
    columns = panel_columns(len(chosen), 2, narrowest=_NARROWEST_MAP)
    figure, all_axes = map_panels(math.ceil(len(chosen) / columns), columns, len(models))
    lines_by_label = {model.label: lines(model.mass) for model in models}
    for axes, head in zip(all_axes, chosen, strict=False):
        points: Rows = {label: _points(x, y[head]) for label, (x, y) in lines_by_label.items()}
        scale = draw_map(axes, points, norm, f"head {head + 1}", continuous=True)
        axes.set_xlabel(x_label)
        if flip:
            axes.invert_xaxis()
    hide_unused(all_axes, len(chosen))
    add_colour_bar(figure, all_axes, scale, y_label)
    return figure
