"""Argument types and options that several commands share."""

import argparse
import contextlib
import os
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from fairseq_rpe.checkpoints.model_sizes import MODEL_SIZES
from fairseq_rpe.core.errors import UserError, shorten_path
from fairseq_rpe.evaluation import log_to
from fairseq_rpe.figures import WIDTHS
from fairseq_rpe.utils.files import CACHE_VARIABLE

MAX_INT = 10**9  # limit of whole numbers that have no other limit
SHORT_WARMUP = "at most a fifth of the updates"  # runs.defaults.WARMUP_SHARE in words


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


def spec_list(text: str) -> tuple[str, ...]:
    """Split a list of specs or names at blanks and commas, but not at the commas between the options of a spec."""
    names: list[str] = []
    for word in text.split():
        before, colon, options = word.rstrip(",").partition(":")
        *whole, last = before.split(",")
        names += filter(None, [*whole, last + colon + options])
    return tuple(names)


def default_by_arch(name: str) -> str:
    """Return the help text for the default of a setting that depends on the architecture and on the kind of data."""
    from fairseq_rpe.runs.defaults import defaults_for

    def describe(algorithm: bool) -> str:
        tiny, other = (getattr(defaults_for(arch, algorithm), name) for arch in ("tiny", "base"))
        return f"{tiny} for tiny, else {other}" if tiny != other else str(tiny)

    text, task = describe(algorithm=False), describe(algorithm=True)
    # a generated task determines its own lengths
    return f"default: {text}" + (f"; tasks: {task}" if task != text and name != "tokens" else "")


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
    about = "with the backend auto on a GPU: measure again and store nothing on disk"
    parser.add_argument("--no-cache", action="store_true", help=about)


def add_device(parser: argparse.ArgumentParser) -> None:
    """Add ``--device``."""
    parser.add_argument("--device", choices=("auto", "cpu", "cuda"), default="auto", help="default: auto")


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


def add_optimizer_options(parser: argparse.ArgumentParser) -> None:
    """Add the options of the optimiser and of the hardware, which any training has."""
    parser.add_argument("--update-freq", type=positive_int, metavar="N", help="batches per update (default: 1)")
    about = "processes or GPUs per machine (default: 1)"
    parser.add_argument("--nproc", type=processes, default=1, metavar="N", help=about)
    about = f"learning rate after the warm-up; linear ends at 0, cosine at --min-lr ({default_by_arch('schedule')})"
    parser.add_argument("--schedule", choices=("inverse_sqrt", "linear", "cosine"), help=about)
    about = "last learning rate of --schedule cosine (default: 0)"
    parser.add_argument("--min-lr", type=nonnegative_float, metavar="LR", help=about)
    parser.add_argument("--betas", type=betas, metavar="B1,B2", help="Adam's decay rates (default: 0.9,0.98)")
    about = "decoupled weight decay as in AdamW (default: 0.01)"
    parser.add_argument("--weight-decay", type=decay, metavar="X", help=about)
    about = "largest norm of the gradient; 0: no limit (default: 1)"
    parser.add_argument("--clip-norm", type=nonnegative_float, metavar="X", help=about)
    parser.add_argument("--attention-backend", default="auto", metavar="NAME", help="default: auto")
    add_no_cache(parser)
    add_device(parser)


