"""Builds the runs of a sweep over questions: pre-training on text, then fine-tuning on each folder of questions."""

from __future__ import annotations

import sys
from collections.abc import Callable, Collection, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fairseq_rpe.core.errors import UserError
from fairseq_rpe.evaluation.question_records import QuestionKey, QuestionRequest, QuestionResult
from fairseq_rpe.kinds.text import KIND as TEXT
from fairseq_rpe.kinds.text import check_training_text
from fairseq_rpe.questions import dataset
from fairseq_rpe.questions.metrics import is_streamable
from fairseq_rpe.reports.kind_report import KindReport, MetricTags
from fairseq_rpe.reports.question_scores import Scores, load_scores
from fairseq_rpe.runs import training_data
from fairseq_rpe.runs.settings import make_plan
from fairseq_rpe.runs.training_config import TrainingConfig
from fairseq_rpe.sweeps import grid
from fairseq_rpe.sweeps.grid import Evaluation, ForwardPass, SweepRun
from fairseq_rpe.sweeps.recipes import FineTuningConfig, Preset, QuestionFolder, batch_per_process
from fairseq_rpe.sweeps.resolve import Inputs, Sweep
from fairseq_rpe.sweeps.sweep_kind import SweepKind
from fairseq_rpe.sweeps.sweep_record import Method, QuestionConfig, SweepFolder, SweepRecord

if TYPE_CHECKING:
    from fairseq_rpe.reports.chapters.training import TrainedRun
    from fairseq_rpe.reports.page import ReportContent


