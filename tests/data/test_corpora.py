"""Corpora of any text: documents kept apart, byte-exact for any number of workers, bad input in one line."""

from __future__ import annotations

import errno
import gzip
import io
import json
import lzma
import os
import random
import sys
import threading
import zipfile
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from fake_hub import FakeHub
from hypothesis import given, settings
from hypothesis import strategies as st
from test_tokenizer import NASTY

from fairseq_rpe.cli.main import main
from fairseq_rpe.core.errors import UserError
from fairseq_rpe.core.files import lock
from fairseq_rpe.data import division, documents, pipeline, sourcefiles, vocabulary
from fairseq_rpe.data.encoders import EOS, Encoder, load_decoder, load_encoder
from fairseq_rpe.data.folder import (
    MADE_BY,
    SPLITS,
    Units,
    check_documents,
    count_tokens,
    document_ends,
    read_dictionary,
    read_manifest,
    read_split,
    read_units,
    write_index,
)
from fairseq_rpe.data.pipeline import prepare
from fairseq_rpe.data.preparation import PrepareOptions
from fairseq_rpe.data.sourcefiles import Entry, find_entries, read_blocks
from fairseq_rpe.data.stream import PIECE, Piece, SplitWriter, cut, decode_documents, encode_chunk, gather
from fairseq_rpe.data.tokenizer import Tokenizer
from fairseq_rpe.data.vocabulary import BpeLearner

Patch, Captured = pytest.MonkeyPatch, pytest.CaptureFixture[str]
WORDS = [a + b + c for a in ("", "st", "m", "th", "un") for b in ("a", "ie", "o") for c in ("n", "ck", "ring", "lt")]


def prose(number: int) -> str:
    rng = random.Random(number)
    sentences = (" ".join(rng.choice(WORDS) for _ in range(rng.randrange(3, 18))) for _ in range(30))
    return "".join(s + rng.choice([".\n", ". ", ".\n\n", "?\n   "]) for s in sentences) + f"end {number}"


TEXTS = [prose(number) for number in range(36)]
# Every way to begin, end and be blank.
TEXTS += [
    "\n".join(NASTY).replace("\0", "(a NUL would be binary)"),
    "\n\n\nafter blanks",
    "before blanks\n\n\n",
    " \n x \n",
    "\nlast\n\n \n\nline",
    "a",
    "é\n",
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_folder(tmp_path_factory.mktemp("texts"))


def write_folder(folder: Path) -> Path:
    for number, content in enumerate(TEXTS):
        path = folder / f"part{number % 3}" / f"{number:02d}.txt"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content.encode())
    return folder


def options(dest: Path, *train: Path, **changes: Any) -> PrepareOptions:
    usual = {"vocab_size": 400, "valid_fraction": 0.2, "test_fraction": 0.2, "workers": 1}
    return PrepareOptions(dest=dest, train=train, **{**usual, **changes})


def ignored(line: str) -> None:
    pass


@pytest.fixture(scope="module")
def made(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    dest = tmp_path_factory.mktemp("made") / "corpus"
    prepare(options(dest, folder))
    return dest


def finished(texts: Sequence[str]) -> list[bytes]:
    return [(t if t.endswith("\n") else t + "\n").encode() for t in texts]


def everything(corpus: Path) -> list[bytes]:
    return [document for split in SPLITS for document in decode_documents(corpus, split)]


def contents(folder: Path, *left_out: str) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir() if path.name not in left_out}


def refused(options: PrepareOptions) -> str:
    """The message of the refusal, after checking that it is one line and left nothing behind."""
    before = sorted(options.dest.parent.glob("*"))
    with pytest.raises(UserError) as caught:
        prepare(options, ignored)
    assert before == sorted(options.dest.parent.glob("*"))
    assert "\n" not in str(caught.value)
    return str(caught.value)


# Pieces and encoding


@settings(max_examples=100, deadline=None, derandomize=True)
@given(st.text(st.sampled_from("ab\n é\u2028漢")) | st.sampled_from(TEXTS), st.integers(1, 60), st.integers(2, 1000))
def test_pieces_are_the_text_and_bounded(content: str, block: int, size: int) -> None:
    blocks = [content[i : i + block] for i in range(0, len(content), block)]
    found = list(cut(blocks, size))
    assert "".join(piece.text for piece in found).encode() == finished([content])[0] or not content
    assert max(len(piece.text) for piece in found) <= size + 1
    assert [piece.first for piece in found] == [True] + [False] * (len(found) - 1)
    assert sum(len(p.text.split()) - p.in_word for p in found) == len(content.split())


@pytest.mark.parametrize("size", [64, 4096])
def test_pieces_do_not_change_the_tokens_of_prose(made: Path, size: int) -> None:
    encoder = load_encoder("bpe", made)
    for content in TEXTS[:36]:
        found = [encoder.encode(piece.text) for piece in cut([content], size)]
        assert np.array_equal(np.concatenate(found), encoder.encode(content + "\n"))


def assert_encoded_as_its_lines(corpus: Path, lines: Sequence[str]) -> None:
    encoder, tokenizer = load_encoder("bpe", corpus), Tokenizer.load(corpus / "spm.model")
    symbols = read_dictionary(corpus / "dict.txt")
    for line in lines:
        assert [symbols[i] for i in encoder.encode(line)] == [tokenizer.symbols[i] for i in tokenizer.encode(line)]


def test_words_are_encoded_as_their_lines_would_be(made: Path) -> None:
    assert_encoded_as_its_lines(made, [*NASTY, *"\n".join(TEXTS).split("\n")])


def test_scripts_with_marks_inside_words(tmp_path: Path) -> None:
    rng = random.Random(3)
    syllables = ["कि", "ता", "ब", "हिं", "दी", "को", "e\u0301t", "te\u0301", "ธ์", "กี่", "ascii", "x1"]
    texts = [" ".join("".join(rng.choices(syllables, k=3)) for _ in range(90)) + "।\n" for _ in range(40)]
    rows, dest = write_rows(tmp_path / "rows.jsonl", texts), tmp_path / "corpus"
    prepare(options(dest, rows), ignored)
    assert sorted(everything(dest)) == sorted(finished(texts))
    assert any(len(symbol) > 1 and "ि" in symbol[1:] for symbol in read_dictionary(dest / "dict.txt"))
    assert_encoded_as_its_lines(dest, [line for t in texts for line in t[:-1].split("\n")])


