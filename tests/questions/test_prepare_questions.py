"""Questions of a user in JSON lines, and the commands prepare-questions and prepare-cloze."""

import json

import published
import pytest
from conftest import run_here
from prepared_folder import vocabulary
from refusal import refusal, refused
from test_cloze import NAMES, write_stories

from fairseq_rpe.questions import benchmarks
from fairseq_rpe.questions.dataset import Question, load_dataset, read_questions

GOOD = {"id": "a", "prompt": "Who mended the wheel?\n\n", "document": "Tamsin did.", "answers": ["Tamsin", "she"]}


@pytest.fixture(scope="module")
def vocab(tmp_path_factory):
    return vocabulary(tmp_path_factory.mktemp("vocabulary"))


@pytest.fixture(scope="module")
def shipped(tmp_path_factory):
    """All known sets as their authors ship them, in one folder."""
    folder = tmp_path_factory.mktemp("shipped")
    for name in benchmarks.benchmark_names():
        published.write(name, folder)
    return folder


def written(path, *rows):
    content = b"".join(row if isinstance(row, bytes) else json.dumps(row).encode() + b"\n" for row in rows)
    path.write_bytes(content)
    return path


def prepare(*words):
    """What the command says."""
    return run_here("prepare-questions", *words).stdout


def test_reading(tmp_path):
    more = {**GOOD, "id": "b", "cue": "\n\nAnswer:", "group": "g", "choices": ["she", "Tamsin"], "distance": 3}
    one, other = read_questions(written(tmp_path / "q.jsonl", GOOD, b"\n", more))
    assert one == Question("a", "Who mended the wheel?\n\n", ("Tamsin", "she"), "Tamsin did.")
    assert (other.cue, other.group, other.choices, other.distance) == ("\n\nAnswer:", "g", ("she", "Tamsin"), 3)


@pytest.mark.parametrize(
    ("row", "words"),
    [
        (b"[1]", " is not a JSON object"),
        (
            json.dumps({**GOOD, "prompt": "Café?"}, ensure_ascii=False).encode("latin-1"),
            " is not a JSON object .not UTF-8",
        ),
        (json.dumps(GOOD).replace("did", "\\ud83d").encode(), ": document of the question must be text without half"),
        ({"id": "b", "prompt": "x"}, ": the question lacks answers"),
        ({**GOOD, "id": "b", "anwsers": []}, ": the question has an unknown key 'anwsers' .did you mean 'answers'"),
        ({**GOOD, "id": 7}, ": id of the question must be"),
        (GOOD, ": id 'a' is that of line 1"),
        ({**GOOD, "id": " "}, ": id of the question must be text that is not empty"),
        ({**GOOD, "id": "b", "choices": [*GOOD["answers"], ""]}, ": question 'b' has an empty choice"),
        ({**GOOD, "id": "b", "prompt": " ", "document": ""}, ": question 'b' has an empty prompt"),
        ({**GOOD, "id": "b", "answers": []}, ": question 'b' has no answer"),
        ({**GOOD, "id": "b", "answers": ["x", " "]}, ": question 'b' has an empty answer"),
        ({**GOOD, "id": "b", "distance": -1}, ": distance of the question must be a whole number from 0 on"),
        ({**GOOD, "id": "b", "choices": ["no"]}, ": answer 'Tamsin' of 'b' is none of its choices"),
    ],
)
def test_questions_that_cannot_be_read(tmp_path, row, words):
    with refused(f"q.jsonl line 2{words}"):
        list(read_questions(written(tmp_path / "q.jsonl", GOOD, row)))


