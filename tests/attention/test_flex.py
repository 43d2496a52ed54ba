"""The flex backend against the reference: every form, lengths, padding, documents, cached keys; gradients."""

import math

import pytest
import torch
from calls import B, D, H, compare, in_documents, left_padding, outcome, padded, skipping, table, warped
from conftest import DEVICE, make_model
from refusal import refused
from specs import ALL_SPECS
from torch._dynamo.utils import counters
from torch._subclasses import FakeTensorMode
from torch.nn.attention import flex_attention as torch_flex
from torch.nn.attention.flex_attention import create_block_mask

from fairseq_rpe.attention import BACKENDS, AttentionPlan, check_training, reference
from fairseq_rpe.attention import flex as backend
from fairseq_rpe.attention.flex import CACHED_MASKS, _block_mask, _causal_mask, _mask, flex, score_mod
from fairseq_rpe.attention.forward import build_plan, positions_from_documents
from fairseq_rpe.core import (
    DenseBias,
    PairBias,
    PiecewiseLinear,
    PointwiseBias,
    Positions,
    ScaledDistanceBias,
    ToeplitzBias,
)
from fairseq_rpe.encodings import DistanceBias, build
from fairseq_rpe.encodings.alibi import Alibi

DISTANCES = [
    s for s in ALL_SPECS if isinstance(made := build(s, H, H * D, 64), DistanceBias) and made.position_type == "any"
]
ON_CPU = pytest.mark.skipif(DEVICE == "cuda", reason="the CPU's part")
GELU = "fire:hidden_layers=1,threshold=fixed,init_L=9,activation=gelu,output_activation=relu"


def release(spec, call):
    return pytest.param(spec, call, marks=pytest.mark.release)


# every kind of bias (none, tables, curves, functions of two positions, those of the tokens) and every kind of call
CALLS = [
    *((spec, in_documents(301)) for spec in ("kerple_log", "forgetting")),
    ("tupe", padded(131)),
    ("grape_a:gate=both", padded(131)),
    ("pairwise_forgetting", padded(5, 41)),
    ("t5_bias", {"n": 1, "m": 33}),
    ("fire", padded(70) | {"dtype": torch.bfloat16}),
    (table(20, 2, 0.5), skipping(3, 33, start=0.25)),
    pytest.param("fire", {"n": 37, "pos": warped(37)}, marks=ON_CPU),
    pytest.param("fire:exact=true", {"n": 37}, marks=[ON_CPU, pytest.mark.release]),
    # each of these again in the other calls
    *(
        release(spec, in_documents(301))
        for spec in ("nope", "fire", "deberta", "shaw:max_distance=5", "transformer_xl")
    ),
    release("music:max_distance=9", padded(5, 41)),
    release("type1", {"n": 5, "m": 41, "pos": warped(5, 41), "padding": left_padding(41)}),
    *(release(spec, padded(131)) for spec in ("kerple_log", "fire", "deberta", "window:window=5")),
    *(release(spec, padded(5, 41)) for spec in ("alibi", "fire", "shaw:max_distance=5")),
    *(release("kerple_log", {"n": 37, "dtype": dtype}) for dtype in (torch.float16, torch.float64)),
    *(release(spec, {"n": 1, "m": 33}) for spec in ("nope", GELU)),
    release("kerple_log", padded(70) | {"dtype": torch.bfloat16}),
    release(table(20, 2), {"n": 33}),
    release("kerple_power", {"n": 37, "pos": warped(37)}),
]


@pytest.fixture(autouse=True)
def evaluation():
    torch._dynamo.reset()  # it keeps what earlier tests of this process compiled, up to a limit, and then refuses more
    with torch.no_grad():
        yield


@pytest.mark.parametrize(("spec", "call"), CALLS)
def test_equals_the_reference(spec, call):
    if DEVICE == "cuda" and call.get("dtype") == torch.float64:
        pytest.skip("refused on a GPU")
    rounding = {torch.bfloat16: 1e-2, torch.float16: 2e-3}.get(call.get("dtype"), 3e-5)
    compare("flex", spec, rounding, **call, grads=False)


