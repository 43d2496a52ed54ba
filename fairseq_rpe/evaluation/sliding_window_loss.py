"""Losses with a sliding window, by recomputation or, where that is exact, with the KV cache.

Source: "Exploring Transformer Extrapolation" (arXiv 2307.10156), Fig. 1 and Table 1. The stream has T targets
y_0 … y_(T-1); y_i is predicted from inputs x_0 … x_i, where x_0 is the end-of-sentence symbol and x_i = y_(i-1), as in
fairseq. With window w and stride s, 1 <= s <= w <= T, window k covers the inputs ks … ks + w - 1. The first window
scores all its targets; each later window scores its last s targets; a shorter final window scores the remaining ones.
Every target is scored exactly once, from w - s + 1 to w inputs, or from fewer at the start of the text. Stride w is
non-overlapping evaluation.
"""

import math
import time
from collections.abc import Iterator
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from fairseq_rpe.core.errors import UserError
from fairseq_rpe.core.positions import Positions
from fairseq_rpe.data import folder as corpus
from fairseq_rpe.decoder.cache import DecoderCache
from fairseq_rpe.encodings import Encoding
from fairseq_rpe.evaluation.loss_aggregation import check_finite
from fairseq_rpe.evaluation.perplexity import token_losses
from fairseq_rpe.utils.progress import Progress

MAX_SEGMENTS = 64  # upper limit of the segments of text that the cached evaluation processes in parallel
Batch = tuple[Tensor, Tensor]  # inputs and targets


class WindowBatch(NamedTuple):
    """Windows of one shape that are scored together.

    Attributes:
        starts: first input of each window.
        length: number of inputs of a window.
        targets: number of scored targets of a window, its last ones.
    """

    starts: range | np.ndarray
    length: int
    targets: int


class Windows(Dataset):
    """Batches of windows: item b is (inputs (B, n), targets (B, s')), to be scored at the last s' positions.

    Each batch depends only on its index, so any number of loading processes gives the same. No row is padded: a first
    or last window of another shape is a batch of its own.

    Args:
        stream: (T + 1,) int64, x_0 and then the T targets.
        window: w, in tokens.
        stride: s, in tokens.
        rows: upper limit of the windows in a batch.

    Attributes:
        tokens: T, number of targets.
        starts: first input of each full window.
        first_window: the first window, which scores w targets.
        last_windows: the shorter final window, if there is one.
        batches: the windows of each batch.
    """

    def __init__(self, stream: Tensor, window: int, stride: int, rows: int = 1) -> None:
        self.tokens = len(stream) - 1
        check_windows(self.tokens, window, stride)
        self.stream, self.window, self.stride, self.rows = stream, window, stride, max(1, rows)
        self.starts = range(0, self.tokens - window + 1, stride)
        self.first_window = WindowBatch(self.starts[:1], window, window)
        last_start = self.starts[-1] + stride
        remaining = self.tokens - window - self.starts[-1]  # targets after the last full window
        last_window = WindowBatch(range(last_start, last_start + 1), self.tokens - last_start, remaining)
        self.last_windows = [last_window] if remaining else []
        # The first window scores w targets, the others s: it is a batch by itself unless s = w.
        alone = [self.first_window] if stride < window else []
        full_windows = self.starts[len(alone) :]
        self.batches = [*alone, *_split_rows(full_windows, window, stride, self.rows), *self.last_windows]

    def __len__(self) -> int:
        return len(self.batches)

    def __getitem__(self, number: int) -> Batch:
        return self.select(self.batches[number])

    def select(self, batch: WindowBatch) -> Batch:
        """Return the inputs (B, length) and the scored targets (B, targets), int64, of B windows."""
        indices = torch.tensor(batch.starts)[:, None] + torch.arange(batch.length)  # (B, length)
        # Target i is input i + 1.
        return self.stream[indices], self.stream[indices[:, batch.length - batch.targets :] + 1]


def _split_rows(starts: range | np.ndarray, length: int, targets: int, rows: int) -> Iterator[WindowBatch]:
    """Yield windows of one shape in batches of at most ``rows``."""
    for k in range(0, len(starts), rows):
        yield WindowBatch(starts[k : k + rows], length, targets)


