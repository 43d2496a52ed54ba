"""How right answers are, as the sets' own evaluators compute it; every value is a percentage."""

import importlib.util
import math
import re
import string
import warnings
from collections import Counter, defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from fairseq_rpe.core.errors import UserError
from fairseq_rpe.core.spec import nearest

_ARTICLES = re.compile(r"\b(a|an|the)\b")
_NO_PUNCTUATION = str.maketrans("", "", string.punctuation)
_INVALID = -1  # the class of what is none of the choices


@dataclass(frozen=True)
class Scored:
    """A ``prediction`` with all right ``answers``; ``group``: what is right only together, by itself where empty.

    ``choices``: the classes 0, 1, … of a classification, where the first of the answers is the right one.
    """

    prediction: str
    answers: tuple[str, ...]
    group: str = ""
    choices: tuple[str, ...] = ()


class Undefined(UserWarning):
    """A value that these answers leave undefined, for which 0 was taken."""


def names() -> list[str]:
    """All metrics."""
    return list(_METRICS)


def check(*metrics: str) -> None:
    """Refuse, before any work, a metric that is unknown or whose package is not installed."""
    for metric in metrics:
        if metric not in _METRICS:
            raise UserError(f"unknown metric '{metric}'{nearest(metric, _METRICS)}; known: {', '.join(_METRICS)}")
        package = _PACKAGES.get(metric)
        if package is not None and not _installed(package):
            raise UserError(
                f"metric '{metric}' needs {_SOLD_AS.get(package, package)}, which is not installed: "
                "pip install 'fairseq_rpe[answers]'"
            )


def score(metric: str, items: Sequence[Scored]) -> float:
    """The value of a metric over ``items``, from 0 to 100, or from -100 for a correlation.

    The best of several right answers counts, for each item and each metric by itself.

    - ``f1``, ``em``: of words, and exact match, after the normalisation of SQuAD 1.1; mean over items.
    - ``rouge1``, ``rouge2``, ``rougeL``: F-measures of the package rouge-score without stemming; mean over items.
      ``rgm``: the geometric mean (R1·R2·RL)^(1/3) of these three means.
    - ``accuracy``: the prediction is one of the answers, but for white space around and between words.
    - ``matthews``, ``binary_f1``, ``macro_f1``: of classes, which are the choices; ``binary_f1`` is of class 1, the
      second choice, ``macro_f1`` the plain mean over all choices, 0 of one that is never right.
      A prediction that is no choice is the wrong class in ``binary_f1``, and a class of its own in the other two.
    - ``f1a``, ``group_em``: MultiRC's, ``binary_f1`` over all answers, and the share of groups that are right
      throughout.
    - ``pearson``, ``spearman``: correlations of numbers; a prediction that is no finite number is -1.

    Correlations, ``matthews`` too, are undefined where predictions or answers are all the same: 0, with the warning
    :class:`Undefined`. Raises UserError: as :func:`check`; nothing to score; answers that this metric cannot judge.
    """
    check(metric)
    if not items:
        raise UserError(f"there are no answers to compute {metric} of: name another split")
    return _METRICS[metric](items)


def check_answers(metric: str, *items: Scored) -> None:
    """Refuse items that a metric cannot judge, whatever is predicted.

    Raises UserError: it is of classes, and they have no choices, not the same or, where two are needed, not two; it is
    of numbers, and the first answer is no finite one.
    """
    if metric in _OF_CLASSES:
        _classes(items, metric)
    elif metric in _OF_NUMBERS:
        _numbers(items, metric)


def normalised(text: str) -> str:
    """SQuAD's: lower case, without ASCII punctuation, the words a, an, the and extra white space."""
    return " ".join(_ARTICLES.sub(" ", text.lower().translate(_NO_PUNCTUATION)).split())


def tidied(text: str) -> str:
    """With single blanks for white space, and none around."""
    return " ".join(text.split())


def word_f1(prediction: str, answer: str) -> float:
    """From 0 to 1: F1 of the words that both have, counted as often as both have them; 0 where they share none."""
    given, right = normalised(prediction).split(), normalised(answer).split()
    common = sum((Counter(given) & Counter(right)).values())
    return 2 * common / (len(given) + len(right)) if common else 0.0


def _mean_of_best(items: Sequence[Scored], value: Callable[[str, str], float]) -> float:
    return 100 * math.fsum(max(value(i.prediction, a) for a in i.answers) for i in items) / len(items)


def _f1(items: Sequence[Scored]) -> float:
    return _mean_of_best(items, word_f1)


def _em(items: Sequence[Scored]) -> float:
    return _mean_of_best(items, lambda prediction, answer: float(normalised(prediction) == normalised(answer)))


def _accuracy(items: Sequence[Scored]) -> float:
    return _mean_of_best(items, lambda prediction, answer: float(tidied(prediction) == tidied(answer)))


@lru_cache(maxsize=1 << 16)  # one text is asked for by several metrics
def _rouge(prediction: str, answer: str) -> tuple[float, float, float]:
    found = _scorer().score(answer, prediction)
    return found["rouge1"].fmeasure, found["rouge2"].fmeasure, found["rougeL"].fmeasure


@lru_cache(maxsize=1)
def _scorer() -> Any:
    from rouge_score.rouge_scorer import RougeScorer

    return RougeScorer(["rouge1", "rouge2", "rougeL"], use_stemmer=False)


def _rouge1(items: Sequence[Scored]) -> float:
    return _mean_of_best(items, lambda prediction, answer: _rouge(prediction, answer)[0])


def _rouge2(items: Sequence[Scored]) -> float:
    return _mean_of_best(items, lambda prediction, answer: _rouge(prediction, answer)[1])