def test_gather_keeps_order_and_bounds() -> None:
    stream = [(key, Piece(f"{key}{number}")) for number in range(20) for key in "ab"]
    chunks = list(gather(stream, 8))
    for key in "ab":
        assert [p.text for k, chunk in chunks if k == key for p in chunk] == [f"{key}{n}" for n in range(20)]
    assert max(sum(len(p.text) for p in chunk) for _, chunk in chunks) < 16


class Letters(Encoder):
    """Each character a token, a newline the end of line: shows item boundaries."""

    def __init__(self) -> None:
        self.dtype = "<u2"

    def encode(self, text: str) -> np.ndarray:
        return np.array([EOS if c == "\n" else ord(c) for c in text], self.dtype)


DOCUMENT = st.text(st.sampled_from("ab \n\n"), min_size=1).filter(str.strip)


@settings(max_examples=150, deadline=None, derandomize=True)
@given(st.lists(DOCUMENT, min_size=1, max_size=6), st.integers(1, 12), st.integers(1, 30))
def test_streams_are_lossless_and_only_boundaries_are_lone_line_ends(
    tmp_path_factory: pytest.TempPathFactory, texts: list[str], size: int, chunk: int
) -> None:
    """Whatever the sizes of pieces and chunks."""
    folder = tmp_path_factory.mktemp("stream")
    stream = [("x", piece) for t in texts for piece in cut([t], size)]
    with SplitWriter(folder, "x", "<u2") as writer:
        for _, part in gather(stream, chunk):
            writer.add(encode_chunk(Letters(), part))
    tokens, sizes = read_split(folder, "x")
    assert writer.counts["tokens"] == len(tokens) == sizes.sum() and writer.counts["documents"] == len(texts)
    items = ["".join("\n" if i == EOS else chr(i) for i in part) for part in np.split(tokens, np.cumsum(sizes)[:-1])]
    groups = "".join("\0" if item == "\n" else item for item in items).split("\0")
    assert [group.encode() for group in groups] == finished(texts)
    assert writer.counts["bytes"] == sum(map(len, finished(texts)))


def test_sample_is_bounded_and_depends_on_the_text_only(made: Path, tmp_path: Path, monkeypatch: Patch) -> None:
    seen: list[list[str]] = []
    model = (made / "spm.model").read_bytes()
    monkeypatch.setattr(vocabulary, "train_tokenizer", lambda lines, size: seen.append(list(lines)) or model)

    def chosen(texts: Sequence[str], bound: int | None) -> list[str]:
        learner = BpeLearner(400, bound)
        for content in texts:
            learner.read([content])
        learner.write(tmp_path)
        return sorted(seen[-1])

    texts = [prose(number) * 9 for number in range(100)]
    assert 50_000 < sum(map(len, chosen(texts, 200_000))) <= 200_000
    assert chosen(texts, 200_000) == chosen(texts[::-1], 200_000)
    everything = [*texts, "one line " * 5_000]
    assert chosen(everything, None) == sorted(line for t in everything for line in f"{t}\n".split("\n"))


# The whole preparation


def test_documents_come_back_byte_for_byte(made: Path) -> None:
    assert sorted(everything(made)) == sorted(finished(TEXTS))
    manifest = read_manifest(made)
    assert manifest is not None
    for split in SPLITS:
        count = manifest["splits"][split]
        found = decode_documents(made, split)
        assert count["documents"] == len(found) > 1
        assert count["bytes"] == sum(map(len, found)) and count["unknown"] == 0
        assert count["tokens"] == len(read_split(made, split)[0])
        assert count["words"] == sum(len(d.decode().split()) + d.count(b"\n") for d in found)


def test_fairseq_knows_the_documents_apart(made: Path) -> None:
    from fairseq.data import Dictionary, TokenBlockDataset, data_utils

    dictionary = Dictionary.load(str(made / "dict.txt"))
    assert len(dictionary) == 400
    dataset = data_utils.load_indexed_dataset(str(made / "train"), dictionary)
    blocks = TokenBlockDataset(
        dataset, dataset.sizes, 2**20, dictionary.pad(), dictionary.eos(), "complete_doc", document_sep_len=1
    )
    # fairseq drops documents of one token only, which there are none of.
    assert len(blocks) == len(decode_documents(made, "train"))


def test_documents_end_where_they_are_decoded_apart(made: Path) -> None:
    check_documents(made, *SPLITS)
    for split in SPLITS:
        tokens, ends = read_split(made, split)[0], document_ends(made, split)
        decode = load_decoder("bpe", made)
        parts = np.split(tokens, ends[:-1])
        # each but the last ends with the separator
        found = [decode((part if k == len(parts) - 1 else part[:-1]).tolist()) for k, part in enumerate(parts)]
        assert found == decode_documents(made, split) and ends[-1] == len(tokens)


def written_items(folder: Path, *items: Sequence[int]) -> Path:
    """A split ``test`` of these items, as fairseq-preprocess writes it."""
    np.concatenate([np.array(item, "<u2") for item in items]).tofile(folder / "test.bin")
    write_index(folder / "test.idx", io.BytesIO(np.array([len(x) for x in items], "<i4").tobytes()), "<u2")
    return folder


@pytest.mark.parametrize(
    ("items", "ends"),
    [
        ([[5, 2], [6, 7, 2], [2], [8, 2]], [6, 8]),
        ([[2], [2], [5, 2], [2], [2], [6, 2], [2]], [6, 9]),  # runs of separators belong to the document before
        ([[5, 2], [9], [6, 2]], [5]),  # one token that is no line end separates nothing
        ([[2], [2]], [2]),
        ([[5, 2]], [2]),
    ],
)
def test_blank_lines_end_documents(items: list[list[int]], ends: list[int], tmp_path: Path) -> None:
    assert document_ends(written_items(tmp_path, *items), "test").tolist() == ends


def test_corpora_that_mark_no_documents_are_refused(made: Path, tmp_path: Path) -> None:
    with pytest.raises(UserError, match="no document boundaries.*--blocks stream"):
        check_documents(written_items(tmp_path, [5, 2], [6, 2]), "test")
    for options, words in (({"boundaries": False}, "--no-boundaries"), ({"rows_are_lines": True}, "rows are lines")):
        manifest = {"made_by": MADE_BY, "tokenizer": {"kind": "bpe"}, "options": options}
        (tmp_path / "corpus.json").write_text(json.dumps(manifest))
        with pytest.raises(UserError, match=words):
            check_documents(tmp_path, "test")


