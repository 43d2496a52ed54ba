"""Loss, size of attention outputs, and attention to distant keys, by the position in a block of text.

The loss of a model that extrapolates falls or stays constant beyond the training length. If the loss rises, the norms
and the attention of each layer and head show which of them change there.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fairseq_rpe.attention import AttentionPlan
from fairseq_rpe.core.errors import UserError
from fairseq_rpe.data import folder as corpus
from fairseq_rpe.evaluation.empirical_receptive_field import (
    AttentionMassProbe,
    ReceptiveFieldRequest,
    normalised_weights,
    spread_blocks,
)
from fairseq_rpe.evaluation.loading import LabelledCheckpoint, load_model, one_line_errors, read_stream
from fairseq_rpe.evaluation.losses_by_token import losses_by_token
from fairseq_rpe.evaluation.records import BATCH_TOKENS
from fairseq_rpe.evaluation.statistics import clustered_mean
from fairseq_rpe.figures.position_profile import ProfileCurves
from fairseq_rpe.utils.table import Cell, Table, TableRow, csv_text, number_cell

LOSS_COLUMNS = ("encoding", "checkpoint", "first", "last", "tokens", "loss_base2", "standard_error")
ATTENTION_COLUMNS = ("encoding", "checkpoint", "layer", "head", "first", "last", "output_norm", "distant_attention")


def position_buckets(length: int) -> list[tuple[int, int]]:
    """Return ranges of positions, first and last: 1, 2, 3 to 4, 5 to 8, 9 to 16 and so on, up to ``length``.

    A position is the number of tokens that the model sees, from 1. A training length that is a power of two is the end
    of a range.

    Args:
        length: largest position, in tokens.
    """
    ends = [2**power for power in range((length - 1).bit_length())] + [length]
    return [(before + 1, end) for before, end in zip([0, *ends], ends, strict=False)]


class LayerByPosition:
    """Sums of one layer over blocks, by position: of output norms, and of the attention to distant keys.

    Args:
        length: tokens of a block.
        distant: least distance of a distant key, in tokens.

    Attributes:
        rows: number of queries so far, over all blocks.
    """

    def __init__(self, length: int, distant: int) -> None:
        self.length, self.distant, self.rows = length, distant, 0
        self._norms = self._masses = torch.empty(0)  # (H, length) sums over blocks; empty before the first block

    def add_weights(self, weights: Tensor) -> None:
        """Add the attention weights (B, H, n, m) of the last n of m <= length tokens; each row sums to 1."""
        batch, heads, n, m = weights.shape
        if not self.rows:
            self._masses = weights.new_zeros(heads, self.length, dtype=torch.float64)
        self.rows += batch * n
        # column j of row r has the distance m - n + r - j
        masses = weights.tril(m - n - self.distant).sum(-1, dtype=torch.float64)  # (B, H, n)
        self._masses[:, m - n : m] += masses.sum(0)

    def add_outputs(self, outputs: Tensor, before: int) -> None:
        """Add the outputs (B, H, n, D) of the heads at the positions before + 1 … before + n."""
        if not len(self._norms):
            self._norms = outputs.new_zeros(outputs.shape[1], self.length, dtype=torch.float64)
        norms = outputs.double().norm(dim=-1)  # (B, H, n)
        self._norms[:, before : before + norms.shape[2]] += norms.sum(0)

    def means(self, blocks: int) -> tuple[Tensor, Tensor]:
        """Return the mean norm of the outputs, and the mean attention to distant keys, both (H, length) float64."""
        return self._norms.cpu() / blocks, self._masses.cpu() / blocks


class PositionProfileProbe(AttentionMassProbe):
    """Probe that records each query of a block: the norm of the output, and the attention to distant keys.

    Args:
        decoder: decoder of a ``transformer_rpe_lm`` in evaluation mode.
        length: tokens of every block.
        distant: least distance of a distant key, in tokens.
    """

    def __init__(self, decoder: Any, length: int, distant: int) -> None:
        super().__init__(decoder, length, rows=length, epsilons=())
        self.layers: list[Any] = [LayerByPosition(length, distant) for _ in decoder.layers]

    def __call__(self, q: Tensor, k: Tensor, v: Tensor, plan: AttentionPlan, dropout: float = 0.0) -> Tensor:
        """Record and compute attention: q (B, H, n, D), k and v (B, G, m, D) -> (B, H, n, D)."""
        outputs = super().__call__(q, k, v, plan, dropout)
        self.layers[self._layer].add_outputs(outputs, k.shape[2] - q.shape[2])
        return outputs

    def record_rows(self, layer: int, q: Tensor, k: Tensor, v: Tensor, plan: AttentionPlan) -> None:
        """Add a block of queries of one layer: q (B, H, n, D), k and v (B, G, m, D), with all keys that they see."""
        self.layers[layer].add_weights(normalised_weights(q, k, plan))


@dataclass(frozen=True)
class BucketLoss:
    """Loss of the tokens in a range of positions.

    Attributes:
        first: first position of the range.
        last: last position of the range.
        tokens: number of tokens, over all blocks.
        loss_base2: mean loss in bits.
        standard_error: standard error of the mean, clustered by block; None for a single block.
    """

    first: int
    last: int
    tokens: int
    loss_base2: float
    standard_error: float | None


@dataclass(frozen=True)
class PositionProfile:
    """Means over the blocks of one checkpoint, by ranges of positions.

    Attributes:
        label: name of the encoding.
        path: checkpoint file.
        train_length: training length in tokens, the least distance of a distant key.
        losses: losses by range, P of them.
        norms: (layers, H, P) mean norm of the outputs of a head.
        masses: (layers, H, P) mean attention to distant keys, from 0 to 1.
    """

    label: str
    path: Path
    train_length: int
    losses: Sequence[BucketLoss]
    norms: Tensor
    masses: Tensor

    @property
    def base(self) -> int:
        """Index of the range that has the training length, or of the last range if blocks are shorter."""
        return next((i for i, b in enumerate(self.losses) if b.last >= self.train_length), len(self.losses) - 1)

    @property
    def relative_norms(self) -> Tensor:
        """(P,): norms divided by those of the range with the training length; the mean over layers and heads."""
        return (self.norms / self.norms[..., self.base, None]).mean((0, 1))

    def curves(self) -> ProfileCurves:
        """Return the curves of the figure: means over layers and heads."""
        return ProfileCurves(
            train_length=self.train_length,
            positions=[bucket.last for bucket in self.losses],
            losses=[bucket.loss_base2 for bucket in self.losses],
            errors=[bucket.standard_error or 0.0 for bucket in self.losses],
            norms=self.relative_norms.tolist(),
            masses=self.masses.mean((0, 1)).tolist(),
        )


def check_training_lengths(checkpoints: Sequence[LabelledCheckpoint]) -> None:
    """Raise UserError if a checkpoint does not record its training length, the least distance of a distant key."""
    for checkpoint in checkpoints:
        if not checkpoint.train_length:
            raise UserError(
                f"{checkpoint.path} does not record its training length, from which on keys are distant: leave it out"
            )


def measure_position_profile(
    request: ReceptiveFieldRequest, checkpoint: LabelledCheckpoint, length: int
) -> PositionProfile:
    """Measure one checkpoint on evenly spaced blocks of the text.

    Args:
        request: text and number of blocks.
        checkpoint: the checkpoint, which records its training length.
        length: tokens of a block.

    Raises:
        UserError: the checkpoint or the text cannot be used.
    """
    model, task = load_model(checkpoint.path, request, request.data)
    total = corpus.count_tokens(request.data, request.split)
    stream = read_stream(request.data, request.split, task.source_dictionary, total)
    starts = spread_blocks(total, length, request.blocks).numpy()  # (blocks,)
    windows = np.stack([starts, *[np.full_like(starts, length)] * 2], axis=1)  # all targets of each block
    batch_tokens = length * (request.batch_size or max(1, BATCH_TOKENS // length))
    with (
        one_line_errors(f"{checkpoint.label}: measurement failed", None),
        PositionProfileProbe(model.decoder, length, checkpoint.train_length) as probe,
    ):
        losses = losses_by_token(model, stream, windows, batch_tokens, checkpoint.label)
    for layer in probe.layers:
        if layer.rows != request.blocks * length:
            raise UserError(f"{checkpoint.path}: a layer has {layer.rows} queries: report this as a bug")
    bits = losses[starts[:, None] + np.arange(length)] / math.log(2)  # (blocks, length)
    buckets = position_buckets(length)
    means = [torch.stack(pair) for pair in (layer.means(request.blocks) for layer in probe.layers)]
    by_position = torch.stack(means, 1)  # (2, layers, H, length)
    norms, masses = torch.stack([by_position[..., first - 1 : last].mean(-1) for first, last in buckets], -1)
    return PositionProfile(
        label=checkpoint.label,
        path=checkpoint.path,
        train_length=checkpoint.train_length,
        losses=[_bucket_loss(first, last, bits[:, first - 1 : last]) for first, last in buckets],
        norms=norms,
        masses=masses,
    )


def _bucket_loss(first: int, last: int, bits: np.ndarray) -> BucketLoss:
    """Return the loss of a range of positions from its losses in bits, (blocks, positions)."""
    estimate = clustered_mean(bits.sum(1), np.full(len(bits), bits.shape[1]))
    return BucketLoss(first, last, bits.size, estimate.mean, estimate.standard_error)


def losses_csv(profiles: Sequence[PositionProfile]) -> str:
    """Return a CSV row of :data:`LOSS_COLUMNS` for each checkpoint and range of positions."""
    rows = (
        (p.label, p.path, b.first, b.last, b.tokens, b.loss_base2, b.standard_error) for p in profiles for b in p.losses
    )
    return csv_text(LOSS_COLUMNS, rows)


def attention_csv(profiles: Sequence[PositionProfile]) -> str:
    """Return a CSV row of :data:`ATTENTION_COLUMNS` for each checkpoint, layer (from 0), head (from 1) and range."""
    rows = (
        (p.label, p.path, layer, head + 1, b.first, b.last, float(norm), float(mass))
        for p in profiles
        for layer, (norms, masses) in enumerate(zip(p.norms, p.masses, strict=True))
        for head in range(len(norms))
        for b, norm, mass in zip(p.losses, norms[head], masses[head], strict=True)
    )
    return csv_text(ATTENTION_COLUMNS, rows)


def profile_table(profiles: Sequence[PositionProfile]) -> Table:
    """Return a table of encoding and quantity × position: loss, relative norm and attention to distant keys."""
    rows = []
    for profile in profiles:
        quantities: dict[str, list[Cell]] = {
            "loss in bits": [number_cell(bucket.loss_base2, ".2f") for bucket in profile.losses],
            "norm of outputs, relative": [number_cell(norm, ".2f") for norm in profile.relative_norms.tolist()],
            "attention to distant keys": [number_cell(mass, ".2f") for mass in profile.masses.mean((0, 1)).tolist()],
        }
        rows += [TableRow(profile.label, [Cell(name), *cells]) for name, cells in quantities.items()]
    header = ["encoding", "by position", *(_range_text(b.first, b.last) for b in profiles[0].losses)]
    return Table("Loss and attention by position", header, rows)


def _range_text(first: int, last: int) -> str:
    return str(last) if first == last else f"{first}–{last}"
