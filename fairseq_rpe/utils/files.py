"""Files that are whole or absent: atomic writes, digests, JSON lines and locks."""

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

from fairseq_rpe.core.errors import UserError, os_line, shown, told

# what fairseq's --user-dir wants
PACKAGE = Path(__file__).resolve().parents[1]
CACHE = "FAIRSEQ_RPE_CACHE"  # names the folder of what was found out on this machine, or says off
# what helps where a file that was written here is damaged
RESTORE, DELETE_LINE = "restore it or delete it", "delete that line or the file"


def replace_with(path: Path, write: Callable[[Path], Any]) -> None:
    """Let ``write`` fill a temporary file beside ``path``, then rename it onto ``path``, never onto a device."""
    check_kind("file", path)
    with parents(path), naming(path):
        # matplotlib and others choose the format by the ending, so the temporary name keeps it.
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
def parents(path: Path) -> Iterator[None]:
    """Make the missing folders above ``path``. Where what follows fails, those of them that are empty are removed."""
    with removed_on_failure([folder for folder in path.parents if not folder.exists()]):
        path.parent.mkdir(parents=True, exist_ok=True)
        yield


@contextlib.contextmanager
def removed_if_refused(path: Path) -> Iterator[None]:
    """Where what follows raises a UserError, remove a file, and the folders above it, that were not there before."""
    there = path.exists()
    with removed_on_failure([folder for folder in path.parents if not folder.exists()]):
        try:
            yield
        except UserError:
            if not there:
                path.unlink(missing_ok=True)
            raise


@contextlib.contextmanager
def removed_on_failure(folders: Sequence[Path]) -> Iterator[None]:
    """Where what follows fails, remove those of the ``folders`` that are empty, in this order."""
    try:
        yield
    except BaseException:
        for folder in folders:
            with contextlib.suppress(OSError):
                folder.rmdir()
        raise


@contextlib.contextmanager
def naming(path: Path) -> Iterator[None]:
    """Name ``path`` in errors of the system that name no path, such as a full disk, or a temporary file beside it."""
    try:
        yield
    except OSError as error:
        beside = isinstance(error.filename, str) and Path(error.filename).name.startswith(f".{path.stem}-")
        if error.filename is None or isinstance(error.filename, int) or beside:
            error.filename = str(path)
        raise


def atomic_write(path: Path, text: str) -> None:
    """Write ``text`` so that a reader sees the old file or the new one, never a part."""
    replace_with(path, lambda temporary: temporary.write_bytes(text.encode(errors="surrogateescape")))


def write_json(path: Path, value: Any) -> None:
    atomic_write(path, json.dumps(value, indent=2) + "\n")