def test_any_number_of_workers_and_any_size_of_pieces_per_worker(
    folder: Path, made: Path, tmp_path: Path, monkeypatch: Patch
) -> None:
    monkeypatch.setattr(pipeline, "gather", lambda stream: gather(stream, 500))
    prepare(options(tmp_path / "corpus", folder, workers=3), ignored)
    assert contents(tmp_path / "corpus") == contents(made)


LENGTHS = st.lists(st.integers(1, 10**6), min_size=2, max_size=40, unique=True)


@settings(max_examples=25, deadline=None, derandomize=True)
@given(LENGTHS, LENGTHS, st.integers(0, 5))
def test_a_document_keeps_its_split_whatever_else_there_is(
    tmp_path_factory: pytest.TempPathFactory, numbers: list[int], more: list[int], seed: int
) -> None:
    """Its file, its place there and the documents around it change nothing; each is in one split."""
    folder, splits = tmp_path_factory.mktemp("rows"), []
    for name, chosen in (("few", numbers), ("all", list(dict.fromkeys([*more, *numbers[::-1]])))):
        rows = write_rows(folder / f"{name}.jsonl", [f"document {number}\n" for number in chosen])
        found = list(division.DividedDocuments(options(folder / "corpus", rows, seed=seed)))
        assert len(found) == len({document.digest for _, document in found}) == len(chosen)
        splits.append({document.digest: split for split, document in found})
    assert splits[0].items() <= splits[1].items() and set(splits[1].values()) <= set(SPLITS)


def write_rows(path: Path, texts: Sequence[str]) -> Path:
    lines = "".join(json.dumps({"text": t, "meta": {"n": i}}) + "\n" for i, t in enumerate(texts)).encode()
    if path.suffix == ".parquet":
        pyarrow = pytest.importorskip("pyarrow")
        pytest.importorskip("pyarrow.parquet").write_table(pyarrow.table({"text": texts}), path, row_group_size=7)
    elif path.suffix == ".zst":
        pyarrow = pytest.importorskip("pyarrow")
        half = len(lines) // 2
        path.write_bytes(b"".join(pyarrow.compress(p, "zstd", asbytes=True) for p in (lines[:half], lines[half:])))
    else:
        pack = {".gz": gzip.compress, ".xz": lzma.compress, ".jsonl": bytes, ".json": bytes}[path.suffix]
        path.write_bytes(pack(lines))
    return path


@pytest.mark.parametrize("ending", ["jsonl", "jsonl.gz", "jsonl.xz", "jsonl.zst", "parquet"])
def test_formats_give_the_same_corpus(made: Path, tmp_path: Path, ending: str) -> None:
    order = [number for part in range(3) for number in range(part, len(TEXTS), 3)]
    path = write_rows(tmp_path / f"rows.{ending}", [TEXTS[number] for number in order])
    prepare(options(tmp_path / "corpus", path), ignored)
    assert contents(tmp_path / "corpus", "corpus.json") == contents(made, "corpus.json")


@pytest.mark.parametrize("ending", ["json", "json.gz", "json.zst"])
def test_json_lines_by_another_name(tmp_path: Path, ending: str) -> None:
    """The Colossal Clean Crawled Corpus names its shards so."""
    (tmp_path / "en").mkdir()
    shards = [write_rows(tmp_path / f"en/c4-train.{n:05}-of-01024.{ending}", TEXTS[n::2]) for n in range(2)]
    entries, _ = find_entries([tmp_path / "en"])
    assert [(entry.path, entry.kind) for entry in entries] == [(path, "jsonl") for path in shards]
    found = ["".join(document.blocks()) for document in documents.Reader(entries)]
    assert found == [*TEXTS[::2], *TEXTS[1::2]]


@pytest.mark.parametrize("text", ['{\n  "text": "words"\n}\n', '["words"]\n', "no JSON at all\n", "[" * 100_000])
def test_json_that_is_one_document_is_refused(tmp_path: Path, text: str) -> None:
    (tmp_path / "all.json").write_text(text)
    with pytest.raises(UserError, match=r"all.json is JSON, but not an object per line: leave it out, or write each"):
        find_entries([tmp_path])
    with zipfile.ZipFile(tmp_path / "all.zip", "w") as archive:
        archive.writestr("package.json", text)
        archive.writestr("a.txt", "words")
    entries, _ = find_entries([tmp_path / "all.zip"], include=["*.txt"])
    assert [entry.name for entry in entries] == ["a.txt"]


def test_zip_archives_and_patterns(folder: Path, tmp_path: Path) -> None:
    with zipfile.ZipFile(tmp_path / "all.zip", "w") as archive:
        for path in sorted(folder.rglob("*.txt")):
            archive.write(path, path.relative_to(folder))
        archive.writestr("picture.png", b"\x89PNG\0\0")
        archive.writestr("notes.md", "not wanted")
    said: list[str] = []
    prepare(options(tmp_path / "corpus", tmp_path / "all.zip", include=("*.txt", "*.png")), said.append)
    assert sorted(everything(tmp_path / "corpus")) == sorted(finished(TEXTS))
    assert "left out: 1 binary" in said


def test_given_splits_and_rows_as_lines(tmp_path: Path) -> None:
    files = {}
    for split in SPLITS:
        rows = [" = Title = \n", "", f" words of {split} <unk> here \n", "no newline"]
        files[split] = write_rows(tmp_path / f"{split}.jsonl", rows)
    given = {split: (files[split],) for split in ("valid", "test")}
    changes: dict[str, Any] = {"tokenizer": "words", "vocab_size": None, "rows_are_lines": True}
    prepare(options(tmp_path / "corpus", files["train"], **given, **changes), ignored)
    assert (
        everything(tmp_path / "corpus")[1:]
        == [b"= Title = \n\nwords of \xef\xbf\xbd\xef\xbf\xbdhere \nno newline \n"] * 2
    )
    units = read_units(tmp_path / "corpus", "test")
    assert units is not None and (units.tokens, units.words, units.documents) == (14, 14, 1)


def test_words_have_fairseqs_own_dictionary(tmp_path: Path) -> None:
    from fairseq.data import Dictionary

    # Names of fairseq's specials would come back as what they stand for.
    rows = write_rows(tmp_path / "rows.jsonl", [*TEXTS[:36], *TEXTS[37:]])
    prepare(options(tmp_path / "corpus", rows, tokenizer="words", vocab_size=None), ignored)
    theirs = Dictionary()
    for document in decode_documents(tmp_path / "corpus", "train"):
        for word in document.decode().split():
            theirs.add_symbol(word)
    theirs.finalize(padding_factor=8)
    found = read_dictionary(tmp_path / "corpus" / "dict.txt")
    assert len(found) == len(theirs) and len(found) % 8 == 0
    assert found[4:] == theirs.symbols[4:]


