"""Corpora of any text: documents kept apart, byte-exact for any number of workers, in every format and vocabulary."""

from __future__ import annotations

import io
import json
import random
import zipfile
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from preparing import PROSE, TEXTS, contents, everything, fill, finished, ignored, options, prose, refused, write_rows
from test_tokenizer import NASTY

from fairseq_rpe.cli.main import main
from fairseq_rpe.core.errors import UserError
from fairseq_rpe.data import documents, pipeline, vocabulary
from fairseq_rpe.data import splits as splitting
from fairseq_rpe.data.documents import SourceFile, find_source_files, read_blocks
from fairseq_rpe.data.folder import (
    MADE_BY,
    SPLITS,
    Units,
    check_documents,
    document_ends,
    read_dictionary,
    read_manifest,
    read_split,
    read_units,
    write_index,
)
from fairseq_rpe.data.pipeline import prepare_corpus
from fairseq_rpe.data.stream import (
    PIECE,
    Piece,
    SplitWriter,
    decode_documents,
    encode_chunk,
    group_pieces,
    split_pieces,
)
from fairseq_rpe.data.tokenization import EOS, Encoder, Tokenizer, load_decoder, load_encoder
from fairseq_rpe.data.vocabulary import BpeLearner

Patch = pytest.MonkeyPatch
SPELT = {"tokenizer": "words", "vocab_size": None}


@pytest.fixture(scope="module")
def made(made_once) -> Path:
    return made_once("prepared-texts", fill) / "corpus"


@settings(max_examples=100, deadline=None, derandomize=True)
@given(st.text(st.sampled_from("ab\n é\u2028漢")) | st.sampled_from(TEXTS), st.integers(1, 60), st.integers(2, 1000))
def test_pieces_are_the_text_and_bounded(content: str, block: int, size: int) -> None:
    found = list(split_pieces([content[i : i + block] for i in range(0, len(content), block)], size))
    assert "".join(piece.text for piece in found).encode() == finished([content])[0] or not content
    assert max(len(piece.text) for piece in found) <= size + 1
    assert [piece.first for piece in found] == [True] + [False] * (len(found) - 1)
    assert sum(len(p.text.split()) - p.in_word for p in found) == len(content.split())


def assert_encoded_as_its_lines(corpus: Path, lines: Sequence[str]) -> None:
    encoder, tokenizer = load_encoder("bpe", corpus), Tokenizer.load(corpus / "spm.model")
    symbols = read_dictionary(corpus / "dict.txt")
    for line in lines:
        assert [symbols[i] for i in encoder.encode(line)] == [tokenizer.symbols[i] for i in tokenizer.encode(line)]


def test_words_are_encoded_as_their_lines_and_pieces_would_be(made: Path) -> None:
    assert_encoded_as_its_lines(made, [*NASTY, *"\n".join(TEXTS).split("\n")])
    encoder = load_encoder("bpe", made)
    for content in PROSE:
        found = [encoder.encode(piece.text) for piece in split_pieces([content], 64)]
        assert np.array_equal(np.concatenate(found), encoder.encode(content + "\n"))


def test_scripts_with_marks_inside_words(tmp_path: Path) -> None:
    rng = random.Random(3)
    syllables = ["कि", "ता", "ब", "हिं", "दी", "को", "e\u0301t", "te\u0301", "ธ์", "กี่", "ascii", "x1"]
    texts = [" ".join("".join(rng.choices(syllables, k=3)) for _ in range(90)) + "।\n" for _ in range(40)]
    rows, dest = write_rows(tmp_path / "rows.jsonl", texts), tmp_path / "corpus"
    prepare_corpus(options(dest, rows), ignored)
    assert sorted(everything(dest)) == sorted(finished(texts))
    assert any(len(symbol) > 1 and "ि" in symbol[1:] for symbol in read_dictionary(dest / "dict.txt"))
    assert_encoded_as_its_lines(dest, [line for t in texts for line in t[:-1].split("\n")])


def test_gather_keeps_order_and_bounds() -> None:
    chunks = list(group_pieces([(key, Piece(f"{key}{number}")) for number in range(20) for key in "ab"], 8))
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


