"""Errors for users: each is reported in one line that names the culprit and the remedy."""

import contextlib
import errno
import importlib.util
import os
import platform
import re
import sys
from collections.abc import Iterator

DEBUG_VARIABLE = "FAIRSEQ_RPE_DEBUG"  # set for child processes of a command that shows tracebacks


class UserError(ValueError):
    """Bad input; the message is one line that names the culprit and the remedy.

    Command-line entry points print ``error: <message>`` and exit with code 2 instead of showing a traceback. In Python
    it is an ordinary ``ValueError``.
    """


_ANOTHER = "name another place"  # the usual remedy
# errno -> what is wrong with the path, and the remedy
_PATHS = {
    errno.ENOENT: ("does not exist", _ANOTHER),
    errno.EISDIR: ("is a folder", "name a file"),
    errno.ENOTDIR: ("is a file, or below one", "a folder is needed, name another one"),
    errno.EEXIST: ("already exists", "move it away or name another one"),
    errno.ENOTEMPTY: ("is not empty", "move it away or name another one"),
    errno.EACCES: ("may not be read or written", "change its permissions or name another one"),
    errno.EPERM: ("may not be read or written", "change its permissions or name another one"),
    errno.EROFS: ("is on a read-only disk", _ANOTHER),
    errno.ENAMETOOLONG: ("has too long a name", "shorten it"),
    errno.ELOOP: ("is a link that leads back to itself", "remove it or name another one"),
    errno.EBUSY: ("is in use", "free it or name another one"),
}
_FULL = {errno.ENOSPC: "no space left on the disk", errno.EDQUOT: "no space left in the disk quota"}
# errno -> message about a limit of this process or machine, independent of a path
_LIMITS = {
    errno.EMFILE: "too many files are open: raise ulimit -n",
    errno.ENFILE: "too many files are open on this machine: close some programs",
    errno.EIO: "the system could not read or write (Input/output error): check the disk, or use another one",
    errno.EFBIG: "a file would be larger than this process may write: raise ulimit -f",
    errno.EAGAIN: "no more processes can be started: ask for fewer, or raise ulimit -u",
}
_MEMORY = "choose smaller lengths, batches, heads or widths, or a machine with more"
_FAIRSEQ = ("fairseq", "fairseq_cli", "omegaconf", "hydra")  # packages of the extra "fairseq"
_FAIRSEQ_PLATFORM = "Linux on x86-64 with Python 3.11 or 3.12"  # its wheels are built for these
_TORCH_MEMORY = re.compile(r"can't allocate memory: you tried to allocate (\d+) bytes|CUDA out of memory")
_TOO_LARGE = re.compile(r"can't allocate memory|out of memory|overflow", re.IGNORECASE)
_LIBRARY = re.compile(r"([^\s:]+): failed to map segment from shared object")


def fairseq_install_hint() -> str:
    """Return how to install fairseq on this machine: the command, or the platforms that its wheels support."""
    supported = sys.platform == "linux" and platform.machine() in ("x86_64", "AMD64")
    if supported and sys.version_info[:2] in ((3, 11), (3, 12)):
        return "pip install 'fairseq_rpe[fairseq]'"
    return f"its wheels support {_FAIRSEQ_PLATFORM} only, so run this command there; PyTorch alone runs the rest"


def require_fairseq() -> None:
    """Check that fairseq, which models, training and evaluation need, is installed.

    Raises:
        UserError: It is not installed.
    """
    try:
        missing = importlib.util.find_spec("fairseq") is None
    except ValueError:  # imported without a spec, or blocked from being imported
        missing = sys.modules.get("fairseq") is None
    if missing:
        raise UserError(f"this command needs fairseq, which is not installed: {fairseq_install_hint()}")


def shorten_path(path: object, max_length: int = 100) -> str:
    """Return a path for a message; a path longer than ``max_length`` characters loses its middle."""
    text = os.fsdecode(path) if isinstance(path, (bytes, os.PathLike)) else str(path)
    return text if len(text) <= max_length else f"{text[: max_length // 2]}…{text[-max_length // 3 :]}"


