"""Text to token ids with any of the tokenizers: cut into words, each encoded once and then looked up.

No tokenizer here joins across the place where a word ends, so that the ids of a text are the ids of its words in a
row. That is checked for a sentencepiece model when it is loaded, and holds for the others by their definition.
"""

import re
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np

from fairseq_rpe.core.errors import UserError
from fairseq_rpe.data.folder import FAIRSEQ_SPECIALS, read_dictionary
from fairseq_rpe.data.gpt2 import PATTERN, load_gpt2
from fairseq_rpe.data.tokenizer import BYTES, Tokenizer, split_reserved, symbol_bytes

BOS, EOS, UNK = (FAIRSEQ_SPECIALS.index(symbol) for symbol in ("<s>", "</s>", "<unk>"))
# fairseq's best_fitting_int_dtype
_SHORT_BELOW = 65500

# Most pieces of our BPE are inside runs of letters, of other signs, or single digits, each with the spaces before;
# scripts that write vowels as marks have others, but no piece goes on after a space.
_LONG_BPE_WORD = re.compile(r" *[^ \n]+| +|\n")
_BPE_WORD = re.compile(r" *+(?:[^\W\d_]+|\d|(?:[^\w \n]|_)+)| +|\n")
_ASCII_BPE_WORD = re.compile(r" *+(?:[A-Za-z]+|[0-9]|[^A-Za-z0-9 \n]+)| +|\n")

_CACHED_WORDS = 1 << 18
_CACHED_LENGTH = 64


class Encoder(dict[str, bytes]):
    """Token ids of text; a newline is fairseq's end of line.

    The ids of words are kept, so that each is spelled once; never more than ``_CACHED_WORDS`` of them. ``find`` cuts a
    text into words, of which ``\\n`` is one, ``spell`` gives the ids of a word, ``types`` counts all symbols.
    """

    def __init__(self, types: int, find: Callable[[str], list[str]], spell: Callable[[str], Sequence[int]]) -> None:
        super().__init__()
        self.dtype = "<u2" if types < _SHORT_BELOW else "<u4"
        self._find, self._spell = find, spell

    def __missing__(self, word: str) -> bytes:
        ids = np.array((EOS,) if word == "\n" else self._spell(word), self.dtype).tobytes()
        if len(word) <= _CACHED_LENGTH:
            if len(self) == _CACHED_WORDS:
                self.clear()
            self[word] = ids
        return ids

    def encode(self, text: str) -> np.ndarray:
        """(tokens,) ids of ``text``."""
        return np.frombuffer(b"".join(map(self.__getitem__, self._find(text))), dtype=self.dtype)


def load_encoder(kind: str, folder: Path) -> Encoder:
    """The encoder of a prepared corpus, from ``dict.txt`` and the tokenizer's own files in its folder.

    ``kind`` is ``bpe`` (sentencepiece), ``gpt2`` or ``words``. Raises UserError if the files are not of one corpus.
    """
    symbols = read_dictionary(folder / "dict.txt")
    if kind == "words":
        # The names of specials are no words, but for the <unk> of WikiText.
        known = {word: number for number, word in enumerate(symbols) if word not in FAIRSEQ_SPECIALS}
        return Encoder(len(symbols), re.compile(r"\n|\S+").findall, lambda word: (known.get(word, UNK),))
    if kind == "gpt2":
        return Encoder(len(symbols), PATTERN.findall, load_gpt2(folder, symbols)[0])
    tokenizer = Tokenizer.load(folder / "spm.model")
    if [*FAIRSEQ_SPECIALS, *tokenizer.symbols] != symbols:
        raise UserError(f"{folder}/dict.txt is not of the same corpus as its spm.model: take both from one folder")
    plain = [symbol.replace("▁", " ") for symbol in tokenizer.symbols[BYTES:]]
    find = _whole(plain, _BPE_WORD, _LONG_BPE_WORD)
    find_ascii = _whole([piece for piece in plain if piece.isascii()], _ASCII_BPE_WORD, _LONG_BPE_WORD)
    if find is None or find_ascii is None:
        raise UserError(f"{folder}/spm.model has pieces across words: make it with fairseq-rpe prepare")
    table = [symbol_bytes(symbol) for symbol in tokenizer.symbols]

    def words_of(text: str) -> list[str]:
        findall = (find_ascii if text.isascii() else find).findall
        parts = split_reserved(text)
        if len(parts) == 1:
            return findall(text)
        return [word for i, part in enumerate(parts) for word in ([part] if i % 2 else findall(part))]

    def spell(word: str) -> list[int]:
        places = tokenizer.encode(word)
        if b"".join(map(table.__getitem__, places)) != word.encode():
            raise UserError(f"the tokenizer changes {word[:40]!r}: use the sentencepiece that this project pins")
        return [place + len(FAIRSEQ_SPECIALS) for place in places]

    return Encoder(len(symbols), words_of, spell)


def _whole(pieces: Sequence[str], *patterns: re.Pattern[str]) -> re.Pattern[str] | None:
    """The first pattern that takes every piece for one word: then no piece can join two of its words."""
    return next((pattern for pattern in patterns if all(map(pattern.fullmatch, pieces))), None)


def load_decoder(kind: str, folder: Path) -> Callable[[Sequence[int]], bytes]:
    """From token ids of a prepared corpus to their text; a word of the kind ``words`` comes with a space after it."""
    symbols = read_dictionary(folder / "dict.txt")
    if kind == "gpt2":
        return load_gpt2(folder, symbols)[1]
    table = [symbol_bytes(s) if kind == "bpe" or s in FAIRSEQ_SPECIALS else s.encode() + b" " for s in symbols]
    return lambda ids: b"".join(map(table.__getitem__, ids))
