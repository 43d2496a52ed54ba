"""Cache of autotuning results in the user's cache folder, for later processes on the same machine.

There is one JSON file for each machine: a GPU with its driver, the versions of torch, CUDA and Triton, and this
package's files. If any of these differs, all backends are measured again. The environment variable
``FAIRSEQ_RPE_CACHE`` names the folder, or is ``off`` for no cache. The default is ``$XDG_CACHE_HOME/fairseq_rpe`` or
``~/.cache/fairseq_rpe``.
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
from fairseq_rpe.utils.files import CACHE_VARIABLE, PACKAGE_DIR, exclusive_lock, sha256_of_files
from fairseq_rpe.utils.json_files import read_json, write_json
from fairseq_rpe.utils.records import read_record, to_dict

logger = logging.getLogger(__name__)
LOCK_ATTEMPTS, LOCK_WAIT = 40, 0.05  # attempts to take the lock, which is held for milliseconds; seconds between them


@dataclass(frozen=True)
class BackendChoice:
    """The backend that was chosen for a signature of calls.

    Attributes:
        backend: its name.
        ratios: times of the verified candidates relative to its time.
        dropped: reasons why other candidates were dropped.
    """

    backend: str
    ratios: dict[str, float] = field(default_factory=dict)
    dropped: dict[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class CachedChoices:
    """Content of the cache file.

    Attributes:
        machine: description of the machine.
        choices: a ``BackendChoice`` as a dict for each signature in words.
    """

    machine: dict[str, str]
    choices: dict[str, object]


def cache_folder() -> Path | None:
    """Return the cache folder, or None if caching is off."""
    named = os.environ.get(CACHE_VARIABLE, "")
    if named:
        return None if named.lower() == "off" else Path(named).expanduser()
    cache = os.environ.get("XDG_CACHE_HOME", "")
    try:
        return (Path(cache) if os.path.isabs(cache) else Path.home() / ".cache") / "fairseq_rpe"
    except RuntimeError:  # a user without a home
        return None


def describe_machine(device: torch.device) -> dict[str, str]:
    """Return what a choice is valid for: the device's name and the versions of the software that computes on it."""
    return dict(_machine(str(device)))


@functools.cache
def _machine(device: str) -> Mapping[str, str]:
    torch_device = torch.device(device)
    cuda = torch_device.type == "cuda"
    name = torch.cuda.get_device_name(torch_device) if cuda else None
    return {
        "device": name or f"{platform.machine()}, {torch.get_num_threads()} threads",
        "driver": _driver() if cuda else "none",
        "cuda": torch.version.cuda or "none",
        "torch": torch.__version__,
        "triton": _triton(),
        # a digest of the sources, since a version number does not change between releases
        "attention": sha256_of_files(*sorted((PACKAGE_DIR / "attention").rglob("*.py")))[:12],
    }


def _driver() -> str:
    try:
        first = Path("/proc/driver/nvidia/version").read_text(encoding="utf-8", errors="replace").partition("\n")[0]
    except OSError:
        first = ""
    match = re.search(r"\d+\.\d+(\.\d+)?", first)
    return match[0] if match else "unknown"


def _triton() -> str:
    try:
        return metadata.version("triton")
    except metadata.PackageNotFoundError:
        return "none"


def machine_name(machine: Mapping[str, str]) -> str:
    """Return a short name, the same for equal descriptions."""
    digest = hashlib.sha256(json.dumps(dict(machine), sort_keys=True).encode()).hexdigest()
    return f"{re.sub('[^A-Za-z0-9]+', '-', machine.get('device', ''))[:40]}-{digest[:16]}"


def cache_path(machine: Mapping[str, str]) -> Path | None:
    """Return the cache file of a machine, or None if caching is off."""
    folder = cache_folder()
    return None if folder is None else folder / f"attention-{machine_name(machine)}.json"


def load_choice(machine: Mapping[str, str], signature: str) -> BackendChoice | None:
    """Return the cached choice for a signature in words; None if the file is missing, damaged or of another machine."""
    path = cache_path(machine)
    if path is None:
        return None
    try:
        choice = _read_choices(path, machine).get(signature)
        return None if choice is None else read_record(BackendChoice, choice, str(path), f"'{signature}'", strict=False)
    except (UserError, OSError):
        return None


def save_choice(machine: Mapping[str, str], signature: str, choice: BackendChoice) -> None:
    """Add a choice to the file by an atomic write; a folder that is not writable is no error."""
    path = cache_path(machine)
    if path is None:
        return
    try:
        for _ in range(LOCK_ATTEMPTS):
            try:
                with exclusive_lock(path.with_suffix(".lock"), "in use"):
                    _add_choice(path, machine, signature, choice)
                return
            except UserError:  # another process has the lock
                time.sleep(LOCK_WAIT)
        logger.info("the choice of a backend is not kept: %s is in use", path)
    except OSError as error:
        logger.info("the choice of a backend is not kept: %s cannot be written (%s)", path, error)


def _add_choice(path: Path, machine: Mapping[str, str], signature: str, choice: BackendChoice) -> None:
    """Add a choice to the file, and replace a damaged file."""
    try:
        choices = _read_choices(path, machine)
    except UserError:
        choices = {}
    write_json(path, to_dict(CachedChoices(dict(machine), {**choices, signature: to_dict(choice)})))


def _read_choices(path: Path, machine: Mapping[str, str]) -> dict[str, object]:
    """Return the choices in the file by signature; none if it is missing or of another machine."""
    if not path.exists():
        return {}
    cached = read_record(CachedChoices, read_json(path), str(path), "the file", strict=False)
    return cached.choices if cached.machine == dict(machine) else {}
