"""Chapters on a sweep over generated tasks: accuracy by number of items, and by depth for tasks with depths."""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial

from matplotlib.figure import Figure

from fairseq_rpe.algorithms import build
from fairseq_rpe.core.spec import parse
from fairseq_rpe.figures import sweep_curves
from fairseq_rpe.figures.heat_maps import draw_needle_maps
from fairseq_rpe.reports import uncertainty
from fairseq_rpe.reports.chapters import effective_length, examples, published_comparison, window_readers
from fairseq_rpe.reports.chapters.training import TrainedRun
from fairseq_rpe.reports.page import Block, Part, ReportContent, Text, markdown, svg_picture
from fairseq_rpe.reports.sweep_results import SOLVED_PERCENT, Accuracies
from fairseq_rpe.reports.uncertainty import ClusteredScores
from fairseq_rpe.sweeps.sweep_record import Published, SweepFolder, SweepRecord
from fairseq_rpe.utils.table import Cell, Table, TableRow, number_cell, stack_tables, text_cell


def build_content(
    folder: SweepFolder,
    record: SweepRecord,
    runs: Sequence[TrainedRun],
    accuracies: Accuracies,
    lengths: Sequence[Block] = (),
) -> ReportContent:
    """Build the report of a sweep over generated tasks.

    Args:
        folder: folder of the sweep.
        record: its record.
        runs: trained runs.
        accuracies: results.
        lengths: blocks on effective lengths; empty without any.

    Returns:
        The chapters; ``other_figures`` has the heat maps as ``depths`` if a task has depths.
    """
    published, tasks = record.published, {task: build(task) for task in accuracies.tasks}
    units = {task: built.length_unit for task, built in tasks.items()}
    tables = {task: _accuracy_table(accuracies, task, published) for task in accuracies.tasks}
    curves = {
        task: {name: accuracies.values_by_length(task, name) for name in accuracies.methods(task)}
        for task in accuracies.tasks
    }
    trained = {task: (built.config.least, accuracies.train_items[task]) for task, built in tasks.items()}
    measures = dict.fromkeys("right labels" if built.has_labels else "exact match" for built in tasks.values())
    measure = " or ".join(measures)
    figure = sweep_curves.draw_exact_match(curves, trained, units, measure)
    unit, ranges = " or ".join(dict.fromkeys(units.values())), accuracies.describe_ranges()
    picture = svg_picture(
        figure,
        f"{measure.capitalize()} in percent against the number of {unit}, one panel for each task; {ranges}.",
        f"{measure.capitalize()} against the number of {unit}; shaded: the range in training.",
    )
    blocks: list[Block] = [*tables.values()]
    if len(record.seeds) > 1:
        about_seeds = "The figure shows the mean over seeds, and bars or shading from the lowest to the highest seed."
        blocks.append(Text(about_seeds))
    notes: list[Block] = [Text(f"Exact match in %, mean over the numbers of {unit}; {ranges}.")]
    for task in accuracies.tasks:
        errors = {name: accuracies.scores_by_range(task, name) for name in accuracies.methods(task)}
        if about_errors := _about_errors(errors):
            notes.append(Text(f"{task}: {about_errors}"))
    if with_labels := [task for task in accuracies.tasks if build(task).has_labels]:
        notes.append(Text(f"{', '.join(with_labels)}: right labels in % instead, several labels in each example."))
    if published:
        notes.append(Text(f"Published: {published.source}; its model has another size, so compare only the order."))
    heat_maps, depth_blocks = build_depth_blocks(accuracies)
    reader_blocks = window_readers.reader_blocks(accuracies, record.settings.split)
    return ReportContent(
        lead=_lead(record, accuracies),
        parts=[
            Part("exact", "Exact match", [*blocks, picture]),
            effective_length.chapter(lengths),
            Part("readers", "What would a guess and the last tokens give?", reader_blocks),
            Part("depths", "Is the answer found at every depth?", depth_blocks),
            Part("examples", "Which examples fail?", examples.task_blocks(folder, record, accuracies)),
            Part("published", "Comparison with published values", published_comparison.comparison_blocks(record, runs)),
        ],
        build_measurements=partial(_measurements, accuracies),
        markdown=stack_tables(tables, "task").to_markdown()
        + markdown([*notes, *depth_blocks, *reader_blocks, *lengths]),
        figure=figure,
        other_figures={"depths": heat_maps} if heat_maps else {},
    )


