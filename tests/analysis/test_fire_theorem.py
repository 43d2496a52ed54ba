"""FIRE as other biases, by our constructions and the paper's own: against the encoding itself, sizes, the command."""

from __future__ import annotations

import functools
import json
import re

import numpy as np
import pytest
import torch
from conftest import error_of, run_here

from fairseq_rpe.analysis.fire_theorem import LONGEST, fit_fire, paper_fits
from fairseq_rpe.core import Positions
from fairseq_rpe.encodings import build
from fairseq_rpe.figures.biases import draw_constructions

FITTED = ["t5_bias", "t5_bias:buckets=64,init_std=1", "alibi", "kerple_log", "kerple_log:p=2,a=0.3", "kerple_power"]
FITTED += ["kerple_power:p=2,a=1", "kerple_power:p=0.5,a=0.1", "sandwich", "sandwich:variant=evo,dim=32"]
FITTED += ["type1", "type2:variant=paper", "inv_nlnn"]
SIGMAS = {
    "x": lambda x, p: x,
    "x^p": lambda x, p: x**p,
    "cos(x)": lambda x, p: np.cos(x),
    "1 where x >= 0": lambda x, p: np.where(x >= 0, 1.0, 0.0),
}
STEPS = ("t5_bias:init_std=1", "t5_bias:buckets=64,init_std=1", "t5_bias:variant=clipped,init_std=1")
PAPER = dict.fromkeys(("alibi", "kerple_log", "kerple_log:p=2,a=0.3"), "x") | dict.fromkeys(STEPS, "1 where x >= 0")
PAPER |= dict.fromkeys(("kerple_power", "kerple_power:p=2,a=0.1"), "x^p")
PAPER |= dict.fromkeys(("sandwich", "sandwich:variant=evo,dim=32"), "cos(x)")


@functools.cache
def fitted(spec: str, heads: int, length: int, fit=fit_fire):
    torch.manual_seed(1)
    encoding = build(spec, heads, 64 * heads)
    return encoding, fit(encoding, spec, length)


def of_paper(spec: str, heads: int, length: int):
    return fitted(spec, heads, length, paper_fits)


def check(encoding, fits, length: int, queries: list[int]) -> None:
    """Every fit against the encoding's own bias at these queries and all keys before them; the first has all heads."""
    assert fits[0].heads == tuple(range(1, encoding.heads + 1))
    k = torch.arange(length, dtype=torch.float64)[None]
    pos = Positions(k[:, queries], k, contiguous=False)
    past = k[0] <= pos.q[0, :, None]
    expected = encoding.position_bias(pos).materialize(pos)
    for fit in fits:
        assert fit.fire.heads == len(fit.heads) and fit.threshold == length
        assert all(p.dtype == torch.float64 for p in fit.fire.parameters())
        got = fit.fire.position_bias(pos).materialize(pos)
        largest = (got - expected[:, [h - 1 for h in fit.heads]])[..., past].abs().max().item()
        assert largest <= 1e-6
        assert largest <= fit.error + 1e-7  # what is printed is what is; sums in another order


@pytest.mark.parametrize("spec", FITTED)
def test_every_pair_of_positions(spec):
    check(*fitted(spec, 3, 130), 130, list(range(130)))


@pytest.mark.parametrize("spec", ["t5_bias", "kerple_log", "kerple_power", "sandwich"])
def test_theorem_3_1_at_2048(spec):
    encoding, fits = fitted(spec, 8, 2048)
    check(encoding, fits, 2048, [0, 1, 700, 2047])
    # the other queries divide by the same number, so they have the same argument of f at each distance, bit by bit
    k = torch.arange(2048, dtype=torch.float64)[None]
    for fit in fits:
        last = fit.fire.ratio(k[:, -1:], k)[0, 0]
        for i in range(0, 2047, 89):
            assert torch.equal(fit.fire.ratio(k[:, i : i + 1], k)[0, 0, : i + 1], last[2047 - i :])


@pytest.mark.parametrize("spec", ["alibi", "kerple_log", "sandwich", "t5_bias", "window:window=4"])
def test_the_shortest_ranges(spec):
    for length in (1, 2, 3, 4):
        encoding, fits = fitted(spec, 2, length)
        check(encoding, fits, length, list(range(length)))
        assert length > 2 or fits[0].hidden == 0


