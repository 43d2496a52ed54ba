"""Perplexity and time of sliding-window against non-overlapping evaluation, window by window."""

import functools
import math
import re
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from fairseq_rpe.core.errors import UserError
from fairseq_rpe.data import folder as corpus
from fairseq_rpe.evaluation.loading import LabelledCheckpoint, load_model, read_stream
from fairseq_rpe.evaluation.loss_aggregation import MAX_BITS, too_large_error
from fairseq_rpe.evaluation.records import BATCH_TOKENS, Blocks, EvalOverrides, Result, resume_results
from fairseq_rpe.evaluation.sliding_window_loss import (
    DocumentWindows,
    Windows,
    cache_mismatch_reason,
    check_windows,
    score_windows,
)
from fairseq_rpe.figures.timing import WindowMean
from fairseq_rpe.utils import devices
from fairseq_rpe.utils.files import sha256_of_files
from fairseq_rpe.utils.records import Count, Loss, Perplexity, Positive, from_attributes
from fairseq_rpe.utils.table import Table, TableRow, number_cell

# Sliding / non-overlapping, mean over the windows of the paper's Table 1; ALiBi without sliding is 1.00 there.
PUBLISHED_RELATIVE_TIME = 44.35
COLUMNS = ("encoding", "mode", "window", "stride", "tokens", "ppl", "loss_base2", "seconds", "relative")
REFERENCE = "alibi"  # the paper compares sliding windows with this encoding, which needs none
PLAIN, SLIDING, CACHED = "non-overlapping", "sliding", "cached"
# Short measurements are repeated and the median is taken, because all other times are divided by them.
MIN_SECONDS, MAX_REPEATS = 2.0, 5
NOTE = f"""\
In the first table, time is relative to the non-overlapping evaluation of the same model at the same window; in the
second table, to that of the first model over all windows. Published ("Exploring Transformer Extrapolation", Table 1,
mean over windows of 16 to 512): sliding {PUBLISHED_RELATIVE_TIME}, non-overlapping 1.00, ALiBi without sliding 1.00.
The paper does not state its stride, model and hardware: compare the order of magnitude only.
"""


@dataclass(frozen=True, kw_only=True)
class SlidingKey:
    """Key of one perplexity with its time.

    Attributes:
        checkpoint: digest of the checkpoint.
        data: digest of the corpus.
        split: name of the scored split.
        module: digest of the file of ``--rpe-module``, which may define the checkpoint's encoding.
        positions: position transform in place of the checkpoint's.
        tokens: number of scored tokens.
        workers: number of processes that load windows.
        max_tokens: upper limit of the tokens in a batch.
        device: device of the measurement.
        mode: non-overlapping, sliding or cached.
        window: tokens of a window.
        stride: tokens between the starts of two windows.
        blocks: document if windows do not cross documents, else None.
    """

    checkpoint: str
    data: str
    split: str
    module: str | None = None
    positions: str | None = None
    tokens: Count
    workers: int | None = None
    max_tokens: int | None = None
    device: str | None = None
    mode: str
    window: Count
    stride: Count
    blocks: Blocks | None = None


@dataclass(frozen=True, kw_only=True)
class SlidingResult(SlidingKey, Result):
    """Perplexity per token and its time.

    Attributes:
        loss_base2: mean loss in bits per token.
        ppl: 2 ** ``loss_base2``.
        seconds: duration of the measurement.
        relative: duration over that of the non-overlapping evaluation; not stored.
    """

    key_type = SlidingKey
    loss_base2: Loss
    ppl: Perplexity
    seconds: Positive
    relative: float | None = None


