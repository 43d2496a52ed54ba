"""Vocabularies: learned from a stream of text (a sample for sentencepiece, counts for whole words) or given."""

import hashlib
import sys
from collections import Counter
from collections.abc import Iterable
from itertools import count, islice
from pathlib import Path

from fairseq_rpe.core.errors import UserError
from fairseq_rpe.data.folder import FAIRSEQ_SPECIALS, check_as_made, read_dictionary, read_manifest, write_dictionary
from fairseq_rpe.data.gpt2 import find_files
from fairseq_rpe.data.stream import cut
from fairseq_rpe.data.tokenizer import Tokenizer, train_tokenizer

# The files of each kind of tokenizer beside its dictionary.
VOCABULARY_FILES = {"bpe": ("spm.model",), "gpt2": ("vocab.json", "merges.txt"), "words": ()}

# Whole words are for texts whose rare words are <unk> already; a web crawl has no end of them.
MOST_WORDS = 4_000_000
_PART = 8192
_PADDING = 8


class BpeLearner:
    """Learns ``spm.model``, a byte-exact sentencepiece BPE, from parts of the text that a hash of each part chooses.

    The choice depends on the text alone. Whenever the parts are more than ``sample_bytes`` characters, half of all
    hashes drop out; ``None`` takes all, by whole lines. ``vocab_size`` counts the specials, too.
    """

    def __init__(self, vocab_size: int, sample_bytes: int | None) -> None:
        self._vocab_size = vocab_size
        self._room, self._part = (sys.maxsize, sys.maxsize) if sample_bytes is None else (sample_bytes, _PART)
        self._limit = 1 << 64
        self._parts: list[tuple[int, str]] = []
        self._size = 0

    def read(self, blocks: Iterable[str]) -> None:
        for piece in cut(blocks, self._part):
            number = int.from_bytes(hashlib.blake2b(piece.text.encode(), digest_size=8).digest(), "big")
            if number < self._limit:
                self._parts.append((number, piece.text))
                self._size += len(piece.text)
            while self._size > self._room:
                self._limit //= 2
                self._parts = [part for part in self._parts if part[0] < self._limit]
                self._size = sum(len(text) for _, text in self._parts)

    def write(self, folder: Path) -> None:
        model = train_tokenizer((line for _, text in self._parts for line in text.split("\n")), self._vocab_size)
        (folder / "spm.model").write_bytes(model)
        write_dictionary(folder / "dict.txt", Tokenizer(model).symbols)


class WordLearner:
    """Counts words between white space; the dictionary is in fairseq's order and padded as fairseq pads it.

    It has the ``vocab_size`` most frequent words, specials and padding included; with ``None`` all.
    """

    def __init__(self, vocab_size: int | None) -> None:
        self._vocab_size = vocab_size
        self._counts: Counter[str] = Counter()

    def read(self, blocks: Iterable[str]) -> None:
        for piece in cut(blocks):
            self._counts.update(piece.text.split())
            if len(self._counts) > MOST_WORDS:
                raise UserError(f"the text has more than {MOST_WORDS} different words: use --tokenizer bpe")

    def write(self, folder: Path) -> None:
        for special in FAIRSEQ_SPECIALS:
            del self._counts[special]
        words = sorted(self._counts, key=lambda word: (-self._counts[word], word))
        if self._vocab_size is not None:
            words = words[: self._vocab_size - len(FAIRSEQ_SPECIALS)]
        known = set(words)
        unused = (symbol for i in count() if (symbol := f"madeupword{i:04d}") not in known)
        words += islice(unused, -(len(words) + len(FAIRSEQ_SPECIALS)) % _PADDING)
        write_dictionary(folder / "dict.txt", words)


# The kind of its tokenizer, a key of VOCABULARY_FILES, and where each file comes from.
Given = tuple[str, dict[str, Path]]


def given_vocabulary(corpus: Path | None, gpt2: Path | None) -> Given | None:
    """The vocabulary of a prepared corpus, or of a folder with GPT-2's.

    ``None`` if neither is named. GPT-2's may come without ``dict.txt``; where other files are missing it is refused.
    """
    if gpt2 is not None:
        return "gpt2", find_files(gpt2)
    if corpus is None:
        return None
    manifest = read_manifest(corpus)
    if not manifest:
        raise UserError(f"--vocab-from {corpus} is not a prepared corpus: name a folder made by fairseq-rpe prepare")
    kind = manifest.get("tokenizer", {}).get("kind", "bpe")
    files = {name: corpus / name for name in ("dict.txt", *VOCABULARY_FILES[kind])}
    for name, path in files.items():
        if not path.is_file():
            raise UserError(f"--vocab-from {corpus} has no {name}: prepare it again")
    read_dictionary(files["dict.txt"])
    check_as_made(corpus, files)
    return kind, files
