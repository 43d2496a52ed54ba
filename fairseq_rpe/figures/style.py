"""How figures look (an encoding keeps its colour, marker and dashes in every one) and how they are written."""

import io
import re
import textwrap
import zlib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

from matplotlib import rc_context
from matplotlib.axes import Axes
from matplotlib.figure import Figure  # rather than pyplot: no backend is chosen and nothing is left open
from matplotlib.layout_engine import ConstrainedLayoutEngine
from matplotlib.ticker import LogLocator, NullLocator, StrMethodFormatter
from matplotlib.transforms import offset_copy

from fairseq_rpe.figures import WIDTHS
from fairseq_rpe.utils.files import replace_with
from fairseq_rpe.utils.table import spaced

# Okabe and Ito's colours, told apart with any kind of colour vision, but for their yellow, too pale for a thin line;
# three that are darker or greyer than all of these follow.
PALETTE = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000", "#7A2F8F", "#7F4A12", "#8A8A8A")
MARKERS = "os^Dv<>P"
DASHES: tuple[Any, ...] = ("-", (0, (4, 1.5)), (0, (1, 1.2)), (0, (6, 1.5, 1, 1.5)))
# Relatives share a colour and differ by marker and dashes, but for the readings of rope, which are compared; so do ways
# to move positions, which are compared with the encodings: after as many - as keep their dashes apart from rope's and
# each other's.
_FAMILIES = (
    "sinusoidal sandwich learned floater complex lm_infinite, alibi window streaming_llm forgetting, "
    "type1 type2 dual_chunk shaw music, inv_n inv_nlnn rerope deberta huang, "
    "kerple_log kerple_power tisa leaky_rerope dape, rope xpos bipe longrope clex, "
    "fire t5_bias nope tupe self_extend transformer_xl cope, "
    "- interpolation interpolate, - - - warping warp, "
    "randomized pose shape cape random_padding offset"
)
_KNOWN = {
    name: (colour, marker)
    for colour, family in enumerate(_FAMILIES.split(", "))
    for marker, name in enumerate(family.split())
    if name != "-"
}
_PLAIN: dict[str, Any] = {"frameon": False, "fontsize": "small", "handlelength": 3.6}  # two dashes of each style
_TICKS = 64  # of an axis that are still apart from each other
COLUMN, PAGE = 4.8, 7.2  # widest figures in inches, so that print at 3.4 and 6.9 leaves their letters legible
TITLE, NAME, TICK = 9.0, 9.0, 8.0  # points
_CHARACTER = 0.55  # mean width of a character over its font size
_chosen: ContextVar[float | None] = ContextVar("figure_width", default=None)


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
    ('#009E73', 'D')
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
    # also without colours, families differ
    marks = {spec: MARKERS[(c + m) % len(MARKERS)] for spec, (c, m) in fixed.items()}
    return {spec: Look(PALETTE[c], marks[spec], DASHES[m % len(DASHES)]) for spec, (c, m) in fixed.items()}


@contextmanager
def drawn_at(name: str | None) -> Iterator[None]:
    """Draw all figures inside at the width of a paper's column or page, so that a paper includes them unscaled.

    Args:
        name: a key of ``WIDTHS``; ``None`` leaves each figure at the width that suits its panels.
    """
    token = _chosen.set(None if name is None else WIDTHS[name])
    try:
        yield
    finally:
        _chosen.reset(token)


def width(across: int = 1) -> float:
    """The width of a figure with ``across`` panels side by side, in inches: the chosen one, else by the panels."""
    return _chosen.get() or (COLUMN if across == 1 else PAGE)


def across(count: int, most: int, narrowest: float = 2.4) -> int:
    """How many of ``count`` panels stand side by side: at most ``most``, and no panel below ``narrowest`` inches where
    a width was chosen."""
    fit = most if (chosen := _chosen.get()) is None else max(1, int(chosen / narrowest))
    return min(count, most, fit)


