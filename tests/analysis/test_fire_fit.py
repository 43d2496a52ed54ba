"""FIRE as other biases: every construction against the encoding itself, their sizes, JSON, refusals, the command."""

from __future__ import annotations

import json
import re

import numpy as np
import pytest
import torch

from fairseq_rpe.analysis.fire_fit import LONGEST, fit_fire
from fairseq_rpe.cli.main import main
from fairseq_rpe.core import Positions, block
from fairseq_rpe.encodings import build

THEOREM = ["t5_bias", "t5_bias:buckets=64,init_std=1", "alibi", "kerple_log", "kerple_log:p=2,a=0.3", "kerple_power"]
THEOREM += ["kerple_power:p=2,a=1", "kerple_power:p=0.5,a=0.1", "sandwich", "sandwich:form=evo,dim=32"]
OTHERS = ["type1", "type2:form=paper", "inv_nlnn"]


def fitted(spec: str, heads: int, length: int):
    torch.manual_seed(1)
    encoding = build(spec, heads, 64 * heads)
    return encoding, fit_fire(encoding, spec, length)


def check(encoding, fits, length: int, queries: list[int]) -> None:
    """Every fit against the encoding's own bias at these queries and all keys before them; the first has all heads."""
    assert fits[0].heads == tuple(range(1, encoding.heads + 1))
    k = torch.arange(length, dtype=torch.float64)[None]
    pos = Positions(k[:, queries], k, contiguous=False)
    past = k[0] <= pos.q[0, :, None]
    expected = block(encoding.form(pos), pos)
    for fit in fits:
        assert fit.fire.heads == len(fit.heads) and fit.threshold == length
        assert all(p.dtype == torch.float64 for p in fit.fire.parameters())
        got = block(fit.fire.form(pos), pos)
        largest = (got - expected[:, [h - 1 for h in fit.heads]])[..., past].abs().max().item()
        assert largest <= 1e-6
        assert largest <= fit.error + 1e-7  # what is printed is what is; sums in another order


@pytest.mark.parametrize("spec", THEOREM + OTHERS)
@pytest.mark.parametrize(("heads", "length"), [(8, 65), (3, 130)])
def test_every_pair_of_positions(spec, heads, length):
    check(*fitted(spec, heads, length), length, list(range(length)))


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


@pytest.mark.parametrize("length", [1, 2, 3, 4])
@pytest.mark.parametrize("spec", ["alibi", "kerple_log", "sandwich", "t5_bias", "window:window=4"])
def test_the_shortest_ranges(spec, length):
    encoding, fits = fitted(spec, 2, length)
    check(encoding, fits, length, list(range(length)))
    assert length > 2 or fits[0].hidden == 0


def test_sizes():
    """What docs/fire-theorem.md says."""
    sizes = {
        spec: [(fit.hidden, fit.c is None, len(fit.heads)) for fit in fitted(spec, 8, 2048)[1]]
        for spec in ("alibi", "kerple_log:p=2,a=0.3", "kerple_power", "sandwich", "t5_bias", "kerple_log")
    }
    assert sizes["alibi"] == [(0, True, 8)]
    assert sizes["kerple_log:p=2,a=0.3"] == [(0, False, 8)]
    assert sizes["kerple_power"] == sizes["sandwich"] == [(2047, True, 8)]
    assert sizes["t5_bias"] == [(47, True, 8)]
    assert sizes["kerple_log"] == [(2047, True, 8)] + [(0, False, 1)] * 8
    encoding, fits = fitted("kerple_log", 8, 2048)
    assert [fit.c for fit in fits[1:]] == encoding.a(torch.float64).tolist()
    assert [fit.heads for fit in fits[1:]] == [(h + 1,) for h in range(8)]


def test_beyond_the_range_fire_goes_its_own_way():
    fire = fitted("alibi", 2, 64)[1][0].fire
    i, j = (torch.tensor([[x]], dtype=torch.float64) for x in (256.0, 156.0))
    ratio = fire.bias(i, j).flatten() / build("alibi", 2, 128).profile(101)[:, -1]
    assert ratio.tolist() == pytest.approx([64 / 256] * 2, rel=1e-6)  # distances are scaled down to the range


