"""Argument types and options that several commands share."""

import argparse
import contextlib
import os
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from fairseq_rpe.checkpoints.model_sizes import SIZES
from fairseq_rpe.core.errors import UserError, shown
from fairseq_rpe.evaluation import log_to
from fairseq_rpe.figures import WIDTHS
from fairseq_rpe.utils.files import CACHE

MOST = 10**9  # of whole numbers that have no limit of their own
LESS_WARMUP = "at most a fifth of the updates"  # runs.defaults.WARMUP_SHARE, in words


def _whole(text: str, least: int, most: int = MOST) -> int:
    digits = text.isascii() and text.isdigit() and len(text) <= 20
    if not digits or not least <= int(text) <= most:
        raise argparse.ArgumentTypeError(f"'{shown(text)}' is not a whole number from {least} to {most}")
    return int(text)


def integer(text: str) -> int:
    """A whole number that is checked later; in ASCII, as every other one."""
    return -_whole(text[1:], 0, 2**63) if text.startswith("-") else _whole(text, 0, 2**63)


count, positive_int = partial(_whole, least=0), partial(_whole, least=1)
# numpy's generators take no larger seed; more processes than that would stop the machine, not speed it up
seed, processes = partial(_whole, least=1, most=2**32 - 1), partial(_whole, least=1, most=1024)
workers, distances = partial(_whole, least=0, most=256), partial(_whole, least=1, most=1 << 24)
heads, width = partial(_whole, least=1, most=1024), partial(_whole, least=1, most=65_536)


def _number(text: str, holds: Callable[[float], bool], words: str) -> float:
    with contextlib.suppress(ValueError):
        if holds(value := float(text)):
            return value
    raise argparse.ArgumentTypeError(f"'{shown(text)}' is not {words}")


number = partial(_number, holds=lambda v: True, words="a number")
positive_float = partial(_number, holds=lambda v: 0 < v < float("inf"), words="a number above 0")
rate = partial(_number, holds=lambda v: 0 < v <= 100, words="a number above 0 and at most 100")
least = partial(_number, holds=lambda v: 0 <= v < float("inf"), words="a number from 0 on")
decay = partial(_number, holds=lambda v: 0 <= v <= 100, words="a number from 0 to 100")
fraction = partial(_number, holds=lambda v: 0 <= v < 1, words="a number from 0 to below 1")


def _list(text: str, item: Callable[[str], Any]) -> tuple[Any, ...]:
    """Comma or blank separated numbers, each once, e.g. ``64,128,256``."""
    values = tuple(map(item, text.replace(",", " ").split()))
    if not values:
        raise argparse.ArgumentTypeError("is empty: give at least one number")
    if not all(part.strip() for part in text.split(",")):
        raise argparse.ArgumentTypeError(f"'{shown(text)}' has a comma with no number beside it")
    if len(set(values)) < len(values):
        raise argparse.ArgumentTypeError(f"'{text}' gives a number twice")
    return values


int_list, number_list = partial(_list, item=positive_int), partial(_list, item=number)
seed_list, count_list = partial(_list, item=seed), partial(_list, item=count)


def betas(text: str) -> tuple[float, ...]:
    """Adam's two decay rates, e.g. ``0.9,0.98``."""
    values = tuple(map(fraction, text.replace(" ", "").split(",")))
    if len(values) != 2:
        raise argparse.ArgumentTypeError(f"'{shown(text)}' is not two numbers, e.g. 0.9,0.98")
    return values


def spec(text: str) -> str:
    """A spec string, checked where it is used; an empty one would be taken for none."""
    if not text.strip():
        raise argparse.ArgumentTypeError("is empty: write name or name:key=value,key=value")
    return text


def words(text: str) -> tuple[str, ...]:
    """Words separated by blanks or commas, perhaps none; the commas of a spec's own options are none of these."""
    found: list[str] = []
    for part in text.split():
        names, colon, settings = part.rstrip(",").partition(":")
        *whole, last = names.split(",")
        found += filter(None, [*whole, last + colon + settings])
    return tuple(found)


