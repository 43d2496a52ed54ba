"""Common style of all figures: looks of encodings, panels, titles, axes, legends, labels at line ends, and saving.

An encoding has the same colour, marker and dashes in every figure.
"""

import io
import re
import textwrap
import zlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

from matplotlib import rc_context
from matplotlib.axes import Axes
from matplotlib.figure import Figure  # not pyplot: no backend is selected and no figure stays open
from matplotlib.layout_engine import ConstrainedLayoutEngine
from matplotlib.ticker import LogLocator, NullLocator, StrMethodFormatter
from matplotlib.transforms import offset_copy

from fairseq_rpe.core.layer_pattern import is_pattern
from fairseq_rpe.core.looks import COLOURS, MARKERS, RegisteredLook
from fairseq_rpe.encodings import registry as encoding_registry
from fairseq_rpe.figures import WIDTHS
from fairseq_rpe.positions import registry as transform_registry
from fairseq_rpe.utils.files import write_via_temporary
from fairseq_rpe.utils.table import log_spaced

PALETTE = tuple(COLOURS.values())
DASHES: tuple[Any, ...] = ("-", (0, (4, 1.5)), (0, (1, 1.2)), (0, (6, 1.5, 1, 1.5)))
# Looks of methods of recipes that are not registered under these names. Position transforms are compared with
# encodings, so they have other colours.
_METHOD_LOOKS = {"interpolation": RegisteredLook("violet", "o"), "warping": RegisteredLook("brown", "D")}
# a handle of this length shows two dashes of each style
_LEGEND_OPTIONS: dict[str, Any] = {"frameon": False, "fontsize": "small", "handlelength": 3.6}
_MAX_TICKS = 64  # of an axis; more would overlap
COLUMN, PAGE = 4.8, 7.2  # widths in inches; letters are still legible if these are printed 3.4 and 6.9 inches wide
TITLE, NAME, TICK = 9.0, 9.0, 8.0  # font sizes in points: titles, axis labels, tick labels
ERROR_BAR = 1.96  # standard errors on either side of a mean: 95 % of a normal distribution
LINE_LABEL = 8.0  # points
_LINE_SPACING = 1.2  # of labels at line ends, relative to their font size
_LABEL_DISTANCE = 20.0  # points from the panel to the labels at line ends
_CHARACTER_WIDTH = 0.55  # mean width of a character / font size
_LONGEST_PATTERN = 40  # characters of a pattern of layers that a legend shows with all options
_FIT_SHARE = 0.95  # of the available space: a text that is longer is broken into lines
_chosen: ContextVar[float | None] = ContextVar("figure_width", default=None)


class Look(NamedTuple):
    """The look of a line and its points.

    Attributes:
        colour: colour of :data:`PALETTE`.
        marker: marker of matplotlib.
        dashes: line style of matplotlib.
    """

    colour: str
    marker: str
    dashes: Any

    def plot_options(self) -> dict[str, Any]:
        """Return the keyword arguments for matplotlib's ``plot``."""
        return {"color": self.colour, "marker": self.marker, "linestyle": self.dashes, "markersize": 4}


def assign_looks(specs: Sequence[str]) -> dict[str, Look]:
    """Return a look for each spec or label; all differ as long as there are enough looks.

    >>> assign_looks(["type1", "type2"])["type2"][:2]
    ('#009E73', 'D')
    """
    count = len(PALETTE)
    registered = _registered_looks()
    # (colour, marker) indices
    fixed = {spec: registered[spec] for spec in specs if spec in registered}
    taken = set(registered.values())
    for spec in specs:
        if spec in fixed:
            continue
        # without options and suffixes such as "(layer 0)"; patterns of layers differ in all of their text
        name = spec if is_pattern(spec) else re.split(r"[:\s]", spec, maxsplit=1)[0]
        colour = registered[name][0] if name in registered else zlib.crc32(name.encode()) % count
        candidates = [(c % count, m) for c in range(colour, colour + count) for m in range(len(MARKERS))]
        fixed[spec] = next((look for look in candidates if look not in taken), candidates[0])
        taken.add(fixed[spec])
    # shift markers by the colour, so that families also differ in greyscale
    marks = {spec: MARKERS[(c + m) % len(MARKERS)] for spec, (c, m) in fixed.items()}
    return {spec: Look(PALETTE[c], marks[spec], DASHES[m % len(DASHES)]) for spec, (c, m) in fixed.items()}


