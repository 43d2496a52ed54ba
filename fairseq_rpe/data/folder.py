"""A data folder: fairseq's dictionary and memory-mapped splits, and ``corpus.json``, which says how it was made."""

import os
import re
import shutil
import struct
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any, BinaryIO, Literal, NoReturn

import numpy as np

from fairseq_rpe.core.errors import UserError
from fairseq_rpe.utils import files, records
from fairseq_rpe.utils.files import file_digest, naming, open_input, read_input, read_json
from fairseq_rpe.utils.records import Count

FAIRSEQ_SPECIALS = ("<s>", "<pad>", "</s>", "<unk>")
EOS_ID = FAIRSEQ_SPECIALS.index("</s>")
SPLITS = ("train", "valid", "test")
BLOCKS = ("stream", "document")  # whether rows of a text run across documents or lie within one
BINARIES = tuple(f"{split}.{end}" for split in SPLITS for end in ("bin", "idx"))
MANIFEST = "corpus.json"
ANSWERS = "answers.json"  # the manifest of a folder of questions in place of a text
MADE_BY = "fairseq-rpe prepare"
# The corpus of the standard library had a maker of its own once.
_OURS = (MADE_BY, "fairseq-rpe prepare-stdlib")

_MAGIC = b"MMIDIDX\x00\x00"
_VERSION = 1
_HEADER = struct.Struct("<QBQ")  # version, code of the number type, number of items
_DTYPES = {4: "<i4", 5: "<i8", 8: "<u2", 9: "<u4"}
_COUNT, _AGAIN = re.compile(r"[+-]?\d+"), "#fairseq:overwrite"
_COPY = 1 << 18
_BLOCK = 1 << 20  # numbers looked at together


def check_folder(data: Path, *splits: str) -> None:
    """Refuse a folder that is not binarised, or damaged, or changed since it was made, before anything is done with it.

    The files of the ``splits`` are read once, to their last byte.
    """
    if os.pathsep in str(data):
        raise UserError(f"'{data}' contains '{os.pathsep}', where fairseq splits paths: rename the folder")
    if not data.is_dir():
        raise UserError(f"data folder {data} does not exist: make one, e.g. with fairseq-rpe prepare-stdlib")
    for split in splits:
        if not split or Path(split).name != split:
            raise UserError(f"'{split}' is not the name of a split: name one of {data}, such as test")
    names = ["dict.txt", *(f"{s}.{end}" for s in splits for end in ("idx", "bin"))]
    for name in names:
        if not (data / name).is_file():
            raise UserError(f"{data} has no {name}: it is not a binarised data folder with {' and '.join(splits)}")
    _binaries(data)
    symbols = len(read_dictionary(data / "dict.txt"))
    for split in splits:
        _check_split(data, split, symbols)
    check_as_made(data, names)


def check_not_data(flag: str, folder: Path) -> None:
    """Refuse, as the place of other output, a folder that holds a corpus or questions.

    Args:
        flag: the option that names the folder, for the message.
        folder: it need not exist.

    Raises:
        UserError: it holds the dictionary, a split or the description of a data folder.
    """
    names = ("dict.txt", *BINARIES, MANIFEST)
    if held := next((name for name in names if (folder / name).exists()), None):
        raise UserError(f"{flag} {folder} is a data folder (it has {held}): name another one")


def check_output(folder: Path, names: Iterable[str] = ()) -> None:
    """Check, before any work, that results can be written into the folder of ``--out``.

    Args:
        folder: it need not exist.
        names: of the files to be written.

    Raises:
        UserError: it cannot be written, or holds a corpus or questions.
    """
    check_not_data("--out", folder)
    files.check_folder(folder, names)


def check_text(data: Path, *splits: str) -> None:
    """Check a folder as :func:`check_folder` does, and that it holds a text.

    Args:
        data: the folder.
        *splits: those whose files are read.

    Raises:
        UserError: the folder cannot be used, or holds questions, whose parts follow one another in no meaningful order.
    """
    if (data / ANSWERS).is_file():
        raise UserError(f"{data} holds questions, which are not one text: name a folder of fairseq-rpe prepare")
    check_folder(data, *splits)


