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

from fairseq_rpe.core import UserError
from fairseq_rpe.questions import metrics
from fairseq_rpe.questions.metrics import Scored, Undefined, check, names, normalised, score

ANSWERS = ("The committee approved the budget for the harbour.",)
ANSWERS += ("Bridge repairs were delayed, and the harbour budget was approved.",)
A = Scored("The committee approved the harbour budget and delayed the bridge repairs.", ANSWERS)
B = Scored("Nothing was decided.", ("The members decided to meet again in spring.",))
C = Scored("", ("A short summary.",))
SWAPPED = Scored("The boats were painted. The crew slept.", ("The crew slept. The boats were painted.",))


def four(metric, items):
    return round(score(metric, items), 4)


def of_classes(right, given, choices=("no", "yes"), group=""):
    """Questions of a classification; a class that is no choice is an answer of another word."""
    named = [choices[g] if 0 <= g < len(choices) else "neither" for g in given]
    return [Scored(g, (choices[r],), group, tuple(choices)) for r, g in zip(right, named, strict=True)]


@pytest.mark.parametrize(
    ("items", "r1", "r2", "rl", "mean"),
    [
        ([A], 76.1905, 47.0588, 63.1579, 60.9523),
        ([Scored(A.prediction, A.answers[:1])], 73.6842, 47.0588, 63.1579, None),
        ([Scored(A.prediction, A.answers[1:])], 76.1905, 31.5789, 28.5714, None),
        ([B], 18.1818, 0, 18.1818, 0),
        ([C], 0, 0, 0, 0),
        ([A, B], 47.1861, 23.5294, 40.6699, 35.6095),
        ([A, B, C], 31.4574, 15.6863, 27.1132, 23.7397),
        ([SWAPPED], 100, 83.3333, 57.1429, 78.0897),
    ],
)
def test_rouge(items, r1, r2, rl, mean):
    assert [four(metric, items) for metric in ("rouge1", "rouge2", "rougeL")] == [r1, r2, rl]
    assert mean is None or four("rgm", items) == mean


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
    assert score(metric, [Scored(prediction, tuple(answers))]) == pytest.approx(100 * value, abs=1e-9)


def test_example_of_the_documentation_of_scrolls():
    pairs = {"exact match example": ("exact match example",), "hello there": ("hello", "hi there")}
    items = [Scored(*pair) for pair in {**pairs, "general kenobi": ("commander kenobi",)}.items()]
    found = [four(metric, items) for metric in ("rouge1", "rouge2", "rougeL", "rgm")]
    assert found == [72.2222, 33.3333, 72.2222, 55.8136]


WORDS = ["the", "a", "An", "Tower", "tower,", "U.S.", "re-open", "no", "7", "café", "...", "The", "anthem", "«x»"]
TEXTS = st.lists(st.sampled_from(WORDS), max_size=5).map(" ".join)


@settings(max_examples=60, deadline=None, derandomize=True)
@given(TEXTS, TEXTS, TEXTS)
def test_scores_of_texts_are_symmetric_bounded_and_of_the_best_answer(one, other, third):
    for metric in ("f1", "em", "rouge1", "rouge2", "rougeL"):
        value = score(metric, [Scored(one, (other,))])
        assert 0 <= value <= 100 and value == pytest.approx(score(metric, [Scored(other, (one,))]))
        assert score(metric, [Scored(one, (other, third))]) == max(value, score(metric, [Scored(one, (third,))]))
    answers = (other, third)
    squad = max(f1_score(one, answer) for answer in answers), any(same(one, answer) for answer in answers)
    assert (score("f1", [Scored(one, answers)]), score("em", [Scored(one, answers)])) == pytest.approx(
        (100 * squad[0], 100 * squad[1])
    )


GOLDEN = [
    ("The old lighthouse keeper.", ("an old keeper of the lighthouse", "Marten"), 85.7143, 0),
    ("a red-roofed barn", ("the red roofed barn",), 40.0, 0),
    ("Yes, because of the rain", ("Yes",), 40.0, 0),
    ("the", ("a",), 0, 100),
    ("unanswerable", ("Unanswerable",), 100, 100),
    ("two two boats", ("two boats",), 80.0, 0),
    ("", ("no",), 0, 0),
]


@pytest.mark.parametrize(("prediction", "answers", "f1", "em"), GOLDEN)
def test_f1_and_exact_match(prediction, answers, f1, em):
    item = Scored(prediction, answers)
    assert (four("f1", [item]), four("em", [item])) == (f1, em)


