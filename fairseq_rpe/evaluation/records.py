"""Resumable measurement records: requests, keys and results of perplexity and exact match."""

import functools
import os
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path
from typing import Any, ClassVar, Literal, TypeVar

import numpy as np

from fairseq_rpe.algorithms import Algorithm
from fairseq_rpe.checkpoints import checkpoint_file
from fairseq_rpe.core.errors import UserError
from fairseq_rpe.data import folder as corpus
from fairseq_rpe.evaluation.example_scores import unpack_hits
from fairseq_rpe.evaluation.position_limits import is_random
from fairseq_rpe.evaluation.segment_losses import SegmentLosses
from fairseq_rpe.utils import files, json_files, output_checks, records
from fairseq_rpe.utils.records import Count, Loss, Natural, Perplexity, Share, Unbounded, from_attributes

# Tokens of a batch: bounds its activations and, with fairseq, its logits. A longer block or window is its own batch.
BATCH_TOKENS = 2048
Blocks = Literal["stream", "document"]
Context = Literal["across documents", "within documents", "separate documents in one row"]


@dataclass(frozen=True, kw_only=True)
class EvalOverrides:
    """Settings that an evaluation replaces in a checkpoint; ``None`` keeps the checkpoint's own.

    Attributes:
        rpe: encoding.
        positions_eval: position transform in evaluation.
        compute_dtype: dtype of the computation.
        attention_backend: attention back end.
        device: auto, cpu or cuda.
        rpe_module: Python file that registers further encodings.
    """

    rpe: str | None = None
    positions_eval: str | None = None
    compute_dtype: str | None = None
    attention_backend: str | None = None
    device: str = "auto"
    rpe_module: Path | None = None

    @property
    def module(self) -> str | None:
        """SHA-256 digest of the file ``rpe_module``, or None without one."""
        return files.sha256_of_files(self.rpe_module) if self.rpe_module else None


@dataclass(frozen=True, kw_only=True)
class Result:
    """One measurement of a model.

    Attributes:
        key_type: the record that identifies the measurement; two results with equal keys measure the same thing.
        encoding: the encoding that the model was trained with.
    """

    key_type: ClassVar[type[Any]]
    encoding: str = ""

    @classmethod
    def is_stored_in(cls, row: Mapping[str, object]) -> bool:
        """Whether a row of a file with several types of results may be one of this type."""
        return True

    @property
    def key(self) -> Any:
        """The ``key_type`` record with this result's values."""
        return from_attributes(self.key_type, self)

    def to_json(self) -> dict[str, object]:
        """Return the fields that are not None, and always the replaced encoding and positions."""
        return {k: v for k, v in records.to_dict(self).items() if v is not None or k in ("rpe", "positions")}


ResultType = TypeVar("ResultType", bound=Result)


@dataclass(frozen=True, kw_only=True)
class TextKey:
    """Key of one perplexity. The engine is not part of it: all engines give the same loss.

    Attributes:
        checkpoint: digest of the checkpoint.
        data: digest of the corpus.
        split: name of the scored split.
        rpe: encoding in place of the checkpoint's.
        module: digest of the file of ``--rpe-module``, which may define the encoding.
        positions: position transform in place of the checkpoint's.
        compute_dtype: dtype in place of the checkpoint's.
        attention_prune: threshold below which attention is skipped.
        draws: samples of random positions for each block, over which losses are averaged.
        blocks: how the text is split into blocks; None: as in the checkpoint's training.
        separate_documents: whether documents in one block are separate; None: as in the checkpoint's training.
        length: tokens of a block.
    """

    checkpoint: str
    data: str = ""
    split: str
    rpe: str | None = None
    module: str | None = None
    positions: str | None = None
    compute_dtype: str | None = None
    attention_prune: float | None = None
    draws: Count | None = None
    blocks: Blocks | None = None
    separate_documents: bool | None = None
    length: Count


