"""Documents out of source files, streaming and validated, and divided into the splits of a corpus by a hash."""

import codecs
import hashlib
import os
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import chain
from operator import attrgetter
from typing import Any

from fairseq_rpe.core.errors import UserError
from fairseq_rpe.core.files import json_object
from fairseq_rpe.data.folder import SPLITS
from fairseq_rpe.data.preparation import PrepareOptions
from fairseq_rpe.data.sourcefiles import Entry, digest_entries, find_entries, opened, read_blocks, readable

# A JSON line has to be in memory as a whole; text files have no limit.
MAX_JSON_LINE = 1 << 28
_PARQUET_ROWS = 64


@dataclass(frozen=True)
class Document:
    """One document."""

    place: str  # of its file in the folder or archive that it was found in
    digest: str  # sha256 of its text
    size: int  # bytes of its text in UTF-8
    characters: int
    blank: bool  # whether there is nothing but white space
    blocks: Callable[[], Iterator[str]]  # gives its text, again and again


class _NotUtf8(UserError):
    """Text in another encoding."""


@dataclass
class Reader:
    """The documents of files, in order: a text file is one, a row of ``.jsonl`` or ``.parquet`` another."""

    entries: Sequence[Entry]
    text_field: str = "text"  # of a row
    rows_are_lines: bool = False  # take all rows of a file as the lines of one document
    skip_invalid: bool = False  # leave out text files that are not UTF-8, instead of refusing them
    keep_blank: bool = False  # give documents without text, too
    skipped: Counter[str] = field(default_factory=Counter)  # by the last pass, by reason

    def __iter__(self) -> Iterator[Document]:
        self.skipped.clear()
        for entry in self.entries:
            for name, blocks in self._texts(entry):
                try:
                    document = _document(name, entry.place, blocks)
                except _NotUtf8:
                    if not self.skip_invalid:
                        raise
                    self.skipped["not UTF-8"] += 1
                    continue
                if document.blank and not self.keep_blank:
                    self.skipped["without text"] += 1
                else:
                    yield document

    def _texts(self, entry: Entry) -> Iterator[tuple[str, Callable[[], Iterator[str]]]]:
        if entry.kind == "text":
            yield str(entry), partial(_decoded, entry)
            return
        rows = partial(_json_rows if entry.kind == "jsonl" else _parquet_rows, entry, self.text_field)
        if self.rows_are_lines:
            yield str(entry), lambda: (text if text.endswith("\n") else text + "\n" for _, text in rows())
        else:
            yield from ((name, partial(iter, [text])) for name, text in rows())


def _document(name: str, place: str, blocks: Callable[[], Iterator[str]]) -> Document:
    digest, size, characters, blank = hashlib.sha256(), 0, 0, True
    for block in blocks():
        try:
            content = block.encode()
        except UnicodeEncodeError as error:
            at = f"half a surrogate pair at character {error.start}"
            raise UserError(f"{name} has {at}, which is no text: repair or remove it") from None
        digest.update(content)
        size += len(content)
        characters += len(block)
        blank = blank and not block.strip()
    return Document(place, digest.hexdigest(), size, characters, blank, blocks)


def _decoded(entry: Entry) -> Iterator[str]:
    decoder = codecs.getincrementaldecoder("utf-8")()
    done = 0
    for block in chain(read_blocks(entry), [b""]):
        try:
            yield decoder.decode(block, final=not block)
        except UnicodeDecodeError as error:
            at = done + len(block) - len(error.object) + error.start
            remedy = "convert it, leave it out or give --skip-invalid"
            raise _NotUtf8(f"{entry} is not UTF-8 at byte {at}: {remedy}") from None
        done += len(block)


def _json_rows(entry: Entry, key: str) -> Iterator[tuple[str, str]]:
    end = 0
    with opened(entry) as file:
        for number, line in enumerate(iter(partial(file.readline, MAX_JSON_LINE + 1), b""), start=1):
            begin, end = end, end + len(line)
            name = f"{entry} line {number}"
            if len(line) > MAX_JSON_LINE:
                raise UserError(f"{name} is over {MAX_JSON_LINE >> 20} MiB: give that document as a text file")
            if not line.strip():
                continue
            try:
                text = line.decode().rstrip()
            except UnicodeDecodeError as error:
                raise UserError(f"{name} is not UTF-8 at byte {begin + error.start}: convert the file") from None
            row = json_object(text, entry, "repair or remove it", number)
            yield name, _text(name, row, key)


