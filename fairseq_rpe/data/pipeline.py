"""Any text to a binarised corpus: documents divided, a vocabulary learned, encoded, described."""

import contextlib
import importlib.metadata
import shutil
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from tqdm import tqdm

from fairseq_rpe.core.errors import UserError
from fairseq_rpe.data.atomic_folder import make_once
from fairseq_rpe.data.encoders import load_encoder
from fairseq_rpe.data.folder import BINARIES, MADE_BY, SPLITS, describe_files, read_dictionary, write_dictionary
from fairseq_rpe.data.gpt2 import dictionary_symbols
from fairseq_rpe.data.prepare_options import PrepareOptions
from fairseq_rpe.data.splits import DividedDocuments, EmptySplit
from fairseq_rpe.data.stream import Piece, SplitWriter, cut, encode_chunks, gather
from fairseq_rpe.data.vocabulary import VOCABULARY_FILES, BpeLearner, Given, WordLearner, given_vocabulary
from fairseq_rpe.utils.files import file_digest

# Raised when the same sources and options give other files than before.
_FORMAT = 1
_BAR: dict[str, Any] = {"unit": "char", "unit_scale": True, "disable": None}
DEFAULT_BPE_TYPES = 16384
_LIBRARIES = {"bpe": ("sentencepiece",), "gpt2": ("tokenizers",), "words": ()}


def prepare(options: PrepareOptions, say: Callable[[str], None] = print) -> dict[str, Any]:
    """Make the corpus unless it already exists, and return its manifest (``corpus.json``).

    Raises UserError for bad options or sources and a destination that cannot be written; nothing is changed then.
    """
    options.check()
    source = DividedDocuments(options)
    given = given_vocabulary(options.vocab_from, options.gpt2)
    key = {
        "format": _FORMAT,
        "digest": source.digest,
        "options": options.key(),
        "given_vocabulary": {name: file_digest(path) for name, path in given[1].items()} if given else None,
    }
    return make_once(
        options.dest, key, lambda made: _build(options, source, given, made, say), say, overwrite=options.overwrite
    )


def _build(
    options: PrepareOptions, source: DividedDocuments, given: Given | None, made: Path, say: Callable[[str], None]
) -> dict[str, Any]:
    try:
        return _build_divided(options, source, given, made, say)
    except EmptySplit:
        if (how := source.divide_few()) is None:
            raise
    say(how)
    return _build_divided(options, source, given, made, say)


def _build_divided(
    options: PrepareOptions, source: DividedDocuments, given: Given | None, made: Path, say: Callable[[str], None]
) -> dict[str, Any]:
    kind, files = given or (options.tokenizer, {})
    size = None if given else _learn(options, source, made, say)
    for name, path in files.items():
        shutil.copyfile(path, made / name)
    if kind == "gpt2" and "dict.txt" not in files:
        write_dictionary(made / "dict.txt", dictionary_symbols(made))
    types = len(read_dictionary(made / "dict.txt"))
    say(f"encoding with a vocabulary of {types} symbols")
    counts = _encode(options, source, kind, made, size)
    source.check_unchanged()
    # Each line end counts as a word.
    source.check_splits({s: count["documents"] * (count["words"] > count["lines"]) for s, count in counts.items()})
    for split, count in counts.items():
        if kind != "words" and count["unknown"]:
            raise UserError(f"the {split} split has {count['unknown']} unknown tokens: the vocabulary lacks some bytes")
    if source.short is not None:
        say(f"all of the text is taken: it has {source.short} documents of training, not {options.documents}")
    if skipped := source.skipped():
        say("left out: " + ", ".join(f"{count} {reason}" for reason, count in skipped.items()))
    return {
        "made_by": MADE_BY,
        "tokenizer": {"kind": kind, "types": types},
        "versions": {name: importlib.metadata.version(name) for name in _LIBRARIES[kind]},
        "splits": {split: dict(count) for split, count in counts.items()},
        "skipped": skipped,
        "files": describe_files(made, ("dict.txt", *VOCABULARY_FILES[kind], *BINARIES)),
    }


def _learn(options: PrepareOptions, source: DividedDocuments, made: Path, say: Callable[[str], None]) -> int:
    """Learn the vocabulary from the train split; returns the number of characters of all splits."""
    if options.tokenizer == "words":
        learner = WordLearner(options.vocab_size)
    else:
        learner = BpeLearner(options.vocab_size or DEFAULT_BPE_TYPES, options.sample_bytes)
    documents, size = dict.fromkeys(SPLITS, 0), 0
    with tqdm(desc="reading", **_BAR) as bar:
        for split, document in source:
            documents[split] += not document.blank
            size += document.characters
            if split == "train":
                learner.read(_counted(document.blocks(), bar))
            else:
                bar.update(document.characters)
    source.check_splits(documents)
    say(f"read {sum(documents.values())} documents, {size} characters; learning the vocabulary")
    learner.write(made)
    return size


def _encode(
    options: PrepareOptions, source: DividedDocuments, kind: str, made: Path, size: int | None
) -> dict[str, Counter[str]]:
    dtype = load_encoder(kind, made).dtype
    with contextlib.ExitStack() as stack:
        writers = {s: stack.enter_context(SplitWriter(made, s, dtype, options.boundaries)) for s in SPLITS}
        bar = stack.enter_context(tqdm(desc="encoding", total=size, **_BAR))

        def pieces() -> Iterator[tuple[str, Piece]]:
            for split, document in source:
                yield from ((split, piece) for piece in cut(_counted(document.blocks(), bar)))

        for split, encoded in encode_chunks(gather(pieces()), kind, made, options.workers, options.boundaries):
            writers[split].add(encoded)
    return {split: writer.counts for split, writer in writers.items()}


def _counted(blocks: Iterator[str], bar: tqdm) -> Iterator[str]:
    for block in blocks:
        bar.update(len(block))
        yield block
