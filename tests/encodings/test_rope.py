"""Rotary encodings: golden values, relativity, public implementations and precision."""

from __future__ import annotations

import functools
import math
from dataclasses import fields

import pytest
import torch
from numeric import exact, scores, vectors
from specs import SPECS

from fairseq_rpe.attention import AttentionPlan, reference, sdpa
from fairseq_rpe.attention.forward import run_attention
from fairseq_rpe.core import Positions
from fairseq_rpe.encodings import build
from fairseq_rpe.encodings.rope import SCALINGS, Rope, effective_options

floats = functools.partial(vectors, dtype=torch.float32)
ROTARY = SPECS["rope"] + SPECS["xpos"]
STATIC = [s for s in ROTARY if "auto" not in s and "dynamic" not in s]
GROWING = ["rope:scaling=dynamic_ntk,factor=2", *(f"rope:scaling={s},factor=auto" for s in ("linear", "ntk"))]
GROWING += [f"rope:scaling={s},factor=auto" for s in ("ntk_by_parts", "yarn", "truncated")]


def theta(options: str = "", at: float = 512, length: int | None = 512) -> torch.Tensor:
    """(32,) frequencies of heads of 64 elements when the input has ``at`` tokens."""
    spec = f"rope:{options}" if options else "rope"
    return build(spec, 8, 512, length).inv_freq(torch.tensor([at], dtype=torch.float64))


def assert_values(got: torch.Tensor, expected: dict[int, float], rel: float = 1e-7) -> None:
    assert {s: got[s].item() for s in expected} == pytest.approx(expected, rel=rel)


PLAIN = {0: 1, 1: 0.74989421, 8: 0.1, 16: 0.01, 24: 0.001, 31: 1.3335214e-4}


def test_plain_linear_and_ntk_frequencies():
    assert_values(theta(), PLAIN)
    assert_values(theta("scaling=linear,factor=4"), {s: value / 4 for s, value in PLAIN.items()})
    expected = {0: 1, 1: 0.71709833, 8: 0.06992455, 16: 0.0048894427, 31: 3.3338036e-5}
    assert_values(theta("scaling=ntk,factor=4"), expected)


@pytest.mark.parametrize(
    ("scaling", "at", "base"),
    [
        ("ntk,factor=2", 512, 20452.2287),
        ("ntk,factor=4", 512, 41829.3659),
        ("ntk,factor=8", 512, 85550.3759),
        ("ntk,factor=auto", 2048, 41829.3659),
        ("ntk,factor=auto", 100, 10000),
        ("dynamic_ntk", 512, 10000),
        ("dynamic_ntk", 1024, 20452.2287),
        ("dynamic_ntk,factor=2", 1024, 31082.2367),
        ("dynamic_ntk,factor=2", 2048, 74534.8303),
        ("dynamic_ntk,factor=4", 9216, 790982.3693),
    ],
)
def test_bases(scaling, at, base):
    """Scaling frequencies by κ^(-2s/(d-2)) is changing the base."""
    got = theta(f"scaling={scaling}", at)
    assert got[1].item() ** -32 == pytest.approx(base, rel=1e-8)
    torch.testing.assert_close(got, theta(f"base={base}"), rtol=1e-8, atol=0)


def test_every_option_has_an_effect_with_every_scaling_or_with_those_that_name_it():
    always = set(effective_options(Rope.Config()))
    named = [option for scaling in SCALINGS.values() for option in scaling.options]
    assert {f.name for f in fields(Rope.Config)} == always | set(named) and not always & set(named)


def test_by_parts():
    code = {0: 1, 1: 0.74989421, 4: 0.29798386, 8: 0.071153846, 12: 0.015203258, 16: 0.0025, 31: 3.3338036e-5}
    for scaling in ("scaling=ntk_by_parts", "scaling=yarn"):
        assert_values(theta(f"{scaling},factor=4"), code)
        assert_values(theta(f"{scaling},factor=auto", at=2048), code)
        ends = [build(f"rope:{scaling},factor=4,original_length={n}", 8, 512).ramp_bounds() for n in (512, 2048)]
        assert ends == [(3, 16), (8, 21)]
    paper = {4: 0.26855304, 8: 0.042295322, 12: 0.0091120947, 16: 0.0025}
    assert_values(theta("scaling=ntk_by_parts,factor=4,ramp=paper"), paper)
    assert torch.equal(theta("scaling=ntk_by_parts,factor=4", length=3)[1:], theta("scaling=linear,factor=4")[1:])


