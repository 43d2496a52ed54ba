"""Cost of two threads while other processes run, by the time that waiting threads spin.

Other processes keep cores busy, each in a separate session like those of another user. Meanwhile a small transformer
block trains, forward and backward, in a separate process for each setting; the settings alternate. The script prints
the mean time of a step for three sizes: 1 × 64, 4 × 128 and 8 × 256 tokens. It prints the mean because most time is
lost in a few long waits, which a median hides. Run the script on an otherwise idle machine.

    python benchmarks/busy.py                 # with 0, 1 and 2 other processes; about 4 minutes
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


def print_step_times() -> None:
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
            start = time.perf_counter()
            y = functional.layer_norm(narrow(functional.gelu(wide(x))) + x, (128,))
            y = y.sum() + functional.scaled_dot_product_attention(q, q, q, is_causal=True).sum()
            y.backward()
            seconds.append(time.perf_counter() - start)
        print(1e3 * statistics.mean(seconds))


@contextlib.contextmanager
def busy_cores(others: int) -> Iterator[None]:
    """Run ``others`` processes that each keep a core busy inside a ``with`` block."""
    command = [sys.executable, "-c", "while True: pass"]
    processes = [subprocess.Popen(command, start_new_session=True) for _ in range(others)]
    try:
        yield
    finally:
        for process in processes:
            process.kill()


def measure(setting: dict[str, str]) -> list[float]:
    """Return milliseconds of a step of each size with the environment variables of a setting."""
    replaced = {"GOMP_SPINCOUNT", "OMP_WAIT_POLICY"}
    inherited = {name: value for name, value in os.environ.items() if name not in replaced}
    result = subprocess.run(
        [sys.executable, __file__, "--steps"],
        env={**inherited, "OMP_NUM_THREADS": "2", **setting},
        start_new_session=True,
        check=True,
        capture_output=True,
        text=True,
    )
    return [float(line) for line in result.stdout.split()]


def main() -> None:
    """Measure and print a table for each number of other processes."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--others", type=int, nargs="+", default=[0, 1, 2], help="numbers of other processes (default: 0 1 2)"
    )
    parser.add_argument(
        "--turns", type=int, default=3, help="processes per setting; their median is reported (default: 3)"
    )
    parser.add_argument("--out", type=Path, help="CSV file")
    parser.add_argument("--steps", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.steps:
        return print_step_times()
    sizes = [f"{batch} × {length}" for batch, length, _ in SIZES]
    head = f"{machine.processor()}, {os.cpu_count()} cores"
    print(f"{head}; mean milliseconds of a step")
    rows = []
    for others in args.others:
        with busy_cores(others):
            rounds = [{name: measure(setting) for name, setting in SETTINGS.items()} for _ in range(args.turns)]
        for name in SETTINGS:
            by_size = zip(*(milliseconds[name] for milliseconds in rounds), strict=True)
            medians = [f"{statistics.median(values):.2f}" for values in by_size]
            rows.append({"others": others, "setting": name, **dict(zip(sizes, medians, strict=True))})
            print(*rows[-1].values(), sep=" | ", flush=True)
    if args.out is not None:
        machine.write_csv(args.out, head, rows)


if __name__ == "__main__":
    main()