def check_as_made(folder: Path, names: Iterable[str]) -> None:
    """Refuse files of a folder that are others than its manifest describes; not all have one."""
    made = read_manifest(folder).get("files", {})
    for name in names:
        if name in made and made[name] != describe_files(folder, [name])[name]:
            raise UserError(f"{folder}/{name} is not the one that the corpus was made with: prepare {folder} again")


def _binaries(data: Path) -> list[Path]:
    """The files of all splits; refused if one is none."""
    found = sorted(path for path in data.iterdir() if path.suffix in (".idx", ".bin"))
    for path in found:
        if not path.is_file():
            raise UserError(f"{path} is not a file, but is named like one of a split: move it out of {data}")
    return found


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


def document_ends(folder: Path, split: str) -> np.ndarray:
    """Where the documents of a split end, (documents,) int64 numbers of tokens, the last one the split's own.

    An item of nothing but a line end separates two documents, as in fairseq's ``--sample-break-mode complete_doc``. It
    belongs to the document before it, as does every further one that follows directly; those at the beginning of the
    split belong to its first document.

    Args:
        folder: binarised data folder.
        split: name of the split.

    Returns:
        Increasing ends. A split without separators is one document.

    Raises:
        UserError: index and tokens do not fit together.
    """
    ids, sizes = map_split(folder, split)
    stops = np.cumsum(sizes, dtype=np.int64)
    if not len(stops):
        return stops
    separates = sizes == 1
    separates[separates] = ids[stops[separates] - 1] == EOS_ID
    ends = separates.copy()
    ends[:-1] &= ~separates[1:]
    first = int(np.argmin(separates))  # a run of separators at the very beginning ends no document
    ends[: first if not separates[first] else len(ends)] = False
    ends[-1:] = True
    return stops[ends]


def check_documents(folder: Path, *splits: str) -> None:
    """Refuse a folder whose splits do not say where documents begin.

    Args:
        folder: binarised data folder, which :func:`check_folder` has accepted.
        splits: names of its splits.

    Raises:
        UserError: it was prepared without boundaries or from rows that are lines of one document, or has no blank
            lines between documents.
    """
    manifest = read_manifest(folder)
    options = manifest.get("options", {})
    if manifest and ("tokenizer" not in manifest or not options.get("boundaries", True)):
        raise UserError(
            f"{folder} was prepared without document boundaries: prepare it again without --no-boundaries, or use "
            "--blocks stream"
        )
    for split in splits:
        if (not manifest or options.get("rows_are_lines")) and len(document_ends(folder, split)) < 2:
            why = "its rows are lines of one document" if manifest else "no blank line separates two of them"
            raise UserError(f"{folder}/{split} has no document boundaries ({why}): use --blocks stream")


def longest_document(folder: Path, split: str) -> int:
    """The tokens of a split's longest document."""
    return int(np.diff(document_ends(folder, split), prepend=0).max(initial=0))


def check_document_block(folder: Path, split: str, length: int) -> None:
    """Refuse a split none of whose documents fills a block of ``length`` tokens.

    Args:
        folder: binarised data folder.
        split: name of the split.
        length: tokens of a block.

    Raises:
        UserError: its longest document is shorter than that.
    """
    longest = longest_document(folder, split)
    if longest < length:
        raise UserError(
            f"the longest document of {folder}/{split} has {longest} tokens, less than one block of {length}: use a "
            "smaller length, or --blocks stream"
        )


def digest(data: Path) -> str:
    """One digest for dictionary and all splits: equal digests mean equal numbers."""
    return file_digest(data / "dict.txt", *_binaries(data))


