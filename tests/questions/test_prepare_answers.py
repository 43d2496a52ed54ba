"""prepare-answers and prepare-gaps on the command line: known sets, own files, and everything that is refused."""

import json

import published
import pytest
from conftest import error_of
from prepared_folder import vocabulary
from test_gaps import NAMES, story

from fairseq_rpe.cli.main import main
from fairseq_rpe.questions import known
from fairseq_rpe.questions.prepared import load

GOOD = {"id": "a", "prompt": "Who mended the wheel?\n\n", "document": "Tamsin did.", "answers": ["Tamsin", "she"]}


@pytest.fixture(scope="module")
def vocab(tmp_path_factory):
    return vocabulary(tmp_path_factory.mktemp("vocabulary"))


@pytest.fixture(scope="module")
def shipped(tmp_path_factory):
    """All known sets as their authors ship them, in one folder."""
    folder = tmp_path_factory.mktemp("shipped")
    for name in known.names():
        published.write(name, folder)
    return folder


def written(path, *rows):
    content = b"".join(row if isinstance(row, bytes) else json.dumps(row).encode() + b"\n" for row in rows)
    path.write_bytes(content)
    return path


def prepare(*words):
    return main([str(word) for word in ("prepare-answers", *words)])


def refusal(capsys, *words):
    return error_of(capsys, "prepare-answers", *words)


def test_all_known_sets_in_one_folder(shipped, vocab, tmp_path, capsys):
    dest = tmp_path / "all"
    words = (*known.names(), "--from", shipped, "--no-counts", "--vocab-from", vocab, "--dest", dest)
    assert prepare(*words) == 0
    said = capsys.readouterr().out
    assert "qqp train: left out" in said
    prepared = load(dest)
    assert list(prepared.sets) == known.names() and prepared.splits == ("train", "valid")
    for name, info in prepared.sets.items():
        one = known.load(name)
        found = (info.suite, info.title, info.metrics, info.published, info.answer_tokens)
        assert found == (one.suite, one.title, one.metrics, one.published, one.answer_tokens)
        assert f"| {name} valid" in said
    for split in prepared.splits:
        rows = prepared.split(split)
        expected = [
            (name, question)
            for name in known.names()
            for question, _ in known.load(name).questions(split, known.load(name).find(shipped, split), False)
        ]
        assert len(rows) == len(expected)
        for row, (name, question) in zip(rows, expected, strict=True):
            assert (row.set, row.id, row.group) == (name, question.id, question.group)
            texts = [rows.text(item) for item in (row.prompt, row.document, row.cue)]
            assert texts == [question.prompt, question.document, question.cue]
            assert [rows.text(item).strip() for item in row.answers] == [" ".join(a.split()) for a in question.answers]
            assert all(rows.text(item)[0] == " " for item in row.answers) == (not "".join(texts)[-1].isspace())
    assert prepare(*words) == 0
    assert f"{dest} is up to date" in capsys.readouterr().out


def test_a_known_set_with_other_counts_is_refused(shipped, vocab, tmp_path, capsys):
    said = refusal(capsys, "cola", "--from", shipped, "--vocab-from", vocab, "--dest", tmp_path / "new" / "cola")
    assert "cola train has 4 examples instead of the published 8551: get a whole copy" in said and "--no-counts" in said
    assert not (tmp_path / "new").exists()


def test_own_questions(vocab, tmp_path, capsys):
    train = written(tmp_path / "train.jsonl", GOOD, b"\n", {**GOOD, "id": "b", "group": "g"})
    other = written(tmp_path / "other.jsonl", {**GOOD, "id": "c", "choices": ["Tamsin", "she"], "distance": 2})
    valid = written(tmp_path / "valid.jsonl", GOOD)
    words = ("--train", train, other, "--valid", valid, "--vocab-from", vocab, "--dest", tmp_path / "wheel")
    assert prepare(*words, "--metric", "em", "f1", "--answer-tokens", "8") == 0
    assert "| wheel train |" in capsys.readouterr().out
    prepared = load(tmp_path / "wheel")
    info = prepared.sets["wheel"]
    assert (info.metrics, info.published, info.answer_tokens, info.suite) == (("em", "f1"), "em", 8, "own")
    assert [row.id for row in prepared.split("train")] == ["a", "b", "c"]
    said = refusal(capsys, *words, "--name", "mill")
    assert "was made with other settings" in said and "name is wheel there, mill here" in said and "--overwrite" in said
    assert list(load(tmp_path / "wheel").sets) == ["wheel"]
    assert prepare(*words, "--name", "mill", "--overwrite") == 0
    assert list(load(tmp_path / "wheel").sets) == ["mill"]


