"""Downloads: single files with a checksum, and data sets of the Hugging Face hub.

Data sets are parquet, JSON lines and text; loading scripts are never run. Complete files stay in the hub's own cache.
"""

import contextlib
import logging
import os
import re
import sys
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path, PurePosixPath
from typing import Any

from fairseq_rpe.core.errors import UserError
from fairseq_rpe.data.atomic_folder import scratch_folder
from fairseq_rpe.data.documents import UNWANTED, SourceFile, matches_any
from fairseq_rpe.utils.files import sha256_of_files, write_via_temporary

# Some hosts refuse Python's user agent; with compression the Content-Length would not be the size of the file.
_HEADERS = {"User-Agent": "Mozilla/5.0 (compatible; fairseq-rpe)", "Accept-Encoding": "identity"}
_CHUNK_BYTES = 1 << 16
_RETRIED_STATUS = frozenset({408, 425, 429})  # client errors that another attempt may avoid


class _PermanentError(Exception):
    """A response that another attempt would not change."""


def download(urls: Sequence[str], path: Path, sha256: str | None = None, tries: int = 4, timeout: float = 30.0) -> Path:
    """Download a file, unless it exists, from the first URL that has all of it.

    Args:
        urls: URLs of the same file, best first.
        path: Where the complete file goes; an incomplete one never has this name.
        sha256: Digest of the file. Without it, the server must send the length.
        tries: Attempts per URL, with growing pauses (by the package pooch, which cannot resume a transfer).
        timeout: Seconds without a byte that count as a failure.

    Returns:
        ``path``.

    Raises:
        UserError: No URL has the file, or an existing file has another digest.
    """
    if not path.exists():
        with scratch_folder(path) as folder:
            # Another process may have downloaded it while this one waited.
            if not path.exists():
                _fetch(urls, path, folder, sha256, tries, timeout)
    if sha256 and sha256_of_files(path) != sha256:
        raise UserError(f"{path} is not the expected file (its sha256 is not {sha256}): remove it")
    return path


def _fetch(urls: Sequence[str], path: Path, folder: Path, sha256: str | None, tries: int, timeout: float) -> None:
    """Download a file to ``folder`` with pooch, then move it to ``path``; see :func:`download`."""
    by_hand = f"get it elsewhere and put it at {path}" + (f" (sha256 {sha256})" if sha256 else "")
    try:
        import pooch
    except ImportError:
        raise UserError(f"{path.name} needs the package pooch: pip install pooch, or {by_hand}") from None
    pooch.get_logger().setLevel(logging.WARNING)
    downloader = pooch.HTTPDownloader(
        progressbar=sys.stderr.isatty(),
        chunk_size=_CHUNK_BYTES,
        headers=_HEADERS,
        timeout=timeout,
        hooks={"response": partial(_check_response, has_digest=bool(sha256))},
    )
    reasons = []
    for url in urls:
        fetcher = pooch.create(
            path=folder, base_url="", registry={path.name: sha256}, urls={path.name: url}, retry_if_failed=tries - 1
        )
        try:
            file = fetcher.fetch(path.name, downloader=downloader)
        except (_PermanentError, ValueError, OSError) as error:
            # Errors of the disk have a number, errors of the connection do not.
            if getattr(error, "errno", None) is not None:
                raise
            reasons.append(f"{url}: {_root_cause(error)}")
            continue
        write_via_temporary(path, partial(os.replace, file))
        return
    raise UserError(f"cannot download {path.name} ({'; '.join(reasons)}): {by_hand}")


def _root_cause(error: BaseException) -> str:
    """Return the cause of a failed download in one line, without the errors of the libraries that wrap it.

    requests wraps the error of urllib3, whose attribute ``reason`` is the last failure of its tries. The text of that
    failure repeats the connection before a colon.
    """
    wrapped = error.args[0] if error.args else None
    reason = getattr(wrapped, "reason", None)
    text = " ".join(str(error if reason is None else reason).split())
    return text if reason is None else text.rpartition("): ")[2]


def _check_response(response: Any, has_digest: bool, **_: object) -> None:
    """Refuse a response that another attempt would not change, or whose file might be cut short unnoticed."""
    status, headers = response.status_code, response.headers
    if 400 <= status < 500 and status not in _RETRIED_STATUS:
        raise _PermanentError(f"HTTP status {status}")
    if status == 200 and not has_digest and "Content-Length" not in headers and "Transfer-Encoding" not in headers:
        raise _PermanentError("the server does not say how long it is, and no checksum is known")


_HUB_SOURCE = re.compile(r"hub:([\w.-]+/[\w.-]+)((?:/[\w.-]+)*)")
# In order of preference: most .json files only describe a data set, so they count where there are no others.
_FORMATS = (
    ("*.parquet", "*.jsonl", "*.jsonl.gz", "*.jsonl.xz", "*.jsonl.zst", "*.txt"),
    ("*.json", "*.json.gz", "*.json.xz", "*.json.zst"),
)
_DESCRIPTIONS = (
    *("README*", "LICENSE*", "requirements*.txt", "dataset_info*.json", "state.json", "croissant*.json"),
    *("*metadata*.json", "*config*.json", "*stats.json", "*statistics.json"),
)
_BY_HAND = "get its files some other way and give their folder instead"
_CONVERTED = "refs/convert/parquet"  # branch with the parquet files that the hub makes of loading scripts


