"""Known sets: what is asked out of each, in the formats of the authors and of the hub, and what is refused."""

from __future__ import annotations

import json
import sys
import types
import zipfile
from collections import Counter
from pathlib import Path
from typing import Any

import published
import pytest

from fairseq_rpe.core import UserError
from fairseq_rpe.questions import known
from fairseq_rpe.questions.question import Question

SCROLLS = ["contract_nli", "gov_report", "narrative_qa", "qasper", "qmsum", "quality", "summ_screen_fd"]
GLUE = ["cola", "mnli", "mnli_mismatched", "mrpc", "qnli", "qqp", "rte", "sst2", "stsb", "wnli"]
SUPERGLUE = ["boolq", "cb", "copa", "multirc", "record", "superglue_rte", "wic", "wsc"]
MILL, FERRY = published.MILL, published.FERRY
FALSE_TRUE = ("False", "True")


def asked(name: str, source: Path, split: str, skipped: Counter[str] | None = None) -> list[Question]:
    found = known.load(name)
    return [one for one, _ in found.questions(split, found.find(source, split), check_counts=False, skipped=skipped)]


def of_archive(path: Path, folder: Path) -> Path:
    with zipfile.ZipFile(path) as archive:
        archive.extractall(folder)
    return folder / path.stem


def test_names():
    assert known.names() == sorted([*SCROLLS, *GLUE, *SUPERGLUE])
    assert {name: known.load(name).suite for name in known.names()} == {
        **dict.fromkeys(SCROLLS, "scrolls"),
        **dict.fromkeys(GLUE, "glue"),
        **dict.fromkeys(SUPERGLUE, "superglue"),
    }
    with pytest.raises(UserError, match=r"unknown set 'sst-2' \(did you mean 'sst2'\?\); known: boolq, cb"):
        known.load("sst-2")


@pytest.mark.parametrize("name", [*SCROLLS, *GLUE, *SUPERGLUE])
def test_what_a_set_says_of_itself(name):
    one = known.load(name)
    assert (
        one.reader in known._READERS and set(one.counts) == set(known.SPLITS) and one.places.home.startswith("https://")
    )
    metrics = {"f1", "em", "rouge1", "rouge2", "rougeL", "rgm", "accuracy", "matthews", "pearson", "spearman"}
    assert {*one.metrics, one.published} <= {*metrics, "binary_f1", "macro_f1", "f1a", "group_em"}
    assert one.published in one.metrics or name == "cola"
    # a class is never cut, be it spelled letter by letter
    assert all(len(choice) < one.answer_tokens for choice in one.choices)


def test_published_counts():
    """As the papers and the hub have them; of SCROLLS the rows, of MultiRC the answers, of ReCoRD the queries."""
    counts = {name: (one.counts["train"], one.counts["valid"]) for name in known.names() if (one := known.load(name))}
    assert counts == {
        "qasper": (2567, 1726),
        "narrative_qa": (55003, 5878),
        "quality": (2523, 2086),
        "contract_nli": (7191, 1037),
        "qmsum": (1257, 272),
        "summ_screen_fd": (3673, 338),
        "gov_report": (17457, 972),
        "cola": (8551, 1043),
        "sst2": (67349, 872),
        "mrpc": (3668, 408),
        "qqp": (363846, 40430),
        "stsb": (5749, 1500),
        "mnli": (392702, 9815),
        "mnli_mismatched": (392702, 9832),
        "qnli": (104743, 5463),
        "rte": (2490, 277),
        "wnli": (635, 71),
        "boolq": (9427, 3270),
        "cb": (250, 56),
        "copa": (400, 100),
        "multirc": (27243, 4848),
        "record": (100730, 10000),
        "superglue_rte": (2490, 277),
        "wic": (5428, 638),
        "wsc": (554, 104),
    }


def test_what_fire_prints():
    printed = {name: known.load(name).published for name in known.names()}
    others = {
        **dict.fromkeys(["qasper", "narrative_qa"], "f1"),
        **dict.fromkeys(["contract_nli", "quality", "record"], "em"),
        **dict.fromkeys(["qmsum", "summ_screen_fd", "gov_report"], "rgm"),
        "multirc": "group_em",
        "stsb": "spearman",
    }
    assert printed == {name: others.get(name, "accuracy") for name in known.names()}