def panels(
    rows: int, columns: int, size: tuple[float, float], *, grid: bool = True, **shared: Any
) -> tuple[Figure, list[Axes]]:
    """A figure of ``size`` in inches and its panels, row by row, with a pale grid and letters fit for print.

    A chosen width (:func:`drawn_at`) replaces that of ``size``. Ticks show whole numbers, never an offset such as "+1".
    """
    figure = Figure(figsize=(_chosen.get() or size[0], size[1]), layout=ConstrainedLayoutEngine(wspace=0.04))
    look = {"axes.labelsize": NAME, "xtick.labelsize": TICK, "ytick.labelsize": TICK}
    with rc_context({**look, "axes.formatter.useoffset": False}):
        made = list(figure.subplots(rows, columns, squeeze=False, **shared).flat)
    if grid:
        for axes in made:
            axes.grid(alpha=0.25)
    return figure, made


def titled(axes: Axes, title: str) -> None:
    """Title a panel, in several lines where it is longer than the panel is wide."""
    # at a chosen width fit_texts breaks it, when the width of the panel is known
    shown = title if _chosen.get() else _wrapped(title, panel_width(axes), TITLE)
    axes.set_title(shown, fontsize=TITLE)


def panel_width(axes: Axes) -> float:
    """The width in inches of a panel's part of the figure, its names and numbers included."""
    place = axes.get_subplotspec()
    part = 1.0 if place is None else len(place.colspan) / place.get_gridspec().ncols
    return part * axes.figure.get_figwidth()


def headed(figure: Figure, title: str, size: float = NAME) -> None:
    """Title a figure, in several lines where the title is longer than the figure is wide; ``size`` in points."""
    figure.suptitle(_wrapped(title, figure.get_figwidth(), size), fontsize=size)


def fit_texts(figure: Figure) -> None:
    """Break titles and names of axes that leave the figure, or reach into the next panel, where a width was chosen."""
    if _chosen.get() is None:
        return
    figure.draw_without_rendering()
    whole = figure.bbox
    shown = [axes for axes in figure.axes if axes.get_subplotspec() is not None and axes.get_visible()]
    centres = sorted((box.x0 + box.x1) / 2 for box in (axes.get_window_extent() for axes in shown))
    bars = [axes.get_window_extent().x0 for axes in figure.axes if axes.get_subplotspec() is None]
    # beside a colour bar, panels are nearer to each other than their part of the figure
    apart = min((b - a for a, b in pairwise(centres) if b - a > 1), default=whole.width)
    for axes in figure.axes:
        place = axes.get_subplotspec()
        if not axes.get_visible():
            continue
        box = axes.get_window_extent()
        middle = (box.x0 + box.x1) / 2
        across, up = 2 * min(middle, whole.width - middle), whole.height
        if place is not None:  # a panel, not a colour bar
            grid = place.get_gridspec()
            across = min(apart * len(place.colspan), across, *(2 * (x - middle) for x in bars if x > middle))
            up *= len(place.rowspan) / grid.nrows
        for text, upright in ((axes.title, False), (axes.xaxis.label, False), (axes.yaxis.label, True)):
            extent = text.get_window_extent()
            long, room = (extent.height, up) if upright else (extent.width, across)
            if text.get_text() and long > 0.95 * room:
                lines = text.get_text().split("\n")
                most = max(8, int(max(map(len, lines)) * 0.95 * room / long))
                text.set_text("\n".join(part for line in lines for part in _broken(line, most)))


def _broken(line: str, most: int) -> list[str]:
    """Break a line of more than ``most`` characters at its spaces, and after the marks of a spec, such as a comma."""
    marked = re.sub(r"([,:](?=[^\s\d])|[=_](?=\S))", "\\1\x1f ", line)
    parts = textwrap.wrap(marked, most, break_long_words=False, break_on_hyphens=False)
    return [part.replace("\x1f ", "").removesuffix("\x1f") for part in parts] or [""]


def _wrapped(text: str, inches: float, size: float) -> str:
    most = max(12, int(inches * 72 / (_CHARACTER * size)))
    lines = (_broken(line, most) for line in text.split("\n"))
    return "\n".join("\n".join(line) for line in lines)


