"""Verdicts on Σ exp(bias): convergence, limits, receptive fields, what cannot be decided, and both commands."""

from __future__ import annotations

import csv
import math
from fractions import Fraction

import flint
import mpmath
import pytest
import sympy
import torch
from conftest import error_of, p_of_heads, run_here, save_checkpoint
from specs import ALL_SPECS, SPECS

from fairseq_rpe import encodings
from fairseq_rpe.analysis import verdict_tables
from fairseq_rpe.analysis.asymptotics import (
    ONE,
    AsymptoticArithmetic,
    Expansion,
    Undecided,
    exact,
    iterated_log,
    monomial_product,
)
from fairseq_rpe.analysis.convergence import CONVERGES, DEPENDS, DIVERGES, UNDECIDED, formula_verdict, verdict
from fairseq_rpe.analysis.formula import N, parse
from fairseq_rpe.analysis.intervals_float import float_ranges
from fairseq_rpe.core import LogBias, UserError
from fairseq_rpe.encodings import DistanceBias, Encoding, Rotary
from fairseq_rpe.encodings.alibi import alibi_slopes
from fairseq_rpe.figures.receptive_fields import draw_theoretical
from fairseq_rpe.figures.style import assign_looks
from fairseq_rpe.utils import files

EXPECTED = dict.fromkeys("alibi type1 type2 window kerple_power lm_infinite streaming_llm".split(), CONVERGES)
EXPECTED |= dict.fromkeys(
    "nope sinusoidal learned rope xpos longrope clex inv_n inv_nlnn sandwich t5_bias fire tisa tupe complex bipe "
    "self_extend rerope leaky_rerope dual_chunk string shaw huang music transformer_xl deberta cope "
    "abacus coupled selective_rope grape_m".split(),
    DIVERGES,
)
EXPECTED |= {"floater": UNDECIDED, "dape": DEPENDS, "selective": DEPENDS, "stick_breaking": DEPENDS}
# path and wall have a spec with forget gates, whose bias has no bound: see test_score_products
EXPECTED |= {"grape_a": DEPENDS, "pairwise_forgetting": DEPENDS, "fope": DIVERGES, "pope": DIVERGES}
SLOPES = alibi_slopes(8)
# a bound, or not one formula of the distance; the last two add no bias, and do not see every key
FORMLESS = ("sandwich", "t5_bias", "fire", "tisa", "tupe", "floater", "lm_infinite", "streaming_llm")
# a formula each; the variants of rotary encodings add no bias either
FORMULAS = [s for s in ALL_SPECS if s.partition(":")[0] not in FORMLESS and not s.startswith(("rope:", "xpos:"))]


def limits(head) -> float:
    """B, checked to lie in a narrow bracket."""
    low, high = head.limit
    assert low <= high and (high - low) / low < 1e-9
    return float(low)


@pytest.mark.parametrize("variants", [slice(1), pytest.param(slice(1, None), marks=pytest.mark.release)])
def test_every_registered_encoding_has_a_verdict(variants):
    assert set(EXPECTED) | {"kerple_log", "forgetting", "path", "wall"} == set(SPECS)
    for name, spec in ((name, spec) for name, specs in SPECS.items() for spec in specs[variants]):
        heads = verdict(spec)
        assert len(heads) == 8
        for head in heads:
            assert "\n" not in head.reason and head.reason
            assert head.decision == EXPECTED.get(name, head.decision), spec
            assert (head.limit is not None) == (head.decision == CONVERGES), spec


def test_reasons_name_what_decides():
    reasons = {
        "sandwich": "64 cosines are at least -64, so the bias is bounded below",
        "kerple_log:p=0.9": "p = 0.9 < 1; kerple_log converges iff p > 1",
        encodings.normalise("kerple_log:p=1.0000001"): "p = 1.0000001 > 1",
        "alibi": "B = 1/(1 - e^-k)",
        "fire": "not Toeplitz",
        "t5_bias": "last bucket",
        "xpos": "scores decay to 0",
        "rope": "no additive bias",
        "inv_nlnn": "Bertrand",
    }
    for spec, words in reasons.items():
        assert all(words in head.reason for head in verdict(spec)), spec


