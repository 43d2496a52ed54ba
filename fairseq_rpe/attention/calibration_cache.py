"""What ``auto`` found out on a machine, kept in the user's cache folder for the next process.

One JSON file for each machine, which is a GPU with a driver and versions of torch, CUDA, Triton and of the files of
this room: where any of them is another one, all is found out again. ``FAIRSEQ_RPE_CACHE`` names the folder, or says
``off``; otherwise it is ``$XDG_CACHE_HOME/fairseq_rpe`` or ``~/.cache/fairseq_rpe``.
"""

import functools
import hashlib
import json
import logging
import os
import platform
import re
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from importlib import metadata
from pathlib import Path

import torch

from fairseq_rpe.core.errors import UserError
from fairseq_rpe.utils.files import CACHE, PACKAGE, file_digest, lock, read_json, write_json
from fairseq_rpe.utils.records import read, write

logger = logging.getLogger(__name__)
WAITS, WAIT = 40, 0.05  # for the lock, which is held for milliseconds; seconds


@dataclass(frozen=True)
class Choice:
    """The ``backend`` for a kind of call, times as ``ratios`` to its own, and why some were ``dropped``."""

    backend: str
    ratios: dict[str, float] = field(default_factory=dict)
    dropped: dict[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Remembered:
    """The file: of which machine, and the choices by kind in words."""

    machine: dict[str, str]
    choices: dict[str, object]


def folder() -> Path | None:
    """Where choices are kept; None: nowhere."""
    named = os.environ.get(CACHE, "")
    if named:
        return None if named.lower() == "off" else Path(named).expanduser()
    cache = os.environ.get("XDG_CACHE_HOME", "")
    try:
        return (Path(cache) if os.path.isabs(cache) else Path.home() / ".cache") / "fairseq_rpe"
    except RuntimeError:  # a user without a home
        return None


def machine(device: torch.device) -> dict[str, str]:
    """What a choice holds for: the device's name and the versions of what computes on it."""
    return dict(_machine(str(device)))


@functools.cache
def _machine(device: str) -> Mapping[str, str]:
    at = torch.device(device)
    cuda = at.type == "cuda"
    return {
        "device": torch.cuda.get_device_name(at)
        if cuda
        else f"{platform.machine()}, {torch.get_num_threads()} threads",
        "driver": _driver() if cuda else "none",
        "cuda": torch.version.cuda or "none",
        "torch": torch.__version__,
        "triton": _triton(),
        # the number of a release is the same for all that happens between two
        "attention": file_digest(*sorted((PACKAGE / "attention").rglob("*.py")))[:12],
    }


def _driver() -> str:
    try:
        first = Path("/proc/driver/nvidia/version").read_text(encoding="utf-8", errors="replace").partition("\n")[0]
    except OSError:
        first = ""
    found = re.search(r"\d+\.\d+(\.\d+)?", first)
    return found[0] if found else "unknown"


def _triton() -> str:
    try:
        return metadata.version("triton")
    except metadata.PackageNotFoundError:
        return "none"


def name_of(machine: Mapping[str, str]) -> str:
    """A short name of machines that are alike."""
    digest = hashlib.sha256(json.dumps(dict(machine), sort_keys=True).encode()).hexdigest()
    return f"{re.sub('[^A-Za-z0-9]+', '-', machine.get('device', ''))[:40]}-{digest[:16]}"


def path_for(machine: Mapping[str, str]) -> Path | None:
    """The file of a machine; None: nothing is kept."""
    place = folder()
    return None if place is None else place / f"attention-{name_of(machine)}.json"


def recall(machine: Mapping[str, str], kind: str) -> Choice | None:
    """What is known of a kind; a file that is missing, damaged or of another machine knows nothing."""
    path = path_for(machine)
    if path is None:
        return None
    try:
        found = _choices(path, machine).get(kind)
        return None if found is None else read(Choice, found, str(path), f"'{kind}'", strict=False)
    except (UserError, OSError):
        return None


def keep(machine: Mapping[str, str], kind: str, choice: Choice) -> None:
    """Add a choice to the file, whole or not at all; a folder that cannot be written is no error."""
    path = path_for(machine)
    if path is None:
        return
    try:
        for _ in range(WAITS):
            try:
                with lock(path.with_suffix(".lock"), "in use"):
                    try:
                        known = _choices(path, machine)
                    except UserError:  # damaged: begun anew
                        known = {}
                    write_json(path, write(Remembered(dict(machine), {**known, kind: write(choice)})))
                return
            except UserError:
                time.sleep(WAIT)
        logger.info("the choice of a backend is not kept: %s is in use", path)
    except OSError as error:
        logger.info("the choice of a backend is not kept: %s cannot be written (%s)", path, error)


def _choices(path: Path, machine: Mapping[str, str]) -> dict[str, object]:
    if not path.exists():
        return {}
    found = read(Remembered, read_json(path), str(path), "the file", strict=False)
    return found.choices if found.machine == dict(machine) else {}
