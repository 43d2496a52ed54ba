"""The interface of a kind of sweep: which runs it builds, and what the trained models are evaluated on."""

from abc import ABC, abstractmethod
from collections.abc import Collection, Sequence
from typing import ClassVar

from fairseq_rpe.evaluation.records import Result
from fairseq_rpe.sweeps.grid import SweepRun
from fairseq_rpe.sweeps.recipes import RecipeKind, recipe_kind
from fairseq_rpe.sweeps.resolve import Inputs, Sweep


class SweepKind(RecipeKind, ABC):
    """How a sweep evaluates its models: on a text, on generated tasks or on questions.

    A module of :mod:`fairseq_rpe.kinds` has an instance, ``KIND``, and the report on its results, ``REPORT``
    (:class:`~fairseq_rpe.reports.kind_report.KindReport`).

    Attributes:
        result_type: record of one result in a run's ``eval.jsonl``.
    """

    result_type: ClassVar[type[Result]]

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

    def check_lengths(self, sweep: Sweep, runs: Sequence[SweepRun]) -> None:
        """Check that the data fills the blocks of trainings and evaluations, before anything is trained.

        Args:
            sweep: sweep whose data and lengths are checked.
            runs: all its runs.

        Raises:
            UserError: a text is too short, a question too long, or ``--max-tokens`` too small.
        """


def sweep_kind(name: str) -> SweepKind:
    """Return the kind of sweeps with a name, one of :func:`~fairseq_rpe.sweeps.recipes.kind_names`."""
    kind = recipe_kind(name)
    assert isinstance(kind, SweepKind)
    return kind
