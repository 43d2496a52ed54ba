"""Results of a sweep on text or over generated tasks: those that belong to its settings, and their means."""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from types import MappingProxyType
from typing import Any, Generic, NamedTuple, TypeVar

from fairseq_rpe.algorithms import build
from fairseq_rpe.core.errors import UserError
from fairseq_rpe.evaluation import records
from fairseq_rpe.evaluation.position_limits import max_items
from fairseq_rpe.evaluation.question_records import QuestionResult
from fairseq_rpe.evaluation.records import ExactMatchResult, TextResult
from fairseq_rpe.reports import uncertainty
from fairseq_rpe.reports.uncertainty import ClusteredScores
from fairseq_rpe.runs.run_folder import CheckpointKind, RunFolder
from fairseq_rpe.sweeps.sweep_record import Method, SweepFolder, SweepRecord
from fairseq_rpe.utils.table import csv_text, log_spaced

ResultType = TypeVar("ResultType", TextResult, ExactMatchResult, QuestionResult)
Item = TypeVar("Item")
Key = TypeVar("Key")
# Options of `eval` that a sweep never passes. Results that were measured with one of them are not the sweep's.
_EVALUATION_OPTIONS, _BLOCK_OPTIONS = ("compute_dtype", "attention_prune"), ("blocks", "separate_documents")
MAX_SHOWN_LENGTHS = 48  # upper limit of the length columns in a table; CSV files have all lengths
SOLVED_PERCENT = 90.0  # a length counts as solved if the accuracy at every depth is at least this, in percent


@dataclass(frozen=True)
class SweepResult(Generic[ResultType]):
    """A result of a method.

    Attributes:
        method: name of the method.
        seed: seed of the run.
        result: the measurement.
        ratio: perplexity relative to that of the same run at the training length; None for other results, or if the run
            was not evaluated at the training length.
        folder: name of the question dataset; None for results that are not about questions.
    """

    method: str
    seed: int
    result: ResultType
    ratio: float | None = None
    folder: str | None = None

    @property
    def task(self) -> str | None:
        """Generated task or question dataset of the run; None for text."""
        return self.result.algorithm if isinstance(self.result, ExactMatchResult) else self.folder


@dataclass(frozen=True)
class TrainingPoint:
    """A perplexity of a model along its training.

    Attributes:
        method: name of the method.
        seed: seed of the run.
        updates: number of updates of the checkpoint.
        tokens: number of tokens that the updates were computed from, None if unknown.
        length: length of the evaluation in tokens.
        ppl: perplexity per token.
        ratio: ``ppl`` divided by that of the same checkpoint at the training length, None if unknown.
    """

    method: str
    seed: int
    updates: int
    tokens: int | None
    length: int
    ppl: float
    ratio: float | None


class SweepResults:
    """Results of a sweep; each kind of sweep has a subclass.

    Attributes:
        results: all results.
        other_texts: results on further texts, by name of the text.
        tasks_with_depths: generated tasks whose results depend on a depth.
        training_axis: perplexities along the training.
    """

    results: Sequence[SweepResult[Any]]
    other_texts: Mapping[str, "SweepResults"] = MappingProxyType({})
    tasks_with_depths: Sequence[str] = ()

    training_axis: Sequence[TrainingPoint] = ()

    def csv(self, with_bounds: bool = True) -> str:
        """Return the results as CSV; ``with_bounds``: whether to compute the bounds of intervals."""
        raise NotImplementedError

    def training_axis_csv(self) -> str:
        """Return a CSV row for each perplexity along the training."""
        header = ("method", "seed", "updates", "tokens trained", "length", "perplexity", "ratio")
        points = self.training_axis
        return csv_text(header, ((p.method, p.seed, p.updates, p.tokens, p.length, p.ppl, p.ratio) for p in points))


