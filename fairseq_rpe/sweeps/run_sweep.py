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
    Method,
    QuestionConfig,
    SweepFolder,
    SweepRecord,
    SweepSettings,
)
from fairseq_rpe.utils.files import exclusive_lock

SlurmSettings = Sequence[tuple[str, str]] | None  # (option of sbatch, value) pairs; None runs on this machine


def check_data(sweep: Sweep, dry: bool = False) -> str | None:
    """Check the texts and question folders of a sweep.

    Args:
        sweep: sweep whose folders are checked.
        dry: whether commands are only printed; then folders that the recipe prepares need not exist.

    Returns:
        The digest of the text of the training; None for generated tasks, or if a dry run has no text yet.

    Raises:
        UserError: a folder is missing or incomplete, or has another vocabulary than the recipe or the training.
    """
    if sweep.data is None:
        return None
    digest = symbols = None  # of a text that does not exist yet
    if not (dry and sweep.preparation and not sweep.data.is_dir()):
        digest, symbols = _check_training_text(sweep, sweep.data)
    _check_evaluation_texts(sweep, symbols, dry, digest)
    _check_questions(sweep, symbols, dry)
    return digest


def _check_training_text(sweep: Sweep, data: Path) -> tuple[str, Sequence[str]]:
    """Check the text of the training, and return its digest and its vocabulary."""
    if sweep.preparation and not data.is_dir():
        command = shlex.join(("fairseq-rpe", *sweep.preparation))
        raise UserError(f"data folder {data} does not exist: make it with {command}")
    if dataset.is_question_folder(data):
        raise UserError(
            f"{data} holds questions, and a sweep trains on a text first: name a text, and give the questions to "
            f"a recipe about answers, e.g. --recipe fire-scrolls --eval-data NAME={data}"
        )
    # with questions, the models are not scored on this text
    corpus.check_folder(data, "train", "valid", *([] if sweep.questions else [sweep.split]))
    if sweep.preset is not None:
        sweep.preset.check(data)
    return corpus.corpus_digest(data), corpus.read_dictionary(data / "dict.txt")


def _check_evaluation_texts(sweep: Sweep, symbols: Sequence[str] | None, dry: bool, digest: str | None) -> None:
    """Check that further texts of the evaluation exist, differ, and have the vocabulary ``symbols`` of the training.

    ``symbols`` and ``digest`` of the text of the training are None if it does not exist yet.
    """
    names_by_digest = {} if digest is None else {digest: "the one that is trained on"}
    for name, path in sweep.evaluate.items():
        command = shlex.join(("fairseq-rpe", *sweep.preparation_of_text(name)))
        if not path.is_dir():
            if dry and name in sweep.prepared:
                continue
            raise UserError(f"data folder {path} does not exist: make it with {command}")
        corpus.check_text_folder(path, sweep.split)
        _check_vocabulary(sweep, path, symbols, command)
        digest_of_text = corpus.corpus_digest(path)
        if same := names_by_digest.get(digest_of_text):
            raise UserError(f"--eval-data {name}: {path} holds the same text as {same}: leave it out")
        names_by_digest[digest_of_text] = name


def _check_vocabulary(sweep: Sweep, path: Path, symbols: Sequence[str] | None, command: str) -> None:
    """Check that a folder has the vocabulary of the training; ``command`` prepares one that has."""
    if symbols is not None and corpus.read_dictionary(path / "dict.txt") != symbols:
        raise UserError(f"{path} has another vocabulary than {sweep.data}: prepare another folder, e.g. {command}")


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
        _check_vocabulary(sweep, path, symbols, command)