class DocumentWindows(Windows):
    """Batches of windows that do not cross documents: each document is scored separately.

    A document of at most w tokens is one window. Windows of the same shape share batches.

    Args:
        stream: (T + 1,) int64, x_0 and then the T targets.
        ends: (documents,) int64, where documents end, in targets; the last one T.
        window: w, in tokens; at most that of the longest document.
        stride: s, in tokens.
        rows: upper limit of the windows in a batch.
    """

    def __init__(self, stream: Tensor, ends: np.ndarray, window: int, stride: int, rows: int = 1) -> None:
        begins = np.concatenate(([0], ends[:-1])).astype(np.int64)
        sizes = ends - begins
        self.tokens = int(sizes.sum())
        check_windows(int(sizes.max(initial=0)), window, stride)
        self.stream, self.window, self.stride, self.rows = stream, window, stride, max(1, rows)
        self.batches = batch_by_shape(document_windows(begins, sizes, window, stride), self.rows)


def batch_by_shape(windows: np.ndarray, rows: int) -> list[WindowBatch]:
    """Return batches of windows that have the same number of inputs and the same number of targets.

    Args:
        windows: (windows, 3) int64: first input, number of inputs and number of targets of each window.
        rows: upper limit of the windows in a batch.
    """
    if not len(windows):
        return []
    shapes, shape_indices = np.unique(windows[:, 1:], axis=0, return_inverse=True)  # (shapes, 2), (windows,)
    order = np.argsort(shape_indices.ravel(), kind="stable")
    counts = np.bincount(shape_indices.ravel(), minlength=len(shapes))
    starts_by_shape = np.split(windows[order, 0], np.cumsum(counts)[:-1])
    batches: list[WindowBatch] = []
    for (length, targets), starts in zip(shapes.tolist(), starts_by_shape, strict=True):
        batches += _split_rows(starts, length, targets, rows)
    return batches


def document_windows(begins: np.ndarray, sizes: np.ndarray, window: int, stride: int) -> np.ndarray:
    """Return the windows of documents, as an array (windows, 3).

    Args:
        begins: (documents,) first input of each document.
        sizes: (documents,) number of targets of each document.
        window: w, in tokens.
        stride: s, in tokens.

    Returns:
        The first input, the number of inputs and the number of targets of each window.
    """
    is_long = sizes >= window  # a shorter document is one window
    short_begins, short_sizes = begins[~is_long], sizes[~is_long]
    begins, sizes = begins[is_long], sizes[is_long]
    num_later = (sizes - window) // stride  # full windows after the first one, by document
    remaining = (sizes - window) % stride  # targets of a shorter final window, by document
    later_offsets = (corpus.enumerate_groups(num_later) + 1) * stride  # (full windows after the first ones,)
    has_final = remaining > 0
    final_offsets = (num_later[has_final] + 1) * stride
    return np.concatenate(
        [
            _stack_windows(short_begins, short_sizes, short_sizes),
            _stack_windows(begins, window, window),
            _stack_windows(np.repeat(begins, num_later) + later_offsets, window, stride),
            _stack_windows(begins[has_final] + final_offsets, sizes[has_final] - final_offsets, remaining[has_final]),
        ]
    )


def _stack_windows(starts: np.ndarray, lengths: np.ndarray | int, targets: np.ndarray | int) -> np.ndarray:
    """Return (windows, 3): first input, number of inputs and number of targets of each window."""
    columns = (starts, np.broadcast_to(lengths, starts.shape), np.broadcast_to(targets, starts.shape))
    return np.stack(columns, axis=1)


def check_windows(total: int, window: int, stride: int) -> None:
    """Check that a window fits the stride and the text.

    Args:
        total: number of targets.
        window: w, in tokens.
        stride: s, in tokens.

    Raises:
        UserError: the stride is larger than the window, or the text is shorter.
    """
    if stride > window:
        raise UserError(f"--stride {stride} is more than window {window}: tokens in between would be left out")
    if window > total:
        raise UserError(f"window {window} is more than the {total} tokens to score: use a smaller one or more text")


