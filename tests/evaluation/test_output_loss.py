"""δ(i, j), what an output loses with its nearest keys alone: against the definition, below its bound; the command."""

from __future__ import annotations

import csv

import pytest
import torch
from conftest import VOCABULARY, make_model, run_here
from measuring import refusal

from fairseq_rpe.analysis.truncation import losses, window_sizes
from fairseq_rpe.attention.reference import reference
from fairseq_rpe.evaluation import probe
from fairseq_rpe.evaluation.output_loss import COLUMNS, Truncation

LENGTH, ROWS = 23, 9


@pytest.fixture(scope="module")
def blocks() -> torch.Tensor:
    return torch.randint(4, VOCABULARY, (3, LENGTH), generator=torch.Generator().manual_seed(2))


@torch.no_grad()
def seen_by(model, blocks):
    """Of each layer the weights (B, H, n, n) that the reference uses, and its values (B, H, n, D), in float64."""
    found, inner = [], model.decoder.attend

    def attend(q, k, v, plan, dropout=0.0):
        eye = torch.eye(k.shape[2], dtype=torch.float64).expand(*k.shape[:3], k.shape[2])
        found.append((reference(q.double(), k.double(), eye, plan), v.double()))
        return inner(q, k, v, plan)

    model.decoder.attend = attend
    model(blocks)
    model.decoder.attend = inner
    return found


@pytest.mark.parametrize("rpe", ["alibi", "rope", "sinusoidal", "window:window=5"])
def test_it_is_the_definition(task, blocks, rpe):
    """Outputs of each query over all and over its nearest j keys, summed one by one."""
    model = make_model(task, rpe)
    with torch.no_grad():
        for weight in model.decoder.layers.parameters():
            weight.mul_(3)  # so that the text matters
    plain = model(blocks)[0]
    with torch.no_grad(), Truncation(model.decoder, LENGTH, ROWS) as found:
        model(blocks)
    assert torch.equal(model(blocks)[0], plain)
    for layer, (weights, v) in zip(found.layers, seen_by(model, blocks), strict=True):
        assert layer.rows == 3 * ROWS and layer.sizes == [1, 2, 3, 4, 6, 8, 12, 16]
        delta = torch.zeros(3 * ROWS, len(layer.sizes), 4, dtype=torch.float64)
        bound = torch.zeros_like(delta)
        for row, (b, i) in enumerate((b, i) for b in range(3) for i in range(LENGTH - ROWS, LENGTH)):
            for place, j in enumerate(layer.sizes):
                near = slice(max(0, i - j + 1), i + 1)
                for h in range(4):
                    p = weights[b, h, i]
                    part = p[near] @ v[b, h, near] / p[near].sum()
                    delta[row, place, h] = (p @ v[b, h] - part).norm()
                    longest = v[b, h, : i + 1].norm(dim=-1).max()
                    bound[row, place, h] = 2 * longest * (1 - p[near].sum() / p.sum())
        wanted = [delta.amax(0), delta.mean(0), bound.amax(0), bound.mean(0)]
        assert torch.allclose(layer.table[:4], torch.stack(wanted), atol=1e-9)
        assert (layer.table[4] <= 1).all()


def test_blocks_and_pieces_of_rows_add_up(task, blocks, monkeypatch):
    model = make_model(task, "type1")

    def of(*parts):
        with torch.no_grad(), Truncation(model.decoder, LENGTH, ROWS) as found:
            for part in parts:
                model(part)
        return torch.stack([layer.table for layer in found.layers])

    two, one, both = of(blocks[:2]), of(blocks[2:]), of(blocks[:2], blocks[2:])
    most, means = [0, 2, 4], [1, 3]
    assert torch.equal(both[:, most], torch.maximum(two, one)[:, most])
    assert torch.allclose(both[:, means], (2 * two + one)[:, means] / 3)
    monkeypatch.setattr(probe, "ROWS", 4)
    assert torch.allclose(of(blocks[:2], blocks[2:]), both, rtol=1e-9)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize("spread", [0.1, 3.0, 40.0])
def test_never_above_the_bound(dtype, spread):
    """For every query and j, of scores that are flat or that one key dominates, and keys that are not to be seen."""
    generator = torch.Generator().manual_seed(1)
    score = spread * torch.randn(2, 3, 40, 64, generator=generator, dtype=dtype)
    hidden = torch.rand(2, 3, 40, 64, generator=generator) < 0.2
    diagonal = torch.arange(64) == torch.arange(24, 64)[:, None]
    future = torch.arange(64) > torch.arange(24, 64)[:, None]
    score = score.masked_fill(hidden & ~diagonal | future, -torch.inf)
    v = torch.randn(2, 3, 64, 5, generator=generator, dtype=dtype)
    sizes = list(range(1, 66))
    tight = []
    for delta, bound in losses(score, v, sizes):
        assert delta.isfinite().all() and bound.isfinite().all()
        assert (delta <= bound * (1 + 1e-5)).all()
        tight.append((delta / bound).nan_to_num().max().item())
    assert max(tight) > 0.3  # not a bound that anything meets
    assert delta.eq(0).all() and bound.eq(0).all()  # all keys


def test_the_bound_is_reached_by_opposite_values():
    """Half of the weight is on a far key whose value is the negative of the near one's."""
    score = torch.tensor([[[[0.0, 0.0]]]], dtype=torch.float64)
    [(delta, bound)] = losses(score, torch.tensor([[[[-2.0], [2.0]]]], dtype=torch.float64), [1])
    assert delta.item() == pytest.approx(2.0) and bound.item() == pytest.approx(2.0)


def test_trained_models_stay_below_too(trained, corpus, tmp_path):
    command = ("erf", trained, corpus, "--delta", "--length", 20, "--rows", 5, "--blocks", 6, "--device", "cpu")
    shown = run_here(*map(str, command), "--out", tmp_path).stdout
    assert "| alibi      | 0" in shown and "the last 5 queries" in shown and "j = 16" in shown
    assert sorted(p.name for p in tmp_path.iterdir()) == ["delta.csv", "delta.pdf", "delta.png"]
    rows = list(csv.DictReader(open(tmp_path / "delta.csv")))
    assert len(rows) == 2 * 4 * len(window_sizes(20)) and {r["length"] for r in rows} == {"20"}
    for row in rows:
        delta, mean, bound, bound_mean, part = (float(row[name]) for name in COLUMNS)
        assert 0 < mean <= delta <= bound and mean <= bound_mean <= bound and 0 < part <= 1
    first, last = (float(next(r for r in rows if r["keys"] == keys)["bound_max"]) for keys in ("1", "16"))
    assert last < first


def test_a_wrong_out_is_one_line(trained, corpus, tmp_path):
    (tmp_path / "file").write_text("")
    refusal("erf", trained, corpus, "--delta", "--length", 8, "--out", tmp_path / "file")
