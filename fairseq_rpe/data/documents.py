"""Source files (folders, archives, any compression) and the documents in them, read as a stream and validated."""

import bz2
import codecs
import contextlib
import fnmatch
import gzip
import hashlib
import io
import json
import lzma
import os
import zipfile
import zlib
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property, lru_cache, partial
from itertools import chain, groupby
from operator import attrgetter
from pathlib import Path
from typing import Any, BinaryIO

from fairseq_rpe.core.errors import UserError
from fairseq_rpe.utils.files import sha256_of_files
from fairseq_rpe.utils.json_files import parse_json_object

_BLOCK_BYTES = 1 << 20
MAX_JSON_LINE = 1 << 28  # bytes; a JSON line has to fit in memory, while text files have no limit
_BINARY_SAMPLE = 8192  # bytes in which a NUL marks a binary file
_PARQUET_ROWS = 64  # per batch
_DAMAGE = (EOFError, lzma.LZMAError, zlib.error, zipfile.BadZipFile)
UNWANTED = (".*", "__pycache__", "node_modules")  # hidden names, and folders that tools put beside sources


@dataclass(frozen=True)
class SourceFile:
    """A file, or a member of a zip archive.

    Attributes:
        path: Path of the file or archive; only a display name if ``fetch`` is set.
        member: Name of the member of a zip archive.
        root: Folder in which the file was found.
        fetch: Downloads the file on first read and returns its local path.
    """

    path: Path
    member: str | None = None
    root: Path | None = None
    fetch: Callable[[], Path] | None = field(default=None, compare=False)

    def __str__(self) -> str:
        return str(self.path) if self.member is None else f"{self.path}:{self.member}"

    @property
    def relative_path(self) -> str:
        """Path within its folder or archive, with ``/``."""
        if self.member is not None:
            return self.member
        return self.path.relative_to(self.root).as_posix() if self.root else self.path.name

    @cached_property
    def local_path(self) -> Path:
        """Path on the local disk; the file is downloaded first if necessary."""
        return self.fetch() if self.fetch else self.path

    @property
    def name(self) -> str:
        """Name of the file without its folder."""
        return (self.member or self.path.name).rsplit("/", 1)[-1]

    @property
    def suffix(self) -> str:
        """Suffix of the name in lower case, without that of a compression."""
        name = self.name.lower()
        for compressed in _OPENERS:
            name = name.removesuffix(compressed)
        return os.path.splitext(name)[1]

    @cached_property
    def format(self) -> str:
        """``jsonl``, ``parquet`` or ``text``, by the suffix; the first line decides for ``.json``.

        Raises:
            UserError: The file is JSON, but not an object per line.
        """
        if self.suffix == ".json":
            return _format_of_json(self)
        return self.suffix[1:] if self.suffix in (".jsonl", ".parquet") else "text"


def find_source_files(
    paths: Sequence[Path | SourceFile],
    include: Sequence[str] = (),
    exclude: Sequence[str] = UNWANTED,
    keep_binary: bool = False,
) -> tuple[list[SourceFile], int]:
    """Find the text files of folders, zip archives and files.

    Args:
        paths: Folders, ``.zip`` archives, files, or source files that were found before.
        include: Patterns such as ``*.py`` that a name in a folder or archive must match; empty takes all.
        exclude: Patterns of names of files and folders to leave out.
        keep_binary: Keep files of folders and archives that have a NUL among their first 8 KiB.

    Returns:
        The files in a repeatable order, and the number of binary files that were left out.

    Raises:
        UserError: A path does not exist, or there is no text file.
    """
    files: list[SourceFile] = []
    binary_count = 0
    for path in paths:
        if isinstance(path, SourceFile):
            files.append(path)
        elif not path.exists():
            raise UserError(f"{path} does not exist: give a folder or file with text")
        elif not (path.is_dir() or path.is_file()):
            raise UserError(f"{path} can be read only once: write its text into a file and give that")
        elif path.is_dir() or path.suffix == ".zip":
            candidates = [file for file in _walk(path, exclude) if not include or matches_any(file.name, include)]
            text_files = [file for file in candidates if keep_binary or not _is_binary(file)]
            files += text_files
            binary_count += len(candidates) - len(text_files)
        elif _is_binary(SourceFile(path)):
            raise UserError(f"{path} is a binary file: give text, .jsonl or .parquet")
        else:
            files.append(SourceFile(path))
    if not files:
        reason = f"all {binary_count} files are binary" if binary_count else "there are no files that could be read"
        raise UserError(f"{' '.join(map(str, paths))} has no text, {reason}: give another source")
    return files, binary_count