def _accuracy_table(accuracies: Accuracies, task: str, published: Published | None) -> Table:
    """Return the table of mean accuracies in percent: trained range, beyond it, over all lengths, and published."""
    algorithm, methods = build(task), accuracies.methods(task)
    unit, measure = algorithm.length_unit, "right labels" if algorithm.has_labels else "exact match"
    caption = f"{task}: {measure} in %, mean over the numbers of {unit} and seeds."
    errors = {name: accuracies.scores_by_range(task, name) for name in methods}
    about_errors = _about_errors(errors)
    caption += f" {about_errors}" if about_errors else ""
    limits = {name: limit for name in methods if (limit := accuracies.position_limits.get((task, name))) is not None}
    if limits:
        caption += (
            f" (to N): the method has positions for at most N {unit}, so its mean ends there and is not compared."
        )
    means = {name: accuracies.mean_by_range(task, name) for name in methods}  # method -> column -> mean
    columns = ["trained", "beyond", "all"]
    if published:
        caption += " Published: not comparable; compare only the order of the methods."
        columns.append("published")
        task_name, _ = parse(task)
        for name in methods:
            means[name]["published"] = published.values.get(name, {}).get(task_name)
    cells: dict[str, list[Cell]] = {name: [] for name in methods}
    for column in columns:
        # a mean over fewer lengths cannot be compared with one over all of them
        is_limited = column in ("beyond", "all")
        compared = {
            name: mean
            for name in methods
            if (mean := means[name][column]) is not None and not (is_limited and name in limits)
        }
        best = max(compared.values(), default=None)
        scores = {name: errors[name].get(column) for name in methods}
        ties = uncertainty.ties_with_best(compared, scores) or set()
        for name in methods:
            mean = means[name][column]
            cell = number_cell(mean, ".1f", best if name in compared else None)
            if mean is not None and (own_scores := scores[name]) is not None:
                interval = uncertainty.accuracy_estimate(own_scores)
                suffix = uncertainty.half_width_text(100 * interval.low, 100 * interval.high, ".1f")
                cell = uncertainty.with_suffix(cell, suffix, name in ties)
            if is_limited and name in limits and mean is not None:
                cell = replace(cell, text=f"{cell.text} (to {limits[name]})")
            cells[name].append(cell)
    rows = [TableRow(name, cells[name]) for name in methods]
    return Table(caption, ["method", *columns], rows, best_label="largest")


def _about_errors(errors: Mapping[str, Mapping[str, ClusteredScores | None]]) -> str:
    """Return in words what ± and the mark of a table of accuracies are; nothing if results lack single answers.

    Args:
        errors: right answers by method and range of lengths.
    """
    scores = [total for by_range in errors.values() if (total := by_range["all"]) is not None]
    if not scores:
        return ""
    text = f"±: half of the 95 % interval (Wilson; all lengths: {uncertainty.describe_clusters(scores)})."
    if len(errors) > 1:
        totals = [total for by_range in errors.values() for total in by_range.values() if total is not None]
        has_bits = [total.answers() is not None for total in totals]
        test = "McNemar's test" if any(has_bits) else "paired"
        if len(set(has_bits)) > 1:
            test += " at one length, else paired"
        text += (
            f" {uncertainty.TIE_MARK}: not shown to differ from the largest value of the column (the same examples, "
            f"{test}; Holm's correction for the methods of the column, p ≥ 0.05)."
        )
    if len(scores) < len(errors):
        text += " Columns in which a method lacks the answers of single examples have no such mark."
    return text


def _lead(record: SweepRecord, accuracies: Accuracies) -> list[str]:
    """Return the first paragraph and the list of main results."""
    methods, counts = accuracies.methods(), Counter[tuple[str, int]]()  # examples by method and seed
    for row in accuracies.results:
        counts[row.method, row.seed] += row.result.examples
    lines = [
        f"{len(methods)} {'methods' if len(methods) > 1 else 'method'} on {', '.join(record.algorithms)}. Each answers "
        f"{'up to ' if accuracies.position_limits else ''}{max(counts.values()):,} generated examples of the "
        f"{record.settings.split} split by greedy decoding; {accuracies.describe_ranges()}."
    ]
    for task in accuracies.tasks:
        complete = [name for name in accuracies.methods(task) if (task, name) not in accuracies.position_limits]
        means = {name: accuracies.mean_by_range(task, name)["beyond"] for name in complete}
        beyond = {name: mean for name, mean in means.items() if mean is not None}
        if beyond:
            best = max(beyond, key=beyond.__getitem__)
            lines.append(f"Highest accuracy on {task} beyond the training range: {best}, {beyond[best]:.1f} %.")
    return lines


