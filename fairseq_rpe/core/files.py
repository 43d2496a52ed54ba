"""Files that are whole or absent: atomic writes, digests, JSON lines and locks."""

import contextlib
import fcntl
import hashlib
import json
import os
import sys
import tempfile
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

from fairseq_rpe.core.errors import UserError

# what fairseq's --user-dir wants
PACKAGE = Path(__file__).resolve().parents[1]


def replace_with(path: Path, write: Callable[[Path], Any]) -> None:
    """Let ``write`` fill a temporary file beside ``path``, then rename it onto ``path``."""
    path.parent.mkdir(parents=True, exist_ok=True)
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


def atomic_write(path: Path, text: str) -> None:
    """Write ``text`` so that a reader sees the old file or the new one, never a part."""
    replace_with(path, lambda temporary: temporary.write_text(text, encoding="utf-8"))


def write_json(path: Path, value: Any) -> None:
    atomic_write(path, json.dumps(value, indent=2) + "\n")


def read_json(path: Path) -> dict[str, Any]:
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise UserError(f"{path} does not exist") from None
    except (ValueError, OSError) as error:
        raise UserError(f"{path} cannot be read as JSON ({error}): delete it or restore it") from None
    if not isinstance(value, dict):
        raise UserError(f"{path} holds no JSON object: delete it or restore it")
    return value


def read_json_lines(path: Path) -> list[dict[str, Any]]:
    """The objects of a JSON-lines file, nothing if there is no such file."""
    if not path.exists():
        return []
    rows = []
    for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), start=1):
        try:
            row = json.loads(line)
        except ValueError:
            row = None
        if not isinstance(row, dict):
            raise UserError(f"{path} line {number} is no JSON object: delete that line or the file")
        rows.append(row)
    return rows


def append_json_line(path: Path, row: dict[str, Any]) -> None:
    rows = [*read_json_lines(path), row]
    atomic_write(path, "".join(json.dumps(r) + "\n" for r in rows))


def check_folder(folder: Path, names: Iterable[str]) -> None:
    """Refuse what would fail after some files were written."""
    try:
        for part in (folder, *folder.parents):
            if os.path.lexists(part) and not part.is_dir():
                raise UserError(f"--out {folder}: {part} is not a folder, name another one")
        for name in names:
            if (folder / name).is_dir():
                raise UserError(f"--out {folder}: {name} in it is a folder, move it away or name another --out")
    except OSError as error:
        raise UserError(f"--out {folder} cannot be used ({error.strerror}): name another folder") from None


def make_folder(folder: Path) -> None:
    """The folder of --out, made if need be."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UserError(f"--out {folder} cannot be made ({error.strerror}): name another folder") from None
    if not os.access(folder, os.W_OK | os.X_OK):
        raise UserError(f"--out {folder} cannot be written to: name another folder")


def file_digest(*paths: Path) -> str:
    """The sha256 over the contents of the files, in order."""
    digest = hashlib.sha256()
    for path in paths:
        with open(path, "rb") as file:
            hashlib.file_digest(file, lambda: digest)
    return digest.hexdigest()


@contextlib.contextmanager
def lock(path: Path, busy: str, wait: bool = False) -> Iterator[int]:
    """Hold an exclusive lock on ``path``, a file or a folder that is there; yields its file descriptor.

    A process that inherits the descriptor keeps the lock for as long as it lives, so that a
    trainer whose parent was killed still keeps others out.

    Args:
        path: a file is made if it is missing, and stays.
        busy: what to say when somebody else holds the lock.
        wait: say it on standard error and wait, instead of raising it.

    Raises:
        UserError: ``busy``, when somebody else holds the lock.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    handle = os.open(path, os.O_RDONLY if path.is_dir() else os.O_RDWR | os.O_CREAT, 0o644)
    try:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            if not wait:
                raise UserError(busy) from None
            print(busy, file=sys.stderr)
            fcntl.flock(handle, fcntl.LOCK_EX)
        yield handle
    finally:
        os.close(handle)
