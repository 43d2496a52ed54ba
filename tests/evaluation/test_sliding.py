"""Sliding-window perplexity: against recomputation token by token, with any number of workers, with the cache."""

from __future__ import annotations

import csv
import itertools
import json
import math

import numpy as np
import pytest
import torch
from conftest import VOCABULARY, checkpoint_with, make_model, with_documents

from fairseq_rpe.cli.main import main
from fairseq_rpe.core import UserError
from fairseq_rpe.evaluation import loading, sliding, windows
from fairseq_rpe.evaluation.windows import DocumentWindows, Windows, score, why_not_cached

EOS, TOKENS = 2, 47


@pytest.fixture(scope="module")
def stream() -> torch.Tensor:
    targets = torch.randint(4, VOCABULARY, (TOKENS,), generator=torch.Generator().manual_seed(1))
    return torch.cat([torch.tensor([EOS]), targets])


@torch.no_grad()
def brute_force(model, stream, window: int, stride: int) -> float:
    """Nats over all targets, each predicted in a forward pass of its own from exactly what its window holds."""
    nats = 0.0
    for i in range(len(stream) - 1):
        start = 0
        while start + window <= i:  # the first window that reaches target i
            start += stride
        logits, _ = model(stream[None, start : i + 1])
        nats -= float(torch.log_softmax(logits[0, -1].double(), dim=-1)[stream[i + 1]])
    return nats


@pytest.mark.parametrize("workers", [0, 1, 2])
@pytest.mark.parametrize(("window", "stride"), [(8, 1), (9, 4), (8, 8)])
def test_perplexity_is_that_of_each_token_in_its_own_window(task, stream, window, stride, workers):
    model = make_model(task, "sinusoidal")
    parts = Windows(stream, window, stride, rows=3)
    nats, seconds = score(model, parts, workers=workers)
    assert parts.tokens == TOKENS and seconds > 0
    wanted = math.exp(brute_force(model, stream, window, stride) / TOKENS)
    assert math.exp(nats / TOKENS) == pytest.approx(wanted, rel=1e-5)
    if stride < window:
        other = math.exp(brute_force(model, stream, window, window) / TOKENS)
        assert other != pytest.approx(wanted, rel=1e-3)  # the test would see the difference


@pytest.mark.parametrize("total", [9, 10, 11, 24, 25])
@pytest.mark.parametrize(("window", "stride"), [(1, 1), (4, 1), (4, 3), (4, 4), (9, 2), (9, 9)])
@pytest.mark.parametrize("rows", [1, 2, 50])
def test_every_target_is_scored_once_from_a_full_window(total, window, stride, rows):
    stream = torch.arange(total + 1)  # input i is i, its target i + 1
    scored = []
    for inputs, targets in Windows(stream, window, stride, rows):
        assert inputs.shape[1] <= window and len(inputs) == len(targets) <= rows
        assert torch.equal(inputs[:, -targets.shape[1] :] + 1, targets)
        for row, wanted in zip(inputs, targets, strict=True):
            seen = (wanted - row[0]).tolist()
            assert row[0] == 0 or min(seen) > window - stride
            scored += wanted.tolist()
    assert scored == list(range(1, total + 1))


@pytest.mark.parametrize(("window", "stride"), [(1, 1), (4, 1), (4, 3), (4, 4), (9, 2)])
@pytest.mark.parametrize("rows", [1, 3])
def test_windows_within_documents_are_those_of_each_document_alone(window, stride, rows):
    ends = [3, 12, 13, 17, 40]
    stream = torch.arange(ends[-1] + 1)
    found, alone = [], []
    for inputs, targets in DocumentWindows(stream, np.array(ends), window, stride, rows):
        assert len(inputs) == len(targets) <= rows
        found += zip(inputs.tolist(), targets.tolist(), strict=True)
    for start, end in itertools.pairwise([0, *ends]):
        text = stream[start : end + 1]
        if len(text) - 1 < window:
            alone.append((text[:-1].tolist(), text[1:].tolist()))
            continue
        for inputs, targets in Windows(text, window, stride):
            alone += zip(inputs.tolist(), targets.tolist(), strict=True)
    assert sorted(found) == sorted(alone)
    assert sorted(target for _, targets in found for target in targets) == list(range(1, ends[-1] + 1))