@pytest.mark.parametrize(
    ("options", "at", "factor"),
    [
        ("factor=4", 1, 1.1386294361),
        ("factor=2", 1, 1.0693147181),
        ("factor=8", 1, 1.2079441542),
        ("factor=auto", 9216, 1.2890371758),
        ("factor=auto", 100, 1),
        ("factor=0.5", 1, 1),
        ("factor=4,temperature=1.25", 1, 1.25),
        ("factor=4,rotary_fraction=0.25", 1, 1.1386294361),
    ],
)
def test_yarn_temperature(options, at, factor):
    """Every logit is scaled by the square, also where only a part of the head turns."""
    q, k, _ = vectors(1, 8, 1, 64)
    pos = exact(1, at)
    pos = Positions(pos.q, pos.q)
    yarn = build(f"rope:scaling=yarn,{options}", 8, 512, 512)
    got = scores(yarn, q, k, pos) / scores(build("rope", 8, 512), q, k, pos)
    torch.testing.assert_close(got, torch.full_like(got, factor**2), rtol=1e-9, atol=0)


@pytest.mark.parametrize("rotated", [16, 2])
def test_yarn_of_public_code_scales_the_turned_part_alone(rotated):
    """Also where that is a single pair."""
    x, pos, spec = vectors(1, 8, 5, 64)[0], exact(5), f"rope:scaling=yarn,factor=4,rotary_fraction={rotated / 64}"
    made = (build(f"{spec},temperature_on={part}", 8, 512, 512) for part in ("head", "rotated"))
    whole, turned = (encoding.rotate(x, pos.k, pos) for encoding in made)
    assert torch.equal(turned[..., rotated:], x[..., rotated:])
    assert torch.equal(turned[..., :rotated], whole[..., :rotated])
    assert not torch.equal(whole[..., rotated:], x[..., rotated:])


def test_truncated():
    got = theta("scaling=truncated,factor=4")
    assert torch.equal(got[:21], theta()[:21])
    assert got[21:28].tolist() == pytest.approx([0.000191748] * 7, rel=1e-5)
    assert not got[28:].any()


def test_truncated_with_values_of_ones_own():
    """The survey's Eq. 24: θ from b on, ρ from a to b, 0 below a; each of the three by itself or not."""
    plain = theta()
    got = theta("scaling=truncated,truncate_high=0.01,truncate_low=0.001,truncate_value=0.004")
    expected = torch.where(plain >= 0.01, plain, torch.where(plain >= 0.001, plain.new_tensor(0.004), 0.0))
    assert torch.equal(got, expected) and 0 < (got == 0.004).sum() < 32 and (got == 0).any()
    own = theta("scaling=truncated,truncate_high=0.01")  # a and ρ follow b
    assert torch.equal(own, theta("scaling=truncated,truncate_high=0.01,truncate_low=0.00125,truncate_value=0.000625"))
    all_turn = theta("scaling=truncated,factor=4,truncate_low=0")[21:]
    assert torch.equal(all_turn, own.new_full((11,), 2 * math.pi / 32768))


def test_llama3_is_ntk_by_parts_with_the_papers_ramp():
    model = "factor=8,original_length=8192,base=500000"
    got = theta(f"scaling=llama3,{model}")
    assert torch.equal(got, theta(f"scaling=ntk_by_parts,{model},ramp=paper,beta_fast=4"))
    assert not torch.equal(got, theta(f"scaling=llama3,{model},beta_fast=8"))
    plain, small = (build(f"rope:{more}", 1, 16) for more in ("base=500000", f"scaling=llama3,{model}"))
    slower = plain.inv_freq(torch.ones(1).double()) / small.inv_freq(torch.ones(1).double())
    assert slower.tolist() == pytest.approx([1, 1, 1, 1, 2.6945296879, 8, 8, 8], rel=1e-9)


