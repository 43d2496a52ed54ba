"""Empirical receptive field of trained checkpoints: how many of the nearest keys hold their attention on real text.

The measured quantity is n_emp of :mod:`fairseq_rpe.analysis.empirical_receptive_field`, for each layer and head.
"""

import itertools
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeVar

import torch
import torch.nn.functional as F
from torch import Tensor

from fairseq_rpe.analysis.empirical_receptive_field import check_epsilons, log_spaced_distances, n_emp, quantised_curve
from fairseq_rpe.attention import AttentionPlan
from fairseq_rpe.attention.reference import attention_weights
from fairseq_rpe.core.bias import Positions
from fairseq_rpe.core.errors import UserError
from fairseq_rpe.data import folder as corpus
from fairseq_rpe.evaluation.loading import LabelledCheckpoint, load_model, read_stream
from fairseq_rpe.evaluation.records import BATCH_TOKENS, EvalOverrides
from fairseq_rpe.figures.receptive_fields import AttentionMass
from fairseq_rpe.utils.progress import Progress
from fairseq_rpe.utils.table import Table, TableRow, csv_text, text_cell

MAX_QUERIES = 128  # queries whose attention weights are in memory at a time
_DEFAULT_LENGTHS = 4  # default block, in training lengths
_DEFAULT_FRACTION = 4  # by default the last 1 / 4 of a block is measured


class LayerAttentionMass:
    """Attention statistics of one layer, over rows: one for each measured query. Memory is O(H·length·E).

    Args:
        length: largest number of keys.
        epsilons: E values of ε in (0, 1).

    Attributes:
        rows: number of rows so far.
    """

    def __init__(self, length: int, epsilons: Sequence[float]) -> None:
        check_epsilons(epsilons)
        self.length, self.epsilons, self.rows = length, epsilons, 0
        # Set at the first block: (H, length) sums of weights by distance; (E, H, length + 1) rows by their n_emp.
        self._mass = self._counts = torch.empty(0)

    def add(self, weights: Tensor) -> None:
        """Add the attention weights (B, H, n, m) of the last n of m <= length tokens; each row sums to 1."""
        batch, heads, n, m = weights.shape
        if not self.rows:
            self._mass = weights.new_zeros(heads, self.length, dtype=torch.float64)
            self._counts = weights.new_zeros(len(self.epsilons), heads, self.length + 1, dtype=torch.int64)
        self.rows += batch * n
        # Column c is the key that is c keys before the last query. For row r, the first n - 1 - r columns are future.
        nearest_first = weights.flip(-1).double()  # (B, H, n, m)
        future = torch.arange(n - 1, -1, -1, device=weights.device)  # (n,) columns in the future of each row
        self._mass[:, :m] += _sum_by_distance(nearest_first.sum(0))
        keys = (n_emp(nearest_first, self.epsilons) - future).transpose(1, 2).flatten(2)  # (E, H, B·n)
        self._counts.scatter_add_(2, keys, torch.ones_like(keys))

    @property
    def mass(self) -> Tensor:
        """(H, length) float64: mean attention weight by distance; sums to 1."""
        return self._require_rows(self._mass) / self.rows

    @property
    def mean(self) -> Tensor:
        """(E, H) float64: mean of n_emp over rows, in keys."""
        counts = self._require_rows(self._counts)
        return (counts * torch.arange(self.length + 1, device=counts.device)).sum(-1).double() / self.rows

    @property
    def median(self) -> Tensor:
        """(E, H) float64: median of n_emp over rows, in keys; the mean of the two middle values of an even number."""
        cumulative = self._require_rows(self._counts).cumsum(-1)
        low_rank, high_rank = (self.rows - 1) // 2, self.rows // 2  # from 0; equal for an odd number of rows
        low, high = ((cumulative <= rank).sum(-1) for rank in (low_rank, high_rank))
        return (low + high).double() / 2

    def _require_rows(self, sums: Tensor) -> Tensor:
        """Return ``sums``; raise UserError if nothing was added to them."""
        if not self.rows:
            raise UserError("no attention was measured: pass at least one block through the model")
        return sums


