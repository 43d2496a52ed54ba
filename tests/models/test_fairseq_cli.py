"""The plugin under fairseq's own commands; before a release also as processes, as users run them."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest
import torch
from conftest import PACKAGE, TRAIN_FLAGS, assert_equal_models, run, run_here
from in_process import fairseq
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from fairseq_rpe.data import folder as corpus_files

PLUGIN = ["--user-dir", str(PACKAGE)]
PROCESS = (sys.executable, "-m")
ENCODING = """
import torch
from fairseq_rpe.encodings import DistanceBias, register

@register("test_root")
class Root(DistanceBias):
    def setup(self):
        self.raw = torch.nn.Parameter(torch.zeros(self.heads, 1))

    def bias(self, d):
        return -self.raw.exp().to(d) * d.sqrt()
"""


def training(corpus: Path, folder: Path, *flags: object, updates: int = 2) -> list[str]:
    words = [corpus, *TRAIN_FLAGS, "--max-update", updates, "--save-dir", folder, *flags]
    return [str(word) for word in words]


def train(corpus: Path, folder: Path, *flags: object, updates: int = 2) -> str:
    return fairseq("train", *training(corpus, folder, *flags, updates=updates)).stdout


def evaluation(corpus: Path, checkpoint: Path, length: int, *flags: object) -> list[str]:
    words = [corpus, *PLUGIN, "--path", checkpoint, "--tokens-per-sample", length, "--gen-subset", "test", "--cpu"]
    return [str(word) for word in (*words, "--num-workers", "0", *flags)]


def evaluate(corpus: Path, checkpoint: Path, length: int, *flags: object) -> str:
    return fairseq("eval_lm", *evaluation(corpus, checkpoint, length, *flags)).stdout


def refusal(command: str, *flags: object) -> str:
    """The last line of standard error, of a program that fails without a traceback."""
    done = fairseq(command, *map(str, flags), ok=False)
    assert done.returncode == 1 and "Traceback" not in done.stderr, done.stderr
    line = done.stderr.strip().splitlines()[-1]
    assert line.startswith("error: ")
    return line


def all_scored(corpus: Path, said: str) -> bool:
    total = corpus_files.count_tokens(corpus, "test")
    return f"scored tokens: {total} of {total}" in said


@pytest.fixture(scope="module")
def learned(corpus, made_once) -> Path:
    """A kerple_log run of six updates with TensorBoard logs, trained at 32 tokens."""

    def fill(folder: Path) -> None:
        log = train(corpus, folder, "--rpe", "kerple_log", "--tensorboard-logdir", folder / "tb", updates=6)
        (folder / "log.txt").write_text(log)

    return made_once("kerple-log", fill)


@pytest.mark.release
def test_a_training_as_a_process_gives_the_same_model(corpus, learned, tmp_path):
    run(*PROCESS, "fairseq_cli.train", *training(corpus, tmp_path, "--rpe", "kerple_log", updates=6))
    assert_equal_models(tmp_path / "checkpoint_last.pt", learned / "checkpoint_last.pt")


@pytest.mark.release
def test_an_evaluation_as_a_process_scores_every_token(corpus, learned):
    """The module of the command is ``__main__`` there."""
    done = run(*PROCESS, "fairseq_cli.eval_lm", *evaluation(corpus, learned / "checkpoint_best.pt", 32))
    assert all_scored(corpus, done.stdout + done.stderr)


def test_any_length_scores_every_token(corpus, learned):
    said = evaluate(corpus, learned / "checkpoint_best.pt", 2304)
    assert all_scored(corpus, said) and float(re.search(r"Perplexity: ([\d.]+)", said).group(1)) > 1


def test_eval_lm_agrees_with_training(corpus, learned):
    """fairseq-eval-lm on the valid set gives the loss that training printed for it."""
    logged = float(re.findall(r"valid on 'valid' subset \| loss ([\d.]+)", (learned / "log.txt").read_text())[-1])
    said = evaluate(corpus, learned / "checkpoint_last.pt", 32, "--gen-subset", "valid")
    assert float(re.search(r"Loss \(base 2\): ([\d.]+)", said).group(1)) == pytest.approx(logged, abs=2e-3)


def test_tensorboard_shows_learned_parameters(learned):
    for part, group in (("train_inner", "3_training"), ("valid", "2_validation")):
        events = EventAccumulator(str(learned / "tb" / part)).Reload()
        parameters = {f"4_encoding/{name}" for name in ("rpe_p_l0", "rpe_p_h1", "rpe_a_h4")}
        assert {f"{group}/loss", f"{group}/ppl", *parameters} <= set(events.Tags()["scalars"]), part
        assert all(0 < e.value < 3 for e in events.Scalars("4_encoding/rpe_p_l0"))


def test_context_window(corpus, learned):
    flags = evaluation(corpus, learned / "checkpoint_best.pt", 32, "--context-window", 16)
    assert all_scored(corpus, fairseq("eval_lm", *flags).stdout)
    said = refusal("eval_lm", *flags, "--num-workers", 2)
    assert "--context-window is wrong with more than one worker" in said


def test_stock_model_that_drops_blocks_is_refused(corpus, tmp_path):
    """fairseq's own transformer_lm prints perplexity 1.00 over zero tokens here; under the plugin it is an error."""
    sizes = ["--decoder-layers", 1, "--decoder-attention-heads", 2, "--decoder-input-dim", 32]
    train(corpus, tmp_path, "--arch", "transformer_lm", *sizes, "--decoder-output-dim", 32, updates=1)
    said = refusal("eval_lm", *evaluation(corpus, tmp_path / "checkpoint_last.pt", 64))
    assert re.search(r"scored \d+ of \d+ tokens", said)


