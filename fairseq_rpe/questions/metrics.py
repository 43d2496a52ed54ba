"""Metrics of answers in percent, as the evaluators of the benchmark sets compute them, at once or from batches."""

import importlib.util
import math
import re
import string
import warnings
from collections import Counter, defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np

from fairseq_rpe.core.errors import UserError
from fairseq_rpe.core.spec import did_you_mean

_ARTICLES = re.compile(r"\b(a|an|the)\b")
_NO_PUNCTUATION = str.maketrans("", "", string.punctuation)
_INVALID = -1  # class of a prediction that is not one of the choices


@dataclass(frozen=True)
class AnsweredQuestion:
    """A question with its predicted and its right answers.

    Attributes:
        prediction: Text that the model generated or chose.
        answers: All right answers; the first one is the right class of a classification.
        group: Questions of one group are right only together; an empty group is the question alone.
        choices: The classes 0, 1, … of a classification.
    """

    prediction: str
    answers: tuple[str, ...]
    group: str = ""
    choices: tuple[str, ...] = ()


class Undefined(UserWarning):
    """A metric is undefined for these answers and was set to 0."""


def metric_names() -> list[str]:
    """Return the names of all metrics."""
    return list(_METRICS)


def check_metrics(*metrics: str) -> None:
    """Check, before any work, that metrics can be computed.

    Raises:
        UserError: A metric is unknown, or its package is not installed.
    """
    for metric in metrics:
        if metric not in _METRICS:
            raise UserError(f"unknown metric '{metric}'{did_you_mean(metric, _METRICS)}; known: {', '.join(_METRICS)}")
        package = _PACKAGES.get(metric)
        if package is not None and not _is_installed(package):
            raise UserError(
                f"metric '{metric}' needs {_PYPI_NAMES.get(package, package)}, which is not installed: "
                "pip install 'fairseq_rpe[answers]'"
            )


def score(metric: str, items: Sequence[AnsweredQuestion]) -> float:
    """Compute a metric over questions: 0 to 100, correlations from -100.

    If there are several right answers, the best one counts, for each question and metric separately.

    - ``f1``, ``em``: F1 of words and exact match, after the normalisation of SQuAD 1.1; mean over questions.
    - ``rouge1``, ``rouge2``, ``rougeL``: F-measures of the package rouge-score without stemming; mean over questions.
      ``rgm``: the geometric mean (R1·R2·RL)^(1/3) of these three means.
    - ``accuracy``: the prediction is one of the answers, up to white space; mean over questions.
    - ``matthews``, ``binary_f1``, ``macro_f1``: classification into the choices. ``binary_f1`` is the F1 of class 1,
      the second choice. ``macro_f1`` is the unweighted mean over all choices; a choice that is never predicted right
      counts 0. A prediction that is not a choice is the wrong class in ``binary_f1`` and an extra class in the others.
    - ``f1a``, ``group_em``: metrics of MultiRC: ``binary_f1`` over all answers, and the share of groups whose answers
      are all right.
    - ``pearson``, ``spearman``: correlations of numbers; a prediction that is not a finite number counts as -1.

    Correlations, ``matthews`` included, are undefined if all predictions or all answers are equal: they are then 0,
    with the warning :class:`Undefined`.

    Args:
        metric: Name of a metric of the list above.
        items: The questions with their predictions.

    Raises:
        UserError: The metric cannot be computed, there are no questions, or their answers do not suit the metric.
    """
    check_metrics(metric)
    if not items:
        raise UserError(f"there are no answers to compute {metric} of: name another split")
    return _METRICS[metric](items)


def check_answers(metric: str, *items: AnsweredQuestion) -> None:
    """Check that a metric can score questions, whatever is predicted.

    Args:
        metric: Name of a metric of :func:`score`.
        *items: The questions.

    Raises:
        UserError: The metric needs classes, and the questions have different choices or fewer or more than it needs;
            or it needs numbers, and a first answer is not a finite number.
    """
    if metric in _CLASS_METRICS:
        _classes(items, metric)
    elif metric in _NUMBER_METRICS:
        _numbers(items, metric)


def normalize_squad(text: str) -> str:
    """Normalise as SQuAD does: lower case, without ASCII punctuation, the words a, an, the and extra white space."""
    return " ".join(_ARTICLES.sub(" ", text.lower().translate(_NO_PUNCTUATION)).split())


def normalize_whitespace(text: str) -> str:
    """Replace white space by single blanks, and strip it at both ends."""
    return " ".join(text.split())


def word_f1(prediction: str, answer: str) -> float:
    """Return the F1, from 0 to 1, of the multisets of words of prediction and answer."""
    predicted, right = normalize_squad(prediction).split(), normalize_squad(answer).split()
    common = sum((Counter(predicted) & Counter(right)).values())
    return 2 * common / (len(predicted) + len(right)) if common else 0.0


def _mean_of_best(items: Sequence[AnsweredQuestion], value: Callable[[str, str], float]) -> float:
    return 100 * math.fsum(max(value(i.prediction, a) for a in i.answers) for i in items) / len(items)


