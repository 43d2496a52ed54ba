"""Reports as one self-contained HTML page: what it is made of, and how it is written."""

from __future__ import annotations

import base64
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from fairseq_rpe import __version__
from fairseq_rpe.core.files import atomic_write

if TYPE_CHECKING:
    from matplotlib.figure import Figure

TEMPLATES = Path(__file__).resolve().parents[1] / "templates"
NOT_RECORDED = "not recorded"


@dataclass(frozen=True)
class Cell:
    """What a table shows; ``value`` is the exact number behind it, ``note`` stands small beside it."""

    text: str
    value: float | int | str | None = None
    best: bool = False
    note: str = ""


@dataclass(frozen=True)
class Row:
    """One line; ``note`` stands small below its name."""

    name: str
    cells: list[Cell]
    note: str = ""


@dataclass(frozen=True)
class Table:
    """A table with a caption.

    ``words``: its cells are text, not numbers. ``folded``: shown when asked for. ``groups``: what stands above each
    pair of columns after the first.
    """

    kind: ClassVar[str] = "table"
    caption: str
    head: list[str]
    rows: list[Row]
    words: bool = False
    folded: bool = False
    groups: Sequence[str] = ()


@dataclass(frozen=True)
class Text:
    """A paragraph; ``url`` is linked behind ``link``; ``plain_warning`` sets it off as a caution."""

    kind: ClassVar[str] = "text"
    text: str
    link: str = ""
    url: str = ""
    plain_warning: bool = False


@dataclass(frozen=True)
class Picture:
    """A figure as SVG; ``alt`` says in words what it shows."""

    kind: ClassVar[str] = "picture"
    source: str
    alt: str
    caption: str


@dataclass(frozen=True)
class Commands:
    """Command lines by run: (run, [(stage, line)])."""

    kind: ClassVar[str] = "commands"
    runs: list[tuple[str, list[tuple[str, str]]]]


Block = Table | Text | Picture | Commands


@dataclass(frozen=True)
class Part:
    """A chapter on a sweep."""

    key: str
    title: str
    blocks: list[Block]


@dataclass(frozen=True)
class Section:
    """Everything that a page says about one sweep; parts without blocks are left out."""

    name: str
    title: str
    lead: list[str]
    facts: list[tuple[str, str]]
    parts: list[Part] = field(default_factory=list)


def picture(figure: Figure, alt: str, caption: str) -> Picture:
    """A figure as a block."""
    from fairseq_rpe.cli.figure import to_svg

    data = base64.b64encode(to_svg(figure)).decode("ascii")
    return Picture(f"data:image/svg+xml;base64,{data}", alt, caption)


def least(values: Sequence[float | None]) -> float | None:
    """The best of a column of perplexities."""
    return min((v for v in values if v is not None), default=None)


def number(value: float | None, form: str, best: float | None = None, note: str = "") -> Cell:
    """A number in a table, marked if it is the ``best`` one; an empty cell for none."""
    if value is None:
        return Cell("")
    return Cell(format(value, form), value, best is not None and value == best, note)


def words(value: Any) -> Cell:
    """A text in a table."""
    return Cell("" if value is None else str(value))


def render(sections: Sequence[Section]) -> str:
    """The page on one sweep or several, one after another."""
    from jinja2 import Environment, FileSystemLoader, StrictUndefined

    environment = Environment(
        loader=FileSystemLoader(TEMPLATES),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    return environment.get_template("report.html.jinja").render(sections=sections, version=__version__)


def write(sections: Sequence[Section], path: Path) -> None:
    """Write the page."""
    atomic_write(path, render(sections))
