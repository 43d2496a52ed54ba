"""Exact answers by number of items: training on a generated task, ``accuracy``, and sweeps over methods."""

from __future__ import annotations

import csv
import io
import json
import os
import re
import shutil
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest
import torch
from conftest import run, run_here

from fairseq_rpe import positions
from fairseq_rpe.algorithms import build
from fairseq_rpe.cli.main import build_parser, main
from fairseq_rpe.cli.sweep import resolved
from fairseq_rpe.core import files
from fairseq_rpe.evaluation.answers import interpolated
from fairseq_rpe.sweeps import cells

SMALL = ["--decoder-embed-dim", "32", "--decoder-ffn-embed-dim", "64"]
TASK = "copy:items=3,times=3,train=400,valid=20,test=60,alphabet=12"
M, LONGEST, UPDATES = 3, 9, 40
COUNTS = Counter(example.length for example in build(TASK).examples("test"))
RECIPE = f"""
title = "Two ways to evaluate one training"
paper = "none"
kind = "algorithms"

[methods.plain]
rpe = "rope"

[methods.squeezed]
rpe = "rope"
positions_eval = "interpolate"

[scales.laptop]
algorithms = ["{TASK}"]
arch = "tiny"
updates = {UPDATES}
batch_sentences = 32
lr = 0.01
warmup = 10
extra = {json.dumps(SMALL)}

[published]
source = "made up"
squeezed = {{ copy = 12.34 }}
"""


@pytest.fixture(scope="module")
def swept(tmp_path_factory) -> tuple[Path, Path, subprocess.CompletedProcess]:
    """The folder of a finished sweep of a recipe, the recipe's file, and what the sweep said."""
    folder = tmp_path_factory.mktemp("accuracy")
    recipe = folder / "two.toml"
    recipe.write_text(RECIPE)
    return folder / "out", recipe, run_here(*sweep_command(folder / "out", recipe))


def sweep_command(out: Path, recipe: Path, *more: str) -> list[str]:
    return ["sweep", "--recipe", str(recipe), "--out", str(out), "--device", "cpu", *more]


@pytest.fixture(scope="module")
def checkpoint(swept) -> Path:
    (found,) = (swept[0] / "runs").glob("*/checkpoints/checkpoint_last.pt")
    return found


def error_of(capsys, *argv: object) -> str:
    """Run a command that must fail with exactly one line; returns it."""
    capsys.readouterr()
    try:
        code = main([str(a) for a in argv])
    except SystemExit as stop:
        pytest.fail(f"argparse ended it with code {stop.code}: {capsys.readouterr().err}")
    out, err = capsys.readouterr()
    assert code == 2 and out == "" and err.startswith("error: ") and err.count("\n") == 1, err
    return err


def measure(capsys, *argv: object) -> list[dict]:
    """The rows that ``accuracy`` prints."""
    capsys.readouterr()
    assert main(["accuracy", *(str(a) for a in argv), "--device", "cpu", "--json"]) == 0
    return [json.loads(line) for line in capsys.readouterr().out.splitlines()]


@pytest.fixture(scope="module")
def loaded(checkpoint):
    """The model of the checkpoint as fairseq loads it, and its task with the test split."""
    from fairseq import checkpoint_utils

    import fairseq_rpe.models  # noqa: F401

    (model,), _, task = checkpoint_utils.load_model_ensemble_and_task([str(checkpoint)])
    task.load_dataset("test")
    return model.eval(), task


@torch.no_grad()
def right_answers(loaded, n: int, transform: str) -> int:
    """Exact answers by full forward passes without a cache, under fixed positions."""
    model, task = loaded
    words, right = task.source_dictionary, 0
    before = model.decoder.moves.evaluation
    model.decoder.moves.evaluation = positions.build(transform, task.train_tokens)
    for example in build(TASK).examples("test"):
        if example.length != n:
            continue
        row = [words.indices[w] for w in example.prompt]
        for _ in range(n + 1):
            scores = model(torch.tensor([row]))[0][0, -1]
            scores[words.pad()] = -torch.inf
            row.append(int(scores.argmax()))
        right += [words[t] for t in row[n + 2 :]] == [*example.answer, "</s>"]
    model.decoder.moves.evaluation = before
    return right