def oserror_message(error: OSError, path: object = None) -> str | None:
    """Return the message for an error of the operating system.

    Args:
        error: The error.
        path: Path to name instead of the path of the error.

    Returns:
        One line, or None if the error is about neither a path nor a limit of this machine.
    """
    path = error.filename if path is None else path
    if error.errno == errno.ENOMEM:
        return f"not enough memory: {_MEMORY}"
    if error.errno in _LIMITS and not (error.errno == errno.EIO and path is not None):
        return _LIMITS[error.errno]
    if error.errno in _FULL:
        where = f" while writing {shorten_path(path)}" if path is not None else ""
        return f"{_FULL[error.errno]}{where}: free some and run this again"
    if error.errno is None or path is None or isinstance(path, int):
        return None
    wrong, remedy = _PATHS.get(error.errno, (f"cannot be used ({os.strerror(error.errno)})", _ANOTHER))
    return f"{shorten_path(path)} {wrong}: {remedy}"


def _causes(error: BaseException) -> Iterator[BaseException]:
    """Yield an error, its cause, the cause of that, and so on."""
    cause: BaseException | None = error
    while cause is not None:
        yield cause
        cause = cause.__cause__ or cause.__context__


def _library_message(error: BaseException) -> str | None:
    """Return the message if ``error`` or a cause of it is a shared library that could not be mapped into memory.

    The system gives no reason. It is the disk if the disk is mounted with noexec, else memory.
    """
    match = next(filter(None, map(_LIBRARY.search, map(str, _causes(error)))), None)
    if match is None:
        return None
    if os.statvfs(sys.prefix).f_flag & os.ST_NOEXEC:
        prefix = shorten_path(sys.prefix)
        return f"{match[1]} cannot be loaded: {prefix} is on a disk mounted with noexec: install elsewhere"
    return (
        f"not enough memory to load {match[1]}: raise the limit of address space (ulimit -v), or end other programs; "
        "if neither is short, see whether the library's disk is mounted with noexec"
    )


@contextlib.contextmanager
def explain_memory_errors(what: str) -> Iterator[None]:
    """Turn errors of torch's allocators into a UserError.

    Args:
        what: What is allocated, for the message.

    Yields:
        Nothing.

    Raises:
        UserError: The memory of this machine is too small for it.
    """
    try:
        yield
    except (MemoryError, RuntimeError) as error:
        if isinstance(error, MemoryError) or _TOO_LARGE.search(str(error)):
            raise UserError(f"not enough memory for {what}: choose a smaller one") from error
        raise


def user_message(error: BaseException) -> str | None:
    """Return the one-line message for a user, or None if the error is a bug rather than bad input."""
    message = _message(error)
    # a path in the message may have line breaks
    return None if message is None else " ".join(message.split())


def _message(error: BaseException) -> str | None:
    """Return the message of :func:`user_message`, perhaps with line breaks."""
    if isinstance(error, UserError):
        return str(error)
    if isinstance(error, ModuleNotFoundError) and (error.name or "").partition(".")[0] in _FAIRSEQ:
        return f"this command needs fairseq, and {error.name} is not installed: {fairseq_install_hint()}"
    if isinstance(error, (ImportError, OSError)) and (message := _library_message(error)):
        return message
    if isinstance(error, OSError):
        return oserror_message(error)
    if isinstance(error, MemoryError):
        return f"not enough memory: {_MEMORY}"
    if isinstance(error, RuntimeError):
        return _runtime_error_message(str(error))
    return None


def _runtime_error_message(text: str) -> str | None:
    """Return the message for a RuntimeError of torch's allocators, of threading or of pathlib; else None."""
    if match := _TORCH_MEMORY.search(text):
        detail = f" ({int(match[1]):,} bytes more were asked for)" if match[1] else " on the GPU"
        return f"not enough memory{detail}: {_MEMORY}"
    if text == "can't start new thread":
        return _LIMITS[errno.EAGAIN]
    if text.startswith("Symlink loop from "):  # pathlib before Python 3.13
        path = text.removeprefix("Symlink loop from ").strip("'\"")
        return oserror_message(OSError(errno.ELOOP, "", path))
    return None
