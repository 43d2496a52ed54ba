"""How often each set is asked in an epoch, and what is read of a question that is too long."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest

from fairseq_rpe.core import UserError
from fairseq_rpe.questions.layout import fitted, room
from fairseq_rpe.questions.metrics import Scored, names, score
from fairseq_rpe.questions.mixture import drawn, per_epoch, shares
from fairseq_rpe.questions.partial_scores import adds_up, part, whole

ROWS = {"cola": 8000, "wnli": 600, "cb": 200}


@pytest.mark.parametrize(
    ("spec", "weights"),
    [
        ("proportional", (8000, 600, 200)),
        ("equal", (1, 1, 1)),
        ("capped:500", (500, 500, 200)),
        ("capped:9000", (8000, 600, 200)),
        ("temperature:2", (8000**0.5, 600**0.5, 200**0.5)),
        ("wnli=1, cola=2.5,cb=0", (2.5, 1, 0)),
    ],
)
def test_shares(spec, weights):
    found = shares(spec, ROWS)
    assert list(found) == list(ROWS)
    assert list(found.values()) == pytest.approx([w / sum(weights) for w in weights])


@pytest.mark.parametrize(
    ("spec", "why"),
    [
        ("often", "is not one of proportional, equal, capped:N"),
        ("capped:0", "choose one, N and T above 0"),
        ("capped:-1", "choose one"),
        ("temperature:nan", "choose one"),
        ("temperature:-2", "choose one"),
        ("cola=1,wnli=1", "leaves open 'cb'"),
        ("cola=1,wnli=1,cb=1,rte=1", "names 'rte', which is no set of this folder: it has cola, wnli, cb"),
        ("cola=1,wnli=1,cb=1,cb=2", "names 'cb' twice"),
        ("cola=1,wnli=x,cb=1", "the weight 'x'"),
        ("cola=1,wnli=-1,cb=1", "the weight '-1'"),
        ("cola=0,wnli=0.0,cb=0", "nothing would be learned"),
    ],
)
def test_wrong_mixtures(spec, why):
    with pytest.raises(UserError, match=why):
        shares(spec, ROWS)


def test_an_epoch_has_as_many_rows_as_the_folder():
    total = sum(ROWS.values())
    assert per_epoch(shares("proportional", ROWS), total) == ROWS
    assert per_epoch(shares("equal", ROWS), total) == dict.fromkeys(ROWS, 2933)
    assert per_epoch({"cola": 0.99999, "wnli": 0.00001, "cb": 0.0}, 100) == {"cola": 100, "wnli": 1, "cb": 0}


@pytest.mark.parametrize("count", [3, 7, 10, 25])
def test_no_row_comes_again_before_all_have_come(count):
    epochs = [drawn("cola", 10, count, epoch, seed=1) for epoch in range(1, 12)]
    stream = np.concatenate(epochs)
    for start in range(0, len(stream) - 9, 10):
        assert sorted(stream[start : start + 10]) == list(range(10))
    assert [len(one) for one in epochs] == [count] * 11
    again = drawn("cola", 10, count, 5, seed=1)
    assert (again == epochs[4]).all()
    assert any((drawn("cola", 10, 10, 1, seed) != drawn("cola", 10, 10, 1, 1)).any() for seed in (2, 3))
    assert (drawn("cola", 10, 10, 1, 1) != drawn("wnli", 10, 10, 1, 1)).any()


@pytest.mark.parametrize(
    ("cut", "kept"), [("end", [10, 11, 12, 13, 14]), ("start", [15, 16, 17, 18, 19]), ("middle", [10, 11, 12, 18, 19])]
)
def test_the_document_alone_is_cut(cut, kept):
    parts = np.array([1, 2]), np.arange(10, 20).astype("<u2"), np.array([3], "<u2")
    tokens, lost = fitted(*parts, 8, cut)
    assert tokens.tolist() == [1, 2, *kept, 3] and lost == 5 and tokens.dtype == np.int64
    whole_one, lost = fitted(*parts, 13, cut)
    assert whole_one.tolist() == [1, 2, *range(10, 20), 3] and lost == 0
    tokens, lost = fitted(*parts, 3, cut)
    assert tokens.tolist() == [1, 2, 3] and lost == 10


def test_what_cannot_be_cut_is_refused():
    prompt = np.arange(5)
    assert fitted(prompt, None, None, 5)[0].tolist() == [0, 1, 2, 3, 4]
    with pytest.raises(UserError, match="question 'q7' takes 5 tokens without its document, where 4 may be read"):
        fitted(prompt, np.arange(9), None, 4, "end", "q7")
    with pytest.raises(UserError, match="--cut top is not one of end, start, middle"):
        fitted(prompt, np.arange(9), None, 7, "top")
    assert room(100, 16, "qasper") == 84
    with pytest.raises(UserError, match="16 tokens leave no room for a question: answers of qasper take up to 16"):
        room(16, 16, "qasper")


ITEMS = [
    Scored("the old keeper", ("an old keeper of the light", "Marten"), "g0", ("a", "b")),
    Scored("Yes", ("Yes",), "g0"),
    Scored("no", ("Yes",), "g1"),
    Scored("a  red barn", ("a red barn",), "g2"),
    Scored("", ("a summary",), "g2"),
    Scored("painted boats and a crew", ("the boats were painted and the crew slept",), "g3"),
    Scored("Yes", ("Yes", "No"), "g3"),
]
GROUPS = [0, 0, 1, 2, 2, 3, 3]


@pytest.mark.parametrize("metric", ["f1", "em", "accuracy", "rouge1", "rouge2", "rougeL", "rgm", "group_em"])
@pytest.mark.parametrize("cuts", [(), (3,), (1, 2, 5)])
def test_parts_add_up_to_the_score(metric, cuts):
    edges = [0, *cuts, len(ITEMS)]
    total = sum(part(metric, ITEMS[start:stop], GROUPS[start:stop], 5) for start, stop in pairwise(edges))
    assert whole(metric, total) == pytest.approx(score(metric, ITEMS), abs=1e-9)
    assert whole(metric, part(metric, [], [], 5)) is None


def test_scores_that_do_not_add_up():
    others = ["matthews", "pearson", "spearman", "binary_f1", "macro_f1", "f1a"]
    assert [one for one in names() if not adds_up(one)] == others