@torch.no_grad()
def score_windows(
    model: Any, windows: Windows, *, cached: bool = False, workers: int = 0, title: str = ""
) -> tuple[float, float]:
    """Score all windows.

    Args:
        model: a ``transformer_rpe_lm`` in evaluation mode.
        windows: batches of windows.
        cached: whether to keep keys and values between windows, instead of a full forward pass for each window.
        workers: number of processes that load windows.
        title: title of the progress bar.

    Returns:
        Sum of all losses in nats, and the duration in seconds without a warm-up pass.

    Raises:
        UserError: a target has probability 0 or NaN or was not scored exactly once, or the cache would change the
            result (see :func:`cache_mismatch_reason`).
    """
    # batch_size=None: an item of `windows` is a batch already.
    batches = _cached_batches(model, windows) if cached else DataLoader(windows, batch_size=None, num_workers=workers)
    device = next(model.parameters()).device
    nats, tokens, start = torch.zeros((), dtype=torch.float64, device=device), 0, 0.0

    def now() -> float:
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        return time.perf_counter()

    with Progress(title, "tokens", windows.tokens) as bar:
        for inputs, targets, *cache in batches:  # the cached evaluation also yields its KV cache
            inputs, targets = inputs.to(device), targets.to(device)
            if not tokens:
                token_losses(model, inputs, targets)  # warm-up: allocations and the choice of a back end
                start = now()
            nats += token_losses(model, inputs, targets, *cache).double().sum()
            tokens += targets.numel()
            bar.update(targets.numel())
    seconds = now() - start
    if tokens != windows.tokens:
        counts = f"{tokens} of {windows.tokens} tokens were scored"
        raise UserError(f"window {windows.window}: {counts}: the result is not stored, report this as a bug")
    return check_finite(nats), seconds


