"""Losses of a trained model's targets, and their mean over blocks of text by the position in the block.

A block has positions 0 … L-1; the target at position p is predicted from p + 1 inputs.
"""

import itertools
import math
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor

from ..core import UserError
from ..modules.cross_entropy import target_losses
from .results import Buckets

# fairseq's incremental state: keys, values and padding by layer
Cache = dict[str, dict[str, Tensor]]
ADAPTIVE = 512  # targets of an adaptive softmax whose scores are in memory at a time


def losses(model: Any, inputs: Tensor, targets: Tensor, state: Cache | None = None) -> Tensor:
    """Negative log-likelihoods in nats (B·s,) of targets (B, s), predicted at the last s of inputs (B, n)."""
    features = model.decoder(inputs, incremental_state=state, features_only=True)[0][:, -targets.shape[1] :]
    return _feature_losses(model, features.flatten(0, 1), targets.flatten())


def _feature_losses(model: Any, features: Tensor, targets: Tensor) -> Tensor:
    """The same (N,) from features (N, C)."""
    decoder = model.decoder
    if decoder.adaptive_softmax is None:
        return target_losses(features, decoder.output_projection.weight, targets)
    found = []
    for x, y in zip(features.split(ADAPTIVE), targets.split(ADAPTIVE), strict=True):
        scores = model.get_normalized_probs((x[None], None), log_probs=True, sample={"target": y[None].contiguous()})
        found.append(-scores.float().gather(-1, y[None, :, None]).flatten())
    return torch.cat(found)


def defined(nats: Tensor) -> float:
    """A sum of losses, refused where a target has probability 0 or NaN."""
    if not torch.isfinite(nats):
        raise UserError("the model gives a target token probability 0 or NaN: its perplexity is not defined")
    return float(nats)


@torch.no_grad()
def by_position(
    model: Any, batches: Iterable[tuple[Tensor, Tensor]], length: int, pad: int, tick: Callable[[int], Any]
) -> tuple[Tensor, Tensor]:
    """Sums of losses in nats (length,) float64, and the targets in them (length,), at each position of a block.

    ``batches``: inputs and targets (B, n), n <= length, rows padded at their end with the symbol ``pad``; ``tick`` is
    told how many targets each has. ``model``: a ``transformer_rpe_lm`` in evaluation mode.
    """
    device = next(model.parameters()).device
    nats = torch.zeros(length, dtype=torch.float64, device=device)
    count = torch.zeros(length, dtype=torch.int64)
    for inputs, targets in batches:
        kept = targets.ne(pad)
        inputs, targets = inputs.to(device), targets.to(device)
        found = torch.zeros(targets.shape, device=device)
        features = model.decoder(inputs, features_only=True)[0]
        found[kept] = _feature_losses(model, features[kept], targets[kept])
        nats[: targets.shape[1]] += found.double().sum(0)
        count[: targets.shape[1]] += kept.sum(0)
        tick(int(kept.sum()))
    return nats.cpu(), count


def buckets(nats: Tensor, count: Tensor) -> Buckets:
    """The loss at positions 0, 1, 2 … 3, 4 … 7 and so on to the end of a full block."""
    edges = [0, *(1 << k for k in range((len(nats) - 1).bit_length())), len(nats)]
    sizes = [b - a for a, b in itertools.pairwise(edges)]
    nats, count = (torch.stack([p.sum() for p in part.split(sizes)]) for part in (nats, count))
    return Buckets(*map(tuple, ([b - 1 for b in edges[1:]], (nats / count / math.log(2)).tolist(), count.tolist())))
