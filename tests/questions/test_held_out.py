"""Validation and test of gaps are those of the corpus that models were trained on, or there is a warning."""

import json

import pytest
from test_gaps import options, story

from fairseq_rpe.cli.main import main
from fairseq_rpe.core import UserError, files
from fairseq_rpe.data.division import DividedDocuments
from fairseq_rpe.data.folder import MADE_BY, MANIFEST, read_dictionary, read_split
from fairseq_rpe.data.preparation import PrepareOptions
from fairseq_rpe.questions.gap_folder import make_gaps
from fairseq_rpe.questions.held_out import Division, HeldOut

MANY = {"train": {"documents": 900}, "valid": {"documents": 101}}
ALL, OTHER, GIVEN = {"all": "x"}, {"all": "y"}, {"train": "a", "valid": "b", "test": "c"}


def test_the_same_source_is_divided_as_the_corpus_was(tmp_path):
    source, corpus = tmp_path / "all.jsonl", tmp_path / "corpus"
    source.write_text("".join(json.dumps({"text": story(seed, 150)}) + "\n" for seed in range(12)))
    flags = ["--tokenizer", "words", "--seed", 5, "--valid-fraction", 0.25, "--test-fraction", 0.25]
    assert main([str(word) for word in ("prepare", source, "--dest", corpus, *flags)]) == 0
    symbols, texts = read_dictionary(corpus / "dict.txt"), {}
    for split in ("train", "valid", "test"):
        words = (symbols[i] for i in read_split(corpus, split)[0].tolist())
        texts[split] = " ".join(word for word in words if word != "</s>")
    given = {"train": (source,), "valid": (), "test": (), "questions": 16, "valid_questions": 8, "tokens": 128}
    said = []
    for seed in (1, 2):
        made = make_gaps(options(tmp_path, corpus, tmp_path / f"gaps{seed}", seed=seed, **given), said.append)
        for split, text in texts.items():
            rows = made.split(split)
            assert all(" ".join(rows.text(row.document).split()) in text for row in rows)
    assert not any("warning" in line or "few documents" in line for line in said)
    made = files.read_json(tmp_path / "gaps1/answers.json")["source"]
    assert made["division"] == {"seed": 5, "valid_fraction": 0.25, "test_fraction": 0.25, "divide_by": "text"}

    other = tmp_path / "other.jsonl"
    other.write_text("".join(json.dumps({"text": story(seed, 150)}) + "\n" for seed in range(5, 17)))
    make_gaps(options(tmp_path, corpus, tmp_path / "more", **{**given, "train": (other,)}), said.append)
    [line] = [line for line in said if "warning" in line]
    assert f"models trained on {corpus} may have read documents of validation and test: give the files" in line


def test_files_decide_only_where_they_are_those_of_the_corpus(tmp_path):
    source, folder = tmp_path / "all.jsonl", tmp_path / "files"
    source.write_text("".join(json.dumps({"text": story(seed, 20)}) + "\n" for seed in range(40)))
    folder.mkdir()
    for seed in range(40):
        (folder / f"{seed}.txt").write_text(story(seed, 20))
    corpus = tmp_path / "corpus"
    by_path = PrepareOptions(corpus, (folder,), seed=4, divide_by="path", valid_fraction=0.2)
    there = DividedDocuments(by_path)
    made = {"made_by": MADE_BY, "digest": there.digest, "options": by_path.key()}
    files.write_json(corpus / MANIFEST, made)
    held_out = HeldOut(corpus)
    same, division = held_out.documents(PrepareOptions(tmp_path, (folder,), seed=1))
    assert [(s, d.place) for s, d in same] == [(s, d.place) for s, d in there]
    assert division == Division(4, 0.2, divide_by="path") and held_out.warning(same.digest) is None
    other, division = held_out.documents(PrepareOptions(tmp_path, (source,), seed=1))
    assert {split for split, _ in other} == {"train", "valid", "test"} and division == Division(4, 0.2)
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
    files.write_json(tmp_path / MANIFEST, {"made_by": MADE_BY, "digest": made_of, "splits": splits})
    held_out = HeldOut(tmp_path)
    assert (held_out.warning(given, few) is not None) == warned
    assert held_out.division == (Division() if made_of == ALL else None)


def test_other_documents_of_the_same_files_are_warned_of(tmp_path):
    options = {"rows_are_lines": True, "seed": 3}
    files.write_json(tmp_path / MANIFEST, {"made_by": MADE_BY, "digest": ALL, "options": options, "splits": MANY})
    assert HeldOut(tmp_path).division == Division(3) and HeldOut(tmp_path).warning(ALL)
    files.write_json(tmp_path / MANIFEST, {"made_by": MADE_BY, "digest": ALL, "options": {"seed": "3"}})
    with pytest.raises(UserError, match="seed of options must be a whole number"):
        HeldOut(tmp_path)
