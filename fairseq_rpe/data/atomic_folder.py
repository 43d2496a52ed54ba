"""The destination folder: recognised as our own, built beside it, replaced in one step."""

import contextlib
import os
import shutil
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fairseq_rpe.core.errors import UserError, os_line, shown
from fairseq_rpe.data.folder import BINARIES, MANIFEST, describe_files, read_manifest
from fairseq_rpe.utils.files import lock, removed_on_failure, write_json

_NAMED = 3  # settings in a message
# parts of a key that are digests or numbers of no meaning to users
_SAID = {
    "format": "by another version",
    "digest": "of another text",
    "texts": "of another text",
    "files": "of other files",
    "division": "of texts divided otherwise",
    "given_vocabulary": "with another vocabulary",
}
_FILES = ("dict.txt", "spm.model", "vocab.json", "merges.txt", *BINARIES)


@dataclass(frozen=True)
class Contents:
    """What folders of a kind hold beside a vocabulary and splits."""

    manifest: str  # the file that says how one was made
    read: Callable[[Path], dict[str, Any]]  # what that says, nothing where it is not there or not of these commands
    more: tuple[str, ...] = ()  # other files


CORPUS = Contents(MANIFEST, read_manifest)


def _up_to_date(folder: Path, key: Mapping[str, Any], contents: Contents) -> dict[str, Any] | None:
    """The manifest of ``folder`` if it was made with ``key`` and all its files are unchanged."""
    manifest = contents.read(folder)
    files = manifest.get("files")
    if any(manifest.get(name) != value for name, value in key.items()):
        return None
    try:
        return manifest if files and files == describe_files(folder, files) else None
    except OSError:
        return None


def _check_same_settings(dest: Path, key: Mapping[str, Any], contents: Contents) -> None:
    """Refuse a folder that these commands made with other settings: checkpoints may need its vocabulary."""
    manifest = contents.read(dest)
    if manifest and any(manifest.get(name) != value for name, value in key.items()):
        changed = _changes(manifest, key) or ["other options"]
        some = "; ".join(changed[:_NAMED]) + (f" and {len(changed) - _NAMED} more" if len(changed) > _NAMED else "")
        raise UserError(
            f"{dest} was made with other settings ({some}), and checkpoints may need its vocabulary: give another "
            "--dest, or --overwrite to replace it"
        )


def _changes(before: Mapping[str, Any], now: Mapping[str, Any]) -> list[str]:
    """In words, which settings of a folder differ from those that are given now."""
    found = []
    for name, value in now.items():
        old = before.get(name)
        if name in _SAID:
            found += [_SAID[name]] * (old != value)
        elif isinstance(value, Mapping):
            known = old if isinstance(old, Mapping) else {}
            found += _changes(known, dict.fromkeys(known) | dict(value))
        elif old != value:
            found.append(f"{name} is {_value(old)} there, {_value(value)} here")
    return found


def _value(value: object) -> str:
    return "the default" if value is None else shown(str(value))


def _check_replaceable(dest: Path, contents: Contents) -> None:
    """Refuse a destination with anything in it that this command did not make."""
    if os.path.lexists(dest) and not dest.is_dir():
        raise UserError(f"{dest} is {'a file' if dest.is_file() else 'not a folder'}: give another --dest")
    names = sorted(os.listdir(dest)) if dest.is_dir() else []
    if names and not contents.read(dest):
        raise UserError(f"{dest} is not empty and was not made by this command: move it or give another --dest")
    foreign = [name for name in names if name not in (contents.manifest, *contents.more, *_FILES)]
    if foreign:
        raise UserError(
            f"{dest / foreign[0]} was not made by this command and would be lost: move it or give another --dest"
        )