def test_sizes():
    """What docs/fire-theorem.md says."""
    sizes = {"alibi": (0, True, 8), "kerple_log:p=2,a=0.3": (0, False, 8), "t5_bias": (47, True, 8)}
    sizes |= dict.fromkeys(("kerple_power", "sandwich"), (2047, True, 8))
    for spec, expected in sizes.items():
        assert [(fit.hidden, fit.c is None, len(fit.heads)) for fit in fitted(spec, 8, 2048)[1]] == [expected], spec
    encoding, [shared, *own] = fitted("kerple_log", 8, 2048)
    assert (shared.hidden, shared.c, len(shared.heads)) == (2047, None, 8)
    assert [(fit.hidden, fit.heads) for fit in own] == [(0, (h + 1,)) for h in range(8)]
    assert [fit.c for fit in own] == encoding.a(torch.float64).tolist()
    assert [len(of_paper(spec, 8, 2048)[1]) for spec in ("alibi", "kerple_log", "kerple_power")] == [1, 8, 1]
    assert [len(fit.weight) for spec in ("t5_bias", "sandwich") for fit in of_paper(spec, 8, 2048)[1]] == [31, 64]
    assert of_paper("type1", 8, 64)[1] == [] and of_paper("window:window=100", 8, 64)[1] == []


def test_beyond_the_range_fire_goes_its_own_way():
    fire = fitted("alibi", 2, 64)[1][0].fire
    i, j = (torch.tensor([[x]], dtype=torch.float64) for x in (256.0, 156.0))
    ratio = fire.bias(i, j).flatten() / build("alibi", 2, 128).bias_profile(101)[:, -1]
    assert ratio.tolist() == pytest.approx([64 / 256] * 2, rel=1e-6)  # distances are scaled down to the range


def psi(x, c):
    return x if c is None else np.log1p(c * x)


