"""The sdpa backend against the reference: outputs and all gradients for every kind of encoding and of call."""

import importlib
import math
from functools import partial

import calls
import pytest
import torch
from calls import (
    INPUTS,
    Largest,
    assert_same,
    buffers_of_nan,
    in_documents,
    left_padding,
    padded,
    skipping,
    table,
    warped,
)
from specs import capabilities, representatives
from torch.nn import functional as F

from fairseq_rpe.attention import (
    BACKENDS,
    AttentionPlan,
    auto,
    choose_backend,
    content_bias,
    reference,
    sdpa,
    toeplitz_attention,
)
from fairseq_rpe.attention.dropout import ROWS, keep_block
from fairseq_rpe.attention.forward import positions_from_padding
from fairseq_rpe.core import DenseBias, Positions, ToeplitzBias, UserError
from fairseq_rpe.encodings import build

B, H, D = 2, 4, 16
outcome = partial(calls.outcome, device="cpu")
compare = partial(calls.compare, "sdpa", device="cpu")
SDPA = importlib.import_module("fairseq_rpe.attention.sdpa")
# one of each combination of capabilities, and of each other form that scores of the tokens have
SPECS = [*representatives(), "window:window=5", "fire:exact=true", "transformer_xl", "huang:method=3,max_distance=7"]
SPECS += ["deberta:max_distance=9,p2c=paper", "cope:scale_on=content", "dape:base=fire", "music:out_of_range=clip"]


