"""``--compute-dtype bf16``: matrix products in bfloat16, everything that is kept in float32."""

from __future__ import annotations

import itertools
import json
import math

import pytest
import torch
from conftest import make_model, run_here
from refusal import refused
from specs import representatives
from test_criterion import sample
from test_model import PAD, tokens

from fairseq_rpe.criterions.lm_cross_entropy import LMCrossEntropy
from fairseq_rpe.encodings.rope import Rope
from fairseq_rpe.runs import checkpoints


def pair_of_models(task, spec):
    """The same parameters, computed in float32 and in bfloat16."""
    plain, half = make_model(task, spec), make_model(task, spec, compute_dtype="bf16")
    half.load_state_dict(plain.state_dict())
    return plain, half


@pytest.mark.parametrize("spec", representatives())
def test_close_to_float32_and_not_it(task, spec):
    plain, half = pair_of_models(task, spec)
    x = tokens(2, 37)
    with torch.no_grad():
        a, b = plain(x)[0], half(x)[0]
    assert a.dtype == b.dtype == torch.float32
    error = (a - b).norm() / a.norm()
    assert 1e-5 < error < 2e-2, f"{error:.1e}"


def test_a_model_in_float64_has_positions_in_float64(task, monkeypatch):
    model, x, seen = make_model(task, "rope").double(), tokens(2, 37), []
    angles = Rope.angles
    monkeypatch.setattr(Rope, "angles", lambda self, at, pos: seen.append(at.dtype) or angles(self, at, pos))
    x[0, :3] = PAD
    with torch.no_grad():
        whole, cache = model(x)[0], {}
        steps = [model(x[:, :m], incremental_state=cache)[0] for m in (1, 20, 37)]
    assert whole.dtype == torch.float64 and set(seen) == {torch.float64}
    assert (torch.cat(steps, 1) - whole)[1].abs().max() < 1e-12


@pytest.mark.parametrize("spec", ["kerple_log", "rope", "fire", "t5_bias"])
def test_gradients_stay_in_float32_and_point_the_same_way(task, spec):
    gradients = []
    for model in pair_of_models(task, spec):
        loss = LMCrossEntropy(task, False)(model.train(), sample(2, 60))[0]
        loss.backward()
        found = [p.grad.flatten() for p in model.parameters() if p.grad is not None]
        assert all(p.dtype == g.dtype == torch.float32 for p, g in zip(model.parameters(), found, strict=False))
        gradients.append(torch.cat(found))
    a, b = gradients
    assert torch.nn.functional.cosine_similarity(a, b, dim=0) > 0.999 and not torch.equal(a, b)


def test_a_validation_is_what_evaluation_computes(task):
    """Both have float32 logits of the features, so that a valid loss is a test loss on the same text."""
    _, half = pair_of_models(task, "alibi")
    batch = sample(2, 60)
    with torch.no_grad():
        validated = LMCrossEntropy(task, False)(half.eval(), batch)[0]
        logits = half(batch["net_input"]["src_tokens"])[0]
    expected = torch.nn.functional.cross_entropy(
        logits.flatten(0, 1), batch["target"].flatten(), ignore_index=PAD, reduction="sum"
    )
    torch.testing.assert_close(validated, expected, rtol=1e-6, atol=0)


def test_activation_checkpoints(task):
    results = []
    for checkpointed in (False, True):
        model = make_model(task, "kerple_log", compute_dtype="bf16", checkpoint_activations=checkpointed).train()
        loss = LMCrossEntropy(task, False)(model, sample(2, 60))[0]
        loss.backward()
        results.append((loss.item(), torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None])))
    assert results[0][0] == results[1][0]
    torch.testing.assert_close(results[0][1], results[1][1], rtol=1e-5, atol=1e-6)


def test_a_model_in_half_precision_is_refused(task):
    model = make_model(task, "alibi", compute_dtype="bf16").half()
    with refused("drop --fp16, --bf16 or the flag"):
        model(tokens(2, 9))


def test_train_and_both_engines(corpus, tmp_path):
    """The flag from the command line to the checkpoint; evaluation follows it, or what it is told instead."""
    folder = tmp_path / "run"
    command = ["train", corpus, "--rpe", "kerple_log", "--out", folder, "--tokens", "32", "--updates", "2"]
    run_here(*command, "--compute-dtype", "bf16", "--device", "cpu")
    settings = json.loads((folder / "run.json").read_text())["settings"]
    assert settings["compute_dtype"] == "bf16"
    checkpoint = folder / "checkpoint_last.pt"
    assert checkpoints.load(checkpoint).model["compute_dtype"] == "bf16"
    losses = {}
    for engine, flags in itertools.product(("fast", "fairseq"), ([], ["--compute-dtype", "fp32"])):
        argv = ["eval", checkpoint, corpus, "--lengths=40", "--device", "cpu", "--json", "--engine", engine, *flags]
        row = json.loads(run_here(*argv).stdout)
        assert row.get("compute_dtype") == (flags[-1] if flags else None)
        losses[engine, bool(flags)] = row["loss_base2"]
    for replaced in (False, True):
        assert losses["fast", replaced] == pytest.approx(losses["fairseq", replaced], rel=1e-6)
    assert math.isclose(losses["fast", True], losses["fast", False], rel_tol=1e-3)
    assert losses["fast", True] != losses["fast", False]
