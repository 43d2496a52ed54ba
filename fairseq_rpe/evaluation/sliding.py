"""Perplexity and time of sliding-window against non-overlapping evaluation, window by window."""

from __future__ import annotations

import dataclasses
import functools
import math
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar

from torch import Tensor
from torch.utils.data import DataLoader
from tqdm import tqdm

from fairseq_rpe.core import devices
from fairseq_rpe.core.errors import UserError
from fairseq_rpe.core.files import file_digest
from fairseq_rpe.core.table import Cell, Row, Table, csv_of, number
from fairseq_rpe.data import folder as corpus
from fairseq_rpe.evaluation import loading
from fairseq_rpe.evaluation.loading import Subject
from fairseq_rpe.evaluation.measurements import Overrides
from fairseq_rpe.evaluation.results import kept, part, resumed
from fairseq_rpe.evaluation.windows import Score, Windows, cached, recomputed, why_not_cached

PUBLISHED = 44.35  # sliding / non-overlapping, mean over the windows of Table 1; ALiBi without sliding is 1.00 there
PLAIN, SLIDING, CACHED = "non-overlapping", "sliding", "cached"
BATCH_TOKENS = 2048
# Short measurements are repeated and their median counts: they are what all others are divided by.
LONG_ENOUGH, REPEATS = 2.0, 5
NOTE = f"""\
Time is relative to the non-overlapping evaluation of the same model at the same window, in the second table to that of
the first model over all windows. Published ("Exploring Transformer Extrapolation", Table 1, mean over windows of 16 to
512): sliding {PUBLISHED}, non-overlapping 1.00, ALiBi without sliding 1.00. Its stride, model and hardware are not
stated: compare the order of magnitude only.
"""


@dataclass(frozen=True)
class SlidingKey:
    """What a perplexity with its time is of; ``checkpoint`` and ``data`` are digests, ``mode`` one of three."""

    checkpoint: str
    data: str
    subset: str
    positions: str | None
    tokens: int
    mode: str
    window: int
    stride: int
    max_tokens: int | None = None
    workers: int | None = None
    device: str | None = None


@dataclass(frozen=True, kw_only=True)
class SlidingResult:
    """Perplexity per token over ``tokens`` targets and the time that it took; ``loss_base2`` in bits per token."""

    encoding: str = ""
    checkpoint: str
    data: str
    subset: str
    positions: str | None = None
    tokens: int
    workers: int | None = None
    max_tokens: int | None = None
    device: str | None = None
    mode: str
    window: int
    stride: int
    loss_base2: float
    ppl: float
    seconds: float
    always: ClassVar[tuple[str, ...]] = ("positions",)

    @property
    def key(self) -> SlidingKey:
        return part(SlidingKey, self)

    def record(self) -> dict[str, object]:
        """As a line of JSON keeps it."""
        return kept(self, self.always)


@dataclass(frozen=True)
class Compared:
    """A measurement beside the others; ``relative``: its time as a multiple of the non-overlapping evaluation's."""

    encoding: str
    mode: str
    window: int
    stride: int
    tokens: int
    ppl: float
    loss_base2: float
    seconds: float
    relative: float


@dataclass(frozen=True, kw_only=True)
class SlidingRequest:
    """What is compared for each checkpoint: the options of ``fairseq-rpe sliding``.

    ``windows`` and ``stride`` in tokens; ``first_tokens``: score these only; ``cached``: also slide with cached keys
    and values; ``workers`` processes cut the windows; ``max_tokens`` bounds a batch.
    """

    data: Path
    windows: Sequence[int]
    stride: int = 1
    subset: str = "test"
    first_tokens: int | None = None
    cached: bool = False
    workers: int = 0
    max_tokens: int | None = None
    use: Overrides = field(default_factory=Overrides)

    def check(self) -> int:
        """The tokens to score.

        Raises:
            UserError: the data cannot be used, or a window does not go with the text, the stride or the batch.
        """
        corpus.check_folder(self.data, self.subset)
        total = corpus.count_tokens(self.data, self.subset)
        if self.first_tokens and self.first_tokens > total:
            raise UserError(f"--first-tokens {self.first_tokens}: {self.data}/{self.subset} has {total}, leave it out")
        total = self.first_tokens or total
        for window in self.windows:
            if window < self.stride:
                raise UserError(
                    f"--stride {self.stride} is more than window {window}: tokens in between would be left out"
                )
            if window > total:
                raise UserError(
                    f"window {window} is more than the {total} tokens to score: take a smaller one or more text"
                )
            if self.max_tokens and self.max_tokens < window:
                raise UserError(f"--max-tokens {self.max_tokens} is less than window {window}: raise it")
        return total

    def keys(self, checkpoint: Path) -> list[SlidingKey]:
        """A measurement for each window and mode."""
        same = (file_digest(checkpoint), corpus.digest(self.data), self.subset, self.use.positions, self.check())
        how = (self.max_tokens or BATCH_TOKENS, self.workers, devices.chosen(self.use.device))
        modes = (PLAIN, SLIDING, *([CACHED] if self.cached else []))
        return [
            SlidingKey(*same, mode, window, window if mode == PLAIN else self.stride, *how)
            for window in self.windows
            for mode in modes
        ]