def matches_any(name: str, patterns: Sequence[str]) -> bool:
    """Return whether a name matches one of the patterns."""
    return any(fnmatch.fnmatch(name, pattern) for pattern in patterns)


def _walk(path: Path, exclude: Sequence[str]) -> Iterator[SourceFile]:
    """Yield the files of a folder, or the members of a zip archive."""
    with source_errors(path):
        if path.is_dir():
            for folder, subfolders, names in os.walk(path, onerror=_raise):
                subfolders[:] = sorted(n for n in subfolders if not matches_any(n, exclude))
                files = (Path(folder, n) for n in sorted(names) if not matches_any(n, exclude))
                yield from (SourceFile(file, root=path) for file in files if file.is_file())
            return
        with _archive_errors(path, path), zipfile.ZipFile(path) as archive:
            names = sorted(info.filename for info in archive.infolist() if not info.is_dir())
    for member in (SourceFile(path, name) for name in names):
        if member.suffix == ".parquet":
            raise UserError(f"{member} is parquet inside an archive: unpack {path} and give the folder")
        yield member


def _raise(error: OSError) -> None:
    raise error


def _is_binary(source: SourceFile) -> bool:
    if source.format == "parquet":
        return False
    with open_source(source) as file:
        return b"\0" in file.read(_BINARY_SAMPLE)


def _format_of_json(source: SourceFile) -> str:
    """Return ``jsonl`` for a ``.json`` file of JSON lines, as C4 has them; refuse a single JSON value."""
    with open_source(source) as file:
        lines = iter_lines(file, source, "write each document as a line of its own")
        first = next((line.strip() for _, line in lines if line.strip()), b"")
    try:
        if not first or isinstance(json.loads(first), dict):
            return "jsonl"
    except (ValueError, RecursionError):
        pass
    raise UserError(
        f"{source} is JSON, but not an object per line: leave it out, or write each document as such a line"
    )


@contextlib.contextmanager
def source_errors(source: SourceFile | Path) -> Iterator[None]:
    """Turn errors of a damaged or unreadable source into a UserError of one line."""
    try:
        yield
    except (*_DAMAGE, OSError) as error:
        # Errors of the operating system have a number, errors of the formats do not.
        if getattr(error, "errno", None) is None:
            raise UserError(f"{source} is cut short or damaged ({error}): get it again") from None
        raise UserError(f"cannot read {error.filename or source} ({error.strerror or error}): change that") from None


@contextlib.contextmanager
def _archive_errors(source: SourceFile | Path, archive: Path) -> Iterator[None]:
    """Refuse an archive that is encrypted, or whose version or compression zipfile does not know."""
    try:
        yield
    except RuntimeError as error:
        raise UserError(f"cannot read {source} ({error}): unpack {archive} and give the folder") from None


def iter_lines(file: BinaryIO, name: object, remedy: str) -> Iterator[tuple[int, bytes]]:
    """Yield the lines of an open file with their numbers, from 1.

    Args:
        file: Open file, at its beginning.
        name: Its name, for messages.
        remedy: What to do about a line that is too long, for the message.

    Raises:
        UserError: A line has more than :data:`MAX_JSON_LINE` bytes.
    """
    for number, line in enumerate(iter(partial(file.readline, MAX_JSON_LINE + 1), b""), start=1):
        if len(line) > MAX_JSON_LINE:
            raise UserError(f"{name} line {number} is over {MAX_JSON_LINE >> 20} MiB: {remedy}")
        yield number, line


@contextlib.contextmanager
def open_source(source: SourceFile) -> Iterator[BinaryIO]:
    """Open the decompressed bytes of a file.

    Raises:
        UserError: The file cannot be read or is cut short; also raised while it is read.
    """
    with source_errors(source), contextlib.ExitStack() as stack:
        if source.member is None:
            file = stack.enter_context(open(source.local_path, "rb"))
        else:
            with _archive_errors(source, source.path):
                file = _open_archive(source.path, source.path.stat().st_mtime_ns).open(source.member)
            stack.enter_context(file)
        if opener := _OPENERS.get(os.path.splitext(source.name.lower())[1]):
            file = stack.enter_context(opener(file))
        yield file


