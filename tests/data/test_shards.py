"""Data sets of many files: C4 under its own names, the first documents of them, the hub file by file."""

from __future__ import annotations

import gzip
import json
import os
import subprocess
import sys
import threading
from collections.abc import Callable, Mapping
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest
from conftest import error_of, run_here
from fake_hub import FakeHub
from preparing import fill

from fairseq_rpe.cli.main import main
from fairseq_rpe.core.errors import UserError
from fairseq_rpe.data.download import resolve_source
from fairseq_rpe.data.folder import SPLITS, read_manifest
from fairseq_rpe.data.pipeline import prepare_corpus
from fairseq_rpe.data.prepare_options import CORPORA, PrepareOptions, compare_counts
from fairseq_rpe.data.stream import decode_documents

Captured = pytest.CaptureFixture[str]
Options = Callable[..., PrepareOptions]
Prepared = Callable[..., int]
SHARDS = 4
ROWS = 30  # of each


def text(split: str, number: int) -> str:
    return f"document {number} of {split}\nends here\n"


def packed(split: str, shard: int, rows: int = ROWS) -> bytes:
    numbers = range(shard * rows, (shard + 1) * rows)
    lines = (json.dumps({"text": text(split, n), "timestamp": "2019", "url": f"http://{n}"}) + "\n" for n in numbers)
    return gzip.compress("".join(lines).encode())


def c4() -> dict[str, bytes]:
    """Its files, fewer and smaller."""
    train = {f"en/c4-train.{n:05}-of-{SHARDS:05}.json.gz": packed("train", n) for n in range(SHARDS)}
    return {**train, **{f"en/c4-validation.{n:05}-of-00002.json.gz": packed("validation", n) for n in range(2)}}


TRAIN = [path for path in c4() if "train" in path]
DIVIDED = {"valid_fraction": 0.2, "test_fraction": 0.2, "include": ("*train*",)}


@pytest.fixture
def shards(tmp_path: Path) -> Path:
    return write(tmp_path / "c4", c4()) / "en"


def write(folder: Path, files: Mapping[str, bytes]) -> Path:
    for name, content in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(content)
    return folder


@pytest.fixture(scope="module")
def vocabulary(made_once) -> Path:
    """One for all, which has every byte."""
    return made_once("prepared-texts", fill) / "corpus"


@pytest.fixture
def quick(vocabulary: Path) -> Options:
    def options(dest: Path, *train: Path, **changes: Any) -> PrepareOptions:
        return PrepareOptions(dest, train, **{"vocab_from": vocabulary, "workers": 1, **changes})

    return options


@pytest.fixture
def known(vocabulary: Path) -> Prepared:
    def run(name: str, dest: Path, *more: str | Path | float) -> int:
        given = ["--vocab-from", vocabulary, "--out", dest, "--workers", 1, *more]
        return main(["prepare-corpus", name, *map(str, given)])

    return run


def documents(corpus: Path, split: str) -> list[str]:
    return [document.decode() for document in decode_documents(corpus, split)]


def all_documents(corpus: Path) -> dict[str, list[str]]:
    return {split: documents(corpus, split) for split in SPLITS}


def test_c4_is_its_documents_and_half_of_its_validation_is_the_test(
    shards: Path, tmp_path: Path, capsys: Captured, known: Prepared
) -> None:
    assert known("c4", tmp_path / "corpus", "--from", shards) == 0
    said = capsys.readouterr().out
    assert "it has no test files, so half of the validation documents, by a hash of their text, are the test" in said
    assert "warning: train has 120 documents instead of the published 364868892: this is another text" in said
    assert "warning: valid+test has 60 documents instead of the published 364608" in said
    found = all_documents(tmp_path / "corpus")
    assert found["train"] == [text("train", number) for number in range(SHARDS * ROWS)]
    assert sorted(found["valid"] + found["test"]) == sorted(text("validation", number) for number in range(2 * ROWS))
    assert 15 < len(found["valid"]) < 45
    assert known("c4", tmp_path / "again", "--from", shards, "--seed", 2) == 0
    assert documents(tmp_path / "again", "test") != found["test"]
    assert known("c4", tmp_path / "no", "--from", shards, "--test-fraction", 0.1) == 2
    assert "--test-fraction has no effect where the valid and test splits are given" in capsys.readouterr().err


def test_files_of_ones_own_for_the_test_are_the_test(shards: Path, tmp_path: Path, known: Prepared) -> None:
    (shards / "c4-test.json.gz").write_bytes(packed("test", 0))
    assert known("c4", tmp_path / "corpus", "--from", shards) == 0
    assert len(documents(tmp_path / "corpus", "valid")) == 2 * ROWS
    assert documents(tmp_path / "corpus", "test") == [text("test", number) for number in range(ROWS)]


