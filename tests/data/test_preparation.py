"""What a preparation leaves behind when it fails or is repeated, and bad sources and settings in one line each."""

from __future__ import annotations

import errno
import gzip
import lzma
import os
import re
import sys
import threading
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from conftest import error_of, run_here
from preparing import TEXTS, contents, everything, fill, finished, ignored, options, refused, write_rows, write_texts

from fairseq_rpe.core.errors import UserError
from fairseq_rpe.data import vocabulary
from fairseq_rpe.data.folder import read_manifest
from fairseq_rpe.data.pipeline import prepare_corpus
from fairseq_rpe.data.prepare_options import PrepareOptions
from fairseq_rpe.data.stream import SplitWriter
from fairseq_rpe.data.tokenization import Tokenizer
from fairseq_rpe.data.vocabulary import BpeLearner
from fairseq_rpe.utils.files import exclusive_lock

Patch = pytest.MonkeyPatch
Captured = pytest.CaptureFixture[str]


@pytest.fixture(scope="module")
def made(made_once) -> Path:
    return made_once("prepared-texts", fill) / "corpus"


@pytest.fixture
def rows(tmp_path: Path) -> Path:
    """Few short documents, for what does not depend on the text."""
    return write_rows(tmp_path / "rows.jsonl", [f"word{number} and more\n" for number in range(60)])


def quick(dest: Path, rows: Path, **changes: Any) -> PrepareOptions:
    return options(dest, rows, tokenizer="words", vocab_size=None, **changes)


def test_second_call_does_nothing_and_damage_is_repaired(rows: Path, tmp_path: Path, monkeypatch: Patch) -> None:
    dest = tmp_path / "corpus"
    prepare_corpus(quick(dest, rows), ignored)
    first = contents(dest)
    (dest / "train.bin").write_bytes(b"damaged")
    prepare_corpus(quick(dest, rows), ignored)
    assert contents(dest) == first
    monkeypatch.setattr(SplitWriter, "add", lambda *_: pytest.fail("built again"))
    said: list[str] = []
    prepare_corpus(quick(dest, rows, workers=3), said.append)
    assert said == [f"{dest} is up to date"]


@pytest.mark.parametrize("kind", [KeyboardInterrupt, OSError(errno.ENOSPC, "disk full")])
@pytest.mark.parametrize("existing", [False, True])
@pytest.mark.parametrize("where", ["learning", "encoding", "publishing"])
def test_failure_leaves_the_old_state(
    rows: Path, tmp_path: Path, monkeypatch: Patch, kind: Any, existing: bool, where: str
) -> None:
    dest = tmp_path / "corpus"
    if existing:
        prepare_corpus(quick(dest, rows), ignored)
    before = contents(dest) if existing else None
    places: dict[str, tuple[Any, str]] = {
        "learning": (vocabulary.WordLearner, "write"),
        "encoding": (SplitWriter, "add"),
    }
    owner, name = places.get(where, (Path, "rename"))
    original = getattr(owner, name)

    def fail(*args: Any) -> Any:
        # Moving the old corpus away and back works, moving the new one in does not.
        if name == "rename" and args[0].name != "made":
            return original(*args)
        raise kind

    monkeypatch.setattr(owner, name, fail)
    with pytest.raises(UserError if isinstance(kind, OSError) else kind) as caught:
        prepare_corpus(quick(dest, rows, seed=2, overwrite=True), ignored)
    if isinstance(kind, OSError):
        assert str(caught.value).startswith(f"no space left on the disk while writing {dest}: ")
    assert (contents(dest) if existing else None) == before
    assert [path for path in tmp_path.iterdir() if path != rows] == ([dest] if existing else [])


