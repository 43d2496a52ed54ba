"""Known sets: the questions that are made of each, in the formats of the authors and of the hub, and refusals."""

from __future__ import annotations

import json
import zipfile
from collections import Counter
from pathlib import Path
from typing import Any

import published
import pytest
from fake_hub import FakeHub
from refusal import refused

from fairseq_rpe.questions import benchmarks, metrics
from fairseq_rpe.questions.dataset import Question

# Of each set: the metric that FIRE prints, and the examples of training and validation as the papers and the hub have
# them; of SCROLLS the rows, of MultiRC the answers, of ReCoRD the queries.
SUITES = {
    "scrolls": "qasper f1 2567 1726, narrative_qa f1 55003 5878, quality em 2523 2086, contract_nli em 7191 1037, "
    "qmsum rgm 1257 272, summ_screen_fd rgm 3673 338, gov_report rgm 17457 972",
    "glue": "cola accuracy 8551 1043, sst2 accuracy 67349 872, mrpc accuracy 3668 408, qqp accuracy 363846 40430, "
    "stsb spearman 5749 1500, mnli accuracy 392702 9815, mnli_mismatched accuracy 392702 9832, "
    "qnli accuracy 104743 5463, rte accuracy 2490 277, wnli accuracy 635 71",
    "superglue": "boolq accuracy 9427 3270, cb accuracy 250 56, copa accuracy 400 100, multirc group_em 27243 4848, "
    "record em 100730 10000, superglue_rte accuracy 2490 277, wic accuracy 5428 638, wsc accuracy 554 104",
}
SETS = {row.split()[0]: (suite, *row.split()[1:]) for suite, rows in SUITES.items() for row in rows.split(", ")}
SHORT = [name for name, (suite, *_) in SETS.items() if suite != "scrolls"]
MILL, FERRY = published.MILL, published.FERRY


def questions_of(name: str, source: Path, split: str, skipped: Counter[str] | None = None) -> list[Question]:
    found = benchmarks.load_benchmark(name)
    return [one for one, _ in found.questions(split, found.find(source, split), check_counts=False, skipped=skipped)]


def unpacked(path: Path, folder: Path) -> Path:
    with zipfile.ZipFile(path) as archive:
        archive.extractall(folder)
    return folder / path.stem


def test_what_a_set_says_of_itself():
    assert benchmarks.benchmark_names() == sorted(SETS)
    for name, row in SETS.items():
        one = benchmarks.load_benchmark(name)
        assert (one.suite, one.published, *(str(one.counts[split]) for split in benchmarks.SPLITS)) == row
        assert len(one.counts) == 2
        assert one.reader in benchmarks._READERS and one.places.home.startswith("https://")
        assert {*one.metrics, one.published} <= set(metrics.metric_names())
        assert one.published in one.metrics or name == "cola"
        # a class is never cut, be it spelled letter by letter
        assert all(len(choice) < one.answer_tokens for choice in one.choices)
    with refused(r"unknown set 'sst-2' \(did you mean 'sst2'\?\); known: boolq, cb"):
        benchmarks.load_benchmark("sst-2")


def test_references_of_one_id_are_one_question(tmp_path):
    """Also where they stand apart: in the order in which ids are first met; equal references are all kept."""
    source, cue = published.write("narrative_qa", tmp_path), "\n\nAnswer:"
    assert questions_of("narrative_qa", source, "train") == [
        Question("nq-1", "Who repaired the mill wheel?\n\n", ("Tamsin", "the old woman Tamsin"), MILL, cue),
        Question("nq-2", "What was the wheel mended with?\n\n", ("oak",), MILL, cue),
        Question("nq-3", "Who bought the ferry?\n\n", ("Sela",), FERRY, cue),
        Question("nq-4", "What did the ferry cost?\n\n", ("nine coins", "Nine coins."), FERRY, cue),
    ]
    found = questions_of("qasper", published.write("qasper", tmp_path), "valid")
    answers = {"qa-5": ("two hours",), "qa-6": ("No", "no, it was mild"), "qa-7": ("One line", "One line")}
    assert [(one.id, one.answers) for one in found] == list(answers.items())
    assert found[1].document == published.story("It was mild.")


