"""Blocks, chapters and sections of reports, and their rendering as one self-contained HTML page and as Markdown."""

import base64
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import ClassVar, Literal

from jinja2 import Environment, FileSystemLoader, StrictUndefined
from matplotlib.figure import Figure

from fairseq_rpe import __version__
from fairseq_rpe.core.errors import UserError, shorten_path
from fairseq_rpe.figures.style import to_svg
from fairseq_rpe.utils.files import PACKAGE_DIR, atomic_write
from fairseq_rpe.utils.table import Table

NOT_RECORDED = "not recorded"
_GENERATOR = '<meta name="generator" content="fairseq_rpe '  # marks pages that this package has written
_HEAD_BYTES = 1 << 14  # the mark is among so many first bytes of a page
_MOST_ROWS = 5000  # upper limit of the rows of a table on a page


@dataclass(frozen=True)
class Text:
    """A paragraph.

    Attributes:
        text: the text.
        link: text of a link after it.
        url: address of the link.
        plain_warning: whether to show the paragraph as a warning.
    """

    kind: ClassVar[str] = "text"
    text: str
    link: str = ""
    url: str = ""
    plain_warning: bool = False


@dataclass(frozen=True)
class Picture:
    """A figure.

    Attributes:
        source: the SVG as a data URL.
        alt: description of the figure in words.
        caption: caption.
    """

    kind: ClassVar[str] = "picture"
    source: str
    alt: str
    caption: str


@dataclass(frozen=True)
class Commands:
    """Command lines by run.

    Attributes:
        runs: name of each run, and its stages with the command line of each.
    """

    kind: ClassVar[str] = "commands"
    runs: list[tuple[str, list[tuple[str, str]]]]


@dataclass(frozen=True)
class Piece:
    """A piece of an example's text.

    Attributes:
        text: the text.
        mark: ``needle`` for words that state the answer, ``wrong`` for a wrong word, ``omitted`` for a note in place of
            words that are left out, or nothing.
    """

    text: str
    mark: Literal["", "needle", "wrong", "omitted"] = ""


@dataclass(frozen=True)
class ExampleRow:
    """An example that a model answered.

    Attributes:
        is_right: whether the answer is right.
        facts: further values, in the order of the header.
        prompt: the shortened prompt.
        answer: the right answer.
        prediction: the answer of the model.
    """

    is_right: bool
    facts: Sequence[str]
    prompt: Sequence[Piece]
    answer: Sequence[Piece]
    prediction: Sequence[Piece]


@dataclass(frozen=True)
class Examples:
    """A folded table of examples that a model answered.

    Attributes:
        summary: what the examples are, shown while the table is folded.
        header: titles of the columns of the facts.
        rows: the examples.
    """

    kind: ClassVar[str] = "examples"
    summary: str
    header: Sequence[str]
    rows: Sequence[ExampleRow]


Block = Table | Text | Picture | Commands | Examples


@dataclass(frozen=True)
class Part:
    """A chapter of a report.

    Attributes:
        key: anchor of the chapter.
        title: title.
        blocks: its tables, paragraphs and figures; a chapter without blocks is left out.
    """

    key: str
    title: str
    blocks: Sequence[Block]


@dataclass(frozen=True)
class Section:
    """Report of one sweep on a page.

    Attributes:
        name: name of the sweep.
        title: title of the recipe.
        lead: first paragraph, then the list of main results.
        facts: name and value of each setting.
        parts: chapters.
        text: summary for the terminal.
    """

    name: str
    title: str
    lead: list[str]
    facts: list[tuple[str, str]]
    parts: list[Part]
    text: str


@dataclass(frozen=True)
class ReportContent:
    """Results of a sweep for the page, as Markdown and as a figure.

    Attributes:
        lead: first paragraph, then the list of main results.
        parts: chapters.
        build_measurements: builds the table of all measurements.
        markdown: tables and paragraphs as Markdown.
        figure: the main figure.
        other_figures: further figures by name.
    """

    lead: list[str]
    parts: list[Part]
    build_measurements: Callable[[], Table]
    markdown: str
    figure: Figure
    other_figures: Mapping[str, Figure] = field(default_factory=dict)


def measurements_part(count: int, build_table: Callable[[], Table], results: str) -> Part:
    """Build the chapter of all measurements, which names their files instead if there are too many for a page.

    Args:
        count: number of measurements.
        build_table: builds the table with a row for each measurement; not called if there are too many.
        results: name of the CSV file of the measurements.

    Returns:
        The chapter.
    """
    too_many = (
        f"{results} has all {count:,} measurements, and the eval.jsonl of each run has their durations. The page shows "
        f"at most {_MOST_ROWS:,}."
    )
    return Part("measurements", "Every measurement", [Text(too_many) if count > _MOST_ROWS else build_table()])


def svg_picture(figure: Figure, alt: str, caption: str) -> Picture:
    """Return a figure as an embedded SVG block.

    Args:
        figure: the figure.
        alt: description of the figure in words.
        caption: caption.
    """
    data = base64.b64encode(to_svg(figure)).decode("ascii")
    return Picture(f"data:image/svg+xml;base64,{data}", alt, caption)


def markdown(blocks: Sequence[Block]) -> str:
    """Return the paragraphs and tables among blocks as Markdown, each after an empty line."""
    text = ""
    for block in blocks:
        if isinstance(block, Table):
            text += f"\n{block.caption}\n\n{block.to_markdown()}"
        elif isinstance(block, Text):
            text += f"\n{block.text}{f' {block.link}.' if block.link else ''}\n"
    return text


def check_page_target(flag: str, path: Path) -> None:
    """Check that an existing output file is a report page or empty, so that no other file is overwritten.

    Args:
        flag: the option that names the file, for the message.
        path: the file; it need not exist.

    Raises:
        UserError: the file exists and is something else.
    """
    if not path.is_file():
        return
    with open(path, "rb") as file:
        begin = file.read(_HEAD_BYTES)
    if begin and _GENERATOR.encode() not in begin:
        raise UserError(
            f"{flag} {shorten_path(path)} is not a page of this command and would be replaced: use another file"
        )


def collect_tables(parts: Sequence[Part]) -> list[Table]:
    """Return the tables of all chapters in order."""
    return [block for chapter in parts for block in chapter.blocks if isinstance(block, Table)]


def write_page(sections: Sequence[Section], path: Path) -> None:
    """Write the HTML page of one or several sweeps."""
    environment = Environment(
        loader=FileSystemLoader(PACKAGE_DIR / "templates"),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    template = environment.get_template("report.html.jinja")
    atomic_write(path, template.render(sections=sections, version=__version__))
