"""Checks a sweep, merges its record and runs the stages that are left."""

import contextlib
import shlex
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from fairseq_rpe.core.errors import UserError
from fairseq_rpe.data import folder as corpus
from fairseq_rpe.evaluation.question_records import QuestionKey
from fairseq_rpe.evaluation.records import TextKey
from fairseq_rpe.questions import dataset
from fairseq_rpe.runs import launch, training_data
from fairseq_rpe.sweeps import local_executor, slurm
from fairseq_rpe.sweeps.grid import Stage, SweepRun, command_line
from fairseq_rpe.sweeps.resolve import Sweep
from fairseq_rpe.sweeps.sweep_record import (
    EvaluationQuestions,
    EvaluationText,
    QuestionConfig,
    SweepFolder,
    SweepRecord,
    SweepSettings,
)
from fairseq_rpe.utils.files import exclusive_lock

SlurmSettings = Sequence[tuple[str, str]] | None


def check_data(sweep: Sweep, dry: bool = False) -> str | None:
    """Check the texts and question folders of a sweep.

    Args:
        sweep: the sweep.
        dry: folders that the recipe prepares need not exist.

    Returns:
        The digest of the text of the training; None for generated tasks, or if a dry run has no text yet.

    Raises:
        UserError: a folder is missing or incomplete, or has another vocabulary than the recipe or the training.
    """
    if sweep.data is None:
        return None
    if sweep.preparation and not sweep.data.is_dir():
        if dry:
            _check_evaluation_texts(sweep, None, dry)
            _check_questions(sweep, None, dry)
            return None
        command = shlex.join(("fairseq-rpe", *sweep.preparation))
        raise UserError(f"data folder {sweep.data} does not exist: make it with {command}")
    if dataset.is_question_folder(sweep.data):
        raise UserError(
            f"{sweep.data} holds questions, and a sweep trains on a text first: name a text, and give the questions to "
            f"a recipe about answers, e.g. --recipe fire-scrolls --eval-data NAME={sweep.data}"
        )
    corpus.check_folder(sweep.data, "train", "valid", *([] if sweep.questions else [sweep.split]))
    if sweep.preset is not None:
        sweep.preset.check(sweep.data)
    digest = corpus.corpus_digest(sweep.data)
    symbols = corpus.read_dictionary(sweep.data / "dict.txt")
    _check_evaluation_texts(sweep, symbols, dry, digest)
    _check_questions(sweep, symbols, dry)
    return digest


def _check_evaluation_texts(sweep: Sweep, symbols: Sequence[str] | None, dry: bool, digest: str | None = None) -> None:
    """Check that further texts of the evaluation exist, differ, and have the vocabulary ``symbols`` of the training.

    ``symbols`` and ``digest`` of the text of the training are None if it does not exist yet.
    """
    seen = {} if digest is None else {digest: "the one that is trained on"}
    for name, path in sweep.evaluate.items():
        command = shlex.join(("fairseq-rpe", *sweep.preparation_of_text(name)))
        if not path.is_dir():
            if dry and name in sweep.prepared:
                continue
            raise UserError(f"data folder {path} does not exist: make it with {command}")
        corpus.check_text_folder(path, sweep.split)
        if symbols is not None and corpus.read_dictionary(path / "dict.txt") != symbols:
            raise UserError(f"{path} has another vocabulary than {sweep.data}: prepare another folder, e.g. {command}")
        if (digest_of_text := corpus.corpus_digest(path)) in seen:
            raise UserError(f"--eval-data {name}: {path} holds the same text as {seen[digest_of_text]}: leave it out")
        seen[digest_of_text] = name


def _check_questions(sweep: Sweep, symbols: Sequence[str] | None, dry: bool) -> None:
    """Check that question folders exist, have all splits, and have the vocabulary ``symbols`` of the training.

    ``symbols`` is None if the text of the training does not exist yet.
    """
    for name, folder in sweep.questions.items():
        path, command = Path(folder.data), shlex.join(("fairseq-rpe", *sweep.preparation_of_questions(name)))
        if not path.is_dir():
            if dry and folder.prepare:
                continue
            raise UserError(f"data folder {path} does not exist: make it with {command}")
        if not dataset.is_question_folder(path):
            raise UserError(f"{path} holds no questions: make another folder, e.g. with {command}")
        corpus.check_folder(path, "train", "valid")
        if symbols is not None and corpus.read_dictionary(path / "dict.txt") != symbols:
            raise UserError(f"{path} has another vocabulary than {sweep.data}: prepare another folder, e.g. {command}")