@dataclass(frozen=True)
class Perplexities(SweepResults):
    """Perplexities of a sweep on one text.

    Attributes:
        results: results by method, seed and length.
        train_length: training length in tokens.
        other_texts: perplexities on further texts, by name of the text.
        continued_lengths: training length by name, for methods that continue another method's training at a length of
            their own.
        training_axis: perplexities along the training, the end included; empty if no checkpoint on the way was
            evaluated.
    """

    results: Sequence[SweepResult[TextResult]]
    train_length: int
    other_texts: Mapping[str, "Perplexities"] = field(default_factory=dict)
    continued_lengths: Mapping[str, int] = field(default_factory=dict)
    training_axis: Sequence[TrainingPoint] = ()

    @cached_property
    def _by_encoding(self) -> dict[str, list[SweepResult[TextResult]]]:
        return group_by(self.results, lambda row: row.method)

    @property
    def encodings(self) -> list[str]:
        """Names of the methods with results."""
        return list(self._by_encoding)

    def results_for(self, encoding: str) -> list[SweepResult[TextResult]]:
        """Return the results of one method, or an empty list."""
        return self._by_encoding.get(encoding, [])

    @cached_property
    def lengths(self) -> list[int]:
        """All evaluation lengths, ascending."""
        return sorted({row.result.length for row in self.results})

    @cached_property
    def shown_lengths(self) -> list[int]:
        """Lengths for tables and descriptions: at most ``MAX_SHOWN_LENGTHS``, with the training length."""
        if len(self.lengths) <= MAX_SHOWN_LENGTHS:
            return self.lengths
        return sorted({*log_spaced(self.lengths, MAX_SHOWN_LENGTHS - 1), *({self.train_length} & set(self.lengths))})

    @cached_property
    def _values(self) -> dict[str, dict[int, list[float]]]:
        return {
            name: group_by_length((row.result.length, row.result.ppl) for row in rows)
            for name, rows in self._by_encoding.items()
        }

    def values_by_length(self, encoding: str) -> Mapping[int, list[float]]:
        """Return the perplexity of each seed by length."""
        return self._values.get(encoding, {})

    def seed_results(self, encoding: str) -> list[dict[int, TextResult]]:
        """Return the result by length for each seed that was evaluated at its training length and beyond."""
        start = self.continued_lengths.get(encoding, self.train_length)
        per_seed: dict[int, dict[int, TextResult]] = {}
        for row in self.results_for(encoding):
            per_seed.setdefault(row.seed, {})[row.result.length] = row.result
        return [results for results in per_seed.values() if start in results and max(results) > start]

    def seed_curves(self, encoding: str) -> list[dict[int, float]]:
        """Return the perplexity by length for each seed that was evaluated at its training length and beyond."""
        return [{n: result.ppl for n, result in results.items()} for results in self.seed_results(encoding)]

    @cached_property
    def _losses(self) -> dict[str, dict[int, ClusteredScores]]:
        return {name: _mean_losses(rows) for name, rows in self._by_encoding.items()}

    def losses_by_length(self, encoding: str) -> Mapping[int, ClusteredScores]:
        """Return the clustered losses in bits by length, as mean over seeds.

        Lengths are missing if a seed has no segments, or segments of other tokens.
        """
        return self._losses.get(encoding, {})

    def ratios_by_length(self, encoding: str) -> dict[int, list[float]]:
        """Return, by length, each seed's perplexity relative to that of the same run at the training length."""
        rows = self.results_for(encoding)
        return group_by_length((row.result.length, row.ratio) for row in rows if row.ratio is not None)

    def mean_by_length(self, encoding: str) -> dict[int, float]:
        """Return the mean over seeds by length."""
        return {length: sum(values) / len(values) for length, values in self.values_by_length(encoding).items()}

    @cached_property
    def shared_lengths(self) -> list[int]:
        """Lengths at which every run was evaluated."""
        runs: dict[tuple[str, int], set[int]] = {}
        for row in self.results:
            runs.setdefault((row.method, row.seed), set()).add(row.result.length)
        return [n for n in self.lengths if all(n in lengths for lengths in runs.values())]

    def seed_means(self, encoding: str) -> list[float]:
        """Return, for each seed, the mean of the perplexities at the lengths that all runs share."""
        shared = set(self.shared_lengths)
        per_seed: dict[int, list[float]] = {}
        for row in self.results_for(encoding):
            if row.result.length in shared:
                per_seed.setdefault(row.seed, []).append(row.result.ppl)
        return [sum(values) / len(values) for values in per_seed.values()]

    def final_ratio(self, encoding: str) -> float | None:
        """Return the mean over seeds of the ratio at the longest length of all methods, or None without it."""
        longest = self.lengths[-1]
        return _mean(row.ratio for row in self.results_for(encoding) if row.result.length == longest)

    def csv(self, with_bounds: bool = True) -> str:
        """Return a CSV row for each result; ``with_bounds``: whether to compute the bounds of intervals."""
        rows = ((row, row.result) for row in self.results)
        head = ("encoding", "length", "ppl", "loss_base2", "tokens", "ratio", "seed", *uncertainty.CSV_COLUMNS)
        lines = [(row.method, r.length, r.ppl, r.loss_base2, r.tokens, row.ratio, row.seed) for row, r in rows]
        bounds = (uncertainty.perplexity_columns(row.result, with_bounds) for row in self.results)
        return csv_text(head, (line + columns for line, columns in zip(lines, bounds, strict=True)))


