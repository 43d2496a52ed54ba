"""FIRE's network as straight pieces, and attention with them, against the network run for every pair."""

import importlib

import pytest
import torch
from conftest import make_model
from test_attention import assert_same, outputs_and_gradients
from torch.nn import functional as F

from fairseq_rpe.attention import Plan, reference, sdpa
from fairseq_rpe.core import Curve, Pair, Positions
from fairseq_rpe.encodings import build
from fairseq_rpe.encodings.segments import straight_pieces

SPECS = [
    "fire",
    "fire:hidden_layers=1,output_activation=relu",
    "fire:activation=leaky_relu,output_activation=leaky_relu,threshold=fixed",
    "fire:hidden_layers=0,log=false,threshold=none",
]


def trained(spec: str, seed: int, size: float):
    """FIRE with weights ``size`` times those it starts with: as bent as a trained one, and more."""
    torch.manual_seed(seed)
    fire = build(spec, 4, 64)
    with torch.no_grad():
        for p in fire.mlp.parameters():
            p.mul_(size)
    return fire


def values(pieces, x):
    """(H, len(x)) float64 of the pieces at points x."""
    p = torch.bucketize(x.to(pieces.ends.dtype), pieces.ends, right=True)
    return pieces.value[:, p].double() + pieces.slope[:, p].double() * (x - pieces.middle[p].double())


@pytest.mark.parametrize("size", [1.0, 4.0])
@pytest.mark.parametrize("spec", SPECS)
def test_pieces_equal_the_network(spec, size):
    """Exact but for rounding."""
    x = torch.linspace(0, 1, 20011, dtype=torch.float64)
    for seed in range(5):
        fire = trained(spec, seed, size)
        exact = x[:, None]
        for weight, bias, activation in fire.stages():
            exact = F.linear(exact, weight.double(), bias.double())
            exact = exact if activation is None else activation(exact)
        for dtype, rounding in ((torch.float32, 1e-6), (torch.float64, 1e-12)):
            pieces = straight_pieces(fire.stages(), 1.0, dtype)
            off = (values(pieces, x) - exact.T).abs().amax(1)
            assert (off <= rounding * (1 + exact.abs().max())).all()
        assert len(pieces.middle) < 5000


def test_kinks_of_a_network_by_hand():
    """relu(x - 1/4) - 2·relu(x - 1/2) + 1, and a unit whose kink is outside."""
    first = torch.tensor([[1.0], [1.0], [1.0]]), torch.tensor([-0.25, -0.5, 2.0]), F.relu
    last = torch.tensor([[1.0, -2.0, 0.0]]), torch.tensor([1.0]), None
    pieces = straight_pieces([first, last], 1.0, torch.float64)
    assert pieces.ends.tolist() == pytest.approx([0.25, 0.5])
    assert pieces.slope.tolist() == [[0.0, 1.0, -1.0]]
    assert values(pieces, torch.tensor([0.0, 0.5, 1.0], dtype=torch.float64)).tolist() == [[1.0, 1.25, 0.75]]


@pytest.mark.parametrize("dropout", [0.0, 0.2])
@pytest.mark.parametrize("spec", SPECS)
def test_attention_and_every_gradient(spec, dropout, monkeypatch):
    """Bent networks, several blocks and groups, a length above and below L; float32 against the plain way."""
    monkeypatch.setattr(importlib.import_module("fairseq_rpe.attention.blocks"), "GROUP_ELEMENTS", 150_000)
    monkeypatch.setattr("test_attention.build", lambda spec, *_: trained(spec, 3, 2.0))
    spec += ("," if ":" in spec else ":") + "init_L=100" if "init_L" not in spec else ""
    found = [outputs_and_gradients(f, spec, 523, dropout=dropout) for f in (reference, sdpa)]
    assert found[1]["mlp.0.weight"].abs().max() > 1e-3
    positions = {name: [x.pop(name) for x in found] for name in ("c", "L_multiplier") if name in found[0]}
    assert_same(*found, 3e-5)
    for a, b in positions.values():  # c's gradient is a difference of numbers near 100
        assert (a - b).abs() <= 1e-4 * a.abs().clamp_min(1)


@pytest.mark.parametrize("step", [1.0, 0.25])
def test_offset_and_interpolated_positions(step):
    at = torch.arange(7.0, 407)[None] * step
    pos = Positions(at, at, step)
    fire = trained("fire:init_L=30", 0, 2.0)
    assert isinstance(fire.form(pos), Curve)
    q, k, v = (torch.randn(2, 4, 400, 8) for _ in range(3))
    plan = Plan(pos, fire.form(pos))
    torch.testing.assert_close(sdpa(q, k, v, plan), reference(q, k, v, plan), rtol=1e-5, atol=1e-5)


