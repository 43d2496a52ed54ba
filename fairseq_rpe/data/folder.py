"""Data folders: fairseq's dictionary, memory-mapped splits, and the manifest ``corpus.json`` of how they were made."""

import contextlib
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
from fairseq_rpe.utils import records
from fairseq_rpe.utils.files import add_path_to_errors, open_input, read_input, sha256_of_files
from fairseq_rpe.utils.json_files import read_json
from fairseq_rpe.utils.output_checks import check_output_folder
from fairseq_rpe.utils.records import Count

FAIRSEQ_SPECIALS = ("<s>", "<pad>", "</s>", "<unk>")
EOS_ID = FAIRSEQ_SPECIALS.index("</s>")
SPLITS = ("train", "valid", "test")
BLOCKS = ("stream", "document")  # blocks run across documents, or lie within one
BINARIES = tuple(f"{split}.{end}" for split in SPLITS for end in ("bin", "idx"))
MANIFEST = "corpus.json"
QUESTIONS_MANIFEST = "answers.json"  # the manifest of a folder of questions in place of a text
MADE_BY = "fairseq-rpe prepare"
_MAKERS = (MADE_BY, "fairseq-rpe prepare-stdlib")  # values of made_by in the manifests of this project
# Options of the prepare commands whose keys in manifests are their first names.
MANIFEST_KEYS = {
    "entity_names": "names",
    "question_position": "where",
    "min_tokens": "shortest",
    "question_format": "form",
    "source": "sentence",
    "split_by": "divide_by",
}

_MAGIC = b"MMIDIDX\x00\x00"
_VERSION = 1
_HEADER = struct.Struct("<QBQ")  # version, code of the number type, number of items
_DTYPES = {4: "<i4", 5: "<i8", 8: "<u2", 9: "<u4"}
_COUNT, _OVERWRITE_MARK = re.compile(r"[+-]?\d+"), "#fairseq:overwrite"
_COPY_BYTES = 1 << 18
_CHECK_BLOCK = 1 << 20  # items or token ids that are checked together


