"""Predicted answers of exact match: what ``eval-task --predictions`` stores, resumes and refuses."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path

import numpy as np
import pytest
import test_depths
from conftest import run_here
from measuring import refusal, rows_of, without_seconds

from fairseq_rpe.algorithms import build
from fairseq_rpe.evaluation.predictions import read_predictions
from fairseq_rpe.evaluation.records import ExactMatchResult, read_results
from fairseq_rpe.runs.run_folder import RunFolder
from fairseq_rpe.sweeps.sweep_record import Method, SweepFolder
from fairseq_rpe.utils.json_files import read_json_lines

SMALL = ["--", "--decoder-embed-dim", "32", "--decoder-ffn-embed-dim", "64"]
TASKS = {
    "passkey": test_depths.TASK,
    "sort": "sort:items=3,times=2,train=200,valid=20,test=30",
    "mqar": "mqar:items=16,times=2,least=12,train=100,valid=10,test=7,pairs=2,alphabet=6",
}


@pytest.fixture(scope="module")
def folders(made_once) -> dict[str, RunFolder]:
    """The run folder of a short training of each task, after its evaluation by a sweep."""
    depths = made_once("depths", lambda folder: run_here(*test_depths.command(folder / "out")))
    others = made_once("predictions", lambda folder: run_here(*command(folder / "out")))
    folders = {"passkey": depths, "sort": others, "mqar": others}
    method = Method("alibi", "alibi")
    return {name: SweepFolder(path / "out").run_folder(method, 1, TASKS[name]) for name, path in folders.items()}


def command(out: Path) -> list[str]:
    tasks = f"{TASKS['sort']} {TASKS['mqar']}"
    training = ["--updates", "2", "--batch-sentences", "8", "--device", "cpu"]
    return ["sweep", "--algorithms", tasks, "--encodings", "alibi", "--out", str(out), *training, *SMALL]


@pytest.mark.parametrize("name", TASKS)
def test_a_sweep_keeps_the_predictions_that_its_hits_count(folders, name):
    folder, task = folders[name], build(TASKS[name])
    results, predictions = read_results(ExactMatchResult, folder.results), read_predictions(folder.predictions)
    assert set(predictions) == {result.key for result in results} and len(results) > 1
    for result in results:
        if result.depth is None:
            examples = [e for e in task.examples("test") if e.length == result.length]
        else:
            examples = list(task.examples_at_depth("test", result.length, result.depth))
        end = () if task.has_labels else ("</s>",)
        answers = [answer.split(" ") for answer in predictions[result.key].answers]
        right = [answer == [*e.answer, *end] for answer, e in zip(answers, examples, strict=True)]
        if task.has_labels:
            right = [
                a == b
                for answer, e in zip(answers, examples, strict=True)
                for a, b in zip(answer, e.answer, strict=True)
            ]
        assert result.is_right().tolist() == right and result.right == int(np.sum(right))


def test_a_killed_measurement_is_repeated_and_a_result_without_predictions_only_if_they_are_asked(folders, tmp_path):
    evaluate = ["eval-task", folders["passkey"].checkpoints.last]
    out, path = tmp_path / "eval.jsonl", tmp_path / "predictions.jsonl"
    both = ("--out", out, "--predictions", path)
    rows = rows_of(*evaluate, *both)
    whole, lines = read_predictions(path), path.read_bytes().splitlines(keepends=True)
    assert len(lines) == len(rows) == len(whole) == 6

    # killed while it wrote the last predictions: half a line, and no result
    path.write_bytes(b"".join(lines[:-1]) + lines[-1][:40])
    out.write_text("".join(json.dumps(row) + "\n" for row in rows[:-1]))
    assert len(read_predictions(path)) == 5
    assert without_seconds(rows_of(*evaluate, *both)) == without_seconds(rows)
    assert path.read_bytes() == b"".join(lines) and len(read_json_lines(out)) == 6

    # killed between the predictions and the result: the last line of a key counts
    out.write_text("".join(json.dumps(row) + "\n" for row in rows[:-1]))
    rows_of(*evaluate, *both)
    assert path.read_bytes() == b"".join([*lines, lines[-1]]) and read_predictions(path) == whole

    # without its predictions, a result is measured again, but only if they are asked for
    before = out.read_bytes()
    path.unlink()
    assert without_seconds(rows_of(*evaluate, "--out", out)) == without_seconds(rows) and out.read_bytes() == before
    assert without_seconds(rows_of(*evaluate, *both)) == without_seconds(rows)
    assert read_predictions(path) == whole and len(read_json_lines(out)) == 12
    assert {r.key for r in read_results(ExactMatchResult, out)} == set(whole)


def test_predictions_that_cannot_be_written_are_refused_before_any_work(folders, tmp_path):
    checkpoint, out = folders["passkey"].checkpoints.last, tmp_path / "rows.jsonl"
    damaged = tmp_path / "damaged.jsonl"
    damaged.write_text('{"answers": 3}\n')
    for path, words in (
        (out, "--predictions .* is also the file of --out: name another file"),
        (tmp_path, "--predictions .* is a folder: name a file"),
        (damaged, "damaged.jsonl line 1"),
    ):
        assert re.search(words, refusal("eval-task", checkpoint, "--out", out, "--predictions", path))
        assert not out.exists()


def test_an_old_sweep_without_predictions_stays_finished(folders, tmp_path):
    out = Path(shutil.copytree(folders["sort"].path.parents[1], tmp_path / "out"))
    for path in out.rglob("predictions.jsonl"):
        path.unlink()
    run_here(*command(out))
    assert not list(out.rglob("predictions.jsonl"))
