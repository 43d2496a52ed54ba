"""The flex backend against the reference: every form, lengths, padding, cached keys; gradients where there is a GPU."""

from __future__ import annotations

import math

import pytest
import torch
from conftest import ALL_SPECS, DEVICE, make_model
from torch._dynamo.utils import counters
from torch.nn.attention.flex_attention import create_block_mask

from fairseq_rpe.attention import Plan, reference
from fairseq_rpe.attention.flex import KEPT_MASKS, _block_mask, _causal_mask, flex
from fairseq_rpe.core import Dense, Pair, Positions, Toeplitz, UserError
from fairseq_rpe.encodings import build

H, D = 4, 16
BIASES = [s for s in ALL_SPECS if build(s, H, H * D, 64).form(Positions.arange(3)) is not None]
ON_CPU = pytest.mark.skipif(DEVICE == "cuda", reason="the CPU's part")


def inputs(n, m=None, batch=2, dtype=torch.float32):
    torch.manual_seed(0)
    return tuple(torch.randn(batch, H, length, D).to(DEVICE, dtype) for length in (n, m or n, m or n))


def left_padding(m, pads=3):
    padding = torch.zeros(2, m, dtype=torch.bool, device=DEVICE)
    padding[0, :pads] = True
    return padding


def assert_same(plan, q, k, v, tolerance=2e-5):
    a, b = (attend(q, k, v, plan) for attend in (reference, flex))
    assert a.dtype == b.dtype
    assert (a - b).abs().max() <= tolerance * max(1.0, a.abs().max().item())
    return b


@pytest.fixture(autouse=True)
def evaluation():
    with torch.no_grad():
        yield


@pytest.mark.parametrize("spec", ["nope", *BIASES])
def test_equals_reference(spec):
    """Odd lengths of one block and of two, padding, and few queries against more keys."""
    if DEVICE == "cuda" and spec.startswith("fire"):
        pytest.skip("refused on a GPU")
    encoding = build(spec, H, H * D, 64).to(DEVICE)
    for n, m, padding in ((37, 37, None), (131, 131, left_padding(131)), (5, 41, left_padding(41)), (1, 33, None)):
        pos = Positions.arange(n, m, device=DEVICE)
        assert_same(Plan(pos, encoding.form(pos), padding), *inputs(n, m))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
def test_dtypes(dtype):
    if DEVICE == "cuda" and dtype == torch.float64:
        pytest.skip("refused on a GPU")
    pos = Positions.arange(70, device=DEVICE)
    plan = Plan(pos, build("kerple_log", H, H * D).to(DEVICE).form(pos))
    assert_same(plan, *inputs(70, dtype=dtype), 1e-3 if DEVICE == "cpu" else 1e-2)


def test_irregular_positions_tables_and_matrices():
    at = torch.cumsum(torch.randint(1, 4, (2, 33), generator=torch.Generator().manual_seed(3)), 1).to(DEVICE) + 0.25
    table = torch.randn(H, 20, device=DEVICE)
    assert_same(Plan(Positions(at[:, 30:], at, 1.0, False), Toeplitz(table, 2, 0.5)), *inputs(3, 33))
    assert_same(Plan(Positions.arange(33, device=DEVICE), Toeplitz(table, 2)), *inputs(33))
    assert_same(Plan(Positions.arange(33, device=DEVICE), Dense(torch.randn(1, H, 33, 33).to(DEVICE))), *inputs(33))


@ON_CPU
@pytest.mark.parametrize("spec", ["kerple_log", "fire"])
def test_warped_positions(spec):
    """Spacing of any kind: a function of both positions instead of a table."""
    at = torch.arange(37.0)[None] ** 0.9
    pos = Positions(at, at, None, False)
    form = build(spec, H, H * D, 64).form(pos)
    assert isinstance(form, Pair)
    assert_same(Plan(pos, form), *inputs(37))
    assert_same(Plan(pos, Pair(lambda i, j, w: (w * (i[:, :, None] - j[:, None]))[:, None].expand(-1, H, -1, -1),
                               (torch.tensor(0.1),))), *inputs(37))  # fmt: skip


def test_rows_that_see_nothing_give_zero():
    padding = left_padding(37, 5)
    padding[1] = True
    pos = Positions.arange(37, device=DEVICE)
    out = assert_same(Plan(pos, build("alibi", H, H * D).to(DEVICE).form(pos), padding), *inputs(37))
    assert not out[0, :, :5].any() and not out[1].any() and out[0, :, 5:].abs().amin() > 0


@pytest.mark.parametrize("what", ["q", "k"])
def test_bad_numbers_propagate(what):
    q, k, v = inputs(35)
    (q if what == "q" else k)[0, 1, 20, 0] = math.nan
    plan = Plan(Positions.arange(35, device=DEVICE))
    a, b = reference(q, k, v, plan), flex(q, k, v, plan)
    torch.testing.assert_close(a, b, rtol=1e-4, atol=2e-5, equal_nan=True)
    assert b[0, 1, 20].isnan().all() and not b[0, 1, :20].isnan().any()


