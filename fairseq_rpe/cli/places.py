"""Where the runs of a sweep are carried out on this machine: each gets its share of the cores, and GPUs."""

from __future__ import annotations

import os

from fairseq_rpe.runs import processes
from fairseq_rpe.core.errors import UserError


def places(device: str, nproc: int, jobs: int | None) -> list[dict[str, str]]:
    """The environment of each of the runs at a time: ``jobs``, or as many as there are GPUs or cores for.

    More jobs than GPUs share them in turn.

    Raises:
        UserError: there are fewer GPUs than a single run is to have.
    """
    gpus = _gpus() if device != "cpu" else []
    if device == "cuda" and not gpus:
        raise UserError("--device cuda: no GPU is to be seen here: drop the flag, or look at nvidia-smi")
    if gpus and nproc > len(gpus):
        raise UserError(f"--nproc {nproc}: there are {len(gpus)} GPUs here: name at most as many, or --device cpu")
    cores = processes.cores()
    jobs = jobs or max(1, (len(gpus) or cores) // nproc)
    made = []
    for place in range(jobs):
        environment = {"OMP_NUM_THREADS": str(max(1, cores // (jobs * nproc)))}
        if gpus:
            environment["CUDA_VISIBLE_DEVICES"] = ",".join(gpus[(place * nproc + r) % len(gpus)] for r in range(nproc))
        made.append(environment)
    return made


def _gpus() -> list[str]:
    """The GPUs that this process may use, by the names that CUDA_VISIBLE_DEVICES has for them (numbers, UUIDs)."""
    import torch

    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    visible = os.environ.get("CUDA_VISIBLE_DEVICES", "")
    return [name.strip() for name in visible.split(",") if name.strip()][:count] or [str(g) for g in range(count)]
