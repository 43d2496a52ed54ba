"""Questions from their file to their scores: what a model has learned by heart, it answers right."""

from __future__ import annotations

import json

from conftest import run_here
from prepared_folder import asked_set, make_sets, questions
from training import train


def test_a_model_answers_what_it_has_learned(tmp_path):
    """Twice the length that it was trained at is no other text where nothing had to be cut."""
    choices = [q for q in questions(9) if q.choices]
    make_sets(tmp_path / "data", [asked_set("mill", {"train": choices, "valid": choices}, ("f1", "em", "accuracy"))])
    found = []
    for updates in (1, 70):
        last = train(tmp_path / "data", tmp_path / f"run{updates}", updates, rpe="rope", lr=0.01, tokens_per_sample=192)
        for flags in (["--beam", "2"], ["--by", "likelihood"]):
            words = ["answer", last, tmp_path / "data", "--lengths", "192,384", "--device", "cpu", "--json", *flags]
            found += [json.loads(line) for line in run_here(*words).stdout.splitlines()]
    before, after = found[:4], found[4:]
    assert [row["metrics"] for row in after] == [{"f1": 100.0, "em": 100.0, "accuracy": 100.0}] * 4
    assert max(row["score"] for row in before) <= 60
    assert all(row["questions"] == 6 and row["encoding"] == "rope" for row in found)