def _rouge_l(items: Sequence[Scored]) -> float:
    return _mean_of_best(items, lambda prediction, answer: _rouge(prediction, answer)[2])


def _rgm(items: Sequence[Scored]) -> float:
    return float((_rouge1(items) * _rouge2(items) * _rouge_l(items)) ** (1 / 3))


def _classes(items: Sequence[Scored], metric: str) -> tuple[list[int], list[int], int]:
    """The right classes, the predicted ones, and how many classes there are."""
    choices = [tidied(choice) for choice in items[0].choices]
    if any([tidied(c) for c in item.choices] != choices for item in items):
        raise UserError(
            f"{metric} is of classes, and these questions have not all the same choices: prepare them with the same, "
            "or with --metric f1"
        )
    if len(choices) < 2:
        raise UserError(
            f"{metric} is of classes, and these questions have fewer than two choices: prepare them with more, or "
            "with --metric f1"
        )
    if metric in _OF_TWO and len(choices) != 2:
        raise UserError(
            f"{metric} is of two classes, and these questions have {len(choices)}: prepare them with --metric macro_f1"
        )
    number = {choice: place for place, choice in enumerate(choices)}
    right = [number.get(tidied(item.answers[0]), _INVALID) for item in items]
    if _INVALID in right:
        wrong = items[right.index(_INVALID)].answers[0]
        raise UserError(f"{metric}: the answer '{wrong[:40]}' is none of its choices: prepare the set again")
    return right, [number.get(tidied(item.prediction), _INVALID) for item in items], len(choices)


def _same(values: Sequence[float]) -> bool:
    return min(values) == max(values)


def _undefined(metric: str) -> float:
    warnings.warn(f"{metric} is undefined where all predictions or all answers are equal: 0", Undefined, stacklevel=4)
    return 0.0


def _matthews(items: Sequence[Scored]) -> float:
    from sklearn.metrics import matthews_corrcoef

    right, given, _ = _classes(items, "matthews")
    return _undefined("matthews") if _same(right) or _same(given) else 100 * float(matthews_corrcoef(right, given))


def _binary_f1(items: Sequence[Scored], metric: str = "binary_f1") -> float:
    from sklearn.metrics import f1_score

    right, given, _ = _classes(items, metric)
    given = [1 - r if g == _INVALID else g for r, g in zip(right, given, strict=True)]
    return 100 * float(f1_score(right, given, zero_division=0))


def _macro_f1(items: Sequence[Scored]) -> float:
    from sklearn.metrics import f1_score

    right, given, count = _classes(items, "macro_f1")
    return 100 * float(f1_score(right, given, labels=list(range(count)), average="macro", zero_division=0))


def _f1a(items: Sequence[Scored]) -> float:
    return _binary_f1(items, "f1a")


def _group_em(items: Sequence[Scored]) -> float:
    groups: defaultdict[tuple[str, int], bool] = defaultdict(lambda: True)
    for place, item in enumerate(items):
        key = (item.group, 0) if item.group else ("", place)
        groups[key] &= tidied(item.prediction) in map(tidied, item.answers)
    return 100 * sum(groups.values()) / len(groups)


def _number(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        return -1.0
    return value if math.isfinite(value) else -1.0


def _numbers(items: Sequence[Scored], metric: str) -> tuple[list[float], list[float]]:
    """The right numbers and the predicted ones."""
    right = []
    for item in items:
        try:
            right.append(float(item.answers[0]))
        except ValueError:
            right.append(math.nan)
        if not math.isfinite(right[-1]):
            wrong = item.answers[0][:40]
            raise UserError(f"{metric}: the answer '{wrong}' is no number: prepare the questions with --metric f1")
    return right, [_number(item.prediction) for item in items]


def _pearson(items: Sequence[Scored]) -> float:
    from scipy.stats import pearsonr

    right, given = _numbers(items, "pearson")
    return _undefined("pearson") if _same(right) or _same(given) else 100 * float(pearsonr(right, given)[0])


def _spearman(items: Sequence[Scored]) -> float:
    from scipy.stats import spearmanr

    right, given = _numbers(items, "spearman")
    return _undefined("spearman") if _same(right) or _same(given) else 100 * float(spearmanr(right, given)[0])


_METRICS: dict[str, Callable[[Sequence[Scored]], float]] = {
    "f1": _f1,
    "em": _em,
    "rouge1": _rouge1,
    "rouge2": _rouge2,
    "rougeL": _rouge_l,
    "rgm": _rgm,
    "accuracy": _accuracy,
    "matthews": _matthews,
    "pearson": _pearson,
    "spearman": _spearman,
    "binary_f1": _binary_f1,
    "macro_f1": _macro_f1,
    "f1a": _f1a,
    "group_em": _group_em,
}
_OF_TWO = ("binary_f1", "f1a")
_OF_CLASSES = ("matthews", "macro_f1", *_OF_TWO)
_OF_NUMBERS = ("pearson", "spearman")
_PACKAGES = {
    **dict.fromkeys(("rouge1", "rouge2", "rougeL", "rgm"), "rouge_score"),
    **dict.fromkeys(_OF_CLASSES, "sklearn"),
    **dict.fromkeys(_OF_NUMBERS, "scipy"),
}
_SOLD_AS = {"rouge_score": "rouge-score", "sklearn": "scikit-learn"}


def _installed(package: str) -> bool:
    """Whether Python finds it. It is not imported yet, and what it needs is not looked for."""
    try:
        return importlib.util.find_spec(package) is not None
    except ValueError:  # kept from being imported
        return False
