"""Length extrapolation as a yes or no: Definition 0.1 of "Exploring Transformer Extrapolation" (arXiv 2307.10156)."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from fairseq_rpe.core.errors import UserError

EARLY = 3  # the last of the positions 0, 1, 2, 3, where a model has seen next to nothing
GAIN = 0.01


@dataclass(frozen=True)
class Deviation:
    """Relative deviations (ppl_n - ppl_m) / ppl_m over the evaluated lengths n > m; ``end``: at the longest one.

    ``largest``: max |deviation|, which the definition bounds by δ; it counts improvements too. ``worst``:
    max(0, deviation): one-sided, improvements are free.
    """

    largest: float
    worst: float
    end: float

    def extrapolates(self, delta: float, one_sided: bool = False) -> bool:
        """Whether the deviation stays below δ at every evaluated length."""
        return (self.worst if one_sided else self.largest) < delta


def deviation(ppl: Mapping[int, float], trained_at: int) -> Deviation:
    """How ``ppl``, perplexity by evaluation length in tokens, changes beyond the training length m, ``trained_at``.

    Refuses what has nothing evaluated at the training length, or nothing beyond it.

    >>> deviation({64: 50.0, 128: 49.0, 256: 51.0}, 64)
    Deviation(largest=0.02, worst=0.02, end=0.02)
    """
    if trained_at not in ppl:
        raise UserError(f"no perplexity at the training length of {trained_at} tokens: evaluate there too")
    own = ppl[trained_at]
    found = {n: (value - own) / own for n, value in ppl.items() if n > trained_at}
    if not found:
        raise UserError(f"no perplexity beyond the training length of {trained_at} tokens: evaluate at longer ones")
    return Deviation(max(map(abs, found.values())), max(0.0, *found.values()), found[max(found)])


def mean_deviation(seeds: Sequence[Deviation]) -> Deviation:
    """The mean over models that differ in their seed, at least one; each number is between those of the seeds.

    The deviation of a mean perplexity would not be: seeds that rise and seeds that fall cancel there.
    """
    largest, worst, end = (
        sum(getattr(one, part) for one in seeds) / len(seeds) for part in ("largest", "worst", "end")
    )
    return Deviation(largest, worst, end)


def context_gain(upto: Sequence[int], loss: Sequence[float], tokens: Sequence[int]) -> float | None:
    """1 - late / early: the share of its loss that a model saves by what it sees of a block.

    ``early``: mean loss at positions 0 … ``EARLY``; ``late``: in the last bucket, about half of the block. ``loss``:
    means of ``tokens`` targets at positions up to ``upto`` (inclusive) and beyond the bucket before. ``None`` where
    no bucket lies beyond ``EARLY``.

    >>> round(context_gain([0, 1, 3, 7, 15], [7.0, 6.5, 6.0, 5.8, 5.1], [10, 10, 20, 40, 80]), 3)
    0.2
    """
    early = [(one, n) for end, one, n in zip(upto, loss, tokens, strict=True) if end <= EARLY]
    if not early or upto[-1] <= EARLY:
        return None
    mean = sum(one * n for one, n in early) / sum(n for _, n in early)
    return 1 - loss[-1] / mean


def agreeing(converging: Sequence[float], diverging: Sequence[float]) -> tuple[float, float] | None:
    """Every δ at which exactly the methods whose series converges extrapolate: low < δ <= high, or None.

    ``converging``: deviations of the methods whose Σ exp(bias) converges; ``diverging``: of the others.

    >>> agreeing([0.03, 0.01], [0.07, 0.5])
    (0.03, 0.07)
    """
    low, high = max(converging, default=0.0), min(diverging, default=math.inf)
    return (low, high) if low < high else None
