"""Error bars, marks and verdicts of reports, from made-up losses of documents, answers and scores."""

from __future__ import annotations

import csv
import io
import math
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
from pages import skip_drawing

from fairseq_rpe.algorithms import build
from fairseq_rpe.analysis.convergence import CONVERGES, DIVERGES
from fairseq_rpe.evaluation.example_scores import pack_hits, pack_scores
from fairseq_rpe.evaluation.question_records import QuestionResult
from fairseq_rpe.evaluation.records import ExactMatchResult, TextResult
from fairseq_rpe.evaluation.segment_losses import SegmentLosses
from fairseq_rpe.evaluation.statistics import clustered_mean, mcnemar_p_value, paired_difference, wilson_interval
from fairseq_rpe.reports import extrapolation_definition, sweep_results, uncertainty
from fairseq_rpe.reports.chapters import exact_match, perplexities, question_answering
from fairseq_rpe.reports.chapters.perplexities import ComparedModels
from fairseq_rpe.reports.extrapolation_definition import NOT_CERTAIN, PredictedVerdict
from fairseq_rpe.reports.page import markdown
from fairseq_rpe.reports.question_scores import Scores
from fairseq_rpe.reports.sweep_results import Accuracies, Perplexities, SweepResult
from fairseq_rpe.sweeps.sweep_record import Method, SweepRecord, SweepSettings

DOCUMENTS, TOKENS = 40, 100
RANDOM = np.random.default_rng(0)
DIFFICULTY = RANDOM.normal(5.0, 1.0, DOCUMENTS)  # mean loss of each document in bits


def text_result(length: int, losses: np.ndarray, **more) -> TextResult:
    """Return a result whose documents of 100 tokens have these mean losses in bits."""
    ends = TOKENS * np.arange(1, len(losses) + 1)
    segments = SegmentLosses.pack(ends, np.ones(len(losses), bool), TOKENS * losses)
    mean = float(losses.mean())
    of = {"checkpoint": "c", "data": "d", "split": "test", "tokens": int(ends[-1]), "segments": segments}
    return TextResult(length=length, loss_base2=mean, ppl=2**mean, **{**of, **more})


def noise(size: float) -> np.ndarray:
    return RANDOM.normal(0.0, size, DOCUMENTS)


def perplexities_of(curves: dict[str, dict[int, np.ndarray]], seeds: int = 1) -> Perplexities:
    rows = []
    for name, losses in curves.items():
        for seed in range(1, seeds + 1):
            results = {n: text_result(n, own + 0.01 * (seed - 1)) for n, own in losses.items()}
            rows += [SweepResult(name, seed, own, own.ppl / results[64].ppl) for own in results.values()]
    return Perplexities(rows, 64)


def without_segments(results: Perplexities) -> Perplexities:
    return Perplexities([replace(row, result=replace(row.result, segments=None)) for row in results.results], 64)


def models_of(results: Perplexities, seeds: int = 1) -> ComparedModels:
    return ComparedModels({name: Method(name, name) for name in results.encodings}, "test", seeds)


CURVES = {
    "alibi": {64: DIFFICULTY, 256: DIFFICULTY - 0.1 + noise(0.01)},
    "type1": {64: DIFFICULTY + noise(0.01), 256: DIFFICULTY - 0.1 + noise(0.01)},
    "rope": {64: DIFFICULTY + 0.05 + noise(0.01), 256: DIFFICULTY + 1.0 + noise(0.3)},
}


