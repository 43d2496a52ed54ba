"""Optimiser, schedule and model by options: what fairseq-train gets of them, and which make a run another one."""

from __future__ import annotations

from dataclasses import fields, replace
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
import torch

from fairseq_rpe.core import records
from fairseq_rpe.core.errors import UserError
from fairseq_rpe.runs import launch
from fairseq_rpe.runs.further import LATER
from fairseq_rpe.runs.settings import USUAL, Request, Settings, plan

if TYPE_CHECKING:
    from fairseq.optim.lr_scheduler import FairseqLRScheduler

ASKED = Request(rpe="alibi", save_dir=Path("x"), data=Path("d"), device="cpu")
OTHERS = {"min_lr": 1e-4, "betas": (0.9, 0.95), "weight_decay": 0.0, "clip_norm": 0.0, "attention_dropout": 0.1}
OTHERS |= {"activation_dropout": 0.2, "activation_fn": "gelu", "share_embeddings": True}
# run.json of a tiny model as it was written before there were these options
BEFORE = {"rpe": "alibi", "arch": "transformer_rpe_lm_tiny", "data": "digest", "tokens": 64, "batch_sentences": 16}
BEFORE |= {"lr": 0.002, "warmup": 80, "dropout": 0.0, "update_freq": 1, "nproc": 1, "seed": 1, "rpe_share": "auto"}
BEFORE |= {"positions_train": "identity", "positions_eval": None, "rpe_module": None, "extra": []}


def flags(**asked: object) -> list[str]:
    request = replace(ASKED, **asked)
    return launch.command(request, plan(request, "digest"), launch.Node(), 0)


def value(command: list[str], flag: str) -> str:
    assert command.count(flag) == 1
    return command[command.index(flag) + 1]


def test_blocks_of_documents_are_batched_by_the_tokens_of_full_ones():
    command = flags(blocks="document", tokens=64, batch_sentences=16)
    assert (value(command, "--task"), value(command, "--blocks")) == ("rpe_language_modeling", "document")
    assert value(command, "--max-tokens") == "1024" and "--batch-size" not in command
    assert value(command, "--required-batch-size-multiple") == "1"


def test_separate_documents_are_blocks_of_a_stream():
    command = flags(separate_documents=True, batch_sentences=16)
    assert (value(command, "--task"), value(command, "--blocks")) == ("rpe_language_modeling", "stream")
    assert "--separate-documents" in command and value(command, "--batch-size") == "16"
    assert flags(separate_documents=False) == flags()
    assert plan(replace(ASKED, separate_documents=True), "digest").settings.record()["separate_documents"] is True


def test_a_stream_is_what_runs_had_before_there_was_a_choice():
    assert flags(blocks="stream") == flags()
    assert "blocks" not in plan(replace(ASKED, blocks="stream"), "digest").settings.record()
    document = plan(replace(ASKED, blocks="document"), "digest").settings
    assert document.record()["blocks"] == "document"
    before = records.read(Settings, BEFORE, "run.json", "the run")
    other = replace(document, data=before.data, lr=before.lr, warmup=before.warmup).difference(before)
    assert other == "blocks is 'stream' there, 'document' here"


@pytest.mark.parametrize(
    ("asked", "words"),
    [
        ({"blocks": "document", "extra": ("--sample-break-mode", "eos")}, ["--sample-break-mode", "--blocks document"]),
        ({"blocks": "stream", "extra": ("--sample-break-mode=eos",)}, ["--sample-break-mode", "--blocks stream"]),
        ({"blocks": "document", "extra": ("--max-tokens", "99")}, ["--max-tokens", "--batch-sentences"]),
        ({"extra": ("--blocks", "document")}, ["give --blocks before the --"]),
        ({"blocks": "document", "data": None, "algorithm": "copy"}, ["--blocks document is for text"]),
        ({"separate_documents": True, "data": None, "algorithm": "copy"}, ["--separate-documents is for text"]),
        ({"blocks": "document", "separate_documents": True}, ["--separate-documents is for --blocks stream"]),
        ({"separate_documents": True, "extra": ("--sample-break-mode", "eos")}, ["--sample-break-mode"]),
        ({"extra": ("--separate-documents",)}, ["give --separate-documents before the --"]),
    ],
)
def test_what_contradicts_blocks_is_refused(asked, words):
    with pytest.raises(UserError) as caught:
        flags(**asked)
    assert all(word in str(caught.value) for word in words)


def test_each_has_another_value_here():
    assert set(OTHERS) == set(LATER) == {*USUAL, "activation_fn"}
    assert all(OTHERS[name] != USUAL.get(name) for name in OTHERS)


def test_runs_of_before_are_the_same_runs():
    """With nothing said, and with the old values said."""
    old = {**USUAL, "activation_fn": "relu"}
    del old["min_lr"]  # goes with a cosine only
    for asked in (ASKED, replace(ASKED, **old)):
        settings = plan(asked, "digest").settings
        assert settings.record() == BEFORE
        assert settings.difference(records.read(Settings, BEFORE, "run.json", "the run", strict=False)) == ""


