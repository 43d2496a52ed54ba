"""Pieces of documents to fairseq's binary format: encoded by several processes, written in order, in bounded memory."""

from __future__ import annotations

import multiprocessing
import os
import signal
import struct
import threading
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from fairseq_rpe.core.errors import UserError
from fairseq_rpe.data.binarise import read_split
from fairseq_rpe.data.encoders import EOS, UNK, Encoder, load_encoder, token_bytes
from fairseq_rpe.data.pieces import Piece

if TYPE_CHECKING:
    import numpy as np

_WAITING_PER_WORKER = 4
_COPY = 1 << 18


@dataclass
class Counts:
    """What a part of a corpus has; ``words`` are separated by white space, and each line end is one more."""

    documents: int = 0
    bytes: int = 0
    lines: int = 0
    words: int = 0
    tokens: int = 0
    unknown: int = 0

    def add(self, other: Counts) -> None:
        """Add those of another part."""
        for field in fields(self):
            setattr(self, field.name, getattr(self, field.name) + getattr(other, field.name))


class Encoded(NamedTuple):
    """A chunk of pieces in fairseq's format.

    Attributes:
        ids: of all tokens, in the number type of the dictionary.
        sizes: tokens of each item, (items,) as little-endian int32.
        joins: whether the first item belongs to the last item before this chunk.
        counts: of this chunk.
    """

    ids: bytes
    sizes: bytes
    joins: bool
    counts: Counts


def encode_chunk(encoder: Encoder, pieces: Sequence[Piece]) -> Encoded:
    """Encode pieces of one split.

    A document begins with an item of nothing but a line end, as fairseq's ``--sample-break-mode complete_doc`` knows
    documents apart. An empty line inside a document is in the item of the line before it, so that no other item is
    like that. The writer drops the first of these items: there are as many as gaps between documents.
    """
    import numpy as np

    ids: list[bytes] = []
    sizes: list[np.ndarray] = []
    joins = False
    counts = Counts()
    for piece in pieces:
        tokens = encoder.encode(piece.text)
        items = _item_sizes(tokens)
        blank = bool(len(tokens)) and tokens[0] == EOS
        if piece.first:
            ids.append(np.array([EOS], encoder.dtype).tobytes())
            sizes.append(np.ones(1, "<i4"))
            if blank and len(items) > 1:
                items = np.concatenate(([items[0] + items[1]], items[2:]))
        elif blank and sizes:
            sizes[-1][-1] += items[0]
            items = items[1:]
        elif blank:
            joins = True
        ids.append(tokens.tobytes())
        if len(items):
            sizes.append(items.astype("<i4"))
        content = piece.text.encode()
        lines = content.count(b"\n")
        counts.add(
            Counts(
                documents=int(piece.first),
                bytes=len(content),
                lines=lines,
                words=_count_words(piece.text, content) + lines - piece.in_word,
                tokens=len(tokens) + piece.first,
                unknown=int((tokens == UNK).sum()),
            )
        )
    return Encoded(b"".join(ids), b"".join(s.tobytes() for s in sizes), joins, counts)


def _count_words(text: str, content: bytes) -> int:
    """``len(text.split())``, faster for ASCII, whose bytes ``content`` are."""
    import numpy as np

    if not text.isascii():
        return len(text.split())
    codes = np.frombuffer(content, np.uint8)
    blank = (codes == 32) | ((codes >= 9) & (codes <= 13)) | ((codes >= 28) & (codes <= 31))
    return int((~blank[1:] & blank[:-1]).sum()) + int(len(codes) > 0 and not blank[0])


def _item_sizes(tokens: np.ndarray) -> np.ndarray:
    """Tokens of each line, with those of the empty lines after it; empty lines at the beginning are one item."""
    import numpy as np

    end = tokens == EOS
    ends = np.flatnonzero(end[:-1] & ~end[1:]) + 1
    return np.diff(ends, prepend=0, append=len(tokens)) if len(tokens) else ends


_encoder: Encoder | None = None


def _start_worker(kind: str, folder: Path) -> None:
    global _encoder
    # The parent is told, and it ends this process in its own time; if it is killed, nobody else would.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    threading.Thread(target=_end_with_parent, daemon=True).start()
    _encoder = load_encoder(kind, folder)


