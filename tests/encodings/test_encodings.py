"""Every encoding: golden values, invariants of the base class, a user's own file, and the encodings of a model."""

from __future__ import annotations

import math

import pytest
import torch
from golden import BUCKETS_32, BUCKETS_64, DISTANCES, GOLDEN
from refusal import refused
from specs import ALL_SPECS, SPECS
from torch.testing import assert_close

from fairseq_rpe import positions
from fairseq_rpe.analysis.convergence import DIVERGES, verdict
from fairseq_rpe.core import Positions
from fairseq_rpe.encodings import build, describe, load_module, names, normalise
from fairseq_rpe.encodings.alibi import alibi_slopes
from fairseq_rpe.encodings.kerple import positive, positive_inverse, scaled_sigmoid, scaled_sigmoid_inverse
from fairseq_rpe.encodings.model import build_for_model, load_weights
from fairseq_rpe.encodings.t5 import relative_position_bucket


def test_every_name_has_specs_here():
    assert set(names()) - {n for n in names() if n.startswith("test_")} == set(SPECS)


@pytest.mark.parametrize("spec", GOLDEN)
def test_golden_values(spec):
    profile = build(spec, heads=8, width=512).bias_profile(9216)
    assert profile.shape == (8, 9216) and profile.dtype == torch.float64
    for head, row in GOLDEN[spec].items():
        assert profile[head - 1, DISTANCES].tolist() == pytest.approx(row, rel=1e-9, abs=1e-9), head


@pytest.mark.parametrize("spec", ALL_SPECS)
def test_float32_close_to_float64(spec):
    encoding = build(spec, heads=8, width=64, length=700)
    exact, pos = encoding.bias_profile(700), Positions.arange(1, 700)
    form = encoding.position_bias(pos)
    if form is None:
        assert "bias_profile" in vars(type(encoding).__mro__[1]) or not exact.any()  # or it says its own
        return
    rough = form.materialize(pos)[0, :, 0].flip(-1)
    assert rough.dtype == torch.float32
    assert_close(rough.double(), exact, rtol=1e-5, atol=2e-5)


@pytest.mark.parametrize("spec", ["alibi", "type1", "kerple_log", "t5_bias:init_std=1", "fire", "window:window=5"])
def test_irregular_positions_equal_the_formula(spec):
    """Positions that skip go through a gathered table, fractional ones through the function; integers are as good."""
    encoding = build(spec, 4, 32, 64)
    at = torch.tensor([[0, 3, 4, 11], [1, 2, 5, 6]])
    for x in (at, at.float()):
        whole, free = (Positions(x, x, step, contiguous=False) for step in (1.0, None))
        a, b = (encoding.position_bias(p).materialize(p).expand(2, -1, -1, -1).tril() for p in (whole, free))
        assert_close(a, b)
        if spec != "fire":
            assert_close(torch.stack([a[0, :, 3, 1], a[1, :, 2, 0]], 1), encoding.bias_profile(12)[:, [8, 4]].float())
    with refused("positions in torch.bfloat16 are rounded"):
        Positions(at.bfloat16(), at.bfloat16())


def test_an_encoding_leaves_alone_what_it_does_not_change():
    alibi, x, pos = build("alibi", 4, 32), torch.randn(1, 4, 5, 8), Positions.arange(5)
    assert alibi.rotate(x, pos.q, pos) is alibi.value(x, pos) is alibi.embed(x, pos) is x


@pytest.mark.parametrize("spec", ["kerple_log", "t5_bias", "fire"])
def test_half_precision_keeps_parameters_and_bias(spec):
    encoding = build(spec, heads=4, width=32)
    before = encoding.bias_profile(30)
    for cast in (encoding.half, encoding.bfloat16):
        cast()
        assert all(p.dtype == torch.float32 for p in encoding.parameters())
        assert torch.equal(encoding.bias_profile(30), before)


def test_alibi_slopes_of_other_head_counts():
    assert alibi_slopes(1) == [0.00390625]
    assert alibi_slopes(6) == [0.25, 0.0625, 0.015625, 0.00390625, 0.5, 0.125]
    powers = [*range(1, 9), 0.5, 1.5, 2.5, 3.5]
    assert alibi_slopes(12) == pytest.approx([2.0**-power for power in powers], abs=1e-10)


def test_profiles():
    """Of the distance where it alone decides, and refused elsewhere."""
    for spec in ("window:window=3", "lm_infinite:original_length=3,sinks=0"):
        assert build(spec, 2, 8).bias_profile(5)[0].tolist() == [0, 0, 0, -math.inf, -math.inf]
    rates = build("forgetting:gate=fixed", 4, 16).bias_profile(5)
    assert not rates[:, 0].any() and (rates.diff(dim=1) < 0).all()
    clipped = build("t5_bias:variant=clipped,buckets=5,init_std=1", 2, 16)
    assert torch.equal(clipped.bias_profile(7), clipped.table.double().T[:, [0, 1, 2, 3, 4, 4, 4]])
    for spec in ("shaw", "forgetting", "cope"):
        with refused("depends on the tokens: bias_profile needs a bias of the distance alone"):
            build(spec, 2, 8).bias_profile(3)


