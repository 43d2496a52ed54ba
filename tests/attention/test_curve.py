"""FIRE's network as straight pieces, and attention with them, against the network run for every pair."""

import importlib
import math

import pytest
import torch
from calls import assert_same
from test_sdpa import outcome
from torch.nn import functional as F

from fairseq_rpe.attention import AttentionPlan, reference, scaled_distance_bias, sdpa
from fairseq_rpe.attention.scaled_distance_bias import ScaledDistanceBlocks, last_row_bias
from fairseq_rpe.core import DenseBias, PairBias, Positions, ScaledDistanceBias
from fairseq_rpe.encodings import build
from fairseq_rpe.encodings.piecewise_linear import linear_pieces

SPECS = [
    "fire",
    "fire:hidden_layers=1,output_activation=relu",
    "fire:activation=leaky_relu,output_activation=leaky_relu,threshold=fixed",
    "fire:hidden_layers=0,log=false,threshold=none",
]


def trained(spec: str, seed: int = 0, size: float = 2.0):
    """FIRE with weights ``size`` times those it starts with: as bent as a trained one, and more."""
    torch.manual_seed(seed)
    fire = build(spec, 4, 64)
    with torch.no_grad():
        for p in fire.mlp.parameters():
            p.mul_(size)
    return fire


def values(pieces, x):
    """(H, len(x)) float64 of the pieces at points x."""
    p = torch.bucketize(x.to(pieces.breakpoints.dtype), pieces.breakpoints, right=True)
    return pieces.value[:, p].double() + pieces.slope[:, p].double() * (x - pieces.midpoints[p].double())


@pytest.mark.parametrize("size", [1.0, 4.0])
@pytest.mark.parametrize("spec", SPECS)
def test_pieces_equal_the_network(spec, size):
    """Exact but for rounding."""
    x = torch.linspace(0, 1, 20011, dtype=torch.float64)
    for seed in range(2):
        fire = trained(spec, seed, size)
        exact = x[:, None]
        for weight, bias, activation in fire.stages():
            exact = F.linear(exact, weight.double(), bias.double())
            exact = exact if activation is None else activation(exact)
        for dtype, rounding in ((torch.float32, 1e-6), (torch.float64, 1e-12)):
            pieces = linear_pieces(fire.stages(), 1.0, dtype)
            off = (values(pieces, x) - exact.T).abs().amax(1)
            assert (off <= rounding * (1 + exact.abs().max())).all()
        assert len(pieces.midpoints) < 5000


def test_kinks_of_a_network_by_hand():
    """relu(x - 1/4) - 2·relu(x - 1/2) + 1, and a unit whose kink is outside."""
    first = torch.tensor([[1.0], [1.0], [1.0]]), torch.tensor([-0.25, -0.5, 2.0]), F.relu
    last = torch.tensor([[1.0, -2.0, 0.0]]), torch.tensor([1.0]), None
    pieces = linear_pieces([first, last], 1.0, torch.float64)
    assert pieces.breakpoints.tolist() == pytest.approx([0.25, 0.5])
    assert pieces.slope.tolist() == [[0.0, 1.0, -1.0]]
    assert values(pieces, torch.tensor([0.0, 0.5, 1.0], dtype=torch.float64)).tolist() == [[1.0, 1.25, 0.75]]


@pytest.mark.parametrize("dropout", [0.0, 0.2])
@pytest.mark.parametrize("spec", SPECS)
def test_attention_and_every_gradient(spec, dropout, monkeypatch):
    """Bent networks, several blocks and groups, a length above and below L; float32 against the plain way."""
    monkeypatch.setattr(importlib.import_module("fairseq_rpe.attention.toeplitz_attention"), "GROUP_ELEMENTS", 150_000)
    monkeypatch.setattr("calls.lively", lambda spec, *_, **__: trained(spec, 3))
    spec += ("," if ":" in spec else ":") + "init_L=100"
    found = [outcome(x, spec, 523, heads=4, width=16, dropout=dropout) for x in ("reference", "sdpa")]
    assert found[1]["mlp.0.weight"].abs().max() > 1e-3
    positions = {name: [x.pop(name) for x in found] for name in ("c", "L_multiplier") if name in found[0]}
    assert_same(*found, 3e-5)
    for a, b in positions.values():  # c's gradient is a difference of numbers near 100
        assert (a - b).abs() <= 1e-4 * a.abs().clamp_min(1)


def both_ways(pos, spec="fire:init_L=30"):
    """The output of sdpa, which is that of the reference, and the form."""
    form = trained(spec).position_bias(pos)
    q, k, v = torch.randn(3, 2, 4, pos.q.shape[1], 8, generator=torch.Generator().manual_seed(0))
    expected, found = (attend(q, k, v, AttentionPlan(pos, form)) for attend in (reference, sdpa))
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)
    return found, form