@dataclass(frozen=True, kw_only=True)
class TextRequest(EvalOverrides):
    """Perplexities of a checkpoint at several block lengths: the options of ``fairseq-rpe eval``.

    Attributes:
        checkpoint: checkpoint file.
        data: binarised data folder.
        lengths: block lengths in tokens.
        split: name of the split to score.
        engine: fast, or fairseq for fairseq-eval-lm's own code.
        attention_prune: threshold below which attention is skipped.
        position_samples: samples of random positions for each block; None: one.
        blocks: stream or document; None: as in the checkpoint's training.
        separate_documents: whether documents in one block are separate; None: as in the checkpoint's training.
        max_tokens: upper limit of the tokens in a batch.
        batch_size: upper limit of the blocks in a batch.
        log: log file, named in error messages.
    """

    checkpoint: Path
    data: Path
    lengths: Sequence[int]
    split: str = "test"
    engine: Literal["fast", "fairseq"] = "fast"
    attention_prune: float | None = None
    position_samples: int | None = None
    blocks: Blocks | None = None
    separate_documents: bool | None = None
    max_tokens: int | None = None
    batch_size: int | None = None
    log: Path | None = None

    def check_documents(self) -> None:
        """Check the document boundaries of the text if no token may see another document.

        Raises:
            UserError: the split has no document boundaries, no document fills a block of the longest length, or
                blocks of one document are to be separate.
        """
        if self.blocks == "document" and self.separate_documents:
            raise UserError("--separate-documents needs --blocks stream: use that, or drop --separate-documents")
        if self.separate_documents and self.attention_prune is not None:
            raise UserError("--attention-prune does not go with --separate-documents: drop one of them")
        if self.blocks == "document" or self.separate_documents:
            corpus.check_documents(self.data, self.split)
        if self.blocks == "document":
            corpus.check_document_block(self.data, self.split, max(self.lengths))

    def keys(self) -> list[TextKey]:
        """Return one key for each length.

        Raises:
            UserError: the checkpoint, the data or a length cannot be used.
        """
        checkpoint_file.check_file(self.checkpoint)
        corpus.check_text_folder(self.data, self.split)
        tokens = min(corpus.check_block_length(self.data, self.split, length) for length in self.lengths)
        self.check_documents()
        if self.max_tokens and self.max_tokens < (longest := max(self.lengths)):
            raise UserError(f"--max-tokens {self.max_tokens} is less than length {longest}: raise it")
        units = corpus.read_units(self.data, self.split)
        if units is not None and units.tokens != tokens:
            raise UserError(
                f"{self.data}/corpus.json counts {units.tokens} tokens in {self.split} where the data have {tokens}: "
                "prepare the corpus again"
            )
        digests = {"checkpoint": files.sha256_of_files(self.checkpoint), "data": corpus.corpus_digest(self.data)}
        draws = self.position_samples or default_draws(self.positions_eval)
        return [
            from_attributes(TextKey, self, **digests, positions=self.positions_eval, draws=draws, length=length)
            for length in self.lengths
        ]


@dataclass(frozen=True)
class Buckets:
    """Mean loss by position, in buckets of consecutive positions.

    Attributes:
        upto: the last position of each bucket, inclusive; a bucket begins after the one before it.
        loss_base2: mean loss of each bucket in bits per token.
        tokens: number of scored tokens in each bucket.
    """

    upto: tuple[Natural, ...]
    loss_base2: tuple[float, ...]
    tokens: tuple[Count, ...]

    def fault(self) -> str | None:
        """Return the contradiction in these values as the end of a sentence, or None if there is none.

        :mod:`fairseq_rpe.utils.records` calls it when it reads a record.
        """
        if not len(self.upto) == len(self.loss_base2) == len(self.tokens):
            return "has upto, loss_base2 and tokens of different lengths"
        if not self.upto or any(later <= earlier for earlier, later in pairwise(self.upto)):
            return "has an upto that does not increase"
        return None


@dataclass(frozen=True, kw_only=True)
class TextResult(TextKey, Result):
    """Perplexity per token over all tokens of a split, in blocks of at most ``length`` tokens.

    Optional fields are None where a value was not measured, or not yet recorded when the result was written.

    Attributes:
        tokens: number of scored tokens.
        loss_base2: mean loss in bits per token.
        ppl: 2 ** ``loss_base2``.
        seconds: duration of the measurement.
        bits_per_byte: loss in bits per byte of text.
        word_ppl: perplexity per word.
        engine: the engine that measured it.
        peak_mb: peak memory in MiB.
        positions_loss: loss by position in the block.
        unigram_ppl: 2 ** entropy of the symbol frequencies, the lowest perplexity of one fixed distribution.
        train_length: training length of the model in tokens.
        context: whether the context of a token may begin in an earlier document.
        updates: number of updates of the model's training, up to this checkpoint.
        tokens_trained: number of tokens of these updates.
        segments: losses by segment of the text, to compare two models on the same text.
    """

    key_type = TextKey
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
    updates: Count | None = None
    tokens_trained: Count | None = None
    segments: SegmentLosses | None = None

    @classmethod
    def is_stored_in(cls, row: Mapping[str, object]) -> bool:
        """Whether a row is a perplexity over all tokens, and not a result on key tokens, which has more fields."""
        return "key_tokens" not in row