def test_leftovers_of_a_killed_run_are_removed(rows: Path, tmp_path: Path) -> None:
    (tmp_path / ".corpus.prepare-123" / "made").mkdir(parents=True)
    others = [tmp_path / ".corpus.prepare-mine", tmp_path / ".other.prepare-123"]
    for other in others:
        other.mkdir()
    prepare_corpus(quick(tmp_path / "corpus", rows), ignored)
    assert sorted(tmp_path.iterdir()) == sorted([*others, rows, tmp_path / "corpus"])


def test_destination_may_be_a_link_or_an_empty_folder(rows: Path, tmp_path: Path) -> None:
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "corpus").symlink_to(tmp_path / "elsewhere")
    prepare_corpus(quick(tmp_path / "corpus", rows), ignored)
    assert (tmp_path / "corpus").is_symlink() and (tmp_path / "elsewhere" / "corpus.json").is_file()
    (tmp_path / "folder").mkdir()
    assert tmp_path.joinpath("elsewhere").stat().st_mode == tmp_path.joinpath("folder").stat().st_mode


def test_foreign_destinations_are_kept(rows: Path, tmp_path: Path, monkeypatch: Patch) -> None:
    (inner := tmp_path / "above/inner").mkdir(parents=True)
    with monkeypatch.context() as patch:
        patch.chdir(inner)
        for dest in (Path(), Path("..")):
            assert "is the current folder or one above it" in refused(quick(dest, rows))
    assert list(inner.parent.rglob("*")) == [inner]
    (dest := tmp_path / "folder").mkdir()
    (dest / "thesis.tex").write_text("years of work")
    assert "not made by this command" in refused(quick(dest, rows))
    (dest / "corpus.json").write_text('{"made_by": "me"}')
    assert "not made by this command" in refused(quick(dest, rows))
    assert contents(dest)["thesis.tex"] == b"years of work"
    assert "is a file, not a folder" in refused(quick(rows / "corpus", rows))
    assert "fairseq splits paths" in refused(quick(tmp_path / f"a{os.pathsep}b", rows))
    if os.geteuid():
        (tmp_path / "closed").mkdir(mode=0o500)
        assert "closed may not be read or written" in refused(quick(tmp_path / "closed" / "corpus", rows))
    prepare_corpus(quick(tmp_path / "corpus", rows), ignored)
    (tmp_path / "corpus" / "checkpoint.pt").write_bytes(b"weights")
    assert "checkpoint.pt" in refused(quick(tmp_path / "corpus", rows, seed=2))
    assert (tmp_path / "corpus" / "checkpoint.pt").read_bytes() == b"weights"


def test_a_corpus_made_with_other_settings_is_replaced_only_if_that_is_said(rows: Path, tmp_path: Path) -> None:
    dest = tmp_path / "corpus"
    prepare_corpus(quick(dest, rows), ignored)
    before = contents(dest)
    message = refused(quick(dest, rows, seed=2, split_by="part"))
    assert f"{dest} was made with other settings" in message and "--overwrite" in message
    assert "seed is 1 there, 2 here" in message and "split_by is the default there, part here" in message
    assert "of another text" in refused(quick(dest, write_rows(tmp_path / "more.jsonl", ["a b\n"] * 9)))
    prepare_corpus(quick(tmp_path / "other", rows, vocab_from=dest, seed=3), ignored)
    assert "with another vocabulary" in refused(quick(tmp_path / "other", rows, seed=3))
    assert contents(dest) == before
    prepare_corpus(quick(dest, rows, seed=2, overwrite=True), ignored)
    assert read_manifest(dest)["options"]["seed"] == 2
    (dest / "train.bin").write_bytes(b"damaged")  # with the same settings it is made again
    prepare_corpus(quick(dest, rows, seed=2), ignored)
    assert read_manifest(dest)["options"]["seed"] == 2 and (dest / "train.bin").read_bytes() != b"damaged"


