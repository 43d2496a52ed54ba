"""Which backend of attention serves which encoding, by the backends' own rules; nothing is computed on a GPU."""

from collections.abc import Sequence
from dataclasses import replace

import torch

from fairseq_rpe import encodings
from fairseq_rpe.analysis.selftest import SYMBOLS
from fairseq_rpe.attention import BACKENDS, choose
from fairseq_rpe.attention.flex import never as never_by_flex
from fairseq_rpe.attention.flex import not_compiled
from fairseq_rpe.attention.forward import noted, plan_of, scored
from fairseq_rpe.attention.triton import never as never_by_triton
from fairseq_rpe.core.bias import Positions
from fairseq_rpe.core.errors import UserError
from fairseq_rpe.utils.table import Cell, Row, Table

HEADS, WIDTH, LENGTH = 4, 16, 64


@torch.no_grad()
def served(spec: str) -> dict[str, str]:
    """By backend, why it refuses this encoding in training on a GPU at plain positions; "" where it serves it.

    What depends on tensors (a head's width, a dtype, attention dropout) is another matter: docs/attention.md has it.
    """
    encoding = encodings.build(spec, HEADS, HEADS * WIDTH, LENGTH, SYMBOLS)
    positions = Positions.arange(LENGTH)
    if encoding.needs_token_ids:
        positions = replace(positions, tokens=torch.zeros(1, LENGTH, dtype=torch.int64))
    q, k = torch.randn(2, 1, HEADS, LENGTH, WIDTH)
    found = {}
    for name in BACKENDS:
        try:
            plan = plan_of(encoding, positions, None, choose(name, [encoding]))
            plan = scored(q, k, plan, noted(torch.randn(1, LENGTH, HEADS * WIDTH), plan))
            rules = {"flex": (never_by_flex, not_compiled), "triton": (never_by_triton,)}.get(name, ())
            found[name] = next((reason for rule in rules if (reason := rule(plan))), "")
        except UserError as refusal:
            found[name] = str(refusal).removeprefix(f"{type(encoding).__name__} ")
    return found


def matrix(specs: Sequence[str]) -> tuple[Table, list[str]]:
    """Encodings × backends: yes, or the number of a reason; and the reasons, numbered."""
    rows, reasons = [], dict[str, int]()
    for spec in specs:
        found = served(spec)
        cells = [
            "yes" if not why else f"refused ({reasons.setdefault(why, len(reasons) + 1)})" for why in found.values()
        ]
        rows.append(Row(spec, [Cell(cell) for cell in cells]))
    table = Table("", ["encoding", *BACKENDS], rows, words=True)
    return table, [f"({number}) {why}" for why, number in reasons.items()]
