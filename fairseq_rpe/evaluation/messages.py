"""What has to be settled before fairseq is imported: where its messages go, and the command line that it reads."""

from __future__ import annotations

import contextlib
import logging
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path


def log_to(path: Path | None) -> None:
    """Send fairseq's messages to a file, or nowhere: stdout is for the results.

    fairseq has messages as soon as it is imported, and fairseq_cli then sends them to stdout if nobody came before.
    """
    if path:
        path.parent.mkdir(parents=True, exist_ok=True)
    handler = logging.FileHandler(path) if path else logging.NullHandler()
    handler.setFormatter(logging.Formatter("%(asctime)s | %(levelname)s | %(name)s | %(message)s"))
    logging.basicConfig(level=logging.INFO, handlers=[handler])
    logging.captureWarnings(True)


@contextlib.contextmanager
def as_fairseq_command(flags: Sequence[str]) -> Iterator[None]:
    """fairseq reads --user-dir from sys.argv before it parses anything else."""
    before = sys.argv
    sys.argv = ["fairseq-eval-lm", *flags]
    try:
        yield
    finally:
        sys.argv = before
