"""Encoding processes that are killed, one of them while it hands over what it made."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path


def workers(parent: int) -> dict[int, tuple[str, str]]:
    """State of each encoding process, and what the kernel has it wait for, by its number."""
    found = {}
    for process in Path("/proc").glob("[0-9]*"):
        try:
            state, above = (process / "stat").read_text().rpartition(")")[2].split()[:2]
            if above == str(parent) and "multiprocessing-fork" in (process / "cmdline").read_text():
                found[int(process.name)] = state, (process / "wchan").read_text()
        except OSError:
            continue  # it has just ended
    return found


# Stops itself when the first chunk lies in the pipe, which it fits, and before any process has made anything of it.
PROGRAM = """
import os, signal, sys, time
from pathlib import Path
from fairseq_rpe.core.errors import UserError
from fairseq_rpe.data.stream import Piece, encode_chunks

def chunks():
    for number in range(4):
        if number == 2:
            time.sleep(0.1)
            os.kill(os.getpid(), signal.SIGSTOP)
        yield "train", [Piece("a\\n" * 29_000)]

if __name__ == "__main__":
    try:
        for _, (ids, _) in encode_chunks(chunks(), "words", Path(sys.argv[1]), workers=2):
            print(len(ids))
    except UserError as error:
        print(error)
"""


def test_one_that_is_killed_while_nobody_takes_its_results_is_told(corpus, tmp_path):
    """A result that does not fit a pipe: who is killed while it is half sent must not hold up all others."""
    folder = tmp_path / "made"
    folder.mkdir()
    shutil.copy(corpus / "dict.txt", folder)
    before = sorted(folder.iterdir())
    (tmp_path / "program.py").write_text(PROGRAM)
    command = [sys.executable, str(tmp_path / "program.py"), str(folder)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) as child:
        try:
            idle, end = 0, time.monotonic() + 60
            while idle < 20:  # until they have done all they can: one second of sleep
                assert child.poll() is None and time.monotonic() < end, child.communicate()[0]
                at = workers(child.pid)
                idle = idle + 1 if len(at) == 2 and all(state == "S" for state, _ in at.values()) else 0
                time.sleep(0.05)
            os.kill(max(at, key=lambda pid: "pipe_write" in at[pid][1]), signal.SIGKILL)
            child.send_signal(signal.SIGCONT)
            said = child.communicate(timeout=30)[0]
        finally:
            child.kill()
    made = "58001\n"
    told = "an encoding process was killed, perhaps for lack of memory: use fewer --workers\n"
    assert said in [made * times + told for times in range(4)]
    assert sorted(folder.iterdir()) == before