# accuracy


def test_every_example_is_asked_once_and_nothing_is_redone(checkpoint, tmp_path, capsys):
    out = tmp_path / "deep" / "rows.jsonl"
    rows = measure(capsys, checkpoint, "--out", out)  # every line that it prints is a row
    assert rows == files.read_json_lines(out)
    assert [row["length"] for row in rows] == sorted(COUNTS) == list(range(2, LONGEST + 1))
    assert {row["length"]: row["examples"] for row in rows} == COUNTS and sum(COUNTS.values()) == 60
    for row in rows:
        assert row["accuracy"] == row["right"] / row["examples"] and 0 <= row["right"] <= row["examples"]
        assert (row["transform"], row["positions"], row["rpe"], row["unit"]) == ("identity", None, None, "items")
        assert (row["encoding"], row["algorithm"], row["split"]) == ("rope", TASK, "test")
        assert row["checkpoint"] == files.file_digest(checkpoint)

    whole, before = out.read_bytes(), out.stat().st_mtime_ns
    assert measure(capsys, checkpoint, "--out", out) == rows
    assert (out.read_bytes(), out.stat().st_mtime_ns) == (whole, before)
    backwards = measure(capsys, checkpoint, "--out", out, "--lengths", "9,2")
    assert backwards == [rows[-1], rows[0]] and out.read_bytes() == whole

    # killed before the last three numbers of items
    out.write_bytes(b"".join(whole.splitlines(keepends=True)[:-3]))
    again = measure(capsys, checkpoint, "--out", out)
    assert again[:-3] == rows[:-3] and files.read_json_lines(out) == again
    for new, old in zip(again[-3:], rows[-3:], strict=True):
        assert {**new, "seconds": 0} == {**old, "seconds": 0}

    # another measurement is added, none is taken for another
    more = measure(capsys, checkpoint, "--out", out, "--positions", "interpolate", "--lengths", "2")
    assert files.read_json_lines(out) == [*again, *more] and more[0]["positions"] == "interpolate"


def test_right_answers_are_those_of_full_forward_passes(checkpoint, loaded, capsys):
    """Without a cache and one by one, with the ratio M/L written out."""
    for flags in ([], ["--positions", "interpolate"]):
        rows = measure(capsys, checkpoint, *flags, "--batch-size", "4")
        for row in rows:
            n = row["length"]
            ratio = f"interpolate:ratio={M}/{n}" if flags and n > M else "identity"
            assert row["right"] == right_answers(loaded, n, ratio), row
        assert 0 < sum(row["right"] for row in rows) < 60


def test_interpolation_has_one_ratio_for_each_number_of_items(checkpoint, capsys):
    plain = measure(capsys, checkpoint)
    for unit, ratio in (("items", lambda n: M / n), ("tokens", lambda n: (2 * M + 2) / (2 * n + 2))):
        rows = measure(capsys, checkpoint, "--positions", "interpolate", "--unit", unit)
        for row, own in zip(rows, plain, strict=True):
            assert (row["unit"], row["positions"]) == (unit, "interpolate")
            if row["length"] <= M:
                assert row["transform"] == "identity" and row["right"] == own["right"]
            else:
                name, _, value = row["transform"].partition(":ratio=")
                assert name == "interpolate" and float(value) == pytest.approx(ratio(row["length"]), rel=1e-12)
    for spec in ("interpolate:ratio=1/2", "interpolate:train=5", "offset:by=2", "randomized:max=99"):
        (row,) = measure(capsys, checkpoint, "--positions", spec, "--lengths", "7")
        assert row["transform"] == row["positions"] == spec


