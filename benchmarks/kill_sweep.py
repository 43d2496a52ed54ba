"""Kill sweeps and preparations (SIGKILL) at random moments and compare their results with undisturbed runs.

    python benchmarks/kill_sweep.py --kills 100 --out runs/kills

Each kill takes the command's own process, one of those below it, or all at once. That is drawn from --seed, like the
moment, which for four of five is after the start-up. The same command is then given again. Where one ends before its
moment, its files are compared with those of the undisturbed run (tables, rows and parameters of a sweep, every byte of
a corpus), and it begins anew. What is done is on record in --out: rerunning resumes from there. Exit code 1 if
anything differs or is left behind.
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

ENCODINGS = "sinusoidal kerple_log"
VICTIMS = ("parent", "child", "all")
# Of the standard library: enough text for a preparation of some seconds.
PACKAGES = ("asyncio", "email", "http", "importlib", "json", "logging", "multiprocessing", "unittest", "xml")
EARLY = 0.2  # the part of the kills that may come in the start-up
_POLL = 0.02
_PATIENCE = 120.0  # seconds until what goes on after a kill must have ended
_PROGRAM = [sys.executable, "-P", "-m", "fairseq_rpe.cli.main"]


@dataclass(frozen=True)
class Job:
    """A command that makes a folder, and a function that summarises the folder."""

    name: str
    command: Callable[[Path], list[str]]
    progress: Callable[[Path], object]  # changes when its work, after the start-up, goes on
    made: Callable[[Path], dict[str, str]]  # what must be the same, by name; nothing of a folder that is not there
    share: float  # of all kills
    reach: float  # of the time after its start-up: beyond that there is seldom anything left to kill
    whole: bool = False  # the folder is there only when it is finished


def sweep_job(args: argparse.Namespace) -> Job:
    flags = ["--encodings", ENCODINGS, "--lengths", args.lengths, "--tokens", "64", "--updates", str(args.updates)]
    return Job(
        "sweep",
        lambda out: [*_PROGRAM, "sweep", str(corpus(args)), *flags, "--device", "cpu", "--out", str(out)],
        lambda out: (
            sum(log.read_bytes().count(b"| train_inner |") for log in out.glob("runs/*/train.log")),
            sum(rows.read_bytes().count(b"\n") for rows in out.glob("runs/*/eval.jsonl")),
        ),
        sweep_summary,
        share=0.4,  # its start-up takes a while: that of three processes, one after another
        reach=0.6,  # it goes on where it was killed
    )


def corpus(args: argparse.Namespace) -> Path:
    """Return the text of the sweeps: the given one, or a small one with about 30 updates per epoch."""
    if args.data:
        return args.data
    made, library = args.out / "corpus", Path(sysconfig.get_path("stdlib"))
    if not made.exists():
        parts = [str(library / "json"), "--valid", str(library / "wsgiref"), "--test", str(library / "wsgiref")]
        words = [*_PROGRAM, "prepare", *parts, "--include", "*.py", "--vocab-size", "600", "--out", str(made)]
        subprocess.run(words, check=True, stdout=subprocess.DEVNULL)
    return made


def sweep_summary(out: Path) -> dict[str, str]:
    """Return the results table and the number of results, updates and a digest of the parameters of each run."""
    import torch

    logging.disable(logging.WARNING)
    import fairseq_rpe.models  # noqa: F401  (its checkpoints name fairseq's classes)

    found = {"results.csv": (out / "results.csv").read_text(encoding="utf-8")}
    for run in sorted((out / "runs").iterdir()):
        state = torch.load(run / "checkpoints" / "checkpoint_last.pt", map_location="cpu", weights_only=False)
        parameters = hashlib.sha256()
        for name, tensor in sorted(state["model"].items()):
            parameters.update(name.encode() + tensor.contiguous().view(torch.uint8).numpy().tobytes())
        found[f"parameters of {run.name}"] = parameters.hexdigest()
        found[f"updates of {run.name}"] = str(state["optimizer_history"][-1]["num_updates"])
        found[f"results of {run.name}"] = str(len((run / "eval.jsonl").read_text(encoding="utf-8").splitlines()))
    return found


def prepare_job(args: argparse.Namespace) -> Job:
    sources = [str(Path(sysconfig.get_path("stdlib"), name)) for name in PACKAGES]
    flags = ["--include", "*.py", "--vocab-size", "4000", "--workers", "2"]

    def made(out: Path) -> dict[str, str]:
        files = sorted(out.iterdir()) if out.is_dir() else []
        return {path.name: sha256_of_files(path) for path in files}

    return Job(
        "prepare",
        lambda out: [*_PROGRAM, "prepare", *sources, *flags, "--out", str(out)],
        lambda out: set(out.parent.glob(f".{out.name}.prepare-*")),
        made,
        share=0.6,
        reach=1.0,
        whole=True,
    )


def family(pid: int) -> list[int]:
    """Return a process and all its running descendants."""
    parents = {}
    for stat in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):
            state, parent = stat.read_text().rpartition(")")[2].split()[:2]
            if state != "Z":
                parents[int(stat.parent.name)] = int(parent)
    found = [pid]
    for one in found:
        found += [child for child, parent in parents.items() if parent == one]
    return found


def running(pid: int) -> bool:
    with contextlib.suppress(OSError):
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    return False


def shoot(pids: Sequence[int]) -> None:
    for pid in pids:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


class Trial:
    """A job with its undisturbed result, and the folder of the killed runs."""

    def __init__(self, job: Job, out: Path, note: Callable[..., None]) -> None:
        self.job, self.note = job, note
        self.folder = out / job.name / "killed"
        self.said = out / job.name / "killed.log"
        self.record = out / f"{job.name}.json"
        self.folder.parent.mkdir(parents=True, exist_ok=True)
        if not self.record.exists():
            self._undisturbed(out / job.name / "whole")
        known = json.loads(self.record.read_text(encoding="utf-8"))
        self.start_up, self.seconds, self.expected = known["start_up"], known["seconds"], known["made"]

    def _undisturbed(self, folder: Path) -> None:
        shutil.rmtree(folder, ignore_errors=True)
        before, begin, start_up, child = self.job.progress(folder), time.monotonic(), 0.0, self.start(folder)
        while child.poll() is None:
            if not start_up and self.job.progress(folder) != before:
                start_up = time.monotonic() - begin
            time.sleep(_POLL)
        if child.returncode:
            sys.exit(f"{self.job.name}: the run that nobody disturbed failed, see {self.said}")
        seconds = time.monotonic() - begin
        print(f"{self.job.name}: {seconds:.1f} s undisturbed, at work after {start_up:.1f} s", flush=True)
        known = {"start_up": start_up, "seconds": seconds, "made": self.job.made(folder)}
        self.record.write_text(json.dumps(known, indent=2), encoding="utf-8")

    def start(self, folder: Path) -> subprocess.Popen[bytes]:
        with open(self.said, "wb") as said:
            streams = {"stdin": subprocess.DEVNULL, "stdout": said, "stderr": said}
            return subprocess.Popen(self.job.command(folder), **streams, preexec_fn=processes.die_with_parent)

    def kill(self, draw: random.Random, victim: str, what: str) -> None:
        """Kill the job once, mostly while it works."""
        least = 2 if victim == "child" else 1
        begin, early = time.monotonic(), draw.random() < EARLY
        delay = draw.uniform(0, self.start_up if early else self.job.reach * (self.seconds - self.start_up))
        while True:
            before, child = self.job.progress(self.folder), self.start(self.folder)
            hit, moment = False, time.monotonic() + (delay if early else 1e9)
            while child.poll() is None and (time.monotonic() < moment or len(family(child.pid)) < least):
                if not hit and self.job.progress(self.folder) != before:
                    hit, moment = True, min(moment, time.monotonic() + delay)
                time.sleep(_POLL)
            pids = family(child.pid)
            if child.poll() is None and len(pids) >= least:
                break
            self.ended(child.wait())
        taken = {"all": pids, "parent": pids[:1], "child": draw.choices(pids[1:])}[victim] if len(pids) > 1 else pids
        shoot(taken)
        faults = self._settle(child, pids)
        if child.returncode == 0:
            self.ended(0)
        elif victim == "child" and "Traceback" in self.said.read_text(errors="replace"):
            faults.append("a traceback where a child was killed")
        if self.job.whole and self.folder.exists() and self.job.made(self.folder) != self.expected:
            faults.append("a folder that is not whole")
        about = f"{len(taken)} of {len(pids)} processes, {delay:.1f} s after it was {'at work' if hit else 'started'}"
        more = {"victim": victim, "hit": hit, "seconds": time.monotonic() - begin}
        self.note("kill", self.job.name, f"{what} {self.job.name}, {victim}: {about}", faults, **more)

    def _settle(self, child: subprocess.Popen[bytes], pids: Sequence[int]) -> list[str]:
        """Wait until no process of the job runs; one that must be stopped is a fault."""
        end = time.monotonic() + _PATIENCE
        while child.poll() is None or any(map(running, pids)):
            if time.monotonic() > end:
                left = [pid for pid in pids if running(pid)]
                shoot(left)
                child.wait()
                return [f"{len(left)} processes were left behind"]
            time.sleep(_POLL)
        return []

    def ended(self, code: int) -> None:
        """Compare the result of a finished command and delete it."""
        faults = [f"it ended with {code}, see {self.said}"] if code else []
        if not code:
            made = self.job.made(self.folder)
            faults = [f"{n} differs" for n in {**self.expected, **made} if made.get(n) != self.expected.get(n)]
            faults += [f"{path.name} is left behind" for path in self.folder.parent.glob(".*")]
        verdict = "NOT as undisturbed" if faults else "as undisturbed"
        self.note("end", self.job.name, f"  {self.job.name} came to its end: {verdict}", faults)
        if faults:
            sys.exit(f"{self.job.name}: {'; '.join(faults)}; kept: {self.folder}")
        shutil.rmtree(self.folder)

    def finish(self) -> None:
        """Run the last killed command to its end."""
        if self.folder.exists() or any(self.folder.parent.glob(".*")):
            self.ended(self.start(self.folder).wait())


def jobs(args: argparse.Namespace) -> list[Job]:
    made = {"sweep": sweep_job, "prepare": prepare_job}
    return [made[name](args) for name in ([args.only] if args.only else made)]


def summary(rows: list[dict[str, Any]]) -> str:
    """What was killed when, what came to its end, and what was wrong."""
    kills = [row for row in rows if row["event"] == "kill"]
    lines = []
    for name in dict.fromkeys(row["job"] for row in rows):
        own = [row for row in kills if row["job"] == name]
        by = Counter(row["victim"] for row in own)
        ends = sum(row["event"] == "end" and row["job"] == name for row in rows)
        seconds = sum(row["seconds"] for row in own) / max(1, len(own))
        parts = ", ".join(f"{by[victim]} {victim}" for victim in VICTIMS)
        what = f"{len(own)} kills ({parts}), {sum(row['hit'] for row in own)} of work in progress, {seconds:.1f} s each"
        lines.append(f"{name}: {what}; {ends} times at its end and compared")
    faults = [fault for row in rows for fault in row["faults"]]
    return "\n".join([*lines, f"{len(kills)} kills, {len(faults)} faults", *faults])


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("data", type=Path, nargs="?", help="of the sweeps (default: a small corpus is made)")
    parser.add_argument("--kills", type=int, default=100, help="of all together (default: 100)")
    parser.add_argument("--only", choices=("sweep", "prepare"), help="default: both, sweeps two of five times")
    parser.add_argument("--updates", type=int, default=60, help="of a training (default: 60)")
    parser.add_argument("--lengths", default="64,256", help="default: 64,256")
    parser.add_argument("--seed", type=int, default=1, help="of the moments and victims")
    parser.add_argument("--out", type=Path, default=Path("runs/kills"), help="default: runs/kills")
    args = parser.parse_args()
    settings = {key: str(value) for key, value in vars(args).items() if key not in ("kills", "out")}
    kept, log = args.out / "settings.json", args.out / "kills.jsonl"
    if args.out.exists() and (not kept.exists() or json.loads(kept.read_text(encoding="utf-8")) != settings):
        parser.error(f"{args.out} holds something else, or kills of other settings: name another --out")
    args.out.mkdir(parents=True, exist_ok=True)
    kept.write_text(json.dumps(settings), encoding="utf-8")
    rows = [json.loads(line) for line in log.read_text(encoding="utf-8").splitlines()] if log.exists() else []

    def note(event: str, job: str, text: str, faults: list[str], **more: object) -> None:
        print(text, *faults, sep="; ", flush=True)
        rows.append({"event": event, "job": job, "faults": faults, **more})
        with open(log, "a", encoding="utf-8") as file:
            file.write(json.dumps(rows[-1]) + "\n")

    trials = [Trial(job, args.out, note) for job in jobs(args)]
    for number in range(sum(row["event"] == "kill" for row in rows), args.kills):
        draw = random.Random(f"{args.seed} {number}")
        [trial] = draw.choices(trials, [trial.job.share for trial in trials])
        trial.kill(draw, draw.choice(VICTIMS), f"kill {number + 1} of {args.kills}:")
    for trial in trials:
        trial.finish()
    print(summary(rows))
    return int(any(row["faults"] for row in rows))


if __name__ == "__main__":
    sys.exit(main())
