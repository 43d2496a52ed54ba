"""The empirical receptive field of trained checkpoints on a text: how many of the nearest keys hold their attention."""

import itertools
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor

from fairseq_rpe.analysis.empirical_receptive_field import check_epsilons, n_emp, quantised, thinned
from fairseq_rpe.core.errors import UserError
from fairseq_rpe.data import folder as corpus
from fairseq_rpe.evaluation.attention_probe import Field, LayerField, bias_alone
from fairseq_rpe.evaluation.loading import Subject, load, read_stream
from fairseq_rpe.evaluation.records import BATCH_TOKENS, Overrides
from fairseq_rpe.figures.receptive_fields import Mass
from fairseq_rpe.utils.progress import Progress
from fairseq_rpe.utils.table import Row, Table, csv_text, words

Found = TypeVar("Found", bound=Field)
_LONGER, _PART = 4, 4  # the default block is 4 training lengths, its last quarter is measured


@dataclass(frozen=True, kw_only=True)
class FieldRequest(Overrides):
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

    def sized(self, train_length: int) -> tuple[int, int]:
        """Tokens of a block and queries measured in it.

        Raises UserError if the data cannot be used, the text does not fill the blocks, or ε is not between 0 and 1.
        """
        check_epsilons(self.epsilons, "--epsilon")
        corpus.check_text(self.data, self.subset)
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
class Measured(Mass):
    """The fields of the layers of one checkpoint, and what their biases alone would give."""

    path: Path
    blocks: int
    rows: int
    layers: Sequence[LayerField]
    biases: Sequence[LayerField] | None


def measure(request: FieldRequest, subject: Subject, length: int, rows: int) -> Measured:
    """The field of one checkpoint over blocks from all over the text, ``length`` and ``rows`` as they were sized."""
    decoder, found = through(
        request, subject, length, lambda decoder: Field(decoder, length, rows, request.epsilons), rows
    )
    biases = bias_alone(decoder, length, rows, request.epsilons)
    mass, bias_mass = (torch.stack([one.mass for one in of]).cpu() if of else None for of in (found.layers, biases))
    here = (subject.path, request.blocks, rows, found.layers, biases)
    series = None if biases is None else series_weights(decoder, length)
    return Measured(subject.label, subject.train_length, mass, bias_mass, *here, series=series)


@torch.no_grad()
def series_weights(decoder: Any, length: int) -> Tensor:
    """exp(bias) of every layer and head by distance, which the theoretical receptive field sums up.

    Args:
        decoder: a decoder whose encodings all have a bias.
        length: the number of distances, 0 … length - 1.

    Returns:
        (layers, heads, length) float64; each head's weights sum to 1.
    """
    encodings = [decoder.encoding_of(layer) for layer in range(len(decoder.layers))]
    # softmax: exp of a large bias does not overflow, and TRF does not depend on the sum
    return torch.stack([encoding.bias_profile(length).double().softmax(-1) for encoding in encodings]).cpu()


