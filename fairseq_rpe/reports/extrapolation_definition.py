"""Definition 0.1 in a sweep: whether theory predicts that a method extrapolates, and whether it does."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from fairseq_rpe.analysis.convergence import CONVERGES, DEPENDS, DIVERGES, UNDECIDED, verdict
from fairseq_rpe.analysis.extrapolation import (
    LAST_EARLY_POSITION,
    MIN_CONTEXT_GAIN,
    Deviation,
    context_gain,
    deviation,
    mean_deviation,
    separating_deltas,
)
from fairseq_rpe.analysis.layer_stack import stack_decision
from fairseq_rpe.core.layer_pattern import parse_pattern
from fairseq_rpe.core.spec import parse
from fairseq_rpe.encodings import Encoding, names
from fairseq_rpe.evaluation.position_limits import max_length
from fairseq_rpe.evaluation.records import TextResult
from fairseq_rpe.reports import uncertainty
from fairseq_rpe.reports.page import Block, Text
from fairseq_rpe.reports.sweep_results import Perplexities, planned_runs
from fairseq_rpe.reports.uncertainty import CSV_COLUMNS
from fairseq_rpe.runs import checkpoints
from fairseq_rpe.sweeps.sweep_record import Method, SweepFolder, SweepRecord
from fairseq_rpe.utils.table import Cell, Table, TableRow, cell_with_range, csv_text, format_number, text_cell

NONE = "none"  # a verdict: no prediction
DELTA = 0.05  # default of δ
# An observed verdict: δ is within the interval of the deviation. UNDECIDED is a verdict on a series instead.
NOT_CERTAIN = "not certain"
NO_CONTEXT_VERDICT = "No verdict, because the model does not use its context yet"
_PAPER = "Exploring Transformer Extrapolation (arXiv 2307.10156)"
_URL = "https://arxiv.org/abs/2307.10156"


@dataclass(frozen=True)
class PredictedVerdict:
    """Verdict on Σ exp(bias) with a method's trained parameters, over all heads of all layers and seeds.

    Attributes:
        verdict: ``DIVERGES`` if one head diverges, else ``UNDECIDED`` or ``DEPENDS`` if one head has that verdict, else
            ``CONVERGES``; ``NONE`` without a prediction.
        converging: number of heads whose series converges.
        heads: number of heads.
        reason: why there is no prediction; empty if there is one.
    """

    verdict: str
    converging: int = 0
    heads: int = 0
    reason: str = ""

    def __str__(self) -> str:
        if self.reason:
            return self.reason
        if 0 < self.converging < self.heads:
            return f"{self.verdict} ({self.heads - self.converging} of {self.heads} heads)"
        return self.verdict


@dataclass(frozen=True)
class DeviationInterval:
    """Bounds of the relative deviations of a method, mean over seeds, each from 95 % intervals.

    The ratio of the perplexities at the lengths n and m is 2 ** (ℓ_n − ℓ_m), with the mean losses ℓ in bits of the same
    tokens. Its interval follows from the differences of the losses of each cluster.

    Attributes:
        low: lower bounds: ``largest`` and ``worst`` are the largest lower bounds of |deviation| and max(0, deviation)
            over all lengths, ``end`` is the lower bound of the signed deviation at the longest length.
        high: upper bounds.
        clusters: number of clusters.
        unit: what a cluster is, in the plural, such as ``documents``.
    """

    low: Deviation
    high: Deviation
    clusters: int
    unit: str


@dataclass(frozen=True)
class ObservedVerdict:
    """Predicted verdict and observed change of the perplexity of one method.

    Attributes:
        name: name of the method.
        prediction: predicted verdict.
        deviation: relative deviation of the perplexity, mean over seeds.
        seeds: deviation of each seed.
        no_verdict_reason: evidence that the model does not use its context yet; empty if it does.
        interval: bounds of the deviation; None for results without losses by segment.
    """

    name: str
    prediction: PredictedVerdict
    deviation: Deviation
    seeds: Sequence[Deviation] = ()
    no_verdict_reason: str = ""
    interval: DeviationInterval | None = None

    def answers(self, delta: float) -> list[str]:
        """Return whether the method extrapolates: by the definition, then one-sided.

        Args:
            delta: δ of the definition.

        Returns:
            Two answers: ``yes``, ``no``, ``NOT_CERTAIN`` or ``no verdict``.
        """
        if self.no_verdict_reason:
            return ["no verdict"] * 2
        return [self.answer(delta, one_sided) for one_sided in (False, True)]

    def answer(self, delta: float, one_sided: bool) -> str:
        """Return ``yes`` or ``no`` on whether the method extrapolates, or ``NOT_CERTAIN``.

        With an interval, the answer is ``yes`` if the upper bounds of the deviations at all lengths are below δ, and
        ``no`` if a lower bound is not. Without an interval, the deviation decides.

        Args:
            delta: δ of the definition.
            one_sided: whether improvements do not count as deviations.
        """
        low, high = (self.deviation,) * 2 if self.interval is None else (self.interval.low, self.interval.high)
        if high.extrapolates(delta, one_sided):
            return "yes"
        return NOT_CERTAIN if low.extrapolates(delta, one_sided) else "no"


def predict_verdicts(folder: SweepFolder, record: SweepRecord) -> dict[str, PredictedVerdict]:
    """Predict the verdict of each method with a finished run from its trained parameters."""
    paths: dict[str, list[Path]] = {}
    for run in planned_runs(folder, record):
        checkpoint = run.folder.checkpoints.last
        if checkpoint.is_file():
            paths.setdefault(run.method.name, []).append(checkpoint)
    return {name: _predict_method(record, record.method(name), files) for name, files in paths.items()}


def _predict_method(record: SweepRecord, method: Method, paths: Sequence[Path]) -> PredictedVerdict:
    """Predict the verdict of a method from its checkpoints, or state why there is no prediction."""
    if not method.leaves_positions:
        end = max_length(method.positions_eval, record.settings.tokens or 0)
        ends = f", and end at {end}" if end and end < max(record.lengths, default=0) else ""
        return PredictedVerdict(NONE, reason=f"positions are transformed{ends}")
    if method.rpe_eval:
        return PredictedVerdict(NONE, reason="evaluated with another encoding")
    if any(parse(spec)[0] not in names() for spec in parse_pattern(method.rpe).specs):
        return PredictedVerdict(NONE, reason="not loaded: use --rpe-module")
    return predict_from_encodings([encoding for path in paths for encoding in checkpoints.load(path).load_encodings()])


def predict_from_encodings(encodings: Sequence[Encoding]) -> PredictedVerdict:
    """Predict the verdict of trained encodings, those of all layers and seeds of a method."""
    decisions = [head.decision for encoding in encodings for head in verdict(encoding)]
    return PredictedVerdict(stack_decision(decisions), decisions.count(CONVERGES), len(decisions))


def observe_verdicts(perplexities: Perplexities, predictions: Mapping[str, PredictedVerdict]) -> list[ObservedVerdict]:
    """Observe the verdict of each method that has a prediction and was evaluated at the training length and beyond.

    Args:
        perplexities: perplexities of the sweep.
        predictions: predicted verdict by method.

    Returns:
        Predicted and observed verdict of each such method.
    """
    verdicts = []
    for name in perplexities.encodings:
        start = perplexities.continued_lengths.get(name, perplexities.train_length)
        deviations = [deviation(curve, start) for curve in perplexities.seed_curves(name)]
        if name in predictions and deviations:
            reason = "; ".join(dict.fromkeys(unused_context_reasons(perplexities, name)))
            interval = _deviation_interval(perplexities.seed_results(name), start)
            mean = mean_deviation(deviations)
            verdicts.append(ObservedVerdict(name, predictions[name], mean, deviations, reason, interval))
    return verdicts


def _deviation_interval(seeds: Sequence[Mapping[int, TextResult]], start: int) -> DeviationInterval | None:
    """Return the bounds of the deviations from the perplexity at a training length, as mean over seeds.

    Args:
        seeds: results by length of each seed.
        start: training length in tokens.

    Returns:
        The bounds; None if a result has no losses by segment, those of other tokens, or a single cluster.
    """
    lows, highs, changes = [], [], []
    for results in seeds:
        reference = uncertainty.text_losses(results[start])
        bounds: dict[int, tuple[float, float]] = {}  # of (ppl_n − ppl_m) / ppl_m by length n
        for length in (n for n in sorted(results) if n > start):
            losses = uncertainty.text_losses(results[length])
            if reference is None or losses is None or losses.identity != reference.identity or losses.clusters < 2:
                return None
            changes.append(losses.minus(reference))
            ratio = results[length].ppl / results[start].ppl
            low, high = uncertainty.perplexity_interval(ratio, changes[-1].estimate())
            bounds[length] = low - 1, high - 1
        lowest, highest = _deviation_bounds(bounds)
        lows.append(lowest)
        highs.append(highest)
    low, high = mean_deviation(lows), mean_deviation(highs)
    return DeviationInterval(low, high, changes[0].clusters, changes[0].unit)


def _deviation_bounds(bounds: Mapping[int, tuple[float, float]]) -> tuple[Deviation, Deviation]:
    """Return lower and upper bounds of the deviations from the bounds of the signed deviation at each length."""
    lengths = bounds.values()
    # |deviation| may be 0 if the interval of the deviation has 0 in it
    least = [0.0 if low < 0 < high else min(abs(low), abs(high)) for low, high in lengths]
    most = [max(abs(low), abs(high)) for low, high in lengths]
    end_low, end_high = bounds[max(bounds)]
    return (
        Deviation(max(least), max(0.0, *(low for low, _ in lengths)), end_low),
        Deviation(max(most), max(0.0, *(high for _, high in lengths)), end_high),
    )


def unused_context_reasons(perplexities: Perplexities, name: str) -> list[str]:
    """Return why seeds of a method do not use their context yet, judged at the training length; empty if they do."""
    start = perplexities.continued_lengths.get(name, perplexities.train_length)
    results = (row.result for row in perplexities.results_for(name) if row.result.length == start)
    return [reason for result in results if (reason := _unused_context_reason(result))]


def _unused_context_reason(result: TextResult) -> str:
    """Return evidence that the model of a result at its training length does not use its context; empty without."""
    if result.unigram_ppl is not None and result.ppl >= result.unigram_ppl:
        return f"its perplexity is {result.ppl:.1f}, and that of symbol frequencies {result.unigram_ppl:.1f}"
    buckets = result.positions_loss
    gain = context_gain(buckets.upto, buckets.loss_base2, buckets.tokens) if buckets else None
    if gain is not None and gain < MIN_CONTEXT_GAIN:
        return (
            f"at the end of a block its loss is {100 * gain:.1f} % below that of the first "
            f"{LAST_EARLY_POSITION + 1} tokens"
        )
    return ""


def definition_blocks(verdicts: Sequence[ObservedVerdict], train_length: int, delta: float) -> list[Block]:
    """Build the tables of deviations and of predicted against observed verdicts.

    Args:
        verdicts: verdict of each method.
        train_length: training length in tokens.
        delta: δ of the definition.

    Returns:
        The blocks; empty without verdicts.
    """
    if not verdicts:
        return []
    text = (
        f"Definition 0.1: a model extrapolates if |ppl_n − ppl_{train_length}| / ppl_{train_length} < δ = {delta:g} at "
        f"every length n > {train_length}; one-sided, a lower perplexity is no deviation. Theorem: a model "
        "extrapolates if Σ exp(bias) converges."
    )
    blocks: list[Block] = [Text(text, _PAPER, _URL), deviation_table(verdicts, delta)]
    without_verdict = [observed for observed in verdicts if observed.no_verdict_reason]
    if without_verdict:
        methods = ", ".join(f"{observed.name} ({observed.no_verdict_reason})" for observed in without_verdict)
        blocks.append(Text(f"{NO_CONTEXT_VERDICT}: {methods}."))
    verdicts = [observed for observed in verdicts if not observed.no_verdict_reason]
    if not verdicts:
        return blocks
    by_definition, one_sided = (agreement_table(verdicts, delta, one_sided) for one_sided in (False, True))
    blocks += [by_definition, Text(_agreement_text(verdicts, delta, one_sided=False))]
    agreement = _agreement_text(verdicts, delta, one_sided=True)
    if one_sided.rows == by_definition.rows:
        return [*blocks, Text(f"The one-sided table is the same. {agreement}")]
    return [*blocks, one_sided, Text(agreement)]


def _agreement_text(verdicts: Sequence[ObservedVerdict], delta: float, one_sided: bool) -> str:
    """Return the sentences below a table of agreement: the methods that it leaves out, and :func:`describe_agreement`.

    Args:
        verdicts: verdicts of the methods that use their context.
        delta: δ of the definition.
        one_sided: whether improvements do not count as deviations.
    """
    left_out = [verdict.name for verdict in verdicts if verdict.answer(delta, one_sided) == NOT_CERTAIN]
    names = f"Not certain, because δ is within the interval of the deviation: {', '.join(left_out)}. "
    agreement = describe_agreement(verdicts, one_sided)
    return f"{names if left_out else ''}{agreement}"


def deviation_table(verdicts: Sequence[ObservedVerdict], delta: float) -> Table:
    """Return a table of each method's prediction, deviations and verdicts."""
    head = ["encoding", "Σ exp(bias) as trained", "largest", "worst rise", "at the end", "extrapolates", "one-sided"]
    number_formats = {"largest": ".3f", "worst": ".3f", "end": "+.3f"}  # by attribute of Deviation
    rows = []
    for observed in verdicts:
        cells = [text_cell(observed.prediction)]
        for attribute, number_format in number_formats.items():
            seeds = [getattr(seed, attribute) for seed in observed.seeds]
            cell = cell_with_range(getattr(observed.deviation, attribute), number_format, seeds)
            if observed.interval is not None:
                bounds = [getattr(bound, attribute) for bound in (observed.interval.low, observed.interval.high)]
                low, high = (format_number(bound, number_format) for bound in bounds)
                cell = replace(cell, text=f"{cell.text} [{low} to {high}]")
            cells.append(cell)
        rows.append(TableRow(observed.name, [*cells, *map(Cell, observed.answers(delta))]))
    caption = "Relative deviation from the perplexity at the training length, and verdict on the series."
    if any(len(observed.seeds) > 1 for observed in verdicts):
        caption += " Means over seeds; in brackets, the range over seeds."
    intervals = [observed.interval for observed in verdicts if observed.interval is not None]
    if clusters := sorted({f"{interval.clusters:,} {interval.unit}" for interval in intervals}):
        caption += (
            f" In square brackets, the 95 % interval ({' or '.join(clusters)}, paired over lengths). A method "
            f"extrapolates if its interval ends below δ; if δ is within the interval, the verdict is {NOT_CERTAIN}."
        )
    return Table(caption, head, rows)


