"""Figures of additive biases: over distance, as maps of queries and keys, over training, and reproduced by FIRE.

Source of the kinds of figure: "Exploring Transformer Extrapolation" (arXiv 2307.10156), Fig. 7 and 8 (exp(bias) as heat
maps); FIRE (arXiv 2310.04418), Fig. 4 and 8 (learned biases of one query).
"""

import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from matplotlib import colormaps
from matplotlib.axes import Axes
from matplotlib.cm import ScalarMappable
from matplotlib.colorbar import Colorbar
from matplotlib.colors import BoundaryNorm, LinearSegmentedColormap, ListedColormap, LogNorm, Normalize
from matplotlib.figure import Figure
from matplotlib.ticker import FixedLocator, NullLocator, ScalarFormatter, StrMethodFormatter
from torch import Tensor

from fairseq_rpe.analysis.fire_theorem import FireFit, PaperFit
from fairseq_rpe.core.errors import UserError
from fairseq_rpe.figures.heat_maps import add_colour_bar, draw_map, exceeds_line_limit, map_panels
from fairseq_rpe.figures.style import (
    COLUMN,
    DASHES,
    NAME,
    PAGE,
    PALETTE,
    TICK,
    add_legend,
    add_legend_of,
    assign_looks,
    figure_width,
    hide_unused,
    panel_columns,
    panels,
    set_figure_title,
    set_title,
)

_COLUMNS = 4
_MIN_WEIGHT = 1e-4  # smaller weights are drawn as this: their colours could not be distinguished
_MIN_BIAS = -12.0  # nats below the largest value of a profile; exp(-12) = 6e-6 is negligible attention
_MIN_ERROR = 1e-18  # nats; smaller errors, 0 among them, are drawn as this
_MAP_COLUMNS = 40  # log-spaced steps of distance in a heat map
_BAR_WIDTH = 0.14  # largest width of a colour bar in inches
_HEADS_MAP, _TIME_MAP = "viridis", "plasma"


def draw_bias_maps(maps: Mapping[str, Tensor], step: int, head: int) -> Figure:
    """Draw exp(bias - largest bias of the row) on a logarithmic scale, a panel for each encoding.

    Args:
        maps: name -> (n, n) log-bias of query × key; the future is ignored.
        step: tokens between neighbouring rows and columns.
        head: number of the head, from 1, for the title.
    """
    scale = _scale(LogNorm(_MIN_WEIGHT, 1.0))
    figure, shown = _panels_of_shape(len(maps), 1.0)
    for axes, (name, bias) in zip(shown, maps.items(), strict=True):
        causal = bias.double().masked_fill(~_past(len(bias)), -torch.inf)
        weights = (causal - causal.amax(-1, keepdim=True)).exp().clamp_min(_MIN_WEIGHT)
        _map(axes, weights, step, scale, name, nbins=3)
    _bar(figure, shown, scale, "exp(bias − largest bias of the row)", extend="min")
    title = f"Weight that the bias alone gives to each key, head {head}"
    return _with_labels(figure, "key (tokens)", "query (tokens)", title)


def draw_head_maps(bias: Tensor, title: str, heads: Sequence[int], step: int) -> Figure:
    """Draw exp(bias) as a map per head, keys to the right and queries downwards; the future is grey.

    Args:
        bias: (H', n, n) log-bias of query × key, as :func:`fairseq_rpe.analysis.bias_snapshots.bias_map` returns it.
        title: title of the figure.
        heads: indices of the H' heads in their model, for the titles of the panels.
        step: tokens between neighbouring rows and columns.
    """
    count, n, _ = bias.shape
    values = bias.double().cpu().exp()
    seen = values[:, _past(n)]
    seen = seen[seen.isfinite()]
    top = seen.max().item() if len(seen) else 1.0
    scale = _scale(Normalize(0.0, top if top > 0 else 1.0))

    columns = count if count <= 2 else math.ceil(count / 2)
    figure, shown = _tiles(count, columns, (2.6, 2.6), (0.8, 0.4))
    for axes, head, value in zip(shown, heads, values, strict=True):
        _map(axes, value, step, scale, f"head {head + 1}", nbins=5)
    _bar(figure, shown, scale, "exp(bias)")
    every = f", one in {step} shown" if step > 1 else ""
    return _with_labels(figure, f"key (tokens{every})", f"query (tokens{every})", title)


