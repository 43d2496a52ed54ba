"""Checks of the methods of a sweep before anything is trained."""

import contextlib
import sys
from collections.abc import Iterator
from dataclasses import replace

from fairseq_rpe import encodings, positions
from fairseq_rpe.core.errors import UserError
from fairseq_rpe.encodings.model import build_distinct
from fairseq_rpe.encodings.model_rotation import complete_spec_for_checkpoint
from fairseq_rpe.runs import checkpoints
from fairseq_rpe.runs.model_check import check_backend, check_evaluation, check_model, check_replacement
from fairseq_rpe.sweeps.grid import SweepRun
from fairseq_rpe.sweeps.resolve import Sweep
from fairseq_rpe.sweeps.sweep_record import Method


def with_checkpoint_rotations(sweep: Sweep) -> Sweep:
    """Complete the specs of all methods with rotations, as training and evaluation do.

    A method that continues another one has the rotation of that method, and ``rpe_eval`` has the rotation of ``rpe``.

    Args:
        sweep: sweep with the specs of the command line or recipe.

    Returns:
        The sweep; specs that state their rotation are unchanged.

    Raises:
        UserError: a spec is not valid, or contradicts the rotation that it has to continue.
    """
    if sweep.base_config.rpe_module is not None:
        encodings.load_module(sweep.base_config.rpe_module)
    completed: dict[str, Method] = {}
    for method in sweep.trained:
        rpe, rpe_eval = method.rpe, method.rpe_eval
        with _named_errors(method):
            if method.continues:
                rpe = complete_spec_for_checkpoint(rpe, completed[method.continues].rpe)
            if rpe_eval:
                rpe_eval = complete_spec_for_checkpoint(rpe_eval, rpe)
        completed[method.name] = replace(method, rpe=rpe, rpe_eval=rpe_eval)
    return replace(
        sweep,
        methods=tuple(completed[method.name] for method in sweep.methods),
        prerequisites=tuple(completed[method.name] for method in sweep.prerequisites),
    )


def preflight(sweep: Sweep, runs: list[SweepRun], trains_here: bool) -> None:
    """Check every method as its training, continued training and evaluation do.

    Args:
        sweep: sweep with complete specs.
        runs: all runs of the sweep.
        trains_here: whether the runs train on this machine.

    Raises:
        UserError: a spec is not valid, a method is repeated, its model cannot be built, it continues a training with
            other parameters, the trained model cannot be evaluated with its ``rpe_eval`` and positions, or a training
            has passed an update of ``--evaluate-at`` without keeping its weights.
    """
    by_name = {run.name: run for run in runs}
    if trains_here:
        check_backend(sweep.base_config)
    for method in sweep.trained:
        for task in (None, *sweep.algorithms, *sweep.questions):
            if run := by_name.get(method.run_name(sweep.seeds[0], task)):
                _check_method(method, run)
    _check_different(sweep.trained)
    for run in runs:
        if updates := run.evaluated_updates:
            done, _ = checkpoints.find_newest(run.folder.checkpoints)
            run.folder.checkpoints.check_intermediate(updates, done, "--evaluate-at")


def _check_method(method: Method, run: SweepRun) -> None:
    """Check the model of a method, the training that it continues and its evaluation."""
    config, parent = run.config, run.parent
    with _named_errors(method):
        built = check_model(config, run.plan)
        if parent is not None:
            weights = [encoding.state_dict() for encoding in check_model(parent.config, parent.plan)]
            check_replacement(built, config.rpe, parent.config.rpe, weights, further=True)
        if method.rpe_eval or method.positions_eval:
            check_evaluation(config, run.plan, method.rpe_eval, method.positions_eval)


@contextlib.contextmanager
def _named_errors(method: Method) -> Iterator[None]:
    """Put the name of the method before error messages, unless it is a plain encoding, which they name already."""
    try:
        yield
    except UserError as error:
        if method.name == method.rpe:
            raise
        raise UserError(f"method '{method.name}': {error}") from None


def _check_different(methods: tuple[Method, ...]) -> None:
    """Check that no two methods differ only in their names."""
    seen: dict[tuple[str, ...], str] = {}
    for method in methods:
        transforms = (method.positions_train, method.positions_eval)
        normal = (encodings.normalise(method.rpe), *(positions.normalise(spec) if spec else "" for spec in transforms))
        normal += (encodings.normalise(method.evaluated_rpe), method.continues or "", str(method.further))
        if normal in seen:
            raise UserError(f"'{seen[normal]}' and '{method.name}' are the same encoding: leave one out")
        seen[normal] = method.name


def encodings_without_bias(sweep: Sweep) -> set[str]:
    """Find the encodings of which ``--log-encodings-every`` has no bias to log, and report them.

    Args:
        sweep: sweep with complete specs.

    Returns:
        Specs of these encodings.

    Raises:
        UserError: no encoding of the sweep has a bias.
    """
    if sweep.base_config.rpe_module is not None:
        encodings.load_module(sweep.base_config.rpe_module)
    specs = list(dict.fromkeys(method.rpe for method in sweep.trained))
    without_bias = [spec for spec in specs if not _adds_bias(spec)]
    if len(without_bias) == len(specs):
        raise UserError(f"--log-encodings-every: no bias to show in {', '.join(without_bias)}: drop the flag")
    if without_bias:
        print(f"--log-encodings-every: no bias to show in {', '.join(without_bias)}", file=sys.stderr)
    return set(without_bias)


def _adds_bias(spec: str) -> bool:
    """Return whether an encoding, or any encoding of a pattern of layers, adds a bias."""
    return any(encoding.adds_bias for encoding in build_distinct(spec, heads=4, width=128, length=64).values())
