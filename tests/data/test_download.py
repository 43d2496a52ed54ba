"""Downloads from a local server that stalls, truncates, fails, ignores ranges and sends wrong files."""

from __future__ import annotations

import hashlib
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from fairseq_rpe.core.errors import UserError
from fairseq_rpe.data.download import download

CONTENT = b"".join(number.to_bytes(4, "big") for number in range(50_000))
OTHER = CONTENT[::-1]
SHA256 = hashlib.sha256(CONTENT).hexdigest()


class Server(ThreadingHTTPServer):
    """Serves by ``plan``, one step for each request, the last one again and again.

    Steps are ``ok``, an HTTP status, ``cut:N`` (ends after N bytes of the answer), ``stall:N``, and with a plus
    ``norange``, ``noversion``, ``nolength``, ``other`` (another content), ``shifted`` (a wrong Content-Range),
    ``careless`` (does not look whether the file has changed).
    """

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.plan: list[str] = ["ok"]
        self.requests: list[dict[str, str]] = []
        self.released = threading.Event()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_port}/file.zip"


class Handler(BaseHTTPRequestHandler):
    server: Server

    def log_message(self, *_: object) -> None:
        pass

    def do_GET(self) -> None:
        server = self.server
        server.requests.append(dict(self.headers))
        step = server.plan.pop(0) if len(server.plan) > 1 else server.plan[0]
        flags = step.split("+")
        if flags[0].isdigit():
            self.send_error(int(flags[0]))
            return
        content = OTHER if "other" in flags else CONTENT
        version = '"other"' if "other" in flags else '"one"'
        start = 0
        asked = self.headers.get("Range")
        same = "careless" in flags or self.headers.get("If-Range") in (None, version)
        if asked and "norange" not in flags and same:
            start = int(asked.removeprefix("bytes=").removesuffix("-"))
            if start >= len(content):
                self.send_error(416)
                return
            self.send_response(206)
            told = 0 if "shifted" in flags else start
            self.send_header("Content-Range", f"bytes {told}-{len(content) - 1}/{len(content)}")
        else:
            self.send_response(200)
        if "nolength" not in flags:
            self.send_header("Content-Length", str(len(content) - start))
        if "noversion" not in flags:
            self.send_header("ETag", version)
        self.end_headers()
        what, _, number = flags[0].partition(":")
        body = content[start:]
        self.wfile.write(body[: int(number)] if number else body)
        if what == "stall":
            self.wfile.flush()
            server.released.wait(10)


@pytest.fixture
def server() -> Iterator[Server]:
    with Server() as server:
        threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
        yield server
        server.released.set()
        server.shutdown()


def get(server: Server, path: Path, *plan: str, **changes: Any) -> Path:
    server.plan = list(plan)
    given: dict[str, Any] = {"urls": [server.url], "timeout": 0.3, "pause": 0.001, "say": lambda _: None, **changes}
    return download(path=path, **given)


@pytest.mark.parametrize("sha256", [None, SHA256], ids=["length", "checksum"])
@pytest.mark.parametrize(
    "plan",
    [
        ["ok"],
        ["500", "503", "ok"],
        ["cut:1000", "ok"],
        ["cut:0", "cut:70000", "cut:70000", "cut:1", "cut:1", "cut:1", "cut:1", "ok"],
        ["stall:5000", "ok"],
        ["cut:1000", "ok+norange"],
        ["cut:1000+noversion", "ok+noversion"],
        ["cut:1000", "ok+shifted", "ok"],
        ["cut:1000+other", "ok"],
        ["cut:1000+other", "ok+careless", "ok"],
        ["429", "408", "ok"],
    ],
    ids=lambda plan: " ".join(plan)[:40],
)
def test_it_ends_with_the_right_file(server: Server, tmp_path: Path, plan: list[str], sha256: str | None) -> None:
    path = tmp_path / "downloads" / "file.zip"
    assert get(server, path, *plan, sha256=sha256) == path
    assert path.read_bytes() == CONTENT
    assert list(path.parent.iterdir()) == [path]
    assert all("Python" not in request["User-Agent"] for request in server.requests)


@pytest.mark.parametrize(
    ("plan", "changes", "words"),
    [
        (["404"], {}, "HTTP status 404"),
        (["500"], {}, "HTTP status 500"),
        (["cut:0"], {}, "the connection ended after 0 of 200000 bytes"),
        (["cut:10+norange"], {}, "the connection ended after 10 of 200000 bytes"),
        (["stall:10+norange"], {}, "the connection stalled"),
        (["ok+other"], {"sha256": SHA256}, "its checksum is wrong"),
        (["cut:9000+nolength"], {"sha256": SHA256}, "its checksum is wrong"),
        (["ok+nolength"], {}, "does not tell its length, and no checksum is known"),
        (["ok"], {"urls": ["http://127.0.0.1:9/file.zip"]}, "no connection"),
    ],
    ids=lambda value: str(value)[:40],
)
def test_or_with_one_line(server: Server, tmp_path: Path, plan: list[str], changes: dict[str, Any], words: str) -> None:
    path = tmp_path / "file.zip"
    with pytest.raises(UserError) as caught:
        get(server, path, *plan, tries=3, **changes)
    message = str(caught.value)
    assert words in message and f"put it at {path}" in message and "\n" not in message
    assert not path.exists()
    assert len(server.requests) <= 4


def test_it_goes_on_where_another_call_stopped(server: Server, tmp_path: Path) -> None:
    with pytest.raises(UserError, match="ended after 60000 of"):
        get(server, tmp_path / "file.zip", "cut:60000", tries=1)
    get(server, tmp_path / "file.zip", "ok")
    assert server.requests[-1]["Range"] == "bytes=60000-" and server.requests[-1]["If-Range"] == '"one"'
    assert (tmp_path / "file.zip").read_bytes() == CONTENT


def test_mirrors_in_order(server: Server, tmp_path: Path) -> None:
    with Server() as mirror:
        threading.Thread(target=mirror.serve_forever, args=(0.01,), daemon=True).start()
        urls = [server.url, mirror.url]
        get(server, tmp_path / "a", "404", urls=urls)
        get(server, tmp_path / "b", "ok+other", urls=urls, sha256=SHA256)
        get(server, tmp_path / "c", "cut:500+other", "404", urls=urls)
        get(server, tmp_path / "d", "cut:500", "404", urls=urls, sha256=SHA256)
        assert mirror.requests[-1]["Range"] == "bytes=500-"
        assert all((tmp_path / name).read_bytes() == CONTENT for name in "abcd")
        mirror.shutdown()


def test_a_file_that_is_there_is_kept_or_refused(server: Server, tmp_path: Path) -> None:
    path = tmp_path / "file.zip"
    path.write_bytes(CONTENT)
    assert get(server, path, "500", sha256=SHA256) == path and not server.requests
    path.write_bytes(b"another")
    with pytest.raises(UserError, match=f"is another file than expected .its sha256 is not {SHA256}.: remove it"):
        get(server, path, "ok", sha256=SHA256)
    assert path.read_bytes() == b"another"


def test_two_processes_do_not_write_one_file(server: Server, tmp_path: Path) -> None:
    import fcntl

    with open(tmp_path / ".file.zip.part", "ab") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        with pytest.raises(UserError, match="is being downloaded by another process"):
            get(server, tmp_path / "file.zip", "ok")
