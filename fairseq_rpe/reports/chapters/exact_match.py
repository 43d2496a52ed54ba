"""A sweep over algorithmic tasks: exact answers by number of items."""

from __future__ import annotations

from fairseq_rpe.core.spec import parse
from fairseq_rpe.core.table import Cell, Row, Table, number, stacked
from fairseq_rpe.figures import sweep_curves
from fairseq_rpe.reports.chapters import literature, training
from fairseq_rpe.reports.findings import ExactAnswers
from fairseq_rpe.reports.page import Block, Part, Report, Section, Text, markdown, picture
from fairseq_rpe.sweeps.state import State, SweepFolder


def report(folder: SweepFolder, state: State, found: ExactAnswers) -> Report:
    """Everything on a sweep."""
    made = training.runs(folder, state)
    methods, ranges, values = found.methods(), found.ranges(), tables(state, found)
    first = found.rows[0]
    own = [row.result.examples for row in found.rows if (row.method, row.seed) == (first.method, first.seed)]
    lead = [
        f"{len(methods)} method{'s' * (len(methods) > 1)} on {', '.join(state.algorithms)}, {sum(own):,} generated "
        f"examples of the {state.settings.subset} split answered by greedy decoding for each; {ranges}.",
        *_best(found),
    ]
    curves = {task: {name: found.of(task, name) for name in found.methods(task)} for task in found.tasks}
    figure = sweep_curves.exact_match(curves, found.trained)
    drawn = picture(
        figure,
        f"Exact match in per cent against the number of items, a panel per task; {ranges}.",
        "Exact match against the number of items; shaded: the range in training.",
    )
    seeds = "The figure shows the mean over the seeds and, shaded, least to largest."
    exact: list[Block] = [*values.values(), *([Text(seeds)] if len(state.seeds) > 1 else []), drawn]
    parts = [
        Part("exact", "Exact match", exact),
        Part("published", "Beside the published values", literature.blocks(state, made, None)),
        *training.parts(state, made),
        Part("measurements", "Every measurement", [measurements(found)]),
    ]
    section = Section(
        name=folder.path.resolve().name,
        title=literature.title(state),
        lead=lead,
        facts=training.facts(state, made, literature.paper(state)),
        parts=[part for part in parts if part.blocks],
    )
    about = [Text(f"Exact match in %, mean over the numbers of items; {ranges}.")]
    if known := literature.published(state):
        about.append(Text(f"Published: {known.source}; another size of model, so compare the order."))
    return Report(section, stacked(values, "task").markdown() + markdown(about), figure)


def tables(state: State, found: ExactAnswers) -> dict[str, Table]:
    """Of each task the mean exact answers in per cent: within the training range, beyond it, over all; published."""
    known = literature.published(state)
    made = {}
    for task in found.tasks:
        lines = {name: list(found.means(task, name).values()) for name in found.methods(task)}
        if known:
            for name, values in lines.items():
                values.append(known.values.get(name, {}).get(parse(task)[0]))
        columns = list(zip(*lines.values(), strict=True))
        best = [max((v for v in column if v is not None), default=None) for column in columns]
        rows = [
            Row(name, [number(v, ".1f", b) for v, b in zip(values, best, strict=True)])
            for name, values in lines.items()
        ]
        caption = f"{task}: exact match in %, mean over the numbers of items and seeds."
        if known:
            caption += " Published: not comparable, hold the order of the methods against it only."
        head = ["method", "trained", "beyond", "all", *(["published"] if known else [])]
        made[task] = Table(caption, head, rows, starred="largest")
    return made


def _best(found: ExactAnswers) -> list[str]:
    lines = []
    for task in found.tasks:
        beyond = {n: v for n in found.methods(task) if (v := found.means(task, n)["beyond"]) is not None}
        if beyond:
            best = max(beyond, key=beyond.__getitem__)
            lines.append(f"Most exact answers to {task} beyond the training range: {best}, {beyond[best]:.1f} %.")
    return lines


def measurements(found: ExactAnswers) -> Table:
    """Every row."""
    lines = []
    for row in found.rows:
        one = row.result
        counts = [Cell(str(n), n) for n in (row.seed, one.length, one.examples, one.right)]
        cells = [Cell(row.task), *counts, number(one.accuracy, ".4f"), Cell(one.transform)]
        lines.append(Row(row.method, cells))
    head = ["method", "task", "seed", "items", "examples", "right", "accuracy", "positions"]
    return Table("What accuracy.csv holds.", head, lines, folded=True)
