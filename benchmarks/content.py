"""Peak memory and time of attention with content-dependent biases and of PoPE, compared with dense implementations.

    python benchmarks/content.py --threads 2 --csv benchmarks/results/content.csv

Attention is causal in float32, with eight heads of 64 and one text. The script measures the forward pass, and forward +
backward with the gradients of q, k, v and of learned parameters. ``blocks`` is this project's implementation: it
computes the bias for blocks of queries, and again in the backward pass. ``dense`` is the usual implementation: torch's
attention with the n×n bias of each head, shifted as in Music Transformer and Transformer-XL. For encodings that change
all scores or replace q·k, and for PoPE, ``dense`` is the reference with its matrices.

Memory is the peak of a step in a separate process, inputs included, as a multiple of torch's causal attention without a
bias in another process. Time is the median of --repeats runs, timed in rotation in one process. An implementation that
would need more memory than is free is left out.
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
SPECS = ["pope", "shaw", "shaw:values=true", "music", "transformer_xl", "deberta", "forgetting", "cope", "dape"]
SPECS += ["dape:kernel=3", "grape_a", "grape_a:gate=both", "pairwise_forgetting", "stick_breaking", "selective"]
SPECS += ["selective:base=rope", "path", "path:gate=forget", "wall", "selective_rope", "grape_m"]
COPIES = 8  # n×n matrices of all heads that a dense implementation may store at once
COPIES_ALL_SCORES = 32  # the same where the encoding changes all scores
COPIES_PRODUCT = 4 * WIDTH  # the same where the definition of a product of queries and keys needs n·n·D numbers
CODE_LENGTH = 256  # tokens of a first step, which loads code before memory is measured


def make_step(spec: str, implementation: str, n: int, training: bool) -> Callable[[], list[Tensor]]:
    """Return a function that computes the output and, in training, the gradients."""
    torch.manual_seed(0)
    q, k, v = (torch.randn(1, HEADS, n, WIDTH, requires_grad=training) for _ in range(3))
    grad, x = torch.randn(1, HEADS, n, WIDTH), torch.randn(1, n, HEADS * WIDTH)
    encoding = build("nope" if spec == NONE else spec, HEADS, HEADS * WIDTH, n)
    parameters = [p for p in encoding.parameters() if p.requires_grad]
    future = torch.ones(n, n, dtype=torch.bool).triu_(1) if implementation == "dense" else None

    def attend() -> Tensor:
        if spec == NONE:
            return F.scaled_dot_product_attention(q, k, v, is_causal=True)
        pos = Positions.arange(n)
        plan = build_plan(encoding, pos, None, BACKENDS["sdpa" if implementation == "blocks" else "reference"])
        features = compute_token_features(x, plan)
        is_bias = encoding.has_content_bias and not encoding.needs_all_scores and not encoding.has_score_product
        if implementation == "blocks" or not is_bias:
            return run_attention(q, k, v, plan, 0.0, features)
        content_bias = encoding.content_bias(encoding.rotate(q, pos.q, pos), k, pos, features)
        bias = materialize_fast(content_bias, pos).float().masked_fill(future, float("-inf"))
        return F.scaled_dot_product_attention(q, k, v, attn_mask=bias)

    def step() -> list[Tensor]:
        with torch.set_grad_enabled(training):
            out = attend()
            if not training:
                return [out]
            inputs = [q, k, v, *parameters]
            return list(torch.autograd.grad(out, inputs, grad, allow_unused=True, materialize_grads=True))

    return step


def put_peak(
    spec: str, implementation: str, n: int, training: bool, threads: int, queue: multiprocessing.SimpleQueue
) -> None:
    """Put the peak memory of a step in MiB into a queue, relative to the process before its inputs."""
    torch.set_num_threads(threads)
    make_step(spec, implementation, CODE_LENGTH, training)()
    machine.reset_peak()
    before = machine.status("VmRSS")
    step = make_step(spec, implementation, n, training)
    step()
    queue.put((machine.status("VmHWM") - before) / 1024)


def measure_peak(spec: str, implementation: str, n: int, training: bool, threads: int) -> float:
    """Return what :func:`put_peak` measures, in a new process."""
    context = multiprocessing.get_context("spawn")
    queue = context.SimpleQueue()
    process = context.Process(target=put_peak, args=(spec, implementation, n, training, threads, queue))
    process.start()
    process.join()
    if process.exitcode:
        about = f"{spec}, {implementation}, {n} tokens"
        raise SystemExit(f"the process that measures {about} ended with status {process.exitcode}")
    return queue.get()


def predict_dense_bytes(spec: str, n: int) -> int:
    """Return the bytes that a dense implementation may need."""
    encoding = build(spec, HEADS, HEADS * WIDTH, n)
    copies = COPIES_ALL_SCORES if encoding.needs_all_scores else COPIES
    return (COPIES_PRODUCT if encoding.has_score_product else copies) * 4 * HEADS * n * n


def measure(args: argparse.Namespace) -> list[dict[str, object]]:
    """Measure all encodings, and return a row for each implementation, pass and length."""
    rows = []
    torch.set_num_threads(args.threads)
    for training in (False, True):
        for n in args.lengths:
            rows += measure_length(n, training, args)
    return rows


def measure_length(n: int, training: bool, args: argparse.Namespace) -> list[dict[str, object]]:
    """Measure the implementations of all encodings at one length, and print and return their rows."""
    baseline = NONE, "blocks"
    pairs = [baseline, *((spec, name) for spec in args.encodings for name in ("blocks", "dense"))]
    pairs = [pair for pair in pairs if pair[1] == "blocks" or predict_dense_bytes(pair[0], n) < machine.available()]
    peaks = {pair: measure_peak(*pair, n, training, args.threads) for pair in pairs}
    timed = [pair for pair in pairs if args.longest_dense >= n or pair[1] == "blocks"]
    steps = {pair: make_step(*pair, n, training) for pair in timed}
    time_interleaved(steps, 1, "cpu")  # the first call allocates memory and loads code
    times = time_interleaved(steps, args.repeats, "cpu")
    seconds = {pair: statistics.median(values) for pair, values in times.items()}
    rows = []
    for pair in pairs:
        encoding, implementation = pair
        rows.append(
            {
                "encoding": encoding,
                "implementation": "torch" if pair == baseline else implementation,
                "pass": "forward+backward" if training else "forward",
                "length": n,
                "mib": round(peaks[pair], 1),
                "memory_ratio": round(peaks[pair] / peaks[baseline], 2),
                "ms": round(1000 * seconds[pair], 2) if pair in seconds else "",
                "time_ratio": round(seconds[pair] / seconds[baseline], 2) if pair in seconds else "",
            }
        )
        print(*rows[-1].values(), sep="\t", flush=True)
    return rows


def format_table(rows: list[dict[str, str]]) -> str:
    """Return a Markdown table of memory and time as multiples of attention without a bias."""
    columns = list(dict.fromkeys((row["pass"], row["length"]) for row in rows))
    pairs = dict.fromkeys(_pair(row) for row in rows if row["implementation"] != "torch")
    lines = []
    for pair in pairs:
        by_column = {(row["pass"], row["length"]): row for row in rows if _pair(row) == pair}
        ratios = [by_column.get(column) for column in columns]
        cells = [Cell(f"{r['memory_ratio']}, {r['time_ratio'] or '–'}" if r else "left out") for r in ratios]
        encoding, implementation = pair
        lines.append(TableRow(f"`{encoding}`, {implementation}", cells))
    head = ["memory, time", *(f"{step} {int(n):,}" for step, n in columns)]
    return Table("", head, lines).to_markdown()


def _pair(row: dict[str, str]) -> tuple[str, str]:
    return row["encoding"], row["implementation"]


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
    print(format_table(rows))


if __name__ == "__main__":
    sys.exit(main())
