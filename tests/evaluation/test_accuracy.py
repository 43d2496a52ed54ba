"""Exact answers by number of items: training on a generated task, ``accuracy``, and sweeps over methods."""

from __future__ import annotations

import csv
import json
import re
import shutil
import sys
from collections import Counter
from pathlib import Path

import pytest
import torch
from conftest import run, run_here
from measuring import refusal, rows_of, without_seconds

from fairseq_rpe import positions
from fairseq_rpe.algorithms import build
from fairseq_rpe.cli.main import build_parser
from fairseq_rpe.cli.sweep import resolve_sweep
from fairseq_rpe.evaluation.task_model import explicit_ratio
from fairseq_rpe.sweeps import grid
from fairseq_rpe.sweeps.resolve import Inputs
from fairseq_rpe.sweeps.sweep_kind import sweep_kind
from fairseq_rpe.utils import files, json_files

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

[presets.laptop]
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
def swept(made_once, tmp_path_factory) -> tuple[Path, Path, str]:
    """The folder of a finished sweep of a recipe, the recipe's file, and the sweep's standard output."""

    def fill(folder: Path) -> None:
        (folder / "two.toml").write_text(RECIPE)
        (folder / "said.txt").write_text(run_here(*sweep_command(folder / "out", folder / "two.toml")).stdout)

    made = made_once("accuracy", fill)
    out = Path(shutil.copytree(made / "out", tmp_path_factory.mktemp("accuracy") / "out"))
    return out, made / "two.toml", (made / "said.txt").read_text().replace(str(made / "out"), str(out))


def sweep_command(out: Path, recipe: Path, *more: str) -> list[str]:
    return ["sweep", "--recipe", str(recipe), "--out", str(out), "--device", "cpu", *more]


@pytest.fixture(scope="module")
def checkpoint(swept) -> Path:
    (found,) = (swept[0] / "runs").glob("*/checkpoints/checkpoint_last.pt")
    return found


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
    before = model.decoder.position_transforms.evaluation
    model.decoder.position_transforms.evaluation = positions.build(transform, task.train_tokens)
    for example in build(TASK).examples("test"):
        if example.length != n:
            continue
        row = [words.indices[w] for w in example.prompt]
        for _ in range(n + 1):
            scores = model(torch.tensor([row]))[0][0, -1]
            scores[words.pad()] = -torch.inf
            row.append(int(scores.argmax()))
        right += [words[t] for t in row[n + 2 :]] == [*example.answer, "</s>"]
    model.decoder.position_transforms.evaluation = before
    return right


def test_every_example_is_asked_once_and_nothing_is_redone(checkpoint, tmp_path):
    command = ("eval-task", checkpoint, "--out", out := tmp_path / "deep" / "rows.jsonl")
    rows = rows_of(*command)  # every line that it prints is a row
    assert rows == json_files.read_json_lines(out)
    assert [row["length"] for row in rows] == sorted(COUNTS) == list(range(2, LONGEST + 1))
    assert {row["length"]: row["examples"] for row in rows} == COUNTS and sum(COUNTS.values()) == 60
    known = {"transform": "identity", "positions": None, "rpe": None, "unit": "items", "encoding": "rope"}
    known |= {"algorithm": TASK, "split": "test", "checkpoint": files.sha256_of_files(checkpoint)}
    for row in rows:
        assert row["accuracy"] == row["right"] / row["examples"] and 0 <= row["right"] <= row["examples"]
        assert known.items() <= row.items()

    whole, before = out.read_bytes(), out.stat().st_mtime_ns
    assert rows_of(*command) == rows and (out.read_bytes(), out.stat().st_mtime_ns) == (whole, before)
    assert rows_of(*command, "--lengths", "9,2") == [rows[-1], rows[0]] and out.read_bytes() == whole

    # killed before the last three numbers of items
    out.write_bytes(b"".join(whole.splitlines(keepends=True)[:-3]))
    again = rows_of(*command)
    assert again[:-3] == rows[:-3] and json_files.read_json_lines(out) == again
    assert without_seconds(again) == without_seconds(rows)

    # another measurement is added, none is taken for another
    more = rows_of(*command, "--positions-eval", "interpolate", "--lengths", "2")
    assert json_files.read_json_lines(out) == [*again, *more] and more[0]["positions"] == "interpolate"


