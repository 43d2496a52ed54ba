"""Verdicts and receptive fields of all heads of some encodings, as tables and curves."""

import itertools
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import Any, NamedTuple

import mpmath
import torch
from tabulate import tabulate
from torch import Tensor

from fairseq_rpe.analysis.convergence import HeadVerdict, verdict, verdict_of_formula, weights_of_formula
from fairseq_rpe.analysis.empirical_receptive_field import quantised
from fairseq_rpe.encodings import Encoding
from fairseq_rpe.utils.table import Cell, Row, Table

EPSILONS = (Fraction(1, 2), Fraction(1, 10), Fraction(1, 100), Fraction(1, 1000))
# six a decade, as decimals of two digits, so that each is an exact number
GRID = tuple(Fraction(f"{10 ** (-k / 6):.2g}") for k in range(1, 19))
DRAWN = 15  # common logarithm of the longest field in a figure
_BOUNDS = ("trf", "trf_low", "trf_high")
Source = str | Sequence[Encoding]  # a formula, or one encoding or one per layer


class Place(NamedTuple):
    """Layer from 0 and head from 1, where there are several."""

    layer: int | None = None
    head: int | None = None

    def __str__(self) -> str:
        return " ".join(f"{word} {n}" for word, n in zip(self._fields, self, strict=True) if n is not None)


HeadRow = tuple[Place, HeadVerdict]


@dataclass(frozen=True)
class Fields:
    """Receptive fields of several heads against ε: ``curves`` (ε, TRF) to draw, heads that are alike drawn once.

    ``without``: heads of which no finite sum is known; ``cut``: fields beyond 10^``DRAWN`` keys are not in the curves.
    """

    curves: list[tuple[Tensor, Tensor]]
    without: int = 0
    cut: bool = False


def judge(source: Source) -> list[HeadRow]:
    """The verdict on every head."""
    return list(_placed(source, verdict_of_formula, verdict))


def weights(source: Source, keys: int) -> list[tuple[Place, Tensor]]:
    """b_0 … b_(keys-1) of every head, in double precision."""
    return list(_placed(source, lambda f: weights_of_formula(f, keys), lambda e: e.bias_profile(keys).exp().double()))


def _placed(
    source: Source, formula: Callable[[str], Any], heads: Callable[[Encoding], Iterable[Any]]
) -> Iterable[tuple[Place, Any]]:
    if isinstance(source, str):
        yield Place(), formula(source)
        return
    for layer, values in enumerate(list(map(heads, source))):
        for head, value in enumerate(values, start=1):
            yield Place(layer if len(source) > 1 else None, head), value


def shown(value: Fraction) -> str:
    """An ε as a user writes it."""
    return f"{float(value):g}" if Fraction(f"{float(value):g}") == value else str(value)


def table(title: str, rows: Sequence[HeadRow], epsilons: Sequence[Fraction]) -> str:
    """One line per head, heads that share everything in one line; the reason is the last column."""
    head, *lines = _lines(rows, epsilons)
    sides = ["left", "left", "right", *["right" for _ in epsilons], "left"]
    return f"{title}\n{tabulate([head, *lines], tablefmt='plain', colalign=sides, disable_numparse=True)}"


def as_table(title: str, rows: Sequence[HeadRow], epsilons: Sequence[Fraction]) -> Table:
    """The same with ``title`` as its caption, for other renderings."""
    head, *lines = _lines(rows, epsilons)
    return Table(title, head, [Row(name, [Cell(text) for text in cells]) for name, *cells in lines], words=True)


def _lines(rows: Sequence[HeadRow], epsilons: Sequence[Fraction]) -> list[list[str]]:
    """The head of the table and its lines."""

    def cells(row: HeadRow) -> list[str]:
        head = row[1]
        numbers = ["-" if (found := head.trf(e)) is None else str(found) for e in epsilons]
        return [head.decision, head.digits() or "-", *numbers, head.reason]

    lines = [["", "Σ b_n", "B", *(f"TRF({shown(e)})" for e in epsilons), "reason"]]
    for shared, group in itertools.groupby(rows, cells):
        places = [place for place, _ in group]
        lines.append([_span(places[0], places[-1]), *shared])
    return lines


