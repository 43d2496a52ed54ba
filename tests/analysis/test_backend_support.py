"""Which backend serves which encoding: what the matrix says is what a model is told."""

from __future__ import annotations

import pytest
import torch
from conftest import run_here
from refusal import refusal
from specs import SPECS

from fairseq_rpe.analysis.backend_support import refusal_reasons, support_matrix
from fairseq_rpe.attention import BACKENDS, choose_backend
from fairseq_rpe.attention.forward import build_plan, run_attention
from fairseq_rpe.core import Positions, UserError
from fairseq_rpe.encodings import build, names


def test_reference_and_sdpa_serve_every_encoding():
    table, reasons = support_matrix(names())
    assert {row.name for row in table.rows} >= set(SPECS)
    for row in table.rows:
        assert [cell.text for cell in row.cells[:2]] == ["yes", "yes"], row.name
    assert all("use 'sdpa'" in reason for reason in reasons)


@pytest.mark.parametrize("spec", ["shaw", "cope", "tupe", "self_extend", "alibi", "forgetting"])
def test_what_is_refused_is_refused_when_it_is_called(spec):
    encoding, x = build(spec, 4, 64, 64), torch.zeros(1, 4, 8, 16)
    for name in ("flex", "triton"):
        why = refusal_reasons(spec)[name]
        if not why or "compiles" in why:  # the latter runs on a CPU
            continue
        with pytest.raises(UserError) as refusal:
            plan = build_plan(encoding, Positions.arange(8), None, choose_backend(name, [encoding]))
            run_attention(x, x, x, plan)
        assert why in str(refusal.value)
    assert {name: bool(why) for name, why in refusal_reasons("alibi").items()} == dict.fromkeys(BACKENDS, False)


def test_the_command():
    said = run_here("list", "--backends").stdout
    assert "| shaw " in said and "(1) " in said
    assert "--names does not go with --backends" in refusal("list", "--backends", "--names")
