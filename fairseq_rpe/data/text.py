"""Any text to a binarised corpus: documents divided, a vocabulary learned, encoded, described."""

from __future__ import annotations

import contextlib
import importlib.metadata
import os
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fairseq_rpe.core.errors import UserError
from fairseq_rpe.data.binarise import read_dictionary
from fairseq_rpe.data.corpus import SPLITS, unit_hash
from fairseq_rpe.data.documents import Document, Reader
from fairseq_rpe.data.encoders import load_encoder
from fairseq_rpe.data.pieces import Piece, cut, gather
from fairseq_rpe.data.place import TEXT_MADE_BY, describe_files, make_once
from fairseq_rpe.data.sourcefiles import Entry, digest_entries, find_entries
from fairseq_rpe.data.stream import Counts, SplitWriter, encode_chunks
from fairseq_rpe.data.tokenizer import MIN_VOCAB_SIZE
from fairseq_rpe.data.vocabulary import VOCABULARY_FILES, BpeLearner, Given, WordLearner, given_vocabulary

if TYPE_CHECKING:
    from tqdm import tqdm

# Raised when the same sources and options give other files than before.
_FORMAT = 1

DEFAULT_BPE_TYPES = 16384
# The options that decide the files made, beside the text and a given vocabulary.
_DECIDING = (
    *("include", "text_field", "rows_are_lines", "skip_invalid", "tokenizer", "vocab_size", "sample_bytes"),
    *("seed", "valid_fraction", "test_fraction"),
)
_BINARIES = tuple(f"{split}.{end}" for split in SPLITS for end in ("bin", "idx"))


@dataclass(frozen=True)
class TextOptions:
    """What to prepare and where.

    Attributes:
        dest: folder of the corpus.
        train: folders and files to read; all text if ``valid`` and ``test`` are empty, else the train split.
        valid: the same for the valid split.
        test: the same for the test split.
        include: patterns for file names in folders, such as ``*.py``; none takes all.
        text_field: field of ``.jsonl`` and ``.parquet`` rows with the text.
        rows_are_lines: rows are lines of one document per file instead of documents.
        skip_invalid: leave out text files that are not UTF-8.
        tokenizer: ``bpe``, ``gpt2`` or ``words``.
        vocab_size: symbols of the dictionary; ``None`` is 16,384 for ``bpe`` and all words for ``words``.
        sample_bytes: how much text ``bpe`` learns from at most.
        gpt2: folder with the vocabulary of ``gpt2``.
        vocab_from: take tokenizer and dictionary of this prepared corpus instead.
        seed: decides which document goes into which split.
        valid_fraction: expected share of documents, in (0, 1), of the valid split.
        test_fraction: the same for the test split.
        workers: processes; changes nothing but the time.
    """

    dest: Path
    train: tuple[Path | Entry, ...]
    valid: tuple[Path | Entry, ...] = ()
    test: tuple[Path | Entry, ...] = ()
    include: tuple[str, ...] = ()
    text_field: str = "text"
    rows_are_lines: bool = False
    skip_invalid: bool = False
    tokenizer: str = "bpe"
    vocab_size: int | None = None
    sample_bytes: int = 20_000_000
    gpt2: Path | None = None
    vocab_from: Path | None = None
    seed: int = 1
    valid_fraction: float = 0.05
    test_fraction: float = 0.05
    workers: int = 2

    def check(self) -> None:
        """Refuse what does not go together, and numbers out of range.

        Raises:
            UserError: naming the option.
        """
        if not self.train:
            raise UserError("no text is given: name folders or files")
        if bool(self.valid) != bool(self.test):
            given, missing = ("--valid", "--test") if self.valid else ("--test", "--valid")
            raise UserError(f"{given} is given without {missing}: give both, or none to divide the text by document")
        for name in ("valid_fraction", "test_fraction"):
            if not 0 < getattr(self, name) < 1:
                raise UserError(f"{_flag(name)} {getattr(self, name)} is out of range: use more than 0 and less than 1")
        if self.valid_fraction + self.test_fraction >= 1:
            raise UserError(
                "--valid-fraction and --test-fraction leave no text for training: their sum must be below 1"
            )
        ranges = {"vocab_size": (MIN_VOCAB_SIZE, 10**6), "workers": (1, 256), "sample_bytes": (10**5, 10**10)}
        for name, (least, most) in ranges.items():
            number = getattr(self, name)
            if number is not None and not least <= number <= most:
                raise UserError(f"{_flag(name)} {number} is out of range: use {least} to {most}")
        if self.vocab_size and (self.vocab_from or self.tokenizer == "gpt2"):
            raise UserError("--vocab-size has no effect on a given vocabulary: leave it out")
        if self.vocab_from and self.gpt2:
            raise UserError("--vocab-from and --gpt2 are two vocabularies: give one")
        if (self.tokenizer == "gpt2") != bool(self.gpt2) and not self.vocab_from:
            raise UserError("--tokenizer gpt2 and --gpt2 FOLDER go together: FOLDER has vocab.json and merges.txt")
        if os.pathsep in str(self.dest):
            raise UserError(f"--dest {self.dest} has a '{os.pathsep}', where fairseq splits paths: rename it")