def _sum_by_distance(weights: Tensor) -> Tensor:
    """Sum weights over rows, by the distance of each key from the row's own query.

    Args:
        weights: (H, n, m); column c is c keys before the last query, and row r is n - 1 - r queries before it.

    Returns:
        (H, m): sum at each distance.
    """
    heads, n, m = weights.shape
    # With the last query first, row r has distance d in column d + r.
    padded = F.pad(weights.flip(1), (0, n))  # (H, n, m + n)
    # A stride of one row and one column moves row r by r columns, so that column d has distance d.
    by_distance = padded.as_strided((heads, n, m), (n * (m + n), m + n + 1, 1))  # (H, n, m)
    return by_distance.sum(1)


class AttentionMassProbe:
    """Context manager that measures the last queries of each block that passes through a decoder.

    It replaces the decoder's attention back end by one that also records the weights, so outputs do not change. A call
    whose first query is the first token belongs to the next layer.

    Args:
        decoder: decoder of a ``transformer_rpe_lm`` in evaluation mode.
        length: tokens of every block.
        rows: number of queries to measure, the last of each block.
        epsilons: values of ε in (0, 1).
    """

    def __init__(self, decoder: Any, length: int, rows: int, epsilons: Sequence[float]) -> None:
        if not 1 <= rows <= length:
            raise UserError(f"{rows} rows cannot be measured in blocks of {length} tokens: choose 1 to {length}")
        self.decoder, self.inner, self.length, self.rows = decoder, decoder.attend, length, rows
        self.layers: list[Any] = [LayerAttentionMass(length, epsilons) for _ in decoder.layers]
        self._layer = -1

    def __enter__(self) -> "AttentionMassProbe":
        self.decoder.attend = self
        return self

    def __exit__(self, *_: object) -> None:
        self.decoder.attend = self.inner

    def __call__(self, q: Tensor, k: Tensor, v: Tensor, plan: AttentionPlan, dropout: float = 0.0) -> Tensor:
        """Record and compute attention: q (B, H, n, D), k and v (B, H, m, D) -> (B, H, n, D)."""
        self.observe(q, k, v, plan)
        return self.inner(q, k, v, plan, dropout)

    def observe(self, q: Tensor, k: Tensor, v: Tensor, plan: AttentionPlan) -> None:
        """Record the measured queries of one attention call: q (B, H, n, D), k and v (B, H, m, D).

        Raises:
            UserError: rows are padded, or there are more than ``length`` keys.
        """
        if plan.padding is not None:
            raise UserError("the receptive field is measured in full blocks: leave out rows with padding")
        before = k.shape[2] - q.shape[2]  # keys before the first query
        if before == 0:  # layers run in order, and each begins with the first tokens of the block
            self._layer = (self._layer + 1) % len(self.layers)
        if k.shape[2] > self.length:
            raise UserError(f"a block of {k.shape[2]} tokens is longer than the {self.length} tokens of this probe")
        first = min(max(0, self.length - self.rows - before), q.shape[2])
        states = [plan.key_state]  # after each block, of an encoding whose queries change a state of the keys
        # such an encoding needs all queries, although those before the first are not measured
        begin = first if plan.transform_scores_with_state is None else 0
        borders = [*range(begin, first, MAX_QUERIES), *range(first, q.shape[2], MAX_QUERIES), q.shape[2]]
        for start, stop in itertools.pairwise(borders):
            block_plan = replace(plan.slice_queries(start, stop), key_state=states[-1], store_key_state=states.append)
            num_keys = before + stop
            queries, keys, values = q[:, :, start:stop], k[:, :, :num_keys], v[:, :, :num_keys]
            if start >= first:
                self.record_rows(self._layer, queries, keys, values, block_plan)
            else:
                attention_weights(queries, keys, block_plan)

    def record_rows(self, layer: int, q: Tensor, k: Tensor, v: Tensor, plan: AttentionPlan) -> None:
        """Add a block of queries of one layer, with all keys that they see.

        The weights of each query sum to 1, see :func:`normalised_weights`.
        """
        self.layers[layer].add(normalised_weights(q, k, plan))


def normalised_weights(q: Tensor, k: Tensor, plan: AttentionPlan) -> Tensor:
    """Return attention weights whose rows sum to 1, for any encoding.

    Weights without a softmax, or with a null logit, are divided by their sum. A query without any weight counts as one
    that sees itself alone.

    Args:
        q: (B, H, n, D) queries, the last n of m tokens.
        k: (B, G, m, D) keys.
        plan: plan of these queries.

    Returns:
        (B, H, n, m) weights.
    """
    weights = attention_weights(q, k, plan)
    if plan.null_logit is None and not plan.returns_log_weights:
        return weights
    n, m = weights.shape[2:]
    itself = torch.eye(m, dtype=weights.dtype, device=weights.device)[m - n :]
    total = weights.sum(-1, keepdim=True)
    return torch.where(total > 0, weights / total, itself)


