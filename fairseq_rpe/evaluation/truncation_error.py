"""How far the outputs of a trained model's attention move when a query sees its nearest keys only, beside the bound."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from fairseq_rpe.analysis.truncation_error import losses, window_sizes
from fairseq_rpe.attention import Plan
from fairseq_rpe.attention.reference import scores
from fairseq_rpe.data.folder import check_output
from fairseq_rpe.evaluation.attention_probe import Field
from fairseq_rpe.evaluation.empirical_receptive_field import FieldRequest, through
from fairseq_rpe.evaluation.loading import Subject
from fairseq_rpe.figures.receptive_fields import Lost, truncated
from fairseq_rpe.figures.style import save
from fairseq_rpe.utils.files import atomic_write
from fairseq_rpe.utils.table import Row, Table, csv_text, latex_text, words

COLUMNS = ("delta_max", "delta_mean", "bound_max", "bound_mean", "of_bound_max")


class LayerLoss:
    """δ and its bound over the rows of one layer, at each number of keys in ``sizes`` (J of them)."""

    def __init__(self, sizes: list[int]) -> None:
        self.sizes, self.rows = sizes, 0
        self._most = self._sums = torch.empty(0)

    def add(self, score: Tensor, v: Tensor) -> None:
        """Count the rows of (B, H, n, m) scores and their (B, H, m, D) values."""
        self.rows += score.shape[0] * score.shape[2]
        found = [torch.stack(pair) for pair in losses(score, v, self.sizes)]
        both = torch.stack(found, 1).transpose(2, 3).flatten(3)  # (2, J, H, B·n)
        part = torch.where(both[1] > 0, both[0] / both[1], 0.0)[None]
        most, sums = torch.cat([both, part]).amax(-1), both.sum(-1)
        self._most, self._sums = (
            (torch.maximum(self._most, most), self._sums + sums) if self._sums.numel() else (most, sums)
        )

    @property
    def table(self) -> Tensor:
        """(5, J, H) float64: :data:`COLUMNS`, over rows; the last is the largest part of its bound that a δ is."""
        (delta, bound, part), means = self._most, self._sums / self.rows
        return torch.stack([delta, means[0], bound, means[1], part]).cpu()


class Truncation(Field):
    """A :class:`Field` that measures δ in float64, whatever the model computes in; of any encoding."""

    def __init__(self, decoder: Any, length: int, rows: int) -> None:
        super().__init__(decoder, length, rows, ())
        self.layers = [LayerLoss(window_sizes(length)) for _ in decoder.layers]

    def look(self, layer: int, q: Tensor, k: Tensor, v: Tensor, plan: Plan) -> None:
        self.layers[layer].add(scores(q.double(), k.double(), plan), v.double())


@dataclass(frozen=True)
class Truncated(Lost):
    """What was found in one checkpoint: see :class:`LayerLoss`."""

    path: Path
    values: Sequence[Tensor]


def measure(request: FieldRequest, subject: Subject, length: int, rows: int) -> Truncated:
    """δ and its bound in one checkpoint over blocks from all over the text; of each block the last ``rows`` queries."""
    _, found = through(request, subject, length, lambda decoder: Truncation(decoder, length, rows), rows)
    values = [layer.table for layer in found.layers]
    most = torch.stack([value.amax(-1) for value in values])
    here = (subject.label, subject.train_length, length, found.layers[0].sizes, most[:, 0], most[:, 2])
    return Truncated(*here, subject.path, values)


def report(
    request: FieldRequest, subjects: Sequence[Subject], length: int, rows: int, folder: Path, latex: bool = False
) -> str:
    """Measure each checkpoint and write delta.csv, delta.png and delta.pdf into ``folder``; what to print of it.

    ``latex``: write the table as delta.tex too.

    Raises UserError: the folder cannot be written, or a checkpoint cannot be used.
    """
    files = [folder / f"delta.{end}" for end in ("csv", "png", "pdf", "tex")]
    check_output(folder, [file.name for file in files])
    found = [measure(request, subject, length, rows) for subject in subjects]
    atomic_write(files[0], csv(found))
    save(truncated(found), *files[1:3])
    if latex:
        atomic_write(files[3], latex_text([table(found)]))
    about = f"Cells: largest δ(i, j) of any head and of the last {rows} queries, in brackets its bound; j nearest keys."
    return f"{table(found).markdown()}\n{about}\ntable:  {files[0]}\nfigure: {files[1]}"


def csv(found: Sequence[Truncated]) -> str:
    """Rows for each layer (from 0), head (from 1) and number of keys."""
    rows = (
        [one.label, one.path, layer, head + 1, keys, *value[:, place, head].tolist(), one.length]
        for one in found
        for layer, value in enumerate(one.values)
        for head in range(value.shape[-1])
        for place, keys in enumerate(one.keys)
    )
    return csv_text(("encoding", "checkpoint", "layer", "head", "keys", *COLUMNS, "length"), rows)


def table(found: Sequence[Truncated]) -> Table:
    """Encoding and layer × every second power of two of keys: the largest δ of any head and row, and of the bound."""
    shown = [place for place, keys in enumerate(found[0].keys) if keys.bit_count() == 1 and keys.bit_length() % 2]
    rows = [
        Row(one.label, [words(layer), *(words(f"{delta[p]:.2g} ({bound[p]:.2g})") for p in shown)])
        for one in found
        for layer, (delta, bound) in enumerate(zip(one.delta, one.bound, strict=True))
    ]
    return Table("Output lost", ["encoding", "layer", *(f"j = {found[0].keys[p]}" for p in shown)], rows, words=True)
