"""Scores by how far from the end of its document a question's answer stands."""

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from operator import itemgetter

from fairseq_rpe.questions import metrics
from fairseq_rpe.questions.metrics import Scored
from fairseq_rpe.questions.streaming_metrics import adds_up
from fairseq_rpe.utils.records import Count, Natural

BANDS = 8  # of about as many questions each


@dataclass(frozen=True)
class Band:
    """The score in per cent of ``questions`` whose answer stands ``least`` to ``most`` words before the end."""

    least: Natural
    most: Natural
    questions: Count
    score: float


def bands(metric: str, items: Sequence[Scored], distances: Sequence[int | None]) -> tuple[Band, ...]:
    """The score of the nearest eighth of the questions, of the next, and so on; equal distances are not parted.

    None where a distance is not known, and of a metric that is no mean over questions.
    """
    known = [(distance, place) for place, distance in enumerate(distances) if distance is not None]
    if len(known) < max(len(items), BANDS) or not adds_up(metric):
        return ()
    known.sort()
    sizes = [len(known) * number // BANDS for number in range(BANDS + 1)]
    # up to the last question that stands as far as the one where an eighth ends
    cuts = sorted({bisect_right(known, known[size - 1][0], key=itemgetter(0)) if size else 0 for size in sizes})
    found = []
    for start, end in pairwise(cuts):
        own = known[start:end]
        score = metrics.score(metric, [items[place] for _, place in own])
        found.append(Band(own[0][0], own[-1][0], len(own), score))
    return tuple(found)