def test_rows_with_offsets_of_their_own_take_the_plain_way():
    at = torch.arange(300.0)[None] + torch.tensor([[0.0], [50.0]])
    pos = Positions(at, at)
    fire = trained("fire:init_L=30", 0, 2.0)
    q, k, v = (torch.randn(2, 4, 300, 8) for _ in range(3))
    plan = Plan(pos, fire.form(pos))
    torch.testing.assert_close(sdpa(q, k, v, plan), reference(q, k, v, plan), rtol=1e-5, atol=1e-5)


def test_exact_runs_the_network_for_every_pair():
    pos = Positions.arange(300)
    forms = [trained(spec, 0, 2.0).form(pos) for spec in ("fire", "fire:exact=true")]
    assert isinstance(forms[0], Curve) and type(forms[1]) is Pair
    q, k, v = (torch.randn(1, 4, 300, 8) for _ in range(3))
    curve, exact = (sdpa(q, k, v, Plan(pos, form)) for form in forms)
    assert not torch.equal(curve, exact)
    torch.testing.assert_close(curve, exact, rtol=1e-5, atol=1e-5)


def test_bf16():
    a, b = (outputs_and_gradients(f, "fire", 300, torch.bfloat16) for f in (reference, sdpa))
    # the last layer's bias shifts whole rows of scores, so that its gradient is 0 and what is left is rounding
    a.pop("mlp.2.bias"), b.pop("mlp.2.bias")
    assert_same(a, b, 0.02)


def test_decoding_step_by_step_equals_the_whole(task, monkeypatch):
    """One query at a time takes the plain way, the whole the pieces."""
    monkeypatch.setattr(importlib.import_module("fairseq_rpe.attention.sdpa"), "CURVE_FROM", 2)
    model = make_model(task, "fire:init_L=4")
    tokens = torch.randint(4, 60, (2, 15), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        whole = model(tokens)[0]
        state: dict = {}
        steps = [model.decoder(tokens[:, : i + 1], incremental_state=state)[0] for i in range(15)]
    torch.testing.assert_close(torch.cat(steps, 1), whole, rtol=1e-4, atol=1e-5)


def test_nothing_of_size_n_squared_is_made():
    """The largest tensor of a forward and backward pass holds less than a quarter of one head's n² float32 numbers."""
    largest = [0]

    class Largest(torch.utils._python_dispatch.TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            result = func(*args, **(kwargs or {}))
            for x in result if isinstance(result, (tuple, list)) else [result]:
                if isinstance(x, torch.Tensor):
                    largest[0] = max(largest[0], x.untyped_storage().nbytes())
            return result

    n = 3000
    with Largest():
        fire = build("fire", 2, 16)
        q, k, v = (torch.randn(1, 2, n, 8, requires_grad=True) for _ in range(3))
        pos = Positions.arange(n)
        sdpa(q, k, v, Plan(pos, fire.form(pos))).sum().backward()
    assert 0 < largest[0] < n * n
    assert all(p.grad is not None for p in fire.parameters())


@pytest.mark.parametrize(
    "spec", ["fire:activation=gelu", "fire:output_activation=gelu", "fire:hidden_layers=1,activation=gelu"]
)
def test_first_and_second_derivatives_of_smooth_networks(spec):
    """A smooth network is run for every pair: its pieces would have wrong slopes, and no second derivative."""
    n = 260  # more than CURVE_FROM
    fire = build(spec, 2, 8, 64).double()
    parameters = dict(fire.named_parameters())
    generator = torch.Generator().manual_seed(0)
    q, k, v, w = (torch.randn(1, 2, n, 4, dtype=torch.float64, generator=generator) for _ in range(4))
    plan = Plan(pos := Positions.arange(n, dtype=torch.float64), fire.form(pos))
    found = []
    for attend in (sdpa, reference):
        first = torch.autograd.grad((attend(q, k, v, plan) * w).sum(), [*parameters.values()], create_graph=True)
        second = torch.autograd.grad(sum(x.square().sum() for x in first), [*parameters.values()], retain_graph=True)
        found.append((first, second))
    for name, *pair in zip([*parameters] * 2, *(first + second for first, second in found), strict=True):
        # the last layer's bias shifts whole rows of scores: its derivatives are rounding
        torch.testing.assert_close(*pair, rtol=1e-9, atol=1e-10, msg=lambda text, name=name: f"{name}: {text}")
