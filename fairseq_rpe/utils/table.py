"""Tables and their renderings as CSV, Markdown and LaTeX; the template of a report renders them as HTML."""

import csv
import io
import re
from bisect import bisect_left
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar

from tabulate import LATEX_ESCAPE_RULES, tabulate

# characters that pdflatex lacks
_LATEX_SIGNS = {
    **{"α": r"$\alpha$", "β": r"$\beta$", "γ": r"$\gamma$", "δ": r"$\delta$", "ζ": r"$\zeta$", "θ": r"$\theta$"},
    **{"λ": r"$\lambda$", "π": r"$\pi$", "σ": r"$\sigma$", "ψ": r"$\psi$", "Σ": r"$\Sigma$", "Δ": r"$\Delta$"},
    **{"ε": r"$\varepsilon$", "−": "$-$", "×": r"$\times$", "·": r"$\cdot$", "≤": r"$\leq$", "≥": r"$\geq$"},
    **{"≈": r"$\approx$", "∞": r"$\infty$", "‖": r"$\Vert$", "√": r"$\surd$", "★": r"$\star$", "∑": r"$\Sigma$"},
    **{"±": r"$\pm$", "|": r"\textbar{}"},  # pdflatex prints a dash instead
    **{"…": r"\ldots{}", "–": "--", "—": "---", "’": "'", "“": "``", "”": "''", "→": r"$\rightarrow$"},
}
# Private-use characters that stand for LaTeX commands. tabulate would escape commands but keeps these characters, and
# `_latex_signs` replaces them afterwards.
_BOLD, _LEFT_STACK, _RIGHT_STACK, _NOTE_BELOW, _END = "\ue000", "\ue001", "\ue002", "\ue003", "\ue004"
_COMMANDS = {
    _BOLD: r"\textbf{",
    _LEFT_STACK: r"\shortstack[l]{",
    _RIGHT_STACK: r"\shortstack[r]{",
    _NOTE_BELOW: r"\\ \scriptsize ",
    _END: "}",
}


@dataclass(frozen=True)
class Cell:
    """A cell of a table.

    Attributes:
        text: Displayed text.
        value: Exact value, for CSV; None: the text.
        best: Whether it is marked as the best of its column.
        note: Text in small print next to it.
    """

    text: str
    value: float | int | str | None = None
    best: bool = False
    note: str = ""


@dataclass(frozen=True)
class TableRow:
    """A row of a table.

    Attributes:
        name: Text of the first column.
        cells: The other columns.
        note: Text in small print below the name.
    """

    name: str
    cells: list[Cell]
    note: str = ""


@dataclass(frozen=True)
class Table:
    """A table with a caption.

    Attributes:
        caption: The caption.
        header: Titles of the columns, the one of the row names first.
        rows: The rows.
        is_text: Whether the cells are text rather than numbers.
        is_folded: Whether the report shows it collapsed.
        groups: Titles above each pair of columns after the first.
        best_label: What the best cells of a column are, such as "least", if any are marked.
    """

    kind: ClassVar[str] = "table"
    caption: str
    header: list[str]
    rows: list[TableRow]
    is_text: bool = False
    is_folded: bool = False
    groups: Sequence[str] = ()
    best_label: str = ""

    def to_markdown(self) -> str:
        """Return the header and the rows as Markdown, numbers aligned to the right."""
        # a bar, as in a pattern of layers, would end the cell
        header, *lines = (
            [text.replace("|", r"\|") for text in line]
            for line in (self.header, *([row.name, *(cell.text for cell in row.cells)] for row in self.rows))
        )
        return tabulate(lines, header, tablefmt="pipe", colalign=self._alignment(), disable_numparse=True) + "\n"

    def to_latex(self) -> str:
        """Return the table with its caption as a LaTeX ``table`` environment with booktabs rules.

        The best cells are bold, notes are small below them, and characters such as Σ and ε are in math mode.
        """
        lines = [[_add_note(row.name, row.note, _LEFT_STACK), *map(_latex_cell, row.cells)] for row in self.rows]
        body = tabulate(
            lines, self.header, tablefmt="latex_booktabs", colalign=self._alignment(), disable_numparse=True
        )
        if self.groups:
            titles = "".join(rf" & \multicolumn{{2}}{{c}}{{{_latex_text(title)}}}" for title in self.groups)
            body = body.replace("\\toprule\n", f"\\toprule\n{titles} \\\\\n", 1)
        bold = f" Bold: {self.best_label} of its column." if self.best_label else ""
        caption = _latex_signs(_latex_text(self.caption + bold))
        return "\n".join(
            (r"\begin{table}", r"\centering", rf"\caption{{{caption}}}", _latex_signs(body), r"\end{table}", "")
        )

    def _alignment(self) -> list[str]:
        """Return the alignment of each column: row names and text to the left, numbers to the right."""
        return ["left", *["left" if self.is_text else "right"] * (len(self.header) - 1)]

    def to_csv(self) -> str:
        """Return the header and the rows as CSV, with exact values where there are any."""
        rows = ([row.name, *(c.text if c.value is None else c.value for c in row.cells)] for row in self.rows)
        return csv_text(self.header, rows)


