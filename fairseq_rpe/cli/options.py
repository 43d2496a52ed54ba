"""Argument types and options that several commands share."""

import argparse
import contextlib
import os
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from fairseq_rpe.core.errors import UserError, shorten_path
from fairseq_rpe.evaluation import log_to
from fairseq_rpe.figures import WIDTHS
from fairseq_rpe.utils.files import CACHE_VARIABLE

MAX_INT = 10**9  # limit of whole numbers that have no other limit


def _whole(text: str, least: int, most: int = MAX_INT) -> int:
    digits = text.isascii() and text.isdigit() and len(text) <= 20
    if not digits or not least <= int(text) <= most:
        raise argparse.ArgumentTypeError(f"'{shorten_path(text)}' is not a whole number from {least} to {most}")
    return int(text)


def integer(text: str) -> int:
    """Parse a whole number, perhaps negative, whose range is checked later."""
    return -_whole(text[1:], 0, 2**63) if text.startswith("-") else _whole(text, 0, 2**63)


nonnegative_int, positive_int = partial(_whole, least=0), partial(_whole, least=1)
# NumPy's generators take no larger seed; more processes than 1024 would stop the machine
seed, processes = partial(_whole, least=1, most=2**32 - 1), partial(_whole, least=1, most=1024)
workers, distances = partial(_whole, least=0, most=256), partial(_whole, least=1, most=1 << 24)
heads, width = partial(_whole, least=1, most=1024), partial(_whole, least=1, most=65_536)
layers, choice_count = partial(_whole, least=1, most=1024), partial(_whole, least=2, most=1000)


def _number(text: str, holds: Callable[[float], bool], words: str) -> float:
    with contextlib.suppress(ValueError):
        if holds(value := float(text)):
            return value
    raise argparse.ArgumentTypeError(f"'{shorten_path(text)}' is not {words}")


float_number = partial(_number, holds=lambda v: True, words="a number")
positive_float = partial(_number, holds=lambda v: 0 < v < float("inf"), words="a number above 0")
rate = partial(_number, holds=lambda v: 0 < v <= 100, words="a number above 0 and at most 100")
nonnegative_float = partial(_number, holds=lambda v: 0 <= v < float("inf"), words="a number from 0 on")
decay = partial(_number, holds=lambda v: 0 <= v <= 100, words="a number from 0 to 100")
fraction = partial(_number, holds=lambda v: 0 <= v < 1, words="a number from 0 to below 1")
share = partial(_number, holds=lambda v: 0 < v <= 1, words="a number above 0 and at most 1")


def _list(text: str, item: Callable[[str], Any]) -> tuple[Any, ...]:
    """Parse different numbers separated by commas or blanks, e.g. ``64,128,256``."""
    values = tuple(map(item, text.replace(",", " ").split()))
    if not values:
        raise argparse.ArgumentTypeError("is empty: give at least one number")
    if not all(item_text.strip() for item_text in text.split(",")):
        raise argparse.ArgumentTypeError(f"'{shorten_path(text)}' has a comma with no number beside it")
    if len(set(values)) < len(values):
        raise argparse.ArgumentTypeError(f"'{text}' gives a number twice")
    return values


int_list, float_list = partial(_list, item=positive_int), partial(_list, item=float_number)
seed_list, nonnegative_int_list = partial(_list, item=seed), partial(_list, item=nonnegative_int)


def betas(text: str) -> tuple[float, ...]:
    """Parse Adam's two decay rates, e.g. ``0.9,0.98``."""
    values = tuple(map(fraction, text.replace(" ", "").split(",")))
    if len(values) != 2:
        raise argparse.ArgumentTypeError(f"'{shorten_path(text)}' is not two numbers, e.g. 0.9,0.98")
    return values


def spec(text: str) -> str:
    """Return a spec that is not empty; its name and options are checked where it is used."""
    if not text.strip():
        raise argparse.ArgumentTypeError("is empty: write name or name:key=value,key=value")
    return text


def nonempty_text(text: str) -> str:
    """Return text that is not empty; white space alone is text, too."""
    if not text:
        raise argparse.ArgumentTypeError("is empty: give some text")
    return text


def spec_list(text: str) -> tuple[str, ...]:
    """Split a list of specs or names at blanks and commas, but not at the commas between the options of a spec."""
    names: list[str] = []
    for word in text.split():
        before, colon, options = word.rstrip(",").partition(":")
        *whole, last = before.split(",")
        names += filter(None, [*whole, last + colon + options])
    return tuple(names)


