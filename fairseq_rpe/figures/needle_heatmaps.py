"""Heat maps of exact answers: how far into a text a model finds what stands at each depth of it."""

from collections.abc import Mapping

import numpy as np
from matplotlib import colormaps
from matplotlib.cm import ScalarMappable
from matplotlib.colors import Normalize
from matplotlib.figure import Figure

from fairseq_rpe.figures.style import NAME, PALETTE, TICK, across, panels, titled, width

Grid = Mapping[tuple[int, float], float]
_COLUMNS = 3
_TICKS = 24  # columns of a panel that are named at most
_LEGIBLE = 8  # columns of a panel that still have room for numbers


def heat_maps(grids: Mapping[str, Mapping[str, Grid]], trained: Mapping[str, int]) -> Figure:
    """Exact answers in per cent by length in tokens (across) and depth (down), a panel for each task and method.

    ``grids``: task → method → (length, depth) → value; ``trained``: by task the longest length in training, right of
    which a line is drawn. A cell that nothing is known of is grey.
    """
    shown = [(task, method, grid) for task, of_task in grids.items() for method, grid in of_task.items()]
    columns = across(len(shown), 2 if len(shown) == 4 else _COLUMNS, 1.6)
    lines = -(-len(shown) // columns)
    most = max(len({depth for _, depth in grid}) for *_, grid in shown)
    figure, made = panels(lines, columns, (width(columns), 0.7 + lines * (0.55 + 0.15 * max(most, 6))), grid=False)
    scale = ScalarMappable(Normalize(0, 100), colormaps["viridis"].with_extremes(bad="0.85"))
    for axes, (task, method, grid) in zip(made, shown, strict=False):
        lengths, depths = (sorted({key[axis] for _, g in grids[task].items() for key in g}) for axis in (0, 1))
        values = np.array([[grid.get((n, depth), np.nan) for n in lengths] for depth in depths])
        axes.imshow(values, norm=scale.norm, cmap=scale.cmap, interpolation="nearest", aspect="auto")
        along = range(0, len(lengths), -(-len(lengths) // _TICKS))
        each = (width(columns) / columns - 0.7) / len(along)  # inches
        upright = 90 if each < 0.09 * len(str(lengths[-1])) else 0
        size = TICK if len(lengths) < 5 else TICK - 1
        axes.set_xticks(along, [str(lengths[k]) for k in along], fontsize=size, rotation=upright)
        every = -(-len(depths) // 11)
        axes.set_yticks(range(0, len(depths), every), [f"{depth:g}" for depth in depths[::every]])
        for (row, column), value in np.ndenumerate(values):
            if len(lengths) <= _LEGIBLE and len(depths) <= 11 and not np.isnan(value):
                ink = "black" if value > 60 else "white"
                axes.text(column, row, f"{value:.0f}", color=ink, fontsize=TICK - 1, ha="center", va="center")
        if beyond := [k for k, n in enumerate(lengths) if n > trained[task]]:
            axes.axvline(beyond[0] - 0.5, color=PALETTE[1], linestyle=(0, (4, 2)), linewidth=1.6, label="_training")
        titled(axes, method if len(grids) == 1 else f"{task}\n{method}")
    for axes in made[len(shown) :]:
        axes.set_visible(False)
    bar = figure.colorbar(scale, ax=made, shrink=0.9, pad=0.02)
    bar.set_label("exact match (%)", fontsize=NAME)
    bar.ax.tick_params(labelsize=TICK)
    figure.supxlabel("length (tokens); dashed: the training length", fontsize=NAME)
    figure.supylabel("depth of what is asked for", fontsize=NAME)
    return figure
