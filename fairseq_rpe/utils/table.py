"""One table, four renderings: CSV for programs, Markdown for people, LaTeX for papers, HTML in the page's template."""

import csv
import io
import re
from bisect import bisect_left
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar

from tabulate import LATEX_ESCAPE_RULES, tabulate

# what pdflatex has no letter for
_LATEX_SIGNS = {
    **{"α": r"$\alpha$", "β": r"$\beta$", "γ": r"$\gamma$", "δ": r"$\delta$", "ζ": r"$\zeta$", "θ": r"$\theta$"},
    **{"λ": r"$\lambda$", "π": r"$\pi$", "σ": r"$\sigma$", "ψ": r"$\psi$", "Σ": r"$\Sigma$", "Δ": r"$\Delta$"},
    **{"ε": r"$\varepsilon$", "−": "$-$", "×": r"$\times$", "·": r"$\cdot$", "≤": r"$\leq$", "≥": r"$\geq$"},
    **{"≈": r"$\approx$", "∞": r"$\infty$", "‖": r"$\Vert$", "√": r"$\surd$", "★": r"$\star$", "∑": r"$\Sigma$"},
    **{"…": r"\ldots{}", "–": "--", "—": "---", "’": "'", "“": "``", "”": "''", "→": r"$\rightarrow$"},
}
# marks of private use around bold and small text, which escaping leaves alone
_BOLD, _LEFT, _RIGHT, _BELOW, _END = "\ue000", "\ue001", "\ue002", "\ue003", "\ue004"
_MARKS = {_BOLD: r"\textbf{", _LEFT: r"\shortstack[l]{", _RIGHT: r"\shortstack[r]{"}
_MARKS |= {_BELOW: r"\\ \scriptsize ", _END: "}"}


@dataclass(frozen=True)
class Cell:
    """What a table shows; ``value`` is the exact number behind it, which CSV has; ``note`` stands small beside it."""

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
    """A table with a caption; ``head`` names the column of the rows' names, then those of their cells.

    ``words``: its cells are text, not numbers. ``folded``: the page shows it when asked for. ``groups``: what stands
    above each pair of columns after the first. ``starred``: which of a column its best cells are, where any are marked.
    """

    kind: ClassVar[str] = "table"
    caption: str
    head: list[str]
    rows: list[Row]
    words: bool = False
    folded: bool = False
    groups: Sequence[str] = ()
    starred: str = ""

    def markdown(self) -> str:
        """The head and the rows; the names to the left, numbers to the right."""
        sides = ["left", *["left" if self.words else "right"] * (len(self.head) - 1)]
        lines = [[row.name, *(cell.text for cell in row.cells)] for row in self.rows]
        return tabulate(lines, self.head, tablefmt="pipe", colalign=sides, disable_numparse=True) + "\n"

    def latex(self) -> str:
        """The table with its caption as a ``table`` environment with the rules of the package booktabs.

        The best cells are bold, notes small below them, signs such as Σ and ε in math mode.
        """
        sides = ["left", *["left" if self.words else "right"] * (len(self.head) - 1)]
        lines = [[_noted(row.name, row.note, _LEFT), *map(_latex_cell, row.cells)] for row in self.rows]
        body = tabulate(lines, self.head, tablefmt="latex_booktabs", colalign=sides, disable_numparse=True)
        if self.groups:
            titles = "".join(rf" & \multicolumn{{2}}{{c}}{{{_latex_text(title)}}}" for title in self.groups)
            body = body.replace("\\toprule\n", f"\\toprule\n{titles} \\\\\n", 1)
        starred = f" Bold: {self.starred} of its column." if self.starred else ""
        caption = _latex_signs(_latex_text(self.caption + starred))
        return "\n".join(
            (r"\begin{table}", r"\centering", rf"\caption{{{caption}}}", _latex_signs(body), r"\end{table}", "")
        )

    def csv(self) -> str:
        """The head and the rows, with the exact values where there are any."""
        rows = ([row.name, *(c.text if c.value is None else c.value for c in row.cells)] for row in self.rows)
        return csv_text(self.head, rows)


