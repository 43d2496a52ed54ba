"""``fairseq-rpe bench``: what is timed, what is refused, what is written."""

from __future__ import annotations

import csv

import pytest

from fairseq_rpe.analysis import speed
from fairseq_rpe.attention import BACKENDS
from fairseq_rpe.cli.main import main

SMALL = ["--heads", "2", "--width", "32", "--repeats", "1", "--device", "cpu"]


def rows_of(folder):
    text = (folder / "bench.csv").read_text()
    head, _, table = text.partition("\n")
    return head, list(csv.DictReader(table.splitlines()))


def test_every_encoding_and_backend_at_every_length(tmp_path, capsys):
    names = ["--backends", "reference sdpa", "--encodings", "nope, alibi fire"]
    assert main(["bench", "--lengths", "17,32", *names, *SMALL, "--out", str(tmp_path)]) == 0
    said = capsys.readouterr().out
    head, rows = rows_of(tmp_path)
    assert "2 heads of 32" in head and "medians of 1" in head
    cells = {(r["encoding"], r["backend"], r["pass"], r["length"]) for r in rows}
    expected = {(e, b) for e in ("nope", "alibi", "fire") for b in ("reference", "sdpa")} | {(speed.LIMIT, "sdpa")}
    assert cells == {(*key, kind, n) for key in expected for kind in ("forward", "training") for n in ("17", "32")}
    for row in rows:
        limit = next(
            r
            for r in rows
            if r["encoding"] == speed.LIMIT and r["pass"] == row["pass"] and r["length"] == row["length"]
        )
        assert 0 < float(row["least_ms"]) <= float(row["milliseconds"]) <= float(row["most_ms"])
        assert float(row["ratio"]) == pytest.approx(float(row["milliseconds"]) / float(limit["milliseconds"]), rel=0.1)
    assert (tmp_path / "bench.md").read_text().strip() in said and "no bias, milliseconds" in said
    assert (tmp_path / "bench.png").read_bytes().startswith(b"\x89PNG")
    assert sorted(p.name for p in tmp_path.iterdir()) == ["bench.csv", "bench.md", "bench.png"]


def test_turns_alternate():
    seen = []
    ways = {name: lambda name=name: seen.append(name) for name in ("a", "b")}
    times = speed.in_turns(ways, 3, "cpu")
    assert set(times) == {"a", "b"} and all(len(of) == 3 for of in times.values())
    assert seen == ["a", "b"] * 3


def test_the_spread_stands_beside_the_median():
    limit = speed.Timing(speed.LIMIT, "sdpa", "forward", 64, milliseconds=2.0, ratio=1.0, least=1.5, most=4.0)
    alibi = speed.Timing("alibi", "sdpa", "forward", 64, milliseconds=3.0, ratio=1.5, least=2.0, most=5.0)
    [table] = speed.tables([limit, alibi])
    assert [row.cells[0].text for row in table.rows] == ["2.00 (1.50 to 4.00)", "1.50 (1.00 to 2.50)"]


def test_what_does_not_fit_is_named_and_left_out(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(speed, "DENSE_COPIES", 1 << 50)
    names = ["--backends", "reference sdpa", "--encodings", "alibi", "--passes", "forward"]
    assert main(["bench", "--lengths", "16", *names, *SMALL, "--out", str(tmp_path)]) == 0
    assert "left out, reference at 16 tokens: needs about" in capsys.readouterr().err
    assert [r["backend"] for r in rows_of(tmp_path)[1]] == ["sdpa", "sdpa"]


def test_what_a_backend_refuses_is_named_and_left_out(capsys, monkeypatch):
    from fairseq_rpe.core import UserError

    def refuses(*_):
        raise UserError("not today: use sdpa")

    monkeypatch.setitem(BACKENDS, "sometimes", refuses)
    names = ["--encodings", "alibi kerple_log", "--passes", "forward", "--backends", "sdpa sometimes flex"]
    assert main(["bench", "--lengths", "16,17", *names, *SMALL]) == 0
    said = capsys.readouterr()
    assert said.err.count("left out, sometimes: not today: use sdpa") == 1 and "alibi, sdpa" in said.out
    assert "sometimes" not in said.out and "kerple_log, flex" in said.out


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (["--backends", "sdpb"], "unknown 'sdpb'; known: reference, sdpa, flex, triton"),
        (["--encodings", "rope"], "'rope' has no bias"),
        (["--encodings", "alibbi"], "did you mean 'alibi'"),
        (["--encodings", ""], "at least one"),
        (["--out", __file__], "is a file"),
    ],
)
def test_bad_input(flags, words, capsys):
    assert main(["bench", "--lengths", "16", *SMALL, *flags]) == 2
    error = capsys.readouterr().err
    assert words in error and len(error.splitlines()) == 1
