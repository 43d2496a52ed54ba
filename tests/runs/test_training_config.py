"""One field for each setting of a training: its option, its record, and its way back from ``run.json``."""

from __future__ import annotations

import json
import typing
from dataclasses import MISSING, fields, replace
from pathlib import Path

import pytest
from conftest import error_of, run_here
from hypothesis import given
from hypothesis import strategies as st
from sweep_commands import SMALL, parser

from fairseq_rpe.cli.train import help_text, stated_settings
from fairseq_rpe.core.errors import UserError
from fairseq_rpe.runs.run_folder import CheckpointFolder, read_run_config
from fairseq_rpe.runs.settings import make_plan
from fairseq_rpe.runs.training_config import SETTINGS, TrainingConfig, read_config
from fairseq_rpe.sweeps.recipes import Preset
from fairseq_rpe.utils import records

CONFIG = TrainingConfig(rpe="alibi", out=Path("x"), data=Path("d"), device="cpu")
VALUES = {int: st.integers(1, 1000), float: st.floats(0.001, 0.9), bool: st.booleans(), Path: st.just(Path("a/b"))}
VALUES |= {str: st.sampled_from(["alibi", "tiny", "a b"]), tuple: st.just((0.5, 0.75))}


def values_of(hint: object) -> st.SearchStrategy:
    """Values that an annotation allows."""
    if typing.get_origin(hint) is typing.Annotated:
        return values_of(typing.get_args(hint)[0])
    if typing.get_origin(hint) is typing.Literal:
        return st.sampled_from(typing.get_args(hint))
    if arguments := [one for one in typing.get_args(hint) if one is not type(None)]:
        return VALUES[tuple] if typing.get_origin(hint) is tuple else st.none() | values_of(arguments[0])
    return VALUES[hint]


def configs() -> st.SearchStrategy[TrainingConfig]:
    hints = typing.get_type_hints(TrainingConfig, include_extras=True)
    values = {name: values_of(hint) for name, hint in hints.items() if name != "extra"}
    values["keep_at"] = st.none() | st.just((2, 5))
    values["master"] = st.none() | st.just("host:29500")
    return st.builds(TrainingConfig, **values, extra=st.sampled_from([(), ("--fp16-scale-window", "3")]))


@given(configs())
def test_a_config_comes_back_from_its_record_and_from_its_command(config):
    assert read_config(json.loads(json.dumps(config.to_dict())), "run.json") == config
    assert TrainingConfig(**stated_settings(parser().parse_args(["train", *without_extra(config)]))) == replace(
        config, extra=()
    )


def without_extra(config: TrainingConfig) -> list[str]:
    words = config.argv()
    return words[: words.index("--")] if config.extra else words


@pytest.mark.parametrize(
    ("table", "words"),
    [
        ({"rpe": "alibi", "out": "x", "tokns": 3}, ["unknown key 'tokns'", "tokens"]),
        ({"out": "x"}, ["lacks rpe"]),
        ({"rpe": "alibi", "out": "x", "lr": -1.0}, ["lr of config must be a number above 0"]),
        ({"rpe": "alibi", "out": 3}, ["out of config must be text"]),
    ],
)
def test_a_damaged_config_is_refused(table, words):
    with pytest.raises(UserError) as caught:
        read_config(table, "run.json")
    assert all(word in str(caught.value) for word in words)


def test_every_setting_has_an_option_with_its_default_and_recipes_know_those_of_a_training():
    [train] = [action for action in parser()._actions if isinstance(action.choices, dict)]
    options = {action.dest: action for action in train.choices["train"]._actions}
    for field in fields(TrainingConfig):
        if field.name != "extra":
            assert options[field.name].help == help_text(field.name)
        default = SETTINGS[field.name].default_words or field.default
        if default not in (None, MISSING, ()):
            assert f"(default: {default}" in help_text(field.name)
    keys = {field.name for field in fields(Preset)}
    inherited = {name for kind in TrainingConfig.__mro__[1:] for name in getattr(kind, "__annotations__", {})}
    assert inherited <= keys and {"tokens", "arch", "rpe_share"} <= inherited and "seed" not in keys