@pytest.mark.parametrize("step", [1.0, 0.25])
def test_offset_and_interpolated_positions(step):
    at = torch.arange(7.0, 407)[None] * step
    assert isinstance(both_ways(Positions(at, at, step))[1], ScaledDistanceBias)


def test_exact_runs_the_network_for_every_pair():
    (curve, form), (exact, plain) = (both_ways(Positions.arange(300), x) for x in ("fire", "fire:exact=true"))
    assert isinstance(form, ScaledDistanceBias) and type(plain) is PairBias
    assert not torch.equal(curve, exact)
    torch.testing.assert_close(curve, exact, rtol=1e-5, atol=1e-5)


def test_bf16():
    # the last layer's bias shifts whole rows of scores, so that its gradient is 0 and what is left is rounding
    a, b = (outcome(x, "fire", 300, dtype=torch.bfloat16) for x in ("reference", "sdpa"))
    a.pop("mlp.2.bias"), b.pop("mlp.2.bias")
    assert_same(a, b, 0.02)


@pytest.mark.parametrize(
    "spec", ["fire:activation=gelu", "fire:output_activation=gelu", "fire:hidden_layers=1,activation=gelu"]
)
def test_first_and_second_derivatives_of_smooth_networks(spec):
    """A smooth network is run for every pair: its pieces would have wrong slopes, and no second derivative."""
    n, fire = 260, build(spec, 2, 8, 64).double()  # more than CURVE_FROM
    names, parameters = zip(*fire.named_parameters(), strict=True)
    q, k, v, w = torch.randn(4, 1, 2, n, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    plan = AttentionPlan(pos := Positions.arange(n, dtype=torch.float64), fire.position_bias(pos))
    found = []
    for attend in (sdpa, reference):
        first = torch.autograd.grad((attend(q, k, v, plan) * w).sum(), parameters, create_graph=True)
        second = torch.autograd.grad(sum(x.square().sum() for x in first), parameters, retain_graph=True)
        found.append((*first, *second))
    for name, *pair in zip(names * 2, *found, strict=True):
        # the last layer's bias shifts whole rows of scores: its derivatives are rounding
        torch.testing.assert_close(*pair, rtol=1e-9, atol=1e-10, msg=lambda text, name=name: f"{name}: {text}")


@pytest.mark.parametrize(("spec", "start", "bands"), [("fire:init_L=20", 1920, True), ("fire:init_L=900", 256, False)])
def test_bands_of_a_block(spec, start, bands):
    """Beyond L a few distances of a block are in two pieces, below it none; the block is the network's all the same."""
    n, stop, pos = 2048, start + 128, Positions.arange(2048)
    form = trained(spec).position_bias(pos)
    pieces = form.make_pieces(1.0)
    tensors = (
        pieces.value,
        pieces.slope,
        form.distance_values,
        form.query_scale[0],
        pieces.breakpoints,
        pieces.midpoints,
    )
    bias = ScaledDistanceBlocks(n, torch.zeros(1, 4, n, 8), *tensors)
    found = bias.block(start, stop, slice(1, 3)).flip(1)
    expected = form.materialize(pos, slice(start, stop), slice(stop))[0, 1:3]
    seen = torch.arange(stop) <= torch.arange(start, stop)[:, None]
    torch.testing.assert_close(found[:, seen], expected[:, seen], rtol=1e-5, atol=1e-5)
    assert (found[:, ~seen] == -math.inf).all()
    wide = sum(last - first for first, last in bias.current.bands)
    assert (len(bias.current.bands) > 1 and 0 < wide < stop / 2) if bands else not bias.current.bands


def test_runs_that_are_close_are_one():
    mixed = torch.zeros(80, dtype=torch.bool)
    mixed[[3, 4, 10, 60]] = True
    assert scaled_distance_bias._join_runs(mixed) == [(3, 11), (60, 61)]
    assert scaled_distance_bias._join_runs(mixed[:3]) == []


def test_the_last_row_of_a_curve():
    """By pieces as by the network, for rows of a batch with their own positions; not where x is beyond the pieces."""
    at = torch.arange(77.0)[None] + torch.tensor([[0.0], [9.0]])
    pos = Positions(at[:, -1:], at)
    form = trained("fire:init_L=30").position_bias(pos)
    pieces = form.make_pieces(1.0)
    row = last_row_bias(form, pieces, 1.0)
    assert isinstance(row, DenseBias) and row.bias.shape == (2, 4, 1, 77)
    torch.testing.assert_close(row.bias, form.materialize(pos), rtol=1e-5, atol=1e-5)
    assert last_row_bias(form, pieces, 0.5) is form
