"""Text to token ids and back, token by token: prompts are encoded, and generated tokens become text as they come."""

import codecs
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from fairseq_rpe.core.errors import UserError, shorten_path
from fairseq_rpe.core.spec import did_you_mean
from fairseq_rpe.data.folder import FAIRSEQ_SPECIALS, read_dictionary
from fairseq_rpe.data.tokenization import EOS, UNK, load_byte_table, load_encoder
from fairseq_rpe.data.transformers_tokenizer import load_model_codec

_SHOWN_SYMBOLS = 12  # in a message
_CONTEXT_TOKENS = 4  # tokens of a prompt that a decoder of a transformers model sees
_INCOMPLETE = "\N{REPLACEMENT CHARACTER}".encode()


class TokenDecoder(Protocol):
    """Decodes the tokens that continue a prompt, one after the other."""

    def add(self, token: int) -> bytes:
        """Return the bytes that the next token adds."""
        ...

    def finish(self) -> bytes:
        """Return the bytes that were not certain before the last token."""
        ...


class TextCodec(Protocol):
    """Encodes prompts and decodes what continues them.

    Attributes:
        separator: text between a prompt and its continuation.
        has_newline_symbol: whether ``</s>`` is a newline, which a text may have; otherwise it ends the text.
    """

    separator: str
    has_newline_symbol: bool

    def encode(self, text: str) -> list[int]:
        """Return the token ids of a text."""
        ...

    def decoder(self, prompt: Sequence[int]) -> TokenDecoder:
        """Return a decoder of the tokens after a prompt."""
        ...


class BpeCodec:
    """The byte-exact tokenizers of prepared corpora, sentencepiece's BPE and GPT-2's.

    Args:
        kind: ``bpe`` or ``gpt2``.
        folder: folder with ``dict.txt`` and the files of the tokenizer.

    Raises:
        UserError: the files do not belong together.
    """

    separator, has_newline_symbol = "", True

    def __init__(self, kind: str, folder: Path) -> None:
        self._encoder, self._table = load_encoder(kind, folder), load_byte_table(kind, folder)

    def encode(self, text: str) -> list[int]:
        """Return the token ids of a text."""
        return list(map(int, self._encoder.encode(text)))

    def decoder(self, prompt: Sequence[int]) -> TokenDecoder:
        """Return a decoder, which does not depend on the prompt."""
        return _TableDecoder(self._table)


@dataclass(frozen=True)
class _TableDecoder:
    """Looks up the bytes of a token in a table."""

    table: Sequence[bytes]

    def add(self, token: int) -> bytes:
        return self.table[token]

    def finish(self) -> bytes:
        return b""


class SymbolCodec:
    """Symbols of a dictionary between white space: generated tasks, and corpora of words.

    Args:
        symbols: symbols of the dictionary by id, fairseq's four special ones first.
        is_closed: whether every symbol of a prompt must be in the dictionary, as for a generated task. Otherwise an
            unknown word is ``<unk>``, and a newline is ``</s>``.
    """

    separator = " "

    def __init__(self, symbols: Sequence[str], is_closed: bool) -> None:
        self._symbols, self._is_closed, self.has_newline_symbol = list(symbols), is_closed, not is_closed
        self._ids = {symbol: i for i, symbol in enumerate(symbols) if symbol not in FAIRSEQ_SPECIALS}

    def encode(self, text: str) -> list[int]:
        """Return the token ids of a text.

        Raises:
            UserError: a symbol is not in a closed vocabulary.
        """
        if self._is_closed:
            return [self._symbol_id(symbol) for symbol in text.split()]
        lines = [[self._ids.get(word, UNK) for word in line.split()] for line in text.split("\n")]
        return [token for n, line in enumerate(lines) for token in ([EOS, *line] if n else line)]

    def _symbol_id(self, symbol: str) -> int:
        if symbol not in self._ids:
            shown = ", ".join(list(self._ids)[:_SHOWN_SYMBOLS]) + (", …" if len(self._ids) > _SHOWN_SYMBOLS else "")
            near = did_you_mean(symbol, self._ids)
            raise UserError(
                f"'{shorten_path(symbol, 40)}' is not a symbol of this model's task{near}: separate symbols by "
                f"blanks; there are {shown}"
            )
        return self._ids[symbol]

    def decoder(self, prompt: Sequence[int]) -> TokenDecoder:
        """Return a decoder, which does not depend on the prompt."""
        return _SymbolDecoder(self._symbols)