@settings(max_examples=100, deadline=None, derandomize=True)
@given(st.lists(DOCUMENT, min_size=1, max_size=6), st.integers(1, 12), st.integers(1, 30))
def test_streams_are_lossless_and_only_boundaries_are_lone_line_ends(
    tmp_path_factory: pytest.TempPathFactory, texts: list[str], size: int, chunk: int
) -> None:
    """Whatever the sizes of pieces and chunks."""
    folder = tmp_path_factory.mktemp("stream")
    with SplitWriter(folder, "x", "<u2") as writer:
        for _, part in group_pieces([("x", piece) for t in texts for piece in split_pieces([t], size)], chunk):
            writer.add(encode_chunk(Letters(), part))
    tokens, sizes = read_split(folder, "x")
    assert writer.counts["tokens"] == len(tokens) == sizes.sum() and writer.counts["documents"] == len(texts)
    items = ["".join("\n" if i == EOS else chr(i) for i in part) for part in np.split(tokens, np.cumsum(sizes)[:-1])]
    groups = "".join("\0" if item == "\n" else item for item in items).split("\0")
    assert [group.encode() for group in groups] == finished(texts)
    assert writer.counts["bytes"] == sum(map(len, finished(texts)))


def test_sample_is_bounded_and_depends_on_the_text_only(made: Path, tmp_path: Path, monkeypatch: Patch) -> None:
    seen: list[list[str]] = []

    def learned(lines: Sequence[str], size: int) -> bytes:
        seen.append(list(lines))
        return (made / "spm.model").read_bytes()

    monkeypatch.setattr(vocabulary, "train_tokenizer", learned)

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


def test_documents_come_back_byte_for_byte_and_are_counted(made: Path) -> None:
    assert sorted(everything(made)) == sorted(finished(TEXTS))
    check_documents(made, *SPLITS)
    for split in SPLITS:
        found, (tokens, _), ends = decode_documents(made, split), read_split(made, split), document_ends(made, split)
        units = {"tokens": len(tokens), "bytes": sum(map(len, found)), "documents": len(found)}
        units["words"] = sum(len(d.decode().split()) + d.count(b"\n") for d in found)
        assert (units | {"unknown": 0}).items() <= read_manifest(made)["splits"][split].items() and len(found) > 1
        assert read_units(made, split) == Units(**units)
        # each but the last ends with the separator
        *parts, last = np.split(tokens, ends[:-1])
        assert [load_decoder("bpe", made)(ids.tolist()) for ids in (*(p[:-1] for p in parts), last)] == found
        assert ends[-1] == len(tokens)


def test_fairseq_knows_the_documents_apart(made: Path) -> None:
    from fairseq.data import Dictionary, TokenBlockDataset, data_utils

    words = Dictionary.load(str(made / "dict.txt"))
    assert len(words) == 400
    dataset = data_utils.load_indexed_dataset(str(made / "train"), words)
    args = (dataset, dataset.sizes, 2**20, words.pad(), words.eos(), "complete_doc")
    # fairseq drops documents of one token only, which there are none of
    assert len(TokenBlockDataset(*args, document_sep_len=1)) == len(decode_documents(made, "train"))


def written_items(folder: Path, *items: Sequence[int]) -> Path:
    """A split ``test`` of these items, as fairseq-preprocess writes it."""
    np.concatenate([np.array(item, "<u2") for item in items]).tofile(folder / "test.bin")
    write_index(folder / "test.idx", io.BytesIO(np.array([len(x) for x in items], "<i4").tobytes()), "<u2")
    return folder


ENDS: list[tuple[list[list[int]], list[int]]] = [
    ([[5, 2], [6, 7, 2], [2], [8, 2]], [6, 8]),
    ([[2], [2], [5, 2], [2], [2], [6, 2], [2]], [6, 9]),  # runs of separators belong to the document before
    ([[5, 2], [9], [6, 2]], [5]),  # one token that is no line end separates nothing
    ([[2], [2]], [2]),
    ([[5, 2]], [2]),
]