def test_a_vocabulary_can_be_shared(made: Path, tmp_path: Path) -> None:
    (tmp_path / "other").mkdir()
    for number in range(12):
        (tmp_path / "other" / f"{number}.txt").write_text(prose(1000 + number) + " ©")
    prepare(options(tmp_path / "corpus", tmp_path / "other", vocab_size=None, vocab_from=made), ignored)
    for name in ("dict.txt", "spm.model"):
        assert (tmp_path / "corpus" / name).read_bytes() == (made / name).read_bytes()
    assert len(everything(tmp_path / "corpus")) == 12

    mixed = tmp_path / "mixed"
    prepare(options(mixed, tmp_path / "other", vocab_size=350), ignored)
    (mixed / "dict.txt").write_bytes((made / "dict.txt").read_bytes())
    message = refused(options(tmp_path / "new", tmp_path / "other", vocab_size=None, vocab_from=mixed))
    assert f"{mixed}/dict.txt is not the one that the corpus was made with" in message
    manifest = json.loads((mixed / "corpus.json").read_text())
    (mixed / "corpus.json").write_text(json.dumps({**manifest, "files": {}}))
    message = refused(options(tmp_path / "new", tmp_path / "other", vocab_size=None, vocab_from=mixed))
    assert "dict.txt is not of the same corpus as its spm.model" in message


def test_second_call_does_nothing_and_damage_is_repaired(folder: Path, tmp_path: Path, monkeypatch: Patch) -> None:
    dest = tmp_path / "corpus"
    prepare(options(dest, folder), ignored)
    first = contents(dest)
    (dest / "train.bin").write_bytes(b"damaged")
    prepare(options(dest, folder), ignored)
    assert contents(dest) == first
    monkeypatch.setattr(SplitWriter, "add", lambda *_: pytest.fail("built again"))
    said: list[str] = []
    prepare(options(dest, folder, workers=3), said.append)
    assert said == [f"{dest} is up to date"]


FEW = {
    "two": [4000, 300],
    "one": [900],
    "five": [3000, 2, 4000, 1, 800],
    "twelve": [200] * 12,
    "uneven": [3, 500, 40, 900, 7, 1200, 60, 300, 5, 800, 90, 20],
    "tiny": [1] * 5,
}


@pytest.mark.parametrize("joint", ["\n\n", "\n", " "])
@pytest.mark.parametrize("name", FEW)
def test_a_few_files_of_any_size_give_three_splits(made: Path, tmp_path: Path, name: str, joint: str) -> None:
    """Nothing is lost or twice there, and a file is cut at an empty line where it has one."""
    draw, texts = random.Random(name), []
    (tmp_path / "texts").mkdir()
    for number, lines in enumerate(FEW[name]):
        words = [[f"w{draw.randrange(500)}" for _ in range(draw.randint(2, 9))] for _ in range(lines)]
        texts.append(joint.join(map(" ".join, words)) + "\n" * (joint != " "))
        (tmp_path / "texts" / f"{number}.txt").write_text(texts[-1], newline="")
    said: list[str] = []
    changes: dict[str, Any] = {"vocab_from": made, "vocab_size": None, "valid_fraction": 0.05, "test_fraction": 0.05}
    manifest = prepare(options(tmp_path / "corpus", tmp_path / "texts", **changes), said.append)
    parts = {split: [part.decode() for part in decode_documents(tmp_path / "corpus", split)] for split in SPLITS}
    assert all(count["words"] > count["lines"] for count in manifest["splits"].values())
    cut = [line for line in said if line.startswith("too few documents to choose from (")]
    chosen = [line for line in said if line.startswith("few documents (")]
    assert len(cut) + len(chosen) == (sum(map(len, parts.values())) > len(texts)) + len(chosen) <= 1
    whole = Counter(text if text.endswith("\n") else text + "\n" for text in texts)
    if not cut:
        assert Counter(part for found in parts.values() for part in found) == whole
        return
    assert (f"({len(texts)})" in cut[0]) and "90 %, 5 %, 5 % for train, valid, test" in cut[0]
    rest = whole - Counter(parts["train"])  # those that were cut
    beginnings = list((Counter(parts["train"]) - whole).elements())
    assert len(beginnings) == len(parts["valid"]) == len(parts["test"]) == rest.total() > 0
    for begin, middle, end in zip(beginnings, parts["valid"], parts["test"], strict=True):
        # a split's documents end with a line end, wherever they are cut
        [text] = [t for t in rest if t.startswith(begin[:-1]) and t.endswith(end)]
        assert text in {a + b + end for a in (begin, begin[:-1]) for b in (middle, middle[:-1])}
        if joint == "\n\n" and text.count(joint) > 40:
            assert begin.endswith(joint) and middle.endswith(joint)
            assert len(middle) == pytest.approx(len(text) / 20, abs=60)


def test_each_document_is_cut_where_that_is_asked_for(made: Path, tmp_path: Path) -> None:
    """One of a single word is all for training; the first documents are those of training."""
    texts = [" ".join(f"w{draw % 500}" for draw in range(n, n + 400)) + "\n" for n in range(0, 20000, 1000)]
    rows = write_rows(tmp_path / "rows.jsonl", [*texts, "alone\n"])
    changes: dict[str, Any] = {"divide_by": "part", "vocab_from": made, "vocab_size": None}
    changes |= {"valid_fraction": 0.1, "test_fraction": 0.2}
    prepare(options(tmp_path / "corpus", rows, **changes), ignored)
    found = [[text.decode() for text in decode_documents(tmp_path / "corpus", split)] for split in SPLITS]
    assert [len(documents) for documents in found] == [21, 20, 20] and found[0][-1] == "alone\n"
    for text, parts in zip(texts, zip(*found, strict=False), strict=True):
        assert "".join(" ".join(parts).split()) == "".join(text.split())
        assert [len(part) / len(text) for part in parts] == pytest.approx([0.7, 0.1, 0.2], abs=0.01)
    first = prepare(options(tmp_path / "first", rows, **changes, documents=3), ignored)
    assert [count["documents"] for count in first["splits"].values()] == [3, 3, 3]


