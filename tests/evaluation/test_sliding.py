"""Sliding-window perplexity: against recomputation token by token, with any number of workers, with the cache."""

from __future__ import annotations

import csv
import itertools
import json

import numpy as np
import pytest
import torch
from conftest import VOCABULARY, checkpoint_with, make_model, run_here, with_documents
from hypothesis import given, settings
from hypothesis import strategies as st
from measuring import EOS, reference_losses, refusal, rows_of

from fairseq_rpe.core import UserError
from fairseq_rpe.evaluation import loading, sliding, sliding_window_loss
from fairseq_rpe.evaluation.sliding_window_loss import DocumentWindows, Windows, cache_mismatch_reason, score_windows

TOKENS = 47
SIZE = st.integers(1, 40)


@pytest.fixture(scope="module")
def stream() -> torch.Tensor:
    targets = torch.randint(4, VOCABULARY, (TOKENS,), generator=torch.Generator().manual_seed(1))
    return torch.cat([torch.tensor([EOS]), targets])


def first_input(place: int, window: int, stride: int) -> int:
    """Where the first window begins that reaches a target."""
    return next(start for start in range(0, place + 1, stride) if start + window > place)


def brute_force(model, stream, window: int, stride: int) -> float:
    """Nats over all targets, each predicted in a forward pass of its own from exactly what its window holds."""
    nats = 0.0
    for i in range(len(stream) - 1):
        with torch.no_grad():
            logits, _ = model(stream[None, first_input(i, window, stride) : i + 1])
        nats -= float(torch.log_softmax(logits[0, -1].double(), dim=-1)[stream[i + 1]])
    return nats