def test_a_fixed_p_of_kerple_is_not_trained():
    encoding = build("kerple_log:p=1,learn_p=false", 4, 32)
    optimizer = torch.optim.SGD([x for x in encoding.parameters() if x.requires_grad], lr=1.0)
    encoding.bias(torch.arange(9.0)).sum().backward()
    optimizer.step()
    assert torch.equal(encoding.p(), torch.ones(4)) and encoding.raw_a.detach().abs().min() > 0
    # Σ 1/(1 + a·n) diverges whatever a is: theory says that the model does not extrapolate
    assert {head.decision for head in verdict(encoding)} == {DIVERGES}


@pytest.mark.parametrize(("buckets", "firsts"), [(32, BUCKETS_32), (64, BUCKETS_64)])
def test_t5_buckets(buckets, firsts):
    d = torch.arange(512.0)
    got = relative_position_bucket(d, buckets, 128)
    assert torch.equal(got[: buckets // 2], torch.arange(buckets // 2)) and got[-1] == buckets - 1
    assert all(got[distance] == number and got[distance - 1] == number - 1 for distance, number in firsts.items())
    assert torch.equal(got, relative_position_bucket(d.double(), buckets, 128))


def test_fire_inputs_and_size():
    at = torch.tensor([[511.0, 1023.0, 8191.0]], dtype=torch.float64).T
    fire, zero = build("fire", 8, 512), torch.zeros(1, 1, dtype=torch.float64)
    rows = ([0, 0.024098, 0.046098, 0.175255], [0, 0.020551, 0.039313, 0.149461], [0, 0.014205, 0.027174, 0.103309])
    for i, expected in zip(at[:, None], rows, strict=True):
        j = i - torch.tensor([[0.0, 1.0, 2.0, 10.0]], dtype=torch.float64)
        assert fire.ratio(i, j).flatten().tolist() == pytest.approx(expected, abs=2e-6)
    assert fire.ratio(at[:1], zero).item() == pytest.approx(0.999515, abs=1e-6)
    assert build("fire:threshold=none,log=false", 8, 512).ratio(zero, zero).item() == 0.0
    sizes = (sum(p.numel() for p in build(f"fire:hidden_layers={k}", 8, 512).parameters()) for k in (1, 2))
    assert [*sizes] == [330, 1386]


@pytest.mark.parametrize(
    ("spec", "at", "values"),
    [
        ("sinusoidal", 0, {0: 0.9092974268, 1: 0.9365102136, 256: -0.4161468365, 255: 0.0002}),
        ("sinusoidal", 10, {0: -0.5365729180, 256: 0.8438539587}),
        ("sinusoidal", 511, {0: -0.7958423493, 256: -0.6055038851, 255: 0.0512775020}),
        ("sinusoidal:style=vaswani", 1, {0: 0.8414709848, 1: 0.5403023059, 2: 0.8218561900}),
        ("sinusoidal:style=vaswani", 511, {0: 0.8817704008, 1: -0.4716788742, 2: 0.2839957007}),
    ],
)
def test_sinusoidal_golden(spec, at, values):
    found = build(spec, 8, 512).vectors(torch.tensor([[at]], dtype=torch.float64))[0, 0]
    assert found[[*values]].tolist() == pytest.approx([*values.values()], abs=1e-9)


@pytest.mark.parametrize("form", ["paper", "evo"])
def test_sandwichs_cosines_are_exact_far_away(form):
    """Angles near 10,000 are off by 1e-3 in float32, so a float32 table is made in float64."""
    encoding = build(f"sandwich:variant={form}", 4, 256)
    d = torch.tensor([0.0, 1.0, 4097.0, 9215.0, 100_003.0])
    found = encoding.bias(d)
    assert found.dtype == torch.float32
    assert_close(found.double(), encoding.bias(d.double()), rtol=1e-6, atol=0)


def test_reparametrisations_invert():
    values = torch.tensor([0.011, 0.5, 1.999, 30.0], dtype=torch.float64)
    assert_close(positive(positive_inverse(values, 0.01), 0.01), values)
    assert_close(scaled_sigmoid(scaled_sigmoid_inverse(values[:3], 0.01, 2.0), 0.01, 2.0), values[:3])
    assert scaled_sigmoid(scaled_sigmoid_inverse(torch.tensor(2.0), 0.01, 2.0), 0.01, 2.0) == 2.0
    raw = torch.tensor(-30.0, requires_grad=True)
    positive(raw, 0.01).backward()
    assert raw.grad > 0


def test_tables_of_positions_end():
    learned, tupe = (build(spec, 4, 32, length=8) for spec in ("learned", "tupe"))
    learned.embed(torch.zeros(1, 8, 32), Positions.arange(8))
    tupe.position_bias(Positions.arange(8))
    with refused("position 8 is beyond the 8 positions"):
        learned.embed(torch.zeros(1, 9, 32), Positions.arange(9))
    for pos in (Positions.arange(9), Positions.arange(1, 9)):
        with refused("position 8 is beyond the 8 positions that 'tupe'"):
            tupe.position_bias(pos)


@pytest.mark.parametrize(
    ("spec", "spelling"),
    {
        "type1:variant=heads": "type1",
        "kerple_log:a=1/2,p=2": "kerple_log:p=2,a=0.5",
        "rope:factor=8.0,scaling=yarn": "rope:scaling=yarn,factor=8",
        "rope:scaling=yarn,factor=AUTO,temperature=auto": "rope:scaling=yarn,factor=auto",
        "longrope:factors=1.0+1.50+2+1e6": "longrope:factors=1+1.5+2+1000000",
    }.items(),
)
def test_one_spelling(spec, spelling):
    assert normalise(spec) == spelling


def test_descriptions():
    for row in describe():
        assert row.summary and row.formula and row.paper and all(o.help for o in row.options), row.name


OWN = '''
from dataclasses import dataclass
from fairseq_rpe.encodings import DistanceBias, option, register


@dataclass(frozen=True)
class Config:
    rate: float = option(0.5, "slope", above=0)


@register("test_own")
class Own(DistanceBias):
    """Mine."""

    Config = Config
    formula = "-rate·d"
    paper = "none"

    def bias(self, d):
        return -self.config.rate * d.expand(self.heads, -1)
'''


def test_own_file(tmp_path):
    file = tmp_path / "mine.py"
    file.write_text(OWN)
    load_module(file)
    load_module(file)
    assert build("test_own:rate=2", 2, 8).bias_profile(3)[1].tolist() == [0, -2, -4]
    file.write_text(OWN.replace("test_own", "test_own_b"))
    with refused("changed after it was loaded"):
        load_module(file)
    with refused("no such file"):
        load_module(tmp_path / "absent.py")


def test_own_file_that_registers_a_position_transform_alone(tmp_path):
    (tmp_path / "halved.py").write_text(
        "from fairseq_rpe.positions import Transform, register\n\n\n"
        '@register(\'test_halved\')\nclass Halved(Transform):\n    """Halve positions."""\n\n'
        "    formula = 'p / 2'\n    paper = 'none'\n"
    )
    load_module(tmp_path / "halved.py")
    assert "test_halved" in positions.names()


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("x = 1\n", "registers no encoding"),
        ("def broken(:\n", "line 1: SyntaxError"),
        ("import math\n\n1 / 0\n", "line 3: ZeroDivisionError"),
        (OWN.replace("test_own", "alibi"), "'alibi' is registered twice"),
    ],
)
def test_own_file_that_fails(tmp_path, text, words):
    file = tmp_path / "bad.py"
    file.write_text(text)
    with refused(words):
        load_module(file)


