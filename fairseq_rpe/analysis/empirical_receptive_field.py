"""Empirical receptive field, and the output error of attention that sees the nearest keys only.

Source: "Exploring Transformer Extrapolation" (arXiv 2307.10156). Query i with scores s_t on the keys t <= i has the
output o_i^j = Σ_t exp(s_t)·v_t / C_ij over its j nearest keys, itself included, where C_ij is the sum of exp(s_t) over
them and s = q·k/sqrt(D) + bias. Distances count tokens, not transformed positions: from 0, the query itself, while
numbers of keys count from 1, so the j nearest keys are those at the distances 0 … j-1.

- Fig. 5 and the quantisation in the appendix: n_emp(ε) = inf{ j : C_ij > (1 - ε)·C_ii }, where C_ij / C_ii is the
  softmax mass of the j nearest keys.
- Hypothesis 0.1, Eq. 9 and 13: a model extrapolates if for every ε there is a j with δ(i, j) < ε for all i, where

      δ(i, j) = ‖o_i^i - o_i^j‖ <= 2·l·(1 - C_ij / C_ii),   l = max_t ‖v_t‖ over all keys of i.

  The bound holds for any softmax attention. The paper's l bounds queries and keys too, which this inequality does not
  need.
"""

from collections.abc import Iterator, Sequence
from decimal import Decimal
from fractions import Fraction

import torch
from torch import Tensor

from fairseq_rpe.core.errors import UserError

_EVERY_BELOW = 64  # a curve has every distance below this one,
_LOG_STEPS = 192  # and above it the ends of so many log-spaced steps


def n_emp(weights: Tensor, epsilons: Sequence[float]) -> Tensor:
    """Return the empirical receptive field in keys: the least j with Σ_(t<j) w_t > (1 - ε)·Σ_(t<m) w_t.

    Args:
        weights: (…, m) attention weights w_t >= 0 of the keys at the distances t = 0 … m-1, with a positive sum.
        epsilons: E values of ε in (0, 1).

    Returns:
        (E, …) int64 numbers of nearest keys, between 1 (the query alone) and m.

    Raises:
        UserError: an ε is not between 0 and 1.

    >>> n_emp(torch.full((10,), 0.1), [0.5, 0.05]).tolist()
    [6, 10]
    """
    check_epsilons(epsilons)
    mass_of_nearest = weights.double().cumsum(-1)  # (…, m): sum over the 1 … m nearest keys
    total = mass_of_nearest[..., -1:]  # (…, 1)
    # the sums increase, so the first that is large enough comes after all that are not
    return torch.stack([(mass_of_nearest <= total * (1 - e)).sum(-1) + 1 for e in epsilons])


def quantised_curve(weights: Tensor) -> tuple[Tensor, Tensor]:
    """Return the curve of the paper's appendix: n/m at 50 values of ε from 1 down to 0.

    Here n is the least number j of nearest keys in 0 … m-1 with Σ_(t<j) w_t >= (1 - ε)·Σ_(t<m) w_t, and m if there is
    none. Except at the ends it is :func:`n_emp`, with >= in place of >: the two differ only where a sum is exactly
    (1 - ε) of the total. At ε = 1, n is 0 keys; at ε = 0 it is set to m, also if the last weights are 0.

    Args:
        weights: (…, m) attention weights w_t >= 0 of the keys at the distances t = 0 … m-1.

    Returns:
        ε (50,) and n/m (…, 50) in float64.
    """
    m = weights.shape[-1]
    epsilons = torch.linspace(1, 0, 50, dtype=torch.float64, device=weights.device)
    mass_of_nearest = weights.double().cumsum(-1)  # (…, m): sum over the 1 … m nearest keys
    total = mass_of_nearest[..., -1:]  # (…, 1)
    # (…, m): sum over the 0 … m-1 nearest keys, so that an index is a number of keys
    mass_of_nearest = torch.cat([torch.zeros_like(total), mass_of_nearest[..., :-1]], dim=-1)
    n = torch.searchsorted(mass_of_nearest, (total * (1 - epsilons)).contiguous())  # (…, 50)
    n[..., -1] = m
    return epsilons, n.double() / m