def through(
    request: FieldRequest, subject: Subject, length: int, make: Callable[[Any], Found], rows: int
) -> tuple[Any, Found]:
    """The decoder of a checkpoint, and what a probe that is made for it found in the blocks of the text."""
    model, task = load(subject.path, request, request.data)
    total = corpus.count_tokens(request.data, request.subset)
    stream = read_stream(request.data, request.subset, task.source_dictionary, total)
    starts = torch.arange(request.blocks) * (total // length) // request.blocks * length
    inputs = torch.stack([stream[start : start + length] for start in starts.tolist()])
    device = next(model.parameters()).device
    bar = Progress(subject.label, "blocks", request.blocks)
    with torch.no_grad(), bar, make(model.decoder) as found:
        for part in inputs.split(request.batch_size or max(1, BATCH_TOKENS // length)):
            model.decoder(part.to(device), features_only=True)
            bar.update(len(part))
    wanted = request.blocks * rows
    for layer in found.layers:
        if layer.rows != wanted:
            raise UserError(f"{subject.path}: {layer.rows} of {wanted} rows were measured: report this")
    return model.decoder, found


def _csv(found: Sequence[Measured], head: Sequence[str], cells: Callable[[Measured, int, int], Iterable[Any]]) -> str:
    """Rows for each layer (from 0) and head (from 1, as in TensorBoard); ``cells`` gives what follows their names."""
    rows = (
        [one.label, one.path, layer, number + 1, *row]
        for one in found
        for layer, number in itertools.product(*map(range, one.mass.shape[:2]))
        for row in cells(one, layer, number)
    )
    return csv_text(("encoding", "checkpoint", "layer", "head", *head), rows)


def fields_csv(found: Sequence[Measured], epsilons: Sequence[float]) -> str:
    """n_emp of every layer, head and ε: mean and median over rows; of the rows' mean curve; of the bias alone."""

    def cells(one: Measured, layer: int, head: int) -> Iterable[Sequence[object]]:
        own = one.layers[layer]
        bias = one.biases[layer].mean[:, head].tolist() if one.biases else [None] * len(epsilons)
        of_mean = n_emp(one.mass[layer, head], epsilons).tolist()
        columns = (epsilons, own.mean[:, head].tolist(), own.median[:, head].tolist(), of_mean, bias)
        return ((*row, own.length, one.rows, one.blocks) for row in zip(*columns, strict=True))

    names = ("epsilon", "n_emp_mean", "n_emp_median", "n_emp_of_mean", "n_bias_mean", "length", "rows", "blocks")
    return _csv(found, names, cells)


def curves_csv(found: Sequence[Measured]) -> str:
    """Attention by distance, and within it (the query and that many keys before it), thinned at long distances."""

    def cells(one: Measured, layer: int, head: int) -> Iterable[Sequence[float]]:
        mass = one.mass[layer, head]
        shown = thinned(len(mass))
        return zip(shown, mass[shown].tolist(), mass.cumsum(-1)[shown].tolist(), strict=True)

    return _csv(found, ("distance", "mass", "within"), cells)


def quantised_csv(found: Sequence[Measured]) -> str:
    """The paper's quantised curve of every layer and head."""

    def cells(one: Measured, layer: int, head: int) -> Iterable[Sequence[float]]:
        return torch.stack(quantised(one.mass[layer, head]), dim=1).tolist()

    return _csv(found, ("epsilon", "n_over_length"), cells)


def pair_csv(found: Sequence[Measured]) -> str:
    """The curves of the paper's Figures 5 and 6: for each checkpoint and ε, ERF and TRF over the length of a block."""
    rows = []
    for one in found:
        epsilons, measured = one.quantised_erf()
        theory = one.quantised_trf()
        beside = [None] * len(epsilons) if theory is None else theory[1].tolist()
        points = zip(epsilons.tolist(), measured.tolist(), beside, strict=True)
        rows += [[one.label, one.path, *point] for point in points]
    return csv_text(("encoding", "checkpoint", "epsilon", "erf_over_length", "trf_over_length"), rows)


def table(found: Sequence[Measured], epsilons: Sequence[float]) -> Table:
    """Encoding and layer × ε: mean of n_emp over rows, then over heads, with the least and the most of a head."""
    rows = []
    for one in found:
        means = {str(number): layer.mean for number, layer in enumerate(one.layers)}
        if one.biases:
            means["bias alone"] = torch.cat([layer.mean for layer in one.biases], dim=1)
        for name, mean in means.items():
            cells = [f"{n.mean():.1f} ({n.min():.1f} to {n.max():.1f})" for n in mean]
            rows.append(Row(one.label, [words(text) for text in (name, *cells)]))
    return Table("Nearest keys", ["encoding", "layer", *(f"ε = {e:g}" for e in epsilons)], rows, words=True)
