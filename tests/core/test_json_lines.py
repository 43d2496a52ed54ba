"""JSON-lines files: rows appended by several processes, after kills, on full disks; damage is told with its line."""

from __future__ import annotations

import errno
import fcntl
import json
import math
import os
import subprocess
import sys
from dataclasses import dataclass, field
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from refusal import refused

from fairseq_rpe.core.errors import UserError
from fairseq_rpe.utils import json_files, records
from fairseq_rpe.utils.records import Count, Natural, Positive, Share, Unbounded

GOOD = '{"name": "a", "tokens": 7, "ppl": 2.5}\n'
steady = settings(max_examples=80, deadline=None, derandomize=True)
APPEND = """
import pathlib, sys
from fairseq_rpe.utils.json_files import append_json_line
for number in range(50):
    append_json_line(pathlib.Path(sys.argv[1]), {"writer": sys.argv[2], "number": number, "filler": "x" * 300})
"""


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "rows.jsonl"


def test_no_row_is_lost_where_several_processes_append(path):
    writers = [subprocess.Popen([sys.executable, "-c", APPEND, path, name]) for name in "abc"]
    assert [writer.wait() for writer in writers] == [0, 0, 0]
    rows = json_files.read_json_lines(path)
    for name in "abc":
        assert [row["number"] for row in rows if row["writer"] == name] == list(range(50))
    assert len(rows) == 150


VALUES = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**70), 2**70) | st.floats(allow_nan=False) | st.text(max_size=5),
    lambda parts: st.lists(parts, max_size=3) | st.dictionaries(st.text(max_size=3), parts, max_size=3),
    max_leaves=5,
)
ROWS = st.lists(st.dictionaries(st.text(max_size=5), VALUES, max_size=3), min_size=1, max_size=4)


@steady
@given(ROWS, st.data())
def test_rows_survive_a_cut_at_any_byte(tmp_path_factory, rows, data):
    """A kill leaves the beginning of a file, or zeros where bytes were not written yet; complete rows stay."""
    path = tmp_path_factory.mktemp("cut") / "rows.jsonl"
    for row in rows:
        json_files.append_json_line(path, row)
    whole = path.read_bytes()
    assert json_files.read_json_lines(path) == rows
    at = data.draw(st.integers(0, len(whole)))
    begun = whole[:at].rpartition(b"\n")[2]
    zeros = b"\0" * data.draw(st.integers(0, 9))
    path.write_bytes(whole[:at] + zeros)
    ended = begun and whole[at : at + 1] == b"\n" and not zeros  # only its newline is missing
    complete = rows[: whole[:at].count(b"\n") + bool(ended)]
    assert json_files.read_json_lines(path) == complete
    json_files.append_json_line(path, {"a": 2})
    assert json_files.read_json_lines(path) == [*complete, {"a": 2}]
    assert path.read_bytes().endswith(b'{"a": 2}\n')


def test_an_unfinished_row_longer_than_a_block_is_cut_off(path):
    for unfinished in (b'{"b": "' + b"x" * 20_000, b"\0" * 9, b'{"a": \0\0'):
        path.write_bytes(b'{"a": 1}\n' + unfinished)
        assert json_files.read_json_lines(path) == [{"a": 1}]
        json_files.append_json_line(path, {"a": 2})
        assert path.read_bytes() == b'{"a": 1}\n{"a": 2}\n'


@pytest.mark.parametrize("text", ["a, b, c", "[1]", "</html>", "}"])
def test_a_last_line_that_is_no_row_is_refused_and_stays(text, path):
    path.write_text(f'{{"a": 1}}\n{text}')
    with refused("rows.jsonl line 2 is not a JSON object .*delete that line"):
        json_files.append_json_line(path, {})
    assert path.read_text() == f'{{"a": 1}}\n{text}'


def test_the_work_for_a_row_does_not_grow_with_the_file(path, monkeypatch):
    moved: list[int] = []
    read, write = os.pread, os.write

    def work(rows: int) -> int:
        path.write_text('{"a": "a row of thirty bytes"}\n' * rows)
        with monkeypatch.context() as patched:
            patched.setattr(os, "pread", lambda handle, count, at: moved.append(count) or read(handle, count, at))
            patched.setattr(os, "write", lambda handle, data: moved.append(len(data)) or write(handle, data))
            patched.setattr(Path, "read_bytes", lambda path: pytest.fail("the whole file is read"))
            moved.clear()
            json_files.append_json_line(path, {"a": 1})
        assert path.read_bytes().count(b"\n") == rows + 1
        return sum(moved)

    assert work(1000) == work(100_000) <= 5000


def test_a_row_is_on_the_disk_before_the_next_work_begins(path, monkeypatch):
    seen: list[int] = []
    monkeypatch.setattr(os, "fsync", lambda handle: seen.append(os.fstat(handle).st_size))
    json_files.append_json_line(path, {"a": 1})
    assert seen == [len(json.dumps({"a": 1})) + 1]


