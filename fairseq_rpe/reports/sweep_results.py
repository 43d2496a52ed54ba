"""The results that belong to a sweep's settings, in the order in which they were asked for, and their means."""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Generic, TypeVar

from fairseq_rpe.algorithms import build
from fairseq_rpe.core.errors import UserError
from fairseq_rpe.evaluation import records
from fairseq_rpe.evaluation.position_limits import most_items
from fairseq_rpe.evaluation.question_records import QuestionResult
from fairseq_rpe.evaluation.records import AnswerResult, TextResult
from fairseq_rpe.runs.run_folder import RunFolder, Which
from fairseq_rpe.sweeps.sweep_record import Method, State, SweepFolder
from fairseq_rpe.utils.table import csv_text, spaced

Found = TypeVar("Found", TextResult, AnswerResult, QuestionResult)
Row = TypeVar("Row")
Key = TypeVar("Key")
SHOWN = 48  # lengths in a table that can still be read; CSV files have all
HELD = 90.0  # per cent of exact answers at every depth from which a method is said to find what is asked for


@dataclass(frozen=True)
class Finding(Generic[Found]):
    """A result of a method; ``ratio``: of a perplexity over that of the same run at the training length, if known.

    ``folder``: the name of the questions that it is about.
    """

    method: str
    seed: int
    result: Found
    ratio: float | None = None
    folder: str | None = None

    @property
    def task(self) -> str | None:
        """What its run is trained on, of several things."""
        return self.result.algorithm if isinstance(self.result, AnswerResult) else self.folder


@dataclass(frozen=True)
class Perplexities:
    """What a sweep on text found; ``trained_at`` in tokens.

    ``others``: by name, the same of further texts. ``longer``: training lengths of methods that continue others.
    """

    rows: Sequence[Finding[TextResult]]
    trained_at: int
    others: Mapping[str, "Perplexities"] = field(default_factory=dict)
    longer: Mapping[str, int] = field(default_factory=dict)

    @cached_property
    def _by_encoding(self) -> dict[str, list[Finding[TextResult]]]:
        return grouped(self.rows, lambda row: row.method)

    @property
    def encodings(self) -> list[str]:
        return list(self._by_encoding)

    def rows_of(self, encoding: str) -> list[Finding[TextResult]]:
        """The results of one method, none if it has no result."""
        return self._by_encoding.get(encoding, [])

    @cached_property
    def lengths(self) -> list[int]:
        return sorted({row.result.length for row in self.rows})

    @cached_property
    def shown_lengths(self) -> list[int]:
        """The lengths that tables and descriptions show: all, or as many as can be read, the training length too."""
        if len(self.lengths) <= SHOWN:
            return self.lengths
        return sorted({*spaced(self.lengths, SHOWN - 1), *({self.trained_at} & set(self.lengths))})

    @cached_property
    def _values(self) -> dict[str, dict[int, list[float]]]:
        return {
            name: by_length((row.result.length, row.result.ppl) for row in own)
            for name, own in self._by_encoding.items()
        }

    def of(self, encoding: str) -> Mapping[int, list[float]]:
        """By length, the perplexity of each seed."""
        return self._values.get(encoding, {})

    def seeds(self, encoding: str) -> list[dict[int, float]]:
        """The perplexity by length of each seed that was evaluated at its training length and beyond it."""
        start = self.longer.get(encoding, self.trained_at)
        own: dict[int, dict[int, float]] = {}
        for row in self.rows_of(encoding):
            own.setdefault(row.seed, {})[row.result.length] = row.result.ppl
        return [one for one in own.values() if start in one and max(one) > start]

    def ratios(self, encoding: str) -> dict[int, list[float]]:
        """By length, the perplexity of each seed over that of the same run at the training length."""
        own = self.rows_of(encoding)
        return by_length((row.result.length, row.ratio) for row in own if row.ratio is not None)

    def means(self, encoding: str) -> dict[int, float]:
        """By length, the mean over seeds."""
        return {length: sum(values) / len(values) for length, values in self.of(encoding).items()}

    @cached_property
    def shared_lengths(self) -> list[int]:
        """At which every run was measured."""
        runs: dict[tuple[str, int], set[int]] = {}
        for row in self.rows:
            runs.setdefault((row.method, row.seed), set()).add(row.result.length)
        return [n for n in self.lengths if all(n in own for own in runs.values())]

    def over_lengths(self, encoding: str) -> list[float]:
        """Of each seed the mean of its perplexities at the lengths that all runs share."""
        shared, found = set(self.shared_lengths), dict[int, list[float]]()
        for row in self.rows_of(encoding):
            if row.result.length in shared:
                found.setdefault(row.seed, []).append(row.result.ppl)
        return [sum(values) / len(values) for values in found.values()]

    def ratio(self, encoding: str) -> float | None:
        """At the longest length of all, the mean over seeds."""
        at = self.lengths[-1]
        return _mean(row.ratio for row in self.rows_of(encoding) if row.result.length == at)

    def csv(self) -> str:
        found = ((row, row.result) for row in self.rows)
        return csv_text(
            ("encoding", "length", "ppl", "loss_base2", "tokens", "ratio", "seed"),
            ((row.method, one.length, one.ppl, one.loss_base2, one.tokens, row.ratio, row.seed) for row, one in found),
        )


