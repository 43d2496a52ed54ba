"""Attention to a needle: where the needle is, the weights against the whole softmax, the record and the command."""

from __future__ import annotations

import csv
import itertools
import json
import math
from pathlib import Path

import numpy as np
import pytest
import torch
from conftest import make_model, run_here
from hypothesis import given, settings
from hypothesis import strategies as st
from measuring import refusal
from specs import SPECS
from test_depths import TASK as PASSKEY
from test_depths import command

from fairseq_rpe import algorithms
from fairseq_rpe.algorithms import build
from fairseq_rpe.core.errors import UserError
from fairseq_rpe.evaluation.needle_attention import AttentionWeightsProbe, measure_head_attention, needle_example
from fairseq_rpe.evaluation.needle_records import HeadAttention, NeedleAttention
from fairseq_rpe.evaluation.predictions import read_predictions
from fairseq_rpe.sweeps.sweep_record import Method, SweepFolder
from fairseq_rpe.tasks.algorithmic import AlgorithmDataset, AlgorithmicConfig, AlgorithmicTask
from fairseq_rpe.utils import records
from fairseq_rpe.utils.json_files import read_json


@given(st.integers(31, 80), st.floats(0, 1), st.integers(0, 2))
@settings(max_examples=30, deadline=None)
def test_the_needle_of_passkey_is_its_line(length, depth, index):
    example = needle_example(build(PASSKEY), "test", length, depth, index)
    ((start, end),) = example.needles
    key = " ".join(example.answer)
    assert " ".join(example.prompt[start:end]) == f"the pass key is {key} . remember it . {key} is the pass key ."
    # all but the head, the line, the question and the key is filler
    assert start == 1 + math.floor(depth * (length - 1 - 17 - 10 - 2) + 1e-9)


@given(st.integers(24, 96), st.floats(0, 1), st.sampled_from(["key=1,value=3", "key=2,value=2", "key=3,value=1"]))
@settings(max_examples=30, deadline=None)
def test_the_needle_of_retrieval_is_the_queried_pair(length, depth, sizes):
    task = build(f"retrieval:items=48,times=2,least=30,test=2,alphabet=26,{sizes}")
    example = needle_example(task, "test", length, depth, 1)
    ((start, end),) = example.needles
    key = example.prompt[example.prompt.index("?") + 1 : -1]
    assert example.prompt[start:end] == (*key, ":", *example.answer) and example.prompt[end] == ";"
    assert start == 0 or example.prompt[start - 1] == ";"


def test_the_needle_of_induction_is_what_the_copy_repeats():
    task = build("induction:items=32,times=2,test=2,prefix=2,answer=3,alphabet=64")
    example = needle_example(task, "test", 50, 0.4, 0)
    ((start, end),) = example.needles
    assert example.prompt[start:end] == (*example.prompt[-2:], *example.answer)


@pytest.mark.parametrize("name", algorithms.names())
def test_needles_of_every_task_are_ascending_spans_of_the_prompt(name):
    for example in itertools.islice(build(name).examples("valid"), 20):
        borders = [0, *itertools.chain(*example.needles), len(example.prompt)]
        assert borders == sorted(borders) and all(start < end for start, end in example.needles)
        if example.needles:
            stated = [word for start, end in example.needles for word in example.prompt[start:end]]
            assert set(example.answer) <= set(stated)


def test_examples_of_training_have_needles_too():
    for example in list(build(PASSKEY).examples("train"))[:20]:
        ((start, end),) = example.needles
        assert example.prompt[start : start + 4] == ("the", "pass", "key", "is") and end - start == 17
    assert next(build("copy").examples("train")).needles == ()


@torch.no_grad()
def weights_by_hand(model, tokens: torch.Tensor, layer: int, logits) -> torch.Tensor:
    """The softmax (H, n, n) of a layer, from its input: q·kᵀ / √D by an einsum, changed by ``logits``, causal."""
    states: list[torch.Tensor] = []
    model.decoder.features(tokens, hidden_states=states)
    block = model.decoder.layers[layer]
    x = states[layer]
    x = block.self_attn_layer_norm(x) if block.norm_position == "pre" else x
    attention = block.self_attn
    n, heads, width = tokens.shape[1], attention.num_heads, attention.head_dim
    q, k = (p(x)[0].view(n, heads, width).transpose(0, 1) for p in (attention.q_proj, attention.k_proj))  # (H, n, D)
    scores = logits(q, k, n)  # (H, n, n)
    future = torch.ones(n, n).triu(1).bool()
    return scores.masked_fill(future, -math.inf).softmax(-1)


