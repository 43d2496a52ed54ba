"""Where fairseq and triton are not installed: what needs fairseq says so in one line, the rest works."""

from __future__ import annotations

import sys

import pytest
from conftest import run, save_checkpoint
from sweep_commands import finished_sweep

from fairseq_rpe.core import UserError, errors
from fairseq_rpe.utils.json_files import append_json_line

WITHOUT = """
import sys
for name in ("fairseq", "fairseq_cli", "omegaconf", "hydra", "triton"):
    sys.modules[name] = None
# the package loads torch when it is needed
import fairseq_rpe
assert "attend" in dir(fairseq_rpe) and "torch" not in sys.modules
from fairseq_rpe import *
assert callable(attend) and "torch" in sys.modules
import torch
from fairseq_rpe.attention import BACKENDS
assert list(BACKENDS) == ["reference", "sdpa", "flex", "triton"]
x = torch.zeros(1, 1, 2, 4)
assert attend(x, x, x, "alibi").shape == x.shape
from fairseq_rpe.cli.main import main
for line in sys.stdin.read().splitlines():
    code = main(line.split())
    print(f"{code} {line}", file=sys.stderr)
    sys.stdout.flush(), sys.stderr.flush()
assert sys.modules["fairseq"] is None and "fairseq_rpe.models" not in sys.modules
"""
SMALL = "--updates 2 --device cpu"
NEEDING = [
    f"train --algorithm copy --rpe alibi --out run {SMALL}",
    f"sweep --algorithms copy --encodings alibi --lengths 4,8 --out sweep {SMALL}",
    "eval checkpoints/checkpoint_last.pt data --lengths 8 --out eval.jsonl",
    "sliding checkpoints/checkpoint_last.pt data",
    "key-tokens checkpoints/checkpoint_last.pt data --short-context 8 --out keys.json",
    "context-use checkpoints/checkpoint_last.pt data --lengths 8",
    "position-profile checkpoints/checkpoint_last.pt data --length 8",
    "longrope-search checkpoints/checkpoint_last.pt data --tokens 128",
    "eval-task checkpoints/checkpoint_last.pt",
    "needle-attention checkpoints/checkpoint_last.pt",
    "erf checkpoints/checkpoint_last.pt data --out erf",
]
DOING_WITHOUT = [
    "prepare texts --out data --tokenizer words --workers 1",
    *("list", "list --positions", "user-dir", "bias alibi --length 3", "verdict alibi", "fire-fit alibi"),
    f"train --algorithm copy --rpe alibi --out run --dry-run {SMALL}",
    "compare first.jsonl second.jsonl",
    "report sweep_on_text",
]


def test_commands(tmp_path):
    save_checkpoint(tmp_path, "alibi")
    (tmp_path / "texts").mkdir()
    for i in range(60):
        (tmp_path / "texts" / f"{i}.txt").write_text(f"text {i} of some words and the number {7 * i}\n")
    row = {"checkpoint": "c", "algorithm": "copy", "split": "test", "length": 10, "transform": "identity"}
    row |= {"examples": 8, "right": 4, "accuracy": 0.5}
    for name, hits in (("first", "f0"), ("second", "0f")):
        append_json_line(tmp_path / f"{name}.jsonl", {**row, "hits": hits})
    finished_sweep(tmp_path / "sweep_on_text", {"alibi": {64: 10.0, 128: 11.0}})
    done = run(sys.executable, "-c", WITHOUT, cwd=tmp_path, input="\n".join(DOING_WITHOUT + NEEDING))
    said = [line for line in done.stderr.splitlines() if line.startswith(("error", "0 ", "2 "))]
    assert said[: len(DOING_WITHOUT)] == [f"0 {line}" for line in DOING_WITHOUT], done.stderr
    refused = said[len(DOING_WITHOUT) :]
    assert refused[1::2] == [f"2 {line}" for line in NEEDING] and len(refused) == 2 * len(NEEDING)
    for error in refused[::2]:
        assert error.startswith("error: this command needs fairseq, ")
        assert error.endswith(" is not installed: pip install 'fairseq_rpe[fairseq]'")
    assert not (tmp_path / "run").exists()


def missing(name: str) -> str | None:
    return errors.user_message(ModuleNotFoundError(f"No module named '{name}'", name=name))


def test_a_module_that_is_missing(monkeypatch):
    for name in ("fairseq", "fairseq.data", "fairseq_cli.train", "omegaconf"):
        said = f"this command needs fairseq, and {name} is not installed: pip install 'fairseq_rpe[fairseq]'"
        assert missing(name) == said
    assert missing("x") is None and errors.user_message(ModuleNotFoundError()) is None  # a bug
    for system, machine in (("darwin", "arm64"), ("linux", "aarch64"), ("win32", "AMD64")):  # there is no wheel for it
        monkeypatch.setattr(errors.sys, "platform", system)
        monkeypatch.setattr(errors.platform, "machine", lambda machine=machine: machine)
        said = missing("fairseq")
        assert "Linux on x86-64 with Python 3.11 or 3.12" in said and "pip install" not in said


def test_need_fairseq(monkeypatch):
    errors.require_fairseq()
    monkeypatch.setitem(sys.modules, "fairseq", None)
    with pytest.raises(UserError, match=r"needs fairseq, which is not installed: pip install 'fairseq_rpe\[fairseq\]'"):
        errors.require_fairseq()
