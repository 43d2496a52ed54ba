"""The page on a sweep over algorithmic tasks: exact answers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from fairseq_rpe.cli import exactness, page_published
from fairseq_rpe.cli.page import Block, Cell, Part, Row, Section, Table, Text, number, picture
from fairseq_rpe.cli.page_runs import parts, runs
from fairseq_rpe.cli.page_text import facts


def section(folder: Path, state: dict[str, Any], rows: list[dict[str, Any]]) -> Section:
    """Everything on a sweep; ``rows`` of ``exactness.collect``."""
    made = runs(folder, state)
    tasks, methods = state["algorithms"], list(dict.fromkeys(r["method"] for r in rows))
    ranges = "; ".join(exactness.ranges(rows, state))
    known = page_published.published(state)
    examples = sum(r["examples"] for r in rows if (r["method"], r["seed"]) == (rows[0]["method"], rows[0]["seed"]))
    lead = [
        f"{len(methods)} method{'s' * (len(methods) > 1)} on {', '.join(tasks)}, {examples:,} generated examples of "
        f"the {state['settings']['subset']} split answered by greedy decoding for each; {ranges}.",
        *_best(rows, state),
    ]
    drawn = picture(
        exactness.exact(rows),
        f"Exact match in per cent against the number of items, a panel per task; {ranges}.",
        "Exact match against the number of items; shaded: the range in training.",
    )
    compared: list[Block] = []
    if known:
        compared.append(page_published.caution(known))
        if known.get("settings"):
            compared.append(page_published.differences(state, made, None, known["settings"]))
    own = [
        Part("exact", "Exact match", [*_tables(rows, state), drawn]),
        Part("published", "Beside the published values", compared),
        *parts(state, made),
        Part("measurements", "Every measurement", [_measurements(rows)]),
    ]
    return Section(
        name=folder.resolve().name,
        title=page_published.about(state, "title"),
        lead=lead,
        facts=facts(state, made, None),
        parts=[part for part in own if part.blocks],
    )


def _best(rows: list[dict[str, Any]], state: dict[str, Any]) -> list[str]:
    found = []
    for task in dict.fromkeys(r["task"] for r in rows):
        beyond = {
            m: values[1] for (t, m), values in exactness.table(rows, state)[1] if t == task and values[1] is not None
        }
        if beyond:
            best = max(beyond, key=beyond.__getitem__)
            found.append(f"Most exact answers to {task} beyond the training range: {best}, {beyond[best]:.1f} %.")
    return found


def _tables(rows: list[dict[str, Any]], state: dict[str, Any]) -> list[Block]:
    head, lines = exactness.table(rows, state)
    blocks: list[Block] = []
    for task in dict.fromkeys(task for (task, _), _ in lines):
        own = {method: values for (t, method), values in lines if t == task}
        best = [max((v for v in column if v is not None), default=None) for column in zip(*own.values(), strict=True)]
        body = [
            Row(method, [number(v, ".1f", b) for v, b in zip(values, best, strict=True)])
            for method, values in own.items()
        ]
        caption = f"{task}: exact match in %, mean over the numbers of items and seeds. ★: largest of its column."
        caption += " Published: not comparable, hold the order of the methods against it only." * ("published" in head)
        blocks.append(Table(caption, ["", *head[2:]], body))
    if len(state["seeds"]) > 1:
        blocks.append(Text("The figure shows the mean over the seeds and, shaded, least to largest."))
    return blocks


def _measurements(rows: list[dict[str, Any]]) -> Table:
    head = ["", "task", "seed", "items", "examples", "right", "accuracy", "positions"]
    lines = []
    for r in rows:
        counts = [Cell(str(r[key]), r[key]) for key in ("seed", "items", "examples", "right")]
        cells = [Cell(r["task"]), *counts, number(r["accuracy"], ".4f"), Cell(r["positions"])]
        lines.append(Row(r["method"], cells))
    return Table("What accuracy.csv holds.", head, lines, folded=True)
