"""Kill sweeps and preparations (SIGKILL) at random moments and compare their results with undisturbed runs.

    python benchmarks/kill_sweep.py --kills 100 --out runs/kills

Each kill ends the command's process, one of its descendants, or all of them. The victim and the moment are drawn from
--seed; four of five moments are after the start-up. Then the same command is run again. If a command finishes before
its moment, its files are compared with those of an undisturbed run (tables, rows and parameters of a sweep, every byte
of a corpus), and the command starts anew. --out records the kills: rerunning the script resumes from there. The exit
status is 1 if anything differs or is left behind.
"""

from __future__ import annotations

import argparse
import contextlib
import hashlib
import json
import logging
import os
import random
import shutil
import signal
import subprocess
import sys
import sysconfig
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fairseq_rpe.runs import processes
from fairseq_rpe.utils.files import sha256_of_files
from fairseq_rpe.utils.json_files import append_json_line, read_json_lines

ENCODINGS = "sinusoidal kerple_log"
VICTIMS = ("parent", "child", "all")
# packages of the standard library: enough text for a preparation of some seconds
PACKAGES = ("asyncio", "email", "http", "importlib", "json", "logging", "multiprocessing", "unittest", "xml")
EARLY_SHARE = 0.2  # of the kills: those whose moment may be in the start-up
_POLL_SECONDS = 0.02
_EXIT_SECONDS = 120.0  # time that the remaining processes have to end after a kill
_PROGRAM = [sys.executable, "-P", "-m", "fairseq_rpe.cli.main"]


@dataclass(frozen=True)
class Job:
    """A command that creates a folder, and functions that describe the folder.

    Attributes:
        name: name of the job.
        command: function of the output folder that returns the command's arguments.
        progress: function of the output folder whose result changes when the command works, after its start-up.
        summarise: function of the output folder that returns, by name, what must not differ between runs; it is empty
            if there is no folder.
        share: share of all kills that this job gets.
        latest_kill: latest moment of a kill, as a share of the time after the start-up; beyond that there is seldom
            anything left to kill.
        is_atomic: whether the folder exists only when it is complete.
    """

    name: str
    command: Callable[[Path], list[str]]
    progress: Callable[[Path], object]
    summarise: Callable[[Path], dict[str, str]]
    share: float
    latest_kill: float
    is_atomic: bool = False


def sweep_job(args: argparse.Namespace) -> Job:
    """Return the job that trains and evaluates two encodings."""
    flags = ["--encodings", ENCODINGS, "--lengths", args.lengths, "--tokens", "64", "--updates", str(args.updates)]
    return Job(
        "sweep",
        lambda out: [*_PROGRAM, "sweep", str(corpus(args)), *flags, "--device", "cpu", "--out", str(out)],
        lambda out: (
            sum(log.read_bytes().count(b"| train_inner |") for log in out.glob("runs/*/train.log")),
            sum(rows.read_bytes().count(b"\n") for rows in out.glob("runs/*/eval.jsonl")),
        ),
        sweep_summary,
        share=0.4,  # its start-up is slow: three processes start one after another
        latest_kill=0.6,  # the command resumes where it was killed, so little work is left later
    )


def corpus(args: argparse.Namespace) -> Path:
    """Return the data folder of the sweeps: the argument, or a new small corpus of about 30 updates per epoch."""
    if args.data:
        return args.data
    folder, library = args.out / "corpus", Path(sysconfig.get_path("stdlib"))
    if not folder.exists():
        sources = [str(library / "json"), "--valid", str(library / "wsgiref"), "--test", str(library / "wsgiref")]
        command = [*_PROGRAM, "prepare", *sources, "--include", "*.py", "--vocab-size", "600", "--out", str(folder)]
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
    return folder


