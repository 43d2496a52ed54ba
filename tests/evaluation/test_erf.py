"""The empirical receptive field: against the reference's whole matrix, in pieces, quantised; the command."""

from __future__ import annotations

import csv
from dataclasses import replace

import pytest
import torch
from conftest import VOCABULARY, make_model, run_here
from measuring import refusal

from fairseq_rpe.analysis.receptive_field import n_emp, quantised, thinned
from fairseq_rpe.attention.reference import reference
from fairseq_rpe.core import UserError
from fairseq_rpe.evaluation import probe
from fairseq_rpe.evaluation.probe import Field, LayerField, bias_alone

LENGTH, ROWS, EPSILONS = 23, 9, (0.5, 0.1, 0.01)


@pytest.fixture(scope="module")
def blocks() -> torch.Tensor:
    return torch.randint(4, VOCABULARY, (3, LENGTH), generator=torch.Generator().manual_seed(2))


def field_of(model, blocks, rows=ROWS) -> Field:
    with torch.no_grad(), Field(model.decoder, LENGTH, rows, EPSILONS) as field:
        for block in blocks.split(2):
            model(block)
    return field


@torch.no_grad()
def matrices(model, blocks) -> list[torch.Tensor]:
    """Each layer's (B, H, n, n) weights: what the reference returns for values that are unit vectors."""
    found, inner = [], model.decoder.attend

    def attend(q, k, v, plan, dropout=0.0):
        units = torch.eye(k.shape[2]).expand(*k.shape[:3], k.shape[2])
        found.append(reference(q, k, units, replace(plan, reading=None)).double())
        return reference(q, k, v, plan)

    model.decoder.attend = attend
    model(blocks)
    model.decoder.attend = inner
    return found


SPECS = ["alibi", "sinusoidal", "rope", "window:window=5", "shaw:clip=5,values=true", "cope", "dape", "forgetting"]


@pytest.mark.parametrize("rpe", [*SPECS, "dual_chunk:chunk=6,cap=9"])
def test_field_is_that_of_the_whole_softmax_matrix(task, blocks, rpe):
    model = make_model(task, rpe)
    with torch.no_grad():
        for p in model.decoder.layers.parameters():
            p.mul_(3)  # so that the contents of the text matter
    plain = model(blocks)[0]
    field = field_of(model, blocks)
    assert torch.equal(model(blocks)[0], plain)
    for layer, weights in zip(field.layers, matrices(model, blocks), strict=True):
        heads = weights.shape[1]
        mass = torch.zeros(heads, LENGTH, dtype=torch.float64)
        keys: dict[tuple[int, int], list[int]] = {}
        for b in range(len(blocks)):
            for h in range(heads):
                for i in range(LENGTH - ROWS, LENGTH):
                    row = weights[b, h, i, : i + 1].flip(0)
                    mass[h, : i + 1] += row / (len(blocks) * ROWS)
                    for e, epsilon in enumerate(EPSILONS):
                        j = 1
                        while not row[:j].sum() > (1 - epsilon) * row.sum():
                            j += 1
                        keys.setdefault((e, h), []).append(j)
        assert layer.rows == len(blocks) * ROWS
        assert torch.allclose(layer.mass, mass, atol=1e-6)
        assert torch.allclose(layer.mass.sum(-1), torch.ones(heads, dtype=torch.float64), atol=1e-6)
        for (e, h), values in keys.items():
            assert float(layer.mean[e, h]) == pytest.approx(sum(values) / len(values), abs=0.04)
            middle = torch.tensor(values, dtype=torch.float64).quantile(0.5)
            assert float(layer.median[e, h]) == pytest.approx(float(middle), abs=0.5)


@pytest.mark.parametrize("chunk", [1, 4, 9])
def test_rows_in_pieces_give_the_same(task, blocks, monkeypatch, chunk):
    model = make_model(task, "type1")
    whole = field_of(model, blocks)
    monkeypatch.setattr(probe, "ROWS", chunk)
    with torch.no_grad(), Field(model.decoder, LENGTH, ROWS, EPSILONS) as piece:
        model(blocks)
    for a, b in zip(whole.layers, piece.layers, strict=True):
        assert a.rows == b.rows and torch.allclose(a.mass, b.mass, atol=1e-7)
        assert torch.allclose(a.mean, b.mean, atol=0.04)


def test_n_emp_by_hand_and_against_the_closed_form():
    assert n_emp(torch.tensor([0.5, 0.25, 0.25]), [0.5, 0.4, 0.2]).tolist() == [2, 2, 3]
    assert n_emp(torch.tensor([1.0, 0.0]), [0.99, 0.01]).tolist() == [1, 1]
    d = torch.arange(200_000, dtype=torch.float64)
    # floor(ln(1/ε)/k) + 1 for alibi; type1 and type2 as the paper prints them
    assert n_emp((-0.5 * d).exp(), EPSILONS).tolist() == [2, 5, 10]
    assert n_emp((-(2.0**-8) * d).exp(), EPSILONS).tolist() == [178, 590, 1179]
    assert n_emp(1 / (1 + d) ** 2, EPSILONS).tolist() == [1, 6, 61]
    assert n_emp((-((1 + d).log() ** 2)).exp(), EPSILONS).tolist() == [2, 4, 9]
    for bad in (0.0, 1.0, -0.1, float("nan")):
        with pytest.raises(UserError, match="is not between 0 and 1"):
            n_emp(d, [bad])


