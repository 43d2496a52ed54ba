"""The code corpus: byte-exact tokenizer, split by file, atomic and repeatable preparation."""

from __future__ import annotations

import argparse
import errno
import os
import random
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest

from fairseq_rpe.cli import prepare as command
from fairseq_rpe.core.errors import UserError
from fairseq_rpe.data import binarise, place
from fairseq_rpe.data import prepare as preparing
from fairseq_rpe.data.corpus import SPLITS, Corpus, SourceFile, read_corpus, split_files
from fairseq_rpe.data.prepare import PrepareOptions, prepare
from fairseq_rpe.data.tokenizer import FAIRSEQ_SPECIALS, Tokenizer, decode, train_tokenizer

SPLIT_AT = "\t\v\f\r\x1c\x1d\x1e\x1f\x85\xa0\u1680\u2000\u2003\u2028\u2029\u202f\u205f\u3000"
NASTY = [
    "",
    " ",
    "    indented",
    "                                                  far right",
    "trailing   ",
    "\ttab\t\ttabs ",
    "carriage return\r",
    *(f"a{c}b {c} {c}{c}c" for c in SPLIT_AT),
    SPLIT_AT,
    "▁ literal ▁▁ signs ▁",
    "▅ reserved by the trainer ▅▅",
    "<s> </s> <unk> <pad> <0x41> <0x0a> <0xC3><0xA9> madeupword0000 madeupword0001x",
    "</s>",
    "<<s>> <</s>></s",
    "#fairseq:overwrite 1",
    "NUL \0 and \x01 \x7f \x1b",
    "\ufeffbyte order mark",
    "é è ü ß Ж 漢字 かな 🙂 👩‍👩‍👧 e\u0301 ﬁ Å ①",
    "\u200b\u200d\u2060\u00ad\ufffd\uffff\U0010ffff\u2047",
    "x" * 70_000,
    "word " * 20_000,
    " " * 5_000,
]

CODE = """\
class Reader{n}:
    \"\"\"Reads things, number {n}.\"\"\"

    def __init__(self, path, size={n}):
        self.path = path
\tself.size = size  # a tab

    def read(self, count):
        for index in range(count):
            if index % {n} == 0:
                yield self.path.open().read(self.size + index)
        return None
"""


def write_sources(folder: Path, count: int = 24) -> Path:
    for n in range(1, count + 1):
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
    """A real preparation, fairseq-preprocess included; the file names have what fairseq splits at."""
    dest = tmp_path_factory.mktemp("made, with comma") / "corpus"
    prepare(options(source, dest))
    return dest


@pytest.fixture(scope="module")
def tokenizer(made: Path) -> Tokenizer:
    return Tokenizer.load(made / "spm.model")


def options(source: Path | None, dest: Path, **changes: Any) -> PrepareOptions:
    given = {"vocab_size": 400, "valid_fraction": 0.3, "test_fraction": 0.2, **changes}
    return PrepareOptions(dest=dest, source=source, **given)


