"""Measurements as records: what is asked, what each is of, and what came out, kept so that nothing is done twice."""

import functools
import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any, ClassVar, Literal, TypeVar

from fairseq_rpe.algorithms import Algorithm
from fairseq_rpe.checkpoints import checkpoint_file
from fairseq_rpe.core.errors import UserError
from fairseq_rpe.data import folder as corpus
from fairseq_rpe.evaluation.position_limits import is_random
from fairseq_rpe.utils import files, records
from fairseq_rpe.utils.records import Count, Loss, Natural, Perplexity, Share, Unbounded, filled

# Bounds the activations of a batch and, with fairseq, its logits; a longer block or window is a batch of its own.
BATCH_TOKENS = 2048
Blocks = Literal["stream", "document"]
Context = Literal["across documents", "within documents", "separate documents in one row"]


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
class Result:
    """A measurement of a model with an ``encoding``; ``of``: the record that is its key, equal where it is the same."""

    of: ClassVar[type[Any]]
    encoding: str = ""

    @property
    def key(self) -> Any:
        return filled(self.of, self)

    def record(self) -> dict[str, object]:
        """As a line of JSON keeps it: the fields that say something, and what replaces the checkpoint's settings."""
        return {k: v for k, v in records.write(self).items() if v is not None or k in ("rpe", "positions")}


Found = TypeVar("Found", bound=Result)


@dataclass(frozen=True, kw_only=True)
class TextKey:
    """What a perplexity is of; ``checkpoint`` and ``data`` are digests. Not the engine, which must not matter.

    ``draws``: of random ``positions`` for each block, whose losses are averaged. ``blocks``, ``separate_documents``:
    ``None`` is as in the checkpoint's training.
    """

    checkpoint: str
    data: str = ""
    subset: str
    rpe: str | None = None
    positions: str | None = None
    compute_dtype: str | None = None
    attention_prune: float | None = None
    draws: Count | None = None
    blocks: Blocks | None = None
    separate_documents: bool | None = None
    length: Count


@dataclass(frozen=True, kw_only=True)
class TextRequest(Overrides):
    """Perplexities of a checkpoint at several block lengths in tokens: the options of ``fairseq-rpe eval``.

    ``max_tokens`` and ``batch_size`` bound a batch, in tokens and in blocks; ``log`` is named where something fails.
    ``draws``: of random positions for each block; None: one. ``blocks``, ``separate_documents``: ``None`` is as in the
    checkpoint's training.
    """

    checkpoint: Path
    data: Path
    lengths: Sequence[int]
    subset: str = "test"
    engine: Literal["fast", "fairseq"] = "fast"
    attention_prune: float | None = None
    draws: int | None = None
    blocks: Blocks | None = None
    separate_documents: bool | None = None
    max_tokens: int | None = None
    batch_size: int | None = None
    log: Path | None = None

    def check_documents(self) -> None:
        """Refuse, where no token sees another document, a text that marks none or none long enough.

        Raises:
            UserError: the split has no document boundaries, or no document fills a block of the longest length; or
                blocks of one document are to be separate.
        """
        if self.blocks == "document" and self.separate_documents:
            raise UserError("--separate-documents is for --blocks stream: give that, or drop it")
        if self.separate_documents and self.attention_prune is not None:
            raise UserError("--attention-prune does not go with --separate-documents: drop one of them")
        if self.blocks == "document" or self.separate_documents:
            corpus.check_documents(self.data, self.subset)
        if self.blocks == "document":
            corpus.check_document_block(self.data, self.subset, max(self.lengths))

    def keys(self) -> list[TextKey]:
        """A measurement for each length. Raises UserError if the checkpoint, the data or a length cannot be used."""
        checkpoint_file.check(self.checkpoint)
        corpus.check_text(self.data, self.subset)
        tokens = min(corpus.check_block(self.data, self.subset, length) for length in self.lengths)
        self.check_documents()
        if self.max_tokens and self.max_tokens < (longest := max(self.lengths)):
            raise UserError(f"--max-tokens {self.max_tokens} is less than length {longest}: raise it")
        units = corpus.read_units(self.data, self.subset)
        if units is not None and units.tokens != tokens:
            raise UserError(
                f"{self.data}/corpus.json counts {units.tokens} tokens in {self.subset} where the data have {tokens}: "
                "prepare the corpus again"
            )
        of = {"checkpoint": files.file_digest(self.checkpoint), "data": corpus.digest(self.data)}
        draws = self.draws or draws_of(self.positions)
        return [filled(TextKey, self, **of, draws=draws, length=length) for length in self.lengths]


@dataclass(frozen=True)
class Buckets:
    """Mean loss in bits of the tokens at positions up to ``upto`` (inclusive) and beyond the bucket before."""

    upto: tuple[Natural, ...]
    loss_base2: tuple[float, ...]
    tokens: tuple[Count, ...]

    def fault(self) -> str | None:
        if not len(self.upto) == len(self.loss_base2) == len(self.tokens):
            return "has upto, loss_base2 and tokens of different lengths"
        if not self.upto or any(later <= earlier for earlier, later in pairwise(self.upto)):
            return "has an upto that does not increase"
        return None


