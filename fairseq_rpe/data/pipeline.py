"""Prepares a binarised corpus from any text: split documents, learn a vocabulary, encode, write the manifest."""

import contextlib
import importlib.metadata
import shutil
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tqdm import tqdm

from fairseq_rpe.core.errors import UserError
from fairseq_rpe.data.atomic_folder import build_atomically
from fairseq_rpe.data.folder import BINARIES, MADE_BY, SPLITS, describe_files, read_dictionary, write_dictionary
from fairseq_rpe.data.prepare_options import PrepareOptions
from fairseq_rpe.data.splits import EmptySplit, SplitDocuments
from fairseq_rpe.data.stream import PIECE, Piece, SplitWriter, encode_chunks, group_pieces, split_pieces
from fairseq_rpe.data.tokenization import dictionary_symbols, load_encoder
from fairseq_rpe.data.transformers_tokenizer import load_model_vocabulary
from fairseq_rpe.data.vocabulary import VOCABULARY_FILES, BpeLearner, VocabularyFiles, WordLearner, find_vocabulary
from fairseq_rpe.utils.files import sha256_of_files

# Version of the files: incremented when the same sources and options give other files than before.
_FORMAT = 1
_BAR: dict[str, Any] = {"unit": "char", "unit_scale": True, "disable": None}
DEFAULT_BPE_TYPES = 16384
_LIBRARIES = {"bpe": ("sentencepiece",), "gpt2": ("tokenizers",), "words": (), "transformers": ("tokenizers",)}
_MAY_LACK_BYTES = ("words", "transformers")  # tokenizers with unknown tokens


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
    vocabulary = find_vocabulary(options.vocab_from, options.gpt2, options.model)
    key = {
        "format": _FORMAT,
        "digest": source.digest,
        "options": options.key(),
        "given_vocabulary": None
        if vocabulary is None
        else {name: sha256_of_files(path) for name, path in vocabulary.paths.items()},
    }
    builder = _CorpusBuilder(options, source, vocabulary, say)
    return build_atomically(options.out, key, builder.build, say, overwrite=options.overwrite)


