"""A sweep over algorithmic tasks: exact answers by number of items, and by depth where a task has depths."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from functools import partial

from fairseq_rpe.algorithms import build
from fairseq_rpe.core.spec import parse
from fairseq_rpe.figures import sweep_curves
from fairseq_rpe.reports.chapters import by_depth, published_comparison
from fairseq_rpe.reports.chapters.training import Run
from fairseq_rpe.reports.page import Block, Findings, Part, Text, markdown, picture
from fairseq_rpe.reports.sweep_results import ExactAnswers
from fairseq_rpe.sweeps.sweep_record import Published, State
from fairseq_rpe.utils.table import Cell, Row, Table, number, stacked


def findings(state: State, runs: Sequence[Run], found: ExactAnswers) -> Findings:
    """What a sweep found."""
    known, ranges = state.published, found.ranges()
    values = {task: _table(found, task, known) for task in found.tasks}
    curves = {task: {name: found.of(task, name) for name in found.methods(task)} for task in found.tasks}
    units = {task: build(task).unit for task in found.tasks}
    of = " or ".join(dict.fromkeys(units.values()))
    figure = sweep_curves.exact_match(curves, found.trained, units)
    drawn = picture(
        figure,
        f"Exact match in per cent against the number of {of}, a panel per task; {ranges}.",
        f"Exact match against the number of {of}; shaded: the range in training.",
    )
    maps, blocks = by_depth.chapter(found)
    several = Text("The figure shows the mean over the seeds and, as bars or shaded, least to largest.")
    seeds = [several] * (len(state.seeds) > 1)
    exact: list[Block] = [*values.values(), *seeds, drawn]
    about: list[Block] = [Text(f"Exact match in %, mean over the numbers of {of}; {ranges}.")]
    if known:
        about.append(Text(f"Published: {known.source}; another model size, so compare only the order."))
    return Findings(
        _lead(state, found),
        [
            Part("exact", "Exact match", exact),
            Part("depths", "Found at every depth?", blocks),
            Part("published", "Beside the published values", published_comparison.blocks(state, runs)),
        ],
        partial(_measurements, found),
        stacked(values, "task").markdown() + markdown([*about, *blocks]),
        figure,
        {"depths": maps} if maps else {},
    )


def _table(found: ExactAnswers, task: str, known: Published | None) -> Table:
    """The mean exact answers in per cent: within the training range, beyond it, over all; published."""
    unit = build(task).unit
    caption = f"{task}: exact match in %, mean over the numbers of {unit} and seeds."
    ends = {name: found.ends[task, name] for name in found.methods(task) if (task, name) in found.ends}
    if ends:
        caption += f" (to N): its positions end at N {unit}; the mean goes no further and is not compared."
    head = ["method", "trained", "beyond", "all"]
    lines = {name: list(found.means(task, name).values()) for name in found.methods(task)}
    if known:
        head.append("published")
        caption += " Published: not comparable; compare only the order of the methods."
        for name, values in lines.items():
            values.append(known.values.get(name, {}).get(parse(task)[0]))
    # a mean over fewer items is another number
    partly = {(name, place) for name in ends for place in (1, 2) if lines[name][place] is not None}
    best = [
        max(
            (own[place] for name, own in lines.items() if (name, place) not in partly and own[place] is not None),
            default=None,
        )
        for place in range(len(head) - 1)
    ]

    def cell(name: str, place: int) -> Cell:
        if (name, place) in partly:
            made = number(lines[name][place], ".1f")
            return replace(made, text=f"{made.text} (to {ends[name]})")
        return number(lines[name][place], ".1f", best[place])

    rows = [Row(name, [cell(name, place) for place in range(len(best))]) for name in lines]
    return Table(caption, head, rows, starred="largest")


def _lead(state: State, found: ExactAnswers) -> list[str]:
    methods, answered = found.methods(), Counter[tuple[str, int]]()
    for row in found.rows:
        answered[row.method, row.seed] += row.result.examples
    lines = [
        f"{len(methods)} method{'s' * (len(methods) > 1)} on {', '.join(state.algorithms)}, "
        f"{'up to ' * bool(found.ends)}{max(answered.values()):,} generated "
        f"examples of the {state.settings.subset} split answered by greedy decoding for each; {found.ranges()}."
    ]
    for task in found.tasks:
        whole = [name for name in found.methods(task) if (task, name) not in found.ends]
        beyond = {n: v for n in whole if (v := found.means(task, n)["beyond"]) is not None}
        if beyond:
            best = max(beyond, key=beyond.__getitem__)
            lines.append(f"Most exact answers to {task} beyond the training range: {best}, {beyond[best]:.1f} %.")
    return lines


def _measurements(found: ExactAnswers) -> Table:
    lines = []
    for row in found.rows:
        one = row.result
        counts = [Cell(str(n), n) for n in (row.seed, one.length, one.examples, one.right)]
        lines.append(Row(row.method, [Cell(one.algorithm), *counts, number(one.accuracy, ".4f"), Cell(one.transform)]))
    head = ["method", "task", "seed", "items", "examples", "right", "accuracy", "positions"]
    if found.deep:
        head.append("depth")
        lines = [
            replace(line, cells=[*line.cells, number(row.result.depth, "g")])
            for line, row in zip(lines, found.rows, strict=True)
        ]
    return Table("What accuracy.csv holds.", head, lines, folded=True)