def contents(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def refused(options: PrepareOptions) -> str:
    """The message of the refusal, after checking that it is one line and left nothing behind."""
    before = sorted(options.dest.parent.iterdir()) if options.dest.parent.is_dir() else []
    with pytest.raises(UserError) as caught:
        prepare(options)
    assert "\n" not in str(caught.value)
    assert before == (sorted(options.dest.parent.iterdir()) if options.dest.parent.is_dir() else [])
    return str(caught.value)


@pytest.fixture
def no_binarising(monkeypatch: pytest.MonkeyPatch) -> None:
    """Stands in for the slow fairseq-preprocess where its work is not what is tested."""

    def write(folder: Path, dest: Path, workers: int) -> None:
        (dest / "dict.txt").write_bytes((folder / "dict.txt").read_bytes())
        for split in SPLITS:
            (dest / f"{split}.bin").write_bytes((folder / f"{split}.tok").read_bytes())
            (dest / f"{split}.idx").write_bytes(b"")

    monkeypatch.setattr(binarise, "preprocess", write)
    monkeypatch.setattr(binarise, "check_split", lambda *_: None)


# The tokenizer


@pytest.mark.parametrize("line", NASTY, ids=lambda line: repr(line[:24]))
def test_nasty_lines_round_trip(tokenizer: Tokenizer, line: str) -> None:
    symbols = tokenizer.encode(line)
    assert decode(symbols) == line
    assert_survives_fairseq(tokenizer, symbols)


def assert_survives_fairseq(tokenizer: Tokenizer, symbols: list[str]) -> None:
    text = " ".join(symbols)
    assert text.split() == symbols
    assert text.splitlines() == ([text] if text else [])
    assert set(symbols) <= set(tokenizer.symbols)
    assert not set(symbols) & set(FAIRSEQ_SPECIALS)


def random_line(rng: random.Random) -> str:
    pools: list[Iterable[str]] = [SPLIT_AT, "▁▅ <>/s0x41unkpad", "  \tabcdef_().=:"]
    characters = [
        rng.choice(list(rng.choice(pools)))
        if rng.random() < 0.7
        else chr(rng.choice([*range(10), *range(11, 0xD800), *range(0xE000, 0x110000, 37)]))
        for _ in range(rng.randrange(60))
    ]
    return "".join(characters)


def test_random_unicode_round_trips(tokenizer: Tokenizer) -> None:
    rng = random.Random(7)
    lines = [random_line(rng) for _ in range(300)]
    for line, symbols in zip(lines, tokenizer.encode_lines(lines, threads=2), strict=True):
        assert decode(symbols) == line
        assert_survives_fairseq(tokenizer, symbols)


def test_every_character_round_trips(tokenizer: Tokenizer) -> None:
    characters = [chr(i) for i in range(0x3100) if i != 10]
    lines = ["".join(characters[i : i + 50]) for i in range(0, len(characters), 50)]
    assert [decode(symbols) for symbols in tokenizer.encode_lines(lines)] == lines


def test_training_on_nasty_text_learns_no_unsafe_piece() -> None:
    lines = NASTY * 20 + ["def f(self): return </s> <unk> <0x41> madeupword0000 ▁x"] * 50
    tokenizer = Tokenizer(train_tokenizer(lines, 380))
    assert len(tokenizer.symbols) == 380 - len(FAIRSEQ_SPECIALS)
    assert len(set(tokenizer.symbols)) == len(tokenizer.symbols)
    assert all(symbol.split() == [symbol] for symbol in tokenizer.symbols)
    for line, symbols in zip(lines, tokenizer.encode_lines(lines), strict=True):
        assert decode(symbols) == line


def test_indentation_is_few_symbols(tokenizer: Tokenizer) -> None:
    assert len(tokenizer.encode(" " * 8)) == 1
    assert tokenizer.encode("") == []


def test_newline_is_refused(tokenizer: Tokenizer) -> None:
    with pytest.raises(ValueError, match="newline"):
        tokenizer.encode("a\nb")


def test_decode_of_what_only_a_model_emits() -> None:
    assert decode(["a", "</s>", "▁b", "<0xC3>", "<unk>", "<pad>"]) == "a\n b\ufffd\ufffd"


def test_foreign_models_are_refused(tmp_path: Path) -> None:
    import io

    import sentencepiece

    model = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(["some text for a usual model"] * 9),
        model_writer=model,
        vocab_size=30,
        hard_vocab_limit=False,
        minloglevel=3,
    )
    with pytest.raises(UserError, match="prepare-stdlib"):
        Tokenizer(model.getvalue())
    with pytest.raises(UserError, match="no sentencepiece model"):
        Tokenizer(b"nonsense")
    with pytest.raises(UserError, match="does not exist"):
        Tokenizer.load(tmp_path / "spm.model")


# Reading and splitting


def test_split_of_a_file_depends_on_nothing_else(source: Path) -> None:
    everything = read_corpus(source, 1, None)
    splits = split_files(everything, 1, 0.3, 0.2)
    assert sorted(f.path for files in splits.values() for f in files) == [f.path for f in everything.files]
    fewer = Corpus(everything.files[::2], 0)
    for name, files in split_files(fewer, 1, 0.3, 0.2).items():
        assert set(files) <= set(splits[name])
    assert split_files(everything, 2, 0.3, 0.2) != splits


def test_digest_is_of_paths_and_contents() -> None:
    def digest(*files: tuple[str, bytes]) -> str:
        return Corpus(tuple(SourceFile(*file) for file in files), 0).digest

    assert digest(("a", b"bc")) == digest(("a", b"bc"))
    assert len({digest(("a", b"bc")), digest(("ab", b"c")), digest(("a", b"b"), ("c", b"")), digest()}) == 4


