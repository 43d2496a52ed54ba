"""Time and peak memory of attention with position biases on a CPU, relative to attention without a bias.

    python benchmarks/attention.py --only toeplitz fire     # about ten minutes on two cores
    python benchmarks/attention.py --only pruned --checkpoint CHECKPOINT --data data-bin/stdlib

``none`` is torch's own causal attention without a bias, the limit, and ``here`` the sdpa backend. Parts:

- toeplitz: a fixed bias forward, a learned table forward and backward; ``dense`` is torch with an n×n bias per head.
- fire: forward with two hidden layers of 32; ``listing`` runs the network for every pair, as the published code does,
  at the longest of --lengths for which this machine has the memory.
- pruned: ALiBi forward on the queries and keys of a trained model that reads one long text, exact and with --eps; the
  heads of its layers side by side, the last eight of them. The error is the largest difference to the exact output.

A length's ways alternate in one process, and medians are reported. Memory is q, k and v and what a fresh process needs
beyond them at its peak.
"""

from __future__ import annotations

import argparse
import functools
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import machine
import torch
from torch import Tensor
from torch.nn import functional as F
from tqdm import tqdm

from fairseq_rpe.attention import AttentionPlan, sdpa
from fairseq_rpe.core import Positions
from fairseq_rpe.encodings import build

OUT = Path(__file__).parent / "results"
HEADS, WIDTH = 8, 64
LENGTHS = {"toeplitz": [512, 2048, 8192], "fire": [2048, 4096, 6144, 8192], "pruned": [8192, 32768]}
DENSE_LIMIT = 4096  # beyond it a dense bias with its gradient takes gigabytes
LISTING_BYTES = 2 * 32 * 4 + 48  # a pair: a layer's input and output, and the bias of all heads
Way = Callable[[], Tensor]


def dense_bias(table: Tensor) -> Tensor:
    """Return a Toeplitz bias table (H, n) as (1, H, n, n) with -inf above the diagonal."""
    n = table.shape[1]
    distance = torch.arange(n)[:, None] - torch.arange(n)[None]
    return table[:, distance.clamp_min(0)].masked_fill(distance < 0, float("-inf"))[None]


def toeplitz(n: int, learned: bool) -> dict[str, Way]:
    """Return functions that compute the attention output, by name; differentiable if ``learned``."""
    q, k, v = (torch.randn(1, HEADS, n, WIDTH, requires_grad=learned) for _ in range(3))
    encoding, pos = build("kerple_log" if learned else "alibi", HEADS, HEADS * WIDTH), Positions.arange(n)
    found = {
        "none": lambda: F.scaled_dot_product_attention(q, k, v, is_causal=True),
        "here": lambda: sdpa(q, k, v, AttentionPlan(pos, encoding.position_bias(pos))),
    }
    if n <= DENSE_LIMIT:
        fixed = None if learned else dense_bias(encoding.position_bias(pos).table)
        found["dense"] = lambda: F.scaled_dot_product_attention(
            q, k, v, attn_mask=dense_bias(encoding.position_bias(pos).table) if fixed is None else fixed
        )
    return found


def fire(n: int, listing: bool) -> dict[str, Way]:
    q, k, v = (torch.randn(1, HEADS, n, WIDTH) for _ in range(3))
    encoding, pos = build("fire", HEADS, HEADS * WIDTH), Positions.arange(n)

    def whole() -> Tensor:
        bias = encoding.bias(pos.q, pos.k)
        return F.scaled_dot_product_attention(
            q, k, v, attn_mask=bias.masked_fill_(torch.ones(n, n, dtype=torch.bool).triu_(1), float("-inf"))
        )

    found = {
        "none": lambda: F.scaled_dot_product_attention(q, k, v, is_causal=True),
        "here": lambda: sdpa(q, k, v, AttentionPlan(pos, encoding.position_bias(pos))),
    }
    return {**found, "listing": whole} if listing else found


def pruned(qkv: tuple[Tensor, Tensor, Tensor], eps: float) -> dict[str, Way]:
    q, k, v = qkv
    encoding, pos = build("alibi", HEADS, HEADS * q.shape[3]), Positions.arange(q.shape[2])
    return {
        "none": lambda: F.scaled_dot_product_attention(q, k, v, is_causal=True),
        "here": lambda: sdpa(q, k, v, AttentionPlan(pos, encoding.position_bias(pos))),
        "pruned": lambda: sdpa(q, k, v, AttentionPlan(pos, encoding.position_bias(pos), prune=eps)),
    }


@functools.cache
def trained(n: int, checkpoint: Path, data: Path) -> tuple[Tensor, Tensor, Tensor]:
    """Return q, k, v (1, HEADS, n, D) of a trained model on the first n tokens of the training split."""
    from fairseq_rpe.evaluation import log_to

    log_to(None)  # before fairseq is imported
    from fairseq_rpe.evaluation import loading
    from fairseq_rpe.evaluation.records import EvalOverrides

    model, task = loading.load_model(checkpoint, EvalOverrides(device="cpu"), data)
    heads: list[tuple[Tensor, ...]] = []

    def keep(q: Tensor, k: Tensor, v: Tensor, plan: AttentionPlan, dropout: float) -> Tensor:
        heads.append((q, k, v))
        return sdpa(q, k, v, plan, dropout)

    model.decoder.attend = keep
    model.decoder.extract_features(loading.read_stream(data, "train", task.source_dictionary, n)[None, :n])
    q, k, v = (torch.cat(parts, dim=1)[:, -HEADS:].contiguous() for parts in zip(*heads, strict=True))
    if q.shape[1] < HEADS:
        sys.exit(f"{checkpoint} has {q.shape[1]} heads in all its layers: {HEADS} are needed")
    return q, k, v


