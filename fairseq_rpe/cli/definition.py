"""Definition 0.1 in a sweep: what the theory predicts of each method, beside what was observed."""

from __future__ import annotations

import argparse
import csv
import io
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from fairseq_rpe.analysis.extrapolation import Deviation, agreeing, deviation
from fairseq_rpe.cli import report

DELTA = 0.05
CONVERGES, DIVERGES, UNDECIDED, NONE = "converges", "diverges", "undecided", "none"
_PREDICTIONS = (CONVERGES, DIVERGES, UNDECIDED, NONE)
COLUMNS = (
    "encoding",
    "prediction",
    "heads_converging",
    "heads",
    "largest_deviation",
    "worst_rise",
    "end_deviation",
    "delta",
    "extrapolates",
    "extrapolates_one_sided",
)


def delta(text: str) -> float:
    """The δ of Definition 0.1."""
    try:
        value = float(text)
    except ValueError:
        value = 0.0
    if not 0 < value < float("inf"):
        raise argparse.ArgumentTypeError(f"'{text}' is not a relative deviation above 0")
    return value


@dataclass(frozen=True)
class Prediction:
    """The verdict on Σ exp(bias) with a method's trained parameters, over all heads of all layers and seeds.

    ``verdict``: converges if every head does, diverges if one does, undecided otherwise; none where the theory does not
    apply, because positions are moved.
    """

    verdict: str
    converging: int = 0
    heads: int = 0

    def __str__(self) -> str:
        if self.verdict == NONE:
            return "positions are moved"
        if self.heads and 0 < self.converging < self.heads:
            return f"{self.verdict} ({self.heads - self.converging} of {self.heads} heads do not converge)"
        return self.verdict


@dataclass(frozen=True)
class Judged:
    """A method, what was predicted of it, and how its perplexity changed."""

    name: str
    prediction: Prediction
    found: Deviation


def judge(rows: list[dict[str, Any]], trained_at: int, predictions: Mapping[str, Prediction]) -> list[Judged]:
    """The methods of a sweep that were evaluated at the training length and beyond it."""
    encodings, lengths = report.names_and_lengths(rows)
    judged = []
    for name in encodings:
        values = {n: p for n in lengths if (p := report.mean(rows, name, n, "ppl")) is not None}
        if name not in predictions or trained_at not in values or max(values) <= trained_at:
            continue
        judged.append(Judged(name, predictions[name], deviation(values, trained_at)))
    return judged


def markdown(judged: list[Judged], trained_at: int, limit: float) -> str:
    """Deviations of each method, then predicted against observed as a table of two by two."""
    if not judged:
        return ""
    head = ["encoding", "Σ exp(bias) as trained", "largest", "worst rise", "at the end", "extrapolates", "one-sided"]
    lines = [head, ["---"] * len(head)]
    for one in judged:
        values = (f"{one.found.largest:.3f}", f"{one.found.worst:.3f}", f"{one.found.end:+.3f}")
        answers = (_yes(one.found.extrapolates(limit)), _yes(one.found.extrapolates(limit, one_sided=True)))
        lines.append([one.name, str(one.prediction), *values, *answers])
    text = (
        f"\nDefinition 0.1: |ppl_n - ppl_{trained_at}| / ppl_{trained_at} < δ = {limit:g} at every length n > "
        f"{trained_at}; one-sided: improvements are free.\n\n{report.align(lines)}"
    )
    both, one_sided = (_two_by_two(judged, limit, side) for side in (False, True))
    text += f"\nPredicted by the series (rows), observed at δ = {limit:g} (columns):\n\n{both}{_where(judged, False)}\n"
    if one_sided == both:
        return f"{text}One-sided, the table is the same. {_where(judged, True)}\n"
    return f"{text}\nThe same one-sided:\n\n{one_sided}{_where(judged, True)}\n"


def _two_by_two(judged: list[Judged], limit: float, one_sided: bool) -> str:
    lines = [["", "extrapolates", "does not"], ["---"] * 3]
    for verdict in _PREDICTIONS:
        names: dict[bool, list[str]] = {True: [], False: []}
        for one in judged:
            if one.prediction.verdict == verdict:
                names[one.found.extrapolates(limit, one_sided)].append(one.name)
        if verdict in (CONVERGES, DIVERGES) or any(names.values()):
            label = "no prediction" if verdict == NONE else verdict
            lines.append([label, *(f"{len(n)}: {', '.join(n)}" if n else "0" for n in names.values())])
    return report.align(lines, right=False)


def _where(judged: list[Judged], one_sided: bool) -> str:
    """The δ at which prediction and observation agree for every method."""
    sides = {
        verdict: [
            one.found.worst if one_sided else one.found.largest for one in judged if one.prediction.verdict == verdict
        ]
        for verdict in (CONVERGES, DIVERGES)
    }
    if not all(sides.values()):
        return "\nOnly one kind of series is here, so nothing can disagree for every δ."
    found = agreeing(sides[CONVERGES], sides[DIVERGES])
    if found is None:
        return "\nThere is no δ at which prediction and observation agree for every method."
    return f"\nPrediction and observation agree for every method if {found[0]:.3f} < δ <= {found[1]:.3f}."


def to_csv(judged: list[Judged], limit: float) -> str:
    """One line per method; deviations are relative and the end is signed."""
    out = io.StringIO()
    writer = csv.writer(out, lineterminator="\n")
    writer.writerow(COLUMNS)
    for one in judged:
        found, said = one.found, one.prediction
        numbers = (said.converging, said.heads, found.largest, found.worst, found.end, limit)
        answers = (_yes(found.extrapolates(limit)), _yes(found.extrapolates(limit, one_sided=True)))
        writer.writerow([one.name, said.verdict, *numbers, *answers])
    return out.getvalue()


def _yes(value: bool) -> str:
    return "yes" if value else "no"