@pytest.mark.parametrize("spec", ["kerple_log", "t5_bias"])
def test_the_command_writes_equation_4(spec, tmp_path):
    """f, ψ and the normaliser written out in numpy, with the parameters of the file, meet the encoding's bias."""
    out = tmp_path / "new" / "fit.json"
    said = run_here("fire-fit", spec, "--length", "90", "--heads", "3", "--seed", "4", "--out", out).stdout
    written = json.loads(out.read_text())
    assert [written[k] for k in ("spec", "length", "heads", "seed")] == [spec, 90, 3, 4]
    torch.manual_seed(4)
    profile = build(spec, 3, 192).bias_profile(90).numpy()
    for entry in written["modules"]:
        state = {name: np.array(value) for name, value in entry["state"].items()}
        heads, last, c = [h - 1 for h in entry["heads"]], entry["hidden_layers"], entry["c"]
        for i in (0, 40, 89):
            x = (psi(i - np.arange(i + 1.0), c) / (psi(np.maximum(entry["L"], i), c) + 1e-6))[:, None]
            for layer in range(last):
                x = np.maximum(x @ state[f"mlp.{layer}.weight"].T + state[f"mlp.{layer}.bias"], 0)
            b = x @ state[f"mlp.{last}.weight"].T + state[f"mlp.{last}.bias"]
            assert np.abs(b.T - profile[heads, : i + 1][:, ::-1]).max() <= 1e-6
        # and as docs/fire-theorem.md reads it
        fire = build(entry["fire"], len(heads), len(heads)).double()
        fire.load_state_dict({k: torch.tensor(v, dtype=torch.float64) for k, v in entry["state"].items()})
        assert np.abs(fire.bias_profile(90).numpy() - profile[heads]).max() == pytest.approx(entry["error"], abs=1e-12)
        assert f"largest error: {entry['error']:.1e} nats in float64, {entry['error_float32']:.1e} in float32" in said
        assert c is None or f"psi(x) = ln(c*x + 1), c = {c:.6g}; L = 90" in said
    assert "heads 1-3: one hidden layer of " in said and f"parameters: {out}" in said
    assert [p.name for p in out.parent.iterdir()] == ["fit.json"]  # nothing temporary is left


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["rope"], "'rope' is not a bias of the distance alone.*alibi, .*t5_bias"),
        (["fire"], "'fire' is not a bias of the distance alone"),
        (["alibi", "--length", LONGEST + 1], f"{LONGEST + 1} is out of range: choose 1 to {LONGEST}"),
        (["window:window=4"], "not finite at distance 4.*at most 4"),
        (["kerple_power:p=2,a=1e9"], "float64 does not hold.*shorter length"),
    ],
)
def test_what_cannot_be_fitted_is_refused(words, said, capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert re.search(said, error_of(capsys, "fire-fit", *words)) and not list(tmp_path.iterdir())


@pytest.mark.parametrize("spec", PAPER)
def test_the_papers_equation_4_by_hand_meets_the_bias(spec):
    """Written out in numpy for every pair of positions, of what ``as_dict`` has."""
    for heads, length in ((3, 600), (2, 1), (2, 2)):
        encoding, fits = of_paper(spec, heads, length)
        target = encoding.bias_profile(length).numpy()
        assert sum((fit.heads for fit in fits), ()) == tuple(range(1, heads + 1))
        for fit in fits:
            assert fit.sigma == PAPER[spec] and fit.error <= 1e-9
            of = {key: np.array(value) for key, value in fit.as_dict().items() if isinstance(value, list)}
            for i in {0, length // 2, length - 1}:
                distance = i - np.arange(i + 1.0)
                u = psi(distance, fit.c) / psi(np.maximum(float(fit.length), i), fit.c)
                hidden = SIGMAS[fit.sigma](np.outer(of["weight"], u) + of["shift"][:, None], of["power"][:, None])
                bias = of["output_weight"] @ hidden + of["output_bias"][:, None]
                assert np.abs(bias - target[[h - 1 for h in fit.heads]][:, distance.astype(int)]).max() <= 1e-9


def test_steps_on_the_edges_fail_in_the_listing_only():
    """A bucket too late: its first distance has the bias of the bucket before."""
    encoding, [fit] = of_paper("t5_bias:init_std=1", 4, 128)
    target = encoding.bias_profile(128)
    edges = fit.shift - 0.5 / 128
    assert torch.allclose(fit.values(shift=edges), target, atol=1e-12)  # Eq. 4; 128 divides without rounding
    late = fit.values(more=1e-6, shift=edges)
    first = [n for n in range(1, 128) if not torch.equal(target[:, n], target[:, n - 1])]
    assert torch.allclose(late[:, first], target[:, [n - 1 for n in first]], atol=1e-12)
    jumps = target.diff().abs().max().item()
    assert fit.on_edge == pytest.approx(jumps, abs=1e-12) and jumps > 0.5
    assert torch.allclose(fit.values(more=1e-6), target, atol=1e-12)  # half a token earlier


def test_the_printed_frequencies_are_not_sandwichs():
    """From k = 1 to D instead of 0 to D - 1: cos(d / 10000) in the place of cos(d)."""
    [fit] = of_paper("sandwich", 8, 512)[1]
    d = torch.arange(512, dtype=torch.float64)
    assert fit.as_printed == pytest.approx(((d / 10000).cos() - d.cos()).abs().max().item())
    assert of_paper("sandwich:variant=evo", 8, 512)[1][0].as_printed is None


def test_the_figure_shows_both_and_their_errors():
    encoding, fits = fitted("t5_bias", 4, 40)
    target = encoding.bias_profile(40)
    left, right = draw_constructions("t5_bias", target, fits[0], paper_fits(encoding, "t5_bias", 40)).axes
    assert len(left.lines) == 6
    for line, head in zip(left.lines, (0, 3) * 3, strict=True):
        assert line.get_ydata().tolist() == pytest.approx(target[head].tolist(), abs=1e-12)
    errors = {line.get_label(): max(line.get_ydata()) for line in right.lines}
    names = ("ours, ReLUs", "the paper's, σ(x) = 1 where x >= 0")
    assert list(errors) == [f"{name}, {digits}" for name in names for digits in ("float64", "float32")]
    assert errors["ours, ReLUs, float32"] == pytest.approx(fits[0].error_float32)


def test_the_command_prints_draws_and_writes_both(tmp_path):
    out, figure = tmp_path / "fit.json", tmp_path / "fit.png"
    flags = ("--length", "50", "--heads", "2", "--out", out, "--figure", figure)
    said = run_here("fire-fit", "sandwich", *flags).stdout
    assert "heads 1-2: one hidden layer of 49 ReLUs" in said
    assert "The paper's own, Appendix A.2:\n\nheads 1-2: 64 units of sigma(x) = cos(x)" in said
    assert "with frequencies from k = 1, as printed: " in said and f"figure: {figure}" in said
    [written] = json.loads(out.read_text())["paper"]
    assert written["sigma"] == "cos(x)" and len(written["weight"]) == 64 and written["error"] < 1e-12
    assert figure.read_bytes().startswith(b"\x89PNG")
    assert "The paper has no construction of it." in run_here("fire-fit", "type1", "--length", "20").stdout


def test_only_powers_are_shown_with_p():
    def shown(spec):
        return [line.split()[0] for line in str(of_paper(spec, 2, 20)[1][0]).splitlines()]

    assert "p" in shown("kerple_power") and "p" not in shown("sandwich")
