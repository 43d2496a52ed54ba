"""What the benchmarks say and ask about the machine. Loads no torch: a process that measures others stays small."""

from __future__ import annotations

import csv
import ctypes
import os
import platform
from pathlib import Path
from typing import Any


def processor() -> str:
    """The model name that Linux gives."""
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    return next((x.partition(":")[2].strip() for x in lines if x.startswith("model name")), platform.machine())


def available() -> int:
    """Bytes of memory that a process may still take."""
    return 1024 * _field("MemAvailable", "/proc/meminfo")


def status(key: str) -> int:
    """KiB of this process: VmRSS (now) or VmHWM (at most)."""
    return _field(key, "/proc/self/status")


def forget_peak() -> None:
    """Give freed memory back to the system and let VmHWM start again from what is in use."""
    ctypes.CDLL(None).malloc_trim(0)
    Path("/proc/self/clear_refs").write_text("5")


def write_csv(path: Path, head: str, rows: list[dict[str, Any]]) -> None:
    """``# head``, the columns of the first row, the rows; whole or not at all."""
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
