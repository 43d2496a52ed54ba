"""Runs programs of fairseq, and the processes that commands would start, inside the process of the tests.

A process that imports torch and fairseq takes seconds to start; a small training takes a tenth of a second.
"""

from __future__ import annotations

import contextlib
import importlib
import io
import logging
import os
import signal
import subprocess
import sys
import threading
import traceback
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import IO, Any
from unittest import mock

from fairseq_rpe.runs import processes

_SPAWN = processes.spawn
_LOG_FORMAT = "%(asctime)s | %(levelname)s | %(name)s | %(message)s"
_ENTRY_POINTS = {"fairseq_rpe.runs.launch": "fairseq_cli.train", "fairseq_rpe.cli.main": "fairseq_rpe.cli.main"}


def fairseq(
    command: str, *flags: str | Path, ok: bool = True, input: str = "", environment: Mapping[str, str] | None = None
) -> subprocess.CompletedProcess[str]:
    """Run ``fairseq_cli.<command>`` in this process.

    Args:
        command: ``train``, ``eval_lm``, ``generate``, ``interactive``, ``preprocess`` or ``validate``.
        flags: its command-line arguments.
        ok: whether it must succeed.
        input: the text of standard input.
        environment: variables to set meanwhile.

    Returns:
        The exit code, standard output (with the log) and standard error, as of a process.
    """
    words, out, err = [str(flag) for flag in flags], io.StringIO(), io.StringIO()
    changed = (mock.patch.dict(os.environ, environment or {}), mock.patch.object(sys, "stdin", io.StringIO(input)))
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err), changed[0], changed[1]:
        code = _run(f"fairseq_cli.{command}", words)
    done = subprocess.CompletedProcess([command, *words], code, out.getvalue(), err.getvalue())
    assert not ok or code == 0, f"{done.args}\n{done.stdout[-3000:]}\n{done.stderr[-3000:]}"
    return done


class Child:
    """A child that ran in this process and has ended; it has the interface of ``subprocess.Popen``."""

    pid, stderr = 0, None

    def __init__(self, returncode: int, output: bytes | None) -> None:
        self.returncode = returncode
        self.stdout: IO[bytes] | None = None
        if output is not None:
            read, write = os.pipe()
            self.stdout = os.fdopen(read, "rb")
            threading.Thread(target=_write, args=(write, output), daemon=True).start()

    def poll(self) -> int:
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        return self.returncode


def _write(handle: int, output: bytes) -> None:
    with contextlib.suppress(OSError), os.fdopen(handle, "wb") as file:
        file.write(output)


def spawn(
    command: Sequence[str],
    environment: Mapping[str, str],
    log: IO[bytes] | int | None = None,
    keep_open: Sequence[int] = (),
    errors: int | None = None,
) -> Child | subprocess.Popen[bytes]:
    """Run a program of this package in this process to its end; replaces ``processes.spawn``.

    Any other program, such as torchrun, starts as a process.
    """
    words = list(command)
    module, arguments = "", words
    if "-m" in words:
        module, *arguments = words[words.index("-m") + 1 :]
    if module not in _ENTRY_POINTS:
        return _SPAWN(command, environment, log, keep_open, errors)
    output = io.StringIO()
    with contextlib.redirect_stdout(output), contextlib.redirect_stderr(output), mock.patch.dict(os.environ):
        os.environ.update(environment)
        code = _run(_ENTRY_POINTS[module], arguments)
    text = output.getvalue().encode(errors="replace")
    if isinstance(log, int) or log is None:
        return Child(code, text if log == subprocess.PIPE else None)
    log.write(text)
    log.flush()
    return Child(code, None)


@contextlib.contextmanager
def children_in_process() -> Iterator[None]:
    """Run trainings and evaluations that a command starts in this process, one after another."""
    with mock.patch.object(processes, "spawn", spawn):
        yield


def _run(module: str, words: list[str]) -> int:
    """Call a program's entry point as its process would, and return its exit code."""
    from fairseq_rpe.core.errors import UserError, user_message

    logging.getLogger().addHandler(logging.NullHandler())  # otherwise fairseq_cli configures the log on its import
    import fairseq_rpe.compat
    import fairseq_rpe.models

    program = importlib.import_module(module)
    fairseq_rpe.compat.apply()  # repairs the modules that are loaded by now, as --user-dir does
    handlers = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    argv = mock.patch.object(sys, "argv", [module, *words])
    with argv, _log_on_stdout(), _registries_restored(), mock.patch.dict(os.environ):
        try:
            if module == "fairseq_rpe.cli.main":
                return program.main(words)
            _forget_earlier_runs()
            program.cli_main()
            return 0
        except SystemExit as error:
            if isinstance(error.code, str):
                print(error.code, file=sys.stderr)
                return 1
            return error.code or 0
        except Exception as error:
            # what the replaced sys.excepthook prints
            cause = next((e for e in (error, error.__context__) if isinstance(e, UserError)), error)
            message = user_message(cause)
            print(f"error: {message}", file=sys.stderr) if message is not None else traceback.print_exc()
            return 1
        finally:
            for number, handler in handlers.items():
                signal.signal(number, handler)
            fairseq_rpe.compat.overrides.clear()  # flags of this program replace no settings in a later one


@contextlib.contextmanager
def _registries_restored() -> Iterator[None]:
    """Remove afterwards what the run registers, as with ``--rpe-module``, and the settings that its flags replace."""
    from fairseq_rpe import algorithms, compat, encodings, positions

    registries = [package.base.registry for package in (algorithms, encodings, positions)]
    for registry in registries:
        registry.names()  # entry points of other packages register when names are first needed
    changed = [*(mock.patch.dict(registry._table) for registry in registries), mock.patch.dict(encodings._loaded)]
    with contextlib.ExitStack() as stack:
        for patch in changed:
            stack.enter_context(patch)
        try:
            yield
        finally:
            compat.overrides.clear()


class _Handler(logging.StreamHandler):
    """Handler of the log of a run; a child of the run, in the same process, replaces it by its own."""


@contextlib.contextmanager
def _log_on_stdout() -> Iterator[None]:
    root, handler = logging.getLogger(), _Handler(sys.stdout)
    handler.setFormatter(logging.Formatter(_LOG_FORMAT, "%Y-%m-%d %H:%M:%S"))
    level, before = root.level, list(root.handlers)
    root.handlers[:] = [other for other in before if not isinstance(other, _Handler)] + [handler]
    root.setLevel(logging.INFO)
    try:
        yield
    finally:
        root.handlers[:] = before  # hydra replaces them
        root.setLevel(level)


def _forget_earlier_runs() -> None:
    """Reset what fairseq keeps in globals of its modules, because a new process starts without it."""
    from fairseq import checkpoint_utils
    from fairseq.logging import metrics, progress_bar

    progress_bar._tensorboard_writers = {}
    metrics.reset()
    functions: list[Any] = [checkpoint_utils.save_checkpoint]
    train = sys.modules.get("fairseq_cli.train")
    functions += [train.should_stop_early] if train else []
    for function in functions:
        for name in ("best", "num_runs"):
            if hasattr(function, name):
                delattr(function, name)
