"""ALiBi."""

import functools

import torch
from torch import Tensor

from fairseq_rpe.core.log_bias import exact
from fairseq_rpe.encodings.base import DistanceBias, register


def alibi_slopes(heads: int) -> list[float]:
    """The H slopes k_h, head 1 first: ``2^(-8h/H)`` where H is a power of two.

    Otherwise the slopes of c heads (c the largest power of two below H) and then every other slope of the list
    for 2c heads, as in the authors' code (the paper defines powers of two only; the order is not monotone).

    >>> alibi_slopes(4)
    [0.25, 0.0625, 0.015625, 0.00390625]
    """
    power = 1 << (heads.bit_length() - 1)
    slopes = [2.0 ** (-8.0 * h / power) for h in range(1, power + 1)]
    return slopes + (alibi_slopes(2 * power)[0::2][: heads - power] if power < heads else [])


@functools.lru_cache(maxsize=64)
def slopes(heads: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """(H,) slopes; cached rather than a buffer, so that no checkpoint holds them and ``.half()`` spares them."""
    return torch.tensor(alibi_slopes(heads), dtype=dtype, device=device)


@register("alibi")
class Alibi(DistanceBias):
    """Linear penalty with a fixed slope per head; Σ exp(bias) = 1/(1 - exp(-k)) converges.

    Written on the distance, not as ``+k·j`` as in the authors' code: equal after softmax, but exact in low precision.
    """

    formula = "-k_h·d,  k_h = 2^(-8h/H)"
    paper = "Press, Smith, Lewis 2022 (arXiv 2108.12409)"

    def head_parameters(self, like: Tensor) -> tuple[Tensor, ...]:
        return (slopes(self.heads, like.dtype, like.device),)

    def head_bias(self, d: Tensor, k: Tensor) -> Tensor:
        return -k * d

    def log_bias_formulas(self) -> list[str]:
        return [f"-{exact(k)}*n" for k in alibi_slopes(self.heads)]
