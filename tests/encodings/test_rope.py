"""Rotary encodings: golden values, relativity, public implementations, precision, decoding and refusals."""

from __future__ import annotations

import math

import pytest
import torch
from conftest import make_model
from specs import SPECS

from fairseq_rpe.attention import Plan, reference, sdpa
from fairseq_rpe.attention.layer import carry_out
from fairseq_rpe.core import Positions, UserError
from fairseq_rpe.encodings import build, normalise

ROTARY = SPECS["rope"] + SPECS["xpos"]
STATIC = [s for s in ROTARY if "auto" not in s and "dynamic" not in s]
GROWING = ["rope:scaling=dynamic_ntk,factor=2", *(f"rope:scaling={s},factor=auto" for s in ("linear", "ntk"))]
GROWING += [f"rope:scaling={s},factor=auto" for s in ("ntk_by_parts", "yarn", "truncated")]


def theta(options: str = "", at: float = 512, length: int | None = 512) -> torch.Tensor:
    """(32,) frequencies of heads of 64 elements when the input has ``at`` tokens."""
    spec = f"rope:{options}" if options else "rope"
    return build(spec, 8, 512, length).frequencies(torch.tensor([at], dtype=torch.float64))


def scores(encoding, q, k, pos) -> torch.Tensor:
    return encoding.rotate(q, pos.q, pos).double() @ encoding.rotate(k, pos.k, pos, key=True).double().mT


def vectors(*shape: int, dtype: torch.dtype = torch.float32) -> tuple[torch.Tensor, ...]:
    made = torch.Generator().manual_seed(0)
    return tuple(torch.randn(*shape, generator=made, dtype=torch.float64).to(dtype) for _ in range(3))


def assert_values(got: torch.Tensor, expected: dict[int, float], rel: float = 1e-7) -> None:
    assert {s: got[s].item() for s in expected} == pytest.approx(expected, rel=rel)


PLAIN = {0: 1, 1: 0.74989421, 8: 0.1, 16: 0.01, 24: 0.001, 31: 1.3335214e-4}


def test_plain_frequencies():
    assert_values(theta(), PLAIN)
    assert_values(theta("scaling=linear,factor=4"), {s: value / 4 for s, value in PLAIN.items()})


def test_ntk():
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


def test_by_parts():
    code = {0: 1, 1: 0.74989421, 4: 0.29798386, 8: 0.071153846, 12: 0.015203258, 16: 0.0025, 31: 3.3338036e-5}
    for scaling in ("ntk_by_parts", "yarn"):
        assert_values(theta(f"scaling={scaling},factor=4"), code)
        assert_values(theta(f"scaling={scaling},factor=auto", at=2048), code)
        assert build(f"rope:scaling={scaling},factor=4", 8, 512, 512).ramp_ends() == (3, 16)
        assert build(f"rope:scaling={scaling},factor=4,original_length=2048", 8, 512).ramp_ends() == (8, 21)
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
    q, k, _ = vectors(1, 8, 1, 64, dtype=torch.float64)
    pos = Positions.arange(1, at, dtype=torch.float64)
    pos = Positions(pos.q, pos.q)
    yarn = build(f"rope:scaling=yarn,{options}", 8, 512, 512)
    got = scores(yarn, q, k, pos) / scores(build("rope", 8, 512), q, k, pos)
    torch.testing.assert_close(got, torch.full_like(got, factor**2), rtol=1e-9, atol=0)


def test_yarn_of_public_code_scales_the_turned_part_alone():
    """Also where that is a single pair."""
    x, pos = vectors(1, 8, 5, 64, dtype=torch.float64)[0], Positions.arange(5, dtype=torch.float64)
    for fraction in (0.25, 1 / 32):
        spec = f"rope:scaling=yarn,factor=4,rotary_fraction={fraction}"
        made = (build(f"{spec},scaled={part}", 8, 512, 512) for part in ("head", "turned"))
        whole, turned = (encoding.rotate(x, pos.k, pos) for encoding in made)
        rotated = int(64 * fraction)
        assert torch.equal(turned[..., rotated:], x[..., rotated:])
        torch.testing.assert_close(turned[..., :rotated], whole[..., :rotated], rtol=0, atol=0)
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
    got = theta("scaling=llama3,factor=8,original_length=8192,base=500000")
    named = "factor=8,original_length=8192,base=500000,ramp=paper,beta_fast=4"
    assert torch.equal(got, theta(f"scaling=ntk_by_parts,{named}"))
    assert not torch.equal(got, theta("scaling=llama3,factor=8,original_length=8192,base=500000,beta_fast=8"))
    small = build("rope:scaling=llama3,factor=8,original_length=8192,base=500000", 1, 16)
    slower = build("rope:base=500000", 1, 16).frequencies(torch.ones(1).double())
    slower = slower / small.frequencies(torch.ones(1).double())
    assert slower.tolist() == pytest.approx([1, 1, 1, 1, 2.6945296879, 8, 8, 8], rel=1e-9)


