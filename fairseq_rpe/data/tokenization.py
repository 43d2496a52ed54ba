"""Tokenizers: byte-exact sentencepiece BPE, GPT-2's BPE and white-space words, all over a fairseq dictionary.

Text is cut into words, and the ids of each different word are computed once. No tokenizer here has pieces across the
end of a word, so the ids of a text are the concatenated ids of its words. For a sentencepiece model this is checked
when it is loaded; the others cut words by definition.
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
from fairseq_rpe.utils.json_files import read_json

MIN_VOCAB_SIZE = 300
BYTES = 256  # the first symbols of a vocabulary are the bytes

# sentencepiece counts its own <unk>, the dictionary counts four special symbols instead.
_SPECIALS_BEYOND_PIECES = len(FAIRSEQ_SPECIALS) - 1
_SPACE = "▁"
_BYTE_SYMBOL = re.compile(r"<0x([0-9A-F]{2})>")
_RESERVED = "<0x[0-9A-Fa-f]{2}>|</s>|<s>|<unk>|<pad>|madeupword[0-9]{4}"
# Text that looks like a symbol of fairseq or a byte piece. The group makes re.split return it too.
_RESERVED_RUN = re.compile(f"((?:{_RESERVED})+)")
_RESERVED_STARTS = ("<0x", "</s>", "<s>", "<unk>", "<pad>", "madeupword")
# Text that fairseq would cut at (white space; sentencepiece writes a space as ▁) or take for a special symbol,
# characters that sentencepiece reserves (▁, ▅, byte pieces), and NUL, which its trainer refuses.
_UNSAFE = re.compile(rf"((?:[^\S ]|[\x00-\x1f▁▅]|{_RESERVED})+)")
# The trainer skips sentences of more than 4192 bytes; a character has at most four.
_TRAINER_CHARACTERS = 1000


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

    Text that cannot be a dictionary symbol (tabs and other white space, ``▁``, ``</s>``, ...) is encoded in byte pieces
    ``<0xNN>`` and never passed to sentencepiece.

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
            raise UserError("the tokenizer is not a sentencepiece model: make it with prepare-stdlib") from None
        # Piece 0 is the <unk> of sentencepiece.
        self.symbols: list[str] = [self._pieces.id_to_piece(i) for i in range(1, self._pieces.vocab_size())]
        table = [symbol_bytes(symbol) for symbol in self.symbols]
        unsafe = [s for s in self.symbols[BYTES:] if _UNSAFE.search(s.replace(_SPACE, " "))]
        sample = "  def  f(x):  "
        exact = table[:BYTES] == [bytes([number]) for number in range(BYTES)]
        if unsafe or not exact or b"".join(table[index] for index in self.encode(sample)) != sample.encode():
            problem = f"has the piece {unsafe[0]!r}" if exact and unsafe else "does not keep every byte"
            raise UserError(f"the sentencepiece model {problem}: make the tokenizer with prepare-stdlib")

    @classmethod
    def load(cls, path: Path) -> Self:
        """Load a tokenizer from a file (``spm.model``)."""
        try:
            return cls(path.read_bytes())
        except FileNotFoundError:
            raise UserError(f"{path} does not exist: make it with prepare-stdlib") from None

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
            indices += segment.encode() if i % 2 else (j - 1 for j in self._pieces.encode(segment, out_type=int))
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


# GPT-2's pattern, except that a newline is a word of its own: every line is cut as if it were the whole text.
PATTERN = regex.compile(r"""\n|'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|[^\S\n]+(?!\S)|[^\S\n]+""")
_GPT2_FILE_NAMES = {"vocab.json": ("vocab.json", "encoder.json"), "merges.txt": ("merges.txt", "vocab.bpe")}
_ADDED = ("madeupword0000", "madeupword0001", "madeupword0002", "<mask>")
_NEWLINE = "\u010a"  # a newline in GPT-2's vocabulary


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
    """Return the dictionary of a GPT-2 vocabulary, in the order of its ids, without fairseq's four special symbols.

    The symbols are GPT-2's ids as decimal numbers, three ``madeupword`` and ``<mask>``: with the special symbols,
    GPT-2's 50,257 types become the 50,265 of fairseq's models. A ``dict.txt`` in the folder replaces this order.
    """
    return [*map(str, sorted(_read_gpt2_vocabulary(folder).values())), *_ADDED]


