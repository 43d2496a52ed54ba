"""Checks, before any work, of the paths that a command will write."""

import contextlib
import os
import stat
import tempfile
from collections.abc import Iterable
from pathlib import Path

from fairseq_rpe.core.errors import UserError, oserror_message, shorten_path, user_message

# Records of this package, which no output of a command may replace.
_RECORDS = {"answers.json", "corpus.json", "environment.json", "run.json", "sweep.json"}
# Bytes of a test write: the block of usual file systems, so that a full disk or quota refuses it.
_TEST_BYTES = 4096


def check_plain_file(flag: str, path: Path) -> None:
    """Refuse an existing path that is not a plain file, such as a folder or a device.

    Args:
        flag: Option that names the path, or another first word of the message.
        path: The path, which need not exist.

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


def check_output_file(flag: str, path: Path) -> None:
    """Refuse a file that could not be written, and leave nothing behind.

    Args:
        flag: Option that names the file, for the message.
        path: The file; neither it nor its folder need exist.

    Raises:
        UserError: It cannot be written; the message begins with ``flag``.
    """
    check_plain_file(flag, path)
    if path.exists() and not os.access(path, os.W_OK):
        raise UserError(f"{flag} {shorten_path(path)} can only be read: change its permissions or name another one")
    # The test file's name is as long as that of `write_via_temporary`, so that a name that is too long is refused, too.
    _test_write(flag, path, path.parent, f".{path.stem}-{path.suffix}")


def check_overwrite(flag: str, path: Path, suffix: str) -> None:
    """Refuse an output file that would overwrite a file of another kind.

    Args:
        flag: Option that names the file, for the message.
        path: The file, which need not exist.
        suffix: Suffix of the files that the command writes, such as ".json"; another file of this kind is replaced.

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
    """Refuse a folder in which files could not be written, and leave nothing behind.

    Args:
        folder: The folder, which need not exist.
        names: Names of files that will be written in it; a folder or a device of such a name is refused.
        flag: Option that names the folder, for the message.

    Raises:
        UserError: The files could not be written.
    """
    _test_write(flag, folder, folder, ".try-")
    for name in names:
        check_plain_file(flag, folder / name)


def _test_write(flag: str, path: Path, folder: Path, prefix: str) -> None:
    """Write and remove a temporary file in ``folder``, or in a temporary folder of its closest existing parent.

    Permission bits do not say whether a write succeeds: the disk may be full, read-only or out of quota, and the name
    too long for it. A missing folder itself is not created: two processes that test the same one would remove each
    other's.

    Args:
        flag: Option that names ``path``.
        path: The path to name in the message.
        folder: The folder that will hold the output.
        prefix: First characters of the names of the temporary file and folder.

    Raises:
        UserError: The file cannot be written.
    """
    try:
        existing, missing = _split_at_missing(flag, path, folder)
        with contextlib.ExitStack() as stack:
            if missing:
                try:
                    temporary = tempfile.TemporaryDirectory(dir=existing, prefix=prefix)
                except OSError as error:
                    error.filename = str(missing[0])  # the folder that could not be created
                    raise
                existing = Path(stack.enter_context(temporary))
            file = stack.enter_context(tempfile.NamedTemporaryFile(dir=existing, prefix=prefix))
            file.write(bytes(_TEST_BYTES))
            file.flush()
            # some file systems report a full disk only now
            os.fsync(file.fileno())
    except (OSError, RuntimeError) as error:  # pathlib raises RuntimeError for a loop of links
        raise UserError(_refusal(flag, path, error, prefix)) from None


def _split_at_missing(flag: str, path: Path, folder: Path) -> tuple[Path, list[Path]]:
    """Return the closest existing folder of ``folder`` and its parents, and the missing ones below it, outermost first.

    Raises:
        UserError: One of them is a file or a link to nothing; the message names ``path``.
    """
    existing, missing = Path(), []
    for ancestor in (*reversed(folder.parents), folder):
        culprit = f"{flag} {shorten_path(path)}: {shorten_path(ancestor)}"
        try:
            if not stat.S_ISDIR(os.stat(ancestor).st_mode):
                raise UserError(f"{culprit} is a file, not a folder: name another one")
            existing = ancestor
        except FileNotFoundError:
            if ancestor.is_symlink():
                raise UserError(f"{culprit} is a link to nothing, not a folder: name another one") from None
            missing.append(ancestor)
    return existing, missing


def _refusal(flag: str, path: Path, error: Exception, prefix: str = "") -> str:
    """Return the message about the path that a flag names, without the name of a temporary file.

    Args:
        flag: Option that names the path.
        path: The path.
        error: What writing raised.
        prefix: First characters of the names of temporary files, or "" if there are none.

    Returns:
        One line that begins with ``flag``.
    """
    if isinstance(error, OSError):
        hidden = error.filename is None or (prefix and Path(error.filename).name.startswith(prefix))
        message = oserror_message(error, path if hidden else None) or str(error)
    else:
        message = user_message(error) or str(error)
    return f"{flag} {message}" if message.startswith(shorten_path(path)) else f"{flag} {shorten_path(path)}: {message}"
