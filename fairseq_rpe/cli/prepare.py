"""``prepare``, ``prepare-corpus`` and ``prepare-stdlib``: make a corpus from any text, a published data set or code."""

import argparse
import os
from dataclasses import fields
from pathlib import Path
from typing import Any

from fairseq_rpe.cli.options import integer
from fairseq_rpe.core.errors import UserError, shorten_path
from fairseq_rpe.data.download import resolve_source
from fairseq_rpe.data.pipeline import prepare_corpus
from fairseq_rpe.data.prepare_options import (
    CORPORA,
    MODEL_TOKENIZER,
    SPLIT_BY,
    TOKENIZERS,
    PrepareOptions,
    compare_counts,
    download_gpt2_vocabulary,
    preset_options,
)
from fairseq_rpe.data.splits import EmptySplit
from fairseq_rpe.utils.output_checks import check_output_folder

_IDEMPOTENT = (
    "If the corpus already exists and was made from the same text with the same options, the command does nothing."
)
OVERWRITE_HELP = "replace a folder that was made with other options; checkpoints may need its vocabulary"


def add_stdlib_options(parser: argparse.ArgumentParser) -> None:
    """Add the options of ``prepare-stdlib``."""
    parser.description = (
        "Make a binarised code corpus from the Python standard library, or from a folder of .py files. Each file "
        "belongs to one split, and each line is an item. The command learns a byte-exact sentencepiece BPE and needs "
        f"no network. {_IDEMPOTENT}"
    )
    out = Path("data-bin/stdlib")
    parser.add_argument("--out", type=Path, default=out, metavar="DIR", help="folder to write (default: %(default)s)")
    parser.add_argument("--source", type=Path, metavar="DIR", help="use the .py files of this folder instead")
    parser.add_argument(
        "--vocab-size", type=integer, metavar="N", help="symbols, special symbols included (default: 4096)"
    )
    _add_split_options(parser, "files")
    parser.add_argument("--max-bytes", type=integer, metavar="N", help="use whole files with at most N bytes in total")


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the options of ``prepare``."""
    parser.description = (
        "Make a binarised corpus from any text. A source is a folder of text files, a .txt, .jsonl or .parquet file "
        "(also compressed as .gz, .bz2, .xz or .zst, or in a .zip), a .json file with an object per line, or a data "
        "set of the Hugging Face hub, hub:OWNER/NAME[/FOLDER]. A document is a text file or a row. Documents keep "
        "their boundaries. A hash of its text assigns each document to a split, unless --valid and --test name the "
        f"files of these splits. Memory use does not depend on the size of the text. {_IDEMPOTENT}"
    )
    parser.add_argument("source", nargs="*", metavar="SOURCE", help="folders, files or hub:OWNER/NAME")
    parser.add_argument("--out", type=Path, required=True, metavar="DIR", help="folder to write, e.g. data-bin/NAME")
    parser.add_argument("--train", nargs="+", default=[], metavar="SOURCE", help="the same as SOURCE")
    for split in ("valid", "test"):
        about = f"sources of the {split} split; SOURCE is then only the train split"
        parser.add_argument(f"--{split}", nargs="+", default=[], metavar="SOURCE", help=about)
    about = "take only matching files of folders, e.g. '*.py' (may be repeated)"
    parser.add_argument("--include", action="append", metavar="GLOB", help=about)
    parser.add_argument(
        "--rows-are-lines", action="store_true", help="treat rows as lines of one document, not as documents"
    )
    _add_corpus_options(parser, "bpe")


def add_corpus_options(parser: argparse.ArgumentParser) -> None:
    """Add the options of ``prepare-corpus``."""
    parser.description = (
        "Make a binarised corpus from a published data set. The command downloads the data set, or uses local files "
        "with --from. wikitext103 is the raw text, wikitext103-words the published word-level version with <unk>. "
        "books is PG-19 in place of BookCorpus, which may not be redistributed. c4 is the English part of C4; with "
        "--documents N, the command downloads only the files that it needs. The command prints the published counts "
        "and warns if the text has different counts."
    )
    parser.add_argument("name", choices=tuple(CORPORA), metavar="NAME", help=", ".join(CORPORA))
    parser.add_argument("--out", type=Path, metavar="DIR", help="folder to write (default: data-bin/NAME)")
    about = (
        "local folders or files instead of a download; the name of a file or of its folder contains the split: train, "
        "valid or test"
    )
    parser.add_argument("--from", dest="local", type=Path, nargs="+", default=[], metavar="PATH", help=about)
    parser.add_argument("--archive", action="store_true", help="download the zip archive instead of the hub's files")
    _add_corpus_options(parser, "the corpus' usual one")


def _add_split_options(parser: argparse.ArgumentParser, items: str) -> None:
    # no defaults, so that options without effect can be refused
    parser.add_argument("--seed", type=integer, metavar="N", help=f"seed that assigns {items} to splits (default: 1)")
    for split in ("valid", "test"):
        about = f"fraction of the {items} in the {split} split (default: 0.05)"
        parser.add_argument(f"--{split}-fraction", type=float, metavar="X", help=about)
    parser.add_argument("--overwrite", action="store_true", help=OVERWRITE_HELP)
    parser.add_argument(
        "--workers", type=integer, metavar="N", help="processes, without effect on the result (default: 2)"
    )


def _add_corpus_options(parser: argparse.ArgumentParser, default_tokenizer: str) -> None:
    about = "train on the first N documents in the order of the files, and neither read nor download the rest"
    parser.add_argument("--documents", type=integer, metavar="N", help=about)
    parser.add_argument("--text-field", metavar="NAME", help="field of a row with its text (default: text)")
    about = "skip text files that are not UTF-8 instead of stopping"
    parser.add_argument("--skip-invalid", action="store_true", default=None, help=about)
    about = (
        "how a document gets its split; text (default): by a hash of its text; path: by a hash of its file's path in "
        "the source; part: its beginning is train, its middle valid and its end test"
    )
    parser.add_argument("--split-by", choices=SPLIT_BY, help=about)
    about = "mark the end of each document (default), or store only lines, as fairseq-preprocess does"
    parser.add_argument("--boundaries", action=argparse.BooleanOptionalAction, help=about)
    about = (
        "bpe: byte-exact sentencepiece BPE, learned from the text; gpt2: GPT-2's BPE; words: words separated by white "
        "space; or the folder of a transformers model, whose tokenizer is used "
        f"(default: {default_tokenizer})"
    )
    parser.add_argument("--tokenizer", type=_tokenizer, metavar="NAME", help=about)
    about = "symbols of the dictionary, special symbols included (default: 16384 for bpe, every word for words)"
    parser.add_argument("--vocab-size", type=integer, metavar="N", help=about)
    about = "learn bpe from at most N bytes of text (default: 20000000)"
    parser.add_argument("--sample-bytes", type=integer, metavar="N", help=about)
    about = "folder with GPT-2's vocab.json and merges.txt (default: download both)"
    parser.add_argument("--gpt2", type=Path, metavar="DIR", help=about)
    parser.add_argument("--vocab-from", type=Path, metavar="DIR", help="use the vocabulary of this prepared corpus")
    _add_split_options(parser, "documents")


def _tokenizer(text: str) -> str | Path:
    """Parse the name of a tokenizer, or the path of a model's folder, which has a separator or exists."""
    if text in TOKENIZERS:
        return text
    if text and (os.sep in text or Path(text).is_dir()):
        return Path(text)
    raise argparse.ArgumentTypeError(
        f"'{shorten_path(text)}' is neither {', '.join(TOKENIZERS)} nor the folder of a transformers model"
    )