def test_generation(corpus, learned):
    """fairseq-interactive and fairseq-generate decode with the cache."""
    flags = [*PLUGIN, "--task", "language_modeling", "--path", learned / "checkpoint_best.pt", "--cpu", "--beam", "3"]
    assert "H-0" in fairseq("interactive", corpus, *flags, "--max-len-b", "9", input="the house\n").stdout
    flags += ["--gen-subset", "test", "--max-len-b", "24", "--batch-size", "40", "--tokens-per-sample", "32"]
    done = fairseq("generate", corpus, *flags, "--sample-break-mode", "eos")
    assert done.stdout.count("\nH-") == len(corpus_files.read_split(corpus, "test")[1])


def test_update_freq_and_clip_and_checkpointing(corpus, tmp_path):
    """Activation checkpointing does not change a bit of training with accumulation and clipping."""
    flags = ["--rpe", "fire", "--update-freq", 2, "--clip-norm", 0.1, "--dropout", 0.1, "--attention-dropout", 0.1]
    train(corpus, tmp_path / "plain", *flags, updates=3)
    train(corpus, tmp_path / "again", *flags, "--checkpoint-activations", updates=3)
    assert_equal_models(*(tmp_path / folder / "checkpoint_last.pt" for folder in ("plain", "again")))


def test_adaptive(corpus, tmp_path):
    flags = ["--adaptive-input", "--adaptive-input-cutoff", "100,200", "--adaptive-softmax-cutoff", "100,200"]
    flags += ["--tie-adaptive-weights", "--decoder-input-dim", 32, "--decoder-output-dim", 32]
    said = train(corpus, tmp_path, "--rpe", "alibi", *flags, "--ddp-backend", "legacy_ddp")
    assert "computing fairseq's adaptive_loss" in said
    assert all_scored(corpus, evaluate(corpus, tmp_path / "checkpoint_last.pt", 64))


@pytest.mark.parametrize("flag", ["--bf16", "--amp"])
def test_bf16_and_amp(corpus, tmp_path, flag):
    train(corpus, tmp_path, "--rpe", "kerple_log", flag)
    assert all(torch.isfinite(p).all() for p in torch.load(tmp_path / "checkpoint_last.pt")["model"].values())


