"""Scores of a sweep over questions by method, set and context length, with their means."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Literal

from fairseq_rpe.evaluation.question_records import QuestionResult
from fairseq_rpe.reports import uncertainty
from fairseq_rpe.reports.sweep_results import (
    SweepResult,
    SweepResults,
    current_results,
    group_by,
    group_by_length,
    planned_runs,
)
from fairseq_rpe.reports.uncertainty import ClusteredScores
from fairseq_rpe.sweeps.sweep_record import EvaluationQuestions, Published, SweepFolder, SweepRecord
from fairseq_rpe.utils.table import csv_text

MEAN = "mean"  # key of a mean among published values, in place of a set


@dataclass(frozen=True)
class Scores(SweepResults):
    """Scores in percent. The context length is that of prompt and answer together.

    Attributes:
        results: results by dataset, method, seed, set and context length.
        fine_tuning_length: context length of the fine-tuning in tokens.
        train_length: training length of the pre-training in tokens.
        averaged_sets: sets that means over sets include; empty: all.
    """

    results: Sequence[SweepResult[QuestionResult]]
    fine_tuning_length: int
    train_length: int
    averaged_sets: Sequence[str] = ()

    @cached_property
    def _ambiguous(self) -> set[str]:
        """Names of sets that occur in more than one dataset."""
        by_name = group_by(self.results, lambda row: row.result.set)
        return {name for name, rows in by_name.items() if len({row.folder for row in rows}) > 1}

    @cached_property
    def _by_set(self) -> dict[str, list[SweepResult[QuestionResult]]]:
        return group_by(self.results, self.set_label)

    @cached_property
    def _by_set_and_method(self) -> dict[tuple[str, str], list[SweepResult[QuestionResult]]]:
        return group_by(self.results, lambda row: (self.set_label(row), row.method))

    @cached_property
    def _values_cache(self) -> dict[tuple[str, str, str | None], dict[int, list[float]]]:
        """Cache of :meth:`values_by_length`, which tables need at every length."""
        return {}

    @cached_property
    def _set_means_cache(self) -> dict[str, dict[int, list[float]]]:
        """Cache of :meth:`set_means`."""
        return {}

    @property
    def sets(self) -> list[str]:
        """Labels of the sets with results."""
        return list(self._by_set)

    @cached_property
    def methods(self) -> list[str]:
        """Names of the methods with results."""
        return list(dict.fromkeys(row.method for row in self.results))

    @cached_property
    def lengths(self) -> list[int]:
        """All context lengths, ascending."""
        return sorted({row.result.length for row in self.results})

    def set_label(self, row: SweepResult[QuestionResult]) -> str:
        """Return the name of a result's set, with the dataset's name if several datasets have this set."""
        return f"{row.folder}/{row.result.set}" if row.result.set in self._ambiguous else row.result.set

    def set_metric(self, label: str) -> str:
        """Return the metric that a set is scored by."""
        return self._by_set[label][0].result.published

    def set_metrics(self, label: str) -> list[str]:
        """Return all metrics of a set, that of its score first."""
        return list(dict.fromkeys(name for row in self._by_set.get(label, ()) for name in all_metrics(row.result)))

    def values_by_length(self, label: str, method: str, metric: str | None = None) -> dict[int, list[float]]:
        """Return the values of all seeds on a set by context length, in percent.

        Args:
            label: label of the set.
            method: name of the method.
            metric: name of the metric; None: the score, whichever metric it is.
        """
        key = (label, method, metric)
        if key not in self._values_cache:
            pairs = []
            for row in self._by_set_and_method.get((label, method), ()):
                value = row.result.score if metric is None else all_metrics(row.result).get(metric)
                if value is not None:
                    pairs.append((row.result.length, value))
            self._values_cache[key] = group_by_length(pairs)
        return self._values_cache[key]

    def values_by_distance(self, label: str, length: int) -> dict[tuple[int, int], dict[str, list[float]]]:
        """Return the scores of all seeds by distance of the answer, then by method.

        Args:
            label: label of the set.
            length: context length.

        Returns:
            Scores by least and most number of words between the answer and the end of the document.
        """
        bands: dict[tuple[int, int], dict[str, list[float]]] = {}
        for row in self._by_set.get(label, ()):
            if row.result.length == length:
                for band in row.result.distances:
                    bands.setdefault((band.least, band.most), {}).setdefault(row.method, []).append(band.score)
        return bands

    def clustered_scores(self, label: str, method: str, length: int | None = None) -> ClusteredScores | None:
        """Return the scores on a set by question, as mean over seeds.

        Args:
            label: label of the set.
            method: name of the method.
            length: context length; None: mean over all context lengths.

        Returns:
            The scores; None if a result does not have them, or for a mean over lengths that a result is missing from.
        """
        rows = self._by_set_and_method.get((label, method), ())
        chosen = [row.result for row in rows if length in (None, row.result.length)]
        if length is None and not self.seed_means(label, method):
            return None
        return uncertainty.average([uncertainty.question_scores(result) for result in chosen])

    def clustered_set_means(self, method: str, length: int) -> ClusteredScores | None:
        """Return the scores by question over the sets that means over sets include; None if they are unknown."""
        return uncertainty.join([self.clustered_scores(label, method, length) for label in self.sets_in_mean()])

    def sets_in_mean(self) -> list[str]:
        """Return the sets that means over sets include."""
        return [label for label in self.sets if label in self.averaged_sets] or self.sets

    def set_means(self, method: str) -> dict[int, list[float]]:
        """Return, by context length, the mean over sets for each seed that has results on all of them."""
        if method not in self._set_means_cache:
            sets = self.sets_in_mean()
            scores: dict[tuple[int, int], dict[str, float]] = {}  # (length, seed) -> set -> score
            for label in sets:
                for row in self._by_set_and_method.get((label, method), ()):
                    scores.setdefault((row.result.length, row.seed), {})[label] = row.result.score
            self._set_means_cache[method] = group_by_length(
                (length, sum(by_set.values()) / len(sets))
                for (length, _), by_set in sorted(scores.items())
                if len(by_set) == len(sets)
            )
        return self._set_means_cache[method]

    def seed_means(self, label: str, method: str, metric: str | None = None) -> list[float]:
        """Return each seed's mean over all context lengths, or an empty list if a result is missing."""
        values = list(self.values_by_length(label, method, metric).values())
        if len(values) < len(self.lengths) or len({len(seeds) for seeds in values}) > 1:
            return []
        return [sum(scores) / len(scores) for scores in zip(*values, strict=True)]

    def csv(self, with_bounds: bool = True) -> str:
        """Return a CSV row for each metric of each result; ``counts`` is "yes" if the metric is the set's score.

        Args:
            with_bounds: whether to compute the bounds of intervals.
        """
        head = ["method", "folder", "set", "length", "metric", "value", "counts"]
        head += ["questions", "truncated", "empty", "seed", *uncertainty.CSV_COLUMNS]
        lines = []
        for row in self.results:
            r = row.result
            numbers = (r.questions, r.truncated_documents, r.empty, row.seed)
            for name, value in all_metrics(r).items():
                is_score = name == r.published
                counts = "yes" if is_score else "no"
                bounds = uncertainty.question_columns(r, with_bounds) if is_score else uncertainty.UNKNOWN
                lines.append((row.method, row.folder, r.set, r.length, name, value, counts, *numbers, *bounds))
        return csv_text(head, lines)


