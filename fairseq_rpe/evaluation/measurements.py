"""What is to be measured of which checkpoint, and how that is loaded; known without loading it."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from fairseq_rpe.algorithms import Algorithm
from fairseq_rpe.core.errors import UserError
from fairseq_rpe.core.files import file_digest
from fairseq_rpe.core.records import filled
from fairseq_rpe.data import folder as corpus
from fairseq_rpe.evaluation.results import AnswerKey, TextKey

# Bounds the activations of a batch and, with fairseq, its logits; a longer block or window is a batch of its own.
BATCH_TOKENS = 2048


@dataclass(frozen=True, kw_only=True)
class Overrides:
    """How checkpoints are loaded; ``None`` leaves a checkpoint's own setting. ``device``: auto, cpu or cuda.

    ``rpe_module``: Python file with encodings of the user's own.
    """

    rpe: str | None = None
    positions: str | None = None
    compute_dtype: str | None = None
    attention_backend: str | None = None
    device: str = "auto"
    rpe_module: Path | None = None


@dataclass(frozen=True, kw_only=True)
class TextRequest(Overrides):
    """Perplexities of a checkpoint at several block lengths in tokens: the options of ``fairseq-rpe eval``.

    ``max_tokens`` and ``batch_size`` bound a batch, in tokens and in blocks; ``log`` is named where something fails.
    """

    checkpoint: Path
    data: Path
    lengths: Sequence[int]
    subset: str = "test"
    engine: Literal["fast", "fairseq"] = "fast"
    attention_prune: float | None = None
    max_tokens: int | None = None
    batch_size: int | None = None
    log: Path | None = None

    def keys(self) -> list[TextKey]:
        """A measurement for each length.

        Raises:
            UserError: the checkpoint, the data or a length cannot be used.
        """
        if not self.checkpoint.is_file():
            raise UserError(f"checkpoint {self.checkpoint} does not exist")
        corpus.check_folder(self.data, self.subset)
        tokens = min(corpus.check_block(self.data, self.subset, length) for length in self.lengths)
        if self.max_tokens and self.max_tokens < (longest := max(self.lengths)):
            raise UserError(f"--max-tokens {self.max_tokens} is less than length {longest}: raise it")
        units = corpus.read_units(self.data, self.subset)
        if units is not None and units.tokens != tokens:
            raise UserError(
                f"{self.data}/corpus.json counts {units.tokens} tokens in {self.subset} where the data have {tokens}: "
                "prepare the corpus again"
            )
        of = {"checkpoint": file_digest(self.checkpoint), "data": corpus.digest(self.data)}
        return [filled(TextKey, self, **of, length=length) for length in self.lengths]


@dataclass(frozen=True, kw_only=True)
class AnswerRequest(Overrides):
    """Exact answers of a checkpoint to its algorithmic task: the options of ``fairseq-rpe accuracy``.

    ``lengths`` are numbers of items, by default all there are; ``unit``: of interpolation's ratio; ``batch_size``
    bounds the examples that are answered together.
    """

    checkpoint: Path
    lengths: Sequence[int] | None = None
    split: str = "test"
    unit: Literal["items", "tokens"] = "items"
    batch_size: int = 256
    log: Path | None = None

    def keys(self, algorithm: Algorithm) -> list[AnswerKey]:
        """A measurement for each number of items."""
        of = {"checkpoint": file_digest(self.checkpoint), "algorithm": algorithm.spec}
        return [filled(AnswerKey, self, **of, length=n) for n in self.lengths or algorithm.lengths(self.split)]
