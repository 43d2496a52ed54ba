"""Position transforms: golden values, invariants of random draws, padding, reproducibility and bad input."""

from __future__ import annotations

import math
import subprocess
import sys

import pytest
import torch
from torch import Tensor

from fairseq_rpe.core import Positions, UserError, block
from fairseq_rpe.encodings import build as build_encoding
from fairseq_rpe.positions import Moved, Transform, build, describe, names, normalise, register
from fairseq_rpe.positions.base import registry
from fairseq_rpe.positions.contract import check

SPECS = {
    "identity": ["identity"],
    "offset": ["offset:by=7"],
    "interpolate": ["interpolate:train=8", "interpolate:ratio=1/4"],
    "warp": [
        "warp",
        "warp:head=0.5,tail=0.5,alpha=choice(0.4;0.5),skew=sqrt",
        "warp:head=0,tail=1",
        "warp:head=1,tail=0",
    ],
    "randomized": ["randomized:max=60", "randomized:max=60,per=row", "randomized:max=500,per=row"],
    "stretch": ["stretch", "stretch:times=3"],
    "pose": ["pose:target=60", "pose:target=60,chunks=5"],
    "random_padding": ["random_padding:max=60"],
    "shape": ["shape:max=50"],
    "cape": ["cape", "cape:shift=3,local=0,scale=1"],
}
ALL_SPECS = [spec for specs in SPECS.values() for spec in specs]


