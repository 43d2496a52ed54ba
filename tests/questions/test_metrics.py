"""Metrics against golden values, the packages' own examples, SQuAD's script re-typed and plain arithmetic."""

from __future__ import annotations

import re
import string
import subprocess
import sys
import warnings
from collections import Counter

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from refusal import refused

from fairseq_rpe.questions.metrics import (
    AnsweredQuestion,
    Undefined,
    check_metrics,
    metric_names,
    normalize_squad,
    score,
)

ANSWERS = ("The committee approved the budget for the harbour.",)
ANSWERS += ("Bridge repairs were delayed, and the harbour budget was approved.",)
A = AnsweredQuestion("The committee approved the harbour budget and delayed the bridge repairs.", ANSWERS)
B = AnsweredQuestion("Nothing was decided.", ("The members decided to meet again in spring.",))
C = AnsweredQuestion("", ("A short summary.",))
SWAPPED = AnsweredQuestion("The boats were painted. The crew slept.", ("The crew slept. The boats were painted.",))


def of_classes(right, given, choices=("no", "yes"), group=""):
    """Questions of a classification; a class that is no choice is an answer of another word."""
    named = [choices[g] if 0 <= g < len(choices) else "neither" for g in given]
    return [AnsweredQuestion(g, (choices[r],), group, tuple(choices)) for r, g in zip(right, named, strict=True)]


def table(text):
    """Golden values: ``metric value`` by commas."""
    return {metric: float(value) for metric, value in map(str.split, text.split(", "))}


SQUAD = {
    AnsweredQuestion("The old lighthouse keeper.", ("an old keeper of the lighthouse", "Marten")): "f1 85.7143, em 0",
    AnsweredQuestion("a red-roofed barn", ("the red roofed barn",)): "f1 40, em 0",
    AnsweredQuestion("Yes, because of the rain", ("Yes",)): "f1 40, em 0",
    AnsweredQuestion("the", ("a",)): "f1 0, em 100",
    AnsweredQuestion("unanswerable", ("Unanswerable",)): "f1 100, em 100",
    AnsweredQuestion("two two boats", ("two boats",)): "f1 80, em 0",
    AnsweredQuestion("", ("no",)): "f1 0, em 0",
    AnsweredQuestion("NotMentioned", ("Not mentioned",)): "em 0",
    AnsweredQuestion("not mentioned.", ("Not mentioned",)): "em 100",
}
CLASSES = [1, 1, 0, 0, 1, 0, 1, 0]
TERMS = ("entailment", "contradiction", "neutral")
MULTIRC = [
    *of_classes([1, 0, 1], [1, 0, 1], group="q1"),
    *of_classes([0, 1], [1, 1], group="q2"),
    *of_classes([0, 1], [0, 0], group="q3"),
]
PAIRS = ["0.0 0.4", "1.2 1.0", "2.4 3", "3 2.8", "4.6 4.0", "5.0 5.0"]
SIMILAR = [AnsweredQuestion(f" {given}", (right,)) for right, given in map(str.split, PAIRS)]
SCROLLS = [
    AnsweredQuestion("exact match example", ("exact match example",)),
    AnsweredQuestion("hello there", ("hello", "hi there")),
]
SCROLLS += [AnsweredQuestion("general kenobi", ("commander kenobi",))]  # the example of its documentation


@pytest.mark.parametrize(
    ("items", "values"),
    [
        ([A], "rouge1 76.1905, rouge2 47.0588, rougeL 63.1579, rgm 60.9523"),
        ([AnsweredQuestion(A.prediction, A.answers[:1])], "rouge1 73.6842, rouge2 47.0588, rougeL 63.1579"),
        ([AnsweredQuestion(A.prediction, A.answers[1:])], "rouge1 76.1905, rouge2 31.5789, rougeL 28.5714"),
        ([B], "rouge1 18.1818, rouge2 0, rougeL 18.1818, rgm 0"),
        ([C], "rouge1 0, rouge2 0, rougeL 0, rgm 0"),
        ([A, B], "rouge1 47.1861, rouge2 23.5294, rougeL 40.6699, rgm 35.6095"),
        ([A, B, C], "rouge1 31.4574, rouge2 15.6863, rougeL 27.1132, rgm 23.7397"),
        ([SWAPPED], "rouge1 100, rouge2 83.3333, rougeL 57.1429, rgm 78.0897"),
        (SCROLLS, "rouge1 72.2222, rouge2 33.3333, rougeL 72.2222, rgm 55.8136"),
        *(([item], values) for item, values in SQUAD.items()),
        ([*SQUAD][:7], "f1 49.3878, em 28.5714"),
        (of_classes(CLASSES, [1, 0, 0, 1, 1, 0, 1, 1]), "accuracy 62.5, binary_f1 66.6667, matthews 25.8199"),
        (of_classes(CLASSES, [1, -1, 0, 1, 1, -1, 1, 1]), "accuracy 50, binary_f1 60"),
        (of_classes([0, 0, 1, 2, 1, 0], [0, 1, 1, 0, 1, 0], TERMS), "accuracy 66.6667, macro_f1 48.8889"),
        (MULTIRC, "group_em 33.3333, f1a 75"),
        ([MULTIRC[n] for n in (3, 0, 6, 2, 4, 1, 5)], "group_em 33.3333"),
        (of_classes([1, 0, 1, 0], [1, 0, 1, 1]), "group_em 75"),  # what has no group is by itself
        (SIMILAR, "pearson 97.6479, spearman 94.2857"),
    ],
)
def test_golden_values(items, values):
    assert {metric: round(score(metric, items), 4) for metric in table(values)} == table(values)