def test_sliding_within_documents_is_a_measurement_of_its_own(checkpoint, corpus, tmp_path):
    data = with_documents(corpus, tmp_path)
    argv = ["sliding", checkpoint, data, "--windows", "8", "--stride", 4, "--device", "cpu", "--out", tmp_path / "out"]
    for flags in ([], ["--blocks", "document"], ["--blocks", "stream"]):
        assert main([str(a) for a in (*argv, *flags)]) == 0
    rows = [json.loads(line) for line in (tmp_path / "out" / "sliding.jsonl").read_text().splitlines()]
    assert [row.get("blocks") for row in rows] == [None, None, "document", "document"]
    assert len({row["tokens"] for row in rows}) == 1
    assert len({row["ppl"] for row in rows}) == 4


@pytest.mark.parametrize(
    ("layers", "rpe", "window", "stride"),
    [
        (1, "alibi", 8, 1),
        (1, "rope", 9, 2),
        (1, "fire", 8, 3),
        (2, "window:window=3", 8, 2),
        (2, "window:window=4", 7, 1),
    ],
)
def test_the_cache_gives_the_same_where_it_is_allowed(task, stream, monkeypatch, layers, rpe, window, stride):
    model = make_model(task, rpe, decoder_layers=layers)
    assert why_not_cached(model, window, stride) is None
    wanted = brute_force(model, stream, window, stride)
    for segments in (1, 3):
        monkeypatch.setattr(windows, "SEGMENTS", segments)
        nats, _ = score(model, Windows(stream, window, stride, rows=8), cached=True)
        assert nats == pytest.approx(wanted, rel=1e-5)


@pytest.mark.parametrize(
    ("layers", "rpe", "window", "stride", "reason"),
    [
        (2, "alibi", 8, 1, "2 layers reach back 14, stride 1 allows 7"),
        (2, "rope", 8, 1, "reach back 14"),
        (2, "window:window=5", 8, 1, "reach back 8, stride 1 allows 7"),
        (1, "sinusoidal", 8, 1, "adds positions to the input"),
        (1, "alibi", 8, 8, "do not overlap"),
    ],
)
def test_the_cache_is_refused_where_it_would_be_wrong(task, stream, monkeypatch, layers, rpe, window, stride, reason):
    model = make_model(task, rpe, decoder_layers=layers)
    parts = Windows(stream, window, stride, rows=8)
    with pytest.raises(UserError, match=reason):
        score(model, parts, cached=True)
    if stride < window:
        monkeypatch.setattr(windows, "why_not_cached", lambda *_: None)
        wrong, _ = score(model, parts, cached=True)
        assert wrong != pytest.approx(brute_force(model, stream, window, stride), rel=1e-5)


def test_windows_that_do_not_fit_are_refused(stream):
    with pytest.raises(UserError, match="stride 5 is more than window 4"):
        Windows(stream, 4, 5)
    with pytest.raises(UserError, match=f"window 48 is more than the {TOKENS} tokens"):
        Windows(stream, 48, 1)


# The command


@pytest.fixture(scope="module")
def checkpoint(state, tmp_path_factory):
    return checkpoint_with(state, tmp_path_factory.mktemp("windowed"), "window:window=3")


def rows_of(folder) -> dict[tuple[str, int], dict[str, str]]:
    with open(folder / "sliding.csv") as file:
        return {(row["mode"], int(row["window"])): row for row in csv.DictReader(file)}