def generator(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def plain(m: int) -> Tensor:
    return torch.arange(m, dtype=torch.float32)[None]


def full(m: int, rows: int = 1) -> Tensor:
    return torch.full((rows,), m)


def move(spec: str, m: int, rows: int = 1, seed: int = 0, train_length: int | None = None) -> Moved:
    return build(spec, train_length)(plain(m), full(m, rows), generator(seed))


def test_every_name_has_specs_here():
    assert set(names()) - {n for n in names() if n.startswith("test_")} == set(SPECS)


def test_descriptions_are_complete():
    for row in describe():
        if not row.name.startswith("test_"):
            assert row.summary and row.formula and all(o.help for o in row.options)


# golden values


@pytest.mark.parametrize(
    ("spec", "length", "values"),
    [
        (
            "warp:head=0,tail=1",
            512,
            {0: 0, 1: 0.029145, 2: 0.115972, 10: 2.780418, 100: 170.558121, 256: 456.0, 511: 512.0},
        ),
        ("warp:head=0,tail=1", 20, {1: 0.655477, 2: 2.285300, 10: 17.8125, 19: 19.999964}),
        (
            "warp:head=0,tail=1,skew=sqrt",
            512,
            {0: 0, 1: 22.627417, 2: 32, 10: 71.554175, 100: 226.274170, 256: 362.038672, 511: 511.499756},
        ),
        ("warp:head=0,tail=1,skew=sqrt", 20, {1: 4.472136, 2: 6.324555, 10: 14.142136, 19: 19.493589}),
        ("warp:head=1,tail=0", 512, {0: 0, 1: 1 / 6, 511: 85.166667}),
        ("interpolate:ratio=1/4", 2048, {0: 0, 2047: 511.75}),
        ("interpolate:train=512", 2048, {0: 0, 2047: 511.75}),
        ("offset:by=500", 8, {0: 500, 7: 507}),
    ],
)
def test_golden_values(spec, length, values):
    k = move(spec, length).k
    assert k.shape == (1, length)
    for j, value in values.items():
        assert k[0, j].item() == pytest.approx(value, rel=1e-5, abs=1e-6), j


def test_interpolation_leaves_short_rows_bit_for_bit_alone():
    index = plain(300)
    for length in (300, 512):
        moved = build("interpolate", length)(index, full(300))
        assert moved.k is index
        assert (moved.step, moved.contiguous) == (1.0, True)


def test_interpolation_takes_each_rows_own_ratio():
    moved = build("interpolate", 10)(plain(40), torch.tensor([40, 20, 5]))
    assert (moved.step, moved.contiguous) == (None, False)
    assert moved.k[:, 4].tolist() == [1.0, 2.0, 4.0]
    shared = build("interpolate", 10)(plain(40), torch.tensor([40, 40]))
    assert (shared.step, shared.contiguous, shared.k.shape) == (0.25, True, (1, 40))
    assert build("interpolate:train=20", 10)(plain(40), full(40)).step == 0.5


# what every transform promises


@pytest.mark.parametrize("spec", ALL_SPECS)
def test_shape_dtype_order_and_spacing(spec):
    for rows in (1, 6):
        for index in (plain(24), plain(24).expand(rows, 24), plain(24).double()):
            before = index.clone()
            moved = build(spec)(index, full(24, rows), generator())
            assert moved.k.dtype == index.dtype and moved.k.device == index.device
            assert moved.k.shape in ((1, 24), (rows, 24))
            assert torch.equal(index, before)
            gaps = moved.k.diff(dim=1)
            assert (gaps >= 0).all()
            if moved.step is not None:
                steps = gaps / moved.step
                torch.testing.assert_close(steps, steps.round(), rtol=0, atol=1e-4)
            if moved.contiguous:
                torch.testing.assert_close(gaps, torch.full_like(gaps, moved.step), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("spec", ALL_SPECS)
def test_draws_come_from_the_given_generator_alone(spec):
    before = torch.get_rng_state()
    one, same, other = (move(spec, 24, rows=5, seed=seed) for seed in (1, 1, 2))
    assert torch.equal(torch.get_rng_state(), before)
    assert torch.equal(one.k, same.k)
    if not build(spec).random:
        assert torch.equal(build(spec)(plain(24), full(24, 5)).k, one.k)
        return
    if spec != "warp:head=0,tail=1" and spec != "warp:head=1,tail=0":
        assert not torch.equal(one.k.expand(5, -1), other.k.expand(5, -1))
    with pytest.raises(UserError, match="pass a generator"):
        build(spec)(plain(24), full(24))


@pytest.mark.parametrize("spec", ALL_SPECS)
def test_a_generator_continues_from_its_saved_state(spec):
    first = generator()
    build(spec)(plain(24), full(24, 3), first)
    resumed = torch.Generator()
    resumed.set_state(first.get_state())
    a, b = (build(spec)(plain(24), full(24, 3), g).k for g in (first, resumed))
    assert torch.equal(a, b)


@pytest.mark.parametrize("spec", ALL_SPECS)
def test_padding_moves_no_real_token(spec):
    """The same rows padded on the left, on the right and not at all: real tokens have the same positions."""
    lengths = torch.tensor([9, 12, 1, 0])
    left = torch.stack([torch.cat([torch.zeros(12 - n), torch.arange(n)]) for n in lengths.tolist()])
    right = plain(12)
    a = build(spec)(left, lengths, generator(3)).k.expand(4, -1)
    b = build(spec)(right, lengths, generator(3)).k.expand(4, -1)
    assert a.isfinite().all() and b.isfinite().all()
    for row, n in enumerate(lengths.tolist()):
        assert torch.equal(a[row, 12 - n :], b[row, :n]), row


@pytest.mark.parametrize(
    "spec", ["randomized:max=4000", "pose:target=4000", "shape:max=4000", "warp", "interpolate:train=9"]
)
def test_one_structured_bias_equals_the_formula(spec):
    """What step and contiguous claim is enough for a distance bias: its own form equals the pairwise one."""
    moved = move(spec, 24, rows=4)
    honest = Positions(moved.k, moved.k, moved.step, moved.contiguous)
    free = Positions(moved.k, moved.k, None, False)
    encoding = build_encoding("kerple_log:p=1,a=0.3", heads=2, width=8)
    a, b = (
        _causal(encoding.form(p), p, contiguous=p is honest and moved.contiguous).expand(4, -1, -1, -1)
        for p in (honest, free)
    )
    torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-4)


def _causal(form, pos: Positions, contiguous: bool) -> Tensor:
    if contiguous:  # a backend reads the table by column numbers, never by the positions
        i = torch.arange(pos.k.shape[1])
        return form.table[:, (i[:, None] - i).clamp_min(0)].tril()[None]
    return block(form, pos).tril()


# each random transform


def test_warp_rates_and_alphas():
    rows = 6000
    spec = "warp:head=0.2,tail=0.3,alpha=choice(0.4;0.5;0.6;0.7;0.8)"
    moved = move(spec, 12, rows)
    assert (moved.step, moved.contiguous) == (None, False)
    beta = move("warp:head=0,tail=1", 12).k
    tail = (moved.k - beta).abs().amax(1) < 1e-5
    ratio = moved.k[:, 11] / 11
    assert tail.float().mean().item() == pytest.approx(0.3, abs=0.02)
    assert (~tail & (ratio > 0.99)).float().mean().item() == pytest.approx(0.5, abs=0.02)
    for alpha in (0.4, 0.5, 0.6, 0.7, 0.8):
        warped = ~tail & ((ratio - alpha).abs() < 1e-4)
        assert warped.float().mean().item() == pytest.approx(0.04, abs=0.01)
        torch.testing.assert_close(moved.k[warped], (plain(12) * alpha).expand(int(warped.sum()), -1))


def test_warp_takes_the_rows_own_length_or_the_training_length():
    lengths = torch.tensor([20, 5])
    own = build("warp:head=0,tail=1,skew=sqrt")(plain(20), lengths, generator()).k
    fixed = build("warp:head=0,tail=1,skew=sqrt,length=train", 20)(plain(20), lengths, generator()).k
    assert own[:, 4].tolist() == pytest.approx([math.sqrt(80), math.sqrt(20)])
    assert fixed[:, 4].tolist() == pytest.approx([math.sqrt(80), math.sqrt(80)])


def test_warp_keeps_the_fast_path_where_no_row_is_warped():
    seeds = [s for s in range(40) if move("warp", 24, rows=2, seed=s).contiguous]
    assert 10 < len(seeds) < 35  # 0.7² of draws warp no row
    moved = move("warp:head=1,tail=0,alpha=0.5", 24, rows=3)
    assert (moved.step, moved.contiguous, moved.k.shape) == (0.5, True, (1, 24))


def test_warped_tail_never_reverses_at_length():
    k = move("warp:head=0,tail=1", 9000).k
    assert (k.diff() >= 0).all()
    assert k[0, -1] == 9000


@pytest.mark.parametrize("per", ["batch", "row"])
@pytest.mark.parametrize("top", [24, 30, 400])
def test_randomized_is_a_sorted_subset(per, top):
    moved = move(f"randomized:max={top},per={per}", 24, rows=4)
    assert moved.k.shape == ((1 if per == "batch" else 4), 24)
    assert (moved.step, moved.contiguous) == (1.0, False)
    assert (moved.k.diff(dim=1) > 0).all()
    assert moved.k.min() >= 0 and moved.k.max() < top
    assert torch.equal(moved.k, moved.k.round())


@pytest.mark.parametrize("top", [5, 12])
def test_randomized_favours_no_position(top):
    """Dense and sparse subsets are drawn differently; both hold every number equally often."""
    k = build(f"randomized:max={top},per=row")(plain(3), full(3, 5000), generator()).k
    counts = torch.bincount(k.long().flatten(), minlength=top) / 5000
    assert counts.tolist() == pytest.approx([3 / top] * top, abs=0.03)
    assert (k.diff(dim=1) > 0).all()


def test_randomized_rows_of_other_lengths():
    lengths = torch.tensor([24, 3])
    short = torch.cat(
        [build("randomized:max=100,per=row")(plain(24), lengths, generator(s)).k[1:, :3] for s in range(200)]
    )
    assert short.max() > 80  # a subset of its own, not the start of the longest row's
    shared = build("randomized:max=100")(plain(24), lengths, generator()).k
    assert shared.shape == (1, 24)


def test_randomized_costs_memory_of_the_row_not_of_the_range():
    assert move("randomized:max=16777216", 4, rows=2).k.max() < 2**24


def test_pose_two_chunks_follow_the_authors():
    w, target, rows = 9, 30, 4000
    moved = move(f"pose:target={target}", w, rows)
    assert (moved.step, moved.contiguous) == (1.0, False)
    skip = moved.k - plain(w)
    assert (skip[:, 0] == 0).all()
    assert ((skip.diff(dim=1) > 0).sum(1) <= 1).all()
    u = skip[:, -1]
    assert (u.min(), u.max()) == (0, target - w)
    assert u.mean().item() == pytest.approx((target - w) / 2, abs=0.5)
    skipped = skip[u > 0]
    first = (skipped == 0).sum(1)
    assert first.unique().tolist() == [1, 2, 3, 4, 5]  # 1 … (w+1)//2, equally often
    assert (torch.bincount(first)[1:] / len(first)).tolist() == pytest.approx([0.2] * 5, abs=0.03)


def test_pose_more_chunks():
    w, target = 12, 100
    moved = move(f"pose:target={target},chunks=4", w, rows=500)
    skip = moved.k - plain(w)
    assert (skip.diff(dim=1) >= 0).all() and skip.max() <= target - w
    assert (skip.diff(dim=1) > 0).sum(1).max() == 3
    assert torch.equal(move("pose:target=12,chunks=4", w).k, plain(w))


def test_pose_counts_each_rows_own_tokens():
    lengths = torch.tensor([12, 4]).repeat(500)
    k = build("pose:target=20")(plain(12), lengths, generator()).k
    assert k[0::2].max() == 19 and k[1::2].max() == 19
    assert ((k[1::2, 1] > 1).float().mean()) > 0.3  # first chunks of a short row have one or two tokens


def test_shape_excludes_k():
    moved = move("shape:max=5", 3, rows=2000)
    assert (moved.step, moved.contiguous) == (1.0, True)
    offsets = moved.k[:, 0]
    assert (torch.bincount(offsets.long()) / 2000).tolist() == pytest.approx([0.2] * 5, abs=0.03)
    assert torch.equal(moved.k, offsets[:, None] + plain(3))


def test_shape_names_its_evaluation():
    assert build("shape:max=500").evaluation == "identity"
    assert build("shape:max=40,eval_offset=K").evaluation == "offset:by=40"
    assert move(build("shape:max=40,eval_offset=K").evaluation, 2).k.tolist() == [[40, 41]]
    assert build("warp").evaluation == "identity"


def test_random_padding_fills_the_range():
    lengths = torch.tensor([3, 8]).repeat(1000)
    k = build("random_padding:max=10")(plain(8), lengths, generator()).k
    for row, length in ((0, 3), (1, 8)):
        offsets = k[row::2, 0].long()
        assert offsets.unique().tolist() == list(range(10 - length + 1))
    assert (k.gather(1, (lengths - 1)[:, None]) <= 9).all()


def test_cape_ranges():
    k = move("cape:shift=5,local=0,scale=1", 4, rows=2000)
    assert (k.step, k.contiguous) == (1.0, True)
    shift = k.k[:, 0]
    assert -5 <= shift.min() < -4.9 and 4.9 < shift.max() <= 5
    local = move("cape:shift=0,local=0.5,scale=1", 4, rows=2000)
    assert (local.step, local.contiguous) == (None, False)
    noise = local.k - plain(4)
    assert 0.49 < noise.abs().max() <= 0.5 and noise[:, 1].std() > 0.25
    ratio = move("cape:shift=0,local=0,scale=1.25", 4, rows=2000).k[:, 3] / 3
    assert 0.8 - 1e-6 <= ratio.min() < 0.81 and 1.24 < ratio.max() <= 1.25 + 1e-6
    assert ratio.log().mean().item() == pytest.approx(0, abs=0.01)


def test_cape_switched_off_is_the_identity():
    assert torch.equal(move("cape:shift=0,local=0,scale=1", 30).k, plain(30))


# names, spelling and bad input


@pytest.mark.parametrize(
    ("spec", "spelt"),
    [
        ("warp", "warp"),
        ("warp: alpha=1/6, head=0.15", "warp"),
        ("warp:alpha=2/12", "warp"),
        ("warp:alpha=1/4", "warp:alpha=0.25"),
        ("warp:alpha=choice(0.40; 1/2)", "warp:alpha=choice(0.4;0.5)"),
        ("interpolate:ratio=auto", "interpolate"),
        ("interpolate:ratio=1/3", "interpolate:ratio=1/3"),
        ("interpolate:ratio=0.125", "interpolate:ratio=0.125"),
        ("shape:eval_offset=K,max=500", "shape:eval_offset=K"),
    ],
)
def test_one_spelling(spec, spelt):
    assert normalise(spec) == spelt
    assert normalise(spelt) == spelt


@pytest.mark.parametrize(
    ("spec", "words"),
    [
        ("wrap", "unknown position transform 'wrap'.*did you mean 'warp'"),
        ("warp:alpha=0", "'alpha' of 'warp' must lie between 0 and 1.*not 0"),
        ("warp:alpha=1", "must lie between 0 and 1.*not 1"),
        ("warp:alpha=choice(0.5;1.5)", "must lie between 0 and 1.*not 1.5"),
        ("warp:alpha=choice()", "wants a number.*or choice.*not ''"),
        ("warp:alpha=choice(0.5", "wants a number.*not 'choice.0.5'"),
        ("warp:alpha=nan", "wants a number.*not 'nan'"),
        ("warp:head=0.7,tail=0.4", "head=0.7 and tail=0.4 of 'warp' add up to more than 1"),
        ("warp:head=-0.1", "'head' of 'warp' must be at least 0"),
        ("warp:skew=bata", "'skew' of 'warp' is one of beta, sqrt.*did you mean 'beta'"),
        ("warp:length=train", "needs a training length.*use length=row"),
        ("interpolate", "needs a training length.*train=LENGTH"),
        ("interpolate:ratio=0", "'ratio' of 'interpolate' must be more than 0.*not 0"),
        ("interpolate:ratio=-1/4", "must be more than 0"),
        ("interpolate:ratio=4", "at most 1, not 4.*1/4 for four times"),
        ("interpolate:ratio=1/0", "wants a number.*or auto, not '1/0'"),
        ("interpolate:ratio=0.5,train=9", "not both"),
        ("interpolate:train=0", "'train' of 'interpolate' must be at least 1"),
        ("randomized:max=0", "'max' of 'randomized' must be at least 1"),
        ("randomized:max=99999999", "at most 16777216"),
        ("randomized:per=token", "'per' of 'randomized' is one of batch, row"),
        ("pose:chunks=1", "'chunks' of 'pose' must be at least 2"),
        ("shape:max=0", "'max' of 'shape' must be at least 1"),
        ("shape:eval_offset=3", "'eval_offset' of 'shape' is one of 0, K"),
        ("cape:shift=-1", "'shift' of 'cape' must be at least 0"),
        ("cape:local=-1", "'local' of 'cape' must be at least 0"),
        ("cape:scale=0.9", "'scale' of 'cape' must be at least 1"),
        ("offset:by=-1", "'by' of 'offset' must be at least 0"),
    ],
)
def test_bad_specs_are_one_line(spec, words):
    with pytest.raises(UserError, match=words) as caught:
        build(spec)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("spec", "words"),
    [
        ("randomized:max=23", "'max' of 'randomized' is 23 but a row has 24 tokens: raise max to at least 24"),
        ("pose:target=23", "'target' of 'pose' is 23 but a row has 24 tokens"),
        ("random_padding:max=23", "'max' of 'random_padding' is 23 but a row has 24 tokens"),
        ("warp:length=train", "a row of 24 tokens is longer than the training length 20: use length=row"),
    ],
)
def test_rows_that_do_not_fit(spec, words):
    with pytest.raises(UserError, match=words):
        move(spec, 24, train_length=20)