def _read_gpt2_vocabulary(folder: Path) -> dict[str, int]:
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
        spell: Returns the ids of a word, as :data:`PATTERN` finds it. Raises UserError if merges and vocabulary do not
            match.
        decode: Returns the bytes of ids.
    """

    spell: Callable[[str], list[int]]
    decode: Callable[[Sequence[int]], bytes]


def load_gpt2(folder: Path, symbols: Sequence[str]) -> Gpt2Bpe:
    """Load GPT-2's byte-level BPE (Radford et al. 2019) from the package tokenizers.

    Args:
        folder: Folder of the vocabulary.
        symbols: Symbols of the dictionary; GPT-2's ids are decimal numbers among them.

    Raises:
        UserError: The vocabulary is damaged or does not match the dictionary, or the package is missing.
    """
    vocabulary = _read_gpt2_vocabulary(folder)
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    symbol_ids = {symbol: i for i, symbol in enumerate(symbols)}
    lacking = [number for number in vocabulary.values() if str(number) not in symbol_ids]
    if lacking:
        raise UserError(f"{folder}/dict.txt does not match its vocab.json: it has no {lacking[0]}")
    try:
        tokenizer = Tokenizer(models.BPE.from_file(str(folder / "vocab.json"), str(folder / "merges.txt")))
    except Exception as error:  # the library has no error classes of its own
        raise UserError(f"{folder}/merges.txt does not fit its vocab.json ({error}): get both again") from None
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    # From GPT-2's ids to ids of the dictionary, and back.
    dictionary_ids = {number: symbol_ids[str(number)] for number in vocabulary.values()}
    gpt2_ids = {i: number for number, i in dictionary_ids.items()} | {symbol_ids["</s>"]: vocabulary[_NEWLINE]}

    def spell(word: str) -> list[int]:
        numbers = tokenizer.encode(word).ids
        if tokenizer.decode(numbers) != word:
            problem = "its vocab.json and merges.txt are not of one vocabulary"
            raise UserError(f"GPT-2's BPE changes {word[:40]!r}: {problem}")
        return [dictionary_ids[number] for number in numbers]

    def decode(ids: Sequence[int]) -> bytes:
        return tokenizer.decode([gpt2_ids[i] for i in ids if i in gpt2_ids]).encode()

    return Gpt2Bpe(spell, decode)


BOS, EOS, UNK = (FAIRSEQ_SPECIALS.index(symbol) for symbol in ("<s>", "</s>", "<unk>"))
_UINT16_BELOW = 65500  # symbols; as fairseq's best_fitting_int_dtype

# Most BPE pieces lie within a run of letters, a run of other signs, or a digit, each with the spaces before it.
# Scripts that write vowels as marks have longer pieces, but no piece continues after a space.
_LONG_BPE_WORD = re.compile(r" *[^ \n]+| +|\n")
_BPE_WORD = re.compile(r" *+(?:[^\W\d_]+|\d|(?:[^\w \n]|_)+)| +|\n")
_ASCII_BPE_WORD = re.compile(r" *+(?:[A-Za-z]+|[0-9]|[^A-Za-z0-9 \n]+)| +|\n")

_CACHED_WORDS = 1 << 18
_CACHED_LENGTH = 64  # characters of a cached word


class Encoder(dict[str, bytes]):
    """Encodes text; a newline becomes fairseq's end-of-line symbol.

    The dictionary itself is a cache from words to their ids as bytes, with at most ``_CACHED_WORDS`` words.

    Args:
        types: Number of symbols of the dictionary, which decides the dtype.
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


