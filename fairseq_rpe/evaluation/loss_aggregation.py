"""Aggregates per-token losses of a split into a result, independently of the model; measures the peak memory."""

import contextlib
import itertools
import math
import resource
import sys
from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor

from fairseq_rpe.core.errors import UserError
from fairseq_rpe.data.folder import Units
from fairseq_rpe.evaluation.records import Buckets, TextKey, TextResult

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
        raise UserError(
            f"length {result.length}: {result.tokens} of {tokens} tokens were scored, so the result is not stored: "
            "use a length that the model accepts and data without padding"
        )


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
