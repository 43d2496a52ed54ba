"""What is seen of a training, and where the trainer's own words go."""

from __future__ import annotations

import io
import subprocess
import sys
from pathlib import Path

from fairseq_rpe.core import errors
from fairseq_rpe.runs import child_output, processes
from fairseq_rpe.runs.progress_view import ProgressView, TerminalProgressView

LINES = """\
2026-01-01 00:00:00 | INFO | fairseq_cli.train | {'_name': None}
2026-01-01 00:00:00 | INFO | fairseq_cli.train | num. shared model params: 550,400 (num. trained: 550,400)
2026-01-01 00:00:00 | INFO | fairseq_cli.train | training on 1 devices (GPUs/TPUs)
2026-01-01 00:00:00 | INFO | fairseq_cli.train | Start iterating over samples
x.py:43: UserWarning: deprecated
2026-01-01 00:00:01 | INFO | train_inner | {"loss": "7.25", "wps": "12345.6", "num_updates": "25"}
2026-01-01 00:00:02 | INFO | train_inner | {"loss": "6.5", "wps": "12345.6", "num_updates": "50"}
2026-01-01 00:00:03 | INFO | valid | {"valid_loss": "5.7154", "valid_ppl": "52.54", "valid_num_updates": "60"}
2026-01-01 00:00:03 | INFO | valid | {"valid_loss": "5.7154", "valid_exact": "12.5", "valid_num_updates": "60"}
2026-01-01 00:00:03 | INFO | train | {"train_loss": "6.8", "train_num_updates": "60"}
"""
SEEN = """\
training alibi, 550,400 parameters, 60 updates, into run
update 60: validation loss 5.715 bits per token, perplexity 52.54
update 60: validation loss 5.715 bits per token, 12.50 % exact
"""
PRINT = f"print({LINES!r}, end='')"


class Full(io.BytesIO):
    def write(self, _: object) -> int:
        raise OSError(28, "no space")


def relayed(script: str, log: io.BytesIO, view: ProgressView | None = None, code: int = 0) -> child_output.ChildExit:
    child = processes.spawn([sys.executable, "-c", script], {}, subprocess.PIPE)
    relay = child_output.OutputRelay(child, log, view or TerminalProgressView("alibi", Path("run"), 60, 0))
    assert processes.wait(child) == code
    return relay.finish(code)


def test_only_what_a_user_waits_for_is_seen_and_the_log_has_all(capsys):
    log = io.BytesIO()
    assert relayed(PRINT, log) == child_output.ChildExit(0, "", True)
    told = capsys.readouterr()
    assert log.getvalue().decode() == LINES and told.out == SEEN
    first, last = told.err.splitlines()
    assert first.startswith("alibi: 25 of 60 updates, loss 7.250, 12,346 tokens/s, 0:0")
    assert last == "alibi: 60 of 60 updates, loss 6.500, 12,346 tokens/s"


def test_a_run_that_goes_on_says_from_where(capsys):
    relayed(f"print({LINES.splitlines()[1]!r})", io.BytesIO(), TerminalProgressView("alibi", Path("run"), 1200, 1000))
    assert capsys.readouterr().out.endswith(" 1,200 updates, 1,000 of them done, into run\n")


def test_of_a_further_node_nothing_is_seen(capsys):
    log = io.BytesIO()
    assert relayed(PRINT, log, ProgressView()).began_training
    assert log.getvalue().decode() == LINES and capsys.readouterr() == ("", "")


def test_of_a_failure_the_reason_is_told_and_the_log_has_the_traceback(capsys, monkeypatch):
    monkeypatch.delenv(errors.DEBUG_VARIABLE, raising=False)
    log = io.BytesIO()
    ending = relayed("raise ValueError('bad shape')", log, code=1)
    assert ending.reason == "fairseq-train failed: ValueError: bad shape; run again with --debug for the traceback"
    assert b"Traceback" in log.getvalue() and capsys.readouterr() == ("", "")


def test_a_log_that_can_take_no_more_does_not_stop_the_training(capsys):
    assert relayed(PRINT, Full()).code == 0
    told = capsys.readouterr()
    assert told.out == SEEN and told.err.count("the log cannot be written (No space left on device)") == 1