class AnswersKind(SweepKind):
    """Evaluation on questions: pre-training on text, fine-tuning on each folder of questions, scores of answers."""

    name = "answers"
    default_split = "valid"
    result_type = QuestionResult

    def select_presets(self, presets: dict[str, Preset], source: str) -> dict[str, Preset]:
        """Return the presets with questions; a preset of the recipe's base may have none."""
        has_questions = {label: "questions" in preset.question_keys() for label, preset in presets.items()}
        for label, preset in presets.items():
            if not has_questions[label] and (preset.question_keys() or not any(has_questions.values())):
                raise UserError(f"{source}: preset '{label}' lacks questions: name a prepared folder of them")
        return {label: preset for label, preset in presets.items() if has_questions[label]}

    def build_runs(self, sweep: Sweep, inputs: Inputs, without_bias: Collection[str] = ()) -> list[SweepRun]:
        """Build a pre-training for each (encoding, seed) and a fine-tuning for each (question folder, method, seed).

        A fine-tuning starts from the pre-training of its method, or of the method that this one continues. The
        pre-trainings come first.
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
                        pretrainings[parent] = _pretraining(sweep, source, seed, inputs.data, logs_encodings)
                    name = method.run_name(seed, label)
                    if name not in fine_tunings:
                        logs_encodings = method.rpe not in without_bias
                        fine_tunings[name] = _fine_tuning(
                            sweep, label, inputs.questions[label], method, seed, pretrainings[parent], logs_encodings
                        )
                    fine_tunings[name].evaluations.append(_evaluation(sweep, folder, fine_tunings[name], method))
        return [*pretrainings.values(), *fine_tunings.values()]

    def check_lengths(self, sweep: Sweep, runs: Sequence[SweepRun]) -> None:
        """Check that questions fit into the training length, and that the text fills its blocks."""
        pretrainings = [run for run in runs if run.parent is None]
        for run in runs:
            data = run.config.data
            if run.parent is not None and data is not None and data.is_dir():
                training_data.check_questions(data, run.plan.settings.tokens, run.config.extra)
        if sweep.data is not None and sweep.data.is_dir():
            check_training_text(sweep, max(run.plan.settings.tokens for run in pretrainings))


class AnswersReport(KindReport[Scores]):
    """Report on scores of answers."""

    subject = "questions"
    measured = "scores of answers"
    csv_name, figure_name = "scores", "scores"
    extra_tables = ("effective_length.csv",)

    def load_results(self, folder: SweepFolder, record: SweepRecord) -> Scores:
        """Read the scores of the finished runs."""
        return load_scores(folder, record)

    def content_builder(
        self, folder: SweepFolder, record: SweepRecord, runs: Sequence[TrainedRun], results: Scores, delta: float
    ) -> tuple[Callable[[], ReportContent], dict[str, str]]:
        """Return chapters on scores, and the CSV file of effective lengths."""
        from fairseq_rpe.reports import effective_length
        from fairseq_rpe.reports.chapters import effective_length as length_chapter
        from fairseq_rpe.reports.chapters import question_answering

        lengths = effective_length.score_lengths(results)
        blocks = length_chapter.score_blocks(lengths)
        builder = partial(question_answering.build_content, folder, record, runs, results, blocks)
        return builder, {effective_length.CSV_NAME: effective_length.lengths_csv(lengths)}

    def metric_tags(self, results: Scores) -> MetricTags:
        """Return a metric per length of the context, and the effective lengths."""
        from fairseq_rpe.reports import effective_length

        names = {f"score_at/{n}": f"mean score (%) at {n} tokens" for n in results.lengths}
        names |= effective_length.titles_by_tag(effective_length.score_lengths(results))
        return MetricTags(names, "1_by_length/score", "mean score in % over context length (step = tokens)")

    def metrics_and_curve(
        self, results: Scores, method: str, task: str | None
    ) -> tuple[dict[str, float], dict[int, float]]:
        """Return the mean scores and the effective lengths of a run."""
        from fairseq_rpe.reports import effective_length

        curve = {length: values[0] for length, values in results.set_means(method).items()}
        lengths = effective_length.lengths_by_tag(effective_length.score_lengths(results))
        return {f"score_at/{length}": value for length, value in curve.items()} | lengths, curve


def _passes(keys: Sequence[QuestionKey], data: Path) -> list[ForwardPass]:
    """Return, for each length of the context, the number of tokens that all questions of a set have together."""
    sets = dataset.load_dataset(data).sets if data.is_dir() else None
    counts = [sets[key.set].splits[key.split].questions if sets else 1 for key in keys]
    return [ForwardPass(count * key.length, key.length) for count, key in zip(counts, keys, strict=True)]


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
    config = grid.training_config(replace(sweep, out=out), method, seed, None, None, logs_encodings)
    folder = SweepFolder(out).run_folder(method, seed)
    return SweepRun(folder, config, make_plan(config, digest or ""), TEXT.result_type)


def _fine_tuning(
    sweep: Sweep, label: str, digest: str, method: Method, seed: int, parent: SweepRun, logs_encodings: bool
) -> SweepRun:
    preset = sweep.preset or Preset()
    tuning, question_config = preset.tuning or FineTuningConfig(), preset.question_config or QuestionConfig()
    config = grid.training_config(sweep, method, seed, None, parent, logs_encodings)
    sweep_folder, data = SweepFolder(sweep.out), Path(sweep.questions[label].data)
    folder = sweep_folder.run_folder(method, seed, label)
    # encodings and positions keep the length of the pre-training
    length_flags = ["--rpe-train-length", str(parent.plan.settings.tokens)]
    config = replace(
        _with_fine_tuning_settings(config, tuning, sweep.base_config),
        data=data,
        blocks=None,  # each question is a row
        separate_documents=None,
        out=folder.checkpoints.path,
        tensorboard=sweep_folder.tensorboard / folder.name,
        extra=(*config.extra, *length_flags, *tuning.flags(question_config)),
    )
    kind = question_config.checkpoint
    if kind == "best" and data.is_dir():
        _check_scores(data)
    plan = grid.plan_continuation(method, config, digest)
    return SweepRun(folder, config, plan, KIND.result_type, parent, checkpoint_kind=kind)


def _check_scores(data: Path) -> None:
    """Check that a set of the folder has a score that validation can compute."""
    if not any(is_streamable(info.published) for info in dataset.load_dataset(data).sets.values()):
        raise UserError(
            f"no set of {data} is scored by a mean over questions, which selects the best checkpoint: leave out "
            "question_config.checkpoint"
        )


def _with_fine_tuning_settings(
    config: TrainingConfig, tuning: FineTuningConfig, base: TrainingConfig
) -> TrainingConfig:
    """Replace the settings of the pre-training that the fine-tuning changes."""
    settings: dict[str, Any] = {key: value for key, value in tuning.stated().items() if hasattr(config, key)}
    if tuning.batch_sentences is not None:
        settings["batch_sentences"] = batch_per_process(tuning.batch_sentences, base)
    if (tuning.schedule or config.schedule) != "cosine":
        settings["min_lr"] = None
    return replace(config, **settings)


def _evaluation(sweep: Sweep, folder: QuestionFolder, run: SweepRun, method: Method) -> Evaluation:
    """Return the command that evaluates a fine-tuned model at every length that its positions allow."""
    config = (sweep.preset or Preset()).question_config or QuestionConfig()
    data, pretraining_length = Path(folder.data), (run.parent or run).plan.settings.tokens
    limit = method.position_limit(pretraining_length)
    lengths, skipped = grid.lengths_within_limit(limit, sweep.lengths, method, "tokens")
    request = QuestionRequest(
        checkpoint=run.folder.checkpoints.checkpoint_path(config.checkpoint),
        data=data,
        lengths=lengths,
        sets=folder.sets or None,
        split=sweep.split,
        rpe=method.rpe_eval,
        positions_eval=method.positions_eval,
        rpe_module=run.config.rpe_module,
        **config.options,
    )
    words = grid.command_line("eval-questions", str(request.checkpoint), str(data), "--split", sweep.split)
    words += ["--sets", ",".join(folder.sets)] if folder.sets else []
    changed = {key: value for key, value in config.options.items() if value != getattr(QuestionConfig(), key)}
    words += [word for key, value in changed.items() for word in (f"--{key.replace('_', '-')}", str(value))]
    words += ["--predictions", str(run.folder.answers / method.name)]
    words += grid.common_arguments(run, method, lengths)
    keys = request.keys_for_digest("") if data.is_dir() else _presumed_keys(request, method, run.config)
    return Evaluation(words, tuple(keys), partial(_passes, keys, data), data, skipped_lengths=skipped)


def _presumed_keys(request: QuestionRequest, method: Method, config: TrainingConfig) -> list[QuestionKey]:
    """Return the keys of a folder that does not exist yet; without ``sets``, of one set with an empty name."""
    key = grid.method_key(QuestionKey, method, config, data="", split=request.split, set="")
    return [replace(key, set=name, length=n) for name in request.sets or ("",) for n in request.lengths]


KIND = AnswersKind()
REPORT = AnswersReport()
