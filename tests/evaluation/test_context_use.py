"""Loss by the distance of a token's last occurrence: against slow loops, and the command."""

from __future__ import annotations

import csv
import json
import math

import numpy as np
import pytest
from conftest import checkpoint_with, run_here, with_documents
from hypothesis import given, settings
from hypothesis import strategies as st
from measuring import refusal, rows_of

from fairseq_rpe.data import folder as corpus_files
from fairseq_rpe.evaluation import context_use
from fairseq_rpe.evaluation.context_use import last_occurrence_distances, losses_by_distance
from fairseq_rpe.figures.context_use import LossAtDistance, draw_context_use

BLOCKS = st.lists(st.lists(st.integers(0, 6), min_size=1, max_size=40), min_size=1, max_size=5)


@settings(max_examples=100, deadline=None, derandomize=True)
@given(BLOCKS)
def test_distances_are_those_of_a_double_loop(blocks):
    stream = [2, *(token for block in blocks for token in block)]
    first = [sum(map(len, blocks[:k])) for k, block in enumerate(blocks) for _ in block]
    wanted = []
    for target in range(len(first)):
        distance = 0
        for j in range(target, first[target] - 1, -1):
            if stream[j] == stream[target + 1]:
                distance = target + 1 - j
                break
        wanted.append(distance)
    assert last_occurrence_distances(np.array(stream), np.array(first)).tolist() == wanted


@settings(max_examples=50, deadline=None, derandomize=True)
@given(st.lists(st.tuples(st.integers(0, 20), st.floats(0, 9), st.integers(0, 3)), min_size=1, max_size=40))
def test_buckets_have_each_token_once_and_clustered_errors(tokens):
    distances, losses, clusters = (np.array(values) for values in zip(*tokens, strict=True))
    buckets = losses_by_distance(losses, distances, clusters)
    assert sum(bucket.tokens for bucket in buckets) == len(tokens)
    for bucket in buckets:
        low = bucket.distance or 0
        inside = [(x / math.log(2), c) for d, x, c in tokens if low <= d < max(1, 2 * low)]
        mean = sum(x for x, _ in inside) / len(inside)
        sums = [sum(x - mean for x, c in inside if c == cluster) for cluster in {c for _, c in inside}]
        assert (bucket.tokens, bucket.loss_base2) == (len(inside), pytest.approx(mean, abs=1e-9))
        if len(sums) == 1:
            assert bucket.standard_error is None
            continue
        variance = sum(x * x for x in sums) * len(sums) / (len(sums) - 1) / len(inside) ** 2
        assert bucket.standard_error == pytest.approx(math.sqrt(variance), abs=1e-9)


@pytest.fixture(scope="module")
def checkpoints(state, tmp_path_factory):
    return [checkpoint_with(state, tmp_path_factory.mktemp(name), name) for name in ("nope", "alibi")]


def test_command_writes_every_token_once_and_resumes(checkpoints, corpus, tmp_path, monkeypatch):
    command = ("context-use", *checkpoints, corpus, "--lengths", "16,64", "--device", "cpu", "--out", tmp_path / "out")
    done = run_here(*command)
    results = [json.loads(line) for line in (tmp_path / "out" / "context_use.jsonl").read_text().splitlines()]
    tokens = corpus_files.count_tokens(corpus, "test")
    [plain] = rows_of("eval", checkpoints[1], corpus, "--lengths", 64)
    assert [(row["encoding"], row["length"]) for row in results] == [
        (name, n) for name in ("nope", "alibi") for n in (16, 64)
    ]
    for row in results:
        assert sum(bucket["tokens"] for bucket in row["buckets"]) == row["tokens"] == tokens
        assert max(bucket["distance"] or 0 for bucket in row["buckets"]) <= row["length"] < 2 * row["length"]
        assert row["cluster"] == "block" and row["clusters"] == -(-tokens // row["length"])
        weighted = sum(bucket["tokens"] * bucket["loss_base2"] for bucket in row["buckets"])
        assert weighted / tokens == pytest.approx(row["loss_base2"], rel=1e-9)
    assert results[3]["loss_base2"] == pytest.approx(plain["loss_base2"], rel=1e-6)
    assert "2–3" in done.stdout and "32–63" in done.stdout
    rows = list(csv.DictReader((tmp_path / "out" / "context_use.csv").read_text().splitlines()))
    assert rows[0]["distance"] == "1" and rows[-1]["distance"] == "new"
    assert (tmp_path / "out" / "context_use.png").stat().st_size > 1000
    monkeypatch.setattr(context_use, "load_model", None)
    assert run_here(*command).stdout == done.stdout


def test_errors_are_clustered_by_document_if_there_are_documents(checkpoints, corpus, tmp_path, undrawn):
    data = with_documents(corpus, tmp_path)
    run_here("context-use", checkpoints[0], data, "--lengths", 16, "--device", "cpu", "--out", tmp_path / "out")
    [row] = [json.loads(line) for line in (tmp_path / "out" / "context_use.jsonl").read_text().splitlines()]
    assert row["cluster"] == "document" and row["clusters"] == len(corpus_files.document_ends(data, "test"))


def test_what_is_refused(checkpoints, corpus, tmp_path):
    def error(*flags: object) -> str:
        return refusal("context-use", checkpoints[0], corpus, "--out", tmp_path / "out", *flags)

    assert "less than one block of 10000000" in error("--lengths", 10_000_000)
    assert "--max-tokens 8 is less than length 16" in error("--lengths", 16, "--max-tokens", 8)
    assert "no document boundaries" in error("--lengths", 16, "--blocks", "document")
    assert not (tmp_path / "out").exists()


def test_many_models_are_rows_of_maps():
    curve = [LossAtDistance(d, 3.0 - d / 9, 0.1) for d in (1, 2, 4)] + [LossAtDistance(None, 9.0, 0.1)]
    figure = draw_context_use({"16 tokens": {f"alibi{k}": curve for k in range(14)}})
    assert len(figure.axes[0].get_yticks()) == 14


def test_a_figure_shows_new_tokens_apart():
    curve = [LossAtDistance(1, 3.0, 0.1), LossAtDistance(2, 2.5, 0.1), LossAtDistance(None, 9.0, 0.1)]
    figure = draw_context_use({"alibi": {"16 tokens": curve}})
    axes = figure.axes[0]
    assert [text.get_text() for text in axes.get_xticklabels()] == ["1", "2", "new"]
    assert axes.get_xticks().tolist() == [1, 2, 8]
