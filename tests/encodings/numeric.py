"""What several tests of encodings need: tensors in float64, attention pair by pair in numpy."""

from __future__ import annotations

import numpy as np
import torch

from fairseq_rpe import RelativeAttention
from fairseq_rpe.core import Positions
from fairseq_rpe.encodings import Encoding, build


def exact(n: int, m: int | None = None) -> Positions:
    return Positions.arange(n, m, dtype=torch.float64)


def vectors(*shape: int, count: int = 3, dtype: torch.dtype = torch.float64, seed: int = 0) -> list[torch.Tensor]:
    made = torch.Generator().manual_seed(seed)
    return [torch.randn(*shape, generator=made, dtype=torch.float64).to(dtype) for _ in range(count)]


def scores(encoding, q: torch.Tensor, k: torch.Tensor, pos: Positions) -> torch.Tensor:
    """Products of turned queries and keys, not scaled."""
    with torch.no_grad():
        return encoding.rotate(q, pos.q, pos).double() @ encoding.rotate(k, pos.k, pos, key=True).double().mT


def turned(x: np.ndarray, angles: np.ndarray) -> np.ndarray:
    """(n, D) by (n, P), the pair (s, s + P) as a complex number; the rest as it is."""
    pairs = angles.shape[1]
    z = (x[:, :pairs] + 1j * x[:, pairs : 2 * pairs]) * np.exp(1j * angles)
    return np.concatenate([z.real, z.imag, x[:, 2 * pairs :]], 1)


def softmax(logits: np.ndarray) -> np.ndarray:
    weights = np.exp(logits - logits.max(-1, keepdims=True))
    return weights / weights.sum(-1, keepdims=True)


@torch.no_grad()
def lively(spec: str, heads: int, width: int) -> Encoding:
    """An encoding in float64 with changed parameters: what is learned starts small, or at 0, which would hide it."""
    torch.manual_seed(0)
    encoding = build(spec, heads, heads * width).double()
    for parameter in encoding.parameters():
        parameter += 0.3 * torch.randn_like(parameter)
    return encoding


@torch.no_grad()
def check_padding(spec: str, *rows: str) -> None:
    """Rows of 13 tokens with padding have the outputs of the same rows without it, in one pass and with a cache.

    A row is a text of 1 for a token and 0 for padding. The first call with the cache reads eight tokens, of which the
    last ones may be padding.
    """
    layer = RelativeAttention(16, 2, lively(spec, 2, 8).float()).eval()
    is_real = torch.tensor([[sign == "1" for sign in row] for row in rows])
    x = torch.randn(*is_real.shape, 16)
    whole, cache = layer(x, padding=~is_real), layer.new_cache()
    steps = [layer(x[:, len(cache) : stop], cache, padding=~is_real[:, :stop]) for stop in range(8, x.shape[1] + 1)]
    for row, real in enumerate(is_real):
        alone = layer(x[row, real][None])[0]
        torch.testing.assert_close(whole[row, real], alone, rtol=1e-5, atol=1e-5)
        torch.testing.assert_close(torch.cat(steps, 1)[row, real], alone, rtol=1e-5, atol=1e-5)
