"""Options of the ``prepare`` commands, and presets of them for published corpora."""

import os
import re
import sysconfig
import tomllib
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

from fairseq_rpe.core.errors import UserError
from fairseq_rpe.data.documents import UNWANTED, SourceFile, find_source_files
from fairseq_rpe.data.download import download, resolve_source
from fairseq_rpe.data.folder import MANIFEST_KEYS, SPLITS
from fairseq_rpe.data.tokenization import MIN_VOCAB_SIZE
from fairseq_rpe.utils import records
from fairseq_rpe.utils.files import PACKAGE_DIR

TOKENIZERS = ("bpe", "gpt2", "words")
MODEL_TOKENIZER = "transformers"  # the tokenizer of a model, in manifests
SPLIT_BY = ("text", "path", "part")

# Options that are not in a manifest: digests describe text and vocabulary, and the others do not change the result.
_NOT_RECORDED = ("out", "train", "valid", "test", "gpt2", "vocab_from", "model", "workers", "overwrite")
# Options that are in a manifest only if they are not the default: corpora from before the option stay up to date.
_RECORDED_IF_CHANGED = ("split_by", "boundaries", "max_bytes", "documents", "test_from_valid")


@dataclass(frozen=True)
class PrepareOptions:
    """Options of ``fairseq-rpe prepare``: which corpus to make from which text.

    Attributes:
        out: Output folder, which becomes a prepared corpus.
        train: Folders and files of the training split, or of the whole text if ``valid`` and ``test`` are empty.
        valid: Folders and files of the validation split.
        test: Folders and files of the test split.
        include: Patterns of file names in folders, such as ``*.py``; empty takes all files.
        text_field: Field of ``.jsonl`` and ``.parquet`` rows that contains the text.
        rows_are_lines: Rows are lines of one document per file, instead of documents.
        skip_invalid: Leave out text files that are not UTF-8, instead of refusing them.
        tokenizer: One of :data:`TOKENIZERS`, or :data:`MODEL_TOKENIZER` with ``model``.
        vocab_size: Symbols of the dictionary; None is 16,384 for bpe and all words for words.
        sample_bytes: Most bytes of text that bpe learns from; None learns from all.
        gpt2: Folder of the GPT-2 vocabulary.
        vocab_from: Prepared corpus whose tokenizer and dictionary are used.
        model: Folder of a transformers model whose tokenizer is used.
        seed: Seed of the hashes that assign documents to splits.
        valid_fraction: Expected share of documents for validation, in (0, 1).
        test_fraction: Expected share of documents for the test, in (0, 1).
        split_by: What assigns a document to a split: a hash of its ``text``, or of the ``path`` of its file in the
            source (documents are then in the order of the paths). ``part`` cuts each document into three parts.
        boundaries: Mark document boundaries. Otherwise documents follow each other line by line, as
            fairseq-preprocess would write all text in one file.
        max_bytes: Most bytes of text, in whole files; None takes all.
        documents: Use so many training documents, the first ones in the order of the files, and the documents between
            them for the other splits; None takes all.
        test_from_valid: Half of the ``valid`` documents, by a hash of their text, are the test split.
        workers: Number of processes. It does not change the result.
        overwrite: Replace a corpus in ``out`` that was made with other options or from another text.
    """

    out: Path
    train: tuple[Path | SourceFile, ...]
    valid: tuple[Path | SourceFile, ...] = ()
    test: tuple[Path | SourceFile, ...] = ()
    include: tuple[str, ...] = ()
    text_field: str = "text"
    rows_are_lines: bool = False
    skip_invalid: bool = False
    tokenizer: str = "bpe"
    vocab_size: int | None = None
    sample_bytes: int | None = 20_000_000
    gpt2: Path | None = None
    vocab_from: Path | None = None
    model: Path | None = None
    seed: int = 1
    valid_fraction: float = 0.05
    test_fraction: float = 0.05
    split_by: str = "text"
    boundaries: bool = True
    max_bytes: int | None = None
    documents: int | None = None
    test_from_valid: bool = False
    workers: int = 2
    overwrite: bool = False

    def check(self) -> None:
        """Check the options.

        Raises:
            UserError: An option is out of range or does not go with another one.
        """
        if not self.train:
            raise UserError("no text is given: name folders or files")
        self._check_splits()
        self._check_ranges()
        if self.documents and self.max_bytes:
            raise UserError("--documents and --max-bytes are two limits: give one")
        if self.documents and self.rows_are_lines:
            raise UserError("--documents counts whole documents, and all rows of a file are one here: leave it out")
        self._check_tokenizer()
        if os.pathsep in str(self.out):
            raise UserError(f"--out {self.out} has a '{os.pathsep}', where fairseq splits paths: rename it")

    def _check_splits(self) -> None:
        if self.test_from_valid and (self.test or not self.valid):
            raise UserError("half of the valid split is to be the test split: give files for valid and none for test")
        if bool(self.valid) != bool(self.test) and not self.test_from_valid:
            present, missing = ("--valid", "--test") if self.valid else ("--test", "--valid")
            raise UserError(f"{present} is given without {missing}: give both, or none to split the text by document")
        for name in ("valid_fraction", "test_fraction"):
            if not 0 < getattr(self, name) < 1:
                raise UserError(f"{_flag(name)} {getattr(self, name)} is out of range: use more than 0 and less than 1")
        if self.valid_fraction + self.test_fraction >= 1:
            raise UserError(
                f"--valid-fraction {self.valid_fraction} and --test-fraction {self.test_fraction} "
                "leave no text for training: their sum must be below 1"
            )

    def _check_ranges(self) -> None:
        ranges = {
            "vocab_size": (MIN_VOCAB_SIZE, 10**6),
            "workers": (1, 256),
            "seed": (0, 2**63 - 1),
            "sample_bytes": (10**5, 10**10),
            "max_bytes": (1, 2**63),
            "documents": (1, 2**63),
        }
        check_values(self, ranges, {"tokenizer": (*TOKENIZERS, MODEL_TOKENIZER), "split_by": SPLIT_BY})

    def _check_tokenizer(self) -> None:
        if self.vocab_size and (self.vocab_from or self.tokenizer in ("gpt2", MODEL_TOKENIZER)):
            raise UserError("--vocab-size has no effect on a given vocabulary: leave it out")
        if self.model and (self.vocab_from or self.gpt2):
            other = "--vocab-from" if self.vocab_from else "--gpt2"
            raise UserError(f"--tokenizer {self.model} and {other} are two vocabularies: give one")
        if self.vocab_from and self.gpt2:
            raise UserError("--vocab-from and --gpt2 are two vocabularies: give one")
        if (self.tokenizer == "gpt2") != bool(self.gpt2) and not self.vocab_from:
            raise UserError("--tokenizer gpt2 and --gpt2 FOLDER go together: FOLDER has vocab.json and merges.txt")

    def key(self) -> dict[str, Any]:
        """Return the options that decide the result, as a manifest has them: with lists instead of tuples."""
        names = [
            f.name
            for f in fields(self)
            if f.name not in _NOT_RECORDED
            and (f.name not in _RECORDED_IF_CHANGED or getattr(self, f.name) != f.default)
        ]
        values = {MANIFEST_KEYS.get(name, name): getattr(self, name) for name in names}
        return {key: list(value) if isinstance(value, tuple) else value for key, value in values.items()}