def _flag(name: str) -> str:
    return "--" + name.replace("_", "-")


class _Source:
    """The documents of all splits, the same in every pass."""

    def __init__(self, options: TextOptions) -> None:
        self._options = options
        given = {"train": options.train, "valid": options.valid, "test": options.test}
        paths = given if options.valid else {"": options.train}
        found = {split: find_entries(p, options.include) for split, p in paths.items()}
        self.binary = sum(binary for _, binary in found.values())
        self._readers = {
            split: Reader(entries, options.text_field, options.rows_are_lines, options.skip_invalid)
            for split, (entries, _) in found.items()
        }
        self._stamp = self._stamps()
        self.digest = {split or "all": digest_entries(reader.entries) for split, reader in self._readers.items()}

    def __iter__(self) -> Iterator[tuple[str, Document]]:
        for split, reader in self._readers.items():
            for document in reader:
                yield split or self._split_of(document), document

    def _split_of(self, document: Document) -> str:
        options = self._options
        number = unit_hash("split", options.seed, document.digest)
        valid, test = options.valid_fraction, options.test_fraction
        return "valid" if number < valid else "test" if number < valid + test else "train"

    def _entries(self) -> Iterator[Entry]:
        for reader in self._readers.values():
            yield from reader.entries

    def _stamps(self) -> list[tuple[int, int]]:
        return [((stat := entry.path.stat()).st_size, stat.st_mtime_ns) for entry in self._entries()]

    def check_unchanged(self) -> None:
        """Refuse sources that changed since the first look: the passes may have read different text."""
        if self._stamps() != self._stamp:
            raise UserError("the source files changed while they were read: run this again when they are at rest")

    def skipped(self) -> dict[str, int]:
        """What the last pass left out, by reason."""
        left_out = {"binary": self.binary}
        for reader in self._readers.values():
            for reason, count in reader.skipped.items():
                left_out[reason] = left_out.get(reason, 0) + count
        return {reason: count for reason, count in left_out.items() if count}


def prepare_text(options: TextOptions, say: Callable[[str], None] = print) -> dict[str, Any]:
    """Make the corpus unless it is there already, and return its manifest (``corpus.json``).

    Raises:
        UserError: for bad options or sources and a destination that cannot be written; nothing is changed then.
    """
    options.check()
    source = _Source(options)
    given = given_vocabulary(options.vocab_from, options.gpt2)
    settings = asdict(options)
    key = {
        "format": _FORMAT,
        "digest": source.digest,
        # As it will be read back: without tuples.
        "options": {name: list(v) if isinstance(v := settings[name], tuple) else v for name in _DECIDING},
        "given_vocabulary": given.digests() if given else None,
    }
    return make_once(options.dest, key, lambda made, _: {**key, **_build(options, source, given, made, say)}, say)