def test_senseless_training_length():
    with pytest.raises(UserError, match="train_length must be an integer of at least 1 or None, not 0"):
        build("interpolate", 0)


def test_a_transform_of_ones_own():
    @register("test_doubled")
    class Doubled(Transform):
        """Twice as far."""

        def move(self, index, lengths, generator):
            return Moved(index * 2, 2.0, True)

    assert move("test_doubled", 3).k.tolist() == [[0, 2, 4]]


WRONG = [
    ("return Moved(index[0] * 2, 2.0, True)", r"Mine.move returned positions \(11,\), expected \(2, 11\) or \(1, 11\)"),
    ("return index * 2", "Mine.move returned Tensor, expected Moved"),
    ("return Moved(index.half(), 1.0, True)", "Mine.move returned torch.float16, expected torch.float32"),
    ("return Moved(index / 0, 1.0, True)", "Mine.move returned positions that are not finite"),
    ("return Moved(index / 2, 0.5, True)", "Mine.move returned fractions of a position: set fractional = True"),
    ("return Moved(index * 3, 2.0, True)", "returned step=2, but positions differ by other than multiples of it"),
    ("return Moved(index * 4, 2.0, True)", "returned contiguous=True, but neighbours are not step=2 apart"),
    ("return Moved(index, 0, True)", "returned step=0, expected a number above 0 or None"),
    ("return Moved(index + torch.randint(9, (1,)), 1.0, True)", "other positions when called again: set random = True"),
    ("index += 1; return Moved(index, 1.0, True)", "Mine.move changes the index in place"),
    ("return Moved(index + lengths.max(), 1.0, True); settled = True", "set settled = False"),
    ("return Moved(index[:, 50:] + self.missing, 1.0, True)", "Mine.move fails for float32 .*: AttributeError"),
]


