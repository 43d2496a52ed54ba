"""Loss over blocks of text by the position in the block, with the logits of a few tokens and types at a time.

A block has positions 0 … L-1; the target at position p is predicted from p + 1 inputs. The loss of a target y with
features x and output weights W (V, C) is log Σ_v exp(W_v·x) - W_y·x in nats. The sum over v is taken along from tile to
tile of the vocabulary with its maximum, so that no more than one tile of logits ever exists.
"""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from ..core import UserError
from .sliding import losses

# Tokens (on a CPU for each thread) and types of a tile: what a core's cache holds, and 128 MiB on a GPU.
TILES = {"cpu": (128, 1024), "cuda": (2048, 16384)}


@torch.no_grad()
def target_losses(x: Tensor, weight: Tensor, target: Tensor) -> Tensor:
    """``F.cross_entropy(x @ weight.T, target, reduction="none")`` in float32, (N,), without the (N, V) logits.

    Args:
        x: (N, C) features. weight: (V, C). target: (N,) int64.
    """
    rows, columns = TILES.get(x.device.type, TILES["cpu"])
    if x.device.type == "cpu":
        rows *= torch.get_num_threads()
    found = [x.new_empty(0, dtype=torch.float32)]
    for xb, tb in zip(x.split(rows), target.split(rows), strict=True):
        top = torch.full((len(xb), 1), -math.inf, device=x.device)
        total = torch.zeros_like(top)
        for part in weight.split(columns):
            logits = F.linear(xb, part).float()
            highest = torch.maximum(top, logits.amax(-1, keepdim=True))
            total = total * (top - highest).exp() + logits.sub_(highest).exp_().sum(-1, keepdim=True)
            top = highest
        own = (xb.float() * weight[tb].float()).sum(-1)
        found.append((top + total.log())[:, 0] - own)
    return torch.cat(found)


@dataclass(frozen=True)
class Buckets:
    """Mean loss in bits of the tokens at positions up to ``upto`` (inclusive) and beyond the bucket before."""

    upto: list[int]
    loss_base2: list[float]
    tokens: list[int]


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
        kept, decoder = targets.ne(self.pad), self.model.decoder
        found = torch.zeros(targets.shape, device=targets.device)
        if decoder.adaptive_softmax is not None:
            found[kept] = losses(self.model, inputs, targets).view(targets.shape)[kept]
        else:
            features = decoder(inputs, features_only=True)[0]
            found[kept] = target_losses(features[kept], decoder.output_projection.weight, targets[kept])
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
        total = float(self._nats.sum())
        if not math.isfinite(total):
            raise UserError("the model gives a target token probability 0 or NaN: its perplexity is not defined")
        return total / self.tokens / math.log(2)

    def buckets(self) -> Buckets:
        """The loss at positions 0, 1, 2 … 3, 4 … 7 and so on to the end of a full block."""
        length = len(self._nats)
        edges = [0, *(1 << k for k in range((length - 1).bit_length())), length]
        sizes = [b - a for a, b in itertools.pairwise(edges)]
        nats, count = (torch.stack([p.sum() for p in part.split(sizes)]) for part in (self._nats, self._count))
        return Buckets([b - 1 for b in edges[1:]], (nats / count / math.log(2)).tolist(), count.tolist())
