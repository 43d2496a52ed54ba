"""Documents as pieces of bounded size, cut where no tokenizer notices, several of them to a chunk."""

import re
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator
from typing import NamedTuple

PIECE = 1 << 18  # characters

_WORD_START = re.compile(r"(?<=\S) (?=\S)")


class Piece(NamedTuple):
    """A part of a document."""

    text: str  # the last part of a document ends with a newline
    first: bool = True  # whether the document begins with it
    in_word: bool = False  # whether its first word began in the part before


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
                # At least half a piece, at most one.
                at = rest.rfind("\n", size // 2, size) + 1
                if not at:
                    word = _WORD_START.search(rest, size // 2, size)
                    at = word.start() if word else size
                yield Piece(rest[:at], first, in_word)
                in_word = not rest[at - 1].isspace() and not rest[at].isspace()
                rest, first = rest[at:], False
    yield Piece(rest if last == "\n" else rest + "\n", first, in_word)


def gather(pieces: Iterable[tuple[str, Piece]], size: int = PIECE) -> Iterator[tuple[str, list[Piece]]]:
    """Chunks of about ``size`` characters, each of pieces of one split; the order within a split is kept."""
    chunks: defaultdict[str, list[Piece]] = defaultdict(list)
    sizes = Counter[str]()
    for split, piece in pieces:
        chunks[split].append(piece)
        sizes[split] += len(piece.text)
        if sizes[split] >= size:
            yield split, chunks.pop(split)
            del sizes[split]
    yield from chunks.items()
