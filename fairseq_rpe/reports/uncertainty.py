"""Uncertainty of results: scores summed over independent clusters, their intervals, and paired tests of methods.

All intervals hold for the trained models at hand: they cover the choice of the text, the examples or the questions, and
not the variation between trainings. The formulas are those of :mod:`fairseq_rpe.evaluation.statistics`.
"""

import csv
import io
import math
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from fairseq_rpe.algorithms import build
from fairseq_rpe.evaluation import statistics
from fairseq_rpe.evaluation.question_records import QuestionResult
from fairseq_rpe.evaluation.records import ExactMatchResult, TextResult
from fairseq_rpe.evaluation.statistics import Estimate
from fairseq_rpe.utils import table
from fairseq_rpe.utils.table import Cell, number_cell, text_cell

SIGNIFICANCE = 0.05  # a difference with a smaller p-value counts as shown
TIE_MARK = "≈"  # after the value of a method that is not shown to differ from the best one of its column
BOUND_COLUMNS = ("standard_error", "low", "high")
CSV_COLUMNS = (*BOUND_COLUMNS, "clusters", "cluster_unit")
UNKNOWN = (None,) * len(CSV_COLUMNS)  # values of these columns for results without an interval


@dataclass(frozen=True, eq=False)
class ClusteredScores:
    """Scores of one model, summed over independent clusters.

    Attributes:
        strata: sum of the scores (G,) and number of tokens or examples (G,) of the clusters of each stratum. The mean
            score is the mean over the strata, all with the same weight.
        unit: what a cluster is, in the plural, such as ``documents``.
        identity: identifies the scored tokens or examples. Scores with the same identity can be compared in pairs.
    """

    strata: tuple[tuple[np.ndarray, np.ndarray], ...]
    unit: str
    identity: Hashable

    @property
    def clusters(self) -> int:
        """Number of clusters with tokens or examples."""
        return sum(int((counts > 0).sum()) for _, counts in self.strata)

    def minus(self, other: "ClusteredScores") -> "ClusteredScores":
        """Return the differences from the scores of another model, or of another length, on the same tokens.

        Raises:
            ValueError: the other scores are of other tokens or examples.
        """
        if self.identity != other.identity:
            raise ValueError("scores of different tokens or examples have no differences")
        pairs = zip(self.strata, other.strata, strict=True)
        return replace(self, strata=tuple((mine - theirs, counts) for (mine, counts), (theirs, _) in pairs))

    def estimate(self) -> Estimate:
        """Return the mean score with its 95 % interval.

        With one stratum this is :func:`~fairseq_rpe.evaluation.statistics.clustered_mean`. With several strata the
        deviation of a cluster is that from the mean of its stratum.
        """
        if len(self.strata) == 1:
            return statistics.clustered_mean(*self.strata[0])
        return statistics.clustered_mean(*self._stratified_deviations())

    def p_value(self) -> float:
        """Return the two-sided p-value of a mean of 0, for differences from :meth:`minus`."""
        if self.clusters < statistics.FEW_CLUSTERS:
            sums, counts = self._weighted()
            return statistics.sign_flip_p_value(sums[counts > 0])
        sums, counts = self.strata[0] if len(self.strata) == 1 else self._stratified_deviations()
        return statistics.difference_p_value(sums, np.zeros_like(sums), counts)

    def answers(self) -> np.ndarray | None:
        """Return whether each example is right, (examples,) bool; None with other scores or several strata."""
        if len(self.strata) > 1:
            return None
        sums, counts = self.strata[0]
        return sums > 0 if (counts == 1).all() and ((sums == 0) | (sums == 1)).all() else None

    def _weighted(self) -> tuple[np.ndarray, np.ndarray]:
        """Return sums and counts (G,) of the clusters of all strata, such that their ratio is the mean over strata."""
        totals = [counts.sum() for _, counts in self.strata]
        sums = [sums / total for (sums, _), total in zip(self.strata, totals, strict=True)]
        counts = [counts / total for (_, counts), total in zip(self.strata, totals, strict=True)]
        return np.concatenate(sums), np.concatenate(counts)

    def _stratified_deviations(self) -> tuple[np.ndarray, np.ndarray]:
        """Return sums and counts (G,) from which ``clustered_mean`` computes the mean over strata and its error.

        With G_h clusters in stratum h, the variance of the mean over H strata is
        Σ_h H⁻²·G_h/(G_h − 1)·Σ_c (s_c − n_c·m_h)² / N_h². A stratum of one cluster has no spread of its own, so the
        strata of one cluster count as one stratum: the deviations are those from the mean over these strata.
        """
        total = sum(len(sums) for sums, _ in self.strata)
        mean = float(np.mean([sums.sum() / counts.sum() for sums, counts in self.strata]))
        singles = [sums.sum() / counts.sum() for sums, counts in self.strata if len(sums) == 1]
        all_sums, all_counts = [], []
        for sums, counts in self.strata:
            weights = counts / counts.sum()
            own_mean = np.mean(singles) if len(sums) == 1 else sums.sum() / counts.sum()
            # clustered_mean multiplies the variance by G / (G − 1) with the G of all strata
            size = len(singles) if len(sums) == 1 else len(sums)
            correction = math.sqrt(size / max(size - 1, 1) * (total - 1) / total)
            deviations = sums / counts.sum() - weights * own_mean
            all_sums.append(weights * mean + deviations * correction)
            all_counts.append(weights)
        return np.concatenate(all_sums), np.concatenate(all_counts)