def test_means_of_f1_and_exact_match():
    items = [Scored(prediction, answers) for prediction, answers, _, _ in GOLDEN]
    assert (four("f1", items), four("em", items)) == (49.3878, 28.5714)


# SQuAD's evaluate-v1.1.py, re-typed


def normalize_answer(s):
    punctuation = set(string.punctuation)
    kept = "".join(ch for ch in s.lower() if ch not in punctuation)
    return " ".join(re.sub(r"\b(a|an|the)\b", " ", kept).split())


def same(prediction, answer):
    return normalize_answer(prediction) == normalize_answer(answer)


def f1_score(prediction, ground_truth):
    prediction_tokens = normalize_answer(prediction).split()
    ground_truth_tokens = normalize_answer(ground_truth).split()
    num_same = sum((Counter(prediction_tokens) & Counter(ground_truth_tokens)).values())
    if num_same == 0:
        return 0
    precision = 1.0 * num_same / len(prediction_tokens)
    recall = 1.0 * num_same / len(ground_truth_tokens)
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
    assert normalised(text) == normalize_answer(text) == normal


def test_classification():
    gold = [1, 1, 0, 0, 1, 0, 1, 0]
    items = of_classes(gold, [1, 0, 0, 1, 1, 0, 1, 1])
    assert [four(metric, items) for metric in ("accuracy", "binary_f1", "matthews")] == [62.5, 66.6667, 25.8199]
    invalid = of_classes(gold, [1, -1, 0, 1, 1, -1, 1, 1])
    assert [four(metric, invalid) for metric in ("accuracy", "binary_f1")] == [50.0, 60.0]


@pytest.mark.parametrize(
    ("right", "given"), [([1, 1, 0, 0], [1] * 4), ([1, 1, 0, 0], [-1] * 4), ([1] * 4, [0, 1, 1, 0])]
)
def test_matthews_of_equal_answers_is_undefined(right, given):
    with pytest.warns(Undefined, match="matthews is undefined"):
        assert score("matthews", of_classes(right, given)) == 0


def test_three_classes():
    items = of_classes([0, 0, 1, 2, 1, 0], [0, 1, 1, 0, 1, 0], ("entailment", "contradiction", "neutral"))
    assert (four("accuracy", items), four("macro_f1", items)) == (66.6667, 48.8889)
    assert round((score("accuracy", items) + score("macro_f1", items)) / 2, 4) == 57.7778


def test_macro_f1_is_the_mean_of_all_classes_and_warns_of_none():
    items = of_classes([0, 0, 1], [0, -1, 0], ("x", "y", "z"))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        # of x: precision 1/2, recall 1/2
        assert score("macro_f1", items) == pytest.approx(100 * (1 / 2) / 3)
        assert score("binary_f1", of_classes([0, 0], [0, 0])) == 0


def test_multirc():
    parts = {"q1": ([1, 0, 1], [1, 0, 1]), "q2": ([0, 1], [1, 1]), "q3": ([0, 1], [0, 0])}
    items = [one for group, (right, given) in parts.items() for one in of_classes(right, given, group=group)]
    assert (four("group_em", items), four("f1a", items)) == (33.3333, 75.0)
    assert round((score("group_em", items) + score("f1a", items)) / 2, 4) == 54.1667
    shuffled = [items[n] for n in (3, 0, 6, 2, 4, 1, 5)]
    assert four("group_em", shuffled) == 33.3333
    # what has no group is by itself
    assert score("group_em", of_classes([1, 0, 1, 0], [1, 0, 1, 1])) == 75.0


def test_record():
    right = {"Lake Orrin": ("Orrin Lake", "Lake Orrin"), "the Dunmore Bridge": ("Dunmore Bridge",)}
    right |= {"Ada Quill": ("Quill", "A. Quill"), "Tessaly": ("Marrow",)}
    items = [Scored(prediction, answers) for prediction, answers in right.items()]
    assert (four("em", items), four("f1", items)) == (50.0, 66.6667)
    assert round((score("em", items) + score("f1", items)) / 2, 4) == 58.3333


def test_similarities():
    gold, given = ["0.0", "1.2", "2.4", "3", "4.6", "5.0"], ["0.4", "1.0", "3", "2.8", " 4.0", "5.0"]
    items = [Scored(g, (r,)) for r, g in zip(gold, given, strict=True)]
    assert (four("pearson", items), four("spearman", items)) == (97.6479, 94.2857)
    texts = ["nan", "", "inf", "2.8", "x", "1e999"]
    odd = [Scored(text, item.answers) for item, text in zip(items, texts, strict=True)]
    least = [Scored("2.8" if item.prediction == "2.8" else "-1", item.answers) for item in odd]
    for metric in ("pearson", "spearman"):
        assert score(metric, odd) == score(metric, least)
        with pytest.warns(Undefined, match=f"{metric} is undefined"):
            assert score(metric, [Scored("2.0", item.answers) for item in items]) == 0


