"""Small known sets, made by hand, in the files and formats that their authors ship and that the hub has.

``published.jsonl`` has their examples, one per line; labels are numbers of classes. All texts are invented. The test
splits have no labels, as published. The split ``asked`` has prompt | document | cue | answer of the question at a
place of the training split, typed by hand after T5's templates. ``write(name, folder)`` writes a set as its authors do
and returns what to read; ``write_hub`` as the hub has it.
"""

from __future__ import annotations

import json
import zipfile
from collections import defaultdict
from io import BytesIO
from pathlib import Path
from typing import Any

from fairseq_rpe.questions import benchmarks

Rows = list[dict[str, Any]]
SPLITS = {"train": "train", "valid": "validation", "test": "test"}  # as the hub calls them
# What broken lines of QQP look like, between the first row and the second: a newline within a question.
BROKEN = ("9\t9\t9\tHow do I", "mend this?\tHow?\t0")
BEFORE = "The river rose in March and the lower fields stood under water. Nobody in the valley had seen it so high. "
AFTER = " In autumn the rain came back, and the people carried sand and stone to the bank.\n\nSo ended that year."


def story(middle: str) -> str:
    """A text of some length with what matters in its middle."""
    return BEFORE * 2 + middle + AFTER


def _examples() -> dict[str, dict[str, Rows]]:
    """The rows of published.jsonl by set and split."""
    found: defaultdict[str, dict[str, Rows]] = defaultdict(lambda: {split: [] for split in (*SPLITS, "asked")})
    for line in Path(__file__).with_suffix(".jsonl").read_text(encoding="utf-8").splitlines():
        row = json.loads(line)
        found[row.pop("set")][row.pop("split")].append(row)
    return found


ROWS = _examples()
MILL, FERRY = story("Old Tamsin mended the mill wheel with oak."), story("Ivo sold the ferry to Sela for nine coins.")


def write(name: str, folder: Path) -> Path:
    """Write a set as its authors ship it; gives the folder or zip archive to read it from."""
    suite = benchmarks.load_benchmark(name).suite
    if suite == "glue":
        return _glue(name, folder)
    called = {"superglue_rte": "RTE", **_SUPERGLUE}.get(name, name)
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{called}.zip"
    with zipfile.ZipFile(path, "w") as archive:
        for split, hub in SPLITS.items():
            file = "val" if (split, suite) == ("valid", "superglue") else hub
            rows = _scrolls(name, split) if suite == "scrolls" else _originals(name, split)
            text = "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows)
            archive.writestr(f"{called}/{file}.jsonl", text)
    return path


def _scrolls(name: str, split: str) -> Rows:
    """Rows of SCROLLS: ``about`` is the middle of a story, ``text`` is a text as it stands."""
    rows = []
    for place, row in enumerate(ROWS[name][split]):
        letters = [f" ({letter}) {option}\n" for letter, option in zip("ABCD", row.get("options", ()), strict=False)]
        question = [row["question"], "\n\n"] if "question" in row else []
        text = "".join([*question, *letters, "\n" if letters else "", _text(row)])
        more = {"is_hard": row["is_hard"]} if "is_hard" in row else {}
        rows.append({"id": row["id"], "pid": f"{row['id']}_{place}", "input": text, "output": row["output"], **more})
    return rows


def _text(row: dict[str, Any]) -> str:
    return story(row["about"]) if "about" in row else row["text"]


_SUPERGLUE = {"boolq": "BoolQ", "cb": "CB", "copa": "COPA", "multirc": "MultiRC", "record": "ReCoRD", "wic": "WiC"}
_SUPERGLUE["wsc"] = "WSC"
_GLUE = {"cola": "CoLA", "sst2": "SST-2", "mrpc": "MRPC", "qqp": "QQP", "stsb": "STS-B", "mnli": "MNLI"}
_GLUE |= {"qnli": "QNLI", "rte": "RTE", "wnli": "WNLI", "mnli_mismatched": "MNLI"}
_PARSES = "sentence1_binary_parse sentence2_binary_parse sentence1_parse sentence2_parse".split()
_HEADERS = {
    "sst2": ["sentence", "label"],
    "mrpc": ["Quality", "#1 ID", "#2 ID", "#1 String", "#2 String"],
    "qqp": ["id", "qid1", "qid2", "question1", "question2", "is_duplicate"],
    "stsb": "index genre filename year old_index source1 source2 sentence1 sentence2 score".split(),
    "mnli": ["index", "promptID", "pairID", "genre", *_PARSES, "sentence1", "sentence2", "label1", "gold_label"],
    "qnli": ["index", "question", "sentence", "label"],
    "rte": ["index", "sentence1", "sentence2", "label"],
}
_HEADERS |= {"wnli": _HEADERS["rte"], "mnli_mismatched": _HEADERS["mnli"]}