def test_resonance():
    waves = 2 * math.pi / theta("resonance=true")
    assert_values(waves, {0: 6, 1: 8, 2: 11, 3: 15, 8: 63, 16: 628, 31: 47117}, rel=1e-12)
    after = 2 * math.pi / theta("scaling=yarn,factor=4,resonance=true")
    torch.testing.assert_close(after, (2 * math.pi / theta("scaling=yarn,factor=4")).round(), rtol=1e-12, atol=0)
    resonant = build("rope:resonance=true", 8, 512)
    far = Positions(*(torch.tensor([[3.0, 3.0 + 63 * 4000]]),) * 2)
    angles = resonant.angles(far.k, far)
    assert angles[0, 0, 8] == angles[0, 1, 8]
    assert torch.isfinite(build("rope:scaling=truncated,factor=4,resonance=true", 8, 512, 512).angles(far.k, far)).all()


@pytest.mark.parametrize(
    ("spec", "width", "expected"),
    [
        ("rope", 64, {0: 1, 1: 0.966151, 2: 0.884496, 10: 0.657863, 511: 0.200753, 9215: -0.137926}),
        ("rope", 128, {0: 1, 1: 0.970214, 2: 0.896592, 10: 0.669063, 511: 0.211428, 9215: -0.079268}),
        ("rope:interleaved=true", 64, {0: 1, 1: 0.966151, 511: 0.200753}),
        ("xpos", 64, {0: 1, 1: 0.965215, 2: 0.882991, 10: 0.654353, 511: 0.201314, 9215: -0.006105}),
    ],
)
def test_raw_scores_of_equal_unit_vectors(spec, width, expected):
    one = torch.full((1, 1, 1, width), width**-0.5, dtype=torch.float64)
    pos = Positions.arange(1, 9216, dtype=torch.float64)
    got = scores(build(spec, 1, width), one, one.expand(1, 1, 9216, width), pos)[0, 0, 0].flip(0)
    assert {n: got[n].item() for n in expected} == pytest.approx(expected, abs=1e-6)


def test_xpos_factors():
    xpos = build("xpos", 1, 64)
    pos = Positions.arange(1, 512, dtype=torch.float64)
    assert_values(xpos.zeta(pos.k), {0: 0.285714, 1: 0.308036, 15: 0.620536, 31: 0.977679}, rel=2e-6)
    assert_values(xpos.amplitude(pos.k, pos, True)[0, 0], {0: 0.286414, 15: 0.621114, 31: 0.977722}, rel=2e-6)
    assert torch.equal(xpos.amplitude(pos.q, pos, False), torch.ones(1, 1, 32, dtype=torch.float64))


@pytest.mark.parametrize("spec", STATIC)
@pytest.mark.parametrize("shift", [1.0, 37.0, 900.0, 0.25])
def test_scores_depend_on_the_distance(spec, shift):
    q, k, _ = (x / 8 for x in vectors(1, 4, 60, 64))
    encoding = build(spec, 4, 256, 64)
    at = Positions.arange(60)
    moved = Positions(at.q + shift, at.k + shift)
    a, b = (scores(encoding, q, k, pos).tril() for pos in (at, moved))
    tolerance = 1e-5 if shift < 100 else 1e-4  # float32 angles near 900 are 3e-5 apart
    assert (a - b).abs().max() <= tolerance
    exact = scores(encoding, q.double(), k.double(), Positions.arange(60, dtype=torch.float64)).tril()
    assert (a - exact).abs().max() <= 1e-5


