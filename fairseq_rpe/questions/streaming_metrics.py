"""Scores of questions that are answered in parts, as the batches of a validation are: sums that can be added up."""

from collections.abc import Sequence

import numpy as np

from fairseq_rpe.questions.metrics import Scored, score

# of a metric, the means over questions that it is made of
_MEANS: dict[str, tuple[str, ...]] = {one: (one,) for one in ("f1", "em", "accuracy", "rouge1", "rouge2", "rougeL")}
_MEANS["rgm"] = ("rouge1", "rouge2", "rougeL")
_GROUPED = "group_em"


def adds_up(metric: str) -> bool:
    """Whether it is made of means over questions or groups of them, as correlations and F1 of classes are not."""
    return metric == _GROUPED or metric in _MEANS


def part(metric: str, items: Sequence[Scored], groups: Sequence[int], count: int) -> np.ndarray:
    """What adds up over parts, float64: [questions, Σ of each mean]; of ``group_em`` (2, ``count``), by group those
    asked and those answered wrongly. ``groups``: of each item the number of its group, below ``count``.
    """
    if metric == _GROUPED:
        found = np.zeros((2, count))
        for item, group in zip(items, groups, strict=True):
            found[:, group] += (1, score("accuracy", [item]) < 100)
        return found
    sums = [sum(score(mean, [item]) for item in items) for mean in _MEANS[metric]]
    return np.array([len(items), *sums], np.float64)


def whole(metric: str, total: np.ndarray) -> float | None:
    """The metric, 0 to 100, from the sum of all parts; None: nothing was asked."""
    if metric == _GROUPED:
        asked, wrong = total
        return 100 * float((wrong[asked > 0] == 0).mean()) if asked.any() else None
    if not total[0]:
        return None
    means = total[1:] / total[0]
    return float(means.prod() ** (1 / len(means)))
