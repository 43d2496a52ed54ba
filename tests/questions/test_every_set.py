"""Every known set from the file as it is published to a score: prepared, trained on, answered, judged."""

import json

import published
import pytest
from conftest import run_here
from prepared_folder import vocabulary
from training import train

from fairseq_rpe.questions import known, prepared

FORMS = {"boolq": "choices", "qmsum": "a generated answer", "narrative_qa": "several answers", "stsb": "pairs"}
FORMS |= {"multirc": "a passage of several questions"}
LENGTH = 700  # holds the longest of the hand-made questions


@pytest.fixture(scope="module")
def vocab(tmp_path_factory):
    return vocabulary(tmp_path_factory.mktemp("vocabulary"))


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=() if name in FORMS else pytest.mark.release) for name in known.names()]
)
def test_from_the_published_file_to_a_score(name, vocab, tmp_path):
    shipped, folder, out = published.write(name, tmp_path / "shipped"), tmp_path / "made", tmp_path / "answers.jsonl"
    few = ("--answer-tokens", 24)  # a model of five updates does not end its answers
    run_here("prepare-answers", name, "--from", shipped, "--no-counts", *few, "--vocab-from", vocab, "--dest", folder)
    checkpoint = train(folder, tmp_path / "run", tokens_per_sample=LENGTH, max_tokens=LENGTH)
    run_here("answer", checkpoint, folder, "--lengths", LENGTH, "--out", out, "--predictions", tmp_path / "written")
    (result,) = map(json.loads, out.read_text().splitlines())
    made, one = prepared.load(folder), known.load(name)
    rows = made.split("valid")
    assert result["questions"] == len(rows) == made.sets[name].splits["valid"].questions >= 3
    assert set(result["metrics"]) == {*one.metrics, one.published}
    assert all(-100 <= value <= 100 for value in result["metrics"].values())
    assert (result["set"], result["score"]) == (name, result["metrics"][one.published])
    (texts,) = (tmp_path / "written").glob(f"{name}-{LENGTH}-*.json")
    written = json.loads(texts.read_text())
    assert set(written) == {row.id for row in rows}
    choices = [len(row.choices) > 1 for row in rows]
    if all(choices):
        best = tmp_path / "best.jsonl"
        run_here("answer", checkpoint, folder, "--lengths", LENGTH, "--by", "likelihood", "--out", best)
        (result,) = map(json.loads, best.read_text().splitlines())
        assert result["empty"] == 0 and set(result["metrics"]) == {*one.metrics, one.published}
    else:
        assert not any(choices)
