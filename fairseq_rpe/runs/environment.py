"""What a run was trained with: versions, machine, place and time, noted whenever its training starts."""

import datetime
import os
import platform
import subprocess
from importlib import metadata
from pathlib import Path

from fairseq_rpe import __version__
from fairseq_rpe.runs import processes
from fairseq_rpe.runs.run_folder import Start
from fairseq_rpe.utils import devices
from fairseq_rpe.utils.files import PACKAGE

_FAIRSEQ = ("ve-fairseq", "fairseq")


def now(from_update: int, threads: str, device: str) -> Start:
    """This start of a training: at update 0, or after ``from_update`` of them; without importing torch."""
    return Start(
        time=datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        from_update=from_update,
        fairseq_rpe=__version__,
        commit=commit(PACKAGE),
        fairseq=next((f"{name} {v}" for name in _FAIRSEQ if (v := _version(name))), None),
        torch=_version("torch"),
        python=platform.python_version(),
        system=platform.platform(),
        processor=_processor(),
        cores=processes.cores(),
        gpus=devices.gpus() if device != "cpu" else (),
        working_folder=os.getcwd(),
        threads=threads,
    )


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


def _said(*command: str) -> str | None:
    """What a command prints, nothing if it is missing or fails."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=10, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout.strip() if done.returncode == 0 else None