def test_the_table_has_half_widths_and_marks_what_does_not_differ_from_the_best():
    results = perplexities_of(CURVES)
    table = perplexities._perplexity_table(models_of(results), results)
    cells = {row.name: [cell.text for cell in row.cells] for row in table.rows}
    loss = clustered_mean(TOKENS * DIFFICULTY, np.full(DOCUMENTS, TOKENS))
    half = (2**loss.high - 2**loss.low) / 2
    ppl = {name: 2 ** losses[64].mean() for name, losses in CURVES.items()}
    best = min(ppl, key=ppl.get)
    assert best != "rope"
    assert cells["alibi"][0].startswith(f"{ppl['alibi']:.2f} ± {half:.2f}")
    assert [text.endswith(" ≈") for text in (cells["alibi"][0], cells["type1"][0])] == [
        best != "alibi",
        best == "alibi",
    ]
    assert not any(
        "≈" in text for text in cells["rope"]
    )  # 3.5 % worse in every document, far below its ± of about 20 %
    ratio = paired_difference(CURVES["rope"][256], CURVES["rope"][64], np.ones(DOCUMENTS))
    width = (2**ratio.high - 2**ratio.low) / 2
    assert cells["rope"][2] == f"{2**ratio.mean:.3f} ± {width:.3f}"
    assert "over 40 documents" in table.caption and "40 documents, paired; Holm's correction" in table.caption


def test_results_without_segments_have_the_table_of_earlier_versions():
    results = without_segments(perplexities_of(CURVES))
    table = perplexities._perplexity_table(models_of(results), results)
    means = {name: [2 ** losses[n].mean() for n in (64, 256)] for name, losses in CURVES.items()}
    shown = {name: [f"{a:.2f}", f"{b:.2f}", f"{b / a:.3f}"] for name, (a, b) in means.items()}
    assert {row.name: [cell.text for cell in row.cells] for row in table.rows} == shown
    assert table.caption == "Perplexity per token by evaluation length, and in the last column the ratio 256 / 64."
    lines = list(csv.DictReader(io.StringIO(results.csv())))
    assert all(line[name] == "" for line in lines for name in uncertainty.CSV_COLUMNS)


def test_a_column_whose_methods_have_different_segments_has_no_marks(monkeypatch):
    noise = 0.01 * (-1.0) ** np.arange(DOCUMENTS)
    noise[1] = 0.0  # the mean is above 0
    curves = {"alibi": {64: DIFFICULTY, 256: DIFFICULTY}, "rope": {64: DIFFICULTY + noise, 256: DIFFICULTY + 3 * noise}}
    results = perplexities_of(curves)
    table = perplexities._perplexity_table(models_of(results), results)
    assert [cell.text.count("≈") for cell in table.rows[1].cells] == [1, 1, 1]
    rows = [*results.results]
    rows[-1] = replace(rows[-1], result=text_result(256, DIFFICULTY[:30]))
    results = Perplexities(rows, 64)
    table = perplexities._perplexity_table(models_of(results), results)
    assert [cell.text.count("≈") for cell in table.rows[1].cells] == [1, 0, 0]
    assert "not all methods have losses of the same segments" in table.caption


def test_a_method_with_the_value_of_the_best_one_has_no_mark():
    results = perplexities_of({"alibi": {64: DIFFICULTY}, "rope": {64: DIFFICULTY}})
    table = perplexities._perplexity_table(models_of(results), results)
    assert len(table.rows) == 2 and not any("≈" in cell.text for row in table.rows for cell in row.cells)


def test_csv_has_bounds_of_perplexities_after_the_columns_of_earlier_versions():
    lines = list(csv.DictReader(io.StringIO(perplexities_of(CURVES).csv())))
    assert list(lines[0])[:7] == ["encoding", "length", "ppl", "loss_base2", "tokens", "ratio", "seed"]
    assert list(lines[0])[7:] == ["standard_error", "low", "high", "clusters", "cluster_unit"]
    loss = clustered_mean(DIFFICULTY, np.ones(DOCUMENTS))
    assert float(lines[0]["low"]) == pytest.approx(2**loss.low, rel=1e-6)
    assert float(lines[0]["high"]) == pytest.approx(2**loss.high, rel=1e-6)
    assert float(lines[0]["standard_error"]) == pytest.approx(
        math.log(2) * 2**loss.mean * loss.standard_error, rel=1e-6
    )
    assert (lines[0]["clusters"], lines[0]["cluster_unit"]) == ("40", "documents")
    results = perplexities_of(CURVES)  # a finished sweep compares its CSV file without the bounds
    assert uncertainty.without_bounds(results.csv()) == results.csv(with_bounds=False)
    assert uncertainty.without_bounds("") == ""


