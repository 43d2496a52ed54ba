"""The interface of the report of a kind of sweep: its files, how results are read, and how they are shown."""

from __future__ import annotations

import importlib
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import TYPE_CHECKING, ClassVar, Generic, NamedTuple, TypeVar

from fairseq_rpe.core.errors import UserError
from fairseq_rpe.reports.sweep_results import SweepResults
from fairseq_rpe.sweeps.sweep_record import SweepFolder, SweepRecord

if TYPE_CHECKING:  # these modules draw, and a finished sweep answers without them
    from fairseq_rpe.reports.chapters.training import TrainedRun
    from fairseq_rpe.reports.page import ReportContent

Results = TypeVar("Results", bound=SweepResults)


class MetricTags(NamedTuple):
    """Tags of a sweep's evaluations. TensorBoard sorts tags, so a tag to be shown first begins with a number.

    Attributes:
        names: title of each metric by tag; the metrics are the columns of the HParams tab.
        curve: tag of the curve of each run.
        title: title of the chart of all curves.
        further: tags of further curves by the title of their chart.
    """

    names: dict[str, str]
    curve: str
    title: str
    further: Mapping[str, str] = MappingProxyType({})


class KindReport(ABC, Generic[Results]):
    """How a kind of sweep reports on its results; each module of :mod:`fairseq_rpe.kinds` has an instance, ``REPORT``.

    Attributes:
        subject: what the models are evaluated on, for messages.
        measured: the results, for messages.
        csv_name, figure_name: names of the report's main table and figure, without suffixes.
        extra_tables: names of further CSV files of the report.
        has_definition: whether Definition 0.1 of extrapolation, with its δ, applies to the results.
    """

    subject: ClassVar[str]
    measured: ClassVar[str]
    csv_name: ClassVar[str]
    figure_name: ClassVar[str]
    extra_tables: ClassVar[tuple[str, ...]] = ()
    has_definition: ClassVar[bool] = False

    @abstractmethod
    def load_results(self, folder: SweepFolder, record: SweepRecord) -> Results:
        """Read the results of the finished runs of a sweep.

        Args:
            folder: folder of the sweep.
            record: its record.

        Returns:
            The results; empty if none is finished.
        """

    @abstractmethod
    def content_builder(
        self, folder: SweepFolder, record: SweepRecord, runs: Sequence[TrainedRun], results: Results, delta: float
    ) -> tuple[Callable[[], ReportContent], dict[str, str]]:
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
    def metric_tags(self, results: Results) -> MetricTags:
        """Return the tags of the results for TensorBoard."""

    @abstractmethod
    def metrics_and_curve(
        self, results: Results, method: str, task: str | None
    ) -> tuple[dict[str, float], dict[int, float]]:
        """Return the metrics of one run by tag, and its curve by step.

        Args:
            results: results of the run alone, so that each length has the value of one seed.
            method: name of its method.
            task: its generated task or folder of questions; None for text.
        """

    def further_curves(self, results: Results, method: str) -> dict[str, dict[int, float]]:
        """Return further curves of one run, by tag and by step.

        Args:
            results: results of the run alone.
            method: name of its method.
        """
        return {}


def kind_report(name: str) -> KindReport[SweepResults]:
    """Return the report of the kind of sweeps with a name, one of :func:`~fairseq_rpe.sweeps.recipes.kind_names`."""
    report: KindReport[SweepResults] = importlib.import_module(f"fairseq_rpe.kinds.{name}").REPORT
    return report


def load_results(folder: SweepFolder, record: SweepRecord) -> SweepResults:
    """Read the results of the finished runs of a sweep.

    Args:
        folder: folder of the sweep.
        record: its record.

    Returns:
        Results of the class of its kind.

    Raises:
        UserError: there are none.
    """
    results = kind_report(record.kind).load_results(folder, record)
    if not results.results:
        raise UserError(f"{folder.path} holds no finished evaluation yet: run its sweep first")
    return results