def download_file(source: str) -> Path:
    """Download ``hub:OWNER/NAME/FILE``, unless it is in the hub's cache, and return its local path.

    Raises:
        UserError: The source is not of this form, or the download fails.
    """
    match = _HUB_SOURCE.fullmatch(source)
    if match is None or not match[2]:
        raise UserError(f"{source} is not a file of the hub: use hub:OWNER/NAME/FILE")
    return _download_hub_file(match[1], match[2].strip("/"))


def resolve_source(
    source: str, include: Sequence[str] = (), lazy: bool = False, allow_converted: bool = False
) -> list[Path | SourceFile]:
    """Return the files of a source.

    Args:
        source: A path, or a data set of the hub as ``hub:OWNER/NAME[/FOLDER]``.
        include: Patterns such as ``*.parquet`` that the names of a data set's files must match; empty takes all.
        lazy: Download each file of a data set when it is first read, instead of all of them now.
        allow_converted: If a data set has no files of its own, take the parquet files that the hub made of it. Files
            are then downloaded as with ``lazy``.

    Returns:
        The path, or the files of the data set in the order of their names.

    Raises:
        UserError: The download fails, or the data set has no files that can be read.
    """
    if not source.startswith("hub:"):
        return [Path(source)]
    match = _HUB_SOURCE.fullmatch(source)
    if match is None:
        raise UserError(f"{source} is not a data set of the hub: use hub:OWNER/NAME or hub:OWNER/NAME/FOLDER")
    name, folder = match[1], match[2].strip("/")
    with _hub_errors(source) as hub:
        if allow_converted:
            all_files = _list_or_converted(hub, source, name, folder)
        elif lazy:
            all_files = _list_files(hub, source, name, folder)
        else:
            all_files = _download_files(hub, name, folder)
    if not all_files:
        formats = "parquet, .jsonl, .json or .txt files (loading scripts are not run)"
        raise UserError(f"{source} has no {formats}: {_BY_HAND}")
    files = [file for file in all_files if not include or matches_any(file.name, include)]
    if not files:
        raise UserError(f"{source} has no file that is {' or '.join(include)}: use another --include")
    return list(files)


@contextlib.contextmanager
def _hub_errors(source: str) -> Iterator[Any]:
    """Yield the hub's library, and turn its errors into a UserError of one line."""
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
        problem = "is gated: accept its terms on its page and log in with 'hf auth login'"
    except RepositoryNotFoundError:
        problem = "does not exist or is private: check the name"
    except Exception as error:  # the errors of its HTTP library have no common base class
        problem = f"cannot be downloaded ({(str(error) or type(error).__name__).splitlines()[0]}): run this again"
    else:
        return
    raise UserError(f"{source} {problem}, or {_BY_HAND}")


def _download_files(hub: Any, name: str, folder: str) -> list[SourceFile]:
    """Download the files of a data set, in the first of the formats that it has."""
    for patterns in _FORMATS:
        in_folder = [f"{folder}/{pattern}" if folder else pattern for pattern in patterns]
        root = Path(hub.snapshot_download(name, repo_type="dataset", allow_patterns=in_folder)) / folder
        # The cache may also contain files of other downloads, so the patterns are applied again.
        if paths := _data_files([PurePosixPath(path.relative_to(root)) for path in root.rglob("*")], patterns):
            return [SourceFile(root / path, root=root) for path in paths]
    return []


def _list_or_converted(hub: Any, source: str, name: str, folder: str) -> list[SourceFile]:
    """List the files of a data set, or else the parquet files that the hub made of it."""
    absent = (hub.errors.EntryNotFoundError, hub.errors.RevisionNotFoundError)
    for branch in (None, _CONVERTED):
        with contextlib.suppress(*absent):
            if files := _list_files(hub, source, name, folder, branch):
                return files
    return []


def _list_files(hub: Any, source: str, name: str, folder: str, branch: str | None = None) -> list[SourceFile]:
    """List the files of a data set at its newest revision, to be downloaded when they are read."""
    api = hub.HfApi()
    arguments = {"revision": branch} if branch else {}
    revision = api.repo_info(name, repo_type="dataset", expand=["sha"], **arguments).sha
    tree = api.list_repo_tree(name, folder or None, recursive=True, revision=revision, repo_type="dataset")
    # Items without a size are folders.
    paths = [PurePosixPath(item.path).relative_to(folder) for item in tree if hasattr(item, "size")]
    for patterns in _FORMATS:
        if data_paths := _data_files(paths, patterns):
            return [
                SourceFile(
                    Path(source, path),
                    root=Path(source),
                    fetch=partial(_download_hub_file, name, str(PurePosixPath(folder, path)), revision),
                )
                for path in data_paths
            ]
    return []


def _download_hub_file(name: str, path: str, revision: str | None = None) -> Path:
    with _hub_errors(f"hub:{name}/{path}") as hub:
        return Path(hub.hf_hub_download(name, path, repo_type="dataset", revision=revision))


def _data_files(paths: Sequence[PurePosixPath], patterns: Sequence[str]) -> list[PurePosixPath]:
    """Return the paths that match a pattern and are not hidden or descriptions, in the order of a folder walk."""
    unwanted = (*UNWANTED, *_DESCRIPTIONS)
    matching = [path for path in paths if matches_any(path.name, patterns)]
    data_paths = [path for path in matching if not any(matches_any(name, unwanted) for name in path.parts)]
    # os.walk yields the files of a folder before its subfolders.
    return sorted(data_paths, key=lambda path: [*((True, name) for name in path.parts[:-1]), (False, path.name)])