def test_all_known_sets_in_one_folder(shipped, vocab, tmp_path):
    dest = tmp_path / "all"
    words = (*benchmarks.benchmark_names(), "--from", shipped, "--no-counts", "--vocab-from", vocab, "--out", dest)
    said = prepare(*words)
    assert "qqp train: left out" in said
    prepared = load_dataset(dest)
    assert list(prepared.sets) == benchmarks.benchmark_names() and prepared.splits == ("train", "valid")
    for name, info in prepared.sets.items():
        one = benchmarks.load_benchmark(name)
        found = (info.suite, info.title, info.metrics, info.published, info.answer_tokens)
        assert found == (one.suite, one.title, one.metrics, one.published, one.answer_tokens)
        assert f"| {name} valid" in said
    for split in prepared.splits:
        rows = prepared.split(split)
        expected = [
            (name, question)
            for name in benchmarks.benchmark_names()
            for question, _ in benchmarks.load_benchmark(name).questions(
                split, benchmarks.load_benchmark(name).find(shipped, split), False
            )
        ]
        assert len(rows) == len(expected)
        for row, (name, question) in zip(rows, expected, strict=True):
            assert (row.set, row.id, row.group) == (name, question.id, question.group)
            texts = [rows.text(item) for item in (row.prompt, row.document, row.cue)]
            assert texts == [question.prompt, question.document, question.cue]
            assert [rows.text(item).strip() for item in row.answers] == [" ".join(a.split()) for a in question.answers]
            assert all(rows.text(item)[0] == " " for item in row.answers) == (not "".join(texts)[-1].isspace())
    assert f"{dest} is up to date" in prepare(*words)


def test_own_questions(vocab, tmp_path):
    train = written(tmp_path / "train.jsonl", GOOD, b"\n", {**GOOD, "id": "b", "group": "g"})
    other = written(tmp_path / "other.jsonl", {**GOOD, "id": "c", "choices": ["Tamsin", "she"], "distance": 2})
    valid = written(tmp_path / "valid.jsonl", GOOD)
    words = ("--train", train, other, "--valid", valid, "--vocab-from", vocab, "--out", tmp_path / "wheel")
    assert "| wheel train |" in prepare(*words, "--metric", "em", "f1", "--answer-tokens", "8")
    prepared = load_dataset(tmp_path / "wheel")
    info = prepared.sets["wheel"]
    assert (info.metrics, info.published, info.answer_tokens, info.suite) == (("em", "f1"), "em", 8, "own")
    assert [row.id for row in prepared.split("train")] == ["a", "b", "c"]
    said = refusal("prepare-questions", *words, "--name", "mill")
    assert "was made with other settings" in said and "name is wheel there, mill here" in said and "--overwrite" in said
    assert list(load_dataset(tmp_path / "wheel").sets) == ["wheel"]
    prepare(*words, "--name", "mill", "--overwrite")
    assert list(load_dataset(tmp_path / "wheel").sets) == ["mill"]


@pytest.mark.parametrize(
    ("rows", "more", "words"),
    [
        ([{**GOOD, "answers": []}], "", "train.jsonl line 3: question 'a' has no answer"),
        ([{**GOOD, "id": "z"}], "", "train.jsonl line 3: id 'z' is there a second time in the train split of made"),
        ([{**GOOD, "answers": ["zyx"]}], "--answer-tokens 3", "5 tokens with its end, more than 3: leave it out or"),
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
def test_bad_questions_leave_nothing(vocab, tmp_path, rows, more, words):
    train = written(tmp_path / "train.jsonl", b"\n", b" \n", *rows)
    first = [written(tmp_path / "first.jsonl", {**GOOD, "id": "z", "answers": ["me"]})] if rows else []
    valid = written(tmp_path / "valid.jsonl", GOOD)
    dest = tmp_path / "new" / "made"
    given = ("--train", *first, train, "--valid", valid, "--vocab-from", vocab, "--out", dest)
    assert words in refusal("prepare-questions", *more.split(), *given)
    assert not dest.parent.exists() or list(dest.parent.iterdir()) == []


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ("", "no questions are given: name known sets, or give --train and --valid"),
        ("--valid {t}/valid.jsonl", "no questions are given"),
        ("cola --from {shipped}", "cola train has 4 examples instead of the published 8551: get a whole copy"),
        ("cola --from {shipped}", "--no-counts"),
        ("colla --from {t}", "unknown set 'colla' (did you mean 'cola'?)"),
        ("cola cola --from {t}", "cola, cola: a set is named twice"),
        ("cola --name x", "--name is for questions of your own files"),
        ("cola --metric em", "--metric is for questions of your own files"),
        ("cola --from {t}", "{t} has no train file of cola"),
        ("--train {t}/absent --valid {t}/valid.jsonl", "{t}/absent does not exist"),
        ("--train {t} --valid {t}/valid.jsonl", "{t} is a folder: name a file"),
        ("{files} --vocab-from {t}", "--vocab-from {t} is not a prepared corpus"),
        ("{files} --out {t}", "{t} is not empty and was not made by this"),
        ("{files} --out {t}/valid.jsonl", "valid.jsonl is a file, not a folder"),
    ],
)
def test_what_does_not_go_together(vocab, shipped, tmp_path, given, words):
    written(tmp_path / "valid.jsonl", GOOD)
    usual = ("--vocab-from", vocab, "--out", tmp_path / "new" / "made")
    files = f"--train {tmp_path}/valid.jsonl --valid {tmp_path}/valid.jsonl"
    given = given.format(t=tmp_path, files=files, shipped=shipped).split()
    assert words.format(t=tmp_path) in refusal("prepare-questions", *usual, *given)
    assert not (tmp_path / "new").exists() or list((tmp_path / "new").iterdir()) == []