def test_a_full_disk_leaves_the_file_as_it_was_and_is_named(path, monkeypatch):
    write = os.write
    path.write_text('{"a": 1}')

    def full(handle: int, data: bytes) -> int:
        if len(data) < 6:
            raise OSError(errno.ENOSPC, "no space")
        return write(handle, data[:5])

    monkeypatch.setattr(os, "write", full)
    with pytest.raises(OSError) as caught:
        json_files.append_json_line(path, {"a": 2})
    assert caught.value.filename == str(path) and path.read_text() == '{"a": 1}'
    with pytest.raises(OSError):
        json_files.append_json_line(path.with_name("new.jsonl"), {"a": 2})
    assert list(path.parent.iterdir()) == [path]


def test_a_file_that_is_replaced_while_it_is_waited_for_gets_the_row(path, monkeypatch):
    other, lock = path.with_name("other"), fcntl.flock
    path.write_text('{"a": 1}\n')
    other.write_text('{"b": 1}\n')

    def replaced(handle: int, kind: int) -> None:
        lock(handle, kind)
        if other.exists():
            other.replace(path)

    monkeypatch.setattr(fcntl, "flock", replaced)
    json_files.append_json_line(path, {"b": 2})
    assert json_files.read_json_lines(path) == [{"b": 1}, {"b": 2}]


@dataclass(frozen=True)
class Row:
    name: str
    tokens: Count
    ppl: Positive
    words: Unbounded | None = None
    share: Share = 0.5
    right: Natural = 0
    loss: float = 0.0
    tags: dict[str, tuple[int, ...]] = field(default_factory=dict)


@dataclass(frozen=True)
class Span:
    first: int
    last: int

    def fault(self) -> str | None:
        return "ends before it begins" if self.last < self.first else None


@dataclass(frozen=True)
class Outer:
    span: Span | None = None


def error_of(call, *arguments) -> str:
    with pytest.raises(UserError) as caught:
        call(*arguments)
    assert caught.value.__cause__ is None and "\n" not in str(caught.value) and len(str(caught.value)) < 400
    return str(caught.value)


def test_values_that_do_not_fit_together_are_refused() -> None:
    good = {"span": {"first": 1, "last": 2}}
    assert records.read_record(Outer, good, "f line 1", "the row") == Outer(Span(1, 2))
    said = error_of(records.read_record, Outer, {"span": {"first": 3, "last": 2}}, "f line 1", "the row")
    assert said == "f line 1: span of the row ends before it begins"


TEXTS = st.text(st.characters(exclude_categories=["Cs"]), max_size=5)
RECORDS = st.builds(
    Row,
    name=TEXTS,
    tokens=st.integers(1, 2**53),
    ppl=st.floats(0, 1e300, exclude_min=True),
    words=st.none() | st.floats(1, allow_nan=False),
    share=st.floats(0, 1),
    right=st.integers(0, 2**53),
    loss=st.floats(allow_nan=False, allow_infinity=False),
    tags=st.dictionaries(TEXTS, st.lists(st.integers(-9, 9), max_size=3).map(tuple), max_size=2),
)


@steady
@given(RECORDS)
def test_records_round_trip(row: Row) -> None:
    assert records.read_record(Row, json.loads(json.dumps(records.to_dict(row))), "f", "the row") == row


# a line, and what the error says of it
NO_ROW = [
    (b"\xff\xfe\0", "is not a JSON object (not UTF-8): delete that line or the file"),
    (b"\0" * 40, "is not a JSON object (Expecting value at character 1)"),
    (b'{"name": "a", "tok', "is not a JSON object (Unterminated string starting at at character 15)"),
    (b"[1]", "is not a JSON object (it is a list)"),
    (b"7", "is not a JSON object (it is a single value)"),
    (b"", "line 2 is not a JSON object"),
    (b"[" * 200_000, "is not a JSON object (nested too deep)"),
    (b'{"a":' * 200_000, "is not a JSON object (nested too deep)"),
    (b'{"tokens": ' + b"9" * 5000 + b"}", "is not a JSON object (Exceeds the limit (4300 digits)"),
    (b"{}", "the row lacks name: delete that line or the file"),
    (b'{"ppl": "x"}', "ppl of the row must be a number above 0, not 'x': delete that line"),
    (b'{"ppl": NaN}', "ppl of the row must be a number above 0, not nan"),
    (b'{"ppl": Infinity}', "ppl of the row must be a number above 0, not inf"),
    (b'{"ppl": 1e999}', "ppl of the row must be a number above 0, not inf"),
    (b'{"ppl": 1' + b"0" * 400 + b"}", "ppl of the row must be a number above 0, not 10000"),
    (b'{"ppl": -2.5}', "ppl of the row must be a number above 0, not -2.5"),
    (b'{"loss": -Infinity}', "loss of the row must be a number, not -inf"),
    (b'{"loss": NaN}', "loss of the row must be a number, not nan"),
    (b'{"loss": true}', "loss of the row must be a number, not True"),
    (b'{"share": 1.5}', "share of the row must be a number from 0 to 1, not 1.5"),
    (b'{"tokens": -3}', "tokens of the row must be a whole number above 0, not -3"),
    (b'{"tokens": 3.5}', "tokens of the row must be a whole number above 0, not 3.5"),
    (b'{"tokens": 1' + b"0" * 400 + b"}", "tokens of the row must be a whole number above 0, not 1000"),
    (b'{"right": -1}', "right of the row must be a whole number from 0 on, not -1"),
    (b'{"words": NaN}', "words of the row must be a number of at least 1, not nan"),
    (b'{"tokens": "' + b"x" * 999 + b'"}', "tokens of the row must be a whole number above 0, not 'xxx"),
    (b'{"name": ' + b"[" * 500 + b"]" * 500 + b"}", "name of the row must be text, not [["),
    (b'{"name": "\\ud800"}', "name of the row must be text without half a surrogate pair"),
    (b'{"tags": {"\\ud800": []}}', "a name of tags of the row must be text without half a surrogate pair"),
    (b'{"tags": [1]}', "tags of the row must be a table, not [1]"),
    (b'{"tags": {"a": 1}}', "a of tags of the row must be a list, not 1"),
]


