"""Entry point of ``fairseq-rpe``: one table of commands, one place where errors become one line."""

import argparse
import errno
import importlib
import os
import sys
from collections.abc import Sequence

from fairseq_rpe import __version__
from fairseq_rpe.cli.options import make_ready
from fairseq_rpe.core.errors import UserError
from fairseq_rpe.runs import processes

# name: module of this room, what the command does. ``add`` of the module adds its options and ``run`` carries it out;
# in a module of several commands both names end with what follows the colon.
COMMANDS = {
    "prepare-stdlib": ("prepare:_stdlib", "make a code corpus from the Python standard library"),
    "prepare": ("prepare", "make a corpus from any text: folders, .txt, .jsonl, .parquet, hub data sets"),
    "prepare-known": ("prepare:_known", "make a corpus from WikiText-103, PG-19, code or Wikipedia"),
    "train": ("train", "train one language model"),
    "eval": ("eval", "evaluate a checkpoint at several lengths"),
    "sliding": ("sliding", "compare sliding-window with non-overlapping evaluation"),
    "accuracy": ("accuracy", "exact answers of a checkpoint to its algorithmic task, by number of items"),
    "sweep": ("sweep", "train several encodings and evaluate each at several lengths"),
    "report": ("report", "write the table, the figure and the page of sweeps"),
    "figures": ("figures", "draw encodings side by side: heat maps, profiles, receptive fields, what was learned"),
    "verdict": ("verdict", "decide whether Σ exp(bias) converges, per head, with its limit and receptive field"),
    "trf": ("trf", "draw receptive fields of encodings against ε"),
    "erf": ("erf", "measure how many of the nearest keys hold the attention of checkpoints"),
    "sensitivity": ("sensitivity", "draw the analysis of index warping"),
    "fire-fit": ("fire_fit", "give FIRE the parameters with which it equals another bias"),
    "bench": ("bench", "time attention with each encoding and backend on this machine"),
    "list": ("list:_list", "show every encoding with formula, options and paper"),
    "profile": ("list:_profile", "print an encoding's log-bias per distance as CSV"),
    "user-dir": ("list:_user_dir", "print the folder to give to fairseq's --user-dir"),
}
_FULL = {
    errno.ENOSPC: "no space left on the disk",
    errno.EDQUOT: "no space left in the disk quota",
    errno.EFBIG: "no larger file is allowed (ulimit -f)",
}


def build_parser(wanted: str | None = None) -> argparse.ArgumentParser:
    """The command line with the options of the command that is ``wanted``; ``None``: of all of them."""
    parser = argparse.ArgumentParser(
        prog="fairseq-rpe",
        description="Positional encodings for length extrapolation with fairseq language models.",
        allow_abbrev=False,
    )
    parser.add_argument("--version", action="version", version=f"fairseq-rpe {__version__}")
    subparsers = parser.add_subparsers(dest="command", metavar="COMMAND", required=True)
    for name, (place, help) in COMMANDS.items():
        command = subparsers.add_parser(name, help=help, allow_abbrev=False)
        if wanted in (None, name):
            stem, _, end = place.partition(":")
            module = importlib.import_module(f"fairseq_rpe.cli.{stem}")
            getattr(module, f"add{end}")(command)
            command.set_defaults(run=getattr(module, f"run{end}"))
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; returns the exit code."""
    argv = _formulas(sys.argv[1:] if argv is None else list(argv))
    # What follows a lone -- belongs to fairseq; argparse cannot keep it apart from our positionals.
    cut = argv.index("--") if "--" in argv else len(argv)
    parser = build_parser(argv[0] if argv else "")
    args = parser.parse_args(argv[:cut])
    if argv[cut + 1 :]:
        if not hasattr(args, "extra"):
            parser.error(f"'{args.command}' takes no further flags after --: only train and sweep do")
        args.extra = tuple(argv[cut + 1 :])
    try:
        make_ready(args)
        return args.run(args) or 0
    except UserError as error:
        print(f"error: {' '.join(str(error).split())}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("stopped by the keyboard; the same command goes on from here", file=sys.stderr)
        return 130
    except processes.Stopped:
        print("stopped by SIGTERM; the same command goes on from here", file=sys.stderr)
        return 143
    except BrokenPipeError:
        # The reader (head, less) has what it wanted; without this Python complains again at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except OSError as error:
        if error.errno not in _FULL:
            raise
        where = f" while writing {error.filename}" if error.filename else ""
        print(f"error: {_FULL[error.errno]}{where}: free some and run this again", file=sys.stderr)
        return 2


def _formulas(argv: list[str]) -> list[str]:
    """``--formula X`` as ``--formula=X``: nearly every X begins with a minus, which argparse takes for an option."""
    joined: list[str] = []
    for word in argv:
        if joined and joined[-1] == "--formula":
            joined[-1] += f"={word}"
        else:
            joined.append(word)
    return joined


if __name__ == "__main__":
    sys.exit(main())