def test_right_answers_are_those_of_full_forward_passes(checkpoint, loaded):
    """Without a cache and one by one, with the ratio M/L written out."""
    for flags in ([], ["--positions-eval", "interpolate"]):
        rows = rows_of("eval-task", checkpoint, *flags, "--batch-size", "4")
        for row in rows:
            n = row["length"]
            ratio = f"interpolate:ratio={M}/{n}" if flags and n > M else "identity"
            assert row["right"] == right_answers(loaded, n, ratio), row
        assert 0 < sum(row["right"] for row in rows) < 60


def test_interpolation_has_one_ratio_for_each_number_of_items(checkpoint):
    for unit, ratio in (("items", M / 7), ("tokens", (2 * M + 2) / (2 * 7 + 2))):
        short, row = rows_of(
            "eval-task", checkpoint, "--positions-eval", "interpolate", "--ratio-unit", unit, "--lengths", "3,7"
        )
        assert (row["unit"], row["positions"], short["transform"]) == (unit, "interpolate", "identity")
        name, _, value = row["transform"].partition(":ratio=")
        assert name == "interpolate" and float(value) == pytest.approx(ratio, rel=1e-12)
    (row,) = rows_of("eval-task", checkpoint, "--positions-eval", "interpolate:ratio=1/2", "--lengths", 7)
    assert row["transform"] == row["positions"] == "interpolate:ratio=1/2"


@pytest.mark.parametrize("spec", ["interpolate", "interpolate:ratio=auto"])
def test_an_automatic_ratio_alone_is_written_out(spec):
    assert [explicit_ratio(spec, 20, n) for n in (2, 20, 80)] == ["identity", "identity", "interpolate:ratio=0.25"]
    for other in ("interpolate:train=9", "interpolate:ratio=1/3", "identity", "randomized:times=3"):
        assert explicit_ratio(other, 20, 80) == other


def test_random_positions_are_drawn_for_each_example(checkpoint, monkeypatch):
    """As many draws as examples, the same every time, no matter which of them are answered together."""
    drawn: list[tuple[int, ...]] = []
    freeze = positions.freeze_rows

    def noted(*arguments):
        frozen = freeze(*arguments)
        drawn.extend(map(tuple, frozen.positions.k.tolist()))
        return frozen

    monkeypatch.setattr(positions, "freeze_rows", noted)
    command = ("eval-task", checkpoint, "--positions-eval", "randomized:times=3", "--lengths", 9)
    rows = rows_of(*command)
    first = sorted(drawn)
    assert len(first) == rows[0]["examples"] == len(set(first)) > 2
    assert rows[0]["draws"] == 1 and "draws" not in rows_of("eval-task", checkpoint, "--lengths", 2)[0]
    for flags in ((), ("--batch-size", 2)):
        drawn.clear()
        assert without_seconds(rows_of(*command, *flags)) == without_seconds(rows) and sorted(drawn) == first


def test_other_splits_and_encodings(checkpoint):
    for split, size in (("valid", 20), ("train", 400)):
        rows = rows_of("eval-task", checkpoint, "--split", split)
        assert [row["length"] for row in rows] == [2, 3] and {row["split"] for row in rows} == {split}
        assert sum(row["examples"] for row in rows) == size
    (row,) = rows_of("eval-task", checkpoint, "--rpe", "alibi", "--lengths", "3")
    assert row["rpe"] == "alibi" and row["encoding"] == "rope"


REFUSALS = [
    ("--lengths 2,10", "the test split has no example of 10 items: leave it out"),
    ("--split valid --lengths 4", "the valid split has no example of 4 items"),
    (
        "--rpe rope:scaling=dynamic_ntk,original_length=8",
        "follows the length of the text.*--positions-eval interpolate",
    ),
    ("--positions-eval interpolat", "did you mean 'interpolate'"),
    ("--rpe alibbi", "did you mean 'alibi'"),
    ("--positions-eval randomized:max_position=19 --lengths 2,9", "raise max_position to at least 20"),
    ("--positions-eval randomized:times=2", "raise times to at least 3"),
    ("--rpe nope --positions-eval interpolate", "'nope' reads no positions"),
    ("--rpe t5_bias --positions-eval interpolate", "accepts whole positions only"),
    ("--rpe kerple_log", "does not fit this model"),
]


