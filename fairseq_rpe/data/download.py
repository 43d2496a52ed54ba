"""Downloads that end with the right file under its name, or with one line that says what to put there by hand.

Single files are got with the package pooch, which tries again, with growing pauses, and checks, but cannot go on where
a transfer stopped.
"""

import logging
import os
import sys
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

from fairseq_rpe.core.errors import UserError
from fairseq_rpe.data.atomic_folder import scratch
from fairseq_rpe.utils.files import file_digest, replace_with

# Some hosts refuse Python's own name; an unpacked answer would not have the length that is told.
_HEADERS = {"User-Agent": "Mozilla/5.0 (compatible; fairseq-rpe)", "Accept-Encoding": "identity"}
_BLOCK = 1 << 16
_WORTH_RETRYING = frozenset({408, 425, 429})


class _Hopeless(Exception):
    """An answer that another try would not change."""


def download(urls: Sequence[str], path: Path, sha256: str | None = None, tries: int = 4, timeout: float = 30.0) -> Path:
    """Get a file from the first address that has it whole.

    Args:
        urls: the same file at several addresses, best first.
        path: the name it gets when it is complete; nothing else ever has that name.
        sha256: of the file, if it is known; otherwise its length must be told by the server.
        tries: how often an address may fail.
        timeout: seconds without a byte that count as a failure.

    Raises UserError if no address has it, or ``path`` is there with another checksum.
    """
    if not path.exists():
        with scratch(path) as folder:
            # Another process may have got it while this one waited.
            if not path.exists():
                _get(urls, path, folder, sha256, tries, timeout)
    if sha256 and file_digest(path) != sha256:
        raise UserError(f"{path} is not the expected file (its sha256 is not {sha256}): remove it")
    return path


def _get(urls: Sequence[str], path: Path, folder: Path, sha256: str | None, tries: int, timeout: float) -> None:
    by_hand = f"get it elsewhere and put it at {path}" + (f" (sha256 {sha256})" if sha256 else "")
    try:
        import pooch
    except ImportError:
        raise UserError(f"{path.name} needs the package pooch: pip install pooch, or {by_hand}") from None
    pooch.get_logger().setLevel(logging.WARNING)

    def check(response: Any, **_: object) -> None:
        code, headers = response.status_code, response.headers
        if 400 <= code < 500 and code not in _WORTH_RETRYING:
            raise _Hopeless(f"HTTP status {code}")
        if code == 200 and not sha256 and "Content-Length" not in headers and "Transfer-Encoding" not in headers:
            raise _Hopeless("the server does not say how long it is, and no checksum is known")

    get = pooch.HTTPDownloader(
        progressbar=sys.stderr.isatty(), chunk_size=_BLOCK, headers=_HEADERS, timeout=timeout, hooks={"response": check}
    )
    reasons = []
    for url in urls:
        fetcher = pooch.create(
            path=folder, base_url="", registry={path.name: sha256}, urls={path.name: url}, retry_if_failed=tries - 1
        )
        try:
            found = fetcher.fetch(path.name, downloader=get)
        except (_Hopeless, ValueError, OSError) as error:
            # Those of the connection have no number, those of the disk have.
            if getattr(error, "errno", None) is not None:
                raise
            reasons.append(f"{url}: {' '.join(str(error).split())}")
            continue
        replace_with(path, partial(os.replace, found))
        return
    raise UserError(f"cannot download {path.name} ({'; '.join(reasons)}): {by_hand}")