@contextlib.contextmanager
def scratch(dest: Path) -> Iterator[Path]:
    """A temporary folder on the disk of ``dest``, for one process at a time, removed in the end.

    What a killed process left there is removed first; a second process waits for the first. Folders above ``dest`` that
    were missing are removed again where the work fails. Raises UserError for any ``OSError`` inside.
    """
    parent, prefix = dest.parent, f".{dest.name}.prepare-"
    folder = parent / f"{prefix}{os.getpid()}"
    with contextlib.ExitStack() as stack:
        try:
            _lock_parent(dest, stack)
            for name in os.listdir(parent):
                if name.startswith(prefix) and name.removeprefix(prefix).isdecimal():
                    shutil.rmtree(parent / name, ignore_errors=True)
            folder.mkdir()
        except FileExistsError as error:
            raise UserError(f"{error.filename} is a file, not a folder: name another place") from error
        except OSError as error:
            raise UserError(os_line(error, error.filename or parent) or str(error)) from error
        stack.callback(shutil.rmtree, folder, ignore_errors=True)
        try:
            yield folder
        except OSError as error:
            raise UserError(_error_line(error, dest, folder)) from error


def _lock_parent(dest: Path, stack: contextlib.ExitStack) -> None:
    """Make the folders above ``dest`` and lock the last one; try again where another process has just removed it."""
    missing = [folder for folder in dest.parents if not folder.exists()]
    busy = f"waiting for another preparation in {dest.parent}"
    for left in reversed(range(100)):
        try:
            with removed_on_failure(missing):
                dest.parent.mkdir(parents=True, exist_ok=True)
                stack.enter_context(lock(dest.parent, busy, wait=True, folder=True))
        except FileNotFoundError:
            if not left:
                raise
        else:
            break
    # within the lock: whoever waits for it would otherwise lose the folder in which it works
    stack.enter_context(removed_on_failure(missing))


def _error_line(error: OSError, dest: Path, folder: Path) -> str:
    """The line of an error of the system: about ``dest`` where its path is in the temporary folder or unknown."""
    path = error.filename
    inside = isinstance(path, str) and Path(path).is_relative_to(folder)
    if path is None or inside:
        if error.errno is None:  # numpy's, of a file that was not written to its end: it does not say why
            return f"{dest} could not be written to its end ({error}): free space on its disk, or raise ulimit -f"
        return os_line(error, dest) or f"{dest} cannot be written ({error}): name another place"
    return os_line(error) or str(error)


def _publish(built: Path, dest: Path, old: Path) -> None:
    """Rename ``built`` to ``dest``; what was there goes to ``old``, and back if that fails."""
    try:
        if dest.exists():
            dest.rename(old)
        built.rename(dest)
    except BaseException:
        if old.exists() and not dest.exists():
            old.rename(dest)
        raise


def make_once(
    dest: Path,
    key: Mapping[str, Any],
    build: Callable[[Path], dict[str, Any]],
    say: Callable[[str], None],
    contents: Contents = CORPUS,
    overwrite: bool = False,
) -> dict[str, Any]:
    """Make a corpus, or a folder with other ``contents``, in ``dest`` unless it already exists; returns its manifest.

    ``key`` is what decides its files; ``build`` fills the folder that it is given and returns the rest of the manifest;
    ``say`` takes short lines about the progress. A folder that was made with another ``key`` is replaced only with
    ``overwrite``, one of which files are damaged is made again.

    Raises UserError if ``dest`` holds something else or cannot be written; it is then untouched.
    """
    place = Path(os.path.realpath(dest))  # which takes links that lead in a circle
    manifest = _up_to_date(place, key, contents)
    if not manifest:
        if Path.cwd().is_relative_to(place):  # it would no longer be there for the shell that stands in it
            raise UserError(f"{dest} is the current folder or one above it, and would be replaced: name one below it")
        with scratch(place) as folder:
            # Another process may have made it while this one waited.
            manifest = _up_to_date(place, key, contents)
            if not manifest:
                _check_replaceable(place, contents)
                if not overwrite:
                    _check_same_settings(place, key, contents)
                made = folder / "made"
                made.mkdir()
                manifest = {**key, **build(made)}
                write_json(made / contents.manifest, manifest)
                _check_replaceable(place, contents)
                _publish(made, place, folder / "replaced")
                for name, count in manifest.get("splits", {}).items():
                    say(f"{name}: " + ", ".join(f"{number} {what}" for what, number in count.items()))
                say(f"wrote {dest}")
                return manifest
    say(f"{dest} is up to date")
    return manifest