@dataclass(frozen=True, kw_only=True)
class TextResult(TextKey, Result):
    """A perplexity per token over every token of a split, in blocks of at most ``length`` tokens.

    ``context``: whether what a token sees may begin in an earlier document.

    ``loss_base2`` in bits per token, ``seconds`` of the measurement, ``peak_mb`` in MiB. ``unigram_ppl``: the least
    that one fixed distribution over the symbols can have on the split, 2 ** entropy of their frequencies.
    ``train_length``: of the model, in tokens. What was not measured, or not yet when the result was written, is
    ``None``.
    """

    of = TextKey
    tokens: Count
    loss_base2: Loss
    ppl: Perplexity
    seconds: float | None = None
    bits_per_byte: float | None = None
    word_ppl: Unbounded | None = None
    engine: str | None = None
    peak_mb: float | None = None
    positions_loss: Buckets | None = None
    unigram_ppl: float | None = None
    train_length: Count | None = None
    context: Context | None = None


@dataclass(frozen=True, kw_only=True)
class AnswerKey:
    """What a share of exact answers is of; ``unit``: of interpolation's ratio, items or tokens.

    ``draws``: of random ``positions`` for each example. ``depth``: where the answer stands, of a task that has it.
    """

    checkpoint: str
    algorithm: str
    split: str
    rpe: str | None = None
    positions: str | None = None
    unit: str = "items"
    draws: Count | None = None
    depth: Share | None = None
    length: Count


@dataclass(frozen=True, kw_only=True)
class AnswerRequest(Overrides):
    """Exact answers of a checkpoint to its algorithmic task: the options of ``fairseq-rpe accuracy``.

    ``lengths`` are numbers of items, by default all there are, and ``depths`` from 0 to 1 of a task that has them;
    ``unit``: of interpolation's ratio; ``batch_size`` bounds the examples that are answered together.
    """

    checkpoint: Path
    lengths: Sequence[int] | None = None
    depths: Sequence[float] | None = None
    split: str = "test"
    unit: Literal["items", "tokens"] = "items"
    batch_size: int = 256
    log: Path | None = None

    def keys(self, algorithm: Algorithm) -> list[AnswerKey]:
        """A measurement for each number of items, and for each depth of a task that has depths.

        Raises UserError: the task has no depths, or no such ones, or no such number of items.
        """
        of: dict[str, Any] = {"checkpoint": files.file_digest(self.checkpoint), "algorithm": algorithm.spec}
        of["draws"] = draws_of(self.positions)
        known: tuple[float | None, ...] = algorithm.depths(self.split)
        if self.depths and not known:
            raise UserError(f"--depths: the {self.split} split of {algorithm.spec} has no depths to choose: drop it")
        depths = self.depths or known or (None,)
        if wrong := next((depth for depth in self.depths or () if not 0 <= depth <= 1), None):
            raise UserError(f"--depths {wrong:g} is not between 0, the first, and 1, the last: leave it out")
        if known and (gone := algorithm.lacks(self.split, self.lengths or ())):
            raise UserError(f"{algorithm.spec} has {gone}")
        lengths = self.lengths or algorithm.lengths(self.split)
        return [filled(AnswerKey, self, **of, length=n, depth=depth) for n in lengths for depth in depths]


@dataclass(frozen=True, kw_only=True)
class AnswerResult(AnswerKey, Result):
    """Exact answers to examples of ``length`` items; ``accuracy`` = right / examples, ``transform``: of positions."""

    of = AnswerKey
    examples: Count
    right: Natural
    accuracy: Share
    transform: str
    seconds: float | None = None


def context_of(blocks: str, separate: bool) -> Context:
    """What a token may see of a text.

    Args:
        blocks: stream or document.
        separate: whether documents in one block of a stream are separate.

    Returns:
        The context in words.
    """
    if separate:
        return "separate documents in one row"
    return "across documents" if blocks == "stream" else "within documents"


def draws_of(positions: str | None) -> int | None:
    """Draws for each block or example where nobody asks for more: one of random positions, none of others."""
    return 1 if is_random(positions) else None


def read(kind: type[Found], path: Path) -> list[Found]:
    """The results in a JSON-lines file, none if there is no such file.

    They are read once for as long as the file stays the same: a report needs those of each run several times.
    """
    try:
        status = os.stat(path)
    except (FileNotFoundError, NotADirectoryError):
        return []
    version = (status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns)
    return list(_read_version(kind, path, version))


@functools.lru_cache(maxsize=256)
def _read_version(kind: type[Found], path: Path, version: tuple[int, ...]) -> list[Found]:
    return records.read_lines(kind, path, "the result")


def resumed(
    kind: type[Found], path: Path | None, wanted: Sequence[Any], begin: Callable[[Any], Callable[[Any], Found]]
) -> Iterator[Found]:
    """The result of every key in ``wanted``, in order: the known one, or one that is measured and kept in ``path``.

    ``begin``: called with the keys that are missing, if any: loads what it takes and gives the measurement of a key.
    """
    if path:
        files.check_kind("--out", path)
    known = {result.key: result for result in (read(kind, path) if path else [])}
    missing = [key for key in wanted if key not in known]
    if path and missing:
        files.check_file("--out", path)
    measure = begin(missing) if missing else known.__getitem__
    for key in wanted:
        failed: Exception | None = None
        if key not in known:
            known[key] = measure(key)
            try:
                if path:
                    files.append_json_line(path, known[key].record())
            except (OSError, UserError) as error:
                failed = error
        # given even where it cannot be kept
        yield known[key]
        if failed is not None:
            raise failed
