"""Draws FIRE's Theorem 3.1: a bias, the constructions that meet it, and by how much they miss it."""

from collections.abc import Sequence

import torch
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from torch import Tensor

from fairseq_rpe.analysis.fire_construction import PaperFit
from fairseq_rpe.analysis.fire_fit import FireFit
from fairseq_rpe.figures.style import DASHES, PAGE, PALETTE, across, legend_of_all, panels, titled

_LEAST = 1e-18  # nats; errors below it, 0 among them, are drawn as this


def constructions(name: str, target: Tensor, ours: FireFit, papers: Sequence[PaperFit]) -> Figure:
    """Bias of the first and the last head over distance, and the largest error of any head at each distance.

    ``target``: (H, N) log-bias of all heads, float64; ``ours`` and, together, ``papers`` have all of them too.
    """
    found = {"ours, ReLUs" if ours.hidden else "ours, a line": ours.values}
    if papers:
        sigma = papers[0].sigma
        found["the paper's, a line" if sigma == "x" else f"the paper's, σ(x) = {sigma}"] = lambda dtype=torch.float64: (
            torch.cat([fit.values(dtype) for fit in papers])
        )
    columns = across(2, 2)
    figure, (left, right) = panels(2 // columns, columns, (PAGE, 3.4 if columns == 2 else 5.4))
    heads = dict.fromkeys((0, len(target) - 1))
    for head in heads:
        _plot(left, target[head], f"{name}" if not head else None, color="0.8", linewidth=5.0)
    for number, (label, values) in enumerate(found.items()):
        exact = values()
        for head in heads:
            _plot(left, exact[head], None, color=PALETTE[number], linestyle=DASHES[number], linewidth=1.3)
        for dtype, dashes in ((torch.float64, DASHES[0]), (torch.float32, DASHES[2])):
            error = (values(dtype) - target).abs().amax(0).clamp_min(_LEAST)
            digits = str(dtype).removeprefix("torch.")
            _plot(right, error, f"{label}, {digits}", color=PALETTE[number], linestyle=dashes, linewidth=1.1)
    titled(left, "bias of the first and last head" if len(heads) > 1 else "bias")
    titled(right, "largest error of a head")
    left.set(xlabel="distance (tokens)", ylabel="bias (nats)")
    right.set(xlabel="distance (tokens)", ylabel="error (nats)", yscale="log")
    legend_of_all(figure, ncols=2)
    return figure


def _plot(axes: Axes, values: Tensor, label: str | None, **look: object) -> None:
    axes.plot(range(len(values)), values, label=label, **look)
    axes.margins(x=0)
