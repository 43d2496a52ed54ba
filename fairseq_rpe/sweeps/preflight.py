"""The methods of a sweep looked at before anything is trained."""

import contextlib
import sys
from collections.abc import Iterator
from dataclasses import replace

from fairseq_rpe import encodings, positions
from fairseq_rpe.core.errors import UserError
from fairseq_rpe.encodings.model_rotation import complete_for_checkpoint
from fairseq_rpe.runs.model_check import check_backend, check_evaluation, check_model, check_replacement
from fairseq_rpe.sweeps.grid import Cell
from fairseq_rpe.sweeps.resolve import Sweep
from fairseq_rpe.sweeps.sweep_record import Method


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
        rpe, rpe_eval = method.rpe, method.rpe_eval
        with _naming(method):
            if method.continues:
                rpe = complete_for_checkpoint(rpe, completed[method.continues].rpe)
            if rpe_eval:
                rpe_eval = complete_for_checkpoint(rpe_eval, rpe)
        completed[method.name] = replace(method, rpe=rpe, rpe_eval=rpe_eval)
    methods, needed = (tuple(completed[one.name] for one in some) for some in (sweep.methods, sweep.needed))
    return replace(sweep, methods=methods, needed=needed)


def check(sweep: Sweep, cells: list[Cell], here: bool) -> None:
    """Check every method as its training, its further training and its evaluation will.

    Args:
        sweep: what is compared.
        cells: the runs of the sweep.
        here: whether the runs train on this machine.

    Raises:
        UserError: a method is misspelt or repeated, its model cannot be built, it continues a training with other
            parameters, or the trained model cannot be evaluated with its ``rpe_eval`` and positions.
    """
    by_name = {cell.name: cell for cell in cells}
    if here:
        check_backend(sweep.base)
    for method in sweep.trained:
        for task in (None, *sweep.algorithms, *sweep.questions):
            if cell := by_name.get(method.run_name(sweep.seeds[0], task)):
                _check_method(method, cell)
    _check_different(sweep.trained)


def _check_method(method: Method, cell: Cell) -> None:
    """Check what a method trains, what it continues and how it is evaluated."""
    request, parent = cell.request, cell.parent
    with _naming(method):
        made = check_model(request, cell.plan)
        if parent is not None:
            weights = [one.state_dict() for one in check_model(parent.request, parent.plan)]
            check_replacement(made, request.rpe, parent.request.rpe, weights, further=True)
        if method.rpe_eval or method.positions_eval:
            check_evaluation(request, cell.plan, method.rpe_eval, method.positions_eval)


@contextlib.contextmanager
def _naming(method: Method) -> Iterator[None]:
    """Name the method of a recipe in an error's message; that of ``--encodings`` is its encoding, named already."""
    try:
        yield
    except UserError as error:
        if method.name == method.rpe:
            raise
        raise UserError(f"method '{method.name}': {error}") from None


def _check_different(methods: tuple[Method, ...]) -> None:
    """Refuse methods that are the same in all but their names."""
    seen: dict[tuple[str, ...], str] = {}
    for method in methods:
        transforms = (method.positions_train, method.positions_eval)
        normal = (encodings.normalise(method.rpe), *(positions.normalise(spec) if spec else "" for spec in transforms))
        normal += (encodings.normalise(method.rpe_eval or method.rpe), method.continues or "", str(method.further))
        if normal in seen:
            raise UserError(f"'{seen[normal]}' and '{method.name}' are the same encoding: leave one out")
        seen[normal] = method.name


def without_bias(sweep: Sweep) -> set[str]:
    """The encodings that --inspect-every has nothing to show of, which is said; refused if it is all of them."""
    if sweep.base.rpe_module is not None:
        encodings.load_module(sweep.base.rpe_module)
    specs = list(dict.fromkeys(method.rpe for method in sweep.trained))
    unseen = [spec for spec in specs if not encodings.build(spec, heads=4, width=128, length=64).adds_bias]
    if len(unseen) == len(specs):
        raise UserError(f"--inspect-every: no bias to show in {', '.join(unseen)}: drop the flag")
    if unseen:
        print(f"--inspect-every: no bias to show in {', '.join(unseen)}", file=sys.stderr)
    return set(unseen)