# SCROLLS


def test_references_of_one_id_are_one_question(tmp_path):
    source = published.write("narrative_qa", tmp_path)
    assert asked("narrative_qa", source, "train") == [
        Question("nq-1", "Who repaired the mill wheel?\n\n", ("Tamsin", "the old woman Tamsin"), MILL, "\n\nAnswer:"),
        Question("nq-2", "What was the wheel mended with?\n\n", ("oak",), MILL, "\n\nAnswer:"),
        Question("nq-3", "Who bought the ferry?\n\n", ("Sela",), FERRY, "\n\nAnswer:"),
        Question("nq-4", "What did the ferry cost?\n\n", ("nine coins", "Nine coins."), FERRY, "\n\nAnswer:"),
    ]
    assert asked("narrative_qa", source, "valid")[0] == Question(
        "nq-7",
        "Who repaired the mill wheel?\n\n",
        ("Tamsin", "Old Tamsin"),
        "The river rose in March. Old Tamsin mended the wheel.",
        "\n\nAnswer:",
    )


def test_references_that_stand_apart(tmp_path):
    """In the order in which ids are first met; equal references are all kept."""
    found = asked("qasper", published.write("qasper", tmp_path), "valid")
    assert [(one.id, one.answers) for one in found] == [
        ("qa-5", ("two hours",)),
        ("qa-6", ("No", "no, it was mild")),
        ("qa-7", ("One line", "One line")),
    ]
    assert found[1].document == published.story("It was mild.")


def test_options_are_part_of_the_prompt(tmp_path):
    source = published.write("quality", tmp_path)
    one, other, _ = asked("quality", source, "valid")
    assert one == Question(
        "ql-7",
        "Why did Bren leave the station?\n\n"
        " (A) He was ill\n (B) He was  recalled\n   by letter\n (C) He lost a bet\n (D) He never left\n\n",
        ("He was recalled by letter",),
        published.story("A letter called Bren back."),
        "\n\nAnswer:",
        choices=("He was ill", "He was recalled by letter", "He lost a bet", "He never left"),
    )
    assert other.choices == ("Sela (A)", "Ivo", "Both of them", "Nobody") and other.document == FERRY


def test_the_rest_of_scrolls(tmp_path):
    def first(name: str) -> Question:
        return asked(name, published.write(name, tmp_path), "valid")[0]

    terms = ("Entailment", "Contradiction", "Not mentioned")
    assert first("contract_nli") == Question(
        "cn-12",
        "The receiver may keep one copy.\n\n",
        ("Not mentioned",),
        "THIS AGREEMENT is made in March.",
        "\n\nAnswer:",
        choices=terms,
    )
    talk = "Ana: Hello.\n\nBen: Let us stop."
    assert first("qmsum") == Question(
        "qm-5", "Summarize the meeting.\n\n", ("Ana greeted.\nBen ended it.",), talk, "\n\nSummary:"
    )
    scene = "Nils: Thank you.\n\nOda: I waited."
    assert first("summ_screen_fd") == Question("fd-5", "", ("Oda waits for Nils.",), scene, "\n\nSummary:")
    report, summary = "Background\n\nThe levee is old.", "The levee is old.\n\nIt needs work."
    assert first("gov_report") == Question("gr-5", "", (summary,), report, "\n\nSummary:")


# GLUE and SuperGLUE: prompt, document, cue and answer of one example each, typed by hand after T5's templates