def average(models: Sequence[ClusteredScores | None]) -> ClusteredScores | None:
    """Return the mean of the scores of several models, or of several lengths, on the same tokens or examples.

    Args:
        models: scores of each model; None: unknown.

    Returns:
        The mean scores of each cluster; None if scores are unknown, or if the tokens or examples differ.
    """
    all_scores = _if_complete(models)
    if all_scores is None or len({scores.identity for scores in all_scores}) > 1:
        return None
    first = all_scores[0]
    strata = tuple(
        (np.mean([scores.strata[h][0] for scores in all_scores], axis=0), counts)
        for h, (_, counts) in enumerate(first.strata)
    )
    return replace(first, strata=strata)


def join(sets: Sequence[ClusteredScores | None]) -> ClusteredScores | None:
    """Return scores whose mean is the mean over several sets of examples that are independent of each other.

    Args:
        sets: scores on each set; None: unknown.

    Returns:
        The scores, with a stratum for each set; None if scores are unknown.
    """
    all_scores = _if_complete(sets)
    if all_scores is None:
        return None
    strata = tuple(stratum for scores in all_scores for stratum in scores.strata)
    return replace(all_scores[0], strata=strata, identity=tuple(scores.identity for scores in all_scores))


def _if_complete(items: Sequence[ClusteredScores | None]) -> list[ClusteredScores] | None:
    """Return the scores; None if there are none, or if one of them is unknown."""
    all_scores = [scores for scores in items if scores is not None]
    return all_scores if all_scores and len(all_scores) == len(items) else None


def text_losses(result: TextResult) -> ClusteredScores | None:
    """Return the losses of a result in bits, clustered by document or segment; None for results without segments."""
    segments = result.segments
    if segments is None:
        return None
    unit, _ = segments.units()
    counts, sums = segments.cluster_sums()
    # the digest of the segments is that of their boundaries alone
    return ClusteredScores(((sums, counts),), unit, (result.data, result.split, segments.digest))


def exact_match_scores(result: ExactMatchResult) -> ClusteredScores | None:
    """Return the right answers of a result by example; None for results of earlier versions.

    The labels of an example, in tasks that have several, are one cluster.
    """
    is_right = result.is_right()
    if is_right is None:
        return None
    by_example = is_right.reshape(-1, _labels_per_example(result)).astype(float)  # (E, Q)
    identity = (result.algorithm, result.split, result.length, result.depth, result.examples)
    counts = np.full(len(by_example), float(by_example.shape[1]))
    return ClusteredScores(((by_example.sum(1), counts),), "examples", identity)


def question_scores(result: QuestionResult) -> ClusteredScores | None:
    """Return the score of each question in percent; None if the result does not have them."""
    scores = result.scores_by_question()
    if scores is None:
        return None
    identity = (result.data, result.set, result.split, result.questions)
    return ClusteredScores(((scores, np.ones(len(scores))),), "questions", identity)