def _measurements(accuracies: Accuracies) -> Table:
    """Return the table with a row for each result."""
    rows = []
    for row in accuracies.results:
        r = row.result
        cells = [Cell(r.algorithm), *(Cell(str(n), n) for n in (row.seed, r.length, r.examples, r.right))]
        cells += [number_cell(r.accuracy, ".4f"), Cell(r.transform)]
        if accuracies.tasks_with_depths:
            cells.append(number_cell(r.depth, "g"))
        rows.append(TableRow(row.method, [*cells, *uncertainty.error_cells(uncertainty.accuracy_columns(r), ".4f")]))
    head = ["method", "task", "seed", "items", "examples", "right", "accuracy", "positions"]
    head += ["depth"] if accuracies.tasks_with_depths else []
    head += uncertainty.error_titles()
    return Table("Contents of accuracy.csv.", head, rows, is_folded=True)


def build_depth_blocks(accuracies: Accuracies) -> tuple[Figure | None, list[Block]]:
    """Build the heat maps of all tasks with depths as a figure, and the chapter with figure and tables.

    Returns:
        The figure and the blocks of the chapter; None and no blocks if no task has depths.
    """
    if not accuracies.tasks_with_depths:
        return None, []
    grids = {
        task: {name: accuracies.mean_by_length_and_depth(task, name) for name in accuracies.methods(task)}
        for task in accuracies.tasks_with_depths
    }
    figure = draw_needle_maps(grids, accuracies.train_items)
    solved = "; ".join(
        f"{task}, {name}: {_solved_text(accuracies.solved_length(task, name))}"
        for task in grids
        for name in accuracies.methods(task)
    )
    picture = svg_picture(
        figure,
        f"Exact match in percent by length and depth. At least {SOLVED_PERCENT:g} % at every depth: {solved}.",
        "Exact match by length in tokens and depth: 0 is the start of the prompt, 1 the end.",
    )
    blocks: list[Block] = [picture]
    for task in grids:
        blocks += [_worst_depth_table(accuracies, task), _depth_table(accuracies, task)]
        blocks.append(Text(_chance_level(accuracies, task)))
    return figure, blocks


def _solved_text(length: int | None) -> str:
    return "no length" if length is None else f"up to {length} tokens"


def _worst_depth_table(accuracies: Accuracies, task: str) -> Table:
    """Return the table of the accuracy at the worst depth by length, and of the length up to which a task is solved."""
    worst = {name: accuracies.worst_depth_by_length(task, name) for name in accuracies.methods(task)}
    lengths = sorted({n for values in worst.values() for n in values})
    rows = []
    for name, values in worst.items():
        solved = _solved_text(accuracies.solved_length(task, name))
        rows.append(TableRow(name, [*(number_cell(values.get(n), ".0f") for n in lengths), text_cell(solved)]))
    caption = (
        f"{task}: exact match in % at the worst depth, by length in tokens; last, the length up to which it is "
        f"at least {SOLVED_PERCENT:g} % at every depth."
    )
    return Table(caption, ["method", *map(str, lengths), "solved up to"], rows)


def _depth_table(accuracies: Accuracies, task: str) -> Table:
    """Return the numbers of the heat maps: a row for each method and length, a column for each depth."""
    grids = {name: accuracies.mean_by_length_and_depth(task, name) for name in accuracies.methods(task)}
    depths = sorted({depth for grid in grids.values() for _, depth in grid})
    rows = []
    for name, grid in grids.items():
        for length in sorted({length for length, _ in grid}):
            cells = [number_cell(grid.get((length, depth)), ".0f") for depth in depths]
            rows.append(TableRow(name, [Cell(str(length), length), *cells]))
    head = ["method", "tokens", *(f"{depth:g}" for depth in depths)]
    return Table(f"{task}: exact match in % by length (rows) and depth (columns).", head, rows)


def _chance_level(accuracies: Accuracies, task: str) -> str:
    """Return in words how often a guess is right, and the number of examples."""
    results = [row.result for row in accuracies.results if row.task == task]
    lengths = [result.length for result in results]
    # a guess is right least often at the longest length
    least, most = (build(task).chance_accuracy(length) for length in (max(lengths), min(lengths)))
    if least is None or most is None:
        return f"{task}: mean over the seeds."
    percents = [f"{100 * share:.3g}" for share in dict.fromkeys((least, most))]
    counts = " or ".join(map(str, sorted({result.examples for result in results})))
    return f"{task}: a guess is right in {' to '.join(percents)} %; {counts} examples of each length and depth."
