"""Draws encodings side by side: exp(bias) as maps, bias over distance, and what training made of a learned bias.

Source of the kinds of figure: "Exploring Transformer Extrapolation" (arXiv 2307.10156), Fig. 7 and 8 (exp(bias) as heat
maps); FIRE (arXiv 2310.04418), Fig. 4 and 8 (learned biases of one query). Every function returns a matplotlib
``Figure`` and leaves the style of the process alone.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from ..core import UserError
from .style import looks

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_COLUMNS = 4
_FLOOR = 1e-4  # weights below this are drawn as this: no colour tells them apart
_LOWEST = -12.0  # nats below a profile's largest value; exp of it is 6e-6 and no attention to speak of
_HEADS_MAP, _TIME_MAP = "viridis", "plasma"


def heat_maps(maps: Mapping[str, Tensor], step: int, head: int) -> Figure:
    """exp(bias - largest bias of the row) on a logarithmic scale, a panel for each encoding.

    Args:
        maps: name -> (n, n) log-bias of query × key; the future is not looked at.
        step: tokens between neighbouring rows and columns.
        head: from 1, for the title.
    """
    from matplotlib import colormaps
    from matplotlib.cm import ScalarMappable
    from matplotlib.colors import LogNorm

    scale = ScalarMappable(LogNorm(_FLOOR, 1.0), colormaps["viridis"].with_extremes(bad="0.9"))
    figure, panels = _panels(len(maps), (2.1, 2.2))
    for axes, (name, bias) in zip(panels, maps.items(), strict=True):
        n = len(bias)
        past = torch.ones(n, n, dtype=torch.bool).tril()
        kept = bias.double().masked_fill(~past, -torch.inf)
        values = (kept - kept.amax(-1, keepdim=True)).exp().clamp_min(_FLOOR).masked_fill(~past, torch.nan)
        low, high = -step / 2, (n - 0.5) * step
        # nearest: a blend of two cells is nobody's bias
        axes.imshow(values, norm=scale.norm, cmap=scale.cmap, interpolation="nearest", extent=(low, high, high, low))
        axes.set_title(name, fontsize="small")
        axes.locator_params(nbins=4, integer=True)
        axes.tick_params(labelsize="x-small")
    bar = figure.colorbar(scale, ax=panels, shrink=0.6, extend="min", pad=0.01)
    bar.set_label("exp(bias − largest bias of the row)")
    figure.suptitle(f"Weight that the bias alone gives to each key, head {head}", fontsize="medium")
    figure.supxlabel("key (tokens)", fontsize="small")
    figure.supylabel("query (tokens)", fontsize="small")
    return figure


def profiles(values: Mapping[str, Tensor]) -> Figure:
    """Bias minus its largest value over distance, a panel for each encoding and a line for each head.

    Args:
        values: name -> (H, n) log-bias over the distances 0 … n-1; H and n the same for all.
    """
    heads, n = next(iter(values.values())).shape
    figure, panels = _panels(len(values), (2.3, 1.9))
    for axes, (name, profile) in zip(panels, values.items(), strict=True):
        for head, colour in enumerate(_ramp(_HEADS_MAP, heads)):
            axes.plot(range(n), _below_top(profile[head]), color=colour, linewidth=1.2)
        _distance_axis(axes, n)
        axes.set_ylim(_LOWEST, 0.4)
        axes.set_title(name, fontsize="small")
    _ramp_bar(figure, panels, _HEADS_MAP, (1, heads), "head", whole=True)
    figure.supxlabel("distance (tokens)", fontsize="small")
    figure.supylabel("bias − largest bias (nats)", fontsize="small")
    return figure


def compared(values: Mapping[str, Tensor], head: int) -> Figure:
    """exp(bias - largest bias) of one head over distance + 1, both logarithmic: a power of the distance is straight.

    Args:
        values: name -> (n,) log-bias over the distances 0 … n-1.
        head: from 1, for the title.
    """
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7.6, 4.4), layout="constrained")
    axes = figure.subplots()
    shown = looks(list(values))
    for name, profile in values.items():
        x = torch.arange(1, len(profile) + 1)
        look = shown[name]
        drawn: dict[str, Any] = {"color": look.colour, "marker": look.marker, "linestyle": look.dashes}
        weights = (profile.double() - profile.max()).exp()
        axes.plot(x, weights, **drawn, linewidth=1.4, markersize=4, markevery=0.09, label=name)
    axes.set(xscale="log", yscale="log", ylim=(_FLOOR / 10, 2), xlabel="distance + 1 (tokens)")
    axes.set_ylabel("exp(bias − largest bias)")
    axes.set_title(f"Weight by distance that the bias alone gives, head {head}", fontsize="medium")
    axes.margins(x=0)
    axes.grid(alpha=0.25)
    axes.legend(loc="upper left", bbox_to_anchor=(1.01, 1.0), frameon=False, fontsize="small")
    return figure


def of_queries(biases: Mapping[int, Tensor], name: str) -> Figure:
    """What a learned bias gives to the keys of a few queries: a row for each query, a column for each layer.

    Args:
        biases: query position i -> (layers, H, i + 1) bias over key positions 0 … i.
        name: of the encoding, for the title.
    """
    from matplotlib.figure import Figure

    layers, heads, _ = next(iter(biases.values())).shape
    size = (0.9 + 2.6 * layers, 0.7 + 2.0 * len(biases))
    figure = Figure(figsize=(max(5.2, size[0]), size[1]), layout="constrained")
    panels = figure.subplots(len(biases), layers, squeeze=False, sharey=True, sharex="row")
    for row, (query, bias) in zip(panels, biases.items(), strict=True):
        for layer, axes in enumerate(row):
            for head, colour in enumerate(_ramp(_HEADS_MAP, heads)):
                axes.plot(range(query + 1), bias[layer, head].double(), color=colour, linewidth=1.3)
            where = f", layer {layer}" if layers > 1 else ""
            axes.set_title(f"query {query}{where}", fontsize="small")
            axes.margins(x=0)
            axes.grid(alpha=0.25)
            axes.tick_params(labelsize="x-small")
    _ramp_bar(figure, list(panels.flat), _HEADS_MAP, (1, heads), "head", whole=True)
    figure.suptitle(f"Learned bias of {name}", fontsize="medium")
    figure.supxlabel("key position (tokens)", fontsize="small")
    figure.supylabel("bias (nats)", fontsize="small")
    return figure


def over_training(values: Mapping[str, Tensor], distances: Sequence[int], steps: Sequence[int], name: str) -> Figure:
    """Bias minus its value at distance 0 over distance, coloured by the update, a panel for each head.

    Args:
        values: panel title, e.g. "layer 0, head 1" -> (len(steps), len(distances)) log-bias.
        distances: in tokens.
        steps: updates done, rising.
        name: of the encoding, for the title.
    """
    figure, panels = _panels(len(values), (2.3, 1.9))
    colours = _ramp(_TIME_MAP, len(steps))
    for axes, (title, bias) in zip(panels, values.items(), strict=True):
        for line, colour in zip(bias.double(), colours, strict=True):
            axes.plot(distances, line - line[0], color=colour, linewidth=1.2)
        _distance_axis(axes, max(distances) + 1)
        axes.set_title(title, fontsize="small")
    _ramp_bar(figure, panels, _TIME_MAP, (steps[0], steps[-1]), "updates")
    figure.suptitle(f"Bias of {name} over its training", fontsize="medium")
    figure.supxlabel("distance (tokens)", fontsize="small")
    figure.supylabel("bias − bias at distance 0 (nats)", fontsize="small")
    return figure


def _below_top(profile: Tensor) -> Tensor:
    return (profile.double() - profile.max()).clamp_min(2 * _LOWEST)


def _panels(count: int, size: tuple[float, float]) -> tuple[Figure, list[Axes]]:
    # Figure itself rather than pyplot: no backend is chosen and nothing is left open.
    from matplotlib.figure import Figure

    if not count:
        raise UserError("there is nothing to draw: name an encoding with an additive bias")
    columns = min(_COLUMNS, count)
    rows = -(-count // columns)
    figure = Figure(figsize=(max(5.0, 1.2 + size[0] * columns), 0.8 + size[1] * rows), layout="constrained")
    panels = list(figure.subplots(rows, columns, squeeze=False, sharex=True, sharey=True).flat)
    for axes in panels[count:]:
        axes.set_visible(False)
    for axes in panels[max(0, count - columns) : count]:
        # the lowest panel of a column, where the grid is not full
        axes.tick_params(labelbottom=True)
    return figure, panels[:count]


def _distance_axis(axes: Axes, n: int) -> None:
    from matplotlib.ticker import FixedLocator, NullLocator, StrMethodFormatter

    axes.set_xscale("symlog", linthresh=1, base=2)
    axes.xaxis.set_major_locator(FixedLocator([d for d in (0, 1, 4, 16, 64, 256, 1024, 4096, 16384) if d < n]))
    axes.xaxis.set_minor_locator(NullLocator())
    axes.xaxis.set_major_formatter(StrMethodFormatter("{x:.0f}"))
    axes.set_xlim(0, n - 1)
    axes.tick_params(labelsize="x-small")
    axes.grid(alpha=0.25)


def _ramp(name: str, count: int) -> list[Any]:
    from matplotlib import colormaps

    # the last tenth is too pale for a line
    return [colormaps[name](0.9 * k / max(1, count - 1)) for k in range(count)]


def _ramp_bar(
    figure: Figure, panels: list[Axes], name: str, span: tuple[int, int], label: str, whole: bool = False
) -> None:
    from matplotlib.cm import ScalarMappable
    from matplotlib.colors import LinearSegmentedColormap, Normalize
    from matplotlib.ticker import MaxNLocator

    if span[0] == span[1]:
        return
    colours = LinearSegmentedColormap.from_list("ramp", _ramp(name, 64))
    bar = figure.colorbar(ScalarMappable(Normalize(*span), colours), ax=panels, shrink=0.8, pad=0.01, label=label)
    if whole:
        bar.ax.yaxis.set_major_locator(MaxNLocator(integer=True, nbins=8))