@dataclass(frozen=True)
class ExactAnswers:
    """What a sweep over algorithmic tasks found; of each task the most items in training and in evaluation.

    ``ends``: by task and method, the most items for which its positions reach, where that is less than ``longest``.
    """

    rows: Sequence[Finding[AnswerResult]]
    trained: Mapping[str, int]
    longest: Mapping[str, int]
    ends: Mapping[tuple[str, str], int] = field(default_factory=dict)

    @cached_property
    def _by_task_and_method(self) -> dict[tuple[str, str], list[Finding[AnswerResult]]]:
        return grouped(self.rows, lambda row: (row.result.algorithm, row.method))

    @property
    def tasks(self) -> list[str]:
        return list(dict.fromkeys(task for task, _ in self._by_task_and_method))

    def methods(self, task: str | None = None) -> list[str]:
        """Those with results, of one task or of any."""
        return list(dict.fromkeys(method for of, method in self._by_task_and_method if task in (None, of)))

    def rows_of(self, task: str, method: str) -> list[Finding[AnswerResult]]:
        """The results of one method on one task, none if it has no result."""
        return self._by_task_and_method.get((task, method), [])

    def of(self, task: str, method: str) -> dict[int, list[float]]:
        """By number of items, the exact answers of each seed in per cent, the mean over depths where there are any."""
        runs: dict[tuple[int, int], list[float]] = {}
        for row in self.rows_of(task, method):
            runs.setdefault((row.result.length, row.seed), []).append(100 * row.result.accuracy)
        return by_length((length, sum(values) / len(values)) for (length, _), values in runs.items())

    @cached_property
    def deep(self) -> list[str]:
        """The tasks with depths."""
        known = {row.result.algorithm for row in self.rows if row.result.depth is not None}
        return [task for task in self.tasks if task in known]

    def grid(self, task: str, method: str) -> dict[tuple[int, float], float]:
        """By length and depth, the exact answers in per cent, the mean over seeds; nothing of a task without depths."""
        cells: dict[tuple[int, float], list[float]] = {}
        for row in self.rows_of(task, method):
            if row.result.depth is not None:
                cells.setdefault((row.result.length, row.result.depth), []).append(100 * row.result.accuracy)
        return {key: sum(values) / len(values) for key, values in sorted(cells.items())}

    def worst(self, task: str, method: str) -> dict[int, float]:
        """By length, the exact answers in per cent at the depth with the fewest."""
        found: dict[int, float] = {}
        for (length, _), value in self.grid(task, method).items():
            found[length] = min(value, found.get(length, value))
        return found

    def reach(self, task: str, method: str) -> int | None:
        """The longest length up to which ``HELD`` per cent are exact at every depth; ``None``: not even the first."""
        reached = None
        for length, value in self.worst(task, method).items():
            if value < HELD:
                break
            reached = length
        return reached

    def means(self, task: str, method: str) -> dict[str, float | None]:
        """In per cent over the trained numbers of items, those beyond, and all; every number and seed weighs alike."""
        found, trained, longest = self.of(task, method), self.trained[task], self.longest[task]
        parts = {"trained": (1, trained), "beyond": (trained + 1, longest), "all": (1, longest)}
        return {
            part: _mean(v for n in range(first, last + 1) for v in found.get(n, ()))
            for part, (first, last) in parts.items()
        }

    def ranges(self) -> str:
        """In words, how many items each task has in training and in evaluation."""
        return "; ".join(
            f"{task}: {build(task).config.least} … {self.trained[task]} {build(task).unit} in training, "
            f"up to {self.longest[task]} here"
            for task in self.tasks
        )

    def csv(self) -> str:
        own = [(one.result, one) for one in self.rows]
        head = ("task", "method", "seed", "items", "examples", "right", "accuracy", "positions")
        lines = [
            (r.algorithm, f.method, f.seed, r.length, r.examples, r.right, r.accuracy, r.transform) for r, f in own
        ]
        if not self.deep:
            return csv_text(head, lines)
        return csv_text((*head, "depth"), ((*line, r.depth) for line, (r, _) in zip(lines, own, strict=True)))


