"""The empirical receptive field of trained checkpoints on a text: how many of the nearest keys hold their attention."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import torch
from torch import Tensor
from tqdm import tqdm

from fairseq_rpe.analysis.receptive_field import check_epsilons, n_emp, quantised, thinned
from fairseq_rpe.core.errors import UserError
from fairseq_rpe.core.table import Row, Table, csv_text, words
from fairseq_rpe.data import folder as corpus
from fairseq_rpe.evaluation.loading import Subject, load, read_stream
from fairseq_rpe.evaluation.measurements import Overrides
from fairseq_rpe.evaluation.probe import Field, LayerField, bias_alone, measured

_LONGER, _PART = 4, 4  # the default block is 4 training lengths, its last quarter is measured
_BATCH_TOKENS = 2048
_NAMES = ("encoding", "checkpoint", "layer", "head")


@dataclass(frozen=True, kw_only=True)
class FieldRequest:
    """What is measured of each checkpoint: the options of ``fairseq-rpe erf``.

    ``blocks`` of ``length`` tokens, in each the last ``rows`` queries, ``batch_size`` blocks at a time; ``None`` leaves
    it to :meth:`sized` and to the memory. ``epsilons``: the parts of the attention that may be left out.
    """

    data: Path
    subset: str = "test"
    length: int | None = None
    blocks: int = 64
    rows: int | None = None
    epsilons: Sequence[float] = (0.5, 0.1, 0.01)
    batch_size: int | None = None
    use: Overrides = field(default_factory=Overrides)

    def sized(self, train_length: int) -> tuple[int, int]:
        """Tokens of a block and queries measured in it.

        Raises:
            UserError: the data cannot be used, the text does not fill the blocks, or ε is not between 0 and 1.
        """
        check_epsilons(self.epsilons, "--epsilon")
        corpus.check_folder(self.data, self.subset)
        total = corpus.count_tokens(self.data, self.subset)
        length = self.length or min(_LONGER * train_length, total // self.blocks)
        if length < 1 or total < self.blocks * length:
            raise UserError(
                f"{self.data}/{self.subset} has {total} tokens, less than {self.blocks} blocks of {max(length, 1)}: "
                "use more text, a smaller --length or fewer --blocks"
            )
        rows = self.rows or max(1, length // _PART)
        if rows > length:
            raise UserError(f"--rows {rows} is more than a block of {length} tokens: lower it")
        return length, rows


@dataclass(frozen=True)
class Measured:
    """The field of one checkpoint, and what its bias alone would give."""

    subject: Subject
    field: Field
    blocks: int
    bias: list[LayerField] | None

    @property
    def label(self) -> str:
        return self.subject.label

    @property
    def train_length(self) -> int:
        return self.subject.train_length

    @property
    def mass(self) -> Tensor:
        """(layers, heads, length) float64 on the CPU: mean attention by distance."""
        return _masses(self.field.layers)

    @property
    def bias_mass(self) -> Tensor | None:
        """The same of the bias alone."""
        return None if self.bias is None else _masses(self.bias)

    def each(self) -> Iterator[tuple[list[object], int, int]]:
        """For each layer (from 0) and head (from 1, as in TensorBoard): the cells that name it, and its indices."""
        for layer, heads in enumerate(self.mass):
            for head in range(len(heads)):
                yield [self.label, self.subject.path, layer, head + 1], layer, head


def _masses(layers: Sequence[LayerField]) -> Tensor:
    return torch.stack([layer.mass for layer in layers]).cpu()


def measure(request: FieldRequest, subject: Subject, length: int, rows: int) -> Measured:
    """The field of one checkpoint over blocks from all over the text, ``length`` and ``rows`` as they were sized."""
    model, task = load(subject.path, request.use, request.data)
    total = corpus.count_tokens(request.data, request.subset)
    stream = read_stream(request.data, request.subset, task.source_dictionary, total)
    # Blocks from all over the text, where there are more than are measured.
    starts = torch.arange(request.blocks) * (total // length) // request.blocks * length
    inputs = torch.stack([stream[start : start + length] for start in starts.tolist()])
    size = request.batch_size or max(1, _BATCH_TOKENS // length)
    device = next(model.parameters()).device
    bar = tqdm(total=request.blocks, desc=subject.label, unit=" blocks", disable=None, leave=False)
    with torch.no_grad(), bar, measured(model.decoder, length, rows, request.epsilons) as found:
        for part in inputs.split(size):
            model.decoder(part.to(device), features_only=True)
            bar.update(len(part))
    wanted = request.blocks * rows
    for layer in found.layers:
        if layer.rows != wanted:
            raise UserError(f"{subject.path}: {layer.rows} of {wanted} rows were measured: report this")
    return Measured(subject, found, request.blocks, bias_alone(model.decoder, length, rows, request.epsilons))


def fields_csv(found: Sequence[Measured], epsilons: Sequence[float]) -> str:
    """n_emp of every layer, head and ε: mean and median over rows; of the rows' mean curve; of the bias alone."""
    values = ("epsilon", "n_emp_mean", "n_emp_median", "n_emp_of_mean", "n_bias_mean", "length", "rows", "blocks")
    rows = []
    for one in found:
        of_mean = n_emp(one.mass, epsilons)
        for names, layer, head in one.each():
            own = one.field.layers[layer]
            for e, epsilon in enumerate(epsilons):
                bias = None if one.bias is None else float(one.bias[layer].mean[e, head])
                here = [float(own.mean[e, head]), float(own.median[e, head]), int(of_mean[e, layer, head]), bias]
                rows.append([*names, epsilon, *here, own.length, one.field.rows, one.blocks])
    return csv_text((*_NAMES, *values), rows)


def curves_csv(found: Sequence[Measured]) -> str:
    """Attention by distance, and within it (the query and that many keys before it), thinned at long distances."""
    rows = []
    for one in found:
        mass = one.mass
        within = mass.cumsum(-1)
        for names, layer, head in one.each():
            for d in thinned(mass.shape[-1]):
                rows.append([*names, d, float(mass[layer, head, d]), float(within[layer, head, d])])
    return csv_text((*_NAMES, "distance", "mass", "within"), rows)


def quantised_csv(found: Sequence[Measured]) -> str:
    """The paper's quantised curve of every layer and head."""
    rows = []
    for one in found:
        epsilons, part = quantised(one.mass)
        for names, layer, head in one.each():
            curve = zip(epsilons.tolist(), part[layer, head].tolist(), strict=True)
            rows += [[*names, epsilon, value] for epsilon, value in curve]
    return csv_text((*_NAMES, "epsilon", "n_over_length"), rows)


def table(found: Sequence[Measured], epsilons: Sequence[float]) -> Table:
    """Encoding and layer × ε: mean of n_emp over rows, then over heads, with the least and the most of a head."""
    rows = []
    for one in found:
        layers = [(str(number), layer.mean) for number, layer in enumerate(one.field.layers)]
        if one.bias is not None:
            layers.append(("bias alone", torch.cat([layer.mean for layer in one.bias], dim=1)))
        for name, heads in layers:
            cells = [f"{n.mean():.1f} ({n.min():.1f} to {n.max():.1f})" for n in heads]
            rows.append(Row(one.label, [words(name), *map(words, cells)]))
    return Table("Nearest keys", ["encoding", "layer", *(f"ε = {e:g}" for e in epsilons)], rows, words=True)
