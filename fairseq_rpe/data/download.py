"""Downloads that end with the right file under its name, or with one line that says what to put there by hand."""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import http.client
import json
import os
import re
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import BinaryIO

from fairseq_rpe.core.errors import UserError
from fairseq_rpe.data.place import writing

# Some hosts refuse Python's own name.
_AGENT = "Mozilla/5.0 (compatible; fairseq-rpe)"
_BLOCK = 1 << 16
_LONGEST_PAUSE = 30.0
_WORTH_RETRYING = frozenset({408, 425, 429})


class _Failed(Exception):
    """One try without success; ``again`` if the same address may still do."""

    def __init__(self, reason: str, again: bool) -> None:
        super().__init__(reason)
        self.again = again


def download(
    urls: Sequence[str],
    path: Path,
    sha256: str | None = None,
    say: Callable[[str], None] = print,
    tries: int = 4,
    timeout: float = 30.0,
    pause: float = 1.0,
) -> Path:
    """Get a file from the first address that has it whole, going on where an earlier try stopped.

    Args:
        urls: the same file at several addresses, best first.
        path: the name it gets when it is complete; nothing else ever has that name.
        sha256: of the file, if it is known; otherwise its length must be told by the server.
        say: takes short lines about the progress.
        tries: how often an address may fail without getting further.
        timeout: seconds without a byte that count as a failure.
        pause: seconds before the second try, doubled for each further one.

    Raises:
        UserError: if no address has it, or ``path`` is there with another checksum.
    """
    if path.exists():
        if sha256 and _sha256(path) != sha256:
            raise UserError(f"{path} is another file than expected (its sha256 is not {sha256}): remove it")
        return path
    reasons = []
    with writing(path), _part_of(path) as part:
        for url in urls:
            try:
                _from(url, part, sha256, say, tries, timeout, pause)
                os.fsync(part.file.fileno())
                part.path.rename(path)
                part.forget()
                return path
            except _Failed as failure:
                reasons.append(f"{url}: {failure}")
    check = f" (sha256 {sha256})" if sha256 else ""
    raise UserError(f"cannot download {path.name} ({'; '.join(reasons)}): get it elsewhere and put it at {path}{check}")


class _Part:
    """The beginning of a file, and of which version on the server it is one."""

    def __init__(self, path: Path, file: BinaryIO) -> None:
        self.path, self.file = path, file
        self.name = path.name.removeprefix(".").removesuffix(".part")
        self._note = path.with_name(path.name + ".json")

    @property
    def size(self) -> int:
        return self.file.seek(0, os.SEEK_END)

    def clear(self) -> None:
        self.file.truncate(0)

    def version(self, url: str) -> str | None:
        """ETag or date of the version at ``url`` that this is a part of."""
        try:
            return json.loads(self._note.read_text(encoding="utf-8")).get(url)
        except (OSError, ValueError, AttributeError):
            return None

    def note(self, url: str, version: str | None) -> None:
        self._note.write_text(json.dumps({url: version}), encoding="utf-8")

    def forget(self) -> None:
        self._note.unlink(missing_ok=True)


@contextlib.contextmanager
def _part_of(path: Path) -> Iterator[_Part]:
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_name(f".{path.name}.part")
    with open(part, "ab+") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise UserError(f"{path} is being downloaded by another process: wait for it") from None
        try:
            yield _Part(part, file)
        finally:
            # Nothing to go on from is nothing to keep.
            if part.exists() and not part.stat().st_size:
                part.unlink()
                part.with_name(part.name + ".json").unlink(missing_ok=True)


def _from(
    url: str, part: _Part, sha256: str | None, say: Callable[[str], None], tries: int, timeout: float, pause: float
) -> None:
    failures, furthest = 0, part.size
    while True:
        begun = part.size
        try:
            _try(url, part, sha256, timeout)
            if sha256 and _sha256(part.path) != sha256:
                part.clear()
                # A part of another version or mirror may be to blame, a whole file is what the server has.
                raise _Failed("its checksum is wrong", again=begun > 0)
            return
        except _Failed as failure:
            failures = failures + 1 if part.size <= furthest else 1
            furthest = max(furthest, part.size)
            if not failure.again or failures >= tries:
                raise
            wait = min(pause * 2 ** (failures - 1), _LONGEST_PAUSE)
            say(f"{part.name}: {failure}; trying again in {wait:g} s")
            time.sleep(wait)


def _try(url: str, part: _Part, sha256: str | None, timeout: float) -> None:
    """Append the rest of the file to ``part``."""
    offset, version = part.size, part.version(url)
    if offset and not version and not sha256:
        part.clear()
        offset = 0
    headers = {"User-Agent": _AGENT, "Accept-Encoding": "identity"}
    if offset:
        headers["Range"] = f"bytes={offset}-"
        if version:
            headers["If-Range"] = version
    try:
        with urllib.request.urlopen(urllib.request.Request(url, headers=headers), timeout=timeout) as response:
            total = _begin(url, response, part, offset)
            if total is None and not sha256:
                raise _Failed("the server does not tell its length, and no checksum is known", again=False)
            _copy(response, part, total)
    except urllib.error.HTTPError as error:
        if error.code == 416:
            part.clear()
        again = error.code in _WORTH_RETRYING or error.code >= 500 or error.code == 416
        raise _Failed(f"HTTP status {error.code}", again) from None
    except urllib.error.URLError as error:
        raise _Failed(f"no connection ({error.reason})", again=True) from None
    if total is not None and part.size != total:
        got = part.size
        if got > total:
            part.clear()
        raise _Failed(f"the connection ended after {got} of {total} bytes", again=True)


def _begin(url: str, response: http.client.HTTPResponse, part: _Part, offset: int) -> int | None:
    """Make ``part`` fit what the response goes on with; returns the length of the whole file."""
    headers = response.headers
    if response.status == 206:
        match = re.fullmatch(r"bytes (\d+)-\d+/(\d+|\*)", headers.get("Content-Range", ""))
        if match is None or int(match[1]) != offset:
            part.clear()
            raise _Failed("the server sent another range than asked for", again=True)
        if (version := part.version(url)) and version not in (headers.get("ETag"), headers.get("Last-Modified")):
            part.clear()
            raise _Failed("the file on the server has changed", again=True)
        return int(match[2]) if match[2] != "*" else None
    part.clear()
    etag = headers.get("ETag", "")
    # A weak one does not promise equal bytes.
    part.note(url, etag if etag.startswith('"') else headers.get("Last-Modified"))
    length = headers.get("Content-Length", "")
    return int(length) if length.isdigit() else None


def _copy(response: http.client.HTTPResponse, part: _Part, total: int | None) -> None:
    from tqdm import tqdm

    with tqdm(desc=part.name, total=total, initial=part.size, unit="B", unit_scale=True, disable=None) as bar:
        while True:
            try:
                block = response.read(_BLOCK)
            except TimeoutError:
                raise _Failed("the connection stalled", again=True) from None
            except (OSError, http.client.HTTPException) as error:
                raise _Failed(f"the connection broke ({error})", again=True) from None
            if not block:
                part.file.flush()
                return
            part.file.write(block)
            bar.update(len(block))


def _sha256(path: Path) -> str:
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
