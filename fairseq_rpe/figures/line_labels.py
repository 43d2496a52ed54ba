"""Names at the ends of lines in place of a legend, none upon another."""

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.transforms import offset_copy

from fairseq_rpe.figures.style import fit_texts

SIZE = 8.0  # points
_LINE = 1.2  # from one name to the next, of SIZE
_AWAY = 20.0  # points from the panel to the names


class End(NamedTuple):
    """A name, the last point of its line in data coordinates, and the line's colour."""

    name: str
    x: float
    y: float
    colour: str


def name_ends(figure: Figure, ends: Mapping[Axes, Sequence[End]]) -> None:
    """Write each name to the right of its panel, as near to the height of its end as the others leave room for.

    A thin line leads from the end to the name; a triangle says that an end lies above or below the panel.
    Call it last: what changes the panels' heights or limits later moves the ends but not the names.
    """
    fit_texts(figure)
    figure.draw_without_rendering()
    for axes, own in ends.items():
        height = axes.get_window_extent().height * 72 / figure.dpi
        wanted = [axes.transAxes.inverted().transform(axes.transData.transform((end.x, end.y)))[1] for end in own]
        # two ends beyond the same edge keep their order
        order = sorted(range(len(own)), key=wanted.__getitem__)
        places = spread([min(1.0, max(0.0, wanted[k])) for k in order], _LINE * SIZE / height)
        beside = offset_copy(axes.transAxes, figure, x=_AWAY, units="points")
        for k, place in zip(order, places, strict=True):
            end, inside = own[k], 0.0 <= wanted[k] <= 1.0
            lead = {"arrowstyle": "-", "color": end.colour, "linewidth": 0.8, "shrinkA": 0.0, "shrinkB": 2.0}
            axes.annotate(
                end.name,
                (end.x, end.y) if inside else (1.0, place),
                xycoords="data" if inside else "axes fraction",
                xytext=(1.0, place),
                textcoords=beside,
                fontsize=SIZE,
                verticalalignment="center",
                annotation_clip=False,
                arrowprops={**lead, "relpos": (0.0, 0.5)} if inside else None,
            )
            if not inside:
                mark = {"marker": "^" if wanted[k] > 1.0 else "v", "markersize": 5, "linestyle": "none"}
                sign = offset_copy(axes.transAxes, figure, x=_AWAY - 6.0, units="points")
                axes.plot(1.0, place, **mark, color=end.colour, transform=sign, clip_on=False, label="_beyond")


def spread(wanted: Sequence[float], apart: float) -> list[float]:
    """Rising places at least ``apart`` from each other and, in least squares, near the rising ``wanted``.

    They lie in [0, 1] if there is room. Isotonic regression by pooling adjacent violators.

    >>> spread([0.5, 0.5, 1.0], 0.25)
    [0.375, 0.625, 1.0]
    """
    pools: list[list[float]] = []
    for k, place in enumerate(wanted):
        pools.append([place - k * apart])
        while len(pools) > 1 and _mean(pools[-2]) > _mean(pools[-1]):
            last = pools.pop()
            pools[-1] += last
    level = [_mean(pool) for pool in pools for _ in pool]
    room = max(0.0, 1.0 - apart * (len(level) - 1))
    return [min(max(value, 0.0), room) + k * apart for k, value in enumerate(level)]


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)
