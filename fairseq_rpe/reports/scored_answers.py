"""What a sweep over questions found: the score of each method on each set and context length, and means of them."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from fairseq_rpe.core.errors import UserError
from fairseq_rpe.core.table import csv_text
from fairseq_rpe.evaluation.question_results import QuestionResult
from fairseq_rpe.reports.findings import (
    ExactAnswers,
    Finding,
    Perplexities,
    asked,
    by_length,
    exact_answers,
    measured,
    perplexities,
)
from fairseq_rpe.sweeps.state import Published, State, SweepFolder

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

    @property
    def sets(self) -> list[str]:
        return list(dict.fromkeys(self.label(row) for row in self.rows))

    @property
    def methods(self) -> list[str]:
        return list(dict.fromkeys(row.method for row in self.rows))

    @property
    def lengths(self) -> list[int]:
        return sorted({row.result.length for row in self.rows})

    def label(self, row: Finding[QuestionResult]) -> str:
        """The name of a result's set, after that of its folder where another folder has the same set."""
        folders = {one.folder for one in self.rows if one.result.set == row.result.set}
        return row.result.set if len(folders) == 1 else f"{row.folder}/{row.result.set}"

    def metric(self, label: str) -> str:
        """What a set is scored by."""
        return next(row.result.published for row in self.rows if self.label(row) == label)

    def metrics(self, label: str) -> list[str]:
        """All that is known of a set, what it is scored by first."""
        own = (row.result for row in self.rows if self.label(row) == label)
        return list(dict.fromkeys(name for one in own for name in (one.published, *one.metrics)))

    def of(self, label: str, method: str, metric: str | None = None) -> dict[int, list[float]]:
        """By context length, the score of each seed on a set, or another metric."""
        own = [row.result for row in self.rows if row.method == method and self.label(row) == label]
        if metric is None:
            return by_length((one.length, one.score) for one in own)
        values = [(one.length, {one.published: one.score, **one.metrics}.get(metric)) for one in own]
        return by_length((length, value) for length, value in values if value is not None)

    def by_distance(self, label: str, length: int) -> dict[tuple[int, int], dict[str, list[float]]]:
        """By least and most words between answer and document's end, if known, the score of each method's seeds."""
        found: dict[tuple[int, int], dict[str, list[float]]] = {}
        for row in self.rows:
            if self.label(row) == label and row.result.length == length:
                for band in row.result.distances:
                    found.setdefault((band.least, band.most), {}).setdefault(row.method, []).append(band.score)
        return found

    def mean_sets(self) -> list[str]:
        """The sets that a mean over sets is of."""
        return [label for label in self.sets if label in self.averaged] or self.sets

    def over_sets(self, method: str) -> dict[int, list[float]]:
        """By context length, the mean over sets of each seed that has them all."""
        wanted = self.mean_sets()
        runs: dict[tuple[int, int], dict[str, float]] = {}
        for row in self.rows:
            if row.method == method and (label := self.label(row)) in wanted:
                runs.setdefault((row.result.length, row.seed), {})[label] = row.result.score
        whole = {key: own for key, own in runs.items() if len(own) == len(wanted)}
        return by_length((n, sum(own.values()) / len(own)) for (n, _), own in sorted(whole.items()))

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
