"""``report``: what a sweep found, as CSV, Markdown table, figure and HTML page."""

from __future__ import annotations

import argparse
import csv
import hashlib
import io
import re
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fairseq_rpe.cli import recipes
from fairseq_rpe.cli.options import add_rpe_module, load_rpe_module, positive_float
from fairseq_rpe.core.errors import UserError
from fairseq_rpe.core.files import atomic_write, read_json, read_json_lines

if TYPE_CHECKING:
    from fairseq_rpe.cli.page import Section

STATE = "sweep.json"
RESULTS = "eval.jsonl"
BOARD = "tensorboard/evaluation"
PAGE = "report.html"
IDENTITY = "identity"
_LONGEST_NAME = 80
DELTA = 0.05
COLUMNS = ("encoding", "length", "ppl", "loss_base2", "tokens", "ratio", "seed")


def add_parser(subparsers: Any) -> None:
    parser = subparsers.add_parser(
        "report",
        help="write the table, the figure and the page of sweeps",
        description="Writes CSV, Markdown table, figure and a self-contained HTML page into each sweep's folder.",
        allow_abbrev=False,
    )
    parser.add_argument("sweeps", type=Path, nargs="+", metavar="DIR", help="the --out folder of a sweep")
    parser.add_argument("--out", type=Path, metavar="FILE", help="also one HTML page on all of them, one after another")
    parser.add_argument(
        "--delta", type=positive_float, metavar="X", help=f"δ of Definition 0.1, a relative deviation ({DELTA:g})"
    )
    add_rpe_module(parser)
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    load_rpe_module(args.rpe_module)
    if args.out is not None and args.out.is_dir():
        raise UserError(f"--out {args.out} is a folder: name the file of the page")
    states = {folder: _state(folder, args.delta) for folder in args.sweeps}
    if len(states) < len(args.sweeps):
        raise UserError("a sweep is named twice: leave one out")
    sections = [write(folder, redraw=True, delta=args.delta) for folder in states]
    if args.out is not None:
        from fairseq_rpe.cli import page

        page.write([section for section in sections if section is not None], args.out)
        print(f"page on all: {args.out}")
    return 0


def _state(folder: Path, delta: float | None) -> dict[str, Any]:
    if not (folder / STATE).is_file():
        raise UserError(f"{folder} holds no {STATE}: name the --out folder of a sweep")
    state = read_json(folder / STATE)
    if delta is not None and state.get("algorithms"):
        raise UserError(f"--delta is about perplexity and {folder} counts exact answers: drop it")
    return state


def write(folder: Path, redraw: bool, delta: float | None = None) -> Section | None:
    """Write a sweep's tables, figure and page, and print the table and where things are.

    Without ``redraw`` they are kept when the results are the same as before; what is new on the page is returned.
    """
    state = _state(folder, delta)
    if state.get("algorithms"):
        from fairseq_rpe.cli import exactness

        return exactness.write(folder, state, redraw)
    trained_at = state["settings"]["tokens"]
    rows = collect(folder, state)
    if not rows:
        raise UserError(f"{folder} holds no finished evaluation yet: run its sweep first")
    text = _csv(rows)
    table_path, figure_paths = folder / "results.csv", [folder / "ppl.png", folder / "ppl.pdf"]
    text_path, verdict_path, page_path = folder / "results.md", folder / "extrapolation.csv", folder / PAGE
    same = table_path.exists() and table_path.read_text(encoding="utf-8") == text
    kept = (text_path, verdict_path, page_path, *figure_paths, folder / BOARD)
    section = None
    if redraw or not same or not all(path.exists() for path in kept):
        from fairseq_rpe.cli import board, definition, page, page_text
        from fairseq_rpe.cli.figure import draw

        delta = delta or DELTA
        judged = definition.judge(rows, trained_at, definition.predict(folder, state))
        table = markdown(rows, trained_at) + definition.markdown(judged, trained_at, delta) + published(state)
        draw(rows, trained_at, figure_paths)
        board.write_text(folder, state, rows)
        section = page_text.section(folder, state, rows, judged, delta)
        page.write([section], page_path)
        atomic_write(verdict_path, definition.to_csv(judged, delta))
        atomic_write(text_path, table)
        # last, because the rest is taken to belong to it
        atomic_write(table_path, text)
    else:
        table = text_path.read_text(encoding="utf-8")
    print(table)
    print(f"results:     {table_path}")
    print(f"figure:      {figure_paths[0]}")
    print(f"page:        {page_path}")
    print(f"TensorBoard: {folder / 'tensorboard'}")
    return section


def slug(spec: str, seed: int) -> str:
    """A file name for a run; two specs never share one."""
    plain = re.sub(r"[^A-Za-z0-9._=-]+", "-", spec)[:_LONGEST_NAME]
    if plain != spec:
        plain += "-" + hashlib.sha256(spec.encode()).hexdigest()[:6]
    return f"{plain}-seed{seed}"