def test_max_bytes_takes_whole_files_repeatably(source: Path) -> None:
    kept = read_corpus(source, 1, 3000)
    assert 2000 < sum(len(f.content) for f in kept.files) <= 3000
    assert kept == read_corpus(source, 1, 3000)
    assert kept != read_corpus(source, 2, 3000)
    assert set(kept.files) < set(read_corpus(source, 1, None).files)


def test_files_without_a_last_newline_do_not_run_together() -> None:
    for content, text in {b"": b"", b"a": b"a\n", b"a\n": b"a\n", b"\r": b"\r\n"}.items():
        assert SourceFile("x", content).text == text


def test_library_leaves_out_packages_tests_and_other_encodings(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    left_out = ("site-packages/a.py", "test/b.py", "json/tests/c.py", "_sysconfigdata_x.py")
    for name in ("os.py", "json/tool.py", *left_out):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text("x = 1\n")
    (tmp_path / "latin.py").write_bytes(b"# -*- coding: latin-1 -*- \xe9\n")
    monkeypatch.setattr("sysconfig.get_path", lambda name: str(tmp_path))
    corpus = read_corpus(None, 1, None)
    assert [file.path for file in corpus.files] == ["json/tool.py", "os.py"]
    assert corpus.skipped == 1


# The whole preparation


def test_binarised_splits_decode_to_the_source(source: Path, made: Path) -> None:
    splits = split_files(read_corpus(source, 1, None), 1, 0.3, 0.2)
    for name in SPLITS:
        assert binarise.decode_split(made, name) == b"".join(file.text for file in splits[name])


def test_fairseq_reads_the_same_tokens(made: Path) -> None:
    from fairseq.data import Dictionary, data_utils

    dictionary = Dictionary.load(str(made / "dict.txt"))
    assert len(dictionary) == 400
    assert dictionary.symbols == binarise.read_dictionary(made / "dict.txt")
    manifest = place.read_manifest(made)
    assert manifest is not None
    for name in SPLITS:
        dataset = data_utils.load_indexed_dataset(str(made / name), dictionary)
        lines = [dataset[i].tolist() for i in range(len(dataset))]
        assert all(line[-1] == dictionary.eos() and min(line[:-1], default=4) > 3 for line in lines)
        assert len(lines) == manifest["splits"][name]["lines"]
        assert sum(map(len, lines)) == manifest["splits"][name]["tokens"]


def test_second_build_elsewhere_is_identical(source: Path, made: Path, tmp_path: Path) -> None:
    copy = write_sources(tmp_path / "copy")
    prepare(options(copy, tmp_path / "again", workers=1))
    assert contents(tmp_path / "again") == contents(made)
    assert (tmp_path / "again").stat().st_mode & 0o777 == tmp_path.joinpath("copy").stat().st_mode & 0o777


def test_same_text_and_options_do_nothing(source: Path, made: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(preparing, "_build", lambda *_: pytest.fail("built again"))
    said: list[str] = []
    manifest = prepare(options(source, made, workers=1), said.append)
    assert said == [f"{made} is up to date"]
    assert manifest == place.read_manifest(made)


@pytest.mark.usefixtures("no_binarising")
def test_other_options_text_or_damage_rebuild(tmp_path: Path) -> None:
    source, dest = write_sources(tmp_path / "source"), tmp_path / "corpus"
    prepare(options(source, dest))
    first = contents(dest)
    (dest / "valid.bin").write_bytes(b"damaged")
    prepare(options(source, dest))
    assert contents(dest) == first
    prepare(options(source, dest, seed=2))
    second = contents(dest)
    assert second["train.bin"] != first["train.bin"]
    (source / "package2" / "more.py").write_text("more = 1\n")
    prepare(options(source, dest, seed=2))
    assert contents(dest)["corpus.json"] != second["corpus.json"]
    assert sorted(tmp_path.iterdir()) == [dest, source]


@pytest.mark.usefixtures("no_binarising")
@pytest.mark.parametrize("kind", [KeyboardInterrupt, OSError(errno.ENOSPC, "disk full"), RuntimeError])
@pytest.mark.parametrize("existing", [False, True])
@pytest.mark.parametrize("where", ["preparing.train_tokenizer", "binarise.preprocess", "Path.rename"])
def test_failure_leaves_the_old_state(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: Any, existing: bool, where: str
) -> None:
    dest = tmp_path / "corpus"
    if existing:
        prepare(options(source, dest))
    before = contents(dest) if existing else None
    owner, name = {
        "preparing.train_tokenizer": (preparing, "train_tokenizer"),
        "binarise.preprocess": (binarise, "preprocess"),
        "Path.rename": (Path, "rename"),
    }[where]
    original = getattr(owner, name)

    def fail(*args: Any) -> Any:
        # Moving the old corpus away and back works, moving the new one in does not.
        if name == "rename" and args[0].name != "made":
            return original(*args)
        raise kind

    monkeypatch.setattr(owner, name, fail)
    with pytest.raises(UserError if isinstance(kind, OSError) else kind) as caught:
        prepare(options(source, dest, seed=2))
    if isinstance(kind, OSError):
        assert str(caught.value).startswith("no space left for ")
    assert (contents(dest) if dest.exists() else None) == before
    assert list(tmp_path.iterdir()) == ([dest] if existing else [])


@pytest.mark.usefixtures("no_binarising")
def test_leftovers_of_a_killed_run_are_removed(source: Path, tmp_path: Path) -> None:
    (tmp_path / ".corpus.prepare-123" / "work").mkdir(parents=True)
    others = [tmp_path / ".corpus.prepare-mine", tmp_path / ".other.prepare-123"]
    for folder in others:
        folder.mkdir()
    prepare(options(source, tmp_path / "corpus"))
    assert sorted(tmp_path.iterdir()) == sorted([*others, tmp_path / "corpus"])


@pytest.mark.usefixtures("no_binarising")
def test_destination_may_be_a_link_or_an_empty_folder(source: Path, tmp_path: Path) -> None:
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "corpus").symlink_to(tmp_path / "elsewhere")
    prepare(options(source, tmp_path / "corpus"))
    assert (tmp_path / "corpus").is_symlink()
    assert (tmp_path / "elsewhere" / "corpus.json").is_file()


# Bad input


def test_foreign_destinations_are_kept(source: Path, made: Path, tmp_path: Path) -> None:
    folder = tmp_path / "folder"
    folder.mkdir()
    (folder / "thesis.tex").write_text("years of work")
    assert "not made by this command" in refused(options(source, folder))
    (folder / "corpus.json").write_text('{"made_by": "me"}')
    assert "not made by this command" in refused(options(source, folder))
    file = tmp_path / "file"
    file.write_text("x")
    assert "is a file" in refused(options(source, file))
    assert contents(folder)["thesis.tex"] == b"years of work"
    added = made / "checkpoint.pt"
    added.write_bytes(b"weights")
    try:
        assert "checkpoint.pt" in refused(options(source, made, seed=2))
        assert added.read_bytes() == b"weights"
    finally:
        added.unlink()


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"vocab_size": 299}, "--vocab-size 299 is out of range: use 300 to 1000000"),
        ({"vocab_size": 10**12}, "--vocab-size 1000000000000 is out of range"),
        ({"vocab_size": 9999}, "--vocab-size 9999 is too large for this text: the largest possible is "),
        ({"valid_fraction": 0.0}, "--valid-fraction 0.0"),
        ({"valid_fraction": float("nan")}, "--valid-fraction nan"),
        ({"test_fraction": 1.5}, "--test-fraction 1.5"),
        ({"valid_fraction": 0.5, "test_fraction": 0.5}, "their sum must be less than 1"),
        ({"valid_fraction": 0.001, "test_fraction": 0.001}, "the valid split of 26 files would be empty"),
        ({"max_bytes": 0}, "--max-bytes 0"),
        ({"max_bytes": 400}, "larger --max-bytes"),
        ({"workers": 0}, "--workers 0"),
    ],
    ids=lambda value: str(value)[:30],
)
def test_bad_numbers(source: Path, tmp_path: Path, changes: dict[str, Any], words: str) -> None:
    assert words in refused(options(source, tmp_path / "corpus", **changes))


