"""Tokenizers: byte-exact sentencepiece BPE, GPT-2's BPE and white-space words, all over a fairseq dictionary.

Text is cut into words, and the ids of each different word are computed once. No tokenizer here has pieces across the
end of a word, so the ids of a text are the concatenated ids of its words. For a sentencepiece model this is checked
when it is loaded; the others cut words by definition. The exception are tokenizers of transformers models
(``transformers_tokenizer.py``), which get whole texts.

A symbol has three numbers, which have different names here:

- its **id** counts the whole dictionary, fairseq's four special symbols first;
- its **index** counts the dictionary without these four, so it is the id less ``_FIRST_ID``;
- its **number** is that of the vocabulary from outside: the number of a sentencepiece piece is the index plus
  ``_FIRST_PIECE``, and GPT-2's numbers are the decimal numbers that its dictionary consists of.
"""

import io
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple, Self

import numpy as np
import regex
import sentencepiece

from fairseq_rpe.core.errors import UserError
from fairseq_rpe.data.folder import FAIRSEQ_SPECIALS, read_dictionary
from fairseq_rpe.data.transformers_tokenizer import load_model_codec
from fairseq_rpe.utils.json_files import read_json

MIN_VOCAB_SIZE = 300
BYTES = 256  # the first symbols of a vocabulary are the bytes

BOS, EOS, UNK = (FAIRSEQ_SPECIALS.index(symbol) for symbol in ("<s>", "</s>", "<unk>"))
_FIRST_ID = len(FAIRSEQ_SPECIALS)  # id of the first symbol that is not special
_FIRST_PIECE = 1  # number of the first piece of sentencepiece: piece 0 is its own <unk>
_SPECIALS_BEYOND_PIECES = _FIRST_ID - _FIRST_PIECE
_REMEDY = "make it with fairseq-rpe prepare or prepare-stdlib"
_SPACE = "▁"
_BYTE_SYMBOL = re.compile(r"<0x([0-9A-F]{2})>")
# Reserved text: it looks like a special symbol of fairseq or like a byte piece.
_RESERVED = "<0x[0-9A-Fa-f]{2}>|</s>|<s>|<unk>|<pad>|madeupword[0-9]{4}"
_RESERVED_RUN = re.compile(f"((?:{_RESERVED})+)")  # the group makes re.split return the reserved text too
_RESERVED_STARTS = ("<0x", "</s>", "<s>", "<unk>", "<pad>", "madeupword")
# Unsafe text, which sentencepiece never gets: reserved text; white space that fairseq would cut at (a space is safe,
# sentencepiece writes it as ▁); characters that sentencepiece reserves (▁, ▅); and NUL, which its trainer refuses.
_UNSAFE = re.compile(rf"((?:[^\S ]|[\x00-\x1f▁▅]|{_RESERVED})+)")
# The trainer skips sentences of more than 4192 bytes; a character has at most four.
_TRAINER_CHARACTERS = 1000

# Words of a sentencepiece model. Words may be of any length as long as no piece continues from one word into the next.
# Short words recur more often, so more of them are found in the cache; the shortest kind that suits a model is used.
# Most models have pieces within a run of letters, a run of other signs, or a digit, each with the spaces before it.
# (` *+` keeps all spaces: to try fewer of them is useless, because what follows is no space.)
_BPE_WORD = re.compile(r" *+(?:[^\W\d_]+|\d|(?:[^\w \n]|_)+)| +|\n")
# The same for text in ASCII alone, which has pieces in ASCII alone: whatever the other pieces are, it has short words.
_ASCII_BPE_WORD = re.compile(r" *+(?:[A-Za-z]+|[0-9]|[^A-Za-z0-9 \n]+)| +|\n")
# Scripts that write vowels as marks have pieces of letters and marks, but no piece continues after a space.
_LONG_BPE_WORD = re.compile(r" *[^ \n]+| +|\n")

