"""Source files of any corpus: found in folders, opened whatever their compression, read in bounded blocks."""

import bz2
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
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property, lru_cache, partial
from itertools import groupby
from operator import attrgetter
from pathlib import Path
from typing import BinaryIO

from fairseq_rpe.core.errors import UserError
from fairseq_rpe.utils.files import file_digest

_BLOCK = 1 << 20
# A JSON line has to be in memory as a whole; text files have no limit.
MAX_JSON_LINE = 1 << 28
_BINARY_SAMPLE = 8192
_DAMAGE = (EOFError, lzma.LZMAError, zlib.error, zipfile.BadZipFile)
# Hidden files and folders, and what tools put beside sources.
UNWANTED = (".*", "__pycache__", "node_modules")


@dataclass(frozen=True)
class Entry:
    """A file, or a member of a zip archive; ``root`` is the folder that it was found in."""

    path: Path
    member: str | None = None
    root: Path | None = None
    # Gets it when it is first read and says where it lies; ``path`` is then but what it is called.
    get: Callable[[], Path] | None = field(default=None, compare=False)

    def __str__(self) -> str:
        return str(self.path) if self.member is None else f"{self.path}:{self.member}"

    @property
    def place(self) -> str:
        """Where it is in its folder or archive, with ``/``."""
        if self.member is not None:
            return self.member
        return self.path.relative_to(self.root).as_posix() if self.root else self.path.name

    @cached_property
    def file(self) -> Path:
        """Where it lies on the disk."""
        return self.get() if self.get else self.path

    @property
    def name(self) -> str:
        return (self.member or self.path.name).rsplit("/", 1)[-1]

    @property
    def ending(self) -> str:
        """Of its name, without that of its compression."""
        name = self.name.lower()
        for packed in _OPENERS:
            name = name.removesuffix(packed)
        return os.path.splitext(name)[1]

    @cached_property
    def kind(self) -> str:
        """``jsonl``, ``parquet`` or ``text``: by its name, and of ``.json`` by its first line.

        Raises UserError: JSON that is not an object per line.
        """
        if self.ending == ".json":
            return _kind_of_json(self)
        return self.ending[1:] if self.ending in (".jsonl", ".parquet") else "text"


def find_entries(
    paths: Sequence[Path | Entry],
    include: Sequence[str] = (),
    exclude: Sequence[str] = UNWANTED,
    keep_binary: bool = False,
) -> tuple[list[Entry], int]:
    """The text files of folders, zip archives and files, in a repeatable order, and how many were binary.

    Args:
        paths: each a folder, a ``.zip``, a file or an entry found before.
        include: patterns such as ``*.py`` that a name in a folder or archive must match; none takes all.
        exclude: patterns of names in folders, of files and of whole folders, that are left out.
        keep_binary: take files of folders and archives that have a NUL among their first 8 KiB, too.

    Raises UserError if a path does not exist, or there is no text file.
    """
    entries, binary = [], 0
    for path in paths:
        if isinstance(path, Entry):
            entries.append(path)
            continue
        if not path.exists():
            raise UserError(f"{path} does not exist: give a folder or file with text")
        if not (path.is_dir() or path.is_file()):
            raise UserError(f"{path} can be read only once: write its text into a file and give that")
        several = path.is_dir() or path.suffix == ".zip"
        for entry in _inside(path, exclude) if several else [Entry(path)]:
            if several and include and not matches(entry.name, include):
                continue
            if (several and keep_binary) or not _is_binary(entry):
                entries.append(entry)
            elif several:
                binary += 1
            else:
                raise UserError(f"{path} is a binary file: give text, .jsonl or .parquet")
    if not entries:
        what = f"all {binary} files are binary" if binary else "there are no files that could be read"
        raise UserError(f"{' '.join(map(str, paths))} has no text, {what}: give another source")
    return entries, binary


def matches(name: str, patterns: Sequence[str]) -> bool:
    """Whether a name is one of the patterns."""
    return any(fnmatch.fnmatch(name, pattern) for pattern in patterns)


def _inside(path: Path, exclude: Sequence[str]) -> Iterator[Entry]:
    with readable(path):
        if path.is_dir():
            for folder, subfolders, names in os.walk(path, onerror=_raise):
                subfolders[:] = sorted(n for n in subfolders if not matches(n, exclude))
                files = (Path(folder, n) for n in sorted(names) if not matches(n, exclude))
                yield from (Entry(file, root=path) for file in files if file.is_file())
            return
        with _known(path, path), zipfile.ZipFile(path) as archive:
            names = sorted(info.filename for info in archive.infolist() if not info.is_dir())
    for entry in (Entry(path, name) for name in names):
        if entry.ending == ".parquet":
            raise UserError(f"{entry} is parquet inside an archive: unpack {path} and give the folder")
        yield entry


