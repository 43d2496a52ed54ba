"""The flex backend against the reference: every form, lengths, padding, cached keys; gradients."""

import math

import pytest
import torch
from conftest import DEVICE, make_model
from specs import ALL_SPECS
from torch._dynamo.utils import counters
from torch.nn.attention import flex_attention as torch_flex
from torch.nn.attention.flex_attention import create_block_mask

from fairseq_rpe.attention import Plan, check_training, reference
from fairseq_rpe.attention import flex as backend
from fairseq_rpe.attention.flex import KEPT_MASKS, _block_mask, _causal_mask, flex, score_mod
from fairseq_rpe.core import Curve, Dense, Pair, Pieces, Pointwise, Positions, Toeplitz, UserError, block
from fairseq_rpe.encodings import DistanceBias, build
from fairseq_rpe.encodings.alibi import Alibi

H, D = 4, 16
BIASES = [s for s in ALL_SPECS if build(s, H, H * D, 64).form(Positions.arange(3)) is not None]
DISTANCES = [s for s in BIASES if isinstance(made := build(s, H, H * D, 64), DistanceBias) and made.positions == "any"]
ON_CPU = pytest.mark.skipif(DEVICE == "cuda", reason="the CPU's part")


def test_what_trains_on_which_device():
    for name in ("auto", "reference", "sdpa"):
        check_training(name, "cpu")
    check_training("flex", "cuda")
    with pytest.raises(UserError, match="--attention-backend flex: .*no backward pass on the CPU: use 'sdpa'"):
        check_training("flex", "cpu")


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
    torch._dynamo.reset()  # it keeps what earlier tests of this process compiled, up to a limit, and then refuses more
    with torch.no_grad():
        yield


@pytest.mark.parametrize("spec", ["nope", *BIASES])
def test_equals_reference(spec):
    """Odd lengths of one block and of two, padding, and few queries against more keys."""
    if DEVICE == "cuda" and ("exact" in spec or "gelu" in spec):
        pytest.skip("refused on a GPU")
    encoding = build(spec, H, H * D, 131).to(DEVICE)
    for n, m, padding in ((37, 37, None), (131, 131, left_padding(131)), (5, 41, left_padding(41)), (1, 33, None)):
        pos = Positions.arange(n, m, device=DEVICE)
        assert_same(Plan(pos, encoding.form(pos), padding), *inputs(n, m))


@pytest.mark.parametrize("spec", ["nope", *BIASES])
def test_bfloat16(spec):
    """Inputs of 8 bits; a difference is one rounding of the output."""
    if DEVICE == "cuda" and ("exact" in spec or "gelu" in spec):
        pytest.skip("refused on a GPU")
    pos = Positions.arange(70, device=DEVICE)
    plan = Plan(pos, build(spec, H, H * D, 70).to(DEVICE).form(pos), left_padding(70))
    a, b = (attend(*inputs(70, dtype=torch.bfloat16), plan) for attend in (reference, flex))
    assert a.dtype == b.dtype == torch.bfloat16
    assert (a - b).float().square().mean().sqrt() <= 1e-3 * a.abs().max().item()


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


def warped(n, m=None):
    """Spacing of any kind, of two rows."""
    at = torch.arange(float(m or n), device=DEVICE) ** torch.tensor([[0.9], [0.7]], device=DEVICE)
    return Positions(at[:, -n:], at, None, False)


@pytest.mark.parametrize("spec", DISTANCES)
def test_distances_at_warped_positions(spec):
    """A function of both positions instead of a table, worked out for one head and pair at a time."""
    encoding = build(spec, H, H * D, 64).to(DEVICE)
    for n, m, padding in ((37, None, None), (5, 41, left_padding(41))):
        pos = warped(n, m)
        form = encoding.form(pos)
        assert isinstance(form, Pointwise)
        assert_same(Plan(pos, form, padding), *inputs(n, m))


@ON_CPU
def test_functions_that_no_gpu_compiles():
    pos = warped(37)
    form = build("fire", H, H * D, 64).form(pos)
    assert type(form) is Pair
    assert_same(Plan(pos, form), *inputs(37))
    assert_same(Plan(pos, Pair(lambda i, j, w: (w * (i[:, :, None] - j[:, None]))[:, None].expand(-1, H, -1, -1),
                               (torch.tensor(0.1),))), *inputs(37))  # fmt: skip


def test_an_encoding_that_says_its_bias_for_all_heads_at_once_has_no_scalar_form():
    class Own(Alibi):
        def bias(self, d):
            return -d.expand(self.heads, -1)

    own = Own(Alibi.Config(), H, H * D)
    assert type(own.form(warped(7))) is Pair
    assert block(own.form(warped(7)), warped(7))[0, :, 3, 1].tolist() == pytest.approx([1 - 3**0.9] * H)


