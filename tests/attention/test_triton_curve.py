"""Curves (FIRE) on the Triton backend against the network run for every pair: outputs and all gradients."""

import math
from dataclasses import replace

import pytest
import torch
from calls import INPUTS, D, H, compare, in_documents, outcome, padded
from conftest import DEVICE

pytest.importorskip("triton", reason="needs the package triton")

from fairseq_rpe.attention import AttentionPlan, reference
from fairseq_rpe.attention.scaled_distance_bias import visible_pieces
from fairseq_rpe.attention.triton import refusal_reason, triton, tuning
from fairseq_rpe.core import Positions, UserError
from fairseq_rpe.encodings import build

FIRE = "fire:init_L=20"  # some queries before L, some after it
HALVES = torch.arange(19, device=DEVICE)[None] / 2
ONE = {"rows": 1, "heads": 1}
CALLS = [
    (FIRE, {"n": 37, "rows": 1}),
    ("fire:hidden=7,activation=leaky_relu,output_activation=leaky_relu,threshold=fixed,init_L=9", {"n": 37} | ONE),
    ("fire:hidden_layers=0,log=false,threshold=none", {"n": 19} | ONE),  # a single piece
    (FIRE, {"n": 1} | ONE),
    pytest.param(FIRE, {"n": 5, "m": 41} | ONE, marks=pytest.mark.release),
    (FIRE, padded(19) | {"heads": 1}),
    (FIRE, in_documents(37) | {"heads": 1}),
    (FIRE, padded(5, 41) | {"heads": 1}),
    (FIRE, {"n": 19, "pos": Positions(HALVES, HALVES, 0.5)} | ONE),
]


@pytest.fixture(autouse=True)
def large_blocks(monkeypatch):
    """The interpreter's time goes by the number of blocks; the sizes as they are come in ``test_small_blocks``."""
    monkeypatch.setattr(tuning, "INTERPRETER_SIZES", {"BLOCK_M": 32, "BLOCK_N": 32})


@pytest.mark.parametrize(("spec", "call"), CALLS)
def test_equals_the_reference(spec, call):
    found = compare("triton", spec, **call)
    if call.get("rows") == 1 and call["n"] == 37:
        assert all(found[name].abs().max() > 1e-4 for name in found.keys() & {"c", "L_multiplier", "mlp.0.weight"})


def test_small_blocks(monkeypatch):
    monkeypatch.setattr(tuning, "INTERPRETER_SIZES", {"BLOCK_M": 32, "BLOCK_N": 16})
    compare("triton", FIRE, n=33, width=40, **ONE)


@pytest.mark.parametrize(
    ("spec", "dtype"),
    [(FIRE, torch.bfloat16), pytest.param("fire:hidden_layers=1,init_L=20", torch.float16, marks=pytest.mark.release)],
)
def test_half_precision(spec, dtype):
    """As for tables; the last layer's bias shifts whole rows of scores, so its gradient is 0 and rounding."""
    a, b = (outcome(name, spec, 37, **ONE, dtype=dtype) for name in ("reference", "triton"))
    for name in a:
        error, scale = (a[name].double() - b[name].double()), a[name].double().abs().max()
        if name == f"mlp.{build(spec, H, H * D).config.hidden_layers}.bias":
            scale = a[name.replace("bias", "weight")].abs().max()
        assert error.square().mean().sqrt() <= (1e-3 if name in INPUTS else 1e-4) * scale, name


def test_the_same_again():
    a, b = (outcome("triton", FIRE, 18, **ONE) for _ in range(2))
    assert all(torch.equal(a[name], b[name]) for name in a)


def test_only_gradients_that_are_needed():
    """A fixed curve needs none; one of which only far or only near is learned gets that one."""
    pos = Positions.arange(20, device=DEVICE)
    form = build(FIRE, H, H * D).to(DEVICE).position_bias(pos)
    cut = visible_pieces(form, AttentionPlan(pos, form))
    pieces = replace(cut, value=cut.value.detach(), slope=cut.slope.detach())
    fixed = replace(
        form,
        distance_values=form.distance_values.detach(),
        query_scale=form.query_scale.detach(),
        make_pieces=lambda top: pieces,
    )
    q, k, v = (torch.randn(1, H, 20, D, device=DEVICE) for _ in range(3))
    assert not triton(q, k, v, AttentionPlan(pos, fixed)).requires_grad
    for name in ("distance_values", "query_scale"):
        learned = getattr(fixed, name).clone().requires_grad_()
        plan = AttentionPlan(pos, replace(fixed, **{name: learned}))
        found = [torch.autograd.grad(f(q, k, v, plan).square().sum(), learned)[0] for f in (by_pieces, triton)]
        torch.testing.assert_close(*found, rtol=1e-4, atol=1e-5)


def by_pieces(q, k, v, plan):
    """Attention with the bias looked up in the pieces, pair by pair."""
    form, n = plan.bias, q.shape[2]
    pieces = visible_pieces(form, plan)
    distance = (torch.arange(n)[:, None] - torch.arange(n)).clamp_min(0).to(q.device)
    x = form.distance_values[distance] * form.query_scale[0, :, None]
    p = torch.bucketize(x, pieces.breakpoints, right=True)
    bias = pieces.value[:, p] + pieces.slope[:, p] * (x - pieces.midpoints[p])
    scores = q @ k.mT * D**-0.5 + bias
    return scores.masked_fill(~plan.visibility(n, n, q.device), -math.inf).softmax(-1) @ v


def test_a_part_of_a_plan():
    """Some queries and the keys up to the last of them, as encodings that limit queries ask for."""
    pos = Positions.arange(30, device=DEVICE)
    plan = AttentionPlan(pos, build(FIRE, H, H * D).to(DEVICE).position_bias(pos))
    q, k, v = (torch.randn(1, H, 30, D, device=DEVICE) for _ in range(3))
    with torch.no_grad():
        whole = reference(q, k, v, plan)
        found = triton(q[:, :, 11:23], k[:, :, :23], v[:, :, :23], plan.slice_queries(11, 23))
    torch.testing.assert_close(found, whole[:, :, 11:23], rtol=1e-4, atol=2e-5)


def test_refusals():
    """What is not made of pieces: the network at every pair, positions of unequal spacing."""
    q = torch.zeros(1, H, 4, D, device=DEVICE)
    at = torch.tensor([[0.0, 1.0, 3.0, 4.0]], device=DEVICE)
    for spec, pos in (("fire:exact=true", Positions.arange(4, device=DEVICE)), ("fire", Positions(at, at, 1.0, False))):
        plan = AttentionPlan(pos, build(spec, H, H * D).to(DEVICE).position_bias(pos))
        assert "straight pieces, which this is not: use 'sdpa'" in refusal_reason(q, q, q, plan)
        with pytest.raises(UserError, match="straight pieces"):
            triton(q, q, q, plan)
