"""A data folder: fairseq's dictionary and memory-mapped splits, and ``corpus.json``, which says how it was made."""

import os
import shutil
import struct
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from fairseq_rpe.core.errors import UserError
from fairseq_rpe.core.files import file_digest, read_json

FAIRSEQ_SPECIALS = ("<s>", "<pad>", "</s>", "<unk>")
SPLITS = ("train", "valid", "test")
BINARIES = tuple(f"{split}.{end}" for split in SPLITS for end in ("bin", "idx"))
MANIFEST = "corpus.json"
MADE_BY = "fairseq-rpe prepare"
# The corpus of the standard library had a maker of its own once.
_OURS = (MADE_BY, "fairseq-rpe prepare-stdlib")

_MAGIC = b"MMIDIDX\x00\x00"
_HEADER = struct.Struct("<QBQ")  # version, code of the number type, number of items
_DTYPES = {4: "<i4", 5: "<i8", 8: "<u2", 9: "<u4"}
_COPY = 1 << 18


def check_folder(data: Path, *splits: str) -> None:
    """Refuse a folder that is not binarised, or whose dictionary was exchanged, naming what is missing."""
    if os.pathsep in str(data):
        raise UserError(f"'{data}' contains '{os.pathsep}', where fairseq splits paths: rename the folder")
    if not data.is_dir():
        raise UserError(f"data folder {data} does not exist: make one, e.g. with fairseq-rpe prepare-stdlib")
    for name in ("dict.txt", *(f"{s}.{end}" for s in splits for end in ("idx", "bin"))):
        if not (data / name).is_file():
            raise UserError(f"{data} has no {name}: it is not a binarised data folder with {' and '.join(splits)}")
    made = (read_manifest(data).get("files") or {}).get("dict.txt")
    if made is not None and made != describe_files(data, ["dict.txt"])["dict.txt"]:
        raise UserError(f"{data}/dict.txt is not the one that the corpus was made with: prepare {data} again")


def count_tokens(data: Path, split: str) -> int:
    """Number of tokens of a split (line ends included), from its index file."""
    return int(_read_index(data / f"{split}.idx")[1].sum(dtype=np.int64))


def check_block(data: Path, split: str, length: int) -> int:
    """Refuse a split that does not fill one block of ``length`` tokens; returns its tokens."""
    tokens = count_tokens(data, split)
    if tokens < length:
        raise UserError(
            f"{data}/{split} has {tokens} tokens, less than one block of {length}: use more text or a smaller length"
        )
    return tokens


def digest(data: Path) -> str:
    """One digest for dictionary and all splits: equal digests mean equal numbers."""
    return file_digest(data / "dict.txt", *sorted(p for p in data.iterdir() if p.suffix in (".idx", ".bin")))


def _read_index(path: Path) -> tuple[str, np.ndarray]:
    """The number type of the ids and the tokens of each item, (items,)."""
    with open(path, "rb") as file:
        head = file.read(len(_MAGIC) + _HEADER.size)
        whole = len(head) == len(_MAGIC) + _HEADER.size and head.startswith(_MAGIC)
        _, code, items = _HEADER.unpack_from(head, len(_MAGIC)) if whole else (0, 0, 0)
        if code not in _DTYPES:
            raise UserError(f"{path} is not an mmap index: binarise again with --dataset-impl mmap")
        if os.fstat(file.fileno()).st_size < len(head) + 4 * items:
            raise UserError(f"{path} is cut short: binarise the data again")
        return _DTYPES[code], np.fromfile(file, "<i4", items)


def write_index(path: Path, sizes: BinaryIO, dtype: str) -> None:
    """Write the index of items whose sizes in tokens are the little-endian int32 of ``sizes``, never all in memory."""
    codes = {name: code for code, name in _DTYPES.items()}
    with open(path, "wb") as index:
        items = sizes.seek(0, os.SEEK_END) // 4
        index.write(_MAGIC + _HEADER.pack(1, codes[dtype], items))
        sizes.seek(0)
        shutil.copyfileobj(sizes, index)
        sizes.seek(0)
        address = 0
        while block := sizes.read(_COPY):
            ends = address + np.cumsum(np.frombuffer(block, "<i4"), dtype="<i8") * np.dtype(dtype).itemsize
            index.write(np.concatenate(([address], ends[:-1])).astype("<i8").tobytes())
            address = int(ends[-1])


def read_split(folder: Path, split: str) -> tuple[np.ndarray, np.ndarray]:
    """The token ids of a split, (tokens,), and the tokens of each item, (items,); refused if they do not fit."""
    dtype, sizes = _read_index(folder / f"{split}.idx")
    tokens = np.fromfile(folder / f"{split}.bin", dtype=dtype)
    if len(tokens) != sizes.sum(dtype=np.int64):
        raise UserError(f"{folder}/{split}.bin has not the tokens that its index counts: binarise the data again")
    return tokens, sizes


def write_dictionary(path: Path, symbols: Sequence[str]) -> None:
    """Write a fairseq dictionary; its symbols get the ids 4, 5, ... after fairseq's specials."""
    path.write_text("".join(f"{symbol} 1\n" for symbol in symbols), encoding="utf-8")


def read_dictionary(path: Path) -> list[str]:
    """All symbols of a fairseq dictionary by id, fairseq's specials included."""
    lines = path.read_text(encoding="utf-8").split("\n")[:-1]
    return [*FAIRSEQ_SPECIALS, *(line.rsplit(" ", 1)[0] for line in lines)]


def describe_files(folder: Path, names: Iterable[str]) -> dict[str, dict[str, Any]]:
    """Size in bytes and sha256 of each file of a folder, for its manifest."""
    return {name: {"bytes": (folder / name).stat().st_size, "sha256": file_digest(folder / name)} for name in names}


def read_manifest(folder: Path) -> dict[str, Any]:
    """What ``corpus.json`` says, nothing unless it is there and was written by one of these commands."""
    try:
        manifest = read_json(folder / MANIFEST)
    except UserError:
        return {}
    return manifest if manifest.get("made_by") in _OURS else {}


@dataclass(frozen=True)
class Units:
    """What a split of a corpus consists of; losses in units that do not depend on the tokenizer."""

    tokens: int  # of the tokenizer, with line ends and document boundaries
    bytes: int  # of its text in UTF-8, line ends included
    # Separated by white space, and each line end is one more: 245,569 in the test text of WikiText-103, as published.
    words: int
    documents: int

    def bits_per_byte(self, loss_base2: float) -> float:
        """Bits for each byte of text, loss_base2 · tokens / bytes, from the mean loss in bits over all tokens."""
        return loss_base2 * self.tokens / self.bytes

    def word_ppl(self, loss_base2: float) -> float:
        """Perplexity per word, 2 ** (loss_base2 · tokens / words), from the mean loss in bits over all tokens."""
        exponent = loss_base2 * self.tokens / self.words
        return 2.0**exponent if exponent < 1024 else float("inf")


def read_units(folder: Path, subset: str) -> Units | None:
    """The units of a split of a prepared corpus, ``None`` if they were not recorded when it was prepared."""
    split = read_manifest(folder).get("splits", {}).get(subset, {})
    counts = {field.name: split.get(field.name) for field in fields(Units)}
    return Units(**counts) if all(isinstance(count, int) and count > 0 for count in counts.values()) else None
