"""Progress: nothing in the first minute, then a line a minute; a bar on a terminal."""

from __future__ import annotations

import io
import sys

import pytest

from fairseq_rpe.utils import progress
from fairseq_rpe.utils.progress import Progress


@pytest.fixture
def clock(monkeypatch) -> list[float]:
    now = [1000.0]
    monkeypatch.setattr(progress.time, "monotonic", lambda: now[0])
    return now


def test_a_line_a_minute_and_none_in_the_first(clock, capsys):
    with Progress("length 64", "tokens", 4000) as bar:
        bar.update(500)
        clock[0] += 59
        bar.update(500)
        assert capsys.readouterr() == ("", "")
        clock[0] += 1
        bar.refresh()
        assert capsys.readouterr().err == "length 64: 1,000 of 4,000 tokens, 3:00 left\n"
        bar.update(500)
        clock[0] += 60
        bar.update_to(3000, "loss 2")
        assert capsys.readouterr().err == "length 64: 3,000 of 4,000 tokens, loss 2, 0:40 left\n"
        bar.update(1000)
    assert capsys.readouterr() == ("", "")


def test_a_first_and_a_last_line_where_they_are_wanted(clock, capsys):
    with Progress("alibi", "updates", 400, done=100, ends=True) as bar:
        clock[0] += 30
        bar.start_timing()
        clock[0] += 10
        bar.update_to(125, "loss 7.000")
        bar.update_to(150, "loss 6.000")
        bar.write("between")
        bar.update_to(400)
    first, last = "alibi: 125 of 400 updates, loss 7.000, 1:50 left\n", "alibi: 400 of 400 updates, loss 6.000\n"
    assert capsys.readouterr() == ("between\n", first + last)
    with Progress("alibi", "updates", 400, done=100, ends=True):
        pass
    assert capsys.readouterr() == ("", "")


def test_what_has_no_known_end_or_no_news_yet(clock, capsys):
    with Progress("length 8", "tokens") as bar:
        bar.update(10)
        clock[0] += 3700
        bar.refresh()
    with Progress("t5_bias", "updates", 9, ends=True) as bar:
        clock[0] += 61
        bar.refresh()
    told = ["length 8: 10 tokens, 1:01:40 so far", "t5_bias: 0 of 9 updates, 1:01 so far"]
    assert capsys.readouterr().err.splitlines() == told


def test_a_bar_on_a_terminal(monkeypatch, capsys):
    terminal = io.StringIO()
    terminal.isatty = lambda: True  # type: ignore[method-assign]
    monkeypatch.setattr(sys, "stderr", terminal)
    with Progress("rope:scaling=yarn,factor=auto,original_length=64", "updates", 40, ends=True) as bar:
        bar.update_to(10, "loss 3.000")
        bar.write("halfway")
        bar.update(30)
        bar.refresh()
    with Progress("sweep", "%", 100, done=0.1, ends=True) as bar:
        bar.update_to(0.2)
        bar.update_to(0.3)
        bar.refresh()
    shown = terminal.getvalue()
    assert all(part in shown for part in ("40/40", "loss 3.000]", "\r", " 0.3/100 "))
    assert "original_length=64" not in shown and capsys.readouterr().out == "halfway\n"
