"""Draws additive biases: over distance, exp(bias) as maps of queries and keys, and what training made of them.

Source of the kinds of figure: "Exploring Transformer Extrapolation" (arXiv 2307.10156), Fig. 7 and 8 (exp(bias) as heat
maps); FIRE (arXiv 2310.04418), Fig. 4 and 8 (learned biases of one query).
"""

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

from fairseq_rpe.core.errors import UserError
from fairseq_rpe.figures.method_maps import colour_bar, draw_map, map_panels, too_many
from fairseq_rpe.figures.style import (
    COLUMN,
    DASHES,
    NAME,
    PAGE,
    PALETTE,
    TICK,
    across,
    headed,
    legend_below,
    looks,
    panels,
    titled,
    width,
)

_COLUMNS = 4
_FLOOR = 1e-4  # weights below this are drawn as this: no colour tells them apart
_LOWEST = -12.0  # nats below a profile's largest value; exp of it is 6e-6 and no attention to speak of
_BAR = 0.14  # inches across a colour bar, at most
_HEADS_MAP, _TIME_MAP = "viridis", "plasma"


def heat_maps(maps: Mapping[str, Tensor], step: int, head: int) -> Figure:
    """exp(bias - largest bias of the row) on a logarithmic scale, a panel for each encoding.

    ``maps``: name -> (n, n) log-bias of query × key, of which the future is not looked at; ``step``: tokens between
    neighbouring rows and columns; ``head``: from 1, for the title.
    """
    scale = _scale(LogNorm(_FLOOR, 1.0))
    figure, shown = _few_columns(len(maps), 1.0)
    for axes, (name, bias) in zip(shown, maps.items(), strict=True):
        kept = bias.double().masked_fill(~_past(len(bias)), -torch.inf)
        weights = (kept - kept.amax(-1, keepdim=True)).exp().clamp_min(_FLOOR)
        _map(axes, weights, step, scale, name, nbins=3)
    about = "exp(bias − largest bias of the row)"
    _bar(figure, shown, scale, about, extend="min")
    title = f"Weight that the bias alone gives to each key, head {head}"
    return _named(figure, "key (tokens)", "query (tokens)", title)


