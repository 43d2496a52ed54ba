"""What an evaluation is asked for, and which measurements that comes to; known without loading a model."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from fairseq_rpe.algorithms import Algorithm
from fairseq_rpe.core.errors import UserError
from fairseq_rpe.core.files import file_digest
from fairseq_rpe.data import folder as corpus
from fairseq_rpe.data.units import read_units
from fairseq_rpe.evaluation.results import AnswerKey, TextKey

FAST, FAIRSEQ = "fast", "fairseq"


@dataclass(frozen=True)
class Overrides:
    """How a checkpoint is loaded; ``None`` leaves its own setting. ``device``: auto, cpu or cuda.

    ``rpe_module``: Python file with encodings of the user's own.
    """

    rpe: str | None = None
    positions: str | None = None
    compute_dtype: str | None = None
    attention_backend: str | None = None
    device: str = "auto"
    rpe_module: Path | None = None


@dataclass(frozen=True, kw_only=True)
class TextRequest:
    """Perplexities of a checkpoint at several block lengths in tokens: the options of ``fairseq-rpe eval``.

    ``max_tokens`` and ``batch_size`` bound a batch, in tokens and in blocks; ``log`` is named where something fails.
    """

    checkpoint: Path
    data: Path
    lengths: Sequence[int]
    subset: str = "test"
    use: Overrides = field(default_factory=Overrides)
    engine: str = FAST
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
        short = [n for n in self.lengths if self.max_tokens and self.max_tokens < n]
        if short:
            raise UserError(f"--max-tokens {self.max_tokens} is less than length {short[0]}: raise it")
        units = read_units(self.data, self.subset)
        if units is not None and units.tokens != tokens:
            raise UserError(
                f"{self.data}/corpus.json counts {units.tokens} tokens in {self.subset} where the data have {tokens}: "
                "prepare the corpus again"
            )
        checkpoint, data = file_digest(self.checkpoint), corpus.digest(self.data)
        moved = (self.use.rpe, self.use.positions, self.use.compute_dtype, self.attention_prune)
        return [TextKey(checkpoint, data, self.subset, length, *moved) for length in self.lengths]


@dataclass(frozen=True, kw_only=True)
class AnswerRequest:
    """Exact answers of a checkpoint to its algorithmic task: the options of ``fairseq-rpe accuracy``.

    ``lengths`` are numbers of items, none for all there are; ``unit``: of interpolation's ratio; ``batch_size``
    bounds the examples that are answered together.
    """

    checkpoint: Path
    lengths: Sequence[int] = ()
    split: str = "test"
    use: Overrides = field(default_factory=Overrides)
    unit: Literal["items", "tokens"] = "items"
    batch_size: int = 256
    log: Path | None = None

    def keys(self, algorithm: Algorithm) -> list[AnswerKey]:
        """A measurement for each number of items."""
        same = (file_digest(self.checkpoint), algorithm.spec, self.split)
        moved = (self.use.rpe, self.use.positions, self.unit)
        return [AnswerKey(*same, length, *moved) for length in self.lengths or algorithm.lengths(self.split)]
