"""Draws receptive fields against ε (arXiv 2307.10156, Eq. 22 and appendix)."""

from collections.abc import Mapping, Sequence

from matplotlib.figure import Figure
from torch import Tensor

from .canvas import legend_beside, panels
from .style import looks

Curves = Mapping[str, Sequence[tuple[Tensor, Tensor]]]  # encoding -> ε and TRF of each of its heads


def fields(curves: Curves, keys: int | None = None, title: str = "Theoretical receptive field") -> Figure:
    """TRF in keys against ε, both logarithmic; with ``keys`` m the quantised curves, TRF / m against ε, both linear.

    Of several heads the first is thick, the others are thin.
    """
    figure, (axes,) = panels(1, 1, (7.6, 4.2))
    shown = looks(list(curves))
    for name, heads in curves.items():
        label = name if len(heads) == 1 else f"{name}, {len(heads)} heads (thick: the first)"
        how = {"color": shown[name].colour, "linestyle": shown[name].dashes}
        for i, (x, y) in enumerate(heads):
            own = {"label": "_", "linewidth": 0.9, "alpha": 0.6} if i else {"label": label, "linewidth": 1.9}
            axes.plot(x, y, **how, **own, drawstyle="steps-mid" if keys else "default")
    axes.set_xlabel("ε, part of the weight that is left out")
    if keys:
        axes.set(title=f"Quantised TRF, first {keys} distances", ylabel="TRF / m")
    else:
        axes.set(xscale="log", yscale="log", title=title, ylabel="TRF (keys)")
    legend_beside(axes, handlelength=2.6)
    return figure
