"""FIRE's own constructions for its Theorem 3.1: each against the encoding, its parameters by hand, its cautions."""

from __future__ import annotations

import json

import numpy as np
import pytest
import torch

from fairseq_rpe.analysis.fire_fit import fit_fire
from fairseq_rpe.analysis.fire_paper import paper_fits
from fairseq_rpe.cli.main import main
from fairseq_rpe.encodings import build
from fairseq_rpe.figures.theorem import constructions

SIGMAS = {
    "x": lambda x, p: x,
    "x^p": lambda x, p: x**p,
    "cos(x)": lambda x, p: np.cos(x),
    "1 where x >= 0": lambda x, p: np.where(x >= 0, 1.0, 0.0),
}
PAPER = dict.fromkeys(("alibi", "kerple_log", "kerple_log:p=2,a=0.3"), "x")
PAPER |= dict.fromkeys(("kerple_power", "kerple_power:p=2,a=0.1"), "x^p")
PAPER |= dict.fromkeys(("sandwich", "sandwich:form=evo,dim=32"), "cos(x)")
PAPER |= dict.fromkeys(
    ("t5_bias:init_std=1", "t5_bias:buckets=64,init_std=1", "t5_bias:variant=clipped,init_std=1"), "1 where x >= 0"
)


def made(spec, heads, length):
    torch.manual_seed(1)
    encoding = build(spec, heads, 64 * heads)
    return encoding, paper_fits(encoding, spec, length)


@pytest.mark.parametrize("spec", PAPER)
@pytest.mark.parametrize(("heads", "length"), [(8, 600), (3, 65), (2, 1), (2, 2)])
def test_equation_4_by_hand_meets_the_bias(spec, heads, length):
    """Written out in numpy for every pair of positions, of what ``as_dict`` has."""
    encoding, fits = made(spec, heads, length)
    target = encoding.profile(length).numpy()
    assert sum((fit.heads for fit in fits), ()) == tuple(range(1, heads + 1))
    for fit in fits:
        assert fit.sigma == PAPER[spec] and fit.error <= 1e-9
        of = {key: np.array(value) for key, value in fit.as_dict().items() if isinstance(value, list)}

        def psi(x, c=fit.c):
            return x if c is None else np.log1p(c * x)

        for i in {0, length // 2, length - 1}:
            distance = i - np.arange(i + 1.0)
            u = psi(distance) / psi(np.maximum(float(fit.length), i))
            hidden = SIGMAS[fit.sigma](np.outer(of["weight"], u) + of["shift"][:, None], of["power"][:, None])
            bias = of["output_weight"] @ hidden + of["output_bias"][:, None]
            assert np.abs(bias - target[[h - 1 for h in fit.heads]][:, distance.astype(int)]).max() <= 1e-9


def test_numbers_of_units():
    assert [len(made(spec, 8, 2048)[1]) for spec in ("alibi", "kerple_log", "kerple_power")] == [1, 8, 1]
    assert [len(fit.weight) for spec in ("t5_bias", "sandwich") for fit in made(spec, 8, 2048)[1]] == [31, 64]
    assert made("type1", 8, 64)[1] == [] and made("window:window=100", 8, 64)[1] == []


def test_steps_on_the_edges_fail_in_the_listing_only():
    """A bucket too late: its first distance has the bias of the bucket before."""
    encoding, [fit] = made("t5_bias:init_std=1", 4, 128)
    target = encoding.profile(128)
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
    [fit] = made("sandwich", 8, 512)[1]
    d = torch.arange(512, dtype=torch.float64)
    assert fit.as_printed == pytest.approx(((d / 10000).cos() - d.cos()).abs().max().item())
    assert made("sandwich:form=evo", 8, 512)[1][0].as_printed is None


def test_the_figure_shows_both_and_their_errors():
    torch.manual_seed(1)
    encoding = build("t5_bias", 4, 256)
    fits, papers = fit_fire(encoding, "t5_bias", 40), paper_fits(encoding, "t5_bias", 40)
    left, right = constructions("t5_bias", encoding.profile(40), fits[0], papers).axes
    target, drawn = encoding.profile(40), [line.get_ydata() for line in left.lines]
    assert len(drawn) == 6
    for y, head in zip(drawn, (0, 3) * 3, strict=True):
        assert y.tolist() == pytest.approx(target[head].tolist(), abs=1e-12)
    errors = {line.get_label(): max(line.get_ydata()) for line in right.lines}
    names = ("ours, ReLUs", "the paper's, σ(x) = 1 where x >= 0")
    assert list(errors) == [f"{name}, {digits}" for name in names for digits in ("float64", "float32")]
    assert errors["ours, ReLUs, float32"] == pytest.approx(fits[0].error_float32)


def test_the_command_prints_draws_and_writes_both(tmp_path, capsys):
    out, figure = tmp_path / "fit.json", tmp_path / "fit.png"
    flags = ["--length", "50", "--heads", "2", "--out", str(out), "--figure", str(figure)]
    assert main(["fire-fit", "sandwich", *flags]) == 0
    said = capsys.readouterr().out
    assert "heads 1-2: one hidden layer of 49 ReLUs" in said
    assert "The paper's own, Appendix A.2:\n\nheads 1-2: 64 units of sigma(x) = cos(x)" in said
    assert "with frequencies from k = 1, as printed: " in said and f"figure: {figure}" in said
    [written] = json.loads(out.read_text())["paper"]
    assert written["sigma"] == "cos(x)" and len(written["weight"]) == 64 and written["error"] < 1e-12
    assert figure.read_bytes().startswith(b"\x89PNG")
    assert main(["fire-fit", "type1", "--length", "20"]) == 0
    assert "The paper has no construction of it." in capsys.readouterr().out
