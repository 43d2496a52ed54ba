"""Attention dropout whose mask can be made again from a seed, block by block.

Every backend draws the same mask: rows are cut into blocks of ``ROWS`` queries, and block b of a call with seed s is
drawn by a generator seeded with s + b. So a backend that works block by block equals the dense reference, and a
backward pass draws the mask again instead of keeping n² numbers.
"""

import torch
from torch import Tensor

ROWS = 128


def draw_seed() -> int:
    """A seed from torch's default generator: repeatable, and the same when a layer is recomputed."""
    return int(torch.randint(2**62, ()))


def keep_block(
    seed: int, start: int, stop: int, shape: tuple[int, int, int, int], p: float, device: torch.device
) -> Tensor:
    """Scaled keep mask of query rows start … stop-1: 0 with probability p, else 1/(1-p).

    Args:
        start: a multiple of ROWS.
        shape: (B, H, n, m) of the whole attention; the queries are the last n of the m tokens.

    Returns:
        (B, H, stop - start, m - n + stop) float32: the keys that the rows may see.
    """
    batch, heads, n, m = shape
    keep = torch.zeros(batch, heads, stop - start, m - n + stop, device=device)
    for first in range(start, stop, ROWS):
        generator = torch.Generator(device=device).manual_seed(seed + first // ROWS)
        # drawn in full height and reach, so that a row's mask does not depend on how many rows follow it
        noise = torch.rand(batch, heads, ROWS, m - n + first + ROWS, device=device, generator=generator)
        part = keep[:, :, first - start : first - start + ROWS, : noise.shape[3]]
        part.copy_((noise[:, :, : part.shape[2], : part.shape[3]] >= p) / (1 - p))
    return keep