def _build(
    options: TextOptions, source: _Source, given: Given | None, made: Path, say: Callable[[str], None]
) -> dict[str, Any]:
    kind = given.kind if given else options.tokenizer
    size = 0
    if given:
        given.write(made)
    else:
        size = _learn(options, source, made, say)
    types = len(read_dictionary(made / "dict.txt"))
    say(f"encoding with a vocabulary of {types} symbols")
    counts = _encode(options, source, kind, made, size)
    source.check_unchanged()
    _check_splits({split: count.documents for split, count in counts.items()})
    for split, count in counts.items():
        if kind != "words" and count.unknown:
            raise UserError(f"the {split} split has {count.unknown} unknown tokens: the vocabulary lacks some bytes")
    skipped = source.skipped()
    if skipped:
        say("left out: " + ", ".join(f"{count} {reason}" for reason, count in skipped.items()))
    return {
        "made_by": TEXT_MADE_BY,
        "tokenizer": {"kind": kind, "types": types},
        "versions": _versions(kind),
        "splits": {split: asdict(count) for split, count in counts.items()},
        "skipped": skipped,
        "files": describe_files(made, ("dict.txt", *VOCABULARY_FILES[kind], *_BINARIES)),
    }


def _versions(kind: str) -> dict[str, str]:
    return {
        name: importlib.metadata.version(name)
        for name in {"bpe": ["sentencepiece"], "gpt2": ["tokenizers"]}.get(kind, [])
    }


def _learn(options: TextOptions, source: _Source, made: Path, say: Callable[[str], None]) -> int:
    """Learn the vocabulary from the train split; returns the number of characters of all splits."""
    learner = (
        WordLearner(options.vocab_size)
        if options.tokenizer == "words"
        else BpeLearner(options.vocab_size or DEFAULT_BPE_TYPES, options.sample_bytes)
    )
    documents = dict.fromkeys(SPLITS, 0)
    size = 0
    with _progress("reading", None) as bar:

        def count(characters: int) -> None:
            nonlocal size
            size += characters
            bar.update(characters)

        for split, document in source:
            documents[split] += 1
            blocks = _counted(document.blocks(), count)
            if split == "train":
                learner.read(blocks)
            else:
                deque(blocks, maxlen=0)
    _check_splits(documents)
    say(f"read {sum(documents.values())} documents, {size} characters; learning the vocabulary")
    learner.write(made)
    return size


def _encode(options: TextOptions, source: _Source, kind: str, made: Path, size: int) -> dict[str, Counts]:
    dtype = load_encoder(kind, made).dtype
    with contextlib.ExitStack() as stack:
        writers = {split: stack.enter_context(SplitWriter(made, split, dtype)) for split in SPLITS}
        bar = stack.enter_context(_progress("encoding", size or None))

        def pieces() -> Iterator[tuple[str, Piece]]:
            for split, document in source:
                for piece in cut(_counted(document.blocks(), bar.update)):
                    yield split, piece

        for split, encoded in encode_chunks(gather(pieces()), kind, made, options.workers):
            writers[split].add(encoded)
    return {split: writer.counts for split, writer in writers.items()}


def _check_splits(documents: dict[str, int]) -> None:
    for split, number in documents.items():
        if not number:
            raise UserError(
                f"the {split} split of {sum(documents.values())} documents would be empty: "
                "give more documents, other fractions, another --seed or --valid and --test"
            )


def _progress(what: str, total: int | None) -> tqdm[None]:
    from tqdm import tqdm

    return tqdm(desc=what, total=total, unit="char", unit_scale=True, disable=None)


def _counted(blocks: Iterator[str], count: Callable[[int], object]) -> Iterator[str]:
    for block in blocks:
        count(len(block))
        yield block