class _SymbolDecoder:
    """Writes symbols with a blank between two of a line.

    Args:
        symbols: symbols of the dictionary by id.
    """

    def __init__(self, symbols: Sequence[str]) -> None:
        self._symbols, self._begins_line = symbols, True

    def add(self, token: int) -> bytes:
        blank = "" if self._begins_line or token == EOS else " "
        self._begins_line = token == EOS
        return b"\n" if token == EOS else f"{blank}{self._symbols[token]}".encode()

    def finish(self) -> bytes:
        return b""


class ModelCodec:
    """The tokenizer of a transformers model, whose ``</s>`` stands for the token that begins a text.

    Args:
        folder: folder with ``dict.txt`` and the files of the tokenizer.

    Raises:
        UserError: the files do not belong together.
    """

    separator, has_newline_symbol = "", False

    def __init__(self, folder: Path) -> None:
        self._encode, self._decode = load_model_codec(folder, read_dictionary(folder / "dict.txt"))

    def encode(self, text: str) -> list[int]:
        """Return the token ids of a text."""
        return list(map(int, self._encode(text)))

    def decoder(self, prompt: Sequence[int]) -> TokenDecoder:
        """Return a decoder; the last tokens of the prompt decide about a blank before the first new token."""
        return _DifferenceDecoder(self._decode, prompt[-_CONTEXT_TOKENS:])


class _DifferenceDecoder:
    """Decodes by the difference of two texts: of a few tokens before the new one, and of these tokens with it.

    A tokenizer of transformers has no table of bytes: its decoder may depend on neighbours, and writes an incomplete
    character as U+FFFD. Such a text waits for the next token.

    Args:
        decode: returns the text of tokens in UTF-8.
        context: tokens before the first new one.
    """

    def __init__(self, decode: Callable[[Sequence[int]], bytes], context: Sequence[int]) -> None:
        self._decode, self._tokens = decode, list(context)
        self._start, self._certain = 0, len(context)  # tokens whose text is compared, and those that were returned

    def add(self, token: int) -> bytes:
        self._tokens.append(token)
        text = self._difference()
        if text.endswith(_INCOMPLETE):
            return b""
        self._start, self._certain = self._certain, len(self._tokens)
        return text

    def finish(self) -> bytes:
        text = self._difference()
        self._certain = len(self._tokens)
        return text

    def _difference(self) -> bytes:
        before = self._decode(self._tokens[self._start : self._certain])
        return self._decode(self._tokens[self._start :])[len(before) :]


class IncrementalText:
    """Text of generated bytes, which ends before the first stop string.

    Text is certain, and may be shown, when neither a stop string nor the rest of a character can change it any more.

    Args:
        stops: stop strings, none of them empty.

    Attributes:
        text: certain text so far.
        is_stopped: whether a stop string ended the text.
    """

    def __init__(self, stops: Sequence[str] = ()) -> None:
        self._stops = [stop.encode() for stop in stops]
        self._pending = b""  # bytes that are not certain yet
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
        self.text, self.is_stopped = "", False

    def append(self, data: bytes) -> str:
        """Append bytes and return the text that became certain.

        Args:
            data: bytes of the next token; none may follow after a stop string.
        """
        self._pending += data
        ends = [index for stop in self._stops if (index := self._pending.find(stop)) >= 0]
        if ends:
            self._pending, self.is_stopped = self._pending[: min(ends)], True
            return self.finish()
        certain = len(self._pending) - self._possible_stop()
        data, self._pending = self._pending[:certain], self._pending[certain:]
        return self._decode(data, final=False)

    def finish(self) -> str:
        """Return the remaining text; an incomplete character becomes U+FFFD."""
        data, self._pending = self._pending, b""
        return self._decode(data, final=True)

    def _possible_stop(self) -> int:
        """Return the number of pending bytes at the end with which a stop string may begin."""
        longest = max(map(len, self._stops), default=0) - 1
        for size in range(min(longest, len(self._pending)), 0, -1):
            tail = self._pending[-size:]
            if any(stop.startswith(tail) for stop in self._stops):
                return size
        return 0

    def _decode(self, data: bytes, final: bool) -> str:
        text = self._decoder.decode(data, final)
        self.text += text
        return text


def load_codec(kind: str, folder: Path) -> TextCodec:
    """Load the codec of a prepared folder.

    Args:
        kind: kind of the tokenizer: ``bpe``, ``gpt2``, ``words`` or ``transformers``.
        folder: folder with ``dict.txt`` and the files of the tokenizer.

    Raises:
        UserError: the files do not belong together.
    """
    if kind == "words":
        return SymbolCodec(read_dictionary(folder / "dict.txt"), is_closed=False)
    return ModelCodec(folder) if kind == "transformers" else BpeCodec(kind, folder)
