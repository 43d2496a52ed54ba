"""The chapter of single examples: which are shown, how texts are shortened, tasks, labels and questions."""

from __future__ import annotations

import re
from itertools import groupby
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from pages import Page, check_self_contained, skip_drawing
from prepared_folder import make_folder, questions

from fairseq_rpe.algorithms import build
from fairseq_rpe.evaluation.example_scores import pack_hits, pack_scores
from fairseq_rpe.evaluation.needle_records import HeadAttention
from fairseq_rpe.evaluation.predictions import append_predictions
from fairseq_rpe.evaluation.question_records import QuestionKey, QuestionResult, predictions_path
from fairseq_rpe.evaluation.records import ExactMatchKey, ExactMatchResult
from fairseq_rpe.questions import dataset
from fairseq_rpe.reports.chapters import examples
from fairseq_rpe.reports.chapters.examples import MAX_SHOWN, last_mention, shorten, spread
from fairseq_rpe.reports.kind_report import load_results
from fairseq_rpe.reports.page import Examples, Picture, Text
from fairseq_rpe.reports.write import write_report
from fairseq_rpe.sweeps.sweep_record import (
    EvaluationQuestions,
    Method,
    QuestionConfig,
    SweepFolder,
    SweepRecord,
    SweepSettings,
)
from fairseq_rpe.utils import json_files

PASSKEY = "passkey:items=40,times=2,least=36,train=100,valid=10,test=8,depths=3,digits=2"
SORT = "sort:items=3,times=2,train=200,valid=20,test=60,alphabet=12"
MQAR = "mqar:items=16,times=2,least=12,train=100,valid=10,test=7,pairs=2,alphabet=6"


@given(st.lists(st.sampled_from("abc"), max_size=80), st.data())
def test_a_shortened_text_has_all_words_or_counts_them(words, data):
    start = data.draw(st.integers(0, max(0, len(words) - 1)))
    end = data.draw(st.integers(start, min(len(words), start + 5)))
    pieces = shorten(words, [(start, end)] if end > start else [])
    count = sum(int(re.search(r"\d+", p.text)[0]) if p.mark == "omitted" else len(p.text.split()) for p in pieces)
    assert count == len(words)
    assert " ".join(p.text for p in pieces if p.mark == "needle").split() == words[start:end]
    assert all(piece.text for piece in pieces)
    if not any(p.mark == "omitted" for p in pieces):
        assert " ".join(p.text for p in pieces).split() == words


def test_the_middle_is_left_out_and_the_needle_stays():
    words = [str(i) for i in range(100)]
    pieces = shorten(words, [(50, 52)])
    assert [(p.mark, p.text.split()[0]) for p in pieces] == [
        ("", "0"), ("omitted", "[…"), ("", "42"), ("needle", "50"), ("", "52"), ("omitted", "[…"), ("", "88"),
    ]  # fmt: skip
    assert pieces[1].text == "[… 30 left out …]" and shorten([]) == []


@given(st.lists(st.integers(0, 6), max_size=30), st.integers(1, 12))
def test_a_choice_is_spread_over_all_groups(sizes, count):
    groups = [[(k, i) for i in range(size)] for k, size in enumerate(sizes)]
    chosen = spread(groups, count)
    assert len(chosen) == min(count, sum(sizes)) or (len(chosen) == count and len(groups) > count)
    assert len(set(chosen)) == len(chosen) and chosen == sorted(chosen)
    numbers = [len(list(own)) for _, own in groupby(chosen, key=lambda member: member[0])]
    full = [size for size in sizes if size]
    if len(full) <= count:
        assert len(numbers) == len(full)  # a member of every group
    else:
        assert numbers == [1] * count and chosen[0][0] == min(k for k, size in enumerate(sizes) if size)


def test_the_last_mention_is_of_whole_words():
    words = "Old Tamsin left. The old Tamsin, said Bren, came".split()
    assert last_mention(words, ["tamsin"]) == [(5, 6)]
    assert last_mention(words, ["old Tamsin", "Nobody"]) == [(4, 6)]
    assert last_mention(words, ["wheel"]) == last_mention(words, ["am", ""]) == last_mention([], ["x"]) == []