def test_resonance():
    waves = 2 * math.pi / theta("resonance=true")
    assert_values(waves, {0: 6, 1: 8, 2: 11, 3: 15, 8: 63, 16: 628, 31: 47117}, rel=1e-12)
    after = 2 * math.pi / theta("scaling=yarn,factor=4,resonance=true")
    torch.testing.assert_close(after, (2 * math.pi / theta("scaling=yarn,factor=4")).round(), rtol=1e-12, atol=0)
    far = Positions(*(torch.tensor([[3.0, 3.0 + 63 * 4000]]),) * 2)
    here, there = build("rope:resonance=true", 8, 512).angles(far.k, far)[0, :, 8]
    assert here == there
    assert torch.isfinite(build("rope:scaling=truncated,factor=4,resonance=true", 8, 512, 512).angles(far.k, far)).all()


@pytest.mark.parametrize("spec", STATIC)
def test_scores_depend_on_the_distance(spec):
    q, k, _ = (x / 8 for x in floats(1, 4, 60, 64))
    encoding, at = build(spec, 4, 256, 64), Positions.arange(60)
    here = scores(encoding, q, k, at).tril()
    torch.testing.assert_close(here, scores(encoding, q.double(), k.double(), exact(60)).tril(), rtol=0, atol=1e-5)
    for shift, tolerance in ((1, 1e-5), (37, 1e-5), (0.25, 1e-5), (900, 1e-4)):  # float32 angles near 900: 3e-5 apart
        there = scores(encoding, q, k, Positions(at.q + shift, at.k + shift)).tril()
        torch.testing.assert_close(here, there, rtol=0, atol=tolerance)


@pytest.mark.parametrize("scaling", ["linear", "ntk", "ntk_by_parts", "yarn", "dynamic_ntk"])
def test_factor_one_is_plain_rope_bit_for_bit(scaling):
    q, pos = floats(1, 4, 60, 16)[0], Positions.arange(60)
    plain = build("rope", 4, 64).rotate(q, pos.q, pos)
    for factor in ("",) if scaling == "dynamic_ntk" else (",factor=1", ",factor=auto"):
        assert torch.equal(build(f"rope:scaling={scaling}{factor}", 4, 64, 64).rotate(q, pos.q, pos), plain), factor


@pytest.mark.parametrize("spec", GROWING)
def test_growing_lengths_are_a_function_of_the_present_one(spec):
    encoding, q, short, long = (
        build(spec, 4, 64, 16),
        floats(1, 4, 20, 16)[0],
        Positions.arange(20),
        Positions.arange(90),
    )
    before = encoding.rotate(q, short.q, short)
    assert not torch.equal(encoding.rotate(q, long.k[:, :20], long), before)
    again = Positions.arange(20)
    assert torch.equal(encoding.rotate(q, again.q, again), before)


@pytest.mark.parametrize("spec", ROTARY)
def test_bf16_and_gradients(spec):
    encoding, pos = build(spec, 4, 64, 64), Positions.arange(300)
    x = vectors(1, 4, 300, 16, dtype=torch.bfloat16)[0]
    exact = encoding.rotate(x.float(), pos.k, pos, key=True)
    rough = encoding.rotate(x, pos.k, pos, key=True)
    assert rough.dtype == torch.bfloat16
    torch.testing.assert_close(rough.float(), exact, rtol=2**-8, atol=1e-5 * exact.abs().max().item())
    y = x.double().requires_grad_()
    encoding.rotate(y, pos.k, pos, key=True).square().sum().backward()
    assert torch.isfinite(y.grad).all() and y.grad.abs().amax() > 0