@dataclass(frozen=True, kw_only=True)
class ExactMatchKey:
    """Key of one exact-match accuracy.

    Attributes:
        checkpoint: digest of the checkpoint.
        algorithm: spec of the task.
        split: name of the scored split.
        rpe: encoding in place of the checkpoint's.
        module: digest of the file of ``--rpe-module``, which may define the encoding.
        positions: position transform in place of the checkpoint's.
        unit: unit of the interpolation ratio, items or tokens.
        draws: samples of random positions for each example.
        depth: relative position of the needle, for tasks with depths.
        length: number of items.
    """

    checkpoint: str
    algorithm: str
    split: str
    rpe: str | None = None
    module: str | None = None
    positions: str | None = None
    unit: str = "items"
    draws: Count | None = None
    depth: Share | None = None
    length: Count


@dataclass(frozen=True, kw_only=True)
class ExactMatchRequest(EvalOverrides):
    """Accuracies of a checkpoint on its algorithmic task: the options of ``fairseq-rpe eval-task``.

    Attributes:
        checkpoint: checkpoint file.
        lengths: numbers of items; None: all of the split.
        depths: depths from 0 to 1, for a task that has them; None: all of the task.
        split: name of the split to score.
        ratio_unit: unit of the interpolation ratio.
        batch_size: upper limit of the examples in a batch.
        predictions: JSON-lines file for the predicted answers; None: they are not stored.
        log: log file, named in error messages.
    """

    checkpoint: Path
    lengths: Sequence[int] | None = None
    depths: Sequence[float] | None = None
    split: str = "test"
    ratio_unit: Literal["items", "tokens"] = "items"
    batch_size: int = 256
    predictions: Path | None = None
    log: Path | None = None

    def keys(self, algorithm: Algorithm) -> list[ExactMatchKey]:
        """Return one key for each number of items, and each depth of a task that has depths.

        Raises:
            UserError: the task has no depths, or not these depths or numbers of items.
        """
        task_depths: tuple[float | None, ...] = algorithm.depths(self.split)
        if self.depths and not task_depths:
            raise UserError(f"--depths: the {self.split} split of {algorithm.spec} has no depths to choose: drop it")
        depths = self.depths or task_depths or (None,)
        if wrong := next((depth for depth in self.depths or () if not 0 <= depth <= 1), None):
            raise UserError(f"--depths {wrong:g} is not between 0 (first) and 1 (last): leave it out")
        if task_depths and (missing := algorithm.missing_lengths(self.split, self.lengths or ())):
            raise UserError(f"{algorithm.spec} has {missing}")
        shared: dict[str, Any] = {
            "checkpoint": files.sha256_of_files(self.checkpoint),
            "algorithm": algorithm.spec,
            "positions": self.positions_eval,
            "unit": self.ratio_unit,
            "draws": default_draws(self.positions_eval),
        }
        return [
            from_attributes(ExactMatchKey, self, **shared, length=length, depth=depth)
            for length in self.lengths or algorithm.lengths(self.split)
            for depth in depths
        ]


@dataclass(frozen=True, kw_only=True)
class GapAccuracy:
    """Accuracy on the labels whose gap lies between a power of two and the next power of two.

    Attributes:
        gap: the smallest gap g in tokens, a power of two; the gaps are g to 2·g − 1.
        examples: number of labels with such a gap.
        right: number of them that are predicted correctly.
    """

    gap: Count
    examples: Count
    right: Natural