def write_tasks(folder: Path, tasks: dict[str, float]) -> SweepFolder:
    """A finished sweep of alibi over tasks: a share of the examples is answered right, the others wrong."""
    sweep = SweepFolder(folder)
    method = Method("alibi", "alibi")
    settings = SweepSettings(split="test", updates=3, batch_sentences=8, arch="tiny")
    sweep.write_record(SweepRecord(settings, ("alibi",), (1,), (), {"alibi": method}, algorithms=tuple(tasks)))
    for spec, share in tasks.items():
        task, run = build(spec), sweep.run_folder(method, 1, spec)
        json_files.write_json(run.checkpoints.record_path, {"layout": 2, "finished": {"checkpoint": "c", "updates": 3}})
        for length in task.lengths("test"):
            for depth in task.depths("test") or (None,):
                if depth is None:
                    items = [e for e in task.examples("test") if e.length == length]
                else:
                    items = list(task.examples_at_depth("test", length, depth))
                labels = len(items[0].label_indices) or 1
                is_right = np.arange(len(items) * labels) < share * len(items) * labels
                key = ExactMatchKey(checkpoint="c", algorithm=spec, split="test", length=length, depth=depth)
                answers = [answer_of(e, is_right[i * labels : (i + 1) * labels], i) for i, e in enumerate(items)]
                append_predictions(run.predictions, key, answers, needle_of(items[0]) if depth == 0.5 else None)
                right = int(is_right.sum())
                result = ExactMatchResult(
                    **vars(key), examples=len(is_right), right=right, accuracy=right / len(is_right),
                    transform="identity", hits=pack_hits(is_right),
                )  # fmt: skip
                json_files.append_json_line(run.results, result.to_json())
    return sweep


def answer_of(example, is_right, index: int) -> str:
    if example.label_indices:
        return " ".join(word if right else "v0x" for word, right in zip(example.answer, is_right, strict=True))
    if is_right[0]:
        return " ".join((*example.answer, "</s>"))
    kinds = ((*example.answer[:-1], "xx", "</s>"), example.answer, (*example.answer[:-1], "</s>"))
    return " ".join(kinds[index % 3])


def needle_of(example) -> HeadAttention:
    tokens = len(example.prompt) + len(example.answer) - 1
    weights, mass = (1 / tokens,) * tokens, 17 / tokens
    return HeadAttention(
        needles=example.needles, queries=2, mass=((mass, 0.0),), total=((1.0, 1.0),), layer=0, head=0, weights=weights
    )


def tables_of(sweep: SweepFolder) -> tuple[dict[str, Examples], list]:
    record = sweep.read_record()
    blocks = examples.task_blocks(sweep, record, load_results(sweep, record))
    return {block.summary: block for block in blocks if isinstance(block, Examples)}, blocks


def marked(pieces, mark: str) -> list[str]:
    return [piece.text for piece in pieces if piece.mark == mark]


def test_wrong_and_right_examples_are_shown_at_all_depths(tmp_path):
    tables, blocks = tables_of(write_tasks(tmp_path, {PASSKEY: 0.5}))
    trained, beyond = tables.values()
    assert list(tables) == [
        f"{PASSKEY}, alibi, {name}: 12 wrong and 12 right examples"
        for name in ("lengths of training", "beyond training")
    ]
    for table, length in ((trained, "40"), (beyond, "80")):
        assert table.header == ["tokens", "depth"] and len(table.rows) == 2 * MAX_SHOWN
        assert [row.is_right for row in table.rows] == [False] * MAX_SHOWN + [True] * MAX_SHOWN
        for rows in (table.rows[:MAX_SHOWN], table.rows[MAX_SHOWN:]):
            assert {row.facts[1] for row in rows} == {"0", "0.5", "1"} and {row.facts[0] for row in rows} == {length}
        for row in table.rows:
            (needle,) = marked(row.prompt, "needle")
            (right,) = (piece.text for piece in row.answer)
            assert needle.startswith(f"the pass key is {right} . remember it .")
            assert (marked(row.prediction, "omitted"), bool(marked(row.prediction, "wrong"))) == ([], not row.is_right)
    wrong = {tuple(marked(row.prediction, "wrong")) for row in beyond.rows[:MAX_SHOWN]}
    assert wrong == {("xx",), ("…",), ("(ends here)",)}  # a wrong word, no end, and an end that comes too early
    about, picture = blocks[0], blocks[-1]
    assert isinstance(about, Text) and "up to 10 wrong and 10 right" in about.text
    assert isinstance(picture, Picture) and "alibi, 80 tokens: layer 0, head 1, 21.5 %" in picture.alt


def test_labels_are_shown_one_by_one_with_their_source(tmp_path):
    tables, _ = tables_of(write_tasks(tmp_path, {MQAR: 0.5}))
    trained = next(iter(tables.values()))
    assert trained.header == ["tokens", "distance"] and "7 wrong and 7 right labels" in next(iter(tables))
    for row in trained.rows:
        (source,) = marked(row.prompt, "needle")
        assert [piece.text for piece in row.answer] == [source]  # the value in the pair of the key
        assert " ".join(piece.text for piece in row.prediction) == (source if row.is_right else "v0x")
        words = " ".join(piece.text for piece in row.prompt).split()
        assert f"{words[-1]} {source}" in " ".join(words)