@pytest.mark.parametrize(
    ("spec", "trained", "length", "expected"),
    [
        ("interpolate", 20, 80, "interpolate:ratio=0.25"),
        ("interpolate:ratio=auto", 20, 80, "interpolate:ratio=0.25"),
        ("interpolate", 20, 20, "identity"),
        ("interpolate", 20, 2, "identity"),
        ("interpolate:train=9", 20, 80, "interpolate:train=9"),
        ("interpolate:ratio=1/3", 20, 80, "interpolate:ratio=1/3"),
        ("identity", 20, 80, "identity"),
        ("randomized:times=3", 20, 80, "randomized:times=3"),
    ],
)
def test_automatic_ratio_is_written_out(spec, trained, length, expected):
    assert interpolated(spec, trained, length) == expected
    positions.build(expected, 10)


def test_random_positions_are_drawn_alike_every_time(checkpoint, capsys):
    torch.manual_seed(0)
    expected = torch.rand(1)
    torch.manual_seed(0)
    flags = ["--positions", "randomized:times=3", "--lengths", "2,3,4,9"]
    one, two = ([{**row, "seconds": 0} for row in measure(capsys, checkpoint, *flags)] for _ in range(2))
    assert one == two and all(row["transform"] == "randomized:times=3" for row in one)
    torch.manual_seed(0)
    assert torch.rand(1) == expected
    assert {row["draws"] for row in one} == {1} and "draws" not in measure(capsys, checkpoint, "--lengths", "2")[0]


def test_random_positions_are_drawn_for_each_example(checkpoint, capsys, monkeypatch):
    """As many draws as examples, and no matter which of them are answered together."""
    made = []
    whole = positions.freeze_rows

    def spy(transform, lengths, generators):
        frozen = whole(transform, lengths, generators)
        made.extend(tuple(row) for row in frozen.moved.k.tolist())
        return frozen

    monkeypatch.setattr(positions, "freeze_rows", spy)
    flags = ["--positions", "randomized:times=3", "--lengths", "9"]
    (together,) = measure(capsys, checkpoint, *flags)
    first = sorted(made)
    assert len(first) == together["examples"] == len(set(first)) > 2
    made.clear()
    (apart,) = measure(capsys, checkpoint, *flags, "--batch-size", "2")
    assert sorted(made) == first and apart["right"] == together["right"]


def test_other_splits_and_encodings(checkpoint, capsys):
    for split, size in (("valid", 20), ("train", 400)):
        rows = measure(capsys, checkpoint, "--split", split)
        assert [row["length"] for row in rows] == [2, 3] and {row["split"] for row in rows} == {split}
        assert sum(row["examples"] for row in rows) == size
    (row,) = measure(capsys, checkpoint, "--rpe", "alibi", "--lengths", "3")
    assert row["rpe"] == "alibi" and row["encoding"] == "rope"


def test_accuracy_refuses_in_one_line(checkpoint, tmp_path, capsys):
    out = tmp_path / "rows.jsonl"

    def refused(*argv: str, at: Path = checkpoint) -> str:
        said = error_of(capsys, "accuracy", at, "--out", out, "--device", "cpu", *argv)
        assert not out.exists()  # nothing was measured before the refusal
        return said

    assert "the test split has no example of 10 items: leave it out" in refused("--lengths", "2,10")
    assert "no example of 1 items" in refused("--lengths", "1")
    assert "the valid split has no example of 4 items" in refused("--split", "valid", "--lengths", "4")
    dynamic = refused("--rpe", "rope:scaling=dynamic_ntk,original_length=8")
    assert "follows the length of the text" in dynamic and "--positions interpolate" in dynamic
    assert "did you mean 'interpolate'" in refused("--positions", "interpolat")
    assert "did you mean 'alibi'" in refused("--rpe", "alibbi")
    assert "raise max to at least 20" in refused("--positions", "randomized:max=19", "--lengths", "2,9")
    assert "raise times to at least 3" in refused("--positions", "randomized:times=2")
    assert "'nope' reads no positions" in refused("--rpe", "nope", "--positions", "interpolate")
    assert "accepts whole positions only" in refused("--rpe", "t5_bias", "--positions", "interpolate")
    assert "does not fit this model" in refused("--rpe", "kerple_log")
    assert "does not exist" in refused(at=tmp_path / "no.pt")
    text = {"cfg": {"task": {"_name": "language_modeling", "data": "x"}, "model": {"rpe": "rope"}}, "model": {}}
    for k, task in enumerate((text["cfg"]["task"], None)):
        torch.save({**text, "cfg": {**text["cfg"], "task": task}}, tmp_path / f"{k}.pt")
        assert "was not trained on an algorithmic task: fairseq-rpe eval" in refused(at=tmp_path / f"{k}.pt")


