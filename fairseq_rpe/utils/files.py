"""Atomic writes, JSON and JSON lines, checks of paths, digests and locks."""

import contextlib
import errno
import fcntl
import hashlib
import json
import os
import stat
import sys
import tempfile
from collections.abc import Callable, Iterable, Iterator, Sequence
from io import BufferedReader
from pathlib import Path
from typing import Any

from fairseq_rpe.core.errors import UserError, oserror_message, shorten_path, user_message

# the folder of this package, for fairseq's --user-dir
PACKAGE_DIR = Path(__file__).resolve().parents[1]
CACHE_VARIABLE = "FAIRSEQ_RPE_CACHE"  # folder of measurements of this machine, or "off"
# remedies for damage in files that this package wrote
RESTORE, DELETE_LINE = "restore it or delete it", "delete that line or the file"


def write_via_temporary(path: Path, write: Callable[[Path], Any]) -> None:
    """Write a file atomically: fill a temporary file in the same folder, then rename it onto ``path``.

    Args:
        path: The file; its folder is created if it is missing.
        write: Fills the file at the path that it is called with.

    Raises:
        UserError: ``path`` is a folder, a device, a pipe or a socket.
        OSError: The file cannot be written.
    """
    check_plain_file("file", path)
    with make_parents(path), add_path_to_errors(path):
        # the temporary name keeps the suffix, from which matplotlib and others derive the format
        handle, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.stem}-", suffix=path.suffix)
        os.close(handle)
        temporary = Path(name)
        try:
            write(temporary)
            with open(temporary, "rb") as file:
                os.fsync(file.fileno())
            mask = os.umask(0)
            os.umask(mask)
            temporary.chmod(0o666 & ~mask)
            temporary.replace(path)
        finally:
            temporary.unlink(missing_ok=True)


@contextlib.contextmanager
def make_parents(path: Path) -> Iterator[None]:
    """Create the missing folders above ``path``; if the body fails, remove those of them that are empty."""
    with remove_empty_on_failure([folder for folder in path.parents if not folder.exists()]):
        path.parent.mkdir(parents=True, exist_ok=True)
        yield


@contextlib.contextmanager
def remove_if_refused(path: Path) -> Iterator[None]:
    """If the body raises a UserError, remove ``path`` and the folders above it unless they existed before."""
    existed = path.exists()
    with remove_empty_on_failure([folder for folder in path.parents if not folder.exists()]):
        try:
            yield
        except UserError:
            if not existed:
                path.unlink(missing_ok=True)
            raise


@contextlib.contextmanager
def remove_empty_on_failure(folders: Sequence[Path]) -> Iterator[None]:
    """If the body fails, remove those of the ``folders`` that are empty, in this order."""
    try:
        yield
    except BaseException:
        for folder in folders:
            with contextlib.suppress(OSError):
                folder.rmdir()
        raise


@contextlib.contextmanager
def add_path_to_errors(path: Path) -> Iterator[None]:
    """Set ``path`` in an OSError that names no path (such as a full disk), or names a temporary file of ``path``."""
    try:
        yield
    except OSError as error:
        is_temporary = isinstance(error.filename, str) and Path(error.filename).name.startswith(f".{path.stem}-")
        if error.filename is None or isinstance(error.filename, int) or is_temporary:
            error.filename = str(path)
        raise


def atomic_write(path: Path, text: str) -> None:
    """Write ``text`` atomically: a reader sees the old file or the new one, never a part."""
    write_via_temporary(path, lambda temporary: temporary.write_bytes(text.encode(errors="surrogateescape")))


def write_json(path: Path, value: Any) -> None:
    """Write ``value`` as JSON, atomically."""
    atomic_write(path, json.dumps(value, indent=2) + "\n")


