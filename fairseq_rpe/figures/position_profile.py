"""Figure of loss, norm of attention outputs and attention to distant keys by the position in a text."""

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from fairseq_rpe.figures.heat_maps import add_colour_bar, colour_norm, draw_map, exceeds_line_limit, map_panels
from fairseq_rpe.figures.style import (
    ERROR_BAR,
    TICK,
    Look,
    add_legend_of,
    assign_looks,
    figure_width,
    mark_training,
    panels,
    set_figure_title,
    set_length_axis,
    set_title,
)

_POSITION = "position in the text (tokens)"
_MOST_TICKS = 6


class ProfileCurves(NamedTuple):
    """The curves of one model, with a value for each range of positions.

    Attributes:
        train_length: training length in tokens.
        positions: last position of each range, ascending.
        losses: mean loss in bits.
        errors: standard error of the mean loss.
        norms: norm of the outputs of attention, divided by that at the training length.
        masses: attention to keys at the training length or farther, from 0 to 1.
    """

    train_length: int
    positions: Sequence[int]
    losses: Sequence[float]
    errors: Sequence[float]
    norms: Sequence[float]
    masses: Sequence[float]

    def values(self) -> tuple[Sequence[float], Sequence[float], Sequence[float]]:
        """Return the values of the three panels."""
        return self.losses, self.norms, self.masses


def draw_position_profile(curves: Mapping[str, ProfileCurves]) -> Figure:
    """Draw three panels by position: loss, norm of the outputs of attention, and attention to distant keys.

    Args:
        curves: label -> its curves, which all have the same positions. More than twelve labels are drawn as rows of
            heat maps.
    """
    first = next(iter(curves.values()))
    lengths = sorted({curve.train_length for curve in curves.values()})
    trained = str(lengths[0]) if len(lengths) == 1 else "the training length"
    titles = (
        "loss (bits per token)",
        f"norm of attention outputs, 1 at {trained}",
        f"attention to keys {trained} or more tokens back",
    )
    if exceeds_line_limit(curves):
        return _profile_maps(curves, titles)
    figure, all_axes = panels(1, 3, (figure_width(3), 3.3), sharex=True)
    looks = assign_looks(list(curves))
    for number, (axes, title) in enumerate(zip(all_axes, titles, strict=True)):
        for label, curve in curves.items():
            _draw_curve(axes, curve, number, label, looks[label])
        set_length_axis(axes, first.positions, _MOST_TICKS)
        axes.set_xlabel(_POSITION)
        set_title(axes, title)
        for length in lengths:
            mark_training(axes, length, named=not number)
    if any(error for curve in curves.values() for error in curve.errors):
        set_figure_title(figure, f"bars: ±{ERROR_BAR} standard errors of the loss", TICK)
    add_legend_of(figure, all_axes[0])
    return figure


def _draw_curve(axes: Axes, curve: ProfileCurves, panel: int, label: str, look: Look) -> None:
    """Draw one curve into the panel with this number; losses have error bars."""
    options = look.plot_options()
    if panel:
        axes.plot(curve.positions, curve.values()[panel], **options, label=label)
        return
    errors = [ERROR_BAR * error for error in curve.errors]
    axes.errorbar(curve.positions, curve.losses, errors, **options, elinewidth=1, capsize=2.5, label=label)


def _profile_maps(curves: Mapping[str, ProfileCurves], titles: Sequence[str]) -> Figure:
    """Draw a heat map per panel."""
    figure, all_axes = map_panels(3, 1, len(curves))
    for number, (axes, title) in enumerate(zip(all_axes, titles, strict=True)):
        rows = {
            label: dict(zip(map(float, curve.positions), curve.values()[number], strict=True))
            for label, curve in curves.items()
        }
        scale = draw_map(axes, rows, colour_norm(rows), title, numbers=rows)
        add_colour_bar(figure, [axes], scale, "")
    all_axes[-1].set_xlabel(_POSITION)
    return figure
