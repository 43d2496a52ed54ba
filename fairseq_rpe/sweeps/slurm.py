"""A sweep on a SLURM cluster: the runs with work left as one array of submitit, a job each."""

from __future__ import annotations

import json
import os
import shlex
import shutil
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fairseq_rpe.core.errors import UserError
from fairseq_rpe.runs import processes
from fairseq_rpe.runs.child_output import last_error
from fairseq_rpe.sweeps import local_executor
from fairseq_rpe.sweeps.grid import TRAINING, Cell, Stage
from fairseq_rpe.sweeps.resolve import Sweep
from fairseq_rpe.utils.child_processes import interpreter
from fairseq_rpe.utils.files import lock

if TYPE_CHECKING:
    import submitit

FOLDER = "slurm"
# decided by other flags, or what the jobs rely on
OURS = {
    "nodes": "--nodes",
    "array_parallelism": "--jobs",
    "tasks_per_node": "it is always 1: --nproc says how many processes there are",
    "submitit_folder": "it is always a folder of --out",
}
# submitit's own words for every kind of cluster; the others are SLURM's
_COMMON = ("name", "timeout_min", "mem_gb", "nodes", "cpus_per_task", "gpus_per_node", "tasks_per_node")
_ADDITIONAL = "additional_parameters."
_TIMEOUTS = 100  # a run goes on from its last checkpoint, so that it may need its time several times over
_POLL_SECONDS = 5.0
# the one place of a job: cores and GPUs are those that SLURM gave to it
_PLACE: list[dict[str, str]] = [{}]


def settings(sweep: Sweep, given: Sequence[tuple[str, str]]) -> dict[str, object]:
    """What submitit is told of the jobs; ``given``: KEY=VALUE of the user's.

    ``additional_parameters.X`` is sbatch's own option X; a list in brackets is a list.
    """
    found: dict[str, object] = {"name": sweep.out.name, "nodes": sweep.base.nodes, "tasks_per_node": 1}
    if sweep.base.device != "cpu":
        found["gpus_per_node"] = sweep.base.nproc
    if sweep.jobs:
        found["array_parallelism"] = sweep.jobs
    more: dict[str, object] = {}
    for key, value in given:
        part = more if key.startswith(_ADDITIONAL) else found
        part[key.removeprefix(_ADDITIONAL)] = _typed(value)
    return {**found, "additional_parameters": more} if more else found


def _typed(value: str) -> object:
    """Numbers, true, false and null as JSON has them, ``[a, b]`` as a list of texts, anything else as text."""
    if value.startswith("[") and value.endswith("]"):
        return [item.strip() for item in value[1:-1].split(",")]
    try:
        return json.loads(value)
    except ValueError:
        return value


def check() -> None:
    """Refuse what would fail after the sweep was prepared."""
    try:
        import submitit  # noqa: F401
    except ImportError:
        install = "pip install -c requirements/constraints.txt -e '.[slurm]'"
        raise UserError(f"--launcher slurm needs submitit: {install}") from None
    for program in ("sbatch", "srun"):
        if shutil.which(program) is None:
            raise UserError(f"--launcher slurm: there is no {program} here: run this on a login node of the cluster")


def execute(sweep: Sweep, given: Sequence[tuple[str, str]], pending: Mapping[Cell, list[Stage]]) -> list[str]:
    """Submit, wait and say which runs are not finished then; a run that an earlier job is busy with is left to it."""
    busy = [cell for cell in pending if _is_busy(cell)]
    for cell in busy:
        print(f"{cell.name} is already being run by a job of an earlier call: leaving it to that job", file=sys.stderr)
    mine = {cell: _sizes(stages) for cell, stages in pending.items() if cell not in busy}
    told = _submit(sweep, given, list(mine)) if mine else ""
    failures = [f"{cell.name} is not finished: another job is busy with it, see squeue" for cell in busy]
    for cell, before in mine.items():
        if left := cell.work_left():
            why = last_error(left[0].log, before.get(left[0].log, 0)) or told or "its job left no message"
            where = left[0].log if left[0].log.exists() else sweep.out / FOLDER
            failures.append(f"{cell.name} is not finished, {left[0].name} is left: {why} (log: {where})")
    return failures


