"""The methods of a sweep looked at before anything is trained."""

import sys
from dataclasses import replace

from fairseq_rpe import encodings, positions
from fairseq_rpe.attention import choose
from fairseq_rpe.core.errors import UserError, need_fairseq
from fairseq_rpe.encodings.model_rotation import complete_for_checkpoint
from fairseq_rpe.runs.start import check_separate_documents, check_specs
from fairseq_rpe.sweeps.cells import Cell
from fairseq_rpe.sweeps.request import Sweep
from fairseq_rpe.sweeps.state import Method


def with_checkpoint_rotations(sweep: Sweep) -> Sweep:
    """Return the sweep with each method's specs as training and evaluation complete them.

    A method that continues another begins with that one's rotation, and ``rpe_eval`` reads the rotation of ``rpe``.

    Args:
        sweep: its methods come after those that they continue.

    Returns:
        The sweep; specs in which nothing is missing are unchanged.

    Raises:
        UserError: a spec is not valid, or contradicts the rotation of the method before it.
    """
    if sweep.base.rpe_module is not None:
        encodings.load_module(sweep.base.rpe_module)
    completed: dict[str, Method] = {}
    for method in sweep.trained:
        rpe = complete_for_checkpoint(method.rpe, completed[method.continues].rpe) if method.continues else method.rpe
        rpe_eval = complete_for_checkpoint(method.rpe_eval, rpe) if method.rpe_eval else method.rpe_eval
        completed[method.name] = replace(method, rpe=rpe, rpe_eval=rpe_eval)
    methods, needed = (tuple(completed[one.name] for one in some) for some in (sweep.methods, sweep.needed))
    return replace(sweep, methods=methods, needed=needed)


def check(sweep: Sweep, cells: list[Cell]) -> None:
    """Refuse a misspelt or repeated method, an unknown attention back end, and training without fairseq."""
    need_fairseq()
    choose(sweep.base.attention_backend)
    seen: dict[tuple[str, ...], str] = {}
    tokens = min(cell.plan.settings.tokens for cell in cells)
    for method in sweep.trained:
        transforms = (method.positions_train, method.positions_eval)
        for rpe in filter(None, (method.rpe, method.rpe_eval)):
            encoding = check_specs(rpe, transforms, tokens, sweep.base.rpe_module)
            if sweep.base.separate_documents:
                check_separate_documents(encoding, rpe, transforms)
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
