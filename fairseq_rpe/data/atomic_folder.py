"""Atomic output folders: built in a temporary folder on the same disk and renamed in one step when complete."""

import contextlib
import os
import shutil
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fairseq_rpe.core.errors import UserError, oserror_message, shorten_path
from fairseq_rpe.data.folder import BINARIES, MANIFEST, MANIFEST_KEYS, describe_files, read_manifest
from fairseq_rpe.utils.files import exclusive_lock, remove_empty_on_failure
from fairseq_rpe.utils.json_files import write_json

_MAX_CHANGES = 3  # in a message
_MAX_LOCK_ATTEMPTS = 100  # so that a fault of the file system does not end in an endless loop
# Keys of a manifest whose values mean nothing to users, and what a changed value means.
_KEY_DESCRIPTIONS = {
    "format": "by another version",
    "digest": "of another text",
    "texts": "of another text",
    "files": "of other files",
    "division": "of texts divided otherwise",
    "given_vocabulary": "with another vocabulary",
}
_OPTION_NAMES = {key: name for name, key in MANIFEST_KEYS.items()}
_FILES = ("dict.txt", "spm.model", "vocab.json", "merges.txt", "tokenizer.json", "config.json", *BINARIES)


@dataclass(frozen=True)
class FolderContents:
    """What a kind of folder contains in addition to a vocabulary and splits.

    Attributes:
        manifest: Name of the file that records how the folder was made.
        read: Reads the manifest of a folder; empty if there is none, or if another program wrote it.
        more_files: Names of other files of such a folder; a folder with any further file is not replaced.
    """

    manifest: str
    read: Callable[[Path], dict[str, Any]]
    more_files: tuple[str, ...] = ()


CORPUS = FolderContents(MANIFEST, read_manifest)


def _up_to_date(folder: Path, key: Mapping[str, Any], contents: FolderContents) -> dict[str, Any] | None:
    """Return the manifest of ``folder`` if it was made with ``key`` and its files are unchanged, else None."""
    manifest = contents.read(folder)
    files = manifest.get("files")
    if any(manifest.get(name) != value for name, value in key.items()):
        return None
    try:
        return manifest if files and files == describe_files(folder, files) else None
    except OSError:
        return None


def _check_same_settings(out: Path, key: Mapping[str, Any], contents: FolderContents) -> None:
    """Refuse to replace a folder that was made with other settings: checkpoints may need its vocabulary."""
    manifest = contents.read(out)
    if manifest and any(manifest.get(name) != value for name, value in key.items()):
        changed = _changes(manifest, key) or ["other options"]
        changes = "; ".join(changed[:_MAX_CHANGES])
        if len(changed) > _MAX_CHANGES:
            changes += f" and {len(changed) - _MAX_CHANGES} more"
        raise UserError(
            f"{out} was made with other settings ({changes}), and checkpoints may need its vocabulary: give another "
            "--out, or --overwrite to replace it"
        )


def _changes(before: Mapping[str, Any], now: Mapping[str, Any]) -> list[str]:
    """Describe in words which settings of a folder differ from the present ones."""
    changes = []
    for name, value in now.items():
        old = before.get(name)
        if old == value:
            continue
        if name in _KEY_DESCRIPTIONS:
            changes.append(_KEY_DESCRIPTIONS[name])
        elif isinstance(value, Mapping):
            old_options = old if isinstance(old, Mapping) else {}
            # An option that is not recorded any more counts as None, the default.
            changes += _changes(old_options, dict.fromkeys(old_options) | dict(value))
        else:
            changes.append(f"{_OPTION_NAMES.get(name, name)} is {_value(old)} there, {_value(value)} here")
    return changes


def _value(value: object) -> str:
    return "the default" if value is None else shorten_path(str(value))


def _check_replaceable(out: Path, contents: FolderContents) -> None:
    """Refuse an output folder that contains anything that these commands did not make."""
    if os.path.lexists(out) and not out.is_dir():
        raise UserError(f"{out} is {'a file' if out.is_file() else 'not a folder'}: give another --out")
    names = sorted(os.listdir(out)) if out.is_dir() else []
    if names and not contents.read(out):
        raise UserError(f"{out} is not empty and was not made by this command: move it or give another --out")
    foreign = [name for name in names if name not in (contents.manifest, *contents.more_files, *_FILES)]
    if foreign:
        raise UserError(
            f"{out / foreign[0]} was not made by this command and would be lost: move it or give another --out"
        )