@pytest.mark.parametrize(("items", "ends"), ENDS)
def test_blank_lines_end_documents(items: list[list[int]], ends: list[int], tmp_path: Path) -> None:
    assert document_ends(written_items(tmp_path, *items), "test").tolist() == ends


def test_corpora_that_mark_no_documents_are_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="no document boundaries.*--blocks stream"):
        check_documents(written_items(tmp_path, [5, 2], [6, 2]), "test")
    for choice, words in (({"boundaries": False}, "--no-boundaries"), ({"rows_are_lines": True}, "rows are lines")):
        manifest = {"made_by": MADE_BY, "tokenizer": {"kind": "bpe"}, "options": choice}
        (tmp_path / "corpus.json").write_text(json.dumps(manifest))
        with pytest.raises(UserError, match=words):
            check_documents(tmp_path, "test")


def test_any_number_of_workers_and_any_size_of_chunks(made: Path, tmp_path: Path, monkeypatch: Patch) -> None:
    monkeypatch.setattr(pipeline, "group_pieces", lambda stream: group_pieces(stream, 500))
    prepare_corpus(options(tmp_path / "corpus", made.parent / "texts", workers=2), ignored)
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
        found = list(splitting.SplitDocuments(options(folder / "corpus", rows, seed=seed)))
        assert len(found) == len({document.digest for _, document in found}) == len(chosen)
        splits.append({document.digest: split for split, document in found})
    assert splits[0].items() <= splits[1].items() and set(splits[1].values()) <= set(SPLITS)


@pytest.mark.parametrize("ending", ["jsonl", "jsonl.gz", "jsonl.xz", "jsonl.zst", "json", "json.zst", "parquet"])
def test_formats_give_the_same_corpus(made: Path, tmp_path: Path, ending: str) -> None:
    path = write_rows(tmp_path / f"rows.{ending}", [text for part in range(3) for text in TEXTS[part::3]])
    prepare_corpus(options(tmp_path / "corpus", path, vocab_size=None, vocab_from=made), ignored)
    assert contents(tmp_path / "corpus", "corpus.json") == contents(made, "corpus.json")


@pytest.mark.parametrize("text", ['{\n  "text": "words"\n}\n', '["words"]\n', "no JSON at all\n", "[" * 100_000])
def test_json_that_is_one_document_is_refused(tmp_path: Path, text: str) -> None:
    (tmp_path / "all.json").write_text(text)
    with pytest.raises(UserError, match=r"all.json is JSON, but not an object per line: leave it out, or write each"):
        find_source_files([tmp_path])
    with zipfile.ZipFile(tmp_path / "all.zip", "w") as archive:
        archive.writestr("package.json", text)
        archive.writestr("a.txt", "words")
    entries, _ = find_source_files([tmp_path / "all.zip"], include=["*.txt"])
    assert [entry.name for entry in entries] == ["a.txt"]


def test_zip_archives_and_patterns(made: Path, tmp_path: Path) -> None:
    with zipfile.ZipFile(tmp_path / "all.zip", "w") as archive:
        for path in sorted(made.parent.rglob("texts/*/*.txt")):
            archive.write(path, path.relative_to(made.parent))
        archive.writestr("picture.png", b"\x89PNG\0\0")
        archive.writestr("notes.md", "not wanted")
    said: list[str] = []
    given: dict[str, Any] = {"include": ("*.txt", "*.png"), "vocab_size": None, "vocab_from": made}
    prepare_corpus(options(tmp_path / "corpus", tmp_path / "all.zip", **given), said.append)
    assert sorted(everything(tmp_path / "corpus")) == sorted(finished(TEXTS)) and "left out: 1 binary" in said


def test_given_splits_and_rows_as_lines(tmp_path: Path) -> None:
    files = {}
    for split in SPLITS:
        rows = [" = Title = \n", "", f" words of {split} <unk> here \n", "no newline"]
        files[split] = (write_rows(tmp_path / f"{split}.jsonl", rows),)
    prepare_corpus(options(tmp_path / "corpus", *files.pop("train"), **files, **SPELT, rows_are_lines=True), ignored)
    lines = b"= Title = \n\nwords of \xef\xbf\xbd\xef\xbf\xbdhere \nno newline \n"
    assert everything(tmp_path / "corpus")[1:] == [lines] * 2
    units = read_units(tmp_path / "corpus", "test")
    assert units is not None and (units.tokens, units.words, units.documents) == (14, 14, 1)


