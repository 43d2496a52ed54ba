"""Output error of trained attention that is truncated to the nearest keys, and its bound."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from fairseq_rpe.analysis.empirical_receptive_field import truncation_errors, window_sizes
from fairseq_rpe.attention import AttentionPlan
from fairseq_rpe.attention.reference import attention_scores
from fairseq_rpe.data.folder import check_output
from fairseq_rpe.evaluation.empirical_receptive_field import AttentionMassProbe, ReceptiveFieldRequest, run_probe
from fairseq_rpe.evaluation.loading import LabelledCheckpoint
from fairseq_rpe.figures.receptive_fields import TruncationErrors, draw_truncation_errors
from fairseq_rpe.figures.style import save
from fairseq_rpe.utils.files import atomic_write
from fairseq_rpe.utils.table import Table, TableRow, csv_text, join_latex, text_cell

COLUMNS = ("delta_max", "delta_mean", "bound_max", "bound_mean", "of_bound_max")


class LayerTruncationError:
    """Output error δ and its bound, over the rows of one layer.

    Args:
        sizes: J numbers of nearest keys.
    """

    def __init__(self, sizes: list[int]) -> None:
        self.sizes, self.rows = sizes, 0
        self._max = self._sums = torch.empty(0)

    def add(self, score: Tensor, v: Tensor) -> None:
        """Add the rows of scores (B, H, n, m) with values (B, H, m, D)."""
        self.rows += score.shape[0] * score.shape[2]
        pairs = [torch.stack(pair) for pair in truncation_errors(score, v, self.sizes)]
        errors = torch.stack(pairs, 1).transpose(2, 3).flatten(3)  # (2, J, H, B·n): δ and bound
        ratio = torch.where(errors[1] > 0, errors[0] / errors[1], 0.0)[None]
        maxima, sums = torch.cat([errors, ratio]).amax(-1), errors.sum(-1)
        self._max, self._sums = (
            (torch.maximum(self._max, maxima), self._sums + sums) if self._sums.numel() else (maxima, sums)
        )

    @property
    def table(self) -> Tensor:
        """(5, J, H) float64: :data:`COLUMNS` over rows; the last is the largest ratio of a δ to its bound."""
        (delta, bound, ratio), means = self._max, self._sums / self.rows
        return torch.stack([delta, means[0], bound, means[1], ratio]).cpu()


class TruncationErrorProbe(AttentionMassProbe):
    """Probe that measures δ, for any encoding, in float64 whatever the dtype of the model."""

    def __init__(self, decoder: Any, length: int, rows: int) -> None:
        super().__init__(decoder, length, rows, ())
        self.layers: list[Any] = [LayerTruncationError(window_sizes(length)) for _ in decoder.layers]

    def record_rows(self, layer: int, q: Tensor, k: Tensor, v: Tensor, plan: AttentionPlan) -> None:
        """Add the truncation errors of a block of queries of one layer."""
        self.layers[layer].add(attention_scores(q.double(), k.double(), plan), v.double())


@dataclass(frozen=True)
class CheckpointTruncationError(TruncationErrors):
    """Truncation errors of one checkpoint.

    Attributes:
        path: checkpoint file.
        values: (5, J, H) of each layer, see :attr:`LayerTruncationError.table`.
    """

    path: Path
    values: Sequence[Tensor]


def measure_truncation_error(
    request: ReceptiveFieldRequest, checkpoint: LabelledCheckpoint, length: int, rows: int
) -> CheckpointTruncationError:
    """Measure δ and its bound in one checkpoint, on evenly spaced blocks of the text.

    Args:
        request: text and number of blocks.
        checkpoint: the checkpoint.
        length: tokens of a block.
        rows: number of measured queries, the last of each block.
    """
    _, probe = run_probe(request, checkpoint, length, lambda decoder: TruncationErrorProbe(decoder, length, rows), rows)
    values = [layer.table for layer in probe.layers]
    maxima = torch.stack([value.amax(-1) for value in values])  # (layers, 5, J): over heads
    return CheckpointTruncationError(
        checkpoint.label,
        checkpoint.train_length,
        length,
        probe.layers[0].sizes,
        maxima[:, 0],
        maxima[:, 2],
        checkpoint.path,
        values,
    )


def write_truncation_report(
    request: ReceptiveFieldRequest,
    checkpoints: Sequence[LabelledCheckpoint],
    length: int,
    rows: int,
    folder: Path,
    latex: bool = False,
) -> str:
    """Measure each checkpoint and write delta.csv, delta.png and delta.pdf.

    Args:
        request: text and number of blocks.
        checkpoints: the checkpoints.
        length: tokens of a block.
        rows: number of measured queries, the last of each block.
        folder: output folder.
        latex: whether to write the table as delta.tex, too.

    Returns:
        The table and the names of the files, to be printed.

    Raises:
        UserError: the folder cannot be written, or a checkpoint cannot be used.
    """
    files = [folder / f"delta.{end}" for end in ("csv", "png", "pdf", "tex")]
    check_output(folder, [file.name for file in files])
    errors = [measure_truncation_error(request, checkpoint, length, rows) for checkpoint in checkpoints]
    atomic_write(files[0], csv(errors))
    save(draw_truncation_errors(errors), *files[1:3])
    if latex:
        atomic_write(files[3], join_latex([table(errors)]))
    about = f"Cells: largest δ(i, j) of any head and of the last {rows} queries, in brackets its bound; j nearest keys."
    return f"{table(errors).to_markdown()}\n{about}\ntable:  {files[0]}\nfigure: {files[1]}"


def csv(errors: Sequence[CheckpointTruncationError]) -> str:
    """Return a CSV row for each layer (from 0), head (from 1) and number of keys."""
    rows = (
        [error.label, error.path, layer, head + 1, keys, *value[:, index, head].tolist(), error.length]
        for error in errors
        for layer, value in enumerate(error.values)
        for head in range(value.shape[-1])
        for index, keys in enumerate(error.keys)
    )
    return csv_text(("encoding", "checkpoint", "layer", "head", "keys", *COLUMNS, "length"), rows)


def table(errors: Sequence[CheckpointTruncationError]) -> Table:
    """Return a table of encoding and layer × number of keys: the largest δ of any head and row, and its bound."""
    # every second power of two
    columns = [index for index, keys in enumerate(errors[0].keys) if keys.bit_count() == 1 and keys.bit_length() % 2]
    rows = [
        TableRow(error.label, [text_cell(layer), *(text_cell(f"{delta[c]:.2g} ({bound[c]:.2g})") for c in columns)])
        for error in errors
        for layer, (delta, bound) in enumerate(zip(error.delta, error.bound, strict=True))
    ]
    head = ["encoding", "layer", *(f"j = {errors[0].keys[c]}" for c in columns)]
    return Table("Output error", head, rows, is_text=True)
