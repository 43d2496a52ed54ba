"""Carry out the runs of a sweep, several at a time, under one progress bar."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from fairseq_rpe.runs import processes
from fairseq_rpe.core.files import read_json_lines

_POLL_SECONDS = 0.2
_RANK = re.compile(r"\[rank\d+\]: ")
_ERROR = re.compile(r"(error: |\w*(Error|Exception|Interrupt)\b)")
# what is said when something else went wrong before
_CONSEQUENCE = re.compile(r"error: fairseq-train ended|.*(by peer|Broken pipe)")


@dataclass(frozen=True)
class Stage:
    """One command of a run and the file that its output is added to."""

    name: str
    command: list[str]
    log: Path


class Run(Protocol):
    """What the runner needs of a sweep's cell."""

    folder: Path
    wanted: Any

    @property
    def slug(self) -> str: ...

    @property
    def rows(self) -> int: ...

    @property
    def results(self) -> Path: ...


@dataclass
class _Active:
    run: Run
    stages: list[Stage]
    place: int
    child: subprocess.Popen[bytes] | None = None
    log_start: int = 0
    read_to: int = 0
    updates: int = 0
    loss: str = ""

    def start(self, environment: Mapping[str, str]) -> None:
        """Start the next stage."""
        log = self.stages[0].log
        log.parent.mkdir(parents=True, exist_ok=True)
        with open(log, "ab") as file:
            self.log_start = self.read_to = file.tell()
            self.child = processes.spawn(self.stages[0].command, environment, log=file)

    def follow(self) -> None:
        """Read what training has logged since the last look."""
        with open(self.stages[0].log, "rb") as file:
            file.seek(self.read_to)
            text = file.read()
        whole = text[: text.rfind(b"\n") + 1]
        self.read_to += len(whole)
        for line in whole.decode(errors="replace").splitlines():
            _, brace, rest = line.partition("| train_inner | {")
            if brace:
                stats = json.loads("{" + rest)
                self.updates = int(stats["num_updates"])
                self.loss = stats["loss"]

    def describe(self) -> str:
        if self.stages[0].name == "training" and self.loss:
            return f"{self.run.slug} {self.updates}/{self.run.wanted.updates} loss {self.loss}"
        return f"{self.run.slug} {self.stages[0].name}"


@dataclass
class _Progress:
    """Units of work: one per update and one per evaluated length."""

    bar: Any
    done: dict[str, int] = field(default_factory=dict)

    def show(self, active: Sequence[_Active]) -> None:
        for job in active:
            self.done[job.run.slug] = job.updates + _evaluated(job)
        self.bar.set_description_str(" | ".join(job.describe() for job in active), refresh=False)
        self.bar.update(max(0, sum(self.done.values()) - self.bar.n))


def _evaluated(job: _Active) -> int:
    if job.stages[0].name == "training":
        return 0
    return min(job.run.rows, len(read_json_lines(job.run.results)))


def last_error(log: Path, start: int = 0) -> str:
    """The message in what was added to a log after ``start`` that best says why it ended, or nothing."""
    if not log.exists():
        return ""
    with open(log, "rb") as file:
        file.seek(start)
        lines = [_RANK.sub("", line.strip()) for line in file.read().decode(errors="replace").splitlines()]
    lines = [line for line in lines if line]
    told = [line for line in lines if _ERROR.match(line)]
    better = [line for line in told if not _CONSEQUENCE.match(line)] or told or lines
    return better[-1].removeprefix("error: ") if better else ""


def execute(pending: Mapping[Run, list[Stage]], runs: Sequence[Run], places: Sequence[Mapping[str, str]]) -> list[str]:
    """Carry out all stages, one run per place at a time; returns one line per failed run, which stops no other.

    On Ctrl-C or SIGTERM the children are ended first, then the exception goes on.
    """
    from tqdm import tqdm

    waiting = list(pending.items())
    free = list(range(len(places)))
    active: list[_Active] = []
    failures: list[str] = []
    total = sum(run.wanted.updates + run.rows for run in runs)
    calm = 0.5 if sys.stderr.isatty() else 30.0
    with processes.sigterm_raises(), tqdm(total=total, unit="", mininterval=calm) as bar:
        progress = _Progress(bar, {r.slug: r.wanted.updates + r.rows for r in runs if r not in pending})
        try:
            while waiting or active:
                while waiting and free:
                    run, stages = waiting.pop(0)
                    job = _Active(run, list(stages), free.pop(0))
                    if stages[0].name != "training":
                        job.updates = run.wanted.updates
                    active.append(job)
                    job.start(places[job.place])
                time.sleep(_POLL_SECONDS)
                for job in list(active):
                    if job.stages[0].name == "training":
                        job.follow()
                    code = job.child.poll()
                    if code is None:
                        continue
                    if code:
                        log = job.stages[0].log
                        why = last_error(log, job.log_start) or "no message"
                        failures.append(f"{job.run.slug} failed while {job.stages[0].name}: {why} (log: {log})")
                    elif len(job.stages) > 1:
                        del job.stages[0]
                        job.updates = job.run.wanted.updates
                        job.start(places[job.place])
                        continue
                    else:
                        progress.done[job.run.slug] = job.run.wanted.updates + job.run.rows
                    active.remove(job)
                    free.append(job.place)
                progress.show(active)
        finally:
            processes.stop_all([job.child for job in active if job.child])
    return failures