def _read_index(path: Path) -> tuple[str, np.ndarray]:
    """The number type of the ids and the tokens of each item, (items,)."""
    with naming(path), open_input(path) as file:
        head = file.read(len(_MAGIC) + _HEADER.size)
        whole = len(head) == len(_MAGIC) + _HEADER.size and head.startswith(_MAGIC)
        version, code, items = _HEADER.unpack_from(head, len(_MAGIC)) if whole else (0, 0, 0)
        if whole and version != _VERSION:
            raise UserError(f"{path} is an index of version {version}, not {_VERSION}: binarise the data again")
        if code not in _DTYPES:
            raise UserError(f"{path} is not an mmap index: binarise again with --dataset-impl mmap")
        # of each item its size and its place
        if os.fstat(file.fileno()).st_size < len(head) + (4 + 8) * items:
            raise UserError(f"{path} is cut short: binarise the data again")
        return _DTYPES[code], np.fromfile(file, "<i4", items)


def _check_split(folder: Path, split: str, symbols: int) -> None:
    """Refuse an index that does not fit its tokens, and tokens that do not fit a dictionary of so many symbols."""
    path = folder / f"{split}.idx"
    dtype, sizes = _read_index(path)
    tokens = _check_sizes(folder, split, dtype, sizes)
    place, head = 0, len(_MAGIC) + _HEADER.size + sizes.nbytes
    for start in range(0, len(sizes), _BLOCK):
        wide = sizes[start : start + _BLOCK].astype("<i8") * np.dtype(dtype).itemsize
        ends = place + np.cumsum(wide)
        if not np.array_equal(np.fromfile(path, "<i8", len(wide), offset=head + 8 * start), ends - wide):
            raise UserError(f"{path} is damaged, its items do not follow one another: binarise the data again")
        place = int(ends[-1])
    for start in range(0, tokens, _BLOCK):
        ids = np.fromfile(folder / f"{split}.bin", dtype, _BLOCK, offset=start * np.dtype(dtype).itemsize)
        if int(ids.max()) >= symbols or int(ids.min()) < 0:
            odd = next(i for i in ids.tolist() if not 0 <= i < symbols)
            why = f"holds the number {odd}, where dict.txt has {symbols} symbols: binarise the data again"
            raise UserError(f"{folder}/{split}.bin {why}")


def _check_sizes(folder: Path, split: str, dtype: str, sizes: np.ndarray) -> int:
    """The tokens of a split, which its index and its ``.bin`` must agree on."""
    tokens = int(sizes.sum(dtype=np.int64))
    there = (folder / f"{split}.bin").stat().st_size
    if there != tokens * np.dtype(dtype).itemsize or (len(sizes) and int(sizes.min()) < 0):
        raise UserError(f"{folder}/{split}.bin does not hold the tokens that its index counts: binarise the data again")
    return tokens


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
    return np.fromfile(folder / f"{split}.bin", dtype, _check_sizes(folder, split, dtype, sizes)), sizes


def map_split(folder: Path, split: str) -> tuple[np.ndarray, np.ndarray]:
    """As :func:`read_split`, but the token ids stay on the disk until they are looked at."""
    dtype, sizes = _read_index(folder / f"{split}.idx")
    _check_sizes(folder, split, dtype, sizes)
    return np.asarray(np.memmap(folder / f"{split}.bin", dtype, "r")), sizes


def unigram_ppl(ids: np.ndarray) -> float:
    """2 ** H of token ids (tokens,), H the entropy in bits of their own frequencies: no fixed distribution has less."""
    counts = np.bincount(ids)
    return float(np.exp2(np.log2(len(ids)) - np.dot(counts, np.log2(np.maximum(counts, 1))) / len(ids)))


def write_dictionary(path: Path, symbols: Sequence[str]) -> None:
    """Write a fairseq dictionary; its symbols get the ids 4, 5, ... after fairseq's specials."""
    path.write_text("".join(f"{symbol} 1\n" for symbol in symbols), encoding="utf-8")


