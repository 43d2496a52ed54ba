"""Time and peak memory of attention with position biases on a CPU, relative to attention without a bias.

    python benchmarks/attention.py --only toeplitz fire     # about ten minutes on two cores
    python benchmarks/attention.py --only pruned --checkpoint CHECKPOINT --data data-bin/stdlib

``none`` is torch's causal attention without a bias, the baseline, and ``here`` the sdpa backend. Parts:

- toeplitz times a fixed bias (forward) and a learned table (forward + backward). ``dense`` is torch with an n×n bias
  per head.
- fire times the forward pass with two hidden layers of 32. ``listing`` runs the network for every pair, as the
  published code does, at the longest of --lengths for which this machine has the memory.
- pruned times ALiBi (forward) on the queries and keys of a trained model for one long text, exactly and with --eps. The
  heads are the last eight of all layers together. The error is the largest difference from the exact output.

All implementations at a length are timed in rotation in one process, and medians are reported. Memory includes q, k and
v and the peak that a fresh process needs beyond them.
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
from dataclasses import asdict, dataclass, replace
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
MAX_DENSE_LENGTH = 4096  # beyond it a dense bias with its gradient takes gigabytes
LISTING_BYTES = 2 * 32 * 4 + 48  # of a pair: a layer's input and output, and the bias of all heads
MAX_MEMORY_SHARE = 0.85  # of the available memory
CODE_LENGTH = 600  # tokens of a first call, which loads code before memory is measured
MAX_REPEATED_SECONDS = 20  # a call that takes longer is timed once
Calls = dict[str, Callable[[], Tensor]]  # implementation -> function that computes its output


@dataclass(frozen=True)
class Case:
    """What is compared at one length.

    Attributes:
        part: toeplitz, fire or pruned.
        length: number of tokens.
        backward: whether a learned table gets a gradient.
        with_listing: whether the published code of FIRE is timed too.
    """

    part: str
    length: int
    backward: bool = False
    with_listing: bool = False


def dense_bias(table: Tensor) -> Tensor:
    """Return a Toeplitz bias table (H, n) as (1, H, n, n) with -inf above the diagonal."""
    n = table.shape[1]
    distance = torch.arange(n)[:, None] - torch.arange(n)[None]
    return table[:, distance.clamp_min(0)].masked_fill(distance < 0, float("-inf"))[None]


def toeplitz_calls(n: int, learned: bool) -> Calls:
    """Return the calls with a Toeplitz bias; their outputs are differentiable if ``learned``."""
    q, k, v = (torch.randn(1, HEADS, n, WIDTH, requires_grad=learned) for _ in range(3))
    encoding, pos = build("kerple_log" if learned else "alibi", HEADS, HEADS * WIDTH), Positions.arange(n)
    calls = {
        "none": lambda: F.scaled_dot_product_attention(q, k, v, is_causal=True),
        "here": lambda: sdpa(q, k, v, AttentionPlan(pos, encoding.position_bias(pos))),
    }
    if n <= MAX_DENSE_LENGTH:
        fixed = None if learned else dense_bias(encoding.position_bias(pos).table)
        calls["dense"] = lambda: F.scaled_dot_product_attention(
            q, k, v, attn_mask=dense_bias(encoding.position_bias(pos).table) if fixed is None else fixed
        )
    return calls


def fire_calls(n: int, with_listing: bool) -> Calls:
    """Return the calls with FIRE's bias."""
    q, k, v = (torch.randn(1, HEADS, n, WIDTH) for _ in range(3))
    encoding, pos = build("fire", HEADS, HEADS * WIDTH), Positions.arange(n)

    def listing() -> Tensor:
        bias = encoding.bias(pos.q, pos.k)
        return F.scaled_dot_product_attention(
            q, k, v, attn_mask=bias.masked_fill_(torch.ones(n, n, dtype=torch.bool).triu_(1), float("-inf"))
        )

    calls = {
        "none": lambda: F.scaled_dot_product_attention(q, k, v, is_causal=True),
        "here": lambda: sdpa(q, k, v, AttentionPlan(pos, encoding.position_bias(pos))),
    }
    return {**calls, "listing": listing} if with_listing else calls