@pytest.mark.parametrize(("line", "message"), WRONG, ids=[line for line, _ in WRONG])
def test_a_mistake_in_a_transform_is_told_with_its_place(line, message, tmp_path):
    line, _, flag = line.partition("; settled")
    source = (
        "import torch\nfrom fairseq_rpe.positions import Moved, Transform, register\n\n"
        f"@register('test_mine')\nclass Mine(Transform):\n    settled{flag or ' = False'}\n"
        f"    def move(self, index, lengths, generator):\n        {line}\n"
    )
    file = tmp_path / "my_positions.py"
    file.write_text(source)
    registry._table.pop("test_mine", None)
    exec(compile(source, file, "exec"), {"__name__": "mine"})
    with pytest.raises(UserError, match=message + rf".*: {file}:[78]$"):
        build("test_mine")


def test_a_misspelt_method_of_a_transform_is_named():
    @register("test_misspelt")
    class Mine(Transform):
        def mvoe(self, index, lengths, generator):
            return Moved(index, 1.0, True)

    with pytest.raises(UserError, match=r"Mine defines 'mvoe', which nothing calls, and no 'move'.*test_positions.py:"):
        build("test_misspelt")


@pytest.mark.parametrize("spec", ALL_SPECS)
def test_transforms_of_this_package_keep_to_what_is_asked_of_others(spec):
    for train_length in (None, 6, 20):
        check(build(spec, train_length))


def test_positions_and_analysis_need_no_fairseq():
    code = "import sys, fairseq_rpe.positions, fairseq_rpe.analysis; sys.exit('fairseq' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("spec", ALL_SPECS)
def test_the_device_changes_nothing(spec):
    lengths = torch.tensor([24, 9, 17])
    here = build(spec)(plain(24), lengths, generator()).k
    for where in ("cpu", "cuda"):
        there = build(spec)(plain(24).cuda(), lengths.to(where), generator()).k
        assert there.is_cuda
        torch.testing.assert_close(there.cpu(), here)
