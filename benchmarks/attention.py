"""Attention with a Toeplitz bias against attention without any, and with a dense bias.

    python benchmarks/attention.py                      # a few minutes on two cores
    python benchmarks/attention.py --lengths 512 2048
    python benchmarks/attention.py --device cuda        # bfloat16, with the flex and triton backends beside

Every row alternates all ways in one process and reports medians as ratios to torch's own causal attention without a
bias, the limit. ``dense`` is scaled_dot_product_attention with an n×n bias per head (fixed ones exist already) and
``here`` the sdpa backend; backward includes the gradient of a learned table on both sides. The first turn is not
counted: compilers and tuners run in it.
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

from fairseq_rpe.attention import BACKENDS, Plan
from fairseq_rpe.core import Positions
from fairseq_rpe.encodings import build

RESULTS = Path(__file__).parent / "results"
HEADS, WIDTH = 8, 64
DTYPES = {"cpu": torch.float32, "cuda": torch.bfloat16}
COMPARED = ("here", "flex", "triton", "dense")
DENSE_LIMIT = 4096  # beyond it a dense bias with its gradient takes gigabytes


def dense_bias(table: Tensor) -> Tensor:
    """(H, n) -> (1, H, n, n) with -inf above the diagonal."""
    n = table.shape[1]
    at = torch.arange(n, device=table.device)
    distance = at[:, None] - at[None]
    return table[:, distance.clamp_min(0)].masked_fill(distance < 0, float("-inf"))[None]


def ways(n: int, learned: bool, device: str) -> dict[str, Callable[[], Tensor]]:
    """Functions that compute the attention output, by name."""
    torch.manual_seed(0)
    q, k, v = (torch.randn(1, HEADS, n, WIDTH).to(device, DTYPES[device]).requires_grad_(learned) for _ in range(3))
    encoding = build("kerple_log" if learned else "alibi", HEADS, HEADS * WIDTH).to(device)
    pos = Positions.arange(n, device=device)

    def through(backend: str) -> Callable[[], Tensor]:
        return lambda: BACKENDS[backend](q, k, v, Plan(pos, encoding.form(pos)))

    found = {
        "none": lambda: F.scaled_dot_product_attention(q, k, v, is_causal=True),
        "here": through("sdpa"),
        **({name: through(name) for name in ("flex", "triton")} if device == "cuda" else {}),
    }
    if n <= DENSE_LIMIT:
        fixed = None if learned else dense_bias(encoding.form(pos).table).to(q.dtype)
        found["dense"] = lambda: F.scaled_dot_product_attention(
            q, k, v, attn_mask=dense_bias(encoding.form(pos).table).to(q.dtype) if fixed is None else fixed
        )
    return found


def wait(device: str) -> None:
    """Until the device has done what it was given."""
    if device == "cuda":
        torch.cuda.synchronize()


def measure(n: int, learned: bool, repeats: int, device: str) -> dict[str, float]:
    """Median seconds a way, all taken in turns; with ``learned`` forward and backward."""
    found = ways(n, learned, device)
    times: dict[str, list[float]] = {name: [] for name in found}
    for turn in range(repeats + 1):
        for name, way in found.items():
            wait(device)
            start = time.perf_counter()
            out = way()
            if learned:
                out.sum().backward()
            wait(device)
            if turn:
                times[name].append(time.perf_counter() - start)
    return {name: statistics.median(values) for name, values in times.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--lengths", type=int, nargs="+", default=[512, 2048, 8192])
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--device", choices=list(DTYPES), default="cpu")
    args = parser.parse_args()
    rows = []
    for n, learned in tqdm([(n, learned) for n in args.lengths for learned in (False, True)]):
        seconds = measure(n, learned, args.repeats, args.device)
        rows.append(
            {
                "length": n,
                "what": "forward+backward, learned table" if learned else "forward, fixed bias",
                "none_ms": round(1000 * seconds["none"], 3 if args.device == "cuda" else 1),
                **{f"{name}_ratio": round(seconds[name] / seconds["none"], 2) for name in COMPARED if name in seconds},
            }
        )
        tqdm.write(str(rows[-1]))
    out = RESULTS / ("attention.csv" if args.device == "cpu" else "attention_cuda.csv")
    machine = platform.processor() or platform.machine()
    if args.device == "cuda":
        machine = f"{torch.cuda.get_device_name()}, {machine}"
    out.parent.mkdir(exist_ok=True)
    temporary = out.with_suffix(".tmp")
    with temporary.open("w", newline="") as file:
        file.write(
            f"# {machine}, {os.cpu_count()} cores, torch {torch.__version__}, {torch.get_num_threads()} threads, "
            f"{HEADS} heads of {WIDTH}, {str(DTYPES[args.device]).removeprefix('torch.')}, medians of {args.repeats}\n"
        )
        measured = [f"{name}_ratio" for name in COMPARED if any(f"{name}_ratio" in row for row in rows)]
        writer = csv.DictWriter(file, fieldnames=["length", "what", "none_ms", *measured])
        writer.writeheader()
        writer.writerows(rows)
    os.replace(temporary, out)
    print(f"wrote {out}")


if __name__ == "__main__":
    main()
