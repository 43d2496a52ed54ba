"""Chapters on a sweep over questions: scores by set and by context length, with published scores."""

from collections.abc import Callable, Mapping, Sequence
from functools import partial

from matplotlib.figure import Figure

from fairseq_rpe.evaluation.position_limits import max_length
from fairseq_rpe.figures import score_curves
from fairseq_rpe.reports.chapters import published_comparison
from fairseq_rpe.reports.chapters.training import TrainedRun
from fairseq_rpe.reports.page import Block, Part, ReportContent, Text, markdown, svg_picture
from fairseq_rpe.reports.question_scores import MEAN, Scores, published_axis, published_mean
from fairseq_rpe.sweeps.sweep_record import Published, SweepRecord
from fairseq_rpe.utils.table import Cell, Table, TableRow, cell_with_range, number_cell, text_cell

_ANSWER_MODES = {"generation": "generated freely", "likelihood": "the likeliest of the choices"}
_MAX_METRICS = 2  # sets with at most so many metrics have a table for each
_CAUTION = "Published values cannot be compared one by one: the page lists what differs or is not stated."


def build_content(record: SweepRecord, runs: Sequence[TrainedRun], scores: Scores) -> ReportContent:
    """Build the report of a sweep over questions.

    Args:
        record: record of the sweep.
        runs: runs of the pre-training, then fine-tuned runs.
        scores: results.

    Returns:
        The chapters.
    """
    several = len(scores.lengths) > 1
    tables = (
        [_length_table(record, scores, label, metric) for label, metric in _shown_metrics(scores)] if several else []
    )
    if len(scores.sets) > 1 or not several:
        tables += [_set_table(record, scores, n) for n in scores.lengths]
    tables += [table for label in scores.sets if (table := _distance_table(scores, label))]
    published = _published_table(record.published, scores)
    figure = _figure(scores)
    alt = "; ".join(
        f"{label}: "
        + ", ".join(f"{name} {_means_text(scores.values_by_length(label, name))}" for name in scores.methods)
        for label in scores.sets
    )
    axis = "the context length; dashed: of the fine-tuning" if several else "the set; shaded: the mean of the sets"
    picture = svg_picture(figure, f"Scores in percent. {alt}.", f"Score in % against {axis}.")
    note = Text(_note(record, scores))
    return ReportContent(
        lead=_lead(record, scores),
        parts=[
            Part("scores", "Scores", [*tables, *published, picture, note]),
            Part("published", "Comparison with published values", published_comparison.comparison_blocks(record, runs)),
        ],
        build_measurements=partial(_measurements, scores),
        markdown=markdown([*tables, *published, note, *([Text(_CAUTION)] if published else [])]).lstrip(),
        figure=figure,
    )


def _set_table(record: SweepRecord, scores: Scores, length: int) -> Table:
    """Methods × sets at a context length, the mean over sets, and the published mean."""
    columns = {label: _column(scores, label, length) for label in scores.sets}
    published = record.published if published_axis(record.published) == "set" else None
    averaged = scores.sets_in_mean()
    if len(scores.sets) > 1:
        columns[MEAN] = lambda method: scores.set_means(method).get(length, [])
    caption = f"Score in % on {length} tokens ({_metric_text(scores)})."
    if 1 < len(averaged) < len(scores.sets):
        caption += f" Mean of {', '.join(averaged)}."
    return _table(scores, columns, caption, _published_means(published, scores, averaged))


def _column(scores: Scores, label: str, length: int, metric: str | None = None) -> Callable[[str], list[float]]:
    return lambda method: scores.values_by_length(label, method, metric).get(length, [])


def _shown_metrics(scores: Scores) -> list[tuple[str, str]]:
    """Set and metric of each table by length: the score, and for sets with few metrics the others that differ."""
    return [
        (label, metric)
        for label in scores.sets
        for metric in scores.set_metrics(label)
        if metric == scores.set_metric(label)
        or (
            len(scores.set_metrics(label)) <= _MAX_METRICS
            and any(
                scores.values_by_length(label, name, metric) != scores.values_by_length(label, name)
                for name in scores.methods
            )
        )
    ]


