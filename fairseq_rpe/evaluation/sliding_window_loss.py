"""Losses with a sliding window, by recomputation and, where that gives the same, with the key/value cache.

Source: "Exploring Transformer Extrapolation" (arXiv 2307.10156), Fig. 1 and Table 1. The stream has T targets
y_0 … y_(T-1); y_i is predicted from inputs x_0 … x_i, where x_0 is the end-of-sentence symbol and x_i = y_(i-1), as in
fairseq. With window w and stride s, 1 <= s <= w <= T, window k covers the inputs ks … ks + w - 1. The first one scores
all its targets, every other one its last s, and a last, shorter one what is left: every target is scored exactly once,
from w - s + 1 to w inputs, at the start from as many as there are. Stride w is non-overlapping evaluation.
"""

import time
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from fairseq_rpe.core.bias import Positions, block
from fairseq_rpe.core.errors import UserError
from fairseq_rpe.encodings import Encoding
from fairseq_rpe.evaluation.loss_aggregation import defined
from fairseq_rpe.evaluation.perplexity import Cache, losses
from fairseq_rpe.modules.attention import MovableCache
from fairseq_rpe.utils.progress import Progress

SEGMENTS = 64  # stretches of text that the cached evaluation walks through side by side, at most
Batch = tuple[Tensor, Tensor]  # inputs and targets


class Windows(Dataset):
    """Batches of windows: item b is (inputs (B, n), targets (B, s')), to be scored with the last s' positions.

    An item follows from its number alone: any number of loading processes gives the same. No row is ever padded: the
    first and the last window are batches of their own where their shape is another.
    ``stream``: (T + 1,) int64, x_0 and then the T targets; ``window`` w, ``stride`` s; ``rows``: windows in a batch.
    """

    def __init__(self, stream: Tensor, window: int, stride: int, rows: int = 1) -> None:
        self.tokens = len(stream) - 1
        check_windows(self.tokens, window, stride)
        self.stream, self.window, self.stride, self.rows = stream, window, stride, max(1, rows)
        self.starts = range(0, self.tokens - window + 1, stride)
        self.first = (self.starts[:1], window, window)
        after = self.tokens - window - self.starts[-1]
        end = self.starts[-1] + stride
        self.last = [(range(end, end + 1), self.tokens - end, after)] if after else []
        alone = [self.first] if stride < window else []
        inner = range(len(alone), len(self.starts), self.rows)
        self.batches: list[tuple[range | np.ndarray, int, int]]
        self.batches = [*alone, *((self.starts[k : k + self.rows], window, stride) for k in inner), *self.last]

    def __len__(self) -> int:
        return len(self.batches)

    def __getitem__(self, number: int) -> Batch:
        return self.cut(*self.batches[number])

    def cut(self, starts: range | np.ndarray, length: int, targets: int) -> Batch:
        """Windows of ``length`` inputs each, with their last targets."""
        places = torch.tensor(starts)[:, None] + torch.arange(length)
        return self.stream[places], self.stream[places[:, length - targets :] + 1]


class DocumentWindows(Windows):
    """The same for a text whose windows lie within its documents: each document is a text of its own.

    A document of at most w tokens is one window. Windows of one shape, of whatever documents, share batches.

    Args:
        stream: (T + 1,) int64, x_0 and then the T targets.
        ends: (documents,) int64, where documents end, in targets; the last one T.
        window: w, in tokens; at most that of the longest document.
        stride: s, in tokens.
        rows: windows in a batch, at most.
    """

    def __init__(self, stream: Tensor, ends: np.ndarray, window: int, stride: int, rows: int = 1) -> None:
        begins = np.concatenate(([0], ends[:-1])).astype(np.int64)
        sizes = ends - begins
        self.tokens = int(sizes.sum())
        check_windows(int(sizes.max(initial=0)), window, stride)
        self.stream, self.window, self.stride, self.rows = stream, window, stride, max(1, rows)
        full = sizes >= window
        more, after = (sizes[full] - window) // stride, (sizes[full] - window) % stride
        number = np.arange(more.sum()) - np.repeat(np.cumsum(more) - more, more) + 1  # within the document
        rest = after > 0
        end = (more[rest] + 1) * stride  # where the last window of a document begins in it
        # (first input, inputs, targets) of every window
        found = [
            np.stack([begins[~full], sizes[~full], sizes[~full]], axis=1),
            _windows(begins[full], window, window),
            _windows(np.repeat(begins[full], more) + number * stride, window, stride),
            np.stack([begins[full][rest] + end, sizes[full][rest] - end, after[rest]], axis=1),
        ]
        windows = np.concatenate(found)
        shapes, shape_of = np.unique(windows[:, 1:], axis=0, return_inverse=True)
        order = np.argsort(shape_of.ravel(), kind="stable")
        counts = np.bincount(shape_of.ravel(), minlength=len(shapes))
        self.batches = []
        for (length, targets), starts in zip(
            shapes.tolist(), np.split(windows[order, 0], np.cumsum(counts)[:-1]), strict=True
        ):
            parts = (starts[k : k + self.rows] for k in range(0, len(starts), self.rows))
            self.batches += [(part, length, targets) for part in parts]


