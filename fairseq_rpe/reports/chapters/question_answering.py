"""Chapters on a sweep over questions: scores by set and by context length, with published scores."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from types import MappingProxyType

from matplotlib.figure import Figure

from fairseq_rpe.figures import score_curves
from fairseq_rpe.reports import uncertainty
from fairseq_rpe.reports.chapters import effective_length, examples, published_comparison
from fairseq_rpe.reports.chapters.training import TrainedRun
from fairseq_rpe.reports.page import Block, Part, Picture, ReportContent, Text, markdown, svg_picture
from fairseq_rpe.reports.question_scores import MEAN, Scores, published_axis, published_mean
from fairseq_rpe.reports.uncertainty import ClusteredScores
from fairseq_rpe.sweeps.sweep_record import Published, SweepFolder, SweepRecord
from fairseq_rpe.utils.table import Cell, Table, TableRow, cell_with_range, number_cell, text_cell

_ANSWER_MODES = {"generation": "generated freely", "likelihood": "the likeliest of the choices"}
_MAX_METRICS = 2  # a set with at most so many metrics has a table for each
_MIN_ABBREVIATED = 5  # a metric of at least so many sets is named without its sets
# method -> value of each seed, for one column of a table
_ColumnValues = Callable[[str], list[float]]
# method -> its scores by question, or None if they are unknown
_ColumnScores = Callable[[str], ClusteredScores | None]
_CAUTION = "Published values cannot be compared one by one: the page lists what differs or is not stated."


def build_content(
    folder: SweepFolder, record: SweepRecord, runs: Sequence[TrainedRun], scores: Scores, lengths: Sequence[Block] = ()
) -> ReportContent:
    """Build the report of a sweep over questions.

    Args:
        folder: folder of the sweep.
        record: its record.
        runs: runs of the pre-training, then fine-tuned runs.
        scores: results.
        lengths: blocks on effective lengths; empty without any.

    Returns:
        The chapters.
    """
    tables, published = _score_tables(record, scores), _published_table(record.published, scores)
    figure, note = _figure(scores), Text(_note(record, scores))
    caution = [Text(_CAUTION)] if published else []
    return ReportContent(
        lead=_lead(record, scores),
        parts=[
            Part("scores", "Scores", [*tables, *published, _picture(figure, scores), note]),
            effective_length.chapter(lengths),
            Part("examples", "Which questions fail?", examples.question_blocks(folder, record, scores)),
            Part("published", "Comparison with published values", published_comparison.comparison_blocks(record, runs)),
        ],
        build_measurements=partial(_measurements, scores),
        markdown=markdown([*tables, *published, note, *lengths, *caution]).lstrip(),
        figure=figure,
    )


def _score_tables(record: SweepRecord, scores: Scores) -> list[Table]:
    """Return the tables of scores: by length for each set, by set for each length, and by distance of the answer."""
    tables = []
    if len(scores.lengths) > 1:
        tables += [_length_table(record, scores, label, metric) for label, metric in _shown_metrics(scores)]
    if len(scores.sets) > 1 or len(scores.lengths) == 1:
        tables += [_set_table(record, scores, length) for length in scores.lengths]
    return tables + [table for label in scores.sets if (table := _distance_table(scores, label))]


def _picture(figure: Figure, scores: Scores) -> Picture:
    """Return the figure for the page, with its numbers as the description in words."""
    by_set = []
    for label in scores.sets:
        curves = [f"{name} {_means_text(scores.values_by_length(label, name))}" for name in scores.methods]
        by_set.append(f"{label}: {', '.join(curves)}")
    axis = "the set; shaded: the mean of the sets"
    if len(scores.lengths) > 1:
        axis = "the context length; dashed: of the fine-tuning"
    return svg_picture(figure, f"Scores in percent. {'; '.join(by_set)}.", f"Score in % against {axis}.")


def _set_table(record: SweepRecord, scores: Scores, length: int) -> Table:
    """Return the table of methods × sets at a context length, with the mean over sets and the published mean."""
    columns = {label: _column(scores, label, length) for label in scores.sets}
    published = record.published if published_axis(record.published) == "set" else None
    averaged = scores.sets_in_mean()
    by_question: dict[str, _ColumnScores] = {
        label: partial(scores.clustered_scores, label, length=length) for label in scores.sets
    }
    if len(scores.sets) > 1:
        columns[MEAN] = lambda method: scores.set_means(method).get(length, [])
        by_question[MEAN] = partial(scores.clustered_set_means, length=length)
    caption = f"Score in % on {length} tokens ({_metric_text(scores)})."
    if 1 < len(averaged) < len(scores.sets):
        caption += f" Mean of {', '.join(averaged)}."
    return _table(scores, columns, caption, _published_means(published, scores, averaged), by_question)


def _column(scores: Scores, label: str, length: int, metric: str | None = None) -> _ColumnValues:
    """Return the column of a set at a context length; ``metric`` None: the metric of its score."""
    return lambda method: scores.values_by_length(label, method, metric).get(length, [])


def _shown_metrics(scores: Scores) -> list[tuple[str, str]]:
    """Return set and metric of each table by length.

    Each set has a table of its score. A set with few metrics also has a table of each metric that differs from the
    score.
    """
    pairs = []
    for label in scores.sets:
        metrics, score_metric = scores.set_metrics(label), scores.set_metric(label)
        for metric in metrics:
            is_further = len(metrics) <= _MAX_METRICS and _differs_from_score(scores, label, metric)
            if metric == score_metric or is_further:
                pairs.append((label, metric))
    return pairs


def _differs_from_score(scores: Scores, label: str, metric: str) -> bool:
    return any(
        scores.values_by_length(label, name, metric) != scores.values_by_length(label, name) for name in scores.methods
    )


def _length_table(record: SweepRecord, scores: Scores, label: str, metric: str) -> Table:
    """Return the table of methods × context lengths on a set, with their mean and the published mean."""
    columns = {str(length): _column(scores, label, length, metric) for length in scores.lengths}
    columns[MEAN] = lambda method: scores.seed_means(label, method, metric)
    by_question: dict[str, _ColumnScores] = {}
    if metric == scores.set_metric(label):
        by_question = {str(length): partial(scores.clustered_scores, label, length=length) for length in scores.lengths}
        by_question[MEAN] = partial(scores.clustered_scores, label)
    by_length = published_axis(record.published) == "length"
    is_comparable = by_length and len(scores.sets) == 1 and metric == scores.set_metric(label)
    published = record.published if is_comparable else None
    caption = (
        f"{label}: {metric} in % by context length (prompt and answer), without further fine-tuning; fine-tuned at "
        f"{scores.fine_tuning_length} tokens."
    )
    if limits := _position_limits(record, scores):
        caption += f" Positions end: {', '.join(f'{name} at {limit}' for name, limit in limits.items())}."
    means = _published_means(published, scores, list(map(str, scores.lengths)))
    return _table(scores, columns, caption, means, by_question)


def _position_limits(record: SweepRecord, scores: Scores) -> dict[str, int]:
    """Return the largest number of tokens that a method has positions for, for methods where lengths exceed it."""
    limits = {name: record.method(name).position_limit(scores.train_length) for name in scores.methods}
    longest = scores.lengths[-1]
    return {name: limit for name, limit in limits.items() if limit is not None and limit < longest}


def _distance_table(scores: Scores, label: str) -> Table | None:
    """Return the table of methods × distances of the answer on a set at the longest context, if results have them."""
    length = scores.lengths[-1]
    bands = scores.values_by_distance(label, length)
    columns = {f"{least}–{most}": partial(_seed_values, values) for (least, most), values in bands.items()}
    caption = (
        f"{label}: {scores.set_metric(label)} in % on {length} tokens, by words between the answer and the end of the "
        "document; each column has about an eighth of the questions."
    )
    return _table(scores, columns, caption, {}) if columns else None


def _curve_by_distance(
    bands: Mapping[tuple[int, int], Mapping[str, list[float]]], method: str
) -> dict[int, list[float]]:
    """Return the scores of a method by the middle of each band of distances, in words."""
    return {(least + most) // 2: values[method] for (least, most), values in bands.items() if method in values}


def _seed_values(values: Mapping[str, list[float]], method: str) -> list[float]:
    return values.get(method, [])


def _table(
    scores: Scores,
    columns: Mapping[str, _ColumnValues],
    caption: str,
    published_means: Mapping[str, float | None],
    by_question: Mapping[str, _ColumnScores] = MappingProxyType({}),
) -> Table:
    """Return a table of means over seeds.

    Args:
        scores: results, whose methods are the rows.
        columns: values of each column by its title.
        caption: caption.
        published_means: published mean by method, for the last column; empty: no such column.
        by_question: scores by question of the columns that have them.
    """
    cells: dict[str, list[Cell]] = {name: [] for name in scores.methods}
    several_seeds = is_incomplete = False
    compared: list[ClusteredScores] = []
    for title, values_of_method in columns.items():
        seeds = {name: values_of_method(name) for name in scores.methods}
        means = {name: _mean(values) for name, values in seeds.items()}
        best = _highest(means.values())
        several_seeds |= any(len(values) > 1 for values in seeds.values())
        errors = {name: by_question[title](name) if title in by_question else None for name in seeds}
        compared += [own_scores for own_scores in errors.values() if own_scores is not None]
        measured = {name: mean for name, mean in means.items() if mean is not None}
        ties = uncertainty.ties_with_best(measured, errors)
        is_incomplete |= ties is None
        for name, values in seeds.items():
            if title == MEAN:
                cell = cell_with_range(means[name], ".2f", values, best)
            else:
                seed_range = f"{min(values):.2f}–{max(values):.2f}" if len(values) > 1 else ""
                cell = number_cell(means[name], ".2f", best, seed_range)
            own_scores = errors[name]
            if own_scores is not None and means[name] is not None:
                estimate = own_scores.estimate()
                suffix = uncertainty.half_width_text(estimate.low, estimate.high, ".2f")
                cell = uncertainty.with_suffix(cell, suffix, name in (ties or ()))
            cells[name].append(cell)
    if published_means:
        for name in scores.methods:
            cells[name].append(number_cell(published_means.get(name), ".2f"))
    if several_seeds:
        caption += " Mean over the seeds; next to it the range over seeds."
    if compared:
        caption += f" ±: half of the 95 % interval over {uncertainty.describe_clusters(compared)}."
        if len(scores.methods) > 1:
            caption += (
                f" {uncertainty.TIE_MARK}: not shown to differ from the largest value of the column (the same "
                "questions, paired; Holm's correction for the methods of the column, p ≥ 0.05)."
            )
        if is_incomplete:
            caption += " Columns in which a method lacks the scores of single questions have no such mark."
    head = ["method", *columns, *(["published mean"] if published_means else [])]
    return Table(caption, head, [TableRow(name, row) for name, row in cells.items()], best_label="largest")


def _published_means(published: Published | None, scores: Scores, keys: Sequence[str]) -> dict[str, float | None]:
    """Return the published mean of each method over several sets or lengths (``keys``); empty if none is known."""
    if published is None or len(keys) < 2:
        return {}
    means = {name: published_mean(published, name, keys) for name in scores.methods if name in published.values}
    return means if any(mean is not None for mean in means.values()) else {}


def _published_table(published: Published | None, scores: Scores) -> list[Block]:
    """Build the table of the published values of the compared methods; nothing if there are none."""
    if published is None:
        return []
    values = {name: published.values[name] for name in scores.methods if name in published.values}
    if not values:
        return []
    keys = list(dict.fromkeys(key for row in values.values() for key in row if key != MEAN))  # sets or lengths
    best = {key: _highest(row.get(key) for row in values.values()) for key in keys}
    means = {name: published_mean(published, name) for name in values}
    best_mean = _highest(means.values())
    number_format = published.number_format
    rows = []
    for name, row in values.items():
        cells = [number_cell(row.get(key), number_format, best[key]) for key in keys]
        rows.append(TableRow(name, [*cells, number_cell(means[name], number_format, best_mean)]))
    return [Table(f"Published: {published.source}.", ["published", *keys, MEAN], rows, best_label="largest")]


def _figure(scores: Scores) -> Figure:
    """Draw the scores by context length, or by set if there is one length."""
    return _draw_by_length(scores) if len(scores.lengths) > 1 else _draw_by_set(scores)


def _draw_by_length(scores: Scores) -> Figure:
    """Draw a panel for each set and metric, and one by distance of the answer for each set that has distances."""
    panels = {}
    for label, metric in _shown_metrics(scores):
        curves = {name: scores.values_by_length(label, name, metric) for name in scores.methods}
        panels[label, metric] = _without_empty(curves)
    by_distance = {}
    for label in scores.sets:
        if bands := scores.values_by_distance(label, scores.lengths[-1]):
            curves = {name: _curve_by_distance(bands, name) for name in scores.methods}
            by_distance[label, scores.set_metric(label)] = _without_empty(curves)
    return score_curves.draw_scores_over_length(panels, scores.fine_tuning_length, by_distance)


def _without_empty(curves: Mapping[str, dict[int, list[float]]]) -> dict[str, dict[int, list[float]]]:
    return {name: curve for name, curve in curves.items() if curve}


def _draw_by_set(scores: Scores) -> Figure:
    [length] = scores.lengths
    values = {
        label: {name: scores.values_by_length(label, name).get(length, []) for name in scores.methods}
        for label in scores.sets
    }
    if len(scores.sets) > 1:
        values[MEAN] = {name: scores.set_means(name).get(length, []) for name in scores.methods}
    return score_curves.draw_scores_by_set(values, f"{length} tokens, {_metric_text(scores)}")


def _metric_text(scores: Scores) -> str:
    """Return in words which sets are scored by which metric, such as "em of quality; f1 of the others"."""
    sets_by_metric: dict[str, list[str]] = {}
    for label in scores.sets:
        sets_by_metric.setdefault(scores.set_metric(label), []).append(label)
    if len(sets_by_metric) == 1:
        return next(iter(sets_by_metric))
    commonest = max(sets_by_metric, key=lambda metric: len(sets_by_metric[metric]))
    last = []
    if len(sets_by_metric[commonest]) >= _MIN_ABBREVIATED:
        del sets_by_metric[commonest]
        last = [f"{commonest} of the others"]
    return "; ".join([*(f"{metric} of {', '.join(labels)}" for metric, labels in sets_by_metric.items()), *last])


def _note(record: SweepRecord, scores: Scores) -> str:
    """Return in words how the questions are answered, and how many documents are truncated."""
    config = record.question_config
    truncated = sum(row.result.truncated_documents for row in scores.results)
    answers = sum(row.result.questions for row in scores.results)
    mode = beam = side = best = ""
    if config:
        mode = _ANSWER_MODES[config.answer_mode]
        beam = f", beam of {config.beam}" if config.beam > 1 else ""
        side = f", at their {config.truncate}" if truncated else ""
        best = ", by the checkpoint that was best in validation" if config.checkpoint == "best" else ""
    return (
        f"Answers of the {record.settings.split} split, {mode}{beam}{best}. Documents truncated for "
        f"{truncated / answers:.1%} of all answers{side}."
    )


def _lead(record: SweepRecord, scores: Scores) -> list[str]:
    """Return the first paragraph and the list of main results."""
    methods, questions = scores.methods, sorted({row.result.questions for row in scores.results})
    counts = f"{questions[0]:,} to {questions[-1]:,}" if len(questions) > 1 else f"{questions[0]:,}"
    lengths = ", ".join(map(str, scores.lengths))
    noun = "methods" if len(methods) > 1 else "method"
    lines = [
        f"{len(methods)} {noun}, trained on text at {scores.train_length} tokens, fine-tuned "
        f"on questions at {scores.fine_tuning_length} and evaluated at {lengths}; {counts} questions of "
        f"{record.settings.split} of {', '.join(scores.sets)}."
    ]
    averaged = scores.sets_in_mean()
    sets = f", mean of {len(averaged)} sets" if len(averaged) > 1 else ""
    for length in dict.fromkeys((scores.lengths[0], scores.lengths[-1])):
        means = {name: mean for name in methods if (mean := _mean(scores.set_means(name).get(length, []))) is not None}
        if means:
            best = max(means, key=means.__getitem__)
            lines.append(f"Best score on {length} tokens{sets}: {best}, {means[best]:.2f} %.")
    return lines


def _measurements(scores: Scores) -> Table:
    """Return the table with a row for each result."""
    has_errors = any(row.result.question_scores is not None for row in scores.results)
    rows = []
    for row in scores.results:
        r = row.result
        others = ", ".join(f"{name} {value:.2f}" for name, value in r.metrics.items() if name != r.published)
        cells = [Cell(str(row.seed), row.seed), Cell(r.set), Cell(str(r.length), r.length), Cell(r.published)]
        cells += [number_cell(r.score, ".3f"), text_cell(others)]
        cells += [Cell(f"{count:,}", count) for count in (r.questions, r.truncated_documents, r.empty)]
        cells += uncertainty.error_cells(uncertainty.question_columns(r), ".3f") if has_errors else []
        rows.append(TableRow(row.method, [*cells, number_cell(r.seconds, ".1f")]))
    head = ["method", "seed", "set", "length", "metric", "score", "others", "questions", "truncated", "empty"]
    head += uncertainty.error_titles() if has_errors else []
    return Table("Contents of scores.csv, and costs of each measurement.", [*head, "seconds"], rows, is_folded=True)


def _highest(values: Iterable[float | None]) -> float | None:
    return max((value for value in values if value is not None), default=None)


def _mean(values: Sequence[float]) -> float | None:
    return sum(values) / len(values) if values else None


def _means_text(curve: Mapping[int, Sequence[float]]) -> str:
    return ", ".join(f"{sum(values) / len(values):.2f} at {n}" for n, values in curve.items())
