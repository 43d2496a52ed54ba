"""Exact answers by length and depth: a sweep over a task with depths, and ``accuracy --depths``."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path

import pytest
import torch
from conftest import run_here

from fairseq_rpe.algorithms import build
from fairseq_rpe.cli.main import main
from fairseq_rpe.core import files
from fairseq_rpe.evaluation import answers
from fairseq_rpe.sweeps import costs
from fairseq_rpe.sweeps.state import Method, SweepFolder

TASK = "passkey:items=40,times=2,least=36,train=100,valid=10,test=3,depths=3,digits=2"
GRID = [(n, depth) for n in (40, 80) for depth in (0.0, 0.5, 1.0)]


@pytest.fixture(scope="module")
def swept(tmp_path_factory) -> Path:
    """A finished sweep of one short training."""
    out = tmp_path_factory.mktemp("depths") / "out"
    run_here(*command(out))
    return out


def command(out: Path, *more: str) -> list[str]:
    small = ["--", "--decoder-embed-dim", "32", "--decoder-ffn-embed-dim", "64"]
    training = ["--updates", "4", "--batch-sentences", "8", "--device", "cpu"]
    return ["sweep", "--algorithms", TASK, "--encodings", "alibi", "--out", str(out), *training, *more, *small]


@pytest.fixture(scope="module")
def checkpoint(swept) -> Path:
    return SweepFolder(swept).run_of(Method("alibi", "alibi"), 1, TASK).checkpoints.last


def measure(capsys, *argv: object) -> list[dict]:
    capsys.readouterr()
    assert main(["accuracy", *map(str, argv), "--device", "cpu", "--json"]) == 0
    return [json.loads(line) for line in capsys.readouterr().out.splitlines()]


def test_a_sweep_evaluates_every_length_and_depth(swept, checkpoint, capsys):
    (run,) = (swept / "runs").iterdir()
    rows = files.read_json_lines(run / "eval.jsonl")
    assert [(row["length"], row["depth"]) for row in rows] == GRID and {row["examples"] for row in rows} == {3}
    assert (swept / "depths.png").stat().st_size > 10_000 and "heat map" in run_here(*command(swept)).stdout
    # the default of the command is the same
    out = run / "again.jsonl"
    again = measure(capsys, checkpoint, "--out", out)
    assert [{**row, "seconds": 0} for row in again] == [{**row, "seconds": 0} for row in rows]
    # a killed one goes on where it was
    out.write_text("".join(json.dumps(row) + "\n" for row in again[:4]))
    assert measure(capsys, checkpoint, "--out", out)[:4] == again[:4] and len(files.read_json_lines(out)) == 6
    out.unlink()


def test_any_length_and_depth(checkpoint, capsys):
    rows = measure(capsys, checkpoint, "--depths", "1,0.3", "--lengths", "57,80")
    assert [(row["length"], row["depth"]) for row in rows] == [(57, 1.0), (57, 0.3), (80, 1.0), (80, 0.3)]
    # other splits draw their depths
    whole = measure(capsys, checkpoint, "--split", "valid")
    counts = Counter(e.length for e in build(TASK).examples("valid"))
    assert {row["length"]: row["examples"] for row in whole} == counts and not any("depth" in row for row in whole)


def test_right_answers_are_counted_at_their_depth(checkpoint, capsys, monkeypatch):
    """A model that knows what stands in the first half, asked in batches that are smaller than a depth's examples."""
    asked = []

    def half(model, prompts, steps, tick):
        words = ["<s>", "<pad>", "</s>", "<unk>", *build(TASK).words()]
        texts = [[words[t] for t in row] for row in prompts.tolist()]
        asked.append(len(texts))
        keys = []
        for text in texts:
            at = text.index("key") + 2
            known = text[at : at + 2] if at < len(text) / 2 else ["0", "0"]
            keys.append([*map(words.index, known), 2])
        return torch.tensor(keys)

    monkeypatch.setattr(answers, "continued", half)
    rows = measure(capsys, checkpoint, "--lengths", "80", "--depths", "0,0.2,1")
    assert [row["right"] for row in rows] == [3, 3, 0] and asked == [3, 3, 3]
    # however many are asked for, long prompts are answered a few together
    monkeypatch.setattr(answers, "_PAIRS", 2 * 80**2)
    asked.clear()
    assert [row["right"] for row in measure(capsys, checkpoint, "--lengths", "80", "--depths", "0")] == [3]
    assert asked == [2, 1]


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        ("--depths 0.5,1.5", "--depths 1.5 is not between 0, the first, and 1, the last"),
        ("--depths -1", "--depths -1 is not between 0"),
        ("--depths 0.5 --split valid", f"--depths: the valid split of {TASK} has no depths to choose: drop it"),
        ("--lengths 30", f"{TASK} has test examples of 31 to 80 tokens, not 30: leave it out of --lengths"),
        ("--lengths 81", "not 81: leave it out"),
    ],
)
def test_refusals(flags, words, checkpoint, capsys):
    capsys.readouterr()
    assert main(["accuracy", str(checkpoint), *flags.split(), "--device", "cpu"]) == 2
    out, err = capsys.readouterr()
    assert out == "" and words in err and err.count("\n") == 1


def test_what_a_sweep_asks_for(tmp_path, capsys):
    """Lengths that the test does not have are refused; a depth costs as many tokens as its examples have."""
    assert main([*command(tmp_path, "--lengths", "40,99")]) == 2
    said = capsys.readouterr().err
    assert "has test examples of 31 to 80 tokens, not 99: leave it out of --lengths" in said
    task = build(TASK)
    assert task.share("test") == 3 and task.share("train") == 100 / 5
    key = answers.AnswerKey(checkpoint="", algorithm=TASK, split="test", length=80, depth=0.5)
    assert costs._answers(key) == pytest.approx(3 * 80 * (1 + 80 / 2000))