def _glue(name: str, folder: Path) -> Path:
    place = folder / _GLUE[name]
    place.mkdir(parents=True, exist_ok=True)
    for split in ["test"] if name == "mrpc" else SPLITS:
        text = "".join("\t".join(cells) + "\n" for cells in _tsv(name, split))
        file = "dev" if split == "valid" else split
        if name.startswith("mnli") and split != "train":
            file += "_mismatched" if name == "mnli_mismatched" else "_matched"
        (place / f"{file}.tsv").write_bytes(text.encode())
    if name == "mrpc":
        rows = list(enumerate(_mrpc(), start=100))
        table = [[str(row["label"]), f"{n}", f"{n + 100}", row["sentence1"], row["sentence2"]] for n, row in rows]
        text = "".join("\t".join(cells) + "\r\n" for cells in [_HEADERS[name], *table])
        (place / "msr_paraphrase_train.txt").write_bytes(text.encode("utf-8-sig"))
        ids = "".join(f"{n}\t{n + 100}\n" for n, row in rows if row in ROWS[name]["valid"])
        (place / "mrpc_dev_ids.tsv").write_text(ids)
    return place


def _mrpc() -> Rows:
    """The rows of both splits as one file has them, by turns; the last one is of training."""
    train, valid = ROWS["mrpc"]["train"], ROWS["mrpc"]["valid"]
    return [row for pair in zip(train, valid, strict=False) for row in pair] + train[len(valid) :]


def _tsv(name: str, split: str) -> list[list[str]]:
    labelled = split != "test"
    rows, choices = ROWS[name][split], benchmarks.load_benchmark(name).choices
    if name == "cola":
        if labelled:
            return [["zz01", str(row["label"]), "" if row["label"] else "*", row["sentence"]] for row in rows]
        return [["index", "sentence"], *([str(n), row["sentence"]] for n, row in enumerate(rows))]
    unlabelled = {"Quality", "is_duplicate", "score", "label1", "gold_label", "label"}
    header = [column for column in _HEADERS[name] if labelled or column not in unlabelled]
    if name == "sst2" and not labelled:
        header = ["index", "sentence"]
    table = [header]
    for n, row in enumerate(rows):
        words = choices[row["label"]] if labelled and name in ("mnli", "mnli_mismatched", "qnli", "rte") else None
        label = words or str(row["label"])
        cells = {**row, "label": label, "gold_label": label, "label1": label, "is_duplicate": label, "score": label}
        if name.startswith("mnli"):
            cells |= {"sentence1": row["premise"], "sentence2": row["hypothesis"]}
        if name == "mrpc":
            cells |= {"#1 String": row["sentence1"], "#2 String": row["sentence2"]}
        table.append([cells.get(column, str(n)) for column in header])
        if name == "qqp" and split == "train" and n == 0:
            table += [line.split("\t") for line in BROKEN]
    return table


def _originals(name: str, split: str) -> Rows:
    """Rows of SuperGLUE's JSON lines."""
    rows = ROWS[name][split]
    if name == "multirc":
        return [{"idx": row["idx"], "version": 1.1, "passage": _passage(row)} for row in rows]
    if name == "record":
        return [
            {
                "source": "made by hand",
                "idx": row["idx"],
                "passage": {"text": row["text"], "entities": _places(row["text"], row["entities"])},
                "qas": [
                    {"query": query, "idx": q, **({"answers": _answers(row["text"], answers)} if answers else {})}
                    for q, query, answers in row["queries"]
                ],
            }
            for row in rows
        ]
    if name == "wsc":
        return [
            {"text": row["text"], "target": spans(row["noun"], row["pronoun"]), "idx": n, **_label(row, bool)}
            for n, row in enumerate(rows)
        ]
    choices, version = benchmarks.load_benchmark(name).choices, {"version": 1.1} if name == "wic" else {}
    spelled = bool if name in ("boolq", "wic") else int if name == "copa" else choices.__getitem__
    texts = [{key: value for key, value in row.items() if key != "label"} for row in rows]
    return [{**text, **version, "idx": n, **_label(rows[n], spelled)} for n, text in enumerate(texts)]


