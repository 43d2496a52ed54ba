"""Relays the output of a child process and finds the line that explains its failure."""

import codecs
import os
import re
import selectors
import signal
import subprocess
import sys
import threading
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import IO, TextIO

from fairseq_rpe.core.errors import DEBUG_VARIABLE
from fairseq_rpe.runs.log import TRAINING_LINE
from fairseq_rpe.runs.progress_view import ProgressView

# prefix that torchrun puts before a line of a process
_RANK = re.compile(r"\[rank\d+\]: ")
_ERROR = re.compile(r"(error: |\w*(Error|Exception|Interrupt)\b)")
# messages that follow from an earlier error
_CONSEQUENCE = re.compile(r"error: fairseq-train ended|.*(by peer|Broken pipe)")
# first line of a traceback or error message, from which on output is held back
_FAILURE = re.compile(r"(\[rank\d+\]: )?(Traceback \(most recent call last\):|error: )")
# line of Python's logging, which is never held back
_LOGGED = re.compile(r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d \| [A-Z]+ \| ")
_MAX_LINES = 10_000  # lines that are held back, or searched for the reason of a failure
_WAIT_SECONDS = 5.0  # for the rest of the output, after the child has ended
_TICK_SECONDS = 1.0  # without output, after which the view is refreshed


def error_line(lines: Iterable[str]) -> str:
    """Find the line that explains best why a process ended.

    Args:
        lines: output of the process.

    Returns:
        The line without prefixes, empty if there is no output.
    """
    bare = [_RANK.sub("", line.strip()) for line in lines]
    bare = [line for line in bare if line]
    errors, ignored = [], False
    for line in bare:
        # Python reports an error in a destructor in separate lines; it is rarely the cause
        if line.startswith("Exception ignored in"):
            ignored = True
        elif _ERROR.match(line):
            errors += [] if ignored else [line]
            ignored = False
    candidates = [line for line in errors if not _CONSEQUENCE.match(line)] or errors or bare
    return candidates[-1].removeprefix("error: ") if candidates else ""


def last_error(log: Path, start: int = 0) -> str:
    """Find the line of a log that explains best why a process ended.

    Args:
        log: the log; it need not exist.
        start: byte at which the output of the process begins.

    Returns:
        The line, empty if there is none.
    """
    if not log.exists():
        return ""
    with open(log, "rb") as file:
        file.seek(start)
        return error_line(file.read().decode(errors="replace").splitlines())


@dataclass(frozen=True)
class ChildExit:
    """How a training ended.

    Attributes:
        code: exit code; negative for a signal.
        reason: one line, empty if the code is 0.
        began_training: whether at least the first epoch was set up.
    """

    code: int
    reason: str
    began_training: bool


class OutputRelay:
    """Passes the output of a child on to stdout and stderr.

    Tracebacks and error messages are held back until the child ends: a failure is reported in one line. With
    FAIRSEQ_RPE_DEBUG set all output is passed on at once.

    Args:
        child: process with pipes for its output.
        log: file that takes all output as well.
        view: view that gets the lines in place of stdout and stderr.
    """

    def __init__(
        self, child: subprocess.Popen[bytes], log: IO[bytes] | None = None, view: ProgressView | None = None
    ) -> None:
        self._log, self._view = log, view
        self._lines: deque[str] = deque(maxlen=_MAX_LINES)
        self._has_traceback = self._has_begun = False
        self._withheld: deque[tuple[TextIO, str]] = deque(maxlen=_MAX_LINES)
        self._is_muted = False
        streams = ((child.stdout, sys.stdout), (child.stderr, sys.stderr))
        self._threads = [threading.Thread(target=self._read, args=pair, daemon=True) for pair in streams if pair[0]]
        for thread in self._threads:
            thread.start()

    def mute(self) -> None:
        """Pass nothing on any more, because the child is being stopped."""
        self._is_muted = True

    def finish(self, code: int) -> ChildExit:
        """Read the rest of the output, and pass on what was held back unless the child failed.

        Args:
            code: exit code of the child.

        Returns:
            How the child ended.
        """
        for thread in self._threads:
            # a grandchild may hold the pipe open
            thread.join(_WAIT_SECONDS)
        if self._view is not None:
            self._view.close()
        # popleft, because after the timeout above a thread may still append lines
        while code == 0 and self._withheld:
            stream, line = self._withheld.popleft()
            stream.write(line)
        return ChildExit(code, self._failure_reason(code) if code else "", self._has_begun)

    def _failure_reason(self, code: int) -> str:
        """Return in one line why a child failed that ended with ``code`` != 0."""
        if code < 0:
            killed = f"fairseq-train was ended by {signal.Signals(-code).name}"
            by_kernel = ", perhaps for lack of memory: use smaller batches" if -code == signal.SIGKILL else ""
            return f"{killed}{by_kernel}; rerunning resumes from its last checkpoint"
        error = error_line(self._lines)
        if not error:
            return f"fairseq-train ended with code {code} and without a message"
        if any(line.rstrip().endswith(f"error: {error}") for line in self._lines):
            return error  # a message of this package, which is complete
        more = (
            "; run again with --debug for the traceback"
            if self._has_traceback and DEBUG_VARIABLE not in os.environ
            else ""
        )
        return f"fairseq-train failed: {error}{more}"

    def _read(self, pipe: IO[bytes], stream: TextIO) -> None:
        """Pass on the lines of a pipe until it is closed; runs in a thread for each pipe."""
        decoder = codecs.getincrementaldecoder("utf-8")("replace")
        rest, is_withheld = "", False
        while chunk := self._chunk(pipe.fileno()):
            *lines, rest = (rest + decoder.decode(chunk)).split("\n")
            for line in lines:
                is_withheld = self._pass_on(line + "\n", stream, is_withheld)
            stream.flush()
        if rest:
            self._pass_on(rest + "\n", stream, is_withheld)
            stream.flush()

    def _chunk(self, handle: int) -> bytes:
        """Wait for output and return it, empty at its end; refreshes the view while there is none."""
        if self._view is not None:
            with selectors.DefaultSelector() as selector:
                selector.register(handle, selectors.EVENT_READ)
                while not selector.select(_TICK_SECONDS):
                    if not self._is_muted:
                        self._view.on_idle()
        return os.read(handle, 1 << 16)

    def _write_log(self, line: str) -> None:
        """Write a line to the log; a full disk does not stop the training."""
        if self._log is not None:
            try:
                self._log.write(line.encode())
            except OSError as error:
                self._log = None
                reason = os.strerror(error.errno or 0)
                print(f"the log cannot be written ({reason}): training continues without it", file=sys.stderr)

    def _pass_on(self, line: str, stream: TextIO, is_withheld: bool) -> bool:
        """Store a line, and pass it on or hold it back; return whether the next one is held back."""
        self._lines.append(line)
        self._write_log(line)
        self._has_begun = self._has_begun or TRAINING_LINE in line
        is_withheld = is_withheld or _FAILURE.match(line) is not None
        self._has_traceback = self._has_traceback or "Traceback (most recent call last):" in line
        if self._view is not None:
            if not self._is_muted:
                self._view.on_line(line)
            return is_withheld
        if is_withheld and DEBUG_VARIABLE not in os.environ and not _LOGGED.match(line):
            self._withheld.append((stream, line))
        elif not self._is_muted:
            stream.write(line)
        return is_withheld
