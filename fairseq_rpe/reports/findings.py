"""The results that belong to a sweep's settings, in the order in which they were asked for, and their means."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeVar

from fairseq_rpe.algorithms import build
from fairseq_rpe.core.errors import UserError
from fairseq_rpe.core.table import csv_text
from fairseq_rpe.evaluation import results
from fairseq_rpe.evaluation.results import AnswerResult, TextResult
from fairseq_rpe.runs.run_folder import RunFolder
from fairseq_rpe.sweeps.state import Method, State, SweepFolder

Found = TypeVar("Found", TextResult, AnswerResult)


@dataclass(frozen=True)
class Perplexity:
    """A perplexity of a method; ``ratio``: over that of the same run at the training length, if it is there."""

    encoding: str
    seed: int
    ratio: float | None
    result: TextResult


@dataclass(frozen=True)
class Perplexities:
    """What a sweep on text found; ``trained_at`` in tokens."""

    rows: Sequence[Perplexity]
    trained_at: int

    @property
    def encodings(self) -> list[str]:
        return list(dict.fromkeys(row.encoding for row in self.rows))

    @property
    def lengths(self) -> list[int]:
        return sorted({row.result.length for row in self.rows})

    def of(self, encoding: str) -> dict[int, list[float]]:
        """By length, the perplexity of each seed."""
        found: dict[int, list[float]] = {}
        for row in self.rows:
            if row.encoding == encoding:
                found.setdefault(row.result.length, []).append(row.result.ppl)
        return dict(sorted(found.items()))

    def means(self, encoding: str) -> dict[int, float]:
        """By length, the mean over seeds."""
        return {length: sum(values) / len(values) for length, values in self.of(encoding).items()}

    def ratio(self, encoding: str) -> float | None:
        """At the longest length of all, the mean over seeds."""
        at = self.lengths[-1]
        found = [row.ratio for row in self.rows if (row.encoding, row.result.length) == (encoding, at)]
        return _mean(ratio for ratio in found if ratio is not None)

    def csv(self) -> str:
        head = ("encoding", "length", "ppl", "loss_base2", "tokens", "ratio", "seed")
        return csv_text(
            head,
            (
                (row.encoding, one.length, one.ppl, one.loss_base2, one.tokens, row.ratio, row.seed)
                for row in self.rows
                for one in [row.result]
            ),
        )


@dataclass(frozen=True)
class Exactness:
    """A share of exact answers of a method to a task."""

    task: str
    method: str
    seed: int
    result: AnswerResult


@dataclass(frozen=True)
class ExactAnswers:
    """What a sweep over algorithmic tasks found; of each task the most items in training and in evaluation."""

    rows: Sequence[Exactness]
    trained: Mapping[str, int]
    longest: Mapping[str, int]

    @property
    def tasks(self) -> list[str]:
        return list(dict.fromkeys(row.task for row in self.rows))

    def methods(self, task: str | None = None) -> list[str]:
        """Those with results, of one task or of any."""
        return list(dict.fromkeys(row.method for row in self.rows if task in (None, row.task)))

    def of(self, task: str, method: str) -> dict[int, list[float]]:
        """By number of items, the exact answers of each seed in per cent."""
        found: dict[int, list[float]] = {}
        for row in self.rows:
            if (row.task, row.method) == (task, method):
                found.setdefault(row.result.length, []).append(100 * row.result.accuracy)
        return found

    def means(self, task: str, method: str) -> dict[str, float | None]:
        """In per cent over the trained numbers of items, those beyond, and all; every number and seed weighs alike."""
        found, trained = self.of(task, method), self.trained[task]
        parts = {
            "trained": range(2, trained + 1),
            "beyond": range(trained + 1, self.longest[task] + 1),
            "all": range(2, self.longest[task] + 1),
        }
        return {part: _mean(v for n in numbers for v in found.get(n, ())) for part, numbers in parts.items()}

    def ranges(self) -> str:
        """In words, how many items each task has in training and in evaluation."""
        return "; ".join(
            f"{task}: 2 … {self.trained[task]} items in training, up to {self.longest[task]} here"
            for task in self.tasks
        )

    def csv(self) -> str:
        head = ("task", "method", "seed", "items", "examples", "right", "accuracy", "positions")
        return csv_text(
            head,
            (
                (row.task, row.method, row.seed, one.length, one.examples, one.right, one.accuracy, one.transform)
                for row in self.rows
                for one in [row.result]
            ),
        )


def _mean(values: Iterable[float]) -> float | None:
    given = list(values)
    return sum(given) / len(given) if given else None


def collect(folder: SweepFolder, state: State) -> Perplexities | ExactAnswers:
    """The results of the runs that are finished.

    Raises:
        UserError: there are none.
    """
    found = exact_answers(folder, state) if state.algorithms else perplexities(folder, state)
    if not found.rows:
        raise UserError(f"{folder.path} holds no finished evaluation yet: run its sweep first")
    return found


def perplexities(folder: SweepFolder, state: State) -> Perplexities:
    """Of a sweep on text, by method, seed and length."""
    trained_at = state.settings.tokens
    if trained_at is None:
        raise UserError(f"{folder.state_path} does not say at which length was trained: start the sweep again")
    rows = []
    for name in state.encodings:
        for seed in state.seeds:
            measured = _measured(TextResult, folder.run_of(state.method(name), seed), state.method(name))
            by_length = {r.length: r for r in measured if r.subset == state.settings.subset}
            own = by_length.get(trained_at)
            for length in sorted(by_length):
                result = by_length[length]
                rows.append(Perplexity(name, seed, result.ppl / own.ppl if own else None, result))
    return Perplexities(rows, trained_at)


def exact_answers(folder: SweepFolder, state: State) -> ExactAnswers:
    """Of a sweep over algorithmic tasks, by task, method, seed and number of items."""
    split, rows = state.settings.subset, []
    for task in state.algorithms:
        for name in state.encodings:
            for seed in state.seeds:
                measured = _measured(AnswerResult, folder.run_of(state.method(name), seed, task), state.method(name))
                own = [r for r in measured if (r.algorithm, r.split, r.unit) == (task, split, "items")]
                rows += [Exactness(task, name, seed, result) for result in sorted(own, key=lambda r: r.length)]
    built = {task: build(task) for task in state.algorithms}
    return ExactAnswers(
        rows,
        trained={task: one.longest("train") for task, one in built.items()},
        longest={task: one.longest(split) for task, one in built.items()},
    )


def _measured(kind: type[Found], run: RunFolder, method: Method) -> list[Found]:
    """A method's results that belong to the finished checkpoint of its run, with nothing of it changed."""
    record = run.checkpoints.record()
    if record is None:
        return []
    return [
        result
        for result in results.read(kind, run.results)
        if result.checkpoint == record.finished.checkpoint
        and result.positions == method.positions_eval
        and not any(getattr(result, key, None) for key in ("rpe", "compute_dtype", "attention_prune"))
    ]