def read_blocks(source: SourceFile) -> Iterator[bytes]:
    """Yield the decompressed bytes of a file in blocks of 1 MiB."""
    with open_source(source) as file:
        yield from iter(partial(file.read, _BLOCK_BYTES), b"")


@lru_cache(maxsize=1)
def _open_archive(path: Path, mtime_ns: int) -> zipfile.ZipFile:
    """Open an archive and keep it open: reading a directory of thousands of files again for each one is slow."""
    return zipfile.ZipFile(path)


def _open_zstd(file: BinaryIO) -> BinaryIO:
    # pyarrow, because zstandard's own reader treats a truncated file as complete.
    try:
        import pyarrow
    except ImportError:
        raise UserError(f"{file.name} needs the package pyarrow: pip install pyarrow") from None
    return io.BufferedReader(pyarrow.CompressedInputStream(file, "zstd"), _BLOCK_BYTES)


_OPENERS = {".gz": gzip.open, ".xz": lzma.open, ".bz2": bz2.open, ".zst": _open_zstd}


def digest_source_files(files: Sequence[SourceFile], with_paths: bool) -> str:
    """Return a sha256 of the files as they are on the disk, and of their formats.

    Args:
        files: Files in the order in which they are read; another order gives another digest.
        with_paths: Include the relative path of every file, not only the names of archive members.
    """
    digest = hashlib.sha256()
    for path, members in groupby(files, key=attrgetter("path")):
        group = list(members)
        with source_errors(path):
            digest.update(bytes.fromhex(sha256_of_files(group[0].local_path)))
        for file in group:
            name = file.relative_path if with_paths else file.member or ""
            digest.update(os.fsencode(f"{file.format}:{name}") + b"\0")
    return digest.hexdigest()


@dataclass(frozen=True)
class Document:
    """A document that was read once.

    Attributes:
        relative_path: Path of its file within the folder or archive.
        digest: sha256 of its text.
        size: Bytes of its text in UTF-8.
        characters: Characters of its text, as Python counts them.
        blank: Whether the text is nothing but white space.
        blocks: Yields the text in blocks; can be called again.
    """

    relative_path: str
    digest: str
    size: int
    characters: int
    blank: bool
    blocks: Callable[[], Iterator[str]]


class _NotUtf8(UserError):
    """A text file in another encoding."""


@dataclass
class DocumentReader:
    """Iterates over the documents of files: a text file is one document, and so is each JSON line or parquet row.

    Attributes:
        files: The files, in the order in which they are read.
        text_field: Field of a row that contains its text.
        rows_are_lines: Take all rows of a file as the lines of one document.
        skip_invalid: Leave out text files that are not UTF-8, instead of refusing them.
        keep_blank: Yield documents without text too.
        skipped: Documents that the last pass left out, by reason.
        files_started: Number of files that the last pass has begun to read.
    """

    files: Sequence[SourceFile]
    text_field: str = "text"
    rows_are_lines: bool = False
    skip_invalid: bool = False
    keep_blank: bool = False
    skipped: Counter[str] = field(default_factory=Counter)
    files_started: int = 0

    def __iter__(self) -> Iterator[Document]:
        self.skipped.clear()
        for number, file in enumerate(self.files, start=1):
            self.files_started = number
            for name, blocks in self._texts(file):
                try:
                    document = scan_document(name, file.relative_path, blocks)
                except _NotUtf8:
                    if not self.skip_invalid:
                        raise
                    self.skipped["not UTF-8"] += 1
                    continue
                if document.blank and not self.keep_blank:
                    self.skipped["without text"] += 1
                else:
                    yield document

    def _texts(self, file: SourceFile) -> Iterator[tuple[str, Callable[[], Iterator[str]]]]:
        """Yield for each document its name in messages and a function that yields its text in blocks."""
        if file.format == "text":
            yield str(file), partial(_decode_blocks, file)
            return
        rows = partial(_json_rows if file.format == "jsonl" else _parquet_rows, file, self.text_field)
        if self.rows_are_lines:
            yield str(file), lambda: (text if text.endswith("\n") else text + "\n" for _, text in rows())
        else:
            yield from ((name, partial(iter, [text])) for name, text in rows())