def check_folder(data: Path, *splits: str) -> None:
    """Check a data folder before anything is done with it.

    Args:
        data: Binarised data folder, made by this package or by ``fairseq-preprocess``.
        splits: Splits whose files are read completely.

    Raises:
        UserError: The folder is not binarised, is damaged, or was changed since it was made.
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
    check_file_digests(data, names)


def check_not_data(flag: str, folder: Path) -> None:
    """Check that an output folder is not a data folder.

    Args:
        flag: Option that names the folder, for the message.
        folder: The output folder; it need not exist.

    Raises:
        UserError: The folder has a dictionary, a split or the manifest of a corpus.
    """
    names = ("dict.txt", *BINARIES, MANIFEST)
    if data_file := next((name for name in names if (folder / name).exists()), None):
        raise UserError(f"{flag} {folder} is a data folder (it has {data_file}): name another one")


def check_output(folder: Path, names: Iterable[str] = ()) -> None:
    """Check, before any work, that results can be written into the folder of ``--out``.

    Args:
        folder: The folder; it need not exist.
        names: Names of the files to be written.

    Raises:
        UserError: The folder cannot be written, or is a data folder.
    """
    check_not_data("--out", folder)
    check_output_folder(folder, names)


def check_text_folder(data: Path, *splits: str) -> None:
    """Check a folder as :func:`check_folder` does, and that it contains a text rather than questions.

    Args:
        data: Binarised data folder, made by this package or by ``fairseq-preprocess``.
        *splits: Splits whose files are read.

    Raises:
        UserError: The folder cannot be used, or contains questions, whose texts do not form one text.
    """
    if (data / QUESTIONS_MANIFEST).is_file():
        raise UserError(f"{data} holds questions, which are not one text: name a folder of fairseq-rpe prepare")
    check_folder(data, *splits)


def check_file_digests(folder: Path, names: Iterable[str]) -> None:
    """Check the files of a folder against the digests of its manifest, if it has one.

    Args:
        folder: Prepared folder; one without a manifest is not checked.
        names: Names of the files; names that are not in the manifest are skipped.

    Raises:
        UserError: A file was changed since the folder was made.
    """
    recorded = read_manifest(folder).get("files", {})
    for name in names:
        if name in recorded and recorded[name] != describe_files(folder, [name])[name]:
            raise UserError(f"{folder}/{name} is not the one that the corpus was made with: prepare {folder} again")


def _binaries(data: Path) -> list[Path]:
    """Return the ``.idx`` and ``.bin`` files of a folder; refuse folders with such a name."""
    paths = sorted(path for path in data.iterdir() if path.suffix in (".idx", ".bin"))
    for path in paths:
        if not path.is_file():
            raise UserError(f"{path} is not a file, but is named like one of a split: move it out of {data}")
    return paths


def count_tokens(data: Path, split: str) -> int:
    """Return the number of tokens of a split, line ends included, from its index file."""
    return int(_read_index(data / f"{split}.idx")[1].sum(dtype=np.int64))


def check_block_length(data: Path, split: str, length: int) -> int:
    """Check that a split fills one block of ``length`` tokens.

    Returns:
        The tokens of the split.

    Raises:
        UserError: The split has fewer tokens.
    """
    tokens = count_tokens(data, split)
    if tokens < length:
        raise UserError(
            f"{data}/{split} has {tokens} tokens, less than one block of {length}: use more text or a smaller length"
        )
    return tokens


def document_ends(folder: Path, split: str) -> np.ndarray:
    """Return where the documents of a split end.

    An item that is only a line end separates two documents, as in fairseq's ``--sample-break-mode complete_doc``. A
    separator, and further ones directly after it, belong to the document before; separators at the beginning of the
    split belong to its first document.

    Args:
        folder: Binarised data folder.
        split: Name of the split: ``train``, ``valid`` or ``test``.

    Returns:
        (documents,) int64, increasing: tokens of the split up to the end of each document. A split without separators
        is one document.

    Raises:
        UserError: Index and tokens do not match.
    """
    ids, sizes = map_split(folder, split)
    stops = np.cumsum(sizes, dtype=np.int64)  # (items,) tokens up to the end of each item
    if not len(stops):
        return stops
    is_separator = sizes == 1  # (items,)
    is_separator[is_separator] = ids[stops[is_separator] - 1] == EOS_ID
    is_end = is_separator.copy()
    is_end[:-1] &= ~is_separator[1:]  # only the last separator of a run ends the document
    text_items = np.flatnonzero(~is_separator)
    first_text = text_items[0] if len(text_items) else len(is_end)
    is_end[:first_text] = False  # separators at the very beginning do not end a document
    is_end[-1] = True
    return stops[is_end]


def enumerate_groups(sizes: np.ndarray) -> np.ndarray:
    """Return 0, 1 … size - 1 for each of several group sizes, concatenated.

    >>> enumerate_groups(np.array([2, 3])).tolist()
    [0, 1, 0, 1, 2]
    """
    starts = np.cumsum(sizes) - sizes  # (groups,)
    return np.arange(sizes.sum()) - np.repeat(starts, sizes)


def check_documents(folder: Path, *splits: str) -> None:
    """Check that splits have document boundaries.

    Args:
        folder: Binarised data folder that :func:`check_folder` has accepted.
        splits: Names of the splits to check.

    Raises:
        UserError: The folder was prepared without boundaries or from rows that are lines of one document, or has no
            blank lines between documents.
    """
    manifest = read_manifest(folder)
    options = manifest.get("options", {})
    if manifest and ("tokenizer" not in manifest or not options.get("boundaries", True)):
        raise UserError(
            f"{folder} was prepared without document boundaries: use --blocks stream without --separate-documents, or "
            "prepare its text with 'fairseq-rpe prepare', without --no-boundaries"
        )
    for split in splits:
        if (not manifest or options.get("rows_are_lines")) and len(document_ends(folder, split)) < 2:
            why = "its rows are lines of one document" if manifest else "no blank line separates two of them"
            raise UserError(
                f"{folder}/{split} has no document boundaries ({why}): use --blocks stream without --separate-documents"
            )


def document_ends_if_recorded(folder: Path, split: str) -> np.ndarray | None:
    """Return the ends of the documents of a split, or None if it has no document boundaries.

    See :func:`document_ends` for the array, and :func:`check_documents` for the splits without boundaries.
    """
    with contextlib.suppress(UserError):
        check_documents(folder, split)
        return document_ends(folder, split)
    return None


def longest_document(folder: Path, split: str) -> int:
    """Return the tokens of the longest document of a split."""
    return int(np.diff(document_ends(folder, split), prepend=0).max(initial=0))


def check_document_block(folder: Path, split: str, length: int) -> None:
    """Check that a document of a split fills a block.

    Args:
        folder: Binarised data folder.
        split: Name of the split: ``train``, ``valid`` or ``test``.
        length: Block length in tokens.

    Raises:
        UserError: The longest document has fewer tokens.
    """
    longest = longest_document(folder, split)
    if longest < length:
        raise UserError(
            f"the longest document of {folder}/{split} has {longest} tokens, less than one block of {length}: use a "
            "smaller length, or --blocks stream"
        )


def corpus_digest(data: Path) -> str:
    """Return one sha256 of the dictionary and all splits; equal digests mean equal results."""
    return sha256_of_files(data / "dict.txt", *_binaries(data))


def _read_index(path: Path) -> tuple[str, np.ndarray]:
    """Return the dtype of the token ids and the (items,) tokens of each item."""
    with add_path_to_errors(path), open_input(path) as file:
        head = file.read(len(_MAGIC) + _HEADER.size)
        not_mmap = UserError(f"{path} is not an mmap index: binarise again with --dataset-impl mmap")
        if len(head) < len(_MAGIC) + _HEADER.size or not head.startswith(_MAGIC):
            raise not_mmap
        version, code, items = _HEADER.unpack_from(head, len(_MAGIC))
        if version != _VERSION:
            raise UserError(f"{path} is an index of version {version}, not {_VERSION}: binarise the data again")
        if code not in _DTYPES:
            raise not_mmap
        # The header is followed by the int32 size and the int64 offset of each item.
        if os.fstat(file.fileno()).st_size < len(head) + (4 + 8) * items:
            raise UserError(f"{path} is cut short: binarise the data again")
        return _DTYPES[code], np.fromfile(file, "<i4", items)


def _check_split(folder: Path, split: str, symbols: int) -> None:
    """Check that an index matches its tokens, and that the tokens are below the number of symbols."""
    path = folder / f"{split}.idx"
    dtype, sizes = _read_index(path)
    tokens = _check_sizes(folder, split, dtype, sizes)
    offset = 0  # bytes of the .bin file
    offsets_start = len(_MAGIC) + _HEADER.size + sizes.nbytes  # bytes of the index before its offsets
    for start in range(0, len(sizes), _CHECK_BLOCK):
        item_bytes = sizes[start : start + _CHECK_BLOCK].astype("<i8") * np.dtype(dtype).itemsize
        ends = offset + np.cumsum(item_bytes)
        offsets = np.fromfile(path, "<i8", len(item_bytes), offset=offsets_start + 8 * start)
        if not np.array_equal(offsets, ends - item_bytes):
            raise UserError(f"{path} is damaged, its items do not follow one another: binarise the data again")
        offset = int(ends[-1])
    for start in range(0, tokens, _CHECK_BLOCK):
        ids = np.fromfile(folder / f"{split}.bin", dtype, _CHECK_BLOCK, offset=start * np.dtype(dtype).itemsize)
        if int(ids.max()) >= symbols or int(ids.min()) < 0:
            bad_id = next(i for i in ids.tolist() if not 0 <= i < symbols)
            problem = f"holds the number {bad_id}, where dict.txt has {symbols} symbols"
            raise UserError(f"{folder}/{split}.bin {problem}: binarise the data again")


def _check_sizes(folder: Path, split: str, dtype: str, sizes: np.ndarray) -> int:
    """Return the tokens of a split; refuse an index and a ``.bin`` that do not agree on them."""
    tokens = int(sizes.sum(dtype=np.int64))
    size = (folder / f"{split}.bin").stat().st_size
    if size != tokens * np.dtype(dtype).itemsize or (len(sizes) and int(sizes.min()) < 0):
        raise UserError(f"{folder}/{split}.bin does not hold the tokens that its index counts: binarise the data again")
    return tokens


def write_index(path: Path, sizes: BinaryIO, dtype: str) -> None:
    """Write fairseq's index of a split, in bounded memory.

    Args:
        path: Output path, ``{split}.idx``.
        sizes: File with the tokens of each item, as little-endian int32.
        dtype: Dtype of the token ids, ``<u2`` or ``<u4``.
    """
    codes = {name: code for code, name in _DTYPES.items()}
    with open(path, "wb") as index:
        items = sizes.seek(0, os.SEEK_END) // 4
        index.write(_MAGIC + _HEADER.pack(1, codes[dtype], items))
        sizes.seek(0)
        shutil.copyfileobj(sizes, index)
        sizes.seek(0)
        offset = 0  # bytes of the .bin file before the item
        while block := sizes.read(_COPY_BYTES):
            ends = offset + np.cumsum(np.frombuffer(block, "<i4"), dtype="<i8") * np.dtype(dtype).itemsize
            index.write(np.concatenate(([offset], ends[:-1])).astype("<i8").tobytes())
            offset = int(ends[-1])


def read_split(folder: Path, split: str) -> tuple[np.ndarray, np.ndarray]:
    """Read a split into memory.

    Returns:
        The (tokens,) token ids, and the (items,) tokens of each item.

    Raises:
        UserError: Index and tokens do not match.
    """
    dtype, sizes = _read_index(folder / f"{split}.idx")
    return np.fromfile(folder / f"{split}.bin", dtype, _check_sizes(folder, split, dtype, sizes)), sizes


def map_split(folder: Path, split: str) -> tuple[np.ndarray, np.ndarray]:
    """Read a split as :func:`read_split` does, with the token ids as a read-only memory map."""
    dtype, sizes = _read_index(folder / f"{split}.idx")
    if not _check_sizes(folder, split, dtype, sizes):
        return np.empty(0, dtype), sizes  # NumPy maps no empty file
    return np.asarray(np.memmap(folder / f"{split}.bin", dtype, "r")), sizes


def unigram_ppl(ids: np.ndarray) -> float:
    """Return the perplexity 2 ** H of the best unigram model of a text.

    H is the entropy in bits of the frequencies of its own tokens, so no fixed distribution has a lower perplexity.

    Args:
        ids: (tokens,) token ids.
    """
    counts = np.bincount(ids)  # (types,)
    # H = -Σ c/N · log2(c/N) = log2 N - Σ c · log2 c / N; types that do not occur add 0.
    mean_log_count = np.dot(counts, np.log2(np.maximum(counts, 1))) / len(ids)
    return float(np.exp2(np.log2(len(ids)) - mean_log_count))


def write_dictionary(path: Path, symbols: Sequence[str]) -> None:
    """Write a fairseq dictionary; the symbols get the ids 4, 5, ... after fairseq's special symbols."""
    path.write_text("".join(f"{symbol} 1\n" for symbol in symbols), encoding="utf-8")