@pytest.mark.parametrize("command", ["prepare", "prepare-corpus openwebtext2 --from"])
def test_commands_replace_a_corpus_only_if_that_is_said(command: str, rows: Path, tmp_path: Path) -> None:
    words = [*command.split(), rows, "--tokenizer", "words", "--workers", "1", "--out", tmp_path / "d"]
    run_here(*words)
    assert "seed is 1 there, 2 here" in run_here(*words, "--seed", "2", ok=False).stderr
    run_here(*words, "--seed", "2", "--overwrite")
    run_here(*words, "--seed", "2")


def test_unknown_words_are_reported(rows: Path, tmp_path: Path) -> None:
    said: list[str] = []
    prepare_corpus(quick(tmp_path / "d", rows), said.append)
    assert any("tokens of test are unknown words: bits per byte" in line for line in said)


def test_a_failure_removes_folders_above_and_names_its_cause(rows: Path, tmp_path: Path, monkeypatch: Patch) -> None:
    before = sorted(tmp_path.iterdir())
    refused(quick(tmp_path / "new" / "folder" / "corpus", rows, max_bytes=1))
    assert sorted(tmp_path.iterdir()) == before

    def limited(*_: object, **__: object) -> None:
        raise OSError(errno.EMFILE, os.strerror(errno.EMFILE), "/somewhere/else")

    monkeypatch.setattr("fairseq_rpe.data.atomic_folder.write_json", limited)
    assert refused(quick(tmp_path / "new" / "corpus", rows)) == "too many files are open: raise ulimit -n"


def test_a_preparation_waits_for_another_and_outlives_the_removal_of_the_folder(
    rows: Path, tmp_path: Path, capsys: Captured
) -> None:
    parent = tmp_path / "new"
    parent.mkdir()
    with exclusive_lock(parent, "busy"):
        other = threading.Thread(target=prepare_corpus, args=(quick(parent / "corpus", rows), ignored))
        other.start()
        while not (waiting := capsys.readouterr().err):
            assert other.is_alive()
            other.join(0.01)
        assert waiting == f"waiting for another preparation in {parent}\n" and not list(parent.iterdir())
        parent.rmdir()
    other.join(60)
    assert len(everything(parent / "corpus")) == 60


def test_changing_sources_are_noticed(tmp_path: Path, monkeypatch: Patch) -> None:
    folder = write_texts(tmp_path / "texts")
    original = BpeLearner.write

    def write(*args: Any) -> None:
        (folder / "part0" / "00.txt").write_text("something else")
        original(*args)

    monkeypatch.setattr(BpeLearner, "write", write)
    assert "changed while they were read" in refused(options(tmp_path / "corpus", folder))


def test_a_tokenizer_that_changes_the_text_is_noticed(made: Path, tmp_path: Path, monkeypatch) -> None:
    original = Tokenizer.encode
    monkeypatch.setattr(Tokenizer, "encode", lambda self, word: original(self, word.replace("ring", "gnir")))
    message = refused(options(tmp_path / "corpus", made.parent / "texts", vocab_size=None, vocab_from=made))
    assert "the tokenizer changes" in message and "ring" in message


def of_bytes(content: bytes) -> Callable[[Path], object]:
    return lambda path: path.write_bytes(content)


def zipped(*changes: tuple[bytes, int, bytes], name: str = "a.txt") -> Callable[[Path], None]:
    """An archive of one text, and other bytes at an offset from the first place of the given ones."""

    def make(path: Path) -> None:
        with zipfile.ZipFile(path, "w") as archive:
            archive.writestr(name, "some text")
        content = bytearray(path.read_bytes())
        for begin, at, new in changes:
            place = content.index(begin) + at
            content[place : place + len(new)] = new
        path.write_bytes(content)

    return make


