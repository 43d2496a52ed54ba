"""Definition 0.1 in a sweep: what the theory predicts of each method, beside what was observed."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from fairseq_rpe.analysis.convergence import CONVERGES, DEPENDS, DIVERGES, UNDECIDED, verdict
from fairseq_rpe.analysis.extrapolation import EARLY, GAIN, Deviation, agreeing, context_gain, deviation, mean_deviation
from fairseq_rpe.encodings import Encoding, names
from fairseq_rpe.evaluation.position_limits import longest_row
from fairseq_rpe.evaluation.records import TextResult
from fairseq_rpe.reports.page import Block, Text
from fairseq_rpe.reports.sweep_results import Perplexities, asked
from fairseq_rpe.runs import checkpoints
from fairseq_rpe.sweeps.sweep_record import Method, State, SweepFolder
from fairseq_rpe.utils.table import Cell, Row, Table, csv_text, spread, words

NONE = "none"
DELTA = 0.05
NO_VERDICT = "No verdict, because the model does not use its context yet"
_PAPER = "Exploring Transformer Extrapolation (arXiv 2307.10156)"
_URL = "https://arxiv.org/abs/2307.10156"


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
    """A method, what was predicted of it, and how its perplexity changed, the mean over its seeds.

    ``seeds``: the same of each seed. ``why``: why it does not use its context yet, if so.
    """

    name: str
    prediction: Prediction
    found: Deviation
    seeds: Sequence[Deviation] = ()
    why: str = ""

    def answers(self, limit: float) -> list[str]:
        """Whether it extrapolates: as the definition says, and one-sided."""
        if self.why:
            return ["no verdict"] * 2
        return ["yes" if self.found.extrapolates(limit, side) else "no" for side in (False, True)]


def predict(folder: SweepFolder, state: State) -> dict[str, Prediction]:
    """The prediction for each method of a sweep whose runs are finished, from the parameters that it learned."""
    paths: dict[str, list[Path]] = {}
    for _, method, _, run in asked(folder, state):
        if run.checkpoints.last.is_file():
            paths.setdefault(method.name, []).append(run.checkpoints.last)
    return {name: _predicted(state, state.method(name), own) for name, own in paths.items()}


def _predicted(state: State, method: Method, paths: Sequence[Path]) -> Prediction:
    if not method.leaves_positions:
        end = longest_row(method.positions_eval, state.settings.tokens or 0)
        ends = f", and end at {end}" if end and end < max(state.lengths, default=0) else ""
        return Prediction(NONE, why=f"positions are moved{ends}")
    if method.rpe_eval:
        return Prediction(NONE, why="evaluated with another encoding")
    if method.rpe.partition(":")[0] not in names():
        return Prediction(NONE, why="not loaded: give --rpe-module")
    return of_encodings([encoding for path in paths for encoding in checkpoints.load(path).learned()])


def of_encodings(encodings: Sequence[Encoding]) -> Prediction:
    """The prediction of all layers of a model, or of its seeds, with these encodings as they were trained."""
    decisions = [head.decision for encoding in encodings for head in verdict(encoding)]
    of_all = next((v for v in (DIVERGES, UNDECIDED, DEPENDS) if v in decisions), CONVERGES)
    return Prediction(of_all, decisions.count(CONVERGES), len(decisions))


def judge(found: Perplexities, predictions: Mapping[str, Prediction]) -> list[Judged]:
    """The methods of a sweep that were evaluated at the training length and beyond it."""
    judged = []
    for name in found.encodings:
        start = found.longer.get(name, found.trained_at)
        own = [deviation(one, start) for one in found.seeds(name)]
        if name in predictions and own:
            why = "; ".join(dict.fromkeys(contextless(found, name)))
            judged.append(Judged(name, predictions[name], mean_deviation(own), own, why))
    return judged


def contextless(found: Perplexities, name: str) -> list[str]:
    """Why the model of a seed cannot be said to use its context yet, by its result at the training length."""
    start = found.longer.get(name, found.trained_at)
    own = (row.result for row in found.rows_of(name) if row.result.length == start)
    return [why for one in own if (why := _contextless(one))]


def _contextless(one: TextResult) -> str:
    if one.unigram_ppl is not None and one.ppl >= one.unigram_ppl:
        return f"perplexity {one.ppl:.1f}, where symbol frequencies alone have {one.unigram_ppl:.1f}"
    seen = one.positions_loss
    gain = context_gain(seen.upto, seen.loss_base2, seen.tokens) if seen else None
    if gain is not None and gain < GAIN:
        return f"at the end of a block its loss is {100 * gain:.1f} % below that of the first {EARLY + 1} tokens"
    return ""


def blocks(judged: Sequence[Judged], trained_at: int, limit: float) -> list[Block]:
    """Deviations of each method, then predicted against observed, two by two; nothing of no method."""
    if not judged:
        return []
    text = (
        f"Definition 0.1: a model extrapolates if |ppl_n − ppl_{trained_at}| / ppl_{trained_at} < δ = {limit:g} at "
        f"every length n > {trained_at}; one-sided, improvements are free. Its theorems: it does if Σ exp(bias) "
        "converges."
    )
    found: list[Block] = [Text(text, _PAPER, _URL), deviations(judged, limit)]
    if unused := [f"{one.name} ({one.why})" for one in judged if one.why]:
        found.append(Text(f"{NO_VERDICT}: {', '.join(unused)}."))
    judged = [one for one in judged if not one.why]
    if not judged:
        return found
    both, one_sided = (observed(judged, limit, side) for side in (False, True))
    found += [both, Text(where(judged, False))]
    if one_sided.rows == both.rows:
        return [*found, Text(f"One-sided, the table is the same. {where(judged, True)}")]
    return [*found, one_sided, Text(where(judged, True))]


def deviations(judged: Sequence[Judged], limit: float) -> Table:
    """Each method's prediction, its deviations and whether it extrapolates."""
    head = ["encoding", "Σ exp(bias) as trained", "largest", "worst rise", "at the end", "extrapolates", "one-sided"]
    rows = []
    for one in judged:
        numbers = [
            spread(getattr(one.found, part), form, [getattr(seed, part) for seed in one.seeds])
            for part, form in (("largest", ".3f"), ("worst", ".3f"), ("end", "+.3f"))
        ]
        rows.append(Row(one.name, [words(one.prediction), *numbers, *map(Cell, one.answers(limit))]))
    caption = "Relative deviation from the perplexity at the training length, and what the series says."
    if any(len(one.seeds) > 1 for one in judged):
        caption += " Means over seeds; in brackets, from the least seed to the largest."
    return Table(caption, head, rows)