def _registered_looks() -> dict[str, tuple[int, int]]:
    """Return the indices of colour and marker, the latter before its shift by the colour, of registered looks."""
    looks = {**_METHOD_LOOKS, **transform_registry.looks(), **encoding_registry.looks()}
    colours = list(COLOURS)
    indices = {name: (colours.index(look.colour), MARKERS.index(look.marker)) for name, look in looks.items()}
    return {name: (colour, (marker - colour) % len(MARKERS)) for name, (colour, marker) in indices.items()}


@contextmanager
def figures_at_width(name: str | None) -> Iterator[None]:
    """Draw all figures in a ``with`` block at the width of a paper's column or page, so that they need no scaling.

    Args:
        name: key of ``WIDTHS``; ``None`` leaves each figure at the width that suits its panels.
    """
    token = _chosen.set(None if name is None else WIDTHS[name])
    try:
        yield
    finally:
        _chosen.reset(token)


def figure_width(across: int = 1) -> float:
    """Return the width in inches of a figure with ``across`` panels side by side; a chosen width takes precedence."""
    return _chosen.get() or (COLUMN if across == 1 else PAGE)


def panel_columns(count: int, most: int, narrowest: float = 2.4) -> int:
    """Return how many of ``count`` panels are side by side.

    Args:
        count: number of panels of the figure.
        most: largest number side by side.
        narrowest: smallest width of a panel in inches, at a chosen width.
    """
    fit = most if (chosen := _chosen.get()) is None else max(1, int(chosen / narrowest))
    return min(count, most, fit)


def panels(
    rows: int, columns: int, size: tuple[float, float], *, grid: bool = True, **shared: Any
) -> tuple[Figure, list[Axes]]:
    """Return a figure and its panels, row by row.

    Tick labels have no offset such as "+1".

    Args:
        rows: number of rows of panels.
        columns: number of columns of panels.
        size: width and height in inches; a chosen width (:func:`figures_at_width`) replaces the width.
        grid: whether panels have a pale grid.
        shared: ``sharex`` and ``sharey`` of matplotlib's ``subplots``.
    """
    figure = Figure(figsize=(_chosen.get() or size[0], size[1]), layout=ConstrainedLayoutEngine(wspace=0.04))
    sizes = {"axes.labelsize": NAME, "xtick.labelsize": TICK, "ytick.labelsize": TICK}
    with rc_context({**sizes, "axes.formatter.useoffset": False}):
        all_axes = list(figure.subplots(rows, columns, squeeze=False, **shared).flat)
    if grid:
        for axes in all_axes:
            axes.grid(alpha=0.25)
    return figure, all_axes


def hide_unused(all_axes: Sequence[Axes], used: int) -> None:
    """Hide the panels after the first ``used`` ones: a grid of rows and columns may have more than are drawn."""
    for axes in all_axes[used:]:
        axes.set_visible(False)


def set_title(axes: Axes, title: str) -> None:
    """Set the title of a panel, in several lines if it is longer than the panel is wide."""
    # at a chosen width, fit_texts breaks the title as soon as the width of the panel is known
    text = title if _chosen.get() else _wrap(title, panel_width(axes), TITLE)
    axes.set_title(text, fontsize=TITLE)


def panel_width(axes: Axes) -> float:
    """Return the width in inches of a panel's cell in the figure, with its labels."""
    cell = axes.get_subplotspec()
    fraction = 1.0 if cell is None else len(cell.colspan) / cell.get_gridspec().ncols
    return fraction * axes.figure.get_figwidth()