def dense(device):
    torch.manual_seed(0)
    made = torch.randn(B, H, 131, 131).to(device).requires_grad_()
    return made, DenseBias(made.transpose(2, 3))


@pytest.fixture
def backward(monkeypatch):
    """FlexAttention's backward pass, on the CPU too: torch refuses it there, but has its formula with n² matrices."""
    if DEVICE == "cpu":
        monkeypatch.setattr(torch_flex, "_validate_device", lambda q, k, v: None)
        monkeypatch.setattr(backend, "refusal_reason", lambda q, k, v, plan, dropout: None)
        compiled = torch.compile(torch_flex.flex_attention, dynamic=True, fullgraph=True, backend="aot_eager")
        monkeypatch.setattr(backend, "_compile_for", lambda device: compiled)


@pytest.mark.parametrize(
    ("spec", "call"),
    [
        ("fire", padded(131)),
        release("kerple_log", padded(131)),
        release("kerple_power", {"n": 131, "pos": warped(131), "padding": left_padding(131)}),
        release(dense, {"n": 131, "padding": left_padding(131)}),
        release("t5_bias", padded(131)),
        release("nope", padded(131)),
        release("grape_a:gate=both", padded(131)),
    ],
)
def test_gradients(backward, spec, call):
    found = compare("flex", spec, 1e-4 if DEVICE == "cpu" else 1e-3, **call)
    assert all(x.any() for x in found.values())


@pytest.mark.parametrize("spec", DISTANCES)
def test_distances_at_warped_positions(spec):
    """A function of both positions instead of a table, worked out for one head and pair at a time."""
    pos, h, i = warped(37), torch.arange(H, device=DEVICE)[:, None, None], torch.arange(37, device=DEVICE)
    form = build(spec, H, H * D, 64).to(DEVICE).position_bias(pos)
    assert isinstance(form, PointwiseBias)
    zero = torch.zeros((), dtype=torch.long, device=DEVICE)
    pairs = score_mod(AttentionPlan(pos, form), B)(torch.zeros(H, 37, 37, device=DEVICE), zero, h, i[:, None], i)
    a, b = (x.masked_fill(i > i[:, None], 0.0) for x in (form.materialize(pos)[0], pairs))
    torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-5)


@ON_CPU
def test_functions_that_no_gpu_compiles():
    def products(i, j, w):
        return (w * (i[:, :, None] - j[:, None]))[:, None].expand(-1, H, -1, -1)

    def learned(device):
        number = torch.tensor(0.1, requires_grad=True)
        return number, PairBias(products, (number,))

    assert type(build("fire", H, H * D, 64).position_bias(warped(37))) is PairBias
    compare("flex", learned, n=37, pos=warped(37), grads=False)


def test_an_encoding_that_says_its_bias_for_all_heads_at_once_has_no_scalar_form():
    class Own(Alibi):
        def bias(self, d):
            return -d.expand(self.heads, -1)

    own = Own(Alibi.Config(), H, H * D)
    assert type(own.position_bias(warped(7))) is PairBias
    assert own.position_bias(warped(7)).materialize(warped(7))[0, :, 3, 1].tolist() == pytest.approx([1 - 3**0.9] * H)


