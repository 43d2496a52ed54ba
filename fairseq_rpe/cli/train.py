"""``train``: run fairseq-train once, with good defaults and resuming; options of a training, for other commands too.

The options are derived from the fields of :class:`~fairseq_rpe.runs.training_config.TrainingConfig`.
"""

import argparse
import shlex
import types
import typing
from collections.abc import Collection, Mapping
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any, Literal

from fairseq_rpe.checkpoints.model_sizes import MODEL_SIZES
from fairseq_rpe.cli import options
from fairseq_rpe.core.errors import UserError
from fairseq_rpe.runs.defaults import defaults_for
from fairseq_rpe.runs.training_config import SETTINGS, Decay, Processes, Rank, Rate, Seed, TrainingConfig, option_name
from fairseq_rpe.utils.records import Betas, Count, Counts, Fraction, NonEmptyText, NonNegative

# annotation of a field -> parser of its value
_PARSERS = {
    Betas: options.betas,
    Count: options.positive_int,
    Counts: options.int_list,
    Decay: options.decay,
    Fraction: options.fraction,
    NonEmptyText: options.spec,
    NonNegative: options.nonnegative_float,
    Path: Path,
    Processes: options.processes,
    Rank: options.nonnegative_int,
    Rate: options.rate,
    Seed: options.seed,
    str: str,
}
SHORT_WARMUP = "at most a fifth of the updates"  # runs.defaults.WARMUP_SHARE in words
# how the default of a short training differs
_SHORT_TRAINING = {"warmup": f"; {SHORT_WARMUP}", "save_every": "; half of the updates if the training is shorter"}
_ALIASES = {"finetune_from": ["--init-from"]}
_OTHER_PARSERS = {"master": options.address}


@cache
def _annotations() -> Mapping[str, Any]:
    """Return the annotation of each field of a configuration, without None."""
    hints = typing.get_type_hints(TrainingConfig, include_extras=True)
    return {name: _without_none(hint) for name, hint in hints.items()}


def _without_none(hint: Any) -> Any:
    if typing.get_origin(hint) in (typing.Union, types.UnionType):
        return next(kind for kind in typing.get_args(hint) if kind is not types.NoneType)
    return hint


def add_settings(
    parser: argparse.ArgumentParser, names: Collection[str], help: Mapping[str, str] | None = None
) -> None:
    """Add options for settings of a training; the value of an option that is not given is None.

    Args:
        parser: parser of the command.
        names: fields of a configuration.
        help: help texts by field, in place of those of the fields.
    """
    for name in names:
        about = (help or {}).get(name) or help_text(name)
        hint = _annotations()[name]
        arguments: dict[str, Any] = {"help": about}
        if hint is bool:
            arguments["action"] = argparse.BooleanOptionalAction
        elif typing.get_origin(hint) is Literal:
            arguments["choices"] = typing.get_args(hint)
        else:
            arguments |= {"type": _OTHER_PARSERS.get(name) or _PARSERS[hint], "metavar": SETTINGS[name].metavar}
        parser.add_argument(option_name(name), *_ALIASES.get(name, []), **arguments)


def add_fairseq_flags(parser: argparse.ArgumentParser) -> None:
    """Allow flags of fairseq-train after ``--``, for a command whose trainings import ``--rpe-module`` themselves."""
    parser.epilog = "Flags of fairseq-train may follow after a separate --"
    parser.set_defaults(extra=(), load_now=False)


def stated_settings(args: argparse.Namespace) -> dict[str, Any]:
    """Return the settings that a command line states, by field of a configuration.

    Args:
        args: parsed command line.
    """
    values = {name: getattr(args, name, None) for name in SETTINGS}
    return {name: value for name, value in values.items() if value is not None and value != ()}


def help_text(name: str) -> str:
    """Return the help text of a setting with its default.

    Args:
        name: field of a configuration.
    """
    about = f"{', '.join(MODEL_SIZES)} or a full name" if name == "arch" else SETTINGS[name].help
    default = _default_words(name)
    return f"{about} (default: {default})" if default else about