@pytest.mark.parametrize(("line", "words"), NO_ROW, ids=range(len(NO_ROW)))
def test_a_damaged_row_is_named_and_the_others_stay(line: bytes, words: str, path: Path) -> None:
    path.write_bytes(GOOD.encode() + line + b"\n" + GOOD.encode())
    message = error_of(records.read_records, Row, path, "the row")
    assert words in message and message.startswith(f"{path} line 2")
    before = path.read_bytes()
    json_files.append_json_line(path, {})
    assert path.read_bytes() == before + b"{}\n"


def test_rows_stay_as_they_were_written(path: Path) -> None:
    assert json_files.read_json_lines(path) == [] == records.read_records(Row, path, "the row")
    odd = '{"name":"\u2028", "tokens": 7, "ppl": 2, "words": Infinity, "later": NaN}'
    path.write_text(odd, encoding="utf-8")
    json_files.append_json_line(path, json.loads(GOOD))
    assert path.read_text(encoding="utf-8") == odd + "\n" + GOOD
    assert records.read_records(Row, path, "the row") == [Row("\u2028", 7, 2.0, math.inf), Row("a", 7, 2.5)]
    assert [*path.parent.iterdir()] == [path]


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b"", "line 1 is not a JSON object (Expecting value at character 1): restore it or delete it"),
        (b'{\n"a": 1,\n  b\n}', "line 3 is not a JSON object (Expecting property name enclosed in double quotes at "),
        (b'{\n"a": "\xe9"\n}', "line 2 is not a JSON object (not UTF-8)"),
        (b"[" * 200_000, "line 1 is not a JSON object (nested too deep)"),
        (b"null", "line 1 is not a JSON object (it is a single value)"),
    ],
    ids=range(5),
)
def test_a_damaged_file_is_named_with_its_line(content: bytes, words: str, path: Path) -> None:
    assert error_of(json_files.read_json, path) == f"{path} does not exist"
    path.write_bytes(content)
    assert error_of(json_files.read_json, path).startswith(f"{path} {words}")


def test_what_a_user_wrote_needs_no_restoring() -> None:
    given = {"name": "a", "tokens": 7, "ppl": 2}
    assert records.read_record(Row, given, "F", "the row", strict=False).ppl == 2.0
    assert (
        error_of(records.read_record, Row, given, "F", "the row") == "F: ppl of the row must be a number above 0, not 2"
    )
    said = error_of(records.read_record, Row, {}, "F", "the row", False)
    assert said == "F: the row lacks name: restore it or delete it"


@dataclass(frozen=True)
class Lists:
    upto: tuple[Natural, ...]
    loss: tuple[float, ...] = ()


def test_lists_of_numbers_are_checked_without_reading_annotations_for_each(monkeypatch: pytest.MonkeyPatch) -> None:
    assert records.read_record(Lists, {"upto": [1], "loss": [1, 2.5]}, "f", "the row", strict=False).loss == (1.0, 2.5)
    for wrong in ([1, -1], [1, True], [0, 1.0], ["1"], [None], "12", 1):
        assert "f: upto of the row must be " in error_of(records.read_record, Lists, {"upto": wrong}, "f", "the row")
    assert "f: loss of the row" in error_of(
        records.read_record, Lists, {"upto": [], "loss": [math.nan]}, "f", "the row"
    )
    monkeypatch.delattr(records._TableReader, "_convert")  # which takes most of the time of a file of 200,000 results
    assert records.read_record(Lists, {"upto": [1, 2], "loss": [0.5]}, "f", "the row") == Lists((1, 2), (0.5,))
