"""Short texts on a CPU, views along diagonals, skewed products, and pairs turned as complex numbers."""

import math

import pytest
import torch
from calls import INPUTS, assert_same, table
from test_sdpa import compare, outcome

from fairseq_rpe.attention import sdpa, toeplitz_attention
from fairseq_rpe.attention.forward import build_plan
from fairseq_rpe.attention.relative_shift import (
    along_diagonals,
    diagonal_sums,
    inverse_relative_shift,
    materialize_fast,
    relative_shift,
)
from fairseq_rpe.core import KeyTableBias, Positions, QueryTableBias, SumBias, ToeplitzBias
from fairseq_rpe.encodings import build

B, H, D = 2, 4, 16
SIZES = {"heads": H, "width": D}


@pytest.mark.parametrize("dropout", [0.0, 0.2])
@pytest.mark.parametrize("spec", ["nope", "alibi", "kerple_log"])
def test_short_texts(spec, dropout, monkeypatch):
    """Groups of several rows of the batch, of one row, and of single heads; the longest short text and the next."""
    for elements, lengths in ((1 << 18, (2, 61, 128, 129)), (5 * 61**2, (61,)), (1, (61, 128))):
        monkeypatch.setattr(toeplitz_attention, "DENSE_GROUP_ELEMENTS", elements)
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
    plan = build_plan(build(spec, H, 64), Positions.arange(61), None, "sdpa")
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
        return made, ToeplitzBias(hidden if learned else hidden.detach())

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


def test_skewing_is_the_papers():
    """Huang et al.: rows of X, of distances 2 1 0, shifted so that entry (i, j) is of distance i - j."""
    padded = torch.nn.functional.pad(torch.arange(9.0).view(1, 1, 3, 3), (1, 0))
    assert relative_shift(padded)[0, 0].tril().tolist() == [[2, 0, 0], [4, 5, 0], [6, 7, 8]]
    lower = torch.randn(2, 3, 5, 9).tril(4)
    assert torch.equal(relative_shift(torch.nn.functional.pad(inverse_relative_shift(lower), (1, 0))).tril(4), lower)


@pytest.mark.parametrize("rows", [1, 3, 9])
def test_quick_blocks(rows):
    pos, hidden = Positions.arange(rows, 9), torch.ones(rows, 9).triu(10 - rows).bool()
    for columns in (1, 2, 5, 9, 30):
        vectors = torch.randn(1, columns, 4)
        forms = QueryTableBias(torch.randn(2, 3, rows, 4), vectors), KeyTableBias(torch.randn(2, 3, 9, 4), vectors)
        for form in (*forms, SumBias(forms)):
            a, b = (x.masked_fill(hidden, 0.0) for x in (materialize_fast(form, pos), form.materialize(pos)))
            torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-5)


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