# train


def test_train_goes_with_data_or_algorithm(tmp_path, capsys):
    def refused(*argv: str) -> str:
        return error_of(capsys, "train", *argv, "--rpe", "rope", "--save-dir", tmp_path / "run")

    either = "either a DATA folder or --algorithm SPEC"
    assert either in refused()
    assert either in refused(str(tmp_path), "--algorithm", "copy")
    assert "--tokens does not go with --algorithm" in refused("--algorithm", "copy", "--tokens", "64")
    assert "did you mean 'reverse'" in refused("--algorithm", "revers")
    assert "did you mean 'items'" in refused("--algorithm", "copy:itms=3")
    assert not (tmp_path / "run").exists()


def test_linear_schedule_cannot_be_prolonged(swept, checkpoint, capsys):
    same = ["train", "--algorithm", f"copy:alphabet=12,{TASK.split(':')[1].removesuffix(',alphabet=12')}"]
    same += ["--rpe", "rope", "--save-dir", str(checkpoint.parent), "--device", "cpu"]
    same += ["--batch-sentences", "32", "--lr", "0.01", "--warmup", "10"]
    before = {p: p.stat().st_mtime_ns for p in checkpoint.parent.iterdir()}
    for schedule in ([], ["--schedule", "linear"]):  # a task's default
        assert main([*same, *schedule, "--updates", str(UPDATES), "--", *SMALL]) == 0
        assert f"finished run of {UPDATES} updates" in capsys.readouterr().out
        for updates in (UPDATES + 10, UPDATES - 10):
            said = error_of(capsys, *same, *schedule, "--updates", str(updates), "--", *SMALL)
            assert f"(last_update is {UPDATES} there, {updates} here)" in said
    other = error_of(capsys, *same, "--schedule", "inverse_sqrt", "--updates", str(UPDATES), "--", *SMALL)
    assert "schedule is 'linear' there, None here" in other
    assert before == {p: p.stat().st_mtime_ns for p in before}


def test_train_command_of_a_task(tmp_path, capsys):
    """What fairseq is told: the task in its normal spelling, no text flags, and a rate that ends at the last update."""
    argv = ["train", "--algorithm", "copy:alphabet=100,items=5", "--rpe", "rope", "--save-dir", str(tmp_path / "x")]
    assert main([*argv, "--updates", "77", "--device", "cpu", "--dry-run"]) == 0
    (line,) = capsys.readouterr().out.splitlines()
    for words in (
        "--task rpe_algorithmic --algorithm copy:items=5 --criterion answer_cross_entropy",
        "--lr-scheduler polynomial_decay --total-num-update 77",
        "--max-update 77",
    ):
        assert words in line
    assert "--tokens-per-sample" not in line and "inverse_sqrt" not in line and not (tmp_path / "x").exists()
    assert main([*argv, "--schedule", "inverse_sqrt", "--device", "cpu", "--dry-run"]) == 0
    line = capsys.readouterr().out
    assert "--lr-scheduler inverse_sqrt" in line and "total-num-update" not in line


