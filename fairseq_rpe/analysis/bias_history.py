"""The bias over distance at several moments of a training, kept as JSON lines beside TensorBoard's events."""

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

from torch import Tensor

from fairseq_rpe.utils import records
from fairseq_rpe.utils.files import atomic_write, read_json_lines
from fairseq_rpe.utils.records import Natural, Rule

FILE = "profiles.jsonl"
_POINTS = 64
_LogBias = Annotated[float, Rule(lambda v: v < math.inf, "a number")]  # that of what is not attended to is -inf


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


@dataclass(frozen=True)
class _Look:
    step: Natural
    distances: tuple[Natural, ...]
    bias: Mapping[str, tuple[tuple[_LogBias, ...], ...]]


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
    records.read_lines(_Look, path, "the look")
    return read_json_lines(path)
