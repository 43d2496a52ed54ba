"""The plugin under fairseq's own commands, each in a process of its own, as a user runs them."""

from __future__ import annotations

import logging
import math
import re
import signal
import subprocess
import sys
import time
from pathlib import Path
from unittest import mock

import pytest
import torch
from conftest import PACKAGE, TRAIN_FLAGS
from in_process import fairseq
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

import fairseq_rpe.models  # noqa: F401  (registers)
from fairseq_rpe import compat, encodings
from fairseq_rpe.core import UserError

PLUGIN = ["--user-dir", str(PACKAGE)]
OWN = '''
import torch
from fairseq_rpe.encodings import DistanceBias, positive, register


@register("test_root")
class Root(DistanceBias):
    """A learned multiple of the square root of the distance."""

    formula = "-a_h·sqrt(d)"
    paper = "none"

    def setup(self):
        self.raw = torch.nn.Parameter(torch.zeros(self.heads))

    def bias(self, d):
        return -positive(self.raw.to(d.dtype))[:, None] * d.sqrt()
'''


def flags_of(corpus, save, updates: int, flags) -> list[str]:
    words = [corpus, *TRAIN_FLAGS, "--max-update", updates, "--save-dir", save, *flags]
    return [str(word) for word in words]


def train(corpus, save, *flags, updates=6, **kwargs):
    return fairseq("train", *flags_of(corpus, save, updates, flags), **kwargs)


def train_here(corpus, save, *flags, updates=6) -> str:
    """What fairseq-train says where it succeeds, run in this process: most of its time is its start."""
    from fairseq_cli import train

    return said_here(train.cli_main, flags_of(corpus, save, updates, flags))


def said_here(main, flags: list[str]) -> str:
    """Messages of one of fairseq's programs, run in this process."""
    compat.apply()
    said: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: said.append(record.getMessage())
    root = logging.getLogger()
    level = root.level
    root.addHandler(handler)
    root.setLevel(logging.INFO)
    try:
        with mock.patch.object(sys, "argv", ["fairseq", "--num-workers", "0", *flags]):
            main()
    finally:
        compat.overrides.clear()
        root.removeHandler(handler)
        root.setLevel(level)
    return "\n".join(said)


def parameters(folder: Path, name: str = "checkpoint_last.pt") -> dict[str, torch.Tensor]:
    return torch.load(folder / name)["model"]


