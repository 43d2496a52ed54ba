"""Builds the runs of a sweep: one training each, with the evaluations of all methods that share it.

A *method* is an encoding with position transforms and settings, which a sweep compares. A *run* is one training and its
folder. Methods whose trainings are equal have the same ``Method.run_name``, so they share a run and differ only in its
evaluations. A method may continue another one: its run starts from the last checkpoint of the run of that method, its
*parent*, and trains it further.

``Sweep.methods`` are compared, so they are trained and evaluated. ``Sweep.trained`` also has methods that are trained
only because others continue them.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

from fairseq_rpe.core.errors import UserError
from fairseq_rpe.evaluation import records
from fairseq_rpe.evaluation.question_records import QuestionKey
from fairseq_rpe.evaluation.records import ExactMatchKey, Result, TextKey
from fairseq_rpe.runs import launch
from fairseq_rpe.runs.defaults import check_keep_at
from fairseq_rpe.runs.run_folder import CheckpointKind, RunFolder
from fairseq_rpe.runs.settings import TrainingPlan, make_plan
from fairseq_rpe.runs.training_config import IDENTITY, TrainingConfig
from fairseq_rpe.sweeps.recipes import batch_per_process
from fairseq_rpe.sweeps.resolve import Sweep
from fairseq_rpe.sweeps.sweep_record import Method, SweepFolder
from fairseq_rpe.utils.child_processes import module_command
from fairseq_rpe.utils.files import sha256_of_files

TRAINING, EVALUATING = "training", "evaluating"
Key = TypeVar("Key", TextKey, ExactMatchKey, QuestionKey)


def command_line(*words: str) -> list[str]:
    """Return the program and arguments that execute a command of ``fairseq-rpe``."""
    return module_command("fairseq_rpe.cli.main", *words)


@dataclass(frozen=True)
class Stage:
    """One command of a run.

    Attributes:
        name: :data:`TRAINING` or :data:`EVALUATING`.
        command: program and arguments of a process.
        log: file to which the output is appended.
        starts_from_record: whether the command reads the configuration in run.json; :meth:`SweepRun.write_config` must
            write it before.
    """

    name: str
    command: list[str]
    log: Path
    starts_from_record: bool = False


class ForwardPass(NamedTuple):
    """Tokens that a model reads.

    Attributes:
        tokens: number of tokens.
        context: length of the context in tokens.
    """

    tokens: float
    context: int


@dataclass(frozen=True)
class Evaluation:
    """One evaluation command of a run with the keys of its results.

    Attributes:
        command: program and arguments of a process; they name the checkpoint by its path.
        keys: keys of the results. Their field ``checkpoint``, the digest of the checkpoint, is empty: it is known only
            after the training, and :meth:`SweepRun.remaining_stages` fills it in.
        passes: returns the tokens that the model reads for each result
            (:class:`ForwardPass`), from the size of the data.
        data: text or question folder; None for a generated task.
        text_name: name that ``--eval-data`` or the preset gives to a further text; None for the text of the training,
            for generated tasks and for questions.
        skipped_lengths: reason why the method is not evaluated at some lengths; empty otherwise.
        updates: number of updates of the checkpoint, if that is one on the way; None: the checkpoint of
            :attr:`SweepRun.checkpoint_kind`.
    """

    command: list[str]
    keys: tuple[TextKey | ExactMatchKey | QuestionKey, ...]
    passes: Callable[[], list[ForwardPass]]
    data: Path | None = None
    text_name: str | None = None
    skipped_lengths: str = ""
    updates: int | None = None


@dataclass(eq=False)  # compared and hashed by identity: executors have runs as keys of dictionaries
class SweepRun:
    """One training of a sweep with its evaluations.

    Attributes:
        folder: folder of the run.
        config: configuration of the training.
        plan: the configuration with all defaults filled in: identity and number of updates of the training.
        result_type: record of one result of its evaluations.
        parent: run whose last checkpoint the training starts from; None for a training from scratch.
        evaluations: evaluations of all methods that share the training.
        checkpoint_kind: which checkpoint is evaluated: the last one, or the one with the best validation.
    """

    folder: RunFolder
    config: TrainingConfig
    plan: TrainingPlan
    result_type: type[Result]
    parent: SweepRun | None = None
    evaluations: list[Evaluation] = field(default_factory=list)
    checkpoint_kind: CheckpointKind = "last"

    @property
    def name(self) -> str:
        """Name of the folder."""
        return self.folder.name

    @property
    def train_command(self) -> list[str]:
        """Program and arguments of the training, with all of its options."""
        return command_line("train", *self.config.argv())

    @property
    def start_command(self) -> list[str]:
        """Program and arguments that start the training from its record; see :meth:`write_config`."""
        return command_line("train", "--from-run", str(self.folder.checkpoints.record_path))

    def write_config(self) -> None:
        """Write the configuration of the training to its record."""
        self.folder.checkpoints.write_config(self.config)

    @property
    def lengths(self) -> tuple[int, ...]:
        """Lengths of the evaluation."""
        return tuple(sorted({key.length for evaluation in self.evaluations for key in evaluation.keys}))

    def finished_digest(self) -> str | None:
        """Return the digest of the last checkpoint, None if the training is not finished.

        Raises:
            UserError: the folder holds another run.
        """
        if self.parent is None:
            return self.folder.checkpoints.finished_digest(self.plan)
        # The digest of the parent's checkpoint is part of this run's identity. The plan may have been made before the
        # parent was trained, or before it was trained again, so the current digest replaces that of the plan.
        parent_digest = self.parent.finished_digest()
        if parent_digest is None:
            return None
        settings = replace(self.plan.settings, finetune_from=parent_digest)
        return self.folder.checkpoints.finished_digest(replace(self.plan, settings=settings))

    def remaining_stages(self) -> list[Stage]:
        """Return the stages that are left: none, evaluations, or the training and all evaluations."""
        log = self.folder.eval_log
        digest = self.finished_digest()
        if digest is None:
            training = Stage(TRAINING, self.start_command, self.folder.train_log, starts_from_record=True)
            return [training, *(Stage(EVALUATING, e.command, log) for e in self.evaluations)]
        checkpoints = self.folder.checkpoints
        if self.checkpoint_kind != "last":
            digest = checkpoints.checkpoint_digest(self.checkpoint_kind)
        digests: dict[int | None, str] = {n: checkpoints.intermediate_digest(n) for n in self.evaluated_updates}
        digests[None] = digest
        # A result counts only if all fields of its key are equal, including the digest of the checkpoint. An evaluation
        # is repeated if any of its results is missing; it does not measure the others again.
        measured = {result.key for result in records.read_results(self.result_type, self.folder.results)}
        return [
            Stage(EVALUATING, evaluation.command, log)
            for evaluation in self.evaluations
            if any(replace(key, checkpoint=digests[evaluation.updates]) not in measured for key in evaluation.keys)
        ]

    @property
    def evaluated_updates(self) -> list[int]:
        """Numbers of updates of the checkpoints on the way that are evaluated, ascending."""
        return sorted({evaluation.updates for evaluation in self.evaluations if evaluation.updates is not None})

    def check_intermediate(self) -> None:
        """Check that a finished run has the checkpoints on the way that are evaluated, and complete its record of them.

        Raises:
            UserError: one is missing, or the folder holds another run.
        """
        updates = self.evaluated_updates
        if updates and self.finished_digest() is not None:
            self.folder.checkpoints.check_intermediate(updates, self.plan.updates, "--evaluate-at")
            self.folder.checkpoints.record_intermediate(updates)

    def launch_line(self, on_slurm: bool, gpus: int) -> str:
        """Return the command of fairseq-train that ``fairseq-rpe train`` starts on each node, for display.

        Args:
            on_slurm: whether the nodes are those of a SLURM job.
            gpus: number of GPUs of each node, 0 to train on the CPU.

        Returns:
            A line for a shell.
        """
        node = launch.slurm_node(self.config) if on_slurm else launch.Node()
        return launch.shell_line(launch.training_command(self.config, self.plan, node, gpus))


# function of a run and of one of the methods that share it; returns the evaluations of that method
Evaluate = Callable[[SweepRun, Method], list[Evaluation]]


def build_runs(
    sweep: Sweep, data_digest: str | None, without_bias: Collection[str], result_type: type[Result], evaluate: Evaluate
) -> list[SweepRun]:
    """Build one run per (encoding, training positions, task, seed); methods that differ only in evaluation share it.

    Args:
        sweep: resolved sweep on a text or on generated tasks.
        data_digest: digest of the text, None for generated tasks.
        without_bias: specs of encodings that add no bias. ``--log-encodings-every`` would have nothing to log, so they
            are trained without it.
        result_type: record of one result of the evaluations.
        evaluate: function of the kind that returns the evaluations of a run for one of its methods.

    Returns:
        The runs; a run comes after the one that it continues.
    """
    runs: dict[str, SweepRun] = {}
    by_name = {method.name: method for method in sweep.trained}
    for algorithm in sweep.algorithms or (None,):
        # ``trained`` has methods that continue others last, so that the run of the parent exists already
        for method in sweep.trained:
            for seed in sweep.seeds:
                name = method.run_name(seed, algorithm)
                if name not in runs:
                    parent = runs[by_name[method.continues].run_name(seed, algorithm)] if method.continues else None
                    config = training_config(sweep, method, seed, algorithm, parent, method.rpe not in without_bias)
                    folder = SweepFolder(sweep.out).run_folder(method, seed, algorithm)
                    digest = data_digest or ""
                    # the plan does not depend on keep_at, whose message would not name the option of the sweep
                    planned = replace(config, keep_at=None)
                    plan = plan_continuation(method, planned, digest) if parent else make_plan(planned, digest)
                    check_keep_at(sweep.evaluate_at, plan.updates, "--evaluate-at")
                    runs[name] = SweepRun(folder, config, plan, result_type, parent)
                if method in sweep.methods:
                    runs[name].evaluations += evaluate(runs[name], method)
    return list(runs.values())


def training_config(
    sweep: Sweep, method: Method, seed: int, algorithm: str | None, parent: SweepRun | None, logs_encodings: bool
) -> TrainingConfig:
    """Return the configuration of the training of a run: the options of the sweep, changed by those of the method.

    Args:
        sweep: sweep that the run belongs to.
        method: method whose encoding and positions are trained.
        seed: random seed of the training.
        algorithm: generated task, None for a text.
        parent: run that the training continues.
        logs_encodings: whether the training logs its encoding, if the sweep has ``--log-encodings-every``.

    Returns:
        The configuration.
    """
    sweep_folder = SweepFolder(sweep.out)
    folder = sweep_folder.run_folder(method, seed, algorithm)
    # The settings of a further training replace those of the sweep; a method that continues no other has none.
    overrides: dict[str, Any] = {**method.further.stated()}
    if method.further.batch_sentences is not None:
        overrides["batch_sentences"] = batch_per_process(method.further.batch_sentences, sweep.base_config)
    if method.further.schedule not in (None, "cosine"):
        overrides["min_lr"] = None  # of the sweep's cosine schedule: other schedules refuse it
    settings: dict[str, Any] = {
        "rpe": method.rpe,
        "out": folder.checkpoints.path,
        "data": sweep.data,
        "algorithm": algorithm,
        "positions_train": method.positions_train,
        "seed": seed,
        "tensorboard": sweep_folder.tensorboard / folder.name,
        "log_encodings_every": sweep.base_config.log_encodings_every if logs_encodings else None,
        "finetune_from": parent.folder.checkpoints.last if parent else None,
        "keep_at": sweep.evaluate_at or None,
    }
    # no key is in both dictionaries: a further training has the encoding, data and positions of its method
    return replace(sweep.base_config, **settings, **overrides)


def plan_continuation(method: Method, config: TrainingConfig, data_digest: str) -> TrainingPlan:
    """Resolve a training that continues another one.

    Args:
        method: method that continues another one.
        config: configuration of the training.
        data_digest: digest of the data folder.

    Returns:
        The plan of the training.

    Raises:
        UserError: as :func:`~fairseq_rpe.runs.settings.make_plan`, with the name of the method of the recipe.
    """
    try:
        return make_plan(config, data_digest)
    except UserError as error:
        raise UserError(f"further training of method '{method.name}': {error}") from None


def lengths_within_limit(limit: int | None, lengths: Sequence[int], method: Method, unit: str) -> tuple[list[int], str]:
    """Split lengths at the limit of a method's positions.

    Args:
        limit: largest length, None without a limit.
        lengths: requested lengths of the evaluation, in ``unit``.
        method: method that is evaluated, for the message.
        unit: unit of the lengths, for the message.

    Returns:
        The lengths up to the limit, and a message about those beyond it (empty if there are none).

    Raises:
        UserError: all lengths are beyond the limit.
    """
    beyond = [n for n in lengths if limit is not None and n > limit]
    if not beyond:
        return list(lengths), ""
    if not limit:
        raise UserError(
            f"{method.name}: no length has enough positions with '{method.positions_eval or IDENTITY}': give a larger "
            "max_positions or max_position, or leave the method out"
        )
    message = f"{method.name}: its positions end at {limit} {unit}, so it is not evaluated at"
    message += f" {beyond[0]}" if len(beyond) == 1 else f" {len(beyond)} lengths from {beyond[0]} to {beyond[-1]}"
    if len(beyond) == len(lengths):
        raise UserError(f"{message}: give smaller --lengths, or leave the method out")
    return [n for n in lengths if n not in beyond], message


def method_key(kind: type[Key], method: Method, config: TrainingConfig, **values: Any) -> Key:
    """Return the key of a result of a method at length 1; the digest of the checkpoint is empty.

    Args:
        kind: type of the key.
        method: method that is evaluated.
        config: configuration of its training, whose module of encodings the evaluation loads, too.
        values: further fields of the key.
    """
    draws = records.default_draws(method.positions_eval)
    module = sha256_of_files(config.rpe_module) if config.rpe_module else None
    settings: dict[str, Any] = {"rpe": method.rpe_eval, "positions": method.positions_eval, "draws": draws}
    return kind(checkpoint="", length=1, module=module, **settings, **values)


def common_arguments(run: SweepRun, method: Method, lengths: Sequence[int]) -> list[str]:
    """Return the options that all evaluation commands of a method have.

    Args:
        run: run whose checkpoint is evaluated.
        method: method that is evaluated.
        lengths: lengths of the evaluation; empty for the default.

    Returns:
        Options and values.
    """
    words = ["--out", str(run.folder.results), "--log", str(run.folder.eval_log)]
    words += ["--device", "cpu" if run.config.device == "cpu" else "auto"]
    words += ["--lengths", ",".join(map(str, lengths))] if lengths else []
    words += ["--rpe-module", str(run.config.rpe_module)] if run.config.rpe_module else []
    words += ["--positions-eval", method.positions_eval] if method.positions_eval else []
    return words + (["--rpe", method.rpe_eval] if method.rpe_eval else [])
