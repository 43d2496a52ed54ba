"""What to prepare, out of which text, and where."""

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fairseq_rpe.core.errors import UserError
from fairseq_rpe.data.sourcefiles import Entry
from fairseq_rpe.data.tokenizer import MIN_VOCAB_SIZE

TOKENIZERS = ("bpe", "gpt2", "words")
DIVISIONS = ("text", "path")

# The options that decide the files made, beside the text and a given vocabulary.
_DECIDING = (
    *("include", "text_field", "rows_are_lines", "skip_invalid", "tokenizer", "vocab_size", "sample_bytes"),
    *("seed", "valid_fraction", "test_fraction"),
)
# Later ones are named only where they are given, so that corpora made before stay up to date.
_LATER = {"divide_by": "text", "boundaries": True, "max_bytes": None}


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
    # What decides the split of a document: "text", or the "path" of its file in the source, which is their order then.
    divide_by: str = "text"
    # Mark where documents meet; otherwise they follow one another line by line, empty lines included, as
    # fairseq-preprocess would have all text in one file.
    boundaries: bool = True
    max_bytes: int | None = None  # upper bound for the text, in bytes of whole files; None takes everything
    tokenizer: str = "bpe"  # one of TOKENIZERS
    vocab_size: int | None = None  # symbols of the dictionary; None is 16,384 for bpe and all words for words
    sample_bytes: int | None = 20_000_000  # how much text bpe learns from at most; None learns from all of it
    gpt2: Path | None = None  # folder with the vocabulary of gpt2
    vocab_from: Path | None = None  # take tokenizer and dictionary of this prepared corpus instead
    seed: int = 1  # decides which document goes into which split
    valid_fraction: float = 0.05  # expected share of documents, in (0, 1)
    test_fraction: float = 0.05
    workers: int = 2  # processes; changes nothing but the time

    def check(self) -> None:
        """Refuse what does not go together, and numbers out of range, naming the option."""
        if not self.train:
            raise UserError("no text is given: name folders or files")
        if bool(self.valid) != bool(self.test):
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
            "sample_bytes": (10**5, 10**10),
            "max_bytes": (1, 2**63),
        }
        for name, (least, most) in ranges.items():
            number = getattr(self, name)
            if number is not None and not least <= number <= most:
                raise UserError(f"{_flag(name)} {number} is out of range: use {least} to {most}")
        for name, values in {"tokenizer": TOKENIZERS, "divide_by": DIVISIONS}.items():
            if getattr(self, name) not in values:
                raise UserError(f"{_flag(name)} {getattr(self, name)} is none of {', '.join(values)}")
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
        names = [*_DECIDING, *(name for name, usual in _LATER.items() if getattr(self, name) != usual)]
        return {name: list(v) if isinstance(v := getattr(self, name), tuple) else v for name in names}


def _flag(name: str) -> str:
    return "--" + name.replace("_", "-")
