"""Reading Python sources and dividing them by file; everything here depends on names and bytes only."""

from __future__ import annotations

import hashlib
import os
import sysconfig
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from fairseq_rpe.core.errors import UserError

SPLITS = ("train", "valid", "test")

_CACHES = frozenset({"__pycache__"})
# Installed packages are no part of the library, and its tests are a third of it with odd encodings.
_NOT_LIBRARY = _CACHES | {"site-packages", "dist-packages", "test", "tests", "idle_test"}
# Written when Python was built: it holds the paths and compiler of that machine.
_BUILD_RECORD = "_sysconfigdata_"


@dataclass(frozen=True)
class SourceFile:
    """One file: its path relative to the source folder, with ``/``, and its UTF-8 bytes."""

    path: str
    content: bytes

    @property
    def text(self) -> bytes:
        """The content, with a newline at the end unless it is empty."""
        unfinished = self.content and not self.content.endswith(b"\n")
        return self.content + b"\n" if unfinished else self.content


@dataclass(frozen=True)
class Corpus:
    """Files in the order of their paths, and how many were left out for not being UTF-8."""

    files: tuple[SourceFile, ...]
    skipped: int

    @cached_property
    def digest(self) -> str:
        """sha256 over paths and contents."""
        digest = hashlib.sha256()
        for file in self.files:
            for part in (os.fsencode(file.path), file.content):
                digest.update(len(part).to_bytes(8, "little"))
                digest.update(part)
        return digest.hexdigest()


def read_corpus(source: Path | None, seed: int, max_bytes: int | None) -> Corpus:
    """Read the ``.py`` files of a folder, or of the installed standard library for ``None``.

    Args:
        source: the folder; symbolic links to folders are not followed.
        seed: order in which files are taken until ``max_bytes`` are full.
        max_bytes: upper bound for the bytes of all files together; ``None`` takes everything.

    Raises:
        UserError: if the folder is missing, has no text, or a file of ``source`` cannot be read or is
            not UTF-8 (files of the standard library are skipped and counted instead).
    """
    root = source if source is not None else Path(sysconfig.get_path("stdlib"))
    if not root.is_dir():
        raise UserError(f"{root} is not a folder: give --source a folder with .py files")
    try:
        paths = list(_python_files(root, library=source is None))
        read = [(path, _read(root, path, strict=source is not None)) for path in paths]
    except OSError as error:
        raise UserError(f"cannot read {error.filename} ({error.strerror}): change that or move it") from None
    files = [SourceFile(path, content) for path, content in read if content is not None]
    if not any(file.content.strip() for file in files):
        what = f"all {len(files)} .py files are empty" if files else "there are no .py files in it"
        raise UserError(f"{root} has no text, {what}: give another --source")
    kept = files if max_bytes is None else _within(files, seed, max_bytes)
    return Corpus(tuple(sorted(kept, key=lambda file: file.path)), skipped=len(read) - len(files))


def _python_files(root: Path, library: bool) -> Iterator[str]:
    left_out = _NOT_LIBRARY if library else _CACHES
    for folder, subfolders, names in os.walk(root, onerror=_raise):
        subfolders[:] = sorted(set(subfolders) - left_out)
        for name in sorted(names):
            path = Path(folder, name)
            if not name.endswith(".py") or (library and name.startswith(_BUILD_RECORD)):
                continue
            if path.is_file():
                yield path.relative_to(root).as_posix()


def _raise(error: OSError) -> None:
    raise error


def _read(root: Path, path: str, strict: bool) -> bytes | None:
    content = (root / path).read_bytes()
    try:
        content.decode()
    except UnicodeDecodeError as error:
        if strict:
            raise UserError(
                f"{root / path} is not UTF-8 at byte {error.start}: convert it or move it out of the folder"
            ) from None
        return None
    return content


def unit_hash(purpose: str, seed: int, path: str) -> float:
    """A number in [0, 1) that depends on nothing but the arguments."""
    digest = hashlib.sha256(f"{purpose}\0{seed}\0".encode() + os.fsencode(path)).digest()
    return int.from_bytes(digest[:6], "big") / 2**48


def _within(files: list[SourceFile], seed: int, max_bytes: int) -> list[SourceFile]:
    kept, total = [], 0
    # Not the hash of the split, in whose order all validation files come first.
    for file in sorted(files, key=lambda f: (unit_hash("order", seed, f.path), f.path)):
        if total + len(file.content) <= max_bytes:
            kept.append(file)
            total += len(file.content)
    return kept


def split_files(corpus: Corpus, seed: int, valid: float, test: float) -> dict[str, tuple[SourceFile, ...]]:
    """Divide a corpus by file into train, valid and test; other files do not change a file's split.

    Args:
        corpus: what to divide.
        seed: changes which file goes where.
        valid: expected share of files, in (0, 1), of the valid split.
        test: the same for the test split.

    Raises:
        UserError: if a split would have no text.
    """

    def split_of(file: SourceFile) -> str:
        number = unit_hash("split", seed, file.path)
        return "valid" if number < valid else "test" if number < valid + test else "train"

    splits = {name: tuple(f for f in corpus.files if split_of(f) == name) for name in SPLITS}
    for name, files in splits.items():
        if not any(file.content.strip() for file in files):
            raise UserError(
                f"the {name} split of {len(corpus.files)} files would be empty: "
                "give more files, other fractions, another --seed or a larger --max-bytes"
            )
    return splits