def test_rows_of_one_file_are_divided_between_lines(made: Path, tmp_path: Path) -> None:
    texts = [f"row {number} of a file\n" for number in range(200)]
    rows = write_rows(tmp_path / "rows.jsonl", texts)
    changes: dict[str, Any] = {"rows_are_lines": True, "vocab_from": made, "vocab_size": None}
    prepare(options(tmp_path / "corpus", rows, **changes), ignored)
    found = [decode_documents(tmp_path / "corpus", split) for split in SPLITS]
    assert [len(documents) for documents in found] == [1, 1, 1]
    assert b"".join(documents[0] for documents in found).decode() == "".join(texts)
    assert [documents[0].count(b"\n") for documents in found] == [123, 39, 38]


@pytest.fixture
def rows(tmp_path: Path) -> Path:
    """Few short documents, for what does not depend on the text."""
    return write_rows(tmp_path / "rows.jsonl", [f"word{number} and more\n" for number in range(60)])


def quick(dest: Path, rows: Path, **changes: Any) -> PrepareOptions:
    return options(dest, rows, tokenizer="words", vocab_size=None, **changes)


@pytest.mark.parametrize("kind", [KeyboardInterrupt, OSError(errno.ENOSPC, "disk full"), RuntimeError])
@pytest.mark.parametrize("existing", [False, True])
@pytest.mark.parametrize("where", ["learning", "encoding", "publishing"])
def test_failure_leaves_the_old_state(
    rows: Path, tmp_path: Path, monkeypatch: Patch, kind: Any, existing: bool, where: str
) -> None:
    dest = tmp_path / "corpus"
    if existing:
        prepare(quick(dest, rows), ignored)
    before = contents(dest) if existing else None
    owners: dict[str, tuple[Any, str]] = {
        "learning": (vocabulary.WordLearner, "write"),
        "encoding": (SplitWriter, "add"),
        "publishing": (Path, "rename"),
    }
    owner, name = owners[where]
    original = getattr(owner, name)

    def fail(*args: Any) -> Any:
        # Moving the old corpus away and back works, moving the new one in does not.
        if name == "rename" and args[0].name != "made":
            return original(*args)
        raise kind

    monkeypatch.setattr(owner, name, fail)
    with pytest.raises(UserError if isinstance(kind, OSError) else kind) as caught:
        prepare(quick(dest, rows, seed=2, overwrite=True), ignored)
    if isinstance(kind, OSError):
        assert str(caught.value).startswith(f"no space left on the disk while writing {dest}: ")
    assert (contents(dest) if existing else None) == before
    assert [path for path in tmp_path.iterdir() if path != rows] == ([dest] if existing else [])


def test_leftovers_of_a_killed_run_are_removed(rows: Path, tmp_path: Path) -> None:
    (tmp_path / ".corpus.prepare-123" / "made").mkdir(parents=True)
    others = [tmp_path / ".corpus.prepare-mine", tmp_path / ".other.prepare-123"]
    for other in others:
        other.mkdir()
    prepare(quick(tmp_path / "corpus", rows), ignored)
    assert sorted(tmp_path.iterdir()) == sorted([*others, rows, tmp_path / "corpus"])


def test_destination_may_be_a_link_or_an_empty_folder(rows: Path, tmp_path: Path) -> None:
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "corpus").symlink_to(tmp_path / "elsewhere")
    prepare(quick(tmp_path / "corpus", rows), ignored)
    assert (tmp_path / "corpus").is_symlink()
    assert (tmp_path / "elsewhere" / "corpus.json").is_file()
    (tmp_path / "folder").mkdir()
    assert tmp_path.joinpath("elsewhere").stat().st_mode == tmp_path.joinpath("folder").stat().st_mode


def test_the_current_folder_is_not_replaced(rows: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "folder/inner").mkdir(parents=True)
    monkeypatch.chdir(tmp_path / "folder/inner")
    for dest in (Path(), Path("..")):
        assert "is the current folder or one above it" in refused(quick(dest, rows))
    assert list(tmp_path.joinpath("folder").rglob("*")) == [tmp_path / "folder/inner"]


def test_foreign_destinations_are_kept(rows: Path, tmp_path: Path) -> None:
    dest = tmp_path / "folder"
    dest.mkdir()
    (dest / "thesis.tex").write_text("years of work")
    assert "not made by this command" in refused(quick(dest, rows))
    (dest / "corpus.json").write_text('{"made_by": "me"}')
    assert "not made by this command" in refused(quick(dest, rows))
    assert contents(dest)["thesis.tex"] == b"years of work"
    (tmp_path / "file").write_text("x")
    assert "is a file" in refused(quick(tmp_path / "file", rows))
    assert "is a file, not a folder" in refused(quick(tmp_path / "file" / "corpus", rows))
    assert "fairseq splits paths" in refused(quick(tmp_path / f"a{os.pathsep}b", rows))
    if os.geteuid():
        (tmp_path / "closed").mkdir(mode=0o500)
        assert "closed may not be read or written" in refused(quick(tmp_path / "closed" / "corpus", rows))
    prepare(quick(tmp_path / "corpus", rows), ignored)
    (tmp_path / "corpus" / "checkpoint.pt").write_bytes(b"weights")
    assert "checkpoint.pt" in refused(quick(tmp_path / "corpus", rows, seed=2))
    assert (tmp_path / "corpus" / "checkpoint.pt").read_bytes() == b"weights"


def test_a_corpus_made_with_other_settings_is_replaced_only_if_that_is_said(rows: Path, tmp_path: Path) -> None:
    dest = tmp_path / "corpus"
    prepare(quick(dest, rows), ignored)
    before = contents(dest)
    message = refused(quick(dest, rows, seed=2, divide_by="part"))
    assert f"{dest} was made with other settings" in message and "--overwrite" in message
    assert "seed is 1 there, 2 here" in message and "divide_by is the default there, part here" in message
    assert "of another text" in refused(quick(dest, write_rows(tmp_path / "more.jsonl", ["a b\n"] * 9)))
    vocabulary = quick(tmp_path / "other", rows, vocab_from=dest, seed=3)
    prepare(vocabulary, ignored)
    assert "with another vocabulary" in refused(quick(tmp_path / "other", rows, seed=3))
    assert contents(dest) == before
    prepare(quick(dest, rows, seed=2, overwrite=True), ignored)
    assert read_manifest(dest)["options"]["seed"] == 2
    (dest / "train.bin").write_bytes(b"damaged")  # with the same settings it is made again
    prepare(quick(dest, rows, seed=2), ignored)
    assert read_manifest(dest)["options"]["seed"] == 2 and (dest / "train.bin").read_bytes() != b"damaged"


