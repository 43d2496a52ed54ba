"""Damaged data folders and vocabularies: refused in one line that names the file, before any work."""

from __future__ import annotations

import json
import re
import shutil
import struct
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from conftest import error_of

from fairseq_rpe.core.errors import UserError
from fairseq_rpe.data.folder import (
    MADE_BY,
    check_folder,
    corpus_digest,
    count_tokens,
    describe_files,
    read_dictionary,
    read_split,
    read_units,
)

HEAD = 9 + 8 + 1 + 8  # of an index: magic, version, number type, items
Change = Callable[[Path], object]
DIGESTS = ["dict.txt", "test.idx", "test.bin"]


def with_bytes(content: bytes, at: int, new: bytes) -> bytes:
    return content[:at] + new + content[at + len(new) :]


def edit(name: str, change: Callable[[bytes], bytes]) -> Change:
    return lambda data: (data / name).write_bytes(change((data / name).read_bytes()))


def manifest(**parts: object) -> Change:
    return lambda data: (data / "corpus.json").write_text(json.dumps({"made_by": MADE_BY, **parts}))


def text(name: str, content: str | bytes) -> Change:
    return edit(name, lambda _: content.encode() if isinstance(content, str) else content)


def folder(name: str) -> Change:
    def make(data: Path) -> None:
        (data / name).unlink(missing_ok=True)
        (data / name).mkdir()

    return make


def made_then(change: Change) -> Change:
    """A folder that knows its files, and is changed."""

    def make(data: Path) -> None:
        manifest(files=describe_files(data, DIGESTS))(data)
        change(data)

    return make


def with_first_size(index: bytes, size: int) -> bytes:
    """The sum of the first two sizes is kept."""
    both = int(np.frombuffer(index, "<i4", 2, HEAD).sum())
    return with_bytes(index, HEAD, struct.pack("<ii", size, both - size))


def last_symbols_exchanged(data: Path) -> None:
    lines = (data / "dict.txt").read_text().splitlines()
    (data / "dict.txt").write_text("\n".join([*lines[:-2], lines[-1], lines[-2]]) + "\n")


COUNTS = {"tokens": "x", "bytes": 1, "words": 1, "documents": 1}
DAMAGE = {
    "a folder for a split": (folder("test.bin"), "has no test.bin"),
    "a folder beside the splits": (folder("more.bin"), "more.bin is not a file, but is named like one of a split"),
    "a link to nothing": (lambda data: (data / "x.idx").symlink_to("nowhere"), "x.idx is not a file"),
    "no dictionary": (lambda data: (data / "dict.txt").unlink(), "has no dict.txt"),
    "an empty dictionary": (text("dict.txt", ""), "dict.txt line 1 is missing, the dictionary is empty"),
    "a binary dictionary": (text("dict.txt", b"a 1\n\xff\xfe\n"), "dict.txt line 2 is not UTF-8"),
    "no counts": (text("dict.txt", "a 1\nb\n"), "dict.txt line 2 is not a symbol with its count"),
    "a symbol twice": (text("dict.txt", "a 1\nb 1\na 1\n"), "dict.txt line 3 has the symbol 'a' a second time"),
    "a special": (text("dict.txt", "a 1\n<unk> 1\n"), "dict.txt line 2 has the symbol '<unk>'"),
    "a short dictionary": (text("dict.txt", "a 1\n"), r"test.bin holds the number \d+, where dict.txt has 5 symbols"),
    "no index": (text("test.idx", b"nonsense" * 100), "test.idx is not an mmap index"),
    "an empty index": (text("test.idx", b""), "test.idx is not an mmap index"),
    "a cut head": (edit("test.idx", lambda c: c[:20]), "test.idx is not an mmap index"),
    "an unknown number type": (edit("test.idx", lambda c: with_bytes(c, 17, b"\x07")), "test.idx is not an mmap index"),
    "too many items": (edit("test.idx", lambda c: with_bytes(c, 18, b"\xff" * 8)), "test.idx is cut short"),
    "another version": (edit("test.idx", lambda c: with_bytes(c, 9, b"\x07")), "index of version 7, not 1: binarise"),
    "a cut index": (edit("test.idx", lambda c: c[:50]), "test.idx is cut short"),
    "an index without its last byte": (edit("test.idx", lambda c: c[:-1]), "test.idx is cut short"),
    "another size": (edit("test.idx", lambda c: with_bytes(c, HEAD, b"\xff")), "test.bin does not hold the tokens"),
    "a negative size": (edit("test.idx", lambda c: with_first_size(c, -1)), "test.bin does not hold the tokens"),
    "another place": (edit("test.idx", lambda c: c[:-1] + b"\x7f"), "test.idx is damaged, its items do not follow"),
    "sizes moved": (edit("test.idx", lambda c: with_first_size(c, 1)), "test.idx is damaged, its items do not follow"),
    "a cut text": (edit("test.bin", lambda c: c[:-1]), "test.bin does not hold the tokens that its index counts"),
    "a long text": (edit("test.bin", lambda c: c + b"\0\0"), "test.bin does not hold the tokens that its index counts"),
    "unknown symbols": (edit("test.bin", lambda c: c[:-2] + b"\xff\xfe"), "test.bin holds the number 65279"),
    "a list for a manifest": (text("corpus.json", "[1]"), r"corpus.json line 1 is not a JSON object \(it is a list\)"),
    "a cut manifest": (text("corpus.json", '{\n"made_by": '), "corpus.json line 2 is not a JSON object"),
    "a binary manifest": (text("corpus.json", b"{\n\n\xff"), r"corpus.json line 3 is not a JSON object \(not UTF-8\)"),
    "a deep manifest": (text("corpus.json", "[" * 200_000), r"corpus.json line 1 .*nested too deep\): restore it"),
    "a folder for a maker": (text("corpus.json", '{"made_by": ["x"]}'), "made_by of the corpus must be text"),
    "a list for splits": (manifest(splits=[1]), "splits of the corpus must be a table, not .*: restore it or delete"),
    "a list for a record": (manifest(splits={"test": [1]}), "test of splits of the corpus must be a table"),
    "text for a count": (manifest(splits={"test": COUNTS}), "tokens of test of .* must be a whole number, not 'x'"),
    "a number for files": (manifest(files=3), "files of the corpus must be a table"),
    "another tokenizer": (manifest(tokenizer={"kind": "abc"}), "kind of tokenizer .* must be bpe or gpt2 or words"),
    "an exchanged dictionary": (made_then(last_symbols_exchanged), "dict.txt is not the one that the corpus was made"),
    "a flipped bit": (made_then(edit("test.bin", lambda c: bytes([c[0] ^ 1]) + c[1:])), "test.bin is not the one that"),
}


