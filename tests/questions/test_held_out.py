"""Validation and test of gaps are those of the corpus that models were trained on, or there is a warning."""

import pytest
from conftest import run_here
from refusal import refused
from test_cloze import SPLITS, make, story, write_stories

from fairseq_rpe.data.folder import MADE_BY, MANIFEST, read_dictionary, read_split
from fairseq_rpe.data.prepare_options import PrepareOptions
from fairseq_rpe.data.splits import SplitDocuments
from fairseq_rpe.questions.cloze_dataset import HeldOutDocuments, SplitSettings
from fairseq_rpe.utils import json_files

MANY = {"train": {"documents": 900}, "valid": {"documents": 101}}
ALL, OTHER, GIVEN = {"all": "x"}, {"all": "y"}, {"train": "a", "valid": "b", "test": "c"}


def test_the_same_source_is_divided_as_the_corpus_was(tmp_path):
    source, corpus, said = write_stories(tmp_path / "all.jsonl", range(12), 150), tmp_path / "corpus", []
    flags = "--tokenizer words --seed 5 --valid-fraction 0.25 --test-fraction 0.25".split()
    run_here("prepare", source, "--out", corpus, *flags)
    symbols = read_dictionary(corpus / "dict.txt")
    given = {"train": (source,), "valid": (), "test": (), "questions": 16, "valid_questions": 8, "tokens": 128}
    made = make(tmp_path, corpus, tmp_path / "gaps", said, seed=2, **given)
    for split in SPLITS:
        words = (symbols[i] for i in read_split(corpus, split)[0].tolist())
        text, rows = " ".join(word for word in words if word != "</s>"), made.split(split)
        assert all(" ".join(rows.text(row.document).split()) in text for row in rows)
    assert not any("warning" in line or "few documents" in line for line in said)
    division = json_files.read_json(tmp_path / "gaps/answers.json")["source"]["division"]
    assert division == {"seed": 5, "valid_fraction": 0.25, "test_fraction": 0.25, "divide_by": "text"}

    other = write_stories(tmp_path / "other.jsonl", range(5, 17), 150)
    make(tmp_path, corpus, tmp_path / "more", said, **{**given, "train": (other,)})
    [line] = [line for line in said if "warning" in line]
    assert f"models trained on {corpus} may have read documents of validation and test: give the files" in line


def test_files_decide_only_where_they_are_those_of_the_corpus(tmp_path):
    source, folder, corpus = (
        write_stories(tmp_path / "all.jsonl", range(40), 20),
        tmp_path / "files",
        tmp_path / "corpus",
    )
    folder.mkdir()
    for seed in range(40):
        (folder / f"{seed}.txt").write_text(story(seed, 20))
    by_path = PrepareOptions(corpus, (folder,), seed=4, split_by="path", valid_fraction=0.2)
    there = SplitDocuments(by_path)
    json_files.write_json(corpus / MANIFEST, {"made_by": MADE_BY, "digest": there.digest, "options": by_path.key()})
    held_out = HeldOutDocuments(corpus)
    same, division = held_out.documents(PrepareOptions(tmp_path, (folder,), seed=1))
    assert [(s, d.relative_path) for s, d in same] == [(s, d.relative_path) for s, d in there]
    assert division == SplitSettings(4, 0.2, split_by="path") and held_out.warning(same.digest) is None
    other, division = held_out.documents(PrepareOptions(tmp_path, (source,), seed=1))
    assert {split for split, _ in other} == {*SPLITS} and division == SplitSettings(4, 0.2)
    assert held_out.warning(other.digest)


@pytest.mark.parametrize(
    ("made_of", "splits", "given", "few", "warned"),
    [
        ({}, {}, ALL, True, False),  # nothing is known
        (ALL, {}, ALL, True, False),
        (ALL, {}, OTHER, False, True),
        (ALL, MANY, OTHER, False, False),  # what both have falls into the same splits
        (ALL, MANY, OTHER, True, True),
        (ALL, MANY, GIVEN, False, True),
        (GIVEN, MANY, ALL, False, True),
        (GIVEN, {}, {**GIVEN, "train": "other"}, False, False),
        (GIVEN, {}, {**GIVEN, "test": "other"}, False, True),
        ({"train": "a", "valid": "b"}, {}, GIVEN, False, True),  # half of valid is the test split there
    ],
)
def test_warnings(tmp_path, made_of, splits, given, few, warned):
    json_files.write_json(tmp_path / MANIFEST, {"made_by": MADE_BY, "digest": made_of, "splits": splits})
    held_out = HeldOutDocuments(tmp_path)
    assert (held_out.warning(given, few) is not None) == warned
    assert held_out.split_settings == (SplitSettings() if made_of == ALL else None)


def test_other_documents_of_the_same_files_are_warned_of(tmp_path):
    options = {"rows_are_lines": True, "seed": 3}
    json_files.write_json(tmp_path / MANIFEST, {"made_by": MADE_BY, "digest": ALL, "options": options, "splits": MANY})
    assert HeldOutDocuments(tmp_path).split_settings == SplitSettings(3) and HeldOutDocuments(tmp_path).warning(ALL)
    json_files.write_json(tmp_path / MANIFEST, {"made_by": MADE_BY, "digest": ALL, "options": {"seed": "3"}})
    with refused("seed of options must be a whole number"):
        HeldOutDocuments(tmp_path)