def padding_on_both_sides(n: int) -> dict:
    """Row 0 begins with three pads, row 1 ends with two and has others in its middle."""
    padding = left_padding(n)
    padding[1, n - 2 :], padding[1, n // 3 : n // 3 + 10] = True, True
    pos, hidden = positions_from_padding(padding, n, False)
    return {"n": n, "pos": pos, "padding": hidden}


# lengths shorter than a block, of several blocks, and no multiple of a block, for each kind of call
CALLS = {
    "one token": {"n": 1},
    "short": {"n": 7},
    "long": {"n": 301},
    "dropout": {"n": 301, "dropout": 0.3},
    "padding": padding_on_both_sides(140),
    "padding and dropout": padded(131) | {"dropout": 0.3},
    "gaps": skipping(45),
    "gaps of unknown spacing": skipping(45, step=None),
    "one query": padded(1, 150),
    "last queries": {"n": 140, "m": 150},
    "documents": in_documents(301),
    "bf16": {"n": 131, "dtype": torch.bfloat16},
    "padding in bf16": padded(131) | {"dtype": torch.bfloat16},
    "documents in bf16": in_documents(37) | {"dtype": torch.bfloat16},
}


@pytest.fixture
def small_blocks(monkeypatch):
    """Blocks of 16 queries, with dropout 128, of what depends on pairs or tokens."""
    monkeypatch.setattr(content_bias, "ELEMENTS", 1)
    monkeypatch.setattr(SDPA, "PAIR_ELEMENTS", 1)


# every other call of each spec, and every other spec of each call; before a release all of them
COMBINATIONS = [
    pytest.param(spec, call, marks=pytest.mark.release if (i + j) % 2 else ())
    for i, spec in enumerate(SPECS)
    for j, call in enumerate(CALLS)
]


@pytest.mark.parametrize(("spec", "call"), COMBINATIONS)
def test_equals_the_reference(spec, call, small_blocks):
    if "documents" in call and capabilities(spec)["length_dependent"]:
        pytest.skip("documents do not share rows")
    if capabilities(spec)["has_key_state"] and call in ("one query", "last queries"):
        pytest.skip("earlier queries leave a state: see test_score_transforms")
    # the gradient of FIRE's last layer sums over all pairs terms that cancel
    tolerance = 0.03 if "bf16" in call else 1e-4 if "fire" in spec or call == "documents" else 2e-5
    compare(spec, tolerance, **CALLS[call])


@pytest.mark.parametrize("spec", ["alibi", "kerple_log", "fire"])
def test_many_blocks(spec, monkeypatch):
    """523 rows span three blocks of the Toeplitz path and, with small blocks, five of the general one."""
    monkeypatch.setattr(SDPA, "PAIR_ELEMENTS", 1)
    for call in ({"n": 523}, padded(523)):
        compare(spec, 1e-4 if spec == "fire" else 2e-5, **call, dropout=0.1)


@pytest.mark.parametrize("spec", ["kerple_log", "kerple_power", "t5_bias:init_std=1"])
@pytest.mark.parametrize("dropout", [0.0, 0.1])
def test_gradients_of_a_table_in_bf16(spec, dropout):
    """Sums of n² terms, which would show a rounded output: root mean square error within 2e-4 of the largest value."""
    a, b = (outcome(x, spec, 131, dtype=torch.bfloat16, dropout=dropout) for x in ("reference", "sdpa"))
    for name in a.keys() - set(INPUTS):
        assert (a[name] - b[name]).square().mean().sqrt() <= 2e-4 * a[name].abs().max(), name


@pytest.mark.parametrize("call", [{"n": 20}, {"n": 21, "pos": Positions(*[torch.arange(21)[None] / 2] * 2, 0.5)}])
@pytest.mark.parametrize("columns", [5, 12])
def test_tables_of_other_lengths_and_steps(columns, call):
    """Beyond its end a table repeats its last column; tokens half a position apart share one, two by two."""
    compare(table(columns), **call)


def test_dense_form_and_float64():
    def dense(device):
        torch.manual_seed(0)
        bias = torch.randn(B, 2, 33, 33, dtype=torch.float64, requires_grad=True)
        return bias, DenseBias(bias)

    compare(dense, 1e-10, n=33, dtype=torch.float64)


def test_reference_is_the_formula():
    """Against scaled_dot_product_attention with a bias written out by hand."""
    torch.manual_seed(0)
    n = 19
    q, k, v = (torch.randn(B, H, n, D) for _ in range(3))
    slopes = torch.tensor([2.0 ** (-2 * h) for h in range(1, 5)])
    i, j = torch.arange(n)[:, None], torch.arange(n)[None]
    bias = (-slopes[:, None, None] * (i - j)).masked_fill(j > i, -math.inf)
    pos = Positions.arange(n)
    got = reference(q, k, v, AttentionPlan(pos, build("alibi", H, H * D).position_bias(pos)))
    torch.testing.assert_close(got, F.scaled_dot_product_attention(q, k, v, attn_mask=bias[None]), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("spec", ["alibi", "kerple_log", "fire"])
@pytest.mark.parametrize("n", [257, 300])
def test_every_output_element_is_written(spec, n):
    with buffers_of_nan():
        found = outcome("sdpa", spec, n)
    assert all(torch.isfinite(x).all() for x in found.values())


@pytest.mark.parametrize("attend", [reference, sdpa])
def test_rows_that_see_nothing_give_zero(attend):
    call = padded(9)
    q, k, v = (torch.randn(B, H, 9, D) for _ in range(3))
    out = attend(
        q, k, v, AttentionPlan(call["pos"], build("alibi", H, H * D).position_bias(call["pos"]), call["padding"])
    )
    assert not out[0, :, :3].any() and out[0, :, 3:].abs().amin() > 0


@pytest.mark.parametrize(("spec", "n"), [("kerple_log", 4096), ("fire", 3000)])
def test_memory_grows_linearly(spec, n):
    """Nothing of a quarter of n² numbers is ever allocated, forward or backward, for a learned bias."""
    with Largest() as largest:
        found = outcome("sdpa", spec, n, rows=1, heads=1, width=8)
    assert 0 < largest.bytes < 4 * n * n / (8 if spec == "kerple_log" else 4)
    assert len(found) > 4


def test_dropout_mask_is_reproducible_and_unbiased():
    shape = (2, 3, 400, 400)
    whole = keep_block(5, 0, 400, shape, 0.25, torch.device("cpu"))
    part = keep_block(5, ROWS, 300, shape, 0.25, torch.device("cpu"))
    assert torch.equal(part, whole[:, :, ROWS:300, :300])
    kept = whole[:, :, torch.ones(400, 400).tril().bool()]
    assert kept.unique().tolist() == pytest.approx([0.0, 1 / 0.75])
    assert kept.mean().item() == pytest.approx(1.0, abs=0.01)
    assert not torch.equal(whole, keep_block(6, 0, 400, shape, 0.25, torch.device("cpu")))


def test_choose():
    assert choose_backend("auto") is auto
    assert choose_backend("sdpa").attend is sdpa and choose_backend("reference").attend is reference
    assert [name for name, backend in BACKENDS.items() if backend.supports_pruning] == ["sdpa", "triton"]
    with pytest.raises(UserError, match="unknown attention backend 'sdap'.*did you mean 'sdpa'"):
        choose_backend("sdap")


def test_changed_scores():
    q, k, v = (torch.randn(1, 1, 6, 4) for _ in range(3))
    plan = AttentionPlan(Positions.arange(6), transform_scores=lambda scores, q, pos: torch.zeros_like(scores))
    mean = v.cumsum(2) / torch.arange(1, 7)[:, None]
    for attend in (reference, sdpa):
        torch.testing.assert_close(attend(q, k, v, plan), mean)


@pytest.mark.parametrize("dtype, tolerance", [(torch.float32, 2e-5), (torch.bfloat16, 0.02)])
@pytest.mark.parametrize("spec", ["alibi", "kerple_log"])
def test_far_keys_apart(spec, dtype, tolerance, monkeypatch):
    """1101 tokens in parts of 512 rows: the keys before a part are one call, those in it a few; the last not full."""
    calls, plain = [], toeplitz_attention.flash_attention

    def flash(q, k, *args, **named):
        calls.append((q.shape[2], k.shape[2]))
        return plain(q, k, *args, **named)

    monkeypatch.setattr(toeplitz_attention, "flash_attention", flash)
    monkeypatch.setattr(toeplitz_attention, "FAR_ROWS", 512)
    compare(spec, tolerance, n=1101, dtype=dtype)
    near = [(256, 256), (256, 512)]
    assert sorted(set(calls)) == sorted({*near, (512, 512), (77, 77), (77, 1024)})


def test_far_keys_that_a_table_hides(monkeypatch):
    """No query sees further than 100 tokens, nor distances 3 and 5: queries that see nothing of the far keys."""
    monkeypatch.setattr(toeplitz_attention, "FAR_ROWS", 512)

    def holes(device):
        made, _ = table(1101)(device)
        hidden = torch.zeros_like(made, dtype=torch.bool)
        hidden[:, 100:] = hidden[:, [3, 5]] = True
        return made, ToeplitzBias(made.masked_fill(hidden, -math.inf))

    compare(holes, n=1101)


# Documents that share rows


@pytest.mark.parametrize("spec", ["nope", "kerple_log", "fire", "window:window=5"])
def test_long_rows_are_computed_document_by_document(spec, monkeypatch):
    """On a CPU: the bias is never a matrix of all pairs, in the forward pass or the backward one."""
    documents = torch.tensor([[0] + 170 * [1] + 130 * [2], 151 * [0] + 150 * [1]])
    expected = outcome("reference", spec, 301, documents=documents)
    monkeypatch.setattr(SDPA, "MIN_CURVE_TOKENS", 2)
    monkeypatch.setattr(SDPA, "_attend_in_blocks", None)
    monkeypatch.setattr(
        SDPA, "_attend_single_query", lambda q, k, v, plan, dropout: v
    )  # of one token, whose weight is 1
    assert_same(expected, outcome("sdpa", spec, 301, documents=documents), 1e-4)


@pytest.mark.parametrize("n", [37, 301])
def test_dropout_of_documents_is_the_references(n):
    compare("alibi", 3e-5, **in_documents(n), dropout=0.3)


def test_a_factor_for_each_distance_makes_no_products_for_each_element():
    """Method 1 multiplies scores: a number for each pair, in the forward and the backward pass."""
    with Largest() as largest:
        outcome("sdpa", "huang:method=1,max_distance=40", 64, rows=2, heads=4, width=8)
    assert largest.elements == 2 * 4 * 64 * 64


def test_warped_positions():
    for spec in ("alibi", "kerple_log", "fire"):
        compare(spec, n=45, pos=warped(45))
