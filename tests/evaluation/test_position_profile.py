"""Loss and attention by position: against whole matrices of weights, the reference losses, and the command."""

from __future__ import annotations

import csv

import pytest
import torch
from conftest import VOCABULARY, checkpoint_with, run_here
from measuring import make_sensitive, reference_losses, seen_by

from fairseq_rpe.core import UserError
from fairseq_rpe.data import folder as corpus_files
from fairseq_rpe.evaluation import empirical_receptive_field
from fairseq_rpe.evaluation.loading import LabelledCheckpoint, load_model, read_stream
from fairseq_rpe.evaluation.position_profile import PositionProfileProbe, check_training_lengths, position_buckets
from fairseq_rpe.evaluation.records import EvalOverrides
from fairseq_rpe.figures.position_profile import ProfileCurves, draw_position_profile

LENGTH, DISTANT = 23, 9


def test_buckets_have_each_position_once_and_end_at_powers_of_two():
    assert position_buckets(1) == [(1, 1)]
    assert position_buckets(20) == [(1, 1), (2, 2), (3, 4), (5, 8), (9, 16), (17, 20)]
    assert position_buckets(64)[-1] == (33, 64)


@pytest.mark.parametrize("rpe", ["alibi", "shaw:max_distance=5,values=true", "stick_breaking", "rope:null_logit=zero"])
def test_probe_measures_weights_and_outputs_of_every_query(task, rpe, monkeypatch):
    monkeypatch.setattr(empirical_receptive_field, "MAX_QUERIES", 4)  # rows in pieces
    model = make_sensitive(task, rpe)
    blocks = torch.randint(4, VOCABULARY, (3, LENGTH), generator=torch.Generator().manual_seed(2))
    outputs, inner = [], model.decoder.attend
    model.decoder.attend = lambda *args: outputs.append(inner(*args)) or outputs[-1]
    plain = model(blocks)[0]
    model.decoder.attend = inner
    with torch.no_grad(), PositionProfileProbe(model.decoder, LENGTH, DISTANT) as probe:
        assert torch.equal(model(blocks[:2])[0], plain[:2])
        model(blocks[2:])
    place = torch.arange(LENGTH)
    is_distant = place[:, None] - place >= DISTANT
    for layer, (weights, _), output in zip(probe.layers, seen_by(model, blocks, torch.float32), outputs, strict=True):
        norms, masses = layer.means(len(blocks))
        parts = ((weights * is_distant).sum(-1) / weights.sum(-1)).nan_to_num()  # 0 / 0 of a query that sees nothing
        assert torch.allclose(masses, parts.mean(0), atol=1e-6) and masses[:, DISTANT:].max() > 0
        assert torch.allclose(norms, output.double().norm(dim=-1).mean(0), rtol=1e-5)
        assert layer.rows == 3 * LENGTH


def test_command_writes_the_losses_of_its_blocks(state, corpus, tmp_path):
    checkpoints = []
    for name in ("nope", "alibi"):
        (tmp_path / name).mkdir()
        checkpoints.append(checkpoint_with(state, tmp_path / name, name))
    command = ("position-profile", *checkpoints, corpus, "--length", 40, "--blocks", 3, "--device", "cpu")
    done = run_here(*command, "--batch-size", 2, "--out", tmp_path / "out")
    assert "| alibi" in done.stdout and "33–40" in done.stdout and "3 of" in done.stdout
    assert sorted(path.suffix for path in (tmp_path / "out").iterdir()) == [".csv", ".csv", ".pdf", ".png"]
    rows = list(csv.DictReader((tmp_path / "out" / "position_losses.csv").open()))
    assert [int(row["tokens"]) for row in rows] == 2 * [3, 3, 6, 12, 24, 48, 24]
    # the blocks begin at evenly spaced multiples of 40
    total = corpus_files.count_tokens(corpus, "test")
    starts = [k * (total // 40) // 3 * 40 for k in range(3)]
    for checkpoint, found in zip(checkpoints, (rows[:7], rows[7:]), strict=True):
        model, task = load_model(checkpoint, EvalOverrides(device="cpu"), corpus)
        text = read_stream(corpus, "test", task.source_dictionary, total)[1:]
        nats = reference_losses(model, text, torch.arange(total) // 40 * 40)
        bits = torch.stack([nats[start : start + 40] for start in starts]) / torch.tensor(2.0).log()
        for row in found:
            part = bits[:, int(row["first"]) - 1 : int(row["last"])]
            assert float(row["loss_base2"]) == pytest.approx(part.mean().item(), rel=1e-5)
            spread = part.mean(1).std().item() / 3**0.5  # all blocks have as many tokens
            assert float(row["standard_error"]) == pytest.approx(spread, rel=1e-4)
    attention = list(csv.DictReader((tmp_path / "out" / "position_attention.csv").open()))
    assert len(attention) == 2 * 2 * 4 * 7
    # the models were trained on 32 tokens
    near, far = ([float(r["distant_attention"]) for r in attention if r["last"] == end] for end in ("32", "40"))
    assert not any(near) and all(far)


def test_a_checkpoint_without_a_training_length_is_refused(tmp_path):
    with pytest.raises(UserError, match="b.pt does not record its training length"):
        check_training_lengths(
            [LabelledCheckpoint(tmp_path / f"{name}.pt", name, n) for name, n in (("a", 8), ("b", 0))]
        )


def test_many_models_are_drawn_as_heat_maps():
    curve = ProfileCurves(64, [32, 64, 128], [3.0, 2.0, 4.0], [0.1, 0.1, 0.1], [1.2, 1.0, 0.9], [0.0, 0.0, 0.3])
    lines = draw_position_profile({"alibi": curve, "rope": curve})
    maps = draw_position_profile({f"m{k}": curve for k in range(13)})
    assert [len(axes.images) for axes in lines.axes] == [0, 0, 0]
    assert sum(len(axes.images) for axes in maps.axes) == 3
