"""Rows appended to JSON-lines files: by several processes, after kills, on full disks, however long the file is."""

from __future__ import annotations

import errno
import fcntl
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fairseq_rpe.core import files
from fairseq_rpe.core.errors import UserError

APPEND = """
import pathlib, sys
from fairseq_rpe.core.files import append_json_line
for number in range(50):
    append_json_line(pathlib.Path(sys.argv[1]), {"writer": sys.argv[2], "number": number, "filler": "x" * 300})
"""


def test_no_row_is_lost_where_several_processes_append(tmp_path):
    path = tmp_path / "rows.jsonl"
    writers = [subprocess.Popen([sys.executable, "-c", APPEND, path, name]) for name in "abc"]
    assert [writer.wait() for writer in writers] == [0, 0, 0]
    rows = files.read_json_lines(path)
    for name in "abc":
        assert [row["number"] for row in rows if row["writer"] == name] == list(range(50))
    assert len(rows) == 150


VALUES = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**70), 2**70) | st.floats(allow_nan=False) | st.text(max_size=5),
    lambda parts: st.lists(parts, max_size=3) | st.dictionaries(st.text(max_size=3), parts, max_size=3),
    max_leaves=5,
)
ROWS = st.lists(st.dictionaries(st.text(max_size=5), VALUES, max_size=3), min_size=1, max_size=4)


@settings(max_examples=80, deadline=None, derandomize=True)
@given(ROWS, st.data())
def test_rows_survive_a_cut_at_any_byte(tmp_path_factory, rows, data):
    """A kill leaves the beginning of a file, or zeros where bytes were not written yet; complete rows stay."""
    path = tmp_path_factory.mktemp("cut") / "rows.jsonl"
    for row in rows:
        files.append_json_line(path, row)
    whole = path.read_bytes()
    assert files.read_json_lines(path) == rows
    at = data.draw(st.integers(0, len(whole)))
    begun = whole[:at].rpartition(b"\n")[2]
    zeros = b"\0" * data.draw(st.integers(0, 9))
    path.write_bytes(whole[:at] + zeros)
    ended = begun and whole[at : at + 1] == b"\n" and not zeros  # only its newline is missing
    complete = rows[: whole[:at].count(b"\n") + bool(ended)]
    assert files.read_json_lines(path) == complete
    files.append_json_line(path, {"a": 2})
    assert files.read_json_lines(path) == [*complete, {"a": 2}]
    assert path.read_bytes().endswith(b'{"a": 2}\n')


def test_an_unfinished_row_longer_than_a_block_is_cut_off(tmp_path):
    path = tmp_path / "rows.jsonl"
    for unfinished in (b'{"b": "' + b"x" * 20_000, b"\0" * 9, b'{"a": \0\0'):
        path.write_bytes(b'{"a": 1}\n' + unfinished)
        assert files.read_json_lines(path) == [{"a": 1}]
        files.append_json_line(path, {"a": 2})
        assert path.read_bytes() == b'{"a": 1}\n{"a": 2}\n'


@pytest.mark.parametrize("text", ["a, b, c", "[1]", "</html>", "}"])
def test_a_last_line_that_is_no_row_is_refused_and_stays(text, tmp_path):
    path = tmp_path / "notes"
    path.write_text(f'{{"a": 1}}\n{text}')
    with pytest.raises(UserError, match="notes line 2 is not a JSON object .*delete that line"):
        files.append_json_line(path, {})
    assert path.read_text() == f'{{"a": 1}}\n{text}'


def test_the_work_for_a_row_does_not_grow_with_the_file(tmp_path, monkeypatch):
    moved: list[int] = []
    read, write = os.pread, os.write

    def work(rows: int) -> int:
        path = tmp_path / f"{rows}.jsonl"
        path.write_text('{"a": "a row of thirty bytes"}\n' * rows)
        with monkeypatch.context() as patched:
            patched.setattr(os, "pread", lambda handle, count, at: moved.append(count) or read(handle, count, at))
            patched.setattr(os, "write", lambda handle, data: moved.append(len(data)) or write(handle, data))
            patched.setattr(Path, "read_bytes", lambda path: pytest.fail("the whole file is read"))
            moved.clear()
            files.append_json_line(path, {"a": 1})
        assert path.read_bytes().count(b"\n") == rows + 1
        return sum(moved)

    assert work(1000) == work(100_000) <= 5000


def test_a_row_is_on_the_disk_before_the_next_work_begins(tmp_path, monkeypatch):
    path, seen = tmp_path / "rows.jsonl", []
    monkeypatch.setattr(os, "fsync", lambda handle: seen.append(os.fstat(handle).st_size))
    files.append_json_line(path, {"a": 1})
    assert seen == [len(json.dumps({"a": 1})) + 1]


def test_a_full_disk_leaves_the_file_as_it_was_and_is_named(tmp_path, monkeypatch):
    path, write = tmp_path / "rows.jsonl", os.write
    path.write_text('{"a": 1}')

    def full(handle: int, data: bytes) -> int:
        if len(data) < 6:
            raise OSError(errno.ENOSPC, "no space")
        return write(handle, data[:5])

    monkeypatch.setattr(os, "write", full)
    with pytest.raises(OSError) as caught:
        files.append_json_line(path, {"a": 2})
    assert caught.value.filename == str(path) and path.read_text() == '{"a": 1}'
    with pytest.raises(OSError):
        files.append_json_line(tmp_path / "new.jsonl", {"a": 2})
    assert list(tmp_path.iterdir()) == [path]


def test_a_file_that_is_replaced_while_it_is_waited_for_gets_the_row(tmp_path, monkeypatch):
    path, other, lock = tmp_path / "rows.jsonl", tmp_path / "other", fcntl.flock
    path.write_text('{"a": 1}\n')
    other.write_text('{"b": 1}\n')

    def replaced(handle: int, kind: int) -> None:
        lock(handle, kind)
        if other.exists():
            other.replace(path)

    monkeypatch.setattr(fcntl, "flock", replaced)
    files.append_json_line(path, {"b": 2})
    assert files.read_json_lines(path) == [{"b": 1}, {"b": 2}]