def test_quantised_golden_values():
    d = torch.arange(512, dtype=torch.float64)
    epsilons, part = quantised(torch.stack([(-0.5 * d).exp(), 1 / (1 + d) ** 2]))
    assert len(epsilons) == 50 and epsilons[0] == 1 and epsilons[-1] == 0
    places = [0, 25, 40, 45, 48, 49]  # ε = 1, 0.4898, 0.1837, 0.0816, 0.0204, 0
    assert epsilons[places].tolist() == pytest.approx([1, 0.4898, 0.1837, 0.0816, 0.0204, 0], abs=5e-5)
    assert (part[:, places] * 512).tolist() == [[0, 2, 4, 6, 8, 512], [0, 1, 3, 7, 28, 512]]


def test_thinned_curves_keep_the_first_and_the_last_distance():
    assert thinned(256) == list(range(256))
    far = thinned(100_000)
    assert far[:65] == list(range(65)) and far[-1] == 99_999 and len(far) <= 257 and far == sorted(set(far))


def test_bias_alone_is_the_series_ended_at_each_row(task, monkeypatch):
    monkeypatch.setattr(probe, "ROWS", 4)
    model = make_model(task, "alibi")
    fields = bias_alone(model.decoder, LENGTH, ROWS, EPSILONS)
    slopes = [2.0 ** (-8 * h / 4) for h in (1, 2, 3, 4)]
    for h, slope in enumerate(slopes):
        weights = (-slope * torch.arange(LENGTH, dtype=torch.float64)).exp()
        wanted = torch.stack([n_emp(weights[:m], EPSILONS) for m in range(LENGTH - ROWS + 1, LENGTH + 1)])
        assert torch.allclose(fields[0].mean[:, h], wanted.double().mean(0))
    assert len(fields) == len(model.decoder.layers)
    assert bias_alone(make_model(task, "rope").decoder, LENGTH, ROWS, EPSILONS) is None
    assert bias_alone(make_model(task, "sinusoidal").decoder, LENGTH, ROWS, EPSILONS) is None
    moved = make_model(task, "alibi", positions_eval="interpolate:ratio=0.5")
    assert bias_alone(moved.decoder, LENGTH, ROWS, EPSILONS) is None


def test_misuse_is_refused(task, blocks):
    model = make_model(task, "alibi")
    with pytest.raises(UserError, match="24 rows cannot be measured"), Field(model.decoder, LENGTH, 24, EPSILONS):
        pass
    with pytest.raises(UserError, match="does not fit a measurement at 20"):
        with torch.no_grad(), Field(model.decoder, 20, 5, EPSILONS):
            model(blocks)
    assert not isinstance(model.decoder.attend, Field)
    with pytest.raises(UserError, match="no attention was measured"):
        _ = LayerField(8, EPSILONS).mass


# The command


def test_command_writes_table_curve_and_figure(trained, corpus, tmp_path):
    command = ("erf", trained, corpus, "--length", 20, "--rows", 5, "--out", tmp_path, "--device", "cpu")
    shown = run_here(*map(str, command), "--quantised", "--batch-size", "7").stdout
    names = ["erf.csv", "erf.pdf", "erf.png", "erf_curve.csv", "erf_quantised.csv"]
    assert sorted(p.name for p in tmp_path.iterdir()) == [*names, "erf_trf.csv", "erf_trf.pdf", "erf_trf.png"]
    assert "| alibi      | bias alone |" in shown and "Blocks of 20 tokens, 64 of" in shown

    def table(name: str) -> list[dict[str, str]]:
        return list(csv.DictReader((tmp_path / name).read_text().splitlines()))

    rows = table("erf.csv")
    assert len(rows) == 2 * 4 * 3 and {(r["length"], r["rows"], r["blocks"]) for r in rows} == {("20", "5", "64")}
    for row in rows:
        assert 1 <= float(row["n_emp_mean"]) <= 20
        assert float(row["n_emp_mean"]) == pytest.approx(float(row["n_bias_mean"]), rel=0.25, abs=1)
    ends = [r for r in table("erf_curve.csv") if r["distance"] == "19"]
    assert len(ends) == 8 and all(float(r["within"]) == pytest.approx(1, abs=1e-6) for r in ends)
    assert len(table("erf_quantised.csv")) == 8 * 50
    # one curve for the checkpoint: measured, and of its bias, whose mean over layers and heads is known
    pair = table("erf_trf.csv")
    slopes = torch.tensor([2.0**-2, 2.0**-4, 2.0**-6, 2.0**-8], dtype=torch.float64)[:, None]
    expected = quantised((-slopes * torch.arange(20)).softmax(-1).mean(0))[1]
    assert [float(row["trf_over_length"]) for row in pair] == pytest.approx(expected.tolist())
    mass = [float(row["erf_over_length"]) for row in pair]
    assert mass == pytest.approx(expected.tolist(), abs=0.3) and (mass[0], mass[-1]) == (0, 1)
    # batches change nothing, and there may be fewer blocks where that is said
    assert "3 of" in run_here(*map(str, command), "--blocks", "3", "--batch-size", "2").stdout
    few = table("erf.csv")
    run_here(*map(str, command), "--blocks", "3")
    for a, b in zip(few, table("erf.csv"), strict=True):
        assert float(a["n_emp_mean"]) == pytest.approx(float(b["n_emp_mean"]), abs=0.05)


@pytest.mark.parametrize(
    ("flags", "reason"),
    [
        ("--length 100000", "less than 64 blocks of 100000: use more text, a smaller --length or fewer --blocks"),
        ("--length 200", "less than 64 blocks of 200"),
        ("--subset nope", "nope"),
    ],
)
def test_bad_input_is_one_line(trained, corpus, tmp_path, flags, reason):
    assert reason in refusal("erf", trained, corpus, *flags.split(), "--out", tmp_path / "out")
    assert not (tmp_path / "out").exists()