@pytest.mark.parametrize("spec", FORMULAS)
def test_formulas_are_the_biases(spec):
    """What is decided is what the model adds: the formula of each head at distances 0 to 2000, and at 9215."""
    torch.manual_seed(3)
    encoding = encodings.build(spec, 8, 512, 512)
    n = torch.cat([torch.arange(2001), torch.tensor([9215])]).double()
    if isinstance(encoding, DistanceBias):
        expected = encoding.bias(n).detach()
    else:
        assert encoding.position_bias(None) is None
        expected = torch.zeros(8, len(n))
    for weight, row in zip(encoding.log_bias_formulas(), expected, strict=True):
        weight = weight if isinstance(weight, LogBias) else LogBias(weight)
        low, high = float_ranges(parse(weight.formula), n.numpy(), n.numpy())
        kept = n < (weight.keys or math.inf)
        assert not weight.at_least
        assert torch.allclose(torch.tensor((low + high) / 2)[kept], row[kept].double(), rtol=1e-6, atol=1e-9)
        assert (row[~kept] == -math.inf).all()


@pytest.mark.parametrize("spec", ["sandwich", "sandwich:variant=evo", "t5_bias:init_std=1"])
def test_bounds_are_below_the_biases(spec):
    encoding = encodings.build(spec, 8, 512)
    bias = encoding.bias(torch.arange(128, 40_000).double()).detach()
    for weight, row in zip(encoding.log_bias_formulas(), bias, strict=True):
        assert weight.at_least and float(row.min()) >= float(parse(weight.formula)) - 1e-9


def test_lower_bounds_of_the_bias_prove_divergence_only():
    class Bounded(DistanceBias):
        lower_bound = ""

        def bias(self, d):
            return (-torch.log1p(d) + d.sin() + 1)[None].expand(self.heads, -1)

        def log_bias_formulas(self):
            return [LogBias(self.lower_bound, at_least=True)] * self.heads

    encodings.register("bounded")(Bounded)
    for lower_bound, decision in (("-log(1 + n)", DIVERGES), ("-64", DIVERGES), ("-2*log(1 + n)", UNDECIDED)):
        Bounded.lower_bound = lower_bound
        assert {head.decision for head in verdict("bounded", heads=2)} == {decision}


def test_limits_of_closed_forms():
    for slope, alibi, type1 in zip(SLOPES, verdict("alibi"), verdict("type1"), strict=True):
        assert limits(alibi) == pytest.approx(1 / -math.expm1(-slope), rel=1e-12)
        coth = 1 / math.tanh(math.pi / slope)
        assert limits(type1) == pytest.approx((1 + math.pi / slope * coth) / 2, rel=1e-12)
    assert limits(verdict("type1:variant=paper")[0]) == pytest.approx(math.pi**2 / 6, rel=1e-12)
    assert limits(verdict("type2:variant=paper")[0]) == pytest.approx(2.2381813068, rel=1e-9)
    assert [limits(verdict("type2")[k]) for k in (0, 7)] == pytest.approx([1.0627248643, 115.8696539748], rel=1e-9)
    assert verdict("alibi")[0].digits() == "2.54149408254" and verdict("window:window=5")[0].digits() == "5"


def release(*values):
    return pytest.param(*values, marks=pytest.mark.release)


def _tanh_less_one(n):
    return (n + 1) ** (-2 * mpmath.tanh(n + 1)) - (n + 1) ** mpmath.mpf(-2)


