"""Statistics of comparisons: coverage of the intervals on synthetic data, and the same numbers as SciPy and lm-eval."""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats

from fairseq_rpe.evaluation.statistics import (
    Estimate,
    bootstrap_interval,
    clustered_mean,
    difference_p_value,
    holm,
    mcnemar_p_value,
    mean_over_seeds,
    paired_bootstrap,
    paired_difference,
    sign_flip_p_value,
    smallest_detectable_difference,
    wilson_interval,
)

REPETITIONS = 1000
CLUSTERS = 100
MEANS = (3.0, 2.8)  # of the two models, in bits


def draw_losses(random: np.random.Generator) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Losses (2, T) of two models, the cluster (T,) of each token, and the number of tokens (G,) of each cluster.

    Each cluster has 5 to 60 tokens, a difficulty that both models share, and a difficulty for each model.
    """
    counts = random.integers(5, 61, CLUSTERS)
    clusters = np.repeat(np.arange(CLUSTERS), counts)
    effects = random.normal(0, 1, CLUSTERS) + random.normal(0, 0.3, (2, CLUSTERS))
    losses = np.array(MEANS)[:, None] + effects[:, clusters] + random.normal(0, 1, (2, len(clusters)))
    return losses, clusters, counts


def contains(estimate: Estimate, value: float) -> bool:
    return estimate.low <= value <= estimate.high


def test_intervals_contain_the_expected_value_in_95_percent_of_all_data_sets():
    random = np.random.default_rng(7)
    difference = MEANS[0] - MEANS[1]
    hits = dict.fromkeys(("mean", "difference", "bootstrap", "unpaired", "by token", "by token, difference"), 0)
    false_alarms = 0
    for seed in range(REPETITIONS):
        losses, clusters, counts = draw_losses(random)
        sums = np.array([np.bincount(clusters, values) for values in losses])  # (2, G)
        mean, paired = clustered_mean(sums[0], counts), paired_difference(*sums, counts)
        draws = paired_bootstrap(sums, counts, lambda means: means[:, 0] - means[:, 1], 400, seed)
        low, high = bootstrap_interval(draws)
        hits["mean"] += contains(mean, MEANS[0])
        hits["difference"] += contains(paired, difference)
        hits["bootstrap"] += low <= difference <= high
        false_alarms += difference_p_value(sums[0], sums[1] + difference * counts, counts) <= 0.05
        # the same formulas with each token as a cluster
        naive = [1.96 * x.std(ddof=1) / math.sqrt(x.size) for x in (losses[0], losses[0] - losses[1])]
        hits["by token"] += abs(mean.mean - MEANS[0]) <= naive[0]
        hits["by token, difference"] += abs(paired.mean - difference) <= naive[1]
        unpaired = math.hypot(mean.half_width, clustered_mean(sums[1], counts).half_width)
        hits["unpaired"] += abs(paired.mean - difference) <= unpaired
    coverage = {name: count / REPETITIONS for name, count in hits.items()}
    assert all(0.93 <= coverage[name] <= 0.97 for name in ("mean", "difference", "bootstrap")), coverage
    assert 0.03 <= false_alarms / REPETITIONS <= 0.07
    assert coverage["by token"] < 0.6 and coverage["by token, difference"] < 0.9, coverage
    assert coverage["unpaired"] > 0.99, coverage  # too wide


@pytest.mark.parametrize("share", [0.1, 0.3, 0.5, 0.8])
def test_wilson_intervals_contain_the_accuracy_in_95_percent_of_all_data_sets(share):
    right = np.arange(201)
    inside = [contains(wilson_interval(int(k), 200), share) for k in right]
    assert 0.93 <= stats.binom.pmf(right, 200, share)[inside].sum() <= 0.97


@settings(max_examples=50, deadline=None, derandomize=True)
@given(st.lists(st.tuples(st.integers(1, 9), st.floats(-9, 9), st.floats(-9, 9)), min_size=2, max_size=20))
def test_clustered_means_are_those_of_the_definition(clusters):
    counts, a, b = (np.array(values) for values in zip(*clusters, strict=True))
    for estimate, sums in ((clustered_mean(a, counts), a), (paired_difference(a, b, counts), a - b)):
        mean = sum(sums) / sum(counts)
        squares = sum((s - n * mean) ** 2 for s, n in zip(sums, counts, strict=True))
        error = math.sqrt(squares) / sum(counts) * math.sqrt(len(sums) / (len(sums) - 1))
        assert estimate.mean == pytest.approx(mean, abs=1e-12)
        assert estimate.standard_error == pytest.approx(error, abs=1e-12)
        assert estimate.clusters == len(sums)
        half_width = stats.t.ppf(0.975, len(sums) - 1) * error
        assert estimate.half_width == pytest.approx(half_width, abs=1e-9)
        assert (estimate.low + estimate.high) / 2 == pytest.approx(mean, abs=1e-9)


def test_the_clustered_error_without_its_correction_is_the_sum_over_pairs_of_tokens():
    """SE² = SE_CLT² + n⁻²·Σ_c Σ_{i≠j} (x_ic - x̄)(x_jc - x̄), of arXiv 2411.00640."""
    random = np.random.default_rng(1)
    x, clusters = random.normal(size=40), random.integers(0, 7, 40)
    residuals = x - x.mean()
    same = (clusters[:, None] == clusters) & ~np.eye(40, dtype=bool)
    variance = (residuals**2).sum() / 40**2 + residuals @ same @ residuals / 40**2
    estimate = clustered_mean(np.bincount(clusters, x), np.bincount(clusters))
    assert estimate.standard_error**2 * 6 / 7 == pytest.approx(variance, rel=1e-12)


@pytest.mark.parametrize("confidence", [0.9, 0.95])
def test_clusters_of_one_token_have_the_intervals_of_student(confidence):
    a, b = np.random.default_rng(2).normal(3, 2, (2, 25))
    ones = np.ones(25)
    for estimate, test in (
        (clustered_mean(a, ones, confidence), stats.ttest_1samp(a, 0)),
        (mean_over_seeds(a, confidence), stats.ttest_1samp(a, 0)),
        (paired_difference(a, b, ones, confidence), stats.ttest_rel(a, b)),
    ):
        assert (estimate.low, estimate.high) == pytest.approx(tuple(test.confidence_interval(confidence)), rel=1e-12)
        assert estimate.mean / estimate.standard_error == pytest.approx(test.statistic, rel=1e-12)


def test_p_values_with_many_clusters_are_those_of_the_paired_t_test():
    a, b = np.random.default_rng(3).normal(0, 1, (2, 30))
    for shift in (0, 0.5, 40):
        expected = stats.ttest_rel(a + shift, b).pvalue
        assert difference_p_value(a + shift, b, np.ones(30)) == pytest.approx(expected, rel=1e-9)
    assert difference_p_value(a, a, np.ones(30)) == 1
    assert difference_p_value(np.ones(30), np.zeros(30), np.ones(30)) == 0


@pytest.mark.parametrize("clusters", [2, 5, 9])
def test_sign_flips_of_few_clusters_are_those_of_scipy(clusters):
    for shift in (0, 1):
        d = np.random.default_rng(clusters).normal(shift, 1, clusters)
        exact = stats.permutation_test((d,), np.sum, permutation_type="samples", n_resamples=np.inf)
        assert sign_flip_p_value(d) == pytest.approx(exact.pvalue, abs=1e-12)
        a = np.random.default_rng(0).normal(size=clusters)
        # a cluster without tokens has no influence
        with_empty = [np.append(x, 0) for x in (a + d, a, np.ones(clusters))]
        assert difference_p_value(*with_empty) == pytest.approx(exact.pvalue, abs=1e-12)


def test_sign_flips_of_more_clusters_are_drawn():
    d = np.random.default_rng(4).normal(0.3, 1, 20)
    exact = sign_flip_p_value(d, samples=2**19)
    drawn = sign_flip_p_value(d)
    assert drawn == sign_flip_p_value(d) != sign_flip_p_value(d, seed=1)
    assert abs(drawn - exact) < 4 * math.sqrt(exact * (1 - exact) / 10_000)
    assert sign_flip_p_value(np.ones(20)) == 1 / 10_001  # never 0
    assert sign_flip_p_value(np.ones(20), samples=2**19) == 2**-19  # +1 everywhere or -1 everywhere
    assert sign_flip_p_value(np.array([0.1, 0.2, -0.3] * 4)) == 1  # a sum of 0 despite rounding


def test_the_bootstrap_interval_is_that_of_scipy():
    x = np.random.default_rng(5).exponential(2, 60)
    draws = paired_bootstrap(x[None], np.ones(60), lambda means: means[:, 0])
    low, high = bootstrap_interval(draws, 0.9)
    random = np.random.default_rng(6)
    expected = stats.bootstrap(
        (x,), np.mean, n_resamples=10_000, confidence_level=0.9, method="percentile", rng=random
    ).confidence_interval
    # The standard error of these quantiles of 10,000 draws is about 0.02·sd.
    assert abs(low - expected.low) < 0.1 * draws.std() and abs(high - expected.high) < 0.1 * draws.std()
    assert draws.std() == pytest.approx(x.std() / math.sqrt(60), rel=0.03)


def test_the_bootstrap_draws_the_same_clusters_for_all_models_lengths_and_calls(monkeypatch):
    random = np.random.default_rng(8)
    counts = random.integers(1, 9, (4, 11))  # (L, G)
    sums = random.normal(size=(3, 4, 11))  # (M, L, G)
    draws = paired_bootstrap(sums, counts, lambda means: means, 50, seed=3)
    assert draws.shape == (50, 3, 4)
    drawn = np.random.default_rng(3).integers(0, 11, (50, 11))  # the clusters themselves
    expected = sums[:, :, drawn].sum(-1) / counts[:, drawn].sum(-1)  # (M, L, K)
    np.testing.assert_allclose(draws, np.moveaxis(expected, -1, 0), rtol=1e-12)
    # one length of one model alone, in steps of 2 draws
    monkeypatch.setattr("fairseq_rpe.evaluation.statistics._CHUNK_ELEMENTS", 22)
    alone = paired_bootstrap(sums[2:, 1], counts[1], lambda means: means[:, 0], 50, seed=3)
    np.testing.assert_allclose(alone, draws[:, 2, 1], rtol=1e-12)
    low, high = bootstrap_interval(draws, 0.5)
    assert low.shape == high.shape == (3, 4)
    assert [low[2, 1], high[2, 1]] == pytest.approx(np.percentile(alone, [25, 75]))


@pytest.mark.parametrize(("right", "examples"), [(0, 1), (1, 1), (0, 20), (20, 20), (7, 20), (199, 200), (5, 3000)])
@pytest.mark.parametrize("confidence", [0.9, 0.95])
def test_wilson_intervals_are_those_of_scipy(right, examples, confidence):
    estimate = wilson_interval(right, examples, confidence)
    expected = stats.binomtest(right, examples).proportion_ci(confidence, method="wilson")
    assert (estimate.low, estimate.high) == pytest.approx(tuple(expected), abs=1e-14)
    assert 0 <= estimate.low <= estimate.mean == right / examples <= estimate.high <= 1
    share = right / examples
    assert (estimate.standard_error, estimate.clusters) == (
        pytest.approx(math.sqrt(share * (1 - share) / examples)),
        examples,
    )


@pytest.mark.parametrize(("a", "b"), [(0, 0), (0, 1), (3, 3), (4, 3), (1, 9), (12, 30), (300, 420)])
def test_mcnemar_is_the_binomial_test_of_scipy(a, b):
    expected = stats.binomtest(a, a + b).pvalue if a + b else 1
    assert mcnemar_p_value(a, b) == mcnemar_p_value(b, a) == pytest.approx(expected, rel=1e-9)


def test_holm_by_hand():
    # sorted: 4·0.005 = 0.02, 3·0.01 = 0.03, 2·0.03 = 0.06, 1·0.04 -> 0.06
    assert holm([0.01, 0.04, 0.03, 0.005]) == pytest.approx([0.03, 0.06, 0.06, 0.02])
    assert holm([0.6, 0.9]) == [1, 1] and holm([0.2]) == [0.2] and holm([]) == []


@settings(max_examples=50, deadline=None, derandomize=True)
@given(st.lists(st.floats(0, 1), min_size=1, max_size=12), st.floats(0.001, 0.999))
def test_holm_rejects_step_by_step(p_values, alpha):
    adjusted = holm(p_values)
    m = len(p_values)
    assert all(p <= q <= min(1, m * p + 1e-12) for p, q in zip(p_values, adjusted, strict=True))
    order = sorted(range(m), key=lambda i: p_values[i])
    assert [adjusted[i] for i in order] == sorted(adjusted)
    # reject in ascending order while p_(i) <= α / (m - i + 1)
    rejected = 0
    while rejected < m and (m - rejected) * p_values[order[rejected]] <= alpha:
        rejected += 1
    assert sum(q <= alpha for q in adjusted) == rejected


def test_the_smallest_detectable_difference_is_detected_with_its_power():
    assert smallest_detectable_difference(0.0053) == pytest.approx(2.8016 * 0.0053, rel=1e-4)
    difference = smallest_detectable_difference(2, power=0.9, alpha=0.01)
    threshold = 2 * stats.norm.ppf(0.995)
    assert stats.norm.sf(threshold, difference, 2) == pytest.approx(0.9)


def test_a_single_cluster_or_seed_has_no_interval():
    for estimate in (mean_over_seeds([4.5]), clustered_mean([9, 0], [2, 0]), paired_difference([9], [0], [2])):
        assert estimate.mean == 4.5 and estimate.clusters == 1 and estimate.standard_error is None
        assert math.isnan(estimate.low) and math.isnan(estimate.high) and math.isnan(estimate.half_width)
    assert difference_p_value([9], [0], [2]) == 1


@pytest.mark.parametrize("clusters", [2, 20, 40])
def test_a_model_that_diverged_has_no_p_value(clusters):
    a, ones = np.arange(clusters, dtype=float), np.ones(clusters)
    a[1] = math.nan
    estimate = paired_difference(a, ones, ones)
    assert math.isnan(estimate.mean) and math.isnan(estimate.low) and math.isnan(estimate.high)
    assert math.isnan(difference_p_value(a, ones, ones))


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda: clustered_mean([1, 2], [1, 2, 3]), r"\(2,\) and counts of shape \(3,\)"),
        (lambda: clustered_mean([1, 2], [1, -1]), "0 or more"),
        (lambda: clustered_mean([0, 0], [0, 0]), "above 0"),
        (lambda: mean_over_seeds([]), "above 0"),
        (lambda: paired_difference([1, 2], [1], [1, 2]), r"\(2,\) and \(1,\): expected the same clusters"),
        (lambda: sign_flip_p_value([[1.0]]), r"\(1, 1\), expected \(G,\)"),
        (lambda: paired_bootstrap([1, 2], [1, 2], np.asarray), r"expected \(models, G\)"),
        (lambda: paired_bootstrap([[1, 2]], [1], np.asarray), r"expected \(models, G\)"),
        (lambda: wilson_interval(0, 0), "0 right answers of 0 examples"),
        (lambda: wilson_interval(3, 2), "3 right answers of 2 examples"),
        (lambda: mcnemar_p_value(-1, 2), "-1 and 2 examples"),
        (lambda: holm([0.1, math.nan]), "between 0 and 1"),
    ],
)
def test_invalid_arguments(call: Callable[[], object], words: str):
    with pytest.raises(ValueError, match=words):
        call()


RIGHT = [1, 0, 1, 1, 0, 1, 1, 1, 0, 1]  # an accuracy of 0.7


def test_the_standard_error_of_an_accuracy_by_hand():
    estimate = clustered_mean(RIGHT, [1] * 10)
    sample_variance = (7 * 0.3**2 + 3 * 0.7**2) / 9
    assert (estimate.mean, estimate.standard_error) == pytest.approx((0.7, math.sqrt(sample_variance / 10)))


def test_the_standard_error_of_an_accuracy_is_that_of_lm_eval():
    metrics = pytest.importorskip("lm_eval.api.metrics")
    estimate = clustered_mean(RIGHT, [1] * 10)
    assert (estimate.mean, estimate.standard_error) == pytest.approx((metrics.mean(RIGHT), metrics.mean_stderr(RIGHT)))
