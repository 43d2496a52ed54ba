"""Progress display of a training: encoding, updates done, validation losses."""

from pathlib import Path

from fairseq_rpe.runs.log import EPOCH_LINE, TrainingLogParser, parse_fact
from fairseq_rpe.utils.progress import Progress


class ProgressView:
    """Observer of the lines that fairseq-train prints; this base class shows nothing."""

    def on_line(self, line: str) -> None:
        """Handle a line of fairseq-train."""

    def on_idle(self) -> None:
        """Handle a pause without output."""

    def close(self) -> None:
        """Handle the end of fairseq-train."""


class TerminalProgressView(ProgressView):
    """Shows a progress bar and the validation results on the terminal.

    Args:
        name: spec of the encoding.
        folder: folder of the checkpoints.
        updates: updates of the whole training.
        done: updates done before this start.
    """

    def __init__(self, name: str, folder: Path, updates: int, done: int) -> None:
        self._name, self._folder, self._updates, self._done = name, folder, updates, done
        self._parser, self._has_begun = TrainingLogParser(done), False
        self._progress = Progress(name, "updates", updates, done=done, ends=True)

    def on_line(self, line: str) -> None:
        """Show a line of statistics."""
        if EPOCH_LINE in line and not self._has_begun:
            self._has_begun = True
            self._progress.start_timing()
        elif (parameters := parse_fact("parameters", line)) is not None:
            resumed = f", {self._done:,} of them done" if self._done else ""
            training = f"{self._name}, {parameters} parameters, {self._updates:,} updates{resumed}"
            self._progress.write(f"training {training}, into {self._folder}")
        elif (kind := self._parser.parse_line(line)) == "valid":
            self._progress.write(f"update {self._parser.updates:,}: {', '.join(self._validation())}")
        elif kind:
            metrics = [f"loss {self._parser.loss:.3f}"] if self._parser.loss is not None else []
            metrics += [f"{self._parser.speed:,.0f} tokens/s"] if self._parser.speed else []
            self._progress.update_to(max(self._done, self._parser.updates), ", ".join(metrics))

    def on_idle(self) -> None:
        """Keep the elapsed time current."""
        self._progress.refresh()

    def close(self) -> None:
        """Close the progress bar."""
        self._progress.close()

    def _validation(self) -> list[str]:
        """Return the values of the last validation in words."""
        valid = self._parser.valid
        words = [f"validation loss {valid['valid_loss']:.3f} bits per token"]
        words += [f"perplexity {valid['valid_ppl']:.2f}"] if "valid_ppl" in valid else []
        words += [f"{valid['valid_exact']:.2f} % exact"] if "valid_exact" in valid else []
        words += [f"answers {valid['valid_answers']:.2f}"] if "valid_answers" in valid else []
        return words
