"""benchmarks/kill_sweep.py with commands of a second: what it kills, compares and says, and that it goes on."""

from __future__ import annotations

import argparse
import importlib
import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

FOLDER = Path(__file__).resolve().parents[2] / "benchmarks"
# A command that goes on where it was killed, with a child, and is done after five steps.
STEPS = """
import subprocess, sys, time
from pathlib import Path
folder, wrong = Path(sys.argv[1]), sys.argv[2] == "wrong"
folder.mkdir(parents=True, exist_ok=True)
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(0.4)"])
done = folder / "steps"
for step in range(len(done.read_text()) if done.exists() else 0, 5):
    done.write_text("x" * (step + 1))
    time.sleep(0.05)
code = child.wait()
if wrong and (folder / "again").exists():
    done.write_text("other")
(folder / "again").touch()
sys.exit(code != 0)
"""


pytestmark = pytest.mark.release


@pytest.fixture
def script(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.syspath_prepend(str(FOLDER))
    return importlib.import_module("kill_sweep")


def call(script, monkeypatch: pytest.MonkeyPatch, out: Path, *flags: str, kind: str = "right") -> int:
    def command(folder: Path) -> list[str]:
        return [sys.executable, "-S", "-c", STEPS, str(folder), kind]

    def made(folder: Path) -> dict[str, str]:
        return {"steps": (folder / "steps").read_text() if (folder / "steps").exists() else ""}

    job = script.Job("steps", command, lambda folder: made(folder)["steps"], made, share=1.0, latest_kill=0.6)
    monkeypatch.setattr(script, "jobs", lambda args: [job])
    monkeypatch.setattr(sys, "argv", ["kill_sweep.py", "data", "--out", str(out), *flags])
    return script.main()


def test_kills_are_counted_compared_and_not_done_again(script, tmp_path, monkeypatch, capsys):
    out = tmp_path / "kills"
    assert call(script, monkeypatch, out, "--kills", "4") == 0
    first = capsys.readouterr().out
    assert first.count("kill ") >= 4 and "steps came to its end: as undisturbed" in first
    assert "4 kills, 0 faults" in first and "4 kills (" in first
    assert call(script, monkeypatch, out, "--kills", "6") == 0
    again = capsys.readouterr().out
    assert "kill 5 of 6: steps" in again and "kill 4 of" not in again and "undisturbed, at work" not in again
    rows = [json.loads(line) for line in (out / "kills.jsonl").read_text().splitlines()]
    assert [row["event"] for row in rows].count("kill") == 6 and any(row["hit"] for row in rows if "hit" in row)
    with pytest.raises(SystemExit) as caught:
        call(script, monkeypatch, out, "--seed", "2")
    assert caught.value.code == 2 and "kills of other settings" in capsys.readouterr().err


def test_what_differs_is_told(script, tmp_path, monkeypatch, capsys):
    settings = {"data": "data", "only": "None", "updates": "60", "lengths": "64,256", "seed": "1"}
    (tmp_path / "out/steps/killed").mkdir(parents=True)
    (tmp_path / "out/settings.json").write_text(json.dumps(settings))
    (tmp_path / "out/steps/killed/again").touch()
    with pytest.raises(SystemExit, match=r"steps: steps differs; kept: "):
        call(script, monkeypatch, tmp_path / "out", "--kills", "20", kind="wrong")
    assert "NOT as undisturbed; steps differs" in capsys.readouterr().out


def test_victims_are_the_whole_family(script):
    inner = "import subprocess, sys; subprocess.run([sys.executable, '-S', '-c', 'input()'], stdin=sys.stdin)"
    child = subprocess.Popen([sys.executable, "-S", "-c", inner], stdin=subprocess.PIPE)
    try:
        for _ in range(200):
            if len(found := script.family(child.pid)) == 2:
                break
            script.time.sleep(0.02)
        assert found[0] == child.pid and len(found) == 2 and all(map(script.is_running, found))
    finally:
        child.communicate(b"\n")
    assert not any(map(script.is_running, found))


def test_the_real_commands_name_what_they_make(script, tmp_path):
    args = argparse.Namespace(data=tmp_path, updates=60, lengths="64,256", only=None)
    sweep, prepare = script.jobs(args)
    words = sweep.command(tmp_path / "x")
    assert words[words.index("sweep") + 1] == str(tmp_path)
    nothing = [job.progress(tmp_path / "x") for job in (sweep, prepare)]
    (tmp_path / "x/runs/a").mkdir(parents=True)
    (tmp_path / "x/runs/a/train.log").write_text("t | INFO | train_inner | {}\n")
    (tmp_path / ".x.prepare-7").mkdir()
    assert all(job.progress(tmp_path / "x") != before for job, before in zip((sweep, prepare), nothing, strict=True))
    shutil.rmtree(tmp_path / "x/runs")
    (tmp_path / "x" / "a").write_text("1")
    assert list(prepare.summarise(tmp_path / "x")) == ["a"] and prepare.summarise(tmp_path / "y") == {}
