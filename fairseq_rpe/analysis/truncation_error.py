"""What a query's output loses when it sees its nearest keys only, and how much it can lose at most.

Source: "Exploring Transformer Extrapolation" (arXiv 2307.10156), Hypothesis 0.1, Eq. 9 and 13. Query i with scores s_t
on the keys t <= i has the output o_i^j = Σ_t exp(s_t)·v_t / C_ij over its j nearest keys, itself included, C_ij the sum
of exp(s_t) over them. Then

    δ(i, j) = ‖o_i^i - o_i^j‖ <= 2·l·(1 - C_ij / C_ii),   l = max_t ‖v_t‖ over all its keys.

Hypothesis 0.1: a model extrapolates if for every ε there is a j with δ(i, j) < ε for all i. The bound holds for any
attention that is a softmax; the paper's l bounds queries and keys as well, which this inequality does not need. With
o_far the output over the other keys alone, o_i^i - o_i^j = (1 - C_ij / C_ii)·(o_far - o_i^j), which is computed here:
nothing cancels where the far keys hold next to nothing.
"""

from collections.abc import Iterator

import torch
from torch import Tensor


def window_sizes(length: int) -> list[int]:
    """Numbers of keys 1, 2, 3, 4, 6, 8, 12, … below ``length``, at which both are measured; 1 where there are none.

    >>> window_sizes(13)
    [1, 2, 3, 4, 6, 8, 12]
    """
    powers = [2**k for k in range(length.bit_length())]
    return sorted(n for n in {*powers, *(3 * n for n in powers)} if n < length) or [1]


def losses(scores: Tensor, v: Tensor, sizes: list[int]) -> Iterator[tuple[Tensor, Tensor]]:
    """δ and its bound of every query, (B, H, n) each, for each number j of keys in ``sizes``.

    ``scores``: (B, H, n, m), finite where the query itself is and -inf in its future, the queries the last n of m
    tokens; ``v``: (B, H, m, D) values. In their dtype, float64 for numbers that are to be trusted; both in units of v.
    """
    n, m = scores.shape[-2:]
    query = torch.arange(m - n, m, device=scores.device)[:, None]
    distance = query - torch.arange(m, device=scores.device)
    norm = v.norm(dim=-1).cummax(-1).values[..., m - n :]  # the keys of a query are the first ones
    total = scores.logsumexp(-1)
    for size in sizes:
        far = scores.masked_fill(distance < size, -torch.inf)
        left_out = (far.logsumexp(-1) - total).exp()
        # where no key is far the softmax has no sense, and nothing is left out
        beyond = far.masked_fill((left_out == 0)[..., None], 0.0).softmax(-1) @ v
        near = scores.masked_fill(distance >= size, -torch.inf).softmax(-1) @ v
        yield left_out * (beyond - near).norm(dim=-1), 2 * norm * left_out
