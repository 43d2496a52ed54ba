"""``compare``: which of two models is better, from results files with made-up numbers."""

from __future__ import annotations

import csv
import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from conftest import error_of, run_here

from fairseq_rpe.evaluation.example_scores import pack_hits, pack_scores
from fairseq_rpe.evaluation.question_records import QuestionResult
from fairseq_rpe.evaluation.records import ExactMatchResult, Result, TextResult
from fairseq_rpe.evaluation.segment_losses import SegmentLosses
from fairseq_rpe.utils import json_files

RANDOM = np.random.default_rng(3)
DIFFICULTY = RANDOM.normal(5.0, 1.0, 62)  # mean loss in bits of 62 documents of 100 tokens
NOISE = RANDOM.normal(0.0, 0.02, 62)


def text_result(losses: np.ndarray, length: int = 512, **more) -> TextResult:
    ends = 100 * np.arange(1, len(losses) + 1)
    segments = SegmentLosses.pack(ends, np.ones(len(losses), bool), 100 * losses)
    mean = float(losses.mean())
    of = {"checkpoint": "c", "data": "d", "split": "test", "tokens": int(ends[-1]), "segments": segments}
    return TextResult(length=length, loss_base2=mean, ppl=2**mean, **{**of, "encoding": "alibi", **more})


def task_result(is_right: np.ndarray, length: int, **more) -> ExactMatchResult:
    right = int(is_right.sum())
    of = {"checkpoint": "c", "algorithm": "copy", "split": "test", "transform": "identity", "encoding": "alibi"}
    of |= {"examples": is_right.size, "right": right, "accuracy": right / is_right.size, "hits": pack_hits(is_right)}
    return ExactMatchResult(length=length, **{**of, **more})


def question_result(scores: np.ndarray, **more) -> QuestionResult:
    of = {"checkpoint": "c", "data": "q", "set": "qasper", "split": "valid", "length": 256, "suite": "own"}
    of |= {"metrics": {}, "published": "f1", "truncated_documents": 0, "lost_tokens": 0, "empty": 0}
    of |= {"transform": "identity", "questions": len(scores), "question_scores": pack_scores(scores)}
    return QuestionResult(score=float(scores.mean()), **{**of, "encoding": "alibi", **more})


def write(path: Path, *results: Result) -> Path:
    for result in results:
        json_files.append_json_line(path, result.to_json())
    return path


def lines_of(*words: object) -> list[str]:
    return run_here("compare", *words).stdout.splitlines()


def test_a_known_difference_is_shown_and_equal_models_are_not(tmp_path):
    alibi = write(tmp_path / "a.jsonl", text_result(DIFFICULTY), text_result(DIFFICULTY, 1024))
    better = [text_result(DIFFICULTY + NOISE - 0.04, encoding="rope"), text_result(DIFFICULTY + NOISE, 1024)]
    rope = write(tmp_path / "r.jsonl", *(replace(result, encoding="rope") for result in better))
    for runs in ((alibi, rope), (rope, alibi)):
        shown, equal, note = lines_of(*runs)
        assert shown.startswith("rope is better than alibi at 512 tokens: ")
        assert "a perplexity ratio of 0.97" in shown and "62 documents, p < 0.001)" in shown
        assert equal.startswith(
            f"no difference between {'alibi and rope' if runs[0] is alibi else 'rope and alibi'} is shown"
        )
        assert "at 1,024 tokens" in equal
        assert "the smallest detectable difference is" in equal and equal.endswith(" % with this text")
        assert note == "The p-values are corrected for 2 comparisons (Holm)."
    [line] = lines_of(alibi, write(tmp_path / "same.jsonl", text_result(DIFFICULTY, encoding="copy")))
    assert "ratio of 1.000 (95 % interval 1.000 to 1.000, 62 documents, p = 1.00)" in line
    assert line.endswith("the two have the same score in all documents")


def test_lines_on_several_texts_name_the_text(tmp_path):
    first = [text_result(DIFFICULTY, data=data, split="valid") for data in ("0123456789", "abcdefghij")]
    second = [replace(result, encoding="rope") for result in first]
    lines = lines_of(write(tmp_path / "a.jsonl", *first), write(tmp_path / "b.jsonl", *second))
    assert [line.partition(" is shown ")[2].partition(":")[0] for line in lines[:2]] == [
        f"at 512 tokens of text {name}, valid" for name in ("01234567", "abcdefgh")
    ]


def test_holm_corrects_over_the_lines(tmp_path):
    effects = 0.1 * np.linspace(-1, 1, 62) + 0.018  # p = 0.018 alone
    first = [text_result(DIFFICULTY, length) for length in (64, 128, 256, 512)]
    second = [text_result(DIFFICULTY + effects, length, encoding="rope") for length in (64, 128, 256, 512)]
    one = lines_of(write(tmp_path / "a.jsonl", first[0]), write(tmp_path / "b.jsonl", second[0]))
    assert len(one) == 1 and one[0].startswith("alibi is better than rope")
    four = lines_of(write(tmp_path / "c.jsonl", *first), write(tmp_path / "d.jsonl", *second))
    assert [line.startswith("no difference") for line in four] == [True] * 4 + [False]


