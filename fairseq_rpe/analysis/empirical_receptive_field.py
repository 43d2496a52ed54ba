"""Empirical receptive field: how many of the nearest keys hold all but ε of the attention.

Source: "Exploring Transformer Extrapolation" (arXiv 2307.10156), Fig. 5 and the quantisation in its appendix.
n_emp(ε) = inf{ j : C_ij > (1 - ε)·C_ii } for query i, where C_ij sums exp(q·k/sqrt(D) + bias) over the j keys nearest
to it, itself included: C_ij / C_ii is the softmax mass of those keys. Distances count tokens, not moved positions.
"""

from collections.abc import Sequence
from fractions import Fraction

import torch
from torch import Tensor

from fairseq_rpe.core.errors import UserError

_EVERY, _POINTS = 64, 256  # of a curve each distance up to _EVERY is shown, then a logarithmic choice


def n_emp(mass: Tensor, epsilons: Sequence[float]) -> Tensor:
    """inf{ j : Σ_(t<j) mass_t > (1 - ε)·Σ_t mass_t }, in keys; 1 is the query alone.

    ``mass``: (…, m) weights >= 0 by distance 0 … m-1, with a positive sum. Of E values of ε in (0, 1): (E, …) int64.

    >>> n_emp(torch.full((10,), 0.1), [0.5, 0.05]).tolist()
    [6, 10]
    """
    check_epsilons(epsilons)
    near = mass.double().cumsum(-1)
    return torch.stack([(near <= near[..., -1:] * (1 - e)).sum(-1) + 1 for e in epsilons])


def quantised(mass: Tensor) -> tuple[Tensor, Tensor]:
    """The curve of the paper's appendix: n/m against 50 values of ε from 1 down to 0.

    There n is the first j in 0 … m-1 with Σ_(t<j) mass_t >= (1 - ε)·Σ_(t<m) mass_t, and m where there is none and
    always at ε = 0. The sum ends at m and the comparison is >=, so this differs from :func:`n_emp` and depends on m.

    ``mass``: (…, m) weights >= 0 by distance 0 … m-1. Gives ε (50,) and n/m (…, 50), float64.
    """
    m = mass.shape[-1]
    epsilons = torch.linspace(1, 0, 50, dtype=torch.float64, device=mass.device)
    near = mass.double().cumsum(-1)
    before = torch.cat([torch.zeros_like(near[..., :1]), near[..., :-1]], dim=-1)
    first = torch.searchsorted(before, (near[..., -1:] * (1 - epsilons)).contiguous())
    first[..., -1] = m
    return epsilons, first / m


def check_epsilons(epsilons: Sequence[float | Fraction], name: str = "epsilon") -> None:
    """Refuse values of ε outside (0, 1), where n_emp is not defined or always 1; ``name``: how to call them."""
    for e in epsilons:
        if not 0 < e < 1:
            raise UserError(f"{name} {float(e):g} is not between 0 and 1: it is the part of the attention left out")


def thinned(length: int) -> list[int]:
    """Distances 0 … length-1, beyond the first ones a logarithmic choice that ends with the last."""
    if length <= _POINTS:
        return list(range(length))
    left = _POINTS - _EVERY
    far = {round(_EVERY * ((length - 1) / _EVERY) ** (i / left)) for i in range(left + 1)}
    return [*range(_EVERY), *sorted(far)]