# GPT-2's words, except that a newline is a word of its own: every line is cut as if it were the whole text.
GPT2_WORD = regex.compile(
    r"""\n|'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|[^\S\n]+(?!\S)|[^\S\n]+"""
)
# Names of the files in a prepared corpus, and the names under which they are published.
_GPT2_FILE_NAMES = {"vocab.json": ("vocab.json", "encoder.json"), "merges.txt": ("merges.txt", "vocab.bpe")}
_GPT2_ADDED = ("madeupword0000", "madeupword0001", "madeupword0002", "<mask>")
_GPT2_NEWLINE = "\u010a"  # a newline in GPT-2's vocabulary

_UINT16_BELOW = 65500  # dictionaries of fewer symbols have 16-bit ids, as in fairseq's best_fitting_int_dtype
_CACHED_WORDS = 1 << 18
_CACHED_LENGTH = 64  # characters of a cached word


def symbol_bytes(symbol: str) -> bytes:
    """Return the bytes of a dictionary symbol; ``</s>`` is a newline and ``<unk>`` is U+FFFD."""
    if symbol in FAIRSEQ_SPECIALS:
        return {"</s>": b"\n", "<unk>": "\N{REPLACEMENT CHARACTER}".encode()}.get(symbol, b"")
    if match := _BYTE_SYMBOL.fullmatch(symbol):
        return bytes.fromhex(match[1])
    return symbol.replace(_SPACE, " ").encode()


def split_reserved(text: str) -> list[str]:
    """Split a text at substrings that look like dictionary symbols: [text, symbols, text, ...] or [text]."""
    # Searching plain strings first is far faster than the regular expression.
    return _RESERVED_RUN.split(text) if any(start in text for start in _RESERVED_STARTS) else [text]


class Tokenizer:
    """Byte-exact sentencepiece BPE.

    Text that must not be read as a dictionary symbol (``</s>``, ...) or that fairseq or sentencepiece would change
    (tabs, ``▁``, ...) is encoded in byte pieces ``<0xNN>``. It is never passed to sentencepiece.

    Args:
        model: Serialised sentencepiece model of :func:`train_tokenizer`.

    Attributes:
        symbols: Symbols of the fairseq dictionary in order, without fairseq's four special symbols.

    Raises:
        UserError: The model is not one of :func:`train_tokenizer`.
    """

    def __init__(self, model: bytes) -> None:
        try:
            self._pieces = sentencepiece.SentencePieceProcessor(model_proto=model)
        except RuntimeError:
            raise UserError(f"the tokenizer is not a sentencepiece model: {_REMEDY}") from None
        numbers = range(_FIRST_PIECE, self._pieces.vocab_size())
        self.symbols: list[str] = [self._pieces.id_to_piece(number) for number in numbers]
        table = [symbol_bytes(symbol) for symbol in self.symbols]
        unsafe = [s for s in self.symbols[BYTES:] if _UNSAFE.search(s.replace(_SPACE, " "))]
        sample = "  def  f(x):  "
        exact = table[:BYTES] == [bytes([number]) for number in range(BYTES)]
        if unsafe or not exact or b"".join(table[index] for index in self.encode(sample)) != sample.encode():
            problem = f"has the piece {unsafe[0]!r}" if exact and unsafe else "does not keep every byte"
            raise UserError(f"the sentencepiece model {problem}: {_REMEDY}")

    @classmethod
    def load(cls, path: Path) -> Self:
        """Load a tokenizer from a file (``spm.model``)."""
        try:
            return cls(path.read_bytes())
        except FileNotFoundError:
            raise UserError(f"{path} does not exist: {_REMEDY}") from None

    def encode(self, text: str) -> list[int]:
        """Return the indices in ``symbols`` of the symbols of a text.

        Raises:
            ValueError: The text has a newline, which is fairseq's end-of-line symbol.
        """
        if "\n" in text:
            raise ValueError("a line to encode contains a newline")
        indices: list[int] = []
        # re.split with a group alternates: safe, unsafe, safe, ...
        for i, segment in enumerate(_UNSAFE.split(text)):
            if i % 2:
                indices += segment.encode()  # a byte is its own index: the first 256 symbols are the bytes
            else:
                indices += (number - _FIRST_PIECE for number in self._pieces.encode(segment, out_type=int))
        return indices


