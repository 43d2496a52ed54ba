"""FLOATER: the path against a solver of our own, attention against its equation, gradients, decoding, staleness."""

from __future__ import annotations

import sys

import numpy as np
import pytest
import torch
from conftest import make_model
from numeric import exact, softmax, vectors
from refusal import refused

pytest.importorskip("torchdiffeq")

from fairseq_rpe import RelativeAttention, attend
from fairseq_rpe.analysis.convergence import UNDECIDED, verdict
from fairseq_rpe.core import Positions
from fairseq_rpe.encodings import build

SHAPES = [(1, 1, 1), (2, 3, 2), (1, 8, 4), (2, 21, 2)]  # rows, tokens, heads


def built(spec: str, heads: int, width: int, **more):
    torch.manual_seed(0)
    return build(spec, heads, width, **more)


def in_numpy(made, count: int) -> np.ndarray:
    """The path at 0, dt … by Kutta's 3/8 rule, of the same order as the classical one."""
    w1, b1, w2, b2 = (x.detach().double().numpy() for x in made.flow.parameters())

    def h(t, p):
        when = np.full((3, 1), t)
        hidden = np.maximum(np.concatenate([p, when], 1) @ w1.T + b1, 0)
        return np.concatenate([hidden, when], 1) @ w2.T + b2

    p, t, steps = made.start.detach().double().numpy(), 0.0, made.config.steps
    found, e = [p], made.config.dt / steps
    for number in range((count - 1) * steps):
        k1 = h(t, p)
        k2 = h(t + e / 3, p + e * k1 / 3)
        k3 = h(t + 2 * e / 3, p + e * (k2 - k1 / 3))
        k4 = h(t + e, p + e * (k1 - k2 + k3))
        p, t = p + e * (k1 + 3 * (k2 + k3) + k4) / 8, t + e
        if number % steps == steps - 1:
            found.append(p)
    return np.stack(found)


@pytest.mark.parametrize(("rows", "n", "heads"), SHAPES)
def test_attention_is_its_equation(rows, n, heads):
    made = built("floater:dt=0.2,steps=2", heads, heads * 4).double()
    path = in_numpy(made, n)
    np.testing.assert_allclose(made.path(n).detach().numpy(), path, rtol=1e-9)
    q, k, v = vectors(rows, heads, n, 4)
    split = path.reshape(n, 3, heads, 4)
    a, b, c = (x.numpy() + split[None, :, i].transpose(0, 2, 1, 3) for i, x in enumerate((q, k, v)))
    logits = np.where(np.tril(np.ones((n, n))) > 0, a @ b.swapaxes(-1, -2) / 2, -np.inf)
    expected = softmax(logits) @ c
    np.testing.assert_allclose(made.rotate(q, exact(n).q, exact(n)).detach().numpy(), a, rtol=1e-8)
    got = attend(q, k, v, made, positions=exact(n))
    np.testing.assert_allclose(got.detach().numpy(), expected, rtol=1e-8, atol=1e-10)


def test_a_longer_path_goes_on_from_the_end_of_a_shorter():
    made = built("floater", 2, 8)
    with torch.no_grad():
        short, whole = made.path(9), made.path(30)
        torch.testing.assert_close(made.path(30, short), whole, rtol=1e-5, atol=1e-6)
        assert made.path(5, short) is short and torch.equal(whole[:9], short)
        few, many = (built(f"floater:steps={steps}", 2, 8).path(30) for steps in (1, 10))
    torch.testing.assert_close(few, many, rtol=1e-4, atol=1e-5)


def test_gradients_of_the_adjoint_are_those_of_the_steps():
    (q, k, v, weights), found = vectors(1, 2, 6, 2, count=4), []
    for adjoint in ("false", "true"):
        made = built(f"floater:dt=0.1,steps=8,adjoint={adjoint}", 2, 4).double()
        (attend(q, k, v, made, positions=exact(6)) * weights).sum().backward()
        found.append({name: p.grad for name, p in made.named_parameters()})
    assert all(grad.any() for grad in found[0].values())
    torch.testing.assert_close(found[1], found[0], rtol=1e-3, atol=1e-5)


def test_no_path_outlives_its_weights():
    """A change through .data, which no counter of torch's sees, shows in the next pass and in the next text."""
    layer = RelativeAttention(8, 2, built("floater", 2, 8)).eval()
    x = torch.randn(1, 7, 8)
    with torch.no_grad():
        for p in layer.encoding.parameters():
            before = layer(x)
            assert torch.equal(layer(x), before)
            p.data.add_(0.3)
            assert not torch.allclose(layer(x), before, atol=1e-4)


def test_the_path_is_kept_without_gradients(monkeypatch):
    """A text that grows by a token does not ask for each; the path is the one that is solved at once, to the bit."""
    made, asked = built("floater", 2, 8), []
    path = type(made).path
    monkeypatch.setattr(type(made), "path", lambda self, *args: asked.append(args[0]) or path(self, *args))
    with torch.no_grad():
        for m in (*range(1, 40), 3, 20):
            settled = made.prepare_positions(Positions.arange(1, m))
        assert asked == [1, 2, 4, 8, 16, 32, 64]
        assert torch.equal(settled.path, path(made, 64))
        assert made.prepare_positions(Positions.arange(9)).path is settled.path
    graded = made.prepare_positions(Positions.arange(9)).path
    assert graded.requires_grad and len(graded) == 9 and torch.equal(graded, settled.path[:9])


@pytest.mark.parametrize("gradients", [True, False])
def test_a_path_that_overflows_is_refused(gradients):
    made = build("floater:steps=1,dt=1", 2, 8)
    with torch.no_grad():
        made.flow.outer.bias.fill_(1e38)
    with torch.set_grad_enabled(gradients):
        with refused("'floater': the solution of its differential equation overflows"):
            made.prepare_positions(Positions.arange(90))
        assert made.prepare_positions(Positions.arange(1)).path[0].isfinite().all()


def test_layers_share_the_dynamics_and_start_apart(task):
    model = make_model(task, "floater")
    one, other = model.decoder.encodings
    assert one.flow is other.flow and not torch.equal(one.start, other.start)
    names = [name for name, _ in model.named_parameters() if "encodings" in name]
    assert len(names) == 2 + 4 and len(make_model(task, "floater", rpe_share="model").decoder.encodings) == 1
    twin = make_model(task, "floater", seed=1)
    twin.load_state_dict(model.state_dict())
    with torch.no_grad():
        assert torch.equal(*(m(torch.arange(4, 20)[None])[0] for m in (model, twin)))


def test_refusals(monkeypatch):
    made = built("floater", 2, 8)
    with refused("rotates queries and keys"):
        made.mask(3)
    assert {head.decision for head in verdict(made)} == {UNDECIDED}
    monkeypatch.setitem(sys.modules, "torchdiffeq", None)
    with refused("'floater' needs torchdiffeq, which is not installed: pip install"):
        built("floater", 2, 8)
