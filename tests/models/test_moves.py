"""Position transforms inside the model: backends, decoding, draws, refusals, and the evaluation flags."""

from __future__ import annotations

import re

import pytest
import torch
from conftest import assert_equal_models, make_model
from refusal import refused
from test_fairseq_cli import all_scored, evaluate, evaluation, refusal, train
from test_model import PAD, logits, tokens

from fairseq_rpe.core import Positions
from fairseq_rpe.positions import names
from fairseq_rpe.positions.position_transforms import PositionTransforms

TRANSFORMS = {
    "identity": "identity",
    "offset": "offset:tokens=3",
    "interpolate": "interpolate:ratio=1/3",
    "warp": "warp:head=0.4,tail=0.4,alpha=1/6",
    "randomized": "randomized:max_position=200",
    "stretch": "stretch:times=5",
    "pose": "pose:target=300",
    "random_padding": "random_padding:max_position=300",
    "shape": "shape:max_position=50",
    "cape": "cape",
}


def test_every_transform_is_here():
    assert set(names()) == set(TRANSFORMS)


@pytest.mark.parametrize(
    ("spec", "name"),
    [
        *(("rope", name) for name in TRANSFORMS if name != "identity"),
        *((spec, name) for spec in ("xpos", "kerple_log", "fire", "sinusoidal") for name in ("warp", "pose")),
    ],
)
def test_backends_agree_under_every_transform(task, name, spec):
    x = tokens(3, 45)
    x[1, -6:] = PAD
    results = []
    for backend in ("reference", "sdpa"):
        model = make_model(task, spec, attention_backend=backend, positions_train=TRANSFORMS[name]).train()
        model.set_num_updates(5)
        out = logits(model, x)
        out[x.ne(PAD)].square().mean().backward()
        results.append((out[x.ne(PAD)].detach(), {k: p.grad for k, p in model.named_parameters()}))
    torch.testing.assert_close(results[0][0], results[1][0], rtol=1e-4, atol=2e-5)
    for key, grad in results[0][1].items():
        torch.testing.assert_close(results[1][1][key], grad, rtol=1e-3, atol=2e-6)