def check_epsilons(epsilons: Sequence[float | Fraction], name: str = "epsilon") -> None:
    """Raise UserError for values of ε outside (0, 1), where n_emp is undefined or always 1.

    Args:
        epsilons: values of ε.
        name: what the message calls them.
    """
    for e in epsilons:
        if not 0 < e < 1:
            # Decimal: a fraction may be too large for a float
            shown = Decimal(e.numerator) / e.denominator if isinstance(e, Fraction) else e
            raise UserError(f"{name} {shown:g} is not between 0 and 1: it is the part of the attention left out")


def log_spaced_distances(length: int) -> list[int]:
    """Return at most 257 distances from 0 to ``length`` - 1.

    Up to a length of 256 these are all distances, else all below 64 and then log-spaced ones, both ends included.
    """
    if length <= _EVERY_BELOW + _LOG_STEPS:
        return list(range(length))
    ratio = (length - 1) / _EVERY_BELOW
    # a set, as rounding makes neighbours equal where the steps are short
    far_distances = {round(_EVERY_BELOW * ratio ** (step / _LOG_STEPS)) for step in range(_LOG_STEPS + 1)}
    return [*range(_EVERY_BELOW), *sorted(far_distances)]


def window_sizes(length: int) -> list[int]:
    """Return the window sizes 1, 2, 3, 4, 6, 8, 12, … below ``length``, in keys; only 1 if there are none.

    >>> window_sizes(13)
    [1, 2, 3, 4, 6, 8, 12]
    """
    powers = [2**k for k in range(length.bit_length())]
    candidates = {*powers, *(3 * power for power in powers)}
    return sorted(size for size in candidates if size < length) or [1]


def truncation_errors(scores: Tensor, v: Tensor, sizes: list[int]) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield δ(i, j) and its bound for each number j of nearest keys in ``sizes``.

    With o_i^far the output over all keys but the j nearest, o_i^i - o_i^j = (1 - C_ij / C_ii)·(o_i^far - o_i^j). This
    form is computed, because nothing cancels in it where the far keys have almost no mass.

    Args:
        scores: (B, H, n, m) attention scores of the last n of m tokens; -inf in the future, finite at the query itself.
        v: (B, H, m, D) values.
        sizes: numbers j of nearest keys, from 1.

    Yields:
        δ and its bound of every query, (B, H, n) each, in units of v and in the dtype of the arguments; use float64
        where δ is small.
    """
    n, m = scores.shape[-2:]
    query = torch.arange(m - n, m, device=scores.device)[:, None]
    distance = query - torch.arange(m, device=scores.device)  # (n, m)
    # query i sees the keys 0 … i, so l is a running maximum
    largest_norm = v.norm(dim=-1).cummax(-1).values[..., m - n :]  # (B, H, n): l
    log_total = scores.logsumexp(-1)  # (B, H, n): ln C_ii
    for size in sizes:
        is_near = distance < size  # (n, m): the j nearest keys, and the future, whose scores are -inf
        far_scores = scores.masked_fill(is_near, -torch.inf)
        far_mass = (far_scores.logsumexp(-1) - log_total).exp()  # (B, H, n): 1 - C_ij / C_ii
        # a query without far keys would give softmax(-inf, …) = NaN; any finite scores do, as its far_mass is 0
        far_scores = far_scores.masked_fill((far_mass == 0)[..., None], 0.0)
        far_output = far_scores.softmax(-1) @ v  # (B, H, n, D)
        near_output = scores.masked_fill(~is_near, -torch.inf).softmax(-1) @ v  # (B, H, n, D)
        yield far_mass * (far_output - near_output).norm(dim=-1), 2 * largest_norm * far_mass