def mark_training(axes: Axes, length: int, named: bool = True) -> None:
    """A dashed line at the training length in tokens, and its name on it."""
    axes.axvline(length, color="0.5", linestyle=(0, (4, 2)), linewidth=1, zorder=0, label="_training")
    if not named:
        return
    beside = offset_copy(axes.get_xaxis_transform(), axes.figure, x=2, y=-3, units="points")
    about: dict[str, Any] = {"rotation": 90, "fontsize": TICK - 1, "color": "0.35"}
    axes.text(length, 1, f"trained at {length}", transform=beside, verticalalignment="top", **about)


def lengths_along(axes: Axes, lengths: Sequence[int], most: int = 9) -> None:
    """A logarithmic x axis with a tick at each length in tokens, and numbers at no more than ``most`` of them.

    Of more lengths than have room for a tick, those with a number alone have one.
    """
    if len(lengths) > _TICKS:
        lengths = spaced(lengths, most)
    every = -(-len(lengths) // most)
    # counted from the longest, which is always named
    named = [str(n) if not (len(lengths) - 1 - k) % every else "" for k, n in enumerate(lengths)]
    axes.set_xscale("log", base=2)
    axes.set_xticks(lengths, named)
    axes.xaxis.set_minor_locator(NullLocator())


def decades(axes: Axes, along: str = "y", narrow: bool = False) -> None:
    """A logarithmic axis, y or ``along`` x, with plain numbers at 1, 2 and 5 of each power of ten.

    ``narrow``: the axis spans little more than one of them, and has numbers in between too.
    """
    axes.set(**{f"{along}scale": "log"})
    axis = axes.yaxis if along == "y" else axes.xaxis
    axis.set_major_locator(LogLocator(subs=(1, 1.5, 2, 3, 4, 5, 7) if narrow else (1, 2, 5)))
    axis.set_major_formatter(StrMethodFormatter("{x:g}"))
    axis.set_minor_locator(NullLocator())


def legend_of_all(figure: Figure, loc: str = "outside lower center", ncols: int = 1, **how: Any) -> None:
    """One legend for all panels, below them unless ``loc`` says otherwise; in at most ``ncols`` columns that fit."""
    for columns in range(ncols, 0, -1):
        legend = figure.legend(loc=loc, **{**_PLAIN, **how, "ncols": columns})
        room = figure.bbox.width / legend.get_window_extent().width
        if room >= 1:
            return
        if columns > 1:
            legend.remove()
    # the picture of a line takes the room of some letters
    most = max(12, int(room * max(len(text.get_text()) for text in legend.get_texts())) - 6)
    for text in legend.get_texts():
        text.set_text(textwrap.fill(text.get_text(), most, break_long_words=False, break_on_hyphens=False))


def legend_below(figure: Figure, axes: Axes, ncols: int = 3) -> None:
    """One legend for all panels, with the lines of ``axes``."""
    legend_of_all(figure, handles=axes.get_legend_handles_labels()[0], ncols=ncols)


def save(figure: Figure, *paths: Path, dpi: int = 160) -> None:
    """Write to each path in the format of its ending; the same numbers give the same bytes.

    PDFs embed fonts as TrueType (type 42): submission systems of conferences refuse matplotlib's usual type 3.
    """
    fit_texts(figure)
    for path in paths:
        with rc_context({"pdf.fonttype": 42}):
            replace_with(path, partial(_write_figure, figure, dpi, path.suffix.lower()[1:]))


def _write_figure(figure: Figure, dpi: int, format: str, target: Path) -> None:
    """Write a figure by way of memory: where a disk is full, matplotlib's PDF writer ends in an error of its own."""
    out = io.BytesIO()
    figure.savefig(out, dpi=dpi, format=format, metadata={"CreationDate": None} if format == "pdf" else None)
    target.write_bytes(out.getvalue())


def to_svg(figure: Figure) -> bytes:
    """The figure as SVG that is the same each time and needs no font."""
    out = io.BytesIO()
    with rc_context({"svg.fonttype": "path", "svg.hashsalt": "fairseq_rpe"}):
        figure.savefig(out, format="svg", metadata={"Date": None}, transparent=True)
    return out.getvalue()