def test_factor_one_is_plain_rope_bit_for_bit():
    q, _, _ = vectors(1, 4, 60, 16)
    pos = Positions.arange(60)
    plain = build("rope", 4, 64).rotate(q, pos.q, pos)
    for scaling in ("linear", "ntk", "ntk_by_parts", "yarn"):
        for factor in ("1", "auto"):
            same = build(f"rope:scaling={scaling},factor={factor}", 4, 64, 64)
            assert torch.equal(same.rotate(q, pos.q, pos), plain), (scaling, factor)
    assert torch.equal(build("rope:scaling=dynamic_ntk", 4, 64, 64).rotate(q, pos.q, pos), plain)


def test_linear_scaling_is_interpolated_positions():
    q, _, _ = vectors(2, 4, 60, 16)
    pos = Positions.arange(60)
    quarter = Positions(pos.q / 4, pos.k / 4, step=0.25)
    whole = Positions(torch.arange(60)[None], torch.arange(60)[None])
    a = build("rope:scaling=linear,factor=4", 4, 64).rotate(q, pos.q, pos)
    torch.testing.assert_close(a, build("rope", 4, 64).rotate(q, quarter.q, quarter), rtol=1e-5, atol=1e-5)
    rope = build("rope", 4, 64)
    assert torch.equal(rope.rotate(q, pos.q, pos), rope.rotate(q, whole.q, whole))


def test_growing_lengths_are_a_function_of_the_present_one():
    for spec in GROWING:
        encoding = build(spec, 4, 64, 16)
        short, long = Positions.arange(20), Positions.arange(90)
        q, _, _ = vectors(1, 4, 20, 16)
        before = encoding.rotate(q, short.q, short)
        encoding.rotate(q, long.k[:, :20], long)
        again = Positions.arange(20)
        assert torch.equal(encoding.rotate(q, again.q, again), before)
        assert not torch.equal(encoding.rotate(q, long.k[:, :20], long), before)


