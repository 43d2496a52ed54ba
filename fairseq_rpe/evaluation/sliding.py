"""Perplexity and time of sliding-window against non-overlapping evaluation, window by window."""

import functools
import math
import re
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from fairseq_rpe.core.errors import UserError
from fairseq_rpe.data import folder as corpus
from fairseq_rpe.evaluation.loading import Subject, load, read_stream
from fairseq_rpe.evaluation.loss_aggregation import MOST_BITS, too_large
from fairseq_rpe.evaluation.records import BATCH_TOKENS, Blocks, Overrides, Result, resumed
from fairseq_rpe.evaluation.sliding_window_loss import DocumentWindows, Windows, check_windows, score, why_not_cached
from fairseq_rpe.figures.timing import WindowMean
from fairseq_rpe.utils import devices
from fairseq_rpe.utils.files import file_digest
from fairseq_rpe.utils.records import Count, Loss, Perplexity, Positive, filled
from fairseq_rpe.utils.table import Row, Table, number

PUBLISHED = 44.35  # sliding / non-overlapping, mean over the windows of Table 1; ALiBi without sliding is 1.00 there
COLUMNS = ("encoding", "mode", "window", "stride", "tokens", "ppl", "loss_base2", "seconds", "relative")
REFERENCE = "alibi"  # what the paper compares sliding windows with: an encoding that needs none
PLAIN, SLIDING, CACHED = "non-overlapping", "sliding", "cached"
# Short measurements are repeated and their median counts: they are what all others are divided by.
LONG_ENOUGH, REPEATS = 2.0, 5
NOTE = f"""\
Time is relative to the non-overlapping evaluation of the same model at the same window, in the second table to that of
the first model over all windows. Published ("Exploring Transformer Extrapolation", Table 1, mean over windows of 16 to
512): sliding {PUBLISHED}, non-overlapping 1.00, ALiBi without sliding 1.00. Its stride, model and hardware are not
stated: compare the order of magnitude only.
"""


@dataclass(frozen=True, kw_only=True)
class SlidingKey:
    """What a perplexity with its time is of; windows and strides in tokens, ``mode`` is how the text is covered.

    ``blocks``: ``document`` where windows lie within documents, else ``None``.
    """

    checkpoint: str
    data: str
    subset: str
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
    """Perplexity per token over ``tokens`` targets, and its time in ``seconds``.

    ``relative``: that as a multiple of the non-overlapping evaluation's, known beside it only.
    """

    of = SlidingKey
    loss_base2: Loss
    ppl: Perplexity
    seconds: Positive
    relative: float | None = None


@dataclass(frozen=True, kw_only=True)
class SlidingRequest(Overrides):
    """What is compared for each checkpoint: the options of ``fairseq-rpe sliding``.

    ``windows`` and ``stride`` in tokens; ``first_tokens``: score these only; ``cached``: also slide with cached keys
    and values; ``workers`` processes cut the windows; ``max_tokens`` bounds a batch. ``blocks``: windows run across
    documents, a stream, or lie within one; ``None``: as in the checkpoints' training.
    """

    data: Path
    windows: Sequence[int]
    stride: int = 1
    subset: str = "test"
    first_tokens: int | None = None
    cached: bool = False
    workers: int = 0
    max_tokens: int | None = None
    blocks: Blocks | None = None

    def check(self) -> int:
        """The tokens to score.

        Raises UserError if the data cannot be used, or a window does not go with the text, the stride or the batch.
        """
        corpus.check_text(self.data, self.subset)
        total = corpus.count_tokens(self.data, self.subset)
        if self.first_tokens and self.first_tokens > total:
            raise UserError(f"--first-tokens {self.first_tokens}: {self.data}/{self.subset} has {total}, leave it out")
        total = self.first_tokens or total
        for window in self.windows:
            check_windows(total, window, self.stride)
            if self.max_tokens and self.max_tokens < window:
                raise UserError(f"--max-tokens {self.max_tokens} is less than window {window}: raise it")
        if self.blocks == "document":
            if self.cached:
                raise UserError("--cached slides over one stream of text: drop it, or give --blocks stream")
            corpus.check_documents(self.data, self.subset)
            check_windows(int(np.diff(self.ends(total), prepend=0).max()), max(self.windows), self.stride)
        return total

    def ends(self, total: int) -> np.ndarray:
        """Where the documents of the first ``total`` tokens end, (documents,); the last of them may be cut."""
        ends = corpus.document_ends(self.data, self.subset)
        return np.append(ends[ends < total], total)

    def keys(self, checkpoint: Path) -> list[SlidingKey]:
        """A measurement for each window and mode."""
        same = {"checkpoint": file_digest(checkpoint), "data": corpus.digest(self.data), "tokens": self.check()}
        same |= {"max_tokens": self.max_tokens or BATCH_TOKENS, "device": devices.chosen(self.device)}
        same |= {"blocks": self.blocks if self.blocks == "document" else None}
        return [
            filled(SlidingKey, self, **same, mode=mode, window=window, stride=window if mode == PLAIN else self.stride)
            for window in self.windows
            for mode in (PLAIN, SLIDING, CACHED)[: 2 + self.cached]
        ]


