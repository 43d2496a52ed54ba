"""Peak memory and time of attention with content-dependent biases, compared with dense implementations.

    python benchmarks/content.py --threads 2 --csv benchmarks/results/content.csv

Eight heads of 64, one text, causal, float32, forward and forward + backward (gradients of q, k, v and of what is
learned). "blocks" is this project's way: the bias is made for blocks of queries and again in the backward pass. "dense"
is the usual one: the n×n bias of each head, shifted as Music Transformer and Transformer-XL do it, added by torch's
attention; of encodings that change all scores, the n×n matrices of the reference. Memory is what a process of its own
needs at the peak of a step, inputs included, as a multiple of torch's causal attention without a bias in another
process; time is the median of --repeats, taken in turns in one process. A way that would need more memory than is
free is left out.
"""

from __future__ import annotations

import argparse
import csv
import multiprocessing
import statistics
import sys
from collections.abc import Callable
from pathlib import Path

import machine
import torch
from torch import Tensor
from torch.nn import functional as F

from fairseq_rpe.analysis.speed import time_interleaved
from fairseq_rpe.attention import BACKENDS
from fairseq_rpe.attention.forward import build_plan, compute_token_features, run_attention
from fairseq_rpe.attention.relative_shift import materialize_fast
from fairseq_rpe.core import Positions
from fairseq_rpe.encodings import build
from fairseq_rpe.utils.table import Cell, Table, TableRow

HEADS, WIDTH = 8, 64
NONE = "no bias"
SPECS = ["shaw", "shaw:values=true", "music", "transformer_xl", "deberta", "forgetting", "cope", "dape"]
COPIES = 8  # n×n matrices of all heads that a dense way may hold at once; those that change all scores hold more


def make_step(spec: str, way: str, n: int, training: bool) -> Callable[[], list[Tensor]]:
    """Return a function that computes the output and, in training, the gradients."""
    torch.manual_seed(0)
    q, k, v = (torch.randn(1, HEADS, n, WIDTH, requires_grad=training) for _ in range(3))
    grad, x = torch.randn(1, HEADS, n, WIDTH), torch.randn(1, n, HEADS * WIDTH)
    encoding = build("nope" if spec == NONE else spec, HEADS, HEADS * WIDTH, n)
    learned = [p for p in encoding.parameters() if p.requires_grad]
    future = torch.ones(n, n, dtype=torch.bool).triu_(1) if way == "dense" else None

    def attend() -> Tensor:
        if spec == NONE:
            return F.scaled_dot_product_attention(q, k, v, is_causal=True)
        pos = Positions.arange(n)
        plan = build_plan(encoding, pos, None, BACKENDS["sdpa" if way == "blocks" else "reference"])
        notes = compute_token_features(x, plan)
        if way == "blocks" or encoding.needs_all_scores:
            return run_attention(q, k, v, plan, 0.0, notes)
        form = encoding.content_bias(encoding.rotate(q, pos.q, pos), k, pos, notes)
        bias = materialize_fast(form, pos).float().masked_fill(future, float("-inf"))
        return F.scaled_dot_product_attention(q, k, v, attn_mask=bias)

    def step() -> list[Tensor]:
        with torch.set_grad_enabled(training):
            out = attend()
            if not training:
                return [out]
            return list(torch.autograd.grad(out, [q, k, v, *learned], grad, allow_unused=True, materialize_grads=True))

    return step


def needed(spec: str, way: str, n: int, training: bool, threads: int, found: multiprocessing.SimpleQueue) -> None:
    """Put the peak memory of a step in MiB into a queue, relative to the process before its inputs."""
    torch.set_num_threads(threads)
    make_step(spec, way, 256, training)()
    machine.reset_peak()
    before = machine.status("VmRSS")
    step = make_step(spec, way, n, training)
    step()
    found.put((machine.status("VmHWM") - before) / 1024)


def memory(*case: object) -> float:
    context = multiprocessing.get_context("spawn")
    queue = context.SimpleQueue()
    process = context.Process(target=needed, args=(*case, queue))
    process.start()
    process.join()
    if process.exitcode:
        raise SystemExit(f"the process that measures {case} ended with status {process.exitcode}")
    return queue.get()


def dense(spec: str, n: int) -> int:
    """Return the bytes that a dense implementation may need."""
    weighs = build(spec, HEADS, HEADS * WIDTH, n).needs_all_scores
    return COPIES * (1 + 3 * weighs) * 4 * HEADS * n * n


def measure(args: argparse.Namespace) -> list[dict[str, object]]:
    rows = []
    torch.set_num_threads(args.threads)
    for training in (False, True):
        for n in args.lengths:
            cases = [(NONE, "blocks"), *((spec, way) for spec in args.encodings for way in ("blocks", "dense"))]
            fit = [c for c in cases if c[1] == "blocks" or dense(c[0], n) < machine.available()]
            mib = {case: memory(*case, n, training, args.threads) for case in fit}
            timed = [case for case in fit if args.longest_dense >= n or case[1] == "blocks"]
            steps = {case: make_step(*case, n, training) for case in timed}
            time_interleaved(steps, 1, "cpu")  # the first call fetches memory and code
            seconds = {
                case: statistics.median(found) for case, found in time_interleaved(steps, args.repeats, "cpu").items()
            }
            for case in fit:
                rows.append(
                    {
                        "encoding": case[0],
                        "way": "torch" if case[0] == NONE else case[1],
                        "pass": "forward+backward" if training else "forward",
                        "length": n,
                        "mib": round(mib[case], 1),
                        "memory_ratio": round(mib[case] / mib[NONE, "blocks"], 2),
                        "ms": round(1000 * seconds[case], 2) if case in seconds else "",
                        "time_ratio": round(seconds[case] / seconds[NONE, "blocks"], 2) if case in seconds else "",
                    }
                )
                print(*rows[-1].values(), sep="\t", flush=True)
    return rows


def table(rows: list[dict[str, str]]) -> str:
    """Return a table of memory and time as multiples of attention without a bias."""
    columns = list(dict.fromkeys((row["pass"], row["length"]) for row in rows))
    lines = []
    for encoding, way in dict.fromkeys((row["encoding"], row["way"]) for row in rows if row["way"] != "torch"):
        own = {(r["pass"], r["length"]): r for r in rows if (r["encoding"], r["way"]) == (encoding, way)}
        cells = [
            Cell(f"{own[c]['memory_ratio']}, {own[c]['time_ratio'] or '–'}" if c in own else "left out")
            for c in columns
        ]
        lines.append(TableRow(f"`{encoding}`, {way}", cells))
    head = ["memory, time", *(f"{step} {int(n):,}" for step, n in columns)]
    return Table("", head, lines).to_markdown()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--encodings", nargs="+", default=SPECS)
    parser.add_argument("--lengths", nargs="+", type=int, default=[1024, 8192])
    parser.add_argument(
        "--longest-dense", type=int, default=2048, help="longest length of dense implementations, in tokens"
    )
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--csv", type=Path, default=Path("content.csv"))
    parser.add_argument("--table", action="store_true", help="print the CSV as Markdown without measuring")
    args = parser.parse_args()
    if not args.table:
        head = f"{machine.processor()}, {args.threads} threads, torch {torch.__version__}"
        machine.write_csv(args.csv, head, measure(args))
    with args.csv.open(newline="") as file:
        rows = list(csv.DictReader(line for line in file if not line.startswith("#")))
    print(table(rows))


if __name__ == "__main__":
    sys.exit(main())
