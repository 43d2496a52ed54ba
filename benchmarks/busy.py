"""Cost of two threads next to other processes, by the time that they spin while waiting.

Other processes, each in a session of its own as another user's are, keep cores busy; a small transformer block trains
beside them, forward and backward, in a process of its own for each setting and in turns. The mean time of a step is
printed, since what is lost is lost in few long waits that a median hides, for three sizes: 1 × 64, 4 × 128 and 8 × 256
tokens. Needs a machine that is idle otherwise.

    python benchmarks/busy.py                 # beside 0, 1 and 2 processes; about 4 minutes
    python benchmarks/busy.py --others 4 --turns 3 --out busy.csv
"""

from __future__ import annotations

import argparse
import contextlib
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import machine

SETTINGS = {
    "one thread": {"OMP_NUM_THREADS": "1"},
    "two, as the library has it": {},
    "two, GOMP_SPINCOUNT=1000": {"GOMP_SPINCOUNT": "1000"},
    "two, GOMP_SPINCOUNT=5000": {"GOMP_SPINCOUNT": "5000"},
    "two, GOMP_SPINCOUNT=20000": {"GOMP_SPINCOUNT": "20000"},
    "two, OMP_WAIT_POLICY=PASSIVE": {"OMP_WAIT_POLICY": "PASSIVE"},
}
SIZES = ((1, 64, 200), (4, 128, 100), (8, 256, 10))  # sentences, tokens, steps


def steps() -> None:
    """Print the mean milliseconds of a step of each size; runs in the measured process."""
    import torch
    from torch.nn import functional

    torch.manual_seed(0)
    wide, narrow = torch.nn.Linear(128, 512), torch.nn.Linear(512, 128)
    for batch, length, repeats in SIZES:
        x = torch.randn(batch * length, 128, requires_grad=True)
        q = torch.randn(batch, 4, length, 32, requires_grad=True)
        seconds = []
        for _ in range(repeats):
            begun = time.perf_counter()
            y = functional.layer_norm(narrow(functional.gelu(wide(x))) + x, (128,))
            y = y.sum() + functional.scaled_dot_product_attention(q, q, q, is_causal=True).sum()
            y.backward()
            seconds.append(time.perf_counter() - begun)
        print(1e3 * statistics.mean(seconds))


@contextlib.contextmanager
def load(others: int) -> Iterator[None]:
    """Keep as many cores as ``others`` busy."""
    command = [sys.executable, "-c", "while True: pass"]
    held = [subprocess.Popen(command, start_new_session=True) for _ in range(others)]
    try:
        yield
    finally:
        for process in held:
            process.kill()


def measure(setting: dict[str, str]) -> list[float]:
    """Return milliseconds of a step of each size with given environment variables."""
    spins = {"GOMP_SPINCOUNT", "OMP_WAIT_POLICY"}
    inherited = {name: value for name, value in os.environ.items() if name not in spins}
    done = subprocess.run(
        [sys.executable, __file__, "--steps"],
        env={**inherited, "OMP_NUM_THREADS": "2", **setting},
        start_new_session=True,
        check=True,
        capture_output=True,
        text=True,
    )
    return [float(line) for line in done.stdout.split()]


def main() -> None:
    """Measure and print a table for each number of other processes."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--others", type=int, nargs="+", default=[0, 1, 2], help="numbers of other processes (default: 0 1 2)"
    )
    parser.add_argument(
        "--turns", type=int, default=3, help="processes per setting, of which the median counts (default: 3)"
    )
    parser.add_argument("--out", type=Path, help="CSV file")
    parser.add_argument("--steps", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.steps:
        return steps()
    sizes = [f"{batch} × {length}" for batch, length, _ in SIZES]
    head = f"{machine.processor()}, {os.cpu_count()} cores"
    print(f"{head}; mean milliseconds of a step")
    rows = []
    for others in args.others:
        with load(others):
            turns = [{name: measure(setting) for name, setting in SETTINGS.items()} for _ in range(args.turns)]
        for name in SETTINGS:
            found = [f"{statistics.median(turn[name][at] for turn in turns):.2f}" for at in range(len(sizes))]
            rows.append({"others": others, "setting": name, **dict(zip(sizes, found, strict=True))})
            print(*rows[-1].values(), sep=" | ", flush=True)
    if args.out is not None:
        machine.write_csv(args.out, head, rows)


if __name__ == "__main__":
    main()
