"""Patches of fairseq's command-line parsing, and the flags of this plugin for commands that load a checkpoint."""

import argparse
import sys
from typing import Any, NoReturn

from fairseq import options
from fairseq.dataclass.configs import CommonConfig

from fairseq_rpe.compat.monkeypatch import patch
from fairseq_rpe.core.errors import UserError
from fairseq_rpe.encodings import load_module

overrides: dict[str, str] = {}  # settings of checkpoints that the flags of the current command replace


def is_replaced(settings: Any, key: str, value: object) -> bool:
    """Return whether a setting of a loaded model has the value that replaces the checkpoint's.

    The spec of an encoding may be another one, because loading completes it with the checkpoint's rotation.

    Args:
        settings: configuration of the loaded model.
        key: name of the setting.
        value: the value that replaces the checkpoint's.
    """
    current = getattr(settings, key, None)
    return current is not None if key == "rpe" else current == value


@patch(options, "parse_args_and_arch")
def check_flags_and_fix_bf16(
    original: Any, parser: Any, input_args: list[str] | None = None, *args: Any, **kwargs: Any
) -> Any:
    """Refuse flags that fairseq would ignore or fail on later, and reset ``tpu``.

    ``--bf16`` also sets ``tpu``, which then fails without an XLA device. ``--rpe-eval`` is a flag of every command, but
    training would ignore it. fairseq's FSDP is that of fairscale, last released in 2022: it fails on CPUs with torch
    2.13, and these models, whose parameters are read outside the forward pass, were never tested with it on GPUs.
    """
    parser.error = _refuse
    result = original(parser, input_args, *args, **kwargs)
    settings = result[0] if isinstance(result, tuple) else result
    if getattr(settings, "bf16", False) and "--tpu" not in (sys.argv if input_args is None else input_args):
        settings.tpu = False
    if "rpe" in overrides and hasattr(settings, "max_update"):  # only fairseq-train has this flag
        raise UserError("--rpe-eval belongs to evaluation: train with --rpe")
    if getattr(settings, "ddp_backend", None) == "fully_sharded":
        raise UserError(
            "--ddp-backend fully_sharded is refused: fairseq's FSDP is fairscale's, which fails on CPUs and "
            "was never tested with these models; drop it and, for memory, lower --batch-size and raise --update-freq"
        )
    return result


def _refuse(message: str) -> NoReturn:
    """Raise UserError; fairseq's parser would print more than a hundred lines of usage."""
    raise UserError(f"{message}: the --help of fairseq's command lists its flags")


class _OverrideAction(argparse.Action):
    """Stores a setting in :data:`overrides` under the name ``const``; without a name, loads a module of encodings."""

    def __call__(self, parser: Any, namespace: Any, value: Any, option_string: str | None = None) -> None:
        setting = self.const
        if setting is None:
            load_module(value)
        else:
            overrides[setting] = value
        setattr(namespace, self.dest, value)


@patch(options, "gen_parser_from_dataclass")
def add_flags_to_every_command(original: Any, parser: Any, dataclass_instance: Any, *args: Any, **kwargs: Any) -> Any:
    """Add four flags to every command; flags of a model exist only in training, but these apply to checkpoints too.

    fairseq builds the parser of each command with this function, right after importing the plugin.
    """
    if isinstance(dataclass_instance, CommonConfig):
        overrides.clear()
        for flag, metavar, setting, text in (
            ("--rpe-module", "FILE", None, "Python file that registers your encodings"),
            ("--rpe-eval", "SPEC", "rpe", "evaluate with this encoding instead of the checkpoint's"),
            ("--positions-eval", "SPEC", "positions_eval", "position transform in evaluation"),
            ("--compute-dtype", "NAME", "compute_dtype", "dtype of matrix products: fp32 or bf16"),
        ):
            parser.add_argument(flag, metavar=metavar, action=_OverrideAction, const=setting, default=None, help=text)
    return original(parser, dataclass_instance, *args, **kwargs)
