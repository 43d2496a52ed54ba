"""Prints results as soon as they are measured: rows of a table, or one JSON line each with ``--json``."""

import argparse
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from fairseq_rpe.utils.table import format_number

# Long text for comparisons by programs: in the files of results, not in printed lines.
_UNPRINTED = ("segments",)


@dataclass(frozen=True)
class Column:
    """A column of a table of results.

    Attributes:
        head: title of the column.
        width: characters of most cells.
        text: returns the cell of a result.
        left: align cells to the left.
    """

    head: str
    width: int
    text: Callable[[Any], str]
    left: bool = False

    def pad(self, text: str) -> str:
        """Return the text of a cell, padded to the width of the column."""
        return text.ljust(self.width) if self.left else text.rjust(self.width)


def add_json(parser: argparse.ArgumentParser) -> None:
    """Add ``--json``."""
    parser.add_argument("--json", action="store_true", help="print one JSON line per result instead of a table")


class ResultPrinter:
    """Prints one line per result, below a line of column titles.

    Args:
        columns: columns of the table.
        as_json: print records as JSON lines instead, without the losses by segment.
        print_line: prints a line; None: ``print``.
    """

    def __init__(
        self, columns: Sequence[Column], as_json: bool, print_line: Callable[[str], None] | None = None
    ) -> None:
        self.columns, self.as_json = tuple(columns), as_json
        self._print_line = print_line or (lambda line: print(line, flush=True))
        self._has_head = False

    def add(self, result: Any) -> None:
        """Print one result."""
        if self.as_json:
            values = result.to_json()
            self._print_line(json.dumps({key: values[key] for key in values if key not in _UNPRINTED}))
            return
        if not self._has_head:
            self._has_head = True
            self._print_cells([column.head for column in self.columns])
        self._print_cells([column.text(result) for column in self.columns])

    def _print_cells(self, cells: Sequence[str]) -> None:
        padded = (column.pad(cell) for column, cell in zip(self.columns, cells, strict=True))
        self._print_line("  ".join(padded).rstrip())


def decimals(value: float | None, digits: int = 2) -> str:
    """Return a number for a narrow column, with thousands separators, in powers of ten from 1e7 on; "" for None."""
    if value is None:
        return ""
    return format_number(value, f",.{digits}f" if abs(value) < 1e7 else f".{digits}e")


def seconds(result: Any) -> str:
    """Return the seconds of a result with one decimal."""
    return decimals(result.seconds, 1)
