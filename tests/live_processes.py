"""Processes that tests start: which of them live, and waiting for what they do."""

from __future__ import annotations

import contextlib
import subprocess
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

LIMIT_SECONDS = 240
# registers an encoding on import: to be copied to a place of its own, and given to --rpe-module
HELD_ENCODING = Path(__file__).with_name("held_encoding.py")


def processes_about(*texts: str) -> list[int]:
    """The numbers of all processes with these texts in their command lines, whose words a NUL separates."""
    found = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        with contextlib.suppress(OSError):
            words = path.read_text(errors="replace")
            if all(text in words for text in texts):
                found.append(int(path.parent.name))
    return found


@contextlib.contextmanager
def begin(command: Sequence[object], log: Path) -> Iterator[subprocess.Popen[bytes]]:
    """Start a command that says everything in ``log``; at the end of the block it is killed with SIGKILL."""
    with open(log, "wb") as file:
        process = subprocess.Popen([str(word) for word in command], stdout=file, stderr=file)
    try:
        yield process
    finally:
        process.kill()
        process.wait()


def wait_for(condition: Callable[[], object], process: subprocess.Popen | None = None, log: Path | None = None) -> None:
    """Wait until it is true; ``process`` may not end before, and says in ``log`` why it did."""
    deadline = time.monotonic() + LIMIT_SECONDS
    while not condition():
        said = log.read_text()[-2000:] if log else ""
        assert time.monotonic() < deadline, f"waited for too long: {said}"
        assert process is None or process.poll() is None or condition(), f"it ended too early: {said}"
        time.sleep(0.02)