def sweep_summary(out: Path) -> dict[str, str]:
    """Return the results table and the number of results, updates and a digest of the parameters of each run."""
    import torch

    logging.disable(logging.WARNING)
    import fairseq_rpe.models  # noqa: F401  (its checkpoints name fairseq's classes)

    summary = {"results.csv": (out / "results.csv").read_text(encoding="utf-8")}
    for run in sorted((out / "runs").iterdir()):
        state = torch.load(run / "checkpoints" / "checkpoint_last.pt", map_location="cpu", weights_only=False)
        parameters = hashlib.sha256()
        for name, tensor in sorted(state["model"].items()):
            parameters.update(name.encode() + tensor.contiguous().view(torch.uint8).numpy().tobytes())
        summary[f"parameters of {run.name}"] = parameters.hexdigest()
        summary[f"updates of {run.name}"] = str(state["optimizer_history"][-1]["num_updates"])
        summary[f"results of {run.name}"] = str(len((run / "eval.jsonl").read_text(encoding="utf-8").splitlines()))
    return summary


def prepare_job(args: argparse.Namespace) -> Job:
    """Return the job that prepares a corpus."""
    sources = [str(Path(sysconfig.get_path("stdlib"), name)) for name in PACKAGES]
    flags = ["--include", "*.py", "--vocab-size", "4000", "--workers", "2"]

    def digests(out: Path) -> dict[str, str]:
        files = sorted(out.iterdir()) if out.is_dir() else []
        return {path.name: sha256_of_files(path) for path in files}

    return Job(
        "prepare",
        lambda out: [*_PROGRAM, "prepare", *sources, *flags, "--out", str(out)],
        lambda out: set(out.parent.glob(f".{out.name}.prepare-*")),
        digests,
        share=0.6,
        latest_kill=1.0,
        is_atomic=True,
    )


def family(pid: int) -> list[int]:
    """Return a process and all its running descendants."""
    parents = {}
    for stat in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):
            state, parent = stat.read_text().rpartition(")")[2].split()[:2]
            if state != "Z":
                parents[int(stat.parent.name)] = int(parent)
    members = [pid]
    for member in members:  # grows while it is read, so that children of children are reached
        members += [child for child, parent in parents.items() if parent == member]
    return members


def is_running(pid: int) -> bool:
    """Return whether a process exists and is no zombie."""
    with contextlib.suppress(OSError):
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    return False


def kill_processes(pids: Sequence[int]) -> None:
    """Send SIGKILL to processes; those that have ended are ignored."""
    for pid in pids:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


@dataclass
class _Attempt:
    """One run of a command that is to be killed.

    Attributes:
        child: process of the command.
        pids: the process and its descendants at the moment of the kill.
        has_worked: whether the command had made progress before the kill.
    """

    child: subprocess.Popen[bytes]
    pids: list[int]
    has_worked: bool


