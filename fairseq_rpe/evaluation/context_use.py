"""Use of context by distance: the losses of tokens by how many tokens back their last occurrence lies.

A model that uses text at distance d predicts tokens better whose last occurrence is d tokens back. The measurement
needs no second model, in contrast to key tokens (:mod:`fairseq_rpe.evaluation.key_tokens`).
"""

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from fairseq_rpe.data import folder as corpus
from fairseq_rpe.evaluation.checkpoint_defaults import default_lengths
from fairseq_rpe.evaluation.loading import LabelledCheckpoint, load_model, one_line_errors, read_stream
from fairseq_rpe.evaluation.losses_by_token import block_begins, block_ends, block_windows, losses_by_token
from fairseq_rpe.evaluation.records import BATCH_TOKENS, Blocks, EvalOverrides, Result, TextRequest, resume_results
from fairseq_rpe.evaluation.statistics import clustered_mean
from fairseq_rpe.figures.context_use import LossAtDistance
from fairseq_rpe.utils.records import Count, Loss, NonNegative, from_attributes
from fairseq_rpe.utils.table import Cell, Table, TableRow, number_cell

COLUMNS = ("encoding", "length", "distance", "tokens", "loss_base2", "standard_error")


@dataclass(frozen=True, kw_only=True)
class ContextUseKey:
    """Key of the losses of one model by distance, in blocks of one length.

    Attributes:
        checkpoint: digest of the checkpoint.
        data: digest of the corpus.
        split: name of the scored split.
        module: digest of the file of ``--rpe-module``, which may define the checkpoint's encoding.
        positions: position transform in place of the checkpoint's.
        blocks: stream, or document if blocks do not cross documents.
        length: tokens of a block.
    """

    checkpoint: str
    data: str
    split: str
    module: str | None = None
    positions: str | None = None
    blocks: Blocks
    length: Count


@dataclass(frozen=True, kw_only=True)
class DistanceBucket:
    """Mean loss of the tokens whose last occurrence is between a power of two and the next one tokens back.

    Attributes:
        distance: the smallest distance d in tokens, a power of two; the distances are d to 2·d - 1. None: the tokens
            that do not occur before in their block.
        tokens: number of such tokens.
        loss_base2: their mean loss in bits.
        standard_error: standard error of the mean, clustered by document or block; None if all are in one.
    """

    distance: Count | None
    tokens: Count
    loss_base2: Loss
    standard_error: NonNegative | None = None


@dataclass(frozen=True, kw_only=True)
class ContextUseResult(ContextUseKey, Result):
    """Losses of one model by distance, in blocks of one length.

    Attributes:
        tokens: number of scored tokens.
        loss_base2: mean loss of all tokens in bits.
        buckets: mean losses by distance, in the order of the distances, new tokens last.
        clusters: number of documents or blocks, by which standard errors are clustered.
        cluster: document if the split has document boundaries, else block.
        train_length: training length of the model in tokens.
        seconds: duration of the measurement.
    """

    key_type = ContextUseKey
    tokens: Count
    loss_base2: Loss
    buckets: tuple[DistanceBucket, ...]
    clusters: Count
    cluster: str
    train_length: Count | None = None
    seconds: float | None = None


@dataclass(frozen=True, kw_only=True)
class ContextUseRequest(EvalOverrides):
    """What to measure for each checkpoint: the options of ``fairseq-rpe context-use``.

    Attributes:
        data: binarised data folder.
        lengths: tokens of a block; None: 1, 2, 4, 8 and 16 training lengths, as far as possible.
        split: name of the split to score.
        blocks: stream if blocks run across documents, document if each is within one.
        max_tokens: upper limit of the tokens in a batch.
    """

    data: Path
    lengths: Sequence[int] | None = None
    split: str = "test"
    blocks: Blocks
    max_tokens: int | None = None

    def keys(self, checkpoint: Path) -> list[ContextUseKey]:
        """Return one key for each length.

        Raises:
            UserError: the checkpoint, the data or a length cannot be used.
        """
        lengths = self.lengths or default_lengths(
            checkpoint, self.data, self.split, None, self.positions_eval, self.blocks
        )
        request = from_attributes(TextRequest, self, checkpoint=checkpoint, lengths=lengths)
        return [from_attributes(ContextUseKey, key) for key in request.keys()]