def set_figure_title(figure: Figure, title: str, size: float = NAME) -> None:
    """Set the title of a figure, in several lines if it is longer than the figure is wide; ``size`` in points."""
    figure.suptitle(_wrap(title, figure.get_figwidth(), size), fontsize=size)


def fit_texts(figure: Figure) -> None:
    """Break titles and axis labels that are wider than their panel, at a chosen width."""
    if _chosen.get() is None:
        return
    figure.draw_without_rendering()
    for axes in figure.axes:
        if not axes.get_visible():
            continue
        across, up = _available_space(figure, axes)
        for text, upright in ((axes.title, False), (axes.xaxis.label, False), (axes.yaxis.label, True)):
            extent = text.get_window_extent()
            length, available = (extent.height, up) if upright else (extent.width, across)
            if text.get_text() and length > _FIT_SHARE * available:
                lines = text.get_text().split("\n")
                most = max(8, int(max(map(len, lines)) * _FIT_SHARE * available / length))
                text.set_text("\n".join(piece for line in lines for piece in _break_line(line, most)))


def _available_space(figure: Figure, axes: Axes) -> tuple[float, float]:
    """Return the width for titles and the height for upright labels of a drawn panel or colour bar, in pixels."""
    whole, box = figure.bbox, axes.get_window_extent()
    middle = (box.x0 + box.x1) / 2
    # a text is centred on the panel, so the nearer edge of the figure limits its width
    across, up = 2 * min(middle, whole.width - middle), whole.height
    cell = axes.get_subplotspec()
    if cell is None:  # a colour bar
        return across, up
    shown = [other for other in figure.axes if other.get_subplotspec() is not None and other.get_visible()]
    centres = sorted((x.x0 + x.x1) / 2 for x in (other.get_window_extent() for other in shown))
    # next to a colour bar, panels are closer to each other than their cells
    spacing = min((b - a for a, b in pairwise(centres) if b - a > 1), default=whole.width)
    bars = [other.get_window_extent().x0 for other in figure.axes if other.get_subplotspec() is None]
    across = min(spacing * len(cell.colspan), across, *(2 * (x - middle) for x in bars if x > middle))
    return across, up * len(cell.rowspan) / cell.get_gridspec().nrows


def _break_line(line: str, most: int) -> list[str]:
    """Break a line of more than ``most`` characters at spaces and after the punctuation of a spec."""
    marked = re.sub(r"([,:](?=[^\s\d])|[=_|](?=\S))", "\\1\x1f ", line)
    # "\x1f " marks a place in a spec where the line may be broken
    pieces = textwrap.wrap(marked, most, break_long_words=False, break_on_hyphens=False)
    return [piece.replace("\x1f ", "").removesuffix("\x1f") for piece in pieces] or [""]


def _wrap(text: str, inches: float, size: float) -> str:
    most = max(12, int(inches * 72 / (_CHARACTER_WIDTH * size)))
    lines = (_break_line(line, most) for line in text.split("\n"))
    return "\n".join("\n".join(line) for line in lines)


def mark_training(axes: Axes, length: int, named: bool = True) -> None:
    """Draw a dashed line at the training length in tokens, with a label if ``named``."""
    axes.axvline(length, color="0.5", linestyle=(0, (4, 2)), linewidth=1, zorder=0, label="_training")
    if not named:
        return
    transform = offset_copy(axes.get_xaxis_transform(), axes.figure, x=2, y=-3, units="points")
    options: dict[str, Any] = {"rotation": 90, "fontsize": TICK - 1, "color": "0.35"}
    axes.text(length, 1, f"trained at {length}", transform=transform, verticalalignment="top", **options)