@dataclass(frozen=True)
class Accuracies(SweepResults):
    """Exact-match accuracies of a sweep over generated tasks.

    Attributes:
        results: results by task, method, seed and number of items.
        train_items: largest number of items in training, by task.
        max_items: largest number of items in evaluation, by task.
        position_limits: by task and method, the largest number of items for which the method has positions, if that is
            less than ``max_items``.
    """

    results: Sequence[SweepResult[ExactMatchResult]]
    train_items: Mapping[str, int]
    max_items: Mapping[str, int]
    position_limits: Mapping[tuple[str, str], int] = field(default_factory=dict)

    @cached_property
    def _by_task_and_method(self) -> dict[tuple[str, str], list[SweepResult[ExactMatchResult]]]:
        return group_by(self.results, lambda row: (row.result.algorithm, row.method))

    @property
    def tasks(self) -> list[str]:
        """Tasks with results."""
        return list(dict.fromkeys(task for task, _ in self._by_task_and_method))

    def methods(self, task: str | None = None) -> list[str]:
        """Return the methods with results, of one task or of any."""
        return list(dict.fromkeys(method for name, method in self._by_task_and_method if task in (None, name)))

    def results_for(self, task: str, method: str) -> list[SweepResult[ExactMatchResult]]:
        """Return the results of one method on one task, or an empty list."""
        return self._by_task_and_method.get((task, method), [])

    def values_by_length(self, task: str, method: str) -> dict[int, list[float]]:
        """Return, by number of items, the accuracy of each seed in percent, as the mean over depths."""
        runs: dict[tuple[int, int], list[float]] = {}
        for row in self.results_for(task, method):
            runs.setdefault((row.result.length, row.seed), []).append(100 * row.result.accuracy)
        return group_by_length((length, sum(values) / len(values)) for (length, _), values in runs.items())

    @cached_property
    def tasks_with_depths(self) -> list[str]:
        """Tasks whose results have depths."""
        with_depths = {row.result.algorithm for row in self.results if row.result.depth is not None}
        return [task for task in self.tasks if task in with_depths]

    def mean_by_length_and_depth(self, task: str, method: str) -> dict[tuple[int, float], float]:
        """Return the mean accuracy over seeds in percent by length and depth; empty for tasks without depths."""
        cells: dict[tuple[int, float], list[float]] = {}
        for row in self.results_for(task, method):
            if row.result.depth is not None:
                cells.setdefault((row.result.length, row.result.depth), []).append(100 * row.result.accuracy)
        return {key: sum(values) / len(values) for key, values in sorted(cells.items())}

    def worst_depth_by_length(self, task: str, method: str) -> dict[int, float]:
        """Return, by length, the accuracy in percent at the depth with the lowest one."""
        worst: dict[int, float] = {}
        for (length, _), value in self.mean_by_length_and_depth(task, method).items():
            worst[length] = min(value, worst.get(length, value))
        return worst

    def solved_length(self, task: str, method: str) -> int | None:
        """Return the length up to which accuracy is at least ``SOLVED_PERCENT`` at every depth, or None."""
        solved = None
        for length, value in self.worst_depth_by_length(task, method).items():
            if value < SOLVED_PERCENT:
                break
            solved = length
        return solved

    def mean_by_range(self, task: str, method: str) -> dict[str, float | None]:
        """Return the mean accuracy in percent over trained numbers of items, those beyond, and all.

        All numbers of items and seeds have the same weight.
        """
        values, train, longest = self.values_by_length(task, method), self.train_items[task], self.max_items[task]
        ranges = {"trained": (1, train), "beyond": (train + 1, longest), "all": (1, longest)}
        return {
            name: _mean(value for n in range(first, last + 1) for value in values.get(n, ()))
            for name, (first, last) in ranges.items()
        }

    def scores_by_range(self, task: str, method: str) -> dict[str, ClusteredScores | None]:
        """Return the right answers over trained numbers of items, those beyond, and all, as mean over seeds.

        All numbers of items and all depths have the same weight. A range has None if it has no results, or if results
        do not state which examples are right.
        """
        by_setting = group_by(self.results_for(task, method), lambda row: (row.result.length, row.result.depth))
        means = {
            setting: uncertainty.average([uncertainty.exact_match_scores(row.result) for row in rows])
            for setting, rows in by_setting.items()
        }
        train = self.train_items[task]
        ranges = {
            "trained": [scores for (length, _), scores in means.items() if length <= train],
            "beyond": [scores for (length, _), scores in means.items() if length > train],
            "all": list(means.values()),
        }
        return {name: uncertainty.join(parts) for name, parts in ranges.items()}

    def describe_ranges(self) -> str:
        """Return in words how many items each task has in training and in evaluation."""
        return "; ".join(
            f"{task}: {build(task).config.least} … {self.train_items[task]} {build(task).length_unit} in training, "
            f"up to {self.max_items[task]} here"
            for task in self.tasks
        )

    def csv(self, with_bounds: bool = True) -> str:
        """Return a CSV row for each result; ``with_bounds``: whether to compute the bounds of intervals."""
        head = ["task", "method", "seed", "items", "examples", "right", "accuracy", "positions"]
        head += ["depth"] if self.tasks_with_depths else []
        rows = []
        for row in self.results:
            r = row.result
            values = [r.algorithm, row.method, row.seed, r.length, r.examples, r.right, r.accuracy, r.transform]
            values += [r.depth] if self.tasks_with_depths else []
            rows.append([*values, *uncertainty.accuracy_columns(r, with_bounds)])
        return csv_text([*head, *uncertainty.CSV_COLUMNS], rows)


