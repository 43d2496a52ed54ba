"""One job of a sweep on SLURM: hydra starts it for each run, SLURM again after a time-out, preemption or lost node."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import hydra
from omegaconf import DictConfig

from fairseq_rpe.cli import cells, processes, runner
from fairseq_rpe.core.errors import UserError
from fairseq_rpe.core.files import lock

# the one place of a job: cores and GPUs are those that SLURM gave to it
_PLACE: list[dict[str, str]] = [{}]


def carry_out(folder: Path) -> None:
    """Do what is left of the run in ``folder``, as the local launcher does; with nothing left it ends at once.

    A failed run is told in the job's log and is no exception, so that the launcher waits for the other jobs.
    """
    cell = cells.load(folder)
    try:
        if int(os.environ.get("SLURM_NODEID", "0")) > 0:
            _train_along(cell)
            return
        with lock(cell.lock, f"another job is busy with {cell.slug}"):
            stages = cell.work_left()
            for line in runner.execute({cell: stages}, [cell], _PLACE) if stages else []:
                print(f"error: {line}", file=sys.stderr)
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
    except processes.Stopped:
        # no result for submitit: SLURM may start this job again
        sys.exit(143)


def _train_along(cell: cells.Cell) -> None:
    """A further node of a run takes part in its training alone."""
    stages = [stage for stage in cell.work_left() if stage.name == "training"]
    if stages:
        log = cell.folder / f"train-node{os.environ['SLURM_NODEID']}.log"
        runner.execute({cell: [runner.Stage("training", stages[0].command, log)]}, [cell], _PLACE)


@hydra.main(version_base="1.3", config_path=None)
def main(cfg: DictConfig) -> None:
    """``+out=`` the sweep's folder, ``+run=`` the run's name."""
    carry_out(Path(cfg.out) / "runs" / cfg.run)


if __name__ == "__main__":
    main()
