"""Position transforms: golden values, properties of random draws, padding, reproducibility and bad input."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from refusal import refused
from torch import Tensor

from fairseq_rpe.core import Positions
from fairseq_rpe.encodings import build as build_encoding
from fairseq_rpe.positions import Transform, TransformedPositions, build, describe, names, normalise, register
from fairseq_rpe.positions.base import registry
from fairseq_rpe.positions.contract import check

SPECS = {
    "identity": ["identity"],
    "offset": ["offset:tokens=7"],
    "interpolate": ["interpolate:train=8", "interpolate:ratio=1/4"],
    "warp": ["warp", "warp:head=0,tail=1", "warp:head=1,tail=0"],
    "randomized": [
        "randomized:max_position=60",
        "randomized:max_position=60,per=row",
        "randomized:max_position=500,per=row",
    ],
    "stretch": ["stretch", "stretch:times=3"],
    "pose": ["pose:target=60", "pose:target=60,chunks=5"],
    "random_padding": ["random_padding:max_position=60"],
    "shape": ["shape:max_position=50"],
    "cape": ["cape", "cape:shift=3,local=0,scale=1"],
}
ALL_SPECS = [spec for specs in SPECS.values() for spec in specs]
INDEX = torch.arange(24.0)[None]


def generator(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def plain(m: int) -> Tensor:
    return torch.arange(m, dtype=torch.float32)[None]


def full(m: int, rows: int = 1) -> Tensor:
    return torch.full((rows,), m)


def move(spec: str, m: int, rows: int = 1, seed: int = 0, train_length: int | None = None) -> TransformedPositions:
    return build(spec, train_length)(plain(m), full(m, rows), generator(seed))


def frequencies(numbers: Tensor, draws: int) -> list[float]:
    return (torch.bincount(numbers.long().flatten()) / draws).tolist()


def test_every_name_has_specs_here_and_a_description():
    assert {name for name in names() if not name.startswith("test_")} == set(SPECS)
    for row in describe():
        assert row.name not in SPECS or (row.summary and row.formula and all(o.help for o in row.options))


@pytest.mark.parametrize(
    ("spec", "length", "values"),
    [
        ("warp:head=0,tail=1", 512, {0: 0, 1: 0.029145, 2: 0.115972, 10: 2.780418, 100: 170.558121, 511: 512}),
        ("warp:head=0,tail=1", 20, {1: 0.655477, 2: 2.285300, 10: 17.8125, 19: 19.999964}),
        ("warp:head=0,tail=1,skew=sqrt", 512, {0: 0, 1: 22.627417, 2: 32, 10: 71.554175, 256: 362.038672}),
        ("warp:head=1,tail=0", 512, {0: 0, 1: 1 / 6, 511: 85.166667}),
        ("interpolate:ratio=1/4", 2048, {0: 0, 2047: 511.75}),
        ("interpolate:train=512", 2048, {0: 0, 2047: 511.75}),
        ("offset:tokens=500", 8, {0: 500, 7: 507}),
    ],
)
def test_golden_values(spec, length, values):
    k = move(spec, length).k
    assert k.shape == (1, length)
    for j, value in values.items():
        assert k[0, j].item() == pytest.approx(value, rel=1e-5, abs=1e-6), j


def test_interpolation_takes_each_rows_own_ratio():
    for length in (24, 512):  # short rows stay, bit for bit
        moved = build("interpolate", length)(INDEX, full(24))
        assert moved.k is INDEX and (moved.step, moved.contiguous) == (1.0, True)
    moved = build("interpolate", 10)(plain(40), torch.tensor([40, 20, 5]))
    assert (moved.step, moved.contiguous) == (None, False)
    assert moved.k[:, 4].tolist() == [1.0, 2.0, 4.0]
    shared = build("interpolate", 10)(plain(40), torch.tensor([40, 40]))
    assert (shared.step, shared.contiguous, shared.k.shape) == (0.25, True, (1, 40))
    assert build("interpolate:train=20", 10)(plain(40), full(40)).step == 0.5


@pytest.mark.parametrize("spec", ALL_SPECS)
@settings(max_examples=15, deadline=None, derandomize=True)
@given(lengths=st.lists(st.integers(0, 12), min_size=1, max_size=5).filter(any), seed=st.integers(0, 99))
def test_padding_moves_no_token_and_a_generator_alone_decides(spec, lengths, seed):
    """The same rows padded on the left and on the right; a generator goes on from its saved state."""
    transform, sizes, before = build(spec), torch.tensor(lengths), torch.get_rng_state()
    left = torch.stack([torch.cat([torch.zeros(12 - n), torch.arange(n)]) for n in lengths])
    first, other = generator(seed), generator(seed)
    for _ in range(2):
        a, b = (transform(x, sizes, g).k.expand(len(lengths), -1) for x, g in ((left, first), (plain(12), other)))
        assert a.isfinite().all() and b.isfinite().all()
        for row, n in enumerate(lengths):
            assert torch.equal(a[row, 12 - n :], b[row, :n])
            assert (b[row, :n].diff() >= 0).all()
        state, other = first.get_state(), torch.Generator()
        other.set_state(state)
    assert torch.equal(torch.get_rng_state(), before)


@pytest.mark.parametrize("spec", ALL_SPECS)
def test_transforms_of_this_package_keep_the_contract_of_others(spec):
    for train_length in (None, 6, 20):
        check(build(spec, train_length))
    one, other = (move(spec, 24, rows=5, seed=seed).k.expand(5, -1) for seed in (1, 2))
    if build(spec).random:
        assert torch.equal(one, other) == (spec in ("warp:head=0,tail=1", "warp:head=1,tail=0"))
        with refused("pass a generator"):
            build(spec)(INDEX, full(24))
    else:
        assert torch.equal(build(spec)(INDEX, full(24, 5)).k.expand(5, -1), one)


@pytest.mark.parametrize(
    "spec", ["randomized:max_position=4000", "pose:target=4000", "shape:max_position=4000", "interpolate:train=9"]
)
def test_one_structured_bias_equals_the_formula(spec):
    """What step and contiguous claim is enough for a distance bias: its own form equals the pairwise one."""
    moved, encoding = move(spec, 24, rows=4), build_encoding("kerple_log:p=1,a=0.3", heads=2, width=8)
    form = encoding.position_bias(Positions(moved.k, moved.k, moved.step, moved.contiguous))
    free = Positions(moved.k, moved.k, None, False)
    i = torch.arange(24)
    found = form.table[:, (i[:, None] - i).clamp_min(0)][None] if moved.contiguous else form.materialize(free)
    pairs = encoding.position_bias(free).materialize(free)
    torch.testing.assert_close(found.tril().expand_as(pairs), pairs.tril(), rtol=1e-4, atol=1e-4)


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
    for spec, second in (("warp:head=0,tail=1,skew=sqrt", 20), ("warp:head=0,tail=1,skew=sqrt,length=train", 80)):
        k = build(spec, 20)(plain(20), torch.tensor([20, 5]), generator()).k
        assert k[:, 4].tolist() == pytest.approx([math.sqrt(80), math.sqrt(second)])
    k = move("warp:head=0,tail=1", 9000).k
    assert (k.diff() >= 0).all() and k[0, -1] == 9000


def test_warp_keeps_the_fast_path_where_no_row_is_warped():
    seeds = [s for s in range(40) if move("warp", 24, rows=2, seed=s).contiguous]
    assert 10 < len(seeds) < 35  # 0.7² of draws warp no row
    moved = move("warp:head=1,tail=0,alpha=0.5", 24, rows=3)
    assert (moved.step, moved.contiguous, moved.k.shape) == (0.5, True, (1, 24))


@pytest.mark.parametrize("per", ["batch", "row"])
@pytest.mark.parametrize("top", [24, 30, 400])
def test_randomized_is_a_sorted_subset(per, top):
    moved = move(f"randomized:max_position={top},per={per}", 24, rows=4)
    assert (moved.step, moved.contiguous, moved.k.shape) == (1.0, False, (1 if per == "batch" else 4, 24))
    assert (moved.k.diff(dim=1) > 0).all() and moved.k.min() >= 0 and moved.k.max() < top
    assert torch.equal(moved.k, moved.k.round())


@pytest.mark.parametrize("top", [5, 12])
def test_randomized_favours_no_position(top):
    """Dense and sparse subsets are drawn differently; both hold every number equally often."""
    k = build(f"randomized:max_position={top},per=row")(plain(3), full(3, 5000), generator()).k
    assert frequencies(k, 5000) == pytest.approx([3 / top] * top, abs=0.03) and (k.diff(dim=1) > 0).all()


def test_randomized_rows_of_other_lengths():
    per_row, lengths = build("randomized:max_position=100,per=row"), torch.tensor([24, 3])
    short = torch.cat([per_row(INDEX, lengths, generator(seed)).k[1:, :3] for seed in range(200)])
    assert short.max() > 80  # a subset of its own, not the start of the longest row's
    assert build("randomized:max_position=100")(INDEX, lengths, generator()).k.shape == (1, 24)
    # memory of the row, not of the range
    assert move("randomized:max_position=16777216", 4, rows=2).k.max() < 2**24


def test_pose_two_chunks_follow_the_authors():
    moved = move("pose:target=30", 9, rows=4000)
    assert (moved.step, moved.contiguous) == (1.0, False)
    skip = moved.k - plain(9)
    assert (skip[:, 0] == 0).all() and ((skip.diff(dim=1) > 0).sum(1) <= 1).all()
    u = skip[:, -1]
    assert (u.min(), u.max()) == (0, 21) and u.mean().item() == pytest.approx(10.5, abs=0.5)
    first = (skip[u > 0] == 0).sum(1)
    # 1 … (w+1)//2 of w tokens, equally often
    assert frequencies(first, len(first)) == pytest.approx([0, *[0.2] * 5], abs=0.03) and first.min() == 1


def test_pose_more_chunks_and_each_rows_own_tokens():
    skip = move("pose:target=100,chunks=4", 12, rows=500).k - plain(12)
    assert (skip.diff(dim=1) >= 0).all() and skip.max() <= 88
    assert (skip.diff(dim=1) > 0).sum(1).max() == 3
    assert torch.equal(move("pose:target=12,chunks=4", 12).k, plain(12))
    k = build("pose:target=20")(plain(12), torch.tensor([12, 4]).repeat(500), generator()).k
    assert k[0::2].max() == 19 and k[1::2].max() == 19
    assert ((k[1::2, 1] > 1).float().mean()) > 0.3  # first chunks of a short row have one or two tokens


def test_shape_excludes_k():
    moved = move("shape:max_position=5", 3, rows=2000)
    assert (moved.step, moved.contiguous) == (1.0, True)
    assert frequencies(moved.k[:, 0], 2000) == pytest.approx([0.2] * 5, abs=0.03)
    assert torch.equal(moved.k, moved.k[:, :1] + plain(3))
    evaluation = build("shape:max_position=40,eval_offset=K").evaluation
    assert evaluation == "offset:tokens=40" and move(evaluation, 2).k.tolist() == [[40, 41]]
    assert build("shape:max_position=500").evaluation == build("warp").evaluation == "identity"


def test_random_padding_fills_the_range():
    lengths = torch.tensor([3, 8]).repeat(1000)
    k = build("random_padding:max_position=10")(plain(8), lengths, generator()).k
    for row, length in ((0, 3), (1, 8)):
        assert k[row::2, 0].unique().tolist() == list(range(10 - length + 1))
    assert (k.gather(1, (lengths - 1)[:, None]) <= 9).all()


def test_cape_ranges():
    shifted = move("cape:shift=5,local=0,scale=1", 4, rows=2000)
    assert (shifted.step, shifted.contiguous) == (1.0, True)
    assert -5 <= shifted.k[:, 0].min() < -4.9 and 4.9 < shifted.k[:, 0].max() <= 5
    local = move("cape:shift=0,local=0.5,scale=1", 4, rows=2000)
    assert (local.step, local.contiguous) == (None, False)
    noise = local.k - plain(4)
    assert 0.49 < noise.abs().max() <= 0.5 and noise[:, 1].std() > 0.25
    ratio = move("cape:shift=0,local=0,scale=1.25", 4, rows=2000).k[:, 3] / 3
    assert 0.8 - 1e-6 <= ratio.min() < 0.81 and 1.24 < ratio.max() <= 1.25 + 1e-6
    assert ratio.log().mean().item() == pytest.approx(0, abs=0.01)
    assert torch.equal(move("cape:shift=0,local=0,scale=1", 30).k, plain(30))


SPELT = {
    "warp": ["warp: alpha=1/6, head=0.15", "warp:alpha=2/12"],
    "warp:alpha=choice(0.4;0.5)": ["warp:alpha=choice(0.40; 1/2)"],
    "interpolate": ["interpolate:ratio=auto"],
    "interpolate:ratio=1/3": ["interpolate:ratio=1/3"],
    "shape:eval_offset=K": ["shape:eval_offset=K,max_position=500"],
}


def test_one_spelling():
    for spelt, specs in SPELT.items():
        assert {normalise(spec) for spec in (spelt, *specs)} == {spelt}


BAD = {
    "unknown position transform 'wrap'.*did you mean 'warp'": "wrap",
    "'alpha' of 'warp' must lie between 0 and 1": "warp:alpha=0 warp:alpha=1 warp:alpha=choice(0.5;1.5)",
    "wants a number.*or choice.*not": "warp:alpha=choice() warp:alpha=choice(0.5 warp:alpha=nan",
    "head=0.7 and tail=0.4 of 'warp' add up to more than 1": "warp:head=0.7,tail=0.4",
    "must be at least 0, not -": "warp:head=-0.1 cape:shift=-1 cape:local=-1 offset:tokens=-1",
    "must be at least 1, not 0": "interpolate:train=0 randomized:max_position=0 shape:max_position=0 stretch:times=0 "
    "cape:scale=0.9",
    "'chunks' of 'pose' must be at least 2": "pose:chunks=1",
    "at most 16777216": "randomized:max_position=99999999",
    "'skew' of 'warp' is one of beta, sqrt.*did you mean 'beta'": "warp:skew=bata",
    "'per' of 'randomized' is one of batch, row": "randomized:per=token",
    "'eval_offset' of 'shape' is one of 0, K": "shape:eval_offset=3",
    "needs a training length.*use length=row": "warp:length=train",
    "needs a training length.*train=LENGTH": "interpolate",
    "'ratio' of 'interpolate' must be more than 0 and at most 1": "interpolate:ratio=0 interpolate:ratio=4",
    "wants a number.*or auto, not '1/0'": "interpolate:ratio=1/0",
    "not both": "interpolate:ratio=0.5,train=9 randomized:times=4,max_position=40",
}


@pytest.mark.parametrize(("words", "specs"), BAD.items())
def test_bad_specs_are_one_line(words, specs):
    for spec in specs.split():
        with refused(words):
            build(spec)


def test_rows_that_do_not_fit():
    for spec, words in {
        "randomized:max_position=23": "'max_position' of 'randomized' is 23 but a row has 24 tokens: raise "
        "max_position to at least 24",
        "pose:target=23": "'target' of 'pose' is 23 but a row has 24 tokens",
        "random_padding:max_position=23": "'max_position' of 'random_padding' is 23 but a row has 24 tokens",
        "warp:length=train": "a row of 24 tokens is longer than the training length 20: use length=row",
    }.items():
        with refused(words):
            move(spec, 24, train_length=20)


def test_a_transform_of_ones_own():
    @register("test_doubled")
    class Doubled(Transform):
        """Twice as far."""

        def transform(self, index, lengths, generator):
            return TransformedPositions(index * 2, 2.0, True)

    assert move("test_doubled", 3).k.tolist() == [[0, 2, 4]]


WRONG = [
    (
        "return TransformedPositions(index[0] * 2, 2.0, True)",
        r"Mine.transform returned positions \(11,\), expected \(2, 11\) or \(1, 11\)",
    ),
    ("return index * 2", "Mine.transform returned Tensor, expected TransformedPositions"),
    (
        "return TransformedPositions(index.half(), 1.0, True)",
        "Mine.transform returned torch.float16, expected torch.float32",
    ),
    ("return TransformedPositions(index / 0, 1.0, True)", "Mine.transform returned positions that are not finite"),
    (
        "return TransformedPositions(index / 2, 0.5, True)",
        "Mine.transform returned fractions of a position: set fractional = True",
    ),
    (
        "return TransformedPositions(index * 3, 2.0, True)",
        "returned step=2, but positions differ by other than multiples of it",
    ),
    (
        "return TransformedPositions(index * 4, 2.0, True)",
        "returned contiguous=True, but neighbours are not step=2 apart",
    ),
    ("return TransformedPositions(index, 0, True)", "returned step=0, expected a number above 0 or None"),
    (
        "return TransformedPositions(index + torch.randint(9, (1,)), 1.0, True)",
        "other positions when called again: set random = True",
    ),
    ("index += 1; return TransformedPositions(index, 1.0, True)", "Mine.transform changes the index in place"),
    (
        "return TransformedPositions(index + lengths.max(), 1.0, True); length_invariant = True",
        "set length_invariant = False",
    ),
    (
        "return TransformedPositions(index[:, 50:] + self.missing, 1.0, True)",
        "Mine.transform fails for float32 .*: AttributeError",
    ),
]


@pytest.mark.parametrize(("line", "message"), WRONG, ids=[line for line, _ in WRONG])
def test_a_mistake_in_a_transform_is_told_with_its_place(line, message, tmp_path):
    line, _, flag = line.partition("; length_invariant")
    source = (
        "import torch\nfrom fairseq_rpe.positions import TransformedPositions, Transform, register\n\n"
        f"@register('test_mine')\nclass Mine(Transform):\n    length_invariant{flag or ' = False'}\n"
        f"    def transform(self, index, lengths, generator):\n        {line}\n"
    )
    file = tmp_path / "my_positions.py"
    file.write_text(source)
    registry._table.pop("test_mine", None)
    exec(compile(source, file, "exec"), {"__name__": "mine"})
    with refused(message + rf".*: {file}:[78]$"):
        build("test_mine")


def test_a_misspelt_method_of_a_transform_is_named():
    @register("test_misspelt")
    class Mine(Transform):
        def trasnform(self, index, lengths, generator):
            return TransformedPositions(index, 1.0, True)

    with refused(r"Mine defines 'trasnform', which nothing calls, and no 'transform'.*test_positions.py:"):
        build("test_misspelt")


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("spec", ALL_SPECS)
def test_the_device_changes_nothing(spec):
    lengths = torch.tensor([24, 9, 17])
    here = build(spec)(INDEX, lengths, generator()).k
    for where in ("cpu", "cuda"):
        there = build(spec)(INDEX.cuda(), lengths.to(where), generator()).k
        assert there.is_cuda
        torch.testing.assert_close(there.cpu(), here)
