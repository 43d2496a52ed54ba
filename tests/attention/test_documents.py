"""Documents that share rows: every backend against the reference, and all of it against each document alone."""

from __future__ import annotations

import importlib
import sys

import pytest
import torch
from conftest import DEVICE, VOCABULARY, make_model
from specs import ALL_SPECS, CONTENT_SPECS

from fairseq_rpe import RelativeAttention, attend
from fairseq_rpe.attention import BACKENDS, choose
from fairseq_rpe.attention.kinds import kind_of
from fairseq_rpe.attention.layer import carry_out, noted, plan_of, separated
from fairseq_rpe.attention.samples import small
from fairseq_rpe.core import Positions, Toeplitz, UserError
from fairseq_rpe.encodings import build

B, H, D = 2, 2, 32
SEPARABLE = [s for s in (*ALL_SPECS, *CONTENT_SPECS) if not build(s, H, H * D, 64).reads_length]
SEVERAL_BLOCKS = ["nope", "alibi", "kerple_log", "fire", "sandwich", "rope", "xpos", "tisa", "tupe"]
SEVERAL_BLOCKS += ["self_extend:group=4,window=8", "lm_infinite:sinks=2,window=7,ceiling=5", *CONTENT_SPECS[::2]]
SDPA = importlib.import_module("fairseq_rpe.attention.sdpa")