def json_object(text: str | bytes, source: object, remedy: str, line: int = 1) -> dict[str, Any]:
    """The JSON object in ``text``, which begins in this ``line`` of ``source``.

    Raises UserError: there is none; it names the line and ends with the ``remedy``.
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
    except ValueError as error:  # a number of thousands of digits
        why = str(error).partition(";")[0]
    except RecursionError:
        why = "nested too deep"
    raise UserError(f"{source} line {line} is not a JSON object ({why}): {remedy}")


def open_input(path: Path) -> BufferedReader:
    """Open a plain file to read.

    A pipe would block for as long as nobody writes into it, a device may never end, and neither can be read twice.

    Raises:
        UserError: it is a folder, a device, a pipe or a socket.
        OSError: it does not exist or may not be read; it names the path.
    """
    kind = os.stat(path).st_mode
    if stat.S_ISDIR(kind):
        raise UserError(f"{shown(path)} is a folder: name a file")
    if not stat.S_ISREG(kind):
        raise UserError(f"{shown(path)} is a device, a pipe or a socket: name a plain file")
    return open(path, "rb")


def read_input(path: Path) -> bytes:
    """All of a plain file. Raises UserError and OSError as :func:`open_input`."""
    with naming(path), open_input(path) as file:
        return file.read()


def read_json(path: Path) -> dict[str, Any]:
    try:
        text = read_input(path)
    except FileNotFoundError:
        raise UserError(f"{path} does not exist") from None
    return json_object(text, path, RESTORE)


def read_json_lines(path: Path) -> list[dict[str, Any]]:
    """The objects of a JSON-lines file, nothing if there is no such file.

    A last line that a killed process left unfinished is no row. Raises UserError: another line is damaged.
    """
    if not path.exists():
        return []
    lines = read_input(path).split(b"\n")
    if not lines[-1] or _is_unfinished(lines[-1]):
        del lines[-1]
    return [json_object(line, path, DELETE_LINE, n) for n, line in enumerate(lines, start=1)]


def append_json_line(path: Path, row: dict[str, Any]) -> None:
    """Append a row to a JSON-lines file, while other processes append to it too; create the file if it is missing.

    It reads and writes no more than the last line and the new one, however long the file is. The row is on the disk
    when it returns. A last line that a killed process left unfinished is cut off first.

    Args:
        path: the file; its folder is created if it is missing.
        row: what :func:`json.dumps` can write.

    Raises:
        UserError: ``path`` is no plain file, or its last line is damaged otherwise; it is then untouched.
        OSError: the row cannot be written; the file then ends as before, and one without any row is removed.
    """
    check_kind("file", path)
    line = json.dumps(row).encode() + b"\n"
    with parents(path), _locked_for_append(path) as handle:
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
            left = memoryview(line)
            while left:
                left = left[os.write(handle, left) :]
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
    """The descriptor of a file that is locked until the end, once no other process holds its lock."""
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
    """What follows the last newline of a file of ``end`` bytes."""
    tail = b""
    while end > 0 and b"\n" not in tail:
        start = max(0, end - block)
        tail = os.pread(handle, end - start, start) + tail
        end = start
    return tail.rpartition(b"\n")[2]


def _is_unfinished(tail: bytes) -> bool:
    """Whether what follows the last newline is the beginning of a row, as a process leaves it that is killed.

    After a power failure, null bytes may stand where the rest had been.
    """
    return bool(tail) and tail.rstrip(b"\0")[:1] in (b"", b"{") and not _is_object(tail)


def _is_object(text: bytes) -> bool:
    try:
        return isinstance(json.loads(text), dict)
    except (ValueError, RecursionError):
        return False


def check_kind(flag: str, path: Path) -> None:
    """Refuse what is no plain file, be it a folder or a device; one that is not there is none of these."""
    try:
        kind = os.stat(path).st_mode
    except (FileNotFoundError, NotADirectoryError):
        return
    except OSError as error:
        raise UserError(_refusal(flag, path, error)) from None
    if stat.S_ISDIR(kind):
        raise UserError(f"{flag} {shown(path)} is a folder: name a file")
    if not stat.S_ISREG(kind):
        raise UserError(f"{flag} {shown(path)} is a device, a pipe or a socket: name a plain file")


# what trainings, sweeps and prepared folders are read from
_RECORDS = {"answers.json", "corpus.json", "environment.json", "run.json", "sweep.json"}


def check_file(flag: str, path: Path) -> None:
    """Refuse, before any work, a file that could not be written. Leaves nothing behind."""
    check_kind(flag, path)
    if path.exists() and not os.access(path, os.W_OK):
        raise UserError(f"{flag} {shown(path)} can only be read: change its permissions or name another one")
    # the temporary name of a file is longer than its own
    _try_out(flag, path, path.parent, f".{path.stem}-{path.suffix}")


def check_replaced(flag: str, path: Path, suffix: str) -> None:
    """Refuse, as a file to write, one that exists and holds something else.

    Args:
        flag: the option that names the file, for the message.
        path: it need not exist.
        suffix: of the files that the command writes.

    Raises:
        UserError: the file exists and has another suffix, or the name of a record of this package; or it cannot be
            written.
    """
    check_kind(flag, path)
    if path.exists() and (path.suffix != suffix or path.name in _RECORDS):
        raise UserError(f"{flag} {shown(path)} exists and would be replaced: name another one, which ends in {suffix}")
    check_file(flag, path)


def check_folder(folder: Path, names: Iterable[str] = (), flag: str = "--out") -> None:
    """Refuse, before any work, a folder in which files with these names could not be written. Leaves nothing behind."""
    _try_out(flag, folder, folder, ".try-")
    for name in names:
        check_kind(flag, folder / name)


def _try_out(flag: str, path: Path, folder: Path, name: str) -> None:
    """Write a file of some bytes in ``folder`` and remove it; where there is no such folder yet, in one made beside.

    The folder itself is not made: others may be trying the same one at the same time, and each would remove the
    other's.
    """
    try:
        there, missing = Path(), []
        for part in (*reversed(folder.parents), folder):
            try:
                if not stat.S_ISDIR(os.stat(part).st_mode):
                    raise UserError(f"{flag} {shown(path)}: {shown(part)} is a file, not a folder: name another one")
                there = part
            except FileNotFoundError:
                if part.is_symlink():
                    where = f"{flag} {shown(path)}: {shown(part)}"
                    raise UserError(f"{where} is a link to nothing, not a folder: name another one") from None
                missing.append(part)
        with contextlib.ExitStack() as stack:
            if missing:
                try:
                    there = Path(stack.enter_context(tempfile.TemporaryDirectory(dir=there, prefix=name)))
                except OSError as error:
                    error.filename = str(missing[0])  # what could not be made
                    raise
            file = stack.enter_context(tempfile.NamedTemporaryFile(dir=there, prefix=name))
            file.write(bytes(4096))
            file.flush()
            os.fsync(file.fileno())
    except (OSError, RuntimeError) as error:
        raise UserError(_refusal(flag, path, error, name)) from None


def _refusal(flag: str, path: Path, error: Exception, temporary: str = "") -> str:
    """What was wrong with the place that a flag names; a ``temporary`` file's name is not shown."""
    if isinstance(error, OSError):
        hidden = error.filename is None or (temporary and Path(error.filename).name.startswith(temporary))
        said = os_line(error, path if hidden else None) or str(error)
    else:
        said = told(error) or str(error)
    return f"{flag} {said}" if said.startswith(shown(path)) else f"{flag} {shown(path)}: {said}"


