"""Trainings with other blocks by fairseq's own commands: flags, checkpoints, evaluation and decoding."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from conftest import PACKAGE, TRAIN_FLAGS, error_of, make_model, run_here
from in_process import fairseq
from sweep_commands import SMALL
from test_blocks import some_tokens

from fairseq_rpe.checkpoints.checkpoint import load_checkpoint
from fairseq_rpe.data import folder as corpus_files
from fairseq_rpe.encodings.from_checkpoint import restore_encodings
from fairseq_rpe.modules.cross_entropy import linear_cross_entropy, target_losses
from fairseq_rpe.runs.checkpoints import load
from fairseq_rpe.runs.from_checkpoint import architecture_settings
from fairseq_rpe.runs.run_folder import CheckpointFolder

BLOCKS = ["--block", "llama", "--kv-heads", "2", "--qk-norm", "head", "--head-dim", "12", "--logit-softcap", "20"]


@pytest.fixture(scope="module")
def llama(corpus, made_once) -> Path:
    """A checkpoint of two updates of a model with the blocks of Llama, key/value heads, QK-norm and a logit softcap."""
    flags = [flag for flag in TRAIN_FLAGS if flag not in ("--decoder-ffn-embed-dim", "64")]

    def fill(folder: Path) -> None:
        words = [corpus, *flags, "--rpe", "rope", *BLOCKS, "--max-update", "2", "--save-dir", folder]
        fairseq("train", *map(str, words))

    return made_once("llama-blocks", fill) / "checkpoint_last.pt"


def test_a_checkpoint_records_every_option(llama):
    model = load_checkpoint(llama).model
    recorded = {name: model[name] for name in ("block", "norm", "norm_eps", "bias", "block_init", "activation_fn")}
    assert recorded == {
        "block": "llama",
        "norm": "rmsnorm",
        "norm_eps": 1e-6,
        "bias": "no",
        "block_init": "llama",
        "activation_fn": "swiglu",
    }
    assert model["decoder_ffn_embed_dim"] == 88  # 8/3 of 32 is 85.3
    assert model["no_scale_embedding"] is True
    (encoding,) = restore_encodings(load_checkpoint(llama))
    assert encoding.width == 48


def test_it_is_evaluated_and_decoded(corpus, llama, tmp_path):
    flags = ["--user-dir", PACKAGE, "--path", llama, "--cpu", "--gen-subset", "test", "--tokens-per-sample", "64"]
    scored = fairseq("eval_lm", *map(str, (corpus, *flags, "--num-workers", "0"))).stdout
    total = corpus_files.count_tokens(corpus, "test")
    assert f"scored tokens: {total} of {total}" in scored
    flags += ["--task", "language_modeling", "--beam", "3", "--max-len-b", "8", "--sample-break-mode", "eos"]
    done = fairseq("generate", *map(str, (corpus, *flags, "--batch-size", "40")))
    assert done.stdout.count("\nH-") == len(corpus_files.read_split(corpus, "test")[1])
    done = run_here("eval", llama, corpus, "--lengths", 64, "--out", tmp_path / "results.jsonl")
    assert "64" in done.stdout


def test_another_preset_of_the_evaluation_changes_nothing(corpus, llama, tmp_path):
    """The options of a checkpoint are recorded, so its preset is not asked again."""
    state = torch.load(llama)
    state["cfg"]["model"]["block"] = "classic"
    torch.save(state, tmp_path / "checkpoint.pt")
    outputs = [run_here("eval", path, corpus, "--lengths", 64).stdout for path in (llama, tmp_path / "checkpoint.pt")]
    # the row without the seconds, which are its last column
    first, second = (output.splitlines()[-1].split()[:-1] for output in outputs)
    assert first == second and "64" in first


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_losses_of_capped_logits(dtype):
    """Tiles of the vocabulary give the losses and gradients of all logits at once, also with a softcap."""
    torch.manual_seed(0)
    x, weight = (torch.randn(shape, requires_grad=True) for shape in ((300, 16), (70, 16)))
    target = torch.randint(0, 70, (300,))
    target[::7] = 1

    def plain() -> torch.Tensor:
        logits = 3.0 * torch.tanh((x.to(dtype) @ weight.to(dtype).T).float() / 3.0)
        return torch.nn.functional.cross_entropy(logits, target, ignore_index=1, reduction="none")

    tolerance = {"rtol": 1e-5, "atol": 1e-5} if dtype == torch.float32 else {"rtol": 2e-2, "atol": 2e-2}
    with torch.autocast("cpu", dtype, enabled=dtype != torch.float32):
        loss = linear_cross_entropy(x, weight, target, 1, softcap=3.0)
    with torch.autocast("cpu", enabled=False):
        expected = plain()
        torch.testing.assert_close(loss, expected.sum(), **tolerance)
        gradients = [torch.autograd.grad(value, (x, weight)) for value in (loss, expected.sum())]
    torch.testing.assert_close(*gradients, **tolerance)
    losses = target_losses(x.to(dtype), weight.to(dtype), target, softcap=3.0)
    torch.testing.assert_close(losses.masked_fill(target == 1, 0), plain().detach(), **tolerance)


def test_the_criterion_caps_the_logits(task):
    from fairseq_rpe.criterions.lm_cross_entropy import LMCrossEntropy

    model, tokens = make_model(task, "rope", logit_softcap=0.7).train(), some_tokens().clamp_max(59)
    sample = {"net_input": {"src_tokens": tokens}, "target": tokens, "ntokens": tokens.numel()}
    criterion = LMCrossEntropy(task, False)
    loss = criterion(model, sample)[0]
    logits = model(tokens)[0]
    assert logits.detach().abs().max() < 0.7
    expected = torch.nn.functional.cross_entropy(logits.flatten(0, 1), tokens.flatten(), reduction="sum")
    torch.testing.assert_close(loss, expected)


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--kv-heads", 3], "--kv-heads 3 does not divide the 4 attention heads"),
        (["--qk-norm", "head", "--rpe", "shaw"], "--qk-norm head: Shaw is defined by a bias of queries and keys"),
        (["--head-dim", 12, "--rpe", "bipe"], "'bipe' acts at the input and rotates heads"),
        (["--head-dim", 7, "--rpe", "rope"], "7"),
        (["--norm", "rms"], "invalid choice"),
    ],
)
def test_blocks_are_refused_before_the_training(corpus, tmp_path, capsys, flags, message):
    encoding = [] if "--rpe" in flags else ["--rpe", "alibi"]
    said = error_of(capsys, "train", corpus, "--out", tmp_path / "run", "--device", "cpu", *encoding, *flags)
    assert message in said


def test_options_of_a_run(corpus, tmp_path, capsys):
    """The options are recorded, passed to fairseq, and a resumed run may not change them."""
    command = ["train", corpus, "--rpe", "rope", "--out", tmp_path, "--tokens", 32, "--batch-sentences", 4]
    command += ["--updates", 2, "--device", "cpu", "--block", "llama", "--kv-heads", 2, "--qk-norm", "head"]
    run_here(*command, *SMALL)
    model = load_checkpoint(tmp_path / "checkpoint_last.pt").model
    assert (model["norm"], model["kv_heads"], model["qk_norm"], model["activation_fn"]) == (
        "rmsnorm",
        2,
        "head",
        "swiglu",
    )
    settings = CheckpointFolder(tmp_path).read_record().settings
    assert (settings.block, settings.norm, settings.kv_heads) == ("llama", None, 2)
    command[command.index("--kv-heads") + 1] = 4
    assert "kv_heads is 2 there, 4 here" in error_of(capsys, *command, *SMALL)


def test_a_checkpoint_tells_a_further_training_its_blocks(llama):
    settings = architecture_settings(load(llama))
    blocks = ("block", "kv_heads", "qk_norm", "head_dim", "logit_softcap", "activation_fn")
    assert [settings[name] for name in blocks] == ["llama", 2, "head", 12, 20.0, "swiglu"]
    assert "--decoder-ffn-embed-dim" in settings["extra"] and "--no-scale-embedding" in settings["extra"]