def test_a_table_is_printed(checkpoint, capsys):
    rows = measure(capsys, checkpoint, "--lengths", "2,5")
    assert main(["accuracy", str(checkpoint), "--lengths", "2,5", "--device", "cpu"]) == 0
    head, *lines = [re.split(r" {2,}", line.strip()) for line in capsys.readouterr().out.splitlines()]
    assert head == ["items", "exact %", "right", "examples", "seconds"]
    for line, row in zip(lines, rows, strict=True):
        assert line[:4] == [str(row["length"]), f"{100 * row['accuracy']:.1f}", str(row["right"]), str(row["examples"])]


def test_progress_is_a_line_a_minute_and_counts_every_token_that_is_written(checkpoint, capsys, monkeypatch):
    """With no minute to wait for, a line after each token."""
    from fairseq_rpe.core import progress

    plain = measure(capsys, checkpoint, "--lengths", "2,5")
    assert capsys.readouterr().err == ""
    monkeypatch.setattr(progress, "SECONDS", 0.0)
    assert main(["accuracy", str(checkpoint), "--lengths", "2,5", "--device", "cpu", "--json"]) == 0
    told = capsys.readouterr()
    rows = [json.loads(line) for line in told.out.splitlines()]
    assert [{**row, "seconds": 0} for row in rows] == [{**row, "seconds": 0} for row in plain]
    # an answer of copy is the items, as often as they are asked for, and the end of the sentence
    examples = {n: [e for e in build(TASK).examples("test") if e.length == n] for n in (2, 5)}
    steps = [len(own) for own in examples.values() for _ in range(len(own[0].answer) + 1)]
    lines = [line for line in told.err.splitlines() if " tokens" in line]
    total = f"{sum(steps):,}"
    assert len(lines) == len(steps)
    assert [line.split(": ", 1)[1].split(" tokens")[0] for line in lines] == [
        f"{sum(steps[: k + 1]):,} of {total}" for k in range(len(steps))
    ]
    assert " left" in lines[0] and " left" not in lines[-1]


def test_progress_is_a_bar_on_a_terminal_with_the_rows_above_it(checkpoint, capsys, monkeypatch):
    class Terminal(io.StringIO):
        def isatty(self) -> bool:
            return True

    terminal = Terminal()
    monkeypatch.setattr(sys, "stderr", terminal)
    rows = measure(capsys, checkpoint, "--lengths", "2,3")
    assert [row["length"] for row in rows] == [2, 3]
    assert "\r" in terminal.getvalue() and " tokens/s" in terminal.getvalue()


# sweeps


def table_of(out: Path) -> list[dict]:
    with open(out / "accuracy.csv", newline="") as file:
        return list(csv.DictReader(file))


def test_methods_that_differ_in_evaluation_share_the_training(swept, checkpoint):
    out, _, done = swept
    assert [p.name for p in (out / "runs").iterdir()] == [checkpoint.parents[1].name]
    log = (checkpoint.parents[1] / "train.log").read_text()
    assert log.count("| INFO | fairseq_cli.train | task: AlgorithmicTask") == 1
    measured = files.read_json_lines(checkpoint.parents[1] / "eval.jsonl")
    assert [(r["positions"], r["length"]) for r in measured] == [
        (spec, n) for spec in (None, "interpolate") for n in range(2, LONGEST + 1)
    ]
    rows = table_of(out)
    assert list(rows[0]) == ["task", "method", "seed", "items", "examples", "right", "accuracy", "positions"]
    assert [(r["method"], int(r["items"])) for r in rows] == [
        (name, n) for name in ("plain", "squeezed") for n in range(2, LONGEST + 1)
    ]
    for row, own in zip(rows, measured, strict=True):
        assert (row["task"], row["seed"], row["positions"]) == (TASK, "1", own["transform"])
        assert (int(row["examples"]), int(row["right"])) == (own["examples"], own["right"])
        assert float(row["accuracy"]) == own["accuracy"] == int(row["right"]) / int(row["examples"])
    assert rows[-1]["positions"].startswith("interpolate:ratio=0.333") and rows[0]["positions"] == "identity"
    for name in ("plain", "squeezed"):
        assert sum(int(r["examples"]) for r in rows if r["method"] == name) == 60
    assert all(str(out / name) in done.stdout for name in ("accuracy.csv", "accuracy.png", "tensorboard"))
    assert any((out / "tensorboard").rglob("events*"))