@pytest.mark.parametrize(
    ("formula", "exact"),
    [
        ("-1.0001*log(n+1)", lambda: mpmath.zeta(mpmath.mpf("1.0001"))),
        ("-2*log(n+0.5)", lambda: mpmath.zeta(2, mpmath.mpf("0.5"))),
        ("-n**2", lambda: (1 + mpmath.jtheta(3, 0, mpmath.exp(-1))) / 2),
        ("-0.01*n**2", lambda: (1 + mpmath.jtheta(3, 0, mpmath.exp(mpmath.mpf("-0.01")))) / 2),
        ("-log((n+1)*(n+2))", lambda: 1),
        ("-log(1 + exp(-n)) - n", lambda: mpmath.fsum(1 / (1 + mpmath.exp(n)) for n in range(120))),
        ("-2*log(n+1)*tanh(n+1)", lambda: mpmath.zeta(2) + mpmath.nsum(_tanh_less_one, [0, mpmath.inf], method="d")),
        ("-n + log(n+1)", lambda: 1 / (1 - mpmath.exp(-1)) ** 2),
        release("log(2 + cos(pi*n)) - n", lambda: 2 / (1 - mpmath.exp(-1)) + 1 / (1 + mpmath.exp(-1))),
        ("-sqrt(n/100)", lambda: mpmath.nsum(lambda n: mpmath.exp(-mpmath.sqrt(n) / 10), [0, mpmath.inf], method="e")),
        release("-e**n", lambda: mpmath.fsum(mpmath.exp(-mpmath.exp(n)) for n in range(9))),
        ("-2*log(n+e**2)", lambda: mpmath.zeta(2, mpmath.e**2)),
        ("-log(1 + (n - 4)**2)", lambda: (1 + mpmath.pi * mpmath.coth(mpmath.pi)) / 2 + mpmath.mpf(73) / 85),
    ],
)
def test_limits_of_formulas(formula, exact):
    low, high = formula_verdict(formula).limit
    with mpmath.workdps(30):
        value = exact()
        assert low - mpmath.mpf(10) ** -24 * abs(low) <= value <= high + mpmath.mpf(10) ** -24 * abs(high)
        assert (high - low) / low < 1e-11


def test_receptive_fields_of_the_table():
    fields = {
        ("kerple_power:p=1,a=1", 0): (1, 3, 5),  # ALiBi with k = 1
        ("alibi", 0): (2, 5, 10),
        ("alibi", 7): (178, 590, 1179),
        ("type1:variant=paper", 0): (1, 6, 61),
        ("type2:variant=paper", 0): (2, 4, 9),
        ("type1", 0): (3, 12, 111),
        ("type1", 7): (257, 1615, 16277),
        ("type2", 0): (3, 8, 19),
        ("type2", 7): (280, 1039, 2467),
        ("window:window=10", 0): (6, 10, 10),
    }
    for (spec, head), expected in fields.items():
        assert tuple(verdict(spec)[head].trf(e).exact for e in (0.5, 0.1, 0.01)) == expected, (spec, head)


@pytest.mark.parametrize("formula", ["-2*log(n+1)", "-0.3*n", "-0.5*sqrt(n)", "-n/(1+log(n+1))", "-log(1+n)**2"])
def test_receptive_fields_are_the_definition(formula):
    """Against partial sums with many digits."""
    head = formula_verdict(formula)
    with mpmath.workdps(40):
        bias = sympy.lambdify(N, parse(formula), "mpmath")
        for epsilon in (0.7, 0.3, 0.05, 0.02):
            target, partial, j = head.limit[0] * (1 - mpmath.mpf(repr(epsilon))), mpmath.mpf(0), 0
            while not partial > target:
                partial += mpmath.exp(bias(mpmath.mpf(j)))
                j += 1
            assert head.trf(epsilon).exact == j, epsilon


def test_receptive_fields_of_p_series_by_hurwitz_zeta():
    """Σ_{n>=j} (1 + a·n)^-p = a^-p·ζ(p, j + 1/a), also where j has 20 digits."""
    precision = flint.ctx.prec
    for p, a in (("1.1", "0.3"), ("1.5", "1"), ("1.01", "2")):
        head = formula_verdict(f"-{p}*log(1+{a}*n)")
        with mpmath.workdps(60):
            s, shift = mpmath.mpf(p), 1 / mpmath.mpf(a)
            assert head.limit[0] <= shift**s * mpmath.zeta(s, shift) <= head.limit[1]
            for epsilon in ("0.7", "0.3", "0.1", "0.01"):
                found, target = head.trf(Fraction(epsilon)), mpmath.zeta(s, shift) * mpmath.mpf(epsilon)
                if found.low is not None:
                    assert mpmath.zeta(s, shift + found.high) < target <= mpmath.zeta(s, shift + found.low - 1), p
    assert flint.ctx.prec == precision  # nobody else's precision changes


