"""Data sets of the Hugging Face hub: all of one at once, or file by file when they are read.

They are parquet, JSON lines and text; loading scripts are never run. The hub's own cache keeps every finished file.
"""

import contextlib
import re
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path, PurePosixPath
from typing import Any

from fairseq_rpe.core.errors import UserError
from fairseq_rpe.data.sourcefiles import UNWANTED, Entry, matches

_SOURCE = re.compile(r"hub:([\w.-]+/[\w.-]+)((?:/[\w.-]+)*)")
# Files called .json are looked for where there are no others: most describe the data set.
_FORMATS = (
    ("*.parquet", "*.jsonl", "*.jsonl.gz", "*.jsonl.xz", "*.jsonl.zst", "*.txt"),
    ("*.json", "*.json.gz", "*.json.xz", "*.json.zst"),
)
_ABOUT = (
    *("README*", "LICENSE*", "requirements*.txt", "dataset_info*.json", "state.json", "croissant*.json"),
    *("*metadata*.json", "*config*.json", "*stats.json", "*statistics.json"),
)
_BY_HAND = "get its files some other way and give their folder instead"
# where the hub keeps the parquet files that it makes of data sets that come with a loading script
_CONVERTED = "refs/convert/parquet"


def one_file(source: str) -> Path:
    """Download ``hub:OWNER/NAME/FILE``, of whatever kind, unless it is in the hub's cache. Raises UserError."""
    match = _SOURCE.fullmatch(source)
    if match is None or not match[2]:
        raise UserError(f"{source} is not a file of the hub: use hub:OWNER/NAME/FILE")
    return _fetched(match[1], match[2].strip("/"))


def sources(
    source: str, include: Sequence[str] = (), one_by_one: bool = False, converted: bool = False
) -> list[Path | Entry]:
    """What a source consists of: its path, or the files of ``hub:OWNER/NAME[/FOLDER]``, in the order of their names.

    Args:
        source: a path, or a data set of the hub.
        include: patterns such as ``*.parquet`` that the names of a data set's files must match; none takes all.
        one_by_one: download a file of a data set when it is first read; otherwise all of them now.
        converted: one by one; where it has none of its own, take the parquet files that the hub has made of it.

    Raises UserError without network or permission, and if the data set has no files that can be read.
    """
    if not source.startswith("hub:"):
        return [Path(source)]
    match = _SOURCE.fullmatch(source)
    if match is None:
        raise UserError(f"{source} is not a data set of the hub: use hub:OWNER/NAME or hub:OWNER/NAME/FOLDER")
    with _told(source) as hub:
        if converted:
            entries = _listed_or_converted(hub, source, match[1], match[2].strip("/"))
        else:
            listed = _listed if one_by_one else _downloaded
            entries = listed(hub, source, match[1], match[2].strip("/"))
    if not entries:
        kinds = "parquet, .jsonl, .json or .txt files (loading scripts are not run)"
        raise UserError(f"{source} has no {kinds}: {_BY_HAND}")
    found = [entry for entry in entries if not include or matches(entry.name, include)]
    if not found:
        raise UserError(f"{source} has no file that is {' or '.join(include)}: use another --include")
    return list(found)


@contextlib.contextmanager
def _told(source: str) -> Iterator[Any]:
    """The hub's library; tells in one line, a UserError, what is wrong with it, or with the hub."""
    try:
        import huggingface_hub
        from huggingface_hub.errors import GatedRepoError, RepositoryNotFoundError
    except ImportError:
        remedy = f"pip install huggingface_hub pyarrow, or {_BY_HAND}"
        raise UserError(f"{source} needs the package huggingface_hub: {remedy}") from None
    try:
        yield huggingface_hub
    except UserError:
        raise
    except GatedRepoError:
        fault = "is gated: accept its terms on its page and log in with 'hf auth login'"
    except RepositoryNotFoundError:
        fault = "does not exist or is private: check the name"
    except Exception as error:  # the errors of its HTTP library have no common base
        fault = f"cannot be downloaded ({(str(error) or type(error).__name__).splitlines()[0]}): run this again"
    else:
        return
    raise UserError(f"{source} {fault}, or {_BY_HAND}")


def _downloaded(hub: Any, source: str, name: str, folder: str) -> list[Entry]:
    for endings in _FORMATS:
        patterns = [f"{folder}/{ending}" if folder else ending for ending in endings]
        place = Path(hub.snapshot_download(name, repo_type="dataset", allow_patterns=patterns)) / folder
        # The cache may hold other files, from other downloads.
        if paths := _of_data([PurePosixPath(path.relative_to(place)) for path in place.rglob("*")], endings):
            return [Entry(place / path, root=place) for path in paths]
    return []


def _listed_or_converted(hub: Any, source: str, name: str, folder: str) -> list[Entry]:
    absent = (hub.errors.EntryNotFoundError, hub.errors.RevisionNotFoundError)
    for revision in (None, _CONVERTED):
        with contextlib.suppress(*absent):
            if entries := _listed(hub, source, name, folder, revision):
                return entries
    return []


def _listed(hub: Any, source: str, name: str, folder: str, branch: str | None = None) -> list[Entry]:
    api = hub.HfApi()
    asked = {"revision": branch} if branch else {}
    revision = api.repo_info(name, repo_type="dataset", expand=["sha"], **asked).sha
    tree = api.list_repo_tree(name, folder or None, recursive=True, revision=revision, repo_type="dataset")
    # Folders have no size.
    listed = [PurePosixPath(item.path).relative_to(folder) for item in tree if hasattr(item, "size")]
    for endings in _FORMATS:
        if paths := _of_data(listed, endings):
            gets = [partial(_fetched, name, str(PurePosixPath(folder, path)), revision) for path in paths]
            return [
                Entry(Path(source, path), root=Path(source), get=get) for path, get in zip(paths, gets, strict=True)
            ]
    return []


def _fetched(name: str, path: str, revision: str | None = None) -> Path:
    with _told(f"hub:{name}/{path}") as hub:
        return Path(hub.hf_hub_download(name, path, repo_type="dataset", revision=revision))


def _of_data(paths: Sequence[PurePosixPath], endings: Sequence[str]) -> list[PurePosixPath]:
    unwanted = (*UNWANTED, *_ABOUT)
    kept = [path for path in paths if matches(path.name, endings)]
    kept = [path for path in kept if not any(matches(part, unwanted) for part in path.parts)]
    # As folders are walked through: the files of each first.
    return sorted(kept, key=lambda path: [*((True, part) for part in path.parts[:-1]), (False, path.name)])
