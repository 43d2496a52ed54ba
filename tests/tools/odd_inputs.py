"""Odd command lines and odd files for every command of fairseq-rpe: refused in one line, or carried out.

    python tests/tools/odd_inputs.py --count 1000 --seed 1

Cases are drawn from a seed (``odd_values.py``) over small good inputs (``odd_fixtures.py``). One process serves many
cases; training and evaluation, which commands start as processes, run in it too. A case is bad where it ends in a
traceback or an internal error, says more or less than one line, hangs, leaves something behind that was refused, is
refused after updates of training, prints numbers that are none, or accepts what the generator knows to be invalid.
The exit status is 1 if any is bad.
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
_UPDATES = 3  # of a training after which it has shown that it works
_MEMORY = 12 << 30  # address space of a process that serves cases
_NO_NUMBER = re.compile(r"(?<![\w.])(NaN|nan|Infinity|-?inf)(?![\w.])")


@dataclass(frozen=True)
class Verdict:
    """How a case ended: one of ``GOOD`` or ``BAD``, and what shows it."""

    kind: str
    shown: str = ""


class _Hang(BaseException):
    """The time of a case is up."""


class _LongEnough(BaseException):
    """A training has made as many updates as are looked at."""


class Children:
    """Runs in this process what commands start as others; of a training no more updates than are looked at."""

    def __init__(self) -> None:
        self.updates = 0
        self.several = False

    def spawn(self, command: Sequence[str], *rest: Any, **more: Any) -> Any:
        if "torch.distributed.run" in command:
            self.several = True
            raise _LongEnough
        return in_process.spawn(command, *rest, **more)

    @contextlib.contextmanager
    def replaced(self) -> Iterator[None]:
        from fairseq.trainer import Trainer

        from fairseq_rpe.runs import processes

        real, own = Trainer.train_step, self

        def step(self: Any, *args: Any, **kwargs: Any) -> Any:
            if own.updates >= _UPDATES:
                raise _LongEnough
            result = real(self, *args, **kwargs)
            own.updates += 1
            return result

        with mock.patch.object(Trainer, "train_step", step), mock.patch.object(processes, "spawn", self.spawn):
            yield


Snapshot = dict[str, tuple[int, int, int]]


def snapshot(*folders: Path) -> Snapshot:
    """Kind, size and time of every file; of a folder only that it is there. Locks are none of them."""
    found: Snapshot = {}
    for folder in folders:
        for path in folder.rglob("*"):
            status = path.lstat()
            plain = stat.S_ISREG(status.st_mode)
            if path.name != ".lock":
                size, time_ns = (status.st_size, status.st_mtime_ns) if plain else (0, 0)
                found[str(path)] = (stat.S_IFMT(status.st_mode), size, time_ns)
    return found


class Place:
    """The folders of a process that serves cases: fixtures, the same untouched, and an empty one to run in."""

    def __init__(self, fixtures: Path, scratch: Path) -> None:
        self.fixtures, self.here, self.pristine = fixtures, scratch / "here", scratch / "pristine"
        self.temporary = scratch / "tmp"
        for folder in (self.here, self.temporary):
            folder.mkdir(parents=True, exist_ok=True)
        if not self.pristine.exists():
            _copy(fixtures, self.pristine)
        self._before = snapshot(fixtures)

    def restore(self) -> None:
        """Have the fixtures as they were, and the other folders empty."""
        for folder in (self.here, self.temporary):
            shutil.rmtree(folder, ignore_errors=True)
            folder.mkdir()
        now = snapshot(self.fixtures)
        if now == self._before:
            return
        for name in sorted(now.keys() - self._before.keys(), reverse=True):
            path = Path(name)
            shutil.rmtree(path) if path.is_dir() and not path.is_symlink() else path.unlink(missing_ok=True)
        for name, described in self._before.items():
            if now.get(name) != described:
                path, good = Path(name), self.pristine / Path(name).relative_to(self.fixtures)
                if path.is_dir() and not path.is_symlink() and not good.is_dir():
                    shutil.rmtree(path)
                if good.is_dir() and not good.is_symlink():
                    path.mkdir(exist_ok=True)
                elif good.is_file():
                    path.unlink(missing_ok=True)
                    path.parent.mkdir(parents=True, exist_ok=True)
                    shutil.copy2(good, path)


def _copy(source: Path, target: Path) -> None:
    def skip(folder: str, names: list[str]) -> list[str]:
        return [name for name in names if folder == str(source) and name == "odd"]

    shutil.copytree(source, target, symlinks=True, ignore=skip)


def judge(words: list[str], invalid: bool, place: Place, seconds: float) -> Verdict:
    """Run a command line in this process, and say how it ended."""
    from fairseq_rpe.cli.main import main

    children, out, err = Children(), io.StringIO(), io.StringIO()
    before, ended, code = snapshot(place.fixtures), False, None
    hung = [False]

    def stop(number: int, frame: object) -> None:
        hung[0] = True
        raise _Hang

    previous = signal.signal(signal.SIGALRM, stop)
    signal.setitimer(signal.ITIMER_REAL, seconds, 1.0)
    try:
        with children.replaced(), _quiet(out, err), contextlib.chdir(place.here):
            code = main(words)
        ended = True
    except (_Hang, KeyboardInterrupt):
        hung[0] = True
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, previous)
    said, errors = out.getvalue(), err.getvalue()
    if hung[0] or not ended:
        return Verdict("hang", f"after {seconds:.0f} s")
    if children.several or "_LongEnough" in errors:
        return Verdict("accepted", "training began")
    if "Traceback (most recent call last)" in said + errors:
        return Verdict("traceback", errors[-400:])
    if "error: internal: " in errors or "run again with --debug" in errors:
        return Verdict("internal error", errors[-400:])
    left = _left(before, place, code == 0)
    if code:
        lines = [line for line in errors.splitlines() if "error: " in line]
        of_runs = len(lines) > 1 and all(line.endswith("train.log)") for line in lines)  # a sweep has one for each run
        one = len(lines) == 1 or of_runs
        if not one or not lines[0].startswith("error: ") or not errors.endswith(lines[-1] + "\n"):
            return Verdict("not one line", errors[-400:] or said[-400:])
        if len(lines[0]) > 700:
            return Verdict("not one line", f"{len(lines[0])} characters: {lines[0][:300]}")
        if children.updates:
            return Verdict("refused late", f"after {children.updates} updates: {lines[0]}")
        if "(log: " in lines[0]:  # one run of a sweep, whose log is left to be read
            left = []
        return Verdict("left behind", f"{left[:4]}: {lines[0]}") if left else Verdict("refused", lines[0])
    if left:
        return Verdict("left behind", f"{left[:4]} of an accepted one")
    if _NO_NUMBER.search(said) and words[0] not in ("list", "verdict", "bias", "sensitivity"):
        return Verdict("no numbers", said[-300:])
    return Verdict("nonsense", said[-200:]) if invalid else Verdict("accepted")


@contextlib.contextmanager
def _quiet(out: IO[str], err: IO[str]) -> Iterator[None]:
    nothing = mock.patch.object(sys, "stdin", io.StringIO())
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err), nothing:
        yield


def _left(before: Snapshot, place: Place, accepted: bool) -> list[str]:
    """What a command has left: all that is new or changed of a refused one, hidden parts of an accepted one."""
    now = snapshot(place.fixtures, place.here, place.temporary)
    changed = [name for name, described in now.items() if before.get(name) != described]
    changed += [name for name in before if name not in now]
    if accepted:
        changed = [name for name in changed if Path(name).name.startswith(".") or name.endswith((".part", ".partial"))]
    return sorted(changed)


def _serve(cases: Sequence[int], draw: Callable[[int], Any], place: Place, seconds: float, told: Connection) -> None:
    """Judge cases one after another; before and after each the parent is told."""
    resource.setrlimit(resource.RLIMIT_AS, (_MEMORY, _MEMORY))
    os.environ["TMPDIR"] = str(place.temporary)
    tempfile.tempdir = str(place.temporary)
    for number in cases:
        place.restore()
        case = draw(number)
        told.send((number, None, 0.0))
        start = time.monotonic()
        try:
            if case.change is not None:
                case.change(place.fixtures)
            verdict = judge(case.words, case.invalid, place, seconds)
            if case.valid and verdict.kind == "refused":
                verdict = Verdict("refused good", verdict.shown)
        except _Hang:
            verdict = Verdict("hang")
        told.send((number, verdict, time.monotonic() - start))
    place.restore()


def judged(
    cases: Sequence[int], draw: Callable[[int], Any], place: Place, seconds: float
) -> Iterator[tuple[int, Verdict, float]]:
    """The verdict of each case. A process that a case has stopped or blocked is replaced by another."""
    context, waiting = multiprocessing.get_context("fork"), list(cases)
    while waiting:
        ours, theirs = context.Pipe(duplex=False)
        process = context.Process(target=_serve, args=(waiting, draw, place, seconds, theirs))
        process.start()
        theirs.close()
        while waiting:
            verdict, took = Verdict("internal error", "the process ended"), 0.0
            try:
                if ours.poll(2 * seconds + 20):
                    _, sent, took = ours.recv()
                    if sent is None:
                        continue
                    verdict = sent
                else:
                    verdict, took = Verdict("hang", "the process does not answer"), 2 * seconds
            except EOFError:
                process.join()
                verdict = Verdict("internal error", f"the process ended with {process.exitcode}")
            yield waiting.pop(0), verdict, took
            if verdict.shown.startswith("the process "):
                break
        if process.is_alive():
            process.join(5)
            process.kill()
        process.join()
        ours.close()


def prepare(folder: Path) -> Path:
    """Fixtures in ``folder``, made in a process of their own unless they are there."""
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
    parser.add_argument("--seed", type=int, default=1, help="of what is drawn (default: 1)")
    parser.add_argument("--command", action="append", choices=tuple(COMMANDS), help="of this command alone")
    parser.add_argument("--seconds", type=float, default=60, help="time limit of a case (default: 60)")
    parser.add_argument("--keep", type=Path, help="folder for the fixtures, made once (default: a temporary one)")
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
    """Judge ``count`` cases and print a table of how they ended, and the bad ones. Returns 1 if there are any."""
    os.environ["FAIRSEQ_RPE_CACHE"] = "off"
    _load()
    fixtures = prepare(folder)
    from odd_values import LONG, Generator

    place = Place(fixtures, folder)
    generator = Generator(fixtures, place.pristine, place.here / "new/folder", seed, tuple(commands or ()))
    table: dict[str, collections.Counter[str]] = collections.defaultdict(collections.Counter)
    bad = 0
    for number, verdict, took in judged(range(first, first + count), generator.case, place, seconds):
        case = generator.case(number)
        dest = case.about.partition("=")[0].lstrip("-").replace("-", "_")
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