def test_a_field_is_strict_where_both_sides_are_equal():
    assert formula_verdict("-log(2)*n").trf(0.25).exact == 3  # the tail from 2 on is B/4 itself
    telescope = formula_verdict("-log((n+1)*(n+2))").trf(0.1)  # tail 1/(j+1): equal to B/10 at 9
    assert (telescope.low, telescope.high) == (9, 10) and telescope.exact is None and str(telescope) == "9 to 10"


@pytest.mark.parametrize(
    ("formula", "decision", "words"),
    [
        ("-log(n+1)", DIVERGES, "harmonic"),
        ("-log(n+3)-log(log(n+3))", DIVERGES, "Bertrand"),
        ("-log(n+2)-2*log(log(n+2))", CONVERGES, "Bertrand"),
        ("-log(n+3)-log(log(n+3))-1.5*log(log(log(n+20)))", CONVERGES, "De Morgan"),
        ("-0.1*sqrt(n)", CONVERGES, "faster than any multiple of ln n"),
        ("-1.0001*log(1+n)", CONVERGES, "p = 1.0001 > 1"),
        ("-0.9999*log(1+n)", DIVERGES, "p = 0.9999 < 1"),
        ("-1.5*log(n+1)+0.5*log(n+2)", DIVERGES, "harmonic"),
        ("-1.5*log(n+1)+0.4999999*log(n+2)", CONVERGES, "p = 1.0000001 > 1"),
        ("(-1)**n-log(n+1)", DIVERGES, "oscillating"),
        ("-sqrt(log(n+1))", DIVERGES, "slower than ln n"),
        ("-n*sin(1/(n+1))*log(n+1)", DIVERGES, "harmonic"),
        ("-atan(n)*log(n+1)", CONVERGES, "p = 1.5708 > 1"),
        ("-log(1+n**3+n**7-n**2)", CONVERGES, "p = 7 > 1"),
        ("-exp(-n)", DIVERGES, "does not go to 0"),
        ("-5", DIVERGES, "f -> -5"),
        ("-1e-9*n", CONVERGES, "geometric"),
        ("-3*log(n+1)*sqrt(0.2+1/(n+1))", CONVERGES, "p = 1.34164 > 1"),
        ("-log(n+1)*sqrt(1.44+1/(n+1))", CONVERGES, "p = 1.2 > 1"),
        ("-2*log(n+1)/sqrt(4+1/(n+1))", DIVERGES, "harmonic"),
        ("-(8*n+1)**(1/3)/20", CONVERGES, "f = -0.1·n^0.333333"),
        ("-(1.5+sin(n))*log(n+1)", UNDECIDED, "between -2.5·ln n and -0.5·ln n"),
        ("-abs(sin(n))*n", UNDECIDED, "decides neither"),
        ("-(1-(-1)**n)*n", UNDECIDED, "decides neither"),
    ],
)
def test_formulas(formula, decision, words):
    head = formula_verdict(formula)
    assert head.decision == decision and words in head.reason, head
    assert (head.limit is not None) == (decision == CONVERGES)


def test_slow_convergence_gives_brackets():
    head = verdict("kerple_log:p=1.0001,a=1")[0]
    assert head.digits() == "10000.5772229"
    half = head.trf(0.5)
    assert half.exact is None and str(half) == "≈ 1.12e3010"
    # the tail from j on is j^-0.0001 / 0.0001 but for less than one term
    assert half.logarithms[0] == pytest.approx((math.log10(2) - math.log10(1.00005772229)) / 1e-4, abs=1e-4)
    slow = formula_verdict("-log(n+3)-log(log(n+3))-2*log(log(log(n+30)))")
    assert str(slow.trf(0.001)).startswith("> 10^(")
    unknown = formula_verdict("-log(n+1)**1.0000001")
    assert unknown.decision == CONVERGES and " to " in unknown.digits()


@pytest.mark.release
def test_oscillation_leaves_a_bracket_that_is_said():
    head = formula_verdict("sin(n)-log(1+n**2)")
    assert head.decision == CONVERGES and "oscillating" in head.reason
    low, high = head.limit
    partial = math.fsum(math.exp(math.sin(n) - math.log1p(n * n)) for n in range(200_000))
    assert partial + math.exp(-1) / 200_001 < high and low < partial + math.e / 199_999
    assert head.digits().startswith("3.05337") and "±" in head.digits()


