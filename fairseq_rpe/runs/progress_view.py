"""What is seen of a training while it works: what is trained, how far it is, what its validations found."""

from pathlib import Path

from fairseq_rpe.runs.log import BEGINS, Heard, fact
from fairseq_rpe.utils.progress import Progress


class View:
    """Is told every line of fairseq-train's, and shows nothing of it."""

    def hear(self, line: str) -> None:
        """A line of the trainer's."""

    def wait(self) -> None:
        """Nothing was said for a while."""

    def close(self) -> None:
        """The trainer has ended."""


class Summary(View):
    """Shows what a user waits for.

    Args:
        name: of the encoding; ``folder``: where its checkpoints go.
        updates: in all, ``done`` of them before this start.
    """

    def __init__(self, name: str, folder: Path, updates: int, done: int) -> None:
        self._name, self._folder, self._updates, self._done = name, folder, updates, done
        self._heard, self._begun = Heard(done), False
        self._progress = Progress(name, "updates", updates, done=done, ends=True)

    def hear(self, line: str) -> None:
        if BEGINS in line and not self._begun:
            self._begun = True
            self._progress.begin()
        elif (parameters := fact("parameters", line)) is not None:
            part = f", {self._done:,} of them done" if self._done else ""
            what = f"{self._name}, {parameters} parameters, {self._updates:,} updates{part}"
            self._progress.say(f"training {what}, into {self._folder}")
        elif (kind := self._heard.hear(line)) == "valid":
            self._progress.say(f"update {self._heard.updates:,}: {', '.join(self._validation())}")
        elif kind:
            note = [f"loss {self._heard.loss:.3f}"] if self._heard.loss is not None else []
            note += [f"{self._heard.speed:,.0f} tokens/s"] if self._heard.speed else []
            self._progress.reach(max(self._done, self._heard.updates), ", ".join(note))

    def wait(self) -> None:
        self._progress.tick()

    def close(self) -> None:
        self._progress.close()

    def _validation(self) -> list[str]:
        found = self._heard.valid
        words = [f"validation loss {found['valid_loss']:.3f} bits per token"]
        words += [f"perplexity {found['valid_ppl']:.2f}"] if "valid_ppl" in found else []
        words += [f"{found['valid_exact']:.2f} % exact"] if "valid_exact" in found else []
        words += [f"answers {found['valid_answers']:.2f}"] if "valid_answers" in found else []
        return words