def ways(case: dict[str, Any], args: argparse.Namespace) -> dict[str, Way]:
    torch.manual_seed(0)
    n = case["length"]
    if case["part"] == "toeplitz":
        return toeplitz(n, case["backward"])
    if case["part"] == "fire":
        return fire(n, case["listing"])
    return pruned(trained(n, args.checkpoint, args.data), args.eps)


def cases(args: argparse.Namespace) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = []
    for part in args.only:
        lengths = sorted(args.lengths or LENGTHS[part])
        if part == "toeplitz":
            found += [{"part": part, "length": n, "backward": b} for n in lengths for b in (False, True)]
        elif part == "fire":
            most = max((n for n in lengths if LISTING_BYTES * n * n < 0.85 * machine.available()), default=0)
            found += [{"part": part, "length": n, "backward": False, "listing": n == most} for n in lengths]
        else:
            found += [{"part": part, "length": n, "backward": False} for n in lengths]
    return found


def run(way: Way, backward: bool) -> Tensor:
    if backward:
        out = way()
        out.sum().backward()
        return out.detach()
    with torch.no_grad():
        return way()


def measure(found: dict[str, Way], backward: bool, repeats: int) -> dict[str, list[float]]:
    """Return seconds of each implementation, timed in rotation after a warm-up; those above 20 s are run twice."""
    times: dict[str, list[float]] = {name: [] for name in found}
    for turn in range(repeats + 1):
        for name, way in found.items():
            if turn > 1 and times[name][0] > 20:
                continue
            start = time.perf_counter()
            run(way, backward)
            if turn:
                times[name].append(time.perf_counter() - start)
    return times


def peak(case: dict[str, Any], name: str, args: argparse.Namespace) -> None:
    """Print the peak memory in MiB of one implementation, including q, k and v; runs in a separate process."""
    with torch.set_grad_enabled(case["backward"]):
        way = ways(case, args)[name]
        small = ways({**case, "part": "toeplitz" if case["part"] == "pruned" else case["part"], "length": 600}, args)
    run(small.get(name, small["here"]), case["backward"])  # code is loaded on first use
    machine.reset_peak()
    before = machine.status("VmRSS")
    out = run(way, case["backward"])
    inputs = 3 * HEADS * case["length"] * out.shape[3] * out.element_size()
    print(json.dumps((machine.status("VmHWM") - before) / 1024 + inputs / 2**20))


def memory(case: dict[str, Any], name: str) -> float:
    command = [sys.executable, __file__, *sys.argv[1:], "--peak", json.dumps([case, name])]
    return float(subprocess.run(command, check=True, capture_output=True, text=True).stdout.splitlines()[-1])


def rows(case: dict[str, Any], args: argparse.Namespace) -> list[dict[str, Any]]:
    found = ways(case, args)
    times = measure(found, case["backward"], args.repeats)
    seconds = {name: statistics.median(values) for name, values in times.items()}
    peaks = {name: memory(case, name) for name in found}
    what = "forward+backward, learned table" if case["backward"] else "forward"
    result = []
    for name in found:
        row = {"length": case["length"], "what": what, "way": name, "ms": round(1000 * seconds[name], 1)}
        row |= {"ratio": round(seconds[name] / seconds["none"], 2), "peak_mib": round(peaks[name], 1)}
        row |= {"peak_ratio": round(peaks[name] / peaks["none"], 2)}
        if case["part"] == "pruned":
            row |= errors(args, case["length"]) if name == "pruned" else {"eps": "", "error": "", "bound": ""}
        result.append(row)
        tqdm.write(str(row))
    return result


def errors(args: argparse.Namespace, n: int) -> dict[str, str]:
    """Return the largest error, and the bound eps·(max v - min v) of the tightest component."""
    q, k, v = trained(n, args.checkpoint, args.data)
    found = pruned((q, k, v), args.eps)
    error = (run(found["pruned"], False) - run(found["here"], False)).abs().amax(2)
    bound = args.eps * (v.amax(2) - v.amin(2))
    return {"eps": f"{args.eps:g}", "error": f"{error.max():.2g}", "bound": f"{bound.min():.2g}"}


def write(part: str, lines: list[dict[str, Any]], args: argparse.Namespace) -> None:
    path = OUT / ("attention.csv" if part == "toeplitz" else f"attention-{part}.csv")
    head = f"{machine.processor()}, {os.cpu_count()} cores, load {os.getloadavg()[0]:.1f}, torch {torch.__version__}, "
    head += f"{args.threads} threads, {HEADS} heads, float32, medians of {args.repeats}"
    machine.write_csv(path, head, lines)
    print(f"wrote {path}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", choices=tuple(LENGTHS), default=list(LENGTHS))
    parser.add_argument("--lengths", type=int, nargs="+", help=f"default: {LENGTHS}")
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--threads", type=int, default=os.cpu_count())
    parser.add_argument("--checkpoint", type=Path, help="a trained model, for pruned")
    parser.add_argument("--data", type=Path, default=Path("data-bin/stdlib"), help="what it reads (%(default)s)")
    parser.add_argument("--eps", type=float, default=1e-6)
    parser.add_argument("--peak", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if "pruned" in args.only and args.checkpoint is None:
        parser.error("the part 'pruned' needs --checkpoint")
    torch.set_num_threads(args.threads)
    if args.peak:
        peak(*json.loads(args.peak), args)
        return
    found = cases(args)
    done: dict[str, list[dict[str, Any]]] = {part: [] for part in args.only}
    for case in tqdm(found):
        done[case["part"]] += rows(case, args)
    for part, lines in done.items():
        write(part, lines, args)


if __name__ == "__main__":
    main()