def run_name(method: dict[str, Any], seed: int, algorithm: str | None = None) -> str:
    """The folder of a training run: methods that are trained alike share it."""
    moved = method["positions_train"]
    parts = [algorithm, method["rpe"], None if moved == IDENTITY else moved]
    return slug("@".join(part for part in parts if part), seed)


def method_of(state: dict[str, Any], name: str) -> dict[str, Any]:
    """What a label of a sweep stands for; a plain encoding stands for itself."""
    plain = {"rpe": name, "positions_train": IDENTITY, "positions_eval": None}
    return state.get("methods", {}).get(name, plain)


def leaves_positions(method: dict[str, Any]) -> bool:
    """Whether positions are the plain ones in training and in evaluation."""
    return {method["positions_train"], method["positions_eval"] or IDENTITY} == {IDENTITY}


def measured(folder: Path, method: dict[str, Any], seed: int, algorithm: str | None = None) -> list[dict[str, Any]]:
    """A method's results that belong to the finished checkpoint of its run."""
    place = folder / "runs" / run_name(method, seed, algorithm)
    run_json = place / "checkpoints" / "run.json"
    if not run_json.exists():
        return []
    checkpoint = read_json(run_json).get("finished", {}).get("checkpoint")
    return [
        row
        for row in read_json_lines(place / RESULTS)
        if row["checkpoint"] == checkpoint
        and row.get("positions") == method["positions_eval"]
        and not any(row.get(key) for key in ("rpe", "compute_dtype", "attention_prune"))
    ]


def collect(folder: Path, state: dict[str, Any]) -> list[dict[str, Any]]:
    """The results that belong to the sweep's settings, in the order in which they were asked for."""
    trained_at = state["settings"]["tokens"]
    found = []
    for spec in state["encodings"]:
        for seed in state["seeds"]:
            subset = state["settings"]["subset"]
            rows = {
                row["length"]: row for row in measured(folder, method_of(state, spec), seed) if row["subset"] == subset
            }
            own = rows.get(trained_at)
            for length in sorted(rows):
                row = rows[length]
                ratio = row["ppl"] / own["ppl"] if own else None
                found.append({**row, "encoding": spec, "seed": seed, "ratio": ratio})
    return found


def mean(rows: list[dict[str, Any]], encoding: str, length: int, column: str) -> float | None:
    """Mean over the seeds, or nothing if that cell has no value."""
    values = [r[column] for r in rows if r["encoding"] == encoding and r["length"] == length]
    values = [v for v in values if v is not None]
    return sum(values) / len(values) if values else None


def names_and_lengths(rows: list[dict[str, Any]]) -> tuple[list[str], list[int]]:
    return list(dict.fromkeys(r["encoding"] for r in rows)), sorted({r["length"] for r in rows})


def markdown(rows: list[dict[str, Any]], trained_at: int) -> str:
    """Perplexity per token, encodings × lengths; the last column is the longest over the training length."""
    encodings, lengths = names_and_lengths(rows)
    longest = lengths[-1]
    head = ["encoding", *map(str, lengths), f"{longest} / {trained_at}"]
    lines = [head, ["---", *["---:"] * (len(head) - 1)]]
    for encoding in encodings:
        values = [_show(mean(rows, encoding, n, "ppl"), ".2f") for n in lengths]
        lines.append([encoding, *values, _show(mean(rows, encoding, longest, "ratio"), ".3f")])
    return align(lines)


def published(state: dict[str, Any]) -> str:
    """The published values of a recipe's methods as a table of their own, or nothing."""
    known = state.get("published") or {}
    values = recipes.values(known)
    rows = {name: values[name] for name in state["encodings"] if name in values}
    if not rows:
        return ""
    lengths = sorted({int(n) for row in rows.values() for n in row})
    head = ["published", *map(str, lengths)]
    lines = [head, ["---", *["---:"] * (len(head) - 1)]]
    lines += [[name, *(_show(row.get(str(n)), recipes.decimals(known)) for n in lengths)] for name, row in rows.items()]
    return f"\n{known['source']} (other data, tokeniser and size: compare the trends only):\n\n{align(lines)}"


def align(lines: list[list[str]], right: bool = True) -> str:
    """A Markdown table: a head, a rule, rows; the first column to the left, the others to the ``right``."""
    widths = [max(len(line[c]) for line in lines) for c in range(len(lines[0]))]
    out = []
    for number, line in enumerate(lines):
        if number == 1:
            cells = ["-" * widths[0], *("-" * (w - 1) + (":" if right else "-") for w in widths[1:])]
        else:
            pad: list[Callable[[str, int], str]] = [str.ljust, *[str.rjust if right else str.ljust] * (len(line) - 1)]
            cells = [f(text, w) for f, text, w in zip(pad, line, widths, strict=True)]
        out.append(f"| {' | '.join(cells)} |\n")
    return "".join(out)


def _show(value: float | None, form: str) -> str:
    return "" if value is None else format(value, form)


def _csv(rows: list[dict[str, Any]]) -> str:
    out = io.StringIO()
    writer = csv.DictWriter(out, COLUMNS, extrasaction="ignore", lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
    return out.getvalue()