def agreement_table(verdicts: Sequence[ObservedVerdict], delta: float, one_sided: bool) -> Table:
    """Return the table of predicted verdicts (rows) against observed ones (columns).

    Methods whose observed verdict is ``NOT_CERTAIN`` are in no column. The rows of ``CONVERGES`` and ``DIVERGES`` are
    always there; other predictions have a row if a method has them.
    """
    rows = []
    for prediction in (CONVERGES, DIVERGES, UNDECIDED, DEPENDS, NONE):
        group = [observed for observed in verdicts if observed.prediction.verdict == prediction]
        if group or prediction in (CONVERGES, DIVERGES):
            answers = {observed.name: observed.answer(delta, one_sided) for observed in group}
            columns = [[name for name, answer in answers.items() if answer == column] for column in ("yes", "no")]
            cells = [Cell(f"{len(methods)}: {', '.join(methods)}" if methods else "0") for methods in columns]
            rows.append(TableRow("no prediction" if prediction == NONE else prediction, cells))
    caption = f"Predicted (rows) and observed (columns) at δ = {delta:g}{', one-sided' if one_sided else ''}."
    return Table(caption, ["Σ exp(bias)", "extrapolates", "does not"], rows, is_text=True)


def _round_inwards(low: float, high: float, digits: int) -> tuple[str, str]:
    """Return the ends of an interval as text with so many decimals: the lower end rounded up, the upper one down."""
    scale = 10**digits
    rounding = 1e-9  # 0.04 · 1000 may be less than 40
    ends = math.ceil(low * scale - rounding) / scale, math.floor(high * scale + rounding) / scale
    return f"{ends[0]:.{digits}f}", f"{ends[1]:.{digits}f}"


