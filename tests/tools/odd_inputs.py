"""Runs every command of fairseq-rpe with odd options and odd files: it must succeed or fail with an error of one line.

    python tests/tools/odd_inputs.py --count 1000 --seed 1

``odd_values.py`` draws cases from a seed. ``odd_fixtures.py`` writes small valid inputs, which cases change. One
process runs many cases, with the training and evaluation that commands would start as processes. A case is bad if the
command

- ends in a traceback or an internal error, or hangs,
- fails with more or less than one line, after updates of training, or leaves files behind,
- prints NaN or infinity, or
- succeeds with input that the generator knows to be invalid, or fails with input that it knows to be valid.

The exit status is 1 if a case is bad.
"""

from __future__ import annotations

import argparse
import collections
import contextlib
import io
import logging
import multiprocessing
import os
import re
import resource
import shlex
import shutil
import signal
import stat
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import IO, Any
from unittest import mock

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
import in_process

GOOD = ("refused", "accepted", "takes long")
BAD = ("refused good", "traceback", "internal error", "not one line", "hang", "left behind", "refused late")
BAD += ("no numbers", "nonsense")
_UPDATES = 3  # a training that makes so many updates works
_MEMORY = 12 << 30  # upper limit in bytes of the address space of a process that runs cases
_LONGEST_ERROR = 700  # characters
_NO_NUMBER = re.compile(r"(?<![\w.])(NaN|nan|Infinity|-?inf)(?![\w.])")


@dataclass(frozen=True)
class Verdict:
    """How a case ended: one of ``GOOD`` or ``BAD``, and the output that shows it."""

    kind: str
    shown: str = ""


class _Hang(BaseException):
    """Raised in a case that takes too long."""


class _LongEnough(BaseException):
    """Raised in a training that has made ``_UPDATES`` updates."""


class Children:
    """Runs in this process the programs that commands would start as others.

    A training ends after ``_UPDATES`` updates.

    Attributes:
        updates: number of updates of training.
        started_torchrun: whether a command would have started several processes; they are not started.
    """

    def __init__(self) -> None:
        self.updates = 0
        self.started_torchrun = False

    def spawn(self, command: Sequence[str], *args: Any, **kwargs: Any) -> Any:
        """Replace ``processes.spawn``."""
        if "torch.distributed.run" in command:
            self.started_torchrun = True
            raise _LongEnough
        return in_process.spawn(command, *args, **kwargs)

    @contextlib.contextmanager
    def replaced(self) -> Iterator[None]:
        """Replace ``processes.spawn`` and fairseq's training step in the block."""
        from fairseq.trainer import Trainer

        from fairseq_rpe.runs import processes

        train_step, children = Trainer.train_step, self

        def counted_step(trainer: Any, *args: Any, **kwargs: Any) -> Any:
            if children.updates >= _UPDATES:
                raise _LongEnough
            result = train_step(trainer, *args, **kwargs)
            children.updates += 1
            return result

        with mock.patch.object(Trainer, "train_step", counted_step), mock.patch.object(processes, "spawn", self.spawn):
            yield


Snapshot = dict[str, tuple[int, int, int]]


def snapshot(*folders: Path) -> Snapshot:
    """Return kind, size and time of change of every plain file by path; of others only the kind. Locks are left out."""
    files: Snapshot = {}
    for folder in folders:
        for path in folder.rglob("*"):
            status = path.lstat()
            is_plain = stat.S_ISREG(status.st_mode)
            if path.name != ".lock":
                size, time_ns = (status.st_size, status.st_mtime_ns) if is_plain else (0, 0)
                files[str(path)] = (stat.S_IFMT(status.st_mode), size, time_ns)
    return files