def run_stdlib(args: argparse.Namespace) -> None:
    """Run ``prepare-stdlib``."""
    options = preset_options(CORPORA["stdlib"], [args.source] if args.source else [], args.out.parent)
    try:
        _prepare(args, {"out": args.out, **options})
    except EmptySplit:
        if args.max_bytes or not args.source:  # the message then names --max-bytes
            raise
        raise UserError(
            f"--source {args.source} has too few files for three splits: name a folder with more of them"
        ) from None


def run(args: argparse.Namespace) -> None:
    """Run ``prepare``."""
    if args.source and args.train:
        raise UserError("SOURCE and --train are both given and mean the same: give one")
    if args.valid or args.test:
        _refuse_split_options(args)
    names_by_split = {"train": args.train or args.source, "valid": args.valid, "test": args.test}
    files = {}
    for split, names in names_by_split.items():
        one_by_one = split == "train" and args.documents is not None
        files[split] = tuple(path for name in names for path in resolve_source(name, args.include or (), one_by_one))
    _prepare(args, {"out": args.out, **files})


def run_corpus(args: argparse.Namespace) -> None:
    """Run ``prepare-corpus``."""
    corpus = CORPORA[args.name]
    if args.local and args.archive:
        raise UserError("--from and --archive are both given: give one source")
    out = args.out or Path("data-bin", args.name)
    print(corpus.about)
    options = preset_options(corpus, args.local, out.parent / "downloads", args.archive, args.documents)
    if options.get("valid"):
        _refuse_split_options(args, halves_valid=options.get("test_from_valid", False))
    splits = _prepare(args, {"out": out, **options})["splits"]
    if args.documents is None:
        compare_counts(corpus, splits)
    elif corpus.counts:
        print("the published counts are those of all documents, so they are not compared")


def _prepare(args: argparse.Namespace, options: dict[str, Any]) -> dict[str, Any]:
    """Prepare a corpus with the options of the command line, else with ``options``; return its manifest."""
    if not options["out"].is_dir():
        check_output_folder(options["out"], flag="--out")
    names = {field.name for field in fields(PrepareOptions)} - {"out", "train", "valid", "test"}
    stated = {name: value for name in names if (value := getattr(args, name, None)) is not None}
    settings = {**options, **stated, "include": tuple(stated.get("include", ()))}
    if isinstance(settings.get("tokenizer"), Path):
        settings |= {"tokenizer": MODEL_TOKENIZER, "model": settings["tokenizer"]}
    learned = settings.get("tokenizer", "bpe") == "bpe" and not settings.get("vocab_from")
    if not learned:
        if args.sample_bytes is not None:
            raise UserError("--sample-bytes is for a vocabulary that bpe learns here: leave it out")
        # the usual vocabulary size of a corpus is that of its bpe
        settings["vocab_size"] = args.vocab_size
    if "vocab_from" in stated and "tokenizer" in stated:
        raise UserError("--vocab-from also gives the tokenizer: leave --tokenizer out")
    if stated.get("split_by") == "part" and "seed" in stated:
        raise UserError("--seed has no effect with --split-by part: leave it out")
    if settings.get("tokenizer") == "gpt2" and not (settings.get("gpt2") or settings.get("vocab_from")):
        settings["gpt2"] = download_gpt2_vocabulary(settings["out"].parent / "downloads" / "gpt2")
    return prepare_corpus(PrepareOptions(**settings))


def _refuse_split_options(args: argparse.Namespace, halves_valid: bool = False) -> None:
    """Refuse the options of a split by document where the splits are named; a seed decides how valid is halved."""
    for name in (*(() if halves_valid else ("seed",)), "valid_fraction", "test_fraction", "split_by"):
        if getattr(args, name) is not None:
            flag = "--" + name.replace("_", "-")
            raise UserError(f"{flag} has no effect where the valid and test splits are given: leave it out")