def test_the_rest_of_scrolls(tmp_path):
    """Options are part of the prompt."""
    terms = ("Entailment", "Contradiction", "Not mentioned")
    answer, summary = "\n\nAnswer:", "\n\nSummary:"
    text, talk = "THIS AGREEMENT is made in March.", "Ana: Hello.\n\nBen: Let us stop."
    why = "Why did Bren leave the station?\n\n (A) He was ill\n (B) He was  recalled\n   by letter\n"
    why += " (C) He lost a bet\n (D) He never left\n\n"
    options = ("He was ill", "He was recalled by letter", "He lost a bet", "He never left")
    letter, copy = published.story("A letter called Bren back."), "The receiver may keep one copy.\n\n"
    report = ("The levee is old.\n\nIt needs work.",), "Background\n\nThe levee is old."
    expected = {
        "quality": Question("ql-7", why, options[1:2], letter, answer, choices=options),
        "contract_nli": Question("cn-12", copy, ("Not mentioned",), text, answer, choices=terms),
        "qmsum": Question("qm-5", "Summarize the meeting.\n\n", ("Ana greeted.\nBen ended it.",), talk, summary),
        "summ_screen_fd": Question("fd-5", "", ("Oda waits for Nils.",), "Nils: Thank you.\n\nOda: I waited.", summary),
        "gov_report": Question("gr-5", "", *report, summary),
    }
    found = {name: questions_of(name, published.write(name, tmp_path), "valid") for name in expected}
    assert {name: asked[0] for name, asked in found.items()} == expected
    other = found["quality"][1]
    assert other.choices == ("Sela (A)", "Ivo", "Both of them", "Nobody") and other.document == FERRY


@pytest.mark.parametrize("name", SHORT)
def test_prompts_are_t5s_and_the_hub_has_the_same_questions(name, tmp_path):
    authors, hub = published.write(name, tmp_path / "authors"), published.write_hub(name, tmp_path / "hub")
    for split in benchmarks.SPLITS:
        found = questions_of(name, authors, split)
        assert found == questions_of(name, hub, split) and len(found) >= 3
    train = questions_of(name, authors, "train")
    typed = published.ROWS[name]["asked"]
    found = [train[row["place"]] for row in typed]
    assert typed and ["|".join([o.prompt, o.document, o.cue, *o.answers]) for o in found] == [r["text"] for r in typed]
    assert name == "record" or {one.choices for one in train} == {benchmarks.load_benchmark(name).choices}


def test_ids_are_the_hubs_numbers(tmp_path):
    """Also where lines were left out, and where one file holds both splits."""
    skipped: Counter[str] = Counter()
    found = questions_of("qqp", published.write("qqp", tmp_path), "train", skipped)
    assert [one.id for one in found] == ["0", "3", "4", "5"] and skipped == {"too few columns": 2}
    source = published.write("mrpc", tmp_path)
    ids = [[one.id for one in questions_of("mrpc", source, split)] for split in benchmarks.SPLITS]
    assert ids == [["0", "2", "4", "6"], ["1", "3", "5"]]
    assert questions_of("mrpc", source / "msr_paraphrase_train.txt", "valid") == questions_of("mrpc", source, "valid")


def test_scores_are_rounded_to_fifths(tmp_path):
    """Halves to the even one."""
    labels = {"0": "0.0", "0.1": "0.0", "1.1": "1.2", "2.5": "2.4", "2.857": "2.8", "3.3": "3.2"}
    labels |= {"3.75": "3.8", "4.7": "4.8", "5.000": "5.0"}
    tsv(tmp_path, "sentence1|sentence2|score", *(f"a|b|{label}" for label in labels))
    assert [one.answers for one in questions_of("stsb", tmp_path, "train")] == [(text,) for text in labels.values()]