# the encodings of a model


@pytest.mark.parametrize(
    ("spec", "shared", "own"), [("transformer_xl", "u", "project"), ("deberta", "table", "to_key")]
)
def test_what_layers_share(spec, shared, own):
    first, *others = build_for_model(spec, 2, 8, 3, 64, share="layer")
    assert all(getattr(x, shared) is getattr(first, shared) for x in others) and len(others) == 2
    assert all(getattr(x, own) is not getattr(first, own) for x in others)


def test_weights_that_fit_are_loaded():
    trained, made = (torch.nn.ModuleList(build_for_model("fire", 4, 32, 2, 64, share="layer")) for _ in range(2))
    assert load_weights([*made], [one.state_dict() for one in trained]) is None
    assert_close(made.state_dict(), trained.state_dict(), rtol=0, atol=0)


@pytest.mark.parametrize(
    ("trained", "spec", "words"),
    [
        ("t5_bias", "rope", "Unexpected key"),
        ("rope", "t5_bias", "Missing key"),
        ("t5_bias", "t5_bias:buckets=16", "size mismatch"),
        ("learned:max_positions=64", "learned:max_positions=128", "size mismatch"),
        ("fire", "fire", "Missing key"),  # of the second layer
        ("t5_bias", "t5_bias", "int64"),
    ],
)
def test_weights_that_do_not_fit(trained, spec, words):
    weights = [one.state_dict() for one in build_for_model(trained, 4, 32, 2, 64, share="auto")][:1]
    if words == "int64":
        weights = [{name: value.long() for name, value in weights[0].items()}]
    wrong = load_weights(build_for_model(spec, 4, 32, 2, 64, share="layer" if spec == "fire" else "auto"), weights)
    assert wrong is not None and words in wrong and "\n" not in wrong