def parse_json_object(text: str | bytes, source: object, remedy: str, line: int = 1) -> dict[str, Any]:
    """Parse a JSON object.

    Args:
        text: The text; bytes are UTF-8.
        source: Name of the file, for the message.
        remedy: End of the message.
        line: Line of ``source`` in which ``text`` begins.

    Returns:
        The object.

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


def open_input(path: Path) -> BufferedReader:
    """Open a plain file for reading.

    A pipe would block until somebody writes into it, a device may never end, and neither can be read twice.

    Raises:
        UserError: It is a folder, a device, a pipe or a socket.
        OSError: It does not exist or may not be read; the error names the path.
    """
    kind = os.stat(path).st_mode
    if stat.S_ISDIR(kind):
        raise UserError(f"{shorten_path(path)} is a folder: name a file")
    if not stat.S_ISREG(kind):
        raise UserError(f"{shorten_path(path)} is a device, a pipe or a socket: name a plain file")
    return open(path, "rb")


def read_input(path: Path) -> bytes:
    """Return the contents of a plain file; errors are those of :func:`open_input`."""
    with add_path_to_errors(path), open_input(path) as file:
        return file.read()


def read_json(path: Path) -> dict[str, Any]:
    """Read a JSON object from a file that this package wrote.

    Raises:
        UserError: The file does not exist or is damaged.
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
        UserError: Another line is damaged.
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
    with make_parents(path), _locked_for_append(path) as handle:
        end = os.lseek(handle, 0, os.SEEK_END)
        tail = _after_last_newline(handle, end)
        if _is_unfinished(tail):
            end -= len(tail)
        elif tail:  # written by hand, without a newline
            if not _is_object(tail):
                read_json_lines(path)  # raises, with the number of the line
            line = b"\n" + line
        try:
            os.ftruncate(handle, end)
            os.lseek(handle, end, os.SEEK_SET)
            unwritten = memoryview(line)
            while unwritten:
                unwritten = unwritten[os.write(handle, unwritten) :]
            os.fsync(handle)
        except OSError as error:
            with contextlib.suppress(OSError):
                os.ftruncate(handle, end)
                if end == 0:
                    path.unlink()
            error.filename = error.filename or str(path)
            raise


@contextlib.contextmanager
def _locked_for_append(path: Path) -> Iterator[int]:
    """Wait for the lock of a file and yield its descriptor; the lock is held until the end."""
    while True:
        handle = os.open(path, os.O_RDWR | os.O_CREAT, 0o666)
        try:
            fcntl.flock(handle, fcntl.LOCK_EX)
            # another process may have replaced or removed the file meanwhile
            if path.exists() and os.path.samestat(os.fstat(handle), os.stat(path)):
                yield handle
                return
        finally:
            os.close(handle)


def _after_last_newline(handle: int, end: int, block: int = 4096) -> bytes:
    """The bytes after the last newline of a file of ``end`` bytes."""
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


def check_plain_file(flag: str, path: Path) -> None:
    """Refuse an existing path that is not a plain file, such as a folder or a device.

    Raises:
        UserError: It is not a plain file; the message begins with ``flag``.
    """
    try:
        kind = os.stat(path).st_mode
    except (FileNotFoundError, NotADirectoryError):
        return
    except OSError as error:
        raise UserError(_refusal(flag, path, error)) from None
    if stat.S_ISDIR(kind):
        raise UserError(f"{flag} {shorten_path(path)} is a folder: name a file")
    if not stat.S_ISREG(kind):
        raise UserError(f"{flag} {shorten_path(path)} is a device, a pipe or a socket: name a plain file")


# what trainings, sweeps and prepared folders are read from
_RECORDS = {"answers.json", "corpus.json", "environment.json", "run.json", "sweep.json"}


def check_output_file(flag: str, path: Path) -> None:
    """Refuse, before any work, a file that could not be written; leaves nothing behind.

    Raises:
        UserError: It cannot be written; the message begins with ``flag``.
    """
    check_plain_file(flag, path)
    if path.exists() and not os.access(path, os.W_OK):
        raise UserError(f"{flag} {shorten_path(path)} can only be read: change its permissions or name another one")
    # as long as the temporary name of the file
    _try_out(flag, path, path.parent, f".{path.stem}-{path.suffix}")


def check_overwrite(flag: str, path: Path, suffix: str) -> None:
    """Refuse an output file that would overwrite a file of another kind.

    Args:
        flag: Option that names the file, for the message.
        path: The file, which need not exist.
        suffix: Suffix of the files that the command writes.

    Raises:
        UserError: The file exists and has another suffix or the name of a record of this package, or it cannot be
            written.
    """
    check_plain_file(flag, path)
    if path.exists() and (path.suffix != suffix or path.name in _RECORDS):
        raise UserError(
            f"{flag} {shorten_path(path)} exists and would be replaced: name another one, which ends in {suffix}"
        )
    check_output_file(flag, path)


def check_output_folder(folder: Path, names: Iterable[str] = (), flag: str = "--out") -> None:
    """Refuse, before any work, a folder in which files could not be written; leaves nothing behind.

    Args:
        folder: The folder, which need not exist.
        names: Names of the files.
        flag: Option that names the folder, for the message.

    Raises:
        UserError: The files could not be written.
    """
    _try_out(flag, folder, folder, ".try-")
    for name in names:
        check_plain_file(flag, folder / name)