def test_table_is_the_mean_over_the_numbers_of_items(swept):
    out, _, done = swept
    rows = table_of(out)

    def mean(name: str, first: int, last: int) -> str:
        values = [int(r["right"]) / int(r["examples"]) for r in rows if r["method"] == name]
        numbers = [int(r["items"]) for r in rows if r["method"] == name]
        kept = [v for v, n in zip(values, numbers, strict=True) if first <= n <= last]
        return f"{100 * sum(kept) / len(kept):.1f}"

    text = (out / "accuracy.md").read_text()
    assert text in done.stdout
    cells = [[c.strip() for c in line.split("|")[1:-1]] for line in text.splitlines() if line.startswith("|")]
    assert cells[0] == ["task", "method", "trained", "beyond", "all", "published"]
    assert set("".join(cells[1])) <= set("-:")
    assert cells[2:] == [
        [TASK, name, mean(name, 2, M), mean(name, M + 1, LONGEST), mean(name, 2, LONGEST), known]
        for name, known in (("plain", ""), ("squeezed", "12.3"))
    ]
    assert float(cells[2][2]) > 0 and cells[2][2] != cells[2][4]
    assert f"{TASK}: 2 … {M} items in training, up to {LONGEST} here" in text and "Published: made up" in text


def test_figures_are_pictures(swept):
    out = swept[0]
    assert (out / "accuracy.png").read_bytes().startswith(b"\x89PNG")
    assert (out / "accuracy.pdf").read_bytes().startswith(b"%PDF")
    picture = (out / "accuracy.png").read_bytes()
    assert min(int.from_bytes(picture[16:20]), int.from_bytes(picture[20:24])) > 400


def snapshot(folder: Path) -> dict[Path, int]:
    derived = {"sweep.json", "accuracy.csv", "accuracy.md", ".lock"}
    return {p: p.stat().st_mtime_ns for p in folder.rglob("*") if p.is_file() and p.name not in derived}


def test_finished_sweep_is_not_redone_and_needs_no_torch(swept):
    out, recipe, done = swept
    before, tables = snapshot(out), [(out / n).read_text() for n in ("accuracy.csv", "accuracy.md", "sweep.json")]
    command = sweep_command(out, recipe)
    code = (
        "import sys\nfrom fairseq_rpe.cli.main import main\n"
        f"assert main({command!r}) == 0\nassert not {{'torch', 'fairseq', 'matplotlib'}} & set(sys.modules)"
    )
    assert run(sys.executable, "-c", code).stdout == done.stdout
    assert snapshot(out) == before
    assert [(out / n).read_text() for n in ("accuracy.csv", "accuracy.md", "sweep.json")] == tables