def file_digest(*paths: Path) -> str:
    """The sha256 over the contents of the files, in order."""
    digest = hashlib.sha256()
    for path in paths:
        with naming(path), open_input(path) as file:
            hashlib.file_digest(file, lambda: digest)
    return digest.hexdigest()


def vocabulary_digest(symbols: Sequence[str]) -> str:
    """The sha256 over a dictionary's symbols by id, which a checkpoint keeps."""
    return hashlib.sha256("\n".join(symbols).encode()).hexdigest()


@contextlib.contextmanager
def lock(path: Path, busy: str, wait: bool = False, folder: bool = False) -> Iterator[int]:
    """Hold an exclusive lock on ``path``, a file or a folder that is there; yields its file descriptor.

    A process that inherits the descriptor keeps the lock for as long as it lives, so that a
    trainer whose parent was killed still keeps others out.

    Args:
        path: a file is made if it is missing, and stays, unless a UserError leaves nothing else beside it.
        busy: what to say when somebody else holds the lock.
        wait: say it on standard error and wait, instead of raising it.
        folder: ``path`` is a folder, never to be made as a file.

    Raises:
        UserError: ``busy``, when somebody else holds the lock.
        FileNotFoundError: ``folder``, and it has been removed.
    """
    made = [] if folder else [part for part in (path, *path.parents) if not part.exists()]
    handle = os.open(path, os.O_RDONLY | os.O_DIRECTORY) if folder else _opened_for_lock(path)
    try:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            if not wait:
                raise UserError(busy) from None
            print(busy, file=sys.stderr)
            fcntl.flock(handle, fcntl.LOCK_EX)
        if not path.exists() or not os.path.samestat(os.fstat(handle), os.stat(path)):
            # whoever had made it has just failed and removed it
            if folder:
                raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), str(path))
            raise UserError(busy)
        try:
            yield handle
        except UserError:
            _remove(made)
            raise
    finally:
        os.close(handle)


def _opened_for_lock(path: Path) -> int:
    def opened() -> int:
        path.parent.mkdir(parents=True, exist_ok=True)
        return os.open(path, os.O_RDONLY if path.is_dir() else os.O_RDWR | os.O_CREAT, 0o644)

    for _ in range(4):
        with contextlib.suppress(FileNotFoundError):  # whoever was refused has just removed the folder they had made
            return opened()
    return opened()


def _remove(made: list[Path]) -> None:
    """Remove a lock and the folders that were made for it, where nothing else has come into them."""
    if made and os.listdir(made[0].parent) == [made[0].name]:
        made[0].unlink()
        for folder in made[1:]:
            with contextlib.suppress(OSError):
                folder.rmdir()
