"""``fairseq-rpe prepare-stdlib``: a code corpus from the sources of the installed Python."""

from __future__ import annotations

import argparse
from pathlib import Path

_DESCRIPTION = """\
Make a binarised code corpus from the Python standard library (or a folder of .py files): split by file,
train a byte-exact sentencepiece BPE, encode, binarise with fairseq-preprocess. Needs no network. Does
nothing if the corpus is there already, made from the same text with the same options."""


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add the command ``prepare-stdlib``."""
    parser = subparsers.add_parser(
        "prepare-stdlib",
        help="make a code corpus from the Python standard library",
        description=_DESCRIPTION,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument(
        "--dest",
        type=Path,
        default=Path("data-bin/stdlib"),
        metavar="DIR",
        help="folder to make (default: %(default)s)",
    )
    parser.add_argument("--source", type=Path, metavar="DIR", help="use the .py files of this folder instead")
    parser.add_argument(
        "--vocab-size",
        type=int,
        default=4096,
        metavar="N",
        help="symbols of the dictionary, 256 bytes and 4 specials included (default: %(default)s)",
    )
    parser.add_argument(
        "--seed", type=int, default=1, metavar="N", help="seed of the split by file (default: %(default)s)"
    )
    add_split_options(parser, "files")
    parser.add_argument("--max-bytes", type=int, metavar="N", help="use whole files up to this size in all")
    parser.set_defaults(run=run)


def add_split_options(parser: argparse.ArgumentParser, what: str) -> None:
    """Shares of the splits, in ``what``, and the number of processes."""
    for split in ("valid", "test"):
        parser.add_argument(
            f"--{split}-fraction",
            type=float,
            default=0.05,
            metavar="X",
            help=f"share of the {what} for the {split} split (default: 0.05)",
        )
    parser.add_argument(
        "--workers",
        type=int,
        default=2,
        metavar="N",
        help="processes; changes nothing but the time (default: %(default)s)",
    )


def run(args: argparse.Namespace) -> int:
    """Prepare the corpus; returns 0.

    Raises:
        UserError: see :func:`fairseq_rpe.data.prepare.prepare`.
    """
    from fairseq_rpe.data.prepare import PrepareOptions, prepare

    prepare(
        PrepareOptions(
            dest=args.dest,
            source=args.source,
            vocab_size=args.vocab_size,
            seed=args.seed,
            valid_fraction=args.valid_fraction,
            test_fraction=args.test_fraction,
            workers=args.workers,
            max_bytes=args.max_bytes,
        )
    )
    return 0
