"""Samples of learned biases: over distance at several updates of a training, and as maps of queries and keys.

The history of a training is a file of JSON lines next to TensorBoard's events, one snapshot a line.
"""

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import torch
from torch import Tensor

from fairseq_rpe.core.positions import Positions
from fairseq_rpe.encodings import Encoding
from fairseq_rpe.utils import records
from fairseq_rpe.utils.files import atomic_write
from fairseq_rpe.utils.json_files import read_json_lines
from fairseq_rpe.utils.records import Natural, Rule

FILE = "profiles.jsonl"
_MAX_DISTANCES = 64
_MAX_CELLS = 256  # queries and keys of a map: a panel has no more pixels
_MAX_SPREAD = 4  # most heads or layers that are logged or drawn
_LogBias = Annotated[float, Rule(lambda v: v < math.inf, "a number")]  # -inf where nothing is attended to


def sampled_distances(length: int) -> list[int]:
    """Return at most 64 distances from 0 to length - 1: all small ones, then log-spaced ones.

    >>> sampled_distances(5), len(sampled_distances(9216))
    ([0, 1, 2, 3, 4], 64)
    """
    # each step is at least 1; the remaining logarithmic range is divided evenly among the remaining distances
    result = [0]
    for left in range(min(_MAX_DISTANCES, length) - 1, 0, -1):
        ratio = ((length - 1) / max(1, result[-1])) ** (1 / left)
        result.append(max(result[-1] + 1, min(length - left, round(max(1, result[-1]) * ratio))))
    return result


@dataclass(frozen=True)
class _Snapshot:
    step: Natural
    distances: tuple[Natural, ...]
    bias: Mapping[str, tuple[tuple[_LogBias, ...], ...]]


class BiasHistory:
    """Appends bias snapshots of a training to a file.

    Args:
        folder: folder of the training, in which the file is.
        start: updates done before the first new snapshot; later ones in the file are dropped.
        length: training length in tokens.
    """

    def __init__(self, folder: str | Path, start: int, length: int) -> None:
        self.path, self.distances = Path(folder) / FILE, sampled_distances(length)
        self.snapshots = [snapshot for snapshot in read_history(folder) if snapshot["step"] < start]

    def add(self, step: int, profiles: dict[str, Tensor]) -> None:
        """Write a snapshot.

        Args:
            step: number of updates done.
            profiles: layer name -> (H, n) log-bias over distances 0 … n-1.
        """
        bias = {layer: profile[:, self.distances].tolist() for layer, profile in profiles.items()}
        self.snapshots.append({"step": step, "distances": self.distances, "bias": bias})
        atomic_write(self.path, "".join(json.dumps(snapshot) + "\n" for snapshot in self.snapshots))


def read_history(folder: str | Path) -> list[dict[str, Any]]:
    """Read the snapshots of a training.

    Args:
        folder: folder of the training, in which the file is.

    Returns:
        The snapshots, the earliest first, each with ``step`` (updates), ``distances`` (tokens) and ``bias`` (layer name
        -> head -> log-bias at each distance); an empty list if there is no file.

    Raises:
        UserError: a line of the file is damaged.
    """
    path = Path(folder) / FILE
    records.read_records(_Snapshot, path, "the snapshot")
    return read_json_lines(path)


def spread_indices(count: int) -> list[int]:
    """Return the indices of up to four of ``count`` heads or layers, evenly spread from the first to the last."""
    if count <= _MAX_SPREAD:
        return list(range(count))
    return [round(k * (count - 1) / (_MAX_SPREAD - 1)) for k in range(_MAX_SPREAD)]


@torch.no_grad()
def bias_map(encoding: Encoding, length: int, heads: Sequence[int]) -> tuple[Tensor, int]:
    """Return the exact bias of some heads at plain positions, sampled for a picture.

    Args:
        encoding: an encoding with a bias.
        length: number of tokens of the text.
        heads: indices of the H' heads.

    Returns:
        (H', n, n) float64 bias of query i (row) and key j (column), and the step in tokens between neighbouring rows
        and columns: 1 for up to 256 tokens, otherwise larger.
    """
    first = next(encoding.parameters(), None)
    pos = Positions.arange(length, dtype=torch.float64, device=None if first is None else first.device)
    step = -(-length // _MAX_CELLS)
    sampled = slice(0, None, step)
    return encoding.attention_bias(pos).materialize(pos, sampled, sampled)[0, list(heads)].cpu(), step