@dataclass(frozen=True)
class _CorpusBuilder:
    """Fills a folder with a corpus.

    Attributes:
        options: Source files, output folder, tokenizer and splits.
        source: The documents with their splits.
        vocabulary: Files of an existing vocabulary; None learns one.
        say: Prints a line of progress.
    """

    options: PrepareOptions
    source: SplitDocuments
    vocabulary: VocabularyFiles | None
    say: Callable[[str], None]

    def build(self, folder: Path) -> dict[str, Any]:
        """Fill a folder and return its manifest, apart from the key; split few documents in another way if needed."""
        try:
            return self._build_once(folder)
        except EmptySplit:
            if (description := self.source.split_few()) is None:
                raise
        self.say(description)
        return self._build_once(folder)

    def _build_once(self, folder: Path) -> dict[str, Any]:
        if self.vocabulary is None:
            kind, size = self.options.tokenizer, self._learn(folder)
        else:
            kind, size = self.vocabulary.kind, None
            self._copy_vocabulary(self.vocabulary, folder)
        types = len(read_dictionary(folder / "dict.txt"))
        self.say(f"encoding with a vocabulary of {types} symbols")
        counts = self._encode(kind, folder, size)
        self.source.check_unchanged()
        self._check_counts(kind, counts)
        self._report_documents()
        return {
            "made_by": MADE_BY,
            "tokenizer": {"kind": kind, "types": types},
            "versions": {name: importlib.metadata.version(name) for name in _LIBRARIES[kind]},
            "splits": {split: dict(count) for split, count in counts.items()},
            "skipped": self.source.skipped(),
            "files": describe_files(folder, ("dict.txt", *VOCABULARY_FILES[kind], *BINARIES)),
        }

    def _copy_vocabulary(self, vocabulary: VocabularyFiles, folder: Path) -> None:
        for name, path in vocabulary.paths.items():
            shutil.copyfile(path, folder / name)
        if vocabulary.kind == "gpt2" and "dict.txt" not in vocabulary.paths:
            write_dictionary(folder / "dict.txt", dictionary_symbols(folder))
        if vocabulary.kind == "transformers":
            write_dictionary(folder / "dict.txt", load_model_vocabulary(folder).symbols)

    def _learn(self, folder: Path) -> int:
        """Learn the vocabulary from the training split, and return the number of characters of all splits."""
        options = self.options
        if options.tokenizer == "words":
            learner = WordLearner(options.vocab_size)
        else:
            learner = BpeLearner(options.vocab_size or DEFAULT_BPE_TYPES, options.sample_bytes)
        documents, size = dict.fromkeys(SPLITS, 0), 0
        with tqdm(desc="reading", **_BAR) as bar:
            for split, document in self.source:
                documents[split] += not document.blank
                size += document.characters
                if split == "train":
                    learner.read(_with_progress(document.blocks(), bar))
                else:
                    bar.update(document.characters)
        self.source.check_splits(documents)
        self.say(f"read {sum(documents.values())} documents, {size} characters; learning the vocabulary")
        learner.write(folder)
        return size

    def _encode(self, kind: str, folder: Path, size: int | None) -> dict[str, Counter[str]]:
        """Write all documents as tokens.

        Args:
            kind: Kind of the tokenizer.
            folder: Folder with the vocabulary, to which the splits are written.
            size: Number of characters of all documents, for the progress bar; None: unknown.

        Returns:
            The counts of each split.
        """
        options, dtype = self.options, load_encoder(kind, folder).dtype
        with contextlib.ExitStack() as stack:
            writers = {s: stack.enter_context(SplitWriter(folder, s, dtype, options.boundaries)) for s in SPLITS}
            bar = stack.enter_context(tqdm(desc="encoding", total=size, **_BAR))
            # a tokenizer of transformers may have tokens across any two characters
            chunks = group_pieces(self._pieces(bar, sys.maxsize if kind == "transformers" else PIECE))
            for split, encoded in encode_chunks(chunks, kind, folder, options.workers, options.boundaries):
                writers[split].add(encoded)
        return {split: writer.counts for split, writer in writers.items()}

    def _pieces(self, bar: tqdm, size: int) -> Iterator[tuple[str, Piece]]:
        """Yield the pieces of all documents, of at most ``size`` characters, with their split."""
        for split, document in self.source:
            for piece in split_pieces(_with_progress(document.blocks(), bar), size):
                yield split, piece

    def _check_counts(self, kind: str, counts: dict[str, Counter[str]]) -> None:
        """Refuse a split without words, and unknown tokens of a tokenizer that can write any text; report changes."""
        # Each line end counts as a word, so a split without other words is empty.
        has_words = {split: count["words"] > count["lines"] for split, count in counts.items()}
        self.source.check_splits({split: count["documents"] * has_words[split] for split, count in counts.items()})
        for split, count in counts.items():
            if count["changed"]:
                self.say(
                    f"warning: the tokenizer does not restore {count['changed']} of the {count['documents']} documents "
                    f"of {split} byte by byte ({count['unknown']} unknown tokens): bits per byte would be too low"
                )
            if kind == "words" and count["unknown"]:
                self.say(
                    f"warning: {count['unknown']} of the {count['tokens']} tokens of {split} are unknown words: bits "
                    "per byte and perplexity per word would be too low"
                )
            if kind not in _MAY_LACK_BYTES and count["unknown"]:
                problem = f"the {split} split has {count['unknown']} unknown tokens"
                raise UserError(f"{problem}: the vocabulary lacks some bytes")

    def _report_documents(self) -> None:
        """Print whether there were too few documents, and how many were left out."""
        if self.source.available_documents is not None:
            available = self.source.available_documents
            self.say(
                f"all of the text is taken: it has {available} documents of training, not {self.options.documents}"
            )
        if skipped := self.source.skipped():
            self.say("left out: " + ", ".join(f"{count} {reason}" for reason, count in skipped.items()))


def _with_progress(blocks: Iterator[str], bar: tqdm) -> Iterator[str]:
    for block in blocks:
        bar.update(len(block))
        yield block
