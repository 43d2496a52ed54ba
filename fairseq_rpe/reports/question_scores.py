"""What a sweep over questions found: the score of each method on each set and context length, and means of them."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Literal

from fairseq_rpe.core.errors import UserError
from fairseq_rpe.evaluation.question_records import QuestionResult
from fairseq_rpe.reports.sweep_results import (
    ExactAnswers,
    Finding,
    Perplexities,
    asked,
    by_length,
    exact_answers,
    grouped,
    measured,
    perplexities,
)
from fairseq_rpe.sweeps.sweep_record import Published, State, SweepFolder
from fairseq_rpe.utils.table import csv_text

MEAN = "mean"  # in place of a set, of published values


@dataclass(frozen=True)
class Scores:
    """Scores in per cent; the context length bounds what is read and written.

    ``tuned_at``: tokens of the fine-tuning, ``trained_at`` of the training before. ``averaged``: the sets that a mean
    is of; none: all.
    """

    rows: Sequence[Finding[QuestionResult]]
    tuned_at: int
    trained_at: int
    averaged: Sequence[str] = ()

    @cached_property
    def _ambiguous(self) -> set[str]:
        """The sets that several folders have."""
        folders = grouped(self.rows, lambda row: row.result.set)
        return {name for name, rows in folders.items() if len({row.folder for row in rows}) > 1}

    @cached_property
    def _by_set(self) -> dict[str, list[Finding[QuestionResult]]]:
        return grouped(self.rows, self.label)

    @cached_property
    def _by_set_and_method(self) -> dict[tuple[str, str], list[Finding[QuestionResult]]]:
        return grouped(self.rows, lambda row: (self.label(row), row.method))

    @cached_property
    def _known(self) -> dict[tuple[str, str, str | None], dict[int, list[float]]]:
        """What :meth:`of` has computed: tables ask for it at every length."""
        return {}

    @cached_property
    def _means(self) -> dict[str, dict[int, list[float]]]:
        """What :meth:`over_sets` has computed."""
        return {}

    @property
    def sets(self) -> list[str]:
        return list(self._by_set)

    @cached_property
    def methods(self) -> list[str]:
        return list(dict.fromkeys(row.method for row in self.rows))

    @cached_property
    def lengths(self) -> list[int]:
        return sorted({row.result.length for row in self.rows})

    def label(self, row: Finding[QuestionResult]) -> str:
        """The name of a result's set, after that of its folder where another folder has the same set."""
        return f"{row.folder}/{row.result.set}" if row.result.set in self._ambiguous else row.result.set

    def metric(self, label: str) -> str:
        """What a set is scored by."""
        return self._by_set[label][0].result.published

    def metrics(self, label: str) -> list[str]:
        """All that is known of a set, what it is scored by first."""
        own = (row.result for row in self._by_set.get(label, ()))
        return list(dict.fromkeys(name for one in own for name in (one.published, *one.metrics)))

    def of(self, label: str, method: str, metric: str | None = None) -> dict[int, list[float]]:
        """By context length, the score of each seed on a set, or another metric."""
        if (label, method, metric) not in self._known:
            own = [row.result for row in self._by_set_and_method.get((label, method), ())]
            values = (
                (one.length, one.score if metric is None else {one.published: one.score, **one.metrics}.get(metric))
                for one in own
            )
            self._known[label, method, metric] = by_length((n, value) for n, value in values if value is not None)
        return self._known[label, method, metric]

    def by_distance(self, label: str, length: int) -> dict[tuple[int, int], dict[str, list[float]]]:
        """By least and most words between answer and document's end, if known, the score of each method's seeds."""
        found: dict[tuple[int, int], dict[str, list[float]]] = {}
        for row in self._by_set.get(label, ()):
            if row.result.length == length:
                for band in row.result.distances:
                    found.setdefault((band.least, band.most), {}).setdefault(row.method, []).append(band.score)
        return found

    def mean_sets(self) -> list[str]:
        """The sets that a mean over sets is of."""
        return [label for label in self.sets if label in self.averaged] or self.sets

    def over_sets(self, method: str) -> dict[int, list[float]]:
        """By context length, the mean over sets of each seed that has them all."""
        if method not in self._means:
            wanted = self.mean_sets()
            runs: dict[tuple[int, int], dict[str, float]] = {}
            for label in wanted:
                for row in self._by_set_and_method.get((label, method), ()):
                    runs.setdefault((row.result.length, row.seed), {})[label] = row.result.score
            whole = {key: own for key, own in runs.items() if len(own) == len(wanted)}
            self._means[method] = by_length((n, sum(own.values()) / len(own)) for (n, _), own in sorted(whole.items()))
        return self._means[method]

    def over_lengths(self, label: str, method: str, metric: str | None = None) -> list[float]:
        """The mean over all context lengths of each seed; nothing where one is missing."""
        values = list(self.of(label, method, metric).values())
        if len(values) < len(self.lengths) or len({len(seeds) for seeds in values}) > 1:
            return []
        return [sum(own) / len(own) for own in zip(*values, strict=True)]

    def csv(self) -> str:
        """A line for each metric of each result; ``counts``: whether it is the one that tables have."""
        head = ("method", "folder", "set", "length", "metric", "value", "counts", "questions", "cut", "empty", "seed")
        lines = []
        for row in self.rows:
            one = row.result
            about = (one.questions, one.cut_documents, one.empty, row.seed)
            for name, value in {one.published: one.score, **one.metrics}.items():
                counts = "yes" if name == one.published else "no"
                lines.append((row.method, row.folder, one.set, one.length, name, value, counts, *about))
        return csv_text(head, lines)