def maps_of_heads(bias: Tensor, title: str, heads: Sequence[int], step: int) -> Figure:
    """exp(bias) as a map per head, keys to the right and queries downwards; the future stays grey.

    ``bias``: (H', n, n) log-bias of query × key; ``heads``: indices of the H' heads in their model, for the panels'
    titles; ``step``: tokens between neighbouring rows and columns. As ``analysis.bias_map`` gives them.
    """
    count, n, _ = bias.shape
    values = bias.double().cpu().exp()
    seen = values[:, _past(n)]
    seen = seen[seen.isfinite()]
    top = seen.max().item() if len(seen) else 1.0
    scale = _scale(Normalize(0.0, top if top > 0 else 1.0))

    columns = count if count <= 2 else -(-count // 2)
    figure, shown = _tiles(count, columns, (2.6, 2.6), (0.8, 0.4))
    for axes, head, value in zip(shown, heads, values, strict=True):
        _map(axes, value, step, scale, f"head {head + 1}", nbins=5)
    _bar(figure, shown, scale, "exp(bias)")
    every = f", one in {step} shown" if step > 1 else ""
    return _named(figure, f"key (tokens{every})", f"query (tokens{every})", title)


def of_heads(profile: Tensor, title: str) -> Figure:
    """The log-bias (H, n) of each head over the distances 0 … n-1 in tokens."""
    heads, n = profile.shape
    figure, (axes,) = panels(1, 1, (5.6, 3.4 + 0.2 * -(-heads // 4)))
    for head, values in enumerate(profile.double().cpu()):
        look = {"color": PALETTE[head % len(PALETTE)], "linestyle": DASHES[head // len(PALETTE) % len(DASHES)]}
        axes.plot(range(n), values, **look, linewidth=1.6, label=f"head {head + 1}")
    axes.set(xlabel="distance (tokens)", ylabel="bias (nats)")
    titled(axes, title)
    axes.margins(x=0)
    legend_below(figure, axes, 4)
    return figure


def profiles(values: Mapping[str, Tensor]) -> Figure:
    """Bias minus its largest value over distance, a panel for each encoding and a line for each head.

    ``values``: name -> (H, n) log-bias over the distances 0 … n-1; H and n the same for all.
    """
    heads, n = next(iter(values.values())).shape
    doubles = {name: profile.double() for name, profile in values.items()}
    below = {k: (bias - bias.amax(-1, keepdim=True)).clamp_min(2 * _LOWEST) for k, bias in doubles.items()}
    figure = _over_distance(below, range(n), _HEADS_MAP, range(1, heads + 1))
    figure.axes[0].set_ylim(_LOWEST, 0.4)
    return _named(figure, "distance (tokens)", "bias − largest bias (nats)")


def compared(values: Mapping[str, Tensor], head: int) -> Figure:
    """exp(bias - largest bias) of one head over distance + 1, both logarithmic: a power of the distance is straight.

    ``values``: name -> (n,) log-bias over the distances 0 … n-1; ``head``: from 1, for the title. More than twelve have
    a row each of a heat map instead.
    """
    title = f"Weight by distance that the bias alone gives, head {head}"
    if too_many(values):
        return _compared_map(values, title)
    figure, (axes,) = panels(1, 1, (width(), 3.4 + 0.2 * -(-len(values) // 3)))
    shown = looks(list(values))
    for number, (name, profile) in enumerate(values.items()):
        x = torch.arange(1, len(profile) + 1)
        weights = (profile.double() - profile.max()).exp()
        # evenly along the axis, and beside those of the line before
        marks = [round(2 ** (k + number / len(values))) - 1 for k in range(1, 64) if 2 ** (k + 1) <= len(profile)]
        axes.plot(x, weights, **shown[name].drawn(), linewidth=1.4, markevery=marks, label=name)
    axes.set(xscale="log", yscale="log", ylim=(_FLOOR / 10, 2))
    axes.set(xlabel="distance + 1 (tokens)", ylabel="exp(bias − largest bias)")
    titled(axes, title)
    axes.margins(x=0)
    legend_below(figure, axes)
    return figure


def _compared_map(values: Mapping[str, Tensor], title: str) -> Figure:
    """Rows by the sum of their weights: those that fall fastest first."""
    weights = {name: (profile.double() - profile.max()).exp() for name, profile in values.items()}
    shown = [d - 1 for d in _log_spaced(max(map(len, weights.values())))]
    order = sorted(weights, key=lambda name: float(weights[name].sum()))
    rows = {
        name: {float(d + 1): max(float(weights[name][d]), _FLOOR) for d in shown if d < len(weights[name])}
        for name in order
    }
    figure, (axes,) = map_panels(1, 1, len(rows))
    scale = draw_map(axes, rows, LogNorm(_FLOOR, 1.0), title)
    axes.set_xlabel("distance + 1 (tokens)")
    colour_bar(figure, [axes], scale, "exp(bias − largest bias)", extend="min")
    return figure


def _log_spaced(n: int) -> list[int]:
    """Whole numbers from 1 to n, about evenly on a logarithmic scale."""
    return sorted({round(n ** (k / 40)) for k in range(41)})


def of_queries(biases: Mapping[int, Tensor], name: str, layers: Sequence[int] = ()) -> Figure:
    """What a learned bias gives to the keys of a few queries: rows for each query, a panel for each layer.

    ``biases``: query position i -> (layers, H, i + 1) bias over key positions 0 … i; ``name``: of the encoding;
    ``layers``: their numbers from 0 in the model, for the titles, if these are not all of them.
    """
    count, heads, _ = next(iter(biases.values())).shape
    columns = across(count, _COLUMNS, 1.5)
    rows = -(-count // columns)
    size = min(PAGE, max(COLUMN, 1.2 + 1.9 * columns)), 0.7 + 1.5 * rows * len(biases)
    figure, made = panels(rows * len(biases), columns, size, sharey=True, sharex="row")
    for number, (query, values) in enumerate(biases.items()):
        own = made[number * rows * columns :][: rows * columns]
        for axes, place in zip(own, range(count), strict=False):
            for head, colour in enumerate(_ramp(_HEADS_MAP, heads)):
                axes.plot(range(query + 1), values[place, head].double(), color=colour, linewidth=1.3)
            where = f", layer {layers[place] if layers else place}" if layers or count > 1 else ""
            titled(axes, f"query {query}{where}")
            axes.margins(x=0)
        for axes in own[count:]:
            axes.set_visible(False)
    _ramp_bar(figure, made, _HEADS_MAP, range(1, heads + 1))
    return _named(figure, "key position (tokens)", "bias (nats)", f"Learned bias of {name}")


def over_training(values: Mapping[str, Tensor], distances: Sequence[int], steps: Sequence[int], name: str) -> Figure:
    """Bias minus its value at distance 0 over distance, coloured by the update, a panel for each head.

    ``values``: panel title, e.g. "layer 0, head 1" -> (len(steps), len(distances)) log-bias; ``distances`` in tokens;
    ``steps``: updates done, rising; ``name``: of the encoding.
    """
    changes = {title: bias.double() - bias[:, :1] for title, bias in values.items()}
    figure = _over_distance(changes, distances, _TIME_MAP, steps)
    return _named(figure, "distance (tokens)", "bias − bias at distance 0 (nats)", f"Bias of {name} over its training")


def _past(n: int) -> Tensor:
    return torch.ones(n, n, dtype=torch.bool).tril()


def _scale(norm: Normalize) -> ScalarMappable:
    return ScalarMappable(norm, colormaps["viridis"].with_extremes(bad="0.9"))


def _map(axes: Axes, values: Tensor, step: int, scale: ScalarMappable, title: str, nbins: int) -> None:
    """(n, n) values of query × key, the future left out."""
    n = len(values)
    low, high = -step / 2, (n - 0.5) * step
    shown = values.masked_fill(~_past(n), torch.nan)
    # nearest: a blend of two cells is nobody's bias
    axes.imshow(shown, norm=scale.norm, cmap=scale.cmap, interpolation="nearest", extent=(low, high, high, low))
    titled(axes, title)
    axes.locator_params(nbins=nbins, integer=True)


def _named(figure: Figure, x: str, y: str, title: str = "") -> Figure:
    if title:
        headed(figure, title, NAME + 1)
    figure.supxlabel(x, fontsize=NAME)
    figure.supylabel(y, fontsize=NAME)
    return figure


def _few_columns(count: int, shape: float, grid: bool = False) -> tuple[Figure, list[Axes]]:
    """``count`` panels, ``shape`` as high as wide."""
    if not count:
        raise UserError("there is nothing to draw: name an encoding with an additive bias")
    columns = across(count, _COLUMNS, 1.5)
    wide = (width(_COLUMNS) - 1.2) / across(_COLUMNS, _COLUMNS, 1.5)
    figure, shown = _tiles(count, columns, (wide, shape * wide + 0.25), (1.2, 0.8), grid)
    for axes in shown[-columns:]:
        # the lowest panel of a column, where the grid is not full
        axes.tick_params(labelbottom=True)
    return figure, shown


def _tiles(
    count: int, columns: int, size: tuple[float, float], margin: tuple[float, float], grid: bool = False
) -> tuple[Figure, list[Axes]]:
    """``count`` panels with the same axes, the last row perhaps not full; ``size`` of each."""
    rows = -(-count // columns)
    whole = margin[0] + size[0] * columns, margin[1] + size[1] * rows
    figure, made = panels(rows, columns, whole, grid=grid, sharex=True, sharey=True)
    for axes in made[count:]:
        axes.set_visible(False)
    return figure, made[:count]


def _over_distance(values: Mapping[str, Tensor], distances: Sequence[int], ramp: str, of: Sequence[int]) -> Figure:
    """A panel for each title, in it a line for each row of (lines, len(distances)) in a colour of the ramp.

    ``of``: the head or the update of each line.
    """
    figure, shown = _few_columns(len(values), 0.85, grid=True)
    ticks = [d for d in (0, 1, 8, 64, 512, 4096, 32768) if d <= distances[-1]]
    for axes, (title, lines) in zip(shown, values.items(), strict=True):
        for line, colour in zip(lines, _ramp(ramp, len(lines)), strict=True):
            axes.plot(distances, line, color=colour, linewidth=1.2)
        axes.set_xscale("symlog", linthresh=1, base=2)
        axes.xaxis.set_major_locator(FixedLocator(ticks))
        axes.xaxis.set_minor_locator(NullLocator())
        axes.xaxis.set_major_formatter(StrMethodFormatter("{x:.0f}"))
        axes.set_xlim(0, distances[-1])
        titled(axes, title)
    _ramp_bar(figure, shown, ramp, of)
    return figure


def _ramp(name: str, count: int) -> list[Any]:
    # the last tenth is too pale for a line
    return [colormaps[name](0.9 * k / max(1, count - 1)) for k in range(count)]


def _ramp_bar(figure: Figure, panels: list[Axes], name: str, of: Sequence[int]) -> None:
    """Which colour is which: heads have one each, updates go over into each other."""
    if len(of) < 2:
        return
    if name == _TIME_MAP:
        colours = LinearSegmentedColormap.from_list("ramp", _ramp(name, 64))
        _bar(figure, panels, ScalarMappable(Normalize(of[0], of[-1]), colours), "updates")
        return
    edges = [head - 0.5 for head in (*of, of[-1] + 1)]
    heads = ScalarMappable(BoundaryNorm(edges, len(of)), ListedColormap(_ramp(name, len(of))))
    # of many heads not each has a number
    bar = _bar(figure, panels, heads, "head", ticks=list(of)[:: -(-len(of) // 8)])
    bar.minorticks_off()
    bar.ax.tick_params(length=0)


def _bar(figure: Figure, panels: list[Axes], scale: ScalarMappable, label: str, **how: Any) -> Colorbar:
    thin = max(20.0, 0.8 * figure.get_figheight() / _BAR)
    bar = figure.colorbar(scale, ax=panels, shrink=0.8, pad=0.02, aspect=thin, **how)
    bar.set_label(label, fontsize=NAME)
    bar.ax.tick_params(labelsize=TICK)
    if isinstance(bar.formatter, ScalarFormatter):
        bar.formatter.set_useOffset(False)
    return bar
