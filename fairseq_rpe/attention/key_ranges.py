"""Which keys blocks of queries can see in a region: what lies outside is never looked at."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from fairseq_rpe.core.bias import Positions
from fairseq_rpe.core.rotation_regions import RotationRegion

ROWS = 256  # queries in a block, a multiple of dropout.ROWS


@dataclass(frozen=True)
class Nearby:
    """The keys of one region.

    Attributes:
        region: with the positions of the keys in ``keys`` alone.
        keys: those that any query can see in it.
        blocks: those that the queries of each block can see in it, some of ``keys``; none: start = stop.
    """

    region: RotationRegion
    keys: slice
    blocks: list[slice]


def nearby(regions: Sequence[RotationRegion], pos: Positions, rows: int = ROWS) -> list[Nearby]:
    """For blocks of ``rows`` queries, without regions that no query is in. Waits for the device once for each region.

    Where positions fall along a row, which they do not by themselves, all keys of the past are taken.
    """
    n, m = pos.q.shape[1], pos.k.shape[1]
    stops = [min(start + rows, n) for start in range(0, n, rows)]
    first, last = _ends(pos.q, rows)
    k = pos.k.contiguous()
    falls = (k.diff(dim=1) < 0).any()
    found = []
    for region in regions:
        least, most = (x.to(k.dtype).expand(len(k), -1).contiguous() for x in region.keys(first, last))
        low = torch.searchsorted(k, least).amin(0).masked_fill(falls, 0)
        high = torch.searchsorted(k, most, right=True).amax(0).masked_fill(falls, m)
        pairs = zip(*torch.stack([low, high]).tolist(), stops, strict=True)
        blocks = [slice(a, max(a, min(b, m - n + stop))) for a, b, stop in pairs]
        inside = [block for block in blocks if block.start < block.stop]
        if inside:
            keys = slice(min(x.start for x in inside), max(x.stop for x in inside))
            found.append(Nearby(region.part(slice(None), keys), keys, blocks))
    return found


def _ends(at: Tensor, rows: int) -> tuple[Tensor, Tensor]:
    """(blocks,) least and largest of (B or 1, n) in each block of columns."""
    missing = -at.shape[1] % rows
    blocks = torch.cat([at, at[:, -1:].expand(-1, missing)], dim=1).unflatten(1, (-1, rows))
    return blocks.amin((0, 2)), blocks.amax((0, 2))
