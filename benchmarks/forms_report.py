"""Turns the CSV of ``attention_forms.py`` into Markdown tables and a figure."""

from __future__ import annotations

import csv
import textwrap
from pathlib import Path
from typing import Any

from fairseq_rpe.attention import BACKENDS
from fairseq_rpe.core import UserError
from fairseq_rpe.figures.style import assign_looks, save
from fairseq_rpe.figures.timing import draw_side_by_side
from fairseq_rpe.utils.table import Table, TableRow, text_cell

QUANTITIES = {"ratio": ("time", "ms", "milliseconds"), "peak_ratio": ("peak memory", "peak_mib", "MiB")}
Rows = list[dict[str, Any]]


def read(path: Path) -> tuple[str, Rows]:
    """The first line without its sign, and the rows.

    Raises:
        UserError: there is no such file, or nothing in it.
    """
    if not path.is_file():
        raise UserError(f"there is no {path}: run benchmarks/attention_forms.py first")
    first, *lines = path.read_text().splitlines()
    rows = list(csv.DictReader(lines))
    if not rows:
        raise UserError(f"{path} has no results: run benchmarks/attention_forms.py --fresh")
    return first.removeprefix("# "), rows


def markdown(path: Path) -> str:
    """Return a table per pass and quantity: attention without a bias, then multiples of it."""
    said, rows = read(path)
    parts = [said]
    for kind in _unique(rows, "pass"):
        own = [r for r in rows if r["pass"] == kind]
        lengths = sorted({int(r["length"]) for r in own})
        for ratio, (quantity, value, unit) in QUANTITIES.items():
            table = Table(f"{kind}, {quantity}", [f"{kind}, {quantity}", "", *map(str, lengths)], [])
            for form, way in _pairs(own):
                cells = {int(r["length"]): r for r in own if (r["form"], r["way"]) == (form, way)}
                limit = (form, way) == _pairs(own)[0]
                name = f"{form}, {cells[min(cells)]['encoding']}" if form != "none" else form
                shown = [_short(cells.get(n, {}).get(value if limit else ratio)) for n in lengths]
                table.rows.append(
                    TableRow(name, [*map(text_cell, [f"{way}, {unit}" if limit else _label(way), *shown])])
                )
            parts.append(table.to_markdown())
    return "\n\n".join(part.strip() for part in parts)


def draw(path: Path, figure_path: Path) -> None:
    """Draw multiples of attention without a bias over length, one panel per bias, both axes logarithmic."""
    said, rows = read(path)
    limit = _pairs(rows)[0]
    colours = {r["encoding"]: look.colour for r in rows for look in assign_looks([r["encoding"].split()[0]]).values()}
    drawn: dict[str, dict[tuple[str, str], dict[str, list[tuple[int, float]]]]] = {}
    for ratio, (quantity, _, _) in QUANTITIES.items():
        for kind in _unique(rows, "pass"):
            panel = drawn.setdefault(f"{quantity}\n{kind}", {})
            for r in rows:
                if r["pass"] == kind and (r["form"], r["way"]) != limit:
                    title = f"{r['form']}\n{textwrap.fill(r['encoding'], 16)}", r["encoding"]
                    points = panel.setdefault(title, {}).setdefault(_label(r["way"]), [])
                    points.append((int(r["length"]), float(r[ratio])))
    save(draw_side_by_side(drawn, colours, said), figure_path)


def _unique(rows: Rows, column: str) -> list[str]:
    return list(dict.fromkeys(r[column] for r in rows))


def _pairs(rows: Rows) -> list[tuple[str, str]]:
    return list(dict.fromkeys((r["form"], r["way"]) for r in rows))


def _label(way: str) -> str:
    return f"here: {way}" if way in BACKENDS else way


def _short(value: str | None) -> str:
    """Return a number with three digits; more would be noise."""
    return "" if value is None else f"{float(value):.2f}" if float(value) < 100 else f"{float(value):.0f}"
