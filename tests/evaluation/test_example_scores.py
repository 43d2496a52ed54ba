"""Scores of single examples in records: packed texts, and contradictions that a record refuses."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fairseq_rpe.core.errors import UserError
from fairseq_rpe.evaluation.example_scores import pack_hits, pack_scores, unpack_hits, unpack_scores
from fairseq_rpe.evaluation.records import ExactMatchResult, read_results
from fairseq_rpe.questions import metrics
from fairseq_rpe.questions.metrics import AnsweredQuestion
from fairseq_rpe.utils.json_files import append_json_line

RESULT = ExactMatchResult(
    checkpoint="c",
    algorithm="copy",
    split="test",
    length=3,
    examples=10,
    right=3,
    accuracy=0.3,
    transform="identity",
    hits=pack_hits(np.array([1, 0, 0, 1, 0, 0, 0, 0, 0, 1], bool)),
)


@given(st.lists(st.booleans(), min_size=1, max_size=100))
def test_hits_are_read_as_they_were_packed(bits):
    text = pack_hits(np.array(bits))
    assert unpack_hits(text, len(bits)).tolist() == bits
    assert len(text) == 2 * -(-len(bits) // 8)


@given(st.lists(st.floats(0, 100), min_size=1, max_size=50))
def test_scores_are_read_to_half_a_hundredth(scores):
    np.testing.assert_allclose(unpack_scores(pack_scores(scores), len(scores)), scores, atol=0.005 + 1e-9)


def test_a_record_keeps_the_hits_and_an_old_one_has_none(tmp_path):
    path = tmp_path / "eval.jsonl"
    append_json_line(path, RESULT.to_json())
    append_json_line(path, {key: value for key, value in RESULT.to_json().items() if key != "hits"})
    new, old = read_results(ExactMatchResult, path)
    assert new == RESULT and new.is_right().nonzero()[0].tolist() == [0, 3, 9]
    assert old.hits is None and old.is_right() is None and old.key == new.key


@pytest.mark.parametrize(("hits", "reason"), [("90", "10 bits"), ("zz00", "10 bits"), ("9000", "3 right")])
def test_a_record_whose_hits_contradict_it_is_refused(tmp_path, hits, reason):
    append_json_line(tmp_path / "eval.jsonl", {**RESULT.to_json(), "hits": hits})
    with pytest.raises(UserError, match=reason):
        read_results(ExactMatchResult, tmp_path / "eval.jsonl")


def test_the_mean_of_question_scores_is_the_metric():
    items = [AnsweredQuestion("the cat sat", ("a cat", "dog")), AnsweredQuestion("no", ("yes",))]
    items.append(AnsweredQuestion("x y z", ("x y z",)))
    for metric in ("f1", "em", "accuracy"):
        scores = metrics.question_scores(metric, items)
        assert sum(scores) / 3 == pytest.approx(metrics.score(metric, items))
    assert metrics.question_scores("rgm", items) is None and metrics.question_scores("matthews", items) is None