@dataclass(frozen=True, kw_only=True)
class ExactMatchResult(ExactMatchKey, Result):
    """Exact-match accuracy on examples of ``length`` items.

    Attributes:
        examples: number of examples; for tasks with labels inside their prompts, the number of labels.
        right: number of examples whose whole answer is right, or of labels that are predicted correctly.
        accuracy: right / examples.
        transform: spec of the position transform that was used.
        seconds: duration of the measurement.
        by_gap: counts by gap, for tasks with labels inside their prompts; None for other tasks.
        hits: one bit for each of the ``examples``, whether it is right, as packed by
            :func:`~fairseq_rpe.evaluation.example_scores.pack_hits`. The examples have the order in which the task
            generates them; the labels of an example follow one another. :meth:`is_right` unpacks it.
    """

    key_type = ExactMatchKey
    examples: Count
    right: Natural
    accuracy: Share
    transform: str
    seconds: float | None = None
    by_gap: tuple[GapAccuracy, ...] | None = None
    hits: str | None = None

    def is_right(self) -> np.ndarray | None:
        """Return (examples,) bool: whether each example or label is right; None for results of earlier versions."""
        return None if self.hits is None else unpack_hits(self.hits, self.examples)

    def fault(self) -> str | None:
        """Return the contradiction in these values as the end of a sentence, or None if there is none.

        :mod:`fairseq_rpe.utils.records` calls it when it reads a record.
        """
        try:
            is_right = self.is_right()
        except ValueError:
            return f"has hits that are not {self.examples} bits"
        if is_right is not None and int(is_right.sum()) != self.right:
            return f"has hits that do not count {self.right} right examples"
        return None


def document_context(blocks: str, separate: bool) -> Context:
    """Return in words which documents a token may see.

    Args:
        blocks: stream or document.
        separate: whether documents in one block of a stream are separate.
    """
    if separate:
        return "separate documents in one row"
    return "across documents" if blocks == "stream" else "within documents"


def default_draws(positions: str | None) -> int | None:
    """Return the default number of position samples: 1 if ``positions`` is a random transform, else None."""
    return 1 if is_random(positions) else None


def read_results(kind: type[ResultType], path: Path) -> list[ResultType]:
    """Read the results in a JSON-lines file; return an empty list if the file does not exist.

    Parsed results are cached until the file changes, because a report needs those of each run several times.

    Args:
        kind: type of the results.
        path: the file.

    Raises:
        UserError: the file has a line that is not such a result.
    """
    try:
        status = os.stat(path)
    except (FileNotFoundError, NotADirectoryError):
        return []
    version = (status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns)
    return list(_read_version(kind, path, version))


def last_of_each(results: Iterable[ResultType]) -> list[ResultType]:
    """Return the last result of each measurement.

    Results of earlier versions have no digest of ``--rpe-module``, and one draw of random positions for all blocks, so
    results that differ only in these two fields count as one measurement.
    """
    return list({replace(result.key, draws=None, module=None): result for result in results}.values())


@functools.lru_cache(maxsize=256)
def _read_version(kind: type[ResultType], path: Path, version: tuple[int, ...]) -> list[ResultType]:
    """Read a file of results; ``version`` identifies its contents, and is only the key of the cache."""
    return records.read_records(kind, path, "the result", kind.is_stored_in)


def resume_results(
    kind: type[ResultType],
    path: Path | None,
    keys: Sequence[Any],
    make_evaluator: Callable[[Any], Callable[[Any], ResultType]],
    repeated: Collection[Any] = (),
) -> Iterator[ResultType]:
    """Yield the result of every key, in order, and measure only those that ``path`` does not have yet.

    Args:
        kind: type of the results.
        path: JSON-lines file with earlier results, to which new ones are appended; None: nothing is stored.
        keys: keys of the requested results.
        make_evaluator: called once with the missing keys, if there are any; loads the model and returns the function
            that measures one key.
        repeated: keys that are measured even if ``path`` has their results, because another output lacks them. The new
            result is appended, and the last result of a key counts.

    Yields:
        A result, as soon as it is stored.

    Raises:
        UserError: ``path`` cannot be written.
    """
    if path:
        output_checks.check_plain_file("--out", path)
    stored = read_results(kind, path) if path else []
    results = {result.key: result for result in stored if result.key not in repeated}
    missing = [key for key in keys if key not in results]
    if path and missing:
        output_checks.check_output_file("--out", path)
    evaluate = make_evaluator(missing) if missing else None
    for key in keys:
        if key in results:
            yield results[key]
            continue
        assert evaluate is not None  # the key is missing
        results[key] = evaluate(key)
        failure: Exception | None = None
        try:
            if path:
                json_files.append_json_line(path, results[key].to_json())
        except (OSError, UserError) as error:
            failure = error
        # yielded first: the caller can still show a result that could not be stored
        yield results[key]
        if failure is not None:
            raise failure
