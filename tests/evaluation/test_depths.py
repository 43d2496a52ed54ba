"""Exact answers by length and depth: a sweep over a task with depths, and ``accuracy --depths``."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path

import pytest
import torch
from conftest import run_here
from measuring import refusal, rows_of, without_seconds

from fairseq_rpe.algorithms import build
from fairseq_rpe.evaluation import exact_match
from fairseq_rpe.kinds.algorithms import exact_match_pass
from fairseq_rpe.sweeps.sweep_record import Method, SweepFolder
from fairseq_rpe.utils import json_files

TASK = "passkey:items=40,times=2,least=36,train=100,valid=10,test=3,depths=3,digits=2"
GRID = [(n, depth) for n in (40, 80) for depth in (0.0, 0.5, 1.0)]


@pytest.fixture(scope="module")
def swept(made_once) -> Path:
    """A finished sweep of one short training."""
    return made_once("depths", lambda folder: run_here(*command(folder / "out"))) / "out"


def command(out: Path, *more: str) -> list[str]:
    small = ["--", "--decoder-embed-dim", "32", "--decoder-ffn-embed-dim", "64"]
    training = ["--updates", "2", "--batch-sentences", "8", "--device", "cpu"]
    return ["sweep", "--algorithms", TASK, "--encodings", "alibi", "--out", str(out), *training, *more, *small]


@pytest.fixture(scope="module")
def checkpoint(swept) -> Path:
    return SweepFolder(swept).run_folder(Method("alibi", "alibi"), 1, TASK).checkpoints.last


def test_a_sweep_evaluates_every_length_and_depth(swept, checkpoint, tmp_path):
    (run,) = (swept / "runs").iterdir()
    rows = json_files.read_json_lines(run / "eval.jsonl")
    assert [(row["length"], row["depth"]) for row in rows] == GRID and {row["examples"] for row in rows} == {3}
    assert (swept / "depths.png").stat().st_size > 10_000 and "heat map" in run_here(*command(swept)).stdout
    # the default of the command is the same
    again = rows_of("eval-task", checkpoint, "--out", out := tmp_path / "again.jsonl")
    assert without_seconds(again) == without_seconds(rows)
    # a killed one goes on where it was
    out.write_text("".join(json.dumps(row) + "\n" for row in again[:4]))
    assert rows_of("eval-task", checkpoint, "--out", out)[:4] == again[:4] and len(json_files.read_json_lines(out)) == 6


def test_any_length_and_depth(checkpoint):
    rows = rows_of("eval-task", checkpoint, "--depths", "1,0.3", "--lengths", "57,80")
    assert [(row["length"], row["depth"]) for row in rows] == [(57, 1.0), (57, 0.3), (80, 1.0), (80, 0.3)]
    # other splits draw their depths
    whole = rows_of("eval-task", checkpoint, "--split", "valid")
    counts = Counter(e.length for e in build(TASK).examples("valid"))
    assert {row["length"]: row["examples"] for row in whole} == counts and not any("depth" in row for row in whole)


def test_right_answers_are_counted_at_their_depth(checkpoint, monkeypatch):
    """A model that knows what stands in the first half, in batches that are smaller than a depth's examples."""
    batches = []

    def half(model, prompts, steps, tick):
        words = ["<s>", "<pad>", "</s>", "<unk>", *build(TASK).vocabulary()]
        batches.append(len(prompts))
        keys = []
        for row in prompts.tolist():
            at = row.index(words.index("key")) + 2
            keys.append([*(row[at : at + 2] if at < len(row) / 2 else [words.index("0")] * 2), 2])
        return torch.tensor(keys)

    monkeypatch.setattr(exact_match, "greedy_steps", half)
    rows = rows_of("eval-task", checkpoint, "--lengths", 80, "--depths", "0,0.2,1")
    assert [row["right"] for row in rows] == [3, 3, 0] and batches == [3, 3, 3]
    # however many there may be, long prompts are answered a few together
    monkeypatch.setattr(exact_match, "_MAX_PAIRS", 2 * 80**2)
    batches.clear()
    assert [row["right"] for row in rows_of("eval-task", checkpoint, "--lengths", 80, "--depths", 0)] == [3]
    assert batches == [2, 1]


def test_refusals(checkpoint):
    for flags, words in {
        "--depths 0.5,1.5": "--depths 1.5 is not between 0 (first) and 1 (last)",
        "--depths -1": "--depths -1 is not between 0",
        "--depths 0.5 --split valid": f"--depths: the valid split of {TASK} has no depths to choose: drop it",
        "--lengths 30": f"{TASK} has test examples of 31 to 80 tokens, not 30: leave it out of --lengths",
        "--lengths 81": "not 81: leave it out",
    }.items():
        assert words in refusal("eval-task", checkpoint, *flags.split())


def test_a_sweep_refuses_lengths_that_the_task_lacks_and_counts_the_tokens_of_a_depth(tmp_path):
    said = refusal(*command(tmp_path, "--lengths", "40,99"))
    assert "has test examples of 31 to 80 tokens, not 99: leave it out of --lengths" in said
    task = build(TASK)
    assert task.examples_per_length("test") == 3 and task.examples_per_length("train") == 100 / 5
    key = exact_match.ExactMatchKey(checkpoint="", algorithm=TASK, split="test", length=80, depth=0.5)
    assert exact_match_pass(key) == (3 * 80, 80)
