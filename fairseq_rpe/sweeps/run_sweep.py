"""Checks a sweep, merges its record and runs the stages that are left."""

import contextlib
import shlex
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from fairseq_rpe.core.errors import UserError
from fairseq_rpe.evaluation.question_records import QuestionKey
from fairseq_rpe.evaluation.records import TextKey
from fairseq_rpe.runs import launch
from fairseq_rpe.sweeps import local_executor, slurm
from fairseq_rpe.sweeps.grid import TRAINING, Stage, SweepRun, command_line
from fairseq_rpe.sweeps.resolve import Inputs, Sweep
from fairseq_rpe.sweeps.sweep_record import (
    EvaluationQuestions,
    EvaluationText,
    Method,
    QuestionConfig,
    SweepFolder,
    SweepRecord,
    SweepSettings,
)
from fairseq_rpe.utils.files import exclusive_lock

SlurmSettings = Sequence[tuple[str, str]] | None  # (option of sbatch, value) pairs; None runs on this machine


def dry_run_lines(sweep: Sweep, runs: list[SweepRun], on_slurm: SlurmSettings) -> list[str]:
    """Return every command of a sweep as a line for a shell, with comments about the processes that it starts.

    Args:
        sweep: sweep whose commands are wanted.
        runs: all its runs, finished ones too.
        on_slurm: settings of the SLURM jobs, None for this machine.

    Returns:
        The lines, without line breaks; comments begin with ``#``.
    """
    lines = [shlex.join(command_line(*words)) for words in _preparations(sweep)]
    if on_slurm is not None:
        lines += _slurm_comments(sweep, runs, on_slurm)
    base = sweep.base_config
    if on_slurm is None:
        gpus = launch.count_gpus(base, dry=True)
    else:
        gpus = 0 if base.device == "cpu" else base.nproc
    for run in runs:
        if on_slurm is not None:
            lines.append(f"# job {run.name}{f', after {run.parent.name}' if run.parent else ''}:")
        lines.append(shlex.join(run.train_command))
        if base.world_size > 1:
            lines.append(f"# starts: {run.launch_line(on_slurm is not None, gpus)}")
        for evaluation in run.evaluations:
            if evaluation.skipped_lengths:
                lines.append(f"# {evaluation.skipped_lengths}")
            lines.append(shlex.join(evaluation.command))
    return lines


def _preparations(sweep: Sweep) -> list[tuple[str, ...]]:
    """Return the words after ``fairseq-rpe`` of each command that prepares data."""
    preparations = [sweep.preparation] if sweep.preparation else []
    preparations += [sweep.preparation_of_text(name) for name in sweep.evaluate if name in sweep.prepared]
    preparations += [sweep.preparation_of_questions(name) for name, folder in sweep.questions.items() if folder.prepare]
    return preparations


def _slurm_comments(sweep: Sweep, runs: Sequence[SweepRun], on_slurm: Sequence[tuple[str, str]]) -> list[str]:
    """Return comments about the arrays of SLURM jobs."""
    settings = ", ".join(f"{key}={value}" for key, value in slurm.job_settings(sweep, on_slurm).items())
    independent = [run for run in runs if run.parent is None]
    lines = [f"# an array of {len(independent)} SLURM jobs: {settings}"]
    if continued := len(runs) - len(independent):
        lines.append(f"# and one of {continued} that wait for those that they continue (dependency=afterany)")
    return lines


def skipped_evaluations(runs: Sequence[SweepRun]) -> list[str]:
    """Return one line for each method that is not evaluated at all lengths."""
    return list(dict.fromkeys(e.skipped_lengths for run in runs for e in run.evaluations if e.skipped_lengths))


