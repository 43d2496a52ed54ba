"""Draws receptive fields against ε (arXiv 2307.10156, Eq. 22 and appendix)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from matplotlib.figure import Figure
from torch import Tensor

from .canvas import gridded, heads_of, legend_beside, plot

Curves = Mapping[str, Sequence[tuple[Tensor, Tensor]]]  # encoding -> ε and TRF of each of its heads


def fields(curves: Curves, keys: int | None = None, title: str = "Theoretical receptive field") -> Figure:
    """TRF in keys against ε, both logarithmic; with ``keys`` m the quantised curves, TRF / m against ε, both linear."""
    figure, (axes,) = gridded(1, 1, (7.6, 4.2))
    for line in heads_of(curves):
        plot(axes, line, drawstyle="steps-mid" if keys else "default")
    axes.set_xlabel("ε, part of the weight that is left out")
    if keys:
        axes.set_title(f"Quantised TRF, first {keys} distances")
        axes.set_ylabel("TRF / m")
    else:
        axes.set_xscale("log")
        axes.set_yscale("log")
        axes.set_title(title)
        axes.set_ylabel("TRF (keys)")
    legend_beside(axes, handlelength=2.6)
    return figure
