"""Support matrix of attention backends and encodings, by the rules of the backends; nothing runs on a GPU."""

from collections.abc import Sequence
from dataclasses import replace

import torch

from fairseq_rpe import encodings
from fairseq_rpe.analysis.selftest import SYMBOLS
from fairseq_rpe.attention import BACKENDS, choose_backend
from fairseq_rpe.attention.flex import cpu_only_reason
from fairseq_rpe.attention.flex import unsupported_reason as flex_unsupported_reason
from fairseq_rpe.attention.forward import build_plan, compute_token_features, with_content_bias
from fairseq_rpe.attention.triton import unsupported_reason as triton_unsupported_reason
from fairseq_rpe.core.errors import UserError
from fairseq_rpe.core.layer_pattern import is_pattern, parse_pattern
from fairseq_rpe.core.positions import Positions
from fairseq_rpe.utils.table import Cell, Table, TableRow

HEADS, WIDTH, LENGTH = 4, 16, 64


@torch.no_grad()
def refusal_reasons(spec: str) -> dict[str, str]:
    """Return why each backend refuses an encoding in training on a GPU at plain positions.

    Limits that depend on tensors (head width, dtype, attention dropout) are not covered: see docs/attention.md.

    Args:
        spec: spec of a registered encoding, or a pattern of layers, which a backend must support in every layer.

    Returns:
        backend -> reason, "" if the backend supports the encoding.
    """
    if is_pattern(spec):
        refusals = {layer_spec: refusal_reasons(layer_spec) for layer_spec in parse_pattern(spec).specs}
        return {
            name: next((f"{layer_spec}: {why[name]}" for layer_spec, why in refusals.items() if why[name]), "")
            for name in BACKENDS
        }
    encoding = encodings.build(spec, HEADS, HEADS * WIDTH, LENGTH, SYMBOLS)
    positions = Positions.arange(LENGTH)
    if encoding.needs_token_ids:
        positions = replace(positions, tokens=torch.zeros(1, LENGTH, dtype=torch.int64))
    q, k = torch.randn(2, 1, HEADS, LENGTH, WIDTH)  # (1, H, n, D) each
    x = torch.randn(1, LENGTH, HEADS * WIDTH)  # a layer's input
    rules = {"flex": (flex_unsupported_reason, cpu_only_reason), "triton": (triton_unsupported_reason,)}
    reasons = {}
    for name in BACKENDS:
        try:
            plan = build_plan(encoding, positions, None, choose_backend(name, [encoding]))
            plan = with_content_bias(q, k, plan, compute_token_features(x, plan))
            reasons[name] = next((reason for rule in rules.get(name, ()) if (reason := rule(plan))), "")
        except UserError as refusal:
            reasons[name] = str(refusal).removeprefix(f"{type(encoding).__name__} ")
    return reasons


def support_matrix(specs: Sequence[str]) -> tuple[Table, list[str]]:
    """Return the table of encodings × backends, with "yes" or the number of a reason, and the numbered reasons."""
    rows, reasons = [], dict[str, int]()
    for spec in specs:
        refusals = refusal_reasons(spec)
        cells = [
            "yes" if not why else f"refused ({reasons.setdefault(why, len(reasons) + 1)})" for why in refusals.values()
        ]
        rows.append(TableRow(spec, [Cell(cell) for cell in cells]))
    table = Table("", ["encoding", *BACKENDS], rows, is_text=True)
    return table, [f"({number}) {why}" for why, number in reasons.items()]
