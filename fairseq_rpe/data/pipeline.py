"""Prepares a binarised corpus from any text: split documents, learn a vocabulary, encode, write the manifest."""

import contextlib
import importlib.metadata
import shutil
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from tqdm import tqdm

from fairseq_rpe.core.errors import UserError
from fairseq_rpe.data.atomic_folder import build_atomically
from fairseq_rpe.data.folder import BINARIES, MADE_BY, SPLITS, describe_files, read_dictionary, write_dictionary
from fairseq_rpe.data.prepare_options import PrepareOptions
from fairseq_rpe.data.splits import EmptySplit, SplitDocuments
from fairseq_rpe.data.stream import Piece, SplitWriter, encode_chunks, group_pieces, split_pieces
from fairseq_rpe.data.tokenization import dictionary_symbols, load_encoder
from fairseq_rpe.data.vocabulary import VOCABULARY_FILES, BpeLearner, VocabularyFiles, WordLearner, find_vocabulary
from fairseq_rpe.utils.files import sha256_of_files

# Version of the files: incremented when the same sources and options give other files than before.
_FORMAT = 1
_BAR: dict[str, Any] = {"unit": "char", "unit_scale": True, "disable": None}
DEFAULT_BPE_TYPES = 16384
_LIBRARIES = {"bpe": ("sentencepiece",), "gpt2": ("tokenizers",), "words": ()}


def prepare_corpus(options: PrepareOptions, say: Callable[[str], None] = print) -> dict[str, Any]:
    """Make a corpus, unless it exists and is up to date.

    Args:
        options: Source files, output folder, tokenizer and splits.
        say: Prints a line of progress.

    Returns:
        The manifest, ``corpus.json``.

    Raises:
        UserError: Options or sources are unusable, or the folder cannot be written. Nothing is changed then.
    """
    options.check()
    source = SplitDocuments(options)
    vocabulary = find_vocabulary(options.vocab_from, options.gpt2)
    key = {
        "format": _FORMAT,
        "digest": source.digest,
        "options": options.key(),
        "given_vocabulary": {name: sha256_of_files(path) for name, path in vocabulary[1].items()}
        if vocabulary
        else None,
    }
    return build_atomically(
        options.out,
        key,
        lambda folder: _build(options, source, vocabulary, folder, say),
        say,
        overwrite=options.overwrite,
    )


def _build(
    options: PrepareOptions,
    source: SplitDocuments,
    vocabulary: VocabularyFiles | None,
    folder: Path,
    say: Callable[[str], None],
) -> dict[str, Any]:
    """Fill a folder and return its manifest, apart from the key; split few documents in another way if necessary."""
    try:
        return _build_once(options, source, vocabulary, folder, say)
    except EmptySplit:
        if (description := source.split_few()) is None:
            raise
    say(description)
    return _build_once(options, source, vocabulary, folder, say)


def _build_once(
    options: PrepareOptions,
    source: SplitDocuments,
    vocabulary: VocabularyFiles | None,
    folder: Path,
    say: Callable[[str], None],
) -> dict[str, Any]:
    kind, files = vocabulary or (options.tokenizer, {})
    size = None if vocabulary else _learn(options, source, folder, say)
    for name, path in files.items():
        shutil.copyfile(path, folder / name)
    if kind == "gpt2" and "dict.txt" not in files:
        write_dictionary(folder / "dict.txt", dictionary_symbols(folder))
    types = len(read_dictionary(folder / "dict.txt"))
    say(f"encoding with a vocabulary of {types} symbols")
    counts = _encode(options, source, kind, folder, size)
    source.check_unchanged()
    # Each line end counts as a word, so a split without other words is empty.
    source.check_splits({s: count["documents"] * (count["words"] > count["lines"]) for s, count in counts.items()})
    for split, count in counts.items():
        if kind != "words" and count["unknown"]:
            raise UserError(f"the {split} split has {count['unknown']} unknown tokens: the vocabulary lacks some bytes")
    if source.available_documents is not None:
        available = source.available_documents
        say(f"all of the text is taken: it has {available} documents of training, not {options.documents}")
    if skipped := source.skipped():
        say("left out: " + ", ".join(f"{count} {reason}" for reason, count in skipped.items()))
    return {
        "made_by": MADE_BY,
        "tokenizer": {"kind": kind, "types": types},
        "versions": {name: importlib.metadata.version(name) for name in _LIBRARIES[kind]},
        "splits": {split: dict(count) for split, count in counts.items()},
        "skipped": skipped,
        "files": describe_files(folder, ("dict.txt", *VOCABULARY_FILES[kind], *BINARIES)),
    }


def _learn(options: PrepareOptions, source: SplitDocuments, folder: Path, say: Callable[[str], None]) -> int:
    """Learn the vocabulary from the training split, and return the number of characters of all splits."""
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
                learner.read(_with_progress(document.blocks(), bar))
            else:
                bar.update(document.characters)
    source.check_splits(documents)
    say(f"read {sum(documents.values())} documents, {size} characters; learning the vocabulary")
    learner.write(folder)
    return size


def _encode(
    options: PrepareOptions, source: SplitDocuments, kind: str, folder: Path, size: int | None
) -> dict[str, Counter[str]]:
    """Encode all documents and return counts by split; ``size`` is the number of characters, for the progress bar."""
    dtype = load_encoder(kind, folder).dtype
    with contextlib.ExitStack() as stack:
        writers = {s: stack.enter_context(SplitWriter(folder, s, dtype, options.boundaries)) for s in SPLITS}
        bar = stack.enter_context(tqdm(desc="encoding", total=size, **_BAR))

        def pieces() -> Iterator[tuple[str, Piece]]:
            for split, document in source:
                yield from ((split, piece) for piece in split_pieces(_with_progress(document.blocks(), bar)))

        for split, encoded in encode_chunks(group_pieces(pieces()), kind, folder, options.workers, options.boundaries):
            writers[split].add(encoded)
    return {split: writer.counts for split, writer in writers.items()}


def _with_progress(blocks: Iterator[str], bar: tqdm) -> Iterator[str]:
    for block in blocks:
        bar.update(len(block))
        yield block