def group_by(items: Iterable[Item], key: Callable[[Item], Key]) -> dict[Key, list[Item]]:
    """Group items by a key; keys and items keep their order."""
    groups: dict[Key, list[Item]] = {}
    for item in items:
        groups.setdefault(key(item), []).append(item)
    return groups


def group_by_length(pairs: Iterable[tuple[int, float]]) -> dict[int, list[float]]:
    """Group values by length, ascending."""
    groups: dict[int, list[float]] = {}
    for length, value in pairs:
        groups.setdefault(length, []).append(value)
    return dict(sorted(groups.items()))


def _mean_losses(rows: Sequence[SweepResult[TextResult]]) -> dict[int, ClusteredScores]:
    """Return the mean over seeds of the clustered losses of one method, at the lengths at which all seeds have them."""
    means = {}
    for length, group in group_by(rows, lambda row: row.result.length).items():
        mean = uncertainty.average([uncertainty.text_losses(row.result) for row in group])
        if mean is not None:
            means[length] = mean
    return means


def _mean(values: Iterable[float | None]) -> float | None:
    numbers = [value for value in values if value is not None]
    return sum(numbers) / len(numbers) if numbers else None


class PlannedRun(NamedTuple):
    """A run that a sweep compares.

    Attributes:
        task: a generated task or a question dataset; None for text.
        method: the method.
        seed: the seed.
        folder: the run folder, which methods that share a training have in common.
    """

    task: str | None
    method: Method
    seed: int
    folder: RunFolder


def planned_runs(folder: SweepFolder, record: SweepRecord) -> Iterator[PlannedRun]:
    """Yield every run that a sweep compares, finished or not, in the order of its reports."""
    for task in record.tasks or (None,):
        for method in map(record.method, record.encodings):
            for seed in record.seeds:
                yield PlannedRun(task, method, seed, folder.run_folder(method, seed, task))


def load_perplexities(folder: SweepFolder, record: SweepRecord) -> Perplexities:
    """Read the results of a sweep on text.

    Raises:
        UserError: the sweep does not record its training length.
    """
    train_length = record.settings.tokens
    if train_length is None:
        raise UserError(f"{folder.record_path} does not record the training length: run the sweep again")
    # results by name of the text; None is the training text
    rows: dict[str | None, list[SweepResult[TextResult]]] = {None: [], **{name: [] for name in record.evaluate}}
    for run in planned_runs(folder, record):
        results = current_results(TextResult, run.folder, run.method)
        for text, by_length in _results_by_text(record, results).items():
            base = by_length.get(train_length)
            for _, result in sorted(by_length.items()):
                ratio = result.ppl / base.ppl if base else None
                rows[text].append(SweepResult(run.method.name, run.seed, result, ratio))
    continued = {name: tokens for name in record.encodings if (tokens := record.method(name).further.tokens)}
    other_texts = {
        name: Perplexities(results, train_length, continued_lengths=continued)
        for name, results in rows.items()
        if name is not None and results
    }
    return Perplexities(rows[None], train_length, other_texts, continued)