def address(text: str) -> str:
    """Return HOST:PORT after checking the port."""
    host, _, port = text.rpartition(":")
    if not host or not port.isdigit() or not 0 < int(port) < 65536:
        raise argparse.ArgumentTypeError(f"'{text}' is not HOST:PORT")
    return text


def add_rpe_module(parser: argparse.ArgumentParser, load_now: bool = True) -> None:
    """Add ``--rpe-module``.

    Args:
        parser: of the command.
        load_now: import the file before the command runs; False: the command imports it when it has work to do.
    """
    parser.add_argument("--rpe-module", type=Path, metavar="FILE", help="Python file that registers your encodings")
    parser.set_defaults(load_now=load_now)


def add_figure_width(parser: argparse.ArgumentParser, other: str = "") -> None:
    """Add ``--width``, the width of the figures.

    Args:
        parser: of the command.
        other: the command's option for the width of heads or models, for the error message.
    """

    def width_name(text: str) -> str:
        if text in WIDTHS:
            return text
        hint = f"; {other} takes numbers" if other else ""
        raise argparse.ArgumentTypeError(
            f"'{shorten_path(text)}' is not {' or '.join(WIDTHS)}, a width of figures{hint}"
        )

    inches = ", ".join(f"{name} {value:g}" for name, value in WIDTHS.items())
    about = f"width of the figures, in inches: {inches} (default: as wide as the panels need)"
    parser.add_argument("--width", dest="figure_width", type=width_name, metavar="NAME", help=about)


def add_latex(parser: argparse.ArgumentParser) -> None:
    """Add ``--latex``."""
    parser.add_argument("--latex", action="store_true", help="also write the tables as LaTeX (package booktabs)")


def add_no_cache(parser: argparse.ArgumentParser) -> None:
    """Add ``--no-cache``."""
    about = "if the backend is auto on a GPU: measure the backends again and store nothing on disk"
    parser.add_argument("--no-cache", action="store_true", help=about)


def add_device(parser: argparse.ArgumentParser) -> None:
    """Add ``--device``."""
    parser.add_argument("--device", choices=("auto", "cpu", "cuda"), default="auto", help="device (default: auto)")


def apply_common_options(args: argparse.Namespace) -> None:
    """Apply ``--log``, ``--no-cache`` (in child processes too) and ``--rpe-module`` before a command runs."""
    if getattr(args, "no_cache", False):
        os.environ[CACHE_VARIABLE] = "off"
    if hasattr(args, "log"):
        log_to(args.log)
    path = getattr(args, "rpe_module", None)
    if path is not None and not path.is_file():
        wrong = "is not a file" if path.exists() else "does not exist"
        raise UserError(f"--rpe-module {shorten_path(path)} {wrong}: name a Python file")
    if path is not None and args.load_now:
        from fairseq_rpe.encodings import load_module

        load_module(path)


def add_loading_options(parser: argparse.ArgumentParser) -> None:
    """Add the options of loading a checkpoint; fairseq's messages are dropped unless ``--log`` is given."""
    parser.set_defaults(log=None)
    about = "position transform (default: the checkpoint's)"
    parser.add_argument("--positions-eval", type=spec, metavar="SPEC", help=about)
    add_device(parser)
    add_rpe_module(parser, load_now=False)


def add_checkpoint_options(parser: argparse.ArgumentParser) -> None:
    """Add the options of evaluating one checkpoint, perhaps with another encoding, and of the results file."""
    parser.add_argument("checkpoint", type=Path, metavar="CHECKPOINT", help="checkpoint to evaluate")
    parser.add_argument("--out", type=Path, metavar="FILE", help="JSON-lines file to which results are appended")
    about = "evaluate with this encoding instead of the checkpoint's"
    parser.add_argument("--rpe", type=spec, metavar="SPEC", help=about)
    parser.add_argument("--log", type=Path, metavar="FILE", help="file for fairseq's messages")
    add_loading_options(parser)


def add_checkpoints_options(parser: argparse.ArgumentParser) -> None:
    """Add the options of measuring several checkpoints on one text."""
    parser.add_argument("checkpoints", type=Path, nargs="+", metavar="CHECKPOINT", help="checkpoints to measure")
    parser.add_argument("data", type=Path, metavar="DATA", help="binarised data folder")
    parser.add_argument("--split", default="test", help="split to measure (default: test)")
    add_loading_options(parser)
