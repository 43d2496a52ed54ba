"""What verdicts on layers say about a model, and how far information passes through windows."""

from __future__ import annotations

from fractions import Fraction

import pytest
import torch

from fairseq_rpe.analysis.backend_support import refusal_reasons
from fairseq_rpe.analysis.convergence import verdict
from fairseq_rpe.analysis.layer_stack import stack_decision, summarise_stack, visible_tokens
from fairseq_rpe.analysis.selftest import SelftestSetting
from fairseq_rpe.analysis.verdict_tables import format_table, head_verdicts, verdict_cells
from fairseq_rpe.attention import choose_backend
from fairseq_rpe.attention.forward import build_plan, run_attention
from fairseq_rpe.core.positions import Positions
from fairseq_rpe.encodings.model import build_for_model


def built(spec: str, layers: int):
    return build_for_model(spec, 2, 16, layers, 64)


REACH = {  # spec, layers -> tokens
    ("3*rope:local=4|nope:local=3", 4): 1 + 3 * 3 + 2,
    ("window:window=5|alibi:local=2", 2): 1 + 4 + 1,
    ("rope:local=1|nope:local=1", 4): 1,
    ("nope:local=6", 3): 16,
    ("rope:block=4|nope:block=4", 4): 4,
    ("rope:block=4|nope:local=4", 2): 7,
    ("3*rope:local=4|nope", 4): None,
    ("alibi", 2): None,
    ("streaming_llm:sinks=2,recent=4|rope:local=4", 2): None,
}


@pytest.mark.parametrize(("spec", "layers"), REACH)
def test_an_output_depends_on_no_more_tokens(spec, layers):
    assert visible_tokens(built(spec, layers)) == REACH[spec, layers]


@pytest.mark.parametrize(("spec", "layers"), [key for key, tokens in REACH.items() if tokens])
def test_the_bound_is_reached_and_not_exceeded(spec, layers):
    """Gradients of the last output with respect to the values of a stack of attention layers are 0 beyond it."""
    n, backend = 24, choose_backend("reference")
    encodings, positions = built(spec, layers), Positions.arange(24)
    x = torch.randn(1, 2, n, 8, generator=torch.Generator().manual_seed(0), requires_grad=True)
    y = x
    for layer in range(layers):
        y = run_attention(y, y, y, build_plan(encodings.layer(layer), positions, None, backend), 0.0)
    [grad] = torch.autograd.grad(y[:, :, -1].sum(), x)
    seen = int(grad.abs().sum((0, 1, 3)).gt(0).nonzero().min())
    assert n - seen <= REACH[spec, layers]
    if "block" not in spec:
        assert n - seen == REACH[spec, layers]


def test_a_model_converges_if_all_layers_do():
    for spec, decision in (("alibi|type1", "converges"), ("2*alibi|nope", "diverges"), ("alibi|forgetting", None)):
        verdicts = [verdict(encoding) for encoding in built(spec, 3)]
        assert stack_decision([head.decision for heads in verdicts for head in heads]) == (
            decision or "depends on content"
        )
    encodings = built("2*alibi|nope", 6)
    assert summarise_stack(encodings, [verdict(e) for e in encodings]) == [
        "all 6 layers together: diverges, layers 2, 5"
    ]
    encodings = built("rope:local=8|nope:local=4", 4)
    assert summarise_stack(encodings, [verdict(e) for e in encodings]) == [
        "all 4 layers together: converges, every layer does",
        "all 4 layers are local: an output depends on at most 21 tokens",
    ]
    assert summarise_stack(built("alibi", 4), [verdict(e) for e in built("alibi", 4)]) == []


def test_tables_name_layers_and_encodings():
    rows = head_verdicts(built("2*alibi|nope|fire", 8))
    text = format_table("title", rows, [Fraction(1, 2)])
    assert "layers 0-1, 4-5 (alibi) head 1" in text and "layers 2, 6 (nope) head 1-2" in text
    assert "layer 3 (fire) head 1-2" in text or "layer 3 (fire) head 1 " in text
    assert {row[1] for row in verdict_cells({"title": rows}, [Fraction(1, 2)])[1:]} == {
        "0-1, 4-5 (alibi)",
        "2, 6 (nope)",
        "3 (fire)",
        "7 (fire)",
    }


def test_backends_must_serve_every_layer():
    reasons = refusal_reasons("2*alibi|shaw:values=true")
    assert not reasons["sdpa"] and reasons["triton"].startswith("shaw:values=true: ")


def test_selftest_checks_the_encodings_of_a_pattern():
    assert SelftestSetting("cpu", ("2*alibi|nope", "alibi")).names() == ["alibi", "nope"]
