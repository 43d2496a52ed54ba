"""Short texts on a CPU, views along diagonals, FIRE by distances and by rows, and pairs turned as complex numbers."""

import math

import pytest
import torch
from calls import INPUTS, assert_same, table
from test_curve import trained
from test_sdpa import compare, outcome

from fairseq_rpe.attention import curve, sdpa, short
from fairseq_rpe.attention.curve import CurveBias, last_row
from fairseq_rpe.attention.diagonals import along_diagonals, diagonal_sums
from fairseq_rpe.attention.layer import plan_of
from fairseq_rpe.core import Dense, Positions, Toeplitz, block
from fairseq_rpe.encodings import build

B, H, D = 2, 4, 16
SIZES = {"heads": H, "width": D}


@pytest.mark.parametrize("dropout", [0.0, 0.2])
@pytest.mark.parametrize("spec", ["nope", "alibi", "kerple_log"])
def test_short_texts(spec, dropout, monkeypatch):
    """Groups of several rows of the batch, of one row, and of single heads; the longest short text and the next."""
    for elements, lengths in ((1 << 18, (2, 61, 128, 129)), (5 * 61**2, (61,)), (1, (61, 128))):
        monkeypatch.setattr(short, "ELEMENTS", elements)
        for n in lengths:
            compare(spec, n=n, dropout=dropout, rows=3, **SIZES)
    a, b = (outcome(x, spec, 61, dtype=torch.bfloat16, dropout=dropout, **SIZES) for x in ("reference", "sdpa"))
    assert_same(a, b, 0.02)
    for name in a.keys() - set(INPUTS):
        assert (a[name] - b[name]).square().mean().sqrt() <= 2e-4 * a[name].abs().max(), name


@pytest.mark.parametrize("spec", ["nope", "alibi"])
def test_short_texts_in_bfloat16_have_gradients_of_float32(spec):
    """To the bit those of the same numbers in float32, rounded once."""
    torch.manual_seed(0)
    plan = plan_of(build(spec, H, 64), Positions.arange(61), None, "sdpa")
    low = [torch.randn(B, H, 61, D, dtype=torch.bfloat16, requires_grad=True) for _ in range(3)]
    wide = [x.detach().float().requires_grad_() for x in low]
    outs = [sdpa(*inputs, plan) for inputs in (low, wide)]
    assert outs[0].dtype == torch.bfloat16 and torch.equal(outs[0], outs[1].bfloat16())
    back = torch.randn(B, H, 61, D).bfloat16()
    found = [torch.autograd.grad(out, qkv, back.to(out.dtype)) for out, qkv in zip(outs, (low, wide), strict=True)]
    assert all(torch.equal(a, b.bfloat16()) for a, b in zip(*found, strict=True))


@pytest.mark.parametrize("learned", [False, True])
def test_a_short_table_that_hides_keys(learned):
    """Query 0 sees nothing; with a gradient of the table and without."""

    def holes(device):
        made, _ = table(37)(device)
        hidden = made.index_fill(1, torch.tensor([0, 3, 5]), -math.inf)
        return made, Toeplitz(hidden if learned else hidden.detach())

    found = compare(holes, n=37)
    assert not found["out"][:, :, 0].any() and ("table" in found) == learned


@pytest.mark.parametrize(("rows", "cols"), [(1, 1), (1, 5), (5, 5), (3, 11)])
def test_sums_along_diagonals(rows, cols):
    x = torch.randn(2, rows, cols)
    r, j = torch.arange(rows)[:, None], torch.arange(cols)
    x[:, r + j >= cols] = 0.0
    expected = torch.stack([x[:, r + j == y].sum(-1) for y in range(cols)], dim=-1)
    torch.testing.assert_close(diagonal_sums(x), expected)
    if cols > 4:
        view = along_diagonals(x, 2, 4)
        assert all(view[0, a, b] == x[0, a, 2 + b - a] for a in range(rows) for b in range(2) if 2 + b >= a)


@pytest.mark.parametrize(("spec", "start", "bands"), [("fire:init_L=20", 1920, True), ("fire:init_L=900", 256, False)])
def test_bands_of_a_block(spec, start, bands):
    """Beyond L a few distances of a block are in two pieces, below it none; the block is the network's all the same."""
    n, stop = 2048, start + 128
    fire, pos = trained(spec, 0, 2.0), Positions.arange(n)
    form = fire.form(pos)
    pieces = form.pieces(1.0)
    tensors = pieces.value, pieces.slope, form.far, form.near[0], pieces.ends, pieces.middle
    bias = CurveBias(n, torch.zeros(1, 4, n, 8), *tensors)
    found = bias.block(start, stop, slice(1, 3)).flip(1)
    expected = block(form, pos, slice(start, stop), slice(stop))[0, 1:3]
    seen = torch.arange(stop) <= torch.arange(start, stop)[:, None]
    torch.testing.assert_close(found[:, seen], expected[:, seen], rtol=1e-5, atol=1e-5)
    assert (found[:, ~seen] == -math.inf).all()
    wide = sum(last - first for first, last in bias.bands)
    assert (len(bias.bands) > 1 and 0 < wide < stop / 2) if bands else not bias.bands


def test_runs_that_are_close_are_one():
    mixed = torch.zeros(80, dtype=torch.bool)
    mixed[[3, 4, 10, 60]] = True
    assert curve._runs(mixed) == [(3, 11), (60, 61)]
    assert curve._runs(mixed[:3]) == []


def test_the_last_row_of_a_curve():
    """By pieces as by the network, for rows of a batch with their own positions; not where x is beyond the pieces."""
    fire = trained("fire:init_L=30", 0, 2.0)
    at = torch.arange(77.0)[None] + torch.tensor([[0.0], [9.0]])
    pos = Positions(at[:, -1:], at)
    form = fire.form(pos)
    pieces = form.pieces(1.0)
    row = last_row(form, pieces, 1.0)
    assert isinstance(row, Dense) and row.bias.shape == (2, 4, 1, 77)
    torch.testing.assert_close(row.bias, block(form, pos), rtol=1e-5, atol=1e-5)
    assert last_row(form, pieces, 0.5) is form


@pytest.mark.parametrize("spec", ["xpos", "xpos:scale_base=16"])
@pytest.mark.parametrize("key", [False, True])
def test_pairs_as_complex_numbers(spec, key):
    """float32 numbers in any layout, against float64 ones, which are turned pair by pair; gradients too."""
    encoding, pos = build(spec, H, H * D), Positions.arange(21)
    x = torch.randn(B, H, 21, D + 1)
    whole = x[..., :D]
    for laid in (whole.contiguous(), whole, x[..., 1:], whole.transpose(1, 2).contiguous().transpose(1, 2)):
        found = []
        for own in (laid.detach().requires_grad_(), laid.detach().double().requires_grad_()):
            out = encoding.rotate(own, pos.k, pos, key=key)
            found.append((out, torch.autograd.grad(out.square().sum(), own)[0]))
        for a, b in zip(*found, strict=True):
            assert a.dtype == torch.float32
            torch.testing.assert_close(a.double(), b, rtol=1e-5, atol=1e-5)
