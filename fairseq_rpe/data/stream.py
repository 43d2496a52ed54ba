"""Pieces of documents to fairseq's binary format: encoded by several processes, written in order, in bounded memory."""

from __future__ import annotations

import multiprocessing
import os
import signal
import threading
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass, fields
from pathlib import Path
from typing import NamedTuple

import numpy as np

from fairseq_rpe.core.errors import UserError
from fairseq_rpe.data.chunks import Piece
from fairseq_rpe.data.encoders import EOS, UNK, Encoder, load_decoder, load_encoder
from fairseq_rpe.data.folder import read_manifest, read_split, write_index

_WAITING_PER_WORKER = 4


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
        ids: of all tokens, (tokens,), in the number type of the dictionary.
        sizes: tokens of each item, (items,).
        joins: whether the first item, of empty lines, belongs to the last item before this chunk.
        counts: of this chunk.
    """

    ids: np.ndarray
    sizes: np.ndarray
    joins: bool
    counts: Counts


def encode_chunk(encoder: Encoder, pieces: Sequence[Piece], boundaries: bool = True) -> Encoded:
    """Encode pieces of one split.

    With boundaries, a document begins with an item of nothing but a line end, as fairseq's ``--sample-break-mode
    complete_doc`` knows documents apart. An empty line inside a document is in the item of the line before it, so that
    no other item is like that. The writer drops the first of these items: there are as many as gaps between documents.
    Without, each line is an item, as ``fairseq-preprocess`` has it.
    """
    ids, sizes = [np.zeros(0, encoder.dtype)], [np.zeros(0, "<i4")]
    joins = unfinished = False
    counts = Counts()
    for piece in pieces:
        tokens = encoder.encode(piece.text)
        items = _item_sizes(tokens, boundaries)
        blank = bool(len(tokens)) and tokens[0] == EOS
        if boundaries and piece.first:
            ids.append(np.array([EOS], encoder.dtype))
            sizes.append(np.ones(1, "<i4"))
            if blank and len(items) > 1:
                items = np.concatenate(([items[0] + items[1]], items[2:]))
        elif (boundaries and blank and len(sizes[-1])) or unfinished:
            sizes[-1][-1] += items[:1].sum()
            items = items[1:]
        elif boundaries and blank:
            joins = True
        if len(items):
            sizes.append(items.astype("<i4"))
        unfinished = not boundaries and bool(tokens[-1] != EOS if len(tokens) else unfinished)
        ids.append(tokens)
        content = piece.text.encode()
        lines = content.count(b"\n")
        counts.add(
            Counts(
                documents=int(piece.first),
                bytes=len(content),
                lines=lines,
                words=_count_words(piece.text, content) + lines - piece.in_word,
                tokens=len(tokens) + (boundaries and piece.first),
                unknown=int((tokens == UNK).sum()),
            )
        )
    return Encoded(np.concatenate(ids), np.concatenate(sizes), joins, counts)


def _count_words(text: str, content: bytes) -> int:
    """``len(text.split())``, faster for ASCII, whose bytes ``content`` are."""
    if not text.isascii():
        return len(text.split())
    codes = np.frombuffer(content, np.uint8)
    blank = (codes == 32) | ((codes >= 9) & (codes <= 13)) | ((codes >= 28) & (codes <= 31))
    return int((~blank[1:] & blank[:-1]).sum()) + int(len(codes) > 0 and not blank[0])


def _item_sizes(tokens: np.ndarray, boundaries: bool) -> np.ndarray:
    """Tokens of each line; with boundaries, empty lines are part of the line before, or one item at the beginning."""
    if not len(tokens):
        return np.zeros(0, np.int64)
    ended = tokens[:-1] == EOS
    if boundaries:
        ended &= tokens[1:] != EOS
    return np.diff(np.flatnonzero(ended) + 1, prepend=0, append=len(tokens))


_encoder: Encoder | None = None
_boundaries = True


def _start_worker(kind: str, folder: Path, boundaries: bool) -> None:
    global _encoder, _boundaries
    # The parent is told, and it ends this process in its own time; if it is killed, nobody else would.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    threading.Thread(target=_end_with_parent, daemon=True).start()
    _encoder, _boundaries = load_encoder(kind, folder), boundaries


def _end_with_parent() -> None:
    parent = multiprocessing.parent_process()
    if parent is not None:
        parent.join()
    os._exit(1)


def _work(pieces: Sequence[Piece]) -> Encoded:
    assert _encoder is not None
    return encode_chunk(_encoder, pieces, _boundaries)


def encode_chunks(
    chunks: Iterable[tuple[str, list[Piece]]], kind: str, folder: Path, workers: int, boundaries: bool = True
) -> Iterator[tuple[str, Encoded]]:
    """Encode chunks and give them back in their order, whatever the number of processes.

    Raises:
        UserError: for an unusable tokenizer, and if a process is killed.
    """
    if workers == 1:
        encoder = load_encoder(kind, folder)
        for split, chunk in chunks:
            yield split, encode_chunk(encoder, chunk, boundaries)
        return
    waiting: deque[tuple[str, Future[Encoded]]] = deque()
    context = multiprocessing.get_context("spawn")
    try:
        with ProcessPoolExecutor(workers, context, _start_worker, (kind, folder, boundaries)) as pool:
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
        boundaries: whether the documents were encoded with boundaries.
    """

    def __init__(self, folder: Path, split: str, dtype: str, boundaries: bool = True) -> None:
        self.counts = Counts()
        self._path = folder / f"{split}.idx"
        self._dtype = dtype
        self._bin = open(folder / f"{split}.bin", "wb")
        self._sizes = open(folder / f"{split}.sizes", "wb+")
        self._last = 0
        self._boundaries, self._extra = boundaries, int(boundaries)
        self._unfinished = False

    def add(self, encoded: Encoded) -> None:
        """Append a chunk."""
        # The boundary before the first document.
        extra, self._extra = self._extra, 0
        ids, sizes = encoded.ids[extra:], encoded.sizes[extra:]
        self.counts.add(encoded.counts)
        self.counts.tokens -= extra
        self._bin.write(ids.tobytes())
        if encoded.joins or self._unfinished:
            self._last += int(sizes[:1].sum())
            sizes = sizes[1:]
        if len(sizes):
            self._flush_last()
            self._sizes.write(sizes[:-1].tobytes())
            self._last = int(sizes[-1])
        if len(ids):
            self._unfinished = not self._boundaries and bool(ids[-1] != EOS)

    def _flush_last(self) -> None:
        if self._last:
            self._sizes.write(np.array([self._last], "<i4").tobytes())

    def __enter__(self) -> SplitWriter:
        return self

    def __exit__(self, kind: object, *_: object) -> None:
        self._bin.close()
        with self._sizes:
            if kind is None:
                self._flush_last()
                write_index(self._path, self._sizes, self._dtype)
        Path(self._sizes.name).unlink()


def decode_documents(folder: Path, split: str) -> list[bytes]:
    """The text of each document of a prepared split, with a newline at its end; all in one without boundaries."""
    manifest = read_manifest(folder) or {}
    # Corpora that name no tokenizer are of the standard library, from before it was one of the others.
    kind = manifest.get("tokenizer", {}).get("kind", "bpe")
    boundaries = "tokenizer" in manifest and manifest.get("options", {}).get("boundaries", True)
    decode = load_decoder(kind, folder)
    tokens, sizes = read_split(folder, split)
    if not boundaries:
        return [decode(tokens.tolist())]
    starts = np.cumsum(sizes, dtype=np.int64) - sizes
    gaps = starts[(sizes == 1) & (tokens[starts] == EOS)]
    return [decode(part.tolist()) for part in np.split(np.delete(tokens, gaps), gaps - np.arange(len(gaps)))]