def last_occurrence_distances(stream: np.ndarray, first: np.ndarray) -> np.ndarray:
    """Return how many tokens back the last occurrence of each target lies.

    Args:
        stream: (T + 1,) token ids, x_0 … x_T; target i is x_(i+1), predicted from x_first[i] … x_i.
        first: (T,) first visible input of each target.

    Returns:
        (T,) int64: the least d >= 1 with x_(i+1-d) = x_(i+1) and i + 1 - d >= first[i], or 0 if there is none.
    """
    # In a stable sort by token, an occurrence is directly after the last occurrence before it.
    order = np.argsort(stream, kind="stable")
    is_repeated = stream[order[1:]] == stream[order[:-1]]
    previous = np.full(len(stream), -1)
    previous[order[1:][is_repeated]] = order[:-1][is_repeated]
    return np.where(previous[1:] >= first, np.arange(1, len(stream)) - previous[1:], 0)


def losses_by_distance(losses: np.ndarray, distances: np.ndarray, clusters: np.ndarray) -> tuple[DistanceBucket, ...]:
    """Return the mean loss at distances 1, 2 to 3, 4 to 7 and so on, and of new tokens, without empty buckets.

    The standard error of a mean is that of :func:`~fairseq_rpe.evaluation.statistics.clustered_mean` over the clusters
    that have such tokens.

    Args:
        losses: (T,) losses in nats.
        distances: (T,) distances of :func:`last_occurrence_distances`.
        clusters: (T,) number of the cluster of each token, such as its document.
    """
    # (T,): frexp(d) has the exponent k + 1 for 2 ** k <= d < 2 ** (k + 1), and 0 for d = 0
    bucket_numbers = np.frexp(distances.astype(np.float64))[1]
    bits = losses / math.log(2)
    buckets = []
    numbers = np.unique(bucket_numbers).tolist()
    for number in [*filter(None, numbers), *(number for number in numbers if not number)]:
        in_bucket = bucket_numbers == number
        counts = np.bincount(clusters[in_bucket])  # (clusters,)
        estimate = clustered_mean(np.bincount(clusters[in_bucket], bits[in_bucket]), counts)
        buckets.append(
            DistanceBucket(
                distance=2 ** (number - 1) if number else None,
                tokens=int(counts.sum()),
                loss_base2=estimate.mean,
                standard_error=estimate.standard_error,
            )
        )
    return tuple(buckets)


def measure_context_use(
    request: ContextUseRequest, subjects: Sequence[LabelledCheckpoint], results: Path
) -> list[ContextUseResult]:
    """Measure all checkpoints and lengths that the file ``results`` does not have yet.

    Args:
        request: what to measure.
        subjects: the checkpoints.
        results: JSON-lines file of the results.

    Returns:
        All results, with the labels of the checkpoints.

    Raises:
        UserError: a checkpoint, the data or a length cannot be used.
    """
    keys = [request.keys(subject.path) for subject in subjects]  # checks all before the first is measured
    rows = []
    for subject, subject_keys in zip(subjects, keys, strict=True):

        def begin(_: Sequence[Any], subject: LabelledCheckpoint = subject) -> Callable[[Any], ContextUseResult]:
            return _make_evaluator(request, subject)

        for result in resume_results(ContextUseResult, results, subject_keys, begin):
            rows.append(replace(result, encoding=subject.label))
    return rows