def describe_agreement(verdicts: Sequence[ObservedVerdict], one_sided: bool) -> str:
    """Return in words the δ at which prediction and observation agree for every method."""
    deviations: dict[str, list[float]] = {CONVERGES: [], DIVERGES: []}  # by prediction
    for observed in verdicts:
        if observed.prediction.verdict in deviations:
            largest = observed.deviation.worst if one_sided else observed.deviation.largest
            deviations[observed.prediction.verdict].append(largest)
    if not all(deviations.values()):
        return "There is only one kind of series, so prediction and observation can agree for some δ."
    interval = separating_deltas(deviations[CONVERGES], deviations[DIVERGES])
    if interval is None:
        return "There is no δ at which prediction and observation agree for every method."
    # with three decimals, as in the table, or with as many as the two ends need to differ; rounded into the interval
    pairs = (_round_inwards(*interval, digits) for digits in range(3, 10))
    low, high = next((pair for pair in pairs if float(pair[0]) < float(pair[1])), map(repr, interval))
    return f"Prediction and observation agree for every method if {low} < δ ≤ {high}."


def verdict_csv(verdicts: Sequence[ObservedVerdict], delta: float) -> str:
    """Return a CSV row for each method; deviations are relative, and that at the longest length is signed."""
    head = ("encoding", "prediction", "heads_converging", "heads", "largest_deviation", "worst_rise", "end_deviation")
    lines = []
    for observed in verdicts:
        prediction, change = observed.prediction, observed.deviation
        numbers = (prediction.converging, prediction.heads, change.largest, change.worst, change.end, delta)
        interval = observed.interval
        bounds: list[object] = [None] * 6
        if interval is not None:
            low, high = interval.low, interval.high
            bounds = [low.largest, high.largest, low.worst, high.worst, interval.clusters, interval.unit]
        lines.append([observed.name, prediction.verdict, *numbers, *observed.answers(delta), *bounds])
    head = (*head, "delta", "extrapolates", "extrapolates_one_sided")
    return csv_text([*head, "largest_low", "largest_high", "worst_low", "worst_high", *CSV_COLUMNS[-2:]], lines)