def check_lengths(sweep: Sweep, runs: list[SweepRun]) -> None:
    """Check that texts fill blocks, questions fit into the training length, and batches hold a block.

    Args:
        sweep: the sweep.
        runs: the runs of the sweep.

    Raises:
        UserError: a text is too short, a question too long, or ``--max-tokens`` too small.
    """
    longest = max([*sweep.lengths, *(run.plan.settings.tokens for run in runs if run.kind == "text")], default=0)
    if sweep.max_tokens and sweep.max_tokens < longest:
        raise UserError(f"--max-tokens {sweep.max_tokens} is less than length {longest}: raise it")
    for request, tokens in ((run.request, run.plan.settings.tokens) for run in runs if run.kind == "answers"):
        if request.data is not None and request.data.is_dir():
            training_data.check_questions(request.data, tokens, request.extra)
    if sweep.data is None or not sweep.data.is_dir():
        return
    tokens = max(run.plan.settings.tokens for run in runs if run.kind != "answers")
    separate = bool(sweep.base_request.separate_documents)
    training_data.check_blocks(sweep.data, tokens, sweep.base_request.blocks, separate)
    for data in filter(Path.is_dir, () if sweep.questions else (sweep.data, *sweep.evaluate.values())):
        longest = max(tokens, *sweep.lengths)
        corpus.check_block_length(data, sweep.split, longest)
        if sweep.base_request.blocks == "document" or separate:
            corpus.check_documents(data, sweep.split)
        if sweep.base_request.blocks == "document":
            corpus.check_document_block(data, sweep.split, longest)


def dry_run_lines(sweep: Sweep, runs: list[SweepRun], on_slurm: SlurmSettings) -> list[str]:
    """Return every command of a sweep as a line for a shell, with comments about the processes that it starts.

    Args:
        sweep: the sweep.
        runs: the runs of the sweep.
        on_slurm: settings of the SLURM jobs, None for this machine.

    Returns:
        The lines.
    """
    preparations = [sweep.preparation] if sweep.preparation else []
    preparations += [sweep.preparation_of_text(name) for name in sweep.evaluate if name in sweep.prepared]
    preparations += [sweep.preparation_of_questions(name) for name, folder in sweep.questions.items() if folder.prepare]
    lines = [shlex.join(command_line(*words)) for words in preparations]
    if on_slurm is not None:
        settings = ", ".join(f"{key}={value}" for key, value in slurm.job_settings(sweep, on_slurm).items())
        independent = [run for run in runs if run.parent is None]
        lines.append(f"# an array of {len(independent)} SLURM jobs: {settings}")
        if continued := len(runs) - len(independent):
            lines.append(f"# and one of {continued} that wait for those that they continue (dependency=afterany)")
    base = sweep.base_request
    gpus = launch.count_gpus(base, dry=True) if on_slurm is None else 0 if base.device == "cpu" else base.nproc
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


def skipped_evaluations(runs: Sequence[SweepRun]) -> list[str]:
    """Return one line for each method that is not evaluated at all lengths."""
    return list(dict.fromkeys(e.skipped_lengths for run in runs for e in run.evaluations if e.skipped_lengths))


