"""Checkpoints along one training: what is kept, what a sweep evaluates of it, and what the report shows."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch
from conftest import error_of, run_here
from hypothesis import given
from hypothesis import strategies as st
from sweep_commands import QUIET, SMALL, refused, table

from fairseq_rpe.checkpoints.checkpoint import load_checkpoint
from fairseq_rpe.compat.intermediate_checkpoints import parse_updates
from fairseq_rpe.core.errors import UserError
from fairseq_rpe.data.folder import count_tokens
from fairseq_rpe.reports.training_axis import curve_by_tokens, load_training_axis
from fairseq_rpe.runs.defaults import default_save_every
from fairseq_rpe.runs.run_folder import CheckpointFolder, RunFolder
from fairseq_rpe.sweeps.sweep_record import SweepFolder

TRAIN = ("--rpe", "alibi", "--tokens", "32", "--batch-sentences", "4", "--warmup", "1", "--device", "cpu")
SWEEP = ("--encodings", "alibi", "--tokens", "32", "--batch-sentences", "4", "--updates", "4", "--lengths", "32,64")


def weights(path: Path) -> dict[str, torch.Tensor]:
    return torch.load(path, weights_only=True)["model"]


@pytest.fixture(scope="module")
def swept(corpus, tmp_path_factory) -> Path:
    """A finished sweep whose training keeps updates 1 and 3."""
    out = tmp_path_factory.mktemp("axis") / "sweep"
    run_here("sweep", corpus, *SWEEP, "--evaluate-at", "3,1", "--device", "cpu", "--out", out, *QUIET)
    return out


def test_the_weights_after_an_update_are_those_of_a_training_that_ends_there(corpus, tmp_path):
    run_here("train", corpus, *TRAIN, "--updates", "5", "--keep-at", "2,5", "--out", tmp_path / "long", *QUIET)
    run_here("train", corpus, *TRAIN, "--updates", "2", "--out", tmp_path / "short", *QUIET)
    files = {n: tmp_path / f"long/intermediate/update_{n}.pt" for n in (2, 5)}
    lasts = {2: tmp_path / "short/checkpoint_last.pt", 5: tmp_path / "long/checkpoint_last.pt"}
    for updates, path in files.items():
        first, second = weights(path), weights(lasts[updates])
        assert all(torch.equal(first[name], second[name]) for name in first)
        assert "last_optimizer_state" not in torch.load(path, weights_only=True)
        assert load_checkpoint(path).num_updates == updates
    record = CheckpointFolder(tmp_path / "long").read_record()
    assert record is not None and set(record.finished.intermediate) == {"2", "5"}


def test_the_tokens_of_all_updates_are_counted_over_epochs(corpus, tmp_path):
    """One update of all blocks is one epoch."""
    flags = ("--rpe", "alibi", "--tokens", "512", "--batch-sentences", "1000", "--device", "cpu", "--updates", "2")
    run_here("train", corpus, *flags, "--keep-at", "1", "--out", tmp_path / "run", *QUIET)
    epoch = count_tokens(corpus, "train")
    assert load_checkpoint(tmp_path / "run/intermediate/update_1.pt").tokens_trained == epoch
    assert load_checkpoint(tmp_path / "run/checkpoint_last.pt").tokens_trained == 2 * epoch


def test_a_resumed_training_keeps_earlier_weights_and_replaces_those_that_it_computes_again(corpus, tmp_path):
    command = ("train", corpus, *TRAIN, "--out", tmp_path / "run", "--keep-at", "1,3")
    run_here("train", corpus, *TRAIN, "--out", tmp_path / "run", "--keep-at", "1", "--updates", "2", *QUIET)
    first = (tmp_path / "run/intermediate/update_1.pt").read_bytes()
    (tmp_path / "run/intermediate/update_3.pt").write_bytes(b"of updates after the last checkpoint")
    run_here(*command, "--updates", "4", *QUIET)
    assert (tmp_path / "run/intermediate/update_1.pt").read_bytes() == first
    third, last = (
        load_checkpoint(tmp_path / "run" / name) for name in ("intermediate/update_3.pt", "checkpoint_last.pt")
    )
    assert third.num_updates == 3 and 3 * 4 * 32 >= third.tokens_trained > 2 * 4 * 32
    assert last.tokens_trained > third.tokens_trained


def test_weights_that_a_training_did_not_keep_are_missing_in_one_line(corpus, tmp_path, capsys):
    out = tmp_path / "run"
    run_here("train", corpus, *TRAIN, "--out", out, "--updates", "2", *QUIET)
    for updates in ("2", "4"):  # of the finished training, and of one that goes on
        command = ("train", corpus, *TRAIN, "--out", out, "--updates", updates, "--keep-at", "1", *QUIET)
        message = error_of(capsys, *command)
        assert f"{out} is at update 2 and did not keep the weights of update 1" in message
        assert "leave 1 out of --keep-at" in message


@pytest.mark.parametrize("updates", ["2", "3"])
def test_weights_of_the_last_update_so_far_are_taken_from_its_checkpoint(updates, corpus, tmp_path):
    """The training is finished, or goes on."""
    out = tmp_path / "run"
    run_here("train", corpus, *TRAIN, "--out", out, "--updates", "2", *QUIET)
    before = weights(out / "checkpoint_last.pt")
    run_here("train", corpus, *TRAIN, "--out", out, "--updates", updates, "--keep-at", "2", *QUIET)
    kept = weights(out / "intermediate/update_2.pt")
    assert all(torch.equal(kept[name], value) for name, value in before.items())
    assert set(CheckpointFolder(out).read_record().finished.intermediate) == {"2"}


def test_another_run_is_refused_although_the_last_checkpoint_is_missing(corpus, tmp_path, capsys):
    out = tmp_path / "run"
    run_here("train", corpus, *TRAIN, "--out", out, "--updates", "2", *QUIET)
    (out / "checkpoint_last.pt").rename(out / "checkpoint_1_2.pt")  # as after a kill while the copy is written
    message = error_of(capsys, "train", corpus, *TRAIN, "--seed", "7", "--updates", "3", "--out", out, *QUIET)
    assert "holds another run" in message and not (out / "checkpoint_last.pt").exists()
    run_here("train", corpus, *TRAIN, "--updates", "3", "--out", out, *QUIET)
    assert load_checkpoint(out / "checkpoint_last.pt").num_updates == 3


def test_a_sweep_evaluates_the_checkpoints_of_one_training(swept):
    rows = table(swept / "training_axis.csv")
    assert [(row["updates"], row["length"]) for row in rows] == [(n, m) for n in "134" for m in ("32", "64")]
    run = RunFolder(swept / "runs/alibi-seed1")
    files = [run.checkpoints.intermediate_path(1), run.checkpoints.intermediate_path(3), run.checkpoints.last]
    tokens = [load_checkpoint(path).tokens_trained for path in files]
    assert [int(row["tokens trained"]) for row in rows[::2]] == tokens and tokens[0] == 4 * 32
    [at_32, at_64] = table(swept / "results.csv")
    assert [at_32["ppl"], at_64["ppl"]] == [row["perplexity"] for row in rows[-2:]]
    assert float(rows[1]["ratio"]) == pytest.approx(float(rows[1]["perplexity"]) / float(rows[0]["perplexity"]))
    assert len({row["perplexity"] for row in rows}) == 6
    assert (swept / "training_axis.png").exists()
    assert "Perplexity along the training" in (swept / "report.html").read_text()
    assert "by tokens trained" in (swept / "results.md").read_text()
    folder = SweepFolder(swept)
    points = load_training_axis(folder, folder.read_record())
    assert list(curve_by_tokens(points, "alibi", 1)) == tokens


def test_updates_are_added_without_another_training(swept, corpus, tmp_path):
    """Also a checkpoint that fairseq has kept at its interval is evaluated."""
    out = tmp_path / "sweep"
    shutil.copytree(swept, out)
    run = RunFolder(out / "runs/alibi-seed1")
    state = torch.load(run.checkpoints.last, weights_only=True)
    state["optimizer_history"][-1]["num_updates"] = 2
    torch.save(state, run.checkpoints.path / "checkpoint_1_2.pt")
    before, stamp = (out / "results.csv").read_text(), run.checkpoints.last.stat().st_mtime_ns
    command = ("sweep", corpus, *SWEEP, "--device", "cpu", "--out", out, "--evaluate-at", "2,4", *QUIET)
    run_here(*command)
    assert run.checkpoints.last.stat().st_mtime_ns == stamp and len(run.checkpoints.read_starts()) == 1
    assert (out / "results.csv").read_text() == before
    assert [row["updates"] for row in table(out / "training_axis.csv")] == list("11223344")
    count = len(run.results.read_text().splitlines())
    run_here(*command)
    assert len(run.results.read_text().splitlines()) == count == 8


def test_the_tokens_of_an_end_that_an_earlier_version_evaluated_follow_from_the_others(swept, tmp_path):
    copy = tmp_path / "sweep"
    shutil.copytree(swept, copy)
    path = copy / "runs/alibi-seed1/eval.jsonl"
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    old = [
        {k: v for k, v in row.items() if row["updates"] != 4 or k not in ("updates", "tokens_trained")} for row in rows
    ]
    path.write_text("".join(json.dumps(row) + "\n" for row in old))
    folder = SweepFolder(copy)
    tokens = {point.updates: point.tokens for point in load_training_axis(folder, folder.read_record())}
    assert tokens == {1: 128, 3: tokens[3], 4: round(tokens[3] / 3 * 4)}


def test_changed_weights_are_refused(swept, corpus, tmp_path):
    copy = tmp_path / "sweep"
    shutil.copytree(swept, copy)
    with open(copy / "runs/alibi-seed1/checkpoints/intermediate/update_1.pt", "ab") as file:
        file.write(b"x")
    message = refused(corpus, *SWEEP, "--evaluate-at", "1", "--out", copy, *QUIET)
    assert "update_1.pt was changed after its training" in message


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (("--evaluate-at", "2,9"), ["--evaluate-at 9 is beyond the 4 updates", "raise --updates"]),
        (("--evaluate-at", "2"), ["is at update 4 and did not keep the weights of update 2", "out of --evaluate-at"]),
    ],
)
def test_updates_that_cannot_be_evaluated_are_refused_before_anything_starts(swept, corpus, options, words):
    message = refused(corpus, *SWEEP, *options, "--out", swept, *QUIET)
    assert all(word in message for word in words)


def test_other_kinds_of_sweeps_and_continued_methods_have_no_axis_of_training(corpus, tmp_path):
    out = ("--out", tmp_path / "x", "--evaluate-at", "1")
    assert "--evaluate-at is about perplexities" in refused("--algorithms", "copy", "--encodings", "alibi", *out)
    extend = refused(corpus, "--recipe", "fire-lm-stretched", "--methods", "rope rope-pi", *out)
    assert "--evaluate-at is for methods that continue no other" in extend and "rope-pi" in extend


def test_a_beyond_update_and_a_wrong_flag_are_refused(corpus, tmp_path, capsys):
    message = error_of(capsys, "train", corpus, *TRAIN, "--updates", "4", "--keep-at", "5", "--out", tmp_path, *SMALL)
    assert "--keep-at 5 is beyond the 4 updates" in message
    for text in ("3,x", "0", "", "1,,2"):
        with pytest.raises(UserError, match="--rpe-keep-at"):
            parse_updates(text)


@given(st.integers(1, 5000), st.integers(1, 5000))
def test_a_short_training_saves_at_half_of_its_updates_at_the_latest(longest, updates):
    every = default_save_every(longest, updates)
    assert 1 <= every <= longest and (longest > updates or every == longest)
    if 100 <= updates < longest:
        assert every == updates // 2