def _windows(starts: np.ndarray, length: int, targets: int) -> np.ndarray:
    """(windows, 3): the first input of each, how many inputs it has and how many targets."""
    return np.stack([starts, np.full_like(starts, length), np.full_like(starts, targets)], axis=1)


def check_windows(total: int, window: int, stride: int) -> None:
    """Refuse a stride or a number of targets that this window cannot have."""
    if stride > window:
        raise UserError(f"--stride {stride} is more than window {window}: tokens in between would be left out")
    if window > total:
        raise UserError(f"window {window} is more than the {total} tokens to score: use a smaller one or more text")


@torch.no_grad()
def score(
    model: Any, windows: Windows, *, cached: bool = False, workers: int = 0, title: str = ""
) -> tuple[float, float]:
    """Sum of all targets' losses in nats, and seconds without a first, warming-up pass.

    Args:
        model: a ``transformer_rpe_lm`` in evaluation mode.
        cached: keep keys and values between windows, rather than a forward pass of its own for every window.
        workers: processes that cut the windows; ``title``: of a progress bar.

    Raises UserError if a target has probability 0 or NaN or was not scored exactly once, or if with the cache the
    result would be another (see :func:`why_not_cached`).
    """
    batches = _side_by_side(model, windows) if cached else DataLoader(windows, batch_size=None, num_workers=workers)
    device = next(model.parameters()).device
    nats, tokens, start = torch.zeros((), dtype=torch.float64, device=device), 0, 0.0

    def now() -> float:
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        return time.perf_counter()

    with Progress(title, "tokens", windows.tokens) as bar:
        for inputs, targets, *state in batches:
            inputs, targets = inputs.to(device), targets.to(device)
            if not tokens:
                losses(model, inputs, targets)
                start = now()
            nats += losses(model, inputs, targets, *state).double().sum()
            tokens += targets.numel()
            bar.update(targets.numel())
    seconds = now() - start
    if tokens != windows.tokens:
        counts = f"{tokens} of {windows.tokens} tokens were scored"
        raise UserError(f"window {windows.window}: {counts}: the result is not kept")
    return defined(nats), seconds


