"""Flags: what fairseq makes of its own, and those of this plugin in the commands that use a checkpoint."""

from __future__ import annotations

import argparse
import sys
from typing import Any

from fairseq import options
from fairseq.dataclass.configs import CommonConfig

from ..core import UserError
from ..encodings import load_module
from .replacement import replaces

overrides: dict[str, str] = {}  # settings of the checkpoint that this command's flags replace


def bf16_is_not_tpu() -> None:
    """``--bf16`` sets ``tpu`` for everybody, which then fails on the missing XLA device."""

    @replaces(options, "parse_args_and_arch")
    def parse(original: Any, parser: Any, input_args: list[str] | None = None, *args: Any, **kwargs: Any) -> Any:
        result = original(parser, input_args, *args, **kwargs)
        settings = result[0] if isinstance(result, tuple) else result
        if getattr(settings, "bf16", False) and "--tpu" not in (sys.argv if input_args is None else input_args):
            settings.tpu = False
        return result


def no_fully_sharded() -> None:
    """fairseq's FSDP is fairscale's, whose last release is of 2022: it fails without a GPU (in its own code, with torch
    2.13), and on GPUs it was never tried with these models, whose parameters are read outside the forward pass.
    """

    @replaces(options, "parse_args_and_arch")
    def parse(original: Any, *args: Any, **kwargs: Any) -> Any:
        result = original(*args, **kwargs)
        settings = result[0] if isinstance(result, tuple) else result
        if getattr(settings, "ddp_backend", None) == "fully_sharded":
            raise UserError(
                "--ddp-backend fully_sharded is refused: fairseq's FSDP is fairscale's, which fails on processors and "
                "was never tried with these models; drop it and, for memory, lower --batch-size and raise --update-freq"
            )
        return result


class _LoadModule(argparse.Action):
    def __call__(self, parser: Any, namespace: Any, value: Any, option_string: str | None = None) -> None:
        load_module(value)
        setattr(namespace, self.dest, value)


class _Override(argparse.Action):
    def __call__(self, parser: Any, namespace: Any, value: Any, option_string: str | None = None) -> None:
        overrides[self.const] = value
        setattr(namespace, self.dest, value)


def forget_overrides() -> None:
    """A command that was run inside another program leaves its replacements to no later one."""
    overrides.clear()


def flags_for_every_command() -> None:
    """Model flags exist only in training; these four have to work where a checkpoint is used as well.

    fairseq makes each command's parser right after importing the plugin, with this one function.
    """
    flags = (
        ("--rpe-module", "FILE", _LoadModule, None, "Python file that registers encodings of your own"),
        ("--rpe-eval", "SPEC", _Override, "rpe", "evaluate with this encoding in place of the checkpoint's"),
        ("--positions-eval", "SPEC", _Override, "positions_eval", "position transform in evaluation"),
        ("--compute-dtype", "NAME", _Override, "compute_dtype", "matrix products in fp32 or bf16"),
    )

    @replaces(options, "gen_parser_from_dataclass")
    def generate(original: Any, parser: Any, dataclass_instance: Any, *args: Any, **kwargs: Any) -> Any:
        if isinstance(dataclass_instance, CommonConfig):
            forget_overrides()
            for flag, metavar, action, const, text in flags:
                parser.add_argument(flag, metavar=metavar, action=action, const=const, default=None, help=text)
        return original(parser, dataclass_instance, *args, **kwargs)