Probe = TypeVar("Probe", bound=AttentionMassProbe)


@torch.no_grad()
def measure_bias_only(
    decoder: Any, length: int, rows: int, epsilons: Sequence[float]
) -> list[LayerAttentionMass] | None:
    """Measure what :class:`AttentionMassProbe` would record if all q·k were 0, in the same rows.

    A row that sees m keys then has n(ε) = inf{ j : Σ_(t<j) b_t > (1 - ε)·Σ_(t<m) b_t }, b = exp(bias): the theoretical
    receptive field of Eq. 22 with its series truncated after m terms.

    Args:
        decoder: decoder of a ``transformer_rpe_lm`` in evaluation mode.
        length: tokens of a block.
        rows: number of queries to measure.
        epsilons: values of ε in (0, 1).

    Returns:
        Statistics of each layer, or None if no layer has an additive bias, if scores or positions are transformed, or
        if a layer has blocks of positions.
    """
    encodings = [decoder.layer_encoding(layer) for layer in range(len(decoder.layers))]
    is_transformed = decoder.position_transforms.active(training=False) is not None
    has_blocks = any(e.attention_options.block for e in encodings)
    if is_transformed or has_blocks or any(e.is_content_dependent or e.needs_token_ids for e in encodings):
        return None
    parameter = next(decoder.parameters())
    dtype = torch.promote_types(parameter.dtype, torch.float32)
    positions = Positions.arange(length, device=parameter.device, dtype=dtype)
    probe = AttentionMassProbe(decoder, length, rows, epsilons)
    biases = [encoding.attention_bias(positions) for encoding in encodings]
    if all(bias is None for bias in biases):
        return None
    for encoding, bias in zip(encodings, biases, strict=True):
        zeros = torch.zeros(1, encoding.heads, length, 1, device=positions.k.device)
        probe.observe(zeros, zeros, zeros, AttentionPlan(positions, bias))
    return probe.layers


