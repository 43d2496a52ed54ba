"""A byte-exact sentencepiece BPE whose pieces are safe symbols of a fairseq dictionary."""

import io
import re
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Self

import sentencepiece

from fairseq_rpe.core.errors import UserError
from fairseq_rpe.data.folder import FAIRSEQ_SPECIALS

MIN_VOCAB_SIZE = 300
BYTES = 256  # the first symbols of a vocabulary are those of the bytes

# sentencepiece counts its own <unk>, the dictionary the four specials instead.
_SPECIALS_BEYOND_PIECES = len(FAIRSEQ_SPECIALS) - 1
_SPACE = "▁"
_BYTE_SYMBOL = re.compile(r"<0x([0-9A-F]{2})>")
_RESERVED = "<0x[0-9A-Fa-f]{2}>|</s>|<s>|<unk>|<pad>|madeupword[0-9]{4}"
# Text that looks like a symbol of fairseq's or a byte piece; a group, for splitting.
_RESERVED_RUN = re.compile(f"((?:{_RESERVED})+)")
_RESERVED_STARTS = ("<0x", "</s>", "<s>", "<unk>", "<pad>", "madeupword")
# What fairseq would cut at (white space; sentencepiece writes the plain space as ▁) or take for a symbol
# of its own, what sentencepiece reserves (▁, ▅, byte pieces), and what its trainer refuses (NUL).
_UNSAFE = re.compile(rf"((?:[^\S ]|[\x00-\x1f▁▅]|{_RESERVED})+)")
# The trainer skips sentences of more than 4192 bytes; a character has at most four.
_TRAINER_CHARACTERS = 1000


def symbol_bytes(symbol: str) -> bytes:
    """The bytes that a dictionary symbol stands for; ``</s>`` is the line end, ``<unk>`` U+FFFD."""
    if symbol in FAIRSEQ_SPECIALS:
        return {"</s>": b"\n", "<unk>": "\N{REPLACEMENT CHARACTER}".encode()}.get(symbol, b"")
    if match := _BYTE_SYMBOL.fullmatch(symbol):
        return bytes.fromhex(match[1])
    return symbol.replace(_SPACE, " ").encode()


def split_reserved(text: str) -> list[str]:
    """Text, what looks like symbols of a dictionary, text, ...; only the text if there is nothing of the kind."""
    # Finding strings is far faster than the expression.
    return _RESERVED_RUN.split(text) if any(start in text for start in _RESERVED_STARTS) else [text]


class Tokenizer:
    """Cuts text into dictionary symbols that stand for it byte by byte.

    Text that could not be a plain dictionary symbol (tabs and other white space, ``▁``, ``</s>``, ...)
    is spelled in byte pieces ``<0xNN>`` and never shown to sentencepiece.

    ``symbols`` are those of the fairseq dictionary in order, without fairseq's four specials. Raises UserError for a
    serialised sentencepiece model that is not of :func:`train_tokenizer`.
    """

    def __init__(self, model: bytes) -> None:
        try:
            self._pieces = sentencepiece.SentencePieceProcessor(model_proto=model)
        except RuntimeError:
            raise UserError("the tokenizer is not a sentencepiece model: make it with prepare-stdlib") from None
        # sentencepiece has its own <unk> before all symbols.
        self.symbols: list[str] = [self._pieces.id_to_piece(i) for i in range(1, self._pieces.vocab_size())]
        table = [symbol_bytes(symbol) for symbol in self.symbols]
        unsafe = [s for s in self.symbols[BYTES:] if _UNSAFE.search(s.replace(_SPACE, " "))]
        sample = "  def  f(x):  "
        exact = table[:BYTES] == [bytes([number]) for number in range(BYTES)]
        if unsafe or not exact or b"".join(table[place] for place in self.encode(sample)) != sample.encode():
            why = f"has the piece {unsafe[0]!r}" if exact and unsafe else "does not keep every byte"
            raise UserError(f"the sentencepiece model {why}: make the tokenizer with prepare-stdlib")

    @classmethod
    def load(cls, path: Path) -> Self:
        """The tokenizer saved at ``path`` (``spm.model``)."""
        try:
            return cls(path.read_bytes())
        except FileNotFoundError:
            raise UserError(f"{path} does not exist: make it with prepare-stdlib") from None

    def encode(self, text: str) -> list[int]:
        """Positions in ``symbols`` of a text's symbols. ValueError for a newline, the end-of-line symbol in fairseq."""
        if "\n" in text:
            raise ValueError("a line to encode contains a newline")
        places: list[int] = []
        # Splitting with a group alternates: safe, unsafe, safe, ...
        for i, part in enumerate(_UNSAFE.split(text)):
            places += part.encode() if i % 2 else (j - 1 for j in self._pieces.encode(part, out_type=int))
        return places


def train_tokenizer(lines: Iterable[str], vocab_size: int) -> bytes:
    """Train a BPE on all of ``lines``; the same lines give the same bytes, a serialised sentencepiece model.

    ``vocab_size`` counts the four specials and the 256 bytes. Raises UserError if the vocabulary is too small for the
    characters or too large for the text.
    """
    model = io.BytesIO()
    try:
        sentencepiece.SentencePieceTrainer.train(
            # A list, not the generator: an interrupt inside Python code that the trainer calls
            # would come out as an error of sentencepiece.
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
            # The number of threads is written into the model: it must not depend on the machine.
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