def train_tokenizer(lines: Iterable[str], vocab_size: int) -> bytes:
    """Train a BPE. The same lines give the same model, byte by byte.

    Args:
        lines: Training text, line by line.
        vocab_size: Symbols of the dictionary, the four special symbols and the 256 bytes included.

    Returns:
        The serialised sentencepiece model.

    Raises:
        UserError: The vocabulary is too small for the characters of the text, or too large for the text.
    """
    model = io.BytesIO()
    try:
        sentencepiece.SentencePieceTrainer.train(
            # A list, because Ctrl-C inside a generator that the trainer calls becomes an error of sentencepiece.
            sentence_iterator=iter(list(_trainer_sentences(lines))),
            model_writer=model,
            model_type="bpe",
            vocab_size=vocab_size - _SPECIALS_BEYOND_PIECES,
            normalization_rule_name="identity",
            add_dummy_prefix=False,
            remove_extra_whitespaces=False,
            allow_whitespace_only_pieces=True,
            byte_fallback=True,
            split_digits=True,
            unk_id=0,
            bos_id=-1,
            eos_id=-1,
            pad_id=-1,
            # The number of threads is part of the model, so it must not depend on the machine.
            num_threads=1,
            minloglevel=3,
        )
    except RuntimeError as error:
        raise UserError(_training_error(str(error), vocab_size)) from None
    return model.getvalue()


def _trainer_sentences(lines: Iterable[str]) -> Iterator[str]:
    for line in lines:
        for text in _UNSAFE.split(line)[::2]:
            for start in range(0, len(text), _TRAINER_CHARACTERS):
                yield text[start : start + _TRAINER_CHARACTERS]


def _training_error(message: str, vocab_size: int) -> str:
    if match := re.search(r"too high .*<= (\d+)", message):
        largest = int(match[1]) + _SPECIALS_BEYOND_PIECES
        problem = f"--vocab-size {vocab_size} is too large for this text"
        if largest < MIN_VOCAB_SIZE:
            return f"{problem}, and so is the smallest allowed one, {MIN_VOCAB_SIZE}: give more text"
        return f"{problem}: the largest possible is {largest}"
    if match := re.search(r"required_chars\. \d+ vs (\d+)", message):
        smallest = int(match[1]) + _SPECIALS_BEYOND_PIECES
        return f"--vocab-size {vocab_size} is too small for this text: use {smallest} or more"
    return f"sentencepiece cannot learn from the train split ({message.strip()}): give more text"


def find_gpt2_files(folder: Path) -> dict[str, Path]:
    """Find the files of a GPT-2 vocabulary.

    Args:
        folder: Folder of the vocabulary.

    Returns:
        Paths by the names that the files have in a prepared corpus. ``dict.txt`` is optional.

    Raises:
        UserError: The folder lacks the vocabulary or the merges.
    """
    files = {}
    for name, names in _GPT2_FILE_NAMES.items():
        paths = [folder / n for n in names if (folder / n).is_file()]
        if not paths:
            raise UserError(f"--gpt2 {folder} has no {' or '.join(names)}: put GPT-2's vocabulary there")
        files[name] = paths[0]
    dictionary = folder / "dict.txt"
    return {**files, dictionary.name: dictionary} if dictionary.is_file() else files


def dictionary_symbols(folder: Path) -> list[str]:
    """Return the default dictionary of a GPT-2 vocabulary, without fairseq's four special symbols.

    The symbols are GPT-2's numbers, in decimal and ascending, then three ``madeupword`` and ``<mask>``: with the
    special symbols, GPT-2's 50,257 types become the 50,265 of fairseq's models. A vocabulary with its own ``dict.txt``
    keeps that file instead, and this function is not called.
    """
    return [*map(str, sorted(_read_gpt2_vocabulary(folder).values())), *_GPT2_ADDED]


