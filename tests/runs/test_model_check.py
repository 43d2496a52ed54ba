"""What building a model and loading its checkpoint would refuse, checked before a training begins."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from conftest import checkpoint_with
from refusal import refusal
from sweep_commands import SMALL

from fairseq_rpe.core.errors import UserError
from fairseq_rpe.runs.model_check import ModelSize, check_evaluation, check_model, model_encodings, model_size
from fairseq_rpe.runs.settings import make_plan
from fairseq_rpe.runs.training_config import TrainingConfig

REQUEST = TrainingConfig(rpe="alibi", out=Path("x"), data=Path("d"), device="cpu")
OWN = """
from fairseq.models import register_model_architecture

import fairseq_rpe.models
from fairseq_rpe.encodings import DistanceBias, register


@register("own_bias")
class Own(DistanceBias):
    def bias(self, d):
        return -d.expand(self.heads, -1)


@register_model_architecture("transformer_rpe_lm", "transformer_rpe_lm_own")
def own(args):
    args.decoder_layers = getattr(args, "decoder_layers", 5)
    args.decoder_embed_dim = getattr(args, "decoder_embed_dim", 40)
    args.decoder_attention_heads = getattr(args, "decoder_attention_heads", 5)
"""


def check(**changes: object) -> None:
    request = replace(REQUEST, **changes)
    check_model(request, make_plan(request, ""))


def evaluate(rpe: str, trained: str) -> None:
    request = replace(REQUEST, rpe=trained)
    check_evaluation(request, make_plan(request, ""), rpe, None)


def test_the_size_is_that_of_architecture_and_flags():
    for changes, size in (
        ({}, (2, 128, 4)),
        ({"arch": "base"}, (12, 768, 12)),
        ({"arch": "base", "extra": ("--decoder-layers", "3", "--decoder-embed-dim=96")}, (3, 96, 12)),
        ({"extra": ("--decoder-layers-to-keep", "0")}, (1, 128, 4)),
        ({"extra": ("--decoder-attention-heads=8",)}, (2, 128, 8)),
    ):
        assert model_size(replace(REQUEST, **changes)) == ModelSize(*size), changes


def test_the_size_of_an_architecture_of_the_users_own(tmp_path):
    (tmp_path / "own.py").write_text(OWN)
    own = {"rpe": "own_bias", "rpe_module": tmp_path / "own.py", "arch": "transformer_rpe_lm_own"}
    check(**own)
    assert model_size(replace(REQUEST, **own, extra=("--decoder-layers", "2"))) == ModelSize(2, 40, 5)


FACTORS = "longrope:factors=" + "+".join(["1.5"] * 32)  # as many as pairs of a head of base, and not of tiny


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"rpe": FACTORS}, "32 numbers for 16 rotated pairs"),
        ({"extra": ("--decoder-attention-heads", "5")}, "5 heads do not divide a model width of 128"),
        ({"rpe": "alibbi"}, "unknown encoding 'alibbi'"),
        ({"positions_train": "wrap"}, "did you mean 'warp'"),
        ({"rpe": "nope", "positions_eval": "interpolate"}, "'nope' reads no positions"),
        ({"rpe": "t5_bias", "positions_train": "interpolate"}, "accepts whole positions only"),
        ({"rpe": "rope", "rpe_share": "layer"}, "--rpe-share layer: 'rope' can only be shared by: model"),
        ({"rpe": "cope", "attention_backend": "flex"}, "backend 'flex' never holds"),
    ],
)
def test_what_the_model_would_refuse(changes, words):
    with pytest.raises(UserError, match=words):
        check(**changes)


def test_what_fits_is_accepted():
    """A size of the model at which an option holds, and encodings with the parameters of the trained one."""
    check(rpe=FACTORS, arch="base")
    for trained, rpe in (("rope", "rope:scaling=linear,factor=2"), ("rope", "rerope:window=5"), ("alibi", "type1")):
        evaluate(rpe, trained)
    evaluate("fire:log=true", "fire")


@pytest.mark.parametrize(
    ("trained", "rpe", "words"),
    [
        ("rope", "fire", "other parameters than 'rope'"),
        ("fire", "rope", "other parameters than 'fire'"),
        ("t5_bias", "t5_bias:buckets=16", "size mismatch"),
        ("alibi", "rerope", "reads models that were trained with rope"),
        ("rope:base=500", "rerope", "give base=500"),
    ],
)
def test_encodings_that_cannot_take_the_place_of_the_trained_one(trained, rpe, words):
    with pytest.raises(UserError, match=words):
        evaluate(rpe, trained)


def test_a_training_that_would_fail_is_refused_by_the_command_itself(state, corpus, tmp_path, monkeypatch):
    """Other parameters than the checkpoint's, a misspelt encoding, or a backend without a backward pass here."""
    monkeypatch.setattr("fairseq_rpe.runs.launch.launch_training", lambda *_: pytest.fail("the training was started"))
    given = ["train", corpus, "--out", tmp_path / "run", "--tokens", "32", "--device", "cpu", "--rpe"]
    init = ["--init-from", checkpoint_with(state, tmp_path, "kerple_log")]
    for rpe, more, words in (
        ("rope", init, "other parameters than 'kerple_log'"),
        ("fire", init, "Missing key"),
        ("alibbi", ["--dry-run"], "unknown encoding 'alibbi'"),
        ("alibi", ["--attention-backend", "flex"], "no backward pass on the CPU: use 'sdpa'"),
    ):
        assert words in refusal(*given, rpe, *more, *SMALL) and not (tmp_path / "run").exists()


def test_the_training_length_may_be_given_by_its_flag():
    request = replace(REQUEST, rpe="learned", extra=("--rpe-train-length", "48"))
    [encoding] = model_encodings(request, make_plan(request, ""))
    assert len(encoding.table) == 48
