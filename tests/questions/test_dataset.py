"""Prepared folders of questions: what goes in comes out, each text once, damage is told, failure leaves nothing."""

import json

import numpy as np
import pytest
from prepared_folder import asked_set, make_folder, make_sets, questions, vocabulary
from refusal import refused

from fairseq_rpe.data.folder import check_folder, describe_files, read_split
from fairseq_rpe.questions.dataset import Question, dataset_digest, is_question_folder, load_dataset


@pytest.mark.parametrize("kind", ["bpe", "words"])
def test_what_goes_in_comes_out(tmp_path, kind):
    words = "Who mended the wheel? Day The river rose. Old wheel. Answer: Tamsin Bren".split()
    given = {"train": questions(8), "valid": questions(4, start=8)}
    prepared = make_folder(tmp_path / "made", given, vocabulary(tmp_path / "v", kind, words))
    assert is_question_folder(tmp_path / "made") and prepared.splits == ("train", "valid")
    check_folder(tmp_path / "made", "train", "valid")
    for split, asked in given.items():
        rows = prepared.split(split)
        assert len(rows) == len(asked)
        for row, question in zip(rows, asked, strict=True):
            assert (row.id, row.set, row.group, row.distance) == (question.id, "made", question.group, None)
            texts = [rows.text(item) for item in (row.prompt, row.document, row.cue)]
            if kind == "words":
                assert texts[1].split()[2:] == question.document.split()[2:] and texts[1].startswith("Day \ufffd ")
            else:
                assert texts == [question.prompt, question.document, question.cue]
            # the cue ends within a line
            assert [rows.text(item).strip() for item in row.answers] == list(question.answers)
            assert [rows.text(item).strip() for item in row.choices] == list(question.choices)
            assert kind == "words" or all(rows.text(item)[0] == " " for item in row.answers)
            assert rows.tokens(row.document).dtype == np.uint16
    info = prepared.sets["made"]
    assert (info.metrics, info.published, info.answer_tokens) == (("f1", "em"), "f1", 16)
    assert (info.splits["train"].questions, info.splits["train"].answers) == (8, 11)
    assert bool(info.splits["train"].unknown) == (kind == "words")


MISSING = object()


def one(ident="a", prompt="Who?\n", answers=("Bren",), **more):
    return Question(ident, prompt, answers, **more)


def test_each_text_is_stored_once_and_all_but_it_may_be_missing(tmp_path):
    long = "The river rose in March. " * 50
    asked = [one(f"q{i}", document=long, distance=i) for i in range(5)] + [Question("x", "", ("Bren",), cue="Who?\n")]
    prepared = make_folder(tmp_path / "made", {"train": asked, "valid": asked[:1]})
    rows = prepared.split("train")
    assert len({row.document for row in rows[:5]}) == 1 and len(rows.sizes) == 3  # the cue is one of the prompts
    assert len(read_split(tmp_path / "made", "train")[0]) == rows.sizes.sum()
    assert [row.distance for row in rows] == [0, 1, 2, 3, 4, None]
    assert (rows[-1].prompt, rows[-1].document, rows[-1].cue) == (None, None, rows[0].prompt)
    assert rows.text(None) == "" and len(rows.tokens(None)) == 0 and rows.decode(rows.tokens(0).tolist()) == "Who?\n"
    # after a line end a word begins without a blank
    assert rows.text(rows[0].answers[0]) == "Bren"
    info = prepared.sets["made"].splits["train"]
    assert (info.documents, info.longest) == (1, rows.sizes[rows[0].prompt] + rows.sizes[rows[0].document])
    with pytest.raises(IndexError):
        rows[6]


def test_white_space_of_answers_and_copies_of_choices(tmp_path):
    asked = [one(answers=("Old  Bren\n said", "Bren"), choices=("Bren", "Old  Bren\n said", "Old Bren said"))]
    rows = make_folder(tmp_path / "made", {"train": asked, "valid": asked}).split("valid")
    assert [rows.text(item) for item in rows[0].answers] == ["Old Bren said", "Bren"]
    assert rows[0].choices == (rows[0].answers[1], rows[0].answers[0])


def test_several_sets_and_the_digest(tmp_path):
    given = {"train": questions(3), "valid": questions(3, start=3)}
    both = make_sets(tmp_path / "both", [asked_set("a", given), asked_set("b", given, ("accuracy",))])
    assert list(both.sets) == ["a", "b"] and both.sets["b"].published == "accuracy"
    rows = both.split("valid")
    assert [(row.set, row.id) for row in rows] == [(name, f"q{i}") for name in "ab" for i in (3, 4, 5)]
    assert rows[0].document == rows[3].document
    again = make_sets(tmp_path / "again", [asked_set("a", given), asked_set("b", given, ("accuracy",))])
    other = make_sets(tmp_path / "other", [asked_set("a", given), asked_set("b", given, ("em",))])
    assert dataset_digest(both.folder) == dataset_digest(again.folder) != dataset_digest(other.folder)


