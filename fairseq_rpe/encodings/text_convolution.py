"""Causal convolution over the tokens of each text, whose rows may hold padding and several texts."""

import torch
from torch import Tensor
from torch.nn import functional as F


def convolve_texts(u: Tensor, taps: Tensor, begins: Tensor, padding: Tensor | None) -> Tensor:
    """Return Σ_τ a_τ ⊙ u_(t-τ) for each token t, over the last tokens of its own text.

    Args:
        u: (B, H, m, E) vectors of the tokens.
        taps: (H, E, T) coefficients a of each element, τ = 0 … T-1.
        begins: (B or 1, m) bool, True at the first token of each text, before which the sum has zeros.
        padding: (B, m) bool, True at tokens that the sum skips, or None.

    Returns:
        (B, H, m, E), arbitrary at padding.
    """
    if padding is not None:
        order = padding.byte().argsort(dim=1, stable=True)  # (B, m), the tokens of a row, and its padding behind
        begins = begins.expand(len(order), -1).gather(1, order)
        total = convolve_texts(u.gather(2, order[:, None, :, None].expand_as(u)), taps, begins, None)
        return total.gather(2, order.argsort(dim=1)[:, None, :, None].expand_as(total))
    m, text = u.shape[2], begins.long().cumsum(1)  # (B or 1, m), number of the text of each token
    taps = taps.to(u.dtype)[:, None]  # (H, 1, E, T)
    total = u * taps[..., 0]
    for lag in range(1, min(taps.shape[-1], m)):
        is_same = (text[:, lag:] == text[:, :-lag])[:, None, :, None]  # (B or 1, 1, m - lag, 1)
        earlier = (u[:, :, :-lag] * taps[..., lag]).masked_fill(~is_same, 0.0)
        total = total + F.pad(earlier, (0, 0, lag, 0))
    return total


def random_taps(width: int, count: int) -> Tensor:
    """Return initial coefficients (E, T), uniform within ±1/sqrt(T), as those of a depthwise ``torch.nn.Conv1d``.

    Args:
        width: E, number of elements.
        count: T, number of tokens.
    """
    return torch.empty(width, count).uniform_(-1, 1) * count**-0.5