@pytest.mark.usefixtures("no_binarising")
def test_the_largest_possible_vocabulary_is_possible(source: Path, tmp_path: Path) -> None:
    largest = int(refused(options(source, tmp_path / "corpus", vocab_size=9999)).rsplit(" ", 1)[1])
    prepare(options(source, tmp_path / "corpus", vocab_size=largest))


def test_vocabulary_smaller_than_the_alphabet() -> None:
    lines = ["".join(chr(c) for c in range(start, start + 40)) for start in range(0x4E00, 0x4E00 + 400, 40)]
    with pytest.raises(UserError, match="--vocab-size 300 is too small for this text: use 660 or more"):
        train_tokenizer(lines, 300)


def test_text_too_small_for_any_vocabulary() -> None:
    with pytest.raises(UserError, match="the smallest allowed one, 300: give more text"):
        train_tokenizer(["ab"], 4096)
    with pytest.raises(UserError, match="give more text"):
        train_tokenizer(["\t\t"], 4096)


def test_bad_sources(tmp_path: Path) -> None:
    source, dest = tmp_path / "source", tmp_path / "dest" / "corpus"
    assert "is not a folder" in refused(options(source, dest))
    source.mkdir()
    assert "there are no .py files in it" in refused(options(source, dest))
    (source / "a.py").write_text("\n \n")
    assert "all 1 .py files are empty" in refused(options(source, dest))
    (source / "b.py").write_bytes(b"name = 'caf\xe9'\n")
    assert f"{source / 'b.py'} is not UTF-8 at byte 11" in refused(options(source, dest))
    assert not dest.parent.exists()