def test_answers_of_one_question_are_one_group(tmp_path):
    found = questions_of("multirc", published.write("multirc", tmp_path), "valid")
    answers = {"7-0-0": "True", "7-0-1": "False", "7-0-2": "False", "7-1-0": "True", "8-0-0": "True", "8-0-1": "False"}
    assert [(one.id, one.group, *one.answers) for one in found] == [(i, i[:3], answer) for i, answer in answers.items()]


def test_names_that_fill_a_gap(tmp_path):
    found = questions_of("record", published.write("record", tmp_path), "train")
    three = ("Ada Quill", "Marrow", "Quill")
    assert [(one.id, one.answers, one.choices) for one in found] == [
        ("2-9", ("Sela",), ("Ivo", "Sela")),
        ("3-10", ("Marrow",), three),
        ("3-11", ("Ada Quill", "Quill"), three),
        ("4-12", ("Max",), ("Ula", "Max")),
    ]


def test_highlights_become_sentences(tmp_path):
    for end in ".?!\"'":
        text = f"Ivo left{end}\n@highlight\nIt rained\n@highlight\nSo"
        row = ENTITIES | {"passage": {"text": text, "entities": [{"start": 0, "end": 2}]}}
        [one] = questions_of("record", jsonl(tmp_path, row), "train")
        assert one.document == f" Ivo left{end} It rained. So"


@pytest.mark.parametrize(
    ("text", "noun", "pronoun", "shown"),
    [
        # one span within the other, with one end and with one beginning
        ("Ana saw the son of his", ("the son of his", 2), ("his", 5), "Ana saw * the son of # his # *"),
        ("his son saw Ana", ("his son", 0), ("his", 0), "* # his # son * saw Ana"),
        # behind quotation marks
        ('Ana: "His dog." He sat', ("his dog", 1), ("He", 3), 'Ana: "* His dog *." # He # sat'),
    ],
)
def test_marks_of_spans(text, noun, pronoun, shown, tmp_path):
    row = {"text": text, "target": published.spans(noun, pronoun), "label": False, "idx": 0}
    [one] = questions_of("wsc", jsonl(tmp_path, row), "train")
    assert one.prompt == f"wsc text: {shown} target:" and one.answers == ("False",)


@pytest.mark.parametrize("name", ["qasper", "wic"])
def test_folder_archive_and_file_are_alike(name, tmp_path):
    archive = published.write(name, tmp_path)
    folder = unpacked(archive, tmp_path / "unpacked")
    expected = questions_of(name, archive, "train")
    for source in (folder, folder.parent, folder / "train.jsonl"):
        assert questions_of(name, source, "train") == expected


def test_an_archive_of_many_sets(tmp_path):
    with zipfile.ZipFile(tmp_path / "GLUE.zip", "w") as archive:
        for name in ("rte", "qnli", "qqp"):
            for path in published.write(name, tmp_path).iterdir():
                archive.write(path, f"glue_data/{path.parent.name}/{path.name}")
    assert questions_of("qnli", tmp_path / "GLUE.zip", "valid") == questions_of("qnli", tmp_path / "QNLI", "valid")
    with refused(r"QNLI/train.tsv and .*RTE/train.tsv are each a train file of sst2: name"):
        benchmarks.load_benchmark("sst2").find(tmp_path / "GLUE.zip", "train")


@pytest.fixture
def hub(tmp_path, monkeypatch):
    files = {
        ("nyu-mll/glue", None): published.hub_files("mnli") | published.hub_files("mnli_mismatched"),
        ("aps/super_glue", None): {"super_glue.py": b"a loading script"},
        ("aps/super_glue", "refs/convert/parquet"): published.hub_files("boolq"),
        ("tau/scrolls", None): {"qmsum.zip": published.write("qmsum", tmp_path / "zip").read_bytes()},
    }
    found = FakeHub(tmp_path / "cache", files)
    found.install(monkeypatch)
    return found