class Trial:
    """A job with its undisturbed result, and the folder of the killed runs.

    Args:
        job: job that is killed.
        out: output folder of the script.
        record: function of (event, job, text, faults, further fields) that prints and records an event.
    """

    def __init__(self, job: Job, out: Path, record: Callable[..., None]) -> None:
        self.job, self.record = job, record
        self.folder = out / job.name / "killed"
        self.log = out / job.name / "killed.log"
        self.undisturbed_path = out / f"{job.name}.json"
        self.folder.parent.mkdir(parents=True, exist_ok=True)
        if not self.undisturbed_path.exists():
            self._run_undisturbed(out / job.name / "whole")
        undisturbed = json.loads(self.undisturbed_path.read_text(encoding="utf-8"))
        self.start_up, self.seconds, self.expected = (undisturbed[key] for key in ("start_up", "seconds", "made"))

    def _run_undisturbed(self, folder: Path) -> None:
        """Run the command to its end, and write its times and its result."""
        shutil.rmtree(folder, ignore_errors=True)
        initial, start, start_up, child = self.job.progress(folder), time.monotonic(), 0.0, self.start(folder)
        while child.poll() is None:
            if not start_up and self.job.progress(folder) != initial:
                start_up = time.monotonic() - start
            time.sleep(_POLL_SECONDS)
        if child.returncode:
            sys.exit(f"{self.job.name}: the undisturbed run failed, see {self.log}")
        seconds = time.monotonic() - start
        print(f"{self.job.name}: {seconds:.1f} s undisturbed, at work after {start_up:.1f} s", flush=True)
        undisturbed = {"start_up": start_up, "seconds": seconds, "made": self.job.summarise(folder)}
        self.undisturbed_path.write_text(json.dumps(undisturbed, indent=2), encoding="utf-8")

    def start(self, folder: Path) -> subprocess.Popen[bytes]:
        """Start the command with its output in the log."""
        with open(self.log, "wb") as log:
            streams = {"stdin": subprocess.DEVNULL, "stdout": log, "stderr": log}
            return subprocess.Popen(self.job.command(folder), **streams, preexec_fn=processes.die_with_parent)

    def kill(self, draw: random.Random, victim: str, title: str) -> None:
        """Kill the job once, usually while it works, and record the kill with its faults.

        Args:
            draw: generator of the moment and of the child.
            victim: parent, child or all.
            title: number of the kill, for the message.
        """
        start, is_early = time.monotonic(), draw.random() < EARLY_SHARE
        latest = self.start_up if is_early else self.job.latest_kill * (self.seconds - self.start_up)
        delay = draw.uniform(0, latest)
        attempt = self._wait_for_moment(delay, is_early, min_processes=2 if victim == "child" else 1)
        child, pids = attempt.child, attempt.pids
        victims = pids
        if len(pids) > 1:
            victims = {"all": pids, "parent": pids[:1], "child": draw.choices(pids[1:])}[victim]
        kill_processes(victims)
        faults = self._wait_for_exit(child, pids)
        if child.returncode == 0:
            self.compare(0)
        elif victim == "child" and "Traceback" in self.log.read_text(errors="replace"):
            faults.append("a traceback where a child was killed")
        if self.job.is_atomic and self.folder.exists() and self.job.summarise(self.folder) != self.expected:
            faults.append("a folder that is not complete")
        state = "at work" if attempt.has_worked else "started"
        about = f"{len(victims)} of {len(pids)} processes, {delay:.1f} s after it was {state}"
        fields = {"victim": victim, "hit": attempt.has_worked, "seconds": time.monotonic() - start}
        self.record("kill", self.job.name, f"{title} {self.job.name}, {victim}: {about}", faults, **fields)

    def _wait_for_moment(self, delay: float, is_early: bool, min_processes: int) -> _Attempt:
        """Run the command until the moment of the kill; compare its result and start anew if it ends before.

        Args:
            delay: seconds after the start (``is_early``) or after the first progress.
            is_early: whether the moment may be in the start-up.
            min_processes: number of processes that must run at the moment; until then the kill waits.
        """
        while True:
            initial, child = self.job.progress(self.folder), self.start(self.folder)
            has_worked, moment = False, time.monotonic() + (delay if is_early else 1e9)
            while child.poll() is None and (time.monotonic() < moment or len(family(child.pid)) < min_processes):
                if not has_worked and self.job.progress(self.folder) != initial:
                    has_worked, moment = True, min(moment, time.monotonic() + delay)
                time.sleep(_POLL_SECONDS)
            pids = family(child.pid)
            if child.poll() is None and len(pids) >= min_processes:
                return _Attempt(child, pids, has_worked)
            self.compare(child.wait())

    def _wait_for_exit(self, child: subprocess.Popen[bytes], pids: Sequence[int]) -> list[str]:
        """Wait until no process of the job runs; one that must be stopped is a fault."""
        end = time.monotonic() + _EXIT_SECONDS
        while child.poll() is None or any(map(is_running, pids)):
            if time.monotonic() > end:
                remaining = [pid for pid in pids if is_running(pid)]
                kill_processes(remaining)
                child.wait()
                return [f"{len(remaining)} processes were left behind"]
            time.sleep(_POLL_SECONDS)
        return []

    def compare(self, code: int) -> None:
        """Compare the result of a command that ended with status ``code``, and delete it."""
        faults = [f"it ended with {code}, see {self.log}"] if code else []
        if not code:
            actual = self.job.summarise(self.folder)
            names = {**self.expected, **actual}
            faults = [f"{name} differs" for name in names if actual.get(name) != self.expected.get(name)]
            faults += [f"{path.name} is left behind" for path in self.folder.parent.glob(".*")]
        verdict = "NOT as undisturbed" if faults else "as undisturbed"
        self.record("end", self.job.name, f"  {self.job.name} came to its end: {verdict}", faults)
        if faults:
            sys.exit(f"{self.job.name}: {'; '.join(faults)}; kept: {self.folder}")
        shutil.rmtree(self.folder)

    def finish(self) -> None:
        """Run the last killed command to its end."""
        if self.folder.exists() or any(self.folder.parent.glob(".*")):
            self.compare(self.start(self.folder).wait())