def test_unwritable_destination(source: Path, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("x")
    assert "cannot write" in refused(options(source, tmp_path / "file" / "corpus"))
    assert "fairseq splits paths" in refused(options(source, tmp_path / f"a{os.pathsep}b"))
    if os.geteuid():
        (tmp_path / "closed").mkdir(mode=0o500)
        assert "cannot write" in refused(options(source, tmp_path / "closed" / "corpus"))


def test_failing_preprocess_is_one_line(tmp_path: Path) -> None:
    binarise.write_dictionary(tmp_path / "dict.txt", ["a"])
    with pytest.raises(UserError, match="fairseq-preprocess failed with exit code 1: FileNotFound"):
        binarise.preprocess(tmp_path, tmp_path / "made", workers=1)


def test_full_disk_in_preprocess(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    python = tmp_path / "python"
    python.write_text("#!/bin/sh\necho 'OSError: [Errno 28] No space left on device' >&2\nexit 1\n")
    python.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(python))
    with pytest.raises(UserError, match="no space left for corpus"), place.writing(Path("corpus")):
        binarise.preprocess(tmp_path, tmp_path / "made", workers=1)


def test_changed_tokens_are_noticed(source: Path, made: Path, tmp_path: Path) -> None:
    for name, content in contents(made).items():
        (tmp_path / name).write_bytes(content)
    text, tokens = binarise.decode_split(made, "valid"), len(binarise.read_split(made, "valid")[0])
    binarise.check_split(tmp_path, "valid", text, tokens)
    with pytest.raises(UserError, match=f"{tokens} tokens instead of {tokens + 1}"):
        binarise.check_split(tmp_path, "valid", text, tokens + 1)
    with pytest.raises(UserError, match="differs from the source"):
        binarise.check_split(tmp_path, "valid", text.replace(b"Reader", b"Raeder"), tokens)
    unknown = b"\3\0" + (tmp_path / "valid.bin").read_bytes()[2:]
    (tmp_path / "valid.bin").write_bytes(unknown)
    with pytest.raises(UserError, match="1 unknown tokens"):
        binarise.check_split(tmp_path, "valid", text, tokens)


# The command line


def parse(*arguments: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    command.add_parser(parser.add_subparsers())
    return parser.parse_args(["prepare-stdlib", *arguments])


def test_command(source: Path, made: Path, capsys: pytest.CaptureFixture[str]) -> None:
    args = parse(
        "--source", str(source), "--dest", str(made), "--vocab-size", "400",
        "--valid-fraction", "0.3", "--test-fraction", "0.2",
    )  # fmt: skip
    assert args.run(args) == 0
    assert capsys.readouterr().out == f"{made} is up to date\n"


def test_command_has_the_defaults_of_the_options() -> None:
    args = vars(parse())
    run = args.pop("run")
    assert PrepareOptions(**args) == PrepareOptions()
    assert run is command.run


def test_up_to_date_imports_nothing_heavy(source: Path, made: Path) -> None:
    code = (
        "import sys; from pathlib import Path; from fairseq_rpe.data.prepare import PrepareOptions, prepare\n"
        f"prepare(PrepareOptions(Path({str(made)!r}), Path({str(source)!r}), 400, 1, 0.3, 0.2))\n"
        "print(*({'fairseq', 'sentencepiece'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.stdout.endswith("is up to date\n\n"), done.stderr
