"""JSON records, and JSON-lines files to which several processes append."""

import contextlib
import fcntl
import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from fairseq_rpe.core.errors import UserError
from fairseq_rpe.utils.files import atomic_write, make_parents, read_input
from fairseq_rpe.utils.output_checks import check_plain_file

# Ends of messages about damage in files that this package wrote.
RESTORE, DELETE_LINE = "restore it or delete it", "delete that line or the file"


def write_json(path: Path, value: Any) -> None:
    """Write ``value`` as JSON, atomically."""
    atomic_write(path, json.dumps(value, indent=2) + "\n")


def parse_json_object(text: str | bytes, source: object, remedy: str, line: int = 1) -> dict[str, Any]:
    """Parse a JSON object.

    Args:
        text: The text; bytes are UTF-8.
        source: Name of the file, for the message.
        remedy: What the user can do, as the end of the message.
        line: Number of the line of ``source`` in which ``text`` begins, from 1.

    Returns:
        The object as a dict.

    Raises:
        UserError: ``text`` is not a JSON object; the message names the line.
    """
    try:
        value = json.loads(text if isinstance(text, str) else text.decode("utf-8"))
        if isinstance(value, dict):
            return value
        why = "it is a list" if isinstance(value, list) else "it is a single value"
    except UnicodeDecodeError as error:
        line, why = line + error.object.count(b"\n", 0, error.start), "not UTF-8"
    except json.JSONDecodeError as error:
        line, why = line + error.lineno - 1, f"{error.msg} at character {error.colno}"
    except ValueError as error:  # an integer of thousands of digits
        why = str(error).partition(";")[0]
    except RecursionError:
        why = "nested too deep"
    raise UserError(f"{source} line {line} is not a JSON object ({why}): {remedy}")


def read_json(path: Path) -> dict[str, Any]:
    """Read a JSON object from a file that this package wrote.

    Raises:
        UserError: The file does not exist, is not a plain file or is damaged.
        OSError: The file cannot be read.
    """
    try:
        text = read_input(path)
    except FileNotFoundError:
        raise UserError(f"{path} does not exist") from None
    return parse_json_object(text, path, RESTORE)


def read_json_lines(path: Path) -> list[dict[str, Any]]:
    """Read the objects of a JSON-lines file; none if there is no such file.

    A last line that a killed process left unfinished is ignored.

    Raises:
        UserError: Another line is damaged, or ``path`` is not a plain file.
        OSError: The file cannot be read.
    """
    if not path.exists():
        return []
    lines = read_input(path).split(b"\n")
    if not lines[-1] or _is_unfinished(lines[-1]):
        del lines[-1]
    return [parse_json_object(line, path, DELETE_LINE, n) for n, line in enumerate(lines, start=1)]


def append_json_line(path: Path, row: dict[str, Any]) -> None:
    """Append a row to a JSON-lines file to which other processes may append too.

    Only the last line is read, however long the file is. The row is synced to disk on return. A last line that a killed
    process left unfinished is removed first.

    Args:
        path: The file; it and its folder are created if they are missing.
        row: An object that :func:`json.dumps` accepts.

    Raises:
        UserError: ``path`` is not a plain file, or its last line is damaged in another way; the file is unchanged.
        OSError: The row cannot be written; the file ends as before, and is removed if it has no row.
    """
    check_plain_file("file", path)
    line = json.dumps(row).encode() + b"\n"
    with make_parents(path), _lock_for_append(path) as handle:
        end = os.lseek(handle, 0, os.SEEK_END)
        tail = _read_last_line(handle, end)
        if _is_unfinished(tail):
            end -= len(tail)
        elif tail:  # written by hand, without a newline
            if not _is_object(tail):
                read_json_lines(path)  # raises, with the number of the line
            line = b"\n" + line
        try:
            _write_at(handle, end, line)
        except OSError as error:
            with contextlib.suppress(OSError):
                os.ftruncate(handle, end)
                if end == 0:
                    path.unlink()
            error.filename = error.filename or str(path)
            raise


def _write_at(handle: int, end: int, line: bytes) -> None:
    """Truncate the file to ``end`` bytes, append ``line`` and sync it to disk."""
    os.ftruncate(handle, end)
    os.lseek(handle, end, os.SEEK_SET)
    unwritten = memoryview(line)
    while unwritten:  # a write may end early, such as at a signal
        unwritten = unwritten[os.write(handle, unwritten) :]
    os.fsync(handle)


@contextlib.contextmanager
def _lock_for_append(path: Path) -> Iterator[int]:
    """Wait for the lock of a file, which is created if it is missing, and yield its descriptor."""
    while True:
        handle = os.open(path, os.O_RDWR | os.O_CREAT, 0o666)
        try:
            fcntl.flock(handle, fcntl.LOCK_EX)
            # Another process may have replaced or removed the file meanwhile: its lock no longer guards this path.
            if path.exists() and os.path.samestat(os.fstat(handle), os.stat(path)):
                yield handle
                return
        finally:
            os.close(handle)


def _read_last_line(handle: int, end: int, block: int = 4096) -> bytes:
    """Return the bytes after the last newline of a file of ``end`` bytes, which is read backwards in blocks."""
    tail = b""
    while end > 0 and b"\n" not in tail:
        start = max(0, end - block)
        tail = os.pread(handle, end - start, start) + tail
        end = start
    return tail.rpartition(b"\n")[2]


def _is_unfinished(tail: bytes) -> bool:
    """Whether the bytes after the last newline are the beginning of a row, as a killed process leaves it.

    After a power failure, null bytes may replace the end.
    """
    return bool(tail) and tail.rstrip(b"\0")[:1] in (b"", b"{") and not _is_object(tail)


def _is_object(text: bytes) -> bool:
    try:
        return isinstance(json.loads(text), dict)
    except (ValueError, RecursionError):
        return False
