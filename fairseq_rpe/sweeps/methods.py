"""The methods of a sweep looked at before anything is trained."""

import sys

from fairseq_rpe import positions
from fairseq_rpe.core.errors import UserError
from fairseq_rpe.runs.specs import check_positions, check_spec, has_bias, load_rpe_module
from fairseq_rpe.sweeps.cells import Cell
from fairseq_rpe.sweeps.request import Sweep


def check(sweep: Sweep, cells: list[Cell]) -> None:
    """Refuse a misspelt or repeated method."""
    load_rpe_module(sweep.base.rpe_module)
    seen: dict[tuple[str, ...], str] = {}
    tokens = min(cell.plan.settings.tokens for cell in cells)
    for method in sweep.methods:
        normal = check_spec(method.rpe, tokens)
        check_positions(method.positions_train, method.positions_eval, tokens)
        moved = [positions.normalise(s) if s else "" for s in (method.positions_train, method.positions_eval)]
        if (other := seen.get((normal, *moved))) is not None:
            raise UserError(f"'{other}' and '{method.name}' are the same encoding: leave one out")
        seen[normal, *moved] = method.name


def without_bias(sweep: Sweep) -> set[str]:
    """The encodings that --inspect-every has nothing to show of, which is said; refused if it is all of them."""
    load_rpe_module(sweep.base.rpe_module)
    specs = list(dict.fromkeys(method.rpe for method in sweep.methods))
    for spec in specs:
        check_spec(spec, 64)
    unseen = [spec for spec in specs if not has_bias(spec)]
    if len(unseen) == len(specs):
        raise UserError(f"--inspect-every: no bias to show in {', '.join(unseen)}: drop the flag")
    if unseen:
        print(f"--inspect-every: no bias to show in {', '.join(unseen)}", file=sys.stderr)
    return set(unseen)