def test_commands_replace_a_corpus_only_if_that_is_said(rows: Path, tmp_path: Path, capsys: Any) -> None:
    for command in (["prepare"], ["prepare-known", "openwebtext2", "--from"]):
        words = [*command, str(rows), "--tokenizer", "words", "--workers", "1", "--dest", str(tmp_path / command[0])]
        assert main(words) == 0 and main(words) == 0
        capsys.readouterr()
        assert main([*words, "--seed", "2"]) == 2
        assert "seed is 1 there, 2 here" in capsys.readouterr().err
        assert main([*words, "--seed", "2", "--overwrite"]) == 0
        assert main([*words, "--seed", "2"]) == 0


def test_a_failure_removes_folders_above_and_names_its_cause(rows: Path, tmp_path: Path, monkeypatch: Patch) -> None:
    before = sorted(tmp_path.iterdir())
    refused(quick(tmp_path / "new" / "folder" / "corpus", rows, max_bytes=1))
    assert sorted(tmp_path.iterdir()) == before

    def limited(*_: object, **__: object) -> None:
        raise OSError(errno.EMFILE, os.strerror(errno.EMFILE), "/somewhere/else")

    monkeypatch.setattr("fairseq_rpe.data.destination.write_json", limited)
    assert refused(quick(tmp_path / "new" / "corpus", rows)) == "too many files are open: raise ulimit -n"


def test_a_preparation_waits_for_another_and_outlives_the_removal_of_the_folder(
    rows: Path, tmp_path: Path, capsys: Captured
) -> None:
    parent = tmp_path / "new"
    parent.mkdir()
    with lock(parent, "busy"):
        other = threading.Thread(target=prepare, args=(quick(parent / "corpus", rows), ignored))
        other.start()
        while not (waiting := capsys.readouterr().err):
            assert other.is_alive()
            other.join(0.01)
        assert waiting == f"waiting for another preparation in {parent}\n" and not list(parent.iterdir())
        parent.rmdir()
    other.join(60)
    assert len(everything(parent / "corpus")) == 60


def test_changing_sources_are_noticed(tmp_path: Path, monkeypatch: Patch) -> None:
    folder = write_folder(tmp_path / "texts")
    original = BpeLearner.write

    def write(*args: Any) -> None:
        (folder / "part0" / "00.txt").write_text("something else")
        original(*args)

    monkeypatch.setattr(BpeLearner, "write", write)
    assert "changed while they were read" in refused(options(tmp_path / "corpus", folder))


def test_a_tokenizer_that_changes_the_text_is_noticed(
    folder: Path, made: Path, tmp_path: Path, monkeypatch: Patch
) -> None:
    original = Tokenizer.encode
    monkeypatch.setattr(Tokenizer, "encode", lambda self, word: original(self, word.replace("ring", "gnir")))
    message = refused(options(tmp_path / "corpus", folder, vocab_size=None, vocab_from=made))
    assert "the tokenizer changes" in message and "ring" in message


def test_damaged_splits_are_noticed(made: Path, tmp_path: Path) -> None:
    index, ids = (made / "valid.idx").read_bytes(), (made / "valid.bin").read_bytes()
    damage = {
        "is not an mmap index": [b"TNTIDX" + index[6:], index[:20], index[:17] + b"\x07" + index[18:]],
        "is cut short": [index[:30], index[:18] + b"\xff" * 8 + index[26:]],
    }
    (tmp_path / "valid.bin").write_bytes(ids)
    for words, indices in damage.items():
        for content in indices:
            (tmp_path / "valid.idx").write_bytes(content)
            for read in (count_tokens, read_split):
                with pytest.raises(UserError, match=f"valid.idx {words}"):
                    read(tmp_path, "valid")
    (tmp_path / "valid.idx").write_bytes(index)
    assert count_tokens(tmp_path, "valid") == len(read_split(tmp_path, "valid")[0]) == len(ids) // 2
    (tmp_path / "valid.bin").write_bytes(ids[:-2])
    with pytest.raises(UserError, match="valid.bin does not hold the tokens that its index counts"):
        read_split(tmp_path, "valid")


# GPT-2's BPE