def observed(judged: Sequence[Judged], limit: float, one_sided: bool) -> Table:
    """By prediction, the methods that extrapolate and those that do not; predictions of no method are left out."""
    rows = []
    for said in (CONVERGES, DIVERGES, UNDECIDED, DEPENDS, NONE):
        own = [one for one in judged if one.prediction.verdict == said]
        if own or said in (CONVERGES, DIVERGES):
            sides = [[o.name for o in own if o.found.extrapolates(limit, one_sided) is side] for side in (True, False)]
            cells = [Cell(f"{len(side)}: {', '.join(side)}" if side else "0") for side in sides]
            rows.append(Row("no prediction" if said == NONE else said, cells))
    caption = f"Predicted (rows) and observed (columns) at δ = {limit:g}{', one-sided' if one_sided else ''}."
    return Table(caption, ["Σ exp(bias)", "extrapolates", "does not"], rows, words=True)


def where(judged: Sequence[Judged], one_sided: bool) -> str:
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
    # with three decimals, as in the table, or with as many as tell them apart
    pairs = ([f"{end:.{digits}f}" for end in found] for digits in range(3, 10))
    low, high = next((pair for pair in pairs if pair[0] != pair[1]), map(repr, found))
    return f"Prediction and observation agree for every method if {low} < δ ≤ {high}."


def csv(judged: Sequence[Judged], limit: float) -> str:
    """One line per method; deviations are relative and the end is signed."""
    head = ("encoding", "prediction", "heads_converging", "heads", "largest_deviation", "worst_rise", "end_deviation")
    lines = []
    for one in judged:
        said, found = one.prediction, one.found
        numbers = (said.converging, said.heads, found.largest, found.worst, found.end, limit)
        lines.append([one.name, said.verdict, *numbers, *one.answers(limit)])
    return csv_text([*head, "delta", "extrapolates", "extrapolates_one_sided"], lines)
