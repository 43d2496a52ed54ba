"""Runs a sweep on a SLURM cluster: the runs with stages left are one job array of submitit."""

from __future__ import annotations

import json
import math
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
from fairseq_rpe.sweeps.grid import TRAINING, Stage, SweepRun
from fairseq_rpe.sweeps.resolve import Sweep
from fairseq_rpe.utils.child_processes import python_command
from fairseq_rpe.utils.files import exclusive_lock

if TYPE_CHECKING:
    import submitit

FOLDER = "slurm"
# settings that other options decide, or that the jobs rely on
RESERVED_SETTINGS = {
    "nodes": "--nodes",
    "array_parallelism": "--jobs",
    "tasks_per_node": "it is always 1: --nproc says how many processes there are",
    "submitit_folder": "it is always a folder of --out",
}
# parameters that submitit has for all clusters; the others are SLURM's
_COMMON = ("name", "timeout_min", "mem_gb", "nodes", "cpus_per_task", "gpus_per_node", "tasks_per_node")
_ADDITIONAL = "additional_parameters."
_LISTS = ("setup", "teardown", "srun_args")  # parameters of submitit that are lists
_NUMBERS = ("timeout_min", "mem_gb", "cpus_per_task")
_MAX_TIMEOUTS = 100  # a run resumes from its last checkpoint, so one job may time out often
_POLL_SECONDS = 5.0
# the environment of a job; its cores and GPUs are those that SLURM allocates
_JOB_ENVIRONMENTS: list[dict[str, str]] = [{}]


def job_settings(sweep: Sweep, options: Sequence[tuple[str, str]]) -> dict[str, object]:
    """Return the parameters of submitit for the jobs of a sweep.

    Args:
        sweep: sweep that names the nodes and GPUs of a job, and the number of concurrent jobs.
        options: keys and values of ``--slurm``; ``additional_parameters.X`` is sbatch's option X, and a value in
            brackets is a list.

    Returns:
        Parameters by name.

    Raises:
        UserError: ``additional_parameters`` has no name of an option of sbatch, or a time, memory or number of cores is
            no number above 0.
    """
    settings: dict[str, object] = {"name": sweep.out.name, "nodes": sweep.base_config.nodes, "tasks_per_node": 1}
    if sweep.base_config.device != "cpu":
        settings["gpus_per_node"] = sweep.base_config.nproc
    if sweep.jobs:
        settings["array_parallelism"] = sweep.jobs
    additional: dict[str, object] = {}
    for key, value in options:
        if key == _ADDITIONAL.removesuffix("."):
            raise UserError(f"--slurm {key}={value}: write {_ADDITIONAL}NAME={value}, with an option NAME of sbatch")
        table = additional if key.startswith(_ADDITIONAL) else settings
        parsed = _parse_value(value)
        is_positive = isinstance(parsed, (int, float)) and not isinstance(parsed, bool) and parsed > 0
        if key in _NUMBERS and parsed is not None and not is_positive:
            raise UserError(f"--slurm {key}={value}: write a number above 0")
        is_list = key in _LISTS and not isinstance(parsed, list) and parsed is not None
        table[key.removeprefix(_ADDITIONAL)] = [value] if is_list else parsed
    return {**settings, "additional_parameters": additional} if additional else settings


def _parse_value(value: str) -> object:
    """Parse finite numbers, true, false and null as JSON, ``[a, b]`` as a list of texts, anything else as text."""
    if value.startswith("[") and value.endswith("]"):
        return [item.strip() for item in value[1:-1].split(",")]
    try:
        parsed: object = json.loads(value)
    except ValueError:
        return value
    is_finite = not isinstance(parsed, float) or math.isfinite(parsed)
    return parsed if is_finite else value


def check_slurm() -> None:
    """Check that submitit and SLURM are available.

    Raises:
        UserError: submitit or a program of SLURM is missing.
    """
    try:
        import submitit  # noqa: F401
    except ImportError:
        install = "pip install -c requirements/constraints.txt -e '.[slurm]'"
        raise UserError(f"--launcher slurm needs submitit: {install}") from None
    for program in ("sbatch", "srun"):
        if shutil.which(program) is None:
            raise UserError(f"--launcher slurm: there is no {program} here: run this on a login node of the cluster")


def submit_and_wait(
    sweep: Sweep, options: Sequence[tuple[str, str]], pending: Mapping[SweepRun, list[Stage]]
) -> list[str]:
    """Submit the jobs of a sweep and wait for them; runs of a job that is still active are left to it.

    Args:
        sweep: sweep whose runs become jobs.
        options: keys and values of ``--slurm``.
        pending: stages that are left, by run.

    Returns:
        One line per run that is not finished.
    """
    busy = [run for run in pending if _is_busy(run)]
    for run in busy:
        print(f"{run.name} is already being run by a job of an earlier call: leaving it to that job", file=sys.stderr)
    waiting = [run for run in pending if run.parent in busy and run not in busy]
    submitted = {run: _log_sizes(stages) for run, stages in pending.items() if run not in (*busy, *waiting)}
    error = _submit(sweep, options, list(submitted)) if submitted else ""
    failures = [f"{run.name} is not finished: another job is busy with it, see squeue" for run in busy]
    failures += [
        f"{run.name} is not started: it continues {run.parent.name}, which another job is busy with: repeat the "
        "command when that job has ended"
        for run in waiting
        if run.parent
    ]
    for run, log_sizes in submitted.items():
        if remaining := run.remaining_stages():
            stage = remaining[0]
            reason = last_error(stage.log, log_sizes.get(stage.log, 0)) or error or "its job left no message"
            log = stage.log if stage.log.exists() else sweep.out / FOLDER
            failures.append(f"{run.name} is not finished, {stage.name} is left: {reason} (log: {log})")
    return failures