def _label(row: dict[str, Any], spelled: Any) -> dict[str, Any]:
    return {"label": spelled(row["label"])} if row["label"] >= 0 else {}


def _passage(row: dict[str, Any]) -> dict[str, Any]:
    """A text of MultiRC with its questions."""
    questions = []
    for q, (question, answers) in enumerate(row["questions"].items()):
        rated = [{"text": text, "idx": a, **_label({"label": answers[text]}, int)} for a, text in enumerate(answers)]
        questions.append({"idx": q, "question": question, "answers": rated})
    return {"text": row["text"], "questions": questions}


def _places(text: str, entities: list[str]) -> list[dict[str, int]]:
    """Where the entities stand, each behind the one before; the end is that of the last character."""
    found, at = [], 0
    for entity in entities:
        begin = text.index(entity, at) if entity in text[at:] else text.index(entity)
        found.append({"start": begin, "end": begin + len(entity) - 1})
        at = begin + 1
    return found


def _answers(text: str, answers: list[str]) -> Rows:
    return [{**place, "text": answer} for answer, place in zip(answers, _places(text, answers), strict=True)]


def spans(noun: tuple[str, int], pronoun: tuple[str, int]) -> dict[str, Any]:
    return {"span1_text": noun[0], "span1_index": noun[1], "span2_text": pronoun[0], "span2_index": pronoun[1]}


def hub_rows(name: str, split: str) -> Rows:
    """Rows of GLUE and SuperGLUE as the hub has them."""
    rows = ROWS[name][split]
    if name == "multirc":
        return [
            {"paragraph": row["text"], "question": question, "answer": answer, "label": label}
            | {"idx": {"paragraph": row["idx"], "question": q, "answer": a}}
            for row in rows
            for q, (question, answers) in enumerate(row["questions"].items())
            for a, (answer, label) in enumerate(answers.items())
        ]
    if name == "record":
        return [
            {"passage": row["text"], "query": query, "idx": {"passage": row["idx"], "query": q}}
            | {"entities": list(dict.fromkeys(row["entities"])), "answers": list(dict.fromkeys(answers))}
            for row in rows
            for q, query, answers in row["queries"]
        ]
    if name == "wsc":
        spanned = [{"text": row["text"], **spans(row["noun"], row["pronoun"]), "label": row["label"]} for row in rows]
        return [{**row, "idx": n} for n, row in enumerate(spanned)]
    if name == "mrpc" and split != "test":
        return [{**row, "idx": n} for n, row in enumerate(_mrpc()) if row in rows]
    gap = len(BROKEN) if (name, split) == ("qqp", "train") else 0
    return [{**row, "idx": n + gap * (n > 0)} for n, row in enumerate(rows)]


def hub_files(name: str) -> dict[str, bytes]:
    """The files of a data set on the hub, by their paths there, with those of other splits."""
    import pyarrow
    from pyarrow import parquet

    found = benchmarks.load_benchmark(name)
    config = found.places.hub.rpartition("/")[2]
    if found.suite == "scrolls":
        raise ValueError("the hub has the authors' zip archives: use write")
    files = {}
    for split, called in SPLITS.items():
        file = BytesIO()
        parquet.write_table(pyarrow.Table.from_pylist(hub_rows(name, split)), file)
        if name.startswith("mnli") and split != "train":
            called += "_mismatched" if name == "mnli_mismatched" else "_matched"
        path = f"{called}-00000-of-00001" if found.suite == "glue" else f"{called}/0000"
        files[f"{config}/{path}.parquet"] = file.getvalue()
    return files


def write_hub(name: str, folder: Path) -> Path:
    """Write a set of GLUE or SuperGLUE as a copy of the hub's files; gives the folder to read it from."""
    for path, content in hub_files(name).items():
        (folder / path).parent.mkdir(parents=True, exist_ok=True)
        (folder / path).write_bytes(content)
    return folder
