"""LongRoPE, CLEX and queries that grow with ln i: golden values, independent formulas, decoding and refusals."""

from __future__ import annotations

import importlib.util
import math

import numpy as np
import pytest
import torch
from numeric import exact, scores, turned, vectors
from refusal import refused

from fairseq_rpe.attention import choose_backend
from fairseq_rpe.attention.forward import build_plan
from fairseq_rpe.core import Positions
from fairseq_rpe.encodings import build
from fairseq_rpe.positions import build as build_positions

SHAPES = ((2, 16, 5), (4, 64, 12), (3, 30, 7), (2, 4, 20))  # heads, width, tokens
SEARCHED = "longrope:factors=1+1.5+3+4"


def test_longrope_attention_factor():
    """On the turned part of queries and keys, of short rows too."""
    x, pos, plain = vectors(1, 1, 3, 8)[0], exact(3), build("rope:rotary_fraction=0.5", 1, 8)
    factors = {"4": 1.0801234497, "32": 1.1902380714, "4,attention=yarn": 1.1386294361, "1": 1}
    for options, m in factors.items():
        encoding = build(f"longrope:factor={options},original_length=4096,rotary_fraction=0.5", 1, 8)
        for key in (False, True):
            got, base = (e.rotate(x, pos.k, pos, key=key) for e in (encoding, plain))
            torch.testing.assert_close(got[..., :4], base[..., :4] * m, rtol=1e-9, atol=0)
            assert torch.equal(got[..., 4:], x[..., 4:])