class Workspace:
    """The folders of a process that runs cases.

    Attributes:
        fixtures: fixtures, which a case may change.
        pristine: a copy of the fixtures for :meth:`restore`.
        working_folder: the current folder of commands, empty before each case.
        temporary: folder of temporary files, empty before each case.
    """

    def __init__(self, fixtures: Path, scratch: Path) -> None:
        self.fixtures, self.pristine = fixtures, scratch / "pristine"
        self.working_folder, self.temporary = scratch / "here", scratch / "tmp"
        for folder in (self.working_folder, self.temporary):
            folder.mkdir(parents=True, exist_ok=True)
        if not self.pristine.exists():
            _copy(fixtures, self.pristine)
        self._before = snapshot(fixtures)

    def restore(self) -> None:
        """Restore the fixtures, and empty the other folders."""
        for folder in (self.working_folder, self.temporary):
            shutil.rmtree(folder, ignore_errors=True)
            folder.mkdir()
        now = snapshot(self.fixtures)
        if now == self._before:
            return
        for name in sorted(now.keys() - self._before.keys(), reverse=True):  # files before their folders
            path = Path(name)
            shutil.rmtree(path) if path.is_dir() and not path.is_symlink() else path.unlink(missing_ok=True)
        for name, status in self._before.items():
            if now.get(name) != status:
                self._restore_file(Path(name))

    def _restore_file(self, path: Path) -> None:
        good = self.pristine / path.relative_to(self.fixtures)
        if path.is_dir() and not path.is_symlink() and not good.is_dir():
            shutil.rmtree(path)
        if good.is_dir() and not good.is_symlink():
            path.mkdir(exist_ok=True)
        elif good.is_file():
            path.unlink(missing_ok=True)
            path.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(good, path)


def _copy(source: Path, target: Path) -> None:
    """Copy the fixtures without the folder of odd files, which no command changes."""

    def skip(folder: str, names: list[str]) -> list[str]:
        return [name for name in names if folder == str(source) and name == "odd"]

    shutil.copytree(source, target, symlinks=True, ignore=skip)


@dataclass(frozen=True)
class _Outcome:
    """How a command line ended.

    Attributes:
        code: exit code; None: the command did not end in time.
        output: standard output.
        errors: standard error.
        children: what the command started.
    """

    code: int | None
    output: str
    errors: str
    children: Children


def judge(words: list[str], invalid: bool, workspace: Workspace, seconds: float) -> Verdict:
    """Run a command line in this process, and return how it ended.

    Args:
        words: the command line; a time limit of ``seconds`` holds for it.
        invalid: whether the command must refuse it.
        workspace: folders, all of them restored.
        seconds: time limit.
    """
    before = snapshot(workspace.fixtures)
    outcome = _run(words, workspace, seconds)
    if outcome.code is None:
        return Verdict("hang", f"after {seconds:.0f} s")
    if outcome.children.started_torchrun or "_LongEnough" in outcome.errors:
        return Verdict("accepted", "training began")
    if "Traceback (most recent call last)" in outcome.output + outcome.errors:
        return Verdict("traceback", outcome.errors[-400:])
    if "error: internal: " in outcome.errors or "run again with --debug" in outcome.errors:
        return Verdict("internal error", outcome.errors[-400:])
    left = _left_behind(before, workspace, outcome.code == 0)
    if outcome.code:
        return _judge_refusal(outcome, left)
    if left:
        return Verdict("left behind", f"{left[:4]} of an accepted one")
    if _NO_NUMBER.search(outcome.output) and words[0] not in ("list", "verdict", "bias", "sensitivity"):
        return Verdict("no numbers", outcome.output[-300:])
    return Verdict("nonsense", outcome.output[-200:]) if invalid else Verdict("accepted")


def _run(words: list[str], workspace: Workspace, seconds: float) -> _Outcome:
    """Run a command line with a time limit."""
    from fairseq_rpe.cli.main import main

    children, out, err = Children(), io.StringIO(), io.StringIO()
    code, is_hung = None, False

    def stop(number: int, frame: object) -> None:
        nonlocal is_hung
        is_hung = True  # the command may catch the exception
        raise _Hang

    previous = signal.signal(signal.SIGALRM, stop)
    signal.setitimer(signal.ITIMER_REAL, seconds, 1.0)
    try:
        with children.replaced(), _quiet(out, err), contextlib.chdir(workspace.working_folder):
            code = main(words)
    except (_Hang, KeyboardInterrupt):
        is_hung = True
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, previous)
    return _Outcome(None if is_hung else code, out.getvalue(), err.getvalue(), children)