RYE = " Rye -- Rye is a grain. It is sown in autumn."
WRITTEN = {
    ("cola", 0): ("cola sentence: The kite the boy flew it was red. target:", "", "", "unacceptable"),
    ("cola", 1): ('cola sentence: She said "no to him. target:', "", "", "acceptable"),
    ("sst2", 0): ("sst2 sentence: a warm and clumsy little film  target:", "", "", "positive"),
    ("sst2", 2): ('sst2 sentence: " bold " it is not  target:', "", "", "negative"),
    ("sst2", 3): ("sst2 sentence: café scenes of rare charm  target:", "", "", "positive"),
    ("mrpc", 1): ('mrpc sentence1: He said "never. sentence2: He said nothing. target:', *("", "", "not_equivalent")),
    ("qqp", 1): ('qqp question1: What is "oak? question2: Where is oak? target:', "", "", "not_duplicate"),
    ("stsb", 1): ("stsb sentence1: A dog runs. sentence2: A dog sleeps. target:", "", "", "2.4"),
    ("mnli", 0): (
        "mnli hypothesis: The comet was seen by many. premise:",
        *(" Nobody saw the comet.", " target:", "contradiction"),
    ),
    ("mnli", 3): ("mnli hypothesis: He can read. premise:", ' He read "Dusk.', " target:", "entailment"),
    ("mnli_mismatched", 2): ("mnli hypothesis: Ivo was glad. premise:", " Ivo sold the boat.", " target:", "neutral"),
    ("qnli", 1): ("qnli question: When did it rain? sentence:", " The fields were wide.", " target:", "not_entailment"),
    ("rte", 0): (
        "rte sentence1:",
        *(" The ferry to Ostrel was cancelled on Friday.", " sentence2: No ferry went to Ostrel on Friday. target:"),
        "entailment",
    ),
    ("wnli", 0): (
        "wnli sentence1:",
        *(" The lid fits the pot since it is wide.", " sentence2: The pot is wide. target:", "not_entailment"),
    ),
    ("boolq", 0): ("boolq passage:", RYE, " question: is rye a grain target:", "True"),
    ("cb", 1): (
        "cb hypothesis: he sold it premise:",
        *(" I do not think that he sold it.", " target:", "contradiction"),
    ),
    ("copa", 0): (
        "copa choice1: The fuse blew. choice2: The lamp was new. premise: The lamp went dark. question: cause target:",
        *("", "", "choice1"),
    ),
    ("superglue_rte", 0): (
        "rte hypothesis: No ferry went. premise:",
        *(" The ferry was cancelled.", " target:", "entailment"),
    ),
    ("multirc", 1): (
        "multirc question: Who ate? answer: Ula paragraph:",
        *(" Sent 1: Ula baked rye. Sent 2: Max ate it.", " target:", "False"),
    ),
    ("record", 0): (
        "record query: @placeholder no longer owns a boat entities: Ivo, Sela passage:",
        *(" Ivo met Sela at the quay. Sela sold the boat", " target:", "Sela"),
    ),
    ("record", 1): (
        "record query: In @placeholder she is known entities: Ada Quill, Marrow, Quill passage:",
        *(" Ada Quill of Marrow spoke. Quill was glad", " target:", "Marrow"),
    ),
    ("wic", 1): (
        "wic sentence1: The bank was wet. sentence2: The bank lent him coins. word: bank target:",
        *("", "", "False"),
    ),
    ("wsc", 0): ("wsc text: Nils thanked * Oda * because # she # had waited. target:", "", "", "True"),
    ("wsc", 2): ("wsc text: When # he # had paid, * the old man * left. target:", "", "", "True"),
    ("wsc", 3): ("wsc text: Ivo, and with him Sela, left; # they # sang. target:", "", "", "True"),
}


@pytest.mark.parametrize("name", [*GLUE, *SUPERGLUE])
def test_prompts_in_the_authors_format(name, tmp_path):
    train = asked(name, published.write(name, tmp_path), "train")
    typed = {place: text for (here, place), text in WRITTEN.items() if here == name}
    assert typed
    for place, text in typed.items():
        one = train[place]
        assert (one.prompt, one.document, one.cue, *one.answers) == text
    choices = known.load(name).choices
    assert name == "record" or {one.choices for one in train} == {choices}


@pytest.mark.parametrize("name", [*GLUE, *SUPERGLUE])
@pytest.mark.parametrize("split", ["train", "valid"])
def test_the_hub_has_the_same_questions(name, split, tmp_path):
    authors = asked(name, published.write(name, tmp_path / "authors"), split)
    assert authors == asked(name, published.write_hub(name, tmp_path / "hub"), split) and len(authors) >= 3


