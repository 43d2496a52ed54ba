"""Standard output and standard error while a command runs: what cannot be shown does not stop the work."""

import contextlib
import io
import os
import sys
from collections.abc import Iterator
from typing import Any, TextIO


class Display:
    """Stands in for a text stream. After a failed write it is quiet; ``failure``: why, if the reader has not just left.

    Characters that the stream's encoding lacks are replaced.
    """

    def __init__(self, stream: TextIO | None) -> None:
        self._stream: Any = open(os.devnull, "w") if stream is None else stream
        self._quiet = False
        self.failure: OSError | None = None
        if isinstance(stream, io.TextIOWrapper) and stream.errors != "backslashreplace":
            stream.reconfigure(errors="replace")

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)

    def write(self, text: str) -> int:
        if not self._quiet:
            with self._failing():
                self._stream.write(text)
        return len(text)

    def writelines(self, lines: Any) -> None:
        self.write("".join(lines))

    def flush(self) -> None:
        if not self._quiet:
            with self._failing():
                self._stream.flush()

    def isatty(self) -> bool:
        return bool(self._stream.isatty())

    @contextlib.contextmanager
    def _failing(self) -> Iterator[None]:
        try:
            yield
        except (OSError, ValueError) as error:
            self._quiet = True
            if isinstance(error, OSError) and not isinstance(error, BrokenPipeError):
                self.failure = error
            # what is left in the buffers goes nowhere; without this Python complains of it at exit
            with contextlib.suppress(OSError, ValueError):
                nowhere = os.open(os.devnull, os.O_WRONLY)
                os.dup2(nowhere, self._stream.fileno())
                os.close(nowhere)


@contextlib.contextmanager
def displayed() -> Iterator[Display]:
    """Put a display in the place of sys.stdout and one in that of sys.stderr; gives the first."""
    _keep_numbers()
    before = sys.stdout, sys.stderr
    out, err = Display(before[0]), Display(before[1])
    sys.stdout, sys.stderr = out, err
    try:
        yield out
    finally:
        out.flush()
        err.flush()
        sys.stdout, sys.stderr = before


def _keep_numbers() -> None:
    """Take the numbers 0, 1 and 2 where they are closed: a file of ours must not get them, children print there."""
    while (handle := os.open(os.devnull, os.O_RDWR)) < 3:
        os.set_inheritable(handle, True)
    os.close(handle)
