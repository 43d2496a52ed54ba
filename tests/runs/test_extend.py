"""``extend``: a checkpoint trained further on longer texts, with its architecture, vocabulary and training length."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from conftest import checkpoint_with, run_here, with_documents, with_vocabulary
from fairseq.trainer import Trainer
from refusal import refusal
from sweep_commands import flag, parser

from fairseq_rpe.cli.train import stated_settings
from fairseq_rpe.core import UserError
from fairseq_rpe.runs import checkpoints, from_checkpoint, launch
from fairseq_rpe.runs.training_config import TrainingConfig
from fairseq_rpe.sweeps import context_extension
from fairseq_rpe.utils import json_files

YARN = "rope:scaling=yarn,factor=auto"


@pytest.fixture
def short(state, tmp_path) -> Path:
    """A model with rotary positions, trained on 32 tokens."""
    return checkpoint_with(state, tmp_path, "rope")


def resolved(*argv: object, lengths: tuple[int, ...] | None = (32,)) -> context_extension.Extension:
    args = parser().parse_args(["extend", *map(str, argv), "--device", "cpu"])
    return context_extension.resolve_extension(TrainingConfig(**{"rpe": "", **stated_settings(args)}), lengths, "test")


def training(found: context_extension.Extension) -> list[str]:
    """The words for fairseq-train."""
    return launch.training_command(found.config, found.plan, launch.Node(), 0)


def refused(*argv: object) -> str:
    return refusal("extend", *argv, "--device", "cpu")


# what is taken over, and what is kept


def test_blocks_are_those_of_the_checkpoints_training(state, corpus, tmp_path):
    path = checkpoint_with(state, tmp_path, "rope", task={"blocks": "document"})
    given = ["--tokens", 64, "--out", tmp_path / "x"]
    found = resolved(path, with_documents(corpus, tmp_path), *given)
    assert flag(training(found), "--blocks") == "document" and found.plan.settings.blocks == "document"
    assert "no document boundaries" in refused(path, corpus, *given)


def test_everything_that_is_not_said_is_the_checkpoints(state, corpus, tmp_path):
    own = {"dropout": 0.25, "attention_dropout": 0.125, "no_decoder_final_norm": True, "rpe_share": "model"}
    path = checkpoint_with(state, tmp_path, "rope", **own)
    given = [path, corpus, "--tokens", 64, "--out", tmp_path / "x"]
    found = resolved(*given, lengths=None)
    assert found.lengths == (32, 64) and found.original_length == 32 and not found.has_new_parameters
    words = training(found)
    said = {"--rpe": "rope", "--rpe-share": "model", "--dropout": "0.25", "--attention-dropout": "0.125"}
    said |= {"--decoder-embed-dim": "32", "--decoder-ffn-embed-dim": "64", "--tokens-per-sample": "64"}
    said |= {"--rpe-train-length": "32", "--arch": "transformer_rpe_lm_tiny", "--finetune-from-model": str(path)}
    # as many tokens an update as 16 texts of 32
    said |= {"--max-update": "100", "--batch-size": "8", "--lr": "0.0005", "--warmup-updates": "10"}
    assert {name: flag(words, name) for name in said} == said and "--no-decoder-final-norm" in words
    assert not [word for word in words if word.startswith(("--decoder-layers", "--adaptive"))]
    assert resolved(*given, "--updates", 20).plan.settings.warmup == 4


def test_positions_are_the_checkpoints_unless_one_of_them_is_said(state, corpus, tmp_path):
    path = checkpoint_with(state, tmp_path, "rope", positions_train="offset:tokens=2", positions_eval="interpolate")
    given = [path, corpus, "--out", tmp_path / "x", "--tokens"]
    plain, said = resolved(*given, 64).config, resolved(*given, 64, "--positions-train", "identity").config
    assert (plain.positions_train, plain.positions_eval) == ("offset:tokens=2", "interpolate")
    assert (said.positions_train, said.positions_eval) == ("identity", None)
    # texts as long as before are enough where positions skip beyond them
    pose = resolved(*given, 32, "--positions-train", "pose:target=128").config
    assert (pose.tokens, pose.batch_sentences) == (32, 16)
    assert resolved(*given, 32, "--positions-train", "stretch:times=4", lengths=None).lengths == (32, 64, 128)


def test_what_a_new_encoding_leaves_open_is_the_checkpoints(state, corpus, tmp_path):
    path = checkpoint_with(state, tmp_path, "rope:base=500,rotary_fraction=0.5")
    given = [path, corpus, "--tokens", 64, "--out", tmp_path / "x", "--rpe"]
    found = resolved(*given, "longrope:factors=2")
    assert flag(training(found), "--rpe") == found.config.rpe == "longrope:factors=2,base=500,rotary_fraction=0.5"
    assert "give base=500, or leave it out" in refused(*given, "longrope:factors=2,base=10000")
    assert resolved(*given, "rope:base=9000").config.rpe == "rope:base=9000,rotary_fraction=0.5"  # ABF


def test_extended_twice_it_goes_by_the_first_length(state, corpus, tmp_path):
    path = checkpoint_with(state, tmp_path, YARN, task={"tokens_per_sample": 64}, rpe_train_length=32)
    given = [path, corpus, "--out", tmp_path / "x", "--tokens"]
    found = resolved(*given, 96, lengths=None)
    assert found.original_length == 32 and found.lengths == (32, 64, 96) and found.config.rpe == YARN
    assert "is not above the 64 tokens" in refused(*given, 64)


def test_another_encoding_may_be_calibrated_at_the_same_length(short, corpus, tmp_path):
    result = resolved(short, corpus, "--tokens", 32, "--rpe", "nope", "--out", tmp_path / "x")
    assert result.config.rpe == "nope" and result.original_length == 32 and not result.has_new_parameters


def test_parameters_that_only_the_new_encoding_has_begin_untrained_and_that_is_said(short, corpus, tmp_path, capsys):
    given = [short, corpus, "--tokens", 64, "--rpe", "t5_bias:init_std=1", "--out", tmp_path / "x"]
    found, begin = resolved(*given), tmp_path / "x/begin.pt"
    assert found.has_new_parameters and found.config.finetune_from == begin
    assert f"has parameters that {short} lacks: decoder.encodings.0.table" in capsys.readouterr().out
    weights, before = checkpoints.load(begin).weights, checkpoints.load(short).weights
    assert set(weights) - set(before) == {"decoder.encodings.0.table"}
    assert all(torch.equal(weights[name], value) for name, value in before.items())
    assert weights["decoder.encodings.0.table"].std() > 0.5
    assert checkpoints.load(begin).load_encodings()[0].config.init_std == 1
    # a rerun knows its own run
    assert resolved(*given).plan == found.plan
    other = resolved(*given, "--seed", "2").plan.settings
    assert other.finetune_from != found.plan.settings.finetune_from


def test_parameters_stay_in_their_layers_when_the_pattern_of_layers_changes(state, corpus, tmp_path):
    path = checkpoint_with(state, tmp_path, "kerple_log")  # both layers share one instance
    trained = checkpoints.load(path).encoding_weights[0]
    pattern = "kerple_log:local=16|kerple_log"
    given = [corpus, "--updates", 2, "--lr", 1e-9, "--device", "cpu"]
    # the training process renames the weights
    size = ["--tokens", 32, "--arch", "tiny", "--", "--decoder-embed-dim", 32, "--decoder-ffn-embed-dim", 64]
    run_here("train", *given, "--init-from", path, "--rpe", pattern, "--out", tmp_path / "run", *size)
    changed = checkpoints.load(tmp_path / "run/checkpoint_last.pt").encoding_weights
    assert [{name: torch.allclose(values[name], trained[name]) for name in trained} for values in changed] == [
        dict.fromkeys(trained, True)
    ] * 2
    # a copy of the checkpoint has the parameters that it lacks
    given = ["--tokens", 64, "--out", tmp_path / "x", "--rpe"]
    found = resolved(checkpoint_with(state, tmp_path, "rope"), corpus, *given, "rope|kerple_log")
    assert found.has_new_parameters
    begin = checkpoints.load(tmp_path / "x/begin.pt")
    assert [set(values) for values in begin.encoding_weights] == [set(), set(trained)]
    # layers with parameters of their own do not share an encoding afterwards
    two = tmp_path / "run/checkpoint_last.pt"
    assert "layers 0-1 would share an encoding" in refused(two, corpus, *given, "kerple_log:local=8")


# what is refused


@pytest.mark.parametrize(
    ("spec", "words", "said"),
    [
        ("rope", "--tokens 32", "--tokens 32 is not above the 32 tokens that"),
        ("rope", "--tokens 16 --positions-train pose:target=99", "--tokens 16 is not above the 32 tokens"),
        ("rope", "--positions-train pose:target=48", "pose:target=48 ends at 48 positions"),
        ("rope", "--rpe roep", "unknown encoding 'roep' (did you mean 'rope'?)"),
        ("rope", "--rpe rope:scaling=yarn", "needs factor=NUMBER or factor=auto"),
        ("rope", "--rpe learned:max_positions=64", "is a table of positions that"),
        ("learned", "", "position 63 is beyond the 32 positions"),
        ("kerple_log", "--rpe rope", "has no parameter decoder.encodings.0."),
        ("kerple_log", "--rpe kerple_log|nope", "in layers 1, which"),
        ("t5_bias", "--rpe t5_bias:buckets=16", "which"),
        ("rope", "--tokens 999999", "less than one block of 999999"),
        ("rope", "--rpe kerple_power --updates 30 --warmup 30", "a warm-up of 30 is not below the 30 updates"),
        ("rope", "--rpe kerple_power --attention-backend flash", "unknown attention backend 'flash'"),
        ("rope", "--attention-backend flex", "no backward pass on the CPU: use 'sdpa'"),
        ("rope", "--rpe t5_bias --attention-backend flex", "no backward pass on the CPU: use 'sdpa'"),
    ],
)
def test_what_cannot_be_extended_leaves_no_copy_and_no_folder(spec, words, said, state, corpus, tmp_path):
    path = checkpoint_with(state, tmp_path, spec)
    given = ["--tokens", 64, "--out", tmp_path / "new/folder", *words.split()]
    assert said in refused(path, corpus, *given) and not (tmp_path / "new").exists()


def test_places_that_do_not_fit_the_checkpoint(short, state, corpus, tmp_path, tmp_path_factory):
    tail = ["--tokens", "64", "--out", tmp_path / "x"]
    other = with_vocabulary(corpus, tmp_path_factory.mktemp("other"), 400)
    assert "was trained with another vocabulary than" in refused(short, other, *tail)
    (tmp_path / "old").mkdir()
    old = checkpoint_with(state, tmp_path / "old", "rope", rpe_vocabulary=None)
    assert "was trained with another vocabulary than" in refused(old, other, *tail)
    assert "lies in --out" in refused(short, corpus, *tail[:3], tmp_path)
    assert "is a data folder" in refused(short, corpus, *tail[:3], corpus)
    assert "does not exist" in refused(tmp_path / "no.pt", corpus, *tail)
    assert "does not exist" in refused(short, tmp_path / "no", *tail)
    model = {key: value for key, value in state["cfg"]["model"].items() if not key.startswith("rpe")}
    stock = tmp_path / "stock.pt"
    torch.save({**state, "cfg": {**state["cfg"], "model": {**model, "_name": "transformer_lm"}}}, stock)
    assert "is not of this plugin" in refused(stock, corpus, *tail)
    (folder := tmp_path / "swept").mkdir()
    (folder / "sweep.json").write_text("{}")
    said = refused(short, corpus, *tail[:3], folder)
    assert f"--out {folder} is the folder of a sweep" in said and "name another one" in said
    assert [path.name for path in folder.iterdir()] == ["sweep.json"]


def test_an_architecture_that_no_flag_says(state, tmp_path):
    for change, words in (
        ({"decoder_normalize_before": False}, "decoder_normalize_before=False, which no flag can set"),
        ({"_name": "transformer_rpe_lm_mine"}, "'transformer_rpe_lm_mine', unknown here: give --rpe-module"),
    ):
        with pytest.raises(UserError, match=words):
            from_checkpoint.architecture_settings(checkpoints.load(checkpoint_with(state, tmp_path, "rope", **change)))


def test_a_value_that_equals_one_of_the_checkpoint_does_not_drop_its_flags(tmp_path):
    request, arch = TrainingConfig(rpe="rope", out=tmp_path), "transformer_rpe_lm_tiny"
    checkpoint_flags = ("--decoder-embed-dim", "32", "--decoder-ffn-embed-dim", "64")
    for extra, expected in (
        (("--max-epoch", "32"), (*checkpoint_flags, "--max-epoch", "32")),
        (("--decoder-embed-dim=48",), ("--decoder-embed-dim=48",)),
        (("--decoder-embed-dim", "48"), ("--decoder-embed-dim", "48")),
    ):
        changed = replace(request, extra=extra)
        assert from_checkpoint._add_architecture_flags(changed, arch, checkpoint_flags) == expected


# what is carried out


def test_cut_off_it_goes_on_and_the_new_checkpoint_has_the_old_length(short, corpus, tmp_path, monkeypatch, undrawn):
    """The one test here that trains: it fails after a checkpoint, and the same command goes on."""
    out = tmp_path / "out"
    command = ["extend", short, corpus, "--tokens", 64, "--rpe", YARN, "--lengths", "32,64", "--updates", 4]
    command += ["--save-every", 2, "--out", out, "--device", "cpu"]
    last = out / "checkpoints/checkpoint_last.pt"

    def train_step(trainer: Trainer, *given: object, real=Trainer.train_step, **more: object) -> object:
        if trainer.get_num_updates() == 3:
            raise RuntimeError("the power is gone")
        return real(trainer, *given, **more)

    with monkeypatch.context() as patched:
        patched.setattr(Trainer, "train_step", train_step)
        done = run_here(*command, ok=False)
    assert done.returncode == 2 and "the power is gone" in done.stderr
    assert len(json_files.read_json_lines(out / "eval.jsonl")) == 4
    shown = run_here(*command).stdout.splitlines()
    table = [line.split("|")[1].strip() for line in shown if line.startswith("| ")]
    assert table[1:4] == ["rope, before", f"{YARN}, not trained", f"{YARN}, trained at 64 tokens"]
    said = (out / "checkpoints/train.log").read_text()
    assert said.count("loading pretrained model from") == 1 and "---- resumed" in said
    starts = json_files.read_json(out / "checkpoints/environment.json")["starts"]
    assert [start["from_update"] for start in starts] == [0, 2]

    made = checkpoints.load(last)
    assert (made.train_length(), made.task["tokens_per_sample"], made.num_updates) == (32, 64, 4)
    assert made.load_encodings()[0].original_length == 32 and made.model["decoder_embed_dim"] == 32
    rows = {(one["checkpoint"], one["rpe"], one["length"]) for one in json_files.read_json_lines(out / "eval.jsonl")}
    assert len(rows) == 6 and (out / "ppl.png").exists()
    page = (out / "report.html").read_text()
    # settings, training and environment come from the records of the run
    facts = ("original length", "learning rate", "4 updates of 8 sequences", "Environment", "resumed after update 2")
    assert [words for words in facts if words not in page] == []
    # finished: nothing is trained or measured again, and another run is refused
    before = last.stat().st_mtime_ns
    assert "already holds the finished run of 4 updates" in run_here(*command).stdout
    assert last.stat().st_mtime_ns == before
    assert "holds another run (lr is 0.0005 there, 0.25 here)" in refusal(*command, "--lr", "0.25")
    assert len(json_files.read_json_lines(out / "eval.jsonl")) == 6
