"""The CSV of ``attention_forms.py`` as Markdown tables and as a figure."""

from __future__ import annotations

import csv
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import FuncFormatter, LogLocator

from fairseq_rpe.attention import BACKENDS
from fairseq_rpe.core import UserError
from fairseq_rpe.core.table import Row, Table, words
from fairseq_rpe.figures.style import PALETTE

QUANTITIES = {"ratio": ("time", "ms", "milliseconds"), "peak_ratio": ("peak memory", "peak_mib", "MiB")}
LOOKS = ("-", "o"), (":", "s"), ("--", "^"), ("-.", "D"), ((0, (5, 1, 1, 1, 1, 1)), "v"), ((0, (1, 3)), "P")
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
    """A table per pass and quantity: that of attention without a bias, then multiples of it."""
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
                table.rows.append(Row(name, [*map(words, [f"{way}, {unit}" if limit else _label(way), *shown])]))
            parts.append(table.markdown())
    return "\n\n".join(part.strip() for part in parts)


def draw(path: Path, figure_path: Path) -> None:
    """Multiples of attention without a bias over the length, both axes logarithmic: a colour a form, a line a way."""
    said, rows = read(path)
    passes, lengths = _unique(rows, "pass"), sorted({int(r["length"]) for r in rows})
    pairs = [pair for pair in _pairs(rows) if pair != _pairs(rows)[0]]
    forms, ways = dict.fromkeys(f for f, _ in pairs), dict.fromkeys(w for _, w in pairs)
    colours = dict(zip(forms, PALETTE, strict=False))
    looks = dict(zip(ways, LOOKS * 2, strict=False))
    figure = Figure(figsize=(4.6 * len(passes) + 2.6, 8.2), layout="constrained")
    grid = figure.subplots(2, len(passes), squeeze=False, sharex=True, sharey="row")
    for across, (ratio, (quantity, _, _)) in zip(grid, QUANTITIES.items(), strict=True):
        for axes, kind in zip(across, passes, strict=True):
            axes.axhline(1.0, color="0.6", linewidth=1)
            for form, way in pairs:
                own = [r for r in rows if (r["pass"], r["form"], r["way"]) == (kind, form, way)]
                dashes, marker = looks[way]
                points = [int(r["length"]) for r in own], [float(r[ratio]) for r in own]
                axes.plot(*points, color=colours[form], linestyle=dashes, marker=marker, markersize=4, linewidth=1.4)
            axes.set(xscale="log", yscale="log", title=f"{quantity}, {kind}")
            axes.set_xticks(lengths, list(map(str, lengths)), rotation=30)
            axes.tick_params(labelbottom=True, labelleft=True)
            axes.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
            axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
            axes.minorticks_off()
            axes.grid(alpha=0.25)
    for axes in grid[:, 0]:
        axes.set_ylabel("multiple of attention without a bias")
    for axes in grid[-1]:
        axes.set_xlabel("tokens")
    names = {r["form"]: r["form"] if r["form"] == "none" else f"{r['form']}: {r['encoding']}" for r in rows}
    handles = [Line2D([], [], color=colours[form], linewidth=3, label=names[form]) for form in forms]
    handles += [
        Line2D([], [], color="0.2", linestyle=look[0], marker=look[1], markersize=4, label=_label(way))
        for way, look in looks.items()
    ]
    figure.legend(handles=handles, loc="outside right upper", frameon=False, handlelength=4)
    figure.suptitle(said, fontsize=7)
    figure_path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(figure_path, dpi=150)


def _unique(rows: Rows, column: str) -> list[str]:
    return list(dict.fromkeys(r[column] for r in rows))


def _pairs(rows: Rows) -> list[tuple[str, str]]:
    return list(dict.fromkeys((r["form"], r["way"]) for r in rows))


def _label(way: str) -> str:
    return f"here: {way}" if way in BACKENDS else way


def _short(value: str | None) -> str:
    """Three digits are more than a shared machine gives."""
    return "" if value is None else f"{float(value):.2f}" if float(value) < 100 else f"{float(value):.0f}"
