"""Estimated costs of runs, for the progress bar of a sweep."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from fairseq_rpe.sweeps.grid import ForwardPass, SweepRun

_BACKWARD = 3  # cost of a forward and a backward pass, relative to a forward pass
_ATTENTION = 2000  # tokens of context at which attention costs as much as the rest of a small model


def forward_cost(work: ForwardPass) -> float:
    """Estimate the cost of a forward pass, in tokens of a forward pass with little context.

    Args:
        work: tokens that the model reads.

    Returns:
        The cost.
    """
    return work.tokens * (1 + work.context / _ATTENTION)


@dataclass(frozen=True)
class RunCost:
    """Estimated cost of a run, in tokens of a forward pass with little context.

    Attributes:
        updates: number of updates of the whole training.
        update: cost of one update, forward and backward pass.
        results: cost of each result, in the order of the evaluation.
    """

    updates: int
    update: float
    results: Sequence[float]

    @classmethod
    def from_run(cls, run: SweepRun) -> RunCost:
        """Estimate the cost of a run."""
        s = run.plan.settings
        update = _BACKWARD * forward_cost(ForwardPass(s.batch_sentences * s.update_freq * s.nproc * s.tokens, s.tokens))
        return cls(run.plan.updates, update, [forward_cost(work) for e in run.evaluations for work in e.passes()])

    def spent(self, updates: int, results: int) -> float:
        """Return the cost spent after ``updates`` training updates and ``results`` results."""
        return min(updates, self.updates) * self.update + sum(self.results[:results])

    @property
    def total(self) -> float:
        """Cost of the whole run."""
        return self.spent(self.updates, len(self.results))
