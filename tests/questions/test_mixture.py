"""How often each set is asked in an epoch, and what is read of a question that is too long."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest
from refusal import refused

from fairseq_rpe.questions.metrics import (
    AnsweredQuestion,
    is_streamable,
    metric_from_sums,
    metric_names,
    partial_sums,
    score,
)
from fairseq_rpe.questions.mixture import epoch_rows, mixture_weights, rows_per_epoch
from fairseq_rpe.questions.prompt import build_prompt, token_budget

ROWS = {"cola": 8000, "wnli": 600, "cb": 200}


@pytest.mark.parametrize(
    ("spec", "weights"),
    [
        *((spec, (8000, 600, 200)) for spec in ("proportional", "capped:9000")),
        *(("equal", (1, 1, 1)), ("capped:500", (500, 500, 200)), ("wnli=1, cola=2.5,cb=0", (2.5, 1, 0))),
        ("temperature:2", (8000**0.5, 600**0.5, 200**0.5)),
        ("temperature:0.001", (1, 0, 0)),
        ("cola=1e308,wnli=1e308,cb=0", (1, 1, 0)),
    ],
)
def test_shares(spec, weights):
    found = mixture_weights(spec, ROWS)
    assert list(found) == list(ROWS)
    assert list(found.values()) == pytest.approx([w / sum(weights) for w in weights])


WRONG = {
    "often": "is not one of proportional, equal, capped:N",
    "capped:0": "choose one, N and T above 0",
    **dict.fromkeys(("capped:-1", "temperature:nan", "temperature:-2"), "choose one"),
    "cola=1,wnli=1": "has no weight for 'cb'",
    "cola=1,wnli=1,cb=1,rte=1": "names 'rte', which is not a set of this folder: it has cola, wnli, cb",
    "cola=1,wnli=1,cb=1,cb=2": "names 'cb' twice",
    "cola=1,wnli=x,cb=1": "the weight 'x'",
    "cola=1,wnli=-1,cb=1": "the weight '-1'",
    "cola=0,wnli=0.0,cb=0": "nothing would be learned",
}


@pytest.mark.parametrize("spec", WRONG)
def test_wrong_mixtures(spec):
    with refused(WRONG[spec]):
        mixture_weights(spec, ROWS)


def test_an_epoch_has_as_many_rows_as_the_folder():
    total = sum(ROWS.values())
    assert rows_per_epoch(mixture_weights("proportional", ROWS), total) == ROWS
    assert rows_per_epoch(mixture_weights("equal", ROWS), total) == dict.fromkeys(ROWS, 2933)
    assert rows_per_epoch({"cola": 0.99999, "wnli": 0.00001, "cb": 0.0}, 100) == {"cola": 100, "wnli": 1, "cb": 0}


@pytest.mark.parametrize("count", [7, 10, 25])
def test_no_row_comes_again_before_all_have_come(count):
    epochs = [epoch_rows("cola", 10, count, epoch, seed=1) for epoch in range(1, 12)]
    stream = np.concatenate(epochs)
    for start in range(0, len(stream) - 9, 10):
        assert sorted(stream[start : start + 10]) == list(range(10))
    assert [len(one) for one in epochs] == [count] * 11
    assert (epoch_rows("cola", 10, count, 5, seed=1) == epochs[4]).all()
    first = epoch_rows("cola", 10, 10, 1, 1).tolist()
    assert first not in (epoch_rows("wnli", 10, 10, 1, 1).tolist(), epoch_rows("cola", 10, 10, 1, 2).tolist())


@pytest.mark.parametrize(
    ("cut", "kept"), [("end", [10, 11, 12, 13, 14]), ("start", [15, 16, 17, 18, 19]), ("middle", [10, 11, 12, 18, 19])]
)
def test_the_document_alone_is_cut(cut, kept):
    parts = np.array([1, 2]), np.arange(10, 20).astype("<u2"), np.array([3], "<u2")
    for size, middle in ((8, kept), (13, range(10, 20)), (3, ())):
        tokens, lost = build_prompt(*parts, size, cut)
        assert tokens.tolist() == [1, 2, *middle, 3] and lost == 10 - len(middle) and tokens.dtype == np.int64


def test_what_cannot_be_cut_is_refused():
    prompt = np.arange(5)
    assert build_prompt(prompt, None, None, 5)[0].tolist() == [0, 1, 2, 3, 4]
    with refused("question 'q7' takes 5 tokens without its document, where 4 may be read"):
        build_prompt(prompt, np.arange(9), None, 4, "end", "q7")
    with refused("--truncate top is not one of end, start, middle"):
        build_prompt(prompt, np.arange(9), None, 7, "top")
    assert token_budget(100, 16, "qasper") == 84
    with refused("16 tokens leave no room for a question: answers of qasper take up to 16"):
        token_budget(16, 16, "qasper")


ITEMS = [
    AnsweredQuestion("the old keeper", ("an old keeper of the light", "Marten"), "g0", ("a", "b")),
    AnsweredQuestion("Yes", ("Yes",), "g0"),
    AnsweredQuestion("no", ("Yes",), "g1"),
    AnsweredQuestion("a  red barn", ("a red barn",), "g2"),
    AnsweredQuestion("", ("a summary",), "g2"),
    AnsweredQuestion("painted boats and a crew", ("the boats were painted and the crew slept",), "g3"),
    AnsweredQuestion("Yes", ("Yes", "No"), "g3"),
]
GROUPS = [0, 0, 1, 2, 2, 3, 3]


@pytest.mark.parametrize("metric", ["f1", "em", "accuracy", "rouge1", "rouge2", "rougeL", "rgm", "group_em"])
@pytest.mark.parametrize("cuts", [(), (3,), (1, 2, 5)])
def test_parts_add_up_to_the_score(metric, cuts):
    edges = [0, *cuts, len(ITEMS)]
    total = sum(partial_sums(metric, ITEMS[start:stop], GROUPS[start:stop], 5) for start, stop in pairwise(edges))
    assert metric_from_sums(metric, total) == pytest.approx(score(metric, ITEMS), abs=1e-9)
    assert metric_from_sums(metric, partial_sums(metric, [], [], 5)) is None


def test_scores_that_do_not_add_up():
    others = ["matthews", "pearson", "spearman", "binary_f1", "macro_f1", "f1a"]
    assert [one for one in metric_names() if not is_streamable(one)] == others