def compare(request: SlidingRequest, subjects: Sequence[Subject], results: Path) -> list[Compared]:
    """Measure what is not in the file ``results`` yet, and put everything side by side.

    Raises:
        UserError: positions are random, the cache is not exact, or a token was not scored exactly once.
    """
    rows = []
    for subject in subjects:
        begin = functools.partial(_measuring, request, subject)
        found = list(resumed(SlidingResult, results, request.keys(subject.path), begin))
        plain = {one.window: one.seconds for one in found if one.mode == PLAIN}
        for one in found:
            place = (subject.label, one.mode, one.window, one.stride, one.tokens)
            relative = one.seconds / plain[one.window]
            rows.append(Compared(*place, one.ppl, one.loss_base2, one.seconds, relative))
    return rows


def _measuring(
    request: SlidingRequest, subject: Subject, missing: Sequence[SlidingKey]
) -> Callable[[SlidingKey], SlidingResult]:
    model, task = loading.load(subject.path, request.use, request.data)
    transform = model.decoder.moves.active(False)
    if transform is not None and transform.random:
        raise UserError(
            f"{subject.label}: random positions are drawn anew for every batch, so windows cannot be compared: name "
            "another --positions"
        )
    for key in missing:
        reason = why_not_cached(model, key.window, key.stride) if key.mode == CACHED else None
        if reason:
            raise UserError(f"--cached: {subject.label}: {reason}")
    stream = loading.read_stream(request.data, request.subset, task.source_dictionary, missing[0].tokens)
    return lambda key: _measure(model, stream, key, subject.label)


def _measure(model: Any, stream: Tensor, key: SlidingKey, label: str) -> SlidingResult:
    """Perplexity and median time."""
    windows = Windows(stream, key.window, key.stride, (key.max_tokens or BATCH_TOKENS) // key.window)
    seconds: list[float] = []
    while sum(seconds) < LONG_ENOUGH and len(seconds) < REPEATS:
        title = f"{label}, {key.mode}, window {key.window}"
        with tqdm(total=key.tokens, desc=title, unit=" tokens", disable=None, leave=False) as bar:
            score = _once(model, windows, key, bar.update)
        if score.tokens != key.tokens:
            raise UserError(
                f"window {key.window}: {score.tokens} of {key.tokens} tokens were scored: the result is not kept"
            )
        seconds.append(score.seconds)
    nats = score.nats / key.tokens
    found = {"loss_base2": nats / math.log(2), "ppl": math.exp(nats), "seconds": statistics.median(seconds)}
    return SlidingResult(**vars(key), encoding=label, **found)


def _once(model: Any, windows: Windows, key: SlidingKey, tick: Callable[[int], Any]) -> Score:
    if key.mode == CACHED:
        return cached(model, windows, tick)
    return recomputed(model, DataLoader(windows, batch_size=None, num_workers=key.workers or 0), tick)


def by_window(rows: Sequence[Compared]) -> Table:
    """Window × mode: perplexity per token, and time as a multiple of the non-overlapping evaluation's."""
    modes = list(dict.fromkeys(row.mode for row in rows))
    found = {(row.encoding, row.window, row.mode): row for row in rows}
    head = ["encoding", "window", *(f"{m} ppl" for m in modes), "seconds", *(f"{m} time" for m in modes[1:])]
    lines = []
    for label, window in dict.fromkeys((row.encoding, row.window) for row in rows):
        own = [found[label, window, mode] for mode in modes]
        times = [number(own[0].seconds, ".2f"), *(number(one.relative, ".2f") for one in own[1:])]
        lines.append(Row(label, [Cell(str(window), window), *(number(one.ppl, ".2f") for one in own), *times]))
    return Table("Perplexity and time by window", head, lines)


def together(rows: Sequence[Compared]) -> Table:
    """Time over all windows together, as Table 1 sums it up; everything relative to the first model's."""
    total: dict[str, float] = {}
    for row in rows:
        name = f"{row.encoding}, {row.mode}"
        total[name] = total.get(name, 0.0) + row.seconds
    first = next(iter(total.values()))
    lines = [Row(name, [number(seconds / first, ".2f")]) for name, seconds in total.items()]
    return Table("Time over all windows", ["all windows together", "time"], lines)


def markdown(rows: Sequence[Compared]) -> str:
    """Both tables, and what their numbers are relative to."""
    return "\n".join([by_window(rows).markdown(), together(rows).markdown(), NOTE])


def csv(rows: Sequence[Compared]) -> str:
    """A line for each encoding, window and mode."""
    return csv_of([f.name for f in dataclasses.fields(Compared)], rows)
