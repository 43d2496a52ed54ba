"""Encodes documents into fairseq's format in bounded memory, with several processes."""

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
from fairseq_rpe.data.folder import read_manifest, read_split, write_index
from fairseq_rpe.data.tokenization import BOS, EOS, UNK, Encoder, load_decoder, load_encoder
from fairseq_rpe.utils.child_processes import safe_path

PIECE = 1 << 18  # characters of a piece
_CHUNKS_PER_WORKER = 4  # waiting for a worker
_WORD_START = re.compile(r"(?<=\S) (?=\S)")


class Piece(NamedTuple):
    """A piece of a document.

    Attributes:
        text: The text. The last piece of a document ends with a newline.
        first: Whether the document begins with this piece.
        in_word: Whether its first word began in the piece before.
    """

    text: str
    first: bool = True
    in_word: bool = False


def split_pieces(blocks: Iterable[str], size: int = PIECE) -> Iterator[Piece]:
    """Split a document into pieces, after a newline or before a word where possible.

    Args:
        blocks: The text in blocks of any size. A newline is added at its end if it has none.
        size: Most characters of a piece.

    Yields:
        The pieces; one empty piece for an empty text.
    """
    buffer, first, in_word = "", True, False
    for block in blocks:
        for start in range(0, len(block), size):
            buffer += block[start : start + size]
            while len(buffer) > size:
                # A piece has between size / 2 and size characters.
                end = buffer.rfind("\n", size // 2, size) + 1
                if not end:
                    word = _WORD_START.search(buffer, size // 2, size)
                    end = word.start() if word else size
                yield Piece(buffer[:end], first, in_word)
                in_word = not buffer[end - 1].isspace() and not buffer[end].isspace()
                buffer, first = buffer[end:], False
    yield Piece(buffer if buffer[-1:] in ("", "\n") else buffer + "\n", first, in_word)


def group_pieces(pieces: Iterable[tuple[str, Piece]], size: int = PIECE) -> Iterator[tuple[str, list[Piece]]]:
    """Group pieces into chunks of one split; the order within a split stays the same.

    Args:
        pieces: Pieces with their split, in any order of the splits.
        size: Characters from which a chunk is complete.

    Yields:
        Split and chunk.
    """
    chunks: defaultdict[str, list[Piece]] = defaultdict(list)
    sizes = Counter[str]()
    for split, piece in pieces:
        chunks[split].append(piece)
        sizes[split] += len(piece.text)
        if sizes[split] >= size:
            yield split, chunks.pop(split)
            del sizes[split]
    yield from chunks.items()


class EncodedChunk(NamedTuple):
    """Pieces of one split as tokens.

    Attributes:
        ids: (tokens,) token ids, with BOS before each document if there are boundaries.
        counts: Number of documents, bytes, lines, words, tokens and unknown tokens. A word is what white space
            separates, and each line end counts as a word. ``changed`` counts the pieces whose tokens decode to another
            text; it is missing if there are none.
    """

    ids: np.ndarray
    counts: Counter[str]


def encode_chunk(encoder: Encoder, pieces: Sequence[Piece], boundaries: bool = True) -> EncodedChunk:
    """Encode pieces of one split.

    Args:
        encoder: Tokenizer of the corpus.
        pieces: Pieces of documents, in order.
        boundaries: Put BOS before each document.

    Returns:
        The token ids and the counts.
    """
    ids, counts = [], Counter[str]()
    for piece in pieces:
        tokens = encoder.encode(piece.text)
        boundary = boundaries and piece.first
        ids += [np.full(int(boundary), BOS, encoder.dtype), tokens]
        content = piece.text.encode()
        lines = content.count(b"\n")
        if not encoder.restores(piece.text, tokens):
            counts["changed"] += 1
        counts.update(
            documents=int(piece.first),
            bytes=len(content),
            lines=lines,
            words=len(piece.text.split()) + lines - piece.in_word,  # a word in two pieces counts in the first one
            tokens=len(tokens) + boundary,
            unknown=int((tokens == UNK).sum()),
        )
    return EncodedChunk(np.concatenate(ids), counts)


# The encoder of a worker process, with its options.
_encode: Callable[[Sequence[Piece]], EncodedChunk]


def _start_worker(kind: str, folder: Path, boundaries: bool) -> None:
    global _encode
    # The parent handles Ctrl-C and ends its workers. The thread ends this worker if the parent is killed.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    threading.Thread(target=_end_with_parent, daemon=True).start()
    _encode = partial(encode_chunk, load_encoder(kind, folder), boundaries=boundaries)


def _end_with_parent() -> None:
    if parent := multiprocessing.parent_process():
        parent.join()
    os._exit(1)


def _encode_to_file(pieces: Sequence[Piece], file: Path) -> Counter[str]:
    """Write the ids of a chunk to a file and return its counts.

    The ids are not returned: a worker that is killed while it sends a long result would block the others for ever.
    """
    ids, counts = _encode(pieces)
    np.save(file, ids)
    return counts


class _PendingChunk(NamedTuple):
    """A chunk that a worker encodes into a file."""

    split: str
    file: Path
    counts: Future[Counter[str]]

    def take(self) -> tuple[str, EncodedChunk]:
        """Wait for the worker, and return split and encoded chunk; the file is removed."""
        counts = self.counts.result()
        ids = np.load(self.file)
        self.file.unlink()
        return self.split, EncodedChunk(ids, counts)


def encode_chunks(
    chunks: Iterable[tuple[str, list[Piece]]], kind: str, folder: Path, workers: int, boundaries: bool = True
) -> Iterator[tuple[str, EncodedChunk]]:
    """Encode chunks in parallel.

    Args:
        chunks: Pieces with their split.
        kind: Kind of the tokenizer, a key of ``VOCABULARY_FILES``.
        folder: Folder with the files of the tokenizer.
        workers: Number of processes that encode; 1 encodes in this one.
        boundaries: Put BOS before each document.

    Yields:
        Split and encoded chunk, in the order of ``chunks``.

    Raises:
        UserError: The tokenizer is unusable, or a process was killed.
    """
    if workers == 1:
        encoder = load_encoder(kind, folder)
        for split, chunk in chunks:
            yield split, encode_chunk(encoder, chunk, boundaries)
        return
    waiting: deque[_PendingChunk] = deque()
    context, other_children = multiprocessing.get_context("spawn"), set(multiprocessing.active_children())
    try:
        with (
            safe_path(),
            TemporaryDirectory(dir=folder) as encoded,
            ProcessPoolExecutor(workers, context, _start_worker, (kind, folder, boundaries)) as pool,
        ):
            try:
                for number, (split, chunk) in enumerate(chunks):
                    file = Path(encoded, f"{number}.npy")
                    waiting.append(_PendingChunk(split, file, pool.submit(_encode_to_file, chunk, file)))
                    if len(waiting) >= workers * _CHUNKS_PER_WORKER:
                        yield waiting.popleft().take()
                for pending in waiting:
                    yield pending.take()
            except BrokenProcessPool:
                # The pool ends the workers it knows, but waits for a worker that was being started.
                for process in set(multiprocessing.active_children()) - other_children:
                    process.terminate()
                raise
    except BrokenProcessPool:
        raise UserError("an encoding process was killed, perhaps for lack of memory: use fewer --workers") from None


class SplitWriter:
    """Writes ``{split}.bin`` and ``{split}.idx`` chunk by chunk, with the item sizes in a temporary file.

    With boundaries, an item that is only a line end separates two documents, as fairseq's ``--sample-break-mode
    complete_doc`` expects. An empty line within a document belongs to the item of the line before it (or of the first
    line), so that no other item is only a line end. Without boundaries each line is an item, as ``fairseq-preprocess``
    writes it.

    Args:
        folder: Output folder, which exists.
        split: Name of the split, which begins the names of the files.
        dtype: Dtype of the token ids, ``<u2`` or ``<u4``.
        boundaries: Whether the documents were encoded with boundaries.

    Attributes:
        counts: Counts of everything that was added.
    """

    def __init__(self, folder: Path, split: str, dtype: str, boundaries: bool = True) -> None:
        self.counts = Counter[str]()
        self._path = folder / f"{split}.idx"
        self._dtype = dtype
        self._bin = open(folder / f"{split}.bin", "wb")
        self._sizes = open(folder / f"{split}.sizes", "wb+")
        self._boundaries = boundaries
        self._skips_bos = boundaries  # the BOS before the first document of the split is not written
        self._last_token = self._last_word_token = BOS  # the latter is no line end; BOS as if a document had just begun
        self._open_tokens = 0  # of the last item, which may continue in the next chunk

    def add(self, encoded: EncodedChunk) -> None:
        """Append a chunk."""
        ids = encoded.ids
        self.counts.update(encoded.counts)
        if self._skips_bos:
            ids = ids[1:]
            self.counts["tokens"] -= 1
            self._skips_bos = False
        begins = self._item_begins(ids)
        # A document boundary is stored as an EOS, which is an item by itself.
        self._bin.write(np.where(ids == BOS, EOS, ids).astype(self._dtype).tobytes())
        if len(begins):
            # The first size is that of the open item, whose first token is `_open_tokens` before this chunk.
            self._write_sizes(np.diff(begins, prepend=-self._open_tokens))
            self._open_tokens = -int(begins[-1])
        self._open_tokens += len(ids)

    def _item_begins(self, ids: np.ndarray) -> np.ndarray:
        """Return the indices of the tokens of a chunk with which an item begins, and remember its last tokens."""
        # Two tokens from before the chunk: the last one that is no line end, and the last one.
        before = np.array([self._last_word_token, self._last_token], ids.dtype)
        tokens = np.concatenate((before, ids))  # (2 + tokens of the chunk,)
        # For each token, the last one up to it that is no line end.
        word_tokens = tokens[np.maximum.accumulate(np.where(tokens == EOS, 0, np.arange(len(tokens))))]
        self._last_word_token, self._last_token = int(word_tokens[-1]), int(tokens[-1])
        previous, previous_word = tokens[1:-1], word_tokens[1:-1]  # for each token of the chunk
        after_line = previous == EOS
        if self._boundaries:
            # An empty line belongs to the item before it, or to the first item of a document.
            after_line &= (ids != EOS) & (previous_word != BOS)
        return np.flatnonzero(after_line | (previous == BOS) | (ids == BOS))

    def _write_sizes(self, sizes: np.ndarray) -> None:
        self._sizes.write(sizes[sizes > 0].astype("<i4").tobytes())

    def __enter__(self) -> Self:
        return self

    def __exit__(self, error_type: object, *_: object) -> None:
        self._bin.close()
        with self._sizes:
            if error_type is None:
                self._write_sizes(np.array([self._open_tokens]))
                write_index(self._path, self._sizes, self._dtype)
        Path(self._sizes.name).unlink()


def decode_documents(folder: Path, split: str) -> list[bytes]:
    """Decode a prepared split.

    Args:
        folder: Prepared corpus with document boundaries.
        split: Name of the split: ``train``, ``valid`` or ``test``.

    Returns:
        The text of each document, with a newline at its end; one text for the whole split without boundaries.
    """
    manifest = read_manifest(folder)
    # Manifests without a tokenizer are of the standard library, from before it was a preset of prepare.
    kind = manifest.get("tokenizer", {}).get("kind", "bpe")
    boundaries = "tokenizer" in manifest and manifest.get("options", {}).get("boundaries", True)
    decode = load_decoder(kind, folder)
    tokens, sizes = read_split(folder, split)
    if not boundaries:
        return [decode(tokens.tolist())]
    starts = np.cumsum(sizes, dtype=np.int64) - sizes
    separators = starts[(sizes == 1) & (tokens[starts] == EOS)]  # token indices
    documents = np.split(np.delete(tokens, separators), separators - np.arange(len(separators)))
    return [decode(document.tolist()) for document in documents]