def _results_by_text(record: SweepRecord, results: Iterable[TextResult]) -> dict[str | None, dict[int, TextResult]]:
    """Return the results on the sweep's split by text, None for the training text, and by length.

    Of several results at one length the last replaces the others. Results on a text that is not the sweep's, as a user
    may have added, are left out.
    """
    text_names: dict[str, str | None] = {text.digest: name for name, text in record.evaluate.items()}
    training_text = record.settings.data  # None: not recorded, as is the empty digest of a result
    by_text: dict[str | None, dict[int, TextResult]] = {}
    for result in results:
        is_known = training_text is None or result.data in ("", training_text, *text_names)
        if result.split == record.settings.split and is_known:
            by_text.setdefault(text_names.get(result.data), {})[result.length] = result
    return by_text


def load_accuracies(folder: SweepFolder, record: SweepRecord) -> Accuracies:
    """Read the results of a sweep over generated tasks."""
    split, rows = record.settings.split, []
    for run in planned_runs(folder, record):
        results = [
            result
            for result in current_results(ExactMatchResult, run.folder, run.method)
            if (result.algorithm, result.split, result.unit) == (run.task, split, "items")
        ]
        results.sort(key=lambda result: (result.length, result.depth or 0))
        rows += [SweepResult(run.method.name, run.seed, result) for result in results]
    tasks = {task: build(task) for task in record.algorithms}
    longest = {name: {task: built.max_length(name) for task, built in tasks.items()} for name in ("train", split)}
    limits = {
        (task, method.name): max_items(method.evaluated_rpe, method.positions_eval, built, split)
        for method in map(record.method, record.encodings)
        for task, built in tasks.items()
    }
    position_limits = {key: limit for key, limit in limits.items() if limit is not None}
    return Accuracies(rows, longest["train"], longest[split], position_limits)


def current_results(
    kind: type[ResultType], run: RunFolder, method: Method, which: CheckpointKind = "last"
) -> list[ResultType]:
    """Read the results that belong to a method's settings and to the checkpoint of its finished run.

    Args:
        kind: type of the results.
        run: run folder.
        method: the method.
        which: checkpoint of the run, last or best.

    Returns:
        The results for which :func:`_belongs_to` holds, one for each of their keys; empty if the run is not finished.
    """
    record = run.checkpoints.read_record()
    return [] if record is None else checkpoint_results(kind, run, method, record.finished.digest(which))


def checkpoint_results(kind: type[ResultType], run: RunFolder, method: Method, digest: str | None) -> list[ResultType]:
    """Read the results that belong to a method's settings and to one checkpoint of its run.

    Args:
        kind: type of the results.
        run: run folder.
        method: the method.
        digest: digest of the checkpoint.

    Returns:
        The results, as those of :func:`current_results`.
    """
    results = [result for result in records.read_results(kind, run.results) if _belongs_to(result, method, digest)]
    # Earlier versions drew random positions once for all blocks (draws=None). A result of the same settings with a draw
    # for each block (draws=1) comes later after this sort, so it replaces such a result.
    results.sort(key=lambda result: result.draws or 0)
    return records.last_of_each(results)


def _belongs_to(result: ResultType, method: Method, digest: str | None) -> bool:
    """Return whether a sweep measured this result, with the current settings of a method.

    Such a result is of the checkpoint with this digest, has the method's ``positions_eval`` and ``rpe_eval``, has the
    default number of position samples, and was measured without options that a sweep never passes.
    """
    return (
        result.checkpoint == digest
        and (result.positions, result.rpe) == (method.positions_eval, method.rpe_eval)
        and result.draws in (None, records.default_draws(method.positions_eval))
        and not any(getattr(result, option, None) for option in _EVALUATION_OPTIONS)
        # False is also an option here: the opposite of the training's setting
        and all(getattr(result, option, None) is None for option in _BLOCK_OPTIONS)
    )
