"""Results on standard output as they come: rows of a table, or with ``--json`` one JSON line each."""

import argparse
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from fairseq_rpe.utils.table import rounded


@dataclass(frozen=True)
class Column:
    """A column of a table of results; ``text`` gives its cell of a result, at most ``width`` characters as a rule."""

    head: str
    width: int
    text: Callable[[Any], str]
    left: bool = False

    def padded(self, text: str) -> str:
        return text.ljust(self.width) if self.left else text.rjust(self.width)


def add_json(parser: argparse.ArgumentParser) -> None:
    """The option ``--json``, in commands that print results."""
    parser.add_argument("--json", action="store_true", help="print one JSON line per result instead of a table")


class ResultPrinter:
    """Prints each result in a line, below a head.

    Args:
        columns: of the table.
        as_json: print the records as JSON lines instead, with all that they hold.
        say: prints a line.
    """

    def __init__(self, columns: Sequence[Column], as_json: bool, say: Callable[[str], None] | None = None) -> None:
        self.columns, self.as_json = tuple(columns), as_json
        self._say = say or (lambda line: print(line, flush=True))
        self._begun = False

    def add(self, result: Any) -> None:
        """Print a record of results."""
        if self.as_json:
            self._say(json.dumps(result.record()))
            return
        if not self._begun:
            self._begun = True
            self._line([column.head for column in self.columns])
        self._line([column.text(result) for column in self.columns])

    def _line(self, cells: Sequence[str]) -> None:
        padded = (column.padded(cell) for column, cell in zip(self.columns, cells, strict=True))
        self._say("  ".join(padded).rstrip())


def decimals(value: float | None, digits: int = 2) -> str:
    """A number for a narrow column: with thousands separated, in powers of ten where it is very large; "" for none."""
    if value is None:
        return ""
    return rounded(value, f",.{digits}f" if abs(value) < 1e7 else f".{digits}e")


def seconds(result: Any) -> str:
    return decimals(result.seconds, 1)