FILE, DIRECTORY = b"PK\x03\x04", b"PK\x01\x02"  # what begins the headers in an archive
SOURCES: dict[str, tuple[Callable[[Path], object], str]] = {
    "latin.txt": (of_bytes(b"x" * 5000 + b"caf\xe9 au"), "latin.txt is not UTF-8 at byte 5003"),
    "cut.txt": (of_bytes(b"caf\xc3"), "cut.txt is not UTF-8 at byte 3"),
    "a.jsonl": (of_bytes(b'{"text": "a"}\n{"text": "caf\xe9"}\n'), "a.jsonl line 2 is not UTF-8 at byte 27"),
    "b.jsonl": (of_bytes(b'{"text": "a"}\n{"te\n'), "b.jsonl line 2 is not a JSON"),
    "c.jsonl": (of_bytes(b"[1]\n"), "c.jsonl line 1 is not a JSON object"),
    "d.jsonl": (of_bytes(b'{"body": "a"}\n'), "d.jsonl line 1 has no field 'text' but body: name one with"),
    "e.jsonl": (of_bytes(b'{"text": "a"}\n{"text": 3}\n'), "line 2 has a 'text' that is not a string: name another"),
    "deep.jsonl": (
        of_bytes(b'{"text": "a"}\n' + b"[" * 200_000),
        "line 2 is not a JSON object .nested too deep.: repair",
    ),
    "f.jsonl": (of_bytes(b'{"text": "a\\ud800"}\n'), "half a surrogate pair at character 1"),
    "long.jsonl": (of_bytes(b'{"text": ' + b"9" * 5000 + b"}\n"), "long.jsonl line 1 is not a JSON object"),
    "g.txt.gz": (of_bytes(gzip.compress(b"abc" * 999)[:-9]), "g.txt.gz is cut short or damaged"),
    "h.txt.xz": (of_bytes(lzma.compress(b"abc" * 999)[:-9]), "h.txt.xz is cut short or damaged"),
    "l.txt.bz2": (of_bytes(b"BZ nonsense"), "l.txt.bz2 is cut short or damaged"),
    "empty.txt": (of_bytes(b""), "the train split of 0 documents would be empty: give more documents"),
    "one.txt": (of_bytes(b"just this"), "the valid split of 1 documents would be empty: give more documents"),
    "y.png": (of_bytes(b"\x89PNG\0\0"), "y.png is a binary file: give text, .jsonl or .parquet"),
    "i.zip": (of_bytes(b"PK nonsense"), "i.zip is cut short or damaged .File is not a zip file.: get it again"),
    "fifo.txt": (os.mkfifo, "fifo.txt can be read only once: write its text into a file"),
    "parquet.zip": (zipped(name="a.parquet"), "a.parquet is parquet inside an archive: unpack"),
    "encrypted.zip": (zipped((FILE, 6, b"\1"), (DIRECTORY, 8, b"\1")), "cannot read .*encrypted.zip:a.txt .*encrypted"),
    # a compression that no program here knows
    "method.zip": (zipped((FILE, 8, b"c"), (DIRECTORY, 10, b"c")), "cannot read .*method.zip:a.txt .*not supported"),
    "newer.zip": (zipped((DIRECTORY, 6, b"c")), "cannot read .*newer.zip .zip file version 9.9.: unpack"),
    "corrupt.zip": (zipped((b"some text", 1, b"a")), "corrupt.zip:a.txt is cut short or damaged"),
}


def test_a_damaged_source_is_one_line(tmp_path: Path, capsys: Captured) -> None:
    for name, (make, words) in SOURCES.items():
        make(path := tmp_path / name)
        assert re.search(words, error_of(capsys, "prepare", path, "--out", tmp_path / "d", "--workers", 1)), name
        path.unlink()
        assert not os.listdir(tmp_path)


def test_a_folder_without_text_is_refused(tmp_path: Path) -> None:
    (folder := tmp_path / "empty").mkdir()
    assert "empty has no text, there are no files that could be" in refused(options(tmp_path / "corpus", folder))
    (folder / "x.png").write_bytes(b"\x89PNG\0\0")
    assert "all 1 files are binary" in refused(options(tmp_path / "corpus", folder))