def test_changed_files(tmp_path):
    folder = make_folder(tmp_path / "made").folder
    rows = folder / "valid.rows.jsonl"
    rows.write_text(rows.read_text().replace('"q8"', '"q7"'))
    with refused("valid.rows.jsonl is not the one that answers.json describes: prepare it"):
        load_dataset(folder).split("valid")
    write_rows(rows, rows.read_text().splitlines()[:-1])
    with refused("valid.rows.jsonl has 3 questions of made, not 4: prepare it again"):
        load_dataset(folder).split("valid")
    (folder / "dict.txt").unlink()
    with refused(r"has no dict.txt: prepare it again"):
        load_dataset(folder)


@pytest.mark.parametrize(
    ("key", "values", "words"),
    [
        ("prompt", [True, -1], "prompt of the question must be a whole number from 0 on, not "),
        ("prompt", [999], "'q9' names text 999, but there are "),
        ("document", [0.5], "document of the question must be"),
        ("cue", ["x"], "cue of the question must be"),
        ("answers", [None, [], ["Bren"], [1 << 70]], "answers of the question must be a list of at least one text's"),
        ("choices", [{"a": 1}], "choices of the question must be a list"),
        ("choices", [[0, 999]], "'q9' names text 999"),
        ("guesses", [{"last": 999}], "'q9' names text 999"),
        ("id", [["q9"]], "id of the question must be text"),
        ("id", ["q8"], "question 'q8' has the id of line 1"),
        ("set", [7], "set of the question must be text, not 7"),
        ("set", ["other"], "'q9' is of the set 'other', which answers.json does not describe"),
        ("group", [[]], "group of the question must be text"),
        ("distance", [-2], "distance of the question must be"),
        (("prompt", "document", "cue"), [None], "'q9' has neither a prompt nor a document nor a cue"),
        ("id", [MISSING], "the question lacks id"),
        ("set", [MISSING], "the question lacks set"),
    ],
)
def test_an_edited_question_is_refused_with_its_line(tmp_path, key, values, words):
    path = make_folder(tmp_path / "made").folder / "valid.rows.jsonl"
    lines = path.read_text().splitlines()
    for value in values:
        row = json.loads(lines[1]) | dict.fromkeys([key] if isinstance(key, str) else key, value)
        row = {name: one for name, one in row.items() if one is not MISSING}
        write_rows(path, [lines[0], json.dumps(row), *lines[2:]])
        with refused(f"^{path} line 2: .*{words}.*: prepare it again$"):
            load_dataset(path.parent).split("valid")


def write_rows(path, lines):
    """Other questions in a folder, whose answers.json describes them."""
    path.write_text("\n".join(lines) + "\n")
    manifest = json.loads((path.parent / "answers.json").read_text())
    manifest["files"] |= describe_files(path.parent, [path.name])
    (path.parent / "answers.json").write_text(json.dumps(manifest))


@pytest.mark.parametrize(
    ("asked", "words"),
    [
        ([], "the train split of made has no question"),
        ([one(prompt="x\udc80")], "the prompt of 'a' has half a surrogate pair at character 1"),
    ],
)
def test_a_failure_leaves_nothing(tmp_path, asked, words):
    vocab = vocabulary(tmp_path / "v")
    with refused(words):
        make_folder(tmp_path / "new" / "made", {"train": asked, "valid": questions(1)}, vocab)
    assert not (tmp_path / "new").exists()


def test_a_text_that_does_not_come_back(tmp_path, monkeypatch):
    monkeypatch.setattr("fairseq_rpe.questions.build_dataset.load_decoder", lambda *_: lambda ids: b"Who")
    with refused("train.jsonl: the tokenizer of --vocab-from cannot give .* the prompt of 'q0'"):
        make_folder(tmp_path / "new" / "made", None, vocabulary(tmp_path / "v"))
    assert not (tmp_path / "new").exists()


def test_a_folder_of_others_stays(tmp_path):
    (tmp_path / "made").mkdir()
    (tmp_path / "made" / "thesis.txt").write_text("mine")
    with refused("is not empty and was not made by this command"):
        make_folder(tmp_path / "made")
    assert (tmp_path / "made" / "thesis.txt").read_text() == "mine"