def jobs(args: argparse.Namespace) -> list[Job]:
    """Return the job of --only, or both jobs."""
    constructors = {"sweep": sweep_job, "prepare": prepare_job}
    return [constructors[name](args) for name in ([args.only] if args.only else constructors)]


def summarise(events: list[dict[str, Any]]) -> str:
    """Return a line for each job with its kills and comparisons, the total, and all faults."""
    kills = [event for event in events if event["event"] == "kill"]
    lines = []
    for name in dict.fromkeys(event["job"] for event in events):
        job_kills = [kill for kill in kills if kill["job"] == name]
        by_victim = Counter(kill["victim"] for kill in job_kills)
        ends = sum(event["event"] == "end" and event["job"] == name for event in events)
        seconds = sum(kill["seconds"] for kill in job_kills) / max(1, len(job_kills))
        victims = ", ".join(f"{by_victim[victim]} {victim}" for victim in VICTIMS)
        at_work = sum(kill["hit"] for kill in job_kills)
        about = f"{len(job_kills)} kills ({victims}), {at_work} of work in progress, {seconds:.1f} s each"
        lines.append(f"{name}: {about}; {ends} times at its end and compared")
    faults = [fault for event in events for fault in event["faults"]]
    return "\n".join([*lines, f"{len(kills)} kills, {len(faults)} faults", *faults])


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("data", type=Path, nargs="?", help="data folder of the sweeps (default: a small new corpus)")
    parser.add_argument("--kills", type=int, default=100, help="number of kills of all jobs together (default: 100)")
    parser.add_argument("--only", choices=("sweep", "prepare"), help="default: both; two of five kills are of sweeps")
    parser.add_argument("--updates", type=int, default=60, help="updates of each training (default: 60)")
    parser.add_argument("--lengths", default="64,256", help="evaluation lengths in tokens (default: 64,256)")
    parser.add_argument("--seed", type=int, default=1, help="seed of the moments and victims (default: 1)")
    parser.add_argument("--out", type=Path, default=Path("runs/kills"), help="default: runs/kills")
    args = parser.parse_args()
    settings = {key: str(value) for key, value in vars(args).items() if key not in ("kills", "out")}
    settings_path, log = args.out / "settings.json", args.out / "kills.jsonl"
    if args.out.exists() and (
        not settings_path.exists() or json.loads(settings_path.read_text(encoding="utf-8")) != settings
    ):
        parser.error(f"{args.out} holds something else, or kills of other settings: name another --out")
    args.out.mkdir(parents=True, exist_ok=True)
    settings_path.write_text(json.dumps(settings), encoding="utf-8")
    events = read_json_lines(log)

    def record(event: str, job: str, text: str, faults: list[str], **fields: object) -> None:
        print(text, *faults, sep="; ", flush=True)
        events.append({"event": event, "job": job, "faults": faults, **fields})
        append_json_line(log, events[-1])

    trials = [Trial(job, args.out, record) for job in jobs(args)]
    for number in range(sum(event["event"] == "kill" for event in events), args.kills):
        draw = random.Random(f"{args.seed} {number}")
        [trial] = draw.choices(trials, [trial.job.share for trial in trials])
        trial.kill(draw, draw.choice(VICTIMS), f"kill {number + 1} of {args.kills}:")
    for trial in trials:
        trial.finish()
    print(summarise(events))
    return int(any(event["faults"] for event in events))


if __name__ == "__main__":
    sys.exit(main())