def add_training_options(parser: argparse.ArgumentParser) -> None:
    """Add the options that ``train`` and ``sweep`` have in common."""
    parser.add_argument("--arch", help=f"{', '.join(MODEL_SIZES)} or a full name (default: tiny)")
    about = f"training length in tokens ({default_by_arch('tokens')})"
    parser.add_argument("--tokens", type=positive_int, metavar="N", help=about)
    about = "stream: blocks run across documents (default); document: each block lies within one document"
    parser.add_argument("--blocks", choices=("stream", "document"), help=about)
    about = "in blocks of a stream, tokens attend only to their own document and count positions from its start"
    parser.add_argument("--separate-documents", action=argparse.BooleanOptionalAction, help=about)
    parser.add_argument("--updates", type=positive_int, metavar="N", help=default_by_arch("updates"))
    about = f"sequences per process; a recipe's are of all processes together ({default_by_arch('batch_sentences')})"
    parser.add_argument("--batch-sentences", type=positive_int, metavar="N", help=about)
    parser.add_argument("--nodes", type=processes, default=1, metavar="M", help="machines per run (default: 1)")
    parser.add_argument("--lr", type=rate, help=f"peak learning rate ({default_by_arch('lr')})")
    about = f"updates of warm-up ({default_by_arch('warmup')}; {SHORT_WARMUP})"
    parser.add_argument("--warmup", type=positive_int, metavar="N", help=about)
    add_optimizer_options(parser)
    parser.add_argument("--dropout", type=fraction, help=default_by_arch("dropout"))
    about = "dropout of attention weights (default: 0)"
    parser.add_argument("--attention-dropout", type=fraction, metavar="X", help=about)
    about = "dropout in feed-forward layers (default: 0)"
    parser.add_argument("--activation-dropout", type=fraction, metavar="X", help=about)
    about = "activation of feed-forward layers (default: gelu for small and large, else relu)"
    parser.add_argument("--activation-fn", choices=("relu", "gelu", "gelu_accurate"), help=about)
    about = "share one table between input and output embeddings (default: two tables)"
    parser.add_argument("--share-embeddings", action=argparse.BooleanOptionalAction, help=about)
    about = "position transform in training (default: identity)"
    parser.add_argument("--positions-train", type=spec, metavar="SPEC", help=about)
    about = "position transform in evaluation (default: the one that --positions-train implies)"
    parser.add_argument("--positions-eval", type=spec, metavar="SPEC", help=about)
    about = "one encoding per model or per layer (default: auto, as in the encoding's paper)"
    parser.add_argument("--rpe-share", choices=("auto", "model", "layer"), help=about)
    parser.add_argument("--compute-dtype", choices=("fp32", "bf16"), help="dtype of matrix products (default: fp32)")
    about = "updates between plots of the encodings in TensorBoard"
    parser.add_argument("--log-encodings-every", type=positive_int, metavar="N", help=about)
    add_rpe_module(parser, load_now=False)
    parser.epilog = "Further fairseq-train flags may follow after a lone --"
    parser.set_defaults(extra=())


def add_loading_options(parser: argparse.ArgumentParser) -> None:
    """Add the options of loading a checkpoint; fairseq's messages are dropped unless ``--log`` is given."""
    parser.set_defaults(log=None)
    about = "position transform (default: the checkpoint's)"
    parser.add_argument("--positions-eval", type=spec, metavar="SPEC", help=about)
    add_device(parser)
    add_rpe_module(parser, load_now=False)


def add_checkpoint_options(parser: argparse.ArgumentParser) -> None:
    """Add the options of evaluating one checkpoint, perhaps with another encoding, and of the results file."""
    parser.add_argument("checkpoint", type=Path, metavar="CHECKPOINT")
    parser.add_argument("--out", type=Path, metavar="FILE", help="JSON-lines file to which results are appended")
    about = "evaluate with this encoding instead of the checkpoint's"
    parser.add_argument("--rpe", type=spec, metavar="SPEC", help=about)
    parser.add_argument("--log", type=Path, metavar="FILE", help="file for fairseq's messages")
    add_loading_options(parser)


def add_checkpoints_options(parser: argparse.ArgumentParser) -> None:
    """Add the options of measuring several checkpoints on one text."""
    parser.add_argument("checkpoints", type=Path, nargs="+", metavar="CHECKPOINT")
    parser.add_argument("data", type=Path, metavar="DATA", help="binarised data folder")
    parser.add_argument("--split", default="test", help="split to read (default: test)")
    add_loading_options(parser)