def test_plain_arithmetic_gives_the_same():
    draw = np.random.default_rng(0)
    for _ in range(20):
        right, given = draw.integers(0, 2, 30), draw.integers(0, 2, 30)
        items = of_classes(right, given)
        tp, fp = int((given & right).sum()), int((given & ~right & 1).sum())
        fn, tn = int((~given & right & 1).sum()), int(((1 - given) & (1 - right)).sum())
        assert score("binary_f1", items) == pytest.approx(100 * 2 * tp / (2 * tp + fp + fn), abs=1e-9)
        below = np.sqrt(float((tp + fp) * (tp + fn) * (tn + fp) * (tn + fn)))
        assert score("matthews", items) == pytest.approx(100 * (tp * tn - fp * fn) / below, abs=1e-9)
        flipped = [Scored(i.prediction, i.answers, "", i.choices[::-1]) for i in items]
        both = (score("binary_f1", items) + score("binary_f1", flipped)) / 2
        assert score("macro_f1", items) == pytest.approx(both, abs=1e-9)
        x, y = draw.normal(size=30), draw.normal(size=30)
        items = [Scored(repr(float(b)), (repr(float(a)),)) for a, b in zip(x, y, strict=True)]
        for metric, (a, b) in {"pearson": (x, y), "spearman": (x.argsort().argsort(), y.argsort().argsort())}.items():
            a, b = a - a.mean(), b - b.mean()
            found = (a * b).sum() / np.sqrt((a * a).sum() * (b * b).sum())
            assert score(metric, items) == pytest.approx(100 * found, abs=1e-9)


def test_accuracy_compares_words_as_they_are():
    for text, right in ((" True\t", True), ("true", False), ("True.", False), ("", False), ("not  so", True)):
        assert score("accuracy", [Scored(text, ("True", "not so"))]) == 100 * right
    assert score("em", [Scored("NotMentioned", ("Not mentioned",))]) == 0
    assert score("em", [Scored("not mentioned.", ("Not mentioned",))]) == 100


@pytest.mark.parametrize(
    ("metric", "items", "words"),
    [
        ("f2", [A], "unknown metric 'f2' (did you mean 'f1'?); known: f1, em"),
        ("f1", [], "there are no answers to compute f1 of"),
        ("matthews", [A], "matthews is of classes, and these questions have fewer than two choices: prepare them"),
        ("f1a", of_classes([0], [0], ("a",)), "f1a is of classes, and these questions have fewer than two choices"),
        ("macro_f1", [*of_classes([1], [1]), *of_classes([1], [1], ("yes", "no"))], "have not all the same choices"),
        ("binary_f1", of_classes([1], [1], ("a", "b", "c")), "binary_f1 is of two classes, and these questions have 3"),
        ("f1a", [Scored("x", ("z",), "", ("x", "y"))], "f1a: the answer 'z' is none of its choices"),
        ("pearson", [Scored("1.0", ("good",))], "pearson: the answer 'good' is no number"),
        ("spearman", [Scored("1.0", ("2",)), Scored("1.0", ("nan",))], "spearman: the answer 'nan' is no number"),
    ],
)
def test_refusals(metric, items, words):
    with pytest.raises(UserError) as caught:
        score(metric, items)
    assert words in str(caught.value) and "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("package", "metric", "sold_as"),
    [("rouge_score", "rgm", "rouge-score"), ("sklearn", "matthews", "scikit-learn"), ("scipy", "pearson", "scipy")],
)
def test_a_package_that_is_not_installed(monkeypatch, package, metric, sold_as):
    monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(UserError, match=rf"'{metric}' needs {sold_as}, .*: pip install 'fairseq_rpe\[answers\]'"):
        check("f1", metric)
    check("f1", "em", "accuracy", "group_em")
    assert set(names()) > {"f1", "em", "accuracy", "group_em"}


def test_nothing_slow_is_imported_before_it_is_asked_for():
    code = "import sys, fairseq_rpe.questions.metrics; "
    code += "sys.exit(any(name in sys.modules for name in ('rouge_score', 'sklearn', 'scipy', 'nltk', 'torch')))"
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0
    assert metrics.score("em", [Scored("x", ("X",))]) == 100