def test_a_task_without_depths_spreads_over_lengths_and_all_is_on_the_page(tmp_path, monkeypatch):
    skip_drawing(monkeypatch)
    sweep = write_tasks(tmp_path, {SORT: 0.0})
    tables, _ = tables_of(sweep)
    beyond = tables[next(summary for summary in tables if "beyond" in summary)]
    assert beyond.header == ["items"] and {row.facts[0] for row in beyond.rows} == {"4", "5", "6"}
    write_report(sweep)
    page = Page(tmp_path / "report.html")
    check_self_contained(page)
    assert "Which examples fail?" in page.chapters() and "0 right examples" in page.words
    assert 'class="wrong">xx</mark>' in page.source and "(ends here)" in page.words


def test_without_predictions_there_is_no_chapter(tmp_path):
    sweep = write_tasks(tmp_path, {SORT: 0.5})
    sweep.run_folder(Method("alibi", "alibi"), 1, SORT).predictions.unlink()
    assert tables_of(sweep) == ({}, [])


@pytest.fixture
def answered(tmp_path) -> SweepFolder:
    """A finished sweep over eleven questions at two lengths; every other answer is right."""
    data = make_folder(tmp_path / "data", {"train": questions(2), "valid": questions(11, start=8)}).folder
    prepared = dataset.load_dataset(data)
    (name,) = prepared.sets
    sweep, method, digest = SweepFolder(tmp_path / "sweep"), Method("alibi", "alibi"), dataset.dataset_digest(data)
    settings = SweepSettings(split="valid", tokens=64, updates=3, batch_sentences=8, arch="tiny")
    record = SweepRecord(
        settings, ("alibi",), (1,), (64, 400), {"alibi": method},
        questions={"mill": EvaluationQuestions(str(data), digest, (name,))},
        fine_tuning=settings, question_config=QuestionConfig(),
    )  # fmt: skip
    sweep.write_record(record)
    run = sweep.run_folder(method, 1, "mill")
    json_files.write_json(run.checkpoints.record_path, {"layout": 2, "finished": {"checkpoint": "c", "updates": 3}})
    rows = prepared.split("valid")
    for length in record.lengths:
        key = QuestionKey(checkpoint="c", data=digest, set=name, split="valid", length=length)
        right = [rows.text(row.answers[0]).strip() for row in rows]
        answers = {row.id: right[i] if i % 2 else "nobody <b>" for i, row in enumerate(rows)}
        json_files.write_json(predictions_path(run.answers / "alibi", key), answers)
        result = QuestionResult(
            **vars(key), suite="own", questions=11, metrics={"f1": 45.0}, published="f1", score=45.0,
            truncated_documents=0, lost_tokens=0, empty=0, transform="identity",
            question_scores=pack_scores([100.0 * (i % 2) for i in range(11)]),
        )  # fmt: skip
        json_files.append_json_line(run.results, result.to_json())
    return sweep


def question_tables(sweep: SweepFolder) -> list:
    record = sweep.read_record()
    return examples.question_blocks(sweep, record, load_results(sweep, record))


def test_answers_to_questions_are_shown_with_their_evidence(answered, monkeypatch):
    _, trained, beyond = question_tables(answered)
    assert "6 answers with f1 below 50 and 5 others" in trained.summary and "beyond training" in beyond.summary
    assert beyond.header == ["tokens", "words to the end", "f1"]
    assert [row.is_right for row in beyond.rows] == [False] * 6 + [True] * 5
    for row in beyond.rows:
        text = " ".join(piece.text for piece in row.prompt)
        assert text.startswith("Who mended the wheel? Day") and text.endswith("Answer:")
        (evidence,) = marked(row.prompt, "needle")
        assert evidence in row.answer[0].text and row.facts[2] == ("100" if row.is_right else "0")
        assert marked(row.prediction, "wrong") == ([] if row.is_right else ["nobody <b>"])
    # a short context has lost the evidence at the end of long documents
    assert any(not marked(row.prompt, "needle") for row in trained.rows)
    skip_drawing(monkeypatch)
    write_report(answered)
    assert "nobody &lt;b&gt;" in (answered.path / "report.html").read_text()


def test_questions_that_are_gone_are_named_and_changed_ones_are_not_shown(answered):
    data = Path(answered.read_record().questions["mill"].data)
    state = json_files.read_json(data / "answers.json")
    sets = {**state["sets"], "new": next(iter(state["sets"].values()))}
    json_files.write_json(data / "answers.json", {**state, "sets": sets})
    (_, text) = question_tables(answered)
    assert isinstance(text, Text) and "was changed after the sweep" in text.text
    (data / "answers.json").unlink()
    (_, text) = question_tables(answered)
    assert text.text.startswith("mill: the questions cannot be shown.") and "answers.json" in text.text