def _default_words(name: str) -> str:
    """Return the default of a setting in words, empty if there is none."""
    if SETTINGS[name].default_words:
        return SETTINGS[name].default_words
    if getattr(defaults_for("tiny", False), name, None) is not None:
        return _default_by_arch(name) + _SHORT_TRAINING.get(name, "")
    value = getattr(TrainingConfig, name, None)
    default = SETTINGS[name].default if value in (None, ()) else value
    return "" if default is None else format(default, "g") if isinstance(default, float) else str(default)


def _default_by_arch(name: str) -> str:
    """Return the default of a setting that depends on the architecture and on the kind of data."""

    def describe(algorithm: bool) -> str:
        tiny, other = (getattr(defaults_for(arch, algorithm), name) for arch in ("tiny", "base"))
        return f"{tiny} for tiny, else {other}" if tiny != other else str(tiny)

    text, task = describe(algorithm=False), describe(algorithm=True)
    # a generated task determines its own lengths
    return text + (f"; generated tasks: {task}" if task != text and name != "tokens" else "")


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the options of ``train``."""
    parser.description = "Train a language model with fairseq-train. To resume an interrupted run, repeat the command."
    parser.add_argument("data", type=Path, nargs="?", metavar="DATA", help=help_text("data"))
    about = "start from the configuration in this run.json; options that are given replace its settings"
    parser.add_argument("--from-run", type=Path, metavar="FILE", help=about)
    add_settings(parser, [name for name in SETTINGS if name not in ("data", "extra")])
    options.add_no_cache(parser)
    parser.add_argument("--dry-run", action="store_true", help="print the fairseq-train command and do not run it")
    add_fairseq_flags(parser)


def config_from_args(args: argparse.Namespace) -> TrainingConfig:
    """Return the configuration that a command line of ``train`` names.

    Args:
        args: parsed command line.

    Returns:
        The configuration; with ``--from-run`` that of the run, with the options of the command line in place of its
        settings.

    Raises:
        UserError: the encoding or the output folder is missing, or the record of the run has no valid configuration.
    """
    stated = stated_settings(args)
    if args.from_run is not None:
        from fairseq_rpe.runs.run_folder import read_run_config

        return replace(read_run_config(args.from_run), **stated)
    for name, value in (("rpe", "SPEC"), ("out", "DIR")):
        if name not in stated:
            raise UserError(f"{option_name(name)} is missing: give {option_name(name)} {value}, {SETTINGS[name].help}")
    return TrainingConfig(**stated)


def run(args: argparse.Namespace) -> None:
    """Run ``train``."""
    from fairseq_rpe.checkpoints import checkpoint_file
    from fairseq_rpe.data.folder import check_not_data
    from fairseq_rpe.runs import launch, training_data
    from fairseq_rpe.runs.run_folder import CheckpointFolder, check_no_sweep

    config = config_from_args(args)
    check_not_data("--out", config.out)
    check_no_sweep("--out", config.out)
    if config.log_encodings_every and not config.tensorboard:
        raise UserError("--log-encodings-every writes to TensorBoard: give --tensorboard DIR too")
    if config.finetune_from:
        from fairseq_rpe.runs import from_checkpoint

        if config.finetune_from.is_file():  # a missing file is refused below
            config = from_checkpoint.with_checkpoint_rotation(config)
        if training_data.is_question_data(config.data):
            config = from_checkpoint.with_checkpoint_settings(config)
    plan = training_data.make_checked_plan(config)
    if config.finetune_from:
        checkpoint_file.check_file(config.finetune_from)
    node = launch.current_node(config)
    if args.dry_run:
        from fairseq_rpe.runs.model_check import check_model

        check_model(config, plan)
        print(shlex.join(launch.training_command(config, plan, node, launch.count_gpus(config, dry=True))))
        return
    if (folder := CheckpointFolder(config.out)).finished_digest(plan):
        folder.check_intermediate(config.keep_at or (), plan.updates, "--keep-at")
        folder.record_intermediate(config.keep_at or ())
        print(f"{config.out} already holds the finished run of {plan.updates} updates")
        return
    from fairseq_rpe.runs import train

    train.check_training(config, plan)
    train.train(config, plan, node)