def test_ids_are_the_hubs_numbers(tmp_path):
    """Also where lines were left out, and where one file holds both splits."""
    skipped: Counter[str] = Counter()
    found = asked("qqp", published.write("qqp", tmp_path), "train", skipped)
    assert [one.id for one in found] == ["0", "3", "4", "5"] and skipped == {"too few columns": 2}
    source = published.write("mrpc", tmp_path)
    assert [[one.id for one in asked("mrpc", source, split)] for split in known.SPLITS] == [
        ["0", "2", "4", "6"],
        ["1", "3", "5"],
    ]
    assert asked("mrpc", source / "msr_paraphrase_train.txt", "valid") == asked("mrpc", source, "valid")


def test_scores_are_rounded_to_fifths(tmp_path):
    """Halves to the even one."""
    labels = {"0": "0.0", "0.1": "0.0", "1.1": "1.2", "2.5": "2.4", "2.857": "2.8", "3.3": "3.2"}
    labels |= {"3.75": "3.8", "4.7": "4.8", "5.000": "5.0"}
    rows = [f"a\tb\t{label}\n" for label in labels]
    (tmp_path / "train.tsv").write_text("sentence1\tsentence2\tscore\n" + "".join(rows))
    assert [one.answers for one in asked("stsb", tmp_path, "train")] == [(text,) for text in labels.values()]


def test_answers_of_one_question_are_one_group(tmp_path):
    found = asked("multirc", published.write("multirc", tmp_path), "valid")
    assert [(one.id, one.group, *one.answers) for one in found] == [
        ("7-0-0", "7-0", "True"),
        ("7-0-1", "7-0", "False"),
        ("7-0-2", "7-0", "False"),
        ("7-1-0", "7-1", "True"),
        ("8-0-0", "8-0", "True"),
        ("8-0-1", "8-0", "False"),
    ]


def test_names_that_fill_a_gap(tmp_path):
    found = asked("record", published.write("record", tmp_path), "train")
    assert [(one.id, one.answers, one.choices) for one in found] == [
        ("2-9", ("Sela",), ("Ivo", "Sela")),
        ("3-10", ("Marrow",), ("Ada Quill", "Marrow", "Quill")),
        ("3-11", ("Ada Quill", "Quill"), ("Ada Quill", "Marrow", "Quill")),
        ("4-12", ("Max",), ("Ula", "Max")),
    ]


@pytest.mark.parametrize("end", list(".?!\"'"))
def test_highlights_become_sentences(end, tmp_path):
    row = {
        "idx": 0,
        "passage": {
            "text": f"Ivo left{end}\n@highlight\nIt rained\n@highlight\nSo",
            "entities": [{"start": 0, "end": 2}],
        },
        "qas": [{"idx": 0, "query": "@placeholder left", "answers": [{"start": 0, "end": 2, "text": "Ivo"}]}],
    }
    [one] = asked("record", jsonl(tmp_path, row), "train")
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
    row = {"text": text, "target": published._spans(noun, pronoun), "label": False, "idx": 0}
    [one] = asked("wsc", jsonl(tmp_path, row), "train")
    assert one.prompt == f"wsc text: {shown} target:" and one.answers == ("False",)


# Where the files are


def test_one_folder_has_many_sets(tmp_path):
    """Folders and archives, those of GLUE and SuperGLUE under the same name."""
    for name in known.names():
        published.write(name, tmp_path)
    for name in known.names():
        assert len(asked(name, tmp_path, "valid")) >= 3, name


@pytest.mark.parametrize("name", ["qasper", "wic"])
def test_folder_archive_and_file_are_alike(name, tmp_path):
    archive = published.write(name, tmp_path)
    unpacked = of_archive(archive, tmp_path / "unpacked")
    expected = asked(name, archive, "train")
    assert asked(name, unpacked, "train") == asked(name, unpacked.parent, "train") == expected
    assert asked(name, unpacked / "train.jsonl", "train") == expected