def _read_gpt2_vocabulary(folder: Path) -> dict[str, int]:
    """Return GPT-2's numbers by symbol; raise UserError if the file is damaged or ``tokenizers`` is not installed."""
    try:
        from tokenizers.pre_tokenizers import ByteLevel
    except ImportError:
        raise UserError("GPT-2's BPE needs the package tokenizers: pip install tokenizers") from None
    path = folder / "vocab.json"
    numbers = read_json(path)
    for symbol, number in numbers.items():
        if type(number) is not int or number < 0:
            raise UserError(f"{path} is not a GPT-2 vocabulary ({symbol[:40]!r} has no number): get it again")
    if missing := sorted(set(ByteLevel.alphabet()) - numbers.keys()):
        raise UserError(f"{path} is not a GPT-2 vocabulary: it lacks the bytes {''.join(missing)[:20]}")
    return numbers


class Gpt2Bpe(NamedTuple):
    """GPT-2's byte-level BPE over a fairseq dictionary.

    Attributes:
        spell: Returns the ids of a word, as :data:`GPT2_WORD` finds it. Raises UserError if merges and vocabulary do
            not match.
        decode: Returns the bytes of ids: ``</s>`` is a newline, and other symbols that are not GPT-2's have no bytes.
            Bytes that are not valid UTF-8, such as a character without its end, become U+FFFD.
    """

    spell: Callable[[str], list[int]]
    decode: Callable[[Sequence[int]], bytes]


def load_gpt2(folder: Path, symbols: Sequence[str]) -> Gpt2Bpe:
    """Load GPT-2's byte-level BPE (Radford et al. 2019) from the package tokenizers.

    Args:
        folder: Folder of the vocabulary.
        symbols: Symbols of the dictionary by id; GPT-2's numbers are decimal numbers among them.

    Raises:
        UserError: The vocabulary is damaged or does not match the dictionary, or the package is missing.
    """
    vocabulary = _read_gpt2_vocabulary(folder)
    import tokenizers
    from tokenizers import decoders, models, pre_tokenizers

    symbol_ids = {symbol: i for i, symbol in enumerate(symbols)}
    lacking = [number for number in vocabulary.values() if str(number) not in symbol_ids]
    if lacking:
        raise UserError(f"{folder}/dict.txt does not match its vocab.json: it has no {lacking[0]}")
    try:
        tokenizer = tokenizers.Tokenizer(models.BPE.from_file(str(folder / "vocab.json"), str(folder / "merges.txt")))
    except Exception as error:  # the library has no error classes of its own
        raise UserError(f"{folder}/merges.txt does not fit its vocab.json ({error}): get both again") from None
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    dictionary_ids = {number: symbol_ids[str(number)] for number in vocabulary.values()}
    gpt2_numbers = {i: number for number, i in dictionary_ids.items()} | {symbol_ids["</s>"]: vocabulary[_GPT2_NEWLINE]}

    def spell(word: str) -> list[int]:
        numbers = tokenizer.encode(word).ids
        if tokenizer.decode(numbers) != word:
            problem = "its vocab.json and merges.txt are not of one vocabulary"
            raise UserError(f"GPT-2's BPE changes {word[:40]!r}: {problem}")
        return [dictionary_ids[number] for number in numbers]

    def decode(ids: Sequence[int]) -> bytes:
        return tokenizer.decode([gpt2_numbers[i] for i in ids if i in gpt2_numbers]).encode()

    return Gpt2Bpe(spell, decode)