def test_lost_results_are_measured_again_without_training(swept, tmp_path, capsys):
    """A sweep that was killed while it evaluated: what is there is kept, the rest is measured."""
    out = tmp_path / "out"
    shutil.copytree(swept[0], out)

    def work_left() -> list[cells.Stage]:
        args = build_parser("sweep").parse_args(sweep_command(out, swept[1]))
        (cell,) = cells.make(resolved(args), None)
        assert cell.rows == 2 * (LONGEST - 1)
        return cell.work_left()

    assert work_left() == []
    (folder,) = (out / "runs").iterdir()
    results = folder / "eval.jsonl"
    whole = files.read_json_lines(results)
    kept = whole[:-5]  # the others are of `squeezed`
    results.write_text("".join(json.dumps(row) + "\n" for row in kept))
    (stage,) = work_left()
    assert stage.name == "evaluating" and stage.command[-2:] == ["--positions", "interpolate"]
    assert main(stage.command[stage.command.index("accuracy") :]) == 0
    capsys.readouterr()
    again = files.read_json_lines(results)
    assert again[: len(kept)] == kept and work_left() == []
    assert [{**r, "seconds": 0} for r in again] == [{**r, "seconds": 0} for r in whole]

    results.unlink()
    assert [stage.name for stage in work_left()] == ["evaluating"] * 2
    (folder / "checkpoints" / "checkpoint_last.pt").write_bytes(b"broken")
    assert [stage.name for stage in work_left()] == ["training", "evaluating", "evaluating"]


def test_report_writes_the_same_tables(swept, tmp_path, capsys):
    out = tmp_path / "out"
    shutil.copytree(swept[0], out)
    expected = {name: (out / name).read_text() for name in ("accuracy.csv", "accuracy.md")}
    for name in expected:
        (out / name).unlink()
    assert main(["report", str(out)]) == 0
    assert {name: (out / name).read_text() for name in expected} == expected
    assert expected["accuracy.md"] in capsys.readouterr().out
    assert not (out / "results.csv").exists()


def test_seeds_weigh_alike_in_the_table(swept, tmp_path):
    """A second seed, made up from the first: all right where the first was measured."""
    out = tmp_path / "out"
    shutil.copytree(swept[0], out)
    (folder,) = (out / "runs").iterdir()
    other = folder.with_name(folder.name.replace("-seed1", "-seed2"))
    shutil.copytree(folder, other)
    rows = files.read_json_lines(other / "eval.jsonl")
    rows = [{**r, "right": r["examples"], "accuracy": 1.0} for r in rows]
    rows += [{**r, "checkpoint": "older", "right": 0, "accuracy": 0.0} for r in rows]
    rows += [{**r, "unit": "tokens", "accuracy": 0.0} for r in rows[:3]]
    rows += [{**r, "split": "valid", "accuracy": 0.0} for r in rows[:3]]
    rows += [{**r, "rpe": "alibi", "accuracy": 0.0} for r in rows[:3]]
    (other / "eval.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    state = files.read_json(out / "sweep.json")
    files.write_json(out / "sweep.json", {**state, "seeds": [1, 2]})
    one = table_of(out)
    assert main(["report", str(out)]) == 0
    both = table_of(out)
    assert [r for r in both if r["seed"] == "1"] == one
    assert [r["accuracy"] for r in both if r["seed"] == "2"] == ["1.0"] * len(one)
    values = [float(r["accuracy"]) for r in one if r["method"] == "plain"]
    line = next(line for line in (out / "accuracy.md").read_text().splitlines() if " plain |" in line)
    assert line.split("|")[5].strip() == f"{50 * (sum(values) / len(values) + 1):.1f}"


def test_dry_run_prints_one_training_and_both_evaluations(swept, tmp_path, capsys):
    _, recipe, _ = swept
    assert main(sweep_command(tmp_path / "x", recipe, "--launcher", "dry-run", "--updates", "7", "--warmup", "2")) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split("fairseq_rpe.cli.main ")[1].split()[0] for line in lines] == ["train", "accuracy", "accuracy"]
    assert f"--algorithm {TASK}" in lines[0] and "--updates 7 " in lines[0] and "--lr 0.01" in lines[0]
    assert lines[0].endswith("-- " + " ".join(SMALL))
    assert "--positions" not in lines[1] and lines[2].endswith("--positions interpolate")
    assert len({line.split(" accuracy ")[1].split()[0] for line in lines[1:]}) == 1
    assert not (tmp_path / "x").exists()