@pytest.mark.parametrize("close", [False, True])
def test_pieces_are_found(close):
    """The piece that a curve's line comes from, for kinks apart and for more of them together than are compared."""
    ends = torch.linspace(0.01, 0.99, 60)
    if close:
        ends = torch.cat([ends, 0.5 + torch.arange(1, 12) * 6e-8 * 2]).sort().values
    count = len(ends) + 1
    pieces = Pieces(ends, torch.zeros(count), torch.arange(float(count)).expand(H, -1), torch.zeros(H, count))
    x = torch.cat([ends, ends.nextafter(torch.tensor(0.0)), torch.linspace(0, 1, 999), torch.tensor([0.0, 1.0, 1e9])])
    form = Curve(None, far=x, near=torch.ones(1, len(x)), pieces=lambda top: pieces)
    add = score_mod(Plan(Positions.arange(len(x)), form), 1)
    i, zero = torch.arange(len(x)), torch.zeros((), dtype=torch.long)
    assert torch.equal(add(torch.zeros(len(x)), zero, zero, i, zero).long(), torch.bucketize(x, ends, right=True))


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


@pytest.mark.parametrize(
    ("spec", "where"),
    [("alibi", Positions.arange), ("kerple_log", warped), ("window:window=9", warped), ("fire", Positions.arange)],
)
def test_new_lengths_and_layers_do_not_compile_again(spec, where):
    """Nor batches as large as the number of blocks, nor another number of kinks."""

    def attend(n, batch=2, seed=0):
        torch.manual_seed(seed)
        encoding = build(spec, H, H * D).to(DEVICE)
        pos = where(n) if where is warped else where(n, device=DEVICE)
        flex(*inputs(n, batch=batch), Plan(pos, encoding.form(pos)))

    attend(140)
    before = counters["stats"]["unique_graphs"]
    for seed, n in enumerate((145, 200, 333, 417)):
        attend(n, seed=seed)
    if where is not warped:
        attend(300, batch=3)
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
    with pytest.raises(UserError, match="no attention dropout, and 0.1 was asked for: set it to 0 or use 'sdpa'"):
        flex(q, k, v, plan, 0.1)
    with pytest.raises(UserError, match="needs all scores of a query, which backend 'flex' never holds: use 'sdpa'"):
        flex(q, k, v, Plan(plan.positions, remap=lambda scores, q, pos: scores))


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


class Given(torch.nn.Module):
    """A bias for every pair, itself the parameter."""

    def __init__(self):
        super().__init__()
        self.bias = torch.nn.Parameter(torch.randn(1, H, 131, 131))

    def form(self, pos):
        return Dense(self.bias.transpose(2, 3))


@pytest.fixture
def backward(monkeypatch):
    """FlexAttention's backward pass, on the CPU too: torch refuses it there, but has its formula with n² matrices."""
    if DEVICE == "cpu":
        monkeypatch.setattr(torch_flex, "_validate_device", lambda q, k, v: None)
        monkeypatch.setattr(backend, "refusal", lambda q, k, v, plan, dropout: None)
        compiled = torch.compile(torch_flex.flex_attention, dynamic=True, fullgraph=True, backend="aot_eager")
        monkeypatch.setattr(backend, "_compiled", lambda device: compiled)


@pytest.mark.parametrize(
    ("spec", "where"),
    [
        *((s, "even") for s in ("nope", "kerple_log", "t5_bias", "fire", "given")),
        *((s, "warped") for s in ("kerple_log", "kerple_power")),
    ],
)
def test_gradients(backward, spec, where):
    padding, results = left_padding(131), []
    at = (torch.arange(131.0, device=DEVICE) - padding.sum(1, keepdim=True)).clamp_min(0)
    pos = warped(131) if where == "warped" else Positions(at, at)
    for attend in (reference, flex):
        torch.manual_seed(1)
        with torch.enable_grad():
            encoding = Given().to(DEVICE) if spec == "given" else build(spec, H, H * D).to(DEVICE)
            q, k, v = (x.requires_grad_() for x in inputs(131))
            attend(q, k, v, Plan(pos, encoding.form(pos), padding)).square().sum().backward()
        results.append([q.grad, k.grad, v.grad, *(p.grad for p in encoding.parameters())])
    for a, b in zip(*results, strict=True):
        assert (a - b).abs().max() <= (1e-4 if DEVICE == "cpu" else 1e-3) * max(1.0, a.abs().max().item())
        assert b.any()