def read_dictionary(path: Path) -> list[str]:
    """All symbols of a fairseq dictionary by id, fairseq's specials included.

    Raises UserError: fairseq would not read it.
    """
    content, symbols, number = read_input(path), list(FAIRSEQ_SPECIALS), 0

    def refuse(number: int, why: str) -> NoReturn:
        raise UserError(f"{path} line {number} {why}: use the file that the data were made with")

    try:
        lines = content.decode().replace("\r\n", "\n").replace("\r", "\n").split("\n")
    except UnicodeDecodeError as error:
        refuse(content.count(b"\n", 0, error.start) + 1, "is not UTF-8")
    known = set(symbols)
    for number, line in enumerate(lines[:-1] if lines[-1] == "" else lines, start=1):
        symbol, _, count = line.rstrip().rpartition(" ")
        again = count == _AGAIN
        if again:
            symbol, _, count = symbol.rpartition(" ")
        if not _COUNT.fullmatch(count) or not symbol:
            refuse(number, "is not a symbol with its count")
        if symbol in known and not again:
            refuse(number, f"has the symbol {symbol[:40]!r} a second time")
        known.add(symbol)
        symbols.append(symbol)
    return symbols if number else refuse(1, "is missing, the dictionary is empty")


def describe_files(folder: Path, names: Iterable[str]) -> dict[str, dict[str, Any]]:
    """Size in bytes and sha256 of each file of a folder, for its manifest."""
    return {name: {"bytes": (folder / name).stat().st_size, "sha256": file_digest(folder / name)} for name in names}


@dataclass(frozen=True)
class FileRecord:
    """A file as a manifest describes it, see :func:`describe_files`."""

    bytes: int
    sha256: str


@dataclass(frozen=True)
class _Tokenizer:
    kind: Literal["bpe", "gpt2", "words"]


@dataclass(frozen=True)
class _Manifest:
    """What is read of ``corpus.json``."""

    made_by: str = ""
    files: Mapping[str, FileRecord] = field(default_factory=dict)
    splits: Mapping[str, Mapping[str, int]] = field(default_factory=dict)
    tokenizer: _Tokenizer | None = None
    options: Mapping[str, object] = field(default_factory=dict)


@dataclass(frozen=True)
class _Maker:
    made_by: str = ""


def read_manifest(folder: Path) -> dict[str, Any]:
    """What ``corpus.json`` says, nothing unless it is there and was written by one of these commands.

    Raises UserError: it is damaged.
    """
    path = folder / MANIFEST
    if not os.path.lexists(path):
        return {}
    manifest = read_json(path)
    if records.read(_Maker, manifest, str(path), "the corpus", strict=False).made_by not in _OURS:
        return {}
    records.read(_Manifest, manifest, str(path), "the corpus", strict=False)
    return manifest


@dataclass(frozen=True)
class Units:
    """What a split of a corpus consists of; losses in units that do not depend on the tokenizer."""

    tokens: Count  # of the tokenizer, with line ends and document boundaries
    bytes: Count  # of its text in UTF-8, line ends included
    # Separated by white space, and each line end is one more: 245,569 in the test text of WikiText-103, as published.
    words: Count
    documents: Count

    def bits_per_byte(self, loss_base2: float) -> float:
        """Bits for each byte of text, loss_base2 · tokens / bytes, from the mean loss in bits over all tokens."""
        return loss_base2 * self.tokens / self.bytes

    def word_ppl(self, loss_base2: float) -> float:
        """Perplexity per word, 2 ** (loss_base2 · tokens / words), from the mean loss in bits over all tokens."""
        exponent = loss_base2 * self.tokens / self.words
        return 2.0**exponent if exponent < 1024 else float("inf")


def read_units(folder: Path, subset: str) -> Units | None:
    """The units of a split of a prepared corpus, ``None`` if they were not recorded when it was prepared."""
    counts = read_manifest(folder).get("splits", {}).get(subset, {})
    if {one.name for one in fields(Units)} - counts.keys():
        return None
    return records.read(Units, counts, str(folder / MANIFEST), f"the {subset} split", strict=False)