def _side_by_side(model: Any, windows: Windows) -> Iterator[Batch | tuple[Tensor, Tensor, Cache]]:
    """The batches of up to ``SEGMENTS`` stretches of text; in each the window moves on by s new tokens.

    Its cache is filled with w - s tokens first, and drops the s oldest ones at every move. Positions are those in the
    window at every step, for the cached keys as well.
    """
    if reason := why_not_cached(model, windows.window, windows.stride):
        raise UserError(reason)
    decoder, state = model.decoder, MovableCache()
    keep, steps = windows.window - windows.stride, windows.starts[1:]
    # Filling the caches costs at most about a quarter of what the steps cost.
    rows = max(1, min(SEGMENTS, windows.rows, len(steps) * windows.stride // (4 * keep)))
    length = max(1, -(-len(steps) // rows))
    yield windows.cut(*windows.first)
    if steps:
        filling = windows.cut(steps[::length], keep, 0)[0].to(next(decoder.parameters()).device)
        decoder(filling, incremental_state=state, features_only=True)
        for step in range(length):
            starts = steps[step::length]
            for layer in decoder.layers:
                cache = layer.self_attn._get_input_buffer(state)
                kept = {name: part[: len(starts), :, -keep:] for name, part in cache.items()}
                layer.self_attn._set_input_buffer(state, kept)
            yield *windows.cut(starts, windows.window, windows.stride), state
    yield from (windows.cut(*part) for part in windows.last)


def why_not_cached(model: Any, window: int, stride: int) -> str | None:
    """Why keys and values kept from the last window differ from those computed anew, in one line; None: they do not.

    Bias and rotation act when a key is read, at its place in the present window, so they cannot differ. What is kept
    is a state, and it may differ in two ways. It was computed from tokens that have left the window: with one layer it
    comes from its own token alone; with more it reaches back Σ_l (r_l - 1) tokens, where layer l sees r_l keys, and
    the first target scored has w - s older tokens in its window. And it was computed at another place in the window:
    harmless where scores depend on distances alone. Both are found by asking the encoding for its numbers.
    """
    decoder = model.decoder
    if stride >= window:
        return f"windows of {window} do not overlap at stride {stride}, so nothing can be cached: leave that window out"
    if decoder.needs_token_ids:
        return "this encoding reads the tokens before, which differ from window to window: use recomputation"
    device = next(decoder.parameters()).device
    where = decoder.moves(Positions.arange(window, device=device), torch.tensor([window]), False, False)
    where = replace(where, q=where.q.double(), k=where.k.double())
    x = torch.ones(1, window, decoder.encodings[0].width, device=device)
    embedded = decoder.encodings[0].embed(x, where)
    if not torch.allclose(embedded, embedded[:, :1].expand_as(x)):
        return (
            "this encoding adds positions to the input, which differ from window to window, so cached keys would be "
            "wrong: use recomputation"
        )
    layers = len(decoder.layers)
    if layers == 1:
        return None
    if any(e.is_content_dependent for e in decoder.encodings):
        return f"scores here depend on the tokens, so with {layers} layers cached states may differ: use recomputation"
    if any(e.rotation_regions(where) is not None for e in decoder.encodings):
        return f"this encoding turns keys by their place in the window, so with {layers} layers use recomputation"
    scores = [_scores(decoder.encoding_of(layer), where) for layer in range(layers)]
    # The farthest key that the last query of the window sees, by the score of any head.
    reach = sum(int((rows[0] > -torch.inf).flatten(0, 2).any(0).nonzero().max()) for rows in scores)
    if reach > window - stride:
        return (
            f"cached states would have seen tokens that left the window: in {window} tokens {layers} layers reach back "
            f"{reach}, stride {stride} allows {window - stride}; use recomputation, or a model of one layer or with "
            f"--rpe window:window=N, (N - 1)·{layers} <= {window - stride}"
        )
    # Each row has to be the beginning of the longest one.
    same = (torch.allclose(row, rows[0][..., : row.shape[-1]], rtol=1e-6, atol=1e-6) for rows in scores for row in rows)
    if not where.contiguous or not all(same):
        return "its scores depend on more than the distance in tokens, so cached states differ: use recomputation"
    return None


def _scores(encoding: Encoding, where: Positions) -> list[Tensor]:
    """Scores (1, H, 1, i + 1) of equal queries i, the window's last and a few before, and equal keys, nearest first."""
    m = where.k.shape[1]
    form, heads = encoding.position_bias(where), encoding.heads
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(2, 1, heads, 1, encoding.width // heads, dtype=torch.float64, generator=generator)
    q, k = x.to(where.k.device).expand(-1, -1, -1, m, -1)
    q, k = encoding.rotate(q, where.q, where), encoding.rotate(k, where.k, where, key=True)
    rows = []
    for i in sorted({m - 1, m - 2, m // 2, m // 3, 1} & set(range(m)), reverse=True):
        scores = torch.matmul(q[:, :, i : i + 1], k[:, :, : i + 1].transpose(-1, -2))
        if form is not None:
            scores = scores + block(form, where, slice(i, i + 1), slice(0, i + 1)).to(scores)
        rows.append(scores.flip(-1))
    return rows
