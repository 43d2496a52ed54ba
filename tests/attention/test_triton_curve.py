"""Curves (FIRE) on the Triton backend against the network run for every pair: outputs and all gradients."""

import math
from dataclasses import replace

import pytest
import torch
from conftest import DEVICE

pytest.importorskip("triton", reason="needs the package triton")

from test_triton import D, H, assert_same, both, left_padding, outputs_and_gradients

from fairseq_rpe.attention import Plan, reference
from fairseq_rpe.attention.curve import pieces_of
from fairseq_rpe.attention.triton import refusal, triton, tuning
from fairseq_rpe.core import Positions, UserError
from fairseq_rpe.encodings import build

FIRE = "fire:init_L=20"  # some queries before L, some after it
SPECS = [
    FIRE,
    "fire:hidden_layers=1,init_L=20",
    "fire:hidden=7,activation=leaky_relu,output_activation=leaky_relu,threshold=fixed,init_L=9",
    "fire:hidden_layers=0,log=false,threshold=none",  # a single piece
]


def padded(n, m, pads):
    """Positions and padding of two rows, the first with ``pads`` pads before it, as the decoder makes them."""
    padding = left_padding(2, m, pads)
    k = ((~padding).cumsum(1) - 1).clamp_min(0).float()
    return {"batch": 2, "pos": Positions(k[:, m - n :], k), "padding": padding}


@pytest.fixture(autouse=True)
def large_blocks(monkeypatch):
    """The interpreter's time goes by the number of blocks; the sizes as they are come in ``test_lengths``."""
    monkeypatch.setattr(tuning, "INTERPRETER_SIZES", {"BLOCK_M": 32, "BLOCK_N": 32})


@pytest.mark.parametrize("spec", SPECS)
def test_equals_reference(spec):
    a, b = both(spec, 37)
    assert_same(a, b, 2e-5)
    assert all(b[name].abs().max() > 1e-4 for name in b.keys() & {"c", "L_multiplier", "mlp.0.weight"})


@pytest.mark.parametrize("n", [1, 2, 16, 33])
def test_lengths(n, monkeypatch):
    monkeypatch.setattr(tuning, "INTERPRETER_SIZES", {"BLOCK_M": 32, "BLOCK_N": 16})
    assert_same(*both(FIRE, n, width=40), 2e-5)


@pytest.mark.parametrize(("n", "m"), [(19, 19), (1, 36), (5, 41)])
def test_last_queries_and_padding(n, m):
    assert_same(*both(FIRE, n, m), 2e-5)
    assert_same(*both(FIRE, n, m, **padded(n, m, 3)), 2e-5)


def test_interpolated_positions():
    at = torch.arange(35, device=DEVICE)[None] / 2
    assert_same(*both(FIRE, 35, pos=Positions(at, at, 0.5)), 2e-5)


@pytest.mark.parametrize("spec", SPECS[:2])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision(spec, dtype):
    """As for tables; the last layer's bias shifts whole rows of scores, so its gradient is 0 and rounding."""
    a, b = both(spec, 37, dtype=dtype)
    for name in a:
        error, scale = (a[name].double() - b[name].double()), a[name].double().abs().max()
        rounded = name in ("out", "dq", "dk", "dv")
        if name == f"mlp.{build(spec, H, H * D).config.hidden_layers}.bias":
            scale = a[name.replace("bias", "weight")].abs().max()
        assert error.square().mean().sqrt() <= (1e-3 if rounded else 1e-4) * scale, name


def test_the_same_again():
    a, b = (outputs_and_gradients(triton, FIRE, 18, batch=2) for _ in range(2))
    assert all(torch.equal(a[name], b[name]) for name in a)


def test_only_gradients_that_are_needed():
    """A fixed curve needs none; one of which only far or only near is learned gets that one."""
    pos = Positions.arange(20, device=DEVICE)
    form = build(FIRE, H, H * D).to(DEVICE).form(pos)
    cut = pieces_of(form, Plan(pos, form))
    pieces = replace(cut, value=cut.value.detach(), slope=cut.slope.detach())
    fixed = replace(form, far=form.far.detach(), near=form.near.detach(), pieces=lambda top: pieces)
    q, k, v = (torch.randn(1, H, 20, D, device=DEVICE) for _ in range(3))
    assert not triton(q, k, v, Plan(pos, fixed)).requires_grad
    for name in ("far", "near"):
        learned = getattr(fixed, name).clone().requires_grad_()
        plan = Plan(pos, replace(fixed, **{name: learned}))
        found = [torch.autograd.grad(f(q, k, v, plan).square().sum(), learned)[0] for f in (by_pieces, triton)]
        torch.testing.assert_close(*found, rtol=1e-4, atol=1e-5)


def by_pieces(q, k, v, plan):
    """Attention with the bias looked up in the pieces, pair by pair."""
    form, n = plan.form, q.shape[2]
    pieces = pieces_of(form, plan)
    distance = (torch.arange(n)[:, None] - torch.arange(n)).clamp_min(0).to(q.device)
    x = form.far[distance] * form.near[0, :, None]
    p = torch.bucketize(x, pieces.ends, right=True)
    bias = pieces.value[:, p] + pieces.slope[:, p] * (x - pieces.middle[p])
    scores = q @ k.mT * D**-0.5 + bias
    return scores.masked_fill(~plan.visible(n, n, q.device), -math.inf).softmax(-1) @ v


def test_a_part_of_a_plan():
    """Some queries and the keys up to the last of them, as encodings that limit queries ask for."""
    pos = Positions.arange(30, device=DEVICE)
    plan = Plan(pos, build(FIRE, H, H * D).to(DEVICE).form(pos))
    q, k, v = (torch.randn(1, H, 30, D, device=DEVICE) for _ in range(3))
    with torch.no_grad():
        whole = reference(q, k, v, plan)
        found = triton(q[:, :, 11:23], k[:, :, :23], v[:, :, :23], plan.part(11, 23))
    torch.testing.assert_close(found, whole[:, :, 11:23], rtol=1e-4, atol=2e-5)


def test_refusals():
    """What is not made of pieces: the network at every pair, positions of unequal spacing."""
    q = torch.zeros(1, H, 4, D, device=DEVICE)
    at = torch.tensor([[0.0, 1.0, 3.0, 4.0]], device=DEVICE)
    for spec, pos in (("fire:exact=true", Positions.arange(4, device=DEVICE)), ("fire", Positions(at, at, 1.0, False))):
        plan = Plan(pos, build(spec, H, H * D).to(DEVICE).form(pos))
        assert "straight pieces, which this is not: use 'sdpa'" in refusal(q, q, q, plan)
        with pytest.raises(UserError, match="straight pieces"):
            triton(q, q, q, plan)
