"""How figures look (an encoding keeps its colour, marker and dashes in every one) and how they are written."""

import io
import re
import zlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from matplotlib import rc_context
from matplotlib.axes import Axes
from matplotlib.figure import Figure  # rather than pyplot: no backend is chosen and nothing is left open

from ..core.files import replace_with

# Okabe and Ito's colours, told apart with any kind of colour vision, but for their yellow, too pale for a thin line;
# three that are darker or greyer than all of these follow.
PALETTE = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000", "#7A2F8F", "#7F4A12", "#8A8A8A")
MARKERS = "os^Dv<>P"
DASHES: tuple[Any, ...] = ("-", (0, (4, 1.5)), (0, (1, 1.2)), (0, (6, 1.5, 1, 1.5)))
# Relatives share a colour and differ by marker; so do ways to move positions, which are compared with the encodings.
_FAMILIES = (
    "sinusoidal sandwich learned, alibi window, type1 type2, inv_n inv_nlnn, kerple_log kerple_power, rope xpos, "
    "fire t5_bias nope, interpolation interpolate, warping warp, randomized pose shape cape random_padding offset"
)
_KNOWN = {
    name: (colour, marker)
    for colour, family in enumerate(_FAMILIES.split(", "))
    for marker, name in enumerate(family.split())
}
_PLAIN: dict[str, Any] = {"frameon": False, "fontsize": "small", "handlelength": 3.0}


class Look(NamedTuple):
    """A matplotlib colour, marker and line style."""

    colour: str
    marker: str
    dashes: Any

    def drawn(self) -> dict[str, Any]:
        """What matplotlib's ``plot`` is told."""
        return {"color": self.colour, "marker": self.marker, "linestyle": self.dashes, "markersize": 4}


def looks(specs: Sequence[str]) -> dict[str, Look]:
    """A look for each spec or label; two never share one while there are looks left.

    >>> looks(["type1", "type2"])["type2"][:2]
    ('#009E73', 's')
    """
    count = len(PALETTE)
    fixed = {spec: place for spec in specs if (place := _KNOWN.get(spec)) is not None}
    taken = {*fixed.values(), *_KNOWN.values()}
    for spec in specs:
        if spec in fixed:
            continue
        name = re.split(r"[:\s]", spec, maxsplit=1)[0]  # without options, "(layer 0)" …
        colour = _KNOWN[name][0] if name in _KNOWN else zlib.crc32(name.encode()) % count
        places = [(c % count, m) for c in range(colour, colour + count) for m in range(len(MARKERS))]
        fixed[spec] = next((place for place in places if place not in taken), places[0])
        taken.add(fixed[spec])
    return {spec: Look(PALETTE[c], MARKERS[m], DASHES[m % len(DASHES)]) for spec, (c, m) in fixed.items()}


def panels(
    rows: int, columns: int, size: tuple[float, float], *, grid: bool = True, **shared: Any
) -> tuple[Figure, list[Axes]]:
    """A figure of ``size`` in inches and its panels, row by row, with a pale grid."""
    figure = Figure(figsize=size, layout="constrained")
    made = list(figure.subplots(rows, columns, squeeze=False, **shared).flat)
    if grid:
        for axes in made:
            axes.grid(alpha=0.25)
    return figure, made


def legend_within(axes: Axes, **how: Any) -> None:
    axes.legend(**{**_PLAIN, **how})


def legend_beside(axes: Axes, **how: Any) -> None:
    legend_within(axes, loc="upper left", bbox_to_anchor=(1.01, 1.0), **how)


def legend_of_all(figure: Figure, loc: str = "outside right upper", **how: Any) -> None:
    """One legend for all panels, beside them."""
    figure.legend(loc=loc, **{**_PLAIN, **how})


def legend_below(figure: Figure, axes: Axes) -> None:
    """One legend for all panels, with the lines of ``axes``."""
    figure.legend(*axes.get_legend_handles_labels(), loc="outside lower center", ncols=3, **_PLAIN)


def save(figure: Figure, *paths: Path, dpi: int = 160) -> None:
    """Write to each path in the format of its ending; the same numbers give the same bytes."""
    for path in paths:
        undated = {"CreationDate": None} if path.suffix == ".pdf" else None
        replace_with(path, lambda target, undated=undated: figure.savefig(target, dpi=dpi, metadata=undated))


def to_svg(figure: Figure) -> bytes:
    """The figure as SVG that is the same each time and needs no font."""
    out = io.BytesIO()
    with rc_context({"svg.fonttype": "path", "svg.hashsalt": "fairseq_rpe"}):
        figure.savefig(out, format="svg", metadata={"Date": None}, transparent=True)
    return out.getvalue()
