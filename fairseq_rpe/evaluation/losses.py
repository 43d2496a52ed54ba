"""Losses of a trained model's targets, and their mean over blocks of text by the position in the block.

A block has positions 0 … L-1; the target at position p is predicted from p + 1 inputs.
"""

import itertools
import math
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


class BlockLoss:
    """Adds up losses in float64, one sum for each position of blocks of at most ``length`` tokens.

    Args:
        model: a ``transformer_rpe_lm`` in evaluation mode.
        length: tokens in a full block.
        pad: the number of the padding symbol.
    """

    def __init__(self, model: Any, length: int, pad: int) -> None:
        self.model, self.pad = model, pad
        device = next(model.parameters()).device
        self._nats = torch.zeros(length, dtype=torch.float64, device=device)
        self._count = torch.zeros(length, dtype=torch.int64, device=device)

    @torch.no_grad()
    def add(self, inputs: Tensor, targets: Tensor) -> None:
        """Score blocks: inputs and targets (B, n), rows padded at their end."""
        inputs, targets = inputs.to(self._nats.device), targets.to(self._nats.device)
        kept = targets.ne(self.pad)
        found = torch.zeros(targets.shape, device=targets.device)
        features = self.model.decoder(inputs, features_only=True)[0]
        found[kept] = _feature_losses(self.model, features[kept], targets[kept])
        n = targets.shape[1]
        self._nats[:n] += found.double().sum(0)
        self._count[:n] += kept.sum(0)

    @property
    def tokens(self) -> int:
        """Targets scored."""
        return int(self._count.sum())

    def loss_base2(self) -> float:
        """Bits per token.

        Raises:
            UserError: a target has probability 0 or NaN.
        """
        return defined(self._nats.sum()) / self.tokens / math.log(2)

    def buckets(self) -> Buckets:
        """The loss at positions 0, 1, 2 … 3, 4 … 7 and so on to the end of a full block."""
        length = len(self._nats)
        edges = [0, *(1 << k for k in range((length - 1).bit_length())), length]
        sizes = [b - a for a, b in itertools.pairwise(edges)]
        nats, count = (torch.stack([p.sum() for p in part.split(sizes)]) for part in (self._nats, self._count))
        return Buckets(*map(tuple, ([b - 1 for b in edges[1:]], (nats / count / math.log(2)).tolist(), count.tolist())))