def _f1(items: Sequence[AnsweredQuestion]) -> float:
    return _mean_of_best(items, word_f1)


def _em(items: Sequence[AnsweredQuestion]) -> float:
    return _mean_of_best(
        items, lambda prediction, answer: float(normalize_squad(prediction) == normalize_squad(answer))
    )


def _accuracy(items: Sequence[AnsweredQuestion]) -> float:
    return _mean_of_best(
        items, lambda prediction, answer: float(normalize_whitespace(prediction) == normalize_whitespace(answer))
    )


@lru_cache(maxsize=1 << 16)  # several metrics score the same texts
def _rouge(prediction: str, answer: str) -> dict[str, float]:
    """Return the F-measures, 0 to 1, by the name of the variant."""
    scores = _rouge_scorer().score(answer, prediction)
    return {variant: score.fmeasure for variant, score in scores.items()}


@lru_cache(maxsize=1)
def _rouge_scorer() -> Any:
    from rouge_score.rouge_scorer import RougeScorer

    return RougeScorer(["rouge1", "rouge2", "rougeL"], use_stemmer=False)


def _rouge1(items: Sequence[AnsweredQuestion]) -> float:
    return _mean_of_best(items, lambda prediction, answer: _rouge(prediction, answer)["rouge1"])


def _rouge2(items: Sequence[AnsweredQuestion]) -> float:
    return _mean_of_best(items, lambda prediction, answer: _rouge(prediction, answer)["rouge2"])


def _rouge_l(items: Sequence[AnsweredQuestion]) -> float:
    return _mean_of_best(items, lambda prediction, answer: _rouge(prediction, answer)["rougeL"])


def _rgm(items: Sequence[AnsweredQuestion]) -> float:
    return float((_rouge1(items) * _rouge2(items) * _rouge_l(items)) ** (1 / 3))


class _Classes(NamedTuple):
    """The answers of a classification as numbers.

    Attributes:
        right: Right class of each question.
        predicted: Predicted class of each question; ``_INVALID`` if the prediction is none of the choices.
        num_classes: Number of classes.
    """

    right: list[int]
    predicted: list[int]
    num_classes: int


def _classes(items: Sequence[AnsweredQuestion], metric: str) -> _Classes:
    """Return the classes of questions; raise UserError if their choices do not suit the metric."""
    choices = [normalize_whitespace(choice) for choice in items[0].choices]
    if any([normalize_whitespace(c) for c in item.choices] != choices for item in items):
        raise UserError(
            f"{metric} needs classes, and these questions have not all the same choices: prepare them with the same, "
            "or with --metric f1"
        )
    if len(choices) < 2:
        raise UserError(
            f"{metric} needs classes, and these questions have fewer than two choices: prepare them with more, or "
            "with --metric f1"
        )
    if metric in _BINARY_METRICS and len(choices) != 2:
        raise UserError(
            f"{metric} needs two classes, and these questions have {len(choices)}: prepare them with --metric macro_f1"
        )
    class_of = {choice: i for i, choice in enumerate(choices)}
    right = [class_of.get(normalize_whitespace(item.answers[0]), _INVALID) for item in items]
    if _INVALID in right:
        wrong = items[right.index(_INVALID)].answers[0]
        raise UserError(f"{metric}: the answer '{wrong[:40]}' is none of its choices: prepare the set again")
    predicted = [class_of.get(normalize_whitespace(item.prediction), _INVALID) for item in items]
    return _Classes(right, predicted, len(choices))


def _all_equal(values: Sequence[float]) -> bool:
    return min(values) == max(values)


def _undefined(metric: str) -> float:
    warnings.warn(f"{metric} is undefined where all predictions or all answers are equal: 0", Undefined, stacklevel=4)
    return 0.0


def _matthews(items: Sequence[AnsweredQuestion]) -> float:
    from sklearn.metrics import matthews_corrcoef

    right, predicted, _ = _classes(items, "matthews")
    if _all_equal(right) or _all_equal(predicted):
        return _undefined("matthews")
    return 100 * float(matthews_corrcoef(right, predicted))


def _binary_f1(items: Sequence[AnsweredQuestion], metric: str = "binary_f1") -> float:
    from sklearn.metrics import f1_score

    right, predicted, _ = _classes(items, metric)
    # A prediction that is not a choice is the wrong class, of the two.
    predicted = [1 - r if p == _INVALID else p for r, p in zip(right, predicted, strict=True)]
    return 100 * float(f1_score(right, predicted, zero_division=0))


def _macro_f1(items: Sequence[AnsweredQuestion]) -> float:
    from sklearn.metrics import f1_score

    right, predicted, num_classes = _classes(items, "macro_f1")
    labels = list(range(num_classes))  # without _INVALID
    return 100 * float(f1_score(right, predicted, labels=labels, average="macro", zero_division=0))


def _f1a(items: Sequence[AnsweredQuestion]) -> float:
    return _binary_f1(items, "f1a")