def test_an_archive_of_many_sets(tmp_path):
    with zipfile.ZipFile(tmp_path / "GLUE.zip", "w") as archive:
        for name in ("rte", "qnli", "qqp"):
            for path in published.write(name, tmp_path).iterdir():
                archive.write(path, f"glue_data/{path.parent.name}/{path.name}")
    assert asked("qnli", tmp_path / "GLUE.zip", "valid") == asked("qnli", tmp_path / "QNLI", "valid")
    with pytest.raises(
        UserError,
        match=r"QNLI/train.tsv and .* and .*RTE/train.tsv are each a train file of sst2: name the folder of one",
    ):
        known.load("sst2").find(tmp_path / "GLUE.zip", "train")


class FakeHub(types.ModuleType):
    """Stands for the hub's library; ``files`` by data set and branch."""

    def __init__(self, files: dict[tuple[str, str | None], dict[str, bytes]], cache: Path) -> None:
        super().__init__("huggingface_hub")
        self.files, self.cache, self.asked = files, cache, []
        self.errors = types.ModuleType("huggingface_hub.errors")
        kinds = ("GatedRepoError", "RepositoryNotFoundError", "EntryNotFoundError", "RevisionNotFoundError")
        for kind in kinds:
            setattr(self.errors, kind, type(kind, (Exception,), {}))

    def HfApi(self) -> FakeHub:
        return self

    def repo_info(self, name: str, repo_type: str, expand: Any, revision: str | None = None) -> Any:
        if (name, revision) not in self.files:
            raise self.errors.RevisionNotFoundError("404")
        return types.SimpleNamespace(sha=f"sha of {revision}")

    def list_repo_tree(self, name: str, folder: str | None, recursive: bool, revision: str, repo_type: str) -> Any:
        [paths] = [
            files for (one, branch), files in self.files.items() if (one, f"sha of {branch}") == (name, revision)
        ]
        found = [path for path in paths if path.startswith(f"{folder}/")]
        if not found:
            raise self.errors.EntryNotFoundError("404")
        yield from (types.SimpleNamespace(path=path, size=1) for path in found)

    def hf_hub_download(self, name: str, path: str, repo_type: str, revision: str | None) -> str:
        self.asked.append(path)
        [content] = [files[path] for (one, _), files in self.files.items() if one == name and path in files]
        (self.cache / path).parent.mkdir(parents=True, exist_ok=True)
        (self.cache / path).write_bytes(content)
        return str(self.cache / path)


@pytest.fixture
def hub(tmp_path, monkeypatch):
    converted = "refs/convert/parquet"
    found = FakeHub({}, tmp_path / "cache")
    found.files["nyu-mll/glue", None] = published.hub_files("mnli") | published.hub_files("mnli_mismatched")
    found.files["aps/super_glue", None] = {"super_glue.py": b"a loading script"}
    found.files["aps/super_glue", converted] = published.hub_files("boolq")
    found.files["tau/scrolls", None] = {"qmsum.zip": published.write("qmsum", tmp_path / "zip").read_bytes()}
    monkeypatch.setitem(sys.modules, "huggingface_hub", found)
    monkeypatch.setitem(sys.modules, "huggingface_hub.errors", found.errors)
    return found


@pytest.mark.parametrize(
    ("name", "files"),
    [
        ("qmsum", ["qmsum.zip"]),
        ("mnli", ["mnli/validation_matched-00000-of-00001.parquet"]),
        ("mnli_mismatched", ["mnli/validation_mismatched-00000-of-00001.parquet"]),
        # the data set has but a loading script, of which the hub has made parquet files
        ("boolq", ["boolq/validation/0000.parquet"]),
    ],
)
def test_the_hub(name, files, hub, tmp_path):
    expected = asked(name, published.write(name, tmp_path / "authors"), "valid")
    one = known.load(name)
    found = one.find(None, "valid")
    assert [
        question for question, _ in one.questions("valid", found, check_counts=False)
    ] == expected and hub.asked == files