@pytest.fixture
def data(corpus: Path, tmp_path: Path) -> Path:
    shutil.copytree(corpus, tmp_path / "data")
    return tmp_path / "data"


@pytest.mark.parametrize("kind", DAMAGE)
def test_a_damaged_folder_is_refused_before_any_work(data: Path, kind: str) -> None:
    check_folder(data, "test")
    damage, words = DAMAGE[kind]
    (data / "corpus.json").write_text("{}")
    damage(data)
    with pytest.raises(UserError, match=words) as caught:
        check_folder(data, "test")
    assert str(data) in str(caught.value) and "\n" not in str(caught.value)


def test_readers_refuse_it_too(data: Path) -> None:
    assert count_tokens(data, "test") == len(read_split(data, "test")[0])
    edit("test.bin", lambda c: c[:-2])(data)
    with pytest.raises(UserError, match="test.bin does not hold the tokens that its index counts"):
        read_split(data, "test")
    edit("test.idx", lambda c: c[:30])(data)
    for read in (count_tokens, read_split):
        with pytest.raises(UserError, match="test.idx is cut short"):
            read(data, "test")


COMMANDS = {
    "eval": "eval {checkpoint} {data} --lengths 64",
    "sliding": "sliding {checkpoint} {data} --windows 16 --out {out}",
    "erf": "erf {checkpoint} {data} --out {out}",
    "train": "train {data} --rpe alibi --out {out} --tokens 32",
    "sweep": "sweep {data} --encodings alibi --lengths 64 --out {out}",
}


@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_that_reads_a_folder_checks_it(
    command: str, data: Path, trained: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for split in ("train", "test"):
        content = (data / f"{split}.bin").read_bytes()
        (data / f"{split}.bin").write_bytes(content[:-2] + b"\xff\xff")
    words = COMMANDS[command].format(checkpoint=trained, data=data, out=tmp_path / "out").split()
    split, symbols = "train" if command in ("train", "sweep") else "test", len(read_dictionary(data / "dict.txt"))
    why = f"holds the number 65535, where dict.txt has {symbols} symbols: binarise the data again"
    assert error_of(capsys, *words) == f"error: {data}/{split}.bin {why}\n"
    assert not (tmp_path / "out").exists()


def test_what_is_not_damaged_is_used(data: Path) -> None:
    from fairseq.data import Dictionary

    before = corpus_digest(data)
    for content in ("{}", '{"made_by": "me", "splits": 3}'):  # of somebody else
        (data / "corpus.json").write_text(content)
        check_folder(data, "train", "valid", "test")
    manifest(files=describe_files(data, DIGESTS), splits={"test": {"tokens": 3}}, later=[1])(data)
    check_folder(data, "test")
    assert read_units(data, "test") is None and corpus_digest(data) == before
    symbols = (data / "dict.txt").read_text() + "a-new-word 0\na 7 #fairseq:overwrite\na 8 #fairseq:overwrite\n"
    (data / "dict.txt").write_text(symbols.rstrip("\n"))
    assert read_dictionary(data / "dict.txt") == Dictionary.load(str(data / "dict.txt")).symbols


@pytest.mark.parametrize("split", ["", "../data/test", "./test", "/test"])
def test_a_split_is_one_of_the_folder(split: str, data: Path) -> None:
    """Another folder's text would be taken for this one's."""
    with pytest.raises(UserError, match="is not the name of a split: name one of .*data, such as test"):
        check_folder(data, split)


VOCABULARIES: dict[str, tuple[Change, str]] = {
    "a list": (text("corpus.json", "[]"), "corpus.json line 1 is not a JSON object"),
    "no model": (manifest(tokenizer={"kind": "bpe"}), "has no spm.model: prepare it again"),
    "a binary dictionary": (text("dict.txt", b"\xff"), "dict.txt line 1 is not UTF-8"),
}


@pytest.mark.parametrize("kind", VOCABULARIES)
def test_a_damaged_vocabulary_is_one_line(
    kind: str, data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    manifest(tokenizer={"kind": "words"}, files=describe_files(data, ["dict.txt"]))(data)
    damage, words = VOCABULARIES[kind]
    damage(data)
    (tmp_path / "a.txt").write_text("some text")
    said = error_of(capsys, "prepare", tmp_path / "a.txt", "--vocab-from", data, "--out", tmp_path / "d")
    assert re.search(words, said) and not (tmp_path / "d").exists()