def check_values(
    options: object, ranges: Mapping[str, tuple[int, int]], choices: Mapping[str, Collection[str]]
) -> None:
    """Check fields of options.

    Args:
        options: Object with the fields.
        ranges: Least and largest number by field; None is allowed too.
        choices: Possible values by field.

    Raises:
        UserError: A value is out of range or none of the choices.
    """
    for name, (least, most) in ranges.items():
        number = getattr(options, name)
        if number is not None and not least <= number <= most:
            raise UserError(f"{_flag(name)} {number} is out of range: use {least} to {most}")
    for name, values in choices.items():
        if getattr(options, name) not in values:
            raise UserError(f"{_flag(name)} {getattr(options, name)} is not one of {', '.join(values)}")


def _flag(name: str) -> str:
    """Return the command-line option of a field."""
    return "--" + name.replace("_", "-")


_SPLIT_WORDS = {"train": "train", "valid": "valid", "validation": "valid", "val": "valid", "test": "test"}
_SPLIT_IN_NAME = re.compile(rf"(?<![a-z])({'|'.join(_SPLIT_WORDS)})(?![a-z])")


@dataclass(frozen=True)
class CorpusPreset:
    """A published corpus, as ``fairseq_rpe/corpora.toml`` describes it.

    Attributes:
        about: One sentence for the user.
        hub: Data sets of the Hugging Face hub that it consists of.
        archives: URLs by file name, the best first.
        divided: Split its documents by hash even if files are named after splits.
        test_from_valid: Half of the validation documents are the test split if no file is named after it.
        include: Patterns of file names in local folders.
        exclude: Patterns of names that are left out there.
        keep_binary: Take files that look binary too.
        learn_all: Learn the vocabulary from all of the text.
        options: Values of :class:`PrepareOptions`.
        counts: Published counts by unit, and by split or sum of splits (``valid+test``).
    """

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


_CORPORA_FILE = PACKAGE_DIR / "corpora.toml"
CORPORA = {
    name: records.read_record(CorpusPreset, table, str(_CORPORA_FILE), name)
    for name, table in tomllib.loads(_CORPORA_FILE.read_text(encoding="utf-8")).items()
}