def test_the_hub_lacks_a_set(hub):
    remedy = "get its files some other way and give their folder instead"
    with pytest.raises(UserError, match=f"hub:aps/super_glue/wic has no parquet, .*: {remedy}"):
        known.load("wic").find(None, "train")
    hub.files["nyu-mll/glue", None] = {"rte/other.parquet": b""}
    with pytest.raises(
        UserError, match="hub:nyu-mll/glue/rte has no train file of rte: give what https://.*/RTE.zip has"
    ):
        known.load("rte").find(None, "train")
    hub.files["my/own", None] = {"qmsum.zip": of_nothing(hub).read_bytes()}
    with pytest.raises(UserError, match="hub:my/own/qmsum.zip has no train file of qmsum: give what https://"):
        known.load("qmsum").find("hub:my/own/qmsum.zip", "train")
    with pytest.raises(UserError, match="hub:nonsense.zip is not a file of the hub: use hub:OWNER/NAME/FILE"):
        known.load("qmsum").find("hub:nonsense.zip", "train")


def of_nothing(hub: FakeHub) -> Path:
    """An archive without any file of a set."""
    hub.cache.mkdir(exist_ok=True)
    with zipfile.ZipFile(hub.cache / "other.zip", "w") as archive:
        archive.writestr("qmsum/readme.txt", "nothing")
    return hub.cache / "other.zip"


def test_the_hubs_own_library_has_the_errors_that_are_awaited():
    errors = pytest.importorskip("huggingface_hub.errors")
    assert issubclass(errors.EntryNotFoundError, Exception) and issubclass(errors.RevisionNotFoundError, Exception)


# What is refused


def jsonl(folder: Path, *rows: object) -> Path:
    lines = [row if isinstance(row, str) else json.dumps(row) for row in rows]
    (folder / "train.jsonl").write_text("".join(f"{line}\n" for line in lines))
    return folder


def tsv(folder: Path, *rows: str) -> Path:
    (folder / "train.tsv").write_text("".join(row.replace("|", "\t") + "\n" for row in rows))
    return folder


@pytest.mark.parametrize("name", [*SCROLLS, *GLUE, *SUPERGLUE])
def test_test_splits_are_refused(name, tmp_path):
    one = known.load(name)
    with pytest.raises(
        UserError, match=f"{name} test has no labels that are public, so it cannot be scored: use train"
    ):
        one.find(None, "test")
    with pytest.raises(UserError, match=f"{name} has no split 'dev': use train or valid"):
        list(one.questions("dev", []))


@pytest.mark.parametrize("name", [*SCROLLS, *GLUE, *SUPERGLUE])
def test_files_without_labels_are_refused(name, tmp_path):
    """The test split under the name of the training split, from the authors and from the hub."""
    sources = [published.write(name, tmp_path / "authors")]
    if sources[0].suffix == ".zip":
        sources = [of_archive(sources[0], tmp_path / "unpacked")]
    if name not in SCROLLS:
        sources.append(published.write_hub(name, tmp_path / "hub"))
    for source in sources:
        files = [path for path in source.rglob("*") if path.is_file()]
        [test, *_] = [path for path in files if path.name.startswith("test") or path.parent.name == "test"]
        trains = [path for path in files if "train" in str(path.relative_to(source))]
        for train in trains:
            train.write_bytes(test.read_bytes())
        if name == "mrpc" and test.suffix == ".tsv":
            test.rename(source / "train.tsv")
        match = f"(line|row) [12]: {name} train has no label here, so it cannot be scored: give files with labels"
        with pytest.raises(UserError, match="columns instead" if (name, test.suffix) == ("cola", ".tsv") else match):
            asked(name, source, "train")


@pytest.mark.parametrize("label", ["", "-1", None])
def test_one_row_without_a_label(label, tmp_path):
    rows = "index|sentence1|sentence2|label", "0|a|b|entailment", f"1|a|b|{label}"
    words = "train.tsv line 3: rte train has no label here" if label is not None else "line 3 has a label that is none"
    with pytest.raises(UserError, match=words):
        asked("rte", tsv(tmp_path, *rows), "train")


GOOD = {"id": "a", "input": "Q?\n\nText.", "output": "Yes"}
OPTIONS = "Q?\n\n (A) a\n (B) b\n (C) c\n (D) d\n\nText."
NESTED = {
    "idx": 0,
    "passage": {
        "text": "T.",
        "questions": [{"question": "Q?", "idx": 0, "answers": [{"text": "x", "idx": 0, "label": 1}]}],
    },
}
ENTITIES = {
    "idx": 0,
    "passage": {"text": "Ivo left.", "entities": [{"start": 0, "end": 2}]},
    "qas": [{"idx": 0, "query": "@placeholder", "answers": [{"start": 0, "end": 2, "text": "Ivo"}]}],
}
MARKED = {"text": "He left.", "target": published._spans(("He", 0), ("left", 1)), "label": True}


