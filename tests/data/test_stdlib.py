"""Code as one text: divided by path, without boundaries, the same bytes as fairseq-preprocess makes of its lines."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest
from conftest import run, run_here
from in_process import fairseq
from preparing import contents
from test_tokenizer import CODE, NASTY

from fairseq_rpe.data import pipeline
from fairseq_rpe.data.folder import BINARIES, SPLITS, corpus_digest, read_manifest, read_split, read_units
from fairseq_rpe.data.pipeline import prepare_corpus
from fairseq_rpe.data.prepare_options import CORPORA, PrepareOptions, preset_options
from fairseq_rpe.data.stream import decode_documents, group_pieces, split_pieces
from fairseq_rpe.data.tokenization import Tokenizer

# Where the files of `write_sources` have always gone.
VALID = ["package0/module20", "package0/module4", "package1/module13", "package1/nasty"]
VALID += ["package3/module11", "package3/module23", "package3/module3"]
TEST = ["package0/module12", "package0/module16", "package2/module2", "package2/module6"]
WITHIN_3000 = ["package0/empty", "package0/module12", "package0/module8", "package1/module17", "package2/module10"]
WITHIN_3000 += ["package2/module14", "package2/module6", "package3/module11", "package3/module23", "package3/module3"]


def write_sources(folder: Path) -> Path:
    for n in range(1, 25):
        path = folder / f"package{n % 4}" / f"module{n}.py"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(CODE.replace("{n}", str(n)).encode())
    (folder / "package0" / "empty.py").write_bytes(b"")
    (folder / "package1" / "nasty.py").write_bytes("\n".join(NASTY[:-3]).encode())
    (folder / "package1" / "notes.txt").write_bytes(b"\xff not a source")
    return folder


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_sources(tmp_path_factory.mktemp("source"))


@pytest.fixture(scope="module")
def made(source: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    dest = tmp_path_factory.mktemp("made") / "corpus"
    prepare_corpus(options(source, dest), print)
    return dest


def options(source: Path | None, dest: Path, **changes: Any) -> PrepareOptions:
    own = preset_options(CORPORA["stdlib"], [source] if source else [], dest.parent)
    given = {"vocab_size": 400, "valid_fraction": 0.3, "test_fraction": 0.2, "workers": 1, **changes}
    return PrepareOptions(out=dest, **{**own, **given})


def finished(source: Path, names: list[str]) -> bytes:
    texts = (source.joinpath(f"{name}.py").read_bytes() for name in names)
    return b"".join(text if text.endswith(b"\n") or not text else text + b"\n" for text in texts)


def test_files_go_where_their_paths_always_went(source: Path, made: Path) -> None:
    names = sorted(path.relative_to(source).with_suffix("").as_posix() for path in source.rglob("*.py"))
    train = [name for name in names if name not in (*VALID, *TEST)]
    for split, inside in {"train": train, "valid": VALID, "test": TEST}.items():
        text, count = finished(source, inside), read_manifest(made)["splits"][split]
        assert decode_documents(made, split) == [text]
        assert (count["documents"], count["lines"]) == (len(inside), text.count(b"\n"))
        assert count["tokens"] == len(read_split(made, split)[0])


def test_neither_pieces_nor_the_place_of_the_folder_matter_but_names_do(
    made: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = write_sources(tmp_path / "copy")
    monkeypatch.setattr(pipeline, "split_pieces", lambda blocks, size: split_pieces(blocks, min(size, 100)))
    monkeypatch.setattr(pipeline, "group_pieces", lambda pieces: group_pieces(pieces, 300))
    prepare_corpus(options(source, tmp_path / "corpus"), print)
    assert contents(tmp_path / "corpus") == contents(made)
    (source / "package2" / "module2.py").rename(source / "package2" / "renamed.py")
    prepare_corpus(options(source, tmp_path / "again"), print)
    assert read_manifest(tmp_path / "again")["digest"] != read_manifest(made)["digest"]


def test_fairseq_preprocess_makes_the_same_files(source: Path, made: Path, tmp_path: Path) -> None:
    tokenizer = Tokenizer.load(made / "spm.model")
    flags: list[str | Path] = ["--only-source", "--srcdict", made / "dict.txt", "--destdir", tmp_path / "theirs"]
    for split in SPLITS:
        lines = decode_documents(made, split)[0].decode().split("\n")[:-1]
        pieces = ([tokenizer.symbols[place] for place in tokenizer.encode(line)] for line in lines)
        (tmp_path / split).write_text("".join(" ".join(symbols) + "\n" for symbols in pieces))
        flags += [f"--{split}pref", tmp_path / split]
    fairseq("preprocess", "--dataset-impl", "mmap", *flags)
    for name in ("dict.txt", *BINARIES):
        assert (tmp_path / "theirs" / name).read_bytes() == (made / name).read_bytes(), name


def test_blank_hidden_and_odd_files_are_text_like_any_other(source: Path, made: Path, tmp_path: Path) -> None:
    source = write_sources(tmp_path / "copy")
    more = {"package2/blank.py": "\n \n", "package2/.hidden.py": "x = 1", ".hidden/y.py": "y = 1\n", "a.py": "NUL \0"}
    (source / ".hidden").mkdir()
    (source / "__pycache__").mkdir()
    (source / "__pycache__" / "left_out.py").write_text("cached = 1\n")
    for name, text in more.items():
        (source / name).write_text(text)
    manifest = prepare_corpus(options(source, tmp_path / "again"), print)
    kept = b"".join(decode_documents(tmp_path / "again", split)[0] for split in SPLITS)
    old = b"".join(decode_documents(made, split)[0] for split in SPLITS)
    assert len(kept) == len(old) + sum(len(text) for text in more.values()) + 2
    assert sum(manifest["splits"][split]["documents"] for split in SPLITS) == 26 + len(more)


def test_max_bytes_takes_whole_files_repeatably(source: Path, made: Path, tmp_path: Path) -> None:
    shared: dict[str, Any] = {"max_bytes": 3000, "vocab_size": None, "vocab_from": made}
    prepare_corpus(options(source, tmp_path / "a", **shared), print)
    parts = [[n for n in WITHIN_3000 if (n in VALID, n in TEST) == where] for where in ((0, 0), (1, 0), (0, 1))]
    for split, names in zip(SPLITS, parts, strict=True):
        assert decode_documents(tmp_path / "a", split) == [finished(source, names)]
    prepare_corpus(options(source, tmp_path / "b", seed=2, **shared), print)
    assert corpus_digest(tmp_path / "a") != corpus_digest(tmp_path / "b")


def test_library_leaves_out_packages_tests_and_other_encodings(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    library = write_sources(tmp_path / "library")
    for name in ("site-packages/a.py", "test/b.py", "package0/tests/c.py", "_sysconfigdata_x.py"):
        (library / name).parent.mkdir(parents=True, exist_ok=True)
        (library / name).write_text("x = 1\n")
    (library / "latin.py").write_bytes(b"# -*- coding: latin-1 -*- \xe9\n")
    monkeypatch.setattr("sysconfig.get_path", lambda name: str(library))
    manifest = prepare_corpus(options(None, tmp_path / "corpus"), print)
    assert sum(manifest["splits"][split]["documents"] for split in SPLITS) == 26
    assert manifest["skipped"] == {"not UTF-8": 1}


def test_rows_of_a_file_stay_together_and_apart_from_other_files(tmp_path: Path) -> None:
    for n in range(30):
        (tmp_path / f"{n}.jsonl").write_text("".join(f'{{"text": "f{n} row {i}\\n"}}\n' for i in range(3)))
    files = tuple(sorted(tmp_path.glob("*.jsonl")))
    common: dict[str, Any] = {"tokenizer": "words", "valid_fraction": 0.3, "test_fraction": 0.2}
    prepare_corpus(PrepareOptions(tmp_path / "corpus", files, split_by="path", **common), print)
    found = [decode_documents(tmp_path / "corpus", split) for split in SPLITS]
    assert sum(map(len, found)) == 90 and all(len(documents) % 3 == 0 for documents in found)
    # Words that only valid or test have are unknown; the number of the row is not.
    for documents in found:
        assert [document.split()[-1] for document in documents] == [b"0", b"1", b"2"] * (len(documents) // 3)


def old_manifest(folder: Path) -> None:
    """What the standard library's corpus had for a manifest when it was made in another way."""
    new = read_manifest(folder)
    names = ("vocab_size", "seed", "valid_fraction", "test_fraction", "max_bytes")
    old = {"made_by": "fairseq-rpe prepare-stdlib", "format": 1, "digest": "e6d0", "files": new["files"]}
    old["splits"] = {split: {"files": 1, **count} for split, count in new["splits"].items()}
    old["options"] = {name: new["options"].get(name) for name in names}
    (folder / "corpus.json").write_text(json.dumps(old))


