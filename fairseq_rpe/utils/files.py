"""Atomic writes, locks and digests of files."""

import contextlib
import errno
import fcntl
import hashlib
import os
import stat
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from io import BufferedReader
from pathlib import Path
from typing import Any

from fairseq_rpe.core.errors import UserError, shorten_path
from fairseq_rpe.utils.output_checks import check_plain_file

# the folder of this package, for fairseq's --user-dir
PACKAGE_DIR = Path(__file__).resolve().parents[1]
CACHE_VARIABLE = "FAIRSEQ_RPE_CACHE"  # environment variable: folder of measurements of this machine, or "off"
# Tries to open a lock. A process that was refused removes the folders that it created, perhaps just before another one
# opens its lock there, which then creates them anew. Only five such processes in a row make that fail.
_OPEN_ATTEMPTS = 5


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
            # Sync before the rename, else a power failure may leave an empty file under the name.
            with open(temporary, "rb") as file:
                os.fsync(file.fileno())
            # mkstemp makes the file private; give it the permissions of an ordinary new file. The umask can only be
            # read by setting it.
            mask = os.umask(0)
            os.umask(mask)
            temporary.chmod(0o666 & ~mask)
            temporary.replace(path)
        finally:
            temporary.unlink(missing_ok=True)


@contextlib.contextmanager
def make_parents(path: Path) -> Iterator[None]:
    """Create the missing folders above ``path``; if the body fails, remove those of them that are empty."""
    with remove_empty_on_failure(_missing_parents(path)):
        path.parent.mkdir(parents=True, exist_ok=True)
        yield


@contextlib.contextmanager
def remove_if_refused(path: Path) -> Iterator[None]:
    """Remove what the body has created if it fails.

    After a UserError, ``path`` is removed unless it existed before. After any error, those folders above it are removed
    that did not exist before and are empty.
    """
    existed = path.exists()
    with remove_empty_on_failure(_missing_parents(path)):
        try:
            yield
        except UserError:
            if not existed:
                path.unlink(missing_ok=True)
            raise


def _missing_parents(path: Path) -> list[Path]:
    """Return the folders above ``path`` that do not exist, innermost first."""
    return [folder for folder in path.parents if not folder.exists()]


@contextlib.contextmanager
def remove_empty_on_failure(folders: Sequence[Path]) -> Iterator[None]:
    """If the body fails, remove those of the ``folders`` that are empty.

    Args:
        folders: The folders, innermost first: an outer one is empty only when the inner one is removed.

    Yields:
        Nothing.
    """
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
        # the prefix of mkstemp in `write_via_temporary`
        is_temporary = isinstance(error.filename, str) and Path(error.filename).name.startswith(f".{path.stem}-")
        if error.filename is None or isinstance(error.filename, int) or is_temporary:
            error.filename = str(path)
        raise


def atomic_write(path: Path, text: str) -> None:
    """Write ``text`` atomically: a reader sees the old file or the new one, never a part."""
    write_via_temporary(path, lambda temporary: temporary.write_bytes(text.encode(errors="surrogateescape")))


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


def sha256_of_files(*paths: Path) -> str:
    """Return the SHA-256 of the contents of the files, in order."""
    digest = hashlib.sha256()
    for path in paths:
        with add_path_to_errors(path), open_input(path) as file:
            # file_digest calls its argument for a new digest; this one goes on from the previous file
            hashlib.file_digest(file, lambda: digest)
    return digest.hexdigest()


def vocabulary_digest(symbols: Sequence[str]) -> str:
    """Return the SHA-256 of the symbols of a dictionary in the order of their ids; checkpoints record it."""
    return hashlib.sha256("\n".join(symbols).encode()).hexdigest()


@contextlib.contextmanager
def exclusive_lock(path: Path, busy: str, wait: bool = False, folder: bool = False) -> Iterator[int]:
    """Hold an exclusive lock on ``path``, a file or an existing folder.

    The lock belongs to the open descriptor, not to the process: a child that inherits the descriptor keeps the lock as
    long as it runs, so a trainer whose parent was killed still excludes others.

    Args:
        path: A file is created if it is missing, with its folders. It remains, except after a UserError in the body if
            its folder contains nothing else.
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
        _acquire(handle, busy, wait)
        # The process that created the path may have removed it between open and lock. Then this lock is on a file that
        # nobody else can open, and excludes nobody.
        if not path.exists() or not os.path.samestat(os.fstat(handle), os.stat(path)):
            if folder:
                raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), str(path))
            raise UserError(busy)
        try:
            yield handle
        except UserError:
            # refused before any work: leave no folder that looks like a run
            _remove_created_lock(created)
            raise
    finally:
        os.close(handle)


def _acquire(handle: int, busy: str, wait: bool) -> None:
    """Lock an open file; if another process holds the lock, raise ``busy``, or print it and wait."""
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        if not wait:
            raise UserError(busy) from None
        print(busy, file=sys.stderr)
        fcntl.flock(handle, fcntl.LOCK_EX)


def _open_for_lock(path: Path) -> int:
    """Open a lock file, and create it and its folders if they are missing; return the descriptor."""
    attempts_left = _OPEN_ATTEMPTS
    while True:
        attempts_left -= 1
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            # an existing folder can be locked, too, but not opened for writing
            return os.open(path, os.O_RDONLY if path.is_dir() else os.O_RDWR | os.O_CREAT, 0o644)
        except FileNotFoundError:  # another process has removed the folder since mkdir
            if not attempts_left:
                raise


def _remove_created_lock(created: list[Path]) -> None:
    """Remove a lock file and the folders that were created for it, unless its folder contains something else.

    Args:
        created: The lock file, if it was created, then the folders above it that were created, innermost first.
    """
    if created and os.listdir(created[0].parent) == [created[0].name]:
        created[0].unlink()
        for folder in created[1:]:
            with contextlib.suppress(OSError):
                folder.rmdir()