@pytest.mark.parametrize(
    ("metric", "prediction", "answers", "value"),
    [  # the tests of rouge-score
        ("rouge1", "testing", ["testing one two"], 1 / 2),
        ("rouge2", "testing one", ["testing one two"], 2 / 3),
        ("rougeL", "testing one", ["testing one two"], 4 / 5),
        ("rougeL", "testing two", ["testing one two"], 4 / 5),
        ("rouge1", "text first", ["first text", "first something"], 1),
        ("rouge2", "text first", ["first text", "first something"], 0),
        ("rougeL", "text first", ["first text", "first something"], 1 / 2),
        ("rougeL", "/", ["testing one two"], 0),
        ("rouge1", "don t re open caf no 7", ["Don't re-open café No. 7!"], 1),
    ],
)
def test_examples_of_rouge_score(metric, prediction, answers, value):
    assert score(metric, [AnsweredQuestion(prediction, tuple(answers))]) == pytest.approx(100 * value, abs=1e-9)


WORDS = ["the", "a", "An", "Tower", "tower,", "U.S.", "re-open", "no", "7", "café", "...", "The", "anthem", "«x»"]
TEXTS = st.lists(st.sampled_from(WORDS), max_size=5).map(" ".join)


@settings(max_examples=40, deadline=None, derandomize=True)
@given(TEXTS, TEXTS, TEXTS)
def test_scores_of_texts_are_symmetric_bounded_and_of_the_best_answer(one, other, third):
    for metric in ("f1", "em", "rouge1", "rouge2", "rougeL"):
        value = score(metric, [AnsweredQuestion(one, (other,))])
        assert 0 <= value <= 100 and value == pytest.approx(score(metric, [AnsweredQuestion(other, (one,))]))
        assert score(metric, [AnsweredQuestion(one, (other, third))]) == max(
            value, score(metric, [AnsweredQuestion(one, (third,))])
        )
    both = [AnsweredQuestion(one, (other, third))]
    assert score("f1", both) == pytest.approx(100 * max(f1_score(one, other), f1_score(one, third)))
    assert score("em", both) == 100 * (normalize_squad(one) in map(normalize_squad, (other, third)))


# SQuAD's evaluate-v1.1.py, re-typed


def normalize_answer(s):
    punctuation = set(string.punctuation)
    kept = "".join(ch for ch in s.lower() if ch not in punctuation)
    return " ".join(re.sub(r"\b(a|an|the)\b", " ", kept).split())


def f1_score(prediction, ground_truth):
    prediction_tokens = normalize_answer(prediction).split()
    ground_truth_tokens = normalize_answer(ground_truth).split()
    num_same = sum((Counter(prediction_tokens) & Counter(ground_truth_tokens)).values())
    if num_same == 0:
        return 0
    precision, recall = num_same / len(prediction_tokens), num_same / len(ground_truth_tokens)
    return (2 * precision * recall) / (precision + recall)


@pytest.mark.parametrize(
    ("text", "normal"),
    [
        ("The Eiffel  Tower!", "eiffel tower"),
        ("a.m. and an A-team", "am and ateam"),
        ("Theodore the Great's anthem", "theodore greats anthem"),
        ("\tU.S. $1,000\n", "us 1000"),
        ("«Ünïcode» – the café", "«ünïcode» – café"),
        ("thé ...", "thé"),
        ("the a an", ""),
    ],
)
def test_normalisation_is_that_of_squad(text, normal):
    assert normalize_squad(text) == normalize_answer(text) == normal


@pytest.mark.parametrize(
    ("right", "given"), [([1, 1, 0, 0], [1] * 4), ([1, 1, 0, 0], [-1] * 4), ([1] * 4, [0, 1, 1, 0])]
)
def test_matthews_of_equal_answers_is_undefined(right, given):
    with pytest.warns(Undefined, match="matthews is undefined"):
        assert score("matthews", of_classes(right, given)) == 0


def test_macro_f1_is_the_mean_of_all_classes_and_warns_of_none():
    items = of_classes([0, 0, 1], [0, -1, 0], ("x", "y", "z"))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        # of x: precision 1/2, recall 1/2
        assert score("macro_f1", items) == pytest.approx(100 * (1 / 2) / 3)
        assert score("binary_f1", of_classes([0, 0], [0, 0])) == 0


