"""What a child process says: passed on while it works, and the line of it that best says why it failed."""

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

from fairseq_rpe.core.errors import DEBUG
from fairseq_rpe.runs.log import TRAINS
from fairseq_rpe.runs.progress_view import View

_RANK = re.compile(r"\[rank\d+\]: ")
_ERROR = re.compile(r"(error: |\w*(Error|Exception|Interrupt)\b)")
# what is said when something else went wrong before
_CONSEQUENCE = re.compile(r"error: fairseq-train ended|.*(by peer|Broken pipe)")
_LAST_WORDS = re.compile(r"(\[rank\d+\]: )?(Traceback \(most recent call last\):|error: )")
_LOGGED = re.compile(r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d \| [A-Z]+ \| ")
_KEPT = 10_000  # lines that are held back, or looked at for the reason of a failure
_WAIT_SECONDS = 5.0
_TICK_SECONDS = 1.0


def cause(lines: Iterable[str]) -> str:
    """The line that best says why a process ended, or nothing."""
    bare = [_RANK.sub("", line.strip()) for line in lines]
    bare = [line for line in bare if line]
    told, ignored = [], False
    for line in bare:
        # Python reports an error in a destructor, often of an object that was never complete, in lines of its own
        if line.startswith("Exception ignored in"):
            ignored = True
        elif _ERROR.match(line):
            told += [] if ignored else [line]
            ignored = False
    better = [line for line in told if not _CONSEQUENCE.match(line)] or told or bare
    return better[-1].removeprefix("error: ") if better else ""


def last_error(log: Path, start: int = 0) -> str:
    """The message in what was added to a log after ``start`` that best says why it ended, or nothing."""
    if not log.exists():
        return ""
    with open(log, "rb") as file:
        file.seek(start)
        return cause(file.read().decode(errors="replace").splitlines())


@dataclass(frozen=True)
class Ending:
    """How a child ended: its code, why, and whether it had begun to train."""

    code: int
    why: str
    began: bool


class Relay:
    """Passes on what a child writes into its pipes, to this process's own stdout and stderr.

    What looks like its last words, a traceback or an error, is held back until it is known how the child ended: of a
    failure one line is told. With FAIRSEQ_RPE_DEBUG set all is passed on at once.

    Args:
        log: takes all that the child says as well.
        view: is told it in the place of stdout and stderr.
    """

    def __init__(self, child: subprocess.Popen[bytes], log: IO[bytes] | None = None, view: View | None = None) -> None:
        self._log, self._view = log, view
        self._lines: deque[str] = deque(maxlen=_KEPT)
        self._traced = self._began = False
        self._held: deque[tuple[TextIO, str]] = deque(maxlen=_KEPT)
        self._muted = False
        ends = ((child.stdout, sys.stdout), (child.stderr, sys.stderr))
        self._threads = [threading.Thread(target=self._read, args=end, daemon=True) for end in ends if end[0]]
        for thread in self._threads:
            thread.start()

    def mute(self) -> None:
        """Pass nothing on any more: the child is being stopped, and how it takes that is no news."""
        self._muted = True

    def finish(self, code: int) -> Ending:
        """The child has ended: read what is left, and pass on what was held back if it did not fail."""
        for thread in self._threads:
            # a grandchild may hold the pipe open
            thread.join(_WAIT_SECONDS)
        if self._view is not None:
            self._view.close()
        while code == 0 and self._held:
            stream, line = self._held.popleft()
            stream.write(line)
        return Ending(code, self._why(code) if code else "", self._began)

    def _why(self, code: int) -> str:
        if code < 0:
            killed = f"fairseq-train was ended by {signal.Signals(-code).name}"
            by_kernel = ", perhaps for lack of memory: use smaller batches" if -code == signal.SIGKILL else ""
            return f"{killed}{by_kernel}; rerunning resumes from its last checkpoint"
        said = cause(self._lines)
        if not said:
            return f"fairseq-train ended with code {code} and said nothing"
        if any(line.rstrip().endswith(f"error: {said}") for line in self._lines):
            return said
        more = "; run again with --debug for the traceback" if self._traced and DEBUG not in os.environ else ""
        return f"fairseq-train failed: {said}{more}"

    def _read(self, pipe: IO[bytes], stream: TextIO) -> None:
        decoder = codecs.getincrementaldecoder("utf-8")("replace")
        rest, holds = "", False
        while chunk := self._chunk(pipe.fileno()):
            *whole, rest = (rest + decoder.decode(chunk)).split("\n")
            for line in whole:
                holds = self._pass_on(line + "\n", stream, holds)
            stream.flush()
        if rest:
            self._pass_on(rest + "\n", stream, holds)
            stream.flush()

    def _chunk(self, handle: int) -> bytes:
        if self._view is not None:
            with selectors.DefaultSelector() as selector:
                selector.register(handle, selectors.EVENT_READ)
                while not selector.select(_TICK_SECONDS):
                    if not self._muted:
                        self._view.wait()
        return os.read(handle, 1 << 16)

    def _note(self, line: str) -> None:
        """Add a line to the log; one that can take no more does not stop the training."""
        if self._log is not None:
            try:
                self._log.write(line.encode())
            except OSError as error:
                self._log = None
                why = os.strerror(error.errno or 0)
                print(f"the log cannot be written ({why}): training continues without it", file=sys.stderr)

    def _pass_on(self, line: str, stream: TextIO, holds: bool) -> bool:
        self._lines.append(line)
        self._note(line)
        self._began = self._began or TRAINS in line
        holds = holds or _LAST_WORDS.match(line) is not None
        self._traced = self._traced or "Traceback (most recent call last):" in line
        if self._view is not None:
            if not self._muted:
                self._view.hear(line)
            return holds
        if holds and DEBUG not in os.environ and not _LOGGED.match(line):
            self._held.append((stream, line))
        elif not self._muted:
            stream.write(line)
        return holds
