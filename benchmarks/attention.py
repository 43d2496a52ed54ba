"""Attention with a Toeplitz bias against attention without any, and with a dense bias.

    python benchmarks/attention.py                      # a few minutes on two cores
    python benchmarks/attention.py --lengths 512 2048

Every row alternates all ways in one process and reports medians as ratios to torch's own causal attention without a
bias, the limit. ``dense`` is scaled_dot_product_attention with an n×n bias per head (fixed ones exist already) and
``here`` the sdpa backend; backward includes the gradient of a learned table on both sides.
"""

from __future__ import annotations

import argparse
import csv
import os
import platform
import statistics
import time
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor
from torch.nn import functional as F
from tqdm import tqdm

from fairseq_rpe.attention import Plan, sdpa
from fairseq_rpe.core import Positions
from fairseq_rpe.encodings import build

OUT = Path(__file__).parent / "results" / "attention.csv"
HEADS, WIDTH = 8, 64
DENSE_LIMIT = 4096  # beyond it a dense bias with its gradient takes gigabytes


def dense_bias(table: Tensor) -> Tensor:
    """(H, n) -> (1, H, n, n) with -inf above the diagonal."""
    n = table.shape[1]
    distance = torch.arange(n)[:, None] - torch.arange(n)[None]
    return table[:, distance.clamp_min(0)].masked_fill(distance < 0, float("-inf"))[None]


def ways(n: int, learned: bool) -> dict[str, Callable[[], Tensor]]:
    """Functions that compute the attention output, by name."""
    torch.manual_seed(0)
    q, k, v = (torch.randn(1, HEADS, n, WIDTH, requires_grad=learned) for _ in range(3))
    encoding = build("kerple_log" if learned else "alibi", HEADS, HEADS * WIDTH)
    pos = Positions.arange(n)
    found = {
        "none": lambda: F.scaled_dot_product_attention(q, k, v, is_causal=True),
        "here": lambda: sdpa(q, k, v, Plan(pos, encoding.form(pos))),
    }
    if n <= DENSE_LIMIT:
        fixed = None if learned else dense_bias(encoding.form(pos).table)
        found["dense"] = lambda: F.scaled_dot_product_attention(
            q, k, v, attn_mask=dense_bias(encoding.form(pos).table) if fixed is None else fixed
        )
    return found


def measure(n: int, learned: bool, repeats: int) -> dict[str, float]:
    """Median seconds a way, all taken in turns; with ``learned`` forward and backward."""
    found = ways(n, learned)
    times: dict[str, list[float]] = {name: [] for name in found}
    for turn in range(repeats + 1):
        for name, way in found.items():
            start = time.perf_counter()
            out = way()
            if learned:
                out.sum().backward()
            if turn:
                times[name].append(time.perf_counter() - start)
    return {name: statistics.median(values) for name, values in times.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--lengths", type=int, nargs="+", default=[512, 2048, 8192])
    parser.add_argument("--repeats", type=int, default=7)
    args = parser.parse_args()
    rows = []
    for n, learned in tqdm([(n, learned) for n in args.lengths for learned in (False, True)]):
        seconds = measure(n, learned, args.repeats)
        rows.append(
            {
                "length": n,
                "what": "forward+backward, learned table" if learned else "forward, fixed bias",
                "none_ms": round(1000 * seconds["none"], 1),
                **{
                    f"{name}_ratio": round(seconds[name] / seconds["none"], 2)
                    for name in ("here", "dense")
                    if name in seconds
                },
            }
        )
        tqdm.write(str(rows[-1]))
    OUT.parent.mkdir(exist_ok=True)
    temporary = OUT.with_suffix(".tmp")
    with temporary.open("w", newline="") as file:
        file.write(
            f"# {platform.processor() or platform.machine()}, {os.cpu_count()} cores, torch {torch.__version__}, "
            f"{torch.get_num_threads()} threads, {HEADS} heads of {WIDTH}, float32, medians of {args.repeats}\n"
        )
        writer = csv.DictWriter(file, fieldnames=["length", "what", "none_ms", "here_ratio", "dense_ratio"])
        writer.writeheader()
        writer.writerows(rows)
    os.replace(temporary, OUT)
    print(f"wrote {OUT}")


if __name__ == "__main__":
    main()
