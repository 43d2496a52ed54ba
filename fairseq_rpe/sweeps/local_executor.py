"""Runs the stages of a sweep on this machine: several runs at a time under one progress bar."""

from __future__ import annotations

import os
import subprocess
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from fairseq_rpe.core.errors import DEBUG_VARIABLE
from fairseq_rpe.runs import processes
from fairseq_rpe.runs.child_output import last_error
from fairseq_rpe.runs.log import TrainingLogParser
from fairseq_rpe.sweeps.costs import RunCost
from fairseq_rpe.sweeps.grid import TRAINING, Stage, SweepRun
from fairseq_rpe.utils import devices
from fairseq_rpe.utils.progress import Progress

_POLL_SECONDS = 0.2  # between two looks at the children and their logs


def job_environments(device: str, nproc: int, jobs: int | None) -> list[dict[str, str]]:
    """Return the environment variables of each concurrent job; more jobs than GPUs share them in turn.

    Jobs share the cores equally, unless OMP_NUM_THREADS states the number of threads of each process.

    Args:
        device: value of ``--device``.
        nproc: number of processes of a run, each with a GPU on CUDA.
        jobs: concurrent runs; None for as many as the GPUs or cores allow.

    Returns:
        One environment per job.

    Raises:
        UserError: there are fewer GPUs than one run needs.
    """
    gpus = devices.visible_gpus(device, nproc)
    cores = processes.available_cores()
    jobs = jobs or max(1, (len(gpus) or cores) // nproc)
    threads = os.environ.get("OMP_NUM_THREADS", str(max(1, cores // (jobs * nproc))))
    environments = []
    for job in range(jobs):
        environment = {"OMP_NUM_THREADS": threads}
        if gpus:
            environment["CUDA_VISIBLE_DEVICES"] = ",".join(gpus[(job * nproc + r) % len(gpus)] for r in range(nproc))
        environments.append(environment)
    return environments


class TrainingLogFollower(TrainingLogParser):
    """Parses the log of a training while it grows.

    Args:
        log: path of the log file, which exists when it is read.
        start: byte at which the output of this training begins.
    """

    def __init__(self, log: Path, start: int = 0) -> None:
        super().__init__()
        self.log, self.start = log, start

    def read(self) -> None:
        """Read the complete lines that were added since the last call."""
        with open(self.log, "rb") as file:
            file.seek(self.start)
            text = file.read()
        lines = text[: text.rfind(b"\n") + 1]
        self.start += len(lines)
        for line in lines.decode(errors="replace").splitlines():
            self.parse_line(line)


class LineCounter:
    """Counts the lines of a growing file; each call reads only what was added.

    Args:
        path: the file; it need not exist.
    """

    def __init__(self, path: Path) -> None:
        self.path, self._position, self._lines = path, 0, 0

    def read(self) -> int:
        """Return the lines of the file, 0 without a file."""
        try:
            with open(self.path, "rb") as file:
                if file.seek(0, os.SEEK_END) < self._position:  # the file was replaced
                    self._position = self._lines = 0
                file.seek(self._position)
                self._lines += file.read().count(b"\n")
                self._position = file.tell()
        except FileNotFoundError:
            self._position = self._lines = 0
        return self._lines


@dataclass
class _ActiveRun:
    """A run whose stages are being executed, one after the other.

    Attributes:
        run: the run.
        stages: the current stage and those after it.
        slot: number of the concurrent job that executes them, which decides the GPUs.
        child: process of the current stage, None before the first stage.
        log_start: byte of the stage's log at which the output of this process begins.
        log: parser of the current stage's log from there on.
        results: counter of the lines of the run's results.
    """

    run: SweepRun
    stages: list[Stage]
    slot: int
    child: subprocess.Popen[bytes] | None = None
    log_start: int = 0
    log: TrainingLogFollower = field(init=False)
    results: LineCounter = field(init=False)

    def __post_init__(self) -> None:
        self.results = LineCounter(self.run.folder.results)
        self.log = TrainingLogFollower(self.stages[0].log, self.log_start)

    @property
    def is_training(self) -> bool:
        return self.stages[0].name == TRAINING

    def cost_spent(self, cost: RunCost) -> float:
        """Return the cost spent on this run so far."""
        if self.is_training:
            return cost.spent(self.log.updates, 0)
        return cost.spent(self.run.plan.updates, self.results.read())

    def start(self, environment: Mapping[str, str]) -> None:
        """Start the next stage."""
        if self.stages[0].starts_from_record:
            self.run.write_config()
        log = self.stages[0].log
        log.parent.mkdir(parents=True, exist_ok=True)
        with open(log, "ab") as file:
            self.log_start = file.tell()
            self.log = TrainingLogFollower(log, self.log_start)
            # with tracebacks, because a log is where users look for them
            self.child = processes.spawn(self.stages[0].command, {**environment, DEBUG_VARIABLE: "1"}, log=file)

    def poll(self) -> int | None:
        """Return the exit code of the current stage, None while it runs."""
        return None if self.child is None else self.child.poll()

    def describe(self) -> str:
        """Return the progress for the bar."""
        if self.is_training and self.log.loss is not None:
            return f"{self.run.name} {self.log.updates}/{self.run.plan.updates} loss {self.log.loss:g}"
        return f"{self.run.name} {self.stages[0].name}"


def _next_ready(
    waiting: Sequence[tuple[SweepRun, list[Stage]]], active: Sequence[_ActiveRun]
) -> tuple[SweepRun, list[Stage]] | None:
    """Return the first run that waits for no other training, with its stages."""
    in_training = {run for run, stages in waiting if stages[0].name == TRAINING}
    in_training |= {job.run for job in active if job.is_training}
    for run, stages in waiting:
        if stages[0].name != TRAINING or run.parent not in in_training:
            return run, stages
    return None


class _Executor:
    """Starts the stages of runs in slots and notices their ends.

    Attributes:
        waiting: runs that are not started yet, with their stages.
        active: runs whose stages are being executed.
        failures: one line per failed run.
    """

    def __init__(self, pending: Mapping[SweepRun, list[Stage]], environments: Sequence[Mapping[str, str]]) -> None:
        self._environments = environments
        self._free_slots = list(range(len(environments)))
        self.waiting = list(pending.items())
        self.active: list[_ActiveRun] = []
        self.failures: list[str] = []

    def start_ready(self) -> None:
        """Start runs that are ready in the free slots."""
        while self._free_slots and (ready := _next_ready(self.waiting, self.active)):
            self.waiting.remove(ready)
            run, stages = ready
            # the training of the parent is neither waiting nor active here: it has failed, or belongs to another job
            if stages[0].name == TRAINING and run.parent and run.parent.finished_digest() is None:
                self.failures.append(f"{run.name} was not trained: {run.parent.name} has to be finished before")
                continue
            job = _ActiveRun(run, list(stages), self._free_slots.pop(0))
            # listed before it starts, so that Ctrl-C directly after the start still ends the child
            self.active.append(job)
            job.start(self._environments[job.slot])

    def advance(self) -> list[SweepRun]:
        """Start the next stages of runs whose stage has ended, and return the runs that are finished."""
        finished = []
        for job in list(self.active):
            if job.is_training:
                job.log.read()
            code = job.poll()
            if code is None:
                continue
            if code:
                log = job.stages[0].log
                reason = last_error(log, job.log_start) or "no message"
                self.failures.append(f"{job.run.name} failed while {job.stages[0].name}: {reason} (log: {log})")
            elif len(job.stages) > 1:
                del job.stages[0]
                job.start(self._environments[job.slot])
                continue
            else:
                finished.append(job.run)
            self.active.remove(job)
            self._free_slots.append(job.slot)
        return finished


def run_stages(
    pending: Mapping[SweepRun, list[Stage]], runs: Sequence[SweepRun], environments: Sequence[Mapping[str, str]]
) -> list[str]:
    """Execute all pending stages; a failed run stops no other.

    Ctrl-C and SIGTERM end the children before they are raised.

    Args:
        pending: stages that are left, by run.
        runs: all runs of the sweep, for the progress bar.
        environments: environment variables of each concurrent job.

    Returns:
        One line per failed run.
    """
    executor = _Executor(pending, environments)
    costs = {run.name: RunCost.from_run(run) for run in runs}
    total = sum(cost.total for cost in costs.values())
    spent = {run.name: costs[run.name].total for run in runs if run not in pending}
    first = percent = round(100 * sum(spent.values()) / total, 1)
    with processes.sigterm_raises(), Progress("sweep", "%", 100, done=first, ends=True) as bar:
        try:
            while executor.waiting or executor.active:
                executor.start_ready()
                time.sleep(_POLL_SECONDS)
                for run in executor.advance():
                    spent[run.name] = costs[run.name].total
                spent |= {job.run.name: job.cost_spent(costs[job.run.name]) for job in executor.active}
                # a resumed run repeats the updates after its last checkpoint, so the estimate may go back
                percent = max(percent, round(100 * sum(spent.values()) / total, 1))
                bar.update_to(percent, " | ".join(job.describe() for job in executor.active))
                bar.refresh()
        finally:
            processes.stop_all([job.child for job in executor.active if job.child])
    return executor.failures
