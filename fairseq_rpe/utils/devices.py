"""Visible GPUs, and the device that a command uses."""

import functools
import json
import os
import subprocess
import sys
from pathlib import Path

from fairseq_rpe.core.errors import UserError
from fairseq_rpe.utils.child_processes import SAFE_PATH

# Device files of the drivers of NVIDIA, WSL and AMD; without any of them torch sees no GPU.
_DRIVERS = ("/dev/nvidiactl", "/dev/dxg", "/dev/kfd")
_PROBE = (
    "import json, torch; n = torch.cuda.device_count() if torch.cuda.is_available() else 0; "
    "print(json.dumps([torch.cuda.get_device_name(i) for i in range(n)]))"
)


@functools.cache
def gpu_names() -> tuple[str, ...]:
    """Return the product names of the GPUs that torch sees.

    A child process queries torch once, so that this process, which may wait for hours, creates no CUDA context.

    Raises:
        UserError: torch cannot report its GPUs.
    """
    if sys.platform == "linux" and not any(Path(driver).exists() for driver in _DRIVERS):
        return ()
    command, environment = [sys.executable, "-P", "-c", _PROBE], {**os.environ, **SAFE_PATH}
    result = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    if result.returncode:
        reason = (result.stderr.strip().splitlines() or [f"exit code {result.returncode}"])[-1]
        raise UserError(f"torch cannot report its GPUs ({reason}): repair its installation, or give --device cpu")
    return tuple(json.loads(result.stdout.splitlines()[-1]))


def visible_gpus(device: str, nproc: int) -> list[str]:
    """Return the GPUs for runs of ``nproc`` processes.

    Args:
        device: "auto", "cpu" or "cuda".
        nproc: Processes of a run, each on one GPU.

    Returns:
        The identifiers of the GPUs in CUDA_VISIBLE_DEVICES (numbers or UUIDs); empty for cpu, or if ``device`` is auto
        and there is no GPU: the processes then run on the CPU.

    Raises:
        UserError: ``device`` is cuda and there is no GPU, or there are GPUs but fewer than ``nproc``.
    """
    count = len(gpu_names()) if device != "cpu" else 0
    _require_gpu(device, count > 0)
    if 0 < count < nproc:
        raise UserError(f"--nproc {nproc}: there are {count} GPUs here: use at most that many, or --device cpu")
    identifiers = [name.strip() for name in os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",") if name.strip()]
    return identifiers[:count] or [str(number) for number in range(count)]


def resolve_device(device: str) -> str:
    """Resolve ``--device`` in this process, which imports torch.

    Args:
        device: "auto", "cpu" or "cuda".

    Returns:
        "cpu" or "cuda".

    Raises:
        UserError: ``device`` is cuda and torch sees no GPU.
    """
    import torch

    available = device != "cpu" and torch.cuda.is_available()
    _require_gpu(device, available)
    return "cuda" if available else "cpu"


def _require_gpu(device: str, available: bool) -> None:
    if device == "cuda" and not available:
        raise UserError("--device cuda: no GPU is visible here: drop the flag, or check nvidia-smi")