def scan_document(name: str, relative_path: str, blocks: Callable[[], Iterator[str]]) -> Document:
    """Read a text once and return it as a document with its digest and sizes.

    Args:
        name: Name of the document, for messages.
        relative_path: Path of its file within the folder or archive.
        blocks: Yields the text in blocks.

    Raises:
        UserError: The text has half a surrogate pair.
    """
    digest, size, characters, blank = hashlib.sha256(), 0, 0, True
    for block in blocks():
        try:
            content = block.encode()
        except UnicodeEncodeError as error:
            problem = f"half a surrogate pair at character {error.start}"
            raise UserError(f"{name} has {problem}, which is not text: repair or remove it") from None
        digest.update(content)
        size += len(content)
        characters += len(block)
        blank = blank and not block.strip()
    return Document(relative_path, digest.hexdigest(), size, characters, blank, blocks)


def _decode_blocks(source: SourceFile) -> Iterator[str]:
    decoder = codecs.getincrementaldecoder("utf-8")()
    bytes_done = 0
    for block in chain(read_blocks(source), [b""]):
        try:
            yield decoder.decode(block, final=not block)
        except UnicodeDecodeError as error:
            # error.object begins with the bytes of an incomplete character of the block before
            position = bytes_done + len(block) - len(error.object) + error.start
            remedy = "convert it, leave it out or give --skip-invalid"
            raise _NotUtf8(f"{source} is not UTF-8 at byte {position}: {remedy}") from None
        bytes_done += len(block)


def _json_rows(source: SourceFile, text_field: str) -> Iterator[tuple[str, str]]:
    """Yield name and text of each JSON line."""
    end = 0
    with open_source(source) as file:
        for number, line in iter_lines(file, source, "give that document as a text file"):
            begin, end = end, end + len(line)
            name = f"{source} line {number}"
            if not line.strip():
                continue
            try:
                text = line.decode().rstrip()
            except UnicodeDecodeError as error:
                raise UserError(f"{name} is not UTF-8 at byte {begin + error.start}: convert the file") from None
            row = parse_json_object(text, source, "repair or remove it", number)
            yield name, _row_text(name, row, text_field)


def _row_text(name: str, row: dict[str, Any], text_field: str) -> str:
    if text_field not in row:
        names = ", ".join(row) or "none"
        raise UserError(f"{name} has no field '{text_field}' but {names}: name one with --text-field")
    text = row[text_field]
    if not isinstance(text, str):
        raise UserError(f"{name} has a '{text_field}' that is not a string: name another with --text-field")
    return text


def _parquet_rows(source: SourceFile, text_field: str) -> Iterator[tuple[str, str]]:
    """Yield name and text of each parquet row."""
    for name, row in read_parquet(source, text_field):
        text = row[text_field]
        yield name, _row_text(name, {text_field: "" if text is None else text}, text_field)


def read_parquet(source: SourceFile, text_field: str | None = None) -> Iterator[tuple[str, dict[str, Any]]]:
    """Read the rows of a parquet file.

    Args:
        source: The file.
        text_field: The only column to read; None reads all.

    Yields:
        File and row number, from 1, for messages; and the values of the row by column.

    Raises:
        UserError: The package pyarrow is missing, the file is damaged, is not UTF-8, or has no such column.
    """
    try:
        import pyarrow
        from pyarrow import parquet
    except ImportError:
        raise UserError(f"{source} needs the package pyarrow: pip install pyarrow") from None
    number = 0
    try:
        with source_errors(source), parquet.ParquetFile(source.local_path) as file:
            names = file.schema_arrow.names
            if text_field is not None and text_field not in names:
                raise UserError(
                    f"{source} has no column '{text_field}' but {', '.join(names)}: name one with --text-field"
                )
            columns = None if text_field is None else [text_field]
            for batch in file.iter_batches(batch_size=_PARQUET_ROWS, columns=columns):
                for index in range(batch.num_rows):
                    number += 1
                    values = {name: batch.column(name)[index].as_py() for name in batch.schema.names}
                    yield f"{source} row {number}", values
    except pyarrow.ArrowException as error:
        reason = str(error).partition("\n")[0]
        raise UserError(f"{source} is cut short or damaged ({reason}): get it again") from None
    except UnicodeDecodeError:
        raise UserError(f"{source} row {number} is not UTF-8: convert the file") from None