def read_dictionary(path: Path) -> list[str]:
    """Read the symbols of a fairseq dictionary, in the order of their ids, special symbols included.

    Raises:
        UserError: fairseq could not read the file.
    """
    content, symbols = read_input(path), list(FAIRSEQ_SPECIALS)

    def refuse(number: int, problem: str) -> NoReturn:
        raise UserError(f"{path} line {number} {problem}: use the file that the data were made with")

    try:
        lines = content.decode().replace("\r\n", "\n").replace("\r", "\n").split("\n")
    except UnicodeDecodeError as error:
        refuse(content.count(b"\n", 0, error.start) + 1, "is not UTF-8")
    seen = set(symbols)
    if lines[-1] == "":
        lines.pop()  # what follows the last line end
    for number, line in enumerate(lines, start=1):
        symbol, _, count = line.rstrip().rpartition(" ")
        overwrites = count == _OVERWRITE_MARK
        if overwrites:
            symbol, _, count = symbol.rpartition(" ")
        if not _COUNT.fullmatch(count) or not symbol:
            refuse(number, "is not a symbol with its count")
        if symbol in seen and not overwrites:
            refuse(number, f"has the symbol {symbol[:40]!r} a second time")
        seen.add(symbol)
        symbols.append(symbol)
    if not lines:
        refuse(1, "is missing, the dictionary is empty")
    return symbols


