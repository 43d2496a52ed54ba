"""Turns the CSV of ``attention_biases.py`` into Markdown tables and a figure."""

from __future__ import annotations

import csv
import textwrap
from pathlib import Path
from typing import Any, NamedTuple

from fairseq_rpe.attention import BACKENDS
from fairseq_rpe.core import UserError
from fairseq_rpe.figures.style import assign_looks, save
from fairseq_rpe.figures.timing import Rows as FigureRows
from fairseq_rpe.figures.timing import draw_side_by_side
from fairseq_rpe.utils.table import Table, TableRow, text_cell


class Quantity(NamedTuple):
    """What is measured: its name, the columns of its ratio and of its value, and the unit of the value."""

    name: str
    ratio_column: str
    value_column: str
    unit: str


QUANTITIES = (Quantity("time", "ratio", "ms", "milliseconds"), Quantity("peak memory", "peak_ratio", "peak_mib", "MiB"))
Rows = list[dict[str, Any]]
Pair = tuple[str, str]  # bias and implementation


def read(path: Path) -> tuple[str, Rows]:
    """Return the description in the first line of a CSV file, and the rows.

    Raises:
        UserError: the file does not exist or has no rows.
    """
    if not path.is_file():
        raise UserError(f"there is no {path}: run benchmarks/attention_biases.py first")
    first, *lines = path.read_text().splitlines()
    rows = list(csv.DictReader(lines))
    if not rows:
        raise UserError(f"{path} has no results: run benchmarks/attention_biases.py --fresh")
    return first.removeprefix("# "), rows


def markdown(path: Path) -> str:
    """Return a table for each pass and quantity: attention without a bias, then multiples of it."""
    description, rows = read(path)
    blocks = [description]
    for direction in _unique(rows, "pass"):
        pass_rows = [r for r in rows if r["pass"] == direction]
        blocks += [_table(pass_rows, direction, quantity).to_markdown() for quantity in QUANTITIES]
    return "\n\n".join(block.strip() for block in blocks)


def _table(rows: Rows, direction: str, quantity: Quantity) -> Table:
    """Return the table of one pass (``direction``) and quantity."""
    lengths = sorted({int(r["length"]) for r in rows})
    title = f"{direction}, {quantity.name}"
    table = Table(title, [title, "", *map(str, lengths)], [])
    pairs = _pairs(rows)
    for pair in pairs:
        bias, implementation = pair
        by_length = {int(r["length"]): r for r in rows if _pair(r) == pair}
        label = _label(implementation)
        column = quantity.ratio_column
        if pair == pairs[0]:  # attention without a bias
            label, column = f"{implementation}, {quantity.unit}", quantity.value_column
        name = bias if bias == "none" else f"{bias}, {by_length[min(by_length)]['encoding']}"
        values = [_format(by_length.get(n, {}).get(column)) for n in lengths]
        table.rows.append(TableRow(name, [*map(text_cell, [label, *values])]))
    return table


def draw(path: Path, figure_path: Path) -> None:
    """Draw multiples of attention without a bias over length, one panel per bias, both axes logarithmic."""
    description, rows = read(path)
    baseline = _pairs(rows)[0]
    colours = {r["encoding"]: look.colour for r in rows for look in assign_looks([r["encoding"].split()[0]]).values()}
    panels: FigureRows = {}
    for quantity in QUANTITIES:
        for direction in _unique(rows, "pass"):
            panel = panels.setdefault(f"{quantity.name}\n{direction}", {})
            for r in rows:
                if r["pass"] == direction and _pair(r) != baseline:
                    title = f"{r['bias']}\n{textwrap.fill(r['encoding'], 16)}", r["encoding"]
                    points = panel.setdefault(title, {}).setdefault(_label(r["implementation"]), [])
                    points.append((int(r["length"]), float(r[quantity.ratio_column])))
    save(draw_side_by_side(panels, colours, description), figure_path)


def _unique(rows: Rows, column: str) -> list[str]:
    return list(dict.fromkeys(r[column] for r in rows))


def _pair(row: dict[str, Any]) -> Pair:
    return row["bias"], row["implementation"]


def _pairs(rows: Rows) -> list[Pair]:
    return list(dict.fromkeys(map(_pair, rows)))


def _label(implementation: str) -> str:
    return f"here: {implementation}" if implementation in BACKENDS else implementation


def _format(value: str | None) -> str:
    """Return a number with three digits; more would be noise."""
    return "" if value is None else f"{float(value):.2f}" if float(value) < 100 else f"{float(value):.0f}"
