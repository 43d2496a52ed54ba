"""The runs of a sweep on this machine: several at a time, each with its share of cores and GPUs, under one bar."""

from __future__ import annotations

import os
import subprocess
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from fairseq_rpe.core.errors import DEBUG
from fairseq_rpe.runs import processes
from fairseq_rpe.runs.child_output import last_error
from fairseq_rpe.runs.log import Heard
from fairseq_rpe.sweeps import cost_estimate
from fairseq_rpe.sweeps.grid import TRAINING, Cell, Stage
from fairseq_rpe.utils import devices
from fairseq_rpe.utils.progress import Progress

_POLL_SECONDS = 0.2


def places(device: str, nproc: int, jobs: int | None) -> list[dict[str, str]]:
    """The environment of each of the runs at a time: ``jobs``, or as many as there are GPUs or cores for.

    More jobs than GPUs share them in turn. Raises UserError: there are fewer GPUs than a single run is to have.
    """
    gpus = devices.check(device, nproc)
    cores = processes.cores()
    jobs = jobs or max(1, (len(gpus) or cores) // nproc)
    made = []
    for place in range(jobs):
        environment = {"OMP_NUM_THREADS": str(max(1, cores // (jobs * nproc)))}
        if gpus:
            environment["CUDA_VISIBLE_DEVICES"] = ",".join(gpus[(place * nproc + r) % len(gpus)] for r in range(nproc))
        made.append(environment)
    return made


class Following(Heard):
    """What the log of a training says of its progress, from ``start`` on."""

    def __init__(self, log: Path, start: int = 0) -> None:
        super().__init__()
        self.log, self.start = log, start

    def read(self) -> None:
        """Read what was logged since the last look, whole lines only."""
        with open(self.log, "rb") as file:
            file.seek(self.start)
            text = file.read()
        whole = text[: text.rfind(b"\n") + 1]
        self.start += len(whole)
        for line in whole.decode(errors="replace").splitlines():
            self.hear(line)


class RowCount:
    """Counts the lines of a file of results that grows; each look reads only what was added since the last one."""

    def __init__(self, path: Path) -> None:
        self.path, self._position, self._lines = path, 0, 0

    def read(self) -> int:
        """The lines that the file has now, none if there is no such file."""
        try:
            with open(self.path, "rb") as file:
                if file.seek(0, os.SEEK_END) < self._position:  # another file took its place
                    self._position = self._lines = 0
                file.seek(self._position)
                self._lines += file.read().count(b"\n")
                self._position = file.tell()
        except FileNotFoundError:
            self._position = self._lines = 0
        return self._lines


@dataclass(frozen=True)
class Work:
    """What a run costs: each of its updates, and each of its results in turn."""

    updates: int
    update: float
    results: list[float]

    @classmethod
    def of(cls, cell: Cell) -> Work:
        return cls(cell.plan.updates, cost_estimate.training(cell), cost_estimate.evaluations(cell))

    def done(self, updates: int, results: int) -> float:
        """So much after some updates and results."""
        return min(updates, self.updates) * self.update + sum(self.results[:results])

    @property
    def whole(self) -> float:
        return self.done(self.updates, len(self.results))


@dataclass
class _Active:
    """A run that is being carried out at a place."""

    cell: Cell
    stages: list[Stage]
    place: int
    child: subprocess.Popen[bytes] | None = None
    log_start: int = 0
    following: Following = field(init=False)
    rows: RowCount = field(init=False)

    def __post_init__(self) -> None:
        self.rows = RowCount(self.cell.folder.results)
        self.following = Following(self.stages[0].log, self.log_start)

    @property
    def trains(self) -> bool:
        return self.stages[0].name == TRAINING

    def done(self, work: Work) -> float:
        """Of its work."""
        if self.trains:
            return work.done(self.following.updates, 0)
        return work.done(self.cell.plan.updates, self.rows.read())

    def start(self, environment: Mapping[str, str]) -> None:
        """Start the next stage."""
        log = self.stages[0].log
        log.parent.mkdir(parents=True, exist_ok=True)
        with open(log, "ab") as file:
            self.log_start = file.tell()
            self.following = Following(log, self.log_start)
            # a log is where tracebacks are looked for
            self.child = processes.spawn(self.stages[0].command, {**environment, DEBUG: "1"}, log=file)

    def poll(self) -> int | None:
        """The exit status of what was started last; None while it runs."""
        return None if self.child is None else self.child.poll()

    def describe(self) -> str:
        if self.trains and self.following.loss is not None:
            progress = f"{self.following.updates}/{self.cell.plan.updates}"
            return f"{self.cell.name} {progress} loss {self.following.loss:g}"
        return f"{self.cell.name} {self.stages[0].name}"


def _next(waiting: Sequence[tuple[Cell, list[Stage]]], active: Sequence[_Active]) -> tuple[Cell, list[Stage]] | None:
    """The first run that waits for the training of no other one."""
    trained = {cell for cell, stages in waiting if stages[0].name == TRAINING}
    trained |= {job.cell for job in active if job.trains}
    return next((one for one in waiting if one[1][0].name != TRAINING or one[0].parent not in trained), None)


def execute(
    pending: Mapping[Cell, list[Stage]], cells: Sequence[Cell], places: Sequence[Mapping[str, str]]
) -> list[str]:
    """Carry out all stages, one run per place at a time; returns one line per failed run, which stops no other.

    On Ctrl-C or SIGTERM the children are ended first, then the exception goes on.
    """
    waiting = list(pending.items())
    free = list(range(len(places)))
    active: list[_Active] = []
    failures: list[str] = []
    work = {cell.name: Work.of(cell) for cell in cells}
    whole = sum(one.whole for one in work.values())
    done = {cell.name: work[cell.name].whole for cell in cells if cell not in pending}
    first = shown = round(100 * sum(done.values()) / whole, 1)
    with processes.sigterm_raises(), Progress("sweep", "%", 100, done=first, ends=True) as bar:
        try:
            while waiting or active:
                while free and (ready := _next(waiting, active)):
                    waiting.remove(ready)
                    cell, stages = ready
                    if stages[0].name == TRAINING and cell.parent and cell.parent.finished() is None:
                        failures.append(f"{cell.name} was not trained: {cell.parent.name} has to be finished before")
                        continue
                    job = _Active(cell, list(stages), free.pop(0))
                    active.append(job)
                    job.start(places[job.place])
                time.sleep(_POLL_SECONDS)
                for job in list(active):
                    if job.trains:
                        job.following.read()
                    code = job.poll()
                    if code is None:
                        continue
                    if code:
                        log = job.stages[0].log
                        why = last_error(log, job.log_start) or "no message"
                        failures.append(f"{job.cell.name} failed while {job.stages[0].name}: {why} (log: {log})")
                    elif len(job.stages) > 1:
                        del job.stages[0]
                        job.start(places[job.place])
                        continue
                    else:
                        done[job.cell.name] = work[job.cell.name].whole
                    active.remove(job)
                    free.append(job.place)
                done |= {job.cell.name: job.done(work[job.cell.name]) for job in active}
                # a resumed run repeats what it did after its last checkpoint
                shown = max(shown, round(100 * sum(done.values()) / whole, 1))
                bar.reach(shown, " | ".join(job.describe() for job in active))
                bar.tick()
        finally:
            processes.stop_all([job.child for job in active if job.child])
    return failures
