"""What ``erf`` measures: receptive fields, and δ, what an output loses with its nearest keys alone; the command."""

from __future__ import annotations

import csv
from fractions import Fraction

import pytest
import torch
from conftest import VOCABULARY, make_model, run_here
from measuring import make_sensitive, refusal, seen_by
from torch.nn import functional as F

from fairseq_rpe.analysis.empirical_receptive_field import (
    log_spaced_distances,
    n_emp,
    quantised_curve,
    truncation_errors,
    window_sizes,
)
from fairseq_rpe.core import UserError
from fairseq_rpe.evaluation import empirical_receptive_field
from fairseq_rpe.evaluation.empirical_receptive_field import (
    AttentionMassProbe,
    LayerAttentionMass,
    ReceptiveFieldRequest,
    measure_bias_only,
    run_probe,
)
from fairseq_rpe.evaluation.loading import LabelledCheckpoint
from fairseq_rpe.evaluation.truncation_error import COLUMNS, TruncationErrorProbe

LENGTH, ROWS, EPSILONS = 23, 9, (0.5, 0.1, 0.01)


@pytest.fixture(scope="module")
def blocks() -> torch.Tensor:
    return torch.randint(4, VOCABULARY, (3, LENGTH), generator=torch.Generator().manual_seed(2))


def field_of(model, blocks) -> AttentionMassProbe:
    with torch.no_grad(), AttentionMassProbe(model.decoder, LENGTH, ROWS, EPSILONS) as field:
        for block in blocks.split(2):
            model(block)
    return field


SPECS = [
    "alibi",
    "sinusoidal",
    "rope",
    "window:window=5",
    "shaw:max_distance=5,values=true",
    "cope",
    "dape",
    "forgetting",
    "selective:base=alibi",
    "stick_breaking",
    "rope:local=6,null_logit=learned",
    "alibi:block=9,softcap=2",
]


@pytest.mark.parametrize("rpe", [*SPECS, "dual_chunk:chunk=6,max_position=9"])
def test_field_is_that_of_the_whole_softmax_matrix(task, blocks, rpe):
    model = make_sensitive(task, rpe)
    plain = model(blocks)[0]
    field = field_of(model, blocks)
    assert torch.equal(model(blocks)[0], plain)
    for layer, (weights, _) in zip(field.layers, seen_by(model, blocks, torch.float32), strict=True):
        if "null_logit" in rpe or "stick" in rpe:  # the weights of the keys add up to less than 1
            weights = weights / weights.sum(-1, keepdim=True)
        seen = [weights[:, :, i, : i + 1].flip(-1) for i in range(LENGTH - ROWS, LENGTH)]
        near = torch.stack([F.pad(row, (0, LENGTH - row.shape[-1])) for row in seen], 2)  # by distance
        assert layer.rows == len(blocks) * ROWS
        assert torch.allclose(layer.mass, near.mean((0, 2)), atol=1e-6)
        assert torch.allclose(layer.mass.sum(-1), torch.ones(4, dtype=torch.float64), atol=1e-6)
        for e, epsilon in enumerate(EPSILONS):
            enough = near.cumsum(-1) > (1 - epsilon) * near.sum(-1, keepdim=True)
            keys = (1 + (~enough).sum(-1)).transpose(0, 1).flatten(1).double()
            assert torch.allclose(layer.mean[e], keys.mean(-1), atol=0.04, rtol=0)
            assert torch.allclose(layer.median[e], keys.quantile(0.5, -1), atol=0.5, rtol=0)


def test_rows_in_pieces_give_the_same(task, blocks, monkeypatch):
    model = make_model(task, "type1")
    whole = field_of(model, blocks)
    monkeypatch.setattr(empirical_receptive_field, "MAX_QUERIES", 4)
    for a, b in zip(whole.layers, field_of(model, blocks).layers, strict=True):
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
    for bad in (0.0, 1.0, -0.1, float("nan"), Fraction(10**400)):
        with pytest.raises(UserError, match="is not between 0 and 1"):
            n_emp(d, [bad])


