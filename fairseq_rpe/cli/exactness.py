"""What a sweep over algorithmic tasks found: exact answers by number of items, as CSV, Markdown table and figure."""

from __future__ import annotations

import csv
import io
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fairseq_rpe.algorithms import build
from fairseq_rpe.cli import board
from fairseq_rpe.cli.report import BOARD, PAGE, align, measured, method_of
from fairseq_rpe.core.errors import UserError
from fairseq_rpe.core.files import atomic_write, replace_with
from fairseq_rpe.core.spec import parse

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from fairseq_rpe.cli.page import Section

COLUMNS = ("task", "method", "seed", "items", "examples", "right", "accuracy", "positions")


def write(folder: Path, state: dict[str, Any], redraw: bool) -> Section | None:
    """Write accuracy.csv, accuracy.md, figure and page, and print the table and where things are.

    Figure and page are kept as ``report.write`` does; what is new on the page is returned.
    """
    rows = collect(folder, state)
    if not rows:
        raise UserError(f"{folder} holds no finished evaluation yet: run its sweep first")
    out = io.StringIO()
    writer = csv.DictWriter(out, COLUMNS, lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
    path, figures = folder / "accuracy.csv", [folder / "accuracy.png", folder / "accuracy.pdf"]
    same = path.exists() and path.read_text(encoding="utf-8") == out.getvalue()
    atomic_write(path, out.getvalue())
    text = markdown(rows, state)
    atomic_write(folder / "accuracy.md", text)
    section = None
    if redraw or not same or not all(path.exists() for path in [*figures, folder / BOARD, folder / PAGE]):
        from fairseq_rpe.cli import page, page_algorithms

        draw(rows, figures)
        board.write_algorithms(
            folder, state, rows, {task: build(task).longest("train") for task in state["algorithms"]}
        )
        section = page_algorithms.section(folder, state, rows)
        page.write([section], folder / PAGE)
    print(text)
    print(f"results:     {path}")
    print(f"figure:      {figures[0]}")
    print(f"page:        {folder / PAGE}")
    print(f"TensorBoard: {folder / 'tensorboard'}")
    return section


def collect(folder: Path, state: dict[str, Any]) -> list[dict[str, Any]]:
    """One row per task, method, seed and number of items, in the order in which they were asked for."""
    found = []
    for task in state["algorithms"]:
        for name in state["encodings"]:
            for seed in state["seeds"]:
                rows = measured(folder, method_of(state, name), seed, task)
                rows = [r for r in rows if (r["algorithm"], r["split"], r["unit"]) == (task, _split(state), "items")]
                for row in sorted(rows, key=lambda r: r["length"]):
                    kept = {key: row[key] for key in ("examples", "right", "accuracy")}
                    place = {"task": task, "method": name, "seed": seed, "items": row["length"]}
                    found.append({**place, **kept, "positions": row["transform"]})
    return found


def _split(state: dict[str, Any]) -> str:
    return str(state["settings"]["subset"])


def mean(rows: list[dict[str, Any]], task: str, method: str, first: int, last: int) -> float | None:
    """Mean accuracy in per cent over ``first`` … ``last`` items, every number of items and seed with equal weight."""
    values = [r["accuracy"] for r in rows if (r["task"], r["method"]) == (task, method) and first <= r["items"] <= last]
    return 100 * sum(values) / len(values) if values else None


def markdown(rows: list[dict[str, Any]], state: dict[str, Any]) -> str:
    """Mean accuracies within the training range, beyond it and over all, with the published means beside them."""
    head, body = table(rows, state)
    lines = [head, ["---", *["---:"] * (len(head) - 1)]]
    lines += [[*names, *map(_show, values)] for names, values in body]
    about = f"Exact match in %, mean over the numbers of items; {'; '.join(ranges(rows, state))}.\n"
    if known := state.get("published"):
        about += f"Published: {known['source']}; another size of model, so compare the order.\n"
    return align(lines) + "\n" + about


Line = tuple[tuple[str, str], list[float | None]]


def table(rows: list[dict[str, Any]], state: dict[str, Any]) -> tuple[list[str], list[Line]]:
    """The head and, for each task and method, the means of ``markdown`` in per cent."""
    known = state.get("published") or {}
    head = ["task", "method", "trained", "beyond", "all"] + (["published"] if known else [])
    lines: list[Line] = []
    for task, method in dict.fromkeys((r["task"], r["method"]) for r in rows):
        trained, longest = _range(task, state)
        parts = [(2, trained), (trained + 1, longest), (2, longest)]
        values = [mean(rows, task, method, *part) for part in parts]
        if known:
            values.append(known.get(method, {}).get(parse(task)[0]))
        lines.append(((task, method), values))
    return head, lines


def ranges(rows: list[dict[str, Any]], state: dict[str, Any]) -> list[str]:
    """In words, how many items each task has in training and in evaluation."""
    found = {task: _range(task, state) for task in dict.fromkeys(r["task"] for r in rows)}
    return [
        f"{task}: 2 … {trained} items in training, up to {longest} here" for task, (trained, longest) in found.items()
    ]


def _range(task: str, state: dict[str, Any]) -> tuple[int, int]:
    algorithm = build(task)
    return algorithm.longest("train"), algorithm.longest(_split(state))


def _show(value: float | None) -> str:
    return "" if value is None else f"{value:.1f}"


def draw(rows: list[dict[str, Any]], paths: list[Path]) -> None:
    """Draw once, save to every path in the format of its ending."""
    figure = exact(rows)
    for path in paths:
        replace_with(path, lambda target: figure.savefig(target, dpi=160))


def exact(rows: list[dict[str, Any]]) -> Figure:
    """Accuracy against items, a panel per task, the training range shaded."""
    from matplotlib.figure import Figure

    from fairseq_rpe.figures.style import looks

    tasks = list(dict.fromkeys(r["task"] for r in rows))
    methods = list(dict.fromkeys(r["method"] for r in rows))
    shown = looks(methods)
    columns = min(2, len(tasks))
    lines = -(-len(tasks) // columns)
    figure = Figure(figsize=(6.4 * columns, 3.8 * lines), layout="constrained")
    panels = figure.subplots(lines, columns, squeeze=False, sharey=True)
    for task, axes in zip(tasks, panels.flat, strict=False):
        trained = build(task).longest("train")
        axes.axvspan(2, trained, color="0.9", label=f"training range (2 … {trained})")
        for method in methods:
            points: dict[int, list[float]] = {}
            for row in rows:
                if (row["task"], row["method"]) == (task, method):
                    points.setdefault(row["items"], []).append(100 * row["accuracy"])
            if not points:
                continue
            colour, marker, dashes = shown[method]
            drawn = {"color": colour, "marker": marker, "linestyle": dashes}
            means = [sum(values) / len(values) for values in points.values()]
            every = max(1, len(points) // 20)
            axes.plot(list(points), means, **drawn, markersize=4, markevery=every, label=method)
            if any(len(values) > 1 for values in points.values()):
                low, high = [min(v) for v in points.values()], [max(v) for v in points.values()]
                axes.fill_between(list(points), low, high, color=colour, alpha=0.2, linewidth=0)
        axes.set(title=task, xlabel="items", ylim=(-3, 103))
        axes.grid(alpha=0.25)
    for axes in panels[:, 0]:
        axes.set_ylabel("exact match (%)")
    for axes in panels.flat[len(tasks) :]:
        axes.set_visible(False)
    panels[0, 0].legend(frameon=False, fontsize="small")
    return figure