def load_encoder(kind: str, folder: Path) -> Encoder:
    """Load the encoder of a prepared corpus.

    Args:
        kind: ``bpe`` (sentencepiece), ``gpt2`` or ``words``.
        folder: Folder with ``dict.txt`` and the files of the tokenizer.

    Raises:
        UserError: The files do not belong together.
    """
    symbols = read_dictionary(folder / "dict.txt")
    if kind == "words":
        return _words_encoder(symbols)
    if kind == "gpt2":
        return Encoder(len(symbols), PATTERN.findall, load_gpt2(folder, symbols).spell)
    return _bpe_encoder(folder, symbols)


def _words_encoder(symbols: Sequence[str]) -> Encoder:
    # A special symbol in a text is an unknown word; <unk> itself, as WikiText has it, is UNK either way.
    word_ids = {word: i for i, word in enumerate(symbols) if word not in FAIRSEQ_SPECIALS}
    return Encoder(len(symbols), re.compile(r"\n|\S+").findall, lambda word: (word_ids.get(word, UNK),))


def _bpe_encoder(folder: Path, symbols: Sequence[str]) -> Encoder:
    """Load the encoder of a sentencepiece model, after checking that no piece joins two words."""
    tokenizer = Tokenizer.load(folder / "spm.model")
    if [*FAIRSEQ_SPECIALS, *tokenizer.symbols] != symbols:
        raise UserError(f"{folder}/dict.txt is not of the same corpus as its spm.model: take both from one folder")
    plain = [symbol.replace("▁", " ") for symbol in tokenizer.symbols[BYTES:]]
    find = _word_pattern(plain, _BPE_WORD, _LONG_BPE_WORD)
    find_ascii = _word_pattern([piece for piece in plain if piece.isascii()], _ASCII_BPE_WORD, _LONG_BPE_WORD)
    if find is None or find_ascii is None:
        raise UserError(f"{folder}/spm.model has pieces across words: make it with fairseq-rpe prepare")
    table = [symbol_bytes(symbol) for symbol in tokenizer.symbols]

    def find_words(text: str) -> list[str]:
        findall = (find_ascii if text.isascii() else find).findall
        segments = split_reserved(text)
        if len(segments) == 1:
            return findall(text)
        # re.split with a group alternates: text, reserved symbols, text, ...
        return [word for i, segment in enumerate(segments) for word in ([segment] if i % 2 else findall(segment))]

    def spell(word: str) -> list[int]:
        indices = tokenizer.encode(word)
        if b"".join(map(table.__getitem__, indices)) != word.encode():
            raise UserError(f"the tokenizer changes {word[:40]!r}: use the sentencepiece that this project pins")
        return [i + len(FAIRSEQ_SPECIALS) for i in indices]

    return Encoder(len(symbols), find_words, spell)


def _word_pattern(pieces: Sequence[str], *patterns: re.Pattern[str]) -> re.Pattern[str] | None:
    """Return the first pattern for which every piece is a single word, so that no piece joins two words."""
    return next((pattern for pattern in patterns if all(map(pattern.fullmatch, pieces))), None)


def load_decoder(kind: str, folder: Path) -> Callable[[Sequence[int]], bytes]:
    """Load the decoder of a prepared corpus, a function from token ids to bytes.

    Args:
        kind: ``bpe`` (sentencepiece), ``gpt2`` or ``words``; decoded words have a space after each word.
        folder: Folder with ``dict.txt`` and the files of the tokenizer.
    """
    symbols = read_dictionary(folder / "dict.txt")
    if kind == "gpt2":
        return load_gpt2(folder, symbols).decode
    table = [symbol_bytes(s) if kind == "bpe" or s in FAIRSEQ_SPECIALS else s.encode() + b" " for s in symbols]
    return lambda ids: b"".join(map(table.__getitem__, ids))