def test_quantised_golden_values():
    d = torch.arange(512, dtype=torch.float64)
    epsilons, part = quantised_curve(torch.stack([(-0.5 * d).exp(), 1 / (1 + d) ** 2]))
    assert len(epsilons) == 50 and epsilons[0] == 1 and epsilons[-1] == 0
    places = [0, 25, 40, 45, 48, 49]
    assert epsilons[places].tolist() == pytest.approx([1, 0.4898, 0.1837, 0.0816, 0.0204, 0], abs=5e-5)
    assert (part[:, places] * 512).tolist() == [[0, 2, 4, 6, 8, 512], [0, 1, 3, 7, 28, 512]]


def test_thinned_curves_keep_the_first_and_the_last_distance():
    assert log_spaced_distances(256) == list(range(256))
    far = log_spaced_distances(100_000)
    assert far[:65] == list(range(65)) and far[-1] == 99_999 and len(far) <= 257 and far == sorted(set(far))


def test_bias_alone_is_the_series_ended_at_each_row(task, monkeypatch):
    monkeypatch.setattr(empirical_receptive_field, "MAX_QUERIES", 4)
    model = make_model(task, "alibi")
    fields = measure_bias_only(model.decoder, LENGTH, ROWS, EPSILONS)
    for h in range(4):
        weights = (-(2.0 ** (-2 * h - 2)) * torch.arange(LENGTH, dtype=torch.float64)).exp()
        wanted = torch.stack([n_emp(weights[:m], EPSILONS) for m in range(LENGTH - ROWS + 1, LENGTH + 1)])
        assert torch.allclose(fields[0].mean[:, h], wanted.double().mean(0))
    assert len(fields) == len(model.decoder.layers)
    moved = make_model(task, "alibi", positions_eval="interpolate:ratio=0.5")
    for other in (make_model(task, "rope"), make_model(task, "sinusoidal"), moved):
        assert measure_bias_only(other.decoder, LENGTH, ROWS, EPSILONS) is None


def test_misuse_is_refused(task, blocks):
    model = make_model(task, "alibi")
    with (
        pytest.raises(UserError, match="24 rows cannot be measured"),
        AttentionMassProbe(model.decoder, LENGTH, 24, EPSILONS),
    ):
        pass
    with pytest.raises(UserError, match="longer than the 20 tokens of this probe"):
        with torch.no_grad(), AttentionMassProbe(model.decoder, 20, 5, EPSILONS):
            model(blocks)
    assert not isinstance(model.decoder.attend, AttentionMassProbe)
    with pytest.raises(UserError, match="no attention was measured"):
        _ = LayerAttentionMass(8, EPSILONS).mass


# δ(i, j)


@torch.no_grad()
def test_delta_with_shared_key_heads_is_that_of_repeated_ones(task, blocks):
    shared, repeated = make_model(task, "alibi", kv_heads=2), make_model(task, "alibi")
    state = shared.state_dict()
    for name in [name for name in state if "k_proj" in name or "v_proj" in name]:
        state[name] = state[name].unflatten(0, (2, -1)).repeat_interleave(2, 0).flatten(0, 1)
    repeated.load_state_dict(state)
    probes = []
    for model in (shared, repeated):
        with TruncationErrorProbe(model.decoder, LENGTH, ROWS) as probe:
            model(blocks)
        probes.append(probe)
    for a, b in zip(*(probe.layers for probe in probes), strict=True):
        torch.testing.assert_close(a.statistics, b.statistics, atol=1e-6, rtol=1e-5)


def test_delta_needs_means_of_values(task, blocks):
    model = make_model(task, "alibi:null_logit=zero")
    with pytest.raises(UserError, match="drop --delta"):
        with torch.no_grad(), TruncationErrorProbe(model.decoder, LENGTH, ROWS):
            model(blocks)