def test_similarities_of_no_numbers():
    texts = ["nan", "", "inf", "2.8", "x", "1e999"]
    odd = [AnsweredQuestion(text, item.answers) for item, text in zip(SIMILAR, texts, strict=True)]
    least = [AnsweredQuestion("2.8" if item.prediction == "2.8" else "-1", item.answers) for item in odd]
    for metric in ("pearson", "spearman"):
        assert score(metric, odd) == score(metric, least)
        with pytest.warns(Undefined, match=f"{metric} is undefined"):
            assert score(metric, [AnsweredQuestion("2.0", item.answers) for item in SIMILAR]) == 0


def test_plain_arithmetic_gives_the_same():
    draw = np.random.default_rng(0)
    for _ in range(5):
        right, given = draw.integers(0, 2, 30), draw.integers(0, 2, 30)
        items = of_classes(right, given)
        tp, fp = int((given & right).sum()), int((given & ~right & 1).sum())
        fn, tn = int((~given & right & 1).sum()), int(((1 - given) & (1 - right)).sum())
        assert score("binary_f1", items) == pytest.approx(100 * 2 * tp / (2 * tp + fp + fn), abs=1e-9)
        below = np.sqrt(float((tp + fp) * (tp + fn) * (tn + fp) * (tn + fn)))
        assert score("matthews", items) == pytest.approx(100 * (tp * tn - fp * fn) / below, abs=1e-9)
        flipped = [AnsweredQuestion(i.prediction, i.answers, "", i.choices[::-1]) for i in items]
        both = (score("binary_f1", items) + score("binary_f1", flipped)) / 2
        assert score("macro_f1", items) == pytest.approx(both, abs=1e-9)
        x, y = draw.normal(size=30), draw.normal(size=30)
        items = [AnsweredQuestion(repr(float(b)), (repr(float(a)),)) for a, b in zip(x, y, strict=True)]
        for metric, (a, b) in {"pearson": (x, y), "spearman": (x.argsort().argsort(), y.argsort().argsort())}.items():
            a, b = a - a.mean(), b - b.mean()
            found = (a * b).sum() / np.sqrt((a * a).sum() * (b * b).sum())
            assert score(metric, items) == pytest.approx(100 * found, abs=1e-9)


def test_accuracy_compares_words_as_they_are():
    for text, right in ((" True\t", True), ("true", False), ("True.", False), ("", False), ("not  so", True)):
        assert score("accuracy", [AnsweredQuestion(text, ("True", "not so"))]) == 100 * right


@pytest.mark.parametrize(
    ("metric", "items", "words"),
    [
        ("f2", [A], "unknown metric 'f2' .did you mean 'f1'.*; known: f1, em"),
        ("f1", [], "there are no answers to compute f1 of"),
        ("matthews", [A], "matthews needs classes, and these questions have fewer than two choices: prepare them"),
        ("f1a", of_classes([0], [0], ("a",)), "f1a needs classes, and these questions have fewer than two choices"),
        ("macro_f1", [*of_classes([1], [1]), *of_classes([1], [1], ("yes", "no"))], "have not all the same choices"),
        ("binary_f1", of_classes([1], [1], ("a", "b", "c")), "binary_f1 needs two classes, and these questions have 3"),
        ("f1a", [AnsweredQuestion("x", ("z",), "", ("x", "y"))], "f1a: the answer 'z' is none of its choices"),
        ("pearson", [AnsweredQuestion("1.0", ("good",))], "pearson: the answer 'good' is no number"),
        (
            "spearman",
            [AnsweredQuestion("1.0", ("2",)), AnsweredQuestion("1.0", ("nan",))],
            "spearman: the answer 'nan' is no number",
        ),
    ],
)
def test_refusals(metric, items, words):
    with refused(words):
        score(metric, items)


@pytest.mark.parametrize(
    ("package", "metric", "sold_as"), [("rouge_score", "rgm", "rouge-score"), ("sklearn", "matthews", "scikit-learn")]
)
def test_a_package_that_is_not_installed(monkeypatch, package, metric, sold_as):
    monkeypatch.setitem(sys.modules, package, None)
    with refused(rf"'{metric}' needs {sold_as}, .*: pip install 'fairseq_rpe\[answers\]'"):
        check_metrics("f1", metric)
    check_metrics("f1", "em", "accuracy", "group_em")
    assert set(metric_names()) > {"f1", "em", "accuracy", "group_em"}


def test_nothing_slow_is_imported_before_it_is_asked_for():
    code = "import sys, fairseq_rpe.questions.metrics; "
    code += "sys.exit(any(name in sys.modules for name in ('rouge_score', 'sklearn', 'scipy', 'nltk', 'torch')))"
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0
