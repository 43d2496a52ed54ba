"""Checkpoint files from anywhere: looked through before they are read, and nothing in them is ever run."""

import functools
import pickle
import re
import stat
import zipfile
from argparse import Namespace
from collections import Counter
from pathlib import Path
from typing import Any

from fairseq_rpe.core.errors import UserError, os_line

_MOST_PICKLE = 2**24  # bytes of names and settings: 100,000 tensors have 13 million
_BEFORE_ZIP = pickle.dumps(0x1950A86A20F9469CFC6C, protocol=2)  # what torch before 1.6 begins a file with


def check(path: Path) -> None:
    """Refuse what is no whole file of ``torch.save``, from the directory of its zip and every part's checksum.

    The checksums take 0.3 seconds of processor time per GB and 1 MiB of memory. A file that was found to be whole is
    not read for them again by this process, unless it has changed. Files of torch before 1.6 are no zips and have none.
    Raises UserError: what is wrong, and where.
    """
    try:
        status = path.stat()
    except FileNotFoundError:
        raise UserError(f"checkpoint {path} does not exist") from None
    except OSError as error:
        raise UserError(f"checkpoint {os_line(error, path)}") from None
    if not stat.S_ISREG(status.st_mode):
        raise UserError(f"checkpoint {path} is not a file: name a file of fairseq-train's, such as checkpoint_last.pt")
    try:
        _check(path, status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns)
    except (zipfile.BadZipFile, EOFError, ValueError, RuntimeError, NotImplementedError) as error:
        raise damaged(path, str(error) if isinstance(error, _Fault) else "not a zip file of torch's") from None
    except OSError as error:
        raise UserError(f"checkpoint {os_line(error, path)}") from None


class _Fault(ValueError):
    """What is wrong with a file, in words."""


@functools.lru_cache(maxsize=64)
def _check(path: Path, *_stamp: int) -> None:
    size = _stamp[2]
    if not _is_zip(path):
        if _begins(path) != _BEFORE_ZIP:
            raise _Fault("it is empty" if not size else "not a file of torch's")
        return
    with zipfile.ZipFile(path) as archive:
        parts = archive.infolist()
        if len({part.filename.lower() for part in parts}) < len(parts):
            raise _Fault("two parts of the same name")
        for part in parts:
            if part.compress_type != zipfile.ZIP_STORED or part.compress_size != part.file_size:
                raise _Fault(f"{part.filename} in it is compressed, which torch never does")
        if sum(part.file_size for part in parts) > size:
            raise _Fault("its parts are larger than the file")
        if sum(part.filename.endswith("/data.pkl") for part in parts) != 1:
            raise _Fault("not a file of torch's")
        if (wrong := archive.testzip()) is not None:
            raise _Fault(f"the checksum of {wrong} in it is wrong")


def _is_zip(path: Path) -> bool:
    """By its first bytes, as torch decides it: any file can end like a zip."""
    return _begins(path)[:4] == b"PK\x03\x04"


def _begins(path: Path) -> bytes:
    with open(path, "rb") as file:
        return file.read(len(_BEFORE_ZIP))


def _is_utf8(path: Path) -> bool:
    try:
        str(path).encode()
    except UnicodeEncodeError:
        return False
    return True


def damaged(path: Path, why: str) -> UserError:
    """The message about a file that cannot be read as a checkpoint."""
    return UserError(f"{path} is not a checkpoint, or damaged ({why}): copy or train it again")


def read(path: Path) -> tuple[Any, Counter[int]]:
    """What a checkpoint holds, its tensors left on disk, and how many of its parts have as many bytes.

    Raises UserError: :func:`check` refuses the file, or it holds more than weights and settings.
    """
    check(path)
    mapped, sizes = _is_zip(path), Counter[int]()
    if mapped:
        with zipfile.ZipFile(path) as archive:
            sizes.update(part.file_size for part in archive.infolist() if "/data/" in part.filename)
            size = next(part.file_size for part in archive.infolist() if part.filename.endswith("/data.pkl"))
        if size > _MOST_PICKLE:
            raise UserError(
                f"checkpoint {path} is refused: {size} bytes of names and settings are more than a checkpoint has"
            )
    import torch  # a file can be checked without it

    # Models without a dataclass save one, a mere record. Left so: fairseq loads a second time, by itself.
    torch.serialization.add_safe_globals([Namespace])
    try:
        # torch maps a file by its name alone, and as UTF-8, which a name in another locale's bytes is not
        if mapped and _is_utf8(path):
            return torch.load(path, map_location="cpu", mmap=True, weights_only=True), sizes
        with open(path, "rb") as file:
            return torch.load(file, map_location="cpu", weights_only=True), sizes
    except pickle.UnpicklingError as error:
        # torch's own message advises to switch the protection off
        named = re.search(r"GLOBAL (\S+)", str(error))
        what = f" ({named[1]})" if named else ""
        raise UserError(f"checkpoint {path} is refused: it holds more than weights and settings{what}") from None
    except Exception as error:  # whatever foreign bytes make of torch's reader
        raise damaged(path, f"torch cannot read it: {type(error).__name__}") from None