def _try_out(flag: str, path: Path, folder: Path, name: str) -> None:
    """Write and remove a temporary file in ``folder``, or in a temporary folder of its closest existing parent.

    A missing folder itself is not created: two processes that try the same one would remove each other's.
    """
    try:
        parent, missing = Path(), []
        for path_part in (*reversed(folder.parents), folder):
            try:
                if not stat.S_ISDIR(os.stat(path_part).st_mode):
                    where = f"{flag} {shorten_path(path)}: {shorten_path(path_part)}"
                    raise UserError(f"{where} is a file, not a folder: name another one")
                parent = path_part
            except FileNotFoundError:
                if path_part.is_symlink():
                    where = f"{flag} {shorten_path(path)}: {shorten_path(path_part)}"
                    raise UserError(f"{where} is a link to nothing, not a folder: name another one") from None
                missing.append(path_part)
        with contextlib.ExitStack() as stack:
            if missing:
                try:
                    parent = Path(stack.enter_context(tempfile.TemporaryDirectory(dir=parent, prefix=name)))
                except OSError as error:
                    error.filename = str(missing[0])  # the folder that could not be created
                    raise
            file = stack.enter_context(tempfile.NamedTemporaryFile(dir=parent, prefix=name))
            file.write(bytes(4096))
            file.flush()
            os.fsync(file.fileno())
    except (OSError, RuntimeError) as error:
        raise UserError(_refusal(flag, path, error, name)) from None


def _refusal(flag: str, path: Path, error: Exception, temporary: str = "") -> str:
    """Message about the path that a flag names; the name of a ``temporary`` file is not shown."""
    if isinstance(error, OSError):
        hidden = error.filename is None or (temporary and Path(error.filename).name.startswith(temporary))
        message = oserror_message(error, path if hidden else None) or str(error)
    else:
        message = user_message(error) or str(error)
    return f"{flag} {message}" if message.startswith(shorten_path(path)) else f"{flag} {shorten_path(path)}: {message}"


def sha256_of_files(*paths: Path) -> str:
    """Return the SHA-256 of the contents of the files, in order."""
    digest = hashlib.sha256()
    for path in paths:
        with add_path_to_errors(path), open_input(path) as file:
            hashlib.file_digest(file, lambda: digest)
    return digest.hexdigest()


def vocabulary_digest(symbols: Sequence[str]) -> str:
    """Return the SHA-256 of the symbols of a dictionary in the order of their ids; checkpoints record it."""
    return hashlib.sha256("\n".join(symbols).encode()).hexdigest()


@contextlib.contextmanager
def exclusive_lock(path: Path, busy: str, wait: bool = False, folder: bool = False) -> Iterator[int]:
    """Hold an exclusive lock on ``path``, a file or an existing folder.

    A process that inherits the descriptor keeps the lock as long as it runs, so a trainer whose parent was killed still
    excludes others.

    Args:
        path: A file is created if it is missing; it remains, except after a UserError in an otherwise empty folder.
        busy: Message if another process holds the lock.
        wait: Print the message on standard error and wait, instead of raising it.
        folder: ``path`` is a folder and is not to be created as a file.

    Yields:
        The file descriptor.

    Raises:
        UserError: Another process holds the lock.
        FileNotFoundError: ``folder``, and the folder has been removed.
    """
    created = [] if folder else [missing for missing in (path, *path.parents) if not missing.exists()]
    handle = os.open(path, os.O_RDONLY | os.O_DIRECTORY) if folder else _open_for_lock(path)
    try:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            if not wait:
                raise UserError(busy) from None
            print(busy, file=sys.stderr)
            fcntl.flock(handle, fcntl.LOCK_EX)
        if not path.exists() or not os.path.samestat(os.fstat(handle), os.stat(path)):
            # the process that had created it has just failed and removed it
            if folder:
                raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), str(path))
            raise UserError(busy)
        try:
            yield handle
        except UserError:
            _remove_if_empty(created)
            raise
    finally:
        os.close(handle)


def _open_for_lock(path: Path) -> int:
    def open_lock() -> int:
        path.parent.mkdir(parents=True, exist_ok=True)
        return os.open(path, os.O_RDONLY if path.is_dir() else os.O_RDWR | os.O_CREAT, 0o644)

    for _ in range(4):
        with contextlib.suppress(
            FileNotFoundError
        ):  # another process was refused and removed the folder that it had created
            return open_lock()
    return open_lock()


def _remove_if_empty(created: list[Path]) -> None:
    """Remove a lock and the folders that were created for it, unless they contain something else."""
    if created and os.listdir(created[0].parent) == [created[0].name]:
        created[0].unlink()
        for folder in created[1:]:
            with contextlib.suppress(OSError):
                folder.rmdir()