# Installed packages are not part of the standard library, and its tests (a third of it) have odd encodings.
# _sysconfigdata_* is written when Python is built: it contains paths and compiler of that machine.
_NOT_LIBRARY = (*("__pycache__", "site-packages", "dist-packages", "test", "tests", "idle_test"), "_sysconfigdata_*")

_GPT2_BASE = "https://openaipublic.blob.core.windows.net/gpt-2/encodings/main/"
_GPT2_SHA256 = {
    "encoder.json": "196139668be63f3b5d6574427317ae82f612a97c5d1cdaf36ed2256dbf636783",
    "vocab.bpe": "1ce1664773c50f3e0cc8842619a93edc4624525b728b188a9e0be33b7726adc5",
}


def download_gpt2_vocabulary(folder: Path) -> Path:
    """Download GPT-2's vocabulary into ``folder``, unless it is there, and return the folder."""
    for name, sha256 in _GPT2_SHA256.items():
        mirror = f"https://dl.fbaipublicfiles.com/fairseq/gpt2_bpe/{name}"
        download([_GPT2_BASE + name, mirror], folder / name, sha256)
    return folder


def preset_options(
    preset: CorpusPreset,
    local_paths: Sequence[Path],
    downloads: Path,
    archive: bool = False,
    documents: int | None = None,
) -> dict[str, Any]:
    """Return the options with which a published corpus is prepared, its source files included.

    Args:
        preset: Published corpus, a value of :data:`CORPORA`.
        local_paths: Folders and files to read instead of a download.
        downloads: Folder where downloaded archives are stored.
        archive: Download the archive instead of the hub's files.
        documents: Download only the files of the hub with the first so many training documents.

    Returns:
        Arguments of :class:`PrepareOptions`: values by name, and the source files by split. Without local files, hub
        and archive, the source is the installed standard library of Python.

    Raises:
        UserError: The download fails (the message says what to download by hand), or only some splits have files.
    """
    if archive and not preset.archives:
        raise UserError("--archive: this corpus has no archive, leave the option out")
    if documents is not None and len(preset.hub) > 1:
        raise UserError("--documents would take nothing but the first source of this mixture: leave it out")
    options: dict[str, Any] = dict(preset.options)
    if preset.learn_all:
        options["sample_bytes"] = None
    include, exclude = preset.include, preset.exclude
    paths: Sequence[Path | SourceFile]
    if local_paths:
        paths = local_paths
    elif archive:
        paths, include = [download(urls, downloads / name) for name, urls in preset.archives.items()], ()
    elif preset.hub:
        paths = [path for source in preset.hub for path in resolve_source(source, lazy=documents is not None)]
        include = ()
    else:
        paths, exclude = [Path(sysconfig.get_path("stdlib"))], _NOT_LIBRARY
        options["skip_invalid"] = True
    files, _ = find_source_files(paths, include, exclude, preset.keep_binary)
    return options | _files_by_split(preset, paths, files)


def _files_by_split(
    preset: CorpusPreset, paths: Sequence[Path | SourceFile], files: Sequence[SourceFile]
) -> dict[str, Any]:
    """Return files by the split in their names or folders, or all under ``train`` if they are split by document."""
    by_split: dict[str, list[SourceFile]] = {split: [] for split in SPLITS}
    for file in files:
        name = file.name.lower()
        folder = file.relative_path.lower().removesuffix(name)
        if words := _SPLIT_IN_NAME.findall(name) or _SPLIT_IN_NAME.findall(folder):
            by_split[_SPLIT_WORDS[words[-1]]].append(file)
    if preset.divided or not any(by_split.values()):
        return {"train": tuple(files)}
    test_from_valid = preset.test_from_valid and not by_split["test"]
    for split, split_files in by_split.items():
        if not split_files and not (test_from_valid and split == "test"):
            names = {str(path.root or path) if isinstance(path, SourceFile) else str(path) for path in paths}
            raise UserError(f"{' '.join(sorted(names))} has no file with '{split}' in its name: add or rename it")
    options: dict[str, Any] = {split: tuple(split_files) for split, split_files in by_split.items()}
    return options | {"test_from_valid": True} if test_from_valid else options


def compare_counts(
    preset: CorpusPreset, splits: Mapping[str, Mapping[str, Any]], say: Callable[[str], None] = print
) -> None:
    """Print whether the counts of a prepared corpus are the published ones.

    Args:
        preset: The corpus with its published counts.
        splits: Counts of the prepared corpus by split and unit.
        say: Prints a line for each published count.
    """
    for unit, published in preset.counts.items():
        for split, expected in published.items():
            count = sum(splits[name][unit] for name in split.split("+"))
            if count == expected:
                say(f"{split}: {count} {unit}, as published")
            else:
                say(f"warning: {split} has {count} {unit} instead of the published {expected}: this is another text")
