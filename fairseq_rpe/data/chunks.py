"""Documents as pieces of bounded size, cut where no tokenizer notices, several of them to a chunk."""

import re
from collections.abc import Iterable, Iterator
from typing import NamedTuple, TypeVar

PIECE = 1 << 18  # characters

_WORD_START = re.compile(r"(?<=\S) (?=\S)")
_Key = TypeVar("_Key")


class Piece(NamedTuple):
    """A part of a document.

    Attributes:
        text: its characters; the last part of a document ends with a newline.
        first: whether the document begins with it.
        in_word: whether its first word began in the part before.
    """

    text: str
    first: bool = True
    in_word: bool = False


def cut(blocks: Iterable[str], size: int = PIECE) -> Iterator[Piece]:
    """Divide a document into pieces of at most ``size`` characters, after a newline or before a word if there is any.

    A text gets a newline at its end if it has none; without any text there is one empty piece.
    """
    rest, last, first, in_word = "", "\n", True, False
    for block in blocks:
        for start in range(0, len(block), size):
            rest += block[start : start + size]
            last = rest[-1]
            while len(rest) > size:
                at = _place(rest, size)
                yield Piece(rest[:at], first, in_word)
                in_word = not rest[at - 1].isspace() and not rest[at].isspace()
                rest, first = rest[at:], False
    yield Piece(rest if last == "\n" else rest + "\n", first, in_word)


def _place(text: str, size: int) -> int:
    """Where to cut: at least half a piece, at most one."""
    newline = text.rfind("\n", size // 2, size)
    if newline >= 0:
        return newline + 1
    word = _WORD_START.search(text, size // 2, size)
    return word.start() if word else size


def gather(pieces: Iterable[tuple[_Key, Piece]], size: int = PIECE) -> Iterator[tuple[_Key, list[Piece]]]:
    """Chunks of about ``size`` characters, each of pieces of one key; the order within a key is kept."""
    chunks: dict[_Key, list[Piece]] = {}
    sizes: dict[_Key, int] = {}
    for key, piece in pieces:
        chunks.setdefault(key, []).append(piece)
        sizes[key] = sizes.get(key, 0) + len(piece.text)
        if sizes[key] >= size:
            yield key, chunks.pop(key)
            sizes[key] = 0
    yield from chunks.items()
