"""Errors that a user is meant to read, and the one line that each is told in."""

import contextlib
import errno
import importlib.util
import os
import platform
import re
import sys
from collections.abc import Iterator

DEBUG = "FAIRSEQ_RPE_DEBUG"  # set for the children of a command that is to show tracebacks


class UserError(ValueError):
    """Bad input, told in one line that names the culprit and the remedy.

    Command-line entry points print ``error: <message>`` and exit with code 2 instead of
    showing a traceback; in Python it is an ordinary ``ValueError``.
    """


_ANOTHER = "name another place"
# what is wrong with the path, and the remedy
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
# of this process or machine, whatever the path
_LIMITS = {
    errno.EMFILE: "too many files are open: raise ulimit -n",
    errno.ENFILE: "too many files are open on this machine: close some programs",
    errno.EIO: "the system could not read or write (Input/output error): check the disk, or use another one",
    errno.EFBIG: "a file would be larger than this process may write: raise ulimit -f",
    errno.EAGAIN: "no more processes can be started: ask for fewer, or raise ulimit -u",
}
_MEMORY = "choose smaller lengths, batches, heads or widths, or a machine with more"
_FAIRSEQ = ("fairseq", "fairseq_cli", "omegaconf", "hydra")  # what comes with the extra of that name
_FAIRSEQ_PLATFORM = "Linux on x86-64 with Python 3.11 or 3.12"  # for which its wheels are built
_TORCH_MEMORY = re.compile(r"can't allocate memory: you tried to allocate (\d+) bytes|CUDA out of memory")
_TOO_LARGE = re.compile(r"can't allocate memory|out of memory|overflow", re.IGNORECASE)
_LIBRARY = re.compile(r"([^\s:]+): failed to map segment from shared object")


def fairseq_remedy() -> str:
    """How to get fairseq on this machine: the command, or the platforms that its wheels support."""
    supported = sys.platform == "linux" and platform.machine() in ("x86_64", "AMD64")
    if supported and sys.version_info[:2] in ((3, 11), (3, 12)):
        return "pip install 'fairseq_rpe[fairseq]'"
    return f"its wheels support {_FAIRSEQ_PLATFORM} only, so run this command there; PyTorch alone runs the rest"


def need_fairseq() -> None:
    """Raises UserError: fairseq, which models, training and evaluation need, is not installed."""
    try:
        missing = importlib.util.find_spec("fairseq") is None
    except ValueError:  # imported by a trick, or kept from being imported
        missing = sys.modules.get("fairseq") is None
    if missing:
        raise UserError(f"this command needs fairseq, which is not installed: {fairseq_remedy()}")


def shown(path: object, most: int = 100) -> str:
    """A path as messages have it: a long one without its middle."""
    text = os.fsdecode(path) if isinstance(path, (bytes, os.PathLike)) else str(path)
    return text if len(text) <= most else f"{text[: most // 2]}…{text[-most // 3 :]}"


def os_line(error: OSError, path: object = None) -> str | None:
    """What an error of the system says of a path, or of this machine; nothing where it is about neither.

    ``path``: the one to name, in place of the one that the error knows.
    """
    path = error.filename if path is None else path
    if error.errno == errno.ENOMEM:
        return f"not enough memory: {_MEMORY}"
    if error.errno in _LIMITS and not (error.errno == errno.EIO and path is not None):
        return _LIMITS[error.errno]
    if error.errno in _FULL:
        where = f" while writing {shown(path)}" if path is not None else ""
        return f"{_FULL[error.errno]}{where}: free some and run this again"
    if error.errno is None or path is None or isinstance(path, int):
        return None
    wrong, remedy = _PATHS.get(error.errno, (f"cannot be used ({os.strerror(error.errno)})", _ANOTHER))
    return f"{shown(path)} {wrong}: {remedy}"


def _library_line(error: BaseException) -> str | None:
    """Why a shared library could not be mapped into memory, if that is what went wrong here or before.

    The system's message gives no reason. It is the disk where that forbids to run programs, else memory.
    """
    cause: BaseException | None = error
    while cause is not None:
        if match := _LIBRARY.search(str(cause)):
            break
        cause = cause.__cause__ or cause.__context__
    else:
        return None
    if os.statvfs(sys.prefix).f_flag & os.ST_NOEXEC:
        return f"{match[1]} cannot be loaded: {shown(sys.prefix)} is on a disk mounted with noexec: install elsewhere"
    return (
        f"not enough memory to load {match[1]}: raise the limit of address space (ulimit -v), or end other programs; "
        "if neither is short, see whether the library's disk is mounted with noexec"
    )


@contextlib.contextmanager
def enough_memory(what: str) -> Iterator[None]:
    """Turn an error of torch's allocators into one line.

    Args:
        what: is allocated within.

    Raises:
        UserError: this machine's memory is too small for it.
    """
    try:
        yield
    except (MemoryError, RuntimeError) as error:
        if isinstance(error, MemoryError) or _TOO_LARGE.search(str(error)):
            raise UserError(f"not enough memory for {what}: choose a smaller one") from error
        raise


def told(error: BaseException) -> str | None:
    """The one line that a user is told; nothing where the error is none of theirs but a bug."""
    if isinstance(error, UserError):
        return " ".join(str(error).split())
    if isinstance(error, ModuleNotFoundError) and (error.name or "").partition(".")[0] in _FAIRSEQ:
        return f"this command needs fairseq, and {error.name} is not installed: {fairseq_remedy()}"
    if isinstance(error, (ImportError, OSError)) and (line := _library_line(error)):
        return line
    if isinstance(error, OSError):
        return os_line(error)
    if isinstance(error, MemoryError):
        return f"not enough memory: {_MEMORY}"
    if isinstance(error, RuntimeError):
        # torch's allocators; pathlib before Python 3.13
        if found := _TORCH_MEMORY.search(str(error)):
            asked = f" ({int(found[1]):,} bytes more were asked for)" if found[1] else " on the GPU"
            return f"not enough memory{asked}: {_MEMORY}"
        if str(error) == "can't start new thread":
            return _LIMITS[errno.EAGAIN]
        if str(error).startswith("Symlink loop from "):
            path = str(error).removeprefix("Symlink loop from ").strip("'\"")
            return os_line(OSError(errno.ELOOP, "", path))
    return None