def with_blocks(request: SlidingRequest, subjects: Sequence[Subject]) -> SlidingRequest:
    """The request with the blocks of the checkpoints' training, where it says nothing of blocks.

    Args:
        request: what is compared.
        subjects: the checkpoints.

    Returns:
        A request for a stream or for documents.

    Raises:
        UserError: the checkpoints were not all trained on one kind of blocks.
    """
    kinds = {subject.blocks for subject in subjects}
    if request.blocks is None and len(kinds) > 1:
        raise UserError("some of these models were trained on a stream, others on documents: give --blocks")
    return request if request.blocks else replace(request, blocks=kinds.pop())


def compare(request: SlidingRequest, subjects: Sequence[Subject], results: Path) -> list[SlidingResult]:
    """Measure what is not in the file ``results`` yet, and put everything side by side, under the subjects' labels.

    Raises UserError if positions are random, the cache is not exact, or a token was not scored exactly once.
    """
    rows = []
    for subject in subjects:
        begin = functools.partial(_measuring, request, subject)
        plain: dict[int, float] = {}
        for one in resumed(SlidingResult, results, request.keys(subject.path), begin):
            plain.setdefault(one.window, one.seconds)  # of the modes at a window the non-overlapping one comes first
            rows.append(replace(one, encoding=subject.label, relative=one.seconds / plain[one.window]))
    return rows


def _measuring(
    request: SlidingRequest, subject: Subject, missing: Sequence[SlidingKey]
) -> Callable[[SlidingKey], SlidingResult]:
    model, task = load(subject.path, request, request.data)
    if model.decoder.moves.evaluation.random:
        raise UserError(
            f"{subject.label}: random positions are drawn anew for every window, so windows cannot be compared: name "
            "another --positions"
        )
    for key in missing:
        if key.mode == CACHED and (reason := why_not_cached(model, key.window, key.stride)):
            raise UserError(f"--cached: {subject.label}: {reason}")
    stream = read_stream(request.data, request.subset, task.source_dictionary, missing[0].tokens)
    ends = request.ends(missing[0].tokens) if request.blocks == "document" else None

    def measure(key: SlidingKey) -> SlidingResult:
        rows = (key.max_tokens or BATCH_TOKENS) // key.window
        if ends is None:
            windows = Windows(stream, key.window, key.stride, rows)
        else:
            windows = DocumentWindows(stream, ends, key.window, key.stride, rows)
        title = f"{subject.label}, {key.mode}, window {key.window}"
        seconds: list[float] = []
        while sum(seconds) < LONG_ENOUGH and len(seconds) < REPEATS:
            nats, taken = score(model, windows, cached=key.mode == CACHED, workers=key.workers or 0, title=title)
            seconds.append(taken)
        nats /= key.tokens
        loss = nats / math.log(2)
        if loss >= MOST_BITS:
            raise too_large(loss)
        found = {"loss_base2": loss, "ppl": math.exp(nats), "seconds": statistics.median(seconds)}
        return SlidingResult(**vars(key), encoding=subject.label, **found)

    return measure


def by_window(rows: Sequence[SlidingResult]) -> Table:
    """Window × mode: perplexity per token, and time as a multiple of the non-overlapping evaluation's."""
    found: dict[tuple[str, int], list[SlidingResult]] = {}
    for row in rows:
        found.setdefault((row.encoding, row.window), []).append(row)
    modes = list(dict.fromkeys(row.mode for row in rows))
    head = ["encoding", "window", *(f"{m} ppl" for m in modes), "seconds", *(f"{m} time" for m in modes[1:])]
    lines = []
    for (label, window), own in found.items():
        times = [own[0].seconds, *(one.relative for one in own[1:])]
        cells = [number(value, ".2f") for value in (*(one.ppl for one in own), *times)]
        lines.append(Row(label, [number(window, "d"), *cells]))
    return Table("Perplexity and time by window", head, lines)


def together(rows: Sequence[SlidingResult]) -> Table:
    """Time over all windows together, as Table 1 sums it up; everything relative to the first model's."""
    total: dict[str, float] = {}
    for row in rows:
        name = f"{row.encoding}, {row.mode}"
        total[name] = total.get(name, 0.0) + row.seconds
    first = next(iter(total.values()))
    lines = [Row(name, [number(seconds / first, ".2f")]) for name, seconds in total.items()]
    return Table("Time over all windows", ["all windows together", "time"], lines)


def reference_means(rows: Sequence[SlidingResult], subjects: Sequence[Subject]) -> list[WindowMean]:
    """ALiBi's mean perplexity without overlap, the line that the paper's Figure 1 compares sliding windows with.

    Args:
        rows: the results of :func:`compare`.
        subjects: the checkpoints that were compared.

    Returns:
        One mean for each checkpoint of ``alibi``, over its windows from the training length on; over all its windows
        where none is as long.
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
    """Both tables, and what their numbers are relative to."""
    return "\n".join([by_window(rows).markdown(), together(rows).markdown(), NOTE])
