"""Aggregates per-token losses of a split into a result, independently of the model; measures the peak memory."""

import contextlib
import itertools
import math
import resource
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from fairseq_rpe.core.errors import UserError
from fairseq_rpe.data.folder import Units
from fairseq_rpe.evaluation.records import Buckets, TextKey, TextResult
from fairseq_rpe.evaluation.segment_losses import SegmentLosses, segment_ends

MAX_BITS = sys.float_info.max_exp  # 1024: 2 ** bits overflows a float from this number of bits per token on


def text_result(key: TextKey, nats: Tensor, count: Tensor) -> TextResult:
    """Return the perplexity of a split.

    Args:
        key: key of the result.
        nats: (length,) float64, sum of losses in nats at each position of a block.
        count: (length,) int64, number of targets at each position.

    Returns:
        The result with ``tokens``, ``loss_base2``, ``ppl`` and ``positions_loss``. The other fields describe the model
        and the measurement, such as ``encoding`` and ``seconds``; the caller fills them in.

    Raises:
        UserError: a target has probability 0 or NaN, or the perplexity overflows.
    """
    tokens = int(count.sum())
    loss = check_finite(nats.sum()) / tokens / math.log(2)
    ppl = float(torch.tensor(loss, dtype=torch.float64).exp2())
    if loss >= MAX_BITS:
        raise too_large_error(loss)
    # Documents in one row may all be shorter than the row: leave out positions without targets, which are at the end.
    longest = int(count.nonzero().max()) + 1
    positions_loss = bucket_losses(nats[:longest], count[:longest])
    return TextResult(**vars(key), tokens=tokens, loss_base2=loss, ppl=ppl, positions_loss=positions_loss)


def check_all_scored(result: TextResult, tokens: int) -> None:
    """Check that exactly ``tokens`` tokens were scored.

    Args:
        result: the measurement.
        tokens: number of tokens of the split.

    Raises:
        UserError: another number was scored.
    """
    if result.tokens != tokens:
        raise _not_all_scored_error(result.length, result.tokens, tokens)


def _not_all_scored_error(length: int, scored: int, tokens: int) -> UserError:
    return UserError(
        f"length {length}: {scored} of {tokens} tokens were scored, so the result is not stored: "
        "use a length that the model accepts and data without padding"
    )


class SegmentSums:
    """Sums of the losses over segments of a split, see :class:`~fairseq_rpe.evaluation.segment_losses.SegmentLosses`.

    Args:
        tokens: number of tokens of the split.
        document_ends: (documents,) int64 ends of its documents, or None if it has no document boundaries.
        device: device of the losses.
    """

    def __init__(self, tokens: int, document_ends: np.ndarray | None, device: torch.device) -> None:
        self._ends, self._starts = segment_ends(tokens, document_ends)
        self._ends_on_device = torch.from_numpy(self._ends).to(device)
        self._nats = torch.zeros(len(self._ends), dtype=torch.float64, device=device)
        self._count = torch.zeros(len(self._ends), dtype=torch.int64, device=device)

    def add(self, begins: Tensor, losses: Tensor, is_target: Tensor) -> None:
        """Add the losses of a batch.

        Args:
            begins: (B,) int64, index in the split of the first target of each row.
            losses: (B, n) losses in nats; 0 at padding, which is at the end of rows.
            is_target: (B, n) bool, False at padding.
        """
        device = losses.device
        indices = begins.to(device)[:, None] + torch.arange(losses.shape[1], device=device)  # (B, n)
        segments = torch.searchsorted(self._ends_on_device, indices, right=True)  # (B, n)
        segments = segments.clamp_(max=len(self._ends) - 1).flatten()  # padding may be behind the end of the split
        self._nats.index_add_(0, segments, losses.flatten().double())
        self._count.index_add_(0, segments, is_target.to(device).flatten().long())

    def pack(self, length: int, draws: int) -> SegmentLosses:
        """Return the mean sums of several passes over the split.

        Args:
            length: tokens of a block, for error messages.
            draws: number of passes.

        Raises:
            UserError: a pass has not scored each token of the split once.
        """
        expected, count = np.diff(self._ends, prepend=0) * draws, self._count.cpu().numpy()
        if wrong := int(np.abs(count - expected).sum()):
            tokens = int(self._ends[-1])
            raise _not_all_scored_error(length, tokens - -(-wrong // draws), tokens)
        bits = self._nats.cpu().numpy() / (draws * math.log(2))
        return SegmentLosses.pack(self._ends, self._starts, bits)


def add_units(result: TextResult, units: Units | None) -> TextResult:
    """Add the loss per byte and per word, which do not depend on the tokeniser, if ``units`` is known."""
    if units is None:
        return result
    bits = result.loss_base2
    return replace(result, bits_per_byte=units.bits_per_byte(bits), word_ppl=units.word_ppl(bits))


def bucket_losses(nats: Tensor, count: Tensor) -> Buckets:
    """Return the mean loss at positions 0, 1, 2 … 3, 4 … 7 and so on to the end of a block.

    Args:
        nats: (length,) float64, sum of losses in nats at each position.
        count: (length,) int64, number of targets at each position. A bucket without targets would have the mean NaN;
            blocks and documents begin at position 0, so :func:`text_result` passes at least one for each position.
    """
    # Every power of two up to the last position begins a bucket: 2 ** k for k < bit_length of that position.
    last = len(nats) - 1
    edges = [0, *(2**k for k in range(last.bit_length())), len(nats)]
    sizes = [end - start for start, end in itertools.pairwise(edges)]
    bucket_nats = torch.stack([bucket.sum() for bucket in nats.split(sizes)])  # (buckets,)
    bucket_count = torch.stack([bucket.sum() for bucket in count.split(sizes)])  # (buckets,)
    bits = bucket_nats / bucket_count / math.log(2)
    return Buckets(
        upto=tuple(edge - 1 for edge in edges[1:]), loss_base2=tuple(bits.tolist()), tokens=tuple(bucket_count.tolist())
    )


def check_finite(nats: Tensor) -> float:
    """Return a sum of losses as a float.

    Raises:
        UserError: it is NaN or infinite.
    """
    if not torch.isfinite(nats):
        raise UserError(
            "the model gives a target token probability 0 or NaN: its perplexity is not defined, so train it again"
        )
    return float(nats)


def too_large_error(loss: float) -> UserError:
    """Return the error for a loss in bits per token whose perplexity overflows a float."""
    return UserError(
        f"the perplexity overflows a float, with a loss of {loss:.0f} bits per token: "
        "the model has not learned, train it with a smaller --lr"
    )


def peak_memory_mb(device: str) -> float:
    """Return the peak memory of this process in MiB (``peak_mb`` of a result).

    Args:
        device: device of the model: with "cuda" GPU memory is measured, otherwise main memory.
    """
    if device == "cuda":
        return torch.cuda.max_memory_allocated() / 2**20
    with contextlib.suppress(OSError, IndexError):
        # Linux. VmHWM is preferred to getrusage: a process that was started by fork and exec inherits the maximum of
        # getrusage from its parent.
        status = Path("/proc/self/status").read_text(encoding="ascii")
        return int(status.partition("VmHWM:")[2].split()[0]) / 2**10
    bytes_per_unit = 1 if sys.platform == "darwin" else 2**10  # of ru_maxrss
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * bytes_per_unit / 2**20