def _labels_per_example(result: ExactMatchResult) -> int:
    """Return the number of labels in each example of a task; 1 for tasks whose answer follows the prompt."""
    task = build(result.algorithm)
    if not task.has_labels:
        return 1
    labels = len(task.label_indices(task.draw(result.length, np.random.default_rng(0))))
    return labels if result.examples % labels == 0 else 1


def accuracy_estimate(scores: ClusteredScores) -> Estimate:
    """Estimate an accuracy, a mean of scores from 0 to 1, with the interval of Wilson.

    If the scores are not one bit for each of some independent examples of one stratum, n in Wilson's formula is the
    *effective* number of examples p·(1 − p)/SE² (Korn and Graubard 1998), with the clustered standard error SE. It is
    at most the number of clusters, so that the interval has a width above 0 even if all or no answers are right.
    """
    is_right = scores.answers()
    if is_right is not None:
        return statistics.wilson_interval(int(is_right.sum()), len(is_right))
    estimate = scores.estimate()
    share, error, examples = min(max(estimate.mean, 0.0), 1.0), estimate.standard_error, estimate.clusters
    if error:
        examples = max(1, min(examples, round(share * (1 - share) / error**2)))
    interval = statistics.wilson_interval(round(share * examples), examples)
    return replace(estimate, mean=share, low=min(interval.low, share), high=max(interval.high, share))


def perplexity_interval(ppl: float, loss: Estimate) -> tuple[float, float]:
    """Return the bounds of a perplexity: 2 to the power of the bounds of the loss in bits.

    Args:
        ppl: the perplexity, which is 2 ** mean up to rounding.
        loss: estimate of the mean loss.
    """
    return ppl * 2.0 ** (loss.low - loss.mean), ppl * 2.0 ** (loss.high - loss.mean)


def half_width_text(low: float, high: float, number_format: str) -> str:
    """Return " ± " and half the length of an interval; nothing if there is no interval."""
    return "" if math.isnan(high - low) else f" ± {format((high - low) / 2, number_format)}"


def with_suffix(cell: Cell, suffix: str, is_tie: bool) -> Cell:
    """Return a cell whose number is followed by an uncertainty and, for a tie, by ``TIE_MARK``.

    Args:
        cell: a cell with a number, perhaps followed by the range over seeds.
        suffix: the uncertainty, such as " ± 0.12"; may be empty.
        is_tie: whether the method is not shown to differ from the best one.
    """
    number, blank, seed_range = cell.text.partition(" ")
    return replace(cell, text=f"{number}{suffix}{f' {TIE_MARK}' if is_tie else ''}{blank}{seed_range}")


def describe_clusters(scores: Sequence[ClusteredScores]) -> str:
    """Return the number of clusters and what they are, such as "62 documents"; different numbers give a range."""
    counts = sorted({model.clusters for model in scores})
    units = " or ".join(sorted({model.unit for model in scores}))
    return f"{counts[0]:,}{f' to {counts[-1]:,}' if len(counts) > 1 else ''} {units}"


def error_titles() -> list[str]:
    """Return the titles of the columns of :func:`error_cells`."""
    return [name.replace("_", " ") for name in CSV_COLUMNS]


def error_cells(columns: Sequence[object], number_format: str) -> list[Cell]:
    """Return the cells of the values of ``CSV_COLUMNS``, for a table with a row for each result."""
    *numbers, clusters, unit = columns
    cells = [number_cell(value, number_format) if isinstance(value, float) else Cell("") for value in numbers]
    cells.append(number_cell(clusters, ",d") if isinstance(clusters, int) else Cell(""))
    return [*cells, text_cell(unit)]