def test_interpolation_divides_the_angle(task):
    """rope with every position divided by four is rope:scaling=linear,factor=4."""
    x = tokens(2, 30)
    moved, scaled = (
        make_model(task, "rope", positions_eval="interpolate:ratio=1/4"),
        make_model(task, "rope:scaling=linear,factor=4"),
    )
    torch.testing.assert_close(logits(moved, x), logits(scaled, x), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("moved_by", ["interpolate:train=10", "randomized:max_position=500"])
def test_padding_and_other_rows_change_nothing(task, moved_by):
    """Ratios follow from a row's length, draws from its tokens: alone, beside another row, or padded at either end."""
    model = make_model(task, "rope", positions_eval=moved_by)
    row, other = tokens(1, 15), tokens(1, 19, seed=1)
    pads = torch.full((1, 4), PAD)
    alone = logits(model, row)[0]
    for padded, real in ((torch.cat([row, pads], 1), slice(0, 15)), (torch.cat([pads, row], 1), slice(4, 19))):
        got = logits(model, torch.cat([padded, other]))[0, real]
        torch.testing.assert_close(got, alone, rtol=1e-4, atol=1e-5)


def draw(transforms: PositionTransforms, update: int, training: bool = True) -> list[float]:
    transforms.set_num_updates(update)
    plain = Positions.arange(16)
    return transforms(plain, torch.tensor([16]), training, False).k[0].tolist()


def test_draws_follow_seed_update_batch_and_rank():
    def moves(seed: int = 1, rank: int = 0) -> PositionTransforms:
        return PositionTransforms("randomized:max_position=500", "", 16, seed, rank)

    first = moves()
    a, b, c = draw(first, 3), draw(first, 3), draw(first, 4)
    assert a != b and b != c
    resumed = moves()
    resumed.set_num_updates(3)  # fairseq says it once when it resumes and again before the batch
    assert [draw(resumed, 3), draw(resumed, 3), draw(resumed, 4)] == [a, b, c]
    assert draw(moves(seed=2), 3) != a
    assert draw(moves(rank=1), 3) != a
    evaluation = PositionTransforms("identity", "randomized:max_position=500", 16, 1, 0)
    assert draw(evaluation, 3, training=False) == draw(evaluation, 9, training=False)


def test_in_evaluation_every_row_has_a_draw_that_follows_from_its_tokens():
    moves = PositionTransforms("identity", "randomized:max_position=500", 64, 1, 0)
    plain, lengths = Positions.arange(19), torch.tensor([19, 19, 19])
    rows = [tokens(1, 19, seed)[0] for seed in (1, 2, 1)]
    first, second, again = moves(plain, lengths, False, False, rows).k
    assert torch.equal(first, again) and not torch.equal(first, second) and (second.diff() > 0).all()
    moves.sample = 1
    assert not torch.equal(moves(plain, lengths, False, False, rows).k[0], first)


@pytest.mark.parametrize(
    ("spec", "step", "even"), [("shape", 1, True), ("pose", 1, False), ("warp:head=1,tail=0", 1 / 6, True)]
)
def test_what_rows_have_in_common_is_kept(spec, step, even):
    moves, plain = PositionTransforms("identity", spec, 16, 1, 0), Positions.arange(16)
    moved = moves(plain, torch.tensor([16, 16]), False, False, list(torch.arange(32).view(2, 16)))
    assert moved.k.shape == (2, 16) and (moved.step, moved.contiguous) == (pytest.approx(step), even)


def test_global_random_numbers_are_left_alone(task):
    model = make_model(task, "rope", positions_train="warp").train()
    torch.manual_seed(0)
    expected = torch.rand(1)
    torch.manual_seed(0)
    logits(model, tokens(2, 9))
    assert torch.rand(1) == expected


def test_shape_names_its_own_evaluation(task):
    model = make_model(task, "sinusoidal", positions_train="shape:max_position=9,eval_offset=K")
    offset = make_model(task, "sinusoidal", positions_eval="offset:tokens=9")
    x = tokens(1, 12)
    assert torch.equal(logits(model, x), logits(offset, x))


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"rpe": "nope", "positions_train": "warp"}, "'nope' reads no positions"),
        ({"rpe": "t5_bias", "positions_eval": "interpolate"}, "--positions-eval: 't5_bias.*whole positions only"),
        ({"rpe": "learned", "positions_train": "cape"}, "--positions-train: 'learned' accepts whole positions only"),
        ({"rpe": "rope", "positions_train": "wrap"}, "unknown position transform 'wrap'.*did you mean 'warp'"),
        ({"rpe": "rope", "positions_train": "warp:alpha=2"}, "between 0 and 1"),
        ({"rpe": "rope", "positions_train": "warp:head=0.9,tail=0.9"}, "add up to more than 1"),
    ],
)
def test_refusals(task, changes, words):
    with refused(words):
        make_model(task, **changes)


def test_refusals_at_run_time(task):
    with refused("'randomized' is 20 but a row has 30 tokens"):
        logits(make_model(task, "rope", positions_train="randomized:max_position=20").train(), tokens(1, 30))
    with refused("change at every decoding step"):
        logits(
            make_model(task, "rope", positions_eval="randomized:max_position=99"), tokens(1, 3), incremental_state={}
        )


def test_resumed_training_draws_the_same(corpus, tmp_path):
    flags = ("--rpe", "rope", "--positions-train", "warp:head=0.3,tail=0.3", "--update-freq", "2")
    flags += ("--dropout", "0.1", "--attention-dropout", "0.1")
    for folder, updates in (("whole", 4), ("parts", 2), ("parts", 4)):
        train(corpus, tmp_path / folder, *flags, updates=updates)
    assert_equal_models(*(tmp_path / folder / "checkpoint_last.pt" for folder in ("whole", "parts")))


def test_the_encoding_can_be_changed_at_evaluation(corpus, tmp_path):
    """With the rotation of the checkpoint, where the new encoding leaves it open."""
    train(corpus, tmp_path, "--rpe", "rope:base=500,rotary_fraction=0.5", updates=3)
    checkpoint = tmp_path / "checkpoint_last.pt"

    def loss(*flags: str) -> float:
        said = evaluate(corpus, checkpoint, 256, *flags)
        assert all_scored(corpus, said)
        return float(re.search(r"Loss \(base 2\): ([\d.]+)", said).group(1))

    scaled = loss("--rpe-eval", "rope:scaling=linear,factor=8")
    assert scaled != loss()
    assert scaled == pytest.approx(loss("--positions-eval", "interpolate:ratio=1/8"), abs=2e-4)
    words = refusal("eval_lm", *evaluation(corpus, checkpoint, 256, "--rpe-eval", "kerple_log"))
    assert "the checkpoint does not fit this model" in words