def pruned_calls(qkv: tuple[Tensor, Tensor, Tensor], eps: float) -> Calls:
    """Return the calls with ALiBi's bias, exact and pruned."""
    q, k, v = qkv
    encoding, pos = build("alibi", HEADS, HEADS * q.shape[3]), Positions.arange(q.shape[2])
    return {
        "none": lambda: F.scaled_dot_product_attention(q, k, v, is_causal=True),
        "here": lambda: sdpa(q, k, v, AttentionPlan(pos, encoding.position_bias(pos))),
        "pruned": lambda: sdpa(q, k, v, AttentionPlan(pos, encoding.position_bias(pos), prune=eps)),
    }


@functools.cache
def trained_qkv(n: int, checkpoint: Path, data: Path) -> tuple[Tensor, Tensor, Tensor]:
    """Return q, k, v (1, HEADS, n, D) of a trained model on the first n tokens of the training split."""
    from fairseq_rpe.evaluation import log_to

    log_to(None)  # before fairseq is imported
    from fairseq_rpe.evaluation import loading
    from fairseq_rpe.evaluation.records import EvalOverrides

    model, task = loading.load_model(checkpoint, EvalOverrides(device="cpu"), data)
    layers: list[tuple[Tensor, ...]] = []

    def record(q: Tensor, k: Tensor, v: Tensor, plan: AttentionPlan, dropout: float) -> Tensor:
        layers.append((q, k, v))
        return sdpa(q, k, v, plan, dropout)

    model.decoder.attend = record
    model.decoder.extract_features(loading.read_stream(data, "train", task.source_dictionary, n)[None, :n])
    q, k, v = (torch.cat(tensors, dim=1)[:, -HEADS:].contiguous() for tensors in zip(*layers, strict=True))
    if q.shape[1] < HEADS:
        sys.exit(f"{checkpoint} has {q.shape[1]} heads in all its layers: {HEADS} are needed")
    return q, k, v


def make_calls(case: Case, args: argparse.Namespace) -> Calls:
    """Return the calls of a case."""
    torch.manual_seed(0)
    if case.part == "toeplitz":
        return toeplitz_calls(case.length, case.backward)
    if case.part == "fire":
        return fire_calls(case.length, case.with_listing)
    return pruned_calls(trained_qkv(case.length, args.checkpoint, args.data), args.eps)


def list_cases(args: argparse.Namespace) -> list[Case]:
    """Return the cases of all parts and lengths."""
    cases: list[Case] = []
    for part in args.only:
        lengths = sorted(args.lengths or LENGTHS[part])
        if part == "toeplitz":
            cases += [Case(part, n, backward) for n in lengths for backward in (False, True)]
        elif part == "fire":
            memory = MAX_MEMORY_SHARE * machine.available()
            longest = max((n for n in lengths if LISTING_BYTES * n * n < memory), default=0)
            cases += [Case(part, n, with_listing=n == longest) for n in lengths]
        else:
            cases += [Case(part, n) for n in lengths]
    return cases


def run(call: Callable[[], Tensor], backward: bool) -> Tensor:
    """Compute the output and, with ``backward``, the gradients."""
    if backward:
        out = call()
        out.sum().backward()
        return out.detach()
    with torch.no_grad():
        return call()


def time_interleaved(calls: Calls, backward: bool, repeats: int) -> dict[str, list[float]]:
    """Return seconds of each call, timed in rotation after a warm-up; those above 20 s are timed once."""
    times: dict[str, list[float]] = {name: [] for name in calls}
    for repeat in range(repeats + 1):
        for name, call in calls.items():
            if repeat > 1 and times[name][0] > MAX_REPEATED_SECONDS:
                continue
            start = time.perf_counter()
            run(call, backward)
            if repeat:
                times[name].append(time.perf_counter() - start)
    return times


