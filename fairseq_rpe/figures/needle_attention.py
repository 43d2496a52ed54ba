"""Figure of the attention to a needle: a map of all heads, and the weights of one head over the text."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from matplotlib import colormaps
from matplotlib.axes import Axes
from matplotlib.colors import Normalize
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle
from matplotlib.ticker import PercentFormatter

from fairseq_rpe.figures.style import PAGE, PALETTE, TICK, figure_width, panels, set_title

_MAX_NUMBERED = 12  # heads up to which the cells of a map have numbers
_MAX_BARS = 500  # tokens that are drawn singly; of more, the largest weight of neighbours is drawn
_BRIGHT = 0.6  # share of the colour scale above which a cell is so bright that its number is black


@dataclass(frozen=True)
class NeedleMap:
    """Attention of a model to the needle of one example.

    Attributes:
        title: title of the panels.
        mass: attention to the needle, by layer and head, from 0 to 1.
        layer: layer of the head whose weights are drawn, from 0.
        head: that head, from 0.
        weights: its attention to each token.
        needles: first token of each part of the needle, and the token after its last.
        even_mass: attention that the needle would have if all tokens had the same attention.
    """

    title: str
    mass: Sequence[Sequence[float]]
    layer: int
    head: int
    weights: Sequence[float]
    needles: Sequence[Sequence[int]]
    even_mass: float


def draw_needle_attention(maps: Sequence[NeedleMap]) -> Figure:
    """Draw the attention to the needle of one example for each model: a map of heads, and the best head over the text.

    Args:
        maps: the models; each has a row of two panels.

    Returns:
        The figure.
    """
    narrow = figure_width(2) < PAGE
    rows, columns = (2 * len(maps), 1) if narrow else (len(maps), 2)
    heights = [0.9 + 0.2 * max(3, len(model.mass)) for model in maps]
    height = sum(max(1.9, each) for each in heights) * (2 if narrow else 1)
    figure, all_axes = panels(rows, columns, (figure_width(2), 0.4 + height), grid=False)
    for row, model in enumerate(maps):
        _draw_map(all_axes[2 * row], model)
        _draw_weights(all_axes[2 * row + 1], model)
    return figure


def _draw_map(axes: Axes, model: NeedleMap) -> None:
    """Draw the attention to the needle of every head, with a frame around the head whose weights are drawn."""
    mass = np.array(model.mass)  # (layers, H)
    layers, heads = mass.shape
    norm = Normalize(0, max(float(mass.max()), model.even_mass))
    image = axes.imshow(mass, norm=norm, cmap=colormaps["viridis"], interpolation="nearest", aspect="auto")
    axes.set_yticks(range(layers), map(str, range(layers)))
    every = -(-heads // 16)
    axes.set_xticks(range(0, heads, every), map(str, range(1, heads + 1, every)))
    axes.tick_params(length=2)
    axes.set(xlabel="head", ylabel="layer")
    if heads <= _MAX_NUMBERED:
        for (layer, head), value in np.ndenumerate(mass):
            ink = "black" if norm(value) > _BRIGHT else "white"
            axes.text(head, layer, f"{100 * value:.0f}", color=ink, fontsize=TICK - 1, ha="center", va="center")
    corner = (model.head - 0.5, model.layer - 0.5)
    axes.add_patch(Rectangle(corner, 1, 1, fill=False, edgecolor=PALETTE[1], linewidth=1.8))
    set_title(axes, f"{model.title}: attention to the needle in % (even: {100 * model.even_mass:.1f})")
    bar = axes.figure.colorbar(image, ax=axes, pad=0.02)
    bar.ax.yaxis.set_major_formatter(PercentFormatter(xmax=1, symbol=""))
    bar.ax.tick_params(labelsize=TICK)


def _draw_weights(axes: Axes, model: NeedleMap) -> None:
    """Draw the attention of one head to each token, with the needle shaded."""
    weights = np.array(model.weights)  # (tokens,)
    starts = np.arange(0, len(weights), -(-len(weights) // _MAX_BARS))
    for start, end in model.needles:
        axes.axvspan(start - 0.5, end - 0.5, color=PALETTE[1], alpha=0.25, linewidth=0)
    axes.vlines(starts, 0, np.maximum.reduceat(weights, starts), color=PALETTE[0], linewidth=1.0)
    axes.set(xlim=(-0.5, len(weights) - 0.5), xlabel="token (shaded: the needle)", ylabel="attention")
    axes.set_ylim(bottom=0)
    share = 100 * model.mass[model.layer][model.head]
    set_title(axes, f"layer {model.layer}, head {model.head + 1}: {share:.1f} % on the needle")