@pytest.fixture(scope="module")
def gpt2(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small vocabulary, with the names that GPT-2's own files have."""
    pytest.importorskip("tokenizers")
    from tokenizers import Tokenizer, models, pre_tokenizers, trainers

    folder = tmp_path_factory.mktemp("gpt2")
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    tokenizer.train_from_iterator(TEXTS[:36], trainers.BpeTrainer(vocab_size=400, initial_alphabet=alphabet))
    tokenizer.model.save(str(folder))
    return folder


def test_gpt2_tokens_are_the_librarys_and_every_byte_returns(folder: Path, gpt2: Path, tmp_path: Path) -> None:
    from tokenizers import ByteLevelBPETokenizer

    dest = tmp_path / "corpus"
    prepare(options(dest, folder, tokenizer="gpt2", gpt2=gpt2, vocab_size=None), ignored)
    assert sorted(everything(dest)) == sorted(finished(TEXTS))
    symbols = read_dictionary(dest / "dict.txt")
    assert len(symbols) == 400 + 8 and symbols[-4:] == [*(f"madeupword000{i}" for i in range(3)), "<mask>"]
    theirs = ByteLevelBPETokenizer.from_file(str(gpt2 / "vocab.json"), str(gpt2 / "merges.txt"))
    encoder = load_encoder("gpt2", dest)
    for line in [*NASTY, *"\n".join(TEXTS).split("\n")]:
        assert [symbols[i] for i in encoder.encode(line)] == [str(i) for i in theirs.encode(line).ids]


def test_gpt2_takes_a_published_dictionary_and_file_names(folder: Path, gpt2: Path, tmp_path: Path) -> None:
    published = tmp_path / "published"
    published.mkdir()
    (published / "encoder.json").write_bytes((gpt2 / "vocab.json").read_bytes())
    (published / "vocab.bpe").write_bytes((gpt2 / "merges.txt").read_bytes())
    order = [str(number) for number in range(399, -1, -1)]
    (published / "dict.txt").write_text("".join(f"{number} 7\n" for number in [*order, "madeupword0000"]))
    given = {"tokenizer": "gpt2", "gpt2": published, "vocab_size": None}
    prepare(options(tmp_path / "corpus", folder, **given), ignored)
    assert read_dictionary(tmp_path / "corpus" / "dict.txt")[4:] == [*order, "madeupword0000"]
    assert sorted(everything(tmp_path / "corpus")) == sorted(finished(TEXTS))

    (published / "dict.txt").write_text("0 1\n1 1\n")
    message = refused(options(tmp_path / "new", folder, **given))
    assert "dict.txt does not match its vocab.json" in message
    (published / "vocab.bpe").write_text("no merges\n")
    (published / "dict.txt").unlink()
    assert "merges.txt does not fit its vocab.json" in refused(options(tmp_path / "new", folder, **given))
    (published / "encoder.json").write_text('{"a": 1}')
    assert "not a GPT-2 vocabulary: it lacks the bytes" in refused(options(tmp_path / "new", folder, **given))
    (published / "encoder.json").unlink()
    assert "has no vocab.json or encoder.json" in refused(options(tmp_path / "new", folder, **given))


# Known corpora


def test_known_corpora_from_local_files(tmp_path: Path, capsys: Captured) -> None:
    with zipfile.ZipFile(tmp_path / "wikitext-103-v1.zip", "w") as archive:
        for split in SPLITS:
            archive.writestr(f"wikitext-103/wiki.{split}.tokens", f" = Title = \n \n words of {split} <unk> \n")
    arguments = ["prepare-known", "wikitext103-words", "--dest", str(tmp_path / "corpus"), "--workers", "1", "--from"]
    assert main([*arguments, str(tmp_path / "wikitext-103-v1.zip")]) == 0
    out = capsys.readouterr().out
    assert "warning: valid has 10 words instead of the published 217646: this is another text" in out
    units = read_units(tmp_path / "corpus", "valid")
    assert units is not None and units.tokens == units.words == 10

    (tmp_path / "texts").mkdir()
    for name in ("books-train-0", "books-train-1", "validation", "test"):
        write_rows(tmp_path / "texts" / f"{name}.jsonl", TEXTS[: 7 if name == "test" else None])
    known = ["prepare-known", "books", "--dest", str(tmp_path / "books"), "--vocab-size", "400", "--workers", "1"]
    assert main([*known, "--from", str(tmp_path / "texts")]) == 0
    splits = read_manifest(tmp_path / "books")["splits"]  # type: ignore[index]
    assert [splits[split]["documents"] for split in SPLITS] == [86, 43, 7]

    repositories = tmp_path / "repositories"
    for number in range(40):
        (repositories / f"r{number % 3}" / ".git").mkdir(parents=True, exist_ok=True)
        (repositories / f"r{number % 3}" / f"test_{number}.py").write_text(prose(number))
        (repositories / f"r{number % 3}" / ".git" / f"{number}.py").write_text("hidden")
    known = ["prepare-known", "github", "--dest", str(tmp_path / "code"), "--vocab-size", "300", "--workers", "1"]
    assert main([*known, "--from", str(repositories), "--valid-fraction", "0.2", "--test-fraction", "0.2"]) == 0
    assert len(everything(tmp_path / "code")) == 40


@pytest.mark.parametrize(
    ("outcome", "words"),
    [
        ("GatedRepoError", "hub:some/set/data is gated: accept its terms"),
        ("RepositoryNotFoundError", "hub:some/set/data does not exist or is private"),
        (ConnectionError("no route\nto host"), "hub:some/set/data cannot be downloaded (no route): run this again"),
        ("", "has no parquet, .jsonl, .json or .txt files (loading scripts are not run): get its files some other way"),
        (None, "needs the package huggingface_hub: pip install huggingface_hub pyarrow, or get its files"),
    ],
    ids=str,
)
def test_trouble_with_the_hub_is_one_line(
    tmp_path: Path, monkeypatch: Patch, capsys: Captured, outcome: Any, words: str
) -> None:
    hub = FakeHub(tmp_path / "cache", {("some/set", None): {"data/README.md": b"about"}})
    hub.install(monkeypatch)
    if outcome is None:
        monkeypatch.setitem(sys.modules, "huggingface_hub", None)
    elif outcome:
        error = getattr(hub.errors, outcome)("404") if isinstance(outcome, str) else outcome
        hub.failures["some/set"] = error
    assert main(["prepare", "hub:some/set/data", "--dest", str(tmp_path / "corpus")]) == 2
    error = capsys.readouterr().err
    assert error.startswith("error: ") and words in error and error.count("\n") == 1
    assert not (tmp_path / "corpus").exists()


def test_hub_data_sets_are_files_of_a_folder(tmp_path: Path, monkeypatch: Patch, capsys: Captured) -> None:
    content = write_rows(tmp_path / "part-0.jsonl", TEXTS).read_bytes()
    hub = FakeHub(tmp_path / "cache", {("some/set", None): {"data/part-0.jsonl": content, "more/part-1.jsonl": b"?"}})
    hub.install(monkeypatch)
    words = ["prepare", "hub:some/set/data", "--dest", str(tmp_path / "corpus"), "--workers", "1"]
    assert main([*words, "--vocab-size", "400"]) == 0
    assert sorted(everything(tmp_path / "corpus")) == sorted(finished(TEXTS))
    assert hub.downloaded == ["data/part-0.jsonl"]
    assert main(["prepare", "hub:nonsense", "--dest", str(tmp_path / "new")]) == 2
    assert "hub:nonsense is not a data set of the hub" in capsys.readouterr().err


# Units


def test_units_are_read_if_they_are_recorded(made: Path, tmp_path: Path) -> None:
    units = Units(tokens=300, bytes=1200, words=100, documents=2)
    assert (units.bits_per_byte(4.0), units.word_ppl(2.0), units.word_ppl(4000.0)) == (1.0, 64.0, float("inf"))
    manifest = read_manifest(made)
    assert manifest is not None
    units = read_units(made, "valid")
    assert units is not None and units.bytes == manifest["splits"]["valid"]["bytes"]
    assert read_units(made, "elsewhere") is None and read_units(tmp_path, "valid") is None
    del manifest["splits"]["valid"]["words"]
    (tmp_path / "corpus.json").write_text(json.dumps(manifest))
    assert read_units(tmp_path, "valid") is None and read_units(tmp_path, "test") is not None


# Bad input


def cases(tmp_path: Path, folder: Path) -> dict[str, tuple[dict[str, Any], str]]:
    def write(name: str, content: bytes) -> tuple[Path, ...]:
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_bytes(content)
        return (tmp_path / name,)

    (tmp_path / "empty").mkdir()
    rows = b'{"text": "a"}\n{"text": "caf\xe9"}\n'
    zipped = tmp_path / "k.zip"
    with zipfile.ZipFile(zipped, "w") as archive:
        archive.writestr("a.parquet", b"PAR1")
    return {
        "missing": ({"train": (tmp_path / "nowhere",)}, "nowhere does not exist"),
        "nothing": ({"train": ()}, "no text is given"),
        "empty": ({"train": (tmp_path / "empty",)}, "there are no files"),
        "binary": ({"train": (write("bin/x.png", b"\x89PNG\0\0")[0].parent,)}, "all 1 files are binary"),
        "one binary": ({"train": write("y.png", b"\x89PNG\0\0")}, "y.png is a binary file"),
        "latin": ({"train": write("latin.txt", b"x" * 5000 + b"caf\xe9 au")}, "latin.txt is not UTF-8 at byte 5003"),
        "cut character": ({"train": write("cut.txt", b"caf\xc3")}, "cut.txt is not UTF-8 at byte 3"),
        "latin row": ({"train": write("a.jsonl", rows)}, "a.jsonl line 2 is not UTF-8 at byte 27"),
        "no json": ({"train": write("b.jsonl", b'{"text": "a"}\n{"te\n')}, "b.jsonl line 2 is not a JSON"),
        "no object": ({"train": write("c.jsonl", b"[1]\n")}, "c.jsonl line 1 is not a JSON object"),
        "no field": ({"train": write("d.jsonl", b'{"body": "a"}\n')}, "has no field 'text' but body"),
        "no string": ({"train": write("e.jsonl", b'{"text": 3}\n')}, "has a 'text' that is not a string"),
        "surrogate": ({"train": write("f.jsonl", b'{"text": "a\\ud800"}\n')}, "half a surrogate pair at character 1"),
        "cut gz": ({"train": write("g.txt.gz", gzip.compress(b"abc" * 999)[:-9])}, "g.txt.gz is cut short or damaged"),
        "cut xz": ({"train": write("h.txt.xz", lzma.compress(b"abc" * 999)[:-9])}, "h.txt.xz is cut short or damaged"),
        "no bz2": ({"train": write("l.txt.bz2", b"BZ nonsense")}, "l.txt.bz2 is cut short or damaged"),
        "no zip": ({"train": write("i.zip", b"PK nonsense")}, "i.zip is cut short or damaged"),
        "archive": ({"train": (zipped,)}, "a.parquet is parquet inside an archive: unpack"),
        "one document": ({"train": write("j.txt", b"just this")}, "the valid split of 1 documents would be empty"),
        "only valid": ({"valid": (folder,)}, "--valid is given without --test"),
        "vocabulary": ({"vocab_size": 299}, "--vocab-size 299 is out of range"),
        "large": ({"vocab_size": 10**6}, "--vocab-size 1000000 is too large for this text: the largest possible is "),
        "fraction": ({"test_fraction": 1.0}, "--test-fraction 1.0 is out of range"),
        "fractions": ({"valid_fraction": 0.5, "test_fraction": 0.5}, "their sum must be below 1"),
        "not a number": ({"valid_fraction": float("nan")}, "--valid-fraction nan is out of range"),
        "bytes": ({"max_bytes": 0}, "--max-bytes 0 is out of range"),
        "few bytes": ({"max_bytes": 4}, "another --seed or a larger --max-bytes"),
        "division": ({"divide_by": "date"}, "--divide-by date is none of text, path, part"),
        "workers": ({"workers": 0}, "--workers 0 is out of range"),
        "no corpus": ({"vocab_from": tmp_path / "empty", "vocab_size": None}, "is not a prepared corpus"),
        "two sizes": ({"vocab_from": tmp_path / "empty"}, "--vocab-size has no effect"),
        "no gpt2": ({"tokenizer": "gpt2", "vocab_size": None}, "--tokenizer gpt2 and --gpt2 FOLDER go together"),
    }


def test_bad_input_is_one_line_and_leaves_nothing(folder: Path, tmp_path: Path) -> None:
    (tmp_path / "bad").mkdir()
    for name, (changes, words) in cases(tmp_path / "bad", folder).items():
        train = changes.pop("train", (folder,))
        assert words in refused(options(tmp_path / "corpus", *train, **changes)), name


def test_other_encodings_can_be_left_out(tmp_path: Path) -> None:
    folder = write_folder(tmp_path / "texts")
    (folder / "latin.txt").write_bytes(b"caf\xe9")
    (folder / "blank.txt").write_bytes(b" \n\n")
    said: list[str] = []
    manifest = prepare(options(tmp_path / "corpus", folder, skip_invalid=True), said.append)
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


def test_a_long_line_is_read_in_bounded_pieces(tmp_path: Path, monkeypatch: Patch) -> None:
    path = tmp_path / "long.txt"
    path.write_text("a long line " * 400_000 + "y" * 600_000)
    (document,) = documents.Reader([Entry(path)])
    assert max(map(len, document.blocks())) <= 1 << 20
    lengths = [len(piece.text) for piece in cut(document.blocks())]
    assert max(lengths) <= PIECE + 1 and sum(lengths) == 5_400_001
    monkeypatch.setattr(sourcefiles, "MAX_JSON_LINE", 1 << 20)
    long_row = write_rows(tmp_path / "row.jsonl", ["x" * (3 << 20)])
    assert "row.jsonl line 1 is over 1 MiB" in refused(options(tmp_path / "corpus", long_row))


def test_blocks_of_text_are_decoded_across_their_ends(tmp_path: Path, monkeypatch: Patch) -> None:
    content = "é漢🙂\r\n\x85" * 9
    (tmp_path / "a.txt").write_bytes(content.encode())
    blocks = [content.encode()[i : i + 1] for i in range(len(content.encode()))]
    monkeypatch.setattr(documents, "read_blocks", lambda entry: iter(blocks))
    (document,) = documents.Reader([Entry(tmp_path / "a.txt")])
    assert "".join(document.blocks()) == content
    assert b"".join(read_blocks(Entry(tmp_path / "a.txt"))) == content.encode()


# The command line


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (["--valid", "a.txt", "--test", "a.txt", "--seed", "3"], "--seed has no effect"),
        (["--valid", "a.txt", "--test", "a.txt", "--test-fraction", "0.1"], "--test-fraction has no effect"),
        (["--seed", "٣"], "'٣' is not a whole number"),
        (["--tokenizer", "words", "--sample-bytes", "200000"], "--sample-bytes is for a vocabulary that bpe learns"),
        (["--vocab-from", "other", "--sample-bytes", "200000"], "--sample-bytes is for a vocabulary that bpe learns"),
    ],
)
def test_what_would_have_no_effect_is_refused(flags, words, tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("a.txt").write_text("some text\n")
    assert main(["prepare", "a.txt", "--dest", "made", *flags]) == 2
    error = capsys.readouterr().err
    assert error.startswith("error: ") and error.count("\n") == 1 and words in error
    assert not Path("made").exists()