def ties_with_best(
    means: Mapping[str, float], scores: Mapping[str, ClusteredScores | None], is_loss: bool = False
) -> set[str] | None:
    """Return the methods of a column of a table that are not shown to differ from the best one.

    Args:
        means: mean of each method that the column compares.
        scores: scores of each method; None: unknown.
        is_loss: whether the lowest mean is the best one.

    Returns:
        The methods whose difference from the best one has a p-value of at least ``SIGNIFICANCE`` after Holm's
        correction for all methods of the column; methods with the mean of the best one are left out. None if a method
        has no scores, or scores of other tokens or examples, so that the methods cannot be compared in pairs.
    """
    if not means:
        return set()
    best = (min if is_loss else max)(means, key=means.__getitem__)
    reference, p_values = scores[best], {}
    for name in means:
        other = scores[name]
        if reference is None or other is None or other.identity != reference.identity:
            return None
        if name != best:
            p_values[name] = paired_p_value(reference, other)
    adjusted = dict(zip(p_values, statistics.holm(list(p_values.values())), strict=True))
    return {name for name, p in adjusted.items() if p >= SIGNIFICANCE and means[name] != means[best]}


def paired_p_value(first: ClusteredScores, second: ClusteredScores) -> float:
    """Test whether two models differ on the same tokens or examples.

    If the scores are one bit for each example of a single stratum, this is McNemar's test, else a test of the clustered
    differences. McNemar's test would weight a stratum by its number of examples, in contrast to the mean score.
    """
    a, b = first.answers(), second.answers()
    if a is not None and b is not None:
        return statistics.mcnemar_p_value(int((a & ~b).sum()), int((b & ~a).sum()))
    return first.minus(second).p_value()


def perplexity_columns(result: TextResult, with_bounds: bool = True) -> tuple[object, ...]:
    """Return the values of ``CSV_COLUMNS`` for a perplexity.

    The standard error is ln 2 · ppl · SE with the standard error SE of the loss in bits.

    Args:
        result: the result.
        with_bounds: whether to compute the numbers that need SciPy; otherwise they are None.
    """
    losses = text_losses(result)
    if losses is None:
        return UNKNOWN
    loss = losses.estimate() if with_bounds else None
    if loss is None or loss.standard_error is None:
        return None, None, None, losses.clusters, losses.unit
    low, high = perplexity_interval(result.ppl, loss)
    return math.log(2) * result.ppl * loss.standard_error, low, high, losses.clusters, losses.unit


def accuracy_columns(result: ExactMatchResult, with_bounds: bool = True) -> tuple[object, ...]:
    """Return the values of ``CSV_COLUMNS`` for an accuracy from 0 to 1.

    Results of earlier versions have them, too, unless examples have several labels.

    Args:
        result: the result.
        with_bounds: whether to compute the numbers that need SciPy; otherwise they are None.
    """
    scores = exact_match_scores(result)
    if scores is None and build(result.algorithm).has_labels:
        return UNKNOWN
    clusters = result.examples if scores is None else scores.clusters
    if not with_bounds:
        return None, None, None, clusters, "examples"
    wilson = statistics.wilson_interval
    estimate = wilson(result.right, result.examples) if scores is None else accuracy_estimate(scores)
    return estimate.standard_error, estimate.low, estimate.high, clusters, "examples"


def question_columns(result: QuestionResult, with_bounds: bool = True) -> tuple[object, ...]:
    """Return the values of ``CSV_COLUMNS`` for a score in percent.

    Args:
        result: the result.
        with_bounds: whether to compute the numbers that need SciPy; otherwise they are None.
    """
    scores = question_scores(result)
    if scores is None:
        return UNKNOWN
    estimate = scores.estimate() if with_bounds else None
    if estimate is None or estimate.standard_error is None:
        return None, None, None, scores.clusters, scores.unit
    return estimate.standard_error, estimate.low, estimate.high, scores.clusters, scores.unit


def without_bounds(csv_text: str) -> str:
    """Return a CSV file of results with empty bounds, as ``csv(with_bounds=False)`` of the results returns it.

    Args:
        csv_text: contents of the file.
    """
    try:
        head, *rows = csv.reader(io.StringIO(csv_text))
    except (ValueError, csv.Error):  # an empty or damaged file is none that csv() returns
        return csv_text
    indices = [head.index(name) for name in BOUND_COLUMNS if name in head]
    blanked = ([("" if index in indices else value) for index, value in enumerate(row)] for row in rows)
    return table.csv_text(head, blanked)
