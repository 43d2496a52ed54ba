"""From Python sources to a binarised corpus with its tokenizer, dictionary and manifest."""

from __future__ import annotations

import importlib.metadata
import os
import platform
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fairseq_rpe.core.errors import UserError
from fairseq_rpe.data.corpus import SPLITS, Corpus, SourceFile, read_corpus, split_files
from fairseq_rpe.data.place import MADE_BY, describe_files, make_once
from fairseq_rpe.data.tokenizer import MIN_VOCAB_SIZE, Tokenizer, train_tokenizer

# Raised when the same sources and options give other files than before.
_FORMAT = 1


@dataclass(frozen=True)
class PrepareOptions:
    """What to prepare and where.

    Attributes:
        dest: folder of the corpus.
        source: folder with ``.py`` files; ``None`` is the installed standard library.
        vocab_size: symbols of the dictionary, fairseq's four specials and 256 bytes included.
        seed: decides which file goes into which split.
        valid_fraction: expected share of files, in (0, 1), of the valid split.
        test_fraction: the same for the test split.
        workers: threads and processes; changes nothing but the time.
        max_bytes: upper bound for the text, in bytes; ``None`` takes everything.
    """

    dest: Path = Path("data-bin/stdlib")
    source: Path | None = None
    vocab_size: int = 4096
    seed: int = 1
    valid_fraction: float = 0.05
    test_fraction: float = 0.05
    workers: int = 2
    max_bytes: int | None = None

    def check(self) -> None:
        """Refuse numbers out of range.

        Raises:
            UserError: naming the option.
        """
        for name in ("valid_fraction", "test_fraction"):
            value = getattr(self, name)
            if not 0 < value < 1:
                raise UserError(f"{_flag(name)} {value} is out of range: use more than 0 and less than 1")
        if self.valid_fraction + self.test_fraction >= 1:
            raise UserError(
                f"--valid-fraction {self.valid_fraction} and --test-fraction {self.test_fraction} "
                "leave no text for training: their sum must be less than 1"
            )
        ranges = {"vocab_size": (MIN_VOCAB_SIZE, 10**6), "workers": (1, 256), "max_bytes": (1, 2**63)}
        for name, (least, most) in ranges.items():
            number = getattr(self, name)
            if number is not None and not least <= number <= most:
                raise UserError(f"{_flag(name)} {number} is out of range: use {least} to {most}")
        if os.pathsep in str(self.dest):
            raise UserError(f"--dest {self.dest} has a '{os.pathsep}', where fairseq splits paths: rename it")

    def key(self, corpus: Corpus) -> dict[str, Any]:
        """What decides the files made, as stored in the manifest."""
        names = ("vocab_size", "seed", "valid_fraction", "test_fraction", "max_bytes")
        options = {name: getattr(self, name) for name in names}
        return {"format": _FORMAT, "digest": corpus.digest, "options": options}


def _flag(name: str) -> str:
    return "--" + name.replace("_", "-")


def prepare(options: PrepareOptions, say: Callable[[str], None] = print) -> dict[str, Any]:
    """Make the corpus unless it is there already, and return its manifest (``corpus.json``).

    Args:
        options: what to prepare; see :class:`PrepareOptions`.
        say: takes short lines about the progress.

    Raises:
        UserError: for bad options or sources, a destination that holds something else or cannot be
            written, and a binarised text that is not exactly the source. The destination is then untouched.
    """
    options.check()
    corpus = read_corpus(options.source, options.seed, options.max_bytes)
    splits = split_files(corpus, options.seed, options.valid_fraction, options.test_fraction)
    return make_once(
        options.dest, options.key(corpus), lambda made, work: _build(options, made, work, corpus, splits, say), say
    )


def _build(
    options: PrepareOptions,
    made: Path,
    work: Path,
    corpus: Corpus,
    splits: dict[str, tuple[SourceFile, ...]],
    say: Callable[[str], None],
) -> dict[str, Any]:
    from fairseq_rpe.data.binarise import check_split, preprocess, write_dictionary

    texts = {name: b"".join(file.text for file in splits[name]) for name in SPLITS}
    size = sum(map(len, texts.values()))
    left_out = f", {corpus.skipped} not in UTF-8 left out" if corpus.skipped else ""
    say(f"read {len(corpus.files)} files, {size} bytes{left_out}")
    say(f"training a tokenizer of {options.vocab_size} symbols")
    model = train_tokenizer(_lines(texts["train"]), options.vocab_size)
    (made / "spm.model").write_bytes(model)
    tokenizer = Tokenizer(model)
    write_dictionary(work / "dict.txt", tokenizer.symbols)
    tokens = {name: _encode(tokenizer, name, texts[name], work / f"{name}.tok", options.workers) for name in SPLITS}

    say(f"binarising {sum(tokens.values())} tokens")
    preprocess(work, made, options.workers)
    for name in SPLITS:
        check_split(made, name, texts[name], tokens[name])

    counts = {name: _count(splits[name], texts[name], tokens[name]) for name in SPLITS}
    return _describe(options, corpus, counts, made)


def _lines(text: bytes) -> list[str]:
    """Lines end at newlines only, not at all that ``str.splitlines`` takes for one."""
    return text.decode().split("\n")[:-1]


def _encode(tokenizer: Tokenizer, name: str, text: bytes, path: Path, threads: int) -> int:
    """Write the symbols of each line to ``path``; returns their number, a line end each included."""
    from tqdm import tqdm

    lines = _lines(text)
    tokens = 0
    with open(path, "w", encoding="utf-8", newline="\n") as file:
        encoded = tokenizer.encode_lines(lines, threads)
        for symbols in tqdm(encoded, desc=f"encoding {name}", total=len(lines), unit="line", disable=None):
            file.write(" ".join(symbols) + "\n")
            tokens += len(symbols) + 1
    return tokens


def _count(files: tuple[SourceFile, ...], text: bytes, tokens: int) -> dict[str, int]:
    lines = text.count(b"\n")
    return {
        "files": len(files),
        "documents": len(files),
        "bytes": len(text),
        "lines": lines,
        # As in data/stream.py: a line end is a word of its own.
        "words": len(text.decode().split()) + lines,
        "tokens": tokens,
    }


def _describe(options: PrepareOptions, corpus: Corpus, counts: dict[str, dict[str, int]], made: Path) -> dict[str, Any]:
    files = describe_files(made)
    fairseq = importlib.metadata.packages_distributions()["fairseq"][0]
    return {
        "made_by": MADE_BY,
        **options.key(corpus),
        "source": "folder" if options.source else "standard library",
        "python": platform.python_version(),
        "versions": {name: importlib.metadata.version(name) for name in ("sentencepiece", fairseq)},
        "splits": counts,
        "skipped_files": corpus.skipped,
        "spm_sha256": files["spm.model"]["sha256"],
        "files": files,
    }
