"""Builds the runs of a sweep over questions: pre-training on text, then fine-tuning on each folder of questions."""

import sys
from collections.abc import Collection
from dataclasses import replace
from pathlib import Path
from typing import Any

from fairseq_rpe.core.errors import UserError
from fairseq_rpe.evaluation import records
from fairseq_rpe.evaluation.position_limits import max_length
from fairseq_rpe.evaluation.question_records import QuestionKey, QuestionRequest
from fairseq_rpe.questions import dataset
from fairseq_rpe.questions.metrics import is_streamable
from fairseq_rpe.runs.settings import TrainingRequest, make_plan
from fairseq_rpe.sweeps.grid import (
    Evaluation,
    SweepRun,
    command_line,
    common_arguments,
    lengths_within_limit,
    plan_continuation,
    training_request,
)
from fairseq_rpe.sweeps.recipes import FineTuningConfig, Preset, QuestionFolder, batch_per_process
from fairseq_rpe.sweeps.resolve import Sweep
from fairseq_rpe.sweeps.sweep_record import Method, QuestionConfig, SweepFolder


def build_fine_tuning_runs(sweep: Sweep, data_digest: str | None, without_bias: Collection[str] = ()) -> list[SweepRun]:
    """Build a pre-training for each (encoding, seed) and a fine-tuning for each (question folder, method, seed).

    A fine-tuning starts from the pre-training of its method, or of the method that this one continues.

    Args:
        sweep: resolved sweep over questions.
        data_digest: digest of the text of the pre-trainings, None if it does not exist yet.
        without_bias: encodings that are trained without ``--log-encodings-every``.

    Returns:
        The pre-trainings, then the fine-tunings.

    Raises:
        UserError: a folder of questions cannot be evaluated.
    """
    trained = {method.name: method for method in sweep.trained}
    pretrainings: dict[str, SweepRun] = {}
    fine_tunings: dict[str, SweepRun] = {}
    for label, folder in sweep.questions.items():
        for method in sweep.methods:
            source = trained[method.continues or method.name]
            for seed in sweep.seeds:
                parent = source.run_name(seed)
                if parent not in pretrainings:
                    logs_encodings = source.rpe not in without_bias
                    pretrainings[parent] = _pretraining(sweep, source, seed, data_digest, logs_encodings)
                name = method.run_name(seed, label)
                if name not in fine_tunings:
                    logs_encodings = method.rpe not in without_bias
                    fine_tunings[name] = _fine_tuning(sweep, label, method, seed, pretrainings[parent], logs_encodings)
                fine_tunings[name].evaluations.append(_evaluation(sweep, folder, fine_tunings[name], method))
    return [*pretrainings.values(), *fine_tunings.values()]


def _pretraining(sweep: Sweep, method: Method, seed: int, digest: str | None, logs_encodings: bool) -> SweepRun:
    """Return the pre-training of a method: one of this sweep, or the same one finished in the folder ``pretrained``."""
    run = _training_on_text(sweep, sweep.out, method, seed, digest, logs_encodings)
    preset = sweep.preset
    if preset is None or preset.pretrained is None or run.folder.checkpoints.read_record() is not None:
        return run
    other = _training_on_text(sweep, Path(preset.pretrained), method, seed, digest, logs_encodings)
    folder = other.folder.checkpoints
    record = folder.read_record()
    if record is None:
        return run
    difference = other.plan.settings.difference(record.settings)
    if not difference and folder.finished_digest(other.plan) is not None:
        return other
    print(f"{folder.path} is not used: {difference or 'its training is not finished'}", file=sys.stderr)
    return run


def _training_on_text(
    sweep: Sweep, out: Path, method: Method, seed: int, digest: str | None, logs_encodings: bool
) -> SweepRun:
    request = training_request(replace(sweep, out=out), method, seed, None, None, logs_encodings)
    return SweepRun(SweepFolder(out).run_folder(method, seed), request, make_plan(request, digest or ""))