def distances(n: int) -> torch.Tensor:
    return torch.arange(n)[:, None] - torch.arange(n)


def plain(q, k, n):
    return torch.einsum("hid,hjd->hij", q, k) / q.shape[-1] ** 0.5


def alibi(q, k, n):
    slopes = torch.tensor([2.0 ** (-2 * h) for h in range(1, 5)])
    return plain(q, k, n) - slopes[:, None, None] * distances(n)


def window(q, k, n):
    return plain(q, k, n).masked_fill(distances(n) >= 5, -math.inf)


def rope(q, k, n):
    """Complex numbers of the two halves of a head, multiplied by exp(i·position·θ)."""
    half = q.shape[-1] // 2
    theta = 10_000.0 ** (-torch.arange(half) / half)
    angle = torch.arange(n)[:, None] * theta
    factor = torch.polar(torch.ones_like(angle), angle)
    a, b = (torch.complex(x[..., :half], x[..., half:]) * factor for x in (q, k))
    return torch.einsum("hid,hjd->hij", a, b.conj()).real / q.shape[-1] ** 0.5


@pytest.mark.parametrize(("rpe", "logits"), [("rope", rope), ("alibi", alibi), ("window:window=5", window)])
def test_weights_are_those_of_the_whole_softmax(task, rpe, logits, monkeypatch):
    model = make_model(task, rpe)
    for weight in model.decoder.layers.parameters():
        weight.data.mul_(3)  # so that no head is even
    tokens = torch.randint(4, 50, (1, 17), generator=torch.Generator().manual_seed(1))
    before = model(tokens)[0]
    for queries_at_once in (128, 2):
        monkeypatch.setattr("fairseq_rpe.evaluation.empirical_receptive_field.MAX_QUERIES", queries_at_once)
        with torch.no_grad(), AttentionWeightsProbe(model.decoder, 17, 5) as probe:
            out = model(tokens)[0]
        weights = probe.weights()
        assert torch.equal(out, before) and weights.shape == (len(model.decoder.layers), 4, 5, 17)
        torch.testing.assert_close(weights.sum(-1), torch.ones(weights.shape[:3]))
        for layer in range(len(model.decoder.layers)):
            whole = weights_by_hand(model, tokens, layer, logits)
            torch.testing.assert_close(weights[layer], whole[:, -5:], atol=2e-6, rtol=2e-5)


@pytest.fixture(scope="module")
def checkpoint(made_once) -> Path:
    out = made_once("depths", lambda folder: run_here(*command(folder / "out"))) / "out"
    return SweepFolder(out).run_folder(Method("alibi", "alibi"), 1, PASSKEY).checkpoints.last


@pytest.fixture(scope="module")
def measured(checkpoint, tmp_path_factory) -> tuple[Path, str, NeedleAttention]:
    out = tmp_path_factory.mktemp("needle") / "out"
    said = run_here(
        "needle-attention", checkpoint, "--length", "80", "--depth", "0.25", "--out", out, "--device", "cpu"
    )
    row = read_json(out / "needle_attention.json")
    return out, said.stdout, records.read_record(NeedleAttention, row, "needle_attention.json", "the record")


def test_the_command_writes_numbers_and_a_picture(measured):
    out, said, result = measured
    mass = np.array(result.mass)
    assert mass[result.layer, result.head] == mass.max() and mass.shape == (2, 4)
    inside = np.array(result.weights)[result.is_needle]
    assert inside.sum() == pytest.approx(mass.max(), abs=1e-6) and len(inside) == 17
    np.testing.assert_allclose(result.total, 1, atol=1e-6)
    assert len(result.tokens) == 80 - 1 and result.tokens[-1] == result.answer[0]
    assert result.even_mass == pytest.approx((17 / 78 + 17 / 79) / 2)
    rows = list(csv.DictReader((out / "needle_mass.csv").read_text().splitlines()))
    assert [float(r["needle_mass"]) for r in rows] == mass.flatten().tolist()
    rows = list(csv.DictReader((out / "needle_weights.csv").read_text().splitlines()))
    assert [r["token"] for r in rows if r["in_needle"] == "1"][:6] == ["the", "pass", "key", "is", *result.answer]
    assert f"layer {result.layer}, head {result.head + 1}, {100 * mass.max():.1f} %" in said
    assert f"right answer: {' '.join(result.answer)}" in said and " ".join(result.prediction) in said
    assert (out / "needle_attention.png").stat().st_size > 5_000 and (out / "needle_attention.pdf").exists()