def lengths_of(n: int) -> list[list[int]]:
    """Two rows of n tokens: of several documents, the shortest one token; and of a long one and a short one."""
    return [[1, n // 3, 2, n - n // 3 - 3], [n - n // 5, n // 5]]


def documents_of(lengths: list[list[int]]) -> torch.Tensor:
    rows = [[number for number, length in enumerate(row) for _ in range(length)] for row in lengths]
    return torch.tensor(rows, device=DEVICE)


@torch.no_grad()
def lively(spec: str):
    """An encoding whose learned parameters all matter."""
    torch.manual_seed(0)
    encoding = build(spec, H, H * D, 320).to(DEVICE)
    for parameter in encoding.parameters():
        parameter += 0.2 * torch.randn_like(parameter)
    return encoding


def outcome(backend: str, spec: str, n: int, dtype=torch.float32, grads: bool = True, dropout: float = 0.0):
    """Output, then gradients of q, k, v and the encoding's parameters."""
    encoding = lively(spec)
    generator = torch.Generator(device=DEVICE).manual_seed(1)
    q, k, v, cotangent = (torch.randn(B, H, n, D, generator=generator, device=DEVICE).to(dtype) for _ in range(4))
    x = torch.randn(B, n, H * D, generator=generator, device=DEVICE).to(dtype)
    leaves = [t.requires_grad_(grads) for t in (q, k, v)]
    pos, last_query = separated(documents_of(lengths_of(n)))
    with torch.set_grad_enabled(grads):
        plan = plan_of(encoding, pos, None, choose(backend, [encoding]), last_query=last_query)
        torch.manual_seed(2)
        out = carry_out(q, k, v, plan, dropout, noted(x, plan))
    if not grads:
        return [out]
    leaves += [p for p in encoding.parameters() if p.requires_grad]
    return [out, *torch.autograd.grad(out, leaves, cotangent, allow_unused=True)]


def assert_same(found, expected, tolerance: float) -> None:
    for a, b in zip(found, expected, strict=True):
        a, b = (torch.zeros(()) if x is None else x.detach().float().cpu() for x in (a, b))
        assert torch.isfinite(a).all()
        assert (a - b).abs().max() <= tolerance * max(1.0, float(b.abs().max()))


TOLERANCE = {torch.float32: 1e-4, torch.bfloat16: 3e-2}


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("spec", SEPARABLE)
def test_sdpa_equals_the_reference(spec, dtype):
    assert_same(outcome("sdpa", spec, 37, dtype), outcome("reference", spec, 37, dtype), TOLERANCE[dtype])


@pytest.mark.parametrize("spec", SEVERAL_BLOCKS)
def test_sdpa_equals_the_reference_in_several_blocks(spec):
    assert_same(outcome("sdpa", spec, 301), outcome("reference", spec, 301), 1e-4)


@pytest.mark.parametrize("spec", ["nope", "kerple_log", "fire", "window:window=5"])
def test_long_rows_are_computed_document_by_document(spec, monkeypatch):
    """On a CPU: the bias is never a matrix of all pairs, in the forward pass or the backward one."""
    monkeypatch.setattr(sys.modules[__name__], "lengths_of", lambda n: [[1, n - 131, 130], [n - 150, 150]])
    expected = outcome("reference", spec, 301)
    monkeypatch.setattr(SDPA, "CURVE_FROM", 2)
    monkeypatch.setattr(SDPA, "_by_blocks", None)
    monkeypatch.setattr(SDPA, "_one", lambda q, k, v, plan, dropout: v)  # of one token, whose weight is 1
    assert_same(outcome("sdpa", spec, 301), expected, 1e-4)


def test_dropout_is_the_references():
    for n in (37, 301):
        assert_same(outcome("sdpa", "alibi", n, dropout=0.3), outcome("reference", "alibi", n, dropout=0.3), 3e-5)


def bias_of(spec: str):
    return lively(spec).form(Positions.arange(3, device=DEVICE))


TRITON = ["nope", "rope", "fire", *(s for s in ALL_SPECS if isinstance(bias_of(s), Toeplitz))]


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("spec", TRITON)
def test_triton_equals_the_reference(spec, dtype):
    pytest.importorskip("triton", reason="needs the package triton")
    assert_same(outcome("triton", spec, 37, dtype), outcome("reference", spec, 37, dtype), TOLERANCE[dtype])


FLEX = ["nope", "alibi", "kerple_log", "rope", "fire", "shaw:clip=5", "transformer_xl", "forgetting"]


@pytest.mark.parametrize("spec", FLEX)
def test_flex_equals_the_reference(spec):
    """Without gradients on a CPU, where it has none; several blocks of its mask."""
    for n in (37, 301):
        found = outcome("flex", spec, n, grads=DEVICE == "cuda")
        assert_same(found, outcome("reference", spec, n, grads=DEVICE == "cuda"), 3e-5)


def test_flex_leaves_out_blocks_of_other_documents():
    from fairseq_rpe.attention.flex import _mask

    n, q = 512, torch.zeros(1, 1, 512, D)
    pos, last_query = separated(torch.tensor([[0] * 200 + [1] * 312]))
    mask = _mask(plan_of(build("nope", H, H * D), pos, None, BACKENDS["flex"], last_query=last_query), q, q)
    seen = [sorted(mask.kv_indices[0, 0, i, : mask.kv_num_blocks[0, 0, i]].tolist()) for i in range(n // 128)]
    assert seen == [[0], [0, 1], [1, 2], [1, 2, 3]]


# Against each document alone


@pytest.mark.parametrize("spec", SEPARABLE)
def test_attention_is_that_of_each_document_alone(spec):
    encoding = lively(spec)
    if encoding.embeds:
        pytest.skip("acts at a model's input")
    n, generator = 37, torch.Generator().manual_seed(1)
    lengths = lengths_of(n)
    q, k, v = (torch.randn(B, H, n, D, generator=generator).to(DEVICE) for _ in range(3))
    notes = encoding.note(torch.randn(B, n, H * D, generator=generator).to(DEVICE)) if encoding.notes else None
    found = attend(q, k, v, encoding, documents=documents_of(lengths), notes=notes, backend="reference")
    for row, own in enumerate(lengths):
        start = 0
        for length in own:
            at = slice(row, row + 1), slice(None), slice(start, start + length)
            alone = attend(
                q[at], k[at], v[at], encoding, notes=None if notes is None else notes[at], backend="reference"
            )
            assert_same([found[at]], [alone], 3e-5)
            start += length


MODELS = ["nope", "sinusoidal", "learned", "rope", "xpos", "alibi", "t5_bias:init_std=1", "fire", "kerple_log", "tupe"]
MODELS += ["floater:steps=1", "self_extend:group=4,window=8", "streaming_llm:sinks=3,recent=6", *CONTENT_SPECS[::3]]


@pytest.mark.parametrize("spec", MODELS)
def test_a_model_reads_each_document_as_if_it_were_alone(task, spec):
    """Outputs, and gradients of all parameters; the end of a row is padding."""
    model = make_model(task, spec, decoder_layers=2)
    with torch.no_grad():
        for parameter in model.decoder.encodings.parameters():
            parameter += 0.2 * torch.randn_like(parameter)
    lengths = [[5, 1, 20, 11], [30, 3]]
    n, generator = 37, torch.Generator().manual_seed(1)
    tokens = torch.randint(4, VOCABULARY, (2, n), generator=generator)
    tokens[1, 33:] = task.source_dictionary.pad()
    documents = documents_of([lengths[0], [*lengths[1], 4]]).cpu()
    cotangent = torch.randn(2, n, VOCABULARY, generator=generator)
    cotangent[1, 33:] = 0

    def gradients(out, weights):
        found = torch.autograd.grad((out * weights).sum(), list(model.parameters()), allow_unused=True)
        return [torch.zeros_like(p) if g is None else g for p, g in zip(model.parameters(), found, strict=True)]

    logits = model(tokens, documents=documents)[0]
    together = gradients(logits, cotangent)
    apart = [torch.zeros_like(p) for p in model.parameters()]
    for row, own in enumerate(lengths):
        start = 0
        for length in own:
            part = slice(start, start + length)
            alone = model(tokens[row : row + 1, part])[0]
            assert_same([logits[row : row + 1, part]], [alone], 1e-4)
            apart = [a + g for a, g in zip(apart, gradients(alone, cotangent[row : row + 1, part]), strict=True)]
            start += length
    assert_same(together, apart, 2e-4)


# What is refused, and what auto knows


def test_documents_are_a_kind_of_call_of_their_own():
    pos, last_query = separated(documents_of(lengths_of(37)))
    q = torch.zeros(B, H, 37, D, device=DEVICE)
    plan = plan_of(lively("alibi"), pos, None, BACKENDS["sdpa"], last_query=last_query)
    plain = plan_of(lively("alibi"), Positions.arange(37, device=DEVICE), None, BACKENDS["sdpa"])
    assert "documents" in str(kind_of(q, q, q, plan)) and "documents" not in str(kind_of(q, q, q, plain))
    sample = small(q, q, q, plan, 0.0)
    assert not bool(sample.plan.visible(37, 37, q.device)[0, 0, -1, 0])


@pytest.mark.parametrize("spec", ["rope:scaling=dynamic_ntk,original_length=64", "clex:original_length=64", "bipe"])
def test_encodings_that_read_more_of_a_row_are_refused(spec):
    encoding, q = build(spec, H, H * D, 64), torch.zeros(1, H, 4, D)
    with pytest.raises(UserError, match="--blocks document"):
        attend(q, q, q, encoding, documents=torch.tensor([[0, 0, 1, 1]]))


def test_a_model_refuses_documents_that_it_would_not_separate(task):
    tokens, documents = torch.full((1, 4), 5), torch.tensor([[0, 0, 1, 1]])
    with pytest.raises(UserError, match="--blocks document"):
        make_model(task, "rope", positions_eval="interpolate")(tokens, documents=documents)
    with pytest.raises(UserError, match="cache"):
        make_model(task, "rope").decoder(tokens, incremental_state={}, documents=documents)


Q = torch.zeros(1, H, 4, D)


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"documents": torch.zeros(1, 5, dtype=torch.int64)}, r"shape \(1, 4\)"),
        ({"documents": torch.zeros(1, 4)}, "float32"),
        ({"positions": torch.arange(4)}, "leave positions out"),
        ({"padding": torch.zeros(1, 4, dtype=torch.bool)}, "leave padding out"),
        ({"q": Q[:, :, 2:], "documents": torch.zeros(1, 2, dtype=torch.int64)}, "give all queries"),
    ],
)
def test_what_contradicts_documents_is_refused(given, words):
    call = {"documents": torch.tensor([[0, 0, 1, 1]]), "q": Q, **given}
    with pytest.raises(UserError, match=words):
        attend(call.pop("q"), Q, Q, "alibi", **call)


def test_pruning_is_refused():
    pos, last_query = separated(torch.tensor([[0, 0, 1, 1]]))
    plan = plan_of(build("alibi", H, H * D), pos, None, BACKENDS["sdpa"], 0.1, last_query=last_query)
    with torch.no_grad(), pytest.raises(UserError, match="not pruned"):
        BACKENDS["sdpa"](Q, Q, Q, plan)


def test_the_module_takes_documents():
    torch.manual_seed(0)
    layer, x = RelativeAttention(width=H * D, heads=H, encoding="alibi"), torch.randn(1, 5, H * D)
    y = layer(x, documents=torch.tensor([[3, 3, 0, 0, 0]]))
    assert_same([y[:, :2], y[:, 2:]], [layer(x[:, :2]), layer(x[:, 2:])], 1e-5)
    with pytest.raises(UserError, match="cache"):
        layer(x, layer.new_cache(), documents=torch.tensor([[3, 3, 0, 0, 0]]))