def _group_em(items: Sequence[AnsweredQuestion]) -> float:
    is_right: defaultdict[tuple[str, int], bool] = defaultdict(lambda: True)  # by group
    for i, item in enumerate(items):
        key = (item.group, 0) if item.group else ("", i)  # a question without a group is a group by itself
        is_right[key] &= normalize_whitespace(item.prediction) in map(normalize_whitespace, item.answers)
    return 100 * sum(is_right.values()) / len(is_right)


def _parse_number(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        return -1.0
    return value if math.isfinite(value) else -1.0


def _numbers(items: Sequence[AnsweredQuestion], metric: str) -> tuple[list[float], list[float]]:
    """Return the right and the predicted numbers."""
    right = []
    for item in items:
        try:
            right.append(float(item.answers[0]))
        except ValueError:
            right.append(math.nan)
        if not math.isfinite(right[-1]):
            wrong = item.answers[0][:40]
            raise UserError(f"{metric}: the answer '{wrong}' is no number: prepare the questions with --metric f1")
    return right, [_parse_number(item.prediction) for item in items]


def _pearson(items: Sequence[AnsweredQuestion]) -> float:
    from scipy.stats import pearsonr

    right, predicted = _numbers(items, "pearson")
    if _all_equal(right) or _all_equal(predicted):
        return _undefined("pearson")
    return 100 * float(pearsonr(right, predicted)[0])


def _spearman(items: Sequence[AnsweredQuestion]) -> float:
    from scipy.stats import spearmanr

    right, predicted = _numbers(items, "spearman")
    if _all_equal(right) or _all_equal(predicted):
        return _undefined("spearman")
    return 100 * float(spearmanr(right, predicted)[0])


_METRICS: dict[str, Callable[[Sequence[AnsweredQuestion]], float]] = {
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
_BINARY_METRICS = ("binary_f1", "f1a")
_CLASS_METRICS = ("matthews", "macro_f1", *_BINARY_METRICS)
_NUMBER_METRICS = ("pearson", "spearman")
_PACKAGES = {
    **dict.fromkeys(("rouge1", "rouge2", "rougeL", "rgm"), "rouge_score"),
    **dict.fromkeys(_CLASS_METRICS, "sklearn"),
}
_PYPI_NAMES = {"rouge_score": "rouge-score", "sklearn": "scikit-learn"}


def _is_installed(package: str) -> bool:
    """Return whether Python finds a package, without importing it or checking its dependencies."""
    try:
        return importlib.util.find_spec(package) is not None
    except ValueError:  # sys.modules has None for it
        return False


# The means over questions from which a metric is computed.
_MEANS: dict[str, tuple[str, ...]] = {name: (name,) for name in ("f1", "em", "accuracy", "rouge1", "rouge2", "rougeL")}
_MEANS["rgm"] = ("rouge1", "rouge2", "rougeL")
_GROUPED = "group_em"


def is_streamable(metric: str) -> bool:
    """Return whether a metric can be computed from sums over batches; correlations and class metrics cannot."""
    return metric == _GROUPED or metric in _MEANS


def question_scores(metric: str, items: Sequence[AnsweredQuestion]) -> list[float] | None:
    """Return the score of each question in percent, whose mean is the metric; None for metrics that are no such mean.

    Args:
        metric: Name of a metric of :func:`score`.
        items: The questions with their predictions.
    """
    if _MEANS.get(metric) != (metric,):
        return None
    return [score(metric, [item]) for item in items]


def partial_sums(metric: str, items: Sequence[AnsweredQuestion], groups: Sequence[int], count: int) -> np.ndarray:
    """Return the sums of a batch, to be added up over batches; see :func:`metric_from_sums`.

    Args:
        metric: A streamable metric.
        items: The questions of the batch with their predictions.
        groups: Group number of each question, below ``count``.
        count: Number of groups over all batches.

    Returns:
        float64 [questions, sum of each mean]; for ``group_em`` (2, count): questions and wrong answers by group.
    """
    if metric == _GROUPED:
        questions, wrong = np.zeros(count), np.zeros(count)  # (groups,)
        for item, group in zip(items, groups, strict=True):
            questions[group] += 1
            wrong[group] += score("accuracy", [item]) < 100
        return np.stack([questions, wrong])
    sums = [sum(score(mean, [item]) for item in items) for mean in _MEANS[metric]]
    return np.array([len(items), *sums], np.float64)


def metric_from_sums(metric: str, total: np.ndarray) -> float | None:
    """Compute a metric from the total of :func:`partial_sums` over all batches.

    Returns:
        The metric, 0 to 100, or None if there was no question.
    """
    if metric == _GROUPED:
        questions, wrong = total
        return 100 * float((wrong[questions > 0] == 0).mean()) if questions.any() else None
    questions, *sums = total
    if not questions:
        return None
    means = np.array(sums) / questions
    return float(means.prod() ** (1 / len(means)))  # the geometric mean: of one value, the value itself
