"""Tables and curves of the convergence verdicts and theoretical receptive fields of all heads of some encodings."""

import itertools
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import Any, NamedTuple

import mpmath
import torch
from tabulate import tabulate
from torch import Tensor

from fairseq_rpe.analysis.convergence import HeadVerdict, formula_verdict, formula_weights, scaled_weights, verdict
from fairseq_rpe.analysis.empirical_receptive_field import quantised_curve
from fairseq_rpe.analysis.layer_stack import summarise_stack
from fairseq_rpe.core.layer_pattern import format_layers
from fairseq_rpe.encodings import Encoding
from fairseq_rpe.encodings.model import LayerEncodings
from fairseq_rpe.utils.table import Cell, Table, TableRow

EPSILONS = (Fraction(1, 2), Fraction(1, 10), Fraction(1, 100), Fraction(1, 1000))
# six per decade, as decimals with two digits, so that each is exact
EPSILON_GRID = tuple(Fraction(f"{10 ** (-k / 6):.2g}") for k in range(1, 19))
MAX_LOG10_DRAWN = 15  # common logarithm of the largest field in a figure
_FIELD_COLUMNS = ("trf", "trf_low", "trf_high")
Source = str | Sequence[Encoding] | LayerEncodings  # a formula, or a single encoding, or the encodings of all layers


class HeadIndex(NamedTuple):
    """Number of a layer (from 0) and of a head (from 1); None where there is only one.

    In a pattern of layers, ``layer`` is a text with the layers that share an encoding and its spec.
    """

    layer: int | str | None = None
    head: int | None = None

    def __str__(self) -> str:
        several = isinstance(self.layer, str) and not self.layer.partition(" ")[0].isdecimal()
        words = "layers" if several else "layer", "head"
        return " ".join(f"{word} {n}" for word, n in zip(words, self, strict=True) if n is not None)


HeadRow = tuple[HeadIndex, HeadVerdict]


@dataclass(frozen=True)
class FieldCurves:
    """Theoretical receptive fields of several heads against ε.

    Attributes:
        curves: (ε, TRF in keys) of each distinct head.
        without: number of heads without a known finite sum.
        cut: whether fields beyond 10^15 keys are missing from the curves.
    """

    curves: list[tuple[Tensor, Tensor]]
    without: int = 0
    cut: bool = False


def head_verdicts(source: Source) -> list[HeadRow]:
    """Return the verdict on every head of a formula or of encodings."""
    return list(_per_head(source, formula_verdict, verdict))


def head_weights(source: Source, keys: int) -> list[tuple[HeadIndex, Tensor]]:
    """Return the weights b_0 … b_(keys-1) of every head in float64, divided by the largest one of the head."""
    return list(_per_head(source, lambda f: formula_weights(f, keys), lambda e: scaled_weights(e.bias_profile(keys))))


def _per_head(
    source: Source, formula: Callable[[str], Any], heads: Callable[[Encoding], Iterable[Any]]
) -> Iterable[tuple[HeadIndex, Any]]:
    """Yield a value for each head: ``formula`` of a formula, or the values that ``heads`` returns for an encoding."""
    if isinstance(source, str):
        yield HeadIndex(), formula(source)
        return
    for layer, values in zip(_layer_names(source), list(map(heads, source)), strict=True):
        for head, value in enumerate(values, start=1):
            yield HeadIndex(layer, head), value


def stack_lines(source: Source, rows: Sequence[HeadRow]) -> list[str]:
    """Return what the verdicts on all heads, ``rows``, say about a model with these encodings in its layers."""
    if not isinstance(source, LayerEncodings):
        return []
    heads = len(rows) // len(source)
    verdicts = [head for _, head in rows]
    return summarise_stack(source, [verdicts[start : start + heads] for start in range(0, len(rows), heads)])


def _layer_names(source: Sequence[Encoding] | LayerEncodings) -> list[int | str | None]:
    """Return what to call the layer or layers of each encoding; None for an encoding of all layers."""
    if isinstance(source, LayerEncodings) and source.is_mixed:
        specs = enumerate(source.specs)
        return [f"{format_layers(source.layers(instance))} ({spec})" for instance, spec in specs]
    return [None] if len(source) == 1 else list(range(len(source)))


def format_epsilon(value: Fraction) -> str:
    """Format an ε as a decimal if that is exact, otherwise as a fraction."""
    return f"{float(value):g}" if Fraction(f"{float(value):g}") == value else str(value)


def format_table(title: str, rows: Sequence[HeadRow], epsilons: Sequence[Fraction]) -> str:
    """Format verdicts as text: one line per head, consecutive heads with equal cells in one line, the reason last."""
    head, *lines = _lines(rows, epsilons)
    sides = ["left", "left", "right", *["right" for _ in epsilons], "left"]
    return f"{title}\n{tabulate([head, *lines], tablefmt='plain', colalign=sides, disable_numparse=True)}"