def test_words_have_fairseqs_own_dictionary(tmp_path: Path) -> None:
    from fairseq.data import Dictionary

    # Names of fairseq's specials would come back as what they stand for.
    rows = write_rows(tmp_path / "rows.jsonl", [*PROSE, *TEXTS[37:]])
    prepare_corpus(options(tmp_path / "corpus", rows, **SPELT), ignored)
    theirs = Dictionary()
    for document in decode_documents(tmp_path / "corpus", "train"):
        for word in document.decode().split():
            theirs.add_symbol(word)
    theirs.finalize(padding_factor=8)
    found = read_dictionary(tmp_path / "corpus" / "dict.txt")
    assert len(found) == len(theirs) and len(found) % 8 == 0 and found[4:] == theirs.symbols[4:]


def test_a_vocabulary_can_be_shared(made: Path, tmp_path: Path) -> None:
    rows = write_rows(tmp_path / "other.jsonl", [prose(1000 + number) + " ©" for number in range(12)])
    prepare_corpus(options(tmp_path / "corpus", rows, vocab_size=None, vocab_from=made), ignored)
    for name in ("dict.txt", "spm.model"):
        assert (tmp_path / "corpus" / name).read_bytes() == (made / name).read_bytes()
    assert len(everything(tmp_path / "corpus")) == 12

    mixed = tmp_path / "mixed"
    prepare_corpus(options(mixed, rows, vocab_size=350), ignored)
    (mixed / "dict.txt").write_bytes((made / "dict.txt").read_bytes())
    message = refused(options(tmp_path / "new", rows, vocab_size=None, vocab_from=mixed))
    assert f"{mixed}/dict.txt is not the one that the corpus was made with" in message
    (mixed / "corpus.json").write_text(json.dumps({**read_manifest(mixed), "files": {}}))
    message = refused(options(tmp_path / "new", rows, vocab_size=None, vocab_from=mixed))
    assert "dict.txt is not of the same corpus as its spm.model" in message


FEW = {
    "two": [4000, 300],
    "one": [900],
    "five": [3000, 2, 4000, 1, 800],
    "twelve": [200] * 12,
    "uneven": [3, 500, 40, 900, 7, 1200, 60, 300, 5, 800, 90, 20],
    "tiny": [1] * 5,
}


def test_copies_of_a_document_stay_in_one_split(made: Path, tmp_path: Path) -> None:
    (tmp_path / "texts").mkdir()
    for number, text in enumerate("abcdef"):
        for copy in range(1 + 2 * (text == "c")):
            (tmp_path / "texts" / f"{number}-{copy}.txt").write_text(f"{text} " * 300 + "\n")
    changes: dict[str, Any] = {"vocab_from": made, "vocab_size": None}
    for seed in range(1, 7):
        prepare_corpus(options(tmp_path / f"corpus{seed}", tmp_path / "texts", **changes, seed=seed), lambda _: None)
        splits = [set(decode_documents(tmp_path / f"corpus{seed}", split)) for split in SPLITS]
        assert all(splits) and len(set.union(*splits)) == sum(map(len, splits)) == 6


JOINTS = [*((name, "\n\n") for name in FEW), ("two", "\n"), ("five", " "), ("uneven", "\n"), ("tiny", " ")]


@pytest.mark.parametrize(("name", "joint"), JOINTS)
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
    manifest = prepare_corpus(options(tmp_path / "corpus", tmp_path / "texts", **changes), said.append)
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
    changes: dict[str, Any] = {"split_by": "part", "vocab_from": made, "vocab_size": None, "valid_fraction": 0.1}
    prepare_corpus(options(tmp_path / "corpus", rows, **changes), ignored)
    found = [[text.decode() for text in decode_documents(tmp_path / "corpus", split)] for split in SPLITS]
    assert [len(documents) for documents in found] == [21, 20, 20] and found[0][-1] == "alone\n"
    for text, parts in zip(texts, zip(*found, strict=False), strict=True):
        assert "".join(" ".join(parts).split()) == "".join(text.split())
        assert [len(part) / len(text) for part in parts] == pytest.approx([0.7, 0.1, 0.2], abs=0.01)
    first = prepare_corpus(options(tmp_path / "first", rows, **changes, documents=3), ignored)
    assert [count["documents"] for count in first["splits"].values()] == [3, 3, 3]


