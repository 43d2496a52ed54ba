"""Kill a sweep (SIGKILL) at random moments and compare its table with that of one that nobody killed.

    python benchmarks/kill_sweep.py data-bin/stdlib --kills 10 --out runs/kills

Each kill takes either the sweep's own process or one of its trainings or evaluations, at random. The same command is
then given again. Exit code 1 if a number differs.
"""

from __future__ import annotations

import argparse
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

ENCODINGS = "sinusoidal kerple_log"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("data", type=Path, help="binarised data folder")
    parser.add_argument("--kills", type=int, default=10)
    parser.add_argument("--updates", type=int, default=150)
    parser.add_argument("--lengths", default="64,256")
    parser.add_argument("--seed", type=int, default=1, help="of the moments and victims")
    parser.add_argument("--out", type=Path, default=Path("runs/kills"))
    args = parser.parse_args()
    if args.out.exists():
        parser.error(f"{args.out} exists: name another --out")

    start = time.monotonic()
    if subprocess.run(command(args, "whole"), stdout=subprocess.DEVNULL, check=False).returncode:
        sys.exit("the sweep that nobody killed failed")
    whole = time.monotonic() - start
    print(f"whole: {whole:.0f} s")
    draw, done = random.Random(args.seed), 0
    while done < args.kills:
        sweep = subprocess.Popen(command(args, "killed"), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        time.sleep(draw.uniform(0.1, 0.5) * whole)
        if sweep.poll() == 0:
            print(f"finished after {done} kills")
            break
        victims = [sweep.pid, *below(sweep.pid)]
        victim = draw.choice(victims)
        os.kill(victim, signal.SIGKILL)
        done += 1
        print(f"kill {done}: {'the sweep' if victim == sweep.pid else 'one of its runs'}", flush=True)
        # without one of its runs a sweep goes on with the others; it is to be stopped as well
        time.sleep(1)
        sweep.kill()
        sweep.wait()
    if subprocess.run(command(args, "killed"), stdout=subprocess.DEVNULL, check=False).returncode:
        sys.exit("the killed sweep did not finish")
    tables = [(args.out / name / "results.csv").read_text(encoding="utf-8") for name in ("whole", "killed")]
    rows = [
        len((args.out / name / "runs" / f"{encoding}-seed1" / "eval.jsonl").read_text(encoding="utf-8").splitlines())
        for name in ("whole", "killed")
        for encoding in ENCODINGS.split()
    ]
    print(tables[1], end="")
    print(f"lines of results: {rows}; tables {'are the same' if tables[0] == tables[1] else 'DIFFER'}")
    return int(tables[0] != tables[1] or len(set(rows)) != 1)


def command(args: argparse.Namespace, name: str) -> list[str]:
    program = [sys.executable, "-m", "fairseq_rpe.cli.main", "sweep", str(args.data), "--encodings", ENCODINGS]
    program += ["--lengths", args.lengths, "--tokens", "64", "--updates", str(args.updates), "--device", "cpu"]
    return [*program, "--out", str(args.out / name)]


def below(pid: int) -> list[int]:
    """All descendants of a process."""
    found = []
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = stat.read_text().rpartition(")")[2].split()
        except OSError:
            continue
        if int(fields[1]) == pid:
            found += [int(stat.parent.name), *below(int(stat.parent.name))]
    return found


if __name__ == "__main__":
    sys.exit(main())
