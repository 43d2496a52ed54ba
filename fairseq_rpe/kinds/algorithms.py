"""Sweeps on generated tasks: exact match over the number of items."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fairseq_rpe.algorithms import build
from fairseq_rpe.core.errors import UserError
from fairseq_rpe.evaluation import records
from fairseq_rpe.evaluation.position_limits import max_items
from fairseq_rpe.evaluation.records import ExactMatchKey, ExactMatchResult
from fairseq_rpe.reports.sweep_results import Accuracies, load_accuracies
from fairseq_rpe.sweeps.costs import forward_cost
from fairseq_rpe.sweeps.grid import (
    Evaluation,
    SweepRun,
    build_runs,
    command_line,
    common_arguments,
    lengths_within_limit,
)
from fairseq_rpe.sweeps.inputs import Inputs
from fairseq_rpe.sweeps.resolve import Sweep
from fairseq_rpe.sweeps.sweep_kind import MetricTags, SweepKind
from fairseq_rpe.sweeps.sweep_record import Method, SweepFolder, SweepRecord

if TYPE_CHECKING:
    from fairseq_rpe.reports.page import ReportContent


class AlgorithmsKind(SweepKind):
    """Evaluation on generated tasks."""

    name = "algorithms"
    subject = "algorithmic tasks"
    measured = "exact-match accuracies"
    result_type = ExactMatchResult
    csv_name, figure_name = "accuracy", "accuracy"

    def check_options(self, recipe: str, data: Path | None, algorithms: Sequence[str] | None) -> None:
        """Refuse DATA."""
        if data is not None:
            raise UserError(f"recipe '{recipe}' generates its data: drop {data}")

    def build_runs(self, sweep: Sweep, inputs: Inputs, without_bias: Collection[str] = ()) -> list[SweepRun]:
        """Build one run per task, method and seed."""
        return build_runs(sweep, None, without_bias, self, partial(_evaluations, sweep))

    def evaluation_costs(self, evaluation: Evaluation) -> list[float]:
        """Return the cost of all examples of each length."""
        return [exact_match_cost(key) for key in evaluation.keys if isinstance(key, ExactMatchKey)]

    def load_results(self, folder: SweepFolder, record: SweepRecord) -> Accuracies:
        """Read the accuracies of the finished runs."""
        return load_accuracies(folder, record)

    def report_builder(
        self, folder: SweepFolder, record: SweepRecord, runs: Sequence[Any], results: Accuracies, delta: float
    ) -> tuple[Callable[[], ReportContent], dict[str, str]]:
        """Return chapters on accuracies; there are no further tables."""
        from fairseq_rpe.reports.chapters import exact_match

        return partial(exact_match.build_content, record, runs, results), {}

    def metric_tags(self, results: Accuracies) -> MetricTags:
        """Return a metric for trained lengths, for longer ones, and for all."""
        names = {f"exact/{items}": f"exact match (%), {items}" for items in ("trained", "beyond", "all")}
        return MetricTags(names, "1_by_items/exact", "exact match in % over items (step = items)")

    def metrics_and_curve(
        self, results: Accuracies, method: str, task: str | None
    ) -> tuple[dict[str, float], dict[int, float]]:
        """Return the accuracies of a run."""
        assert task is not None
        means = results.mean_by_range(task, method)
        metrics = {f"exact/{items}": mean for items, mean in means.items() if mean is not None}
        return metrics, {items: values[0] for items, values in results.values_by_length(task, method).items()}


def exact_match_cost(key: ExactMatchKey) -> float:
    """Return the cost of one exact-match accuracy: all examples of its length.

    Args:
        key: task, split and number of items.

    Returns:
        The cost; see :func:`~fairseq_rpe.sweeps.costs.forward_cost`.
    """
    task = build(key.algorithm)
    size = task.num_tokens(key.length)
    return forward_cost(task.examples_per_length(key.split) * size, size)


def _evaluations(sweep: Sweep, run: SweepRun, method: Method) -> list[Evaluation]:
    """Return the evaluation of a method on the task of a run.

    Raises UserError: the task does not have a length.
    """
    assert run.config.algorithm is not None
    task = build(run.config.algorithm)
    if missing := task.missing_lengths(sweep.split, sweep.lengths):
        raise UserError(f"'{run.config.algorithm}' has {missing}")
    requested = sorted(sweep.lengths or task.lengths(sweep.split))
    limit = max_items(method.positions_eval, task, sweep.split)
    lengths, skipped = lengths_within_limit(limit, requested, method, task.length_unit)
    common = common_arguments(run, method, lengths if sweep.lengths or skipped else ())
    command = command_line("eval-task", str(run.folder.checkpoints.last), "--split", sweep.split, *common)
    overrides: dict[str, Any] = {"rpe": method.rpe_eval, "positions": method.positions_eval}
    overrides["draws"] = records.default_draws(method.positions_eval)
    key = ExactMatchKey(checkpoint="", algorithm=run.config.algorithm, split=sweep.split, **overrides, length=1)
    depths = task.depths(sweep.split) or (None,)
    keys = tuple(replace(key, length=n, depth=depth) for n in lengths for depth in depths)
    return [Evaluation(command, keys, skipped_lengths=skipped)]


KIND = AlgorithmsKind()
