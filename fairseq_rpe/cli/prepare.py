"""``prepare``, ``prepare-known`` and ``prepare-stdlib``: a corpus from any text, a published one, code."""

import argparse
from dataclasses import fields
from pathlib import Path
from typing import Any

from fairseq_rpe.cli.options import integer
from fairseq_rpe.core.errors import UserError
from fairseq_rpe.data.hub import sources
from fairseq_rpe.data.pipeline import prepare
from fairseq_rpe.data.prepare_options import (
    DIVISIONS,
    KNOWN,
    TOKENIZERS,
    PrepareOptions,
    choose,
    compare,
    gpt2_vocabulary,
)
from fairseq_rpe.utils.files import check_folder

_TWICE = "Does nothing if the corpus already exists, made from the same text with the same options."
OVERWRITE = "replace what this command made in --dest with other settings; checkpoints may need its vocabulary"


def add_stdlib(parser: argparse.ArgumentParser) -> None:
    parser.description = (
        "Make a binarised code corpus from the Python standard library (or a folder of .py files): split by file, with "
        f"a byte-exact sentencepiece BPE learned from it, each line an item. Needs no network. {_TWICE}"
    )
    dest = Path("data-bin/stdlib")
    parser.add_argument("--dest", type=Path, default=dest, metavar="DIR", help="folder to make (default: %(default)s)")
    parser.add_argument("--source", type=Path, metavar="DIR", help="use the .py files of this folder instead")
    parser.add_argument(
        "--vocab-size", type=integer, metavar="N", help="symbols, bytes and specials included (default: 4096)"
    )
    _add_division(parser, "files", "split by file")
    parser.add_argument("--max-bytes", type=integer, metavar="N", help="use whole files up to this total size")


def add(parser: argparse.ArgumentParser) -> None:
    parser.description = (
        "Make a binarised corpus from any text: folders of text files, .txt, .jsonl, .parquet (also .gz, .xz, .zst or "
        "in a .zip), .json with an object per line, or a data set of the Hugging Face hub as hub:OWNER/NAME[/FOLDER]. "
        "Documents (text files, rows) are kept apart and divided by a hash of their text, unless --valid and --test "
        f"are given. Needs little memory however large the text is. {_TWICE}"
    )
    parser.add_argument("source", nargs="*", metavar="SOURCE", help="folders, files or hub:OWNER/NAME")
    parser.add_argument("--dest", type=Path, required=True, metavar="DIR", help="folder to make, e.g. data-bin/NAME")
    parser.add_argument("--train", nargs="+", default=[], metavar="SOURCE", help="the same as SOURCE")
    for split in ("valid", "test"):
        about = f"the {split} split; SOURCE is then the train split only"
        parser.add_argument(f"--{split}", nargs="+", default=[], metavar="SOURCE", help=about)
    about = "take only the files of folders that match, e.g. '*.py'; repeatable"
    parser.add_argument("--include", action="append", metavar="GLOB", help=about)
    parser.add_argument("--rows-are-lines", action="store_true", help="rows are lines of one document, not documents")
    _add_shared(parser, "bpe")


def add_known(parser: argparse.ArgumentParser) -> None:
    parser.description = (
        "Make a binarised corpus from a published data set: downloaded, or from local files with --from. wikitext103 "
        "is the raw text, wikitext103-words the published word-level version with <unk>. books is PG-19, the lawful "
        "stand-in for BookCorpus. c4 is the English part of C4; --documents N downloads no more of it than is needed. "
        "Reports the published counts and warns where the text has different ones."
    )
    parser.add_argument("name", choices=tuple(KNOWN), metavar="NAME", help=", ".join(KNOWN))
    parser.add_argument("--dest", type=Path, metavar="DIR", help="folder to make (default: data-bin/NAME)")
    about = (
        "local folders or files instead of a download; train, valid or test in the name of a file or its folder says "
        "its split"
    )
    parser.add_argument("--from", dest="local", type=Path, nargs="+", default=[], metavar="PATH", help=about)
    parser.add_argument("--archive", action="store_true", help="download the zip archive instead of the hub's files")
    _add_shared(parser, "the one usual for the corpus")


def _add_division(parser: argparse.ArgumentParser, what: str, division: str) -> None:
    # No defaults, so that what would have no effect can be refused.
    parser.add_argument("--seed", type=integer, metavar="N", help=f"seed of the {division} (default: 1)")
    for split in ("valid", "test"):
        about = f"share of the {what} for the {split} split (default: 0.05)"
        parser.add_argument(f"--{split}-fraction", type=float, metavar="X", help=about)
    parser.add_argument("--overwrite", action="store_true", help=OVERWRITE)
    parser.add_argument("--workers", type=integer, metavar="N", help="processes; changes only the time (default: 2)")


