"""Downloads from a local server that stalls, truncates, fails and sends wrong files."""

from __future__ import annotations

import errno
import hashlib
import sys
import threading
import types
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from fairseq_rpe.core.errors import UserError
from fairseq_rpe.data.download import download
from fairseq_rpe.utils.files import exclusive_lock

CONTENT = b"".join(number.to_bytes(4, "big") for number in range(50_000))
OTHER = CONTENT[::-1]
SHA256 = hashlib.sha256(CONTENT).hexdigest()


class Server(ThreadingHTTPServer):
    """Serves by ``plan``, one step for each request, the last one again and again.

    Steps are ``ok``, an HTTP status, ``cut:N`` (ends after N bytes of the answer), ``stall:N``, and with a plus
    ``nolength``, ``other`` (another content).
    """

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.server_port}/file.zip"
        self.plan: list[str] = ["ok"]
        self.requests: list[dict[str, str]] = []
        self.released = threading.Event()
        threading.Thread(target=self.serve_forever, args=(0.01,), daemon=True).start()


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
        self.send_response(200)
        if "nolength" not in flags:
            self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        what, _, number = flags[0].partition(":")
        self.wfile.write(content[: int(number)] if number else content)
        if what == "stall":
            self.wfile.flush()
            server.released.wait(10)


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Iterator[Server]:
    """Whose failures are not waited for."""
    monkeypatch.setattr("pooch.core.time", types.SimpleNamespace(sleep=lambda seconds: None))
    with Server() as server:
        yield server
        server.released.set()
        server.shutdown()


def get(server: Server, path: Path, *plan: str, **changes: Any) -> Path:
    server.plan = list(plan)
    return download(path=path, **{"urls": [server.url], "timeout": 0.3, **changes})


PLANS = ["ok", "500 503 ok", "429 408 ok", "cut:0 cut:70000 cut:1 ok", "stall:5000 ok", "cut:1000+other ok"]


@pytest.mark.parametrize("sha256", [None, SHA256], ids=["length", "checksum"])
@pytest.mark.parametrize("plan", PLANS)
def test_it_ends_with_the_right_file(server: Server, tmp_path: Path, plan: str, sha256: str | None) -> None:
    path = tmp_path / "downloads" / "file.zip"
    assert get(server, path, *plan.split(), sha256=sha256) == path
    assert path.read_bytes() == CONTENT
    assert list(path.parent.iterdir()) == [path]
    (tmp_path / "usual").touch()
    assert path.stat().st_mode == (tmp_path / "usual").stat().st_mode
    assert all("python" not in request["User-Agent"].lower() for request in server.requests)


FAILURES: list[tuple[str, dict[str, Any], int, str]] = [
    ("404", {}, 1, "HTTP status 404"),
    ("500", {}, 3, "500 Server Error"),
    ("cut:0", {}, 3, "0 bytes read, 200000 more expected"),
    ("cut:10", {}, 3, "10 bytes read, 199990 more expected"),
    ("stall:10", {}, 3, "Read timed out"),
    ("ok+other", {"sha256": SHA256}, 3, "does not match the known hash"),
    ("cut:9000+nolength", {"sha256": SHA256}, 3, "does not match the known hash"),
    ("ok+nolength", {}, 1, "does not say how long it is, and no checksum is known"),
    ("ok", {"urls": ["http://127.0.0.1:9/file.zip"]}, 0, "Connection refused"),
]


@pytest.mark.parametrize(("plan", "changes", "requests", "words"), FAILURES)
def test_or_with_one_line(server: Server, tmp_path: Path, plan: str, changes: Any, requests: int, words: str) -> None:
    path = tmp_path / "file.zip"
    with pytest.raises(UserError) as caught:
        get(server, path, plan, tries=3, **changes)
    message = str(caught.value)
    assert words in message and f"put it at {path}" in message and "\n" not in message
    assert list(tmp_path.iterdir()) == [] and len(server.requests) == requests


def test_interrupted_transfers_leave_nothing(server: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def stop(*_: object, **__: object) -> None:
        assert not (tmp_path / "file.zip").exists() and list(tmp_path.iterdir())
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr("pooch.core.hash_matches", stop)
        with pytest.raises(KeyboardInterrupt):
            get(server, tmp_path / "file.zip", "ok", sha256=SHA256)
    assert list(tmp_path.iterdir()) == []
    (tmp_path / ".file.zip.prepare-123").mkdir()
    (tmp_path / ".file.zip.prepare-123" / "tmpabc").write_bytes(b"of a killed process")
    get(server, tmp_path / "file.zip", "ok")
    assert list(tmp_path.iterdir()) == [tmp_path / "file.zip"]


def test_a_full_disk_is_no_reason_for_a_mirror(server: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object, **__: object) -> None:
        raise OSError(errno.ENOSPC, "no space left on device")

    monkeypatch.setattr("pooch.core.hash_matches", fail)
    with pytest.raises(UserError, match="no space left on the disk while writing .*file.zip: free some"):
        get(server, tmp_path / "file.zip", "ok", urls=[server.url, server.url])
    assert list(tmp_path.iterdir()) == [] and len(server.requests) == 1


def test_a_connection_that_fails_is_told_by_its_cause_alone(tmp_path: Path) -> None:
    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as closed:
        url = f"http://127.0.0.1:{closed.server_port}/file.zip"
    with pytest.raises(UserError) as caught:
        download([url], tmp_path / "file.zip", SHA256, tries=1)
    assert f"({url}: " in str(caught.value) and "refused" in str(caught.value)
    assert "Max retries" not in str(caught.value) and "HTTPConnection" not in str(caught.value)


def test_mirrors_in_order(server: Server, tmp_path: Path) -> None:
    with Server() as mirror:
        urls = [server.url, mirror.url]
        get(server, tmp_path / "a", "404", urls=urls)
        get(server, tmp_path / "b", "ok+other", urls=urls, sha256=SHA256)
        get(server, tmp_path / "c", "cut:500+other", "404", urls=urls)
        assert len(mirror.requests) == 3
        get(server, tmp_path / "d", "cut:500", "ok", urls=urls, sha256=SHA256)
        assert len(mirror.requests) == 3
        assert all((tmp_path / name).read_bytes() == CONTENT for name in "abcd")
        mirror.shutdown()


def test_a_file_that_is_there_is_kept_or_refused(server: Server, tmp_path: Path) -> None:
    path = tmp_path / "file.zip"
    path.write_bytes(CONTENT)
    assert get(server, path, "500", sha256=SHA256) == path and not server.requests
    path.write_bytes(b"another")
    with pytest.raises(UserError, match=f"is not the expected file .its sha256 is not {SHA256}.: remove it"):
        get(server, path, "ok", sha256=SHA256)
    assert path.read_bytes() == b"another"


def test_two_processes_do_not_get_one_file_twice(
    server: Server, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "file.zip"
    with exclusive_lock(tmp_path, "busy"):
        other = threading.Thread(target=get, args=(server, path, "500"))
        other.start()
        while not (said := capsys.readouterr().err):
            other.join(0.01)
        path.write_bytes(CONTENT)
    other.join()
    assert said == f"waiting for another preparation in {tmp_path}\n" and not server.requests


def test_without_the_library_is_one_line(server: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pooch", None)
    with pytest.raises(UserError, match="file.zip needs the package pooch: pip install pooch, or get it elsewhere and"):
        get(server, tmp_path / "file.zip", "ok")
