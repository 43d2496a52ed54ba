"""Options of a training, derived from the fields of :class:`~fairseq_rpe.runs.training_config.TrainingConfig`."""

import argparse
import types
import typing
from collections.abc import Collection, Mapping
from functools import cache
from pathlib import Path
from typing import Any, Literal

from fairseq_rpe.checkpoints.model_sizes import MODEL_SIZES
from fairseq_rpe.cli import options
from fairseq_rpe.runs.defaults import defaults_for
from fairseq_rpe.runs.training_config import SETTINGS, Decay, Processes, Rank, Rate, Seed, TrainingConfig, option_name
from fairseq_rpe.utils.records import Betas, Count, Fraction, NonEmptyText, NonNegative

# annotation of a field -> parser of its value
_PARSERS = {
    Betas: options.betas,
    Count: options.positive_int,
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
_ALIASES = {"finetune_from": ["--init-from"]}
_OTHER_PARSERS = {"master": options.address}
SWEEP_SETTINGS = tuple(name for name, s in SETTINGS.items() if s.in_sweep)


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
        return _default_by_arch(name) + (f"; {SHORT_WARMUP}" if name == "warmup" else "")
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
