"""JSON files as records: damage is told in one line with the file and its line, and what is intact stays."""

from __future__ import annotations

import json
import math
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from fairseq_rpe.core import files, records
from fairseq_rpe.core.errors import UserError
from fairseq_rpe.core.records import Count, Natural, Positive, Share, Unbounded

GOOD = '{"name": "a", "tokens": 7, "ppl": 2.5}\n'


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


def test_values_that_do_not_fit_together_are_refused() -> None:
    good = {"span": {"first": 1, "last": 2}}
    assert records.read(Outer, good, "f line 1", "the row") == Outer(Span(1, 2))
    said = told(records.read, Outer, {"span": {"first": 3, "last": 2}}, "f line 1", "the row")
    assert said == "f line 1: span of the row ends before it begins"


def told(call, *arguments) -> str:
    with pytest.raises(UserError) as caught:
        call(*arguments)
    assert caught.value.__cause__ is None and "\n" not in str(caught.value) and len(str(caught.value)) < 400
    return str(caught.value)


NO_ROW = {
    "binary": (b"\xff\xfe\0", "line 2 is not a JSON object (not UTF-8): delete that line or the file"),
    "zeros": (b"\0" * 40, "line 2 is not a JSON object (Expecting value at character 1)"),
    "cut": (b'{"name": "a", "tok', "line 2 is not a JSON object (Unterminated string starting at at character 15)"),
    "a list": (b"[1]", "line 2 is not a JSON object (it is a list)"),
    "a number": (b"7", "line 2 is not a JSON object (it is a single value)"),
    "an empty line": (b"", "line 2 is not a JSON object"),
    "nested lists": (b"[" * 200_000, "line 2 is not a JSON object (nested too deep)"),
    "nested tables": (b'{"a":' * 200_000, "line 2 is not a JSON object (nested too deep)"),
    "digits": (b'{"tokens": ' + b"9" * 5000 + b"}", "line 2 is not a JSON object (Exceeds the limit (4300 digits)"),
    "nothing of it": (b"{}", "line 2: the row lacks name: delete that line or the file"),
    "text": (b'{"ppl": "x"}', "line 2: ppl of the row must be a number above 0, not 'x': delete that line"),
    "NaN": (b'{"ppl": NaN}', "line 2: ppl of the row must be a number above 0, not nan"),
    "infinite": (b'{"ppl": Infinity}', "ppl of the row must be a number above 0, not inf"),
    "overflow": (b'{"ppl": 1e999}', "ppl of the row must be a number above 0, not inf"),
    "whole overflow": (b'{"ppl": 1' + b"0" * 400 + b"}", "ppl of the row must be a number above 0, not 10000"),
    "negative": (b'{"ppl": -2.5}', "ppl of the row must be a number above 0, not -2.5"),
    "infinite loss": (b'{"loss": -Infinity}', "loss of the row must be a number, not -inf"),
    "no loss": (b'{"loss": NaN}', "loss of the row must be a number, not nan"),
    "true": (b'{"loss": true}', "loss of the row must be a number, not True"),
    "a share": (b'{"share": 1.5}', "share of the row must be a number from 0 to 1, not 1.5"),
    "negative tokens": (b'{"tokens": -3}', "tokens of the row must be a whole number above 0, not -3"),
    "half tokens": (b'{"tokens": 3.5}', "tokens of the row must be a whole number above 0, not 3.5"),
    "many tokens": (b'{"tokens": 1' + b"0" * 400 + b"}", "tokens of the row must be a whole number above 0, not 1000"),
    "less than none": (b'{"right": -1}', "right of the row must be a whole number from 0 on, not -1"),
    "words": (b'{"words": NaN}', "words of the row must be a number above 0, not nan"),
    "a long text": (b'{"tokens": "' + b"x" * 999 + b'"}', "tokens of the row must be a whole number above 0, not 'xxx"),
    "a deep value": (b'{"name": ' + b"[" * 500 + b"]" * 500 + b"}", "name of the row must be text, not [["),
    "half a pair": (b'{"name": "\\ud800"}', "name of the row must be text without half a surrogate pair"),
    "half a name": (
        b'{"tags": {"\\ud800": []}}',
        "a name of tags of the row must be text without half a surrogate pair",
    ),
    "no table": (b'{"tags": [1]}', "tags of the row must be a table, not [1]"),
    "no list": (b'{"tags": {"a": 1}}', "a of tags of the row must be a list, not 1"),
}


@pytest.mark.parametrize("kind", NO_ROW)
def test_a_damaged_row_is_named_and_the_others_stay(kind: str, tmp_path: Path) -> None:
    path, (line, words) = tmp_path / "rows.jsonl", NO_ROW[kind]
    path.write_bytes(GOOD.encode() + line + b"\n" + GOOD.encode())
    assert words in (said := told(records.read_lines, Row, path, "the row")) and said.startswith(f"{path} line 2")
    before = path.read_bytes()
    files.append_json_line(path, {})
    assert path.read_bytes() == before + b"{}\n"


def test_rows_stay_as_they_were_written(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    assert files.read_json_lines(path) == [] == records.read_lines(Row, path, "the row")
    odd = '{"name":"\u2028", "tokens": 7, "ppl": 2, "words": Infinity, "later": NaN}'
    path.write_text(odd, encoding="utf-8")
    files.append_json_line(path, json.loads(GOOD))
    assert path.read_text(encoding="utf-8") == odd + "\n" + GOOD
    first, second = records.read_lines(Row, path, "the row")
    assert first == Row("\u2028", 7, 2.0, math.inf) and second == Row("a", 7, 2.5)
    assert [p.name for p in tmp_path.iterdir()] == ["rows.jsonl"]


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b"", " line 1 is not a JSON object (Expecting value at character 1): restore it or delete it"),
        (b'{\n"a": 1,\n  b\n}', " line 3 is not a JSON object (Expecting property name enclosed in double quotes at "),
        (b'{\n"a": "\xe9"\n}', " line 2 is not a JSON object (not UTF-8)"),
        (b"[" * 200_000, " line 1 is not a JSON object (nested too deep)"),
        (b"null", " line 1 is not a JSON object (it is a single value)"),
    ],
)
def test_a_damaged_file_is_named_with_its_line(content: bytes, words: str, tmp_path: Path) -> None:
    path = tmp_path / "a.json"
    assert told(files.read_json, path) == f"{path} does not exist"
    path.write_bytes(content)
    assert told(files.read_json, path).startswith(f"{path}{words}")


def test_what_a_user_wrote_needs_no_restoring() -> None:
    given = {"name": "a", "tokens": 7, "ppl": 2}
    assert records.read(Row, given, "F", "the row", strict=False).ppl == 2.0
    assert told(records.read, Row, given, "F", "the row") == "F: ppl of the row must be a number above 0, not 2"
    said = told(records.read, Row, {}, "F", "the row", False)
    assert said == "F: the row lacks name: restore it or delete it"