def _cached_batches(model: Any, windows: Windows) -> Iterator[Batch | tuple[Tensor, Tensor, DecoderCache]]:
    """Yield batches of up to ``MAX_SEGMENTS`` segments of text, in each of which the window moves by s new tokens.

    The cache of a segment starts with w - s tokens and drops the s oldest ones at every step. At every step, also
    cached keys are positioned by their index in the current window.
    """
    if reason := cache_mismatch_reason(model, windows.window, windows.stride):
        raise UserError(reason)
    decoder, cache = model.decoder, DecoderCache(is_movable=True)
    overlap, later_starts = windows.window - windows.stride, windows.starts[1:]
    # So few segments that filling their caches computes at most about a quarter of the tokens of the steps.
    segments = max(1, min(MAX_SEGMENTS, windows.rows, len(later_starts) * windows.stride // (4 * overlap)))
    steps = max(1, math.ceil(len(later_starts) / segments))  # windows of a segment
    yield windows.select(windows.first_window)
    if later_starts:
        prefix, _ = windows.select(WindowBatch(later_starts[::steps], overlap, 0))  # (segments, w - s)
        decoder.features(prefix.to(next(decoder.parameters()).device), cache)
        for step in range(steps):
            starts = later_starts[step::steps]  # segment i is at window i·steps + step
            cache.keep_last(overlap, rows=len(starts))  # the last step may have fewer rows
            yield *windows.select(WindowBatch(starts, windows.window, windows.stride)), cache
    yield from map(windows.select, windows.last_windows)


def cache_mismatch_reason(model: Any, window: int, stride: int) -> str | None:
    """Return why cached keys and values would differ from recomputed ones, in one line, or None if they do not.

    Bias and rotation are applied when a key is used, at its index in the current window, so they cannot differ. The
    cached hidden state may differ in two ways. First, it depends on tokens that have left the window: with one layer
    on its own token only; with more layers on Σ_l (r_l - 1) earlier tokens, where layer l sees r_l keys, while the
    first scored target has w - s older tokens in its window. Second, it was computed at another index in the window,
    which changes nothing if scores depend only on distances. Both are checked on the encoding's values.

    Args:
        model: a ``transformer_rpe_lm`` in evaluation mode.
        window: w, in tokens.
        stride: s, in tokens.

    Returns:
        The reason with a remedy, as the end of an error message, or None if the cache is exact.
    """
    decoder = model.decoder
    if stride >= window:
        return f"windows of {window} do not overlap at stride {stride}, so nothing can be cached: leave this window out"
    if decoder.needs_token_ids:
        return "this encoding depends on the previous tokens, which differ between windows: use recomputation"
    device = next(decoder.parameters()).device
    positions = decoder.position_transforms(
        Positions.arange(window, device=device), torch.tensor([window]), training=False, decoding=False
    )
    positions = replace(positions, q=positions.q.double(), k=positions.k.double())
    # Equal embeddings stay equal unless the encoding adds positions to them.
    equal = torch.ones(1, window, decoder.encodings[0].width, device=device)
    embedded = decoder.encodings[0].embed(equal, positions)
    if not torch.allclose(embedded, embedded[:, :1].expand_as(equal)):
        return (
            "this encoding adds positions to the input, which differ between windows, so cached keys would be wrong: "
            "use recomputation"
        )
    return None if len(decoder.layers) == 1 else _hidden_state_mismatch_reason(decoder, positions, window, stride)


def _hidden_state_mismatch_reason(decoder: Any, positions: Positions, window: int, stride: int) -> str | None:
    """Return why hidden states between several layers would differ from recomputed ones, or None."""
    layers = len(decoder.layers)
    if any(e.is_content_dependent for e in decoder.encodings):
        return f"scores here depend on the tokens, so with {layers} layers cached states may differ: use recomputation"
    if any(e.rotation_regions(positions) is not None for e in decoder.encodings):
        return f"this encoding rotates keys by their index in the window, so with {layers} layers use recomputation"
    scores = [_scores(decoder.layer_encoding(layer), positions) for layer in range(layers)]
    distance = sum(_farthest_visible_key(rows[0]) for rows in scores)
    if distance > window - stride:
        return (
            f"cached states would depend on tokens that left the window: in {window} tokens {layers} layers see "
            f"{distance} tokens back, stride {stride} allows {window - stride}; use recomputation, or a model of one "
            f"layer or with --rpe window:window=N, (N - 1)·{layers} <= {window - stride}"
        )
    # Scores depend only on distances if each row is a prefix of the longest one, which is the first.
    same = (torch.allclose(row, rows[0][..., : row.shape[-1]], rtol=1e-6, atol=1e-6) for rows in scores for row in rows)
    if not positions.contiguous or not all(same):
        return "scores of this encoding depend on more than the distance, so cached states differ: use recomputation"
    return None


def _farthest_visible_key(scores: Tensor) -> int:
    """Return the distance of the farthest key that a query sees in any head; ``scores`` (1, H, 1, m) nearest first."""
    is_visible = (scores > -torch.inf).flatten(0, 2).any(0)  # (m,)
    return int(is_visible.nonzero().max())


def _scores(encoding: Encoding, positions: Positions) -> list[Tensor]:
    """Return scores of equal queries and equal keys for some rows i, the last one first.

    Equal contents leave the positions as the only cause of differences between scores.

    Returns:
        (1, H, 1, i + 1) for each row i, nearest key first.
    """
    m = positions.k.shape[1]
    bias, heads = encoding.attention_bias(positions), encoding.heads
    generator = torch.Generator().manual_seed(0)
    # one query and one key for each head, (2, 1, H, 1, D), at all m positions
    contents = torch.randn(2, 1, heads, 1, encoding.width // heads, dtype=torch.float64, generator=generator)
    q, k = contents.to(positions.k.device).expand(-1, -1, -1, m, -1)
    q, k = encoding.rotate(q, positions.q, positions), encoding.rotate(k, positions.k, positions, key=True)
    rows = []
    for i in sorted({m - 1, m - 2, m // 2, m // 3, 1} & set(range(m)), reverse=True):
        scores = torch.matmul(q[:, :, i : i + 1], k[:, :, : i + 1].transpose(-1, -2))
        if bias is not None:
            scores = scores + bias.materialize(positions, slice(i, i + 1), slice(0, i + 1)).to(scores)
        rows.append(scores.flip(-1))
    return rows
