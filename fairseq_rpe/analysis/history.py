"""The bias over distance at several moments of a training, kept as JSON lines beside TensorBoard's events."""

import json
from pathlib import Path
from typing import Any

from torch import Tensor

from ..core import UserError
from ..core.files import atomic_write, read_json_lines

FILE = "profiles.jsonl"
_POINTS = 64


def distances(length: int) -> list[int]:
    """At most 64 distances from 0 to length - 1, the near ones all and the far ones logarithmically spaced.

    >>> distances(5), len(distances(9216))
    ([0, 1, 2, 3, 4], 64)
    """
    # each step is at least 1 and at most what is left, shared out evenly on a logarithmic scale
    found = [0]
    for left in range(min(_POINTS, length) - 1, 0, -1):
        ratio = ((length - 1) / max(1, found[-1])) ** (1 / left)
        found.append(max(found[-1] + 1, min(length - left, round(max(1, found[-1]) * ratio))))
    return found


class History:
    """A file of looks in ``folder``; ``length`` is the training length in tokens.

    ``start``: updates done before the first new look; what the file holds from there on is dropped.
    """

    def __init__(self, folder: str | Path, start: int, length: int) -> None:
        self.path, self.at = Path(folder) / FILE, distances(length)
        self.looks = [look for look in read(folder) if look["step"] < start]

    def add(self, step: int, profiles: dict[str, Tensor]) -> None:
        """Keep ``profiles``, place -> (H, n) log-bias over distances 0 … n-1, as those after ``step`` updates."""
        bias = {place: profile[:, self.at].tolist() for place, profile in profiles.items()}
        self.looks.append({"step": step, "distances": self.at, "bias": bias})
        atomic_write(self.path, "".join(json.dumps(look) + "\n" for look in self.looks))


def read(folder: str | Path) -> list[dict[str, Any]]:
    """The looks in ``folder``, the earliest first, or nothing where there is no file; refuses a damaged one.

    Each has ``step`` (updates), ``distances`` (tokens) and ``bias``: place -> heads -> log-bias at each distance.
    """
    path = Path(folder) / FILE
    looks = read_json_lines(path)
    if any({"step", "distances", "bias"} - look.keys() for look in looks):
        raise UserError(f"{path} cannot be read, it lacks a step, distances or a bias: delete it")
    return looks