def test_the_prediction_is_that_of_eval_task(measured, checkpoint, tmp_path):
    result, path = measured[2], tmp_path / "p.jsonl"
    run_here("eval-task", checkpoint, "--lengths", 80, "--depths", 0.25, "--predictions", path, "--device", "cpu")
    assert json.loads(path.read_text())["answers"][0] == " ".join(result.prediction)


def test_masses_are_means_over_the_words_of_the_answer(task, monkeypatch):
    """A probe with made-up weights: the second of two queries looks at the needle alone."""
    needle_task = AlgorithmicTask.setup_task(AlgorithmicConfig(algorithm=PASSKEY))
    example = needle_example(needle_task.algorithm, "test", 80, 0.5, 0)
    weights = torch.zeros(1, 1, 2, 79)
    ((start, _),) = example.needles
    weights[0, 0, 0, 0] = weights[0, 0, 1, start] = 1
    monkeypatch.setattr(AttentionWeightsProbe, "weights", lambda _: weights)
    data = AlgorithmDataset([example], needle_task.source_dictionary)
    result = measure_head_attention(make_model(task, "alibi"), data)
    assert result.mass == ((0.5,),) and result.weights[0] == result.weights[start] == 0.5 and result.total == ((1.0,),)


@pytest.fixture(scope="module")
def needle_data() -> AlgorithmDataset:
    needle_task = AlgorithmicTask.setup_task(AlgorithmicConfig(algorithm=PASSKEY))
    example = needle_example(needle_task.algorithm, "test", 60, 0.5, 0)
    return AlgorithmDataset([example], needle_task.source_dictionary)


@pytest.mark.parametrize(
    "rpe",
    [*sorted(SPECS.keys() - {"bipe", "abacus", "coupled"}), "bipe:segment_delimiters=</s>", "rope:null_logit=learned"],
)
def test_every_encoding_can_be_measured(task, needle_data, rpe):
    """A sweep measures the attention of every method that it evaluates."""
    model = make_model(task, rpe)
    if any(encoding.length_dependent for encoding in model.decoder.encodings):
        pytest.skip("eval-task refuses it")
    result = measure_head_attention(model, needle_data)
    total, mass = np.array(result.total), np.array(result.mass)
    assert (mass <= total + 1e-6).all() and sum(result.weights) == pytest.approx(
        total[result.layer, result.head], abs=1e-4
    )
    if "null_logit" in rpe:
        assert (total < 0.999).all() and (total > 0.5).all()
    else:
        np.testing.assert_allclose(total, 1, atol=1e-5)


def test_eval_task_keeps_the_attention_at_the_middle_depth(measured, checkpoint, tmp_path):
    path, out = tmp_path / "p.jsonl", tmp_path / "out"
    run_here("eval-task", checkpoint, "--lengths", 80, "--predictions", path, "--device", "cpu")
    needles = {key.depth: row.needle for key, row in read_predictions(path).items()}
    assert needles[0.0] is needles[1.0] is None
    run_here("needle-attention", checkpoint, "--length", 80, "--out", out, "--device", "cpu")
    row = read_json(out / "needle_attention.json")
    assert records.to_dict(needles[0.5]) == records.to_dict(
        records.read_record(HeadAttention, row, "needle_attention.json", "the record", strict=False)
    )


def test_refusals(checkpoint, tmp_path):
    out = tmp_path / "out"
    for flags, words in {
        "--length 30": "--length 30: passkey:items=40,times=2,least=36,train=100,valid=10,test=3,depths=3,digits=2 has",
        "--length 81": "31 to 80 tokens",
        "--depth 1.5": "--depth 1.5 is not between 0 (first) and 1 (last)",
        "--example 3": "--example 3: there are 3 examples of a length and depth, counted from 0",
    }.items():
        assert words in refusal("needle-attention", checkpoint, "--out", out, *flags.split())
    assert not out.exists()


@pytest.mark.parametrize("spec", ["copy", "mqar"])
def test_a_task_without_a_needle_is_refused(spec):
    with pytest.raises(UserError, match="no needle at a depth: use a checkpoint of passkey"):
        needle_example(build(spec), "test", 40, 0.5, 0)


@pytest.mark.parametrize(
    ("change", "words"),
    [({"queries": 99}, "more queries"), ({"needles": [[3, 3]]}, "not spans"), ({"layer": 7}, "layers or heads")],
)
def test_a_contradictory_record_is_refused(measured, change, words):
    row = {**records.to_dict(measured[2]), **change}
    with pytest.raises(UserError, match=words):
        records.read_record(NeedleAttention, row, "x.json", "the record", strict=False)
