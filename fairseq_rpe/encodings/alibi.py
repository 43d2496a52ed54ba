"""ALiBi: a linear penalty on the distance (Press et al. 2022)."""

import functools

import torch
from torch import Tensor

from fairseq_rpe.core.log_bias import exact_fraction
from fairseq_rpe.encodings.base import DistanceBias, register


def alibi_slopes(heads: int) -> list[float]:
    """Return the H slopes k_h, head 1 first: ``2^(-8h/H)`` if H is a power of two.

    Otherwise they are the slopes of c heads, c the largest power of two below H, followed by every other slope of 2c
    heads, as in the authors' code. The paper defines powers of two only. The order is then not monotone.

    >>> alibi_slopes(4)
    [0.25, 0.0625, 0.015625, 0.00390625]
    """
    power = 1 << (heads.bit_length() - 1)
    slopes = [2.0 ** (-8.0 * h / power) for h in range(1, power + 1)]
    return slopes + (alibi_slopes(2 * power)[0::2][: heads - power] if power < heads else [])


@functools.lru_cache(maxsize=64)
def slopes(heads: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Return the slopes (H,); cached instead of a buffer, so that checkpoints and ``.half()`` do not affect them."""
    return torch.tensor(alibi_slopes(heads), dtype=dtype, device=device)


@register("alibi", colour="vermilion", marker="s")
class Alibi(DistanceBias):
    """Linear penalty -k_h·d with a fixed slope per head (Press et al. 2022, arXiv 2108.12409, Section 3).

    Σ exp(bias) = 1/(1 - exp(-k)) converges. The authors' code adds ``+k·j``, the key's position; here the bias is a
    function of the distance, which is equal after softmax and exact in low precision.
    """

    formula = "-k_h·d,  k_h = 2^(-8h/H)"
    paper = "Press, Smith, Lewis 2022 (arXiv 2108.12409)"
    dape_base = True

    def head_parameters(self, like: Tensor) -> tuple[Tensor, ...]:
        """Return the slopes k (H,)."""
        return (slopes(self.heads, like.dtype, like.device),)

    def head_bias(self, d: Tensor, k: Tensor) -> Tensor:
        """Return -k·d."""
        return -k * d

    def log_bias_formulas(self) -> list[str]:
        """Return ``-k_h*n`` of each head."""
        return [f"-{exact_fraction(k)}*n" for k in alibi_slopes(self.heads)]