def all_metrics(result: QuestionResult) -> dict[str, float]:
    """Return the metrics of a result in percent by name, that of its score first."""
    return {result.published: result.score, **result.metrics}


def published_axis(published: Published | None) -> Literal["set", "length"] | None:
    """Return whether published scores are by ``set`` or by context ``length``; None without published scores."""
    if published is None or not published.values:
        return None
    return "length" if all(key.isdigit() for row in published.values.values() for key in row) else "set"


def published_mean(published: Published, method: str, keys: Sequence[str] = ()) -> float | None:
    """Return the mean of a method's published scores.

    Args:
        published: published scores.
        method: name of the method.
        keys: sets or lengths to average; empty: all.

    Returns:
        The mean; None if a score is missing. If only a mean is published, that mean, or None if ``keys`` are not all
        sets or lengths.
    """
    row = published.values[method]
    if MEAN in row:
        all_keys = {key for scores in published.values.values() for key in scores if key != MEAN}
        return row[MEAN] if set(keys or all_keys) == all_keys else None
    scores = [row.get(key) for key in keys or row]
    numbers = [score for score in scores if score is not None]
    return sum(numbers) / len(numbers) if numbers and len(numbers) == len(scores) else None


def load_scores(folder: SweepFolder, record: SweepRecord) -> Scores:
    """Read the results of a sweep over questions."""
    which = record.question_config.checkpoint if record.question_config else "last"
    rows = []
    for run in planned_runs(folder, record):
        questions = record.questions[run.task or ""]
        results = [
            result
            for result in current_results(QuestionResult, run.folder, run.method, which)
            if _is_planned(result, record, questions)
        ]
        results.sort(key=lambda result: (questions.sets.index(result.set), result.length))
        rows += [SweepResult(run.method.name, run.seed, result, folder=run.task) for result in results]
    published, averaged = record.published, set()
    if published and published_axis(published) == "set":
        averaged = {key for row in published.values.values() for key in row} - {MEAN}
    train_length = record.settings.tokens or 0
    fine_tuning_length = (record.fine_tuning and record.fine_tuning.tokens) or train_length
    return Scores(rows, fine_tuning_length, train_length, sorted(averaged))


def _is_planned(result: QuestionResult, record: SweepRecord, questions: EvaluationQuestions) -> bool:
    """Return whether a result is of the questions, the lengths and the ways of answering that the sweep records."""
    options = record.question_config.options if record.question_config else {}
    return (
        result.data == questions.digest
        and result.split == record.settings.split
        and result.set in questions.sets
        and result.length in record.lengths
        and result.length_penalty in (None, 1.0)
        and all(getattr(result, name) == value for name, value in options.items())
    )