HALF = json.dumps(GOOD).replace("did", "\\ud83d").encode()
LATIN = json.dumps({**GOOD, "prompt": "Café?"}, ensure_ascii=False).encode("latin-1") + b"\n"


@pytest.mark.parametrize(
    ("rows", "more", "words"),
    [
        ([{**GOOD, "answers": []}], "", "train.jsonl line 3: question 'a' has no answer"),
        ([GOOD, GOOD], "", "train.jsonl line 4: id 'a' is that of line 3"),
        ([{**GOOD, "id": "z"}], "", "train.jsonl line 3: id 'z' is there a second time in the train split of made"),
        ([{**GOOD, "answers": ["zyx"]}], "--answer-tokens 3", "5 tokens with its end, more than 3: leave it out or"),
        ([LATIN], "", "train.jsonl line 3 is not a JSON object (not UTF-8)"),
        ([HALF], "", "train.jsonl line 3: document of the question must be text without half"),
        ([GOOD], "--metric f1 matthews", "fewer than two choices: prepare them with more, or with --metric f1"),
        ([GOOD], "--metric spearman", "first.jsonl line 1: question 'z': spearman: the answer 'me' is no number"),
        ([GOOD], "--metric bleu", "--metric bleu is unknown: use f1, em"),
        ([GOOD], "--answer-tokens 1", "--answer-tokens 1 is out of range: use 2 or more"),
        ([GOOD], "--no-counts", "--no-counts is for known sets and none is named"),
        ([GOOD], "--from x", "--from is for known sets and none is named"),
        ([GOOD], "cola", "NAME and --train are both given"),
        ([], "", "has no question: give other files"),
    ],
)
def test_bad_questions_leave_nothing(vocab, tmp_path, capsys, rows, more, words):
    train = written(tmp_path / "train.jsonl", b"\n", b" \n", *rows)
    first = [written(tmp_path / "first.jsonl", {**GOOD, "id": "z", "answers": ["me"]})] if rows else []
    valid = written(tmp_path / "valid.jsonl", GOOD)
    dest = tmp_path / "new" / "made"
    given = ("--train", *first, train, "--valid", valid, "--vocab-from", vocab, "--dest", dest)
    assert words in refusal(capsys, *more.split(), *given)
    assert not dest.parent.exists() or list(dest.parent.iterdir()) == []


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ("", "no questions are given: name known sets, or give --train and --valid"),
        ("--valid {t}/valid.jsonl", "no questions are given"),
        ("colla --from {t}", "unknown set 'colla' (did you mean 'cola'?)"),
        ("cola cola --from {t}", "cola, cola: a set is named twice"),
        ("cola --name x", "--name is for questions of your own files"),
        ("cola --metric em", "--metric is for questions of your own files"),
        ("cola --from {t}", "{t} has no train file of cola"),
        ("--train {t}/absent --valid {t}/valid.jsonl", "{t}/absent does not exist"),
        ("--train {t} --valid {t}/valid.jsonl", "{t} is a folder: name a file"),
        ("{files} --vocab-from {t}", "--vocab-from {t} is not a prepared corpus"),
        ("{files} --dest {t}", "{t} is not empty and was not made by this"),
        ("{files} --dest {t}/valid.jsonl", "valid.jsonl is a file, not a folder"),
    ],
)
def test_what_does_not_go_together(vocab, tmp_path, capsys, given, words):
    written(tmp_path / "valid.jsonl", GOOD)
    usual = ("--vocab-from", vocab, "--dest", tmp_path / "new" / "made")
    files = f"--train {tmp_path}/valid.jsonl --valid {tmp_path}/valid.jsonl"
    said = refusal(capsys, *usual, *given.format(t=tmp_path, files=files).split())
    assert words.format(t=tmp_path) in said
    assert not (tmp_path / "new").exists() or list((tmp_path / "new").iterdir()) == []


