"""Flags of fairseq-train for a training, derived from the fields of :class:`TrainingConfig`."""

from typing import Any

from fairseq_rpe.runs import training_data
from fairseq_rpe.runs.settings import ResolvedSettings, TrainingPlan
from fairseq_rpe.runs.training_config import PROGRESS, SETTINGS, TrainingConfig
from fairseq_rpe.utils.files import PACKAGE_DIR

# flags that no option changes
_CONSTANT_FLAGS = (
    *("--user-dir", str(PACKAGE_DIR), "--optimizer", "adam"),
    *("--keep-interval-updates", "1", "--no-epoch-checkpoints", "--num-workers", "0"),
)
_WARMUP_START = ("--warmup-init-lr", "1e-7")
_FILES = ("rpe_module", "finetune_from")  # settings of a run that run.json records as digests of files


def training_flags(config: TrainingConfig, plan: TrainingPlan) -> list[str]:
    """Return the flags of fairseq-train, without those for devices and processes.

    Args:
        config: configuration of the training.
        plan: settings and numbers of updates that the configuration resolves to.

    Returns:
        Flags and values; words after ``--`` come last, so that they win.
    """
    flags = [*_task_flags(config, plan.settings), *_CONSTANT_FLAGS]
    for name, s in SETTINGS.items():
        if s.flags and s.is_passed:
            flags += _flag(s.flags[0], _value(name, config, plan))
    flags += [*_batch_flags(plan.settings), *_schedule_flags(plan.settings)]
    flags += ["--log-format", "json" if config.log_format == PROGRESS else config.log_format]
    return [*flags, *config.extra]


def _value(name: str, config: TrainingConfig, plan: TrainingPlan) -> Any:
    """Return the value that a setting is passed with, None to pass no flag."""
    s = SETTINGS[name]
    if s.is_identity and name not in _FILES:
        value = getattr(plan.settings, name)
        return s.default if value is None and s.passes_default else value
    return getattr(plan, name) if hasattr(plan, name) else getattr(config, name)


def _flag(flag: str, value: Any) -> list[str]:
    """Return the words that pass a value: none for None and False, the flag alone for True."""
    if value is None or value is False:
        return []
    return [flag] if value is True else [flag, str(value)]


def _task_flags(config: TrainingConfig, s: ResolvedSettings) -> list[str]:
    """Return the flags for the data and the criterion: a generated task, questions, or text."""
    if config.algorithm:
        return ["--task", "rpe_algorithmic", "--algorithm", s.data or "", "--criterion", "answer_cross_entropy"]
    tokens = ["--tokens-per-sample", str(s.tokens)]
    if training_data.is_question_data(config.data):
        return [str(config.data), "--task", "rpe_answers", "--criterion", "answer_cross_entropy", *tokens]
    if s.blocks is not None or s.separate_documents:
        flags = [str(config.data), "--task", "rpe_language_modeling", "--criterion", "lm_cross_entropy"]
        flags += ["--blocks", s.effective("blocks"), *(["--separate-documents"] if s.separate_documents else [])]
        return [*flags, *tokens]
    flags = [str(config.data), "--task", "language_modeling", "--criterion", "lm_cross_entropy"]
    return [*flags, "--sample-break-mode", "none", *tokens]


def _batch_flags(s: ResolvedSettings) -> list[str]:
    """Return the flags for the size of a batch."""
    if s.blocks == "document":
        # rows of single documents may be short, so the batch is limited in tokens
        return ["--max-tokens", str(s.batch_sentences * s.tokens), "--required-batch-size-multiple", "1"]
    return ["--batch-size", str(s.batch_sentences)]


def _schedule_flags(s: ResolvedSettings) -> list[str]:
    """Return the flags for the learning-rate schedule."""
    if s.schedule == "linear":
        return ["--lr-scheduler", "polynomial_decay", "--total-num-update", str(s.last_update)]
    if s.schedule == "cosine":
        return ["--lr-scheduler", "cosine", "--min-lr", str(s.effective("min_lr")), *_WARMUP_START]
    return ["--lr-scheduler", "inverse_sqrt", *_WARMUP_START]