@pytest.mark.parametrize(
    ("name", "file"),
    [
        ("qmsum", "qmsum.zip"),
        ("mnli", "mnli/validation_matched-00000-of-00001.parquet"),
        ("mnli_mismatched", "mnli/validation_mismatched-00000-of-00001.parquet"),
        # the data set has but a loading script, of which the hub has made parquet files
        ("boolq", "boolq/validation/0000.parquet"),
    ],
)
def test_the_hub(name, file, hub, tmp_path):
    one, source = benchmarks.load_benchmark(name), published.write(name, tmp_path / "authors")
    found = [question for question, _ in one.questions("valid", one.find(None, "valid"), check_counts=False)]
    assert found == questions_of(name, source, "valid") and hub.downloaded == [file]


def test_the_hub_lacks_a_set(hub):
    with refused("hub:aps/super_glue/wic has no parquet, .*: get its files some other way"):
        benchmarks.load_benchmark("wic").find(None, "train")
    hub.files["nyu-mll/glue", None] = {"rte/other.parquet": b""}
    with refused("hub:nyu-mll/glue/rte has no train file of rte: give what https://.*/RTE.zip"):
        benchmarks.load_benchmark("rte").find(None, "train")
    hub.cache.mkdir()
    with zipfile.ZipFile(hub.cache / "other.zip", "w") as archive:
        archive.writestr("qmsum/readme.txt", "nothing")
    hub.files["my/own", None] = {"qmsum.zip": (hub.cache / "other.zip").read_bytes()}
    with refused("hub:my/own/qmsum.zip has no train file of qmsum: give what https://"):
        benchmarks.load_benchmark("qmsum").find("hub:my/own/qmsum.zip", "train")
    with refused("hub:nonsense.zip is not a file of the hub: use hub:OWNER/NAME/FILE"):
        benchmarks.load_benchmark("qmsum").find("hub:nonsense.zip", "train")


def test_the_hubs_own_library_has_the_errors_that_are_awaited():
    errors = pytest.importorskip("huggingface_hub.errors")
    assert issubclass(errors.EntryNotFoundError, Exception) and issubclass(errors.RevisionNotFoundError, Exception)


def jsonl(folder: Path, *rows: object) -> Path:
    lines = [row if isinstance(row, str) else json.dumps(row) for row in rows]
    (folder / "train.jsonl").write_text("".join(f"{line}\n" for line in lines))
    return folder


def tsv(folder: Path, *rows: str) -> Path:
    (folder / "train.tsv").write_text("".join(row.replace("|", "\t") + "\n" for row in rows))
    return folder


def test_other_splits_are_refused():
    one = benchmarks.load_benchmark("cola")
    with refused("cola test has no labels that are public, so .*: use train or valid"):
        one.find(None, "test")
    with refused("cola has no split 'dev': use train or valid"):
        list(one.questions("dev", []))


@pytest.mark.parametrize("name", benchmarks.benchmark_names())
def test_files_without_labels_are_refused(name, tmp_path):
    """The test split under the name of the training split, from the authors and from the hub."""
    sources = [published.write(name, tmp_path / "authors")]
    if sources[0].suffix == ".zip":
        sources = [unpacked(sources[0], tmp_path / "unpacked")]
    if name in SHORT:
        sources.append(published.write_hub(name, tmp_path / "hub"))
    for source in sources:
        files = [path for path in source.rglob("*") if path.is_file()]
        [test, *_] = [path for path in files if path.name.startswith("test") or path.parent.name == "test"]
        for train in [path for path in files if "train" in str(path.relative_to(source))]:
            train.write_bytes(test.read_bytes())
        if name == "mrpc" and test.suffix == ".tsv":
            test.rename(source / "train.tsv")
        words = f"(line|row) [12]: {name} train has no label here, so it cannot be scored: give files with labels"
        with refused("columns instead" if (name, test.suffix) == ("cola", ".tsv") else words):
            questions_of(name, source, "train")