def test_words_that_a_dictionary_lacks(tmp_path):
    vocab = vocabulary(tmp_path / "v", "words", "Who mended the wheel? Tamsin did.".split())
    asked = {**GOOD, "document": "Some say Tamsin did.", "answers": ["Tamsin"]}
    train = written(tmp_path / "train.jsonl", asked)
    words = ("--train", train, "--valid", train, "--vocab-from", vocab, "--out", tmp_path / "made")
    assert "20.00 %" in prepare(*words)  # the line ends are two more
    written(train, {**asked, "answers": ["Tamsin", "Old Tamsin"]})
    said = refusal("prepare-questions", *words, "--overwrite")
    assert "train.jsonl line 1: the answer 'Old Tamsin' has words that the dictionary lacks" in said
    assert len(load_dataset(tmp_path / "made").split("train")[0].answers) == 1

    rows = [{"id": word, "input": f"Who?\n\n{word}", "output": word} for word in ("Tamsin", "Quill")]
    written(train, *rows)
    written(tmp_path / "validation.jsonl", rows[0])
    said = refusal(
        "prepare-questions", "narrative_qa", "--from", tmp_path, "--no-counts", *words[4:6], "--out", tmp_path / "k"
    )
    assert "train.jsonl line 2: the answer 'Quill' has words that the dictionary lacks" in said


ME, YOU, THREE = ({"answers": [answer], "choices": choices} for answer, *choices in ("mmy", "yymm", "mmyx"))


@pytest.mark.parametrize(
    ("metric", "rows", "words"),
    [
        ("macro_f1", [ME, ME, YOU], "line 3: question '2': macro_f1 needs classes, and these questions have not all"),
        ("f1a", [THREE], "line 1: question '0': f1a needs two classes, and these questions have 3: prepare them with"),
        ("pearson", [{"answers": ["1"]}, {"answers": ["inf"]}], "line 2: question '1': pearson: the answer 'inf' is"),
        ("f1a", [ME, ME], None),
        ("macro_f1", [THREE, THREE], None),
        ("spearman", [{"answers": [" 1.5"]}], None),
    ],
)
def test_metrics_that_can_or_cannot_judge_all_questions(metric, rows, words, vocab, tmp_path):
    train = written(tmp_path / "train.jsonl", *[{**GOOD, "id": str(n), **row} for n, row in enumerate(rows)])
    given = ("--train", train, "--valid", train, "--vocab-from", vocab, "--out", tmp_path / "made", "--metric", metric)
    if words:
        assert words in refusal("prepare-questions", *given)
    else:
        prepare(*given)


def test_gaps_from_the_command_line(tmp_path):
    vocab = vocabulary(tmp_path / "v", "words", ["the"])
    train, valid, test = (write_stories(tmp_path / f"{seed}.jsonl", [seed], 200) for seed in range(3))
    words = ["--valid", valid, "--test", test, "--out", tmp_path / "gaps", "--vocab-from", vocab]
    words += "--tokens 200 --questions 16 --valid-questions 8 --source earlier".split()
    # names that the dictionary lacks can be no answers
    assert "the train split has no names" in refusal("prepare-cloze", train, *words)
    vocabulary(vocab, "words", NAMES)
    assert "the most recent name" in run_here("prepare-cloze", train, *words).stdout
    assert load_dataset(tmp_path / "gaps").sets["gaps"].splits["train"].questions == 16
    assert "gaps is up to date" in run_here("prepare-cloze", "--train", train, *words).stdout
    assert "seed is 1 there, 2 here" in refusal("prepare-cloze", train, *words, "--seed", "2")
    run_here("prepare-cloze", train, *words, "--seed", "2", "--overwrite")