def _make_evaluator(
    request: ContextUseRequest, subject: LabelledCheckpoint
) -> Callable[[ContextUseKey], ContextUseResult]:
    """Load a checkpoint and its text, and return the function that measures one length."""
    model, task = load_model(subject.path, request, request.data)
    tokens = corpus.count_tokens(request.data, request.split)
    stream = read_stream(request.data, request.split, task.source_dictionary, tokens)
    document_ends = corpus.document_ends_if_recorded(request.data, request.split)

    def evaluate(key: ContextUseKey) -> ContextUseResult:
        start = time.monotonic()
        ends = block_ends(request.data, request.split, key.blocks, key.length)
        title = f"{subject.label}, length {key.length}"
        with one_line_errors(f"{title}: evaluation failed", None):
            batch_tokens = request.max_tokens or max(key.length, BATCH_TOKENS)
            losses = losses_by_token(model, stream, block_windows(ends, key.length), batch_tokens, title)
        begins = block_begins(ends)
        distances = last_occurrence_distances(stream.numpy(), np.repeat(begins, ends - begins))
        cluster_ends = ends if document_ends is None else document_ends
        clusters = np.searchsorted(cluster_ends, np.arange(tokens), side="right")
        return ContextUseResult(
            **vars(key),
            encoding=subject.label,
            tokens=tokens,
            loss_base2=float(losses.mean()) / math.log(2),
            buckets=losses_by_distance(losses, distances, clusters),
            clusters=len(cluster_ends),
            cluster="block" if document_ends is None else "document",
            train_length=subject.train_length or None,
            seconds=round(time.monotonic() - start, 3),
        )

    return evaluate


def csv_rows(results: Sequence[ContextUseResult]) -> list[tuple[object, ...]]:
    """Return a row of ``COLUMNS`` for each bucket of each result; the distance of new tokens is ``new``."""
    return [
        (r.encoding, r.length, b.distance or "new", b.tokens, b.loss_base2, b.standard_error)
        for r in results
        for b in r.buckets
    ]


def context_use_table(results: Sequence[ContextUseResult]) -> Table:
    """Return a table of model and length × distance: mean losses in bits, with standard errors."""
    distances = sorted({b.distance for r in results for b in r.buckets if b.distance})
    rows = []
    for r in results:
        by_distance = {b.distance: b for b in r.buckets}
        cells = [_loss_cell(by_distance.get(distance)) for distance in (*distances, None)]
        rows.append(TableRow(r.encoding, [number_cell(r.length, "d"), *cells]))
    header = ["encoding", "length", *(str(d) if d == 1 else f"{d}–{2 * d - 1}" for d in distances), "new"]
    caption = "Loss in bits by the distance of the last occurrence; ±: one standard error, clustered by "
    caption += " or ".join(sorted({r.cluster for r in results}))
    return Table(f"{caption}.", header, rows)


def _loss_cell(bucket: DistanceBucket | None) -> Cell:
    if bucket is None:
        return Cell("")
    error = "" if bucket.standard_error is None else f" ± {bucket.standard_error:.2f}"
    return Cell(f"{bucket.loss_base2:.2f}{error}", bucket.loss_base2)


def figure_panels(results: Sequence[ContextUseResult]) -> dict[str, dict[str, list[LossAtDistance]]]:
    """Return the curves of the figure: title of a panel -> label -> points.

    Several models have a panel for each length; a single model has one panel, with a curve for each length.
    """
    labels = list(dict.fromkeys(r.encoding for r in results))
    panels: dict[str, dict[str, list[LossAtDistance]]] = {}
    for r in sorted(results, key=lambda r: (r.length, labels.index(r.encoding))):
        points = [LossAtDistance(b.distance, b.loss_base2, b.standard_error or 0.0) for b in r.buckets]
        title, label = (r.encoding, f"{r.length} tokens") if len(labels) == 1 else (f"{r.length} tokens", r.encoding)
        panels.setdefault(title, {})[label] = points
    return panels