def test_rows_of_one_file_are_divided_between_lines(made: Path, tmp_path: Path) -> None:
    texts = [f"row {number} of a file\n" for number in range(200)]
    rows = write_rows(tmp_path / "rows.jsonl", texts)
    changes: dict[str, Any] = {"rows_are_lines": True, "vocab_from": made, "vocab_size": None}
    prepare_corpus(options(tmp_path / "corpus", rows, **changes), ignored)
    found = everything(tmp_path / "corpus")
    assert b"".join(found).decode() == "".join(texts) and [part.count(b"\n") for part in found] == [123, 39, 38]


@pytest.fixture(scope="module")
def gpt2(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small vocabulary, with the names that GPT-2's own files have."""
    pytest.importorskip("tokenizers")
    from tokenizers import Tokenizer, models, pre_tokenizers, trainers

    folder = tmp_path_factory.mktemp("gpt2")
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    tokenizer.train_from_iterator(PROSE, trainers.BpeTrainer(vocab_size=400, initial_alphabet=alphabet))
    tokenizer.model.save(str(folder))
    return folder


def test_gpt2_tokens_are_the_librarys_and_every_byte_returns(made: Path, gpt2: Path, tmp_path: Path) -> None:
    from tokenizers import ByteLevelBPETokenizer

    dest = tmp_path / "corpus"
    prepare_corpus(options(dest, made.parent / "texts", tokenizer="gpt2", gpt2=gpt2, vocab_size=None), ignored)
    assert sorted(everything(dest)) == sorted(finished(TEXTS))
    symbols = read_dictionary(dest / "dict.txt")
    assert len(symbols) == 400 + 8 and symbols[-4:] == [*(f"madeupword000{i}" for i in range(3)), "<mask>"]
    theirs = ByteLevelBPETokenizer.from_file(str(gpt2 / "vocab.json"), str(gpt2 / "merges.txt"))
    encoder = load_encoder("gpt2", dest)
    for line in [*NASTY, *"\n".join(TEXTS).split("\n")]:
        assert [symbols[i] for i in encoder.encode(line)] == [str(i) for i in theirs.encode(line).ids]


def test_gpt2_takes_a_published_dictionary_and_file_names(gpt2: Path, tmp_path: Path) -> None:
    published, rows = tmp_path / "published", write_rows(tmp_path / "rows.jsonl", PROSE)
    published.mkdir()
    (published / "encoder.json").write_bytes((gpt2 / "vocab.json").read_bytes())
    (published / "vocab.bpe").write_bytes((gpt2 / "merges.txt").read_bytes())
    order = [*map(str, range(399, -1, -1)), "madeupword0000"]
    (published / "dict.txt").write_text("".join(f"{number} 7\n" for number in order))
    given: dict[str, Any] = {"tokenizer": "gpt2", "gpt2": published, "vocab_size": None}
    prepare_corpus(options(tmp_path / "corpus", rows, **given), ignored)
    assert read_dictionary(tmp_path / "corpus" / "dict.txt")[4:] == order
    assert sorted(everything(tmp_path / "corpus")) == sorted(finished(PROSE))
    for name, content, words in (
        ("dict.txt", "0 1\n1 1\n", "dict.txt does not match its vocab.json"),
        ("vocab.bpe", "no merges\n", "merges.txt does not fit its vocab.json"),
        ("encoder.json", '{"a": 1}', "not a GPT-2 vocabulary: it lacks the bytes"),
    ):
        (published / name).write_text(content)
        assert words in refused(options(tmp_path / "new", rows, **given))
        (published / "dict.txt").unlink(missing_ok=True)
    (published / "encoder.json").unlink()
    assert "has no vocab.json or encoder.json" in refused(options(tmp_path / "new", rows, **given))


def test_known_corpora_from_local_files(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def known(name: str, source: Path, *more: str) -> Path:
        command = ["prepare-corpus", name, "--out", str(tmp_path / name), "--workers", "1", "--from", str(source)]
        assert main([*command, *more]) == 0
        return tmp_path / name

    with zipfile.ZipFile(tmp_path / "wikitext-103-v1.zip", "w") as archive:
        for split in SPLITS:
            archive.writestr(f"wikitext-103/wiki.{split}.tokens", f" = Title = \n \n words of {split} <unk> \n")
    units = read_units(known("wikitext103-words", tmp_path / "wikitext-103-v1.zip"), "valid")
    out = capsys.readouterr().out
    assert "warning: valid has 10 words instead of the published 217646: this is another text" in out
    assert units is not None and units.tokens == units.words == 10

    (tmp_path / "texts").mkdir()
    for name in ("books-train-0", "books-train-1", "validation", "test"):
        write_rows(tmp_path / "texts" / f"{name}.jsonl", PROSE[: 7 if name == "test" else None])
    splits = read_manifest(known("books", tmp_path / "texts", "--vocab-size", "300"))["splits"]
    assert [splits[split]["documents"] for split in SPLITS] == [72, 36, 7]

    repositories = tmp_path / "repositories"
    for number in range(40):
        (repositories / f"r{number % 3}" / ".git").mkdir(parents=True, exist_ok=True)
        (repositories / f"r{number % 3}" / f"test_{number}.py").write_text(prose(number))
        (repositories / f"r{number % 3}" / ".git" / f"{number}.py").write_text("hidden")
    fractions = ("--valid-fraction", "0.2", "--test-fraction", "0.2")
    assert len(everything(known("github", repositories, "--vocab-size", "300", *fractions))) == 40


def test_units_are_read_if_they_are_recorded(made: Path, tmp_path: Path) -> None:
    units = Units(tokens=300, bytes=1200, words=100, documents=2)
    assert (units.bits_per_byte(4.0), units.word_ppl(2.0), units.word_ppl(4000.0)) == (1.0, 64.0, float("inf"))
    manifest = read_manifest(made)
    assert read_units(made, "elsewhere") is None and read_units(tmp_path, "valid") is None
    del manifest["splits"]["valid"]["words"]
    (tmp_path / "corpus.json").write_text(json.dumps(manifest))
    assert read_units(tmp_path, "valid") is None and read_units(tmp_path, "test") is not None


def test_a_long_line_is_read_in_bounded_pieces(tmp_path: Path, monkeypatch: Patch) -> None:
    path = tmp_path / "long.txt"
    path.write_text("a long line " * 400_000 + "y" * 600_000)
    (document,) = documents.DocumentReader([SourceFile(path)])
    assert max(map(len, document.blocks())) <= 1 << 20
    lengths = [len(piece.text) for piece in split_pieces(document.blocks())]
    assert max(lengths) <= PIECE + 1 and sum(lengths) == 5_400_001
    monkeypatch.setattr(documents, "MAX_JSON_LINE", 1 << 20)
    long_row = write_rows(tmp_path / "row.jsonl", ["x" * (3 << 20)])
    assert "row.jsonl line 1 is over 1 MiB" in refused(options(tmp_path / "corpus", long_row))


def test_blocks_of_text_are_decoded_across_their_ends(tmp_path: Path, monkeypatch: Patch) -> None:
    content = "é漢🙂\r\n\x85" * 9
    (tmp_path / "a.txt").write_bytes(content.encode())
    assert b"".join(read_blocks(SourceFile(tmp_path / "a.txt"))) == content.encode()
    blocks = [content.encode()[i : i + 1] for i in range(len(content.encode()))]
    monkeypatch.setattr(documents, "read_blocks", lambda entry: iter(blocks))
    (document,) = documents.DocumentReader([SourceFile(tmp_path / "a.txt")])
    assert "".join(document.blocks()) == content