SETTINGS: list[tuple[dict[str, Any], str]] = [
    ({"train": ()}, "no text is given: name folders or files"),
    ({"valid": (Path("other"),)}, "--valid is given without --test: give both, or none"),
    ({"test_fraction": 1.0}, "--test-fraction 1.0 is out of range"),
    ({"valid_fraction": float("nan")}, "--valid-fraction nan is out of range: use more than 0 and less than 1"),
    ({"valid_fraction": 0.5, "test_fraction": 0.5}, "their sum must be below 1"),
    ({"max_bytes": 0}, "--max-bytes 0 is out of range"),
    ({"max_bytes": 4}, "another --seed or a larger --max-bytes"),
    ({"split_by": "date"}, "--split-by date is not one of text, path, part"),
    ({"workers": 0}, "--workers 0 is out of range: use 1 to 256"),
    ({"vocab_size": 10**6}, "--vocab-size 1000000 is too large for this text: the largest possible is "),
    ({"vocab_from": Path("other")}, "--vocab-size has no effect"),
    ({"vocab_from": Path("other"), "vocab_size": None}, "other is not a prepared corpus: name a folder made by"),
    ({"tokenizer": "gpt2", "vocab_size": None}, "--tokenizer gpt2 and --gpt2 FOLDER go together"),
    ({"documents": 1, "max_bytes": 1}, "--documents and --max-bytes are two limits: give one"),
]


def test_bad_settings_are_one_line_and_leave_nothing(made: Path, tmp_path: Path) -> None:
    for changes, words in SETTINGS:
        given = {"vocab_size": 400, "workers": 1, "train": (made.parent / "texts",), **changes}
        assert words in refused(PrepareOptions(out=tmp_path / "corpus", **given)), changes


NO_EFFECT = [
    ("--valid a.txt --test a.txt --seed 3", "--seed has no effect"),
    ("--valid a.txt --test a.txt --test-fraction 0.1", "--test-fraction has no effect"),
    ("--seed ٣", "'٣' is not a whole number"),
    ("--tokenizer words --sample-bytes 200000", "--sample-bytes is for a vocabulary that bpe learns"),
    ("--vocab-from other --sample-bytes 200000", "--sample-bytes is for a vocabulary that bpe learns"),
    ("--vocab-from other --tokenizer words", "--vocab-from also gives the tokenizer"),
    ("--split-by part --seed 3", "--seed has no effect with --split-by part"),
]


@pytest.mark.parametrize(("flags", "words"), NO_EFFECT)
def test_what_would_have_no_effect_is_refused(flags, words, tmp_path, capsys, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("a.txt").write_text("some text\n")
    assert words in error_of(capsys, "prepare", "a.txt", "--out", "made", *flags.split())
    assert not Path("made").exists()


def test_other_encodings_can_be_left_out(made: Path, tmp_path: Path) -> None:
    folder = write_texts(tmp_path / "texts")
    (folder / "latin.txt").write_bytes(b"caf\xe9")
    (folder / "blank.txt").write_bytes(b" \n\n")
    said: list[str] = []
    given: dict[str, Any] = {"skip_invalid": True, "vocab_size": None, "vocab_from": made}
    manifest = prepare_corpus(options(tmp_path / "corpus", folder, **given), said.append)
    assert manifest["skipped"] == {"not UTF-8": 1, "without text": 1}
    assert "left out: 1 without text, 1 not UTF-8" in said
    assert sorted(everything(tmp_path / "corpus")) == sorted(finished(TEXTS))


def test_damage_in_zstd_and_parquet_and_no_library_for_it(tmp_path: Path, monkeypatch: Patch) -> None:
    for ending in ("jsonl.zst", "parquet"):
        path = write_rows(tmp_path / f"rows.{ending}", TEXTS)
        path.write_bytes(path.read_bytes()[:-9])
        assert f"rows.{ending} is cut short or damaged" in refused(options(tmp_path / "corpus", path))
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    assert refused(options(tmp_path / "corpus", path)) == f"{path} needs the package pyarrow: pip install pyarrow"