def xpos_scores(q, k, i, j, scale_base=512, gamma=0.4, base=10000.0, decay=None):
    """Independent: pairs as complex numbers and one factor of the distance, in float64."""
    d = q.shape[-1]
    s = torch.arange(d // 2, dtype=torch.float64)
    z = [torch.view_as_complex(x.double().unflatten(-1, (-1, 2))) for x in (q, k)]
    n = (i[:, None] - j[None, :]).double()[..., None]
    zeta = ((2 * s + gamma * d) / ((1 + gamma) * d)) ** (n / scale_base) if decay is None else decay**n
    turn = torch.polar(zeta.expand(*n.shape[:2], d // 2), n * base ** (-2 * s / d))
    return torch.einsum("bhis,bhjs,ijs->bhij", z[0], z[1].conj(), turn).real


@pytest.mark.parametrize("options", [{}, {"scale_base": 16, "gamma": 1.5, "base": 500}, {"decay": 0.9}])
def test_xpos_against_the_formula(options):
    """The decay of the last is the survey's."""
    q, k, _ = floats(2, 3, 40, 16)
    spec = ":".join(["xpos", ",".join(f"{key}={value}" for key, value in options.items())]).rstrip(":")
    got = scores(build(spec, 3, 48), q, k, Positions.arange(40)).tril()
    expected = xpos_scores(q, k, torch.arange(40), torch.arange(40), **options).tril()
    torch.testing.assert_close(got, expected, rtol=1e-5, atol=1e-5)


def test_xpos_decays_where_everything_turns():
    whole, part = (
        build(f"xpos:rotary_fraction={fraction}", 3, 48).log_bias_formulas()[0].note for fraction in (1, 0.5)
    )
    assert "scores decay to 0" in whole and "decay" not in part and "bounded" in part


TOLERANCE = {torch.float16: 5e-3, torch.bfloat16: 3e-2, torch.float32: 1e-4}


@pytest.mark.parametrize("dtype", TOLERANCE)
def test_xpos_far_out(dtype):
    """Attention of the last queries of 65536 tokens, and scores at any position, stay finite and right."""
    _, k, _ = vectors(1, 2, 65536, 16, dtype=dtype)
    q, pos = k[:, :, -3:], Positions.arange(3, 65536)
    got, expected = scores(build("xpos", 2, 32), q, k, pos), xpos_scores(q, k, pos.q[0], pos.k[0])
    assert torch.isfinite(got).all()
    assert (got - expected).abs().max() <= max(TOLERANCE[dtype], 1e-2) * expected.abs().max()  # angles in float32


@pytest.mark.parametrize("attend", [reference, sdpa])
@pytest.mark.parametrize("dtype", TOLERANCE)
def test_xpos_takes_long_inputs_in_parts(dtype, attend):
    """With S = 4 a hundred tokens span what 12800 do with the default; the factors alone would leave float16."""
    n = 400
    q, k, v = vectors(2, 2, n, 16, dtype=dtype)
    xpos, pos, i = build("xpos:scale_base=4", 2, 32), Positions.arange(n), torch.arange(n)
    padding = (i < 5) & torch.tensor([[True], [False]])
    bias = torch.zeros(n, n).masked_fill(i[:, None] < i, -math.inf).double()
    logits = xpos_scores(q, k, i, i, scale_base=4).nan_to_num(0) / 4 + bias
    for hidden in (None, padding):
        seen = logits if hidden is None else logits.masked_fill(hidden[:, None, None], -math.inf)
        expected = (seen.softmax(-1) @ v.double()).nan_to_num(0)
        inputs = [x.clone().requires_grad_() for x in (q, k, v)]
        plan = AttentionPlan(pos, None, hidden, None, xpos.rotate, attend, xpos.max_queries_per_call)
        out = run_attention(*inputs, plan, 0.0)
        assert (out.double() - expected).abs().max() <= TOLERANCE[dtype] * expected.abs().max()
        out.sum().backward()
        assert all(torch.isfinite(x.grad).all() for x in inputs)


def test_xpos_counts_the_gaps_of_irregular_positions():
    xpos = build("xpos", 2, 32)
    near, far = torch.arange(0, 600, 3.0)[None], torch.arange(0, 60000, 300.0)[None]
    room = xpos.max_queries_per_call(Positions.arange(5000), torch.float16)
    assert 2000 < room < 2500
    assert xpos.max_queries_per_call(Positions(near, near, None, False), torch.float16) == 200
    assert xpos.max_queries_per_call(Positions(far, far, None, False), torch.float16) == room // 300
    assert xpos.max_queries_per_call(Positions(near / 4, near / 4, 0.25), torch.float16) == pytest.approx(
        room * 4, abs=4
    )