def _text(name: str, row: dict[str, Any], key: str) -> str:
    if key not in row:
        raise UserError(f"{name} has no field '{key}' but {', '.join(row) or 'none'}: name one with --text-field")
    text = row[key]
    if not isinstance(text, str):
        raise UserError(f"{name} has a '{key}' that is no string: name another with --text-field")
    return text


def _parquet_rows(entry: Entry, key: str) -> Iterator[tuple[str, str]]:
    try:
        import pyarrow
        from pyarrow import parquet
    except ImportError:
        raise UserError(f"{entry} needs the package pyarrow: pip install pyarrow") from None
    number = 0
    try:
        with readable(entry), parquet.ParquetFile(entry.path) as file:
            names = file.schema_arrow.names
            if key not in names:
                raise UserError(f"{entry} has no column '{key}' but {', '.join(names)}: name one with --text-field")
            for batch in file.iter_batches(batch_size=_PARQUET_ROWS, columns=[key]):
                for value in batch.column(0):
                    number += 1
                    name = f"{entry} row {number}"
                    yield name, _text(name, {key: "" if (text := value.as_py()) is None else text}, key)
    except pyarrow.ArrowException as error:
        reason = str(error).partition("\n")[0]
        raise UserError(f"{entry} is cut short or damaged ({reason}): get it again") from None
    except UnicodeDecodeError:
        raise UserError(f"{entry} row {number} is not UTF-8: convert the file") from None


def unit_hash(purpose: str, seed: int, name: str) -> float:
    """A number in [0, 1) that depends on nothing but the arguments."""
    digest = hashlib.sha256(f"{purpose}\0{seed}\0".encode() + os.fsencode(name)).digest()
    return int.from_bytes(digest[:6], "big") / 2**48


class DividedDocuments:
    """The documents of all splits, the same in every pass.

    ``digest`` is that of the source files, by split; under ``all`` where they are divided here.
    """

    def __init__(self, options: PrepareOptions) -> None:
        self._options = options
        self._by_path = options.divide_by == "path"
        given = {"train": options.train, "valid": options.valid, "test": options.test}
        paths = given if options.valid else {"": options.train}
        found = {split: find_entries(p, options.include) for split, p in paths.items()}
        self._binary = sum(binary for _, binary in found.values())
        self._readers = {split: self._reader(entries) for split, (entries, _) in found.items()}
        self._stamp = self._stamps()
        readers = self._readers.items()
        self.digest = {split or "all": digest_entries(reader.entries, self._by_path) for split, reader in readers}

    def _reader(self, entries: Sequence[Entry]) -> Reader:
        options = self._options
        if self._by_path:
            entries = sorted(entries, key=attrgetter("place"))
        reader = Reader(
            entries, options.text_field, options.rows_are_lines, options.skip_invalid, not options.boundaries
        )
        if options.max_bytes is not None:
            sizes: Counter[str] = Counter()
            for document in reader:
                sizes[document.place] += document.size
            room = options.max_bytes
            # Not the hash of the split, in whose order all validation files come first.
            for place in sorted(sizes, key=lambda place: (unit_hash("order", options.seed, place), place)):
                if sizes[place] <= room:
                    room -= sizes.pop(place)
            reader.entries = [entry for entry in entries if entry.place not in sizes]
        return reader

    def __iter__(self) -> Iterator[tuple[str, Document]]:
        valid, train = self._options.valid_fraction, self._options.valid_fraction + self._options.test_fraction
        for given, reader in self._readers.items():
            for document in reader:
                number = unit_hash("split", self._options.seed, document.place if self._by_path else document.digest)
                yield given or ("valid" if number < valid else "test" if number < train else "train"), document

    def _stamps(self) -> list[tuple[int, int]]:
        entries = (entry for reader in self._readers.values() for entry in reader.entries)
        return [((stat := entry.path.stat()).st_size, stat.st_mtime_ns) for entry in entries]

    def check_unchanged(self) -> None:
        """Refuse sources that changed since the first look: the passes may have read different text."""
        if self._stamps() != self._stamp:
            raise UserError("the source files changed while they were read: run this again when they are at rest")

    def check_splits(self, documents: dict[str, int]) -> None:
        """Refuse splits that have none of the ``documents``, which are counted by split."""
        more = "a larger --max-bytes" if self._options.max_bytes else "--valid and --test"
        for split in SPLITS:
            if not documents.get(split):
                raise UserError(
                    f"the {split} split of {sum(documents.values())} documents would be empty: "
                    f"give more documents, other fractions, another --seed or {more}"
                )

    def skipped(self) -> dict[str, int]:
        """What the last pass left out, by reason."""
        by_reader = (reader.skipped for reader in self._readers.values())
        return dict(sum(by_reader, Counter(binary=self._binary)))
