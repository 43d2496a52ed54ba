"""Documents to fairseq's format, in bounded memory: cut into pieces, encoded by several processes, written in order."""

import multiprocessing
import os
import re
import signal
import threading
from collections import Counter, defaultdict, deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import NamedTuple, Self

import numpy as np

from fairseq_rpe.core.errors import UserError
from fairseq_rpe.data.encoders import BOS, EOS, UNK, Encoder, load_decoder, load_encoder
from fairseq_rpe.data.folder import read_manifest, read_split, write_index
from fairseq_rpe.utils.child_processes import safe_path

PIECE = 1 << 18  # characters
_WAITING_PER_WORKER = 4
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
    rest, first, in_word = "", True, False
    for block in blocks:
        for start in range(0, len(block), size):
            rest += block[start : start + size]
            while len(rest) > size:
                # At least half a piece, at most one.
                at = rest.rfind("\n", size // 2, size) + 1
                if not at:
                    word = _WORD_START.search(rest, size // 2, size)
                    at = word.start() if word else size
                yield Piece(rest[:at], first, in_word)
                in_word = not rest[at - 1].isspace() and not rest[at].isspace()
                rest, first = rest[at:], False
    yield Piece(rest if rest[-1:] in ("", "\n") else rest + "\n", first, in_word)


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


# Token ids of a chunk, (tokens,), where BOS stands before each document if there are boundaries; and its counts: of
# documents, bytes, lines, words (separated by white space, and each line end is one more), tokens and unknown ones.
Encoded = tuple[np.ndarray, Counter[str]]


def encode_chunk(encoder: Encoder, pieces: Sequence[Piece], boundaries: bool = True) -> Encoded:
    """Encode pieces of one split."""
    ids, counts = [], Counter[str]()
    for piece in pieces:
        tokens = encoder.encode(piece.text)
        boundary = boundaries and piece.first
        ids += [np.full(int(boundary), BOS, encoder.dtype), tokens]
        content = piece.text.encode()
        lines = content.count(b"\n")
        counts.update(
            documents=int(piece.first),
            bytes=len(content),
            lines=lines,
            words=len(piece.text.split()) + lines - piece.in_word,
            tokens=len(tokens) + boundary,
            unknown=int((tokens == UNK).sum()),
        )
    return np.concatenate(ids), counts


_encode: Callable[[Sequence[Piece]], Encoded]


def _start_worker(kind: str, folder: Path, boundaries: bool) -> None:
    global _encode
    # The parent is told, and it ends this process in its own time; if it is killed, nobody else would.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    threading.Thread(target=_end_with_parent, daemon=True).start()
    _encode = partial(encode_chunk, load_encoder(kind, folder), boundaries=boundaries)


def _end_with_parent() -> None:
    if parent := multiprocessing.parent_process():
        parent.join()
    os._exit(1)


def _work(pieces: Sequence[Piece], file: Path) -> Counter[str]:
    """Encode to a file: a process that is killed while it sends a long result leaves the others waiting for ever."""
    ids, counts = _encode(pieces)
    np.save(file, ids)
    return counts


def _take(file: Path, counts: Counter[str]) -> Encoded:
    ids = np.load(file)
    file.unlink()
    return ids, counts


def encode_chunks(
    chunks: Iterable[tuple[str, list[Piece]]], kind: str, folder: Path, workers: int, boundaries: bool = True
) -> Iterator[tuple[str, Encoded]]:
    """Encode chunks, in their order. Raises UserError for an unusable tokenizer, and if a process is killed."""
    if workers == 1:
        encoder = load_encoder(kind, folder)
        for split, chunk in chunks:
            yield split, encode_chunk(encoder, chunk, boundaries)
        return
    waiting: deque[tuple[str, Path, Future[Counter[str]]]] = deque()
    context, others = multiprocessing.get_context("spawn"), set(multiprocessing.active_children())
    try:
        with (
            safe_path(),
            TemporaryDirectory(dir=folder) as encoded,
            ProcessPoolExecutor(workers, context, _start_worker, (kind, folder, boundaries)) as pool,
        ):
            try:
                for number, (split, chunk) in enumerate(chunks):
                    file = Path(encoded, f"{number}.npy")
                    waiting.append((split, file, pool.submit(_work, chunk, file)))
                    if len(waiting) >= workers * _WAITING_PER_WORKER:
                        name, file, future = waiting.popleft()
                        yield name, _take(file, future.result())
                for name, file, future in waiting:
                    yield name, _take(file, future.result())
            except BrokenProcessPool:
                # The pool ends those that it knew when one was killed, and waits for one that was just being started.
                for process in set(multiprocessing.active_children()) - others:
                    process.terminate()
                raise
    except BrokenProcessPool:
        raise UserError("an encoding process was killed, perhaps for lack of memory: use fewer --workers") from None


class SplitWriter:
    """Writes ``{split}.bin`` and ``{split}.idx`` chunk by chunk; the index of lines is never in memory.

    With boundaries, an item of nothing but a line end is between two documents, as fairseq's ``--sample-break-mode
    complete_doc`` knows them apart. An empty line inside a document is in the item of the line before it, or of the
    first line, so that no other item is like that. Without, each line is an item, as ``fairseq-preprocess`` has it.

    ``dtype`` is the number type of the ids, ``<u2`` or ``<u4``; ``boundaries`` as the documents were encoded.
    """

    def __init__(self, folder: Path, split: str, dtype: str, boundaries: bool = True) -> None:
        self.counts = Counter[str]()
        self._path = folder / f"{split}.idx"
        self._dtype = dtype
        self._bin = open(folder / f"{split}.bin", "wb")
        self._sizes = open(folder / f"{split}.sizes", "wb+")
        self._boundaries, self._extra = boundaries, int(boundaries)
        # The last token that is no line end, and the last one; how many are in the item that is not ended.
        self._last, self._open = np.full(2, BOS, dtype), 0

    def add(self, encoded: Encoded) -> None:
        """Append a chunk."""
        # The boundary before the first document is left out.
        tokens = np.concatenate((self._last, encoded[0][self._extra :]))
        self.counts.update(encoded[1])
        self.counts["tokens"] -= self._extra
        self._extra = 0
        words = tokens[np.maximum.accumulate(np.where(tokens == EOS, 0, np.arange(len(tokens))))]
        ids, before = tokens[2:], tokens[1:-1]
        starts = before == EOS
        if self._boundaries:
            starts &= (ids != EOS) & (words[1:-1] != BOS)
        begins = np.flatnonzero(starts | (before == BOS) | (ids == BOS))
        self._last = np.array([words[-1], tokens[-1]])
        self._bin.write(np.where(ids == BOS, EOS, ids).astype(self._dtype).tobytes())
        if len(begins):
            self._write_sizes(np.diff(begins, prepend=-self._open))
            self._open = -int(begins[-1])
        self._open += len(ids)

    def _write_sizes(self, sizes: np.ndarray) -> None:
        self._sizes.write(sizes[sizes > 0].astype("<i4").tobytes())

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: object, *_: object) -> None:
        self._bin.close()
        with self._sizes:
            if kind is None:
                self._write_sizes(np.array([self._open]))
                write_index(self._path, self._sizes, self._dtype)
        Path(self._sizes.name).unlink()


def decode_documents(folder: Path, split: str) -> list[bytes]:
    """The text of each document of a prepared split, with a newline at its end; all in one without boundaries."""
    manifest = read_manifest(folder)
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