def run_sweep(
    sweep: Sweep, pending: Mapping[SweepRun, list[Stage]], runs: list[SweepRun], on_slurm: SlurmSettings
) -> list[str]:
    """Run the stages of a sweep that are left.

    Args:
        sweep: sweep that names the device, the processes of a run and the concurrent runs.
        pending: stages that are left, by run; finished runs are absent.
        runs: all runs of the sweep, for the progress of the whole.
        on_slurm: settings of the SLURM jobs, None for this machine.

    Returns:
        One line per failed run.

    Raises:
        UserError: a SLURM job is working on a run that this machine would train.
    """
    if not pending:
        return []
    if on_slurm is not None:
        return slurm.submit_and_wait(sweep, on_slurm, pending)
    base = sweep.base_config
    with contextlib.ExitStack() as locks:
        # a job of an earlier sbatch holds the lock of its run
        for run in pending:
            message = f"a job is busy with {run.name}: wait for it, or stop it with scancel"
            locks.enter_context(exclusive_lock(run.folder.lock, message))
        environments = local_executor.job_environments(base.device, base.nproc, sweep.jobs)
        return local_executor.run_stages(pending, runs, environments)


def merged_record(sweep: Sweep, inputs: Inputs, runs: list[SweepRun]) -> SweepRecord:
    """Merge a sweep with the record in its folder: methods, tasks, lengths and seeds may be added.

    Args:
        sweep: sweep whose folder is read.
        inputs: its data.
        runs: all its runs; fine-tunings come last.

    Returns:
        The record for sweep.json.

    Raises:
        UserError: the folder holds a sweep with other settings.
    """
    folder = SweepFolder(sweep.out)
    before = folder.read_record() if folder.record_path.exists() else None
    settings, fine_tuning, question_config = _shared_settings(sweep, runs)
    if before is not None:
        _check_mergeable(sweep, before, settings, fine_tuning, question_config)
    old = before or SweepRecord(settings, (), ())
    about = {name: getattr(sweep.recipe or old, name) for name in ("title", "paper", "published")}
    return SweepRecord(
        settings=settings,
        recipe=sweep.recipe_name or old.recipe,
        **about,
        encodings=_union(old.encodings, (method.name for method in sweep.methods)),
        methods=_merged_methods(sweep, old),
        evaluate=_merged_texts(sweep, old, runs),
        questions=_merged_questions(sweep, inputs, old, runs),
        fine_tuning=fine_tuning,
        question_config=question_config,
        seeds=tuple(sorted({*old.seeds, *sweep.seeds})),
        lengths=tuple(sorted({*old.lengths, *(n for run in runs for n in run.lengths)})),
        commands=old.commands,
        data=str(sweep.data) if sweep.data is not None else None,
        algorithms=_union(old.algorithms, sweep.algorithms),
        evaluate_at=tuple(sorted({*old.evaluate_at, *sweep.evaluate_at})),
    )


def _unshared(sweep: Sweep) -> Mapping[str, Any]:
    """Return None for each setting that differs between runs, so that a record of the sweep leaves it out."""
    task_keys = ("data", "tokens") if sweep.algorithms else ()
    return dict.fromkeys(("rpe", "seed", "positions_train", "positions_eval", *task_keys))


def _shared_settings(
    sweep: Sweep, runs: Sequence[SweepRun]
) -> tuple[SweepSettings, SweepSettings | None, QuestionConfig | None]:
    """Return the settings of the trainings, those of the fine-tunings, and how questions are answered.

    The last two are None in a sweep without questions.
    """
    unshared = _unshared(sweep)
    first, last = runs[0].plan, runs[-1].plan  # with questions, the last one is a fine-tuning
    about: dict[str, Any] = {"updates": first.updates, "split": sweep.split}
    settings = SweepSettings(**{**vars(first.settings), **unshared, **about})
    if not sweep.questions:
        return settings, None, None
    about |= {"data": None, "finetune_from": None, "updates": last.updates}
    fine_tuning = SweepSettings(**{**vars(last.settings), **unshared, **about})
    return settings, fine_tuning, (sweep.preset and sweep.preset.question_config) or QuestionConfig()