def test_a_run_starts_from_the_record_of_another_one(corpus, tmp_path, capsys):
    """Options of the command line replace settings of the record."""
    first, second = tmp_path / "first", tmp_path / "second"
    command = ["train", corpus, "--rpe", "alibi", "--out", first, "--tokens", "32", "--batch-sentences", "4"]
    run_here(*command, "--updates", "2", "--device", "cpu", *SMALL)
    record = first / "run.json"
    config = read_run_config(record)
    assert (config.rpe, config.tokens, config.extra) == ("alibi", 32, tuple(SMALL[1:]))
    run_here("train", "--from-run", record, "--out", second, "--seed", "2")
    again = CheckpointFolder(second).read_record()
    assert again.settings == replace(CheckpointFolder(first).read_record().settings, seed=2)
    assert read_run_config(second / "run.json") == replace(config, out=second, seed=2)

    done = run_here("train", "--from-run", record)
    assert "already holds the finished run of 2 updates" in done.stdout
    table = json.loads(record.read_text())
    record.write_text(json.dumps({key: value for key, value in table.items() if key != "config"}))
    assert "records no configuration" in error_of(capsys, "train", "--from-run", record)
    assert "does not exist: name a run.json" in error_of(capsys, "train", "--from-run", tmp_path / "none.json")
    assert "--rpe is missing" in error_of(capsys, "train", corpus, "--out", tmp_path / "third")


def test_relative_paths_of_a_record_lie_in_the_folder_that_the_record_names(corpus, tmp_path, monkeypatch):
    here, elsewhere = tmp_path / "here", tmp_path / "elsewhere"
    for folder in (here, elsewhere):
        folder.mkdir()
    (here / "data").symlink_to(corpus)
    config = replace(CONFIG, data=Path("data"), out=Path("out"), tensorboard=tmp_path / "board", tokens=32)
    monkeypatch.chdir(here)
    CheckpointFolder(Path("out")).write_config(config)
    assert read_run_config(Path("out/run.json")) == config
    monkeypatch.chdir(elsewhere)
    record = here / "out/run.json"
    assert read_run_config(record) == replace(config, data=here / "data", out=here / "out")
    command = run_here("train", "--from-run", record, "--dry-run").stdout
    assert f" {here}/data " in command and f"--save-dir {here}/out " in command
    assert "--save-dir ../x " in run_here("train", "--from-run", record, "--out", "../x", "--dry-run").stdout
    # the folder was moved to another machine
    record.write_text(json.dumps({**json.loads(record.read_text()), "working_folder": str(tmp_path / "gone")}))
    assert read_run_config(record) == config


def test_a_setting_that_belongs_to_extended_runs_is_an_option_of_extend():
    args = vars(parser().parse_args(["extend", "x.pt", "d", "--tokens", "64", "--out", "x"]))
    options = {name for name, setting in SETTINGS.items() if setting.is_extension_option}
    assert options | {"finetune_from", "data", "tokens", "out"} == set(SETTINGS) & set(args)
    assert {"lr", "seed", "nproc"} <= options and not {"dropout", "arch", "blocks", "nodes"} & options


def test_a_config_in_the_record_changes_no_settings(tmp_path):
    """A sweep writes the configuration before the training starts, and again for a run that it resumes."""
    folder = CheckpointFolder(tmp_path)
    folder.write_config(CONFIG)
    assert read_run_config(folder.record_path) == CONFIG
    assert folder.read_record().updates is None
    plan = make_plan(CONFIG, "digest")
    folder.write_record(CONFIG, plan)
    folder.write_config(replace(CONFIG, nproc=2))
    assert read_run_config(folder.record_path).nproc == 2
    assert plan.settings.difference(folder.read_record().settings) == ""
    assert records.to_dict(folder.read_record().finished)["updates"] is None
