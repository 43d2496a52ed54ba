"""Information about the machine for benchmarks, without torch, so that a measuring process stays small."""

from __future__ import annotations

import csv
import ctypes
import os
import platform
from pathlib import Path
from typing import Any


def processor() -> str:
    """Return the processor's model name from /proc/cpuinfo."""
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    return next((x.partition(":")[2].strip() for x in lines if x.startswith("model name")), platform.machine())


def available() -> int:
    """Return the bytes of available memory."""
    return 1024 * _field("MemAvailable", "/proc/meminfo")


def status(key: str) -> int:
    """Return KiB of this process: VmRSS (current) or VmHWM (peak)."""
    return _field(key, "/proc/self/status")


def reset_peak() -> None:
    """Return freed memory to the system and reset VmHWM to the current use."""
    ctypes.CDLL(None).malloc_trim(0)
    Path("/proc/self/clear_refs").write_text("5")


def write_csv(path: Path, head: str, rows: list[dict[str, Any]]) -> None:
    """Write ``# head``, the columns of the first row and the rows, atomically."""
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_suffix(".tmp")
    with temporary.open("w", newline="") as file:
        file.write(f"# {head}\n")
        writer = csv.DictWriter(file, fieldnames=list(rows[0]))
        writer.writeheader()
        writer.writerows(rows)
    os.replace(temporary, path)


def _field(key: str, file: str) -> int:
    return int(Path(file).read_text().partition(f"{key}:")[2].split()[0])