def set_length_axis(axes: Axes, lengths: Sequence[int], most: int = 9) -> None:
    """Make the x axis logarithmic, with a tick at each length in tokens and labels at no more than ``most`` of them.

    With more than 64 lengths, only those with a label have a tick.
    """
    if len(lengths) > _MAX_TICKS:
        lengths = log_spaced(lengths, most)
    every = -(-len(lengths) // most)
    # counted from the longest, which always has a label
    labels = [str(n) if not (len(lengths) - 1 - k) % every else "" for k, n in enumerate(lengths)]
    axes.set_xscale("log", base=2)
    axes.set_xticks(lengths, labels)
    axes.xaxis.set_minor_locator(NullLocator())


def set_decade_axis(axes: Axes, along: str = "y", narrow: bool = False) -> None:
    """Make an axis logarithmic, with plain numbers at 1, 2 and 5 times each power of ten.

    Args:
        axes: panel whose axis is set.
        along: axis to set, ``x`` or ``y``.
        narrow: whether the axis spans little more than one power of ten, and has more numbers.
    """
    axes.set(**{f"{along}scale": "log"})
    axis = axes.yaxis if along == "y" else axes.xaxis
    axis.set_major_locator(LogLocator(subs=(1, 1.5, 2, 3, 4, 5, 7) if narrow else (1, 2, 5)))
    axis.set_major_formatter(StrMethodFormatter("{x:g}"))
    axis.set_minor_locator(NullLocator())


def shorten_patterns(labels: Iterable[str]) -> dict[str, str]:
    """Return the text to show for each label: long patterns of layers without options, if they then still differ.

    >>> shorten_patterns(["3*rope:base=500000,local=128|nope:query_scale=ssmax", "alibi"])
    {'3*rope:base=500000,local=128|nope:query_scale=ssmax': '3*rope+…|nope+…', 'alibi': 'alibi'}
    """
    shown = {
        label: re.sub(r":[^|\s]*", "+…", label) if len(label) > _LONGEST_PATTERN and is_pattern(label) else label
        for label in labels
    }
    texts = list(shown.values())
    return {label: text if texts.count(text) == 1 else label for label, text in shown.items()}


def add_legend(figure: Figure, loc: str = "outside lower center", ncols: int = 1, **options: Any) -> None:
    """Add one legend for all panels, by default below them, in as many columns up to ``ncols`` as fit."""
    for columns in range(ncols, 0, -1):
        legend = figure.legend(loc=loc, **{**_LEGEND_OPTIONS, **options, "ncols": columns})
        shown = shorten_patterns([text.get_text() for text in legend.get_texts()])
        for text in legend.get_texts():
            text.set_text(shown[text.get_text()])
        available = figure.bbox.width / legend.get_window_extent().width
        if available >= 1:
            return
        if columns > 1:
            legend.remove()
    # the sample of a line is about six letters wide
    most = max(12, int(available * max(len(text.get_text()) for text in legend.get_texts())) - 6)
    for text in legend.get_texts():
        text.set_text(textwrap.fill(text.get_text(), most, break_long_words=False, break_on_hyphens=False))


def add_legend_of(figure: Figure, axes: Axes, ncols: int = 3) -> None:
    """Add one legend for all panels, with the lines of ``axes``."""
    add_legend(figure, handles=axes.get_legend_handles_labels()[0], ncols=ncols)


class LineEnd(NamedTuple):
    """The end of a line, which gets a label.

    Attributes:
        name: text of the label.
        x: x of the last point, in data coordinates.
        y: y of the last point, in data coordinates.
        colour: colour of the line.
    """

    name: str
    x: float
    y: float
    colour: str


def label_line_ends(figure: Figure, ends: Mapping[Axes, Sequence[LineEnd]]) -> None:
    """Label lines at their ends, to the right of the panels, instead of with a legend; labels do not overlap.

    A thin line connects the end and its label. A triangle marks an end above or below the panel. Call this last: later
    changes of heights or limits of the panels move the ends but not the labels.

    Args:
        figure: figure that has all the panels.
        ends: panel -> ends of its lines.
    """
    fit_texts(figure)
    figure.draw_without_rendering()
    shown = shorten_patterns([end.name for line_ends in ends.values() for end in line_ends])
    for axes, line_ends in ends.items():
        height = axes.get_window_extent().height * 72 / figure.dpi
        # heights in the panel, from 0 to 1
        to_axes = axes.transAxes.inverted()
        heights = [to_axes.transform(axes.transData.transform((end.x, end.y)))[1] for end in line_ends]
        # sorted before clipping, so that two ends beyond the same edge keep their order
        order = sorted(range(len(line_ends)), key=heights.__getitem__)
        label_heights = spread_labels(
            [min(1.0, max(0.0, heights[k])) for k in order], _LINE_SPACING * LINE_LABEL / height
        )
        label_transform = offset_copy(axes.transAxes, figure, x=_LABEL_DISTANCE, units="points")
        for k, y in zip(order, label_heights, strict=True):
            end, inside = line_ends[k], 0.0 <= heights[k] <= 1.0
            lead = {"arrowstyle": "-", "color": end.colour, "linewidth": 0.8, "shrinkA": 0.0, "shrinkB": 2.0}
            axes.annotate(
                shown[end.name],
                (end.x, end.y) if inside else (1.0, y),
                xycoords="data" if inside else "axes fraction",
                xytext=(1.0, y),
                textcoords=label_transform,
                fontsize=LINE_LABEL,
                verticalalignment="center",
                annotation_clip=False,
                arrowprops={**lead, "relpos": (0.0, 0.5)} if inside else None,
            )
            if not inside:
                mark = {"marker": "^" if heights[k] > 1.0 else "v", "markersize": 5, "linestyle": "none"}
                mark_transform = offset_copy(axes.transAxes, figure, x=_LABEL_DISTANCE - 6.0, units="points")
                axes.plot(1.0, y, **mark, color=end.colour, transform=mark_transform, clip_on=False, label="_beyond")


def spread_labels(heights: Sequence[float], spacing: float) -> list[float]:
    """Return increasing heights at least ``spacing`` apart that are closest to ``heights`` in least squares.

    This is isotonic regression of height - k·spacing, by pooling adjacent violators. The result is within [0, 1] if
    there is enough space.

    Args:
        heights: increasing preferred heights.
        spacing: smallest difference of neighbours, in the unit of ``heights``.

    >>> spread_labels([0.5, 0.5, 1.0], 0.25)
    [0.375, 0.625, 1.0]
    """
    pools: list[list[float]] = []
    for k, height in enumerate(heights):
        pools.append([height - k * spacing])
        while len(pools) > 1 and _mean(pools[-2]) > _mean(pools[-1]):
            last = pools.pop()
            pools[-1] += last
    level = [_mean(pool) for pool in pools for _ in pool]
    available = max(0.0, 1.0 - spacing * (len(level) - 1))
    return [min(max(value, 0.0), available) + k * spacing for k, value in enumerate(level)]


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)


