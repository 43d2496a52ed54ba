"""A checkpoint is written whole or not at all."""

import os
import shutil
from pathlib import Path
from typing import Any

import torch
from fairseq import checkpoint_utils
from fairseq.file_io import PathManager

from fairseq_rpe.compat.monkeypatch import replaces
from fairseq_rpe.core.errors import UserError


@replaces(PathManager, "copy")
def atomic_copies(_original: Any, src_path: str, dst_path: str, overwrite: bool = False) -> bool:
    """``checkpoint_last.pt`` is copied in place: killed meanwhile, half a file is left and nothing to resume from."""
    if os.path.exists(dst_path) and not overwrite:
        return False
    temporary = f"{dst_path}.copying"
    try:
        shutil.copyfile(src_path, temporary)
        os.replace(temporary, dst_path)
    except OSError as error:
        raise _not_written(dst_path, error, temporary) from None
    return True


@replaces(checkpoint_utils, "_torch_persistent_save")
def save_once(_original: Any, obj: Any, file: Any) -> None:
    """On a full disk saving is tried three times into the same stream, which logs three tracebacks."""
    torch.save(obj, file)


@replaces(checkpoint_utils, "torch_persistent_save")
def full_disks(original: Any, obj: Any, filename: str, async_write: bool = False) -> None:
    """Saving on a full disk leaves half a file."""
    try:
        original(obj, filename, async_write)
    except (OSError, RuntimeError) as error:
        raise _not_written(filename, error, f"{filename}.tmp") from None


def _not_written(path: str, error: Exception, temporary: str) -> UserError:
    Path(temporary).unlink(missing_ok=True)
    first = str(error).split("\n")[0]
    return UserError(f"checkpoint {path} could not be written ({first}): free some space and rerun")
