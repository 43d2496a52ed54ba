"""Evaluation of trained models: perplexity, sliding windows, exact match, question answering, receptive fields."""

import logging
from pathlib import Path
from typing import Any

from fairseq_rpe.utils.output_checks import check_output_file


class _LazyLogFile(logging.FileHandler):
    """A log file that is created, with its parent folders, by the first message."""

    def _open(self) -> Any:
        Path(self.baseFilename).parent.mkdir(parents=True, exist_ok=True)
        return super()._open()


def log_to(path: Path | None) -> None:
    """Send fairseq's log messages to a file, or nowhere, because stdout is for the results.

    Call it before fairseq is imported: importing fairseq logs messages already, and fairseq_cli sends all messages to
    stdout unless logging is configured.

    Args:
        path: log file; None: messages are dropped.

    Raises:
        UserError: the file cannot be written.
    """
    if path:
        check_output_file("--log", path)
    handler = _LazyLogFile(path, delay=True) if path else logging.NullHandler()
    handler.setFormatter(logging.Formatter("%(asctime)s | %(levelname)s | %(name)s | %(message)s"))
    logging.basicConfig(level=logging.INFO, handlers=[handler])
    logging.captureWarnings(True)
