"""Optimiser, schedule and model by options: what fairseq-train gets of them, and which make a run another one."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
import torch
from sweep_commands import parser

from fairseq_rpe.cli.train import stated_settings
from fairseq_rpe.core.errors import UserError
from fairseq_rpe.runs import launch
from fairseq_rpe.runs.settings import RunSettings, make_plan
from fairseq_rpe.runs.training_config import OVERRIDABLE, SETTINGS, TrainingConfig, option_name
from fairseq_rpe.utils import records

if TYPE_CHECKING:
    from fairseq.optim.lr_scheduler import FairseqLRScheduler

ASKED = TrainingConfig(rpe="alibi", out=Path("x"), data=Path("d"), device="cpu")
OTHERS = {"min_lr": 1e-4, "betas": (0.9, 0.95), "weight_decay": 0.0, "clip_norm": 0.0, "attention_dropout": 0.1}
OTHERS |= {"activation_dropout": 0.2, "activation_fn": "gelu", "share_embeddings": True, "bias": "qkv"}
# any other number that a field may get
OTHERS |= {
    name: 2 * default
    for name in OVERRIDABLE
    if name not in OTHERS and isinstance(default := SETTINGS[name].default, float)
}
# run.json of a tiny model as it was written before there were these options
BEFORE = {"rpe": "alibi", "arch": "transformer_rpe_lm_tiny", "data": "digest", "tokens": 64, "batch_sentences": 16}
BEFORE |= {"lr": 0.002, "warmup": 80, "dropout": 0.0, "update_freq": 1, "nproc": 1, "seed": 1, "rpe_share": "auto"}
BEFORE |= {"positions_train": "identity", "positions_eval": None, "rpe_module": None, "extra": []}


def settings(**asked: object) -> RunSettings:
    return make_plan(replace(ASKED, **asked), "digest").settings


def flags(**asked: object) -> list[str]:
    request = replace(ASKED, **asked)
    return launch.training_command(request, make_plan(request, "digest"), launch.Node(), 0)


def values(command: list[str], *names: str) -> list[str]:
    assert all(command.count(name) == 1 for name in names)
    return [command[command.index(name) + 1] for name in names]


def read(record: dict[str, object]) -> RunSettings:
    return records.read_record(RunSettings, record, "run.json", "the run", strict=False)


def test_blocks_of_documents_are_batched_by_the_tokens_of_full_ones():
    command = flags(blocks="document", tokens=64, batch_sentences=16)
    assert values(command, "--task", "--blocks") == ["rpe_language_modeling", "document"]
    assert values(command, "--max-tokens", "--required-batch-size-multiple") == ["1024", "1"]
    assert "--batch-size" not in command


def test_separate_documents_are_blocks_of_a_stream():
    command = flags(separate_documents=True, batch_sentences=16)
    assert values(command, "--task", "--blocks", "--batch-size") == ["rpe_language_modeling", "stream", "16"]
    assert "--separate-documents" in command and flags(separate_documents=False) == flags()
    assert settings(separate_documents=True).to_dict()["separate_documents"] is True


def test_a_stream_is_what_runs_had_before_there_was_a_choice():
    assert flags(blocks="stream") == flags() and "blocks" not in settings(blocks="stream").to_dict()
    document, before = settings(blocks="document"), read(BEFORE)
    assert document.to_dict()["blocks"] == "document"
    assert document.difference(before) == "blocks is 'stream' there, 'document' here"


TASK = {"data": None, "algorithm": "copy"}


@pytest.mark.parametrize(
    ("asked", "words"),
    [
        ({"blocks": "document", "extra": ("--sample-break-mode", "eos")}, ["--sample-break-mode", "--blocks document"]),
        ({"blocks": "stream", "extra": ("--sample-break-mode=eos",)}, ["--sample-break-mode", "--blocks stream"]),
        ({"blocks": "document", "extra": ("--max-tokens", "99")}, ["--max-tokens", "--batch-sentences"]),
        ({"extra": ("--blocks", "document")}, ["give --blocks before the --"]),
        ({"blocks": "document", **TASK}, ["--blocks document is for text"]),
        ({"separate_documents": True, **TASK}, ["--separate-documents is for text"]),
        ({"blocks": "document", "separate_documents": True}, ["--separate-documents is for --blocks stream"]),
        ({"separate_documents": True, "extra": ("--sample-break-mode", "eos")}, ["--sample-break-mode"]),
        ({"extra": ("--separate-documents",)}, ["give --separate-documents before the --"]),
        ({"extra": ("--lr-scheduler", "fixed"), "schedule": "cosine"}, ["give --schedule before"]),
        ({"min_lr": 1e-5}, ["--min-lr is for --schedule cosine"]),
        ({"min_lr": 1.0, "schedule": "cosine"}, ["--min-lr 1 is not below --lr 0.002"]),
        ({"warmup": 400}, ["a warm-up of 400 is not below the 400 updates", "lower --warmup or raise"]),
        ({"warmup": 101, "updates": 100, "schedule": "linear"}, ["a warm-up of 101 is not below the 100 updates"]),
        ({"warmup": 400, "schedule": "cosine"}, ["a warm-up of 400 is not below the 400 updates"]),
        ({"warmup": 3000, **TASK}, ["a warm-up of 3000 is not below the"]),
        ({"updates": 1}, ["raise --updates to at least 2"]),
    ],
)
def test_what_contradicts_itself_is_refused(asked, words):
    with pytest.raises(UserError) as caught:
        flags(**asked)
    assert all(word in str(caught.value) for word in words)


def test_runs_of_before_are_the_same_runs():
    """With nothing said, and with the old values said."""
    defaults = {name: s.default for name, s in SETTINGS.items() if s.is_recorded_if_changed}
    defaults |= {"activation_fn": "relu", "norm": "layernorm", "block_init": "fairseq"}
    defaults |= {"norm_position": "pre", "bias": "yes", "qk_norm": "none"}
    defaults |= {"kv_heads": None, "head_dim": None}  # which have no default of their own
    del defaults["min_lr"]  # which goes with a cosine only
    for found in (settings(), settings(**defaults)):
        assert found.to_dict() == BEFORE and found.difference(read(BEFORE)) == ""


@pytest.mark.parametrize("name", OTHERS)
def test_each_makes_another_run_and_comes_back_from_its_record_and_from_the_words_for_train(name):
    assert {*OTHERS, "schedule", "finetune_from"} == set(OVERRIDABLE) and OTHERS[name] != SETTINGS[name].default
    cosine = {"schedule": "cosine"} if name == "min_lr" else {}
    found = settings(**cosine, **{name: OTHERS[name]})
    again = read(found.to_dict())
    assert found.difference(again) == "" and again.effective(name) == OTHERS[name]
    before = read({**BEFORE, **cosine, **({"last_update": 400} if cosine else {})})
    assert f"{name} is {before.effective(name)!r} there, {OTHERS[name]!r} here" == found.difference(before)
    asked = replace(ASKED, **{name: OTHERS[name]})
    assert TrainingConfig(**stated_settings(parser().parse_args(["train", *asked.argv()]))) == asked


def test_what_fairseq_gets():
    usual, other = flags(), flags(schedule="cosine", **OTHERS)
    names = ("--adam-betas", "--weight-decay", "--clip-norm", "--lr-scheduler")
    assert values(usual, *names) == ["(0.9, 0.98)", "0.01", "1.0", "inverse_sqrt"]
    assert values(other, *names) == ["(0.9, 0.95)", "0.0", "0.0", "cosine"]
    new = {"--min-lr": "0.0001", "--attention-dropout": "0.1", "--activation-dropout": "0.2", "--activation-fn": "gelu"}
    assert values(other, *new) == list(new.values()) and not set(new) & set(usual)
    assert "--share-decoder-input-output-embed" in other and "--share-decoder-input-output-embed" not in usual


def test_a_flag_after_the_dashes_goes_on_alone_but_not_beside_its_option():
    for name in OTHERS:
        flag = SETTINGS[name].flags[0]
        extra = (flag, "1")
        assert settings(extra=extra).extra == extra and " ".join(extra) in " ".join(flags(extra=extra))
        with pytest.raises(UserError, match=f"{flag} after -- is set already: give {option_name(name)} before"):
            settings(extra=extra, **{name: OTHERS[name]})


def test_the_default_warmup_takes_at_most_a_fifth_of_the_updates():
    for updates, warmup in ((None, 80), (400, 80), (5000, 80), (100, 20), (7, 1), (2, 1)):
        assert settings(updates=updates).warmup == warmup
    assert settings(warmup=99, updates=100).warmup == 99


def schedule_of(command: list[str]) -> FairseqLRScheduler:
    """The learning-rate schedule that fairseq builds from a command of fairseq-train."""
    from fairseq import options
    from fairseq.dataclass.utils import convert_namespace_to_omegaconf
    from fairseq.optim import build_optimizer
    from fairseq.optim.lr_scheduler import build_lr_scheduler

    import fairseq_rpe.models  # noqa: F401

    words = command[command.index("fairseq_rpe.runs.launch") + 1 :]
    del words[(at := words.index("--user-dir")) : at + 2]
    config = convert_namespace_to_omegaconf(options.parse_args_and_arch(options.get_training_parser(), words))
    optimizer = build_optimizer(config.optimizer, [torch.nn.Parameter(torch.zeros(1))])
    return build_lr_scheduler(config.lr_scheduler, optimizer)


def test_the_last_update_of_the_default_warmup_comes_before_the_peak_learning_rate():
    """In each of fairseq's own schedules; a rate belongs to the number of updates before it."""
    for schedule in ("inverse_sqrt", "linear", "cosine"):
        built = schedule_of(flags(schedule=schedule, updates=50, lr=6e-4))
        rates = [built.step_update(n) for n in range(50)]
        assert rates.index(max(rates)) == 10 and max(rates) == pytest.approx(6e-4), schedule


def test_the_cosine_that_fairseq_takes():
    """Linear to the peak, half of the way down in the middle of the rest, near its least at the end."""
    schedule = schedule_of(flags(schedule="cosine", min_lr=6e-5, lr=6e-4, warmup=100, updates=1100, betas=(0.9, 0.95)))
    assert schedule.optimizer.optimizer_config["betas"] == (0.9, 0.95)
    rates = {n: schedule.step_update(n) for n in (50, 100, 600, 1099)}
    assert rates == pytest.approx({50: 3e-4, 100: 6e-4, 600: 3.3e-4, 1099: 6e-5}, rel=2e-3)
