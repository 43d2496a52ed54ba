"""The destination folder: recognised as our own, built beside it, replaced in one step."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import hashlib
import json
import os
import re
import shutil
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from fairseq_rpe.core.errors import UserError
from fairseq_rpe.data.corpus import SPLITS

MANIFEST = "corpus.json"
MADE_BY = "fairseq-rpe prepare-stdlib"
TEXT_MADE_BY = "fairseq-rpe prepare"
FILES = ("dict.txt", "spm.model", *(f"{split}.{end}" for split in SPLITS for end in ("bin", "idx")))
# Of other tokenizers.
_MORE_FILES = ("vocab.json", "merges.txt")


def describe_files(folder: Path, names: Iterable[str] = FILES) -> dict[str, dict[str, Any]]:
    """Size in bytes and sha256 of each file of a corpus, for its manifest."""

    def describe(path: Path) -> dict[str, Any]:
        with open(path, "rb") as file:
            return {"bytes": path.stat().st_size, "sha256": hashlib.file_digest(file, "sha256").hexdigest()}

    return {name: describe(folder / name) for name in names}


def write_manifest(folder: Path, manifest: Mapping[str, Any]) -> None:
    """Write ``corpus.json``."""
    (folder / MANIFEST).write_text(json.dumps(manifest, indent=2) + "\n", encoding="utf-8")


def read_manifest(folder: Path) -> dict[str, Any] | None:
    """What ``corpus.json`` says, ``None`` unless it is there and was written by one of these commands."""
    try:
        manifest = json.loads((folder / MANIFEST).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    ours = isinstance(manifest, dict) and manifest.get("made_by") in (MADE_BY, TEXT_MADE_BY)
    return manifest if ours else None


def up_to_date(folder: Path, key: Mapping[str, Any]) -> dict[str, Any] | None:
    """The manifest of ``folder`` if it was made with ``key`` and all its files are unchanged."""
    manifest = read_manifest(folder)
    if manifest is None or any(manifest.get(name) != value for name, value in key.items()):
        return None
    files = manifest.get("files")
    try:
        return manifest if files and files == describe_files(folder, files) else None
    except (OSError, TypeError):
        return None


def check_replaceable(dest: Path) -> None:
    """Refuse a destination with anything in it that this command did not make.

    Raises:
        UserError: naming what is in the way.
    """
    if not os.path.lexists(dest):
        return
    if not dest.is_dir():
        raise UserError(f"{dest} is a file: give another --dest")
    names = sorted(os.listdir(dest))
    if names and read_manifest(dest) is None:
        raise UserError(f"{dest} is not empty and not made by this command: move it or give another --dest")
    foreign = [name for name in names if name not in (*FILES, *_MORE_FILES, MANIFEST)]
    if foreign:
        raise UserError(f"{dest / foreign[0]} is not of this command and would be lost: move it or give another --dest")


@contextlib.contextmanager
def writing(dest: Path) -> Iterator[None]:
    """Tell a failing disk in one line.

    Raises:
        UserError: for any ``OSError`` inside.
    """
    try:
        yield
    except BrokenPipeError:
        # The reader of our output has gone; the disk is fine.
        raise
    except OSError as error:
        if error.errno == errno.ENOSPC:
            raise UserError(f"no space left for {dest}: free some or use another disk") from error
        raise UserError(f"cannot write {dest} ({error}): give another --dest") from error


@contextlib.contextmanager
def scratch(dest: Path) -> Iterator[Path]:
    """A temporary folder on the disk of ``dest``, for one process at a time, removed in the end.

    What a killed process left there is removed first; a second process waits for the first.
    """
    parent = dest.parent
    parent.mkdir(parents=True, exist_ok=True)
    handle = os.open(parent, os.O_RDONLY)
    try:
        # The folder itself is locked, so that no lock file stays behind.
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            print(f"waiting for another preparation in {parent}", file=sys.stderr)
            fcntl.flock(handle, fcntl.LOCK_EX)
        _remove_leftovers(dest)
        folder = parent / f".{dest.name}.prepare-{os.getpid()}"
        try:
            folder.mkdir()
            yield folder
        finally:
            shutil.rmtree(folder, ignore_errors=True)
    finally:
        os.close(handle)


def _remove_leftovers(dest: Path) -> None:
    ours = re.compile(re.escape(f".{dest.name}.prepare-") + r"\d+")
    for name in os.listdir(dest.parent):
        if ours.fullmatch(name):
            shutil.rmtree(dest.parent / name, ignore_errors=True)


def publish(built: Path, dest: Path, folder: Path) -> None:
    """Rename ``built`` to ``dest``; what was there goes to ``folder``, and back if that fails."""
    old = folder / "replaced"
    try:
        if dest.exists():
            dest.rename(old)
        built.rename(dest)
    except BaseException:
        if old.exists() and not dest.exists():
            old.rename(dest)
        raise


def make_once(
    dest: Path, key: Mapping[str, Any], build: Callable[[Path, Path], dict[str, Any]], say: Callable[[str], None]
) -> dict[str, Any]:
    """Make a corpus unless it is there already, made with the same ``key``; returns its manifest.

    Args:
        dest: its folder.
        key: what decides its files.
        build: fills the folder that it is given first, and may use the second; returns the manifest.
        say: takes short lines about the progress.

    Raises:
        UserError: if ``dest`` holds something else or cannot be written; it is then untouched.
    """
    place = dest.resolve()
    manifest = up_to_date(place, key)
    if manifest is None:
        with writing(dest):
            check_replaceable(place)
            with scratch(place) as folder:
                # Another process may have made it while this one waited.
                manifest = up_to_date(place, key)
                if manifest is None:
                    made, work = folder / "made", folder / "work"
                    made.mkdir()
                    work.mkdir()
                    manifest = build(made, work)
                    write_manifest(made, manifest)
                    check_replaceable(place)
                    publish(made, place, folder)
                    for name, count in manifest["splits"].items():
                        say(f"{name}: " + ", ".join(f"{number} {what}" for what, number in count.items()))
                    say(f"wrote {dest}")
                    return manifest
    say(f"{dest} is up to date")
    return manifest