def test_words_that_a_dictionary_lacks(tmp_path, capsys):
    vocab = vocabulary(tmp_path / "v", "words", "Who mended the wheel? Tamsin did.".split())
    asked = {**GOOD, "document": "Some say Tamsin did.", "answers": ["Tamsin"]}
    train = written(tmp_path / "train.jsonl", asked)
    words = ("--train", train, "--valid", train, "--vocab-from", vocab, "--dest", tmp_path / "made")
    assert prepare(*words) == 0
    assert "20.00 %" in capsys.readouterr().out  # the line ends are two more
    written(train, {**asked, "answers": ["Tamsin", "Old Tamsin"]})
    said = refusal(capsys, *words, "--overwrite")
    assert "train.jsonl line 1: the answer 'Old Tamsin' has words that the dictionary lacks" in said
    assert len(load(tmp_path / "made").split("train")[0].answers) == 1


def judged(vocab, tmp_path, metric, *rows):
    """The words of a preparation of own questions with a metric."""
    train = written(tmp_path / "train.jsonl", *[{**GOOD, "id": str(n), **row} for n, row in enumerate(rows)])
    return "--train", train, "--valid", train, "--vocab-from", vocab, "--dest", tmp_path / "made", "--metric", metric


ME, YOU, THREE = ({"answers": [answer], "choices": choices} for answer, *choices in ("mmy", "yymm", "mmyx"))


@pytest.mark.parametrize(
    ("metric", "rows", "words"),
    [
        ("macro_f1", [ME, ME, YOU], "line 3: question '2': macro_f1 is of classes, and these questions have not all"),
        ("f1a", [THREE], "line 1: question '0': f1a is of two classes, and these questions have 3: prepare them with"),
        ("pearson", [{"answers": ["1"]}, {"answers": ["inf"]}], "line 2: question '1': pearson: the answer 'inf' is"),
    ],
)
def test_metrics_that_cannot_judge_a_later_question(metric, rows, words, vocab, tmp_path, capsys):
    assert words in refusal(capsys, *judged(vocab, tmp_path, metric, *rows))


@pytest.mark.parametrize(
    ("metric", "rows"), [("f1a", [ME, ME]), ("macro_f1", [THREE, THREE]), ("spearman", [{"answers": [" 1.5"]}])]
)
def test_metrics_that_can_judge_the_questions(metric, rows, vocab, tmp_path):
    assert prepare(*judged(vocab, tmp_path, metric, *rows)) == 0


def test_a_text_of_a_known_set_is_refused_with_its_line(tmp_path, capsys):
    vocab = vocabulary(tmp_path / "v", "words", ["Tamsin"])
    rows = [{"id": word, "input": f"Who?\n\n{word}", "output": word} for word in ("Tamsin", "Quill")]
    written(tmp_path / "train.jsonl", *rows)
    written(tmp_path / "validation.jsonl", rows[0])
    words = ("narrative_qa", "--from", tmp_path, "--no-counts", "--vocab-from", vocab, "--dest", tmp_path / "made")
    assert "train.jsonl line 2: the answer 'Quill' has words that the dictionary lacks" in refusal(capsys, *words)


def test_gaps_from_the_command_line(tmp_path, capsys):
    vocab = vocabulary(tmp_path / "v", "words", ["the"])
    rows = [json.dumps({"text": story(seed, 200)}).encode() + b"\n" for seed in range(3)]
    files = [written(tmp_path / f"{n}.jsonl", row) for n, row in enumerate(rows)]
    words = ["prepare-gaps", files[0], "--valid", files[1], "--test", files[2], "--dest", tmp_path / "gaps"]
    words += f"--vocab-from {vocab} --tokens 200 --questions 16 --valid-questions 8 --sentence earlier".split()
    # names that the dictionary lacks can be no answers
    assert main([str(word) for word in words]) == 2
    assert "the train split has no names" in capsys.readouterr().err
    vocabulary(vocab, "words", NAMES)
    assert main([str(word) for word in words]) == 0
    assert "the most recent name" in capsys.readouterr().out
    assert load(tmp_path / "gaps").sets["gaps"].splits["train"].questions == 16
    assert main([str(word) for word in ["prepare-gaps", "--train", *words[1:]]]) == 0
    assert "gaps is up to date" in capsys.readouterr().out
    assert main([str(word) for word in [*words, "--seed", "2"]]) == 2
    assert "seed is 1 there, 2 here" in capsys.readouterr().err
    assert main([str(word) for word in [*words, "--seed", "2", "--overwrite"]]) == 0