def by_arch(name: str) -> str:
    """The default of a setting that depends on the architecture, and perhaps on whether a task is trained."""
    from fairseq_rpe.runs.defaults import defaults_for

    def of(algorithm: bool) -> str:
        tiny, other = (getattr(defaults_for(arch, algorithm), name) for arch in ("tiny", "base"))
        return f"{tiny} for tiny, else {other}" if tiny != other else str(tiny)

    text, task = of(algorithm=False), of(algorithm=True)
    # a generated task knows its own lengths
    return f"default: {text}" + (f"; tasks: {task}" if task != text and name != "tokens" else "")


def address(text: str) -> str:
    host, _, port = text.rpartition(":")
    if not host or not port.isdigit() or not 0 < int(port) < 65536:
        raise argparse.ArgumentTypeError(f"'{text}' is not HOST:PORT")
    return text


def add_rpe_module(parser: argparse.ArgumentParser, now: bool = True) -> None:
    """``now``: it is loaded before the command is carried out, not only if there is something left to do."""
    parser.add_argument("--rpe-module", type=Path, metavar="FILE", help="Python file that registers your encodings")
    parser.set_defaults(load_now=now)


def add_width(parser: argparse.ArgumentParser, other: str = "") -> None:
    """The width of the figures that a command draws; ``other``: its option for widths of heads or models."""

    def named(text: str) -> str:
        if text in WIDTHS:
            return text
        more = f"; {other} takes numbers" if other else ""
        raise argparse.ArgumentTypeError(f"'{shown(text)}' is not {' or '.join(WIDTHS)}, a width of figures{more}")

    inches = ", ".join(f"{name} {value:g}" for name, value in WIDTHS.items())
    about = f"width of the figures in a paper, in inches: {inches} (default: as the panels need it)"
    parser.add_argument("--width", dest="figure_width", type=named, metavar="NAME", help=about)


def add_latex(parser: argparse.ArgumentParser) -> None:
    """Tables for a paper."""
    parser.add_argument("--latex", action="store_true", help="write the tables as LaTeX too (package booktabs)")


