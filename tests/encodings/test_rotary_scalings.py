"""LongRoPE, CLEX and queries that grow with ln i: golden values, independent formulas, decoding and refusals."""

from __future__ import annotations

import importlib.util
import math

import numpy as np
import pytest
import torch
from conftest import make_model

from fairseq_rpe.attention import choose
from fairseq_rpe.attention.layer import plan_of
from fairseq_rpe.core import Positions, UserError
from fairseq_rpe.encodings import build, normalise
from fairseq_rpe.positions import build as build_positions

SHAPES = ((2, 16, 5), (1, 8, 9), (4, 64, 12), (3, 30, 7), (2, 4, 20))  # heads, width, tokens
SEARCHED = "longrope:factors=1+1.5+3+4"


def arange(n: int) -> Positions:
    return Positions.arange(n, dtype=torch.float64)


def turned(x: np.ndarray, angles: np.ndarray) -> np.ndarray:
    """(n, D) by (n, P), the pair (s, s + P) as a complex number; the rest as it is."""
    pairs = angles.shape[1]
    z = (x[:, :pairs] + 1j * x[:, pairs : 2 * pairs]) * np.exp(1j * angles)
    return np.concatenate([z.real, z.imag, x[:, 2 * pairs :]], 1)


def scores(encoding, q: torch.Tensor, k: torch.Tensor, pos: Positions) -> torch.Tensor:
    with torch.no_grad():
        return encoding.rotate(q, pos.q, pos) @ encoding.rotate(k, pos.k, pos, key=True).mT


def vectors(*shape: int) -> list[torch.Tensor]:
    made = torch.Generator().manual_seed(0)
    return [torch.randn(*shape, generator=made, dtype=torch.float64) for _ in range(2)]


# -- LongRoPE


def test_longrope_golden():
    encoding = build(f"{SEARCHED},start_tokens=4,short=scaled", 1, 8)
    angles = encoding.angles(arange(6).k, arange(6))[0]
    assert angles[1].tolist() == pytest.approx([1, 0.1, 0.01, 0.001])
    assert angles[3].tolist() == pytest.approx([3, 0.3, 0.03, 0.003], rel=1e-9)
    assert angles[5].tolist() == pytest.approx([5, 0.3333333333, 0.0166666667, 0.00125], abs=1e-10)
    plain = build(f"{SEARCHED},short=scaled", 1, 8).angles(arange(2).k, arange(2))[0, 1]
    assert plain.tolist() == pytest.approx([1, 0.0666666667, 0.0033333333, 0.00025], abs=1e-10)


@pytest.mark.parametrize(
    ("options", "m"),
    [
        ("factor=4", 1.0801234497),
        ("factor=32", 1.1902380714),
        ("factor=4,attention=yarn", 1.1386294361),
        ("factor=1", 1),
    ],
)
def test_longrope_attention_factor(options, m):
    """On the turned part of queries and keys, of short rows too."""
    encoding = build(f"longrope:{options},original_length=4096,rotary_fraction=0.5", 1, 8)
    x, pos = vectors(1, 1, 3, 8)[0], arange(3)
    plain = build("rope:rotary_fraction=0.5", 1, 8)
    for key in (False, True):
        got, base = (e.rotate(x, pos.k, pos, key=key) for e in (encoding, plain))
        torch.testing.assert_close(got[..., :4], base[..., :4] * m, rtol=1e-9, atol=0)
        assert torch.equal(got[..., 4:], x[..., 4:])


