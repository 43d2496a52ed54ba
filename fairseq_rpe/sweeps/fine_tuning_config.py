"""What a recipe for answers says of fine-tuning, and of the folders of questions."""

from dataclasses import dataclass

from fairseq_rpe.sweeps.sweep_record import Asking, Further
from fairseq_rpe.utils.records import Count, Words

# fairseq's flags that keep the checkpoint of the best score in validation
BEST = ["--eval-answers", "--best-checkpoint-metric", "answers", "--maximize-best-checkpoint-metric"]


@dataclass(frozen=True)
class Tuning(Further):
    """How pre-trained models are fine-tuned on questions; ``None`` is: as they were trained before.

    ``mixture``: of several sets in one folder; ``max_tokens``: most of a batch, padding included, which then has at
    most ``batch_sentences`` questions.
    """

    mixture: str | None = None
    max_tokens: Count | None = None

    def flags(self, asking: Asking) -> list[str]:
        """What the task ``rpe_answers`` is told."""
        given = {"--cut": asking.cut if asking.cut != Asking().cut else None, "--mixture": self.mixture}
        given["--max-tokens"] = None if self.max_tokens is None else str(self.max_tokens)
        best = BEST if asking.checkpoint == "best" else []
        return [*(word for flag, value in given.items() if value is not None for word in (flag, value)), *best]


@dataclass(frozen=True)
class Folder:
    """A prepared folder of questions, ``data``: the words after ``fairseq-rpe`` that make it, and its ``sets`` to ask.

    ``sets``: none: all of the folder.
    """

    data: str
    prepare: Words = ()
    sets: Words = ()