def check_lengths(sweep: Sweep, runs: list[SweepRun]) -> None:
    """Check that texts fill blocks, questions fit into the training length, and batches hold a block.

    Args:
        sweep: sweep whose data and lengths are checked.
        runs: all its runs, pre-trainings and fine-tunings.

    Raises:
        UserError: a text is too short, a question too long, or ``--max-tokens`` too small.
    """
    longest = max([*sweep.lengths, *(run.plan.settings.tokens for run in runs if run.kind == "text")], default=0)
    if sweep.max_tokens and sweep.max_tokens < longest:
        raise UserError(f"--max-tokens {sweep.max_tokens} is less than length {longest}: raise it")
    for run in runs:
        data = run.request.data
        if run.kind == "answers" and data is not None and data.is_dir():
            training_data.check_questions(data, run.plan.settings.tokens, run.request.extra)
    if sweep.data is not None and sweep.data.is_dir():
        train_tokens = max(run.plan.settings.tokens for run in runs if run.kind != "answers")
        _check_text_lengths(sweep, sweep.data, train_tokens)


def _check_text_lengths(sweep: Sweep, data: Path, train_tokens: int) -> None:
    """Check that texts fill blocks of the training length, and of the lengths of the evaluation in tokens."""
    base = sweep.base_request
    by_document = base.blocks == "document"
    training_data.check_blocks(data, train_tokens, base.blocks, bool(base.separate_documents))
    if sweep.questions:
        return  # lengths are those of questions
    longest = max(train_tokens, *sweep.lengths)
    for text in filter(Path.is_dir, (data, *sweep.evaluate.values())):
        corpus.check_block_length(text, sweep.split, longest)
        if by_document or base.separate_documents:
            corpus.check_documents(text, sweep.split)
        if by_document:
            corpus.check_document_block(text, sweep.split, longest)


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
    base = sweep.base_request
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
    base = sweep.base_request
    with contextlib.ExitStack() as locks:
        # a job of an earlier sbatch holds the lock of its run
        for run in pending:
            message = f"a job is busy with {run.name}: wait for it, or stop it with scancel"
            locks.enter_context(exclusive_lock(run.folder.lock, message))
        environments = local_executor.job_environments(base.device, base.nproc, sweep.jobs)
        return local_executor.run_stages(pending, runs, environments)


def merged_record(sweep: Sweep, runs: list[SweepRun]) -> SweepRecord:
    """Merge a sweep with the record in its folder: methods, tasks, lengths and seeds may be added.

    Args:
        sweep: sweep whose folder is read.
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
        questions=_merged_questions(sweep, old, runs),
        fine_tuning=fine_tuning,
        question_config=question_config,
        seeds=tuple(sorted({*old.seeds, *sweep.seeds})),
        lengths=tuple(sorted({*old.lengths, *(n for run in runs for n in run.lengths)})),
        commands=old.commands,
        data=str(sweep.data) if sweep.data is not None else None,
        algorithms=_union(old.algorithms, sweep.algorithms),
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
    settings = SweepSettings(**{**vars(first.settings), **unshared}, updates=first.updates, split=sweep.split)
    if not sweep.questions:
        return settings, None, None
    shared: dict[str, Any] = {**vars(last.settings), **unshared, "data": None, "finetune_from": None}
    fine_tuning = SweepSettings(**shared, updates=last.updates, split=sweep.split)
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
    if before.kind != ("algorithms" if sweep.algorithms else "answers" if sweep.questions else "text"):
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


def _merged_questions(sweep: Sweep, old: SweepRecord, runs: list[SweepRun]) -> dict[str, EvaluationQuestions]:
    """Merge the question folders with recorded ones. Raises UserError: a name has another folder."""
    questions = dict(old.questions)
    for name, folder in sweep.questions.items():
        digest = dataset.dataset_digest(Path(folder.data))
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
            lines[stage.name] = _union(lines.get(stage.name, ()), (shlex.join(stage.command),))
    return replace(record, commands=commands)


def _union(first: Sequence[str], second: Iterable[str]) -> tuple[str, ...]:
    """Return the elements of both, each once, in the order of their first occurrence."""
    return tuple(dict.fromkeys([*first, *second]))
