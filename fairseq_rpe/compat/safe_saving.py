"""A checkpoint is written whole or not at all."""

from __future__ import annotations

import os
import shutil
from pathlib import Path
from typing import Any

import torch
from fairseq import checkpoint_utils
from fairseq.file_io import PathManager

from ..core import UserError
from .replacement import replaces


def atomic_copies() -> None:
    """``checkpoint_last.pt`` is copied in place: killed meanwhile, half a file is left and nothing to resume from."""

    def copy(src_path: str, dst_path: str, overwrite: bool = False) -> bool:
        if os.path.exists(dst_path) and not overwrite:
            return False
        temporary = f"{dst_path}.copying"
        try:
            shutil.copyfile(src_path, temporary)
            os.replace(temporary, dst_path)
        except OSError as error:
            Path(temporary).unlink(missing_ok=True)
            raise not_written(dst_path, error) from None
        return True

    PathManager.copy = staticmethod(copy)


def full_disks() -> None:
    """Saving on a full disk is tried three times into the same stream, logs three tracebacks and leaves half a file."""
    checkpoint_utils._torch_persistent_save = lambda obj, file: torch.save(obj, file)

    @replaces(checkpoint_utils, "torch_persistent_save")
    def save(original: Any, obj: Any, filename: str, async_write: bool = False) -> None:
        try:
            original(obj, filename, async_write)
        except (OSError, RuntimeError) as error:
            Path(f"{filename}.tmp").unlink(missing_ok=True)
            raise not_written(filename, error) from None


def not_written(path: str, error: Exception) -> UserError:
    """What to say of a checkpoint that the disk did not take."""
    first = str(error).split("\n")[0]
    return UserError(f"checkpoint {path} could not be written ({first}): make room and start the same command again")
