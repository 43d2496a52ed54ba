"""Entry point of ``fairseq-rpe``: one parser, one place where errors become one line."""

from __future__ import annotations

import argparse
import errno
import os
import sys
from collections.abc import Sequence

from fairseq_rpe import __version__
from fairseq_rpe.cli import (
    accuracy,
    bench,
    erf,
    evaluate,
    figures,
    fire_fit,
    inspect,
    prepare,
    processes,
    report,
    sensitivity,
    sliding,
    sweep,
    train,
    trf,
    verdict,
)
from fairseq_rpe.core.errors import UserError

_COMMANDS = (
    prepare,
    train,
    evaluate,
    sliding,
    accuracy,
    sweep,
    report,
    figures,
    verdict,
    trf,
    erf,
    sensitivity,
    fire_fit,
    bench,
    inspect,
)

_FULL = {
    errno.ENOSPC: "no space left on the disk",
    errno.EDQUOT: "no space left in the disk quota",
    errno.EFBIG: "no larger file is allowed (ulimit -f)",
}


def build_parser() -> argparse.ArgumentParser:
    """The whole command line; every command module adds its own part."""
    parser = argparse.ArgumentParser(
        prog="fairseq-rpe",
        description="Positional encodings for length extrapolation with fairseq language models.",
        allow_abbrev=False,
    )
    parser.add_argument("--version", action="version", version=f"fairseq-rpe {__version__}")
    subparsers = parser.add_subparsers(dest="command", metavar="COMMAND", required=True)
    for module in _COMMANDS:
        module.add_parser(subparsers)
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; returns the exit code."""
    argv = _formulas(sys.argv[1:] if argv is None else list(argv))
    # What follows a lone -- belongs to fairseq; argparse cannot keep it apart from our positionals.
    cut = argv.index("--") if "--" in argv else len(argv)
    parser = build_parser()
    args = parser.parse_args(argv[:cut])
    if argv[cut + 1 :]:
        if not hasattr(args, "extra"):
            parser.error(f"'{args.command}' takes no further flags after --: only train and sweep do")
        args.extra = argv[cut + 1 :]
    try:
        return args.run(args)
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