def test_a_corpus_made_in_the_old_way_is_used_and_replaced(source: Path, made: Path, tmp_path: Path) -> None:
    old = tmp_path / "old"
    prepare_corpus(options(source, old), print)
    before = contents(old)
    old_manifest(old)
    assert read_units(old, "valid") == read_units(made, "valid") is not None
    assert decode_documents(old, "valid") == decode_documents(made, "valid")
    shared = options(source, tmp_path / "shared", vocab_size=None, vocab_from=old)
    prepare_corpus(shared, print)
    assert corpus_digest(tmp_path / "shared") == corpus_digest(made)
    prepare_corpus(options(source, old, overwrite=True), print)
    assert contents(old) == before


FRACTIONS = ("--valid-fraction", "0.3", "--test-fraction", "0.2")


def test_commands(source: Path, made: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    known = run_here("prepare-corpus", "stdlib", "--from", source, "--out", made, "--vocab-size", "400", *FRACTIONS)
    assert known.stdout == f"{CORPORA['stdlib'].about}\n{made} is up to date\n"
    made_with: list[PrepareOptions] = []
    monkeypatch.setattr("fairseq_rpe.cli.prepare.prepare_corpus", made_with.append)
    run_here("prepare-stdlib")
    (given,) = made_with
    assert (given.out, given.vocab_size, given.workers) == (Path("data-bin/stdlib"), 4096, 2)
    assert (given.split_by, given.boundaries, given.skip_invalid, given.valid) == ("path", False, True, ())


def test_any_text_can_be_without_boundaries_and_by_path(source: Path, made: Path, tmp_path: Path) -> None:
    words = ["prepare", source, "--out", tmp_path / "corpus", "--include", "module*.py", "--vocab-from", made]
    run_here(*words, "--workers", "1", "--split-by", "path", "--no-boundaries", *FRACTIONS)
    assert decode_documents(tmp_path / "corpus", "test") == [finished(source, TEST)]
    assert read_split(tmp_path / "corpus", "test")[0].tobytes() == (made / "test.bin").read_bytes()


def test_up_to_date_imports_nothing_heavy(source: Path, made: Path) -> None:
    words = ["prepare-stdlib", "--source", str(source), "--out", str(made), "--vocab-size", "400", *FRACTIONS]
    heavy = {"fairseq", "torch", "pooch", "tokenizers", "pyarrow", "huggingface_hub"}
    code = f"import sys; from fairseq_rpe.cli.main import main; main({words}); print({heavy} & set(sys.modules))"
    assert run(sys.executable, "-c", code).stdout == f"{made} is up to date\nset()\n"