def test_with_several_seeds_losses_are_averaged_and_differences_over_seeds_have_their_own_table(monkeypatch):
    skip_drawing(monkeypatch)
    results = perplexities_of(CURVES, seeds=3)
    text = perplexities.build_content(models_of(results, 3), results, []).markdown
    assert "losses are averaged over the seeds" in text and "geometric mean over 3 seeds" in text
    [seeds] = perplexities._seed_differences(results)
    ratios = {row.name: [cell.text for cell in row.cells] for row in seeds.rows}
    # the seeds of both methods have the same effect, so that the interval has no width
    assert ratios["rope"][0] == "{0:.3f} ({0:.3f} to {0:.3f})".format(
        2 ** (CURVES["rope"][64].mean() - min(own[64].mean() for own in CURVES.values()))
    )
    assert perplexities._seed_differences(perplexities_of(CURVES)) == []


def test_a_method_without_a_value_at_a_length_is_not_called_the_lowest_there():
    curves = {**CURVES, "learned": {64: DIFFICULTY + 2.0}}
    [seeds] = perplexities._seed_differences(perplexities_of(curves, seeds=2))
    cells = {row.name: [cell.text for cell in row.cells] for row in seeds.rows}
    lowest = [[name for name, texts in cells.items() if texts[column] == "lowest"] for column in (0, 1)]
    assert [len(names) for names in lowest] == [1, 1] and "learned" not in lowest[1]
    assert cells["learned"][1] != "lowest" and cells["learned"][0] != cells["learned"][1]


def test_accuracies_at_several_lengths_are_compared_with_the_weights_of_their_mean():
    """A is right in 20 of 100 short examples where B is wrong, and B in 8 of 12 long ones where A is wrong."""
    ones = np.ones
    first = uncertainty.ClusteredScores(
        ((np.r_[ones(60), np.zeros(40)], ones(100)), (np.zeros(12), ones(12))), "examples", "same"
    )
    second = uncertainty.ClusteredScores(
        ((np.r_[ones(40), np.zeros(60)], ones(100)), (np.r_[ones(8), np.zeros(4)], ones(12))), "examples", "same"
    )
    difference = first.minus(second)
    assert difference.estimate().high < 0  # B is better in the mean over lengths
    assert uncertainty.paired_p_value(first, second) == difference.p_value()


def test_holm_corrects_for_the_methods_of_a_column():
    effects = np.linspace(-1.0, 1.0, DOCUMENTS)
    scores = {f"m{i}": uncertainty.text_losses(text_result(64, DIFFICULTY + effects)) for i in range(30)}
    scores["best"] = uncertainty.text_losses(text_result(64, DIFFICULTY))
    scores["a"] = uncertainty.text_losses(text_result(64, DIFFICULTY + effects + 0.2))  # p = 0.038 alone
    assert 0.02 < uncertainty.paired_p_value(scores["best"], scores["a"]) < 0.05
    means = {name: 4.0 if name == "best" else 5.0 for name in scores}
    assert uncertainty.ties_with_best({"best": 4.0, "a": 5.0}, scores, is_loss=True) == set()
    assert "a" in uncertainty.ties_with_best(means, scores, is_loss=True)


def verdicts_of(change: float, size: float):
    change_of_documents = noise(size)
    change_of_documents += math.log2(1 + change) - change_of_documents.mean()
    curves = {"m": {64: DIFFICULTY, 256: DIFFICULTY + change_of_documents}}
    results = perplexities_of(curves)
    predictions = {"m": PredictedVerdict(CONVERGES, 4, 4)}
    return results, extrapolation_definition.observe_verdicts(results, predictions)