def _check_mergeable(
    sweep: Sweep,
    before: SweepRecord,
    settings: SweepSettings,
    fine_tuning: SweepSettings | None,
    question_config: QuestionConfig | None,
) -> None:
    """Raise UserError if a recorded sweep has other settings than this one."""
    if difference := settings.difference(replace(before.settings, **_unshared(sweep))):
        raise UserError(f"{sweep.out} holds another sweep ({difference}): choose another --out")
    if before.kind != sweep.kind:
        raise UserError(f"{sweep.out} holds a sweep of another kind: choose another --out")
    if before.fine_tuning and fine_tuning and (difference := fine_tuning.difference(before.fine_tuning)):
        raise UserError(f"{sweep.out} holds a sweep with another fine-tuning ({difference}): choose another --out")
    if before.question_config != question_config:
        raise UserError(f"{sweep.out} holds a sweep with another question_config: choose another --out")


def _merged_methods(sweep: Sweep, old: SweepRecord) -> dict[str, Method]:
    """Merge the methods with recorded ones. Raises UserError: a name has other positions."""
    methods = dict(old.methods)
    for method in sweep.methods:
        if methods.get(method.name, method) != method:
            raise UserError(f"{sweep.out} holds other positions for '{method.name}': choose another --out")
        methods[method.name] = method
    return methods


def _merged_texts(sweep: Sweep, old: SweepRecord, runs: list[SweepRun]) -> dict[str, EvaluationText]:
    """Merge the further texts of the evaluation with recorded ones. Raises UserError: a name has another text."""
    texts = dict(old.evaluate)
    for evaluation in (evaluation for run in runs for evaluation in run.evaluations):
        name, key = evaluation.text_name, evaluation.keys[0]
        if name is None or not isinstance(key, TextKey):
            continue
        if name in texts and texts[name].digest != key.data:
            raise UserError(f"{sweep.out} holds another text '{name}': choose another name or --out")
        texts[name] = EvaluationText(str(evaluation.data), key.data)
    return texts


def _merged_questions(
    sweep: Sweep, inputs: Inputs, old: SweepRecord, runs: list[SweepRun]
) -> dict[str, EvaluationQuestions]:
    """Merge the question folders with recorded ones. Raises UserError: a name has another folder."""
    questions = dict(old.questions)
    for name, folder in sweep.questions.items():
        digest = inputs.questions[name]
        if name in questions and questions[name].digest != digest:
            raise UserError(f"{sweep.out} holds other questions '{name}': choose another name or --out")
        old_sets = questions[name].sets if name in questions else ()
        sets = _union(old_sets, _evaluated_sets(sweep, name, runs))
        questions[name] = EvaluationQuestions(str(Path(folder.data)), digest, sets)
    return questions


def _evaluated_sets(sweep: Sweep, name: str, runs: Sequence[SweepRun]) -> tuple[str, ...]:
    """Return the sets of a question folder that its runs are evaluated on, each once."""
    run_names = {method.run_name(seed, name) for method in sweep.methods for seed in sweep.seeds}
    evaluations = [evaluation for run in runs if run.name in run_names for evaluation in run.evaluations]
    keys = [key for evaluation in evaluations for key in evaluation.keys]
    return tuple(dict.fromkeys(key.set for key in keys if isinstance(key, QuestionKey)))


def with_commands(record: SweepRecord, pending: Mapping[SweepRun, list[Stage]]) -> SweepRecord:
    """Add the commands of pending stages to a record.

    Args:
        record: contents of sweep.json so far.
        pending: stages that are left, by run.

    Returns:
        The new record.
    """
    commands = {name: dict(stages) for name, stages in record.commands.items()}
    for run, stages in pending.items():
        lines = commands.setdefault(run.name, {})
        for stage in stages:
            # for people, a command with all options instead of one that starts from the record
            command = run.train_command if stage.name == TRAINING else stage.command
            lines[stage.name] = _union(lines.get(stage.name, ()), (shlex.join(command),))
    return replace(record, commands=commands)


def _union(first: Sequence[str], second: Iterable[str]) -> tuple[str, ...]:
    """Return the elements of both, each once, in the order of their first occurrence."""
    return tuple(dict.fromkeys([*first, *second]))