def test_tasks_and_questions(tmp_path):
    right = np.arange(200)
    scores = RANDOM.choice([0.0, 50.0, 100.0], 80)
    first = [task_result(right < 180, 10), task_result(right < 120, 50), question_result(scores)]
    second = [task_result(right < 178, 10), task_result(right < 60, 50), question_result(np.minimum(scores + 20, 100))]
    runs = [
        write(tmp_path / "a.jsonl", *first),
        write(tmp_path / "b.jsonl", *(replace(result, encoding="rope") for result in second)),
    ]
    trained, longer, questions, _ = lines_of(*runs)
    assert trained.startswith("no difference between alibi and rope is shown on copy at 10 items (as in training)")
    assert "90.0 % against 89.0 %, a difference of 1.0 points" in trained and "200 examples" in trained
    assert longer.startswith("alibi is better than rope on copy at 50 items (longer than in training): 60.0 %")
    assert questions.startswith("rope is better than alibi on qasper at 256 tokens") and "80 questions" in questions
    table = tmp_path / "out.csv"
    rows = [json.loads(line) for line in lines_of(*runs, "--json", "--out", table)]
    assert [row["is_shown"] for row in rows] == [False, True, True]
    assert rows[1]["difference"] == pytest.approx(30.0) and rows[1]["low"] < 30 < rows[1]["high"]
    with open(table, newline="") as file:
        assert [row["is_shown"] for row in csv.DictReader(file)] == ["no", "yes", "yes"]


def test_a_run_folder_has_the_results_of_its_last_checkpoint(tmp_path, capsys):
    run = tmp_path / "runs" / "alibi-seed1"
    json_files.write_json(run / "checkpoints" / "run.json", {"layout": 2, "finished": {"checkpoint": "last"}})
    early, last = text_result(DIFFICULTY + 1, checkpoint="early"), text_result(DIFFICULTY, checkpoint="last")
    write(run / "eval.jsonl", early, last, replace(last, positions="shape:max_position=9", ppl=99.0))
    other = write(tmp_path / "b.jsonl", text_result(DIFFICULTY + 0.1))
    [line] = lines_of(run, other)
    # both have the encoding alibi, so the files have their names
    assert line.startswith(f"alibi-seed1 is better than b.jsonl at 512 tokens: {2 ** DIFFICULTY.mean():.2f} against")
    assert "several encodings or positions" in error_of(
        capsys,
        "compare",
        other,
        write(tmp_path / "c.jsonl", replace(last, positions="p"), replace(last, positions="q")),
    )
    assert "has results of 2 checkpoints" in error_of(
        capsys, "compare", other, write(tmp_path / "d.jsonl", early, last)
    )


@pytest.mark.parametrize(
    ("second", "words"),
    [
        (text_result(DIFFICULTY, 64), "a and b.jsonl have no measurement in common (a has perplexity at 512; "),
        (text_result(DIFFICULTY, data="other"), "on different texts or splits: evaluate both on the same one"),
        (text_result(DIFFICULTY, split="valid"), "on different texts or splits"),
        (text_result(DIFFICULTY[:50]), "scores of different segments of the text at 512 tokens: evaluate both again"),
        (text_result(DIFFICULTY, segments=None), "lacks the losses of segments: evaluate the model again"),
        (task_result(np.ones(9, bool), 10), "no measurement in common"),
    ],
)
def test_what_cannot_be_compared_is_refused(second, words, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    write(Path("a"), text_result(DIFFICULTY))
    write(Path("b.jsonl"), second)
    assert words in error_of(capsys, "compare", "a", "b.jsonl")


def test_different_examples_and_files_without_results_are_refused(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    write(Path("a"), task_result(np.ones(9, bool), 10))
    write(Path("b"), task_result(np.ones(8, bool), 10))
    write(Path("c"), task_result(np.ones(9, bool), 10, hits=None))
    assert "different examples on copy at 10 items" in error_of(capsys, "compare", "a", "b")
    assert "c: the result on copy at 10 items (as in training) lacks the score of each" in error_of(
        capsys, "compare", "a", "c"
    )
    Path("empty.jsonl").write_text('{"other": 1}\n')
    assert "empty.jsonl has no perplexities" in error_of(capsys, "compare", "a", "empty.jsonl")
    assert "--out a exists and would be replaced" in error_of(capsys, "compare", "a", "b", "--out", "a")
    Path("sweep/runs/x-seed1").mkdir(parents=True)
    write(Path("sweep/runs/x-seed1/eval.jsonl"), task_result(np.ones(9, bool), 10))
    Path("sweep/sweep.json").write_text("{}")
    assert "name one of its runs, such as sweep/runs/x-seed1" in error_of(capsys, "compare", "sweep", "a")
    assert "runs has no eval.jsonl" in error_of(capsys, "compare", "sweep/runs", "a")


def test_perplexities_with_the_same_context_are_compared_whatever_options_were_stated(tmp_path, capsys):
    first = text_result(DIFFICULTY, context="across documents", blocks="stream")
    second = text_result(DIFFICULTY - 0.1 + NOISE, context="across documents", rpe="rope:scaling=ntk,factor=4")
    runs = [write(tmp_path / name, result) for name, result in (("a", first), ("b", second))]
    [line] = lines_of(*runs)
    assert line.startswith("rope:scaling=ntk,factor=4 is better than alibi at 512 tokens: ")
    other = write(tmp_path / "c", text_result(DIFFICULTY, context="within documents"))
    assert "have no measurement in common" in error_of(capsys, "compare", runs[1], other)