@pytest.mark.parametrize(("n", "m"), [(1, 1), (70, 70), (256, 256), (300, 300), (1, 300), (130, 391), (128, 384)])
def test_block_mask_in_closed_form(n, m):
    """The blocks that torch finds by looking at every pair."""

    def visible(b, h, i, j):
        return j <= i + m - n

    ours = _block_mask(n, m, torch.device("cpu"), visible, whole=True)
    theirs = create_block_mask(visible, None, None, n, m, device="cpu")
    assert torch.equal(ours.to_dense(), theirs.to_dense()) and ours.shape == theirs.shape
    assert torch.equal(ours.full_kv_num_blocks, theirs.full_kv_num_blocks)
    for row in range(ours.kv_num_blocks.shape[-1]):
        some, full = ours.kv_num_blocks[0, 0, row], ours.full_kv_num_blocks[0, 0, row]
        assert set(ours.kv_indices[0, 0, row, :some].tolist()) == set(theirs.kv_indices[0, 0, row, :some].tolist())
        assert ours.full_kv_indices[0, 0, row, :full].tolist() == list(range(full))
    assert _block_mask(n, m, torch.device("cpu"), visible, whole=False).full_kv_num_blocks.sum() == 0


def test_masks_are_kept_and_bounded():
    device = torch.device(DEVICE)
    assert _causal_mask(40, 40, device) is _causal_mask(40, 40, device)
    for n in range(1, KEPT_MASKS + 10):
        _causal_mask(n, n, device)
    assert _causal_mask.cache_info().currsize == KEPT_MASKS


def test_new_lengths_do_not_compile_again():
    def attend(n):
        pos = Positions.arange(n, device=DEVICE)
        flex(*inputs(n), Plan(pos, build("alibi", H, H * D).to(DEVICE).form(pos)))

    attend(140)
    attend(150)
    before = counters["stats"]["unique_graphs"]
    for n in (145, 200, 333, 417):
        attend(n)
    assert counters["stats"]["unique_graphs"] == before


@ON_CPU
def test_refusals():
    q, k, v = inputs(5)
    plan = Plan(Positions.arange(5))
    with torch.enable_grad():
        with pytest.raises(UserError, match="no backward pass on the CPU: use 'sdpa'"):
            flex(q.requires_grad_(), k, v, plan)
        with pytest.raises(UserError, match="no backward pass on the CPU"):
            table = torch.zeros(H, 5, requires_grad=True)
            flex(q.detach(), k, v, Plan(plan.positions, Toeplitz(table)))
        with pytest.raises(UserError, match="no backward pass on the CPU"):
            flex(q.detach(), k, v, Plan(plan.positions, build("fire", H, H * D).form(plan.positions)))
    with pytest.raises(UserError, match="no attention dropout, and 0.1 is asked for: set it to 0 or use 'sdpa'"):
        flex(q, k, v, plan, 0.1)
    with pytest.raises(UserError, match="use 'reference'"):
        flex(q, k, v, Plan(plan.positions, remap=lambda scores, pos: scores))


@pytest.mark.parametrize(
    ("width", "dtype", "form", "message"),
    [
        (8, torch.float32, None, "head widths from 16 to 256 on a GPU, not 8: use 'sdpa'"),
        (264, torch.float32, None, "not 264"),
        (16, torch.float64, None, "not torch.float64: use 'sdpa'"),
        (16, torch.float32, Pair(lambda i, j: i), "not this function of two positions: use 'sdpa'"),
    ],
)
def test_refusals_on_a_gpu(width, dtype, form, message):
    """Decisions need no GPU, only tensors that say they are on one."""
    from torch._subclasses import FakeTensorMode

    with FakeTensorMode():
        q = torch.zeros(1, H, 4, width, device="cuda", dtype=dtype)
        with pytest.raises(UserError, match=message):
            flex(q, q, q, Plan(Positions.arange(4), form))


@pytest.mark.parametrize("spec", ["kerple_log", "rope"])
def test_whole_model(task, spec):
    tokens = torch.randint(4, 60, (2, 21), generator=torch.Generator().manual_seed(0)).to(DEVICE)
    tokens[0, :3] = 1  # padding
    sizes = {"decoder_embed_dim": 64, "decoder_attention_heads": 4}
    a, b = (
        make_model(task, spec, attention_backend=backend, **sizes).to(DEVICE)(tokens)[0][tokens.ne(1)]
        for backend in ("sdpa", "flex")
    )
    torch.testing.assert_close(a, b, rtol=1e-4, atol=2e-5)


@pytest.mark.skipif(DEVICE == "cpu", reason="needs a GPU")
@pytest.mark.parametrize("spec", ["nope", "kerple_log", "t5_bias"])
def test_gradients(spec):
    results = []
    for attend in (reference, flex):
        with torch.enable_grad():
            encoding = build(spec, H, H * D).to(DEVICE)
            q, k, v = (x.requires_grad_() for x in inputs(131))
            pos = Positions.arange(131, device=DEVICE)
            attend(q, k, v, Plan(pos, encoding.form(pos), left_padding(131))).square().sum().backward()
        results.append([q.grad, k.grad, v.grad, *(p.grad for p in encoding.parameters())])
    for a, b in zip(*results, strict=True):
        assert (a - b).abs().max() <= 1e-3 * max(1.0, a.abs().max().item())
