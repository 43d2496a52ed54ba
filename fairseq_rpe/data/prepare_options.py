"""What to prepare, out of which text, and where: the options, and known corpora as presets of them."""

import os
import re
import sysconfig
import tomllib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

from fairseq_rpe.core.errors import UserError
from fairseq_rpe.data.download import download
from fairseq_rpe.data.folder import SPLITS
from fairseq_rpe.data.hub import sources
from fairseq_rpe.data.sourcefiles import UNWANTED, Entry, find_entries
from fairseq_rpe.data.tokenizer import MIN_VOCAB_SIZE
from fairseq_rpe.utils import records
from fairseq_rpe.utils.files import PACKAGE

TOKENIZERS = ("bpe", "gpt2", "words")
DIVISIONS = ("text", "path", "part")

# The text and a given vocabulary, which are known by their digests, and what changes nothing.
_NOT_DECIDING = ("dest", "train", "valid", "test", "gpt2", "vocab_from", "workers", "overwrite")
# Named only where they are not the usual ones, so that corpora made before there were such options stay up to date.
_LATER = ("divide_by", "boundaries", "max_bytes", "documents", "test_from_valid")


@dataclass(frozen=True)
class PrepareOptions:
    """What to prepare and where."""

    dest: Path  # folder of the corpus
    # Folders and files to read: all text in the first if the others are empty.
    train: tuple[Path | Entry, ...]
    valid: tuple[Path | Entry, ...] = ()
    test: tuple[Path | Entry, ...] = ()
    include: tuple[str, ...] = ()  # patterns for file names in folders, such as *.py; none takes all
    text_field: str = "text"  # of .jsonl and .parquet rows
    rows_are_lines: bool = False  # of one document per file, instead of documents
    skip_invalid: bool = False  # leave out text files that are not UTF-8
    tokenizer: str = "bpe"  # one of TOKENIZERS
    vocab_size: int | None = None  # symbols of the dictionary; None is 16,384 for bpe and all words for words
    sample_bytes: int | None = 20_000_000  # how much text bpe learns from at most; None learns from all of it
    gpt2: Path | None = None  # folder with the vocabulary of gpt2
    vocab_from: Path | None = None  # take tokenizer and dictionary of this prepared corpus instead
    seed: int = 1  # decides which document goes into which split
    valid_fraction: float = 0.05  # expected share of documents, in (0, 1)
    test_fraction: float = 0.05
    # What decides the split of a document: "text", or the "path" of its file in the source, which is their order then.
    divide_by: str = "text"
    # Mark where documents meet; otherwise they follow one another line by line, empty lines included, as
    # fairseq-preprocess would have all text in one file.
    boundaries: bool = True
    max_bytes: int | None = None  # upper bound for the text, in bytes of whole files; None takes everything
    # So many documents of training, the first in the order of the files, and what comes between them for the other
    # splits, if those have no files of their own; None takes everything.
    documents: int | None = None
    # Half of the documents of ``valid``, by a hash of their text, are the test split, which has no files.
    test_from_valid: bool = False
    workers: int = 2  # processes; changes nothing but the time
    overwrite: bool = False  # replace a corpus in ``dest`` that was made with other options or of another text

    def check(self) -> None:
        """Refuse what does not go together, and numbers out of range, naming the option."""
        if not self.train:
            raise UserError("no text is given: name folders or files")
        if self.test_from_valid and (self.test or not self.valid):
            raise UserError("half of the valid split is to be the test split: give files for valid and none for test")
        if bool(self.valid) != bool(self.test) and not self.test_from_valid:
            given, missing = ("--valid", "--test") if self.valid else ("--test", "--valid")
            raise UserError(f"{given} is given without {missing}: give both, or none to divide the text by document")
        for name in ("valid_fraction", "test_fraction"):
            if not 0 < getattr(self, name) < 1:
                raise UserError(f"{_flag(name)} {getattr(self, name)} is out of range: use more than 0 and less than 1")
        if self.valid_fraction + self.test_fraction >= 1:
            raise UserError(
                f"--valid-fraction {self.valid_fraction} and --test-fraction {self.test_fraction} "
                "leave no text for training: their sum must be below 1"
            )
        ranges = {
            "vocab_size": (MIN_VOCAB_SIZE, 10**6),
            "workers": (1, 256),
            "seed": (0, 2**63 - 1),
            "sample_bytes": (10**5, 10**10),
            "max_bytes": (1, 2**63),
            "documents": (1, 2**63),
        }
        for name, (least, most) in ranges.items():
            number = getattr(self, name)
            if number is not None and not least <= number <= most:
                raise UserError(f"{_flag(name)} {number} is out of range: use {least} to {most}")
        for name, values in {"tokenizer": TOKENIZERS, "divide_by": DIVISIONS}.items():
            if getattr(self, name) not in values:
                raise UserError(f"{_flag(name)} {getattr(self, name)} is none of {', '.join(values)}")
        if self.documents and self.max_bytes:
            raise UserError("--documents and --max-bytes are two limits: give one")
        if self.documents and self.rows_are_lines:
            raise UserError("--documents counts whole documents, and all rows of a file are one here: leave it out")
        if self.vocab_size and (self.vocab_from or self.tokenizer == "gpt2"):
            raise UserError("--vocab-size has no effect on a given vocabulary: leave it out")
        if self.vocab_from and self.gpt2:
            raise UserError("--vocab-from and --gpt2 are two vocabularies: give one")
        if (self.tokenizer == "gpt2") != bool(self.gpt2) and not self.vocab_from:
            raise UserError("--tokenizer gpt2 and --gpt2 FOLDER go together: FOLDER has vocab.json and merges.txt")
        if os.pathsep in str(self.dest):
            raise UserError(f"--dest {self.dest} has a '{os.pathsep}', where fairseq splits paths: rename it")

    def key(self) -> dict[str, Any]:
        """The options that decide the files made, as they are read back from a manifest: without tuples."""
        deciding = [f for f in fields(self) if f.name not in _NOT_DECIDING]
        names = [f.name for f in deciding if f.name not in _LATER or getattr(self, f.name) != f.default]
        return {name: list(v) if isinstance(v := getattr(self, name), tuple) else v for name in names}


