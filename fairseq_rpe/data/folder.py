"""What the commands need to know of a binarised data folder, read without fairseq."""

from __future__ import annotations

import os
import struct
from pathlib import Path

from fairseq_rpe.core.errors import UserError
from fairseq_rpe.core.files import file_digest
from fairseq_rpe.data.place import describe_files, read_manifest

_MAGIC = b"MMIDIDX\x00\x00"
_HEADER = struct.Struct("<QBQ")  # version, code of the number type, number of lines


def check_folder(data: Path, *splits: str) -> None:
    """Refuse a folder that ``fairseq-preprocess`` has not filled, or whose dictionary was exchanged."""
    if os.pathsep in str(data):
        raise UserError(f"'{data}' contains '{os.pathsep}', where fairseq splits paths: rename the folder")
    if not data.is_dir():
        raise UserError(f"data folder {data} does not exist: make one, e.g. with fairseq-rpe prepare-stdlib")
    for name in ("dict.txt", *(f"{s}.{end}" for s in splits for end in ("idx", "bin"))):
        if not (data / name).is_file():
            raise UserError(f"{data} has no {name}: it is not a binarised data folder with {' and '.join(splits)}")
    made = ((read_manifest(data) or {}).get("files") or {}).get("dict.txt")
    if made is not None and made != describe_files(data, ["dict.txt"])["dict.txt"]:
        raise UserError(f"{data}/dict.txt is not the one that the corpus was made with: prepare {data} again")


def count_tokens(data: Path, split: str) -> int:
    """Number of tokens of a split (line ends included), from its index file."""
    path = data / f"{split}.idx"
    with open(path, "rb") as file:
        head = file.read(len(_MAGIC) + _HEADER.size)
        if len(head) < len(_MAGIC) + _HEADER.size or not head.startswith(_MAGIC):
            raise UserError(f"{path} is not an mmap index: binarise again with --dataset-impl mmap")
        _, _, lines = _HEADER.unpack_from(head, len(_MAGIC))
        sizes = file.read(4 * lines)
    if len(sizes) != 4 * lines:
        raise UserError(f"{path} is cut short: binarise the data again")
    return sum(memoryview(sizes).cast("i"))


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
    names = sorted(p for p in data.iterdir() if p.suffix in (".idx", ".bin"))
    return file_digest(data / "dict.txt", *names)