GOOD = {"id": "a", "input": "Q?\n\nText.", "output": "Yes"}
OPTIONS = "Q?\n\n (A) a\n (B) b\n (C) c\n (D) d\n\nText."
YES_NO = {"passage": "p", "question": "q", "label": True, "idx": 0}
CAUSE = {"premise": "p", "choice1": "a", "choice2": "b", "question": "cause", "label": 0}
RATED = [{"question": "Q?", "idx": 0, "answers": [{"text": "x", "idx": 0, "label": 1}]}]
NESTED = {"idx": 0, "passage": {"text": "T.", "questions": RATED}}
ENTITIES = {
    "idx": 0,
    "passage": {"text": "Ivo left.", "entities": [{"start": 0, "end": 2}]},
    "qas": [{"idx": 0, "query": "@placeholder", "answers": [{"start": 0, "end": 2, "text": "Ivo"}]}],
}
MARKED = {"text": "He left.", "target": published.spans(("He", 0), ("left", 1)), "label": True}
FIRST: dict[str, dict[str, Any]] = {
    "qasper": {**GOOD, "pid": "a_0"},
    "contract_nli": {**GOOD, "id": "0", "output": "Entailment"},
    "quality": {"id": "a", "input": OPTIONS, "output": "b"},
    **{"boolq": YES_NO, "copa": CAUSE, "multirc": NESTED, "record": ENTITIES, "wsc": MARKED},
}


def entities(text: str, *places: tuple[int, int]) -> dict[str, Any]:
    return {"passage": {"text": text, "entities": [{"start": begin, "end": end} for begin, end in places]}}


@pytest.mark.parametrize(
    ("name", "change", "words"),
    [
        ("qasper", "{", "is not a JSON object"),
        ("qasper", '{"input": "x", "output": "y"}', "the row lacks id"),
        ("qasper", {"input": 5}, "input of the row must be text, not 5"),
        ("qasper", {"pid": "b", "id": "b", "input": "no break"}, "has an input without an empty line"),
        ("qasper", {}, "pid 'a_0' was there before: correct it or get the file again"),
        ("qasper", {"pid": "b", "input": "Q?\n\nOther."}, "id 'a' has another input than in a row before"),
        ("qasper", {"pid": "b", "id": "b", "output": " "}, "question 'b' has an empty answer"),
        ("qasper", {"pid": "b", "output": "\ud800"}, "output of the row must be text without half"),
        ("contract_nli", {"id": "a", "output": "NotMentioned"}, "answer 'NotMentioned' of 'a' is none of its choices"),
        ("quality", {"id": "b", "input": "Q?\n\nText."}, "has an input without options .A. to .D."),
        ("quality", {"id": "b", "output": "B"}, "answer 'B' of 'b' is none of its choices"),
        ("boolq", {"label": "yes", "idx": 1}, "has a label that is none of False"),
        ("boolq", {"label": 2, "idx": 1}, "has a label that is none of False"),
        ("boolq", '{"passage": "p", "label": true, "idx": 1}', "has no text in 'question'"),
        ("boolq", {"passage": "\ud800", "idx": 1}, "has no text in 'passage'"),
        ("boolq", {}, "id '0' was there before"),
        ("copa", {"question": "why"}, "neither cause nor"),
        ("multirc", {"passage": {"text": "T."}}, "passage of the row lacks questions"),
        ("multirc", {}, "id '0-0-0' was there before"),
        ("record", entities("I", (0, 1)), "has an entity out"),
        ("record", {"idx": 1, **entities("Max Ivo", (0, 2))}, "answer 'Ivo' of '1-0' is none of"),
        ("record", entities("Ivo"), "has a passage without entities"),
        ("wsc", {"target": {"span1_text": "He"}}, "the row lacks span1_index"),
        ("wsc", {"target": published.spans(("He", 2), ("left", 1))}, "a span at word 2 of a text of 2 words"),
    ],
)
def test_bad_rows(name, change, words, tmp_path):
    row = change if isinstance(change, str) else {**FIRST[name], **change}
    with refused(f"train.jsonl line 2.*{words}"):
        questions_of(name, jsonl(tmp_path, FIRST[name], row), "train")


RTE = "index|sentence1|sentence2|label"


