"""Writes checkpoints atomically."""

import os
import shutil
from pathlib import Path
from typing import Any

import torch
from fairseq import checkpoint_utils
from fairseq.file_io import PathManager

from fairseq_rpe.compat.monkeypatch import patch
from fairseq_rpe.core.errors import UserError


@patch(PathManager, "copy")
def copy_atomically(_original: Any, src_path: str, dst_path: str, overwrite: bool = False) -> bool:
    """Copy to a temporary file and rename it; fairseq copies in place, so that a kill leaves a partial checkpoint."""
    if os.path.exists(dst_path) and not overwrite:
        return False
    temporary = f"{dst_path}.copying"
    try:
        shutil.copyfile(src_path, temporary)
        os.replace(temporary, dst_path)
    except OSError as error:
        raise _save_error(dst_path, error, temporary) from None
    return True


@patch(checkpoint_utils, "_torch_persistent_save")
def save_once(_original: Any, obj: Any, file: Any) -> None:
    """Save once; on a full disk fairseq tries three times with the same stream and logs three tracebacks."""
    torch.save(obj, file)


@patch(checkpoint_utils, "torch_persistent_save")
def remove_partial_checkpoint(original: Any, obj: Any, filename: str, async_write: bool = False) -> None:
    """Remove the partial file and raise UserError if saving fails, e.g. on a full disk."""
    try:
        original(obj, filename, async_write)
    except (OSError, RuntimeError) as error:
        raise _save_error(filename, error, f"{filename}.tmp") from None


def _save_error(path: str, error: Exception, temporary: str) -> UserError:
    Path(temporary).unlink(missing_ok=True)
    first = str(error).split("\n")[0]
    return UserError(f"checkpoint {path} could not be written ({first}): free some space and rerun")