def test_published_counts() -> None:
    """Those of C4 are of validation and test together."""
    said: list[str] = []
    counts = {split: {"documents": n} for split, n in zip(SPLITS, [364_868_892, 182_001, 182_607], strict=True)}
    compare_counts(CORPORA["c4"], counts, said.append)
    assert said == ["train: 364868892 documents, as published", "valid+test: 364608 documents, as published"]
    counts = {"train": {"documents": 28602}, "valid": {"documents": 50}, "test": {"documents": 99}}
    compare_counts(CORPORA["books"], counts, said.append)
    assert said[2] == "train: 28602 documents, as published" and said[4].startswith("warning: test has 99 documents")


def test_splits_may_be_folders(tmp_path: Path, capsys: Captured, known: Prepared) -> None:
    """As the arXiv papers of RedPajama have them."""
    folder = write(tmp_path / "set", {f"{s}/arXiv_{n:03}.jsonl.gz": packed(s, n) for s in SPLITS for n in range(2)})
    assert known("arxiv-redpajama", tmp_path / "corpus", "--from", folder) == 0
    for split in SPLITS:
        assert documents(tmp_path / "corpus", split) == [text(split, number) for number in range(2 * ROWS)]
    for path in (folder / "valid").iterdir():
        path.unlink()
    assert known("arxiv-redpajama", tmp_path / "new", "--from", folder) == 2
    assert f"{folder} has no file with 'valid' in its name: add or rename it" in capsys.readouterr().err


def test_data_sets_of_train_files_alone_are_divided(tmp_path: Path, known: Prepared) -> None:
    folder = write(tmp_path / "set", {f"train-{n:05}-of-00002.jsonl.gz": packed("train", n) for n in range(2)})
    fractions = ["--valid-fraction", 0.2, "--test-fraction", 0.2]
    assert known("arxiv", tmp_path / "corpus", "--from", folder, *fractions) == 0
    found = [document for own in all_documents(tmp_path / "corpus").values() for document in own]
    assert sorted(found) == sorted(text("train", number) for number in range(2 * ROWS))


def test_the_first_documents_of_training(shards: Path, tmp_path: Path, capsys: Captured, known: Prepared) -> None:
    assert known("c4", tmp_path / "corpus", "--from", shards, "--documents", 40) == 0
    assert "they are not compared" in capsys.readouterr().out
    manifest = read_manifest(tmp_path / "corpus")
    assert documents(tmp_path / "corpus", "train") == [text("train", number) for number in range(40)]
    assert manifest["options"]["documents"] == 40
    assert sum(manifest["splits"][split]["documents"] for split in ("valid", "test")) == 2 * ROWS
    # What is behind them makes no other corpus, another number does.
    (shards.parent / TRAIN[-1]).unlink()
    assert known("c4", tmp_path / "corpus", "--from", shards, "--documents", 40) == 0
    assert " is up to date\n" in capsys.readouterr().out
    assert known("c4", tmp_path / "corpus", "--from", shards, "--documents", 41, "--overwrite") == 0
    assert len(documents(tmp_path / "corpus", "train")) == 41


def test_other_splits_get_what_comes_between_the_first_documents(shards: Path, tmp_path: Path, quick: Options) -> None:
    prepare_corpus(quick(tmp_path / "all", shards, **DIVIDED), print)
    prepare_corpus(quick(tmp_path / "corpus", shards, documents=40, **DIVIDED), print)
    every, found = all_documents(tmp_path / "all"), all_documents(tmp_path / "corpus")
    assert found["train"] == every["train"][:40]
    whole = [text("train", number) for number in range(SHARDS * ROWS)]
    before = set(whole[: whole.index(found["train"][-1]) + 1])
    for split in ("valid", "test"):
        assert found[split] and found[split] == [one for one in every[split] if one in before]


def test_shards_behind_the_first_documents_are_not_read(shards: Path, tmp_path: Path, quick: Options) -> None:
    last = shards.parent / TRAIN[-1]
    # Whether it is text is seen from its beginning.
    last.write_bytes(packed("train", SHARDS - 1, 3000)[:-20])
    prepare_corpus(quick(tmp_path / "corpus", shards, documents=40, **DIVIDED), print)
    with pytest.raises(UserError, match=f"{last.name} is cut short or damaged"):
        prepare_corpus(quick(tmp_path / "new", shards, documents=10**6, **DIVIDED), print)


