"""Reports as one self-contained HTML page: what it is made of, how it is written, and the same as Markdown."""

import base64
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import ClassVar

from jinja2 import Environment, FileSystemLoader, StrictUndefined
from matplotlib.figure import Figure

from fairseq_rpe import __version__
from fairseq_rpe.core.errors import UserError, shown
from fairseq_rpe.figures.style import to_svg
from fairseq_rpe.utils.files import PACKAGE, atomic_write
from fairseq_rpe.utils.table import Table

NOT_RECORDED = "not recorded"
_GENERATOR = '<meta name="generator" content="fairseq_rpe '  # near the beginning of every page
_MOST_ROWS = 5000  # of a table on a page


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
    blocks: Sequence[Block]


@dataclass(frozen=True)
class Section:
    """Everything that a page says about one sweep; ``text``: what is printed."""

    name: str
    title: str
    lead: list[str]
    facts: list[tuple[str, str]]
    parts: list[Part]
    text: str


@dataclass(frozen=True)
class Findings:
    """What a sweep found: for the page, as Markdown, and the figure that stands beside the page.

    ``every``: makes the table of every measurement. ``others``: by name, the figures on further texts.
    """

    lead: list[str]
    parts: list[Part]
    every: Callable[[], Table]
    markdown: str
    figure: Figure
    others: Mapping[str, Figure] = field(default_factory=dict)


def measurements(count: int, every: Callable[[], Table], results: str) -> Part:
    """The chapter with every measurement; where they are too many for a page, it names their files instead.

    Args:
        count: of the measurements.
        every: makes the table with a row for each of them.
        results: the name of the CSV file that has them.

    Returns:
        The last chapter of a section.
    """
    too_many = (
        f"{results} has all {count:,} measurements, and the eval.jsonl of each run what each of them took. The page "
        f"shows no more than {_MOST_ROWS:,}."
    )
    return Part("measurements", "Every measurement", [Text(too_many) if count > _MOST_ROWS else every()])


def picture(figure: Figure, alt: str, caption: str) -> Picture:
    """A figure as a block."""
    data = base64.b64encode(to_svg(figure)).decode("ascii")
    return Picture(f"data:image/svg+xml;base64,{data}", alt, caption)


def markdown(blocks: Sequence[Block]) -> str:
    """The paragraphs and tables among blocks, each after an empty line."""
    found = ""
    for block in blocks:
        if isinstance(block, Table):
            found += f"\n{block.caption}\n\n{block.markdown()}"
        elif isinstance(block, Text):
            found += f"\n{block.text}{f' {block.link}.' if block.link else ''}\n"
    return found


def check_target(flag: str, path: Path) -> None:
    """Refuse to replace a file that is no page of this command; an empty one holds nothing to lose.

    Args:
        flag: the option that names the file, for the message.
        path: it need not exist.

    Raises:
        UserError: the file exists and is something else.
    """
    if not path.is_file():
        return
    with open(path, "rb") as file:
        begin = file.read(1 << 14)
    if begin and _GENERATOR.encode() not in begin:
        raise UserError(f"{flag} {shown(path)} is not a page of this command and would be replaced: name another file")


def tables(parts: Sequence[Part]) -> list[Table]:
    """The tables of chapters, one after another."""
    return [block for part in parts for block in part.blocks if isinstance(block, Table)]


def write(sections: Sequence[Section], path: Path) -> None:
    """Write the page on one sweep or several, one after another."""
    environment = Environment(
        loader=FileSystemLoader(PACKAGE / "templates"),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    template = environment.get_template("report.html.jinja")
    atomic_write(path, template.render(sections=sections, version=__version__))