def _add_shared(parser: argparse.ArgumentParser, usual: str) -> None:
    about = "train on the first N documents, in the order of the files; what follows them is not read or downloaded"
    parser.add_argument("--documents", type=integer, metavar="N", help=about)
    parser.add_argument("--text-field", metavar="NAME", help="field of a row that holds its text (default: text)")
    about = "leave out text files that are not UTF-8 instead of stopping"
    parser.add_argument("--skip-invalid", action="store_true", default=None, help=about)
    about = "what decides the split of a document: its text (default) or its file's path in the source; part: it is cut"
    parser.add_argument("--divide-by", choices=DIVISIONS, help=about)
    about = "mark where documents meet (default), or let lines follow lines as in fairseq-preprocess"
    parser.add_argument("--boundaries", action=argparse.BooleanOptionalAction, help=about)
    about = f"byte-exact sentencepiece BPE learned here, GPT-2's BPE, or white-space words (default: {usual})"
    parser.add_argument("--tokenizer", choices=TOKENIZERS, help=about)
    about = "symbols of the dictionary, specials included (default: 16384 for bpe, every word for words)"
    parser.add_argument("--vocab-size", type=integer, metavar="N", help=about)
    about = "learn bpe from at most this many bytes of text (default: 20000000)"
    parser.add_argument("--sample-bytes", type=integer, metavar="N", help=about)
    about = "folder with vocab.json and merges.txt of GPT-2 (default: download them)"
    parser.add_argument("--gpt2", type=Path, metavar="DIR", help=about)
    parser.add_argument("--vocab-from", type=Path, metavar="DIR", help="take the vocabulary of this prepared corpus")
    _add_division(parser, "documents", "division")


def run_stdlib(args: argparse.Namespace) -> None:
    own = choose(KNOWN["stdlib"], [args.source] if args.source else [], args.dest.parent)
    _prepare(args, {"dest": args.dest, **own})


def run(args: argparse.Namespace) -> None:
    if args.source and args.train:
        raise UserError("SOURCE and --train are both given: they are the same, give one")
    if args.valid or args.test:
        _refuse_division(args)
    given = {"train": args.train or args.source, "valid": args.valid, "test": args.test}
    found = {}
    for split, names in given.items():
        one_by_one = split == "train" and args.documents is not None
        found[split] = tuple(path for name in names for path in sources(name, args.include or (), one_by_one))
    _prepare(args, {"dest": args.dest, **found})


def run_known(args: argparse.Namespace) -> None:
    known = KNOWN[args.name]
    if args.local and args.archive:
        raise UserError("--from and --archive are two sources: give one")
    dest = args.dest or Path("data-bin", args.name)
    print(known.about)
    own = choose(known, args.local, dest.parent / "downloads", args.archive, args.documents)
    if own.get("valid"):
        _refuse_division(args, halved=own.get("test_from_valid", False))
    splits = _prepare(args, {"dest": dest, **own})["splits"]
    if args.documents is None:
        compare(known, splits)
    elif known.counts:
        print("the published counts are those of all documents: they are not compared")


def _prepare(args: argparse.Namespace, own: dict[str, Any]) -> dict[str, Any]:
    """Prepare with what was given, and ``own`` options for the others; returns the manifest."""
    if not own["dest"].is_dir():
        check_folder(own["dest"], flag="--dest")
    names = {field.name for field in fields(PrepareOptions)} - {"dest", "train", "valid", "test"}
    given = {name: value for name in names if (value := getattr(args, name, None)) is not None}
    settings = {**own, **given, "include": tuple(given.get("include", ()))}
    learned = settings.get("tokenizer", "bpe") == "bpe" and not settings.get("vocab_from")
    if not learned:
        if args.sample_bytes is not None:
            raise UserError("--sample-bytes is for a vocabulary that bpe learns here: leave it out")
        # The usual size of a corpus is that of its bpe.
        settings["vocab_size"] = args.vocab_size
    if settings.get("tokenizer") == "gpt2" and not (settings.get("gpt2") or settings.get("vocab_from")):
        settings["gpt2"] = gpt2_vocabulary(settings["dest"].parent / "downloads" / "gpt2")
    return prepare(PrepareOptions(**settings))


def _refuse_division(args: argparse.Namespace, halved: bool = False) -> None:
    """Refuse the options of a division by document where the splits are named; a seed decides how one is halved."""
    for name in (*(() if halved else ("seed",)), "valid_fraction", "test_fraction", "divide_by"):
        if getattr(args, name) is not None:
            flag = "--" + name.replace("_", "-")
            raise UserError(f"{flag} has no effect where the valid and test splits are given: leave it out")
