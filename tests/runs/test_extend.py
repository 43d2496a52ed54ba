"""``extend``: a checkpoint trained further on longer texts, with its architecture, vocabulary and training length."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from conftest import checkpoint_with, run_here, with_documents, with_vocabulary
from fairseq.trainer import Trainer
from refusal import refusal
from sweep_commands import flag, parser

from fairseq_rpe.core import UserError, files
from fairseq_rpe.core.records import filled
from fairseq_rpe.runs import architecture, checkpoints, launch
from fairseq_rpe.runs.settings import Request
from fairseq_rpe.sweeps import extension

YARN = "rope:scaling=yarn,factor=auto"


@pytest.fixture
def short(state, tmp_path) -> Path:
    """A model with rotary positions, trained on 32 tokens."""
    return checkpoint_with(state, tmp_path, "rope")


def resolved(*argv: object, lengths: tuple[int, ...] | None = (32,)) -> extension.Extension:
    args = parser().parse_args(["extend", *map(str, argv), "--device", "cpu"])
    return extension.resolve(filled(Request, args, rpe=args.rpe or "", save_dir=args.out), lengths, "test")


def refused(*argv: object) -> str:
    return refusal("extend", *argv, "--device", "cpu")


# what is taken over, and what is kept


def test_blocks_are_those_of_the_checkpoints_training(state, corpus, tmp_path):
    path = checkpoint_with(state, tmp_path, "rope", task={"blocks": "document"})
    found = resolved(path, with_documents(corpus, tmp_path), "--tokens", 64, "--out", tmp_path / "x")
    words = launch.command(found.request, found.plan, launch.Node(), 0)
    assert flag(words, "--blocks") == "document" and found.plan.settings.blocks == "document"
    assert "no document boundaries" in refused(path, corpus, "--tokens", 64, "--out", tmp_path / "x")


def test_everything_that_is_not_said_is_the_checkpoints(state, corpus, tmp_path):
    own = {"dropout": 0.25, "attention_dropout": 0.125, "no_decoder_final_norm": True, "rpe_share": "model"}
    path = checkpoint_with(state, tmp_path, "rope", **own)
    found = resolved(path, corpus, "--tokens", 64, "--out", tmp_path / "x", lengths=None)
    assert found.lengths == (32, 64) and found.original == 32 and not found.fresh
    words = launch.command(found.request, found.plan, launch.Node(), 0)
    said = {"--rpe": "rope", "--rpe-share": "model", "--dropout": "0.25", "--attention-dropout": "0.125"}
    said |= {"--decoder-embed-dim": "32", "--decoder-ffn-embed-dim": "64", "--tokens-per-sample": "64"}
    said |= {"--rpe-train-length": "32", "--arch": "transformer_rpe_lm_tiny", "--finetune-from-model": str(path)}
    # as many tokens an update as 16 texts of 32
    said |= {"--max-update": "100", "--batch-size": "8", "--lr": "0.0005", "--warmup-updates": "10"}
    assert {name: flag(words, name) for name in said} == said and "--no-decoder-final-norm" in words
    assert not [word for word in words if word.startswith("--decoder-layers") or word.startswith("--adaptive")]


def test_positions_are_the_checkpoints_unless_one_of_them_is_said(state, corpus, tmp_path):
    path = checkpoint_with(state, tmp_path, "rope", positions_train="offset:by=2", positions_eval="interpolate")
    given = [path, corpus, "--tokens", 64, "--out", tmp_path / "x"]
    plain, said = resolved(*given).request, resolved(*given, "--positions-train", "identity").request
    assert (plain.positions_train, plain.positions_eval) == ("offset:by=2", "interpolate")
    assert (said.positions_train, said.positions_eval) == ("identity", None)
    # texts as long as before are enough where positions skip beyond them
    pose = resolved(path, corpus, "--tokens", 32, "--out", tmp_path / "x", "--positions-train", "pose:target=128")
    assert pose.request.tokens == 32 and pose.request.batch_sentences == 16
    thin = [path, corpus, "--tokens", 32, "--out", tmp_path / "x", "--positions-train", "stretch:times=4"]
    assert resolved(*thin, lengths=None).lengths == (32, 64, 128)


def test_what_a_new_encoding_leaves_open_is_the_checkpoints(state, corpus, tmp_path):
    path = checkpoint_with(state, tmp_path, "rope:base=500,rotary_fraction=0.5")
    given = [path, corpus, "--tokens", 64, "--out", tmp_path / "x", "--rpe"]
    found = resolved(*given, "longrope:factors=2")
    words = launch.command(found.request, found.plan, launch.Node(), 0)
    assert flag(words, "--rpe") == found.request.rpe == "longrope:factors=2,base=500,rotary_fraction=0.5"
    assert "give base=500, or leave it out" in refused(*given, "longrope:factors=2,base=10000")
    assert resolved(*given, "rope:base=9000").request.rpe == "rope:base=9000,rotary_fraction=0.5"  # ABF


def test_extended_twice_it_goes_by_the_first_length(state, corpus, tmp_path):
    path = checkpoint_with(state, tmp_path, YARN, task={"tokens_per_sample": 64}, rpe_train_length=32)
    found = resolved(path, corpus, "--tokens", 96, "--out", tmp_path / "x", lengths=None)
    assert found.original == 32 and found.lengths == (32, 64, 96) and found.request.rpe == YARN
    assert "is not above the 64 tokens" in refused(path, corpus, "--tokens", 64, "--out", tmp_path / "x")


def test_parameters_that_only_the_new_encoding_has_begin_untrained_and_that_is_said(short, corpus, tmp_path, capsys):
    given = [short, corpus, "--tokens", 64, "--rpe", "t5_bias:init_std=1", "--out", tmp_path / "x"]
    found = resolved(*given)
    begin = tmp_path / "x/begin.pt"
    assert found.fresh and found.request.finetune_from == begin
    assert f"has parameters that {short} lacks: decoder.encodings.0.table" in capsys.readouterr().out
    weights, before = checkpoints.load(begin).weights, checkpoints.load(short).weights
    added = set(weights) - set(before)
    assert added == {"decoder.encodings.0.table"}
    assert all(torch.equal(weights[name], value) for name, value in before.items())
    assert all(weights[name].std() > 0.5 for name in added)
    assert checkpoints.load(begin).learned()[0].config.init_std == 1
    # a rerun knows its own run
    assert resolved(*given).plan == found.plan
    other = resolved(*given, "--seed", "2").plan.settings
    assert other.finetune_from != found.plan.settings.finetune_from


# what is refused


@pytest.mark.parametrize(
    ("spec", "words", "said"),
    [
        ("rope", ["--tokens", "32"], "--tokens 32 is not above the 32 tokens that"),
        ("rope", ["--tokens", "16", "--positions-train", "pose:target=99"], "--tokens 16 is not above the 32 tokens"),
        ("rope", ["--tokens", "64", "--positions-train", "pose:target=48"], "pose:target=48 ends at 48 positions"),
        ("rope", ["--tokens", "64", "--rpe", "roep"], "unknown encoding 'roep' (did you mean 'rope'?)"),
        ("rope", ["--tokens", "64", "--rpe", "rope:scaling=yarn"], "needs factor=NUMBER or factor=auto"),
        ("rope", ["--tokens", "64", "--rpe", "learned:max_positions=64"], "is a table of positions that"),
        ("learned", ["--tokens", "64"], "position 63 is beyond the 32 positions"),
        ("kerple_log", ["--tokens", "64", "--rpe", "rope"], "has no parameter decoder.encodings.0."),
        ("t5_bias", ["--tokens", "64", "--rpe", "t5_bias:buckets=16"], "which"),
        ("rope", ["--tokens", "999999"], "less than one block of 999999"),
    ],
)
def test_what_cannot_be_extended(spec, words, said, state, corpus, tmp_path):
    path = checkpoint_with(state, tmp_path, spec)
    assert said in refused(path, corpus, "--out", tmp_path / "x", *words)
    assert not (tmp_path / "x").exists()


@pytest.mark.parametrize("words", [("--schedule", "cosine", "--warmup", 8), ("--attention-backend", "flash")])
def test_a_refusal_leaves_no_copy_with_new_parameters(words, short, corpus, tmp_path):
    given = (short, corpus, "--tokens", 64, "--updates", 2, "--rpe", "kerple_power", "--out", tmp_path / "new/folder")
    done = run_here("extend", *given, *words, "--device", "cpu", ok=False)
    assert done.returncode == 2 and "error: " in done.stderr and not (tmp_path / "new").exists()


def test_places_that_do_not_fit_the_checkpoint(short, state, corpus, tmp_path, tmp_path_factory):
    tail = ["--tokens", "64", "--out", tmp_path / "x"]
    other = with_vocabulary(corpus, tmp_path_factory.mktemp("other"), 400)
    assert "was trained with another vocabulary than" in refused(short, other, *tail)
    (tmp_path / "old").mkdir()
    old = checkpoint_with(state, tmp_path / "old", "rope", rpe_vocabulary=None)
    assert "was trained with another vocabulary than" in refused(old, other, *tail)
    assert "lies in --out" in refused(short, corpus, "--tokens", "64", "--out", tmp_path)
    assert "is a data folder" in refused(short, corpus, "--tokens", "64", "--out", corpus)
    assert "does not exist" in refused(tmp_path / "no.pt", corpus, *tail)
    assert "does not exist" in refused(short, tmp_path / "no", *tail)
    model = {key: value for key, value in state["cfg"]["model"].items() if not key.startswith("rpe")}
    stock = tmp_path / "stock.pt"
    torch.save({**state, "cfg": {**state["cfg"], "model": {**model, "_name": "transformer_lm"}}}, stock)
    assert "is not of this plugin" in refused(stock, corpus, *tail)


def test_the_folder_of_a_sweep_is_no_place(short, corpus, tmp_path):
    folder = tmp_path / "swept"
    folder.mkdir()
    (folder / "sweep.json").write_text("{}")
    said = refused(short, corpus, "--tokens", "64", "--out", folder)
    assert f"--out {folder} is the folder of a sweep" in said and "name another one" in said
    assert [path.name for path in folder.iterdir()] == ["sweep.json"]


@pytest.mark.parametrize("spec", ["rope", "t5_bias"])
def test_a_backend_that_cannot_train_on_this_device_is_refused_before_an_evaluation(spec, short, corpus, tmp_path):
    given = [short, corpus, "--tokens", "64", "--rpe", spec, "--out", tmp_path / "x"]
    said = refused(*given, "--attention-backend", "flex")
    assert "--attention-backend flex" in said and "no backward pass on the CPU: use 'sdpa'" in said
    assert not (tmp_path / "x").exists()


@pytest.mark.parametrize(("updates", "warmup"), [(None, 10), (20, 4)])
def test_the_default_warmup_depends_on_the_updates(updates, warmup, short, corpus, tmp_path):
    more = [] if updates is None else ["--updates", updates]
    assert resolved(short, corpus, "--tokens", 64, "--out", tmp_path / "x", *more).plan.settings.warmup == warmup


def test_a_warmup_that_takes_all_updates_is_refused_before_a_file_is_written(short, corpus, tmp_path):
    given = [short, corpus, "--tokens", "64", "--rpe", "t5_bias", "--out", tmp_path / "x"]
    assert "a warm-up of 30 is not below the 30 updates" in refused(*given, "--updates", 30, "--warmup", 30)
    assert not (tmp_path / "x").exists()


def test_an_architecture_that_no_flag_says(state, tmp_path):
    checkpoint = checkpoints.load(checkpoint_with(state, tmp_path, "rope", decoder_normalize_before=False))
    with pytest.raises(UserError, match="decoder_normalize_before=False, which no flag says"):
        architecture.said(checkpoint)
    checkpoint = checkpoints.load(checkpoint_with(state, tmp_path, "rope", _name="transformer_rpe_lm_mine"))
    with pytest.raises(UserError, match="'transformer_rpe_lm_mine', unknown here: give --rpe-module"):
        architecture.said(checkpoint)


# what is carried out


def test_cut_off_it_goes_on_and_the_new_checkpoint_has_the_old_length(short, corpus, tmp_path, monkeypatch):
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
    assert len(files.read_json_lines(out / "eval.jsonl")) == 4
    shown = run_here(*command).stdout.splitlines()
    table = [line.split("|")[1].strip() for line in shown if line.startswith("| ")]
    assert table[1:] == ["rope, before", f"{YARN}, not trained", f"{YARN}, trained at 64 tokens"]
    said = (out / "checkpoints/train.log").read_text()
    assert said.count("loading pretrained model from") == 1 and "---- resumed" in said
    starts = files.read_json(out / "checkpoints/environment.json")["starts"]
    assert [start["from_update"] for start in starts] == [0, 2]

    made = checkpoints.load(last)
    assert (made.train_length(), made.task["tokens_per_sample"], made.updates) == (32, 64, 4)
    assert made.learned()[0].original == 32 and made.model["decoder_embed_dim"] == 32
    rows = {(one["checkpoint"], one["rpe"], one["length"]) for one in files.read_json_lines(out / "eval.jsonl")}
    assert len(rows) == 6 and (out / "ppl.png").exists()
    # finished: nothing is trained or measured again, and another run is refused
    before = last.stat().st_mtime_ns
    assert "already holds the finished run of 4 updates" in run_here(*command).stdout
    assert last.stat().st_mtime_ns == before
    assert "holds another run (lr is 0.0005 there, 0.25 here)" in refusal(*command, "--lr", "0.25")
    assert len(files.read_json_lines(out / "eval.jsonl")) == 6
