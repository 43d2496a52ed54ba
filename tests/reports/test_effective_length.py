"""Effective length: each rule at its border, and the numbers in CSV, report, TensorBoard and the joint table."""

from __future__ import annotations

import csv
import io
from collections.abc import Mapping

import pytest
from conftest import run_here
from pages import new_page, skip_drawing
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from test_heat_maps import TASK, lines_of, write_sweep

from fairseq_rpe.algorithms import build
from fairseq_rpe.evaluation.question_records import QuestionResult
from fairseq_rpe.evaluation.records import ExactMatchResult, TextResult
from fairseq_rpe.reports import effective_length
from fairseq_rpe.reports.chapters import effective_length as length_chapter
from fairseq_rpe.reports.effective_length import DEFINITION, NOLIMA, ONE_SIDED, RULER
from fairseq_rpe.reports.question_scores import Scores
from fairseq_rpe.reports.sweep_results import Accuracies, Perplexities, SweepResult
from fairseq_rpe.sweeps.sweep_record import Method
from fairseq_rpe.utils import json_files

COPY = "copy"


def perplexities(seeds: Mapping[int, Mapping[int, float]], **more) -> Perplexities:
    """The perplexities of one method that was trained at 64 tokens, by seed."""
    rows = [
        SweepResult(
            "m", seed, TextResult(checkpoint="c", split="test", tokens=9, loss_base2=1.0, length=n, ppl=ppl, **more)
        )
        for seed, curve in seeds.items()
        for n, ppl in curve.items()
    ]
    return Perplexities(rows, 64)


def by_perplexity(curve: Mapping[int, float], delta: float = 0.05, **more) -> list[str]:
    """The effective lengths as shown: by Definition 0.1, then one-sided."""
    return [str(row.mean) for row in effective_length.perplexity_lengths(perplexities({1: curve}, **more), delta)]


def accuracies(
    percents: Mapping[str, Mapping[str, Mapping[int, Mapping[int, float]]]], train: int = 8, limits=()
) -> Accuracies:
    """Accuracies by task, method, seed and length, in percent of 1,000 examples."""
    given = {"checkpoint": "c", "split": "test", "unit": "items", "transform": "identity", "examples": 1000}
    rows = [
        SweepResult(m, seed, ExactMatchResult(algorithm=t, length=n, right=round(10 * p), accuracy=p / 100, **given))
        for t, methods in percents.items()
        for m, seeds in methods.items()
        for seed, curve in seeds.items()
        for n, p in curve.items()
    ]
    return Accuracies(rows, dict.fromkeys(percents, train), dict.fromkeys(percents, 64), {key: 16 for key in limits})


def by_accuracy(curve: Mapping[int, float], task: str = COPY, **more) -> list[str]:
    """The effective lengths as shown: by RULER's threshold, then by NoLiMa's."""
    return [str(row.mean) for row in effective_length.accuracy_lengths(accuracies({task: {"m": {1: curve}}}, **more))]


@pytest.mark.parametrize(
    ("curve", "shown"),
    [
        ({64: 50.0, 128: 52.0, 256: 52.4}, ["≥ 256", "≥ 256"]),
        ({64: 50.0, 128: 52.5, 256: 50.0}, ["64", "64"]),  # a deviation of exactly δ does not pass
        ({64: 50.0, 128: 50.0, 256: 53.0, 512: 50.0}, ["128", "128"]),  # 512 passes, and 256 does not
        ({64: 50.0, 128: 49.0, 256: 40.0, 512: 60.0}, ["128", "256"]),  # one-sided, improvements are no deviation
        ({32: 90.0, 64: 50.0, 128: 51.0}, ["≥ 128", "≥ 128"]),  # lengths below the training length do not count
    ],
)
def test_perplexity_holds_up_to_the_first_length_that_deviates(curve, shown):
    assert by_perplexity(curve) == shown