def _judge_refusal(outcome: _Outcome, left: list[str]) -> Verdict:
    """Judge a command line that failed; ``left`` are the files that it left behind."""
    errors = outcome.errors
    lines = [line for line in errors.splitlines() if "error: " in line]
    is_sweep = len(lines) > 1 and all(line.endswith("train.log)") for line in lines)  # with one line for each run
    if len(lines) != 1 and not is_sweep:
        return Verdict("not one line", errors[-400:] or outcome.output[-400:])
    if not lines[0].startswith("error: ") or not errors.endswith(lines[-1] + "\n"):
        return Verdict("not one line", errors[-400:])
    if len(lines[0]) > _LONGEST_ERROR:
        return Verdict("not one line", f"{len(lines[0])} characters: {lines[0][:300]}")
    if outcome.children.updates:
        return Verdict("refused late", f"after {outcome.children.updates} updates: {lines[0]}")
    is_failed_run = "(log: " in lines[0]  # a failed run leaves its log, which the message names
    return (
        Verdict("left behind", f"{left[:4]}: {lines[0]}")
        if left and not is_failed_run
        else Verdict("refused", lines[0])
    )


@contextlib.contextmanager
def _quiet(out: IO[str], err: IO[str]) -> Iterator[None]:
    empty_stdin = mock.patch.object(sys, "stdin", io.StringIO())
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err), empty_stdin:
        yield


def _left_behind(before: Snapshot, workspace: Workspace, accepted: bool) -> list[str]:
    """Return all files that a refused command changed, or the hidden and partial files of an accepted one."""
    now = snapshot(workspace.fixtures, workspace.working_folder, workspace.temporary)
    changed = [name for name, status in now.items() if before.get(name) != status]
    changed += [name for name in before if name not in now]
    if accepted:
        changed = [name for name in changed if Path(name).name.startswith(".") or name.endswith((".part", ".partial"))]
    return sorted(changed)


def _run_cases(
    numbers: Sequence[int], draw: Callable[[int], Any], workspace: Workspace, seconds: float, parent: Connection
) -> None:
    """Judge cases one after another; the parent gets a message before and after each."""
    resource.setrlimit(resource.RLIMIT_AS, (_MEMORY, _MEMORY))
    os.environ["TMPDIR"] = str(workspace.temporary)
    tempfile.tempdir = str(workspace.temporary)
    for number in numbers:
        workspace.restore()
        case = draw(number)
        parent.send((number, None, 0.0))
        start = time.monotonic()
        try:
            if case.change is not None:
                case.change(workspace.fixtures)
            verdict = judge(case.words, case.invalid, workspace, seconds)
            if case.valid and verdict.kind == "refused":
                verdict = Verdict("refused good", verdict.shown)
        except _Hang:
            verdict = Verdict("hang")
        parent.send((number, verdict, time.monotonic() - start))
    workspace.restore()


def judge_cases(
    numbers: Sequence[int], draw: Callable[[int], Any], workspace: Workspace, seconds: float
) -> Iterator[tuple[int, Verdict, float]]:
    """Yield number, verdict and seconds of each case. If a case stops or blocks its process, a new process goes on."""
    context, waiting = multiprocessing.get_context("fork"), list(numbers)
    while waiting:
        ours, theirs = context.Pipe(duplex=False)
        process = context.Process(target=_run_cases, args=(waiting, draw, workspace, seconds, theirs))
        process.start()
        theirs.close()
        while waiting:
            is_lost, verdict, took = True, Verdict("hang", "the process does not answer"), 2 * seconds
            try:
                if ours.poll(2 * seconds + 20):
                    _, message, took = ours.recv()
                    if message is None:  # the case begins
                        continue
                    is_lost, verdict = False, message
            except EOFError:
                process.join()
                verdict, took = Verdict("internal error", f"the process ended with {process.exitcode}"), 0.0
            yield waiting.pop(0), verdict, took
            if is_lost:
                break
        if process.is_alive():
            process.join(5)
            process.kill()
        process.join()
        ours.close()


def prepare(folder: Path) -> Path:
    """Write the fixtures into ``folder`` in another process, unless they exist, and return their folder."""
    fixtures = folder / "fixtures"
    if not (folder / "done").exists():
        shutil.rmtree(fixtures, ignore_errors=True)
        shutil.rmtree(folder / "pristine", ignore_errors=True)
        process = multiprocessing.get_context("fork").Process(target=_fill, args=(fixtures,))
        process.start()
        process.join()
        if process.exitcode:
            sys.exit("the fixtures could not be made")
        (folder / "done").touch()
    return fixtures


