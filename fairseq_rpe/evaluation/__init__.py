"""A trained model on a text: perplexity, sliding windows, answers, receptive fields."""

import logging
from pathlib import Path
from typing import Any

from fairseq_rpe.utils.files import check_file


class _LogFile(logging.FileHandler):
    """A log file that is made, with the folders above it, by its first message."""

    def _open(self) -> Any:
        Path(self.baseFilename).parent.mkdir(parents=True, exist_ok=True)
        return super()._open()


def log_to(path: Path | None) -> None:
    """Send fairseq's messages to a file, or nowhere: stdout is for the results.

    To be called before fairseq is imported: then it has messages already, and fairseq_cli, if nobody came before,
    sends them all to stdout.
    """
    if path:
        check_file("--log", path)
    handler = _LogFile(path, delay=True) if path else logging.NullHandler()
    handler.setFormatter(logging.Formatter("%(asctime)s | %(levelname)s | %(name)s | %(message)s"))
    logging.basicConfig(level=logging.INFO, handlers=[handler])
    logging.captureWarnings(True)
