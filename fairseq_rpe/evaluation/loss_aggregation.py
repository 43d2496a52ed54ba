"""Losses of every token of a split, added up to a result; whose losses they are does not matter here."""

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

MOST_BITS = sys.float_info.max_exp  # per token; the perplexity of more is no float


def result_of(key: TextKey, nats: Tensor, count: Tensor) -> TextResult:
    """The perplexity of sums of losses in nats (length,) float64 and targets in them (length,), by position.

    Raises UserError: a target has probability 0 or NaN, or the perplexity is no number.
    """
    tokens = int(count.sum())
    loss = defined(nats.sum()) / tokens / math.log(2)
    ppl = float(torch.tensor(loss, dtype=torch.float64).exp2())
    if loss >= MOST_BITS:
        raise too_large(loss)
    reached = int(count.nonzero().max()) + 1  # documents in one row may all be shorter than the row
    found = buckets(nats[:reached], count[:reached])
    return TextResult(**vars(key), tokens=tokens, loss_base2=loss, ppl=ppl, positions_loss=found)


def check_scored(found: TextResult, tokens: int) -> None:
    """Raises UserError: other than all ``tokens`` of the split were scored."""
    if found.tokens != tokens:
        raise UserError(
            f"length {found.length}: {found.tokens} of {tokens} tokens were scored, so the result is not kept: "
            "the model must accept this length, and the data hold no padding"
        )


def with_units(found: TextResult, units: Units | None) -> TextResult:
    """A result with its loss in units that do not depend on the tokenizer, where they are known."""
    if units is None:
        return found
    bits = found.loss_base2
    return replace(found, bits_per_byte=units.bits_per_byte(bits), word_ppl=units.word_ppl(bits))


def buckets(nats: Tensor, count: Tensor) -> Buckets:
    """The loss at positions 0, 1, 2 … 3, 4 … 7 and so on to the end of a full block."""
    edges = [0, *(1 << k for k in range((len(nats) - 1).bit_length())), len(nats)]
    sizes = [b - a for a, b in itertools.pairwise(edges)]
    nats, count = (torch.stack([p.sum() for p in part.split(sizes)]) for part in (nats, count))
    return Buckets(*map(tuple, ([b - 1 for b in edges[1:]], (nats / count / math.log(2)).tolist(), count.tolist())))


def defined(nats: Tensor) -> float:
    """A sum of losses, refused where a target has probability 0 or NaN."""
    if not torch.isfinite(nats):
        raise UserError("the model gives a target token probability 0 or NaN: its perplexity is not defined")
    return float(nats)


def too_large(loss: float) -> UserError:
    """Of a loss in bits per token whose perplexity is beyond any float."""
    return UserError(
        f"the perplexity is too large for a number, with a loss of {loss:.0f} bits per token: "
        "the model has not learned, train it with a smaller --lr"
    )


def peak_mb(device: str) -> float:
    """MiB: the most that this process has had in memory so far; on a GPU, of the GPU's."""
    if device == "cuda":
        return torch.cuda.max_memory_allocated() / 2**20
    with contextlib.suppress(OSError, IndexError):
        # not getrusage: after an exec it starts from what the parent had
        status = Path("/proc/self/status").read_text(encoding="ascii")
        return int(status.partition("VmHWM:")[2].split()[0]) / 2**10
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / (2**20 if sys.platform == "darwin" else 2**10)