def executor(sweep: Sweep, given: Sequence[tuple[str, str]]) -> submitit.AutoExecutor:
    """submitit's executor for the jobs of a sweep.

    Raises UserError: submitit or SLURM has no such setting.
    """
    import submitit

    of: dict[str, Any] = {"slurm_max_num_timeout": _TIMEOUTS, "slurm_python": shlex.join(interpreter())}
    made = submitit.AutoExecutor(sweep.out / FOLDER / "%j", cluster="slurm", **of)
    wanted = {key if key in _COMMON else f"slurm_{key}": value for key, value in settings(sweep, given).items()}
    try:
        made.update_parameters(**wanted)
    except (NameError, TypeError, ValueError, AssertionError) as error:
        raise UserError(f"--slurm: {' '.join(str(error).split())}") from None
    return made


def _submit(sweep: Sweep, given: Sequence[tuple[str, str]], cells: list[Cell]) -> str:
    """Start the jobs and wait for them; returns what the first failed one complained about."""
    firsts = [cell for cell in cells if cell.parent not in cells]
    jobs = executor(sweep, given).map_array(Job(), firsts)
    if behind := [cell for cell in cells if cell.parent in cells]:
        # afterany: a run that failed is told by the job of the one that continues it
        numbers = {cell: job.job_id for cell, job in zip(firsts, jobs, strict=True)}
        wait = ":".join(["afterany", *dict.fromkeys(numbers[cell.parent] for cell in behind if cell.parent)])
        jobs = [*jobs, *executor(sweep, [*given, ("dependency", wait)]).map_array(Job(), behind)]
    ids = ", ".join(job.job_id for job in jobs)
    print(f"{len(jobs)} jobs for SLURM ({ids}), of {', '.join(c.name for c in (*firsts, *behind))}", file=sys.stderr)
    print("This waits for them. If you stop it, they go on; rerun it to collect the results.", file=sys.stderr)
    with processes.sigterm_raises():
        while not all(job.done() for job in jobs):
            time.sleep(_POLL_SECONDS)
    errors = [error for job in jobs if (error := job.exception()) is not None]
    return f"{type(errors[0]).__name__}: {errors[0]}".splitlines()[0] if errors else ""


class Job:
    """What a job does; SLURM starts it again after a time-out, preemption or lost node."""

    def __call__(self, cell: Cell) -> None:
        """Do what is left of a run, as the local launcher does; with nothing left it ends at once.

        A failed run is told in the job's log and is no exception: the other jobs go on.
        """
        try:
            if int(os.environ.get("SLURM_NODEID", "0")) > 0:
                _train_along(cell)
                return
            with lock(cell.folder.lock, f"another job is busy with {cell.name}"):
                stages = cell.work_left()
                for line in local_executor.execute({cell: stages}, [cell], _PLACE) if stages else []:
                    print(f"error: {line}", file=sys.stderr)
        except UserError as error:
            print(f"error: {error}", file=sys.stderr)
        except processes.Stopped:
            # no result for submitit: SLURM may start this job again
            sys.exit(143)

    def checkpoint(self, cell: Cell) -> submitit.helpers.DelayedSubmission:
        """What is submitted again: the same run, whose folder knows how far it is."""
        import submitit

        return submitit.helpers.DelayedSubmission(self, cell)


def _train_along(cell: Cell) -> None:
    """A further node of a run takes part in its training alone."""
    stages = [stage for stage in cell.work_left() if stage.name == TRAINING]
    if stages:
        log = cell.folder.path / f"train-node{os.environ['SLURM_NODEID']}.log"
        local_executor.execute({cell: [Stage(TRAINING, stages[0].command, log)]}, [cell], _PLACE)


def _is_busy(cell: Cell) -> bool:
    try:
        with lock(cell.folder.lock, "busy"):
            return False
    except UserError:
        return True


def _sizes(stages: list[Stage]) -> dict[Path, int]:
    return {stage.log: stage.log.stat().st_size for stage in stages if stage.log.exists()}