@pytest.mark.parametrize("rpe", ["alibi", "rope", "sinusoidal", "window:window=5"])
def test_delta_is_the_definition(task, blocks, rpe):
    """Outputs of each query over all and over its nearest j keys."""
    model = make_sensitive(task, rpe)
    plain = model(blocks)[0]
    with torch.no_grad(), TruncationErrorProbe(model.decoder, LENGTH, ROWS) as found:
        model(blocks)
    assert torch.equal(model(blocks)[0], plain)
    places = torch.arange(LENGTH)
    distance = places[-ROWS:, None] - places
    for layer, (weights, v) in zip(found.layers, seen_by(model, blocks, torch.float64), strict=True):
        assert layer.rows == 3 * ROWS and layer.sizes == [1, 2, 3, 4, 6, 8, 12, 16]
        p, longest = weights[:, :, -ROWS:], v.norm(dim=-1).cummax(-1)[0][..., -ROWS:]
        for j, *wanted in zip(layer.sizes, *layer.statistics[:4], strict=True):
            near = p * ((distance >= 0) & (distance < j))
            delta = (p @ v - near @ v / near.sum(-1, keepdim=True)).norm(dim=-1)
            bound = 2 * longest * (1 - near.sum(-1) / p.sum(-1))
            expected = [delta.amax((0, 2)), delta.mean((0, 2)), bound.amax((0, 2)), bound.mean((0, 2))]
            assert torch.allclose(torch.stack(wanted), torch.stack(expected), atol=1e-9)
        assert (layer.statistics[4] <= 1).all()


def test_blocks_and_pieces_of_rows_add_up(task, blocks, monkeypatch):
    model = make_model(task, "type1")

    def of(*parts):
        with torch.no_grad(), TruncationErrorProbe(model.decoder, LENGTH, ROWS) as found:
            for part in parts:
                model(part)
        return torch.stack([layer.statistics for layer in found.layers])

    two, one, both = of(blocks[:2]), of(blocks[2:]), of(blocks[:2], blocks[2:])
    most, means = [0, 2, 4], [1, 3]
    assert torch.equal(both[:, most], torch.maximum(two, one)[:, most])
    assert torch.allclose(both[:, means], (2 * two + one)[:, means] / 3)
    monkeypatch.setattr(empirical_receptive_field, "MAX_QUERIES", 4)
    assert torch.allclose(of(blocks[:2], blocks[2:]), both, rtol=1e-9)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize("spread", [0.1, 3.0, 40.0])
def test_never_above_the_bound(dtype, spread):
    """For every query and j, of scores that are flat or that one key dominates, and keys that are not to be seen."""
    generator = torch.Generator().manual_seed(1)
    score = spread * torch.randn(2, 3, 40, 64, generator=generator, dtype=dtype)
    hidden = torch.rand(2, 3, 40, 64, generator=generator) < 0.2
    ahead = torch.arange(64) - torch.arange(24, 64)[:, None]
    score = score.masked_fill(hidden & (ahead != 0) | (ahead > 0), -torch.inf)
    v = torch.randn(2, 3, 64, 5, generator=generator, dtype=dtype)
    tight = []
    for delta, bound in truncation_errors(score, v, list(range(1, 66))):
        assert delta.isfinite().all() and bound.isfinite().all()
        assert (delta <= bound * (1 + 1e-5)).all()
        tight.append((delta / bound).nan_to_num().max().item())
    assert max(tight) > 0.3  # not a bound that anything meets
    assert delta.eq(0).all() and bound.eq(0).all()  # all keys


def test_the_bound_is_reached_by_opposite_values():
    """Half of the weight is on a far key whose value is the negative of the near one's."""
    score = torch.tensor([[[[0.0, 0.0]]]], dtype=torch.float64)
    [(delta, bound)] = truncation_errors(score, torch.tensor([[[[-2.0], [2.0]]]], dtype=torch.float64), [1])
    assert delta.item() == pytest.approx(2.0) and bound.item() == pytest.approx(2.0)


# The command


def table(path) -> list[dict[str, str]]:
    return list(csv.DictReader(path.read_text().splitlines()))