def run_sweep(
    sweep: Sweep, pending: Mapping[SweepRun, list[Stage]], runs: list[SweepRun], on_slurm: SlurmSettings
) -> list[str]:
    """Run the stages of a sweep that are left.

    Args:
        sweep: the sweep.
        pending: stages that are left, by run.
        runs: all runs of the sweep.
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
    base = sweep.base_request
    with contextlib.ExitStack() as locks:
        for run in pending:
            message = f"a job is busy with {run.name}: wait for it, or stop it with scancel"
            locks.enter_context(exclusive_lock(run.folder.lock, message))
        environments = local_executor.job_environments(base.device, base.nproc, sweep.jobs)
        return local_executor.run_stages(pending, runs, environments)


def merged_record(sweep: Sweep, runs: list[SweepRun]) -> SweepRecord:
    """Merge a sweep with the record in its folder: methods, tasks, lengths and seeds may be added.

    Args:
        sweep: the sweep.
        runs: the runs of the sweep; fine-tunings come last.

    Returns:
        The record for sweep.json.

    Raises:
        UserError: the folder holds a sweep with other settings.
    """
    folder = SweepFolder(sweep.out)
    before = folder.read_record() if folder.record_path.exists() else None
    # settings that differ between runs are not recorded
    task_keys = ("data", "tokens") if sweep.algorithms else ()
    unshared: dict[str, Any] = dict.fromkeys(("rpe", "seed", "positions_train", "positions_eval", *task_keys))
    first, last = runs[0].plan, runs[-1].plan
    settings = SweepSettings(**{**vars(first.settings), **unshared}, updates=first.updates, split=sweep.split)
    fine_tuning = question_config = None
    if sweep.questions:
        shared: dict[str, Any] = {**vars(last.settings), **unshared, "data": None, "finetune_from": None}
        fine_tuning = SweepSettings(**shared, updates=last.updates, split=sweep.split)
        question_config = (sweep.preset and sweep.preset.question_config) or QuestionConfig()
    if before is not None:
        if difference := settings.difference(replace(before.settings, **unshared)):
            raise UserError(f"{sweep.out} holds another sweep ({difference}): choose another --out")
        if before.kind != ("algorithms" if sweep.algorithms else "answers" if sweep.questions else "text"):
            raise UserError(f"{sweep.out} holds a sweep of another kind: choose another --out")
        if before.fine_tuning and fine_tuning and (difference := fine_tuning.difference(before.fine_tuning)):
            raise UserError(f"{sweep.out} holds a sweep with another fine-tuning ({difference}): choose another --out")
        if before.question_config != question_config:
            raise UserError(f"{sweep.out} holds a sweep with another question_config: choose another --out")
    methods = dict(before.methods) if before else {}
    for method in sweep.methods:
        if methods.get(method.name, method) != method:
            raise UserError(f"{sweep.out} holds other positions for '{method.name}': choose another --out")
        methods[method.name] = method
    old = before or SweepRecord(settings, (), ())
    about = {name: getattr(sweep.recipe or old, name) for name in ("title", "paper", "published")}
    return SweepRecord(
        settings=settings,
        recipe=sweep.recipe_name or old.recipe,
        **about,
        encodings=_union(old.encodings, (method.name for method in sweep.methods)),
        methods=methods,
        evaluate=_merged_texts(sweep, old, runs),
        questions=_merged_questions(sweep, old, runs),
        fine_tuning=fine_tuning,
        question_config=question_config,
        seeds=tuple(sorted({*old.seeds, *sweep.seeds})),
        lengths=tuple(sorted({*old.lengths, *(n for run in runs for n in run.lengths)})),
        commands=old.commands,
        data=str(sweep.data) if sweep.data is not None else None,
        algorithms=_union(old.algorithms, sweep.algorithms),
    )


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


def _merged_questions(sweep: Sweep, old: SweepRecord, runs: list[SweepRun]) -> dict[str, EvaluationQuestions]:
    """Merge the question folders with recorded ones. Raises UserError: a name has another folder."""
    questions = dict(old.questions)
    for name, folder in sweep.questions.items():
        path, run_names = Path(folder.data), [m.run_name(seed, name) for m in sweep.methods for seed in sweep.seeds]
        evaluations = [evaluation for run in runs if run.name in run_names for evaluation in run.evaluations]
        keys = [key for evaluation in evaluations for key in evaluation.keys]
        sets = tuple(dict.fromkeys(key.set for key in keys if isinstance(key, QuestionKey)))
        digest = dataset.dataset_digest(path)
        if name in questions and questions[name].digest != digest:
            raise UserError(f"{sweep.out} holds other questions '{name}': choose another name or --out")
        old_sets = questions[name].sets if name in questions else ()
        questions[name] = EvaluationQuestions(str(path), digest, _union(old_sets, sets))
    return questions


def with_commands(record: SweepRecord, pending: Mapping[SweepRun, list[Stage]]) -> SweepRecord:
    """Add the commands of pending stages to a record.

    Args:
        record: record of the sweep.
        pending: stages that are left, by run.

    Returns:
        The new record.
    """
    commands = {name: dict(stages) for name, stages in record.commands.items()}
    for run, stages in pending.items():
        lines = commands.setdefault(run.name, {})
        for stage in stages:
            lines[stage.name] = _union(lines.get(stage.name, ()), (shlex.join(stage.command),))
    return replace(record, commands=commands)


def _union(first: Sequence[str], second: Iterable[str]) -> tuple[str, ...]:
    return tuple(dict.fromkeys([*first, *second]))