def print_peak(case: Case, name: str, args: argparse.Namespace) -> None:
    """Print the peak memory in MiB of one implementation, including q, k and v; runs in a separate process."""
    code_part = "toeplitz" if case.part == "pruned" else case.part  # pruned needs a trained model
    with torch.set_grad_enabled(case.backward):
        call = make_calls(case, args)[name]
        short_calls = make_calls(replace(case, part=code_part, length=CODE_LENGTH), args)
    run(short_calls.get(name, short_calls["here"]), case.backward)  # code is loaded on first use
    machine.reset_peak()
    before = machine.status("VmRSS")
    out = run(call, case.backward)
    inputs = 3 * HEADS * case.length * out.shape[3] * out.element_size()
    print(json.dumps((machine.status("VmHWM") - before) / 1024 + inputs / 2**20))


def measure_peak(case: Case, name: str) -> float:
    """Return what :func:`print_peak` prints in a new process."""
    command = [sys.executable, __file__, *sys.argv[1:], "--peak", json.dumps([asdict(case), name])]
    return float(subprocess.run(command, check=True, capture_output=True, text=True).stdout.splitlines()[-1])


def measure(case: Case, args: argparse.Namespace) -> list[dict[str, Any]]:
    """Measure a case and return a row for each implementation."""
    calls = make_calls(case, args)
    times = time_interleaved(calls, case.backward, args.repeats)
    seconds = {name: statistics.median(values) for name, values in times.items()}
    peaks = {name: measure_peak(case, name) for name in calls}
    passes = "forward+backward, learned table" if case.backward else "forward"
    rows = []
    for name in calls:
        row = {"length": case.length, "what": passes, "way": name, "ms": round(1000 * seconds[name], 1)}
        row |= {"ratio": round(seconds[name] / seconds["none"], 2), "peak_mib": round(peaks[name], 1)}
        row |= {"peak_ratio": round(peaks[name] / peaks["none"], 2)}
        if case.part == "pruned":
            row |= pruning_error(args, case.length) if name == "pruned" else {"eps": "", "error": "", "bound": ""}
        rows.append(row)
        tqdm.write(str(row))
    return rows


def pruning_error(args: argparse.Namespace, n: int) -> dict[str, str]:
    """Return the largest error, and the bound eps·(max v - min v) of the tightest component."""
    q, k, v = trained_qkv(n, args.checkpoint, args.data)
    calls = pruned_calls((q, k, v), args.eps)
    error = (run(calls["pruned"], False) - run(calls["here"], False)).abs().amax(2)
    bound = args.eps * (v.amax(2) - v.amin(2))
    return {"eps": f"{args.eps:g}", "error": f"{error.max():.2g}", "bound": f"{bound.min():.2g}"}


def write(part: str, rows: list[dict[str, Any]], args: argparse.Namespace) -> None:
    """Write the rows of a part."""
    path = OUT / ("attention.csv" if part == "toeplitz" else f"attention-{part}.csv")
    head = f"{machine.processor()}, {os.cpu_count()} cores, load {os.getloadavg()[0]:.1f}, torch {torch.__version__}, "
    head += f"{args.threads} threads, {HEADS} heads, float32, medians of {args.repeats}"
    machine.write_csv(path, head, rows)
    print(f"wrote {path}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", choices=tuple(LENGTHS), default=list(LENGTHS))
    parser.add_argument("--lengths", type=int, nargs="+", help=f"default: {LENGTHS}")
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--threads", type=int, default=os.cpu_count())
    parser.add_argument("--checkpoint", type=Path, help="a trained model, for pruned")
    parser.add_argument(
        "--data", type=Path, default=Path("data-bin/stdlib"), help="data of the checkpoint, for pruned (%(default)s)"
    )
    parser.add_argument("--eps", type=float, default=1e-6)
    parser.add_argument("--peak", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if "pruned" in args.only and args.checkpoint is None:
        parser.error("the part 'pruned' needs --checkpoint")
    torch.set_num_threads(args.threads)
    if args.peak:
        case, name = json.loads(args.peak)
        print_peak(Case(**case), name, args)
        return
    rows_of: dict[str, list[dict[str, Any]]] = {part: [] for part in args.only}
    for case in tqdm(list_cases(args)):
        rows_of[case.part] += measure(case, args)
    for part, rows in rows_of.items():
        write(part, rows, args)


if __name__ == "__main__":
    main()
