"""Empirical receptive field, and the output error of attention that sees the nearest keys only.

Source: "Exploring Transformer Extrapolation" (arXiv 2307.10156). Query i with scores s_t on the keys t <= i has the
output o_i^j = Σ_t exp(s_t)·v_t / C_ij over its j nearest keys, itself included, where C_ij is the sum of exp(s_t) over
them and s = q·k/sqrt(D) + bias. Distances count tokens, not transformed positions.

- Fig. 5 and the quantisation in the appendix: n_emp(ε) = inf{ j : C_ij > (1 - ε)·C_ii }, where C_ij / C_ii is the
  softmax mass of the j nearest keys.
- Hypothesis 0.1, Eq. 9 and 13: a model extrapolates if for every ε there is a j with δ(i, j) < ε for all i, where

      δ(i, j) = ‖o_i^i - o_i^j‖ <= 2·l·(1 - C_ij / C_ii),   l = max_t ‖v_t‖ over all keys of i.

  The bound holds for any softmax attention. The paper's l bounds queries and keys too, which this inequality does not
  need.
"""

from collections.abc import Iterator, Sequence
from fractions import Fraction

import torch
from torch import Tensor

from fairseq_rpe.core.errors import UserError

_ALL_UP_TO, _MAX_POINTS = 64, 256  # a curve has every distance below 64, then log-spaced ones, 256 in all


def n_emp(mass: Tensor, epsilons: Sequence[float]) -> Tensor:
    """Return the empirical receptive field inf{ j : Σ_(t<j) mass_t > (1 - ε)·Σ_t mass_t } in keys.

    Args:
        mass: (…, m) attention weights >= 0 by distance 0 … m-1, with a positive sum.
        epsilons: E values of ε in (0, 1).

    Returns:
        (E, …) int64, between 1 (the query alone) and m.

    Raises:
        UserError: an ε is not between 0 and 1.

    >>> n_emp(torch.full((10,), 0.1), [0.5, 0.05]).tolist()
    [6, 10]
    """
    check_epsilons(epsilons)
    nearest = mass.double().cumsum(-1)  # (…, m): mass of the nearest 1 … m keys
    return torch.stack([(nearest <= nearest[..., -1:] * (1 - e)).sum(-1) + 1 for e in epsilons])


def quantised_curve(mass: Tensor) -> tuple[Tensor, Tensor]:
    """Return the curve of the paper's appendix: n/m at 50 values of ε from 1 down to 0.

    n is the first j in 0 … m-1 with Σ_(t<j) mass_t >= (1 - ε)·Σ_(t<m) mass_t, and m if there is none and always at
    ε = 0. The sum ends at m and the comparison is >=, so n differs from :func:`n_emp` and depends on m.

    Args:
        mass: (…, m) weights >= 0 by distance 0 … m-1.

    Returns:
        ε (50,) and n/m (…, 50), float64.
    """
    m = mass.shape[-1]
    epsilons = torch.linspace(1, 0, 50, dtype=torch.float64, device=mass.device)
    nearest = mass.double().cumsum(-1)  # (…, m)
    before = torch.cat([torch.zeros_like(nearest[..., :1]), nearest[..., :-1]], dim=-1)  # Σ_(t<j) for j = 0 … m-1
    first = torch.searchsorted(before, (nearest[..., -1:] * (1 - epsilons)).contiguous())  # (…, 50)
    first[..., -1] = m
    return epsilons, first / m


def check_epsilons(epsilons: Sequence[float | Fraction], name: str = "epsilon") -> None:
    """Raise UserError for values of ε outside (0, 1), where n_emp is undefined or always 1.

    Args:
        epsilons: values of ε.
        name: what the message calls them.
    """
    for e in epsilons:
        if not 0 < e < 1:
            raise UserError(f"{name} {float(e):g} is not between 0 and 1: it is the part of the attention left out")


def log_spaced(length: int) -> list[int]:
    """Return at most about 256 distances from 0 to length - 1: all below 64, then log-spaced ones."""
    if length <= _MAX_POINTS:
        return list(range(length))
    steps = _MAX_POINTS - _ALL_UP_TO
    far = {round(_ALL_UP_TO * ((length - 1) / _ALL_UP_TO) ** (i / steps)) for i in range(steps + 1)}
    return [*range(_ALL_UP_TO), *sorted(far)]


def window_sizes(length: int) -> list[int]:
    """Return the window sizes 1, 2, 3, 4, 6, 8, 12, … below ``length``, in keys; only 1 if there are none.

    >>> window_sizes(13)
    [1, 2, 3, 4, 6, 8, 12]
    """
    powers = [2**k for k in range(length.bit_length())]
    return sorted(n for n in {*powers, *(3 * n for n in powers)} if n < length) or [1]


def truncation_errors(scores: Tensor, v: Tensor, sizes: list[int]) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield δ(i, j) and its bound for each number j of keys in ``sizes``.

    With o_far the output over the other keys alone, o_i^i - o_i^j = (1 - C_ij / C_ii)·(o_far - o_i^j). This form is
    computed, because nothing cancels in it where the far keys have almost no mass.

    Args:
        scores: (B, H, n, m) attention scores of the last n of m tokens; -inf in the future, finite at the query itself.
        v: (B, H, m, D) values.
        sizes: numbers j of nearest keys.

    Yields:
        δ and its bound of every query, (B, H, n) each, in units of v and in the dtype of the arguments; use float64
        where δ is small.
    """
    n, m = scores.shape[-2:]
    query = torch.arange(m - n, m, device=scores.device)[:, None]
    distance = query - torch.arange(m, device=scores.device)  # (n, m)
    # query i sees the keys 0 … i, so l is a running maximum
    norm = v.norm(dim=-1).cummax(-1).values[..., m - n :]  # (B, H, n)
    total = scores.logsumexp(-1)  # (B, H, n): ln C_ii
    for size in sizes:
        far = scores.masked_fill(distance < size, -torch.inf)
        left_out = (far.logsumexp(-1) - total).exp()  # (B, H, n): 1 - C_ij / C_ii
        # a query without far keys would give softmax(-inf, …) = NaN; any finite scores do, as left_out is 0
        beyond = far.masked_fill((left_out == 0)[..., None], 0.0).softmax(-1) @ v
        near = scores.masked_fill(distance >= size, -torch.inf).softmax(-1) @ v
        yield left_out * (beyond - near).norm(dim=-1), 2 * norm * left_out
