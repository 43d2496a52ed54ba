"""Records the environment of a training at each start: time, versions, machine and folder."""

import datetime
import os
import platform
import subprocess
from importlib import metadata
from pathlib import Path

from fairseq_rpe import __version__
from fairseq_rpe.runs import processes
from fairseq_rpe.runs.run_folder import TrainingStart
from fairseq_rpe.utils import devices
from fairseq_rpe.utils.files import PACKAGE_DIR

# names under which fairseq may be installed
_FAIRSEQ = ("ve-fairseq", "fairseq")


def current_start(from_update: int, threads: str, device: str) -> TrainingStart:
    """Describe the current start of a training, without importing torch.

    Args:
        from_update: updates done before this start.
        threads: value of OMP_NUM_THREADS.
        device: value of ``--device``.

    Returns:
        The record of this start.
    """
    return TrainingStart(
        time=datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        from_update=from_update,
        fairseq_rpe=__version__,
        commit=git_commit(PACKAGE_DIR),
        fairseq=next((f"{name} {v}" for name in _FAIRSEQ if (v := _version(name))), None),
        torch=_version("torch"),
        python=platform.python_version(),
        system=platform.platform(),
        processor=_processor(),
        cores=processes.available_cores(),
        gpus=devices.gpu_names() if device != "cpu" else (),
        working_folder=os.getcwd(),
        threads=threads,
    )


def git_commit(folder: Path) -> str | None:
    """Return the git commit of a folder.

    Args:
        folder: folder of a Python package.

    Returns:
        The commit, followed by "with changes" if files of the folder differ from it; None if git does not track it.
    """
    # A package in site-packages may be inside of a repository that does not track it.
    if _output_of("git", "-C", str(folder), "ls-files", "--error-unmatch", "__init__.py") is None:
        return None
    head = _output_of("git", "-C", str(folder), "rev-parse", "HEAD")
    changes = _output_of("git", "-C", str(folder), "status", "--porcelain", "--", ".")
    return f"{head} with changes" if head and changes else head


def _version(name: str) -> str | None:
    """Return the version of an installed package, None if it is not installed."""
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None


def _processor() -> str:
    """Return the name of the processor, as exactly as the system knows it."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        lines = []
    names = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(names, None) or platform.processor() or platform.machine()


def _output_of(*command: str) -> str | None:
    """Return what a command prints, None if it is missing or fails."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=10, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout.strip() if done.returncode == 0 else None