def test_rows_of_different_length_scale_apart():
    encoding = build("rope:scaling=yarn,factor=auto", 4, 64, 16)
    q, _, _ = vectors(2, 4, 40, 16)
    padded = (torch.arange(40.0)[None] - torch.tensor([[10.0], [0.0]])).clamp_min(0)
    pos = Positions(padded, padded)
    got = encoding.rotate(q, pos.q, pos)
    for row, n in ((0, 30), (1, 40)):
        alone = Positions.arange(n)
        expected = encoding.rotate(q[row : row + 1, :, 40 - n :], alone.q, alone)
        torch.testing.assert_close(got[row : row + 1, :, 40 - n :], expected, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("spec", ROTARY)
def test_bf16_and_gradients(spec):
    encoding = build(spec, 4, 64, 64)
    pos = Positions.arange(300)
    x, _, _ = vectors(1, 4, 300, 16, dtype=torch.bfloat16)
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


def test_xpos_against_the_formula():
    q, k, _ = vectors(2, 3, 40, 16)
    for options in ({}, {"scale_base": 16, "gamma": 1.5, "base": 500}, {"decay": 0.9}):  # the last: the survey's
        spec = "xpos" + (":" + ",".join(f"{key}={value}" for key, value in options.items()) if options else "")
        i = torch.arange(40)
        pos = Positions.arange(40)
        got, expected = scores(build(spec, 3, 48), q, k, pos).tril(), xpos_scores(q, k, i, i, **options).tril()
        torch.testing.assert_close(got, expected, rtol=1e-5, atol=1e-5)


def test_xpos_scores_decay_to_zero_where_all_elements_turn():
    whole, part = (build(f"xpos:rotary_fraction={fraction}", 3, 48).series()[0].note for fraction in (1, 0.5))
    assert "scores decay to 0" in whole and "decay" not in part and "bounded" in part


def test_xpos_against_centring_in_the_middle_of_the_input():
    """Sun et al.'s code: exponents from floor(-T/2) on, queries times the power, keys divided by it."""
    q, k, _ = vectors(1, 2, 1000, 16)
    s = torch.arange(8.0)
    exponent = torch.arange(-500, 500)[:, None] / 512
    power = ((2 * s + 0.4 * 16) / (1.4 * 16)) ** exponent
    angle = torch.arange(1000.0)[:, None] * 10000 ** (-s / 8)
    cos, sin = (x.repeat_interleave(2, dim=-1) for x in (angle.cos(), angle.sin()))

    def official(x, scale):
        half = torch.stack([-x[..., 1::2], x[..., ::2]], dim=-1).flatten(-2)
        return (x * cos + half * sin) * scale.repeat_interleave(2, dim=-1)

    expected = (official(q, power) @ official(k, 1 / power).mT).tril()
    pos = Positions.arange(1000)
    got = scores(build("xpos", 2, 32), q, k, pos).float().tril()
    torch.testing.assert_close(got, expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_xpos_far_out(dtype):
    """Attention of the last queries of 65536 tokens, and scores at any position, stay finite and right."""
    xpos = build("xpos", 2, 32)
    tolerance = {torch.float16: 3e-3, torch.bfloat16: 3e-2, torch.float32: 1e-2}[dtype]
    m = 65536
    _, k, _ = vectors(1, 2, m, 16, dtype=dtype)
    q = k[:, :, -3:]
    pos = Positions.arange(3, m)
    got = scores(xpos, q, k, pos)
    assert torch.isfinite(got).all()
    expected = xpos_scores(q, k, pos.q[0], pos.k[0])
    assert (got - expected).abs().max() <= tolerance * expected.abs().max()


@pytest.mark.parametrize("attend", [reference, sdpa])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_xpos_takes_long_inputs_in_parts(dtype, attend):
    """With S = 8 a hundred tokens span what 6400 do with the default; the factors alone would leave float16."""
    n = 700
    q, k, v = vectors(2, 2, n, 16, dtype=dtype)
    xpos = build("xpos:scale_base=8", 2, 32)
    pos = Positions.arange(n)
    padding = torch.zeros(2, n, dtype=torch.bool)
    padding[0, :5] = True
    i = torch.arange(n)
    bias = torch.zeros(n, n).masked_fill(i[:, None] < i, -math.inf).double()
    logits = xpos_scores(q, k, i, i, scale_base=8).nan_to_num(0) / 4 + bias
    for hidden in (None, padding):
        seen = logits if hidden is None else logits.masked_fill(hidden[:, None, None], -math.inf)
        expected = (seen.softmax(-1) @ v.double()).nan_to_num(0)
        inputs = [x.clone().requires_grad_() for x in (q, k, v)]
        plan = Plan(pos, None, hidden, None, xpos.rotate, attend, xpos.query_limit)
        out = carry_out(*inputs, plan, 0.0)
        tolerance = {torch.float16: 5e-3, torch.bfloat16: 3e-2, torch.float32: 1e-4}[dtype]
        assert (out.double() - expected).abs().max() <= tolerance * expected.abs().max()
        out.sum().backward()
        assert all(torch.isfinite(x.grad).all() for x in inputs)


def test_xpos_counts_the_gaps_of_irregular_positions():
    xpos = build("xpos", 2, 32)
    near, far = torch.arange(0, 600, 3.0)[None], torch.arange(0, 60000, 300.0)[None]
    room = xpos.query_limit(Positions.arange(5000), torch.float16)
    assert 2000 < room < 2500
    assert xpos.query_limit(Positions(near, near, None, False), torch.float16) == 200
    assert xpos.query_limit(Positions(far, far, None, False), torch.float16) == room // 300
    assert xpos.query_limit(Positions(near / 4, near / 4, 0.25), torch.float16) == pytest.approx(room * 4, abs=4)


@pytest.mark.parametrize("spec", [s for s in STATIC if "truncated" not in s])
def test_decoding_beyond_the_training_length(task, spec):
    model = make_model(task, spec)
    x = torch.randint(4, 60, (2, 80), generator=torch.Generator().manual_seed(0))
    assert_decodes(model, x, range(1, 81))


@pytest.mark.parametrize("spec", GROWING)
def test_decoding_rotates_cached_keys_anew(task, spec):
    """One layer, whose cached keys depend on their tokens alone: every step equals a forward of its own length."""
    model = make_model(task, spec, decoder_layers=1)
    x = torch.randint(4, 60, (2, 80), generator=torch.Generator().manual_seed(0))
    assert_decodes(model, x, range(1, 81))
    with torch.no_grad():
        assert (model(x)[0][:, 40] - model(x[:, :41])[0][:, 40]).abs().max() > 1e-4


def assert_decodes(model, x, lengths):
    with torch.no_grad():
        state: dict = {}
        for n in lengths:
            step = model(x[:, :n], incremental_state=state)[0]
            if n % 13 == 0 or n > 60:
                torch.testing.assert_close(step[:, 0], model(x[:, :n])[0][:, -1], rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("spec", GROWING)
def test_padding_does_not_lengthen_a_row(task, spec):
    model = make_model(task, f"{spec},original_length=8")
    row = torch.randint(4, 60, (1, 15), generator=torch.Generator().manual_seed(0))
    other = torch.randint(4, 60, (1, 19), generator=torch.Generator().manual_seed(1))
    pads = torch.ones(1, 4, dtype=torch.int64)
    with torch.no_grad():
        alone = model(row)[0][0]
        for padded, first in ((torch.cat([pads, row], 1), 4), (torch.cat([row, pads], 1), 0)):
            got = model(torch.cat([padded, other]))[0]
            torch.testing.assert_close(got[0, first : first + 15], alone, rtol=1e-5, atol=1e-5)
            torch.testing.assert_close(got[1:], model(other)[0], rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    ("spec", "words"),
    [
        ("rope:scaling=linear,factor=0", "'factor' of 'rope' must be more than 0, not 0"),
        ("rope:scaling=linear,factor=-2", "must be more than 0, not -2"),
        ("rope:scaling=linear,factor=much", "'factor' of 'rope' wants a number or auto, not 'much'"),
        *((f"rope:scaling={s}", "needs factor=NUMBER") for s in ("linear", "ntk", "ntk_by_parts", "yarn", "truncated")),
        ("rope:scaling=yar", "one of none, linear.*did you mean 'yarn'"),
        ("rope:factor=2", "'rope:scaling=none' does not read factor"),
        ("rope:original_length=9", "does not read original_length"),
        ("rope:scaling=linear,factor=2,original_length=9", "does not read original_length"),
        ("rope:scaling=ntk_by_parts,factor=2,temperature=1", "does not read temperature"),
        ("rope:scaling=ntk,factor=2,beta_slow=2", "does not read beta_slow"),
        ("rope:scaling=dynamic_ntk,factor=auto", "its factor, alpha, is a number"),
        ("rope:scaling=dynamic_ntk", "give original_length=N"),
        ("rope:scaling=linear,factor=auto", "give original_length=N"),
        ("rope:scaling=yarn,factor=2,original_length=9,beta_fast=1", "beta_fast=1 must be more than beta_slow=1"),
        ("rope:rotary_fraction=0", "more than 0"),
        ("rope:rotary_fraction=0.4", "even and at least 2, not 3"),
        ("rope:base=1", "more than 1"),
        ("xpos:gamma=0", "more than 0"),
        ("xpos:decay=1", "use that, or a decay below 1"),
        ("xpos:decay=0.9,gamma=1", "'xpos:decay=0.9' does not read gamma: leave it out"),
        ("rope:scaling=llama3,factor=8,original_length=9,ramp=paper", "'rope:scaling=llama3' does not read ramp"),
        ("rope:scaling=llama3,factor=8,original_length=9,beta_slow=4", "beta_fast=4 must be more than beta_slow=4"),
        ("rope:scaling=truncated,truncate_high=1,factor=2", "truncate_high=…' does not read factor"),
        ("rope:scaling=truncated,truncate_high=1,truncate_low=2", "truncate_low=2 is above 1"),
        ("rope:scaling=truncated,factor=2,original_length=9,truncate_low=2", "truncate_low=2 is above 0.349"),
        ("rope:scaling=linear,factor=2,truncate_low=0", "does not read truncate_low"),
    ],
)
def test_refusals(spec, words):
    with pytest.raises(UserError, match=words) as caught:
        build(spec, 4, 32)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("spec", ["rope", "xpos"])
def test_odd_head_width(spec):
    with pytest.raises(UserError, match="rotated width must be even and at least 2, not 9") as caught:
        build(spec, 4, 36)
    assert "\n" not in str(caught.value)
    build("rope:rotary_fraction=0.5", 4, 36)


def test_one_spelling():
    assert normalise("rope:factor=8.0,scaling=yarn") == "rope:scaling=yarn,factor=8"
    assert normalise("rope:scaling=yarn,factor=AUTO,temperature=auto") == "rope:scaling=yarn,factor=auto"


# -- the transformers package, where it is installed


def hf_parameters(kind: str, seq_len: int | None = None, fraction: float = 1.0, **options):
    utils = pytest.importorskip("transformers.modeling_rope_utils")
    from transformers import LlamaConfig

    config = LlamaConfig(hidden_size=512, num_attention_heads=8, max_position_embeddings=512)
    config.rope_parameters = {
        "rope_type": kind,
        "rope_theta": 10000.0,
        "partial_rotary_factor": fraction,
        "original_max_position_embeddings": 512,
        **options,
    }
    return utils.ROPE_INIT_FUNCTIONS[kind](config, torch.device("cpu"), seq_len=seq_len)


@pytest.mark.parametrize("fraction", [1.0, 0.25])
@pytest.mark.parametrize("factor", [1.0, 2.0, 4.0, 18.0])
def test_frequencies_equal_transformers(factor, fraction):
    """linear and yarn are the same functions; 'dynamic' calls alpha its factor and takes the length as an argument."""
    ours = f"factor={factor},rotary_fraction={fraction}"

    def same(options: str, theirs: torch.Tensor, at: float = 512) -> None:
        torch.testing.assert_close(theta(options, at).float(), theirs, rtol=2e-6, atol=0)

    same(f"scaling=linear,{ours}", hf_parameters("linear", fraction=fraction, factor=factor)[0])
    for length in (100, 512, 1024, 9216):
        theirs, temperature = hf_parameters("dynamic", length, fraction, factor=factor)
        same(f"scaling=dynamic_ntk,{ours}", theirs, length)
        assert temperature == 1
    for betas in ({}, {"beta_fast": 16.0, "beta_slow": 2.0}):
        theirs, temperature = hf_parameters("yarn", fraction=fraction, factor=factor, **betas)
        text = "".join(f",{key}={value}" for key, value in betas.items())
        same(f"scaling=yarn,{ours}{text}", theirs)
        yarn = build(f"rope:scaling=yarn,{ours}{text}", 8, 512, 512)
        one = Positions.arange(1)
        assert yarn.amplitude(one.q, one, False).item() == pytest.approx(temperature, rel=1e-6)


def test_rotation_equals_transformers(monkeypatch):
    """Llama and GPT-NeoX pair halves, GPT-J neighbours; GPT-NeoX turns a part of the head."""
    utils = pytest.importorskip("transformers.utils")
    # its models load torchaudio where it is installed, which fails with a torch of another version
    monkeypatch.setattr(utils, "is_torchaudio_available", lambda: False)
    from transformers.models.gpt_neox import modeling_gpt_neox as neox
    from transformers.models.gptj import modeling_gptj as gptj
    from transformers.models.llama import modeling_llama as llama

    q, k, _ = vectors(2, 8, 50, 64)
    pos = Positions.arange(50)

    def ours(options: str) -> tuple[torch.Tensor, torch.Tensor]:
        encoding = build(f"rope{options}", 8, 512)
        return encoding.rotate(q, pos.q, pos), encoding.rotate(k, pos.k, pos, key=True)

    for fraction, module in ((1.0, llama), (0.25, neox)):
        angles = pos.q[..., None] * hf_parameters("linear", factor=1.0, fraction=fraction)[0]
        angles = torch.cat([angles, angles], dim=-1)
        theirs = module.apply_rotary_pos_emb(q, k, angles.cos(), angles.sin())
        for a, b in zip(ours(f":rotary_fraction={fraction}"), theirs, strict=True):
            torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-5)

    sin, cos = gptj.create_sinusoidal_positions(50, 64).chunk(2, dim=-1)
    for a, x in zip(ours(":interleaved=true"), (q, k), strict=True):
        b = gptj.apply_rotary_pos_emb(x.transpose(1, 2), sin[None], cos[None]).transpose(1, 2)
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-5)


def test_pairings_are_one_permutation_apart():
    q, k, _ = vectors(1, 2, 30, 16)
    pos = Positions.arange(30)
    order = torch.arange(16).view(2, 8).T.flatten()
    halves = scores(build("rope", 2, 32), q, k, pos)
    neighbours = scores(build("rope:interleaved=true", 2, 32), q[..., order], k[..., order], pos)
    torch.testing.assert_close(halves, neighbours, rtol=1e-5, atol=1e-5)