@pytest.mark.parametrize("close", [False, True])
def test_pieces_are_found(close):
    """The piece that a curve's line comes from, for kinks apart and for more of them together than are compared."""
    ends = torch.linspace(0.01, 0.99, 60)
    if close:
        ends = torch.cat([ends, 0.5 + torch.arange(1, 12) * 6e-8 * 2]).sort().values
    count = len(ends) + 1
    pieces = PiecewiseLinear(ends, torch.zeros(count), torch.arange(float(count)).expand(H, -1), torch.zeros(H, count))
    x = torch.cat([ends, ends.nextafter(torch.tensor(0.0)), torch.linspace(0, 1, 999), torch.tensor([0.0, 1.0, 1e9])])
    form = ScaledDistanceBias(
        None, distance_values=x, query_scale=torch.ones(1, len(x)), make_pieces=lambda top: pieces
    )
    add = score_mod(AttentionPlan(Positions.arange(len(x)), form), 1)
    i, zero = torch.arange(len(x)), torch.zeros((), dtype=torch.long)
    assert torch.equal(add(torch.zeros(len(x)), zero, zero, i, zero).long(), torch.bucketize(x, ends, right=True))


def inputs(n):
    torch.manual_seed(0)
    return tuple(torch.randn(B, H, n, D).to(DEVICE) for _ in range(3))


def test_rows_that_see_nothing_give_zero():
    padding, pos = left_padding(37, 5).to(DEVICE), Positions.arange(37, device=DEVICE)
    padding[1] = True
    out = flex(*inputs(37), AttentionPlan(pos, build("alibi", H, H * D).to(DEVICE).position_bias(pos), padding))
    assert not out[0, :, :5].any() and not out[1].any() and out[0, :, 5:].abs().amin() > 0


@pytest.mark.parametrize("argument", [0, 1])
def test_nan_in_queries_or_keys_propagates(argument):
    qkv, plan = inputs(35), AttentionPlan(Positions.arange(35, device=DEVICE))
    qkv[argument][0, 1, 20, 0] = math.nan
    a, b = reference(*qkv, plan), flex(*qkv, plan)
    torch.testing.assert_close(a, b, rtol=1e-4, atol=2e-5, equal_nan=True)
    assert b[0, 1, 20].isnan().all() and not b[0, 1, :20].isnan().any()


# Masks and compilations


@pytest.mark.parametrize(("n", "m"), [(1, 1), (256, 256), (300, 300), (1, 300), (130, 391), (128, 384)])
def test_block_mask_in_closed_form(n, m):
    """The blocks that torch finds by looking at every pair."""

    def visible(b, h, i, j):
        return j <= i + m - n

    ours = _block_mask(n, m, torch.device("cpu"), visible, skip_mask_below=True)
    theirs = create_block_mask(visible, None, None, n, m, device="cpu")
    assert torch.equal(ours.to_dense(), theirs.to_dense()) and ours.shape == theirs.shape
    assert torch.equal(ours.full_kv_num_blocks, theirs.full_kv_num_blocks)
    for row in range(ours.kv_num_blocks.shape[-1]):
        some, full = ours.kv_num_blocks[0, 0, row], ours.full_kv_num_blocks[0, 0, row]
        assert set(ours.kv_indices[0, 0, row, :some].tolist()) == set(theirs.kv_indices[0, 0, row, :some].tolist())
        assert ours.full_kv_indices[0, 0, row, :full].tolist() == list(range(full))
    assert _block_mask(n, m, torch.device("cpu"), visible, skip_mask_below=False).full_kv_num_blocks.sum() == 0


