"""``fairseq-rpe prepare-known``: a published corpus by its name."""

from __future__ import annotations

import argparse
from pathlib import Path

from fairseq_rpe.cli.prepare_text import add_vocabulary_options, given_options, gpt2_folder, refuse_division

# Kept here, and checked against the table by a test, so that help needs none of the data room.
NAMES = ("wikitext103", "wikitext103-words", "books", "github", "wikibook")

_DESCRIPTION = """\
Make a binarised corpus from a published data set: downloaded, or from local files with --from.
wikitext103 is the raw text, wikitext103-words the published word-level version with <unk>. books is PG-19, the lawful
stand-in for BookCorpus. Says the published counts, and warns where the text has others."""


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add the command ``prepare-known``."""
    parser = subparsers.add_parser(
        "prepare-known",
        help="make a corpus from WikiText-103, PG-19, code or Wikipedia, downloaded or from local files",
        description=_DESCRIPTION,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("name", choices=NAMES, metavar="NAME", help=", ".join(NAMES))
    parser.add_argument("--dest", type=Path, metavar="DIR", help="folder to make (default: data-bin/NAME)")
    parser.add_argument(
        "--from",
        dest="local",
        type=Path,
        nargs="+",
        metavar="PATH",
        help="local folders or files instead of a download; splits by train, valid or test in the names of files",
    )
    parser.add_argument("--archive", action="store_true", help="download the zip archive instead of the hub's files")
    parser.add_argument("--text-field", default="text", metavar="NAME", help="field of rows (default: %(default)s)")
    add_vocabulary_options(parser)
    # Each corpus has its own.
    parser.set_defaults(run=run, tokenizer=None)


def run(args: argparse.Namespace) -> int:
    """Prepare the corpus; returns 0.

    Raises:
        UserError: see :func:`fairseq_rpe.data.text.prepare_text`.
    """
    from fairseq_rpe.core.errors import UserError
    from fairseq_rpe.data.sources import KNOWN, by_split, compare, get
    from fairseq_rpe.data.text import TextOptions, prepare_text

    known = KNOWN[args.name]
    if args.local and args.archive:
        raise UserError("--from and --archive are two sources: give one")
    dest = args.dest or Path("data-bin", args.name)
    print(known.about)
    args.tokenizer = args.tokenizer or known.tokenizer
    paths = args.local or get(known, dest.parent / "downloads", args.archive)
    include = known.include if args.local else ()
    own = {"valid_fraction": known.fraction, "test_fraction": known.fraction, **given_options(args)}
    own |= {"dest": dest, "rows_are_lines": known.rows_are_lines, "gpt2": gpt2_folder(args, dest)}
    splits = by_split(known, paths, include)
    if splits.get("valid"):
        refuse_division(args)
    manifest = prepare_text(TextOptions(**own, **splits))
    compare(known, manifest["splits"])
    return 0
