"""Flags: what fairseq makes of its own, and those of this plugin in the commands that use a checkpoint."""

import argparse
import sys
from typing import Any, NoReturn

from fairseq import options
from fairseq.dataclass.configs import CommonConfig

from fairseq_rpe.compat.monkeypatch import replaces
from fairseq_rpe.core.errors import UserError
from fairseq_rpe.encodings import load_module

overrides: dict[str, str] = {}  # settings of the checkpoint that this command's flags replace, and no later one's


@replaces(options, "parse_args_and_arch")
def check_flags(original: Any, parser: Any, input_args: list[str] | None = None, *args: Any, **kwargs: Any) -> Any:
    """Refuse flags that would be ignored or fail late, and undo ``tpu``.

    ``--bf16`` sets ``tpu`` for everybody, which then fails on the missing XLA device. ``--rpe-eval`` is added to every
    command, and training would ignore it.

    fairseq's FSDP is fairscale's, whose last release is of 2022: it fails without a GPU (in its own code, with torch
    2.13), and on GPUs it was never tried with these models, whose parameters are read outside the forward pass.
    """
    parser.error = _refuse
    result = original(parser, input_args, *args, **kwargs)
    settings = result[0] if isinstance(result, tuple) else result
    if getattr(settings, "bf16", False) and "--tpu" not in (sys.argv if input_args is None else input_args):
        settings.tpu = False
    if "rpe" in overrides and hasattr(settings, "max_update"):  # the parser of fairseq-train
        raise UserError("--rpe-eval belongs to evaluation: train with --rpe")
    if getattr(settings, "ddp_backend", None) == "fully_sharded":
        raise UserError(
            "--ddp-backend fully_sharded is refused: fairseq's FSDP is fairscale's, which fails on CPUs and "
            "was never tried with these models; drop it and, for memory, lower --batch-size and raise --update-freq"
        )
    return result


def _refuse(message: str) -> NoReturn:
    """fairseq's parser prints more than a hundred lines of usage for a mistyped flag."""
    raise UserError(f"{message}: the --help of fairseq's command lists its flags")


class _Flag(argparse.Action):
    def __call__(self, parser: Any, namespace: Any, value: Any, option_string: str | None = None) -> None:
        if self.const:
            overrides[self.const] = value
        else:
            load_module(value)
        setattr(namespace, self.dest, value)


@replaces(options, "gen_parser_from_dataclass")
def flags_for_every_command(original: Any, parser: Any, dataclass_instance: Any, *args: Any, **kwargs: Any) -> Any:
    """Model flags exist only in training; these four have to work where a checkpoint is used as well.

    fairseq makes each command's parser right after importing the plugin, with this one function.
    """
    if isinstance(dataclass_instance, CommonConfig):
        overrides.clear()
        for flag, metavar, const, text in (
            ("--rpe-module", "FILE", None, "Python file that registers encodings of your own"),
            ("--rpe-eval", "SPEC", "rpe", "evaluate with this encoding in place of the checkpoint's"),
            ("--positions-eval", "SPEC", "positions_eval", "position transform in evaluation"),
            ("--compute-dtype", "NAME", "compute_dtype", "matrix products in fp32 or bf16"),
        ):
            parser.add_argument(flag, metavar=metavar, action=_Flag, const=const, default=None, help=text)
    return original(parser, dataclass_instance, *args, **kwargs)