def describe_files(folder: Path, names: Iterable[str]) -> dict[str, dict[str, Any]]:
    """Return size in bytes and sha256 of files of a folder, by name, as the manifest has them."""
    return {name: {"bytes": (folder / name).stat().st_size, "sha256": sha256_of_files(folder / name)} for name in names}


@dataclass(frozen=True)
class FileRecord:
    """A file as a manifest describes it; see :func:`describe_files`.

    Attributes:
        bytes: Size of the file in bytes.
        sha256: SHA-256 digest of the content, in hexadecimal.
    """

    bytes: int
    sha256: str


@dataclass(frozen=True)
class _Tokenizer:
    kind: Literal["bpe", "gpt2", "words", "transformers"]


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
    """Read ``corpus.json``.

    Returns:
        The manifest; empty if there is none, or if another program wrote it.

    Raises:
        UserError: The file is no JSON object, or a value has another type.
    """
    path = folder / MANIFEST
    if not os.path.lexists(path):
        return {}
    manifest = read_json(path)
    if records.read_record(_Maker, manifest, str(path), "the corpus", strict=False).made_by not in _MAKERS:
        return {}
    records.read_record(_Manifest, manifest, str(path), "the corpus", strict=False)
    return manifest


@dataclass(frozen=True)
class Units:
    """Counts of a split, which convert losses into units that do not depend on the tokenizer.

    Attributes:
        tokens: Tokens, line ends and document boundaries included.
        bytes: Bytes of the text in UTF-8, line ends included.
        words: Words between white space, and one for each line end: 245,569 in the test text of WikiText-103, as
            published.
        documents: Number of documents.
    """

    tokens: Count
    bytes: Count
    words: Count
    documents: Count

    def bits_per_byte(self, loss_base2: float) -> float:
        """Return bits per byte of text, loss_base2 · tokens / bytes, from the mean loss in bits over all tokens."""
        return loss_base2 * self.tokens / self.bytes

    def word_ppl(self, loss_base2: float) -> float:
        """Return word perplexity, 2 ** (loss_base2 · tokens / words), from the mean loss in bits over all tokens."""
        exponent = loss_base2 * self.tokens / self.words
        return 2.0**exponent if exponent < 1024 else float("inf")


def read_units(folder: Path, split: str) -> Units | None:
    """Return the counts of a split of a prepared corpus, or None if its manifest does not record them."""
    counts = read_manifest(folder).get("splits", {}).get(split, {})
    if {f.name for f in fields(Units)} - counts.keys():
        return None
    return records.read_record(Units, counts, str(folder / MANIFEST), f"the {split} split", strict=False)