@pytest.mark.parametrize(("heads", "width", "n"), SHAPES)
def test_longrope_against_the_formula(heads, width, n):
    head, scale, length = width // heads, 3.0, 6
    start = 2 if head > 2 else 0  # one pair has the factor 1, of which no tokens can be left out
    factors = [round(1 + 2 * s / head, 2) for s in range(head // 2)]
    spec = (
        f"longrope:factors={'+'.join(map(str, factors))},factor={scale},start_tokens={start},original_length={length}"
    )
    q, k = vectors(1, heads, n, head)
    at = np.arange(n)[:, None]
    theta = 10000.0 ** (-np.arange(0, head, 2) / head)
    stretched = np.where(at >= start, at * theta / np.array(factors), at * theta) if n > length else at * theta
    m2 = 1 + math.log(scale) / math.log(length)
    got = scores(build(spec, heads, width), q, k, arange(n))
    for h in range(heads):
        expected = turned(q[0, h].numpy(), stretched) @ turned(k[0, h].numpy(), stretched).T * m2
        np.testing.assert_allclose(got[0, h].numpy(), expected, rtol=1e-10, atol=1e-10)


def test_longrope_rows_are_long_or_short_apart():
    encoding = build(f"{SEARCHED},original_length=6", 2, 16)
    q, _ = vectors(2, 2, 10, 8)
    at = (torch.arange(10.0, dtype=torch.float64)[None] - torch.tensor([[5.0], [0.0]])).clamp_min(0)  # rows of 5 and 10
    got = encoding.rotate(q, at, Positions(at, at))
    short, plain = arange(5), build("rope", 2, 16)
    torch.testing.assert_close(got[:1, :, 5:], plain.rotate(q[:1, :, 5:], short.k, short))
    long, always = arange(10), build(f"{SEARCHED},short=scaled", 2, 16)
    torch.testing.assert_close(got[1:], always.rotate(q[1:], long.k, long))
    assert encoding.reads_length and not encoding.rotation_is_fixed
    assert always.rotation_is_fixed and not always.reads_length


@pytest.mark.parametrize("fraction", [1.0, 0.5])
@pytest.mark.parametrize(("seed", "scaling"), [("pi", "linear"), ("ntk", "ntk"), ("yarn", "yarn")])
def test_longrope_seeds_are_the_scalings_of_rope(seed, scaling, fraction):
    own = f"factor=4,rotary_fraction={fraction},base=500"
    got = build(f"longrope:factors={seed},original_length=64,{own},short=scaled", 2, 64)
    length = ",original_length=64" if seed == "yarn" else ""
    rope = build(f"rope:scaling={scaling},{own}{length}", 2, 64)
    pos = arange(9)
    torch.testing.assert_close(got.angles(pos.k, pos), rope.angles(pos.k, pos), rtol=1e-12, atol=0)
    assert min(got.factors) == got.factors[0] >= 1 and list(got.factors) == sorted(got.factors)


def test_longrope_of_transformers(monkeypatch):
    """Parameters, and the turns of Phi-3, whose factors are others where the longest row passes the original length."""
    utils = pytest.importorskip("transformers.modeling_rope_utils")
    monkeypatch.setattr(pytest.importorskip("transformers.utils"), "is_torchaudio_available", lambda: False)
    from transformers import Phi3Config
    from transformers.models.phi3 import modeling_phi3 as phi3

    factors = [1.0, 1.07, 1.5, 2.25, 3.1, 4.0, 4.0, 4.5]
    parameters = {"rope_type": "longrope", "rope_theta": 10000.0, "short_factor": [1.0] * 8, "long_factor": factors}
    sizes = {"hidden_size": 32, "num_attention_heads": 2, "num_key_value_heads": 2, "pad_token_id": 0}
    config = Phi3Config(
        **sizes,
        max_position_embeddings=64,
        original_max_position_embeddings=16,
        rope_parameters={**parameters, "original_max_position_embeddings": 16},
    )
    spec = f"longrope:factors={'+'.join(map(str, factors))},factor=4,original_length=16"
    ours = build(spec, 2, 32)
    theirs, m = utils.ROPE_INIT_FUNCTIONS["longrope"](config, torch.device("cpu"), seq_len=20)
    pos = arange(20)
    torch.testing.assert_close(ours.angles(pos.k, pos)[0, 1].float(), theirs, rtol=1e-6, atol=0)
    assert ours.amplitude(pos.k, pos, True).item() == pytest.approx(m, rel=1e-9)
    module = phi3.Phi3RotaryEmbedding(config)
    for n in (9, 16, 17, 40):
        pos = Positions.arange(n)
        q, k = (x.float() for x in vectors(1, 2, n, 16))
        cos, sin = module(q, pos.k.long())
        expected = phi3.apply_rotary_pos_emb(q, k, cos, sin)
        for got, wanted in zip((ours.rotate(q, pos.q, pos), ours.rotate(k, pos.k, pos, True)), expected, strict=True):
            torch.testing.assert_close(got, wanted, rtol=1e-5, atol=1e-5)


def test_longrope_one_spelling():
    assert normalise("longrope:factors=1.0+1.50+2+1e6") == "longrope:factors=1+1.5+2+1000000"
    pos = arange(4)
    same = (build(f"longrope:factors={text},original_length=3", 1, 8).angles(pos.k, pos) for text in ("2", "2+2+2+2"))
    assert torch.equal(*same)


# -- queries that grow with ln i


@pytest.mark.parametrize(
    ("length", "expected"),
    [(512, {512: 1, 1024: 1.1111111111, 4096: 1.3333333333, 16384: 1.5555555556}), (4096, {16384: 1.1666666667})],
)
def test_logn_golden(length, expected):
    x, _ = vectors(1, 1, 1, 8)
    one = build(f"rope:logn=clipped,original_length={length}", 1, 8)
    for count, factor in expected.items():
        pos = Positions(*(torch.tensor([[count - 1.0]], dtype=torch.float64),) * 2)
        q, k = (one.rotate(x, pos.q, pos, key=key) for key in (False, True))
        torch.testing.assert_close(q, k * factor, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize(("heads", "width", "n"), SHAPES)
@pytest.mark.parametrize("kind", ["clipped", "plain"])
def test_entropy_aware_abf_against_the_formula(heads, width, n, kind):
    """Of the whole head, where a part of it turns too."""
    head, length = width // heads, 5
    fraction = 1.0 if head % 4 else 0.5
    pairs = int(head * fraction) // 2
    q, k = vectors(1, heads, n, head)
    angles = np.arange(n)[:, None] * 500000.0 ** (-np.arange(pairs) / pairs)
    growth = np.log(np.arange(n) + 1) / math.log(length)
    growth = np.maximum(growth, 1) if kind == "clipped" else growth
    spec = f"rope:base=500000,logn={kind},original_length={length},rotary_fraction={fraction}"
    got = scores(build(spec, heads, width), q, k, arange(n))
    for h in range(heads):
        expected = turned(q[0, h].numpy() * growth[:, None], angles) @ turned(k[0, h].numpy(), angles).T
        np.testing.assert_allclose(got[0, h].numpy(), expected, rtol=1e-10, atol=1e-10)


def test_logn_beside_yarn_and_without_a_claim_about_bounded_scores():
    x, pos = vectors(1, 2, 40, 8)[0], arange(40)
    yarn, both = (build(f"rope:scaling=yarn,factor=4,original_length=8{more}", 2, 16) for more in ("", ",logn=plain"))
    growth = torch.log(pos.q + 1)[..., None] / math.log(8)
    torch.testing.assert_close(both.rotate(x, pos.q, pos), yarn.rotate(x, pos.q, pos) * growth)
    assert torch.equal(both.rotate(x, pos.k, pos, True), yarn.rotate(x, pos.k, pos, True))
    assert both.rotation_is_fixed and not both.reads_length
    assert both.series() is None and yarn.series() is not None


# -- CLEX


def test_clex_golden():
    """At the start it is NTK by 2t - 1, but for the solver's error."""
    table = build("clex:original_length=7", 1, 8).solve(4)
    for t, expected in {
        1: [1, 0.1, 0.01, 0.001],
        2: [1, 0.0693361274, 0.0048074986, 0.0003333333],
        4: [1, 0.0522757959, 0.0027327588, 0.0001428571],
    }.items():
        assert table[t - 1].tolist() == pytest.approx(expected, rel=2e-6)
    exact = [(2 * t - 1) ** (-2 * c / 6) * 10 ** (-c) for t in range(1, 5) for c in range(4)]
    many = build("clex:original_length=7,steps=100", 1, 8).solve(4)
    assert many.flatten().tolist() == pytest.approx(exact, rel=1e-9)


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
    q, k = vectors(1, heads, n, d)
    got = scores(encoding, q, k, arange(n))
    angles = np.arange(n)[:, None] * np.exp(z)
    for head in range(heads):
        expected = turned(q[0, head].numpy(), angles) @ turned(k[0, head].numpy(), angles).T
        np.testing.assert_allclose(got[0, head].numpy(), expected, rtol=1e-6, atol=1e-6)


def test_clex_takes_the_t_of_each_row():
    encoding = learned("clex:original_length=8,max_factor=3", 1, 8)
    lengths = torch.tensor([[1.0], [8.0], [9.0], [16.0], [17.0], [24.0], [25.0], [900.0]], dtype=torch.float64)
    table = encoding.solve(3).detach()
    with torch.no_grad():
        got = encoding.frequencies(lengths)
    assert torch.equal(got, table[[0, 0, 1, 1, 2, 2, 2, 2]])
    torch.testing.assert_close(encoding.frequencies(lengths), got, rtol=1e-12, atol=0)


def test_clex_gradients():
    """Against differences, through the plan of a pass and through rotate itself; none where all rows are short."""
    encoding = learned("clex:original_length=4,max_factor=4", 2, 16).double()
    q, k = vectors(1, 2, 11, 8)
    pos = arange(11)

    def loss(direct: bool) -> torch.Tensor:
        turn = encoding.rotate if direct else plan_of(encoding, pos, None, choose("reference")).rotate
        return (turn(q, pos.q, pos) @ turn(k, pos.k, pos, key=True).mT).tril().sin().sum()

    for direct in (True, False):
        found = torch.autograd.grad(loss(direct), [encoding.up.weight, encoding.down.weight])
        for weight, grad in zip((encoding.up.weight, encoding.down.weight), found, strict=True):
            assert grad.abs().amax() > 0
            direction = torch.randn(weight.shape, generator=torch.Generator().manual_seed(2)).double()
            with torch.no_grad():
                before, values = weight.clone(), []
                for sign in (1, -1):
                    weight.copy_(before + sign * 1e-5 * direction)
                    values.append(loss(direct).item())
                weight.copy_(before)
            assert (values[0] - values[1]) / 2e-5 == pytest.approx((grad * direction).sum().item(), rel=1e-5)
    short = arange(4)
    encoding.rotate(q[:, :, :4], short.q, short).sum().backward()
    assert not encoding.up.weight.grad.any() and not encoding.down.weight.grad.any()


def test_clex_keeps_its_solution_until_the_weights_change(monkeypatch):
    encoding, solved = learned("clex:original_length=4", 2, 16), []
    solve = type(encoding).solve
    monkeypatch.setattr(type(encoding), "solve", lambda self, top: solved.append(top) or solve(self, top))
    x, pos = vectors(1, 2, 11, 8)[0], arange(11)
    with torch.no_grad():
        first = encoding.rotate(x, pos.k, pos)
        assert torch.equal(encoding.rotate(x, pos.k, pos, True), first) and solved == [16]
        encoding.down.weight.mul_(2)
        assert not torch.equal(encoding.rotate(x, pos.k, pos), first) and solved == [16, 16]
    half = encoding.half()
    assert all(p.dtype == torch.float32 for p in half.parameters())
    assert encoding.rotate(x.half(), pos.k, pos).dtype == torch.float16


@pytest.mark.parametrize("gradients", [True, False])
@pytest.mark.parametrize("weight", [1e4, 1e30, math.nan])
def test_clex_refuses_a_solution_that_overflows(weight, gradients):
    """Where the row's own length needs it: θ(1) is rotary's own."""
    encoding = learned("clex:original_length=4", 2, 16)
    with torch.no_grad():
        encoding.down.weight.fill_(weight)
    x = vectors(1, 2, 11, 8)[0]
    with torch.set_grad_enabled(gradients):
        for pos in (arange(11), arange(9)):
            with pytest.raises(UserError, match="'clex': the solution of its differential equation overflows.*rate"):
                encoding.rotate(x[:, :, : pos.k.shape[1]], pos.k, pos)
            with pytest.raises(UserError, match="'clex'.*overflows"):
                encoding.rotation(pos)
    with torch.no_grad():
        pos = arange(4)
        assert encoding.rotate(x[:, :, :4], pos.k, pos).isfinite().all()


def test_clex_leaves_no_graph_behind():
    encoding, pos = learned("clex:original_length=4", 2, 16), arange(11)
    plan = plan_of(encoding, pos, None, choose("reference"))
    assert plan.rotate(vectors(1, 2, 11, 8)[0], pos.q, pos).requires_grad
    assert not [x for x in vars(encoding).values() if isinstance(x, torch.Tensor) and x.requires_grad]
    assert not encoding._kept and encoding._angles is None


@pytest.mark.parametrize("share", [True, False])
def test_clex_trains_with_and_without_activation_checkpoints(task, share):
    """The positions of training reach beyond the original length, and both ways have the same gradients."""
    x = torch.randint(4, 60, (3, 16), generator=torch.Generator().manual_seed(0))
    found = []
    for checkpointed in (False, True):
        more = {"checkpoint_activations": checkpointed, "decoder_layers": 2, "share_decoder_input_output_embed": share}
        model = make_model(task, "clex:original_length=16,max_factor=4", positions_train="stretch:times=4", **more)
        model.train()
        with torch.no_grad():
            model.decoder.encodings[0].down.weight.normal_(0, 0.02, generator=torch.Generator().manual_seed(3))
        grads = []
        for update in range(5):  # one of them has t above 1
            model.zero_grad()
            model.set_num_updates(update)
            model(x)[0].square().mean().backward()
            grads.append({k: p.grad.clone() for k, p in model.named_parameters()})
        assert any(g["decoder.encodings.0.up.weight"].any() for g in grads)
        found.append(grads)
    torch.testing.assert_close(found[0], found[1], rtol=1e-5, atol=1e-7)


def test_clex_without_torchdiffeq(monkeypatch):
    find = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "torchdiffeq" else find(name))
    with pytest.raises(UserError, match=r"needs torchdiffeq.*pip install 'fairseq_rpe\[ode\]'"):
        build("clex:original_length=4", 2, 16)


# -- its positions in training


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
            theta = clex.frequencies(moved.k.amax(1, keepdim=True).double() + 1)
        torch.testing.assert_close(theta[:1], table[t - 1 : t])
    assert seen == {1, 2, 3, 4, 5}
    with pytest.raises(UserError, match="'stretch:times=4096' of a row of 9000 tokens is more than 16777216 positions"):
        build_positions("stretch:times=4096")(torch.arange(9000.0)[None], torch.tensor([9000]), torch.Generator())


# -- in a model


@pytest.mark.parametrize(
    ("spec", "fixed"),
    [
        (f"{SEARCHED},original_length=8", False),
        (f"{SEARCHED},start_tokens=3,factor=2,original_length=8,short=scaled", True),
        ("clex:original_length=5", False),
        ("rope:base=500000,logn=clipped,original_length=4", True),
    ],
)
def test_decoding_past_the_original_length(task, spec, fixed):
    """Every step of one layer is a pass over the text so far; keys are kept turned where nothing turns them further."""
    model = make_model(task, spec, decoder_layers=1)
    if spec.startswith("clex"):
        with torch.no_grad():
            model.decoder.encodings[0].down.weight.normal_(0, 0.02, generator=torch.Generator().manual_seed(3))
    x, state = torch.randint(4, 60, (2, 15), generator=torch.Generator().manual_seed(0)), {}
    keys = []
    model.decoder.layers[0].self_attn.k_proj.register_forward_hook(lambda module, given, out: keys.append(out))
    for n in (4, 5, 6, 9, 10, 15):
        with torch.no_grad():
            step, full = model(x[:, :n], incremental_state=state)[0], model(x[:, :n])[0]
        torch.testing.assert_close(step[:, -1], full[:, -1], rtol=1e-5, atol=1e-5)
    kept = model.decoder.layers[0].self_attn._get_input_buffer(state)["prev_key"]
    raw = keys[-1].unflatten(2, (4, -1)).permute(1, 2, 0, 3)
    assert torch.allclose(kept, raw, atol=1e-6) != fixed
    assert model.decoder.encodings[0].rotation_is_fixed == fixed


@pytest.mark.parametrize(
    ("spec", "words"),
    [
        ("longrope:factors=1+2", "has 2 numbers where 4 pairs turn: give 4, or one"),
        ("longrope:factors=1+2+3+2.5", "must never shrink: 3 is followed by 2.5"),
        ("longrope:factors=0.9+1+1+1", "must be at least 1, not 0.9"),
        ("longrope:factors=1+much", "wants numbers as in 1.1.5.3.4, or one of pi, ntk, yarn, not '1.much'"),
        ("longrope:factors=inf", "wants numbers"),
        ("longrope:factors=nan", "wants numbers"),
        ("longrope:factors=ntk", "needs factor=NUMBER"),
        ("longrope:factors=yarn,factor=2,short=scaled", "give original_length=N"),
        ("longrope:factors=2", "give original_length=N"),
        ("longrope:factor=2", "give original_length=N"),
        ("longrope:factor=0.5", "'factor' of 'longrope' must be at least 1"),
        ("longrope:factors=2,original_length=1", "at least 2 tokens"),
        ("clex", "'clex' needs the original length: give original_length=N"),
        ("clex:original_length=4,steps=0", "must be at least 1"),
        ("rope:logn=clipped", "give original_length=N"),
        ("rope:logn=often", "one of none, clipped, plain"),
        ("rope:logn=plain,original_length=1", "ln L for logn, which is 0 for L = 1"),
        ("rope:scaling=yarn,factor=2,original_length=8,scaled=turned,logn=plain", "leave scaled=turned out"),
        ("stretch:times=0", "must be at least 1"),
    ],
)
def test_refusals(spec, words):
    with pytest.raises(UserError, match=words) as caught:
        build_positions(spec) if spec.startswith("stretch") else build(spec, 4, 32)
    assert "\n" not in str(caught.value)