def latex_text(tables: Iterable[Table]) -> str:
    """Tables one after another, as a file that a paper includes with ``\\input``."""
    return "\n".join(["% in the preamble: \\usepackage{booktabs}", *(table.latex() for table in tables)])


def _latex_cell(cell: Cell) -> str:
    text = f"{_BOLD}{cell.text}{_END}" if cell.best else cell.text
    return _noted(text, cell.note, _RIGHT)


def _noted(text: str, note: str, side: str) -> str:
    return f"{side}{text}{_BELOW}{note}{_END}" if note else text


def _latex_text(text: str) -> str:
    return "".join(LATEX_ESCAPE_RULES.get(letter, letter) for letter in text)


def _latex_signs(text: str) -> str:
    """Escaped text with its marks and signs as LaTeX has them, and a minus before a number."""
    text = re.sub(r"(?<![\w.)\-])-(?=\d)", "$-$", text)
    return "".join(_MARKS.get(letter, _LATEX_SIGNS.get(letter, letter)) for letter in text)


def stacked(tables: Mapping[str, Table], name: str) -> Table:
    """Tables of one head as one: what each is of in a first column ``name``."""
    first = next(iter(tables.values()))
    rows = [Row(key, [Cell(row.name), *row.cells]) for key, table in tables.items() for row in table.rows]
    return Table(first.caption, [name, *first.head], rows, first.words)


def csv_text(head: Sequence[str], rows: Iterable[Iterable[Any]]) -> str:
    """CSV with line feeds; nothing for ``None``."""
    out = io.StringIO()
    writer = csv.writer(out, lineterminator="\n")
    writer.writerow(head)
    writer.writerows(rows)
    return out.getvalue()


def spaced(values: Sequence[int], most: int) -> list[int]:
    """At most ``most`` of ``values``, the first and the last among them, evenly spaced on a logarithmic scale.

    >>> spaced(range(1, 1001), 4)
    [1, 10, 100, 1000]

    Args:
        values: rising whole numbers above 0.
        most: how many to choose, at least 2.

    Returns:
        The chosen ones, rising; all of them if they are no more than ``most``.
    """
    if len(values) <= most:
        return list(values)
    first, ratio = values[0], values[-1] / values[0]
    chosen = {bisect_left(values, round(first * ratio ** (k / (most - 1)))) for k in range(most)}
    return [values[k] for k in sorted(chosen | {len(values) - 1}) if k < len(values)]


def spread(mean: float | None, form: str, seeds: Sequence[float], best: float | None = None) -> Cell:
    """The mean over seeds, of several followed by the least and the largest: 0.98 (0.97 to 0.99)."""
    cell = number(mean, form, best)
    if mean is None or len(seeds) < 2:
        return cell
    return replace(cell, text=f"{cell.text} ({rounded(min(seeds), form)} to {rounded(max(seeds), form)})")


def number(value: float | None, form: str, best: float | None = None, note: str = "") -> Cell:
    """A number in a table, marked if it is the ``best`` one; an empty cell for none."""
    if value is None:
        return Cell("")
    return Cell(rounded(value, form), value, best is not None and value == best, note)


def rounded(value: float, form: str) -> str:
    """A number as ``form`` writes it, without the minus of a negative one that is rounded to zero.

    >>> rounded(-0.0004, ".3f"), rounded(-0.0006, ".3f")
    ('0.000', '-0.001')
    """
    text = format(value, form)
    return text if re.search("[1-9a-z]", text) else text.removeprefix("-")


def words(value: object) -> Cell:
    """A text in a table."""
    return Cell("" if value is None else str(value))


def least(values: Sequence[float | None]) -> float | None:
    """The best of a column of perplexities."""
    return min((v for v in values if v is not None), default=None)