@dataclass(frozen=True, kw_only=True)
class SlidingRequest(EvalOverrides):
    """What to compare for each checkpoint: the options of ``fairseq-rpe sliding``.

    Attributes:
        data: binarised data folder.
        windows: tokens of a window.
        stride: tokens between the starts of two sliding windows.
        split: name of the split to score.
        first_tokens: score only so many tokens of the split; None: all.
        cached: whether to measure sliding with the KV cache, too.
        workers: number of processes that load windows.
        max_tokens: upper limit of the tokens in a batch.
        blocks: stream if windows run across documents, document if each is within one; None: as in training.
    """

    data: Path
    windows: Sequence[int]
    stride: int = 1
    split: str = "test"
    first_tokens: int | None = None
    cached: bool = False
    workers: int = 0
    max_tokens: int | None = None
    blocks: Blocks | None = None

    def tokens_to_score(self) -> int:
        """Return the number of tokens to score.

        Raises:
            UserError: the data cannot be used, or a window does not fit the text, the stride or the batch.
        """
        corpus.check_text_folder(self.data, self.split)
        total = corpus.count_tokens(self.data, self.split)
        if self.first_tokens and self.first_tokens > total:
            raise UserError(f"--first-tokens {self.first_tokens}: {self.data}/{self.split} has {total}, leave it out")
        total = self.first_tokens or total
        for window in self.windows:
            check_windows(total, window, self.stride)
            if self.max_tokens and self.max_tokens < window:
                raise UserError(f"--max-tokens {self.max_tokens} is less than window {window}: raise it")
        if self.blocks == "document":
            if self.cached:
                raise UserError("--cached needs one stream of text: drop it, or use --blocks stream")
            corpus.check_documents(self.data, self.split)
            check_windows(int(np.diff(self.ends(total), prepend=0).max()), max(self.windows), self.stride)
        return total

    def ends(self, total: int) -> np.ndarray:
        """Return where the documents of the first ``total`` tokens end, (documents,); the last may be truncated."""
        ends = corpus.document_ends(self.data, self.split)
        return np.append(ends[ends < total], total)

    def keys(self, checkpoint: Path) -> list[SlidingKey]:
        """Return one key for each window and mode."""
        shared: dict[str, Any] = {
            "checkpoint": sha256_of_files(checkpoint),
            "data": corpus.corpus_digest(self.data),
            "positions": self.positions_eval,
            "tokens": self.tokens_to_score(),
            "max_tokens": self.max_tokens or BATCH_TOKENS,
            "device": devices.resolve_device(self.device),
            "blocks": self.blocks if self.blocks == "document" else None,
        }
        keys = []
        for window in self.windows:
            strides = {PLAIN: window, SLIDING: self.stride}  # non-overlapping first, as compare_windows expects
            if self.cached:
                strides[CACHED] = self.stride
            keys += [
                from_attributes(SlidingKey, self, **shared, mode=mode, window=window, stride=stride)
                for mode, stride in strides.items()
            ]
        return keys


def compare_windows(
    request: SlidingRequest, subjects: Sequence[LabelledCheckpoint], results: Path
) -> list[SlidingResult]:
    """Measure all checkpoints, windows and modes that the file ``results`` does not have yet.

    Args:
        request: what to measure.
        subjects: the checkpoints.
        results: JSON-lines file of the results.

    Returns:
        All results, with the labels of the checkpoints and relative times.

    Raises:
        UserError: positions are random, the cache is not exact, or a token was not scored exactly once.
    """
    rows = []
    for subject in subjects:
        make_evaluator = functools.partial(_make_evaluator, request, subject)
        plain_seconds: dict[int, float] = {}
        for result in resume_results(SlidingResult, results, request.keys(subject.path), make_evaluator):
            # the first mode of a window is non-overlapping; setdefault keeps its time for the other modes
            plain_seconds.setdefault(result.window, result.seconds)
            relative = result.seconds / plain_seconds[result.window]
            rows.append(replace(result, encoding=subject.label, relative=relative))
    return rows