def add_no_cache(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--no-cache", action="store_true", help="auto on a GPU: measure anew and keep nothing")


def make_ready(args: argparse.Namespace) -> None:
    """Send fairseq's messages where --log says; heed --no-cache, in children too; see to --rpe-module."""
    if getattr(args, "no_cache", False):
        os.environ[CACHE] = "off"
    if hasattr(args, "log"):
        log_to(args.log)
    path = getattr(args, "rpe_module", None)
    if path is not None and not path.is_file():
        wrong = "is not a file" if path.exists() else "does not exist"
        raise UserError(f"--rpe-module {shown(path)} {wrong}: name a Python file")
    if path is not None and args.load_now:
        from fairseq_rpe.encodings import load_module

        load_module(path)


def add_optimiser(parser: argparse.ArgumentParser) -> None:
    """The options of any training, a further one too: how it is optimised, and on what."""
    parser.add_argument("--update-freq", type=positive_int, metavar="N", help="batches per update (1)")
    parser.add_argument("--nproc", type=processes, default=1, metavar="N", help="processes or GPUs per machine (1)")
    about = f"after the warm-up; linear ends at 0, cosine at --min-lr ({by_arch('schedule')})"
    parser.add_argument("--schedule", choices=("inverse_sqrt", "linear", "cosine"), help=about)
    parser.add_argument("--min-lr", type=least, metavar="LR", help="where --schedule cosine ends (default: 0)")
    parser.add_argument("--betas", type=betas, metavar="B1,B2", help="Adam's decay rates (default: 0.9,0.98)")
    parser.add_argument("--weight-decay", type=decay, metavar="X", help="decoupled, as AdamW's (default: 0.01)")
    parser.add_argument("--clip-norm", type=least, metavar="X", help="of the gradient; 0: no limit (default: 1)")
    parser.add_argument("--attention-backend", default="auto", metavar="NAME", help="default: auto")
    add_no_cache(parser)
    parser.add_argument("--device", choices=("auto", "cpu", "cuda"), default="auto", help="default: auto")


def add_training(parser: argparse.ArgumentParser) -> None:
    """The options that ``train`` and ``sweep`` have in common."""
    parser.add_argument("--arch", help=f"{', '.join(SIZES)} or a full name (default: tiny)")
    parser.add_argument("--tokens", type=positive_int, metavar="N", help=f"training length ({by_arch('tokens')})")
    about = "stream: blocks run across documents (default); document: each lies within one, and is shorter at its end"
    parser.add_argument("--blocks", choices=("stream", "document"), help=about)
    about = "in blocks of a stream, each token sees its own document alone and counts positions from its beginning"
    parser.add_argument("--separate-documents", action=argparse.BooleanOptionalAction, help=about)
    parser.add_argument("--updates", type=positive_int, metavar="N", help=by_arch("updates"))
    about = f"per process; a recipe's is divided among all ({by_arch('batch_sentences')})"
    parser.add_argument("--batch-sentences", type=positive_int, metavar="N", help=about)
    parser.add_argument("--nodes", type=processes, default=1, metavar="M", help="machines per run (1)")
    parser.add_argument("--lr", type=rate, help=f"peak learning rate ({by_arch('lr')})")
    about = f"updates of warm-up ({by_arch('warmup')}; {LESS_WARMUP})"
    parser.add_argument("--warmup", type=positive_int, metavar="N", help=about)
    add_optimiser(parser)
    parser.add_argument("--dropout", type=fraction, help=by_arch("dropout"))
    parser.add_argument("--attention-dropout", type=fraction, metavar="X", help="of attention's weights (default: 0)")
    parser.add_argument("--activation-dropout", type=fraction, metavar="X", help="in feed-forward parts (default: 0)")
    about = "of the feed-forward part (default: gelu for small and large, else relu)"
    parser.add_argument("--activation-fn", choices=("relu", "gelu", "gelu_accurate"), help=about)
    about = "one table for input and output embeddings (default: two)"
    parser.add_argument("--share-embeddings", action=argparse.BooleanOptionalAction, help=about)
    parser.add_argument("--positions-train", type=spec, metavar="SPEC", help="default: identity")
    parser.add_argument("--positions-eval", type=spec, metavar="SPEC", help="default: what --positions-train names")
    parser.add_argument("--rpe-share", choices=("auto", "model", "layer"), help="default: auto")
    parser.add_argument("--compute-dtype", choices=("fp32", "bf16"), help="dtype of matrix products (fp32)")
    parser.add_argument("--inspect-every", type=positive_int, metavar="N", help="updates between TensorBoard pictures")
    add_rpe_module(parser, now=False)
    parser.epilog = "Further fairseq-train flags may follow after a lone --"
    parser.set_defaults(extra=())


def add_loading(parser: argparse.ArgumentParser) -> None:
    """How a checkpoint is loaded; fairseq's messages go nowhere, where there is no --log."""
    parser.set_defaults(log=None)
    parser.add_argument("--positions", type=spec, metavar="SPEC", help="position transform (default: the checkpoint's)")
    parser.add_argument("--device", choices=("auto", "cpu", "cuda"), default="auto", help="default: auto")
    add_rpe_module(parser, now=False)


def add_checkpoint(parser: argparse.ArgumentParser) -> None:
    """One checkpoint, perhaps with another encoding, and where the results go."""
    parser.add_argument("checkpoint", type=Path, metavar="CHECKPOINT")
    parser.add_argument("--out", type=Path, metavar="FILE", help="JSON-lines file to add the results to")
    about = "evaluate with this encoding in place of the checkpoint's"
    parser.add_argument("--rpe", type=spec, metavar="SPEC", help=about)
    parser.add_argument("--log", type=Path, metavar="FILE", help="file for fairseq's messages")
    add_loading(parser)


def add_checkpoints(parser: argparse.ArgumentParser) -> None:
    """Several checkpoints that are measured on one text."""
    parser.add_argument("checkpoints", type=Path, nargs="+", metavar="CHECKPOINT")
    parser.add_argument("data", type=Path, metavar="DATA", help="binarised data folder")
    parser.add_argument("--subset", default="test", help="split to read (default: test)")
    add_loading(parser)
