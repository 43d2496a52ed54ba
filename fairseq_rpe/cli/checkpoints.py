"""Which checkpoint of a folder can be trusted, and what it holds."""

from __future__ import annotations

import pickle
import shutil
import zipfile
from pathlib import Path
from typing import Any

from fairseq_rpe.core.errors import UserError
from fairseq_rpe.core.files import replace_with

LAST = "checkpoint_last.pt"


def is_intact(path: Path) -> bool:
    """True for a complete torch file: a zip whose every member has the right checksum."""
    try:
        with zipfile.ZipFile(path) as archive:
            return archive.testzip() is None
    except (OSError, zipfile.BadZipFile, EOFError):
        return False


def load_header(path: Path) -> dict[str, Any]:
    """A checkpoint's content with its tensors left on disk; runs no code from the file."""
    import torch

    if not path.is_file():
        raise UserError(f"checkpoint {path} does not exist")
    try:
        state = torch.load(path, map_location="cpu", mmap=True, weights_only=True)
    except (RuntimeError, ValueError, EOFError, OSError, pickle.UnpicklingError) as error:
        reason = str(error).strip().splitlines()[0]
        raise UserError(f"checkpoint {path} cannot be loaded ({reason}): train again or restore it") from None
    if not isinstance(state, dict) or not isinstance(state.get("cfg"), dict):
        raise UserError(f"{path} is not a fairseq checkpoint with a config: train again with this version")
    return state


def num_updates(state: dict[str, Any]) -> int:
    return int(state["optimizer_history"][-1]["num_updates"])


def encoding_of(state: dict[str, Any]) -> str:
    """The spec string that the model was trained with, or its architecture's name if it has none."""
    model = state["cfg"]["model"]
    return str(model.get("rpe") or model.get("arch") or model["_name"])


def newest(folder: Path) -> tuple[int, Path | None]:
    """The updates behind the newest intact checkpoint of ``folder`` and its file; 0: none is intact."""
    found = {p: num_updates(load_header(p)) for p in folder.glob("checkpoint*.pt") if is_intact(p)}
    if not found:
        return 0, None
    # Among equals the last one: then there is nothing to copy.
    path = max(found, key=lambda p: (found[p], p.name == LAST))
    return found[path], path


def recover_last(folder: Path) -> int:
    """Make ``checkpoint_last.pt`` the newest intact checkpoint of ``folder``; returns its updates.

    fairseq writes one file safely and then copies it over ``checkpoint_last.pt``, so a kill during
    the copy leaves the last one broken or old while the newest lies beside it. 0: none is intact.
    """
    updates, path = newest(folder)
    if path is None:
        (folder / LAST).unlink(missing_ok=True)
    elif path.name != LAST:
        replace_with(folder / LAST, lambda target: shutil.copyfile(path, target))
    return updates