def test_delta_decides():
    curve = {64: 50.0, 128: 52.0, 256: 60.0}
    assert by_perplexity(curve, 0.04) == ["64", "64"] and by_perplexity(curve, 0.041) == ["128", "128"]


def test_a_model_that_does_not_use_its_context_has_no_verdict():
    assert by_perplexity({64: 50.0, 128: 50.0}, unigram_ppl=50.0) == ["no verdict"] * 2
    assert by_perplexity({64: 50.0, 128: 50.0}, unigram_ppl=50.1) == ["≥ 128"] * 2
    assert by_perplexity({64: 50.0}) == []  # no longer text was evaluated


def test_the_mean_deviation_over_seeds_decides():
    curves = {1: {64: 50.0, 128: 53.0, 256: 70.0}, 2: {64: 50.0, 128: 51.0, 256: 51.0}}  # 6 % and 2 % at 128 tokens
    row, _ = effective_length.perplexity_lengths(perplexities(curves))
    assert [str(seed) for seed in row.seeds] == ["64", "≥ 256"]
    assert row.cell().text == "128 (64 to ≥ 256)" and row.cell().value == 128


def test_positions_that_end_give_no_lower_bound():
    results = perplexities({1: {64: 50.0, 128: 50.0, 256: 50.0}}).results
    limited = [SweepResult("limited", 1, row.result) for row in results if row.result.length <= 128]
    methods = {"limited": Method("limited", "rope", positions_eval="randomized:max_position=128")}
    lengths = effective_length.perplexity_lengths(Perplexities([*results, *limited], 64), methods=methods)
    assert {row.method: str(row.mean) for row in lengths} == {"m": "≥ 256", "limited": "128"}
    assert by_accuracy({8: 100, 16: 100}, limits=[(COPY, "m")]) == ["16", "16"]


@pytest.mark.parametrize(
    ("curve", "shown"),
    [
        ({8: 100, 16: 85.6, 32: 100}, ["8", "≥ 32"]),  # exactly 85.6 % does not exceed it; 32 passes, and 16 does not
        ({8: 100, 16: 85.7, 32: 85.0}, ["16", "≥ 32"]),  # exactly 85 % of the base score passes
        ({8: 100, 16: 84.9, 32: 100}, ["8", "8"]),
        ({8: 60, 16: 51.0, 32: 50.9}, ["none", "16"]),  # NoLiMa's threshold is relative
        ({4: 80, 8: 100, 16: 100}, ["none", "none"]),  # the best trained length is the base score
        ({16: 100, 32: 50}, ["16", "no verdict"]),  # no trained length, no base score
    ],
)
def test_scores_pass_at_the_thresholds(curve, shown):
    assert by_accuracy(curve) == shown


def test_a_task_is_learned_if_the_threshold_is_clearly_above_a_guess():
    # the base scores with thresholds of 10 points above 0 % and above 50 %
    for task, chance, base in ((COPY, None, 11.8), ("parity", 0.5, 70.6)):
        assert build(task).chance_accuracy(8) == chance
        assert by_accuracy({8: base - 0.1, 16: base - 0.1}, task)[1] == "not learned"
        assert by_accuracy({8: base, 16: base}, task)[1] == "≥ 16"


def test_the_range_over_seeds_and_the_mean_over_tasks():
    curves = {1: {8: 100, 16: 100, 32: 60}, 2: {8: 100, 16: 80, 32: 60}}
    other = {seed: {8: 100, 16: 100, 32: 100} for seed in (1, 2)}
    results = accuracies({COPY: {"m": curves}, "reverse": {"m": other, "n": other}})
    rows = {(r.task, r.method, r.definition): r for r in effective_length.accuracy_lengths(results)}
    assert rows[COPY, "m", RULER].cell().text == "16 (8 to 16)"  # the mean at 16 items is 90 %
    mean = rows["mean of 2 tasks", "m", RULER]
    assert mean.cell().text == "16" and next(iter(rows)) == ("mean of 2 tasks", "m", RULER)
    assert ("mean of 2 tasks", "n", RULER) not in rows  # no results of the other task
    lengths = {COPY: 8, "reverse": 16}
    apart = Accuracies(results.results, lengths, results.max_items)
    assert {r.task for r in effective_length.accuracy_lengths(apart)} == {COPY, "reverse"}