def _fill(fixtures: Path) -> None:
    from odd_fixtures import fill

    from fairseq_rpe.cli.main import main

    def run(line: list[str]) -> None:
        out, err = io.StringIO(), io.StringIO()
        with Children().replaced(), _quiet(out, err):
            code = main(line)
        if code:
            sys.exit(f"{shlex.join(line)} failed: {err.getvalue()[-2000:]}")

    fill(fixtures, run)


def _load() -> None:
    """Import what cases need, once, before processes are forked."""
    import importlib

    logging.basicConfig(handlers=[logging.NullHandler()])
    for name in ("torch", "fairseq_rpe.compat", "fairseq_rpe.models", "fairseq_cli.train", "matplotlib.pyplot"):
        importlib.import_module(name)
    for name in ("sentencepiece", "pyarrow.parquet", "mpmath", "torch.utils.tensorboard", "fairseq_rpe.reports.write"):
        with contextlib.suppress(ImportError):
            importlib.import_module(name)


def main() -> int:
    from fairseq_rpe.cli.main import COMMANDS

    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--count", type=int, default=1000, help="cases (default: 1000)")
    parser.add_argument("--first", type=int, default=0, help="number of the first one (default: 0)")
    parser.add_argument("--seed", type=int, default=1, help="seed of the cases (default: 1)")
    parser.add_argument("--command", action="append", choices=tuple(COMMANDS), help="draw cases of this command only")
    parser.add_argument("--seconds", type=float, default=60, help="time limit of a case (default: 60)")
    parser.add_argument("--keep", type=Path, help="folder that keeps the fixtures (default: a temporary one)")
    parser.add_argument("--all", action="store_true", help="show every case, not only the bad ones")
    args = parser.parse_args()
    with contextlib.ExitStack() as stack:
        folder = args.keep or Path(stack.enter_context(tempfile.TemporaryDirectory()))
        return check(folder.resolve(), args.count, args.seed, args.command, args.seconds, args.all, args.first)


def check(
    folder: Path,
    count: int,
    seed: int,
    commands: Sequence[str] | None = None,
    seconds: float = 60.0,
    show_all: bool = False,
    first: int = 0,
) -> int:
    """Judge ``count`` cases, print the bad ones and a table of all, and return 1 if any is bad."""
    os.environ["FAIRSEQ_RPE_CACHE"] = "off"
    _load()
    fixtures = prepare(folder)
    from odd_values import LONG, Generator

    workspace = Workspace(fixtures, folder)
    out = workspace.working_folder / "new/folder"
    generator = Generator(fixtures, workspace.pristine, out, seed, tuple(commands or ()))
    table: dict[str, collections.Counter[str]] = collections.defaultdict(collections.Counter)
    bad = 0
    for number, verdict, took in judge_cases(range(first, first + count), generator.case, workspace, seconds):
        case = generator.case(number)
        dest = case.about.partition("=")[0].lstrip("-").replace("-", "_")  # the odd option, if there is one
        if verdict.kind == "hang" and (dest in LONG or case.about.startswith(("spec", "together", "no arguments"))):
            verdict = Verdict("takes long", verdict.shown)
        table[case.words[0] if case.words[0] in generator.names else "other"][verdict.kind] += 1
        if verdict.kind in BAD or show_all:
            bad += verdict.kind in BAD
            line = shlex.join(case.words).encode(errors="backslashreplace").decode()
            about = f"{verdict.kind}: case {number} ({took:.1f} s; {case.about})"
            print(f"{about}\n  {line}\n  {verdict.shown}", flush=True)
    kinds = [*GOOD, *BAD]
    print(" ".join(f"{head:>14}" for head in ("command", "cases", *kinds)))
    for name, counts in sorted(table.items()):
        print(" ".join(f"{cell:>14}" for cell in (name, counts.total(), *(counts[kind] for kind in kinds))))
    print(f"{count} cases, {bad} bad ones; seed {seed}")
    return int(bad > 0)


if __name__ == "__main__":
    sys.exit(main())
