"""What a run was trained with: versions, machine, place and time, noted whenever its training starts."""

from __future__ import annotations

import datetime
import os
import platform
import shutil
import subprocess
from importlib import metadata
from pathlib import Path
from typing import Any

from fairseq_rpe import __version__
from fairseq_rpe.cli import processes
from fairseq_rpe.cli.options import package_folder
from fairseq_rpe.core.files import read_json, write_json

FILE = "environment.json"
# these tell one start from another, everything else one environment from another
OCCASION = ("time", "from_update")
_FAIRSEQ = ("ve-fairseq", "fairseq")


def record(folder: Path, from_update: int, threads: str, gpus: bool) -> None:
    """Add a start of training to the run in ``folder``: the first at update 0, a further one for each resumption."""
    starts = starts_of(folder)
    now = datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
    starts.append({"time": now, "from_update": from_update, **describe(gpus), "threads": threads})
    write_json(folder / FILE, {"starts": starts})


def starts_of(folder: Path) -> list[dict[str, Any]]:
    """What is on record of a run's starts, oldest first; nothing for a run of an older version."""
    path = folder / FILE
    return list(read_json(path).get("starts", [])) if path.exists() else []


def describe(gpus: bool) -> dict[str, Any]:
    """This machine and what is installed on it, without importing torch or starting CUDA."""
    return {
        "fairseq_rpe": __version__,
        "commit": commit(Path(package_folder())),
        "fairseq": next((f"{name} {v}" for name in _FAIRSEQ if (v := _version(name))), None),
        "torch": _version("torch"),
        "python": platform.python_version(),
        "system": platform.platform(),
        "processor": _processor(),
        "cores": processes.cores(),
        "gpus": _gpus() if gpus else [],
        "working_folder": os.getcwd(),
    }


def commit(folder: Path) -> str | None:
    """The git commit of a folder, with a note if its files differ from it; nothing where git does not track it."""
    if _said("git", "-C", str(folder), "ls-files", "--error-unmatch", "__init__.py") is None:
        return None
    found = _said("git", "-C", str(folder), "rev-parse", "HEAD")
    changed = _said("git", "-C", str(folder), "status", "--porcelain", "--", ".")
    return f"{found} with changes" if found and changed else found


def _version(name: str) -> str | None:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        lines = []
    names = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(names, None) or platform.processor() or platform.machine()


def _gpus() -> list[str]:
    """Names of the machine's GPUs."""
    if shutil.which("nvidia-smi") is None:
        return []
    return (_said("nvidia-smi", "--query-gpu=name", "--format=csv,noheader") or "").splitlines()


def _said(*command: str) -> str | None:
    """What a command prints, nothing if it is missing or fails."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=10, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout.strip() if done.returncode == 0 else None
