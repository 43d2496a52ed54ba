"""Attention in rows that hold several documents equals attention in each document alone; refusals of other calls.

``test_sdpa``, ``test_flex`` and ``test_triton`` compare the back ends with the reference.
"""

from __future__ import annotations

from itertools import accumulate, pairwise

import pytest
import torch
from calls import B, D, H, assert_same, lively, numbered
from conftest import DEVICE, VOCABULARY, make_model
from specs import representatives

from fairseq_rpe import RelativeAttention, attend
from fairseq_rpe.attention import BACKENDS
from fairseq_rpe.attention.autotune import call_signature
from fairseq_rpe.attention.autotune_inputs import sample_call
from fairseq_rpe.attention.forward import build_plan, positions_from_documents
from fairseq_rpe.core import Positions, UserError
from fairseq_rpe.encodings import build

SPECS = [s for s in representatives() if not build(s, H, H * D, 64).length_dependent]
LENGTHS = [[1, 12, 2, 22], [30, 7]]


def parts(lengths):
    """The row and the tokens of each document."""
    for row, own in enumerate(lengths):
        for start, stop in pairwise(accumulate(own, initial=0)):
            yield slice(row, row + 1), slice(start, stop)


@pytest.mark.parametrize("spec", [s for s in SPECS if not build(s, H, H * D, 64).embeds])
def test_attention_is_that_of_each_document_alone(spec):
    encoding, n, generator = lively(spec), 37, torch.Generator().manual_seed(1)
    q, k, v = (torch.randn(B, H, n, D, generator=generator).to(DEVICE) for _ in range(3))
    notes = (
        encoding.token_features(torch.randn(B, n, H * D, generator=generator).to(DEVICE))
        if encoding.has_token_features
        else None
    )
    found = attend(q, k, v, encoding, documents=numbered(LENGTHS).to(DEVICE), features=notes, backend="reference")
    for row, tokens in parts(LENGTHS):
        at = row, slice(None), tokens
        own = None if notes is None else notes[at]
        alone = attend(q[at], k[at], v[at], encoding, features=own, backend="reference")
        torch.testing.assert_close(found[at], alone, rtol=0, atol=5e-5)


@pytest.mark.parametrize("spec", SPECS)
def test_a_model_reads_each_document_as_if_it_were_alone(task, spec):
    """Outputs, and gradients of all parameters; the end of a row is padding."""
    model = make_model(task, spec, decoder_layers=2)
    with torch.no_grad():
        for parameter in model.decoder.encodings.parameters():
            parameter += 0.2 * torch.randn_like(parameter)
    n, generator = 37, torch.Generator().manual_seed(1)
    tokens = torch.randint(4, VOCABULARY, (2, n), generator=generator)
    tokens[1, 33:] = task.source_dictionary.pad()
    cotangent = torch.randn(2, n, VOCABULARY, generator=generator)
    cotangent[1, 33:] = 0

    def gradients(out, weights):
        found = torch.autograd.grad((out * weights).sum(), list(model.parameters()), allow_unused=True)
        return [torch.zeros_like(p) if g is None else g for p, g in zip(model.parameters(), found, strict=True)]

    logits = model(tokens, documents=numbered([[5, 1, 20, 11], [30, 3, 4]]))[0]
    together, apart = gradients(logits, cotangent), [torch.zeros_like(p) for p in model.parameters()]
    for at in parts([[5, 1, 20, 11], [30, 3]]):
        alone = model(tokens[at])[0]
        assert_same({"out": alone}, {"out": logits[at]}, 1e-4)
        apart = [a + g for a, g in zip(apart, gradients(alone, cotangent[at]), strict=True)]
    names = [name for name, _ in model.named_parameters()]
    assert_same(*(dict(zip(names, x, strict=True)) for x in (apart, together)), 2e-4)


# What is refused, and what auto knows


def test_documents_are_a_kind_of_call_of_their_own():
    pos, last_query = positions_from_documents(numbered(LENGTHS).to(DEVICE))
    q = torch.zeros(B, H, 37, D, device=DEVICE)
    plan = build_plan(lively("alibi"), pos, None, BACKENDS["sdpa"], last_query=last_query)
    plain = build_plan(lively("alibi"), Positions.arange(37, device=DEVICE), None, BACKENDS["sdpa"])
    assert "documents" in str(call_signature(q, q, q, plan)) and "documents" not in str(call_signature(q, q, q, plain))
    sample = sample_call(q, q, q, plan, 0.0)
    assert not bool(sample.plan.visibility(37, 37, q.device)[0, 0, -1, 0])


Q, TWO = torch.zeros(1, H, 4, D), torch.tensor([[0, 0, 1, 1]])


@pytest.mark.parametrize("spec", ["rope:scaling=dynamic_ntk,original_length=64", "clex:original_length=64", "bipe"])
def test_encodings_that_read_more_of_a_row_are_refused(spec):
    with pytest.raises(UserError, match="--blocks document"):
        attend(Q, Q, Q, build(spec, H, H * D, 64), documents=TWO)


def test_a_model_refuses_documents_that_it_would_not_separate(task):
    tokens = torch.full((1, 4), 5)
    with pytest.raises(UserError, match="--blocks document"):
        make_model(task, "rope", positions_eval="interpolate")(tokens, documents=TWO)
    with pytest.raises(UserError, match="cache"):
        make_model(task, "rope").decoder(tokens, incremental_state={}, documents=TWO)


@pytest.mark.parametrize(
    ("call", "words"),
    [
        ({"documents": torch.zeros(1, 5, dtype=torch.int64)}, r"shape \(1, 4\)"),
        ({"documents": torch.zeros(1, 4)}, "float32"),
        ({"documents": [[0, 0, 1, 1]]}, "documents must be a torch tensor, not of type list"),
        ({"positions": torch.arange(4)}, "leave positions out"),
        ({"padding": torch.zeros(1, 4, dtype=torch.bool)}, "leave padding out"),
        ({"q": Q[:, :, 2:], "documents": torch.zeros(1, 2, dtype=torch.int64)}, "give all queries"),
    ],
)
def test_what_contradicts_documents_is_refused(call, words):
    call = {"documents": TWO, "q": Q, "k": Q, "v": Q, "encoding": "alibi", **call}
    with pytest.raises(UserError, match=words):
        attend(**call)


def test_pruning_is_refused():
    pos, last_query = positions_from_documents(TWO)
    plan = build_plan(build("alibi", H, H * D), pos, None, BACKENDS["sdpa"], 0.1, last_query=last_query)
    with torch.no_grad(), pytest.raises(UserError, match="not pruned"):
        BACKENDS["sdpa"](Q, Q, Q, plan)


def test_the_module_takes_documents():
    torch.manual_seed(0)
    layer, x = RelativeAttention(width=H * D, heads=H, encoding="alibi"), torch.randn(1, 5, H * D)
    documents = torch.tensor([[3, 3, 0, 0, 0]])
    apart = torch.cat([layer(x[:, :2]), layer(x[:, 2:])], dim=1)
    torch.testing.assert_close(layer(x, documents=documents), apart, rtol=1e-5, atol=1e-5)
    with pytest.raises(UserError, match="cache"):
        layer(x, layer.new_cache(), documents=documents)