@pytest.mark.parametrize(
    ("change", "size", "answers"),
    [
        (0.01, 0.01, ["yes", "yes"]),
        (0.20, 0.01, ["no", "no"]),
        (-0.20, 0.01, ["no", "yes"]),
        (0.04, 0.2, [NOT_CERTAIN, NOT_CERTAIN]),
        (-0.06, 0.2, [NOT_CERTAIN, "yes"]),
    ],
)
def test_definition_with_confidence(change, size, answers):
    results, [observed] = verdicts_of(change, size)
    assert observed.answers(0.05) == answers
    interval = observed.interval
    assert interval.low.end < observed.deviation.end < interval.high.end
    assert interval.low.largest <= observed.deviation.largest <= interval.high.largest
    old = extrapolation_definition.observe_verdicts(without_segments(results), {"m": observed.prediction})
    assert old[0].interval is None and NOT_CERTAIN not in old[0].answers(0.05)


def test_agreement_counts_certain_verdicts_and_names_the_others():
    _, [sure] = verdicts_of(0.01, 0.01)
    _, [unsure] = verdicts_of(0.05, 0.5)
    unsure = replace(unsure, name="odd", prediction=PredictedVerdict(DIVERGES, 0, 4))
    text = markdown(extrapolation_definition.definition_blocks([sure, unsure], 64, 0.05))
    assert "Not certain, because δ is within the interval of the deviation: odd." in text
    rows = {line.split("|")[1].strip(): line for line in text.splitlines() if line.startswith("| ")}
    assert "1: m" in rows["converges"] and "odd" not in rows["diverges"]
    assert "40 documents, paired over lengths" in text
    lines = list(csv.DictReader(io.StringIO(extrapolation_definition.verdict_csv([sure, unsure], 0.05))))
    assert [line["extrapolates"] for line in lines] == ["yes", NOT_CERTAIN]
    assert float(lines[1]["largest_low"]) < 0.05 < float(lines[1]["largest_high"])
    assert lines[0]["clusters"] == "40"


RECORD = SweepRecord(SweepSettings(tokens=64), (), (1,), methods={name: Method(name, name) for name in "abc"})


def question_result(scores: np.ndarray, length: int) -> QuestionResult:
    of = {"checkpoint": "c", "data": "q", "set": "qasper", "split": "valid", "suite": "s", "transform": "identity"}
    of |= {"metrics": {}, "published": "f1", "truncated_documents": 0, "lost_tokens": 0, "empty": 0}
    packed = pack_scores(scores)
    return QuestionResult(
        length=length, questions=len(scores), score=float(scores.mean()), question_scores=packed, **of
    )


def answers(is_right: np.ndarray, length: int = 10, **more) -> ExactMatchResult:
    right = int(is_right.sum())
    of = {"checkpoint": "c", "algorithm": "copy", "split": "test", "transform": "identity"}
    of |= {"examples": is_right.size, "right": right, "accuracy": right / is_right.size, "hits": pack_hits(is_right)}
    return ExactMatchResult(length=length, **{**of, **more})


def right_answers(share: float, count: int = 200) -> np.ndarray:
    return np.arange(count) < round(share * count)


def accuracies_of(methods: dict[str, list[ExactMatchResult]]) -> Accuracies:
    rows = [SweepResult(name, 1, result) for name, results in methods.items() for result in results]
    return Accuracies(rows, {"copy": 20}, {"copy": 100})


def test_tables_of_accuracies_mark_methods_with_the_same_answers():
    shown = {"a": 0.9, "b": 0.88, "c": 0.6}
    results = accuracies_of(
        {name: [answers(right_answers(p)), answers(right_answers(p), 50)] for name, p in shown.items()}
    )
    table = exact_match._accuracy_table(results, "copy", None)
    cells = {row.name: [cell.text for cell in row.cells] for row in table.rows}
    half = 100 * wilson_interval(180, 200).half_width
    assert cells["a"][0] == f"90.0 ± {half:.1f}"
    assert cells["b"][0].endswith("≈") is (mcnemar_p_value(4, 0) >= 0.05) and not cells["c"][0].endswith("≈")
    assert "400 examples" in table.caption and "McNemar" in table.caption
    lines = list(csv.DictReader(io.StringIO(results.csv())))
    bounds = wilson_interval(180, 200)
    assert (float(lines[0]["low"]), float(lines[0]["high"])) == (bounds.low, bounds.high)
    assert list(lines[0])[-5:] == [*uncertainty.CSV_COLUMNS] and lines[0]["cluster_unit"] == "examples"