class Encoder(dict[str, bytes]):
    """Encodes text; a newline becomes fairseq's end-of-line symbol.

    An encoder is a ``dict`` so that a look-up of a known word runs no Python code. It is a cache from words to
    their ids as bytes, with at most ``_CACHED_WORDS`` words.

    Args:
        types: Number of symbols of fairseq's dictionary, which decides the dtype.
        find: Cuts a text into words; a newline is a word.
        spell: Returns the ids of a word.

    Attributes:
        dtype: Dtype of the ids, ``<u2`` or ``<u4``.
    """

    def __init__(self, types: int, find: Callable[[str], list[str]], spell: Callable[[str], Sequence[int]]) -> None:
        super().__init__()
        self.dtype = "<u2" if types < _UINT16_BELOW else "<u4"
        self._find, self._spell = find, spell

    def __missing__(self, word: str) -> bytes:
        ids = np.array((EOS,) if word == "\n" else self._spell(word), self.dtype).tobytes()
        if len(word) <= _CACHED_LENGTH:
            if len(self) == _CACHED_WORDS:
                self.clear()
            self[word] = ids
        return ids

    def encode(self, text: str) -> np.ndarray:
        """Return the (tokens,) ids of a text."""
        return np.frombuffer(b"".join(map(self.__getitem__, self._find(text))), dtype=self.dtype)

    def restores(self, text: str, ids: np.ndarray) -> bool:
        """Return whether ids (tokens,) of a text decode to it, apart from words that a vocabulary of words lacks."""
        return True


class WholeTextEncoder(Encoder):
    """Encodes whole texts, whose newlines are tokens like others, and compares the decoded text.

    Args:
        types: Number of symbols of fairseq's dictionary, which decides the dtype.
        encode: Returns the ids of a text.
        decode: Returns the text of ids in UTF-8.
    """

    def __init__(
        self, types: int, encode: Callable[[str], np.ndarray], decode: Callable[[Sequence[int]], bytes]
    ) -> None:
        super().__init__(types, lambda text: [text], encode)
        self._decode = decode

    def encode(self, text: str) -> np.ndarray:
        """Return the (tokens,) ids of a text."""
        return np.asarray(self._spell(text), self.dtype)

    def restores(self, text: str, ids: np.ndarray) -> bool:
        """Return whether ids (tokens,) of a text decode to it."""
        return self._decode(ids.tolist()) == text.encode()


def load_encoder(kind: str, folder: Path) -> Encoder:
    """Load the encoder of a prepared corpus.

    Args:
        kind: ``bpe`` (sentencepiece), ``gpt2``, ``words`` or ``transformers``.
        folder: Folder with ``dict.txt`` and the files of the tokenizer.

    Raises:
        UserError: The files do not belong together.
    """
    symbols = read_dictionary(folder / "dict.txt")
    if kind == "transformers":
        return WholeTextEncoder(len(symbols), *load_model_codec(folder, symbols))
    if kind == "words":
        return _words_encoder(symbols)
    if kind == "gpt2":
        return Encoder(len(symbols), GPT2_WORD.findall, load_gpt2(folder, symbols).spell)
    return _bpe_encoder(folder, symbols)


def _words_encoder(symbols: Sequence[str]) -> Encoder:
    # A special symbol in a text is an unknown word; <unk> itself, as WikiText has it, is UNK either way.
    word_ids = {word: i for i, word in enumerate(symbols) if word not in FAIRSEQ_SPECIALS}
    return Encoder(len(symbols), re.compile(r"\n|\S+").findall, lambda word: (word_ids.get(word, UNK),))


