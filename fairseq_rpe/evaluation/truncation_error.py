"""Output error of trained attention that is truncated to the nearest keys, and its bound."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from fairseq_rpe.analysis.empirical_receptive_field import truncation_errors, window_sizes
from fairseq_rpe.attention import AttentionPlan
from fairseq_rpe.attention.key_heads import repeat_key_heads
from fairseq_rpe.attention.reference import attention_scores
from fairseq_rpe.core.errors import UserError
from fairseq_rpe.data.folder import check_output
from fairseq_rpe.evaluation.empirical_receptive_field import AttentionMassProbe, ReceptiveFieldRequest, run_probe
from fairseq_rpe.evaluation.loading import LabelledCheckpoint
from fairseq_rpe.figures.receptive_fields import TruncationErrors, draw_truncation_errors
from fairseq_rpe.figures.style import save
from fairseq_rpe.utils.files import atomic_write
from fairseq_rpe.utils.table import Table, TableRow, csv_text, join_latex, text_cell

# Statistics over the measured queries: largest and mean δ and bound, and the largest δ / bound of a query.
COLUMNS = ("delta_max", "delta_mean", "bound_max", "bound_mean", "of_bound_max")


class LayerTruncationError:
    """Output error δ and its bound in one layer, over the measured queries of all blocks.

    Args:
        sizes: J numbers of nearest keys.

    Attributes:
        sizes: J numbers of nearest keys.
        rows: number of measured queries so far, over all blocks.
    """

    def __init__(self, sizes: list[int]) -> None:
        self.sizes, self.rows = sizes, 0
        self._maxima = torch.empty(0)  # (3, J, H) largest δ, bound and δ / bound; empty before the first block
        self._sums = torch.empty(0)  # (2, J, H) sums of δ and of the bound; empty before the first block

    def add(self, score: Tensor, v: Tensor) -> None:
        """Add the queries of one attention call.

        Args:
            score: (B, H, n, m) attention scores of the last n of m tokens.
            v: (B, H, m, D) values.
        """
        pairs = [torch.stack(pair) for pair in truncation_errors(score, v, self.sizes)]  # J × (2, B, H, n)
        errors = torch.stack(pairs, 1)  # (2, J, B, H, n): δ and bound for each number of keys
        errors = errors.transpose(2, 3).flatten(3)  # (2, J, H, B·n)
        delta, bound = errors
        ratio = torch.where(bound > 0, delta / bound, 0.0)  # a query without far keys has δ = bound = 0
        maxima, sums = torch.stack([delta, bound, ratio]).amax(-1), errors.sum(-1)
        if self.rows:
            maxima, sums = torch.maximum(self._maxima, maxima), self._sums + sums
        self._maxima, self._sums = maxima, sums
        self.rows += score.shape[0] * score.shape[2]

    @property
    def statistics(self) -> Tensor:
        """(5, J, H) float64: the statistics :data:`COLUMNS` for each number of keys and head."""
        delta_max, bound_max, ratio_max = self._maxima
        delta_mean, bound_mean = self._sums / self.rows
        return torch.stack([delta_max, delta_mean, bound_max, bound_mean, ratio_max]).cpu()


class TruncationErrorProbe(AttentionMassProbe):
    """Probe that measures δ, for any encoding, in float64 whatever the dtype of the model.

    Args:
        decoder: decoder of a ``transformer_rpe_lm`` in evaluation mode.
        length: tokens of every block.
        rows: number of queries to measure, the last of each block.
    """

    def __init__(self, decoder: Any, length: int, rows: int) -> None:
        super().__init__(decoder, length, rows, epsilons=())
        self.layers: list[Any] = [LayerTruncationError(window_sizes(length)) for _ in decoder.layers]

    def record_rows(self, layer: int, q: Tensor, k: Tensor, v: Tensor, plan: AttentionPlan) -> None:
        """Add the truncation errors of some queries of one layer: q (B, H, n, D), k and v (B, G, m, D).

        Raises:
            UserError: the layer has a null logit, so that attention is no mean of values.
        """
        if plan.null_logit is not None:
            raise UserError("δ compares means of values, and null_logit leaves a part of the weights out: drop --delta")
        values = repeat_key_heads(v, q.shape[1]).double()
        self.layers[layer].add(attention_scores(q.double(), k.double(), plan), values)


@dataclass(frozen=True)
class CheckpointTruncationError(TruncationErrors):
    """Truncation errors of one checkpoint.

    Attributes:
        path: checkpoint file.
        values: (5, J, H) of each layer, see :attr:`LayerTruncationError.statistics`.
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
        rows: number of measured queries in each block, its last ones.

    Raises:
        UserError: the checkpoint or the text cannot be used.
    """
    _, probe = run_probe(request, checkpoint, length, lambda decoder: TruncationErrorProbe(decoder, length, rows), rows)
    values = [layer.statistics for layer in probe.layers]
    largest = torch.stack([value.amax(-1) for value in values])  # (layers, 5, J): over heads
    return CheckpointTruncationError(
        label=checkpoint.label,
        train_length=checkpoint.train_length,
        length=length,
        keys=probe.layers[0].sizes,
        delta=largest[:, COLUMNS.index("delta_max")],
        bound=largest[:, COLUMNS.index("bound_max")],
        path=checkpoint.path,
        values=values,
    )


def write_truncation_report(
    request: ReceptiveFieldRequest,
    checkpoints: Sequence[LabelledCheckpoint],
    length: int,
    rows: int,
    folder: Path,
    latex: bool = False,
) -> str:
    """Measure each checkpoint and write delta.csv, delta.png, delta.pdf and, on request, delta.tex.

    Args:
        request: text and number of blocks.
        checkpoints: the checkpoints.
        length: tokens of a block.
        rows: number of measured queries in each block, its last ones.
        folder: output folder.
        latex: whether to write the table as delta.tex, too.

    Returns:
        The table and the names of the files, to be printed.

    Raises:
        UserError: the folder cannot be written, or a checkpoint cannot be used.
    """
    csv_path, png_path, pdf_path, tex_path = (folder / f"delta.{suffix}" for suffix in ("csv", "png", "pdf", "tex"))
    # Before the measurement, which takes minutes; delta.tex is checked even if it is not written.
    check_output(folder, [path.name for path in (csv_path, png_path, pdf_path, tex_path)])
    errors = [measure_truncation_error(request, checkpoint, length, rows) for checkpoint in checkpoints]
    table = truncation_table(errors)
    atomic_write(csv_path, truncation_csv(errors))
    save(draw_truncation_errors(errors), png_path, pdf_path)
    if latex:
        atomic_write(tex_path, join_latex([table]))
    about = f"Cells: largest δ(i, j) of any head and of the last {rows} queries, in brackets its bound; j nearest keys."
    return f"{table.to_markdown()}\n{about}\ntable:  {csv_path}\nfigure: {png_path}"


def truncation_csv(errors: Sequence[CheckpointTruncationError]) -> str:
    """Return a CSV row for each layer (from 0), head (from 1) and number of keys, with the columns :data:`COLUMNS`."""
    rows = (
        [error.label, error.path, layer, head + 1, keys, *statistics[:, index, head].tolist(), error.length]
        for error in errors
        for layer, statistics in enumerate(error.values)
        for head in range(statistics.shape[-1])
        for index, keys in enumerate(error.keys)
    )
    return csv_text(("encoding", "checkpoint", "layer", "head", "keys", *COLUMNS, "length"), rows)


def truncation_table(errors: Sequence[CheckpointTruncationError]) -> Table:
    """Return a table of encoding and layer × number of keys: the largest δ of any head and query, and its bound."""
    # Only some numbers of keys, so that the table fits a page.
    columns = [index for index, keys in enumerate(errors[0].keys) if _is_power_of_four(keys)]
    rows = [
        TableRow(error.label, [text_cell(layer), *(text_cell(f"{delta[c]:.2g} ({bound[c]:.2g})") for c in columns)])
        for error in errors
        for layer, (delta, bound) in enumerate(zip(error.delta, error.bound, strict=True))
    ]
    header = ["encoding", "layer", *(f"j = {errors[0].keys[c]}" for c in columns)]
    return Table("Output error", header, rows, is_text=True)


def _is_power_of_four(number: int) -> bool:
    return number.bit_count() == 1 and number.bit_length() % 2 == 1