def _flag(name: str) -> str:
    return "--" + name.replace("_", "-")


_SPLIT_NAMES = {"train": "train", "valid": "valid", "validation": "valid", "val": "valid", "test": "test"}
_IN_NAME = re.compile(rf"(?<![a-z])({'|'.join(_SPLIT_NAMES)})(?![a-z])")


@dataclass(frozen=True)
class Known:
    """A corpus that has a name; ``fairseq_rpe/corpora.toml`` has them all, and says what the fields are."""

    about: str
    hub: tuple[str, ...] = ()
    archives: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    divided: bool = False
    test_from_valid: bool = False
    include: tuple[str, ...] = ()
    exclude: tuple[str, ...] = UNWANTED
    keep_binary: bool = False
    learn_all: bool = False
    options: Mapping[str, bool | int | float | str] = field(default_factory=dict)
    counts: Mapping[str, Mapping[str, int]] = field(default_factory=dict)


_CORPORA = PACKAGE / "corpora.toml"
KNOWN = {
    name: records.read(Known, given, str(_CORPORA), name)
    for name, given in tomllib.loads(_CORPORA.read_text(encoding="utf-8")).items()
}

# Installed packages are no part of the library, and its tests are a third of it with odd encodings. The last was
# written when Python was built: it holds the paths and compiler of that machine.
_NOT_LIBRARY = (*("__pycache__", "site-packages", "dist-packages", "test", "tests", "idle_test"), "_sysconfigdata_*")

_GPT2_BASE = "https://openaipublic.blob.core.windows.net/gpt-2/encodings/main/"
_GPT2 = {
    "encoder.json": "196139668be63f3b5d6574427317ae82f612a97c5d1cdaf36ed2256dbf636783",
    "vocab.bpe": "1ce1664773c50f3e0cc8842619a93edc4624525b728b188a9e0be33b7726adc5",
}


def gpt2_vocabulary(folder: Path) -> Path:
    """The folder with GPT-2's vocabulary, downloaded into ``folder`` unless it is there."""
    for name, sha256 in _GPT2.items():
        mirror = f"https://dl.fbaipublicfiles.com/fairseq/gpt2_bpe/{name}"
        download([_GPT2_BASE + name, mirror], folder / name, sha256)
    return folder


def choose(
    known: Known, own: Sequence[Path], downloads: Path, archive: bool = False, documents: int | None = None
) -> dict[str, Any]:
    """What a corpus is prepared with, by the names of the options: its own ones, and its files by split.

    It is taken from ``own`` folders and files; without any from a download (an archive, kept in ``downloads``, instead
    of the hub's files if ``archive``), or the installed library. Of the hub's files, those that the first ``documents``
    are not in stay there.

    Raises UserError without network or permission, with what to do by hand; if some splits have files and others none.
    """
    if archive and not known.archives:
        raise UserError("--archive: this corpus has no archive, leave the option out")
    if documents is not None and len(known.hub) > 1:
        raise UserError("--documents would take nothing but the first source of this mixture: leave it out")
    options: dict[str, Any] = {**known.options, **({"sample_bytes": None} if known.learn_all else {})}
    include, exclude = known.include, known.exclude
    paths: Sequence[Path | Entry]
    if own:
        paths = own
    elif archive:
        paths, include = [download(urls, downloads / name) for name, urls in known.archives.items()], ()
    elif known.hub:
        paths = [path for source in known.hub for path in sources(source, one_by_one=documents is not None)]
        include = ()
    else:
        paths, exclude, options["skip_invalid"] = [Path(sysconfig.get_path("stdlib"))], _NOT_LIBRARY, True
    entries, _ = find_entries(paths, include, exclude, known.keep_binary)
    return {**options, **_by_split(known, paths, entries)}


def _by_split(known: Known, paths: Sequence[Path | Entry], entries: Sequence[Entry]) -> dict[str, Any]:
    """Files by the split in their names or folders; all under ``train`` if they are to be divided by document."""
    named: dict[str, list[Entry]] = {split: [] for split in SPLITS}
    for entry in entries:
        folder = entry.place.lower().removesuffix(entry.name.lower())
        if found := _IN_NAME.findall(entry.name.lower()) or _IN_NAME.findall(folder):
            named[_SPLIT_NAMES[found[-1]]].append(entry)
    if known.divided or not any(named.values()):
        return {"train": tuple(entries)}
    halved = known.test_from_valid and not named["test"]
    for split, files in named.items():
        if not files and not (halved and split == "test"):
            where = " ".join(
                sorted({str(path.root or path) if isinstance(path, Entry) else str(path) for path in paths})
            )
            raise UserError(f"{where} has no file with '{split}' in its name: add or rename it")
    return {**{split: tuple(files) for split, files in named.items()}, **({"test_from_valid": True} if halved else {})}


def compare(known: Known, splits: Mapping[str, Mapping[str, Any]], say: Callable[[str], None] = print) -> None:
    """Say whether the counts of a prepared corpus are the published ones; of ``valid+test`` it is their sum."""
    for what, published in known.counts.items():
        for split, expected in published.items():
            found = sum(splits[one][what] for one in split.split("+"))
            if found == expected:
                say(f"{split}: {found} {what}, as published")
            else:
                say(f"warning: {split} has {found} {what} instead of the published {expected}: this is another text")