def save(figure: Figure, *paths: Path, dpi: int = 160) -> None:
    """Write a figure to each path, in the format of its suffix; equal figures give equal bytes.

    PDFs embed fonts as TrueType (type 42): submission systems of conferences refuse matplotlib's default, type 3.

    Args:
        figure: finished figure.
        paths: output files; their suffixes are formats of matplotlib.
        dpi: resolution of bitmaps in dots per inch.
    """
    fit_texts(figure)
    for path in paths:
        with rc_context({"pdf.fonttype": 42}):
            write_via_temporary(path, partial(_write_figure, figure, dpi, path.suffix.lower()[1:]))


def _write_figure(figure: Figure, dpi: int, format: str, target: Path) -> None:
    """Write a figure via memory: on a full disk, matplotlib's PDF writer would raise an unrelated error."""
    out = io.BytesIO()
    figure.savefig(out, dpi=dpi, format=format, metadata={"CreationDate": None} if format == "pdf" else None)
    target.write_bytes(out.getvalue())


def to_svg(figure: Figure) -> bytes:
    """Return the figure as a reproducible SVG that needs no fonts."""
    out = io.BytesIO()
    with rc_context({"svg.fonttype": "path", "svg.hashsalt": "fairseq_rpe"}):
        figure.savefig(out, format="svg", metadata={"Date": None}, transparent=True)
    return out.getvalue()
