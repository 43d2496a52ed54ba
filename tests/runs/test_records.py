"""What a run leaves behind about itself: its starts, the commit of its code, and its log."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
from conftest import run

from fairseq_rpe.core.errors import UserError
from fairseq_rpe.runs import environment, log
from fairseq_rpe.runs.run_folder import CheckpointFolder

LOG = """\
2026 | INFO | fairseq.tasks.language_modeling | dictionary: 4096 types
2026 | INFO | fairseq_rpe.attention.backends | attention backend: sdpa
2026 | INFO | fairseq_cli.train | num. shared model params: 1,445,376 (num. trained: 1,445,376)
2026 | INFO | fairseq_cli.train | training on 1 devices (GPUs/TPUs)
2026 | INFO | fairseq.data.data_utils | loaded 294,072 examples from: data-bin/stdlib/train
2026 | INFO | train_inner | {"loss": "9.5", "wps": "1000", "num_updates": "25", "train_wall": "2", "wall": "3"}
2026 | INFO | train_inner | {"loss": "7.25", "wps": "3000", "num_updates": "50", "train_wall": "2", "wall": "6"}
2026 | INFO | train_inner | {"loss": "6.0", "wp
2026 | INFO | fairseq_cli.train | training on 1 devices (GPUs/TPUs)
2026 | INFO | train_inner | {"loss": "7.5", "wps": "2000", "num_updates": "50", "train_wall": "2", "wall": "8"}
2026 | INFO | valid | {"epoch": 1, "valid_loss": "6.125", "valid_num_updates": "75"}
2026 | INFO | train | {"train_loss": "7", "train_num_updates": "75", "train_train_wall": "9", "train_wall": "20"}
"""


def test_starts_of_training_are_noted(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    folder = CheckpointFolder(tmp_path / "run")
    folder.add_start(environment.current_start(0, "3", "cpu"))
    folder.add_start(environment.current_start(40, "1", "cpu"))
    first, second = folder.read_starts()
    assert (first.from_update, second.from_update) == (0, 40) and first.threads == "3"
    assert first.working_folder == str(tmp_path) and first.gpus == () and first.cores >= 1
    assert first.torch.startswith("2.") and "0.12" in first.fairseq and first.processor
    same = {"time": None, "from_update": None, "threads": None}
    assert first.time <= second.time and replace(first, **same) == replace(second, **same)
    assert CheckpointFolder(tmp_path / "none").read_starts() == []


@pytest.mark.parametrize("starts", [3, [3], [{"from_update": "x"}], {"a": 1}])
def test_a_damaged_record_of_starts(starts: object, tmp_path: Path) -> None:
    folder = CheckpointFolder(tmp_path)
    folder.environment.write_text('{"starts": [{"from_update": 3, "later": 1}]}')
    assert folder.read_starts()[0].from_update == 3
    folder.environment.write_text(json.dumps({"starts": starts}))
    with pytest.raises(UserError, match=r"environment.json: .* of the record .*: restore it or delete it"):
        folder.read_starts()


def test_commit_of_a_folder(tmp_path):
    def git(*command: str) -> str:
        author = ["-c", "user.name=a", "-c", "user.email=a@b"]
        return run("git", "-C", tmp_path, *author, *command).stdout.strip()

    package = tmp_path / "package"
    package.mkdir()
    (package / "__init__.py").write_text("")
    assert environment.git_commit(package) is None
    git("init", "-q")
    assert environment.git_commit(package) is None  # in a repository that does not track it
    git("add", "package")
    git("commit", "-q", "-m", "one")
    assert environment.git_commit(package) == git("rev-parse", "HEAD")
    (package / "__init__.py").write_text("x = 1")
    assert environment.git_commit(package) == git("rev-parse", "HEAD") + " with changes"


def test_log_of_a_resumed_run(tmp_path):
    path = tmp_path / "train.log"
    path.write_text(LOG)
    found = log.read_log(path)
    assert found.loss == {25: 9.5, 50: 7.5} and found.valid == {75: 6.125}
    assert (found.seconds, found.tokens_per_second) == (26.0, 2000.0)
    assert (found.parameters, found.vocabulary, found.backend) == (1_445_376, 4096, "sdpa")
    assert found.data == "data-bin/stdlib" and log.read_log(tmp_path / "none") == log.TrainLog()


ODD_LINES = ['{"loss": "2"}', '{"loss": "2", "num_updates": "NaN"}', '{"loss": [2], "num_updates": "3"}']
ODD_LINES += ['{"num_updates": 1' + "0" * 400 + "}", '{"a":' + '{"a":' * 100_000 + "}"]
ODD_LINES = [*(f"| train_inner | {line}" for line in ODD_LINES), "| valid | {}", "\0\0\0"]


def test_damaged_lines_of_a_log_say_nothing(tmp_path: Path) -> None:
    whole = '| train_inner | {"loss": "2.5", "num_updates": "3", "wps": "9"}\n'
    for odd in ODD_LINES:
        (tmp_path / "train.log").write_text(whole + odd + "\n" + whole.replace("3", "4"))
        assert log.read_log(tmp_path / "train.log").loss == {3: 2.5, 4: 2.5}, odd[:99]
