"""Checkpoint files: safe reading from any source, and the weights that a training keeps along the way.

Files are verified before they are read, and no code in them is executed.
"""

import functools
import pickle
import re
import stat
import zipfile
from argparse import Namespace
from collections import Counter
from functools import partial
from pathlib import Path
from typing import Any

from fairseq_rpe.core.errors import UserError, oserror_message
from fairseq_rpe.utils.files import write_via_temporary

_INTERMEDIATE = "intermediate"  # folder of the weights that a training keeps
_MAX_PICKLE = 2**24  # bytes of names and settings; 100,000 tensors need 13 million
_BEFORE_ZIP = pickle.dumps(0x1950A86A20F9469CFC6C, protocol=2)  # first bytes of files of torch before 1.6


def intermediate_path(folder: Path, updates: int) -> Path:
    """Return the file of the weights that a training keeps after a number of updates.

    The file has no state of the optimizer, so no training resumes from it; its folder separates it from the checkpoints
    that fairseq writes, resumes from and deletes.

    Args:
        folder: Folder of the training's checkpoints.
        updates: Number of updates.
    """
    return folder / _INTERMEDIATE / f"update_{updates}.pt"


def intermediate_files(folder: Path) -> dict[int, Path]:
    """Return the weights that a training has kept, by number of updates, ascending.

    Args:
        folder: Folder of the training's checkpoints; it need not exist.
    """
    paths = (folder / _INTERMEDIATE).glob("update_*.pt")
    files = {int(number): path for path in paths if (number := path.stem.removeprefix("update_")).isdigit()}
    return dict(sorted(files.items()))


def keep_weights(checkpoint: Path, updates: int) -> None:
    """Write the weights of a checkpoint to the file of :func:`intermediate_path` in its folder, atomically.

    Args:
        checkpoint: A checkpoint of the training.
        updates: Its number of updates.

    Raises:
        UserError: The checkpoint cannot be read.
        OSError: The file cannot be written.
    """
    import torch  # slow, and not needed by other callers

    state, _ = read_file(checkpoint)
    weights = {key: value for key, value in state.items() if key != "last_optimizer_state"}
    write_via_temporary(intermediate_path(checkpoint.parent, updates), partial(torch.save, weights))


def check_file(path: Path) -> None:
    """Check that a file is an intact file of ``torch.save``, by its zip directory and the checksums of all parts.

    The checksums take 0.3 seconds of processor time per GB and 1 MiB of memory. This process verifies a file only once
    unless it has changed. Files of torch before 1.6 are not zip files and have no checksums.

    Args:
        path: The checkpoint.

    Raises:
        UserError: The file is missing, is not a checkpoint, or is damaged.
    """
    try:
        status = path.stat()
    except FileNotFoundError:
        raise UserError(f"checkpoint {path} does not exist") from None
    except OSError as error:
        raise UserError(f"checkpoint {oserror_message(error, path)}") from None
    if not stat.S_ISREG(status.st_mode):
        raise UserError(f"checkpoint {path} is not a file: name a file of fairseq-train's, such as checkpoint_last.pt")
    try:
        _check_contents(path, status.st_size, status.st_dev, status.st_ino, status.st_mtime_ns)
    except (zipfile.BadZipFile, EOFError, ValueError, RuntimeError, NotImplementedError) as error:
        raise damaged_error(path, str(error) if isinstance(error, _Fault) else "not a zip file of torch's") from None
    except OSError as error:
        raise UserError(f"checkpoint {oserror_message(error, path)}") from None


class _Fault(ValueError):
    """Damage of a file; the message describes it."""


@functools.lru_cache(maxsize=64)
def _check_contents(path: Path, size: int, *_version: int) -> None:
    """Verify a file of ``size`` bytes. The cache skips a file that has not changed since it was verified.

    Args:
        path: The file.
        size: Its size in bytes.
        _version: Device, inode and time of the last change, which are only part of the key of the cache.

    Raises:
        _Fault: The file is damaged or not of torch's; ``zipfile`` raises further errors.
    """
    if not _is_zip(path):
        if _first_bytes(path) != _BEFORE_ZIP:
            raise _Fault("it is empty" if not size else "not a file of torch's")
        return
    with zipfile.ZipFile(path) as archive:
        members = archive.infolist()
        # torch and zipfile might choose different ones of two parts, so one could be verified and the other be read
        if len({member.filename.lower() for member in members}) < len(members):
            raise _Fault("two parts of the same name")
        for member in members:
            if member.compress_type != zipfile.ZIP_STORED or member.compress_size != member.file_size:
                raise _Fault(f"{member.filename} in it is compressed, which torch never does")
        if sum(member.file_size for member in members) > size:
            raise _Fault("its parts are larger than the file")
        if sum(member.filename.endswith("/data.pkl") for member in members) != 1:
            raise _Fault("not a file of torch's")
        if (damaged_part := archive.testzip()) is not None:
            raise _Fault(f"the checksum of {damaged_part} in it is wrong")


def _is_zip(path: Path) -> bool:
    """Whether a file is a zip file by its first bytes, as torch decides it: any file can end like a zip file."""
    return _first_bytes(path)[:4] == b"PK\x03\x04"


def _first_bytes(path: Path) -> bytes:
    with open(path, "rb") as file:
        return file.read(len(_BEFORE_ZIP))


def _is_utf8(path: Path) -> bool:
    try:
        str(path).encode()
    except UnicodeEncodeError:
        return False
    return True


def damaged_error(path: Path, why: str) -> UserError:
    """Return the error for a file that cannot be read as a checkpoint."""
    return UserError(f"{path} is not a checkpoint, or damaged ({why}): copy or train it again")


def read_file(path: Path) -> tuple[Any, Counter[int]]:
    """Read a checkpoint with memory-mapped tensors.

    Args:
        path: The checkpoint.

    Returns:
        The contents, and the number of tensor parts of the file by their size in bytes.

    Raises:
        UserError: :func:`check_file` refuses the file, or it contains more than weights and settings.
    """
    check_file(path)
    is_zip, sizes = _is_zip(path), Counter[int]()
    if is_zip:
        with zipfile.ZipFile(path) as archive:
            sizes.update(member.file_size for member in archive.infolist() if "/data/" in member.filename)
            size = next(member.file_size for member in archive.infolist() if member.filename.endswith("/data.pkl"))
        if size > _MAX_PICKLE:
            raise UserError(
                f"checkpoint {path} is refused: {size} bytes of names and settings are more than a checkpoint has"
            )
    import torch  # slow, and not needed to check a file

    # Checkpoints of models without a dataclass contain a Namespace, a plain record. It stays allowed, because fairseq
    # loads the file a second time.
    torch.serialization.add_safe_globals([Namespace])
    try:
        # torch maps a file by its name as UTF-8, which the bytes of a name in another locale may not be
        if is_zip and _is_utf8(path):
            return torch.load(path, map_location="cpu", mmap=True, weights_only=True), sizes
        with open(path, "rb") as file:
            return torch.load(file, map_location="cpu", weights_only=True), sizes
    except pickle.UnpicklingError as error:
        # not torch's message, which advises to disable the protection
        match = re.search(r"GLOBAL (\S+)", str(error))
        what = f" ({match[1]})" if match else ""
        raise UserError(f"checkpoint {path} is refused: it holds more than weights and settings{what}") from None
    except Exception as error:  # foreign bytes can cause any error in torch's reader
        raise damaged_error(path, f"torch cannot read it: {type(error).__name__}") from None