def grouped(rows: Iterable[Row], key: Callable[[Row], Key]) -> dict[Key, list[Row]]:
    """The rows by their keys, keys and rows in the order in which they come."""
    found: dict[Key, list[Row]] = {}
    for row in rows:
        found.setdefault(key(row), []).append(row)
    return found


def by_length(found: Iterable[tuple[int, float]]) -> dict[int, list[float]]:
    values: dict[int, list[float]] = {}
    for length, value in found:
        values.setdefault(length, []).append(value)
    return dict(sorted(values.items()))


def _mean(values: Iterable[float | None]) -> float | None:
    given = [value for value in values if value is not None]
    return sum(given) / len(given) if given else None


def asked(folder: SweepFolder, state: State) -> Iterator[tuple[str | None, Method, int, RunFolder]]:
    """Task, if it is over tasks, method, seed and run of everything that a sweep compares."""
    for task in state.tasks or (None,):
        for method in map(state.method, state.encodings):
            for seed in state.seeds:
                yield task, method, seed, folder.run_of(method, seed, task)


def perplexities(folder: SweepFolder, state: State) -> Perplexities:
    """Of a sweep on text, by method, seed and length; the texts that it is not trained on apart."""
    if state.settings.tokens is None:
        raise UserError(f"{folder.state_path} does not record the training length: run the sweep again")
    named = {one.digest: name for name, one in state.evaluate.items()}
    rows: dict[str | None, list[Finding[TextResult]]] = {None: [], **{name: [] for name in state.evaluate}}
    for _, method, seed, run in asked(folder, state):
        by_length: dict[str | None, dict[int, TextResult]] = {}
        for one in measured(TextResult, run, method):
            if one.subset == state.settings.subset:
                by_length.setdefault(named.get(one.data), {})[one.length] = one
        for name, found in by_length.items():
            own = found.get(state.settings.tokens)
            for _, one in sorted(found.items()):
                rows[name].append(Finding(method.name, seed, one, one.ppl / own.ppl if own else None))
    longer = {name: tokens for name in state.encodings if (tokens := state.method(name).further.tokens)}
    at = state.settings.tokens
    others = {name: Perplexities(own, at, longer=longer) for name, own in rows.items() if name is not None and own}
    return Perplexities(rows[None], at, others, longer)


def exact_answers(folder: SweepFolder, state: State) -> ExactAnswers:
    """Of a sweep over algorithmic tasks, by task, method, seed and number of items."""
    split, rows = state.settings.subset, []
    for task, method, seed, run in asked(folder, state):
        found = measured(AnswerResult, run, method)
        own = [one for one in found if (one.algorithm, one.split, one.unit) == (task, split, "items")]
        rows += [Finding(method.name, seed, one) for one in sorted(own, key=lambda one: (one.length, one.depth or 0))]
    built = {task: build(task) for task in state.algorithms}
    longest = {part: {task: one.longest(part) for task, one in built.items()} for part in ("train", split)}
    methods = map(state.method, state.encodings)
    reached = {(task, m.name): most_items(m.positions_eval, built[task], split) for m in methods for task in built}
    ends = {of: most for of, most in reached.items() if most is not None}
    return ExactAnswers(rows, longest["train"], longest[split], ends)


def measured(kind: type[Found], run: RunFolder, method: Method, which: Which = "last") -> list[Found]:
    """A method's results that belong to the checkpoint of its finished run, with nothing else of it changed."""
    record = run.checkpoints.record()
    if record is None:
        return []
    drawn = records.draws_of(method.positions_eval)
    found = [
        result
        for result in records.read(kind, run.results)
        if result.checkpoint == record.finished.digest(which)
        and (result.positions, result.rpe) == (method.positions_eval, method.rpe_eval)
        and result.draws in (None, drawn)
        and not any(getattr(result, key, None) for key in ("compute_dtype", "attention_prune"))
        and not any(getattr(result, key, None) is not None for key in ("blocks", "separate_documents"))
    ]
    # an older version drew random positions once for all blocks, and its results stand until there are others
    return list(
        {replace(result.key, draws=None): result for result in sorted(found, key=lambda one: one.draws or 0)}.values()
    )