@pytest.mark.parametrize(("window", "stride", "workers"), [(8, 1, 0), (9, 4, 2), (8, 8, 0)])
def test_perplexity_is_that_of_each_token_in_its_own_window(task, stream, window, stride, workers):
    model = make_model(task, "sinusoidal")
    parts = Windows(stream, window, stride, rows=3)
    nats, seconds = score_windows(model, parts, workers=workers)
    assert parts.tokens == TOKENS and seconds > 0
    wanted = brute_force(model, stream, window, stride)
    assert nats == pytest.approx(wanted, rel=1e-5)
    if stride < window:  # the test would see the difference
        other = reference_losses(model, stream[1:], torch.arange(TOKENS) // window * window)
        assert float(other.sum()) != pytest.approx(wanted, rel=1e-4)


@settings(max_examples=100, deadline=None, derandomize=True)
@given(st.lists(SIZE, min_size=1, max_size=5), SIZE, SIZE, st.integers(1, 50))
def test_every_target_is_scored_once_from_a_full_window(sizes, window, stride, rows):
    """Of a stream, and of each document alone: input i is i, its target i + 1, so an input is the place of its row."""
    ends = np.cumsum(sizes)
    numbers = torch.arange(sum(sizes) + 1)
    for apart, longest in ((False, sum(sizes)), (True, max(sizes))):
        width, step = min(window, longest), min(stride, window, longest)
        parts = DocumentWindows(numbers, ends, width, step, rows) if apart else Windows(numbers, width, step, rows)
        begins = [0, *ends[:-1].tolist()] if apart else [0]
        assert parts.tokens == sum(sizes)
        scored = []
        for inputs, targets in (parts[k] for k in range(len(parts))):
            assert len(inputs) == len(targets) <= rows and inputs.shape[1] <= width
            assert torch.equal(inputs[:, -targets.shape[1] :] + 1, targets) and inputs.diff(dim=1).eq(1).all()
            scored += [(int(t) - 1, int(row[0])) for row, own in zip(inputs, targets, strict=True) for t in own]
        assert sorted(scored) == [
            (place, begin + first_input(place - begin, width, step))
            for begin, end in itertools.pairwise([*begins, sum(sizes)])
            for place in range(begin, end)
        ]


def test_windows_that_do_not_fit_are_refused(stream):
    with pytest.raises(UserError, match="stride 5 is more than window 4"):
        Windows(stream, 4, 5)
    with pytest.raises(UserError, match=f"window 48 is more than the {TOKENS} tokens"):
        Windows(stream, 48, 1)


CACHED = [(1, "alibi", 8, 1), (1, "rope", 9, 2), (1, "fire", 8, 3), (2, "window:window=3", 8, 2)]


@pytest.mark.parametrize(("layers", "rpe", "window", "stride"), [*CACHED, (2, "window:window=4", 7, 1)])
def test_the_cache_gives_the_same_where_it_is_allowed(task, stream, monkeypatch, layers, rpe, window, stride):
    model = make_model(task, rpe, decoder_layers=layers)
    assert cache_mismatch_reason(model, window, stride) is None
    wanted = brute_force(model, stream, window, stride)
    for segments in (1, 3):
        monkeypatch.setattr(sliding_window_loss, "MAX_SEGMENTS", segments)
        nats, _ = score_windows(model, Windows(stream, window, stride, rows=8), cached=True)
        assert nats == pytest.approx(wanted, rel=1e-5)


UNCACHED = [
    (2, "alibi", 8, 1, "2 layers see 14 tokens back, stride 1 allows 7"),
    (2, "window:window=5", 8, 1, "layers see 8 tokens back, stride 1 allows 7"),
    (1, "sinusoidal", 8, 1, "adds positions to the input"),
    (1, "alibi", 8, 8, "do not overlap"),
]


@pytest.mark.parametrize(("layers", "rpe", "window", "stride", "reason"), UNCACHED)
def test_the_cache_is_refused_where_it_would_be_wrong(task, stream, monkeypatch, layers, rpe, window, stride, reason):
    model = make_model(task, rpe, decoder_layers=layers)
    parts = Windows(stream, window, stride, rows=8)
    with pytest.raises(UserError, match=reason):
        score_windows(model, parts, cached=True)
    if stride < window:
        monkeypatch.setattr(sliding_window_loss, "cache_mismatch_reason", lambda *_: None)
        wrong, _ = score_windows(model, parts, cached=True)
        assert wrong != pytest.approx(brute_force(model, stream, window, stride), rel=1e-5)


@pytest.fixture(scope="module")
def checkpoint(state, tmp_path_factory):
    return checkpoint_with(state, tmp_path_factory.mktemp("windowed"), "window:window=3")


def table_of(folder) -> dict[tuple[str, int], dict[str, str]]:
    lines = (folder / "sliding.csv").read_text().splitlines()
    return {(row["mode"], int(row["window"])): row for row in csv.DictReader(lines)}


def test_command_agrees_with_eval_and_with_any_number_of_workers(checkpoint, corpus, tmp_path, monkeypatch, undrawn):
    monkeypatch.setattr(sliding, "MAX_REPEATS", 1)
    command = ("sliding", checkpoint, corpus, "--windows", "8,16", "--stride", 4, "--device", "cpu")
    run_here(*map(str, command), "--first-tokens", "300", "--cached", "--out", tmp_path / "0")
    done = run_here(*map(str, command), "--first-tokens", "300", "--workers", "2", "--latex", "--out", tmp_path / "2")
    assert "| window:window=3, sliding" in done.stdout and "44.35" in done.stdout
    found, other = table_of(tmp_path / "0"), table_of(tmp_path / "2")
    for key, row in found.items():
        assert float(row["ppl"]) == pytest.approx(2 ** float(row["loss_base2"]))
        assert key[0] == "cached" or row["ppl"] == other[key]["ppl"]
    for window in (8, 16):
        exact = float(found["sliding", window]["ppl"])
        assert float(found["cached", window]["ppl"]) == pytest.approx(exact, rel=1e-5)
        assert float(found["non-overlapping", window]["relative"]) == 1
    names = ["sliding.csv", "sliding.jsonl", "sliding.md", "sliding.pdf", "sliding.png"]
    assert sorted(p.name for p in (tmp_path / "0").iterdir()) == names
    assert (tmp_path / "2/sliding.tex").read_text().count(r"\toprule") == 2

    run_here(*map(str, command), "--out", tmp_path / "whole")
    plain = rows_of("eval", checkpoint, corpus, "--lengths", "8,16")
    whole = table_of(tmp_path / "whole")
    assert len(plain) == 2
    for row in plain:
        same = whole["non-overlapping", row["length"]]
        assert int(same["tokens"]) == row["tokens"]
        assert float(same["loss_base2"]) == pytest.approx(row["loss_base2"], abs=2e-3)

    # neither what this version kept is measured again, nor what older ones did
    monkeypatch.setattr(loading.checkpoint_utils, "load_model_ensemble_and_task", None)
    run_here(*map(str, command), "--out", tmp_path / "whole")
    kept = tmp_path / "whole" / "sliding.jsonl"
    older = [json.loads(line) for line in kept.read_text().splitlines()]
    kept.write_text("".join(json.dumps({**row, "relative": 1}) + "\n" for row in older))
    run_here(*map(str, command), "--out", tmp_path / "whole")
    assert table_of(tmp_path / "whole")["sliding", 8]["ppl"] == whole["sliding", 8]["ppl"]


def test_sliding_within_documents_is_a_measurement_of_its_own(checkpoint, corpus, tmp_path):
    data = with_documents(corpus, tmp_path)
    command = ("sliding", checkpoint, data, "--windows", "8", "--stride", 4, "--device", "cpu", "--first-tokens", 200)
    for flags in ((), ("--blocks", "document"), ("--blocks", "stream")):
        run_here(*map(str, command), *flags, "--out", tmp_path / "out")
    rows = [json.loads(line) for line in (tmp_path / "out" / "sliding.jsonl").read_text().splitlines()]
    assert [row.get("blocks") for row in rows] == [None, None, "document", "document"]
    assert {row["tokens"] for row in rows} == {200} and len({row["ppl"] for row in rows}) == 4


def test_the_reference_is_alibis_mean_from_the_training_length_on(tmp_path):
    subjects = [
        loading.LabelledCheckpoint(tmp_path, label, 64) for label in ("alibi:slopes=plain", "rope", "alibi + shift")
    ]
    same = {"checkpoint": "c", "data": "d", "split": "test", "tokens": 99, "loss_base2": 1.0, "seconds": 1.0}
    rows = [
        sliding.SlidingResult(encoding=one.label, mode=mode, window=w, stride=w, ppl=ppl + more, **same)
        for one in subjects
        for mode, more in ((sliding.PLAIN, 0.0), (sliding.SLIDING, 1.0))
        for w, ppl in ((16, 90.0), (64, 80.0), (256, 70.0))
    ]
    means = sliding.reference_means(rows, subjects)
    assert means == [("alibi:slopes=plain", 75.0, 64, 256), ("alibi + shift", 75.0, 64, 256)]
    short = [row for row in rows if row.window == 16]
    assert [mean[1:] for mean in sliding.reference_means(short, subjects[:1])] == [(90.0, 16, 16)]


def test_tokens_that_were_not_scored_are_refused(checkpoint, corpus, tmp_path, monkeypatch):
    monkeypatch.setattr(Windows, "__len__", lambda self: len(self.batches) - 1)
    flags = ("--windows", 16, "--stride", 5, "--first-tokens", 99, "--out", tmp_path)
    assert "of 99 tokens were scored: the result is not stored" in refusal("sliding", checkpoint, corpus, *flags)
    assert list(tmp_path.iterdir()) == []


REFUSALS = [
    ("999999", "window 999999 is more than the"),
    ("16 --first-tokens 9999999", "--first-tokens 9999999"),
    ("16 --stride 17", "--stride 17 is more than window 16: tokens in between would be left out"),
    ("16 --max-tokens 8", "--max-tokens 8 is less than window 16"),
    ("4 --stride 1 --cached", "--cached: window:window=3: cached states would depend on tokens that left"),
    ("16 --positions-eval randomized:max_position=64", "random positions"),
    ("16 --blocks document", "no document boundaries"),
    ("16 --blocks document --cached", "--cached needs one stream"),
]


@pytest.mark.parametrize(("flags", "reason"), REFUSALS)
def test_bad_input_is_one_line(checkpoint, corpus, tmp_path, flags, reason):
    assert reason in refusal("sliding", checkpoint, corpus, "--windows", *flags.split(), "--out", tmp_path / "out")
    assert not [p for p in tmp_path.rglob("*") if p.is_file()]


def test_checkpoints_on_other_blocks_are_refused(checkpoint, state, corpus, tmp_path):
    within = checkpoint_with(state, tmp_path, task={"blocks": "document"})
    said = refusal("sliding", checkpoint, within, corpus, "--windows", 16, "--out", tmp_path / "out")
    assert "others on documents: choose with --blocks" in said and not (tmp_path / "out").exists()