class Opaque(DistanceBias):
    def bias(self, d):
        return -d[None].expand(self.heads, -1)


class Stated(DistanceBias):
    def bias(self, d):
        return -2 * torch.log1p(d)[None].expand(self.heads, -1)

    def log_bias_formulas(self):
        return ["-2*log(1 + n)"] * self.heads


class Turned(Rotary):
    def angles(self, at, pos):
        return at[..., None] * torch.ones(self.rotated // 2)

    def position_bias(self, pos):
        return None


class Bare(Encoding):
    def value(self, v, pos):
        return 2 * v


def test_outside_encodings():
    for made in (Opaque, Turned, Bare):  # a profile at finitely many distances is no proof
        encodings.register(made.__name__.lower())(made)
        found = verdict(made.__name__.lower())
        assert {(h.decision, h.limit) for h in found} == {(UNDECIDED, None)} and "no formula" in found[0].reason
    encodings.register("stated")(Stated)
    assert verdict("stated", heads=2)[1].trf(0.1).exact == 6


def test_parameters_are_exact_numbers():
    assert {h.decision for h in verdict("kerple_log:p=1")} == {DIVERGES}
    encoding = encodings.build("kerple_log:a=0.5", 4, 64)
    just_above, one = torch.nextafter(torch.tensor(1.0), torch.tensor(2.0)), torch.tensor(1.0)
    encoding.p = lambda dtype=torch.float32: torch.stack([just_above, one, one * 0.9, one * 1.1])
    with torch.no_grad():
        encoding.raw_p += 1
    above, exactly, below, far = verdict(encoding)
    assert [h.decision for h in (above, exactly, below, far)] == [CONVERGES, DIVERGES, DIVERGES, CONVERGES]
    assert float(above.limit[0]) == pytest.approx(2**23 * 2, rel=1e-5)
    assert "p = 1.00000011921 > 1" in above.reason and "iff p > 1" in above.reason


def test_checkpoint_head_by_head_and_layer_by_layer(tmp_path):
    path, _ = save_checkpoint(tmp_path / "shared", "kerple_log", change=p_of_heads(0.9, 1.1, 2.0, 0.5))
    file = tmp_path / "deep/shared.csv"
    run_here("verdict", "--checkpoint", path, "--csv", file)
    rows = list(csv.DictReader(file.read_text().splitlines()))
    found = {row["head"]: row["verdict"] for row in rows}
    assert found == {"1": DIVERGES, "2": CONVERGES, "3": CONVERGES, "4": DIVERGES}
    assert {row["layer"] for row in rows} == {""} and len(rows) == 16
    for row in rows:
        assert (row["limit"] == "") == (row["trf"] == "") == (row["verdict"] == DIVERGES)
    assert "p = 0.9 < 1" in rows[0]["reason"]
    two = [row for row in rows if row["head"] == "3"]
    assert mpmath.mpf(two[0]["limit_low"]) <= mpmath.mpf(two[0]["limit_high"])
    assert [row["epsilon"] for row in two] == ["0.5", "0.1", "0.01", "0.001"]

    changes = iter([p_of_heads(0.9, 1.1, 0.9, 0.9), p_of_heads(1.1, 0.9, 3.0, 2.0)])
    path, _ = save_checkpoint(tmp_path / "layers", "kerple_log", 2, lambda encoding: next(changes)(encoding))
    said = run_here("verdict", "--checkpoint", path).stdout
    lines = [line for line in said.splitlines() if line.startswith("layer")]
    assert [("diverges" in line) for line in lines] == [True, False, True, False, True, False, False]
    assert lines[2].startswith("layer 0 head 3-4") and "p = 0.9 < 1" in lines[2]  # they share all but a
    assert lines[3].startswith("layer 1 head 1") and "p = 1.1 > 1" in lines[3]
    for spec, words in (("alibi", "converges"), ("t5_bias", "last bucket"), ("fire", "bounded")):
        path, _ = save_checkpoint(tmp_path / spec, spec)
        assert words in run_here("verdict", "--checkpoint", path, "--epsilon", "0.1").stdout


@pytest.mark.parametrize(
    ("formula", "words"),
    [
        ("-2*log(n+1", "does not parse"),
        ("-n^2", "write ** for powers"),
        ("-lgo(n+1)", "did you mean 'log'"),
        ("(lambda: n)()", "cannot stand in a formula"),
        ("-n.real", "cannot stand in a formula"),
        ("log(n+1, 2)", "takes one argument"),
        ("-" * 901 + "n", "nested too deeply"),
        ("-1e999*n", "out of range"),
        ("-log(n)", "infinite at n = 0"),
        ("-sqrt(5-n)", "no real value at n = 6"),
        ("-n/(n-5)", "no real value at n = 5"),
        ("-n-1/(n-123456)", "no real value at n = 123456"),
        ("-n + sqrt(123456.5-n)", "no real value at n = "),
        ("n", "grows without bound"),
        ("log(n+1)", "grows without bound"),
    ],
)
def test_bad_formulas_are_one_line(formula, words, capsys):
    assert words in error_of(capsys, "verdict", "--formula", formula)


def test_other_bad_input_is_one_line(capsys, tmp_path):
    """What tests/test_bad_input.py and tests/test_hostile_checkpoints.py do not have."""
    assert "'-n' is given twice" in error_of(capsys, "verdict", "--formula=-n", "--formula=-n")
    assert "given twice" in error_of(capsys, "verdict", "type1", "type1:variant=heads")
    for spec in ("rope", "sinusoidal"):
        path, _ = save_checkpoint(tmp_path / spec, spec)
        assert "adds no bias" in error_of(capsys, "verdict", "--checkpoint", path)
    torch.save({"cfg": {"model": {"_name": "transformer_lm"}}, "model": {}}, tmp_path / "stock.pt")
    assert "is not of this plugin" in error_of(capsys, "verdict", "--checkpoint", tmp_path / "stock.pt")
    path, _ = save_checkpoint(tmp_path / "nan", "kerple_log", 1, p_of_heads(1.1, math.nan, 1.1, 1.1))
    assert "not finite" in error_of(capsys, "verdict", "--checkpoint", path)
    assert "infinite at n = 0" in error_of(capsys, "trf", "--formula", "-log(n)", "--out", tmp_path / "out")
    assert "at most" in error_of(capsys, "trf", "alibi", "--quantised", 10**9, "--out", tmp_path / "out")
    assert not (tmp_path / "out").exists()
    assert "--epsilon: 'small' is not a number" in error_of(capsys, "verdict", "alibi", "--epsilon", "small")
    with pytest.raises(UserError):
        verdict("alibi")[0].trf(1.5)


def test_tables_to_read_and_to_compute_with(tmp_path):
    words = ("alibi", "inv_n", "--heads", "2", "--epsilon", "1/8", "--epsilon", "0.1")
    lines = run_here("verdict", *words).stdout.splitlines()
    assert lines[0] == "alibi"
    assert lines[1].split() == ["Σ", "b_n", "B", "TRF(0.125)", "TRF(0.1)", "reason"]
    assert lines[2].split()[:6] == ["head", "1", "converges", "16.5052079943", "34", "37"]
    (shared,) = [line for line in lines if line.startswith("head 1-2")]
    assert shared.split()[2] == "diverges" and "harmonic" in shared
    file = tmp_path / "verdicts.csv"
    said = run_here("verdict", "--formula=-2*log(n+1)", "--formula=-log(n+1)", "--csv", file).stdout
    decisions = {row["source"]: row["verdict"] for row in csv.DictReader(file.read_text().splitlines())}
    assert decisions == {"-2*log(n+1)": CONVERGES, "-log(n+1)": DIVERGES} and "1.64493406685" in said


def test_trf_command(tmp_path, monkeypatch):
    save = "fairseq_rpe.figures.style.save"
    monkeypatch.setattr(save, lambda figure, *paths: [files.atomic_write(path, "drawn") for path in paths])
    folder = tmp_path / "a folder"
    output = run_here("trf", "alibi", "kerple_log:p=1.01,a=1", "inv_n", "--heads", "1", "--out", folder).stdout
    assert "inv_n: no TRF for 1 of 1 heads" in output and "beyond 10^15" in output
    assert sorted(p.name for p in folder.iterdir()) == ["trf.csv", "trf.pdf", "trf.png"]
    rows = list(csv.DictReader((folder / "trf.csv").read_text().splitlines()))
    assert {row["source"] for row in rows} == {"alibi", "kerple_log:p=1.01,a=1"}
    for row in (row for row in rows if row["source"] == "alibi"):
        expected = math.floor(math.log(1 / Fraction(row["epsilon"])) / alibi_slopes(1)[0]) + 1
        assert row["trf"] == row["trf_low"] == row["trf_high"] == str(expected) and row["head"] == "1"
    run_here("trf", "--formula", "-0.5*n", "--quantised", "512", "--out", tmp_path / "q")
    # a constant in the log-bias changes no receptive field, even if exp(log-bias) is 0 in float64 at all distances
    run_here("trf", "--formula", "-0.5*n-900", "--quantised", "512", "--out", tmp_path / "shifted")
    tables = [(tmp_path / name / "trf.csv").read_text().splitlines() for name in ("q", "shifted")]
    assert [line.split(",")[1:] for line in tables[0]] == [line.split(",")[1:] for line in tables[1]]
    rows = list(csv.DictReader((tmp_path / "q/trf.csv").read_text().splitlines()))
    index = {row["epsilon"]: row["index"] for row in rows}
    assert [index[e] for e in ("0.489796", "0.183673", "0.0204082", "0")] == ["2", "4", "8", "512"]


def test_curves_have_one_colour_per_encoding():
    specs = ["alibi", "type1:variant=paper"]
    rows = {spec: verdict_tables.head_verdicts([encodings.build(spec, 8, 512)]) for spec in specs}
    curves = {spec: verdict_tables.field_curves(found).curves for spec, found in rows.items()}
    assert [len(found) for found in curves.values()] == [8, 1]  # heads that are alike are one curve
    assert len(verdict_tables.field_cells(rows)) == 1 + 16 * len(verdict_tables.EPSILON_GRID)
    (axes,) = draw_theoretical(curves).axes
    assert axes.get_xscale() == axes.get_yscale() == "log" and "keys" in axes.get_ylabel()
    assert {line.get_color() for line in axes.lines} == {assign_looks(specs)[spec].colour for spec in specs}
    assert [text.get_text() for text in axes.texts] == ["alibi, head 1", specs[1]]
    assert "thin: other heads" in axes.get_title()


@pytest.mark.parametrize(
    "second",
    [
        {iterated_log(2): (sympy.Integer(1), sympy.Integer(2))},
        {monomial_product(ONE, iterated_log(1), sympy.Rational(1, 2)): exact(1)},
    ],
    ids=["between one and two ln ln n", "the root of ln n"],
)
def test_exp_of_a_growth_that_is_no_sum_of_logarithms_is_left_undecided(second):
    with pytest.raises(Undecided, match="exp of a slow growth that is not a logarithm"):
        AsymptoticArithmetic(40, 3).exp(Expansion({iterated_log(1): exact(1), **second}))


@pytest.mark.parametrize(
    ("spec", "bias"),
    [("alibi:local=6", lambda n: -n / 256), ("inv_n:variant=paper,block=6", lambda n: -math.log(1 + n))],
)
def test_a_window_leaves_a_finite_sum(spec, bias):
    result = verdict(spec, heads=1)[0]
    terms = [math.exp(bias(n)) for n in range(6)]
    low, high = result.limit
    assert result.decision == CONVERGES and low <= sum(terms) * (1 + 1e-12) and high >= sum(terms) * (1 - 1e-12)
    field = next(j for j in range(7) if sum(terms[:j]) > 0.9 * sum(terms))
    assert (result.trf(0.1).low, result.trf(0.1).high) == (field, field)


@pytest.mark.parametrize("spec", ["deberta:local=5", "floater:local=5", "kerple_log:local=20000"])
def test_a_window_converges_also_where_the_sum_is_not_known(spec):
    result = verdict(spec, heads=1)[0]
    assert result.decision == CONVERGES and result.limit is None