@pytest.mark.parametrize(
    ("name", "row", "words"),
    [
        ("qasper", "{", "line 2 is not a JSON object"),
        ("qasper", "[]", "line 2 is not a JSON object (it is a list)"),
        ("qasper", {"input": "x", "output": "y"}, "line 2: the row lacks id"),
        ("qasper", {**GOOD, "input": 5}, "line 2: input of the row must be text, not 5"),
        ("qasper", {**GOOD, "id": "b", "input": "no break"}, "line 2 has an input without an empty line"),
        ("qasper", {**GOOD, "pid": "a_0"}, "line 2: pid 'a_0' was there before: correct it or get the file again"),
        ("qasper", {**GOOD, "input": "Q?\n\nOther."}, "line 2: id 'a' has another input than in a row before: correct"),
        ("qasper", {**GOOD, "id": "b", "output": " "}, "line 2: question 'b' has an empty answer"),
        ("qasper", {**GOOD, "id": "b", "output": "\ud800"}, "line 2: output of the row must be text without half"),
        ("contract_nli", {**GOOD, "output": "NotMentioned"}, "answer 'NotMentioned' of 'a' is none of its choices"),
        ("quality", {**GOOD, "id": "b"}, "line 2 has an input without options (A) to (D)"),
        ("quality", {"id": "b", "input": OPTIONS, "output": "B"}, "line 2: answer 'B' of 'b' is none of its choices"),
        (
            "boolq",
            {"passage": "p", "question": "q", "label": "yes", "idx": 1},
            "line 2 has a label that is none of False",
        ),
        ("boolq", {"passage": "p", "question": "q", "label": 2, "idx": 1}, "line 2 has a label that is none of False"),
        ("boolq", {"passage": "p", "label": True, "idx": 1}, "line 2 has no text in 'question'"),
        ("boolq", {"passage": "\ud800", "question": "q", "label": True, "idx": 1}, "line 2 has no text in 'passage'"),
        ("boolq", {"passage": "p", "question": "q", "label": True, "idx": 0}, "line 2: id '0' was there before"),
        ("copa", {"premise": "p", "choice1": "a", "choice2": "b", "question": "why", "label": 0}, "neither cause nor"),
        ("multirc", {**NESTED, "passage": {"text": "T."}}, "line 2: passage of the row lacks questions"),
        ("multirc", NESTED, "line 2: id '0-0-0' was there before"),
        (
            "record",
            ENTITIES | {"passage": {"text": "I", "entities": [{"start": 0, "end": 1}]}},
            "line 2 has an entity out",
        ),
        (
            "record",
            {**ENTITIES, "idx": 1, "passage": {"text": "Max Ivo", "entities": [{"start": 0, "end": 2}]}},
            "answer 'Ivo' of '1-0' is none of",
        ),
        ("record", {**ENTITIES, "passage": {"text": "Ivo", "entities": []}}, "line 2 has a passage without entities"),
        ("wsc", {**MARKED, "target": {"span1_text": "He"}}, "line 2: the row lacks span1_index"),
        (
            "wsc",
            {**MARKED, "target": published._spans(("He", 2), ("left", 1))},
            "a span at word 2 of a text of 2 words",
        ),
    ],
)
def test_bad_rows(name, row, words, tmp_path):
    first: dict[str, Any] = {"passage": "p", "question": "q", "label": True, "idx": 0}
    first = {
        "qasper": {**GOOD, "pid": "a_0"},
        "contract_nli": {**GOOD, "id": "0", "output": "Entailment"},
        "quality": {"id": "a", "input": OPTIONS, "output": "b"},
        "boolq": first,
        "copa": {"premise": "p", "choice1": "a", "choice2": "b", "question": "cause", "label": 0},
        "multirc": NESTED,
        "record": ENTITIES,
        "wsc": MARKED,
    }[name]
    with pytest.raises(UserError) as caught:
        asked(name, jsonl(tmp_path, first, row), "train")
    assert words in str(caught.value) and "train.jsonl line 2" in str(caught.value)