def test_hydra_train(corpus, tmp_path, monkeypatch):
    config = f"""# @package _global_
hydra: {{run: {{dir: {tmp_path}}}}}
common: {{user_dir: {PACKAGE}, cpu: true, log_format: simple}}
task: {{_name: language_modeling, data: {corpus}, tokens_per_sample: 32}}
model: {{_name: transformer_rpe_lm, rpe: "type1:variant=paper", decoder_layers: 1, decoder_embed_dim: 32,
  decoder_input_dim: 32, decoder_output_dim: 32, decoder_ffn_embed_dim: 64, decoder_attention_heads: 4,
  decoder_normalize_before: true}}
criterion: {{_name: lm_cross_entropy}}
optimizer: {{_name: adam}}
lr_scheduler: {{_name: fixed}}
dataset: {{batch_size: 4}}
optimization: {{max_update: 2, lr: [0.003]}}
checkpoint: {{save_dir: {tmp_path / "out"}, no_epoch_checkpoints: true}}
"""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "run.yaml").write_text(config)
    fairseq("hydra_train", "--config-dir", tmp_path, "--config-name", "run", "hydra/job_logging=none")
    state = torch.load(tmp_path / "out" / "checkpoint_last.pt")
    assert state["cfg"]["model"]["rpe"] == "type1:variant=paper"
    assert state["cfg"]["model"]["rpe_train_length"] == 32
    assert all_scored(corpus, evaluate(corpus, tmp_path / "out" / "checkpoint_last.pt", 500))


def test_an_encoding_in_a_file_is_trained_and_evaluated(corpus, tmp_path):
    file = tmp_path / "root.py"
    file.write_text(ENCODING)
    train(corpus, tmp_path / "out", "--rpe", "test_root", "--rpe-module", file)
    flags = evaluation(corpus, tmp_path / "out" / "checkpoint_best.pt", 400)
    said = refusal("eval_lm", *flags)
    assert "unknown encoding 'test_root'" in said and "--rpe-module FILE" in said
    assert all_scored(corpus, fairseq("eval_lm", *flags, "--rpe-module", file).stdout)


@pytest.mark.parametrize(
    ("flags", "words"),
    {
        "typ1": "unknown encoding 'typ1' (did you mean 'type1'?)",
        "alibi --attention-backend flash": "unknown attention backend 'flash'",
        "alibi --rpe-module /nowhere/mine.py": "--rpe-module /nowhere/mine.py: no such file",
        "alibi --decoder-learned-pos": "use --rpe learned instead",
        "alibi --ddp-backend fully_sharded": "raise --update-freq",
        "alibi --nonsense": "unrecognized arguments: --nonsense: the --help of",
        "rope --rpe-eval alibi": "--rpe-eval belongs to evaluation: train with --rpe",
    }.items(),
)
def test_bad_flags_are_refused(corpus, tmp_path, flags, words):
    assert words in refusal("train", *training(corpus, tmp_path / "out", "--rpe", *flags.split()))
    assert not list(tmp_path.rglob("*.pt"))


def test_an_encoding_of_evaluation_is_refused_after_two_minus(corpus, tmp_path):
    words = ["train", corpus, "--rpe", "rope", "--tokens", "32", "--updates", "5", "--out", tmp_path / "run"]
    done = run_here(*words, "--", "--rpe-eval=zzz", ok=False)
    assert done.returncode == 2 and "--rpe-eval after -- belongs to evaluation" in done.stderr
    assert not (tmp_path / "run").exists()


def test_missing_data_and_checkpoint(corpus, learned, tmp_path):
    command = training(tmp_path / "nothing", tmp_path / "out", "--rpe", "alibi")
    assert re.search(r"nothing: no dict\.txt there", refusal("train", *command))
    command = training(corpus, tmp_path, "--rpe", "alibi", "--restore-file", learned / "checkpoint_last.pt")
    assert "the checkpoint does not fit this model" in refusal("train", *command)
    for name, flags, words in (
        ("checkpoint_best.pt", ["--gen-subset", "exam"], "no split 'exam' there"),
        ("checkpoint_best.pt", ["--max-tokens", 31], "--max-tokens 31 is less than a block of 32 tokens"),
        ("absent.pt", [], "absent.pt does not exist"),
    ):
        assert words in refusal("eval_lm", *evaluation(corpus, learned / name, 32, *flags))
