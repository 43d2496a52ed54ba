"""Documents out of source files, streaming and validated."""

import codecs
import hashlib
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import chain
from typing import Any

from fairseq_rpe.core.errors import UserError
from fairseq_rpe.data.sourcefiles import Entry, lines_of, opened, read_blocks, readable
from fairseq_rpe.utils.files import json_object

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
    """The documents of files, in order: a text file is one, a row of JSON lines or ``.parquet`` another."""

    entries: Sequence[Entry]
    text_field: str = "text"  # of a row
    rows_are_lines: bool = False  # take all rows of a file as the lines of one document
    skip_invalid: bool = False  # leave out text files that are not UTF-8, instead of refusing them
    keep_blank: bool = False  # give documents without text, too
    skipped: Counter[str] = field(default_factory=Counter)  # by the last pass, by reason
    begun: int = 0  # the entries that the last pass has looked into

    def __iter__(self) -> Iterator[Document]:
        self.skipped.clear()
        for number, entry in enumerate(self.entries, start=1):
            self.begun = number
            for name, blocks in self._texts(entry):
                try:
                    found = look_through(name, entry.place, blocks)
                except _NotUtf8:
                    if not self.skip_invalid:
                        raise
                    self.skipped["not UTF-8"] += 1
                    continue
                if found.blank and not self.keep_blank:
                    self.skipped["without text"] += 1
                else:
                    yield found

    def _texts(self, entry: Entry) -> Iterator[tuple[str, Callable[[], Iterator[str]]]]:
        if entry.kind == "text":
            yield str(entry), partial(_decoded, entry)
            return
        rows = partial(_json_rows if entry.kind == "jsonl" else _parquet_rows, entry, self.text_field)
        if self.rows_are_lines:
            yield str(entry), lambda: (text if text.endswith("\n") else text + "\n" for _, text in rows())
        else:
            yield from ((name, partial(iter, [text])) for name, text in rows())


def look_through(name: str, place: str, blocks: Callable[[], Iterator[str]]) -> Document:
    """Look through the text that ``blocks`` gives. Raises UserError, with ``name``, if it is none."""
    digest, size, characters, blank = hashlib.sha256(), 0, 0, True
    for block in blocks():
        try:
            content = block.encode()
        except UnicodeEncodeError as error:
            at = f"half a surrogate pair at character {error.start}"
            raise UserError(f"{name} has {at}, which is not text: repair or remove it") from None
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
        for number, line in lines_of(file, entry, "give that document as a text file"):
            begin, end = end, end + len(line)
            name = f"{entry} line {number}"
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
        raise UserError(f"{name} has a '{key}' that is not a string: name another with --text-field")
    return text


def _parquet_rows(entry: Entry, key: str) -> Iterator[tuple[str, str]]:
    try:
        import pyarrow
        from pyarrow import parquet
    except ImportError:
        raise UserError(f"{entry} needs the package pyarrow: pip install pyarrow") from None
    number = 0
    try:
        with readable(entry), parquet.ParquetFile(entry.file) as file:
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