def _make_evaluator(
    request: SlidingRequest, subject: LabelledCheckpoint, missing: Sequence[SlidingKey]
) -> Callable[[SlidingKey], SlidingResult]:
    """Load a checkpoint and its text, and return the function that measures one window and mode."""
    model, task = load_model(subject.path, request, request.data)
    if model.decoder.position_transforms.evaluation.random:
        raise UserError(
            f"{subject.label}: random positions are sampled for every window, so windows cannot be compared: use "
            "another --positions-eval"
        )
    for key in missing:
        if key.mode == CACHED and (reason := cache_mismatch_reason(model, key.window, key.stride)):
            raise UserError(f"--cached: {subject.label}: {reason}")
    tokens = missing[0].tokens  # the same for all keys
    stream = read_stream(request.data, request.split, task.source_dictionary, tokens)
    ends = request.ends(tokens) if request.blocks == "document" else None

    def evaluate(key: SlidingKey) -> SlidingResult:
        batch_size = (key.max_tokens or BATCH_TOKENS) // key.window  # windows of a batch
        if ends is None:
            windows = Windows(stream, key.window, key.stride, batch_size)
        else:
            windows = DocumentWindows(stream, ends, key.window, key.stride, batch_size)
        title = f"{subject.label}, {key.mode}, window {key.window}"
        seconds: list[float] = []  # of each repetition
        while sum(seconds) < MIN_SECONDS and len(seconds) < MAX_REPEATS:
            total_nats, duration = score_windows(
                model, windows, cached=key.mode == CACHED, workers=key.workers or 0, title=title
            )
            seconds.append(duration)
        nats = total_nats / key.tokens
        loss = nats / math.log(2)
        if loss >= MAX_BITS:
            raise too_large_error(loss)
        return SlidingResult(
            **vars(key), encoding=subject.label, loss_base2=loss, ppl=math.exp(nats), seconds=statistics.median(seconds)
        )

    return evaluate


def window_table(rows: Sequence[SlidingResult]) -> Table:
    """Return a table of window × mode: perplexity per token, and time over that of the non-overlapping evaluation."""
    by_window: dict[tuple[str, int], list[SlidingResult]] = {}
    for row in rows:
        by_window.setdefault((row.encoding, row.window), []).append(row)
    modes = list(dict.fromkeys(row.mode for row in rows))
    header = ["encoding", "window", *(f"{m} ppl" for m in modes), "seconds", *(f"{m} time" for m in modes[1:])]
    lines = []
    for (label, window), results in by_window.items():
        plain, *others = results  # non-overlapping first
        values = [*(result.ppl for result in results), plain.seconds, *(result.relative for result in others)]
        cells = [number_cell(value, ".2f") for value in values]
        lines.append(TableRow(label, [number_cell(window, "d"), *cells]))
    return Table("Perplexity and time by window", header, lines)


def total_time_table(rows: Sequence[SlidingResult]) -> Table:
    """Return a table of the time over all windows, as in the paper's Table 1, relative to the first model and mode."""
    total: dict[str, float] = {}
    for row in rows:
        name = f"{row.encoding}, {row.mode}"
        total[name] = total.get(name, 0.0) + row.seconds
    first = next(iter(total.values()))
    lines = [TableRow(name, [number_cell(seconds / first, ".2f")]) for name, seconds in total.items()]
    return Table("Time over all windows", ["all windows together", "time"], lines)


def reference_means(rows: Sequence[SlidingResult], subjects: Sequence[LabelledCheckpoint]) -> list[WindowMean]:
    """Return ALiBi's mean perplexity without overlap, the reference line of the paper's Figure 1.

    Args:
        rows: the results of :func:`compare_windows`.
        subjects: the compared checkpoints.

    Returns:
        One mean for each checkpoint with ``alibi``, over its windows from the training length on, or over all its
        windows if none is as long.
    """
    means = []
    for subject in subjects:
        if re.split(r"[:\s]", subject.label, maxsplit=1)[0] != REFERENCE:
            continue
        ppl = {row.window: row.ppl for row in rows if (row.encoding, row.mode) == (subject.label, PLAIN)}
        beyond = {window: value for window, value in ppl.items() if window >= subject.train_length} or ppl
        means.append(WindowMean(subject.label, statistics.fmean(beyond.values()), min(beyond), max(beyond)))
    return means


def markdown(rows: Sequence[SlidingResult]) -> str:
    """Return both tables and a note on their units."""
    return "\n".join([window_table(rows).to_markdown(), total_time_table(rows).to_markdown(), NOTE])
