"""What tests of prepared corpora share: texts, options of a preparation, and what it leaves behind."""

from __future__ import annotations

import gzip
import json
import lzma
import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from test_tokenizer import NASTY

from fairseq_rpe.core.errors import UserError
from fairseq_rpe.data.folder import SPLITS
from fairseq_rpe.data.pipeline import prepare_corpus
from fairseq_rpe.data.prepare_options import PrepareOptions
from fairseq_rpe.data.stream import decode_documents

WORDS = [a + b + c for a in ("", "st", "m", "th", "un") for b in ("a", "ie", "o") for c in ("n", "ck", "ring", "lt")]


def prose(number: int) -> str:
    rng = random.Random(number)
    sentences = (" ".join(rng.choice(WORDS) for _ in range(rng.randrange(3, 18))) for _ in range(30))
    return "".join(s + rng.choice([".\n", ". ", ".\n\n", "?\n   "]) for s in sentences) + f"end {number}"


PROSE = [prose(number) for number in range(36)]
# Every way to begin, end and be blank.
TEXTS = [*PROSE, "\n".join(NASTY).replace("\0", "(a NUL would be binary)"), "\n\n\nafter blanks", "before blanks\n\n\n"]
TEXTS += [" \n x \n", "\nlast\n\n \n\nline", "a", "é\n"]


def write_texts(folder: Path, texts: Sequence[str] = TEXTS) -> Path:
    for number, content in enumerate(texts):
        path = folder / f"part{number % 3}" / f"{number:02d}.txt"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content.encode())
    return folder


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
        pack: Any = {".gz": gzip.compress, ".xz": lzma.compress}.get(path.suffix, bytes)
        path.write_bytes(pack(lines))
    return path


def options(dest: Path, *train: Path, **changes: Any) -> PrepareOptions:
    usual = {"vocab_size": 400, "valid_fraction": 0.2, "test_fraction": 0.2, "workers": 1}
    return PrepareOptions(out=dest, train=train, **{**usual, **changes})


def ignored(line: str) -> None:
    pass


def finished(texts: Sequence[str]) -> list[bytes]:
    """As a corpus has them: each with a line end."""
    return [(t if t.endswith("\n") else t + "\n").encode() for t in texts]


def everything(corpus: Path) -> list[bytes]:
    return [document for split in SPLITS for document in decode_documents(corpus, split)]


def contents(folder: Path, *left_out: str) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir() if path.name not in left_out}


def refused(options: PrepareOptions) -> str:
    """The message of the refusal, after checking that it is one line and left nothing behind."""
    before = sorted(options.out.parent.glob("*"))
    with pytest.raises(UserError) as caught:
        prepare_corpus(options, ignored)
    assert before == sorted(options.out.parent.glob("*")) and "\n" not in str(caught.value)
    return str(caught.value)


def fill(folder: Path) -> None:
    """For ``made_once``: a folder ``texts`` of files, and a corpus that was made of them."""
    prepare_corpus(options(folder / "corpus", write_texts(folder / "texts")), ignored)
