"""Draws receptive fields against ε (arXiv 2307.10156, Eq. 22 and appendix) from numbers: nothing is computed here."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from .sensitivity_figures import Line

if TYPE_CHECKING:
    from matplotlib.figure import Figure


def fields(lines: Sequence[Line], keys: int | None = None, title: str = "Theoretical receptive field") -> Figure:
    """TRF in keys against ε, both logarithmic; with ``keys`` m the quantised curves, TRF / m against ε, both linear."""
    # Figure itself rather than pyplot: no backend is chosen and nothing is left open.
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7.6, 4.2), layout="constrained")
    axes = figure.subplots()
    axes.grid(alpha=0.25)
    for line in lines:
        axes.plot(
            line.x,
            line.y,
            color=line.colour,
            linestyle=line.style,
            linewidth=line.width,
            alpha=line.alpha,
            drawstyle="steps-mid" if keys else "default",
            label=line.label or "_",
        )
    axes.set_xlabel("ε, part of the weight that is left out")
    if keys:
        axes.set_title(f"Quantised TRF, first {keys} distances")
        axes.set_ylabel("TRF / m")
    else:
        axes.set_xscale("log")
        axes.set_yscale("log")
        axes.set_title(title)
        axes.set_ylabel("TRF (keys)")
    axes.legend(loc="upper left", bbox_to_anchor=(1.01, 1.0), frameon=False, fontsize="small", handlelength=2.6)
    return figure