def _raise(error: OSError) -> None:
    raise error


def _is_binary(entry: Entry) -> bool:
    if entry.kind == "parquet":
        return False
    with opened(entry) as file:
        return b"\0" in file.read(_BINARY_SAMPLE)


def _kind_of_json(entry: Entry) -> str:
    """Data sets such as C4 name JSON lines ``.json``; one JSON value over all of a file is no text to train on."""
    with opened(entry) as file:
        lines = lines_of(file, entry, "write each document as a line of its own")
        first = next((line.strip() for _, line in lines if line.strip()), b"")
    try:
        if not first or isinstance(json.loads(first), dict):
            return "jsonl"
    except (ValueError, RecursionError):
        pass
    raise UserError(f"{entry} is JSON, but not an object per line: leave it out, or write each document as such a line")


@contextlib.contextmanager
def readable(what: Entry | Path) -> Iterator[None]:
    """Tell a damaged or unreadable source in one line, a UserError."""
    try:
        yield
    except (*_DAMAGE, OSError) as error:
        # The errors of the system have a number, those of the formats have none.
        if getattr(error, "errno", None) is None:
            raise UserError(f"{what} is cut short or damaged ({error}): get it again") from None
        raise UserError(f"cannot read {error.filename or what} ({error.strerror or error}): change that") from None


@contextlib.contextmanager
def _known(what: Entry | Path, archive: Path) -> Iterator[None]:
    """Refuse an archive that is encrypted, or whose version or compression is unknown here."""
    try:
        yield
    except RuntimeError as error:
        raise UserError(f"cannot read {what} ({error}): unpack {archive} and give the folder") from None


def lines_of(file: BinaryIO, what: object, remedy: str) -> Iterator[tuple[int, bytes]]:
    """The lines of an open file by number, from 1. Raises UserError: one is too long to be held in memory."""
    for number, line in enumerate(iter(partial(file.readline, MAX_JSON_LINE + 1), b""), start=1):
        if len(line) > MAX_JSON_LINE:
            raise UserError(f"{what} line {number} is over {MAX_JSON_LINE >> 20} MiB: {remedy}")
        yield number, line


@contextlib.contextmanager
def opened(entry: Entry) -> Iterator[BinaryIO]:
    """The decompressed bytes. Raises UserError if they cannot be read or are cut short, also while they are read."""
    with readable(entry), contextlib.ExitStack() as stack:
        if entry.member is None:
            file = stack.enter_context(open(entry.file, "rb"))
        else:
            with _known(entry, entry.path):
                file = _archive(entry.path, entry.path.stat().st_mtime_ns).open(entry.member)
            stack.enter_context(file)
        if opener := _OPENERS.get(os.path.splitext(entry.name.lower())[1]):
            file = stack.enter_context(opener(file))
        yield file


def read_blocks(entry: Entry) -> Iterator[bytes]:
    """The decompressed bytes in blocks of 1 MiB."""
    with opened(entry) as file:
        yield from iter(partial(file.read, _BLOCK), b"")


@lru_cache(maxsize=1)
def _archive(path: Path, changed: int) -> zipfile.ZipFile:
    """Kept open: an archive of thousands of files has a long directory, which would be read for each."""
    return zipfile.ZipFile(path)


def _open_zstd(file: BinaryIO) -> BinaryIO:
    # zstandard's own reader ends a file cut short as if it were whole.
    try:
        import pyarrow
    except ImportError:
        raise UserError(f"{file.name} needs the package pyarrow: pip install pyarrow") from None
    return io.BufferedReader(pyarrow.CompressedInputStream(file, "zstd"), _BLOCK)


_OPENERS = {".gz": gzip.open, ".xz": lzma.open, ".bz2": bz2.open, ".zst": _open_zstd}


def digest_entries(entries: Sequence[Entry], places: bool) -> str:
    """sha256 over the files as they are on the disk, their formats and the members' names, or all ``places``."""
    digest = hashlib.sha256()
    for path, members in groupby(entries, key=attrgetter("path")):
        listed = list(members)
        with readable(path):
            digest.update(bytes.fromhex(file_digest(listed[0].file)))
        for entry in listed:
            digest.update(os.fsencode(f"{entry.kind}:{entry.place if places else entry.member or ''}") + b"\0")
    return digest.hexdigest()
