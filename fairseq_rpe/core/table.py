"""One table, three renderings: CSV for programs, Markdown for people, HTML in the page's template."""

import csv
import io
from bisect import bisect_left
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar

from tabulate import tabulate


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

    def csv(self) -> str:
        """The head and the rows, with the exact values where there are any."""
        rows = ([row.name, *(c.text if c.value is None else c.value for c in row.cells)] for row in self.rows)
        return csv_text(self.head, rows)


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
    return replace(cell, text=f"{cell.text} ({min(seeds):{form}} to {max(seeds):{form}})")


def number(value: float | None, form: str, best: float | None = None, note: str = "") -> Cell:
    """A number in a table, marked if it is the ``best`` one; an empty cell for none."""
    if value is None:
        return Cell("")
    return Cell(format(value, form), value, best is not None and value == best, note)


def words(value: object) -> Cell:
    """A text in a table."""
    return Cell("" if value is None else str(value))


def least(values: Sequence[float | None]) -> float | None:
    """The best of a column of perplexities."""
    return min((v for v in values if v is not None), default=None)