def question_rows(name: str, curve: Mapping[int, float], mode: str) -> list[SweepResult[QuestionResult]]:
    given = {"checkpoint": "c", "data": "d", "split": "valid", "rpe": None, "suite": "own", "questions": 9, "empty": 0}
    given |= {"truncated_documents": 0, "lost_tokens": 0, "metrics": {}, "published": "em", "transform": "identity"}
    return [
        SweepResult("m", 1, QuestionResult(set=name, length=n, score=p, answer_mode=mode, **given), folder="f")
        for n, p in curve.items()
    ]


def test_questions_count_if_answers_are_generated_at_several_lengths():
    rows = question_rows("cloze", {256: 50.0, 512: 43.0, 1024: 40.0}, "generation")
    rows += question_rows("choices", {256: 50.0, 512: 50.0}, "likelihood")
    rows += question_rows("single", {512: 50.0}, "generation")
    lengths = effective_length.score_lengths(Scores(rows, 256, 64))
    shown = [(r.evidence, r.task, r.definition, r.trained_at, str(r.mean)) for r in lengths]
    assert shown == [("score", "cloze", RULER, 256, "none"), ("score", "cloze", NOLIMA, 256, "512")]


def test_csv_has_numbers_and_remarks():
    curves = {1: {8: 100, 16: 100, 32: 60}, 2: {8: 100, 16: 80, 32: 60}}
    rows = effective_length.accuracy_lengths(accuracies({COPY: {"m": curves, "weak": {1: {8: 1, 16: 1}}}}))
    text = effective_length.lengths_csv(rows)
    head = "method,evidence,task,definition,trained_at,unit,effective_length,evaluated_to,is_lower_bound,threshold,"
    assert text.splitlines()[0] == head + "base_score,seeds,lowest_seed,highest_seed,remark"
    ruler, nolima, weak_ruler, weak_nolima = csv.DictReader(io.StringIO(text))
    keys = ("effective_length", "evaluated_to", "is_lower_bound", "seeds", "lowest_seed", "highest_seed", "remark")
    assert [ruler[key] for key in keys] == ["16", "32", "no", "2", "8", "16", ""]
    assert (float(ruler["threshold"]), float(nolima["threshold"]), float(nolima["base_score"])) == (85.6, 85.0, 100.0)
    assert [weak_ruler[key] for key in keys] == ["0", "16", "no", "1", "0", "0", ""]
    assert [weak_nolima[key] for key in keys] == ["", "16", "no", "1", "", "", "not learned"]


def test_the_table_marks_what_was_hardly_learned():
    curves = {"m": {1: {8: 95.0, 16: 95.0}}, "weak": {1: {8: 50.0, 16: 50.0}}, "none": {1: {8: 1.0, 16: 1.0}}}
    [table] = length_chapter.score_blocks(effective_length.accuracy_lengths(accuracies({COPY: curves})))
    assert table.header == ["task", "method", "trained at", "base score", RULER, NOLIMA, "evaluated to"]
    assert [[cell.text for cell in row.cells] for row in table.rows] == [
        ["m", "8 items", "95.0", "≥ 16", "≥ 16", "16"],
        ["weak", "8 items", "50.0 †", "none", "≥ 16", "16"],
        ["none", "8 items", "1.0 †", "none", "not learned", "16"],
    ]
    for words in (
        "exceeds 85.6 %",
        "at least 85 % of the base score",
        "†: the base score is below 90 %",
        "Not learned:",
    ):
        assert words in table.caption
    [clear] = length_chapter.score_blocks(effective_length.accuracy_lengths(accuracies({COPY: {"m": curves["m"]}})))
    assert "†" not in clear.caption and "Not learned" not in clear.caption