@pytest.mark.parametrize("spec", ["kerple_log", "t5_bias"])
def test_the_command_writes_equation_4(spec, tmp_path, capsys):
    """f, ψ and the normaliser written out in numpy, with the parameters of the file, meet the encoding's bias."""
    out = tmp_path / "new" / "fit.json"
    assert main(["fire-fit", spec, "--length", "90", "--heads", "3", "--seed", "4", "--out", str(out)]) == 0
    said = capsys.readouterr().out
    written = json.loads(out.read_text())
    assert [written[k] for k in ("spec", "length", "heads", "seed")] == [spec, 90, 3, 4]
    torch.manual_seed(4)
    profile = build(spec, 3, 192).profile(90).numpy()
    for entry in written["modules"]:
        state = {name: np.array(value) for name, value in entry["state"].items()}

        def psi(x, c=entry["c"]):
            return x if c is None else np.log1p(c * x)

        heads = [h - 1 for h in entry["heads"]]
        for i in (0, 40, 89):
            x = (psi(i - np.arange(i + 1.0)) / (psi(np.maximum(entry["L"], i)) + 1e-6))[:, None]
            for layer in range(entry["hidden_layers"]):
                x = np.maximum(x @ state[f"mlp.{layer}.weight"].T + state[f"mlp.{layer}.bias"], 0)
            last = entry["hidden_layers"]
            b = x @ state[f"mlp.{last}.weight"].T + state[f"mlp.{last}.bias"]
            assert np.abs(b.T - profile[heads, : i + 1][:, ::-1]).max() <= 1e-6

        # and as docs/fire-theorem.md reads it
        fire = build(entry["fire"], len(heads), len(heads)).double()
        fire.load_state_dict({k: torch.tensor(v, dtype=torch.float64) for k, v in entry["state"].items()})
        assert np.abs(fire.profile(90).numpy() - profile[heads]).max() == pytest.approx(entry["error"], abs=1e-12)
        assert f"largest error: {entry['error']:.1e} nats in float64, {entry['error_float32']:.1e} in float32" in said
        if entry["c"] is not None:
            assert f"psi(x) = ln(c*x + 1), c = {entry['c']:.6g}; L = 90" in said
    assert "heads 1-3: one hidden layer of " in said and f"parameters: {out}" in said
    assert [p.name for p in out.parent.iterdir()] == ["fit.json"]  # nothing temporary is left


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        (["rope"], "'rope' is not a bias of the distance alone.*alibi, .*t5_bias"),
        (["sinusoidal"], "not a bias of the distance alone"),
        (["fire"], "'fire' is not a bias of the distance alone"),
        (["alibii"], "did you mean 'alibi'"),
        (["alibi", "--length", str(LONGEST + 1)], f"{LONGEST + 1} is out of range: choose 1 to {LONGEST}"),
        (["alibi", "--length", "0"], "--length"),
        (["alibi", "--length", "x"], "--length"),
        (["window:window=4"], "not finite at distance 4.*at most 4"),
        (["kerple_power:p=2,a=1e9"], "float64 does not hold.*shorter length"),
        (["alibi", "--out", "."], "--out . is a folder"),
        (["alibi", "--length", "9", "--out", "/dev/null/x.json"], "--out /dev/null/x.json: /dev/null is a file"),
        (["alibi", "--length", "9", "--figure", "fit.svg"], "--figure"),
        (["alibi", "--length", "9", "--figure", "."], "--figure"),
    ],
)
def test_refusals_are_one_line(argv, words, capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert main(["fire-fit", *argv]) == 2
    error = capsys.readouterr().err
    assert error.startswith("error: ") and error.count("\n") == 1 and re.search(words, error)
    assert not list(tmp_path.iterdir())
