"""Definition 0.1 in a sweep: what the theory predicts of each method, beside what was observed."""

from __future__ import annotations

import csv
import io
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fairseq_rpe.analysis.convergence import CONVERGES, DIVERGES, UNDECIDED, verdict
from fairseq_rpe.analysis.extrapolation import Deviation, agreeing, deviation
from fairseq_rpe.cli import checkpoints, report, trained
from fairseq_rpe.encodings import names

NONE = "none"
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


@dataclass(frozen=True)
class Prediction:
    """The verdict on Σ exp(bias) with a method's trained parameters, over all heads of all layers and seeds.

    ``verdict``: converges if every head does, diverges if one does, undecided otherwise; ``NONE`` where the theory says
    nothing, for the reason in ``why``.
    """

    verdict: str
    converging: int = 0
    heads: int = 0
    why: str = ""

    def __str__(self) -> str:
        if self.why:
            return self.why
        if 0 < self.converging < self.heads:
            return f"{self.verdict} ({self.heads - self.converging} of {self.heads} heads)"
        return self.verdict


@dataclass(frozen=True)
class Judged:
    """A method, what was predicted of it, and how its perplexity changed."""

    name: str
    prediction: Prediction
    found: Deviation


def predict(folder: Path, state: dict[str, Any]) -> dict[str, Prediction]:
    """The prediction for each method of a sweep whose runs are finished, from the parameters that it learned."""
    found = {}
    for name in state["encodings"]:
        method = report.method_of(state, name)
        paths = [
            folder / "runs" / report.run_name(method, seed) / "checkpoints" / checkpoints.LAST
            for seed in state["seeds"]
        ]
        paths = [path for path in paths if path.is_file()]
        if paths:
            found[name] = _prediction(method, paths)
    return found


def _prediction(method: dict[str, Any], paths: list[Path]) -> Prediction:
    if not report.leaves_positions(method):
        return Prediction(NONE, why="positions are moved")
    if method["rpe"].partition(":")[0] not in names():
        return Prediction(NONE, why="not loaded: give --rpe-module")
    encodings = [encoding for path in paths for encoding in trained.load_encodings(path).encodings]
    decisions = [head.decision for encoding in encodings for head in verdict(encoding)]
    of_all = next((v for v in (DIVERGES, UNDECIDED) if v in decisions), CONVERGES)
    return Prediction(of_all, decisions.count(CONVERGES), len(decisions))


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
    text += (
        f"\nPredicted by the series (rows), observed at δ = {limit:g} (columns):\n\n{both}\n{where(judged, False)}\n"
    )
    if one_sided == both:
        return f"{text}\nOne-sided, the table is the same.\n{where(judged, True)}\n"
    return f"{text}\nThe same one-sided:\n\n{one_sided}\n{where(judged, True)}\n"


def observed(judged: list[Judged], limit: float, one_sided: bool) -> dict[str, tuple[list[str], list[str]]]:
    """Prediction -> the methods that extrapolate and those that do not; predictions of no method are left out."""
    found = {}
    for said in _PREDICTIONS:
        sides: dict[bool, list[str]] = {True: [], False: []}
        for one in judged:
            if one.prediction.verdict == said:
                sides[one.found.extrapolates(limit, one_sided)].append(one.name)
        if said in (CONVERGES, DIVERGES) or any(sides.values()):
            found["no prediction" if said == NONE else said] = (sides[True], sides[False])
    return found


def _two_by_two(judged: list[Judged], limit: float, one_sided: bool) -> str:
    lines = [["", "extrapolates", "does not"], ["---"] * 3]
    for label, sides in observed(judged, limit, one_sided).items():
        lines.append([label, *(f"{len(n)}: {', '.join(n)}" if n else "0" for n in sides)])
    return report.align(lines, right=False)


def where(judged: list[Judged], one_sided: bool) -> str:
    """The δ at which prediction and observation agree for every method."""
    sides = {
        said: [one.found.worst if one_sided else one.found.largest for one in judged if one.prediction.verdict == said]
        for said in (CONVERGES, DIVERGES)
    }
    if not all(sides.values()):
        return "Only one kind of series is here, so nothing can disagree for every δ."
    found = agreeing(sides[CONVERGES], sides[DIVERGES])
    if found is None:
        return "There is no δ at which prediction and observation agree for every method."
    low, high = _told_apart(*found)
    return f"Prediction and observation agree for every method if {low} < δ <= {high}."


def _told_apart(low: float, high: float) -> tuple[str, str]:
    """Both with three decimals, as in the table, or with as many as tell them apart."""
    shown = ((f"{low:.{digits}f}", f"{high:.{digits}f}") for digits in range(3, 10))
    return next((pair for pair in shown if pair[0] != pair[1]), (repr(low), repr(high)))


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
