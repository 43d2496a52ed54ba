"""Time of attention on a CPU relative to torch's causal attention without a bias: short texts, tables, FIRE.

    python benchmarks/attention_cpu.py                   # about two minutes on two cores
    python benchmarks/attention_cpu.py --threads 1 --only short

Every line takes turns with attention without a bias on the same queries, keys and values: medians of --repeats turns
after one that does not count, and in brackets the ratio of the shortest times, which a busy machine changes less.
A turn is as many calls as take a few hundredths of a second. Parts:

- short: a fixed bias at 64 and 128 tokens, in six layers that share it.
- learned: tables with their gradient, forward and backward.
- fire: two layers of 32, forward and forward with backward.
- decode: one step of decode.py's attention part at 4,096 cached keys, six layers, each with an encoding of its own
  where that is the encoding's default.

Heads of 64, float32. Nothing is written.
"""

from __future__ import annotations

import argparse
import os
import statistics
import time
from collections.abc import Callable
from functools import partial

import decode
import machine
import torch
from torch.nn import functional as F

from fairseq_rpe.attention import AttentionPlan, sdpa
from fairseq_rpe.core import Positions
from fairseq_rpe.encodings import build

WIDTH, KEYS, LAYERS = 64, 4096, 6
SECONDS = 0.03  # of a turn, at least
# encoding, batch, heads, tokens, whether to go backward
Case = tuple[str, int, int, int, bool]
SHORT: list[Case] = [("alibi", b, 8, n, back) for b, n in ((32, 64), (8, 128), (16, 128)) for back in (False, True)]
SHAPES = [(1, 12, 1536), (1, 8, 4096), (8, 8, 256), (32, 8, 64)]
LEARNED: list[Case] = [(spec, *shape, True) for shape in SHAPES for spec in ("kerple_log", "t5_bias")]
FIRE: list[Case] = [("fire", 1, 8, n, back) for n in (1536, 4096) for back in (False, True)]
PARTS = {"short": SHORT, "learned": LEARNED, "fire": FIRE, "decode": ["alibi", "fire", "xpos"]}
Way = Callable[[], object]


def ways(case: Case, layers: int = 1) -> tuple[Way, Way]:
    """Return attention without a bias and with the encoding's bias, in layers that share it."""
    spec, batch, heads, n, backward = case
    q, k, v = (torch.randn(batch, heads, n, WIDTH, requires_grad=backward) for _ in range(3))
    grad, positions = torch.randn_like(q), Positions.arange(n)
    encoding = build(spec, heads, heads * WIDTH, length=n)
    learned = [p for p in encoding.parameters() if p.requires_grad]

    def run(attend: Callable[[], list[torch.Tensor]], inputs: list[torch.Tensor]) -> None:
        with torch.set_grad_enabled(backward):
            outs = attend()
            if backward:
                torch.autograd.grad(outs, inputs, [grad] * layers, allow_unused=True)

    def plain() -> list[torch.Tensor]:
        return [F.scaled_dot_product_attention(q, k, v, is_causal=True) for _ in range(layers)]

    def biased() -> list[torch.Tensor]:
        plan = AttentionPlan(positions, encoding.position_bias(positions))
        return [sdpa(q, k, v, plan) for _ in range(layers)]

    return partial(run, plain, [q, k, v]), partial(run, biased, [q, k, v, *learned])


def decoding(spec: str) -> tuple[Way, Way]:
    return decode.Stack(KEYS, LAYERS).plain, decode.Stack(KEYS, LAYERS).encoded(spec)


def timed(way: Way, calls: int) -> float:
    """Return the seconds of one call."""
    start = time.perf_counter()
    for _ in range(calls):
        way()
    return (time.perf_counter() - start) / calls


def line(label: str, pair: tuple[Way, Way], repeats: int) -> str:
    for way in pair:
        way()
    calls = max(1, int(SECONDS / timed(pair[0], 1)))
    times = [[timed(way, calls) for way in pair] for _ in range(repeats + 1)][1:]
    none, here = zip(*times, strict=True)
    middle = statistics.median(none)
    ratio, least = statistics.median(here) / middle, min(here) / min(none)
    return f"{label:48} {1000 * middle:9.2f} ms {ratio:6.2f} ({least:.2f})"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", choices=tuple(PARTS), default=list(PARTS))
    parser.add_argument("--repeats", type=int, default=7, help="%(default)s")
    parser.add_argument("--threads", type=int, default=os.cpu_count(), help="%(default)s")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    torch.manual_seed(0)
    print(
        f"{machine.processor()}, {os.cpu_count()} cores, load {os.getloadavg()[0]:.1f}, torch {torch.__version__}, "
        f"{args.threads} threads, medians of {args.repeats}"
    )
    print(f"{'encoding, batch × heads × tokens':48} {'no bias':>12} {'ratio':>6} (of least times)")
    for part in args.only:
        for case in PARTS[part]:
            if part == "decode":
                with torch.no_grad():
                    print(line(f"{case}, a step at {KEYS} keys", decoding(case), args.repeats), flush=True)
            else:
                spec, batch, heads, n, backward = case
                label = f"{spec}, {batch} × {heads} × {n}, forward{' + backward' * backward}"
                print(line(label, ways(case, LAYERS if part == "short" else 1), args.repeats), flush=True)


if __name__ == "__main__":
    main()