def test_command_agrees_with_fairseq_and_with_any_number_of_workers(checkpoint, corpus, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(sliding, "REPEATS", 1)
    found = []
    for workers in (0, 1, 2):
        argv = ["sliding", checkpoint, corpus, "--windows", "8,16", "--stride", 4, "--cached", "--workers", workers]
        more = ["--latex"] if workers == 2 else []
        assert main([str(a) for a in (*argv, "--device", "cpu", "--out", tmp_path / str(workers), *more)]) == 0
        found.append(rows_of(tmp_path / str(workers)))
    text = capsys.readouterr().out
    assert "| window:window=3, sliding" in text and "44.35" in text
    argv = ["eval", checkpoint, corpus, "--lengths", "8,16", "--device", "cpu", "--json"]
    assert main([str(a) for a in argv]) == 0
    plain = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert len(plain) == 2
    for row in plain:
        mine = found[0]["non-overlapping", row["length"]]
        assert int(mine["tokens"]) == row["tokens"]
        assert float(mine["loss_base2"]) == pytest.approx(row["loss_base2"], abs=2e-3)
    for key, row in found[0].items():
        assert float(row["ppl"]) == pytest.approx(2 ** float(row["loss_base2"]))
        assert row["ppl"] == found[1][key]["ppl"] == found[2][key]["ppl"]
    for window in ("8", "16"):
        exact = float(found[0]["sliding", int(window)]["ppl"])
        assert float(found[0]["cached", int(window)]["ppl"]) == pytest.approx(exact, rel=1e-5)
        assert float(found[0]["non-overlapping", int(window)]["relative"]) == 1
    names = ["sliding.csv", "sliding.jsonl", "sliding.md", "sliding.pdf", "sliding.png"]
    assert sorted(p.name for p in (tmp_path / "0").iterdir()) == names
    assert (tmp_path / "2/sliding.tex").read_text().count(r"\toprule") == 2

    # neither what this version kept is measured again, nor what older ones did
    monkeypatch.setattr(loading.checkpoint_utils, "load_model_ensemble_and_task", no_more)
    argv = ["sliding", checkpoint, corpus, "--windows", "16,8", "--stride", 4, "--device", "cpu"]
    assert main([str(a) for a in (*argv, "--out", tmp_path / "0")]) == 0
    kept = tmp_path / "0" / "sliding.jsonl"
    older = [json.loads(line) for line in kept.read_text().splitlines()]
    kept.write_text("".join(json.dumps({**row, "relative": 1}) + "\n" for row in older))
    assert main([str(a) for a in (*argv, "--out", tmp_path / "0")]) == 0
    assert rows_of(tmp_path / "0")["sliding", 8]["ppl"] == found[0]["sliding", 8]["ppl"]


def test_the_reference_is_alibis_mean_from_the_training_length_on(tmp_path):
    subjects = [loading.Subject(tmp_path, label, 64) for label in ("alibi:slopes=plain", "rope", "alibi + shift")]
    same = {"checkpoint": "c", "data": "d", "subset": "test", "tokens": 99, "loss_base2": 1.0, "seconds": 1.0}
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


def no_more(*_, **__):
    raise AssertionError("measured again")


def test_tokens_that_were_not_scored_are_refused(checkpoint, corpus, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(Windows, "__len__", lambda self: len(self.batches) - 1)
    argv = ["sliding", checkpoint, corpus, "--windows", "16", "--stride", 5, "--first-tokens", 99, "--out", tmp_path]
    assert main([str(a) for a in argv]) == 2
    assert "of 99 tokens were scored: the result is not kept" in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("flags", "reason"),
    [
        (["--windows", "16", "--stride", "17"], "--stride 17 is more than window 16"),
        (["--windows", "999999"], "window 999999 is more than the"),
        (["--windows", "16", "--first-tokens", "9999999"], "--first-tokens 9999999"),
        (["--windows", "16", "--max-tokens", "8"], "--max-tokens 8 is less than window 16"),
        (["--windows", "4", "--stride", "1", "--cached"], "--cached: window:window=3: cached states would have seen"),
        (["--windows", "16", "--positions", "randomized:max=64"], "random positions"),
        (["--windows", "16", "--subset", "nope"], "nope"),
        (["--windows", "16", "--blocks", "document"], "no document boundaries"),
        (["--windows", "16", "--blocks", "document", "--cached"], "--cached slides over one stream"),
    ],
)
def test_bad_input_is_one_line(checkpoint, corpus, tmp_path, capsys, flags, reason):
    assert main(["sliding", str(checkpoint), str(corpus), *flags, "--out", str(tmp_path / "out")]) == 2
    error = capsys.readouterr().err
    assert error.startswith("error: ") and error.count("\n") == 1 and reason in error
    assert not [p for p in tmp_path.rglob("*") if p.is_file()]


def test_missing_or_strange_checkpoints_are_one_line(checkpoint, corpus, tmp_path, capsys):
    (tmp_path / "text.pt").write_text("no checkpoint")
    for name, paths, reason in (
        ("sliding", [tmp_path / "none.pt"], "none.pt does not exist"),
        ("erf", [tmp_path / "none.pt"], "none.pt does not exist"),
        ("sliding", [tmp_path / "text.pt"], "text.pt is not a checkpoint, or damaged"),
        ("erf", [checkpoint, checkpoint], "named twice"),
    ):
        assert main([name, *map(str, paths), str(corpus), "--out", str(tmp_path / "out")]) == 2
        error = capsys.readouterr().err
        assert error.count("\n") == 1 and reason in error
    assert not (tmp_path / "out").exists()