def assert_bit_equal(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> None:
    assert a.keys() == b.keys()
    for name in a:
        assert torch.equal(a[name], b[name]), name


def tokens_in(corpus: Path, split: str) -> int:
    from fairseq.data import Dictionary, data_utils

    # bound to a name: its sizes are a view of a file that closes with it
    dataset = data_utils.load_indexed_dataset(str(corpus / split), Dictionary.load(str(corpus / "dict.txt")))
    return int(dataset.sizes.sum())


def evaluate(corpus, checkpoint, length, *flags, **kwargs):
    done = fairseq(
        "eval_lm",
        corpus,
        *PLUGIN,
        "--path",
        checkpoint,
        "--tokens-per-sample",
        str(length),
        "--gen-subset",
        "test",
        "--cpu",
        *flags,
        **kwargs,
    )
    return done.stdout + done.stderr


def evaluate_here(corpus, checkpoint, length, *flags) -> str:
    """What fairseq-eval-lm says where it succeeds, run in this process."""
    from fairseq_cli import eval_lm

    words = [corpus, *PLUGIN, "--path", checkpoint, "--tokens-per-sample", length, "--gen-subset", "test", "--cpu"]
    return said_here(eval_lm.cli_main, [str(word) for word in (*words, *flags)])


@pytest.fixture(scope="module")
def trained(corpus, tmp_path_factory) -> Path:
    """A kerple_log run of six updates with TensorBoard logs, trained at 32 tokens."""
    folder = tmp_path_factory.mktemp("trained")
    said = train_here(corpus, folder, "--rpe", "kerple_log", "--tensorboard-logdir", folder / "tb")
    (folder / "log.txt").write_text(said)
    return folder


def test_any_length_scores_every_token(corpus, trained):
    total = tokens_in(corpus, "test")
    ppl = {}
    for length, measure in ((32, evaluate), (9216, evaluate_here)):
        out = measure(corpus, trained / "checkpoint_best.pt", length)
        assert f"scored tokens: {total} of {total}" in out
        ppl[length] = float(re.search(r"Perplexity: ([\d.]+)", out).group(1))
    assert ppl[32] > 1 and ppl[9216] > 1


def test_eval_lm_agrees_with_training(corpus, trained):
    """fairseq-eval-lm on the valid set gives the loss that training printed for it."""
    logged = float(re.findall(r"valid on 'valid' subset \| loss ([\d.]+)", (trained / "log.txt").read_text())[-1])
    out = evaluate_here(corpus, trained / "checkpoint_last.pt", 32, "--gen-subset", "valid")
    assert float(re.search(r"Loss \(base 2\): ([\d.]+)", out).group(1)) == pytest.approx(logged, abs=2e-3)


def test_tensorboard_shows_learned_parameters(trained):
    for part, group in (("train_inner", "3_training"), ("valid", "2_validation")):
        events = EventAccumulator(str(trained / "tb" / part)).Reload()
        tags = set(events.Tags()["scalars"])
        learned = {f"4_encoding/{name}" for name in ("rpe_p_l0", "rpe_p_h1", "rpe_a_h4")}
        assert {f"{group}/loss", f"{group}/ppl", *learned} <= tags, part
        assert all(0 < e.value < 3 for e in events.Scalars("4_encoding/rpe_p_l0"))


def test_context_window(corpus, trained):
    out = evaluate_here(corpus, trained / "checkpoint_best.pt", 32, "--context-window", "16")
    total = tokens_in(corpus, "test")
    assert f"scored tokens: {total} of {total}" in out
    with pytest.raises(UserError, match="--context-window is wrong with more than one worker"):
        evaluate_here(corpus, trained / "checkpoint_best.pt", 32, "--context-window", "16", "--num-workers", "2")


def test_stock_model_that_drops_blocks_is_refused(corpus, tmp_path):
    """fairseq's own transformer_lm prints perplexity 1.00 over zero tokens here; under the plugin it is an error."""
    sizes = ["--decoder-layers", "1", "--decoder-attention-heads", "2"]
    sizes += ["--decoder-input-dim", "32", "--decoder-output-dim", "32"]
    train_here(corpus, tmp_path, "--arch", "transformer_lm", *sizes, updates=1)
    with pytest.raises(UserError, match="scored "):
        evaluate_here(corpus, tmp_path / "checkpoint_last.pt", 64)


def test_generation(corpus, trained):
    """fairseq-interactive and fairseq-generate decode with the cache; beams agree with a plain recomputation."""
    flags = [*PLUGIN, "--task", "language_modeling", "--path", trained / "checkpoint_best.pt", "--cpu", "--beam", "3"]
    done = fairseq("interactive", corpus, *flags, "--max-len-b", "20", input="return x\n")
    assert "H-0" in done.stdout
    done = fairseq(
        "generate",
        corpus,
        *flags,
        "--gen-subset",
        "test",
        "--max-len-b",
        "80",
        "--batch-size",
        "8",
        "--tokens-per-sample",
        "32",
        "--sample-break-mode",
        "eos",
    )
    assert done.stdout.count("\nH-") == 120


def test_sigkill_and_resume_is_bit_equal(corpus, tmp_path):
    flags = ["--rpe", "kerple_log", "--dropout", "0.1", "--attention-dropout", "0.1"]
    flags += ["--save-interval-updates", "4", "--keep-interval-updates", "1"]
    train_here(corpus, tmp_path / "whole", *flags, updates=30)
    command = [sys.executable, "-m", "fairseq_cli.train", *flags_of(corpus, tmp_path / "killed", 30, flags)]
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    deadline = time.monotonic() + 120
    while not (tmp_path / "killed" / "checkpoint_last.pt").exists() and time.monotonic() < deadline:
        time.sleep(0.02)
    process.send_signal(signal.SIGKILL)
    assert process.wait() == -signal.SIGKILL, "the run ended before it could be killed"
    done = train(corpus, tmp_path / "killed", *flags, updates=30)
    assert "Loaded checkpoint" in done.stdout + done.stderr
    assert_bit_equal(parameters(tmp_path / "whole"), parameters(tmp_path / "killed"))


def test_update_freq_and_clip_and_checkpointing(corpus, tmp_path):
    """Activation checkpointing does not change a bit of training with accumulation and clipping."""
    flags = ["--rpe", "fire", "--update-freq", "2", "--clip-norm", "0.1", "--dropout", "0.1"]
    flags += ["--attention-dropout", "0.1"]
    train_here(corpus, tmp_path / "plain", *flags)
    train_here(corpus, tmp_path / "again", *flags, "--checkpoint-activations")
    assert_bit_equal(parameters(tmp_path / "plain"), parameters(tmp_path / "again"))


def test_adaptive(corpus, tmp_path):
    flags = ["--adaptive-input", "--adaptive-input-cutoff", "100,200", "--adaptive-softmax-cutoff", "100,200"]
    flags += ["--tie-adaptive-weights", "--decoder-input-dim", "32", "--decoder-output-dim", "32"]
    said = train_here(corpus, tmp_path, "--rpe", "alibi", *flags, "--ddp-backend", "legacy_ddp")
    assert "computing fairseq's adaptive_loss" in said
    assert "scored tokens" in evaluate_here(corpus, tmp_path / "checkpoint_last.pt", 64)


def test_bf16_and_amp(corpus, tmp_path):
    for flag in ("--bf16", "--amp"):
        train_here(corpus, tmp_path / flag, "--rpe", "kerple_log", flag, updates=3)
        assert all(torch.isfinite(p).all() for p in parameters(tmp_path / flag).values())


def test_hydra_train(corpus, tmp_path):
    from conftest import run

    config = f"""
common: {{user_dir: {PACKAGE}, cpu: true, log_format: simple}}
task: {{_name: language_modeling, data: {corpus}, tokens_per_sample: 32}}
model: {{_name: transformer_rpe_lm, rpe: "type1:form=paper", decoder_layers: 1, decoder_embed_dim: 32,
  decoder_input_dim: 32, decoder_output_dim: 32, decoder_ffn_embed_dim: 64, decoder_attention_heads: 4,
  decoder_normalize_before: true}}
criterion: {{_name: lm_cross_entropy}}
optimizer: {{_name: adam}}
lr_scheduler: {{_name: fixed}}
dataset: {{batch_size: 4}}
optimization: {{max_update: 3, lr: [0.003]}}
checkpoint: {{save_dir: {tmp_path / "out"}, no_epoch_checkpoints: true}}
"""
    (tmp_path / "run.yaml").write_text("# @package _global_\n" + config)
    command = "import sys; from fairseq_cli.hydra_train import cli_main; cli_main()"
    run(sys.executable, "-c", command, "--config-dir", tmp_path, "--config-name", "run", cwd=tmp_path)
    state = torch.load(tmp_path / "out" / "checkpoint_last.pt")
    assert state["cfg"]["model"]["rpe"] == "type1:form=paper"
    assert state["cfg"]["model"]["rpe_train_length"] == 32
    total = tokens_in(corpus, "test")
    assert f"scored tokens: {total} of {total}" in evaluate_here(corpus, tmp_path / "out" / "checkpoint_last.pt", 500)


def test_an_encoding_of_ones_own_is_one_file(corpus, tmp_path):
    """Write one file; train, evaluate and look at it; nothing else is touched."""
    file = tmp_path / "root.py"
    file.write_text(OWN)
    train(corpus, tmp_path / "out", "--rpe", "test_root", "--rpe-module", file)
    checkpoint = tmp_path / "out" / "checkpoint_best.pt"
    without = evaluate(corpus, checkpoint, 400, ok=False)
    assert "error: unknown encoding 'test_root'" in without and "--rpe-module FILE" in without
    assert "scored tokens" in evaluate_here(corpus, checkpoint, 400, "--rpe-module", file)
    encodings.load_module(file)
    profile = encodings.build("test_root", heads=8, width=512).profile(5)
    assert torch.allclose(profile[0], -math.log(2) * torch.arange(5, dtype=torch.float64).sqrt())


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (["--rpe", "typ1"], "unknown encoding 'typ1' (did you mean 'type1'?)"),
        (["--rpe", "type1:frm=paper"], "no option 'frm' (did you mean 'form'?)"),
        (["--rpe", "window:window=0"], "must be at least 1, not 0"),
        (["--rpe", "alibi", "--attention-backend", "flash"], "unknown attention backend 'flash'"),
        (["--rpe", "alibi", "--rpe-module", "/nowhere/mine.py"], "--rpe-module /nowhere/mine.py: no such file"),
        (["--rpe", "alibi", "--decoder-learned-pos"], "use --rpe learned instead"),
    ],
)
def test_bad_flags_are_refused(corpus, tmp_path, monkeypatch, flags, words):
    from fairseq_cli.train import cli_main

    argv = ["fairseq-train", corpus, *TRAIN_FLAGS, "--save-dir", tmp_path / "out", *flags]
    monkeypatch.setattr(sys, "argv", [str(word) for word in argv])
    with pytest.raises(UserError, match=re.escape(words)) as caught:
        cli_main()
    assert "\n" not in str(caught.value) and not list(tmp_path.rglob("*.pt"))