def _span(first: Place, last: Place) -> str:
    """``head 1-8``, ``layer 0 head 3 - layer 1 head 2``."""
    if first == last:
        return str(first)
    return f"{first}-{last.head}" if first.layer == last.layer else f"{first} - {last}"


def verdict_cells(sources: Mapping[str, Sequence[HeadRow]], epsilons: Sequence[Fraction]) -> list[list[Any]]:
    """A row per source, layer, head and ε below their names, with certified brackets."""
    limits = ["limit", "limit_low", "limit_high"]
    cells: list[list[Any]] = [["source", *Place._fields, "verdict", *limits, "epsilon", *_BOUNDS, "reason"]]
    for title, rows in sources.items():
        for place, head in rows:
            start = [title, *place, head.decision, head.digits(), *_outwards(head)]
            cells += [[*start, shown(e), *_bounds(head, e), head.reason] for e in epsilons]
    return cells


def field_cells(sources: Mapping[str, Sequence[HeadRow]]) -> list[list[Any]]:
    """A row per source, layer, head that has receptive fields, and ε of ``GRID``."""
    found = [(title, place, head) for title, rows in sources.items() for place, head in rows if head.total is not None]
    cells = ([title, *place, shown(e), *_bounds(head, e)] for title, place, head in found for e in GRID)
    return [["source", *Place._fields, "epsilon", *_BOUNDS], *cells]


def fields(rows: Sequence[HeadRow]) -> Fields:
    """TRF as Eq. 22 defines it at each ε of ``GRID``; a bracket is drawn at its lower end."""
    summed = [head for _, head in rows if head.total is not None]
    found = dict.fromkeys(tuple(head.trf(e).logarithms[0] for e in GRID) for head in summed)
    curves = [[(float(e), 10**y) for e, y in zip(GRID, ys, strict=True) if y <= DRAWN] for ys in found]
    drawn = [tuple(torch.tensor(curve, dtype=torch.float64).T) for curve in curves if curve]
    return Fields(drawn, len(rows) - len(summed), any(ys[-1] > DRAWN for ys in found))


def cut_off(sources: Mapping[str, Source], keys: int) -> tuple[list[list[Any]], dict[str, list[tuple[Tensor, Tensor]]]]:
    """Rows and curves of the appendix's quantised field, which every sum has: it ends after ``keys`` distances."""
    rows: list[list[Any]] = [["source", *Place._fields, "epsilon", "index", "trf"]]
    curves = {}
    for title, source in sources.items():
        seen = {}
        for place, values in weights(source, keys):
            epsilons, part = quantised(values)
            pairs = list(zip(epsilons.tolist(), part.tolist(), strict=True))
            rows += [[title, *place, f"{e:.6g}", round(y * keys), y] for e, y in pairs]
            seen[tuple(pairs)] = epsilons, part
        curves[title] = list(seen.values())
    return rows, curves


def _bounds(head: HeadVerdict, epsilon: Fraction) -> tuple[Any, ...]:
    """TRF in words, and whole numbers that it lies between where it has any."""
    found = head.trf(epsilon)
    return (None,) * 3 if found is None else (str(found), found.low, found.high)


def _outwards(head: HeadVerdict) -> list[str]:
    """The bracket with 24 digits, rounded outwards."""
    if head.limit is None:
        return ["", ""]
    with mpmath.workprec(200):
        ends = (end * (1 + sign * mpmath.mpf(10) ** -23) for end, sign in zip(head.limit, (-1, 1), strict=True))
        return [mpmath.nstr(end, 24) for end in ends]
