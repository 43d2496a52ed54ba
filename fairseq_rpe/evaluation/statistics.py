"""Statistics for comparing trained models: clustered standard errors, paired tests, bootstrap and corrected p-values.

Tokens of a document are not independent, so the unit of all intervals is a *cluster*, such as a document. A result of
G clusters is a pair of arrays: the sum s_c of the scores (losses, or 1 for each right answer) of cluster c, and the
number n_c of its tokens or examples. The mean is Σ_c s_c / Σ_c n_c.

Two models that score the same tokens are compared by the differences of their scores. The losses of two models are
correlated, so the standard error of the difference is smaller than the standard errors of both means suggest (Miller,
"Adding Error Bars to Evals", arXiv 2411.00640).
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import NormalDist

import numpy as np
from numpy.typing import ArrayLike

# With fewer clusters, difference_p_value does not rely on the t distribution.
FEW_CLUSTERS = 30
SAMPLES = 10_000
# Upper limit of the elements of the arrays that one step of a resampling allocates.
_CHUNK_ELEMENTS = 2**21


@dataclass(frozen=True)
class Estimate:
    """An estimated mean with its confidence interval.

    A single cluster shows nothing about the spread between clusters. In this case ``standard_error`` is None, and
    ``low``, ``high`` and ``half_width`` are NaN, so that every comparison with them is false.

    Attributes:
        mean: the estimate, in the unit of the scores.
        standard_error: its standard error, in the same unit; None if there is one cluster.
        low: lower end of the confidence interval; NaN if there is one cluster.
        high: upper end of the confidence interval; NaN if there is one cluster.
        clusters: number of independent units: documents, blocks, examples or seeds.
    """

    mean: float
    standard_error: float | None
    low: float
    high: float
    clusters: int

    @property
    def half_width(self) -> float:
        """Half of the width of the interval, to print as mean ± half_width."""
        return (self.high - self.low) / 2


def clustered_mean(sums: ArrayLike, counts: ArrayLike, confidence: float = 0.95) -> Estimate:
    """Estimate a mean score and its standard error, clustered by document or block.

    With the mean m = Σ_c s_c / Σ_c n_c over G clusters, the standard error is

        SE = sqrt(Σ_c (s_c - n_c·m)²) / Σ_c n_c · sqrt(G / (G - 1)),

    and the interval is m ± t·SE, with the quantile t of Student's t distribution with G - 1 degrees of freedom. Without
    the factor sqrt(G / (G - 1)), SE is the clustered standard error of Miller (arXiv 2411.00640). With one token in
    each cluster, SE = sd / sqrt(G) with the sample standard deviation sd.

    Args:
        sums: (G,) sum s_c of the scores of each cluster.
        counts: (G,) number n_c of tokens or examples of each cluster. Clusters with n_c = 0 are left out.
        confidence: probability that the interval contains the expected score.

    Returns:
        The mean and its interval, in the unit of the scores; NaN if a score is NaN.

    Raises:
        ValueError: the shapes differ, a count is negative, or all counts are 0.
    """
    s, n = _clusters(sums, counts)
    clusters, total = len(n), float(n.sum())
    mean = float(s.sum()) / total
    if clusters < 2:
        return Estimate(mean, None, math.nan, math.nan, clusters)
    squares = float(((s - n * mean) ** 2).sum())
    error = math.sqrt(squares * clusters / (clusters - 1)) / total
    half_width = _t_quantile((1 + confidence) / 2, clusters - 1) * error
    return Estimate(mean, error, mean - half_width, mean + half_width, clusters)


def paired_difference(sums_a: ArrayLike, sums_b: ArrayLike, counts: ArrayLike, confidence: float = 0.95) -> Estimate:
    """Estimate the mean difference a - b of two models on the same tokens or examples.

    This is :func:`clustered_mean` of the differences d = a - b of each token, whose sums are s_a - s_b. Its variance is
    SE_a² + SE_b² - 2·ρ·SE_a·SE_b with the correlation ρ of both models over the clusters (Miller, arXiv 2411.00640).
    For losses in bits, 2 ** mean, 2 ** low and 2 ** high are the ratio of the perplexities and its interval.

    Args:
        sums_a: (G,) sum of the scores of model a in each cluster.
        sums_b: (G,) sum of the scores of model b in the same clusters.
        counts: (G,) number of tokens or examples of each cluster.
        confidence: probability that the interval contains the expected difference.

    Returns:
        The mean difference and its interval, in the unit of the scores.

    Raises:
        ValueError: the shapes differ, a count is negative, or all counts are 0.
    """
    return clustered_mean(_differences(sums_a, sums_b), counts, confidence)


def sign_flip_p_value(differences: ArrayLike, samples: int = SAMPLES, seed: int = 0) -> float:
    """Test by random signs whether the differences of two models are symmetric about 0.

    If both models are equally good, the difference of a cluster is as likely d_c as -d_c. The p-value is the share of
    assignments of signs ±1 with |Σ_c ±d_c| >= |Σ_c d_c| (Fisher, "The Design of Experiments", 1935). If there are no
    more than ``samples`` assignments, up to a common sign, the function enumerates them all. Otherwise it draws
    ``samples`` assignments, and the p-value is (1 + hits) / (1 + samples), which is never 0 (Phipson and Smyth 2010).

    Args:
        differences: (G,) sum s_a - s_b of the differences in each cluster.
        samples: number of drawn assignments.
        seed: seed of the draws.

    Returns:
        The two-sided p-value; 1 for fewer than two clusters, NaN if a difference is NaN or infinite.

    Raises:
        ValueError: the array does not have one dimension.
    """
    d = np.asarray(differences, dtype=np.float64)
    if d.ndim != 1:
        raise ValueError(f"differences have shape {d.shape}, expected (G,)")
    clusters = len(d)
    # Sums in another order have other rounding errors; such a sum counts as equal.
    threshold = abs(float(d.sum())) - 1e-12 * float(np.abs(d).sum())
    if math.isnan(threshold):  # for a model that diverged; no sum would reach the threshold
        return math.nan
    is_exact = clusters < 2 or 2 ** (clusters - 1) <= samples
    total = 2 ** max(clusters - 1, 0) if is_exact else samples
    random = np.random.default_rng(seed)
    rows = max(1, _CHUNK_ELEMENTS // max(clusters, 1))
    hits = 0
    for start in range(0, total, rows):
        size = min(rows, total - start)
        if is_exact:
            # (size, G): the bits of each number; the last sign is always +, because |Σ| ignores a common sign
            is_negative = np.arange(start, start + size)[:, None] >> np.arange(clusters) & 1
        else:
            is_negative = random.integers(0, 2, (size, clusters))
        hits += int((np.abs((1 - 2 * is_negative) @ d) >= threshold).sum())
    return hits / total if is_exact else (1 + hits) / (1 + total)


def difference_p_value(sums_a: ArrayLike, sums_b: ArrayLike, counts: ArrayLike) -> float:
    """Test whether two models differ in their mean score on the same tokens or examples.

    With at least ``FEW_CLUSTERS`` (30) clusters, the p-value is that of Student's t = mean / SE of
    :func:`paired_difference` with G - 1 degrees of freedom. With fewer clusters, it is :func:`sign_flip_p_value`.

    Args:
        sums_a: (G,) sum of the scores of model a in each cluster.
        sums_b: (G,) sum of the scores of model b in the same clusters.
        counts: (G,) number of tokens or examples of each cluster. Clusters with count 0 are left out.

    Returns:
        The two-sided p-value; 1 for a single cluster or equal models, NaN if a score is NaN.

    Raises:
        ValueError: the shapes differ, a count is negative, or all counts are 0.
    """
    d, n = _clusters(_differences(sums_a, sums_b), counts)
    if len(d) < FEW_CLUSTERS:
        return sign_flip_p_value(d)
    estimate = clustered_mean(d, n)
    if not estimate.standard_error:
        return 0.0 if estimate.mean else 1.0
    return _t_p_value(estimate.mean / estimate.standard_error, len(d) - 1)


def paired_bootstrap(
    sums: ArrayLike,
    counts: ArrayLike,
    statistic: Callable[[np.ndarray], np.ndarray],
    samples: int = SAMPLES,
    seed: int = 0,
) -> np.ndarray:
    """Draw clusters with replacement, and compute a statistic of the mean scores of all models for each draw.

    A draw has G clusters. Cluster c occurs w_c times in it, and the mean of a model is Σ_c w_c·s_c / Σ_c w_c·n_c. All
    models, and all lengths, use the same draws, so that the statistic can compare them (Efron 1979; paired: Koehn
    2004). The draws depend only on ``samples``, ``seed`` and G: two calls with the same values use the same draws.

    Args:
        sums: (M, G) sum of the scores of each of M models in each cluster. Other leading dimensions are possible, such
            as (M, L, G) for L lengths.
        counts: (G,) number of tokens or examples of each cluster, or an array that broadcasts to the shape of ``sums``
            if the lengths have different numbers of tokens.
        statistic: function of the means (K, M) of K draws, or (K, M, L), that returns an array (K, …).
        samples: number of draws.
        seed: seed of the draws.

    Returns:
        (samples, …) values of the statistic. A mean is NaN if its draw has no tokens.

    Raises:
        ValueError: the shapes differ, a count is negative, or all counts of a model are 0.
    """
    s, n = np.asarray(sums, dtype=np.float64), np.asarray(counts, dtype=np.float64)
    if s.ndim < 2 or n.shape[-1:] != s.shape[-1:]:
        raise ValueError(f"sums of shape {s.shape} and counts of shape {n.shape}: expected (models, G) and (G,)")
    if n.ndim > 1:
        n = np.broadcast_to(n, s.shape)
    _check_counts(n)
    clusters = s.shape[-1]
    # (G, M·L) and (G, M·L); the counts are (G, 1) if all models share them
    sum_columns, count_columns = s.reshape(-1, clusters).T, n.reshape(-1, clusters).T
    random = np.random.default_rng(seed)
    rows = max(1, _CHUNK_ELEMENTS // clusters)
    values = []
    for start in range(0, samples, rows):
        size = min(rows, samples - start)
        # Multinomial weights by counting the drawn indices, which takes less than half the time of random.multinomial.
        drawn = random.integers(0, clusters, (size, clusters)) + clusters * np.arange(size)[:, None]
        weights = np.bincount(drawn.ravel(), minlength=size * clusters).reshape(size, clusters).astype(np.float64)
        with np.errstate(invalid="ignore"):  # 0 / 0
            means = (weights @ sum_columns) / (weights @ count_columns)  # (K, M·L)
        values.append(np.asarray(statistic(means.reshape(size, *s.shape[:-1]))))
    return np.concatenate(values)


def bootstrap_interval(draws: ArrayLike, confidence: float = 0.95) -> tuple[np.ndarray, np.ndarray]:
    """Return the percentile interval of the draws of :func:`paired_bootstrap` (Efron 1979).

    The ends are the quantiles (1 - confidence) / 2 and (1 + confidence) / 2 of the draws.

    Args:
        draws: (samples, …) values of a statistic.
        confidence: probability that the interval contains the expected value of the statistic.

    Returns:
        Arrays (…) of the lower and of the upper ends; numbers if ``draws`` has one dimension.
    """
    low, high = np.quantile(np.asarray(draws), [(1 - confidence) / 2, (1 + confidence) / 2], axis=0)
    return low, high


def wilson_interval(right: int, examples: int, confidence: float = 0.95) -> Estimate:
    """Estimate an accuracy from independent examples, with the score interval of Wilson (1927).

    With the share p = right / examples of n examples and the normal quantile z, the interval is

        (p + z²/2n ± z·sqrt(p·(1 - p)/n + z²/4n²)) / (1 + z²/n).

    It stays within 0 and 1, and has a width above 0 even if no or all answers are right. If examples come in clusters,
    such as several questions about one text, use :func:`clustered_mean` instead.

    Args:
        right: number of right answers.
        examples: number n of examples, at least 1.
        confidence: probability that the interval contains the accuracy.

    Returns:
        The share p with the standard error sqrt(p·(1 - p)/n), Wilson's interval, and n as the number of clusters.

    Raises:
        ValueError: there is no example, or ``right`` is not between 0 and ``examples``.
    """
    if examples < 1 or not 0 <= right <= examples:
        raise ValueError(
            f"{right} right answers of {examples} examples: expected 0 <= right <= examples and an example"
        )
    z = NormalDist().inv_cdf((1 + confidence) / 2)
    share, ratio = right / examples, z * z / examples
    variance = share * (1 - share) / examples
    centre = (share + ratio / 2) / (1 + ratio)
    half_width = z * math.sqrt(variance + ratio / (4 * examples)) / (1 + ratio)
    # At 0 and n right answers an end is exactly 0 or 1, which rounding would miss.
    low = centre - half_width if right else 0.0
    high = centre + half_width if right < examples else 1.0
    return Estimate(share, math.sqrt(variance), low, high, examples)


def mcnemar_p_value(only_a: int, only_b: int) -> float:
    """Test whether two models have the same accuracy on the same independent examples (McNemar 1947).

    The test uses the examples that exactly one model answers correctly. If both models have the same accuracy, the
    number of those that only model a answers has the binomial distribution B(only_a + only_b, 1/2). The exact two-sided
    p-value is min(1, 2·P(X <= min(only_a, only_b))).

    Args:
        only_a: number of examples that model a answers correctly and model b does not.
        only_b: number of examples that model b answers correctly and model a does not.

    Returns:
        The p-value; 1 if there is no such example.

    Raises:
        ValueError: a number is negative.
    """
    from scipy.special import bdtr

    if min(only_a, only_b) < 0:
        raise ValueError(f"{only_a} and {only_b} examples: expected numbers >= 0")
    return min(1.0, 2 * float(bdtr(min(only_a, only_b), only_a + only_b, 0.5)))


def holm(p_values: Sequence[float]) -> list[float]:
    """Adjust the p-values of several comparisons (Holm 1979).

    With the p-values in ascending order, p_(1) <= … <= p_(m), the adjusted value is
    max_{j <= i} min(1, (m - j + 1)·p_(j)). Rejecting all hypotheses with an adjusted value of at most α limits the
    probability of any wrong rejection to α, whatever the dependence between the tests.

    Args:
        p_values: p-value of each of m comparisons.

    Returns:
        The adjusted p-values, in the order of the argument.

    Raises:
        ValueError: a p-value is not between 0 and 1.
    """
    p = np.asarray(p_values, dtype=np.float64)
    if not ((p >= 0) & (p <= 1)).all():
        raise ValueError(f"p-values {p.tolist()}: expected numbers between 0 and 1")
    order = np.argsort(p, kind="stable")
    adjusted = np.empty(len(p))
    adjusted[order] = np.maximum.accumulate(np.minimum(1, np.arange(len(p), 0, -1) * p[order]))
    return adjusted.tolist()


def smallest_detectable_difference(standard_error: float, power: float = 0.8, alpha: float = 0.05) -> float:
    """Return the true difference that a two-sided test finds significant with a certain probability.

    The difference is (z_(1-α/2) + z_power)·SE with normal quantiles z, which is 2.80·SE for the defaults (Miller, arXiv
    2411.00640, uses the formula to choose the number of questions).

    Args:
        standard_error: standard error SE of the difference, such as that of :func:`paired_difference`.
        power: probability of a significant result.
        alpha: level of significance α.
    """
    normal = NormalDist()
    return (normal.inv_cdf(1 - alpha / 2) + normal.inv_cdf(power)) * standard_error


def mean_over_seeds(values: ArrayLike, confidence: float = 0.95) -> Estimate:
    """Estimate the mean of a method over seeds: mean ± t·sd / sqrt(S), with S - 1 degrees of freedom.

    The interval covers the variation between trainings, in contrast to an interval over documents, which holds for one
    trained model. To compare two methods whose runs share their seeds, pass the difference of each seed. Do not use the
    interval if some seeds learn a task and others do not: report the share of those that do.

    Args:
        values: (S,) result of each seed.
        confidence: probability that the interval contains the expected result.

    Returns:
        The mean and its interval, with S as the number of clusters. For S = 1 there is no interval (:class:`Estimate`).

    Raises:
        ValueError: there is no value.
    """
    results = np.asarray(values, dtype=np.float64)
    return clustered_mean(results, np.ones(results.shape), confidence)


def _differences(sums_a: ArrayLike, sums_b: ArrayLike) -> np.ndarray:
    a, b = np.asarray(sums_a, dtype=np.float64), np.asarray(sums_b, dtype=np.float64)
    if a.shape != b.shape:
        raise ValueError(f"sums of shapes {a.shape} and {b.shape}: expected the same clusters")
    return a - b


def _clusters(sums: ArrayLike, counts: ArrayLike) -> tuple[np.ndarray, np.ndarray]:
    """Return sums and counts (G,) of the clusters that have tokens."""
    s, n = np.asarray(sums, dtype=np.float64), np.asarray(counts, dtype=np.float64)
    if s.ndim != 1 or s.shape != n.shape:
        raise ValueError(f"sums of shape {s.shape} and counts of shape {n.shape}: expected (G,) twice")
    _check_counts(n)
    return s[n > 0], n[n > 0]


def _check_counts(counts: np.ndarray) -> None:
    if not (counts >= 0).all() or not counts.any(axis=-1).all():
        raise ValueError("the counts of clusters must be 0 or more, with one above 0")


def _t_quantile(probability: float, degrees: int) -> float:
    # scipy.special takes 0.15 s to import, and many commands import this file without computing an interval.
    from scipy.special import stdtrit

    return float(stdtrit(degrees, probability))


def _t_p_value(t: float, degrees: int) -> float:
    """Return the two-sided p-value of Student's t."""
    from scipy.special import stdtr

    return 2 * float(stdtr(degrees, -abs(t)))