def _length_table(record: SweepRecord, scores: Scores, label: str, metric: str) -> Table:
    """Methods × context lengths on a set, their mean, and the published mean."""
    columns: dict[str, Callable[[str], list[float]]] = {
        str(n): _column(scores, label, n, metric) for n in scores.lengths
    }
    columns[MEAN] = lambda method: scores.seed_means(label, method, metric)
    by_length = published_axis(record.published) == "length"
    comparable = by_length and len(scores.sets) == 1 and metric == scores.set_metric(label)
    published = record.published if comparable else None
    caption = (
        f"{label}: {metric} in % by context length (prompt and answer), without further fine-tuning; fine-tuned at "
        f"{scores.fine_tuning_length} tokens."
    )
    limits = {}
    for name in scores.methods:
        limit = max_length(record.method(name).positions_eval, scores.train_length)
        if limit is not None and limit < scores.lengths[-1]:
            limits[name] = limit
    if limits:
        caption += f" Positions end: {', '.join(f'{name} at {limit}' for name, limit in limits.items())}."
    return _table(scores, columns, caption, _published_means(published, scores, list(map(str, scores.lengths))))


def _distance_table(scores: Scores, label: str) -> Table | None:
    """Methods × distances of the answer on a set, at the longest context."""
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
    """Scores of a method at the middle of each distance band."""
    return {(least + most) // 2: values[method] for (least, most), values in bands.items() if method in values}


def _seed_values(values: Mapping[str, list[float]], method: str) -> list[float]:
    return values.get(method, [])


def _table(
    scores: Scores,
    columns: Mapping[str, Callable[[str], list[float]]],
    caption: str,
    published_means: Mapping[str, float | None],
) -> Table:
    seeds = {head: {name: values(name) for name in scores.methods} for head, values in columns.items()}
    means = {head: {name: _mean(values) for name, values in column.items()} for head, column in seeds.items()}
    best = {head: max((v for v in column.values() if v is not None), default=None) for head, column in means.items()}

    def cell(head: str, name: str) -> Cell:
        mean, values = means[head][name], seeds[head][name]
        if head == MEAN:
            return cell_with_range(mean, ".2f", values, best[head])
        return number_cell(mean, ".2f", best[head], f"{min(values):.2f}–{max(values):.2f}" if len(values) > 1 else "")

    rows = []
    for name in scores.methods:
        cells = [cell(head, name) for head in columns]
        if published_means:
            cells.append(number_cell(published_means.get(name), ".2f"))
        rows.append(TableRow(name, cells))
    if any(len(values) > 1 for column in seeds.values() for values in column.values()):
        caption += " Mean over the seeds; next to it the range over seeds."
    heads = ["method", *columns, *(["published mean"] if published_means else [])]
    return Table(caption, heads, rows, best_label="largest")


def _published_means(published: Published | None, scores: Scores, keys: Sequence[str]) -> dict[str, float | None]:
    """Published mean of each method over the same sets or lengths, if there are several and any mean is known."""
    if published is None or len(keys) < 2:
        return {}
    means = {name: published_mean(published, name, keys) for name in scores.methods if name in published.values}
    return means if any(mean is not None for mean in means.values()) else {}


def _published_table(published: Published | None, scores: Scores) -> list[Block]:
    """Published values of the compared methods."""
    if published is None:
        return []
    values = {name: published.values[name] for name in scores.methods if name in published.values}
    if not values:
        return []
    heads = list(dict.fromkeys(key for row in values.values() for key in row if key != MEAN))
    means = {name: published_mean(published, name) for name in values}
    best = {head: max((row[head] for row in values.values() if head in row), default=None) for head in heads}
    best_mean = max((mean for mean in means.values() if mean is not None), default=None)
    form = published.number_format
    rows = []
    for name, row in values.items():
        cells = [number_cell(row.get(head), form, best[head]) for head in heads]
        rows.append(TableRow(name, [*cells, number_cell(means[name], form, best_mean)]))
    return [Table(f"Published: {published.source}.", ["published", *heads, MEAN], rows, best_label="largest")]


def _figure(scores: Scores) -> Figure:
    if len(scores.lengths) > 1:
        panels = {}
        for label, metric in _shown_metrics(scores):
            curves = {name: scores.values_by_length(label, name, metric) for name in scores.methods}
            panels[label, metric] = {name: curve for name, curve in curves.items() if curve}
        by_distance = {}
        for label in scores.sets:
            if bands := scores.values_by_distance(label, scores.lengths[-1]):
                curves = {name: _curve_by_distance(bands, name) for name in scores.methods}
                by_distance[label, scores.set_metric(label)] = {name: curve for name, curve in curves.items() if curve}
        return score_curves.draw_scores_over_length(panels, scores.fine_tuning_length, by_distance)
    (length,) = scores.lengths
    values = {
        label: {name: scores.values_by_length(label, name).get(length, []) for name in scores.methods}
        for label in scores.sets
    }
    if len(scores.sets) > 1:
        values[MEAN] = {name: scores.set_means(name).get(length, []) for name in scores.methods}
    return score_curves.draw_scores_by_set(values, f"{length} tokens, {_metric_text(scores)}")


def _metric_text(scores: Scores) -> str:
    """Return in words which sets are scored by which metric."""
    by_metric: dict[str, list[str]] = {}
    for label in scores.sets:
        by_metric.setdefault(scores.set_metric(label), []).append(label)
    if len(by_metric) == 1:
        return next(iter(by_metric))
    commonest = max(by_metric, key=lambda metric: len(by_metric[metric]))
    abbreviated = len(by_metric[commonest]) >= 5
    listed = [
        f"{metric} of {', '.join(labels)}"
        for metric, labels in by_metric.items()
        if metric != commonest or not abbreviated
    ]
    return "; ".join([*listed, *([f"{commonest} of the others"] if abbreviated else [])])


def _note(record: SweepRecord, scores: Scores) -> str:
    config, truncated = record.question_config, sum(row.result.truncated_documents for row in scores.results)
    answers = sum(row.result.questions for row in scores.results)
    mode = _ANSWER_MODES[config.answer_mode] if config else ""
    beam = f", beam of {config.beam}" if config and config.beam > 1 else ""
    side = f", at their {config.truncate}" if config and truncated else ""
    best = ", by the checkpoint that was best in validation" if config and config.checkpoint == "best" else ""
    return (
        f"Answers of the {record.settings.split} split, {mode}{beam}{best}. Documents truncated for "
        f"{truncated / answers:.1%} of all answers{side}."
    )


def _lead(record: SweepRecord, scores: Scores) -> list[str]:
    methods, questions = scores.methods, sorted({row.result.questions for row in scores.results})
    counts = f"{questions[0]:,} to {questions[-1]:,}" if len(questions) > 1 else f"{questions[0]:,}"
    lengths = ", ".join(map(str, scores.lengths))
    noun = "methods" if len(methods) > 1 else "method"
    lines = [
        f"{len(methods)} {noun}, trained on text at {scores.train_length} tokens, fine-tuned "
        f"on questions at {scores.fine_tuning_length} and evaluated at {lengths}; {counts} questions of "
        f"{record.settings.split} of {', '.join(scores.sets)}."
    ]
    for n in dict.fromkeys((scores.lengths[0], scores.lengths[-1])):
        values = {m: mean for m in methods if (mean := _mean(scores.set_means(m).get(n, []))) is not None}
        if values:
            best = max(values, key=values.__getitem__)
            sets = f", mean of {len(scores.sets_in_mean())} sets" if len(scores.sets_in_mean()) > 1 else ""
            lines.append(f"Best score on {n} tokens{sets}: {best}, {values[best]:.2f} %.")
    return lines


def _measurements(scores: Scores) -> Table:
    rows = []
    for row in scores.results:
        r = row.result
        others = ", ".join(f"{name} {value:.2f}" for name, value in r.metrics.items() if name != r.published)
        cells = [Cell(str(row.seed), row.seed), Cell(r.set), Cell(str(r.length), r.length), Cell(r.published)]
        cells += [number_cell(r.score, ".3f"), text_cell(others)]
        cells += [Cell(f"{n:,}", n) for n in (r.questions, r.truncated_documents, r.empty)]
        rows.append(TableRow(row.method, [*cells, number_cell(r.seconds, ".1f")]))
    head = ["method", "seed", "set", "length", "metric", "score", "others", "questions", "truncated", "empty"]
    return Table("Contents of scores.csv, and costs of each measurement.", [*head, "seconds"], rows, is_folded=True)


def _mean(values: Sequence[float]) -> float | None:
    return sum(values) / len(values) if values else None


def _means_text(curve: Mapping[int, Sequence[float]]) -> str:
    return ", ".join(f"{sum(values) / len(values):.2f} at {n}" for n, values in curve.items())
