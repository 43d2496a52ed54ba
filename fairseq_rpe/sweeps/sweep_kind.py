"""The interface of a kind of sweep: what the trained models are evaluated on, and how a report shows it."""

from __future__ import annotations

import importlib
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Sequence
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple

from fairseq_rpe.core.errors import UserError
from fairseq_rpe.evaluation.records import Result
from fairseq_rpe.utils.files import PACKAGE_DIR

if TYPE_CHECKING:
    from fairseq_rpe.sweeps.grid import Evaluation, SweepRun
    from fairseq_rpe.sweeps.inputs import Inputs
    from fairseq_rpe.sweeps.recipes import Preset
    from fairseq_rpe.sweeps.resolve import Draft, Sweep
    from fairseq_rpe.sweeps.sweep_record import SweepFolder, SweepRecord

_PACKAGE = "fairseq_rpe.kinds"


class MetricTags(NamedTuple):
    """Tags of a sweep's evaluations. TensorBoard sorts tags, so a tag to be shown first begins with a number.

    Attributes:
        names: title of each metric by tag; the metrics are the columns of the HParams tab.
        curve: tag of the curve of each run.
        title: title of the chart of all curves.
    """

    names: dict[str, str]
    curve: str
    title: str


class SweepKind(ABC):
    """How a sweep evaluates its models and reports on them: on a text, on generated tasks or on questions.

    Each kind is a module of :mod:`fairseq_rpe.kinds`. Methods about reports take ``results``: what
    :meth:`load_results` returned.

    Attributes:
        name: name in recipes.
        subject: what the models are evaluated on, for messages.
        measured: the results, for messages.
        result_type: record of one result in a run's ``eval.jsonl``.
        csv_name, figure_name: names of the report's main table and figure, without suffixes.
        default_split: split that results are computed on by default.
        extra_tables: names of further CSV files of the report.
        has_definition: whether Definition 0.1 of extrapolation, with its δ, applies to the results.
    """

    name: ClassVar[str]
    subject: ClassVar[str]
    measured: ClassVar[str]
    result_type: ClassVar[type[Result]]
    csv_name: ClassVar[str]
    figure_name: ClassVar[str]
    default_split: ClassVar[str] = "test"
    extra_tables: ClassVar[tuple[str, ...]] = ()
    has_definition: ClassVar[bool] = False

    def select_presets(self, presets: dict[str, Preset], source: str) -> dict[str, Preset]:
        """Check the presets of a recipe of this kind.

        Args:
            presets: presets by name, with those of the recipe's base.
            source: the recipe, for messages.

        Returns:
            The presets that belong to this kind.

        Raises:
            UserError: a preset has settings of another kind.
        """
        for label, preset in presets.items():
            if keys := preset.question_keys():
                raise UserError(
                    f"{source}: {keys[0]} of preset '{label}' is for kind answers, this recipe is for {self.name}"
                )
        return presets

    @abstractmethod
    def check_options(self, recipe: str, data: Path | None, algorithms: Sequence[str] | None) -> None:
        """Check the options DATA and --algorithms of a sweep that follows a recipe.

        Args:
            recipe: name of the recipe.
            data: folder with the text of the training, None if the command line has none.
            algorithms: generated tasks, None if the command line has none.

        Raises:
            UserError: an option does not apply to this kind.
        """

    def fill_draft(self, draft: Draft, preset: Preset, train_length: int) -> None:  # noqa: B027  (nothing by default)
        """Fill options of a sweep that only this kind has.

        Args:
            draft: options of the command line and of the recipe.
            preset: preset of the recipe.
            train_length: training length in tokens.

        Raises:
            UserError: an option does not apply to this kind.
        """

    @abstractmethod
    def build_runs(self, sweep: Sweep, inputs: Inputs, without_bias: Collection[str] = ()) -> list[SweepRun]:
        """Build the runs of a sweep with their evaluations.

        Args:
            sweep: resolved sweep of this kind.
            inputs: its data.
            without_bias: specs of encodings that add no bias. ``--log-encodings-every`` would have nothing to log, so
                they are trained without it.

        Returns:
            The runs; a run comes after the one that it continues.

        Raises:
            UserError: a setting or a length cannot be used.
        """

    def check_lengths(self, sweep: Sweep, runs: Sequence[SweepRun]) -> None:  # noqa: B027  (nothing to check by default)
        """Check that the data fills the blocks of trainings and evaluations, before anything is trained.

        Args:
            sweep: sweep whose data and lengths are checked.
            runs: all its runs.

        Raises:
            UserError: a text is too short, a question too long, or ``--max-tokens`` too small.
        """

    @abstractmethod
    def evaluation_costs(self, evaluation: Evaluation) -> list[float]:
        """Estimate the cost of each result of an evaluation; see :func:`~fairseq_rpe.sweeps.costs.forward_cost`.

        Args:
            evaluation: evaluation of a run.

        Returns:
            One cost per key.
        """

    @abstractmethod
    def load_results(self, folder: SweepFolder, record: SweepRecord) -> Any:
        """Read the results of the finished runs of a sweep.

        Args:
            folder: folder of the sweep.
            record: its record.

        Returns:
            The results; empty if none is finished.
        """

    @abstractmethod
    def report_builder(
        self, folder: SweepFolder, record: SweepRecord, runs: Sequence[Any], results: Any, delta: float
    ) -> tuple[Callable[[], Any], dict[str, str]]:
        """Prepare the report on the results.

        Args:
            folder: folder of the sweep.
            record: its record.
            runs: trained runs.
            results: results of the sweep.
            delta: δ of Definition 0.1; used only with :attr:`has_definition`.

        Returns:
            A function that builds the chapters and draws their figures, and the texts of further CSV files by name.
        """

    @abstractmethod
    def metric_tags(self, results: Any) -> MetricTags:
        """Return the tags of the results for TensorBoard."""

    @abstractmethod
    def metrics_and_curve(
        self, results: Any, method: str, task: str | None
    ) -> tuple[dict[str, float], dict[int, float]]:
        """Return the metrics of one run by tag, and its curve by step.

        Args:
            results: results of the run alone, so that each length has the value of one seed.
            method: name of its method.
            task: its generated task or folder of questions; None for text.
        """


@cache
def kind_names() -> tuple[str, ...]:
    """Return the names of all kinds, those of the modules of :mod:`fairseq_rpe.kinds`."""
    folder = PACKAGE_DIR / "kinds"
    return tuple(sorted(path.stem for path in folder.glob("[a-z]*.py")))


@cache
def sweep_kind(name: str) -> SweepKind:
    """Return the kind of sweeps with a name, from its module in :mod:`fairseq_rpe.kinds`.

    Args:
        name: one of :func:`kind_names`.
    """
    kind: SweepKind = importlib.import_module(f"{_PACKAGE}.{name}").KIND
    return kind
