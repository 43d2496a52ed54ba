"""Attention dropout with a mask that is drawn again from a seed, block by block.

All backends draw the same mask. Rows are cut into blocks of ``ROWS`` queries, and a generator seeded with s + b draws
block b of a call with seed s. So a backend that works in blocks equals the dense reference, and a backward pass draws
the mask again instead of storing n² numbers.
"""

import torch
from torch import Tensor

ROWS = 128  # queries of a block


def draw_seed() -> int:
    """Draw a seed from torch's default generator: repeatable, and the same when a layer is recomputed."""
    return int(torch.randint(2**62, ()))


def keep_block(
    seed: int, start: int, stop: int, shape: tuple[int, int, int, int], p: float, device: torch.device
) -> Tensor:
    """Return the scaled keep mask of query rows start … stop-1: 0 with probability p, else 1/(1-p).

    Args:
        seed: seed of the attention call, as :func:`draw_seed` returns it.
        start: first row, a multiple of ROWS.
        stop: end of the rows.
        shape: (B, H, n, m) of the whole attention; the queries are the last n of the m tokens.
        p: probability of dropping a weight.
        device: device of the mask and of the generator; other devices draw other masks.

    Returns:
        (B, H, stop - start, m - n + stop) float32: the keys that the rows may see.
    """
    batch, heads, n, m = shape
    keep = torch.zeros(batch, heads, stop - start, m - n + stop, device=device)
    for first in range(start, stop, ROWS):
        generator = torch.Generator(device=device).manual_seed(seed + first // ROWS)
        # always full height and width, so that a row's mask does not depend on how many rows follow it
        noise = torch.rand(batch, heads, ROWS, m - n + first + ROWS, device=device, generator=generator)
        rows = keep[:, :, first - start : first - start + ROWS, : noise.shape[3]]
        rows.copy_((noise[:, :, : rows.shape[2], : rows.shape[3]] >= p) / (1 - p))
    return keep