def by_of(known: Published | None) -> Literal["set", "length"] | None:
    """Whether published scores are by set or by context length."""
    if known is None or not known.values:
        return None
    return "length" if all(key.isdigit() for row in known.values.values() for key in row) else "set"


def published_mean(known: Published, method: str, keys: Sequence[str] = ()) -> float | None:
    """The mean of a method's published scores, over all sets or lengths or over ``keys``; ``None``: not all are there.

    Where the mean alone is published, it is that.
    """
    row, every = known.values[method], {key for one in known.values.values() for key in one if key != MEAN}
    if MEAN in row:
        return row[MEAN] if set(keys or every) == every else None
    wanted = [row.get(key) for key in keys or row]
    given = [value for value in wanted if value is not None]
    return sum(given) / len(given) if given and len(given) == len(wanted) else None


def scores(folder: SweepFolder, state: State) -> Scores:
    """Of a sweep over questions, by folder, method, seed, set and context length."""
    rows = []
    for name, method, seed, run in asked(folder, state):
        questions = state.questions[name or ""]
        own = [
            one
            for one in measured(QuestionResult, run, method, state.asking.checkpoint if state.asking else "last")
            if one.data == questions.digest
            and one.subset == state.settings.subset
            and one.set in questions.sets
            and one.length_penalty in (None, 1.0)
            and (state.asking is None or all(getattr(one, k) == v for k, v in state.asking.options.items()))
            and one.length in state.lengths
        ]
        own.sort(key=lambda one: (questions.sets.index(one.set), one.length))
        rows += [Finding(method.name, seed, one, folder=name) for one in own]
    known = state.published
    averaged = {key for row in known.values.values() for key in row} if known and by_of(known) == "set" else set()
    tuned = (state.tuned and state.tuned.tokens) or state.settings.tokens or 0
    return Scores(rows, tuned, state.settings.tokens or 0, sorted(averaged - {MEAN}))


def collect(folder: SweepFolder, state: State) -> "Perplexities | ExactAnswers | Scores":
    """The results of the runs that are finished.

    Raises UserError: there are none.
    """
    ways = {"text": perplexities, "algorithms": exact_answers, "answers": scores}
    found = ways[state.kind](folder, state)
    if not found.rows:
        raise UserError(f"{folder.path} holds no finished evaluation yet: run its sweep first")
    return found