def _end_with_parent() -> None:
    parent = multiprocessing.parent_process()
    if parent is not None:
        parent.join()
    os._exit(1)


def _work(pieces: Sequence[Piece]) -> Encoded:
    assert _encoder is not None
    return encode_chunk(_encoder, pieces)


def encode_chunks(
    chunks: Iterable[tuple[str, list[Piece]]], kind: str, folder: Path, workers: int
) -> Iterator[tuple[str, Encoded]]:
    """Encode chunks and give them back in their order, whatever the number of processes.

    Raises:
        UserError: for an unusable tokenizer, and if a process is killed.
    """
    if workers == 1:
        encoder = load_encoder(kind, folder)
        for split, chunk in chunks:
            yield split, encode_chunk(encoder, chunk)
        return
    waiting: deque[tuple[str, Future[Encoded]]] = deque()
    context = multiprocessing.get_context("spawn")
    try:
        with ProcessPoolExecutor(workers, context, _start_worker, (kind, folder)) as pool:
            for split, chunk in chunks:
                waiting.append((split, pool.submit(_work, chunk)))
                if len(waiting) >= workers * _WAITING_PER_WORKER:
                    name, future = waiting.popleft()
                    yield name, future.result()
            for name, future in waiting:
                yield name, future.result()
    except BrokenProcessPool:
        raise UserError("an encoding process was killed, perhaps for its memory: give fewer --workers") from None


class SplitWriter:
    """Writes ``{split}.bin`` and ``{split}.idx`` chunk by chunk; the index of lines is never in memory.

    Args:
        folder: where to write.
        split: name of the split.
        dtype: number type of the ids, ``<u2`` or ``<u4``.
    """

    def __init__(self, folder: Path, split: str, dtype: str) -> None:
        self.counts = Counts()
        self._path = folder / f"{split}.idx"
        self._itemsize = {"<u2": 2, "<u4": 4}[dtype]
        self._bin = open(folder / f"{split}.bin", "wb")
        self._sizes = open(folder / f"{split}.sizes", "wb+")
        self._last = 0

    def add(self, encoded: Encoded) -> None:
        """Append a chunk."""
        import numpy as np

        ids, sizes = encoded.ids, np.frombuffer(encoded.sizes, "<i4")
        self.counts.add(encoded.counts)
        if self._bin.tell() == 0 and not self._last:
            # The boundary before the first document.
            ids, sizes = ids[self._itemsize :], sizes[1:]
            self.counts.tokens -= 1
        self._bin.write(ids)
        if encoded.joins:
            self._last += int(sizes[0])
            sizes = sizes[1:]
        if len(sizes):
            self._flush_last()
            self._sizes.write(sizes[:-1].tobytes())
            self._last = int(sizes[-1])

    def _flush_last(self) -> None:
        if self._last:
            self._sizes.write(struct.pack("<i", self._last))

    def __enter__(self) -> SplitWriter:
        return self

    def __exit__(self, kind: object, *_: object) -> None:
        self._bin.close()
        with self._sizes:
            if kind is None:
                self._write_index()

    def _write_index(self) -> None:
        import numpy as np

        self._flush_last()
        items = self._sizes.tell() // 4
        sizes = self._sizes
        with open(self._path, "wb") as index:
            index.write(b"MMIDIDX\x00\x00" + struct.pack("<QBQ", 1, {2: 8, 4: 9}[self._itemsize], items))
            sizes.seek(0)
            while block := sizes.read(_COPY):
                index.write(block)
            sizes.seek(0)
            address = 0
            while block := sizes.read(_COPY):
                ends = address + np.cumsum(np.frombuffer(block, "<i4"), dtype="<i8") * self._itemsize
                index.write(np.concatenate(([address], ends[:-1])).astype("<i8").tobytes())
                address = int(ends[-1])
        Path(sizes.name).unlink()


def decode_documents(folder: Path, split: str, kind: str) -> list[bytes]:
    """The text of each document of a prepared split, with a newline at its end."""
    table = token_bytes(kind, folder)
    tokens, sizes = read_split(folder, split)
    documents: list[list[bytes]] = [[]]
    start = 0
    for size in sizes.tolist():
        item = tokens[start : start + size]
        start += size
        if size == 1 and item[0] == EOS:
            documents.append([])
        else:
            documents[-1] += map(table.__getitem__, item.tolist())
    return [b"".join(document) for document in documents]
