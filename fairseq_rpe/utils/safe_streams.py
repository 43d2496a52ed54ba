"""Standard streams that survive closed pipes, full disks and encodings without a character."""

import contextlib
import io
import os
import sys
from collections.abc import Iterator
from typing import Any, TextIO


class SafeStream:
    """A wrapper of a text stream that discards output after a failed write.

    Characters that the stream's encoding lacks are replaced.

    Attributes:
        failure: Error of the failed write; None if there was none, or if the reader closed a pipe.
    """

    def __init__(self, stream: TextIO | None) -> None:
        self._stream: Any = open(os.devnull, "w") if stream is None else stream
        self._quiet = False
        self.failure: OSError | None = None
        if isinstance(stream, io.TextIOWrapper) and stream.errors != "backslashreplace":
            stream.reconfigure(errors="replace")

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)

    @property
    def is_quiet(self) -> bool:
        """Whether output is discarded, because a write has failed or the reader has closed the pipe."""
        return self._quiet

    def write(self, text: str) -> int:
        """Write ``text``, or discard it after a failure; return its length."""
        if not self._quiet:
            with self._catch_failure():
                self._stream.write(text)
        return len(text)

    def writelines(self, lines: Any) -> None:
        """Write all ``lines``."""
        self.write("".join(lines))

    def flush(self) -> None:
        """Flush the stream unless a write has failed."""
        if not self._quiet:
            with self._catch_failure():
                self._stream.flush()

    def isatty(self) -> bool:
        """Return whether the stream is a terminal."""
        return bool(self._stream.isatty())

    @contextlib.contextmanager
    def _catch_failure(self) -> Iterator[None]:
        try:
            yield
        except (OSError, ValueError) as error:
            self._quiet = True
            if isinstance(error, OSError) and not isinstance(error, BrokenPipeError):
                self.failure = error
            # what is left in the buffers would raise the same error at exit, so the descriptor now leads to /dev/null
            with contextlib.suppress(OSError, ValueError):
                nowhere = os.open(os.devnull, os.O_WRONLY)
                os.dup2(nowhere, self._stream.fileno())
                os.close(nowhere)


@contextlib.contextmanager
def safe_streams() -> Iterator[SafeStream]:
    """Replace sys.stdout and sys.stderr by safe streams, and yield that of stdout."""
    _occupy_standard_descriptors()
    saved = sys.stdout, sys.stderr
    out, err = SafeStream(saved[0]), SafeStream(saved[1])
    sys.stdout, sys.stderr = out, err
    try:
        yield out
    finally:
        out.flush()
        err.flush()
        sys.stdout, sys.stderr = saved


def _occupy_standard_descriptors() -> None:
    """Open closed descriptors 0, 1 and 2 on /dev/null: a data file could get one of them, and children print there."""
    while (handle := os.open(os.devnull, os.O_RDWR)) < 3:
        os.set_inheritable(handle, True)
    os.close(handle)