@pytest.mark.parametrize(
    ("name", "rows", "words"),
    [
        (
            "rte",
            ["index|sentence1|label", "0|a|entailment"],
            "line 1 has no column 'sentence2' but index, sentence1, label",
        ),
        ("rte", ["index|sentence1|sentence2|label", "0|a|b"], "line 2 has 3 columns instead of 4"),
        ("cola", ["zz|1||fine", "zz|2||fine"], "line 2 has a label that is none of unacceptable, acceptable"),
        ("cola", ["zz|1"], "line 1 has 2 columns instead of 4"),
        ("stsb", ["sentence1|sentence2|score", "a|b|5.5"], "line 2 has a label that is no number from 0 to 5"),
        ("stsb", ["sentence1|sentence2|score", "a|b|much"], "line 2 has a label that is no number from 0 to 5"),
    ],
)
def test_bad_lines(name, rows, words, tmp_path):
    with pytest.raises(UserError) as caught:
        asked(name, tsv(tmp_path, *rows), "train")
    assert f"train.tsv {words}" in str(caught.value)


def test_odd_bytes(tmp_path):
    """A byte-order mark, line ends of Windows, other characters that split lines in Python, and no UTF-8."""
    head = b"\xef\xbb\xbfsentence\tlabel\r\n"
    (tmp_path / "train.tsv").write_bytes(head + "a\u2028b\x85c\rd\t1\r\n\r\n".encode() + b"e\t0\r\n")
    one, other = asked("sst2", tmp_path, "train")
    assert one.prompt == "sst2 sentence: a\u2028b\x85c\rd target:" and (other.id, other.answers) == ("1", ("negative",))
    (tmp_path / "train.tsv").write_bytes(head + b"caf\xe9\t1\r\n")
    with pytest.raises(UserError, match="train.tsv line 2 is not UTF-8: convert the file"):
        asked("sst2", tmp_path, "train")


def test_damaged_files(tmp_path):
    (tmp_path / "train-0.parquet").write_bytes(b"PAR1 no more")
    with pytest.raises(UserError, match="train-0.parquet is cut short or damaged"):
        asked("sst2", tmp_path, "train")
    (tmp_path / "wic.zip").write_bytes(b"PK")
    with pytest.raises(UserError, match="wic.zip is cut short or damaged"):
        known.load("wic").find(tmp_path, "train")


def test_missing_files(tmp_path):
    with pytest.raises(UserError, match=r"no/where does not exist: name the folder or zip archive of wic"):
        known.load("wic").find("no/where", "train")
    words = r"has no valid file of mnli \(dev_matched.tsv or validation_matched-\*.parquet or .*\): get it from https"
    with pytest.raises(UserError, match=words):
        known.load("mnli").find(tmp_path, "valid")
    with pytest.raises(UserError, match=r"WiC.zip has no train file of rte \(train.tsv or"):
        known.load("rte").find(published.write("wic", tmp_path), "train")
    place = published.write("mrpc", tmp_path)
    (place / "mrpc_dev_ids.tsv").write_text("1\n")
    with pytest.raises(UserError, match="mrpc_dev_ids.tsv line 1 is no pair of numbers"):
        asked("mrpc", place, "train")
    (place / "mrpc_dev_ids.tsv").unlink()
    with pytest.raises(UserError, match="msr_paraphrase_train.txt lacks mrpc_dev_ids.tsv beside it"):
        known.load("mrpc").find(place, "train")


@pytest.mark.parametrize(
    ("name", "count", "right"), [("narrative_qa", 6, 55003), ("multirc", 5, 27243), ("rte", 4, 2490)]
)
def test_the_number_of_examples_is_checked(name, count, right, tmp_path):
    """Of SCROLLS the rows, not the questions."""
    one = known.load(name)
    files = one.find(published.write(name, tmp_path), "train")
    words = f"{name} train has {count} examples instead of the published {right}: get a whole copy"
    with pytest.raises(UserError, match=words):
        list(one.questions("train", files))
