"""Definition 0.1 of length extrapolation in "Exploring Transformer Extrapolation" (arXiv 2307.10156), as measured."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from fairseq_rpe.core.errors import UserError

LAST_EARLY_POSITION = 3  # at positions 0 … 3 a model has almost no context
MIN_CONTEXT_GAIN = 0.01  # of :func:`context_gain`, below which a model does not use its context


@dataclass(frozen=True)
class Deviation:
    """Relative deviations (ppl_n - ppl_m) / ppl_m over the evaluated lengths n > m.

    Attributes:
        largest: max |deviation|, which Definition 0.1 bounds by δ; improvements count too.
        worst: max(0, deviation), the one-sided version, in which improvements do not count.
        end: deviation at the longest length.
    """

    largest: float
    worst: float
    end: float

    def extrapolates(self, delta: float, one_sided: bool = False) -> bool:
        """Return whether the deviation is below δ at every evaluated length; ``one_sided`` ignores improvements."""
        return (self.worst if one_sided else self.largest) < delta


def deviation(ppl: Mapping[int, float], trained_at: int) -> Deviation:
    """Return how perplexity changes beyond the training length m.

    Args:
        ppl: perplexity by evaluation length in tokens.
        trained_at: training length m in tokens.

    Raises:
        UserError: there is no perplexity at the training length, or none beyond it.

    >>> deviation({64: 50.0, 128: 49.0, 256: 51.0}, 64)
    Deviation(largest=0.02, worst=0.02, end=0.02)
    """
    by_length = deviations_by_length(ppl, trained_at)
    return by_length[max(by_length)]


def deviations_by_length(ppl: Mapping[int, float], trained_at: int) -> dict[int, Deviation]:
    """Return how perplexity changes beyond the training length m up to each evaluated length.

    Args:
        ppl: perplexity by evaluation length in tokens.
        trained_at: training length m in tokens.

    Returns:
        For each evaluated length n > m, ascending, the deviations at the lengths up to n.

    Raises:
        UserError: there is no perplexity at the training length, or none beyond it.

    >>> deviations_by_length({64: 50.0, 128: 51.0, 256: 45.0}, 64)[256]
    Deviation(largest=0.1, worst=0.02, end=-0.1)
    """
    if trained_at not in ppl:
        raise UserError(f"no perplexity at the training length of {trained_at} tokens: evaluate there too")
    reference = ppl[trained_at]
    by_length: dict[int, Deviation] = {}
    largest = worst = 0.0
    for length in sorted(n for n in ppl if n > trained_at):
        end = (ppl[length] - reference) / reference
        largest, worst = max(largest, abs(end)), max(worst, end)
        by_length[length] = Deviation(largest, worst, end)
    if not by_length:
        raise UserError(f"no perplexity beyond the training length of {trained_at} tokens: evaluate at longer ones")
    return by_length


def mean_deviation(seeds: Sequence[Deviation]) -> Deviation:
    """Return the mean of the deviations of at least one seed.

    The deviation of the mean perplexity would be different: rising and falling seeds would cancel.
    """
    largest, worst, end = (
        sum(getattr(seed, name) for seed in seeds) / len(seeds) for name in ("largest", "worst", "end")
    )
    return Deviation(largest, worst, end)


def context_gain(upto: Sequence[int], loss: Sequence[float], tokens: Sequence[int]) -> float | None:
    """Return 1 - late / early, the fraction of its loss that a model saves by its context.

    ``early`` is the mean loss at positions 0 … 3, ``late`` that in the last bucket, about half of the block.

    Args:
        upto: last position of each bucket.
        loss: mean loss of each bucket.
        tokens: number of targets in each bucket.

    Returns:
        The gain, or None if no bucket ends beyond position 3.

    >>> round(context_gain([0, 1, 3, 7, 15], [7.0, 6.5, 6.0, 5.8, 5.1], [10, 10, 20, 40, 80]), 3)
    0.2
    """
    early = [(value, n) for end, value, n in zip(upto, loss, tokens, strict=True) if end <= LAST_EARLY_POSITION]
    if not early or upto[-1] <= LAST_EARLY_POSITION:
        return None
    mean = sum(value * n for value, n in early) / sum(n for _, n in early)
    return 1 - loss[-1] / mean


def separating_deltas(converging: Sequence[float], diverging: Sequence[float]) -> tuple[float, float] | None:
    """Return the range low < δ <= high in which exactly the methods with a converging series extrapolate, or None.

    Args:
        converging: deviations of the methods whose Σ exp(bias) converges.
        diverging: deviations of the other methods.

    >>> separating_deltas([0.03, 0.01], [0.07, 0.5])
    (0.03, 0.07)
    """
    low, high = max(converging, default=0.0), min(diverging, default=math.inf)
    return (low, high) if low < high else None