def test_fewer_documents_than_wanted_are_all_of_them(tmp_path: Path, quick: Options) -> None:
    (tmp_path / "texts").mkdir()
    for number in range(5):
        (tmp_path / "texts" / f"{number}.txt").write_text("some words\n" * (100 + number))
    # Named only where it is given: corpora made before there was such an option stay up to date.
    assert "documents" not in quick(tmp_path, tmp_path / "texts").key()
    said: list[str] = []
    prepare_corpus(quick(tmp_path / "corpus", tmp_path / "texts", documents=1000), said.append)
    assert any(line.startswith("all of the text is taken: it has ") for line in said)
    with pytest.raises(UserError, match="would be empty: give .* or more --documents"):
        prepare_corpus(quick(tmp_path / "new", tmp_path / "texts", documents=1), said.append)


def test_what_does_not_go_with_a_number_of_documents(shards: Path, tmp_path: Path) -> None:
    for words, why in {
        "prepare {en} --documents 0": "--documents 0 is out of range: use 1 to ",
        "prepare {en} --documents 9 --rows-are-lines": "--documents counts whole documents, and all rows",
        "prepare-corpus wikitext103 --from {en} --documents 9": "has no file with 'test' in its name",
        "prepare-corpus wikibook --from {en} --documents 9": "--documents would take nothing but the",
    }.items():
        said = run_here(*words.format(en=shards).split(), "--out", tmp_path / "corpus", ok=False).stderr
        assert why in said and said.count("\n") == 1 and not (tmp_path / "corpus").exists()


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> FakeHub:
    about = {"README.md": b"about", "en/dataset_infos.json": b'{"en": {}}\n', "de/c4-train.0.json.gz": packed("de", 0)}
    found = FakeHub(tmp_path / "cache", {("allenai/c4", None): {**c4(), **about}})
    found.install(monkeypatch)
    return found


def test_c4_of_the_hub(hub: FakeHub, shards: Path, tmp_path: Path, known: Prepared) -> None:
    # Of another download, into the same cache.
    write(hub.cache, {"en/dataset_infos.json": b"{}", "en/README.md": b"no text to train on"})
    assert known("c4", tmp_path / "corpus") == known("c4", tmp_path / "own", "--from", shards) == 0
    assert sorted(set(hub.downloaded)) == sorted([*c4(), "en/dataset_infos.json"])
    assert all_documents(tmp_path / "corpus") == all_documents(tmp_path / "own")


def test_no_more_shards_of_the_hub_than_the_first_documents_are_in(
    hub: FakeHub, shards: Path, tmp_path: Path, capsys: Captured, known: Prepared
) -> None:
    valid = [path for path in c4() if "validation" in path]
    hub.failures[TRAIN[1]] = ConnectionError("no route")
    assert known("c4", tmp_path / "corpus", "--documents", 40) == 2
    error = f"error: hub:allenai/c4/{TRAIN[1]} cannot be downloaded (no route): run this again"
    assert capsys.readouterr().err.startswith(error) and not (tmp_path / "corpus").exists()
    hub.failures.clear()
    hub.downloaded.clear()
    assert known("c4", tmp_path / "corpus", "--documents", 40) == 0
    assert hub.downloaded == [*TRAIN[:2], *valid]
    assert known("c4", tmp_path / "own", "--from", shards, "--documents", 40) == 0
    assert all_documents(tmp_path / "corpus") == all_documents(tmp_path / "own")
    capsys.readouterr()
    assert known("c4", tmp_path / "corpus", "--documents", 40) == 0
    assert f"{tmp_path}/corpus is up to date" in capsys.readouterr().out


def test_any_data_set_of_the_hub_by_its_first_documents(hub: FakeHub, tmp_path: Path) -> None:
    arguments = ["--documents", "40", "--valid-fraction", "0.2", "--test-fraction", "0.2"]
    source = ["hub:allenai/c4/en", "--include", "*train*", "--out", str(tmp_path / "corpus"), "--workers", "1"]
    assert main(["prepare", *source, *arguments, "--vocab-size", "300"]) == 0
    assert len(hub.downloaded) == 3 and len(documents(tmp_path / "corpus", "train")) == 40