@pytest.mark.parametrize(("heads", "width", "n"), [*SHAPES, (2, 16, 6)])
def test_longrope_against_the_formula(heads, width, n):
    head, scale, length = width // heads, 3.0, 6
    start = 2 if head > 2 else 0  # one pair has the factor 1, of which no tokens can be left out
    factors = [round(1 + 2 * s / head, 2) for s in range(head // 2)]
    listed = "+".join(map(str, factors))
    spec = f"longrope:factors={listed},factor={scale},start_tokens={start},original_length={length}"
    at = np.arange(n)[:, None]
    theta = 10000.0 ** (-np.arange(0, head, 2) / head)
    stretched = np.where(at >= start, at * theta / np.array(factors), at * theta) if n > length else at * theta
    assert_scores(build(spec, heads, width), heads, n, 1e-10, stretched, 1 + math.log(scale) / math.log(length))


def test_longrope_rows_are_long_or_short_apart():
    encoding = build(f"{SEARCHED},original_length=6", 2, 16)
    q = vectors(2, 2, 10, 8)[0]
    at = (torch.arange(10.0, dtype=torch.float64)[None] - torch.tensor([[5.0], [0.0]])).clamp_min(0)  # rows of 5 and 10
    got = encoding.rotate(q, at, Positions(at, at))
    short, plain = exact(5), build("rope", 2, 16)
    torch.testing.assert_close(got[:1, :, 5:], plain.rotate(q[:1, :, 5:], short.k, short))
    long, always = exact(10), build(f"{SEARCHED},short=scaled", 2, 16)
    torch.testing.assert_close(got[1:], always.rotate(q[1:], long.k, long))
    assert encoding.length_dependent and not encoding.fixed_rotation
    assert always.fixed_rotation and not always.length_dependent


@pytest.mark.parametrize("fraction", [1.0, 0.5])
@pytest.mark.parametrize(("seed", "scaling"), [("pi", "linear"), ("ntk", "ntk"), ("yarn", "yarn")])
def test_longrope_seeds_are_the_scalings_of_rope(seed, scaling, fraction):
    own = f"factor=4,rotary_fraction={fraction},base=500"
    got = build(f"longrope:factors={seed},original_length=64,{own},short=scaled", 2, 64)
    length = ",original_length=64" if seed == "yarn" else ""
    rope = build(f"rope:scaling={scaling},{own}{length}", 2, 64)
    pos = exact(9)
    torch.testing.assert_close(got.angles(pos.k, pos), rope.angles(pos.k, pos), rtol=1e-12, atol=0)
    factors = list(got.pair_factors)
    assert min(factors) == factors[0] >= 1 and factors == sorted(factors)


def test_longrope_one_factor_is_that_of_every_pair():
    pos = exact(4)
    same = (build(f"longrope:factors={text},original_length=3", 1, 8).angles(pos.k, pos) for text in ("2", "2+2+2+2"))
    assert torch.equal(*same)


def assert_scores(encoding, heads, n, tolerance, angles, factor=1.0):
    """Products of queries, times a factor, and keys, both turned by these angles in numpy."""
    q, k = vectors(1, heads, n, encoding.width // heads, count=2)
    got = scores(encoding, q, k, exact(n))[0].numpy()
    for head in range(heads):
        expected = turned(q[0, head].numpy() * factor, angles) @ turned(k[0, head].numpy(), angles).T
        np.testing.assert_allclose(got[head], expected, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize(("heads", "width", "n"), SHAPES)
@pytest.mark.parametrize("kind", ["clipped", "plain"])
def test_entropy_aware_abf_against_the_formula(heads, width, n, kind):
    """Of the whole head, where a part of it turns too."""
    head, length = width // heads, 5
    fraction = 1.0 if head % 4 else 0.5
    pairs = int(head * fraction) // 2
    angles = np.arange(n)[:, None] * 500000.0 ** (-np.arange(pairs) / pairs)
    growth = np.log(np.arange(n) + 1) / math.log(length)
    growth = np.maximum(growth, 1) if kind == "clipped" else growth
    spec = f"rope:base=500000,logn={kind},original_length={length},rotary_fraction={fraction}"
    assert_scores(build(spec, heads, width), heads, n, 1e-10, angles, growth[:, None])


def test_logn_beside_yarn_and_without_a_claim_about_bounded_scores():
    x, pos = vectors(1, 2, 40, 8)[0], exact(40)
    yarn, both = (build(f"rope:scaling=yarn,factor=4,original_length=8{more}", 2, 16) for more in ("", ",logn=plain"))
    growth = torch.log(pos.q + 1)[..., None] / math.log(8)
    torch.testing.assert_close(both.rotate(x, pos.q, pos), yarn.rotate(x, pos.q, pos) * growth)
    assert torch.equal(both.rotate(x, pos.k, pos, True), yarn.rotate(x, pos.k, pos, True))
    assert both.fixed_rotation and not both.length_dependent
    assert both.log_bias_formulas() is None and yarn.log_bias_formulas() is not None


def test_clex_at_the_start_is_ntk():
    exactly = [[(2 * t - 1) ** (-2 * c / 6) * 10 ** (-c) for c in range(4)] for t in range(1, 3)]
    for spec, tolerance in (("clex:original_length=7", 2e-6), ("clex:original_length=7,steps=100", 1e-9)):
        np.testing.assert_allclose(build(spec, 1, 8).solve(2).detach().numpy(), exactly, rtol=tolerance)


def learned(spec: str, heads: int, width: int, scale: float = 0.02):
    encoding = build(spec, heads, width)
    made = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for p in encoding.parameters():
            p.copy_(torch.randn(p.shape, generator=made) * scale * (5 if p is encoding.up.weight else 1))
    return encoding


@pytest.mark.parametrize(("heads", "width", "n"), SHAPES)
def test_clex_against_the_equation(heads, width, n):
    """The equation by classical Runge-Kutta steps in numpy, at the t of the row's length."""
    tanh, expansion = width == 64, 2 if heads == 2 else 1
    options = f"original_length=3,max_factor=5,base=500,expansion={expansion},steps=40"
    encoding = learned(f"clex:{options}" + (",activation=tanh" if tanh else ""), heads, width)
    d = width // heads
    up, down = (w.detach().double().numpy() for w in (encoding.up.weight, encoding.down.weight))
    assert up.shape == (expansion * d, d // 2) and down.shape == (d // 2, expansion * d)
    i = 2 * np.arange(d // 2)

    def speed(t, z):
        alpha = 2 * t - 1
        base = 500 * alpha ** (d / max(d - 2, 1))
        x = up @ (z + np.log(base ** (-i / d)))
        hidden = np.tanh(x) if tanh else x / (1 + np.exp(-x))
        return down @ hidden - 2 * i / max(d - 2, 1) / alpha

    t_end = min(max(math.ceil(n / 3), 1), 5)
    z, t, h = -i / d * math.log(500), 1.0, 1 / 200
    for _ in range(200 * (t_end - 1)):
        a = speed(t, z)
        b = speed(t + h / 2, z + h / 2 * a)
        c = speed(t + h / 2, z + h / 2 * b)
        z, t = z + h / 6 * (a + 2 * b + 2 * c + speed(t + h, z + h * c)), t + h
    assert_scores(encoding, heads, n, 1e-6, np.arange(n)[:, None] * np.exp(z))


def test_clex_takes_the_t_of_each_row():
    encoding = learned("clex:original_length=8,max_factor=3", 1, 8)
    lengths = torch.tensor([[1.0], [8.0], [9.0], [16.0], [17.0], [24.0], [25.0], [900.0]], dtype=torch.float64)
    table = encoding.solve(3).detach()
    with torch.no_grad():
        got = encoding.inv_freq(lengths)
    assert torch.equal(got, table[[0, 0, 1, 1, 2, 2, 2, 2]])
    torch.testing.assert_close(encoding.inv_freq(lengths), got, rtol=1e-12, atol=0)


def test_clex_gradients():
    """Against differences, through the plan of a pass and through rotate itself; none where all rows are short."""
    encoding = learned("clex:original_length=4,max_factor=4", 2, 16).double()
    q, k = vectors(1, 2, 11, 8, count=2)
    pos = exact(11)

    def loss(direct: bool) -> torch.Tensor:
        turn = encoding.rotate if direct else build_plan(encoding, pos, None, choose_backend("reference")).rotate
        return (turn(q, pos.q, pos) @ turn(k, pos.k, pos, key=True).mT).tril().sin().sum()

    weights = [encoding.up.weight, encoding.down.weight]
    steps = [1e-5 * torch.randn(w.shape, generator=torch.Generator().manual_seed(2)).double() for w in weights]
    for direct in (True, False):
        found = torch.autograd.grad(loss(direct), weights)
        for weight, step, grad in zip(weights, steps, found, strict=True):
            values = []
            with torch.no_grad():
                for change in (step, -2 * step):
                    weight.add_(change)
                    values.append(loss(direct).item())
                weight.add_(step)
            assert values[0] - values[1] == pytest.approx(2 * (grad * step).sum().item(), rel=1e-5) and grad.any()
    short = exact(4)
    encoding.rotate(q[:, :, :4], short.q, short).sum().backward()
    assert not encoding.up.weight.grad.any() and not encoding.down.weight.grad.any()


def test_clex_keeps_its_solution_until_the_weights_change(monkeypatch):
    encoding, solved = learned("clex:original_length=4", 2, 16), []
    solve = type(encoding).solve
    monkeypatch.setattr(type(encoding), "solve", lambda self, top: solved.append(top) or solve(self, top))
    x, pos = vectors(1, 2, 11, 8)[0], exact(11)
    with torch.no_grad():
        first = encoding.rotate(x, pos.k, pos)
        assert torch.equal(encoding.rotate(x, pos.k, pos, True), first) and solved == [16]
        encoding.down.weight.mul_(2)
        assert not torch.equal(encoding.rotate(x, pos.k, pos), first) and solved == [16, 16]
    half = encoding.half()
    assert all(p.dtype == torch.float32 for p in half.parameters())
    assert encoding.rotate(x.half(), pos.k, pos).dtype == torch.float16


@pytest.mark.parametrize("gradients", [True, False])
def test_clex_refuses_a_solution_that_overflows(gradients):
    """Where the row's own length needs it: θ(1) is rotary's own."""
    x = vectors(1, 2, 11, 8)[0]
    for weight in (1e4, math.nan):
        encoding = learned("clex:original_length=4,max_factor=4", 2, 16)
        torch.nn.init.constant_(encoding.down.weight, weight)
        with torch.set_grad_enabled(gradients):
            for pos in (exact(11), exact(9)):
                with refused("'clex': the solution of its differential equation overflows.*rate"):
                    encoding.rotate(x[:, :, : pos.k.shape[1]], pos.k, pos)
                with refused("'clex'.*overflows"):
                    encoding.rotation(pos)
        with torch.no_grad():
            assert encoding.rotate(x[:, :, :4], exact(4).k, exact(4)).isfinite().all()


def test_clex_leaves_no_graph_behind():
    encoding, pos = learned("clex:original_length=4", 2, 16), exact(11)
    plan = build_plan(encoding, pos, None, choose_backend("reference"))
    assert plan.rotate(vectors(1, 2, 11, 8)[0], pos.q, pos).requires_grad
    assert not [x for x in vars(encoding).values() if isinstance(x, torch.Tensor) and x.requires_grad]
    assert not encoding._cos_sin_cache and encoding._angle_cache is None


def test_clex_without_torchdiffeq(monkeypatch):
    find = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "torchdiffeq" else find(name))
    with refused(r"needs torchdiffeq.*pip install 'fairseq_rpe\[ode\]'"):
        build("clex:original_length=4", 2, 16)


def test_stretched_positions():
    transform, index = build_positions("stretch:times=5"), torch.arange(12.0)[None]
    lengths = torch.tensor([12, 12, 7, 1])
    clex, seen = build("clex:original_length=12,max_factor=5", 2, 16), set()
    table = clex.solve(5).detach()
    for seed in range(60):
        moved = transform(index, lengths, torch.Generator().manual_seed(seed))
        t = round((moved.k[0, -1].item() + 1) / 12)
        assert torch.equal(moved.k[0], moved.k[1])
        for row, n in zip(moved.k, lengths.tolist(), strict=True):
            assert (row[:n].diff() >= 1).all() and row[n - 1] == t * n - 1 and (n == 1 or row[0] == 0)
        assert moved.contiguous == (t == 1)
        seen.add(t)
        with torch.no_grad():
            theta = clex.inv_freq(moved.k.amax(1, keepdim=True).double() + 1)
        torch.testing.assert_close(theta[:1], table[t - 1 : t])
    assert seen == {1, 2, 3, 4, 5}
    with refused("'stretch:times=4096' of a row of 9000 tokens is more than 16777216 positions"):
        build_positions("stretch:times=4096")(torch.arange(9000.0)[None], torch.tensor([9000]), torch.Generator())