def test_accuracies_without_single_answers_have_the_table_of_earlier_versions():
    results = accuracies_of({"a": [answers(right_answers(0.9), hits=None)]})
    table = exact_match._accuracy_table(results, "copy", None)
    assert table.rows[0].cells[0].text == "90.0" and "±" not in table.caption
    [line] = csv.DictReader(io.StringIO(results.csv()))
    assert float(line["low"]) == wilson_interval(180, 200).low


def test_means_over_lengths_are_stratified_and_labels_of_an_example_are_one_cluster():
    parts = [uncertainty.exact_match_scores(answers(right_answers(p, n), n)) for p, n in ((0.9, 50), (0.5, 200))]
    joined = uncertainty.join(parts)
    estimate = joined.estimate()
    variances = [p * (1 - p) / (n - 1) for p, n in ((0.9, 50), (0.5, 200))]
    assert estimate.mean == pytest.approx(0.7)
    assert estimate.standard_error == pytest.approx(math.sqrt(sum(variances)) / 2)
    single = uncertainty.exact_match_scores(answers(np.ones(1, bool), 300))
    assert uncertainty.join([parts[1], single]).estimate().mean == pytest.approx(0.75)
    certain = uncertainty.accuracy_estimate(uncertainty.join([parts[0], parts[0]]))
    assert certain.low < certain.mean < certain.high
    perfect = uncertainty.join([uncertainty.exact_match_scores(answers(np.ones(50, bool), n)) for n in (3, 4)])
    assert uncertainty.accuracy_estimate(perfect).low == wilson_interval(100, 100).low
    task = build("mqar")
    pairs = len(task.label_indices(task.draw(64, np.random.default_rng(0))))
    labels = np.repeat(right_answers(0.5, 30), pairs)  # an example is right or wrong as a whole
    scores = uncertainty.exact_match_scores(answers(labels, 64, algorithm=task.spec))
    assert pairs > 1 and scores.clusters == 30
    assert scores.estimate().standard_error == pytest.approx(math.sqrt(0.25 / 29))


def test_tables_of_questions_compare_question_by_question():
    scores = RANDOM.choice([0.0, 50.0, 100.0], 60)
    methods = {"a": scores, "b": np.minimum(scores + 1, 100), "c": scores / 4}
    rows = [
        SweepResult(name, 1, question_result(values, length), folder="q")
        for name, values in methods.items()
        for length in (256, 512)
    ]
    results = Scores(rows, 256, 64)
    table = question_answering._set_table(RECORD, results, 256)
    cells = {row.name: row.cells[0].text for row in table.rows}
    half = clustered_mean(scores, np.ones(60)).half_width
    assert cells["a"] == f"{scores.mean():.2f} ± {half:.2f}"  # a point less in every question that allows it
    assert "≈" not in cells["c"] and "60 questions" in table.caption
    means = question_answering._length_table(RECORD, results, "qasper", "f1")
    # the same questions at both lengths: the error of the mean over lengths is not smaller
    assert means.rows[0].cells[2].text == cells["a"]
    line = next(csv.DictReader(io.StringIO(results.csv())))
    assert float(line["high"]) - float(line["low"]) == pytest.approx(2 * half) and line["clusters"] == "60"


def test_results_on_a_text_that_is_not_of_the_sweep_are_left_out():
    """As ``eval`` on another text with the results file of a run."""
    record = SimpleNamespace(evaluate={}, settings=SimpleNamespace(split="test", data="a"))
    rows = [SimpleNamespace(split="test", data=data, length=64) for data in ("a", "b")]
    assert sweep_results._results_by_text(record, rows) == {None: {64: rows[0]}}
    record.settings.data = None  # not recorded
    assert sweep_results._results_by_text(record, rows) == {None: {64: rows[1]}}