def _fine_tuning(
    sweep: Sweep, label: str, method: Method, seed: int, parent: SweepRun, logs_encodings: bool
) -> SweepRun:
    preset = sweep.preset or Preset()
    config, question_config = preset.tuning or FineTuningConfig(), preset.question_config or QuestionConfig()
    request = training_request(sweep, method, seed, None, parent, logs_encodings)
    sweep_folder, data = SweepFolder(sweep.out), Path(sweep.questions[label].data)
    folder = sweep_folder.run_folder(method, seed, label)
    # encodings and positions keep the length of the pre-training
    length_flags = ["--rpe-train-length", str(parent.plan.settings.tokens)]
    request = replace(
        _with_fine_tuning_settings(request, config, sweep.base_request),
        data=data,
        blocks=None,  # each question is a row
        separate_documents=None,
        out=folder.checkpoints.path,
        tensorboard=sweep_folder.tensorboard / folder.name,
        extra=(*request.extra, *length_flags, *config.flags(question_config)),
    )
    digest = dataset.dataset_digest(data) if data.is_dir() else ""
    kind = question_config.checkpoint
    if kind == "best" and data.is_dir():
        _check_scores(data)
    plan = plan_continuation(method, request, digest)
    return SweepRun(folder, request, plan, parent, kind="answers", checkpoint_kind=kind)


def _check_scores(data: Path) -> None:
    """Check that a set of the folder has a score that validation can compute."""
    if not any(is_streamable(info.published) for info in dataset.load_dataset(data).sets.values()):
        raise UserError(
            f"no set of {data} is scored by a mean over questions, which selects the best checkpoint: leave out "
            "question_config.checkpoint"
        )


def _with_fine_tuning_settings(
    request: TrainingRequest, config: FineTuningConfig, base: TrainingRequest
) -> TrainingRequest:
    """Replace the settings of the pre-training that the fine-tuning changes."""
    settings: dict[str, Any] = {key: value for key, value in config.stated().items() if hasattr(request, key)}
    if config.batch_sentences is not None:
        settings["batch_sentences"] = batch_per_process(config.batch_sentences, base)
    if (config.schedule or request.schedule) != "cosine":
        settings["min_lr"] = None
    return replace(request, **settings)


def _evaluation(sweep: Sweep, folder: QuestionFolder, run: SweepRun, method: Method) -> Evaluation:
    """Return the command that evaluates a fine-tuned model at every length that its positions allow."""
    config = (sweep.preset or Preset()).question_config or QuestionConfig()
    data, pretraining_length = Path(folder.data), (run.parent or run).plan.settings.tokens
    limit = max_length(method.positions_eval, pretraining_length)
    lengths, skipped = lengths_within_limit(limit, sweep.lengths, method, "tokens")
    request = QuestionRequest(
        checkpoint=run.folder.checkpoints.checkpoint_path(config.checkpoint),
        data=data,
        lengths=lengths,
        sets=folder.sets or None,
        split=sweep.split,
        rpe=method.rpe_eval,
        positions_eval=method.positions_eval,
        answer_mode=config.answer_mode,
        beam=config.beam,
        truncate=config.truncate,
    )
    words = command_line("eval-questions", str(request.checkpoint), str(data), "--split", sweep.split)
    words += ["--sets", ",".join(folder.sets)] if folder.sets else []
    changed = {key: value for key, value in config.options.items() if value != getattr(QuestionConfig(), key)}
    words += [word for key, value in changed.items() for word in (f"--{key.replace('_', '-')}", str(value))]
    words += ["--predictions", str(run.folder.path / "answers" / method.name)]
    words += common_arguments(run, method, lengths)
    keys = request.keys_for_digest("") if data.is_dir() else _presumed_keys(request)
    return Evaluation(words, tuple(keys), data, skipped_lengths=skipped)


def _presumed_keys(request: QuestionRequest) -> list[QuestionKey]:
    """Return the keys of a folder that does not exist yet; without ``sets``, of one set with an empty name."""
    overrides: dict[str, Any] = {"rpe": request.rpe, "positions": request.positions_eval}
    overrides["draws"] = records.default_draws(request.positions_eval)
    key = QuestionKey(checkpoint="", data="", split=request.split, set="", **overrides, length=1)
    return [replace(key, set=name, length=n) for name in request.sets or ("",) for n in request.lengths]
