"""Helpers for tests that start processes: start, find and wait for them."""

from __future__ import annotations

import contextlib
import subprocess
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

LIMIT_SECONDS = 240
# module for --rpe-module; tests pass a copy of it
HELD_ENCODING = Path(__file__).with_name("held_encoding.py")


def processes_about(*texts: str) -> list[int]:
    """Return the ids of all processes with these texts in their command lines, whose words a NUL separates."""
    ids = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        with contextlib.suppress(OSError):  # the process has ended
            command_line = path.read_text(errors="replace")
            if all(text in command_line for text in texts):
                ids.append(int(path.parent.name))
    return ids


@contextlib.contextmanager
def begin(command: Sequence[object], log: Path) -> Iterator[subprocess.Popen[bytes]]:
    """Start a command that writes all output to ``log``; at the end of the block it is killed with SIGKILL."""
    with open(log, "wb") as file:
        process = subprocess.Popen([str(word) for word in command], stdout=file, stderr=file)
    try:
        yield process
    finally:
        process.kill()
        process.wait()


def wait_for(condition: Callable[[], object], process: subprocess.Popen | None = None, log: Path | None = None) -> None:
    """Wait until a condition holds.

    Args:
        condition: called until it returns something true.
        process: a process that must not end before.
        log: its output, for the message of a failure.
    """
    deadline = time.monotonic() + LIMIT_SECONDS
    while not condition():
        output = log.read_text()[-2000:] if log else ""
        assert time.monotonic() < deadline, f"waited for too long: {output}"
        assert process is None or process.poll() is None or condition(), f"it ended too early: {output}"
        time.sleep(0.02)
