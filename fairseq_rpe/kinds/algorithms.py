"""Sweeps on generated tasks: exact match over the number of items."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import replace
from functools import cache, partial
from typing import TYPE_CHECKING

from fairseq_rpe.algorithms import build
from fairseq_rpe.core.errors import UserError
from fairseq_rpe.evaluation.position_limits import max_items
from fairseq_rpe.evaluation.records import ExactMatchKey, ExactMatchResult
from fairseq_rpe.reports.kind_report import KindReport, MetricTags
from fairseq_rpe.reports.sweep_results import Accuracies, load_accuracies
from fairseq_rpe.sweeps import grid
from fairseq_rpe.sweeps.grid import Evaluation, ForwardPass, SweepRun
from fairseq_rpe.sweeps.resolve import Inputs, Sweep
from fairseq_rpe.sweeps.sweep_kind import SweepKind
from fairseq_rpe.sweeps.sweep_record import Method, SweepFolder, SweepRecord

if TYPE_CHECKING:
    from fairseq_rpe.reports.chapters.training import TrainedRun
    from fairseq_rpe.reports.page import ReportContent


class AlgorithmsKind(SweepKind):
    """Evaluation on generated tasks."""

    name = "algorithms"
    generates_data = True
    result_type = ExactMatchResult

    def build_runs(self, sweep: Sweep, inputs: Inputs, without_bias: Collection[str] = ()) -> list[SweepRun]:
        """Build one run per task, method and seed."""
        return grid.build_runs(sweep, None, without_bias, self.result_type, partial(_evaluations, sweep))


class AlgorithmsReport(KindReport[Accuracies]):
    """Report on exact-match accuracies."""

    subject = "algorithmic tasks"
    measured = "exact-match accuracies"
    csv_name, figure_name = "accuracy", "accuracy"
    extra_tables = ("effective_length.csv",)

    def load_results(self, folder: SweepFolder, record: SweepRecord) -> Accuracies:
        """Read the accuracies of the finished runs."""
        return load_accuracies(folder, record)

    def content_builder(
        self, folder: SweepFolder, record: SweepRecord, runs: Sequence[TrainedRun], results: Accuracies, delta: float
    ) -> tuple[Callable[[], ReportContent], dict[str, str]]:
        """Return chapters on accuracies, and the CSV file of effective lengths."""
        from fairseq_rpe.reports import effective_length
        from fairseq_rpe.reports.chapters import effective_length as length_chapter
        from fairseq_rpe.reports.chapters import exact_match

        lengths = effective_length.accuracy_lengths(results)
        blocks = length_chapter.score_blocks(lengths)
        builder = partial(exact_match.build_content, folder, record, runs, results, blocks)
        return builder, {effective_length.CSV_NAME: effective_length.lengths_csv(lengths)}

    def metric_tags(self, results: Accuracies) -> MetricTags:
        """Return a metric for trained lengths, for longer ones, and for all, and the effective lengths."""
        from fairseq_rpe.reports import effective_length

        names = {f"exact/{items}": f"exact match (%), {items}" for items in ("trained", "beyond", "all")}
        names |= effective_length.titles_by_tag(effective_length.accuracy_lengths(results))
        return MetricTags(names, "1_by_items/exact", "exact match in % over items (step = items)")

    def metrics_and_curve(
        self, results: Accuracies, method: str, task: str | None
    ) -> tuple[dict[str, float], dict[int, float]]:
        """Return the accuracies and the effective lengths of a run."""
        from fairseq_rpe.reports import effective_length

        assert task is not None
        means = results.mean_by_range(task, method)
        metrics = {f"exact/{items}": mean for items, mean in means.items() if mean is not None}
        metrics |= effective_length.lengths_by_tag(effective_length.accuracy_lengths(results))
        return metrics, {items: values[0] for items, values in results.values_by_length(task, method).items()}


def exact_match_pass(key: ExactMatchKey) -> ForwardPass:
    """Return the tokens of one exact-match accuracy: all examples of its length.

    Args:
        key: task, split and number of items.

    Returns:
        The tokens.
    """
    task = build(key.algorithm)
    size = task.num_tokens(key.length)
    return ForwardPass(task.examples_per_length(key.split) * size, size)


def _evaluations(sweep: Sweep, run: SweepRun, method: Method) -> list[Evaluation]:
    """Return the evaluation of a method on the task of a run.

    Raises UserError: the task does not have a length.
    """
    assert run.config.algorithm is not None
    task = build(run.config.algorithm)
    if missing := task.missing_lengths(sweep.split, sweep.lengths):
        raise UserError(f"'{run.config.algorithm}' has {missing}")
    requested = sorted(sweep.lengths or _lengths(run.config.algorithm, sweep.split))
    limit = max_items(method.evaluated_rpe, method.positions_eval, task, sweep.split)
    lengths, skipped = grid.lengths_within_limit(limit, requested, method, task.length_unit)
    common = grid.common_arguments(run, method, lengths if sweep.lengths or skipped else ())
    command = grid.command_line("eval-task", str(run.folder.checkpoints.last), "--split", sweep.split)
    command += ["--predictions", str(run.folder.predictions), *common]
    key = grid.method_key(ExactMatchKey, method, run.config, algorithm=run.config.algorithm, split=sweep.split)
    depths = task.depths(sweep.split) or (None,)
    keys = tuple(replace(key, length=n, depth=depth) for n in lengths for depth in depths)
    passes = partial(_passes, keys)
    return [Evaluation(command, keys, passes, skipped_lengths=skipped)]


@cache
def _lengths(algorithm: str, split: str) -> tuple[int, ...]:
    """Return the numbers of items of a task's examples; some tasks generate all examples to count them."""
    return tuple(build(algorithm).lengths(split))


def _passes(keys: Sequence[ExactMatchKey]) -> list[ForwardPass]:
    return [exact_match_pass(key) for key in keys]


KIND = AlgorithmsKind()
REPORT = AlgorithmsReport()