@pytest.mark.parametrize(("flags", "words"), REFUSALS)
def test_accuracy_refuses_in_one_line(checkpoint, tmp_path, flags, words):
    out = tmp_path / "rows.jsonl"
    assert re.search(words, refusal("eval-task", checkpoint, "--out", out, *flags.split()))
    assert not out.exists()  # nothing was measured before the refusal


def test_checkpoints_without_a_task_are_refused(tmp_path):
    text = {"cfg": {"task": {"_name": "language_modeling", "data": "x"}, "model": {"rpe": "rope"}}, "model": {}}
    for k, task in enumerate((text["cfg"]["task"], None)):
        torch.save({**text, "cfg": {**text["cfg"], "task": task}}, tmp_path / f"{k}.pt")
        assert "not trained on an algorithmic task: use fairseq-rpe eval" in refusal("eval-task", tmp_path / f"{k}.pt")


def test_a_misspelt_task_or_transform_is_refused_before_training(tmp_path):
    for flags, words in (
        (["revers"], "did you mean 'reverse'"),
        (["copy:itms=3"], "did you mean 'items'"),
        ([TASK, "--positions-eval", "interpolat"], "did you mean 'interpolate'"),
    ):
        assert words in refusal("train", "--algorithm", *flags, "--rpe", "rope", "--out", tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_linear_schedule_cannot_be_prolonged(checkpoint):
    same = ["train", "--algorithm", f"copy:alphabet=12,{TASK.split(':')[1].removesuffix(',alphabet=12')}"]
    same += ["--rpe", "rope", "--out", str(checkpoint.parent), "--device", "cpu"]
    same += ["--batch-sentences", "32", "--lr", "0.01", "--warmup", "10"]
    before = snapshot(checkpoint.parent)
    for schedule in ([], ["--schedule", "linear"]):  # a task's default
        done = run_here(*same, *schedule, "--updates", str(UPDATES), "--", *SMALL)
        assert f"finished run of {UPDATES} updates" in done.stdout
    for updates in (UPDATES + 10, UPDATES - 10):
        said = refusal(*same, "--updates", updates, "--", *SMALL)
        assert f"(last_update is {UPDATES} there, {updates} here)" in said
    other = refusal(*same, "--schedule", "inverse_sqrt", "--updates", UPDATES, "--", *SMALL)
    assert "schedule is 'linear' there, 'inverse_sqrt' here" in other
    assert before == snapshot(checkpoint.parent)


def test_train_command_of_a_task(tmp_path):
    """fairseq's flags: the task in its normal spelling, no text flags, and a rate that ends at the last update."""
    argv = ["train", "--algorithm", "copy:alphabet=100,items=5", "--rpe", "rope", "--out", str(tmp_path / "x")]
    (line,) = run_here(*argv, "--updates", "77", "--device", "cpu", "--dry-run").stdout.splitlines()
    assert "--task rpe_algorithmic --algorithm copy:items=5 --criterion answer_cross_entropy" in line
    assert "--lr-scheduler polynomial_decay --total-num-update 77" in line and "--max-update 77" in line
    assert "--tokens-per-sample" not in line and "inverse_sqrt" not in line and not (tmp_path / "x").exists()
    line = run_here(*argv, "--schedule", "inverse_sqrt", "--device", "cpu", "--dry-run").stdout
    assert "--lr-scheduler inverse_sqrt" in line and "total-num-update" not in line


def test_a_table_is_printed(checkpoint):
    rows = rows_of("eval-task", checkpoint, "--lengths", "2,5")
    done = run_here("eval-task", checkpoint, "--lengths", "2,5", "--device", "cpu")
    head, *lines = [re.split(r" {2,}", line.strip()) for line in done.stdout.splitlines()]
    assert head == ["items", "exact %", "right", "examples", "seconds"]
    for line, row in zip(lines, rows, strict=True):
        assert line[:4] == [str(row["length"]), f"{100 * row['accuracy']:.1f}", str(row["right"]), str(row["examples"])]


def test_progress_is_a_line_a_minute_and_counts_every_token_that_is_written(checkpoint, monkeypatch):
    """With no minute to wait for, a line after each token."""
    from fairseq_rpe.utils import progress

    command = ("eval-task", checkpoint, "--lengths", "2,5", "--device", "cpu", "--json")
    plain = run_here(*command)
    assert plain.stderr == ""
    monkeypatch.setattr(progress, "SECONDS", 0.0)
    done = run_here(*command)
    rows, before = ([json.loads(line) for line in one.stdout.splitlines()] for one in (done, plain))
    assert without_seconds(rows) == without_seconds(before)
    # an answer of copy is the items, as often as they are asked for, and the end of the sentence
    examples = {n: [e for e in build(TASK).examples("test") if e.length == n] for n in (2, 5)}
    steps = [len(same) for same in examples.values() for _ in range(len(same[0].answer) + 1)]
    lines = [line for line in done.stderr.splitlines() if " tokens" in line]
    assert [line.split(": ", 1)[1].split(" tokens")[0] for line in lines] == [
        f"{sum(steps[: k + 1]):,} of {sum(steps):,}" for k in range(len(steps))
    ]
    assert " left" in lines[0] and " left" not in lines[-1]


def table_of(out: Path) -> list[dict]:
    return list(csv.DictReader((out / "accuracy.csv").read_text().splitlines()))


def test_methods_that_differ_in_evaluation_share_the_training(swept, checkpoint):
    out, _, said = swept
    assert [p.name for p in (out / "runs").iterdir()] == [checkpoint.parents[1].name]
    log = (checkpoint.parents[1] / "train.log").read_text()
    assert log.count("| INFO | fairseq_cli.train | task: AlgorithmicTask") == 1
    measured, counts = json_files.read_json_lines(checkpoint.parents[1] / "eval.jsonl"), range(2, LONGEST + 1)
    assert [(r["positions"], r["length"]) for r in measured] == [(p, n) for p in (None, "interpolate") for n in counts]
    rows = table_of(out)
    columns = ["task", "method", "seed", "items", "examples", "right", "accuracy", "positions"]
    assert list(rows[0]) == [*columns, "standard_error", "low", "high", "clusters", "cluster_unit"]
    assert [(r["method"], int(r["items"])) for r in rows] == [(m, n) for m in ("plain", "squeezed") for n in counts]
    for row, own in zip(rows, measured, strict=True):
        assert (row["task"], row["seed"], row["positions"]) == (TASK, "1", own["transform"])
        assert (int(row["examples"]), int(row["right"])) == (own["examples"], own["right"])
        assert float(row["accuracy"]) == own["accuracy"] == int(row["right"]) / int(row["examples"])
    assert rows[-1]["positions"].startswith("interpolate:ratio=0.333") and rows[0]["positions"] == "identity"
    assert all(str(out / name) in said for name in ("accuracy.csv", "accuracy.png", "tensorboard"))
    assert any((out / "tensorboard").rglob("events*"))
    assert (out / "accuracy.pdf").read_bytes().startswith(b"%PDF")
    picture = (out / "accuracy.png").read_bytes()
    assert picture.startswith(b"\x89PNG")
    assert min(int.from_bytes(picture[16:20]), int.from_bytes(picture[20:24])) > 400


def test_table_is_the_mean_over_the_numbers_of_items(swept):
    out, _, said = swept
    rows = table_of(out)

    def mean(name: str, first: int, last: int) -> str:
        own = [r for r in rows if r["method"] == name and first <= int(r["items"]) <= last]
        return f"{100 * sum(int(r['right']) / int(r['examples']) for r in own) / len(own):.1f}"

    text = (out / "accuracy.md").read_text()
    assert text in said
    grid = [[c.strip() for c in line.split("|")[1:-1]] for line in text.splitlines() if line.startswith("|")]
    assert grid[0] == ["task", "method", "trained", "beyond", "all", "published"]
    assert set("".join(grid[1])) <= set("-:")
    # an error bar, and perhaps the mark of a tie, follow each mean
    assert [[cell.split(" ± ")[0] for cell in row] for row in grid[2:4]] == [
        [TASK, name, mean(name, 2, M), mean(name, M + 1, LONGEST), mean(name, 2, LONGEST), known]
        for name, known in (("plain", ""), ("squeezed", "12.3"))
    ]
    assert float(grid[2][2].split()[0]) > 0 and grid[2][2] != grid[2][4]
    assert all(" ± " in cell for row in grid[2:4] for cell in row[2:5])
    assert f"{TASK}: 2 … {M} items in training, up to {LONGEST} here" in text and "Published: made up" in text


def snapshot(folder: Path) -> dict[Path, int]:
    derived = {"sweep.json", "accuracy.csv", "accuracy.md", ".lock"}
    return {p: p.stat().st_mtime_ns for p in folder.rglob("*") if p.is_file() and p.name not in derived}


def test_finished_sweep_is_not_redone_and_needs_no_torch(swept):
    out, recipe, said = swept
    before, tables = snapshot(out), [(out / n).read_text() for n in ("accuracy.csv", "accuracy.md", "sweep.json")]
    command = sweep_command(out, recipe)
    code = (
        "import sys\nfrom fairseq_rpe.cli.main import main\n"
        f"assert main({command!r}) == 0\nassert not {{'torch', 'fairseq', 'matplotlib'}} & set(sys.modules)"
    )
    assert run(sys.executable, "-c", code).stdout == said
    assert snapshot(out) == before
    assert [(out / n).read_text() for n in ("accuracy.csv", "accuracy.md", "sweep.json")] == tables


def test_lost_results_are_measured_again_without_training(swept, tmp_path):
    """A sweep that was killed while it evaluated: what is there is kept, the rest is measured."""
    out = tmp_path / "out"
    shutil.copytree(swept[0], out)

    def work_left() -> list[grid.Stage]:
        args = build_parser("sweep").parse_args(sweep_command(out, swept[1]))
        sweep = resolve_sweep(args)
        (cell,) = sweep_kind(sweep.kind).build_runs(sweep, Inputs())
        assert sum(len(one.keys) for one in cell.evaluations) == 2 * (LONGEST - 1)
        return cell.remaining_stages()

    assert work_left() == []
    (folder,) = (out / "runs").iterdir()
    results = folder / "eval.jsonl"
    whole = json_files.read_json_lines(results)
    kept = whole[:-5]  # the others are of `squeezed`
    results.write_text("".join(json.dumps(row) + "\n" for row in kept))
    (stage,) = work_left()
    assert stage.name == "evaluating" and stage.command[-2:] == ["--positions-eval", "interpolate"]
    run_here(*stage.command[stage.command.index("eval-task") :])
    again = json_files.read_json_lines(results)
    assert again[: len(kept)] == kept and work_left() == []
    assert without_seconds(again) == without_seconds(whole)

    results.unlink()
    assert [stage.name for stage in work_left()] == ["evaluating"] * 2
    (folder / "checkpoints" / "checkpoint_last.pt").write_bytes(b"broken")
    assert [stage.name for stage in work_left()] == ["training", "evaluating", "evaluating"]


def test_a_report_writes_the_same_tables_and_seeds_weigh_alike(swept, tmp_path):
    """The second seed is made up from the first: all right where the first was measured."""
    out = Path(shutil.copytree(swept[0], tmp_path / "out"))
    expected = {name: (out / name).read_text() for name in ("accuracy.csv", "accuracy.md")}
    for name in expected:
        (out / name).unlink()
    assert expected["accuracy.md"] in run_here("report", out).stdout
    assert {name: (out / name).read_text() for name in expected} == expected
    assert not (out / "results.csv").exists()
    (folder,) = (out / "runs").iterdir()
    other = folder.with_name(folder.name.replace("-seed1", "-seed2"))
    shutil.copytree(folder, other)
    rows = [{**r, "right": r["examples"], "accuracy": 1.0} for r in json_files.read_json_lines(other / "eval.jsonl")]
    for row in rows:
        del row["hits"]
    others = ({"checkpoint": "older", "right": 0}, {"unit": "tokens"}, {"split": "valid"}, {"rpe": "alibi"})
    rows += [{**r, **change, "accuracy": 0.0} for change in others for r in rows]
    (other / "eval.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    state = json_files.read_json(out / "sweep.json")
    json_files.write_json(out / "sweep.json", {**state, "seeds": [1, 2]})
    one = table_of(out)
    run_here("report", out)
    both = table_of(out)
    assert [r for r in both if r["seed"] == "1"] == one
    assert [r["accuracy"] for r in both if r["seed"] == "2"] == ["1.0"] * len(one)
    values = [float(r["accuracy"]) for r in one if r["method"] == "plain"]
    line = next(line for line in (out / "accuracy.md").read_text().splitlines() if " plain |" in line)
    assert line.split("|")[5].strip() == f"{50 * (sum(values) / len(values) + 1):.1f}"


def test_dry_run_prints_one_training_and_both_evaluations(swept, tmp_path):
    _, recipe, _ = swept
    flags = ("--launcher", "dry-run", "--updates", "7", "--warmup", "2")
    *lines, costs = run_here(*sweep_command(tmp_path / "x", recipe, *flags)).stdout.splitlines()
    assert costs.startswith("# estimate: ") and " FLOPs of training, " in costs
    assert [line.split("fairseq_rpe.cli.main ")[1].split()[0] for line in lines] == ["train", "eval-task", "eval-task"]
    assert f"--algorithm {TASK}" in lines[0] and "--updates 7 " in lines[0] and "--lr 0.01" in lines[0]
    assert lines[0].endswith("-- " + " ".join(SMALL))
    assert "--positions-eval" not in lines[1] and lines[2].endswith("--positions-eval interpolate")
    assert len({line.split(" eval-task ")[1].split()[0] for line in lines[1:]}) == 1
    assert not (tmp_path / "x").exists()


def test_dry_run_of_encodings_by_tasks_and_seeds(tmp_path):
    argv = ["sweep", "--algorithms", f"{TASK} sort:test=50", "--encodings", "rope alibi", "--seeds", "1,2"]
    argv += ["--out", str(tmp_path / "x"), "--device", "cpu", "--launcher", "dry-run", "--lengths", "2,3"]
    lines = [line for line in run_here(*argv).stdout.splitlines() if not line.startswith("#")]
    folders = {line.split("--out ")[1].split()[0] for line in lines if " train " in line}
    asked = [line for line in lines if " eval-task " in line and "--lengths 2,3" in line]
    assert len(folders) == len(asked) == len(lines) / 2 == 8


def test_another_sweep_in_the_folder_is_refused(swept, corpus, tmp_path):
    out, recipe, _ = swept
    before = snapshot(out)
    text = ["--encodings", "rope", "--lengths", "64", "--tokens", "32", "--updates", "3"]
    assert f"{out} holds another sweep" in refusal("sweep", corpus, *text, "--out", out)
    said = refusal("sweep", "--recipe", recipe, "--out", out, "--updates", UPDATES + 5)
    assert f"is {UPDATES} there, {UPDATES + 5} here)" in said
    (kind := tmp_path / "kind").mkdir()
    state = json_files.read_json(out / "sweep.json")
    json_files.write_json(kind / "sweep.json", {k: v for k, v in state.items() if k != "algorithms"})
    assert "holds a sweep of another kind" in refusal("sweep", "--recipe", recipe, "--out", kind)
    moved = tmp_path / "moved.toml"
    moved.write_text(RECIPE.replace('positions_eval = "interpolate"', 'positions_eval = "offset:tokens=2"'))
    assert "holds other positions for 'squeezed'" in refusal("sweep", "--recipe", moved, "--out", out)
    assert snapshot(out) == before


def test_sweep_refuses_in_one_line(corpus, tmp_path):
    rope = ["--encodings", "rope"]
    for flags, words in (
        ([*rope, "--lengths", "9"], "either a DATA folder or --algorithms"),
        ([corpus, "--algorithms", "copy", *rope], "either a DATA folder or --algorithms"),
        (["--algorithms", "copy"], "either --encodings"),
        (["--algorithms", " ", *rope], "--algorithms is empty"),
        (["--algorithms", "copy copy:items=20", *rope], "names one twice"),
        (["--algorithms", "copy", "--split", "tset", *rope], "train, valid, test"),
        (["--algorithms", "copy", "--max-tokens", "9", *rope], "--max-tokens does not go with --algorithms"),
        (["--algorithms", "copy:items=2,alphabet=2", *rope], "raise alphabet"),
    ):
        assert words in refusal("sweep", *flags, "--out", tmp_path / "x")
    assert not (tmp_path / "x").exists()
    flags = ["--algorithms", TASK, *rope, "--lengths", "2,10", "--launcher", "dry-run"]
    assert "10 items" in refusal("sweep", *flags, "--out", tmp_path / "x") and not (tmp_path / "x" / "runs").exists()