def join_latex(tables: Iterable[Table]) -> str:
    r"""Return the tables as one LaTeX file, which a paper includes with ``\input``."""
    return "\n".join(["% in the preamble: \\usepackage{booktabs}", *(table.to_latex() for table in tables)])


def _latex_cell(cell: Cell) -> str:
    text = f"{_BOLD}{cell.text}{_END}" if cell.best else cell.text
    return _add_note(text, cell.note, _RIGHT_STACK)


def _add_note(text: str, note: str, stack: str) -> str:
    return f"{stack}{text}{_NOTE_BELOW}{note}{_END}" if note else text


def _latex_text(text: str) -> str:
    return "".join(LATEX_ESCAPE_RULES.get(letter, letter) for letter in text)


def _latex_signs(text: str) -> str:
    """Replace marks, special characters and minus signs of numbers in escaped text by LaTeX commands."""
    text = re.sub(r"(?<![\w.)\-])-(?=\d)", "$-$", text)
    return "".join(_COMMANDS.get(letter, _LATEX_SIGNS.get(letter, letter)) for letter in text)


def stack_tables(tables: Mapping[str, Table], name: str) -> Table:
    """Return tables with the same header as one table, whose first column ``name`` has their keys."""
    first = next(iter(tables.values()))
    rows = [TableRow(key, [Cell(row.name), *row.cells]) for key, table in tables.items() for row in table.rows]
    return Table(first.caption, [name, *first.header], rows, first.is_text)


def csv_text(header: Sequence[str], rows: Iterable[Iterable[Any]]) -> str:
    """Return CSV with line feeds; None becomes an empty field."""
    out = io.StringIO()
    writer = csv.writer(out, lineterminator="\n")
    writer.writerow(header)
    writer.writerows(rows)
    return out.getvalue()


def log_spaced(values: Sequence[int], max_count: int) -> list[int]:
    """Choose at most ``max_count`` of ``values``, evenly spaced on a logarithmic scale, with the first and the last.

    >>> log_spaced(range(1, 1001), 4)
    [1, 10, 100, 1000]

    Args:
        values: Ascending integers above 0.
        max_count: Number of values to choose, at least 2.

    Returns:
        The chosen values, ascending; all of them if there are no more than ``max_count``.
    """
    if len(values) <= max_count:
        return list(values)
    first, ratio = values[0], values[-1] / values[0]
    # for each point on the scale, the index of the next value; rounding may put the last point after the last value
    indices = {bisect_left(values, round(first * ratio ** (k / (max_count - 1)))) for k in range(max_count)}
    return [values[index] for index in sorted(indices | {len(values) - 1}) if index < len(values)]


def cell_with_range(mean: float | None, format_spec: str, seeds: Sequence[float], best: float | None = None) -> Cell:
    """Return a cell with the mean over seeds and, for several seeds, the range: 0.98 (0.97 to 0.99).

    Args:
        mean: The mean; None: an empty cell.
        format_spec: Format of the numbers, such as ".2f".
        seeds: Value of each seed.
        best: Best mean of the column; the cell is marked if its mean is this.

    Returns:
        The cell.
    """
    cell = number_cell(mean, format_spec, best)
    if mean is None or len(seeds) < 2:
        return cell
    return replace(
        cell, text=f"{cell.text} ({format_number(min(seeds), format_spec)} to {format_number(max(seeds), format_spec)})"
    )


def number_cell(value: float | None, format_spec: str, best: float | None = None, note: str = "") -> Cell:
    """Return a cell with a number, marked if it equals ``best``; an empty cell for None."""
    if value is None:
        return Cell("")
    return Cell(format_number(value, format_spec), value, best is not None and value == best, note)


def format_number(value: float, format_spec: str) -> str:
    """Format a number without the minus sign of a negative number that is rounded to zero.

    >>> format_number(-0.0004, ".3f"), format_number(-0.0006, ".3f")
    ('0.000', '-0.001')
    """
    text = format(value, format_spec)
    return text if re.search("[1-9a-z]", text) else text.removeprefix("-")


def text_cell(value: object) -> Cell:
    """Return a cell with text; an empty cell for None."""
    return Cell("" if value is None else str(value))


def lowest(values: Sequence[float | None]) -> float | None:
    """Return the smallest of the values that are not None, such as the best perplexity of a column."""
    return min((v for v in values if v is not None), default=None)