def test_a_refusal_is_one_line(corpus, tmp_path):
    done = train(corpus, tmp_path / "out", "--rpe", "typ1", ok=False)
    assert done.returncode != 0
    assert done.stderr.strip().split("\n")[-1].startswith("error: unknown encoding 'typ1' (did you mean")
    assert "Traceback" not in done.stderr and not list(tmp_path.rglob("*.pt"))


def test_missing_data_and_checkpoint(corpus, trained, tmp_path, monkeypatch):
    from fairseq_cli.train import cli_main

    argv = ["fairseq-train", tmp_path / "nothing", *TRAIN_FLAGS, "--save-dir", tmp_path / "out", "--rpe", "alibi"]
    monkeypatch.setattr(sys, "argv", [str(word) for word in argv])
    with pytest.raises(UserError, match=r"nothing: no dict\.txt there"):
        cli_main()
    with pytest.raises(UserError, match="no split 'exam' there"):
        evaluate_here(corpus, trained / "checkpoint_best.pt", 32, "--gen-subset", "exam")
    with pytest.raises(UserError, match=r"absent\.pt does not exist"):
        evaluate_here(corpus, tmp_path / "absent.pt", 32)


def test_checkpoint_of_another_model(corpus, trained, tmp_path):
    done = train(corpus, tmp_path, "--rpe", "alibi", "--restore-file", trained / "checkpoint_last.pt", ok=False)
    assert done.returncode != 0 and "Traceback" not in done.stderr
    assert "error: the checkpoint does not fit this model" in done.stderr


def test_learned_beyond_its_table(corpus, tmp_path):
    train_here(corpus, tmp_path, "--rpe", "learned", updates=1)
    with pytest.raises(UserError, match="position 63 is beyond the 32 positions"):
        evaluate_here(corpus, tmp_path / "checkpoint_last.pt", 64)