def test_a_report_on_text_has_the_numbers_everywhere(tmp_path, monkeypatch):
    skip_drawing(monkeypatch)
    ppl = {"alibi": {64: 50.0, 128: 47.0, 256: 46.0}, "rope": {64: 50.0, 128: 51.0, 256: 90.0}}
    page = new_page(tmp_path, ppl=ppl)
    head, *rows = page.table("Effective length in tokens by perplexity")
    assert head == ["encoding", "trained at", DEFINITION, "one-sided", "evaluated to"]
    assert rows == [["alibi", "64", "64", "≥ 256", "256"], ["rope", "64", "128", "128", "256"]]
    assert lines_of((tmp_path / "results.md").read_text(), "rope")[-1] == rows[1]
    with open(tmp_path / "effective_length.csv", newline="") as file:
        lines = [
            (r["method"], r["definition"], r["effective_length"], r["is_lower_bound"]) for r in csv.DictReader(file)
        ]
    assert lines[:2] == [("alibi", DEFINITION, "64", "no"), ("alibi", ONE_SIDED, "256", "yes")]
    events = EventAccumulator(str(tmp_path / "tensorboard/evaluation/alibi-seed1")).Reload()
    tags = {tag: [event.value for event in events.Scalars(tag)] for tag in events.Tags()["scalars"]}
    assert tags["effective_length/perplexity"] == [64.0]
    assert tags["effective_length/perplexity_one_sided"] == [256.0]
    # a smaller δ, in the report alone: a run in TensorBoard has the number for the default
    run_here("report", tmp_path, "--delta", "0.01")
    with open(tmp_path / "effective_length.csv", newline="") as file:
        assert [r["effective_length"] for r in csv.DictReader(file)] == ["64", "256", "64", "64"]


def test_a_joint_report_has_both_lengths_of_each_task(tmp_path, monkeypatch):
    skip_drawing(monkeypatch)
    text, tasks = tmp_path / "text", tmp_path / "tasks"
    [run] = write_sweep(text, ["alibi"], lengths=[64, 256]).values()
    for n, ppl in {64: 50.0, 256: 49.0}.items():
        row = {"checkpoint": "c", "split": "test", "length": n, "ppl": ppl, "loss_base2": 5.5, "tokens": 999}
        json_files.append_json_line(run.results, row)
    algorithms = [TASK, "copy:items=8,times=2"]
    for task, lengths in zip(algorithms, ((64, 256), (8, 16)), strict=True):
        [run] = write_sweep(tasks, ["alibi"], task, algorithms=algorithms).values()
        for n, right in zip(lengths, (20, 10), strict=True):
            row = {"checkpoint": "c", "algorithm": task, "split": "test", "length": n, "examples": 20, "right": right}
            row |= {"accuracy": right / 20, "transform": "identity", "rpe": None, "positions": None}
            row |= {"depth": 0.5} if task == TASK else {}
            json_files.append_json_line(run.results, row)
    said = run_here("report", text, tasks).stdout
    joint = said[said.index("Perplexity and retrieval") :]
    head = lines_of(joint, "encoding")[0]
    assert head[-4:] == ["retrieves", "trained at", "perplexity holds to", "finds to"]
    assert lines_of(joint, "alibi")[0][-3:] == ["64 tokens", "≥ 256", "64"]
    assert lines_of(joint, algorithms[1]) == [[algorithms[1], "alibi", "64 tokens (task: 8 items)", "≥ 256", "8"]]
    assert lines_of(joint, TASK) == [[TASK, "alibi", "64 tokens", "≥ 256", "64"]]
    events = EventAccumulator(str(next((tasks / "tensorboard/evaluation").glob("passkey*")))).Reload()
    assert [events.Scalars(f"effective_length/{name}")[0].value for name in ("ruler", "nolima")] == [64.0, 64.0]