def test_dry_run_of_encodings_by_tasks_and_seeds(tmp_path, capsys):
    argv = ["sweep", "--algorithms", f"{TASK} sort:test=50", "--encodings", "rope alibi", "--seeds", "1,2"]
    argv += ["--out", str(tmp_path / "x"), "--device", "cpu", "--launcher", "dry-run"]
    assert main([*argv, "--lengths", "2,3"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert sum(" train " in line for line in lines) == sum(" accuracy " in line for line in lines) == 8
    assert len({line.split("--save-dir ")[1].split()[0] for line in lines if " train " in line}) == 8
    assert all("--lengths 2,3" in line for line in lines if " accuracy " in line)


def test_sweep_refuses_in_one_line(swept, corpus, tmp_path, capsys):
    out, recipe, _ = swept
    before = snapshot(out)

    def refused(*argv: object) -> str:
        return error_of(capsys, "sweep", *argv, "--device", "cpu")

    text = ["--encodings", "rope", "--lengths", "64", "--tokens", "32", "--updates", "3"]
    assert f"{out} holds another sweep" in refused(corpus, *text, "--out", out)
    longer = UPDATES + 5
    said = refused("--recipe", recipe, "--out", out, "--updates", longer)
    assert f"is {UPDATES} there, {longer} here)" in said
    kind = tmp_path / "kind"
    kind.mkdir()
    state = files.read_json(out / "sweep.json")
    files.write_json(kind / "sweep.json", {k: v for k, v in state.items() if k != "algorithms"})
    assert "holds a sweep of another kind" in refused("--recipe", recipe, "--out", kind)
    moved = tmp_path / "moved.toml"
    moved.write_text(RECIPE.replace('positions_eval = "interpolate"', 'positions_eval = "offset:by=2"'))
    assert "holds other positions for 'squeezed'" in refused("--recipe", moved, "--out", out)

    fresh = ["--out", tmp_path / "x"]
    either = "either a DATA folder or --algorithms"
    assert either in refused("--encodings", "rope", "--lengths", "9", *fresh)
    assert either in refused(corpus, "--algorithms", "copy", "--encodings", "rope", *fresh)
    assert "either --encodings" in refused("--algorithms", "copy", *fresh)
    own = ["--encodings", "rope", *fresh]
    assert "--algorithms is empty" in refused("--algorithms", " ", *own)
    assert "names one twice" in refused("--algorithms", "copy copy:items=20", *own)
    assert "did you mean 'copy'" in refused("--algorithms", "coppy", *own)
    assert "train, valid, test" in refused("--algorithms", "copy", "--subset", "tset", *own)
    assert "--max-tokens does not go with --algorithms" in refused("--algorithms", "copy", "--max-tokens", "9", *own)
    assert "--tokens does not go with --algorithm" in refused("--algorithms", "copy", "--tokens", "9", *own)
    assert "raise alphabet" in refused("--algorithms", "copy:items=2,alphabet=2", *own)
    assert not (tmp_path / "x").exists() and snapshot(out) == before


def test_sweep_refuses_numbers_of_items_without_examples_before_training(tmp_path, capsys):
    argv = ["sweep", "--algorithms", TASK, "--encodings", "rope", "--out", tmp_path / "x", "--device", "cpu"]
    said = error_of(capsys, *argv, "--lengths", "2,10", "--launcher", "dry-run")
    assert "10 items" in said and not os.path.exists(tmp_path / "x" / "runs")


def test_a_wrong_position_transform_leaves_nothing_behind(tmp_path, capsys):
    place = tmp_path / "run"
    argv = ["train", "--algorithm", TASK, "--rpe", "rope", "--save-dir", place, "--device", "cpu"]
    assert "add up to more than 1" in error_of(capsys, *argv, "--positions-train", "warp:head=0.9,tail=0.5")
    assert "did you mean 'interpolate'" in error_of(capsys, *argv, "--positions-eval", "interpolat")
    assert not place.exists()