@pytest.mark.parametrize(
    ("name", "rows", "words"),
    [
        ("rte", ["index|sentence1|label", "0|a|entailment"], "line 1 has no column 'sentence2' but index, sentence1"),
        ("rte", [RTE, "0|a|b"], "line 2 has 3 columns instead of 4"),
        ("rte", [RTE, "0|a|b|entailment", "1|a|b|"], "line 3: rte train has no label here"),
        ("rte", [RTE, "0|a|b|entailment", "1|a|b|-1"], "line 3: rte train has no label here"),
        ("rte", [RTE, "0|a|b|None"], "line 2 has a label that is none of entailment"),
        ("cola", ["zz|1||fine", "zz|2||fine"], "line 2 has a label that is none of unacceptable, acceptable"),
        ("cola", ["zz|1"], "line 1 has 2 columns instead of 4"),
        ("stsb", ["sentence1|sentence2|score", "a|b|5.5"], "line 2 has a label that is no number from 0 to 5"),
        ("stsb", ["sentence1|sentence2|score", "a|b|much"], "line 2 has a label that is no number from 0 to 5"),
    ],
)
def test_bad_lines(name, rows, words, tmp_path):
    with refused(f"train.tsv {words}"):
        questions_of(name, tsv(tmp_path, *rows), "train")


def test_odd_bytes(tmp_path):
    """A byte-order mark, line ends of Windows, other characters that split lines in Python, and no UTF-8."""
    path, head = tmp_path / "train.tsv", b"\xef\xbb\xbfsentence\tlabel\r\n"
    path.write_bytes(head + "a\u2028b\x85c\rd\t1\r\n\r\n".encode() + b"e\t0\r\n")
    one, other = questions_of("sst2", tmp_path, "train")
    assert one.prompt == "sst2 sentence: a\u2028b\x85c\rd target:" and (other.id, other.answers) == ("1", ("negative",))
    path.write_bytes(head + b"caf\xe9\t1\r\n")
    with refused("train.tsv line 2 is not UTF-8: convert the file"):
        questions_of("sst2", tmp_path, "train")


def test_damaged_and_missing_files(tmp_path):
    (tmp_path / "train-0.parquet").write_bytes(b"PAR1 no more")
    with refused("train-0.parquet is cut short or damaged"):
        questions_of("sst2", tmp_path, "train")
    (tmp_path / "wic.zip").write_bytes(b"PK")
    with refused("wic.zip is cut short or damaged"):
        benchmarks.load_benchmark("wic").find(tmp_path, "train")
    with refused(r"no/where does not exist: name the folder or zip archive of wic"):
        benchmarks.load_benchmark("wic").find("no/where", "train")
    with refused(
        r"no valid file of mnli \(dev_matched.tsv or validation_matched-\*.parquet or .*\): get it from https"
    ):
        benchmarks.load_benchmark("mnli").find(tmp_path, "valid")
    with refused(r"WiC.zip has no train file of rte \(train.tsv or"):
        benchmarks.load_benchmark("rte").find(published.write("wic", tmp_path), "train")
    place = published.write("mrpc", tmp_path)
    (place / "mrpc_dev_ids.tsv").write_text("1\n")
    with refused("mrpc_dev_ids.tsv line 1 is no pair of numbers"):
        questions_of("mrpc", place, "train")
    (place / "mrpc_dev_ids.tsv").unlink()
    with refused("msr_paraphrase_train.txt lacks mrpc_dev_ids.tsv beside it"):
        benchmarks.load_benchmark("mrpc").find(place, "train")


@pytest.mark.parametrize(("name", "count"), [("narrative_qa", 6), ("multirc", 5)])
def test_the_number_of_examples_is_checked(name, count, tmp_path):
    """Of SCROLLS the rows, not the questions."""
    one, source = benchmarks.load_benchmark(name), published.write(name, tmp_path)
    with refused(f"{name} train has {count} examples instead of the published {one.counts['train']}: get a whole copy"):
        list(one.questions("train", one.find(source, "train")))