@pytest.mark.parametrize("name", OTHERS)
def test_each_makes_another_run_and_comes_back_from_its_record(name):
    cosine = {"schedule": "cosine"} if name == "min_lr" else {}
    settings = plan(replace(ASKED, **cosine, **{name: OTHERS[name]}), "digest").settings
    again = records.read(Settings, settings.record(), "run.json", "the run", strict=False)
    assert settings.difference(again) == "" and again.usual(name) == OTHERS[name]
    record = {**BEFORE, **cosine, **({"last_update": 400} if cosine else {})}
    before = records.read(Settings, record, "", "")
    assert f"{name} is {before.usual(name)!r} there, {OTHERS[name]!r} here" == settings.difference(before)


def test_what_fairseq_gets():
    usual, other = flags(), flags(schedule="cosine", **OTHERS)
    assert value(usual, "--adam-betas") == "(0.9, 0.98)" and value(other, "--adam-betas") == "(0.9, 0.95)"
    assert value(usual, "--weight-decay") == "0.01" and value(other, "--weight-decay") == "0.0"
    assert value(usual, "--clip-norm") == "1.0" and value(other, "--clip-norm") == "0.0"
    assert value(usual, "--lr-scheduler") == "inverse_sqrt" and value(other, "--lr-scheduler") == "cosine"
    new = {"--min-lr": "0.0001", "--attention-dropout": "0.1", "--activation-dropout": "0.2", "--activation-fn": "gelu"}
    assert {flag: value(other, flag) for flag in new} == new and not set(new) & set(usual)
    assert "--share-decoder-input-output-embed" in other and "--share-decoder-input-output-embed" not in usual


@pytest.mark.parametrize("name", OTHERS)
def test_the_words_for_train_ask_for_the_same(name):
    from fairseq_rpe.cli.main import build_parser

    asked = replace(ASKED, **{name: OTHERS[name]})
    args = build_parser().parse_args(["train", *asked.argv()])
    assert records.filled(Request, args) == asked
    assert {f.name for f in fields(Request)} >= set(LATER)


def test_a_flag_after_the_dashes_goes_on_alone_but_not_beside_its_option():
    for name, (flag, *_) in LATER.items():
        extra = (flag, "1")
        assert flags(extra=extra)[-2:] != [] and plan(replace(ASKED, extra=extra), "").settings.extra == extra
        with pytest.raises(UserError, match=f"{flag} after -- is set already: give --{name.replace('_', '-')} before"):
            plan(replace(ASKED, extra=extra, **{name: OTHERS[name]}), "")
    with pytest.raises(UserError, match="--lr-scheduler after -- is set already: give --schedule before"):
        plan(replace(ASKED, extra=("--lr-scheduler", "fixed"), schedule="cosine"), "")


@pytest.mark.parametrize(
    ("asked", "words"),
    [
        ({"min_lr": 1e-5}, "--min-lr is where a cosine ends"),
        ({"min_lr": 1.0, "schedule": "cosine"}, "--min-lr 1 is not below --lr 0.002"),
        ({"warmup": 400, "schedule": "cosine"}, "a warm-up of 400 is not below the 400 updates"),
    ],
)
def test_a_cosine_that_is_none_is_refused(asked, words):
    with pytest.raises(UserError, match=words):
        plan(replace(ASKED, **asked), "")


TOO_LONG = [{"warmup": 100, "updates": 100}, {"warmup": 101, "updates": 100, "schedule": "linear"}, {"warmup": 400}]
TOO_LONG += [{"warmup": 3000, "algorithm": "copy", "data": None}]


@pytest.mark.parametrize(("updates", "warmup"), [(None, 80), (400, 80), (5000, 80), (100, 20), (7, 1), (2, 1)])
def test_the_default_warmup_takes_at_most_a_fifth_of_the_updates(updates, warmup):
    assert plan(replace(ASKED, updates=updates), "").settings.warmup == warmup


@pytest.mark.parametrize("asked", TOO_LONG)
def test_a_warmup_that_takes_all_updates_is_refused(asked):
    with pytest.raises(UserError, match="a warm-up of .* is not below the .* updates .*lower --warmup or raise"):
        plan(replace(ASKED, **asked), "")


def test_a_training_of_one_update_is_refused():
    with pytest.raises(UserError, match="raise --updates to at least 2"):
        plan(replace(ASKED, updates=1), "")


def test_a_warmup_below_the_updates_is_kept_as_stated():
    assert plan(replace(ASKED, warmup=99, updates=100), "").settings.warmup == 99


def test_the_last_update_of_the_default_warmup_comes_before_the_peak_learning_rate():
    """In each of fairseq's own schedules; a rate belongs to the number of updates before it."""
    for schedule in ("inverse_sqrt", "linear", "cosine"):
        built = schedule_of(flags(schedule=schedule, updates=50, lr=6e-4))
        rates = [built.step_update(n) for n in range(50)]
        assert rates.index(max(rates)) == 10 and max(rates) == pytest.approx(6e-4), schedule


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


def test_the_cosine_that_fairseq_takes():
    """Linear to the peak, half of the way down in the middle of the rest, near its least at the end."""
    schedule = schedule_of(flags(schedule="cosine", min_lr=6e-5, lr=6e-4, warmup=100, updates=1100, betas=(0.9, 0.95)))
    assert schedule.optimizer.optimizer_config["betas"] == (0.9, 0.95)
    rates = {n: schedule.step_update(n) for n in (50, 100, 600, 1099)}
    assert rates == pytest.approx({50: 3e-4, 100: 6e-4, 600: 3.3e-4, 1099: 6e-5}, rel=2e-3)