def verdict_table(title: str, rows: Sequence[HeadRow], epsilons: Sequence[Fraction]) -> Table:
    """Return the rows of :func:`format_table` as a table with ``title`` as its caption."""
    head, *lines = _lines(rows, epsilons)
    return Table(title, head, [TableRow(name, [Cell(text) for text in cells]) for name, *cells in lines], is_text=True)


def _lines(rows: Sequence[HeadRow], epsilons: Sequence[Fraction]) -> list[list[str]]:
    """Return the header of the table and its lines."""

    def cells(row: HeadRow) -> list[str]:
        _, head = row
        fields = ["-" if (field := head.trf(e)) is None else str(field) for e in epsilons]
        return [head.decision, head.digits() or "-", *fields, head.reason]

    lines = [["", "Σ b_n", "B", *(f"TRF({format_epsilon(e)})" for e in epsilons), "reason"]]
    # neighbouring heads with the same cells share a line
    for shared, group in itertools.groupby(rows, cells):
        indices = [index for index, _ in group]
        lines.append([_span(indices[0], indices[-1]), *shared])
    return lines


def _span(first: HeadIndex, last: HeadIndex) -> str:
    """Format a range of heads, as in ``head 1-8`` or ``layer 0 head 3 - layer 1 head 2``."""
    if first == last:
        return str(first)
    return f"{first}-{last.head}" if first.layer == last.layer else f"{first} - {last}"


def verdict_cells(sources: Mapping[str, Sequence[HeadRow]], epsilons: Sequence[Fraction]) -> list[list[Any]]:
    """Return a header and a row per source, layer, head and ε, with proven bounds, for a CSV file."""
    limits = ["limit", "limit_low", "limit_high"]
    cells: list[list[Any]] = [["source", *HeadIndex._fields, "verdict", *limits, "epsilon", *_FIELD_COLUMNS, "reason"]]
    for title, rows in sources.items():
        for index, head in rows:
            start = [title, *index, head.decision, head.digits(), *_limit_cells(head)]
            cells += [[*start, format_epsilon(e), *_field_cells(head, e), head.reason] for e in epsilons]
    return cells


def field_cells(sources: Mapping[str, Sequence[HeadRow]]) -> list[list[Any]]:
    """Return a header and a row per source, layer, head with receptive fields and ε of ``EPSILON_GRID``."""
    cells: list[list[Any]] = [["source", *HeadIndex._fields, "epsilon", *_FIELD_COLUMNS]]
    for title, rows in sources.items():
        for index, head in rows:
            if head.total is not None:
                cells += [[title, *index, format_epsilon(e), *_field_cells(head, e)] for e in EPSILON_GRID]
    return cells


def field_curves(rows: Sequence[HeadRow]) -> FieldCurves:
    """Return the curves of the receptive fields (Eq. 22) at each ε of ``EPSILON_GRID``, at their lower bounds."""
    summed = [head for _, head in rows if head.total is not None]
    distinct = dict.fromkeys(tuple(head.trf(e).logarithms[0] for e in EPSILON_GRID) for head in summed)
    curves = [
        [(float(e), 10**y) for e, y in zip(EPSILON_GRID, ys, strict=True) if y <= MAX_LOG10_DRAWN] for ys in distinct
    ]
    drawn = [tuple(torch.tensor(curve, dtype=torch.float64).T) for curve in curves if curve]
    return FieldCurves(drawn, len(rows) - len(summed), any(ys[-1] > MAX_LOG10_DRAWN for ys in distinct))


def quantised_field(
    sources: Mapping[str, Source], keys: int
) -> tuple[list[list[Any]], dict[str, list[tuple[Tensor, Tensor]]]]:
    """Return the quantised field of the paper's appendix, which exists for every bias.

    Args:
        sources: title -> formula or encodings.
        keys: number of distances after which the sums end.

    Returns:
        A header with rows for a CSV file, and by title the distinct curves (ε, TRF / keys).
    """
    rows: list[list[Any]] = [["source", *HeadIndex._fields, "epsilon", "index", "trf"]]
    curves = {}
    for title, source in sources.items():
        seen = {}
        for index, values in head_weights(source, keys):
            epsilons, field = quantised_curve(values)
            pairs = list(zip(epsilons.tolist(), field.tolist(), strict=True))
            rows += [[title, *index, f"{e:.6g}", round(y * keys), y] for e, y in pairs]
            seen[tuple(pairs)] = epsilons, field
        curves[title] = list(seen.values())
    return rows, curves


def _field_cells(head: HeadVerdict, epsilon: Fraction) -> tuple[Any, ...]:
    """Return the values of ``_FIELD_COLUMNS``: the field as text and its whole-number bounds, None if unknown."""
    field = head.trf(epsilon)
    return (None,) * 3 if field is None else (str(field), field.low, field.high)


def _limit_cells(head: HeadVerdict) -> list[str]:
    """Return the bounds on B with 24 digits, rounded outwards."""
    if head.limit is None:
        return ["", ""]
    with mpmath.workprec(200):
        limits = (end * (1 + sign * mpmath.mpf(10) ** -23) for end, sign in zip(head.limit, (-1, 1), strict=True))
        return [mpmath.nstr(end, 24) for end in limits]