def make_executor(sweep: Sweep, options: Sequence[tuple[str, str]]) -> submitit.AutoExecutor:
    """Return submitit's executor for the jobs of a sweep.

    Args:
        sweep: sweep whose folder gets the logs of the jobs.
        options: keys and values of ``--slurm``.

    Returns:
        The executor.

    Raises:
        UserError: submitit or SLURM has no such setting.
    """
    import submitit

    defaults: dict[str, Any] = {"slurm_max_num_timeout": _MAX_TIMEOUTS, "slurm_python": shlex.join(python_command())}
    executor = submitit.AutoExecutor(sweep.out / FOLDER / "%j", cluster="slurm", **defaults)
    parameters = {
        key if key in _COMMON else f"slurm_{key}": value for key, value in job_settings(sweep, options).items()
    }
    try:
        executor.update_parameters(**parameters)
    except (NameError, TypeError, ValueError, AssertionError) as error:
        raise UserError(f"--slurm: {' '.join(str(error).split())}") from None
    return executor


def _submit_array(
    sweep: Sweep, options: Sequence[tuple[str, str]], runs: Sequence[SweepRun]
) -> list[submitit.Job[None]]:
    """Submit one job array.

    Raises:
        UserError: sbatch refuses it.
    """
    from submitit.core.utils import FailedJobError

    try:
        return make_executor(sweep, options).map_array(SweepJob(), runs)
    except FailedJobError as error:
        raise UserError(f"sbatch refuses the jobs: {' '.join(str(error).split())}: correct --slurm") from None


def _submit(sweep: Sweep, options: Sequence[tuple[str, str]], runs: list[SweepRun]) -> str:
    """Submit the jobs and wait for them; return the message of the first failed one."""
    independent = [run for run in runs if run.parent not in runs]
    jobs = _submit_array(sweep, options, independent)
    if continued := [run for run in runs if run.parent in runs]:
        # afterany: the job that continues a failed run reports that failure
        job_ids = {run: job.job_id for run, job in zip(independent, jobs, strict=True)}
        dependency = ":".join(["afterany", *dict.fromkeys(job_ids[run.parent] for run in continued if run.parent)])
        jobs = [*jobs, *_submit_array(sweep, [*options, ("dependency", dependency)], continued)]
    ids = ", ".join(job.job_id for job in jobs)
    print(
        f"{len(jobs)} jobs for SLURM ({ids}), of {', '.join(c.name for c in (*independent, *continued))}",
        file=sys.stderr,
    )
    print("This waits for them. If you stop it, they continue; rerun it to collect the results.", file=sys.stderr)
    with processes.sigterm_raises():
        while not all(job.done() for job in jobs):
            time.sleep(_POLL_SECONDS)
    errors = [error for job in jobs if (error := job.exception()) is not None]
    return f"{type(errors[0]).__name__}: {errors[0]}".splitlines()[0] if errors else ""


class SweepJob:
    """The function of a job; SLURM requeues it after a time-out, preemption or lost node."""

    def __call__(self, run: SweepRun) -> None:
        """Run the remaining stages of a run.

        A failure is printed to the log of the job and raises nothing, so that other jobs continue.

        Args:
            run: run that this job trains and evaluates.
        """
        try:
            if int(os.environ.get("SLURM_NODEID", "0")) > 0:
                _join_training(run)
                return
            with exclusive_lock(run.folder.lock, f"another job is busy with {run.name}"):
                stages = run.remaining_stages()
                for line in local_executor.run_stages({run: stages}, [run], _JOB_ENVIRONMENTS) if stages else []:
                    print(f"error: {line}", file=sys.stderr)
        except UserError as error:
            print(f"error: {error}", file=sys.stderr)
        except processes.Terminated:
            # without a result for submitit SLURM may start this job again
            sys.exit(143)

    def checkpoint(self, run: SweepRun) -> submitit.helpers.DelayedSubmission:
        """Return the job that replaces this one: the same run, which resumes from its folder.

        Args:
            run: run that the interrupted job was working on.

        Returns:
            The submission.
        """
        import submitit

        return submitit.helpers.DelayedSubmission(self, run)


def _join_training(run: SweepRun) -> None:
    """Take part in the training of a run as a further node, which evaluates nothing."""
    if any(stage.name == TRAINING for stage in run.remaining_stages()):
        # with all options: the record is the first node's
        log = run.folder.path / f"train-node{os.environ['SLURM_NODEID']}.log"
        local_executor.run_stages({run: [Stage(TRAINING, run.train_command, log)]}, [run], _JOB_ENVIRONMENTS)


def _is_busy(run: SweepRun) -> bool:
    try:
        with exclusive_lock(run.folder.lock, "busy"):
            return False
    except UserError:
        return True


def _log_sizes(stages: list[Stage]) -> dict[Path, int]:
    return {stage.log: stage.log.stat().st_size for stage in stages if stage.log.exists()}