def test_blocks_of_other_documents_are_left_out():
    n, q = 512, torch.zeros(1, 1, 512, D)
    pos, last_query = positions_from_documents(torch.tensor([[0] * 200 + [1] * 312]))
    mask = _mask(build_plan(build("nope", H, H * D), pos, None, BACKENDS["flex"], last_query=last_query), q, q)
    seen = [sorted(mask.kv_indices[0, 0, i, : mask.kv_num_blocks[0, 0, i]].tolist()) for i in range(n // 128)]
    assert seen == [[0], [0, 1], [1, 2], [1, 2, 3]]


def test_masks_are_kept_and_bounded():
    device = torch.device(DEVICE)
    assert _causal_mask(40, 40, device) is _causal_mask(40, 40, device)
    for n in range(1, CACHED_MASKS + 10):
        _causal_mask(n, n, device)
    assert _causal_mask.cache_info().currsize == CACHED_MASKS


@pytest.mark.parametrize(("spec", "even"), [("kerple_log", True), ("fire", True), release("kerple_log", False)])
def test_new_lengths_and_layers_do_not_compile_again(spec, even):
    """Nor batches as large as the number of blocks, nor another number of kinks."""

    def attend(n, rows=B, seed=0):
        torch.manual_seed(seed)
        pos = Positions.arange(n, device=DEVICE) if even else warped(n)
        q = torch.randn(rows, H, n, D, device=DEVICE)
        flex(q, q, q, AttentionPlan(pos, build(spec, H, H * D).to(DEVICE).position_bias(pos)))

    attend(140)
    before = counters["stats"]["unique_graphs"]
    for seed, n in enumerate((145, 200, 333, 417)):
        attend(n, seed=seed)
    if even:
        attend(300, rows=3)
    assert counters["stats"]["unique_graphs"] == before


# Refusals


def test_what_trains_on_which_device():
    for name, device in (("auto", "cpu"), ("reference", "cpu"), ("sdpa", "cpu"), ("flex", "cuda")):
        check_training(name, device)
    with refused("--attention-backend flex: .*no backward pass on the CPU: use 'sdpa'"):
        check_training("flex", "cpu")


@ON_CPU
def test_refusals():
    (q, k, v), plan = inputs(5), AttentionPlan(Positions.arange(5))
    with torch.enable_grad():
        for own, form in (
            (q.clone().requires_grad_(), None),
            (q, ToeplitzBias(torch.zeros(H, 5, requires_grad=True))),
            (q, build("fire", H, H * D).position_bias(plan.positions)),
        ):
            with refused("no backward pass on the CPU: use 'sdpa'"):
                flex(own, k, v, AttentionPlan(plan.positions, form))
    with refused("no attention dropout, and 0.1 .*: set it to 0 or use 'sdpa'"):
        flex(q, k, v, plan, 0.1)
    with refused("needs all scores of a query, which backend 'flex' never holds: use 'sdpa'"):
        flex(q, k, v, AttentionPlan(plan.positions, transform_scores=lambda scores, q, pos: scores))
    for spec, words in (
        ("huang:method=3,max_distance=5", "backend 'flex' has no products .*: use 'sdpa'"),
        ("music:max_distance=1200", "table of at most 1,024 distances, and this one has 1,201: use 'sdpa'"),
    ):
        with refused(words):
            outcome("flex", spec, 3, grads=False)


@pytest.mark.parametrize(
    ("width", "dtype", "form", "words"),
    [
        (8, torch.float32, None, "head widths from 16 to 256 on a GPU, not 8: use 'sdpa'"),
        (264, torch.float32, None, "not 264"),
        (16, torch.float64, None, "not torch.float64: use 'sdpa'"),
        (16, torch.float32, PairBias(lambda i, j: i), "not this function of two positions: use 'sdpa'"),
    ],
)
def test_refusals_on_a_gpu(width, dtype, form, words):
    """Decisions need no GPU, only tensors that say they are on one."""
    with FakeTensorMode():
        q = torch.zeros(1, H, 4, width, device="cuda", dtype=dtype)
        with refused(words):
            flex(q, q, q, AttentionPlan(Positions.arange(4), form))


def test_whole_model(task):
    tokens = torch.randint(4, 60, (2, 21), generator=torch.Generator().manual_seed(0)).to(DEVICE)
    tokens[0, :3] = 1  # padding
    sizes = {"decoder_embed_dim": 64, "decoder_attention_heads": 4}
    models = (make_model(task, "kerple_log", attention_backend=name, **sizes).to(DEVICE) for name in ("sdpa", "flex"))
    a, b = (model(tokens)[0][tokens.ne(1)] for model in models)
    torch.testing.assert_close(a, b, rtol=1e-4, atol=2e-5)