def test_command_writes_table_curve_and_figure(trained, corpus, tmp_path, request):
    command = ("erf", trained, corpus, "--length", 20, "--rows", 5, "--blocks", 7, "--out", tmp_path, "--device", "cpu")
    shown = run_here(*map(str, command), "--quantised", "--batch-size", "3").stdout
    names = ["erf.csv", "erf.pdf", "erf.png", "erf_curve.csv", "erf_quantised.csv"]
    assert sorted(p.name for p in tmp_path.iterdir()) == [*names, "erf_trf.csv", "erf_trf.pdf", "erf_trf.png"]
    assert "| alibi      | bias alone |" in shown and "Blocks of 20 tokens, 7 of" in shown
    rows = table(tmp_path / "erf.csv")
    assert len(rows) == 2 * 4 * 3 and {(r["length"], r["rows"], r["blocks"]) for r in rows} == {("20", "5", "7")}
    for row in rows:
        assert 1 <= float(row["n_emp_mean"]) <= 20
        assert float(row["n_emp_mean"]) == pytest.approx(float(row["n_bias_mean"]), rel=0.25, abs=1)
    ends = [r for r in table(tmp_path / "erf_curve.csv") if r["distance"] == "19"]
    assert len(ends) == 8 and all(float(r["within"]) == pytest.approx(1, abs=1e-6) for r in ends)
    assert len(table(tmp_path / "erf_quantised.csv")) == 8 * 50
    # one curve for the checkpoint: measured, and of its bias, whose mean over layers and heads is known
    pair = table(tmp_path / "erf_trf.csv")
    slopes = torch.tensor([2.0**-2, 2.0**-4, 2.0**-6, 2.0**-8], dtype=torch.float64)[:, None]
    expected = quantised_curve((-slopes * torch.arange(20)).softmax(-1).mean(0))[1]
    assert [float(row["trf_over_length"]) for row in pair] == pytest.approx(expected.tolist())
    mass = [float(row["erf_over_length"]) for row in pair]
    assert mass == pytest.approx(expected.tolist(), abs=0.3) and (mass[0], mass[-1]) == (0, 1)
    request.getfixturevalue("undrawn")
    run_here(*map(str, command))
    for a, b in zip(rows, table(tmp_path / "erf.csv"), strict=True):  # batches change nothing
        assert float(a["n_emp_mean"]) == pytest.approx(float(b["n_emp_mean"]), abs=0.05)


def test_delta_of_trained_models_stays_below_too(trained, corpus, tmp_path):
    command = ("erf", trained, corpus, "--delta", "--length", 20, "--rows", 5, "--blocks", 6, "--device", "cpu")
    shown = run_here(*map(str, command), "--out", tmp_path).stdout
    assert "| alibi      | 0" in shown and "the last 5 queries" in shown and "j = 16" in shown
    assert sorted(p.name for p in tmp_path.iterdir()) == ["delta.csv", "delta.pdf", "delta.png"]
    rows = table(tmp_path / "delta.csv")
    assert len(rows) == 2 * 4 * len(window_sizes(20)) and {r["length"] for r in rows} == {"20"}
    for row in rows:
        delta, mean, bound, bound_mean, part = (float(row[name]) for name in COLUMNS)
        assert 0 < mean <= delta <= bound and mean <= bound_mean <= bound and 0 < part <= 1
    first, last = (float(next(r for r in rows if r["keys"] == keys)["bound_max"]) for keys in ("1", "16"))
    assert last < first


@pytest.mark.parametrize(
    ("flags", "reason"),
    [("--length 200", "64 blocks of 200: use more text, a smaller --length or fewer"), ("--split nope", "nope")],
)
def test_bad_input_is_one_line(trained, corpus, tmp_path, flags, reason):
    assert reason in refusal("erf", trained, corpus, *flags.split(), "--out", tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_rows_that_were_not_measured_are_not_left_out_silently(trained, corpus):
    request, subject = (
        ReceptiveFieldRequest(data=corpus, blocks=2, device="cpu"),
        LabelledCheckpoint(trained, "alibi", 32),
    )
    with pytest.raises(UserError, match=f"{trained}: 10 of 12 rows were measured: report this"):
        run_probe(request, subject, 20, lambda decoder: AttentionMassProbe(decoder, 20, 5, EPSILONS), rows=6)