@dataclass(frozen=True, kw_only=True)
class ReceptiveFieldRequest(EvalOverrides):
    """What to measure of each checkpoint: the options of ``fairseq-rpe erf``.

    Attributes:
        data: binarised data folder.
        split: name of the split to read.
        length: tokens of a block; None: see :meth:`resolve_block_size`.
        blocks: number of blocks.
        rows: number of measured queries, the last of each block; None: a quarter of the block.
        epsilons: shares of the attention outside of the field.
        batch_size: blocks of a batch; None: as many as ``BATCH_TOKENS`` allows.
    """

    data: Path
    split: str = "test"
    length: int | None = None
    blocks: int = 64
    rows: int | None = None
    epsilons: Sequence[float] = (0.5, 0.1, 0.01)
    batch_size: int | None = None

    def resolve_block_size(self, train_length: int) -> tuple[int, int]:
        """Return the tokens of a block and the number of queries measured in it.

        Raises:
            UserError: the data cannot be used, the text does not fill the blocks, or ε is not between 0 and 1.
        """
        check_epsilons(self.epsilons, "--epsilon")
        corpus.check_text_folder(self.data, self.split)
        total = corpus.count_tokens(self.data, self.split)
        length = self.length or min(_DEFAULT_LENGTHS * train_length, total // self.blocks)
        if length < 1 or total < self.blocks * length:
            raise UserError(
                f"{self.data}/{self.split} has {total} tokens, less than {self.blocks} blocks of {max(length, 1)}: "
                "use more text, a smaller --length or fewer --blocks"
            )
        rows = self.rows or max(1, length // _DEFAULT_FRACTION)
        if rows > length:
            raise UserError(f"--rows {rows} is more than a block of {length} tokens: lower it")
        return length, rows


@dataclass(frozen=True)
class MeasuredReceptiveField(AttentionMass):
    """Attention statistics of one checkpoint.

    Attributes:
        path: checkpoint file.
        blocks: number of blocks.
        rows: number of measured queries in each block.
        layers: statistics of each layer.
        bias_only: the same with q·k = 0, if a layer has an additive bias.
        layer_specs: encoding of each layer if they differ, else empty.
    """

    path: Path
    blocks: int
    rows: int
    layers: Sequence[LayerAttentionMass]
    bias_only: Sequence[LayerAttentionMass] | None
    layer_specs: Sequence[str] = ()


def measure_receptive_field(
    request: ReceptiveFieldRequest, checkpoint: LabelledCheckpoint, length: int, rows: int
) -> MeasuredReceptiveField:
    """Measure one checkpoint on evenly spaced blocks of the text.

    Args:
        request: text and ε.
        checkpoint: the checkpoint.
        length: tokens of a block.
        rows: number of measured queries in each block.

    Raises:
        UserError: the checkpoint cannot be used.
    """
    decoder, probe = run_probe(
        request, checkpoint, length, lambda decoder: AttentionMassProbe(decoder, length, rows, request.epsilons), rows
    )
    bias_only = measure_bias_only(decoder, length, rows, request.epsilons)
    return MeasuredReceptiveField(
        label=checkpoint.label,
        train_length=checkpoint.train_length,
        mass=_stack_mass(probe.layers),
        bias_mass=None if bias_only is None else _stack_mass(bias_only),
        path=checkpoint.path,
        blocks=request.blocks,
        rows=rows,
        layers=probe.layers,
        bias_only=bias_only,
        layer_specs=decoder.encodings.layer_specs if decoder.encodings.is_mixed else (),
        series=None if bias_only is None else series_weights(decoder, length),
    )


def _stack_mass(layers: Sequence[LayerAttentionMass]) -> Tensor:
    """Return the mean attention weight by distance of every layer and head."""
    return torch.stack([layer.mass for layer in layers]).cpu()  # (layers, H, length)


@torch.no_grad()
def series_weights(decoder: Any, length: int) -> Tensor:
    """Return exp(bias) of every layer and head by distance, the terms of the theoretical receptive field.

    Args:
        decoder: a decoder whose encodings all have a bias.
        length: the number of distances, 0 … length - 1.

    Returns:
        (layers, heads, length) float64; each head's weights sum to 1.
    """
    encodings = [decoder.layer_encoding(layer) for layer in range(len(decoder.layers))]
    # softmax: exp of a large bias does not overflow, and the receptive field does not depend on the sum
    return torch.stack([encoding.bias_profile(length).double().softmax(-1) for encoding in encodings]).cpu()


def run_probe(
    request: ReceptiveFieldRequest,
    checkpoint: LabelledCheckpoint,
    length: int,
    make_probe: Callable[[Any], Probe],
    rows: int,
) -> tuple[Any, Probe]:
    """Pass evenly spaced blocks of the text through a checkpoint with a probe.

    Args:
        request: text and number of blocks.
        checkpoint: the checkpoint.
        length: tokens of a block.
        make_probe: makes the probe of a decoder.
        rows: number of queries that the probe must measure in each block.

    Returns:
        The decoder, and the probe with its statistics.

    Raises:
        UserError: the checkpoint cannot be used, or the probe measured another number of rows.
    """
    model, task = load_model(checkpoint.path, request, request.data)
    total = corpus.count_tokens(request.data, request.split)
    stream = read_stream(request.data, request.split, task.source_dictionary, total)
    starts = spread_blocks(total, length, request.blocks)
    inputs = torch.stack([stream[start : start + length] for start in starts.tolist()])  # (blocks, length)
    device = next(model.parameters()).device
    bar = Progress(checkpoint.label, "blocks", request.blocks)
    with torch.no_grad(), bar, make_probe(model.decoder) as probe:
        for batch in inputs.split(request.batch_size or max(1, BATCH_TOKENS // length)):
            model.decoder(batch.to(device), features_only=True)
            bar.update(len(batch))
    expected = request.blocks * rows
    for layer in probe.layers:
        if layer.rows != expected:
            raise UserError(f"{checkpoint.path}: {layer.rows} of {expected} rows were measured: report this as a bug")
    return model.decoder, probe


def spread_blocks(total: int, length: int, blocks: int) -> Tensor:
    """Return the first tokens, (blocks,) int64, of evenly spaced blocks among the total // length blocks of a text."""
    return torch.arange(blocks) * (total // length) // blocks * length


def _csv(
    fields: Sequence[MeasuredReceptiveField],
    columns: Sequence[str],
    head_rows: Callable[[MeasuredReceptiveField, int, int], Iterable[Any]],
) -> str:
    """Return CSV rows for each layer (from 0) and head (from 1, as in TensorBoard).

    Args:
        fields: statistics of the checkpoints.
        columns: names of the columns after encoding, checkpoint, layer and head.
        head_rows: returns the rows of these columns for a checkpoint, layer and head (from 0).
    """
    rows = []
    for field in fields:
        num_layers, num_heads, _ = field.mass.shape
        for layer, head in itertools.product(range(num_layers), range(num_heads)):
            rows += [[field.label, field.path, layer, head + 1, *row] for row in head_rows(field, layer, head)]
    return csv_text(("encoding", "checkpoint", "layer", "head", *columns), rows)


def n_emp_csv(fields: Sequence[MeasuredReceptiveField], epsilons: Sequence[float]) -> str:
    """Return n_emp of every layer, head and ε as CSV: mean and median over rows, of the mean curve, of the bias."""

    def head_rows(field: MeasuredReceptiveField, layer: int, head: int) -> Iterable[Sequence[object]]:
        statistics = field.layers[layer]
        mean, median = statistics.mean[:, head].tolist(), statistics.median[:, head].tolist()
        mean_curve = n_emp(field.mass[layer, head], epsilons).tolist()
        bias = field.bias_only[layer].mean[:, head].tolist() if field.bias_only else [None] * len(epsilons)
        by_epsilon = zip(epsilons, mean, median, mean_curve, bias, strict=True)
        return [(*values, statistics.length, field.rows, field.blocks) for values in by_epsilon]

    names = ("epsilon", "n_emp_mean", "n_emp_median", "n_emp_of_mean", "n_bias_mean", "length", "rows", "blocks")
    return _csv(fields, names, head_rows)


def curves_csv(fields: Sequence[MeasuredReceptiveField]) -> str:
    """Return attention by distance, and its cumulative sum, as CSV; long distances are log-spaced."""

    def head_rows(field: MeasuredReceptiveField, layer: int, head: int) -> Iterable[Sequence[float]]:
        mass = field.mass[layer, head]
        distances = log_spaced_distances(len(mass))
        return zip(distances, mass[distances].tolist(), mass.cumsum(-1)[distances].tolist(), strict=True)

    return _csv(fields, ("distance", "mass", "within"), head_rows)


def quantised_csv(fields: Sequence[MeasuredReceptiveField]) -> str:
    """Return the paper's quantised curve of every layer and head as CSV."""

    def head_rows(field: MeasuredReceptiveField, layer: int, head: int) -> Iterable[Sequence[float]]:
        return torch.stack(quantised_curve(field.mass[layer, head]), dim=1).tolist()

    return _csv(fields, ("epsilon", "n_over_length"), head_rows)


def erf_trf_csv(fields: Sequence[MeasuredReceptiveField]) -> str:
    """Return the curves of the paper's Figures 5 and 6 as CSV: ERF and TRF over the block length, by ε."""
    rows = []
    for field in fields:
        epsilons, measured = field.quantised_erf()
        theory = field.quantised_trf()
        theoretical = [None] * len(epsilons) if theory is None else theory[1].tolist()
        points = zip(epsilons.tolist(), measured.tolist(), theoretical, strict=True)
        rows += [[field.label, field.path, *point] for point in points]
    return csv_text(("encoding", "checkpoint", "epsilon", "erf_over_length", "trf_over_length"), rows)


def table(fields: Sequence[MeasuredReceptiveField], epsilons: Sequence[float]) -> Table:
    """Return a table of encoding and layer × ε: mean of n_emp over rows and heads, with least and most of a head."""
    rows = []
    for field in fields:
        # name of a row -> (E, H) of a layer, or (E, layers·H) of the bias, which has one row for all layers
        specs = [f" ({spec})" for spec in field.layer_specs] or [""] * len(field.layers)
        names = [f"{number}{spec}" for number, spec in enumerate(specs)]
        means = dict(zip(names, (layer.mean for layer in field.layers), strict=True))
        if field.bias_only:
            means["bias alone"] = torch.cat([layer.mean for layer in field.bias_only], dim=1)
        for name, mean in means.items():
            cells = [f"{heads.mean():.1f} ({heads.min():.1f} to {heads.max():.1f})" for heads in mean]
            rows.append(TableRow(field.label, [text_cell(text) for text in (name, *cells)]))
    return Table("Nearest keys", ["encoding", "layer", *(f"ε = {e:g}" for e in epsilons)], rows, is_text=True)