def _bpe_encoder(folder: Path, symbols: Sequence[str]) -> Encoder:
    """Load the encoder of a sentencepiece model, after checking that no piece continues from one word into the next."""
    tokenizer = Tokenizer.load(folder / "spm.model")
    if [*FAIRSEQ_SPECIALS, *tokenizer.symbols] != symbols:
        raise UserError(f"{folder}/dict.txt is not of the same corpus as its spm.model: take both from one folder")
    plain = [symbol.replace(_SPACE, " ") for symbol in tokenizer.symbols[BYTES:]]
    find = _word_pattern(plain, _BPE_WORD, _LONG_BPE_WORD)
    find_ascii = _word_pattern([piece for piece in plain if piece.isascii()], _ASCII_BPE_WORD, _LONG_BPE_WORD)
    if find is None or find_ascii is None:
        raise UserError(f"{folder}/spm.model has pieces across words: {_REMEDY}")
    table = [symbol_bytes(symbol) for symbol in tokenizer.symbols]

    def find_words(text: str) -> list[str]:
        findall = (find_ascii if text.isascii() else find).findall
        # Reserved text is kept whole: a pattern would cut </s> into </, s and >, and Tokenizer.encode, which sees a
        # single word, would find nothing reserved in these.
        segments = split_reserved(text)
        if len(segments) == 1:
            return findall(text)
        # re.split with a group alternates: text, reserved symbols, text, ...
        return [word for i, segment in enumerate(segments) for word in ([segment] if i % 2 else findall(segment))]

    def spell(word: str) -> list[int]:
        indices = tokenizer.encode(word)
        if b"".join(map(table.__getitem__, indices)) != word.encode():
            raise UserError(f"the tokenizer changes {word[:40]!r}: use the sentencepiece that this project pins")
        return [index + _FIRST_ID for index in indices]

    return Encoder(len(symbols), find_words, spell)


def _word_pattern(pieces: Sequence[str], *patterns: re.Pattern[str]) -> re.Pattern[str] | None:
    """Return the first pattern for which every piece is a single word, or None.

    With such a pattern no piece continues from one word of a text into the next: where two words meet, a space begins
    or the kind of sign changes (digits meet each other), and a match of the pattern does not contain such a place.
    """
    return next((pattern for pattern in patterns if all(map(pattern.fullmatch, pieces))), None)


def load_decoder(kind: str, folder: Path) -> Callable[[Sequence[int]], bytes]:
    """Load the decoder of a prepared corpus, a function from token ids to bytes.

    Args:
        kind: ``bpe`` (sentencepiece), ``gpt2``, ``transformers``, or ``words``, which decodes to words with a space
            after each.
        folder: Folder with ``dict.txt`` and the files of the tokenizer.
    """
    symbols = read_dictionary(folder / "dict.txt")
    if kind == "gpt2":
        return load_gpt2(folder, symbols).decode
    if kind == "transformers":
        return load_model_codec(folder, symbols)[1]
    table = [symbol_bytes(s) if kind == "bpe" or s in FAIRSEQ_SPECIALS else s.encode() + b" " for s in symbols]
    return lambda ids: b"".join(map(table.__getitem__, ids))


def load_byte_table(kind: str, folder: Path) -> list[bytes]:
    """Return the bytes of each token id of a prepared corpus, to decode a text token by token.

    A character may be divided among several tokens. ``</s>`` is a newline, ``<unk>`` is U+FFFD, and symbols without
    text, such as ``<s>``, have no bytes.

    Args:
        kind: ``bpe`` (sentencepiece) or ``gpt2``.
        folder: Folder with ``dict.txt`` and the files of the tokenizer.

    Raises:
        UserError: The files do not belong together.
    """
    symbols = read_dictionary(folder / "dict.txt")
    if kind == "bpe":
        return [symbol_bytes(symbol) for symbol in symbols]
    load_gpt2(folder, symbols)  # refuses files that do not belong together
    number_bytes = {str(number): _gpt2_bytes(text) for text, number in _read_gpt2_vocabulary(folder).items()}
    specials = {symbol: symbol_bytes(symbol) for symbol in FAIRSEQ_SPECIALS}
    return [specials.get(symbol, number_bytes.get(symbol, b"")) for symbol in symbols]


def _gpt2_bytes(text: str) -> bytes:
    """Return the bytes that GPT-2 writes as the characters of a text.

    A printable byte of Latin-1 is its own character; the other bytes are the characters from U+0100 on, in order.
    """
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    others = [byte for byte in range(BYTES) if byte not in printable]
    return bytes(others[ord(character) - BYTES] if ord(character) >= BYTES else ord(character) for character in text)