def draw_head_profiles(profile: Tensor, title: str) -> Figure:
    """Draw the log-bias (H, n) of each head over the distances 0 … n-1 in tokens."""
    heads, n = profile.shape
    figure, (axes,) = panels(1, 1, (5.6, 3.4 + 0.2 * math.ceil(heads / 4)))
    for head, values in enumerate(profile.double().cpu()):
        options = {"color": PALETTE[head % len(PALETTE)], "linestyle": DASHES[head // len(PALETTE) % len(DASHES)]}
        axes.plot(range(n), values, **options, linewidth=1.6, label=f"head {head + 1}")
    axes.set(xlabel="distance (tokens)", ylabel="bias (nats)")
    set_title(axes, title)
    axes.margins(x=0)
    add_legend_of(figure, axes, 4)
    return figure


def draw_profiles(values: Mapping[str, Tensor]) -> Figure:
    """Draw the bias minus its largest value over distance, a panel for each encoding and a line for each head.

    Args:
        values: name -> (H, n) log-bias over the distances 0 … n-1, with the same H and n for all.
    """
    heads, n = next(iter(values.values())).shape
    doubles = {name: profile.double() for name, profile in values.items()}
    below = {k: (bias - bias.amax(-1, keepdim=True)).clamp_min(2 * _MIN_BIAS) for k, bias in doubles.items()}
    figure = _over_distance(below, range(n), _HEADS_MAP, range(1, heads + 1))
    figure.axes[0].set_ylim(_MIN_BIAS, 0.4)
    return _with_labels(figure, "distance (tokens)", "bias − largest bias (nats)")


def draw_weight_comparison(values: Mapping[str, Tensor], head: int) -> Figure:
    """Draw exp(bias - largest bias) of one head over distance + 1, where powers of the distance are straight lines.

    Args:
        values: name -> (n,) log-bias over the distances 0 … n-1; more than twelve are drawn as rows of a heat map.
        head: number of the head, from 1, for the title.
    """
    title = f"Weight by distance that the bias alone gives, head {head}"
    if exceeds_line_limit(values):
        return _draw_weight_map(values, title)
    figure, (axes,) = panels(1, 1, (figure_width(), 3.4 + 0.2 * math.ceil(len(values) / 3)))
    looks = assign_looks(list(values))
    for number, (name, profile) in enumerate(values.items()):
        x = torch.arange(1, len(profile) + 1)
        weights = (profile.double() - profile.max()).exp()
        # markers are evenly spaced along the axis, and shifted from those of the other lines
        marks = [round(2 ** (k + number / len(values))) - 1 for k in range(1, 64) if 2 ** (k + 1) <= len(profile)]
        axes.plot(x, weights, **looks[name].plot_options(), linewidth=1.4, markevery=marks, label=name)
    axes.set(xscale="log", yscale="log", ylim=(_MIN_WEIGHT / 10, 2))
    axes.set(xlabel="distance + 1 (tokens)", ylabel="exp(bias − largest bias)")
    set_title(axes, title)
    axes.margins(x=0)
    add_legend_of(figure, axes)
    return figure


def _draw_weight_map(values: Mapping[str, Tensor], title: str) -> Figure:
    """Draw a heat map, its rows sorted by the sum of their weights: the fastest decay first."""
    weights = {name: (profile.double() - profile.max()).exp() for name, profile in values.items()}
    distances = [d - 1 for d in _log_spaced(max(map(len, weights.values())))]
    order = sorted(weights, key=lambda name: float(weights[name].sum()))
    rows = {
        name: {float(d + 1): max(float(weights[name][d]), _MIN_WEIGHT) for d in distances if d < len(weights[name])}
        for name in order
    }
    figure, (axes,) = map_panels(1, 1, len(rows))
    scale = draw_map(axes, rows, LogNorm(_MIN_WEIGHT, 1.0), title)
    axes.set_xlabel("distance + 1 (tokens)")
    add_colour_bar(figure, [axes], scale, "exp(bias − largest bias)", extend="min")
    return figure


def _log_spaced(n: int) -> list[int]:
    """Return whole numbers from 1 to n, about evenly spaced on a logarithmic scale."""
    return sorted({round(n ** (k / _MAP_COLUMNS)) for k in range(_MAP_COLUMNS + 1)})


def draw_query_biases(biases: Mapping[int, Tensor], name: str, layers: Sequence[int] = ()) -> Figure:
    """Draw the learned bias of a few queries over key positions: rows for each query, a panel for each layer.

    Args:
        biases: query position i -> (layers, H, i + 1) bias over key positions 0 … i.
        name: name of the encoding.
        layers: numbers of the layers in the model, from 0, if ``biases`` does not have all of them.
    """
    count, heads, _ = next(iter(biases.values())).shape
    columns = panel_columns(count, _COLUMNS, 1.5)
    rows = math.ceil(count / columns)
    size = min(PAGE, max(COLUMN, 1.2 + 1.9 * columns)), 0.7 + 1.5 * rows * len(biases)
    figure, all_axes = panels(rows * len(biases), columns, size, sharey=True, sharex="row")
    for number, (query, values) in enumerate(biases.items()):
        query_axes = all_axes[number * rows * columns :][: rows * columns]
        for axes, layer in zip(query_axes, range(count), strict=False):
            for head, colour in enumerate(_ramp(_HEADS_MAP, heads)):
                axes.plot(range(query + 1), values[layer, head].double(), color=colour, linewidth=1.3)
            suffix = f", layer {layers[layer] if layers else layer}" if layers or count > 1 else ""
            set_title(axes, f"query {query}{suffix}")
            axes.margins(x=0)
        hide_unused(query_axes, count)
    _ramp_bar(figure, all_axes, _HEADS_MAP, range(1, heads + 1))
    return _with_labels(figure, "key position (tokens)", "bias (nats)", f"Learned bias of {name}")


def draw_bias_over_training(
    values: Mapping[str, Tensor], distances: Sequence[int], steps: Sequence[int], name: str
) -> Figure:
    """Draw the bias minus its value at distance 0 over distance, coloured by the update, a panel for each head.

    Args:
        values: title of a panel, such as "layer 0, head 1" -> (len(steps), len(distances)) log-bias.
        distances: distances i - j in tokens, increasing.
        steps: numbers of updates, increasing.
        name: name of the encoding.
    """
    changes = {title: bias.double() - bias[:, :1] for title, bias in values.items()}
    figure = _over_distance(changes, distances, _TIME_MAP, steps)
    return _with_labels(
        figure, "distance (tokens)", "bias − bias at distance 0 (nats)", f"Bias of {name} over its training"
    )


def draw_constructions(name: str, target: Tensor, ours: FireFit, papers: Sequence[PaperFit]) -> Figure:
    """Draw a bias, the FIREs that reproduce it, and their errors (arXiv 2310.04418, Theorem 3.1).

    The left panel has the bias of the first and the last head, the right one the largest error of any head.

    Args:
        name: name of the encoding.
        target: (H, N) float64 log-bias of all heads over the distances 0 … N-1.
        ours: construction with ReLUs, of all heads.
        papers: the paper's constructions, together of all heads; may be empty.
    """
    fits = {"ours, ReLUs" if ours.hidden else "ours, a line": ours.values}
    if papers:
        sigma = papers[0].sigma
        label = "the paper's, a line" if sigma == "x" else f"the paper's, σ(x) = {sigma}"
        fits[label] = lambda dtype=torch.float64: torch.cat([fit.values(dtype) for fit in papers])
    columns = panel_columns(2, 2)
    figure, (left, right) = panels(2 // columns, columns, (PAGE, 3.4 if columns == 2 else 5.4))
    heads = dict.fromkeys((0, len(target) - 1))
    for head in heads:
        _plot_values(left, target[head], f"{name}" if not head else None, color="0.8", linewidth=5.0)
    for number, (label, values) in enumerate(fits.items()):
        bias = values()
        for head in heads:
            _plot_values(left, bias[head], None, color=PALETTE[number], linestyle=DASHES[number], linewidth=1.3)
        for dtype, dashes in ((torch.float64, DASHES[0]), (torch.float32, DASHES[2])):
            error = (values(dtype) - target).abs().amax(0).clamp_min(_MIN_ERROR)
            digits = str(dtype).removeprefix("torch.")
            _plot_values(right, error, f"{label}, {digits}", color=PALETTE[number], linestyle=dashes, linewidth=1.1)
    set_title(left, "bias of the first and last head" if len(heads) > 1 else "bias")
    set_title(right, "largest error of a head")
    left.set(xlabel="distance (tokens)", ylabel="bias (nats)")
    right.set(xlabel="distance (tokens)", ylabel="error (nats)", yscale="log")
    add_legend(figure, ncols=2)
    return figure


def _plot_values(axes: Axes, values: Tensor, label: str | None, **options: object) -> None:
    axes.plot(range(len(values)), values, label=label, **options)
    axes.margins(x=0)


def _past(n: int) -> Tensor:
    return torch.ones(n, n, dtype=torch.bool).tril()


def _scale(norm: Normalize) -> ScalarMappable:
    return ScalarMappable(norm, colormaps["viridis"].with_extremes(bad="0.9"))


def _map(axes: Axes, values: Tensor, step: int, scale: ScalarMappable, title: str, nbins: int) -> None:
    """Draw a map of values (n, n) of query × key without the future."""
    n = len(values)
    low, high = -step / 2, (n - 0.5) * step
    causal = values.masked_fill(~_past(n), torch.nan)
    # interpolation="nearest": blended pixels would show biases that no pair has
    axes.imshow(causal, norm=scale.norm, cmap=scale.cmap, interpolation="nearest", extent=(low, high, high, low))
    set_title(axes, title)
    axes.locator_params(nbins=nbins, integer=True)


def _with_labels(figure: Figure, x: str, y: str, title: str = "") -> Figure:
    """Return the figure with labels of its axes and, if there is one, a title."""
    if title:
        set_figure_title(figure, title, NAME + 1)
    figure.supxlabel(x, fontsize=NAME)
    figure.supylabel(y, fontsize=NAME)
    return figure


def _panels_of_shape(count: int, shape: float, grid: bool = False) -> tuple[Figure, list[Axes]]:
    """Return ``count`` panels whose height is ``shape`` times their width."""
    if not count:
        raise UserError("there is nothing to draw: name an encoding with an additive bias")
    columns = panel_columns(count, _COLUMNS, 1.5)
    wide = (figure_width(_COLUMNS) - 1.2) / panel_columns(_COLUMNS, _COLUMNS, 1.5)
    figure, shown = _tiles(count, columns, (wide, shape * wide + 0.25), (1.2, 0.8), grid)
    for axes in shown[-columns:]:
        # the last panel of each column has tick labels, also where the last row is not full
        axes.tick_params(labelbottom=True)
    return figure, shown


def _tiles(
    count: int, columns: int, size: tuple[float, float], margin: tuple[float, float], grid: bool = False
) -> tuple[Figure, list[Axes]]:
    """Return ``count`` panels of one size with shared axes; the last row may not be full."""
    rows = math.ceil(count / columns)
    figure_size = margin[0] + size[0] * columns, margin[1] + size[1] * rows
    figure, all_axes = panels(rows, columns, figure_size, grid=grid, sharex=True, sharey=True)
    hide_unused(all_axes, count)
    return figure, all_axes[:count]


def _over_distance(
    values: Mapping[str, Tensor], distances: Sequence[int], ramp: str, line_numbers: Sequence[int]
) -> Figure:
    """Draw a panel for each title, with a line for each row of its values.

    Args:
        values: title -> (lines, len(distances)).
        distances: distances in tokens.
        ramp: name of the colour map of the lines.
        line_numbers: head or update of each line.
    """
    figure, shown = _panels_of_shape(len(values), 0.85, grid=True)
    ticks = [d for d in (0, 1, 8, 64, 512, 4096, 32768) if d <= distances[-1]]
    for axes, (title, lines) in zip(shown, values.items(), strict=True):
        for line, colour in zip(lines, _ramp(ramp, len(lines)), strict=True):
            axes.plot(distances, line, color=colour, linewidth=1.2)
        axes.set_xscale("symlog", linthresh=1, base=2)
        axes.xaxis.set_major_locator(FixedLocator(ticks))
        axes.xaxis.set_minor_locator(NullLocator())
        axes.xaxis.set_major_formatter(StrMethodFormatter("{x:.0f}"))
        axes.set_xlim(0, distances[-1])
        set_title(axes, title)
    _ramp_bar(figure, shown, ramp, line_numbers)
    return figure


def _ramp(name: str, count: int) -> list[Any]:
    """Return ``count`` colours of a colour map."""
    # without the last tenth of the colour map, which is too pale for a line
    return [colormaps[name](0.9 * k / max(1, count - 1)) for k in range(count)]


def _ramp_bar(figure: Figure, panels: list[Axes], name: str, line_numbers: Sequence[int]) -> None:
    """Add the colour bar of a ramp, discrete for heads and continuous for updates; none for a single line."""
    if len(line_numbers) < 2:
        return
    if name == _TIME_MAP:
        colours = LinearSegmentedColormap.from_list("ramp", _ramp(name, 64))
        _bar(figure, panels, ScalarMappable(Normalize(line_numbers[0], line_numbers[-1]), colours), "updates")
        return
    count = len(line_numbers)
    edges = [head - 0.5 for head in (*line_numbers, line_numbers[-1] + 1)]
    heads = ScalarMappable(BoundaryNorm(edges, count), ListedColormap(_ramp(name, count)))
    # at most about eight heads have a tick
    bar = _bar(figure, panels, heads, "head", ticks=list(line_numbers)[:: math.ceil(count / 8)])
    bar.minorticks_off()
    bar.ax.tick_params(length=0)


def _bar(figure: Figure, panels: list[Axes], scale: ScalarMappable, label: str, **options: Any) -> Colorbar:
    aspect = max(20.0, 0.8 * figure.get_figheight() / _BAR_WIDTH)
    bar = figure.colorbar(scale, ax=panels, shrink=0.8, pad=0.02, aspect=aspect, **options)
    bar.set_label(label, fontsize=NAME)
    bar.ax.tick_params(labelsize=TICK)
    if isinstance(bar.formatter, ScalarFormatter):
        bar.formatter.set_useOffset(False)
    return bar