@pytest.mark.parametrize("one_by_one", [True, False])
def test_files_that_describe_a_data_set_are_no_text(hub: FakeHub, one_by_one: bool) -> None:
    def found(*names: str) -> list[str]:
        every = (*names, "dataset_infos.json", "LICENSE.txt", ".x.json")
        hub.files["allenai/c4", None] = {f"en/{name}": packed("x", 0) for name in every}
        hub.cache = hub.cache.with_name("-".join(["cache", *names]).replace("/", "-"))
        return [Path(str(entry)).name for entry in resolve_source("hub:allenai/c4/en", (), one_by_one)]

    assert found("b.json.gz", "a.json") == ["a.json", "b.json.gz"]
    assert found("b.parquet", "index.json") == ["b.parquet"]
    assert found("z.jsonl", "part/a.jsonl") == ["z.jsonl", "a.jsonl"]
    with pytest.raises(UserError, match="hub:allenai/c4/en has no parquet, .jsonl, .json or .txt files"):
        found()
    hub.files["allenai/c4", None] = {"en/a.jsonl": b""}
    with pytest.raises(UserError, match="has no file that is .*.txt: use another --include"):
        resolve_source("hub:allenai/c4/en", ["*.txt"], one_by_one)


TROUBLE: list[tuple[Any, str]] = [
    ("GatedRepoError", "hub:allenai/c4/en is gated: accept its terms"),
    ("RepositoryNotFoundError", "hub:allenai/c4/en does not exist or is private"),
    (ConnectionError("no route\nto host"), "hub:allenai/c4/en cannot be downloaded (no route): run this again"),
    (None, "needs the package huggingface_hub: pip install huggingface_hub pyarrow, or get its files"),
]


@pytest.mark.parametrize(("outcome", "words"), TROUBLE, ids=str)
def test_trouble_with_the_hub_is_one_line(
    hub: FakeHub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Captured, outcome: Any, words: str
) -> None:
    if outcome is None:
        monkeypatch.setitem(sys.modules, "huggingface_hub", None)
    else:
        hub.failures["allenai/c4"] = getattr(hub.errors, outcome)("404") if isinstance(outcome, str) else outcome
    assert words in error_of(capsys, "prepare", "hub:allenai/c4/en", "--out", tmp_path / "corpus")
    assert not (tmp_path / "corpus").exists()


class Answers(BaseHTTPRequestHandler):
    """Of the hub, as its own library asks them; the server's ``served`` are the names of the files."""

    server: HubServer

    def log_message(self, *_: object) -> None:
        pass

    def do_HEAD(self) -> None:
        path, revision, api = urlsplit(self.path).path, "a" * 40, "/api/datasets/allenai/c4"
        tree = f"{api}/tree/{revision}/"
        if path.startswith(tree):
            names = [name for name in c4() if name.startswith(path.removeprefix(tree))]
            found = [{"type": "file", "oid": "1", "size": len(c4()[name]), "path": name} for name in names]
            content = json.dumps([{"type": "directory", "oid": "1", "size": 0, "path": "en/deep"}, *found]).encode()
        elif path.startswith(api):
            content = json.dumps({"id": "allenai/c4", "sha": revision, "siblings": []}).encode()
        else:
            name = path.partition(f"/resolve/{revision}/")[2]
            content = c4()[name]
            self.server.served[name] = None
        self.send_response(200)
        headers = {"Content-Type": "application/json", "X-Repo-Commit": revision, "ETag": f'"{len(content)}"'}
        for key, value in {**headers, "Content-Length": str(len(content))}.items():
            self.send_header(key, value)
        self.end_headers()
        if self.command == "GET":
            self.wfile.write(content)

    do_GET = do_HEAD


class HubServer(ThreadingHTTPServer):
    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Answers)
        self.served: dict[str, None] = {}


def test_the_hubs_own_library_gets_no_more_shards(tmp_path: Path, vocabulary: Path) -> None:
    pytest.importorskip("huggingface_hub")
    arguments = ["c4", "--documents", "40", "--vocab-from", str(vocabulary), "--out", str(tmp_path / "corpus")]
    command = [sys.executable, "-m", "fairseq_rpe.cli.main", "prepare-corpus", *arguments, "--workers", "1"]
    with HubServer() as server:
        threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
        place = {"HF_ENDPOINT": f"http://127.0.0.1:{server.server_port}", "HF_HOME": str(tmp_path / "hf")}
        environment = {**os.environ, **place, "HF_HUB_DISABLE_XET": "1", "HF_HUB_DISABLE_TELEMETRY": "1"}
        done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=60, check=False)
        server.shutdown()
    assert done.returncode == 0, done.stderr
    assert [name for name in server.served if "train" in name] == TRAIN[:2]
    assert documents(tmp_path / "corpus", "train") == [text("train", number) for number in range(40)]
