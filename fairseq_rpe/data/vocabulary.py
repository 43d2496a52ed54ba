"""Vocabularies: learned from a stream of text (a sample for sentencepiece, counts for words), or from other folders."""

import hashlib
import sys
from collections import Counter
from collections.abc import Iterable
from itertools import count, islice
from pathlib import Path
from typing import NamedTuple

from fairseq_rpe.core.errors import UserError
from fairseq_rpe.data.folder import (
    FAIRSEQ_SPECIALS,
    check_file_digests,
    read_dictionary,
    read_manifest,
    write_dictionary,
)
from fairseq_rpe.data.stream import split_pieces
from fairseq_rpe.data.tokenization import Tokenizer, find_gpt2_files, train_tokenizer
from fairseq_rpe.data.transformers_tokenizer import MODEL_FILES, find_model_files, load_model_vocabulary

# Files of each kind of tokenizer, in addition to the dictionary.
VOCABULARY_FILES = {
    "bpe": ("spm.model",),
    "gpt2": ("vocab.json", "merges.txt"),
    "words": (),
    "transformers": MODEL_FILES,
}

# The tokenizer "words" is for texts whose rare words are <unk> already; a web crawl has too many different words.
MAX_WORDS = 4_000_000
_SAMPLE_CHARACTERS = 8192  # of a sampled piece of text
_PADDING = 8  # the size of a fairseq dictionary is a multiple of it


class BpeLearner:
    """Learns ``spm.model``, a byte-exact sentencepiece BPE, from pieces of the text that are sampled by their hash.

    The sample depends on the text only. When the sample exceeds ``sample_bytes`` bytes of UTF-8, the limit for hashes
    is halved.

    Args:
        vocab_size: Symbols of the dictionary, special symbols included.
        sample_bytes: Most bytes of the sample in UTF-8; None takes the whole text, in whole lines.
    """

    def __init__(self, vocab_size: int, sample_bytes: int | None) -> None:
        self._vocab_size = vocab_size
        self._max_size = sys.maxsize if sample_bytes is None else sample_bytes
        self._piece_size = sys.maxsize if sample_bytes is None else _SAMPLE_CHARACTERS
        self._hash_limit = 1 << 64
        self._sample: list[tuple[int, bytes]] = []  # hash and text of each piece
        self._size = 0  # bytes of the sample

    def read(self, blocks: Iterable[str]) -> None:
        """Read a document."""
        for piece in split_pieces(blocks, self._piece_size):
            text = piece.text.encode()
            piece_hash = int.from_bytes(hashlib.blake2b(text, digest_size=8).digest(), "big")
            if piece_hash < self._hash_limit:
                self._sample.append((piece_hash, text))
                self._size += len(text)
            while self._size > self._max_size:
                self._hash_limit //= 2
                self._sample = [(number, text) for number, text in self._sample if number < self._hash_limit]
                self._size = sum(len(text) for _, text in self._sample)

    def write(self, folder: Path) -> None:
        """Learn the vocabulary and write ``spm.model`` and ``dict.txt``."""
        model = train_tokenizer(
            (line for _, text in self._sample for line in text.decode().split("\n")), self._vocab_size
        )
        (folder / "spm.model").write_bytes(model)
        write_dictionary(folder / "dict.txt", Tokenizer(model).symbols)


class WordLearner:
    """Counts words between white space; the dictionary has fairseq's order and padding.

    Args:
        vocab_size: Most symbols of the dictionary, special symbols included; None takes all words.
    """

    def __init__(self, vocab_size: int | None) -> None:
        self._vocab_size = vocab_size
        self._counts: Counter[str] = Counter()

    def read(self, blocks: Iterable[str]) -> None:
        """Read a document."""
        for piece in split_pieces(blocks):
            self._counts.update(piece.text.split())
            if len(self._counts) > MAX_WORDS:
                raise UserError(f"the text has more than {MAX_WORDS} different words: use --tokenizer bpe")

    def write(self, folder: Path) -> None:
        """Write ``dict.txt``."""
        for special in FAIRSEQ_SPECIALS:
            del self._counts[special]
        words = sorted(self._counts, key=lambda word: (-self._counts[word], word))
        if self._vocab_size is not None:
            words = words[: self._vocab_size - len(FAIRSEQ_SPECIALS)]
        word_set = set(words)
        unused = (symbol for i in count() if (symbol := f"madeupword{i:04d}") not in word_set)
        num_symbols = len(words) + len(FAIRSEQ_SPECIALS)
        words += islice(unused, -num_symbols % _PADDING)  # up to the next multiple of _PADDING
        write_dictionary(folder / "dict.txt", words)


class VocabularyFiles(NamedTuple):
    """The files of an existing vocabulary.

    Attributes:
        kind: Kind of the tokenizer, a key of ``VOCABULARY_FILES``.
        paths: Path of each file, by its name in a prepared corpus.
    """

    kind: str
    paths: dict[str, Path]


def find_vocabulary(corpus: Path | None, gpt2: Path | None, model: Path | None = None) -> VocabularyFiles | None:
    """Find the files of a vocabulary.

    Args:
        corpus: A prepared corpus, or None.
        gpt2: A folder with GPT-2's vocabulary, or None; ``dict.txt`` is optional there.
        model: A folder of a transformers model with its tokenizer, or None.

    Returns:
        The files, or None if all arguments are None.

    Raises:
        UserError: A file is missing or damaged.
    """
    if gpt2 is not None:
        return VocabularyFiles("gpt2", find_gpt2_files(gpt2))
    if model is not None:
        load_model_vocabulary(model)
        return VocabularyFiles("transformers", find_model_files(model))
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
    check_file_digests(corpus, files)
    return VocabularyFiles(kind, files)
