"""The methods of a sweep looked at before anything is trained."""

import sys

from fairseq_rpe import encodings, positions
from fairseq_rpe.core.errors import UserError, need_fairseq
from fairseq_rpe.runs.start import check_specs
from fairseq_rpe.sweeps.cells import Cell
from fairseq_rpe.sweeps.request import Sweep


def check(sweep: Sweep, cells: list[Cell]) -> None:
    """Refuse a misspelt or repeated method, and training without fairseq."""
    need_fairseq()
    seen: dict[tuple[str, ...], str] = {}
    tokens = min(cell.plan.settings.tokens for cell in cells)
    for method in sweep.trained:
        transforms = (method.positions_train, method.positions_eval)
        for rpe in filter(None, (method.rpe, method.rpe_eval)):
            check_specs(rpe, transforms, tokens, sweep.base.rpe_module)
        normal = (encodings.normalise(method.rpe), *(positions.normalise(spec) if spec else "" for spec in transforms))
        normal += (encodings.normalise(method.rpe_eval or method.rpe), method.continues or "", str(method.further))
        if normal in seen:
            raise UserError(f"'{seen[normal]}' and '{method.name}' are the same encoding: leave one out")
        seen[normal] = method.name


def without_bias(sweep: Sweep) -> set[str]:
    """The encodings that --inspect-every has nothing to show of, which is said; refused if it is all of them."""
    specs = list(dict.fromkeys(method.rpe for method in sweep.trained))
    unseen = [spec for spec in specs if not check_specs(spec, (), 64, sweep.base.rpe_module).adds_bias]
    if len(unseen) == len(specs):
        raise UserError(f"--inspect-every: no bias to show in {', '.join(unseen)}: drop the flag")
    if unseen:
        print(f"--inspect-every: no bias to show in {', '.join(unseen)}", file=sys.stderr)
    return set(unseen)
