"""How fast attention falls with position, and how much of that a longer text changes: the analysis of index warping.

Source: "Improving Length Generalization via Position Index Warping", Eq. 3, 4, 6, 9. Queries and keys are equal, of
unit norm and with the same norm in each block of two. Everything is float64; positions and distances may be fractional.
"""

import math
from collections.abc import Callable, Sequence

import torch
from flint import arb
from torch import Tensor

from fairseq_rpe.core.errors import UserError
from fairseq_rpe.core.spec import nearest
from fairseq_rpe.encodings.alibi import alibi_slopes
from fairseq_rpe.positions import SKEWS

Raw = Callable[[Tensor], Tensor]
Skew = str | Callable[[Tensor], Tensor]


def rope_raw(distance: Tensor, width: int | None = None, base: float = 10_000.0) -> Tensor:
    """Raw attention of RoPE (Eq. 3): the mean of cos(n·θ_s) over the pairs of a head, θ_s = base^(-2s/width).

    ``distance``: n >= 0, any shape. ``width``: of the head, which the paper does not give; None is the limit of a wide
    one, (Ci(n) - Ci(n/base)) / ln(base).

    >>> round(rope_raw(torch.tensor(10.0), width=64).item(), 6)
    0.657863
    """
    n = distance.double()
    if width is None:
        inside = n.clamp_min(torch.finfo(n.dtype).tiny * base)
        return torch.where(n > 0, (cosine_integral(inside) - cosine_integral(inside / base)) / math.log(base), 1.0)
    if width < 2 or width % 2:
        raise UserError(f"a rotary head is an even number of dimensions wide, not {width}")
    theta = base ** (-torch.arange(0, width, 2, dtype=n.dtype, device=n.device) / width)
    return (n[..., None] * theta).cos().mean(-1)


def alibi_raw(distance: Tensor, head: int = 1, heads: int = 8) -> Tensor:
    """Raw attention of ALiBi (Eq. 4): 1 - k_h·n, with k_h = 2^-h for eight heads; head 1 is the steepest."""
    if not 1 <= head <= heads:
        raise UserError(f"head {head} does not exist: heads count from 1 to {heads}")
    return 1 - alibi_slopes(heads)[head - 1] * distance.double()


def sensitivity(positions: Tensor, raw: Raw = rope_raw, exponential: bool = False) -> Tensor:
    """Attention sensitivity (Eq. 6): what attention loses from each position to the next, (…, m) -> (…, m - 1).

    Entry i-1 is raw(p_(i-1)) - raw(p_i) for i >= 1; the paper leaves p_(-1), and so the entry of i = 0, undefined.
    ``raw``: raw attention by distance. ``exponential``: compare exp(raw), which is what the paper's figures show,
    instead of raw as in its equation.
    """
    value = raw(positions.double())
    return -torch.diff(value.exp() if exponential else value)


def total_difference(
    skew: Skew, train_length: int, test_length: int, reach: int, raw: Raw = rope_raw, exponential: bool = False
) -> float:
    """:func:`total_differences` at one test length."""
    return total_differences(skew, train_length, [test_length], reach, raw, exponential).item()


def total_differences(
    skew: Skew, train_length: int, tests: Sequence[int], reach: int, raw: Raw = rope_raw, exponential: bool = False
) -> Tensor:
    """Total difference (Eq. 9) at each length of ``tests``: Σ_(i=0…c) |sen_train(L_train - i) - sen_test(L_test - i)|.

    Training positions are L·f(j/L); test positions are interpolated, j·L_train/L_test. The smaller, the better training
    prepares the tail of a longer text. ``skew``: f, as in :func:`warped`; lengths: L_train <= L_test; ``reach``:
    c < L_train, for which the paper takes 10 at 20 and 200 at 500; ``raw``, ``exponential``: as in :func:`sensitivity`.
    """
    shortest = min(tests)
    if not 1 <= train_length <= shortest:
        raise UserError(f"a test length of {shortest} is shorter than the training length {train_length}: swap them")
    if not 0 <= reach < train_length:
        raise UserError(f"reach {reach} leaves the training length {train_length}: choose 0 to {train_length - 1}")
    trained = warped(skew, train_length)[-reach - 2 :]
    tested = torch.stack([interpolated(train_length, n)[-reach - 2 :] for n in tests])
    return (sensitivity(trained, raw, exponential) - sensitivity(tested, raw, exponential)).abs().sum(-1)


def warped(skew: Skew, length: int) -> Tensor:
    """Tail-warped positions (Eq. 8) L·f(j/L) of the indices j = 0 … L, (L + 1,), in tokens.

    ``skew`` is f on [0, 1]: a name of ``fairseq_rpe.positions.SKEWS``, ``none``, or a function.
    """
    known = {"none": lambda x: x, **SKEWS}
    if not callable(skew) and skew not in known:
        raise UserError(f"unknown skew '{skew}'{nearest(skew, known)}; known: {', '.join(known)}, or a function")
    return length * (skew if callable(skew) else known[skew])(torch.arange(length + 1, dtype=torch.float64) / length)


def interpolated(train_length: int, test_length: int) -> Tensor:
    """Interpolated positions j·L_train/L_test of the indices j = 0 … L_test, (L_test + 1,), in tokens."""
    return torch.arange(test_length + 1, dtype=torch.float64) * (train_length / test_length)


def cosine_integral(x: Tensor) -> Tensor:
    """Ci(x) for x > 0 in double precision, by flint."""
    values = [float(arb(v).ci()) for v in x.flatten().tolist()]
    return torch.tensor(values, dtype=torch.float64, device=x.device).reshape(x.shape)
