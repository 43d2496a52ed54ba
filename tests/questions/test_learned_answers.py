"""From questions to scores: what a model has learned it answers right, and every known set can be learned and asked."""

from __future__ import annotations

import json
import re

import published
import pytest
from conftest import run_here
from prepared_folder import asked_set, make_sets, questions, vocabulary
from training import train

from fairseq_rpe.questions import benchmarks, dataset

FORMS = {"boolq": "choices", "qmsum": "a generated answer", "narrative_qa": "several answers", "stsb": "pairs"}
FORMS |= {"multirc": "a passage of several questions"}
LENGTH = 700  # holds the longest of the hand-made questions


def answered(checkpoint, folder, lengths, *flags) -> list[dict]:
    words = ("eval-questions", checkpoint, folder, "--lengths", lengths, "--device", "cpu", "--json", *flags)
    return [json.loads(line) for line in run_here(*words).stdout.splitlines()]


def test_a_model_answers_what_it_has_learned(tmp_path):
    """In validation and by the command; twice the training length is no other text where nothing had to be cut."""
    choices, said = [q for q in questions(9) if q.choices], []
    names = ("f1", "group_em", "accuracy")
    splits = {"train": choices, "valid": choices}
    make_sets(tmp_path / "data", [asked_set(name, splits, (name, "em"), 8) for name in names])
    flags = {"rpe": "rope", "lr": 0.01, "tokens_per_sample": 192, "max_tokens": 1200, "eval_answers": True}
    first = train(tmp_path / "data", tmp_path / "first", 1, **{**flags, "disable_validation": True})
    assert max(row["score"] for row in answered(first, tmp_path / "data", "192", "--answer-mode", "likelihood")) <= 60
    last = train(tmp_path / "data", tmp_path / "run", 70, said=said, **{**flags, "validate_interval": 100})
    line = [line for line in said if "valid on 'valid' subset" in line and "| answers " in line][-1]
    values = dict(re.findall(r"\| (answers\w*|exact) ([\d.]+)", line))
    assert values == dict.fromkeys(("exact", "answers", *(f"answers_{name}" for name in names)), "100")
    for how in (["--beam", "2"], ["--answer-mode", "likelihood"]):
        rows = answered(last, tmp_path / "data", "192,384", *how)
        assert [row["metrics"] for row in rows] == [{n: 100.0, "em": 100.0} for n in names for _ in range(2)]
        assert all(row["questions"] == 6 and row["encoding"] == "rope" for row in rows)


@pytest.fixture(scope="module")
def vocab(tmp_path_factory):
    return vocabulary(tmp_path_factory.mktemp("vocabulary"))


@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=() if name in FORMS else pytest.mark.release) for name in benchmarks.benchmark_names()],
)
def test_from_the_published_file_to_a_score(name, vocab, tmp_path):
    shipped, folder = published.write(name, tmp_path / "shipped"), tmp_path / "made"
    few = ("--answer-tokens", 24)  # a model of five updates does not end its answers
    run_here("prepare-questions", name, "--from", shipped, "--no-counts", *few, "--vocab-from", vocab, "--out", folder)
    checkpoint = train(folder, tmp_path / "run", tokens_per_sample=LENGTH, max_tokens=LENGTH)
    (result,) = answered(checkpoint, folder, LENGTH, "--predictions", tmp_path / "written")
    made, one = dataset.load_dataset(folder), benchmarks.load_benchmark(name)
    rows = made.split("valid")
    assert result["questions"] == len(rows) == made.sets[name].splits["valid"].questions >= 3
    assert set(result["metrics"]) == {*one.metrics, one.published}
    assert all(-100 <= value <= 100 for value in result["metrics"].values())
    assert (result["set"], result["score"]) == (name, result["metrics"][one.published])
    (texts,) = (tmp_path / "written").glob(f"{name}-{LENGTH}-*.json")
    assert set(json.loads(texts.read_text())) == {row.id for row in rows}
    choices = {len(row.choices) > 1 for row in rows}
    assert len(choices) == 1
    if choices == {True}:
        (result,) = answered(checkpoint, folder, LENGTH, "--answer-mode", "likelihood")
        assert result["empty"] == 0 and set(result["metrics"]) == {*one.metrics, one.published}
