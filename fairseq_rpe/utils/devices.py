"""GPUs: which of them this process may use, and which device a command computes on."""

import functools
import json
import os
import subprocess
import sys
from pathlib import Path

from fairseq_rpe.core.errors import UserError
from fairseq_rpe.utils.child_processes import SAFE_PATH

# A driver leaves one of these (NVIDIA's, WSL's, AMD's): without any, torch need not be asked.
_DRIVERS = ("/dev/nvidiactl", "/dev/dxg", "/dev/kfd")
_PROBE = (
    "import json, torch; n = torch.cuda.device_count() if torch.cuda.is_available() else 0; "
    "print(json.dumps([torch.cuda.get_device_name(i) for i in range(n)]))"
)


@functools.cache
def gpus() -> tuple[str, ...]:
    """Names of the GPUs that torch sees, asked once in a process of its own: who waits for hours needs no CUDA context.

    Raises UserError: torch cannot be asked.
    """
    if sys.platform == "linux" and not any(Path(driver).exists() for driver in _DRIVERS):
        return ()
    command, environment = [sys.executable, "-P", "-c", _PROBE], {**os.environ, **SAFE_PATH}
    told = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    if told.returncode:
        reason = (told.stderr.strip().splitlines() or [f"exit code {told.returncode}"])[-1]
        raise UserError(f"torch cannot report its GPUs ({reason}): repair its installation, or give --device cpu")
    return tuple(json.loads(told.stdout.splitlines()[-1]))


def check(device: str, nproc: int) -> list[str]:
    """The GPUs for runs of ``nproc`` processes, by their names in CUDA_VISIBLE_DEVICES (numbers, UUIDs); none for cpu.

    Raises UserError: ``device`` is cuda and there is none, or a run is to have more than there are.
    """
    count = len(gpus()) if device != "cpu" else 0
    _require(device, count > 0)
    if 0 < count < nproc:
        raise UserError(f"--nproc {nproc}: there are {count} GPUs here: use at most that many, or --device cpu")
    names = [name.strip() for name in os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",") if name.strip()]
    return names[:count] or [str(number) for number in range(count)]


def chosen(device: str) -> str:
    """What ``--device auto``, ``cpu`` or ``cuda`` comes to in this process, which has loaded torch: cpu or cuda.

    Raises UserError: cuda is asked for and torch sees no GPU.
    """
    import torch

    there = device != "cpu" and torch.cuda.is_available()
    _require(device, there)
    return "cuda" if there else "cpu"


def _require(device: str, there: bool) -> None:
    if device == "cuda" and not there:
        raise UserError("--device cuda: no GPU is visible here: drop the flag, or check nvidia-smi")
