"""``fairseq-rpe prepare``: a corpus from any text."""

from __future__ import annotations

import argparse
from dataclasses import fields
from pathlib import Path
from typing import Any

from fairseq_rpe.cli.prepare import add_split_options

_DESCRIPTION = """\
Make a binarised corpus from any text: folders of text files, .txt, .jsonl, .parquet (also .gz, .xz, .zst or in a
.zip), or a data set of the Hugging Face hub as hub:OWNER/NAME[/FOLDER]. Documents (text files, rows) are kept apart
and divided by a hash of their text, unless --valid and --test are given. Needs little memory whatever the size of
the text. Does nothing if the corpus is there already, made from the same text with the same options."""


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add the command ``prepare``."""
    parser = subparsers.add_parser(
        "prepare",
        help="make a corpus from any text: folders, .txt, .jsonl, .parquet, hub data sets",
        description=_DESCRIPTION,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("source", nargs="*", metavar="SOURCE", help="folders, files or hub:OWNER/NAME")
    parser.add_argument("--dest", type=Path, required=True, metavar="DIR", help="folder to make, e.g. data-bin/NAME")
    parser.add_argument("--train", nargs="+", default=[], metavar="SOURCE", help="the same as SOURCE")
    for split in ("valid", "test"):
        parser.add_argument(
            f"--{split}", nargs="+", default=[], metavar="SOURCE", help=f"the {split} split; SOURCE is then train only"
        )
    parser.add_argument(
        "--include",
        action="append",
        default=[],
        metavar="GLOB",
        help="only such files of folders, e.g. '*.py'; repeatable",
    )
    parser.add_argument("--text-field", default="text", metavar="NAME", help="field of rows (default: %(default)s)")
    parser.add_argument("--rows-are-lines", action="store_true", help="rows are lines of one document, not documents")
    add_vocabulary_options(parser)
    parser.set_defaults(run=run)


def add_vocabulary_options(parser: argparse.ArgumentParser) -> None:
    """Options that all corpora of text share."""
    parser.add_argument(
        "--skip-invalid", action="store_true", help="leave out text files that are not UTF-8 instead of stopping"
    )
    parser.add_argument(
        "--tokenizer",
        choices=("bpe", "gpt2", "words"),
        default="bpe",
        help="byte-exact sentencepiece BPE learned here, GPT-2's BPE, or white-space words (default: %(default)s)",
    )
    parser.add_argument(
        "--vocab-size",
        type=int,
        metavar="N",
        help="symbols of the dictionary, specials included (default: 16384 for bpe, every word for words)",
    )
    parser.add_argument(
        "--sample-bytes", type=int, metavar="N", help="learn bpe from at most so much text (default: 20000000)"
    )
    parser.add_argument(
        "--gpt2",
        type=Path,
        metavar="DIR",
        help="folder with vocab.json and merges.txt of GPT-2 (default: download them)",
    )
    parser.add_argument("--vocab-from", type=Path, metavar="DIR", help="take the vocabulary of this prepared corpus")
    parser.add_argument("--seed", type=int, metavar="N", help="seed of the division (default: 1)")
    add_split_options(parser, "documents")
    # nothing given, so that what would have no effect can be refused
    parser.set_defaults(valid_fraction=None, test_fraction=None)


def given_options(args: argparse.Namespace) -> dict[str, Any]:
    """The options that were given, by the names of ``TextOptions``, which has the defaults of the others.

    Raises:
        UserError: ``--sample-bytes`` where nothing is learned from a sample.
    """
    from fairseq_rpe.core.errors import UserError
    from fairseq_rpe.data.text import TextOptions

    if args.sample_bytes is not None and (args.vocab_from or args.tokenizer != "bpe"):
        raise UserError("--sample-bytes is for a vocabulary that bpe learns here: leave it out")
    given = {f.name: getattr(args, f.name, None) for f in fields(TextOptions)}
    return {name: value for name, value in given.items() if value is not None}


def refuse_division(args: argparse.Namespace) -> None:
    """Refuse the options of a division by document where the splits are named."""
    from fairseq_rpe.core.errors import UserError

    for name in ("seed", "valid_fraction", "test_fraction"):
        if getattr(args, name) is not None:
            flag = "--" + name.replace("_", "-")
            raise UserError(f"{flag} has no effect where the valid and test splits are given: leave it out")


def gpt2_folder(args: argparse.Namespace, dest: Path) -> Path | None:
    """The folder with GPT-2's vocabulary if it is asked for, downloaded beside the corpus unless one is named."""
    from fairseq_rpe.data.sources import gpt2_vocabulary

    if args.tokenizer != "gpt2" or args.gpt2 or args.vocab_from:
        return args.gpt2
    return gpt2_vocabulary(dest.parent / "downloads" / "gpt2")


def run(args: argparse.Namespace) -> int:
    """Prepare the corpus; returns 0.

    Raises:
        UserError: see :func:`fairseq_rpe.data.text.prepare_text`.
    """
    from fairseq_rpe.core.errors import UserError
    from fairseq_rpe.data.hub import local
    from fairseq_rpe.data.text import TextOptions, prepare_text

    if args.source and args.train:
        raise UserError("SOURCE and --train are both given: they are the same, give one")
    if args.valid or args.test:
        refuse_division(args)
    given = given_options(args)
    given["train"] = args.train or args.source
    for split in ("train", "valid", "test"):
        given[split] = tuple(local(source) for source in given[split])
    given |= {"include": tuple(args.include), "gpt2": gpt2_folder(args, args.dest)}
    prepare_text(TextOptions(**given))
    return 0