@contextlib.contextmanager
def scratch_folder(out: Path) -> Iterator[Path]:
    """Make a temporary folder next to an output folder, and remove it in the end.

    Folders that killed processes left are removed first. A second process waits for the first one. Parents of ``out``
    that were missing are removed again if the work fails.

    Args:
        out: The output folder or file.

    Yields:
        The temporary folder.

    Raises:
        UserError: The folder cannot be made. Also raised in place of any ``OSError`` inside the context.
    """
    parent, prefix = out.parent, f".{out.name}.prepare-"
    folder = parent / f"{prefix}{os.getpid()}"
    with contextlib.ExitStack() as stack:
        try:
            _lock_parent(out, stack)
            for name in os.listdir(parent):
                if name.startswith(prefix) and name.removeprefix(prefix).isdecimal():
                    shutil.rmtree(parent / name, ignore_errors=True)
            folder.mkdir()
        except FileExistsError as error:
            raise UserError(f"{error.filename} is a file, not a folder: name another folder") from error
        except OSError as error:
            raise UserError(oserror_message(error, error.filename or parent) or str(error)) from error
        stack.callback(shutil.rmtree, folder, ignore_errors=True)
        try:
            yield folder
        except OSError as error:
            raise UserError(_error_line(error, out, folder)) from error


def _lock_parent(out: Path, stack: contextlib.ExitStack) -> None:
    """Make the parents of ``out`` and lock the last one; try again if another process has just removed it."""
    missing = [folder for folder in out.parents if not folder.exists()]
    busy = f"waiting for another preparation in {out.parent}"
    for attempt in range(_MAX_LOCK_ATTEMPTS):
        try:
            with remove_empty_on_failure(missing):
                out.parent.mkdir(parents=True, exist_ok=True)
                stack.enter_context(exclusive_lock(out.parent, busy, wait=True, folder=True))
            break
        except FileNotFoundError:
            if attempt == _MAX_LOCK_ATTEMPTS - 1:
                raise
    # Registered after the lock, so undone before it is released: a waiting process must not lose its folder.
    stack.enter_context(remove_empty_on_failure(missing))


def _error_line(error: OSError, out: Path, folder: Path) -> str:
    """Return the message of an OSError; it names ``out`` if the path is unknown or in the temporary folder."""
    path = error.filename
    inside = isinstance(path, str) and Path(path).is_relative_to(folder)
    if path is None or inside:
        if error.errno is None:  # NumPy could not write a whole array, and does not say why
            return f"{out} could not be written to its end ({error}): free space on its disk, or raise ulimit -f"
        return oserror_message(error, out) or f"{out} cannot be written ({error}): name another folder"
    return oserror_message(error) or str(error)


def _publish(built: Path, out: Path, old: Path) -> None:
    """Rename ``built`` to ``out``; an existing folder is moved to ``old``, and back if that fails."""
    try:
        if out.exists():
            out.rename(old)
        built.rename(out)
    except BaseException:
        if old.exists() and not out.exists():
            old.rename(out)
        raise


def build_atomically(
    out: Path,
    key: Mapping[str, Any],
    build: Callable[[Path], dict[str, Any]],
    say: Callable[[str], None],
    contents: FolderContents = CORPUS,
    overwrite: bool = False,
) -> dict[str, Any]:
    """Build a folder, unless it exists and is up to date.

    A folder whose files are damaged is built again.

    Args:
        out: Output folder; it is created or replaced when the new files are complete.
        key: Settings that decide the files; part of the manifest.
        build: Fills a folder and returns the rest of the manifest.
        say: Prints a line of progress.
        contents: Files of this kind of folder, in addition to a vocabulary and splits.
        overwrite: Replace a folder that was made with another ``key``.

    Returns:
        The manifest.

    Raises:
        UserError: ``out`` contains something else or cannot be written. It is then unchanged.
    """
    target = Path(os.path.realpath(out))  # unlike Path.resolve, it accepts a circle of links
    if manifest := _up_to_date(target, key, contents):
        say(f"{out} is up to date")
        return manifest
    if Path.cwd().is_relative_to(target):  # the shell would be left in a removed folder
        raise UserError(f"{out} is the current folder or one above it, and would be replaced: name one below it")
    with scratch_folder(target) as scratch:
        # Another process may have built the folder while this one waited.
        if manifest := _up_to_date(target, key, contents):
            say(f"{out} is up to date")
            return manifest
        _check_replaceable(target, contents)
        if not overwrite:
            _check_same_settings(target, key, contents)
        built = scratch / "made"
        built.mkdir()
        manifest = {**key, **build(built)}
        write_json(built / contents.manifest, manifest)
        _check_replaceable(target, contents)  # again: files may have been put there during the build
        _publish(built, target, scratch / "replaced")
        for name, count in manifest.get("splits", {}).items():
            say(f"{name}: " + ", ".join(f"{number} {unit}" for unit, number in count.items()))
        say(f"wrote {out}")
        return manifest
